"""Searches for the scales of groups of elements, by weighted least squares: GGUF's K-quants.

A group's codes depend on its scale and, if it has one, its minimum. A search tries several slopes
(codes per unit), fits scale and minimum to the codes that each gives, and keeps the fit with the
least weighted error. Results are those of llama.cpp bit for bit: each float32 operation is rounded
alone, and sums add elements from the first to the last.

Arrays have one group a column, one element of each group a row: `Groups`. The kernels of
`search_kernels` do the same for some groups at once.

Source: ``make_qkx2_quants``, ``make_qkx3_quants`` (`affine`), ``make_qx_quants`` (`symmetric`) and
``make_qp_quants`` (`positive`) in ggml/src/ggml-quants.c of llama.cpp, as in llama-cpp-python
0.3.36, compiled without contraction to FMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamload.codecs.parts import Array

#: Groups whose largest magnitude is below this count as zeros.
LEAST = np.float32(1e-15)
#: Added to a float32 below 2^22, it leaves the nearest integer, ties to even, in the low bits.
ROUNDER = np.float32(3 << 22)
# in tenths of a code
_SYMMETRIC_STEPS = (0, *range(-9, 0), *range(1, 10))
_POSITIVE_STEPS = (0, *range(-4, 0), *range(1, 5))
_POSITIVE_ROUNDS = 5
_TENTH = np.float32(0.1)


@dataclass(frozen=True)
class Search:
    """The search for the scales of a format; see `affine` and `symmetric`.

    Attributes:
        most: the largest code, or the least code's magnitude if codes have a sign.
        ranges: the numbers of codes that are tried: slopes are these, divided by the extent.
        is_affine: whether groups have a minimum.
    """

    most: int
    ranges: tuple[float, ...]
    is_affine: bool

    @classmethod
    def affine(cls, most: int, first: float, step: float, steps: int) -> Search:
        """Return a search for codes 0 to ``most`` that tries ``steps`` + 1 numbers of codes."""
        start, by = np.float32(first), np.float32(step)
        tried = (start + by * np.float32(index) + np.float32(most) for index in range(steps + 1))
        return cls(most, tuple(map(float, tried)), is_affine=True)

    @classmethod
    def symmetric(cls, most: int) -> Search:
        """Return a search for codes from -``most`` to ``most`` - 1, and no minimum."""
        tried = (-(np.float32(most) + _TENTH * np.float32(step)) for step in _SYMMETRIC_STEPS)
        return cls(most, tuple(map(float, tried)), is_affine=False)

    def __call__(self, x: Array, weights: Array) -> Fits:
        """Return the fits of float32 groups, one a column; ``weights`` are those of ``x``."""
        find = _affine if self.is_affine else _symmetric
        return Fits(*find(x, weights, self))


@dataclass(frozen=True)
class Fits:
    """The best fit of each group, in float32: an element is about ``scale * code + low``.

    Attributes:
        scale: 0 for a group of equal elements.
        slope: the codes are ``nearest(slope * (x - offset))``, clipped.
        low: the minimum, 0 or below; 0 without one.
        offset: see ``slope``.
    """

    scale: Array
    slope: Array
    low: Array
    offset: Array


def nearest(x: Array) -> Array:
    """Return the int32 nearest to float32 values below 2^22, ties to even; others as llama.cpp."""
    found: Array = ((x + ROUNDER).view(np.int32) & 0x7FFFFF) - 0x400000
    return found


def summed(rows: Array) -> Array:
    """Return the float32 sum of each column, added from the first row to the last."""
    total: Array = np.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def extremes(x: Array, axis: int) -> tuple[Array, Array]:
    """Return the first of the least and of the largest elements along an axis, which stays."""
    ends = (find(axis=axis, keepdims=True) for find in (x.argmin, x.argmax))
    low, high = (np.take_along_axis(x, end, axis) for end in ends)
    return low, high


def peaks(x: Array, axis: int) -> Array:
    """Return the first of the elements of the largest magnitude along an axis, which stays."""
    found: Array = np.take_along_axis(x, np.abs(x).argmax(axis=axis, keepdims=True), axis)
    return found


def _affine(x: Array, weights: Array, search: Search) -> Sequence[Array]:
    low, high = (end[0] for end in extremes(x, 0))
    low = first = np.where(low > 0, np.float32(0), low)
    is_flat = high == low
    sum_w, sum_x = summed(weights), summed(weights * x)

    def codes_of(slope: Array) -> Array:
        return np.clip(nearest(slope * (x - low)), 0, search.most).astype(np.float32)

    def error_of(codes: Array, scale: Array, low: Array) -> Array:
        difference = scale * codes + low - x
        return summed(weights * (difference * difference))

    slope = np.float32(search.most) / (high - low)
    scale, offset = np.float32(1) / slope, low
    error = error_of(codes_of(slope), scale, low)
    for tried in search.ranges:
        steps = np.float32(tried) / (high - low)
        codes = codes_of(steps)
        weighted = weights * codes
        sum_l, sum_l2, sum_xl = map(summed, (weighted, weighted * codes, weighted * x))
        determinant = sum_w * sum_l2 - sum_l * sum_l
        fit = (sum_w * sum_xl - sum_x * sum_l) / determinant
        below = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        fit = np.where(below > 0, sum_xl / sum_l2, fit)
        below = np.where(below > 0, np.float32(0), below)
        found = error_of(codes, fit, below)
        better = (determinant > 0) & (found < error)
        new = (found, fit, steps, low, below)
        error, scale, slope, offset, low = (
            np.where(better, one, other)
            for one, other in zip(new, (error, scale, slope, offset, low), strict=True)
        )
    zero = np.float32(0)
    scale, slope = np.where(is_flat, zero, scale), np.where(is_flat, zero, slope)
    return scale, slope, np.where(is_flat, first, low), offset


def _symmetric(x: Array, weights: Array, search: Search) -> Sequence[Array]:
    peak = peaks(x, 0)[0]
    scale, slope, best = np.zeros((3, *peak.shape), np.float32)
    for index, tried in enumerate(search.ranges):
        steps = np.float32(tried) / peak
        codes = np.clip(nearest(steps * x), -search.most, search.most - 1).astype(np.float32)
        sum_xl, sum_l2 = summed(weights * x * codes), summed(weights * codes * codes)
        fit = np.where(sum_l2 == 0, np.float32(0), sum_xl / sum_l2)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2) | (index == 0)
        new = (fit, steps, fit * sum_xl)
        scale, slope, best = (
            np.where(better, one, other)
            for one, other in zip(new, (scale, slope, best), strict=True)
        )
    zero = np.float32(0)
    scale, slope = (np.where(np.abs(peak) < LEAST, zero, each) for each in (scale, slope))
    return scale, slope, np.zeros_like(scale), np.zeros_like(scale)


def positive(x: Array, weights: Array, most: int) -> tuple[Array, Array]:
    """Fit one scale and codes 0 to ``most`` to each column; return codes (uint8) and scales."""
    top = np.zeros_like(x[0])
    for row in x:
        top = np.where(top > row, top, row)
    limit = np.float32(most)
    error = slope = np.zeros_like(top)
    for step in _POSITIVE_STEPS:
        tried = (_TENTH * np.float32(step) + limit) / top
        codes = nearest(tried * x)
        # the first codes are bytes, and the others are clipped
        codes = np.minimum(codes, most) if step else codes & 255
        difference = x - np.float32(1) / tried * codes.astype(np.float32)
        found = summed(weights * difference * difference)
        better = found < error if step else np.ones(top.shape, bool)
        error, slope = np.where(better, found, error), np.where(better, tried, slope)
    codes = np.minimum(nearest(slope * x), most)
    floats = codes.astype(np.float32)
    sum_xl, sum_l2 = summed(weights * x * floats), summed(weights * floats * floats)
    codes &= 255
    going = np.ones(top.shape, bool)
    for _ in range(_POSITIVE_ROUNDS):
        changed = np.zeros_like(going)
        for index, (row, weight) in enumerate(zip(x, weights, strict=True)):
            old = codes[index].astype(np.float32)
            left_xl, left_l2 = sum_xl - weight * row * old, sum_l2 - weight * old * old
            code = np.minimum(nearest(row * left_l2 / left_xl), most)
            new = code.astype(np.float32)
            is_usable = going & (left_xl > 0) & (left_l2 > 0) & (code != codes[index])
            left_xl, left_l2 = left_xl + weight * row * new, left_l2 + weight * new * new
            better = is_usable & (left_xl * left_xl * sum_l2 > sum_xl * sum_xl * left_l2)
            codes[index] = np.where(better, code & 255, codes[index])
            sum_xl, sum_l2 = np.where(better, left_xl, sum_xl), np.where(better, left_l2, sum_l2)
            changed |= better
        going &= changed
        if not going.any():
            break
    scale = np.where(sum_l2 > 0, sum_xl / sum_l2, np.float32(0))
    is_zero = top < LEAST
    return np.where(is_zero, 0, codes).astype(np.uint8), np.where(is_zero, np.float32(0), scale)
