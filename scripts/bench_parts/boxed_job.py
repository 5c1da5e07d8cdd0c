"""The job of the section boxed: an entrance of the library, in a process of its own."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import streamload
from streamload.errors import BudgetError

NUMPY = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_CODES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
TOKENS = 16
PASSES = 2


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


class Job:
    """A call of an entrance: "stream_layers", "offload" or "in place"."""

    def __init__(self, entrance: str, path: str, budget: str | None, **options: Any) -> None:
        """Import its framework, and make the model."""
        self._run = {"stream_layers": self._stream, "offload": self._offload}.get(
            entrance, self._in_place
        )
        self._path = path
        self._options = {**options, "budget": budget}
        self._found: dict[str, Any] = {}
        self._predicted: dict[str, int] = {}
        self._model: Any = None
        raws = tensors_of(Path(path))
        if entrance == "in place":
            self._model = {n: np.full(raw.shape, 1, NUMPY[raw.dtype]) for n, raw in raws.items()}
        elif entrance == "offload":
            self._model = _llama(path)

    def __call__(self) -> Mapping[str, Any]:
        """Run it; its rate, or its refusal."""
        begun = time.perf_counter()
        try:
            read_nbytes, seconds = self._run()
        except BudgetError as error:
            names = ("needed_nbytes", "budget_nbytes")
            facts = {name: getattr(error, name) for name in names if hasattr(error, name)}
            return {"outcome": type(error).__name__, "error": str(error), **facts}
        seconds = seconds or time.perf_counter() - begun
        rate = read_nbytes / seconds
        return {"outcome": "loaded", "rate": rate, "read_nbytes": read_nbytes, **self._predicted}

    def _stream(self) -> tuple[int, float]:
        options = {"device": "host", "dtype": "checkpoint", **self._options}
        with streamload.stream_layers(self._path, **options) as layers:
            begun = time.perf_counter()
            for _ in range(PASSES):
                for _, tensors in layers:
                    for name, tensor in tensors.items():
                        self._found[name] = zlib.crc32(tensor.reshape(-1).view(np.uint8))
            return layers.report.read_nbytes, time.perf_counter() - begun

    def _offload(self) -> tuple[int, float]:
        import torch

        ids = torch.arange(TOKENS)[None]
        options = {"device": "cpu", "tokens": TOKENS, "progress": False, **self._options}
        with streamload.offload(self._model, self._path, **options) as offloaded:
            begun = time.perf_counter()
            for _ in range(PASSES):
                with torch.no_grad():
                    self._found["logits"] = zlib.crc32(self._model(ids).float().numpy())
            report = offloaded.report
            self._predicted["predicted_nbytes"] = report.process_nbytes
            self._predicted["activation_nbytes"] = report.plan.activation_nbytes
            return report.read_nbytes, time.perf_counter() - begun

    def _in_place(self) -> tuple[int, float]:
        options = {"device": "host", "dtype": "checkpoint", "progress": False, **self._options}
        report = streamload.load_state_dict(self._model, self._path, **options)
        for name, array in self._model.items():
            self._found[name] = zlib.crc32(array.reshape(-1).view(np.uint8))
        return report.read_nbytes, report.transfer_seconds

    def check(self) -> Mapping[str, Any]:
        """Compare every byte, or the logits."""
        wanted: dict[str, int] = {}
        if "logits" in self._found:
            import torch

            model = _llama(self._path)
            streamload.load_state_dict(model, self._path, device="cpu", progress=False)
            with torch.no_grad():
                wanted["logits"] = zlib.crc32(model(torch.arange(TOKENS)[None]).float().numpy())
        elif self._found:
            for name, raw in tensors_of(Path(self._path)).items():
                dtype = NUMPY[raw.dtype]
                numel = int(np.prod(raw.shape))
                values = np.fromfile(raw.file, dtype, numel, offset=raw.start)
                wanted[name] = zlib.crc32(values.view(np.uint8).data)
        return {"wrong": [name for name in wanted if wanted[name] != self._found.get(name)]}


def _llama(path: str) -> Any:
    import torch

    torch.set_num_threads(1)
    model = import_module("examples.torch_module").on_meta(Path(path))
    return model.to(torch.bfloat16).eval()
