"""Split tensors by layers over nodes or devices, such that the fullest is as empty as possible.

Input are names and sizes, output are parts. Sizes are those after the cast. A unit (such as a
layer) is never split; a run is consecutive units. A `Measure` gives the bytes of a run; there may
be several, each with an upper bound for each node. The split is exact.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Literal, NamedTuple

from streamload.core.memory import Size
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


Kind = Literal["embedding", "layer", "head", "inner", "tensor"]

_NUMBERS = re.compile("([0-9]+)")


@dataclass(frozen=True, slots=True, init=False)
class Node:
    """A node or device that takes a part of a split.

    Attributes:
        name: its name.
        budget: the bytes that it may hold, at least 1.
        held: names of tensors that it holds already, within the budget.
    """

    name: str
    budget: int
    held: frozenset[str]

    def __init__(self, name: str, budget: float | str, held: Iterable[str] = ()) -> None:
        """Read a node.

        Args:
            name: its name.
            budget: bytes, or a size such as "3GB".
            held: names of tensors that it holds already: a split lets it keep them if it can.

        Raises:
            ValueError: the budget is not such a size, is not above zero, or is a percentage.
        """
        nbytes = Size.parse(budget).nbytes
        if nbytes is None:
            raise ValueError(
                f"node {name}: a budget in bytes is needed, not {budget!r}: "
                "what is free there is not known here"
            )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "budget", nbytes)
        object.__setattr__(self, "held", frozenset(held))


def ordered(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return nodes sorted by name, with the numbers in names by value: board-2 before board-10.

    So a plan does not depend on the order in which nodes join. Names that differ only in leading
    zeros are in the order of their characters.
    """
    return tuple(sorted(nodes, key=lambda node: natural_key(node.name)))


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """Return a key that sorts names as people do: ASCII digits as numbers, the rest as characters.

    Numbers come before characters, so that keys always compare. They compare by length before
    digits, since Python refuses to read a number of thousands of digits.
    """
    parts = (part for part in _NUMBERS.split(name) if part)
    return tuple(
        (0, len(digits := part.lstrip("0")), digits) if _NUMBERS.match(part) else (1, 0, part)
        for part in parts
    ), name


class Item(NamedTuple):
    """A stored tensor to be split over nodes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are never split over nodes.

    Attributes:
        name: "embedding", "head", the layer's prefix ("model.layers.3"), an inner end of a stack
            ("decoder.block start", "encoder.block end"), or the tensor's name.
        kind: "embedding" and "head" are the ends of the model, "layer" one layer, "inner" an end of
            a stack in the middle of the model, "tensor" one tensor of a model without layers.
        items: the tensors, in the order given.
        tied: (missing name, stored tensor that it shares) of the tied names that belong here.
        cache_nbytes: bytes that it needs besides the tensors to run.
    """

    name: str
    kind: Kind
    items: tuple[Item, ...]
    tied: tuple[tuple[str, str], ...] = ()
    cache_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without copies for tied names."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True, slots=True)
class Part:
    """The tensors of one node under a split.

    Attributes:
        units: names of its units.
        names: its stored tensors, in the order given; each is on one node.
        copies: stored tensors of another node of which this one holds copies, since a name that
            is tied to them belongs here; in the order given.
        tied: (missing name, stored tensor that it shares) of the tied names that belong here.
        layers: the model's layers on the node, counted from 0 over all stacks; may be empty.
        nbytes: the bytes of ``names`` and ``copies``.
        cache_nbytes: the extra bytes that its layers need to run.
    """

    node: str
    budget_nbytes: int
    units: tuple[str, ...]
    names: tuple[str, ...]
    copies: tuple[str, ...]
    tied: tuple[tuple[str, str], ...]
    layers: range
    has_embedding: bool
    has_head: bool
    nbytes: int
    cache_nbytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the node's tensors and its extra bytes to run are within its budget."""
        return self.nbytes + self.cache_nbytes <= self.budget_nbytes

    @property
    def share(self) -> float:
        """The share of the node's budget that tensors and extra bytes to run take; 1.0 is all."""
        return (self.nbytes + self.cache_nbytes) / self.budget_nbytes


# --- grouping -------------------------------------------------------------------------------------

