"""Layers that stream: their order, the memory of their slots, and counts of passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from streamload.core.dtypes import DType
from streamload.core.units import round_up
from streamload.devices.base import Buffer, Ticket
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.residency import SLOT_ALIGNMENT_NBYTES
from streamload.streaming.state import Sink, WorkItem


@dataclass(frozen=True, slots=True)
class Layer:
    """Tensors that stream together."""

    name: str
    placements: range  # numbers in the plan
    slots: int  # adjacent ones
    read_nbytes: int  # of the files


class LayerState(Enum):
    """The state of a layer that has slots; see the table of `prefetch`."""

    FILLING = auto()
    SENT = auto()
    THERE = auto()
    SPOILED = auto()


@dataclass(slots=True)
class HeldLayer:
    """A layer that has slots."""

    first: int  # slot
    left_nbytes: int  # whose copies have not been started
    unsure_nbytes: int  # whose copies may not have ended
    state: LayerState = LayerState.FILLING
    tickets: list[Ticket] = field(default_factory=list)  # of copies that may not have ended
    computing: int = 0  # uses that the device has not ended


class Slots:
    """Slots of a device in one piece of memory, over which layers have tensors: of numpy, here.

    Attributes:
        count: slots of layers and of experts.
    """

    def __init__(self, memory: Any, plan: OffloadPlan) -> None:
        """Take the bytes of all slots."""
        assert plan.stream is not None
        self._memory, self._starts = memory, plan.residency.slot_starts
        self.count, kinds = len(self._starts), plan.stream.placements.kinds
        self._layers = [[kinds[at] for at in each] for each in plan.layer_placements]
        self._made: dict[Hashable, tuple[list[Any], list[Any]]] = {}

    def buffers(self, layer: int, slot: int) -> list[Any]:
        """A buffer for each placement of a layer that begins at a slot; the same for all alike."""
        return self._of(layer, slot)[0]

    def to_fill(self, layer: int, slot: int) -> list[Any]:
        """The same memory for workers, whose references to it come and go."""
        return self._of(layer, slot)[1]

    def _of(self, layer: int, slot: int) -> tuple[list[Any], list[Any]]:
        key = slot, *((kind.dst.name, kind.shape) for kind in self._layers[layer])
        if key not in self._made:
            found, at = [], self._starts[slot]
            for kind in self._layers[layer]:
                found.append(self._view(at, at + kind.nbytes, kind.dst, kind.shape))
                at = round_up(at + kind.nbytes, SLOT_ALIGNMENT_NBYTES)
            self._made[key] = [view for view, _ in found], [plain for _, plain in found]
        return self._made[key]

    def _view(self, start: int, stop: int, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, Any]:
        """A tensor over some bytes, and the same for workers."""
        view = self._memory[start:stop].view(dtype.numpy).reshape(shape)
        return view, view

    @staticmethod
    def weight_of(view: Any, /) -> Any:
        """The tensor that modules or loops get for a view on a file."""
        return view

    def close(self) -> None:
        """Give the memory back, when nothing uses it any more; it goes with the last tensor."""
        self._made.clear()
        self._memory = None

    def lend(self, buffers: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors of a loop over layers, until `take_back`."""
        return buffers

    def take_back(self) -> None:
        """End the use of lent buffers: the loop has gone on."""


@dataclass(slots=True)
class RoundStats:
    """Counts of passes so far."""

    read_nbytes: int = 0
    stalls: list[float] = field(default_factory=list)  # seconds of waiting, by layer
    misses: int = 0  # layers that were not expected next
    busy_s: float = 0.0  # while layers were on their way


class Order:
    """The order in which passes ask for layers, learned from them."""

    def __init__(self, count: int) -> None:
        """Expect so many layers one after the other, and then the first again."""
        self._next = [(number + 1) % count for number in range(count)]
        self._last: int | None = None

    def follow(self, number: int) -> bool:
        """Learn that this layer came after the last. Returns whether it was expected."""
        expected = self._last is None or self._next[self._last] == number
        if self._last is not None:
            self._next[self._last] = number
        self._last = number
        return expected

    def ahead(self, first: int | None) -> list[int]:
        """The layers as they are needed from now on; ``first``: one that is waited for."""
        if self._last is None:
            return [*range(len(self._next))]
        at = self._next[self._last] if first is None else first
        order: dict[int, None] = {}
        while at not in order:
            order[at] = None
            at = self._next[at]
        return list(order)


class SlotTarget(Sink):
    """The slots as a stream fills them."""

    def __init__(
        self,
        layers: Sequence[Layer],
        arrived: Callable[[Sequence[int]], None],
        sent: Callable[[WorkItem, Sequence[Ticket]], None],
    ) -> None:
        self._buffers: dict[int, Buffer] = {}
        self._layers, self._arrived, self._sent = layers, arrived, sent

    def place(self, number: int, buffers: Sequence[Buffer]) -> None:
        """A layer is going to be filled, into these buffers."""
        self._buffers.update(zip(self._layers[number].placements, buffers, strict=True))

    def begin(self, indices: Sequence[int]) -> list[Buffer]:
        """The buffers of placements."""
        return [self._buffers[index] for index in indices]

    def finish(self, indices: Sequence[int]) -> None:
        """All bytes of these are there."""
        self._arrived(indices)

    def sent(self, unit: WorkItem, tickets: Sequence[Ticket]) -> None:
        """The copies of a unit have been started."""
        self._sent(unit, tickets)
