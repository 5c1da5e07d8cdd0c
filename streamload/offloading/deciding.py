"""Deciding what of a model stays on a device, and what streams. Nothing is moved."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.decide import Options
from streamload.errors import CheckpointError, PlanInfeasibleError
from streamload.planning.activations import CUDA_WORKSPACE_NBYTES, activation_nbytes
from streamload.planning.cache_room import CacheRoom
from streamload.planning.demand import DeviceSpec, Want, Wants
from streamload.planning.kv_cache import CacheRequest, KvCache
from streamload.planning.partition import Item, units_of
from streamload.planning.plan import SEGMENTS, Placements, Plan
from streamload.planning.planner import CastChoice
from streamload.planning.residency import (
    LayerKind,
    LayerSize,
    Residency,
    choose,
    least,
    worth_streaming,
)
from streamload.selection import matches
from streamload.units import format_bytes, format_table, round_up

# Tensors in a slot begin at multiples of this: what torch's allocator for CUDA rounds to. What a
# matrix product gives may depend on where its weights begin.
SLOT_ALIGNMENT_NBYTES = 512
_SEGMENT_NBYTES = 2**21  # what an allocator with segments rounds a large piece to
# The chunks of layers are tried from the longest on.
_CHUNKS = (None, 2 * 2**20, 2**19, 2**17)
#: A budget that holds nothing back.
ENDLESS_NBYTES = 2**62


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that stay, or stream, together.

    Attributes:
        name: of the module that has them.
        wants: their numbers among all that is wanted.
        kind: whether they can stream.
        rows: the group of the embedding that has the same weight, or "".
    """

    name: str
    wants: tuple[int, ...]
    kind: LayerKind
    rows: str = ""


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What stays on a device, what streams through its slots, and what that takes.

    Attributes:
        device: its name.
        budget_nbytes: what all of it may take there, as it was given.
        residency: what stays and what streams.
        groups: the layers, in the order in which they run.
        sizes: what each takes.
        stream: the plan of what streams, in the order of the layers; None where all stays.
        cache_nbytes: room for the KV cache.
        activation_nbytes: room for what passes compute.
        reserve_nbytes: what was asked to stay free.
    """

    device: str
    budget_nbytes: int
    residency: Residency
    groups: tuple[Group, ...]
    sizes: tuple[LayerSize, ...]
    stream: Plan | None
    cache_nbytes: int
    activation_nbytes: int
    reserve_nbytes: int

    @property
    def layer_placements(self) -> list[range]:
        """The numbers of the placements of each layer that streams."""
        count = {group.name: len(group.wants) for group in self.groups}
        found, first = [], 0
        for name in self.residency.streams:
            found.append(range(first, first + count[name]))
            first += count[name]
        return found

    @property
    def bounded(self) -> list[str]:
        """The layers that stay and would stream under some smaller budget."""
        worth = worth_streaming(self.sizes)
        stays = {*self.residency.stays}
        return [size.name for size in self.sizes if size.name in stays and size.name in worth]

    @property
    def scratch_nbytes(self) -> int:
        """What streaming takes of the device beside the slots."""
        return self.stream.devices[0].scratch_nbytes if self.stream else 0

    @property
    def peak_nbytes(self) -> int:
        """What weights and slots take of the device."""
        return self.residency.taken_nbytes + self.scratch_nbytes

    @property
    def needed_nbytes(self) -> int:
        """What is taken of the budget while the model runs."""
        return self.peak_nbytes + self.cache_nbytes + self.activation_nbytes + self.reserve_nbytes

    def seconds(self, rate: float) -> float:
        """How long the transfers of a pass take at a rate of bytes a second."""
        return self.residency.pass_nbytes / rate

    def to_json(self) -> str:
        """Write the numbers as JSON."""
        found = {name: getattr(self, name) for name in ("device", "budget_nbytes")}
        found |= {
            name: getattr(self, name)
            for name in (
                *("peak_nbytes", "scratch_nbytes", "cache_nbytes", "activation_nbytes"),
                *("reserve_nbytes", "needed_nbytes"),
            )
        }
        return json.dumps(found | asdict(self.residency), separators=(",", ":"))

    def __str__(self) -> str:
        """A table of what stays and what streams."""
        found = self.residency
        if not found.streams and not found.gathers:
            return (
                f"{self.device}: all of it stays: {format_bytes(found.resident_nbytes)} of "
                f"{format_bytes(self.budget_nbytes)}; a pass reads nothing"
            )
        rows = [
            ("stay", *_listed(found.stays), format_bytes(found.resident_nbytes)),
            ("stream", *_listed(found.streams), format_bytes(found.pass_nbytes)),
        ]
        if found.gathers:
            rows.append(("rows from the file", *_listed(found.gathers), "-"))
        room = [
            ("slots", f"{found.slots} of {format_bytes(found.slot_nbytes)}", found.arena_nbytes),
            ("streaming", "", self.scratch_nbytes),
            ("KV cache", "", self.cache_nbytes),
            ("activations", "", self.activation_nbytes),
            ("reserve", "", self.reserve_nbytes),
        ]
        lines = format_table(("what", "layers", "which", "bytes"), rows, right=0)
        parts = [f"{name} {format_bytes(n)}" for name, _, n in room if n]
        return "\n".join(
            [
                *lines,
                f"{self.device}: {format_bytes(self.needed_nbytes)} of "
                f"{format_bytes(self.budget_nbytes)}: weights "
                f"{format_bytes(found.resident_nbytes)}, {', '.join(parts)}",
                f"{found.slots} slots of {format_bytes(found.slot_nbytes)}; a pass reads "
                f"{format_bytes(found.pass_nbytes)}",
            ]
        )

    __repr__ = __str__


def _listed(names: Sequence[str]) -> tuple[str, str]:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return str(len(names)), shown


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str] = ()
) -> list[tuple[str, list[int], bool]]:
    """Tensors by the modules that have them, in the order in which these run.

    Args:
        names: of the tensors.
        nbytes: of each.
        layers: patterns of names of modules that are layers. Where there are some, the order is
            that of the names.

    Returns:
        For each module its name, the numbers of its tensors, and whether it is one of the layers
        of a stack.

    Raises:
        ValueError: no module has a name that matches a pattern.
    """
    number_of = {name: number for number, name in enumerate(names)}
    found: dict[tuple[str, bool], list[int]] = {}
    stated = _stated(names, layers)
    for name, layer in stated.items():
        found.setdefault((layer, True), []).append(number_of[name])
    items = [item for item in map(Item, names, nbytes) if item.name not in stated]
    for unit in units_of(items):
        for item in unit.items:
            in_layer = unit.kind == "layer"
            module = unit.name if in_layer else item.name.rpartition(".")[0]
            found.setdefault((module, in_layer), []).append(number_of[item.name])
    groups = [(module, numbers, in_layer) for (module, in_layer), numbers in found.items()]
    return sorted(groups, key=lambda group: min(group[1])) if layers else groups


def _stated(names: Sequence[str], layers: Sequence[str]) -> dict[str, str]:
    """Tensors in layers that were stated, and the outermost such layer of each."""
    found, left = {}, {*layers}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts)):
            module = ".".join(parts[:count])
            if matches(module, layers):
                found[name] = module
                left -= {pattern for pattern in left if matches(module, [pattern])}
                break
    if left:
        raise ValueError(f"layers: no module's name matches {min(left)!r}")
    return found


def groups_of_checkpoint(
    wants: Wants, nbytes: Sequence[int], tied: Mapping[str, str], stay: Sequence[str] = ()
) -> list[Group]:
    """The groups of a checkpoint without a model: what its names tell.

    A weight with "emb" in the name of its module, and two axes, is an embedding.

    Args:
        wants: all tensors.
        nbytes: of each on the device.
        tied: names that are not stored, and whose tensor they share.
        stay: patterns of names of tensors that stay.
    """
    groups = []
    for name, numbers, in_layer in groups_by_name(wants.names, nbytes):
        kind: LayerKind = "layer"
        fixed = tuple(at for at in numbers if matches(wants.names[at], stay))
        if fixed:
            groups.append(Group(f"{name} (stays)", fixed, "fixed"))
            numbers = [at for at in numbers if at not in fixed]
            if not numbers:
                continue
        leaf = name.rpartition(".")[2]
        if not in_layer and len(numbers) == 1 and ("emb" in leaf or leaf in ("wte", "shared")):
            weight = wants.names[numbers[0]]
            if weight in tied.values():  # the head has it too, and streams where it does not stay
                head = next(each for each, shared in tied.items() if shared == weight)
                groups.append(Group(head.rpartition(".")[0], (numbers[0],), "layer", name))
                continue
            kind = "rows" if len(wants.shapes[numbers[0]]) == 2 else "fixed"
        groups.append(Group(name, tuple(numbers), kind))
    return groups


def decide(
    options: Options,
    checkpoint: Checkpoint,
    wants: Wants,
    spec: DeviceSpec,
    groups: Sequence[Group],
    cast: CastChoice,
    *,
    tokens: int | None = None,
    held_nbytes: int = 0,
) -> OffloadPlan:
    """Choose what stays.

    Args:
        options: those of the load.
        checkpoint: the headers.
        wants: all parameters.
        spec: the device, with what is asked to stay free taken off its budget.
        groups: the layers, in the order in which they run.
        cast: which cast engine.
        tokens: leave room for what a pass of so many computes.
        held_nbytes: of what is not free there, what the model gives back first.

    Raises:
        PlanInfeasibleError: not even the least fits.
        CheckpointError: how much room a cache or tokens need is not known.
    """
    dsts = wants.dsts(options.policy, spec.native_bf16)
    nbytes = [dst.nbytes(math.prod(shape)) for dst, shape in zip(dsts, wants.shapes, strict=True)]
    read = [src.nbytes(math.prod(s)) for src, s in zip(wants.srcs, wants.shapes, strict=True)]
    sizes = [
        LayerSize(
            group.name,
            group.kind,
            sum(round_up(nbytes[at], SLOT_ALIGNMENT_NBYTES) for at in group.wants),
            sum(spec.resident(nbytes[at]) for at in group.wants),
            sum(read[at] for at in group.wants),
        )
        for group in groups
    ]
    cache_nbytes = _cache_nbytes(options, checkpoint, wants, spec, tokens)
    activations = 0
    if tokens is not None:
        wide = max((dst.itemsize for dst in dsts if dst.kind == "float"), default=2)
        activations = activation_nbytes(checkpoint.config, tokens, wide, path=checkpoint.path)
        activations += CUDA_WORKSPACE_NBYTES if spec.allocator in SEGMENTS else 0
    room = spec.budget_nbytes
    if spec.free_nbytes is not None:
        room = min(room, spec.free_nbytes + held_nbytes)
    room -= cache_nbytes + activations

    def made(chunk_nbytes: int | None, less_nbytes: int = 0) -> OffloadPlan | None:
        """A plan with such chunks, and with so much less room for layers."""
        scratch, stream = 0, None
        while True:  # what streams says how much streaming takes, and that what streams
            found = choose(sizes, max(room - scratch - less_nbytes, 0))
            if found is None:
                return None
            if not found.streams:
                stream, scratch = None, 0
                break
            stream = _streamed(options, checkpoint, wants, spec, groups, found, cast, chunk_nbytes)
            if stream.devices[0].scratch_nbytes <= scratch:
                break
            scratch = stream.devices[0].scratch_nbytes
        found = _rounded(found, spec)
        plan = OffloadPlan(
            *(
                spec.name,
                spec.budget_nbytes + spec.reserve_nbytes,
                found,
                tuple(groups),
                tuple(sizes),
                stream,
            ),
            *(cache_nbytes, activations, spec.reserve_nbytes),
        )
        over = plan.peak_nbytes - room
        if over > 0 and less_nbytes < room:
            return made(chunk_nbytes, less_nbytes + over)
        return plan if over <= 0 else None

    chunks = [options.knobs.chunk_nbytes] if options.knobs.chunk_nbytes else _CHUNKS
    for chunk_nbytes in chunks:
        plan = made(chunk_nbytes)
        if plan is not None:
            return plan
    needed = least(sizes) + cache_nbytes + activations
    smallest = replace(options, knobs=replace(options.knobs, chunk_nbytes=_CHUNKS[-1]))
    found = choose(sizes, least(sizes))
    if found is not None and found.streams:
        stream = _streamed(smallest, checkpoint, wants, spec, groups, found, cast, _CHUNKS[-1])
        needed += stream.devices[0].scratch_nbytes
    largest = sorted(((size.name, size.nbytes) for size in sizes), key=lambda each: -each[1])
    beside = [("the KV cache", cache_nbytes), (f"activations of {tokens} tokens", activations)]
    raise PlanInfeasibleError(
        spec.name,
        needed,
        room + cache_nbytes + activations,
        limit=f"{spec.limit}, with layers that stream",
        largest=[*(each for each in beside if each[1]), *largest[:6]],
        reason="a slot holds the largest layer, and what cannot stream stays",
    )


def _rounded(found: Residency, spec: DeviceSpec) -> Residency:
    """The same with slots as an allocator with segments takes them."""
    if spec.allocator not in SEGMENTS or not found.slots:
        return found
    arena = round_up(found.arena_nbytes, _SEGMENT_NBYTES)
    slot_nbytes = arena // found.slots // SLOT_ALIGNMENT_NBYTES * SLOT_ALIGNMENT_NBYTES
    return replace(found, slot_nbytes=slot_nbytes)


def _cache_nbytes(
    options: Options, checkpoint: Checkpoint, wants: Wants, spec: DeviceSpec, tokens: int | None
) -> int:
    """What the KV cache of all layers takes: as asked for, or that of a pass of so many tokens."""
    asked, config = options.room.cache, checkpoint.config
    if asked is None:
        if tokens is None or config.get("use_cache") is False:
            return 0
        asked = CacheRequest(tokens)
        try:
            KvCache.of(config, asked, path=checkpoint.path)
        except CheckpointError:  # a model without a cache, or nobody knows of one
            return 0
    cache = KvCache.of(config, asked, path=checkpoint.path)
    room = CacheRoom.of(checkpoint, wants, options.policy, cache, spec.native_bf16)
    room = room.placed(checkpoint, wants, [spec.name] * len(wants), options.policy)
    return room.nbytes(spec, asked.context)


def _streamed(
    options: Options,
    checkpoint: Checkpoint,
    wants: Wants,
    spec: DeviceSpec,
    groups: Sequence[Group],
    found: Residency,
    cast: CastChoice,
    chunk_nbytes: int | None,
) -> Plan:
    """Plan what streams: its casts and its staging. The slots hold it, so no budget does."""
    by_name = {group.name: group for group in groups}
    order = [at for name in found.streams for at in by_name[name].wants]
    mine = Wants.of(checkpoint, [_new(wants[at], spec.name) for at in order])
    knobs = options.knobs
    if chunk_nbytes is not None:
        knobs = replace(knobs, chunk_nbytes=chunk_nbytes)
    free = replace(
        options,
        knobs=knobs,
        room=replace(options.room, cache=None, reserve_nbytes=0),
        residence="memory",
    )
    endless = replace(
        spec,
        budget_nbytes=ENDLESS_NBYTES,
        free_nbytes=None,
        host_free_nbytes=None,
        reserve_nbytes=0,
    )
    made = free.plan(checkpoint, mine, [endless], {}, cast)
    layers = [[wants.names[at] for at in by_name[name].wants] for name in found.streams]
    return replace(made, placements=_in_order(made.placements, layers))


def _new(want: Want, device: str) -> Want:
    """The same for memory of ours."""
    return replace(want, held=None, reusable_nbytes=None, device=device)


def _in_order(placements: Placements, layers: Iterable[Sequence[str]]) -> Placements:
    """Placements by layer, and of each layer in the order of the files."""
    place = {name: at for at, name in enumerate(placements.names)}
    order = [at for names in layers for at in sorted(place[name] for name in names)]
    return placements.chosen(order)
