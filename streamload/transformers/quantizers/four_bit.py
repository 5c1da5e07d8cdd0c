"""bitsandbytes' `Linear4bit`, which computes on a CPU by `devices.torch.product`.

The kernels read a weight as it is stored, and take a twelfth of bitsandbytes' time for one token.
On other devices, and for blocks of another size, bitsandbytes computes. For a CPU with AVX512-BF16
it would repack weights, which other readers would get: these modules never let it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import bitsandbytes
import torch

from streamload.devices.torch.product import Operand, form_of, has_host_kernels, linear

_KNOWN = "_streamload_known"  # on a ``QuantState``: its `_Known`
_BLOCK = 64  # elements of a block that kernels read


class Linear4bit(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]
    """bitsandbytes' module. peft and transformers look for that class, or its name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` times the weight, plus the bias, in the dtype of ``x``."""
        weight = self.weight
        state = getattr(weight, "quant_state", None)
        if state is not None and x.is_cpu:
            codes = _codes(weight)
            parts = [codes, state.absmax, state.code]
            if state.nested:
                parts += [state.state2.absmax, state.state2.code]
            if (found := multiplied(self, parts, state, x)) is not None:
                return found
        return super().forward(x)


def _codes(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's codes as a plain tensor, which torch.func does not wrap."""
    if torch.compiler.is_compiling():
        return weight.detach()
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableFuncTorch():
        return weight.detach()


def settle(module: Any) -> None:
    """Let a `Linear4bit` whose weight stays on the host compute by kernels, if they can read it."""
    module.support_avx512bf16_for_cpu = False
    is_plain = type(module) is bitsandbytes.nn.Linear4bit
    weight = module.weight
    if is_plain and weight.device.type == "cpu" and known_of(weight.quant_state).is_read:
        module.__class__ = Linear4bit


class _Known:
    """What is the same in all calls with a quantized weight.

    Attributes:
        shape: rows and columns.
        sizes: bytes of its codes, and number of its scales.
        is_read: whether kernels can read the weight.
        computed: whether there are kernels, by dtype.
    """

    def __init__(self, state: Any) -> None:
        self.format = f"{state.quant_type}-nested" if state.nested else str(state.quant_type)
        self.shape = tuple(state.shape)
        numel = math.prod(self.shape)
        self.sizes = numel // 2, numel // _BLOCK
        self.is_read = (
            state.blocksize == _BLOCK
            and len(self.shape) == 2
            and form_of(self.format, self.shape[1]) is not None
        )
        self.computed: dict[torch.dtype, bool] = {}
        self._mean: tuple[Any, int, torch.Tensor] | None = None

    def mean(self, state: Any) -> torch.Tensor:
        """Return JSON with the mean of nested scales, as kernels take it, kept while it is so."""
        if torch.compiler.is_compiling() and self._mean is not None:
            return self._mean[2]
        offset = state.offset
        version = 0 if offset.is_inference() else offset._version
        if self._mean is None or self._mean[0] is not offset or self._mean[1] != version:
            text = json.dumps({"nested_offset": float(offset)}).encode()
            with torch.inference_mode(False):
                made = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
            self._mean = offset, version, made
        return self._mean[2]


def known_of(state: Any) -> _Known:
    """Return what is known of a weight by its ``QuantState``, on which it is kept."""
    known: _Known | None = getattr(state, _KNOWN, None)
    if known is None:
        known = _Known(state)
        if state.nested:
            known.mean(state)
        setattr(state, _KNOWN, known)
    return known


def multiplied(
    module: Any, parts: Sequence[torch.Tensor], state: Any, x: torch.Tensor
) -> torch.Tensor | None:
    """Return a `Linear4bit`'s output, or None if kernels cannot read its weight.

    ``parts``: codes, scales and map; if the scales are nested, also theirs. The tensors of
    ``state`` are not read. ``x`` has shape (..., columns), on the host.
    """
    compiles = torch.compiler.is_compiling()
    is_known = hasattr(state, _KNOWN) if compiles else type(x) is torch.Tensor
    if not is_known or getattr(state, "packing_format_for_cpu", False):
        return None
    known, (codes, scales, *others) = known_of(state), parts
    if codes.dtype != torch.uint8:
        codes = codes.view(torch.uint8)
    is_whole = (codes.numel(), scales.numel()) == known.sizes
    if not (known.is_read and codes.is_cpu and is_whole):
        return None
    mean = [known.mean(state)] if state.nested else []
    of = Operand(known.format, (codes, scales, *others, *mean), 0, *known.shape)
    if not module.compute_type_is_set:
        module.set_compute_type(x)
        module.compute_type_is_set = True
    given, dtype = x.dtype, module.compute_dtype or x.dtype
    if not compiles:
        if dtype not in known.computed:
            known.computed[dtype] = has_host_kernels(of, dtype)
        if not known.computed[dtype]:
            return None
        if torch.is_grad_enabled() and any(part.is_inference() for part in of.parts):
            return None  # kernels keep them for the gradient, which torch refuses
    return linear(x.to(dtype), of, module.bias).to(given)
