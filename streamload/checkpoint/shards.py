"""Reading shards block by block: each file is opened once, and threads share it.

Loads, gathered loads, conversions and comparisons open their files here. A block is a window of a
memory map, or is read into the calling thread's buffer (`Room`): the buffers bound the memory.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache as cached
from pathlib import Path
from typing import Self

from streamload.core.location import Location
from streamload.core.system import direct_memory, map_privately
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError
from streamload.files.folder import ReaderKind, ResolvedKind, open_reader, place_of
from streamload.files.header import FileState, Header, open_regular, unreadable
from streamload.files.page_cache import PageCache, ShardCache
from streamload.files.reader import Reader

#: Most bytes that a thread reads or writes at once (docs/measurements.md).
BLOCK_NBYTES = 2**22
#: Bytes of the page cache that the kernel reads ahead of a thread: 8 MiB twice on virtual disks.
AHEAD_NBYTES = 2**24

_WINDOW_NBYTES = 2**16  # below this, a read costs less than a window of a map
_CHECK_S = 0.05  # between two checks of all open files; each takes the interpreter's lock often
_PAGE = 4096  # no reader's alignment is larger than a page

#: Opens a shard with the reader that was chosen for it.
Opener = Callable[[Header, ResolvedKind], Reader]


def open_shard(header: Header, kind: ReaderKind | ResolvedKind = "pread") -> Reader:
    """Return an open reader of the file with this header; see `open_reader`."""
    return open_reader(
        header.path, header.file_nbytes, kind, header.state, header.views, header.parts
    )


def map_shard(header: Header) -> mmap.mmap:
    """Return a private copy-on-write map of a shard's file, for tensors that stay mapped."""
    assert isinstance(header.path, Path), header.path
    with open_regular(header.path) as file:
        try:
            if header.state is not None:
                header.state.check(FileState.of(file.fileno()), header.path)
            return map_privately(file)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            raise unreadable(header.path, error) from error


