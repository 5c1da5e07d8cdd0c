"""Choose the layers that stay on a device; the others stream through slots at every pass.

Passes repeat one order, in which the layer used last is needed latest. So a fixed set stays, spread
evenly between the layers that stream, whose transfers hide behind compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

#: If it does not stay, a "layer" streams through a slot, "rows" are read from the file as a pass
#: asks for them, and of "experts" a cache holds those that the router chose. "fixed": it stays.
LayerKind = Literal["layer", "rows", "experts", "fixed"]

# Tensors in a slot begin at multiples of this: what torch's allocator for CUDA rounds to. A matrix
# product may depend on the address of its weights.
SLOT_ALIGNMENT_NBYTES = 512
# One slot is computed with while another is filled.
_SLOTS = 2
_MOST_SLOTS = 8
# What a byte costs that nothing hides: the device waits for it, and then it for the device.
_EXPOSED = 1.5
_MOST_TRIALS = 4096
# Smaller than this share of the largest, a layer costs more in waits than it takes.
_WORTH_STREAMING = 64


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of a layer."""

    name: str
    kind: LayerKind
    nbytes: int  # in a slot
    resident_nbytes: int  # if it stays, as the allocator rounds
    read_nbytes: int  # of the files
    experts: int = 0
    chosen: int = 0  # experts of a token
    expert_nbytes: int = 0  # of one expert in a slot


@dataclass(frozen=True, slots=True)
class Residency:
    """What stays, and what streams.

    Attributes:
        stays: names of the layers that stay, in the order in which they run.
        streams: names of those that stream through the slots.
        gathers: names of those of which a pass reads the rows that it asks for.
        slots: how many slots there are; 0 where nothing streams.
        slot_nbytes: bytes of a slot. A larger layer takes several, side by side.
        resident_nbytes: what stays takes.
        pass_nbytes: what a pass reads, without gathered rows and experts.
        experts: names of the layers whose experts are in the cache's slots when they are needed.
        cache_slots: how many experts the cache holds.
        cache_slot_nbytes: bytes of one of them.
        experts_total: how many experts these layers have together.
        experts_nbytes: what the files have of all of them.
        pad_nbytes: what an allocator with segments takes beyond all slots.
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
        """Bytes in the files of all that streams, without gathered rows."""
        return self.pass_nbytes + self.experts_nbytes

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the slots of experts."""
        return self.cache_slots * self.cache_slot_nbytes

    @property
    def arena_nbytes(self) -> int:
        """Bytes of all slots, of layers and of experts."""
        return self.slots * self.slot_nbytes + self.cache_nbytes + self.pad_nbytes

    @property
    def slot_starts(self) -> list[int]:
        """The first byte of each slot in the arena: layers' slots, then experts'."""
        first = self.slots * self.slot_nbytes
        layers = [at * self.slot_nbytes for at in range(self.slots)]
        return layers + [first + at * self.cache_slot_nbytes for at in range(self.cache_slots)]

    @property
    def taken_nbytes(self) -> int:
        """Bytes of what stays, and of the slots."""
        return self.resident_nbytes + self.arena_nbytes


def choose(layers: Sequence[LayerSize], room_nbytes: int) -> Residency | None:
    """Decide what stays so that passes take the least time; None if not even `least` fits."""
    if sum(layer.resident_nbytes for layer in layers) <= room_nbytes:
        return _decided(layers, {layer.name for layer in layers}, [], 0, 0)
    experts = [layer for layer in layers if layer.kind == "experts"]
    if experts:
        return _with_experts(layers, experts, room_nbytes)
    needed = [layer for layer in layers if layer.kind != "rows"]
    left = room_nbytes - sum(layer.resident_nbytes for layer in needed)
    if left >= 0:  # nothing streams: rows of embeddings are read
        stay = {layer.name for layer in (*needed, *_rows_within(layers, left))}
        return _decided(layers, stay, [], 0, 0)
    trials = (
        _filled(layers, room_nbytes, slots, slot_nbytes, most * slot_nbytes)
        for slots, slot_nbytes in _arenas(layers)
        for most in {slots, max(slots - 1, 1)}  # layers of all slots are exposed, or stay
    )
    return min(filter(None, trials), key=partial(_cost, layers), default=None)


