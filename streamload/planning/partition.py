"""Tensors to nodes, or to devices: contiguous whole layers, the fullest share as small as can be.

Pure: names and sizes in, parts out. The sizes are those that will be resident, after the cast.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise, takewhile
from typing import Literal

from streamload.planning.budget import Size

Kind = Literal["embedding", "layer", "head", "inner", "tensor"]

_DIGITS = frozenset("0123456789")
_NUMBERS = re.compile("([0-9]+)")


@dataclass(frozen=True, slots=True, init=False)
class Node:
    """A node or device that takes a part.

    Attributes:
        name: its name.
        budget: the bytes that it may hold, at least 1.
    """

    name: str
    budget: int

    def __init__(self, name: str, budget: float | str) -> None:
        """Read a node.

        Args:
            name: its name.
            budget: bytes, or a size such as "3GB".

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


def ordered(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Nodes by name, with the numbers in names by value: board-2 before board-10.

    So that a plan does not depend on the order in which nodes were heard of. Names that differ only
    in leading zeros stand in the order of their characters.
    """
    return tuple(sorted(nodes, key=lambda node: natural_key(node.name)))


def natural_key(name: str) -> tuple[tuple[tuple[int, int, str], ...], str]:
    """A key that sorts names as people do: runs of digits as numbers, the rest as characters.

    As long as digits are ASCII: others are characters like any. Numbers come before characters, so
    that keys always compare; they compare by length before digits, since reading a number of
    thousands of digits is refused by Python.
    """
    parts = (part for part in _NUMBERS.split(name) if part)
    return tuple(
        (0, len(digits := part.lstrip("0")), digits) if part[0] in _DIGITS else (1, 0, part)
        for part in parts
    ), name


@dataclass(frozen=True, slots=True)
class Item:
    """A stored tensor as it will be resident.

    Attributes:
        name: its name.
        nbytes: its size after the cast.
    """

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
        cache_nbytes: bytes that are needed beside the tensors to run it.
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
    """What one node holds.

    Attributes:
        node: its name.
        budget_nbytes: its budget.
        units: names of the units.
        names: the stored tensors that live here, in the order given; each lives on one node.
        copies: stored tensors that live on another node and are held here too, since a name that
            is tied to them belongs here; in the order given.
        tied: (missing name, stored tensor that it shares) of the tied names that belong here.
        layers: which of the model's layers, counted from 0 over all stacks; may be empty.
        has_embedding: whether it holds the unit "embedding".
        has_head: whether it holds the unit "head".
        nbytes: the bytes of ``names`` and ``copies``.
        cache_nbytes: the bytes that its layers need beside that to run.
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
        """Whether it stays within its budget, with what it needs to run."""
        return self.nbytes + self.cache_nbytes <= self.budget_nbytes

    @property
    def share(self) -> float:
        """The part of its budget that it takes, with what it needs to run; 1.0 is all of it."""
        return (self.nbytes + self.cache_nbytes) / self.budget_nbytes


# --- grouping -------------------------------------------------------------------------------------

#: Last components of the prefixes of layers; such a stack may have a single layer.
_CONTAINERS = frozenset({"layers", "layer", "h", "blocks", "block"})
#: Words in the names of what comes before the layers, unless a word of _OUTPUT stands there too.
# fmt: off
_INPUT = frozenset({
    "embed", "embeds", "embedding", "embeddings", "embedder", "emb", "wte", "wpe", "shared",
    "position", "positions", "positional", "pos", "token", "tokens", "tok", "patch", "stem", "pre",
    "in", "conv1", "conv2", "bn1",
})
# fmt: on
_OUTPUT = frozenset({"out", "output", "head", "heads"})
#: Words in the prefixes of stacks to when they run, the least counts; 2 where there is none.
_STACK_ORDER = {
    **dict.fromkeys(("vision", "visual", "image", "audio", "speech"), 0),
    "encoder": 1,
    **dict.fromkeys(("decoder", "mtp"), 3),
    **dict.fromkeys(("classifier", "head", "score"), 4),
}
_WORDS = re.compile(r"[._]+")
_MOST_DIGITS = 9  # of a layer's number; what is longer is a name

_Key = tuple[int, int, int, int]  # place of a unit: stage, stack, end or layers, layer index
_FIRST: _Key = (0, 0, 0, 0)
_LAST: _Key = (2, 0, 0, 0)
_START, _LAYERS, _END = range(3)


@dataclass(slots=True)
class _Prefix:
    """What stands under a dotted prefix before an integer component."""

    indices: set[int]
    holds_modules: bool = False  # "layers.0.norm.weight"; "mlp.0.weight" holds only parameters


def _integers(name: str) -> Iterator[tuple[str, int, bool]]:
    """(prefix, index, whether a module follows) for each integer component, from the left."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit() and part.isascii() and len(part) <= _MOST_DIGITS:
            yield ".".join(parts[:place]), int(part), len(parts) - place > 2


def _layer_stacks(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Each name that belongs to a layer to (prefix of its stack, layer index).

    The layer index is the first integer component whose prefix is a stack: it repeats, with
    modules below it, or its last word says so. Where there is no such prefix at all, one index or
    bare parameters are enough.
    """
    found = {name: list(_integers(name)) for name in names}
    prefixes: dict[str, _Prefix] = {}
    for integers in found.values():
        for prefix, index, module in integers:
            at = prefixes.setdefault(prefix, _Prefix(set()))
            at.indices.add(index)
            at.holds_modules |= module
    rules: tuple[Callable[[str, _Prefix], bool], ...] = (
        lambda prefix, at: (
            at.holds_modules and (len(at.indices) > 1 or prefix.rpartition(".")[2] in _CONTAINERS)
        ),
        lambda prefix, at: at.holds_modules,
        lambda prefix, at: True,
    )
    for rule in rules:
        stacks = {prefix for prefix, at in prefixes.items() if rule(prefix, at)}
        if stacks:
            layers = (
                (name, next((i[:2] for i in integers if i[0] in stacks), None))
                for name, integers in found.items()
            )
            return {name: layer for name, layer in layers if layer is not None}
    return {}


def _is_input(name: str) -> bool:
    words = frozenset(_WORDS.split(name.lower()))
    return bool(words & _INPUT) and not words & _OUTPUT


def _end_of_stacks(name: str, stacks: Sequence[str]) -> _Key:
    """The place of a tensor outside the layers: an end of the stacks that its name is nearest to.

    Nearest is the longest run of leading components in common; nothing in common is an end of the
    model.
    """
    parts = name.split(".")
    lengths = [
        sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(parts, stack.split("."), strict=False)
            )
        )
        for stack in stacks
    ]
    most = max(lengths)
    near = [place for place, length in enumerate(lengths) if length == most]
    if _is_input(name):
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
    others before decoder, and as they first appear where that does not tell. Other tensors go
    before the layers (embeddings) or after them (the rest): those whose name leads to one stack to
    the ends of that stack, which is a unit of its own in the middle of the model. Without layers
    each tensor is a unit, in the order given.

    Args:
        items: the stored tensors.
        tied: name that is not stored to the stored tensor that it shares.
        cache: bytes that each layer of the language model needs beside its tensors to run, by its
            number. Of several stacks that is the one that has most of these layers, and not one of
            vision or audio where there is another.

    Raises:
        ValueError: a name occurs twice, a size is negative, a tied name is stored, or what it
            shares is not.
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
    """The bytes beside each layer of the language model: see `units_of`."""
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


