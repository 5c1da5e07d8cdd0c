"""Collect weights that prove unable to stream in a pass; suggest ``stay=`` patterns of them."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

from streamload.core.patterns import matches
from streamload.errors import OffloadError

# Characters that are special in patterns of `fnmatch`; a number between the points of a name.
_SPECIAL = re.compile(r"([*?[])")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_NAMED = 4


class Stays:
    """Collects weights that passes show to be unable to stream, and raises one error for all.

    A pass goes on to its end, to find all of them; then it raises in place of returning its output.
    """

    def __init__(self) -> None:
        self.streams: dict[str, str] = {}  # by each name of a weight, its name in errors
        self._kept: dict[str, str] = {}  # by weight, why it cannot stream in any pass
        self._outside: dict[str, str] = {}  # by weight, why it cannot stream in this pass
        self.fine: set[str] = set()  # weights that a layer used in this pass, and left unchanged
        self._passes = 0  # passes under way, one inside the other

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Wrap a pass: raise OffloadError at its end for all weights that cannot stream."""
        self.check()
        if self._passes:  # a pass inside of another
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
        """Raise OffloadError if an earlier pass has shown that weights cannot stream."""
        if self._kept and not self._passes:
            raise self._error()

    def cannot(self, name: str, reason: str, *, outside: bool = False) -> None:
        """Note why a weight cannot stream: raises OffloadError now, or in a pass at its end.

        ``outside``: a module outside of the weight's layer used it, an error in this pass only.
        """
        (self._outside if outside else self._kept).setdefault(name, reason)
        if not self._passes:
            self.fine.clear()
            raise self._error()

    def _error(self) -> OffloadError:
        found = {**self._kept, **self._outside}
        quoted = [f'"{each}"' for each in _patterns(found, self.streams, self.fine)]
        hint = quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
        (first, reason), *rest = found.items()
        if not self._passes:
            self._outside.clear()
        likewise = ", ".join(name for name, _ in rest[:_MOST_NAMED])
        if len(rest) > _MOST_NAMED:
            likewise += f" and {len(rest) - _MOST_NAMED} more"
        beside = f"; nor can {likewise} stream" if rest else ""
        return OffloadError(f"{first} {reason}{beside}: let the weight stay, with stay={hint}")


def _patterns(found: Iterable[str], streams: Mapping[str, str], fine: Container[str]) -> list[str]:
    """Return patterns of names that match the weights ``found``, for ``stay=``.

    A pattern has "*" for numbers, unless that matches a weight of ``fine``, which can stream.
    ``streams``: by each name of a weight, its name in errors.
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
