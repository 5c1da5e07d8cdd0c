"""`Placement`: the device and cast of one parameter of a plan; `Placements`: all, in columns."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from streamload.codecs.encode_kernels import Tally
from streamload.core.dtypes import DType
from streamload.core.tensors import Coding, RowRange, RowTranspose, records
from streamload.core.units import format_table
from streamload.planning.table import Table

Action = Literal["new", "in_place", "replace"]

# Most bytes of rows that functions change at once; a longer row is one piece.
CHANGE_NBYTES = 2**20
# Bytes of a device's counters for each parameter: overflowed, flushed and changed elements.
TALLY_NBYTES = 3 * 8
_LISTED = 8  # placements that are printed
# Fields of `Placement` with a column in `Placements`.
_DIFFERENT = ("name", "source", "resident_nbytes", "reusable_nbytes")

#: Values of `Placement.cast` for which the host casts.
HOST_CASTS = frozenset({"llvm", "numpy", "rows", "quant"})
#: Values of `Placement.cast` for which a stream reads no bytes.
UNREAD = frozenset({"mapped", "part"})


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter of a plan: its source, device and cast.

    Attributes:
        name: the parameter's name.
        device: the name of its device.
        shape: its shape.
        src: dtype in the checkpoint.
        dst: dtype on the device.
        source: row ranges, concatenated in order.
        transpose: a permutation of those rows, or None.
        action: "new", "in_place" (the model's bytes are overwritten) or "replace" (the model's
            bytes are released first).
        cast: "copy", "llvm", "numpy", "device", "rows" if functions change values, "mapped" for
            a view on the file, which is not read, "quant" for the codes of a weight that is
            quantized, or "part" for its scales and the like: computed after the codes, not read.
        resident_nbytes: bytes that it takes of the device, as the allocator rounds; 0 if it
            fits into memory that the allocator took for an earlier parameter.
        released_nbytes: bytes that it frees on that device first, under "replace".
        reusable_nbytes: bytes of the old parameter that the load takes over: overwritten, or
            really freed. Memory never written, or shared, does not count.
        coding: which part of a quantized weight it is; None for any other tensor.
        scales_nbytes: host bytes of its scales while it is dequantized; 0 for any other tensor.
        there_nbytes: bytes that the casting device holds until the whole tensor has arrived:
            scales, or maxima of blocks that are quantized then.
        stored: the block type of a quantized weight that stays as it is stored, else "".
    """

    name: str
    device: str
    shape: tuple[int, ...]
    src: DType
    dst: DType
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None
    action: Action
    cast: str
    resident_nbytes: int
    released_nbytes: int = 0
    reusable_nbytes: int = 0
    coding: Coding | None = None
    scales_nbytes: int = 0
    there_nbytes: int = 0
    stored: str = ""

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
        return self.numel // max(sum(r.stop - r.start for r in self.source), 1)

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
        assert coding is not None, self.name
        return nbytes // coding.dst_unit_nbytes * coding.unit_numel

    @property
    def part_numel(self) -> int:
        """Elements that the transpose moves together, as one part."""
        assert self.transpose is not None, self.name
        return self.numel // self.transpose.rows

    @property
    def column_numel(self) -> int:
        """Elements of a column of the stored matrix: ``outer`` parts, one from each line."""
        assert self.transpose is not None, self.name
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
    def strided(self) -> bool:
        """Whether only some columns of the source's rows are read."""
        return any(r.columns is not None for r in self.source)

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


@dataclass(slots=True, eq=False, repr=False)
class Placements(Table[Placement]):
    """The placements of a plan, in columns.

    They compare, hash and pickle like a tuple of `Placement`.

    Attributes:
        kinds: for each parameter a `Placement` with the facts that are in no other column; equal
            parameters share one object.
        sources: the row ranges of each.
        resident_nbytes: bytes that each takes of its device.
        reusable_nbytes: bytes of each old parameter that the load takes over.
    """

    kinds: Sequence[Placement]
    names: Sequence[str]
    sources: Sequence[tuple[RowRange, ...]]
    resident_nbytes: Sequence[int]
    reusable_nbytes: Sequence[int]
    _counted: tuple[tuple[Placement, int], ...] | None = field(init=False, default=None)
    _rows: dict[int, Placement] = field(init=False, default_factory=dict)

    @classmethod
    def of(cls, placements: Iterable[Placement]) -> Placements:
        """Return placements in columns, without sharing objects in ``kinds``."""
        kinds = tuple(placements)
        return cls(kinds, *(list(map(attrgetter(name), kinds)) for name in _DIFFERENT))

    @property
    def _columns(self) -> tuple[Sequence[Any], ...]:
        sizes = self.resident_nbytes, self.reusable_nbytes
        return self.kinds, self.names, self.sources, *sizes

    @property
    def counted(self) -> tuple[tuple[Placement, int], ...]:
        """(placement, count) of each kind: parameters equal but for name, source and sizes."""
        if self._counted is None:
            keys = list(map(id, self.kinds))
            count, kind = Counter(keys), dict(zip(keys, self.kinds, strict=True))
            self._counted = tuple((kind[key], count[key]) for key in count)
        return self._counted

    @property
    def all_new(self) -> bool:
        """Whether the action of all placements is "new": the model holds no old parameters."""
        return all(kind.action == "new" for kind, _ in self.counted)

    def on(self, device: str) -> Placements:
        """Return the placements on one device, given by name."""
        if all(kind.device == device for kind, _ in self.counted):
            return self
        return self.chosen([at for at, kind in enumerate(self.kinds) if kind.device == device])

    def row(self, at: int) -> Placement:
        """Return the `Placement` of index ``at``; the same object each time."""
        found = self._rows.get(at)
        if found is None:
            found = self._rows[at] = replace(
                self.kinds[at],
                name=self.names[at],
                source=self.sources[at],
                resident_nbytes=self.resident_nbytes[at],
                reusable_nbytes=self.reusable_nbytes[at],
            )
        return found

    def __iter__(self) -> Iterator[Placement]:
        own = dict(zip(_DIFFERENT, self._columns[1:], strict=True))
        columns = (
            own[name] if name in own else list(map(attrgetter(name), self.kinds))
            for name in Placement.__slots__
        )
        return iter(records(Placement, *columns))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Placements)):
            return NotImplemented
        return tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        """Return a table of the first placements."""
        rows = [
            (p.name, p.device, str(list(p.shape)), p.src.name, p.dst.name, p.cast, p.action)
            for p in self[:_LISTED]
        ]
        titles = ("parameter", "device", "shape", "stored as", "becomes", "by", "action")
        rest = len(self) - len(rows)
        more = [f"and {rest} more"] * bool(rest)
        return "\n".join([*format_table(titles, rows, right=0), *more])

    def __reduce__(self) -> tuple[Any, ...]:
        return Placements.of, (tuple(self),)
