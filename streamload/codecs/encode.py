"""Encoding: a tensor's units, checked, and shared out between kernel and oracle.

The flattened tensor is cut at multiples of a scheme's unit (a block of 64 or 32 elements, a row),
so that any cut gives the bytes of the whole.

NaN and infinity, in every scheme: NaN counts as 0, and an infinity as the largest finite magnitude
of its unit, with its sign. The rest of the unit is as exact as without them. Both are counted, and
errors are those of the values they count as.
"""

from __future__ import annotations

import ctypes
import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.encode_kernels import Recipe, Tally, compile_kernel
from streamload.codecs.llvm import Engine, Kernel, kernel_for
from streamload.codecs.parts import SOURCES, Array, Part, QuantCounts
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

_ORACLE_NUMEL = 1 << 16  # elements that the oracle takes at once: its temporaries stay small
_NO_STATISTICS: Array = np.empty(0, np.float32)


class Encoded(NamedTuple):
    """Units from an oracle.

    Attributes:
        codes: bytes, one row a unit.
        decoded: float32 elements, as the codes decode before any nesting of statistics.
        statistics: float32, one a unit, or none.
        overflowed: how many elements float16 did not reach.
    """

    codes: Array
    decoded: Array
    statistics: Array = _NO_STATISTICS
    overflowed: int = 0


class Encoder(ABC):
    """Quantizes one tensor. Any thread may call `encode`, several at once for different units.

    Attributes:
        statistics: float32, one a unit, or none; written by `encode`, or by a device instead.
    """

    statistics: Array = _NO_STATISTICS

    @abstractmethod
    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        """Quantize whole units.

        Args:
            data: little-endian elements of the source from element ``first`` on, contiguous, any
                alignment. The last unit of the tensor may be short.
            out: their codes, written; must not overlap ``data``.
            first: a multiple of the unit.

        Raises:
            ValueError: the elements are not whole units, or ``out`` is not as long as their codes.
        """

    @abstractmethod
    def finish(self) -> dict[str, memoryview]:
        """The bytes of the parts other than the codes, by suffix, once all units are encoded."""


