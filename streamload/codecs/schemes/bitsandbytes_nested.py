"""bitsandbytes' 8-bit dynamic type, to which the statistics of 4-bit blocks may be quantized.

Source: bitsandbytes 0.50.2, `create_dynamic_map`, `quantize_cpu_impl` (csrc/cpu_ops.cpp) and
`dQuantize` (csrc/kernels.cu). Blocks of 256 values share a scale, their largest magnitude. The CPU
looks up the nearest of the 256 values in a table of 65,536 steps; CUDA searches for it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from streamload.codecs.parts import Arithmetic, Array, flushed

BLOCK = 256
#: Bytes of `dynamic_map`.
MAP_NBYTES = 4 * 256
_STEPS = 65536
_AT_ONCE = 2**16  # values quantized at once, whole blocks: temporaries of a few MB


@cache
def dynamic_map() -> Array:
    """Return bitsandbytes' 256 8-bit values, ascending, as `create_dynamic_map` in float32."""
    values = [0.0, 1.0]
    for exponent in range(7):
        count = 2**exponent
        # torch.linspace(0.1, 1): from both ends, each a fused multiplication and addition
        step = np.float64(np.float32(0.9) / np.float32(count))
        index = np.arange(count + 1)
        near, far = np.float32(0.1) + step * index, 1 - step * index[::-1]
        boundaries = np.where(index < (count + 1) // 2, near, far).astype(np.float32)
        means = (boundaries[:-1] + boundaries[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (exponent - 6)) * means
        values += [*scaled.tolist(), *(-scaled).tolist()]
    return np.array(sorted(values), np.float32)


@cache
def _codes() -> Array:
    """Return the table of `_looked_up`: the codes of 65,536 even steps from -1 to 1."""
    table = dynamic_map()
    midpoints = np.float32(0.5) * (table[:-1] + table[1:])
    steps = np.float32(2) * np.arange(_STEPS, dtype=np.float32) / np.float32(_STEPS - 1)
    return np.searchsorted(midpoints, np.float32(-1) + steps, side="left").astype(np.uint8)


def quantized(x: Array, arithmetic: Arithmetic) -> tuple[Array, Array]:
    """Quantize float32 values; return a uint8 code for each, and each block's largest magnitude.

    ``x`` has one axis; the last block may be short. CUDA's ``arithmetic`` approximates 1/scale
    within a unit in the last place of the number used here.
    """
    starts = range(0, x.size, _AT_ONCE)
    some = [_quantized(x[start : start + _AT_ONCE], arithmetic) for start in starts]
    codes, scales = zip(*some, strict=True)
    return np.concatenate(codes), np.concatenate(scales)


def _quantized(x: Array, arithmetic: Arithmetic) -> tuple[Array, Array]:
    count = -(-x.size // BLOCK)
    padded = np.zeros(count * BLOCK, np.float32)
    padded[: x.size] = x
    blocks = padded.reshape(count, BLOCK)
    if arithmetic == "cuda":
        blocks = flushed(blocks)
    scales = np.abs(blocks).max(axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.float32(1) / scales
        scaled = blocks * (flushed(inverse) if arithmetic == "cuda" else inverse)[:, None]
    # zero times an infinite reciprocal, of a scale of zero or below 2^-128: bitsandbytes' code 0
    scaled[np.isnan(scaled)] = -1
    codes = _searched(scaled) if arithmetic == "cuda" else _looked_up(scaled)
    return codes.reshape(-1)[: x.size], scales


def _looked_up(x: Array) -> Array:
    """Return the codes of scaled values as bitsandbytes finds them on CPUs."""
    half = (np.clip(x, -1, 1) + np.float32(1)) * np.float32(0.5)
    # one rounding, as of a fused multiply and addition: float64 holds the sum exactly
    steps = (half.astype(np.float64) * (_STEPS - 1) + 0.5).astype(np.float32)
    return _codes()[np.minimum(steps.astype(np.int64), _STEPS - 1)]


def _searched(x: Array) -> Array:
    """Return the codes of scaled values as bitsandbytes finds them on CUDA."""
    table = dynamic_map()
    pivot, above, below = (np.full(x.shape, start, np.int64) for start in (127, 255, 0))
    for step in (64, 32, 16, 8, 4, 2, 1):
        is_above = x > table[pivot]
        below, above = np.where(is_above, pivot, below), np.where(is_above, above, pivot)
        pivot = pivot + np.where(is_above, step, -step)
    value = table[pivot]
    half = np.float32(0.5)
    up = np.where(x > (table[above] + value) * half, above, pivot)
    down = np.where(x < (table[below] + value) * half, below, pivot)
    return np.where(x > value, up, down).astype(np.uint8)
