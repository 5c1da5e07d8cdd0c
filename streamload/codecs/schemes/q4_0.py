"""GGUF's Q4_0: blocks of 32 elements of a row, each a float16 scale and 16 bytes of two codes.

Layout and arithmetic are those of gguf-py 0.19 (`gguf.quants.Q4_0`), bit for bit, which are those
of ``quantize_row_q4_0_ref`` in ggml-quants.c: the scale d is the element of the largest magnitude
(the first of several) divided by -8; a code is an element times 1/d plus 8.5 in float32, truncated,
at most 15; byte i holds code i in its low bits and code i + 16 in the others; d is stored as
float16. A block of zeros has the codes 8, and a d of the other sign than its first zero. Codes are
0 where 1/d is infinite (as numpy's cast makes of infinity and NaN on x86-64); d is 0 in float16
then. Where d is beyond float16 it is stored as infinity, as there: the block's elements count as
overflowed.

Error: half a step of d; a whole one at the far end, since codes reach from -8 steps to 7, and an
element may be as large as the largest with the other sign; and what rounding d does to 8 steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.encode import Encoded
from streamload.codecs.kernels import Packing, Scalars, minimum
from streamload.codecs.scheme import Array, register
from streamload.codecs.schemes.ggml import (
    BLOCK,
    GGUFBlocks,
    GGUFFormat,
    check_blocks,
    half_scale,
    inverted,
    stored,
)
from streamload.core.dtypes import DType


@dataclass(frozen=True)
class _Recipe:
    numel = BLOCK
    packing: Packing = "halves"
    header_nbytes = 2
    signed = True
    goes_through_half = False

    def scalars(self, one: Vector, largest: str) -> Scalars:
        d = one.op("fdiv", "float", largest, -8.0)
        half, kept, overflowed, inverse = half_scale(one, d)
        is_zero = one.op("fcmp oeq", "float", d, 0.0)
        is_usable = one.op("fcmp one", "float", inverse, 0.0)
        centre = one.select(one.op("or", "i1", is_zero, is_usable), "float", 8.5, 0.0)
        return Scalars((inverse, centre, kept), header=half, overflowed=overflowed)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        inverse, centre, d = scalars
        steps = v.op("fadd", "float", v.op("fmul", "float", x, inverse), centre)
        code = minimum(v, "i32", v.convert("fptosi", "float", steps, "i32"), 15)
        value = v.convert("sitofp", "i32", v.op("sub", "i32", code, 8), "float")
        return code, v.op("fmul", "float", value, d)


class Q40Blocks(GGUFBlocks):
    """A tensor as "q4_0"."""

    code_nbytes = BLOCK // 2

    @property
    def recipe(self) -> _Recipe:
        """See `quant.kernels.Recipe`."""
        return _Recipe()

    def encoded(self, x: Array) -> Encoded:
        """See `Units.encoded`."""
        first = np.abs(x).argmax(axis=1)[:, None]
        d = np.take_along_axis(x, first, axis=1) / np.float32(-8)
        inverse = inverted(d)
        centre = np.where((d == 0) | (inverse != 0), np.float32(8.5), np.float32(0))
        codes = np.minimum((x * inverse + centre).astype(np.int32), 15).astype(np.uint8)
        header, kept = stored(d)
        with np.errstate(invalid="ignore"):
            decoded = (codes.astype(np.float32) - 8) * kept
        low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
        both = np.concatenate([header, low | high << 4], axis=1)
        overflowed = BLOCK * int(np.count_nonzero(np.isinf(kept)))
        return Encoded(both, decoded, np.empty(0, np.float32), overflowed)

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """See `Quantised.decode`."""
        d, packed = self.blocks(parts)
        codes = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
        with np.errstate(invalid="ignore"):
            return self.shaped((codes - 8) * d)

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """A step, and 8 times the rounding of d to float16, subnormal or not."""
        d = np.abs(self.blocks(parts)[0].astype(np.float64))
        return self.shaped(d * (1 + 9 * 2.0**-11) + 9 * 2.0**-25)


@dataclass(frozen=True)
class Q40(GGUFFormat):
    """The format."""

    name: str = "q4_0"

    def of(self, shape: tuple[int, ...], src: DType) -> Q40Blocks:
        """See `Format.of`."""
        check_blocks(self.name, shape, src)
        return Q40Blocks(self.name, shape, src)


register(Q40())
