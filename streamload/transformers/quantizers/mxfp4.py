"""Experts of gpt-oss that keep their MXFP4 blocks, and dequantize one expert at a time.

Without its kernels, transformers would hold all experts dequantized. The buffers have the names of
the checkpoint.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


class Blocks:
    """The weights of all experts of a module; indexing dequantizes one expert."""

    _is_hf_initialized = True  # transformers leaves it as it is

    def __init__(self, leaf: str, module: Any) -> None:
        parts = ("blocks", "scales", "bias")
        self._blocks, self._scales, bias = (getattr(module, f"{leaf}_{part}") for part in parts)
        self._dtype = bias.dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        """Return the dequantized matrix of an expert, with the inputs on its first axis."""
        blocks, scales = self._blocks[expert][None], self._scales[expert][None]
        dense: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=self._dtype)
        return dense[0]


class PackedExperts(GptOssExperts):  # type: ignore[misc]
    """Experts of gpt-oss that hold MXFP4 blocks, and dequantize one expert at a time to compute."""

    forward = inspect.unwrap(GptOssExperts.forward)
    gate_up_proj = property(partial(Blocks, "gate_up_proj"))
    down_proj = property(partial(Blocks, "down_proj"))


def keep_packed(module: nn.Module) -> bool:
    """Let experts of gpt-oss keep their MXFP4 blocks, and return True; False for other modules."""
    if not isinstance(module, GptOssExperts):
        return False
    module.__class__ = PackedExperts
    return True
