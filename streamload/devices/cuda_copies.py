"""The copies of a framework's CUDA device: one by one, many in a call, a layer's by many threads.

What is read again in each pass, the device copies from the page cache, if its pages may be locked
there (`LockedReads`); it then needs no thread and no staging. See `devices.cuda`.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from streamload.codecs.cast_cuda import SYMBOL, cast_ptx
from streamload.core.dtypes import DType
from streamload.core.memory import LOCKED
from streamload.core.system import filesystem_in_memory, libc, map_file
from streamload.core.units import round_up
from streamload.devices.base import BulkFailure, QueuedWork, Read, ReadTable, Staging, Table, Ticket
from streamload.devices.cuda import (
    Context,
    DeviceMemory,
    Event,
    PinnedStaging,
    _driver,
    allow_captures,
    load_kept,
)
from streamload.errors import DeviceError
from streamload.files.page_cache import is_resident

if TYPE_CHECKING:
    from streamload.devices.bulk import Loop

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
    """Reads of files whose pages in the page cache a thread locks once they have been read twice.

    The device copies from them itself: docs/measurements.md, "Page cache that is locked". They are
    mapped read-only and registered (CUDA driver API, cuMemHostRegister with
    CU_MEMHOSTREGISTER_READ_ONLY). The CPU touches no byte of them, so that a file that becomes
    shorter is no SIGBUS. A lease has to keep writers from the file until the copies have ended.

    At most half of the available memory is locked (`core.memory.LOCKED`), less when that shrinks.
    One thread at a time may call it.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._seen: dict[int, tuple[int, ReadTable]] = {}  # how often they were read, by id
        self._locked: dict[int, Locked] = {}  # by id of the reads; the oldest first
        self._looked_s = monotonic()
        # set to False by any thread, to True by none
        self._works = False
        with suppress(DeviceError):
            self._works = not context.integrated and context.attribute(_IS_SUPPORTED) != 0
        # reads of a file each, with a descriptor that is closed once they are locked
        self._to_lock: deque[tuple[int, list[ReadTable]]] = deque()
        self._queueing = threading.Lock()  # guards `_to_lock` and `_thread`
        self._locking = threading.Lock()  # held while a table is locked or unlocked
        self._thread: threading.Thread | None = None

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


def _copies(reads: ReadTable, of_read: Sequence[int]) -> tuple[ReadTable, ReadTable, Table]:
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


def _reads_of(copies: Table, read: Table) -> ReadTable:
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


_MARKS = 3  # runs whose copies may be under way


class Mark:
    """A ticket of copies started on streams before it was recorded last; it may outlive these."""

    def __init__(self, context: Context, streams: Iterable[int]) -> None:
        """Create an event for each stream, in the current context; raises DeviceError."""
        self._context, self._streams = context, [*streams]
        self.events = tuple(Event(context) for _ in self._streams)

    def record(self) -> None:
        """Include the copies that have been started until now, in the current context."""
        for event, stream in zip(self.events, self._streams, strict=True):
            self._context.check(_driver().quick.cuEventRecord(event, stream), "cuEventRecord")

    def wait(self) -> None:
        """Wait for the copies; raises DeviceError if one failed."""
        allow_captures()
        for event in self.events:
            event.wait()


class Refiller:
    """Page-locked slots that threads fill together, without the interpreter's lock, and copy.

    The same buffers of the device are filled again and again. One thread at a time may call it.
    """

    def __init__(self, context: Context, loop: Loop, count: int, slots: int, nbytes: int) -> None:
        """Start ``count`` threads, with the caller's, each with so many ``slots`` of ``nbytes``.

        No read may be longer than a slot.
        """
        from streamload.devices.bulk import Team

        self._context = context
        self._marks: deque[Mark] = deque()
        self._locked = LockedReads(context)
        with ExitStack() as made:
            made.callback(self._unlock)
            rows = []
            for _ in range(slots * count):
                slot = PinnedStaging(context, nbytes)
                made.callback(slot.close)
                rows.append((slot.address, slot.stream, slot.event.value or 0))
            self._streams = dict.fromkeys(stream for _, stream, _ in rows)
            made.callback(self._marks.clear)
            with context.current():
                for _ in range(_MARKS):
                    self._marks.append(Mark(context, self._streams))
            self._team = Team(loop, rows, count, self._inside)
            made.callback(self._team.close)
            self._made = made.pop_all()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        allow_captures()
        with self._context.current():
            yield

    @property
    def next(self) -> Mark:
        """The ticket of the next run: until then, of the last but two."""
        return self._marks[0]

    def is_locked(self, reads: ReadTable) -> bool:
        """Whether the device copies these reads from pages that are locked."""
        return self._locked.find(reads) is not None

    def run(
        self,
        fd: int,
        parts: Sequence[tuple[ReadTable, int]],
        locks: bool,
        after: Sequence[QueuedWork] = (),
    ) -> BulkFailure | None:
        """Read into the slots and start the copies; return the first failure, or None.

        `next`, as it was before, is the ticket of the copies. After a failure none is under way.
        ``parts`` are reads, the same objects each time, and the shift of their copies' addresses;
        ``locks``: whether pages of the file may be locked; ``after``: work that copies have to wait
        for.
        """
        failure = None
        events = [event for work in after for event in work.events]
        with self._inside():
            for stream in self._streams if events else ():
                self._context.order(stream, events)
            if self._locked.is_short():
                self._synchronize()
                self._locked.shrink()
            locked = [(self._locked.find(reads), shift) for reads, shift in parts]
            rest = [part for part, (found, _) in zip(parts, locked, strict=True) if found is None]
            there = [(found, shift) for found, shift in locked if found is not None]
            for file, some in (
                (-1, [(found.direct, shift) for found, shift in there]),
                (fd, [(found.small, shift) for found, shift in there if len(found.small.rows)]),
            ):
                if some and failure is None:
                    failure = self._team.run(file, ReadTable.joined(some), alone=True)
            if rest and failure is None:
                failure = self._team.run(fd, ReadTable.joined(rest))
            if failure is None:
                self._marks[0].record()
                self._marks.rotate(-1)
                if locks:
                    self._locked.note(fd, (reads for reads, _ in rest))
        if failure is not None:
            self.wait()
        return failure

    def wait(self) -> None:
        """Wait for the end of all copies, also if some fail."""
        with self._inside():
            self._synchronize()

    def _synchronize(self) -> None:
        for stream in self._streams:
            _driver().slow.cuStreamSynchronize(stream)

    def _unlock(self) -> None:
        with suppress(DeviceError), self._inside():
            self._locked.close()

    def close(self) -> None:
        """End the threads, and free the slots; waits for copies under way."""
        self._made.close()


