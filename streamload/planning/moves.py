"""Rows of parameters: `TensorRequest` before a plan is made, `Move` in the plan.

Moves share their `Kind`: a load has many tensors, and few kinds of them. The planner's other input
are devices (`DeviceSpec`), and the rules for dtypes (`DTypePolicy`).
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.encode_kernels import Tally
from streamload.codecs.stored import kept_dtype
from streamload.core.dtypes import BF16, F16, DType, DTypeArgument, parse_dtype
from streamload.core.tensors import Coding, RowRange, RowTranspose, TensorInfo, all_rows
from streamload.core.units import format_bytes, format_table, round_up
from streamload.devices.allocators import NO_OBJECTS, ObjectCosts, taken
from streamload.devices.base import DeviceInfo

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
        if self.order == "columns":  # whole columns of the file
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
    def order(self) -> Literal["file", "lines", "rows", "columns", "device"]:
        """How elements are reordered on the way.

        "file": not at all; "lines": some columns of all rows are joined; "rows": the host permutes
        whole rows; "columns": it transposes parts of rows, as of a matrix; "device": the device
        transposes while it dequantizes.
        """
        if self.transpose is None:
            return "lines" if self.strided else "file"
        if self.cast == "device" and self.src.is_packed:
            return "device"
        shape = self.shape if self.coding is None else self.coding.shape
        return "rows" if self.transpose.rows == (shape or (1,))[0] else "columns"


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


def kept_free(nbytes: int) -> str:
    """Return what follows the name of a limit that is less by ``nbytes``."""
    return f" less {format_bytes(nbytes)} kept free" if nbytes else ""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device (or a node), and the memory that a load may take there, in bytes.

    Attributes:
        budget_nbytes: most bytes that may be held there, without ``reserve_nbytes``.
        limit: the source of the budget: "budget" if the user stated it, else "free memory".
        free_nbytes: free memory now; None if unknown.
        host_free_nbytes: free memory of the host, which all devices with shared memory draw on;
            None if unknown.
        native_bf16: whether bfloat16 stays bfloat16 there unless another dtype is requested.
        device_casts: (src, dst) names of the dtype pairs that the framework casts exactly there.
        casts: whether streamload's kernels cast floats there, exactly and counted, called by the
            thread that reads.
        reserve_nbytes: bytes that were subtracted from budget and free memory, to stay free.
        objects: host memory of tensor objects besides their elements.
        own_host: whether it is a node, with a host whose memory no other node uses.
        alone: whether the caller can use no other device.
        held: of a node, names of parameters that it holds already.
    """

    info: DeviceInfo
    budget_nbytes: int
    limit: str = "budget"
    free_nbytes: int | None = None
    host_free_nbytes: int | None = None
    native_bf16: bool = False
    device_casts: frozenset[tuple[str, str]] = frozenset()
    casts: bool = False
    reserve_nbytes: int = 0
    objects: ObjectCosts = NO_OBJECTS
    own_host: bool = False
    alone: bool = False
    held: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Canonical name of the device."""
        return self.info.name

    @property
    def free_limit(self) -> str:
        """The source of ``free_nbytes``, for messages."""
        return "free memory" + kept_free(self.reserve_nbytes)

    def within(self, host_nbytes: int | None) -> DeviceSpec:
        """Return the device with at most so much free memory, less the reserve, of its host."""
        if host_nbytes is None or not (self.info.shared_memory and self.info.charged):
            return self
        free, most = self.free_nbytes, max(host_nbytes - self.reserve_nbytes, 0)
        host_free = self.host_free_nbytes
        return replace(
            self,
            free_nbytes=most if free is None else min(free, most),
            host_free_nbytes=host_nbytes if host_free is None else min(host_free, host_nbytes),
        )

    def resident(self, nbytes: int) -> int:
        """Return the bytes that the allocator counts for a tensor of ``nbytes``."""
        return round_up(nbytes, self.info.granularity_nbytes)

    def taken(self, sizes: Iterable[int]) -> Iterator[int]:
        """Yield the bytes that the allocator newly takes for each of consecutive allocations."""
        return taken(self.info.allocator, self.info.granularity_nbytes, sizes)


@dataclass(frozen=True, slots=True)
class DTypePolicy:
    """The rules of ``dtype=``, which give each tensor its dtype.

    Attributes:
        rules: (pattern, dtype) in order; the first whose pattern matches the name decides. A
            dtype of None stands for "as in the checkpoint".
        fp16_cast: the engine, "device" or "llvm", if the user requested bf16 to become fp16 by it
            (SUPPORT_BF16); else None.
        alike: the stored dtype that all floats are taken to have if no rule decides; None: each
            its own.
    """

    rules: tuple[tuple[str, DType | None], ...] = ()
    fp16_cast: Literal["device", "llvm"] | None = None
    alike: DType | None = None

    @classmethod
    def parse(
        cls,
        value: DTypeArgument,
        fp16_cast: Literal["device", "llvm"] | None = None,
    ) -> DTypePolicy:
        """Read a dtype name, "checkpoint", or patterns such as ``{"*norm*": "float32"}``.

        Raises ValueError if the value is invalid or not of floats.
        """
        if value is None:
            return cls((), fp16_cast)
        rules = value if isinstance(value, Mapping) else {"*": value}
        read: list[tuple[str, DType | None]] = []
        for pattern, wanted in rules.items():
            if not isinstance(pattern, str):
                raise ValueError(f"a pattern of names is a string, not {pattern!r}")
            dtype = None if wanted == "checkpoint" else parse_dtype(wanted)
            if dtype is not None and dtype.kind != "float":
                raise ValueError(f"only floats are cast, and only to floats: not to {dtype}")
            read.append((pattern, dtype))
        return cls(tuple(read), fp16_cast)

    def mentions(self, name: str) -> bool:
        """Return whether a rule decides the dtype of tensor ``name``."""
        rules = self.rules  # usually there is none, and this is called for every parameter
        return bool(rules) and any(p == "*" or fnmatchcase(name, p) for p, _ in rules)

    def asks(self, name: str, src: DType) -> bool:
        """Return whether a rule gives tensor ``name`` another dtype than ``src``."""
        return self.mentions(name) and self.resolve(name, src, native_bf16=True) is not src

    def resolve(self, name: str, src: DType, native_bf16: bool) -> DType:
        """Return the dtype of tensor ``name`` on a device; only floats differ from ``src``."""
        if src.kind != "float":
            return src
        for pattern, dtype in self.rules:
            if pattern == "*" or fnmatchcase(name, pattern):
                return src if dtype is None else dtype
        src = self.alike or src
        if src.is_packed:  # of blocks with scales of float16
            return F16
        if src is BF16 and (self.fp16_cast is not None or not native_bf16):
            return F16
        return src


class TensorRequest(NamedTuple):
    """One parameter to load: its source, and the model's demands.

    Attributes:
        source: row ranges, concatenated in order.
        transpose: a permutation of the concatenated rows, or None.
        device: its device by name; None lets the planner split over the devices.
        held: (device, dtype, bytes) of the parameter in the model now; None if it has no memory.
        dtype: the dtype that it must have; None lets the `DTypePolicy` decide.
        reusable_nbytes: bytes of ``held`` that the load takes over; None for all.
        coding: which part of a quantized weight it is; None for any other tensor.
        fixed: why it can only be written in place, or "".
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[RowRange, ...]
    transpose: RowTranspose | None = None
    device: str | None = None
    held: tuple[str, str, int] | None = None
    dtype: DType | None = None
    reusable_nbytes: int | None = None
    coding: Coding | None = None
    fixed: str = ""

    @property
    def rows(self) -> int:
        """Number of rows of the source."""
        return sum(r.stop - r.start for r in self.source)


