"""Helpers that `test_quant_loads` shares with other tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from quant_kernels_helpers import SEARCHED
from safetensors_files import write_arrays

import streamload
from streamload.codecs.scheme import SCHEMES
from streamload.verification.verify import verify

Array = np.ndarray[Any, Any]

#: Formats that hold rows of 64 elements; the others are like q4_0, which holds blocks, too.
NAMES = tuple(name for name in SCHEMES if name not in SEARCHED)


def write(path: Path, arrays: Mapping[str, Array], shards: int = 1) -> Path:
    """A folder of these arrays, in files by turns."""
    for shard in range(shards):
        mine = dict(list(arrays.items())[shard::shards])
        write_arrays(path / f"{shard}.safetensors", mine)
    return path


def matrix(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    rng = np.random.default_rng(seed)
    rows = 10 ** rng.uniform(-3, 3, (shape[0], *(1,) * (len(shape) - 1)))
    return np.asarray((rng.standard_normal(shape) * rows).astype(np.float32).astype(dtype))


def model(dtype: Any = np.float32) -> dict[str, Array]:
    out = {"model.embed_tokens.weight": matrix(1, 70, 128, dtype=dtype)}
    for i in range(2):
        layer = f"model.layers.{i}"
        out[f"{layer}.self_attn.q_proj.weight"] = matrix(10 + i, 128, 128, dtype=dtype)
        out[f"{layer}.mlp.down_proj.weight"] = matrix(20 + i, 128, 192, dtype=dtype)
        out[f"{layer}.mlp.gate.weight"] = matrix(30 + i, 4, 128, dtype=dtype)
        out[f"{layer}.mlp.experts.weight"] = matrix(40 + i, 4, 32, 128, dtype=dtype)
        out[f"{layer}.input_layernorm.weight"] = matrix(50 + i, 128, dtype=dtype)
    out["lm_head.weight"] = matrix(2, 70, 128, dtype=dtype)
    return out


LAYERS = [n for n in model() if "layers" in n and "norm" not in n and "gate" not in n]


def load(path: Path, **options: Any) -> streamload.LoadReport:
    """Load onto the host, and compare with the checkpoint once more."""
    given: dict[str, Any] = {"device": "host", "dtype": "checkpoint", "progress": False} | options
    report = streamload.load_state_dict(None, path, **given)
    if not any(p.changes for p in report.plan.placements):
        assert verify(report, streamload.open_checkpoint(path)) == []
    return report


def found_in(report: streamload.LoadReport) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in report.state_dict.items()}
