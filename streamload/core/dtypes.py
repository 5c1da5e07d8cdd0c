"""The dtypes of the safetensors format.

Source: the ``Dtype`` enum of the safetensors crate, version 0.8 (22 codes; sizes in bits, since
three of them are smaller than a byte).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

Kind = Literal["bool", "uint", "int", "float", "complex"]


@dataclass(frozen=True)
class DType:
    """The type of a tensor's elements.

    Attributes:
        name: the usual long name, as numpy, torch and ml_dtypes spell it ("bfloat16").
        code: the safetensors code ("BF16").
        bits: bits per element; per block if ``block`` is more than 1.
        block: elements that are stored together and cannot be addressed alone; mostly 1.
    """

    name: str
    code: str
    bits: int
    kind: Kind
    block: int = 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements, rounded up to whole bytes and whole blocks."""
        return (-(-numel // self.block) * self.bits + 7) // 8

    def numel(self, nbytes: int) -> int:
        """Return the number of elements in ``nbytes`` bytes."""
        return nbytes * 8 // self.bits * self.block

    @property
    def unit(self) -> int:
        """The least number of elements that fills whole bytes, and whole blocks."""
        return self.block if self.block > 1 else 8 // math.gcd(8, self.bits)

    def span(self, first: int, stop: int) -> tuple[int, int]:
        """Return the bytes (start, stop) that hold elements ``first`` to ``stop``; stops exclusive.

        The start is rounded down, and the stop up, to whole bytes and blocks.
        """
        return first // self.unit * self.nbytes(self.unit), self.nbytes(stop)

    @property
    def itemsize(self) -> int:
        """Bytes per element, for dtypes of whole bytes; 0 for dtypes below a byte."""
        return self.bits // 8

    @cached_property
    def numpy(self) -> Any:
        """The numpy dtype of these elements, or None if there is none.

        bfloat16 and the 8-bit floats are those of ml_dtypes. Dtypes below a byte have none: numpy
        cannot address half a byte.
        """
        import ml_dtypes
        import numpy as np

        if self.bits < 8:
            return None
        return np.dtype(getattr(ml_dtypes, self.name, None) or self.name)

    def __str__(self) -> str:
        return self.name

    @property
    def is_packed(self) -> bool:
        """Whether this is one of `PACKED`, the dtypes of quantized weights' values."""
        return not self.code

    def __reduce__(self) -> tuple[Any, ...]:
        return named, (self.name,)  # unpickling returns the same object


class ForeignDType(Protocol):
    """A dtype of numpy, torch or tinygrad, which prints as its name."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""


#: Arguments that name one dtype; see `parse_dtype`.
DTypeLike: TypeAlias = str | DType | type[Any] | ForeignDType
#: Arguments that name the dtypes of all tensors; see `LoadOptions`.
DTypeArgument: TypeAlias = DTypeLike | Mapping[str, DTypeLike] | None


_ALL = (
    DType("bool", "BOOL", 8, "bool"),
    DType("uint8", "U8", 8, "uint"),
    DType("int8", "I8", 8, "int"),
    DType("float4_e2m1fn", "F4", 4, "float"),
    DType("float6_e2m3fn", "F6_E2M3", 6, "float"),
    DType("float6_e3m2fn", "F6_E3M2", 6, "float"),
    DType("float8_e5m2", "F8_E5M2", 8, "float"),
    DType("float8_e4m3fn", "F8_E4M3", 8, "float"),
    DType("float8_e8m0fnu", "F8_E8M0", 8, "float"),
    DType("float8_e4m3fnuz", "F8_E4M3FNUZ", 8, "float"),
    DType("float8_e5m2fnuz", "F8_E5M2FNUZ", 8, "float"),
    DType("int16", "I16", 16, "int"),
    DType("uint16", "U16", 16, "uint"),
    DType("float16", "F16", 16, "float"),
    DType("bfloat16", "BF16", 16, "float"),
    DType("int32", "I32", 32, "int"),
    DType("uint32", "U32", 32, "uint"),
    DType("float32", "F32", 32, "float"),
    DType("complex64", "C64", 64, "complex"),
    DType("float64", "F64", 64, "float"),
    DType("int64", "I64", 64, "int"),
    DType("uint64", "U64", 64, "uint"),
)

#: safetensors code to dtype.
BY_CODE: Mapping[str, DType] = MappingProxyType({d.code: d for d in _ALL})
#: long name to dtype.
BY_NAME: Mapping[str, DType] = MappingProxyType({d.name: d for d in _ALL})
_PACKED = {
    kind: DType(name, "", bits, "float")
    for kind, name, bits in (
        ("fp8", "fp8 with scales", 8),
        ("int8", "int8 with scales", 8),
        ("mxfp4", "mxfp4", 4),
        ("bnb-nf4", "nf4", 4),
        ("bnb-fp4", "fp4", 4),
        ("bnb-int8", "bitsandbytes' int8", 8),
    )
} | {
    kind: DType(kind, "", 8 * nbytes, "float", numel)
    for kind, numel, nbytes in (
        ("q4_0", 32, 18),
        ("q4_1", 32, 20),
        ("q5_0", 32, 22),
        ("q5_1", 32, 24),
        ("q8_0", 32, 34),
        ("iq4_nl", 32, 18),
        ("gguf-mxfp4", 32, 17),
        ("q2_k", 256, 84),
        ("q3_k", 256, 110),
        ("q4_k", 256, 144),
        ("q5_k", 256, 176),
        ("q6_k", 256, 210),
        ("iq4_xs", 256, 136),
    )
}
#: Dtypes of quantized weights' values, by the weight's kind: their scales are in other tensors, or
#: inside of GGUF's blocks. They have no safetensors code, and users cannot request them.
PACKED: Mapping[str, DType] = MappingProxyType(_PACKED)

_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "fp64": "float64",
    "float8_e4m3": "float8_e4m3fn",
    "fp8e4m3": "float8_e4m3fn",
    "fp8e5m2": "float8_e5m2",
    "char": "int8",
    "uchar": "uint8",
    "short": "int16",
    "ushort": "uint16",
    "int": "int32",
    "uint": "uint32",
    "long": "int64",
    "ulong": "uint64",
}

BF16, F16, F32, F64 = (BY_CODE[code] for code in ("BF16", "F16", "F32", "F64"))

_NAMED = {**BY_NAME, **{d.name: d for d in PACKED.values()}}


def named(name: str) -> DType:
    """Return the dtype with a long name, `PACKED` ones included; raises KeyError if unknown."""
    return _NAMED[name]


def add_packed(kind: str, dtype: DType) -> None:
    """Add ``dtype`` to `PACKED` under ``kind``, a layout's name, unless ``kind`` is in `PACKED`."""
    _PACKED.setdefault(kind, dtype)
    _NAMED.setdefault(dtype.name, dtype)


def kind_of(nbytes: int) -> str:
    """Return the numpy dtype that copies elements of ``nbytes`` fastest."""
    return f"u{nbytes}" if nbytes in (1, 2, 4, 8) else f"V{nbytes}"


def parse_dtype(name: object) -> DType:
    """Return the dtype for a `DType`, a long name, a safetensors code, or a usual short form.

    Dtypes of numpy, ml_dtypes, torch and tinygrad are accepted by the names that they print. Raises
    ValueError: there is no such dtype.
    """
    if isinstance(name, DType):
        return name
    text = name.__name__ if isinstance(name, type) else str(name)
    key = text.removeprefix("torch.").removeprefix("dtypes.").lower()
    found = BY_NAME.get(_ALIASES.get(key, key)) or BY_CODE.get(key.upper())
    if found is None:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(BY_NAME)}")
    return found
