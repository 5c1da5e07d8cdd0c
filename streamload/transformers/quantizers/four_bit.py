"""bitsandbytes' `Linear4bit`, computed by `devices.torch.product`.

The kernels read a weight as it is stored. Blocks of another size, and devices without kernels, are
computed by bitsandbytes. It repacks a weight for a CPU with AVX512-BF16 then, and other readers
would get that: these modules never let it.
"""

from __future__ import annotations

import json
from typing import Any

import bitsandbytes
import torch

from streamload.devices.torch.product import Operand, form_of, has_kernels, linear

_OFFSET = "_streamload_offset"  # on a ``QuantState``: its mean as kernels take it
_BLOCK = 64  # elements of a block that kernels read


class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
    """bitsandbytes' module. peft and transformers look for that class, or its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weight, plus the bias, in the dtype of ``x``."""
        state = getattr(self.weight, "quant_state", None)
        found = None if state is None else multiplied(self, self.weight, state, x)
        return super().forward(x) if found is None else found


def settle(module: Any) -> None:
    """Let a `Linear4bit` whose weight stays compute by kernels, if they can read it."""
    module.support_avx512bf16_for_cpu = False
    state = module.weight.quant_state
    note_offset(state)
    is_plain = type(module) is bitsandbytes.nn.Linear4bit
    if is_plain and form_of(_format(state), state.shape[-1]) is not None:
        module.__class__ = Linear4bit


def multiplied(
    module: Any, weight: torch.Tensor, state: Any, x: torch.Tensor
) -> torch.Tensor | None:
    """Return a 4-bit module's output, or None if kernels cannot read its weight.

    Args:
        module: a `Linear4bit`.
        weight: its codes.
        state: its scales and tables: bitsandbytes' ``QuantState``.
        x: of shape (..., columns).
    """
    shape = tuple(state.shape)
    if state.blocksize != _BLOCK or len(shape) != 2:
        return None
    parts = [weight.detach().view(torch.uint8), state.absmax, state.code]
    if state.nested:
        parts += [state.state2.absmax, state.state2.code, note_offset(state)]
    of = Operand(_format(state), parts, 0, *shape)
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    dtype = module.compute_dtype or x.dtype
    if not has_kernels(of, x, dtype):
        return None
    return linear(x.to(dtype), of, module.bias).to(x.dtype)


def _format(state: Any) -> str:
    """Return the name of the format of a weight with a ``QuantState``."""
    return f"{state.quant_type}-nested" if state.nested else str(state.quant_type)


def note_offset(state: Any) -> torch.Tensor | None:
    """Return JSON with the mean of nested scales, as kernels take it, kept beside the scales."""
    if not state.nested:
        return None
    made: torch.Tensor | None = getattr(state, _OFFSET, None)
    if made is None or made.device != state.offset.device:
        text = json.dumps({"nested_offset": float(state.offset)}).encode()
        made = torch.tensor(list(text), dtype=torch.uint8, device=state.offset.device)
        setattr(state, _OFFSET, made)
    return made
