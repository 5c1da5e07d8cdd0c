"""`Table`: records as columns, since a load has many tensors and rarely needs single objects."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self, TypeVar, overload

_Row = TypeVar("_Row", covariant=True)


class Table(Sequence[_Row]):
    """A sequence of records, stored as columns of one length; a row becomes an object on demand."""

    __slots__ = ()

    @property
    @abstractmethod
    def _columns(self) -> tuple[Sequence[Any], ...]:
        """The columns, as arguments of the class."""

    @abstractmethod
    def row(self, at: int) -> _Row:
        """Return the record of index ``at``."""

    def __len__(self) -> int:
        return len(self._columns[0])

    @overload
    def __getitem__(self, at: int) -> _Row: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> _Row | Self:
        return self.row(at) if isinstance(at, int) else self.chosen(range(len(self))[at])

    def chosen(self, places: Sequence[int]) -> Self:
        """Return a table of the rows of these indices, in this order."""
        return type(self)(*([column[at] for at in places] for column in self._columns))
