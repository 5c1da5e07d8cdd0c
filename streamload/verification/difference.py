"""Differences of two tensors: their records, and the comparison of elements by bits and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamload.codecs.cast_reference import Array
from streamload.core.dtypes import DType

_LISTED_DIMS = 8


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        count: elements that differ: in their bits, or as numbers if the dtypes differ.
        numel: elements in all.
        bits_only: of those that differ, how many are the same number in other bits: 0 and -0, or
            two NaN.
        first: index of the first element that differs, in row-major order.
        a: that element in the first checkpoint (after the cast, if any), and its bits.
        b: that element in the second, and its bits.
        largest: the largest absolute difference of two numbers; inf if an infinity is against
            another number; None for bools, for dtypes of less than a byte, and if NaN is in
            each pair.
    """

    count: int
    numel: int
    bits_only: int
    first: tuple[int, ...]
    a: str
    b: str
    largest: float | int | None

    def __str__(self) -> str:
        text = f"{self.count} of {self.numel} values differ"
        if self.bits_only:
            text += f" ({self.bits_only} only in bits: zeros of other sign, NaN of other payload)"
        text += f", first at {list(self.first)}: {self.a}, {self.b}"
        return text if self.largest is None else f"{text}; largest difference {self.largest:g}"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How two tensors of one name differ.

    Attributes:
        name: the name, in the second checkpoint.
        dtypes: both dtypes if they differ; the first is the one after the cast.
        shapes: both shapes if they differ.
        values: how the values differ; None if they do not, or were not compared.
        compared: whether the values were compared: shapes are equal, and so are dtypes, or both
            are floats of at least a byte, compared as numbers.
    """

    name: str
    dtypes: tuple[str, str] | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None
    values: ValueDifference | None
    compared: bool

    def __str__(self) -> str:
        parts = []
        if self.dtypes is not None:
            parts.append(f"dtype {self.dtypes[0]}, {self.dtypes[1]}")
        if self.shapes is not None:
            parts.append(f"shape {shape_text(self.shapes[0])}, {shape_text(self.shapes[1])}")
        if self.values is not None:
            parts.append(str(self.values))
        elif self.compared:
            parts.append("the same numbers")
        elif self.shapes is None:
            parts.append("values not compared")
        return "; ".join(parts)


@dataclass(slots=True)
class ValueComparison:
    """Compares the elements of two tensors, some at a time.

    `payloads`: whether the payloads of NaN are compared.
    """

    left: DType
    right: DType
    payloads: bool
    _count: int = 0
    _bits_only: int = 0
    _first: tuple[int, str, str] | None = None
    _largest: float | int | None = None

    def compare(self, x: Array, y: Array, first: int) -> None:
        """Compare aligned bytes of equally many elements; the first has index ``first``."""
        a, b = self.left, self.right
        if a is b and np.array_equal(x, y):
            return
        if a.numpy is None or b.numpy is None:
            self._note(np.flatnonzero(_different_bits(x, y, a)), x, y, first)
            return
        p, q = _numbers(x, a), _numbers(y, b)
        both_nan = np.isnan(p) & np.isnan(q)
        differs = _different_bits(x, y, a) if a is b else p != q
        if a is not b or not self.payloads:
            differs &= ~both_nan
        where = np.flatnonzero(differs)
        self._note(where, x, y, first)
        if not len(where) or a.kind == "bool":
            return
        self._bits_only += int(np.count_nonzero(differs & ((p == q) | both_nan)))
        # over all elements, since selecting those that differ takes longer; unless that gives 0
        largest = _largest_difference(p, q) or _largest_difference(p[where], q[where])
        if largest is not None:
            self._largest = max(self._largest or 0, largest)

    def difference(self, numel: int, shape: tuple[int, ...]) -> ValueDifference | None:
        """Return the difference of all elements compared; None if all are equal."""
        if self._first is None:
            return None
        at, mine, theirs = self._first
        index = tuple(int(i) for i in np.unravel_index(at, shape)) if shape else ()
        return ValueDifference(
            self._count, numel, self._bits_only, index, mine, theirs, self._largest
        )

    def _note(self, where: Array, x: Array, y: Array, first: int) -> None:
        """Count the differing elements, at indices ``where``; record the tensor's first."""
        self._count += len(where)
        if self._first is None and len(where):
            at = int(where[0])
            self._first = first + at, _element(x, at, self.left), _element(y, at, self.right)


def _different_bits(x: Array, y: Array, dtype: DType) -> Array:
    """Return by element whether the bits of ``x`` and ``y`` differ."""
    if dtype.bits >= 8:
        unsigned = np.dtype(f"u{dtype.itemsize}")
        differs: Array = x.view(unsigned) != y.view(unsigned)
        return differs
    bits = np.unpackbits(np.bitwise_xor(x, y).view(np.uint8), bitorder="little")
    one_differs: Array = np.bitwise_or.reduce(bits.reshape(-1, dtype.bits), axis=1) != 0
    return one_differs


def _numbers(data: Array, dtype: DType) -> Array:
    """Return elements as exact numbers: float64, complex128, or integers as they are."""
    values: Array = data.view(dtype.numpy)
    wide = {"float": np.float64, "complex": np.complex128}.get(dtype.kind)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values if wide is None else values.astype(wide)


def _largest_difference(p: Array, q: Array) -> float | int | None:
    """Return the largest absolute difference of two numbers; None if NaN is in each pair."""
    if p.dtype.kind in "ui":
        # the larger minus the smaller, modulo 2**64: exact also if int64 would overflow
        high, low = np.maximum(p, q).astype(np.uint64), np.minimum(p, q).astype(np.uint64)
        return int((high - low).max())
    with np.errstate(all="ignore"):
        found = np.fmax.reduce(np.abs(p - q))  # skips NaN, also that of equal infinities
    return None if np.isnan(found) else float(found)


def _element(data: Array, index: int, dtype: DType) -> str:
    """Return an element's value and bits as text, for messages."""
    if dtype.numpy is None:
        bits = np.unpackbits(data, bitorder="little")[index * dtype.bits : (index + 1) * dtype.bits]
        return f"0x{int(np.packbits(bits, bitorder='little')[0]):02x}"
    raw = data[index * dtype.itemsize : (index + 1) * dtype.itemsize]
    code = int.from_bytes(raw.tobytes(), "little")
    return f"{raw.view(dtype.numpy)[0]} (0x{code:0{dtype.itemsize * 2}x})"


def shape_text(shape: Sequence[int]) -> str:
    """Return the text of a shape's first dimensions, for messages."""
    rest = " ..." * (len(shape) > _LISTED_DIMS)
    return " x ".join(map(str, shape[:_LISTED_DIMS])) + rest or "scalar"
