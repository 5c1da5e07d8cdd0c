"""A module of torch whose layers stream."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BY_NAME, DType
from streamload.devices.base import Device, Parameter
from streamload.devices.torch.tensors import TO_TORCH, TorchParameter, parts_of, unwrapped_names
from streamload.errors import OffloadError
from streamload.offloading.groups import Group, rows_of_experts
from streamload.offloading.model import ModelAdapter, Timed
from streamload.offloading.overrun import TokenRoom, tokens_of
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.rows import RowReader
from streamload.offloading.stays import Stays
from streamload.offloading.torch_experts import (
    StreamedExperts,
    Sums,
    number_chosen,
    number_of_experts,
    sums_of,
)
from streamload.offloading.torch_lent import weight_of
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
from streamload.offloading.views import FileViews
from streamload.planning.requests import TensorRequests


class TorchModel(ModelAdapter):
    """A module, whose layers are modules in it."""

    def __init__(
        self, model: Any, parameters: Mapping[str, Parameter], layers: Sequence[str] = ()
    ) -> None:
        """Look at a module.

        Args:
            model: the module.
            parameters: those that are filled, by the names that plans have.
            layers: patterns of names of modules that are layers.

        Raises:
            OffloadError: it is no module, is offloaded already, or is sharded.
        """
        if not isinstance(model, nn.Module):
            raise OffloadError(
                f"a model of torch that is offloaded is a module, not a {type(model).__name__}: "
                "its layers are brought when their modules compute"
            )
        super().__init__(parameters, layers)
        self._model = model
        self._parameters: dict[str, TorchParameter] = {}
        for name, parameter in parameters.items():
            assert isinstance(parameter, TorchParameter), name
            self._parameters[name] = parameter
        self._modules = modules_by_name(model, unwrapped_names(model))
        self._elsewhere, self._looked_at = used_elsewhere(model), looked_at(model)
        self._parts = {(id(m._buffers), key) for m in model.modules() for key in parts_of(m)}
        self._absent: list[tuple[str, list[Any]]] = []  # what streams, and what it was
        self._refusals: Refusals | None = None
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self._stays = Stays()
        self._sums: dict[str, Sums] = {}  # by module of experts that stay in the file

    # --- deciding -----------------------------------------------------------------------------

    def parameter(self, name: str) -> Parameter:
        """A parameter by its name in plans."""
        return self._parameters[name]

    def module(self, name: str) -> nn.Module | None:
        """A module by its name without wrappers."""
        return self._modules.get(name)

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
        """Whether it is no weight, or is looked at where its module does not compute."""
        slots = self._parameters[name].slots
        return not all(
            (isinstance(container[key], nn.Parameter) or (id(container), key) in self._parts)
            and id(container) not in self._looked_at
            for container, key in slots
        )

    def experts(
        self, wants: TensorRequests, stay: Sequence[str], changed: Mapping[str, Any]
    ) -> list[Group]:
        """Those that transformers keeps fused, where each computes as is known."""
        place = {name: at for at, name in enumerate(wants.names)}
        known: dict[Any, Sums | None] = {}  # those of a model are alike
        groups, others = [], []
        for name, module in self._modules.items():
            count = number_of_experts(module)
            numbers = (
                [place.get(f"{name}.{key}", -1) for key in module._parameters] if count else []
            )
            if not count or all(self.stays(wants.names[at], stay) for at in numbers if at >= 0):
                continue
            key = type(module), *(tuple(each.shape) for each in module.parameters())
            if key not in known:
                known[key] = sums_of(module)
            sums = known[key]
            if sums is None or not all(
                at >= 0 and self._is_expert(wants, at, count, stay, changed) for at in numbers
            ):
                others.append(name)
                continue
            self._sums[name] = sums
            chosen = number_chosen(module)
            groups.append(Group(name, tuple(numbers), "experts", "", count, chosen))
        if others:
            self.notes.append(
                f"experts of {others[0]}{' and others' if len(others) > 1 else ''} stream with "
                "their layer, chosen or not: their form is not known, or not rows of the file"
            )
        return groups

    def _is_expert(
        self,
        wants: TensorRequests,
        at: int,
        count: int,
        stay: Sequence[str],
        changed: Mapping[str, Any],
    ) -> bool:
        """Whether a parameter's experts can be read one by one."""
        parameter, want, src = self._parameters[wants.names[at]], wants[at], wants.srcs[at]
        plain = src.bits >= 8 and not src.is_packed and len(parameter.names) == 1
        own = plain and not self.stays(wants.names[at], stay)
        unchanged = not any(row.tensor in changed for row in want.source)
        return own and unchanged and rows_of_experts(want, count) is not None

    # --- running ------------------------------------------------------------------------------

    def empty_parameter(self, name: str) -> str:
        """Let go of what the model holds of it, and remember what that was."""
        parameter = self._parameters[name]
        reason = parameter.release()
        if not reason:
            self._absent.append((name, [c[key] for c, key in parameter.slots]))
        return reason

    def slots(self, plan: OffloadPlan, device: Device) -> TorchSlots:
        """Allocate the slots."""
        found = plan.residency
        memory = device.allocate(BY_NAME["uint8"], (found.arena_nbytes,))
        return TorchSlots(memory, plan.slot_places)

    def views(self, plan: OffloadPlan, checkpoint: Checkpoint, device: Device) -> FileViews:
        """Map the files of what streams."""
        assert plan.stream is not None
        return FileViews(
            *(plan.stream, plan.layer_placements, checkpoint, device, weight_of),
            keeps=plan.cached,
        )

    def begin_streaming(
        self, plan: OffloadPlan, dtypes: Mapping[str, DType], device: Device
    ) -> None:
        """Let parameters without memory stand for what streams."""
        where = torch.device(device.info.name)
        for name, (before, *_) in self._absent:
            parameter, dtype = self._parameters[name], TO_TORCH[dtypes[name].name]
            first, *_ = parameter.names
            trains = before.requires_grad and dtype.is_floating_point
            kind = parameter.shape, dtype, where
            absent = StreamedParameter(first, *kind, requires_grad=trains, stays=self._stays)
            self._stays.streams.update(dict.fromkeys(parameter.names, first))
            for container, key in parameter.slots:
                container[key] = absent  # what is tied stays one object

    def stream_layer(
        self,
        name: str,
        number: int,
        weights: Sequence[tuple[int, str]],
        rounds: Rounds,
        device: Device,
    ) -> None:
        """Let a module bring its weights."""
        inside = {id(m) for m in self._modules[name].modules()}
        places = [(at, slot) for at, weight in weights for slot in self._slots_in(weight, inside)]
        how = places, rounds, device.mark, self._stays
        self._wrap(StreamedModule(self._modules[name], number, *how))

    def _slots_in(self, name: str, modules: set[int]) -> list[Any]:
        """The places of a parameter in some modules."""
        mine = [module for module in self._model.modules() if id(module) in modules]
        inside = {id(held) for module in mine for held in (module._parameters, module._buffers)}
        return [slot for slot in self._parameters[name].slots if id(slot[0]) in inside]

    def stream_experts(
        self,
        name: str,
        number: int,
        weights: Sequence[Mapping[str, int]],
        rounds: Rounds,
        device: Device,
    ) -> None:
        """Let a module of experts bring those that the router chose."""
        places = [{key.rpartition(".")[2]: at for key, at in each.items()} for each in weights]
        how = self._sums[name], places, rounds.experts.together, rounds, device.mark
        self._wrap(StreamedExperts(self._modules[name], number, *how))

    def gather_rows(self, name: str, weight: str, reader: RowReader, device: Device) -> None:
        """Let an embedding read its rows."""
        module = self._modules[name]
        assert isinstance(module, nn.Embedding), name
        where, dtype = torch.device(device.info.name), TO_TORCH[reader.dst.name]

        def rows(numbers: Sequence[int]) -> torch.Tensor:
            found = torch.from_numpy(reader.read(numbers)).view(dtype)
            return found.view(len(numbers), *reader.row_shape).to(where)

        self._wrap(GatheredEmbedding(module, rows))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """Count passes, and refuse what cannot be."""
        self._wrap(Pass(self._model, self.room, self.timed, self._stays, self._trains))
        self._watch_encoder()
        absent = plan.residency.absent
        holders = [
            module
            for name, module in self._modules.items()
            if any(not name or each == name or each.startswith(f"{name}.") for each in absent)
        ]
        self._refusals = Refusals([self._model, *holders])
        self._refusals.put()
        if rounds is not None:
            weakref.finalize(self._model, rounds.abandon)
        self._modules = {}  # the model may go, and this not
        self._model = nn.Module()

    def watch(self) -> None:
        """Count the tokens of passes."""
        self._wrap(Watched(self._model, self.room))
        self._watch_encoder()

    def _watch_encoder(self) -> None:
        """Count the tokens of transformers' encoder, which `generate` calls before the model."""
        if getattr(getattr(self._model, "config", None), "is_encoder_decoder", False):
            encoder = self._model.get_encoder()
            if encoder is not self._model:
                self._wrap(Watched(encoder, self.room, has_cache=False))

    def take_out(self) -> None:
        """Let the model be as a load that failed leaves it: what streamed holds nothing."""
        if self._refusals is not None:
            self._refusals.take_out()
            self._refusals = None
        super().take_out()
        for name, before in self._absent:
            parameter = self._parameters[name]
            for (container, key), value in zip(parameter.slots, before, strict=True):
                container[key] = value
                if value.device.type != "meta":
                    let_go(value)
            parameter.invalidate(keep=False)
        self._absent.clear()


