"""The streaming pass of a conversion: windows of the source, cast into blocks of the output.

A few threads take blocks of the output files: each reads and casts a block's bytes into memory of
its own, adds them to the tensors' digests in order, and writes them at their place. The calling
thread syncs finished bytes to the disk, writes the journal, and reports progress.

`Writer` is no sink of `streamload.streaming.loop`: the loop reads in the order of the source, a
weight's rows at a time; `Writer` writes in output order, with bytes of many tensors in one call
and tensors joined from several, so that digests and checksums are computed from memory. The loop's
calling thread hands out each unit; here threads take blocks while it waits for the disk, and a
queue in between took 3 to 4% more CPU time (docs/measurements.md). Kernels, decoders, encoders and
open files are shared.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from streamload.checkpoint.digests import digest_of, hasher
from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import Room, Shards, cut
from streamload.codecs.cast_table import ZERO, Cast, CastCounts, OutOfRange, make_cast
from streamload.codecs.decode import Decoders
from streamload.codecs.parts import QuantCounts
from streamload.conversion.blocks import (
    Assembler,
    Block,
    File,
    Part,
    Way,
    Writing,
    least_nbytes,
    most_codes,
)
from streamload.conversion.destination import OUT, RESERVE, Destination
from streamload.conversion.disk import FileSum, Output, writing_to
from streamload.conversion.journal import Finished, Journal
from streamload.conversion.plan import ConvertPlan, folder_of, in_folder
from streamload.core.dtypes import DType
from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Location
from streamload.core.system import direct_memory
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, OutOfRangeError
from streamload.files.folder import resolve_reader
from streamload.files.header import Header
from streamload.files.page_cache import PageCache
from streamload.formats.writer import Joined, OutFile, OutTensor
from streamload.planning.quant_policy import encoder_of

# Share of the time that goes into `Writer._commit`: after one that took t seconds, the next comes
# t / share later, and no later than the maximum.
_COMMIT_SHARE = 0.05
_LATEST_COMMIT_S = 5.0
_MOST_WHOLE = 32  # files that are whole and still open
_TICK_S = 0.02
_NO_ERRORS = QuantCounts()
_LEAST_NORMAL, _MOST_HALF = 2.0**-14, 65504.0  # of float16, which scales have
_ELEMENT = 16  # bytes of the longest element
#: Values that a `Part`'s cast changed, and errors of its quantization.
_Counted: TypeAlias = tuple[CastCounts, QuantCounts]

# --- the pass -------------------------------------------------------------------------------------


class Writer:
    """Writes all tensors of a plan that its journal does not list as finished."""

    def __init__(
        self,
        plan: ConvertPlan,
        checkpoint: Checkpoint,
        destination: Destination,
        journal: Journal,
        way: Way,
    ) -> None:
        """Compile kernels, list unfinished tensors; UnsupportedCastError: the CPU lacks a cast."""
        self.read_nbytes = 0
        self.sums: dict[str, str] = {}
        self._wants_sums = plan.wants_sums
        self._destination = destination
        self._journal = journal
        self._out_of_range: OutOfRange = plan.options["out_of_range"]
        self._way = way
        tensors = [t for f in plan.files for t in f.tensors]
        self._casts: dict[tuple[DType, DType], Cast] = {
            pair: make_cast(*pair, out_of_range=self._out_of_range) for pair in plan.casts
        }
        self._decoders = Decoders(self._out_of_range)
        any_turned = any(t.turn is not None for t in tensors)
        self._memory_nbytes = way.turned_nbytes if any_turned else way.block_nbytes
        codings = {(t.coding.format, t.src): t.coding for t in tensors if t.coding is not None}
        for (_, src), coding in codings.items():
            encoder_of(coding, src)  # compiled before threads start
        self._files = [File(out, len(out.header)) for out in plan.files]
        self._unread: Counter[Location] = Counter()
        self._elements = threading.local()
        self._written: list[Writing] = []
        self._list_unfinished(journal)
        #: Bytes of the source to read in all.
        self.unread_nbytes = self._unread.total()
        self._shards = Shards(
            checkpoint.shards,
            lambda shard: resolve_reader(shard, "direct" if way.direct else "auto"),
            cache=PageCache("auto", to_read_nbytes=self.unread_nbytes),
        )
        # the blocks of each file that were not handed out yet, and those that a thread has alone
        self._cuts = deque(self._cut(file) for file in self._files)
        self._own: dict[int, Iterator[Block]] = {}
        self._behind: deque[Callable[[], None]] = deque()  # each waits for the disk
        self._whole: list[File] = []  # with nothing left to write
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._next_commit = time.monotonic()

    def _list_unfinished(self, journal: Journal) -> None:
        """Fill `File.tensors`, and `Writing.auxiliary` for scales, with all that is unfinished."""
        numbered = enumerate((file, t) for file in self._files for t in file.out.tensors)
        coming = {file: [(0, len(file.out.header))] for file in self._files}
        auxiliary: dict[tuple[str, object], list[Writing]] = {}  # by folder and weight
        for index, (file, t) in numbered:
            if index in journal.finished:
                continue
            tensor = Writing(index, file, t, t.start, t.nbytes)
            file.left_nbytes += t.nbytes
            if self._wants_sums:
                coming[file].append((t.start, t.stop))
            self._unread.update(t.reads)
            if t.coding is not None:
                of_weight = auxiliary.setdefault((folder_of(file.out.path), weight_of(t)), [])
                if t.is_auxiliary:
                    of_weight.append(tensor)
                    continue
                tensor.auxiliary = of_weight
            file.tensors.append(tensor)
            if not t.nbytes:
                tensor.digest = hasher().hexdigest()
                self._written.append(tensor)
        if self._wants_sums:
            for file in self._files:
                file.sum = FileSum(file.out.nbytes, coming[file])

    def _cut(self, file: File) -> Iterator[Block]:
        """Yield a file's header and unfinished tensors in blocks, in the order of the file."""
        nbytes = self._way.block_nbytes
        block = Block(file, 0)
        tensors, file.tensors = file.tensors, []  # they go as they are written
        ranges = ((t, t.out.start, t.out.stop) for t in tensors)
        for tensor, start, stop in chain([(None, 0, len(file.out.header))], ranges):
            if tensor is not None and tensor.is_alone:
                if block.runs:
                    yield block
                yield from self._cut_units(tensor)
                block = Block(file, stop // nbytes * nbytes)
                continue
            for first, last in cut(start, stop, nbytes, base=0):
                if first >= block.start + nbytes:
                    yield block
                    block = Block(file, first // nbytes * nbytes)
                block.add(tensor, first, last, nbytes)
        if block.runs:
            yield block

    def _cut_units(self, tensor: Writing) -> Iterator[Block]:
        """Yield blocks of one large tensor: whole quantization units, whole rows if they fit."""
        out = tensor.out
        nbytes = self._way.block_nbytes if out.turn is None else self._way.turned_nbytes
        if out.coding is not None:
            weights = None if out.importance is None else out.importance.read()
            tensor.encoder = encoder_of(out.coding, out.src, weights)
            tensor.errors = QuantCounts()
        if out.turn is not None and out.coding is not None:
            step = most_codes(out, out.coding, nbytes)  # a block is read at once
        else:
            unit_nbytes = least_nbytes(out, nbytes)
            step = nbytes // unit_nbytes * unit_nbytes or nbytes // _ELEMENT * _ELEMENT
        for first, last in cut(out.start, out.stop, step):
            block = Block(tensor.file, first)
            block.add(tensor, first, last, nbytes)
            yield block

    def _next_block(self) -> Block | None:
        """Return the next block for the calling thread, which has the lock; None at the end.

        If md5 sums are needed, each thread has a file alone while there are enough files: its parts
        are then written in order, and added to the sum from memory.
        """
        me = threading.get_ident()
        while self._cuts:
            blocks = self._own.get(me, self._cuts[0])
            if self._wants_sums and me not in self._own:
                taken = self._own.values()
                blocks = next((one for one in self._cuts if one not in taken), blocks)
                self._own[me] = blocks
            if (block := next(blocks, None)) is not None:
                return block
            self._cuts.remove(blocks)
            self._own = {thread: one for thread, one in self._own.items() if one is not blocks}
        return None

    def run(self, tell: Callable[[int], None]) -> None:
        """Write all unfinished tensors to the disk and into the journal.

        After an error, the journal lists the finished tensors. ``tell`` is called with all source
        bytes read so far.
        """
        crew = ThreadPoolExecutor(self._way.threads, "convert")
        with deferred_interrupt() as interrupt, crew:
            try:
                tell(0)
                under_way = {crew.submit(self._work_through) for _ in range(self._way.threads)}
                while under_way and self._error is None:
                    under_way = wait(under_way, _TICK_S).not_done
                    interrupt.check()
                    tell(self.read_nbytes)
                    # it closes files: a process may have 1,024 open, others than these among them
                    if time.monotonic() >= self._next_commit or len(self._whole) >= _MOST_WHOLE:
                        self._commit()
                if self._error is not None:
                    raise self._error
                self._commit()
            except BaseException:
                self._fail(None)
                self._shards.stop()
                crew.shutdown()
                # room for the journal if the disk is full
                with suppress(OSError, CheckpointError):
                    self._destination.root.unlink(RESERVE)
                with suppress(CheckpointError):  # only the first error is raised
                    self._commit()
                raise
            finally:
                self._shards.close_all()
                for file in self._files:
                    self._close(file)
            tell(self.read_nbytes)

    def _fail(self, error: BaseException | None) -> None:
        """Stop all threads; `run` raises the first error that is passed here."""
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()

    def _commit(self) -> None:
        """Sync finished tensors to the disk, add them to the journal, and close whole files."""
        with self._changed:
            batch, self._written = self._written, []
            whole, self._whole = self._whole, []
            self._changed.notify_all()
        if not batch and not whole:
            return
        begun = time.monotonic()
        batch.sort(key=lambda tensor: tensor.index)
        try:
            for file in dict.fromkeys((*whole, *(tensor.file for tensor in batch))):
                if file.output is not None:  # None if its tensors have no bytes
                    file.output.sync()
            finished = {
                t.index: Finished(t.digest, t.counts, t.errors and t.errors.rounded())
                for t in batch
            }
            with writing_to(self._destination.path):
                self._journal.add(finished)
        except BaseException:
            with self._changed:
                self._written += batch  # there may be room for it later
            raise
        for file in whole:
            self._close(file)
        took = time.monotonic() - begun
        self._next_commit = time.monotonic() + min(took / _COMMIT_SHARE, _LATEST_COMMIT_S)

    def _close(self, file: File) -> None:
        """Close a file's `Output` if it is open."""
        with self._changed:
            output, file.output = file.output, None
        if output is not None:
            output.close()

    def _work_through(self) -> None:
        """Fill and write blocks until none is left: the main function of each thread."""
        memory = direct_memory(self._memory_nbytes)
        room = Room(self._way.block_nbytes)
        try:
            while not self._stopped:
                with self._changed:
                    while len(self._whole) >= 2 * _MOST_WHOLE and not self._stopped:
                        self._changed.wait()  # until files are closed
                    block = self._next_block()
                if block is None:
                    return
                self._fill(block, memory, room)
                self._put(block, memory)
        except BaseException as error:
            self._fail(error)

    def _fill(self, block: Block, memory: memoryview, room: Room) -> None:
        """Compute a block in ``memory``, reading into ``room``; update digests and counts."""
        header = block.file.out.header
        piece = header[block.start : block.start + self._way.block_nbytes]
        memory[: len(piece)] = piece
        counted: list[_Counted] = []
        for window in block.windows:
            info, start, stop = window[0].tensor.out.info, window[0].read, window[-1].read_stop
            if window[0].tensor.out.is_assembled:
                part = window[0]
                with memory[part.start - block.start : part.stop - block.start] as out:
                    counted.append(self._gather(part, out, room))
                continue
            with self._shards.block(info.shard, start, stop, room, info.name) as view:
                for part in window:
                    encoder, src = part.tensor.encoder, part.tensor.out.info.dtype
                    with (
                        view[part.read - start : part.read_stop - start] as data,
                        memory[part.start - block.start : part.stop - block.start] as out,
                    ):
                        if encoder is None:
                            counts = self._casts[src, part.tensor.out.dtype](data, out)
                            counted.append((counts, _NO_ERRORS))
                            continue
                        first = (part.read - part.tensor.out.info.start) // src.itemsize
                        counted.append((ZERO, encoder.encode(data, out, first)))
            self._has_read({info.shard: stop - start})
        for part, found in zip(chain.from_iterable(block.windows), counted, strict=True):
            with memory[part.start - block.start : part.stop - block.start] as out:
                self._digest(part, out, *found)

    def _has_read(self, nbytes: Mapping[Location, int]) -> None:
        """Count source bytes that were read, by file, and close files that are read wholly."""
        with self._changed:
            self._unread.subtract(nbytes)
            done = [shard for shard in nbytes if not self._unread[shard]]
        for shard in done:
            self._shards.close(shard)

    def _gather(self, part: Part, out: memoryview, room: Room) -> _Counted:
        """Dequantize, permute, cast and quantize ``part`` to ``out``; returns counts and errors."""
        tensor, t = part.tensor, part.tensor.out
        made = t.made or Joined.of(t.info)
        dtype = t.dtype if t.coding is None else t.src
        assembler = Assembler(dtype, self._casts, self._decoders, self._shards, room)
        if t.coding is None:
            first, stop = ((at - t.start) // dtype.itemsize for at in (part.start, part.stop))
            return assembler.elements(made, first, stop, out), _NO_ERRORS
        assert tensor.encoder is not None, t.name
        units = t.coding.unit_numel, t.coding.dst_unit_nbytes
        first = (part.start - t.start) // units[1] * units[0]
        stop = min(-(-(part.stop - t.start) // units[1]) * units[0], made.numel)
        runs = [*assembler.straight(made, first, stop)]
        if any(begin % units[0] for begin, *_ in runs):  # a unit has several slices
            runs = [(first, stop, None, 0)]
        counts, errors, at = ZERO, _NO_ERRORS, 0
        for begin, end, info, start in runs:
            nbytes, to = (end - begin) * dtype.itemsize, out.nbytes
            if end < stop:
                to = (end - first) // units[0] * units[1]
            if info is not None:
                with assembler.read(info, start, start + nbytes) as view:
                    errors += tensor.encoder.encode(view, out[at:to], begin)
            else:
                data = self._put_together(nbytes)
                counts += assembler.elements(made, begin, end, data)
                errors += tensor.encoder.encode(data, out[at:to], begin)
            at = to
        return counts, errors

    def _put_together(self, nbytes: int) -> memoryview:
        """Return the calling thread's reused buffer of ``nbytes``, for elements to quantize."""
        held: memoryview | None = getattr(self._elements, "held", None)
        if held is None or held.nbytes < nbytes:
            self._elements.held = held = None  # freed before the next is allocated
            self._elements.held = held = memoryview(bytearray(nbytes))
        return held[:nbytes]

    def _digest(self, part: Part, out: memoryview, counts: CastCounts, errors: QuantCounts) -> None:
        """Add a part to its tensor's digest and counts, once all bytes before it were added.

        Blocks are handed out in order, so no two threads wait for each other. Raises
        OutOfRangeError if values overflowed under ``out_of_range="error"``.
        """
        tensor, info = part.tensor, part.tensor.out.info
        overflowed = counts.overflowed or errors.overflowed
        if overflowed and self._out_of_range == "error":
            became = tensor.out.became
            raise OutOfRangeError(info.name, info.shard, info.dtype.name, became, overflowed)
        if tensor.digested != part.start:
            with self._changed:
                while tensor.digested != part.start:
                    if self._stopped:
                        raise _StoppedError
                    self._changed.wait()
        running = tensor.hasher = tensor.hasher or hasher()
        running.update(out)
        tensor.counts += counts
        if tensor.errors is not None:
            tensor.errors += errors
        last = part.stop == tensor.out.stop
        if last:
            _check_quantized(tensor)
            tensor.digest, tensor.hasher = running.hexdigest(), None
        with self._changed:
            tensor.digested = part.stop
            if not last:
                self._changed.notify_all()

    def _put(self, block: Block, memory: memoryview) -> None:
        """Write a filled block, and record the tensors and files that it completes."""
        for start, stop in block.runs:
            self._write(block.file, start, memory[start - block.start : stop - block.start])
        done: list[Writing] = []
        with self._changed:
            for window in block.windows:
                self.read_nbytes += window[-1].read_stop - window[0].read
                for part in window:
                    part.tensor.left_nbytes -= part.stop - part.start
                    if not part.tensor.left_nbytes:
                        done.append(part.tensor)
        for out in (tensor.out for tensor in done):
            if out.is_assembled:
                self._has_read(out.reads)
                for info in out.infos:
                    self._decoders.drop(info.name, out.dtype if out.coding is None else out.src)
        auxiliary: list[Writing] = []
        for codes in done:
            if codes.encoder is None:
                continue
            made, codes.encoder = codes.encoder.finish(), None
            for each in codes.auxiliary:
                assert each.out.coding is not None, each.out.name
                data = made[each.out.coding.part]
                each.digest = digest_of([data])
                self._write(each.file, each.out.start, data)
            auxiliary += codes.auxiliary
        with self._changed:
            # a quantized weight at once: the journal has all of its tensors or none
            self._written += done + auxiliary
            block.file.left_nbytes -= sum(stop - start for start, stop in block.runs)
            for tensor in auxiliary:  # possibly in other files
                tensor.file.left_nbytes -= tensor.out.nbytes
            files = dict.fromkeys((block.file, *(tensor.file for tensor in auxiliary)))
            whole = [file for file in files if not file.left_nbytes]
        for file in whole:
            if file.sum is not None:
                self.sums[file.out.path] = file.sum.hexdigest()
        with self._changed:
            self._whole += whole

    def _write(self, file: File, start: int, data: memoryview) -> None:
        """Write bytes of a file from ``start`` on, and wait for the disk a few blocks later."""
        with self._changed:
            if file.output is None:
                to, path = self._destination, file.out.path
                file.output = Output(to.root, f"{OUT}/{path}", to.path / path)
            output = file.output
        for first, last in cut(start, start + data.nbytes, self._way.block_nbytes):
            with data[first - start : last - start] as piece:
                output.write(first, piece)
                if file.sum is not None:
                    file.sum.add(first, piece, partial(self._read_back, output))
            with self._changed:
                # one queue for all files: small ones may be whole before the disk has any byte
                self._behind.append(partial(output.drop, first, last - first, file.sum))
                late = self._behind.popleft() if len(self._behind) > self._way.behind else None
            if late is not None:
                late()

    def _read_back(self, output: Output, start: int, out: memoryview) -> None:
        """Read written bytes into ``out`` for the file's md5 sum; _StoppedError if threads stop."""
        if self._stopped:
            raise _StoppedError
        output.read_into(start, out)


def _check_quantized(tensor: Writing) -> None:
    """Raise CheckpointError if the codes of a weight that was quantized decode to other values."""
    errors, out = tensor.errors, tensor.out
    # smaller ones may become zero, and larger ones infinite: both are counted
    if errors is None or not _LEAST_NORMAL <= errors.largest <= _MOST_HALF or errors.relative < 1:
        return
    found = "NaN or infinity" if math.isinf(errors.relative) else f"{errors.relative:.0%} away"
    if out.importance is not None:
        reason = f"the importance matrix {out.importance.header.path} has no such weights: leave it"
    else:
        reason = f'leave it as it is with quant={{"{out.info.name}": None, ...}}'
    raise CheckpointError(
        out.info.shard,
        f"its codes of {out.became} do not decode to its values; {reason}",
        "an error below 100% (root mean square)",
        found,
        tensor=out.info.name,
    )


def weight_of(out: OutTensor) -> object:
    """Return a key that the output tensors of one quantized weight share, within a folder."""
    return out.info.name if out.made is None else id(out.made)


class _StoppedError(Exception):
    """Ends a thread after another one failed, whose error `Writer.run` raises."""


def check_written(
    file: OutFile,
    path: Path,
    finished: Mapping[str, Finished],
    block_nbytes: int,
    tell: Callable[[int], None] = lambda done: None,
    done: int = 0,
) -> int:
    """Read the planned ``file`` back from ``path``, past the page cache if possible.

    ``tell`` is called with ``done`` (bytes of earlier files) plus bytes read; returns ``done`` plus
    the bytes of all tensors of this file. Raises CheckpointError: the header differs, or a digest
    differs from its record in ``finished``.
    """
    header = Header(path, file.nbytes, len(file.header), (), {})
    room = Room(block_nbytes, ahead=True)
    with Shards([header], lambda shard: resolve_reader(shard, "direct")) as shards:
        nbytes = min(len(file.header), block_nbytes)
        if nbytes and room.read(shards.reader(path), 0, nbytes) != file.header[:nbytes]:
            raise CheckpointError(path, "the header on the disk is not the one written")
        for t in file.tensors:
            info = TensorInfo(t.name, t.dtype, t.shape, path, t.start, t.stop)
            found = digest_of(shards.blocks(info, room), tell, done)
            done += info.nbytes
            expected = finished[in_folder(folder_of(file.path), t.name)].digest
            if found != expected:
                raise CheckpointError(
                    path,
                    "the bytes on the disk are not those that were written",
                    f"digest {expected}",
                    found,
                    tensor=info.name,
                )
    return done
