"""Split units into one run per node such that the fullest node is as empty as possible; exact.

A unit (such as a layer) is never split; a run is consecutive units. A `Measure` gives the bytes of
a run; there may be several, each with an upper bound for each node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from streamload.core.units import merged


class Measure(ABC):
    """A way to count the bytes of a run of units (layers, ends of a model) that one node holds.

    A run is units ``start`` to ``stop`` (exclusive) of ``count``; a run inside takes no more bytes.
    """

    count: int

    @abstractmethod
    def __call__(self, start: int, stop: int) -> int:
        """Return the bytes of units ``start`` to ``stop`` (exclusive) together; 0 for none."""

    def stop(self, start: int, cap_nbytes: int) -> int:
        """Return the largest stop such that units from ``start`` on take at most ``cap_nbytes``."""
        stops = range(start, self.count + 1)
        return start + bisect_right(stops, cap_nbytes, key=lambda stop: self(start, stop)) - 1

    def start(self, stop: int, cap_nbytes: int) -> int:
        """Return the smallest start such that units up to ``stop`` take at most ``cap_nbytes``."""
        return bisect_left(range(stop + 1), -cap_nbytes, key=lambda start: -self(start, stop))

    def too_large(self, cap_nbytes: int) -> list[int]:
        """Return the indices of units that take more than ``cap_nbytes`` alone, ascending."""
        return [u for u in range(self.count) if self(u, u + 1) > cap_nbytes]


class Costs(Measure):
    """The bytes of a run (units on one node), with copies of tied tensors of other nodes.

    A stored tensor counts once, whether it is in the run or a name tied to it is. So a run
    inside another never takes more, and both ends can be found by bisection.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        home: Mapping[str, tuple[int, int]],
        tied: Iterable[tuple[int, str]],
    ) -> None:
        """Take ``sizes`` by unit, (unit, bytes) by tensor, and (unit, tensor) of tied names."""
        self.count = len(sizes)
        self.prefix = [0, *accumulate(sizes)]
        away = sorted({(u, source) for u, source in tied if home[source][0] != u})
        #: Units with a tied name but not its tensor, ascending, and (tensor, its unit, bytes).
        self._users = [u for u, _ in away]
        self._copies = [(source, *home[source]) for _, source in away]
        #: An upper bound for all runs.
        self.most_nbytes = self.prefix[-1] + sum(nbytes for _, _, nbytes in set(self._copies))
        self._single = sorted((self(u, u + 1), u) for u in range(len(sizes)))  # (bytes, unit)

    def __call__(self, start: int, stop: int) -> int:
        """Return the bytes of a node that holds units ``start`` to ``stop`` (exclusive)."""
        nbytes = self.prefix[stop] - self.prefix[start]
        first, last = bisect_left(self._users, start), bisect_left(self._users, stop)
        if first < last:
            for _, home, copy_nbytes in set(self._copies[first:last]):
                if not start <= home < stop:
                    nbytes += copy_nbytes
        return nbytes

    def too_large(self, cap_nbytes: int) -> list[int]:
        """Return the indices of units that take more than ``cap_nbytes`` alone, by bisection."""
        first = bisect_right(self._single, (cap_nbytes, self.count))
        return sorted(u for _, u in self._single[first:])


class Need(NamedTuple):
    """Least memory of a node to run a unit (such as a layer) whose weights stream through slots.

    Attributes:
        stays_nbytes: bytes that stay on the node in any case.
        slot_nbytes: bytes of the largest part that streams, which a slot holds at a time.
        experts_nbytes: bytes of the experts that a token chooses in one layer.
        rows_nbytes: bytes that the node need not hold, since rows are read on demand.
    """

    stays_nbytes: int = 0
    slot_nbytes: int = 0
    experts_nbytes: int = 0
    rows_nbytes: int = 0


class Leasts(Measure):
    """Least bytes of a node that streams its units through slots.

    Counts all weights that stay, the largest slot, and the largest set of chosen experts.
    """

    def __init__(self, needs: Sequence[Need]) -> None:
        self.count = len(needs)
        self._stays = [0, *accumulate(need.stays_nbytes for need in needs)]
        self._slots = _Largest([need.slot_nbytes for need in needs])
        self._experts = _Largest([need.experts_nbytes for need in needs])

    def __call__(self, start: int, stop: int) -> int:
        """Return the least bytes of a node that runs units ``start`` to ``stop`` (exclusive)."""
        slots = self._slots(start, stop) + self._experts(start, stop)
        return self._stays[stop] - self._stays[start] + slots


