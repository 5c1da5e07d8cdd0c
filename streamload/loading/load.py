"""The public functions `load_state_dict`, `plan` and `split`, and the steps that they share."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

from streamload.checkpoint.fetch import choose_fetch, coming, on_disk
from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.checkpoint.shards import Opener, open_shard
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import F16, DType
from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Url
from streamload.core.memory import STAGING, Ledger, canonical_device
from streamload.core.patterns import check_patterns
from streamload.core.progress import Progress, reporting
from streamload.core.tensors import TensorInfo
from streamload.devices.base import DeviceInfo, Seen
from streamload.devices.names import default_framework, framework, framework_of
from streamload.errors import (
    Fit,
    LoadState,
    PlanInfeasibleError,
    StateDictMismatchError,
    StreamloadError,
)
from streamload.files.folder import place_of
from streamload.loading.lora import changes_of
from streamload.loading.options import (
    CHANGES,
    NO_TRANSFER,
    OF_MODELS,
    PLACE,
    LoadOptions,
    Options,
    takes,
)
from streamload.loading.place import (
    UNSEEN_GRANULARITY_NBYTES,
    engine_of,
    host_room_nbytes,
    open_devices,
    unseen_spec,
)
from streamload.loading.prepare import (
    Call,
    Decision,
    Place,
    check_budget,
    has_room_to_try,
    plan_within,
    request_of,
    specs_under,
    wants_under,
)
from streamload.loading.report import Clock, LoadReport, Meter, device_map, warn_of_overflow
from streamload.planning.dequantize import (
    all_names,
    as_in_models,
    asked,
    asked_by_model,
    dequantized,
    in_order_of,
)
from streamload.planning.match import Match, shape_of, wants_of
from streamload.planning.moves import DeviceSpec, DTypePolicy
from streamload.planning.partition import Node
from streamload.planning.plan import Plan
from streamload.planning.quant_policy import STORED, Kept, QuantPolicy, keep_blocks
from streamload.planning.sources import Source, named_by_user, parameters_of, sources
from streamload.planning.suggest import Wanted, call_of_library
from streamload.streaming.loop import stream
from streamload.streaming.memory_watch import Headroom
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import StreamStats, Transfer


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A call that does not fit: a load into a model, or a plan without a model."""

    error: PlanInfeasibleError
    call: Call
    given: Mapping[str, Any]
    target: tuple[Place, Match] | DeviceSpec

    def suggesting(self) -> PlanInfeasibleError:
        """Return the error with calls that would fit added, from the registered functions."""
        return self.error.suggesting([fit for suggest in _SUGGESTERS for fit in suggest(self)])


#: A function that returns calls that would fit instead, as source text.
Suggester = Callable[[Infeasible], list[Fit]]
_SUGGESTERS: list[Suggester] = []


def register_suggester(suggest: Suggester) -> None:
    """Register a function that suggests calls if a load or a plan does not fit."""
    _SUGGESTERS.append(suggest)


@takes(transfer=NO_TRANSFER)
def load_state_dict(model: Any, path: CheckpointLike, **options: Unpack[LoadOptions]) -> LoadReport:
    """Stream a safetensors checkpoint into a model, under a budget in bytes.

    All data must fit before any is read or memory allocated. Weights that the model holds already
    are overwritten in place if size, dtype and device stay the same; otherwise they are released,
    one parameter at a time, before the new ones are allocated.

    Args:
        model: a torch module (on the meta device, the CPU or others), a tinygrad object as
            ``nn.state.get_state_dict`` sees it, a dict of tensors or arrays, or None; then the
            report's ``state_dict`` holds the tensors by name. Of a parameter that is sharded (a
            DTensor, or by tinygrad's ``shard_``) each process or device reads its own shard alone.
        path: a ``.safetensors`` or ``.gguf`` file, a folder, an index, the URL of one of these (see
            `open_checkpoint`), ``org/name`` on the Hugging Face Hub, or an open
            `Checkpoint`.
        **options: see `LoadOptions`.

    Returns:
        The `LoadReport`; ``print(report)`` shows it.

    Raises:
        CheckpointError: the checkpoint is invalid; names file and tensor.
        FileChangedError: a file has changed since its header was read, or another process wants to
            write it; a subclass of CheckpointError.
        StateDictMismatchError: model and checkpoint do not match; before any data is read.
        PlanInfeasibleError: it does not fit; before any data is read or memory allocated.
        BudgetExceededError: something still holds memory that had to be released first.
        MemoryTakenError: other processes or threads took memory that the load needs.
        UnsupportedCastError: a dtype cannot be cast or held; before any data is read.
        OutOfRangeError: under ``out_of_range="error"``.
        DeviceError: the device is not there, does not work, or failed.
        ValueError: an argument is invalid.

    After an error or Ctrl-C each parameter is loaded, untouched or invalid (it holds nothing
    readable and raises when used); the exception's notes, and the ``state`` of streamload's own
    errors, say which. Calling again completes the load.
    """
    return load_under(model, path, Options.parse(options), {**options, "path": path})


