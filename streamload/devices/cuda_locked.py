"""Ranges of files in the page cache, locked for a CUDA device, which copies from them itself.

What is read again in each pass then needs no thread and no staging: see docs/measurements.md, "Page
cache that is locked". The pages are mapped read-only and registered (CUDA driver API,
cuMemHostRegister with CU_MEMHOSTREGISTER_READ_ONLY); no byte of them is touched here, so that a
file that becomes shorter is no SIGBUS. Its pages stay as they were; readers find the change.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

import numpy as np

from streamload.core.memory import LOCKED
from streamload.core.system import libc, map_file
from streamload.core.units import round_up
from streamload.devices.base import ReadTable
from streamload.devices.cuda import Context, _driver
from streamload.errors import DeviceError
from streamload.files.page_cache import is_resident

_FLAGS = 9  # CU_MEMHOSTREGISTER_READ_ONLY and _PORTABLE
_IS_SUPPORTED = 113  # CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_GAP_NBYTES = 2**17  # most bytes between reads that are locked, too
_LOOK_S = 1.0  # between looks at the available memory


class _Range(NamedTuple):
    """Mapped bytes of a file: their place in it, and in memory."""

    start: int
    stop: int
    address: int


class _Locked(NamedTuple):
    """The reads of a table, its ranges in memory, and the copies from there."""

    reads: ReadTable
    ranges: Sequence[_Range]
    copies: ReadTable

    @property
    def nbytes(self) -> int:
        """Locked bytes."""
        return sum(each.stop - each.start for each in self.ranges)


class LockedReads:
    """Reads of files whose pages are locked, from the second time on that they are read.

    At most half of the available memory is locked (`core.memory.LOCKED`), less when that shrinks.
    One thread at a time may call it.
    """

    def __init__(self, context: Context) -> None:
        """Lock nothing yet."""
        self._context = context
        self._seen: dict[int, ReadTable] = {}  # read once, by id
        self._locked: dict[int, _Locked] = {}  # by id of the reads; the oldest first
        self._looked_s = monotonic()
        self._works = not context.integrated and self._is_supported()

    def _is_supported(self) -> bool:
        device, value = ctypes.c_int(), ctypes.c_int()
        with suppress(DeviceError), self._context.current():
            self._context.call("cuCtxGetDevice", ctypes.byref(device))
            self._context.call("cuDeviceGetAttribute", ctypes.byref(value), _IS_SUPPORTED, device)
        return bool(value.value)

    def copies(self, reads: ReadTable) -> ReadTable | None:
        """Return copies from memory in place of reads whose pages are locked, else None."""
        found = self._locked.get(id(reads))
        return None if found is None else found.copies

    def note(self, fd: int, tables: Iterable[ReadTable]) -> None:
        """Note that tables were read; lock the pages of those that were before, as far as it may.

        The context must be current.
        """
        for reads in tables if self._works else ():
            if id(reads) not in self._seen:
                self._seen[id(reads)] = reads
            elif not self._lock(fd, reads):
                break

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
        while self._locked and not LOCKED.may_add(0):
            self._unlock(self._locked.pop(next(iter(self._locked))))

    def _lock(self, fd: int, reads: ReadTable) -> bool:
        """Lock the pages of reads if they are resident; whether it is worth to try with others."""
        spans = [*_spans(reads)]
        nbytes = sum(stop - start for start, stop in spans)
        if not LOCKED.may_add(nbytes):
            return False
        if not all(is_resident(fd, start, stop) for start, stop in spans):
            return True
        ranges: list[_Range] = []
        made = _Locked(reads, ranges, reads)
        for start, stop in spans:
            try:
                address = map_file(fd, start, stop - start)
            except OSError:
                self._unlock(made)
                return False
            status = _driver().slow.cuMemHostRegister_v2(address, stop - start, _FLAGS)
            if status:  # a file system or driver that cannot
                libc().munmap(address, stop - start)
                self._unlock(made)
                self._works = False
                return False
            ranges.append(_Range(start, stop, address))
            LOCKED.add(stop - start)
        self._locked[id(reads)] = made._replace(copies=_copies(reads, ranges))
        return True

    def _unlock(self, locked: _Locked) -> None:
        for start, stop, address in locked.ranges:
            _driver().slow.cuMemHostUnregister(address)
            libc().munmap(address, stop - start)
            LOCKED.add(start - stop)

    def close(self) -> None:
        """Unlock all pages, in the current context; no copy may be under way."""
        self._works = False
        while self._locked:
            self._unlock(self._locked.popitem()[1])
        self._seen.clear()


def _spans(reads: ReadTable) -> Iterator[tuple[int, int]]:
    """Yield the whole pages (start, stop) of a file that reads need."""
    begun = ended = -1
    for start, nbytes in sorted(reads.rows[:, [0, 2]].tolist()):
        first, stop = (
            start // mmap.PAGESIZE * mmap.PAGESIZE,
            round_up(start + nbytes, mmap.PAGESIZE),
        )
        if begun >= 0 and first <= ended + _GAP_NBYTES:
            ended = max(ended, stop)
            continue
        if begun >= 0:
            yield begun, ended
        begun, ended = first, stop
    if begun >= 0:
        yield begun, ended


def _copies(reads: ReadTable, ranges: Sequence[_Range]) -> ReadTable:
    """Return one read of no file whose copies begin at host addresses; adjacent ones are joined."""
    starts = np.array([each.start for each in ranges])
    moved = np.array([each.address - each.start for each in ranges])
    offset, count = reads.rows[:, 0], reads.rows[:, 4]
    which = np.repeat(np.searchsorted(starts, offset, "right") - 1, count)
    copies = reads.copies.copy()
    copies[:, 0] += np.repeat(offset, count) + moved[which]
    at, nbytes, target, kernel = copies[:, 0], copies[:, 1], copies[:, 2], copies[:, 3]
    begins = np.ones(len(copies), bool)
    begins[1:] = (at[1:] != at[:-1] + nbytes[:-1]) | (target[1:] != target[:-1] + nbytes[:-1])
    begins[1:] |= (which[1:] != which[:-1]) | (kernel[1:] != 0) | (kernel[:-1] != 0)
    where = np.flatnonzero(begins)
    joined = copies[where]
    joined[:, 1] = np.add.reduceat(nbytes, where)
    return ReadTable(np.array([[0, 0, 0, 0, len(joined), 0]]), joined)
