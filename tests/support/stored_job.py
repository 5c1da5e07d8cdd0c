"""A process that loads a GGUF file's blocks into Linears of torch, for a memory cgroup."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

import streamload
from streamload.devices.torch.quantized import CODED


class Job:
    """The load of a file whose tensors are the weights of a list of Linears."""

    def __init__(self, path: str, **options: Any) -> None:
        self._path, self._options, self._loaded = path, options, False
        self._checkpoint = streamload.open_checkpoint(path)
        shapes = [group.shape for group in self._checkpoint.groups.values()]
        with torch.device("meta"):
            self._model = nn.ModuleList([nn.Linear(n, m, bias=False) for m, n in shapes])

    def __call__(self) -> dict[str, Any]:
        try:
            report = streamload.load_state_dict(
                self._model, self._path, device="cpu", progress=False, **self._options
            )
        except Exception as error:
            return {"outcome": type(error).__name__, "error": str(error)[:400]}
        self._loaded = True
        return {
            "outcome": "loaded",
            "predicted_nbytes": report.predicted_nbytes["process"],
            "needed_nbytes": report.plan.devices[0].needed_nbytes,
        }

    def check(self) -> dict[str, Any]:
        """Compare what the modules hold with the file, after a load."""
        wrong = []
        for name, info in self._checkpoint.tensors.items() if self._loaded else ():
            module: Any = self._model.get_submodule(name.removesuffix(".weight"))
            held = np.fromfile(info.shard, np.uint8, info.nbytes, offset=info.start)
            if not hasattr(module, CODED):
                wrong.append(f"{name} is no block")
            elif not np.array_equal(module._buffers["weight"].numpy().reshape(-1), held):
                wrong.append(name)
        return {"wrong": wrong}
