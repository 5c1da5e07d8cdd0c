"""Save models with quantized weights in modules of streamload, and count their parameters.

Such weights ("codes") are buffers. A model that holds some gets a subclass of its class, which
counts the buffers and writes the ``quantization_config`` that opens them again.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.quantization_config import QuantizationConfigMixin

from streamload.codecs.scheme import SCHEMES, CodedWeight, is_blocks
from streamload.codecs.stored import OWN_METHOD
from streamload.devices.torch.quantized import Coded, make_dense
from streamload.devices.torch.refused import allow_saving
from streamload.devices.torch.tensors import CODED
from streamload.transformers.internals import (
    HfQuantizer,
    WeightConverter,
    get_model_conversion_mapping,
    revert_weight_conversion,
    should_convert_module,
)

#: The "quant_method" of layouts for which transformers has no modules.
METHOD = OWN_METHOD
_FORMATS = "formats"
_BITSANDBYTES, _COMPRESSED = "bitsandbytes", "compressed-tensors"
_WEIGHT = ".weight"
#: A weight of a module's child in source code, unless its type or shape alone is read.
_READ = re.compile(
    r"(?<!isinstance\()\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size|ndim|is_)|\s*=[^=])"
)


class CodedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """A model's ``quantization_config`` with any entries, as attributes."""

    def __init__(self, **entries: Any) -> None:
        """Set the entries as attributes."""
        self.__dict__.update(entries)


