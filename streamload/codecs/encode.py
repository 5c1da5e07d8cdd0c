"""Encoders, which quantize a tensor by units, with a kernel or the numpy oracle.

A unit is a run of elements that a scheme quantizes together: a block, or a row. The flattened
tensor may be cut at any multiple of a unit without a change of the output bytes.

In every scheme NaN is quantized as 0, and an infinity as the largest finite magnitude of its unit,
with its sign; other elements of the unit lose nothing. Both are counted, and errors are measured
from these replacements.
"""

from __future__ import annotations

import ctypes
import math
import sys
from abc import abstractmethod
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.encode_kernels import Recipe, Tally, compile_kernel
from streamload.codecs.llvm import Engine, Kernel, kernel_for
from streamload.codecs.parts import Array, QuantCounts, check_source
from streamload.codecs.scheme import AT_ONCE, Codec, Encoder, Quantized
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

_NO_STATISTICS: Array = np.empty(0, np.float32)


class Encoded(NamedTuple):
    """The result of quantizing units (see `Quantized`) in numpy.

    Attributes:
        codes: the quantized units as bytes, one unit a row.
        decoded: the float32 elements that the codes decode to.
        statistics: float32, one a unit (a scale or largest magnitude), or empty.
        overflowed: how many elements float16 could not hold.
    """

    codes: Array
    decoded: Array
    statistics: Array = _NO_STATISTICS
    overflowed: int = 0


class Units(Codec):
    """A codec whose units are quantized by kernels on the host and CUDA; see `Quantized`.

    Attributes:
        recipe: the instructions for a unit, from which the host's kernel is compiled.
        device_recipe: those for CUDA's kernel, if the library differs there.
    """

    recipe: Recipe
    device_recipe: Recipe | None = None

    device_parts: tuple[str, ...] | None = ()

    @abstractmethod
    def encoded(self, x: Array) -> Encoded:
        """Quantize finite float32 units, one a row, in numpy; a short last unit is passed alone."""

    @property
    def on_cuda(self) -> tuple[Codec, ...]:
        """This codec alone: CUDA's output equals the CPU's; see `Codec.on_cuda`."""
        return (self,)

    def finished(self, tensor: Quantized, statistics: Array) -> dict[str, Array]:
        """Return all parts but the codes, by suffix, from the statistics of all units."""
        return dict.fromkeys(self.device_parts or (), statistics) | self.constants(tensor)

    def encoder(self, tensor: Quantized, src: DType, engine: Engine) -> Encoder:
        """Return an encoder of a tensor from dtype ``src``; see `Codec.encoder`."""
        check_source(self.name, tensor.shape, src)
        if sys.byteorder != "little":
            reason = "checkpoints are little-endian and this CPU is not"
            raise UnsupportedCastError(src.name, self.name, reason=reason)
        kernel = kernel_for(engine, lambda: compile_kernel(self.recipe, src, self.name))
        return _UnitEncoder(self, tensor, src, kernel)


def checked_numel(
    tensor: Quantized, src: DType, data: memoryview, out: memoryview, first: int
) -> int:
    """Return the number of elements in ``data``; raise ValueError as `Encoder.encode` documents."""
    unit, total = tensor.unit_numel, tensor.numel
    numel, odd = divmod(data.nbytes, src.itemsize)
    is_last = first + numel == total
    if odd or first % unit or first + numel > total or (numel % unit and not is_last):
        raise ValueError(
            f"{tensor.format}: {data.nbytes} bytes of {src.name} from element {first} on are not "
            f"whole units of {unit} of {total} elements"
        )
    if out.nbytes != tensor.codes_nbytes(numel):
        raise ValueError(
            f"{tensor.format}: the codes of {numel} elements take {tensor.codes_nbytes(numel)} "
            f"bytes, not {out.nbytes}"
        )
    if out.readonly or not (out.c_contiguous and data.c_contiguous):
        raise ValueError("quantizing reads contiguous bytes and writes contiguous, writable ones")
    return numel


