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
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.encode_kernels import Recipe, Tally, compile_kernel
from streamload.codecs.llvm import Engine, Kernel, kernel_for
from streamload.codecs.parts import Array, Part, QuantCounts, check_source
from streamload.core.dtypes import BY_CODE, F32, F64, PACKED, DType
from streamload.errors import UnsupportedCastError

_ORACLE_NUMEL = 1 << 16  # elements that the oracle encodes at once, which bounds temporaries
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


class Encoder(ABC):
    """Quantizes one tensor. Any thread may call `encode`, several at once for different units.

    `statistics`: float32, one a unit, or empty; `encode` writes it, or a device does instead.
    """

    statistics: Array = _NO_STATISTICS

    @abstractmethod
    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        """Quantize whole units from element ``first`` (a multiple) on; return errors and counts.

        ``data`` is little-endian, contiguous, of any alignment, and does not overlap ``out``. The
        last unit of the tensor may be short. Raises ValueError if the lengths do not belong
        together.
        """

    @abstractmethod
    def finish(self) -> dict[str, memoryview]:
        """Return the bytes of all parts but the codes, by suffix, once all units are encoded."""


@dataclass(frozen=True)
class Quantized(ABC):
    """How one tensor is quantized: its units and the arrays stored for it; see `Scheme.of`.

    A unit is a run of elements that is quantized on its own, such as a block, a group or a row.
    """

    format: str
    shape: tuple[int, ...]
    dtype: DType

    #: whether each unit has a float32 statistic, such as its scale
    has_statistics = False

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The arrays stored for the tensor; the first holds the codes (the quantized units)."""

    @property
    @abstractmethod
    def unit_numel(self) -> int:
        """Elements of a unit; the flattened tensor may be cut at multiples of it."""

    @property
    @abstractmethod
    def unit_nbytes(self) -> int:
        """Bytes of the codes of a whole unit."""

    @abstractmethod
    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """Return an encoder of the tensor from bytes of dtype ``src``.

        Raises:
            ValueError: there is no quantizing from ``src``.
            UnsupportedCastError: ``engine`` is "llvm", and there is no kernel for this machine; or
                the machine is not little-endian.
        """

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def units(self) -> int:
        """Units of the tensor, a short one included."""
        return -(-self.numel // self.unit_numel)

    @property
    def statistics_nbytes(self) -> int:
        """Bytes of the tensor's statistics, which `Encoder` holds until `finish`."""
        return 4 * self.units if self.has_statistics else 0

    @property
    def device_parts(self) -> tuple[str, ...] | None:
        """Suffixes of the parts that CUDA kernels write besides the codes; None if they cannot.

        One part for plain statistics, two (codes and scales) for quantized statistics.
        """
        return None

    @property
    def on_cuda(self) -> tuple[Quantized, ...]:
        """CPU variants of CUDA's arithmetic: each unit of CUDA's output equals a variant's."""
        return ()

    def constants(self, offset: float = 0.0) -> dict[str, Array]:
        """Return arrays by suffix of the parts that use no statistic but their mean, ``offset``."""
        return {}

    def weighted(self, importance: Array) -> Quantized:
        """Return this tensor with a weight for each column; itself if the format takes none.

        ``importance`` is float32, a row for each matrix of the tensor.
        """
        return self

    def codes_nbytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` elements, which begin at a unit's start."""
        whole, rest = divmod(numel, self.unit_numel)
        return whole * self.unit_nbytes + -(-rest * self.unit_nbytes // self.unit_numel)


@dataclass(frozen=True)
class StoredBlocks(Quantized):
    """A tensor of blocks along the last axis, in one array of bytes as GGUF stores it."""

    def __post_init__(self) -> None:
        """Raise ValueError if rows are not whole blocks."""
        block = PACKED[self.format].block  # units may be rows
        if not self.shape or self.shape[-1] % block:
            raise ValueError(
                f"{self.format} has blocks of {block} elements along the last axis, "
                f"which does not divide shape {self.shape}"
            )

    @property
    def parts(self) -> tuple[Part, ...]:
        """One array of bytes, a row of blocks for each row."""
        *rows, last = self.shape
        return (Part("", BY_CODE["U8"], (*rows, PACKED[self.format].nbytes(last))),)

    @property
    def unit_numel(self) -> int:
        """Elements of a block."""
        return PACKED[self.format].block

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a block."""
        return PACKED[self.format].nbytes(1)

    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """Raise ValueError: there is no encoder, only files have such blocks."""
        raise ValueError(f"nothing here quantizes to {self.format}")


@dataclass(frozen=True)
class Units(Quantized):
    """A tensor whose units are quantized by kernels on the host and CUDA; see `Quantized`."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """The instructions for a unit, from which the host's kernel is compiled."""

    @property
    def device_recipe(self) -> Recipe:
        """The instructions for CUDA's kernel: `recipe`, unless the library differs on CUDA."""
        return self.recipe

    @abstractmethod
    def encoded(self, x: Array) -> Encoded:
        """Quantize finite float32 units, one a row, in numpy; a short last unit is passed alone."""

    @property
    def device_parts(self) -> tuple[str, ...] | None:
        """The suffix of the statistics' array, if units have statistics, in a tuple; else ()."""
        return (self.parts[1].suffix,) if self.has_statistics else ()

    @property
    def on_cuda(self) -> tuple[Quantized, ...]:
        """This tensor alone: CUDA's output equals the CPU's; see `Quantized.on_cuda`."""
        return (self,)

    def finished(self, statistics: Array) -> dict[str, Array]:
        """Return all parts but the codes, by suffix, from the statistics of all units."""
        own = dict.fromkeys(self.device_parts or (), statistics)
        return {**own, **self.constants()}

    def encoder(self, src: DType, engine: Engine = "auto") -> _UnitEncoder:
        """Return an encoder of the tensor from dtype ``src``; see `Quantized.encoder`."""
        check_source(self.format, self.shape, src)
        if sys.byteorder != "little":
            reason = "checkpoints are little-endian and this CPU is not"
            raise UnsupportedCastError(src.name, self.format, reason=reason)
        kernel = kernel_for(engine, lambda: compile_kernel(self.recipe, src, self.format))
        return _UnitEncoder(self, src, kernel)


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

    def __init__(self, tensor: Units, src: DType, kernel: Kernel | None) -> None:
        self._tensor, self._src, self._kernel = tensor, src, kernel
        self.statistics = np.zeros(tensor.statistics_nbytes // 4, np.float32)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        numel = checked_numel(tensor, self._src, data, out, first)
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
        at = first // unit if tensor.has_statistics else 0
        statistics = self.statistics[at:]
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
        return counts + self._by_oracle(rest, by_oracle, statistics[whole:])

    def finish(self) -> dict[str, memoryview]:
        found = self._tensor.finished(self.statistics)
        return {name: as_bytes(array) for name, array in found.items()}

    def _by_oracle(self, source: Array, out: Array, statistics: Array) -> QuantCounts:
        tensor = self._tensor

        def encoded(x: Array, first: int) -> Encoded:
            found = tensor.encoded(x)
            if tensor.has_statistics:
                statistics[first : first + len(x)] = found.statistics
            return found

        return encode_units(tensor, self._src, source, out, encoded)


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
    step = max(_ORACLE_NUMEL // unit, 1) * unit
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


def encoder_for(tensor: Quantized, src: DType, engine: Engine = "auto") -> Encoder:
    """Return an encoder of a tensor from dtype ``src``; float64 is rounded to float32 first."""
    return _Rounded(tensor, engine) if src is F64 else tensor.encoder(src, engine)


class _Rounded(Encoder):
    """Rounds float64 elements to the nearest float32, and encodes these."""

    def __init__(self, tensor: Quantized, engine: Engine) -> None:
        self._tensor, self._encoder = tensor, tensor.encoder(F32, engine)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        unit = self._tensor.unit_numel
        x, at, counts = np.frombuffer(data, F64.numpy), 0, QuantCounts()
        for some in np.split(x, range(step := max(_ORACLE_NUMEL // unit, 1) * unit, x.size, step)):
            with np.errstate(over="ignore"):
                rounded = as_bytes(some.astype(np.float32))
            end = at + self._tensor.codes_nbytes(some.size)
            counts += self._encoder.encode(rounded, out[at:end], first)
            first, at = first + some.size, end
        return counts

    def finish(self) -> dict[str, memoryview]:
        return self._encoder.finish()


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
