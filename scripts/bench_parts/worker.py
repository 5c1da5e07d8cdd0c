"""One measurement, in a process of its own.

    python -m bench_parts.worker '{"job": "memcpy", "nbytes": 1000000, "threads": 2, "loads": 3}'

The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_parts import convert_jobs, many_jobs, torch_jobs

Result = dict[str, Any]
Lap = dict[str, float]

CAST_WINDOW_NBYTES = 8 * 2**20  # what the loader casts at once
CAST_NBYTES = 32 * CAST_WINDOW_NBYTES


@contextmanager
def _lap(laps: list[Lap]) -> Iterator[None]:
    """Append the wall and CPU seconds of the block; CPU is that of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    laps.append({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})


def _open(device: str) -> None:
    """Let tinygrad open and use the device, so that neither side is charged for its driver."""
    from tinygrad import Tensor

    (Tensor([1.0], device=device) + 1).realize()


def _model(path: str, device: str, kind: str) -> Any:
    """What is loaded into, by name: None, or "empty" float16 or "float32" tensors that hold values.

    Tensors are tinygrad's, or numpy's for the host.
    """
    if kind == "none":
        return None
    from streamload import open_checkpoint

    shapes = {name: info.shape for name, info in open_checkpoint(path).tensors.items()}
    if device == "host":
        import numpy as np

        if kind == "float32":
            return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        return {name: np.empty(shape, np.float16) for name, shape in shapes.items()}
    from tinygrad import Tensor, dtypes

    if kind == "empty":
        return {n: Tensor.empty(*s, dtype=dtypes.float16, device=device) for n, s in shapes.items()}
    return {
        name: Tensor.ones(*shape, dtype=dtypes.float32, device=device).contiguous().realize()
        for name, shape in shapes.items()
    }


def streamload(
    path: str, device: str, model: str = "empty", loads: int = 1, **arguments: Any
) -> Result:
    """Load a checkpoint as float16, ``loads`` times into the same model.

    Args:
        path: the checkpoint.
        device: where to.
        model: see `_model`.
        loads: how often; without a model what the last load made is dropped before the next.
        **arguments: of `load_state_dict`.
    """
    from streamload import load_state_dict

    if device != "host":
        _open(device)
    into = _model(path, device, model)
    laps: list[Lap] = []
    for _ in range(loads):
        with _lap(laps):
            report = load_state_dict(
                into, path, device=device, dtype="float16", progress=False, **arguments
            )
        resident_nbytes, plan = report.resident_nbytes, report.plan
        actions = sorted({p.action for p in plan.placements})
        del report
        gc.collect()
    return {
        "laps": laps,
        "nbytes": resident_nbytes,
        "threads": plan.threads,
        "actions": actions,
        "peak_nbytes": sum(d.peak_nbytes for d in plan.devices) + plan.host_nbytes,
    }


#: Ways to load bf16 as fp16 that tinygrad's users write, by name: (how a tensor is cast, whether
#: the device is waited for after each). "cast" is the plain one. "bits" shifts the raw bits on the
#: device: that is exact, and the only one that works where the compiler has no __bf16.
WAYS: dict[str, tuple[str, bool]] = {
    "cast": ("cast", False),
    "cast, synchronised": ("cast", True),
    "bits": ("bits", False),
    "bits, synchronised": ("bits", True),
}


def tinygrad(path: str, device: str, way: str) -> Result:
    """tinygrad's own ``safe_load``, a cast, and ``nn.state.load_state_dict``.

    Args:
        path: a ``.safetensors`` file.
        device: where to.
        way: one of `WAYS`.
    """
    from tinygrad import Device, dtypes
    from tinygrad.nn.state import load_state_dict, safe_load

    def cast(tensor: Any) -> Any:
        return tensor.to(device).cast(dtypes.float16)

    def bits(tensor: Any) -> Any:
        raw = tensor.bitcast(dtypes.uint16).to(device).cast(dtypes.uint32)
        return raw.lshift(16).bitcast(dtypes.float32).cast(dtypes.float16)

    kind, synchronised = WAYS[way]
    prepare = {"cast": cast, "bits": bits}[kind]
    _open(device)
    model = _model(path, device, "empty")
    laps: list[Lap] = []
    with _lap(laps):
        state = {name: prepare(tensor) for name, tensor in safe_load(Path(path)).items()}
        if synchronised:
            for tensor in state.values():
                tensor.realize()
                Device[device].synchronize()
        load_state_dict(model, state, verbose=False)
        Device[device].synchronize()
    return {"laps": laps}


