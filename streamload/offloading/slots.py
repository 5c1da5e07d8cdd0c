"""Where layers that stream are: slots of a device, a file in host memory, or their mapped files."""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.checkpoint.shards import BLOCK_NBYTES, Room, Shards, map_shard, open_shard
from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.system import most_open_files, populate_shared, unmap_pages
from streamload.core.tensors import TensorInfo, region_of
from streamload.core.units import round_up
from streamload.devices.base import Buffer, Device, Ticket
from streamload.errors import CheckpointError, OffloadError
from streamload.files.folder import ResolvedKind, choose_reader, resolve_reader
from streamload.files.header import FileState, Header, unreadable
from streamload.files.page_cache import PageCache, drop_pages
from streamload.files.reader import Reader
from streamload.offloading.layers import SLOT_ALIGNMENT_NBYTES
from streamload.offloading.plan import OffloadPlan
from streamload.planning.moves import Move

# Parts of quantized weights begin at multiples of this in slots: kernels read vectors.
_PART_ALIGNMENT_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer that streams: tensors that are read into slots as a whole."""

    name: str
    placements: range  # indices of its tensors in the plan of streaming
    slots: int  # number of adjacent slots that it takes
    read_nbytes: int  # bytes in the files


class LayerState(Enum):
    """State of a layer in slots: being filled, all copies started, or bytes possibly wrong."""

    FILLING = auto()
    SENT = auto()
    SPOILED = auto()


@dataclass(slots=True)
class HeldLayer:
    """Progress of a layer that has slots: bytes yet to be copied, and uses that have not ended."""

    first: int  # index of its first slot
    left_nbytes: int  # bytes whose copies have not been started
    unsure_nbytes: int  # bytes whose copies may not have ended
    state: LayerState = LayerState.FILLING
    tickets: list[Ticket] = field(default_factory=list)  # of copies that may not have ended
    computing: set[Ticket] = field(default_factory=set)  # of uses that C waits for


class Slots:
    """Device memory, cut into slots that streamed layers share, and the tensors over it.

    This class makes arrays of numpy; each framework has a subclass.
    """

    #: Whether tensors may begin at any multiple of 64, and short ones of bytes anywhere.
    packs = True

    def __init__(self, memory: Any, plan: OffloadPlan, checkpoint: Checkpoint) -> None:
        """Cut ``memory``, the bytes of all slots, by the sizes in ``plan``."""
        assert plan.stream is not None
        self._memory, self._starts = memory, plan.residency.slot_starts
        self._residency, self.layers = plan.residency, plan.residency.slots
        self.count, moves = len(self._starts), [*plan.stream.placements]
        layers = [[moves[at] for at in each] for each in plan.layer_placements]
        self._layers = [[move.kind for move in each] for each in layers]
        self._offsets = [self._packed(each, checkpoint) for each in layers]
        # of each layer a number that those with the same dtypes, shapes and offsets share
        numbers: dict[Hashable, int] = {}
        self._alike = [
            numbers.setdefault(
                tuple((kind.dst.name, kind.shape, at) for kind, at in zip(*each, strict=True)),
                len(numbers),
            )
            for each in zip(self._layers, self._offsets, strict=True)
        ]
        # By slot and kinds of tensors: tensors to compute with, and the same for workers.
        self._made: dict[Hashable, tuple[list[Any], list[Any]]] = {}

    def _packed(self, moves: Sequence[Move], checkpoint: Checkpoint) -> list[int]:
        """Return the first byte of each tensor of a layer in its slots, within the planned size.

        Parts of quantized weights are adjacent in a slot where they are in the file, so that one
        copy brings them; not matrices of floats: a product may depend on their address.
        """
        found, at = list[int](), 0
        last: TensorInfo | None = None
        for _, (row, *_), kind, *_ in moves:
            is_part = row.tensor in checkpoint.members and kind.cast == "copy"
            packs = self.packs and is_part and (kind.dst.kind != "float" or len(kind.shape) == 1)
            mine = checkpoint.tensors[row.tensor] if packs else None
            aligned = round_up(at, SLOT_ALIGNMENT_NBYTES)
            if mine and last and mine.shard == last.shard:
                near = at + mine.start - last.stop
                short = kind.dst.bits == 8 and kind.nbytes < SLOT_ALIGNMENT_NBYTES
                if at <= near <= aligned and (short or not near % _PART_ALIGNMENT_NBYTES):
                    aligned = near
            found.append(aligned)
            at, last = aligned + kind.nbytes, mine
        return found

    def views(self, layer: int, slot: int) -> tuple[list[Any], list[Any]]:
        """Return tensors over a slot for a layer's weights: to compute with, and to fill.

        Layers of equal shapes share them.
        """
        key = slot, self._alike[layer]
        if key not in self._made:
            found, first = [], self._starts[slot]
            for kind, offset in zip(self._layers[layer], self._offsets[layer], strict=True):
                at = first + offset
                found.append(self._view(at, at + kind.nbytes, kind.dst, kind.shape))
            self._made[key] = [view for view, _ in found], [plain for _, plain in found]
        return self._made[key]

    def _view(self, start: int, stop: int, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Return two tensors over the same bytes of the memory: to compute with, and to fill."""
        view = self._memory[start:stop].view(dtype.numpy).reshape(shape)
        return view, view

    @staticmethod
    def weight_of(view: Any, /) -> Any:
        """Return the weight to compute with over ``view``, a tensor in a mapped file."""
        return view

    def close(self) -> None:
        """Drop the references to the memory, which is freed with the last tensor over it."""
        self._made.clear()
        self._memory = None

    def refuse_capture(self) -> None:
        """Raise OffloadError while the framework records computation, for a later replay."""

    def lend(self, buffers: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors that `stream_layers` yields for these buffers, until `take_back`."""
        return buffers

    def take_back(self) -> None:
        """End the use of lent tensors: the loop has gone on to the next layer."""


class Order:
    """The order in which passes ask for layers, learned from the last request after each layer."""

    def __init__(self, count: int) -> None:
        """Expect layers 0 to ``count`` - 1 in this order, and then the first again."""
        self._next = [(number + 1) % count for number in range(count)]
        self._last: int | None = None

    def follow(self, number: int) -> bool:
        """Learn that this layer was asked for after the last; return whether that was expected."""
        expected = self._last is None or self._next[self._last] == number
        if self._last is not None:
            self._next[self._last] = number
        self._last = number
        return expected

    def ahead(self, first: int | None) -> list[int]:
        """Return all layers in the order of need, from ``first`` on (None: the expected next)."""
        if self._last is None:
            return [*range(len(self._next))]
        at = self._next[self._last] if first is None else first
        order: dict[int, None] = {}
        while at not in order:
            order[at] = None
            at = self._next[at]
        return list(order)


# The decay of a score at each choice of its layer. 0.95 to 0.99 do alike on traces.
_KEPT = 0.97
# Experts in use while as many are read. More would evict experts with higher scores.
_TOGETHER = 8
_LARGEST = 1e200  # scores are scaled down once a choice counts more


class ExpertCache:
    """A cache of experts: the expert in each device slot, and those that the computing layer needs.

    An expert's score counts how often the router chose it, older choices less; the lowest score is
    evicted. A pass that asks for every expert, as a prompt does, keeps the order of the scores,
    where least-recently-used would lose the whole cache. docs/measurements.md compares policies.

    Experts are numbered over all layers, after those that have none: those of the first layer,
    then of the second, and so on.

    Attributes:
        count: number of experts of all layers.
        slots: number of slots, each for one expert.
        asked: experts that the computing layer still needs, in the order in which it uses them.
        together: number of experts that a layer uses at once; as many more are read ahead.
        hits: by layer, number of chosen experts that were in a slot when asked for.
        misses: by layer, number of chosen experts that were not.
        stalls: by layer, seconds of waiting for experts.
        read_nbytes: by layer, file bytes read for experts.
    """

    def __init__(self, experts: Sequence[int], slots: int, first: int = 0) -> None:
        """Make an empty cache; ``experts``: how many a layer has; ``first``: their first number."""
        *self._first, end = accumulate(experts, initial=first)
        self.count, self._scores = end - first, np.zeros(end)
        self._counts = [1.0] * len(experts)  # by layer, the score that a choice adds
        self.slots, self._held = slots, np.full(slots, -1)  # the expert in each slot
        self._slot: dict[int, int] = {}  # by expert
        self.asked: list[int] = []
        self.together = max(min(_TOGETHER, slots // 2), 1)
        self.hits, self.misses = [0] * len(experts), [0] * len(experts)
        self.stalls = [0.0] * len(experts)
        self.read_nbytes = [0] * len(experts)

    def numbers(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """Return the numbers over all layers of ``chosen`` experts, numbered within ``layer``."""
        return [self._first[layer] + expert for expert in chosen]

    def ask(self, layer: int, chosen: Sequence[int], there: int) -> None:
        """Request the ``chosen`` experts; ``there`` of them, already in slots, count as hits."""
        self.asked = self.numbers(layer, chosen)
        self.hits[layer] += there
        self.misses[layer] += len(self.asked) - there
        self._scores[self.asked] += self._counts[layer]
        self._counts[layer] /= _KEPT
        if self._counts[layer] > _LARGEST:
            self._scores /= _LARGEST
            self._counts = [count / _LARGEST for count in self._counts]

    def next(self, busy: Collection[int] = ()) -> tuple[int, int] | None:
        """Return (expert to read, slot), or None: all are read, or ``busy`` experts fill slots."""
        for place, expert in enumerate(self.asked[: 2 * self.together]):
            if expert not in self._slot:
                slot = self._slot_for(place, busy)
                return None if slot is None else (expert, slot)
        return None

    def _slot_for(self, place: int, busy: Collection[int]) -> int | None:
        """Return the slot to read ``asked[place]`` into; ``busy``: experts that must stay.

        A free slot, else that of the least chosen expert, else of the last needed after
        ``asked[place]``; None if there is none.
        """
        scores = np.where(self._held < 0, -1.0, self._scores[self._held])
        for expert in (*busy, *self.asked):
            if expert in self._slot:
                scores[self._slot[expert]] = np.inf
        slot = int(scores.argmin())
        if scores[slot] < np.inf:
            return slot
        for expert in reversed(self.asked[place + 1 :]):  # all slots are needed: evict the last
            if expert in self._slot and expert not in busy:
                return self._slot[expert]
        return None

    def holder(self, slot: int) -> int | None:
        """Return the number of the expert in a slot; None if it is free."""
        held = int(self._held[slot])
        return held if held >= 0 else None

    def take(self, expert: int, slot: int) -> None:
        self._held[slot] = expert
        self._slot[expert] = slot

    def count_read(self, expert: int, nbytes: int) -> None:
        self.read_nbytes[bisect_right(self._first, expert) - 1] += nbytes

    def keep(self, experts: Collection[int]) -> None:
        """Free the slots of all but these experts, after a call that may have ended half-way."""
        self._slot = {expert: slot for expert, slot in self._slot.items() if expert in experts}
        self._held[:] = -1
        for expert, slot in self._slot.items():
            self._held[slot] = expert

    def drop(self, expert: int) -> None:
        self._held[self._slot.pop(expert)] = -1


class HostFile:
    """Tensors of a checkpoint kept in host memory, until `close`; for ``host=`` of `offload`.

    They are in a file that is not on a disk (memfd_create(2)).

    `checkpoint`: the whole checkpoint, in which these tensors are read from host memory.
    """

    def __init__(
        self, checkpoint: Checkpoint, names: Collection[str], *, keeps: bool, ahead: bool = True
    ) -> None:
        """Read the tensors ``names``, with the kernel's read-ahead if ``ahead``.

        If ``keeps``, the page cache keeps their files, too.
        """
        infos = [info for name, info in checkpoint.tensors.items() if name in names]
        *starts, nbytes = accumulate((info.nbytes for info in infos), initial=0)
        cache = PageCache("keep" if keeps else "drop", to_read_nbytes=nbytes)
        room = Room(BLOCK_NBYTES)

        def kind(path: Location) -> ResolvedKind:
            if ahead or not isinstance(path, Path):
                return resolve_reader(path, "auto")
            return choose_reader(path, "auto").kind

        self._fd = _memory_file(nbytes)
        path = Path(f"/proc/self/fd/{self._fd}")
        try:
            with (
                path.open("r+b") as file,  # closed then: a file open for writing gets no lease
                Shards(
                    checkpoint.shards, kind, cache=cache, most_open=most_open_files(), ahead=ahead
                ) as shards,
            ):
                for info in infos:
                    for block in shards.blocks(info, room):
                        file.write(block)
            state = FileState.of(self._fd)
        except BaseException:
            self.close()
            raise
        own = (
            replace(info, shard=path, start=start, stop=start + info.nbytes)
            for info, start in zip(infos, starts, strict=True)
        )
        headers = [
            replace(each, tensors=tuple(t for t in each.tensors if t.name not in names))
            for each in checkpoint.shards
        ]
        headers.append(Header(path, nbytes, 0, tuple(own), {}, state))
        self.checkpoint = from_headers(checkpoint.path, headers, checkpoint.config)

    def close(self) -> None:
        """Free the memory, which nothing may read from now on; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _memory_file(nbytes: int) -> int:
    if not hasattr(os, "memfd_create"):
        raise OffloadError("host= needs Linux, whose memory can hold files (memfd_create)")
    fd = os.memfd_create("streamload", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise OffloadError(f"host=: no {nbytes} bytes of host memory: {error.strerror}") from error
    finally:
        os.close(fd)


class FileViews(Slots):
    """Weights of layers as views on private maps of their files, in place of memory of slots.

    If the CPU computes on mapped files, the workers that would fill a slot map the layer's pages
    (MADV_POPULATE_READ); when the slot goes to another layer, they are unmapped (MADV_DONTNEED). So
    mapped pages take no more than the slots would, and nothing faults in random order.
    """

    def __init__(
        self,
        made: OffloadPlan,
        checkpoint: Checkpoint,
        device: Device,
        weight_of: Callable[[Any], Any],
    ) -> None:
        """Map the files, and read nothing; ``weight_of`` makes a weight over a mapped tensor."""
        plan = made.stream
        assert plan is not None
        self.count = len(made.residency.slot_starts)
        self._device, self._ahead = device, plan.ahead
        # If the page cache is short of room, pages behind are dropped: else the kernel would drop
        # pages that are needed next.
        self._keeps = made.cached
        self._checkpoint = checkpoint
        self._open: dict[Location, Reader] = {}  # each with a lease, while passes run
        self._entered: dict[int, list[ExitStack]] = {}  # by layer, which may be inside itself
        self._maps: dict[Location, mmap.mmap] = {}
        self._addresses: dict[Location, int] = {}
        self._views: list[tuple[list[Buffer], list[Buffer]]] = []
        self._ranges: list[list[tuple[Location, int, int]]] = []
        for placements in made.layer_placements:
            found: list[tuple[Location, int, int]] = []
            plain: list[Buffer] = []
            for at in placements:
                _, (row,), kind, *_ = plan.placements[at]
                info = checkpoint.tensors[row.tensor]
                memory, start = self._map(info.shard), region_of(info, row).start
                plain.append(device.view(memory, start, kind.dst, kind.shape))
                found.append((info.shard, start, start + kind.nbytes))
            self._views.append(([*map(weight_of, plain)], plain))
            self._ranges.append(_merged(found))

    def _map(self, shard: Location) -> mmap.mmap:
        if shard not in self._maps:
            memory = self._maps[shard] = map_shard(self._checkpoint.headers[shard])
            if not self._ahead:  # a fault would read neighbours, too
                memory.madvise(mmap.MADV_RANDOM)
            self._addresses[shard] = np.frombuffer(memory, np.uint8).ctypes.data
        return self._maps[shard]

    def views(self, layer: int, slot: int) -> tuple[list[Buffer], list[Buffer]]:
        return self._views[layer]

    def bring(self, shard: Location, start: int, stop: int) -> None:
        """Map the pages of bytes ``start`` to ``stop`` (exclusive), and read the uncached ones."""
        first = self._addresses[shard]
        code = populate_shared(first + start, first + stop, ahead=self._ahead)
        if code:
            raise unreadable(shard, OSError(code, "its pages cannot be mapped"))

    def let_go(self, layer: int) -> None:
        """Unmap the pages of a layer; drop them from the page cache, too, if it lacks room."""
        for shard, start, stop in self._ranges[layer]:
            unmap_pages(self._addresses[shard] + start, self._addresses[shard] + stop)
            if not self._keeps and isinstance(shard, Path):
                drop_pages(shard, start, stop)

    def enter(self, layer: int) -> None:
        """Guard the files of a layer against changes while it computes, until `leave`."""
        with ExitStack() as entered:
            for shard in {shard for shard, _, _ in self._ranges[layer]}:
                entered.enter_context(self._opened(shard, layer).unchanged())
            self._entered.setdefault(layer, []).append(entered.pop_all())

    def _opened(self, shard: Location, layer: int) -> Reader:
        reader = self._open.pop(shard, None)
        if reader is None:
            entered = (*self._entered, layer)
            used = {at for each in entered for at, _, _ in self._ranges[each]}
            idle = [at for at in self._open if at not in used]
            for at in idle[: max(len(self._open) + 1 - most_open_files(), 0)]:
                self._open.pop(at).close()
            reader = self._guarded(shard)
        self._open[shard] = reader  # the most recently used last
        return reader

    def _guarded(self, shard: Location) -> Reader:
        # without views of the header: the file itself is mapped
        reader = open_shard(replace(self._checkpoint.headers[shard], views=()), "mmap")
        if not reader.mapped:  # if a mapped file is truncated, the process dies
            reader.close()
            raise CheckpointError(shard, f"cannot be computed on: {reader.fallback}")
        return reader

    def leave(self, layers: Sequence[int]) -> None:
        """End `enter` for each of ``layers``; raises CheckpointError if a file has changed."""
        with ExitStack() as left:  # leaves all, even if one raises
            for layer in layers:
                entered = self._entered[layer]
                left.callback(entered.pop().close)
                if not entered:
                    del self._entered[layer]

    def close_files(self) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    def close(self) -> None:
        """Release the views, even if something still refers to one, and the maps."""
        self.close_files()
        for layer in range(len(self._views)):
            self.let_go(layer)
        for view in chain.from_iterable(chain.from_iterable(self._views)):
            self._device.release(view)
        self._views.clear()
        self._maps.clear()


def _merged(ranges: Sequence[tuple[Location, int, int]]) -> list[tuple[Location, int, int]]:
    found: list[tuple[Location, int, int]] = []
    for shard, start, stop in ranges:
        if found and (found[-1][0], found[-1][2]) == (shard, start):
            start = found.pop()[1]
        found.append((shard, start, stop))
    return found
