"""MXFP4: blocks of 32 floats of 4 bits (E2M1, the first in a byte's low bits) and an exponent.

Sources: the OCP Microscaling Formats specification, version 1.0, and `convert_moe_packed_tensors`
in transformers/integrations/mxfp4.py, which also exchanges the last two axes; gpt-oss
(``*_blocks``, ``*_scales``). Each product is exact in float32, and in bfloat16 but at the ends of
its range. An exponent of 255 is NaN by the specification, and refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamload.codecs.decode import ScaledLayout, Weight, by_blocks, check_finite
from streamload.codecs.decode_kernels import Values
from streamload.codecs.ir import Vector
from streamload.codecs.parts import Array
from streamload.codecs.product import Form, Formed
from streamload.codecs.scheme import Library, Read
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.dtypes import PACKED
from streamload.core.tensors import TensorInfo

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
_NAN = 255
_BLOCK = 32


@dataclass(frozen=True)
class _Values(Values):
    name = "mxfp4"
    bits = 4
    significant_bits = 2
    exponents = True

    def instructions(self, v: Vector, codes: str) -> str:
        wide = v.convert("zext", "i8", codes, "i32")
        magnitude = v.op("and", "i32", wide, 7)
        normal = v.op("add", "i32", v.op("shl", "i32", magnitude, 22), 126 << 23)
        half = v.select(v.op("icmp eq", "i32", magnitude, 1), "i32", 126 << 23, 0)
        bits = v.select(v.op("icmp ugt", "i32", magnitude, 1), "i32", normal, half)
        sign = v.op("shl", "i32", v.op("lshr", "i32", wide, 3), 31)
        return v.as_float(v.op("or", "i32", bits, sign))

    def decoded(self, codes: Array, table: Array) -> Array:
        return _VALUES[codes]


class _MXFP4(ScaledLayout, Formed):
    name = kind = "mxfp4"
    dtype = PACKED["mxfp4"]

    def values(self, weight: QuantizedWeight) -> _Values:
        return _Values()

    def form(self, detail: str) -> Form:
        return Form(_Values(), (("scales", "_scales"),), _BLOCK)

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        scale = weight.members["scale"]
        scales = np.frombuffer(read(scale), np.uint8)
        check_finite(scale, scales != _NAN)
        return by_blocks(weight, _Values(), scales)


def _find(layouts: Layouts, values: TensorInfo) -> QuantizedWeight | None:
    """Return the weight whose blocks of 16 bytes, 32 values each, a tensor holds, else None."""
    name = values.name
    stem = name.removesuffix("_blocks")
    scales = layouts.find(f"{stem}_scales")
    fits = len(values.shape) > 2 and values.shape[-1] * 2 == _BLOCK
    if values.dtype.code != "U8" or (layouts.method != "mxfp4" and not (fits and scales)):
        return None
    scales = layouts.need(f"{stem}_scales", name, "scale")
    if not fits:
        layouts.refuse_shape(values, f"[..., blocks, {_BLOCK // 2}]")
    layouts.check(scales, ("U8",), values.shape[:-1])
    shape = (*values.shape[:-2], values.shape[-2] * _BLOCK)
    members = {"weight": values, "scale": scales}
    return QuantizedWeight("mxfp4", stem, members, shape, (1, _BLOCK), 4, is_transposed=True)


LIBRARY = Library(_MXFP4(), find=_find)
