"""Some of a checkpoint's tensors, by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

#: Patterns of tensor names, as `fnmatch.fnmatchcase` has them: one, or several.
Patterns = str | Sequence[str]


def check_patterns(what: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Hold every pattern to match something: one that does not is a slip of the pen.

    Raises:
        ValueError: a pattern matches none of the names; "*" may, of none.
    """
    for pattern in patterns:
        if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{what}: no tensor's name matches {pattern!r}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are meant.

    Attributes:
        select: those whose name matches one of these patterns; all where there are none.
        exclude: of those, not those whose name matches one of these.
    """

    select: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def parse(cls, select: Patterns = (), exclude: Patterns = ()) -> Self:
        """Read patterns.

        Raises:
            ValueError: one is not a string.
        """
        return cls(_patterns(select), _patterns(exclude))

    def check(self, names: Collection[str]) -> None:
        """Hold every pattern to match something: one that does not is a slip of the pen.

        Args:
            names: all that there are.

        Raises:
            ValueError: a pattern matches none of them.
        """
        check_patterns("select", self.select, names)
        check_patterns("exclude", self.exclude, names)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor of this name is meant."""
        selected = not self.select or any(fnmatchcase(name, p) for p in self.select)
        return selected and not any(fnmatchcase(name, p) for p in self.exclude)


def _patterns(given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"a pattern of names is a string, not {pattern!r}")
    return patterns
