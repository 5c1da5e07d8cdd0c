"""Ranges of files in the page cache, locked for a CUDA device, which copies from them itself.

What is read again in each pass then needs no thread and no staging: see docs/measurements.md, "Page
cache that is locked". The pages are mapped read-only and registered (CUDA driver API,
cuMemHostRegister with CU_MEMHOSTREGISTER_READ_ONLY). The CPU touches no byte of them, so that a
file that becomes shorter is no SIGBUS. A lease has to keep writers from the file until the copies
have ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from streamload.core.memory import LOCKED
from streamload.core.system import filesystem_in_memory, libc, map_file
from streamload.core.units import round_up
from streamload.devices.base import ReadTable
from streamload.devices.cuda import Context, _driver, allow_captures
from streamload.errors import DeviceError
from streamload.files.page_cache import is_resident

_FLAGS = 9  # CU_MEMHOSTREGISTER_READ_ONLY and _PORTABLE
_IS_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_GAP_NBYTES = 2**17  # most bytes between reads that are locked, too; between small copies, read
_RANGE_NBYTES = 2**25  # of a range, about: the driver may let others wait while it locks one
# What is smaller is read: the driver may copy it by the CPU, a SIGBUS once a file is shorter.
_LEAST_NBYTES = 2**18
_LOOK_S = 1.0  # between looks at the available memory


class _Range(NamedTuple):
    """Mapped pages of a file: their place in it, and in memory."""

    start: int
    stop: int
    address: int


class Locked(NamedTuple):
    """Reads whose pages are locked.

    Attributes:
        counts: whether `LOCKED` counts these pages.
        direct: one read of no file, whose copies begin at host addresses.
        small: reads of the file for all other copies, none longer than the longest of ``reads``.
    """

    reads: ReadTable
    ranges: Sequence[_Range]
    counts: bool
    direct: ReadTable
    small: ReadTable


class LockedReads:
    """Reads of files whose pages a thread locks once they have been read twice.

    At most half of the available memory is locked (`core.memory.LOCKED`), less when that shrinks.
    One thread at a time may call it.
    """

    def __init__(self, context: Context) -> None:
        """Lock nothing yet."""
        self._context = context
        self._seen: dict[int, tuple[int, ReadTable]] = {}  # how often they were read, by id
        self._locked: dict[int, Locked] = {}  # by id of the reads; the oldest first
        self._looked_s = monotonic()
        # set to False by any thread, to True by none
        self._works = not context.integrated and self._is_supported()
        # reads of a file each, with a descriptor that is closed once they are locked
        self._to_lock: deque[tuple[int, list[ReadTable]]] = deque()
        self._queueing = threading.Lock()  # guards `_to_lock` and `_thread`
        self._locking = threading.Lock()  # held while a table is locked or unlocked
        self._thread: threading.Thread | None = None

    def _is_supported(self) -> bool:
        device, value = ctypes.c_int(), ctypes.c_int()
        with suppress(DeviceError), self._context.current():
            self._context.call("cuCtxGetDevice", ctypes.byref(device))
            self._context.call("cuDeviceGetAttribute", ctypes.byref(value), _IS_SUPPORTED, device)
        return bool(value.value)

    def find(self, reads: ReadTable) -> Locked | None:
        """Return what to do in place of reads whose pages are locked, else None."""
        return self._locked.get(id(reads))

    def note(self, fd: int, tables: Iterable[ReadTable]) -> None:
        """Note that tables were read; begin to lock the pages of those that were once before."""
        if not self._works:
            return
        again = []
        for reads in tables:
            times, _ = self._seen.get(id(reads), (0, reads))
            self._seen[id(reads)] = times + 1, reads
            if times == 1:
                again.append(reads)
        if not again:
            return
        with self._queueing, suppress(OSError, RuntimeError):  # no more descriptors, or threads
            self._to_lock.append((os.dup(fd), again))
            if self._thread is None:
                name = "streamload-locks"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread = thread  # first: a Ctrl-C while it starts must not lose it
                try:
                    thread.start()
                except RuntimeError:
                    self._thread = None
                    raise

    def is_short(self) -> bool:
        """Whether so little memory is available that `shrink` is due; it looks once a second."""
        now = monotonic()
        if not self._locked or now < self._looked_s + _LOOK_S:
            return False
        self._looked_s = now
        return not LOCKED.may_add(0)

    def shrink(self) -> None:
        """Unlock until enough memory is available, and lock no more; no copy may be under way."""
        self._works = False
        with self._locking:
            counted = [each for each in self._locked.values() if each.counts]
            while counted and not LOCKED.may_add(0):
                self._unlock(self._locked.pop(id(counted.pop(0).reads)))

    # --- the thread that locks ----------------------------------------------------------------

    def _serve(self) -> None:
        """Lock what is to be locked, until all is or no more may be."""
        ended = False
        try:  # what cannot be locked is read as before
            with suppress(DeviceError, OSError, MemoryError), self._context.current():
                allow_captures()
                while (item := self._next()) is not None:
                    self._lock_all(*item)
                ended = True
        finally:
            if not ended:
                self._works = False
                self._next()

    def _lock_all(self, fd: int, tables: Sequence[ReadTable]) -> None:
        try:
            counts = not filesystem_in_memory(f"/proc/self/fd/{fd}")
            for reads in tables:
                with self._locking:
                    if self._works and not self._lock(fd, reads, counts):
                        self._works = False
        finally:
            os.close(fd)

    def _next(self) -> tuple[int, list[ReadTable]] | None:
        """Return what to lock next; after the last, or if no more is to be locked, None."""
        with self._queueing:
            if self._works and self._to_lock:
                return self._to_lock.popleft()
            while self._to_lock:
                os.close(self._to_lock.pop()[0])
            self._thread = None
            return None

    def _lock(self, fd: int, reads: ReadTable, counts: bool) -> bool:
        """Lock the pages of reads if they are resident; whether it is worth to try with others."""
        spans, of_read = _spans(reads)
        nbytes = sum(stop - start for start, stop in spans)
        if counts and not LOCKED.may_add(nbytes):
            return False
        if not all(is_resident(fd, start, stop) for start, stop in spans):
            self._seen[id(reads)] = 0, reads  # again after two more reads
            return True
        direct, small, which = _copies(reads, of_read)
        if not len(direct.copies):
            return True
        ranges: list[_Range] = []
        made = Locked(reads, ranges, counts, direct, small)
        try:
            for start, stop in spans:
                address = map_file(fd, start, stop - start)
                if _driver().slow.cuMemHostRegister_v2(address, stop - start, _FLAGS):
                    libc().munmap(address, stop - start)  # a filesystem or driver that cannot
                    break
                ranges.append(_Range(start, stop, address))
                LOCKED.add((stop - start) * counts)
            else:
                moved = np.array([each.address - each.start for each in ranges])
                direct.copies[:, 0] += moved[which]
                self._locked[id(reads)] = made
                return True
        except BaseException:
            self._unlock(made)
            raise
        self._unlock(made)
        return False

    def _unlock(self, locked: Locked) -> None:
        for start, stop, address in locked.ranges:
            _driver().slow.cuMemHostUnregister(address)
            libc().munmap(address, stop - start)
            LOCKED.add((start - stop) * locked.counts)

    def close(self) -> None:
        """Unlock all pages, in the current context; no copy may be under way."""
        self._works = False
        thread = self._thread
        if thread is not None and thread.is_alive():  # not if a Ctrl-C kept it from starting
            thread.join()
        self._next()  # closes descriptors
        while self._locked:
            self._unlock(self._locked.popitem()[1])
        self._seen.clear()


def _spans(reads: ReadTable) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the whole pages (start, stop) of a file that reads need, and which has each read."""
    spans: list[tuple[int, int]] = []
    of_read = [0] * len(reads.rows)
    needed = reads.rows[:, [0, 2]].tolist()
    for at in sorted(range(len(needed)), key=needed.__getitem__):
        start, nbytes = needed[at]
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = round_up(start + nbytes, mmap.PAGESIZE)
        begun, ended = spans[-1] if spans else (0, -_GAP_NBYTES - 1)
        if first > ended + _GAP_NBYTES or stop - begun > _RANGE_NBYTES:
            spans.append((first, stop))
        else:
            spans[-1] = begun, max(ended, stop)
        of_read[at] = len(spans) - 1
    return spans, of_read


