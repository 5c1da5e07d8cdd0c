"""Formats that `convert` writes: the tensors of a file, their sources and their places.

A format is a file of this package. To add one that `convert --to NAME` writes, derive a class from
`FormatWriter` and call `register_writer` with it at the end of the file. An instance serves one
conversion. It works on headers alone, in two steps. `FormatWriter.tensors` lists `Target` tensors
with the format's own names and dtypes, each joined from tensors of the source (`Joined`: permuted,
transposed, padded, with constants between them), and perhaps quantized. The planner makes an
`OutTensor` of each, or several if its quantization has several parts. `FormatWriter.files` gives
the bytes of each file's header and the place of each tensor (`placed`); `FormatWriter.documents`
makes small files for the same folder.

`streamload.conversion` reads, casts, quantizes, digests, writes, journals, resumes and verifies the
bytes, and knows nothing of the format. Gaps between the header and the tensors are zeros.

A format refuses a family or a configuration by `Model.refuse`, and a dtype by UnsupportedCastError,
which names the tensor and the dtype to write instead.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

from streamload.codecs.weights import Packed
from streamload.core.dtypes import F32, DType
from streamload.core.location import Location
from streamload.core.tensors import Coding, RowTranspose, TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError
from streamload.files.header import SAFETENSORS, Stored
from streamload.formats.reader import import_all

_T = TypeVar("_T")

#: Most bytes of a file by default: huggingface_hub splits there.
DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``first`` to ``stop`` (exclusive) of a tensor as models have it, or constants.

    Attributes:
        info: the tensor; None for constants.
        turn: the order of the tensor's rows in its file, if models have another one.
        data: bytes of constants in the dtype that is written; b"" for zeros.
    """

    info: TensorInfo | None
    first: int
    stop: int
    turn: RowTranspose | None = None
    data: bytes = b""

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.stop - self.first

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        if self.info is None:
            return 0
        return self.info.nbytes * self.numel // max(self.info.numel, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Slices joined in order, optionally permuted.

    Attributes:
        pieces: the slices.
        turn: a permutation of all of them, see `RowTranspose`; rows are of equal lengths.
    """

    pieces: tuple[Slice, ...]
    turn: RowTranspose | None = None

    @classmethod
    def of(cls, info: TensorInfo, turn: RowTranspose | None = None) -> Joined:
        """All of a tensor, whose file has its rows in the order ``turn``."""
        return cls((Slice(info, 0, info.numel, turn),))

    @classmethod
    def constant(cls, numel: int, data: bytes = b"") -> Joined:
        """Constants, by their bytes in the dtype that is written; zeros without any."""
        return cls((Slice(None, 0, numel, None, data),))

    @classmethod
    def joined(cls, parts: Sequence[Joined]) -> Joined:
        """The elements of several, such as rows of matrices of one width.

        Raises:
            ValueError: a part is permuted, and is not a single tensor.
        """
        return cls(tuple(piece for part in parts for piece in part._flat()))

    def permuted(self, groups: int, outer: int, inner: int) -> Joined:
        """The same with permuted rows, see `RowTranspose`; a permutation and its inverse cancel.

        Raises:
            ValueError: it has another permutation already.
        """
        turn, undone = RowTranspose(groups, outer, inner), RowTranspose(groups, inner, outer)
        if outer == 1 or inner == 1:
            return self
        if self.turn == undone:
            return replace(self, turn=None)
        if self.turn is not None:
            raise ValueError(f"a tensor is turned twice, by {self.turn} and {turn}")
        if len(self.pieces) == 1 and self.pieces[0].turn == undone:
            return Joined((replace(self.pieces[0], turn=None),))
        return replace(self, turn=turn)

    def transposed(self, rows: int, columns: int) -> Joined:
        """The transpose of a matrix of so many rows and columns."""
        return self.permuted(1, rows, columns)

    def padded(self, numel: int) -> Joined:
        """With so many zeros appended."""
        return Joined.joined([self, Joined.constant(numel)]) if numel else self

    @property
    def numel(self) -> int:
        """How many elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """Its source tensors."""
        return tuple(piece.info for piece in self.pieces if piece.info is not None)

    @property
    def src(self) -> DType:
        """The dtype in which it is joined before it is quantized."""
        dtypes = {info.dtype for info in self.infos}
        plain = len(dtypes) == 1 and not any(isinstance(info, Packed) for info in self.infos)
        return dtypes.pop() if plain else F32

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        return sum(piece.read_nbytes for piece in self.pieces)

    def _flat(self) -> tuple[Slice, ...]:
        if self.turn is None:
            return self.pieces
        (piece, *more) = self.pieces
        if more or piece.turn is not None or piece.info is None or piece.numel != piece.info.numel:
            raise ValueError("only one whole tensor can be turned before it is put to others")
        return (replace(piece, turn=self.turn),)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to write; in a `Model`, one of the source as models have it.

    Attributes:
        info: the tensor of the source that messages name, and the whole source without ``made``.
        dtype: of the elements unless they are quantized.
        quant: the format that it is quantized to; None for none.
        made: its source; None for ``info`` as its file has it.
        stored: of ``info``, if its blocks are written as they are stored: ``shape`` counts bytes.
    """

    name: str
    info: TensorInfo
    dtype: DType
    shape: tuple[int, ...]
    quant: str | None = None
    made: Joined | None = None
    stored: Stored | None = None

    @property
    def source(self) -> Joined:
        """The slices of its source."""
        return self.made or Joined.of(self.info)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


class OutTensor(NamedTuple):
    """A tensor of the output: a `Target`, or one part of a quantized one.

    Attributes:
        dtype: of its elements; the codes of a format have the format's.
        coding: how the codes are computed from the weight; None if it is not quantized.
        made: see `Target`.
        start: first byte, counted from the start of its file; 0 before it is `placed`.
    """

    name: str
    info: TensorInfo
    dtype: DType
    shape: tuple[int, ...]
    coding: Coding | None = None
    made: Joined | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.dtype.nbytes(math.prod(self.shape))

    @property
    def stop(self) -> int:
        """Last byte, exclusive."""
        return self.start + self.nbytes

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """All tensors that it is read from."""
        return (self.info,) if self.made is None else self.made.infos

    @property
    def turn(self) -> RowTranspose | None:
        """The permutation of all of its rows."""
        if self.made is None:
            return None
        inner = self.made.pieces[0].turn if len(self.made.pieces) == 1 else None
        return self.made.turn or inner

    @property
    def src(self) -> DType:
        """The dtype that is quantized, or cast."""
        return self.info.dtype if self.made is None else self.made.src

    @property
    def is_auxiliary(self) -> bool:
        """Whether it is computed with the codes of its weight, without reading."""
        return self.coding is not None and bool(self.coding.part)

    @property
    def is_assembled(self) -> bool:
        """Whether the output is not one contiguous byte range of the source."""
        return self.made is not None or isinstance(self.info, Packed)

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        if self.is_auxiliary:
            return 0
        return self.info.nbytes if self.made is None else self.made.read_nbytes

    @property
    def became(self) -> str:
        """Its dtype, or its format."""
        return self.dtype.name if self.coding is None else self.coding.format


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file that will be written."""

    path: str  # below the destination; with "/" on any system
    header: bytes = field(repr=False)  # its first bytes
    nbytes: int  # its length
    tensors: tuple[OutTensor, ...] = field(repr=False)  # by first byte


