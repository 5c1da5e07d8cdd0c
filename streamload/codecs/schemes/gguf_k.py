"""GGUF's blocks of 256 elements: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS.

A block has 8 or 16 groups with a scale of a few bits each, times the block's float16 d; three
layouts have minima as well, times the block's float16 minimum. Elements are decoded 32 at a time:
from consecutive bytes, at the same bits of each byte.

Source: gguf-py 0.19, the classes of these names in gguf/quants.py: layouts, and the order of
float32 operations. See `decode_blocks`.
"""

from __future__ import annotations

import numpy as np

from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter
from streamload.codecs.ir import splat
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Library
from streamload.codecs.schemes.gguf import NONLINEAR, halves_of

_NUMEL = 256
_PARTS = range(_NUMEL // WIDTH)


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


class _Q4K(Blocks):
    """Q4_K; and Q5_K, whose codes have a fifth bit."""

    def __init__(self, name: str, *, fifth: bool) -> None:
        """Describe a layout; ``fifth``: whether codes have a fifth bit."""
        super().__init__(name)
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


class _Q6K(Blocks):
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


_LAYOUTS: tuple[Blocks, ...] = (
    *(_Q2K("q2_k"), _Q3K("q3_k"), _Q4K("q4_k", fifth=False), _Q4K("q5_k", fifth=True)),
    *(_Q6K("q6_k"), _IQ4XS("iq4_xs")),
)
LIBRARY = Library(layouts={layout.name: layout for layout in _LAYOUTS})
