"""GGUF's block types, decoded, and some of them encoded, too.

Blocks of 32 (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL and MXFP4) are a float16 scale d, perhaps a
float16 minimum m, perhaps 32 bits that are the fifth bits of codes, and the codes: byte i has code
i in its low bits and code i + 16 in the others (Q8_0: signed bytes). An element is d times its
code, less 8 or 16, or plus m; IQ4_NL and MXFP4 have tables of values by code. MXFP4's scale is an
exponent: 2^(e - 128), since its table has doubled values.

Blocks of 256 (Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS) have 8 or 16 groups with a scale of a few
bits each, times the block's float16 d; three layouts have minima as well, times the block's float16
minimum. Elements are decoded 32 at a time: from consecutive bytes, at the same bits of each byte.

Source: gguf-py 0.19, the classes of these names in gguf/quants.py: layouts, tables, and the order
of float32 operations.

Encoding is that of ``quantize_row_*_ref`` and ``quantize_row_*_impl`` in ggml/src/ggml-quants.c of
llama.cpp, as in llama-cpp-python 0.3.36. Blocks are equal, byte for byte, if that is compiled
without contraction to FMA; for NaN and infinities see `encode`. A d beyond float16 is stored as
infinity, as there: the block's elements count as overflowed.

Q8_0: the scale d is the largest magnitude divided by 127; a code is an element times 1/d in
float32, to nearest, ties away from zero; d is stored as float16. Codes are 0 if d is 0, and if 1/d
is infinite (as numpy's cast makes of NaN on x86-64).

Q4_0: the scale d is the element of the largest magnitude (the first of several) divided by -8; a
code is an element times 1/d plus 8.5 in float32, truncated, at most 15. A block of zeros has the
codes 8, and a d of the other sign than its first zero. Codes are 0 if 1/d is infinite; d is 0 in
float16 then.

Q4_K and Q5_K: an affine search finds scale and minimum of each group of 32. An element's weight is
its magnitude plus the group's root mean square. Scales and minima are rounded to 6 bits, in units
of the block's largest divided by 63. Q6_K: a symmetric search finds the scale of each group of 16,
weighted by squares; scales are rounded to 8 bits. Then elements are rounded by these scales. A
group with a scale of 0 keeps the codes that the search found.

With an importance matrix, a weight for each column of the tensor, an element's weight is that of
its column times the root of its square plus twice the block's mean square (Q6_K: the column's
alone), and `search.positive` rounds the scales and the minima of Q4_K and Q5_K.

Q5_0 and Q5_1 are rounded in one step, as Q4_0 is. With an importance matrix a search finds their
scales; its weights have the mean square of the row, so a row is a unit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter
from streamload.codecs.encode import Encoded, Units, checked_numel, encode_units
from streamload.codecs.encode_kernels import Recipe, Scalars
from streamload.codecs.ir import NARROW, WIDEN, Vector, magnitude_bits, minimum, splat
from streamload.codecs.llvm import Engine, kernel_for
from streamload.codecs.parts import Array, QuantCounts, check_source
from streamload.codecs.scheme import Encoder, Library, Quantized
from streamload.codecs.search import LEAST, Fits, Search, extremes, nearest, peaks, positive, summed
from streamload.codecs.search_kernels import compile_search, searched
from streamload.core.dtypes import DType

#: Elements of a block.
BLOCK = WIDTH
#: IQ4_NL's values by code.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_HALF = WIDTH // 2
_NUMEL = 256  # elements of a block with groups
_PARTS = range(_NUMEL // WIDTH)
_TOP = np.float32(63)  # of scales and minima of 6 bits
_WEIGHTED = Search.affine(31, -0.9, 0.05, 36)
#: Finds the fits of groups, one a column, from their elements and weights.
_Find = Callable[[Array, Array], Fits]


def halves_of(blocks: Array, offset: int) -> Array:
    """Return the float16 at byte ``offset`` of each block, as a float32 column."""
    return blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32)


def _codes_of(blocks: Array, offset: int) -> Array:
    """Return the 4-bit codes of blocks: byte i has code i in its low bits, i + 16 in the high."""
    packed = blocks[:, offset:]
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _at_places(packed: Array, bits: int, width: int) -> Array:
    """Unpack codes: of each ``width`` bytes the lowest ``bits`` bits, then the next, and so on."""
    groups = packed.reshape(len(packed), -1, 1, width)
    places = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    found: Array = ((groups >> places) & (2**bits - 1)).reshape(len(packed), -1)
    return found


def _bits(b: BlockWriter, x: str, place: int, bits: int) -> str:
    """Write IR of the codes of ``bits`` bits from bit ``place`` on in `WIDTH` bytes."""
    v = b.wide
    shifted = v.op("lshr", "i8", x, place) if place else x
    return v.op("and", "i8", shifted, 2**bits - 1) if place + bits < 8 else shifted


def _parts(blocks: Array, d: Array, scales: Array) -> Array:
    """Return the scale of each element: the block's ``d`` times its group's scale."""
    return np.repeat(d * scales.astype(np.float32), _NUMEL // scales.shape[1], axis=1)


def _store_affine(b: BlockWriter, codes: str, scale: str, minimum: str) -> None:
    """Store elements: codes times ``scale`` less ``minimum``, which have a value per element."""
    v = b.wide
    product = v.op("fmul", "float", v.convert("sitofp", "i8", codes, "float"), scale)
    b.store(v.op("fsub", "float", product, minimum))


def six_bits(blocks: Array) -> tuple[Array, Array]:
    """Unpack the 8 scales and 8 minima of Q4_K and Q5_K, 6 bits each, from bytes 4 to 15."""
    a, b, c = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return (
        np.concatenate([a & 63, c & 15 | a >> 2 & 48], axis=1),
        np.concatenate([b & 63, c >> 4 | b >> 2 & 48], axis=1),
    )


def _six_bits_ir(b: BlockWriter) -> tuple[str, str]:
    """Write IR of the scales and minima of `six_bits` as float32, times the block's two scales."""
    four, eight = b.of(4), b.of(8)
    first, second = b.load(4, 4), b.load(8, 4)
    found = []
    for low, more, d in zip((first, second), b.halves(b.load(12, 4), 4), (0, 2), strict=True):
        high = four.op("and", "i8", four.op("lshr", "i8", low, 2), 48)
        both = b.joined(four.op("and", "i8", low, 63), four.op("or", "i8", more, high), 4)
        wide = eight.convert("sitofp", "i8", both, "float")
        found.append(eight.op("fmul", "float", wide, splat(eight, "float", b.half(d))))
    return found[0], found[1]


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


