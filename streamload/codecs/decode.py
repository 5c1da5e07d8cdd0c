"""Decoding: weights that are dequantized during a load, by kernel or oracle.

A weight of a `ScaledLayout` is values of 4 or 8 bits in the order of its elements, and for each
block of them a float32 scale. An element is the product of a value and its scale, rounded once to
the target: the product is exact in float64. `decode_blocks` has blocks that hold their scales.

The scales of a weight are read before its values, and all of them are held while these stream.

Scales that are NaN or infinite are an error that names the file and the tensor. A scale of 0 makes
zeros, as the libraries have it; nonzero values that become zero so are counted as flushed. Overflow
and rounding are counted as by any cast.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.cast_table import ZERO, CastCounts, OutOfRange
from streamload.codecs.decode_kernels import Values, compile_kernel
from streamload.codecs.llvm import Engine, Kernel, kernel_for
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Decoder, Layout, Read, layout_of
from streamload.codecs.weights import Packed, QuantizedWeight, read_whole
from streamload.core.dtypes import BF16, F16, F32, F64, PACKED, DType
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError, UnsupportedCastError

#: The targets of dequantizing.
TARGETS: tuple[DType, ...] = (BF16, F16, F32)

#: Bytes that a device has before the scales of a weight: see `decode_cuda`.
PLACE_NBYTES = 64
#: Most elements of a weight that a device dequantizes: it numbers them in 32 bits.
MOST_NUMEL = 2**32 - 1

_ORACLE_NUMEL = 1 << 15
_EXPONENTS = ("U8", "F8_E8M0")  # scales that are exponents of two, 127 more


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """The scales of one weight, and the blocks of values that they are for.

    Attributes:
        values: how a value is stored.
        rows: of one matrix; one scale for all has one matrix.
        width: values of a row.
        tall: rows that share scales.
        wide: values of a row that share one.
        scales: float32, or bytes of exponents, one for each block of each matrix.
        zeros: float32, as many, subtracted from values; or none.
        table: float32 values by code, if the layout has them.
    """

    values: Values
    rows: int
    width: int
    tall: int
    wide: int
    scales: Array
    zeros: Array = field(default_factory=lambda: np.zeros(0, np.float32))
    table: Array = field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def per_row(self) -> int:
        """Scales of a row."""
        return -(-self.width // self.wide)

    @property
    def per_matrix(self) -> int:
        """Scales of a matrix."""
        return -(-self.rows // self.tall) * self.per_row

    def products(self, codes: Array, first: int) -> tuple[Array, int]:
        """The oracle: exact products of codes, a byte each, and how many a scale of 0 made zero."""
        at = np.arange(first, first + codes.size)
        row, column = at // self.width, at % self.width
        matrix, row = row // self.rows, row % self.rows
        index = matrix * self.per_matrix + row // self.tall * self.per_row + column // self.wide
        with np.errstate(invalid="ignore"):
            value = self.values.decoded(codes, self.table).astype(np.float64)
            if self.zeros.size:
                value -= self.zeros[index]
            scale = self.scales[index]
            if scale.dtype == np.uint8:
                scale = np.ldexp(1.0, scale.astype(np.int64) - 127)
            lost = int(np.count_nonzero((scale == 0) & (value != 0) & ~np.isnan(value)))
            return value * scale.astype(np.float64), lost


def check_lengths(
    what: str, data: memoryview, out: memoryview, dst: DType, first: int, lines: int, fits: bool
) -> None:
    """Raise ValueError unless values fit elements, and both are contiguous."""
    if not fits:
        raise ValueError(
            f"{data.nbytes} bytes of {what} from element {first} on do not become "
            f"{out.nbytes} bytes of {dst.name} in {lines} lines"
        )
    if out.readonly or not (out.c_contiguous and data.c_contiguous):
        raise ValueError("dequantizing reads contiguous bytes and writes contiguous ones")


class _WeightDecoder(Decoder):
    """Decodes values by scales that were read before."""

    def __init__(self, weight: Weight, dst: DType, clamp: bool, kernel: Kernel | None) -> None:
        self.weight, self._dst, self._clamp, self._kernel = weight, dst, clamp, kernel

    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        numel, odd = divmod(out.nbytes, self._dst.itemsize * lines)
        bits = self.weight.values.bits
        skipped = first * bits % 8 // bits  # of the first byte
        nbytes = ((skipped + numel) * bits + 7) // 8
        is_cut = lines > 1 and (skipped or pitch * bits % 8)
        fits = not odd and data.nbytes == nbytes * lines and not is_cut
        check_lengths(f"values of {bits} bits", data, out, self._dst, first, lines, fits)
        if not numel:
            return ZERO
        if self._kernel is None:
            return self._by_oracle(data, out, first, lines, pitch)
        if not skipped:
            return self._by_kernel(data, out, first, lines, pitch)
        n = self._dst.itemsize
        counts = self._by_oracle(data[:1], out[:n], first, 1, 0)
        if numel == 1:
            return counts
        return counts + self._by_kernel(data[1:], out[n:], first + 1, 1, 0)

    def _by_kernel(
        self, data: memoryview, out: memoryview, first: int, lines: int, pitch: int
    ) -> CastCounts:
        assert self._kernel is not None
        w = self.weight
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
        arrays = (source, target, w.scales, w.zeros, w.table)
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        tally = (ctypes.c_uint64 * 3)()
        numel = out.nbytes // self._dst.itemsize // lines
        cut = (lines, data.nbytes // lines, numel, first, pitch)
        place = (*cut, w.rows, w.width, w.tall, w.wide, w.per_row, w.per_matrix)
        self._kernel(*addresses, (ctypes.c_uint64 * len(place))(*place), tally)
        overflowed, flushed, changed = tally
        return CastCounts(overflowed, flushed, changed - overflowed - flushed)

    def _by_oracle(
        self, data: memoryview, out: memoryview, first: int, lines: int, pitch: int
    ) -> CastCounts:
        w, itemsize = self.weight, self._dst.itemsize
        counts = ZERO
        n, width = data.nbytes // lines, out.nbytes // lines
        skipped = first * w.values.bits % 8 // w.values.bits
        for line in range(lines):
            codes = w.values.unpacked(np.frombuffer(data[line * n : (line + 1) * n], np.uint8))
            codes = codes[skipped:][: width // itemsize]
            for start in range(0, codes.size, _ORACLE_NUMEL):
                some = codes[start : start + _ORACLE_NUMEL]
                products, lost = w.products(some, first + line * pitch + start)
                at = line * width + start * itemsize
                to = out[at : at + some.size * itemsize]
                exact = memoryview(products.data).cast("B")
                found = cast_bytes(F64, self._dst, exact, to, clamp=self._clamp)
                counts += CastCounts(*found) + CastCounts(flushed=lost)
        return counts


class ScaledLayout(Layout):
    """A layout of values and scales, which are tensors of their own; devices dequantize it, too.

    Args:
        kind: of its weights, a key of `PACKED`.
    """

    #: roles of tensors with which it is not understood
    other_roles: tuple[str, ...] = ()

    def __init__(self, kind: str) -> None:
        self.dtype = PACKED[kind]

    def refused(self, weight: QuantizedWeight) -> str:
        """See `Layout.refused`."""
        more = [role for role in self.other_roles if role in weight.members]
        return f"it has {more[0]} beside its scales" if more else ""

    @abstractmethod
    def values(self, weight: QuantizedWeight) -> Values:
        """How its values are stored."""

    @abstractmethod
    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        """Read all but the values.

        Raises:
            CheckpointError: the tensors are invalid.
        """

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """See `decoder_of`."""
        weight = self.weight(info.group, read)
        clamp = out_of_range == "clamp"
        kernel = kernel_for(engine, lambda: compile_kernel(weight.values, dst, clamp=clamp))
        return _WeightDecoder(weight, dst, clamp, kernel)

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> None:
        """See `Layout.compile`."""
        compile_kernel(self.values(weight), dst, clamp=clamp)


def _scaled(weight: QuantizedWeight) -> ScaledLayout | None:
    """The layout of a weight, if that has scales in other tensors and can be decoded."""
    layout = layout_of(weight.kind)
    if isinstance(layout, ScaledLayout) and not layout.refused(weight):
        return layout
    return None


def scales_nbytes(weight: QuantizedWeight) -> int:
    """Host bytes held while the values of a weight stream: scales as stored, and as floats."""
    others = [info for info in weight.members.values() if info is not weight.values]
    layout = _scaled(weight) if others else None
    as_stored = layout is not None and layout.values(weight).exponents
    return sum(info.nbytes + (0 if as_stored else 4 * info.numel) for info in others)


def there_nbytes(weight: QuantizedWeight) -> int:
    """Bytes of a weight's scales on a device that dequantizes it; 0 if none does."""
    layout = _scaled(weight)
    if layout is None:
        return 0
    others = [info for info in weight.members.values() if info is not weight.values]
    itemsize = 1 if layout.values(weight).exponents else 4
    return round_up(PLACE_NBYTES + sum(itemsize * info.numel for info in others), 8)


