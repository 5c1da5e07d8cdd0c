"""The largest error that each element of a quantized tensor can have, from its statistics alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from streamload.codecs.schemes import bitsandbytes_nested as nested
from streamload.codecs.schemes.bitsandbytes import VALUES
from streamload.codecs.schemes.mlc import SCALES

Array = np.ndarray[Any, np.dtype[Any]]


def bound(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """Float64, broadcast to the tensor's shape; it holds where elements and scales are finite."""
    if tensor.format == "int8":  # half a scale; subnormal scales, and the product, are rounded
        scales = tensor.part(parts, "_scale").astype(np.float64)
        rows = scales.reshape(-1, *(1,) * (len(tensor.shape) - 1))
        return np.asarray(rows * (0.5 + 127 * 2.0**-22) + 128 * 2.0**-149)
    if tensor.format == "bitsandbytes-int8":  # half of 1/127, and the rounding to float16
        rows = tensor.part(parts, "SCB").astype(np.float64)[:, None]
        return np.asarray(rows * (0.5 / 127 + 2.0**-11 + 2.0**-20) + 2.0**-24)
    if (
        tensor.parts[-1].suffix == SCALES
    ):  # half a step, and the scale's rounding times the largest code
        most = (1 << tensor.bits - 1) - 1
        d = np.frombuffer(memoryview(parts[SCALES]), "<f2").astype(np.float64)
        groups = np.repeat(d * (0.5 + (most + 1) * 2.0**-11), tensor.group_numel)
        return tensor._cut(groups + (most + 1) * 2.0**-25)
    if tensor.format in ("q8_0", "q4_0"):
        blocks = tensor.part(parts, "").reshape(-1, tensor.unit_nbytes)
        d = np.abs(blocks[:, :2].copy().view(np.float16).astype(np.float64))
        if tensor.format == "q8_0":  # half a step, and 127 times the rounding of d
            found = d * (0.5 + 128 * 2.0**-11 + 2.0**-10) + 128 * 2.0**-25
        else:  # a step, since codes reach from -8 to 7, and 8 times the rounding of d
            found = d * (1 + 9 * 2.0**-11) + 9 * 2.0**-25
        return np.broadcast_to(found, (len(d), 32)).reshape(tensor.shape)
    return _four_bit(tensor, parts)


def _four_bit(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """Half the widest gap, times the largest that absmax can be; and absmax's own error.

    Two more terms cover magnitudes that CPUs and CUDA take for zero, and blocks beyond 2^126,
    where CUDA's reciprocal is zero.
    """
    absmax = np.abs(tensor._absmax(parts).astype(np.float64))
    error = np.zeros(absmax.shape)
    if tensor.nested:
        scales = tensor.part(parts, ".nested_absmax").astype(np.float64)
        error = np.repeat(scales, nested.BLOCK)[: absmax.size]
        state = json.loads(bytes(tensor.part(parts, tensor.parts[-1].suffix)))
        rounded = 2.0**-23 * (absmax + abs(state["nested_offset"]) + error)
        gap = float(np.diff(nested.dynamic_map().astype(np.float64)).max())
        error = error * (gap / 2 + 2.0 / 65536) + rounded
    largest = absmax + error
    half_gap = float(np.diff(np.sort(np.array(VALUES[tensor.kind]))).max()) / 2
    found = largest * (half_gap + 2.0**-20) + error + 2 * 2.0**-126
    if tensor.arithmetic == "cuda":
        found = np.where(largest > 2.0**125, largest, found)
    return np.repeat(found, tensor.block)[: tensor.numel].reshape(tensor.shape)
