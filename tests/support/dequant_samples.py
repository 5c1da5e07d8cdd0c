"""Quantised weights made by hand, with the elements that they stand for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors_files import write_safetensors

from streamload.codecs.schemes.bitsandbytes import VALUES

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
_CODES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int8": "I8",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Sample:
    """A quantised weight: its tensors, its name, and its exact elements in float64."""

    name: str
    tensors: Tensors
    exact: Array

    def rounded(self, dtype: str) -> Array:
        """The elements rounded once: by way of a float32 rounded to odd, or float32 itself."""
        with np.errstate(over="ignore"):
            nearest = self.exact.astype(np.float32)
            if dtype == "float32":
                return nearest
            bits = nearest.view(np.uint32).copy()
            away = np.abs(nearest.astype(np.float64)) > np.abs(self.exact)
            bits[away] -= 1
            bits[bits.view(np.float32).astype(np.float64) != self.exact] |= 1
            target = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
            return np.asarray(bits.view(np.float32).astype(target))


def entry(array: Array, shape: tuple[int, ...] | None = None) -> tuple[str, tuple[int, ...], bytes]:
    return _CODES[array.dtype.name], array.shape if shape is None else shape, array.tobytes()


def spread(scales: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Scales of blocks, one for each element."""
    whole = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    return np.asarray(whole[..., : shape[-2], : shape[-1]], np.float64)


def scales_of(rng: Any, *shape: int) -> Array:
    return np.asarray(rng.lognormal(-4, 2, shape), np.float32)


def fp8(
    name: str = "l.0.q.weight",
    shape: tuple[int, ...] = (300, 416),
    kind: str = "float8_e4m3fn",
    block: tuple[int, int] = (128, 128),
    seed: int = 0,
) -> Sample:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 60).clip(-440, 440).astype(getattr(ml_dtypes, kind))
    wide = values.astype(np.float64)
    if block == (0, 0):
        scales = scales_of(rng, 1)
        return Sample(
            name,
            {name: entry(values), f"{name}_scale": entry(scales, ())},
            wide * np.float64(scales[0]),
        )
    tall, across = (-(-n // size) for n, size in zip(shape[-2:], block, strict=True))
    scales = scales_of(rng, *shape[:-2], tall, across)
    leaf = "weight_scale" if block[0] == 1 else "weight_scale_inv"
    tensors = {name: entry(values), name.replace("weight", leaf): entry(scales)}
    return Sample(name, tensors, wide * spread(scales, block, shape))


def int8(name: str = "l.0.k.weight", zeros: bool = False, seed: int = 1) -> Sample:
    """A weight of compressed-tensors' int8, a scale a row."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-128, 128, (64, 96)).astype(np.int8)
    scales = scales_of(rng, 64, 1).astype(ml_dtypes.bfloat16)
    tensors = {name: entry(values), f"{name}_scale": entry(scales)}
    wide = values.astype(np.float64)
    if zeros:
        points = rng.integers(-128, 128, (64, 1)).astype(np.int8)
        tensors[f"{name}_zero_point"] = entry(points)
        wide = wide - points
    return Sample(name, tensors, wide * scales.astype(np.float64))


def bnb_int8(name: str = "l.0.v.weight", seed: int = 2) -> Sample:
    rng = np.random.default_rng(seed)
    values = rng.integers(-127, 128, (48, 80)).astype(np.int8)
    scb = scales_of(rng, 48)
    scales = (scb.astype(np.float64) * np.float64(np.float32(1 / 127))).astype(np.float32)
    tensors = {
        name: entry(values),
        name.replace("weight", "SCB"): entry(scb),
        name.replace("weight", "weight_format"): entry(np.zeros((), np.uint8)),
    }
    return Sample(name, tensors, values.astype(np.float64) * scales[:, None].astype(np.float64))


def four_bit(
    name: str = "l.0.o.weight",
    shape: tuple[int, ...] = (37, 130),
    kind: Any = "nf4",
    nested: bool = False,
    size: int = 64,
    seed: int = 3,
) -> Sample:
    """A weight of bitsandbytes' 4 bits."""
    rng = np.random.default_rng(seed)
    numel = math.prod(shape)
    codes = rng.integers(0, 16, numel + numel % 2).astype(np.uint8)
    table, blocks = np.array(VALUES[kind], np.float32), -(-numel // size)
    said = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {name: entry((codes[::2] << 4 | codes[1::2])[:, None])}
    absmax = scales_of(rng, blocks)
    tensors[f"{name}.absmax"] = entry(absmax)
    if nested:
        outer, values = scales_of(rng, -(-blocks // 256)), np.linspace(-1, 1, 256, dtype=np.float32)
        inner = rng.integers(0, 256, blocks).astype(np.uint8)
        absmax = values[inner] * np.repeat(outer, 256)[:blocks] + np.float32(0.75)
        tensors[f"{name}.absmax"] = entry(inner)
        tensors[f"{name}.nested_absmax"] = entry(outer)
        tensors[f"{name}.nested_quant_map"] = entry(values)
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
    tensors[f"{name}.quant_map"] = entry(table)
    state = np.frombuffer(json.dumps(said).encode(), np.uint8)
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = entry(state)
    wide = table[codes[:numel]].astype(np.float64) * np.repeat(absmax, size)[:numel]
    return Sample(name, tensors, wide.reshape(shape))


def mxfp4(
    name: str = "l.0.experts.gate_up_proj",
    shape: tuple[int, int, int] = (3, 40, 192),
    seed: int = 4,
) -> Sample:
    """Experts of gpt-oss; the elements are turned, as models have them."""
    rng = np.random.default_rng(seed)
    experts, rows, columns = shape
    blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16)).astype(np.uint8)
    scales = rng.integers(100, 138, (experts, rows, columns // 32)).astype(np.uint8)
    table = np.array([*FP4, *(-x for x in FP4)])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(experts, rows, -1, 32)
    wide = table[codes] * np.ldexp(1.0, scales.astype(int) - 127)[..., None]
    tensors = {f"{name}_blocks": entry(blocks), f"{name}_scales": entry(scales)}
    return Sample(name, tensors, np.swapaxes(wide.reshape(shape), 1, 2))


def every() -> list[Sample]:
    return [
        fp8(),
        fp8("l.1.q.weight", (200, 96), "float8_e5m2", (1, 96)),
        fp8("l.2.q.weight", (7, 33), block=(0, 0)),
        fp8("l.3.experts.weight", (3, 130, 257)),
        int8(),
        int8("l.1.k.weight", zeros=True),
        bnb_int8(),
        four_bit(),
        four_bit("l.1.o.weight", (128, 192), nested=True),
        four_bit("l.2.o.weight", (5, 7), "fp4"),
        mxfp4(),
    ]


def write(folder: Path, samples: list[Sample], shards: int = 1, **config: Any) -> Path:
    """A checkpoint of these weights and one of float32, its tensors in files by turns."""
    tensors: Tensors = {"norm.weight": entry(np.linspace(-2, 2, 37, dtype=np.float32))}
    for sample in samples:
        tensors |= sample.tensors
    listed = list(tensors.items())
    for shard in range(shards):
        write_safetensors(folder / f"{shard}.safetensors", dict(listed[shard::shards]))
    how = {"quant_method": "made by hand", "weight_block_size": [128, 128]}
    config = {"quantization_config": how} | config
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def same(found: Any, expected: Mapping[str, Array] | Array) -> bool:
    """Whether an array or a tensor of torch has exactly these elements."""
    if hasattr(found, "detach"):
        found = found.detach().float().numpy()
    return np.array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
