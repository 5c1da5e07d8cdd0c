"""Suggest the call of `offload` for a load that does not fit, planned as `offload` plans it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from streamload.core.units import format_bytes
from streamload.errors import Fit, StreamloadError
from streamload.loading.load import Infeasible
from streamload.loading.options import OPTIONS
from streamload.offloading.groups import groups_of_checkpoint
from streamload.offloading.models import adapter_of, device_of
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.problem import Problem
from streamload.planning.match import wants_of
from streamload.planning.requests import DeviceSpec

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
