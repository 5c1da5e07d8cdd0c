"""GGUF's blocks of 32 elements: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL and MXFP4.

Each is a float16 scale d, perhaps a float16 minimum m, perhaps 32 bits that are the fifth bits of
codes, and the codes: byte i has code i in its low bits and code i + 16 in the others (Q8_0: signed
bytes). An element is d times its code, less 8 or 16, or plus m; by IQ4_NL's and MXFP4's tables the
code stands for another number. MXFP4's scale is an exponent: 2^(e - 128), since its table has
doubled values.

Source: gguf-py 0.19, the classes of these names in gguf/quants.py: layouts, tables, and the order
of float32 operations. See `dequant_blocks`.
"""

from __future__ import annotations

import numpy as np

from streamload.codecs.decode import register
from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter, Bytes
from streamload.codecs.kernels import splat
from streamload.codecs.scheme import Array

#: What IQ4_NL's codes stand for.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_HALF = WIDTH // 2


def halves_of(blocks: Bytes, offset: int) -> Array:
    """A column of float16 in blocks, as float32."""
    found: Array = blocks[:, offset : offset + 2].copy().view("<f2").astype(np.float32)
    return found


class _Linear(Blocks):
    """Codes of 4 or 5 bits, times a scale."""

    numel = WIDTH

    def __init__(self, name: str, *, fifth: bool, least: int | None) -> None:
        """Describe a layout.

        Args:
            name: its name.
            fifth: codes have a fifth bit.
            least: what code 0 stands for; None where blocks have a minimum.
        """
        self.name, self._fifth, self._least = name, fifth, least
        self._high = 2 if least is not None else 4  # where fifth bits are
        self._codes = self._high + 4 * fifth
        self.nbytes = self._codes + _HALF

    def decoded(self, blocks: Bytes) -> Array:
        """See `Blocks.decoded`."""
        packed = blocks[:, self._codes :]
        codes = np.concatenate([packed & 15, packed >> 4], axis=1)
        if self._fifth:
            high = np.unpackbits(blocks[:, self._high : self._codes], axis=1, bitorder="little")
            codes |= high << 4
        values = codes.astype(np.float32)
        d = halves_of(blocks, 0)
        return (
            d * (values + self._least)
            if self._least is not None
            else (d * values + halves_of(blocks, 2))
        )

    def instructions(self, b: BlockWriter) -> None:
        """See `Blocks.instructions`."""
        v = b.wide
        codes = b.joined(*b.halves(b.load(self._codes, _HALF), _HALF), _HALF)
        if self._fifth:
            bits = b.load(self._high, of="i32")
            is_set = v.emit(f"bitcast i32 {bits} to {v.type('i1')}")
            codes = v.op("or", "i8", codes, v.select(is_set, "i8", 16, 0))
        if self._least is not None:
            b.store(b.scaled(v.op("add", "i8", codes, self._least), b.half(0), WIDTH))
        else:
            product = b.scaled(codes, b.half(0), WIDTH)
            b.store(v.op("fadd", "float", product, splat(v, "float", b.half(2))))


class _Q80(Blocks):
    name = "q8_0"
    numel, nbytes = WIDTH, 2 + WIDTH

    def decoded(self, blocks: Bytes) -> Array:
        """See `Blocks.decoded`."""
        return halves_of(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)

    def instructions(self, b: BlockWriter) -> None:
        """See `Blocks.instructions`."""
        b.store(b.scaled(b.load(2, WIDTH), b.half(0), WIDTH))


class _ByTable(Blocks):
    """Codes of 4 bits that stand for other numbers, times a scale."""

    numel = WIDTH

    def __init__(self, name: str, table: tuple[int, ...], *, exponents: bool) -> None:
        """Describe a layout; scales are float16, or exponents of one byte."""
        self.name, self._table, self._exponents = name, table, exponents
        self._codes = 1 if exponents else 2
        self.nbytes = self._codes + _HALF

    def decoded(self, blocks: Bytes) -> Array:
        """See `Blocks.decoded`."""
        packed = blocks[:, self._codes :]
        codes = np.concatenate([packed & 15, packed >> 4], axis=1)
        values = np.array(self._table, np.float32)[codes]
        d = halves_of(blocks, 0)
        if self._exponents:
            d = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
        found: Array = d * values
        return found

    def instructions(self, b: BlockWriter) -> None:
        """See `Blocks.instructions`."""
        codes = b.joined(*b.halves(b.load(self._codes, _HALF), _HALF), _HALF)
        d = _exponent(b) if self._exponents else b.half(0)
        b.store(b.scaled(b.chosen(codes, self._table), d, WIDTH))


def _exponent(b: BlockWriter) -> str:
    """Two to the power of the block's first byte, less 128; the least two are subnormal."""
    one = b.one
    wide = one.convert("zext", "i8", b.load(0), "i32")
    normal = one.op("shl", "i32", one.op("sub", "i32", wide, 1), 23)
    subnormal = one.op("shl", "i32", 1 << 21, wide)
    is_subnormal = one.op("icmp ult", "i32", wide, 2)
    return one.convert(
        "bitcast", "i32", one.select(is_subnormal, "i32", subnormal, normal), "float"
    )


for _layout in (
    _Linear("q4_0", fifth=False, least=-8),
    _Linear("q4_1", fifth=False, least=None),
    _Linear("q5_0", fifth=True, least=-16),
    _Linear("q5_1", fifth=True, least=None),
    _Q80(),
    _ByTable("iq4_nl", NONLINEAR, exponents=False),
    _ByTable("gguf-mxfp4", _DOUBLED, exponents=True),
):
    register(_layout.name, _layout)