def load_under(
    model: Any, path: CheckpointLike, read: Options, given: Mapping[str, Any]
) -> LoadReport:
    """Load a model under parsed options; see `load_state_dict` and `Infeasible.given`."""
    clock = Clock()
    with uncollected():
        if model is not None:
            host_room_nbytes()  # to open the checkpoint takes some megabytes
        source = opened(path)
        call = read_call(source, read, model)
        place = Place.look(model, call.checkpoint, call.options)
        match = _matched(place, call)
        try:
            decided = Decision.make(place, call, match)
        except PlanInfeasibleError as error:
            if match is None or not has_room_to_try(len(match.wants)):
                raise
            raise Infeasible(error, call, given, (place, match)).suggesting() from None
        stays = read.residence != "memory" or read.reader in ("mmap", "direct")
        if stays and call.options.fetch == "cache":
            local = on_disk(source, "cache", read.progress)
            if local is not source:  # planned again, by the files
                return load_under(model, local, read, given)
        try:
            with deferred_interrupt():  # one that comes while we clean up waits until that is done
                report = run(decided, read.progress, clock)
        except (KeyboardInterrupt, Warning) as error:
            if not hasattr(error, "__notes__"):  # it came when all was done
                names = tuple(decided.plan.placements.names)
                error.add_note(f"parameters: {LoadState(names, (), ())}")
            raise
        if place.owner is not None:
            place.owner.after_load(model, report.missing, report.skipped)
        return report


def _matched(place: Place, call: Call) -> Match | None:
    """Return the match of the model, None without a model; errors suggest other arguments."""
    read = call.options
    names = read.mapping, read.rename
    wanted = Wanted(call.checkpoint, place.parameters, *names, strict=read.strict)
    if place.owner is not None:
        wanted = replace(wanted, layers=place.owner.layers)
    try:
        return place.match(call, wanted.suggestions)
    except StateDictMismatchError as error:
        raise error.or_by(call_of_library(place.model, call.checkpoint.path)) from None


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collector during a load, which creates no cycles.

    A load creates a dozen objects for each tensor, which stay until it ends. Scanning them again
    and again, with all objects of the frameworks, took 25 of the 80 microseconds of CPU time that
    each of 20,000 tensors of 8 kB took, and more than half of the planning.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@takes(
    without=OF_MODELS,
    devices='device=["cuda:0", "cpu"]',
    nodes="streamload.split(path, nodes=[...]), without a budget or a device",
    transfer=NO_TRANSFER,
)
@uncollected()
def plan(path: CheckpointLike, **options: Unpack[LoadOptions]) -> Plan:
    """Plan a load of all of a checkpoint, without a model and without reading any data.

    If the budget is in bytes and `dtype` is given, no device is opened.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        budget: as in `load_state_dict`; for several devices one for each, or a dict.
        device: as in `load_state_dict`; None is "device" if none is opened.
        **options: see `LoadOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        CheckpointError: the checkpoint is invalid.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: a device had to be opened and does not work.
        ValueError: an argument is invalid.
    """
    call = read_call(path, Options.parse(options))
    checkpoint, read, found = call
    specs = partial(described, read)
    try:
        return _planned(call, specs)
    except PlanInfeasibleError as error:
        native = wants_of(checkpoint, found.fill).needs_native_bf16(read.policy)
        spec, *others = specs_under(read, specs(native))
        if others:
            raise
        raise Infeasible(error, call, {**options, "path": path}, spec).suggesting() from None


