"""Compute elements of output tensors that join slices of source tensors: see `Joined`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from streamload.checkpoint.shards import Room, Shards, cut
from streamload.codecs.cast_table import ZERO, Cast, CastCounts
from streamload.codecs.decode import Decoders
from streamload.codecs.permute import Fill, Permutation, compile_transpose, transpose
from streamload.codecs.weights import Packed
from streamload.core.dtypes import DType
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.formats.writer import Joined, Slice
from streamload.planning.transforms import Changed

_Array = np.ndarray[Any, Any]
#: Most bytes of values that functions change at once, unless a row is longer.
CHANGED_NBYTES = 2**22


@dataclass(slots=True)
class Assembler:
    """Reads, casts and permutes elements of an output tensor for one thread."""

    dtype: DType  # elements are cast or dequantized to it
    casts: Mapping[tuple[DType, DType], Cast]  # by source and output dtype
    decoders: Decoders
    shards: Shards
    room: Room  # the thread's memory for blocks

    def read(self, info: TensorInfo, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Read file bytes ``start`` to ``stop`` (exclusive) of a tensor; yields a view of them."""
        return self.shards.block(info.shard, start, stop, self.room, info.name)

    def elements(self, made: Joined, first: int, stop: int, out: memoryview) -> CastCounts:
        """Assemble elements ``first`` to ``stop`` (exclusive) of an output tensor in ``out``.

        Elements are cast; returns the counts of values that the cast changed.
        """
        if made.turn is not None:
            row, fill = made.numel // made.turn.rows, partial(self._lines, made)
            return self._permuted(made.turn, row, made.infos, fill, first, out)
        counts, n = ZERO, self.dtype.itemsize
        for piece, begin, end, shift in _overlaps(made, first, stop):
            part = out[(begin - first) * n : (end - first) * n]
            counts += self._piece(piece, begin + shift, end + shift, part)
        return counts

    def straight(
        self, made: Joined, first: int, stop: int
    ) -> Iterator[tuple[int, int, TensorInfo | None, int]]:
        """Split elements ``first`` to ``stop`` (exclusive) into ranges to copy and to compute.

        Yields first element and stop (exclusive); then the tensor whose file holds the range in
        final form, and its first byte there; None and 0 if `elements` must compute it.
        """
        if made.turn is not None:
            yield first, stop, None, 0
            return
        for piece, begin, end, shift in _overlaps(made, first, stop):
            info = piece.info
            computed = info is None or info.is_computed or piece.turn is not None or piece.shift
            if info is None or computed or info.dtype is not self.dtype:
                yield begin, end, None, 0
            else:
                yield begin, end, info, info.start + (begin + shift) * self.dtype.itemsize

    def _piece(self, piece: Slice, first: int, stop: int, out: memoryview) -> CastCounts:
        """Write a slice's cast elements; ``first``, ``stop`` (exclusive): indices in its tensor."""
        info, order, n = piece.info, _order(piece), self.dtype.itemsize
        if info is None:
            out[:] = piece.data[first * n : stop * n] or bytes(len(out))
            return ZERO
        if order is not None:
            row, fill = info.numel // order.rows, partial(self._read_lines, info)
            return self._permuted(order, row, [info], fill, first, out)
        counts, unit = ZERO, info.row_numel if isinstance(info, Changed) else info.dtype.unit
        step = max(self._most_numel(info) // unit, 1) * unit
        for a, b in cut(first, stop, step, first // unit * unit):
            part = out[(a - first) * n : (b - first) * n]
            with self._values(info, a, b) as data:
                if piece.shift:  # of vectors: there is no kernel for it
                    values = np.frombuffer(data, info.read_dtype.numpy).astype(np.float32)
                    shifted = (values + np.float32(piece.shift)).astype(self.dtype.numpy)
                    part[:] = shifted.tobytes()
                else:
                    counts += self._make(info, data, part, a)
        return counts

    def _most_numel(self, info: TensorInfo) -> int:
        """Return the most elements of a tensor that are read at once."""
        if isinstance(info, Changed):
            return CHANGED_NBYTES // info.read_dtype.itemsize
        return info.dtype.numel(self.room.block_nbytes)

    def _values(
        self, info: TensorInfo, first: int, stop: int
    ) -> AbstractContextManager[memoryview]:
        """Read elements ``first`` to ``stop`` (exclusive) of ``read_dtype``; yields their bytes."""
        if not isinstance(info, Changed):
            begin, end = info.dtype.span(first, stop)
            return self.read(info, info.start + begin, info.start + end)
        row, dtype = info.row_numel, info.stored.dtype
        begin, end = first // row * row, -(-stop // row) * row
        data = memoryview(bytearray((end - begin) * dtype.itemsize))
        start = info.start + begin * dtype.itemsize
        for a, b in cut(start, start + data.nbytes, self.room.block_nbytes):
            with self.read(info, a, b) as view:
                data[a - start : b - start] = view
        rows, dtype = info.changes.apply(info.stored, data, begin // row)
        found = rows[(first - begin) * dtype.itemsize : (stop - begin) * dtype.itemsize]
        return nullcontext(found.data)

    def _permuted(
        self,
        order: RowTranspose,
        row: int,
        infos: Sequence[TensorInfo],
        fill: Fill,
        first: int,
        out: memoryview,
    ) -> CastCounts:
        """Fill ``out`` with elements from ``first`` on of a tensor, its rows permuted by ``order``.

        ``fill`` reads rows of ``row`` elements in file order; each read begins and ends on whole
        blocks of the dtypes of ``infos`` (quantized dtypes have several elements in one).
        """
        n, most = self.dtype.itemsize, self.room.block_nbytes
        grain = math.lcm(*(info.dtype.unit // math.gcd(info.dtype.unit, row) for info in infos))
        most = min((self._most_numel(info) for info in infos), default=most)
        to = np.frombuffer(out, f"u{n}")
        compile_transpose([row * n])
        return Permutation(order.outer, order.inner, row, grain).write(first, to, fill, most)

    def _make(
        self, info: TensorInfo, data: memoryview, out: memoryview, first: int, *lines: int
    ) -> CastCounts:
        """Dequantize or cast ``data``, elements of ``info`` from ``first`` on, to ``out``.

        ``lines``: number of equal lines in ``data``, and elements of ``info`` between their starts.
        """
        if isinstance(info, Packed):
            return self.decoders.of(info, self.dtype).decode(data, out, first, *lines)
        return self.casts[info.read_dtype, self.dtype](data, out)

    def _lines(self, made: Joined, start: int, pitch: int, to: _Array) -> CastCounts:
        """Fill the row ``to[i]`` with cast elements of ``made`` from ``start + i * pitch`` on."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self.dtype.itemsize
        counts, line = ZERO, memoryview(bytearray(numel * self.dtype.itemsize))
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
        """Fill row ``to[i]`` with cast elements from ``first + i * pitch`` (a block's start) on."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self.dtype.itemsize
        src = info.read_dtype
        nbytes, step = src.nbytes(numel), src.nbytes(pitch)
        with self._values(info, first, first + (lines - 1) * pitch + numel) as view:
            found = np.ndarray((lines, nbytes), np.uint8, view, strides=(step, 1))
            if src is self.dtype:
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


def _overlaps(made: Joined, first: int, stop: int) -> Iterator[tuple[Slice, int, int, int]]:
    """Yield (slice, begin, end, shift) for each slice that holds some of ``first`` to ``stop``.

    Ends are exclusive. Element i of ``made`` is element i + shift of the slice's tensor.
    """
    at = 0
    for piece in made.pieces:
        begin, end = max(first, at), min(stop, at + piece.numel)
        if begin < end:
            yield piece, begin, end, piece.first - at
        at += piece.numel


def _order(piece: Slice) -> RowTranspose | None:
    """Return the permutation from a slice's row order in the file to the model's; None if equal."""
    info = piece.info
    if piece.turn is None and isinstance(info, Packed) and info.group.is_transposed:
        return RowTranspose(math.prod(info.shape[:-2]), *info.shape[-2:])
    return piece.turn
