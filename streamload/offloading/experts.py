"""A cache of experts: one pool of slots for all layers, evicted by decayed frequency.

An expert's score counts how often the router chose it, older choices less; the lowest score is
evicted. A pass that asks for every expert, as a prompt does, keeps the order of the scores, where
least-recently-used would lose the whole cache. docs/measurements.md compares policies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

# The decay of a score at each choice of its layer. 0.95 to 0.99 do alike on traces.
_KEPT = 0.97
# Experts in use while as many are read. More would evict experts with higher scores.
_TOGETHER = 8
_LARGEST = 1e200  # scores are scaled down once a choice counts more


class ExpertCache:
    """A cache of experts: the expert in each device slot, and those that the computing layer needs.

    Experts are numbered over all layers: those of the first layer, then of the second, and so on.

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

    def __init__(self, experts: Sequence[int], slots: int) -> None:
        """Make an empty cache; ``experts``: the number of experts of each layer."""
        *self._first, self.count = accumulate(experts, initial=0)
        self._scores = np.zeros(self.count)
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

    def has_computed(self, experts: Collection[int]) -> None:
        """Strike experts, by number, from `asked`: the computing layer has used them."""
        self.asked = [expert for expert in self.asked if expert not in experts]

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
        """Record that an expert holds a slot, which was free."""
        self._held[slot] = expert
        self._slot[expert] = slot

    def count_read(self, expert: int, nbytes: int) -> None:
        """Add file bytes, read for an expert, to the count of its layer."""
        self.read_nbytes[bisect_right(self._first, expert) - 1] += nbytes

    def keep(self, experts: Collection[int]) -> None:
        """Free the slots of all but these experts, after a call that may have ended half-way."""
        self._slot = {expert: slot for expert, slot in self._slot.items() if expert in experts}
        self._held[:] = -1
        for expert, slot in self._slot.items():
            self._held[slot] = expert

    def drop(self, expert: int) -> None:
        """Free the slot of an expert that has one."""
        self._held[self._slot.pop(expert)] = -1
