"""The streaming pass of a conversion: windows of the source, cast into blocks of the output.

A few threads take one block of an output file after the other: its bytes are read and cast into
memory of the thread's own, digested in the order of each tensor, and written at their place. The
calling thread brings what is finished to the disk and into the journal, and tells how far it is.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from xxhash import xxh3_128

from streamload._system import direct_memory
from streamload.cast.table import ZERO, Cast, CastCounts, OutOfRange, make_cast
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.header import Header, TensorInfo
from streamload.checkpoint.readers import BOUNCE_NBYTES
from streamload.checkpoint.url import Location, Url
from streamload.conversion.destination import Destination
from streamload.conversion.disk import Output, writing_to
from streamload.conversion.journal import Finished, Journal
from streamload.conversion.planning import ConvertPlan, OutFile, OutTensor, folder_of, in_folder
from streamload.conversion.turned import turned
from streamload.digests import digest_of, hasher
from streamload.dtypes import DType
from streamload.errors import CheckpointError, OutOfRangeError
from streamload.interrupt import deferred_interrupt
from streamload.planning.budget import available_cpus, first_that_fits
from streamload.quant.dequant import Decoders, held_nbytes
from streamload.quant.group import Packed
from streamload.reading import AHEAD_NBYTES, BLOCK_NBYTES, Room, Shards, cut, file_kind, page_cache

# Of the time that a conversion takes, the part that goes into making finished tensors last: the
# next time comes after what the last one took, divided by this.
_COMMIT_SHARE = 0.05
_LATEST_COMMIT_S = 5.0
_MOST_WHOLE = 32  # files that are whole and still open
_TICK_S = 0.02

# --- memory --------------------------------------------------------------------------------------

# What counts is all that a memory cgroup charges and the kernel cannot take back at once: memory of
# the process, pages that are being read, and pages that are written and not yet on the disk.

# More threads wait for the disk, or take memory; one would not read while it writes.
_THREADS = range(2, 5)
_REMOTE_THREADS = 8  # each waits for a server most of the time

# Each is a little more than was measured in memory cgroups, by their own counters.
_RUN_NBYTES = 2 * 2**20  # the journal, and what the kernel keeps for open files: 1.5 MB
_CAST_NBYTES = 7 * 2**20  # LLVM compiles the first kernel in 6.3 MB; numpy casts in 2 MB a thread
_THREAD_NBYTES = 2**18  # stack, heap and page tables of a thread: 0.1 MB; with a connection 0.2
_TENSOR_NBYTES = 600  # plan, state, journal and report of a tensor: 310 to 540, most for JSON
_NODE_TENSOR_NBYTES = 400  # its placement on a node, beside that: 150 to 350
_TEXTS = 4  # names are in headers, journal, sidecar and in the JSON of the report


@dataclass(frozen=True, slots=True)
class Way:
    """How the bytes are moved."""

    threads: int
    block_nbytes: int = BLOCK_NBYTES  # most bytes that a thread reads, and writes, at once
    behind: int = 6  # blocks that the disk is busy with before one is waited for
    direct: bool = False  # files are read past the page cache: nothing is read ahead

    @property
    def nbytes(self) -> int:
        """Most memory that it takes."""
        reading = BOUNCE_NBYTES if self.direct else AHEAD_NBYTES
        mine = self.threads * (2 * self.block_nbytes + _THREAD_NBYTES + reading)
        dirty = (self.threads + self.behind) * self.block_nbytes
        return mine + dirty * 9 // 8  # what the kernel keeps for each dirty page: 2 to 10%


def choose_way(checkpoint: Checkpoint, dtypes: Sequence[DType | None], *, nodes: bool) -> Way:
    """The fastest way that free memory is enough for, or PlanInfeasibleError.

    ``dtypes`` are what floats become; None stands for what they are.
    """
    threads = min(max(available_cpus(), _THREADS.start), _THREADS.stop - 1)
    remote = any(isinstance(header.path, Url) for header in checkpoint.shards)
    if remote:
        threads = _REMOTE_THREADS
    ways = [
        Way(threads, direct=remote),
        Way(2, direct=remote),
        Way(threads, 2**20, 2, direct=True),
        Way(2, 2**20, 2, direct=True),
        Way(1, 2**20, 1, direct=True),
        Way(1, 2**18, 1, direct=True),
    ]
    each_nbytes = _TENSOR_NBYTES + _NODE_TENSOR_NBYTES * nodes
    tensors_nbytes = each_nbytes * len(checkpoint.tensors)
    tensors_nbytes += _TEXTS * sum(header.data_start for header in checkpoint.shards)
    floats = {info.dtype for info in checkpoint.tensors.values() if info.dtype.kind == "float"}
    casts_nbytes = _CAST_NBYTES * any(d is not None and floats - {d} for d in dtypes)
    packed = [info for info in checkpoint.tensors.values() if isinstance(info, Packed)]
    scales_nbytes = 2 * max((held_nbytes(info.group) for info in packed), default=0)
    turned_blocks = 3 * any(info.lies_turned for info in packed)
    always_nbytes = _RUN_NBYTES + casts_nbytes + tensors_nbytes + scales_nbytes
    largest = [
        ("names and places of tensors", tensors_nbytes),
        ("casts", casts_nbytes),
        ("scales of quantised weights", scales_nbytes),
        ("threads and their blocks", _RUN_NBYTES + ways[-1].nbytes),
    ]
    return first_that_fits(
        [
            (way, always_nbytes + way.nbytes + turned_blocks * way.threads * way.block_nbytes)
            for way in ways
        ],
        sorted((one for one in largest if one[1]), key=lambda one: -one[1]),
    )


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _File:
    """A file that is being written."""

    out: OutFile
    left_nbytes: int = 0
    tensors: list[_Tensor] = field(default_factory=list)  # until they are cut into blocks
    output: Output | None = None  # while it is open


@dataclass(slots=True)
class _Tensor:
    """A tensor that is being written."""

    index: int  # among all of the plan
    file: _File
    out: OutTensor
    digested: int  # up to this byte of the file
    left_nbytes: int
    hasher: xxh3_128 | None = None  # from the first byte to the last: there may be very many
    digest: str = ""
    counts: CastCounts = ZERO


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor: ``read`` to ``read_stop`` of its shard, ``start`` to ``stop`` here."""

    tensor: _Tensor
    read: int
    read_stop: int
    start: int
    stop: int


