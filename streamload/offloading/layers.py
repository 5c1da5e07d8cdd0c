"""Group the parameters of a model into layers; choose which stay on a device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple

from streamload.core.patterns import matches
from streamload.core.tensors import Block, RowRange
from streamload.planning.kv_cache import experts_chosen
from streamload.planning.match import cut
from streamload.planning.moves import TensorRequest, TensorRequests
from streamload.planning.partition import Item, units_of

#: How a layer comes that does not stay: a "layer" through a slot, "rows" of an embedding from the
#: file as they are asked for, "experts" through a cache as the router chooses them. "fixed" stays.
LayerKind = Literal["layer", "rows", "experts", "fixed"]

# Tensors in a slot begin at multiples of this: what torch's allocator for CUDA rounds to. A matrix
# product may depend on the address of its weights.
SLOT_ALIGNMENT_NBYTES = 512
# One slot is computed with while another is filled.
_SLOTS = 2
_MOST_SLOTS = 8
# The cost of a byte whose transfer no computation hides; one of other bytes.
_EXPOSED = 1.5
_MOST_TRIALS = 4096
# Layers are spread evenly if that makes the cost of a pass at most so many times the least.
_NEARLY_LEAST = 1.01
# A layer streams if it has more than 1/64 of the bytes of the largest: else waits cost more.
_WORTH_STREAMING = 64


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Sizes of a layer in bytes."""

    name: str
    kind: LayerKind
    nbytes: int  # in a slot
    resident_nbytes: int  # if it stays, as the allocator rounds
    read_nbytes: int  # in the files
    experts: int = 0
    chosen: int = 0  # number of experts that a token chooses
    expert_nbytes: int = 0  # of one expert in a slot


