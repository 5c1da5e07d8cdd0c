"""`offload`: keep the layers that fit on the device; stream the others at every pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, Unpack

from streamload.checkpoint.fetch import on_disk
from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.core.chart import Shown
from streamload.core.dtypes import BY_NAME
from streamload.core.patterns import check_patterns
from streamload.core.progress import Progress
from streamload.core.units import format_bytes, format_rate
from streamload.devices.base import Device
from streamload.errors import (
    Fit,
    OffloadError,
    StateDictMismatchError,
    StreamloadError,
    Suggestion,
    printable,
)
from streamload.loading.load import Infeasible, described, read_call, run, uncollected
from streamload.loading.options import (
    NO_TRANSFER,
    OF_MODELS,
    OPTIONS,
    OffloadOptions,
    Options,
    takes,
)
from streamload.loading.place import host_room_nbytes
from streamload.loading.prepare import Call, Decision, Place, specs_under
from streamload.loading.report import Clock, LoadReport
from streamload.offloading.layers import groups_of_checkpoint
from streamload.offloading.model import ModelAdapter, Passes, adapter_of, check_place, device_of
from streamload.offloading.plan import OffloadPlan, Problem, decide_by_layers
from streamload.offloading.prefetch import Rounds
from streamload.offloading.slots import ExpertCache, FileViews, HostFile, Layer, Slots
from streamload.planning.match import wants_of
from streamload.planning.moves import DeviceSpec
from streamload.planning.plan import load_nbytes
from streamload.planning.quant_policy import NO_QUANT, STORED
from streamload.planning.shares import Share
from streamload.planning.sources import Found
from streamload.planning.suggest import Wanted, call_of_library
from streamload.streaming.memory_watch import PassWatch
from streamload.streaming.state import Transfer


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Counts of the experts of a layer so far.

    Attributes:
        hits: number of chosen experts that were in the cache when the router had chosen.
        misses: number of chosen experts that were read.
        stall: seconds that the layer waited for experts.
        read_nbytes: file bytes read for experts.
    """

    hits: int
    misses: int
    stall: float
    read_nbytes: int

    @property
    def hit_rate(self) -> float:
        """The share of the chosen experts that were in the cache, 0 to 1."""
        return self.hits / max(self.hits + self.misses, 1)


