"""What every quantisation offers: parts of a tensor, units, an encoder, an oracle, a bound.

A format is a file of this package that calls `register`. The flattened tensor is cut at multiples
of a format's unit (a block of 64 or 32 elements, a row), so that any cut gives the bytes of the
whole.

NaN and infinity, in every format: NaN counts as 0, and an infinity as the largest finite magnitude
of its unit (of its block, or row), with its sign. The rest of the unit is as exact as without them.
Both are counted, and errors are those of the values they count as.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from streamload.core.dtypes import BF16, F16, F32, DType

Array = np.ndarray[Any, np.dtype[Any]]
#: "llvm" compiles a kernel for this CPU, "numpy" is the oracle, "auto" is the first that works.
Engine = Literal["auto", "llvm", "numpy"]
#: The device whose arithmetic a format follows, where its library computes differently on each.
Arithmetic = Literal["cpu", "cuda"]
#: What can be quantised; float64 has to be cast first.
SOURCES: tuple[DType, ...] = (F32, BF16, F16)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a quantised tensor.

    Attributes:
        suffix: the end of the array's name, after the tensor's: "" for the codes, ".absmax".
        dtype: the dtype of its elements.
        shape: its shape.
        beside: whether the suffix replaces the last part of the tensor's name instead, as in
            ``layer.weight`` and ``layer.SCB``.
    """

    suffix: str
    dtype: DType
    shape: tuple[int, ...]
    beside: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.nbytes(math.prod(self.shape))

    def name(self, tensor: str) -> str:
        """The array's name in a checkpoint, for the name of the tensor."""
        if not self.beside:
            return tensor + self.suffix
        owner, dot, _ = tensor.rpartition(".")
        return owner + dot + self.suffix


@dataclass(frozen=True, slots=True)
class QuantCounts:
    """What quantising did to elements. ``+`` joins the counts of two sets of elements.

    Attributes:
        largest_error: the largest difference between an element and what its codes decode to;
            infinite where they decode to infinity or NaN.
        squared_error: sum of the squares of those differences.
        squared: sum of the squares of the elements.
        largest: the largest magnitude of an element.
        numel: elements.
        nan: elements that are NaN, and count as 0.
        inf: elements that are infinite, and count as the largest finite one of their unit.
        overflowed: elements that float16 does not reach where the format goes through it, or all
            elements of a block whose scale is beyond it.
    """

    largest_error: float = 0.0
    squared_error: float = 0.0
    squared: float = 0.0
    largest: float = 0.0
    numel: int = 0
    nan: int = 0
    inf: int = 0
    overflowed: int = 0

    def __add__(self, other: QuantCounts) -> QuantCounts:
        """The counts of two sets of elements together."""
        return QuantCounts(
            max(self.largest_error, other.largest_error),
            self.squared_error + other.squared_error,
            self.squared + other.squared,
            max(self.largest, other.largest),
            self.numel + other.numel,
            self.nan + other.nan,
            self.inf + other.inf,
            self.overflowed + other.overflowed,
        )

    @classmethod
    def of(cls, values: object) -> QuantCounts:
        """Read counts from the list that `dataclasses.astuple` and JSON make of them.

        Raises:
            ValueError: the value is no such list.
        """
        if (
            not isinstance(values, list | tuple)
            or len(values) != len(fields(cls))
            or not all(type(value) in (int, float) and value >= 0 for value in values)
            or not all(type(value) is int for value in values[4:])
        ):
            raise ValueError(f"not what quantising did: {values!r}")
        return cls(*values)

    def rounded(self) -> QuantCounts:
        """Round to six digits: the last digits of a sum depend on where the tensor was cut."""
        return replace(
            self,
            largest_error=float(f"{self.largest_error:.6g}"),
            squared_error=float(f"{self.squared_error:.6g}"),
            squared=float(f"{self.squared:.6g}"),
            largest=float(f"{self.largest:.6g}"),
        )

    @property
    def rms(self) -> float:
        """Root mean square of the errors."""
        return math.sqrt(self.squared_error / self.numel) if self.numel else 0.0

    @property
    def relative(self) -> float:
        """Root mean square of the errors, divided by that of the elements."""
        if self.squared_error == 0:
            return 0.0
        if self.squared == 0 or math.isinf(self.squared_error):
            return math.inf
        return math.sqrt(self.squared_error / self.squared)


class Encoder(Protocol):
    """Quantises one tensor. Any thread may call `encode`, several at once for different units."""

    @property
    def statistics(self) -> Array:
        """Float32 statistics, one a unit, or none; written by `encode`, or by a device instead."""

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        """Quantise whole units.

        Args:
            data: little-endian elements of the source from element ``first`` on, contiguous, any
                alignment. The last unit of the tensor may be short.
            out: their codes, written; must not overlap ``data``.
            first: a multiple of the unit.

        Raises:
            ValueError: the elements are not whole units, or ``out`` is not as long as their codes.
        """

    def finish(self) -> dict[str, memoryview]:
        """The bytes of the parts beside the codes, by suffix, when all units are encoded."""