class TensorRequests(Rows[TensorRequest]):
    """Parameters to load, the first tensor in the source of each, and that tensor's dtype."""

    infos: Sequence[TensorInfo]
    srcs: Sequence[DType]
    _dsts: dict[tuple[DTypePolicy, bool], Sequence[DType]]

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        rows: Sequence[TensorRequest],
        infos: Sequence[TensorInfo] | None = None,
    ) -> TensorRequests:
        """Return requests with their tensors; members of quantized weights keep their dtype."""
        if isinstance(rows, TensorRequests):
            return rows
        infos = infos or [checkpoint.tensors[row.source[0].tensor] for row in rows]
        if members := checkpoint.members:
            kept = [kept_dtype(members, info) for info in infos]
            each = zip(rows, kept, strict=True)
            rows = [row._replace(dtype=dtype) if dtype else row for row, dtype in each]
        made = cls(rows)
        made.infos, made.srcs, made._dsts = infos, [info.dtype for info in infos], {}
        return made

    @classmethod
    def every(cls, checkpoint: Checkpoint) -> TensorRequests:
        """Return a request for every tensor of a checkpoint, under its own name."""
        infos = tuple(checkpoint.tensors.values())
        names, shapes = (list(map(attrgetter(field), infos)) for field in ("name", "shape"))
        rest = map(repeat, TensorRequest._field_defaults.values())
        rows = [*rows_of(TensorRequest, names, shapes, zip(all_rows(infos)), *rest)]
        return cls.of(checkpoint, rows, infos)

    @cached_property
    def any_packed(self) -> bool:
        """Whether some are dequantized during the load."""
        return any(src.is_packed for src in {id(src): src for src in self.srcs}.values())

    def dsts(self, policy: DTypePolicy, native_bf16: bool) -> Sequence[DType]:
        """Return each parameter's dtype on a device; ``native_bf16``: it computes in bfloat16."""
        found = self._dsts.get((policy, native_bf16))
        if found is None:
            if any(pattern != "*" for pattern, _ in policy.rules):
                resolved = [policy.resolve(i.name, i.dtype, native_bf16) for i in self.infos]
            else:  # by id: a dtype's own hash takes ten times as long
                known = dict(zip(map(id, self.srcs), self.srcs, strict=True))
                to = {key: policy.resolve("", src, native_bf16) for key, src in known.items()}
                resolved = [to[id(src)] for src in self.srcs]
            asked = list(map(attrgetter("dtype"), self))
            found = [dtype or dst for dtype, dst in zip(asked, resolved, strict=True)]
            self._dsts[policy, native_bf16] = found
        return found

    def casts(
        self, policy: DTypePolicy, native_bf16: bool, device: str | None = None
    ) -> list[tuple[DType, DType]]:
        """Return the distinct (src, dst) dtypes of casts; ``device``: only of parameters for it."""
        rows = zip(self.srcs, self.dsts(policy, native_bf16), self, strict=True)
        pairs = {
            (src.name, dst.name): (src, dst)
            for src, dst, row in rows
            if src is not dst and row.coding is None
            if device is None or row.device in (None, device)
        }
        return [pair for _, pair in sorted(pairs.items())]

    def needs_native_bf16(self, policy: DTypePolicy) -> bool:
        """Return whether a dtype depends on whether the device computes in bfloat16 natively."""
        return self.dsts(policy, True) != self.dsts(policy, False)

    def nbytes(self, policy: DTypePolicy, native_bf16: bool = False) -> list[int]:
        """Return each parameter's bytes on a device; ``native_bf16``: it computes in bfloat16."""
        dsts = self.dsts(policy, native_bf16)
        return [dst.nbytes(math.prod(w.shape)) for dst, w in zip(dsts, self, strict=True)]
