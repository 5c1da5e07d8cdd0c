"""What every layout offers that is dequantised on the way: values, scales, a decoder, an oracle.

A layout is a file of this package, ``dequant_*.py``, that calls `register`. A weight of a
`ScaledLayout` is values of 4 or 8 bits in the order of its elements, and for each block of them a
float32 scale. An element is the product of a value and its scale, rounded once to what is asked
for: the product is exact in float64.

The scales of a weight are read before its values, and all of them are held while these stream.

Scales that are NaN or infinite are an error that names the file and the tensor. A scale of 0 makes
zeros, as the libraries have it; values that are not 0 and become so are counted as flushed. What
overflows and what is rounded is counted as by any cast.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.cast_table import ZERO, CastCounts, OutOfRange
from streamload.codecs.decode_kernels import Kernel, Values, compile_kernel
from streamload.codecs.group import Group, Packed, read_whole
from streamload.codecs.scheme import Array, Engine
from streamload.core.dtypes import BF16, F16, F32, F64, PACKED, DType
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError, UnsupportedCastError

#: What quantised weights become.
TARGETS: tuple[DType, ...] = (BF16, F16, F32)
#: Reads a tensor of a group, all of it.
Read = Callable[[TensorInfo], bytes]

#: What a device has before the scales of a weight: see `quant.dequant_ptx`.
PLACE_NBYTES = 64
#: Most elements of a weight that a device dequantises: it numbers them in 32 bits.
MOST_NUMEL = 2**32 - 1

_ORACLE_NUMEL = 1 << 15
_EXPONENTS = ("U8", "F8_E8M0")  # scales that are exponents of two, 127 more


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """What decodes the values of one weight: how they lie, and what each is multiplied by.

    Attributes:
        values: what a value is.
        rows: of one matrix; one scale for all has one matrix.
        width: values of a row.
        tall: rows that share scales.
        wide: values of a row that share one.
        scales: float32, or bytes of exponents, one for each block of each matrix.
        zeros: float32, as many: what is subtracted from values; none where nothing is.
        table: float32 values by code, where the layout has them.
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
        """The oracle: exact products, and how many values a scale of 0 made zero.

        Args:
            codes: bytes, one a value.
            first: number of the first element.
        """
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


class Decoder(ABC):
    """Dequantises one weight to a dtype; any thread may call `decode`, several at once."""

    @abstractmethod
    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        """Dequantise elements: those that follow each other, or several lines of such.

        Args:
            data: the values from element ``first`` on, contiguous, line after line.
            out: elements of the target, written; must not overlap ``data``.
            first: number of the first element in the weight. Where values have 4 bits, an odd one
                is the second of its byte, and lines begin at even ones.
            lines: how many lines.
            pitch: elements of the weight from one line's beginning to the next one's.

        Returns:
            How many elements the target did not keep as the products are.

        Raises:
            ValueError: the lengths do not go together.
        """