def _map(nbytes: int, kind: str) -> tuple[mmap.mmap, int]:
    """Fresh anonymous memory in pages of the base size, and its address."""
    flag = {"private": mmap.MAP_PRIVATE, "shared": mmap.MAP_SHARED}[kind]
    memory = mmap.mmap(-1, nbytes, flags=flag | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _split(nbytes: int, threads: int, work: Callable[[int, int], object]) -> None:
    """Run ``work(start, nbytes)`` on equal parts, one thread each; ctypes drops the GIL."""
    edges = [nbytes * i // threads // 4096 * 4096 for i in range(threads)] + [nbytes]
    crew = [
        threading.Thread(target=work, args=(edges[i], edges[i + 1] - edges[i]))
        for i in range(threads)
    ]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()


def memset(nbytes: int, threads: int, kind: str) -> Result:
    """A plain memset of fresh memory ("private" or "shared"), without huge pages."""
    memory, address = _map(nbytes, kind)
    laps: list[Lap] = []
    with _lap(laps):
        _split(nbytes, threads, lambda start, n: ctypes.memset(address + start, 1, n))
    memory.madvise(mmap.MADV_DONTNEED)
    return {"laps": laps}


def memcpy(nbytes: int, threads: int, loads: int) -> Result:
    """A plain memcpy between memory that exists, ``loads`` times."""
    _source, source = _map(nbytes, "private")
    _target, target = _map(nbytes, "private")
    _split(nbytes, threads, lambda start, n: ctypes.memset(source + start, 1, n))
    _split(nbytes, threads, lambda start, n: ctypes.memset(target + start, 1, n))
    laps: list[Lap] = []
    for _ in range(loads):
        with _lap(laps):
            _split(
                nbytes, threads, lambda start, n: ctypes.memmove(target + start, source + start, n)
            )
    return {"laps": laps}


def pread(path: str, threads: int, loads: int) -> Result:
    """Read a file that is in the page cache into memory that exists, without a cast."""
    nbytes = os.stat(path).st_size
    memory, address = _map(nbytes, "private")
    _split(nbytes, threads, lambda start, n: ctypes.memset(address + start, 1, n))
    laps: list[Lap] = []
    with open(path, "rb") as file, memoryview(memory) as view:

        def read(start: int, n: int) -> None:
            for at in range(start, start + n, CAST_WINDOW_NBYTES):
                stop = min(at + CAST_WINDOW_NBYTES, start + n)
                os.preadv(file.fileno(), [view[at:stop]], at)

        for _ in range(loads):
            with _lap(laps):
                _split(nbytes, threads, read)
    return {"laps": laps}


def touch(nbytes: int) -> Result:
    """Fill memory and free it: a virtual machine's host may not have backed it yet."""
    memory, address = _map(nbytes, "private")
    _split(nbytes, os.cpu_count() or 1, lambda start, n: ctypes.memset(address + start, 1, n))
    return {"nbytes": len(memory)}


def cast(engine: str, loads: int) -> Result:
    """Cast bf16 to fp16 on one core, window by window through memory that exists.

    Args:
        engine: "llvm" (streamload's, with counts), "memcpy" (of as many bytes), "ml_dtypes" or
            "numpy" (shifts, then its own float32 to float16).
        loads: how often all of it.
    """
    import ml_dtypes
    import numpy as np

    from streamload.cast.table import make_cast
    from streamload.dtypes import BF16, F16

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    values = np.random.default_rng(0).standard_normal(2**20, np.float32) * np.float32(0.02)
    block = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    source = np.tile(block, CAST_NBYTES // block.nbytes)
    target = np.zeros_like(source)

    kernel = make_cast(BF16, F16, engine="llvm")

    def by_llvm(src: Any, out: Any) -> None:
        kernel(memoryview(src).cast("B"), memoryview(out).cast("B"))

    def by_memcpy(src: Any, out: Any) -> None:
        ctypes.memmove(out.ctypes.data, src.ctypes.data, src.nbytes)

    def by_ml_dtypes(src: Any, out: Any) -> None:
        out.view(np.float16)[:] = src.view(ml_dtypes.bfloat16).astype(np.float16)

    def by_numpy(src: Any, out: Any) -> None:
        wide = src.astype(np.uint32)
        wide <<= 16
        out.view(np.float16)[:] = wide.view(np.float32)

    work = {"llvm": by_llvm, "memcpy": by_memcpy, "ml_dtypes": by_ml_dtypes, "numpy": by_numpy}
    step = CAST_WINDOW_NBYTES // source.itemsize
    laps: list[Lap] = []
    with np.errstate(all="ignore"):
        for _ in range(loads):
            with _lap(laps):
                for at in range(0, source.size, step):
                    work[engine](source[at : at + step], target[at : at + step])
    return {"laps": laps, "nbytes": CAST_NBYTES}


JOBS: dict[str, Callable[..., Result]] = {
    "cast": cast,
    "memcpy": memcpy,
    "memset": memset,
    "pread": pread,
    "streamload": streamload,
    "tinygrad": tinygrad,
    "touch": touch,
    **convert_jobs.JOBS,
    **many_jobs.JOBS,
    **torch_jobs.JOBS,
}


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    print("\n" + json.dumps(JOBS[arguments.pop("job")](**arguments)))
