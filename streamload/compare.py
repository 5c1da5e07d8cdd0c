"""Comparing two checkpoints tensor by tensor.

Nothing is held of a tensor but a block of each file: 20 MB, and less where memory is short. It is
one thread: digests run at 30 GB/s and comparisons at 19 (2 GB/s where ml_dtypes casts, which keeps
the GIL), so that the disk decides.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np

from streamload.cast.reference import Array, cast_array, cast_bytes
from streamload.cast.table import OutOfRange, supported
from streamload.checkpoint.checkpoint import Checkpoint, CheckpointLike, opened
from streamload.checkpoint.header import TensorInfo
from streamload.checkpoint.readers import ReaderKind, ResolvedKind, choose_reader
from streamload.checkpoint.url import Location
from streamload.dtypes import DType, DTypeArgument
from streamload.errors import OutOfRangeError, UnsupportedCastError
from streamload.mapping import Rename, sources
from streamload.planning.budget import first_that_fits
from streamload.planning.demand import DTypePolicy
from streamload.progress import Progress, reporting
from streamload.quant.stored import by_weight, kept_dtype, weights
from streamload.reading import AHEAD_NBYTES, BLOCK_NBYTES, Room, Shards, cut
from streamload.selection import Patterns, Selection, check_names
from streamload.units import format_bytes, format_table

#: (bytes looked at at once, how files are read): the first that memory is enough for.
_WAYS: Sequence[tuple[int, ReaderKind]] = (
    (BLOCK_NBYTES, "auto"),
    (2**20, "direct"),
    (2**18, "direct"),
)
# Each is a little more than was measured in memory cgroups.
_RUN_NBYTES = 2 * 2**20  # a thread that tells how far it is, open files
_PARTS_NBYTES = 6 * 2**20  # numpy's temporaries of a part: 3.5 MB, 5.5 with a cast
_TENSOR_NBYTES = 300  # what is found of a tensor: 180 where it is right
_PART_NUMEL = 2**16  # elements looked at one by one: temporaries of a few MB
_MOST_OPEN = 16  # files of one checkpoint at once
_LISTED_DIMS = 8


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """How the values of two tensors of one shape differ.

    Attributes:
        count: elements that differ: in their bits, or as numbers where the dtypes differ.
        numel: elements in all.
        bits_only: of those that differ, how many are the same number in other bits: 0 and -0, or
            two NaN.
        first: index of the first element that differs, in row-major order.
        a: that element in the first checkpoint (cast, where a cast was asked for), and its bits.
        b: the same in the second.
        largest: the largest absolute difference of two numbers; inf where an infinity is against
            another number; None for bools, for dtypes of less than a byte, and where NaN is in
            each pair.
    """

    count: int
    numel: int
    bits_only: int
    first: tuple[int, ...]
    a: str
    b: str
    largest: float | int | None

    def __str__(self) -> str:
        text = f"{self.count} of {self.numel} values differ"
        if self.bits_only:
            text += f" ({self.bits_only} only in bits: zeros of other sign, NaN of other payload)"
        text += f", first at {list(self.first)}: {self.a}, {self.b}"
        return text if self.largest is None else f"{text}; largest difference {self.largest:g}"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How two tensors of one name differ.

    Attributes:
        name: the name, in the second checkpoint.
        dtypes: both dtypes where they are not the same; the first is what the cast makes of it.
        shapes: both shapes where they are not the same.
        values: how the values differ; None where they do not, or were not compared.
        compared: whether the values were compared: of one shape, and of one dtype or both floats
            of at least a byte, compared as numbers then.
    """

    name: str
    dtypes: tuple[str, str] | None
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None
    values: ValueDifference | None
    compared: bool

    def __str__(self) -> str:
        parts = []
        if self.dtypes is not None:
            parts.append(f"dtype {self.dtypes[0]}, {self.dtypes[1]}")
        if self.shapes is not None:
            parts.append(f"shape {shape_text(self.shapes[0])}, {shape_text(self.shapes[1])}")
        if self.values is not None:
            parts.append(str(self.values))
        elif self.compared:
            parts.append("the same numbers")
        elif self.shapes is None:
            parts.append("values not compared")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two checkpoints. Prints as a table.

    Attributes:
        a: the first.
        b: the second.
        only_a: names that only the first has (after `rename`), in order.
        only_b: names that only the second has, in order.
        differences: tensors of both that differ, in the order of the first.
        equal_count: how many do not.
        nbytes: bytes of data read, of both.
        seconds: the time that this took.
        quantised: of tensors that differ, the quantised weights that they belong to.
    """

    a: str
    b: str
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differences: tuple[TensorDifference, ...]
    equal_count: int
    nbytes: int
    seconds: float
    quantised: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return not (self.only_a or self.only_b or self.differences)

    def to_json(self) -> str:
        """Write everything as JSON; a largest difference that is infinite is the text "inf"."""
        data = {"ok": self.ok, **asdict(self)}
        for difference in data["differences"]:
            values = difference["values"]
            if values is not None and values["largest"] == math.inf:
                values["largest"] = "inf"
        return json.dumps(data, allow_nan=False)

    def lines(self) -> Iterator[str]:
        """A line for each tensor or quantised weight that differs, and one for the whole."""
        rows = [(name, f"only in {self.a}") for name in self.only_a]
        rows += [(name, f"only in {self.b}") for name in self.only_b]
        rows += [(d.name, str(d)) for d in self.differences]
        if rows:
            listed = by_weight(rows, self.quantised)
            yield from format_table(("tensor", "difference"), listed, right=0)
        done = f"{format_bytes(self.nbytes)} in {self.seconds:.2f} s"
        if self.ok:
            yield f"equal: {tensors_text(self.equal_count)}, {done}"
        else:
            yield f"{tensors_text(len(rows))} different, {self.equal_count} equal, {done}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def diff(
    a: CheckpointLike,
    b: CheckpointLike,
    *,
    dtype: DTypeArgument = None,
    out_of_range: OutOfRange = "inf",
    rename: Rename | None = None,
    select: Patterns = (),
    exclude: Patterns = (),
    progress: Progress = "auto",
) -> Comparison:
    """Compare two checkpoints tensor by tensor, whatever files the tensors are in.

    Bits are compared, so that 0 and -0 differ, and NaN is equal to the same NaN. With ``dtype`` the
    first checkpoint is cast first, by numpy and not by the kernels of streamload: what is found
    is then whether the second is a right conversion of the first. The payload of a NaN is not
    compared where a cast was made.

    Args:
        a: the first, as of `open_checkpoint`.
        b: the second.
        dtype: what the floats of the first become: one dtype, or patterns of names; None for what
            they are.
        out_of_range: what becomes of finite values that the dtype cannot represent: "inf",
            "clamp", or "error".
        rename: what the names of the first become: a dict (others stay), or a callable that gives
            a name, or None to skip.
        select: only tensors with a name that matches, as the first has it; none for all.
        exclude: not those with a name that matches.
        progress: how to tell how far it is; see `load_state_dict`.

    Returns:
        What was found; `Comparison.ok` is the verdict.

    Raises:
        CheckpointError: a checkpoint is not valid or cannot be read.
        PlanInfeasibleError: there is too little memory.
        UnsupportedCastError: a tensor cannot be cast so.
        OutOfRangeError: under "error", a value cannot be represented.
        ValueError: an argument is invalid.
    """
    begun = time.monotonic()
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(f"out_of_range is one of {get_args(OutOfRange)}, not {out_of_range!r}")
    chosen = Selection.parse(select, exclude)
    policy = DTypePolicy.parse("checkpoint" if dtype is None else dtype)
    first, second = opened(a), opened(b)
    block_nbytes, kind = way([first, second])
    room_a, room_b = Room(block_nbytes, ahead=True), Room(block_nbytes, ahead=True)
    chosen.check([*first.tensors, *second.tensors])
    if isinstance(rename, Mapping):
        check_names("rename", rename, first.tensors)
    named, _, _ = sources(first, None, rename)
    infos = {name: first.tensors[source.rows[0].tensor] for name, source in named.items()}
    only_b = [name for name in second.tensors if name not in infos and name in chosen]
    infos = {name: info for name, info in infos.items() if info.name in chosen}
    pairs = [
        _Pair(info, second.tensors[name], _wanted(first, policy, info), out_of_range)
        for name, info in infos.items()
        if name in second.tensors
    ]
    total = sum(pair.left.nbytes for pair in pairs if pair.same_shape)
    with (
        reporting(progress, total, "compared") as tell,
        shards_of(first, kind) as files_a,
        shards_of(second, kind) as files_b,
    ):
        done = 0
        for pair in pairs:
            left, right = pair.left, pair.right
            for mine, theirs in pair.cut(block_nbytes):
                with (
                    files_a.block(left.shard, *mine, room_a, left.name) as x,
                    files_b.block(right.shard, *theirs, room_b, right.name) as y,
                ):
                    pair.compare(x, y)
                tell(done + mine[1] - left.start)
            done += left.nbytes * pair.same_shape
            tell(done)
    differences = tuple(found for pair in pairs if (found := pair.difference()) is not None)
    only_a = tuple(name for name in infos if name not in second.tensors)
    of_first, of_second = weights(first), weights(second)
    listed = {name: of_first.get(infos[name].name) for name in only_a}
    listed |= {name: of_second.get(name) for name in (*only_b, *(d.name for d in differences))}
    return Comparison(
        a=str(first.path),
        b=str(second.path),
        only_a=only_a,
        only_b=tuple(only_b),
        differences=differences,
        equal_count=len(pairs) - len(differences),
        nbytes=sum(pair.left.nbytes + pair.right.nbytes for pair in pairs if pair.compared),
        seconds=time.monotonic() - begun,
        quantised={name: weight for name, weight in listed.items() if weight is not None},
    )


def _wanted(checkpoint: Checkpoint, policy: DTypePolicy, info: TensorInfo) -> DType:
    """What a tensor of the first checkpoint becomes before it is compared."""
    wanted = policy.resolve(info.name, info.dtype, True)
    if wanted is not info.dtype:
        wanted = kept_dtype(checkpoint, info) or wanted
    if not supported(info.dtype, wanted):
        raise UnsupportedCastError(info.dtype.name, wanted.name, tensor=info.name, path=info.shard)
    return wanted


@dataclass(slots=True)
class _Pair:
    """Two tensors of one name, compared block by block."""

    left: TensorInfo
    right: TensorInfo
    wanted: DType  # of the left one
    out_of_range: OutOfRange
    _at: int = 0  # elements compared so far
    _count: int = 0
    _bits_only: int = 0
    _first: tuple[int, str, str] | None = None
    _largest: float | int | None = None

    @property
    def _cast(self) -> bool:
        return self.wanted is not self.left.dtype

    @property
    def _same_dtype(self) -> bool:
        return self.wanted is self.right.dtype

    @property
    def same_shape(self) -> bool:
        """Whether the elements correspond."""
        return self.left.shape == self.right.shape

    @property
    def compared(self) -> bool:
        """Whether the values can be compared."""
        dtypes = (self.wanted, self.right.dtype)
        return self.same_shape and (
            self._same_dtype or all(d.kind == "float" and d.numpy is not None for d in dtypes)
        )

    def cut(self, block_nbytes: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Bytes of the left and of the right file that hold the same elements, block by block.

        Nothing where the values cannot be compared.
        """
        left, right = self.left.dtype, self.right.dtype
        x, y = self.left.start, self.right.start
        # a multiple of 8: whole bytes of any dtype
        step = block_nbytes * 8 // max(left.bits, right.bits) // 8 * 8
        for start, stop in cut(0, self.left.numel if self.compared else 0, step):
            yield (
                (x + left.nbytes(start), x + left.nbytes(stop)),
                (y + right.nbytes(start), y + right.nbytes(stop)),
            )

    def compare(self, mine: memoryview, theirs: memoryview) -> None:
        """Compare the next block: its bytes of the left, and of the right tensor."""
        x, y = np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)
        left, right = self.left.dtype, self.right.dtype
        numel = len(x) * 8 // left.bits
        if not self._cast and self._same_dtype and np.array_equal(x, y):
            self._at += numel
            return
        for start, stop in cut(0, numel, _PART_NUMEL):
            # copies: numpy is only fast, or right, on aligned elements
            part = x[left.nbytes(start) : left.nbytes(stop)].copy()
            other = y[right.nbytes(start) : right.nbytes(stop)].copy()
            self._compare_part(self._expected(part) if self._cast else part, other)
            self._at += stop - start

    def difference(self) -> TensorDifference | None:
        """What was found; None where nothing differs."""
        left, right = self.left, self.right
        values = None
        if self._first is not None:
            at, mine, theirs = self._first
            index = tuple(int(i) for i in np.unravel_index(at, left.shape)) if left.shape else ()
            values = ValueDifference(
                self._count, left.numel, self._bits_only, index, mine, theirs, self._largest
            )
        if values is None and self.same_shape and self._same_dtype:
            return None
        return TensorDifference(
            right.name,
            None if self._same_dtype else (self.wanted.name, right.dtype.name),
            None if self.same_shape else (left.shape, right.shape),
            values,
            self.compared,
        )

    def _expected(self, part: Array) -> Array:
        """The bytes that elements of the left tensor become."""
        src, dst = self.left.dtype, self.wanted
        cast = cast_array(part.view(src.numpy), dst)
        if self.out_of_range != "inf" and np.isinf(cast).any():
            clamp = self.out_of_range == "clamp"
            overflowed, _, _ = cast_bytes(
                src, dst, part.data, cast.view(np.uint8).data, clamp=clamp
            )
            if overflowed and not clamp:
                info = self.left
                raise OutOfRangeError(info.name, info.shard, src.name, dst.name, overflowed)
        return cast.view(np.uint8)

    def _compare_part(self, x: Array, y: Array) -> None:
        a, b = self.wanted, self.right.dtype
        if self._same_dtype and np.array_equal(x, y):
            return
        if a.numpy is None or b.numpy is None:
            self._note(np.flatnonzero(_different_bits(x, y, a)), x, y)
            return
        p, q = _numbers(x, a), _numbers(y, b)
        both_nan = np.isnan(p) & np.isnan(q)
        differs = _different_bits(x, y, a) if self._same_dtype else p != q
        if self._cast or not self._same_dtype:
            differs &= ~both_nan
        where = np.flatnonzero(differs)
        self._note(where, x, y)
        if not len(where) or a.kind == "bool":
            return
        self._bits_only += int(np.count_nonzero(differs & ((p == q) | both_nan)))
        # of all elements, since taking out those that differ takes longer; unless that says nothing
        largest = _largest_difference(p, q) or _largest_difference(p[where], q[where])
        if largest is not None:
            self._largest = max(self._largest or 0, largest)

    def _note(self, where: Array, x: Array, y: Array) -> None:
        """Count the elements of a part that differ, and keep the first of all."""
        self._count += len(where)
        if self._first is None and len(where):
            i = int(where[0])
            mine, theirs = _element(x, i, self.wanted), _element(y, i, self.right.dtype)
            self._first = (self._at + i, mine, theirs)


