"""Read the configuration of a model, and build the model on the meta device."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import initialization
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import DType
from streamload.core.location import Url
from streamload.errors import CheckpointError
from streamload.files.header import describe
from streamload.formats.gguf.architectures import ARCHITECTURE, ARCHITECTURES
from streamload.loading.options import OF_PASSES, OPTIONS
from streamload.transformers.rows import Converted

#: Errors of models that are built of a configuration with other or invalid settings.
_UNBUILT = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
#: Errors of configurations with a setting of a wrong type or value.
_INVALID = (*_UNBUILT, StrictDataclassError, ValueError)


_READERS = (
    *(transformers.AutoConfig.from_pretrained, transformers.PreTrainedConfig.from_pretrained),
    transformers.PreTrainedConfig.from_dict,
)
#: Names that no setting can have: those of parameters of transformers' functions.
_PARAMETERS = frozenset(name for f in _READERS for name in signature(f.__func__).parameters)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of `from_pretrained` that describe the model, not its load."""

    model_class: Any = None
    config: Any = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    implementations: Mapping[str, str] = field(default_factory=dict)
    trust_remote_code: bool = False
    key_mapping: Mapping[str, str] | None = None
    generation_config: Any = None
    quantization: Any = None
    converted: Converted | None = None  # by another library, in place of transformers' rules
    distribution: Any = None  # a `Distribution`: each rank loads its shards


def folder_of(checkpoint: Checkpoint) -> Path:
    """Return the folder with a checkpoint and its config.json; CheckpointError for a URL."""
    path = checkpoint.path
    if isinstance(path, Url):
        raise CheckpointError(
            path,
            "transformers reads a model's configuration on this machine: "
            "build the model of it, and load_state_dict takes the URL",
        )
    return path if path.is_dir() else path.parent


def configuration_of(checkpoint: Checkpoint, wanted: Wanted) -> Any:
    """Return a copy of the model's configuration with the changes that the caller asked for."""
    given, changes = wanted.config, dict(wanted.changes)
    if taken := _PARAMETERS & changes.keys():
        config, unknown = given, sorted(taken)
    elif isinstance(given, transformers.PreTrainedConfig):
        config, own = copy.deepcopy(given), _config_class(wanted.model_class)
        if own is not None and not isinstance(config, own):
            parts = [getattr(config, key, None) for key in config.sub_configs]
            config = next((part for part in parts if isinstance(part, own)), config)
        unknown = [name for name in changes if not hasattr(config, name)]
        for name, value in changes.items():
            setattr(config, name, value)
    elif given is None or isinstance(given, (str, os.PathLike)):
        config, unknown = _read(checkpoint, given, changes, wanted)
    else:
        raise ValueError(f"config is a configuration of transformers, not {given!r}")
    if unknown:
        near = get_close_matches(unknown[0], [*OPTIONS.keys() - OF_PASSES, *dir(config)], 3)
        raise TypeError(
            f"from_pretrained() got an unexpected keyword argument {unknown[0]!r}: neither an "
            f"option nor in the configuration" + (f"; near: {', '.join(near)}" if near else "")
        )
    path = folder_of(checkpoint) / "config.json"
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and weights != checkpoint.path.name:
        raise CheckpointError(
            path,
            "it names the file of the weights: give that",
            expected=weights,
            found=checkpoint.path,
        )
    return config


def _read(
    checkpoint: Checkpoint, given: Any, changes: dict[str, Any], wanted: Wanted
) -> tuple[Any, list[str]]:
    """Read the configuration at `given` (None: the checkpoint's); return it and unknown changes.

    A class of one of a multimodal model's parts reads the configuration of that part.
    """
    if given is None and checkpoint.says_config:
        config_class = transformers.AutoConfig.for_model(checkpoint.config["model_type"]).__class__
        said = dict(checkpoint.config)
        try:
            config, unused = config_class.from_dict(said, return_unused_kwargs=True, **changes)
        except _INVALID as error:
            raise _invalid(checkpoint.path, error) from error
        return config, [name for name in unused if name in changes]
    folder = folder_of(checkpoint) if given is None else Path(given).expanduser()
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        expected, found = f"{path} or config=", "neither"
        if (architecture := checkpoint.metadata.get(ARCHITECTURE)) is not None:  # of GGUF
            kind = checkpoint.metadata.get("general.type", "model")
            found = f"general.architecture {describe(architecture)}, general.type {describe(kind)}"
            expected += f", or a GGUF model of {', '.join(ARCHITECTURES)}"
        raise CheckpointError(checkpoint.path, "no configuration", expected, found)
    own = _config_class(wanted.model_class)
    read = transformers.AutoConfig if own is None else own
    how = {"trust_remote_code": wanted.trust_remote_code} if own is None else {}
    try:
        config, unused = read.from_pretrained(
            folder, local_files_only=True, return_unused_kwargs=True, **how, **changes
        )
    except (ValueError, KeyError, OSError) as error:  # an unknown model, or code of its own
        problem = first_line(error)
        if "trust_remote_code" in str(error):
            problem += " (trust_remote_code=True runs it)"
        raise CheckpointError(path, problem) from error
    except _INVALID as error:
        raise _invalid(path, error) from error
    return config, [name for name in unused if name in changes]


