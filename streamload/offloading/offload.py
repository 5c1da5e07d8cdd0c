"""`offload`: what fits stays on the device, the rest streams through it at every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, Unpack

from streamload.checkpoint.open import Checkpoint, CheckpointLike
from streamload.core.dtypes import DType
from streamload.core.patterns import Patterns, Selection, check_patterns
from streamload.core.progress import Progress
from streamload.core.units import parse_bytes
from streamload.devices.base import Device
from streamload.errors import OffloadError, StateDictMismatchError, Suggestion
from streamload.loading.load import described, read_call, run, uncollected
from streamload.loading.options import NO_TRANSFER, LoadOptions, PlanOptions, takes
from streamload.loading.prepare import Call, Decision, Options, Place
from streamload.loading.report import Clock, LoadReport
from streamload.offloading.experts import ExpertCache
from streamload.offloading.groups import Group, groups_of_checkpoint
from streamload.offloading.host import HostFile
from streamload.offloading.layers import Layer, SlotMemory
from streamload.offloading.model import ModelAdapter
from streamload.offloading.models import adapter_of, check_place, device_of
from streamload.offloading.overrun import OnOverrun, check_on_overrun
from streamload.offloading.plan import OffloadPlan, decide, engine_of, streamed_from
from streamload.offloading.prefetch import Rounds
from streamload.offloading.report import OffloadReport
from streamload.offloading.suggest import planned_by_layers
from streamload.offloading.views import FileViews
from streamload.planning.match import wants_of
from streamload.planning.requests import DeviceSpec, TensorRequests
from streamload.planning.shares import Share
from streamload.planning.sources import Found
from streamload.planning.suggest import Wanted, call_of_library


class Offloaded:
    """A model that is offloaded, until `close` or the end of a ``with`` block.

    Attributes:
        plan: what stays on the device, and what streams.
        load: what loading that which stays did.
    """

    def __init__(
        self,
        plan: OffloadPlan,
        load: LoadReport,
        model: ModelAdapter,
        rounds: Rounds | None,
        host: HostFile | None = None,
    ) -> None:
        self.plan, self.load = plan, load
        self._model, self._rounds, self._host = model, rounds, host

    @property
    def report(self) -> OffloadReport:
        """What it did so far."""
        model = self._model
        return OffloadReport.of(self.plan, self.load, model.timed, self._rounds, model.room.overrun)

    def close(self) -> None:
        """End the streaming and give the slots back.

        What stayed on the device stays there. What streamed holds nothing any more, and raises when
        it is used, until the model is loaded or offloaded again. Nothing where it was closed.

        Raises:
            OffloadError: a pass is under way.
        """
        if self._model.timed.running:
            raise OffloadError("it cannot be closed while a pass is under way: let that end first")
        if self._rounds is not None:
            self._rounds.close("the model's offload was closed: offload or load it again")
        if self._host is not None:
            self._host.close()
        self._model.take_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OffloadAsked:
    """What a call of `offload` asks for beside the options of a load, checked.

    Attributes:
        tokens: leave room for what a pass of so many computes.
        stay: patterns of names of parameters that stay.
        layers: patterns of names of modules that are layers.
        host_nbytes: most bytes of layers that host memory keeps.
        on_overrun: what a pass of more tokens does than there is room for.
    """

    tokens: int | None
    stay: tuple[str, ...]
    layers: tuple[str, ...]
    host_nbytes: int
    on_overrun: OnOverrun = "warn"

    @classmethod
    def read(
        cls,
        tokens: int | None,
        stay: Patterns,
        layers: Patterns,
        host: float | str,
        options: Mapping[str, Any],
        on_overrun: OnOverrun = "warn",
    ) -> Self:
        """Read them; raises ValueError for one that is invalid, or for an option of the load."""
        kept = check_asked(tokens, stay, options)
        patterns, over = Selection.parse(layers).select, check_on_overrun(on_overrun)
        return cls(tokens, kept, patterns, parse_bytes(host), over)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is going to be offloaded: everything decided, nothing moved yet.

    Attributes:
        plan: what stays on the device, and what streams.
        load: the load of what stays.
        wants: all parameters.
        spec: the device.
        read: the options.
        checkpoint: the headers.
        adapter: the model.
    """

    plan: OffloadPlan
    load: Decision
    wants: TensorRequests
    spec: DeviceSpec
    read: Options
    checkpoint: Checkpoint
    adapter: ModelAdapter

    @classmethod
    def make(
        cls,
        place: Place,
        checkpoint: Checkpoint,
        read: Options,
        found: Found,
        asked: OffloadAsked,
        *,
        suggest: Callable[[], Sequence[Suggestion]] = tuple,
        part: Share | None = None,
    ) -> Self:
        """Match and plan.

        Args:
            place: the model, and where it goes.
            checkpoint: the headers.
            read: the options.
            found: what fills each parameter.
            asked: what was asked for beside.
            suggest: says what to write where they have not.
            part: what a rank has of the model; None for all of it.
        """
        check_place(place)
        match = place.match(Call(checkpoint, read, found), suggest)
        wants = match.quantised(checkpoint, place.coded, read.changes.by_tensor)
        spec, cast = device_of(place, read, wants)
        adapter = adapter_of(place, match, asked.layers)
        adapter.room.on_overrun = asked.on_overrun
        if part is None:  # what stays may be with another rank
            names_there = [n for p in match.parameters.values() for n in p.names]
            check_patterns("stay", asked.stay, names_there)
        sizes = wants.nbytes(read.policy, spec.native_bf16)

        def grouped(layers: Sequence[str]) -> list[Group]:
            by = adapter if layers is asked.layers else adapter_of(place, match, layers)
            return by.groups(checkpoint, wants, sizes, asked.stay, read.changes.by_tensor)

        def planned(groups: Sequence[Group]) -> OffloadPlan:
            return decide(
                *(read, checkpoint, wants, spec, groups, cast),
                tokens=asked.tokens,
                has_layers=part is None or bool(part.layers),
                has_head=part is None or part.has_head,
                held_nbytes=place.held.get(spec.name, 0),
                host_nbytes=asked.host_nbytes,
                notes=adapter.notes,
            )

        made = planned_by_layers(asked.layers, grouped, planned, wants, sizes)
        stays = {*made.residency.stays}
        kept = [wants.names[at] for g in made.groups if g.name in stays for at in g.wants]
        load = load_of_stays(made, place, checkpoint, read, found, kept)
        return cls(made, load, wants, spec, read, checkpoint, adapter)

    @property
    def dsts(self) -> Sequence[DType]:
        """The dtype that each parameter becomes."""
        return self.wants.dsts(self.read.policy, self.spec.native_bf16)

    def run(self, progress: Progress, clock: Clock) -> Offloaded:
        """Load what stays, and let the rest stream."""
        made, adapter, checkpoint = self.plan, self.adapter, self.checkpoint
        ((_, device),) = self.load.devices.items()
        rounds, kept_file = None, None
        try:
            adapter.empty(made, self.wants)
            report = run(self.load, progress, clock)
            made, rounds, kept_file = begin(
                made, checkpoint, self.wants, self.spec, device, adapter, self.read
            )
            out_of_range = self.read.out_of_range
            if made.residency.absent:
                adapter.put(made, checkpoint, self.wants, self.dsts, device, rounds, out_of_range)
            elif made.tokens is not None or made.cached_tokens:
                adapter.watch()
            adapter.room.tokens, adapter.room.cached = made.tokens, made.cached_tokens
        except BaseException:
            if rounds is not None:
                rounds.close("it could not be offloaded")
            if kept_file is not None:
                kept_file.close()
            adapter.take_out()
            raise
        return Offloaded(made, report, adapter, rounds, kept_file)