class _Largest:
    """The maximum of any run of numbers in constant time, from a table of runs of 1, 2, 4, ..."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._rows = [list(numbers)]
        while (length := 1 << len(self._rows)) <= len(numbers):
            row, half = self._rows[-1], length // 2
            self._rows.append([max(pair) for pair in zip(row, row[half:], strict=False)])

    def __call__(self, start: int, stop: int) -> int:
        if start >= stop:
            return 0
        level = (stop - start).bit_length() - 1
        row = self._rows[level]
        return max(row[start], row[stop - (1 << level)])


_MOST_STOPS = 256  # of a node that `keeping_stops` compares; more units end runs in steps

_Bounds = tuple[tuple[Measure, int], ...]  # most bytes of a node by each measure
_Ranges = list[tuple[int, int]]  # (first, last included), disjoint, ascending


def _starts(bounds: _Bounds, stops: _Ranges, too_large: Sequence[int]) -> _Ranges:
    """Return the starts of all non-empty runs that stop in ``stops`` and are within ``bounds``.

    Between units that are ``too_large`` alone, the starts for consecutive stops overlap or touch:
    every unit can be a run of its own.
    """
    starts: _Ranges = []
    for low, high in stops:
        low = max(low, 1)
        inside = too_large[bisect_left(too_large, low - 1) : bisect_left(too_large, high)]
        for before, after in pairwise((low - 2, *inside, high)):
            if before + 1 < after:  # units (before, after) may be the last of a run
                first = max(measure.start(before + 2, cap) for measure, cap in bounds)
                starts.append((first, after - 1))
    return starts


def _cut(
    prefix: Sequence[int],
    bounds: Sequence[_Bounds],
    weights: Sequence[int],
    may_be_empty: Sequence[bool],
) -> list[int] | None:
    """Return the stop of each node's run of units, within its bytes; None if there is no such cut.

    Each stop is the possible stop nearest to the node's share by weight of the remaining bytes; of
    two equally near, the later. ``prefix`` is the cumulative sum of the units' bytes.
    """
    count = len(prefix) - 1
    reachable: list[_Ranges] = [[(count, count)]]  # starts from which later nodes can take the rest
    too_large: dict[_Bounds, list[int]] = {}
    for bound, empty in zip(reversed(bounds), reversed(may_be_empty), strict=True):
        if bound not in too_large:
            too_large[bound] = sorted({u for measure, cap in bound for u in measure.too_large(cap)})
        starts = _starts(bound, reachable[-1], too_large[bound])
        starts += reachable[-1] if empty else ()
        found = merged((first, last + 1) for first, last in starts)
        reachable.append([(first, stop - 1) for first, stop in found])
        if not reachable[-1]:
            return None
    reachable.reverse()
    if reachable[0][0][0] != 0:
        return None

    stops: list[int] = []
    start = 0
    weight_left = sum(weights)
    for k, (bound, weight) in enumerate(zip(bounds, weights, strict=True)):
        low = start + (not may_be_empty[k])
        high = min(measure.stop(start, cap) for measure, cap in bound)
        target = prefix[start] + (prefix[count] - prefix[start]) * weight // weight_left
        near = bisect_right(prefix, target)
        candidates = {
            min(max(stop, low, first), high, last)
            for first, last in reachable[k + 1]
            if first <= high and last >= low
            for stop in (near - 1, near)
        }
        start = min(candidates, key=lambda stop: (abs(prefix[stop] - target), -stop))
        stops.append(start)
        weight_left -= weight
    return stops


def _fullest(costs: Costs, stops: Sequence[int], budgets: Sequence[int]) -> Fraction:
    """Return the largest share of its budget that a node takes, if runs end at ``stops``."""
    runs = pairwise((0, *stops))
    return max(Fraction(costs(*run), budget) for run, budget in zip(runs, budgets, strict=True))


def _may_be_empty(count: int, nodes: int, between: bool) -> list[bool]:
    """Return whether each node may hold none of ``count`` units; ``between``: those in between."""
    # the ends are held by the ends
    return [k > 0 and (k < nodes - 1 or count == 1) and between for k in range(nodes)]


def keeping_stops(
    costs: Costs, budgets: Sequence[int], held: Sequence[Sequence[int]]
) -> list[int] | None:
    """Return the stop of each node's run such that nodes read the fewest bytes; None if none fits.

    ``held``: for each node, the bytes of each unit that it need not read. Of equally good cuts, the
    fullest node is as empty as possible.
    """
    count, nodes = costs.count, len(budgets)
    step = max(-(-count // _MOST_STOPS), 1)
    every = [*range(0, count, step), count]
    best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}  # by stop
    may_be_empty = _may_be_empty(count, nodes, count < nodes)
    for k, (budget, empty) in enumerate(zip(budgets, may_be_empty, strict=True)):
        kept = [0, *accumulate(held[k])]
        found: dict[int, tuple[int, float, tuple[int, ...]]] = {}
        for start, (read, share, stops) in best.items():
            ends = every if k < nodes - 1 else [count]
            for stop in ends[bisect_left(ends, start + (not empty)) :]:
                nbytes = costs(start, stop)
                if nbytes > budget:
                    break
                new = read + nbytes - kept[stop] + kept[start]
                made = (new, max(share, nbytes / budget), (*stops, stop))
                found[stop] = min(found.get(stop, made), made)
        best = found
    return list(best[count][2]) if count in best else None


def stops_of(
    costs: Costs, budgets: Sequence[int], leasts: Leasts | None = None
) -> list[int] | None:
    """Return the stop of each node's run such that the largest share of a budget is minimal.

    Bisection over the share of a budget: a feasible share is replaced by the share that its cut
    reaches, until nothing strictly below is feasible. With ``leasts`` a node in between may be
    empty, as it may be too small for any unit. None if no cut gives each node its run's `Leasts`.
    """
    count, nodes = costs.count, len(budgets)
    if not count:
        return [0] * nodes
    may_be_empty = _may_be_empty(count, nodes, count < nodes or leasts is not None)
    measures: list[Measure] = [costs] if leasts is None else [costs, leasts]

    def cut(share: Fraction, *, strictly_below: bool = False) -> list[int] | None:
        p, q = share.numerator, share.denominator
        caps = [(p * budget - strictly_below) // q for budget in budgets]
        if min(caps) < 0:
            return None
        pairs = zip(caps, budgets, strict=True)
        bounds = [tuple(zip(measures, each, strict=False)) for each in pairs]
        return _cut(costs.prefix, bounds, budgets, may_be_empty)

    low = Fraction(0)
    best = cut(Fraction(costs.most_nbytes, min(budgets)))  # no share is too large
    while best is not None:
        high = _fullest(costs, best, budgets)
        below = cut(high, strictly_below=True)
        if below is None:
            return cut(high)  # again: the cut found so far depends on the path of the search
        best = below
        middle = (low + _fullest(costs, best, budgets)) / 2
        found = cut(middle)
        if found is None:
            low = middle
        else:
            best = found
    return None
