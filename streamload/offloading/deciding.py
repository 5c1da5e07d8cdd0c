"""Deciding what of a model stays on a device, and what streams. Nothing is moved."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.decide import Options
from streamload.errors import CheckpointError, PlanInfeasibleError
from streamload.planning.activations import (
    CUDA_WORKSPACE_NBYTES,
    activation_nbytes,
    experts_chosen,
)
from streamload.planning.blocks import split
from streamload.planning.cache_room import CacheRoom
from streamload.planning.demand import DeviceSpec, Want, Wants
from streamload.planning.kv_cache import CacheRequest, KvCache
from streamload.planning.partition import Item, units_of
from streamload.planning.parts import RowRange
from streamload.planning.plan import SEGMENTS, Placements, Plan
from streamload.planning.planner import CastChoice
from streamload.planning.residency import LayerKind, LayerSize, Residency, choose, least
from streamload.selection import matches
from streamload.units import format_bytes, format_table, round_up

# Tensors in a slot begin at multiples of this: what torch's allocator for CUDA rounds to. What a
# matrix product gives may depend on where its weights begin.
SLOT_ALIGNMENT_NBYTES = 512
_SEGMENT_NBYTES = 2**21  # what an allocator with segments rounds a large piece to
# The chunks of layers are tried from the longest on.
_CHUNKS = (None, 2 * 2**20, 2**19, 2**17)
# A tensor of experts: the module, the number of the expert where it is of one, and what of it.
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.)?([^.].*)")
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
        experts: how many experts they are of, of kind "experts": each parameter has all of them
            along its first axis.
        chosen: how many of them a token chooses.
        apart: each parameter is of one expert, those of the first come first, and all are alike.
    """

    name: str
    wants: tuple[int, ...]
    kind: LayerKind
    rows: str = ""
    experts: int = 0
    chosen: int = 0
    apart: bool = False

    @property
    def parts(self) -> int:
        """How many tensors each of its experts has."""
        return len(self.wants) // self.experts if self.apart else len(self.wants)


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """What stays on a device, what streams through its slots, and what that takes.

    Attributes:
        device: its name.
        budget_nbytes: what all of it may take there, as it was given.
        residency: what stays and what streams.
        groups: the layers, in the order in which they run.
        sizes: what each takes.
        stream: the plan of what streams, in the order of the layers, and then of the experts; None
            where all stays.
        cache_nbytes: room for the KV cache.
        activation_nbytes: room for what passes compute.
        reserve_nbytes: what was asked to stay free.
        notes: what a user may want to know, one sentence each.
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
    notes: tuple[str, ...] = ()

    @property
    def layer_placements(self) -> list[range]:
        """The numbers of the placements of each layer that streams, and then of each expert."""
        by_name = {group.name: group for group in self.groups}
        counts = [len(by_name[name].wants) for name in self.residency.streams]
        for name in self.residency.experts:
            counts += [by_name[name].parts] * by_name[name].experts
        return [range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]

    @property
    def experts(self) -> list[int]:
        """How many experts each of the layers has whose experts are cached."""
        count = {group.name: group.experts for group in self.groups}
        return [count[name] for name in self.residency.experts]

    @property
    def token_nbytes(self) -> int:
        """What one token's experts are, of all layers whose experts are cached."""
        cached = {*self.residency.experts}
        sizes = [size for size in self.sizes if size.name in cached]
        return sum(size.read_nbytes * size.chosen // size.experts for size in sizes)

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
        """How long the transfers of a pass take at a rate of bytes a second.

        Of experts, with all of one token's.
        """
        return (self.residency.pass_nbytes + self.token_nbytes) / rate

    def to_json(self) -> str:
        """Write the numbers as JSON."""
        found = {name: getattr(self, name) for name in ("device", "budget_nbytes")}
        found |= {
            name: getattr(self, name)
            for name in (
                *("peak_nbytes", "scratch_nbytes", "cache_nbytes", "activation_nbytes"),
                *("reserve_nbytes", "needed_nbytes", "token_nbytes"),
            )
        }
        return json.dumps(found | asdict(self.residency), separators=(",", ":"))

    def __str__(self) -> str:
        """A table of what stays and what streams."""
        found = self.residency
        if not found.streams and not found.gathers and not found.experts:
            return (
                f"{self.device}: all of it stays: {format_bytes(found.resident_nbytes)} of "
                f"{format_bytes(self.budget_nbytes)}; a pass reads nothing"
            )
        rows = [("stay", *_listed(found.stays), format_bytes(found.resident_nbytes))]
        if found.streams:
            rows.append(("stream", *_listed(found.streams), format_bytes(found.pass_nbytes)))
        if found.experts:
            rows.append(("experts in a cache", *_listed(found.experts), "as chosen"))
        if found.gathers:
            rows.append(("rows from the file", *_listed(found.gathers), "-"))
        room = [
            ("slots", found.arena_nbytes - found.cache_nbytes),
            ("experts", found.cache_nbytes),
            ("streaming", self.scratch_nbytes),
            ("KV cache", self.cache_nbytes),
            ("activations", self.activation_nbytes),
            ("reserve", self.reserve_nbytes),
        ]
        lines = [*format_table(("what", "layers", "which", "bytes"), rows, right=0)]
        parts = [f"{name} {format_bytes(n)}" for name, n in room if n]
        lines.append(
            f"{self.device}: {format_bytes(self.needed_nbytes)} of "
            f"{format_bytes(self.budget_nbytes)}: weights "
            f"{format_bytes(found.resident_nbytes)}, {', '.join(parts)}"
        )
        if found.slots or not found.experts:
            lines.append(
                f"{found.slots} slots of {format_bytes(found.slot_nbytes)}; a pass reads "
                f"{format_bytes(found.pass_nbytes)}"
            )
        if found.experts:
            lines.append(
                f"{found.cache_slots} slots of experts of {format_bytes(found.cache_slot_nbytes)}, "
                f"for {found.cache_slots / found.experts_total:.0%} of the {found.experts_total} "
                "experts; a pass reads those of the chosen ones that are not there, for a token up "
                f"to {format_bytes(self.token_nbytes)}"
            )
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__


def _listed(names: Sequence[str]) -> tuple[str, str]:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return str(len(names)), shown


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int]
) -> list[tuple[str, list[int], bool]]:
    """Tensors by the modules that have them, in the order in which these run.

    Args:
        names: of the tensors.
        nbytes: of each.

    Returns:
        For each module its name, the numbers of its tensors, and whether it is one of the layers
        of a stack.
    """
    number_of = {name: number for number, name in enumerate(names)}
    found: dict[tuple[str, bool], list[int]] = {}
    for unit in units_of([*map(Item, names, nbytes)]):
        for item in unit.items:
            in_layer = unit.kind == "layer"
            module = unit.name if in_layer else item.name.rpartition(".")[0]
            found.setdefault((module, in_layer), []).append(number_of[item.name])
    return [(module, numbers, in_layer) for (module, in_layer), numbers in found.items()]


