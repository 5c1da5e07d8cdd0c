"""Decide a load: read its options, look at the model and the devices, and plan.

No data is read, and the model stays as it is.

Pages that a disk is filling are locked: they count in a memory cgroup, and cannot be reclaimed. The
kernel reads ahead of every thread, 8 to 16 MiB on some disks, so a load that leaves less than that
free is killed. If a plan leaves little, the kernel reads nothing ahead: cold files are read past
the page cache, and others in pieces of 256 KiB. reader="mmap" maps them in such pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.core.interrupt import nothing
from streamload.core.location import Location, Url
from streamload.core.memory import STAGING, available_cpus, canonical_device
from streamload.core.pagemap import reusable_nbytes
from streamload.core.system import address_space_nbytes
from streamload.core.units import format_bytes
from streamload.devices.base import NO_SWAP, Framework, Parameter, Swap
from streamload.devices.names import default_framework, framework, framework_of
from streamload.errors import Fit, PlanInfeasibleError, ResidenceError, Suggestion
from streamload.files.folder import REMOTE_KINDS, ReaderChoice, ReaderKind, choose_reader, is_of_hub
from streamload.files.header import Header
from streamload.files.page_cache import PageCacheKind
from streamload.files.reader import Fetch, thread_nbytes
from streamload.loading.options import Options
from streamload.loading.place import (
    Devices,
    host_engine,
    host_room_nbytes,
    on_unstored,
    open_devices,
)
from streamload.planning.kv_cache import KvCache
from streamload.planning.match import Match, ModelParameters, wants_of
from streamload.planning.match import match as match_parameters
from streamload.planning.moves import DeviceSpec, Moves, TensorRequest, TensorRequests, kept_free
from streamload.planning.plan import Plan
from streamload.planning.planner import DEFAULT_CHUNK_NBYTES, CastChoice, PlanRequest, make_plan
from streamload.planning.quant_policy import (
    NO_QUANT,
    QuantPolicy,
    keep_blocks,
    quantised,
    said_of_dense,
)
from streamload.planning.sources import Found, Source
from streamload.streaming.memory_watch import process_nbytes

#: "ahead" lets the kernel read ahead. The others do not: "direct" reads cold files past the page
#: cache, which takes memory for what is unaligned, "exact" reads through it.
Reading = Literal["ahead", "direct", "exact"]

# Page cache that the kernel may fill at once per thread, and at least (docs/measurements.md).
_AHEAD_THREAD_NBYTES = 32 * 2**20
_LEAST_AHEAD_NBYTES = 64 * 2**20


def ahead_nbytes(plan: Plan) -> int:
    """Return the most bytes of page cache that read-ahead may fill at once while a plan runs."""
    if not {"mmap", "pread", "cache"}.intersection(plan.readers) or not plan.placements:
        return 0
    return max(plan.threads * _AHEAD_THREAD_NBYTES, _LEAST_AHEAD_NBYTES)


def reading_of(plan: Plan) -> Reading:
    """Return how a plan reads files: with read-ahead, past the page cache, or in exact pieces."""
    return "ahead" if plan.ahead else "direct" if "direct" in plan.readers else "exact"


def reader_choice(
    header: Header,
    reader: ReaderKind,
    page_cache: PageCacheKind,
    reading: Reading,
    *,
    whole_slots: bool,
    fetch: Fetch = "stream",
) -> ReaderChoice:
    """Choose the reader of a file, with the reason; `whole_slots`: it fills page-aligned slots."""
    if fetch == "cache" and is_of_hub(header.path):
        return choose_reader(header.path, "cache")
    if header.views and not isinstance(header.path, Url):
        views = "views with strides" if not header.parts else "in chunks of several files"
        return ReaderChoice("pread", f"some of its tensors are {views}")
    choice = choose_reader(header.path, reader, page_cache=page_cache, whole_slots=whole_slots)
    if reading == "ahead" or choice.kind != "mmap" or reader == "mmap":
        return choice
    return replace(choice, kind="pread", reason="not mapped: the host has little memory")


# Each is from docs/measurements.md, "Loading". With more threads, copies to CUDA fall behind.
MOST_THREADS = 8
# In chunks of 4 KiB, GPT-2 takes over 40 s from a server, and 25 s into nf4, not 0.22.
_LEAST_CHUNK_NBYTES = 2**16
# Past the page cache fewer and longer reads are better, with the same bytes under way.
_DIRECT_THREADS = 2
_DIRECT_CHUNK_NBYTES = 16 * 2**20
# To open another device's driver takes 14 to 16 MB of the host, and twice that with its compiler.
_WIDER_NBYTES = 64 * 2**20


def check_budget(options: Options, names: Iterable[str]) -> None:
    """Raise ValueError if the budget names a device that is not in ``names``."""
    known = {canonical_device(name) for name in names}
    unknown = [name for name in options.budget.devices if name not in known]
    if unknown and options.device != "auto":
        raise ValueError(
            f"the budget names {', '.join(unknown)}; the load's devices are {', '.join(names)}"
        )


def wants_under(
    options: Options, checkpoint: Checkpoint, fill: Mapping[str, Source]
) -> TensorRequests:
    """Return a request for each source in ``fill``, or for each part of a quantized weight."""
    wants = wants_of(checkpoint, fill)
    if not options.quant:
        return wants
    formats = options.quant.formats(checkpoint, wants)
    return quantised(checkpoint, wants, formats, options.changes.by_tensor, policy=options.quant)


def specs_under(
    options: Options, specs: Iterable[DeviceSpec], *, alone: bool = False
) -> list[DeviceSpec]:
    """Return devices with `cast` and `reserve` applied to their abilities and budgets.

    `alone`: whether errors may not suggest another device.
    """
    specs = list(specs)
    casts, reserved = options.cast in ("auto", "device"), options.reserve_nbytes
    sharing = sum(spec.info.shared_memory for spec in specs)
    return [
        replace(
            spec,
            budget_nbytes=max(spec.budget_nbytes - reserved, 0),
            limit=spec.limit + kept_free(reserved),
            free_nbytes=_less(spec.free_nbytes, reserved),
            host_free_nbytes=_less(spec.host_free_nbytes, reserved * sharing),
            casts=spec.casts and casts,
            reserve_nbytes=reserved,
            alone=alone,
        )
        for spec in specs
    ]


def request_of(
    options: Options,
    checkpoint: Checkpoint,
    wants: Sequence[TensorRequest],
    specs: Sequence[DeviceSpec],
    cast: CastChoice,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> PlanRequest:
    """Return the request for a plan of a checkpoint under these options, for `plan`."""
    held = thread_nbytes(view for header in checkpoint.shards for view in header.views)
    cache, path = options.cache, checkpoint.path
    draft = Plan(
        path=str(path),
        placements=Moves(),
        devices=(),
        host_nbytes=0,
        host_budget_nbytes=options.budget.host_nbytes,
        chunk_nbytes=DEFAULT_CHUNK_NBYTES,
        slot_nbytes=DEFAULT_CHUNK_NBYTES,
        threads=1,
        readers=(),
        out_of_range=options.out_of_range,
        page_cache=options.page_cache,
        change_nbytes=options.changes.nbytes,
        change_thread_nbytes=options.changes.thread_nbytes + held,
    )
    return PlanRequest(
        checkpoint,
        draft,
        wants=wants,
        devices=specs,
        dtype=options.policy,
        cast=cast,
        tied=tied,
        cache=None if cache is None else KvCache.of(checkpoint.config, cache, path=path),
        residence=options.residence,
        mappable=[_is_mappable(options, header.path) for header in checkpoint.shards],
        changed=options.changes.by_tensor.keys(),
    )


def plan_within(
    options: Options,
    request: PlanRequest,
    free: int | None = None,
    reading: Reading = "ahead",
    most_threads: int = MOST_THREADS,
) -> Plan:
    """Plan within `free` host bytes (None: unknown), without read-ahead if they are few."""
    if free is not None and options.budget.host_nbytes > free:
        draft = replace(request.draft, host_budget_nbytes=free)
        request = replace(request, draft=draft, host_limit="free memory")

    def made(reading: Reading) -> Plan:
        try:
            return within(_reading(options, request, reading, most_threads))
        except PlanInfeasibleError as error:
            # of ranks, each has a part of the budget that the call states
            is_budget = error.device == STAGING and error.limit == "budget"
            if not is_budget or options.rank_cpus or error.needed_nbytes > (free or math.inf):
                raise
            raise error.suggesting([options.budget.with_host(error.needed_nbytes)]) from None

    def within(request: PlanRequest) -> Plan:
        found = make_plan(request)
        over = 0 if free is None else found.machine_nbytes - free
        if not 0 < over < found.host_nbytes:
            return found
        # the host holds more than staging: shorter chunks, or fewer threads
        draft = replace(request.draft, host_budget_nbytes=found.host_nbytes - over)
        return within(replace(request, draft=draft, host_limit="free memory"))

    found = made(reading)
    if free is None:
        return found
    taken = found.machine_nbytes
    if taken > free:  # what devices with memory of their own need of the host
        raise PlanInfeasibleError("host", taken, free, limit="free memory")
    maps = _maps_fit(options, found, request, taken)
    if free - taken >= ahead_nbytes(found) and maps:
        return found
    left = format_bytes(max(free - taken, 0))
    note = f"the kernel reads nothing ahead: the host would be left with {left}"
    if not maps:
        note = "no file is mapped: RLIMIT_AS does not leave the addresses"
    try:
        found = made("direct")
    except PlanInfeasibleError:  # what is unaligned takes memory
        found = made("exact")
    if found.machine_nbytes > free:
        found = made("exact")
    return replace(found, notes=(*found.notes, note))


def _maps_fit(options: Options, found: Plan, request: PlanRequest, taken_nbytes: int) -> bool:
    """Return whether a process's addresses are enough to map files while a plan runs."""
    addresses = address_space_nbytes()
    if addresses is None:
        return True
    pairs = [*zip(request.checkpoint.shards, found.readers, strict=True)]
    mapped = sum(d.mapped_nbytes for d in found.devices)
    if mapped < found.resident_nbytes:
        mapped += sum(header.file_nbytes for header, kind in pairs if kind == "mmap")
    if taken_nbytes + mapped <= addresses:
        return True
    if options.reader != "mmap" and not any(d.mapped_nbytes for d in found.devices):
        return False
    raise PlanInfeasibleError(
        "host",
        taken_nbytes + mapped,
        addresses,
        limit="rest of RLIMIT_AS",
        largest=[("files that are mapped", mapped)],
        would_fit=[Fit("reader", '="pread"')] if options.reader == "mmap" else (),
    )


