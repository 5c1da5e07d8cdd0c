"""Base classes for layouts of quantized weights, and the registry of the libraries that own them.

A file of `schemes` recognizes one library's layouts in checkpoints, decodes and encodes them, or
does some of that, and lists its functions in a `Library`. It is imported when a checkpoint, a dtype
or ``quant=`` needs one of its layouts.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from streamload.codecs.cast_table import CastCounts, OutOfRange
from streamload.codecs.encode import Quantized, StoredBlocks
from streamload.codecs.llvm import Engine
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import F32, DType, add_packed
from streamload.core.registry import Registry, Row, load
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


class Library:
    """The layouts of a library."""

    def __init__(
        self,
        *schemes: Scheme,
        layouts: Mapping[str, Layout] = MappingProxyType({}),
        find: Find | None = None,
        complete: Mapping[str, Complete] = MappingProxyType({}),
    ) -> None:
        """Take what the library has.

        Args:
            schemes: encode tensors to the layouts.
            layouts: decode weights, by `QuantizedWeight.kind`.
            find: recognizes weights in the headers of a checkpoint.
            complete: adds shapes that only a tensor's bytes state, by that tensor's role.
        """
        self.schemes = {scheme.name: scheme for scheme in schemes}
        self.layouts, self.find, self.complete = layouts, find, complete
        for kind, layout in layouts.items():
            add_packed(kind, layout.dtype)


@dataclass(frozen=True, kw_only=True)
class LibraryRow(Row):
    """A library of `LIBRARIES`.

    Attributes:
        library: the `Library` to import, "module:name".
        schemes: names of its schemes that loads can give to models.
        of_files: names of those that ``convert`` alone writes.
        kinds: pattern of the kinds of its weights.
        leaves: pattern of the last component of the names of tensors to call `Library.find` for.
        states: roles of the tensors that state shapes.
    """

    library: str
    schemes: tuple[str, ...] = ()
    of_files: tuple[str, ...] = ()
    kinds: str = "(?!)"
    leaves: str = "(?!)"
    states: tuple[str, ...] = ()

    def load(self) -> Library:
        """Import and return the library."""
        found: Library = load(self.library)
        return found

    def knows(self, name: str) -> bool:
        """Return whether a scheme or a kind of the library has this name."""
        return name in self.schemes or name in self.of_files or self.has_kind(name)

    def has_kind(self, kind: str) -> bool:
        """Return whether weights of a kind are the library's."""
        return re.fullmatch(self.kinds, kind, re.DOTALL) is not None


def _row(name: str, **facts: Any) -> LibraryRow:
    return LibraryRow(name=name, library=f"{__package__}.schemes.{name}:LIBRARY", **facts)


#: The libraries. The first whose `LibraryRow.leaves` match decides about a tensor.
LIBRARIES = Registry(
    "streamload.schemes",
    LibraryRow,
    _row(
        "bitsandbytes",
        schemes=("fp4", "fp4-nested", "nf4", "nf4-nested"),
        kinds="bnb-(nf|fp)4",
        leaves="(nested_)?(absmax|quant_map)|bitsandbytes__.*",
        states=("quant_state",),
    ),
    _row("bitsandbytes_int8", schemes=("bitsandbytes-int8",), kinds="bnb-int8", leaves="SCB"),
    _row(
        "gguf",
        schemes=("q4_0", "q8_0"),
        kinds="q4_[01]|q5_[01]|q8_0|iq4_nl|gguf-mxfp4",
    ),
    _row("gguf_k", kinds="q[2-6]_k|iq4_xs"),
    _row("gguf_quants", schemes=("q4_k", "q5_0", "q5_1", "q5_k", "q6_k")),
    _row("mlc", of_files=("q3f16_1", "q4bf16_1", "q4f16_0", "q4f16_1", "q4f32_1")),
    _row("mlx", kinds="mlx-.*", leaves="scales"),
    _row("mxfp4", kinds="mxfp4", leaves=".*_blocks"),
    _row("packed", kinds="ct-.*|awq|gptq", leaves="weight_packed|qweight", states=("shape",)),
    _row("torchao", kinds="torchao-.*", leaves=".*_qdata"),
    _row("scaled", schemes=("int8",), kinds="int8|fp8", leaves=".*"),
)


def _first(name: str, fits: Callable[[LibraryRow], bool]) -> Library | None:
    """Return the first library that fits; others' are not looked for if ours know the name."""
    if not name:
        return None
    ours = LIBRARIES.ours.values()
    rows = ours if any(row.knows(name) for row in ours) else LIBRARIES.values()
    return next((row.load() for row in rows if fits(row)), None)


class _Schemes(Mapping[str, Scheme]):
    """Schemes by name; a lookup imports the library of the scheme."""

    def __init__(self, names: Callable[[LibraryRow], tuple[str, ...]]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Scheme:
        library = _first(name, lambda row: name in self._names(row))
        if library is None:
            raise KeyError(name)
        return library.schemes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(chain.from_iterable(map(self._names, LIBRARIES.values()))))

    def __len__(self) -> int:
        return sum(1 for _ in self)


#: The schemes that loads can give to models.
SCHEMES = _Schemes(lambda row: row.schemes)
#: `SCHEMES`, and those that ``convert`` alone writes to files.
ALL_SCHEMES = _Schemes(lambda row: row.schemes + row.of_files)


def layout_of(kind: str) -> Layout | None:
    """Return the layout that decodes weights of a kind; None if they cannot be decoded."""
    library = _first(kind, lambda row: row.has_kind(kind))
    return None if library is None else library.layouts.get(kind)


def is_blocks(kind: str) -> bool:
    """Return whether weights of a kind are blocks that hold their scales, as in GGUF files."""
    layout = layout_of(kind)
    return layout is not None and layout.dtype.block > 1


def finder_of(rows: Mapping[str, LibraryRow], leaf: str) -> Find | None:
    """Return the `Find` to call for tensors whose names' last component is ``leaf``, or None."""
    fit = (row for row in rows.values() if re.fullmatch(row.leaves, leaf, re.DOTALL))
    return next((row.load().find for row in fit), None)


def complete_of(weight: QuantizedWeight) -> tuple[TensorInfo, Complete] | None:
    """Return the tensor that states a weight's shape and the function to add it, or None."""
    found = ((row, role) for row in LIBRARIES.values() for role in row.states)
    return next(
        (
            (info, row.load().complete[role])
            for row, role in found
            if (info := weight.members.get(role)) is not None
        ),
        None,
    )


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
