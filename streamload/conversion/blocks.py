"""Cut output files into blocks, and list the source bytes of each."""

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
    """An output file and the state of writing it."""

    out: OutFile
    left_nbytes: int = 0  # bytes still to write
    tensors: list[Writing] = field(default_factory=list)  # not yet cut into blocks
    output: Output | None = None  # the open file
    sum: FileSum | None = None  # if `ConvertPlan.wants_sums`


@dataclass(slots=True)
class Writing:
    """An output tensor and the state of writing it."""

    index: int  # its number in the journal
    file: File
    out: OutTensor
    digested: int  # the digest has all before this byte of the file
    left_nbytes: int  # bytes still to write
    hasher: xxh3_128 | None = None  # only while bytes are added: there may be very many tensors
    digest: str = ""  # in hexadecimal, once all bytes are in it
    counts: CastCounts = ZERO
    # of the codes of a quantized weight: its other tensors (scales), the encoder, and the errors
    auxiliary: Sequence[Writing] = ()
    encoder: Encoder | None = None  # from the first block to the last
    errors: QuantCounts | None = None

    @property
    def is_alone(self) -> bool:
        """Whether no `Block` of this tensor holds another: it is permuted, or quantized here."""
        return self.out.coding is not None or (self.out.turn is not None and self.out.nbytes > 0)

    @property
    def finished(self) -> Finished:
        """The journal's record of this tensor, once it is written."""
        errors = None if self.errors is None else self.errors.rounded()
        return Finished(self.digest, self.counts, errors)


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes ``start`` to ``stop`` of an output file, from bytes of a source file; ends exclusive.

    ``read`` to ``read_stop``: byte range in the source file; if the tensor is assembled from
    several slices, only the length of the range has a meaning, for progress.
    """

    tensor: Writing
    read: int
    read_stop: int
    start: int
    stop: int


@dataclass(slots=True)
class Block:
    """Bytes of an output file that one thread reads, casts and writes at once."""

    file: File
    start: int  # its first byte in the file: a multiple of a block's length, or of a tensor's unit
    # ranges of the file to write: (first byte, last byte exclusive)
    runs: list[tuple[int, int]] = field(default_factory=list)
    # reads: each has the parts that follow each other in one source file
    windows: list[list[Part]] = field(default_factory=list)

    def add(self, tensor: Writing | None, start: int, stop: int, block_nbytes: int) -> None:
        """Add bytes ``start`` to ``stop`` (exclusive) of the file; ``tensor`` None: the header.

        ``block_nbytes``: most source bytes of one read.
        """
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
        # without a cast single bytes are copied, also of dtypes below a byte
        src, dst = (1, 1) if info.dtype is dtype else (info.dtype.itemsize, dtype.itemsize)
        if (coding := tensor.out.coding) is not None:
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
                and not before.is_assembled  # that has a window of its own
                and window[-1].read_stop == read
                and part.read_stop - window[0].read <= block_nbytes
            ):
                window.append(part)
            else:
                self.windows.append([part])

    def _add_gathered(self, tensor: Writing, start: int, stop: int, block_nbytes: int) -> None:
        """Add bytes of a tensor assembled from slices; `Part.read` then only counts progress."""
        out, nbytes = tensor.out, tensor.out.read_nbytes
        step = stop - start if out.coding is None else most_codes(out, out.coding, block_nbytes)
        for first, last in cut(start, stop, step):
            read, read_stop = (nbytes * (at - out.start) // out.nbytes for at in (first, last))
            self.windows.append([Part(tensor, read, read_stop, first, last)])


def most_codes(out: OutTensor, coding: Coding, most_nbytes: int) -> int:
    """Return the bytes of quantized values to write at once, a multiple of `least_nbytes`.

    At most ``most_nbytes`` of the source are quantized at once, unless `least_nbytes` takes more.
    """
    unit_nbytes = least_nbytes(out, most_nbytes)
    read_nbytes = unit_nbytes // coding.dst_unit_nbytes * coding.src_unit_nbytes
    return max(most_nbytes // read_nbytes, 1) * unit_nbytes


def least_nbytes(out: OutTensor, most_nbytes: int) -> int:
    """Return the fewest bytes to write at once: whole permuted rows, and whole quantization units.

    A unit is the elements that are quantized together. Rows of more than ``most_nbytes`` are cut,
    and read twice.
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