class CodedQuantizer(HfQuantizer):  # type: ignore[misc]
    """transformers' `HfQuantizer` for models with quantized weights in modules of streamload."""

    is_trainable = True  # by adapters
    is_qat_trainable = True  # without adapters: what is not quantized

    def is_serializable(self) -> bool:
        """Return True; `CodedModel.save_pretrained` raises for models that it cannot save."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        if isinstance(dtype, str):  # of a configuration that was saved
            dtype = getattr(torch, dtype)
        make_dense(model, dtype)
        return model


def as_coded(model: Any, quantizer: Any = None) -> None:
    """Let a loaded model, and models inside it, count and save quantized weights of streamload.

    `quantizer`: transformers' quantizer of the other quantized weights, if any.
    """
    if not _holds_codes(model):
        return
    for each in model.modules():
        if isinstance(each, PreTrainedModel) and _holds_codes(each):
            own: Any = type(each)
            allow_saving(each)
            each.__class__ = _class_of(own)
            if quantizer is None:
                each.hf_quantizer = CodedQuantizer(CodedConfig(quant_method=METHOD))
                each.is_quantized = True
    if quantizer is None:
        said = config_of(model, {name: weight for name, _, _, weight in _named(model)})
        model.config.quantization_config = model.hf_quantizer.quantization_config = said


def _holds_codes(model: nn.Module) -> bool:
    return any(hasattr(module, CODED) for module in model.modules())


class CodedModel:
    """A base for models with quantized weights of streamload: counts, casts and saves them."""

    saves_codes = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by the model's own class; unpickling derives the subclass anew."""
        return _empty, (type(self).__bases__[1],), self.__dict__

    def num_parameters(
        self: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """Return the number of parameters, quantized ones included; see transformers."""
        found = int(super().num_parameters(only_trainable, exclude_embeddings))  # type: ignore[misc]
        weights = () if only_trainable else _named(self)
        numels = {id(m._buffers[leaf]): math.prod(said.shape) for _, m, leaf, said in weights}
        return found + sum(numels.values())

    def get_memory_footprint(self: Any, return_buffers: bool = True) -> int:
        """Return the model's bytes, with quantized weights as parameters; see transformers."""
        found = int(super().get_memory_footprint(return_buffers))  # type: ignore[misc]
        if return_buffers:
            return found
        nbytes = {
            id(m._buffers[part]): m._buffers[part].nbytes
            for _, m, leaf, said in _named(self)
            for part in said.names(leaf)
        }
        return found + int(sum(nbytes.values()))

    def get_expanded_tied_weights_keys(self: Any, all_submodels: bool = False) -> dict[str, str]:
        """Return tied weights by name, without their scales and the like; see transformers."""
        found: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        beside = {
            name.removesuffix(leaf) + part
            for name, _, leaf, said in _named(self, shared=True)
            for part in said.names(leaf)[1:]
        }
        return {name: source for name, source in found.items() if name not in beside}

    def half(self: Any, *_: Any) -> Any:
        """Cast floats, and the dtype to which quantized weights are decoded, to float16."""
        return nn.Module.half(self)

    def float(self: Any, *_: Any) -> Any:
        """Cast floats, and the dtype to which quantized weights are decoded, to float32."""
        return nn.Module.float(self)

    def dequantize(self: Any, dtype: torch.dtype | None = None) -> Any:
        """Decode all weights, and return the model with its own class; see transformers."""
        ours = isinstance(self.hf_quantizer, CodedQuantizer)
        found = super().dequantize(dtype)  # type: ignore[misc]
        for each in self.modules():
            if ours and isinstance(each, CodedModel):
                if "hf_quantizer" in each.__dict__:
                    del each.hf_quantizer
                each.__dict__["is_quantized"] = False
                each.__class__ = type(each).__bases__[1]
        return found

    def save_pretrained(self: Any, *args: Any, **named: Any) -> None:
        """Save the model with the ``quantization_config`` that opens it; see transformers.

        Raises ValueError: nothing opens such weights, or ``state_dict`` lacks a part of one.
        """
        own = super().save_pretrained  # type: ignore[misc]
        given = inspect.signature(own).bind(*args, **named)
        if getattr(self, "_hf_peft_config_loaded", False):  # an adapter is saved alone
            own(*args, **named)
            return
        if not isinstance(self.hf_quantizer, CodedQuantizer):
            raise ValueError(
                f"cannot save {type(self).__name__}: modules of streamload and of "
                f"{self.hf_quantizer.quantization_config.quant_method} stand side by side; load it "
                'with quant="nf4" or "int8" in place of quantization_config=, and save that'
            )
        state = given.arguments.get("state_dict") or self.state_dict()
        said, state = layout(self, state)
        before = getattr(self.config, "quantization_config", None)
        quantizer, self.hf_quantizer = self.hf_quantizer, None  # which would drop the state
        _set_config(self.config, said)
        if said is not None and said.quant_method == METHOD:
            given.arguments["save_original_format"] = False
        given.arguments["state_dict"] = state
        try:
            own(*given.args, **given.kwargs)
        finally:
            self.hf_quantizer = quantizer
            _set_config(self.config, before)


def _set_config(config: Any, said: Any) -> None:
    """Set a model configuration's ``quantization_config``, or remove it for None."""
    config.quantization_config = said
    if said is None:
        del config.quantization_config


@cache
def _class_of(own: Any) -> type[Any]:
    """Return a subclass of `CodedModel` and of a class, with that class's name and signatures."""
    if issubclass(own, CodedModel):
        return cast(type[Any], own)
    names = ("__module__", "__qualname__", "__doc__")
    entries: dict[str, Any] = {name: getattr(own, name) for name in names}
    for name in ("save_pretrained", "num_parameters", "get_memory_footprint", "dequantize"):
        entries[name] = _like(getattr(own, name), CodedModel.__dict__[name])
    return type(own.__name__, (CodedModel, own), entries)


def _like(own: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls `ours`, with the signature and docstring of `own`."""

    @functools.wraps(own)
    def method(self: Any, *args: Any, **named: Any) -> Any:
        return ours(self, *args, **named)

    return method


def _empty(own: Any) -> Any:
    """Return a model of the subclass for `own`, without state; pickle fills it."""
    return object.__new__(_class_of(own))


def _named(
    model: nn.Module, *, shared: bool = False
) -> Iterator[tuple[str, Any, str, CodedWeight]]:
    """Yield (name in the model, module, name in the module, layout) of each quantized weight.

    If `shared`, a module is listed under each of its names.
    """
    for prefix, module in model.named_modules(remove_duplicate=not shared):
        for leaf, said in getattr(module, CODED, {}).items():
            yield f"{prefix}.{leaf}" if prefix else leaf, module, leaf, said


def layout(model: Any, state: Mapping[str, Any]) -> tuple[CodedConfig | None, dict[str, Any]]:
    """Return a state dict's ``quantization_config``, and the state with shared weights once.

    None if no weight is quantized; raises ValueError if `state` lacks a part of one.
    """
    state = dict(state)
    coded: dict[str, CodedWeight] = {}
    seen: set[int] = set()
    for name, module, leaf, said in _named(model, shared=True):
        found = state.get(name)
        if id(module._buffers[leaf]) in seen:
            for part in said.names(leaf):
                state.pop(name.removesuffix(leaf) + part, None)
            continue
        seen.add(id(module._buffers[leaf]))
        if found is None or found.is_floating_point():
            continue  # it is not saved, or is given as floats
        prefix = name.removesuffix(leaf)
        lacking = [prefix + part for part in said.names(leaf) if prefix + part not in state]
        if lacking:
            raise ValueError(f"cannot save {name}: state_dict has its codes, and no {lacking[0]}")
        coded[name] = said
    config = config_of(model, coded) if coded else None
    if config is not None and config.quant_method == METHOD:
        for name, each in coded.items():
            if tuple(state[name].shape) == each.stored_shape:
                # transformers skips a method that it does not know, and refuses another shape
                state[name] = state[name][..., None]
    return config, state


def config_of(model: Any, coded: Mapping[str, CodedWeight]) -> CodedConfig:
    """Return the ``quantization_config`` that opens these quantized weights of a model.

    It names a quantizer of transformers, if this quantizer has modules for exactly these weights
    and finds them by their names; else streamload's `METHOD`.
    """
    left = left_by_theirs(model, coded)
    if left is not None and _come_back(model, coded):
        format = SCHEMES[next(iter(coded.values())).format]
        return CodedConfig(**format.config(left, str(model.dtype).removeprefix("torch.")) or {})
    return CodedConfig(**own_config(coded))


def own_config(coded: Mapping[str, CodedWeight]) -> dict[str, Any]:
    """Return a ``quantization_config`` for streamload alone; `coded` has a checkpoint's names."""
    by_format: dict[str, list[str]] = {}
    for name, each in coded.items():
        by_format.setdefault(each.format, []).append(name)
    return {"quant_method": METHOD, _FORMATS: by_format}


def would_be_floats(coded: Iterable[CodedWeight]) -> bool:
    """Return whether transformers would load all quantized values as floats.

    transformers ignores an unknown quantization_config, and refuses tensors of another shape.
    """
    with suppress(ValueError):  # a shape that the format cannot have: who writes it refuses it
        return all(each.made.parts[0].shape == each.stored_shape for each in coded)
    return False


def left_by_theirs(model: Any, coded: Mapping[str, CodedWeight]) -> list[str] | None:
    """Return the modules that transformers' quantizer must skip to open exactly these weights.

    None if the quantizer cannot. `coded` has names of the model, which may be on the meta device.
    """
    names = {each.format for each in coded.values()}
    format = SCHEMES.get(next(iter(names)))
    said = None if format is None else format.config([], "float32")
    kinds = {n: m for n, m in model.named_modules() if _is_product(m)}
    taken = {name.removesuffix(_WEIGHT) for name in coded}
    if format is None or said is None or len(names) > 1 or not taken <= kinds.keys():
        return None
    if not format.of_linears and any(isinstance(kinds[name], Conv1D) for name in taken):
        return None
    if any(_is_read(model, name) for name in taken):
        return None  # their modules have no weight that a model could compute with
    held = Counter(id(_held(module)) for module in kinds.values())
    if any(held[id(_held(kinds[name]))] > 1 for name in taken):
        return None  # modules of other libraries do not share weights
    linears = (n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)))
    left = [name for name in linears if name not in taken]
    if said["quant_method"] == _COMPRESSED and _puts_together(model):
        return None  # it dequantizes fused tensors, and finds floats
    if said["quant_method"] == _BITSANDBYTES:  # the names are patterns: they may match more
        patterns = [*left, *(model._keep_in_fp32_modules or ())]
        if taken != {name for name in kinds if should_convert_module(name, patterns)}:
            return None
    return left