@dataclass(slots=True)
class Block:
    """What is written at once: within a multiple of a block's length."""

    file: _File
    start: int  # of the block in the file, a multiple of a block's length
    # (first byte, last byte exclusive) of what is written of it
    runs: list[tuple[int, int]] = field(default_factory=list)
    # what is read for it: each is parts that follow each other in one shard
    windows: list[list[Part]] = field(default_factory=list)

    def add(self, tensor: _Tensor | None, start: int, stop: int, block_nbytes: int) -> None:
        """Add bytes ``start`` to ``stop`` of the file: of a tensor, or of the header."""
        if self.runs and self.runs[-1][1] == start:
            self.runs[-1] = (self.runs[-1][0], stop)
        else:
            self.runs.append((start, stop))
        if tensor is None:
            return
        info, dtype = tensor.out.info, tensor.out.dtype
        if isinstance(info, Packed):
            self._add_packed(tensor, info, start, stop)
            return
        # where nothing is cast bytes are bytes, also of dtypes below one
        src, dst = (1, 1) if info.dtype is dtype else (info.dtype.itemsize, dtype.itemsize)
        for first, last in cut(start, stop, block_nbytes // src * dst):
            read = info.start + (first - tensor.out.start) // dst * src
            part = Part(tensor, read, read + (last - first) // dst * src, first, last)
            window = self.windows[-1] if self.windows else [part]
            before = window[-1].tensor.out.info
            if (
                before.shard == info.shard
                and not isinstance(before, Packed)  # it has a window of its own
                and window[-1].read_stop == read
                and part.read_stop - window[0].read <= block_nbytes
            ):
                window.append(part)
            else:
                self.windows.append([part])

    def _add_packed(self, tensor: _Tensor, info: Packed, start: int, stop: int) -> None:
        """Add bytes of a tensor that is dequantised, in a window of their own.

        It says how much is read. Of a tensor that is turned that lies elsewhere; and where values
        have 4 bits, the first may be in a byte that is of the part before it.
        """
        bits, n = info.dtype.bits, tensor.out.dtype.itemsize
        read, read_stop = (
            info.start + (at - tensor.out.start) // n * bits // 8 for at in (start, stop)
        )
        read_stop = info.stop if stop == tensor.out.stop else read_stop
        self.windows.append([Part(tensor, read, read_stop, start, stop)])


# --- the pass -------------------------------------------------------------------------------------


class Writer:
    """Writes all that a journal does not have as finished.

    Attributes:
        read_nbytes: bytes of the source that were read.
    """

    def __init__(
        self,
        plan: ConvertPlan,
        checkpoint: Checkpoint,
        destination: Destination,
        journal: Journal,
        way: Way,
    ) -> None:
        """Prepare; raises UnsupportedCastError where this machine cannot do a cast."""
        self.read_nbytes = 0
        self._destination = destination
        self._journal = journal
        self._out_of_range: OutOfRange = plan.options["out_of_range"]
        self._way = way
        pairs = dict.fromkeys((t.info.dtype, t.dtype) for f in plan.files for t in f.tensors)
        self._casts: dict[tuple[DType, DType], Cast] = {
            pair: make_cast(*pair, out_of_range=self._out_of_range)
            for pair in pairs
            if not pair[0].is_packed
        }
        self._decoders = Decoders(self._out_of_range)
        self._files = [_File(out, len(out.header)) for out in plan.files]
        self._unread: Counter[Location] = Counter()
        self._written: list[_Tensor] = []
        tensors = ((file, t) for file in self._files for t in file.out.tensors)
        for index, (file, t) in enumerate(tensors):
            if index in journal.finished:
                continue
            tensor = _Tensor(index, file, t, t.start, t.nbytes)
            file.tensors.append(tensor)
            file.left_nbytes += t.nbytes
            self._unread[t.info.shard] += t.info.nbytes
            if not t.nbytes:
                tensor.digest = hasher().hexdigest()
                self._written.append(tensor)
        #: Bytes of the source that are to be read, before anything was.
        self.unread_nbytes = self._unread.total()
        self._shards = Shards(
            checkpoint.shards,
            lambda shard: file_kind(shard, "direct" if way.direct else "auto"),
            cache=page_cache("auto", to_read_nbytes=self.unread_nbytes),
        )
        self._blocks = self._cut()
        # file, first byte and length of what the disk is busy with
        self._behind: deque[tuple[Output, int, int]] = deque()
        self._whole: list[_File] = []  # with nothing left to be written
        self._changed = threading.Condition()
        self._stopped = False
        self._error: BaseException | None = None
        self._running = 0
        self._next_commit = time.monotonic()

    def _cut(self) -> Iterator[Block]:
        """Cut unfinished tensors and all headers into blocks, in the order of writing."""
        nbytes = self._way.block_nbytes
        for file in self._files:
            block = Block(file, 0)
            tensors, file.tensors = file.tensors, []  # they go as they are written
            ranges = ((t, t.out.start, t.out.stop) for t in tensors)
            for tensor, start, stop in chain([(None, 0, len(file.out.header))], ranges):
                for first, last in cut(start, stop, nbytes, base=0):
                    if first >= block.start + nbytes:
                        yield block
                        block = Block(file, first // nbytes * nbytes)
                    block.add(tensor, first, last, nbytes)
            yield block

    def run(self, tell: Callable[[int], None]) -> None:
        """Write; when this returns, all is on the disk and in the journal.

        After an error, the journal has what was finished. ``tell`` hears how many bytes were read.

        Raises:
            CheckpointError: the source is not what its headers said, or cannot be read; the
                destination cannot be written.
            OutOfRangeError: a value does not fit, under ``out_of_range="error"``.
        """
        count = self._way.threads
        threads = [
            threading.Thread(target=self._work_through, name=f"convert-{i}", daemon=True)
            for i in range(count)
        ]
        with deferred_interrupt() as interrupt:
            try:
                tell(0)
                self._running = count
                for thread in threads:
                    thread.start()
                while self._running:
                    with self._changed:
                        self._changed.wait(_TICK_S)
                    interrupt.check()
                    tell(self.read_nbytes)
                    # files are closed there: a process may have 1,024, and this one others too
                    if time.monotonic() >= self._next_commit or len(self._whole) >= _MOST_WHOLE:
                        self._commit()
                if self._error is not None:
                    raise self._error
                self._commit()
            except BaseException:
                self._stop(threads)
                with suppress(OSError):  # room for the journal, where the disk is full
                    self._destination.reserve.unlink()
                with suppress(CheckpointError):  # the first error is the one to be told
                    self._commit()
                raise
            finally:
                self._stop(threads)
                self._shards.close_all()
                for file in self._files:
                    self._close(file)
            tell(self.read_nbytes)

    def _stop(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the threads to end, soon."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._running:
            self._shards.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def _commit(self) -> None:
        """Bring what was finished to the disk, and then into the journal."""
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
                if file.output is not None:  # not where its tensors have no bytes
                    file.output.sync()
            with writing_to(self._destination.path):
                self._journal.add({t.index: Finished(t.digest, t.counts) for t in batch})
        except BaseException:
            with self._changed:
                self._written += batch  # there may be room for it later
            raise
        for file in whole:
            self._close(file)
        took = time.monotonic() - begun
        self._next_commit = time.monotonic() + min(took / _COMMIT_SHARE, _LATEST_COMMIT_S)

    def _close(self, file: _File) -> None:
        with self._changed:
            output, file.output = file.output, None
        if output is not None:
            output.close()

    def _work_through(self) -> None:
        """Take block after block: what a thread does."""
        memory = direct_memory(self._way.block_nbytes)
        room = Room(self._way.block_nbytes)
        try:
            while not self._stopped:
                with self._changed:
                    while len(self._whole) >= 2 * _MOST_WHOLE and not self._stopped:
                        self._changed.wait()  # for them to be closed
                    block = next(self._blocks, None)
                if block is None:
                    return
                self._fill(block, memory, room)
                self._put(block, memory)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._stopped = True
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _fill(self, block: Block, memory: memoryview, room: Room) -> None:
        header = block.file.out.header
        piece = header[block.start : block.start + self._way.block_nbytes]
        memory[: len(piece)] = piece
        for window in block.windows:
            info, start, stop = window[0].tensor.out.info, window[0].read, window[-1].read_stop
            if isinstance(info, Packed):
                part = window[0]
                with memory[part.start - block.start : part.stop - block.start] as out:
                    self._dequantise(part, info, out, room)
                self._has_read(info, stop - start)
                continue
            with self._shards.block(info.shard, start, stop, room, info.name) as view:
                for part in window:
                    with (
                        view[part.read - start : part.read_stop - start] as data,
                        memory[part.start - block.start : part.stop - block.start] as out,
                    ):
                        self._cast(part.tensor, data, out)
            self._has_read(info, stop - start)
        for window in block.windows:
            for part in window:
                with memory[part.start - block.start : part.stop - block.start] as out:
                    self._digest(part, out)

    def _has_read(self, info: TensorInfo, nbytes: int) -> None:
        """Close a file of which nothing is left to be read."""
        with self._changed:
            self._unread[info.shard] -= nbytes
            unread = self._unread[info.shard]
        if not unread:
            self._shards.close(info.shard)

    def _dequantise(self, part: Part, info: Packed, out: memoryview, room: Room) -> None:
        """Dequantise what a part is made of."""
        tensor, dtype, bits = part.tensor, part.tensor.out.dtype, info.dtype.bits
        decoder = self._decoders.of(info, dtype)
        first, stop = ((at - tensor.out.start) // dtype.itemsize for at in (part.start, part.stop))
        if info.lies_turned:
            read = partial(self._shards.block, info.shard, room=room, tensor=info.name)
            most = room.block_nbytes
            self._counted(tensor, turned(info, decoder, dtype, read, first, stop, out, most))
            return
        begin, end = info.start + first * bits // 8, info.start + (stop * bits + 7) // 8
        with self._shards.block(info.shard, begin, end, room, info.name) as data:
            self._counted(tensor, decoder.decode(data, out, first))

    def _cast(self, tensor: _Tensor, data: memoryview, out: memoryview) -> None:
        info, dtype = tensor.out.info, tensor.out.dtype
        self._counted(tensor, self._casts[info.dtype, dtype](data, out))

    def _counted(self, tensor: _Tensor, counts: CastCounts) -> None:
        """Add to what a cast did not keep."""
        info, dtype = tensor.out.info, tensor.out.dtype
        if counts is ZERO:
            return
        if counts.overflowed and self._out_of_range == "error":
            raise OutOfRangeError(
                info.name, info.shard, info.dtype.name, dtype.name, counts.overflowed
            )
        with self._changed:
            tensor.counts += counts

    def _digest(self, part: Part, out: memoryview) -> None:
        """Add to a tensor's digest when what comes before was added.

        Blocks are handed out in order, so the thread that has it does not wait for this one.
        """
        tensor = part.tensor
        if tensor.digested != part.start:
            with self._changed:
                while tensor.digested != part.start:
                    if self._stopped:
                        raise _StoppedError
                    self._changed.wait()
        running = tensor.hasher = tensor.hasher or hasher()
        running.update(out)
        last = part.stop == tensor.out.stop
        if last:
            tensor.digest, tensor.hasher = running.hexdigest(), None
        with self._changed:
            tensor.digested = part.stop
            if not last:
                self._changed.notify_all()

    def _put(self, block: Block, memory: memoryview) -> None:
        for start, stop in block.runs:
            with memory[start - block.start : stop - block.start] as data:
                self._write(block.file, start, data)
        with self._changed:
            for window in block.windows:
                self.read_nbytes += window[-1].read_stop - window[0].read
                for part in window:
                    part.tensor.left_nbytes -= part.stop - part.start
                    if not part.tensor.left_nbytes:
                        self._written.append(part.tensor)
                        self._decoders.drop(part.tensor.out.info.name, part.tensor.out.dtype)
            block.file.left_nbytes -= sum(stop - start for start, stop in block.runs)
            if not block.file.left_nbytes:
                self._whole.append(block.file)
                if len(self._whole) == _MOST_WHOLE:
                    self._changed.notify_all()

    def _write(self, file: _File, start: int, data: memoryview) -> None:
        with self._changed:
            if file.output is None:
                to, path = self._destination, file.out.path
                file.output = Output(to.out / path, to.path / path)
            output = file.output
        output.write(start, data)
        # of all files together: small ones may be whole before the disk has any of their bytes
        with self._changed:
            self._behind.append((output, start, data.nbytes))
            late = self._behind.popleft() if len(self._behind) > self._way.behind else None
        if late is not None:
            output, start, nbytes = late
            output.drop(start, nbytes)


class _StoppedError(Exception):
    """Another thread has failed: never seen outside, since its error came first."""


def check_written(
    file: OutFile,
    path: Path,
    finished: Mapping[str, Finished],
    block_nbytes: int,
    tell: Callable[[int], None] = lambda done: None,
    done: int = 0,
) -> int:
    """Read a file that was written, past the page cache where that can be, and compare.

    ``tell`` is told how many bytes of data were read, with those that were ``done`` before.

    Returns:
        How many bytes of data are read after this.

    Raises:
        CheckpointError: a tensor has not the digest that its bytes had, or cannot be read.
    """
    header = Header(path, file.nbytes, len(file.header), (), {})
    room = Room(block_nbytes, ahead=True)
    with Shards([header], lambda shard: file_kind(shard, "direct")) as shards:
        nbytes = min(len(file.header), block_nbytes)
        if room.read(shards.reader(path), 0, nbytes) != file.header[:nbytes]:
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