class _Costs:
    """The bytes that a run of units ``[start, stop)`` takes on one node, with what it runs with.

    A stored tensor counts once, whether it lives in the run or a name tied to it does. So a run
    inside another never takes more, and both ends can be found by bisection.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.prefix = [0, *accumulate(unit.nbytes + unit.cache_nbytes for unit in units)]
        home = {item.name: (u, item.nbytes) for u, unit in enumerate(units) for item in unit.items}
        away = {
            (u, source)
            for u, unit in enumerate(units)
            for _, source in unit.tied
            if home[source][0] != u
        }
        #: Where a tied name stands without its tensor, ascending, and (tensor, its unit, bytes).
        self._users = [u for u, _ in sorted(away)]
        self._copies = [(source, *home[source]) for _, source in sorted(away)]
        #: No run takes more.
        self.most_nbytes = self.prefix[-1] + sum(nbytes for _, _, nbytes in set(self._copies))
        single = sorted((self(u, u + 1), u) for u in range(len(units)))
        self._single_nbytes = [nbytes for nbytes, _ in single]
        self._single_units = [u for _, u in single]

    def __call__(self, start: int, stop: int) -> int:
        nbytes = self.prefix[stop] - self.prefix[start]
        first, last = bisect_left(self._users, start), bisect_left(self._users, stop)
        if first < last:
            for _, home, copy_nbytes in set(self._copies[first:last]):
                if not start <= home < stop:
                    nbytes += copy_nbytes
        return nbytes

    def stop(self, start: int, cap_nbytes: int) -> int:
        """The largest stop with which the run takes at most ``cap_nbytes``."""
        best = bisect_right(self.prefix, self.prefix[start] + cap_nbytes) - 1
        if not self._users or self(start, best) <= cap_nbytes:
            return best
        stops = range(start, best + 1)
        return start + bisect_right(stops, cap_nbytes, key=lambda stop: self(start, stop)) - 1

    def start(self, stop: int, cap_nbytes: int) -> int:
        """The smallest start with which the run takes at most ``cap_nbytes``."""
        best = bisect_left(self.prefix, self.prefix[stop] - cap_nbytes)
        if not self._users or self(best, stop) <= cap_nbytes:
            return best
        starts = range(best, stop + 1)
        return best + bisect_left(starts, -cap_nbytes, key=lambda start: -self(start, stop))

    def too_large(self, cap_nbytes: int) -> list[int]:
        """The units that take more than ``cap_nbytes`` alone, ascending."""
        return sorted(self._single_units[bisect_right(self._single_nbytes, cap_nbytes) :])


_Ranges = list[tuple[int, int]]  # disjoint, ascending, last included


def _starts(costs: _Costs, stops: _Ranges, cap_nbytes: int, too_large: Sequence[int]) -> _Ranges:
    """Where the runs of at least one unit and at most ``cap_nbytes`` that end in ``stops`` start.

    In between units that are too large alone, the starts for consecutive stops overlap or touch:
    every unit can be a run of its own.
    """
    starts: _Ranges = []
    for low, high in stops:
        low = max(low, 1)
        inside = too_large[bisect_left(too_large, low - 1) : bisect_left(too_large, high)]
        for before, after in pairwise((low - 2, *inside, high)):
            if before + 1 < after:  # units (before, after) may be the last of a run
                starts.append((costs.start(before + 2, cap_nbytes), after - 1))
    return starts


def _union(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    union: _Ranges = []
    for low, high in sorted(ranges):
        if union and low <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(high, union[-1][1]))
        else:
            union.append((low, high))
    return union


def _cut(
    costs: _Costs, caps_nbytes: Sequence[int], weights: Sequence[int], may_be_empty: Sequence[bool]
) -> list[int] | None:
    """Cut all units into one run per node, each within its cap.

    Among the cuts that keep the caps, each in turn is the one nearest to where the node would hold
    its share by weight of what is left, the later one of two as near.

    Returns:
        The stop of each node's run, or None where there is no such cut.
    """
    count = len(costs.prefix) - 1
    reachable: list[_Ranges] = [[(count, count)]]  # from where the nodes behind can take the rest
    too_large: dict[int, list[int]] = {}
    for cap, empty in zip(reversed(caps_nbytes), reversed(may_be_empty), strict=True):
        if cap not in too_large:
            too_large[cap] = costs.too_large(cap)
        starts = _starts(costs, reachable[-1], cap, too_large[cap])
        reachable.append(_union([*starts, *(reachable[-1] if empty else ())]))
        if not reachable[-1]:
            return None
    reachable.reverse()
    if reachable[0][0][0] != 0:
        return None

    stops: list[int] = []
    start = 0
    weight_left = sum(weights)
    for k, (cap, weight) in enumerate(zip(caps_nbytes, weights, strict=True)):
        low, high = start + (not may_be_empty[k]), costs.stop(start, cap)
        prefix = costs.prefix
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


def _fullest(costs: _Costs, stops: Sequence[int], budgets: Sequence[int]) -> Fraction:
    runs = pairwise((0, *stops))
    return max(Fraction(costs(*run), budget) for run, budget in zip(runs, budgets, strict=True))


def _stops(costs: _Costs, budgets: Sequence[int]) -> list[int]:
    """Where each node's run stops so that the fullest share is the least there is; exact.

    Bisection over the share. What was found feasible is replaced by the share it really reaches,
    and the search ends when nothing strictly below that is feasible.
    """
    count, nodes = len(costs.prefix) - 1, len(budgets)
    if not count:
        return [0] * nodes
    # the ends are held by the ends; a node in between is empty only where there are too few units
    may_be_empty = [count < nodes and k > 0 and (k < nodes - 1 or count == 1) for k in range(nodes)]

    def cut(share: Fraction, *, strictly_below: bool = False) -> list[int] | None:
        p, q = share.numerator, share.denominator
        caps = [(p * budget - strictly_below) // q for budget in budgets]
        return None if min(caps) < 0 else _cut(costs, caps, budgets, may_be_empty)

    low = Fraction(0)
    best = cut(Fraction(costs.most_nbytes, min(budgets)))
    assert best is not None  # every run fits
    while True:
        high = _fullest(costs, best, budgets)
        below = cut(high, strictly_below=True)
        if below is None:
            # cut again: what was found depends on the way of the search
            final = cut(high)
            assert final is not None
            return final
        best = below
        middle = (low + _fullest(costs, best, budgets)) / 2
        found = cut(middle)
        if found is None:
            low = middle
        else:
            best = found


def partition(
    items: Sequence[Item],
    nodes: Sequence[Node],
    *,
    tied: Mapping[str, str] | None = None,
    cache: Sequence[int] = (),
) -> tuple[Part, ...]:
    """Split tensors over nodes, or over devices, in contiguous runs of whole `units_of`.

    The largest share that a node takes of its own budget is the least possible; exactly, in
    integers. Nodes keep their order: the first holds the embedding, the last norm and head, and one
    in between is empty only where there are fewer units than nodes. Where that leaves a choice,
    what is left is shared by budget, front to back. The same input gives the same parts, on any
    machine. A part may exceed its node's budget: see `Part.fits`.

    Args:
        items: the stored tensors, at the size at which they will be resident.
        nodes: at least one.
        tied: name that is not stored to the stored tensor that it shares ("lm_head.weight" to
            "model.embed_tokens.weight"). A node that holds such a name without its tensor holds a
            copy, and it is counted there.
        cache: bytes that each layer needs beside its tensors to run; see `units_of`. They count in
            the share of the node that holds the layer.

    Returns:
        One part per node, in their order.

    Raises:
        ValueError: no nodes, two of one name, or see `units_of`.
    """
    if not nodes:
        raise ValueError("a split needs at least one node")
    if len({node.name for node in nodes}) < len(nodes):
        raise ValueError(f"two nodes of one name: {', '.join(node.name for node in nodes)}")
    units = units_of(items, tied=tied, cache=cache)
    stops = _stops(_Costs(units), [node.budget for node in nodes])
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
    """How many nodes of one budget are enough, at the least.

    Args:
        items: see `partition`.
        budget_nbytes: the budget of each node.
        tied: see `partition`.
        cache: see `partition`.

    Returns:
        The number of nodes, at least 1; None where a unit alone is larger than the budget.

    Raises:
        ValueError: see `units_of`.
    """
    units = units_of(items, tied=tied, cache=cache)
    costs = _Costs(units)
    start = count = 0
    while start < len(units):
        # as far as it goes: a longer run in front never makes the rest harder
        stop = costs.stop(start, budget_nbytes)
        if stop <= start:
            return None
        start, count = stop, count + 1
    return max(count, 1)
