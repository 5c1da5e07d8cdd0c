"""Offload models of tinygrad: find their layers, and make the layers fetch their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tinygrad import Tensor, dtypes, nn

from streamload.devices.base import Device
from streamload.devices.tinygrad.linear import walk
from streamload.devices.tinygrad.tensors import TO_TINYGRAD, TinygradParameter
from streamload.errors import OffloadError
from streamload.offloading import tinygrad_modules
from streamload.offloading.model import LayerWeights, ModelAdapter, Timed
from streamload.offloading.overrun import TokenRoom, tokens_of
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.problem import Problem
from streamload.offloading.rows import RowReader
from streamload.planning.requests import TensorRequests


class TinygradModel(ModelAdapter[TinygradParameter]):
    """The adapter of a tinygrad model, whose layers are callable objects in it."""

    slots = tinygrad_modules.TinygradSlots

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], layers: Sequence[str] = ()
    ) -> None:
        """Find the objects of a model; ``layers``: patterns of names of its layers."""
        modules: dict[str, Any] = {}
        for prefix, module in walk(model, tinygrad_modules.JIT):
            modules.setdefault(prefix.removesuffix("."), module)
        super().__init__(model, parameters, modules, layers)
        if not tinygrad_modules.can_be_wrapped(model):
            raise OffloadError(
                f"a model of tinygrad that is offloaded is an object that is called, not a "
                f"{type(model).__name__}: its layers are brought when they are called"
            )
        self._device: Device | None = None
        self._put_back: Callable[[], None] | None = None  # undoes `set_aside`

    # --- planning -----------------------------------------------------------------------------

    def can_stream(self, module: Any) -> bool:
        """Whether an object in the model is callable, so that its call can fetch weights."""
        return module is not self._model and tinygrad_modules.can_be_wrapped(module)

    def is_embedding(self, module: Any) -> bool:
        """Whether an object is tinygrad's embedding."""
        return isinstance(module, nn.Embedding)

    def must_stay(self, name: str) -> bool:
        """Whether a tensor is no parameter to tinygrad, but a constant of the model."""
        return not all(getattr(t, "is_param", True) for t in self._parameters[name].tensors)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        """Free the weights that stream, and the captures of TinyJits."""
        if plan.residency.streams or plan.residency.gathers:
            layers = [self._modules[name] for name in (*plan.residency.streams, *plan.bounded)]
            self._put_back = tinygrad_modules.set_aside(self._model, layers)
        super().empty(plan, wants)

    def begin_streaming(self, plan: OffloadPlan, problem: Problem, device: Device) -> None:
        """Make streamed weights raise if used; make resident layers compute before they return."""
        self._device, names = device, problem.wants.names
        dtypes = dict(zip(names, problem.dsts, strict=True))
        for name in self._emptied:
            parameter, kind = self._parameters[name], TO_TINYGRAD[dtypes[name].name]
            first = parameter.names[0]
            for tensor in parameter.tensors:
                tensor.uop = tinygrad_modules.absent(first, tensor.shape, kind, device.info.name)
        weights = {group.name: group.wants for group in plan.groups}
        for name in plan.bounded:
            tensors = [t for at in weights[name] for t in self._parameters[names[at]].tensors]
            self._wrap(tinygrad_modules.Layer(self._modules[name], tensors))

    def stream_layer(self, name: str, number: int, weights: LayerWeights, rounds: Rounds) -> None:
        """Make an object get its weights from ``rounds``, as layer ``number``, at each call."""
        module = self._modules[name]
        places = [(at, self._parameters[weight].tensors) for at, weight in weights]
        self._wrap(tinygrad_modules.StreamedLayer(name, module, number, places, rounds))

    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        """Make an embedding read only the rows that it looks up, from the file to the device."""
        self._wrap(tinygrad_modules.GatheredEmbedding(name, self._modules[name], reader, device))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """Make the model count tokens, and passes if anything streams."""
        timed = self.timed if plan.residency.absent else None
        self._wrap(Pass(self._model, self.room, timed))

    def take_out(self) -> None:
        """Restore objects and TinyJits; streamed weights hold no values until a new load."""
        super().take_out()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if self._device is not None:
            self._device.trim()


class Pass(tinygrad_modules.Wrapped):
    """A substitute for a model's call: counts passes and new tokens, not those in the KV cache."""

    def __init__(self, model: Any, room: TokenRoom, timed: Timed | None = None) -> None:
        """Change nothing yet; ``room`` checks tokens; ``timed``: None if nothing streams."""
        super().__init__(model)
        self._room, self._timed = room, timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a pass of the model, and count it."""
        with nullcontext() if self._timed is None else self._timed.a_pass():
            if self._room:
                given = {f"{at}": each for at, each in enumerate((*args, *kwargs.values()))}
                tokens, _ = tokens_of(given, _has_integers)
                self._room.see(tokens, 0)
            return super().__call__(*args, **kwargs)


def _has_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and dtypes.is_int(value.dtype)
