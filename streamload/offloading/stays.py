"""Weights that cannot stream: found by passes, written as patterns for ``stay=``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

from streamload.core.patterns import matches
from streamload.errors import OffloadError

# What `fnmatch` reads as a pattern, and a number between the points of a name.
_SPECIAL = re.compile(r"([*?[])")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_NAMED = 4


class Stays:
    """The weights of a model that stream and should not, as passes have shown.

    A pass goes on to its end, so that it finds all of them; its output is not returned.
    """

    def __init__(self) -> None:
        self.streams: dict[str, str] = {}  # the name in errors, by each name of a weight
        self._kept: dict[str, str] = {}  # why each cannot stream, in any pass
        self._outside: dict[str, str] = {}  # the same, of this pass
        self.fine: set[str] = set()  # those that a layer computed with, and left as they are
        self._passes = 0

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Go on after a weight that cannot stream; raise OffloadError for all at the end."""
        self.check()
        if self._passes:  # inside of another
            yield
            return
        self._outside.clear()
        self.fine.clear()
        self._passes += 1
        try:
            yield
        except Exception as error:
            if not (self._kept or self._outside):
                raise
            raise self._error() from error
        finally:
            self._passes -= 1
        if self._kept or self._outside:
            raise self._error()

    def check(self) -> None:
        """Raise OffloadError if an earlier pass has shown that a weight cannot stream."""
        if self._kept and not self._passes:
            raise self._error()

    def cannot(self, name: str, reason: str, *, outside: bool = False) -> None:
        """A weight cannot stream: raise OffloadError, or at the end of the pass.

        If ``outside``, a module other than its layer used it, which another pass may not do.
        """
        (self._outside if outside else self._kept).setdefault(name, reason)
        if not self._passes:
            self.fine.clear()
            raise self._error()

    def _error(self) -> OffloadError:
        found = {**self._kept, **self._outside}
        quoted = [f'"{each}"' for each in patterns(found, self.streams, self.fine)]
        hint = quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
        (first, reason), *rest = found.items()
        if not self._passes:
            self._outside.clear()
        likewise = ", ".join(name for name, _ in rest[:_MOST_NAMED])
        if len(rest) > _MOST_NAMED:
            likewise += f" and {len(rest) - _MOST_NAMED} more"
        beside = f"; nor can {likewise} stream" if rest else ""
        return OffloadError(f"{first} {reason}{beside}: let the weight stay, with stay={hint}")


def patterns(found: Iterable[str], streams: Mapping[str, str], fine: Container[str]) -> list[str]:
    """Patterns of the weights that have to stay, one for a kind; ``fine`` ones can stream."""
    mine = {*found}
    out: list[str] = []
    for name in found:
        if matches(name, out):
            continue
        exact = _SPECIAL.sub(r"[\1]", name)
        kind = _NUMBER.sub("*", exact)
        others = {own for each, own in streams.items() if matches(each, [kind])} - mine
        out.append(exact if any(each in fine for each in others) else kind)
    return out
