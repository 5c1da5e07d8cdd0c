"""The progress of a running load: its units of work, and the state of each placement.

S is the streaming thread, which calls `stream`, or an offloaded model's "streamload-rounds". W is a
worker, D a thread "streamload-scales" that sends scales to a device, A any thread.

| state of a placement | meaning | begins with, by S |
|---|---|---|
| (not in `buffers`) | nothing of it is under way | `Job`, or `_finish` |
| in `buffers` | it has memory, and units of it may be under way | `begin` |
| in `_left` | some of its units are done | `done` |
| in `_coded` | its quantized values are there, and its scales are still to be made | `done` |

| field of `Job` | changed by | guarded by |
|---|---|---|
| `buffers`, `values`, `_auxiliary` | S; W reads | the queues: S writes before and after a unit |
| `_casts`, `_encoders` | S, W | `_compiling`; S removes encoders that no unit needs any more |
| `decoders`, `shards` | S, W, D; A stops `shards` | locks of their own |
| `casts` | S; W and D read | `DeviceCasts` |
| `first_reads` | W, or S if there are no workers | none: `list.append` is atomic |
| `stats`, `_left`, `_to_come`, `_begun`, `_coded` | S | none: no other thread looks |
| all others | nobody | none |
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import Opener, Shards, open_shard
from streamload.codecs.cast_table import Cast, CastCounts, make_cast
from streamload.codecs.decode import Decoders, Weight, layout_of
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import QuantCounts
from streamload.codecs.scheme import Encoder
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.system import most_open_files
from streamload.core.tensors import TensorInfo
from streamload.core.units import merged
from streamload.devices.base import Addressed, Buffer, Device, QueuedWork, ReadTable, Ticket
from streamload.errors import FileChangedError, OutOfRangeError, TruncatedFileError
from streamload.files.folder import REMOTE_KINDS, place_of
from streamload.files.page_cache import PageCache
from streamload.files.reader import Reader
from streamload.planning.chunks import Chunk, Cut, SmallTensorBatch
from streamload.planning.moves import HOST_CASTS, Kind
from streamload.planning.plan import BULK_NBYTES, STAGING_SLOTS, Plan, slot_nbytes
from streamload.planning.quant_policy import coded, encoder_of
from streamload.planning.transforms import NO_CHANGES, Changes
from streamload.streaming.device_casts import DeviceCasts
from streamload.streaming.memory_watch import Headroom

NO_COUNTS = CastCounts()
NO_ERRORS = QuantCounts()
#: How many values a chunk's cast, or its quantization, changed.
Counts: TypeAlias = CastCounts | QuantCounts
_LEAST_SHARE = 16  # units for each worker, if the load is large enough
_MAX_UNIT_CHUNKS = 256  # so that a unit of tiny tensors does not keep the other workers waiting

#: A unit of work: chunks of one file for one device, in the order of the file.
WorkItem = tuple[Chunk, ...] | SmallTensorBatch


class Refill(NamedTuple):
    """A unit that is read repeatedly: the first address that its reads copied to, and the reads."""

    unit: WorkItem
    address: int
    reads: ReadTable


class Sink(ABC):
    """The receiver of a stream: allocates and makes parameters, called by the streaming thread.

    `bring`: maps file bytes (path, start, stop exclusive) that buffers are views on; if it is set,
    nothing is read.
    """

    bring: Callable[[Location, int, int], None] | None = None

    @abstractmethod
    def begin(self, indices: Sequence[int]) -> Sequence[Buffer]:
        """Allocate placements of one device, given by index, and return their buffers."""

    def finish(self, indices: Sequence[int]) -> None:
        """Make parameters of placements whose buffers are complete; nothing writes these again."""
        return None

    def sent(self, unit: WorkItem, tickets: Sequence[Ticket]) -> None:
        """Note that a unit's copies have started; ``tickets`` are those still running.

        Called by a worker. The copies may still fail; only `finish` confirms that they succeeded.
        """
        return None

    def ended(self, unit: WorkItem) -> None:
        """Note that all copies of a unit have ended."""
        return None

    def revoke(self, indices: Iterable[int]) -> None:
        """Invalidate the finished placements among ``indices``: their bytes may be wrong."""
        return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """The inputs of a stream: a plan, and all that is needed to run it.

    Attributes:
        changes: the user's functions that change values between file and device.
        headroom: checks that promised memory is still free; None checks nothing.
        progress: called with the file bytes read so far, often.
        refill_nbytes: the most bytes of a layer, if layers are read again and again into buffers
            that are there; 0 if each buffer is new.
    """

    plan: Plan
    checkpoint: Checkpoint
    devices: Mapping[str, Device]
    changes: Changes = NO_CHANGES
    opener: Opener = open_shard
    headroom: Headroom | None = None
    progress: Callable[[int], None] = lambda nbytes: None
    refill_nbytes: int = 0


@dataclass(slots=True)
class StreamStats:
    """Results of a stream.

    Attributes:
        counts: values that casts changed, by placement index.
        errors: errors of quantizing, by placement index of the quantized values.
        transfer_seconds: from the first read until the last byte was in place; 0 if none was read.
        reader_fallbacks: reasons for which files were read otherwise than planned, with counts.
        page_cache: how the page cache was treated, and why; "" if it was not used.
    """

    read_nbytes: int = 0
    counts: dict[int, CastCounts] = field(default_factory=dict)
    errors: dict[int, QuantCounts] = field(default_factory=dict)
    seconds: float = 0.0
    transfer_seconds: float = 0.0
    reader_fallbacks: Counter[str] = field(default_factory=Counter)
    page_cache: str = ""
    dropped_nbytes: int = 0


class Job:
    """A running transfer and its progress; the module's tables list its states and their owners."""

    def __init__(self, transfer: Transfer, sink: Sink) -> None:
        self.transfer, self.sink = transfer, sink
        self.plan, self.devices = transfer.plan, transfer.devices
        plan, devices, checkpoint = transfer.plan, transfer.devices, transfer.checkpoint
        self.stats = StreamStats()
        self.first_reads: list[float] = []  # when workers began to read; the least counts
        self.buffers: dict[int, Buffer] = {}
        self.refills: dict[int, Refill] = {}  # by id of a unit that is copied unchanged
        self.after: Sequence[QueuedWork] = ()  # what the next copies have to wait for, on a device
        self.infos = infos = {name: device.info for name, device in devices.items()}
        cast_there = {p.device for p, _ in plan.placements.counted if p.cast == "device"}
        self.casting = [name for name, info in infos.items() if info.casts and name in cast_there]
        # the address of a buffer's first byte, by device
        self._address: dict[str, Callable[[Buffer], int]] = {}
        for name, device in devices.items():
            if device.bulk is not None:
                self._address[name] = device.bulk.address
            elif isinstance(device, Addressed):
                self._address[name] = device.address
        self.casts: dict[str, DeviceCasts] = {}  # by device, for devices that cast
        nbytes = sum(p.nbytes * count for p, count in plan.placements.counted)
        kinds = [p for p, _ in plan.placements.counted]
        unchanged = all(p.cast == "copy" and self.is_bulk(p) for p in kinds)
        refills = transfer.refill_nbytes > 0
        shared = refills and unchanged and not {*plan.readers}.intersection(REMOTE_KINDS)
        #: threads that share the reads of a unit, without the interpreter; 1: each takes units
        self.lanes = max(plan.threads, 1) if shared else 1
        share = nbytes // (_LEAST_SHARE * max(plan.threads, 1))
        share = nbytes if self.lanes > 1 else min(share, BULK_NBYTES)
        # whole slots: the rest of each unit would be a small copy
        slots = max(share // max(plan.slot_nbytes, 1), 1)
        slots = min(slots, _MAX_UNIT_CHUNKS)  # each is a read, which takes memory too
        self._bulk_nbytes = slots * plan.slot_nbytes
        self._checkpoint = checkpoint
        self._left: dict[int, int] = {}  # bytes to come, by index
        self._casts: dict[tuple[DType, DType, Engine], Cast] = {}
        self._compiling = threading.Lock()
        self._cut = Cut(plan, checkpoint)
        cached = [n for n, kind in enumerate(plan.readers) if kind not in ("direct", *REMOTE_KINDS)]
        self._page_cache = PageCache(
            plan.page_cache,
            to_read_nbytes=self._cut.read_nbytes(cached),
            to_allocate_nbytes=sum(
                d.fresh_nbytes for d in plan.devices if infos[d.device].shared_memory
            ),
            driver=", ".join(d.device for d in plan.devices if d.shared_memory and not d.charged),
        )
        self._paths = [header.path for header in checkpoint.shards]
        kind_of = dict(zip(self._paths, plan.readers, strict=True)).__getitem__
        cache = self._page_cache
        self._to_come = to_come = Counter[int]()  # units under way, by shard
        number_of = {path: number for number, path in enumerate(self._paths)}
        self.shards = Shards(
            checkpoint.shards,
            kind_of,
            opener=transfer.opener,
            cache=cache,
            most_open=most_open_files(),
            is_used=lambda path: to_come[number_of[path]] > 0,  # no cycle, which keeps `buffers`
            ahead=plan.ahead,
        )
        self._begun: set[int] = set()  # shards without a unit that is still to begin
        self._encoders: dict[int, Encoder] = {}  # by index of the quantized values
        moves = enumerate(plan.placements)
        self._parts = {move.name: i for i, move in moves if move.kind.cast == "part"}
        self.decoders = Decoders(plan.out_of_range)
        self.values: dict[int, memoryview] = {}  # of scales and tables to be placed, by index
        # the last chunk of each weight whose quantized values are there, and the mean of its scales
        self._coded: list[tuple[Chunk, float]] = []
        # by index of values that a device quantizes: the scales and statistics that it writes, too
        self._auxiliary: dict[int, list[int]] = {}
        self.holds = any(p.there_nbytes for p, _ in plan.placements.counted)

    def units(self, some: range | None = None) -> Iterator[WorkItem]:
        """Cut the plan, or ``some`` placements given by index, into units in reading order."""
        cut = self._cut if some is None else self._cut.of(some)
        pieces = cut.packs_and_chunks(self._chunk_nbytes, self.unit_nbytes, _MAX_UNIT_CHUNKS)
        return _units(pieces, self)

    def open(self, shard: int) -> Reader:
        """Return the open file of a shard, given by index; open it if needed."""
        return self.shards.reader(self._paths[shard])

    def fail(self, error: BaseException) -> None:
        """Stop, and revoke finished placements if the error means that their file has changed."""
        self.shards.stop()
        held_back = isinstance(error, FileChangedError) and error.held_back
        if isinstance(error, (FileChangedError, TruncatedFileError)) and not held_back:
            # finished ones, too: if the clock is coarse, a change is seen late
            tensors = self._checkpoint.tensors
            files = {p for p in self._paths if error.path in (str(p), str(place_of(p)))}
            self.sink.revoke(
                index
                for index, p in enumerate(self.plan.placements)
                if any(tensors[r.tensor].shard in files for r in p.source)
            )

    def has_begun(self, shard: int) -> None:
        """Note that all work items of a shard have begun: its file closes once they are done.

        Until then the file's lease keeps other processes from writing it.
        """
        self._begun.add(shard)
        self._close_if_done(shard)

    def _close_if_done(self, shard: int) -> None:
        if shard in self._begun and not self._to_come[shard]:
            self.shards.close(self._paths[shard])

    def close_all(self) -> None:
        """Close all files; no thread may be reading."""
        self.shards.close_all()
        self.stats.reader_fallbacks = self.shards.fallbacks
        self.stats.page_cache = self.shards.page_cache
        self.stats.dropped_nbytes = self._page_cache.dropped_nbytes

    def cast(self, p: Kind) -> Cast:
        """Return the host's cast for a placement: a plain copy if the device casts.

        Compiled at the first call.
        """
        engine: Engine = "numpy" if p.cast == "numpy" else "auto"
        return self.cast_of(p.src, p.src if p.cast == "device" else p.dst, engine)

    def cast_of(self, src: DType, dst: DType, engine: Engine = "auto") -> Cast:
        """Return the host's cast from one dtype to another; compile it at the first call."""
        key = (src, dst, engine)
        with self._compiling:
            if key not in self._casts:
                self._casts[key] = make_cast(
                    src, dst, engine=engine, out_of_range=self.plan.out_of_range
                )
            return self._casts[key]

    def encoder(self, index: int) -> Encoder:
        """Return the encoder that quantizes a placement, given by index; any thread may call."""
        with self._compiling:
            if index not in self._encoders:
                p = self.plan.placements[index]
                assert p.kind.coding is not None, p.name
                self._encoders[index] = encoder_of(p.kind.coding, p.kind.src)
            return self._encoders[index]

    def parts(self) -> list[list[WorkItem]]:
        """Return units that place scales, of weights fully quantized since the last call."""
        chunks = []
        for chunk, mean in self._coded:
            p = self.plan.placements[chunk.placement]
            assert p.kind.coding is not None, p.name
            if p.kind.cast == "device":
                made_of = coded(p.kind.coding, p.kind.src)
                constants = made_of.codec.constants(made_of, mean)
                made = {name: array.data for name, array in constants.items()}
            else:
                encoder = self._encoders.pop(chunk.placement, None) or encoder_of(
                    p.kind.coding, p.kind.src
                )
                made = encoder.finish()
            written = self._auxiliary.pop(chunk.placement, [])  # by the device
            self._finish(written)
            for part in coded(p.kind.coding, p.kind.src).parts[1:]:
                index = self._parts[part.name(p.name)]
                if index in written:
                    continue
                self.values[index] = value = memoryview(made[part.suffix]).cast("B")
                for start in range(0, len(value), self.plan.chunk_nbytes):
                    stop = min(start + self.plan.chunk_nbytes, len(value))
                    chunks.append(Chunk(index, chunk.shard, start, stop, ()))
        self._coded.clear()
        return [[unit] for unit in _units(chunks, self)]

    def is_bulk(self, p: Kind) -> bool:
        """Whether a placement's file bytes go to its device unchanged, many chunks in one call.

        The device may cast them there.
        """
        as_they_are = p.cast == "copy" or (p.cast == "device" and p.device in self.casting)
        in_order = p.order in ("file", "device")
        return as_they_are and in_order and self.devices[p.device].bulk is not None

    def unit_nbytes(self, p: Kind) -> int:
        """Return the most bytes of a placement's work item, its chunks rounded up as in a slot."""
        return self._most_of(p) if self.is_bulk(p) else self.plan.slot_nbytes

    def _chunk_nbytes(self, p: Kind) -> int:
        if p.changes:
            widest = max(p.src.itemsize, p.dst.itemsize)
            return min(self.plan.chunk_nbytes, p.changed_numel * widest)
        return self._most_of(p) if self.is_bulk(p) else self.plan.chunk_nbytes

    def _most_of(self, p: Kind) -> int:
        """Return the most bytes of a work item that a device copies in bulk.

        If a device quantizes statistics, too, it holds them until the weight is complete: small
        work items are complete sooner.
        """
        if p.coding is not None and p.coding.nests:
            return min(self._bulk_nbytes, STAGING_SLOTS * self.plan.slot_nbytes)
        return self._bulk_nbytes

    def begin(self, batch: Sequence[WorkItem]) -> None:
        """Allocate the parameters that a batch is the first to write."""
        if self.transfer.headroom is not None:
            self.transfer.headroom.hand_out(sum(map(written_nbytes, batch)))
        self._to_come[batch[0][0].shard] += len(batch)
        for unit in batch:
            new: Sequence[int]
            if isinstance(unit, SmallTensorBatch):  # memory that is filled again is there
                new = () if self.transfer.refill_nbytes else unit.placements
            else:
                reached = dict.fromkeys(chunk.placement for chunk in unit)
                new = [index for index in reached if index not in self.buffers]
            if new:
                self.buffers.update(zip(new, self.sink.begin(new), strict=True))
                for index in new if self.casts and self._parts else ():
                    self._begin_auxiliary(index)

    def has_room(self, batch: Sequence[WorkItem]) -> bool:
        """Reserve device memory for scales and statistics of a batch; return whether all fit.

        If not, what fits stays reserved: call again when a unit is done.
        """
        if not self.holds:
            return True
        # batches of small tensors are copied as they are
        units = [unit for unit in batch if not isinstance(unit, SmallTensorBatch)]
        for index in dict.fromkeys(chunk.placement for unit in units for chunk in unit):
            _, source, p, *_ = self.plan.placements[index]
            weight = partial(self._weight, self._checkpoint.tensors[source[0].tensor])
            if p.there_nbytes and not self.casts[p.device].hold(index, p, weight):
                return False
        return True

    def _weight(self, info: TensorInfo) -> Weight:
        """Read a quantized weight's scales, through the open file if the values are in it, too."""
        assert isinstance(info, Packed), info.name

        def read(member: TensorInfo) -> bytes:
            if member.shard != info.shard:
                return next(read_whole(info.headers, [member]))
            data = bytearray(member.nbytes)  # its file is open while the values stream
            self.shards.reader(info.shard).read_into(member.start, memoryview(data))
            return bytes(data)

        return layout_of(info).weight(info.group, read)

    def _begin_auxiliary(self, index: int) -> None:
        """Allocate the scales and statistics that a device writes while it quantizes a weight."""
        p = self.plan.placements[index]
        if p.kind.cast != "device" or p.kind.coding is None or not p.kind.coding.device_parts:
            return
        names = {part.suffix: part.name(p.name) for part in coded(p.kind.coding, p.kind.src).parts}
        self._auxiliary[index] = found = [self._parts[names[s]] for s in p.kind.coding.device_parts]
        self.buffers.update(zip(found, self.sink.begin(found), strict=True))

    def auxiliary_address(self, index: int) -> int:
        """Return the device address of a placement's scales or statistics; 0 if it has none."""
        p = self.plan.placements[index]
        casts = self.casts[p.kind.device]
        if p.kind.src.is_packed:
            return casts.weight(index)
        if p.kind.there_nbytes:
            return casts.held(index)
        found = self._auxiliary.get(index)
        return self.address_of(found[0]) if found else 0

    def address_of(self, index: int) -> int:
        """Return the address of a placement's buffer."""
        return self._address[self.plan.placements[index].kind.device](self.buffers[index])

    def addresses(self, pack: SmallTensorBatch) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """Return the addresses of a batch's parameters; None if its device has no addresses."""
        address = self._address.get(self.plan.placements[pack.first].kind.device)
        if address is None:
            return None
        buffers = map(self.buffers.__getitem__, pack.placements)
        return np.fromiter(map(address, buffers), np.int64, len(pack))

    def tensor(self, chunk: Chunk) -> TensorInfo:
        """Return the tensor that holds a chunk's first byte."""
        return self.tensor_at(chunk, chunk.runs[0].start if chunk.runs else -1)

    def tensor_at(self, chunk: Chunk, start: int) -> TensorInfo:
        """Return the chunk's tensor that holds file byte ``start``; if none does, its first."""
        path = self._checkpoint.shards[chunk.shard].path
        source = self.plan.placements[chunk.placement].source
        infos = (self._checkpoint.tensors[row.tensor] for row in source)
        for info in infos:
            if info.shard == path and info.start <= start < info.stop:
                return info
        return self._checkpoint.tensors[source[0].tensor]

    def done(self, unit: WorkItem, counts: Sequence[Counts]) -> None:
        """Count a unit whose bytes are in place, and finish the placements that it completes."""
        if self.transfer.headroom is not None:
            self.transfer.headroom.done(written_nbytes(unit))
        before = self.stats.read_nbytes
        if isinstance(unit, SmallTensorBatch):
            self.stats.read_nbytes += unit.read_nbytes
            self._finish(unit.placements)
        elif id(unit) in self.refills:  # unchanged, into buffers that stay
            self.stats.read_nbytes += written_nbytes(unit)
        else:
            for chunk, count in zip(unit, counts, strict=True):
                self._chunk_done(chunk, count)
        self.sink.ended(unit)
        shard = self._paths[unit[0].shard]
        if self.shards.drops(shard):  # the page cache drops them
            for start, stop in file_ranges(unit):
                self.shards.done(shard, start, stop)
        else:  # only the number counts: a unit may have many ranges
            self.shards.done(shard, 0, self.stats.read_nbytes - before)
        self._to_come[unit[0].shard] -= 1
        self._close_if_done(unit[0].shard)

    def _chunk_done(self, chunk: Chunk, count: Counts) -> None:
        """Add a placed chunk's counts; finish its placement if the chunk was the last."""
        index = chunk.placement
        p = self.plan.placements[index].kind
        self.stats.read_nbytes += chunk.read_nbytes
        if p.cast in HOST_CASTS:
            self.count(index, count)
        self._check_range(chunk, count)
        left = self._left.pop(index, p.nbytes) - (chunk.stop - chunk.start)
        if left:
            self._left[index] = left
            return
        strict = self.plan.out_of_range == "error"  # otherwise it is not read for each
        if strict and p.cast == "device" and p.device in self.casts:
            self._check_range(chunk, self.casts[p.device].counts(index))
        mean = self._let_go(index, p) if p.there_nbytes else 0.0
        if p.coding is not None and not p.coding.part:
            self._coded.append((chunk, mean))
        if p.src.is_packed:
            for r in self.plan.placements[index].source:
                self.decoders.drop(r.tensor, p.dst)
        self._finish([index])
        self.values.pop(index, None)

    def _let_go(self, index: int, p: Kind) -> float:
        """Free a complete placement's scales or statistics; return nested statistics' mean or 0."""
        casts, mean = self.casts[p.device], 0.0
        if p.coding is not None:
            mean = casts.nest(index, *map(self.address_of, self._auxiliary[index]))
        casts.let_go(index)
        return mean

    def count(self, index: int, counts: Counts) -> None:
        """Add the counts of some elements of a placement, given by index, to its counts."""
        if isinstance(counts, QuantCounts):
            self.stats.errors[index] = self.stats.errors.get(index, NO_ERRORS) + counts
        else:
            self.stats.counts[index] = self.stats.counts.get(index, NO_COUNTS) + counts

    def _finish(self, indices: Sequence[int]) -> None:
        self.sink.finish(indices)
        deque(map(self.buffers.__delitem__, indices), maxlen=0)

    def _check_range(self, chunk: Chunk, counts: Counts) -> None:
        """Raise OutOfRangeError for values that overflowed, if ``out_of_range`` is "error"."""
        if counts.overflowed and self.plan.out_of_range == "error":
            p = self.plan.placements[chunk.placement].kind
            info, names = self.tensor(chunk), (p.src.name, p.dst.name)
            raise OutOfRangeError(info.name, info.shard, *names, counts.overflowed)


def _units(cut: Iterable[Chunk | SmallTensorBatch], job: Job) -> Iterator[WorkItem]:
    """Group neighbouring chunks of one shard into units; a batch of small tensors is a unit."""
    unit: list[Chunk] = []
    size = most = 0
    for chunk in cut:
        if isinstance(chunk, SmallTensorBatch):
            if unit:
                yield tuple(unit)
                unit, size = [], 0
            yield chunk
            continue
        p = job.plan.placements[chunk.placement].kind
        grows = slot_nbytes(max(chunk.stop - chunk.start, chunk.read_nbytes))
        alike = bool(unit) and not (
            len(unit) == _MAX_UNIT_CHUNKS
            or chunk.shard != unit[0].shard
            or p.device != job.plan.placements[unit[0].placement].kind.device
            or most != job.unit_nbytes(p)
        )
        if unit and (not alike or size + grows > most):
            yield tuple(unit)
            unit, size = [], 0
        unit.append(chunk)
        size, most = size + grows, job.unit_nbytes(p)
    if unit:
        yield tuple(unit)


def written_nbytes(unit: WorkItem) -> int:
    """Return the bytes of parameters that a unit writes."""
    if isinstance(unit, SmallTensorBatch):
        return unit.read_nbytes
    return sum(chunk.stop - chunk.start for chunk in unit)


def file_ranges(unit: WorkItem) -> list[tuple[int, int]]:
    """Return a unit's file bytes as (start, stop exclusive), in order and joined."""
    if isinstance(unit, SmallTensorBatch):
        return [(unit.start, unit.stop)]
    return merged(line for chunk in unit for run in chunk.runs for line in run.ranges())
