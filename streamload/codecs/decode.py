"""Decoders of quantized weights: kernels, and the numpy oracle that replaces them without LLVM.

A weight of a `ScaledLayout` has values of 4 or 8 bits in the order of its elements, and a float32
scale for each block of values. An element is a value times its scale, exact in float64, and rounded
once to the target. `decode_blocks` decodes layouts whose blocks hold their own scales.

All scales of a weight are read before its values, and held while these stream.

Scales that are NaN or infinite are an error that names the file and the tensor. A scale of 0 makes
zeros, as the libraries have it; nonzero values that become zero so are counted as flushed. Overflow
and rounding are counted as by any cast.
"""

from __future__ import annotations

import ctypes
import math
import threading
from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.cast_table import ZERO, CastCounts, OutOfRange
from streamload.codecs.decode_kernels import Values, compile_kernel
from streamload.codecs.llvm import Engine, Kernel, kernel_for
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Codec, Decoder, Quantized, Read, codec_of
from streamload.codecs.weights import Packed, QuantizedWeight
from streamload.core.dtypes import BF16, F16, F32, F64, DType
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError, UnsupportedCastError

#: The dtypes that weights are dequantized to.
TARGETS: tuple[DType, ...] = (BF16, F16, F32)

#: Bytes of the header before the scales of a weight on a device: see `decode_cuda`.
PLACE_NBYTES = 64
#: Most elements of a weight that a device dequantizes: its kernel counts in 32 bits.
MOST_NUMEL = 2**32 - 1

