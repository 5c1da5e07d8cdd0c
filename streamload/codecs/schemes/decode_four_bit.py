"""bitsandbytes' nf4 and fp4: 16 values by code, the first of two in the high bits.

Source: ``QuantState``, `dequantize_4bit` and `dequantize_blockwise` in bitsandbytes/functional.py,
version 0.50. Nested statistics are decoded first: the code's value times the statistic of their
block, and then the offset added, each rounded to float32, as there. bitsandbytes rounds the product
to float32 and then to the target; here it is rounded once. So the two may differ where the float32
product is a midpoint of the target, by one unit in its last place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.decode import Read, ScaledLayout, Weight, check_finite, floats, register
from streamload.codecs.decode_kernels import Pairs
from streamload.codecs.group import Group
from streamload.codecs.kernels import splat
from streamload.codecs.scheme import Array


@dataclass(frozen=True)
class _Values(Pairs):
    name = "nf4 or fp4"
    significant_bits = 24
    high_first = True

    def instructions(self, v: Vector, codes: str) -> str:
        """See `Values.instructions`."""
        if v.width == 1:
            index = v.convert("zext", "i8", codes, "i64")
            place = v.emit(f"getelementptr float, ptr %table, i64 {index}")
            return v.emit(f"load float, ptr {place}")
        values = []
        for code in range(16):
            place = v.emit(f"getelementptr float, ptr %table, i64 {code}")
            values.append(splat(v, "float", v.emit(f"load float, ptr {place}")))
        wide = v.convert("zext", "i8", codes, "i32")
        for bit in range(4):
            is_set = v.op("icmp ne", "i32", v.op("and", "i32", wide, 1 << bit), 0)
            pairs = zip(values[1::2], values[::2], strict=True)
            values = [v.select(is_set, "float", *pair) for pair in pairs]
        return values[0]

    def decoded(self, codes: Array, table: Array) -> Array:
        """See `Values.decoded`."""
        found: Array = table[codes]
        return found


class _Layout(ScaledLayout):
    always = _Values()

    def weight(self, group: Group, read: Read) -> Weight:
        """See `ScaledLayout.weight`."""
        absmax, values = group.members["absmax"], group.members["quant_map"]
        assert group.shape is not None, group.name
        if "nested_absmax" not in group.members:
            scales = floats(absmax, read(absmax))
        else:
            scales = _denested(group, np.frombuffer(read(absmax), np.uint8), read)
        numel = max(math.prod(group.shape), 1)
        table = floats(values, read(values))
        return Weight(_Values(), 1, numel, 1, group.block[0], scales, table=table)


def _denested(group: Group, codes: Array, read: Read) -> Array:
    """The float32 statistics of nested ones."""
    outer, values = group.members["nested_absmax"], group.members["nested_quant_map"]
    each = np.repeat(floats(outer, read(outer)), group.facts["nested_blocksize"])[: codes.size]
    scales: Array = floats(values, read(values))[codes]
    scales *= each
    scales += np.float32(group.facts["nested_offset"])
    check_finite(outer, np.isfinite(scales))
    return scales


for _kind in ("bnb-nf4", "bnb-fp4"):
    register(_kind, _Layout())
