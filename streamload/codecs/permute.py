"""Elements of tensors in the order in which models have them: cast, dequantised or turned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.codecs.cast_table import ZERO, CastCounts
from streamload.codecs.decode import Decoder
from streamload.codecs.group import Packed
from streamload.codecs.transposing import transpose
from streamload.core.dtypes import DType
from streamload.core.tensors import TensorInfo
from streamload.files.header import Turn

#: Opens bytes of a file, from one to another, exclusive.
Read = Callable[[int, int], AbstractContextManager[memoryview]]
#: What becomes of stored elements: (bytes of lines, out, number of the first, lines, elements from
#: one line's beginning to the next one's).
Make = Callable[[memoryview, memoryview, int, int, int], CastCounts]
#: Writes lines of elements: (number of the first, elements from one line's beginning to the next
#: one's, where to: an array by line).
Fill = Callable[[int, int, "_Array"], CastCounts]

_Array = np.ndarray[Any, Any]
# Elements of a line that becomes a column go to as many places: so many lines at once stay in the
# CPU's cache, where they lie at distances that are no multiple of a page.
_LINES = 128
_TILE_NBYTES = 2**20
_APART_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Elements:
    """Writes elements of a tensor in the order of models: dequantised, or as they are.

    Attributes:
        info: the tensor.
        decoder: of it; None for elements as they are, of the transpose of a plain matrix where
            there is no ``turn``.
        dtype: what elements become.
        read: reads its file.
        most_nbytes: the most that is read at once; of a tensor that lies as models have it, as
            much is read as the elements take.
        turn: how its rows lie in its file, where its header says that models have them otherwise.
    """

    info: TensorInfo
    decoder: Decoder | None
    dtype: DType
    read: Read
    most_nbytes: int
    turn: Turn | None = None

    def write(self, first: int, stop: int, out: memoryview) -> CastCounts:
        """Write some elements.

        Args:
            first: number of the first element, in the order of the output.
            stop: of the last one, exclusive.
            out: the elements, written.
        """
        info, decoder = self.info, self.decoder
        width = None
        if self.turn is not None:
            groups, outer, inner, _ = self.turn
            width = (outer, inner, info.numel // (groups * outer * inner))
        elif decoder is None or (isinstance(info, Packed) and info.lies_turned):
            width = (info.shape[-2], info.shape[-1], 1)
        if width is not None:
            most, unit = info.dtype.numel(self.most_nbytes), info.dtype.unit
            grain = unit // math.gcd(unit, width[2])
            return turned(width, self.dtype.itemsize, first, stop, out, self._fill, most, grain)
        assert decoder is not None, info.name
        begin, end = info.dtype.span(first, stop)
        with self.read(info.start + begin, info.start + end) as data:
            return decoder.decode(data, out, first)

    def _fill(self, start: int, pitch: int, to: _Array) -> CastCounts:
        make = None if self.decoder is None else self.decoder.decode
        return read_lines(self.info, make, self.read, start, pitch, to)


def turned(
    width: tuple[int, int, int],
    itemsize: int,
    first: int,
    stop: int,
    out: memoryview,
    fill: Fill,
    most_numel: int,
    grain: int = 1,
) -> CastCounts:
    """Elements of rows that are seen as (groups, outer, inner), with the last two axes swapped.

    Args:
        width: outer, inner, and elements of a row.
        itemsize: bytes of an element of the output.
        first: number of the first element, in the order of the output.
        stop: of the last one, exclusive.
        out: the elements, written.
        fill: writes the elements of some lines, of ``inner`` rows each, from one element on.
        most_numel: the most that ``fill`` may read, from the first line's beginning to the last
            one's end; of one line alone it may be asked for a longer row.
        grain: rows of a line are asked for in multiples of this.
    """
    outer, inner, row = width
    matrix, column = outer * inner * row, outer * row
    counts, at = ZERO, first
    while at < stop:
        base = at // matrix * matrix
        begin, end = at - base, min(stop - base, matrix)
        left = begin // column // grain * grain
        right = min(-(-end // (column * grain)) * grain, inner)
        # columns that begin before are counted by the part that has their beginning
        counted = left if left * column == begin else min(left + grain, right)
        part = out[(at - first) * itemsize : (at - first + end - begin) * itemsize]
        to = np.frombuffer(part, f"u{itemsize}")
        exact = begin == left * column and end == right * column
        whole = to if exact else np.empty((right - left) * column, to.dtype)
        columns = whole.reshape(right - left, outer, row)
        for a, b in ((left, counted), (counted, right)):
            for left_of, right_of, line, upto in _tiles(a, b, width, itemsize, most_numel, grain):
                start = base + (line * inner + left_of) * row
                by_line = columns[left_of - left : right_of - left, line:upto].transpose(1, 0, 2)
                found = fill(start, inner * row, by_line)
                counts += found if a == counted else ZERO
        if not exact:
            to[:] = whole[begin - left * column :][: end - begin]
        at += end - begin
    return counts


def _tiles(
    left: int, right: int, width: tuple[int, int, int], itemsize: int, most_numel: int, grain: int
) -> Iterator[tuple[int, int, int, int]]:
    """Rows of lines, and lines, that are read at once: (left, right, first line, last line)."""
    outer, inner, row = width
    step = max(most_numel // (row * grain), 1) * grain
    for a in range(left, right, step):
        b = min(a + step, right)
        lines = max(_LINES, _TILE_NBYTES // ((b - a) * row * itemsize))
        lines = min(lines, max((most_numel - (b - a) * row) // (inner * row) + 1, 1))
        for line in range(0, outer, lines):
            yield a, b, line, min(line + lines, outer)


def read_lines(
    info: TensorInfo, make: Make | None, read: Read, start: int, pitch: int, to: _Array
) -> CastCounts:
    """Read lines of a tensor's elements, as they are stored, and write what they become.

    Args:
        info: the tensor.
        make: what becomes of them; None where bytes stay as they are.
        read: reads the tensor's file.
        start: number of the first element; a multiple of `DType.unit`, as ``pitch`` is.
        pitch: elements from one line's beginning to the next one's.
        to: the elements, written: an array of unsigned integers by line.
    """
    lines, numel = len(to), math.prod(to.shape[1:])
    is_turned = to.ndim == 3 and to.shape[-1] == 1  # each element of a line goes elsewhere
    nbytes, step = info.dtype.nbytes(numel), info.dtype.nbytes(pitch)
    begin = info.start + info.dtype.nbytes(start)
    with read(begin, begin + (lines - 1) * step + nbytes) as view:
        apart = np.ndarray((lines, nbytes), np.uint8, view, strides=(step, 1))
        if make is None:
            found = apart.view(to.dtype)
            if is_turned and transpose(found, to[:, :, 0]):
                del apart, found
                return ZERO
            if to.shape[-1] * to.itemsize < _APART_NBYTES:
                some = np.empty((lines, numel + _APART_NBYTES // to.itemsize), to.dtype)[:, :numel]
                some[...] = found
                found = some
            if to.ndim == 3:  # a row at once, not its elements one by one
                row = f"V{to.shape[-1] * to.itemsize}"
                to, found = to.view(row), found.view(row)
            to[...] = found.reshape(to.shape)
            del apart, found
            return ZERO
        data = np.array(apart)
        del apart
    made = np.empty(to.shape, to.dtype)
    given, became = (memoryview(each.data).cast("B") for each in (data, made))
    counts = make(given, became, start, lines, pitch)
    if not (is_turned and transpose(made[:, :, 0], to[:, :, 0])):
        to[...] = made
    return counts