def groups_of_checkpoint(
    wants: Wants,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> list[Group]:
    """The groups of a checkpoint without a model: what its names tell.

    A weight with "emb" in the name of its module, and two axes, is an embedding. What is numbered
    behind "experts", or has three axes there, is experts.

    Args:
        wants: all tensors.
        nbytes: of each on the device.
        tied: names that are not stored, and whose tensor they share.
        stay: patterns of names of tensors that stay.
        config: the checkpoint's ``config.json``, for how many experts a token chooses.
    """
    groups = _experts_by_name(wants, experts_chosen(config or {}), stay)
    taken = {at for group in groups for at in group.wants}
    for name, every, in_layer in groups_by_name(wants.names, nbytes):
        numbers = [at for at in every if at not in taken]
        if not numbers:
            continue
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


def _experts_by_name(wants: Wants, chosen: int, stay: Sequence[str]) -> list[Group]:
    """The experts of a checkpoint: one by one, or all of a layer in a tensor."""
    apart: dict[str, dict[int, list[tuple[str, int]]]] = {}
    fused: dict[str, list[int]] = {}
    for at, name in enumerate(wants.names):
        match, src = _EXPERTS.fullmatch(name), wants.srcs[at]
        whole = src.kind == "float" and src.bits >= 8 and not src.is_packed
        if match is None or not whole or matches(name, stay):
            continue
        if match[2]:
            parts = apart.setdefault(match[1], {}).setdefault(int(match[2]), [])
            parts.append((match[3], at))
        else:
            fused.setdefault(match[1], []).append(at)
    groups = []
    for name, by_number in apart.items():
        every = [sorted(by_number[number]) for number in sorted(by_number)]
        kinds = {tuple((part, wants.shapes[at]) for part, at in parts) for parts in every}
        if len(kinds) == 1 and len(every) > 1:
            numbers = tuple(at for parts in every for _, at in parts)
            count = len(every)
            groups.append(Group(name, numbers, "experts", "", count, min(chosen, count), True))
    for name, found in fused.items():
        counts = {wants.shapes[at][:1] for at in found}
        if len(counts) == 1 and any(len(wants.shapes[at]) == 3 for at in found):
            ((count,),) = counts
            groups.append(Group(name, tuple(found), "experts", "", count, min(chosen, count)))
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
    notes: Sequence[str] = (),
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
        notes: what a user may want to know of the groups.

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
            group.experts,
            group.chosen,
            _expert_nbytes(group, nbytes),
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
            if not found.streams and not found.experts:
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
            *(cache_nbytes, activations, spec.reserve_nbytes, tuple(notes)),
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
    if found is not None and (found.streams or found.experts):
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
        reason="a slot holds the largest layer, and what cannot stream stays"
        + ("; others hold as many experts as a token chooses" if found and found.experts else ""),
    )


