"""Build weights of bitsandbytes and torchao, which are tensors of their classes over stored parts.

A module holds the parts as buffers during the load, and gets the weight after it. If the parts
stream, each call builds the weight anew and drops it: on a CPU with AVX512-BF16, bitsandbytes
repacks it, and the slots keep the stored parts.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from streamload.devices.torch.tensors import STREAMED
from streamload.offloading.torch_lent import is_lent, weight_of
from streamload.offloading.torch_modules import StreamedParameter

_MADE = "_streamload_made"  # on a module that makes its weight for each call: a `_Made`


class Maker(ABC):
    """Builds the weight of a module from its parts."""

    @abstractmethod
    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """Build a parameter over the parts, which have their names in the module."""

    def forget(self, module: Any) -> None:  # noqa: B027
        """Drop references to the parts that the module keeps outside of its parameter."""

    def watch(self, module: Any) -> None:  # noqa: B027
        """Protect the parts of a module that keeps its weight from changes by calls."""


class FourBit(Maker):
    """A weight of bitsandbytes' `Linear4bit`."""

    def __init__(self) -> None:
        self._state: Any = None  # without the parts; to read it from these waits for the device

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """See `Maker`."""
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

    def forget(self, module: Any) -> None:
        """See `Maker`."""
        module.quant_state = None

    def watch(self, module: Any) -> None:
        """See `Maker`."""
        from streamload.transformers.quantizers import repacked

        repacked.watch(module)


def _with_parts(state: Any, parts: Mapping[str, Any]) -> Any:
    """A copy of a quantization state with other tensors."""
    state = copy.copy(state)
    state.absmax, state.code = parts["absmax"], parts["quant_map"]
    if state.nested:
        state.state2 = copy.copy(state.state2)
        state.state2.absmax = parts["nested_absmax"]
        state.state2.code = parts["nested_quant_map"]
    return state


class EightBit(Maker):
    """A weight of bitsandbytes' `Linear8bitLt`."""

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """See `Maker`."""
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
        """See `Maker`."""
        module.state.CB = module.state.SCB = None


class TorchAo(Maker):
    """A tensor of a class of torchao, built by transformers' own function."""

    def __init__(self, quantizer: Any, name: str) -> None:
        """Take the quantizer, and the name of the weight in the model."""
        said = {name: quantizer.metadata.get(name), "tensor_names": f'["{name}"]'}
        self._name = name
        self._quantizer = SimpleNamespace(  # with one weight: each call iterates over all
            metadata={key: value for key, value in said.items() if value is not None}
        )

    def make(self, module: Any, parts: dict[str, torch.Tensor]) -> nn.Parameter:
        """See `Maker`."""
        from transformers.integrations.torchao import TorchAoDeserialize

        made = TorchAoDeserialize(self._quantizer).convert(
            {key: [tensor] for key, tensor in parts.items()},
            source_patterns=list(parts),
            model=SimpleNamespace(get_submodule=lambda name: module),
            full_layer_name=self._name,
        )
        return nn.Parameter(made[self._name], requires_grad=False)


class _Made:
    """A weight that each call builds."""

    def __init__(self, leaf: str, keys: Sequence[str], maker: Maker) -> None:
        self._leaf, self._keys, self._maker = leaf, keys, maker

    @contextmanager
    def there(self, module: nn.Module) -> Iterator[None]:
        """Give a module its weight."""
        before = dict(module._parameters)
        parts = {key: module._buffers.pop(key) for key in self._keys}
        try:
            for key, value in before.items():
                if value is not None and is_lent(value):  # a bias, to which a library gives a dtype
                    module._parameters[key] = weight_of(value.detach())
            module._parameters[self._leaf] = self._maker.make(module, parts.copy())
            yield
        finally:
            module._parameters.clear()
            module._parameters.update(before)
            module._buffers.update(parts)
            self._maker.forget(module)


class _OfParts:
    """The base of modules that build their weight for each call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the library does."""
        with getattr(self, _MADE).there(self):
            return super().forward(*args, **kwargs)  # type: ignore[misc]


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
    """Build a module's weight from its buffers `keys`, for each call if these stream; no copy.

    Args:
        module: it holds the parts as buffers.
        name: of the weight in the model.
        keys: of the parts in the module.
        maker: builds it.
        shape: of the weight before it was quantized.
        dtype: likewise.
    """
    leaf = name.rpartition(".")[2]
    module._is_hf_initialized = True
    streamed = [each for key in keys if hasattr(each := module._buffers[key], STREAMED)]
    if not streamed:
        parts = {key: module._buffers.pop(key) for key in keys}
        module._parameters[leaf] = maker.make(module, parts)
        maker.watch(module)
        return
    setattr(module, _MADE, _Made(leaf, keys, maker))
    own: Any = type(module)
    module.__class__ = _class_of(own)
    if leaf not in keys:  # others may ask for its dtype
        stands = StreamedParameter(name, shape, dtype, streamed[0].device)
        module._parameters[leaf] = stands