def _reading(
    options: Options, request: PlanRequest, reading: Reading, most_threads: int
) -> PlanRequest:
    """Return the request with the reader of each file, the threads and the chunk size."""
    shards = request.checkpoint.shards
    staged = not any(spec.info.host_visible for spec in request.devices)
    whole = staged if reading == "ahead" else reading == "direct"
    choose = partial(reader_choice, reader=options.reader, page_cache=options.page_cache)
    choices = [choose(h, reading=reading, whole_slots=whole, fetch=options.fetch) for h in shards]
    # threads that wait for a server take no CPU: 50 ms away, 2 read at 73 MB/s, 8 at 215
    remote = any(choice.kind in REMOTE_KINDS for choice in choices)
    if options.chunk_nbytes is not None and options.chunk_nbytes < _LEAST_CHUNK_NBYTES:
        encodes = any(want.coding is not None for want in request.wants)
        if remote or encodes:
            what = "files on a server" if remote else "weights that quant= quantises"
            why = "takes a request" if remote else "is encoded alone"
            raise ValueError(
                f"chunk_nbytes is at least {_LEAST_CHUNK_NBYTES} for {what}, not "
                f"{options.chunk_nbytes}: each chunk {why}; write "
                f"chunk_nbytes={_LEAST_CHUNK_NBYTES}"
            )
    threads = MOST_THREADS if remote else min(options.rank_cpus or available_cpus(), most_threads)
    most_nbytes = DEFAULT_CHUNK_NBYTES
    lengths = [header.file_nbytes for header in shards]
    direct = [n for n, each in zip(lengths, choices, strict=True) if each.kind == "direct"]
    if 2 * sum(direct) > sum(lengths) and all(spec.casts for spec in request.devices):
        threads, most_nbytes = min(threads, _DIRECT_THREADS), _DIRECT_CHUNK_NBYTES
    draft = replace(
        request.draft,
        readers=tuple(choice.kind for choice in choices),
        reader_reasons=tuple(choice.reason for choice in choices),
        chunk_nbytes=options.chunk_nbytes or most_nbytes,
        threads=options.threads or threads,
        ahead=reading == "ahead",
    )
    return replace(request, draft=draft)


