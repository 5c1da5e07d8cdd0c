"""Elements of tensors that are joined from others: see `streamload.formats.writer.Joined`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from streamload.checkpoint.shards import cut
from streamload.codecs.cast_table import ZERO, Cast, CastCounts
from streamload.codecs.decode import Decoders
from streamload.codecs.permute import Fill, Permutation, compile_transpose, transpose
from streamload.codecs.weights import Packed
from streamload.core.dtypes import DType
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.formats.writer import Joined, Slice

#: Opens bytes of a tensor's file, from one to another, exclusive.
Read = Callable[[TensorInfo, int, int], AbstractContextManager[memoryview]]
_Array = np.ndarray[Any, Any]


class Assembler:
    """Writes elements of a tensor in the order of the output; one for each block of a thread."""

    def __init__(
        self,
        dtype: DType,
        casts: Mapping[tuple[DType, DType], Cast],
        decoders: Decoders,
        read: Read,
        most_nbytes: int,
    ) -> None:
        """Read nothing yet; elements become ``dtype``, and ``most_nbytes`` are read at once."""
        self._dtype, self._n = dtype, dtype.itemsize
        self._casts, self._decoders, self._read, self._most = casts, decoders, read, most_nbytes

    def elements(self, made: Joined, first: int, stop: int, out: memoryview) -> CastCounts:
        """Write elements ``first`` to ``stop`` (exclusive); returns what their casts changed."""
        if made.turn is not None:
            row, fill = made.numel // made.turn.rows, partial(self._lines, made)
            return self._permuted(made.turn, row, made.infos, fill, first, out)
        counts, at = ZERO, 0
        for piece in made.pieces:
            begin, end = max(first, at), min(stop, at + piece.numel)
            if begin < end:
                shift = piece.first - at
                part = out[(begin - first) * self._n : (end - first) * self._n]
                counts += self._piece(piece, begin + shift, end + shift, part)
            at += piece.numel
        return counts

    def straight(
        self, made: Joined, first: int, stop: int
    ) -> Iterator[tuple[int, int, TensorInfo | None, int]]:
        """Cut elements at the ends of pieces.

        Yields:
            The first, the last (exclusive), the tensor whose file has them as they are needed, and
            the byte there; None if `elements` has to write them.
        """
        if made.turn is not None:
            yield first, stop, None, 0
            return
        at = 0
        for piece in made.pieces:
            begin, end, info = max(first, at), min(stop, at + piece.numel), piece.info
            if begin < end:
                packed = isinstance(info, Packed) or piece.turn is not None
                if info is None or packed or info.dtype is not self._dtype:
                    yield begin, end, None, 0
                else:
                    yield begin, end, info, info.start + (piece.first + begin - at) * self._n
            at += piece.numel

    def _piece(self, piece: Slice, first: int, stop: int, out: memoryview) -> CastCounts:
        info, order = piece.info, _order(piece)
        if info is None:
            out[:] = piece.data[first * self._n : stop * self._n] or bytes(len(out))
            return ZERO
        if order is not None:
            row, fill = info.numel // order.rows, partial(self._read_lines, info)
            return self._permuted(order, row, [info], fill, first, out)
        counts, unit = ZERO, info.dtype.unit
        step = max(info.dtype.numel(self._most) // unit, 1) * unit
        for a, b in cut(first, stop, step, first // unit * unit):
            begin, end = info.dtype.span(a, b)
            part = out[(a - first) * self._n : (b - first) * self._n]
            with self._read(info, info.start + begin, info.start + end) as data:
                counts += self._make(info, data, part, a)
        return counts

    def _permuted(
        self,
        order: RowTranspose,
        row: int,
        infos: Sequence[TensorInfo],
        fill: Fill,
        first: int,
        out: memoryview,
    ) -> CastCounts:
        """Write elements from ``first`` on, of rows of so many elements."""
        grain = math.lcm(*(info.dtype.unit // math.gcd(info.dtype.unit, row) for info in infos))
        most = min((info.dtype.numel(self._most) for info in infos), default=self._most)
        to = np.frombuffer(out, f"u{self._n}")
        compile_transpose([row * self._n])
        return Permutation(order.outer, order.inner, row, grain).write(first, to, fill, most)

    def _make(
        self, info: TensorInfo, data: memoryview, out: memoryview, first: int, *lines: int
    ) -> CastCounts:
        """Dequantize or cast stored elements; see `Decoder.decode`."""
        if isinstance(info, Packed):
            return self._decoders.of(info, self._dtype).decode(data, out, first, *lines)
        return self._casts[info.dtype, self._dtype](data, out)

    def _lines(self, made: Joined, start: int, pitch: int, to: _Array) -> CastCounts:
        """Write lines of rows of all pieces: several at once, if one piece has them in order."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self._n
        counts, line = ZERO, memoryview(bytearray(numel * self._n))
        joined = Joined(made.pieces)
        pieces, at, done = iter(made.pieces), 0, 0
        piece = next(pieces)
        while done < lines:
            begin = start + done * pitch
            while begin >= at + piece.numel:
                at, piece = at + piece.numel, next(pieces)
            count = min((at + piece.numel - numel - begin) // pitch + 1, lines - done)
            if count > 0 and piece.info is not None and _order(piece) is None:
                first = piece.first + begin - at
                counts += self._read_lines(piece.info, first, pitch, to[done : done + count])
                done += count
                continue
            counts += self.elements(joined, begin, begin + numel, line)
            to[done] = np.frombuffer(line, to.dtype)
            done += 1
        return counts

    def _read_lines(self, info: TensorInfo, first: int, pitch: int, to: _Array) -> CastCounts:
        """Write lines of one tensor, from an element on; a multiple of `DType.unit`, as pitches."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self._n
        nbytes, step = info.dtype.nbytes(numel), info.dtype.nbytes(pitch)
        begin = info.start + info.dtype.nbytes(first)
        with self._read(info, begin, begin + (lines - 1) * step + nbytes) as view:
            found = np.ndarray((lines, nbytes), np.uint8, view, strides=(step, 1))
            if info.dtype is self._dtype:
                transpose(found.view(to.dtype), to)
                del found
                return ZERO
            data = found.copy()
            del found
        made = np.empty(to.shape, to.dtype)
        given, became = (each.view(np.uint8).reshape(-1).data for each in (data, made))
        counts = self._make(info, given, became, first, lines, pitch)
        transpose(made, to)
        return counts


def _order(piece: Slice) -> RowTranspose | None:
    """The row order from a piece's file to models."""
    info = piece.info
    if piece.turn is None and isinstance(info, Packed) and info.lies_turned:
        return RowTranspose(math.prod(info.shape[:-2]), *info.shape[-2:])
    return piece.turn
