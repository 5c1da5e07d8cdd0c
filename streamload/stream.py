"""The one loop: read, cast, place. The only threads of streamload are here.

The calling thread prepares parameters in plan order (old memory is released and new memory is
allocated there, since frameworks are not thread-safe) and hands units of work to a few workers;
progress is told and parameters are finished there too. A worker reads a window of the file and
casts it into the device's memory, or into a staging slot of its own that the device copies from.
With no workers, the calling thread does that as well.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

from streamload.cast.table import Cast, CastCounts, make_cast
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.readers import Reader, open_reader
from streamload.devices.base import Buffer, Device, Read, Staging, Ticket, populate
from streamload.dtypes import DType
from streamload.errors import CheckpointError, DeviceError, OutOfRangeError
from streamload.plan.budget import STAGING, Ledger
from streamload.plan.chunks import Chunk, Run, chunks
from streamload.plan.plan import STAGING_SLOTS, Placement, Plan, slot_nbytes

_NO_COUNTS = CastCounts()
_BATCH_UNITS = 16
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
        counts: cast counts by placement index, of the casts that the host made.
        seconds: wall time.
    """

    read_nbytes: int = 0
    counts: dict[int, CastCounts] = field(default_factory=dict)
    seconds: float = 0.0


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
        crew = stack.enter_context(_Crew(job, plan.threads, interrupt))
        opened: deque[tuple[int, Reader]] = deque()
        try:
            for shard, units in _by_shard(job.chunks, plan):
                if len(opened) == _OPEN_SHARDS:
                    crew.drain(opened[0][0])
                    opened.popleft()[1].close()
                header = checkpoint.shards[shard]
                reader = open_reader(header.path, header.file_nbytes, plan.readers[shard])
                opened.append((shard, reader))
                for batch in _batches(units, job, plan.threads):
                    interrupt.check()
                    job.begin(batch)
                    crew.submit(reader, batch)
            crew.drain()
        finally:
            crew.join()  # before the readers are closed
            for _, reader in opened:
                reader.close()
        crew.end()
        interrupt.check()  # it came when the last byte had been placed
        job.stats.seconds = time.perf_counter() - begun
        return job.stats


def _by_shard(cut: Sequence[Chunk], plan: Plan) -> Iterator[tuple[int, list[Unit]]]:
    """Group chunks into units, small neighbours together, and units by shard."""
    units: list[Unit] = []
    unit: list[Chunk] = []
    size = 0
    for chunk in cut:
        new_shard = bool(unit) and chunk.shard != unit[0].shard
        grows = slot_nbytes(max(chunk.stop - chunk.start, chunk.read_nbytes))
        if unit and (
            new_shard
            or size + grows > plan.slot_nbytes
            or len(unit) == _MAX_UNIT_CHUNKS
            or plan.placements[chunk.placement].device != plan.placements[unit[0].placement].device
        ):
            units.append(tuple(unit))
            if new_shard:
                yield unit[0].shard, units
                units = []
            unit, size = [], 0
        unit.append(chunk)
        size += grows
    if unit:
        units.append(tuple(unit))
        yield unit[0].shard, units


