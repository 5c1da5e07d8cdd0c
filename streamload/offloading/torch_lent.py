"""Lend weights in slots to modules for a call, and check that they are not changed or kept."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LENT = "_streamload_lent"  # attribute of a weight in a slot: its state when it was first lent

# torch.compile's attributes of a tensor, which do not depend on values.
_OF_COMPILE = ("_dynamo_static_input_type", "_dynamo_dynamic_indices")


@dataclass(slots=True)
class _Lent:
    """The state of a weight when a module got it, to detect changes."""

    address: int
    version: int  # torch's count of writes
    uses: int  # references of tensors and Python to its storage
    home: torch.Tensor  # another tensor over its memory
    left: int = 0  # references that a traceback may have; counted again until there are none

    @classmethod
    def of(cls, weight: torch.Tensor, home: torch.Tensor) -> _Lent:
        """Return the state of a weight now; ``home``: a tensor over the same memory."""
        storage = home.untyped_storage()  # one object per storage
        uses = torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
        return cls(weight.data_ptr(), weight._version, uses, home)


def weight_of(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter over a tensor in a slot, with its own storage, to lend to modules."""
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(tensor, requires_grad=False)
    del tensor
    setattr(made, _LENT, None)
    return made


def is_lent(value: object) -> bool:
    """Return whether an object is a weight in a slot, made by `weight_of`."""
    return hasattr(value, _LENT)


def lend(weight: torch.Tensor, stands: torch.Tensor) -> None:
    """Note the state of a weight before a module gets it, in place of the placeholder ``stands``.

    The weight gets the placeholder's ``requires_grad``, by which kernels are chosen, too.
    """
    if weight.requires_grad != stands.requires_grad:
        weight.requires_grad_(stands.requires_grad)
    was: _Lent | None = getattr(weight, _LENT)
    if was is None:
        setattr(weight, _LENT, _Lent.of(weight, weight.detach()))
    elif was.left:
        was.left = max(_Lent.of(weight, was.home).uses - was.uses, 0)


def after_error(weights: Sequence[torch.Tensor]) -> None:
    """Allow one more reference to each weight, by the error's traceback, which may be kept."""
    for weight in weights:
        was: _Lent | None = getattr(weight, _LENT)
        if was is not None:
            was.left = max(was.left, 1)


def kept_in(module: nn.Module, weights: Sequence[torch.Tensor]) -> set[int]:
    """Return indices of the weights that attributes of a module or its children refer to."""
    storages = {weight.untyped_storage()._cdata: at for at, weight in enumerate(weights)}
    found, seen = set[int](), set[int]()
    todo: list[Any] = [vars(each) for each in module.modules()]
    with torch._C.DisableTorchFunctionSubclass():
        while todo:
            value = todo.pop()
            if id(value) in seen:  # a container may hold itself
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                todo += value.values()
            elif isinstance(value, (list, tuple, set)):
                todo += value
            elif isinstance(value, torch.Tensor) and torch._C._has_storage(value):
                found.add(storages.get(value.untyped_storage()._cdata, -1))
            elif isinstance(value, torch.UntypedStorage):
                found.add(storages.get(value._cdata, -1))
    return found


def take_back(weight: torch.Tensor) -> None:
    """Restore a lent weight, its memory and attributes: the next layer gets the same object."""
    was: _Lent | None = getattr(weight, _LENT, None)
    if was is not None and weight.data_ptr() != was.address:
        weight.data = was.home
    for key in {*weight.__dict__} - {_LENT, *_OF_COMPILE}:
        delattr(weight, key)


def forget(weight: torch.Tensor) -> None:
    """Drop the state that `lend` noted, as the weight is lent no more."""
    if is_lent(weight):
        setattr(weight, _LENT, None)


def is_kept(weights: Sequence[torch.Tensor], at: int, before: int) -> bool:
    """Return whether Python has more than ``before`` references to ``weights[at]``: it is kept."""
    if sys.getrefcount(weights[at]) > before:
        gc.collect()  # an unused cycle may hold it
    return sys.getrefcount(weights[at]) > before


def why_kept(weight: Any, given: torch.Tensor) -> str:
    """Return the misuse of lent ``given``, in words, or ""; the module now has ``weight``."""
    if weight is not given:
        return "puts another tensor in its place"
    was: _Lent = getattr(given, _LENT)
    found = _Lent.of(given, was.home)
    if found.address != was.address:
        return "puts other data in its place"
    if found.version != was.version:
        was.version = found.version  # so that only this layer is reported
        return "writes into it"
    if found.uses > was.uses + was.left:
        gc.collect()
        if _Lent.of(given, was.home).uses > was.uses + was.left:
            return "keeps or gives a view of it"
    return ""
