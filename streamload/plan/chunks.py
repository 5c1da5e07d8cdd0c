"""Cutting a plan into chunks: which file bytes become which bytes of which parameter."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.url import Location
from streamload.plan.plan import (
    SLOT_ALIGNMENT,
    Placement,
    Plan,
    WholeTensors,
    kinds,
)

# Parameters of up to this many bytes are packed. 50,000 of 2 kB, to torch's CPU, on 2 cores: the
# stream took 26 microseconds for each with a chunk of its own, 17 of them to allocate, for which
# threads that were at work on chunks had to give up the interpreter's lock; it takes 6 with packs.
# Longer ones gain little by it, and where the CPU writes them their pages are better had all at
# once (`devices.base.populate`).
_PACKED_NBYTES = 2**17
# Fewer than these are not a pack: as chunks, they share a read with large neighbours.
_LEAST_PACKED = 32
_ALONE = -1  # in place of a number of those who may be packed with each other

_Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous file bytes and the rows that they become.

    Attributes:
        start: first file byte.
        stop: last file byte, exclusive.
        offset: byte of the parameter at which the first row begins.
        rows: how many rows; 1 where rows stay together.
        stride: bytes of the parameter from one row's beginning to the next one's.
    """

    start: int
    stop: int
    offset: int
    rows: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is streamed: bytes ``start`` to ``stop`` (exclusive) of one parameter.

    Attributes:
        placement: index in ``Plan.placements``.
        shard: index in ``Checkpoint.shards``.
        start: first byte of the parameter.
        stop: last byte, exclusive.
        runs: the file bytes, all of one shard.
    """

    placement: int
    shard: int
    start: int
    stop: int
    runs: tuple[Run, ...]

    @property
    def read_nbytes(self) -> int:
        """File bytes that are read for it."""
        return sum(run.stop - run.start for run in self.runs)

    def staged_nbytes(self, placement: Placement) -> int:
        """Bytes that it takes in a staging slot: raw ones where the device casts."""
        return self.read_nbytes if placement.cast == "device" else self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Pack(Sequence[Chunk]):
    """Small parameters that go as they are to one device, one after the other in a file.

    As a sequence, a chunk for each: they are made when they are asked for, since there may be very
    many, and what is done with most of them is done for all of a pack at once.

    Attributes:
        first: index in ``Plan.placements`` of the first; those of the others follow.
        shard: index in ``Checkpoint.shards``.
        bounds: the first file byte of each, and the last one's stop; int64.
    """

    first: int
    shard: int
    bounds: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def placements(self) -> range:
        """Indices in ``Plan.placements``."""
        return range(self.first, self.first + len(self))

    @property
    def start(self) -> int:
        """First file byte."""
        return int(self.bounds[0])

    @property
    def stop(self) -> int:
        """Last file byte, exclusive."""
        return int(self.bounds[-1])

    @property
    def read_nbytes(self) -> int:
        """File bytes that are read for it."""
        return self.stop - self.start

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, at: int) -> Chunk: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Chunk, ...]: ...
    def __getitem__(self, at: int | slice) -> Chunk | tuple[Chunk, ...]:
        """The chunk of one parameter, or those of several."""
        places = range(len(self))[at]
        if isinstance(places, range):
            return tuple(self[place] for place in places)
        start, stop = self.bounds[places : places + 2].tolist()
        run = Run(start, stop, 0)
        return Chunk(self.first + places, self.shard, 0, stop - start, (run,))


def split(chunk: Chunk, placement: Placement, nbytes: int, start: int = 0) -> Iterator[Chunk]:
    """Cut a chunk of one run once more.

    Args:
        chunk: of bytes that stay together; others come out as they are.
        placement: its placement.
        nbytes: most bytes of a piece, of file bytes and of parameter bytes alike.
        start: the first file byte that is wanted; where it lies in the chunk, it is the first of an
            element.
    """
    if len(chunk.runs) != 1 or chunk.runs[0].rows != 1:
        yield chunk
        return
    run, p = chunk.runs[0], placement
    # where nothing is cast bytes are bytes, also of dtypes below one
    src, dst = (1, 1) if p.src is p.dst else (p.src.itemsize, p.dst.itemsize)
    if start <= run.start and max(run.stop - run.start, chunk.stop - chunk.start) <= nbytes:
        yield chunk  # it is small: there may be very many of these
        return
    step = max(nbytes // max(src, dst), 1)
    first = max(start - run.start, 0) // src
    for at in range(first, (run.stop - run.start) // src, step):
        n = min(step, (run.stop - run.start) // src - at)
        begin = chunk.start + at * dst
        piece = Run(run.start + at * src, run.start + (at + n) * src, begin)
        yield Chunk(chunk.placement, chunk.shard, begin, begin + n * dst, (piece,))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one checkpoint tensor, where they lie in the file and in the concatenation."""

    shard: int
    first: int  # row of the concatenation
    count: int
    start: int  # file byte of the first row