class Quantised(Protocol):
    """What one tensor becomes; made by `Format.of`.

    Attributes:
        shape: of the tensor.
        dtype: its dtype, which the parts may name.
        parts: of what it becomes; ``parts[0]`` are the codes.
        unit_numel: the flattened tensor is cut at multiples of so many elements.
        unit_nbytes: bytes of the codes of a whole unit.
        units: how many there are, a short one included.
        statistics_nbytes: bytes of float32 statistics that are held until `Encoder.finish`.
        device_parts: the parts that kernels of a device write beside the codes: one where
            statistics stay as they are, their codes and scales where they are nested; None where
            the statistics become something else.
        on_cuda: what makes the codes that those kernels make: of each unit, one of these does.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> DType: ...  # noqa: D102
    @property
    def parts(self) -> tuple[Part, ...]: ...  # noqa: D102
    @property
    def unit_numel(self) -> int: ...  # noqa: D102
    @property
    def unit_nbytes(self) -> int: ...  # noqa: D102
    @property
    def units(self) -> int: ...  # noqa: D102
    @property
    def statistics_nbytes(self) -> int: ...  # noqa: D102
    @property
    def device_parts(self) -> tuple[str, ...] | None: ...  # noqa: D102
    @property
    def on_cuda(self) -> tuple[Quantised, ...]: ...  # noqa: D102

    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """An encoder for one tensor, from bytes of dtype ``src``.

        Raises:
            ValueError: there is no quantising from ``src``.
            UnsupportedCastError: ``engine`` is "llvm", and there is no kernel for this machine; or
                the machine is not little-endian.
        """

    def constants(self, offset: float = 0.0) -> dict[str, Array]:
        """Make the parts that depend on no statistic but the mean, by suffix.

        Args:
            offset: the mean of the statistics, where these are nested.
        """

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """The elements again, in numpy: the oracle of tests and of verifying.

        Args:
            parts: by suffix, arrays or bytes of all parts.

        Returns:
            A float32 array of the tensor's shape.
        """

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """The largest error that each element of `decode` can have.

        The bound follows from the statistics alone. It holds where elements and scales are finite.

        Returns:
            A float64 array that broadcasts to the tensor's shape.
        """


class CodedWeight(NamedTuple):
    """A weight that a parameter of a model holds as codes.

    Attributes:
        format: the name of its format.
        shape: its shape, as it is quantised.
        transposed: whether the checkpoint has it transposed.
    """

    format: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the weight in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape in which it is quantised: all axes but the last number its rows."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def made(self) -> Quantised:
        """What it becomes, whatever dtype it had."""
        return _made(self.format, self.matrix)

    def names(self, codes: str) -> list[str]:
        """The names of its parts, where the codes have the name ``codes``, which comes first."""
        return [part.name(codes) for part in self.made.parts]


@cache
def _made(format: str, shape: tuple[int, int]) -> Quantised:
    return FORMATS[format].of(shape, F32)


class Format(Protocol):
    """One quantisation. Its file says where its layout is from, and how large its errors can be.

    Attributes:
        name: as users write it.
        turns_conv1d: whether its library has transformers' Conv1D as a Linear, whose weight is the
            transpose of what checkpoints hold.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def turns_conv1d(self) -> bool: ...  # noqa: D102

    def of(self, shape: tuple[int, ...], src: DType) -> Quantised:
        """Describe what a tensor becomes.

        Raises:
            ValueError: the format cannot hold the tensor; the message says why.
        """

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any] | None:
        """What config.json says of a checkpoint in this format, as its ``quantization_config``.

        Args:
            left: the modules whose matrices stay as they are.
            dtype: the dtype of most other tensors, in which the model computes.

        Returns:
            None where transformers has no such format.
        """


def flushed(x: Array) -> Array:
    """Float32 values with zeros for subnormals, as CUDA's fast arithmetic has them."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def stepped(x: Array, steps: int) -> Array:
    """Positive float32 values so many steps away in the last place: -1, 0 or 1."""
    return np.nextafter(x, np.float32(math.inf * steps)) if steps else x


#: Modules that register formats when they are imported. A new one is added here.
_MODULES = (
    "streamload.codecs.schemes.bitsandbytes",
    "streamload.codecs.schemes.int8",
    "streamload.codecs.schemes.mlc",
    "streamload.codecs.schemes.q4_0",
    "streamload.codecs.schemes.ggml",
)
_registered: dict[str, Format] = {}
_of_files: set[str] = set()


def register(*formats: Format, in_models: bool = True) -> None:
    """Make formats known by their names: a format's file calls it when it is imported.

    Args:
        formats: the formats.
        in_models: whether loads can give them to models; others are made by `convert` alone.
    """
    for one in formats:
        assert _registered.setdefault(one.name, one) is one, one.name
        if not in_models:
            _of_files.add(one.name)


@cache
def _all() -> dict[str, Format]:
    """Import the modules of all formats."""
    for module in _MODULES:
        importlib.import_module(module)
    return dict(sorted(_registered.items()))


class _Formats(Mapping[str, Format]):
    """Formats; the files of this package are imported when one is first looked for."""

    def __init__(self, *, of_files: bool) -> None:
        self._includes_files = of_files

    def __getitem__(self, name: str) -> Format:
        found = _all()[name]  # imports the files, which say what is of files alone
        if name in _of_files and not self._includes_files:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in _all() if self._includes_files or name not in _of_files)

    def __len__(self) -> int:
        return sum(1 for _ in self)


#: name to format, of those that models can have
FORMATS: Mapping[str, Format] = _Formats(of_files=False)
#: the same with those that only files have
ALL_FORMATS: Mapping[str, Format] = _Formats(of_files=True)


def check_source(name: str, shape: tuple[int, ...], src: DType) -> int:
    """Check that a tensor can be quantised, and return how many elements it has.

    Raises:
        ValueError: the tensor is empty, or its dtype is none of `SOURCES`.
    """
    if src not in SOURCES:
        raise ValueError(
            f"{name} is made from {', '.join(d.name for d in SOURCES)}, not from {src.name}"
        )
    numel = math.prod(shape)
    if numel == 0:
        raise ValueError(f"{name} of no elements: shape {shape}")
    return numel
