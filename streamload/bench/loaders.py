"""The loaders to compare, each called as its documentation recommends, and the job of a load.

They run in the child process of a measurement, which compares some of their tensors with the files.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from streamload.bench.machine import installed_version
from streamload.checkpoint.open import open_checkpoint
from streamload.core.dtypes import parse_dtype

_PAGE = 4096
CHECKED_TENSORS = 32  # most tensors to compare with the files
_CHECKED_NBYTES = 2**25  # most bytes of a tensor to compare
_FEW = 64  # elements of each tensor that is loaded before the measurement


@dataclass(frozen=True, slots=True)
class Task:
    """A load to measure: a checkpoint and a device."""

    path: str  # the checkpoint, as the user named it
    files: tuple[str, ...]  # paths of its shards
    framework: str
    device: str  # as the framework names it
    dtype: str = "checkpoint"  # the dtype to cast all floats to
    budget: str | int | None = None  # streamload's budget on the device
    options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of streamload


@dataclass(frozen=True, slots=True)
class Loaded:
    """The tensors that a loader returned, and the figures that it reported."""

    tensors: dict[str, Any]  # by name
    says: dict[str, Any] = field(default_factory=dict)  # the loader's own figures, by name


class Runtime(Protocol):
    """A framework, as a measurement uses it before and after a load."""

    def open(self, device: str) -> None:
        """Import the framework and open the device, as programs do before a load."""

    def finish(self, tensors: Mapping[str, Any], device: str) -> None:
        """Wait until all tensors are on the device; read mapped tensors into memory."""

    def bytes_of(self, tensor: Any) -> bytes:
        """Return the raw bytes of a tensor, to compare them with the file."""

    def says(self, device: str) -> dict[str, Any]:
        """Return the framework's own counters of memory, in bytes by name; {} by default."""
        return {}


class _Torch(Runtime):
    def open(self, device: str) -> None:
        import torch

        torch.ones(1, device=device).add_(1)
        self.finish({}, device)

    def finish(self, tensors: Mapping[str, Any], device: str) -> None:
        import torch

        kind = device.partition(":")[0]
        if kind != "cpu":
            getattr(torch, kind).synchronize(*[device] * (kind in ("cuda", "xpu")))
            return
        for tensor in tensors.values():  # views on a mapped file: read a byte of each page
            if tensor.numel():
                tensor.reshape(-1).view(torch.uint8)[::_PAGE].sum()

    def bytes_of(self, tensor: Any) -> bytes:
        import torch

        if not tensor.numel():
            return b""
        data: bytes = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return data

    def says(self, device: str) -> dict[str, Any]:
        import torch

        if not device.startswith("cuda"):
            return {}
        found = {"torch_reserved_nbytes": torch.cuda.max_memory_reserved(device)}
        pinned = getattr(torch.cuda, "host_memory_stats", None)
        if pinned is not None:
            found["torch_pinned_nbytes"] = int(pinned().get("allocated_bytes.peak", 0))
        return found


class _Tinygrad(Runtime):
    def open(self, device: str) -> None:
        from tinygrad import Tensor

        (Tensor([1.0], device=device) + 1).realize()
        self.finish({}, device)

    def finish(self, tensors: Mapping[str, Any], device: str) -> None:
        from tinygrad import Device

        Device[device].synchronize()

    def bytes_of(self, tensor: Any) -> bytes:
        return bytes(tensor.uop.base.buffer.as_memoryview())


class _Host(Runtime):
    def open(self, device: str) -> None:
        importlib.import_module("numpy")

    def finish(self, tensors: Mapping[str, Any], device: str) -> None:
        import numpy as np

        for array in tensors.values():
            if array.size:
                array.reshape(-1).view(np.uint8)[::_PAGE].sum()

    def bytes_of(self, tensor: Any) -> bytes:
        data: bytes = tensor.tobytes()
        return data


RUNTIMES: dict[str, Runtime] = {"torch": _Torch(), "tinygrad": _Tinygrad(), "host": _Host()}


# --- loaders --------------------------------------------------------------------------------------


def _to(task: Task) -> Callable[[Any], Any]:
    """Return a function that casts floats of torch or numpy to the task's dtype."""
    if task.dtype == "checkpoint":
        return lambda tensor: tensor
    dtype = parse_dtype(task.dtype)
    if task.framework == "host":
        return lambda array: (
            array.astype(dtype.numpy) if parse_dtype(array.dtype).kind == "float" else array
        )
    import torch

    wanted = getattr(torch, dtype.name)
    return lambda tensor: tensor.to(wanted) if tensor.is_floating_point() else tensor


def _streamload(task: Task) -> Loaded:
    from streamload.loading.load import load_state_dict

    to = task.device if task.framework == "host" else f"{task.framework}:{task.device}"
    report = load_state_dict(
        None,
        task.path,
        device=to,
        dtype=task.dtype,
        budget=task.budget,
        progress=False,
        **task.options,
    )
    (device,) = report.plan.devices
    says = {
        "seconds": report.seconds,
        "stream_s": report.transfer_seconds,
        "read_nbytes": report.read_nbytes,
        "resident_nbytes": report.resident_nbytes,
        "pinned_nbytes": report.held_nbytes.get("staging", 0),
        "predicted_nbytes": device.peak_nbytes,
        "held_nbytes": report.held_nbytes[device.device],
        "threads": report.plan.threads,
        "slot_nbytes": report.plan.slot_nbytes,
        "readers": sorted(set(report.plan.readers)),
        "casts": sorted({p.kind.cast for p in report.plan.placements}),
        "notes": list(report.notes),
    }
    return Loaded(report.state_dict, says)


