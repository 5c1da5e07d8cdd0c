"""Deciding what of a model stays on a device, and what streams. Nothing is moved."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import free_host_nbytes
from streamload.core.memory import overhead_nbytes
from streamload.core.units import format_bytes, format_table
from streamload.errors import PlanInfeasibleError, printed
from streamload.files.page_cache import MARGIN_NBYTES
from streamload.loading.prepare import Options
from streamload.loading.read_choice import Reading, ahead_nbytes, reading_of
from streamload.offloading.groups import Group, rows_of_experts
from streamload.offloading.residency import (
    LayerSize,
    Residency,
    SlotPlaces,
    choose,
    held,
    least,
    worth_streaming,
)
from streamload.offloading.sizes import (
    SLOT_ALIGNMENT_NBYTES,
    cache_nbytes_of,
    cache_of,
    computed_nbytes,
    layer_sizes,
    rounded,
)
from streamload.offloading.views import Viewable, can_be_views
from streamload.planning.device_plan import DevicePlan
from streamload.planning.placement import Placements
from streamload.planning.plan import LOAD_NBYTES, Plan
from streamload.planning.planner import CastChoice
from streamload.planning.requests import DeviceSpec, TensorRequest, TensorRequests

#: The shortest chunk of layers that is tried.
LEAST_CHUNK_NBYTES = 2**17
# The chunks of layers are tried from the longest on.
_CHUNKS = (None, 2 * 2**20, 2**19, LEAST_CHUNK_NBYTES)
#: Said where the CPU computes on what streams as it is stored, and the page cache has room for it.
_MAPPED_IS_FASTER = (
    'residence="mapped" is faster while the page cache holds the files: a load with it leaves all '
    "weights there, of which the budget counts nothing (a pass took 0.55 of the time, a token 0.78)"
)
# The longest where nothing is read ahead: reads are no longer than a part of it.
_EXACT_CHUNK_NBYTES = 2**21
#: A budget that holds nothing back.
ENDLESS_NBYTES = 2**62


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
        load_nbytes: what loading what stays takes at its peak, before there are slots.
        cache_nbytes: room for the KV cache.
        activation_nbytes: room for what passes compute.
        reserve_nbytes: what was asked to stay free.
        host: names of the layers, or of the layers of experts, that come from host memory.
        host_nbytes: what that memory takes: their bytes in the files.
        views: what streams is computed on in its files: slots are mapped pages, and no memory.
        unaligned: a tensor that keeps it from that by where it begins in its file; "" if none does.
        mappable: a load could leave what streams in its files, where the device computes on it.
        cached: the page cache has room for what streams, so that only the first pass reads it from
            the disk.
        notes: what a user may want to know, one sentence each.
        tokens: of a pass that there is room for; None: none is left for what passes compute.
        cached_tokens: tokens of the KV cache that there is room for, of all sequences together.
    """

    device: str
    budget_nbytes: int
    residency: Residency
    groups: tuple[Group, ...]
    sizes: tuple[LayerSize, ...]
    stream: Plan | None
    load_nbytes: int
    cache_nbytes: int
    activation_nbytes: int
    reserve_nbytes: int
    host: tuple[str, ...] = ()
    host_nbytes: int = 0
    views: bool = False
    unaligned: str = ""
    mappable: bool = False
    cached: bool = True
    notes: tuple[str, ...] = ()
    tokens: int | None = None
    cached_tokens: int = 0

    @property
    def layer_placements(self) -> list[range]:
        """The numbers of the placements of each layer that streams, and then of each expert."""
        by_name = {group.name: group for group in self.groups}
        counts = [len(by_name[name].wants) for name in self.residency.streams]
        for name in self.residency.experts:
            counts += [by_name[name].parts] * by_name[name].experts
        return [range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]

    @property
    def slot_places(self) -> SlotPlaces:
        """Where what streams lies in the slots: each layer, and each expert."""
        assert self.stream is not None
        kinds = self.stream.placements.kinds
        layers = self.layer_placements
        shapes = [[(kinds[at].dst, kinds[at].shape) for at in each] for each in layers]
        return SlotPlaces(self.residency.slot_starts, shapes, SLOT_ALIGNMENT_NBYTES)

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
    def read_nbytes(self) -> int:
        """What a pass of one token reads: all that streams, and of experts the chosen ones."""
        return self.residency.pass_nbytes + self.token_nbytes

    def tensors_of(self, layers: Collection[str], wants: TensorRequests) -> set[str]:
        """Names of the checkpoint's tensors that some layers are read from."""
        found = (at for group in self.groups if group.name in layers for at in group.wants)
        return {row.tensor for at in found for row in wants.sources[at]}

    @property
    def places(self) -> dict[str, int]:
        """Bytes of weights by where passes find them, without embeddings read by rows."""
        rest = self.residency.file_nbytes - self.host_nbytes
        found = {"resident": self.residency.resident_nbytes, "host memory": self.host_nbytes}
        return found | {"page cache": rest * self.cached, "disk": rest * (not self.cached)}

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
        """What weights and slots take of the device, or loading what stays, if that is more."""
        return max(self.residency.taken_nbytes + self.scratch_nbytes, self.load_nbytes)

    @property
    def needed_nbytes(self) -> int:
        """What is taken of the budget while the model runs."""
        return self.peak_nbytes + self.cache_nbytes + self.activation_nbytes + self.reserve_nbytes

    def seconds(self, rate: float) -> float:
        """How long the transfers of a pass take at a rate of bytes a second.

        Of experts, with all of one token's.
        """
        return self.read_nbytes / rate

    def to_json(self) -> str:
        """Write the numbers as JSON."""
        found = {name: getattr(self, name) for name in ("device", "budget_nbytes")}
        found |= {
            name: getattr(self, name)
            for name in (
                *("peak_nbytes", "scratch_nbytes", "cache_nbytes", "activation_nbytes"),
                *("reserve_nbytes", "needed_nbytes", "token_nbytes", "views"),
            )
        }
        found |= {"host": self.host, "places": self.places}
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
        pages = ", pages of the mapped files" if self.views else ""
        if found.slots or not found.experts:
            lines.append(
                f"{found.slots} slots of {format_bytes(found.slot_nbytes)}{pages}; a pass reads "
                f"{format_bytes(found.pass_nbytes)}"
            )
        if found.experts:
            lines.append(
                f"{found.cache_slots} slots of experts of "
                f"{format_bytes(found.cache_slot_nbytes)}{pages}, for "
                f"{found.cache_slots / found.experts_total:.0%} of the {found.experts_total} "
                "experts; a pass reads those of the chosen ones that are not there, for a token up "
                f"to {format_bytes(self.token_nbytes)}"
            )
        places = [f"{where} {format_bytes(n)}" for where, n in self.places.items() if n]
        if self.unaligned:
            lines.append(
                f"{self.unaligned} does not begin at a multiple of 64 in its file, so each pass "
                "copies what streams: `streamload convert PATH OUT` writes files that passes "
                "compute on as they lie"
            )
        return printed([*lines, f"from {', '.join(places)}", *self.notes, *self.faster])

    @property
    def faster(self) -> list[str]:
        """A sentence where not to stream at all is faster: the device computes on the files."""
        return [_MAPPED_IS_FASTER] if self.mappable and self.cached else []

    __repr__ = __str__


