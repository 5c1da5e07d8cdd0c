"""Ways to make a float16 checkpoint of a bfloat16 one, each to the disk (fsync)."""

from __future__ import annotations

import json
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def _sync(path: Path) -> None:
    for one in (path, path.parent):
        fd = os.open(one, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _timed(make: Callable[[], object]) -> Result:
    wall, cpu = time.perf_counter(), time.process_time()
    make()
    lap = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return {"laps": [lap]}


def by_streamload(path: str, out: str) -> Result:
    """`streamload.convert`."""
    from streamload.convert.convert import convert

    warnings.simplefilter("ignore", RuntimeWarning)
    return _timed(lambda: convert(path, out, dtype="float16", max_shard_size="1TB", progress=False))


def by_cp(path: str, out: str) -> Result:
    """cp(1), which casts nothing."""
    source, target = Path(path) / "model.safetensors", Path(out) / "model.safetensors"

    def copy() -> None:
        target.parent.mkdir()
        subprocess.run(["cp", source, target], check=True)
        _sync(target)

    return _timed(copy)


def by_numpy(path: str, out: str) -> Result:
    """What one would write with numpy: tensor by tensor into a dict, which safetensors saves."""
    import numpy as np
    from safetensors.numpy import save_file

    source, target = Path(path) / "model.safetensors", Path(out) / "model.safetensors"

    def make() -> None:
        target.parent.mkdir()
        raw = np.memmap(source, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        tensors = {}
        for name, entry in json.loads(raw[8:start].tobytes()).items():
            if name != "__metadata__":
                first, stop = entry["data_offsets"]
                bits = np.frombuffer(raw[start + first : start + stop], np.uint16)
                wide = (bits.astype(np.uint32) << 16).view(np.float32)
                tensors[name] = wide.astype(np.float16).reshape(entry["shape"])
        save_file(tensors, target, {"format": "pt"})
        _sync(target)

    with np.errstate(all="ignore"):
        return _timed(make)


def by_torch(path: str, out: str) -> Result:
    """What one would write with torch: load_file, half, save_file."""
    import torch
    from safetensors.torch import load_file, save_file

    source, target = Path(path) / "model.safetensors", Path(out) / "model.safetensors"

    def make() -> None:
        target.parent.mkdir()
        tensors = {name: t.to(torch.float16) for name, t in load_file(source).items()}
        save_file(tensors, target, {"format": "pt"})
        _sync(target)

    return _timed(make)


JOBS: dict[str, Callable[..., Result]] = {
    "convert by streamload": by_streamload,
    "convert by cp": by_cp,
    "convert by numpy": by_numpy,
    "convert by torch": by_torch,
}
