"""Build weights of bitsandbytes and torchao, which are tensors of their classes over stored parts.

A module holds the parts as buffers during the load, and gets the weight after it. If the parts
stream, each call builds the weight anew and drops it.

On a CPU `Linear4bit` computes by streamload's kernels, see `four_bit`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from streamload.devices.torch.tensors import STREAMED
from streamload.offloading.torch_modules import StreamedParameter, is_lent, weight_of

_FOUR_BIT_PARTS = ("weight", "weight.absmax", "weight.quant_map")  # that kernels read
_NESTED_PARTS = (*_FOUR_BIT_PARTS, "weight.nested_absmax", "weight.nested_quant_map")
_MADE = "_streamload_made"  # on a module that builds its weight for each call: a `_Parts`


class Maker(ABC):
    """Builds the weight of a quantized module from its parts: values, scales and tables."""

    @abstractmethod
    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """Return the weight over its parts, by their names in the module, without copies."""

    def product(
        self, module: Any, parts: Mapping[str, torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the module's output without building its weight, or None: the library computes."""
        return None

    def forget(self, module: Any) -> None:  # noqa: B027
        """Drop references to the parts that a module keeps besides its weight."""

    def settle(self, module: Any) -> None:  # noqa: B027
        """Change how a module computes with a weight that is built once."""


class FourBit(Maker):
    """Builds the weight of bitsandbytes' `Linear4bit`."""

    def __init__(self) -> None:
        self._state: Any = None  # without the parts; to read it from these waits for the device

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """Return bitsandbytes' `Params4bit` over the stored values, scales and tables."""
        from bitsandbytes.nn import Params4bit

        weight = parts.pop("weight")
        parts = {key.removeprefix("weight."): tensor for key, tensor in parts.items()}
        made: nn.Parameter
        if self._state is None:
            made = Params4bit.from_prequantized(
                data=weight,
                quantized_stats=parts.copy(),
                requires_grad=False,
                device=weight.device,
                module=module,
            )
            self._state = _with_parts(made.quant_state, dict.fromkeys(parts))
            return made
        state = module.quant_state = _with_parts(self._state, parts)
        made = Params4bit(
            weight.detach(),
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=weight.dtype,
            module=module,
            bnb_quantized=True,
        )
        return made

    def product(
        self, module: Any, parts: Mapping[str, torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output by kernels of the host, or None if there are none."""
        from streamload.transformers.quantizers.four_bit import known_of, multiplied

        if not x.is_cpu:
            return None
        if self._state is None:
            self.make(module, {**parts})
            known_of(self._state)
            module.support_avx512bf16_for_cpu = False
        names = _NESTED_PARTS if self._state.nested else _FOUR_BIT_PARTS
        return multiplied(module, [parts[name] for name in names], self._state, x)

    def forget(self, module: Any) -> None:
        """Drop the module's reference to the scales and tables."""
        module.quant_state = None

    def settle(self, module: Any) -> None:
        """Let the module compute by kernels of the host, and never repack its weight there."""
        from streamload.transformers.quantizers.four_bit import settle

        settle(module)


def _with_parts(state: Any, parts: Mapping[str, Any]) -> Any:
    """Return a copy of bitsandbytes' ``QuantState`` with the tensors in `parts`."""
    state = copy.copy(state)
    state.absmax, state.code = parts["absmax"], parts["quant_map"]
    if state.nested:
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = parts["nested_absmax"]
        state.state2.code = parts["nested_quant_map"]
    return state


class EightBit(Maker):
    """Builds the weight of bitsandbytes' `Linear8bitLt`."""

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """Return bitsandbytes' `Int8Params` over the stored values and scales."""
        from bitsandbytes.nn import Int8Params

        made: nn.Parameter = Int8Params(
            parts["weight"],
            requires_grad=False,
            has_fp16_weights=module.state.has_fp16_weights,
            CB=parts["weight"],
            SCB=parts["SCB"],
        )
        return made

    def forget(self, module: Any) -> None:
        """Drop the module's references to the values and scales."""
        module.state.CB = module.state.SCB = None


class TorchAo(Maker):
    """Builds a weight of one of torchao's tensor classes, by transformers' own function."""

    def __init__(self, quantizer: Any, name: str) -> None:
        """Keep the metadata that transformers' quantizer has of the weight `name`."""
        said = {name: quantizer.metadata.get(name), "tensor_names": f'["{name}"]'}
        self._name = name
        self._quantizer = SimpleNamespace(  # with one weight: each call iterates over all
            metadata={key: value for key, value in said.items() if value is not None}
        )

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """Return a parameter that holds torchao's tensor over the stored tensors."""
        from transformers.integrations.torchao import TorchAoDeserialize

        made = TorchAoDeserialize(self._quantizer).convert(
            {key: [tensor] for key, tensor in parts.items()},
            source_patterns=list(parts),
            model=SimpleNamespace(get_submodule=lambda name: module),
            full_layer_name=self._name,
        )
        return nn.Parameter(made[self._name], requires_grad=False)


class _Parts(NamedTuple):
    """How a module builds its weight: the weight's name, its buffers' names, the builder."""

    leaf: str
    keys: Sequence[str]
    maker: Maker


class _OfParts:
    """The base of modules whose weight streams in parts: each call builds and drops the weight."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Build the weight, call the library's ``forward``, and put the parts back."""
        leaf, keys, maker = getattr(self, _MADE)
        parts = {key: self._buffers[key] for key in keys}
        found = None if kwargs or len(args) != 1 else maker.product(self, parts, *args)
        if found is not None:
            maker.forget(self)
            return found
        before = dict(self._parameters)
        for key in keys:
            del self._buffers[key]
        try:
            for key, value in before.items():
                if value is not None and is_lent(value):  # a bias, to which a library gives a dtype
                    self._parameters[key] = weight_of(value.detach())
            self._parameters[leaf] = maker.make(self, parts.copy())
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.clear()
            self._parameters.update(before)
            self._buffers.update(parts)
            maker.forget(self)


@cache
def _class_of(own: type[Any]) -> type[Any]:
    return type(own.__name__, (_OfParts, own), {"__module__": own.__module__})


def put_together(
    module: Any,
    name: str,
    keys: Sequence[str],
    maker: Maker,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Build a module's quantized weight from its parts, once, or for each call if they stream.

    The buffers ``keys`` move into the weight without copies. ``shape`` and ``dtype`` are those
    before it was quantized.
    """
    leaf = name.rpartition(".")[2]
    module._is_hf_initialized = True
    streamed = [each for key in keys if hasattr(each := module._buffers[key], STREAMED)]
    if not streamed:
        parts = {key: module._buffers.pop(key) for key in keys}
        module._parameters[leaf] = maker.make(module, parts)
        maker.settle(module)
        return
    setattr(module, _MADE, _Parts(leaf, keys, maker))
    own: Any = type(module)
    module.__class__ = _class_of(own)
    if leaf not in keys:  # others may ask for its dtype
        module._parameters[leaf] = StreamedParameter(name, shape, dtype, streamed[0].device)
