"""Collective reads of tensors that several ranks need: each reads a part, all exchange parts.

Files are cut into blocks. Each rank reads its part of a block, and an all-gather gives everyone the
whole block. So storage behind one link sends the model once instead of once per rank. Ranks process
the blocks in the order of the files, reading ahead while blocks are exchanged. A rank holds a few
blocks, and frees one once it has copied the bytes that it needs.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import attrgetter
from typing import Self

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import Shards, open_shard
from streamload.core.location import Location
from streamload.core.tensors import Region, region_of, whole
from streamload.core.units import merged
from streamload.distributed.group import ProcessGroup
from streamload.files.folder import ResolvedKind
from streamload.files.header import Header
from streamload.files.reader import Reader
from streamload.planning.moves import Move
from streamload.planning.shares import ClusterPlan

BLOCK_NBYTES = 4 * 2**20  # size of a block
LEAST_BLOCK_NBYTES = 2**20  # if the host's budget is small
#: Blocks in memory: two being read, two copied from, and four exchanged.
BLOCKS = 8
#: All-gathers that run at the same time.
UNDER_WAY = 4

_JOIN_S = 0.5  # seconds to join threads; waits for a lost rank end by the group's timeout
# reading threads: one would wait for each answer; more slow the exchanges (docs/measurements.md)
_READERS = 2

Ranges = Sequence[tuple[int, int]]  # (start, stop) in file bytes, ascending, disjoint
# Slices with shorter lines are exchanged: a request costs about as much as so many bytes.
_SHORT_NBYTES = 2**17


def held_nbytes(checkpoint: Checkpoint, ranks: int, block_nbytes: int = BLOCK_NBYTES) -> int:
    """Return the host memory in bytes that blocks take on each rank of a collective load."""
    longest = max((h.reach_nbytes - h.data_start for h in checkpoint.shards), default=0)
    return BLOCKS * min(_most(ranks, block_nbytes), -(-longest // ranks) * ranks)


def _most(ranks: int, block_nbytes: int) -> int:
    """Return the block size in bytes, rounded down to a multiple of the number of ranks."""
    return max(block_nbytes // ranks, 1) * ranks


def shared_ranges(
    checkpoint: Checkpoint, placements: Collection[Move]
) -> dict[Location, list[tuple[int, int]]]:
    """Return the byte ranges of each file that a load of these placements reads in order, and once.

    These are whole tensors and can be exchanged in blocks. Permuted or concatenated rows, and
    tensors that share bytes, are left out: each rank reads them directly from the file.
    """
    uses = Counter(r.tensor for p in placements for r in p.source)
    found: dict[Location, list[tuple[int, int]]] = {header.path: [] for header in checkpoint.shards}
    for p in placements:
        info = checkpoint.tensors[p.source[0].tensor]
        is_plain = p.kind.transpose is None and p.source == (whole(info),)
        if is_plain and uses[info.name] == 1 and info.nbytes:
            found[info.shard].append((info.start, info.stop))
    return {shard: merged(_apart(sorted(ranges))) for shard, ranges in found.items()}


def exchanged(plan: ClusterPlan) -> list[Move]:
    """Return the parameters that several ranks read together, as whole tensors.

    Those that they all hold, and of which they hold slices that are short lines in the file.
    """
    if max(share.parts for share in plan.shares) == 1:
        return list(plan.placements.values()) if plan.split == "replicate" else []
    found = []
    for p in plan.placements.values():
        slices = plan.first_slices.get(p.name, ())
        lines = [
            (s.stop - s.start) * math.prod(p.kind.shape[s.axis + 1 :]) for s in slices if s.axis
        ]
        if not slices or any(p.kind.src.nbytes(numel) < _SHORT_NBYTES for numel in lines):
            found.append(p)
    return found


def own_lines(checkpoint: Checkpoint, placements: Iterable[Move]) -> dict[Location, list[Region]]:
    """Return the bytes of each file that placements read: of whole tensors, or of columns."""
    found: dict[Location, list[Region]] = {header.path: [] for header in checkpoint.shards}
    for p in placements:
        info, r = checkpoint.tensors[p.source[0].tensor], p.source[0]
        if len(p.source) > 1 or p.kind.transpose is not None or not p.kind.numel:
            continue
        if r == whole(info) or r.columns is not None:
            found[info.shard].append(region_of(info, r))
    return {shard: sorted(lines) for shard, lines in found.items()}


def _needed_nbytes(lines: Sequence[Region], start: int, stop: int) -> int:
    """Return how many bytes of the lines are from ``start`` to ``stop`` (exclusive)."""
    first = max(bisect_right(lines, start, key=attrgetter("start")) - 1, 0)
    last = bisect_left(lines, stop, key=attrgetter("start"))
    return sum(each.before(stop) - each.before(start) for each in lines[first:last])


def _apart(ranges: Ranges) -> list[tuple[int, int]]:
    """Return the ranges that overlap no other range; ``ranges`` is sorted by start."""
    ends = list(accumulate((stop for _, stop in ranges), max, initial=0))
    nexts = [*(start for start, _ in ranges[1:]), sys.maxsize]
    rows = zip(ranges, ends, nexts, strict=False)
    return [(start, stop) for (start, stop), end, after in rows if end <= start and stop <= after]


@dataclass(slots=True)
class _Block:
    """A part of a file that ranks exchange by one all-gather."""

    shard: Location  # the file
    start: int  # file byte
    stop: int  # file byte, exclusive
    left_nbytes: int  # bytes that this rank has yet to copy from the block
    held: memoryview | None = field(default=None, repr=False)  # content, until the last copy


class CollectiveReader:
    """Read files once for all ranks: threads exchange blocks, and keep each until it is copied."""

    def __init__(
        self,
        group: ProcessGroup,
        checkpoint: Checkpoint,
        shared: Mapping[Location, Ranges],
        mine: Mapping[Location, Sequence[Region]],
        kinds: Mapping[Location, ResolvedKind],
        block_nbytes: int = BLOCK_NBYTES,
    ) -> None:
        """Start the threads; nothing else may use the group's collectives until this is closed.

        ``shared``: the ranges to exchange, equal on all ranks; see `shared_ranges`. ``mine``: the
        bytes that this rank needs; see `own_lines`.
        """
        self._group = group
        self._shards = Shards(checkpoint.shards, kinds.__getitem__)
        most = _most(group.size, block_nbytes)
        self._blocks = {
            shard: [
                _Block(
                    *(shard, at, end := min(at + most, stop)),
                    _needed_nbytes(mine.get(shard, ()), at, end),
                )
                for start, stop in ranges
                for at in range(start, stop, most)
            ]
            for shard, ranges in shared.items()
        }
        room = held_nbytes(checkpoint, group.size, block_nbytes) // BLOCKS
        self._free = [memoryview(bytearray(room)) for _ in range(BLOCKS)]
        order = list(chain.from_iterable(self._blocks.values()))
        self._to_read = iter(enumerate(order))
        self._left = Counter(block.shard for block in order)  # unread blocks of each file
        self._read: dict[int, tuple[_Block, memoryview]] = {}  # parts to exchange, by number
        self._changed = threading.Condition()
        self.read_nbytes = 0  #: file bytes that this rank has read
        self._error: BaseException | None = None
        self._stopped = False
        self._done = False
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"streamload-{name}", daemon=True)
            for name, work in (
                *[("gather-read", self._read_all)] * _READERS,
                ("gather", self._exchange_all),
            )
        ]
        for thread in self._threads:
            thread.start()

    def open(self, header: Header, kind: ResolvedKind) -> Reader:
        """Return a reader that copies exchanged blocks, and reads all other bytes from the file."""
        return _CollectiveShard(self, header, kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stop(self) -> None:
        """Cancel reads of files, and let all threads that wait here raise or end."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._shards.stop()

    def close(self) -> None:
        """End the threads and free all memory; exchanges with a lost rank end by their timeout."""
        self.stop()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        self._shards.close_all()  # files that were not read to their end
        with self._changed:  # a traceback or a waiting thread may refer to this object
            self._free.clear()
            self._read.clear()
            self._error = None
            for block in chain.from_iterable(self._blocks.values()):
                block.held = None

    @property
    def nbytes(self) -> int:
        """The memory of all blocks, in bytes; 0 once closed."""
        with self._changed:
            held = (block.held for block in chain.from_iterable(self._blocks.values()))
            read = (room for _, room in self._read.values())
            rooms = [*self._free, *read, *filter(None, held)]
            return sum(room.nbytes for room in rooms)

    def wait(self, most_s: float) -> bool:
        """Wait up to ``most_s`` seconds; return whether all blocks are exchanged.

        A rank calls it after its own load, since others may still need its parts. Raises
        PeerFailedError if a rank was lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._error is not None, most_s)
            self._check()
            return self._done

    def take(self, shard: Location, start: int, out: memoryview, file: Reader) -> None:
        """Fill ``out`` with bytes from ``start`` on: of a file's blocks, or by its reader."""
        blocks = self._blocks.get(shard, [])
        at, stop = start, start + out.nbytes
        which = max(bisect_right(blocks, at, key=lambda block: block.start) - 1, 0)
        while at < stop:
            while which < len(blocks) and blocks[which].stop <= at:
                which += 1
            block = blocks[which] if which < len(blocks) else None
            if block is None or block.start > at:
                until = min(stop, block.start) if block is not None else stop
                file.read_into(at, out[at - start : until - start])
                with self._changed:
                    self.read_nbytes += until - at
            else:
                until = min(stop, block.stop)
                held = self._wait_for(block)
                out[at - start : until - start] = held[at - block.start : until - block.start]
                self._taken(block, until - at)
            at = until

    def _wait_for(self, block: _Block) -> memoryview:
        """Wait until a block was exchanged; return its bytes."""
        with self._changed:
            while block.held is None:
                self._check()
                if not block.left_nbytes:
                    raise ValueError(f"{block.shard}: bytes of a block are taken more than once")
                self._changed.wait(1.0)
            return block.held

    def _taken(self, block: _Block, nbytes: int) -> None:
        """Count bytes copied from a block; after the last, its memory is free for another."""
        with self._changed:
            block.left_nbytes -= nbytes
            if block.left_nbytes <= 0 and block.held is not None:
                self._free.append(block.held)
                block.held = None
                self._changed.notify_all()

    def _check(self) -> None:
        """Raise the error of a thread, or InterruptedError after `stop`."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise InterruptedError("the load has ended")

    def _run(self, work: Callable[[], None]) -> None:
        """Run a thread's work, and keep its error for `_check`."""
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _read_all(self) -> None:
        """Read this rank's parts of the blocks, as far ahead as memory allows."""
        size, rank = self._group.size, self._group.rank
        for index, block, room, reader in iter(self._next, None):
            part = -(-(block.stop - block.start) // size)
            first = min(block.start + rank * part, block.stop)
            last = min(first + part, block.stop)
            reader.read_into(first, room[rank * part : rank * part + last - first])
            with self._changed:
                self._left[block.shard] -= 1
                if not self._left[block.shard]:
                    self._shards.close(block.shard)
                self.read_nbytes += last - first
                if self._stopped:
                    return
                self._read[index] = block, room
                self._changed.notify_all()

    def _next(self) -> tuple[int, _Block, memoryview, Reader] | None:
        """Wait for memory; return the next block's number, the block, memory and a file reader.

        Return None after the last block, or if the load has ended.
        """
        with self._changed:
            while not self._free:
                if self._stopped or self._error is not None:
                    return None
                self._changed.wait()
            index, block = next(self._to_read, (0, None))
            if block is None or self._stopped:
                return None
            return index, block, self._free.pop(), self._shards.reader(block.shard)

    def _exchange_all(self) -> None:
        """Exchange the blocks in order, a few at once to keep the link busy."""
        size, rank = self._group.size, self._group.rank
        under_way: deque[tuple[_Block, memoryview, Callable[[], None]]] = deque()
        index, count = 0, sum(map(len, self._blocks.values()))
        while index < count or under_way:
            with self._changed:
                while not under_way and index not in self._read:
                    if self._stopped or self._error is not None:
                        return
                    self._changed.wait()
                full = len(under_way) == UNDER_WAY
                found = None if full else self._read.pop(index, None)
            if found is None:
                self._exchanged(*under_way.popleft())
                continue
            block, room = found
            part = -(-(block.stop - block.start) // size)
            mine, whole = room[rank * part : (rank + 1) * part], room[: size * part]
            under_way.append((block, room, self._group.all_gather_begin(mine, whole)))
            index += 1
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _exchanged(self, block: _Block, room: memoryview, wait: Callable[[], None]) -> None:
        """Wait for a block's all-gather into ``room``, then offer its bytes to readers."""
        wait()
        with self._changed:
            if block.left_nbytes:
                block.held = room
            else:
                self._free.append(room)  # this rank needs none of it
            self._changed.notify_all()


class _CollectiveShard(Reader):
    """A reader of one file for the loop of a load, over the blocks of a `CollectiveReader`."""

    _how = "by several ranks together"

    def __init__(self, blocks: CollectiveReader, header: Header, kind: ResolvedKind) -> None:
        super().__init__(header.path, header.reach_nbytes)
        self._blocks = blocks
        self._file = open_shard(header, kind)

    def stop(self) -> None:
        """See `Reader.stop`."""
        self._blocks.stop()
        self._file.stop()

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        self._blocks.take(self.path, start, target, self._file)
