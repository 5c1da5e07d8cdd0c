"""A cache of experts: one pool of slots for all layers, evicted by decayed frequency.

An expert's score counts the choices of its layer, older ones less; the lowest score makes room. A
pass that asks for every expert, as a prompt does, keeps the order of the scores, where
least-recently-used would lose the whole cache. docs/measurements.md compares policies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

import numpy as np

# What a choice still counts when its layer has chosen once more. 0.95 to 0.99 do alike on traces.
_KEPT = 0.97
# Experts that are computed with while as many come. More would evict better ones.
_TOGETHER = 8
_LARGEST = 1e200  # scores are scaled down when one choice counts as much


class ExpertCache:
    """The slots of experts, and what the layer that computes now asks for.

    Experts have numbers: those of the first layer, then those of the second, and so on.

    Attributes:
        count: how many experts there are.
        slots: how many of them the cache holds.
        asked: the experts that the layer under way still needs, in the order in which it computes.
        together: how many experts a layer computes with while as many come.
        hits: by layer, how many chosen experts were in a slot when they were asked for.
        misses: by layer, how many were not.
        stalls: seconds that each layer waited for experts.
        read_nbytes: file bytes read for experts of each.
    """

    def __init__(self, experts: Sequence[int], slots: int) -> None:
        """Hold nothing yet; ``experts``: how many each layer has."""
        *self._first, self.count = accumulate(experts, initial=0)
        self._scores = np.zeros(self.count)
        self._counts = [1.0] * len(experts)  # what a choice counts now, by layer
        self.slots, self._held = slots, np.full(slots, -1)  # the expert in each slot
        self._slot: dict[int, int] = {}  # by expert
        self.asked: list[int] = []
        self.together = max(min(_TOGETHER, slots // 2), 1)
        self.hits, self.misses = [0] * len(experts), [0] * len(experts)
        self.stalls = [0.0] * len(experts)
        self.read_nbytes = [0] * len(experts)

    def numbers(self, layer: int, chosen: Sequence[int]) -> list[int]:
        """The numbers of experts of a layer."""
        return [self._first[layer] + expert for expert in chosen]

    def ask(self, layer: int, chosen: Sequence[int], there: int) -> None:
        """A layer asks for experts in its order, of which ``there`` are in their slots."""
        self.asked = self.numbers(layer, chosen)
        self.hits[layer] += there
        self.misses[layer] += len(self.asked) - there
        self._scores[self.asked] += self._counts[layer]
        self._counts[layer] /= _KEPT
        if self._counts[layer] > _LARGEST:
            self._scores /= _LARGEST
            self._counts = [count / _LARGEST for count in self._counts]

    def has_computed(self, experts: Collection[int]) -> None:
        """The layer under way does not need these any more."""
        self.asked = [expert for expert in self.asked if expert not in experts]

    def next(self, busy: Collection[int] = ()) -> tuple[int, int] | None:
        """The expert to bring next, and its slot; ``busy``: experts whose slots are in use."""
        for place, expert in enumerate(self.asked[: 2 * self.together]):
            if expert not in self._slot:
                slot = self._room(place, busy)
                return None if slot is None else (expert, slot)
        return None

    def _room(self, place: int, busy: Collection[int]) -> int | None:
        """The slot least worth keeping, for the expert that is asked for at a place."""
        scores = np.where(self._held < 0, -1.0, self._scores[self._held])
        for expert in (*busy, *self.asked):
            if expert in self._slot:
                scores[self._slot[expert]] = np.inf
        slot = int(scores.argmin())
        if scores[slot] < np.inf:
            return slot
        for expert in reversed(self.asked[place + 1 :]):  # all are needed now: the last one of them
            if expert in self._slot and expert not in busy:
                return self._slot[expert]
        return None

    def has(self, layer: int, chosen: Sequence[int]) -> int:
        """How many experts of a layer have slots."""
        return sum(expert in self._slot for expert in self.numbers(layer, chosen))

    def holder(self, slot: int) -> int | None:
        """The expert that has a slot."""
        held = int(self._held[slot])
        return held if held >= 0 else None

    def take(self, expert: int, slot: int) -> None:
        """Let an expert have a slot that is free."""
        self._held[slot] = expert
        self._slot[expert] = slot

    def count_read(self, expert: int, nbytes: int) -> None:
        """So many file bytes are read for an expert."""
        self.read_nbytes[bisect_right(self._first, expert) - 1] += nbytes

    def drop(self, expert: int) -> None:
        """Forget an expert that has a slot."""
        self._held[self._slot.pop(expert)] = -1
