"""`load_state_dict`: match a model to a checkpoint, plan, stream, report."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Unpack

from streamload._pages import reusable_nbytes
from streamload.cast.table import cast_engine, supported
from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.checkpoint.readers import ReaderChoice, choose_reader
from streamload.devices.base import Framework, Parameter
from streamload.devices.names import environment_fp16_cast, framework, framework_of
from streamload.errors import (
    LoadState,
    PlanInfeasibleError,
    StateDictMismatchError,
    StreamloadError,
)
from streamload.headroom import Headroom, process_nbytes
from streamload.interrupt import deferred_interrupt
from streamload.lookup import (
    Devices,
    bf16_is_undecided,
    host_room_nbytes,
    open_devices,
    unseen_spec,
)
from streamload.mapping import Source, Unchanged, sources
from streamload.match import Match, incoherent, want_of
from streamload.match import match as match_parameters
from streamload.options import (
    DEFAULTS,
    NO_TRANSFER,
    Knobs,
    LoadOptions,
    PlanOptions,
    Room,
    SplitOptions,
    takes,
)
from streamload.planning.budget import (
    STAGING,
    Budget,
    Ledger,
    available_cpus,
    canonical_device,
)
from streamload.planning.kv_cache import KvCache
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.planner import (
    DEFAULT_CHUNK_NBYTES,
    CastChoice,
    DeviceSpec,
    DTypePolicy,
    Want,
    Wants,
    different,
    make_plan,
)
from streamload.progress import Progress, reporting
from streamload.reading import Opener, open_shard
from streamload.report import (
    Clock,
    LoadReport,
    Meter,
    device_map,
    warn_of_overflow,
)
from streamload.stream import stream
from streamload.target import ModelTarget
from streamload.units import format_bytes

# Each is from docs/measurements.md, "Loading". With more threads, copies to CUDA fall behind.
_MOST_THREADS = 8
# Past the page cache fewer and longer reads are better, with the same bytes under way.
_DIRECT_THREADS = 2
_DIRECT_CHUNK_NBYTES = 16 * 2**20
# Below this, a map is not used unless it is asked for: such loads were killed.
_MAP_ROOM_NBYTES = 64 * 2**20
# One thread, where a map was asked for.
_LEAST_MAP_ROOM_NBYTES = 20 * 2**20
# To open another device's driver takes 14 to 16 MB of the host, and twice that with its compiler.
_WIDER_NBYTES = 64 * 2**20


@takes(transfer=NO_TRANSFER)
def load_state_dict(
    model: Any, path: str | os.PathLike[str] | Checkpoint, **options: Unpack[LoadOptions]
) -> LoadReport:
    """Stream a safetensors checkpoint into a model, under a budget in bytes.

    Nothing is read or allocated before it is known that everything fits. Weights that the model
    holds already are overwritten in place where size, dtype and device stay the same; otherwise
    they are released, one parameter at a time, before the new ones are allocated.

    Args:
        model: a torch module (on the meta device, the CPU or others), a tinygrad object as
            ``nn.state.get_state_dict`` sees it, a dict of tensors or arrays, or None; then the
            report's ``state_dict`` holds the tensors by name.
        path: a ``.safetensors`` file, a folder, an index, the URL of one of these (see
            `open_checkpoint`), ``org/name`` in the local Hugging Face cache, or an open
            `Checkpoint`.
        **options: see `LoadOptions`.

    Returns:
        What was done; ``print(report)`` shows it.

    Raises:
        CheckpointError: the checkpoint is invalid; names file and tensor.
        FileChangedError: one of its files is not what it was when its header was read, or another
            process wants to write it; it is a CheckpointError.
        StateDictMismatchError: model and checkpoint do not match; before any data is read.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated.
        BudgetExceededError: something still holds memory that had to be released first.
        MemoryTakenError: others took memory meanwhile, and the load does not fit any more.
        UnsupportedCastError: a dtype cannot be cast or held; before any data is read.
        OutOfRangeError: under ``out_of_range="error"``.
        DeviceError: the device is not there, does not work, or failed.
        ValueError: an argument is invalid.

    After an error or Ctrl-C each parameter is loaded, untouched or invalid (it holds nothing
    readable and raises when used); the exception's notes, and the ``state`` of streamload's own
    errors, say which. Calling again completes the load.
    """
    clock = Clock()
    read, strict = Options.read(**options), options["strict"]
    if not isinstance(strict, bool):
        raise ValueError(f"strict is True or False, not {strict!r}")
    with uncollected():
        checkpoint = opened_checkpoint(path)
        found = sources(checkpoint, options["mapping"], options["rename"])
        if model is not None:
            host_room_nbytes(len(checkpoint.tensors))  # a short look, before memory is taken
        place = Place.look(model, read, options["device"])
        load = Load.prepare(place, checkpoint, read, found, strict)
        try:
            with deferred_interrupt():  # one that comes while we clean up waits until that is done
                return load.run(options["progress"], clock)
        except (KeyboardInterrupt, Warning) as error:
            if not hasattr(error, "__notes__"):  # it came when all was done
                names = tuple(p.name for p in load.plan.placements)
                error.add_note(f"parameters: {LoadState(names, (), ())}")
            raise


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep Python from looking for garbage cycles, where it does: a load makes none.

    It makes a dozen objects for each tensor, which stay until it ends. Looking through them again
    and again, and through all that frameworks have made before, took 25 of the 80 microseconds of
    CPU time that 20,000 tensors of 8 kB took each, and more than half of the planning.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@takes(
    devices='device=["cuda:0", "cpu"]',
    nodes="streamload.split(path, nodes=[...]), without a budget or a device",
    transfer=NO_TRANSFER,
)
@uncollected()
def plan(path: str | os.PathLike[str] | Checkpoint, **options: Unpack[PlanOptions]) -> Plan:
    """Plan a load of all of a checkpoint, without a model and without reading any data.

    With a budget in bytes and a dtype, no device is looked at.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        budget: as in `load_state_dict`; for several devices one for each, or a dict.
        device: as in `load_state_dict`; None is "device" where none is looked at.
        **options: see `PlanOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        CheckpointError: the checkpoint is invalid.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: a device had to be looked at and does not work.
        ValueError: an argument is invalid.
    """
    read, device = Options.read(**options), options["device"]
    cast, reserved = read.knobs.cast, read.room.reserve_nbytes
    checkpoint = opened_checkpoint(path)
    names = [device or "device"] if isinstance(device, str) or device is None else list(device)
    _check_names(read.budget, names, device)
    _check_distinct(names)
    undecided = bf16_is_undecided(read.policy, checkpoint, checkpoint.tensors)
    if all(map(read.budget.is_stated, names)) and cast != "device" and not undecided:
        unseen = [unseen_spec(name, read.budget.resolve(name, None)) for name in names]
        return _planned(checkpoint, read, _less_reserve(unseen, reserved), options)
    specs = open_devices(device, None, {}).specs(
        read.budget,
        read.policy,
        cast,
        {},
        bf16_undecided=undecided,
        reserve_nbytes=reserved,
    )
    return _planned(checkpoint, read, specs, options)


@takes()
@uncollected()
def split(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    nodes: Sequence[Node],
    **options: Unpack[SplitOptions],
) -> Plan:
    """Plan to split all of a checkpoint over nodes, by layers, without reading any data.

    No device is looked at: without a dtype, bfloat16 is planned as float16, which takes as many
    bytes.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        nodes: the nodes in the order of the layers, each with its own budget.
        **options: see `SplitOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        CheckpointError: the checkpoint is invalid.
        UnsupportedCastError: a dtype cannot be cast or held.
        ValueError: an argument is invalid.
    """
    read = Options.read(**options)
    if not all(isinstance(node, Node) for node in nodes):
        raise ValueError("nodes is a list of Node, and each has a budget of its own")
    checkpoint = opened_checkpoint(path)
    _check_distinct([node.name for node in nodes])
    specs = [DeviceSpec(node.name, node.budget, own_host=True) for node in nodes]
    return _planned(checkpoint, read, _less_reserve(specs, read.room.reserve_nbytes), options)


def _check_distinct(names: Sequence[str]) -> None:
    if not names or len({canonical_device(name) for name in names}) < len(names):
        raise ValueError(f"expected devices or nodes of different names, found {names}")


def _less_reserve(specs: Sequence[DeviceSpec], reserve_nbytes: int) -> Sequence[DeviceSpec]:
    """Devices that nobody looks at, with what stays free taken off their budgets."""
    if not reserve_nbytes:
        return specs
    limit = f"budget less {format_bytes(reserve_nbytes)} kept free"
    return [
        replace(spec, budget_nbytes=max(spec.budget_nbytes - reserve_nbytes, 0), limit=limit)
        for spec in specs
    ]


def _planned(
    checkpoint: Checkpoint, read: Options, specs: Iterable[DeviceSpec], options: SplitOptions
) -> Plan:
    """Plan a load of everything onto these devices."""
    fill, _, tied = sources(checkpoint, options["mapping"], options["rename"])
    engine: CastChoice = "llvm" if read.knobs.cast == "auto" else read.knobs.cast
    return read.plan(checkpoint, _wants(checkpoint, fill), read.casting(specs), tied, engine)


def opened_checkpoint(path: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
    """The checkpoint at a path, or the one that was given."""
    if isinstance(path, Checkpoint):
        return path
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a checkpoint, not {type(path).__name__}")
    return open_checkpoint(path)


def _check_names(budget: Budget, names: Iterable[str], device: object) -> None:
    """Refuse a budget for a device that the load does not have: it would hold nothing back."""
    known = {canonical_device(name) for name in names}
    unknown = [name for name in budget.devices if name not in known]
    if unknown and device != "auto":  # which device that is could not be known
        raise ValueError(
            f"the budget names {', '.join(unknown)}; the load's devices are {', '.join(names)}"
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a load that are numbers and names, read and checked."""

    budget: Budget
    policy: DTypePolicy
    knobs: Knobs
    room: Room
    cpus: int | None = None  # of those that there are, for this load; None: all
    host_held_nbytes: int = 0  # of what is free on the host, what is taken beside the load

    @classmethod
    def read(cls, **given: Unpack[LoadOptions]) -> Options:
        """Read the options; raises ValueError for one that is invalid."""
        options: LoadOptions = {**DEFAULTS, **given}
        return cls(
            room=Room.read(options),
            knobs=Knobs.read(options),
            budget=Budget.parse(options["budget"]),
            policy=DTypePolicy.parse(options["dtype"], environment_fp16_cast()),
        )

    def casting(self, specs: Iterable[DeviceSpec]) -> list[DeviceSpec]:
        """The devices, of which none casts where the host is asked to, with what stays free."""
        casts, reserved = self.knobs.cast in ("auto", "device"), self.room.reserve_nbytes
        return [
            replace(spec, casts=spec.casts and casts, reserve_nbytes=reserved) for spec in specs
        ]

    def plan(
        self,
        checkpoint: Checkpoint,
        wants: Sequence[Want],
        specs: Sequence[DeviceSpec],
        tied: Mapping[str, str],
        cast: CastChoice,
        host_free_nbytes: int | None = None,
    ) -> Plan:
        """Plan under these options, and within what is free on the host (None: not looked at)."""
        knobs = self.knobs
        staged = not any(spec.host_visible for spec in specs)
        choices = [
            # only whole slots: see `choose_reader` for what it costs elsewhere
            choose_reader(
                header.path, knobs.reader, page_cache=knobs.page_cache, whole_slots=staged
            )
            for header in checkpoint.shards
        ]
        planned = partial(self._plan, checkpoint, wants, specs, tied, cast, host_free_nbytes)
        made = planned(choices)
        if host_free_nbytes is None:
            return made
        taken = made.process_nbytes + sum(d.kernel_nbytes for d in made.devices)
        if taken > host_free_nbytes:  # what devices with memory of their own need of the host
            raise PlanInfeasibleError("host", taken, host_free_nbytes, limit="free memory")
        if "mmap" not in made.readers or host_free_nbytes - taken >= _MAP_ROOM_NBYTES:
            return made
        if knobs.reader == "mmap":
            if host_free_nbytes - taken >= _LEAST_MAP_ROOM_NBYTES:
                note = "one thread: files are mapped, and the host has little memory"
                return replace(made, threads=min(made.threads, 1), notes=(*made.notes, note))
            raise PlanInfeasibleError(
                "host",
                taken + _MAP_ROOM_NBYTES,
                host_free_nbytes,
                limit="free memory",
                would_fit=['reader="pread"'],
            )
        left = format_bytes(max(host_free_nbytes - taken, 0))
        reason = "not mapped: the host has little memory"
        choices = [
            ReaderChoice("pread", reason) if choice.kind == "mmap" else choice for choice in choices
        ]
        made = planned(choices)
        note = f"files are read and not mapped: the host would be left with {left}"
        return replace(made, notes=(*made.notes, note))

    def _plan(
        self,
        checkpoint: Checkpoint,
        wants: Sequence[Want],
        specs: Sequence[DeviceSpec],
        tied: Mapping[str, str],
        cast: CastChoice,
        host_free_nbytes: int | None,
        choices: Sequence[ReaderChoice],
    ) -> Plan:
        budget, free = self.budget.host_nbytes, host_free_nbytes
        # threads that wait for a server take no CPU: 50 ms away, 2 read at 73 MB/s, 8 at 215
        remote = any(choice.kind == "http" for choice in choices)
        threads = _MOST_THREADS if remote else min(self.cpus or available_cpus(), _MOST_THREADS)
        most_nbytes = DEFAULT_CHUNK_NBYTES
        if all(spec.casts for spec in specs) and _is_cold(checkpoint, choices):
            threads, most_nbytes = min(threads, _DIRECT_THREADS), _DIRECT_CHUNK_NBYTES
        asked, path = self.room.cache, checkpoint.path
        cache = None if asked is None else KvCache.of(checkpoint.config, asked, path=path)
        return make_plan(
            checkpoint,
            wants=wants,
            devices=specs,
            dtype=self.policy,
            out_of_range=self.knobs.out_of_range,
            cast=cast,
            readers=[choice.kind for choice in choices],
            tied=tied,
            host_budget_nbytes=budget if free is None else min(budget, free),
            host_limit="budget" if free is None or budget <= free else "free memory",
            chunk_nbytes=self.knobs.chunk_nbytes or most_nbytes,
            page_cache=self.knobs.page_cache,
            reader_reasons=[choice.reason for choice in choices],
            threads=self.knobs.threads or threads,
            cache=cache,
        )


