"""Weights that modules have for a call, and checks that they leave them as they are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

_LENT = "_streamload_lent"  # on a weight that a module has for a call: what it was

# torch.compile's attributes of a tensor, for any values.
_OF_COMPILE = ("_dynamo_static_input_type", "_dynamo_dynamic_indices")


@dataclass(frozen=True, slots=True)
class _Lent:
    """A weight as a module got it."""

    address: int
    version: int  # counts torch's writes
    uses: int  # references of tensors and Python to its storage
    home: torch.Tensor  # over its memory
    left: int = 0  # references that a traceback may have; counted again until there are none

    @classmethod
    def of(cls, weight: torch.Tensor, home: torch.Tensor) -> _Lent:
        """Look at a weight."""
        storage = home.untyped_storage()  # the same object for all who ask
        uses = torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
        return cls(weight.data_ptr(), weight._version, uses, home)


def weight_of(tensor: torch.Tensor) -> nn.Parameter:
    """The parameter that a module gets for a call; nothing else may refer to its storage."""
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(tensor, requires_grad=False)
    del tensor
    setattr(made, _LENT, None)
    return made


def is_lent(value: object) -> bool:
    """Whether a module has it for a call."""
    return hasattr(value, _LENT)


def lend(weight: torch.Tensor, stands: torch.Tensor) -> None:
    """Remember a weight when it is first lent; layers that are alike get the same one.

    ``stands`` stands in its place otherwise: kernels are chosen by ``requires_grad``, too.
    """
    if weight.requires_grad != stands.requires_grad:
        weight.requires_grad_(stands.requires_grad)
    was: _Lent | None = getattr(weight, _LENT)
    if was is None:
        setattr(weight, _LENT, _Lent.of(weight, weight.detach()))
    elif was.left:
        left = _Lent.of(weight, was.home).uses - was.uses
        setattr(weight, _LENT, replace(was, left=max(left, 0)))


def after_error(weights: Sequence[torch.Tensor]) -> None:
    """Allow for a traceback that refers to weights: notebooks and debuggers keep the last one."""
    for weight in weights:
        was: _Lent | None = getattr(weight, _LENT)
        if was is not None:
            setattr(weight, _LENT, replace(was, left=max(was.left, 1)))


def kept_in(module: nn.Module, weights: Sequence[torch.Tensor]) -> set[int]:
    """Which of some weights attributes of a module and its children refer to, or views of them."""
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
    """Restore a lent weight: the next layer has the same object."""
    was: _Lent | None = getattr(weight, _LENT, None)
    if was is not None and weight.data_ptr() != was.address:
        weight.data = was.home
    for key in {*weight.__dict__} - {_LENT, *_OF_COMPILE}:
        delattr(weight, key)


def forget(weight: torch.Tensor) -> None:
    """Nothing lends it any more."""
    weight.__dict__.pop(_LENT, None)


def is_kept(weights: Sequence[torch.Tensor], at: int, before: int) -> bool:
    """Whether Python has more references than before to one of some weights."""
    if sys.getrefcount(weights[at]) > before:
        gc.collect()  # a cycle may hold what nobody needs any more
    return sys.getrefcount(weights[at]) > before


def why_kept(weight: Any, given: torch.Tensor) -> str:
    """What a module that has ``weight`` did with the one that it was given, or ""."""
    if weight is not given:
        return "puts another tensor in its place"
    was: _Lent = getattr(given, _LENT)
    found = _Lent.of(given, was.home)
    if found.address != was.address:
        return "puts other data in its place"
    if found.version != was.version:
        setattr(given, _LENT, replace(was, version=found.version))  # of this layer alone
        return "writes into it"
    if found.uses > was.uses + was.left:
        gc.collect()
        if _Lent.of(given, was.home).uses > was.uses + was.left:
            return "keeps or gives a view of it"
    return ""
