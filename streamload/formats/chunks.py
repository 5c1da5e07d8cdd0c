"""Joins chunks of tensors in several files into one header, and checks that they cover each tensor.

A header of chunks has its own file, and other files as its `parts`: see
`streamload.files.header.View`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.core.memory import first_that_fits
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import HeaderError
from streamload.files.header import (
    Chunk,
    Header,
    Part,
    View,
    check_name,
    describe,
    parse_json_object,
)

_SHARDING = "DCP_SHARDING_INFO"
_ALIGNMENT = 64  # of the virtual ranges of views
_PAGE = 4096
_MOST_NBYTES = 2**62  # end of the last view: fits an int64
_MOST_CUT = 4  # axes along which a tensor is cut
_CORNER_NBYTES = 256
_LONG_NBYTES = 2**22  # free memory is checked before more corners are listed


class Chunked(NamedTuple):
    """A tensor of which several files have chunks; ``at`` of each counts in its own file."""

    dtype: DType
    shape: tuple[int, ...]
    pieces: list[tuple[Location, Chunk]]


def joined(
    own: Part, parts: Iterable[Part], tensors: Mapping[str, Chunked], metadata: Mapping[str, str]
) -> Header:
    """Return the header of tensors with chunks in ``own`` and ``parts``; raise HeaderError.

    The chunks must cover each tensor, every element once; those without elements are left out.
    """
    starts: dict[Location, int] = {}
    parts, end = tuple(parts), 0
    for part in (own, *parts):
        starts[part.path] = end
        end += part.nbytes
    after = round_up(end, _PAGE) + _PAGE  # apart from the last block of a file
    infos, views = [], []
    for name, (dtype, shape, pieces) in tensors.items():
        check_name(name, own.path)
        pieces = [(path, chunk) for path, chunk in pieces if math.prod(chunk.shape)]
        _check_cover(own.path, name, shape, [chunk for _, chunk in pieces])
        start, stop = after, after + dtype.itemsize * math.prod(shape)
        infos.append(TensorInfo(name, dtype, shape, own.path, start, stop))
        if pieces:
            moved = [each._replace(at=starts[path] + each.at) for path, each in pieces]
            views.append(View(start, dtype.itemsize, shape, tuple(sorted(moved))))
        after = round_up(stop, _ALIGNMENT)
    if after > _MOST_NBYTES:
        limit = f"at most {_MOST_NBYTES} bytes"
        raise HeaderError(own.path, "its tensors are too large", limit, after)
    infos.sort(key=lambda info: (info.start, info.stop, info.name))
    data_start = min((chunk.at for view in views for chunk in view.chunks), default=own.nbytes)
    header = Header(own.path, own.nbytes, data_start, tuple(infos), metadata, own.state, "dcp")
    return replace(header, views=tuple(views), parts=parts)


def joined_shards(headers: Sequence[Header]) -> Sequence[Header]:
    """Return one header for safetensors files in which DCP saved chunks of tensors, else the same.

    Each file lists the offsets of its chunks in its metadata; the largest ends are the shapes.
    """
    if not any(_SHARDING in header.metadata for header in headers):
        return headers
    tensors: dict[str, Chunked] = {}
    for header in headers:
        stated = parse_json_object(header.metadata.get(_SHARDING, "{}").encode(), header.path)
        for info in header.tensors:
            fail = partial(HeaderError, header.path, tensor=info.name)
            entry, axes = stated.get(info.name), len(info.shape)
            origin = entry.get("saved_offsets") if isinstance(entry, dict) else [0] * axes
            if not isinstance(origin, list) or not all(type(n) is int and n >= 0 for n in origin):
                raise fail("its saved_offsets are not valid", "numbers", describe(origin))
            known = tensors.setdefault(info.name, Chunked(info.dtype, (0,) * axes, []))
            if (info.dtype, axes, axes) != (known.dtype, len(known.shape), len(origin)):
                raise fail(
                    "its chunks differ", f"{known.dtype}, {len(known.shape)} axes", str(info.dtype)
                )
            if not info.dtype.itemsize:
                raise fail("its dtype cannot be read in chunks", "whole bytes", info.dtype)
            ends = (max(n, a + b) for n, a, b in zip(known.shape, origin, info.shape, strict=True))
            strides = (info.dtype.itemsize * math.prod(info.shape[a + 1 :]) for a in range(axes))
            chunk = Chunk(tuple(origin), info.shape, info.start, tuple(strides))
            known.pieces.append((header.path, chunk))
            tensors[info.name] = known._replace(shape=tuple(ends))
    if all(len(c.pieces) == 1 and c.shape == c.pieces[0][1].shape for c in tensors.values()):
        return headers
    own, *parts = (header.files[0] for header in headers)
    return [joined(own, parts, tensors, {"format": "pt"})]


def _check_cover(
    path: Location, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk]
) -> None:
    """Raise HeaderError unless chunks cover a tensor, every element once."""
    fail = partial(HeaderError, path, tensor=name)
    for chunk in chunks:
        ends = [a + n for a, n in zip(chunk.origin, chunk.shape, strict=True)]
        if min(chunk.origin, default=0) < 0 or any(a > n for a, n in zip(ends, shape, strict=True)):
            raise fail("a chunk leads out of it", f"inside {list(shape)}", f"an end at {ends}")
    whole, numel = math.prod(shape), sum(math.prod(chunk.shape) for chunk in chunks)
    if numel != whole:
        problem = "its chunks overlap" if numel > whole else "its chunks leave holes"
        raise fail(problem, f"{whole} elements", numel)
    cut = [axis for axis, n in enumerate(shape) if any(c.shape[axis] != n for c in chunks)]
    if len(cut) > _MOST_CUT:
        raise fail("it is cut along too many axes", f"{_MOST_CUT} or fewer", len(cut))
    if (needed_nbytes := len(chunks) * _CORNER_NBYTES << len(cut)) > _LONG_NBYTES:
        first_that_fits([(None, needed_nbytes)], [(f"the chunks of {name[:80]}", needed_nbytes)])
    # boxes cover another one, each point once, exactly if their corners, with alternating signs,
    # add up to its corners
    corners: Counter[tuple[int, ...]] = Counter()
    for chunk in chunks:
        _add_corners(corners, [(chunk.origin[a], chunk.shape[a]) for a in cut], 1)
    if whole:
        _add_corners(corners, [(0, shape[a]) for a in cut], -1)
    if any(corners.values()):
        raise fail("its chunks overlap, and leave holes", "each element once", "chunks that differ")


def _add_corners(
    corners: Counter[tuple[int, ...]], box: Sequence[tuple[int, int]], sign: int
) -> None:
    """Add the corners of a box (start, length of each axis), with alternating signs."""
    for ends in product((0, 1), repeat=len(box)):
        corner = tuple(at + end * n for (at, n), end in zip(box, ends, strict=True))
        corners[corner] += -sign if sum(ends) % 2 else sign