def described(read: Options, bf16_undecided: bool) -> Sequence[DeviceSpec]:
    """Describe the devices of a plan without a model; open them only if their facts are needed."""
    device = read.device
    names = [device or "device"] if isinstance(device, str) or device is None else list(device)
    check_budget(read, names)
    _check_distinct(names)
    if all(map(read.budget.is_stated, names)) and read.cast != "device" and not bf16_undecided:
        return [unseen_spec(name, read.budget.resolve(name, None)) for name in names]
    devices = open_devices(device, None, {})
    return devices.specs(read.budget, read.policy, read.cast, {}, bf16_undecided=bf16_undecided)


@takes(without=(*OF_MODELS, *CHANGES, *PLACE))
@uncollected()
def split(
    path: CheckpointLike,
    *,
    nodes: Sequence[Node],
    **options: Unpack[LoadOptions],
) -> Plan:
    """Plan to split all of a checkpoint over nodes, by layers, without reading any data.

    No device is opened: without a dtype, bfloat16 is planned as float16, which takes as many bytes.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        nodes: the nodes in the order of the layers, each with its own budget.
        **options: see `LoadOptions`.

    Raises:
        PlanInfeasibleError: it does not fit.
        CheckpointError: the checkpoint is invalid.
        UnsupportedCastError: a dtype cannot be cast or held.
        ValueError: an argument is invalid.
    """
    return split_under(path, nodes, Options.parse(options))


def split_under(path: CheckpointLike, nodes: Sequence[Node], read: Options) -> Plan:
    """Plan to split a checkpoint over nodes; see `split`."""
    check_nodes(nodes)
    call = read_call(path, read)
    specs = node_specs(nodes)
    if STORED in call.options.quant.names:
        raise ValueError(
            'quant="stored" keeps blocks in the modules of one process: nodes load floats, or '
            "quantize them to a format"
        )
    return _planned(call, lambda _: specs, stored=False)


def check_nodes(nodes: Sequence[Node]) -> None:
    """Raise ValueError if an element is no `Node`, or two have one name."""
    if not all(isinstance(node, Node) for node in nodes):
        raise ValueError("nodes is a list of Node, and each has a budget of its own")
    _check_distinct([node.name for node in nodes])


def node_specs(nodes: Sequence[Node]) -> list[DeviceSpec]:
    """Describe nodes to the planner for a split, by their names and budgets alone."""
    rounds = UNSEEN_GRANULARITY_NBYTES
    infos = [DeviceInfo(n.name, "", granularity_nbytes=rounds, threads=2) for n in nodes]
    pairs = zip(infos, nodes, strict=True)
    return [DeviceSpec(i, n.budget, own_host=True, held=n.held) for i, n in pairs]


def _check_distinct(names: Sequence[str]) -> None:
    if not names or len({canonical_device(name) for name in names}) < len(names):
        raise ValueError(f"expected devices or nodes of different names, found {names}")


