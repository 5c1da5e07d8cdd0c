"""Encodes GGUF's blocks Q4_K, Q5_K, Q6_K, Q5_0 and Q5_1; `gguf` and `gguf_k` decode them.

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

Source: ``quantize_row_*_ref`` and ``quantize_row_*_impl`` of these names in ggml/src/ggml-quants.c
of llama.cpp, as in llama-cpp-python 0.3.36. Blocks are equal, byte for byte, if that is compiled
without contraction to FMA; for NaN and infinities see `encode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from streamload.codecs.encode import Encoded, Encoder, StoredBlocks, checked_numel, encode_units
from streamload.codecs.llvm import Engine, kernel_for
from streamload.codecs.parts import Array, QuantCounts, check_source
from streamload.codecs.scheme import Library, Scheme
from streamload.codecs.schemes.gguf import inverted, stored
from streamload.codecs.schemes.gguf_k import six_bits
from streamload.codecs.search import LEAST, Fits, Search, extremes, nearest, peaks, positive, summed
from streamload.codecs.search_kernels import compile_search, searched
from streamload.core.dtypes import PACKED, DType

#: Finds the fits of groups, one a column, from their elements and weights.
_Find = Callable[[Array, Array], Fits]
_TOP = np.float32(63)  # of scales and minima of 6 bits


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


def _affine_k(x: Array, importance: Array | None, find: _Find, *, most: int) -> Encoded:
    """Quantize blocks to Q4_K, or to Q5_K if codes have a fifth bit."""
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
        if most > 15:
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
    codes = np.clip(nearest((groups + lows) / steps), 0, most).astype(np.uint8)
    lost = steps[..., 0] == 0
    if lost.any():
        slope, offset = (a.reshape(-1, 8)[lost, None] for a in (fits.slope, fits.offset))
        codes[lost] = np.clip(nearest(slope * (groups[lost] - offset)), 0, most)
    fields = [header, _packed(codes[:, ::2], codes[:, 1::2]).reshape(-1, 128)]
    if most > 15:
        high = np.packbits(codes >> 4, axis=1, bitorder="little")
        fields.insert(1, high.reshape(-1, 32))
    return _finished(fields, steps * codes.astype(np.float32) - lows, *units)


def _q6_k(x: Array, importance: Array | None, find: _Find) -> Encoded:
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


def _halves(codes: Array) -> list[Array]:
    """Return the fifth bits and the low bits of codes of 5 bits, blocks of 32."""
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return [fifth, _packed(codes[:, :16], codes[:, 16:])]


def _q5_0(x: Array, importance: Array | None, find: _Find) -> Encoded:
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


def _q5_1(x: Array, importance: Array | None, find: _Find) -> Encoded:
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


@dataclass(frozen=True)
class _Form:
    """How a format is encoded: the function, and its searches without and with importance."""

    encoded: Callable[[Array, Array | None, _Find], Encoded]
    plain: Search
    weighted: Search
    by_rows: bool = False  # whether a unit is a row


_FORMS = {
    "q4_k": _Form(
        partial(_affine_k, most=15),
        Search.affine(15, -1, 0.1, 20),
        Search.affine(15, -0.9, 0.05, 36),
    ),
    "q5_k": _Form(
        partial(_affine_k, most=31),
        Search.affine(31, -0.5, 0.1, 15),
        Search.affine(31, -0.9, 0.05, 36),
    ),
    "q6_k": _Form(_q6_k, Search.symmetric(32), Search.symmetric(32)),
    "q5_0": _Form(_q5_0, Search.symmetric(16), Search.symmetric(16), by_rows=True),
    "q5_1": _Form(
        _q5_1,
        Search.affine(31, -0.9, 0.05, 36),
        Search.affine(31, -0.9, 0.05, 36),
        by_rows=True,
    ),
}


@dataclass(frozen=True)
class Searched(StoredBlocks):
    """A tensor to quantize to a format of this file.

    `importance`: float32 weights of the columns, a row for each matrix of the tensor; or None.
    """

    importance: Array | None = field(default=None, compare=False)

    @property
    def search(self) -> Search:
        """The search for the scales of groups."""
        form = _FORMS[self.format]
        return form.plain if self.importance is None else form.weighted

    @property
    def unit_numel(self) -> int:
        """Elements of a block, or of a row."""
        return self.shape[-1] if _FORMS[self.format].by_rows else super().unit_numel

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a block, or of a row's blocks."""
        return PACKED[self.format].nbytes(self.unit_numel)

    def weighted(self, importance: Array) -> Searched:
        """Return this tensor with a weight for each column; see `Quantized.weighted`."""
        return replace(self, importance=importance.reshape(-1, self.shape[-1]))

    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """Return an encoder of the tensor from dtype ``src``; see `Quantized.encoder`."""
        check_source(self.format, self.shape, src)
        return _Encoder(self, src, engine)


class _Encoder(Encoder):
    """Encodes `Searched`: searches by a kernel, if it can be compiled, and the rest by numpy."""

    def __init__(self, tensor: Searched, src: DType, engine: Engine) -> None:
        self._tensor, self._src, self._form = tensor, src, _FORMS[tensor.format]
        kernel = kernel_for(engine, lambda: compile_search(tensor.search, tensor.format))
        self._find = partial(searched, kernel, tensor.search)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor = self._tensor
        checked_numel(tensor, self._src, data, out, first)
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)

        def encoded(x: Array, unit: int) -> Encoded:
            weights = self._importance(first // tensor.unit_numel + unit, len(x))
            return self._form.encoded(x, weights, self._find)

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


@dataclass(frozen=True)
class _Scheme(Scheme):
    """The scheme of a block type; transformers reads such blocks only from GGUF files."""

    name: str
    transposes_conv1d = True

    def of(self, shape: tuple[int, ...], src: DType) -> Searched:
        check_source(self.name, shape, src)
        return Searched(self.name, shape, src)


LIBRARY = Library(*map(_Scheme, _FORMS))
