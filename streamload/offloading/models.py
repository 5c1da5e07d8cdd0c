"""Make the adapter of a model that is offloaded, and open its device."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from streamload.devices.base import Framework
from streamload.errors import OffloadError
from streamload.loading.options import Options
from streamload.loading.place import host_engine, host_room_nbytes
from streamload.loading.prepare import Place
from streamload.offloading.model import ModelAdapter
from streamload.planning.match import Match
from streamload.planning.requests import DeviceSpec, TensorRequests

# By framework, module and name of its `ModelAdapter`.
_MODELS: Mapping[str, tuple[str, str]] = {
    "torch": ("streamload.offloading.torch", "TorchModel"),
    "tinygrad": ("streamload.offloading.tinygrad", "TinygradModel"),
}


def adapter_of(place: Place, match: Match, layers: Sequence[str] = ()) -> ModelAdapter[Any]:
    """Return the adapter that offloads a model; raises OffloadError if it cannot be offloaded."""
    module, kind = _MODELS[check_place(place).name]
    adapter: ModelAdapter[Any] = getattr(importlib.import_module(module), kind)(
        place.model, match.parameters, layers
    )
    return adapter


def check_place(place: Place) -> Framework:
    """Return a model's framework; raises OffloadError if it is unknown, or devices are several."""
    if place.owner is None:
        raise OffloadError("offload needs a model: its layers are brought when they compute")
    if place.owner.name not in _MODELS:
        raise OffloadError(f"models of {type(place.model).__module__} are not offloaded here")
    if len(names := place.devices.opened) != 1:
        raise OffloadError(f"a model is offloaded to one device, not to {', '.join(names)}")
    return place.owner


def device_of(place: Place, options: Options, wants: TensorRequests) -> DeviceSpec:
    """Return the spec of a load's single device, after compiling the casts of all weights."""
    policy = options.policy
    specs = place.specs(options, wants.needs_native_bf16(policy))
    clamp, required = options.out_of_range == "clamp", options.cast == "device"
    (spec,), _ = place.devices.compile_casts(specs, wants, policy, clamp=clamp, required=required)
    host_engine(wants, policy, [spec], options.cast, clamp=clamp)
    free = host_room_nbytes()  # to compile took some of it
    return spec.within(None if free is None else max(free - place.host_held_nbytes, 0))
