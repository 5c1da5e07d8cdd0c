"""Records of a checkpoint's tensors, their rows, columns and blocks, and row permutations."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from streamload.core.dtypes import DType
from streamload.core.location import Location

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, and the place of its bytes in a file.

    Attributes:
        name: unique in its checkpoint; may be empty.
        shape: ``()`` for a scalar.
        start: first byte, counted from the start of the file.
        stop: last byte, exclusive; ``start`` if the tensor has no elements.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shard: Location
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in its file."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def is_computed(self) -> bool:
        """Whether the elements are computed from the bytes in the file, and not stored there."""
        return False

    @property
    def files(self) -> tuple[Location, ...]:
        """All files that the elements are computed from."""
        return (self.shard,)

    @property
    def read_dtype(self) -> DType:
        """The dtype of the elements before any cast to another one."""
        return self.dtype


def records(
    kind: type[_Record], first: Collection[Any], *columns: Iterable[Any]
) -> Sequence[_Record]:
    """Make many objects of a frozen dataclass with slots, from one column for each field in order.

    The class's own ``__init__``, which sets field by field, takes 0.72 microseconds for a
    `TensorInfo`, this 0.37. No ``__post_init__`` is called. The first column decides the number.
    """
    made = list(map(object.__new__, repeat(kind, len(first))))
    names = kind.__slots__  # type: ignore[attr-defined]
    for name, column in zip(names, (first, *columns), strict=True):
        deque(map(getattr(kind, name).__set__, made, column), maxlen=0)
    return made


class Columns(NamedTuple):
    """Elements ``start`` to ``stop`` (exclusive) of each row of a tensor seen as a matrix.

    So a slice along any axis can be read: that axis and all after it form a row of the matrix, all
    axes before it number the rows.

    Attributes:
        start: first element.
        stop: last element, exclusive.
        width: elements of a row.
    """

    start: int
    stop: int
    width: int


#: The stop of a `RowRange` that goes up to the last row.
END = sys.maxsize


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``start`` to ``stop`` (exclusive) along the first axis of a checkpoint tensor.

    By default all rows. With ``columns``, rows of the matrix that `Columns` describes, and only
    those elements of each: a strided range of the file.
    """

    tensor: str
    start: int = 0
    stop: int = END
    columns: Columns | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.tensor, str) and type(self.start) is type(self.stop) is int):
            raise ValueError(f"a row range is a tensor's name and two whole numbers, not {self}")


def whole(info: TensorInfo) -> RowRange:
    """Return the range of all rows of a tensor; a scalar has one."""
    return RowRange(info.name, 0, info.shape[0] if info.shape else 1)


def all_rows(infos: Collection[TensorInfo]) -> Sequence[RowRange]:
    """Return the range of all rows of each tensor; see `whole`."""
    stops = [info.shape[0] if info.shape else 1 for info in infos]
    names = [info.name for info in infos]
    return records(RowRange, names, repeat(0), stops, repeat(None))


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """Bytes of a file: ``lines`` of ``line_nbytes`` each, whose starts are ``pitch`` bytes apart.

    Attributes:
        start: first file byte.
    """

    start: int
    line_nbytes: int
    lines: int = 1
    pitch: int = 0

    @property
    def stop(self) -> int:
        """End of the last line, exclusive."""
        return self.start + (self.lines - 1) * self.pitch + self.line_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        return self.lines * self.line_nbytes

    def before(self, at: int) -> int:
        """Return how many of these bytes are before byte ``at`` of the file."""
        past = max(at - self.start, 0)
        line, rest = divmod(past, self.pitch) if self.lines > 1 else (0, past)
        return min(line * self.line_nbytes + min(rest, self.line_nbytes), self.nbytes)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield each line's (start, stop exclusive)."""
        for line in range(self.lines):
            start = self.start + line * self.pitch
            yield start, start + self.line_nbytes


