"""A process that loads a single file of Flux, for a memory cgroup."""

from __future__ import annotations

import zlib
from typing import Any

import diffusers
import torch

import streamload


class Job:
    """The load of a transformer by streamload, or by diffusers (``theirs``)."""

    def __init__(self, path: str, config: str, *, theirs: bool, dtype: str, **options: Any) -> None:
        _ = diffusers.FluxTransformer2DModel  # imports it, which a load would do
        self._load = self._theirs if theirs else self._ours
        self._path, self._config, self._dtype, self._options = path, config, dtype, options

    def __call__(self) -> dict[str, Any]:
        """Load; "bits" is a sum of all bytes of the parameters."""
        bits = 0
        for _, parameter in sorted(self._load().named_parameters()):
            bits = zlib.crc32(parameter.detach().view(torch.uint8).numpy(), bits)
        return {"outcome": "loaded", "bits": bits}

    def check(self) -> dict[str, Any]:
        return {"wrong": []}

    def _ours(self) -> Any:
        load = streamload.diffusers.from_pretrained
        options = {"device": "cpu", "progress": False, "dtype": self._dtype, **self._options}
        return load(self._path, config=self._config, **options)

    def _theirs(self) -> Any:
        dtype = getattr(torch, self._dtype)
        options: dict[str, Any] = {"torch_dtype": dtype, "config": self._config}
        if self._path.endswith(".gguf"):
            quantized = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
            options["quantization_config"] = quantized
        return diffusers.FluxTransformer2DModel.from_single_file(self._path, **options)
