"""Limits on the size of headers: the formats' own, or a user's lower ones for untrusted files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields

from streamload.core.location import Location
from streamload.errors import HeaderError
from streamload.files.header import MAX_HEADER_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for opening a checkpoint from an untrusted source.

    Opening reads headers alone; its time and memory are proportional to their bytes. Without
    limits, each header may have 100 MB.

    Attributes:
        header_nbytes: most bytes of all headers and other JSON (config.json, an index) together;
            None for 100 MB of each.
        tensors: most tensors of all files together; None for any number.
    """

    header_nbytes: int | None = None
    tensors: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"Limits: {each.name} is an integer of 0 or more, not {value!r}")


@dataclass(slots=True)
class _Count:
    """Header bytes and tensors counted so far; a file that is read again counts once."""

    limits: Limits
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by file and part
    tensors: Counter[str] = field(default_factory=Counter)  # by file
    all_nbytes: int = 0  # the sums, kept since there may be very many files
    all_tensors: int = 0


_count: ContextVar[_Count | None] = ContextVar("limits", default=None)


@contextmanager
def limited(limits: Limits | None) -> Iterator[None]:
    """Apply ``limits`` to all headers read in the block; None applies the formats' own."""
    before = _count.set(None if limits is None else _Count(limits))
    try:
        yield
    finally:
        _count.reset(before)


def most_nbytes(path: Location, what: str = "") -> int:
    """Return the most bytes that a file's header, or its part ``what``, may have by the limits."""
    count = _count.get()
    if count is None or count.limits.header_nbytes is None:
        return MAX_HEADER_NBYTES
    others = count.all_nbytes - count.nbytes[str(path), what]
    return max(min(MAX_HEADER_NBYTES, count.limits.header_nbytes - others), 0)


def check_nbytes(path: Location, problem: str, nbytes: int, what: str = "") -> None:
    """Count bytes of a header to parse; raise HeaderError, with ``problem``, above the limits."""
    most = most_nbytes(path, what)
    if nbytes > most:
        limit = "" if most == MAX_HEADER_NBYTES else ", by limits="
        raise HeaderError(path, problem, f"at most {most} bytes{limit}", nbytes)
    if (count := _count.get()) is not None:
        count.all_nbytes += nbytes - count.nbytes[str(path), what]
        count.nbytes[str(path), what] = nbytes


def check_tensors(path: Location, tensors: int) -> None:
    """Count a file's tensors; raise HeaderError if all files have more than the limit."""
    count = _count.get()
    if count is None or count.limits.tensors is None:
        return
    count.all_tensors += tensors - count.tensors[str(path)]
    count.tensors[str(path)] = tensors
    if count.all_tensors > count.limits.tensors:
        expected = f"at most {count.limits.tensors}, by limits="
        raise HeaderError(path, "there are too many tensors", expected, count.all_tensors)
