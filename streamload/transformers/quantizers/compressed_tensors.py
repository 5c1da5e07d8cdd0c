"""Keep the weights of compressed-tensors' modules compressed.

compressed-tensors decompresses all of a model before its first run; here each module decompresses
its own weight in each call, by the same functions.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.utils import get_direct_state_dict
from torch import nn
from torch.nn import functional

_KINDS = (nn.Linear, nn.Embedding)


def keep_packed(model: nn.Module, compressor: Any) -> list[str]:
    """Let compressed modules decompress their weights in each call.

    Returns the names of compressed modules that cannot; if there are any, nothing is changed.
    """
    compressed = [
        (name, module)
        for name, module in model.named_modules()
        if (getattr(module, "quantization_scheme", None) is not None and hasattr(module, "weight"))
        or hasattr(module, "weight_packed")
    ]
    others = [name for name, module in compressed if type(module) not in _KINDS]
    if others:
        return others
    for _, module in compressed:
        module.forward = MethodType(_forward, module)
    compressor.remove_decompression_hook(model)
    return []


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Decompress the weight and compute; replaces the ``forward`` of a compressed module."""
    scheme = self.quantization_scheme
    compressor = BaseCompressor.get_value_from_registry(scheme.format.value)
    weight = compressor.decompress(get_direct_state_dict(self), scheme)["weight"]
    if scheme.input_activations:
        # in the dtype of its scale
        given = forward_quantize(self, input, "input", scheme.input_activations)
        input = given.to(input.dtype) if input.is_floating_point() else given
    if isinstance(self, nn.Embedding):
        out = functional.embedding(input, weight, self.padding_idx)
    else:
        out = functional.linear(input, weight.to(input.dtype), self.bias)
    if scheme.output_activations:
        return forward_quantize(self, out, "output", scheme.output_activations).to(out.dtype)
    return out
