"""State of the layers that stream: their order, the memory of their slots, counts of passes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.units import round_up
from streamload.devices.base import Ticket
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.residency import SLOT_ALIGNMENT_NBYTES
from streamload.planning.placement import Placement

# Parts of quantized weights begin at multiples of this in slots: kernels read vectors.
_PART_ALIGNMENT_NBYTES = 64


class FileRange(NamedTuple):
    """Bytes ``start`` to ``stop`` (exclusive) of a file."""

    shard: Location
    start: int
    stop: int


NO_PARTS: Mapping[int, FileRange] = MappingProxyType({})


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

    def __init__(
        self, memory: Any, plan: OffloadPlan, parts: Mapping[int, FileRange] = NO_PARTS
    ) -> None:
        """Cut ``memory``, the bytes of all slots, by the sizes in ``plan``.

        ``parts``, by placement: the file bytes of parts of quantized weights. In a slot they are
        adjacent where they are in the file, so that one copy brings them.
        """
        assert plan.stream is not None
        self._memory, self._starts = memory, plan.residency.slot_starts
        self._residency, self.layers = plan.residency, plan.residency.slots
        self.count, kinds = len(self._starts), plan.stream.placements.kinds
        self._layers = [[kinds[at] for at in each] for each in plan.layer_placements]
        self._offsets = [self._packed(each, kinds, parts) for each in plan.layer_placements]
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

    def _packed(
        self, placements: range, kinds: Sequence[Placement], parts: Mapping[int, FileRange]
    ) -> list[int]:
        """Return the first byte of each tensor of a layer in its slots, within the planned size."""
        found, at = list[int](), 0
        for index in placements:
            kind, mine, last = kinds[index], parts.get(index), parts.get(index - 1)
            aligned = round_up(at, SLOT_ALIGNMENT_NBYTES)
            if self.packs and found and mine and last and mine.shard == last.shard:
                near = at + mine.start - last.stop
                short = kind.dst.bits == 8 and kind.nbytes < SLOT_ALIGNMENT_NBYTES
                if at <= near <= aligned and (short or not near % _PART_ALIGNMENT_NBYTES):
                    aligned = near
            found.append(aligned)
            at = aligned + kind.nbytes
        return found

    def buffers(self, layer: int, slot: int) -> list[Any]:
        """Return tensors over a slot for a layer's weights; layers of equal shapes share them."""
        return self._of(layer, slot)[0]

    def to_fill(self, layer: int, slot: int) -> list[Any]:
        """Return other tensors over the memory of `buffers`, for the threads that fill it."""
        return self._of(layer, slot)[1]

    def _of(self, layer: int, slot: int) -> tuple[list[Any], list[Any]]:
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


@dataclass(slots=True)
class RoundStats:
    """Counts of all passes (calls of the model) so far, for `OffloadReport`."""

    read_nbytes: int = 0
    stalls: list[float] = field(default_factory=list)  # by layer, seconds of waiting
    misses: int = 0  # how often another layer was asked for than expected
    busy_s: float = 0.0  # seconds in which copies of a layer were being started


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
