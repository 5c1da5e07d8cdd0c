"""What becomes of a chunk's elements between the file and the device: see `Step`."""

from __future__ import annotations

from abc import ABC, abstractmethod

from streamload.codecs.cast_table import Cast, CastCounts
from streamload.codecs.parts import QuantCounts
from streamload.codecs.scheme import Decoder
from streamload.codecs.weights import Packed
from streamload.core.dtypes import F32, DType
from streamload.errors import UnsupportedCastError
from streamload.planning.chunks import Chunk, StridedRead
from streamload.planning.placement import Placement
from streamload.streaming.state import NO_COUNTS, NO_ERRORS, Counts, Job


class Step(ABC):
    """Copies, casts, quantizes or dequantizes the elements of one chunk, in one thread.

    Attributes:
        moves: bytes stay as they are.
        gathers: lines of a run are joined before.
    """

    moves = False
    gathers = False
    counts: Counts = NO_COUNTS

    def __init__(self, job: Job, chunk: Chunk, p: Placement) -> None:
        self._job, self._chunk, self._placement = job, chunk, p

    def begin(self, run: StridedRead) -> None:
        """Look at a run; all calls until the next are for its elements."""
        return None

    def changed(self, data: memoryview, start: int) -> memoryview:
        """Whole rows of the file from byte ``start`` on, as functions change them before."""
        return data

    @abstractmethod
    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Write what elements become.

        Args:
            data: the elements, line after line.
            out: what they become, written; must not overlap ``data``.
            at: byte of the parameter at which ``out`` begins.
            start: byte of the file at which ``data`` begins.
            lines: how many lines, each at `StridedRead.pitch` from the one before in the file.
        """


class Casting(Step):
    """Casts elements, or copies them."""

    counts: CastCounts = NO_COUNTS

    def __init__(self, cast: Cast, *, moves: bool) -> None:
        self._cast, self.moves = cast, moves

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Cast elements: what they become depends on no place."""
        self.counts += self._cast(data, out)


class Changing(Casting):
    """Casts rows that functions have changed, from the dtype that these gave."""

    def __init__(self, job: Job, chunk: Chunk, p: Placement) -> None:
        super().__init__(job.cast(p), moves=False)
        self._job, self._chunk, self._dst = job, chunk, p.dst

    def changed(self, data: memoryview, start: int) -> memoryview:
        """See `Step.changed`."""
        rows, _, self._cast = _changed(self._job, self._chunk, data, start, self._dst)
        return rows


class Encoding(Step):
    """Quantizes elements: ``at`` is the place of their units."""

    gathers = True
    counts: QuantCounts = NO_ERRORS

    def changed(self, data: memoryview, start: int) -> memoryview:
        """Changed rows in float32; see `Step.changed`."""
        if not self._placement.changes:
            return data
        rows, dtype, cast = _changed(self._job, self._chunk, data, start, F32)
        out = memoryview(bytearray(len(rows) // dtype.itemsize * F32.itemsize))
        cast(rows, out)
        return out

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Quantise whole units."""
        encoder = self._job.encoder(self._chunk.placement)
        self.counts += encoder.encode(data, out, self._placement.numel_at(at))


class Decoding(Step):
    """Dequantizes elements: ``start`` selects their scales."""

    gathers = True
    counts: CastCounts = NO_COUNTS
    _info: Packed
    _decoder: Decoder

    def begin(self, run: StridedRead) -> None:
        """Read the scales of the run's tensor, where no thread has done that yet."""
        info = self._job.tensor_at(self._chunk, run.start)
        assert isinstance(info, Packed), info.name
        self._info, self._decoder = info, self._job.decoder(info, self._placement)
        self._pitch = info.dtype.numel(run.pitch)

    def __call__(
        self, data: memoryview, out: memoryview, *, at: int, start: int, lines: int = 1
    ) -> None:
        """Dequantise the elements of some lines."""
        first = self._info.dtype.numel(start - self._info.start)
        self.counts += self._decoder.decode(data, out, first, lines, self._pitch)


def step_of(job: Job, chunk: Chunk, p: Placement) -> Step:
    """The step of a chunk on the host; its placement is no auxiliary part."""
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
    """Rows as functions change them, their dtype, and the cast of it."""
    info, first = job.rows_at(chunk, start)
    rows, dtype = job.transfer.changes.apply(info, data, first)
    try:
        return rows.data, dtype, job.cast_of(dtype, dst)
    except UnsupportedCastError as error:
        reason = f"its transform returned {dtype}: return {info.dtype}, as was given"
        raise UnsupportedCastError(
            error.src, error.dst, reason=reason, tensor=info.name, path=info.shard
        ) from error