def _listed(names: Sequence[str]) -> tuple[str, str]:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return str(len(names)), shown


def decide(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    groups: Sequence[Group],
    cast: CastChoice,
    *,
    tokens: int | None = None,
    has_layers: bool = True,
    has_head: bool = True,
    held_nbytes: int = 0,
    host_nbytes: int = 0,
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
        has_layers: some of the model's layers are among the parameters, and their cache beside.
        has_head: the head is among the parameters, so that a pass computes logits.
        held_nbytes: of what is not free there, what the model gives back first.
        host_nbytes: most bytes of layers that host memory keeps.
        notes: what a user may want to know of the groups.

    Raises:
        PlanInfeasibleError: not even the least fits, or the host has no room for its part.
        CheckpointError: how much room a cache or tokens need is not known.
    """
    sizes = layer_sizes(options, wants, spec, groups)
    cache_nbytes = cache_nbytes_of(options, checkpoint, wants, spec, tokens) if has_layers else 0
    asked = cache_of(options, checkpoint, tokens) if cache_nbytes else None
    cached_tokens = asked.request.context * asked.request.batch if asked else 0
    activations = 0
    if tokens is not None:
        activations = computed_nbytes(options, checkpoint, wants, spec, tokens, has_head=has_head)
    room, limited_by = spec.budget_nbytes, spec.limit
    each = wants.dsts(options.policy, spec.native_bf16), wants.shapes
    numbers = wants.nbytes(options.policy, spec.native_bf16)
    objects = ((d.name, s, n, 1) for d, s, n in zip(*each, numbers, strict=True))
    beside_nbytes = LOAD_NBYTES + spec.objects.of(objects)
    beside_nbytes += len(wants) * spec.info.costs.kernel_nbytes
    if spec.free_nbytes is not None:
        taken = beside_nbytes if spec.info.shared_memory else 0
        free = spec.free_nbytes + held_nbytes - taken
        room, limited_by = min((room, limited_by), (free, "free memory"))
    room -= cache_nbytes + activations

    def made(chunk_nbytes: int | None, room: int, reading: Reading) -> OffloadPlan | int:
        """A plan with such chunks for so much room, or the bytes that are missing."""
        scratch, limit, stream = 0, room, None
        while True:  # what stays says how much the rest takes, and that what stays
            lowest = least(sizes) + scratch
            found = choose(sizes, max(limit - scratch, 0))
            if found is None:
                return max(lowest - room, 1)
            if found.streams or found.experts:
                stream = _streamed(
                    *(options, checkpoint, wants, spec, groups, found, cast, chunk_nbytes),
                    reading,
                )
                if stream.devices[0].scratch_nbytes > scratch:
                    scratch = stream.devices[0].scratch_nbytes
                    limit = min(max(limit, least(sizes) + scratch), room)
                    continue
            else:
                stream = None
            load = _load_of(options, checkpoint, wants, spec, groups, found, cast, room)
            found = rounded(replace(found, resident_nbytes=load.resident_nbytes), spec)
            beside = stream.devices[0].scratch_nbytes if stream else 0
            over = max(found.taken_nbytes + beside, load.peak_nbytes) - room
            if over <= 0:
                break
            if limit <= lowest:
                return over
            limit = max(limit - over, lowest)  # an allocator may round a little more to a lot
        host = _held(sizes, found, host_nbytes)
        seen = Viewable()
        if stream is not None:
            seen = _are_views(options, checkpoint, wants, spec, groups, found, cast, stream)
        return OffloadPlan(
            spec.name,
            spec.budget_nbytes + spec.reserve_nbytes,
            found,
            tuple(groups),
            tuple(sizes),
            stream,
            load.peak_nbytes,
            cache_nbytes,
            activations,
            spec.reserve_nbytes,
            host=host,
            host_nbytes=sum(size.read_nbytes for size in sizes if size.name in host),
            views=seen.views,
            unaligned=seen.unaligned,
            mappable=seen.mappable,
            cached=_is_cached(options, spec, found),
            notes=tuple(notes),
            tokens=tokens,
            cached_tokens=cached_tokens,
        )

    def fitted(chunk_nbytes: int | None, room: int, reading: Reading) -> OffloadPlan | int:
        """The same with read-ahead, or read like this where the host has not the memory."""
        plan = made(chunk_nbytes, room, "ahead")
        if isinstance(plan, int) or _has_ahead(plan, spec, held_nbytes - beside_nbytes):
            return plan
        return made(chunk_nbytes or _EXACT_CHUNK_NBYTES, room, reading)

    chunks = [options.chunk_nbytes] if options.chunk_nbytes else _CHUNKS
    # what is read past the page cache takes memory where it is unaligned
    ways: list[tuple[int | None, Reading]] = [(n, "direct") for n in chunks]
    for chunk_nbytes, reading in [*ways, (chunks[-1], "exact")]:
        plan = fitted(chunk_nbytes, room, reading)
        if isinstance(plan, OffloadPlan):
            _check_host(plan, spec)
            return plan
    needed = room
    while isinstance(plan, int):
        needed += plan
        plan = fitted(chunks[-1], needed, "exact")
    largest = sorted(((size.name, size.nbytes) for size in sizes), key=lambda each: -each[1])
    beside = [("the KV cache", cache_nbytes), (f"activations of {tokens} tokens", activations)]
    raise PlanInfeasibleError(
        spec.name,
        needed + cache_nbytes + activations,
        room + cache_nbytes + activations,
        limit=f"{limited_by}, with layers that stream",
        largest=[*(each for each in beside if each[1]), *largest[:6]],
        reason="a slot holds the largest layer, and what cannot stream stays"
        + ("; others hold as many experts as a token chooses" if plan.residency.experts else ""),
    )


def least_scratch_nbytes(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    groups: Sequence[Group],
    sizes: Sequence[LayerSize],
    cast: CastChoice,
) -> int:
    """What streaming takes of a device beside slots where there is the least room."""
    found = choose(sizes, least(sizes))
    if found is None or not (found.streams or found.experts):
        return 0
    chunk_nbytes = options.chunk_nbytes or LEAST_CHUNK_NBYTES
    stream = _streamed(options, checkpoint, wants, spec, groups, found, cast, chunk_nbytes)
    return stream.devices[0].scratch_nbytes


def engine_of(options: Options) -> CastChoice:
    """Which cast engine streams."""
    return "llvm" if options.cast == "auto" else options.cast


def streamed_from(
    made: OffloadPlan,
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
) -> OffloadPlan:
    """The same plan, with what streams from the files of a checkpoint that has it elsewhere."""
    assert made.stream is not None
    chunk_nbytes, cast = made.stream.chunk_nbytes, engine_of(options)
    rest = (options, checkpoint, wants, spec, made.groups, made.residency, cast)
    stream = _streamed(*rest, chunk_nbytes, reading_of(made.stream))
    return replace(made, stream=stream, **_are_views(*rest, stream)._asdict())


def _has_ahead(made: OffloadPlan, spec: DeviceSpec, more_nbytes: int) -> bool:
    """Whether the host has the memory for what the kernel reads ahead of passes.

    Args:
        made: the plan.
        spec: the device.
        more_nbytes: what the host has more than is free now, beside the plan.
    """
    if made.stream is None:
        return True
    free = spec.free_nbytes
    taken = made.needed_nbytes - made.reserve_nbytes + made.host_nbytes - more_nbytes
    if not spec.info.shared_memory:
        free, taken = free_host_nbytes(), made.stream.process_nbytes + made.host_nbytes
        free = None if free is None else free - overhead_nbytes(free)
    return free is None or free - taken >= ahead_nbytes(made.stream)


def _check_host(made: OffloadPlan, spec: DeviceSpec) -> None:
    """Raise PlanInfeasibleError where the host has not what its part of the layers takes."""
    free = free_host_nbytes()
    if not made.host or free is None:
        return
    beside = made.needed_nbytes if spec.info.shared_memory else 0
    if made.host_nbytes + beside + overhead_nbytes(free) > free:
        raise PlanInfeasibleError(
            "host",
            made.host_nbytes + beside + overhead_nbytes(free),
            free,
            limit="free memory",
            largest=[("layers in host memory (host=)", made.host_nbytes), (spec.name, beside)],
        )


def _held(sizes: Sequence[LayerSize], found: Residency, room_nbytes: int) -> tuple[str, ...]:
    """What host memory keeps: layers, for each pass reads them, and in what is left experts."""
    layers = held(sizes, found.streams, room_nbytes)
    taken = sum(size.read_nbytes for size in sizes if size.name in layers)
    return layers + held(sizes, found.experts, room_nbytes - taken)


def _streamed(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    groups: Sequence[Group],
    found: Residency,
    cast: CastChoice,
    chunk_nbytes: int | None,
    reading: Reading = "ahead",
) -> Plan:
    """Plan what streams: its casts and its staging. The slots hold it, so no budget does."""
    by_name = {group.name: group for group in groups}
    layers = [[_new(wants[at], spec.name) for at in by_name[name].wants] for name in found.streams]
    for name in found.experts:
        layers += _experts(by_name[name], wants, spec.name)
    mine = TensorRequests.of(checkpoint, [want for layer in layers for want in layer])
    if options.page_cache == "auto":
        # passes come again: a file that fits is read through the page cache, others are not kept
        cached = _is_cached(options, spec, found)
        options = replace(options, page_cache="keep" if cached else "drop")
    if chunk_nbytes is not None:
        options = replace(options, chunk_nbytes=chunk_nbytes)
    endless = replace(spec, budget_nbytes=ENDLESS_NBYTES, host_free_nbytes=None)
    made = _planned(options, checkpoint, mine, endless, cast, reading)
    names = [[want.name for want in layer] for layer in layers]
    return replace(made, placements=_in_order(made.placements, names))


def _load_of(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    groups: Sequence[Group],
    found: Residency,
    cast: CastChoice,
    room_nbytes: int,
) -> DevicePlan:
    """Plan the load of what stays, in so much room; with as little as it takes if that is more."""
    stays = {*found.stays}
    kept = [_new(wants[at], spec.name) for g in groups if g.name in stays for at in g.wants]
    mine = TensorRequests.of(checkpoint, kept)
    while True:
        roomy = replace(spec, budget_nbytes=room_nbytes)
        try:
            return _planned(options, checkpoint, mine, roomy, cast).devices[0]
        except PlanInfeasibleError as error:
            if error.needed_nbytes <= room_nbytes:  # it is not the room that is too small
                raise
            room_nbytes = error.needed_nbytes


def _planned(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    cast: CastChoice,
    reading: Reading = "ahead",
) -> Plan:
    """Plan a load within the budget alone: what is free, a cache and a reserve are counted."""
    alone = replace(options, cache=None, reserve_nbytes=0)
    free = replace(spec, free_nbytes=None, reserve_nbytes=0)
    return alone.plan(alone.request(checkpoint, wants, [free], cast), reading=reading)


def _experts(group: Group, wants: TensorRequests, device: str) -> list[list[TensorRequest]]:
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


def _is_cached(options: Options, spec: DeviceSpec, found: Residency) -> bool:
    """Whether the page cache of this host has room for what streams, beside what is to be held."""
    if options.page_cache != "auto":
        return options.page_cache == "keep"
    free = free_host_nbytes()
    if free is None:
        return True
    taken = found.taken_nbytes if spec.info.shared_memory else 0
    return found.file_nbytes + taken + MARGIN_NBYTES <= free


def _are_views(
    options: Options,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    groups: Sequence[Group],
    found: Residency,
    cast: CastChoice,
    stream: Plan,
) -> Viewable:
    """Whether the device computes on the files of all that streams; see `can_be_views`.

    Not where the host has little memory, and files that are not in the page cache: they are read
    past it.
    """
    if not spec.info.maps or options.reader not in ("auto", "mmap"):
        return Viewable()
    if not stream.ahead and "direct" in stream.readers:
        return Viewable()
    mapped = replace(options, residence="auto")
    made = _streamed(mapped, checkpoint, wants, spec, groups, found, cast, None)
    return can_be_views(made, checkpoint)


def _new(want: TensorRequest, device: str) -> TensorRequest:
    """The same for memory of ours."""
    return replace(want, held=None, reusable_nbytes=None, device=device)


def _in_order(placements: Placements, layers: Iterable[Sequence[str]]) -> Placements:
    """Placements by layer, and of each layer in the order of the files."""
    place = {name: at for at, name in enumerate(placements.names)}
    order = [at for names in layers for at in sorted(place[name] for name in names)]
    return placements.chosen(order)
