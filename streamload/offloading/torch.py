"""Offload modules of torch: find their layers, and make the layers fetch their weights."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from streamload.devices.base import Device
from streamload.devices.torch.tensors import (
    TO_TORCH,
    TorchParameter,
    is_of_library,
    parts_of,
    unwrapped_names,
)
from streamload.errors import OffloadError
from streamload.offloading import torch_modules
from streamload.offloading.layers import LayerGroup, rows_of_experts
from streamload.offloading.model import (
    ExpertWeights,
    LayerWeights,
    ModelAdapter,
    Passes,
    RowReader,
    tokens_of,
)
from streamload.offloading.plan import OffloadPlan, Problem
from streamload.offloading.prefetch import Rounds
from streamload.offloading.torch_experts import (
    StreamedExperts,
    Sums,
    number_chosen,
    number_of_experts,
    sums_of,
)
from streamload.offloading.torch_modules import UnstreamableWeights


class TorchModel(ModelAdapter[TorchParameter]):
    """The adapter of a torch module, whose layers are modules in it."""

    slots = torch_modules.TorchSlots

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], layers: Sequence[str] = ()
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OffloadError(
                f"a model of torch that is offloaded is a module, not a {type(model).__name__}: "
                "its layers are brought when their modules compute"
            )
        modules, unwrapped = dict[str, nn.Module](), unwrapped_names(model)
        for name, module in model.named_modules(remove_duplicate=False):
            modules.setdefault(unwrapped(f"{name}.").removesuffix("."), module)
        super().__init__(model, parameters, modules, layers)
        attentions = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
        self._elsewhere = {id(child) for module in attentions for child in module.children()}
        self._looked_at = _looked_at(model)
        self._parts = {(id(m._buffers), key) for m in model.modules() for key in parts_of(m)}
        self._before: dict[str, list[Any]] = {}  # by parameter that streams, its own tensors
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self._stays = UnstreamableWeights()
        self._sums: dict[str, Sums] = {}  # by module whose experts stream

    # --- planning -----------------------------------------------------------------------------

    def can_stream(self, module: Any) -> bool:
        """Whether a module has a ``forward``, and no other uses its weights without calling it."""
        return _computes(module) and id(module) not in self._elsewhere

    def only_holds(self, module: Any) -> bool:
        return module is not None and not _computes(module)

    def is_embedding(self, module: Any) -> bool:
        """Whether a module is torch's own embedding, without max_norm, which rewrites rows."""
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return False
        return type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__

    def must_stay(self, name: str) -> bool:
        """Whether a parameter is a buffer, bitsandbytes', or read outside of its module's calls."""
        slots = self._parameters[name].slots
        return not all(
            (isinstance(container[key], nn.Parameter) or (id(container), key) in self._parts)
            and id(container) not in self._looked_at
            and not is_of_library(container[key])
            for container, key in slots
        )

    def experts(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Return transformers' fused experts whose output can be computed expert by expert."""
        wants = problem.wants
        place = {name: at for at, name in enumerate(wants.names)}
        known: dict[Any, Sums | None] = {}  # by class and shapes: modules of a model are alike
        groups, others = [], []
        for name, module in self._modules.items():
            count = number_of_experts(module)
            if not count:
                continue
            numbers = [place.get(f"{name}.{key}", -1) for key in module._parameters]
            if all(self.stays(wants.names[at], stay) for at in numbers if at >= 0):
                continue
            key = type(module), *(tuple(each.shape) for each in module.parameters())
            if key not in known:
                known[key] = sums_of(module)
            sums = known[key]
            if sums is None or not all(
                at >= 0 and self._is_expert(problem, at, count, stay) for at in numbers
            ):
                others.append(name)
                continue
            self._sums[name] = sums
            chosen = number_chosen(module)
            groups.append(LayerGroup(name, tuple(numbers), "experts", "", count, chosen))
        if others:
            self.notes.append(
                f"experts of {others[0]}{' and others' if len(others) > 1 else ''} stream with "
                "their layer, chosen or not: their form is not known, or not rows of the file"
            )
        return groups

    def _is_expert(self, problem: Problem, at: int, count: int, stay: Sequence[str]) -> bool:
        want = problem.wants[at]
        own = len(self._parameters[want.name].names) == 1 and not self.stays(want.name, stay)
        return own and problem.is_plain(at) and rows_of_experts(want, count) is not None

    # --- running ------------------------------------------------------------------------------

    def begin_streaming(self, plan: OffloadPlan, problem: Problem, device: Device) -> None:
        where, stays = torch.device(device.info.name), self._stays
        dtypes = dict(zip(problem.wants.names, problem.dsts, strict=True))
        for name in self._emptied:
            parameter, dtype = self._parameters[name], TO_TORCH[dtypes[name].name]
            before = self._before[name] = [held[key] for held, key in parameter.slots]
            first, *_ = parameter.names
            trains = before[0].requires_grad and dtype.is_floating_point
            kind = parameter.shape, dtype, where
            absent = torch_modules.StreamedParameter(
                first, *kind, requires_grad=trains, stays=stays
            )
            stays.streams.update(dict.fromkeys(parameter.names, first))
            for container, key in parameter.slots:
                container[key] = absent  # tied weights stay one object

    def stream_layer(self, name: str, number: int, weights: LayerWeights, rounds: Rounds) -> None:
        module = self._modules[name]
        inside = {id(held) for m in module.modules() for held in (m._parameters, m._buffers)}
        places = [
            (at, slot)
            for at, weight in weights
            for slot in self._parameters[weight].slots
            if id(slot[0]) in inside
        ]
        self._wrap(torch_modules.StreamedModule(module, number, places, rounds, self._stays))

    def stream_experts(self, name: str, layer: int, weights: ExpertWeights, rounds: Rounds) -> None:
        places = [{key.rpartition(".")[2]: at for key, at in each.items()} for each in weights]
        module, sums = self._modules[name], self._sums[name]
        self._wrap(StreamedExperts(module, layer, sums, places, rounds))

    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        where = torch.device(device.info.name)
        self._wrap(torch_modules.GatheredEmbedding(self._modules[name], reader, where))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """Make the model count passes, and refuse to be saved or moved.

        transformers' `generate` calls an encoder before the model: its tokens count, too.
        """
        absent = plan.residency.absent
        stays = self._stays if absent else None
        self._wrap(Pass(self._model, self.passes, stays, trains=self._trains))
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            encoder = self._model.get_encoder()
            if encoder is not self._model:
                self._wrap(Pass(encoder, self.passes, has_cache=False))
        if not absent and rounds is None:
            return
        holders = [
            module
            for name, module in self._modules.items()
            if any(not name or each == name or each.startswith(f"{name}.") for each in absent)
        ]
        self._wrap(torch_modules.Refusals([self._model, *holders]))
        if rounds is not None:
            weakref.finalize(self._model, rounds.abandon)
        self._modules = {}  # the model may be freed before this
        self._model = nn.Module()

    def take_out(self) -> None:
        for name in self._emptied:
            slots = self._parameters[name].slots
            before = self._before.get(name) or [held[key] for held, key in slots]
            for (container, key), value in zip(slots, before, strict=True):
                container[key] = value
                with suppress(RuntimeError):
                    if value.device.type != "meta":
                        value.data = torch.empty(0, dtype=value.dtype, device=value.device)
        self._before.clear()
        super().take_out()


class Pass(torch_modules.Wrapped):
    """A substitute for a model's ``forward`` that counts tokens, and passes if layers stream."""

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        stays: UnstreamableWeights | None = None,
        *,
        trains: bool = False,
        has_cache: bool = True,
    ) -> None:
        """Change nothing yet; ``stays`` notes misused weights, None if nothing streams.

        ``trains``: whether the model had trainable parameters. ``has_cache``: whether its tokens
        go into the KV cache.
        """
        super().__init__(model)
        self._passes, self._stays = passes, stays
        self._trains, self._has_cache = trains, has_cache
        self._signature = inspect.signature(self._own())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass and time it, without a graph of autograd, which would keep activations."""
        if self._stays is None:
            self._see(args, kwargs)
            return self._own()(*args, **kwargs)
        torch_modules.refuse_training(self._module)
        self._see(args, kwargs)
        with self._passes.timed(), self._stays.a_pass(), torch.no_grad():
            found = self._own()(*args, **kwargs)
        refuses = self._trains and torch.is_grad_enabled()
        return torch_modules.no_backward(found) if refuses else found

    def _see(self, args: Any, kwargs: Any) -> None:
        if not self._passes.has_room:
            return
        try:
            given = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model itself raises it
            return
        named: dict[str, Any] = {}
        for name, value in given.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named |= value
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                named |= {f"{name}[{at}]": each for at, each in enumerate(value)}
            else:
                named[name] = value
        if "input_ids" not in self._signature.parameters:  # states of images or sounds
            named.pop("encoder_outputs", None)
        tokens, cached = tokens_of(named, _has_integers)
        self._passes.see(tokens, cached if self._has_cache else 0)


def _has_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def _computes(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # whose class has no method to compare
        return True
    own = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return own and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _looked_at(model: nn.Module) -> set[int]:
    """Return ids of dicts of parameters that are read outside of calls of the modules in Python.

    `nn.TransformerEncoder` packs padded sequences if its first layer's weights are plain tensors;
    TorchScript keeps the parameters of its modules, and calls these without Python.
    """
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder))
    nested = (m for m in encoders if m.enable_nested_tensor and len(m.layers))
    found = [module for m in nested for module in m.layers[0].modules()]
    found += (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))
    return {id(module._parameters) for module in found}
