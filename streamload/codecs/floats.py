"""Floating-point formats, and the magnitudes that casts between them overflow, flush or keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from streamload.core.dtypes import BY_CODE, DType


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """One binary floating-point format.

    Sources: IEEE 754-2019 (F16, F32, F64); Intel, "BFLOAT16 - Hardware Numerics Definition", 2018;
    P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433 (E4M3 has a NaN where
    others have infinity).

    Attributes:
        mantissa_bits: stored bits of the significand.
        bias: exponent bias.
        max_exponent: exponent of the largest finite value.
        special: bits of the smallest magnitude that is not finite.
    """

    bits: int
    mantissa_bits: int
    bias: int
    max_exponent: int
    special: int

    @property
    def magnitude(self) -> int:
        """Mask of every bit but the sign."""
        return (1 << (self.bits - 1)) - 1


def _ieee(bits: int, mantissa_bits: int) -> FloatFormat:
    bias = (1 << (bits - mantissa_bits - 2)) - 1
    return FloatFormat(bits, mantissa_bits, bias, bias, (2 * bias + 1) << mantissa_bits)


#: safetensors code to format, for every dtype that is cast.
FLOATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        "F8_E5M2": _ieee(8, 2),
        "F8_E4M3": FloatFormat(8, 3, bias=7, max_exponent=8, special=0x7F),
        "F16": _ieee(16, 10),
        "BF16": _ieee(16, 7),
        "F32": _ieee(32, 23),
        "F64": _ieee(64, 52),
    }
)
#: every pair of different dtypes that has a kernel, as (source, target).
PAIRS: tuple[tuple[DType, DType], ...] = tuple(
    (BY_CODE[src], BY_CODE[dst])
    for src in FLOATS
    for dst in ("F16", "BF16", "F32", "F64")
    if src != dst
)


def lossless(src: DType, dst: DType) -> bool:
    """Whether ``dst`` holds every value of ``src`` exactly; both are in `FLOATS`."""
    source, target = FLOATS[src.code], FLOATS[dst.code]
    return (
        target.mantissa_bits >= source.mantissa_bits
        and target.max_exponent >= source.max_exponent
        and target.bias + target.mantissa_bits >= source.bias + source.mantissa_bits  # subnormals
    )


def overflow_start(src: DType, dst: DType) -> int | None:
    """Return the bits of the smallest magnitude of ``src`` that rounds to infinity in ``dst``.

    The midpoint between the largest finite value and the power of two above it is a tie and goes
    to the even one, infinity. None if every finite value stays finite.
    """
    source, target = FLOATS[src.code], FLOATS[dst.code]
    one = 1 << source.mantissa_bits
    midpoint = (target.max_exponent + source.bias + 1) * one - (one >> (target.mantissa_bits + 1))
    return midpoint if midpoint < source.special else None


def flush_stop(src: DType, dst: DType) -> int | None:
    """Return the bits of the smallest magnitude of ``src`` that does not round to zero in ``dst``.

    It is next above half of the smallest subnormal of ``dst``, a tie that rounds to even, to zero.
    None if only zero becomes zero.
    """
    source, target = FLOATS[src.code], FLOATS[dst.code]
    exponent = source.bias - target.bias - target.mantissa_bits
    if exponent > 0:
        return (exponent << source.mantissa_bits) + 1
    tie = 1 << source.mantissa_bits >> (1 - exponent)  # a subnormal of the source
    return tie + 1 if tie else None


def plain_range(src: DType, dst: DType, *, direct: bool) -> tuple[int, int]:
    """Return the range [a, b) of magnitudes of ``src``, as bits, that need no careful cast.

    They are normal numbers before and after the cast, so that all lose the same bits. If ``direct``
    (the CPU has an instruction for the cast) and the target has the longer significand, the range
    includes the target's largest subnormals, which hold every bit of the source.
    """
    source, target = FLOATS[src.code], FLOATS[dst.code]
    exponent = source.bias - target.bias + 1
    if direct:
        exponent -= max(target.mantissa_bits - source.mantissa_bits, 0)
    start = max(exponent, 1) << source.mantissa_bits
    return start, overflow_start(src, dst) or source.special