@dataclass(frozen=True)
class Quantized(ABC):
    """A quantized tensor; `Scheme.of` returns it.

    Attributes:
        format: the scheme's name.
        shape: of the tensor.
        dtype: of the tensor, which the parts may name.
    """

    format: str
    shape: tuple[int, ...]
    dtype: DType

    #: whether a unit has a float32 statistic
    has_statistics = False

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Its arrays; the first are the codes."""

    @property
    @abstractmethod
    def unit_numel(self) -> int:
        """Elements of a unit: the flattened tensor is cut at multiples of so many."""

    @property
    @abstractmethod
    def unit_nbytes(self) -> int:
        """Bytes of the codes of a whole unit."""

    @abstractmethod
    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """Make an encoder for one tensor, from bytes of dtype ``src``.

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
        """Bytes of the statistics that are held until `Encoder.finish`."""
        return 4 * self.units if self.has_statistics else 0

    @property
    def device_parts(self) -> tuple[str, ...] | None:
        """The parts that a device's kernels write besides the codes; None if they cannot.

        One if statistics stay as they are, their codes and scales if they are nested.
        """
        return None

    @property
    def on_cuda(self) -> tuple[Quantized, ...]:
        """CPU variants; each unit of the CUDA output equals one of them."""
        return ()

    def constants(self, offset: float = 0.0) -> dict[str, Array]:
        """The parts that depend on no statistic but the mean, ``offset``, of nested ones."""
        return {}

    def codes_nbytes(self, numel: int) -> int:
        """Bytes of the codes of some elements from a unit's first on."""
        whole, rest = divmod(numel, self.unit_numel)
        return whole * self.unit_nbytes + -(-rest * self.unit_nbytes // self.unit_numel)


@dataclass(frozen=True)
class Units(Quantized):
    """A tensor whose units kernels quantize, on the host and on CUDA."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """The kernels' instructions for a unit."""

    @property
    def device_recipe(self) -> Recipe:
        """Those of CUDA's kernels, if a library computes differently there."""
        return self.recipe

    @abstractmethod
    def encoded(self, x: Array) -> Encoded:
        """Quantize finite float32 units, one a row, in numpy; a short last one comes alone."""

    @property
    def device_parts(self) -> tuple[str, ...] | None:
        """See `Quantized.device_parts`."""
        return None if self.has_statistics else ()

    @property
    def on_cuda(self) -> tuple[Quantized, ...]:
        """See `Quantized.on_cuda`."""
        return (self,)

    def finished(self, statistics: Array) -> dict[str, Array]:
        """The parts other than the codes, by suffix."""
        own = dict.fromkeys(self.device_parts or (), statistics)
        return {**own, **self.constants()}

    def encoder(self, src: DType, engine: Engine = "auto") -> _UnitEncoder:
        """See `Quantized.encoder`."""
        if src not in SOURCES:
            raise ValueError(
                f"{self.format} is made from {', '.join(d.name for d in SOURCES)}, not {src.name}"
            )
        if sys.byteorder != "little":
            reason = "checkpoints are little-endian and this CPU is not"
            raise UnsupportedCastError(src.name, self.format, reason=reason)
        kernel = kernel_for(engine, lambda: compile_kernel(self.recipe, src, self.format))
        return _UnitEncoder(self, src, kernel)


def checked_numel(
    tensor: Quantized, src: DType, data: memoryview, out: memoryview, first: int
) -> int:
    """Count the elements given to `Encoder.encode`, and check them; raises ValueError."""
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
    """A kernel for whole units, the oracle for a short one and without a kernel."""

    def __init__(self, tensor: Units, src: DType, kernel: Kernel | None) -> None:
        self._tensor, self._src, self._kernel = tensor, src, kernel
        self.statistics = np.zeros(tensor.statistics_nbytes // 4, np.float32)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        numel = checked_numel(tensor, self._src, data, out, first)
        source, target = np.frombuffer(data, np.uint8), np.frombuffer(out, np.uint8)
        at = first // unit if tensor.has_statistics else 0
        statistics = self.statistics[at:]
        whole = numel // unit if self._kernel is not None else 0
        counts = QuantCounts()
        if whole:
            counts = self._by_kernel(source, target, statistics, whole)
        done = whole * unit
        by_oracle = target[whole * tensor.unit_nbytes :]
        rest = source[done * self._src.itemsize :]
        return counts + self._by_oracle(rest, by_oracle, statistics[whole:], numel - done)

    def finish(self) -> dict[str, memoryview]:
        found = self._tensor.finished(self.statistics)
        return {name: as_bytes(array) for name, array in found.items()}

    def _by_kernel(self, source: Array, out: Array, statistics: Array, units: int) -> QuantCounts:
        assert self._kernel is not None
        unit = self._tensor.unit_numel
        tally = Tally()
        at, to, stats = (a.__array_interface__["data"][0] for a in (source, out, statistics))
        self._kernel(at, to, stats, units, unit, ctypes.addressof(tally))
        return tally.counts(units * unit)

    def _by_oracle(self, source: Array, out: Array, statistics: Array, numel: int) -> QuantCounts:
        tensor, unit = self._tensor, self._tensor.unit_numel
        itemsize = self._src.itemsize
        step = max(_ORACLE_NUMEL // unit, 1) * unit
        counts = QuantCounts()
        whole = numel - numel % unit
        # whole units at once, and a short one alone
        for begin, end in pairwise(sorted({*range(0, whole, step), whole, numel})):
            # copy: numpy and ml_dtypes are only right, or fast, on aligned elements
            raw = source[begin * itemsize : end * itemsize].copy()
            x = raw.view(self._src.numpy).astype(np.float32)
            clean, nan, inf = cleaned(x.reshape(-1, min(unit, end - begin)))
            found = tensor.encoded(clean)
            at = begin // unit
            codes = found.codes.reshape(-1).view(np.uint8)
            out[at * tensor.unit_nbytes :][: codes.size] = codes
            if tensor.has_statistics:
                statistics[at : at + clean.shape[0]] = found.statistics
            counts += _counted(clean, found, nan, inf)
        return counts


def as_bytes(array: Any) -> memoryview:
    """The bytes of an array."""
    return memoryview(array.reshape(-1).view(np.uint8))


def cleaned(x: Array) -> tuple[Array, int, int]:
    """Float32 units, one a row, without NaN and infinity, and how many there were."""
    finite = np.isfinite(x)
    if finite.all():
        return x, 0, 0
    nan, inf = np.isnan(x), np.isinf(x)
    most = np.where(finite, np.abs(x), 0).max(axis=1, keepdims=True)
    x = np.where(inf, np.copysign(most, x), np.where(nan, np.float32(0), x))
    return x, int(np.count_nonzero(nan)), int(np.count_nonzero(inf))


def _counted(x: Array, found: Encoded, nan: int, inf: int) -> QuantCounts:
    with np.errstate(all="ignore"):
        errors = np.abs(x - found.decoded.reshape(x.shape))
        errors[np.isnan(errors)] = np.inf
        wide = errors.astype(np.float64)
        squares = x.astype(np.float64)
        return QuantCounts(
            largest_error=float(errors.max()),
            squared_error=float((wide * wide).sum()),
            squared=float((squares * squares).sum()),
            largest=float(np.abs(x).max()),
            numel=x.size,
            nan=nan,
            inf=inf,
            overflowed=found.overflowed,
        )