def _with_experts(
    layers: Sequence[LayerSize], experts: Sequence[LayerSize], room_nbytes: int
) -> Residency | None:
    """All else first, for every pass needs it: experts get the room that it leaves."""
    slot_nbytes = max(layer.expert_nbytes for layer in experts)
    fewest = max(layer.chosen for layer in experts)
    rest = [layer for layer in layers if layer.kind != "experts"]
    found = choose(rest, room_nbytes - fewest * slot_nbytes)
    if found is None:
        return None
    total = sum(layer.experts for layer in experts)
    left = room_nbytes - found.taken_nbytes
    return replace(
        found,
        experts=tuple(layer.name for layer in experts),
        cache_slots=min(left // slot_nbytes, total),
        cache_slot_nbytes=slot_nbytes,
        experts_total=total,
        experts_nbytes=sum(layer.read_nbytes for layer in experts),
    )


def held(layers: Sequence[LayerSize], names: Collection[str], room_nbytes: int) -> tuple[str, ...]:
    """Streamed layers that host memory keeps, as bytes of the files, spread evenly."""
    among = {*names}
    streams = [
        replace(layer, resident_nbytes=layer.read_nbytes)
        for layer in layers
        if layer.name in among and layer.read_nbytes
    ]
    found = _kept(streams, room_nbytes, lambda layer: layer.read_nbytes) if streams else []
    kept = {layer.name for layer in found}
    return tuple(layer.name for layer in layers if layer.name in kept)


def least(layers: Sequence[LayerSize]) -> int:
    """Bytes of the least room in which `choose` finds a way."""
    experts = [layer for layer in layers if layer.kind == "experts"]
    if experts:
        cache_nbytes = max(each.chosen for each in experts) * max(e.expert_nbytes for e in experts)
        rest = least([layer for layer in layers if layer.kind != "experts"]) + cache_nbytes
        return min(rest, sum(layer.resident_nbytes for layer in layers))
    sizes = [sum(layer.resident_nbytes for layer in layers if layer.kind != "rows")]
    for slots, slot_nbytes in _arenas(layers):
        must, _ = _sorted_out(layers, slots * slot_nbytes)
        sizes.append(sum(layer.resident_nbytes for layer in must) + slots * slot_nbytes)
    return min(sizes)


def worth_streaming(layers: Sequence[LayerSize]) -> set[str]:
    """Names of the layers that stream if there is no room for them."""
    largest = max((layer.nbytes for layer in layers if layer.kind == "layer"), default=0)
    return {
        layer.name
        for layer in layers
        if layer.kind == "rows"
        or (layer.kind == "layer" and layer.nbytes > largest // _WORTH_STREAMING)
    }


def _arenas(layers: Sequence[LayerSize]) -> Iterator[tuple[int, int]]:
    """Slots that might do: how many, of how many bytes."""
    sizes = sorted({layer.nbytes for layer in layers if layer.kind == "layer" and layer.nbytes})
    for slot_nbytes in sizes:
        for slots in range(1, _MOST_SLOTS + 1):
            yield slots, slot_nbytes
            if slots > _SLOTS and slots * slot_nbytes >= sizes[-1]:
                break


def _sorted_out(
    layers: Sequence[LayerSize], most_nbytes: int
) -> tuple[list[LayerSize], list[LayerSize]]:
    """Layers that must stay, and those, without rows, that may stream within so many bytes."""
    worth = worth_streaming(layers)
    needed = [layer for layer in layers if layer.kind != "rows"]
    may = [layer for layer in needed if layer.name in worth and layer.nbytes <= most_nbytes]
    names = {layer.name for layer in may}
    return [layer for layer in needed if layer.name not in names], may


def _filled(
    layers: Sequence[LayerSize], room_nbytes: int, slots: int, slot_nbytes: int, most_nbytes: int
) -> Residency | None:
    """The decision with these slots: as many bytes stay as there is room for."""
    must, may = _sorted_out(layers, most_nbytes)
    room = room_nbytes - slots * slot_nbytes - sum(layer.resident_nbytes for layer in must)
    if room < 0 or not may:
        return None
    chosen = _kept(may, room, lambda layer: _price(layer, slots, slot_nbytes))
    if len(chosen) == len(may):
        return None  # slots for nothing: the caller has seen that all together does not fit
    stay = {layer.name for layer in (*must, *chosen)}
    room -= sum(layer.resident_nbytes for layer in chosen)
    stay.update(layer.name for layer in _rows_within(layers, room))
    streams = [layer for layer in may if layer.name not in stay]
    return _decided(layers, stay, streams, slots, slot_nbytes)


def _rows_within(layers: Sequence[LayerSize], room_nbytes: int) -> list[LayerSize]:
    """The embeddings that stay in so much room."""
    rows = [layer for layer in layers if layer.kind == "rows"]
    return _greedy(sorted(rows, key=lambda each: -each.resident_nbytes), room_nbytes)


def _decided(
    layers: Sequence[LayerSize],
    stay: Collection[str],
    streams: Sequence[LayerSize],
    slots: int,
    slot_nbytes: int,
) -> Residency:
    return Residency(
        tuple(layer.name for layer in layers if layer.name in stay),
        tuple(layer.name for layer in streams),
        tuple(each.name for each in layers if each.kind == "rows" and each.name not in stay),
        slots,
        slot_nbytes,
        sum(layer.resident_nbytes for layer in layers if layer.name in stay),
        sum(layer.read_nbytes for layer in streams),
    )


def _cost(layers: Sequence[LayerSize], found: Residency) -> tuple[float, int]:
    """The cost of a pass, in bytes that compute hides; then the bytes that are taken."""
    streams = [layer for layer in layers if layer.name in {*found.streams}]
    cost = sum(_price(layer, found.slots, found.slot_nbytes) for layer in streams)
    return cost, found.taken_nbytes


def _price(layer: LayerSize, slots: int, slot_nbytes: int) -> float:
    """The cost of streaming a layer: more if it takes all slots, for nothing hides it."""
    alone = -(-layer.nbytes // slot_nbytes) >= slots
    return layer.read_nbytes * (_EXPOSED if alone else 1.0)


def _kept(
    layers: Sequence[LayerSize], room_nbytes: int, price: Callable[[LayerSize], float]
) -> list[LayerSize]:
    """Layers that stay although they may stream: those that save most, spread evenly."""
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
    best, most_saved = [0] * len(groups), -1.0
    for trial in product(*counts):
        left = room_nbytes - sum(
            n * group[0].resident_nbytes for n, group in zip(trial, few, strict=True)
        )
        if left < 0:
            continue
        n = min(left // max(many[0].resident_nbytes, 1), len(many))
        saved = sum(k * price(g[0]) for k, g in zip((*trial, n), groups, strict=True))
        if saved > most_saved:
            best, most_saved = [*trial, n], saved
    return [layer for n, group in zip(best, groups, strict=True) for layer in _spread(group, n)]


def _greedy(layers: Sequence[LayerSize], room_nbytes: int) -> list[LayerSize]:
    kept = []
    for layer in sorted(layers, key=lambda each: -each.read_nbytes):
        if layer.resident_nbytes <= room_nbytes:
            kept.append(layer)
            room_nbytes -= layer.resident_nbytes
    return kept


def _spread(layers: Sequence[LayerSize], count: int) -> list[LayerSize]:
    """So many of some layers, evenly over their order."""
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]
