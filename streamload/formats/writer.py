"""Writers of the formats of `convert`: the tensors of each file, their sources and offsets.

To add a format that `convert --to NAME` writes, derive a class from `FormatWriter`, and name it in
the format's row (`Format.writes`). An instance serves one conversion. It works on headers alone, in
two steps. `FormatWriter.tensors` lists each `OutTensor` with the format's own names and dtypes,
joined from tensors of the source (`Joined`: permuted, transposed, padded, with constants
between them), and optionally quantized. The planner replaces a quantized weight by its parts
(values, scales). `FormatWriter.files` gives the bytes of each file's header and the offset of each
tensor (`placed`); `FormatWriter.documents` makes small files for the same folder.

`streamload.conversion` reads, casts, quantizes, digests, writes, journals, resumes and verifies the
bytes, and knows nothing of the format. Gaps between the header and the tensors are zeros.

A format refuses a family or a configuration by `Model.refuse`, and a dtype by UnsupportedCastError,
which names the tensor and the dtype to write instead.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from streamload.core.dtypes import F32, DType
from streamload.core.location import Location
from streamload.core.registry import load
from streamload.core.tensors import Coding, RowTranspose, TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError
from streamload.files.header import Stored
from streamload.formats.reader import FORMATS

if TYPE_CHECKING:
    from streamload.formats.imatrix import Importance

_T = TypeVar("_T")
#: Experts of a layer in one tensor, as transformers 5 has them in its modules.
FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")

#: Most bytes of a file by default: huggingface_hub splits there.
DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``first`` to ``stop`` (exclusive) of a tensor in the model's order, or constants."""

    info: TensorInfo | None  # None for constants
    first: int
    stop: int
    turn: RowTranspose | None = None  # the rows from the file's order to the model's
    data: bytes = b""  # constants in the dtype that is written; b"" for zeros
    shift: float = 0.0  # a number that is added to the elements, in float32, before the cast

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.first

    @property
    def read_nbytes(self) -> int:
        """Bytes of the source that are read for the slice; 0 for constants."""
        if self.info is None:
            return 0
        return self.info.nbytes * self.numel // max(self.info.numel, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Slices joined in order, optionally permuted."""

    pieces: tuple[Slice, ...]
    turn: RowTranspose | None = None  # of the rows of the joined elements

    @classmethod
    def of(cls, info: TensorInfo, turn: RowTranspose | None = None, shift: float = 0.0) -> Joined:
        """Return a whole tensor; ``turn`` permutes its rows into the model's order."""
        return cls((Slice(info, 0, info.numel, turn, shift=shift),))

    @classmethod
    def constant(cls, numel: int, data: bytes = b"") -> Joined:
        """Return ``numel`` constants of these bytes in the dtype to write; zeros for b""."""
        return cls((Slice(None, 0, numel, None, data),))

    @classmethod
    def joined(cls, parts: Sequence[Joined]) -> Joined:
        """Return the elements of ``parts``, one after the other, such as rows of equal widths.

        Raises ValueError: a part is permuted, and is not a single tensor.
        """
        return cls(tuple(piece for part in parts for piece in part._flat()))

    def permuted(self, groups: int, outer: int, inner: int) -> Joined:
        """Return these elements with permuted rows, see `RowTranspose`; inverses cancel.

        Raises ValueError: they have another permutation already.
        """
        turn = RowTranspose(groups, outer, inner)
        if outer == 1 or inner == 1:
            return self
        if self.turn == turn.inverse:
            return replace(self, turn=None)
        if self.turn is not None:
            raise ValueError(f"a tensor is turned twice, by {self.turn} and {turn}")
        if len(self.pieces) == 1 and self.pieces[0].turn == turn.inverse:
            return Joined((replace(self.pieces[0], turn=None),))
        return replace(self, turn=turn)

    def transposed(self, rows: int, columns: int) -> Joined:
        """Return the transpose of these elements as a matrix of ``rows`` and ``columns``."""
        return self.permuted(1, rows, columns)

    def padded(self, numel: int) -> Joined:
        """Return these elements with ``numel`` zeros appended."""
        return Joined.joined([self, Joined.constant(numel)]) if numel else self

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The source tensors, in the order of the slices."""
        return tuple(piece.info for piece in self.pieces if piece.info is not None)

    @property
    def src(self) -> DType:
        """The dtype of the joined elements before any cast or quantization; F32 if mixed."""
        dtypes = {info.dtype for info in self.infos}
        plain = len(dtypes) == 1 and not any(info.is_computed for info in self.infos)
        return dtypes.pop() if plain else F32

    def _flat(self) -> tuple[Slice, ...]:
        """Return slices, `turn` moved into the only one; ValueError unless it is a whole tensor."""
        if self.turn is None:
            return self.pieces
        (piece, *more) = self.pieces
        if more or piece.turn is not None or piece.info is None or piece.numel != piece.info.numel:
            raise ValueError("only one whole tensor can be turned before it is put to others")
        return (replace(piece, turn=self.turn),)


class OutTensor(NamedTuple):
    """A tensor to write, or one part (values, scales) of a quantized one.

    In a `Model`, a tensor of the source with the model's shape.

    Attributes:
        info: the source tensor for error messages; without ``made``, the whole source.
        quant: scheme to quantize to; None for none.
        made: the source elements, joined or permuted; None for ``info`` in the order of its file.
        stored: how ``info`` stores blocks that are copied as they are; ``shape`` counts bytes then.
        importance: the weights of columns by which it is quantized; None for equal weights.
        coding: how the part is computed from the weight; None if not quantized.
        start: first byte, counted from the start of the file; 0 before it is `placed`.
    """

    name: str
    info: TensorInfo
    dtype: DType
    shape: tuple[int, ...]
    quant: str | None = None
    made: Joined | None = None
    stored: Stored | None = None
    importance: Importance | None = None
    coding: Coding | None = None
    start: int = 0

    @property
    def source(self) -> Joined:
        """The source as slices: ``made``, or all of ``info``."""
        return self.made or Joined.of(self.info)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Length of the data in bytes."""
        return self.dtype.nbytes(math.prod(self.shape))

    @property
    def stop(self) -> int:
        """Last byte, exclusive."""
        return self.start + self.nbytes

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """All source tensors."""
        return (self.info,) if self.made is None else self.made.infos

    @property
    def turn(self) -> RowTranspose | None:
        """The permutation of all rows of the source into the output; None for none."""
        if self.made is None:
            return None
        inner = self.made.pieces[0].turn if len(self.made.pieces) == 1 else None
        return self.made.turn or inner

    @property
    def src(self) -> DType:
        """The dtype before the cast or quantization."""
        return self.info.dtype if self.made is None else self.made.src

    @property
    def is_auxiliary(self) -> bool:
        """Whether it is a by-product of quantizing, such as scales, that needs no reading."""
        return self.coding is not None and bool(self.coding.part)

    @property
    def is_assembled(self) -> bool:
        """Whether the output is not one contiguous byte range of the source."""
        return self.made is not None or self.info.is_computed

    @property
    def reads(self) -> Counter[Location]:
        """Bytes that are read for it, by source file; none for by-products of quantizing."""
        if self.is_auxiliary:
            return Counter()
        if self.made is None:
            return Counter({self.info.shard: self.info.nbytes})
        found = Counter[Location]()
        for piece in self.made.pieces:
            if piece.info is not None:
                found[piece.info.shard] += piece.read_nbytes
        return found

    @property
    def became(self) -> str:
        """The name of the output's dtype or quantization scheme, for reports."""
        return self.dtype.name if self.coding is None else self.coding.format


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file to write: its name, header, length and tensors."""

    path: str  # below the destination, with "/" on any system
    header: bytes = field(repr=False)  # the file's first bytes
    nbytes: int  # the file's length
    tensors: tuple[OutTensor, ...] = field(repr=False)  # by first byte


def placed(
    path: str, header: bytes, tensors: Sequence[OutTensor], alignment: int = 1, page: int = 1
) -> OutFile:
    """Return a file, its length a multiple of ``page``, with aligned tensors after the header."""
    at, out = len(header), []
    for each in tensors:
        at = round_up(at, alignment)
        out.append(each._replace(start=at))
        at += each.nbytes
    return OutFile(path, header, round_up(at, page), tuple(out))


def shards(
    lists: Sequence[Sequence[_T]],
    most_nbytes: int,
    nbytes_of: Callable[[_T], int],
    first_nbytes: int = 0,
) -> list[list[Sequence[_T]]]:
    """Split lists of tensors into files; return the lists of each file, in order, at least one.

    Tensors of one list stay in one file. The first file holds ``first_nbytes`` in addition.
    """
    out: list[list[Sequence[_T]]] = []
    left = -1
    for listed in lists:
        nbytes = sum(map(nbytes_of, listed))
        if nbytes > left:
            left = most_nbytes - (0 if out else first_nbytes)
            out.append([])
        out[-1].append(listed)
        left -= nbytes
    return out


def numbered(count: int, suffix: str, stem: str = "model") -> list[str]:
    """Return the names of ``count`` files: "model-00001-of-00002.x"; a single one has no number."""
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


def index_document(
    name: str, files: Sequence[OutFile], **metadata: Mapping[str, int]
) -> Mapping[str, bytes]:
    """Return {name: JSON bytes} of Hugging Face's index of several files; {} for one file."""
    if len(files) == 1:
        return {}
    weight_map = {t.name: file.path for file in files for t in file.tensors}
    index = {**metadata, "weight_map": weight_map}
    return {name: json.dumps(index, indent=2).encode() + b"\n"}


