"""The configuration of a model, its class, and the model on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import initialization

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.url import Url
from streamload.dtypes import DType
from streamload.errors import CheckpointError


def folder_of(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint, where its configuration is; raises for one behind a URL."""
    path = checkpoint.path
    if isinstance(path, Url):
        raise CheckpointError(
            path,
            "transformers reads a model's configuration on this machine: "
            "build the model of it, and load_state_dict takes the URL",
        )
    return path if path.is_dir() else path.parent


def configuration_of(checkpoint: Checkpoint, given: Any) -> Any:
    """A configuration that is ours to change."""
    if given is not None and not isinstance(given, transformers.PreTrainedConfig):
        raise ValueError(f"config is a configuration of transformers, not {given!r}")
    path = folder_of(checkpoint) / "config.json"
    if given is not None:
        config = copy.deepcopy(given)
    elif not path.is_file():
        raise CheckpointError(
            checkpoint.path, "no configuration", expected=f"{path} or config=", found="neither"
        )
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(
                path.parent, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError) as error:  # an unknown model, or code of its own
            raise CheckpointError(path, first_line(error)) from error
    adapter = folder_of(checkpoint) / "adapter_config.json"
    if adapter.is_file():
        raise CheckpointError(
            adapter,
            "the folder holds an adapter of peft, which is loaded by transformers on its own",
        )
    weights = getattr(config, "transformers_weights", None)
    if weights is not None and weights != checkpoint.path.name:
        raise CheckpointError(
            path,
            "it names the file of the weights: give that",
            expected=weights,
            found=checkpoint.path,
        )
    for part in _parts(config):
        quantised = getattr(part, "quantization_config", None)
        if quantised is not None:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            raise CheckpointError(
                path,
                "the checkpoint is quantised, and is loaded as it is by transformers alone",
                expected="no quantization_config",
                found=method,
            )
    return config


def _parts(config: Any) -> list[Any]:
    """The configuration, and those of the models that the model consists of."""
    inner = (getattr(config, key, None) for key in config.sub_configs)
    return [config, *(part for part in inner if part is not None)]


def on_meta(
    checkpoint: Checkpoint,
    config: Any,
    model_class: Any,
    dtype: DType,
    attn_implementation: str | None,
) -> Any:
    """The model, tied, on the meta device: it takes no memory."""
    path = folder_of(checkpoint) / "config.json"
    if model_class is None:
        named = (config.architectures or [None])[0]
        try:
            model_class = getattr(transformers, named, None) if isinstance(named, str) else None
        except ImportError as error:  # which does not say why
            problem = f"transformers cannot import {named}: {error.__cause__ or error}"
            raise ImportError(problem, name=error.name) from error
        if not _is_model_class(model_class):
            raise CheckpointError(
                path,
                "transformers has no class for the model",
                expected="architectures that it knows, or model_class=",
                found=named,
            )
    for part in _parts(config):
        part.dtype = getattr(torch, dtype.name)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype.name)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if _is_model_class(model_class):
        build = model_class._from_config
    elif hasattr(model_class, "from_config"):  # an Auto class
        build = model_class.from_config
        options["trust_remote_code"] = False
    else:
        raise ValueError(f"model_class is a class of transformers, not {model_class!r}")
    # drop-path rates and the like are read while a model is built: not from the meta device
    readable = getattr(initialization, "meta_device_safe_creation_ops", nullcontext)
    with torch.device("meta"), readable():
        return build(config, **options)


def _is_model_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, transformers.PreTrainedModel)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