def chunks(
    plan: Plan, checkpoint: Checkpoint, largest: Callable[[Placement], int] | None = None
) -> list[Chunk]:
    """Cut every placement, in the order in which the files are read.

    A chunk comes from one shard, and no two chunks share a byte of a parameter. A parameter without
    elements has one empty chunk.

    Args:
        plan: what to cut.
        checkpoint: the headers that it was made from.
        largest: most bytes of a placement's chunks, of file bytes and of parameter bytes alike;
            None for ``plan.chunk_nbytes``.
    """
    shard_of = {header.path: index for index, header in enumerate(checkpoint.shards)}
    out: list[Chunk] = []
    for index, placement in enumerate(plan.placements):
        nbytes = plan.chunk_nbytes if largest is None else largest(placement)
        out.extend(_cut(index, placement, checkpoint, shard_of, nbytes))
    out.sort(key=_place)
    return out


def _place(piece: Chunk | Pack) -> tuple[int, int]:
    if isinstance(piece, Pack):
        return piece.shard, piece.start
    return piece.shard, piece.runs[0].start if piece.runs else 0


def packs_and_chunks(
    plan: Plan,
    checkpoint: Checkpoint,
    largest: Callable[[Placement], int],
    pack_nbytes: Callable[[Placement], int],
    most: int,
) -> list[Chunk | Pack]:
    """Cut every placement as `chunks` does, but leave neighbours that are small together.

    Args:
        plan: what to cut.
        checkpoint: the headers that it was made from.
        largest: as for `chunks`.
        pack_nbytes: most bytes of a pack of such placements, each rounded up by `slot_nbytes`.
        most: most parameters of a pack.
    """
    shard_of = {header.path: index for index, header in enumerate(checkpoint.shards)}
    placements, like = plan.placements, kinds(plan.placements)
    starts, stops, shards, groups = _extents(placements, checkpoint, shard_of)
    sizes = stops - starts
    groups[(sizes < 1) | (sizes > min(_PACKED_NBYTES, plan.chunk_nbytes))] = _ALONE
    out: list[Chunk | Pack] = []
    alone = (groups == _ALONE).tolist()
    for index in [index for index, is_alone in enumerate(alone) if is_alone]:
        p = placements[index]
        out.extend(_cut(index, p, checkpoint, shard_of, largest(p)))
    follows = (groups[1:] == groups[:-1]) & (starts[1:] == stops[:-1]) & (groups[1:] != _ALONE)
    ends = [*(np.flatnonzero(~follows) + 1).tolist(), len(groups)]
    taken = np.cumsum(-(-sizes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT).tolist()  # with all before
    first = before = 0
    for end in ends:
        while first < end:
            if alone[first]:
                stop = end
            else:
                room = pack_nbytes(like[first])
                stop = bisect_right(taken, before + room, first, min(first + most, end))
                stop = max(stop, first + 1)
                bounds = np.append(starts[first:stop], stops[stop - 1])
                pack = Pack(first, int(shards[first]), bounds)
                out.extend([pack] if len(pack) >= _LEAST_PACKED else pack)
            first, before = stop, taken[stop - 1]
    out.sort(key=_place)
    return out


def _extents(
    placements: Sequence[Placement], checkpoint: Checkpoint, shard_of: Mapping[Location, int]
) -> tuple[_Column, _Column, _Column, _Column]:
    """Where the first tensors of placements are, and who may be packed with whom.

    Returns:
        Their first file bytes, their last ones (exclusive), their shards, and a number that those
        have in common that go as they are, all of them, from one shard to one device.
    """
    if isinstance(placements, WholeTensors):
        starts = np.array([info.start for info in placements.infos], np.int64)
        stops = np.array([info.stop for info in placements.infos], np.int64)
        shards = checkpoint.shard_numbers(placements.infos)
        together = shards.copy()
        if any(p.cast != "copy" for p, _ in placements.alike):
            together[[p.cast != "copy" for p in placements.kinds]] = _ALONE
        return starts, stops, shards, together
    rows: list[int] = []  # of four numbers each, one after the other
    groups: dict[tuple[int, str], int] = {}
    for p in placements:
        r = p.source[0]
        info = checkpoint.tensors[r.tensor]
        shard = shard_of[info.shard]
        group = _ALONE
        if (
            p.cast == "copy"
            and p.transpose is None
            and len(p.source) == 1
            and r.start == 0
            and r.stop == (info.shape[0] if info.shape else 1)
        ):
            group = groups.setdefault((shard, p.device), len(groups))
        rows += info.start, info.stop, shard, group
    starts, stops, shards, together = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    return starts, stops, shards, together


def _cut(
    index: int,
    p: Placement,
    checkpoint: Checkpoint,
    shard_of: Mapping[Location, int],
    chunk_nbytes: int,
) -> Iterator[Chunk]:
    total = sum(r.stop - r.start for r in p.source)
    numel = math.prod(p.shape)
    if numel == 0:
        first = checkpoint.tensors[p.source[0].tensor]
        yield Chunk(index, shard_of[first.shard], 0, 0, ())
        return
    per_row = numel // total
    src_row, dst_row = p.src.nbytes(per_row), p.dst.nbytes(per_row)
    ranges: list[_Rows] = []
    row = 0
    for r in p.source:
        info = checkpoint.tensors[r.tensor]
        start = info.start + r.start * src_row
        if r.stop > r.start:
            ranges.append(_Rows(shard_of[info.shard], row, r.stop - r.start, start))
        row += r.stop - r.start
    if p.transpose is None:
        for part in ranges:
            yield from _contiguous(
                index,
                p,
                part.shard,
                part.start,
                part.first * dst_row,
                part.count * per_row,
                chunk_nbytes,
            )
        return
    yield from _transposed(index, p, ranges, src_row, dst_row, per_row, chunk_nbytes)


def _contiguous(
    index: int, p: Placement, shard: int, start: int, offset: int, numel: int, chunk_nbytes: int
) -> Iterator[Chunk]:
    end = offset + p.dst.nbytes(numel)
    run = Run(start, start + p.src.nbytes(numel), offset)
    yield from split(Chunk(index, shard, offset, end, (run,)), p, chunk_nbytes)


def _transposed(
    index: int,
    p: Placement,
    ranges: list[_Rows],
    src_row: int,
    dst_row: int,
    per_row: int,
    chunk_nbytes: int,
) -> Iterator[Chunk]:
    t = p.transpose
    assert t is not None
    slab = t.outer * max(src_row, dst_row)  # the smallest set of output rows that is contiguous
    one_shard = len({r.shard for r in ranges}) == 1
    if slab > chunk_nbytes or not one_shard:
        # row by row: each comes from one range, and so from one shard
        for row in range(t.rows):
            g, rest = divmod(row, t.outer * t.inner)
            i, o = divmod(rest, t.outer)
            shard, start, _ = _locate(ranges, (g * t.outer + o) * t.inner + i, 1, src_row)[0]
            yield from _contiguous(index, p, shard, start, row * dst_row, per_row, chunk_nbytes)
        return
    slabs = t.groups * t.inner
    step = chunk_nbytes // slab
    for first in range(0, slabs, step):
        stop = min(first + step, slabs)
        runs = []
        at = first
        while at < stop:  # group by group
            g, i = divmod(at, t.inner)
            n = min(t.inner - i, stop - at)
            for o in range(t.outer):
                offset = (at * t.outer + o) * dst_row
                row = (g * t.outer + o) * t.inner + i
                for _, start, count in _locate(ranges, row, n, src_row):
                    end = start + count * src_row
                    runs.append(Run(start, end, offset, count, t.outer * dst_row))
                    offset += count * t.outer * dst_row
            at += n
        begin, end = first * t.outer * dst_row, stop * t.outer * dst_row
        yield Chunk(index, ranges[0].shard, begin, end, tuple(runs))


def _locate(ranges: list[_Rows], row: int, count: int, src_row: int) -> list[tuple[int, int, int]]:
    """(shard, file byte, rows) of ``count`` rows of the concatenation from ``row`` on."""
    found = []
    for r in ranges:
        n = min(row + count, r.first + r.count) - max(row, r.first)
        if n > 0:
            found.append((r.shard, r.start + (max(row, r.first) - r.first) * src_row, n))
    return found
