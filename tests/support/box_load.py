"""A load into a model of a given state, in a process and a memory cgroup of its own.

A case is a dict: "path"; "device" ("host", "torch", "CL" or "CPU"); "state" of the model, see
`STATES`; "kind" ("dict" or "object"); "held", its dtype; "options" of the load; "shapes", a
checkpoint with the model's shapes; "unchecked", if bytes are not compared; "layers", if two passes
of `stream_layers` run instead of a load; "convert", the folder of a conversion instead.
"""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from bench_parts.boxed_job import NUMPY, Raw, tensors_of
from bench_parts.boxed_section import boxed
from boxes import Boxes

from streamload import convert, load_state_dict, stream_layers
from streamload.bench.loaders import RUNTIMES
from streamload.bench.processes import call

STATES = {
    "host": ("none", "resident", "empty", "zeros", "mapped", "forked"),
    "torch": ("none", "meta", "resident", "empty", "zeros", "to_empty", "mapped", "forked"),
    "CPU": ("none", "lazy", "resident", "empty", "forked"),
    "CL": ("none", "lazy", "resident", "empty"),  # no driver of OpenCL survives a fork
}
_BLOCK_NUMEL = 2**20  # compared at once

Case = Mapping[str, Any]


def run_boxed(
    maker: Boxes, case: Case, limit: Callable[[int], int] | None = None
) -> dict[str, Any]:
    return boxed(maker, call("box_load:Job", case=dict(case)), limit)


def _host(case: Case, raws: Mapping[str, Raw]) -> Any:
    dtype, state = NUMPY[case["held"]], case["state"]
    if state == "mapped":
        maps = {raw.file: np.memmap(raw.file, np.uint8, "c") for raw in raws.values()}
        return {
            name: np.frombuffer(maps[r.file], dtype, math.prod(r.shape), r.start).reshape(r.shape)
            for name, r in raws.items()
        }
    make: Any = {"empty": np.empty, "zeros": np.zeros}.get(state, np.ones)
    return {name: make(raw.shape, dtype) for name, raw in raws.items()}


def _torch(case: Case, raws: Mapping[str, Raw]) -> Any:
    import torch

    dtype, state = getattr(torch, case["held"]), case["state"]
    if state == "mapped":
        from safetensors.torch import load_file

        files = {raw.file: None for raw in raws.values()}
        tensors = {name: t for file in files for name, t in load_file(file).items()}
    else:
        device = "meta" if state in ("meta", "to_empty") else "cpu"
        make: Any = {"zeros": torch.zeros}.get(state, torch.empty)
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


def _tinygrad(case: Case, raws: Mapping[str, Raw]) -> Any:
    from tinygrad import Device, Tensor, dtypes

    device, state, dtype = case["device"], case["state"], getattr(dtypes, case["held"])
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
        vars(model).setdefault(head, {})[rest] = tensor
    return model


def wrong(
    device: str, dtype: str, tensors: Mapping[str, Any], raws: Mapping[str, Raw]
) -> Iterator[str]:
    """Compare all bytes with numpy's cast of the file, a block at a time; yield differences."""
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


class Job:
    def __init__(self, case: Case) -> None:
        warnings.simplefilter("ignore")  # values out of float16's range
        self._case, self._report = case, None
        device = case["device"]
        self._device = "cpu" if device == "torch" else device
        RUNTIMES.get(device, RUNTIMES["tinygrad"]).open(self._device)
        raws = tensors_of(Path(case.get("shapes", case["path"])))
        make = {"host": _host, "torch": _torch}.get(device, _tinygrad)
        self._model = None if case["state"] == "none" else make(case, raws)
        gc.collect()
        if case["state"] == "forked":
            child = os.fork()
            if child:
                _, status = os.waitpid(child, 0)
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)

    def __call__(self) -> dict[str, Any]:
        path, options = self._case["path"], self._case["options"]
        if self._case.get("layers"):
            with stream_layers(path, device=self._device, **options) as layers:
                for _ in range(2):
                    for _ in layers:
                        pass
                return {"outcome": "loaded", "predicted_nbytes": layers.report.process_nbytes}
        try:
            if self._case.get("convert"):
                convert(path, self._case["convert"], progress=False, **options)
                return {"outcome": "loaded"}
            report: Any = load_state_dict(
                self._model, path, device=self._device, progress=False, **options
            )
        except Exception as error:
            lacks = getattr(error, "needed_nbytes", 0) - getattr(error, "budget_nbytes", 0)
            said = {"error": str(error)[:400], "lacks_nbytes": lacks}
            return {"outcome": type(error).__name__, **said}
        self._report = report
        return {
            "outcome": "loaded",
            "predicted_nbytes": report.predicted_nbytes["process"],
            "reported_nbytes": report.measured_nbytes["process"],
            "device_nbytes": sum(d.peak_nbytes for d in report.plan.devices),
            "readers": sorted(set(report.plan.readers)),
        }

    def check(self) -> dict[str, Any]:
        case = self._case
        if self._report is None or case.get("unchecked"):
            return {"wrong": []}
        found: Any = self._report.state_dict if self._model is None else self._model
        if not isinstance(found, Mapping):
            from tinygrad.nn.state import get_state_dict

            is_torch = case["device"] == "torch"
            found = found.state_dict() if is_torch else get_state_dict(found)
        with np.errstate(all="ignore"):
            raws = tensors_of(Path(case["path"]))
            return {"wrong": list(wrong(case["device"], case["options"]["dtype"], found, raws))[:8]}