@dataclass(frozen=True, slots=True)
class Residency:
    """Which layers stay on a device and which stream, with the sizes of the slots.

    Attributes:
        stays: names of the layers that stay, in the order in which they run.
        streams: names of the layers that stream through slots.
        gathers: names of the embeddings of which a pass reads single rows from the file.
        slots: number of slots for layers; 0 if none stream.
        slot_nbytes: bytes of a slot. A larger layer takes several adjacent ones.
        resident_nbytes: device bytes of the layers that stay.
        pass_nbytes: file bytes that a pass reads, without single rows and experts.
        experts: names of the layers whose experts stream through the slots of a cache.
        cache_slots: number of experts that the cache holds.
        cache_slot_nbytes: bytes of the slot of an expert.
        experts_total: number of experts of all these layers.
        experts_nbytes: file bytes of all these experts.
        pad_nbytes: bytes that an allocator with segments takes beyond all slots.
    """

    stays: tuple[str, ...]
    streams: tuple[str, ...]
    gathers: tuple[str, ...]
    slots: int
    slot_nbytes: int
    resident_nbytes: int
    pass_nbytes: int
    experts: tuple[str, ...] = ()
    cache_slots: int = 0
    cache_slot_nbytes: int = 0
    experts_total: int = 0
    experts_nbytes: int = 0
    pad_nbytes: int = 0

    @property
    def absent(self) -> set[str]:
        """Names of the layers that are not on the device between passes."""
        return {*self.streams, *self.gathers, *self.experts}

    @property
    def file_nbytes(self) -> int:
        """File bytes of all that streams, without single rows of embeddings."""
        return self.pass_nbytes + self.experts_nbytes

    @property
    def cache_nbytes(self) -> int:
        """Device bytes of the slots of experts."""
        return self.cache_slots * self.cache_slot_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Device bytes of all slots, of layers and of experts."""
        return self.slots * self.slot_nbytes + self.cache_nbytes + self.pad_nbytes

    @property
    def slot_starts(self) -> list[int]:
        """Offset in bytes of each slot in the memory of all: slots of layers, then of experts."""
        first = self.slots * self.slot_nbytes
        layers = [at * self.slot_nbytes for at in range(self.slots)]
        return layers + [first + at * self.cache_slot_nbytes for at in range(self.cache_slots)]

    @property
    def taken_nbytes(self) -> int:
        """Device bytes of the layers that stay, and of all slots."""
        return self.resident_nbytes + self.arena_nbytes


def choose(layers: Sequence[LayerSize], room_nbytes: int) -> Residency | None:
    """Return which layers stay in ``room_nbytes``, for the shortest passes; None if too small."""
    experts = [layer for layer in layers if layer.kind == "experts"]
    if experts and _resident_nbytes(layers) > room_nbytes:
        slot_nbytes = max(layer.expert_nbytes for layer in experts)
        fewest_nbytes = max(layer.chosen for layer in experts) * slot_nbytes
        rest = [layer for layer in layers if layer.kind != "experts"]
        found = choose(rest, room_nbytes - fewest_nbytes)  # first, as every pass needs the rest
        if found is None:
            return None
        total = sum(layer.experts for layer in experts)
        return replace(
            found,
            experts=tuple(layer.name for layer in experts),
            cache_slots=min((room_nbytes - found.taken_nbytes) // slot_nbytes, total),
            cache_slot_nbytes=slot_nbytes,
            experts_total=total,
            experts_nbytes=sum(layer.read_nbytes for layer in experts),
        )
    needed = [layer for layer in layers if layer.kind != "rows"]
    left = room_nbytes - _resident_nbytes(needed)
    if left >= 0:  # no slots: at most rows of embeddings are read from the file
        return _decided(layers, [*needed, *_rows_within(layers, left)])
    trials = (
        _filled(layers, room_nbytes, slots, slot_nbytes, most * slot_nbytes)
        for slots, slot_nbytes in _arenas(layers)
        for most in {slots, max(slots - 1, 1)}  # layers of all slots are exposed, or stay
    )
    return min(filter(None, trials), key=partial(_cost, layers), default=None)


def held(layers: Sequence[LayerSize], names: Collection[str], room_nbytes: int) -> tuple[str, ...]:
    """Return the layers of ``names`` to keep in ``room_nbytes`` of host memory, spread evenly."""
    among = {*names}
    streams = [
        replace(layer, resident_nbytes=layer.read_nbytes)
        for layer in layers
        if layer.name in among and layer.read_nbytes
    ]
    found = _kept(streams, room_nbytes, lambda layer: layer.read_nbytes)
    kept = {layer.name for layer in found}
    return tuple(layer.name for layer in layers if layer.name in kept)


def least(layers: Sequence[LayerSize]) -> int:
    """Return the least ``room_nbytes`` for which `choose` does not return None."""
    experts = [layer for layer in layers if layer.kind == "experts"]
    if experts:
        cache_nbytes = max(each.chosen for each in experts) * max(e.expert_nbytes for e in experts)
        rest = least([layer for layer in layers if layer.kind != "experts"]) + cache_nbytes
        return min(rest, _resident_nbytes(layers))
    sizes = [_resident_nbytes([layer for layer in layers if layer.kind != "rows"])]
    for slots, slot_nbytes in _arenas(layers):
        must, _ = _sorted_out(layers, slots * slot_nbytes)
        sizes.append(_resident_nbytes(must) + slots * slot_nbytes)
    return min(sizes)


def worth_streaming(layers: Sequence[LayerSize]) -> set[str]:
    """Return names of the layers that are large enough to stream; the others always stay."""
    largest = max((layer.nbytes for layer in layers if layer.kind == "layer"), default=0)
    return {
        layer.name
        for layer in layers
        if layer.kind == "rows"
        or (layer.kind == "layer" and layer.nbytes > largest // _WORTH_STREAMING)
    }


def _arenas(layers: Sequence[LayerSize]) -> Iterator[tuple[int, int]]:
    """Yield pairs to try: a number of slots, and the bytes of each slot."""
    sizes = sorted({layer.nbytes for layer in layers if layer.kind == "layer" and layer.nbytes})
    for slot_nbytes in sizes:
        for slots in range(1, _MOST_SLOTS + 1):
            yield slots, slot_nbytes
            if slots > _SLOTS and slots * slot_nbytes >= sizes[-1]:
                break


def _sorted_out(
    layers: Sequence[LayerSize], most_nbytes: int
) -> tuple[list[LayerSize], list[LayerSize]]:
    """Return the layers that must stay, and those of up to ``most_nbytes`` that may stream."""
    worth = worth_streaming(layers)
    needed = [layer for layer in layers if layer.kind != "rows"]
    may = [layer for layer in needed if layer.name in worth and layer.nbytes <= most_nbytes]
    names = {layer.name for layer in may}
    return [layer for layer in needed if layer.name not in names], may


def _filled(
    layers: Sequence[LayerSize], room_nbytes: int, slots: int, slot_nbytes: int, most_nbytes: int
) -> Residency | None:
    """Return the residency with these slots; None if they do not fit, or no layer would stream.

    ``most_nbytes``: layers with more bytes stay.
    """
    must, may = _sorted_out(layers, most_nbytes)
    room = room_nbytes - slots * slot_nbytes - _resident_nbytes(must)
    if room < 0:
        return None
    chosen = _kept(may, room, lambda layer: _price(layer, slots, slot_nbytes))
    if len(chosen) == len(may):
        return None  # without slots, all of them do not fit, as the caller has seen
    rows = _rows_within(layers, room - _resident_nbytes(chosen))
    return _decided(layers, [*must, *chosen, *rows], slots, slot_nbytes)


def _resident_nbytes(layers: Sequence[LayerSize]) -> int:
    return sum(layer.resident_nbytes for layer in layers)


def _rows_within(layers: Sequence[LayerSize], room_nbytes: int) -> list[LayerSize]:
    rows = [layer for layer in layers if layer.kind == "rows"]
    return _greedy(sorted(rows, key=lambda each: -each.resident_nbytes), room_nbytes)


def _decided(
    layers: Sequence[LayerSize], stay: Sequence[LayerSize], slots: int = 0, slot_nbytes: int = 0
) -> Residency:
    names = {layer.name for layer in stay}
    absent = [layer for layer in layers if layer.name not in names]
    streams = [layer for layer in absent if layer.kind != "rows"]
    return Residency(
        stays=tuple(layer.name for layer in layers if layer.name in names),
        streams=tuple(layer.name for layer in streams),
        gathers=tuple(layer.name for layer in absent if layer.kind == "rows"),
        slots=slots,
        slot_nbytes=slot_nbytes,
        resident_nbytes=_resident_nbytes(stay),
        pass_nbytes=sum(layer.read_nbytes for layer in streams),
    )


def _cost(layers: Sequence[LayerSize], found: Residency) -> tuple[float, int]:
    """Return a sort key: the cost of a pass, in file bytes weighted by `_price`; device bytes."""
    streams = [layer for layer in layers if layer.name in {*found.streams}]
    cost = sum(_price(layer, found.slots, found.slot_nbytes) for layer in streams)
    return cost, found.taken_nbytes


def _price(layer: LayerSize, slots: int, slot_nbytes: int) -> float:
    """Return a layer's file bytes as its cost in a pass; more if all slots wait for it."""
    alone = -(-layer.nbytes // slot_nbytes) >= slots
    return layer.read_nbytes * (_EXPOSED if alone else 1.0)


def _kept(
    layers: Sequence[LayerSize], room_nbytes: int, price: Callable[[LayerSize], float]
) -> list[LayerSize]:
    """Return the layers that stay within the room: for the least cost, or nearly, spread evenly.

    Where layers differ in size, about the same share of each size stays: else transfers would be
    longer than computing in one part of a pass, and shorter in another.
    """
    if not layers:
        return []
    alike: dict[tuple[int, float], list[LayerSize]] = {}
    for layer in layers:
        alike.setdefault((layer.resident_nbytes, price(layer)), []).append(layer)
    groups = sorted(alike.values(), key=len)
    *few, many = groups
    trials = math.prod(len(group) + 1 for group in few)
    counts: Sequence[Sequence[int]] = [
        [*range(len(group) + 1)] if trials <= _MOST_TRIALS else [0, len(group)] for group in few
    ]
    if math.prod(map(len, counts)) > _MOST_TRIALS:
        return _greedy(layers, room_nbytes)
    totals = [sum(map(price, group)) for group in groups]
    total = sum(totals)
    found: list[tuple[float, list[float], list[int]]] = []
    for some in product(*counts):
        taken = sum(n * group[0].resident_nbytes for n, group in zip(some, few, strict=True))
        left = room_nbytes - taken
        if left < 0:
            continue
        n = min(left // max(many[0].resident_nbytes, 1), len(many))
        saved = [k * price(g[0]) for k, g in zip((*some, n), groups, strict=True)]
        found.append((total - sum(saved), saved, [*some, n]))
    most = min((cost for cost, _, _ in found), default=0.0) * _NEARLY_LEAST
    several = [at for at, group in enumerate(groups) if len(group) > 1]
    spread_total = sum(totals[at] for at in several) or 1
    best, best_order = [0] * len(groups), (math.inf, math.inf)
    for cost, saved, trial in found:
        share = sum(saved[at] for at in several) / spread_total
        uneven = sum(abs(saved[at] - share * totals[at]) for at in several)
        if cost <= most and (uneven, cost) < best_order:
            best, best_order = trial, (uneven, cost)
    return [
        group[(2 * i + 1) * len(group) // (2 * n)]  # at even distances
        for n, group in zip(best, groups, strict=True)
        for i in range(n)
    ]


def _greedy(layers: Sequence[LayerSize], room_nbytes: int) -> list[LayerSize]:
    kept = []
    for layer in sorted(layers, key=lambda each: -each.read_nbytes):
        if layer.resident_nbytes <= room_nbytes:
            kept.append(layer)
            room_nbytes -= layer.resident_nbytes
    return kept


# A tensor of experts: the module, the expert's number if it holds one expert, the parameter.
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.)?([^.].*)")

#: How texts show the name of the root module, which is empty.
ROOT = "(root)"

# The group of all tensors that `without_small` returns.
_SMALL = "small tensors of layers"
# A tensor is small if it has at most this share of its layer: norms, biases, scales of scales.
# Each costs the host as much as a large one, and all of them little memory.
_SMALL_SHARE = 1 / 4096
# The most that all small ones of a layer have of it; beyond that the larger ones stream.
_ALL_SMALL_SHARE = 0.01

# A module is proposed as a layer if it has this share of the bytes of the largest in layers.
_WORTH_NAMING = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The parameters of a module, which stay on the device or stream as a whole."""

    name: str
    wants: tuple[int, ...]  # indices of the parameters in `TensorRequests`
    kind: LayerKind
    rows: str = ""  # name of the embedding with the same weight
    experts: int = 0  # along the first axis of each parameter
    chosen: int = 0  # number of experts that a token chooses
    apart: bool = False  # each parameter holds one expert; those of the first expert come first

    @property
    def parts(self) -> int:
        """Number of tensors of each expert."""
        return len(self.wants) // self.experts if self.apart else len(self.wants)


class Module(NamedTuple):
    """A module's name, and the indices of its tensors among all."""

    name: str
    numbers: list[int]
    in_layer: bool  # whether it is a layer of a stack


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str] = ()
) -> list[Module]:
    """Return the modules that hold tensors of these names, in the order in which they run.

    ``nbytes``: bytes of each tensor. ``layers``: patterns of names of layers; with these, the order
    is that of ``names``. Raises ValueError for a pattern that no module matches.
    """
    number_of = {name: number for number, name in enumerate(names)}
    stated, items = _stated(names, nbytes, layers)
    found = {(layer, True): numbers for layer, numbers in stated.items()}
    for unit in units_of(items):
        in_layer = unit.kind == "layer"
        inside = _layers_in(unit.name, [item.name for item in unit.items]) if in_layer else {}
        for item in unit.items:
            module = inside[item.name] if in_layer else item.name.rpartition(".")[0]
            found.setdefault((module, in_layer), []).append(number_of[item.name])
    groups = [Module(name, numbers, in_layer) for (name, in_layer), numbers in found.items()]
    return sorted(groups, key=lambda group: min(group.numbers)) if layers else groups