def _is_cold(checkpoint: Checkpoint, choices: Sequence[ReaderChoice]) -> bool:
    """Whether most bytes are read past the page cache."""
    lengths = [header.file_nbytes for header in checkpoint.shards]
    direct = sum(n for n, choice in zip(lengths, choices, strict=True) if choice.kind == "direct")
    return 2 * direct > sum(lengths)


@dataclass(frozen=True, slots=True)
class Place:
    """What a load fills and where it goes, looked at and not touched.

    Attributes:
        owner: the framework of the model; None for a load without one.
        parameters: the model's.
        unstored: tensors of the model that no checkpoint has, and where they are.
        held: bytes that the model holds in memory which the load takes over, by device.
        reusable: the same of each parameter, by its number.
        pages_are_known: whether the system tells which memory that is; where not, it is none.
        keep: devices on which a parameter that is there stays.
        devices: those of the load, open.
    """

    owner: Framework | None
    parameters: Sequence[Parameter]
    unstored: Mapping[str, str]
    held: Mapping[str, int]
    reusable: Mapping[int, int]
    pages_are_known: bool
    keep: frozenset[str]
    devices: Devices

    @classmethod
    def look(cls, model: Any, options: Options, device: str | Sequence[str] | None) -> Place:
        """Look at a model, and open the devices."""
        owner = None
        parameters: Sequence[Parameter] = ()
        if model is not None:
            owner = framework(framework_of(model) or "tinygrad")
            parameters = owner.parameters(model)
        where = {p.device for p in parameters if p.device is not None}
        devices = open_devices(device, owner, where)
        _check_names(options.budget, devices.opened, device)
        shared = {name for name, d in devices.opened.items() if d.info.shared_memory}
        reusable = _reusable(parameters, shared)
        known = reusable if reusable is not None else {}
        held = dict.fromkeys(where, 0)
        for number, p in enumerate(parameters):
            if p.device is not None:
                held[p.device] += known.get(number, 0 if p.device in shared else p.nbytes)
        keep = frozenset(devices.opened) if device is None else frozenset()
        unstored = owner.unstored(model) if owner is not None else {}
        is_known = reusable is not None
        return cls(owner, parameters, unstored, held, known, is_known, keep, devices)

    def specs(
        self, options: Options, *, bf16_undecided: bool, over: Devices | None = None
    ) -> list[DeviceSpec]:
        """Describe the devices to the planner.

        Args:
            options: those of the load.
            bf16_undecided: whether some dtype depends on what a device computes in natively.
            over: other devices than those that were opened.
        """
        return options.casting(
            (over or self.devices).specs(
                options.budget,
                options.policy,
                options.knobs.cast,
                self.held,
                bf16_undecided=bf16_undecided,
                reserve_nbytes=options.room.reserve_nbytes,
                of_model=self.owner is not None,
            )
        )


