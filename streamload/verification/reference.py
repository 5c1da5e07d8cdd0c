"""How two tensors differ: block by block, after numpy casts, quantises or dequantises the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import cut
from streamload.codecs.cast_reference import Array, cast_array, cast_bytes
from streamload.codecs.cast_table import OutOfRange
from streamload.codecs.decode import Decoders
from streamload.codecs.group import Packed
from streamload.codecs.permute import Elements, Read
from streamload.codecs.scheme import Encoder
from streamload.core.dtypes import DType
from streamload.core.tensors import Coding, TensorInfo
from streamload.errors import CheckpointError, OutOfRangeError
from streamload.files.header import Turn
from streamload.planning.quant_policy import coded

_PART_NUMEL = 2**16  # elements looked at one by one: temporaries of a few MB
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


@dataclass(slots=True)
class Pair:
    """Two tensors of one name, compared block by block."""

    left: TensorInfo
    right: TensorInfo
    wanted: DType  # of the left one
    out_of_range: OutOfRange
    shape: tuple[int, ...]  # of what the left one becomes
    coding: Coding | None = None  # where it is quantised
    codes: Pair | None = None  # of a part beside codes, the codes
    turned: bool = False  # the transpose of the left one is quantised
    turn: Turn | None = None  # how the left one's rows lie, where the right one's lie otherwise
    _encoder: Encoder | None = None  # of codes
    _beside: Mapping[str, memoryview] = field(default_factory=dict)  # of codes, when all are there
    _at: int = 0  # elements compared so far
    _count: int = 0
    _bits_only: int = 0
    _first: tuple[int, str, str] | None = None
    _largest: float | int | None = None

    @property
    def _cast(self) -> bool:
        return self.coding is None and self.wanted is not self.left.dtype

    @property
    def lies_elsewhere(self) -> bool:
        """Whether what is compared is made of other bytes than those in their order in a file."""
        return self.turned or self.turn is not None or isinstance(self.left, Packed)

    @property
    def read_nbytes(self) -> int:
        """Bytes of the left one that are read."""
        is_beside = self.coding is not None and self.coding.part
        return 0 if is_beside or not self.same_shape else self.left.nbytes

    @property
    def beside_nbytes(self) -> int:
        """Bytes of a part beside codes that are compared."""
        return self.right.nbytes if self.codes is not None and self.compared else 0

    @property
    def _same_dtype(self) -> bool:
        return self.wanted is self.right.dtype

    @property
    def same_shape(self) -> bool:
        """Whether the elements correspond."""
        return self.shape == self.right.shape

    @property
    def compared(self) -> bool:
        """Whether the values can be compared."""
        dtypes = (self.wanted, self.right.dtype)
        if self.coding is not None:
            is_made = not self.coding.part or (self.codes is not None and self.codes.compared)
            return self.same_shape and self._same_dtype and is_made
        return self.same_shape and (
            self._same_dtype or all(d.kind == "float" and d.numpy is not None for d in dtypes)
        )

    def cut(self, block_nbytes: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Bytes of the left and of the right file that hold the same elements, block by block.

        Nothing where the values cannot be compared.
        """
        left, right = self.left.dtype, self.right.dtype
        x, y = self.left.start, self.right.start
        if self.lies_elsewhere:
            return
        if self.coding is not None:
            yield from self._cut_units(self.coding, block_nbytes)
            return
        # a multiple of 8: whole bytes of any dtype
        step = block_nbytes * 8 // max(left.bits, right.bits) // 8 * 8
        for start, stop in cut(0, self.left.numel if self.compared else 0, step):
            yield (
                (x + left.nbytes(start), x + left.nbytes(stop)),
                (y + right.nbytes(start), y + right.nbytes(stop)),
            )

    def cut_elements(self, block_nbytes: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Of what `lies_elsewhere`, blocks: the last element, exclusive; bytes of the right file.

        Nothing of any other, and where the values cannot be compared.
        """
        if not self.lies_elsewhere or not self.compared:
            return
        if self.coding is not None:
            left, n = self.left.start, self.left.dtype.itemsize
            for (_, stop), theirs in self._cut_units(self.coding, block_nbytes):
                yield (stop - left) // n, theirs
            return
        # bytes hold whole values of 4 bits then
        right = self.right.dtype
        step = block_nbytes // max(self.wanted.itemsize, right.itemsize) // 8 * 8
        for start, stop in cut(0, self.left.numel, step):
            first, last = (self.right.start + right.nbytes(n) for n in (start, stop))
            yield stop, (first, last)

    def _cut_units(
        self, coding: Coding, block_nbytes: int
    ) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The same for codes: whole units."""
        if coding.part or not self.compared:
            return
        left, right = self.left, self.right
        src, dst = coding.src_unit_nbytes, coding.dst_unit_nbytes
        units = -(-left.nbytes // src)
        for start, stop in cut(0, units, block_nbytes // src):
            yield (
                (left.start + start * src, min(left.start + stop * src, left.stop)),
                (right.start + start * dst, min(right.start + stop * dst, right.stop)),
            )
        if self._encoder is not None:
            self._beside, self._encoder = self._encoder.finish(), None

    def forget(self) -> None:
        """Let go of the parts beside codes, when all of them are compared."""
        self._beside = {}

    def compare_beside(self, start: int, theirs: memoryview) -> None:
        """Compare bytes of a part beside codes, from one on."""
        assert self.codes is not None, self.right.name
        assert self.coding is not None, self.right.name
        made = self.codes._beside[self.coding.part]
        self._compare(made[start : start + theirs.nbytes], theirs, self.wanted)

    def compare_elements(
        self, decoders: Decoders, read: Read, stop: int, theirs: memoryview, most_nbytes: int
    ) -> None:
        """Make the next elements, up to one, and compare; see `quant.elements.Elements`."""
        info, dtype = self.left, self.wanted
        if not isinstance(info, Packed):
            src, first = info.dtype, self._at if self.coding is None else self._first_element
            data = memoryview(bytearray(src.nbytes(stop - first)))
            turned = Elements(info, None, src, read, most_nbytes, self.turn)
            turned.write(first, stop, data)
            self.compare(data, theirs)
            return
        decoder = decoders.of(info, dtype, "numpy")
        made = memoryview(bytearray(dtype.nbytes(stop - self._at)))
        elements = Elements(info, decoder, dtype, read, most_nbytes, self.turn)
        found = elements.write(self._at, stop, made)
        if found.overflowed and self.out_of_range == "error":
            of = info.dtype.name
            raise OutOfRangeError(info.name, info.shard, of, dtype.name, found.overflowed)
        self._compare(made, theirs, dtype)

    @property
    def _first_element(self) -> int:
        """Of codes, the number of the first element that comes next."""
        assert self.coding is not None, self.right.name
        units = self._at * self.right.dtype.itemsize // self.coding.dst_unit_nbytes
        return units * self.coding.unit_numel

    def compare(self, mine: memoryview, theirs: memoryview) -> None:
        """Compare the next block: its bytes of the left, and of the right tensor."""
        if self.coding is None:
            self._compare(mine, theirs, self.left.dtype)
            return
        info, dtype = self.left, self.left.dtype
        if self._encoder is None:
            self._encoder = coded(self.coding, dtype).encoder(dtype, "numpy")
        made = memoryview(bytearray(theirs.nbytes))
        found = self._encoder.encode(mine, made, self._first_element)
        if found.overflowed and self.out_of_range == "error":
            name = self.coding.format
            raise OutOfRangeError(info.name, info.shard, dtype.name, name, found.overflowed)
        self._compare(made, theirs, self.wanted)

    def _compare(self, mine: memoryview, theirs: memoryview, left: DType) -> None:
        x, y = np.frombuffer(mine, np.uint8), np.frombuffer(theirs, np.uint8)
        right = self.right.dtype
        numel = len(x) * 8 // left.bits
        is_made = left is self.wanted
        if is_made and self._same_dtype and np.array_equal(x, y):
            self._at += numel
            return
        for start, stop in cut(0, numel, _PART_NUMEL):
            # copies: numpy is only fast, or right, on aligned elements
            part = x[left.nbytes(start) : left.nbytes(stop)].copy()
            other = y[right.nbytes(start) : right.nbytes(stop)].copy()
            self._compare_part(part if is_made else self._expected(part), other)
            self._at += stop - start

    def difference(self) -> TensorDifference | None:
        """What was found; None where nothing differs."""
        right, numel = self.right, math.prod(self.shape)
        values = None
        if self._first is not None:
            at, mine, theirs = self._first
            index = tuple(int(i) for i in np.unravel_index(at, self.shape)) if self.shape else ()
            values = ValueDifference(
                self._count, numel, self._bits_only, index, mine, theirs, self._largest
            )
        if values is None and self.same_shape and self._same_dtype:
            return None
        return TensorDifference(
            right.name,
            None if self._same_dtype else (self.wanted.name, right.dtype.name),
            None if self.same_shape else (self.shape, right.shape),
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


def shape_text(shape: Sequence[int]) -> str:
    """A shape's first dimensions, for people."""
    rest = " ..." * (len(shape) > _LISTED_DIMS)
    return " x ".join(map(str, shape[:_LISTED_DIMS])) + rest or "scalar"


def weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Map each tensor of a quantized weight to the weight's name, for messages.

    Returns:
        {} if a quantized weight is invalid: its tensors are then compared one by one.
    """
    try:
        return {name: f"{group.name} ({group.kind})" for name, group in checkpoint.members.items()}
    except CheckpointError:
        return {}
