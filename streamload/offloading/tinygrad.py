"""A model of tinygrad whose layers stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from tinygrad import Tensor, dtypes, nn

from streamload.core.dtypes import DType
from streamload.devices.base import Device
from streamload.devices.tinygrad.linear import walk
from streamload.devices.tinygrad.tensors import TO_TINYGRAD, TinygradParameter
from streamload.errors import OffloadError
from streamload.offloading.model import ModelAdapter, Timed
from streamload.offloading.overrun import TokenRoom, tokens_of
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.rows import RowReader
from streamload.offloading.tinygrad_modules import (
    JIT,
    GatheredEmbedding,
    Layer,
    StreamedLayer,
    TinygradSlots,
    Wrapped,
    absent,
    can_be_wrapped,
    set_aside,
)
from streamload.planning.requests import TensorRequests


class TinygradModel(ModelAdapter[TinygradParameter]):
    """A model, whose layers are objects in it that are called."""

    slots = TinygradSlots

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], layers: Sequence[str] = ()
    ) -> None:
        """Look at a model; see `ModelAdapter`.

        Raises:
            OffloadError: it is a dict of tensors, or sharded.
        """
        modules: dict[str, Any] = {}
        for prefix, module in walk(model, JIT):
            modules.setdefault(prefix.removesuffix("."), module)
        super().__init__(model, parameters, modules, layers)
        if not can_be_wrapped(model):
            raise OffloadError(
                f"a model of tinygrad that is offloaded is an object that is called, not a "
                f"{type(model).__name__}: its layers are brought when they are called"
            )
        self._device: Device | None = None
        self._put_back: Callable[[], None] | None = None  # TinyJits that are set aside

    # --- deciding -----------------------------------------------------------------------------

    def can_stream(self, module: Any) -> bool:
        """Whether it is called."""
        return module is not self._model and can_be_wrapped(module)

    def is_embedding(self, module: Any) -> bool:
        """Whether it is tinygrad's."""
        return isinstance(module, nn.Embedding)

    def must_stay(self, name: str) -> bool:
        """Whether it is no parameter."""
        return not all(getattr(t, "is_param", True) for t in self._parameters[name].tensors)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        """Free all that streams, and the captures of TinyJits."""
        if plan.residency.streams or plan.residency.gathers:
            layers = [self._modules[name] for name in (*plan.residency.streams, *plan.bounded)]
            self._put_back = set_aside(self._model, layers)
        super().empty(plan, wants)

    def begin_streaming(
        self, plan: OffloadPlan, dtypes: Mapping[str, DType], device: Device
    ) -> None:
        """Let the weights that stream stand on memory that raises; mark where layers end."""
        self._device = device
        for name in self._emptied:
            parameter = self._parameters[name]
            kind = TO_TINYGRAD[dtypes[name].name]
            for tensor in parameter.tensors:
                tensor.uop = absent(parameter.names[0], tensor.shape, kind, device.info.name)
        weights = {group.name: group.wants for group in plan.groups}
        names = list(dtypes)
        for name in plan.bounded:
            mine = [self._parameters[names[at]] for at in weights[name]]
            tensors = [tensor for parameter in mine for tensor in parameter.tensors]
            self._wrap(Layer(self._modules[name], tensors))

    def stream_layer(
        self, name: str, number: int, weights: Sequence[tuple[int, str]], rounds: Rounds
    ) -> None:
        """Let an object bring its weights."""
        places = [(at, self._parameters[weight].tensors) for at, weight in weights]
        self._wrap(StreamedLayer(name, self._modules[name], number, places, rounds))

    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        """Let an embedding read its rows."""
        self._wrap(GatheredEmbedding(name, self._modules[name], reader, device))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """Count passes."""
        timed = self.timed if plan.residency.absent else None
        self._wrap(Pass(self._model, self.room, timed))

    def take_out(self) -> None:
        """Restore objects as after a failed load: weights that streamed hold nothing."""
        super().take_out()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if self._device is not None:
            self._device.trim()


class Pass(Wrapped):
    """A model's call: counts tokens, and passes if layers stream. Its own cache is not seen."""

    def __init__(self, model: Any, room: TokenRoom, timed: Timed | None = None) -> None:
        """Change nothing yet; ``timed``: its passes, None if nothing streams."""
        super().__init__(model)
        self._room, self._timed = room, timed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Count, and compute."""
        with nullcontext() if self._timed is None else self._timed.a_pass():
            if self._room:
                given = {f"{at}": each for at, each in enumerate((*args, *kwargs.values()))}
                tokens, _ = tokens_of(given, _has_integers)
                self._room.see(tokens, 0)
            return super().__call__(*args, **kwargs)


def _has_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and dtypes.is_int(value.dtype)