def _invalid(path: Any, error: Exception) -> CheckpointError:
    said = " ".join(str(error).split())
    return CheckpointError(path, f"the model's configuration is not valid: {said}")


def placeholder(shape: tuple[int, ...], dtype: DType) -> torch.Tensor:
    """Return a tensor on the meta device, for a parameter that the load will fill."""
    return torch.empty(shape, dtype=getattr(torch, dtype.name), device="meta")


def on_meta(checkpoint: Checkpoint, config: Any, wanted: Wanted, dtype: DType) -> Any:
    """Build the model of a configuration on the meta device, with tied weights, in `dtype`."""
    model_class = wanted.model_class
    if model_class is None:
        model_class = _class_of(checkpoint, config, wanted.trust_remote_code)
    options = {"dtype": getattr(torch, dtype.name), **wanted.implementations}
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if part is not None:
            part.dtype = options["dtype"]
    if _is_model_class(model_class):
        build = model_class._from_config
    elif hasattr(model_class, "from_config"):  # an Auto class
        build = model_class.from_config
        options["trust_remote_code"] = wanted.trust_remote_code
    else:
        raise ValueError(
            f"model_class is a class of transformers, not {model_class!r}{_class_like(model_class)}"
        )
    # models read drop-path rates and the like while they are built: not from the meta device
    readable = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    try:
        with torch.device("meta"), readable():
            return build(config, **options)
    except _UNBUILT as error:
        name, own = model_class.__name__, _config_class(model_class)
        problem = f"{name} cannot be built of the configuration: {first_line(error)}"
        expected = found = None
        if own is not None and not isinstance(config, own):
            expected, found = f"{own.__name__}, or another model_class=", type(config).__name__
        path = checkpoint.path if checkpoint.says_config else folder_of(checkpoint) / "config.json"
        raise CheckpointError(path, problem, expected, found) from error


def outer_of(
    checkpoint: Checkpoint, model: Any, wanted: Wanted, dtype: DType
) -> tuple[Any, str] | None:
    """Return the multimodal model of a checkpoint, and the name in it of `model`, one of its parts.

    None if the checkpoint is of `model` itself. The multimodal model is on the meta device.
    """
    if checkpoint.config.get("model_type") in (None, model.config.model_type):
        return None
    try:
        config = configuration_of(checkpoint, Wanted(trust_remote_code=wanted.trust_remote_code))
        parts = [getattr(config, key, None) for key in config.sub_configs]
        if not any(isinstance(part, type(model.config)) for part in parts):
            return None
        outer = on_meta(checkpoint, config, replace(wanted, model_class=None), dtype)
    except CheckpointError:  # it names a class that transformers lacks
        return None
    kind = type(model.base_model)
    names = [name for name, module in outer.named_modules() if type(module) is kind]
    return (outer, names[0]) if len(names) == 1 and names[0] else None


def _class_of(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> Any:
    """Return the class that a configuration names: the checkpoint's own code, or transformers'."""
    named = (config.architectures or [None])[0]
    written = getattr(config, "auto_map", None) or {}
    for reference in written.values() if trust_remote_code else ():
        if isinstance(reference, str) and reference.rpartition(".")[2] == named:
            folder = folder_of(checkpoint)
            return get_class_from_dynamic_module(reference, folder, local_files_only=True)
    try:
        found = getattr(transformers, named, None) if isinstance(named, str) else None
    except ImportError as error:  # its message lacks the reason
        problem = f"transformers cannot import {named}: {error.__cause__ or error}"
        raise ImportError(problem, name=error.name) from error
    if not _is_model_class(found):
        raise CheckpointError(
            folder_of(checkpoint) / "config.json",
            "transformers has no class for the model",
            expected="architectures that it knows, or model_class=",
            found=named,
        )
    return found


def _class_like(named: object) -> str:
    """Return a hint for ``model_class=`` if `named` is close to a class of transformers, or ""."""
    if not isinstance(named, str):
        return ""
    name = named.rpartition(".")[2]
    near = [name] if name in dir(transformers) else get_close_matches(name, dir(transformers), 1)
    return f": write model_class=transformers.{near[0]}" if near else ""


def _config_class(model_class: Any) -> Any:
    """Return the class of the configurations of a model's class; None if it has none."""
    return model_class.config_class if _is_model_class(model_class) else None


def _is_model_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
