"""Lines of a file that become columns: what a transposed matrix is made of.

A block of lines is read, cast, and written turned. It is small enough to stay in the CPU's cache,
since either its reads or its writes are scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from streamload.cast.table import Cast, CastCounts
from streamload.checkpoint.readers import Reader
from streamload.job import NO_COUNTS
from streamload.planning.chunks import Run
from streamload.planning.plan import Plan

_Array = np.ndarray[Any, Any]
_LEAST_LINES = 16  # of a block, where there are so many
_MOST_BETWEEN_NBYTES = 2**17  # a call costs as much as to read so many bytes that nobody wants


class Turner:
    """One thread's memory for blocks: two, allocated by the first run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._blocks: list[memoryview] = []

    def turn(
        self,
        reader: Reader,
        run: Run,
        cast: Cast | None,
        out: memoryview,
        offset: int,
        stride: int,
        width: int,
        source: memoryview,
    ) -> CastCounts:
        """Read a run, and write its rows.

        Args:
            reader: of the file.
            run: its lines.
            cast: of its elements; None where bytes stay as they are.
            out: where to.
            offset: byte of ``out`` at which the first row begins.
            stride: bytes from one row's beginning to the next one's.
            width: bytes of a row in ``out``.
            source: memory to read into, of ``Plan.slot_nbytes``; not used where files are mapped.
        """
        if not self._blocks:
            self._blocks = [memoryview(bytearray(self._plan.turn_nbytes)) for _ in range(2)]
        row_nbytes = run.line_nbytes // run.rows
        target = _array(out, width, (run.rows, run.lines), (stride, width), offset)
        counts = NO_COUNTS
        nbytes = max(row_nbytes, width)
        for begin, end, whole in self._windows(reader, run, source):
            lines = min(end - begin, max(_fitting(self._blocks[0], run.rows * nbytes), 1))
            lines = max(lines, min(_LEAST_LINES, end - begin))
            lines = min(lines, _fitting(self._blocks[0], nbytes))
            rows = _fitting(self._blocks[0], lines * nbytes)
            for first in range(begin, end, lines):
                last = min(first + lines, end)
                for row in range(0, run.rows, rows):
                    upto = min(row + rows, run.rows)
                    found = self._piece(reader, run, whole, begin, first, last, row, upto)
                    if cast is not None:
                        found, more = self._cast(cast, found, width)
                        counts += more
                    target[row:upto, first:last] = found.T
                    del found
            del whole
        return counts

    def _windows(
        self, reader: Reader, run: Run, source: memoryview
    ) -> Iterator[tuple[int, int, _Array | None]]:
        """Lines (from, to) as they lie in the file; None for those that are read piece by piece."""
        row_nbytes = run.line_nbytes // run.rows
        lines = self._plan.slot_nbytes // max(run.pitch, run.line_nbytes)
        pieces = reader.has_file and run.pitch - run.line_nbytes > _MOST_BETWEEN_NBYTES
        if not reader.mapped and (pieces or not lines):
            yield 0, run.lines, None
            return
        lines = max(lines, 1)
        for begin in range(0, run.lines, lines):
            end = min(begin + lines, run.lines)
            start = run.start + begin * run.pitch
            stop = start + (end - begin - 1) * run.pitch + run.line_nbytes
            if reader.mapped:
                window = reader.view(start, stop)
            else:
                reader.read_into(start, source[: stop - start])
                window = nullcontext(source[: stop - start])
            with window as view:
                shape = end - begin, run.rows
                yield begin, end, _array(view, row_nbytes, shape, (run.pitch, row_nbytes))

    def _piece(
        self,
        reader: Reader,
        run: Run,
        whole: _Array | None,
        begin: int,
        first: int,
        last: int,
        row: int,
        upto: int,
    ) -> _Array:
        """Rows ``row`` to ``upto`` of some lines; ``whole`` has those from ``begin`` on."""
        if whole is not None:
            return whole[first - begin : last - begin, row:upto]
        row_nbytes = run.line_nbytes // run.rows
        nbytes = (upto - row) * row_nbytes
        block = self._blocks[0]
        for line in range(first, last):
            at = (line - first) * nbytes
            start = run.start + line * run.pitch + row * row_nbytes
            reader.read_into(start, block[at : at + nbytes])
        shape = last - first, upto - row
        return _array(block, row_nbytes, shape, (nbytes, row_nbytes))

    def _cast(self, cast: Cast, found: _Array, width: int) -> tuple[_Array, CastCounts]:
        """Cast rows, which come out one after the other."""
        block, out = self._blocks
        nbytes = found.size * found.itemsize
        together = _array(block, found.itemsize, found.shape)
        if together.ctypes.data != found.ctypes.data:
            together[:] = found
        out = out[: found.size * width]
        counts = cast(block[:nbytes], out)
        return _array(out, width, found.shape), counts


def _array(
    memory: memoryview,
    width: int,
    shape: tuple[int, int],
    strides: tuple[int, int] | None = None,
    offset: int = 0,
) -> _Array:
    """Rows of ``width`` bytes each, as numpy moves them fastest."""
    kind = f"u{width}" if width in (1, 2, 4, 8) else f"V{width}"
    return np.ndarray(shape, kind, memory, offset, strides)


def _fitting(block: memoryview, nbytes: int) -> int:
    return block.nbytes // nbytes
