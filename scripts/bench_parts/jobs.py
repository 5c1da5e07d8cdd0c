"""Jobs of sections and tests: each function prepares a process of its own, and returns a lap.

`streamload.bench.processes.call` names them: "bench_parts.jobs:cast".
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import math
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench_parts.boxed_job import tensors_of
from streamload.bench.loaders import RUNTIMES
from streamload.errors import PlanInfeasibleError

Lap = Callable[[], object]

CAST_WINDOW_NBYTES = 8 * 2**20  # what the loader casts at once
CAST_NBYTES = 32 * CAST_WINDOW_NBYTES


# --- loads ----------------------------------------------------------------------------------------


def _model(path: str, device: str, dtype: str) -> dict[str, Any]:
    """Tensors to load into: of float16 without values, or of float32 with some."""
    raws = tensors_of(Path(path))
    if device == "host":
        make: Callable[..., Any] = np.ones if dtype == "float32" else np.empty
        return {name: make(raw.shape, dtype) for name, raw in raws.items()}
    from tinygrad import Device, Tensor, dtypes

    made = getattr(dtypes, dtype)
    tensors = {n: Tensor.empty(*r.shape, dtype=made, device=device) for n, r in raws.items()}
    if dtype == "float32":
        buffers = [tensor.uop.base.buffer.ensure_allocated() for tensor in tensors.values()]
        ones = memoryview(bytearray(b"\1") * max(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            Device[device].allocator._copyin(buffer._buf, ones[: buffer.nbytes])
        Device[device].synchronize()
    return tensors


def streamload(path: str, device: str, model: str = "empty", **options: Any) -> Lap:
    """Load a checkpoint as float16, each lap into one model: "empty", or of "float32" values."""
    from streamload import load_state_dict

    into = _model(path, device, "float32" if model == "float32" else "float16")

    def lap() -> dict[str, int]:
        report = load_state_dict(
            into, path, device=device, dtype="float16", progress=False, **options
        )
        return {"nbytes": report.resident_nbytes, "threads": report.plan.threads}

    return lap


#: Ways to load bf16 as fp16 that tinygrad's users write. "cast" is the plain one; "bits" shifts the
#: raw bits on the device: that is exact, and the only one that works where the compiler has no
#: __bf16. Synchronised, they wait for the device after each tensor.
WAYS = ("cast", "cast, synchronised", "bits", "bits, synchronised")


def tinygrad(path: str, device: str, way: str) -> Lap:
    """tinygrad's own ``safe_load``, a cast by one of `WAYS`, and ``nn.state.load_state_dict``."""
    from tinygrad import Device, dtypes
    from tinygrad.nn.state import load_state_dict, safe_load

    def cast(tensor: Any) -> Any:
        if way.startswith("cast"):
            return tensor.to(device).cast(dtypes.float16)
        raw = tensor.bitcast(dtypes.uint16).to(device).cast(dtypes.uint32)
        return raw.lshift(16).bitcast(dtypes.float32).cast(dtypes.float16)

    model = _model(path, device, "float16")

    def lap() -> None:
        state = {name: cast(tensor) for name, tensor in safe_load(Path(path)).items()}
        if way.endswith("synchronised"):
            for tensor in state.values():
                tensor.realize()
                Device[device].synchronize()
        load_state_dict(model, state, verbose=False)
        Device[device].synchronize()

    return lap


def many(path: str, way: str) -> Lap:
    """Steps of loading very many small tensors, timed one by one: each from the files on.

    The way "streamload" opens, plans for one device and for two nodes, and loads; or "load_file".
    """
    steps: dict[str, Lap] = {}
    if way == "load_file":
        from safetensors.torch import load_file

        files = sorted(Path(path).glob("*.safetensors"))
        steps["load_file"] = lambda: [load_file(file) for file in files]
    else:
        import streamload
        from streamload.planning.partition import Node

        device = "cpu" if importlib.util.find_spec("torch") is not None else "host"
        nodes = [Node("a", "100GB"), Node("b", "100GB")]
        to: dict[str, Any] = {"device": device, "dtype": "checkpoint"}
        steps = {
            "open": lambda: streamload.open_checkpoint(path),
            "plan": lambda: streamload.plan(path, budget="100GB", **to),
            "plan for nodes": lambda: streamload.split(path, nodes=nodes),
            "load": lambda: streamload.load_state_dict(None, path, progress=False, **to),
        }

    def lap() -> dict[str, Any]:
        took = {}
        for name, step in steps.items():
            begun = time.perf_counter()
            made = step()
            took[name] = time.perf_counter() - begun
            del made  # it is gone when the next begins
        return {"steps": took}

    return lap


