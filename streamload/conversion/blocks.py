"""Cut output files into blocks that fit into memory, and compute their elements.

An element may be one of several slices of source tensors that are joined: see `Joined`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from xxhash import xxh3_128

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import AHEAD_NBYTES, BLOCK_NBYTES, Room, Shards, cut
from streamload.codecs.cast_table import ZERO, Cast, CastCounts
from streamload.codecs.decode import Decoders, scales_nbytes
from streamload.codecs.parts import QuantCounts
from streamload.codecs.permute import Fill, Permutation, compile_transpose, transpose
from streamload.codecs.scheme import Encoder, Quantized
from streamload.codecs.weights import Packed
from streamload.conversion.disk import FileSum, Output
from streamload.core.dtypes import F64, DType
from streamload.core.location import Url
from streamload.core.memory import available_cpus, first_that_fits
from streamload.core.tensors import Coding, RowTranspose, TensorInfo
from streamload.core.units import round_up
from streamload.files.local import BOUNCE_NBYTES
from streamload.formats.writer import Joined, OutFile, OutTensor, Slice
from streamload.planning.quant_policy import held_nbytes
from streamload.planning.transforms import Changed

_Array = np.ndarray[Any, Any]
#: Most bytes of values that functions change at once, unless a row is longer.
CHANGED_NBYTES = 2**22


@dataclass(slots=True)
class Assembler:
    """Reads, casts and permutes elements of an output tensor for one thread."""

    dtype: DType  # elements are cast or dequantized to it
    casts: Mapping[tuple[DType, DType], Cast]  # by source and output dtype
    decoders: Decoders
    shards: Shards
    room: Room  # the thread's memory for blocks

    def read(self, info: TensorInfo, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Read file bytes ``start`` to ``stop`` (exclusive) of a tensor; yields a view of them."""
        return self.shards.block(info.shard, start, stop, self.room, info.name)

    def elements(self, made: Joined, first: int, stop: int, out: memoryview) -> CastCounts:
        """Assemble elements ``first`` to ``stop`` (exclusive) of an output tensor in ``out``.

        Elements are cast; returns the counts of values that the cast changed.
        """
        if made.turn is not None:
            row, fill = made.numel // made.turn.rows, partial(self._lines, made)
            return self._permuted(made.turn, row, made.infos, fill, first, out)
        counts, n = ZERO, self.dtype.itemsize
        for piece, begin, end, shift in _overlaps(made, first, stop):
            part = out[(begin - first) * n : (end - first) * n]
            counts += self._piece(piece, begin + shift, end + shift, part)
        return counts

    def straight(
        self, made: Joined, first: int, stop: int
    ) -> Iterator[tuple[int, int, TensorInfo | None, int]]:
        """Split elements ``first`` to ``stop`` (exclusive) into ranges to copy and to compute.

        Yields first element and stop (exclusive); then the tensor whose file holds the range in
        final form, and its first byte there; None and 0 if `elements` must compute it.
        """
        if made.turn is not None:
            yield first, stop, None, 0
            return
        for piece, begin, end, shift in _overlaps(made, first, stop):
            info = piece.info
            computed = info is None or info.is_computed or piece.turn is not None or piece.shift
            if info is None or computed or info.dtype is not self.dtype:
                yield begin, end, None, 0
            else:
                yield begin, end, info, info.start + (begin + shift) * self.dtype.itemsize

    def _piece(self, piece: Slice, first: int, stop: int, out: memoryview) -> CastCounts:
        """Write a slice's cast elements; ``first``, ``stop`` (exclusive): indices in its tensor."""
        info, order, n = piece.info, _order(piece), self.dtype.itemsize
        if info is None:
            out[:] = piece.data[first * n : stop * n] or bytes(len(out))
            return ZERO
        if order is not None:
            row, fill = info.numel // order.rows, partial(self._read_lines, info)
            return self._permuted(order, row, [info], fill, first, out)
        counts, unit = ZERO, info.row_numel if isinstance(info, Changed) else info.dtype.unit
        step = max(self._most_numel(info) // unit, 1) * unit
        for a, b in cut(first, stop, step, first // unit * unit):
            part = out[(a - first) * n : (b - first) * n]
            with self._values(info, a, b) as data:
                if piece.shift:  # of vectors: there is no kernel for it
                    values = np.frombuffer(data, info.read_dtype.numpy).astype(np.float32)
                    shifted = (values + np.float32(piece.shift)).astype(self.dtype.numpy)
                    part[:] = shifted.tobytes()
                else:
                    counts += self._make(info, data, part, a)
        return counts

    def _most_numel(self, info: TensorInfo) -> int:
        """Return the most elements of a tensor that are read at once."""
        if isinstance(info, Changed):
            return CHANGED_NBYTES // info.read_dtype.itemsize
        return info.dtype.numel(self.room.block_nbytes)

    def _values(
        self, info: TensorInfo, first: int, stop: int
    ) -> AbstractContextManager[memoryview]:
        """Read elements ``first`` to ``stop`` (exclusive) of ``read_dtype``; yields their bytes."""
        if not isinstance(info, Changed):
            begin, end = info.dtype.span(first, stop)
            return self.read(info, info.start + begin, info.start + end)
        row, dtype = info.row_numel, info.stored.dtype
        begin, end = first // row * row, -(-stop // row) * row
        data = memoryview(bytearray((end - begin) * dtype.itemsize))
        start = info.start + begin * dtype.itemsize
        for a, b in cut(start, start + data.nbytes, self.room.block_nbytes):
            with self.read(info, a, b) as view:
                data[a - start : b - start] = view
        rows, dtype = info.changes.apply(info.stored, data, begin // row)
        found = rows[(first - begin) * dtype.itemsize : (stop - begin) * dtype.itemsize]
        return nullcontext(found.data)

    def _permuted(
        self,
        order: RowTranspose,
        row: int,
        infos: Sequence[TensorInfo],
        fill: Fill,
        first: int,
        out: memoryview,
    ) -> CastCounts:
        """Fill ``out`` with elements from ``first`` on of a tensor, its rows permuted by ``order``.

        ``fill`` reads rows of ``row`` elements in file order; each read begins and ends on whole
        blocks of the dtypes of ``infos`` (quantized dtypes have several elements in one).
        """
        n, most = self.dtype.itemsize, self.room.block_nbytes
        grain = math.lcm(*(info.dtype.unit // math.gcd(info.dtype.unit, row) for info in infos))
        most = min((self._most_numel(info) for info in infos), default=most)
        to = np.frombuffer(out, f"u{n}")
        compile_transpose([row * n])
        return Permutation(order.outer, order.inner, row, grain).write(first, to, fill, most)

    def _make(
        self, info: TensorInfo, data: memoryview, out: memoryview, first: int, *lines: int
    ) -> CastCounts:
        """Dequantize or cast ``data``, elements of ``info`` from ``first`` on, to ``out``.

        ``lines``: number of equal lines in ``data``, and elements of ``info`` between their starts.
        """
        if isinstance(info, Packed):
            return self.decoders.of(info, self.dtype).decode(data, out, first, *lines)
        return self.casts[info.read_dtype, self.dtype](data, out)

    def _lines(self, made: Joined, start: int, pitch: int, to: _Array) -> CastCounts:
        """Fill the row ``to[i]`` with cast elements of ``made`` from ``start + i * pitch`` on."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self.dtype.itemsize
        counts, line = ZERO, memoryview(bytearray(numel * self.dtype.itemsize))
        joined = Joined(made.pieces)
        pieces, at, done = iter(made.pieces), 0, 0
        piece = next(pieces)
        while done < lines:
            begin = start + done * pitch
            while begin >= at + piece.numel:
                at, piece = at + piece.numel, next(pieces)
            count = min((at + piece.numel - numel - begin) // pitch + 1, lines - done)
            if count > 0 and piece.info is not None and _order(piece) is None:
                first = piece.first + begin - at
                counts += self._read_lines(piece.info, first, pitch, to[done : done + count])
                done += count
                continue
            counts += self.elements(joined, begin, begin + numel, line)
            to[done] = np.frombuffer(line, to.dtype)
            done += 1
        return counts

    def _read_lines(self, info: TensorInfo, first: int, pitch: int, to: _Array) -> CastCounts:
        """Fill row ``to[i]`` with cast elements from ``first + i * pitch`` (a block's start) on."""
        lines, numel = len(to), to.shape[1] * to.itemsize // self.dtype.itemsize
        src = info.read_dtype
        nbytes, step = src.nbytes(numel), src.nbytes(pitch)
        with self._values(info, first, first + (lines - 1) * pitch + numel) as view:
            found = np.ndarray((lines, nbytes), np.uint8, view, strides=(step, 1))
            if src is self.dtype:
                transpose(found.view(to.dtype), to)
                del found
                return ZERO
            data = found.copy()
            del found
        made = np.empty(to.shape, to.dtype)
        given, became = (each.view(np.uint8).reshape(-1).data for each in (data, made))
        counts = self._make(info, given, became, first, lines, pitch)
        transpose(made, to)
        return counts


def _overlaps(made: Joined, first: int, stop: int) -> Iterator[tuple[Slice, int, int, int]]:
    """Yield (slice, begin, end, shift) for each slice that holds some of ``first`` to ``stop``.

    Ends are exclusive. Element i of ``made`` is element i + shift of the slice's tensor.
    """
    at = 0
    for piece in made.pieces:
        begin, end = max(first, at), min(stop, at + piece.numel)
        if begin < end:
            yield piece, begin, end, piece.first - at
        at += piece.numel


def _order(piece: Slice) -> RowTranspose | None:
    """Return the permutation from a slice's row order in the file to the model's; None if equal."""
    info = piece.info
    if piece.turn is None and isinstance(info, Packed) and info.group.is_transposed:
        return RowTranspose(math.prod(info.shape[:-2]), *info.shape[-2:])
    return piece.turn


_PAGE = 4096

# Counted is all that a memory cgroup charges and the kernel cannot reclaim at once: memory of the
# process, pages that are being read, and dirty pages.

# More threads wait for the disk, or take memory; one would not read while it writes.
_THREADS = range(2, 5)
_REMOTE_THREADS = 8  # each waits for a server most of the time

# Each is a little more than the counters of memory cgroups showed.
_RUN_NBYTES = 2 * 2**20  # the journal, and what the kernel keeps for open files: 1.5 MB
_OPEN_NBYTES = 2**19  # without the journal, which counts with the files in memory: 0.1 to 0.4 MB
_CAST_NBYTES = 7 * 2**20  # LLVM compiles the first kernel in 6.3 MB; numpy casts in 2 MB a thread
_THREAD_NBYTES = 2**18  # stack, heap and page tables of a thread: 0.1 MB; with a connection 0.2
_TENSOR_NBYTES = 720  # a tensor in plan, journal and report: 310 to 700, most for JSON
_NODE_TENSOR_NBYTES = 400  # its placement on a node, in addition: 150 to 350
_QUANT_NBYTES = 4 * 2**20  # more kernels: 1 MB each; numpy's temporaries, 1 MB a thread
_CHANGED_COPIES = 3  # arrays of float64 in which values change: the old, the new, their products
_KEPT_SHARE = 256  # the kernel keeps 576 bytes for 64 pages of a file in memory: 1/455
_TURNED_BLOCKS = 12  # blocks of permuted elements, of all threads together
_TEXTS = 5  # names are in headers, journal, sidecar and its dirty pages, the report's JSON


@dataclass(frozen=True, slots=True)
class InMemory:
    """Bytes of files, still to be written, that stay in memory until removed, and the reason."""

    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Way:
    """Number of threads and sizes of blocks with which a conversion reads and writes."""

    threads: int
    block_nbytes: int = BLOCK_NBYTES  # most bytes that a thread reads, and writes, at once
    behind: int = 6  # blocks that the disk writes before a thread waits for one
    direct: bool = False  # whether files are read past the page cache, without read-ahead

    @property
    def turned_nbytes(self) -> int:
        """Most bytes of a permuted tensor that a thread writes at once, gathered from all rows."""
        # blocks that a long unit made longer are long enough
        usual_nbytes = min(self.block_nbytes, BLOCK_NBYTES)
        return max(_TURNED_BLOCKS // self.threads * usual_nbytes, self.block_nbytes)

    def nbytes(self, *, to_disk: bool) -> int:
        """Return the most bytes of host memory that threads take, and dirty pages if ``to_disk``.

        The kernel keeps 2 to 10% more for each page.
        """
        reading = min(BOUNCE_NBYTES, self.block_nbytes) if self.direct else AHEAD_NBYTES
        dirty_nbytes = (self.threads + self.behind) * self.block_nbytes * 9 // 8
        own_nbytes = self.threads * (2 * self.block_nbytes + _THREAD_NBYTES + reading)
        return own_nbytes + dirty_nbytes * to_disk


def choose_way(
    checkpoint: Checkpoint,
    dtypes: Sequence[DType | None],
    weights: Sequence[Quantized] = (),
    *,
    nodes: bool,
    turned: bool = False,
    compiled: bool = False,
    written: InMemory | None = None,
) -> Way:
    """Return the fastest `Way` that fits into free memory; PlanInfeasibleError if none does.

    ``dtypes`` are all that tensors may be cast to, ``weights`` those to quantize; ``nodes``: the
    output is split over nodes; ``turned``: some tensors are joined from others, or permuted;
    ``compiled``: all casts are compiled already; ``written``: the files, if they go to memory.
    """
    threads = min(max(available_cpus(), _THREADS.start), _THREADS.stop - 1)
    remote = any(isinstance(header.path, Url) for header in checkpoint.shards)
    packed = [info for info in checkpoint.tensors.values() if isinstance(info, Packed)]
    # columns are gathered, and perhaps quantized
    any_turned = turned or any(info.group.is_transposed for info in packed)
    if remote:  # tensors that are permuted in several blocks are requested as often
        threads = _REMOTE_THREADS // 2 if any_turned else _REMOTE_THREADS
    ways = [
        Way(threads, direct=remote),
        Way(2, direct=remote),
        Way(threads, 2**20, 2, direct=True),
        Way(2, 2**20, 2, direct=True),
        Way(1, 2**20, 1, direct=True),
        Way(1, 2**18, 1, direct=True),
    ]
    # a unit is read and quantized at once
    unit_nbytes = max((w.unit_numel * w.dtype.itemsize for w in weights), default=0)
    ways = [
        replace(way, block_nbytes=max(way.block_nbytes, round_up(unit_nbytes, _PAGE)))
        for way in ways
    ]
    under_way = sorted(map(held_nbytes, weights), reverse=True)  # each thread has one weight
    each_nbytes = _TENSOR_NBYTES + _NODE_TENSOR_NBYTES * nodes
    beside = [len(part.suffix) for weight in weights for part in weight.parts[1:]]
    tensors_nbytes = each_nbytes * (len(checkpoint.tensors) + len(beside))
    texts_nbytes = sum(header.data_start for header in checkpoint.shards)
    entry_nbytes = texts_nbytes // max(len(checkpoint.tensors), 1)  # of a part, with its suffix
    tensors_nbytes += _TEXTS * (texts_nbytes + entry_nbytes * len(beside) + sum(beside))
    floats = {info.dtype for info in checkpoint.tensors.values() if info.dtype.kind == "float"}
    is_cast = any(d is not None and floats - {d} for d in dtypes)
    casts_nbytes = _QUANT_NBYTES * bool(weights)
    changed = [info for info in checkpoint.tensors.values() if isinstance(info, Changed)]
    is_compiling = is_cast and not compiled
    casts_nbytes += _CAST_NBYTES * (is_compiling or bool(weights) or any_turned or bool(changed))
    row_nbytes = F64.itemsize * max((info.row_numel for info in changed), default=0)
    changing_nbytes = _CHANGED_COPIES * max(CHANGED_NBYTES, row_nbytes) * bool(changed)
    changing_nbytes += max((info.changes.thread_nbytes for info in changed), default=0)
    decoding_nbytes = 2 * max((scales_nbytes(info.group) for info in packed), default=0)
    stay_nbytes = written.nbytes + written.nbytes // _KEPT_SHARE if written is not None else 0
    run_nbytes = _RUN_NBYTES if written is None else _OPEN_NBYTES
    always_nbytes = run_nbytes + casts_nbytes + tensors_nbytes + decoding_nbytes + stay_nbytes
    to_disk = written is None
    largest = [
        ("files that are written to memory", stay_nbytes),
        ("names and places of tensors", tensors_nbytes),
        ("casts", casts_nbytes),
        ("values that adapters change", ways[-1].threads * changing_nbytes),
        ("scales of quantised weights", decoding_nbytes),
        ("statistics of weights that are quantised", sum(under_way[: ways[-1].threads])),
        ("threads and their blocks", run_nbytes + ways[-1].nbytes(to_disk=to_disk)),
    ]
    return first_that_fits(
        [
            (
                way,
                always_nbytes
                + way.threads * changing_nbytes
                + way.nbytes(to_disk=to_disk)
                + sum(under_way[: way.threads])
                + 2 * way.threads * way.turned_nbytes * any_turned,
            )
            for way in ways
        ],
        sorted((one for one in largest if one[1]), key=lambda one: -one[1]),
        reason="" if written is None else written.reason,
    )


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
        out, nbytes = tensor.out, tensor.out.reads.total()
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