_Pairs = Iterator[tuple[str, Any]]


def _casting(pairs: Callable[[Task], _Pairs]) -> Callable[[Task], Loaded]:
    """Return a loader that casts tensors, yielded by ``pairs``, to the task's dtype."""

    def load(task: Task) -> Loaded:
        to = _to(task)
        return Loaded({name: to(tensor) for name, tensor in pairs(task)})

    return load


@_casting
def _safetensors(task: Task) -> _Pairs:
    to = {} if task.framework == "host" else {"device": task.device}
    module = importlib.import_module(f"safetensors.{'torch' if to else 'numpy'}")
    for file in task.files:
        found = module.load_file(file, **to)
        for name in list(found):
            yield name, found.pop(name)


@_casting
def _safetensors_prefetch(task: Task) -> _Pairs:
    from safetensors import safe_open

    if not hasattr(safe_open, "prefetch"):
        version = importlib.import_module("safetensors").__version__
        raise RuntimeError(f"safetensors {version} has no prefetch")
    with ExitStack() as stack:

        def begun(file: str) -> Any:
            opened = stack.enter_context(safe_open(file, framework="pt", device=task.device))
            return stack.enter_context(opened.prefetch())

        coming = begun(task.files[0])
        for following in (*task.files[1:], None):
            loader = coming
            coming = following and begun(following)  # reads while this file's tensors are taken
            yield from loader
            loader.close()


@_casting
def _fastsafetensors(task: Task) -> _Pairs:
    module = importlib.import_module("fastsafetensors")
    nogds = task.device == "cpu"  # GPUDirect Storage is for GPUs
    with module.fastsafe_open(list(task.files), device=task.device, nogds=nogds) as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_tensor(name)


@_casting
def _runai(task: Task) -> _Pairs:
    module = importlib.import_module("runai_model_streamer")
    with module.SafetensorsStreamer() as streamer:
        streamer.stream_files(list(task.files), device=task.device)
        yield from streamer.get_tensors()


def _instanttensor(buffered: bool, task: Task) -> Loaded:
    module = importlib.import_module("instanttensor")
    backend = module.BackendPolicy.BUFFERED if buffered else None
    to = _to(task)
    with module.safe_open(
        list(task.files), framework="pt", device=task.device, backend=backend
    ) as opened:
        tensors = {name: to(tensor) for name, tensor in opened.tensors()}
    says = {
        "backend": opened.backend.name,
        "staging_nbytes": opened.chunk_size * opened.io_depth,
        "ring_nbytes": opened.buffer_size,
    }
    return Loaded(tensors, says)


def _tinygrad(task: Task) -> Loaded:
    from tinygrad import Tensor, dtypes
    from tinygrad.nn.state import load_state_dict, safe_load

    state: dict[str, Any] = {}
    for file in task.files:
        state |= safe_load(Path(file))
    if task.dtype != "checkpoint":
        wanted = getattr(dtypes, parse_dtype(task.dtype).name)
        state = {
            name: tensor.to(task.device).cast(wanted) if dtypes.is_float(tensor.dtype) else tensor
            for name, tensor in state.items()
        }
    model = {
        name: Tensor.empty(*tensor.shape, dtype=tensor.dtype, device=task.device)
        for name, tensor in state.items()
    }
    load_state_dict(model, state, verbose=False)
    return Loaded(model)


