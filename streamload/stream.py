"""The one loop: read, cast, place. The only threads of streamload are here.

The calling thread prepares parameters in plan order (old memory is released and new memory is
allocated there, since frameworks are not thread-safe) and hands units of work to a few workers;
progress is told and parameters are finished there too. A worker reads a window of the file and
casts it into the device's memory, or into a staging slot of its own that the device copies from.
With no workers, the calling thread does that as well.
"""

from __future__ import annotations

import math
import mmap
import queue
import signal
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal, NamedTuple, Protocol

from streamload.cast.table import Cast, CastCounts, make_cast
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.page_cache import PageCache, ShardCache
from streamload.checkpoint.readers import Reader, open_reader
from streamload.device_casts import DeviceCasts
from streamload.devices.base import Buffer, Copy, Device, Read, Staging, Ticket, populate
from streamload.dtypes import DType
from streamload.errors import AllocationError, CheckpointError, DeviceError, OutOfRangeError
from streamload.plan.budget import STAGING, Ledger, available_host_nbytes
from streamload.plan.chunks import Chunk, Run, chunks, split
from streamload.plan.plan import STAGING_SLOTS, Placement, Plan, slot_nbytes
from streamload.units import round_up

_NO_COUNTS = CastCounts()
_BATCH_UNITS = 4
# Bytes that a worker is handed at once where they go as they are, piece by piece through its slots,
# without the interpreter; fewer of a load that has little for each.
_BULK_NBYTES = 2**24
_LEAST_SHARE = 16  # units for each worker, of a load that has them
_TOLD_TOGETHER = 4  # units that a worker has finished
_OPEN_SHARDS = 2  # the next is begun while the last units of one are under way
_MAX_UNIT_CHUNKS = 256  # so that a unit of tiny tensors does not keep the other workers waiting

Unit = tuple[Chunk, ...]  # of one shard and one device, one after the other in the file


class Target(Protocol):
    """What is filled. Called from the streaming thread only, in plan order."""

    def begin(self, index: int) -> Buffer:
        """Make room for placement ``index`` and return its buffer."""

    def finish(self, index: int, counts: CastCounts) -> None:
        """All bytes of the placement are there; its buffer is written no more."""


@dataclass(slots=True)
class StreamStats:
    """What a stream did.

    Attributes:
        read_nbytes: file bytes read.
        counts: cast counts by placement index, of the casts that were counted.
        seconds: wall time.
        transfer_seconds: from the first read on until the last byte was in place.
        transfer_fallback: why a mapped transfer became a staged one, or "".
        reader_fallbacks: why files were read otherwise than planned, and how many of them.
        page_cache: what became of the page cache, and why; "" where none was used.
        dropped_nbytes: file bytes that were dropped from it.
    """

    read_nbytes: int = 0
    counts: dict[int, CastCounts] = field(default_factory=dict)
    seconds: float = 0.0
    transfer_seconds: float = 0.0
    transfer_fallback: str = ""
    reader_fallbacks: Counter[str] = field(default_factory=Counter)
    page_cache: str = ""
    dropped_nbytes: int = 0


