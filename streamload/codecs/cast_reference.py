"""Casts in numpy: the oracle of tests and ``--verify``, and the fallback without LLVM.

It shares no code with the kernels. Rounding is that of numpy and ml_dtypes, which convert once
except from float64: that goes through float32 rounded to odd here, so that it is rounded once too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamload.core.dtypes import DType

_CHUNK_NUMEL = 1 << 15  # temporaries stay below about 2 MB for any length of the input

Array = np.ndarray[Any, np.dtype[Any]]


def cast_bytes(
    src: DType, dst: DType, data: memoryview, out: memoryview, *, clamp: bool = False
) -> tuple[int, int, int]:
    """Cast C-contiguous little-endian elements, of any alignment, in chunks.

    With ``clamp`` finite values that overflow become the largest finite value of their sign.
    Returns counts of those that overflowed, nonzero ones that became zero, and other changes.
    """
    source = np.frombuffer(data, np.uint8)
    target = np.frombuffer(out, np.uint8)
    lossy = not np.can_cast(src.numpy, dst.numpy)
    counts = np.zeros(3, np.int64)
    for start in range(0, data.nbytes // src.itemsize, _CHUNK_NUMEL):
        stop = start + _CHUNK_NUMEL
        # copy: numpy and ml_dtypes are only fast, or right, on aligned elements
        x = source[start * src.itemsize : stop * src.itemsize].copy().view(src.numpy)
        y = cast_array(x, dst)
        if lossy:
            overflows, *others = _changes(x, y)
            counts += [np.count_nonzero(mask) for mask in (overflows, *others)]
            if clamp:
                largest = np.nextafter(dst.numpy.type(np.inf), dst.numpy.type(0))
                y[overflows] = np.copysign(largest, y[overflows])
        target[start * dst.itemsize : stop * dst.itemsize] = y.view(np.uint8)
    overflowed, flushed, rounded = counts.tolist()
    return overflowed, flushed, rounded


def cast_array(x: Array, dst: DType) -> Array:
    """Round each element of an array of floats once, to nearest even, to floats of 16+ bits."""
    with np.errstate(all="ignore"):
        if x.dtype == np.float64 and dst.bits == 16:
            x = _round_to_odd(x)
        return x.astype(dst.numpy)


def _changes(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return masks of finite elements that overflowed, became zero, and changed otherwise."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        before, after = x.astype(np.float64), y.astype(np.float64)  # holds every other format
    finite = np.isfinite(before)
    overflows = finite & np.isinf(after)
    vanishes = (before != 0) & (after == 0)
    return overflows, vanishes, finite & (before != after) & ~overflows & ~vanishes


def _round_to_odd(x: Array) -> Array:
    """Return float64 values as float32: truncated, and the last bit set where that was inexact."""
    nearest = x.astype(np.float32)
    away = np.abs(nearest.astype(np.float64)) > np.abs(x)
    truncated = np.where(away, np.nextafter(nearest, np.float32(0)), nearest)
    inexact = (truncated.astype(np.float64) != x) & ~np.isnan(x)
    odd: Array = (truncated.view(np.uint32) | inexact).view(np.float32)
    return odd