@_casting
def _numpy(task: Task) -> _Pairs:
    """Load by ``numpy.fromfile``, each tensor into its own array: a baseline without a loader."""
    import numpy as np

    for name, info in open_checkpoint(task.path).tensors.items():
        if info.dtype.numpy is None:
            raise ValueError(f"numpy has no {info.dtype}")
        flat = np.fromfile(info.shard, np.uint8, info.nbytes, offset=info.start)
        yield name, flat.view(info.dtype.numpy).reshape(info.shape)


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader of checkpoints to compare."""

    load: Callable[[Task], Loaded]  # the timed call
    package: str  # the distribution whose version is reported
    what: str = ""  # the functions that are called, in words
    frameworks: tuple[str, ...] = ("torch",)  # frameworks whose tensors it returns
    modules: tuple[str, ...] = ()  # modules to import before, if not the package
    cuda_only: bool = False  # whether it cannot load to the CPU
    maps: bool = False  # on the CPU without a cast, its tensors are views on mapped files
    states: tuple[str, ...] = ("warm", "cold")  # states of the page cache to compare it in

    def takes(self, framework: str, device: str) -> bool:
        """Return whether this loader can load to a device of a framework."""
        on_cuda = device.partition(":")[0].lower() == "cuda"
        return framework in self.frameworks and (on_cuda or not self.cuda_only)

    @property
    def imports(self) -> tuple[str, ...]:
        """Names of the modules to import before the measurement."""
        return self.modules or (self.package.replace("-", "_"),)


OURS = "streamload"
LOADERS: dict[str, Loader] = {
    OURS: Loader(
        _streamload, OURS, "", ("torch", "tinygrad", "host"), ("streamload.loading.load",)
    ),
    "safetensors": Loader(
        _safetensors, "safetensors", "load_file", modules=("safetensors.torch",), maps=True
    ),
    "safetensors-numpy": Loader(
        _safetensors, "safetensors", "load_file", ("host",), ("safetensors.numpy",)
    ),
    "safetensors-prefetch": Loader(
        _safetensors_prefetch,
        "safetensors",
        "safe_open(...).prefetch()",
        modules=("safetensors", "safetensors.torch"),
        cuda_only=True,
    ),
    "fastsafetensors": Loader(_fastsafetensors, "fastsafetensors", "fastsafe_open"),
    "runai": Loader(_runai, "runai-model-streamer", "SafetensorsStreamer"),
    "instanttensor": Loader(
        partial(_instanttensor, True),
        "instanttensor",
        "safe_open, BackendPolicy.BUFFERED",
        cuda_only=True,
    ),
    "instanttensor-direct": Loader(
        partial(_instanttensor, False),
        "instanttensor",
        "safe_open, its default backend",
        cuda_only=True,
        states=("cold",),  # it never reads the page cache
    ),
    "tinygrad": Loader(
        *(_tinygrad, "tinygrad", "safe_load, nn.state.load_state_dict"),
        *(("tinygrad",), ("tinygrad.nn.state",)),
    ),
    "numpy": Loader(_numpy, "numpy", "fromfile", ("host",), ("numpy", "ml_dtypes")),
}


def sample(names: Sequence[str]) -> Iterator[str]:
    """Yield at most `CHECKED_TENSORS` of the names, evenly spread, to compare with the files."""
    count = min(len(names), CHECKED_TENSORS)
    return (names[i * (len(names) - 1) // max(count - 1, 1)] for i in range(count))


class Load:
    """A job that measures loads by a loader; each load frees the tensors of the last.

    Imports, and a load of a few values, come before the first lap. ``task``: see `Task`.
    """

    def __init__(self, loader: str, **task: Any) -> None:
        self._loader, self._task = LOADERS[loader], Task(**task)
        self._runtime = RUNTIMES[self._task.framework]
        self._loaded: Loaded | None = None
        begun = time.perf_counter()
        for name in self._loader.imports:
            importlib.import_module(name)
        imported = time.perf_counter()
        package = self._loader.package
        version = getattr(sys.modules.get(package.replace("-", "_")), "__version__", "")
        self._runtime.open(self._task.device)
        with suppress(Exception):  # the lap raises it, too
            self._load_little()
        self.ready = {
            "import_s": imported - begun,
            "open_s": time.perf_counter() - imported,
            "versions": {package: installed_version(package) or version},
        }

    def _load_little(self) -> None:
        """Load a few values of each dtype, so that no lap imports, probes or compiles.

        Else caches of earlier processes would decide the comparison.
        """
        infos = open_checkpoint(self._task.path).tensors.values()
        header: dict[str, Any] = {}
        stop = 0
        for dtype in dict.fromkeys(info.dtype for info in infos):
            start, stop = stop, stop + dtype.nbytes(_FEW)
            offsets = [start, stop]
            header[dtype.code] = {"dtype": dtype.code, "shape": [_FEW], "data_offsets": offsets}
        text = json.dumps(header).encode()
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(stop))
            task = replace(self._task, path=str(path), files=(str(path),))
            self._runtime.finish(self._loader.load(task).tensors, task.device)

    def __call__(self) -> dict[str, Any]:
        """Load all; return the seconds of that alone, and what loader and framework report."""
        self._loaded = None
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        loaded = self._loader.load(self._task)
        self._runtime.finish(loaded.tensors, self._task.device)
        seconds, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        self._loaded = loaded
        says = loaded.says | self._runtime.says(self._task.device)
        return {"seconds": seconds, "cpu_s": cpu_s, "tensors": len(loaded.tensors), "says": says}

    def check(self) -> dict[str, int]:
        """Compare tensors with the files; return how many, or raise ValueError."""
        assert self._loaded is not None
        infos, tensors = open_checkpoint(self._task.path).tensors, self._loaded.tensors
        if set(tensors) != set(infos):
            raise ValueError(f"loaded {len(tensors)} tensors of {len(infos)}")
        checked = 0
        for name in sample([*infos]):
            info = infos[name]
            kept = self._task.dtype in ("checkpoint", info.dtype.name) or info.dtype.kind != "float"
            if not kept or info.nbytes > _CHECKED_NBYTES:
                continue
            with open(info.shard, "rb") as file:
                file.seek(info.start)
                if file.read(info.nbytes) != self._runtime.bytes_of(tensors[name]):
                    raise ValueError(f"{name} differs from the file")
            checked += 1
        return {"checked": checked}
