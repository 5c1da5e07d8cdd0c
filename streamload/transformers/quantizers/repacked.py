"""Undo the repacking of 4-bit weights by bitsandbytes in their first call on an AVX512-BF16 CPU.

Only the matrix product of a call can use a repacked weight. Other readers (peft, a state dict, a
copy) get the stored parts, from a copy of the statistics: bitsandbytes'
`_convert_weight_packed_for_cpu_inverse` rounds these to bfloat16 and transposes them.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import nn

from streamload.devices.torch.decoded import interpreted

_ORIGINAL = "_streamload_original"  # on a weight: its state before it was repacked
_COMPUTING = "_streamload_computing"  # on a weight: running calls of its module
# attributes that are those of the stored weight, too
_ASKED = frozenset(("device", "dtype", "requires_grad", "grad", "grad_fn", "is_leaf"))


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes' 4-bit weight, repacked only during calls. peft tests the name of the class."""

    @property
    def data(self) -> torch.Tensor:
        """The stored 4-bit values."""
        _undo(self)
        return _raw(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)

    @property
    def quant_state(self) -> Any:
        """The stored scales and tables: bitsandbytes' ``QuantState``."""
        _undo(self)
        return self.__dict__.get("quant_state")

    @quant_state.setter
    def quant_state(self, new: Any) -> None:
        self.__dict__["quant_state"] = new

    def __getstate__(self) -> Any:
        """Return the state for pickle and copies, with the stored parts."""
        _undo(self)
        state = super().__getstate__()
        state.pop(_ORIGINAL, None)
        state.pop(_COMPUTING, None)
        return state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Restore the stored parts, except for attributes like ``dtype``, and call `func`."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute not in _ASKED:
            for each in args:
                if isinstance(each, Params4bit):
                    _undo(each)
        return super().__torch_function__(func, types, args, kwargs or {})


def watch(module: nn.Module) -> None:
    """Keep stored values of a `Linear4bit` readable between calls, on a CPU with AVX512-BF16."""
    if module.support_avx512bf16_for_cpu and module.weight.device.type == "cpu":
        module.register_forward_pre_hook(_before)
        module.register_forward_hook(_after, always_call=True)


@interpreted
def _before(module: Any, args: Any) -> None:
    """Keep a copy of the state that the module's call will change; a forward pre-hook."""
    weight = module._parameters["weight"]
    if type(weight) is bitsandbytes.nn.Params4bit:  # also one that a merge has made
        weight.__class__ = Params4bit
    if type(weight) is Params4bit:
        state = weight.__dict__.get("quant_state")
        if state is not None and not getattr(state, "packing_format_for_cpu", False):
            weight.__dict__[_ORIGINAL] = copy.copy(state)
        weight.__dict__[_COMPUTING] = weight.__dict__.get(_COMPUTING, 0) + 1


@interpreted
def _after(module: Any, args: Any, output: Any) -> None:
    weight = module._parameters["weight"]
    if weight.__dict__.get(_COMPUTING):
        weight.__dict__[_COMPUTING] -= 1


def _raw(weight: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return cast(torch.Tensor, torch.Tensor.data.__get__(weight))


def _undo(weight: Params4bit) -> None:
    """Restore a repacked weight's stored parts, unless its module is computing."""
    said = weight.__dict__
    state: Any = said.get("quant_state")
    if said.get(_COMPUTING) or not getattr(state, "packing_format_for_cpu", False):
        return
    if _ORIGINAL not in said:  # it was repacked elsewhere
        return
    original = said.pop(_ORIGINAL)
    packed = copy.copy(state)
    packed.original_nested = False  # its statistics are not needed
    codes, _ = functional._convert_weight_packed_for_cpu_inverse(_raw(weight), packed)
    vars(state).clear()  # the module refers to it, too
    vars(state).update(vars(original))
    weight.data = codes
