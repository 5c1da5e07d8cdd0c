"""The arrays of which quantized tensors consist, and the errors and counts of quantization."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from streamload.core.dtypes import BF16, F16, F32, DType

Array = np.ndarray[Any, np.dtype[Any]]
#: The device whose arithmetic a scheme follows, if its library computes differently on each.
Arithmetic = Literal["cpu", "cuda"]
#: The dtypes that can be quantized; float64 has to be cast first.
SOURCES: tuple[DType, ...] = (F32, BF16, F16)


@dataclass(frozen=True, slots=True)
class Part:
    """One stored array of a quantized tensor, such as its codes or its scales.

    Attributes:
        suffix: the end of the array's name, after the tensor's: "" for the codes, ".absmax".
        is_sibling: whether the suffix replaces the last part of the tensor's name instead, as in
            ``layer.weight`` and ``layer.SCB``.
    """

    suffix: str
    dtype: DType
    shape: tuple[int, ...]
    is_sibling: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.nbytes(math.prod(self.shape))

    def name(self, tensor: str) -> str:
        """Return the array's name in a checkpoint, from the name of the quantized tensor."""
        if not self.is_sibling:
            return tensor + self.suffix
        owner, dot, _ = tensor.rpartition(".")
        return owner + dot + self.suffix


@dataclass(frozen=True, slots=True)
class QuantCounts:
    """Errors and counts of quantized elements; ``+`` joins the counts of two sets of elements.

    Attributes:
        largest_error: the largest difference between an element and its decoded code; infinite if
            a code decodes to infinity or NaN.
        squared_error: sum of the squares of all such differences.
        squared: sum of the squares of the elements.
        largest: the largest magnitude of an element.
        nan: elements that are NaN, and count as 0.
        inf: elements that are infinite, and count as the largest finite one of their unit.
        overflowed: elements beyond float16 if the format goes through it, or all elements of a
            block whose scale is beyond it.
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
        """Return the counts that a JSON list holds in the order of the attributes.

        Raises ValueError: the value is no such list.
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
        """Return the errors with six digits: further digits depend on where the tensor was cut."""
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


def flushed(x: Array) -> Array:
    """Replace subnormal float32 values by zeros of their sign, like CUDA's fast arithmetic."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def stepped(x: Array, steps: int) -> Array:
    """Return positive float32 values moved by ``steps`` in the last place: -1, 0 or 1."""
    return np.nextafter(x, np.float32(math.inf * steps)) if steps else x


def check_source(name: str, shape: tuple[int, ...], src: DType) -> None:
    """Raise ValueError, naming scheme ``name``, for no elements or not float32, bf16, float16."""
    if src not in SOURCES:
        raise ValueError(
            f"{name} is made from {', '.join(d.name for d in SOURCES)}, not from {src.name}"
        )
    if math.prod(shape) == 0:
        raise ValueError(f"{name} of no elements: shape {shape}")