def _is_mappable(options: Options, path: Location) -> bool:
    """Return whether weights may stay views on a mapped file when the load is done."""
    downloaded = options.fetch == "cache" and is_of_hub(path)  # before a load's plan
    if options.residence == "auto" and not downloaded:  # as for a map that is gone after the load
        return choose_reader(path, "auto", whole_slots=False).kind == "mmap"
    return options.residence != "memory" and (downloaded or not isinstance(path, Url))


def _less(nbytes: int | None, reserved: int) -> int | None:
    return None if nbytes is None else max(nbytes - reserved, 0)


class Call(NamedTuple):
    """The parsed arguments of a load: checkpoint, options, and the rows for each parameter."""

    checkpoint: Checkpoint
    options: Options
    found: Found


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(ModelParameters):
    """The model that a load fills, and the opened devices.

    Attributes:
        unstored: the device of each tensor of the model that no checkpoint has, by name.
        held: bytes of the model's old weights that the load takes over, by device.
        pages_are_known: whether the system reports those bytes; if not, they count as 0.
        alone: whether errors may not suggest another device.
        host_held_nbytes: free memory of the host that something else of the load takes.
    """

    model: Any
    owner: Framework | None
    unstored: Mapping[str, str]
    held: Mapping[str, int]
    pages_are_known: bool
    devices: Devices
    alone: bool = False
    host_held_nbytes: int = 0

    @classmethod
    def look(cls, model: Any, checkpoint: Checkpoint, options: Options) -> Place:
        """Open the devices of a load, and measure the memory that its model holds there."""
        owner = None
        parameters: Sequence[Parameter] = ()
        if model is not None:
            host_room_nbytes(len(checkpoint.tensors))  # before any memory is taken
            owner = framework(framework_of(model) or default_framework())
            parameters = owner.parameters(model)
        where = {p.device for p in parameters if p.device is not None}
        devices = open_devices(options.device, owner, where)
        check_budget(options, devices.opened)
        shared = {name for name, d in devices.opened.items() if d.info.in_process}
        reusable = _reusable(parameters, shared)
        known = reusable if reusable is not None else {}
        held = dict.fromkeys(where, 0)
        for number, p in enumerate(parameters):
            if p.device is not None:
                held[p.device] += known.get(number, 0 if p.device in shared else p.nbytes)
        return cls(
            parameters=parameters,
            keep=frozenset(devices.opened) if options.device is None else frozenset(),
            reusable=known,
            coded=owner.coded(model) if owner is not None else {},
            model=model,
            owner=owner,
            unstored=owner.unstored(model) if owner is not None else {},
            held=held,
            pages_are_known=reusable is not None,
            devices=devices,
        )

    def match(
        self, call: Call, suggest: Callable[[], Sequence[Suggestion]] = tuple
    ) -> Match | None:
        """Match the model to a call's checkpoint, by name and shape; None if there is no model."""
        if self.owner is None:
            return None
        checkpoint, options, found = call
        match = match_parameters(checkpoint, self, found, options.policy)
        match.check(checkpoint.path, options.strict, options.shapes, suggest)
        if found.fill or found.skipped:  # a rank may have nothing to load
            match.warn_of_little(checkpoint.path, suggest, len(found.skipped))
        return match

    def specs(
        self, options: Options, bf16_undecided: bool, devices: Devices | None = None
    ) -> list[DeviceSpec]:
        """Describe `devices`, or those of the load, to the planner, with the options applied."""
        specs = (devices or self.devices).specs(
            options.budget,
            options.policy,
            options.cast,
            self.held,
            bf16_undecided=bf16_undecided,
            of_model=self.owner is not None,
        )
        return specs_under(options, specs, alone=self.alone)