def _planned(
    call: Call, specs: Callable[[bool], Sequence[DeviceSpec]], *, stored: bool = True
) -> Plan:
    """Plan a load of all of a checkpoint; `specs` describes devices, given `bf16_undecided`.

    ``stored``: whether weights may stay in the blocks of a file.
    """
    read, changed = call.options, call.options.changes.by_tensor
    engine = engine_of(read.cast)

    def planned(quant: QuantPolicy) -> Plan:
        kept = Kept(call.checkpoint, call.found)
        if stored:
            kept = keep_blocks(*kept[:2], quant, changed)
        checkpoint, (fill, _, tied), _, notes = kept
        tried = read.trying(quant)
        wants = wants_under(tried, checkpoint, fill)
        casting = specs_under(tried, specs(wants.needs_native_bf16(tried.policy)))
        made = plan_within(tried, request_of(tried, checkpoint, wants, casting, engine, tied))
        return replace(made, notes=(*made.notes, *notes))

    try:

        def native() -> bool:
            return all(spec.native_bf16 for spec in specs(True))

        made, notes = read.quant.least_loss(
            planned, call.checkpoint, read.policy, native, stored=stored
        )
    except PlanInfeasibleError as error:
        fits = [] if read.quant else QuantPolicy.that_fits(planned, call.checkpoint, stored=stored)
        raise error.suggesting(fits) from None
    return replace(made, notes=(*made.notes, *notes))


def read_call(path: CheckpointLike, read: Options, model: Any = None) -> Call:
    """Open the checkpoint of a call, and map tensors to parameters.

    Dequantizes weights for which a dtype is asked, or which `model` cannot hold as stored.
    """
    checkpoint = opened(path)
    needed = read.residence == "mapped" or read.reader in ("mmap", "direct")
    read = replace(read, fetch=choose_fetch(checkpoint, read.fetch, needed=needed))
    if STORED in read.quant.names:
        read.quant.check_stored(checkpoint)
    if read.policy.rules or read.quant.rules:
        names = all_names(checkpoint)
        check_patterns("dtype", (pattern for pattern, _ in read.policy.rules), names)
        check_patterns("quant", (pattern for pattern, _ in read.quant.rules), names)
    if model is None:
        checkpoint = as_in_models(dequantized(checkpoint, asked(checkpoint, read.policy)))
    elif checkpoint.groups or checkpoint.stored:
        checkpoint = _as_held(model, checkpoint, read)
    read = replace(read, policy=of_one_dtype(model, checkpoint, read.policy))
    if read.quant:
        read.quant.check_meant(checkpoint)
    found = sources(checkpoint, read.mapping, read.rename, all_match=True)
    if model is not None:
        explicit = named_by_user(read.mapping, read.rename)
        found = found._replace(fill=as_model_reads(model, checkpoint, found.fill, explicit))
    changes = changes_of(checkpoint, read.transform, read.adapters)
    return Call(checkpoint, replace(read, changes=changes), found)


def of_one_dtype(model: Any, checkpoint: Checkpoint, policy: DTypePolicy) -> DTypePolicy:
    """Return the policy; of blocks or GGUF, new modules of torch get floats of one dtype.

    Torch does not multiply two dtypes, and these files have float32 for vectors. All floats become
    float16 if blocks do, else the dtype of most elements of the matrices.
    """
    if policy.rules or model is None or isinstance(model, Mapping):
        return policy
    tensors = checkpoint.tensors.values()
    numel = Counter[DType]()
    if any(isinstance(t, Packed) and t.dtype.block > 1 for t in tensors):
        numel[F16] = 1
    elif any(header.format == "gguf" for header in checkpoint.shards):
        for info in tensors:
            if info.dtype.kind == "float" and len(info.shape) > 1:
                numel[info.dtype] += info.numel
    if not numel or framework_of(model) != "torch":
        return policy
    alike = max(numel, key=numel.__getitem__)
    made = {alike, policy.resolve("", alike, native_bf16=False)}  # by a load that was broken off
    owner = framework("torch")
    scales = {part for name, form in owner.coded(model).items() for part in form.names(name)}
    for each in owner.parameters(model):
        own = None if each.is_computed() or scales.intersection(each.names) else each.keeps
        if own is not None and own.kind == "float" and own not in made:
            return policy
    return replace(policy, alike=alike)


