"""`stream_layers`: the tensors of one layer after the other, for loops that users write."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from streamload.checkpoint.fetch import on_disk
from streamload.checkpoint.open import CheckpointLike, opened
from streamload.core.patterns import check_patterns
from streamload.errors import OffloadError
from streamload.loading.load import read_call, run, uncollected
from streamload.loading.options import OF_MODELS, OffloadOptions, Options, takes
from streamload.loading.prepare import Place
from streamload.loading.report import Clock, LoadReport
from streamload.offloading.layers import Step, steps_of_checkpoint
from streamload.offloading.model import Passes, device_of
from streamload.offloading.offload import OffloadReport, begin, for_passes, load_of_stays, rounds_of
from streamload.offloading.plan import OffloadPlan, Problem
from streamload.offloading.prefetch import Rounds
from streamload.planning.match import wants_of
from streamload.planning.moves import TensorRequests

# By framework, module and name of the `Slots` that lend tensors to loops.
_SLOTS: Mapping[str, tuple[str, str]] = {
    "host": ("streamload.offloading.slots", "Slots"),
    "tinygrad": ("streamload.offloading.tinygrad", "LentSlots"),
    "torch": ("streamload.offloading.torch_modules", "TensorSlots"),
}


@dataclass(frozen=True, slots=True)
class _Turn:
    """A step of a loop over `stream_layers`: its tensors that stay, and its buffers in slots."""

    name: str
    stays: Mapping[str, Any]  # by name, tensors that stay
    number: int | None  # of the layer among those that stream; None if it stays
    streams: Mapping[str, int]  # by name, index of the layer's buffer


class LayerStream:
    """The layers of a checkpoint, for loops over them; see `stream_layers`.

    Attributes:
        plan: which layers stay on the device, and which stream.
        load: the report of loading the layers that stay.
        resident: by name, the tensors that stay on the device all the time.
    """

    def __init__(
        self, plan: OffloadPlan, load: LoadReport, turns: list[_Turn], rounds: Rounds
    ) -> None:
        self.plan, self.load = plan, replace(load, state_dict={})
        self.resident = dict(load.state_dict)
        self._turns, self._rounds = turns, rounds
        self._passes, self._entered, self._closed = Passes(), False, False
        self._number: int | None = None  # of the layer that the loop computes with
        self._thread = 0  # which runs the loop
        weakref.finalize(self, rounds.abandon)

    @property
    def report(self) -> OffloadReport:
        """Counts and times of the passes so far."""
        return OffloadReport.of(self.plan, self.load, self._passes, self._rounds)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield name and tensors of each layer, for one pass; valid until the next step.

        Raises:
            OffloadError: this is closed, another pass is under way, or another thread has a layer.
            CheckpointError: a file cannot be read, or has changed.
        """
        if self._passes.running:
            raise OffloadError("another loop is under way, and its layers have the slots")
        try:
            self._check_open()
            self._rounds.end_calls()  # what an interrupted loop left
            with self._passes.timed():
                for turn in tuple(self._turns):
                    try:
                        yield turn.name, self._lend(turn)
                    finally:
                        self._take_back()
        finally:
            if not self._entered:
                self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise OffloadError(
                "these layers were closed: call stream_layers() again, and for several passes "
                "write with streamload.stream_layers(...) as layers:"
            )

    def _lend(self, turn: _Turn) -> dict[str, Any]:
        self._check_open()
        if turn.number is None:
            return dict(turn.stays)
        self._rounds.memory.refuse_capture()
        self._number, self._thread = turn.number, threading.get_ident()
        lent = self._rounds.memory.lend(self._rounds.acquire(turn.number))
        return {**turn.stays, **{name: lent[at] for name, at in turn.streams.items()}}

    def _take_back(self) -> None:
        number = self._number
        if number is None:
            return
        self._check_thread()
        self._number = None
        try:
            self._rounds.memory.take_back()
        finally:
            self._rounds.release(number)

    def _check_thread(self) -> None:
        if self._number is not None and self._thread != threading.get_ident():
            name = self.plan.residency.streams[self._number]
            raise OffloadError(f"another thread has {name}: let one thread run a loop over layers")

    def close(self) -> None:
        """End the streaming, and free all memory; does nothing if it was closed.

        Raises:
            OffloadError: another thread computes with a layer.
        """
        self._check_thread()
        try:
            self._take_back()
            self._rounds.end_calls()
        finally:
            self._closed = True
            self._rounds.close("these layers were closed")
            self._turns.clear()
            self.resident.clear()

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@takes(without=(*OF_MODELS, "on_overrun"), devices='device="cuda:0"')
def stream_layers(path: CheckpointLike, **options: Unpack[OffloadOptions]) -> LayerStream:
    """Stream the layers of a checkpoint through a budget, for a loop of your own over them.

    Layers that fit stay on the device. The others share slots of device memory at fixed addresses;
    the next are prefetched while you compute. A loop is one pass, in the order in which layers run:

        for name, tensors in streamload.stream_layers("Llama-3-8B/", budget="3GB", device="cuda:0"):
            x = layer(x, tensors)

    In a ``with`` block each loop is a pass, and the slots are kept for the next:

        with streamload.stream_layers("Llama-3-8B/", budget="3GB", device="cuda:0") as layers:
            for _ in range(100):
                for name, tensors in layers:
                    ...

    The tensors of a layer are valid until the next step: its slot goes to another layer then, after
    the work queued on the device. In tinygrad, pending graphs over them are computed at that step.
    Tensors that stay are in ``resident`` all the time.

    Tensors outside of layers have steps of their own: "embedding" first, "head" last (with the norm
    before it), the ends of inner stacks in between ("encoder.block end"), and without any layers
    one for each tensor. A head that is tied gets the embedding's tensor, which stays.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        stay: patterns of names of tensors that stay on the device.
        device: one device; see `load_state_dict`.
        **options: see `OffloadOptions`.

    Returns:
        An iterable of (name, tensors by name), with the framework's tensors. When the loop ends, is
        left, or raises, threads end and memory goes back: at once, or at the end of the ``with``
        block.

    Raises:
        PlanInfeasibleError: not even the largest layer and what must stay fit; before any data is
            read or any memory is allocated.
        CheckpointError: the checkpoint is invalid, or cannot size ``tokens``; at a step, a file
            cannot be read or has changed.
        UnsupportedCastError: a dtype cannot be cast or held.
        OffloadError: at a step, it is closed, or another thread has a layer.
        DeviceError: the device is absent, does not work, or failed.
        ValueError: an argument is invalid.
    """
    clock = Clock()
    asked = for_passes(Options.parse(options))
    with uncollected():
        source = opened(path)
        checkpoint, read, found = read_call(source, asked)
        fill, _, tied = found
        place = Place.look(None, checkpoint, read)
        (device,), framework = place.devices.opened.values(), place.devices.framework.name
        if framework not in _SLOTS:
            raise OffloadError(f"layers stream to devices of {', '.join(_SLOTS)}, not {framework}")
        wants = wants_of(checkpoint, fill)
        check_patterns("stay", asked.stay, wants.names)
        spec = device_of(place, read, wants)
        problem = Problem(read, checkpoint, wants, spec)
        steps, groups = steps_of_checkpoint(wants, problem.nbytes, tied, asked.stay, asked.layers)
        made = replace(problem, groups=groups).decide()
        decided = load_of_stays(made, problem, place, found)
        local = on_disk(source, asked.fetch, "auto")
        if local is not source:  # planned again, by the files
            return stream_layers(local, **options)
    report = run(decided, False, clock)
    module, kind = _SLOTS[framework]
    slots, rounds = getattr(importlib.import_module(module), kind), rounds_of(made, device)
    made = begin(rounds, made, problem, device, slots)
    return LayerStream(made, report, _turns(steps, made, wants, report.state_dict), rounds)


def _turns(
    steps: Sequence[Step], plan: OffloadPlan, wants: TensorRequests, resident: Mapping[str, Any]
) -> list[_Turn]:
    order = plan.stream.placements.names if plan.stream is not None else ()
    numbers = {name: number for number, name in enumerate(plan.residency.streams)}
    ranges = plan.layer_placements
    turns = []
    for step in steps:
        number = numbers.get(step.name)
        streamed = ranges[number] if number is not None else ()
        place = {order[at]: n for n, at in enumerate(streamed)}
        stored = {name: wants.names[at] for name, at in step.wants.items()}
        stays = {name: resident[other] for name, other in stored.items() if other not in place}
        lent = {name: place[other] for name, other in stored.items() if other in place}
        turns.append(_Turn(step.name, stays, number, lent))
    return turns
