"""Records in columns: a load has many tensors, and looks at few of them one by one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, TypeVar, overload

_Row = TypeVar("_Row", covariant=True)


class Table(Sequence[_Row]):
    """Columns of one length. A row is made on demand."""

    __slots__ = ()

    @property
    @abstractmethod
    def _columns(self) -> tuple[Sequence[Any], ...]:
        """The arguments with which its class is called."""

    @abstractmethod
    def row(self, at: int) -> _Row:
        """Make one row."""

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, at: int) -> _Row: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> _Row | Self:
        return self.chosen(range(len(self))[at]) if isinstance(at, slice) else self.row(at)

    def chosen(self, places: Sequence[int]) -> Self:
        """The rows of these numbers, in this order."""
        return type(self)(*([column[at] for at in places] for column in self._columns))
