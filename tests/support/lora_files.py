"""Adapters as peft saves them, and sums in float64 to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors_files import write_arrays

Array = np.ndarray[Any, Any]
BASE = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "use_dora": False}


def random(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(values.astype(np.float32).astype(dtype))


def adapter(folder: Path, arrays: Mapping[str, Array], **config: Any) -> Path:
    write_arrays(folder / "adapter_model.safetensors", arrays)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def pair(module: str, rows: int, columns: int, rank: int = 4, seed: int = 5) -> dict[str, Array]:
    return {
        f"{BASE}{module}.lora_A.weight": random(seed, rank, columns),
        f"{BASE}{module}.lora_B.weight": random(seed + 1, rows, rank),
    }


def ordinals(values: Array) -> Array:
    """Numbers of the codes of 16-bit floats, in the order of their values."""
    codes = values.view(np.int16).astype(np.int32)
    return np.where(codes < 0, -32768 - codes, codes)


def assert_within_one_rounding(found: Array, exact: Array) -> None:
    """At most the next number to what float64 rounds to, and that very one nearly always."""
    away = np.abs(ordinals(found) - ordinals(exact.astype(np.float32).astype(found.dtype)))
    assert away.max() <= 1
    assert (away > 0).mean() < 1e-3


def assert_nearest(found: Array, exact: Array) -> None:
    """No other number of the dtype is nearer to the sums; of two that are as near, the even one."""
    away = np.abs(found.astype(np.float64) - exact)
    kind = {2: np.int16, 4: np.int32}[found.itemsize]
    codes = found.view(kind)
    for step in (-1, 1):
        other = np.abs((codes + kind(step)).view(found.dtype).astype(np.float64) - exact)
        assert np.all((away < other) | ((away == other) & (codes % 2 == 0)) | np.isnan(other))


def of_layers(path: Path, shapes: Mapping[str, tuple[int, ...]], rank: int = 16) -> Path:
    """An adapter of all Linears in the layers of a checkpoint, as ``shapes`` gives them by name."""
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and ".layers." in name:
            arrays |= pair(name.removesuffix(".weight"), *shape, rank, seed=len(arrays))
    return adapter(path, arrays, r=rank)
