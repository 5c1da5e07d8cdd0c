"""Compute by numpy the bytes that tensors should hold: the oracle of `verify` and `diff`.

Row orders are computed here; casts and quantized layouts are numpy forms of `streamload.codecs`.
No kernel and no chunking of a load or a conversion is used, so that their errors show.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter

import numpy as np

from streamload.checkpoint.shards import cut
from streamload.codecs.cast_reference import Array, cast_array, cast_bytes
from streamload.codecs.cast_table import OutOfRange
from streamload.codecs.decode import Decoders
from streamload.codecs.weights import Packed
from streamload.core.dtypes import DType, kind_of
from streamload.core.tensors import Coding, RowRange, RowTranspose, TensorInfo, region_of, whole
from streamload.errors import OutOfRangeError
from streamload.planning.quant_policy import coded

#: Elements to cast or compare at once: temporaries of a few MB.
PART_NUMEL = 2**16

#: Reads bytes of a tensor's file, from one to another (exclusive), valid inside the ``with``.
Read = Callable[[TensorInfo, int, int], AbstractContextManager[memoryview]]
_Piece = tuple[TensorInfo, int, int]  # first and last byte (exclusive) of a tensor's values
_Lengths = tuple[int, int, int]  # groups, outer and inner of a `RowTranspose`


@dataclass(slots=True)
class Expected:
    """Computes the bytes that one tensor should hold.

    Attributes:
        dtype: the dtype of floats and dequantized weights, before any quantization.
        out_of_range: the result of values that `dtype` cannot represent.
        on_cuda: whether kernels of CUDA may have quantized the tensor.
        parts: bytes of the scales and tables of a quantized weight, by suffix, after `codes`.
    """

    sources: Sequence[tuple[TensorInfo, RowRange]]
    dtype: DType
    out_of_range: OutOfRange
    order: RowTranspose | None = None
    coding: Coding | None = None
    on_cuda: bool = False
    parts: dict[str, memoryview] = field(default_factory=dict)

    @property
    def src(self) -> DType:
        """Dtype of `values`: `dtype` if weights are dequantized, else the source's."""
        return self._values_dtype(self.sources[0][0])

    def values(self, read: Read, block_nbytes: int) -> Iterator[memoryview | bytes]:
        """Yield blocks of whole elements in order, before any cast, each valid until the next."""
        decoders = Decoders(self.out_of_range)
        whole_nbytes = self.src.nbytes(8)
        most = max(block_nbytes // whole_nbytes, 1) * whole_nbytes
        for pieces, lengths in self._blocks(most):
            if lengths is None and len(pieces) == 1:
                with self._stored(read, decoders, *pieces[0]) as data:
                    yield data
                continue
            joined = bytearray()
            for info, first, last, parts in _spans(pieces, most):
                with self._stored(read, decoders, info, first, last) as data:
                    for start, stop in parts:
                        joined += data[start - first : stop - first]
            yield bytes(joined) if lengths is None else _swapped(joined, lengths)

    def codes(
        self, read: Read, block_nbytes: int, found: Callable[[int, int], bytes] | None = None
    ) -> Iterator[bytes]:
        """Yield the codes of a quantized weight, in blocks of whole units; then fill `parts`.

        A unit is the elements that are quantized together.

        CUDA kernels multiply by a reciprocal that may be one rounding step off. If a unit's codes
        by a CUDA variant equal the device's, which ``found(start, stop)`` reads, yield these.
        """
        assert self.coding is not None
        info, src = self.sources[0][0], self.src
        weight = coded(self.coding, src)
        codecs = weight.codec.on_cuda if self.on_cuda else (weight.codec,)
        variants = (replace(weight, codec=codec) for codec in codecs)
        encoder, *others = (variant.encoder(src, "numpy") for variant in variants)
        at = first = 0
        for data in _whole_units(self.values(read, block_nbytes), src.nbytes(weight.unit_numel)):
            numel = len(data) // src.itemsize
            units, rest = divmod(numel, weight.unit_numel)
            rest_nbytes = -(-rest * weight.unit_nbytes // weight.unit_numel)
            out = bytearray(units * weight.unit_nbytes + rest_nbytes)
            counts = encoder.encode(memoryview(data), memoryview(out), first)
            if counts.overflowed and self.out_of_range == "error":
                name = self.coding.format
                raise OutOfRangeError(info.name, info.shard, src.name, name, counts.overflowed)
            there = found(at, at + len(out)) if others and found is not None else out
            for other in others if there != out else ():
                tried = bytearray(len(out))
                other.encode(memoryview(data), memoryview(tried), first)
                for start, stop in cut(0, len(out), weight.unit_nbytes):
                    if tried[start:stop] == there[start:stop]:
                        out[start:stop] = tried[start:stop]
            first += numel
            at += len(out)
            yield bytes(out)
        self.parts.update(encoder.finish())

    def cast(self, data: memoryview | bytes | Array) -> Array:
        """Return bytes of `values` after the cast to `dtype`."""
        src, dst = self.src, self.dtype
        given = np.frombuffer(data, np.uint8)
        if src is dst:
            return given
        made = []
        for start in range(0, given.size, PART_NUMEL * src.itemsize):
            # copy: numpy is only fast, or right, on aligned elements
            part = given[start : start + PART_NUMEL * src.itemsize].copy()
            out = cast_array(part.view(src.numpy), dst)
            if self.out_of_range != "inf" and np.isinf(out).any():
                to, clamp = out.view(np.uint8).data, self.out_of_range == "clamp"
                overflowed, _, _ = cast_bytes(src, dst, part.data, to, clamp=clamp)
                if overflowed and not clamp:
                    info = self.sources[0][0]
                    raise OutOfRangeError(info.name, info.shard, src.name, dst.name, overflowed)
            made.append(out.view(np.uint8))
        return made[0] if len(made) == 1 else np.concatenate(made)

    def _values_dtype(self, info: TensorInfo) -> DType:
        return self.dtype if isinstance(info, Packed) else info.dtype

    def _extents(self) -> Iterator[_Piece]:
        """Yield the byte ranges of all sources' values, in order."""
        for info, rows in self.sources:
            dtype = self._values_dtype(info)
            nbytes = dtype.nbytes(info.numel)
            if rows == whole(info):  # rows of less than a byte have no byte range
                yield info, 0, nbytes
                continue
            values = TensorInfo(info.name, dtype, info.shape, info.shard, 0, nbytes)
            yield from ((info, *each) for each in region_of(values, rows).ranges())

    def _blocks(self, most: int) -> Iterator[tuple[list[_Piece], _Lengths | None]]:
        """Yield the byte ranges of blocks of at most ``most`` bytes, and axes to swap or None."""
        if self.order is not None:
            yield from self._permuted(self.order, most)
            return
        pieces: list[_Piece] = []
        nbytes = 0
        for info, start, stop in self._extents():
            for begin, end in cut(start, stop, most):
                if nbytes + end - begin > most:
                    yield pieces, None
                    pieces, nbytes = [], 0
                pieces.append((info, begin, end))
                nbytes += end - begin
        if pieces:
            yield pieces, None

    def _permuted(self, order: RowTranspose, most: int) -> Iterator[tuple[list[_Piece], _Lengths]]:
        """Yield blocks of a permuted tensor as byte ranges, with the lengths of axes to swap."""
        extents = [*self._extents()]
        ends = [*accumulate(stop - start for _, start, stop in extents)]
        row = ends[-1] // order.rows if order.rows else 0
        group = order.outer * order.inner * row

        def located(begin: int, end: int) -> Iterator[_Piece]:
            while begin < end:
                at = bisect_right(ends, begin)
                info, _, stop = extents[at]
                upto, shift = min(end, ends[at]), stop - ends[at]
                yield info, begin + shift, upto + shift
                begin = upto

        for g, h in cut(0, order.groups if row else 0, max(most // max(group, 1), 1)):
            if group <= most:
                yield [*located(g * group, h * group)], (h - g, order.outer, order.inner)
                continue
            for left, right in cut(0, order.inner, max(most // (order.outer * row), 1)):
                lines = max(most // ((right - left) * row), 1)  # all, unless a column is too long
                for first, last in cut(0, order.outer, lines):
                    for begin, end in cut(left * row, right * row, most):
                        starts = [
                            (g * order.outer + n) * order.inner * row for n in range(first, last)
                        ]
                        pieces = [p for at in starts for p in located(at + begin, at + end)]
                        yield pieces, (1, last - first, right - left)

    def _stored(
        self, read: Read, decoders: Decoders, info: TensorInfo, start: int, stop: int
    ) -> AbstractContextManager[memoryview]:
        """Read bytes ``start`` to ``stop`` (exclusive) of a tensor's values, dequantized."""
        if not isinstance(info, Packed):
            return read(info, info.start + start, info.start + stop)
        first, last = start // self.dtype.itemsize, stop // self.dtype.itemsize
        begin, end = (info.start + at for at in info.dtype.span(first, last))
        out = memoryview(bytearray(stop - start))
        with read(info, begin, end) as data:
            counts = decoders.of(info, self.dtype, "numpy").decode(data, out, first)
        if counts.overflowed and self.out_of_range == "error":
            names = info.dtype.name, self.dtype.name
            raise OutOfRangeError(info.name, info.shard, *names, counts.overflowed)
        return nullcontext(out)


def _spans(
    pieces: Iterable[_Piece], most: int
) -> Iterator[tuple[TensorInfo, int, int, list[tuple[int, int]]]]:
    """Join byte ranges of a tensor to reads; yield (tensor, start, stop exclusive, ranges) of each.

    A read has at most ``most`` bytes, unless one range has more.

    Dequantizing takes longer than any number of reads: packed tensors' ranges stay alone.
    """
    for info, group in groupby(pieces, itemgetter(0)):
        parts: list[tuple[int, int]] = []
        for _, start, stop in group:
            apart = isinstance(info, Packed) or bool(parts and start < parts[-1][1])
            if parts and (apart or stop - parts[0][0] > most):
                yield info, parts[0][0], parts[-1][1], parts
                parts = []
            parts.append((start, stop))
        yield info, parts[0][0], parts[-1][1], parts


def _swapped(data: bytearray, lengths: _Lengths) -> bytes:
    """Return bytes of shape ``lengths`` (groups, outer, inner) with the last two axes swapped."""
    nbytes = len(data) // (lengths[0] * lengths[1] * lengths[2])
    return np.frombuffer(data, kind_of(nbytes)).reshape(lengths).swapaxes(1, 2).tobytes()


def _whole_units(blocks: Iterator[memoryview | bytes], nbytes: int) -> Iterator[bytes]:
    """Yield the bytes of blocks again, in multiples of ``nbytes``; the last may be shorter."""
    held = b""
    for block in blocks:
        held += block
        whole = len(held) // nbytes * nbytes
        if whole:
            yield held[:whole]
        held = held[whole:]
    if held:
        yield held