#: Last components of the prefixes of layers; such a stack may have a single layer.
_CONTAINERS = frozenset({"layers", "layer", "h", "blocks", "block"})
#: Words in names of tensors before the layers, unless the name has a word of _OUTPUT, too.
# fmt: off
_INPUT = frozenset({
    "embed", "embeds", "embedding", "embeddings", "embedder", "emb", "wte", "wpe", "shared",
    "position", "positions", "positional", "pos", "token", "tokens", "tok", "patch", "stem", "pre",
    "in", "conv1", "conv2", "bn1",
})
# fmt: on
_OUTPUT = frozenset({"out", "output", "head", "heads"})
#: The order in which stacks run by words of their prefixes, the least counts; 2 if there is none.
_STACK_ORDER = {
    **dict.fromkeys(("vision", "visual", "image", "audio", "speech"), 0),
    "encoder": 1,
    **dict.fromkeys(("decoder", "mtp"), 3),
    **dict.fromkeys(("classifier", "head", "score"), 4),
}
_WORDS = re.compile(r"[._]+")
_MOST_DIGITS = 9  # of a layer's number; a longer one is a name

_Key = tuple[int, int, int, int]  # place of a unit: stage, stack, end or layers, layer index
_FIRST: _Key = (0, 0, 0, 0)
_LAST: _Key = (2, 0, 0, 0)
_START, _LAYERS, _END = range(3)