class _UnitEncoder(Encoder):
    """Encodes `Units`: whole units by a kernel, if it can be compiled, and the rest by numpy."""

    def __init__(self, codec: Units, tensor: Quantized, src: DType, kernel: Kernel | None) -> None:
        self._codec, self._tensor, self._src, self._kernel = codec, tensor, src, kernel
        self.statistics = np.zeros(tensor.statistics_nbytes // 4, np.float32)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        numel = checked_numel(tensor, self._src, data, out, first)
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
        statistics = self.statistics[first // unit :]
        whole, counts = 0, QuantCounts()
        if self._kernel is not None and numel >= unit:
            whole = numel // unit
            tally = Tally()
            places = (a.__array_interface__["data"][0] for a in (source, target, statistics))
            self._kernel(*places, whole, unit, ctypes.addressof(tally))
            counts = tally.counts(whole * unit)
        done = whole * unit
        by_oracle = target[whole * tensor.unit_nbytes :]
        rest = source[done * self._src.itemsize :]

        def encoded(x: Array, at: int) -> Encoded:
            found = self._codec.encoded(x)
            if statistics.size:
                statistics[whole + at : whole + at + len(x)] = found.statistics
            return found

        return counts + encode_units(tensor, self._src, rest, by_oracle, encoded)

    def finish(self) -> dict[str, memoryview]:
        found = self._codec.finished(self._tensor, self.statistics)
        return {name: as_bytes(array) for name, array in found.items()}


def encode_units(
    tensor: Quantized,
    src: DType,
    source: Array,
    out: Array,
    encoded: Callable[[Array, int], Encoded],
) -> QuantCounts:
    """Quantize the elements of ``source`` in numpy to codes in ``out``, some units at a time.

    ``encoded`` returns what finite float32 units become, one a row, given the index of the first.
    """
    unit, itemsize = tensor.unit_numel, src.itemsize
    numel = source.size // itemsize
    step = max(AT_ONCE // unit, 1) * unit
    counts = QuantCounts()
    whole = numel - numel % unit
    # whole units at once, and a short one alone
    for begin, end in pairwise(sorted({*range(0, whole, step), whole, numel})):
        # copy: numpy and ml_dtypes are only right, or fast, on aligned elements
        raw = source[begin * itemsize : end * itemsize].copy()
        x = raw.view(src.numpy).astype(np.float32)
        clean, nan, inf = cleaned(x.reshape(-1, min(unit, end - begin)))
        with np.errstate(all="ignore"):
            found = encoded(clean, begin // unit)
        codes = found.codes.reshape(-1).view(np.uint8)
        out[begin // unit * tensor.unit_nbytes :][: codes.size] = codes
        counts += _counted(clean, found, nan, inf)
    return counts


def as_bytes(array: Any) -> memoryview:
    """Return the bytes of an array, without a copy."""
    return memoryview(array.reshape(-1).view(np.uint8))


def cleaned(x: Array) -> tuple[Array, int, int]:
    """Set NaN to 0, inf to its row's largest finite magnitude; return rows, counts of NaN, inf."""
    finite = np.isfinite(x)
    if finite.all():
        return x, 0, 0
    nan, inf = np.isnan(x), np.isinf(x)
    most = np.where(finite, np.abs(x), 0).max(axis=1, keepdims=True)
    x = np.where(inf, np.copysign(most, x), np.where(nan, np.float32(0), x))
    return x, int(np.count_nonzero(nan)), int(np.count_nonzero(inf))


def _counted(x: Array, found: Encoded, nan: int, inf: int) -> QuantCounts:
    with np.errstate(all="ignore"):
        errors = x - found.decoded.reshape(x.shape)
        largest, squared_error = _measured(errors)
    if math.isnan(largest):
        largest = squared_error = math.inf
    most, squared = _measured(x)
    return QuantCounts(
        *(largest, squared_error, squared, most),
        *(x.size, nan, inf, found.overflowed),
    )


def _measured(x: Array) -> tuple[float, float]:
    """Return the largest magnitude of float32 elements, and the float64 sum of their squares."""
    wide = x.reshape(-1).astype(np.float64)
    return float(max(x.max(), -x.min())), float(np.einsum("i,i->", wide, wide))
