"""Adapters of peft: the base model is streamed, and peft adds the adapter to it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from streamload.checkpoint.open import open_checkpoint, read_json_file
from streamload.core.location import Location
from streamload.errors import CheckpointError
from streamload.files.header import parse_json_object

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_LARGEST_ITEMSIZE = 4  # peft computes in float32


@dataclass(frozen=True, slots=True)
class Adapter:
    """The folder of an adapter of peft, its base model, and the most bytes of its weights."""

    folder: Path
    base: str  # the path or repository of the model
    nbytes: int

    @classmethod
    def at(cls, found: Location) -> Adapter | None:
        """Return the adapter in a folder, if any; a model in the same folder is its base.

        Raises:
            CheckpointError: the adapter is invalid, or peft is not installed.
        """
        if not isinstance(found, Path) or not (found / _CONFIG).is_file():
            return None
        path = found / _CONFIG
        config = parse_json_object(read_json_file(path), path)
        own = (found / "config.json").is_file()
        base = str(found) if own else config.get("base_model_name_or_path")
        if not isinstance(base, str) or not isinstance(config.get("peft_type"), str):
            raise CheckpointError(
                path,
                "the adapter is invalid",
                "base_model_name_or_path and peft_type",
                ", ".join(config) or "neither",
            )
        if importlib.util.find_spec("peft") is None:
            raise CheckpointError(
                path,
                "the folder holds an adapter, which peft adds to the model: pip install peft, or "
                f"load the model alone from {base}",
            )
        weights = open_checkpoint(found / _WEIGHTS)
        nbytes = sum(info.numel * _LARGEST_ITEMSIZE for info in weights.tensors.values())
        return cls(found, base, nbytes)