def _reusable(parameters: Sequence[Parameter], shared: Set[str]) -> dict[int, int] | None:
    """How many bytes of each parameter on the host are memory that a load can take over.

    Args:
        parameters: of the model.
        shared: devices whose memory is the host's.

    Returns:
        Bytes by the numbers of those parameters; None where the system does not tell.
    """
    places = {i: p.memory() for i, p in enumerate(parameters) if p.device in shared}
    found = reusable_nbytes([place for each in places.values() for place in each])
    if found is None:
        return None
    nbytes = iter(found)
    return {number: sum(islice(nbytes, len(each))) for number, each in places.items()}


@dataclass(frozen=True, slots=True)
class Load:
    """One call: everything decided, nothing moved yet."""

    checkpoint: Checkpoint
    plan: Plan
    devices: Devices
    match: Match | None  # None: a load without a model
    skipped: tuple[str, ...]
    unstored: tuple[str, ...] = ()  # tensors of the model that no checkpoint has
    process_nbytes: int | None = None  # of the process, when memory was looked at for the plan

    @classmethod
    def prepare(
        cls,
        place: Place,
        checkpoint: Checkpoint,
        options: Options,
        found: tuple[Mapping[str, Source], list[str], Mapping[str, str]],
        strict: bool,
    ) -> Load:
        """Match and plan.

        Args:
            place: the model, and where it goes.
            checkpoint: the headers.
            options: those of the load.
            found: what fills each parameter; see `sources`.
            strict: whether model and checkpoint must have the same names and shapes.
        """
        devices = place.devices
        fill, _, tied = found
        match = None
        if place.owner is None:
            wants = _wants(checkpoint, fill)
        else:
            match = match_parameters(
                checkpoint,
                place.parameters,
                fill,
                tied,
                place.keep,
                options.policy,
                place.reusable,
            )
            match.check(checkpoint.path, strict)
            wants = Wants.of(checkpoint, match.wants)
            tied = {}  # the model says what is tied
        distinct = different(wants, options.policy)
        free = [want.source[0].tensor for want in distinct if want.dtype is None]
        undecided = bf16_is_undecided(options.policy, checkpoint, free)

        begun: int | None = None

        def planned(over: Devices) -> Plan:
            nonlocal begun
            specs = place.specs(options, bf16_undecided=undecided, over=over)
            specs, refused = over.compile_casts(
                specs,
                distinct,
                checkpoint,
                options.policy,
                clamp=options.knobs.out_of_range == "clamp",
                required=options.knobs.cast == "device",
            )
            on_host = options.policy.fp16_cast == "llvm"  # some of it, whatever casts
            native = {spec.native_bf16 for spec in specs if on_host or not spec.casts}
            engine, notes = _host_cast(checkpoint, distinct, options, native)
            begun = process_nbytes()
            free = host_room_nbytes()
            free = None if free is None else max(free - options.host_held_nbytes, 0)
            made = options.plan(checkpoint, wants, specs, tied, engine, free)
            return replace(made, notes=(*made.notes, *refused, *notes))

        try:
            made = planned(devices)
        except PlanInfeasibleError as error:
            if error.reason and not place.pages_are_known:
                error = error.suggesting((), "/proc/self/pagemap cannot be read: " + error.reason)
            wider = _wider(devices, planned, len(wants))
            raise error.suggesting([wider] if wider is not None else ()) from None
        devices.check_buffers(made)
        if match is not None:
            match.check_views(checkpoint.path, made.placements)
            match.check_ties(checkpoint)
        notes = [*devices.notes, *(match.notes if match else ()), *made.notes]
        loaded = {r.tensor for source in wants.sources for r in source}
        skipped = [name for name in checkpoint.tensors if name not in loaded]
        notes += on_unstored(place.unstored, made)
        return cls(
            checkpoint,
            replace(made, notes=tuple(notes)),
            devices,
            match,
            tuple(skipped),
            tuple(place.unstored),
            begun,
        )

    def _device_map(self) -> dict[str, str | int]:
        """Where everything is, by module."""
        placements = self.plan.placements
        where = {p.device for p, _ in placements.counted}
        if self.match is None and len(where) == 1:
            return device_map({"": where.pop()})
        by_name = {p.name: p.device for p in placements}
        if self.match is None:
            return device_map(by_name)
        names = {
            name: by_name[first]
            for first, parameter in self.match.parameters.items()
            for name in parameter.names
        }
        return device_map(names, (*self.match.unfilled, *self.unstored))

    @property
    def read_nbytes(self) -> int:
        """File bytes that it will read."""
        return sum(p.src_nbytes * count for p, count in self.plan.placements.counted)

    def run(self, progress: Progress, clock: Clock, opener: Opener = open_shard) -> LoadReport:
        """Stream."""
        made, devices = self.plan, self.devices.opened
        ledger = Ledger(
            # a model may hold more than the budget already; it only becomes less then
            {d.device: max(d.budget_nbytes, d.held_nbytes) for d in made.devices}
            | {STAGING: made.host_budget_nbytes}
        )
        parameters = self.match.parameters if self.match else None
        target = ModelTarget(made, self.devices.framework, devices, parameters, ledger)
        meter = Meter(devices, self.process_nbytes)
        shared = {name for name, device in devices.items() if device.info.shared_memory}
        headroom = Headroom(made, shared)
        try:
            with reporting(progress, self.read_nbytes) as tell:

                def told(done: int) -> None:
                    meter.sample()
                    tell(done)

                for device in devices.values():
                    device.synchronize()  # nothing may be computing on what is written in place
                target.begin_all()
                stats = stream(
                    made, self.checkpoint, target, devices, ledger, told, opener, headroom
                )
        except BaseException as error:
            state = target.fail()
            target.state_dict.clear()  # whoever keeps the error does not keep the memory
            if isinstance(error, StreamloadError):
                error.state = state
            error.add_note(f"parameters: {state}")
            raise
        finally:
            for device in devices.values():
                with suppress(Exception):  # the first error is the one to be told
                    device.synchronize()
                    device.trim()
        meter.sample(at_once=True)
        fallbacks = [
            f"{n} of {len(made.readers)} files: {why}" for why, n in stats.reader_fallbacks.items()
        ]
        counts = {
            made.placements[index].name: count
            for index, count in sorted(stats.counts.items())
            if count.total
        }
        warn_of_overflow(self.checkpoint.path, counts, made.out_of_range)
        names = [*(d.device for d in made.devices), STAGING]
        tensors = target.state_dict
        return LoadReport(
            path=str(self.checkpoint.path),
            plan=made,
            read_nbytes=stats.read_nbytes,
            resident_nbytes=made.resident_nbytes,
            seconds=clock.seconds,
            stream_seconds=stats.seconds,
            transfer_seconds=stats.transfer_seconds if stats.read_nbytes else 0.0,
            predicted_nbytes={d.device: d.peak_nbytes for d in made.devices}
            | {STAGING: made.host_nbytes, "process": made.process_nbytes},
            held_nbytes={name: ledger.peak(name) for name in names},
            measured_nbytes=meter.peaks,
            counts=counts,
            skipped=self.skipped,
            missing=tuple(self.match.left_out) if self.match else (),
            tied=tuple(self.match.tied) if self.match else (),
            device_map=self._device_map(),
            allocators={
                name: counters
                for name, device in devices.items()
                if (counters := device.counters())
            },
            notes=(*made.notes, *fallbacks),
            page_cache=stats.page_cache,
            dropped_nbytes=stats.dropped_nbytes,
            state_dict={name: tensors[name] for name in made.placements.names} if tensors else {},
        )


