"""The host's work on a chunk between file and device: copy, cast, quantize or dequantize."""

from __future__ import annotations

from abc import ABC, abstractmethod

from streamload.codecs.cast_table import Cast, CastCounts
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import QuantCounts
from streamload.codecs.weights import Packed
from streamload.core.dtypes import F32, DType
from streamload.errors import UnsupportedCastError
from streamload.planning.chunks import Chunk, StridedRead
from streamload.planning.moves import Kind
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