class BulkCopier:
    """Runs many reads, copies and casts in one call, by the compiled loop of `devices.bulk`."""

    def __init__(self, context: Context, loop: Loop, address: Callable[[Any], int]) -> None:
        self.address = address
        self._context, self._loop = context, loop

    def memory(self, nbytes: int) -> DeviceMemory:
        """Allocate device memory for counts and for elements to cast; raises AllocationError."""
        return DeviceMemory(self._context, nbytes)

    def kernel(self, src: DType, dst: DType, clamp: bool) -> int:
        """Return the handle of a cast kernel, compiled once; any thread may call this.

        With ``clamp``, finite values beyond the range of ``dst`` become its largest finite value.
        """
        return self.function(cast_ptx(src, dst, clamp=clamp), SYMBOL)

    def function(self, ptx: str, symbol: str) -> int:
        """Return the handle of a function in PTX, loaded once; any thread may call this."""
        return load_kept(self._context, ptx, symbol)

    def ticket(self, slot: Staging) -> Ticket:
        """Return the ticket of the last copies started from a slot."""
        assert isinstance(slot, PinnedStaging)
        return slot.event

    def refiller(self, count: int, slots: int, nbytes: int) -> Refiller:
        return Refiller(self._context, self._loop, count, slots, nbytes)

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Read into the slots cyclically and start the copies, without the interpreter's lock.

        Copies from the last ``busy`` slots may be running: each is filled after these. Afterwards,
        copies from any used slot may be running: see `ticket`. Returns the read that failed, or
        None.
        """
        flat = []
        for index, slot in enumerate(slots):
            assert isinstance(slot, PinnedStaging)
            under_way = index >= len(slots) - busy
            flat.append((slot.address, slot.stream, slot.event.value or 0, under_way))
        with self._context.current():
            failure = self._loop(fd, reads, flat)
            if failure is not None and failure.stage == "copy":
                # copies of that read may be running, and its slot's event does not cover them
                _driver().slow.cuStreamSynchronize(flat[failure.index % len(flat)][1])
        return failure


class Copies:
    """Base of a framework's CUDA device: staging, copies and casts by the driver."""

    def __init__(self, context: Context, address: Callable[[Any], int]) -> None:
        self.context = context
        self._address = address
        loop = _loop()
        self.bulk: BulkCopier | None = BulkCopier(context, loop, address) if loop else None

    def staging(self, nbytes: int) -> PinnedStaging:
        return PinnedStaging(self.context, nbytes)

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        assert isinstance(staging, PinnedStaging)
        self.context.copy(staging, start, nbytes, self._address(buffer) + offset)
        return staging.event


@cache
def _loop() -> Loop | None:
    """Return the compiled copy loop over the driver's calls; None if LLVM is not usable here."""
    from streamload.devices.bulk import Loop, addresses_of, libc_calls  # makes its text

    driver = _driver().slow
    calls = {
        "copy": driver.cuMemcpyHtoDAsync_v2,
        "record": driver.cuEventRecord,
        "wait": driver.cuEventSynchronize,
        "launch": driver.cuLaunchKernel,
    }
    try:
        return Loop(libc_calls() | addresses_of(calls))
    except (ImportError, OSError, RuntimeError):  # streaming copies by its loop in Python
        return None
