"""Blocks of output files, and the source bytes that each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_128

from streamload.checkpoint.shards import cut
from streamload.codecs.cast_table import ZERO, CastCounts
from streamload.codecs.encode import Encoder
from streamload.codecs.parts import QuantCounts
from streamload.conversion.checksums import FileSum
from streamload.conversion.disk import Output
from streamload.conversion.journal import Finished
from streamload.core.tensors import Coding
from streamload.formats.writer import OutFile, OutTensor


@dataclass(slots=True, eq=False)
class File:
    """A file that is being written."""

    out: OutFile
    left_nbytes: int = 0
    tensors: list[Writing] = field(default_factory=list)  # until they are cut into blocks
    output: Output | None = None  # while it is open
    sum: FileSum | None = None  # where the plan wants it


@dataclass(slots=True)
class Writing:
    """A tensor that is being written."""

    index: int  # among all of the plan
    file: File
    out: OutTensor
    digested: int  # up to this byte of the file
    left_nbytes: int
    hasher: xxh3_128 | None = None  # from the first byte to the last: there may be very many
    digest: str = ""
    counts: CastCounts = ZERO
    beside: Sequence[Writing] = ()  # of codes, the other parts
    encoder: Encoder | None = None  # of codes, from the first block to the last
    errors: QuantCounts | None = None  # of codes

    @property
    def coding(self) -> Coding | None:
        """How the weight is quantized; also of parts other than codes."""
        return self.out.coding

    @property
    def is_alone(self) -> bool:
        """Whether its blocks have nothing of other tensors: those of codes, or permuted."""
        return self.coding is not None or (self.out.turn is not None and self.out.nbytes > 0)

    @property
    def finished(self) -> Finished:
        """What the journal keeps."""
        errors = None if self.errors is None else self.errors.rounded()
        return Finished(self.digest, self.counts, errors)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor: ``read`` to ``read_stop`` of its shard, ``start`` to ``stop`` here."""

    tensor: Writing
    read: int
    read_stop: int
    start: int
    stop: int


@dataclass(slots=True)
class Block:
    """What is written at once: within a multiple of a block's length."""

    file: File
    start: int  # of the block in the file: of codes any byte, else a multiple of its length
    # (first byte, last byte exclusive) of what is written of it
    runs: list[tuple[int, int]] = field(default_factory=list)
    # what is read for it: each is parts that follow each other in one shard
    windows: list[list[Part]] = field(default_factory=list)

    def add(self, tensor: Writing | None, start: int, stop: int, block_nbytes: int) -> None:
        """Add bytes ``start`` to ``stop`` of the file: of a tensor, or of the header."""
        if self.runs and self.runs[-1][1] == start:
            self.runs[-1] = (self.runs[-1][0], stop)
        else:
            self.runs.append((start, stop))
        if tensor is None:
            return
        info, dtype = tensor.out.info, tensor.out.dtype
        if tensor.out.is_assembled:
            self._add_gathered(tensor, start, stop, block_nbytes)
            return
        # where nothing is cast bytes are bytes, also of dtypes below one
        src, dst = (1, 1) if info.dtype is dtype else (info.dtype.itemsize, dtype.itemsize)
        if (coding := tensor.coding) is not None:
            src, dst = coding.src_unit_nbytes, coding.dst_unit_nbytes
        for first, last in cut(start, stop, block_nbytes // src * dst):
            read = info.start + (first - tensor.out.start) // dst * src
            read_stop = info.start + -(-(last - tensor.out.start) // dst) * src
            # the last unit of a weight may be short
            part = Part(tensor, read, min(read_stop, info.stop), first, last)
            window = self.windows[-1] if self.windows else [part]
            before = window[-1].tensor.out
            if (
                before.info.shard == info.shard
                and not before.is_assembled  # it has a window of its own
                and window[-1].read_stop == read
                and part.read_stop - window[0].read <= block_nbytes
            ):
                window.append(part)
            else:
                self.windows.append([part])

    def _add_gathered(self, tensor: Writing, start: int, stop: int, block_nbytes: int) -> None:
        """Add bytes of an assembled tensor in windows that only count what is read for them."""
        out, nbytes = tensor.out, tensor.out.read_nbytes
        step = stop - start if out.coding is None else most_codes(out, out.coding, block_nbytes)
        for first, last in cut(start, stop, step):
            read, read_stop = (nbytes * (at - out.start) // out.nbytes for at in (first, last))
            self.windows.append([Part(tensor, read, read_stop, first, last)])


def most_codes(out: OutTensor, coding: Coding, most_nbytes: int) -> int:
    """Bytes of codes that are computed at once, from at most so many bytes of the weight."""
    unit_nbytes = least_nbytes(out, most_nbytes)
    read_nbytes = unit_nbytes // coding.dst_unit_nbytes * coding.src_unit_nbytes
    return max(most_nbytes // read_nbytes, 1) * unit_nbytes


def least_nbytes(out: OutTensor, most_nbytes: int) -> int:
    """The least bytes of a tensor to write at once: whole units, and whole rows if permuted.

    Rows that are cut are read twice: those of more than ``most_nbytes``.
    """
    row_numel = 0
    if out.made is not None and out.turn is not None:
        row_numel = out.made.numel // out.turn.rows * out.turn.outer
    coding = out.coding
    if coding is None:
        return out.dtype.nbytes(row_numel)
    units, rest = divmod(row_numel, coding.unit_numel)
    fits = not rest and 0 < units * coding.src_unit_nbytes <= most_nbytes
    return coding.dst_unit_nbytes * (units if fits else 1)