@takes(transfer=NO_TRANSFER)
def offload(
    model: Any,
    path: CheckpointLike,
    *,
    tokens: int | None = None,
    stay: Patterns = (),
    layers: Patterns = (),
    host: float | str = 0,
    on_overrun: OnOverrun = "warn",
    **options: Unpack[LoadOptions],
) -> Offloaded:
    """Let a model run that is larger than its budget.

    What fits stays on the device. The layers that do not fit stream through slots of it at every
    pass, while the layer before computes, straight from the checkpoint: nothing is copied back, and
    the budget holds. A model that fits is loaded, and its passes cost nothing more.

        with streamload.offload(model, "Llama-3-8B/", budget="3GB") as offloaded:
            model.generate(...)
        print(offloaded.report)

    In a mixture of experts that transformers keeps fused, what streams is the experts that the
    router chose: a cache of whole experts takes the room that the rest leaves. They compute as
    transformers' "grouped_mm" does where the configuration names it, else as its "eager" does.

    The weights of a layer are there while its module computes, for one thread at a time. The model
    cannot be trained, saved, moved or copied; its checkpoint is what it is.

    Args:
        model: a torch module, on the meta device to start with or wherever it is; or a model of
            tinygrad, whose layers are objects that are called.
        path: as in `load_state_dict`.
        tokens: leave room for what a pass of so many tokens (of all sequences together) computes
            beside weights, as ``config.json`` tells, and without ``context`` for the KV cache of
            these tokens, so that all of it stays under the budget. None leaves none: what passes
            compute is beside the budget.
        stay: patterns of names of parameters that stay on the device.
        layers: patterns of names of the modules that are layers ("encoder.stage_*"), where these
            names do not tell ("layers.3", "h.3", "blocks.3").
        host: most bytes of layers that host memory keeps, as "8GB": exactly as they are in the
            files, and all experts of a layer where no other layer is left. The rest comes from the
            page cache, where what streams fits into the memory that is free, and else from the
            disk.
        on_overrun: what a pass of more tokens does than ``tokens`` or ``context`` leave room for,
            in the pass itself or in the KV cache: "warn" once (RuntimeWarning), with a line in the
            report, or "error" for an OffloadError before it computes.
        device: one device; see `load_state_dict`.
        **options: see `LoadOptions`.

    Returns:
        What streams it; its ``report`` says what passes did.

    Raises:
        PlanInfeasibleError: not even the largest layer and what must stay fit; before any data is
            read or any memory is allocated.
        OffloadError: the model cannot be offloaded.
        StateDictMismatchError: model and checkpoint do not match; before any data is read.
        CheckpointError: the checkpoint is invalid, or does not tell how much ``tokens`` take.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceError: the device is not there, does not work, or failed.
        ValueError: an argument is invalid.

    A pass raises what its layers meet: FileChangedError where a file is not what it was,
    OffloadError where two threads run the model at once, or where a module does not leave its
    weights as they are (it keeps a view, or writes into them). The model can run again after it.
    """
    clock = Clock()
    asked = OffloadAsked.read(tokens, stay, layers, host, options, on_overrun)
    with uncollected():
        checkpoint, read, found = read_call(path, model, **options)
        place = Place.look(model, checkpoint, read, options["device"])
        wanted = Wanted(
            *(checkpoint, place.parameters, options["mapping"], options["rename"]),
            strict=read.strict,
        )
        try:
            prepared = Prepared.make(
                *(place, checkpoint, read, found, asked), suggest=wanted.suggestions
            )
        except StateDictMismatchError as error:
            call = call_of_library(model, checkpoint.path, offload=True)
            raise error.or_by(call) from None
    return prepared.run(options["progress"], clock)