class Watched(Wrapped):
    """The ``forward`` of a model, whose tokens are counted."""

    def __init__(self, model: nn.Module, room: TokenRoom, *, has_cache: bool = True) -> None:
        """Change nothing yet; ``has_cache``: the KV cache has the tokens, too."""
        super().__init__(model)
        self._room, self._signature = room, inspect.signature(self._own())
        self._has_cache = has_cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count, and compute."""
        self._see(args, kwargs)
        return self._own()(*args, **kwargs)

    def _see(self, args: Any, kwargs: Any) -> None:
        if not self._room:
            return
        try:
            given = self._signature.bind_partial(*args, **kwargs).arguments
        except TypeError:  # the model itself says what is wrong with them
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


class Pass(Watched):
    """The ``forward`` of a model, whose calls are counted."""

    def __init__(
        self, model: nn.Module, room: TokenRoom, timed: Timed, stays: Stays, trains: bool
    ) -> None:
        """Change nothing yet; ``trains``: it had parameters that can be trained."""
        super().__init__(model, room)
        self._timed, self._stays, self._trains = timed, stays, trains

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, and take the time. No graph is kept: it would hold what layers computed."""
        refuse_training(self._module)
        self._see(args, kwargs)
        with self._timed.a_pass(), self._stays.a_pass(), torch.no_grad():
            found = self._own()(*args, **kwargs)
        return no_backward(found) if self._trains and torch.is_grad_enabled() else found
