"""What takes turns in slots: layers, their order, the slots' memory, and what passes did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from streamload.core.location import Location
from streamload.devices.base import Buffer, Ticket
from streamload.streaming.state import Sink, WorkItem


@dataclass(frozen=True, slots=True)
class Layer:
    """What streams together.

    Attributes:
        name: its name.
        placements: numbers of its placements in the plan, which follow each other.
        slots: how many slots it takes, side by side.
        read_nbytes: what is read of the files for it.
    """

    name: str
    placements: range
    slots: int
    read_nbytes: int


class SlotMemory(Protocol):
    """The slots of a device: memory at addresses that stay."""

    def buffers(self, layer: int, slot: int) -> Sequence[Buffer]:
        """A buffer for each placement of a layer that begins at a slot."""

    def to_fill(self, layer: int, slot: int) -> Sequence[Buffer]:
        """The same memory for those who fill it, whose references to it come and go."""

    def close(self) -> None:
        """Give the memory back, when nothing uses it any more."""


class Views(Protocol):
    """Pages of files, where the device computes on these: nothing is copied into slots."""

    def bring(self, shard: Location, start: int, stop: int) -> None:
        """Map some bytes."""

    def let_go(self, layer: int) -> None:
        """Unmap a layer."""

    def enter(self, layer: int) -> None:
        """Hold back those who would change the files of a layer that is computed with."""

    def leave(self, layers: Sequence[int]) -> None:
        """Let them, for several layers; raises FileChangedError where one waits."""

    def close_files(self) -> None:
        """Nothing is computed with; let go of all files until the next `enter`."""


@dataclass(slots=True)
class RoundStats:
    """What passes did, so far.

    Attributes:
        read_nbytes: file bytes read.
        used: how often each layer was asked for.
        stalls: seconds that each was waited for.
        misses: how often a layer was asked for that was not expected next.
        busy_s: seconds in which layers were on their way.
    """

    read_nbytes: int = 0
    used: list[int] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    misses: int = 0
    busy_s: float = 0.0


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
        """The copies of a unit have been begun."""
        self._sent(unit, tickets)
