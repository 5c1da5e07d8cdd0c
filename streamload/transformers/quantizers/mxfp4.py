"""Experts of gpt-oss that keep their MXFP4 blocks, and multiply by them as they are stored.

Without its kernels, transformers would hold all experts dequantized. The buffers have the names of
the checkpoint.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from streamload.devices.torch.decoded import interpreted
from streamload.devices.torch.deferred import deferred
from streamload.devices.torch.product import Operand, dense


class Blocks:
    """The weights of all experts of a module; indexing returns one expert's, `deferred`."""

    _is_hf_initialized = True  # transformers leaves it as it is

    def __init__(self, leaf: str, module: Any) -> None:
        parts = ("blocks", "scales", "bias")
        self._blocks, self._scales, bias = (getattr(module, f"{leaf}_{part}") for part in parts)
        self._dtype = bias.dtype

    @interpreted
    def __getitem__(self, expert: int) -> torch.Tensor:
        """Return the matrix of an expert, with the inputs on its first axis."""
        experts, rows, blocks, nbytes = self._blocks.shape
        first, width = range(experts)[int(expert)] * rows, 2 * blocks * nbytes
        of = Operand("mxfp4", [self._blocks, self._scales], first, first + rows, width)
        return deferred(
            (width, rows),
            self._dtype,
            self._blocks.device,
            lambda: of,
            lambda: dense(of, self._dtype).t(),
            transposed=True,
        )


class PackedExperts(GptOssExperts):  # type: ignore[misc]
    """Experts of gpt-oss that hold MXFP4 blocks."""

    forward = inspect.unwrap(GptOssExperts.forward)
    gate_up_proj = property(partial(Blocks, "gate_up_proj"))
    down_proj = property(partial(Blocks, "down_proj"))


def keep_packed(module: nn.Module) -> bool:
    """Let experts of gpt-oss keep their MXFP4 blocks, and return True; False for other modules."""
    if not isinstance(module, GptOssExperts):
        return False
    module.__class__ = PackedExperts
    return True
