"""Files of arrays, and quiet loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_files import write_arrays

import streamload

Array = np.ndarray[Any, Any]


def write(
    folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any] | None = None
) -> Path:
    write_arrays(folder / "model.safetensors", tensors, align=8)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(model: Any, path: Path, **options: Any) -> streamload.LoadReport:
    return streamload.load_state_dict(model, path, **{"progress": False, **options})


def raw(value: Any) -> bytes:
    """The bytes of an array, or of a tensor on its device; never computed on as floats."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    from tinygrad import dtypes

    if 0 in value.shape:
        return b""
    return bytes(value.reshape(-1).bitcast(dtypes.uint8).data())
