"""The base classes of folders and of readers, and readers of several files or ranges as one.

Views are tensors whose elements are not contiguous in their file. Transposes, slices and expanded
elements have strides; several processes may have saved a tensor in chunks. These tensors get
virtual byte ranges after the file's end, where their elements are contiguous; a `StridedReader`
computes those bytes from the file's. So all code that reads ranges reads views like any tensor:
loads, conversions, comparisons, on this machine and over HTTP.
"""

from __future__ import annotations

import io
import math
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, Literal, Self, TypeAlias

import numpy as np

from streamload.core.dtypes import kind_of
from streamload.core.location import Location
from streamload.core.units import round_up
from streamload.files.header import Chunk, Part, View

Addresses: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


#: How a load reads files of the hub: by ranges, or after a download to the local cache.
Fetch = Literal["auto", "stream", "cache"]


class Reader(ABC):
    """One open shard, read by byte range. Any number of threads may use it at once.

    Close it after the calls of all threads. Subclasses implement `_read`. Reads raise
    TruncatedFileError or FileChangedError if the file has changed or another process waits to write
    to it, CheckpointError if the bytes cannot be read (the target's content is undefined then), and
    ValueError if the range is not within the file or the reader is closed.

    Attributes:
        path: the file.
        nbytes: the file's length in bytes, as its header has it.
        mapped: whether `view` is a window of a memory map, which takes no memory of the process.
        alignment: `read_aligned` takes multiples of it: a power of two up to the page, 1 for any.
            Constant while the reader is open, even if it falls back.
        has_file: whether `fileno` returns an open file on this machine.
        leased: whether a lease keeps writers from that file while a thread is in `unchanged`.
        fallback: why the file is not read as requested: a sentence, or "".
    """

    mapped = False
    alignment = 1
    has_file = False
    leased = False
    fallback = ""
    _how = "otherwise"  # how it is read if not from an open file, for messages

    def __init__(self, path: Location, file_nbytes: int) -> None:
        self.path = path
        self.nbytes = file_nbytes

    def view(self, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Return a context with bytes ``start`` to ``stop`` (exclusive), read-only, valid in it.

        Leaving the context raises as reads do, too.
        """
        self._check_range(start, stop)
        return self._filled(start, stop)

    @contextmanager
    def _filled(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop``, read into newly allocated memory."""
        window = memoryview(bytearray(stop - start))
        try:
            self.read_into(start, window)
            yield window.toreadonly()
        finally:
            with suppress(BufferError):  # the caller still refers to it
                window.release()

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` (writable, C-contiguous) with the file's bytes from ``start`` on."""
        self._check_range(start, start + out.nbytes)
        if out.nbytes:  # a memoryview of nothing cannot be cast
            with self.unchanged(), out.cast("B") as target:
                self._read(start, target, target.nbytes)

    def read_aligned(self, start: int, stop: int, out: memoryview) -> int:
        """Read bytes ``start`` to ``stop`` to the beginning of ``out`` without copy or allocation.

        The fastest read, for callers that own aligned memory and can over-read: round ``start``
        down and ``stop`` up to `alignment`, perhaps past the end of the file, and skip the rest.
        ``out`` is contiguous, its address a multiple of `alignment`, as any page; all of it may be
        overwritten.

        Returns the number of valid bytes: fewer than ``stop - start`` if the file ends before.
        """
        valid = min(stop, self.nbytes) - start
        self._check_range(start, start + valid)
        if out.nbytes < stop - start or stop - start - valid >= self.alignment:
            raise ValueError(
                f"{self.path}: bytes {start} to {stop} of its {self.nbytes} "
                f"cannot be read into {out.nbytes}"
            )
        if valid:
            with (
                self.unchanged(),
                out.cast("B") as target,
                target[: round_up(stop, self.alignment) - start] as part,
            ):
                self._read(start, part, valid)
        return valid

    def fileno(self) -> int:
        """Return the open file's descriptor, for callers that pread(2) from it themselves.

        Starts, lengths and addresses must be multiples of `alignment`. The descriptor changes at a
        `fallback`: after an EINVAL, read those bytes through the reader, which falls back if it has
        to, and call this again.

        Raises:
            io.UnsupportedOperation: there is no open file on this machine.
            ValueError: the reader is closed.
        """
        raise io.UnsupportedOperation(f"{self.path} is read {self._how}")

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        """Read consecutive bytes to at most 1024 memory addresses; return whether all came.

        If not, the memory's content is undefined. ``sizes``: bytes for each address.
        """
        return False

    def stop_ahead(self) -> None:  # noqa: B027
        """Disable reading ahead: bring only requested bytes into the page cache, few at a time.

        For hosts with little memory, as pages being read cannot be reclaimed. Call this before the
        first read.
        """

    def unchanged(self) -> AbstractContextManager[None]:
        """Return a context that detects changes, for reads from `fileno` or from a map of the file.

        Entering and leaving raise CheckpointError if the file has changed since its header was
        read, or another process waits to write to it. `view`, `read_into` and `read_aligned` enter
        the context themselves.
        """
        return nullcontext()

    def stop(self) -> None:  # noqa: B027
        """Make calls that wait for a server raise soon; any thread may call this.

        Reads of local files complete. The reader must still be closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        """Read ``nbytes`` > 0 from ``start`` on to ``target``, all of which may be overwritten."""

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.nbytes:
            raise ValueError(f"{self.path}: no bytes {start} to {stop} in its {self.nbytes}")


_MOST_OPEN = 256  # files that stay open; a process may have 1024


class PartsReader(Reader):
    """Reads files whose bytes follow each other; each is opened when it is first read."""

    _how = "together with other files"

    def __init__(self, parts: Sequence[Part], open_part: Callable[[Part], Reader]) -> None:
        self._stops = [*accumulate(part.nbytes for part in parts)]
        super().__init__(parts[0].path, self._stops[-1])
        self._parts, self._open_part = parts, open_part
        self._lock = threading.Lock()  # guards the three below
        self._open: dict[int, Reader] = {}
        self._exact = self._closed = False

    def stop_ahead(self) -> None:
        self._exact = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for reader in self._open.values():
                reader.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        stop, first = start + nbytes, start
        while first < stop:
            number = bisect_right(self._stops, first)
            end = min(stop, self._stops[number])
            before = self._stops[number] - self._parts[number].nbytes
            with self._opened(number) as reader, target[first - start : end - start] as part:
                reader.read_into(first - before, part)
            first = end

    @contextmanager
    def _opened(self, number: int) -> Iterator[Reader]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path}: its reader is closed")
            reader = self._open.get(number)
            if reader is None and len(self._open) < _MOST_OPEN:
                reader = self._open[number] = self._new(number)
        if reader is not None:
            yield reader
            return
        with self._new(number) as reader:
            yield reader

    def _new(self, number: int) -> Reader:
        reader = self._open_part(self._parts[number])
        if self._exact:
            reader.stop_ahead()
        return reader


_Array = np.ndarray[Any, Any]
#: The first and last index (exclusive) along each axis of a tensor.
_Box: TypeAlias = tuple[tuple[int, int], ...]

# Elements within this many bytes are read by one read, together with the bytes between them.
_SPAN_NBYTES = 2**20
# With a gap of more than this between lines of a file, one read for each line is faster.
_BETWEEN_NBYTES = 2**15
_STRIP = 64  # lines that are transposed together
_HELD = 3  # memory as a multiple of one read: its bytes, a copy, and heap overhead


def thread_nbytes(views: Iterable[View]) -> int:
    """Return the bytes that a thread needs to read views, without the target: 3 MB or less.

    Whole rows that follow each other in the file are read to their place.
    """
    chunks = (
        chunk
        for view in views
        for chunk in view.chunks
        if chunk.shape[1:] != view.shape[1:]
        or not _is_contiguous(chunk.shape, chunk.strides, view.itemsize)
    )
    extents = (zip(chunk.shape, chunk.strides, strict=True) for chunk in chunks)
    longest = max((sum((n - 1) * step for n, step in each) for each in extents), default=0)
    return _HELD * min(longest, _SPAN_NBYTES)


class StridedReader(Reader):
    """Reads a shard followed by the virtual ranges of its views; see `Reader`."""

    _how = "together with views of it"

    def __init__(self, reader: Reader, views: Sequence[View]) -> None:
        super().__init__(reader.path, views[-1].stop)
        self._reader = reader
        self._views = views
        self.fallback = reader.fallback

    def unchanged(self) -> AbstractContextManager[None]:
        return self._reader.unchanged()

    def stop_ahead(self) -> None:
        self._reader.stop_ahead()

    def stop(self) -> None:
        self._reader.stop()

    def close(self) -> None:
        self._reader.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        stop, own = start + nbytes, self._reader.nbytes
        if start < own:
            self._reader.read_into(start, target[: min(stop, own) - start])
        first = max(bisect_right(self._views, start, key=attrgetter("start")) - 1, 0)
        for view in islice(self._views, first, None):
            if view.start >= stop:
                break
            begin, end = max(start, view.start), min(stop, view.stop)
            if begin < end:
                part = target[begin - start : end - start]
                self._fill(view, begin - view.start, end - view.start, part)

    def _fill(self, view: View, begin: int, end: int, out: memoryview) -> None:
        """Fill ``out`` with bytes ``begin`` to ``end`` of a view; both may be inside an element."""
        n = view.itemsize
        first, last = begin // n, -(-end // n)
        whole = begin % n == 0 and end % n == 0
        made = np.frombuffer(out if whole else bytearray((last - first) * n), kind_of(n))
        at = 0
        for box in _boxes(view.shape, first, last):
            numel = math.prod(stop - start for start, stop in box)
            part = made[at : at + numel].reshape([stop - start for start, stop in box])
            at += numel
            for chunk in view.chunks:
                if box and chunk.origin[0] >= box[0][1]:
                    break
                self._fill_box(box, chunk, part)
        if view.shift:
            values = made.view("<f4")
            np.add(values, np.float32(view.shift), out=values)
        if not whole:
            out[:] = made.view(np.uint8).data[begin - first * n : end - first * n]

    def _fill_box(self, box: _Box, chunk: Chunk, out: _Array) -> None:
        """Fill the elements of ``out``, the values in a box of a view, that a chunk has."""
        start: tuple[Any, ...] = (...,)
        shape: tuple[int, ...] = ()
        at = chunk.at
        for (first, stop), origin, length, step in zip(
            box, chunk.origin, chunk.shape, chunk.strides, strict=True
        ):
            begin, end = max(first, origin), min(stop, origin + length)
            if begin >= end:
                return
            start += (slice(begin - first, end - first),)
            shape += (end - begin,)
            at += (begin - origin) * step
        self._gather(at, shape, chunk.strides, out[start])

    def _gather(
        self, at: int, shape: tuple[int, ...], strides: tuple[int, ...], out: _Array
    ) -> None:
        """Fill ``out`` with elements from file byte ``at`` on, in few reads; strides in bytes."""
        extents = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        span = sum(extents) + out.itemsize
        if out.flags.c_contiguous and _is_contiguous(shape, strides, out.itemsize):
            self._reader.read_into(at, out.reshape(-1).view(np.uint8).data)
            return
        axis = int(np.argmax(extents)) if extents else 0
        between = strides[axis] - (span - extents[axis]) if extents else 0
        apart = self._reader.has_file and between > _BETWEEN_NBYTES and shape[axis] > 1
        if span <= _SPAN_NBYTES and not apart:
            with self._reader.view(at, at + span) as data:
                _turn(np.ndarray(shape, out.dtype, data, 0, strides), out)
            return
        room = max(_SPAN_NBYTES - (span - extents[axis]), 0)
        step = 1 if apart else room // strides[axis] + 1
        for first in range(0, shape[axis], step):
            part = (slice(None),) * axis + (slice(first, first + step),)
            count = min(step, shape[axis] - first)
            inner = (*shape[:axis], count, *shape[axis + 1 :])
            self._gather(at + first * strides[axis], inner, strides, out[part])


def _turn(found: _Array, out: _Array) -> None:
    """Copy ``found`` to ``out`` of equal shape; fast also if ``found`` has transposed strides."""
    # lines a power of two apart share few sets of the CPU's cache: pack, then transpose strips
    lines = found.shape[-1] if found.ndim > 1 else 1
    if lines == 1 or found.strides[-1] <= found.itemsize or 0 in found.strides:
        out[...] = found
        return
    together = found.copy("K")
    for line in range(0, lines, _STRIP):
        out[..., line : line + _STRIP] = together[..., line : line + _STRIP]


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and stride != itemsize:
            return False
        itemsize *= n
    return True


def _boxes(shape: tuple[int, ...], first: int, stop: int) -> Iterator[_Box]:
    """Yield boxes of a tensor that cover elements ``first`` to ``stop``, in their order."""
    if not shape or (first == 0 and stop == math.prod(shape)):
        yield tuple((0, n) for n in shape)
        return
    row_numel = math.prod(shape[1:])
    begin, lead = divmod(first, row_numel)
    end, tail = divmod(stop, row_numel)

    def of_row(row: int, start: int, until: int) -> Iterator[_Box]:
        return (((row, row + 1), *box) for box in _boxes(shape[1:], start, until))

    if begin == end:
        yield from of_row(begin, lead, tail)
        return
    if lead:
        yield from of_row(begin, lead, row_numel)
        begin += 1
    if begin < end:
        yield ((begin, end), *((0, n) for n in shape[1:]))
    if tail:
        yield from of_row(end, 0, tail)