def as_model_reads(
    model: Any, checkpoint: Checkpoint, fill: Mapping[str, Source], explicit: Collection[str | None]
) -> Mapping[str, Source]:
    """Return `fill` with the names that a model's own loading code gives tensors.

    `explicit` are the parameters whose sources the user names: no code sees these.
    """

    def read(info: TensorInfo) -> bytes:
        return next(read_whole(checkpoint.shards, [info]))

    def seen() -> dict[str, Seen]:
        return {
            name: Seen(info.dtype.name, shape_of(checkpoint, source), partial(read, info))
            for name, source in fill.items()
            if name not in explicit
            for info in [checkpoint.tensors[source.rows[0].tensor]]
        }

    owner = framework(framework_of(model) or default_framework())
    changed = (
        owner.changed_names(model, seen, checkpoint.versions) if len(explicit) < len(fill) else None
    )
    if changed is None:
        return fill
    names, problems = changed
    if problems:
        call = f"streamload.load_state_dict(None, {str(checkpoint.path)!r}, device='cpu')"
        last = f"{problems[-1]}; write model.load_state_dict({call}.state_dict)"
        last += ", with assign=True if the model is on the meta device"
        raise StateDictMismatchError(checkpoint.path, problems=[*problems[:-1], last])
    if all(name == before for name, before in names.items()) and len(names) == len(fill):
        return fill
    new = {name: fill[before] for name, before in names.items()}
    return new | {name: source for name, source in fill.items() if name in explicit}


def _as_held(model: Any, checkpoint: Checkpoint, read: Options) -> Checkpoint:
    """Decide which quantized weights a model gets as it holds them, and dequantize the others.

    `keep_blocks` undoes that for blocks that ``quant=`` keeps.
    """
    owner = framework(framework_of(model) or default_framework())
    parameters = owner.parameters(model)
    tensors = dict.fromkeys((*checkpoint.members, *checkpoint.groups, *checkpoint.stored))
    fills = parameters_of(read.mapping, read.rename, tensors)
    coded = owner.coded(model)
    names = asked_by_model(checkpoint, read.policy, parameters, fills, coded)
    checkpoint = dequantized(checkpoint, names)
    return in_order_of(checkpoint, parameters, fills)


def run(
    decided: Decision,
    progress: Progress,
    clock: Clock,
    opener: Opener = open_shard,
    left: dict[str, Any] | None = None,
) -> LoadReport:
    """Stream a planned load, and return its report; `clock` runs since the call began.

    `left` gets the finished tensors of a load without a model that fails; None: they are freed.
    """
    made, checkpoint, devices = decided.plan, decided.call.checkpoint, decided.place.devices.opened
    ledger = Ledger(
        # a model may hold more than the budget already; it only becomes less then
        {d.device: max(d.budget_nbytes, d.held_nbytes) for d in made.devices}
        | {STAGING: made.host_budget_nbytes}
    )
    meter = Meter(devices, decided.process_nbytes)
    shared = {name for name, device in devices.items() if device.info.in_process}
    headroom = Headroom(made, shared)
    decided, undo = decided.swapped()
    parameters = decided.match.parameters if decided.match else None
    target = ModelTarget(made, decided.place.devices.framework, devices, parameters, ledger)
    try:
        headroom.begin()
        fetched = _fetched(made, checkpoint)
        fetched_nbytes = sum(fetched.values())
        done = {"loaded": 0, "downloaded": 0}  # each is written by one thread
        word = "downloaded and loaded" if fetched else "loaded"
        with reporting(progress, decided.read_nbytes + fetched_nbytes, word) as tell:

            def downloaded(nbytes: int) -> None:
                done["downloaded"] = min(nbytes, fetched_nbytes)
                tell(sum(done.values()))

            def progressed(nbytes: int) -> None:
                meter.sample()
                done["loaded"] = nbytes
                tell(sum(done.values()))

            for device in devices.values():
                device.synchronize()  # nothing may be computing on what is written in place
            target.begin_all()
            target.map_all(checkpoint)
            transfer = Transfer(
                plan=made,
                checkpoint=checkpoint,
                devices=devices,
                changes=decided.call.options.changes,
                opener=opener,
                headroom=headroom,
                progress=progressed,
            )
            with (
                deferred_interrupt() as interrupt,
                coming(fetched, downloaded, interrupt.cancel),
            ):
                stats = stream(transfer, target, ledger)
    except BaseException as error:
        state = target.fail()
        if left is not None:
            left |= target.state_dict
        target.state_dict.clear()  # a kept error does not keep the memory
        if not state.loaded and not state.invalid:
            undo()
        if isinstance(error, StreamloadError):
            error.state = state
        error.add_note(f"parameters: {state}")
        raise
    finally:
        for device in devices.values():
            with suppress(Exception):  # the first error is raised
                device.synchronize()
                device.trim()
        headroom.end()
    meter.sample(at_once=True)
    return _report(decided, stats, target, ledger, meter, clock)