def stream(
    plan: Plan,
    checkpoint: Checkpoint,
    target: Target,
    devices: Mapping[str, Device],
    ledger: Ledger,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> StreamStats:
    """Run a plan.

    Args:
        plan: what to do.
        checkpoint: the headers that the plan was made from.
        target: what is filled.
        devices: by name, every device of the plan.
        ledger: where scratch and staging are reserved.
        progress: told the file bytes read so far, often.

    Returns:
        What was done.

    Raises:
        CheckpointError: a file could not be read, or is not what it was.
        OutOfRangeError: under ``out_of_range="error"``.
        KeyboardInterrupt: Ctrl-C, or whatever the application's own handler of it raises; work
            under way is finished first.
        StreamloadError: whatever the target and the devices raise.
    """
    begun = time.perf_counter()
    with ExitStack() as stack:
        interrupt = stack.enter_context(deferred_interrupt())
        for device in plan.devices:
            stack.enter_context(ledger.lease(device.device, device.scratch_nbytes))
        if plan.host_nbytes:
            stack.enter_context(ledger.lease(STAGING, plan.host_nbytes))
        job = _Job(plan, checkpoint, target, devices, progress)
        for name in job.casting:
            casts = DeviceCasts(name, devices[name], plan)
            job.casts[name] = stack.enter_context(closing(casts))
        crew = stack.enter_context(_Crew(job, plan.threads, interrupt))
        opened: deque[int] = deque()
        try:
            by_shard = job.cut()  # the workers take their slots meanwhile
            to_come = sum(len(units) for _, units in by_shard)
            for shard, units in by_shard:
                to_come -= len(units)
                if len(opened) == _OPEN_SHARDS:
                    crew.drain(opened[0])
                    job.close(opened.popleft())
                opened.append(shard)
                reader = job.open(shard)
                for batch in _batches(units, job, to_come, plan.threads):
                    interrupt.check()
                    job.begin(batch)
                    crew.submit(reader, batch)
            crew.drain()
            job.stats.transfer_seconds = time.perf_counter() - job.first_read
        except BaseException:
            job.failed = True
            raise
        finally:
            crew.join()  # before the readers are closed
            for shard in opened:
                job.close(shard)
        crew.end()
        for casts in job.casts.values():
            job.stats.counts |= casts.all_counts()
        interrupt.check()  # it came when the last byte had been placed
        if job.page_cache is not None:
            job.stats.dropped_nbytes = job.page_cache.dropped_nbytes
        job.stats.seconds = time.perf_counter() - begun
        return job.stats


def _by_shard(cut: Sequence[Chunk], job: _Job) -> Iterator[tuple[int, list[Unit]]]:
    """Group chunks into units, small neighbours together, and units by shard."""
    units: list[Unit] = []
    unit: list[Chunk] = []
    size = most = 0
    for chunk in cut:
        p = job.plan.placements[chunk.placement]
        new_shard = bool(unit) and chunk.shard != unit[0].shard
        grows = slot_nbytes(max(chunk.stop - chunk.start, chunk.read_nbytes))
        if unit and (
            new_shard
            or size + grows > most
            or len(unit) == _MAX_UNIT_CHUNKS
            or p.device != job.plan.placements[unit[0].placement].device
            or most != job.unit_nbytes(p)
        ):
            units.append(tuple(unit))
            if new_shard:
                yield unit[0].shard, units
                units = []
            unit, size = [], 0
        unit.append(chunk)
        size, most = size + grows, job.unit_nbytes(p)
    if unit:
        units.append(tuple(unit))
        yield unit[0].shard, units


def _batches(
    units: Sequence[Unit], job: _Job, to_come: int, workers: int
) -> Iterator[Sequence[Unit]]:
    """Hand out units that go as they are several at a time, fewer towards the end of the load.

    A worker then goes from one to the next by itself: waking threads costs more than reading.

    Args:
        units: of one shard.
        job: what they are of.
        to_come: units of the shards after it.
        workers: how many there are.
    """
    at = 0
    bulk = [job.is_bulk(job.plan.placements[unit[0].placement]) for unit in units]
    while at < len(units):
        most = min(_BATCH_UNITS, (len(units) - at + to_come) // (2 * max(workers, 1)))
        stop = at + 1
        while stop < min(at + most, len(units)) and bulk[stop - 1] and bulk[stop]:
            stop += 1
        yield units[at:stop]
        at = stop


class _Job:
    """The plan being run, and what is known of its progress. The streaming thread changes it."""

    def __init__(
        self,
        plan: Plan,
        checkpoint: Checkpoint,
        target: Target,
        devices: Mapping[str, Device],
        progress: Callable[[int], None],
    ) -> None:
        self.plan = plan
        self.devices = devices
        self.stats = StreamStats()
        self.first_read = math.inf
        self.failed = False
        self.buffers: dict[int, Buffer] = {}
        self.bulk = {name: device.bulk for name, device in devices.items()}
        infos = {name: device.info for name, device in devices.items()}
        self.host_visible = {name: info.host_visible for name, info in infos.items()}
        cast_there = {p.device for p in plan.placements if p.cast == "device"}
        self.casting = [name for name, info in infos.items() if info.casts and name in cast_there]
        self.staged = plan.transfer == "staged"
        self.casts: dict[str, DeviceCasts] = {}  # by device, of those that cast what they were sent
        share = sum(p.nbytes for p in plan.placements) // (_LEAST_SHARE * max(plan.threads, 1))
        # whole slots: what is left over of each unit would be a small copy
        slots = max(min(share, _BULK_NBYTES) // max(plan.slot_nbytes, 1), 1)
        self._bulk_nbytes = slots * plan.slot_nbytes
        self._checkpoint = checkpoint
        self._target = target
        self._progress = progress
        self._left: Counter[int] = Counter()  # chunks to come, by placement
        self._casts: dict[tuple[DType, DType, str], Cast] = {}
        self._compiling = threading.Lock()
        self._to_allocate_nbytes = sum(
            d.fresh_nbytes for d in plan.devices if infos[d.device].shared_memory
        )
        self.page_cache: PageCache | None = None
        self._readers: dict[int, Reader] = {}
        self._caches: dict[int, ShardCache] = {}

    def cut(self) -> list[tuple[int, list[Unit]]]:
        """Cut the plan into units, by shard, in the order in which they are read."""
        cut = chunks(self.plan, self._checkpoint, self._chunk_nbytes)
        self._left.update(chunk.placement for chunk in cut)
        self.page_cache = PageCache(
            self.plan.page_cache,
            to_read_nbytes=_cached_nbytes(cut, self.plan),
            to_allocate_nbytes=self._to_allocate_nbytes,
            available=_available_nbytes,
        )
        return list(_by_shard(cut, self))

    def open(self, shard: int) -> Reader:
        """Open a shard's file."""
        assert self.page_cache is not None, "before the plan is cut"
        header = self._checkpoint.shards[shard]
        reader = open_reader(header.path, header.file_nbytes, self.plan.readers[shard])
        self._readers[shard] = reader
        if self.plan.readers[shard] != "direct" or reader.fallback:
            self._caches[shard] = self.page_cache.open(header.path)
            self.stats.page_cache = self.page_cache.reason
        return reader

    def close(self, shard: int) -> None:
        """Close what `open` opened, if anything; no worker reads there any more."""
        reader = self._readers.pop(shard, None)
        if reader is not None:
            if reader.fallback:
                self.stats.reader_fallbacks[reader.fallback] += 1
            reader.close()
        cache = self._caches.pop(shard, None)
        if cache is not None:  # when nothing maps the file any more
            if self.failed:  # what workers had read, and nobody was told of
                cache.done(0, self._checkpoint.shards[shard].file_nbytes)
            cache.close()

    def cast(self, p: Placement) -> Cast:
        """The cast of a placement; a plain copy of bits where the device casts.

        Compiled when it is first asked for: raw bytes that are staged never ask.
        """
        key = (p.src, p.dst, p.cast)
        found = self._casts.get(key)
        if found is not None:
            return found
        with self._compiling:
            if key not in self._casts:
                self._casts[key] = make_cast(
                    p.src,
                    p.src if p.cast == "device" else p.dst,
                    engine="numpy" if p.cast == "numpy" else "auto",
                    out_of_range=self.plan.out_of_range,
                )
            return self._casts[key]

    def is_bulk(self, p: Placement) -> bool:
        """Whether a placement's bytes go as they are to a device that takes many at a time.

        Which may cast them there.
        """
        as_they_are = p.cast == "copy" or (p.cast == "device" and p.device in self.casting)
        return as_they_are and p.transpose is None and self.bulk[p.device] is not None

    def unit_nbytes(self, p: Placement) -> int:
        """Most bytes of a unit, each chunk rounded up to what it takes in a slot."""
        return self._bulk_nbytes if self.is_bulk(p) else self.plan.slot_nbytes

    def _chunk_nbytes(self, p: Placement) -> int:
        return self._bulk_nbytes if self.is_bulk(p) else self.plan.chunk_nbytes

    def stage(self, reason: str) -> None:
        """From here on, windows on mapped files are not used any more."""
        self.staged, self.stats.transfer_fallback = True, reason

    def begin(self, batch: Sequence[Unit]) -> None:
        """Make room for the parameters that units are the first to write."""
        for unit in batch:
            for chunk in unit:
                if chunk.placement not in self.buffers:
                    self.buffers[chunk.placement] = self._target.begin(chunk.placement)

    def tensor(self, chunk: Chunk) -> tuple[str, Path]:
        """The tensor that a chunk's first bytes are of, and its file."""
        path = self._checkpoint.shards[chunk.shard].path
        infos = [
            self._checkpoint.tensors[r.tensor] for r in self.plan.placements[chunk.placement].source
        ]
        first = chunk.runs[0].start if chunk.runs else -1
        for info in infos:
            if info.shard == path and info.start <= first < info.stop:
                return info.name, path
        return infos[0].name, infos[0].shard

    def done(self, unit: Unit, counts: Sequence[CastCounts]) -> None:
        """Account for a unit whose bytes are in place."""
        before = self.stats.read_nbytes
        for chunk, count in zip(unit, counts, strict=True):
            index = chunk.placement
            p = self.plan.placements[index]
            self.stats.read_nbytes += chunk.read_nbytes
            if p.cast in ("llvm", "numpy"):
                self.stats.counts[index] = self.stats.counts.get(index, _NO_COUNTS) + count
            if count.overflowed and self.plan.out_of_range == "error":
                name, shard = self.tensor(chunk)
                raise OutOfRangeError(name, shard, p.src.name, p.dst.name, count.overflowed)
            self._left[index] -= 1
            if self._left[index] == 0:
                if p.cast == "device" and self.plan.out_of_range == "error":
                    self._refuse_overflow(chunk, p)
                self._target.finish(index, self.stats.counts.get(index, _NO_COUNTS))
                del self.buffers[index]
        cache = self._caches.get(unit[0].shard)
        if cache is not None and cache.drops:
            for start, stop in _file_ranges(unit):
                cache.done(start, stop)
        elif cache is not None:  # it counts, and asks for no more: a unit may have many ranges
            cache.done(0, self.stats.read_nbytes - before)

    def _refuse_overflow(self, chunk: Chunk, p: Placement) -> None:
        """Look at what the device counted of a parameter, if it counts."""
        casts = self.casts.get(p.device)
        found = casts.counts(chunk.placement) if casts is not None else _NO_COUNTS
        if found.overflowed:
            name, shard = self.tensor(chunk)
            raise OutOfRangeError(name, shard, p.src.name, p.dst.name, found.overflowed)

    def tell(self) -> None:
        """Tell the progress."""
        self._progress(self.stats.read_nbytes)


_Outcome = tuple[Unit, list[CastCounts], BaseException | None]
_SlotKind = Literal["staging", "window"]


class _Slot(NamedTuple):
    """What a device copies from.

    Attributes:
        staging: staging, or a window.
        scratch: device address of the elements that are still to be cast; 0 where none are.
        of: the reader whose file a window is of; None for staging.
    """

    staging: Staging
    scratch: int
    of: Reader | None


class _SlotTicket(NamedTuple):
    """Copies under way, and what they are from."""

    staging: Staging
    ticket: Ticket


@dataclass(slots=True)
class _UnderWay:
    """A unit whose bytes have been read.

    Attributes:
        unit: the chunks.
        counts: of each.
        tickets: of copies that may not have ended.
        ends: what else there is to be seen to, when they have.
    """

    unit: Unit
    counts: list[CastCounts]
    tickets: list[_SlotTicket]
    ends: _StillThere | None = None

    def outcome(self) -> _Outcome:
        """Wait for the copies."""
        failure: BaseException | None = None
        for ticket in (*(ticket for _, ticket in self.tickets), self.ends):
            try:
                if ticket is not None:
                    ticket.wait()
            except BaseException as error:
                failure = error
        return self.unit, self.counts, failure


@dataclass(frozen=True, slots=True)
class _StillThere:
    """A ticket for the bytes that a window showed: after a file's end, it showed zeros."""

    reader: Reader
    unit: Unit
    job: _Job

    def wait(self) -> None:
        """Raise TruncatedFileError where the file has become shorter."""
        stop = self.unit[-1].runs[-1].stop
        try:
            with self.reader.view(stop - 1, stop):
                return
        except CheckpointError as error:
            raise error.of_tensor(self.job.tensor(_at_fault(self.unit, error))[0]) from error


class _Worker:
    """Reads, casts and places units; owns its staging slots and its source buffer.

    `run` and `settle` raise nothing: each unit leaves by exactly one outcome.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._slots: dict[str, deque[_Slot]] = {}  # by device, least recently used first
        self._scratch: dict[str, list[int]] = {}  # by device, of slots that were closed
        self._under_way: deque[_UnderWay] = deque()
        self._finished: list[_Outcome] = []  # and not told yet
        self._source = memoryview(b"")

    def open(self) -> None:
        """Take the slots that all units will need: the first parameters are allocated meanwhile.

        Locking their pages takes longer than anything else before the first read.
        """
        job = self._job
        devices = {p.device for p in job.plan.placements}
        if len(devices) == 1 and job.staged and job.bulk[name := devices.pop()] is not None:
            slots = self._slots.setdefault(name, deque())
            while len(slots) < STAGING_SLOTS:
                slots.append(self._new_slot(name, None))

    def close(self) -> BaseException | None:
        """Give back the staging slots, all of them; returns what went wrong with the last."""
        for _ in self.settle():
            pass  # where the load failed: nobody asks any more, but the copies must have ended
        failures = [self._close(device) for device in self._slots]
        return next((failure for failure in reversed(failures) if failure is not None), None)

    def run(self, reader: Reader, unit: Unit, start: int | None = None) -> Iterator[_Outcome]:
        """Place one unit; yields the units that are finished by now.

        Args:
            reader: of its shard.
            unit: the unit.
            start: the file byte from which on its bytes are to be placed; None for all.
        """
        device = self._job.plan.placements[unit[0].placement].device
        if any(slot.of is not None for slot in self._slots.get(device, ())):
            yield from self.settle()  # windows, which make room for slots
        counts: list[CastCounts] = []
        tickets: list[_SlotTicket] = []
        failure: BaseException | None = None
        try:
            parts = self._parts(unit, start)
            for part in parts:
                self._place(reader, part, counts, tickets)
            if parts != [unit]:  # of bytes that go as they are: nothing is counted
                counts = [_NO_COUNTS] * len(unit)
        except BaseException as error:
            failure = error
            if isinstance(error, CheckpointError) and error.tensor is None:
                failure = error.of_tensor(self._job.tensor(_at_fault(unit, error))[0])
                failure.__cause__ = error
            for _, ticket in tickets:
                with suppress(Exception):
                    ticket.wait()
        if failure is None:  # first: whoever is given an outcome may want no more
            self._under_way.append(_UnderWay(unit, counts, tickets))
        yield from self._take_finished()
        if failure is not None or not tickets:
            yield from self.settle()  # slots are filled in turn, and this unit is out of turn
        if failure is not None:
            yield unit, counts, failure

    def _parts(self, unit: Unit, start: int | None) -> list[Unit]:
        """What is left of a unit, in units that fit into a slot."""
        plan = self._job.plan
        if start is None and _slot_nbytes(unit, plan) <= plan.slot_nbytes:
            return [unit]
        parts: list[Unit] = []
        part: Unit = ()
        for chunk in unit:
            placement = plan.placements[chunk.placement]
            for piece in split(chunk, placement, plan.chunk_nbytes, start or 0):
                if part and _slot_nbytes((*part, piece), plan) > plan.slot_nbytes:
                    parts.append(part)
                    part = ()
                part = (*part, piece)
        return [*parts, part] if part else parts

    def run_batch(self, reader: Reader, batch: Sequence[Unit]) -> Iterator[_Outcome]:
        """Place units, many in one call where that can be; yields those finished by now."""
        at = 0
        while at < len(batch):
            begun, start = yield from self._run_bulk(reader, batch[at:])
            at += begun
            if start is not None or not begun:  # by itself: what was not read is tried once more
                yield from self.run(reader, batch[at], start)
                at += 1

    def _run_bulk(
        self, reader: Reader, units: Sequence[Unit]
    ) -> Generator[_Outcome, None, tuple[int, int | None]]:
        """Read units into the slots in turn, and begin their copies, without the interpreter.

        Returns:
            How many were begun, or have left with an error; and of the one after those the file
            byte up to which it has been copied, where the rest could not be read.
        """
        job = self._job
        name = job.plan.placements[units[0][0].placement].device
        bulk = job.bulk[name]
        kind: _SlotKind = "window" if reader.mapped and not job.staged else "staging"
        # of others, what is not aligned would be refused, and what is would not fit
        alignment = mmap.PAGESIZE if kind == "window" else reader.alignment
        room = job.plan.staging_nbytes - job.plan.slot_nbytes
        if bulk is None or (kind == "staging" and 2 * (alignment - 1) > room):
            return 0, None
        whole = list(takewhile(lambda unit: self._goes_in_bulk(unit, name), units))
        if not whole:
            return 0, None
        begins = [0]  # of each unit, the first of its reads
        reads: list[Read] = []
        failure = None
        try:
            self._prepare(name, kind, reader)
        except BaseException as error:
            yield from self._take_finished()
            if kind == "window" and isinstance(error, AllocationError):
                job.stage(f"{reader.path} cannot be mapped for the device: {error.problem}")
                return 0, None  # by itself, which closes what windows there are
            yield whole[0], [], error
            return 1, None
        try:
            slots = list(self._slots[name])
            for unit in whole:
                reads += self._reads(name, unit, alignment, slots, len(reads))
                begins.append(len(reads))
            busy = {id(staging) for entry in self._under_way for staging, _ in entry.tickets}
            failure = bulk.run(reader.fileno(), reads, [slot.staging for slot in slots], len(busy))
        except BaseException as error:
            for slot in self._slots.get(name, ()):  # it may have begun copies
                with suppress(Exception):
                    bulk.ticket(slot.staging).wait()
            yield from self._take_finished()
            yield from self.settle()
            yield whole[0], [], error
            return 1, None
        done = failure.index if failure else len(reads)
        begun = bisect_right(begins, done) - 1
        if failure is not None:
            for slot in slots:  # of this unit, too, some may have been begun
                with suppress(Exception):
                    bulk.ticket(slot.staging).wait()
            self._finished += self.settle()
        self._refilled([slot.staging for slot in slots[:done]])
        for index, unit in enumerate(whole[:begun]):
            last = range(max(begins[index], done - STAGING_SLOTS), begins[index + 1])
            stagings = [slots[at % STAGING_SLOTS].staging for at in last]
            tickets = [_SlotTicket(staging, bulk.ticket(staging)) for staging in stagings]
            ends = _StillThere(reader, unit, job) if kind == "window" else None
            self._under_way.append(_UnderWay(unit, [_NO_COUNTS] * len(unit), tickets, ends))
        self._refilled(())
        self._slots[name].rotate(-done)
        yield from self._take_finished()
        if failure is None:
            return begun, None
        yield from self.settle()
        start = next(run.start for chunk in whole[begun] for run in chunk.runs)
        if done > begins[begun]:
            start = reads[done - 1].offset + reads[done - 1].needed
        if failure.stage == "lock":  # from here on through slots, which are as large
            job.stage(f"pages of {reader.path} could not be locked: status {failure.code}")
        if failure.stage in ("read", "end", "lock"):
            return begun, start
        problem = f"a copy failed: status {failure.code}"
        yield whole[begun], [], DeviceError(name, problem)
        return begun + 1, None

    def _goes_in_bulk(self, unit: Unit, device: str) -> bool:
        """Whether all bytes of a unit go as they are, one after the other: a gap is not read."""
        on = self._job.plan.placements[unit[0].placement].device
        return (
            on == device
            and all(self._file_range((chunk,)) is not None for chunk in unit)
            and all(a.runs[0].stop <= b.runs[0].start for a, b in pairwise(unit))
        )

    def _refilled(self, stagings: Sequence[Staging]) -> None:
        """Copies from these slots have ended; what was waiting for nothing else is finished."""
        left: deque[_UnderWay] = deque()
        for entry in self._under_way:
            entry.tickets = [t for t in entry.tickets if all(t.staging is not s for s in stagings)]
            if entry.tickets:
                left.append(entry)
            else:
                self._finished.append(entry.outcome())
        self._under_way = left

    def _take_finished(self) -> Iterator[_Outcome]:
        finished, self._finished = self._finished, []
        yield from finished

    def _prepare(self, device: str, kind: _SlotKind, reader: Reader) -> None:
        """See that all slots of a device are there, of a kind; windows on the reader's file."""
        job = self._job
        of = reader if kind == "window" else None
        slots = self._slots.setdefault(device, deque())
        others = any(
            job.plan.placements[entry.unit[0].placement].device != device
            for entry in self._under_way
        )
        if others or any(slot.of is not of for slot in slots):
            self._finished += self.settle()  # what is under way is in other slots
        if any(slot.of is not of for slot in slots):
            self._close(device)  # first: both together are more than was planned
        while len(slots) < STAGING_SLOTS:
            slots.appendleft(self._new_slot(device, of))

    def _new_slot(self, device: str, of: Reader | None) -> _Slot:
        job = self._job
        bulk = job.bulk[device]
        if of is not None and bulk is not None:
            # as long as it was: past a new end, the kernel refuses its pages
            staging = bulk.window(of.fileno(), of.nbytes)
        else:
            staging = job.devices[device].staging(job.plan.staging_nbytes)
        kept = self._scratch.setdefault(device, [])
        casts = job.casts.get(device)
        scratch = kept.pop() if kept else casts.scratch() if casts is not None else 0
        return _Slot(staging, scratch, of)

    def _close(self, device: str) -> BaseException | None:
        """Give back the slots of a device; returns what went wrong with the last."""
        slots = self._slots[device]
        failure: BaseException | None = None
        while slots:
            slot = slots.popleft()
            self._scratch.setdefault(device, []).append(slot.scratch)
            try:
                slot.staging.close()
            except BaseException as error:
                failure = error
        return failure

    def _reads(
        self, device: str, unit: Unit, alignment: int, slots: Sequence[_Slot], index: int
    ) -> list[Read]:
        """What the loop is to do for a unit: reads of what fits into a slot.

        Args:
            device: its device.
            unit: the chunks.
            alignment: of the reads' first bytes and lengths.
            slots: read ``i`` goes to slot ``i % len(slots)``.
            index: of the first read.
        """
        job = self._job
        reads: list[Read] = []
        copies: list[Copy] = []
        start = at = unit[0].runs[0].start  # of the read, and of what comes next
        whole = unit[-1].runs[0].stop - start
        # parts of one size: a small one at the end would cost as much as the others
        size = round_up(-(-whole // -(-whole // job.plan.slot_nbytes)), mmap.PAGESIZE)
        size = min(size, job.plan.slot_nbytes)
        for chunk in unit:
            p = job.plan.placements[chunk.placement]
            width = p.src.itemsize if p.cast == "device" else 1
            if at != chunk.runs[0].start:  # what lies between is not wanted
                reads.append(_read(start, at, alignment, copies))
                copies, start = [], chunk.runs[0].start
                at = start
            while at < chunk.runs[0].stop:
                room = (size - (at - start)) // width * width
                if not room:
                    reads.append(_read(start, at, alignment, copies))
                    copies, start = [], at
                    continue
                n = min(room, chunk.runs[0].stop - at)
                scratch = slots[(index + len(reads)) % len(slots)].scratch
                lead = start % alignment
                copies.append(self._copy(device, chunk, at, n, at - start + lead, scratch))
                at += n
        reads.append(_read(start, at, alignment, copies))
        return reads

    def _copy(
        self, device: str, chunk: Chunk, start: int, nbytes: int, at: int, scratch: int
    ) -> Copy:
        """The copy of file bytes of a chunk that go as they are.

        Args:
            device: its device.
            chunk: the chunk.
            start: first file byte.
            nbytes: how many.
            at: where they lie in the slot.
            scratch: the slot's.
        """
        job = self._job
        bulk, casts = job.bulk[device], job.casts.get(device)
        assert bulk is not None, device
        p = job.plan.placements[chunk.placement]
        address = bulk.address(job.buffers[chunk.placement]) + chunk.start
        offset = start - chunk.runs[0].start
        if p.cast == "device" and casts is not None:
            address += offset // p.src.itemsize * p.dst.itemsize
            return casts.copy(chunk.placement, p, at, nbytes, address, scratch)
        return Copy(at, nbytes, address + offset)

    def settle(self) -> Iterator[_Outcome]:
        """Wait for all copies under way."""
        while self._under_way:
            yield self._under_way.popleft().outcome()

    def _place(
        self, reader: Reader, unit: Unit, counts: list[CastCounts], tickets: list[_SlotTicket]
    ) -> None:
        job = self._job
        name = job.plan.placements[unit[0].placement].device
        device = job.devices[name]
        slot: _Slot | None = None
        if not job.host_visible[name]:
            slot = self._slot(name, tickets)  # one a unit: the other's copies are under way
            found = self._file_range(unit)
            if found is not None and self._read_whole(reader, unit, *found, slot):
                self._send(name, unit, slot, 0, tickets)
                counts += [_NO_COUNTS] * len(unit)
                return
        at = 0
        with self._shared_view(reader, unit) as (whole, base):
            for chunk in unit:
                p = job.plan.placements[chunk.placement]
                try:
                    if chunk.start == chunk.stop:
                        counts.append(_NO_COUNTS)
                    elif job.host_visible[name] and p.cast != "device":
                        buffer = job.buffers[chunk.placement]
                        with device.window(buffer, chunk.start, chunk.stop) as out:
                            if p.action != "in_place":
                                populate(out)
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                    else:
                        slot = slot or self._slot(name, tickets)
                        nbytes = chunk.staged_nbytes(p)
                        with _part(slot.staging.view, at, at + nbytes) as out:
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                        self._send(name, (chunk,), slot, at, tickets)
                        at += slot_nbytes(nbytes)
                except CheckpointError as error:
                    if error.tensor is None:
                        raise error.of_tensor(job.tensor(chunk)[0]) from error
                    raise

    def _file_range(self, unit: Unit) -> tuple[int, int] | None:
        """The file bytes of a unit that go to the device as they are, and in one piece."""
        start = stop = -1
        for chunk in unit:
            p = self._job.plan.placements[chunk.placement]
            as_it_is = p.cast == "copy" or (p.cast == "device" and p.device in self._job.casts)
            if len(chunk.runs) != 1 or not as_it_is:
                return None
            run = chunk.runs[0]
            if run.rows != 1 or (start >= 0 and run.start != stop):
                return None
            start, stop = start if start >= 0 else run.start, run.stop
        return start, stop

    def _read_whole(self, reader: Reader, unit: Unit, start: int, stop: int, slot: _Slot) -> bool:
        """Read a unit into a slot at once, by pread: many maps of one process wait for each other.

        Returns:
            False where the file did not give the bytes of several chunks: one by one, the error
            names the tensor.
        """
        try:
            with _part(slot.staging.view, 0, stop - start) as out:
                reader.read_into(start, out)
        except CheckpointError as error:
            if len(unit) > 1:
                return False
            raise error.of_tensor(self._job.tensor(unit[0])[0]) from error
        return True

    def _send(
        self, name: str, unit: Unit, slot: _Slot, at: int, tickets: list[_SlotTicket]
    ) -> None:
        """Begin the copies of chunks whose bytes lie in a slot from ``at`` on, without gaps."""
        job = self._job
        bulk, device = job.bulk[name], job.devices[name]
        copies = []
        for chunk in unit:
            p = job.plan.placements[chunk.placement]
            nbytes = chunk.staged_nbytes(p)
            buffer = job.buffers[chunk.placement]
            if p.cast == "device" and name not in job.casts:
                device.cast_copy(slot.staging, at, nbytes, p.src, buffer, chunk.start, p.dst)
            elif bulk is None:
                ticket = device.copy(slot.staging, at, nbytes, buffer, chunk.start)
                tickets.append(_SlotTicket(slot.staging, ticket))
            else:
                start = chunk.runs[0].start
                copies.append(self._copy(name, chunk, start, nbytes, at, slot.scratch))
            at += nbytes
        if bulk is not None and copies:
            read = Read(0, 0, 0, tuple(copies))  # nothing is read
            try:
                failure = bulk.run(0, [read], [slot.staging], 0)
            finally:
                tickets.append(_SlotTicket(slot.staging, bulk.ticket(slot.staging)))
            if failure is not None:
                raise DeviceError(name, f"a copy failed: status {failure.code}")

    def _slot(self, device: str, tickets: Sequence[_SlotTicket]) -> _Slot:
        """The next slot of staging to be filled.

        Args:
            device: whose.
            tickets: of the unit that it is for; its copies from this slot are waited for.
        """
        slots = self._slots.setdefault(device, deque())
        if slots and slots[0].of is not None:  # windows, of which nothing is under way
            self._close(device)
        if len(slots) < STAGING_SLOTS:
            slots.append(self._new_slot(device, None))
        else:
            slots.rotate(-1)
        slot = slots[-1]
        while any(t.staging is slot.staging for entry in self._under_way for t in entry.tickets):
            self._finished.append(self._under_way.popleft().outcome())
        for staging, ticket in tickets:
            if staging is slot.staging:
                ticket.wait()
        return slot

    @contextmanager
    def _shared_view(self, reader: Reader, unit: Unit) -> Iterator[tuple[memoryview | None, int]]:
        """One window over a unit whose runs follow each other in a mapped file."""
        runs = [run for chunk in unit for run in chunk.runs]
        follow = all(a.stop == b.start for a, b in pairwise(runs))
        if len(runs) < 2 or not follow or not reader.mapped:
            yield None, 0
            return
        with ExitStack() as stack:
            whole: memoryview | None = None
            with suppress(CheckpointError):  # read one by one, the error names the tensor
                whole = stack.enter_context(reader.view(runs[0].start, runs[-1].stop))
            yield whole, runs[0].start

    def _fill(
        self,
        reader: Reader,
        chunk: Chunk,
        p: Placement,
        out: memoryview,
        whole: memoryview | None,
        base: int,
    ) -> CastCounts:
        """Read the chunk's runs and cast them into ``out``, the chunk's bytes."""
        cast = self._job.cast(p)
        moved = p.src is p.dst or p.cast == "device"  # bytes stay what they are
        counts = _NO_COUNTS
        for run in chunk.runs:
            n = (run.stop - run.start) // run.rows
            width = n if moved else n // p.src.itemsize * p.dst.itemsize
            offset, stride = run.offset - chunk.start, run.stride
            if p.cast == "device":  # the same places, in elements that are still to be cast
                offset = offset // p.dst.itemsize * p.src.itemsize
                stride = stride // p.dst.itemsize * p.src.itemsize
            if moved and run.rows == 1 and not reader.mapped:
                reader.read_into(run.start, out[offset : offset + n])
                continue
            with self._bytes(reader, run, whole, base) as src:
                for row in range(run.rows):
                    start = offset + row * stride
                    counts += cast(src[row * n : (row + 1) * n], out[start : start + width])
        return counts

    def _bytes(
        self, reader: Reader, run: Run, whole: memoryview | None, base: int
    ) -> AbstractContextManager[memoryview]:
        if whole is not None:
            return whole[run.start - base : run.stop - base]
        if reader.mapped:
            return reader.view(run.start, run.stop)
        nbytes = run.stop - run.start
        if not self._source:
            self._source = memoryview(bytearray(self._job.plan.slot_nbytes))
        reader.read_into(run.start, self._source[:nbytes])
        return self._source[:nbytes]


class _Crew:
    """The workers, and the two queues between them and the streaming thread."""

    def __init__(self, job: _Job, threads: int, interrupt: Interrupt) -> None:
        self._job = job
        self._interrupt = interrupt
        self._work: queue.SimpleQueue[tuple[Reader, Sequence[Unit]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[list[_Outcome] | None] = queue.SimpleQueue()
        self._in_flight: Counter[int] = Counter()  # units, by shard
        bulk = any(job.bulk.values())
        staged = not all(job.host_visible.values())
        # Units for each worker: one for each of its slots and one that waits, or more where they
        # are told or handed out together. What is begun and not finished is lost by a failure.
        self._told_together = _TOLD_TOGETHER if staged else 1
        self._ahead = STAGING_SLOTS + (
            2 * (_BATCH_UNITS if bulk else _TOLD_TOGETHER) if staged else 1
        )
        self._most_in_flight = self._ahead * threads
        self._stopped = threading.Event()
        self._inline = _Worker(job) if threads == 0 else None
        self._threads = [
            threading.Thread(target=self._serve, name=f"streamload-{i}") for i in range(threads)
        ]
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        interrupt.wake = lambda: self._done.put(None)

    def __enter__(self) -> _Crew:
        started = 0
        try:
            for thread in self._threads:
                thread.start()
                started += 1
        except RuntimeError:  # no more threads under this limit: those that there are will do
            self._threads = self._threads[:started]
            self._inline = None if started else _Worker(self._job)
            self._most_in_flight = self._ahead * started
        except BaseException:
            self._threads = self._threads[:started]
            self.join()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.join()

    def submit(self, reader: Reader, batch: Sequence[Unit]) -> None:
        """Hand out units; waits while enough are under way. Raises what a worker met."""
        if self._inline is not None:
            self._job.first_read = min(self._job.first_read, time.perf_counter())
            for unit in batch:
                self._take_all(self._inline.run(reader, unit))
            return
        while self._in_flight.total() >= self._most_in_flight:
            self._receive()
        self._in_flight[batch[0][0].shard] += len(batch)
        self._work.put((reader, batch))

    def drain(self, shard: int | None = None) -> None:
        """Wait for everything under way, or all of one shard. Raises what a worker met."""
        if self._inline is not None:
            self._take_all(self._inline.settle())
        while self._in_flight[shard] if shard is not None else self._in_flight.total():
            self._receive()

    def end(self) -> None:
        """End the crew when all is done. Raises what closing the staging met."""
        self.join()
        if not self._failures.empty():
            raise self._failures.get()

    def join(self) -> None:
        """Let the units under way end, drop the others, close all staging and end all threads.

        May be called again, and raises nothing.
        """
        self._stopped.set()
        self._interrupt.wake = _nothing
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                _insist(thread.join)
        if self._inline is not None:
            self._close(self._inline)

    def _close(self, worker: _Worker) -> None:
        failure = worker.close()
        if failure is not None:
            self._failures.put(failure)

    def _receive(self) -> None:
        outcomes = self._done.get()
        if outcomes is None:  # woken by Ctrl-C
            self._interrupt.check()
            return
        for unit, _, _ in outcomes:
            if unit:  # a worker that died has none
                self._in_flight[unit[0].shard] -= 1
        self._take_all(outcomes)

    def _take_all(self, outcomes: Iterable[_Outcome]) -> None:
        for unit, counts, error in outcomes:
            if error is not None:
                raise error
            self._job.done(unit, counts)
        self._job.tell()

    def _serve(self) -> None:
        """What a worker's thread does. Whatever ends it early ends the load, which waits for it."""
        worker = _Worker(self._job)
        try:
            worker.open()
            self._work_off(worker)
        except BaseException as error:
            self._done.put([((), [], error)])
        self._close(worker)

    def _work_off(self, worker: _Worker) -> None:
        finished: list[_Outcome] = []
        while True:
            try:
                item = self._work.get_nowait()
            except queue.Empty:
                # nothing to overlap with: hand over what is finished before going to sleep
                finished += worker.settle()
                if finished:
                    self._done.put(finished)
                    finished = []
                item = self._work.get()
            if item is None or self._stopped.is_set():
                break
            reader, batch = item
            self._job.first_read = min(self._job.first_read, time.perf_counter())
            for outcome in worker.run_batch(reader, batch):
                finished.append(outcome)
                if self._stopped.is_set() or outcome[2] is not None:
                    break
            # several at once: the streaming thread wakes up for each time, and takes the lock of
            # the interpreter from workers that have just read
            failed = bool(finished) and finished[-1][2] is not None
            if failed or len(finished) >= self._told_together:
                self._done.put(finished)
                finished = []
            if failed:  # of its slots nothing is known any more
                return


class Interrupt:
    """Ctrl-C, kept until the books are straight."""

    def __init__(self, handler: Callable[[int, FrameType | None], object] | None) -> None:
        self.wake: Callable[[], None] = _nothing
        self._handler = handler
        self._pending = 0

    def check(self) -> None:
        """Let the handler that was in place have what was kept; Python's raises."""
        while self._pending and self._handler is not None:
            self._pending -= 1
            self._handler(signal.SIGINT, None)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Note the signal and wake the streaming thread."""
        self._pending += 1
        self.wake()


def _nothing() -> None:
    pass


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Keep Ctrl-C for a point where the books are straight.

    In the main thread, the handler in place (Python's or the application's) is called from
    `Interrupt.check` instead of between any two instructions, and once more at the end of a block
    that succeeds. One that comes while an error is on its way is dropped: the block is ending
    already. Blocks nest; the outermost decides. A process that ignores SIGINT, or leaves it to
    the kernel, is left alone.
    """
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
    outer = getattr(handler, "__self__", None)
    if isinstance(outer, Interrupt):
        yield outer
        return
    interrupt = Interrupt(handler if callable(handler) else None)
    if not callable(handler):
        yield interrupt
        return
    signal.signal(signal.SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) == interrupt.handle:  # nobody else's since
            signal.signal(signal.SIGINT, handler)
    interrupt.check()


def _cached_nbytes(cut: Iterable[Chunk], plan: Plan) -> int:
    """File bytes that are read through the page cache."""
    cached = {index for index, kind in enumerate(plan.readers) if kind != "direct"}
    return sum(chunk.read_nbytes for chunk in cut if chunk.shard in cached)


def _available_nbytes() -> int | None:
    """What the host has left for page cache; None where no file says."""
    try:
        return available_host_nbytes()
    except DeviceError:
        return None


def _file_ranges(unit: Unit) -> Iterator[tuple[int, int]]:
    """The file bytes of a unit, those of neighbours together."""
    start = stop = -1
    for chunk in unit:
        for run in chunk.runs:
            if run.start != stop:
                if stop > start:
                    yield start, stop
                start = run.start
            stop = run.stop
    if stop > start:
        yield start, stop


def _read(start: int, stop: int, alignment: int, copies: Sequence[Copy]) -> Read:
    """A read of file bytes ``start`` to ``stop`` (exclusive), and of what is around them."""
    first = start // alignment * alignment
    return Read(first, round_up(stop, alignment) - first, stop - first, tuple(copies))


def _slot_nbytes(unit: Unit, plan: Plan) -> int:
    """Bytes that a unit takes up in a slot."""
    return sum(
        slot_nbytes(max(chunk.staged_nbytes(plan.placements[chunk.placement]), chunk.read_nbytes))
        for chunk in unit
    )


def _at_fault(unit: Unit, error: CheckpointError) -> Chunk:
    """The chunk whose bytes a file did not give, as far as the error says."""
    end = error.found if isinstance(error.found, int) else 0
    return next((chunk for chunk in unit if chunk.runs and chunk.runs[-1].stop > end), unit[0])


@contextmanager
def _part(view: memoryview, start: int, stop: int) -> Iterator[memoryview]:
    """A slice, released at the end, unless the traceback of an error still refers to it."""
    part = view[start:stop]
    try:
        yield part
    finally:
        with suppress(BufferError):
            part.release()


def _insist(wait: Callable[[], object]) -> None:
    """Wait to the end, whatever a signal handler raises meanwhile: threads are always joined."""
    while True:
        try:
            wait()
            return
        except BaseException:
            continue
