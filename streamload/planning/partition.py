"""Split tensors by layers over nodes or devices, such that the fullest is as empty as possible.

Input are names and sizes, output are parts. Sizes are those after the cast.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Literal, NamedTuple

from streamload.core.memory import Size
from streamload.planning.cuts import Costs, Leasts, Need, keeping_stops, stops_of

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
