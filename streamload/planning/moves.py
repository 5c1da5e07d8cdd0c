"""`Move`: one row of a plan's table, the source and the place of a parameter; `Kind`: its facts.

Rows share their kinds: a load has many tensors, and few kinds of them.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from streamload.codecs.encode_kernels import Tally
from streamload.core.dtypes import DType
from streamload.core.tensors import Coding, RowRange, RowTranspose
from streamload.core.units import format_table

Action = Literal["new", "in_place", "replace"]

# Most bytes of rows that functions change at once; a longer row is one piece.
CHANGE_NBYTES = 2**20
# Bytes of a device's counters for each parameter: overflowed, flushed and changed elements.
TALLY_NBYTES = 3 * 8
_LISTED = 8  # moves that are printed

#: Values of `Kind.cast` for which the host casts.
HOST_CASTS = frozenset({"llvm", "numpy", "rows", "quant"})
#: Values of `Kind.cast` for which a stream reads no bytes.
UNREAD = frozenset({"mapped", "part"})


@dataclass(frozen=True, slots=True)
class Kind:
    """The device and cast of parameters of a plan that are alike.

    Attributes:
        device: the name of their device.
        shape: the shape of each.
        src: dtype in the checkpoint.
        dst: dtype on the device.
        rows: rows of the source.
        transpose: a permutation of those rows, or None.
        action: "new", "in_place" (the model's bytes are overwritten) or "replace" (the model's
            bytes are released first).
        cast: "copy", "llvm", "numpy", "device", "rows" if functions change values, "mapped" for
            a view on the file, which is not read, "quant" for the codes of a weight that is
            quantized, or "part" for its scales and the like: computed after the codes, not read.
        released_nbytes: bytes that each frees on that device first, under "replace".
        coding: which part of a quantized weight each is; None for other tensors.
        scales_nbytes: host bytes of its scales while one is dequantized; 0 for other tensors.
        there_nbytes: bytes that the casting device holds until the whole tensor has arrived:
            scales, or maxima of blocks that are quantized then.
        stored: the block type of quantized weights that stay as they are stored, else "".
        strided: whether only some columns of the source's rows are read.
    """

    device: str
    shape: tuple[int, ...]
    src: DType
    dst: DType
    rows: int
    transpose: RowTranspose | None
    action: Action
    cast: str
    released_nbytes: int = 0
    coding: Coding | None = None
    scales_nbytes: int = 0
    there_nbytes: int = 0
    stored: str = ""
    strided: bool = False

    @property
    def numel(self) -> int:
        """Number of elements read for the parameter; 0 for scales that a load computes."""
        if self.coding is None:
            return math.prod(self.shape)
        return 0 if self.coding.part else math.prod(self.coding.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's elements on the device."""
        return self.dst.nbytes(math.prod(self.shape))

    @property
    def src_nbytes(self) -> int:
        """Bytes of the parameter's elements in the checkpoint."""
        return self.src.nbytes(self.numel)

    @property
    def row_numel(self) -> int:
        """Elements of one row of the source."""
        return self.numel // max(self.rows, 1)

    @property
    def tally_nbytes(self) -> int:
        """Bytes of a device's counters (overflows, ...) for the parameter's cast."""
        return TALLY_NBYTES if self.coding is None else ctypes.sizeof(Tally)

    @property
    def unit_numel(self) -> int:
        """Elements in the smallest unit that converts on its own."""
        if self.coding is None:
            own = self.src.unit if self.src.is_packed else 1
            return self.row_numel if self.cast == "rows" else own
        unit = self.coding.unit_numel
        if self.transpose is not None and self.turned:  # whole columns of the file
            return math.lcm(unit, self.column_numel)
        return math.lcm(unit, self.row_numel) if self.coding.of_rows else unit

    @property
    def changes(self) -> bool:
        """Whether functions change the parameter's rows during the load."""
        return self.cast == "rows" or (self.coding is not None and self.coding.of_rows)

    def placed_nbytes(self, numel: int) -> int:
        """Return the bytes on the device of the first ``numel`` elements, as codes if quantized."""
        coding = self.coding
        if coding is None:
            return self.dst.nbytes(numel)
        units, rest = divmod(numel, coding.unit_numel)
        last = -(-rest * coding.dst_unit_nbytes // coding.unit_numel)
        return units * coding.dst_unit_nbytes + last

    def numel_at(self, nbytes: int) -> int:
        """Return the index of the element whose codes begin at this byte of a quantized weight."""
        coding = self.coding
        assert coding is not None
        return nbytes // coding.dst_unit_nbytes * coding.unit_numel

    @property
    def part_numel(self) -> int:
        """Elements that the transpose moves together, as one part."""
        assert self.transpose is not None
        return self.numel // self.transpose.rows

    @property
    def column_numel(self) -> int:
        """Elements of a column of the stored matrix: ``outer`` parts, one from each line."""
        assert self.transpose is not None
        return self.part_numel * self.transpose.outer

    @property
    def least_columns(self) -> int:
        """Fewest columns to read at once when transposing, to have whole units (`unit_numel`)."""
        unit = self.unit_numel
        if self.coding is not None:
            return max(unit // self.column_numel, 1)
        return unit // math.gcd(unit, self.part_numel)

    @property
    def changed_numel(self) -> int:
        """Most elements that ``transform=`` or an adapter changes in one call."""
        fitting = CHANGE_NBYTES // max(self.src.itemsize, self.dst.itemsize)
        return min(max(fitting, self.row_numel), self.numel)

    @property
    def turned_there(self) -> bool:
        """Whether the device transposes the weight while dequantizing it, instead of the host."""
        return self.cast == "device" and self.src.is_packed and self.transpose is not None

    @property
    def turned(self) -> bool:
        """Whether the host transposes parts of rows, as for a matrix, and not only whole rows."""
        shape = self.shape if self.coding is None else self.coding.shape
        if self.transpose is None or self.turned_there:
            return False
        return self.transpose.rows != (shape or (1,))[0]


class Move(NamedTuple):
    """A row of a plan: the rows of tensors that become a parameter, and its bytes.

    Attributes:
        source: row ranges, concatenated in order.
        resident_nbytes: bytes that it takes of the device, as the allocator rounds; 0 if it
            fits into memory that the allocator took for an earlier parameter.
        reusable_nbytes: bytes of the old parameter that the load takes over: overwritten, or
            really freed. Memory never written, or shared, does not count.
    """

    name: str
    source: tuple[RowRange, ...]
    kind: Kind
    resident_nbytes: int
    reusable_nbytes: int = 0


if not TYPE_CHECKING:  # users find all facts in a row
    Move.__getattr__ = lambda move, name: getattr(move.kind, name)


_Row = TypeVar("_Row", covariant=True)


class Rows(tuple[_Row, ...]):
    """Rows that have names."""

    @cached_property
    def names(self) -> Sequence[str]:
        """The name of each."""
        return list(map(attrgetter("name"), self))


def rows_of(kind: type[_Row], *columns: Iterable[Any]) -> Iterator[_Row]:
    """Make many rows from columns: without the class's own function, in a third of its time."""
    return map(tuple.__new__, repeat(kind), zip(*columns, strict=False))  # type: ignore[arg-type]


class Moves(Rows[Move]):
    """The rows of a plan, in the order in which they are streamed."""

    @cached_property
    def counted(self) -> tuple[tuple[Kind, int], ...]:
        """(kind, count) of each kind."""
        kinds = list(map(attrgetter("kind"), self))
        keys = list(map(id, kinds))
        kind = dict(zip(keys, kinds, strict=True))
        return tuple((kind[key], count) for key, count in Counter(keys).items())

    @cached_property
    def all_new(self) -> bool:
        """Whether the action of all is "new": the model holds no old parameters."""
        return all(kind.action == "new" for kind, _ in self.counted)

    @cached_property
    def resident_nbytes(self) -> int:
        """Bytes that all take of their devices."""
        return sum(map(attrgetter("resident_nbytes"), self))

    def chosen(self, places: Iterable[int]) -> Moves:
        """Return the rows of these indices, in this order."""
        return Moves(map(self.__getitem__, places))

    def on(self, device: str) -> Moves:
        """Return the rows on one device, given by name."""
        if all(kind.device == device for kind, _ in self.counted):
            return self
        return Moves(move for move in self if move.kind.device == device)

    def __repr__(self) -> str:
        """Return a table of the first rows."""
        rows = [
            (m.name, k.device, str(list(k.shape)), k.src.name, k.dst.name, k.cast, k.action)
            for m in self[:_LISTED]
            for k in (m.kind,)
        ]
        titles = ("parameter", "device", "shape", "stored as", "becomes", "by", "action")
        rest = len(self) - len(rows)
        more = [f"and {rest} more"] * bool(rest)
        return "\n".join([*format_table(titles, rows, right=0), *more])

    def __reduce__(self) -> tuple[Any, ...]:
        return Moves, (tuple(self),)  # what is cached goes by ids