_ORACLE_NUMEL = 1 << 15
_EXPONENTS = ("U8", "F8_E8M0")  # scales 2^(byte - 127)
_NONE: Array = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """All of a quantized weight but its values: scales, zero points, and the blocks they apply to.

    Attributes:
        rows: rows of a matrix; a weight with one scale counts as one matrix.
        width: values of a row.
        tall: rows of a block, whose values share one scale.
        wide: columns of a block.
        scales: one for each block of each matrix: float32, or bytes b for 2^(b - 127).
        zeros: float32, one for each scale, subtracted from values; or empty.
        table: float32 values by code (the number stored for a value); or empty.
    """

    values: Values
    rows: int
    width: int
    tall: int
    wide: int
    scales: Array
    zeros: Array = field(default_factory=lambda: _NONE)
    table: Array = field(default_factory=lambda: _NONE)

    @property
    def per_row(self) -> int:
        """Blocks, and so scales, across a row."""
        return -(-self.width // self.wide)

    @property
    def per_matrix(self) -> int:
        """Blocks, and so scales, of a matrix."""
        return -(-self.rows // self.tall) * self.per_row

    def products(self, codes: Array, first: int) -> tuple[Array, int]:
        """Return the exact float64 elements of stored values, and how many a scale of 0 made zero.

        ``codes`` has one value in a byte, from index ``first`` of the weight on.
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


def check_lengths(
    what: str, data: memoryview, out: memoryview, dst: DType, first: int, lines: int, fits: bool
) -> None:
    """Raise ValueError unless ``fits`` is set, and both buffers are contiguous."""
    if not fits:
        raise ValueError(
            f"{data.nbytes} bytes of {what} from element {first} on do not become "
            f"{out.nbytes} bytes of {dst.name} in {lines} lines"
        )
    if out.readonly or not (out.c_contiguous and data.c_contiguous):
        raise ValueError("dequantizing reads contiguous bytes and writes contiguous ones")


class _WeightDecoder(Decoder):
    """Decodes a weight of a `ScaledLayout`, whose scales have been read."""

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
        return CastCounts.of(*tally)

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


class ScaledLayout(Codec):
    """A layout with values and scales in separate tensors; CUDA devices dequantize it, too."""

    #: roles (see `QuantizedWeight.members`) of tensors with which a weight is refused
    other_roles: tuple[str, ...] = ()

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Raise ValueError: this library's weights are only read; see `Codec.of`."""
        raise ValueError(f"nothing here quantizes to {self.name}")

    def refused(self, weight: QuantizedWeight) -> str:
        """Return why a weight is refused (it has a tensor that no decoder reads), or ""."""
        more = [role for role in self.other_roles if role in weight.members]
        return f"it has {more[0]} beside its scales" if more else ""

    @abstractmethod
    def values(self, weight: QuantizedWeight) -> Values:
        """Return how the values of a weight are stored."""

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        """Read a weight's scales, zero points and table; raise CheckpointError if invalid."""
        scale = weight.members["scale"]
        return by_blocks(weight, self.values(weight), floats(scale, read(scale)))

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """Read a weight's scales, and return its decoder; see `decoder_of`."""
        weight = self.weight(info.group, read)
        clamp = out_of_range == "clamp"
        kernel = kernel_for(engine, lambda: compile_kernel(weight.values, dst, clamp=clamp))
        return _WeightDecoder(weight, dst, clamp, kernel)

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> Kernel:
        """Compile the kernel that dequantizes a weight to ``dst``; see `Codec.compile`."""
        return compile_kernel(self.values(weight), dst, clamp=clamp)


def _scaled(weight: QuantizedWeight) -> ScaledLayout | None:
    """Return the layout of a weight that can be decoded and has separate scales, else None."""
    layout = codec_of(weight.kind)
    return layout if isinstance(layout, ScaledLayout) and not layout.refused(weight) else None


def scales_nbytes(weight: QuantizedWeight) -> int:
    """Return host bytes held while a weight's values stream: its scales as stored and as floats."""
    _, *others = weight.members.values()
    layout = _scaled(weight) if others else None
    as_stored = layout is not None and layout.values(weight).exponents
    return sum(info.nbytes + (0 if as_stored else 4 * info.numel) for info in others)


def there_nbytes(weight: QuantizedWeight) -> int:
    """Return device bytes of a weight's scales if the device dequantizes it; 0 if none can."""
    layout = _scaled(weight)
    if layout is None:
        return 0
    _, *others = weight.members.values()
    itemsize = 1 if layout.values(weight).exponents else 4
    return round_up(PLACE_NBYTES + sum(itemsize * info.numel for info in others), 8)


def check_target(info: Packed, dst: DType) -> Codec:
    """Return a weight's layout; raise UnsupportedCastError if it does not decode to ``dst``."""
    layout = codec_of(info.group.kind)
    reason = "it stays as it is stored" if layout is None else layout.refused(info.group)
    if not reason and dst not in TARGETS:
        reason = f"it goes to {', '.join(target.name for target in TARGETS)}"
    if reason or layout is None:
        instead = f'; leave it as it is: dtype={{"{info.name}": "checkpoint", ...}}'
        if dst is info.dtype:
            instead = ' in this model: write dtype="float16"'
        raise UnsupportedCastError(
            info.dtype.name, dst.name, reason=reason + instead, tensor=info.name, path=info.shard
        )
    return layout


def decoder_of(
    info: Packed, dst: DType, read: Read, *, engine: Engine, out_of_range: OutOfRange
) -> Decoder:
    """Read the scales of a weight, and return its decoder; ``dst`` is one of `TARGETS`.

    ``engine`` and ``out_of_range`` are as in `cast_table.make_cast`; "auto" is "llvm" if that
    works.
    """
    return check_target(info, dst).decoder(info, dst, read, engine, out_of_range)


def layout_of(info: Packed) -> ScaledLayout:
    """Return the layout of a weight with scales in separate tensors."""
    layout = codec_of(info.group.kind)
    assert isinstance(layout, ScaledLayout), info.group.kind
    return layout


class Decoders:
    """The decoders of the weights of a load, each made by the first thread that needs it."""

    def __init__(self, out_of_range: OutOfRange) -> None:
        self._out_of_range = out_of_range
        self._lock = threading.Lock()
        self._reading: dict[tuple[str, DType], threading.Lock] = {}
        self._made: dict[tuple[str, DType], Decoder] = {}

    def of(self, info: Packed, dst: DType, engine: Engine = "auto") -> Decoder:
        """Return the decoder of a weight; the first call reads its scales: see `decoder_of`."""
        key = info.name, dst
        with self._lock:
            reading = self._reading.setdefault(key, threading.Lock())
        with reading:
            found = self._made.get(key)
            if found is None:
                found = self._made[key] = decoder_of(
                    info, dst, info.read, engine=engine, out_of_range=self._out_of_range
                )
            return found

    def drop(self, name: str, dst: DType) -> None:
        """Free the scales of the weight ``name``, whose values have all streamed."""
        self._made.pop((name, dst), None)


# --- for layouts ----------------------------------------------------------------------------------


def floats(info: TensorInfo, data: bytes) -> Array:
    """Return a tensor of scales, stored as ``data``, as float32."""
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
    """Raise CheckpointError unless ``finite``, a mask of the scales of ``info``, is all true."""
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
    weight: QuantizedWeight, values: Values, scales: Array, zeros: Array = _NONE
) -> Weight:
    """Return the `Weight` of a weight whose blocks span its last two axes."""
    shape = weight.shape
    assert shape is not None, weight.name
    width = shape[-1] if shape else 1
    tall, wide = (max(length, 1) for length in weight.block)
    rows = shape[-2] if len(shape) > 1 else 1
    if scales.size == 1:  # one for all, or for the one matrix
        rows = tall = max(math.prod(shape[:-1]), 1)
        wide = max(width, 1)
    flat = (np.ascontiguousarray(each).ravel() for each in (scales, zeros))
    made = Weight(values, max(rows, 1), max(width, 1), tall, wide, *flat)
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
