"""Some of a checkpoint's tensors, by patterns of their names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Self

#: Patterns of tensor names, as `fnmatch.fnmatchcase` has them: one, or several.
Patterns = str | Sequence[str]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def fits(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches a name; "*" may match none."""
    return pattern == "*" or any(fnmatchcase(name, pattern) for name in names)


def check_patterns(what: str, patterns: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for a pattern that matches no name, as a slip does. "*" may match none."""
    for pattern in patterns:
        if not fits(pattern, names):
            raise ValueError(f"{what}: no tensor's name matches {pattern!r}")


def check_names(what: str, given: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError for a name that is none of ``names``, with the nearest that is."""
    for name in given:
        if name not in names:
            said = f"{what}: no tensor's name matches {name!r}"
            raise ValueError(said + did_you_mean(name, names))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of some names, as the end of a sentence; "" where none is near."""
    near = get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which tensors are meant."""

    select: tuple[str, ...] = ()  # patterns of their names; all tensors where there are none
    exclude: tuple[str, ...] = ()  # patterns of names that are left out of those

    @classmethod
    def parse(cls, select: Patterns = (), exclude: Patterns = ()) -> Self:
        """Read patterns; raises ValueError for one that is not a string."""
        return cls(_patterns(select), _patterns(exclude))

    def check(self, names: Collection[str]) -> None:
        """See `check_patterns`; ``names`` are all that there are."""
        check_patterns("select", self.select, names)
        check_patterns("exclude", self.exclude, names)

    def __contains__(self, name: str) -> bool:
        """Whether the tensor of this name is meant."""
        selected = not self.select or matches(name, self.select)
        return selected and not matches(name, self.exclude)


def _patterns(given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"a pattern of names is a string, not {pattern!r}")
    return patterns
