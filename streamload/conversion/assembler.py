"""Compute elements of output tensors that join slices of source tensors: see `Joined`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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

_Array = np.ndarray[Any, Any]


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

        Yields:
            First element and stop (exclusive) of a range; then the tensor whose file holds it in
            final form, and the range's first byte there; None and 0 if `elements` must compute it.
        """
        if made.turn is not None:
            yield first, stop, None, 0
            return
        for piece, begin, end, shift in _overlaps(made, first, stop):
            info, changes = piece.info, isinstance(piece.info, Packed) or piece.turn is not None
            if info is None or changes or info.dtype is not self.dtype:
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
        counts, unit = ZERO, info.dtype.unit
        step = max(info.dtype.numel(self.room.block_nbytes) // unit, 1) * unit
        for a, b in cut(first, stop, step, first // unit * unit):
            begin, end = info.dtype.span(a, b)
            part = out[(a - first) * n : (b - first) * n]
            with self.read(info, info.start + begin, info.start + end) as data:
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
        """Fill ``out`` with elements from ``first`` on of a tensor, its rows permuted by ``order``.

        ``fill`` reads rows of ``row`` elements in file order; each read begins and ends on whole
        blocks of the dtypes of ``infos`` (quantized dtypes have several elements in one).
        """
        n, most = self.dtype.itemsize, self.room.block_nbytes
        grain = math.lcm(*(info.dtype.unit // math.gcd(info.dtype.unit, row) for info in infos))
        most = min((info.dtype.numel(most) for info in infos), default=most)
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
        return self.casts[info.dtype, self.dtype](data, out)

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
        nbytes, step = info.dtype.nbytes(numel), info.dtype.nbytes(pitch)
        begin = info.start + info.dtype.nbytes(first)
        with self.read(info, begin, begin + (lines - 1) * step + nbytes) as view:
            found = np.ndarray((lines, nbytes), np.uint8, view, strides=(step, 1))
            if info.dtype is self.dtype:
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
