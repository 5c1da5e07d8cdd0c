"""Modules that keep FP8 weights packed, and multiply by them as they are stored.

Blocks that no kernel reads are dequantized in each call.

Without its kernels, transformers would hold the weights dequantized. The parameters have the names
of those in transformers' own FP8 modules.
"""

from __future__ import annotations

import inspect
from collections.abc import Set

import torch
from torch import nn
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8GroupedLinear, FP8Linear

from streamload.codecs.decode_blocks import WIDTH
from streamload.devices.torch.product import Operand, linear

_ROWS_NBYTES = 2**24  # of float32, in which values are multiplied by their scales
_CODES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_SCALES = {torch.float32: "F32", torch.uint8: "U8"}
if hasattr(torch, "float8_e8m0fnu"):
    _SCALES[torch.float8_e8m0fnu] = "F8_E8M0"


def dequantized(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return a matrix of 8-bit values times its scales, rounded once to `dtype`.

    ``scale``: one, or one for each block of (rows, columns), less in the last ones; a byte is the
    exponent of a power of two, plus 127.
    """
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.to(torch.float32) - 127)
    scale = scale.to(torch.float32)
    rows, columns = values.shape
    out = torch.empty(rows, columns, dtype=dtype, device=values.device)
    if not out.numel():
        return out
    tall, wide = block if block is not None and scale.numel() > 1 else (rows, columns)
    scale = scale.reshape(-(-rows // tall), -(-columns // wide))
    step = max(_ROWS_NBYTES // (4 * columns * tall), 1) * tall
    for first in range(0, rows, step):
        part = values[first : first + step].to(torch.float32)
        of_rows = scale[first // tall : -(-(first + len(part)) // tall)]
        wider = of_rows.repeat_interleave(tall, 0)[: len(part)]
        part.mul_(wider.repeat_interleave(wide, 1)[:, :columns])
        out[first : first + step] = part
    return out


def operand(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] | None
) -> Operand | None:
    """Return a matrix for products; None if no kernel reads it. Arguments as of `dequantized`."""
    rows, columns = values.shape
    tall, wide = block if block is not None and scale.numel() > 1 else (0, 0)
    wide = 0 if wide >= columns else wide
    scales = -(-rows // (tall or rows or 1)) * (columns // (wide or columns or 1))
    if (  # as `Form.per_row`: compilers trace this, but not `form_of`, which is cached
        values.dtype not in _CODES
        or not values.is_contiguous()
        or columns % (wide or WIDTH)
        or wide % WIDTH
        or scale.numel() != scales
    ):
        return None
    if scale.dtype not in _SCALES:
        scale = scale.to(torch.float32)
    format = f"fp8:{_CODES[values.dtype]}:{_SCALES[scale.dtype]}:{tall}:{wide}"
    return Operand(format, [values, scale.contiguous()], 0, rows, columns)


def multiplied(
    input: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    block: tuple[int, int] | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `input` by a matrix (see `dequantized`), and add a bias."""
    of = operand(values, scale, block)
    if of is None or input.device != values.device:
        return functional.linear(input, dequantized(values, scale, block, input.dtype), bias)
    return linear(input, of, bias)


class PackedLinear(FP8Linear):  # type: ignore[misc]
    """A Linear of FP8 weights, which stay as they are stored."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Multiply `input` by the weight."""
        return multiplied(input, self.weight, self.weight_scale_inv, self.block_size, self.bias)


class PackedExperts(FP8Experts):  # type: ignore[misc]
    """Experts of FP8 weights, which stay as they are stored."""

    forward = inspect.unwrap(FP8Experts.forward)

    def linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        weight_scale_inv: torch.Tensor,
        activation_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply `input` by the weight of one expert."""
        return multiplied(input, weight, weight_scale_inv, self.block_size)


def as_stored(model: nn.Module, quantised: Set[str], dtype: torch.dtype) -> None:
    """Replace FP8 modules by Linears of a dtype, except those whose weights are `quantised`."""
    for name, module in list(model.named_modules()):
        if type(module) is FP8Linear and f"{name}.weight" not in quantised:
            sizes, bias = (module.in_features, module.out_features), module.bias is not None
            model.set_submodule(name, nn.Linear(*sizes, bias, device="meta", dtype=dtype))


def dense_numel(model: nn.Module) -> int:
    """Return the number of elements of the largest FP8 weight, which a call may dequantize."""
    linears = (m.weight for m in model.modules() if isinstance(m, PackedLinear))
    experts = (m for m in model.modules() if isinstance(m, PackedExperts))
    fused = (p[0] for m in experts for p in m.parameters(recurse=False) if p.dim() == 3)
    return max((weight.numel() for weight in (*linears, *fused)), default=0)


def keep_packed(model: nn.Module) -> str:
    """Let FP8 modules compute without transformers' kernels; return a class that cannot, or ""."""
    left = ""
    for module in model.modules():
        if isinstance(module, FP8GroupedLinear):
            left = type(module).__name__
        elif isinstance(module, FP8Linear):
            module.__class__ = PackedLinear
        elif isinstance(module, FP8Experts):
            if module.down_proj.dtype == torch.int8:  # two values of 4 bits in a byte
                left = type(module).__name__
            module.__class__ = PackedExperts
    return left
