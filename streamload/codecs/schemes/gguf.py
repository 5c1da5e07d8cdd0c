"""GGUF's blocks of 32: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4; Q8_0 and Q4_0 are encoded, too.

Each is a float16 scale d, perhaps a float16 minimum m, perhaps 32 bits that are the fifth bits of
codes, and the codes: byte i has code i in its low bits and code i + 16 in the others (Q8_0: signed
bytes). An element is d times its code, less 8 or 16, or plus m; IQ4_NL and MXFP4 have tables of
values by code. MXFP4's scale is an exponent: 2^(e - 128), since its table has doubled values.

Source: gguf-py 0.19, the classes of these names in gguf/quants.py: layouts, tables, and the order
of float32 operations. Encoding, bit for bit, is that of ``quantize_row_q8_0_ref`` and
``quantize_row_q4_0_ref`` in ggml-quants.c, too:

Q8_0: the scale d is the largest magnitude divided by 127; a code is an element times 1/d in
float32, to nearest, ties away from zero; d is stored as float16. Codes are 0 if d is 0, and if 1/d
is infinite (as numpy's cast makes of NaN on x86-64).

Q4_0: the scale d is the element of the largest magnitude (the first of several) divided by -8; a
code is an element times 1/d plus 8.5 in float32, truncated, at most 15. A block of zeros has the
codes 8, and a d of the other sign than its first zero. Codes are 0 if 1/d is infinite; d is 0 in
float16 then.

A d beyond float16 is stored as infinity, as there: the block's elements count as overflowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter
from streamload.codecs.encode import Encoded, StoredBlocks, Units
from streamload.codecs.encode_kernels import Recipe, Scalars
from streamload.codecs.ir import NARROW, WIDEN, Vector, magnitude_bits, minimum, splat
from streamload.codecs.parts import Array, check_source
from streamload.codecs.scheme import Library, Scheme
from streamload.core.dtypes import DType

#: Elements of a block.
BLOCK = WIDTH
#: IQ4_NL's values by code.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_HALF = WIDTH // 2


def halves_of(blocks: Array, offset: int) -> Array:
    """Return the float16 at byte ``offset`` of each block, as a float32 column."""
    return blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32)


def _codes_of(blocks: Array, offset: int) -> Array:
    """Return the 4-bit codes of blocks: byte i has code i in its low bits, i + 16 in the high."""
    packed = blocks[:, offset:]
    return np.concatenate([packed & 15, packed >> 4], axis=1)


class _Linear(Blocks):
    """Blocks of 4- or 5-bit codes that are numbers: Q4_0, Q4_1, Q5_0 and Q5_1."""

    def __init__(self, name: str, *, fifth: bool, least: int | None) -> None:
        """Describe a layout; ``least`` is the integer of code 0, None if blocks store a minimum."""
        super().__init__(name)
        self._fifth, self._least = fifth, least
        self._high = 2 if least is not None else 4  # offset of fifth bits
        self._codes = self._high + 4 * fifth

    def decoded(self, blocks: Array) -> Array:
        codes = _codes_of(blocks, self._codes)
        if self._fifth:
            high = np.unpackbits(blocks[:, self._high : self._codes], axis=1, bitorder="little")
            codes |= high << 4
        values = codes.astype(np.float32)
        d = halves_of(blocks, 0)
        if self._least is None:
            return d * values + halves_of(blocks, 2)
        return d * (values + self._least)

    def instructions(self, b: BlockWriter) -> None:
        v = b.wide
        codes = b.joined(*b.halves(b.load(self._codes, _HALF), _HALF), _HALF)
        if self._fifth:
            codes = v.op("or", "i8", codes, v.select(b.flags(self._high), "i8", 16, 0))
        if self._least is not None:
            b.store(b.scaled(v.op("add", "i8", codes, self._least), b.half(0), WIDTH))
        else:
            product = b.scaled(codes, b.half(0), WIDTH)
            b.store(v.op("fadd", "float", product, splat(v, "float", b.half(2))))


class _SignedBytes(Blocks):
    def decoded(self, blocks: Array) -> Array:
        return halves_of(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)

    def instructions(self, b: BlockWriter) -> None:
        b.store(b.scaled(b.load(2, WIDTH), b.half(0), WIDTH))


class _ByTable(Blocks):
    """Blocks of 4-bit codes that a table maps to numbers: IQ4_NL and MXFP4."""

    def __init__(self, name: str, table: tuple[int, ...], *, exponents: bool) -> None:
        """Describe a layout; ``exponents``: scales are exponents of one byte, else float16."""
        super().__init__(name)
        self._table, self._exponents = table, exponents
        self._codes = 1 if exponents else 2

    def decoded(self, blocks: Array) -> Array:
        codes = _codes_of(blocks, self._codes)
        values = np.array(self._table, np.float32)[codes]
        d = halves_of(blocks, 0)
        if self._exponents:
            d = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        return d * values

    def instructions(self, b: BlockWriter) -> None:
        codes = b.joined(*b.halves(b.load(self._codes, _HALF), _HALF), _HALF)
        d = _exponent(b) if self._exponents else b.half(0)
        b.store(b.scaled(b.chosen(codes, self._table), d, WIDTH))


def _exponent(b: BlockWriter) -> str:
    """Write IR of 2^(b - 128) for the block's first byte b; results for 0 and 1 are subnormal."""
    one = b.one
    wide = one.convert("zext", "i8", b.load(0), "i32")
    normal = one.op("shl", "i32", one.op("sub", "i32", wide, 1), 23)
    subnormal = one.op("shl", "i32", 1 << 21, wide)
    is_subnormal = one.op("icmp ult", "i32", wide, 2)
    return one.as_float(one.select(is_subnormal, "i32", subnormal, normal))


