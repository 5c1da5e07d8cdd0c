"""MXFP4: blocks of 32 floats of 4 bits (E2M1) with an exponent each, the first in the low bits.

Sources: the OCP Microscaling Formats specification, version 1.0, and `convert_moe_packed_tensors`
in transformers/integrations/mxfp4.py, which also exchanges the last two axes: see `mapping`. Each
product is exact in float32, and in bfloat16 but at the ends of its range. An exponent of 255 is
NaN by the specification, and refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.decode import Read, ScaledLayout, Weight, by_blocks, check_finite, register
from streamload.codecs.decode_kernels import Pairs
from streamload.codecs.group import Group
from streamload.codecs.scheme import Array

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
_NAN = 255


@dataclass(frozen=True)
class _Values(Pairs):
    name = "mxfp4"
    significant_bits = 2
    exponents = True

    def instructions(self, v: Vector, codes: str) -> str:
        """See `Values.instructions`."""
        wide = v.convert("zext", "i8", codes, "i32")
        magnitude = v.op("and", "i32", wide, 7)
        normal = v.op("add", "i32", v.op("shl", "i32", magnitude, 22), 126 << 23)
        half = v.select(v.op("icmp eq", "i32", magnitude, 1), "i32", 126 << 23, 0)
        bits = v.select(v.op("icmp ugt", "i32", magnitude, 1), "i32", normal, half)
        sign = v.op("shl", "i32", v.op("lshr", "i32", wide, 3), 31)
        return v.convert("bitcast", "i32", v.op("or", "i32", bits, sign), "float")

    def decoded(self, codes: Array, table: Array) -> Array:
        """See `Values.decoded`."""
        found: Array = _VALUES[codes]
        return found


class _Layout(ScaledLayout):
    always = _Values()

    def weight(self, group: Group, read: Read) -> Weight:
        """See `ScaledLayout.weight`."""
        scale = group.members["scale"]
        scales = np.frombuffer(read(scale), np.uint8)
        check_finite(scale, scales != _NAN)
        return by_blocks(group, _Values(), scales)


register("mxfp4", _Layout())