def refusal(path: str, device: str, dtype: str = "checkpoint") -> Lap:
    """A budget of what a load is predicted to take succeeds, and one of a MiB less is refused.

    The refusal is to come before anything is allocated, by the framework's own counter.
    """
    from streamload import load_state_dict, plan
    from streamload.bench.compare import resolve
    from streamload.devices.names import framework

    owner, name = resolve(device)
    RUNTIMES[owner].open(name)
    stated: dict[str, Any] = {"device": device, "dtype": dtype}

    def lap() -> dict[str, Any]:
        (planned,) = plan(path, **stated).devices
        exact = planned.peak_nbytes
        opened = framework(owner).device(name)
        before = opened.allocated_nbytes()
        refusal = ""
        try:
            load_state_dict(None, path, budget=exact - 2**20, progress=False, **stated)
        except PlanInfeasibleError as error:
            refusal = str(error)
        allocated = opened.allocated_nbytes()
        report = load_state_dict(None, path, budget=exact, progress=False, **stated)
        return {
            "weights_nbytes": report.resident_nbytes,
            "exact_nbytes": exact,
            "held_nbytes": report.held_nbytes[planned.device],
            "measured_nbytes": report.measured_nbytes.get(planned.device),
            "refused": bool(refusal),
            "refusal": refusal,
            "allocated_before": before,
            "allocated_after_refusal": allocated,
            "loaded": len(report.state_dict),
        }

    return lap


# --- casts ----------------------------------------------------------------------------------------


def cast(engine: str) -> Lap:
    """Cast bf16 to fp16 on one core, window by window through memory that exists.

    The engine "llvm" is streamload's, with counts; "memcpy" copies as many bytes; "numpy" shifts,
    and its own float32 becomes float16.
    """
    import ml_dtypes

    from streamload.codecs.cast_table import make_cast
    from streamload.core.dtypes import BF16, F16

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    np.seterr(all="ignore")
    values = np.random.default_rng(0).standard_normal(2**20, np.float32) * np.float32(0.02)
    block = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    source = np.tile(block, CAST_NBYTES // block.nbytes)
    target = np.zeros_like(source)

    kernel = make_cast(BF16, F16, engine="llvm")

    def by_ml_dtypes(src: Any, out: Any) -> None:
        out.view(np.float16)[:] = src.view(ml_dtypes.bfloat16).astype(np.float16)

    def by_numpy(src: Any, out: Any) -> None:
        wide = src.astype(np.uint32)
        wide <<= 16
        out.view(np.float16)[:] = wide.view(np.float32)

    work: dict[str, Callable[[Any, Any], object]] = {
        "llvm": lambda src, out: kernel(memoryview(src).cast("B"), memoryview(out).cast("B")),
        "memcpy": lambda src, out: ctypes.memmove(out.ctypes.data, src.ctypes.data, src.nbytes),
        "ml_dtypes": by_ml_dtypes,
        "numpy": by_numpy,
    }
    step = CAST_WINDOW_NBYTES // source.itemsize

    def lap() -> dict[str, int]:
        for at in range(0, source.size, step):
            work[engine](source[at : at + step], target[at : at + step])
        return {"nbytes": CAST_NBYTES}

    return lap


# --- float16 checkpoints of bfloat16 ones, each to the disk (fsync) -------------------------------


def convert(path: str, out: str, way: str, options: str = '{"dtype": "float16"}') -> Lap:
    """Make a float16 checkpoint of a bfloat16 one in one file, on the disk (fsync).

    The way "cp" casts nothing; "numpy" and "torch" are what one would write with safetensors.
    ``options`` are other arguments of `streamload.convert`, as JSON.
    """
    source, target = Path(path) / "model.safetensors", Path(out) / "model.safetensors"
    if way == "streamload":
        import streamload

        make = streamload.convert  # a function to import here, and not in a lap
        warnings.simplefilter("ignore", RuntimeWarning)
        given = json.loads(options)
        if "to" not in given:  # others have the files that are usual for them
            given = {"max_shard_size": "1TB", **given}
        return lambda: make(path, out, progress=False, **given)
    ways: dict[str, Callable[[Path, Path], object]]
    ways = {"cp": _by_cp, "numpy": _by_numpy, "torch": _by_torch}
    if way != "cp":
        importlib.import_module(f"safetensors.{way}")  # here, and not in a lap

    def lap() -> None:
        target.parent.mkdir()
        ways[way](source, target)
        for one in (target, target.parent):
            fd = os.open(one, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    return lap


def _by_cp(source: Path, target: Path) -> None:
    subprocess.run(["cp", source, target], check=True)


def _by_numpy(source: Path, target: Path) -> None:
    """Tensor by tensor into a dict."""
    from safetensors.numpy import save_file

    raw = np.memmap(source, np.uint8, "r")
    tensors = {}
    for name, one in tensors_of(source).items():
        bits = np.frombuffer(raw, np.uint16, math.prod(one.shape), one.start)
        with np.errstate(all="ignore"):
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            tensors[name] = wide.astype(np.float16).reshape(one.shape)
    save_file(tensors, target, {"format": "pt"})


def _by_torch(source: Path, target: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {name: t.to(torch.float16) for name, t in load_file(source).items()}
    save_file(tensors, target, {"format": "pt"})
