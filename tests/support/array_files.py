"""Arrays of numpy as files, and quiet loads of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors_files import write_safetensors

import streamload
from streamload.core.dtypes import BY_CODE


def floats(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def save(path: Path, arrays: dict[str, np.ndarray[Any, Any]], code: str = "F32") -> Path:
    return write_safetensors(
        path / "model.safetensors",
        {k: (code, v.shape, v.astype(BY_CODE[code].numpy).tobytes()) for k, v in arrays.items()},
    )


def load(model: Any, path: Path, **arguments: Any) -> streamload.LoadReport:
    arguments.setdefault("budget", "100MB")
    return streamload.load_state_dict(model, path, progress=False, **arguments)
