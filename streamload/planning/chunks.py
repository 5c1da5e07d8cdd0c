"""Cut a plan into chunks: byte ranges of files, and the bytes of parameters that they become."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.core.location import Location
from streamload.core.tensors import Region, RowRange, region_of
from streamload.planning.moves import UNREAD, Kind, Moves
from streamload.planning.plan import SLOT_ALIGNMENT, Plan

# Parameters of up to this many bytes are packed into a `SmallTensorBatch`. 50,000 of 2 kB, to
# torch's CPU, on 2 cores: 26 microseconds each as single chunks, 17 of them to allocate, for which
# busy threads had to release the interpreter's lock; 6 when packed. Longer ones gain little, and
# if the CPU writes them, their pages are better populated at once (`core.system`).
_PACKED_NBYTES = 2**17
# Fewer parameters than these are no batch: as chunks, they share a read with large neighbors.
_LEAST_PACKED = 32
_ALONE = -1  # in `_Extents.together`: not to be packed

_Column = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StridedRead(Region):
    """File bytes to read, and their place in a parameter.

    Attributes:
        offset: byte of the parameter at which the first row begins.
        rows: number of equal rows of a line, placed ``stride`` apart; 1 if the line stays whole.
            Row ``i`` of a line is placed right after the previous line's.
        stride: bytes of the parameter from the beginning of a row to the next row's.
    """

    offset: int = 0
    rows: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one parameter that is read, cast and placed in one step.

    Attributes:
        placement: index in ``Plan.placements``.
        shard: index in ``Checkpoint.shards``.
        start: first byte of the parameter.
        stop: last byte of the parameter, exclusive.
    """

    placement: int
    shard: int
    start: int
    stop: int
    runs: tuple[StridedRead, ...]

    @property
    def read_nbytes(self) -> int:
        """File bytes of the chunk."""
        return sum(run.lines * run.line_nbytes for run in self.runs)

    def staged_nbytes(self, placement: Kind) -> int:
        """Return the chunk's bytes in a staging slot: before the cast, if the device casts."""
        return self.read_nbytes if placement.cast == "device" else self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class SmallTensorBatch:
    """Small parameters, contiguous in a file, that are copied unchanged to one device together.

    As a sequence it has one chunk a parameter, made on demand: there may be very many, and most
    steps treat the batch as a whole.

    Attributes:
        first: index in ``Plan.placements`` of the first parameter; the other indices follow.
        shard: index in ``Checkpoint.shards``.
        bounds: the first file byte of each parameter, and the stop of the last; int64.
    """

    first: int
    shard: int
    bounds: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def placements(self) -> range:
        """Indices of the batch's parameters in ``Plan.placements``."""
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
        """File bytes of all parameters."""
        return self.stop - self.start

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __iter__(self) -> Iterator[Chunk]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> Chunk:
        place = range(len(self))[at]
        start, stop = self.bounds[place : place + 2].tolist()
        nbytes = stop - start
        return Chunk(self.first + place, self.shard, 0, nbytes, (StridedRead(start, nbytes),))


_Piece: TypeAlias = Chunk | SmallTensorBatch