def _encoded(d: Array, codes: Array, values: Array) -> Encoded:
    """Join codes and scales ``d`` to blocks; ``values`` are the integers that codes stand for.

    All elements of a block whose scale is beyond float16 count as overflowed.
    """
    header, kept = stored(d)
    with np.errstate(invalid="ignore"):
        decoded = values * kept
    overflowed = BLOCK * int(np.count_nonzero(np.isinf(kept)))
    return Encoded(np.concatenate([header, codes], axis=1), decoded, overflowed=overflowed)


def _columns(x: Array, width: int) -> Array:
    """Return groups of ``width`` elements as columns."""
    return np.ascontiguousarray(x.reshape(-1, width).T)


def _weights(x: Array, importance: Array, factor: int) -> Array:
    """Return the weights of units, one a row; ``factor`` multiplies their mean squares."""
    squares = x * x
    total = np.add.accumulate(squares, axis=1)[:, -1:]  # in order, as `summed`
    mean = np.float32(factor) * total / np.float32(x.shape[1])
    found: Array = importance * np.sqrt(mean + squares)
    return found


def _packed(low: Array, high: Array) -> Array:
    """Return bytes of the low four bits of two codes each."""
    return low & 15 | high << 4


def _finished(blocks: list[Array], decoded: Array, *scales: Array) -> Encoded:
    """Join the fields of blocks; those with an infinite one of ``scales`` count as overflowed."""
    lost = np.isinf(np.stack(scales)).any(axis=0)
    count = int(np.count_nonzero(lost)) * (decoded.size // lost.size)
    return Encoded(np.concatenate(blocks, axis=1), decoded, overflowed=count)


def _to_six_bits(rows: Array) -> tuple[Array, Array]:
    """Round scales, a block a column; return uint8 of 6 bits, and the unit of each block."""
    top = np.fmax.reduce(rows, initial=0) + np.float32(0)  # which is no -0
    inverse = np.where(top > 0, _TOP / top, np.float32(0))
    return np.minimum(nearest(inverse * rows) & 255, 63).astype(np.uint8), top / _TOP


def _halves(codes: Array) -> list[Array]:
    """Return the fifth bits and the low bits of codes of 5 bits, blocks of 32."""
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return [fifth, _packed(codes[:, :16], codes[:, 16:])]


class _Searched(Blocks):
    """Blocks whose scales are searched for; `Quantized.importance` weighs the elements."""

    takes_importance = True
    by_rows = False  # whether a unit is a row
    searches: tuple[Search, Search]  # without importance, and with it

    @abstractmethod
    def searched(self, x: Array, importance: Array | None, find: _Find) -> Encoded:
        """Quantize finite float32 units, one a row, in numpy."""

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        made = super().of(shape, src)
        if not self.by_rows:
            return made
        return replace(made, unit_numel=shape[-1], unit_nbytes=self.dtype.nbytes(shape[-1]))

    def search(self, tensor: Quantized) -> Search:
        """Return the search for the scales of a tensor's groups."""
        return self.searches[tensor.importance is not None]

    def encoder(self, tensor: Quantized, src: DType, engine: Engine) -> Encoder:
        check_source(self.name, tensor.shape, src)
        return _Encoder(self, tensor, src, engine)


class _Encoder(Encoder):
    """Encodes by a search with a kernel, if it can be compiled, and the rest in numpy."""

    def __init__(self, codec: _Searched, tensor: Quantized, src: DType, engine: Engine) -> None:
        self._codec, self._tensor, self._src = codec, tensor, src
        search = codec.search(tensor)
        kernel = kernel_for(engine, lambda: compile_search(search, codec.name))
        self._find = partial(searched, kernel, search)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor = self._tensor
        checked_numel(tensor, self._src, data, out, first)
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)

        def encoded(x: Array, unit: int) -> Encoded:
            weights = self._importance(first // tensor.unit_numel + unit, len(x))
            return self._codec.searched(x, weights, self._find)

        return encode_units(tensor, self._src, source, target, encoded)

    def finish(self) -> dict[str, memoryview]:
        return {}

    def _importance(self, first: int, units: int) -> Array | None:
        """Return the weights of some units' elements, a row each; None without importance."""
        found = self._tensor.importance
        if found is None:
            return None
        tensor = self._tensor
        each = found.reshape(len(found), -1, tensor.unit_numel)
        units_of_matrix = tensor.units // len(found)
        numbers = np.arange(first, first + units)
        return each[numbers // units_of_matrix, numbers % each.shape[1]]


# --- blocks of 32 ---


class _Linear(Blocks):
    """Codes of 4 or 5 bits that are numbers: Q4_1, and the base of Q4_0, Q5_0 and Q5_1."""

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


class _Q80(Blocks, Units):
    recipe = _Q80Recipe()

    def decoded(self, blocks: Array) -> Array:
        return halves_of(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)

    def instructions(self, b: BlockWriter) -> None:
        b.store(b.scaled(b.load(2, WIDTH), b.half(0), WIDTH))

    def encoded(self, x: Array) -> Encoded:
        d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
        steps = x * inverted(d)
        length = np.abs(steps)
        whole = np.floor(length)
        codes = np.copysign(whole + np.floor(2 * (length - whole)), steps).astype(np.int8)
        return _encoded(d, codes.view(np.uint8), codes.astype(np.float32))


class _Q40(_Linear, Units):
    recipe = _Q40Recipe()

    def encoded(self, x: Array) -> Encoded:
        first = np.abs(x).argmax(axis=1)[:, None]
        d = np.take_along_axis(x, first, axis=1) / np.float32(-8)
        inverse = inverted(d)
        centre = np.where((d == 0) | (inverse != 0), np.float32(8.5), np.float32(0))
        codes = np.minimum((x * inverse + centre).astype(np.int32), 15).astype(np.uint8)
        low, high = codes[:, : BLOCK // 2], codes[:, BLOCK // 2 :]
        return _encoded(d, low | high << 4, codes.astype(np.float32) - 8)


class _Q50(_Linear, _Searched):
    by_rows = True
    searches = 2 * (Search.symmetric(16),)

    def searched(self, x: Array, importance: Array | None, find: _Find) -> Encoded:
        blocks = x.reshape(-1, 32)
        if importance is None:
            d = peaks(blocks, 1) / np.float32(-16)
            inverse = inverted(d)
            centre = np.where((d == 0) | (inverse != 0), np.float32(16.5), np.float32(0))
            codes = np.minimum((blocks * inverse + centre).astype(np.int32), 31).astype(np.uint8)
        else:
            fits = find(_columns(x, 32), _columns(_weights(x, importance, 1), 32))
            d, slope = fits.scale[:, None], fits.slope[:, None]
            codes = (np.clip(nearest(slope * blocks), -16, 15) + 16).astype(np.uint8)
            codes = np.where(slope == 0, np.uint8(0), codes)
        bits, kept = stored(d)
        return _finished([bits, *_halves(codes)], kept * (codes.astype(np.float32) - 16), kept)


class _Q51(_Linear, _Searched):
    by_rows = True
    searches = 2 * (_WEIGHTED,)

    def searched(self, x: Array, importance: Array | None, find: _Find) -> Encoded:
        blocks = x.reshape(-1, 32)
        if importance is None:
            low, high = extremes(blocks, 1)
            d = (high - low) / np.float32(31)
            steps = (blocks - low) * inverted(d) + np.float32(0.5)
            codes = np.where(np.isfinite(steps), steps, 0).astype(np.uint8)
        else:
            fits = find(_columns(x, 32), _columns(_weights(x, importance, 1), 32))
            d, low = fits.scale[:, None], fits.low[:, None]
            slope, offset = fits.slope[:, None], fits.offset[:, None]
            codes = np.clip(nearest(slope * (blocks - offset)), 0, 31).astype(np.uint8)
        (bits, kept), (low_bits, lows) = stored(d), stored(low)
        decoded = kept * codes.astype(np.float32) + lows
        return _finished([bits, low_bits, *_halves(codes)], decoded, kept, lows)


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


# --- blocks of 256 ---


class _Q2K(Blocks):
    def decoded(self, blocks: Array) -> Array:
        scales = _parts(blocks, halves_of(blocks, 80), blocks[:, :16] & 15)
        minima = _parts(blocks, halves_of(blocks, 82), blocks[:, :16] >> 4)
        found: Array = scales * _at_places(blocks[:, 16:80], 2, 32).astype(np.float32) - minima
        return found

    def instructions(self, b: BlockWriter) -> None:
        low, high = b.halves(b.load(0, 16), 16)
        scales, minima = b.scaled(low, b.half(80), 16), b.scaled(high, b.half(82), 16)
        packed = [b.load(16 + 32 * group, WIDTH) for group in range(2)]
        for part in _PARTS:
            codes = _bits(b, packed[part // 4], 2 * (part % 4), 2)
            each = (b.spread(x, 16, 2 * part, 16) for x in (scales, minima))
            _store_affine(b, codes, *each)


class _Q3K(Blocks):
    def decoded(self, blocks: Array) -> Array:
        low = _at_places(blocks[:, 96:104], 4, 8)
        high = _at_places(blocks[:, 104:108], 2, 4)
        scales = (low | high << 4).astype(np.int8) - np.int8(32)
        lacks = _at_places(blocks[:, :32], 1, 32) == 0
        codes = _at_places(blocks[:, 32:96], 2, 32).astype(np.float32) - 4 * lacks
        found: Array = _parts(blocks, halves_of(blocks, 108), scales) * codes.astype(np.float32)
        return found

    def instructions(self, b: BlockWriter) -> None:
        v, sixteen = b.wide, b.of(16)
        low = b.joined(*b.halves(b.load(96, 8), 8), 8)
        four = b.load(104, 4)
        high = b.picked(four, four, "i8", 4, [at % 4 for at in range(16)])
        high = b.shifted(high, [2 * (at // 4) for at in range(16)])
        high = sixteen.op("shl", "i8", sixteen.op("and", "i8", high, 3), 4)
        scales = sixteen.op("sub", "i8", sixteen.op("or", "i8", low, high), 32)
        scales = b.scaled(scales, b.half(108), 16)
        mask = b.load(0, WIDTH)
        packed = [b.load(32 + 32 * group, WIDTH) for group in range(2)]
        for part in _PARTS:
            codes = _bits(b, packed[part // 4], 2 * (part % 4), 2)
            third = v.op("shl", "i8", _bits(b, mask, part, 1), 2)
            codes = v.op("sub", "i8", v.op("or", "i8", codes, third), 4)
            wide = v.convert("sitofp", "i8", codes, "float")
            b.store(v.op("fmul", "float", wide, b.spread(scales, 16, 2 * part, 16)))


class _Q4K(_Searched):
    """Q4_K; and Q5_K, whose codes have a fifth bit."""

    def __init__(self, name: str, plain: Search, weighted: Search, *, fifth: bool) -> None:
        super().__init__(name)
        self.searches = plain, weighted
        self._fifth = fifth
        self._codes = 48 if fifth else 16

    def decoded(self, blocks: Array) -> Array:
        scales, minima = six_bits(blocks)
        codes = _at_places(blocks[:, self._codes :], 4, 32)
        if self._fifth:
            codes |= _at_places(blocks[:, 16:48], 1, 32) << 4
        products = _parts(blocks, halves_of(blocks, 0), scales) * codes.astype(np.float32)
        return products - _parts(blocks, halves_of(blocks, 2), minima)

    def instructions(self, b: BlockWriter) -> None:
        v = b.wide
        scales, minima = _six_bits_ir(b)
        high = b.load(16, WIDTH) if self._fifth else ""
        for part in _PARTS:
            if part % 2 == 0:
                packed = b.load(self._codes + 16 * part, WIDTH)
            codes = _bits(b, packed, 4 * (part % 2), 4)
            if self._fifth:
                codes = v.op("or", "i8", codes, v.op("shl", "i8", _bits(b, high, part, 1), 4))
            _store_affine(b, codes, *(b.spread(x, 8, part, WIDTH) for x in (scales, minima)))

    def searched(self, x: Array, importance: Array | None, find: _Find) -> Encoded:
        columns = _columns(x, 32)
        if importance is None:
            mean = summed(columns * columns) / np.float32(32)
            weights = np.sqrt(mean) + np.abs(columns)
        else:
            weights = _columns(_weights(x, importance, 2), 32)
        fits = find(columns, weights)
        by_block = [a.reshape(-1, 8).T for a in (fits.scale, -fits.low)]
        if importance is None:
            (scales, d), (minima, least) = map(_to_six_bits, by_block)
        else:
            sums = summed(weights).reshape(-1, 8).T
            both, found = positive(np.concatenate(by_block, axis=1), np.tile(sums, 2), 63)
            (scales, minima), (d, least) = np.split(both, 2, axis=1), np.split(found, 2)
            if self._fifth:
                scales, minima = np.minimum(scales, 63), np.minimum(minima, 63)
        scales, minima = scales.T, minima.T
        bits, units = zip(stored(d), stored(least), strict=True)
        head = [*bits]
        head += [each[:, :4] | each[:, 4:] >> 4 << 6 for each in (scales, minima)]
        header = np.concatenate([*head, _packed(scales[:, 4:], minima[:, 4:])], axis=1)
        steps, lows = (
            (unit[:, None] * six.astype(np.float32))[..., None]
            for unit, six in zip(units, six_bits(header), strict=True)
        )
        groups = x.reshape(-1, 8, 32)
        codes = np.clip(nearest((groups + lows) / steps), 0, 31 if self._fifth else 15).astype(
            np.uint8
        )
        lost = steps[..., 0] == 0
        if lost.any():
            slope, offset = (a.reshape(-1, 8)[lost, None] for a in (fits.slope, fits.offset))
            codes[lost] = np.clip(
                nearest(slope * (groups[lost] - offset)), 0, 31 if self._fifth else 15
            )
        fields = [header, _packed(codes[:, ::2], codes[:, 1::2]).reshape(-1, 128)]
        if self._fifth:
            high = np.packbits(codes >> 4, axis=1, bitorder="little")
            fields.insert(1, high.reshape(-1, 32))
        return _finished(fields, steps * codes.astype(np.float32) - lows, *units)


class _Q6K(_Searched):
    searches = 2 * (Search.symmetric(32),)

    def decoded(self, blocks: Array) -> Array:
        low = _at_places(blocks[:, :128], 4, 64)
        high = _at_places(blocks[:, 128:192], 2, 32)
        codes = (low | high << 4).astype(np.int8) - np.int8(32)
        scales = blocks[:, 192:208].view(np.int8)
        found: Array = _parts(blocks, halves_of(blocks, 208), scales) * codes.astype(np.float32)
        return found

    def instructions(self, b: BlockWriter) -> None:
        v = b.wide
        scales = b.scaled(b.load(192, 16), b.half(208), 16)
        for group in range(2):
            packed = [b.load(64 * group + 32 * side, WIDTH) for side in range(2)]
            more = b.load(128 + 32 * group, WIDTH)
            for place in range(4):
                low = _bits(b, packed[place % 2], 4 * (place // 2), 4)
                high = v.op("shl", "i8", _bits(b, more, 2 * place, 2), 4)
                codes = v.op("sub", "i8", v.op("or", "i8", low, high), 32)
                wide = v.convert("sitofp", "i8", codes, "float")
                scale = b.spread(scales, 16, 2 * (4 * group + place), 16)
                b.store(v.op("fmul", "float", wide, scale))

    def searched(self, x: Array, importance: Array | None, find: _Find) -> Encoded:
        columns = _columns(x, 16)
        weights = columns * columns if importance is None else _columns(importance, 16)
        fits = find(columns, weights)
        scales = fits.scale.reshape(-1, 16)
        peak = peaks(np.where(np.isnan(scales), np.float32(0), scales), 1)
        is_zero = np.abs(peak) < LEAST
        slope = np.where(is_zero, np.float32(0), np.float32(-128) / peak)
        d = np.where(is_zero, np.float32(0), np.float32(1) / slope)
        rounded = np.minimum(nearest(slope * scales), 127).astype(np.int8)
        bits, kept = stored(d)
        steps = (kept * rounded.astype(np.float32))[..., None]
        groups = x.reshape(-1, 16, 16)
        codes = (np.clip(nearest(groups / steps), -32, 31) + 32).astype(np.uint8)
        lost = steps[..., 0] == 0
        if lost.any():
            slope = fits.slope.reshape(-1, 16)[lost, None]
            found = np.clip(nearest(slope * groups[lost]), -32, 31) + 32
            codes[lost] = np.where((slope == 0) | is_zero.repeat(16, axis=1)[lost, None], 0, found)
        decoded = steps * (codes.view(np.int8) - np.int8(32)).astype(np.float32)
        quarters = codes.reshape(-1, 2, 4, 32)
        low = _packed(quarters[:, :, :2], quarters[:, :, 2:]).reshape(-1, 128)
        places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        high = np.bitwise_or.reduce(quarters >> 4 << places, axis=2).reshape(-1, 64)
        return _finished([low, high, rounded.view(np.uint8), bits], decoded, kept)


class _IQ4XS(Blocks):
    def decoded(self, blocks: Array) -> Array:
        low = _at_places(blocks[:, 4:8], 4, 1)
        high = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
        scales = (low | (high.astype(np.uint8) & 3) << 4).astype(np.int8) - np.int8(32)
        values = np.array(NONLINEAR, np.float32)[_at_places(blocks[:, 8:], 4, 16)]
        return _parts(blocks, halves_of(blocks, 0), scales) * values

    def instructions(self, b: BlockWriter) -> None:
        eight, v = b.of(8), b.wide
        both = b.halves(b.load(4, 4), 4)
        low = b.picked(*both, "i8", 4, [at // 2 + 4 * (at % 2) for at in range(8)])
        high = splat(eight, "i16", b.load(2, of="i16"))
        high = eight.convert("trunc", "i16", b.shifted(high, range(0, 16, 2), "i16"), "i8")
        high = eight.op("shl", "i8", eight.op("and", "i8", high, 3), 4)
        scales = b.scaled(eight.op("sub", "i8", eight.op("or", "i8", low, high), 32), b.half(0), 8)
        for part in _PARTS:
            codes = b.joined(*b.halves(b.load(8 + 16 * part, 16), 16), 16)
            wide = v.convert("sitofp", "i8", b.chosen(codes, NONLINEAR), "float")
            b.store(v.op("fmul", "float", wide, b.spread(scales, 8, part, WIDTH)))


LIBRARY = Library(
    _Q40("q4_0", fifth=False, least=-8),
    _Linear("q4_1", fifth=False, least=None),
    _Q50("q5_0", fifth=True, least=-16),
    _Q51("q5_1", fifth=True, least=None),
    _Q80("q8_0"),
    _ByTable("iq4_nl", NONLINEAR, exponents=False),
    _ByTable("gguf-mxfp4", _DOUBLED, exponents=True),
    _Q2K("q2_k"),
    _Q3K("q3_k"),
    _Q4K("q4_k", Search.affine(15, -1, 0.1, 20), Search.affine(15, -0.9, 0.05, 36), fifth=False),
    _Q4K("q5_k", Search.affine(31, -0.5, 0.1, 15), _WEIGHTED, fifth=True),
    _Q6K("q6_k"),
    _IQ4XS("iq4_xs"),
)
