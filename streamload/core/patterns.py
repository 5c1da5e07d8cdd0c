"""Selection of a checkpoint's tensors by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Self

#: One or several patterns of tensor names, in the syntax of `fnmatch.fnmatchcase`.
Patterns = str | Sequence[str]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches at least one glob pattern (case-sensitive)."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a glob pattern (case-sensitive) matches at least one name, or is "*"."""
    return pattern == "*" or any(fnmatchcase(name, pattern) for name in names)


def check_patterns(what: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for a pattern that matches no name; ``what`` is the option's name."""
    for pattern in patterns:
        if not fits(pattern, names):
            raise ValueError(f"{what}: no tensor's name matches {pattern!r}")


def check_names(what: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError, which suggests the nearest name, for a ``given`` name not in ``names``.

    ``what`` is the name of the option with the given names, for the error.
    """
    for name in given:
        if name not in names:
            said = f"{what}: no tensor's name matches {name!r}"
            raise ValueError(said + did_you_mean(name, names))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" for the nearest name; "" if none is near."""
    near = get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors that the options ``select`` and ``exclude`` choose by name."""

    select: tuple[str, ...] = ()  # patterns of names; all tensors if empty
    exclude: tuple[str, ...] = ()  # patterns of names that are left out of the selected ones

    @classmethod
    def parse(cls, select: Patterns = (), exclude: Patterns = ()) -> Self:
        """Make a selection from patterns; raises ValueError for a pattern that is not a string."""
        return cls(_patterns(select), _patterns(exclude))

    def check(self, names: Collection[str]) -> None:
        """Raise ValueError if a pattern matches none of ``names``, the names of all tensors."""
        check_patterns("select", self.select, names)
        check_patterns("exclude", self.exclude, names)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor of this name is selected."""
        selected = not self.select or matches(name, self.select)
        return selected and not matches(name, self.exclude)


def _patterns(given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"a pattern of names is a string, not {pattern!r}")
    return patterns