def _fetched(made: Plan, checkpoint: Checkpoint) -> dict[Url, int]:
    """Return lengths in bytes of the files that a load downloads and reads."""
    if "cache" not in made.readers:
        return {}
    rows = (row for move in made.placements for row in move.source)
    read = {checkpoint.tensors[row.tensor].shard for row in rows}
    return {
        url: header.file_nbytes
        for header, kind in zip(checkpoint.shards, made.readers, strict=True)
        if kind == "cache" and header.path in read and isinstance(url := place_of(header.path), Url)
    }


def _report(
    decided: Decision,
    stats: StreamStats,
    target: ModelTarget,
    ledger: Ledger,
    meter: Meter,
    clock: Clock,
) -> LoadReport:
    """Return the report of a finished load: its plan, and the measurements."""
    made, checkpoint, devices = decided.plan, decided.call.checkpoint, decided.place.devices.opened
    fallbacks = [
        f"{n} of {len(made.readers)} files: {why}" for why, n in stats.reader_fallbacks.items()
    ]
    names_of = made.placements.names
    counts = {names_of[i]: count for i, count in sorted(stats.counts.items()) if count.total}
    errors = {names_of[i]: count for i, count in sorted(stats.errors.items())}
    warn_of_overflow(checkpoint.path, counts, made.out_of_range)
    tensors = target.state_dict
    grown, measured = clock.grown_nbytes(decided.process_nbytes), dict(meter.peaks)
    if "process" in measured:
        measured["process"] += grown
    return LoadReport(
        path=str(checkpoint.path),
        plan=made,
        read_nbytes=stats.read_nbytes,
        resident_nbytes=made.resident_nbytes,
        seconds=clock.seconds,
        stream_seconds=stats.seconds,
        transfer_seconds=stats.transfer_seconds if stats.read_nbytes else 0.0,
        predicted_nbytes={d.device: d.peak_nbytes for d in made.devices}
        | {STAGING: made.host_nbytes, "process": made.process_nbytes + grown},
        held_nbytes={
            name: ledger.peak(name) for name in (*(d.device for d in made.devices), STAGING)
        },
        measured_nbytes=measured,
        counts=counts,
        errors=errors,
        skipped=decided.skipped,
        missing=tuple(decided.match.left_out) if decided.match else (),
        tied=tuple(decided.match.tied) if decided.match else (),
        device_map=_device_map(decided),
        allocators={
            name: counters for name, device in devices.items() if (counters := device.counters())
        },
        notes=(*made.notes, *fallbacks),
        page_cache=stats.page_cache,
        dropped_nbytes=stats.dropped_nbytes,
        state_dict={name: tensors[name] for name in made.placements.names} if tensors else {},
        files={
            str(part.path): part.state
            for header in checkpoint.shards
            for part in header.files
            if part.state is not None
        },
    )


def _device_map(decided: Decision) -> dict[str, str | int]:
    """Return the device of each module of a load, in the form of accelerate's ``device_map``."""
    by_name = {move.name: move.kind.device for move in decided.plan.placements}
    if decided.match is None:
        return device_map(by_name)
    names = {
        name: by_name[first]
        for first, parameter in decided.match.parameters.items()
        for name in parameter.names
    }
    return device_map(names, (*decided.match.unfilled, *decided.place.unstored))