class _WeightDecoder(Decoder):
    """Decodes values whose scales were read before."""

    def __init__(self, weight: Weight, dst: DType, clamp: bool, kernel: Kernel | None) -> None:
        self.weight, self._dst, self._clamp, self._kernel = weight, dst, clamp, kernel

    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        """See `Decoder.decode`."""
        numel, odd = divmod(out.nbytes, self._dst.itemsize * lines)
        bits = self.weight.values.bits
        skipped = first * bits % 8 // bits  # of the first byte
        nbytes = ((skipped + numel) * bits + 7) // 8
        if odd or data.nbytes != nbytes * lines or (lines > 1 and (skipped or pitch * bits % 8)):
            raise ValueError(
                f"{data.nbytes} bytes of values of {bits} bits from element {first} on do not "
                f"become {out.nbytes} bytes of {self._dst.name} in {lines} lines"
            )
        if out.readonly or not (out.c_contiguous and data.c_contiguous):
            raise ValueError("dequantising reads contiguous bytes and writes contiguous ones")
        if not numel:
            return ZERO
        if self._kernel is None:
            return self._by_oracle(data, out, first, lines, pitch)
        if not skipped:
            return self._by_kernel(self._kernel, data, out, first, lines, pitch)
        n = self._dst.itemsize
        counts = self._by_oracle(data[:1], out[:n], first, 1, 0)
        if numel == 1:
            return counts
        return counts + self._by_kernel(self._kernel, data[1:], out[n:], first + 1, 1, 0)

    def _by_kernel(
        self,
        kernel: Kernel,
        data: memoryview,
        out: memoryview,
        first: int,
        lines: int,
        pitch: int,
    ) -> CastCounts:
        w = self.weight
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
        arrays = (source, target, w.scales, w.zeros, w.table)
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        tally = (ctypes.c_uint64 * 3)()
        numel = out.nbytes // self._dst.itemsize // lines
        lying = (lines, data.nbytes // lines, numel, first, pitch)
        place = (*lying, w.rows, w.width, w.tall, w.wide, w.per_row, w.per_matrix)
        kernel(*addresses, (ctypes.c_uint64 * len(place))(*place), tally)
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


class Layout(ABC):
    """How weights of a kind are made of their tensors. Its file says where it is from."""

    def refused(self, group: Group) -> str:
        """Why a weight cannot be dequantised, or ""."""
        return ""

    @abstractmethod
    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """See `decoder_of`."""

    @abstractmethod
    def compile(self, group: Group, dst: DType, *, clamp: bool) -> None:
        """Compile the kernel; raises UnsupportedCastError where it cannot be."""


class ScaledLayout(Layout):
    """A layout of values and scales, which are tensors of their own; devices dequantise it, too.

    Attributes:
        always: what values are, where that is the same for all weights.
    """

    always: Values

    def values(self, group: Group) -> Values:
        """What its values are."""
        return self.always

    @abstractmethod
    def weight(self, group: Group, read: Read) -> Weight:
        """Read all but the values.

        Raises:
            CheckpointError: what is read is invalid.
        """

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """See `Layout.decoder`."""
        weight = self.weight(info.group, read)
        clamp = out_of_range == "clamp"
        kernel = None
        if engine != "numpy":
            try:
                kernel = compile_kernel(weight.values, dst, clamp=clamp)
            except UnsupportedCastError:
                if engine == "llvm":
                    raise
        return _WeightDecoder(weight, dst, clamp, kernel)

    def compile(self, group: Group, dst: DType, *, clamp: bool) -> None:
        """See `Layout.compile`."""
        compile_kernel(self.values(group), dst, clamp=clamp)


#: Modules that register layouts when they are imported. A new one is added here.
_MODULES = (
    "streamload.codecs.schemes.decode_four_bit",
    "streamload.codecs.schemes.fp8",
    "streamload.codecs.schemes.decode_gguf",
    "streamload.codecs.schemes.ggml_k",
    "streamload.codecs.schemes.decode_int8",
    "streamload.codecs.schemes.mxfp4",
)
_registered: dict[str, Layout] = {}


def register(kind: str, layout: Layout) -> None:
    """Make a layout known by the kind of its groups: its file calls this when it is imported."""
    assert kind in PACKED, kind
    assert _registered.setdefault(kind, layout) is layout, kind


def layout_of(kind: str) -> Layout | None:
    """The layout of groups of a kind; None where they stay as they are stored."""
    return _layouts().get(kind)


@cache
def _layouts() -> dict[str, Layout]:
    """Import the modules of all layouts."""
    for module in _MODULES:
        importlib.import_module(module)
    return _registered


def scales_nbytes(group: Group) -> int:
    """What the host holds while the values of a weight stream: scales as stored, and as floats."""
    others = [info for info in group.members.values() if info is not group.values]
    if not others:
        return 0
    layout = layout_of(group.kind)
    as_stored = False
    if isinstance(layout, ScaledLayout) and not layout.refused(group):
        as_stored = layout.values(group).exponents
    return sum(info.nbytes + (0 if as_stored else 4 * info.numel) for info in others)


def there_nbytes(group: Group) -> int:
    """What a device that dequantises a weight holds of it: scales as it reads them; 0 for none."""
    layout = layout_of(group.kind)
    if not isinstance(layout, ScaledLayout) or layout.refused(group):
        return 0
    others = [info for info in group.members.values() if info is not group.values]
    itemsize = 1 if layout.values(group).exponents else 4
    return round_up(PLACE_NBYTES + sum(itemsize * info.numel for info in others), 8)


def check_target(info: Packed, dst: DType) -> None:
    """Raise UnsupportedCastError where a weight cannot be dequantised to a dtype."""
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
    """What dequantises a weight; reads its scales.

    Args:
        info: the weight.
        dst: one of `TARGETS`.
        read: reads a tensor.
        engine: "llvm" compiles a kernel for this CPU, "numpy" does without, "auto" is "llvm" where
            that works. Both give the same bits, the payload of a NaN aside.
        out_of_range: as in `cast.table.make_cast`.

    Raises:
        CheckpointError: scales are invalid.
        UnsupportedCastError: it cannot be dequantised; or ``engine`` is "llvm", and there is no
            kernel for this machine.
    """
    check_target(info, dst)
    return _layout_of(info).decoder(info, dst, read, engine, out_of_range)


def weight_of(info: Packed, read: Read) -> Weight:
    """Read all but the values of a weight of a `ScaledLayout`.

    Raises:
        CheckpointError: what is read is invalid.
    """
    return _scaled_layout_of(info).weight(info.group, read)


def values_of(info: Packed) -> Values:
    """What the values of a weight of a `ScaledLayout` are."""
    return _scaled_layout_of(info).values(info.group)


def _scaled_layout_of(info: Packed) -> ScaledLayout:
    layout = _layout_of(info)
    assert isinstance(layout, ScaledLayout), info.group.kind
    return layout


def _layout_of(info: Packed) -> Layout:
    layout = layout_of(info.group.kind)
    assert layout is not None, info.group.kind
    return layout


class Decoders:
    """The decoders of weights whose values stream: each is made by the first thread that asks."""

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
    """Compile the kernel for a weight, where it has one."""
    layout = layout_of(info.group.kind)
    if layout is not None and not layout.refused(info.group) and dst in TARGETS:
        with suppress(UnsupportedCastError):
            layout.compile(info.group, dst, clamp=clamp)


# --- what layouts share ---------------------------------------------------------------------------


def floats(info: TensorInfo, data: bytes) -> Array:
    """A tensor of scales or the like as float32, which holds all of their dtypes.

    Raises:
        CheckpointError: a number is not finite.
    """
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


def by_blocks(group: Group, values: Values, scales: Array, zeros: Array | None = None) -> Weight:
    """A weight whose scales are for blocks of its last two axes.

    Raises:
        CheckpointError: there are not as many scales as blocks.
    """
    shape = group.shape
    assert shape is not None, group.name
    width = shape[-1] if shape else 1
    tall, wide = (max(length, 1) for length in group.block)
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
        info = group.members["scale"]
        raise CheckpointError(
            info.shard,
            f"there are not as many scales as blocks of {tall} x {wide} in {list(shape)}",
            expected,
            made.scales.size,
            tensor=info.name,
        )
    return made
