"""Which weights that stream have to stay: found by passes, written as patterns for ``stay=``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from streamload.core.patterns import matches
from streamload.errors import OffloadError

# What `fnmatch` reads as a pattern, and a number between the points of a name.
_SPECIAL = re.compile(r"([*?[])")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_NAMED = 4


class Stays:
    """The weights of a model that stream and cannot, as far as passes have shown.

    A pass goes on to its end, so that it finds all of them: what it computes is not returned.

    Attributes:
        streams: the names of all weights that stream; each may have several names.
    """

    def __init__(self) -> None:
        self.streams: dict[str, str] = {}  # the name in errors, by each name of a weight
        self._kept: dict[str, str] = {}  # why each cannot stream, whatever a pass does
        self._outside: dict[str, str] = {}  # the same, of this pass
        self._fine: set[str] = set()  # those that a layer computed with, and left as they are
        self._passes = 0

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Go on where a weight cannot stream, and raise at the end.

        Raises:
            OffloadError: some weights have to stay. Names all that the pass has shown.
        """
        self.check()
        if self._passes:  # inside of another
            yield
            return
        self._outside.clear()
        self._fine.clear()
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
        """Raise OffloadError where a pass before has shown that a weight cannot stream."""
        if self._kept and not self._passes:
            raise self._error()

    def fine(self, name: str) -> None:
        """A layer has computed with a weight, and left it as it is."""
        self._fine.add(name)

    def cannot(self, name: str, reason: str, *, outside: bool = False) -> None:
        """A weight cannot stream: raise OffloadError, or at the end of the pass.

        Args:
            name: of the weight.
            reason: of it, to go behind the name.
            outside: a module used it that is not its layer, which another pass may not do.
        """
        (self._outside if outside else self._kept).setdefault(name, reason)
        if not self._passes:
            self._fine.clear()
            raise self._error()

    @property
    def in_pass(self) -> bool:
        """Whether a pass goes on."""
        return bool(self._passes)

    def _error(self) -> OffloadError:
        found = {**self._kept, **self._outside}
        hint = written(patterns(found, self.streams, self._fine))
        (first, reason), *rest = found.items()
        if not self._passes:
            self._outside.clear()
        likewise = ", ".join(name for name, _ in rest[:_MOST_NAMED])
        if len(rest) > _MOST_NAMED:
            likewise += f" and {len(rest) - _MOST_NAMED} more"
        beside = f"; nor can {likewise} stream" if rest else ""
        return OffloadError(f"{first} {reason}{beside}: let the weight stay, with stay={hint}")


def patterns(found: Iterable[str], streams: Mapping[str, str], fine: Container[str]) -> list[str]:
    """Patterns of names that say which weights stay: those of a kind as one.

    Args:
        found: the weights that have to stay.
        streams: all that stream: the name in ``found``, by each of their names.
        fine: those that a layer computed with and that can stream.
    """
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


def written(found: Sequence[str]) -> str:
    """Patterns as Python writes them."""
    quoted = [f'"{each}"' for each in found]
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