def _batches(units: Sequence[Unit], job: _Job, workers: int) -> Iterator[Sequence[Unit]]:
    """Hand out units that are copied as they are many at a time, fewer towards the end.

    A worker then goes from one to the next by itself: waking threads costs more than reading.
    """
    at = 0
    while at < len(units):
        most = min(_BATCH_UNITS, (len(units) - at) // (2 * max(workers, 1)))
        stop = at + 1
        while stop < at + most and job.is_raw(units[stop - 1]) and job.is_raw(units[stop]):
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
        self.buffers: dict[int, Buffer] = {}
        self.chunks = chunks(plan, checkpoint)
        self.bulk = {name: device.bulk for name, device in devices.items()}
        self.host_visible = {name: device.info.host_visible for name, device in devices.items()}
        self._checkpoint = checkpoint
        self._target = target
        self._progress = progress
        self._left: dict[int, int] = {}  # chunks to come, by placement
        for chunk in self.chunks:
            self._left[chunk.placement] = self._left.get(chunk.placement, 0) + 1
        self._casts: dict[tuple[DType, DType, str], Cast] = {}
        self._compiling = threading.Lock()

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

    def is_raw(self, unit: Unit) -> bool:
        """Whether a unit's bytes go as they are to a device that takes many at a time."""
        p = self.plan.placements[unit[0].placement]
        return p.cast == "copy" and self.bulk[p.device] is not None

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
                self._target.finish(index, self.stats.counts.get(index, _NO_COUNTS))
                del self.buffers[index]

    def tell(self) -> None:
        """Tell the progress."""
        self._progress(self.stats.read_nbytes)


_Outcome = tuple[Unit, list[CastCounts], BaseException | None]


class _Worker:
    """Reads, casts and places units; owns its staging slots and its source buffer.

    `run` and `settle` raise nothing: each unit leaves by exactly one outcome.
    """

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._slots: dict[str, deque[Staging]] = {}  # by device, least recently used first
        self._under_way: deque[tuple[Unit, list[CastCounts], list[Ticket]]] = deque()
        self._source = memoryview(b"")

    def close(self) -> BaseException | None:
        """Give back the staging slots, all of them; returns what went wrong with the last."""
        for _ in self.settle():
            pass  # where the load failed: nobody asks any more, but the copies must have ended
        failure: BaseException | None = None
        for slot in (slot for slots in self._slots.values() for slot in slots):
            try:
                slot.close()
            except BaseException as error:
                failure = error
        self._slots.clear()
        return failure

    def run(self, reader: Reader, unit: Unit) -> Iterator[_Outcome]:
        """Place one unit; yields the units that are finished by now."""
        while len(self._under_way) >= STAGING_SLOTS:
            yield self._settle()  # its slot is filled again
        counts: list[CastCounts] = []
        tickets: list[Ticket] = []
        try:
            self._place(reader, unit, counts, tickets)
        except BaseException as error:
            if isinstance(error, CheckpointError) and error.tensor is None:
                named = error.of_tensor(self._job.tensor(_at_fault(unit, error))[0])
                named.__cause__ = error
                error = named
            for ticket in tickets:
                with suppress(Exception):
                    ticket.wait()
            yield from self.settle()  # slots are filled in turn, and this unit is out of turn
            yield unit, counts, error
            return
        self._under_way.append((unit, counts, tickets))
        if not tickets:
            yield from self.settle()

    def run_batch(self, reader: Reader, batch: Sequence[Unit]) -> Iterator[_Outcome]:
        """Place units, many in one call where that can be; yields those finished by now."""
        at = 0
        while at < len(batch):
            begun = yield from self._run_bulk(reader, batch[at:])
            if not begun:  # not to be done in bulk, or the first of them was not read: once more
                yield from self.run(reader, batch[at])
            at += begun or 1

    def _run_bulk(self, reader: Reader, units: Sequence[Unit]) -> Generator[_Outcome, None, int]:
        """Read units into the slots in turn, and begin their copies, without the interpreter.

        Returns:
            How many were begun, or have left with an error.
        """
        plan = self._job.plan
        name = plan.placements[units[0][0].placement].device
        device = self._job.devices[name]
        bulk = self._job.bulk[name]
        if bulk is None or reader.alignment > 1:  # what is not aligned would be refused
            return 0
        reads = []
        for unit in units:
            raw = self._raw_range(unit)
            if raw is None or plan.placements[unit[0].placement].device != name:
                break  # those before it
            copies = tuple(
                (
                    chunk.runs[0].start - raw[0],
                    chunk.stop - chunk.start,
                    bulk.address(self._job.buffers[chunk.placement]) + chunk.start,
                )
                for chunk in unit
            )
            reads.append(Read(raw[0], raw[1] - raw[0], raw[1] - raw[0], copies))
        if len(reads) < STAGING_SLOTS:
            return 0
        units = units[: len(reads)]
        if any(plan.placements[unit[0].placement].device != name for unit, _, _ in self._under_way):
            yield from self.settle()  # their slots are others
        slots = self._slots.setdefault(name, deque())
        try:
            while len(slots) < STAGING_SLOTS:
                slots.appendleft(device.staging(plan.slot_nbytes))
            failure = bulk.run(reader.fileno(), reads, tuple(slots), len(self._under_way))
        except BaseException as error:
            for slot in slots:  # it may have begun copies
                with suppress(Exception):
                    bulk.ticket(slot).wait()
            yield from self.settle()
            yield units[0], [], error
            return 1
        begun = failure.index if failure else len(units)
        if failure is not None and failure.stage == "copy":  # some of this unit's own were begun
            with suppress(Exception):
                bulk.ticket(slots[begun % STAGING_SLOTS]).wait()
        finished: list[_Outcome] = []
        if failure is None:  # every slot was waited for before it was filled
            finished += ((unit, counts, None) for unit, counts, _ in self._under_way)
            self._under_way.clear()
        else:
            finished += self.settle()
        for index, unit in enumerate(units[:begun]):
            counts = [_NO_COUNTS] * len(unit)
            if index < begun - STAGING_SLOTS:
                finished.append((unit, counts, None))
            else:
                ticket = bulk.ticket(slots[index % STAGING_SLOTS])
                self._under_way.append((unit, counts, [ticket]))
        slots.rotate(-begun)
        yield from finished
        if failure is None or failure.stage in ("read", "end"):
            return begun  # what was not read is tried once more by itself, and names its tensor
        yield from self.settle()
        yield units[begun], [], DeviceError(name, f"a copy failed: status {failure.code}")
        return begun + 1

    def settle(self) -> Iterator[_Outcome]:
        """Wait for all copies under way."""
        while self._under_way:
            yield self._settle()

    def _settle(self) -> _Outcome:
        unit, counts, tickets = self._under_way.popleft()
        failure: BaseException | None = None
        for ticket in tickets:
            try:
                ticket.wait()
            except BaseException as error:
                failure = error
        return unit, counts, failure

    def _place(
        self, reader: Reader, unit: Unit, counts: list[CastCounts], tickets: list[Ticket]
    ) -> None:
        job = self._job
        name = job.plan.placements[unit[0].placement].device
        device = job.devices[name]
        slot: Staging | None = None
        if not job.host_visible[name]:
            raw = self._raw_range(unit)
            if raw is not None:
                slot = self._slot(name)  # one a unit: the other one's copies are under way
                if self._place_raw(reader, unit, *raw, slot, device, counts, tickets):
                    return
        at = 0
        with self._shared_view(reader, unit) as (whole, base):
            for chunk in unit:
                p = job.plan.placements[chunk.placement]
                buffer = job.buffers[chunk.placement]
                try:
                    if chunk.start == chunk.stop:
                        counts.append(_NO_COUNTS)
                    elif job.host_visible[name] and p.cast != "device":
                        with device.window(buffer, chunk.start, chunk.stop) as out:
                            if p.action != "in_place":
                                populate(out)
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                    else:
                        slot = slot or self._slot(name)
                        nbytes = chunk.staged_nbytes(p)
                        with _part(slot.view, at, at + nbytes) as out:
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                        if p.cast == "device":
                            device.cast_copy(slot, at, nbytes, p.src, buffer, chunk.start, p.dst)
                        else:
                            tickets.append(device.copy(slot, at, nbytes, buffer, chunk.start))
                        at += slot_nbytes(nbytes)
                except CheckpointError as error:
                    if error.tensor is None:
                        raise error.of_tensor(job.tensor(chunk)[0]) from error
                    raise

    def _raw_range(self, unit: Unit) -> tuple[int, int] | None:
        """The file bytes of a unit, where they go to the device as they are and in one piece."""
        start = stop = -1
        for chunk in unit:
            if len(chunk.runs) != 1 or self._job.plan.placements[chunk.placement].cast != "copy":
                return None
            run = chunk.runs[0]
            if run.rows != 1 or (start >= 0 and run.start != stop):
                return None
            start, stop = start if start >= 0 else run.start, run.stop
        return start, stop

    def _place_raw(
        self,
        reader: Reader,
        unit: Unit,
        start: int,
        stop: int,
        slot: Staging,
        device: Device,
        counts: list[CastCounts],
        tickets: list[Ticket],
    ) -> bool:
        """Read a unit into a slot at once, by pread: many maps of one process wait for each other.

        Returns:
            False where the file did not give the bytes of several chunks: one by one, the error
            names the tensor.
        """
        job = self._job
        try:
            with _part(slot.view, 0, stop - start) as out:
                reader.read_into(start, out)
        except CheckpointError as error:
            if len(unit) > 1:
                return False
            raise error.of_tensor(job.tensor(unit[0])[0]) from error
        for chunk in unit:
            at, nbytes = chunk.runs[0].start - start, chunk.stop - chunk.start
            buffer = job.buffers[chunk.placement]
            tickets.append(device.copy(slot, at, nbytes, buffer, chunk.start))
            counts.append(_NO_COUNTS)
        return True

    def _slot(self, device: str) -> Staging:
        slots = self._slots.setdefault(device, deque())
        if len(slots) < STAGING_SLOTS:
            slots.append(self._job.devices[device].staging(self._job.plan.slot_nbytes))
        else:
            slots.rotate(-1)
        return slots[-1]

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
            for outcome in worker.run_batch(reader, batch):
                finished.append(outcome)
                if self._stopped.is_set() or outcome[2] is not None:
                    break
            # several at once: the streaming thread wakes up for each time, and takes the lock of
            # the interpreter from workers that have just read
            if len(finished) >= self._told_together or (finished and finished[-1][2] is not None):
                self._done.put(finished)
                finished = []


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
