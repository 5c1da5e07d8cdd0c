"""Selection of a checkpoint's tensors by patterns of their names."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Self

from streamload.core.system import bounded_child

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
    near = get_close_matches(str(name), names, 1)  # a dict's keys may be anything
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


# A regex of these matches in a time that is bounded by the product of the lengths.
_PLAIN = re.compile(r"(?:[\w.^-]|\\\.)*")
_QUICK_WORK = 10**7  # characters of patterns times those of names; 0.1 s
_MOST_SECONDS = 20.0
_MATCH = """
import json, re, sys

def first(name, patterns):
    return next((key for key, pattern in patterns if pattern.match(name)), None)

given = json.load(sys.stdin)
try:
    patterns = [(p, re.compile(rf"(.*\\.)?({p})$")) for p in given["patterns"]]
    found = [first(name, patterns) for name in given["names"]]
except BaseException as error:
    sys.exit(f"{type(error).__name__}: {str(error)[:200]}")
json.dump(found, sys.stdout)
"""


def ending_in(patterns: Sequence[str], names: Sequence[str]) -> list[str | None]:
    """Return for each name the first regex that matches its end from a dot on, as in peft.

    Regexes of untrusted files may take any time to match: all but plain ones are matched in a child
    process, for 20 seconds at most. Raises ValueError: a pattern is no regex, or they take too
    long; the message says which.
    """
    work = sum(map(len, patterns)) * sum(map(len, names))
    if work <= _QUICK_WORK and all(map(_PLAIN.fullmatch, patterns)):
        compiled = [(p, re.compile(rf"(.*\.)?({p})$")) for p in patterns]
        return [next((p for p, regex in compiled if regex.match(n)), None) for n in names]
    given = {"patterns": patterns, "names": names}
    try:
        done = bounded_child(_MATCH, given, _MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{len(patterns)} patterns are not matched with {len(names)} names in "
            f"{_MOST_SECONDS:g} s"
        ) from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["no memory"])[-1])
    found: list[str | None] = json.loads(done.stdout)
    return found


def _patterns(given: Patterns) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"a pattern of names is a string, not {pattern!r}")
    return patterns
