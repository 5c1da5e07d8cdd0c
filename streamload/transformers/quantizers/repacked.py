"""Weights of 4 bits that bitsandbytes repacks when a CPU with AVX512-BF16 first computes with them.

A repacked weight is of use to that product alone, and bitsandbytes' own way back
(`_convert_weight_packed_for_cpu_inverse`) has the statistics rounded to bfloat16, and transposed.
Here whoever else reads the weight (peft merges, a state dict, a copy) gets the stored parts.
"""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import torch
from bitsandbytes import functional
from torch import nn

from streamload.devices.torch.decoded import interpreted

_ORIGINAL = "_streamload_original"  # on a weight: its state before it was repacked
_COMPUTING = "_streamload_computing"  # on a weight: how many calls of its module compute with it
# What may be asked of a repacked weight.
_ASKED = frozenset(("device", "dtype", "requires_grad", "grad", "grad_fn", "is_leaf"))


class Params4bit(bitsandbytes.nn.Params4bit):
    """bitsandbytes', repacked only for its module; peft goes by the name of the class."""

    @property
    def data(self) -> torch.Tensor:
        """The codes."""
        _undo(self)
        return _raw(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)

    @property
    def quant_state(self) -> Any:
        """What decodes them."""
        _undo(self)
        return self.__dict__.get("quant_state")

    @quant_state.setter
    def quant_state(self, new: Any) -> None:
        self.__dict__["quant_state"] = new

    def __getstate__(self) -> Any:
        """Copy and pickle what is stored."""
        _undo(self)
        state = super().__getstate__()
        state.pop(_ORIGINAL, None)
        state.pop(_COMPUTING, None)
        return state

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with what is stored."""
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute not in _ASKED:
            for each in args:
                if isinstance(each, Params4bit):
                    _undo(each)
        return super().__torch_function__(func, types, args, kwargs or {})


def watch(module: nn.Module) -> None:
    """Let what bitsandbytes repacks in a `Linear4bit` be undone for all but its own product."""
    if module.support_avx512bf16_for_cpu and module.weight.device.type == "cpu":
        module.register_forward_pre_hook(_before)
        module.register_forward_hook(_after, always_call=True)


@interpreted
def _before(module: Any, args: Any) -> None:
    """Keep the state that will be changed."""
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
        found: torch.Tensor = torch.Tensor.data.__get__(weight)
        return found


def _undo(weight: Params4bit) -> None:
    """Put back what is stored, unless the weight's own module computes with it."""
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