def _wider(devices: Devices, planned: Callable[[Devices], Plan], parameters: int) -> str | None:
    """What to ask for where a plan does not fit, but would with more of this machine's devices.

    Nothing where the host has too little memory to open them and to plan all parameters again.
    """
    try:
        free = host_room_nbytes(parameters)
    except PlanInfeasibleError:
        return None
    if free is not None and free < _WIDER_NBYTES:
        return None
    for more in devices.widened():
        with suppress(PlanInfeasibleError):
            made = planned(more)
            shares = ", ".join(f"{d.device} {format_bytes(d.peak_nbytes)}" for d in made.devices)
            return f"device={list(more.opened)} ({shares})"
    return None


def on_unstored(unstored: Mapping[str, str], made: Plan) -> list[str]:
    """Say which tensors the load leaves where they cannot be used."""
    without = [name for name, device in unstored.items() if device == "meta"]
    elsewhere = [
        name
        for name, device in unstored.items()
        if device != "meta" and device not in {d.device for d in made.devices}
    ]
    return [
        f"{len(names)} buffers that checkpoints do not hold {what}: {', '.join(names[:8])}"
        f"{', ...' if len(names) > 8 else ''}"
        for names, what in (
            (without, "are on the meta device still, without values"),
            (elsewhere, "stay on another device"),
        )
        if names
    ]