def check_target(info: Packed, dst: DType) -> None:
    """Raise UnsupportedCastError if a weight cannot be dequantized to a dtype."""
    layout = layout_of(info.group.kind)
    reason = "it stays as it is stored" if layout is None else layout.refused(info.group)
    if not reason and dst not in TARGETS:
        reason = f"it goes to {', '.join(target.name for target in TARGETS)}"
    if reason:
        instead = f'; leave it as it is: dtype={{"{info.name}": "checkpoint", ...}}'
        raise UnsupportedCastError(
            info.dtype.name, dst.name, reason=reason + instead, tensor=info.name, path=info.shard
        )


def decoder_of(
    info: Packed, dst: DType, read: Read, *, engine: Engine, out_of_range: OutOfRange
) -> Decoder:
    """Make the decoder of a weight; reads its scales.

    Args:
        info: the weight.
        dst: one of `TARGETS`.
        read: reads a tensor.
        engine: "llvm" compiles a kernel for this CPU, "numpy" does without, "auto" is "llvm" if
            that works. Both give the same bits, the payload of a NaN aside.
        out_of_range: as in `cast_table.make_cast`.

    Raises:
        CheckpointError: scales are invalid.
        UnsupportedCastError: it cannot be dequantized; or ``engine`` is "llvm", and there is no
            kernel for this machine.
    """
    check_target(info, dst)
    layout = layout_of(info.group.kind)
    assert layout is not None, info.group.kind
    return layout.decoder(info, dst, read, engine, out_of_range)


