"""Which layers and experts are in slots, which comes next, and in whose place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain

from streamload.devices.base import QueuedWork, Ticket
from streamload.offloading.slots import (
    ExpertCache,
    FileViews,
    HeldLayer,
    Layer,
    LayerState,
    Order,
    Slots,
)
from streamload.planning.moves import UNREAD
from streamload.planning.plan import Plan


class Holding:
    """The slots of a `Rounds`; its lock guards all of this, and its table lists the threads."""

    def __init__(
        self, plan: Plan, layers: Sequence[Layer], memory: Slots, experts: ExpertCache | None
    ) -> None:
        """Begin with empty slots; for arguments see `Rounds`."""
        self._views = memory if isinstance(memory, FileViews) else None
        self.experts = experts if experts is not None else ExpertCache((), 0)
        self._first_expert = len(layers) - self.experts.count
        self._layers, self.memory = layers, memory
        copied = [0 if m.kind.cast in UNREAD else m.kind.nbytes for m in plan.placements]
        self._nbytes = [sum(copied[at] for at in layer.placements) for layer in layers]
        self._order = Order(self._first_expert)
        self._holds: list[int | None] = [None] * (memory.count - self.experts.slots)
        # by slot of layers, and by stream, the last work that used it: copies into it wait for that
        self._uses: list[dict[int, QueuedWork]] = [{} for _ in self._holds]
        self._held: dict[int, HeldLayer] = {}
        self._busy: set[int] = set()  # layers that are filled or computed with
        self._busy_since = 0.0
        self._users: list[int] = []  # layers in use, each called inside the one before
        self._used: list[tuple[Sequence[int], Ticket]] = []  # experts that may be computed with
        self._wanted: Sequence[int] = ()

    def _is_there(self, number: int) -> bool:
        held = self._held.get(number)
        if held is None or held.state is LayerState.FILLING:
            return False
        return held.state is not LayerState.SPOILED or number in self._users

    def _pick_expert(self) -> tuple[int, int] | None:
        """Return (expert to read next, its slot), of those asked for; None if no slot is free."""
        base = self._first_expert
        if not self.experts.asked:  # no layer waits for them, or is about to
            return None
        expert = self.experts.next({number - base for number in self._in_use()})
        return None if expert is None else (base + expert[0], len(self._holds) + expert[1])

    def _pick_layer(self) -> tuple[int, int] | None:
        """Return (layer to read next, its first slot); None if none is needed, or no slot free."""
        wanted = [number for number in self._wanted[:1] if number < self._first_expert]
        order = self._order.ahead(wanted[0] if wanted else None)
        distance = {number: at for at, number in enumerate(order)}
        for at, number in enumerate(order):
            if number not in self._held:
                first = self._room_for(number, at, distance)
                return None if first is None else (number, first)
        return None

    def _take_experts(self, most: int) -> list[tuple[int, int]]:
        """Give slots to up to ``most`` experts to be read next, if any; return them with these."""
        picked = list[tuple[int, int]]()
        while len(picked) < most and (found := self._pick_expert()) is not None:
            self._take(*found)
            picked.append(found)
        return picked

    def _room_for(self, number: int, at: int, distance: Mapping[int, int]) -> int | None:
        """Return the first of the adjacent slots that layer ``number`` gets.

        Free slots, else the slots of layers that are needed latest; None if all hold layers in use,
        or needed earlier than this layer. ``at``: this layer's position in the order of use;
        ``distance``: the position of each layer by number.
        """
        best, best_distance = None, at
        slots = self._layers[number].slots
        for first in range(len(self._holds) - slots + 1):
            inside = {each for each in self._holds[first : first + slots] if each is not None}
            held = inside & self._held.keys()  # without what an interrupted call left
            if any(each in self._busy or each in self._users for each in held):
                continue
            nearest = min(
                (distance.get(each, len(self._layers)) for each in held),
                default=len(self._layers) + 1,
            )
            if nearest > best_distance:
                best, best_distance = first, nearest
        return best

    def _take(self, number: int, first: int) -> list[QueuedWork]:
        """Give a layer the slots from ``first`` on (an expert: that slot); drop former holders.

        Returns the queued work that copies into the slots have to wait for.
        """
        uses = list[QueuedWork]()
        if number >= self._first_expert:
            slot = first - len(self._holds)
            held = self.experts.holder(slot)
            self._drop(None if held is None else self._first_expert + held)
            self.experts.take(number - self._first_expert, slot)
        else:
            for at in range(first, first + self._layers[number].slots):
                self._drop(self._holds[at])
                self._holds[at] = number
                uses += self._uses[at].values()
        if not self._fills():
            self._busy_since = time.perf_counter()
        self._held[number] = HeldLayer(first, self._nbytes[number], self._nbytes[number])
        self._busy.add(number)
        return [*dict.fromkeys(uses)]

    def _note_use(self, number: int, work: QueuedWork) -> None:
        """Let copies into the slots of a layer wait for the work that uses it."""
        first = self._held[number].first
        for at in range(first, first + self._layers[number].slots):
            self._uses[at][work.stream] = work

    def _fills(self) -> bool:
        return any(self._held[number].state is LayerState.FILLING for number in self._busy)

    def _in_use(self) -> set[int]:
        return {*self._busy, *self._users, *chain.from_iterable(each for each, _ in self._used)}

    def _drop(self, number: int | None) -> None:
        if number is None:
            return
        self._busy.discard(number)
        if self._held.pop(number, None) is not None and number >= self._first_expert:
            self.experts.drop(number - self._first_expert)
        if number < self._first_expert:
            self._holds = [None if held == number else held for held in self._holds]
        if self._views is not None:
            self._views.let_go(number)

    def _settle(self, number: int) -> None:
        """If copies to a layer, and uses that are waited for, have ended, let it be evicted.

        One that is spoiled is evicted.
        """
        held = self._held.get(number)
        if held is None or held.state is LayerState.FILLING or held.unsure_nbytes or held.computing:
            return
        self._busy.discard(number)
        if held.state is LayerState.SPOILED and number not in self._in_use():
            self._drop(number)
