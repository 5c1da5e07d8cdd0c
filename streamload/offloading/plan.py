"""Plan an offload: which layers of a model stay on a device and which stream. Moves no data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate

from streamload.checkpoint.open import Checkpoint
from streamload.core.chart import Shown
from streamload.core.dtypes import DType
from streamload.core.memory import available_system_nbytes, overhead_nbytes
from streamload.core.tensors import region_of
from streamload.core.units import format_bytes, format_table, round_up
from streamload.errors import CheckpointError, Fit, PlanInfeasibleError, StreamloadError, printed
from streamload.files.page_cache import MARGIN_NBYTES, free_host_nbytes
from streamload.loading.options import Options
from streamload.loading.place import engine_of
from streamload.loading.prepare import (
    MOST_THREADS,
    Reading,
    ahead_nbytes,
    plan_within,
    reading_of,
    request_of,
)
from streamload.offloading.layers import (
    ROOT,
    SLOT_ALIGNMENT_NBYTES,
    LayerGroup,
    LayerSize,
    Residency,
    choose,
    finer_layers,
    held,
    least,
    rows_of_experts,
    worth_streaming,
)
from streamload.planning.fit import CacheRoom
from streamload.planning.kv_cache import (
    CUDA_WORKSPACE_NBYTES,
    HOST_WORKSPACE_NBYTES,
    CacheRequest,
    KvCache,
    activation_nbytes,
)
from streamload.planning.moves import DeviceSpec, TensorRequest, TensorRequests
from streamload.planning.plan import SEGMENTS, DevicePlan, Plan, load_nbytes

# A note for layers that the CPU can use as stored, and that fit into the page cache.
_MAPPED_IS_FASTER = (
    'residence="mapped" is faster while the page cache holds the files: a load with it leaves all '
    "weights there, of which the budget counts nothing (a pass took 0.55 of the time, a token 0.78)"
)


@dataclass(frozen=True, slots=True)
class OffloadPlan(Shown):
    """Which layers stay on a device, which stream through its slots, and the memory of both.

    Attributes:
        device: name of the device.
        budget_nbytes: budget of the device, as given.
        residency: which layers stay and which stream.
        groups: the layers, in the order in which they run.
        sizes: sizes of each layer in ``groups``.
        stream: the plan of streaming, in the order of the layers, and then of the experts; None if
            all layers stay.
        load_nbytes: peak device bytes of loading the resident layers, before there are slots.
        cache_nbytes: room for the KV cache.
        activation_nbytes: room for activations.
        reserve_nbytes: bytes of the budget that stay free, as asked.
        host: names of the layers, or of the layers of experts, that come from host memory.
        host_nbytes: bytes of host memory for them, as in the files.
        views: whether the device computes on the files: slots are mapped pages, and no memory.
        unaligned: a tensor whose start in its file prevents ``views``; "" for none.
        mappable: whether a load could leave the layers in their files, to compute on these.
        cached: whether the page cache has room for all that streams, so that only the first pass
            reads the disk.
        notes: for the user, one sentence each.
        tokens: most tokens of a pass that there is room for; None: no room for activations.
        cached_tokens: most tokens of the KV cache, of all sequences together.
    """

    device: str
    budget_nbytes: int
    residency: Residency
    groups: tuple[LayerGroup, ...]
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
        """Indices in ``stream.placements`` for each layer that streams, then for each expert."""
        by_name = {group.name: group for group in self.groups}
        counts = [len(by_name[name].wants) for name in self.residency.streams]
        for name in self.residency.experts:
            counts += [by_name[name].parts] * by_name[name].experts
        return [range(end - n, end) for end, n in zip(accumulate(counts), counts, strict=True)]

    @property
    def experts(self) -> list[int]:
        """Number of experts of each layer with cached experts."""
        count = {group.name: group.experts for group in self.groups}
        return [count[name] for name in self.residency.experts]

    @property
    def token_nbytes(self) -> int:
        """File bytes of the experts that one token uses, in all layers with cached experts."""
        cached = {*self.residency.experts}
        sizes = [size for size in self.sizes if size.name in cached]
        return sum(size.read_nbytes * size.chosen // size.experts for size in sizes)

    @property
    def read_nbytes(self) -> int:
        """File bytes that a pass of one token reads, with all its experts."""
        return self.residency.pass_nbytes + self.token_nbytes

    def tensors_of(self, layers: Collection[str], wants: TensorRequests) -> set[str]:
        """Return names of the checkpoint's tensors that the named layers are read from."""
        found = (at for group in self.groups if group.name in layers for at in group.wants)
        return {row.tensor for at in found for row in wants[at].source}

    @property
    def places(self) -> dict[str, int]:
        """Bytes by place ("resident", "disk", ...) of weights, without embeddings read by rows."""
        rest = self.residency.file_nbytes - self.host_nbytes
        found = {"resident": self.residency.resident_nbytes, "host memory": self.host_nbytes}
        return found | {"page cache": rest * self.cached, "disk": rest * (not self.cached)}

    @property
    def bounded(self) -> list[str]:
        """Names of the layers that stay, and would stream under a smaller budget."""
        worth = worth_streaming(self.sizes)
        stays = {*self.residency.stays}
        return [size.name for size in self.sizes if size.name in stays and size.name in worth]

    @property
    def scratch_nbytes(self) -> int:
        """Device bytes of scratch memory for streaming, besides the slots."""
        return self.stream.devices[0].scratch_nbytes if self.stream else 0

    @property
    def passes_nbytes(self) -> int:
        """Process memory of slots and staging, which passes take besides weights that stay."""
        if self.stream is None:
            return 0
        there, nbytes = self.stream.devices[0], self.stream.host_nbytes
        if there.shared_memory and there.charged:
            nbytes += there.scratch_nbytes + (0 if self.views else self.residency.arena_nbytes)
        return nbytes

    @property
    def peak_nbytes(self) -> int:
        """Device bytes of weights and slots, or of loading resident layers if that takes more."""
        return max(self.residency.taken_nbytes + self.scratch_nbytes, self.load_nbytes)

    @property
    def needed_nbytes(self) -> int:
        """Bytes of the budget taken in all: `peak_nbytes`, KV cache, activations, reserve."""
        return self.peak_nbytes + self.cache_nbytes + self.activation_nbytes + self.reserve_nbytes

    def seconds(self, rate: float) -> float:
        """Return seconds that the transfers of a pass of one token take, at ``rate`` bytes/s."""
        return self.read_nbytes / rate

    def to_json(self) -> str:
        """Return sizes and residency as a JSON object."""
        names = (
            *("device", "budget_nbytes", "peak_nbytes", "scratch_nbytes", "cache_nbytes"),
            *("activation_nbytes", "reserve_nbytes", "needed_nbytes", "token_nbytes", "views"),
            *("host", "places"),
        )
        found = {name: getattr(self, name) for name in names}
        return json.dumps(found | asdict(self.residency), separators=(",", ":"))

    def __str__(self) -> str:
        """A table of the layers that stay and stream, with their memory."""
        found = self.residency
        if not found.absent:
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
        """A list: a note if a load that leaves weights in mapped files would be faster."""
        return [_MAPPED_IS_FASTER] if self.mappable and self.cached else []

    __repr__ = __str__


