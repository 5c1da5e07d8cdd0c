"""The page cache: measure the part of a file in it, and drop the pages that a load brought in.

An optimization: pages are kept if the system gives no information.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from streamload.core.memory import available_host_nbytes
from streamload.core.system import Descriptor, failure, libc, map_file
from streamload.core.units import format_bytes
from streamload.errors import DeviceError

PageCacheKind = Literal["auto", "keep", "drop"]

_PAGE = mmap.PAGESIZE

# A sample of a file: 64 windows of 16 pages, evenly spread, both ends included, 4 MiB with pages
# of 4 KiB; shorter files are measured whole (docs/measurements.md).
_SAMPLES = 64
_SAMPLE_NBYTES = 16 * _PAGE
_ASKED_NBYTES = 2**26  # of one mincore call: a vector of 16 KiB with pages of 4 KiB

# Dropped at a time: a small part of any cgroup that a load runs in (docs/measurements.md).
_BLOCK_NBYTES = 2**24
# An earlier drop may have left blocks of 2 MiB at both ends: a window was still mapped.
_LAG_NBYTES = 2**22
# Bytes that the kernel reads around the requested ones: two windows of read_ahead_kb (128 KiB on
# most disks, 8 MiB on some virtual ones), each twice as long for sequential reads.
_AROUND_NBYTES = 2**25
# How long a close waits for pages that the kernel is still reading, and between two looks at them.
_MOST_WAIT_S = 0.1
_WAIT_S = 1e-3
_CACHESTAT = 451  # the number of this system call on every machine; Linux 6.5 and later
# Most absent ranges of a file that are remembered, 2 MB of the heap; bytes after them are kept.
_MAX_RUNS = 2**14

#: Free memory that "auto" leaves for the rest of the system: the kernel reclaims from its low
#: watermark on, about 1% of the memory, and reads ahead of all threads.
MARGIN_NBYTES = 2**28


def resident_fraction(file: str | os.PathLike[str] | int) -> float | None:
    """Return the fraction of a file in the page cache; takes about 0.7 ms for any length.

    The result is 1 for an empty file, and None if the system gives no information or there is no
    such file. Files of up to 4 MiB are measured whole, longer ones in 64 samples, by mincore(2),
    which touches no byte. If the user neither owns the file nor may write it, mincore would answer
    "all resident": then RWF_NOWAIT reads 64 single bytes; pages brought in by it are dropped again.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return None
        if isinstance(file, int):
            return _sampled(file)
        with Descriptor(file, os.O_RDONLY) as fd:
            return _sampled(fd)
    except (OSError, ValueError):  # ValueError: an impossible name
        return None


def is_resident(fd: int, start: int, stop: int) -> bool:
    """Whether all pages of a range of a file are in the page cache; ``start`` is that of a page.

    False where mincore(2) does not answer.
    """
    try:
        return _is_answered(fd) and 0 not in _resident_pages(fd, start, stop)
    except OSError:
        return False


