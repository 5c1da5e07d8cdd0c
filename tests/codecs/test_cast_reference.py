from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from cast_reference_helpers import LAYOUT, as_bits, by_reference, pair_id, samples
from hypothesis import given
from hypothesis import strategies as st

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.floats import PAIRS, lossless
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, F64, DType


def exact_value(bits: int, dtype: DType) -> Fraction | None:
    """The absolute value of a float, or None for infinity and NaN."""
    mantissa, bias, special = LAYOUT[dtype.code]
    magnitude = bits & ((1 << (dtype.bits - 1)) - 1)
    if magnitude >= special:
        return None
    exponent, significand = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    if exponent:
        significand += 1 << mantissa
    return Fraction(significand) * Fraction(2) ** (max(exponent, 1) - bias - mantissa)


def exact_cast(bits: int, src: DType, dst: DType, *, clamp: bool) -> tuple[int | None, str]:
    """What a cast owes by the definition of rounding: the bits (None: any NaN) and what is counted.

    Integers and fractions only, so that it has nothing in common with what it checks.
    """
    mantissa, bias, special = LAYOUT[dst.code]
    sign = bits >> (src.bits - 1) << (dst.bits - 1)
    value = exact_value(bits, src)
    if value is None:
        is_infinity = bits & ((1 << (src.bits - 1)) - 1) == LAYOUT[src.code][2]
        infinite = is_infinity and src.code != "F8_E4M3"
        return (sign | special if infinite else None), ""
    if value == 0:
        return sign, ""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    exponent = max(exponent, 1 - bias)
    steps = value / Fraction(2) ** (exponent - mantissa)
    magnitude = round(steps) + ((exponent + bias - 1) << mantissa)  # round() is to nearest even
    if magnitude >= special:
        return sign | (special - 1 if clamp else special), "overflowed"
    if magnitude == 0:
        return sign, "flushed"
    return sign | magnitude, "" if steps.denominator == 1 else "rounded"


def one_by_reference(bits: int, src: DType, dst: DType, clamp: bool) -> tuple[int | None, str]:
    """One element cast by the reference, in the form of `exact_cast`."""
    out = bytearray(dst.itemsize)
    data = memoryview(bits.to_bytes(src.itemsize, "little"))
    counts = cast_bytes(src, dst, data, memoryview(out), clamp=clamp)
    assert sum(counts) <= 1
    names = ("overflowed", "flushed", "rounded")
    counted = "".join(name for name, count in zip(names, counts, strict=True) if count)
    is_nan = bool(np.isnan(np.frombuffer(out, dst.numpy).astype(np.float64))[0])
    return None if is_nan else int.from_bytes(out, "little"), counted


@pytest.mark.parametrize("clamp", [False, True], ids=["inf", "clamp"])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_is_the_definition_of_rounding(pair: tuple[DType, DType], clamp: bool) -> None:
    """Bits and counts are those of exact arithmetic, on codes drawn from the samples."""
    src, dst = pair
    x = samples(src)
    chosen = x if x.size <= 256 else np.random.default_rng(1).choice(x, 4000, replace=False)
    expected = [exact_cast(int(bits), src, dst, clamp=clamp) for bits in chosen]
    out = bytearray(chosen.size * dst.itemsize)
    counts = cast_bytes(src, dst, memoryview(chosen.tobytes()), memoryview(out), clamp=clamp)

    nan = (1 << (dst.bits - 1)) - 1
    assert as_bits(out, dst).tolist() == [nan if bits is None else bits for bits, _ in expected]
    names = [name for _, name in expected]
    assert counts == (names.count("overflowed"), names.count("flushed"), names.count("rounded"))


@given(st.floats(width=64), st.sampled_from([F16, BF16, F32]), st.booleans())
def test_rounds_float64_once(value: float, dst: DType, clamp: bool) -> None:
    bits = int(np.float64(value).view(np.uint64))
    assert one_by_reference(bits, F64, dst, clamp) == exact_cast(bits, F64, dst, clamp=clamp)


def test_float64_that_two_roundings_get_wrong() -> None:
    """1 + 2^-11 + 2^-40 is above a tie of float16; in float32 it is that tie, and would go down."""
    value = np.float64(1 + 2.0**-11 + 2.0**-40)
    assert np.float16(np.float32(value)) == 1
    bits, counted = one_by_reference(int(value.view(np.uint64)), F64, F16, False)
    assert (bits, counted) == (0x3C01, "rounded")


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] != F64], ids=pair_id)
def test_agrees_with_numpy_and_ml_dtypes(pair: tuple[DType, DType]) -> None:
    src, dst = pair
    with np.errstate(all="ignore"):
        theirs = samples(src).view(src.numpy).astype(dst.numpy)
    bits, _ = by_reference(src, dst, False)
    assert np.array_equal(bits, as_bits(bytearray(theirs.tobytes()), dst))


def test_bfloat16_to_float16_in_numbers() -> None:
    """Of 65,280 finite codes 8,704 are exact, 28,672 overflow, 26,112 vanish and 1,792 round."""
    _, counts = by_reference(BF16, F16, False)
    assert counts == (28_672, 26_112, 1_792)
    finite = int(((samples(BF16) & 0x7FFF) < 0x7F80).sum())
    assert (finite, finite - sum(counts)) == (65_280, 8_704)


def test_counts_nothing_exactly_where_nothing_can_change() -> None:
    """A pair is lossless if and only if no sample is counted."""
    for src, dst in PAIRS:
        assert lossless(src, dst) == (by_reference(src, dst, False)[1] == (0, 0, 0)), (src, dst)


def test_chunks_join_and_memory_stays_bounded() -> None:
    part = samples(F64)[:60_000]
    x = np.tile(part, 20)
    data, out = memoryview(x.tobytes()), memoryview(bytearray(x.size * 2))
    cast_bytes(F64, F16, data[:8], out[:2])  # imports count elsewhere
    tracemalloc.start()
    counts = cast_bytes(F64, F16, data, out)
    peak_nbytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_nbytes < 4e6

    once = memoryview(bytearray(part.size * 2))
    assert counts == tuple(20 * c for c in cast_bytes(F64, F16, data[: part.size * 8], once))
    assert bytes(out) == bytes(once) * 20


def test_casts_at_any_address() -> None:
    src, dst = BY_CODE["F32"], BY_CODE["BF16"]
    x = np.arange(100, dtype=np.float32) / 7
    data = memoryview(b"\0\0\0" + x.tobytes())[3:]
    out = bytearray(b"\xaa" * 203)
    cast_bytes(src, dst, data, memoryview(out)[1:201])
    assert bytes(out) == b"\xaa" + x.astype(dst.numpy).tobytes() + b"\xaa\xaa"