def _reusable(parameters: Sequence[Parameter], shared: Set[str]) -> dict[int, int] | None:
    """Return reusable bytes of old weights on `shared` devices, by parameter; None if unknown."""
    places = {i: p.memory() for i, p in enumerate(parameters) if p.device in shared}
    found = reusable_nbytes([place for each in places.values() for place in each])
    if found is None:
        return None
    nbytes = iter(found)
    return {number: sum(islice(nbytes, len(each))) for number, each in places.items()}


@dataclass(frozen=True, slots=True)
class Decision:
    """A load that is planned and not begun.

    Attributes:
        match: the source of each parameter; None for a load without a model.
        process_nbytes: memory of the process when it was planned; None if unknown.
        swap: modules for quantized weights, to be put into the model.
    """

    call: Call
    place: Place
    plan: Plan
    match: Match | None
    skipped: tuple[str, ...]
    process_nbytes: int | None
    swap: Swap

    @classmethod
    def make(
        cls,
        place: Place,
        call: Call,
        match: Match | None,
        offers: Collection[str] = ("quant", "residence", "device"),
    ) -> Decision:
        """Plan the load of a call; a PlanInfeasibleError suggests the options named in `offers`."""
        asked, holds = call.options, bool(place.coded)
        swapping = None if place.owner is None else partial(place.owner.swap, place.model)

        def demanded(quant: QuantPolicy) -> _Demand:
            options, changed = asked.trying(quant), asked.changes.by_tensor
            kept = keep_blocks(call.checkpoint, call.found, quant, changed, swapping, holds=holds)
            checkpoint, _, found = own = Call(kept.checkpoint, options, kept.found)
            notes = [*kept.notes, *(quant.check_meant(checkpoint, True) if quant else ())]
            if match is None:
                wants = wants_under(options, checkpoint, found.fill)
                return _Demand(place, own, wants, notes=notes)
            matched, swap = match, NO_SWAP
            if kept.blocks or quant.dtype is not None:
                matched = match_parameters(checkpoint, place, found, options.policy, kept.blocks)
            if quant and swapping is not None:
                formats = matched.formats(checkpoint, quant, place.coded)
                formats |= {name: one.format for name, one in kept.blocks.items()}
                swap = swapping(formats)
                if formats or not notes:
                    notes += matched.not_swapped(checkpoint, formats, swap, place.coded)
                if swap.dense_nbytes:
                    said = said_of_dense(swap.dense_nbytes)
                    notes.append(f"for many tokens a module dequantises its own weight: {said}")
            coded = {**place.coded, **swap.coded}
            wants = matched.quantised(checkpoint, coded, options.changes.by_tensor, quant)
            return _Demand(place, own, wants, swap, notes, matched)

        demand = demanded(NO_QUANT)
        try:
            (demand, (made, begun)), chosen = asked.quant.least_loss(
                lambda quant: (
                    (found := demanded(quant) if quant or quant.dtype else demand),
                    found.planned(place.devices),
                ),
                *(call.checkpoint, asked.policy, place.devices.native_bf16),
            )
        except PlanInfeasibleError as error:
            if error.reason and not place.pages_are_known:
                error = error.suggesting((), "/proc/self/pagemap cannot be read: " + error.reason)
            fits = []
            may_quantize = "quant" in offers and not asked.quant and not place.coded
            if may_quantize and has_room_to_try(len(demand.wants)):
                fits = QuantPolicy.that_fits(
                    lambda q: demanded(q).planned(place.devices)[0], call.checkpoint
                )
            fits += demand.mapped() if "residence" in offers else []
            fits += demand.wider() if "device" in offers else []
            raise error.suggesting(fits) from None
        call, match = demand.call, demand.match
        checkpoint = call.checkpoint
        place.devices.check_buffers(made)
        if asked.changes.by_tensor:
            _check_changes(made)
        if match is not None:
            match.check_views(checkpoint.path, made.placements)
            match.check_ties(checkpoint)
        notes = [*place.devices.notes, *(match.notes if match else ()), *made.notes, *chosen]
        unstored = {**place.unstored, **(match.computed if match else {})}
        notes += (*on_unstored(unstored, made), *demand.notes)
        loaded = {r.tensor for want in demand.wants for r in want.source}
        return cls(
            call,
            place,
            replace(made, notes=tuple(notes)),
            match,
            tuple(name for name in checkpoint.tensors if name not in loaded),
            begun,
            demand.swap,
        )

    def swapped(self) -> tuple[Decision, Callable[[], None]]:
        """Put modules for quantized weights into the model; return the new load and `undo()`."""
        place, match = self.place, self.match
        if not self.swap.coded or match is None or place.owner is None:
            return self, nothing
        moves, before = self.plan.placements, process_nbytes() or 0
        self.swap.compile({move.name: move.kind.device for move in moves})
        begun = self.process_nbytes
        if begun is not None:  # the compiler belongs to the process, not to the load
            begun += max((process_nbytes() or 0) - before, 0)
        undo = self.swap.put()
        parameters = place.owner.parameters(place.model)
        found = {name + p.shard: p for p in parameters for name in (*p.names, *p.wrapped)}
        names = (*match.parameters, *(move.name for move in moves))
        match = replace(match, parameters={name: found[name] for name in names})
        return replace(self, match=match, process_nbytes=begun), undo

    @property
    def read_nbytes(self) -> int:
        """File bytes that the load will read."""
        kinds = self.plan.placements.counted
        return sum(kind.src_nbytes * n for kind, n in kinds if kind.cast != "mapped")