def cut(start: int, stop: int, step: int, base: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of a range's pieces, cut at ``base`` (None: start) plus whole steps."""
    base = start if base is None else base
    while start < stop:
        end = min(stop, start + step - (start - base) % step)
        yield start, end
        start = end


class Room:
    """One thread's buffer for blocks that are read instead of mapped; allocated on first use."""

    def __init__(self, block_nbytes: int, *, ahead: bool = False) -> None:
        """Prepare for blocks of at most ``block_nbytes``.

        With ``ahead``, fill the whole buffer if blocks are consecutive, and take the next blocks
        from it: HTTP requests and direct reads cost the same for a few bytes as for many.
        """
        self.block_nbytes = block_nbytes
        self._ahead = ahead
        self._memory: memoryview | None = None
        self._held: tuple[Location | None, int, int] = (None, 0, 0)  # file, start, stop in buffer
        self._last: tuple[Location | None, int] = (None, 0)  # file and end of the last block

    def read(self, reader: Reader, start: int, stop: int) -> memoryview:
        """Return bytes ``start`` to ``stop`` of a file, read-only; valid until the next call."""
        shard, first, last = self._held
        if shard != reader.path or not first <= start <= stop <= last:
            most = stop
            if self._ahead and self._last == (reader.path, start):
                most = min(max(start + self.block_nbytes, stop), reader.nbytes)
            try:
                self._fill(reader, start, most)
            except CheckpointError:
                if most == stop:
                    raise
                self._fill(reader, start, stop)  # the bytes ahead may be of another tensor
        self._last = (reader.path, stop)
        assert self._memory is not None, "after it was filled"
        first = self._held[1]
        return self._memory[start - first : stop - first].toreadonly()

    def _fill(self, reader: Reader, start: int, stop: int) -> None:
        """Read bytes ``start`` to ``stop`` of a file into the buffer, by whole blocks of a disk."""
        if self._memory is None:
            self._memory = direct_memory(self.block_nbytes + 2 * _PAGE)
        first = start // reader.alignment * reader.alignment
        last = round_up(stop, reader.alignment)
        self._held = (None, 0, 0)  # until it is read whole
        valid = reader.read_aligned(first, last, self._memory[: last - first])
        self._held = (reader.path, first, first + valid)


class Shards:
    """Opens, shares and closes the files of a checkpoint while they are read. Thread-safe."""

    def __init__(
        self,
        headers: Iterable[Header],
        kind: Callable[[Location], ResolvedKind],
        *,
        opener: Opener = open_shard,
        cache: PageCache | None = None,
        most_open: int | None = None,
        is_used: Callable[[Location], bool] = lambda shard: False,
        ahead: bool = True,
    ) -> None:
        """Prepare to open files; each is opened when it is first needed.

        ``kind`` is called once for each file. With ``most_open`` (None: any number) one more closes
        the file that was idle for longest, if any is; ``is_used``: whether a thread reads a file,
        besides those in a `block`. ``cache``: None to drop nothing. ``ahead``: see
        `Reader.stop_ahead`.
        """
        # number of closed files by the reason why they were not read as requested
        self.fallbacks: Counter[str] = Counter()
        self.page_cache = ""  # `PageCache.reason`, for a report; "" if the page cache was not used
        self._headers = {header.path: header for header in headers}
        self._kind = cached(kind)
        self._opener = opener
        self._cache = cache
        self._most_open, self._is_used = most_open, is_used
        self._blocks: Counter[Location] = Counter()  # that threads read now, by file
        self._ahead = ahead
        self._open: dict[Location, Reader] = {}  # the most recently used last
        self._caches: dict[Location, ShardCache] = {}
        self._stopped = False
        self._lock = threading.RLock()
        self._next_check_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_all()

    def reader(self, shard: Location) -> Reader:
        """Return the open reader of a shard; opens it if needed."""
        with self._lock:
            reader = self._open.pop(shard, None)
            if reader is None:
                if self._most_open is not None and len(self._open) >= self._most_open:
                    idle = (s for s in self._open if not (self._blocks[s] or self._is_used(s)))
                    if (oldest := next(idle, None)) is not None:
                        self.close(oldest)
                kind = self._kind(shard)
                reader = self._opener(self._headers[shard], kind)
                if not self._ahead:
                    reader.stop_ahead()
                if self._stopped:  # `stop` was called before this file was opened
                    reader.stop()
                # direct reads and reads from servers leave nothing in the page cache
                if kind == "cache" or (reader.has_file and (kind != "direct" or reader.fallback)):
                    self._open_cache(shard)
            self._open[shard] = reader
            return reader

    def _open_cache(self, shard: Location, *, is_own: bool = False) -> ShardCache | None:
        """Open the `ShardCache` of a file if it is on this machine, with the lock held."""
        path = place_of(shard)
        if self._cache is not None and isinstance(path, Path) and shard not in self._caches:
            self._caches[shard] = self._cache.open(path, is_own=is_own)
            self.page_cache = self._cache.reason
        return self._caches.get(shard)

    @contextmanager
    def block(
        self, shard: Location, start: int, stop: int, room: Room, tensor: str
    ) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop`` (exclusive) of a file, read-only, valid in the with.

        ``room`` is the calling thread's buffer, which holds one block at a time; ``tensor`` is the
        tensor's name, for errors that name none.
        """
        with self._lock:
            self._blocks[shard] += 1
        try:
            reader = self.reader(shard)
            if reader.mapped and stop - start >= _WINDOW_NBYTES:
                with reader.view(start, stop) as view:
                    yield view
            else:
                yield room.read(reader, start, stop)
        except CheckpointError as error:
            if error.tensor is not None:
                raise
            raise error.of_tensor(tensor) from error
        finally:
            with self._lock:
                self._blocks[shard] -= 1
        self.done(shard, start, stop)

    def blocks(self, info: TensorInfo, room: Room) -> Iterator[memoryview]:
        """Yield a tensor's bytes block by block, each valid until the next one; see `block`."""
        for start, stop in cut(info.start, info.stop, room.block_nbytes):
            with self.block(info.shard, start, stop, room, info.name) as data:
                yield data

    def done(self, shard: Location, start: int, stop: int) -> None:
        """Note that bytes were read and are no longer mapped: their pages may be dropped."""
        if cache := self._caches.get(shard):
            cache.done(start, stop)

    def drops(self, shard: Location) -> bool:
        """Return whether `done` drops pages of a shard; if not, it only counts bytes."""
        cache = self._caches.get(shard)
        if cache is None and self._kind(shard) == "cache":  # it was downloaded after it was opened
            with self._lock:
                cache = self._open_cache(shard, is_own=True)
        return cache is not None and cache.drops

    def check(self) -> None:
        """Raise CheckpointError if an open file has changed or a process waits to write to it."""
        # to call now and then while nothing is read; any thread may do so, and one in a while does
        now = time.monotonic()
        if now < self._next_check_s:
            return
        self._next_check_s = now + _CHECK_S
        with self._lock:
            shards = [*self._open]
        for shard in shards:
            with self._lock:  # for one file: others may want to open one
                reader = self._open.get(shard)
                if reader is not None:
                    try:
                        with reader.unchanged():
                            pass
                    except CheckpointError as error:
                        raise error.of_tensor(self._at_fault(shard, error)) from error

    def _at_fault(self, shard: Location, error: CheckpointError) -> str | None:
        end = error.found if isinstance(error.found, int) else 0
        tensors = self._headers[shard].tensors
        return next((info.name for info in tensors if info.stop > end), None)

    def stop(self) -> None:
        """Make all calls that wait for a server raise soon; any thread may call this."""
        with self._lock:
            self._stopped = True
            for reader in self._open.values():
                reader.stop()

    def close(self, shard: Location) -> None:
        """Close a file if it is open, and drop the rest of its pages."""
        with self._lock:
            reader = self._open.pop(shard, None)
            if reader is not None:
                reader.close()
                if reader.fallback:
                    self.fallbacks[reader.fallback] += 1
            if cache := self._caches.pop(shard, None):
                if self._stopped:  # threads may have read bytes without calling `done`
                    cache.done(0, self._headers[shard].file_nbytes)
                cache.close()

    def close_all(self) -> None:
        """Close every file, and drop the rest of their pages."""
        with self._lock:
            for shard in {**self._open, **self._caches}:
                self.close(shard)
