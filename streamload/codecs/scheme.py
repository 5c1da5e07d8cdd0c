"""The base class of codecs of quantized weights, and the registry of the libraries that own them.

A file of `schemes` recognizes one library's layouts in checkpoints, decodes and encodes them, or
does some of that, and lists its codecs in a `Library`. It is imported when a checkpoint, a dtype
or ``quant=`` needs one of its layouts.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.cast_table import CastCounts, OutOfRange
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array, Part, QuantCounts
from streamload.codecs.weights import Layouts, Packed, QuantizedWeight
from streamload.core.dtypes import F32, F64, DType, add_packed
from streamload.core.registry import Registry, Row, load
from streamload.core.tensors import TensorInfo

#: Elements that are encoded at once in numpy, which bounds temporaries.
AT_ONCE = 1 << 16
#: Returns all bytes of a tensor of a quantized weight.
Read = Callable[[TensorInfo], bytes]
#: Returns the quantized weight that a tensor identifies, if any; raises CheckpointError if the
#: weight's tensors are inconsistent.
Find = Callable[[Layouts, TensorInfo], QuantizedWeight | None]
#: Adds the shape that a small tensor's bytes state; raises CheckpointError if they are invalid.
Complete = Callable[[Layouts, QuantizedWeight, bytes], QuantizedWeight]


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


class Encoder(ABC):
    """Quantizes one tensor. Any thread may call `encode`, several at once for different units.

    `statistics`: float32, one a unit, or empty; `encode` writes it, or a device does instead.
    """

    statistics: Array = np.empty(0, np.float32)

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
class Quantized:
    """A tensor as a codec stores it.

    A unit is a run of elements that is quantized on its own, such as a block, a group or a row.

    Attributes:
        parts: the stored arrays; the first holds the codes (the quantized units).
        unit_numel: elements of a unit; the flattened tensor may be cut at multiples of it.
        unit_nbytes: bytes of the codes of a whole unit.
        importance: float32 weights of the columns, a row for each matrix; None without any.
    """

    codec: Codec
    shape: tuple[int, ...]
    dtype: DType
    parts: tuple[Part, ...]
    unit_numel: int
    unit_nbytes: int
    importance: Array | None = field(default=None, compare=False)

    @property
    def format(self) -> str:
        """The codec's name."""
        return self.codec.name

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
        return 4 * self.units if self.codec.has_statistics else 0

    def codes_nbytes(self, numel: int) -> int:
        """Return the bytes of the codes of ``numel`` elements, which begin at a unit's start."""
        whole, rest = divmod(numel, self.unit_numel)
        return whole * self.unit_nbytes + -(-rest * self.unit_nbytes // self.unit_numel)

    def weighted(self, importance: Array) -> Quantized:
        """Return this tensor with `importance`; itself if its codec takes none."""
        if not self.codec.takes_importance:
            return self
        return replace(self, importance=importance.reshape(-1, self.shape[-1]))

    def encoder(self, src: DType, engine: Engine = "auto") -> Encoder:
        """Return an encoder of the tensor from dtype ``src``; float64 is rounded to float32 first.

        Raises as `Codec.encoder`.
        """
        return _Rounded(self, engine) if src is F64 else self.codec.encoder(self, src, engine)


class _Rounded(Encoder):
    """Rounds float64 elements to the nearest float32, and encodes these."""

    def __init__(self, tensor: Quantized, engine: Engine) -> None:
        self._tensor, self._encoder = tensor, tensor.encoder(F32, engine)

    def encode(self, data: memoryview, out: memoryview, first: int) -> QuantCounts:
        unit = self._tensor.unit_numel
        x, at, counts = np.frombuffer(data, F64.numpy), 0, QuantCounts()
        for some in np.split(x, range(step := max(AT_ONCE // unit, 1) * unit, x.size, step)):
            with np.errstate(over="ignore"):
                rounded = some.astype(np.float32).data.cast("B")
            end = at + self._tensor.codes_nbytes(some.size)
            counts += self._encoder.encode(rounded, out[at:end], first)
            first, at = first + some.size, end
        return counts

    def finish(self) -> dict[str, memoryview]:
        return self._encoder.finish()


class Codec(ABC):
    """A layout of quantized weights: encodes tensors to it, decodes weights in it, or both.

    Attributes:
        name: selects the codec in ``quant=`` if it encodes.
        kind: `QuantizedWeight.kind` of the weights that it decodes; "" if it decodes none.
        dtype: the dtype of stored values, as in `core.dtypes.PACKED`.
        of_linears: whether the library quantizes Linears alone, so that a Conv1D's weight is
            stored transposed.
        has_statistics: whether each unit has a float32 statistic, such as its scale.
        device_parts: suffixes of the parts that CUDA kernels write besides the codes: one for plain
            statistics, two (codes and scales) for quantized statistics; None without kernels.
        takes_importance: whether tensors are encoded by weights for their columns.
    """

    name: str
    kind: str = ""
    dtype: DType
    of_linears: bool = False
    has_statistics: bool = False
    device_parts: tuple[str, ...] | None = None
    takes_importance: bool = False

    @abstractmethod
    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return how the codec stores a tensor of this shape and source dtype.

        Raises ValueError: it cannot hold the tensor; the message gives the reason.
        """

    def encoder(self, tensor: Quantized, src: DType, engine: Engine) -> Encoder:
        """Return an encoder of a tensor from bytes of dtype ``src``.

        Raises:
            ValueError: there is no quantizing from ``src``, or none at all.
            UnsupportedCastError: ``engine`` is "llvm", and there is no kernel for this machine; or
                the machine is not little-endian.
        """
        raise ValueError(f"nothing here quantizes to {self.name}")

    @property
    def on_cuda(self) -> tuple[Codec, ...]:
        """CPU variants of CUDA's arithmetic: each unit of CUDA's output equals a variant's."""
        return ()

    def constants(self, tensor: Quantized, offset: float = 0.0) -> dict[str, Array]:
        """Return arrays by suffix of the parts that use no statistic but their mean, ``offset``."""
        return {}

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any] | None:
        """Return the ``quantization_config`` of a checkpoint; None if transformers has none.

        ``left`` are modules whose matrices are not quantized, ``dtype`` is that of most other
        tensors.
        """
        return None

    def refused(self, weight: QuantizedWeight) -> str:
        """Return why a weight cannot be dequantized, or ""."""
        return ""

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> Decoder:
        """Read the weight's scales, and return its decoder; see `decode.decoder_of`."""
        raise NotImplementedError(self.name)

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> object:
        """Compile the kernel to ``dst`` ahead of its use; raise UnsupportedCastError on failure."""
        return None


class Library:
    """The codecs of a library, by kind and by name.

    Args:
        find: recognizes weights in the headers of a checkpoint.
        complete: adds shapes that only a tensor's bytes state, by that tensor's role.
    """

    def __init__(
        self,
        *codecs: Codec,
        find: Find | None = None,
        complete: Mapping[str, Complete] = MappingProxyType({}),
    ) -> None:
        self.find, self.complete = find, complete
        by_kind = {codec.kind: codec for codec in reversed(codecs) if codec.kind}
        self.codecs = by_kind | {codec.name: codec for codec in codecs}
        for kind, codec in by_kind.items():
            add_packed(kind, codec.dtype)


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
        schemes=("q4_0", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"),
        kinds="q[45]_[01]|q8_0|q[2-6]_k|iq4_nl|iq4_xs|gguf-mxfp4",
    ),
    _row("mlc", of_files=("q3f16_1", "q4bf16_1", "q4f16_0", "q4f16_1", "q4f32_1")),
    _row("mlx", kinds="mlx-.*", leaves="scales"),
    _row("mxfp4", kinds="mxfp4", leaves=".*_blocks"),
    _row("packed", kinds="ct-.*|awq|gptq", leaves="weight_packed|qweight", states=("shape",)),
    _row("torchao", kinds="torchao-.*", leaves=".*_qdata"),
    _row("scaled", schemes=("int8",), kinds="int8|fp8", leaves=".*"),
)


def _row_of(name: str) -> LibraryRow | None:
    """Return the library that knows a name; others' are not looked for if one of ours does."""
    for row in LIBRARIES.values() if name else ():
        if name in row.schemes + row.of_files or re.fullmatch(row.kinds, name, re.DOTALL):
            return row
    return None


class _Schemes(Mapping[str, Codec]):
    """Codecs that encode, by name; a lookup imports their library."""

    def __init__(self, names: Callable[[LibraryRow], tuple[str, ...]]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Codec:
        row = _row_of(name)
        if row is None or name not in self._names(row):
            raise KeyError(name)
        return row.load().codecs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(chain.from_iterable(map(self._names, LIBRARIES.values()))))

    def __len__(self) -> int:
        return sum(1 for _ in self)


#: The schemes that loads can give to models.
SCHEMES = _Schemes(lambda row: row.schemes)
#: `SCHEMES`, and those that ``convert`` alone writes to files.
ALL_SCHEMES = _Schemes(lambda row: row.schemes + row.of_files)


def codec_of(name: str) -> Codec | None:
    """Return the codec of a scheme, or of a kind of weights; None if there is none."""
    row = _row_of(name)
    return None if row is None else row.load().codecs.get(name)


def is_blocks(kind: str) -> bool:
    """Return whether weights of a kind are blocks that hold their scales, as in GGUF files."""
    codec = codec_of(kind)
    return codec is not None and bool(codec.kind) and codec.dtype.block > 1


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
    codec = codec_of(format)
    assert codec is not None, format
    return codec.of(shape, F32)