def _listed(names: Sequence[str]) -> tuple[str, str]:
    shown = ", ".join(name or ROOT for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return str(len(names)), shown


#: Views begin at multiples of this in their files, as tensors of torch's allocator do in memory:
#: the result of a matrix product depends on the address of its weights.
ALIGNMENT_NBYTES = 64

#: The shortest chunk of layers to try.
LEAST_CHUNK_NBYTES = 2**17
# Lengths of chunks of layers, in the order of trials.
_CHUNKS = (None, 2 * 2**20, 2**19, LEAST_CHUNK_NBYTES)
# The longest without read-ahead: no read is longer.
_EXACT_CHUNK_NBYTES = 2**21
_LANES = 16  # most threads that read a layer together, without the interpreter
_SEGMENT_NBYTES = 2**21  # allocators with segments round large blocks up to a multiple
#: A budget without a limit.
ENDLESS_NBYTES = 2**62
_FINER_TRIES = 2  # smaller layers to suggest: modules in layers, and modules in those


@dataclass(frozen=True)
class Problem:
    """A model to offload to a device, or a share of it, and the constraints of the plan.

    Attributes:
        spec: the device; its budget is without the reserve.
        groups: the layers, in the order in which they run.
        has_layers: whether some layers, with their KV cache, are among the parameters.
        held_nbytes: device bytes that the model frees before the load.
    """

    options: Options
    checkpoint: Checkpoint
    wants: TensorRequests
    spec: DeviceSpec
    groups: Sequence[LayerGroup] = ()
    has_layers: bool = True
    has_head: bool = True
    held_nbytes: int = 0
    notes: Sequence[str] = ()

    def is_plain(self, at: int) -> bool:
        """Whether a parameter's elements are whole bytes, and no option changes their values."""
        want, src = self.wants[at], self.wants.srcs[at]
        changed = any(row.tensor in self.options.changes.by_tensor for row in want.source)
        return src.bits >= 8 and not src.is_packed and not changed

    # --- sizes --------------------------------------------------------------------------------

    @property
    def dsts(self) -> Sequence[DType]:
        return self.wants.dsts(self.options.policy, self.spec.native_bf16)

    @cached_property
    def nbytes(self) -> list[int]:
        return self.wants.nbytes(self.options.policy, self.spec.native_bf16)

    @cached_property
    def sizes(self) -> list[LayerSize]:
        each, nbytes = zip(self.wants, self.wants.srcs, strict=True), self.nbytes
        read = [src.nbytes(math.prod(want.shape)) for want, src in each]

        def in_slot(numbers: Sequence[int], share: int = 1) -> int:
            return sum(round_up(nbytes[at] // share, SLOT_ALIGNMENT_NBYTES) for at in numbers)

        return [
            LayerSize(
                name=group.name,
                kind=group.kind,
                nbytes=in_slot(group.wants),
                resident_nbytes=sum(self.spec.resident(nbytes[at]) for at in group.wants),
                read_nbytes=sum(read[at] for at in group.wants),
                experts=group.experts,
                chosen=group.chosen,
                expert_nbytes=in_slot(
                    group.wants[: group.parts], 1 if group.apart else max(group.experts, 1)
                ),
            )
            for group in self.groups
        ]

    @cached_property
    def cache(self) -> KvCache | None:
        """The KV cache to leave room for: of the options, else of ``tokens``; None: no room."""
        asked, config, path = self.options.cache, self.checkpoint.config, self.checkpoint.path
        if asked is not None:
            return KvCache.of(config, asked, path=path)
        if self.options.tokens is None or config.get("use_cache") is False:
            return None
        try:
            return KvCache.of(config, CacheRequest(self.options.tokens), path=path)
        except CheckpointError:  # a model without a cache, or one of an unknown size
            return None

    @cached_property
    def cache_nbytes(self) -> int:
        cache = self.cache if self.has_layers else None
        policy, wants = self.options.policy, self.wants
        if cache is None:
            return 0
        room = CacheRoom.of(self.checkpoint, wants, policy, cache, self.spec.native_bf16)
        room = room.placed(self.checkpoint, wants, [self.spec.name] * len(wants), policy)
        return room.nbytes(self.spec, cache.request.context)

    @cached_property
    def activation_nbytes(self) -> int:
        """Device bytes of activations in a pass of ``tokens``; 0 if that is None."""
        if self.options.tokens is None:
            return 0
        wide = max((dst.itemsize for dst in self.dsts if dst.kind == "float"), default=2)
        reused = self.spec.info.allocator in SEGMENTS
        found = activation_nbytes(
            *(self.checkpoint.config, self.options.tokens, wide),
            path=self.checkpoint.path,
            reused=reused,
            has_head=self.has_head,
        )
        return found + (CUDA_WORKSPACE_NBYTES if reused else HOST_WORKSPACE_NBYTES)

    @cached_property
    def _load_nbytes(self) -> int:
        each = zip(self.dsts, self.wants, self.nbytes, strict=True)
        objects = self.spec.objects.of((dst.name, want.shape, n, 1) for dst, want, n in each)
        count = len(self.wants)
        return load_nbytes(count) + objects + count * self.spec.info.costs.kernel_nbytes

    @property
    def least_scratch_nbytes(self) -> int:
        """Device bytes of scratch memory, besides slots, if as few layers stay as possible."""
        found = choose(self.sizes, least(self.sizes))
        if found is None or not (found.streams or found.experts):
            return 0
        chunk_nbytes = self.options.chunk_nbytes or LEAST_CHUNK_NBYTES
        return self._streamed(found, chunk_nbytes).devices[0].scratch_nbytes

    # --- planning -----------------------------------------------------------------------------

    def decide(self) -> OffloadPlan:
        """Return the plan with the cheapest passes: as many layers stay as fit."""
        spec, options = self.spec, self.options
        rest = self.cache_nbytes + self.activation_nbytes
        room, limited_by = spec.budget_nbytes, spec.limit
        if spec.free_nbytes is not None:
            taken = self._load_nbytes if spec.info.shared_memory else 0
            free = spec.free_nbytes + self.held_nbytes - taken
            room, limited_by = min((room, limited_by), (free, spec.free_limit))
        room -= rest
        chunks = [options.chunk_nbytes] if options.chunk_nbytes else _CHUNKS
        # unaligned direct reads take memory
        ways: list[tuple[int | None, Reading]] = [(n, "direct") for n in chunks]
        for chunk_nbytes, reading in [*ways, (chunks[-1], "exact")]:
            plan = self._fitted(room, chunk_nbytes, reading)
            if isinstance(plan, OffloadPlan):
                _check_host(plan, spec)
                return plan
        needed = room
        while isinstance(plan, int):
            needed += plan
            plan = self._fitted(needed, chunks[-1], "exact")
        named = [(each.name or ROOT, each.nbytes) for each in self.sizes]
        named.append(("scratch", plan.peak_nbytes - plan.residency.taken_nbytes))
        largest = sorted(named, key=lambda each: -each[1])
        experts = "; others hold as many experts as a token chooses"
        others = [
            ("the KV cache", self.cache_nbytes),
            (f"activations of {self.options.tokens} tokens", self.activation_nbytes),
        ]
        raise PlanInfeasibleError(
            spec.name,
            needed + rest,
            room + rest,
            limit=f"{limited_by}, with layers that stream",
            largest=[*(each for each in others if each[1]), *largest[:6]],
            reason="a slot holds the largest layer, and what cannot stream stays"
            + (experts if plan.residency.experts else ""),
        )

    def _fitted(
        self, room_nbytes: int, chunk_nbytes: int | None, reading: Reading
    ) -> OffloadPlan | int:
        """Return a plan with read-ahead if the host has memory for that, else by ``reading``.

        Returns the bytes that are missing if nothing fits into ``room_nbytes`` of the device.
        ``chunk_nbytes``: most bytes read and cast at once; None: by the options.
        """
        plan = self._within(room_nbytes, chunk_nbytes, "ahead")
        if isinstance(plan, int) or plan.stream is None:
            return plan
        free = self.spec.free_nbytes
        taken = plan.needed_nbytes - plan.reserve_nbytes + plan.host_nbytes
        taken += self._load_nbytes - self.held_nbytes
        pools = [(free, taken)] if self.spec.info.shared_memory else []
        if not self.spec.info.in_process:
            free, taken = free_host_nbytes(), plan.stream.process_nbytes + plan.host_nbytes
            pools.append((None if free is None else free - overhead_nbytes(free), taken))
        ahead = ahead_nbytes(plan.stream)
        if all(free is None or free - taken >= ahead for free, taken in pools):
            return plan
        return self._within(room_nbytes, chunk_nbytes or _EXACT_CHUNK_NBYTES, reading)

    def _within(
        self, room_nbytes: int, chunk_nbytes: int | None, reading: Reading
    ) -> OffloadPlan | int:
        """Return a plan within ``room_nbytes`` of the device, or the number of missing bytes."""
        sizes, spec = self.sizes, self.spec
        scratch, limit, stream = 0, room_nbytes, None
        while True:  # the layers that stay set the size of scratch, and that sets which stay
            lowest = least(sizes) + scratch
            found = choose(sizes, max(limit - scratch, 0))
            if found is None:
                return max(lowest - room_nbytes, 1)
            stream = None
            if found.streams or found.experts:
                stream = self._streamed(found, chunk_nbytes, reading)
                if stream.devices[0].scratch_nbytes > scratch:
                    scratch = stream.devices[0].scratch_nbytes
                    limit = min(max(limit, least(sizes) + scratch), room_nbytes)
                    continue
            load = self._load(found, room_nbytes)
            found = replace(found, resident_nbytes=load.resident_nbytes)
            if spec.info.allocator in SEGMENTS and found.arena_nbytes:
                arena = round_up(found.arena_nbytes, _SEGMENT_NBYTES)
                if found.experts:
                    found = replace(found, pad_nbytes=arena - found.arena_nbytes)
                else:
                    each = arena // found.slots // SLOT_ALIGNMENT_NBYTES * SLOT_ALIGNMENT_NBYTES
                    found = replace(found, slot_nbytes=each)
            streaming = stream.devices[0].scratch_nbytes if stream else 0
            over = max(found.taken_nbytes + streaming, load.peak_nbytes) - room_nbytes
            if over <= 0:
                break
            if limit <= lowest:
                return over
            limit = max(limit - over, lowest)  # an allocator may round a few bytes up to many
        # host memory keeps layers first, which each pass reads, then experts
        host = held(sizes, found.streams, self.options.host_nbytes)
        taken = sum(size.read_nbytes for size in sizes if size.name in host)
        host += held(sizes, found.experts, self.options.host_nbytes - taken)
        cache = self.cache if self.cache_nbytes else None
        made = OffloadPlan(
            device=spec.name,
            budget_nbytes=spec.budget_nbytes + spec.reserve_nbytes,
            residency=found,
            groups=tuple(self.groups),
            sizes=tuple(sizes),
            stream=stream,
            load_nbytes=load.peak_nbytes,
            cache_nbytes=self.cache_nbytes,
            activation_nbytes=self.activation_nbytes,
            reserve_nbytes=spec.reserve_nbytes,
            host=host,
            host_nbytes=sum(size.read_nbytes for size in sizes if size.name in host),
            cached=self._is_cached(found),
            notes=tuple(self.notes),
            tokens=self.options.tokens,
            cached_tokens=cache.request.context * cache.request.batch if cache else 0,
        )
        return self._over(stream, made) if stream else made

    def streamed_from(self, made: OffloadPlan, checkpoint: Checkpoint) -> OffloadPlan:
        """Return ``made`` for a checkpoint with its tensors in other files, as in host memory."""
        assert made.stream is not None
        there = replace(self, checkpoint=checkpoint, groups=made.groups)
        chunk_nbytes, reading = made.stream.chunk_nbytes, reading_of(made.stream)
        return there._over(there._streamed(made.residency, chunk_nbytes, reading), made)

    # --- plans of layers that stream, and of layers that stay -----------------------------------

    def _streamed(
        self, found: Residency, chunk_nbytes: int | None, reading: Reading = "ahead"
    ) -> Plan:
        """Return the plan to read and cast the layers that stream, under an unlimited budget."""
        by_name = {group.name: group for group in self.groups}
        layers = [self._requests(by_name[name].wants) for name in found.streams]
        for name in found.experts:
            layers += self._experts(by_name[name])
        options = self.options
        if options.page_cache == "auto":
            # passes repeat: the page cache keeps files if they fit
            options = replace(options, page_cache="keep" if self._is_cached(found) else "drop")
        if chunk_nbytes is not None:
            options = replace(options, chunk_nbytes=chunk_nbytes)
        endless = replace(self.spec, budget_nbytes=ENDLESS_NBYTES, host_free_nbytes=None)
        wants = [want for layer in layers for want in layer]
        most_threads = _LANES if self.spec.info.casts else MOST_THREADS
        made = self._planned(options, wants, endless, reading, most_threads)
        place = {name: at for at, name in enumerate(made.placements.names)}
        # by layer, and of each layer in the order of the files
        order = [at for layer in layers for at in sorted(place[want.name] for want in layer)]
        return replace(made, placements=made.placements.chosen(order))

    def _load(self, found: Residency, room_nbytes: int) -> DevicePlan:
        """Return the plan to load the layers that stay, in ``room_nbytes`` or the least needed."""
        stays = {*found.stays}
        wants = self._requests([at for g in self.groups if g.name in stays for at in g.wants])
        while True:
            roomy = replace(self.spec, budget_nbytes=room_nbytes)
            try:
                return self._planned(self.options, wants, roomy).devices[0]
            except PlanInfeasibleError as error:
                if error.needed_nbytes <= room_nbytes:  # another limit than the room
                    raise
                room_nbytes = error.needed_nbytes

    def _planned(
        self,
        options: Options,
        wants: Sequence[TensorRequest],
        spec: DeviceSpec,
        reading: Reading = "ahead",
        most_threads: int = MOST_THREADS,
    ) -> Plan:
        """Return the plan of a load within the budget of ``spec``, without KV cache and reserve."""
        alone = replace(options, cache=None, reserve_nbytes=0)
        free = replace(spec, free_nbytes=None, reserve_nbytes=0)
        mine = TensorRequests.of(self.checkpoint, wants)
        request = request_of(alone, self.checkpoint, mine, [free], engine_of(alone.cast))
        return plan_within(alone, request, reading=reading, most_threads=most_threads)

    def _requests(self, numbers: Sequence[int]) -> list[TensorRequest]:
        return [
            self.wants[at]._replace(held=None, reusable_nbytes=None, device=self.spec.name)
            for at in numbers
        ]

    def _experts(self, group: LayerGroup) -> list[list[TensorRequest]]:
        wants = self._requests(group.wants)
        if group.apart:
            return [wants[at : at + group.parts] for at in range(0, len(wants), group.parts)]
        rows = [(want, rows_of_experts(want, group.experts) or []) for want in wants]
        return [
            [
                want._replace(name=f"{want.name}[{n}]", shape=want.shape[1:], source=sources[n])
                for want, sources in rows
            ]
            for n in range(group.experts)
        ]

    def _is_cached(self, found: Residency) -> bool:
        if self.options.page_cache != "auto":
            return self.options.page_cache == "keep"
        free = free_host_nbytes()
        taken = found.taken_nbytes if self.spec.info.shared_memory else 0
        return free is None or found.file_nbytes + taken + MARGIN_NBYTES <= free

    def _over(self, stream: Plan, made: OffloadPlan) -> OffloadPlan:
        """Return ``made`` with a plan of `_streamed`, and whether it can compute on the files.

        It cannot if the host has so little memory that files are read bypassing the page cache.
        """
        made = replace(made, stream=stream, views=False, unaligned="", mappable=False)
        past = not stream.ahead and "direct" in stream.readers
        if not self.spec.info.maps or past or self.options.reader not in ("auto", "mmap"):
            return made
        mapped = replace(self, options=replace(self.options, residence="auto"))
        unaligned, movable = "", True
        for _, source, kind, *_ in mapped._streamed(made.residency, None).placements:
            if kind.cast != "mapped":
                return made
            (row,) = source
            info = self.checkpoint.tensors[row.tensor]
            start = region_of(info, row).start
            if start % ALIGNMENT_NBYTES:
                unaligned = unaligned or info.name
            if (start - info.start) % ALIGNMENT_NBYTES or info.nbytes % ALIGNMENT_NBYTES:
                movable = False
        views, unaligned = not unaligned, unaligned if movable else ""
        return replace(made, views=views, unaligned=unaligned, mappable=True)


def decide_by_layers(
    layers: Sequence[str], grouped: Callable[[Sequence[str]], Problem]
) -> OffloadPlan:
    """Return the plan of ``grouped(layers)``; if none fits, the error suggests smaller layers."""
    problem = grouped(layers)
    try:
        return problem.decide()
    except PlanInfeasibleError as error:
        fits: list[Fit] = []
        for _ in range(_FINER_TRIES):
            patterns = [*finer_layers(problem.groups, problem.wants, problem.nbytes)]
            if fits or not patterns:
                break
            with suppress(StreamloadError):
                problem = grouped(patterns)
                needed = format_bytes(problem.decide().needed_nbytes)
                said = repr(patterns if len(patterns) > 1 else patterns[0])
                fits = [Fit("layers", f"={said}", needed)]
        raise error.suggesting(fits) from None


def _check_host(made: OffloadPlan, spec: DeviceSpec) -> None:
    free = free_host_nbytes()
    if not made.host or free is None:
        return
    others = made.needed_nbytes if spec.info.shared_memory else 0
    if not spec.info.charged:  # a cgroup's rest is for the layers alone
        others = max(others - (available_system_nbytes() - free), 0)
    needed = made.host_nbytes + others + overhead_nbytes(free)
    if needed > free:
        largest = [("layers in host memory (host=)", made.host_nbytes), (spec.name, others)]
        raise PlanInfeasibleError("host", needed, free, limit="free memory", largest=largest)
