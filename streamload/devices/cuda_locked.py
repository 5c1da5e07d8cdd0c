"""Ranges of files in the page cache, locked for a CUDA device, which copies from them itself.

What is read again in each pass then needs no thread and no staging: see docs/measurements.md, "Page
cache that is locked". The pages are mapped read-only and registered (CUDA driver API,
cuMemHostRegister with CU_MEMHOSTREGISTER_READ_ONLY). The CPU touches no byte of them, so that a
file that becomes shorter is no SIGBUS: its pages stay as they were, and readers find the change.
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
from typing import NamedTuple

import numpy as np

from streamload.core.memory import LOCKED
from streamload.core.system import libc, map_file
from streamload.core.units import round_up
from streamload.devices.base import ReadTable
from streamload.devices.cuda import Context, _driver, allow_captures
from streamload.errors import DeviceError
from streamload.files.page_cache import is_resident

_FLAGS = 9  # CU_MEMHOSTREGISTER_READ_ONLY and _PORTABLE
_IS_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_GAP_NBYTES = 2**17  # most bytes between reads that are locked, too
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
        reads: the reads.
        ranges: what is locked of the file.
        direct: one read of no file, whose copies begin at host addresses.
        small: reads of the file for all other copies.
    """

    reads: ReadTable
    ranges: Sequence[_Range]
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
        self._works = not context.integrated and self._is_supported()
        self._to_lock: deque[tuple[int, ReadTable]] = deque()  # with a descriptor of their own
        self._queueing = threading.Lock()  # guards `_to_lock` and `_thread`
        self._locking = threading.Lock()  # held for each table
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
        again = []
        for reads in tables if self._works else ():
            times, _ = self._seen.get(id(reads), (0, reads))
            self._seen[id(reads)] = times + 1, reads
            if times == 1:
                again.append(reads)
        with self._queueing, suppress(OSError, RuntimeError):  # no more descriptors, or threads
            self._to_lock += [(os.dup(fd), reads) for reads in again]
            if self._to_lock and self._thread is None:
                name = "streamload-locks"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                thread.start()
                self._thread = thread

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
            while self._locked and not LOCKED.may_add(0):
                self._unlock(self._locked.pop(next(iter(self._locked))))

    def _serve(self) -> None:
        """Lock what is to be locked, until all is or no more may be."""
        allow_captures()
        with suppress(DeviceError), self._context.current():
            while True:
                with self._queueing:
                    if not (self._works and self._to_lock):
                        self._thread = None
                        return
                    fd, reads = self._to_lock.popleft()
                try:
                    with self._locking:
                        self._works = self._works and self._lock(fd, reads)
                finally:
                    os.close(fd)
        self._works = False

    def _lock(self, fd: int, reads: ReadTable) -> bool:
        """Lock the pages of reads if they are resident; whether it is worth to try with others."""
        spans, of_read = _spans(reads)
        if not LOCKED.may_add(sum(stop - start for start, stop in spans)):
            return False
        if not all(is_resident(fd, start, stop) for start, stop in spans):
            return True
        ranges: list[_Range] = []
        made = Locked(reads, ranges, reads, reads)
        for start, stop in spans:
            try:
                address = map_file(fd, start, stop - start)
            except OSError:
                break
            if _driver().slow.cuMemHostRegister_v2(address, stop - start, _FLAGS):
                libc().munmap(address, stop - start)
                break
            ranges.append(_Range(start, stop, address))
            LOCKED.add(stop - start)
        else:
            direct, small = _copies(reads, ranges, of_read)
            self._locked[id(reads)] = made._replace(direct=direct, small=small)
            return True
        self._unlock(made)  # a file system or driver that cannot, or too many maps
        return False

    def _unlock(self, locked: Locked) -> None:
        for start, stop, address in locked.ranges:
            _driver().slow.cuMemHostUnregister(address)
            libc().munmap(address, stop - start)
            LOCKED.add(start - stop)

    def close(self) -> None:
        """Unlock all pages, in the current context; no copy may be under way."""
        self._works = False
        if (thread := self._thread) is not None:
            thread.join()
        while self._to_lock:
            os.close(self._to_lock.pop()[0])
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
        first, stop = (
            start // mmap.PAGESIZE * mmap.PAGESIZE,
            round_up(start + nbytes, mmap.PAGESIZE),
        )
        begun, ended = spans[-1] if spans else (0, -_GAP_NBYTES - 1)
        if first > ended + _GAP_NBYTES or stop - begun > _RANGE_NBYTES:
            spans.append((first, stop))
        else:
            spans[-1] = begun, max(ended, stop)
        of_read[at] = len(spans) - 1
    return spans, of_read


def _copies(
    reads: ReadTable, ranges: Sequence[_Range], of_read: Sequence[int]
) -> tuple[ReadTable, ReadTable]:
    """Return the copies from host addresses, adjacent ones joined, and reads for the small ones."""
    moved = np.array([each.address - each.start for each in ranges])
    offset, count = reads.rows[:, 0], reads.rows[:, 4]
    which = np.repeat(np.array(of_read), count)
    copies = reads.copies.copy()
    copies[:, 0] += np.repeat(offset, count)  # bytes of the file
    at, nbytes, target, kernel = copies[:, 0], copies[:, 1], copies[:, 2], copies[:, 3]
    begins = np.ones(len(copies), bool)
    begins[1:] = (at[1:] != at[:-1] + nbytes[:-1]) | (target[1:] != target[:-1] + nbytes[:-1])
    begins[1:] |= (which[1:] != which[:-1]) | (kernel[1:] != 0) | (kernel[:-1] != 0)
    where = np.flatnonzero(begins)
    joined, which = copies[where], which[where]
    joined[:, 1] = np.add.reduceat(nbytes, where)
    is_small = joined[:, 1] < _LEAST_NBYTES
    direct, small = joined[~is_small], joined[is_small]
    direct[:, 0] += moved[which[~is_small]]
    rows = np.zeros((len(small), 6), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 4] = small[:, 0], small[:, 1], small[:, 1], 1
    rows[:, 3] = np.arange(len(small))
    small[:, 0] = 0
    one = np.array([[0, 0, 0, 0, len(direct), 0]])
    return ReadTable(one, direct), ReadTable(rows, small)
