"""Steps of loading very many small tensors, timed one by one."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Result = dict[str, Any]

LAPS = 2  # the first imports and compiles


def _timed(steps: dict[str, Callable[[], object]]) -> Result:
    """Seconds of each step; what one makes is gone when the next begins."""
    laps = []
    for _ in range(LAPS):
        lap = {}
        for name, step in steps.items():
            begun = time.perf_counter()
            made = step()
            lap[name] = time.perf_counter() - begun
            del made
        laps.append(lap)
    return {"laps": laps}


def by_streamload(path: str) -> Result:
    """Open, plan for one device and for two nodes, and load: each from the files on."""
    import streamload
    from streamload.plan.partition import Node

    device = "cpu" if importlib.util.find_spec("torch") is not None else "host"
    nodes = [Node("a", "100GB"), Node("b", "100GB")]
    stated: dict[str, Any] = {"budget": "100GB", "dtype": "checkpoint"}
    return _timed(
        {
            "open": lambda: streamload.open_checkpoint(path),
            "plan": lambda: streamload.plan(path, device=device, **stated),
            "plan for nodes": lambda: streamload.split(path, nodes=nodes),
            "load": lambda: streamload.load_state_dict(
                None, path, device=device, dtype="checkpoint", progress=False
            ),
        }
    )


def by_load_file(path: str) -> Result:
    """`safetensors.torch.load_file`, file by file."""
    from safetensors.torch import load_file

    files = sorted(Path(path).glob("*.safetensors"))
    return _timed({"load_file": lambda: [load_file(file) for file in files]})


JOBS: dict[str, Callable[..., Result]] = {
    "many by streamload": by_streamload,
    "many by load_file": by_load_file,
}
