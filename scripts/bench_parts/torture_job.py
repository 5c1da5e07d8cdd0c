"""One load of the section torture, in a process of its own: made from a case, and looked at."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from streamload import load_state_dict
from streamload.bench.loaders import RUNTIMES
from streamload.bench.processes import process_memory

NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_CODES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_BLOCK_NUMEL = 2**20  # compared at once


@dataclass(frozen=True, slots=True)
class Raw:
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int


def tensors_of(path: Path) -> dict[str, Raw]:
    """The tensors of a folder or file, by a reader of headers that is not the library's."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with open(file, "rb") as data:
            (length,) = struct.unpack("<Q", data.read(8))
            header = json.loads(data.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start = 8 + length + entry["data_offsets"][0]
            found[name] = Raw(file, _CODES[entry["dtype"]], tuple(entry["shape"]), start)
    return found


def _host(case: Mapping[str, Any], raws: Mapping[str, Raw]) -> Any:
    dtype, state = NUMPY[case["held"]], case["state"]
    if state == "none":
        return None
    if state == "mapped":
        maps = {raw.file: np.memmap(raw.file, np.uint8, "c") for raw in raws.values()}
        return {
            name: np.frombuffer(maps[raw.file], dtype, math.prod(raw.shape), raw.start).reshape(
                raw.shape
            )
            for name, raw in raws.items()
        }
    makers: dict[str, Any] = {"empty": np.empty, "zeros": np.zeros}
    make = makers.get(state, lambda shape, dtype: np.full(shape, 1, dtype))
    return {name: make(raw.shape, dtype) for name, raw in raws.items()}


def _torch(case: Mapping[str, Any], raws: Mapping[str, Raw]) -> Any:
    import torch

    dtype, state = getattr(torch, case["held"]), case["state"]
    torch.empty(1).fill_(1)
    if state == "none":
        return None
    if state == "mapped":
        from safetensors.torch import load_file

        tensors = {}
        for file in {raw.file: None for raw in raws.values()}:
            tensors.update(load_file(file))
    else:
        device = "meta" if state in ("meta", "to_empty") else "cpu"
        makers: dict[str, Any] = {"zeros": torch.zeros}
        make = makers.get(state, torch.empty)
        tensors = {n: make(raw.shape, dtype=dtype, device=device) for n, raw in raws.items()}
    if state in ("resident", "forked"):
        for tensor in tensors.values():
            tensor.fill_(1)
    if case["kind"] == "dict" and state != "to_empty":
        return tensors
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        module, *parts = root, *name.split(".")
        for part in parts[:-1]:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(parts[-1], torch.nn.Parameter(tensor, requires_grad=False))
    return root.to_empty(device="cpu") if state == "to_empty" else root


def _tinygrad(case: Mapping[str, Any], raws: Mapping[str, Raw]) -> Any:
    from tinygrad import Device, Tensor, dtypes

    device, state = case["device"], case["state"]
    (Tensor([1.0], device=device) + 1).realize()
    if state == "none":
        return None
    dtype = getattr(dtypes, case["held"])
    tensors = {n: Tensor.empty(*raw.shape, dtype=dtype, device=device) for n, raw in raws.items()}
    if state != "lazy":
        buffers = [tensor.uop.base.buffer.ensure_allocated() for tensor in tensors.values()]
        ones = memoryview(bytearray(b"\1") * max(buffer.nbytes for buffer in buffers))
        for buffer in buffers if state != "empty" else ():
            Device[device].allocator._copyin(buffer._buf, ones[: buffer.nbytes])
        Device[device].synchronize()
    if case["kind"] == "dict":
        return tensors
    model: Any = type("Model", (), {})()
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if not hasattr(model, head):
            setattr(model, head, {})
        getattr(model, head)[rest] = tensor
    return model


def make_target(case: Mapping[str, Any], raws: Mapping[str, Raw]) -> Any:
    """What a checkpoint is loaded into: a model, or a dict of tensors by name, or None.

    The case says "device", "state", "held" dtype and "kind"; see `torture_section.draw`.
    """
    makers: dict[str, Any] = {"host": _host, "torch": _torch}
    return makers.get(case["device"], _tinygrad)(case, raws)


def wrong(
    device: str, dtype: str, tensors: Mapping[str, Any], raws: Mapping[str, Raw]
) -> Iterator[str]:
    """What is not as numpy casts it from the file, all bytes compared, a block at a time."""
    if set(tensors) != set(raws):
        yield f"{len(set(tensors) ^ set(raws))} names differ"
    runtime = RUNTIMES.get(device, RUNTIMES["tinygrad"])
    for name, raw in raws.items():
        src, numel = NUMPY[raw.dtype], math.prod(raw.shape)
        dst = src if dtype == "checkpoint" else NUMPY[dtype]
        flat = np.frombuffer(runtime.bytes_of(tensors[name]), np.uint8)
        if flat.nbytes != numel * dst.itemsize:
            yield f"{name}: {flat.nbytes} bytes"
            continue
        for at in range(0, numel, _BLOCK_NUMEL):
            count = min(_BLOCK_NUMEL, numel - at)
            wanted = np.fromfile(raw.file, src, count, offset=raw.start + at * src.itemsize)
            here = flat[at * dst.itemsize : (at + count) * dst.itemsize]
            if not np.array_equal(wanted.astype(dst).view(np.uint8), here):
                yield f"{name}: from element {at} on"
                break


def _load(case: Mapping[str, Any], model: Any) -> tuple[Any, dict[str, Any]]:
    """The load itself, and what is known of it."""
    before = process_memory("self")
    begun = time.perf_counter()
    report, said = None, {}
    try:
        report = load_state_dict(
            model,
            case["path"],
            device={"torch": "cpu"}.get(case["device"], case["device"]),
            progress=False,
            **case["options"],
        )
        said = {
            "outcome": "loaded",
            "predicted_nbytes": report.predicted_nbytes["process"],
            "reported_nbytes": report.measured_nbytes["process"],
            "device_nbytes": sum(d.peak_nbytes for d in report.plan.devices),
            "plan": f"{report.plan.threads} threads, {report.plan.chunk_nbytes}, "
            + ", ".join(dict.fromkeys(report.plan.readers)),
        }
    except Exception as error:
        said = {"outcome": type(error).__name__, "error": str(error)[:400]}
    after = process_memory("self")
    return report, said | {
        "seconds": round(time.perf_counter() - begun, 3),
        "process_nbytes": after.anon_nbytes - before.anon_nbytes,
    }


class Job:
    """A case of the section torture, whose model is shaped like the checkpoint ``shapes``."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        warnings.simplefilter("ignore")  # values out of float16's range
        self._case = case
        raws = tensors_of(Path(case.get("shapes", case["path"])))
        self._model = make_target(case, raws)
        self._report: Any = None
        gc.collect()
        if case["state"] == "forked":
            child = os.fork()
            if child:
                _, status = os.waitpid(child, 0)
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def __call__(self) -> dict[str, Any]:
        """Load."""
        self._report, said = _load(self._case, self._model)
        return said

    def _tensors(self) -> Mapping[str, Any]:
        """What was loaded, by name."""
        found: Mapping[str, Any] = self._report.state_dict if self._model is None else self._model
        if isinstance(found, Mapping):
            return found
        if self._case["device"] == "torch":
            return self._model.state_dict()
        from tinygrad.nn.state import get_state_dict

        return get_state_dict(self._model)

    def check(self) -> dict[str, Any]:
        """Compare all bytes."""
        case, found = self._case, []
        if self._report is not None and not case.get("unchecked"):
            with np.errstate(all="ignore"):
                tensors = self._tensors()
                raws = tensors_of(Path(case["path"]))
                found = list(wrong(case["device"], case["options"]["dtype"], tensors, raws))
        return {"wrong": found[:8]}