def _integers(name: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (prefix, index, whether a module follows) for each integer component of a name."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit() and part.isascii() and len(part) <= _MOST_DIGITS:
            yield ".".join(parts[:place]), int(part), len(parts) - place > 2


def _layer_stacks(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return (prefix of its stack, layer index) of each name that belongs to a layer, by name.

    The layer index is the first integer component whose prefix is a stack: it repeats, with
    modules below it, or its last word is a word for layers. Without such a prefix, one index or
    bare parameters are enough.
    """
    found = {name: list(_integers(name)) for name in names}
    indices: dict[str, set[int]] = defaultdict(set)
    of_modules: set[str] = set()  # "layers.0.norm.weight"; "mlp.0.weight" holds only parameters
    for integers in found.values():
        for prefix, index, module in integers:
            indices[prefix].add(index)
            if module:
                of_modules.add(prefix)
    repeated = {
        prefix
        for prefix in of_modules
        if len(indices[prefix]) > 1 or prefix.rpartition(".")[2] in _CONTAINERS
    }
    stacks = repeated or of_modules or indices
    layers = (
        (name, next((i[:2] for i in integers if i[0] in stacks), None))
        for name, integers in found.items()
    )
    return {name: layer for name, layer in layers if layer is not None}


def _end_of_stacks(name: str, stacks: Sequence[str]) -> _Key:
    """Return the place of a tensor outside the layers: an end of the stack with the nearest prefix.

    Nearest is the longest run of leading components in common; nothing in common is an end of the
    model.
    """
    parts = name.split(".")
    same = (map(eq, parts, stack.split(".")) for stack in stacks)
    lengths = [sum(takewhile(bool, each)) for each in same]
    most = max(lengths)
    near = [place for place, length in enumerate(lengths) if length == most]
    words = frozenset(_WORDS.split(name.lower()))
    if words & _INPUT and not words & _OUTPUT:
        return (1, near[0], _START, 0) if most and near[0] > 0 else _FIRST
    return (1, near[-1], _END, 0) if most and near[-1] < len(stacks) - 1 else _LAST


def units_of(
    items: Sequence[Item],
    *,
    tied: Mapping[str, str] | None = None,
    cache: Sequence[int] = (),
) -> tuple[Unit, ...]:
    """Group tensors by name into the units of a split, in the order in which they run.

    The order is embedding, layers by number, norm and head. The layer index is the first integer
    component with a prefix that repeats (``model.layers.3``, ``h.3``, ``encoder.block.3``); later
    integers (``experts.17``) stay inside the layer. Several stacks run vision before encoder before
    other stacks before decoder, else as they first appear. Other tensors go before the layers
    (embeddings) or after them (the rest), or, if their name leads to one stack inside the model, to
    an end of that stack, which is a separate unit. Without layers each tensor is a unit.

    ``tied`` maps names that are not stored to the stored tensor that they share. ``cache`` has the
    extra bytes of each layer of the language model: of the stack with most of these layers, and not
    of vision or audio if there is another.
    """
    tied = tied or {}
    position = {item.name: place for place, item in enumerate(items)}
    if len(position) < len(items):
        again = next(item.name for place, item in enumerate(items) if position[item.name] != place)
        raise ValueError(f"tensor {again!r} occurs twice")
    for item in items:
        if item.nbytes < 0:
            raise ValueError(f"tensor {item.name!r} has a negative size: {item.nbytes} bytes")
    for name, source in tied.items():
        if name in position:
            raise ValueError(f"tensor {name!r} is stored, so it cannot be tied to {source!r}")
        if source not in position:
            raise ValueError(f"tensor {name!r} is tied to {source!r}, which is not stored")

    layer_of = _layer_stacks(position)
    if not layer_of:
        ties = tuple(tied.items())
        return tuple(
            Unit(item.name, "tensor", (item,), ties if place == len(items) - 1 else ())
            for place, item in enumerate(items)
        )
    stacks = sorted(dict.fromkeys(prefix for prefix, _ in layer_of.values()), key=_stack_rank)
    place_of = {prefix: place for place, prefix in enumerate(stacks)}

    def key_of(name: str) -> _Key:
        layer = layer_of.get(name)
        if layer is None:  # a tied name may be in a layer too
            layer = next((i[:2] for i in _integers(name) if i[0] in place_of), None)
        if layer is None:
            return _end_of_stacks(name, stacks)
        return (1, place_of[layer[0]], _LAYERS, layer[1])

    members: dict[_Key, list[Item]] = {}
    aliases: dict[_Key, list[tuple[str, str]]] = {}
    for item in items:
        members.setdefault(key_of(item.name), []).append(item)
    for name, source in tied.items():
        aliases.setdefault(key_of(name), []).append((name, source))
    keys = sorted(members.keys() | aliases.keys())
    beside = _beside(keys, stacks, cache)
    return tuple(
        Unit(
            *_unit_name(key, stacks),
            tuple(members.get(key, ())),
            tuple(aliases.get(key, ())),
            beside.get(key, 0),
        )
        for key in keys
    )


def _beside(keys: Iterable[_Key], stacks: Sequence[str], cache: Sequence[int]) -> dict[_Key, int]:
    """Return extra bytes of each layer of the language model, by its key; see `units_of`."""
    layers: dict[int, list[_Key]] = {}
    for key in keys:
        stage, stack, place, index = key
        if stage == 1 and place == _LAYERS and index < len(cache):
            layers.setdefault(stack, []).append(key)
    if not layers:
        return {}
    ranks = {stack: _stack_rank(stacks[stack]) for stack in layers}
    # vision and audio come last, and of two with as many layers the encoder
    text = max(layers, key=lambda stack: (ranks[stack] > 0, len(layers[stack]), ranks[stack] > 1))
    return {key: cache[key[3]] for key in layers[text]}


def _stack_rank(prefix: str) -> int:
    """Return a rank that orders stacks of layers, from 0 (vision, audio) to 4 (heads)."""
    words = _WORDS.split(prefix.lower())
    return min((_STACK_ORDER[word] for word in words if word in _STACK_ORDER), default=2)


def _unit_name(key: _Key, stacks: Sequence[str]) -> tuple[str, Kind]:
    if key == _FIRST:
        return "embedding", "embedding"
    if key == _LAST:
        return "head", "head"
    _, stack, place, index = key
    prefix = stacks[stack]
    if place == _LAYERS:
        return f"{prefix}.{index}" if prefix else str(index), "layer"
    return f"{prefix} {'start' if place == _START else 'end'}", "inner"


# --- splitting ------------------------------------------------------------------------------------


def _costs(units: Sequence[Unit], sizes: Sequence[int]) -> Costs:
    home = {item.name: (u, item.nbytes) for u, unit in enumerate(units) for item in unit.items}
    tied = ((u, source) for u, unit in enumerate(units) for _, source in unit.tied)
    return Costs(sizes, home, tied)


def _stops(
    units: Sequence[Unit], nodes: Sequence[Node], needs: Callable[[Unit], Need] | None
) -> list[int]:
    """Return the stop of each node's run of units; see `partition`."""
    sizes = [unit.nbytes + unit.cache_nbytes for unit in units]
    budgets = [node.budget for node in nodes]
    if any(node.held for node in nodes):
        held = [
            [sum(item.nbytes for item in unit.items if item.name in node.held) for unit in units]
            for node in nodes
        ]
        stops = keeping_stops(_costs(units, sizes), budgets, held)
        if stops is not None:
            return stops
    if needs is not None:
        found = [needs(unit) for unit in units]
        shared = [size - need.rows_nbytes for size, need in zip(sizes, found, strict=True)]
        stops = stops_of(_costs(units, shared), budgets, Leasts(found))
        if stops is not None:
            return stops
    stops = stops_of(_costs(units, sizes), budgets)
    assert stops is not None  # every run fits
    return stops


def partition(
    items: Sequence[Item],
    nodes: Sequence[Node],
    *,
    tied: Mapping[str, str] | None = None,
    cache: Sequence[int] = (),
    needs: Callable[[Unit], Need] | None = None,
) -> tuple[Part, ...]:
    """Split tensors over nodes, or over devices, in contiguous runs of whole `units_of`.

    The largest share that a node takes of its own budget is the least possible; exactly, in
    integers. Nodes keep their order: the first holds the embedding, the last norm and head; a node
    in between is empty only if there are fewer units than nodes. Of equally good splits, the result
    shares the rest by budget, front to back. The same input gives the same parts, on any machine. A
    part may exceed its node's budget: see `Part.fits`. If nodes hold tensors already, the fewest
    bytes are read instead, within the budgets; then the largest share counts.

    A node that holds a ``tied`` name without its tensor holds a copy, which counts there. ``needs``
    gives the least memory of a unit whose weights stream: splits that leave each node its least
    memory come first then, and a node in between that is too small for any unit is empty.
    """
    if not nodes:
        raise ValueError("a split needs at least one node")
    if len({node.name for node in nodes}) < len(nodes):
        raise ValueError(f"two nodes of one name: {', '.join(node.name for node in nodes)}")
    units = units_of(items, tied=tied, cache=cache)
    stops = _stops(units, nodes, needs)
    position = {item.name: place for place, item in enumerate(items)}
    layers = [0, *accumulate(unit.kind == "layer" for unit in units)]
    return tuple(
        _part(node, units[start:stop], range(layers[start], layers[stop]), items, position)
        for node, (start, stop) in zip(nodes, pairwise((0, *stops)), strict=True)
    )


def _part(
    node: Node,
    units: Sequence[Unit],
    layers: range,
    items: Sequence[Item],
    position: Mapping[str, int],
) -> Part:
    """Return the part of a node that holds ``units``; ``position`` has the index of each item."""
    own = sorted(position[item.name] for unit in units for item in unit.items)
    tied = tuple(pair for unit in units for pair in unit.tied)
    copies = sorted({position[source] for _, source in tied}.difference(own))
    kinds = {unit.kind for unit in units}
    return Part(
        node=node.name,
        budget_nbytes=node.budget,
        units=tuple(unit.name for unit in units),
        names=tuple(items[place].name for place in own),
        copies=tuple(items[place].name for place in copies),
        tied=tied,
        layers=layers,
        has_embedding="embedding" in kinds,
        has_head="head" in kinds,
        nbytes=sum(items[place].nbytes for place in (*own, *copies)),
        cache_nbytes=sum(unit.cache_nbytes for unit in units),
    )


def smallest_count(
    items: Sequence[Item],
    budget_nbytes: int,
    *,
    tied: Mapping[str, str] | None = None,
    cache: Sequence[int] = (),
) -> int | None:
    """Return the least number of nodes that hold all tensors; None if a unit exceeds the budget."""
    units = units_of(items, tied=tied, cache=cache)
    costs = _costs(units, [unit.nbytes + unit.cache_nbytes for unit in units])
    start = count = 0
    while start < len(units):
        # as long as possible: a longer run in front never makes the rest harder
        stop = costs.stop(start, budget_nbytes)
        if stop <= start:
            return None
        start, count = stop, count + 1
    return max(count, 1)
