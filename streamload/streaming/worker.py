"""Workers: threads that read, cast and place.

A worker reads a window of the file and casts it into the device's memory, or into a staging slot of
its own that the device copies from. If a device runs many reads and copies in one call, bytes that
the host does not cast pass through the slots without the interpreter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamload.core.system import populate, released
from streamload.devices.base import Read, StagedElements, Staging, Ticket
from streamload.errors import CheckpointError, DeviceError
from streamload.files.reader import Reader
from streamload.planning.chunks import Chunk, SmallTensorBatch, StridedRead, split
from streamload.planning.moves import Kind
from streamload.planning.plan import STAGING_SLOTS, slot_nbytes
from streamload.streaming.bulk import Slot, copy_of, reads_of, refill_of, refill_slot_nbytes
from streamload.streaming.state import NO_COUNTS, Counts, Job, WorkItem, file_ranges
from streamload.streaming.steps import Casting, Encoding, Step, Transposer, rows_of, step_of

if TYPE_CHECKING:
    from streamload.devices.cuda_copies import BulkCopier, Refiller

#: A unit, the counts of its chunks, and the error that ended it, if any.
Outcome = tuple[WorkItem, list[Counts], BaseException | None]


class SlotTicket(NamedTuple):
    """A copy that may be running, and the staging slot that it reads."""

    staging: Staging
    ticket: Ticket


@dataclass(slots=True)
class UnderWay:
    """A work item that has been read, and the tickets of its copies that may be running."""

    unit: WorkItem
    counts: list[Counts]
    tickets: list[SlotTicket]
    ticket: Ticket | None = None  # of copies from slots that threads share
    held: ExitStack = field(default_factory=ExitStack)  # closed when the ticket's copies have ended

    def outcome(self) -> Outcome:
        """Wait for the copies; return the work item, its counts, and an error or None."""
        failure: BaseException | None = None
        shared = [] if self.ticket is None else [self.ticket]
        for ticket in [*shared, *(ticket for _, ticket in self.tickets)]:
            try:
                ticket.wait()
            except BaseException as error:
                failure = error
        try:
            self.held.close()
        except BaseException as error:  # the file has changed
            failure = failure or error
        try:
            return self.unit, self.counts, failure
        finally:
            del failure  # its traceback has this call: a cycle


def named(job: Job, unit: WorkItem, error: BaseException) -> BaseException:
    """Return the error; a `CheckpointError` without a tensor gets the tensor at fault."""
    if not isinstance(error, CheckpointError) or error.tensor is not None:
        return error
    found = error.of_tensor(job.tensor(_at_fault(unit, error)).name)
    found.__cause__ = error
    return found


def _at_fault(unit: WorkItem, error: CheckpointError) -> Chunk:
    """Return the first chunk that ends beyond the file's end (``error.found``), else the first."""
    end = error.found if isinstance(error.found, int) else 0
    return next((chunk for chunk in unit if chunk.runs and chunk.runs[-1].stop > end), unit[0])


