"""A plan that is being run: what there is to do, in units, and what is known of its progress."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import Opener, Shards, open_shard, page_cache
from streamload.codecs.cast_table import Cast, CastCounts, make_cast
from streamload.codecs.decode import Decoders, Weight, weight_of
from streamload.codecs.encode import Encoder
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import QuantCounts
from streamload.codecs.scheme import Decoder
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.devices.base import Addressed, Buffer, Device, Ticket
from streamload.errors import FileChangedError, OutOfRangeError, TruncatedFileError
from streamload.files.local import Reader
from streamload.planning.chunks import Chunk, Cut, SmallTensorBatch
from streamload.planning.placement import HOST_CASTS, Placement
from streamload.planning.plan import BULK_NBYTES, SEGMENTS, STAGING_SLOTS, Plan, slot_nbytes
from streamload.planning.quant_policy import coded, encoder_of
from streamload.planning.transforms import NO_CHANGES, Changes
from streamload.streaming.device_casts import DeviceCasts
from streamload.streaming.memory_watch import Headroom

NO_COUNTS = CastCounts()
NO_ERRORS = QuantCounts()
#: What a chunk's cast, or its quantisation, did not keep.
Counts: TypeAlias = CastCounts | QuantCounts
_LEAST_SHARE = 16  # units for each worker, of a load that has them
_MAX_UNIT_CHUNKS = 256  # so that a unit of tiny tensors does not keep the other workers waiting

#: Of one shard and one device, in the order of the file.
WorkItem = tuple[Chunk, ...] | SmallTensorBatch


_Addresses = np.ndarray[Any, np.dtype[np.int64]]


class Sink(ABC):
    """What a stream fills; called from the streaming thread, in plan order.

    Attributes:
        bring: brings bytes of a file that buffers are views on, in place of all reading.
    """

    bring: Callable[[Location, int, int], None] | None = None

    @abstractmethod
    def begin(self, indices: Sequence[int]) -> Sequence[Buffer]:
        """Make room for placements of one device, by number, and return their buffers."""

    @abstractmethod
    def finish(self, indices: Sequence[int]) -> None:
        """Take placements of which all bytes are there; their buffers are written no more."""

    def sent(self, unit: WorkItem, tickets: Sequence[Ticket]) -> None:
        """Called by a worker once a unit's copies have started; `tickets` are those still running.

        An error may still come: `finish` confirms.
        """
        return None

    def revoke(self, indices: Iterable[int]) -> None:
        """Forget finished placements among these: their bytes may be wrong; the load fails."""
        return None


@dataclass(frozen=True, slots=True)
class Transfer:
    """A plan to be streamed.

    Attributes:
        checkpoint: the headers that the plan was made from.
        devices: by name, every device of the plan.
        changes: functions that change values on the way.
        opener: opens the shards.
        headroom: checks that promised memory is still free; None checks nothing.
        progress: called with the file bytes read so far, often.
        refills: the same memory is filled again and again, so its pages are there.
    """

    plan: Plan
    checkpoint: Checkpoint
    devices: Mapping[str, Device]
    changes: Changes = NO_CHANGES
    opener: Opener = open_shard
    headroom: Headroom | None = None
    progress: Callable[[int], None] = lambda nbytes: None
    refills: bool = False


@dataclass(slots=True)
class StreamStats:
    """Results of a stream.

    Attributes:
        counts: counts of casts, by placement index.
        errors: errors of quantizing, by placement index of the codes.
        transfer_seconds: from the first read until the last byte was in place.
        reader_fallbacks: reasons for which files were read otherwise than planned, with counts.
        page_cache: the treatment of the page cache and its reason; "" if none was used.
        dropped_nbytes: file bytes dropped from it.
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
    """A transfer that is running, and its progress. The streaming thread changes it."""

    def __init__(self, transfer: Transfer, sink: Sink) -> None:
        """Look at a plan; nothing is opened."""
        self.transfer, self.sink = transfer, sink
        self.plan, self.devices = transfer.plan, transfer.devices
        plan, devices, checkpoint = transfer.plan, transfer.devices, transfer.checkpoint
        self.stats = StreamStats()
        self.first_read = math.inf
        self.failed = False
        self.buffers: dict[int, Buffer] = {}
        self.bulk = {name: device.bulk for name, device in devices.items()}
        infos = {name: device.info for name, device in devices.items()}
        self.host_visible = {name: info.host_visible for name, info in infos.items()}
        cast_there = {p.device for p, _ in plan.placements.counted if p.cast == "device"}
        self.casting = [name for name, info in infos.items() if info.casts and name in cast_there]
        # of a buffer's first byte, for devices with addresses
        self._address: dict[str, Callable[[Buffer], int]] = {}
        for name, device in devices.items():
            if device.bulk is not None:
                self._address[name] = device.bulk.address
            elif isinstance(device, Addressed):
                self._address[name] = device.address
        self.joins = {name for name, info in infos.items() if info.allocator in SEGMENTS}
        self.casts: dict[str, DeviceCasts] = {}  # by device, of those that cast what they were sent
        nbytes = sum(p.nbytes * count for p, count in plan.placements.counted)
        share = nbytes // (_LEAST_SHARE * max(plan.threads, 1))
        # whole slots: what is left over of each unit would be a small copy
        slots = max(min(share, BULK_NBYTES) // max(plan.slot_nbytes, 1), 1)
        slots = min(slots, _MAX_UNIT_CHUNKS)  # a read each, which takes memory too
        self._bulk_nbytes = slots * plan.slot_nbytes
        self._checkpoint = checkpoint
        self._left: dict[int, int] = {}  # bytes to come, by placement of which some have
        self._casts: dict[tuple[DType, DType, Engine], Cast] = {}
        self._compiling = threading.Lock()
        self._cut = Cut(plan, checkpoint)
        cached = [n for n, kind in enumerate(plan.readers) if kind not in ("direct", "http")]
        self._page_cache = page_cache(
            plan.page_cache,
            to_read_nbytes=self._cut.read_nbytes(cached),
            to_allocate_nbytes=sum(
                d.fresh_nbytes for d in plan.devices if infos[d.device].shared_memory
            ),
        )
        self._paths = [header.path for header in checkpoint.shards]
        kind_of = dict(zip(self._paths, plan.readers, strict=True)).__getitem__
        self._shards = Shards(
            *(checkpoint.shards, kind_of),
            opener=transfer.opener,
            cache=self._page_cache,
            ahead=plan.ahead,
        )
        self._to_come: Counter[int] = Counter()  # units that were begun, by shard
        self._begun: set[int] = set()  # shards, all of their units
        self._encoders: dict[int, Encoder] = {}  # by number of the codes
        names = zip(plan.placements.names, plan.placements.kinds, strict=True)
        self._parts = {name: i for i, (name, kind) in enumerate(names) if kind.cast == "part"}
        self._decoders = Decoders(plan.out_of_range)
        self._values: dict[int, memoryview] = {}  # of parts that are to be placed
        self._coded: list[Chunk] = []  # the last of each tensor whose codes are all there
        # of codes that a device makes, the parts that it writes, and the mean of the statistics
        self._beside: dict[int, list[int]] = {}
        self._means: dict[int, float] = {}
        self.holds = any(p.there_nbytes for p, _ in plan.placements.counted)

    def units(self, some: range | None = None) -> Iterator[WorkItem]:
        """Cut the plan, or some placements in a row, into units in the order of reading."""
        cut, first = self._cut, 0
        if some is not None:
            first, placements = some.start, self.plan.placements[some.start : some.stop]
            cut = Cut(replace(self.plan, placements=placements), self._checkpoint)
        pieces = cut.packs_and_chunks(self._chunk_nbytes, self.unit_nbytes, _MAX_UNIT_CHUNKS)
        return _units((piece.moved(first) for piece in pieces) if first else pieces, self)

    def open(self, shard: int) -> Reader:
        """Open a shard's file."""
        return self._shards.reader(self._paths[shard])

    def stop(self) -> None:
        """Nothing more is wanted: end all waits for a server; any thread may call this."""
        self.failed = True
        self._shards.stop()

    def fail(self, error: BaseException) -> None:
        """Stop, and revoke finished placements if their bytes may be wrong by the error."""
        self.stop()
        held_back = isinstance(error, FileChangedError) and error.held_back
        if isinstance(error, (FileChangedError, TruncatedFileError)) and not held_back:
            # not only what is unfinished: where the clock is coarse, a change is seen late
            tensors = self._checkpoint.tensors
            self.sink.revoke(
                index
                for index, p in enumerate(self.plan.placements)
                if any(str(tensors[r.tensor].shard) == error.path for r in p.source)
            )

    def check_files(self) -> None:
        """Look whether somebody waits to change an open file, while nobody reads; any thread may.

        Raises:
            FileChangedError: somebody does.
        """
        self._shards.check()

    def has_begun(self, shard: int) -> None:
        """All units of a shard were begun: its file is closed when they are done.

        At once: its lease keeps others from writing it.
        """
        self._begun.add(shard)
        self._close_if_done(shard)

    def _close_if_done(self, shard: int) -> None:
        if shard in self._begun and not self._to_come[shard]:
            self._shards.close(self._paths[shard])

    def close_all(self) -> None:
        """Close every file that is open still; no worker reads any more."""
        self._shards.close_all()
        self.stats.reader_fallbacks = self._shards.fallbacks
        self.stats.page_cache = self._shards.page_cache
        self.stats.dropped_nbytes = self._page_cache.dropped_nbytes

    def cast(self, p: Placement) -> Cast:
        """The cast of a placement; a plain copy of bits where the device casts.

        Compiled when it is first asked for: raw bytes that are staged never ask.
        """
        engine: Engine = "numpy" if p.cast == "numpy" else "auto"
        return self.cast_of(p.src, p.src if p.cast == "device" else p.dst, engine)

    def cast_of(self, src: DType, dst: DType, engine: Engine = "auto") -> Cast:
        """The cast of a pair of dtypes on the host."""
        key = (src, dst, engine)
        with self._compiling:
            if key not in self._casts:
                self._casts[key] = make_cast(
                    src, dst, engine=engine, out_of_range=self.plan.out_of_range
                )
            return self._casts[key]

    def encoder(self, index: int) -> Encoder:
        """What quantises a placement; any thread may ask."""
        with self._compiling:
            if index not in self._encoders:
                p = self.plan.placements[index]
                assert p.coding is not None, p.name
                self._encoders[index] = encoder_of(p.coding, p.src)
            return self._encoders[index]

    def decoder(self, info: Packed, p: Placement) -> Decoder:
        """The decoder of a tensor for a placement; reads its scales. Any thread may call this."""
        return self._decoders.of(info, p.dst, "numpy" if p.cast == "numpy" else "auto")

    def value(self, index: int) -> memoryview:
        """The bytes of what belongs to codes that are all there."""
        return self._values[index]

    def parts(self) -> list[list[WorkItem]]:
        """What belongs to codes that have become whole since this was asked: to be placed now."""
        chunks = []
        for chunk in self._coded:
            p = self.plan.placements[chunk.placement]
            assert p.coding is not None, p.name
            if p.cast == "device":
                constants = coded(p.coding, p.src).constants(self._means.pop(chunk.placement, 0.0))
                made = {name: array.data for name, array in constants.items()}
            else:
                encoder = self._encoders.pop(chunk.placement, None) or encoder_of(p.coding, p.src)
                made = encoder.finish()
            written = self._beside.pop(chunk.placement, [])  # by the device
            self._finish(written)
            for part in coded(p.coding, p.src).parts[1:]:
                index = self._parts[part.name(p.name)]
                if index in written:
                    continue
                self._values[index] = value = memoryview(made[part.suffix]).cast("B")
                for start in range(0, len(value), self.plan.chunk_nbytes):
                    stop = min(start + self.plan.chunk_nbytes, len(value))
                    chunks.append(Chunk(index, chunk.shard, start, stop, ()))
        self._coded.clear()
        return [[unit] for unit in _units(chunks, self)]

    def is_bulk(self, p: Placement) -> bool:
        """Whether a placement's bytes go as they are to a device that takes many at a time.

        Which may cast them there.
        """
        as_they_are = p.cast == "copy" or (p.cast == "device" and p.device in self.casting)
        in_order = (p.transpose is None or p.turned_there) and not p.strided
        return as_they_are and in_order and self.bulk[p.device] is not None

    def unit_nbytes(self, p: Placement) -> int:
        """Most bytes of a unit, each chunk rounded up to what it takes in a slot."""
        return self._most_of(p) if self.is_bulk(p) else self.plan.slot_nbytes

    def _chunk_nbytes(self, p: Placement) -> int:
        if p.changes:
            widest = max(p.src.itemsize, p.dst.itemsize)
            return min(self.plan.chunk_nbytes, p.changed_numel * widest)
        return self._most_of(p) if self.is_bulk(p) else self.plan.chunk_nbytes

    def _most_of(self, p: Placement) -> int:
        """Bytes of a unit that goes in bulk.

        Statistics that a device nests are held until all units of a weight are reported: small ones
        are reported sooner.
        """
        if p.coding is not None and p.coding.nests:
            return min(self._bulk_nbytes, STAGING_SLOTS * self.plan.slot_nbytes)
        return self._bulk_nbytes

    def begin(self, batch: Sequence[WorkItem]) -> None:
        """Make room for the parameters that units are the first to write."""
        if self.transfer.headroom is not None:
            self.transfer.headroom.hand_out(sum(map(written_nbytes, batch)))
        self._to_come[batch[0][0].shard] += len(batch)
        for unit in batch:
            new: Sequence[int]
            if isinstance(unit, SmallTensorBatch):
                new = unit.placements
            else:
                reached = dict.fromkeys(chunk.placement for chunk in unit)
                new = [index for index in reached if index not in self.buffers]
            if new:
                self.buffers.update(zip(new, self.sink.begin(new), strict=True))
                for index in new if self.casts and self._parts else ():
                    self._begin_beside(index)

    def has_room(self, batch: Sequence[WorkItem]) -> bool:
        """Whether devices have room for scales and statistics of placements that units begin.

        What there is room for is taken; ask again when something is done.
        """
        if not self.holds:
            return True
        # packs go as they are
        units = [unit for unit in batch if not isinstance(unit, SmallTensorBatch)]
        for index in dict.fromkeys(chunk.placement for unit in units for chunk in unit):
            p = self.plan.placements.kinds[index]
            if p.there_nbytes and not self._hold(index, p):
                return False
        return True

    def _hold(self, index: int, p: Placement) -> bool:
        """Have a device hold scales or statistics of a placement; False if there is no room now."""
        source = self.plan.placements.sources[index][0]
        info = self._checkpoint.tensors[source.tensor]

        def read(member: TensorInfo) -> bytes:
            assert isinstance(info, Packed), info.name
            if member.shard != info.shard:
                return next(read_whole(info.headers, [member]))
            data = bytearray(member.nbytes)  # its file is open while the values stream
            self._shards.reader(info.shard).read_into(member.start, memoryview(data))
            return bytes(data)

        def make() -> Weight:
            assert isinstance(info, Packed), info.name
            return weight_of(info, read)

        return self.casts[p.device].hold(index, p, make)

    def _begin_beside(self, index: int) -> None:
        """Make room for the auxiliary parts that a device writes with the codes."""
        p = self.plan.placements[index]
        if p.cast != "device" or p.coding is None or not p.coding.device_parts:
            return
        names = {part.suffix: part.name(p.name) for part in coded(p.coding, p.src).parts}
        self._beside[index] = beside = [self._parts[names[s]] for s in p.coding.device_parts]
        self.buffers.update(zip(beside, self.sink.begin(beside), strict=True))

    def beside_address(self, index: int) -> int:
        """Device address of the scales or statistics of a placement that it casts; 0 for none."""
        p = self.plan.placements[index]
        casts = self.casts[p.device]
        if p.src.is_packed:
            return casts.weight(index)
        if p.there_nbytes:
            return casts.held(index)
        beside = self._beside.get(index)
        return self._address_of(beside[0]) if beside else 0

    def _address_of(self, index: int) -> int:
        """Where the buffer of a placement begins."""
        return self._address[self.plan.placements.kinds[index].device](self.buffers[index])

    def addresses(self, pack: SmallTensorBatch) -> _Addresses | None:
        """Addresses of the parameters of a batch; None if the device has none."""
        address = self._address.get(self.plan.placements.kinds[pack.first].device)
        if address is None:
            return None
        buffers = map(self.buffers.__getitem__, pack.placements)
        return np.fromiter(map(address, buffers), np.int64, len(pack))

    def tensor(self, chunk: Chunk) -> tuple[str, Location]:
        """The tensor that a chunk's first bytes are of, and its file."""
        info = self.tensor_at(chunk, chunk.runs[0].start if chunk.runs else -1)
        return info.name, info.shard

    def rows_at(self, chunk: Chunk, start: int) -> tuple[TensorInfo, int]:
        """The tensor that a file byte of a chunk is of, and the number of its row."""
        info = self.tensor_at(chunk, start)
        rows = info.shape[0] if info.shape else 1
        return info, (start - info.start) * rows // info.nbytes

    def tensor_at(self, chunk: Chunk, start: int) -> TensorInfo:
        """The tensor that a file byte of a chunk is of; the first of its sources for no byte."""
        path = self._checkpoint.shards[chunk.shard].path
        source = self.plan.placements[chunk.placement].source
        infos = (self._checkpoint.tensors[row.tensor] for row in source)
        for info in infos:
            if info.shard == path and info.start <= start < info.stop:
                return info
        return self._checkpoint.tensors[source[0].tensor]

    def done(self, unit: WorkItem, counts: Sequence[Counts]) -> None:
        """Account for a unit whose bytes are in place."""
        if self.transfer.headroom is not None:
            self.transfer.headroom.done(written_nbytes(unit))
        before = self.stats.read_nbytes
        if isinstance(unit, SmallTensorBatch):
            self.stats.read_nbytes += unit.read_nbytes
            self._finish(unit.placements)
            self._account(unit, self.stats.read_nbytes - before)
            return
        for chunk, count in zip(unit, counts, strict=True):
            index = chunk.placement
            p = self.plan.placements[index]
            self.stats.read_nbytes += chunk.read_nbytes
            if p.cast in HOST_CASTS:
                self.count(index, count)
            self._check_range(chunk, p, count)
            left = self._left.get(index)
            left = (p.nbytes if left is None else left) - (chunk.stop - chunk.start)
            self._left[index] = left
            if not left:
                del self._left[index]
                strict = self.plan.out_of_range == "error"  # else it is not read for each
                if strict and p.cast == "device" and p.device in self.casts:
                    self._check_range(chunk, p, self.casts[p.device].counts(index))
                if p.there_nbytes:
                    self._let_go(index, p)
                if p.coding is not None and not p.coding.part:
                    self._coded.append(chunk)
                if p.src.is_packed:
                    for r in p.source:
                        self._decoders.drop(r.tensor, p.dst)
                self._finish([index])
                self._values.pop(index, None)
        self._account(unit, self.stats.read_nbytes - before)

    def _let_go(self, index: int, p: Placement) -> None:
        """Give back the device's scales or statistics of a placement that is complete."""
        casts = self.casts[p.device]
        if p.coding is not None:
            addresses = map(self._address_of, self._beside[index])
            self._means[index] = casts.nest(index, *addresses)
        casts.let_go(index)

    def count(self, index: int, counts: Counts) -> None:
        """Add what part of a placement did not keep."""
        if isinstance(counts, QuantCounts):
            self.stats.errors[index] = self.stats.errors.get(index, NO_ERRORS) + counts
        else:
            self.stats.counts[index] = self.stats.counts.get(index, NO_COUNTS) + counts

    def _finish(self, indices: Sequence[int]) -> None:
        self.sink.finish(indices)
        deque(map(self.buffers.__delitem__, indices), maxlen=0)

    def _account(self, unit: WorkItem, nbytes: int) -> None:
        """Report read bytes to the page cache; close a file that is read to the end."""
        shard = self._paths[unit[0].shard]
        if self._shards.drops(shard):
            for start, stop in file_ranges(unit):
                self._shards.done(shard, start, stop)
        else:  # it counts, and asks for no more: a unit may have many ranges
            self._shards.done(shard, 0, nbytes)
        self._to_come[unit[0].shard] -= 1
        self._close_if_done(unit[0].shard)

    def _check_range(self, chunk: Chunk, p: Placement, counts: Counts) -> None:
        """Raise OutOfRangeError for values that do not fit, where that is an error."""
        if counts.overflowed and self.plan.out_of_range == "error":
            name, shard = self.tensor(chunk)
            raise OutOfRangeError(name, shard, p.src.name, p.dst.name, counts.overflowed)

    def tell(self) -> None:
        """Report progress."""
        self.transfer.progress(self.stats.read_nbytes)


def _units(cut: Iterable[Chunk | SmallTensorBatch], job: Job) -> Iterator[WorkItem]:
    """Group chunks of a shard into units, small neighbours together; a pack is a unit."""
    unit: list[Chunk] = []
    size = most = 0
    for chunk in cut:
        if isinstance(chunk, SmallTensorBatch):
            if unit:
                yield tuple(unit)
                unit, size = [], 0
            yield chunk
            continue
        p = job.plan.placements[chunk.placement]
        grows = slot_nbytes(max(chunk.stop - chunk.start, chunk.read_nbytes))
        if unit and (
            size + grows > most
            or len(unit) == _MAX_UNIT_CHUNKS
            or chunk.shard != unit[0].shard
            or p.device != job.plan.placements[unit[0].placement].device
            or most != job.unit_nbytes(p)
        ):
            yield tuple(unit)
            unit, size = [], 0
        unit.append(chunk)
        size, most = size + grows, job.unit_nbytes(p)
    if unit:
        yield tuple(unit)


def written_nbytes(unit: WorkItem) -> int:
    """Bytes of parameters that a unit writes."""
    if isinstance(unit, SmallTensorBatch):
        return unit.read_nbytes
    return sum(chunk.stop - chunk.start for chunk in unit)


def file_ranges(unit: WorkItem) -> Iterator[tuple[int, int]]:
    """The file bytes of a unit, those of neighbours together."""
    if isinstance(unit, SmallTensorBatch):
        yield unit.start, unit.stop
        return
    start = stop = -1
    for chunk in unit:
        for run in chunk.runs:
            for line in range(run.lines):
                begin = run.start + line * run.pitch
                if begin != stop:
                    if stop > start:
                        yield start, stop
                    start = begin
                stop = begin + run.line_nbytes
    if stop > start:
        yield start, stop