@dataclass(frozen=True, slots=True)
class OffloadReport(Shown):
    """Counts and times of an offload so far. Prints as a short table.

    Attributes:
        plan: which layers stay and which stream.
        load: the report of loading the layers that stay.
        passes: number of passes.
        read_nbytes: file bytes that passes read, without single rows of embeddings.
        seconds: wall time of the passes; 0 if only parts of the model were called.
        stalls: by layer, seconds that passes waited for it.
        misses: how often another layer was asked for than expected.
        wire_nbytes_per_s: file bytes read per second while any layer was being read.
        experts: by layer whose experts are in a cache, their counts.
        overrun: in words, the passes with more tokens than the plan has room for; "" if none.
    """

    plan: OffloadPlan
    load: LoadReport
    passes: int
    read_nbytes: int
    seconds: float
    stalls: Mapping[str, float]
    misses: int
    wire_nbytes_per_s: float
    experts: Mapping[str, ExpertReport] = field(default_factory=dict)
    overrun: str = ""

    @classmethod
    def of(
        cls, plan: OffloadPlan, load: LoadReport, passes: Passes, rounds: Rounds
    ) -> OffloadReport:
        cache = rounds.experts
        rows = zip(cache.hits, cache.misses, cache.stalls, cache.read_nbytes, strict=True)
        experts = (ExpertReport(*row) for row in rows)
        return cls(
            plan=plan,
            load=load,
            passes=passes.count,
            read_nbytes=rounds.read_nbytes,
            seconds=passes.seconds,
            stalls=dict(zip(plan.residency.streams, rounds.stalls, strict=True)),
            misses=rounds.misses,
            wire_nbytes_per_s=rounds.read_nbytes / rounds.busy_s if rounds.busy_s else 0.0,
            experts=dict(zip(plan.residency.experts, experts, strict=True)),
            overrun=passes.overrun,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices of the load and of the plan, one sentence each."""
        return (*self.load.notes, *self.plan.notes)

    @property
    def resident_nbytes(self) -> int:
        """Device bytes of the weights that stay."""
        return self.plan.residency.resident_nbytes

    @property
    def process_nbytes(self) -> int:
        """Predicted growth of the process: the load, slots, and KV cache and activations there.

        As `LoadReport.predicted_nbytes`, from the begin of the call on.
        """
        plan, there = self.plan, self.load.plan.devices
        nbytes = self.load.predicted_nbytes["process"] + plan.host_nbytes
        if plan.stream is not None:
            # the load frees its scratch before passes take theirs
            freed = sum(d.scratch_nbytes for d in there if d.shared_memory and d.charged)
            nbytes += max(plan.passes_nbytes + load_nbytes(0) - freed, 0)
        if all(d.shared_memory and d.charged for d in there):
            nbytes += plan.cache_nbytes + plan.activation_nbytes
        return nbytes

    @property
    def pass_nbytes(self) -> int:
        """File bytes that a pass reads, without experts and single rows of embeddings."""
        return self.plan.residency.pass_nbytes

    @property
    def hit_rate(self) -> float:
        """The share of the experts chosen by all layers that were in the cache, 0 to 1."""
        layers = self.experts.values()
        return sum(e.hits for e in layers) / max(sum(e.hits + e.misses for e in layers), 1)

    @property
    def wire_share(self) -> float:
        """Bytes read per second of passes, as a share of ``wire_nbytes_per_s``; 0 if unknown."""
        if not self.seconds or not self.wire_nbytes_per_s:
            return 0.0
        return self.read_nbytes / self.seconds / self.wire_nbytes_per_s

    def __str__(self) -> str:
        """A table of the plan, with times of passes and bytes read."""
        lines = [str(self.plan)]
        if self.passes:
            each = self.seconds / self.passes
            lines.append(
                f"{self.passes} pass{'es' * (self.passes > 1)}, {each:.3f} s each; "
                f"{format_bytes(self.read_nbytes)} read; "
                f"waited {sum(self.stalls.values()) / self.passes:.3f} s a pass for layers"
            )
        if self.passes and self.experts:
            found = self.experts.values()
            name, worst = min(self.experts.items(), key=lambda item: item[1].hit_rate)
            lines.append(
                f"experts: {self.hit_rate:.0%} of the chosen ones were in the cache (least in "
                f"{printable(name)}: {worst.hit_rate:.0%}); "
                f"{format_bytes(sum(e.read_nbytes for e in found))} read; waited "
                f"{sum(e.stall for e in found) / self.passes:.3f} s a pass for them"
            )
        if self.wire_share:
            lines.append(
                f"layers came at {format_rate(self.wire_nbytes_per_s, 1)}; passes had "
                f"{self.wire_share:.0%} of that"
            )
        if self.overrun:
            lines.append(f"beyond the budget: {self.overrun}")
        return "\n".join([*lines, *map(printable, self.load.notes)])

    __repr__ = __str__


class Offloaded:
    """A model that is offloaded, until `close` or the end of a ``with`` block.

    Attributes:
        plan: which layers stay on the device, and which stream.
        load: the report of loading the layers that stay.
    """

    def __init__(
        self, plan: OffloadPlan, load: LoadReport, model: ModelAdapter[Any], rounds: Rounds
    ) -> None:
        self.plan, self.load, self._model, self._rounds = plan, load, model, rounds

    @property
    def report(self) -> OffloadReport:
        """Counts and times of the passes so far."""
        return OffloadReport.of(self.plan, self.load, self._model.passes, self._rounds)

    def close(self) -> None:
        """End the streaming and free the slots. Does nothing if it was closed.

        Resident weights stay on the device. Streamed ones hold nothing, and raise when they are
        used until the model is loaded or offloaded again.

        Raises:
            OffloadError: a pass is under way.
        """
        if self._model.passes.running:
            raise OffloadError("it cannot be closed while a pass is under way: let that end first")
        self._rounds.close("the model's offload was closed: offload or load it again")
        self._model.take_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def for_passes(read: Options) -> Options:
    """Return the options of a call whose layers stream; ValueError if one does not apply."""
    if read.quant.rules == (("*", STORED),):
        raise ValueError(
            'quant="stored": layers stream as they are stored if config.json names their '
            "formats: write that once, by streamload.transformers.from_pretrained(IN, "
            'quant="stored").save_pretrained(OUT) (of GGUF also by streamload convert IN OUT '
            "--dtype checkpoint), and then from_pretrained(OUT, offload=True)"
        )
    if read.quant != NO_QUANT:
        raise ValueError(
            "quant: layers stream as they are stored: quantize the checkpoint once, with "
            "streamload convert IN OUT --quant FORMAT, and offload that"
        )
    if read.residence != "memory":
        raise ValueError('residence: layers stream through memory: leave it out (it is "memory")')
    if isinstance(read.device, Sequence) and not isinstance(read.device, str):
        raise ValueError(f"a model is offloaded to one device, not to {read.device!r}")
    return read


@dataclass(frozen=True, slots=True)
class Prepared:
    """An offload that is decided: plan, load and adapter, with no data read or freed yet."""

    plan: OffloadPlan
    load: Decision  # to load the layers that stay
    problem: Problem
    adapter: ModelAdapter[Any]

    @classmethod
    def make(
        cls,
        place: Place,
        checkpoint: Checkpoint,
        read: Options,
        found: Found,
        *,
        suggest: Callable[[], Sequence[Suggestion]] = tuple,
        part: Share | None = None,
    ) -> Self:
        """Match a model to a checkpoint, and plan its offload; reads no data.

        ``part``: the share of a rank, None for the whole model; ``suggest``: hints for a mismatch.
        """
        check_place(place)
        if place.owner is not None and (after := place.owner.followed_by(place.model)):
            raise OffloadError(
                f"{checkpoint.path}: modules have hooks that are called after a load "
                "(register_load_state_dict_post_hook), and the weights of layers are not there "
                f"then: {', '.join(after[:8])}: load the model whole, or, if they need no weights, "
                "write module._load_state_dict_post_hooks.clear()"
            )
        match = place.match(Call(checkpoint, read, found), suggest)
        assert match is not None  # `check_place` has refused all but models
        wants = match.quantised(checkpoint, place.coded, read.changes.by_tensor)
        spec = device_of(place, read, wants)
        adapter = adapter_of(place, match, read.layers)
        adapter.passes.on_overrun = read.on_overrun
        if part is None:  # another rank may have the weights that stay
            names_there = [n for p in match.parameters.values() for n in p.names]
            check_patterns("stay", read.stay, names_there)
        problem = Problem(
            *(read, checkpoint, wants, spec),
            has_layers=part is None or bool(part.layers),
            has_head=part is None or part.has_head,
            held_nbytes=place.held.get(spec.name, 0),
        )

        def grouped(layers: Sequence[str]) -> Problem:
            by = adapter if layers is read.layers else adapter_of(place, match, layers)
            return replace(problem, groups=by.groups(problem, read.stay), notes=adapter.notes)

        made = decide_by_layers(read.layers, grouped)
        return cls(made, load_of_stays(made, problem, place, found), problem, adapter)

    def run(self, progress: Progress, clock: Clock) -> Offloaded:
        """Load the layers that stay, and let the others stream; after an error, undo all."""
        adapter, ((_, device),) = self.adapter, self.load.place.devices.opened.items()
        rounds = rounds_of(self.plan, device)
        try:
            adapter.empty(self.plan, self.problem.wants)
            report = run(self.load, progress, clock)
            made = begin(rounds, self.plan, self.problem, device, adapter.slots)
            if made.residency.absent:
                adapter.put(made, self.problem, device, rounds)
            elif made.tokens is not None or made.cached_tokens:
                adapter.end_putting(made, None)
            adapter.passes.tokens, adapter.passes.cached = made.tokens, made.cached_tokens
        except BaseException:
            rounds.close("it could not be offloaded")
            adapter.take_out()
            raise
        return Offloaded(made, report, adapter, rounds)


@takes(transfer=NO_TRANSFER)
def offload(
    model: Any,
    path: CheckpointLike,
    **options: Unpack[OffloadOptions],
) -> Offloaded:
    """Run a model that is larger than its budget.

    Layers that fit stay on the device. The others stream through slots of it at every pass, while
    the layer before computes, straight from the checkpoint: nothing is copied back, and the budget
    holds. A model that fits is loaded, and its passes cost nothing more.

        with streamload.offload(model, "Llama-3-8B/", budget="3GB") as offloaded:
            model.generate(...)
        print(offloaded.report)

    In a mixture of experts that transformers keeps fused, the experts that the router chose stream:
    a cache of whole experts takes the remaining room. They compute as transformers' "grouped_mm"
    does if the configuration names it, else as its "eager" does.

    A layer has its weights while its module computes, for one thread at a time. The model cannot be
    trained, saved, moved or copied; its checkpoint must not change.

    Args:
        model: a torch module, on the meta device or any other; or a model of tinygrad, whose layers
            are objects that are called.
        path: as in `load_state_dict`.
        device: one device; see `load_state_dict`.
        **options: see `OffloadOptions`.

    Returns:
        A handle, with a ``report`` of passes.

    Raises:
        PlanInfeasibleError: not even the largest layer and what must stay fit; before any data is
            read or any memory is allocated.
        OffloadError: the model cannot be offloaded.
        StateDictMismatchError: model and checkpoint do not match; before any data is read.
        CheckpointError: the checkpoint is invalid, or cannot size ``tokens``.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceError: the device is absent, does not work, or failed.
        ValueError: an argument is invalid.

    A pass raises errors of its layers: FileChangedError if a file changed, OffloadError if two
    threads run the model at once, or if a module keeps a view of its weights or writes into them.
    The model can run again after it.
    """
    return offload_under(model, path, Options.parse(options))


def offload_under(model: Any, path: CheckpointLike, read: Options) -> Offloaded:
    """Offload a model under parsed options; see `offload`."""
    clock, read = Clock(), for_passes(read)
    with uncollected():
        host_room_nbytes()  # to open the checkpoint takes some megabytes
        source = opened(path)
        prepared = prepare(model, source, read)
        local = on_disk(source, read.fetch, read.progress)
        if local is not source:  # planned again, by the files
            return offload_under(model, local, read)
    offloaded = prepared.run(read.progress, clock)
    if (owner := prepared.load.place.owner) is not None:
        owner.after_load(model, (), ())  # no hooks: `Prepared.make` refuses them
    return offloaded


def prepare(model: Any, source: Checkpoint, options: Options) -> Prepared:
    """Decide an offload, and read no data; errors as in `offload`."""
    checkpoint, read, found = read_call(source, options, model)
    place = Place.look(model, checkpoint, read)
    wanted = Wanted(*(checkpoint, place.parameters, read.mapping, read.rename), strict=read.strict)
    try:
        return Prepared.make(place, checkpoint, read, found, suggest=wanted.suggestions)
    except StateDictMismatchError as error:
        call = call_of_library(model, checkpoint.path, offload=True)
        raise error.or_by(call) from None


@takes(without=(*OF_MODELS, "on_overrun"), devices='device="cuda:0"')
@uncollected()
def plan_offload(path: CheckpointLike, **options: Unpack[OffloadOptions]) -> OffloadPlan:
    """Plan to offload a model, from its checkpoint alone, without reading any data.

    Names of tensors identify layers, and embeddings whose rows are read. If the budget is in bytes
    and ``dtype`` is given, no device is opened.

    Args:
        path: as in `streamload.load_state_dict`, or an open checkpoint.
        device: one device.
        **options: see `OffloadOptions`.

    Raises:
        PlanInfeasibleError: not even the largest layer and what must stay fit.
        CheckpointError: the checkpoint is invalid, or cannot size ``tokens``.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: a device had to be opened and does not work.
        ValueError: an argument is invalid.
    """
    checkpoint, read, (fill, _, tied) = read_call(path, for_passes(Options.parse(options)))
    wants = wants_of(checkpoint, fill)
    (spec,) = specs_under(read, described(read, wants.needs_native_bf16(read.policy)))
    check_patterns("stay", read.stay, wants.names)
    problem = Problem(read, checkpoint, wants, spec)

    def grouped(layers: Sequence[str]) -> Problem:
        by_name = groups_of_checkpoint(
            *(wants, problem.nbytes, tied, read.stay, checkpoint.config, layers)
        )
        return replace(problem, groups=by_name)

    return decide_by_layers(read.layers, grouped)


def load_of_stays(made: OffloadPlan, problem: Problem, place: Place, found: Found) -> Decision:
    """Return the planned load, not run yet, of the layers that stay on the device."""
    fill, _, tied = found
    stays = {*made.residency.stays}
    chosen = {problem.wants.names[at] for g in made.groups if g.name in stays for at in g.wants}
    kept = [p for p in place.parameters if chosen.intersection(p.names)]
    theirs = {each for p in kept for each in p.names} if place.owner is not None else chosen
    part = replace(
        place, parameters=kept, reusable={}, held=dict.fromkeys(place.held, 0), alone=True
    )
    rest = {name: source for name, source in fill.items() if name in theirs}
    ties = {name: other for name, other in tied.items() if name in theirs}
    room = made.cache_nbytes + made.activation_nbytes + made.reserve_nbytes
    options = replace(problem.options, reserve_nbytes=room, cache=None)
    call = Call(problem.checkpoint, options, Found(rest, tied=ties))
    return Decision.make(part, call, part.match(call))


def rounds_of(
    made: OffloadPlan,
    device: Device,
    within: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Rounds:
    """Return the `Rounds` of a plan, for `begin`; without layers if none streams."""
    residency, moves = made.residency, made.stream.placements if made.stream else ()
    sizes = {layer.name: layer.nbytes for layer in made.sizes}
    names = [(name, -(-sizes[name] // residency.slot_nbytes)) for name in residency.streams]
    for name, count in zip(residency.experts, made.experts, strict=True):
        names += [(name, 1)] * count
    layers = [
        Layer(name, placements, slots, sum(moves[at].kind.src_nbytes for at in placements))
        for (name, slots), placements in zip(names, made.layer_placements, strict=True)
    ]
    experts = ExpertCache(made.experts, residency.cache_slots, len(residency.streams))
    return Rounds(device, layers, experts, within)


def begin(
    rounds: Rounds, made: OffloadPlan, problem: Problem, device: Device, kind: type[Slots]
) -> OffloadPlan:
    """Open ``rounds`` with slots of class ``kind``, and layers read to host memory, if any.

    Returns the plan: with the files that layers come from then.
    """
    if made.stream is None:
        return made
    kept, checkpoint = None, problem.checkpoint
    try:
        if made.host:
            names, ahead = made.tensors_of(made.host, problem.wants), made.stream.ahead
            kept = HostFile(checkpoint, names, keeps=made.cached, ahead=ahead)
            checkpoint = kept.checkpoint
            made = problem.streamed_from(made, checkpoint)
        assert made.stream is not None
        devices = {made.stream.devices[0].device: device}
        transfer = Transfer(made.stream, checkpoint, devices, problem.options.changes)
        watch = PassWatch(made.device, made.passes_nbytes)  # before slots and staging are touched
        if made.views:
            slots: Slots = FileViews(made, checkpoint, device, kind.weight_of)
        else:
            arena = device.allocate(BY_NAME["uint8"], (made.residency.arena_nbytes,))
            slots = kind(arena, made, checkpoint)
        rounds.open(transfer, slots, watch, kept)
        return made
    except BaseException:
        if kept is not None:
            kept.close()
        raise


#: The calls that are suggested, for a model and for a checkpoint without one.
OFFLOAD, PLAN_OFFLOAD = "streamload.offload", "streamload.plan_offload"

_MOST_WRITTEN = 60  # most characters of an argument in a suggestion; longer ones become "..."
_PLAIN = (str, int, float, bool)


def suggest_offload(call: Infeasible) -> list[Fit]:
    """Return the call to offload in place of a load that does not fit; [] if that cannot help."""
    checkpoint, options, (fill, _, tied) = call.call
    error, target = call.error, call.target
    devices = [target.name] if isinstance(target, DeviceSpec) else [*target[0].devices.opened]
    # if the budget of one device is short, and `offload` takes the options
    helps = [error.device] == devices and error.limit != "largest allocation"
    if not helps or options.quant or options.residence != "memory":
        return []
    with suppress(StreamloadError):
        if isinstance(target, DeviceSpec):
            wants = wants_of(checkpoint, fill)
            problem = Problem(options, checkpoint, wants, target)
            groups = groups_of_checkpoint(wants, problem.nbytes, tied, config=checkpoint.config)
            return _said(PLAN_OFFLOAD, "", call.given, replace(problem, groups=groups).decide())
        place, match = target
        wants = match.quantised(checkpoint, place.coded, options.changes.by_tensor)
        spec = device_of(place, options, wants)
        held_nbytes = place.held.get(spec.name, 0)
        problem = Problem(options, checkpoint, wants, spec, held_nbytes=held_nbytes)
        groups = adapter_of(place, match).groups(problem, ())
        return _said(OFFLOAD, "model, ", call.given, replace(problem, groups=groups).decide())
    return []


def _said(call: str, model: str, given: Mapping[str, Any], made: OffloadPlan) -> list[Fit]:
    if not made.residency.absent:
        return []
    path = given["path"]
    written = [repr(str(path)) if isinstance(path, str) or hasattr(path, "__fspath__") else "path"]
    for name, option in OPTIONS.items():
        value = given.get(name, option.default)
        plain = name in ("progress", "residence") or value is option.default
        if not plain and value != option.default:
            written.append(f"{name}={_written(value)}")
    needed, read = format_bytes(made.needed_nbytes), format_bytes(made.read_nbytes)
    return [Fit(call, f"({model}{', '.join(written)})", f"{needed}, and a pass reads {read}")]


def _written(value: object) -> str:
    """Return an argument as source text if it is short and plain, else "..."."""
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    else:
        parts = [*value] if isinstance(value, (list, tuple)) else [value]
    text = repr(value)
    return text if len(text) <= _MOST_WRITTEN and all(type(p) in _PLAIN for p in parts) else "..."
