"""Parts of tensors: blocks of them, columns of their rows, and other orders of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Columns:
    """Elements ``start`` to ``stop`` (exclusive) of each row of a tensor seen as a matrix.

    A part of a tensor along any axis: that axis and those after it are a row, those before it
    number the rows.

    Attributes:
        start: first element.
        stop: last element, exclusive.
        width: elements of a row.
    """

    start: int
    stop: int
    width: int


class Block(NamedTuple):
    """A part of a tensor, from some index to another along each axis.

    Attributes:
        whole: the shape of the tensor.
        first: the first index of the part along each axis.
        shape: the shape of the part.
    """

    whole: tuple[int, ...]
    first: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_all(self) -> bool:
        """Whether it is the whole tensor."""
        return self.shape == self.whole


@dataclass(frozen=True, slots=True)
class Coding:
    """How one part of a quantised tensor is made of the weight.

    The weight, flattened, is cut at multiples of a unit; each unit is quantised by itself. Its
    codes are one part; the others (scales, a table) are made when all codes are there.

    Attributes:
        format: name of the format, one of `streamload.quant.FORMATS`.
        shape: the shape of the weight.
        part: what the part's name has behind the weight's; "" for the codes.
        unit_numel: elements of a unit.
        src_unit_nbytes: bytes of a unit of the weight.
        dst_unit_nbytes: bytes of its codes.
        statistics_nbytes: what the host holds until all codes are there.
        of_rows: functions change whole rows of the weight before.
    """

    format: str
    shape: tuple[int, ...]
    part: str
    unit_numel: int
    src_unit_nbytes: int
    dst_unit_nbytes: int
    statistics_nbytes: int
    of_rows: bool = False


@dataclass(frozen=True, slots=True)
class RowTranspose:
    """A row permutation: rows seen as (groups, outer, inner), with the last two axes swapped.

    Output row (g, i, o) is input row (g, o, i). Query and key rows of Hugging Face Llamas are
    half-split per head; with ``(heads, 2, head_dim / 2)`` they become interleaved, and with
    ``(heads, head_dim / 2, 2)`` they go back.

    Where a row of the tensor is ``inner`` of these rows, or a multiple, its parts move: a matrix of
    (r, c) is transposed by ``(1, r, c)``, each of n stacked ones by ``(n, r, c)``.
    """

    groups: int
    outer: int
    inner: int

    @property
    def rows(self) -> int:
        """Rows that the permutation is for."""
        return self.groups * self.outer * self.inner
