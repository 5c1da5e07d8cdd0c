"""Lines of a file that become columns: what a transposed matrix is made of.

A block of lines is read, cast, and written turned. It is small enough to stay in the CPU's cache,
since either its reads or its writes are scattered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from streamload.files.local import Reader
from streamload.planning.chunks import StridedRead
from streamload.planning.plan import Plan
from streamload.streaming.steps import Step

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
        run: StridedRead,
        step: Step,
        out: memoryview,
        offset: int,
        stride: int,
        width: int,
        source: memoryview,
        unit: int = 1,
    ) -> None:
        """Read a run, and write its rows.

        Args:
            reader: of the file.
            run: its lines.
            step: what becomes of its elements.
            out: where to.
            offset: byte of ``out`` at which the first row begins.
            stride: bytes from one row's beginning to the next one's.
            width: bytes of a row in ``out``.
            source: memory to read into, of ``Plan.slot_nbytes``; not used where files are mapped.
            unit: rows that are read together.
        """
        if not self._blocks:
            self._blocks = [memoryview(bytearray(self._plan.turn_nbytes)) for _ in range(2)]
        cells = run.rows // unit
        cell_nbytes = run.line_nbytes // cells
        target = _array(out, width, (run.rows, run.lines), (stride, width), offset)
        nbytes = max(cell_nbytes, unit * width)
        for begin, end, whole in self._windows(reader, run, source, cell_nbytes):
            lines = min(end - begin, max(_fitting(self._blocks[0], cells * nbytes), 1))
            lines = max(lines, min(_LEAST_LINES, end - begin))
            lines = min(lines, _fitting(self._blocks[0], nbytes))
            most = _fitting(self._blocks[0], lines * nbytes)
            for first in range(begin, end, lines):
                last = min(first + lines, end)
                for cell in range(0, cells, most):
                    upto = min(cell + most, cells)
                    here = (first, last, cell, upto)
                    found = self._piece(reader, run, whole, begin, *here, cell_nbytes)
                    if not step.moves:
                        start = run.start + first * run.pitch + cell * cell_nbytes
                        found = self._stepped(step, found, start, width, unit)
                    target[cell * unit : upto * unit, first:last] = found.T
                    del found
            del whole

    def _windows(
        self, reader: Reader, run: StridedRead, source: memoryview, cell_nbytes: int
    ) -> Iterator[tuple[int, int, _Array | None]]:
        """Lines (from, to) as they lie in the file; None for those that are read piece by piece."""
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
                shape = end - begin, run.line_nbytes // cell_nbytes
                yield begin, end, _array(view, cell_nbytes, shape, (run.pitch, cell_nbytes))

    def _piece(
        self,
        reader: Reader,
        run: StridedRead,
        whole: _Array | None,
        begin: int,
        first: int,
        last: int,
        cell: int,
        upto: int,
        cell_nbytes: int,
    ) -> _Array:
        """Cells ``cell`` to ``upto`` of some lines; ``whole`` has those from ``begin`` on."""
        if whole is not None:
            return whole[first - begin : last - begin, cell:upto]
        nbytes = (upto - cell) * cell_nbytes
        block = self._blocks[0]
        for line in range(first, last):
            at = (line - first) * nbytes
            start = run.start + line * run.pitch + cell * cell_nbytes
            reader.read_into(start, block[at : at + nbytes])
        shape = last - first, upto - cell
        return _array(block, cell_nbytes, shape, (nbytes, cell_nbytes))

    def _stepped(self, step: Step, found: _Array, start: int, width: int, unit: int) -> _Array:
        """What becomes of lines from a file byte on: ``unit`` rows of each cell, side by side."""
        block, out = self._blocks
        nbytes = found.size * found.itemsize
        together = _array(block, found.itemsize, found.shape)
        if together.ctypes.data != found.ctypes.data:
            together[:] = found
        out = out[: found.size * unit * width]
        step(block[:nbytes], out, at=0, start=start, lines=found.shape[0])
        return _array(out, width, (found.shape[0], found.shape[1] * unit))


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