def region_of(info: TensorInfo, rows: RowRange) -> Region:
    """Return the bytes of a range of rows: one line, or with columns one a row."""
    columns, nbytes = rows.columns, info.dtype.nbytes
    if columns is None:
        count = max(info.shape[0], 1) if info.shape else 1
        begin, end = (info.nbytes * row // count for row in (rows.start, rows.stop))
        return Region(info.start + begin, end - begin)
    start = info.start + nbytes(rows.start * columns.width + columns.start)
    line_nbytes = nbytes(columns.stop - columns.start)
    return Region(start, line_nbytes, rows.stop - rows.start, nbytes(columns.width))


class Block(NamedTuple):
    """A rectangular block of a tensor, such as one device's shard.

    Attributes:
        first: the first index of the block along each axis.
        parts: equal parts along the only axis that is cut, as of fused weights. Each part is cut
            alike, ``first`` counts from its start, and the pieces are joined.
    """

    whole: tuple[int, ...]
    first: tuple[int, ...]
    shape: tuple[int, ...]
    parts: int = 1

    @property
    def is_all(self) -> bool:
        """Whether the block is the whole tensor."""
        return self.shape == self.whole

    @property
    def unfolded(self) -> Block:
        """The same elements as a block without parts, of the tensor with an axis for its parts."""
        sizes = zip(self.whole, self.shape, strict=True)
        axis = next((at for at, (whole, part) in enumerate(sizes) if whole != part), None)
        if self.parts == 1 or axis is None:
            return self

        def split(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return *sizes[:axis], self.parts, sizes[axis] // self.parts, *sizes[axis + 1 :]

        first = *self.first[:axis], 0, *self.first[axis:]
        return Block(split(self.whole), first, split(self.shape))


@dataclass(frozen=True, slots=True)
class Coding:
    """How one tensor of a quantized weight, a "part", is computed from the weight.

    The weight, flattened, is cut into units of equal size, and each is quantized alone. The
    quantized values are one part; the other parts (scales, a table) are computed after all values.

    Attributes:
        format: name of the format, one of `streamload.codecs.scheme.ALL_SCHEMES`.
        part: suffix of the part's name behind the weight's; "" for the values.
        unit_numel: elements of a unit.
        src_unit_nbytes: bytes of a unit of the weight.
        dst_unit_nbytes: bytes of a unit's quantized values.
        statistics_nbytes: host memory for statistics until all values are quantized.
        of_rows: whether functions of the user change whole rows of the weight before quantization.
        device_parts: the other parts that a device's kernels write with the values; None if the
            host quantizes.
    """

    format: str
    shape: tuple[int, ...]
    part: str
    unit_numel: int
    src_unit_nbytes: int
    dst_unit_nbytes: int
    statistics_nbytes: int
    of_rows: bool = False
    device_parts: tuple[str, ...] | None = None

    @property
    def nests(self) -> bool:
        """Whether a device quantizes the scales, too, after all values are quantized."""
        return self.device_parts is not None and len(self.device_parts) > 1


class RowTranspose(NamedTuple):
    """A row permutation: rows seen as (groups, outer, inner), with the last two axes swapped.

    Output row (g, i, o) is input row (g, o, i). Query and key rows of Hugging Face Llamas are
    half-split per head; with ``(heads, 2, head_dim / 2)`` they become interleaved, and with
    ``(heads, head_dim / 2, 2)`` they go back.

    A permuted row may be shorter than a row of the tensor, which then holds ``inner`` permuted
    rows, or a multiple of ``inner``. So ``(1, r, c)`` transposes a matrix of shape (r, c), with
    single elements as rows, and ``(n, r, c)`` transposes n stacked matrices.
    """

    groups: int
    outer: int
    inner: int

    @property
    def rows(self) -> int:
        """Number of permuted rows: groups times outer times inner."""
        return self.groups * self.outer * self.inner

    @property
    def inverse(self) -> RowTranspose:
        """The permutation that brings the rows back into their order."""
        return RowTranspose(self.groups, self.inner, self.outer)
