"""Experts of gpt-oss that keep their MXFP4 blocks, and dequantise one expert at a time.

They stand where transformers, without its kernels, would hold all experts dequantised. Their
buffers have the names of the checkpoint.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


class Blocks:
    """The weights of all experts; one is dequantised when it is asked for."""

    _is_hf_initialized = True  # transformers leaves it as it is

    def __init__(self, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self._blocks, self._scales, self._dtype = blocks, scales, dtype

    def __getitem__(self, expert: int) -> torch.Tensor:
        """An expert's matrix, inputs first."""
        blocks, scales = self._blocks[expert][None], self._scales[expert][None]
        dense: torch.Tensor = convert_moe_packed_tensors(blocks, scales, dtype=self._dtype)
        return dense[0]


class PackedExperts(GptOssExperts):  # type: ignore[misc]
    """Experts of gpt-oss, computed one after the other."""

    forward = inspect.unwrap(GptOssExperts.forward)

    @property
    def gate_up_proj(self) -> Blocks:
        """Gate and up projections."""
        dtype = self.gate_up_proj_bias.dtype
        return Blocks(self.gate_up_proj_blocks, self.gate_up_proj_scales, dtype)

    @property
    def down_proj(self) -> Blocks:
        """Down projections."""
        return Blocks(self.down_proj_blocks, self.down_proj_scales, self.down_proj_bias.dtype)


def keep_packed(module: nn.Module) -> bool:
    """Let experts of gpt-oss keep their blocks; returns False for any other module."""
    if not isinstance(module, GptOssExperts):
        return False
    module.__class__ = PackedExperts
    return True
