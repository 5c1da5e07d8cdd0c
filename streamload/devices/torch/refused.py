"""Refusals of calls by accelerate, peft and transformers that would spoil quantized modules."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from streamload.devices.torch.decoded import caller, interpreted

#: Modules of accelerate that move tensors of modules or set them aside.
_MOVERS = ("accelerate.hooks", "accelerate.utils.modeling")
#: The module of accelerate that reads state dicts before it begins.
_ASKS = "accelerate.big_modeling"
#: peft's function that looks for the parameters of `target_parameters`.
_WRAPS = "_inject_parameters"
#: Modules of the base classes whose models are saved with a configuration.
_SAVED = frozenset(("transformers.modeling_utils", "diffusers.models.modeling_utils"))
_SAVE = "save_pretrained"


@interpreted
def refuse_moves(name: str) -> None:
    """Raise RuntimeError if accelerate reads weight ``name``: it would store decoded values."""
    # forwards of torch's modules, which accelerate's hooks call, may read weights
    if caller(("streamload.",)).startswith(_MOVERS) or caller().startswith(_ASKS):
        raise RuntimeError(
            f"cannot let accelerate move {name}: it is held as codes, which accelerate would "
            "replace by decoded values; for a model that is larger than its device write "
            "streamload.offload(model, OUT, budget=...) of what `streamload convert PATH OUT "
            "--quant nf4` wrote; for several devices streamload.transformers.from_pretrained(path, "
            'quant=..., device=["cuda:0", "cuda:1"])'
        )


def refuse_wrapping(names: Iterable[str]) -> None:
    """Raise ValueError if peft is the caller and wants to wrap one of these quantized weights."""
    frame = sys._getframe(2)
    if frame.f_code.co_name != _WRAPS:
        return
    wanted = frame.f_locals.get("target_names", ())
    for name in names:
        if any(f".{name}".endswith(f".{each}") for each in wanted):
            raise ValueError(
                f"cannot add an adapter to {name} by target_parameters=: it is held as codes, and "
                "is no parameter; name modules in target_modules=, or leave it out of quant="
            )


def refuse_saving(model: nn.Module, coded: type[nn.Module]) -> list[nn.Module]:
    """Make ``save_pretrained`` raise if a model's configuration names no quantization.

    Returns the models of transformers or diffusers that now raise, for `allow_saving`.
    """
    found = []
    for each in model.modules():
        bases = {base.__module__ for base in type(each).__mro__}
        said = getattr(type(each), "saves_codes", False) or _SAVE in each.__dict__
        if _SAVED & bases and not said and any(isinstance(m, coded) for m in each.modules()):
            each.__dict__[_SAVE] = partial(_refuse_saving, each)
            found.append(each)
    return found


def allow_saving(model: nn.Module) -> None:
    """Undo `refuse_saving` for a model, whose configuration now names its quantization."""
    if getattr(model.__dict__.get(_SAVE), "func", None) is _refuse_saving:
        del model.__dict__[_SAVE]


def _refuse_saving(model: Any, *args: Any, **named: Any) -> None:
    """Raise ValueError in place of ``save_pretrained``, unless it saves an adapter alone."""
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(model, *args, **named)
        return
    raise ValueError(
        f"cannot save {type(model).__name__}: its weights are codes and its configuration does not "
        "say so, so that they would be opened as floats; load it with "
        "streamload.transformers.from_pretrained(path, quant=...), and save that"
    )