def _is_read(model: Any, name: str) -> bool:
    """Return whether the module around a product reads its weight, such as Mamba's dt_proj."""
    parent, _, leaf = name.rpartition(".")
    own: Any = type(model.get_submodule(parent))
    return leaf in _read_by(own)


@cache
def _read_by(own: Any) -> frozenset[str]:
    """Return the attributes whose weights a class's methods compute with, by their source."""
    found: set[str] = set()
    for each in own.__mro__[: own.__mro__.index(nn.Module)]:
        methods = map(inspect.unwrap, filter(inspect.isfunction, vars(each).values()))
        for method in methods:
            if "weight" in method.__code__.co_names:  # finding its source takes longer
                with suppress(OSError):  # it was made without a file
                    found.update(_READ.findall(inspect.getsource(method)))
    return frozenset(found)


def _held(module: nn.Module) -> Any:
    """Return the tensor "weight" of a module: a parameter, or quantized values in a buffer."""
    held = dict([*module._buffers.items(), *module._parameters.items()])  # TorchScript's: no get()
    return held.get("weight")


def _puts_together(model: Any) -> bool:
    """Return whether transformers fuses tensors of the model's checkpoints into one parameter."""
    state = model.state_dict()
    return any(
        re.search(pattern, name)
        for one in get_model_conversion_mapping(model)
        if isinstance(one, WeightConverter)
        for pattern in one.target_patterns
        for name in state
    )