def _wants(checkpoint: Checkpoint, fill: Mapping[str, Source]) -> Wants:
    """Everything in the checkpoint, as it is there."""
    if isinstance(fill, Unchanged):
        return Wants.every(checkpoint)
    problems = [
        f"{name}: {why}" for name, source in fill.items() if (why := incoherent(checkpoint, source))
    ]
    if problems:
        raise StateDictMismatchError(checkpoint.path, problems=problems)
    return Wants.of(checkpoint, [want_of(checkpoint, *each) for each in fill.items()])


def _host_cast(
    checkpoint: Checkpoint, wants: Iterable[Want], options: Options, native_bf16: Set[bool]
) -> tuple[CastChoice, list[str]]:
    """The engine for casts on the host: LLVM, or numpy where no kernel can be compiled.

    Args:
        checkpoint: the headers.
        wants: what is loaded; of each kind one will do.
        options: those of the load.
        native_bf16: what the devices that do not cast themselves say of themselves; kernels that
            none needs are not compiled.
    """
    if options.knobs.cast in ("numpy", "device"):
        return options.knobs.cast, []
    pairs = {}  # by their names: a dtype's own hash takes ten times as long
    for want in wants:
        name = want.source[0].tensor
        src = checkpoint.tensors[name].dtype
        for native in native_bf16:
            dst = want.dtype or options.policy.resolve(name, src, native)
            pairs[src.name, dst.name] = src, dst
    for _, (src, dst) in sorted(pairs.items()):
        if not supported(src, dst):
            continue  # the planner names the tensor
        if cast_engine(src, dst, "llvm" if options.knobs.cast == "llvm" else "auto") == "numpy":
            return "numpy", ["LLVM kernels do not work here: casts run in numpy"]
    return "llvm", []
