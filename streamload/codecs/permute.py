"""Transposition of matrices in tiles while they load, by a kernel if one can be compiled.

A block of 8 lines of 8 elements becomes its transpose in three rounds that interleave the lines of
its first half with those of its second: each round rotates the bits of an element's number, those
of line and column, by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from streamload.codecs.cast_table import ZERO, CastCounts
from streamload.codecs.ir import Vector, kernel_text, loop, shuffle
from streamload.codecs.llvm import HostFunction
from streamload.core.dtypes import kind_of
from streamload.errors import UnsupportedCastError

_Array = np.ndarray[Any, Any]
#: Reads a tile: (index of the first element, elements from one line's start to the next line's, the
#: array of lines of rows to fill); returns the counts of a cast on the way.
Fill = Callable[[int, int, _Array], CastCounts]

# A tile stays in the CPU's cache: the elements of a line go to as many memory pages.
_LINES = 128
_TILE_NBYTES = 2**20

_BLOCK = 8  # lines and columns that the kernel transposes in registers
_LINE_NBYTES = 64  # bytes of a line that are read at once: a line of the CPU's cache
_ITEMSIZES = (1, 2, 4, 8)
_FUNCTION = HostFunction("transpose", (c_void_p, c_void_p, *4 * (c_size_t,)))


@dataclass(frozen=True, slots=True)
class Permutation:
    """A tensor of shape (groups, outer, inner, row) whose axes outer and inner are swapped.

    Attributes:
        outer: lines of a group, as stored.
        inner: rows of a line.
        row: elements of a row, which stay together.
        grain: rows of a line are read in multiples of it.
    """

    outer: int
    inner: int
    row: int
    grain: int = 1

    def write(self, first: int, out: _Array, fill: Fill, most_numel: int) -> CastCounts:
        """Write permuted elements to ``out``, from ``first`` on in the output's order.

        ``fill`` gets (first element, elements from a line to the next, tile), fills the tile from
        the stored order, and returns counts. It spans at most ``most_numel`` elements, those
        between lines included; a single row may be longer. Elements are unsigned integers of their
        width.
        """
        grain, column = self.grain, self.outer * self.row
        matrix = self.inner * column
        counts, at, stop = ZERO, first, first + out.size
        while at < stop:
            base = at // matrix * matrix
            begin, end = at - base, min(stop - base, matrix)
            left = begin // column // grain * grain
            right = min(-(-end // (column * grain)) * grain, self.inner)
            # a column is counted by the call that writes its start
            counted = left if left * column == begin else min(left + grain, right)
            part = out[at - first :][: end - begin]
            exact = begin == left * column and end == right * column
            whole = part if exact else np.empty((right - left) * column, out.dtype)
            rows = whole.view(kind_of(self.row * out.itemsize)).reshape(right - left, self.outer).T
            for a, b in ((left, counted), (counted, right)):
                for start, upto, line, last in self._tiles(a, b, out.itemsize, most_numel):
                    number = base + (line * self.inner + start) * self.row
                    tile = rows[line:last, start - left : upto - left]
                    found = fill(number, self.inner * self.row, tile)
                    counts += found if a == counted else ZERO
            if not exact:
                part[:] = whole[begin - left * column :][: end - begin]
            at += end - begin
        return counts

    def _tiles(
        self, left: int, right: int, itemsize: int, most_numel: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield tiles of rows ``left`` to ``right``: (first row, row end, first line, line end)."""
        step = max(most_numel // (self.row * self.grain), 1) * self.grain
        for start in range(left, right, step):
            stop = min(start + step, right)
            numel = (stop - start) * self.row
            lines = max(_LINES, _TILE_NBYTES // (numel * itemsize))
            lines = min(lines, max((most_numel - numel) // (self.inner * self.row) + 1, 1))
            for line in range(0, self.outer, lines):
                yield start, stop, line, min(line + lines, self.outer)


def transpose(found: _Array, to: _Array) -> None:
    """Assign ``to[...] = found`` for matrices; fast if columns of ``to`` are contiguous.

    Only kernels that `compile_transpose` has compiled are used: LLVM takes memory and time.
    """
    n = to.itemsize
    lines = columns = 0
    kernel = _FUNCTION.found(n)
    if kernel is not None and to.strides[0] == n == found.strides[1]:
        lines, columns = (of // step * step for of, step in zip(to.shape, _steps(n), strict=True))
        at, out = (array.__array_interface__["data"][0] for array in (found, to))
        kernel(at, out, lines, columns, found.strides[0], to.strides[1])
    to[lines:] = found[lines:]
    to[:lines, columns:] = found[:lines, columns:]


def compile_transpose(itemsizes: Iterable[int]) -> None:
    """Compile the kernels that `transpose` uses for elements of ``itemsizes`` bytes."""
    for itemsize in set(itemsizes).intersection(_ITEMSIZES):
        name = f"{8 * itemsize} bits"
        with suppress(UnsupportedCastError):
            _FUNCTION.kernel(itemsize, (name, name), lambda n=itemsize, **_: _kernel_ir(n))


def _steps(itemsize: int) -> tuple[int, int]:
    """Return the (lines, columns) of a step: the kernel transposes multiples of both."""
    return _BLOCK, _LINE_NBYTES // itemsize


def _kernel_ir(itemsize: int) -> str:
    """Return LLVM IR of ``void transpose(src, out, lines, columns, source pitch, output pitch)``.

    Pitches are bytes from one line's start to the next one's. A step reads a cache line of 8 lines;
    steps go down the lines, so that they write a few columns in order.
    """
    v, item = Vector(1, False), f"i{8 * itemsize}"
    line_step, column_step = _steps(itemsize)

    def place(start: str, pitch: str, line: str, offset: int, element: str) -> str:
        number = v.op("add", "i64", line, offset)
        begin = v.op("mul", "i64", number, pitch)
        line_start = v.emit(f"getelementptr i8, ptr {start}, i64 {begin}")
        return v.emit(f"getelementptr {item}, ptr {line_start}, i64 {element}")

    def step(line: str, _: list[str], column: str) -> Sequence[str]:
        starts = [place("%src", "%src.pitch", line, i, column) for i in range(_BLOCK)]
        of = f"<{_BLOCK} x {item}>"
        for first in range(0, column_step, _BLOCK):
            rows = []
            for start in starts:
                at = v.emit(f"getelementptr {item}, ptr {start}, i64 {first}")
                rows.append(v.emit(f"load {of}, ptr {at}, align 1"))
            for i, row in enumerate(_transposed(v, of, rows), first):
                at = place("%out", "%out.pitch", column, i, line)
                v.lines.append(f"store {of} {row}, ptr {at}, align 1")
        return ()

    def down(column: str, _: list[str]) -> Sequence[str]:
        return loop(v, "0", "%lines", line_step, (), partial(step, column=column))

    loop(v, "0", "%columns", column_step, (), down)
    parameters = "ptr %src, ptr %out, i64 %lines, i64 %columns, i64 %src.pitch, i64 %out.pitch"
    return kernel_text(_FUNCTION.symbol, parameters, v.lines)


def _transposed(v: Vector, of: str, rows: list[str]) -> list[str]:
    """Write IR that transposes 8 x 8 elements, ``rows`` of vector type ``of``; return new rows."""
    half = _BLOCK // 2
    every = [number for i in range(_BLOCK) for number in (i, i + _BLOCK)]
    for _ in range(_BLOCK.bit_length() - 1):
        rows = [
            shuffle(v, of, a, b, order)
            for a, b in zip(rows[:half], rows[half:], strict=True)
            for order in (every[:_BLOCK], every[_BLOCK:])
        ]
    return rows