def _sampled(fd: int) -> float | None:
    nbytes = os.fstat(fd).st_size
    if not nbytes:
        return 1.0
    if not _is_answered(fd):
        return _readable_at_once(fd, nbytes)
    if nbytes <= _SAMPLES * _SAMPLE_NBYTES:
        pages = _resident_pages(fd, 0, nbytes)
    else:
        most = nbytes - _SAMPLE_NBYTES
        starts = [i * most // (_SAMPLES - 1) // _PAGE * _PAGE for i in range(_SAMPLES)]
        pages = b"".join(_resident_pages(fd, start, start + _SAMPLE_NBYTES) for start in starts)
    return pages.count(1) / len(pages)


def _is_answered(fd: int) -> bool:
    """Return whether mincore(2) answers truly: the user owns the file or may write it."""
    # since Linux 5.2 all others get "all resident" (mm/mincore.c, can_do_mincore)
    if sys.platform != "linux" or not hasattr(libc(), "mincore"):
        return False
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _resident_pages(fd: int, start: int, stop: int) -> bytes:
    """Return a byte for each page from ``start`` (a page boundary) to ``stop``: 1 if resident."""
    # maps the file and touches no page
    nbytes = stop - start
    vector = (ctypes.c_ubyte * (-(-nbytes // _PAGE)))()
    address = map_file(fd, start, nbytes)
    try:
        if libc().mincore(address, nbytes, vector) != 0:
            raise failure()
    finally:
        libc().munmap(address, nbytes)
    return bytes(vector).translate(_LOWEST_BIT)  # the other bits are reserved (mincore(2))


_LOWEST_BIT = bytes(code & 1 for code in range(256))


def _readable_at_once(fd: int, nbytes: int) -> float | None:
    """Return the fraction of 64 single bytes that need no wait for a disk; None if unknown."""
    # used where mincore does not answer; unknown without RWF_NOWAIT
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return None
    # a descriptor of its own: the advice against reading ahead is for the samples only
    with Descriptor(f"/proc/self/fd/{fd}", os.O_RDONLY) as own:
        os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
        missed, byte = set(), bytearray(1)
        offsets = [i * (nbytes - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
        for offset in offsets:
            try:
                os.preadv(own, [byte], offset, nowait)
            except BlockingIOError:
                missed.add(offset)
        # A refused page is still read in the background, and would falsify the next measurement.
        # A page being read cannot be dropped, so wait for all of them.
        for offset in missed:
            os.preadv(own, [byte], offset)
        for offset in missed:
            os.posix_fadvise(own, offset // _PAGE * _PAGE, _PAGE, os.POSIX_FADV_DONTNEED)
        return 1 - sum(offset in missed for offset in offsets) / _SAMPLES


def _absent_runs(fd: int) -> list[tuple[int, int]]:
    """Return the byte ranges of a file that are not in the page cache, in order, whole pages.

    About 9 ms per GB of a cold file. Unknown bytes count as resident, and so do those after the
    first `_MAX_RUNS` ranges. Where mincore does not answer, one resident sample makes the whole
    file count as resident.
    """
    nbytes = os.fstat(fd).st_size
    if not nbytes:
        return []
    if not _is_answered(fd):
        return [(0, nbytes)] if _readable_at_once(fd, nbytes) == 0 else []
    runs: list[tuple[int, int]] = []
    for start in range(0, nbytes, _ASKED_NBYTES):
        pages = _resident_pages(fd, start, min(start + _ASKED_NBYTES, nbytes))
        first = pages.find(0)
        while first >= 0:
            last = pages.find(1, first)
            last = len(pages) if last < 0 else last
            run = (start + first * _PAGE, min(start + last * _PAGE, nbytes))
            if runs and runs[-1][1] == run[0]:
                runs[-1] = (runs[-1][0], run[1])
            elif len(runs) == _MAX_RUNS:
                return runs
            else:
                runs.append(run)
            first = pages.find(0, last)
    return runs


def drop_pages(path: Path, start: int, stop: int) -> None:
    """Advise the kernel to drop a file's unmapped pages from byte ``start`` to ``stop``."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), Descriptor(path, os.O_RDONLY) as fd:
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


def free_host_nbytes() -> int | None:
    """Return the host's free memory in bytes, page cache included; None if unknown."""
    try:
        return available_host_nbytes()
    except DeviceError:
        return None


def _cached_pages(fd: int, start: int, stop: int) -> int:
    """Return the pages of a byte range in the page cache; 0 if the kernel gives no count.

    Those that are still being read are counted, which mincore does not.
    """
    if sys.platform != "linux" or not hasattr(libc(), "syscall"):
        return 0
    span = (ctypes.c_uint64 * 2)(start, stop - start)
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, written back, evicted, recently evicted
    failed = libc().syscall(_CACHESTAT, fd, span, counts, 0)
    return 0 if failed else counts[0]


class PageCache:
    """Keeps or drops the pages that one load brings into the page cache. Thread-safe.

    - "drop": pages are dropped after they were read, and the rest when their shard is closed.
    - "keep": pages stay, for the next load.
    - "auto": pages are dropped from the first shard on at whose opening memory is short, that is if

          available - host memory still to be allocated < file bytes still to be read + margin

      with ``available`` the lesser of the system's MemAvailable and the free part of the cgroup,
      which both count file pages as free, since they can be reclaimed. Too many pages therefore
      kill no process, but each new page evicts another, first those of other processes, then this
      load's own, and the reading threads wait for that while the load allocates. With enough
      memory the whole file stays, for the next load. If a driver takes host memory that this
      process is not charged, pages are dropped in any case.

    Pages that were resident before are never dropped; that is measured when a shard is opened,
    before anything of it is read. Pages that the kernel still reads ahead 0.1 s after a shard was
    closed, or at once before Linux 6.5, stay. Pages that other processes read later may be dropped.
    """

    def __init__(
        self,
        kind: PageCacheKind,
        *,
        to_read_nbytes: int,
        to_allocate_nbytes: int = 0,
        driver: str = "",
        available: Callable[[], int | None] = free_host_nbytes,
    ) -> None:
        """Prepare for a load; raise ValueError for an unknown kind.

        ``to_read_nbytes`` are all file bytes that the load will read, ``to_allocate_nbytes`` all
        host bytes that it will allocate. ``driver`` names a device whose driver takes host memory;
        "" for none. ``available`` returns the host memory that is still free
        in bytes, None if unknown; `open` calls it.
        """
        if kind not in get_args(PageCacheKind):
            raise ValueError(
                f"unknown page_cache {kind!r}; known: {', '.join(get_args(PageCacheKind))}"
            )
        taken = kind == "auto" and driver != ""
        self.dropping = kind == "drop" or taken  # the decision so far
        # of the decision, for a report; "" before the first shard
        self.reason = "" if kind == "auto" else f'page_cache="{kind}" was asked for'
        if taken:  # the driver may fail to take memory of the page cache
            self.reason = f"dropped: the memory of {driver} is the host's"
        self._decided = kind != "auto" or taken
        self._to_read_nbytes = to_read_nbytes
        self._to_allocate_nbytes = to_allocate_nbytes
        self._read_nbytes = 0
        self.dropped_nbytes = 0  # of closed shards; each byte once
        self._available = available
        self._lock = threading.Lock()

    def open(self, path: Path, *, is_own: bool = False) -> ShardCache:
        """Return the `ShardCache` of a shard, before its data is read; the caller closes it.

        ``is_own``: this load wrote the file, so that all of its pages are the load's.
        """
        if not self._decided:
            self._decide()
        return ShardCache(path, self, is_own=is_own)

    def _decide(self) -> None:
        available = self._available()
        if available is None:
            self.reason = "kept: it is not known how much memory is free"
            return
        to_read = max(0, self._to_read_nbytes - self._read_nbytes)
        # memory is allocated in proportion to the bytes read
        to_allocate = self._to_allocate_nbytes * to_read // max(1, self._to_read_nbytes)
        needed = to_read + to_allocate + MARGIN_NBYTES
        # once short, always: pages that stay would evict those of other processes
        self.dropping = self._decided = available < needed
        self.reason = (
            f"{'dropped' if self.dropping else 'kept'}: {format_bytes(available)} of memory "
            f"available, {format_bytes(to_read)} to be read, {format_bytes(to_allocate)} to be "
            "allocated"
        )

    def count(self, *, read_nbytes: int = 0, dropped_nbytes: int = 0) -> None:
        """Add bytes to the load's two counts: file bytes read, and bytes dropped from the cache."""
        with self._lock:
            self._read_nbytes += read_nbytes
            self.dropped_nbytes += dropped_nbytes


class ShardCache:
    """Drops one shard's pages after they were read, or only counts bytes. Thread-safe."""

    def __init__(self, path: Path, whole: PageCache, *, is_own: bool = False) -> None:
        self._whole = whole
        self._is_own = is_own
        self._lock = threading.Lock()
        self._absent: list[tuple[int, int]] = []  # byte ranges not resident before the load
        # byte ranges read, as [start, stop, dropped up to here], in order and disjoint: as many as
        # reading threads, or as ranges that the load takes of the file
        self._read: list[list[int]] = []
        self._fd = -1
        if not whole.dropping or not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # reading the shard will raise the error
            self._own = Descriptor(path, os.O_RDONLY)
            self._fd = self._own.fd
            nbytes = os.fstat(self._fd).st_size
            self._absent = [(0, nbytes)] if is_own else _absent_runs(self._fd)

    @property
    def drops(self) -> bool:
        """Whether `done` may drop pages; if not, it only counts the bytes of its range."""
        return bool(self._absent)

    def done(self, start: int, stop: int) -> None:
        """Note that bytes ``start`` to ``stop`` (exclusive) were read and are no longer mapped."""
        self._whole.count(read_nbytes=stop - start)
        if not self._absent or start == stop:
            return
        with self._lock:
            span = self._add(start, stop)
            if span[1] - span[2] < _BLOCK_NBYTES:
                return
            first, last = max(span[0], span[2] - _LAG_NBYTES), span[1]
            span[2] = last
            self._drop(first, last)

    def close(self) -> None:
        """Drop the remaining pages, after the last window is closed; may be called twice."""
        with self._lock:
            if self._is_own and self._absent:
                os.fdatasync(self._fd)  # until then, written pages cannot be dropped
                self._add(*self._absent[0])
            # all of the ranges again: some was mapped, and the kernel read around them
            around: list[tuple[int, int]] = []
            for start, stop, _ in self._read:
                nbytes = sum(b - a for a, b in self._within(start, stop))
                self._whole.count(dropped_nbytes=nbytes)
                first = max(0, start - _AROUND_NBYTES)
                if around and first <= around[-1][1]:
                    first = around.pop()[0]
                around.append((first, stop + _AROUND_NBYTES))
            until = time.monotonic() + _MOST_WAIT_S
            while True:  # pages that are still being read cannot be dropped
                for start, stop in around:
                    self._drop(start, stop)
                runs = (run for start, stop in around for run in self._within(start, stop))
                cached = any(_cached_pages(self._fd, *run) for run in runs)
                if not cached or time.monotonic() > until:
                    break
                time.sleep(_WAIT_S)
            self._read = []
            self._absent = []
            if self._fd >= 0:
                self._fd = -1
                self._own.close()

    def _add(self, start: int, stop: int) -> list[int]:
        """Merge a range, read but not dropped, into `_read`; return [start, stop, end of drop]."""
        first = bisect_left(self._read, start, key=lambda span: span[1])
        last = bisect_right(self._read, stop, key=lambda span: span[0])
        touched = self._read[first:last]
        # of the merged range, only bytes dropped from its start on without a gap count as dropped
        dropped = touched[0][2] if touched and touched[0][0] <= start else start
        span = [
            min([start, *(other[0] for other in touched)]),
            max([stop, *(other[1] for other in touched)]),
            min(dropped, start),
        ]
        self._read[first:last] = [span]
        return span

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        first = bisect_right(self._absent, start, key=lambda run: run[1])
        last = bisect_left(self._absent, stop, key=lambda run: run[0])
        return [(max(a, start), min(b, stop)) for a, b in self._absent[first:last]]

    def _drop(self, start: int, stop: int) -> None:
        for first, last in self._within(start, stop):
            with suppress(OSError):  # only advice
                os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)