def placed(
    path: str, header: bytes, tensors: Sequence[OutTensor], alignment: int = 1, page: int = 1
) -> OutFile:
    """A file with tensors at multiples of ``alignment`` after its header, of whole pages."""
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
    """Fill files in order with lists of tensors, at least one list each.

    Args:
        lists: tensors of one list stay in one file.
        most_nbytes: of all tensors of a file.
        nbytes_of: the most that a tensor adds to a file.
        first_nbytes: what the first file holds besides.
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
    """The names of a set of files; one alone has no number."""
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


def index_document(
    name: str, files: Sequence[OutFile], **metadata: Mapping[str, int]
) -> Mapping[str, bytes]:
    """The index of several files, as Hugging Face has it; none of one file."""
    if len(files) == 1:
        return {}
    weight_map = {t.name: file.path for file in files for t in file.tensors}
    index = {**metadata, "weight_map": weight_map}
    return {name: json.dumps(index, indent=2).encode() + b"\n"}


@dataclass(frozen=True)
class Model:
    """The model that is converted.

    Attributes:
        path: the source, for errors.
        config: the content of config.json.
        tensors: by name, as models have them, with the dtypes and formats that were asked for.
        metadata: of the source, for formats that keep it.
        companions: the other files of the source, by name: each returns its bytes.
        dtype: asked for all tensors; None if there was none, or one by pattern.
        quant: the format that was asked for with the pattern "*", or None.
    """

    path: Location
    config: Mapping[str, Any]
    tensors: Mapping[str, Target]
    metadata: Mapping[str, str]
    companions: Mapping[str, Callable[[], bytes]]
    dtype: DType | None = None
    quant: str | None = None

    @cached_property
    def family(self) -> str:
        """``model_type`` of the configuration; "" without one."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    def number(self, key: str, otherwise: int | None = None) -> int:
        """A whole number above 0 of the configuration, or ``otherwise``.

        Raises:
            CheckpointError: it is something else, or is missing and has no default.
        """
        found = self.config.get(key)
        found = otherwise if found is None else found
        if type(found) is not int or not 0 < found < 2**31:
            self.refuse(f"{key} of config.json is invalid", "a whole number above 0", repr(found))
        return found

    def numbers(self, **defaults: int | None) -> dict[str, int]:
        """Several of them; raises as `number`."""
        return {key: self.number(key, otherwise) for key, otherwise in defaults.items()}

    def check_values(self, runtime: str, values: Mapping[str, tuple[object, ...]]) -> None:
        """Refuse a configuration that a runtime does not compute.

        Args:
            runtime: its name, for the message.
            values: by key, those with code in the runtime; the first is the default.
        """
        for key, known in values.items():
            found = self.config.get(key, known[0])
            if found not in known:
                expected = " or ".join(map(repr, known))
                self.refuse(f"{runtime} has no such {key} in config.json", expected, repr(found))

    def take(self, found: Target | None, name: str, shape: tuple[int, ...], problem: str) -> Target:
        """A tensor that the format needs, of a shape; ``problem`` is for one of another shape."""
        if found is None:
            self.refuse("a tensor is missing", name, "no such tensor")
        if found.shape != shape:
            self.refuse(problem, list(shape), list(found.shape), found.info.name)
        return found

    def by_name(self, prefix: str) -> dict[str, Target]:
        """The tensors without a prefix of their names."""
        return {name.removeprefix(prefix): each for name, each in self.tensors.items()}

    def refuse(
        self, problem: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> NoReturn:
        """Raise CheckpointError for a model that the format cannot take."""
        known = None if tensor is None else self.tensors.get(tensor)
        where = self.path if known is None else known.info.shard
        raise CheckpointError(where, problem, expected, found, tensor=tensor)


class FormatWriter(ABC):
    """Writes one model in a format; the module's docstring names the format's description.

    Attributes:
        name: of the format, as users write it: ``convert --to NAME``.
        max_shard_size: most bytes of a file by default.
        quants: names of formats that only its files have, see `streamload.codecs.scheme.register`.
        keeps_companions: whether the other files of the source (tokenizer, configuration) are
            copied.
        copied: without that, the names of those that are.
        wants_sums: whether `documents` needs the md5 sums of the files.
        takes_blocks: whether blocks of GGUF files stay as they are if no dtype is asked for.
    """

    name: str
    max_shard_size: str = DEFAULT_SHARD_SIZE
    quants: tuple[str, ...] = ()
    keeps_companions: bool = False
    copied: tuple[str, ...] = ()
    wants_sums: bool = False
    takes_blocks: bool = False

    def __init__(self, model: Model) -> None:
        self.model = model

    @staticmethod
    def asked(dtype: Any, quant: Any) -> tuple[Any, Any]:
        """``dtype=`` and ``quant=`` of `convert` for this format.

        Raises:
            ValueError: the format has no such thing; the message names what it has.
        """
        return dtype, quant

    def tensors(self) -> Sequence[Sequence[Target]]:
        """The tensors to write, in order; those of one list stay in one file.

        Raises:
            CheckpointError: the format cannot take the model.
            UnsupportedCastError: it cannot take a dtype.
        """
        return [(target,) for target in self.model.tensors.values()]

    @abstractmethod
    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        """The files, of at most ``max_nbytes`` each unless one list of tensors is longer.

        Raises:
            CheckpointError: the format cannot hold them.
        """

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        """Small files for the folder, by name; the last one is published after all other files.

        Args:
            files: the files.
            sums: with `wants_sums` by path the md5 sum of each file, in hexadecimal. The first
                call, which counts the documents' bytes, has zeros in their place.
        """
        return {}

    def notes(self) -> Sequence[str]:
        """Notes for users, one sentence each."""
        return ()


_writers: dict[str, type[FormatWriter]] = {}


def register_writer(writer: type[FormatWriter]) -> None:
    """Register a format by its name; its file calls this when it is imported."""
    assert _writers.setdefault(writer.name, writer) is writer, writer.name


def writers() -> Mapping[str, type[FormatWriter]]:
    """All writers by their names; imports the files of this package."""
    import_all()
    return dict(sorted(_writers.items(), key=lambda item: (item[0] != SAFETENSORS, item[0])))
