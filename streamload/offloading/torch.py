"""A module of torch whose layers stream."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamload.core.dtypes import DType
from streamload.devices.base import Device
from streamload.devices.torch.tensors import TO_TORCH, TorchParameter, parts_of, unwrapped_names
from streamload.errors import OffloadError
from streamload.offloading.groups import LayerGroup, rows_of_experts
from streamload.offloading.model import ModelAdapter, Timed
from streamload.offloading.overrun import TokenRoom, tokens_of
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.problem import Problem
from streamload.offloading.rows import RowReader
from streamload.offloading.stays import Stays
from streamload.offloading.torch_experts import (
    StreamedExperts,
    Sums,
    number_chosen,
    number_of_experts,
    sums_of,
)
from streamload.offloading.torch_modules import (
    GatheredEmbedding,
    Refusals,
    StreamedModule,
    StreamedParameter,
    TorchSlots,
    Wrapped,
    computes,
    let_go,
    looked_at,
    modules_by_name,
    no_backward,
    refuse_training,
    used_elsewhere,
)


class TorchModel(ModelAdapter[TorchParameter]):
    """A module, whose layers are modules in it."""

    slots = TorchSlots

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], layers: Sequence[str] = ()
    ) -> None:
        """Look at a module; see `ModelAdapter`.

        Raises:
            OffloadError: it is no module, is offloaded already, or is sharded.
        """
        if not isinstance(model, nn.Module):
            raise OffloadError(
                f"a model of torch that is offloaded is a module, not a {type(model).__name__}: "
                "its layers are brought when their modules compute"
            )
        modules = modules_by_name(model, unwrapped_names(model))
        super().__init__(model, parameters, modules, layers)
        self._elsewhere, self._looked_at = used_elsewhere(model), looked_at(model)
        self._parts = {(id(m._buffers), key) for m in model.modules() for key in parts_of(m)}
        self._before: dict[str, list[Any]] = {}  # tensors of parameters that stream
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self._stays = Stays()
        self._sums: dict[str, Sums] = {}  # by module of experts that stay in the file

    # --- deciding -----------------------------------------------------------------------------

    def can_stream(self, module: Any) -> bool:
        """Whether it has a ``forward`` that nothing goes round."""
        return computes(module) and id(module) not in self._elsewhere

    def only_holds(self, module: Any) -> bool:
        """Whether it has no ``forward``, as lists of modules have none."""
        return module is not None and not computes(module)

    def is_embedding(self, module: Any) -> bool:
        """Whether it is torch's, changes no rows, and is called with numbers of rows."""
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return False
        return type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__

    def must_stay(self, name: str) -> bool:
        """Whether it is no weight, or others read it while its module does not compute."""
        slots = self._parameters[name].slots
        return not all(
            (isinstance(container[key], nn.Parameter) or (id(container), key) in self._parts)
            and id(container) not in self._looked_at
            for container, key in slots
        )

    def experts(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Those that transformers keeps fused, if each computes in a known form."""
        wants = problem.wants
        place = {name: at for at, name in enumerate(wants.names)}
        known: dict[Any, Sums | None] = {}  # those of a model are alike
        groups, others = [], []
        for name, module in self._modules.items():
            count = number_of_experts(module)
            numbers = [place.get(f"{name}.{key}", -1) for key in module._parameters if count]
            if not count or all(self.stays(wants.names[at], stay) for at in numbers if at >= 0):
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
        """Whether a parameter's experts can be read one by one."""
        want, src = problem.wants[at], problem.wants.srcs[at]
        parameter = self._parameters[want.name]
        plain = src.bits >= 8 and not src.is_packed and len(parameter.names) == 1
        own = plain and not self.stays(want.name, stay)
        changed = problem.options.changes.by_tensor
        unchanged = not any(row.tensor in changed for row in want.source)
        return own and unchanged and rows_of_experts(want, count) is not None

    # --- running ------------------------------------------------------------------------------

    def begin_streaming(
        self, plan: OffloadPlan, dtypes: Mapping[str, DType], device: Device
    ) -> None:
        """Put parameters without memory in place of those that stream."""
        where = torch.device(device.info.name)
        for name in self._emptied:
            parameter, dtype = self._parameters[name], TO_TORCH[dtypes[name].name]
            before = self._before[name] = [held[key] for held, key in parameter.slots]
            first, *_ = parameter.names
            trains = before[0].requires_grad and dtype.is_floating_point
            kind = parameter.shape, dtype, where
            absent = StreamedParameter(first, *kind, requires_grad=trains, stays=self._stays)
            self._stays.streams.update(dict.fromkeys(parameter.names, first))
            for container, key in parameter.slots:
                container[key] = absent  # what is tied stays one object

    def stream_layer(
        self, name: str, number: int, weights: Sequence[tuple[int, str]], rounds: Rounds
    ) -> None:
        """Let a module bring its weights."""
        module = self._modules[name]
        inside = {id(held) for m in module.modules() for held in (m._parameters, m._buffers)}
        places = [
            (at, slot)
            for at, weight in weights
            for slot in self._parameters[weight].slots
            if id(slot[0]) in inside
        ]
        self._wrap(StreamedModule(module, number, places, rounds, self._stays))

    def stream_experts(
        self, name: str, number: int, weights: Sequence[Mapping[str, int]], rounds: Rounds
    ) -> None:
        """Let a module of experts bring those that the router chose."""
        places = [{key.rpartition(".")[2]: at for key, at in each.items()} for each in weights]
        experts = StreamedExperts(self._modules[name], number, self._sums[name], places, rounds)
        self._wrap(experts)

    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        """Let an embedding read its rows."""
        where, dtype = torch.device(device.info.name), TO_TORCH[reader.dst.name]

        def rows(numbers: Sequence[int]) -> torch.Tensor:
            found = torch.from_numpy(reader.read(numbers)).view(dtype)
            return found.view(len(numbers), *reader.row_shape).to(where)

        self._wrap(GatheredEmbedding(self._modules[name], rows))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """Count passes, and refuse what cannot be.

        transformers' `generate` calls an encoder before the model: its tokens count, too.
        """
        absent = plan.residency.absent
        stays = self._stays if absent else None
        self._wrap(Pass(self._model, self.timed, self.room, stays, trains=self._trains))
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            encoder = self._model.get_encoder()
            if encoder is not self._model:
                self._wrap(Pass(encoder, self.timed, self.room, has_cache=False))
        if not absent:
            return
        holders = [
            module
            for name, module in self._modules.items()
            if any(not name or each == name or each.startswith(f"{name}.") for each in absent)
        ]
        self._wrap(Refusals([self._model, *holders]))
        if rounds is not None:
            weakref.finalize(self._model, rounds.abandon)
        self._modules = {}  # the model may go, and this not
        self._model = nn.Module()

    def take_out(self) -> None:
        """Restore modules as after a failed load: weights that streamed hold nothing."""
        for name in self._emptied:
            slots = self._parameters[name].slots
            before = self._before.get(name) or [held[key] for held, key in slots]
            for (container, key), value in zip(slots, before, strict=True):
                container[key] = value
                if value.device.type != "meta":
                    let_go(value)
        self._before.clear()
        super().take_out()


class Pass(Wrapped):
    """The ``forward`` of a model: counts tokens, and passes if layers stream."""

    def __init__(
        self,
        model: nn.Module,
        timed: Timed,
        room: TokenRoom,
        stays: Stays | None = None,
        *,
        trains: bool = False,
        has_cache: bool = True,
    ) -> None:
        """Change nothing yet; ``stays`` is None if nothing streams.

        ``trains``: it had parameters that can be trained. ``has_cache``: the KV cache has its
        tokens, too.
        """
        super().__init__(model)
        self._timed, self._room, self._stays = timed, room, stays
        self._trains, self._has_cache = trains, has_cache
        self._signature = inspect.signature(self._own())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, and take the time. No graph is kept: it would hold what layers computed."""
        if self._stays is None:
            self._see(args, kwargs)
            return self._own()(*args, **kwargs)
        refuse_training(self._module)
        self._see(args, kwargs)
        with self._timed.a_pass(), self._stays.a_pass(), torch.no_grad():
            found = self._own()(*args, **kwargs)
        return no_backward(found) if self._trains and torch.is_grad_enabled() else found

    def _see(self, args: Any, kwargs: Any) -> None:
        if not self._room:
            return
        try:
            given = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model raises for them
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
        if "input_ids" not in self._signature.parameters:  # of images and sounds, not of tokens
            named.pop("encoder_outputs", None)
        tokens, cached = tokens_of(named, _has_integers)
        self._room.see(tokens, cached if self._has_cache else 0)


def _has_integers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