def _different_bits(x: Array, y: Array, dtype: DType) -> Array:
    """Whether each element differs, of bytes of one dtype."""
    if dtype.bits >= 8:
        unsigned = np.dtype(f"u{dtype.itemsize}")
        differs: Array = x.view(unsigned) != y.view(unsigned)
        return differs
    bits = np.unpackbits(np.bitwise_xor(x, y).view(np.uint8), bitorder="little")
    one_differs: Array = np.bitwise_or.reduce(bits.reshape(-1, dtype.bits), axis=1) != 0
    return one_differs


def _numbers(data: Array, dtype: DType) -> Array:
    """Elements as numbers, all of them exactly: float64, complex128, or integers as they are."""
    values: Array = data.view(dtype.numpy)
    wide = {"float": np.float64, "complex": np.complex128}.get(dtype.kind)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values if wide is None else values.astype(wide)


def _largest_difference(p: Array, q: Array) -> float | int | None:
    if p.dtype.kind in "ui":
        # of the larger and the smaller, modulo 2**64: exact also where int64 would overflow
        high, low = np.maximum(p, q).astype(np.uint64), np.minimum(p, q).astype(np.uint64)
        return int((high - low).max())
    with np.errstate(all="ignore"):
        found = np.fmax.reduce(np.abs(p - q))  # NaN is passed over: also of equal infinities
    return None if np.isnan(found) else float(found)


