"""Tensors for K-quants, the same on every machine, and llama.cpp's own quantizing of them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from streamload.codecs.scheme import ALL_SCHEMES
from streamload.core.dtypes import F32, PACKED

Array = np.ndarray[Any, np.dtype[Any]]


def tensor(seed: int, rows: int = 6, columns: int = 512) -> tuple[Array, Array]:
    """A matrix and the importance of its columns, of exact operations on a stream for ever.

    Sums of four numbers of 16 bits, of magnitudes that differ by group. By the seed: ordinary; of
    one sign; few values; with stretches of zeros and of equal elements; of every magnitude.
    """
    random = np.random.RandomState(seed)

    def numbers(*shape: int) -> Array:
        raw = np.frombuffer(random.bytes(8 * int(np.prod(shape))), "<u2").astype(np.int64)
        return raw.reshape(*shape, 4).sum(axis=-1) - 131070

    kind, wide = seed % 5, seed % 5 == 4
    x = np.ldexp(numbers(rows, columns), -18)
    exponents = random.randint(*((-130, 120) if wide else (-12, 4)), (rows, columns // 16))
    if kind == 1:
        x = np.abs(x) * (1 - 2 * (seed % 2)) + 0.25
    if kind == 2:
        x = np.trunc(x * 8) / 4
    if kind == 3:
        held = random.randint(0, 4, (rows, columns // 32)).repeat(32, axis=1)
        x = np.where(held == 0, 0, np.where(held == 1, x[:, :1], x))
    x = np.ldexp(x, exponents.repeat(16, axis=1)).astype(np.float32)
    importance = np.ldexp(np.abs(numbers(columns)), random.randint(-30, -10)).astype(np.float32)
    return x, np.where(importance < importance.max() / 16, np.float32(0), importance)


def encoded(name: str, x: Array, importance: Array | None, engine: Any, *cuts: int) -> bytes:
    """A matrix's blocks by streamload, cut before some units."""
    made: Any = ALL_SCHEMES[name].of(x.shape, F32)
    encoder = (made if importance is None else made.weighted(importance)).encoder(F32, engine)
    out, data = bytearray(made.parts[0].nbytes), memoryview(x.tobytes())
    for first, stop in zip((0, *cuts), (*cuts, made.units), strict=True):
        some = data[4 * first * made.unit_numel : 4 * stop * made.unit_numel]
        codes = memoryview(out)[first * made.unit_nbytes : stop * made.unit_nbytes]
        encoder.encode(some, codes, first * made.unit_numel)
    return bytes(out)


def by_ggml(library: Path, name: str, x: Array, importance: Array | None) -> bytes:
    """A matrix's blocks by ``quantize_*`` of a library that has ggml-quants.c."""
    kind = name[:-1] + name[-1].upper() if name.endswith("_k") else name
    quantize = getattr(ctypes.CDLL(str(library)), f"quantize_{kind}")
    quantize.argtypes = (*2 * (ctypes.c_void_p,), *2 * (ctypes.c_int64,), ctypes.c_void_p)
    rows, columns = x.shape
    out = np.zeros(rows * PACKED[name].nbytes(columns), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    quantize(x.ctypes.data, out.ctypes.data, rows, columns, weights)
    return out.tobytes()
