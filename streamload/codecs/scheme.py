"""Base classes for layouts of quantized weights, and the register of the files in `schemes`.

A file of `schemes` recognizes one library's layouts in checkpoints, decodes and encodes them, or
does some of that, and passes its functions to `register`. Files are imported when a checkpoint, a
dtype or ``quant=`` first needs any.
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
from streamload.codecs.encode import Quantized, StoredBlocks
from streamload.codecs.llvm import Engine
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import F32, DType, add_packed
from streamload.core.tensors import TensorInfo

#: Returns all bytes of a tensor of a quantized weight.
Read = Callable[[TensorInfo], bytes]
#: Returns the quantized weight that a tensor identifies, if any; raises CheckpointError if the
#: weight's tensors are inconsistent.
Find = Callable[[Layouts, TensorInfo], QuantizedWeight | None]
#: Adds the shape that a small tensor's bytes state; raises CheckpointError if they are invalid.
Complete = Callable[[Layouts, QuantizedWeight, bytes], QuantizedWeight]


class Scheme(ABC):
    """A quantization that tensors can be encoded to, selected by ``quant=``.

    `transposes_conv1d`: whether the modules that hold such weights have a Linear's in place of
    transformers' Conv1D: the transpose of that in checkpoints.
    """

    name: str
    transposes_conv1d: bool = False

    @abstractmethod
    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return how the scheme quantizes a tensor of this shape and source dtype.

        Raises ValueError: the scheme cannot hold the tensor; the message gives the reason.
        """

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any] | None:
        """Return the ``quantization_config`` of a checkpoint; None if transformers has none.

        ``left`` are modules whose matrices are not quantized, ``dtype`` is that of most other
        tensors.
        """
        return None


class Decoder(ABC):
    """Dequantizes one weight to a dtype; any thread may call `decode`, several at once."""

    @abstractmethod
    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        """Dequantize elements from ``first`` on, or several equal lines ``pitch`` elements apart.

        ``data`` has the stored values, contiguous, line after line, in whole blocks, and does not
        overlap ``out``. If values have 4 bits, an odd ``first`` is the second value of its byte,
        and several lines begin at even indices. Returns counts of the elements that the dtype does
        not hold exactly; raises ValueError if the lengths do not belong together.
        """


class Layout(ABC):
    """Decodes the stored weights of one `QuantizedWeight.kind`.

    Attributes:
        dtype: the dtype of stored values, as in `core.dtypes.PACKED`.
        of_linears: whether the library quantizes Linears alone, so that a Conv1D's weight is
            stored transposed.
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
        """Read the weight's scales, and return its decoder; see `decode.decoder_of`."""

    def held(self, kind: str, shape: tuple[int, ...]) -> Quantized:
        """Return the arrays of a weight that stays as it is stored; ValueError for some shapes."""
        return StoredBlocks(kind, shape, F32)

    @abstractmethod
    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> None:
        """Compile the kernel to ``dst`` ahead of its use; raise UnsupportedCastError on failure."""


class _Schemes(Mapping[str, Scheme]):
    """Schemes by name; the first lookup imports the files of `schemes`, which register them."""

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


#: The schemes that loads can give to models.
SCHEMES = _Schemes()
#: `SCHEMES`, and those that ``convert`` alone writes to files.
ALL_SCHEMES = _Schemes()

#: Modules of `schemes`; a new one is added here.
_FILES = (
    *("bitsandbytes", "bitsandbytes_int8", "gguf", "gguf_k", "gguf_quants", "mlc"),
    *("mlx", "mxfp4", "packed", "scaled", "torchao"),
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
        schemes: encode tensors to the layouts.
        layouts: decode weights, by `QuantizedWeight.kind`.
        find: recognizes weights in the headers of a checkpoint.
        marks: returns, by the last component of a tensor's name, whether to call ``find`` for the
            tensor; None for all components that no other file's ``marks`` accepts.
        complete: adds shapes that only a tensor's bytes state, by that tensor's role.
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
    """Return the layout that decodes weights of a kind; None if they cannot be decoded."""
    _import_all()
    return _layouts.get(kind)


def is_blocks(kind: str) -> bool:
    """Return whether weights of a kind are blocks that hold their scales, as in GGUF files."""
    layout = layout_of(kind)
    return layout is not None and layout.dtype.block > 1


def finder_of(leaf: str) -> Find | None:
    """Return the `Find` to call for tensors whose names' last component is ``leaf``, or None."""
    _import_all()
    marked = (find for marks, find in _finders if marks is not None and marks(leaf))
    return next(marked, next((find for marks, find in _finders if marks is None), None))


def complete_of(weight: QuantizedWeight) -> tuple[TensorInfo, Complete] | None:
    """Return the tensor that states a weight's shape and the function to add it, or None."""
    _import_all()
    found = ((weight.members.get(role), add) for role, add in _complete.items())
    return next(((info, add) for info, add in found if info is not None), None)


class CodedWeight(NamedTuple):
    """A weight that a parameter holds quantized: in the format of a scheme, or of blocks.

    `transposed`: whether the checkpoint has the transpose of ``shape``.
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
        """The weight as (rows, columns): all axes but the last are joined to rows."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def made(self) -> Quantized:
        """The description of the quantized weight; its unknown source dtype counts as float32."""
        return _made(self.format, self.matrix)

    def names(self, codes: str) -> list[str]:
        """Return the names of all arrays of the weight, given the name of the array of codes."""
        return [part.name(codes) for part in self.made.parts]


@cache
def _made(format: str, shape: tuple[int, int]) -> Quantized:
    if format in SCHEMES:
        return SCHEMES[format].of(shape, F32)
    layout = layout_of(format)
    assert layout is not None, format
    return layout.held(format, shape)
