"""Choose which layers stay on a device; the others stream through slots at every pass.

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
    """Return the embeddings that fit into ``room_nbytes``, to stay."""
    rows = [layer for layer in layers if layer.kind == "rows"]
    return _greedy(sorted(rows, key=lambda each: -each.resident_nbytes), room_nbytes)


def _decided(
    layers: Sequence[LayerSize], stay: Sequence[LayerSize], slots: int = 0, slot_nbytes: int = 0
) -> Residency:
    """Return the residency in which ``stay`` stay, and the others stream or are read by rows."""
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
    for trial in product(*counts):
        taken = sum(n * group[0].resident_nbytes for n, group in zip(trial, few, strict=True))
        left = room_nbytes - taken
        if left < 0:
            continue
        n = min(left // max(many[0].resident_nbytes, 1), len(many))
        saved = [k * price(g[0]) for k, g in zip((*trial, n), groups, strict=True)]
        found.append((total - sum(saved), saved, [*trial, n]))
    most = min((cost for cost, _, _ in found), default=0.0) * _NEARLY_LEAST

    several = [at for at, group in enumerate(groups) if len(group) > 1]
    spread_total = sum(totals[at] for at in several) or 1

    def uneven(saved: Sequence[float]) -> float:
        share = sum(saved[at] for at in several) / spread_total
        return sum(abs(saved[at] - share * totals[at]) for at in several)

    _, _, best = min(
        (each for each in found if each[0] <= most),
        key=lambda each: (uneven(each[1]), each[0]),
        default=(0.0, [], [0] * len(groups)),
    )
    return [layer for n, group in zip(best, groups, strict=True) for layer in _spread(group, n)]


def _greedy(layers: Sequence[LayerSize], room_nbytes: int) -> list[LayerSize]:
    kept = []
    for layer in sorted(layers, key=lambda each: -each.read_nbytes):
        if layer.resident_nbytes <= room_nbytes:
            kept.append(layer)
            room_nbytes -= layer.resident_nbytes
    return kept


def _spread(layers: Sequence[LayerSize], count: int) -> list[LayerSize]:
    """Return ``count`` of the layers, at even distances."""
    return [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]