_LAYOUTS: tuple[Blocks, ...] = (
    _Linear("q4_0", fifth=False, least=-8),
    _Linear("q4_1", fifth=False, least=None),
    _Linear("q5_0", fifth=True, least=-16),
    _Linear("q5_1", fifth=True, least=None),
    _SignedBytes("q8_0"),
    _ByTable("iq4_nl", NONLINEAR, exponents=False),
    _ByTable("gguf-mxfp4", _DOUBLED, exponents=True),
)
_BY_NAME = {layout.name: layout for layout in _LAYOUTS}


# --- encoding ---

_NEARLY_HALF = int(np.nextafter(np.float32(0.5), np.float32(0)).view(np.uint32))  # its bits
_INFINITE = 0x7F800000


def half_scale(one: Vector, d: str) -> tuple[str, str, str, str]:
    """Write IR that rounds a block's float32 scale ``d`` to float16.

    Returns the float16 bits, their value as float32, an i1 that is set if it is infinite, and 1/d,
    or 0 if that is infinite.
    """
    half = NARROW["F16"](one, one.as_bits(d))
    kept = one.as_float(WIDEN["F16"](one, half))
    overflowed = one.op("icmp eq", "i32", magnitude_bits(one, kept), _INFINITE)
    inverse = one.op("fdiv", "float", 1.0, d)
    is_infinite = one.op("icmp eq", "i32", magnitude_bits(one, inverse), _INFINITE)
    return half, kept, overflowed, one.select(is_infinite, "float", 0.0, inverse)


def inverted(d: Array) -> Array:
    """Return 1/d in float32, or 0 where that is infinite."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def stored(d: Array) -> tuple[Array, Array]:
    """Round float32 scales to float16; return the bytes, one scale a row, and their values."""
    with np.errstate(over="ignore"):
        half = d.astype(np.float16)
    return half.view(np.uint8).reshape(-1, 2), half.astype(np.float32)


@dataclass(frozen=True)
class _Q80Recipe(Recipe):
    numel = BLOCK
    header_nbytes = 2

    def scalars(self, one: Vector, largest: str) -> Scalars:
        d = one.op("fdiv", "float", largest, 127.0)
        half, kept, overflowed, inverse = half_scale(one, d)
        return Scalars((inverse, kept), header=half, overflowed=overflowed)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        inverse, d = scalars
        steps = v.op("fmul", "float", x, inverse)
        # truncating after adding the float32 before 1/2 rounds to nearest, ties away from zero
        sign = v.op("and", "i32", v.as_bits(steps), -(1 << 31))
        nearly = v.op("or", "i32", sign, _NEARLY_HALF)
        raised = v.op("fadd", "float", steps, v.as_float(nearly))
        code = v.convert("fptosi", "float", raised, "i32")
        value = v.convert("sitofp", "i32", code, "float")
        return code, v.op("fmul", "float", value, d)


@dataclass(frozen=True)
class _Q40Recipe(Recipe):
    numel = BLOCK
    packing = "halves"
    header_nbytes = 2
    signed = True

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


@dataclass(frozen=True)
class _Quantized(Units, StoredBlocks):
    """A tensor quantized by blocks of 32 along the last axis, stored as one array."""


def _encoded(d: Array, codes: Array, values: Array) -> Encoded:
    """Join codes and scales ``d`` to blocks; ``values`` are the integers that codes stand for.

    All elements of a block whose scale is beyond float16 count as overflowed.
    """
    header, kept = stored(d)
    with np.errstate(invalid="ignore"):
        decoded = values * kept
    overflowed = BLOCK * int(np.count_nonzero(np.isinf(kept)))
    return Encoded(np.concatenate([header, codes], axis=1), decoded, overflowed=overflowed)


class _Q80(_Quantized):
    recipe = _Q80Recipe()

    def encoded(self, x: Array) -> Encoded:
        d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        steps = x * inverted(d)
        length = np.abs(steps)
        whole = np.floor(length)
        codes = np.copysign(whole + np.floor(2 * (length - whole)), steps).astype(np.int8)
        return _encoded(d, codes.view(np.uint8), codes.astype(np.float32))


class _Q40(_Quantized):
    recipe = _Q40Recipe()

    def encoded(self, x: Array) -> Encoded:
        first = np.abs(x).argmax(axis=1)[:, None]
        d = np.take_along_axis(x, first, axis=1) / np.float32(-8)
        inverse = inverted(d)
        centre = np.where((d == 0) | (inverse != 0), np.float32(8.5), np.float32(0))
        codes = np.minimum((x * inverse + centre).astype(np.int32), 15).astype(np.uint8)
        low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
        return _encoded(d, low | high << 4, codes.astype(np.float32) - 8)


@dataclass(frozen=True)
class _Blocks(Scheme):
    """The scheme of a GGUF block type; transformers reads such blocks only from GGUF files."""

    name: str
    quantized: type[_Quantized]
    transposes_conv1d = True

    def of(self, shape: tuple[int, ...], src: DType) -> _Quantized:
        check_source(self.name, shape, src)
        return self.quantized(self.name, shape, src)


LIBRARY = Library(_Blocks("q8_0", _Q80), _Blocks("q4_0", _Q40), layouts=_BY_NAME)
