"""The page cache: the part of a file in it, and dropping the pages that a load brought in.

A load is right without this: pages stay if the system gives no information.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, get_args

from streamload.core.system import failure, libc, map_file
from streamload.core.units import format_bytes

PageCacheKind = Literal["auto", "keep", "drop"]

_PAGE = mmap.PAGESIZE

# A sample of a file: 64 windows of 16 pages, evenly spread, both ends among them; 4 MiB with pages
# of 4 KiB; shorter files are looked at whole (docs/measurements.md).
_SAMPLES = 64
_SAMPLE_NBYTES = 16 * _PAGE
_ASKED_NBYTES = 2**26  # by one mincore: a vector of 16 KiB with pages of 4 KiB

# Dropped at a time: a small part of any cgroup that a load runs in (docs/measurements.md).
_BLOCK_NBYTES = 2**24
# An earlier drop may have left blocks of 2 MiB at both ends: a window was still mapped.
_LAG_NBYTES = 2**22
# What the kernel reads before and after what was asked for: read_ahead_kb, which is 128 KiB on
# most disks and 8 MiB on some virtual ones, twice that for a file that is read in sequence.
_AROUND_NBYTES = 2**24
# Places where what was resident and what was not alternate; 2 MB of the heap at the most. A file
# in more pieces than this keeps what follows.
_MAX_RUNS = 2**14

#: Of "auto": beside what is read, this much stays free for the rest of the system (the kernel
#: reclaims from its low watermark on, about 1% of the memory, and reads ahead of all threads).
MARGIN_NBYTES = 2**28


def resident_fraction(file: str | os.PathLike[str] | int) -> float | None:
    """The fraction of a file in the page cache; takes about 0.7 ms for any length.

    It is 1 for an empty file, and None if the system does not say or there is no such file. Files
    of up to 4 MiB are looked at whole, longer ones in 64 samples. No byte is touched, unless the
    user neither owns the file nor may write it: mincore(2) would answer "all resident". There
    RWF_NOWAIT reads 64 single bytes; pages that it brings in are dropped again.
    """
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return None
        if isinstance(file, int):
            return _sampled(file)
        with _opened(file) as fd:
            return _sampled(fd)
    except (OSError, ValueError):  # ValueError: a name that no file can have
        return None


@contextmanager
def _opened(file: str | os.PathLike[str]) -> Iterator[int]:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


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
    """Whether mincore answers this process correctly for a file.

    Since Linux 5.2 it does for the file's owner and users that may write it (mm/mincore.c,
    can_do_mincore); for all others it answers that all of it is resident.
    """
    if sys.platform != "linux" or not hasattr(libc(), "mincore"):
        return False
    if os.fstat(fd).st_uid == os.geteuid():
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK, effective_ids=True)


def _resident_pages(fd: int, start: int, stop: int) -> bytes:
    """For each page from ``start`` (a multiple of the page) to ``stop``: 1 resident, 0 not.

    It maps the file and touches no page; raises OSError if the kernel refuses.
    """
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
    """`resident_fraction` by single bytes that are given only if no disk need be waited for."""
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return None
    # opened anew: the advice, against reading ahead of what is sampled, is for this use only
    with _opened(f"/proc/self/fd/{fd}") as own:
        os.posix_fadvise(own, 0, 0, os.POSIX_FADV_RANDOM)
        missed, byte = set(), bytearray(1)
        offsets = [i * (nbytes - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
        for offset in offsets:
            try:
                os.preadv(own, [byte], offset, nowait)
            except BlockingIOError:
                missed.add(offset)
        # A refused page is read all the same, in the background. Left there, it would mislead the
        # next question. A page that is being read cannot be dropped, so wait for all of them.
        for offset in missed:
            os.preadv(own, [byte], offset)
        for offset in missed:
            os.posix_fadvise(own, offset // _PAGE * _PAGE, _PAGE, os.POSIX_FADV_DONTNEED)
        return 1 - sum(offset in missed for offset in offsets) / _SAMPLES


def _absent_runs(fd: int) -> list[tuple[int, int]]:
    """The byte ranges of a file that are not in the page cache, in order, whole pages.

    About 9 ms per GB of a cold file. What is not known counts as resident, and so does what comes
    after the first `_MAX_RUNS` ranges. Where mincore does not say, one resident sample is enough
    to count the whole file as resident.
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
    """Drop the unmapped pages of a file within a range: only advice."""
    if not hasattr(os, "posix_fadvise"):
        return
    with suppress(OSError), _opened(path) as fd:
        os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_DONTNEED)