def _copies(
    reads: ReadTable, of_read: Sequence[int]
) -> tuple[ReadTable, ReadTable, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return large copies, adjacent ones joined, from bytes of the file, and reads for the others.

    The third result is the range of each large copy; ``of_read``: that of each read.
    """
    offset, count = reads.rows[:, 0], reads.rows[:, 4]
    which = np.repeat(np.array(of_read, np.int64), count)
    copies = reads.copies.copy()
    copies[:, 0] += np.repeat(offset, count)
    at, nbytes, target, kernel = copies[:, 0], copies[:, 1], copies[:, 2], copies[:, 3]
    begins = np.ones(len(copies), bool)
    begins[1:] = (at[1:] != at[:-1] + nbytes[:-1]) | (target[1:] != target[:-1] + nbytes[:-1])
    begins[1:] |= (which[1:] != which[:-1]) | (kernel[1:] != 0) | (kernel[:-1] != 0)
    where = np.flatnonzero(begins)
    joined = copies[where]
    joined[:, 1] = np.add.reduceat(nbytes, where)
    is_large = joined[:, 1] >= _LEAST_NBYTES
    large = joined[is_large]
    one = ReadTable(np.array([[0, 0, 0, 0, len(large), 0]]), large)
    is_small = ~is_large[np.cumsum(begins) - 1]
    small = _reads_of(copies[is_small], np.repeat(np.arange(len(count)), count)[is_small])
    return one, small, which[where][is_large]


def _reads_of(
    copies: np.ndarray[Any, np.dtype[np.int64]], read: np.ndarray[Any, np.dtype[np.int64]]
) -> ReadTable:
    """Return reads for copies from bytes of a file; those of one ``read`` may share a new one."""
    ends = copies[:, 0] + copies[:, 1]
    rows: list[list[int]] = []
    last = -1
    for index, (start, end, old) in enumerate(
        zip(copies[:, 0].tolist(), ends.tolist(), read.tolist(), strict=True)
    ):
        row = rows[-1] if rows else None
        if row is None or old != last or not row[0] <= start <= row[0] + row[1] + _GAP_NBYTES:
            rows.append([start, 0, 0, index, 0, 0])
        row, last = rows[-1], old
        row[1] = row[2] = max(row[1], end - row[0])
        row[4] += 1
        copies[index, 0] = start - row[0]
    return ReadTable(np.array(rows, np.int64).reshape(-1, 6), copies)
