"""What to write where something does not fit, and its layers would stream.

It decides as `offload` does, so what it says is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from streamload.core.units import format_bytes
from streamload.errors import Fit, PlanInfeasibleError, StreamloadError
from streamload.loading.load import InfeasibleLoad, InfeasiblePlan
from streamload.loading.options import DEFAULTS
from streamload.loading.prepare import Options
from streamload.offloading.groups import Group, finer_layers, groups_of_checkpoint
from streamload.offloading.models import adapter_of, device_of
from streamload.offloading.plan import OffloadPlan, decide, engine_of
from streamload.planning.match import wants_of
from streamload.planning.requests import TensorRequests

#: The calls that are named.
OFFLOAD, PLAN_OFFLOAD = "streamload.offload", "streamload.plan_offload"

_MOST_WRITTEN = 60  # characters of an argument that is written out
_PLAIN = (str, int, float, bool)
_FINER_TRIES = 2  # modules in layers, and modules in those


def suggest_offload(call: InfeasibleLoad | InfeasiblePlan) -> list[Fit]:
    """Return the call that offloads what does not fit, with the bytes that a pass reads."""
    return _of_load(call) if isinstance(call, InfeasibleLoad) else _of_plan(call)


def _of_load(call: InfeasibleLoad) -> list[Fit]:
    error, place, options, wants = call.error, call.place, call.options, call.wants
    if not _may_stream(error, options, [*place.devices.opened]):
        return []
    with suppress(StreamloadError):
        spec, cast = device_of(place, options, wants)
        adapter = adapter_of(place, call.match)
        sizes = wants.nbytes(options.policy, spec.native_bf16)
        groups = adapter.groups(call.checkpoint, wants, sizes, (), options.changes.by_tensor)
        made = decide(
            *(options, call.checkpoint, wants, spec, groups, cast),
            held_nbytes=place.held.get(spec.name, 0),
        )
        return _said(OFFLOAD, "model, ", call.given, made)
    return []


def planned_by_layers(
    layers: Sequence[str],
    grouped: Callable[[Sequence[str]], Sequence[Group]],
    planned: Callable[[Sequence[Group]], OffloadPlan],
    wants: TensorRequests,
    nbytes: Sequence[int],
) -> OffloadPlan:
    """Plan to offload; if it does not fit, the error names smaller layers with which it does.

    Args:
        layers: patterns of names of modules that are layers.
        grouped: gives the layers of such patterns.
        planned: plans with these.
        wants: all parameters.
        nbytes: of each on the device.

    Raises:
        PlanInfeasibleError: not even the least fits.
    """
    groups = grouped(layers)
    try:
        return planned(groups)
    except PlanInfeasibleError as error:
        fits: list[Fit] = []
        for _ in range(_FINER_TRIES):
            patterns = [*finer_layers(groups, wants, nbytes)]
            if fits or not patterns:
                break
            with suppress(StreamloadError):
                groups = grouped(patterns)
                needed = format_bytes(planned(groups).needed_nbytes)
                said = repr(patterns if len(patterns) > 1 else patterns[0])
                fits = [Fit("layers", f"={said}", needed)]
        raise error.suggesting(fits) from None


def _of_plan(call: InfeasiblePlan) -> list[Fit]:
    error, checkpoint, options, spec = call.error, call.checkpoint, call.options, call.spec
    if not _may_stream(error, options, [spec.name]):
        return []
    with suppress(StreamloadError):
        fill, _, tied = call.found
        wants = wants_of(checkpoint, fill)
        sizes = wants.nbytes(options.policy, spec.native_bf16)
        groups = groups_of_checkpoint(wants, sizes, tied, config=checkpoint.config)
        made = decide(options, checkpoint, wants, spec, groups, engine_of(options))
        return _said(PLAN_OFFLOAD, "", call.given, made)
    return []


def _may_stream(error: PlanInfeasibleError, options: Options, devices: list[str]) -> bool:
    """Whether smaller pieces on the device would help, and `offload` takes the options."""
    of_device = [error.device] == devices and error.limit != "largest allocation"
    return of_device and not options.quant and options.residence == "memory"


def _said(call: str, model: str, given: Mapping[str, Any], made: OffloadPlan) -> list[Fit]:
    if not made.residency.absent:
        return []
    path = given["path"]
    written = [repr(str(path)) if isinstance(path, str) or hasattr(path, "__fspath__") else "path"]
    for name, default in DEFAULTS.items():
        value = given.get(name, default)
        if name not in ("progress", "residence") and value is not default and value != default:
            written.append(f"{name}={_written(value)}")
    reads = made.residency.pass_nbytes + made.token_nbytes
    numbers = f"{format_bytes(made.needed_nbytes)}, and a pass reads {format_bytes(reads)}"
    return [Fit(call, f"({model}{', '.join(written)})", numbers)]


def _written(value: object) -> str:
    """An argument as source text, if it is short and plain."""
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    else:
        parts = [*value] if isinstance(value, (list, tuple)) else [value]
    text = repr(value)
    return text if len(text) <= _MOST_WRITTEN and all(type(p) in _PLAIN for p in parts) else "..."
