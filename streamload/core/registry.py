"""The registry of formats, schemes, frameworks and engines: ours in code, others' by entry points.

Each is a row: its name, the facts by which it is recognized, and the object to import when it is
met. A package adds one by an entry point that leads to a row::

    [project.entry-points."streamload.formats"]
    acme = "acme.rows:FORMAT"

The groups are ``streamload.formats``, ``streamload.schemes``, ``streamload.devices`` and
``streamload.engines``. Entry points are looked for when none of ours fits.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a registry; its name is unique there."""

    name: str


R = TypeVar("R", bound=Row)


class Registry(Mapping[str, R]):
    """Rows by name: `ours` in their order, then `others` of the group's entry points."""

    def __init__(self, group: str, kind: type[R], *ours: R) -> None:
        self.ours: Mapping[str, R] = {row.name: row for row in ours}
        self._group, self._kind = group, kind

    @cached_property
    def others(self) -> dict[str, R]:
        """Rows of other packages by name; a UserWarning names each entry point without one."""
        from importlib.metadata import entry_points  # with the search, tens of milliseconds

        found: dict[str, R] = {}
        for point in entry_points(group=self._group):
            try:
                row = point.load()
                if not isinstance(row, self._kind):
                    raise TypeError(f"it is no {self._kind.__name__}, but {type(row).__name__}")
                if row.name in self.ours or found.setdefault(row.name, row) is not row:
                    raise ValueError(f"there is another {row.name!r}")
            except Exception as error:  # loads that do not need it go on
                where = f"{self._group}: {point.name} = {point.value}"
                warnings.warn(f"cannot use the entry point {where}: {error}", stacklevel=2)
        return found

    def __getitem__(self, name: str) -> R:
        return self.ours[name] if name in self.ours else self.others[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.ours
        yield from self.others

    def __len__(self) -> int:
        return len(self.ours) + len(self.others)


@cache
def load(target: str) -> Any:
    """Import and return an object, "module:name", or a module."""
    module, _, name = target.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found