def _layers_in(layer: str, names: Sequence[str]) -> dict[str, str]:
    """Return the layer of each tensor: ``layer``, or its items if ``layer`` is a list of modules.

    In a list, each tensor is in a numbered module, and some of these modules contain modules.
    """
    rest = {name: name[len(layer) + 1 :].split(".") for name in names}
    numbered = all(parts[0].isdigit() and len(parts) > 1 for parts in rest.values())
    if not numbered or not any(len(parts) > 2 for parts in rest.values()):
        return dict.fromkeys(names, layer)
    inside: dict[str, list[str]] = {}
    for name, parts in rest.items():
        inside.setdefault(f"{layer}.{parts[0]}", []).append(name)
    found: dict[str, str] = {}
    for module, mine in inside.items():
        found |= _layers_in(module, mine)
    return found


def outer_modules(groups: Sequence[Module]) -> set[str]:
    """Return names of all modules that contain a module of ``groups``, and so use its weights."""
    paths = [group.name.split(".") for group in groups if group.name]
    return {".".join(path[:stop]) for path in paths for stop in range(len(path))}


def finer_layers(
    groups: Sequence[LayerGroup], wants: TensorRequests, nbytes: Sequence[int]
) -> Iterator[str]:
    """Yield name patterns of modules inside of layers, to suggest as smaller ``layers=``."""
    found: dict[str, int] = {}  # by pattern, bytes of the largest module
    for group in groups:
        if group.kind != "layer" or not any(part.isdigit() for part in group.name.split(".")):
            continue
        inside: Counter[str] = Counter()
        for at in group.wants:
            child, dot, _ = wants.names[at].removeprefix(f"{group.name}.").partition(".")
            if dot and wants.names[at].startswith(f"{group.name}."):
                inside[f"{group.name}.{child}"] += nbytes[at]
        for module, size in inside.items():
            pattern = ".".join("*" if part.isdigit() else part for part in module.split("."))
            found[pattern] = max(found.get(pattern, 0), size)
    least = max(found.values(), default=0) * _WORTH_NAMING
    yield from (pattern for pattern, size in found.items() if size >= least)


