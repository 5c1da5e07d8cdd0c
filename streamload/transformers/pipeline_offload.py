"""Offload the models of a pipeline: they share the device and one budget, one at a time."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self

from diffusers import DiffusionPipeline

from streamload.core.patterns import Selection
from streamload.core.units import format_bytes
from streamload.errors import Fit, OffloadError, PlanInfeasibleError, StreamloadError
from streamload.loading.load import uncollected
from streamload.loading.options import Options
from streamload.loading.place import Devices
from streamload.loading.report import LoadReport
from streamload.offloading import offload
from streamload.offloading.offload import OffloadReport
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.torch_turns import Turn, Turns
from streamload.transformers.pipeline_models import Part
from streamload.transformers.pipeline_patterns import stay_in
from streamload.transformers.prepared import Prepared, filling, load_untied

_OFFLOADS = (
    "is of no use: the pipeline is offloaded, and its models take turns within the budget; leave "
    "the call out"
)
#: Methods of pipelines that raise OffloadError, and why.
_REFUSED: Mapping[str, str] = {
    "enable_model_cpu_offload": _OFFLOADS,
    "enable_sequential_cpu_offload": _OFFLOADS,
    "enable_group_offload": _OFFLOADS,
    "fuse_lora": "cannot change weights, which are in the files: leave the call out, and a LoRA "
    "computes beside them; or merge it by streamload convert --adapters",
    "save_pretrained": "cannot save weights, which are in the files: copy these",
}


class OffloadedPipeline:
    """Models of a pipeline that share a device, until `close` or the end of a ``with``.

    Attributes:
        plans: by model, which layers stay on the device while it is there, and which stream.
    """

    def __init__(self, turns: Mapping[str, Turn]) -> None:
        self.plans: Mapping[str, OffloadPlan] = {name: turn.plan for name, turn in turns.items()}
        self._turns = turns

    @property
    def reports(self) -> Mapping[str, OffloadReport]:
        """By model that was called, counts and times so far."""
        found = {name: turn.report for name, turn in self._turns.items()}
        return {name: report for name, report in found.items() if report is not None}

    def close(self) -> None:
        """Free all memory. The models have no values until they are loaded again.

        Raises:
            OffloadError: a model computes now.
        """
        if busy := [name for name, turn in self._turns.items() if turn.uses]:
            raise OffloadError(f"it cannot be closed while {busy[0]} computes: let that end first")
        for turn in self._turns.values():
            turn.close()

    def put_into(self, made: Any) -> None:
        """Set ``streamload_offload`` of a pipeline or model; a pipeline refuses `_REFUSED`."""
        made.streamload_offload = self
        if isinstance(made, DiffusionPipeline):
            made.__dict__.update({n: partial(_refuse, n, why) for n, why in _REFUSED.items()})

    def __str__(self) -> str:
        return "\n".join(f"{name}: {plan}" for name, plan in self.plans.items())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse(name: str, why: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise OffloadError(f"{name} {why}")


@uncollected()
def take_turns(parts: Mapping[str, Part], devices: Devices, options: Options) -> OffloadedPipeline:
    """Plan all models, and put placeholders into them; reads no data."""
    decided = _all_decided(parts, devices, options)
    specs = [each.problem.spec for each in decided.values()]
    limits = [n for spec in specs for n in (spec.budget_nbytes, spec.free_nbytes) if n is not None]
    turns, found = Turns(min(limits, default=0)), {}
    for name, part in parts.items():
        found[name] = Turn(name, part.model, decided[name], turns)
        part.finish(LoadReport.of_plan(str(part.checkpoint.path), decided[name].load.plan))
    return OffloadedPipeline(found)


def fits_in_turns(parts: Mapping[str, Part], devices: Devices, options: Options) -> list[Fit]:
    """Return ``offload=True`` for an error of a load that does not fit; [] if it cannot help."""
    with suppress(StreamloadError, ValueError):
        plans = [each.plan for each in _all_decided(parts, devices, options).values()]
        needed = max(plan.needed_nbytes for plan in plans)
        return [Fit("offload", "=True", format_bytes(needed, up=True))]
    return []


def _all_decided(
    parts: Mapping[str, Part], devices: Devices, options: Options
) -> dict[str, offload.Prepared]:
    """Plan each model; all keep the bytes of buffers that any model computes free."""
    options = offload.for_passes(options)
    kept = stay_in(options.stay, {name: [*p.fill] for name, p in parts.items()})
    beside_nbytes = sum(part.beside_nbytes(devices) for part in parts.values())
    out = {}
    for name, part in parts.items():
        given = filling(options, part.fill, part.rules() or None, beside_nbytes)
        mine = replace(given, stay=tuple(kept[name]))
        out[name] = load_untied(partial(_decided, name, part, mine), part)
    return out


def _decided(name: str, part: Part, options: Options) -> offload.Prepared:
    """Plan a model by its usual layers, or else by smaller ones."""
    if isinstance(part, Prepared):
        part.check_streams()
    try:
        return offload.prepare(part.model, part.checkpoint, options)
    except PlanInfeasibleError as error:
        fits = [fit for fit in error.would_fit if isinstance(fit, Fit) and fit.option == "layers"]
        if not fits or options.layers:
            raise error.of_model(name).without("layers") from None
    finer = Selection.parse(ast.literal_eval(fits[0].rest.removeprefix("="))).select
    return _decided(name, part, replace(options, layers=finer))