def split(chunk: Chunk, placement: Kind, nbytes: int, start: int = 0) -> Iterator[Chunk]:
    """Yield pieces of a chunk, each of at most ``nbytes`` in the file and in the parameter.

    A chunk of several reads, rows or lines stays whole. File bytes before ``start``, the first byte
    of an element, are left out.
    """
    if len(chunk.runs) != 1 or chunk.runs[0].rows != 1 or chunk.runs[0].lines != 1:
        yield chunk
        return
    run, p = chunk.runs[0], placement
    unit = p.unit_numel
    # where nothing is cast bytes are bytes, also of dtypes below one
    by_bytes = p.src is p.dst and unit == 1
    src, dst = (1, 1) if by_bytes else (p.src.nbytes(unit), p.placed_nbytes(unit))
    if start <= run.start and max(run.line_nbytes, chunk.stop - chunk.start) <= nbytes:
        yield chunk  # it is small: there may be very many of these
        return
    step = max(nbytes // max(src, dst), 1)
    first = max(start - run.start, 0) // src
    for at in range(first, -(-run.line_nbytes // src), step):  # the last may be short
        begin, end = chunk.start + at * dst, min(chunk.start + (at + step) * dst, chunk.stop)
        nbytes = min(step * src, run.line_nbytes - at * src)
        piece = StridedRead(run.start + at * src, nbytes, offset=begin)
        yield Chunk(chunk.placement, chunk.shard, begin, end, (piece,))


class _Extents(NamedTuple):
    """Byte ranges of files that parameters need, in the order of the plan, as columns.

    Attributes:
        starts: first file byte; 0 of a parameter without elements.
        stops: last file byte, exclusive.
        shards: index in ``Checkpoint.shards``.
        placements: index in ``Plan.placements``; a placement of several sources has several.
        offsets: first byte of the parameter, before its rows are permuted.
        together: a number that parameters share if they may be packed with each other: whole,
            uncast parameters from one shard to one device; `_ALONE` if it is not packed.
    """

    starts: _Column
    stops: _Column
    shards: _Column
    placements: _Column
    offsets: _Column
    together: _Column


class Cut:
    """A plan cut into chunks, which are made on demand, in the order of the files.

    A chunk comes from one shard, and no two chunks share a byte of a parameter. A parameter without
    elements has one empty chunk. Memory grows with the tensors, and not with the chunks.
    """

    def __init__(self, plan: Plan, checkpoint: Checkpoint) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._shard_of = {header.path: index for index, header in enumerate(checkpoint.shards)}
        found = _extents(plan.placements, checkpoint, self._shard_of)
        unread = np.array([move.kind.cast in UNREAD for move in plan.placements], bool)
        read = ~unread[found.placements]
        self._extents = _Extents(*(column[read] for column in found)) if unread.any() else found

    def of(self, some: range) -> Cut:
        """Return the cut of some placements, given by index."""
        made = copy(self)
        bounds = np.searchsorted(self._extents.placements, (some.start, some.stop))
        made._extents = _Extents(*(column[slice(*bounds)] for column in self._extents))
        return made

    def read_nbytes(self, shards: Collection[int]) -> int:
        """Return the number of file bytes to read from ``shards``, given by index."""
        of_them = np.isin(self._extents.shards, list(shards))
        return int((self._extents.stops - self._extents.starts)[of_them].sum())

    def packs_and_chunks(
        self,
        largest: Callable[[Kind], int],
        pack_nbytes: Callable[[Kind], int],
        most: int,
    ) -> Iterator[_Piece]:
        """Yield all chunks by place in the files, small neighbors in batches of at most ``most``.

        ``largest``: most bytes of a placement's chunks, in the file and in the parameter;
        ``pack_nbytes``: most bytes of a batch, each member rounded up by `slot_nbytes`.
        """
        starts, stops, shards, _, _, together = self._extents
        if not len(starts):
            return
        sizes = stops - starts
        alone = together == _ALONE
        alone |= (sizes < 1) | (sizes > min(_PACKED_NBYTES, self._plan.chunk_nbytes))
        follows = (together[1:] == together[:-1]) & (starts[1:] == stops[:-1])
        follows &= ~alone[1:] & ~alone[:-1]
        firsts = np.append(0, np.flatnonzero(~follows) + 1)  # of what may be packed, or is alone
        ends = np.append(firsts[1:], len(starts))
        taken = np.cumsum(-(-sizes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT)
        # by number; several where tensors are read twice, or in turn
        group: dict[int, Iterator[_Piece]] = {}
        reached = (-1, 0)
        for at in np.lexsort((starts[firsts], shards[firsts])).tolist():
            first, end = int(firsts[at]), int(ends[at])
            shard = int(shards[first])
            if (shard, int(starts[first])) >= reached:
                yield from _merged(group)
            reached = max(reached, (shard, int(stops[end - 1])))
            if alone[first]:
                group[at] = self._pieces(first, largest)
            else:
                group[at] = self._packs(first, end, taken, pack_nbytes, most)
        yield from _merged(group)

    def _packs(
        self,
        first: int,
        end: int,
        taken: _Column,
        pack_nbytes: Callable[[Kind], int],
        most: int,
    ) -> Iterator[_Piece]:
        """Yield small tensors, of extents ``first`` to ``end`` (exclusive), in batches.

        ``taken``: cumulative bytes of all extents in a slot. Others: as in `packs_and_chunks`.
        """
        starts, stops, shards, placements = self._extents[:4]
        room = pack_nbytes(self._plan.placements[int(placements[first])].kind)
        while first < end:
            before = int(taken[first - 1]) if first else 0
            stop = bisect_right(taken, before + room, first, min(first + most, end))
            stop = max(stop, first + 1)
            bounds = np.append(starts[first:stop], stops[stop - 1])
            pack = SmallTensorBatch(int(placements[first]), int(shards[first]), bounds)
            yield from [pack] if len(pack) >= _LEAST_PACKED else pack
            first = stop

    def _pieces(self, at: int, largest: Callable[[Kind], int]) -> Iterator[Chunk]:
        """Return the chunks of one byte range of a file, in order; ``at``: index of the range."""
        start, stop, shard, index, offset = (int(column[at]) for column in self._extents[:5])
        _, source, p, *_ = self._plan.placements[index]
        if start == stop:
            return iter([Chunk(index, shard, 0, 0, ())])
        if p.order in ("file", "device"):
            return _contiguous(index, p, shard, start, stop, offset, largest(p))
        ranges = list(_ranges(source, p, self._checkpoint, self._shard_of))
        mine = next(r for r in ranges if r.offset == offset)
        if p.order == "lines":
            return _strided(index, p, mine, largest(p))
        cut = _turned if p.order == "columns" else _transposed
        return cut(index, p, ranges, mine, largest(p))


def _merged(group: dict[int, Iterator[_Piece]]) -> Iterator[_Piece]:
    """Empty a group; return its pieces by their place in the files, then by number."""
    if len(group) == 1:
        return group.popitem()[1]
    return merge(*map(group.pop, sorted(group)), key=_place)


def _place(piece: _Piece) -> tuple[int, int]:
    first = piece if isinstance(piece, SmallTensorBatch) else next(iter(piece.runs), None)
    return piece.shard, first.start if first is not None else 0


def _extents(
    placements: Moves, checkpoint: Checkpoint, shard_of: Mapping[Location, int]
) -> _Extents:
    """Return the byte ranges of all placements: one for each of their row ranges."""
    infos = [checkpoint.tensors[move.source[0].tensor] for move in placements]
    starts, stops = ([*map(attrgetter(edge), infos)] for edge in ("start", "stop"))
    shards = checkpoint.shard_numbers(infos)
    devices = {kind.device: at for at, (kind, _) in enumerate(placements.counted)}
    groups = {
        id(kind): _ALONE if kind.cast != "copy" or kind.transpose else devices[kind.device]
        for kind, _ in placements.counted
    }
    group = np.array([groups[id(move.kind)] for move in placements], np.int64)
    together = np.where(group == _ALONE, _ALONE, group * len(checkpoint.shards) + shards)
    numbers = np.arange(len(infos))
    columns = np.stack([starts, stops, shards, numbers, np.zeros_like(numbers), together])
    of_rows: dict[int, list[tuple[int, ...]]] = {}  # several, or some rows of one
    for index, ((_, source, kind, *_), info) in enumerate(zip(placements, infos, strict=True)):
        r = source[0]
        if len(source) > 1 or r.start or r.columns or r.stop != (info.shape or (1,))[0]:
            of_rows[index] = [
                (part.region.start, part.region.stop, part.shard, index, part.offset, _ALONE)
                for part in _ranges(source, kind, checkpoint, shard_of)
            ] or [(0, 0, int(shards[index]), index, 0, _ALONE)]
    if of_rows:
        rows = [row for each in of_rows.values() for row in each]
        whole = np.delete(columns, list(of_rows), axis=1)
        columns = np.concatenate([whole, np.array(rows, np.int64).T], axis=1)
        columns = columns[:, np.argsort(columns[3], kind="stable")]
    found = _Extents(*columns.astype(np.int64))
    empty = found.starts == found.stops
    found.starts[empty] = found.stops[empty] = 0
    return found


class _Range(NamedTuple):
    """Rows of one tensor, and their place among all rows of a placement, which are concatenated."""

    shard: int  # index in `Checkpoint.shards`
    first: int  # index of the first row in the concatenation
    rows: int
    offset: int  # byte of the first row in the concatenation, as placed
    region: Region


def _ranges(
    source: Sequence[RowRange], p: Kind, checkpoint: Checkpoint, shard_of: Mapping[Location, int]
) -> Iterator[_Range]:
    """Yield the row ranges of a placement's source that have elements."""
    if not p.numel:
        return
    row = 0
    for r in source:
        info = checkpoint.tensors[r.tensor]
        count = r.stop - r.start
        if count:
            offset = p.placed_nbytes(row * p.row_numel)
            yield _Range(shard_of[info.shard], row, count, offset, region_of(info, r))
        row += count


def _contiguous(
    index: int, p: Kind, shard: int, start: int, stop: int, offset: int, chunk_nbytes: int
) -> Iterator[Chunk]:
    """Return the chunks of file bytes that become parameter bytes from ``offset`` on, in order."""
    nbytes = stop - start
    if p.src is not p.dst:
        nbytes = min(p.placed_nbytes(p.src.numel(nbytes)), p.nbytes - offset)
    run = StridedRead(start, stop - start, 1, 0, offset)
    chunk = Chunk(index, shard, offset, offset + nbytes, (run,))
    return split(chunk, p, chunk_nbytes)


def _strided(index: int, p: Kind, mine: _Range, chunk_nbytes: int) -> Iterator[Chunk]:
    """Yield the chunks of some columns of rows: strided in the file, contiguous when placed."""
    dst_row = p.placed_nbytes(p.row_numel)
    src_row, pitch = mine.region.line_nbytes, mine.region.pitch
    step = chunk_nbytes // max(src_row, dst_row)
    for row in range(0, mine.rows, max(step, 1)):
        start, to = mine.region.start + row * pitch, mine.offset + row * dst_row
        if not step:
            yield from _contiguous(index, p, mine.shard, start, start + src_row, to, chunk_nbytes)
            continue
        lines = min(step, mine.rows - row)
        run = StridedRead(start, src_row, lines, pitch, to)
        yield Chunk(index, mine.shard, to, to + lines * dst_row, (run,))


def _transposed(
    index: int, p: Kind, ranges: Sequence[_Range], mine: _Range, chunk_nbytes: int
) -> Iterator[Chunk]:
    """Yield the chunks of permuted whole rows whose first row in the file is in range ``mine``."""
    t = p.transpose
    assert t is not None
    per_row = p.numel // t.rows
    src_row, dst_row = p.src.nbytes(per_row), p.placed_nbytes(per_row)
    slab = t.outer * max(src_row, dst_row)  # the smallest set of output rows that is contiguous
    one_shard = len({r.shard for r in ranges}) == 1
    if slab > chunk_nbytes or not one_shard:
        # row by row: each comes from one range, and so from one shard
        for at in range(mine.rows):
            g, rest = divmod(mine.first + at, t.outer * t.inner)
            o, i = divmod(rest, t.inner)
            start = mine.region.start + at * src_row
            to = ((g * t.inner + i) * t.outer + o) * dst_row
            yield from _contiguous(index, p, mine.shard, start, start + src_row, to, chunk_nbytes)
        return

    def row_of(slab: int) -> int:
        g, i = divmod(slab, t.inner)
        return g * t.outer * t.inner + i

    slabs = t.groups * t.inner
    firsts = range(0, slabs, chunk_nbytes // slab)
    begin = bisect_left(firsts, mine.first, key=row_of)
    end = bisect_left(firsts, mine.first + mine.rows, key=row_of)
    for first in firsts[begin:end]:
        stop = min(first + firsts.step, slabs)
        runs = []
        at = first
        while at < stop:  # group by group
            g, i = divmod(at, t.inner)
            n = min(t.inner - i, stop - at)
            for o in range(t.outer):
                to = (at * t.outer + o) * dst_row
                row = (g * t.outer + o) * t.inner + i
                for start, count in _locate(ranges, row, n, src_row):
                    run = StridedRead(start, count * src_row, 1, 0, to, count, t.outer * dst_row)
                    runs.append(run)
                    to += count * t.outer * dst_row
            at += n
        begins, ends = (at * t.outer * dst_row for at in (first, stop))
        yield Chunk(index, mine.shard, begins, ends, tuple(runs))


def _turned(
    index: int, p: Kind, ranges: Sequence[_Range], mine: _Range, chunk_nbytes: int
) -> Iterator[Chunk]:
    """Yield the chunks of a permutation of parts of rows, such as the transpose of a matrix.

    A line of the file has ``inner`` of these parts. A chunk takes some columns of all lines of a
    group, or some lines of one column; its first line is in the row range ``mine``.
    """
    t = p.transpose
    assert t is not None
    row_numel = p.numel // t.rows
    least = p.least_columns
    src = -(-p.src.nbytes(least * row_numel) // least)
    # a weight to be quantized is assembled first: offsets are those of the weight
    dst = p.placed_nbytes(row_numel) if p.coding is None else src
    pitch = p.src.nbytes(t.inner * row_numel)

    def lines(r: _Range) -> range:
        first = r.first * p.src.nbytes(p.row_numel) // pitch
        return range(first, first + r.region.nbytes // pitch)

    def run(r: _Range, begin: int, end: int, column: int, columns: int) -> StridedRead:
        """Return the read of some columns of lines ``begin`` to ``end`` of ``r``, in one group."""
        group, line = divmod(begin, t.outer)
        first = r.region.start + (begin - lines(r).start) * pitch
        start, nbytes = first + p.src.nbytes(column * row_numel), p.src.nbytes(columns * row_numel)
        to = ((group * t.inner + column) * t.outer + line) * dst
        return StridedRead(start, nbytes, end - begin, pitch, to, columns, t.outer * dst)

    own = lines(mine)
    for group in range(own.start // t.outer, -(-own.stop // t.outer)):
        base = group * t.outer
        parts = [(r, max(lines(r).start, base), min(lines(r).stop, base + t.outer)) for r in ranges]
        parts = [part for part in parts if part[1] < part[2]]
        step = chunk_nbytes // (t.outer * max(src, dst)) // least * least  # columns
        if step and len({r.shard for r, _, _ in parts}) == 1:
            for column in range(0, t.inner if parts[0][0] is mine else 0, step):
                columns = min(step, t.inner - column)
                runs = tuple(run(*part, column, columns) for part in parts)
                first = (group * t.inner + column) * t.outer * row_numel
                stop = p.placed_nbytes(first + columns * t.outer * row_numel)
                yield Chunk(index, mine.shard, p.placed_nbytes(first), stop, runs)
            continue
        begin, end = max(own.start, base), min(own.stop, base + t.outer)
        step = max(chunk_nbytes // max(src, dst), 1)  # lines
        for line in range(begin, end, step):
            for column in range(t.inner):
                one = run(mine, line, min(line + step, end), column, 1)
                if max(src, dst) > chunk_nbytes:
                    yield from _contiguous(
                        index, p, mine.shard, one.start, one.stop, one.offset, chunk_nbytes
                    )
                else:
                    stop = one.offset + one.lines * dst
                    yield Chunk(index, mine.shard, one.offset, stop, (one,))


def _locate(
    ranges: Sequence[_Range], row: int, count: int, src_row: int
) -> Iterator[tuple[int, int]]:
    """Yield (file byte, rows) for ``count`` joined rows from ``row`` on, of ``src_row`` bytes."""
    for r in ranges:
        n = min(row + count, r.first + r.rows) - max(row, r.first)
        if n > 0:
            yield r.region.start + (max(row, r.first) - r.first) * src_row, n