class PageCache:
    """Keeps or drops the pages that a load brings in. One for a load; safe for threads.

    - "drop": it is given back behind the cursor, and all of it when a shard is done with.
    - "keep": it stays, for the next load.
    - "auto": it is given back from the shard on at whose opening memory is short, which is when

          available - host memory still to be allocated < file bytes still to be read + margin

      with ``available`` the lesser of the system's MemAvailable and the room of the cgroup, both
      of which count file pages as free, since they can be reclaimed. So nothing is killed for
      them; but above this line each page that comes in takes another: first what others had in
      the cache, then what this load brought in itself, and it is reclaimed in the reading threads,
      within the cgroup, while the load allocates. Below it the whole file fits, and is there when
      it is loaded again.

    Pages that were resident before are never dropped; that is looked at when a shard is opened,
    before anything of it is read. Other readers of the file are not told apart.
    """

    def __init__(
        self,
        kind: PageCacheKind,
        *,
        to_read_nbytes: int,
        to_allocate_nbytes: int = 0,
        available: Callable[[], int | None],
    ) -> None:
        """Prepare for a load; raises ValueError for an unknown kind.

        ``available`` returns the bytes of host memory that the process can still take; None if
        unknown. It is called when a shard is opened.
        """
        if kind not in get_args(PageCacheKind):
            raise ValueError(
                f"unknown page_cache {kind!r}; known: {', '.join(get_args(PageCacheKind))}"
            )
        self.dropping = kind == "drop"  # decided so far
        # for a report; "" before the first shard
        self.reason = "" if kind == "auto" else f'page_cache="{kind}" was asked for'
        self._decided = kind != "auto"
        self._to_read_nbytes = to_read_nbytes
        self._to_allocate_nbytes = to_allocate_nbytes
        self._read_nbytes = 0
        self.dropped_nbytes = 0  # of the shards that are closed; each byte once
        self._available = available
        self._lock = threading.Lock()

    def open(self, path: Path) -> ShardCache:
        """Begin with a shard, before anything but its header is read; closed by the caller."""
        if not self._decided:
            self._decide()
        return ShardCache(path, self)

    def _decide(self) -> None:
        available = self._available()
        if available is None:
            self.reason = "kept: it is not known how much memory is free"
            return
        to_read = max(0, self._to_read_nbytes - self._read_nbytes)
        # memory is allocated in proportion to the bytes read
        to_allocate = self._to_allocate_nbytes * to_read // max(1, self._to_read_nbytes)
        needed = to_read + to_allocate + MARGIN_NBYTES
        # once short, always: pages that stay would push out those of others
        self.dropping = self._decided = available < needed
        self.reason = (
            f"{'dropped' if self.dropping else 'kept'}: {format_bytes(available)} of memory "
            f"available, {format_bytes(to_read)} to be read, {format_bytes(to_allocate)} to be "
            "allocated"
        )

    def count(self, *, read_nbytes: int = 0, dropped_nbytes: int = 0) -> None:
        """Count bytes that were read and dropped."""
        with self._lock:
            self._read_nbytes += read_nbytes
            self.dropped_nbytes += dropped_nbytes


class ShardCache:
    """One shard's part of a `PageCache`; drops bytes in blocks after they were read.

    Safe for threads. If nothing is to be dropped, its methods only count.
    """

    def __init__(self, path: Path, whole: PageCache) -> None:
        self._whole = whole
        self._lock = threading.Lock()
        self._absent: list[tuple[int, int]] = []  # before the load
        # [start, stop, dropped up to here], in order, apart from each other: as many as there are
        # threads that read, or ranges that the load takes of the file
        self._read: list[list[int]] = []
        self._fd = -1
        if not whole.dropping or not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError):  # reading the shard will raise it
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._absent = _absent_runs(self._fd)

    @property
    def drops(self) -> bool:
        """Whether some of the shard may be dropped; else it is all one which bytes were read."""
        return bool(self._absent)

    def done(self, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` (exclusive) were read, and no window shows them any more."""
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
        """Drop what is left, after the last window is closed; may be called twice."""
        with self._lock:
            for start, stop, _ in self._read:
                nbytes = sum(b - a for a, b in self._within(start, stop))
                self._whole.count(dropped_nbytes=nbytes)
                # once more all of it: some was mapped, and the kernel read around it
                self._drop(max(0, start - _AROUND_NBYTES), stop + _AROUND_NBYTES)
            self._read = []
            self._absent = []
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _add(self, start: int, stop: int) -> list[int]:
        """Join a range to those that it touches; bytes that it read again are not dropped yet."""
        first = bisect_left(self._read, start, key=lambda span: span[1])
        last = bisect_right(self._read, stop, key=lambda span: span[0])
        touched = self._read[first:last]
        # joined, only what was dropped from the first on without a gap counts as dropped
        dropped = touched[0][2] if touched and touched[0][0] <= start else start
        span = [
            min([start, *(other[0] for other in touched)]),
            max([stop, *(other[1] for other in touched)]),
            min(dropped, start),
        ]
        self._read[first:last] = [span]
        return span

    def _within(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The absent runs within a range, cut to whole pages of it."""
        first = bisect_right(self._absent, start, key=lambda run: run[1])
        last = bisect_left(self._absent, stop, key=lambda run: run[0])
        return [(max(a, start), min(b, stop)) for a, b in self._absent[first:last]]

    def _drop(self, start: int, stop: int) -> None:
        """Drop pages that were absent before; the kernel keeps partly covered ones."""
        for first, last in self._within(start, stop):
            with suppress(OSError):  # only advice
                os.posix_fadvise(self._fd, first, last - first, os.POSIX_FADV_DONTNEED)