def _stated(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str]
) -> tuple[dict[str, list[int]], list[Item]]:
    """Return tensor indices by outermost module that matches ``layers``, and the other tensors."""
    found: dict[str, list[int]] = {}
    rest, left = [], {*layers}
    for at, name in enumerate(names):
        parents = accumulate(name.split(".")[:-1], "{}.{}".format)
        module = next((each for each in parents if matches(each, layers)), None)
        if module is None:
            rest.append(Item(name, nbytes[at]))
        else:
            found.setdefault(module, []).append(at)
            left -= {pattern for pattern in left if matches(module, [pattern])}
    if left:
        raise ValueError(f"layers: no module's name matches {min(left)!r}")
    return found, rest


def grouped(
    found: Sequence[Module],
    stays: Callable[[int], bool],
    group_of: Callable[[str, tuple[int, ...], bool], LayerGroup],
    *,
    marked: bool = False,
) -> Iterator[LayerGroup]:
    """Yield for each module a group of its tensors that stay, and a group of the rest.

    ``stays``: whether the tensor with an index stays. ``group_of`` makes the group of the rest,
    from the module's name, the tensors' indices, and `Module.in_layer`. The group that stays is
    named like the module; "NAME (stays)" if both groups exist, or ``marked`` is set.
    """
    for name, numbers, in_layer in found:
        fixed = dict.fromkeys(filter(stays, numbers))
        rest = tuple(at for at in numbers if at not in fixed)
        if fixed:
            label = f"{name} (stays)" if rest or marked else name
            yield LayerGroup(label, tuple(fixed), "fixed")
        if rest:
            yield group_of(name, rest, in_layer)


