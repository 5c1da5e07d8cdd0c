"""Loads of fresh processes onto a GPU: the second does without llvmlite. Skipped without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

from streamload.devices import cuda
from streamload.errors import DeviceError

try:
    cuda.Context.primary("cuda:0", 0)
except (OSError, DeviceError) as error:  # CI has none: what needs no GPU is in test_code_cache.py
    pytest.skip(f"no CUDA device here: {error}", allow_module_level=True)

LOAD = """
import hashlib, json, sys, time
import torch
import streamload
path, device, dtype = sys.argv[1:]
torch.zeros(1, device=device)  # the context is not what is looked at
begun = time.perf_counter()
report = streamload.load_state_dict(None, path, device=device, dtype=dtype, progress=False)
seconds = time.perf_counter() - begun
state = report.state_dict
digest = hashlib.sha256()
for name in sorted(state):
    digest.update(state[name].flatten().view(torch.uint8).cpu().numpy().tobytes())
print(json.dumps([digest.hexdigest(), "llvmlite.binding" in sys.modules, seconds]))
"""


def load(path: Path, dtype: str, cache: Path) -> Any:
    """Load in a process of its own: digest of all bytes, whether llvmlite came along, seconds."""
    said = forked.fresh(LOAD, path, "cuda:0", dtype, XDG_CACHE_HOME=str(cache))
    return json.loads(said.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_second_process_does_without_llvmlite(
    tmp_checkpoint: Callable[..., Path], tmp_path: Path, dtype: str
) -> None:
    """As they are and with a cast on the device, and every byte is the same."""
    path, cache = tmp_checkpoint(10_000_000), tmp_path / "cache"
    first, second = load(path, dtype, cache), load(path, dtype, cache)
    kept = sorted(file.name for file in cache.rglob("code/*"))
    print(f"{dtype}: {first[2]:.3f} s, then {second[2]:.3f} s; {kept}")
    assert second[0] == first[0]
    assert (first[1], second[1]) == (True, False), kept