def _element(data: Array, index: int, dtype: DType) -> str:
    """An element and its bits, for people."""
    if dtype.numpy is None:
        bits = np.unpackbits(data, bitorder="little")[index * dtype.bits : (index + 1) * dtype.bits]
        return f"0x{int(np.packbits(bits, bitorder='little')[0]):02x}"
    raw = data[index * dtype.itemsize : (index + 1) * dtype.itemsize]
    code = int.from_bytes(raw.tobytes(), "little")
    return f"{raw.view(dtype.numpy)[0]} (0x{code:0{dtype.itemsize * 2}x})"


# --- reading --------------------------------------------------------------------------------------


def shards_of(checkpoint: Checkpoint, kind: ReaderKind) -> Shards:
    """The files of a checkpoint, some of them open."""

    def choose(shard: Location) -> ResolvedKind:
        return choose_reader(shard, kind if isinstance(shard, Path) else "auto").kind

    return Shards(checkpoint.shards, choose, most_open=_MOST_OPEN)


def way(checkpoints: Sequence[Checkpoint]) -> tuple[int, ReaderKind]:
    """How much is looked at at once, and how it is read.

    Raises:
        PlanInfeasibleError: there is too little memory for any way.
    """
    compared = len(checkpoints) > 1
    tensors_nbytes = _TENSOR_NBYTES * sum(len(one.tensors) for one in checkpoints)
    ways = []
    for block_nbytes, kind in _WAYS:
        each_nbytes = block_nbytes + AHEAD_NBYTES * (kind == "auto")
        needed_nbytes = _RUN_NBYTES + tensors_nbytes + len(checkpoints) * each_nbytes
        if compared:  # which elements of a block differ, and numbers of a part
            needed_nbytes += block_nbytes + _PARTS_NBYTES
        ways.append(((block_nbytes, kind), needed_nbytes))
    rest_nbytes = ways[-1][1] - tensors_nbytes
    largest = [("what is found of tensors", tensors_nbytes), ("blocks and numbers", rest_nbytes)]
    return first_that_fits(ways, sorted(largest, key=lambda one: -one[1]))


def shape_text(shape: Sequence[int]) -> str:
    """A shape's first dimensions, for people."""
    rest = " ..." * (len(shape) > _LISTED_DIMS)
    return " x ".join(map(str, shape[:_LISTED_DIMS])) + rest or "scalar"


def tensors_text(count: int) -> str:
    """A number of tensors, for people."""
    return f"{count} tensor{'s' * (count != 1)}"
