"""Schemes of quantized weights: their base classes, and the register of the files in `schemes`.

A file of `schemes` has one library's layouts. It recognizes their tensors in checkpoints, decodes
and encodes them, writes their ``quantization_config``, and calls `register` with what it has of
these. Files are imported when a checkpoint, a dtype or ``quant=`` first needs any.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from streamload.codecs.cast_table import CastCounts, OutOfRange
from streamload.codecs.encode import Quantized
from streamload.codecs.llvm import Engine
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import F32, DType, add_packed
from streamload.core.tensors import TensorInfo

#: Reads a tensor of a weight, all of it.
Read = Callable[[TensorInfo], bytes]
#: Returns the weight that a tensor marks, if it marks one; raises CheckpointError if its tensors do
#: not go together.
Find = Callable[[Layouts, TensorInfo], QuantizedWeight | None]
#: Adds the shape that the bytes of a small tensor state; raises CheckpointError if they do not fit.
Complete = Callable[[Layouts, QuantizedWeight, bytes], QuantizedWeight]


class Scheme(ABC):
    """A quantization that can be made.

    Attributes:
        name: as users write it.
        transposes_conv1d: whether its library has transformers' Conv1D as a Linear, whose weight is
            the transpose of that in checkpoints.
    """

    name: str
    transposes_conv1d: bool = False

    @abstractmethod
    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Describe a quantized tensor.

        Raises:
            ValueError: the scheme cannot hold the tensor; the message gives the reason.
        """

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any] | None:
        """Return the ``quantization_config`` of a checkpoint; None if transformers has none.

        Args:
            left: the modules whose matrices stay as they are.
            dtype: the dtype of most other tensors, in which the model computes.
        """
        return None


class Decoder(ABC):
    """Dequantizes one weight to a dtype; any thread may call `decode`, several at once."""

    @abstractmethod
    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        """Dequantize consecutive elements, or several lines of such.

        Args:
            data: the values from element ``first`` on, contiguous, line after line; of blocks,
                those that hold the elements.
            out: elements of the target, written; must not overlap ``data``.
            first: number of the first element in the weight. If values have 4 bits, an odd one is
                the second of its byte, and lines begin at even ones.
            lines: how many lines.
            pitch: elements of the weight from one line's beginning to the next one's.

        Returns:
            Counts of the elements that the target did not keep as the products are.

        Raises:
            ValueError: the lengths do not go together.
        """


class Layout(ABC):
    """Decodes stored weights of a kind.

    Attributes:
        dtype: of their values, as in `core.dtypes.PACKED`.
        of_linears: whether its library has them in Linears alone, transposed for a Conv1D.
    """

    dtype: DType
    of_linears: bool = False

    def refused(self, weight: QuantizedWeight) -> str:
        """Return why a weight cannot be dequantized, or ""."""
        return ""

    @abstractmethod
    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """See `decode.decoder_of`."""

    @abstractmethod
    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> None:
        """Compile the kernel; raises UnsupportedCastError if that fails."""


class _Schemes(Mapping[str, Scheme]):
    """Schemes by name; the files of `schemes` are imported when one is first looked for."""

    def __init__(self) -> None:
        self.registered: dict[str, Scheme] = {}

    def __getitem__(self, name: str) -> Scheme:
        _import_all()
        return self.registered[name]

    def __iter__(self) -> Iterator[str]:
        _import_all()
        return iter(sorted(self.registered))

    def __len__(self) -> int:
        return sum(1 for _ in self)


#: The schemes that models can have.
SCHEMES = _Schemes()
#: These and those that only files have.
ALL_SCHEMES = _Schemes()

#: Files of `schemes`. A new one is added here.
_FILES = (
    *("bitsandbytes", "bitsandbytes_int8", "gguf", "gguf_k", "mlc"),
    *("mxfp4", "packed", "scaled", "torchao"),
)
_layouts: dict[str, Layout] = {}
_finders: list[tuple[Callable[[str], bool] | None, Find]] = []
_complete: dict[str, Complete] = {}


def register(
    *schemes: Scheme,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
    find: Find | None = None,
    marks: Callable[[str], bool] | None = None,
    complete: Mapping[str, Complete] = MappingProxyType({}),
    in_models: bool = True,
) -> None:
    """Add a library's layouts; its file calls this when it is imported.

    Args:
        schemes: encode them.
        layouts: decode them, by the kind of the stored weight.
        find: recognizes their weights in the headers of a checkpoint.
        marks: whether the last component of a tensor's name may mark one; None for all names that
            no other file's may.
        complete: adds shapes that only the bytes of a tensor state, by that tensor's role.
        in_models: whether loads can give the schemes to models; others are for `convert` alone.
    """
    for scheme in schemes:
        for known in (ALL_SCHEMES, *([SCHEMES] if in_models else [])):
            assert known.registered.setdefault(scheme.name, scheme) is scheme, scheme.name
    for kind, layout in layouts.items():
        assert _layouts.setdefault(kind, layout) is layout, kind
        add_packed(kind, layout.dtype)
    if find is not None:
        _finders.append((marks, find))
    _complete.update(complete)


@cache
def _import_all() -> None:
    for name in _FILES:
        importlib.import_module(f"{__package__}.schemes.{name}")


def layout_of(kind: str) -> Layout | None:
    """The layout of weights of a kind; None if they stay as they are stored."""
    _import_all()
    return _layouts.get(kind)


def finder_of(leaf: str) -> Find | None:
    """The function that may recognize a weight by a tensor, by its name's last component."""
    _import_all()
    marked = (find for marks, find in _finders if marks is not None and marks(leaf))
    return next(marked, next((find for marks, find in _finders if marks is None), None))


def complete_of(weight: QuantizedWeight) -> tuple[TensorInfo, Complete] | None:
    """The tensor that states the shape of a weight, and the function that adds it."""
    _import_all()
    found = ((weight.members.get(role), add) for role, add in _complete.items())
    return next(((info, add) for info, add in found if info is not None), None)


class CodedWeight(NamedTuple):
    """A weight that a parameter of a model holds as codes.

    Attributes:
        format: the name of its scheme.
        shape: its shape, as it is quantized.
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
        """The shape in which it is quantized: all axes but the last number its rows."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def made(self) -> Quantized:
        """The quantized weight; its dtype, which is not known here, is given as float32."""
        return _made(self.format, self.matrix)

    def names(self, codes: str) -> list[str]:
        """The names of its parts if the codes, the first, have the name ``codes``."""
        return [part.name(codes) for part in self.made.parts]


@cache
def _made(format: str, shape: tuple[int, int]) -> Quantized:
    return SCHEMES[format].of(shape, F32)