def weight_of(info: Packed, read: Read) -> Weight:
    """Read all but the values of a weight of a `ScaledLayout`; raises CheckpointError."""
    return _layout_of(info).weight(info.group, read)


def values_of(info: Packed) -> Values:
    """How the values of a weight of a `ScaledLayout` are stored."""
    return _layout_of(info).values(info.group)


def _layout_of(info: Packed) -> ScaledLayout:
    layout = layout_of(info.group.kind)
    assert isinstance(layout, ScaledLayout), info.group.kind
    return layout


class Decoders:
    """The decoders of weights whose values stream; the first thread to ask for one makes it."""

    def __init__(self, out_of_range: OutOfRange) -> None:
        self._out_of_range = out_of_range
        self._lock = threading.Lock()
        self._reading: dict[tuple[str, DType], threading.Lock] = {}
        self._made: dict[tuple[str, DType], Decoder] = {}

    def of(self, info: Packed, dst: DType, engine: Engine = "auto") -> Decoder:
        """The decoder of a weight; see `decoder_of`."""
        key = info.name, dst
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            found = self._made.get(key)
            if found is None:

                def read(member: TensorInfo) -> bytes:
                    return next(read_whole(info.headers, [member]))

                found = decoder_of(info, dst, read, engine=engine, out_of_range=self._out_of_range)
                self._made[key] = found
            return found

    def drop(self, name: str, dst: DType) -> None:
        """Give up the scales of a weight: its values have streamed."""
        self._made.pop((name, dst), None)


def compile_decoder(info: Packed, dst: DType, *, clamp: bool) -> None:
    """Compile the kernel for a weight, if it has one."""
    layout = layout_of(info.group.kind)
    if layout is not None and not layout.refused(info.group) and dst in TARGETS:
        with suppress(UnsupportedCastError):
            layout.compile(info.group, dst, clamp=clamp)


# --- what layouts share ---------------------------------------------------------------------------


def floats(info: TensorInfo, data: bytes) -> Array:
    """A tensor of scales as float32, which holds all of their dtypes; raises CheckpointError."""
    raw = np.frombuffer(data, np.uint8)
    found: Array
    if info.dtype.code in _EXPONENTS:
        exponents = raw.astype(np.int32) - 127
        found = np.where(raw == 255, np.float32(np.nan), np.ldexp(np.float32(1), exponents))
    else:
        found = raw.view(info.dtype.numpy).astype(np.float32, copy=False)
    check_finite(info, np.isfinite(found))
    return found


def check_finite(info: TensorInfo, finite: Array) -> None:
    """Raise CheckpointError unless all numbers of a tensor are finite."""
    count = finite.size - int(np.count_nonzero(finite))
    if count:
        raise CheckpointError(
            info.shard,
            "it cannot be dequantised: a scale is NaN or infinite",
            "finite numbers",
            f"{count} of {finite.size} that are not",
            tensor=info.name,
        )


def by_blocks(
    weight: QuantizedWeight, values: Values, scales: Array, zeros: Array | None = None
) -> Weight:
    """A weight with scales for blocks of its last two axes; raises CheckpointError."""
    shape = weight.shape
    assert shape is not None, weight.name
    width = shape[-1] if shape else 1
    tall, wide = (max(length, 1) for length in weight.block)
    rows = shape[-2] if len(shape) > 1 else 1
    if scales.size == 1:  # one for all, or for the one matrix
        rows = tall = max(math.prod(shape[:-1]), 1)
        wide = max(width, 1)
    none = np.zeros(0, np.float32)
    made = Weight(
        *(values, max(rows, 1), max(width, 1), tall, wide, np.ascontiguousarray(scales).ravel()),
        zeros=none if zeros is None else np.ascontiguousarray(zeros).ravel(),
    )
    numel = math.prod(shape)
    expected = numel // (made.rows * made.width) * made.per_matrix
    if numel and made.scales.size != expected:
        info = weight.members["scale"]
        raise CheckpointError(
            info.shard,
            f"there are not as many scales as blocks of {tall} x {wide} in {list(shape)}",
            expected,
            made.scales.size,
            tensor=info.name,
        )
    return made
