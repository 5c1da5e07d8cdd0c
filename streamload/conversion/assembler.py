"""Elements of tensors that are put together of others: see `streamload.formats.writer.Joined`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from streamload.codecs.cast_table import ZERO, Cast, CastCounts
from streamload.codecs.decode import Decoder, Decoders
from streamload.codecs.group import Packed
from streamload.codecs.permute import Elements, Make, Read, read_lines, turned
from streamload.core.dtypes import DType
from streamload.core.tensors import TensorInfo
from streamload.formats.writer import Joined, Slice


class Gatherer:
    """Gives elements of a tensor, in the order of the output; one for each thread's block."""

    def __init__(
        self,
        dtype: DType,
        casts: Mapping[tuple[DType, DType], Cast],
        decoders: Decoders,
        read: Callable[[TensorInfo], Read],
        most_nbytes: int,
    ) -> None:
        """Read nothing yet.

        Args:
            dtype: what elements become.
            casts: by dtypes.
            decoders: of quantised weights.
            read: gives what reads a tensor's file.
            most_nbytes: the most that is read at once.
        """
        self._dtype, self._n = dtype, dtype.itemsize
        self._casts, self._decoders, self._read, self._most = casts, decoders, read, most_nbytes

    def elements(self, made: Joined, first: int, stop: int, out: memoryview) -> CastCounts:
        """Write elements ``first`` to ``stop`` (exclusive); gives what their casts did not keep."""
        turn = made.turn
        if turn is None:
            return self._flat(made.pieces, first, stop, out)

        def fill(start: int, pitch: int, to: np.ndarray[tuple[int, ...], np.dtype]) -> CastCounts:
            return self._lines(made, start, pitch, to)

        width = (turn.outer, turn.inner, made.numel // turn.rows)
        most = min((info.dtype.numel(self._most) for info in made.infos), default=self._most)
        grain = math.lcm(*(_grain(info, width[2]) for info in made.infos))
        return turned(width, self._n, first, stop, out, fill, most, grain)

    def straight(
        self, made: Joined, first: int, stop: int
    ) -> Iterator[tuple[int, int, TensorInfo | None, int]]:
        """Elements by the pieces that they are of.

        Yields:
            The first, the last (exclusive), the tensor in whose file they lie as they are wanted,
            and the byte there; None for what `elements` has to make.
        """
        if made.turn is not None:
            yield first, stop, None, 0
            return
        at = 0
        for piece in made.pieces:
            begin, end, info = max(first, at), min(stop, at + piece.numel), piece.info
            if begin < end:
                lies = info is not None and not isinstance(info, Packed) and piece.turn is None
                if info is None or not lies or info.dtype is not self._dtype:
                    yield begin, end, None, 0
                else:
                    yield begin, end, info, info.start + (piece.first + begin - at) * self._n
            at += piece.numel

    def _flat(
        self, pieces: tuple[Slice, ...], first: int, stop: int, out: memoryview
    ) -> CastCounts:
        """The same of pieces one after the other."""
        counts, at = ZERO, 0
        for piece in pieces:
            begin, end = max(first, at), min(stop, at + piece.numel)
            if begin < end:
                shift = piece.first - at
                part = out[(begin - first) * self._n : (end - first) * self._n]
                counts += self._piece(piece, begin + shift, end + shift, part)
            at += piece.numel
        return counts

    def _piece(self, piece: Slice, first: int, stop: int, out: memoryview) -> CastCounts:
        info, turn = piece.info, piece.turn
        if info is None:
            out[:] = piece.data[first * self._n : stop * self._n] or bytes(len(out))
            return ZERO
        if turn is not None:

            def fill(
                start: int, pitch: int, to: np.ndarray[tuple[int, ...], np.dtype]
            ) -> CastCounts:
                return read_lines(info, self._make(info), self._read(info), start, pitch, to)

            width = (turn.outer, turn.inner, info.numel // turn.rows)
            most, grain = info.dtype.numel(self._most), _grain(info, width[2])
            return turned(width, self._n, first, stop, out, fill, most, grain)
        counts = ZERO
        for a, b in self._cut(info, first, stop):
            part = out[(a - first) * self._n : (b - first) * self._n]
            counts += self._straight(info, a, b, part)
        return counts

    def _cut(self, info: TensorInfo, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Elements that are read at once."""
        unit = info.dtype.unit
        step = max(info.dtype.numel(self._most) // unit, 1) * unit
        for at in range(first // unit * unit, stop, step):
            yield max(at, first), min(at + step, stop)

    def _straight(self, info: TensorInfo, first: int, stop: int, out: memoryview) -> CastCounts:
        """Elements as they follow each other in the file."""
        read = self._read(info)
        if isinstance(info, Packed):
            made = Elements(info, self._decoder(info), self._dtype, read, self._most)
            return made.write(first, stop, out)
        n = info.dtype.itemsize
        with read(info.start + first * n, info.start + stop * n) as data:
            return self._casts[info.dtype, self._dtype](data, out)

    def _lines(
        self, made: Joined, start: int, pitch: int, to: np.ndarray[tuple[int, ...], np.dtype]
    ) -> CastCounts:
        """Lines of all pieces: at once those of one that lies as models have it."""
        lines, numel = len(to), math.prod(to.shape[1:])
        counts, line = ZERO, memoryview(bytearray(numel * self._n))
        pieces, at, done = iter(made.pieces), 0, 0
        piece = next(pieces)
        while done < lines:
            begin = start + done * pitch
            while begin >= at + piece.numel:
                at, piece = at + piece.numel, next(pieces)
            info, first = piece.info, piece.first + begin - at
            count = min((at + piece.numel - numel - begin) // pitch + 1, lines - done)
            if count > 0 and info is not None and piece.turn is None:
                some, read = to[done : done + count], self._read(info)
                counts += read_lines(info, self._make(info), read, first, pitch, some)
                done += count
                continue
            counts += self._flat(made.pieces, begin, begin + numel, line)
            to[done] = np.frombuffer(line, to.dtype).reshape(to.shape[1:])
            done += 1
        return counts

    def _decoder(self, info: Packed) -> Decoder:
        return self._decoders.of(info, self._dtype)

    def _make(self, info: TensorInfo) -> Make | None:
        """What becomes of a tensor's stored elements."""
        if isinstance(info, Packed):
            return self._decoder(info).decode
        if info.dtype is self._dtype:
            return None
        cast = self._casts[info.dtype, self._dtype]
        return lambda data, out, first, lines, pitch: cast(data, out)


def _grain(info: TensorInfo, row: int) -> int:
    """How many rows of so many elements are whole blocks, or whole bytes, of a tensor."""
    unit = info.dtype.unit
    return unit // math.gcd(unit, row)
