"""GGUF's Q8_0: blocks of 32 elements of a row, each a float16 scale and 32 signed bytes.

Layout and arithmetic are those of gguf-py 0.19 (`gguf.quants.Q8_0`), bit for bit, which are those
of ``quantize_row_q8_0_ref`` in ggml-quants.c: the scale d is the largest magnitude divided by 127;
a code is an element times 1/d in float32, to nearest, ties away from zero; d is stored as float16.
Codes are 0 where d is 0, and where 1/d is infinite (as numpy's cast makes of NaN on x86-64). Where
d is beyond float16 it is stored as infinity, as there: the block's elements count as overflowed.

Error: half a step of d, and what rounding d to float16 does to the largest code of 127.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.codecs.cast import NARROW, WIDEN, Vector
from streamload.codecs.encode import Encoded, Units
from streamload.codecs.kernels import Packing, Scalars, magnitude_bits
from streamload.codecs.scheme import Array, Part, check_source, register
from streamload.core.dtypes import BY_CODE, DType

BLOCK = 32
_NEARLY_HALF = float(np.nextafter(np.float32(0.5), np.float32(0)))
_INFINITE = 0x7F800000


def half_scale(one: Vector, d: str) -> tuple[str, str, str, str]:
    """A block's scale as float16, as that decodes, where it is infinite, and 1/d or 0."""
    half = NARROW["F16"](one, one.convert("bitcast", "float", d, "i32"))
    kept = one.convert("bitcast", "i32", WIDEN["F16"](one, half), "float")
    overflowed = one.op("icmp eq", "i32", magnitude_bits(one, kept), _INFINITE)
    inverse = one.op("fdiv", "float", 1.0, d)
    is_infinite = one.op("icmp eq", "i32", magnitude_bits(one, inverse), _INFINITE)
    return half, kept, overflowed, one.select(is_infinite, "float", 0.0, inverse)


def inverted(d: Array) -> Array:
    """1/d in float32, or 0 where that is infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def stored(d: Array) -> tuple[Array, Array]:
    """Scales as the bytes of float16, one row each, and as those decode."""
    with np.errstate(over="ignore"):
        half = d.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float32)


@dataclass(frozen=True)
class _Recipe:
    numel = BLOCK
    packing: Packing = "bytes"
    header_nbytes = 2
    signed = False
    goes_through_half = False

    def scalars(self, one: Vector, largest: str) -> Scalars:
        d = one.op("fdiv", "float", largest, 127.0)
        half, kept, overflowed, inverse = half_scale(one, d)
        return Scalars((inverse, kept), header=half, overflowed=overflowed)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        inverse, d = scalars
        steps = v.op("fmul", "float", x, inverse)
        # truncating after adding the float32 before 1/2 rounds to nearest, ties away from zero
        sign = v.op("and", "i32", v.convert("bitcast", "float", steps, "i32"), -(1 << 31))
        nearly = v.op("or", "i32", sign, _bits(_NEARLY_HALF))
        raised = v.op("fadd", "float", steps, v.convert("bitcast", "i32", nearly, "float"))
        code = v.convert("fptosi", "float", raised, "i32")
        value = v.convert("sitofp", "i32", code, "float")
        return code, v.op("fmul", "float", value, d)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


class GGUFBlocks(Units):
    """What both formats share: blocks of 32 along the last axis, and one part."""

    code_nbytes: int  # of a block, beside the scale

    @property
    def unit_numel(self) -> int:
        """Elements of a block."""
        return BLOCK

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a block: the scale, and the codes."""
        return 2 + self.code_nbytes

    @property
    def parts(self) -> tuple[Part, ...]:
        """The rows of blocks, as bytes: GGUF's own form."""
        *rows, last = self.shape
        return (Part("", BY_CODE["U8"], (*rows, last // BLOCK * self.unit_nbytes)),)

    def blocks(self, parts: Mapping[str, Any]) -> tuple[Array, Array]:
        """The scales as a float32 column, and the bytes of codes, a block a row."""
        rows = self.part(parts, "").reshape(-1, self.unit_nbytes)
        return rows[:, :2].copy().view(np.float16).astype(np.float32), rows[:, 2:]

    def shaped(self, rows: Array) -> Array:
        """Blocks of values in the tensor's shape."""
        return np.broadcast_to(rows, (rows.shape[0], BLOCK)).reshape(self.shape)


def check_blocks(name: str, shape: tuple[int, ...], src: DType) -> None:
    """Check that a tensor can be cut into blocks.

    Raises:
        ValueError: it cannot.
    """
    check_source(name, shape, src)
    if not shape or shape[-1] % BLOCK:
        raise ValueError(
            f"{name} has blocks of {BLOCK} elements along the last axis, which does not divide "
            f"shape {shape}"
        )


class Q80Blocks(GGUFBlocks):
    """A tensor as "q8_0"."""

    code_nbytes = BLOCK

    @property
    def recipe(self) -> _Recipe:
        """See `quant.kernels.Recipe`."""
        return _Recipe()

    def encoded(self, x: Array) -> Encoded:
        """See `Units.encoded`."""
        d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        steps = x * inverted(d)
        length = np.abs(steps)
        whole = np.floor(length)
        codes = np.copysign(whole + np.floor(2 * (length - whole)), steps).astype(np.int8)
        header, kept = stored(d)
        with np.errstate(invalid="ignore"):
            decoded = codes.astype(np.float32) * kept
        both = np.concatenate([header, codes.view(np.uint8)], axis=1)
        overflowed = BLOCK * int(np.count_nonzero(np.isinf(kept)))
        return Encoded(both, decoded, np.empty(0, np.float32), overflowed)

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """See `Quantised.decode`."""
        d, codes = self.blocks(parts)
        with np.errstate(invalid="ignore"):
            return self.shaped(codes.view(np.int8).astype(np.float32) * d)

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """Half a step, and 127 times the rounding of d to float16, subnormal or not."""
        d = self.blocks(parts)[0].astype(np.float64)
        return self.shaped(d * (0.5 + 128 * 2.0**-11 + 2.0**-10) + 128 * 2.0**-25)


class GGUFFormat:
    """What both formats share: transformers reads these formats from GGUF files alone."""

    turns_conv1d = False

    def config(self, left: Sequence[str], dtype: str) -> None:
        """See `Format.config`."""


@dataclass(frozen=True)
class Q80(GGUFFormat):
    """The format."""

    name: str = "q8_0"

    def of(self, shape: tuple[int, ...], src: DType) -> Q80Blocks:
        """See `Format.of`."""
        check_blocks(self.name, shape, src)
        return Q80Blocks(self.name, shape, src)


register(Q80())
