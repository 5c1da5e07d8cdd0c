"""The adapter of a model, and its device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamload.errors import OffloadError
from streamload.loading.prepare import Options, Place
from streamload.offloading.model import ModelAdapter
from streamload.planning.match import Match
from streamload.planning.requests import DeviceSpec, TensorRequests

#: By framework, the `ModelAdapter` that knows its models.
_MODELS: Mapping[str, tuple[str, str]] = {
    "torch": ("streamload.offloading.torch", "TorchModel"),
    "tinygrad": ("streamload.offloading.tinygrad", "TinygradModel"),
}


def adapter_of(place: Place, match: Match, layers: Sequence[str] = ()) -> ModelAdapter[Any]:
    """The adapter of a model; raises OffloadError if it cannot be offloaded."""
    check_place(place)
    assert place.owner is not None
    module, kind = _MODELS[place.owner.name]
    adapter: ModelAdapter[Any] = getattr(importlib.import_module(module), kind)(
        place.model, match.parameters, layers
    )
    return adapter


def check_place(place: Place) -> None:
    """Raise OffloadError for another framework, or several devices."""
    if place.owner is None:
        raise OffloadError("offload needs a model: its layers are brought when they compute")
    if place.owner.name not in _MODELS:
        raise OffloadError(f"models of {type(place.model).__module__} are not offloaded here")
    if len(place.devices.opened) != 1:
        names = ", ".join(place.devices.opened)
        raise OffloadError(f"a model is offloaded to one device, not to {names}")


def device_of(place: Place, options: Options, wants: TensorRequests) -> DeviceSpec:
    """The device, with its casts compiled."""
    policy = options.policy
    specs = place.specs(options, wants.needs_native_bf16(policy))
    clamp, required = options.out_of_range == "clamp", options.cast == "device"
    (spec,), _ = place.devices.compile_casts(specs, wants, policy, clamp=clamp, required=required)
    return spec