def _check_changes(made: Plan) -> None:
    """Raise ValueError for a parameter that ``transform=`` or ``adapters=`` cannot change."""
    for name, _, kind, *_ in made.placements:
        if kind.changes and kind.src.is_packed:
            raise ValueError(
                f"{name}: its values cannot change on the way (transform, adapters) where it is "
                f'dequantised, from {kind.src}: convert it first, with dtype="{kind.dst}"'
            )
        if kind.changes and kind.order in ("columns", "lines"):
            raise ValueError(
                f"{name}: its values cannot change on the way (transform, adapters) where its "
                "matrix is transposed or sharded by columns: functions get whole rows of the "
                "checkpoint"
            )


@dataclass(frozen=True, slots=True)
class _Demand:
    """A load with one choice of quantization, to be planned on different sets of devices."""

    place: Place
    call: Call
    wants: TensorRequests
    swap: Swap = NO_SWAP
    notes: Sequence[str] = ()  # on that choice, for the report
    match: Match | None = None

    def planned(self, devices: Devices) -> tuple[Plan, int | None]:
        """Return the plan for `devices`, and the process's bytes before it; None if unknown."""
        checkpoint, options, found = self.call
        tied = {} if self.place.model is not None else found.tied
        specs = self.place.specs(options, self.wants.needs_native_bf16(options.policy), devices)
        policy, cast, clamp = options.policy, options.cast, options.out_of_range == "clamp"
        specs, refused = devices.compile_casts(
            specs, self.wants, policy, clamp=clamp, required=cast == "device"
        )
        engine, notes = host_engine(self.wants, policy, specs, cast, clamp=clamp)
        begun = process_nbytes()
        free = host_room_nbytes()
        free = None if free is None else max(free - self.place.host_held_nbytes, 0)
        specs = [spec.within(free) for spec in specs]  # to compile took some of it
        request = request_of(options, checkpoint, self.wants, specs, engine, tied)
        made = plan_within(options, request, free)
        return replace(made, notes=(*made.notes, *refused, *notes)), begun

    def mapped(self) -> list[Fit]:
        """Return as a suggestion the ``residence=`` with which the load fits; [] if none does."""
        maps = any(device.info.maps for device in self.place.devices.opened.values())
        if not maps or self.call.options.residence != "memory":
            return []
        for residence in ("mapped", "auto"):
            with suppress(PlanInfeasibleError, ResidenceError):
                options = replace(self.call.options, residence=residence)
                replace(self, call=self.call._replace(options=options)).planned(self.place.devices)
                return [Fit("residence", f'="{residence}"')]
        return []

    def wider(self) -> list[Fit]:
        """Return the ``device=`` with which the load fits, with more of this machine's devices.

        Empty if the host has too little memory to open them and to plan all parameters again.
        """
        if not has_room_to_try(len(self.wants)):
            return []
        for more in self.place.devices.widened():
            with suppress(PlanInfeasibleError):
                made, _ = self.planned(more)
                parts = (f"{d.device} {format_bytes(d.peak_nbytes)}" for d in made.devices)
                return [Fit("device", f"={list(more.opened)}", ", ".join(parts))]
        return []


def has_room_to_try(parameters: int) -> bool:
    """Return whether the host can plan so many parameters again, for a suggestion, and compile."""
    try:
        free = host_room_nbytes(parameters)
    except PlanInfeasibleError:
        return False
    return free is None or free >= _WIDER_NBYTES