@dataclass(frozen=True)
class Model:
    """The model to convert, as a format's writer sees it.

    Attributes:
        tensors: by Hugging Face's names, with the requested dtypes and quantization schemes.
        companions: functions that return the bytes of the source's other files, by name.
        dtype: the dtype requested for all tensors; None without one, or with several by pattern.
        quant: the scheme requested for the pattern "*", or None.
        imatrix: the importance of matrices by GGUF's names; None if none is given.
        by_tensors: by key of ``config`` whose value config.json lacks, why the tensors state it.
        is_whole: whether no tensor was left out.
    """

    path: Location
    config: Mapping[str, Any]
    tensors: Mapping[str, OutTensor]
    metadata: Mapping[str, str]
    companions: Mapping[str, Callable[[], bytes]]
    dtype: DType | None = None
    quant: str | None = None
    imatrix: Mapping[str, Importance] | None = None
    by_tensors: Mapping[str, str] = field(default_factory=dict)
    is_whole: bool = True

    @cached_property
    def family(self) -> str:
        """The configuration's ``model_type``; "" without one."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    def number(self, key: str, otherwise: int | None = None) -> int:
        """Return a whole number above 0 of the configuration, or ``otherwise`` if it is missing."""
        found = self.config.get(key)
        found = otherwise if found is None else found
        if type(found) is not int or not 0 < found < 2**31:
            self.refuse(f"{key} of config.json is invalid", "a whole number above 0", repr(found))
        return found

    def numbers(self, **defaults: int | None) -> dict[str, int]:
        """Return several numbers of the configuration, given their defaults; see `number`."""
        return {key: self.number(key, otherwise) for key, otherwise in defaults.items()}

    def check_values(self, runtime: str, values: Mapping[str, tuple[object, ...]]) -> None:
        """Raise CheckpointError for a configuration that a runtime does not implement.

        ``values``: by key, the values that the runtime implements; the first is the default.
        """
        for key, known in values.items():
            found = self.config.get(key, known[0])
            if found not in known:
                expected = " or ".join(map(repr, known))
                why = f": {self.by_tensors[key]}" if key in self.by_tensors else " in config.json"
                self.refuse(f"{runtime} has no such {key}{why}", expected, repr(found))

    def take(
        self, found: OutTensor | None, name: str, shape: tuple[int, ...], problem: str
    ) -> OutTensor:
        """Return ``found``, the tensor ``name``; raise CheckpointError if it is None.

        Also raise it, with the message ``problem``, if the tensor's shape is not ``shape``.
        """
        if found is None:
            self.refuse("a tensor is missing", name, "no such tensor")
        if found.shape != shape:
            self.refuse(problem, list(shape), list(found.shape), found.info.name)
        return found

    def by_name(self, prefix: str = "") -> dict[str, OutTensor]:
        """Return all tensors by name; ``prefix`` is removed from the names that have it.

        Experts that are one tensor are listed one by one, as checkpoints of single experts name
        them: (experts, rows, columns), of which gate has the first half of ``gate_up_proj``'s rows.
        """
        found: dict[str, OutTensor] = {}
        for name, target in self.tensors.items():
            fused = FUSED_EXPERTS.fullmatch(name)
            if fused is None or len(target.shape) != 3 or target.stored is not None:
                found[name.removeprefix(prefix)] = target
                continue
            kinds = fused[2].removesuffix("_proj").split("_")
            experts, rows, columns = target.shape
            numel, at = rows // len(kinds) * columns, 0
            if rows % len(kinds) or target.source.turn or len(target.source.pieces) > 1:
                self.refuse("its experts cannot be taken apart", tensor=name)
            for expert in range(experts):
                for kind in kinds:
                    piece = replace(target.source.pieces[0], first=at, stop=at + numel)
                    own = f"{fused[1]}.{expert}.{kind}_proj.weight".removeprefix(prefix)
                    shape, made = (numel // columns, columns), Joined((piece,))
                    found[own] = target._replace(name=own, shape=shape, made=made)
                    at += numel
        return found

    def refuse(
        self, problem: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> NoReturn:
        """Raise CheckpointError for a model that the format cannot express."""
        known = None if tensor is None else self.tensors.get(tensor)
        where = self.path if known is None else known.info.shard
        raise CheckpointError(where, problem, expected, found, tensor=tensor)


class FormatWriter(ABC):
    """Base class: writes one model in a format; its module names the format's description.

    Attributes:
        max_shard_size: most bytes of a file by default.
        quants: quantization schemes that only this format has, see
            `streamload.codecs.scheme.register`.
        keeps_companions: whether all other files of the source (tokenizer, configuration) are
            copied.
        copied: names of the files that are copied if ``keeps_companions`` is false.
        wants_sums: whether `documents` needs the md5 sums of the files.
        takes_blocks: whether blocks of GGUF files are copied unchanged if no dtype is requested.
        weighted: schemes that an importance matrix changes.
    """

    name: str
    max_shard_size: str = DEFAULT_SHARD_SIZE
    quants: tuple[str, ...] = ()
    keeps_companions: bool = False
    copied: tuple[str, ...] = ()
    wants_sums: bool = False
    takes_blocks: bool = False
    weighted: tuple[str, ...] = ()

    def __init__(self, model: Model) -> None:
        self.model = model

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """Return (dtype, quant) to convert to, from `convert`'s ``dtype=`` and ``quant=``.

        Formats fill in defaults and resolve their own schemes; the base class changes nothing. A
        ValueError names the dtypes or schemes that the format has.
        """
        return dtype, quant

    def tensors(self) -> Sequence[Sequence[OutTensor]]:
        """Return the tensors to write, in order; those of one list stay in one file.

        Raises:
            CheckpointError: the format cannot express the model.
            UnsupportedCastError: the format lacks a dtype.
        """
        return [(target,) for target in self.model.tensors.values()]

    @abstractmethod
    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        """Return the files, of at most ``max_nbytes`` each unless one list of tensors is longer.

        Raises CheckpointError: the format cannot hold them.
        """

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        """Return small files for the folder, by name; the last one is published after all others.

        ``sums``: md5 sums of the files in hexadecimal, by path, if `wants_sums`. The first call,
        which counts the documents' bytes, gets zeros instead.
        """
        return {}

    def notes(self) -> Sequence[str]:
        """Return notes for users about the conversion, one sentence each."""
        return ()


def written() -> list[str]:
    """Return the names of the formats that `convert` writes."""
    return [row.name for row in FORMATS.values() if row.writes]


def writer_of(name: str) -> type[FormatWriter]:
    """Import and return a format's writer; raise ValueError if it has none."""
    row = FORMATS.get(name)
    if row is None or not row.writes:
        raise ValueError(f"to is one of {', '.join(written())}, not {name!r}")
    found: type[FormatWriter] = load(row.writes)
    return found
