"""Row ranges of a block of a tensor, for parameters that hold one shard of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from streamload.core.tensors import Block, Columns, RowRange


def cut(rows: Sequence[RowRange], row_numel: int, block: Block) -> tuple[RowRange, ...] | None:
    """Return row ranges with exactly a block's elements, in order; None if there are none.

    ``rows`` are of the whole tensor, in order and without columns, of ``row_numel`` elements each.
    """
    block = block.unfolded
    if block.is_all:
        return tuple(rows)
    if 0 in block.shape:
        return (RowRange(rows[0].tensor, 0, 0),)
    sizes = zip(block.whole, block.shape, strict=True)
    last = max(axis for axis, (whole, part) in enumerate(sizes) if whole != part)
    inner = math.prod(block.whole[last + 1 :])
    if last == 0:  # whole rows
        width, columns = inner, None
    else:
        width = block.whole[last] * inner
        begin = block.first[last] * inner
        columns = Columns(begin, begin + block.shape[last] * inner, width)
    out: list[RowRange] = []
    unit = row_numel if columns is None else width
    for start, stop in _lines(block, max(last, 1)):
        found = list(_within(rows, row_numel, start * width, stop * width, unit, columns))
        if sum(r.stop - r.start for r in found) * unit != (stop - start) * width:
            return None  # a line spans two tensors, or a part of a row
        out += found
    return tuple(out)


def _lines(block: Block, axes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop exclusive) of consecutive lines of a block.

    A line is one index into the first ``axes`` axes of the whole tensor, flattened.
    """
    leading = block.whole[:axes]
    if block.shape[1:axes] == leading[1:]:  # one run; numpy takes 200 microseconds for many lines
        inner = math.prod(leading[1:])
        yield block.first[0] * inner, (block.first[0] + block.shape[0]) * inner
        return
    part = tuple(slice(f, f + n) for f, n in zip(block.first, block.shape, strict=True))
    numbers = np.arange(math.prod(leading)).reshape(leading)[part[:axes]].ravel()
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    for run in np.split(numbers, breaks):
        yield int(run[0]), int(run[-1]) + 1


def _within(
    rows: Sequence[RowRange],
    row_numel: int,
    start: int,
    stop: int,
    unit: int,
    columns: Columns | None,
) -> Iterator[RowRange]:
    """Yield elements ``start`` to ``stop`` of the concatenated rows as row ranges.

    ``unit``: elements of a row of the result, which has ``columns`` of the tensor's rows. A range
    that would cut a row of the result is left out.
    """
    at = 0
    for r in rows:
        end = at + (r.stop - r.start) * row_numel
        first, last = max(start, at), min(stop, end)
        shift = r.start * row_numel - at  # to elements of the tensor
        if first < last and not ((first + shift) % unit or (last + shift) % unit):
            yield RowRange(r.tensor, (first + shift) // unit, (last + shift) // unit, columns)
        at = end


def split(
    rows: Sequence[RowRange], row_numel: int, part_numel: int
) -> list[tuple[RowRange, ...]] | None:
    """Split rows of ``row_numel`` elements into parts of ``part_numel``; None if parts cut rows."""
    count, rest = divmod(part_numel, row_numel)
    if rest or any(r.columns is not None for r in rows):
        return None
    found: list[tuple[RowRange, ...]] = []
    part: list[RowRange] = []
    left = count
    for r in rows:
        start = r.start
        while start < r.stop:
            stop = min(start + left, r.stop)
            part.append(RowRange(r.tensor, start, stop))
            left -= stop - start
            start = stop
            if not left:
                found.append(tuple(part))
                part, left = [], count
    return found