def _expert_nbytes(group: Group, nbytes: Sequence[int]) -> int:
    """What one of a group's experts takes in a slot."""
    share = 1 if group.apart else max(group.experts, 1)
    mine = group.wants[: group.parts]
    return sum(round_up(nbytes[at] // share, SLOT_ALIGNMENT_NBYTES) for at in mine)


def _rounded(found: Residency, spec: DeviceSpec) -> Residency:
    """The same with slots as an allocator with segments takes them."""
    if spec.allocator not in SEGMENTS or not found.arena_nbytes:
        return found
    if found.experts:
        pad_nbytes = round_up(found.arena_nbytes, _SEGMENT_NBYTES) - found.arena_nbytes
        return replace(found, pad_nbytes=pad_nbytes)
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
    layers = [[_new(wants[at], spec.name) for at in by_name[name].wants] for name in found.streams]
    for name in found.experts:
        layers += _experts(by_name[name], wants, spec.name)
    mine = Wants.of(checkpoint, [want for layer in layers for want in layer])
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
    names = [[want.name for want in layer] for layer in layers]
    return replace(made, placements=_in_order(made.placements, names))


def _experts(group: Group, wants: Wants, device: str) -> list[list[Want]]:
    """What each expert of a layer consists of: its part of each parameter."""
    if group.apart:
        firsts = range(0, len(group.wants), group.parts)
        each = [group.wants[at : at + group.parts] for at in firsts]
        return [[_new(wants[at], device) for at in numbers] for numbers in each]
    parts = []
    for at in group.wants:
        want = _new(wants[at], device)
        sources = rows_of_experts(want, group.experts)
        assert sources is not None, want.name
        parts.append(
            [
                replace(want, name=f"{want.name}[{n}]", shape=want.shape[1:], source=source)
                for n, source in enumerate(sources)
            ]
        )
    return [list(each) for each in zip(*parts, strict=True)]


def rows_of_experts(want: Want, experts: int) -> list[tuple[RowRange, ...]] | None:
    """The rows of the file of each expert of a parameter; None where it is no such parameter."""
    plain = want.transpose is None and want.coding is None
    if not plain or want.shape[:1] != (experts,) or not math.prod(want.shape):
        return None
    numel = math.prod(want.shape)
    rows = sum(r.stop - r.start for r in want.source)
    return split(want.source, numel // rows, numel // experts)


def _new(want: Want, device: str) -> Want:
    """The same for memory of ours."""
    return replace(want, held=None, reusable_nbytes=None, device=device)


def _in_order(placements: Placements, layers: Iterable[Sequence[str]]) -> Placements:
    """Placements by layer, and of each layer in the order of the files."""
    place = {name: at for at, name in enumerate(placements.names)}
    order = [at for names in layers for at in sorted(place[name] for name in names)]
    return placements.chosen(order)
