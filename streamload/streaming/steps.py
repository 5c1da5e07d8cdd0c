"""The host's work on a chunk between file and device: copy, cast, quantize or dequantize.

While reading, lines of a file may become columns, in blocks that fit the CPU's cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

from streamload.checkpoint.shards import cut
from streamload.codecs.cast_table import Cast, CastCounts
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import QuantCounts
from streamload.codecs.permute import transpose
from streamload.codecs.weights import Packed
from streamload.core.dtypes import F32, DType, kind_of
from streamload.errors import UnsupportedCastError
from streamload.files.reader import Reader
from streamload.planning.chunks import Chunk, StridedRead
from streamload.planning.moves import Kind
from streamload.planning.plan import Plan
from streamload.streaming.state import NO_COUNTS, NO_ERRORS, Counts, Job


class Step(ABC):
    """Copies, casts, quantizes or dequantizes the elements of one chunk, in one thread.

    Attributes:
        moves: bytes stay as they are.
        gathers: a call takes all lines of a strided read, joined.
    """

    moves = False
    gathers = False
    counts: Counts = NO_COUNTS

    def __init__(self, job: Job, chunk: Chunk, p: Kind) -> None:
        self._job, self._chunk, self._placement = job, chunk, p

    def begin(self, run: StridedRead) -> None:
        """Prepare for a strided read; all calls until the next `begin` are for its elements."""
        return None

    def changed(self, data: memoryview, start: int) -> memoryview:
        """Return whole rows, from file byte ``start`` on, changed by the user's functions."""
        return data

    @abstractmethod
    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Convert elements of ``data``, line after line; write them to ``out``, which is apart.

        ``at``: byte of the parameter at which ``out`` begins; ``start``: byte of the file at which
        ``data`` begins; ``lines`` are `StridedRead.pitch` bytes apart in the file.
        """


class Casting(Step):
    """Casts elements, or copies them."""

    counts: CastCounts = NO_COUNTS

    def __init__(self, cast: Cast, *, moves: bool) -> None:
        self._cast, self.moves = cast, moves

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Cast elements; ``at`` and ``start`` do not matter."""
        self.counts += self._cast(data, out)


class Changing(Casting):
    """Casts rows that the user's functions have changed, from the dtype that these return."""

    def __init__(self, job: Job, chunk: Chunk, p: Kind) -> None:
        super().__init__(job.cast(p), moves=False)
        self._job, self._chunk, self._dst = job, chunk, p.dst

    def changed(self, data: memoryview, start: int) -> memoryview:
        """Apply the user's functions; see `Step.changed`."""
        rows, _, self._cast = _changed(self._job, self._chunk, data, start, self._dst)
        return rows


class Encoding(Step):
    """Quantizes elements, blocks of the format at a time."""

    gathers = True
    counts: QuantCounts = NO_ERRORS

    def changed(self, data: memoryview, start: int) -> memoryview:
        """Return changed rows as float32, or ``data`` if no function changes them."""
        if not self._placement.changes:
            return data
        rows, dtype, cast = _changed(self._job, self._chunk, data, start, F32)
        out = memoryview(bytearray(len(rows) // dtype.itemsize * F32.itemsize))
        cast(rows, out)
        return out

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Quantize ``data``, which is whole blocks of the format."""
        encoder = self._job.encoder(self._chunk.placement)
        self.counts += encoder.encode(data, out, self._placement.numel_at(at))


class Decoding(Step):
    """Dequantizes elements, with the scales that belong to their place in the file."""

    gathers = True
    counts: CastCounts = NO_COUNTS

    def begin(self, run: StridedRead) -> None:
        """Read the scales of the run's tensor, unless a thread has read them already."""
        info = self._job.tensor_at(self._chunk, run.start)
        assert isinstance(info, Packed), info.name
        engine: Engine = "numpy" if self._placement.cast == "numpy" else "auto"
        self._info = info
        self._decoder = self._job.decoders.of(info, self._placement.dst, engine)
        self._pitch = info.dtype.numel(run.pitch)

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Dequantize the elements in ``data``, whose lines begin at file byte ``start``."""
        first = self._info.dtype.numel(start - self._info.start)
        self.counts += self._decoder.decode(data, out, first, lines, self._pitch)


def step_of(job: Job, chunk: Chunk, p: Kind) -> Step:
    """Return the step that converts a chunk on the host; not for scales that the load computes."""
    if p.cast == "device":
        return Casting(job.cast(p), moves=True)
    if p.cast == "rows":
        return Changing(job, chunk, p)
    if p.coding is not None:
        return Encoding(job, chunk, p)
    if p.src.is_packed:
        return Decoding(job, chunk, p)
    return Casting(job.cast(p), moves=p.src is p.dst)


def _changed(
    job: Job, chunk: Chunk, data: memoryview, start: int, dst: DType
) -> tuple[memoryview, DType, Cast]:
    """Return rows changed by the user's functions, their dtype, and its cast to ``dst``."""
    info = job.tensor_at(chunk, start)
    first = (start - info.start) * (info.shape[0] if info.shape else 1) // info.nbytes
    rows, dtype = job.transfer.changes.apply(info, data, first)
    try:
        return rows.data, dtype, job.cast_of(dtype, dst)
    except UnsupportedCastError as error:
        reason = f"its transform returned {dtype}: return {info.dtype}, as was given"
        raise UnsupportedCastError(
            error.src, error.dst, reason=reason, tensor=info.name, path=info.shard
        ) from error


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