def _is_product(module: nn.Module) -> bool:
    """Return whether transformers' quantizers replace a module: torch's Linear, or a Conv1D."""
    own = type(module).__bases__[1] if isinstance(module, Coded) else type(module)
    return own is nn.Linear or own is Conv1D


def _come_back(model: Any, coded: Mapping[str, CodedWeight]) -> bool:
    """Return whether transformers saves codes and scales under names of the same weight."""
    parts = {
        name: [name.removesuffix("weight") + part for part in said.names("weight")]
        for name, said in coded.items()
    }
    flat = {part: torch.empty(0, device="meta") for own in parts.values() for part in own}
    try:
        found = revert_weight_conversion(model, dict(flat))
    except Exception:  # any, from operations of transformers on such shapes
        return False
    restored = {id(tensor): name for name, tensor in found.items()}
    for name, said in coded.items():
        new = [restored.get(id(flat[part])) for part in parts[name]]
        if new[0] is None or new != [part.name(new[0]) for part in said.made.parts]:
            return False
    return True


def formats_of(said: Mapping[str, Any]) -> dict[str, str]:
    """Return the format of each weight by a ``quantization_config``; ValueError if invalid."""
    listed = said.get(_FORMATS)
    if not isinstance(listed, Mapping) or not listed:
        raise ValueError(f"quantization_config has no {_FORMATS}")
    out: dict[str, str] = {}
    for format, names in listed.items():
        is_known = format in SCHEMES or is_blocks(str(format))
        if not is_known or not isinstance(names, list):
            raise ValueError(f"quantization_config: {format!r} is no format with a list of names")
        out.update(dict.fromkeys(map(str, names), str(format)))
    return out
