"""Adapters of peft: the base model is streamed, and peft adds the adapter to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.versions import require_version

from streamload.core.location import Location
from streamload.errors import CheckpointError
from streamload.files.folder import folder_at
from streamload.files.header import parse_json_object
from streamload.loading.lora import open_adapter

_CONFIG = "adapter_config.json"
_PEFT = "0.19"  # earlier ones lack what transformers' `load_adapter` imports
_LARGEST_ITEMSIZE = 4  # peft computes in float32


@dataclass(frozen=True, slots=True)
class Adapter:
    """The folder of an adapter of peft, its base model, and the most bytes of its weights."""

    folder: Path
    base: str | None  # the path or repository of the model; None: the same as the adapter's
    nbytes: int
    file: str  # of the weights

    @classmethod
    def at(cls, found: Location, *, is_named: bool) -> Adapter | None:
        """Return the adapter in a folder, if any.

        A model in the same folder is its base; of a repository (`is_named`) only if the adapter
        names none, as in transformers' ``maybe_load_adapters``.
        """
        if not isinstance(found, Path) or not (found / _CONFIG).is_file():
            return None
        path = found / _CONFIG
        config = parse_json_object(folder_at(found).read(_CONFIG), path)
        base = config.get("base_model_name_or_path")
        own = (found / "config.json").is_file() and not (is_named and base)
        if not (own or isinstance(base, str)) or not isinstance(config.get("peft_type"), str):
            raise CheckpointError(
                path,
                "the adapter is invalid",
                "base_model_name_or_path and peft_type",
                ", ".join(config) or "neither",
            )
        try:
            require_version(f"peft>={_PEFT}")
        except ImportError as error:
            raise CheckpointError(
                path,
                "holds an adapter, which peft adds to the model: pip install -U peft, or "
                f"load the model alone from {'the file of its weights' if own else base}",
                f"peft {_PEFT} or later",
            ) from error
        weights, _ = open_adapter(found)
        nbytes = sum(info.numel * _LARGEST_ITEMSIZE for info in weights.tensors.values())
        return cls(found, None if own else base, nbytes, weights.path.name)

    def add_to(self, model: Any, name: str | None) -> None:
        """Let peft add the adapter to a model, by a name (None: "default")."""
        # in a folder transformers looks for safetensors alone by default
        only = {} if self.file.endswith(".safetensors") else {"use_safetensors": False}
        model.load_adapter(str(self.folder), adapter_name=name, **only)
