"""Assigns the dtypes and shapes of another checkpoint's tensors to files that hold only bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError
from streamload.files.header import Header
from streamload.formats.reader import FORMATS

_LISTED = 3  # names shown in a message


def shaped_like(
    path: Location, headers: Sequence[Header], like: Mapping[str, TensorInfo]
) -> Iterator[Header]:
    """Yield the headers, with dtypes and shapes from ``like`` for tensors of the same names.

    Only tensors that a header lists as untyped change. Raise ValueError if no file is of a format
    without dtypes, CheckpointError if no name matches or lengths in bytes differ.
    """
    untyped = [name for name, row in FORMATS.items() if row.untyped]
    if not any(header.format in untyped for header in headers):
        formats = ", ".join(sorted({header.format for header in headers}))
        expected = " or ".join(untyped)
        raise ValueError(f"like= is for files without dtypes ({expected}), and {path} is {formats}")
    names = [info.name for header in headers for info in header.tensors]
    if names and like.keys().isdisjoint(names):
        some, others = (", ".join(islice(each, _LISTED)) for each in (like, names))
        raise CheckpointError(path, "no tensor has the name of one of like=", some, others)
    for header in headers:
        if header.format in untyped:
            infos = (
                _shaped(info, like.get(info.name)) if info.name in header.untyped else info
                for info in header.tensors
            )
            header = replace(header, tensors=tuple(infos))
        yield header


def _shaped(info: TensorInfo, other: TensorInfo | None) -> TensorInfo:
    """Return a tensor with ``other``'s dtype and shape; raise CheckpointError if lengths differ."""
    if other is None:
        return info
    if info.nbytes != other.nbytes:
        raise CheckpointError(
            info.shard,
            "its length is not that of its namesake of like=",
            f"{other.nbytes} bytes, {other.dtype.name} of the shape {list(other.shape)}",
            f"{info.nbytes} bytes",
            tensor=info.name,
        )
    return replace(info, dtype=other.dtype, shape=other.shape)