@takes(devices='device="cuda:0"')
@uncollected()
def plan_offload(
    path: CheckpointLike,
    *,
    tokens: int | None = None,
    stay: Patterns = (),
    layers: Patterns = (),
    host: float | str = 0,
    **options: Unpack[PlanOptions],
) -> OffloadPlan:
    """Plan to offload a model, from its checkpoint alone, without reading any data.

    What is a layer, and what an embedding whose rows are read, the names of the tensors tell. With
    a budget in bytes and a dtype, no device is looked at.

    Args:
        path: as in `streamload.load_state_dict`, or an open checkpoint.
        tokens: as in `offload`; so are ``stay``, ``layers`` and ``host``.
        stay: see ``tokens``.
        layers: see ``tokens``.
        host: see ``tokens``.
        device: one device.
        **options: see `streamload.plan`.

    Raises:
        PlanInfeasibleError: not even the largest layer and what must stay fit.
        CheckpointError: the checkpoint is invalid, or does not tell how much ``tokens`` take.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: a device had to be looked at and does not work.
        ValueError: an argument is invalid.
    """
    kept = check_asked(tokens, stay, options)
    checkpoint, read, (fill, _, tied) = read_call(path, **options)
    wants = wants_of(checkpoint, fill)
    specs = described(read, options["device"], wants.needs_native_bf16(read.policy))
    (spec,) = read.casting(specs)
    check_patterns("stay", kept, wants.names)
    sizes = wants.nbytes(read.policy, spec.native_bf16)
    patterns = Selection.parse(layers).select

    def grouped(layers: Sequence[str]) -> list[Group]:
        return groups_of_checkpoint(wants, sizes, tied, kept, checkpoint.config, layers)

    def planned(groups: Sequence[Group]) -> OffloadPlan:
        return decide(
            *(read, checkpoint, wants, spec, groups, engine_of(read)),
            tokens=tokens,
            host_nbytes=parse_bytes(host),
        )

    return planned_by_layers(patterns, grouped, planned, wants, sizes)


