"""Helpers that `test_cast_reference` shares with other tests."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.floats import PAIRS, overflow_start
from streamload.core.dtypes import BF16, F16, F64, DType

Bits = np.ndarray[Any, np.dtype[Any]]


# code to (stored bits of the significand, exponent bias, smallest magnitude that is not finite)
LAYOUT = {
    "F8_E5M2": (2, 15, 0x7C),
    "F8_E4M3": (3, 7, 0x7F),
    "F16": (10, 15, 0x7C00),
    "BF16": (7, 127, 0x7F80),
    "F32": (23, 127, 0x7F800000),
    "F64": (52, 1023, 0x7FF0000000000000),
}


@cache
def samples(dtype: DType) -> Bits:
    """Bit patterns to cast: all of them up to 16 bits, else planted and random ones.

    Planted are every value of each narrower format, the midpoints between neighbours, where ties
    are, and the patterns next to both; infinities, NaNs of the smallest and largest payload, zeros.
    """
    unsigned = np.dtype(f"u{dtype.itemsize}")
    if dtype.bits <= 16:
        return np.arange(1 << dtype.bits, dtype=np.uint32).astype(unsigned)
    rng = np.random.default_rng(dtype.bits)
    special = LAYOUT[dtype.code][2]
    sign = 1 << (dtype.bits - 1)
    planted = [0, 1, special - 1, special, special + 1, sign - 1]
    parts = [
        np.frombuffer(rng.bytes(60_000 * dtype.itemsize), unsigned),
        np.array(planted + [sign | bits for bits in planted], unsigned),
    ]
    grids = [np.arange(1 << 16, dtype=np.uint16).view(narrow.numpy) for narrow in (F16, BF16)]
    if dtype == F64:
        some = np.sort(np.frombuffer(rng.bytes(4 * 20_000), np.uint32))
        grids.append(np.concatenate([some, some + np.uint32(1)]).view(np.float32))
        grids.append(np.concatenate([np.arange(300, dtype=np.uint32)]).view(np.float32))
    with np.errstate(all="ignore"):
        for grid in grids:
            values = np.unique(grid.astype(np.float64))
            values = values[np.isfinite(values)]
            midpoints = (values[:-1] + values[1:]) / 2
            beyond = np.array([1.0, -1.0]) * (values[-1] + (values[-1] - values[-2]) / 2)
            near = np.concatenate([values, midpoints, beyond]).astype(dtype.numpy).view(unsigned)
            parts += [near, near + unsigned.type(1), near - unsigned.type(1)]
    return np.concatenate(parts)


def as_bits(data: bytearray, dtype: DType) -> Bits:
    """The elements of ``data`` as unsigned integers, with every NaN made the same one."""
    bits = np.frombuffer(data, f"u{dtype.itemsize}").copy()
    bits[np.isnan(bits.view(dtype.numpy))] = (1 << (dtype.bits - 1)) - 1
    return bits


#: Every kernel that differs, as (source, target, clamp).
CASTS = [
    (src, dst, clamp)
    for src, dst in PAIRS
    for clamp in ((False, True) if overflow_start(src, dst) is not None else (False,))
]


def cast_by_reference(
    src: DType, dst: DType, x: Bits, clamp: bool = False
) -> tuple[Bits, tuple[int, int, int]]:
    out = bytearray(x.size * dst.itemsize)
    counts = cast_bytes(src, dst, memoryview(x.tobytes()), memoryview(out), clamp=clamp)
    return as_bits(out, dst), counts


@cache
def by_reference(src: DType, dst: DType, clamp: bool) -> tuple[Bits, tuple[int, int, int]]:
    return cast_by_reference(src, dst, samples(src), clamp)


def pair_id(value: object) -> str | None:
    return "-".join(dtype.code for dtype in value) if isinstance(value, tuple) else None


def tallied(
    src: DType, dst: DType, x: Bits, clamp: bool = False
) -> tuple[Bits, tuple[int, int, int]]:
    """The elements and the tally that a kernel owes."""
    bits, counts = cast_by_reference(src, dst, x, clamp)
    return bits, (counts[0], counts[1], sum(counts))