def without(found: Sequence[Module], taken: Collection[int]) -> list[Module]:
    """Return the modules without the tensors whose indices are in ``taken``."""
    return [each._replace(numbers=[n for n in each.numbers if n not in taken]) for each in found]


def without_small(
    found: Sequence[Module], nbytes: Sequence[int]
) -> tuple[list[Module], list[LayerGroup]]:
    """Return the modules without tensors small for their layer, and these, to stay."""
    small: list[int] = []
    for numbers in [each.numbers for each in found if each.in_layer]:
        total = sum(nbytes[at] for at in numbers)
        first = sorted(numbers, key=nbytes.__getitem__)
        for at, taken in zip(first, accumulate(nbytes[at] for at in first), strict=True):
            if nbytes[at] > _SMALL_SHARE * total or taken > _ALL_SMALL_SHARE * total:
                break
            small.append(at)
    group = [LayerGroup(_SMALL, tuple(sorted(small)), "fixed")] if small else []
    return without(found, {*small}), group


def groups_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
) -> list[LayerGroup]:
    """Return the layers of a checkpoint without a model, found by the names of its tensors.

    A weight with "emb" in the name of its module, and two axes, is an embedding. A tensor below
    "experts" that is numbered, or has three axes, belongs to experts.

    ``nbytes``: bytes of each tensor; ``tied``: names that are not stored, and the stored tensor of
    each; ``stay``: patterns of tensors that stay; ``layers``: patterns of names of layers.
    """
    experts = _experts_by_name(wants, experts_chosen(config or {}), stay)
    by_name = groups_by_name(wants.names, nbytes, layers)
    outer = outer_modules(by_name)

    def group_of(name: str, numbers: tuple[int, ...], in_layer: bool) -> LayerGroup:
        leaf, weight = name.rpartition(".")[2], wants.names[numbers[0]]
        kind: LayerKind = "fixed" if name in outer else "layer"
        if not in_layer and len(numbers) == 1 and ("emb" in leaf or leaf in ("wte", "shared")):
            if weight in tied.values():  # the head has it too, and streams where it does not stay
                head = next(each for each, shared in tied.items() if shared == weight)
                return LayerGroup(head.rpartition(".")[0], numbers, "layer", name)
            kind = "rows" if len(wants[numbers[0]].shape) == 2 else "fixed"
        return LayerGroup(name, numbers, kind)

    rest = without(by_name, {at for group in experts for at in group.wants})
    rest, small = without_small(rest, nbytes)
    groups = grouped(rest, lambda at: matches(wants.names[at], stay), group_of, marked=True)
    return [*experts, *groups, *small]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a loop over `stream_layers`: the tensors of a layer, or some outside of layers."""

    name: str
    wants: Mapping[str, int]  # by name, the index of each tensor


def steps_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> tuple[list[Step], list[LayerGroup]]:
    """Return the steps of a loop over `stream_layers`, in running order, and their groups.

    Outside of layers, steps are the embedding, the head with the modules before it, and the end of
    an inner stack (an encoder's last norm). A weight that two steps use stays. For arguments see
    `groups_of_checkpoint`.
    """
    number_of = {name: number for number, name in enumerate(wants.names)}
    stated, items = _stated(wants.names, nbytes, layers)
    found = {layer: {wants.names[at]: at for at in numbers} for layer, numbers in stated.items()}
    inside = {name for tensors in found.values() for name in tensors}
    shared = {name: other for name, other in tied.items() if other not in inside}
    for unit in units_of(items, tied=shared):
        mine = found.setdefault(unit.name, {})
        mine.update((item.name, number_of[item.name]) for item in unit.items)
        mine.update((name, number_of[other]) for name, other in unit.tied)
    steps = [Step(*each) for each in found.items()]
    if layers:
        steps.sort(key=lambda step: min(step.wants.values()))
    users = Counter(at for step in steps for at in step.wants.values())
    # by tensor, the first step that uses it, in whose group it is
    first = {at: step.name for step in reversed(steps) for at in step.wants.values()}
    own = [
        Module(s.name, sorted({at for at in s.wants.values() if first[at] == s.name}), True)
        for s in steps
    ]
    groups = grouped(
        own,
        lambda at: users[at] > 1 or matches(wants.names[at], stay),
        lambda name, numbers, _: LayerGroup(name, numbers, "layer"),
    )
    return steps, [*groups]


def _experts_by_name(wants: TensorRequests, chosen: int, stay: Sequence[str]) -> list[LayerGroup]:
    """Return a group for each layer's experts, stored fused or one by one.

    ``chosen``: number of experts that a token chooses; ``stay``: patterns of tensors that stay.
    """
    apart: dict[str, dict[int, list[tuple[str, int]]]] = {}
    fused: dict[str, list[int]] = {}
    for at, name in enumerate(wants.names):
        match, src = _EXPERTS.fullmatch(name), wants.srcs[at]
        whole = src.kind == "float" and src.bits >= 8 and not src.is_packed
        if match is None or not whole or matches(name, stay):
            continue
        if match[2]:
            apart.setdefault(match[1], {}).setdefault(int(match[2]), []).append((match[3], at))
        else:
            fused.setdefault(match[1], []).append(at)
    groups = []
    for name, by_number in apart.items():
        every = [sorted(by_number[number]) for number in sorted(by_number)]
        kinds = {tuple((part, wants[at].shape) for part, at in parts) for parts in every}
        if len(kinds) == 1 and len(every) > 1:
            numbers, count = tuple(at for parts in every for _, at in parts), len(every)
            groups.append(LayerGroup(name, numbers, "experts", "", count, min(chosen, count), True))
    for name, found in fused.items():
        counts = {wants[at].shape[:1] for at in found}
        if len(counts) == 1 and any(len(wants[at].shape) == 3 for at in found):
            ((count,),) = counts
            groups.append(LayerGroup(name, tuple(found), "experts", "", count, min(chosen, count)))
    return groups


def rows_of_experts(want: TensorRequest, experts: int) -> list[tuple[RowRange, ...]] | None:
    """Return rows in the file for each of ``experts`` experts; None if these are no whole rows."""
    plain, numel = want.transpose is None and want.coding is None, math.prod(want.shape)
    if not plain or want.shape[:1] != (experts,) or not numel or want.source[0].columns:
        return None
    rest = want.shape[1:]
    blocks = (Block(want.shape, (at, *(0,) * len(rest)), (1, *rest)) for at in range(experts))
    found = (cut(want.source, numel // want.rows, block) for block in blocks)
    parts = [part for part in found if part is not None]
    return parts if len(parts) == experts else None