def check_asked(tokens: int | None, stay: Patterns, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns of what stays; raises ValueError for an option that is invalid."""
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ValueError(f"tokens is a whole number above 0, or None, not {tokens!r}")
    if options["quant"] is not None:
        raise ValueError(
            "quant: layers stream as they are stored: quantise the checkpoint once, with "
            "streamload convert IN OUT --quant FORMAT, and offload that"
        )
    if options["residence"] != "memory":
        raise ValueError('residence: layers stream through memory: leave it out (it is "memory")')
    device = options["device"]
    if device is not None and not isinstance(device, str) and isinstance(device, Sequence):
        raise ValueError(f"a model is offloaded to one device, not to {device!r}")
    return Selection.parse(stay).select


def load_of_stays(
    made: OffloadPlan,
    place: Place,
    checkpoint: Checkpoint,
    read: Options,
    found: Found,
    names: Sequence[str],
) -> Decision:
    """Decide the load of what stays."""
    fill, _, tied = found
    chosen = set(names)
    kept = [p for p in place.parameters if chosen.intersection(p.names)]
    theirs = {each for p in kept for each in p.names} if place.owner is not None else chosen
    part = replace(place, parameters=kept, reusable={}, held=dict.fromkeys(place.held, 0))
    rest = {name: source for name, source in fill.items() if name in theirs}
    ties = {name: other for name, other in tied.items() if name in theirs}
    room = made.cache_nbytes + made.activation_nbytes + made.reserve_nbytes
    options = replace(read, reserve_nbytes=room, cache=None, one_device=True)
    return Decision.make(part, Call(checkpoint, options, Found(rest, tied=ties)))


class Memory(Protocol):
    """Where what streams is on a device."""

    def slots(self, plan: OffloadPlan, device: Device) -> SlotMemory:
        """Allocate the slots."""

    def views(self, plan: OffloadPlan, checkpoint: Checkpoint, device: Device) -> FileViews | None:
        """Map the files of what streams; None where the framework does not compute on these."""


def begin(
    made: OffloadPlan,
    checkpoint: Checkpoint,
    wants: TensorRequests,
    spec: DeviceSpec,
    device: Device,
    memory: Memory,
    read: Options,
) -> tuple[OffloadPlan, Rounds | None, HostFile | None]:
    """Read what host memory keeps, and allocate the slots; beside them, the plan of both."""
    if made.stream is None:
        return made, None, None
    if not made.host:
        return made, _rounds(made, checkpoint, device, memory, read), None
    names, ahead = made.tensors_of(made.host, wants), made.stream.ahead
    kept = HostFile(checkpoint, names, keeps=made.cached, ahead=ahead)
    try:
        made = streamed_from(made, read, kept.checkpoint, wants, spec)
        return made, _rounds(made, kept.checkpoint, device, memory, read), kept
    except BaseException:
        kept.close()
        raise


def _rounds(
    made: OffloadPlan, checkpoint: Checkpoint, device: Device, memory: Memory, read: Options
) -> Rounds:
    """Allocate the slots."""
    assert made.stream is not None
    residency, kinds = made.residency, made.stream.placements.kinds
    sizes = {layer.name: layer.nbytes for layer in made.sizes}
    names = [(name, -(-sizes[name] // residency.slot_nbytes)) for name in residency.streams]
    for name, count in zip(residency.experts, made.experts, strict=True):
        names += [(name, 1)] * count
    layers = [
        Layer(name, placements, slots, sum(kinds[at].src_nbytes for at in placements))
        for (name, slots), placements in zip(names, made.layer_placements, strict=True)
    ]
    views = memory.views(made, checkpoint, device) if made.views else None
    slots = views or memory.slots(made, device)
    return Rounds(
        *(made.stream, checkpoint, device, layers, slots, residency.slots, read.changes),
        views=views,
        experts=ExpertCache(made.experts, residency.cache_slots),
    )
