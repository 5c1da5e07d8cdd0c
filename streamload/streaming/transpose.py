"""Transposes while reading: a file's lines become columns, in blocks that fit the CPU's cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from streamload.checkpoint.shards import cut
from streamload.codecs.permute import kind_of, transpose
from streamload.files.local import Reader
from streamload.planning.chunks import StridedRead
from streamload.planning.plan import Plan
from streamload.streaming.steps import Step

_Array = np.ndarray[Any, Any]
_LEAST_LINES = 128  # in a block
_MOST_BETWEEN_NBYTES = 2**17  # one read call costs about as much as reading this much extra


def rows_of(run: StridedRead, out: memoryview, offset: int, stride: int, width: int) -> _Array:
    """Return a strided read's target in ``out`` as an array of (rows of a line, lines).

    ``offset`` is its first byte, ``stride`` the bytes between rows, ``width`` an element's bytes.
    """
    return np.ndarray((run.rows, run.lines), kind_of(width), out, offset, (stride, width))


class Transposer:
    """Transposes strided reads in one thread, in two blocks of memory allocated at first use."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks: list[memoryview] = []

    def place(
        self,
        reader: Reader,
        run: StridedRead,
        step: Step,
        rows: _Array,
        source: memoryview,
        unit: int = 1,
    ) -> None:
        """Read lines, convert them by ``step``, and write them as columns of ``rows``.

        ``source``: ``Plan.slot_nbytes`` to read into, unused if the file is mapped; ``unit``:
        columns of a line that convert together.
        """
        if not self._blocks:
            self._blocks = [memoryview(bytearray(self._plan.turn_nbytes)) for _ in range(2)]
        cells = run.rows // unit
        cell_nbytes = run.line_nbytes // cells
        fitting = self._plan.turn_nbytes // max(cell_nbytes, unit * rows.itemsize)
        for begin, end, window in self._windows(reader, run, source, cell_nbytes):
            lines = max(fitting // cells, min(_LEAST_LINES, end - begin), 1)
            lines = min(lines, end - begin, fitting)
            for first, last in cut(begin, end, lines):
                for cell, upto in cut(0, cells, fitting // lines):
                    start = run.start + first * run.pitch + cell * cell_nbytes
                    if window is None:
                        nbytes = (upto - cell) * cell_nbytes
                        found = self._read(reader, start, run.pitch, last - first, nbytes)
                        found = found.view(kind_of(cell_nbytes))
                    else:
                        found = window[first - begin : last - begin, cell:upto]
                    if not step.moves:
                        found = self._stepped(step, found, start, rows.itemsize, unit)
                    transpose(found, rows[cell * unit : upto * unit, first:last].T)
                    del found
            del window

    def _windows(
        self, reader: Reader, run: StridedRead, source: memoryview, cell_nbytes: int
    ) -> Iterator[tuple[int, int, _Array | None]]:
        """Yield (first line, stop exclusive, array of cells) for groups of a run's lines.

        Lines are mapped, or read into ``source``. The array is None if lines, or the gaps between
        them, are long: then the caller reads pieces of lines. A cell has ``cell_nbytes``.
        """
        lines = self._plan.slot_nbytes // max(run.pitch, run.line_nbytes)
        pieces = reader.has_file and run.pitch - run.line_nbytes > _MOST_BETWEEN_NBYTES
        if not reader.mapped and (pieces or not lines):
            yield 0, run.lines, None
            return
        for begin, end in cut(0, run.lines, max(lines, 1)):
            start = run.start + begin * run.pitch
            stop = start + (end - begin - 1) * run.pitch + run.line_nbytes
            if reader.mapped:
                window = reader.view(start, stop)
            else:
                reader.read_into(start, source[: stop - start])
                window = nullcontext(source[: stop - start])
            with window as view:
                shape = end - begin, run.line_nbytes // cell_nbytes
                strides = run.pitch, cell_nbytes
                yield begin, end, np.ndarray(shape, kind_of(cell_nbytes), view, 0, strides)

    def _read(self, reader: Reader, start: int, pitch: int, lines: int, nbytes: int) -> _Array:
        """Read ``nbytes`` of each line, one line a call, from file byte ``start`` on."""
        block = self._blocks[0]
        for line in range(lines):
            reader.read_into(start + line * pitch, block[line * nbytes : (line + 1) * nbytes])
        return np.ndarray((lines, nbytes), np.uint8, block)

    def _stepped(self, step: Step, found: _Array, start: int, width: int, unit: int) -> _Array:
        """Convert ``found``, elements from file byte ``start`` on; return (lines, columns).

        Each element of ``found`` becomes ``unit`` elements of ``width`` bytes.
        """
        block, out = self._blocks
        nbytes = found.size * found.itemsize
        together: _Array = np.ndarray(found.shape, found.dtype, block)
        if together.ctypes.data != found.ctypes.data:
            together[:] = found
        out = out[: found.size * unit * width]
        step(block[:nbytes], out, at=0, start=start, lines=found.shape[0])
        return np.ndarray((found.shape[0], found.shape[1] * unit), kind_of(width), out)
