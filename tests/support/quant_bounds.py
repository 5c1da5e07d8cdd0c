"""What the parts of a quantized tensor decode to, and the largest error of each element."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from streamload.codecs.decode_blocks import Blocks
from streamload.codecs.scheme import codec_of
from streamload.codecs.schemes import bitsandbytes_nested as nested
from streamload.codecs.schemes.bitsandbytes import VALUES
from streamload.codecs.schemes.bitsandbytes_int8 import STEP
from streamload.codecs.schemes.mlc import SCALES

Array = np.ndarray[Any, np.dtype[Any]]


def bound(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """Float64, broadcast to the tensor's shape; it holds where elements and scales are finite."""
    if tensor.format == "int8":  # half a scale; subnormal scales, and the product, are rounded
        scales = part(tensor, parts, "_scale").astype(np.float64)
        rows = scales.reshape(-1, *(1,) * (len(tensor.shape) - 1))
        return np.asarray(rows * (0.5 + 127 * 2.0**-22) + 128 * 2.0**-149)
    if tensor.format == "bitsandbytes-int8":  # half of 1/127, and the rounding to float16
        rows = part(tensor, parts, "SCB").astype(np.float64)[:, None]
        return np.asarray(rows * (0.5 / 127 + 2.0**-11 + 2.0**-20) + 2.0**-24)
    if (
        tensor.parts[-1].suffix == SCALES
    ):  # half a step, and the scale's rounding times the largest code
        most, kind = tensor.codec.recipe.most, tensor.codec.recipe.scale.numpy
        info = ml_dtypes.finfo(kind)
        rounding = (most + 1) * float(info.eps) / 2 + 2.0**-20  # and what is computed in float32
        d = np.frombuffer(memoryview(parts[SCALES]), kind).astype(np.float64)
        groups = np.repeat(d * (0.5 + rounding), tensor.codec.recipe.numel)
        return _cut(tensor, groups + (most + 1) * float(info.smallest_subnormal) / 2)
    if tensor.format in ("q8_0", "q4_0"):
        blocks = part(tensor, parts, "").reshape(-1, tensor.unit_nbytes)
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
    absmax = np.abs(_absmax(tensor, parts).astype(np.float64))
    error = np.zeros(absmax.shape)
    if tensor.codec.nested:
        scales = part(tensor, parts, ".nested_absmax").astype(np.float64)
        error = np.repeat(scales, nested.BLOCK)[: absmax.size]
        state = json.loads(bytes(part(tensor, parts, tensor.parts[-1].suffix)))
        rounded = 2.0**-23 * (absmax + abs(state["nested_offset"]) + error)
        gap = float(np.diff(nested.dynamic_map().astype(np.float64)).max())
        error = error * (gap / 2 + 2.0 / 65536) + rounded
    largest = absmax + error
    half_gap = float(np.diff(np.sort(np.array(VALUES[tensor.codec.type]))).max()) / 2
    found = largest * (half_gap + 2.0**-20) + error + 2 * 2.0**-126
    if tensor.codec.arithmetic == "cuda":
        found = np.where(largest > 2.0**125, largest, found)
    return np.repeat(found, tensor.codec.block)[: tensor.numel].reshape(tensor.shape)


def part(tensor: Any, parts: Mapping[str, Any], suffix: str) -> Array:
    """One of the parts as an array of its dtype and shape."""
    said = next(part for part in tensor.parts if part.suffix == suffix)
    flat = np.frombuffer(parts[suffix], np.uint8)
    return flat.view(said.dtype.numpy).reshape(said.shape)


def elements_of(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """Float32 elements of the tensor's shape."""
    with np.errstate(invalid="ignore"):
        if tensor.parts[-1].suffix == SCALES:
            return _groups(tensor, parts)
        codes = part(tensor, parts, "")
        if tensor.format in ("int8", "bitsandbytes-int8"):
            scales = part(tensor, parts, tensor.parts[1].suffix)
            rows = codes.astype(np.float32) * scales.reshape(-1, *(1,) * (codes.ndim - 1))
            return rows if tensor.format == "int8" else rows * STEP
        layout = codec_of(tensor.format)
        if isinstance(layout, Blocks):
            return layout.decoded(codes.reshape(-1, layout.nbytes)).reshape(tensor.shape)
    codes = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)[: tensor.numel]
    each = np.repeat(_absmax(tensor, parts), tensor.codec.block)[: tensor.numel]
    return (np.array(VALUES[tensor.codec.type], np.float32)[codes] * each).reshape(tensor.shape)


def _absmax(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """The statistics of blocks of 4 bits."""
    found = part(tensor, parts, ".absmax")
    if not tensor.codec.nested:
        return found
    scales = np.repeat(part(tensor, parts, ".nested_absmax"), nested.BLOCK)[: found.size]
    state = json.loads(bytes(part(tensor, parts, tensor.parts[-1].suffix)))
    return nested.dynamic_map()[found] * scales + np.float32(state["nested_offset"])


def _groups(tensor: Any, parts: Mapping[str, Any]) -> Array:
    """Elements of MLC's groups, of four words each."""
    words = part(tensor, parts, "").reshape(-1, 4)
    if tensor.codec.is_transposed:
        groups, rows, _ = tensor.shape
        words = part(tensor, parts, "").reshape(groups, 4, rows).transpose(0, 2, 1).reshape(-1, 4)
    bits = tensor.codec.recipe.bits
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & (2**bits - 1)).reshape(len(words), -1)
    steps = codes.astype(np.float32) - tensor.codec.recipe.most
    return _cut(tensor, steps * part(tensor, parts, SCALES).reshape(-1, 1).astype(np.float32))


def _cut(tensor: Any, groups: Array) -> Array:
    """Elements without those that fill short groups."""
    rows = groups.reshape(math.prod(tensor.shape[:-1]), -1)
    return rows[:, : tensor.shape[-1]].reshape(tensor.shape)