class Worker:
    """Reads, casts and places work items in one thread; owns staging slots and a source buffer.

    `run`, `run_batch` and `settle` raise nothing: they yield exactly one outcome, (work item,
    counts, error or None), for each.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._slots: dict[str, deque[Slot]] = {}  # by device, least recently used first
        self._under_way: deque[UnderWay] = deque()
        self._finished: list[Outcome] = []  # to be yielded next
        self._source = memoryview(b"")
        self._transposer = Transposer(job.plan)
        self._fresh = False  # it has only the slot of `open`, and has begun nothing
        self._refiller: Refiller | None = None  # with slots that several threads fill

    def open(self) -> None:
        """Allocate the first staging slot, while the first parameters are allocated.

        Locking its pages takes longer than anything else before the first read, and the driver
        locks pages for one thread at a time: other slots are allocated when this one is in use.
        """
        job = self._job
        devices = {p.device for p, _ in job.plan.placements.counted}
        if len(devices) == 1 and job.devices[name := devices.pop()].bulk is not None:
            self._slots.setdefault(name, deque()).append(self._new_slot(name))
            self._fresh = True

    def close(self) -> BaseException | None:
        """Free all staging slots; return the last error in doing so, if any."""
        deque(self.settle(), 0)  # after a failure, too, the copies must have ended
        failure: BaseException | None = None
        refiller, self._refiller = self._refiller, None
        try:
            if refiller is not None:
                refiller.close()
        except BaseException as error:
            failure = error
        for slots in self._slots.values():
            while slots:
                try:
                    slots.popleft().staging.close()
                except BaseException as error:
                    failure = error
        return failure

    def run(self, reader: Reader, unit: WorkItem, start: int | None = None) -> Iterator[Outcome]:
        """Place one unit, or its bytes from ``start`` in the file; yield ended units' outcomes."""
        counts: list[Counts] = []
        tickets: list[SlotTicket] = []
        failure: BaseException | None = None
        try:
            self._wait_for_uses()
            parts = self._parts(unit, start)
            for part in parts:
                self._place(reader, part, counts, tickets)
            if parts != [unit] or not counts:  # it is cut, or placed whole: the host casts nothing
                counts = [NO_COUNTS] * len(unit)
        except BaseException as error:
            failure = named(self._job, unit, error)
            UnderWay(unit, counts, tickets).outcome()
        try:
            if failure is None:  # before outcomes: the caller may stop at one
                self._has_begun(unit, counts, tickets)
            yield from self._take_finished()
            if failure is not None or not tickets:
                yield from self.settle()  # slots are filled in order, and this unit has none
            if failure is not None:
                yield unit, counts, failure
        finally:
            del failure  # its traceback has this call: a cycle, wherever the caller stops

    def _wait_for_uses(self) -> None:
        """Wait for what copies have to come after; those of `_refill` do so on the device."""
        for work in self._job.after:
            work.wait()

    def _parts(self, unit: WorkItem, start: int | None) -> list[WorkItem]:
        """Cut a unit, from file byte ``start`` on unless None, into units that fit into a slot."""
        plan = self._job.plan
        if start is None:
            sizes = (_slot_nbytes(chunk, plan.placements[chunk.placement].kind) for chunk in unit)
            # units that are not for bulk copies were cut to fit
            bulk = self._job.is_bulk(plan.placements[unit[0].placement].kind)
            if not bulk or sum(sizes) <= plan.slot_nbytes:
                return [unit]
        parts: list[WorkItem] = []
        part: list[Chunk] = []
        size = 0
        for chunk in unit:
            kind = plan.placements[chunk.placement].kind
            for piece in split(chunk, kind, plan.chunk_nbytes, start or 0):
                grows = _slot_nbytes(piece, kind)
                if part and size + grows > plan.slot_nbytes:
                    parts.append(tuple(part))
                    part, size = [], 0
                part.append(piece)
                size += grows
        return [*parts, tuple(part)] if part else parts

    def run_batch(self, reader: Reader, batch: Sequence[WorkItem]) -> Iterator[Outcome]:
        """Place units, many in one call if the device can; yield ended units' outcomes."""
        at = 0
        while at < len(batch):
            begun, start = yield from self._run_bulk(reader, batch[at:])
            at += begun
            if start is not None or not begun:  # alone: what could not be read is tried again
                yield from self.run(reader, batch[at], start)
                at += 1

    def _run_bulk(
        self, reader: Reader, units: Sequence[WorkItem]
    ) -> Generator[Outcome, None, tuple[int, int | None]]:
        """Read units into slots in order and start their copies, without the interpreter's lock.

        Returns how many were started, or ended with an error; and if the next one could not be read
        to its end, the file byte up to which it has been copied.
        """
        job = self._job
        name = job.plan.placements[units[0][0].placement].kind.device
        bulk = job.devices[name].bulk
        alignment = reader.alignment
        room = job.plan.staging_nbytes - job.plan.slot_nbytes
        if bulk is None or not reader.has_file or 2 * (alignment - 1) > room:
            return 0, None
        whole = list(takewhile(lambda unit: self._goes_in_bulk(unit, name), units))
        if not whole:
            return 0, None
        if job.lanes > 1:
            return (yield from self._refill(reader, whole, bulk)), None
        begins = [0]  # index of each unit's first read
        reads: list[Read] = []
        failure = None
        fresh, self._fresh = self._fresh, False
        if fresh:  # one unit with the slot of `open`: its copy runs while more pages are locked
            whole = whole[:1]
        try:
            self._wait_for_uses()
            self._prepare(name, 1 if fresh else STAGING_SLOTS)
            slots = list(self._slots[name])
            for unit in whole:
                reads += reads_of(job, name, unit, alignment, slots, len(reads))
                begins.append(len(reads))
            busy = {id(staging) for entry in self._under_way for staging, _ in entry.tickets}
            with reader.unchanged():
                stagings = [slot.staging for slot in slots]
                failure = bulk.run(reader.fileno(), reads, stagings, len(busy))
        except BaseException as error:
            for slot in self._slots.get(name, ()):  # it may have started copies
                with suppress(Exception):
                    bulk.ticket(slot.staging).wait()
            yield from self._take_finished()
            yield from self.settle()
            yield whole[0], [], named(job, whole[0], error)
            return 1, None
        done = failure.index if failure else len(reads)
        begun = bisect_right(begins, done) - 1
        if failure is not None:
            for slot in slots:  # some copies of this unit, too, may have been started
                with suppress(Exception):
                    bulk.ticket(slot.staging).wait()
            self._finished += self.settle()
        self._refilled([slot.staging for slot in slots[:done]])
        for index, unit in enumerate(whole[:begun]):
            last = range(max(begins[index], done - len(slots)), begins[index + 1])
            stagings = [slots[at % len(slots)].staging for at in last]
            tickets = [SlotTicket(staging, bulk.ticket(staging)) for staging in stagings]
            self._has_begun(unit, [NO_COUNTS] * len(unit), tickets)
        self._refilled(())
        self._slots[name].rotate(-done)
        yield from self._take_finished()
        if failure is None:
            return begun, None
        yield from self.settle()
        start = next(run.start for chunk in whole[begun] for run in chunk.runs)
        if done > begins[begun]:
            start = reads[done - 1].offset + reads[done - 1].needed
        if failure.stage in ("read", "end"):
            return begun, start
        problem = f"a copy failed: status {failure.code}"
        yield whole[begun], [], DeviceError(name, problem)
        return begun + 1, None

    def _refill(
        self, reader: Reader, units: Sequence[WorkItem], bulk: BulkCopier
    ) -> Generator[Outcome, None, int]:
        """Read units by several threads in one call, and start their copies.

        Returns the number of units: all, or 0 if they could not be read.
        """
        job, refiller = self._job, self._refiller
        used = refiller.next if refiller is not None else None
        while used is not None and self._under_way and self._under_way[0].ticket is used:
            yield self._under_way.popleft().outcome()  # its ticket is this run's
        held = ExitStack()  # the file, until the copies have ended
        try:
            parts = [refill_of(job, unit, reader.alignment) for unit in units]
            if refiller is None:
                most = refill_slot_nbytes(job)
                refiller = self._refiller = bulk.refiller(job.lanes, STAGING_SLOTS, most)
            ticket = refiller.next
            drops = job.plan.page_cache == "drop" or job.shards.drops(reader.path)
            locks = reader.alignment == 1 and reader.leased and not drops
            with reader.unchanged():
                failure = refiller.run(reader.fileno(), parts, locks, job.after)
                if locks and failure is None:  # the device may still read it
                    held.enter_context(reader.unchanged())
        except BaseException as error:
            if refiller is not None:
                refiller.wait()  # it may have started copies
            with suppress(CheckpointError):
                held.close()
            yield from self.settle()
            yield units[0], [], named(job, units[0], error)
            return 1
        if failure is not None:
            yield from self.settle()
            if failure.stage in ("read", "end"):  # read alone, the tensor at fault is found
                return 0
            problem = f"a copy failed: status {failure.code}"
            yield units[0], [], DeviceError(next(iter(job.devices)), problem)
            return 1
        for unit in units:
            self._under_way.append(UnderWay(unit, [NO_COUNTS] * len(unit), [], ticket, held))
            job.sink.sent(unit, [ticket])
        return len(units)

    def reads_nothing(self, units: Sequence[WorkItem]) -> bool:
        """Whether the device reads these units from the page cache, all but small parts of it."""
        refills, refiller = self._job.refills, self._refiller
        if refiller is None or not units:
            return False
        known = (refills.get(id(unit)) for unit in units)
        return all(each is not None and refiller.is_locked(each.reads) for each in known)

    def _has_begun(self, unit: WorkItem, counts: list[Counts], tickets: list[SlotTicket]) -> None:
        """Note that a unit was read and its copies started; call `Sink.sent`."""
        self._under_way.append(UnderWay(unit, counts, tickets))
        self._job.sink.sent(unit, [ticket for _, ticket in tickets])

    def _goes_in_bulk(self, unit: WorkItem, device: str) -> bool:
        """Whether a bulk copy can take a unit: its chunks are unchanged, and in file order."""
        if id(unit) in self._job.refills:
            return True
        on = self._job.plan.placements[unit[0].placement].kind.device
        if on != device or isinstance(unit, SmallTensorBatch):
            return on == device
        return all(self._file_range((chunk,)) is not None for chunk in unit) and all(
            a.runs[0].stop <= b.runs[0].start for a, b in pairwise(unit)
        )

    def _refilled(self, stagings: Sequence[Staging]) -> None:
        """Note that copies from these slots have ended; finish work items without other copies."""
        left: deque[UnderWay] = deque()
        for entry in self._under_way:
            entry.tickets = [t for t in entry.tickets if all(t.staging is not s for s in stagings)]
            if entry.tickets:
                left.append(entry)
            else:
                self._finished.append(entry.outcome())
        self._under_way = left

    def _take_finished(self) -> Iterator[Outcome]:
        finished, self._finished = self._finished, []
        yield from finished

    def _prepare(self, device: str, count: int) -> None:
        """Allocate staging slots for a device, until it has ``count``."""
        moves = self._job.plan.placements
        slots = self._slots.setdefault(device, deque())
        units = (entry.unit[0] for entry in self._under_way)
        if any(moves[first.placement].kind.device != device for first in units):
            self._finished += self.settle()  # those are in slots of another device
        while len(slots) < count:
            slots.appendleft(self._new_slot(device))

    def _new_slot(self, device: str) -> Slot:
        job = self._job
        staging = job.devices[device].staging(job.plan.staging_nbytes)
        casts = job.casts.get(device)
        return Slot(staging, casts.scratch() if casts is not None else 0)

    def settle(self) -> Iterator[Outcome]:
        """Wait for all copies under way, and yield their work items' outcomes."""
        while self._under_way:
            yield self._under_way.popleft().outcome()

    def _place(
        self, reader: Reader, unit: WorkItem, counts: list[Counts], tickets: list[SlotTicket]
    ) -> None:
        """Read and place a unit that fits into a slot; append its tickets, and its chunks' counts.

        Of a unit that is placed whole, without a cast, no counts are appended.
        """
        job = self._job
        if job.sink.bring is not None:
            with reader.unchanged():
                for start, stop in file_ranges(unit):
                    job.sink.bring(reader.path, start, stop)
            return
        name = job.plan.placements[unit[0].placement].kind.device
        device = job.devices[name]
        slot: Slot | None = None
        visible = job.infos[name].host_visible
        if not visible:
            slot = self._slot(name, tickets)  # one for each unit, so that copies overlap reads
            found = self._file_range(unit)
            if found is not None and self._read_whole(reader, unit, *found, slot):
                self._send(name, unit, slot, 0, tickets)
                return
        elif isinstance(unit, SmallTensorBatch) and self._scatter(reader, unit):
            return
        at = 0
        with self._shared_view(reader, unit) as (whole, base):
            for chunk in unit:
                p = job.plan.placements[chunk.placement].kind
                try:
                    if chunk.start == chunk.stop:
                        counts.append(NO_COUNTS)
                    elif visible and p.cast != "device":
                        buffer = job.buffers[chunk.placement]
                        with device.window(buffer, chunk.start, chunk.stop) as out:
                            if p.action != "in_place" and not job.transfer.refill_nbytes:
                                populate(out)
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                    else:
                        slot = slot or self._slot(name, tickets)
                        nbytes = chunk.staged_nbytes(p)
                        with released(slot.staging.view[at : at + nbytes]) as out:
                            counts.append(self._fill(reader, chunk, p, out, whole, base))
                        self._send(name, (chunk,), slot, at, tickets)
                        at += slot_nbytes(nbytes)
                except CheckpointError as error:
                    if error.tensor is None:
                        raise error.of_tensor(job.tensor(chunk).name) from error
                    raise

    def _scatter(self, reader: Reader, pack: SmallTensorBatch) -> bool:
        """Read a batch by one call straight to its parameters' addresses; False if it cannot."""
        addresses = self._job.addresses(pack) if reader.has_file else None
        if addresses is None:
            return False
        return reader.scatter(pack.start, addresses, np.diff(pack.bounds))

    def _file_range(self, unit: WorkItem) -> tuple[int, int] | None:
        """Return a unit's (start, stop) in the file if it is one range, unchanged; else None."""
        if isinstance(unit, SmallTensorBatch):
            return unit.start, unit.stop
        start = stop = -1
        for chunk in unit:
            p = self._job.plan.placements[chunk.placement].kind
            as_it_is = p.cast == "copy" or (p.cast == "device" and p.device in self._job.casts)
            if len(chunk.runs) != 1 or not as_it_is:
                return None
            run = chunk.runs[0]
            if run.rows * run.lines != 1 or (start >= 0 and run.start != stop):
                return None
            start, stop = start if start >= 0 else run.start, run.stop
        return start, stop

    def _read_whole(
        self, reader: Reader, unit: WorkItem, start: int, stop: int, slot: Slot
    ) -> bool:
        """Read file bytes ``start`` to ``stop`` into a slot by one pread, which needs no map.

        Returns False if the file ends too soon for a unit of several chunks: read chunk by chunk,
        the error names the right tensor.
        """
        try:
            with released(slot.staging.view[: stop - start]) as out:
                reader.read_into(start, out)
        except CheckpointError as error:
            if len(unit) > 1 and reader.has_file:  # a server has been asked often enough
                return False
            raise error.of_tensor(self._job.tensor(unit[0]).name) from error
        return True

    def _send(
        self, name: str, unit: WorkItem, slot: Slot, at: int, tickets: list[SlotTicket]
    ) -> None:
        """Start copying chunks, joined from slot byte ``at``, to device ``name``; add tickets."""
        job, device = self._job, self._job.devices[name]
        bulk = device.bulk
        copies = []
        for chunk in unit:
            p = job.plan.placements[chunk.placement].kind
            nbytes = chunk.staged_nbytes(p)
            buffer = job.buffers[chunk.placement]
            if p.cast == "device" and name not in job.casts:
                source = StagedElements(slot.staging, at, nbytes, p.src)
                device.cast_copy(source, buffer, chunk.start, p.dst)
            elif bulk is None:
                ticket = device.copy(slot.staging, at, nbytes, buffer, chunk.start)
                tickets.append(SlotTicket(slot.staging, ticket))
            else:
                start = chunk.runs[0].start if chunk.runs else 0  # scales and tables have none
                copies.append(copy_of(job, name, chunk, start, nbytes, at, slot.scratch))
            at += nbytes
        if bulk is not None and copies:
            read = Read(0, 0, 0, tuple(copies))  # nothing is read
            try:
                failure = bulk.run(0, [read], [slot.staging], 0)
            finally:
                tickets.append(SlotTicket(slot.staging, bulk.ticket(slot.staging)))
            if failure is not None:
                raise DeviceError(name, f"a copy failed: status {failure.code}")

    def _slot(self, device: str, tickets: Sequence[SlotTicket]) -> Slot:
        """Return the next staging slot to fill, once the copies from it have ended."""
        slots = self._slots.setdefault(device, deque())
        if len(slots) < STAGING_SLOTS:
            slots.append(self._new_slot(device))
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
    def _shared_view(
        self, reader: Reader, unit: WorkItem
    ) -> Iterator[tuple[memoryview | None, int]]:
        """Yield one view over adjoining reads of a mapped file, and its first file byte.

        The view is None if each read needs a view of its own.
        """
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
        p: Kind,
        out: memoryview,
        whole: memoryview | None,
        base: int,
    ) -> Counts:
        """Read and convert a chunk into ``out``, its memory; return counts of changed values.

        ``whole`` and ``base``: see `_shared_view`.
        """
        if p.cast == "part":
            out[:] = self._job.values[chunk.placement][chunk.start : chunk.stop]
            return NO_COUNTS
        step, refills = step_of(self._job, chunk, p), self._job.transfer.refill_nbytes
        if p.order == "columns" and isinstance(step, Encoding):
            self._encode_turned(reader, chunk, p, step, out)
            return step.counts
        for run in chunk.runs:
            step.begin(run)
            n = run.line_nbytes // run.rows
            numel = p.src.numel(run.line_nbytes) // run.rows
            width = n if step.moves else p.placed_nbytes(numel)
            offset, stride = run.offset - chunk.start, run.stride
            if p.cast == "device":  # the same elements, before their cast
                offset = p.src.nbytes(offset // p.dst.itemsize)
                stride = p.src.nbytes(stride // p.dst.itemsize)
            if p.order == "columns" and run.rows * run.lines > 1:
                unit = p.least_columns if p.src.is_packed else 1
                rows = rows_of(run, out, offset, stride, width)
                self._transposer.place(reader, run, step, rows, self._memory(reader), unit)
            elif run.lines > 1:
                lines = out[offset : offset + run.lines * width]
                self._read_lines(reader, run, step, lines, run.offset)
            elif (
                step.moves and run.rows == 1 and (not reader.mapped or (whole is None and refills))
            ):
                # mapping pages for one copy costs more than pread(2), if ``out`` has its pages
                reader.read_into(run.start, out[offset : offset + n])
            else:
                with self._bytes(reader, run, whole, base) as src:
                    given = step.changed(src, run.start)
                    n = len(given) // run.rows
                    for row in range(run.rows):
                        at = offset + row * stride  # the last element may end before ``width``
                        step(
                            given[row * n : (row + 1) * n],
                            out[at : at + width],
                            at=chunk.start + at,
                            start=run.start + row * n,
                        )
        return step.counts

    def _encode_turned(
        self, reader: Reader, chunk: Chunk, p: Kind, step: Encoding, out: memoryview
    ) -> None:
        """Transpose a chunk in a temporary buffer, then quantize it into ``out``."""
        raw = memoryview(bytearray(chunk.read_nbytes))
        begin = p.src.nbytes(p.numel_at(chunk.start))
        move = Casting(self._job.cast_of(p.src, p.src), moves=True)
        for run in chunk.runs:
            n = run.line_nbytes // run.rows
            rows = rows_of(run, raw, run.offset - begin, run.stride, n)
            self._transposer.place(reader, run, move, rows, self._memory(reader))
        step(raw, out, at=chunk.start, start=0)

    def _read_lines(
        self, reader: Reader, run: StridedRead, step: Step, out: memoryview, at: int
    ) -> None:
        """Read equally spaced lines and nothing between them; write them joined to ``out``.

        ``at`` is the byte of the parameter at which ``out`` begins.
        """
        n, width = run.line_nbytes, len(out) // run.lines
        if reader.mapped:
            with reader.view(run.start, run.stop) as view:
                if not step.moves and not step.gathers:
                    for line in range(run.lines):
                        start, to = line * run.pitch, line * width
                        some, given = out[to : to + width], view[start : start + n]
                        step(given, some, at=at + to, start=run.start + start)
                    return
                raw = out if step.moves else memoryview(bytearray(run.nbytes))
                lines = np.ndarray((run.lines, n), np.uint8, view, strides=(run.pitch, 1))
                np.ndarray((run.lines, n), np.uint8, raw)[:] = lines
                del lines
        else:
            raw = out if step.moves else self._memory(reader)[: run.nbytes]
            for line in range(run.lines):
                reader.read_into(run.start + line * run.pitch, raw[line * n : (line + 1) * n])
        if not step.moves:
            step(raw, out, at=at, start=run.start, lines=run.lines)

    def _bytes(
        self, reader: Reader, run: StridedRead, whole: memoryview | None, base: int
    ) -> AbstractContextManager[memoryview]:
        """Return a context manager of the bytes of one read; see `_shared_view`."""
        if whole is not None:
            return whole[run.start - base : run.stop - base]
        if reader.mapped:
            return reader.view(run.start, run.stop)
        nbytes = run.stop - run.start
        source = self._memory(reader)[:nbytes]
        reader.read_into(run.start, source)
        return source

    def _memory(self, reader: Reader) -> memoryview:
        """Return the worker's source buffer of one slot's size; empty if the file is mapped."""
        if not self._source and not reader.mapped:
            self._source = memoryview(bytearray(self._job.plan.slot_nbytes))
        return self._source


def _slot_nbytes(chunk: Chunk, kind: Kind) -> int:
    """Return the bytes that a chunk takes in a staging slot."""
    return slot_nbytes(max(chunk.staged_nbytes(kind), chunk.read_nbytes))
