"""What a format that is written offers: which tensors, made of what, and where each lies.

A format is a file of this package. To add one that `convert --to NAME` writes: write a class that
derives from `FormatWriter`, and call `register_writer` with one of it at the end of the file. All
that it does is pure, from headers alone, in two steps. `FormatWriter.tensors` says what is written:
`Wanted` tensors with the format's own names and dtypes, each made of tensors of the source (`Made`:
as they are, row-permuted, transposed, one after the other, with zeros or constants between them),
and perhaps quantised. The planner makes an `Entry` of each, or several where its quantisation has
several parts. `FormatWriter.files` says where these lie: the bytes of each file's header, and each
entry's place (`placed`). `FormatWriter.documents` makes small files beside them.

The bytes are read, cast, quantised, digested, written, journaled, resumed and verified by
`streamload.conversion`, which knows nothing of the format. What lies between the header and the
tensors, between these and behind the last one is zeros.

What a format cannot take is one error: `Model.refuse` for a family or a configuration, and
UnsupportedCastError for a dtype, that names the tensor and what to write instead.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from streamload.codecs.group import Packed
from streamload.core.dtypes import F32, DType
from streamload.core.location import Location
from streamload.core.tensors import Coding, RowTranspose, TensorInfo
from streamload.core.units import round_up
from streamload.errors import CheckpointError
from streamload.files.header import SAFETENSORS, Stored
from streamload.formats.reader import import_all

_T = TypeVar("_T")

#: Most bytes of a file where nothing else is said: what huggingface_hub splits at.
DEFAULT_SHARD_SIZE = "5GB"


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``first`` to ``stop`` (exclusive) of a tensor as models have it, or constants.

    Attributes:
        info: the tensor; None for constants.
        first: number of the first element.
        stop: number of the last one, exclusive.
        turn: how the tensor's rows lie in its file, where models have them otherwise.
        data: of constants, their bytes in the dtype that is written; b"" for zeros.
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
class Made:
    """What a tensor is made of: the elements of pieces, one after the other, perhaps turned.

    Attributes:
        pieces: the pieces.
        turn: a permutation of all of them: see `RowTranspose`; a row is as many elements as there
            are for each of its rows.
    """

    pieces: tuple[Piece, ...]
    turn: RowTranspose | None = None

    @classmethod
    def of(cls, info: TensorInfo, turn: RowTranspose | None = None) -> Made:
        """All of a tensor, whose rows lie in the file as ``turn`` says."""
        return cls((Piece(info, 0, info.numel, turn),))

    @classmethod
    def constant(cls, numel: int, data: bytes = b"") -> Made:
        """Constants, by their bytes in the dtype that is written; zeros without any."""
        return cls((Piece(None, 0, numel, None, data),))

    @classmethod
    def joined(cls, parts: Sequence[Made]) -> Made:
        """Elements of several, one after the other: rows of matrices of one width, for one.

        Raises:
            ValueError: a part is turned, and is no single tensor.
        """
        return cls(tuple(piece for part in parts for piece in part._flat()))

    def turned(self, groups: int, outer: int, inner: int) -> Made:
        """The same with its rows in another order, see `RowTranspose`; back again is as before.

        Raises:
            ValueError: it is turned otherwise already.
        """
        turn, undone = RowTranspose(groups, outer, inner), RowTranspose(groups, inner, outer)
        if outer == 1 or inner == 1:
            return self
        if self.turn == undone:
            return replace(self, turn=None)
        if self.turn is not None:
            raise ValueError(f"a tensor is turned twice, by {self.turn} and {turn}")
        if len(self.pieces) == 1 and self.pieces[0].turn == undone:
            return Made((replace(self.pieces[0], turn=None),))
        return replace(self, turn=turn)

    def transposed(self, rows: int, columns: int) -> Made:
        """The transpose of a matrix of so many rows and columns."""
        return self.turned(1, rows, columns)

    def padded(self, numel: int) -> Made:
        """With so many zeros behind it."""
        return Made.joined([self, Made.constant(numel)]) if numel else self

    @property
    def numel(self) -> int:
        """How many elements."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """The tensors that it is made of."""
        return tuple(piece.info for piece in self.pieces if piece.info is not None)

    @property
    def src(self) -> DType:
        """The dtype in which it is put together before it is quantised."""
        dtypes = {info.dtype for info in self.infos}
        plain = len(dtypes) == 1 and not any(isinstance(info, Packed) for info in self.infos)
        return dtypes.pop() if plain else F32

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        return sum(piece.read_nbytes for piece in self.pieces)

    def _flat(self) -> tuple[Piece, ...]:
        if self.turn is None:
            return self.pieces
        (piece, *more) = self.pieces
        if more or piece.turn is not None or piece.info is None or piece.numel != piece.info.numel:
            raise ValueError("only one whole tensor can be turned before it is put to others")
        return (replace(piece, turn=self.turn),)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is to be written; in a `Model`, one of the source as models have it.

    Attributes:
        name: its name.
        info: the tensor of the source that messages name, and all it is made of without ``made``.
        dtype: what elements become where it is not quantised.
        shape: its shape.
        quant: the format that it is quantised to; None leaves it as it is.
        made: what it is made of; None for ``info`` as it lies in its file.
        stored: how ``info`` is stored, where it is blocks of a quantised weight that are not
            dequantised: ``shape`` is then that of bytes.
    """

    name: str
    info: TensorInfo
    dtype: DType
    shape: tuple[int, ...]
    quant: str | None = None
    made: Made | None = None
    stored: Stored | None = None

    @property
    def source(self) -> Made:
        """What it is made of."""
        return self.made or Made.of(self.info)

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


class Entry(NamedTuple):
    """A tensor of the output without its place: a `Wanted`, or one part of what it becomes.

    Attributes:
        name: its name.
        info: see `Wanted`.
        dtype: of its elements; of codes, as their format says.
        shape: of the same.
        coding: how it is made of a weight that is quantised; ``coding.format`` and
            ``coding.shape`` are the weight's.
        made: see `Wanted`.
    """

    name: str
    info: TensorInfo
    dtype: DType
    shape: tuple[int, ...]
    coding: Coding | None = None
    made: Made | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.dtype.nbytes(math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor as it will be written; see `Entry`."""

    name: str  # in the output
    info: TensorInfo  # what it is read from, or the first of that
    dtype: DType  # in the output
    shape: tuple[int, ...]  # in the output
    coding: Coding | None  # what it is of a weight that is quantised
    made: Made | None  # what it is made of, where that is not ``info`` as it lies
    start: int  # first byte, counted from the start of its file
    stop: int  # last byte, exclusive

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start

    @property
    def infos(self) -> tuple[TensorInfo, ...]:
        """All tensors that it is read from."""
        return (self.info,) if self.made is None else self.made.infos

    @property
    def turn(self) -> RowTranspose | None:
        """How all of its rows lie elsewhere than in their order."""
        if self.made is None:
            return None
        inner = self.made.pieces[0].turn if len(self.made.pieces) == 1 else None
        return self.made.turn or inner

    @property
    def src(self) -> DType:
        """The dtype that is quantised, or cast."""
        return self.info.dtype if self.made is None else self.made.src

    @property
    def is_beside(self) -> bool:
        """Whether it is made when the codes of its weight are there, without reading."""
        return self.coding is not None and bool(self.coding.part)

    @property
    def lies_elsewhere(self) -> bool:
        """Whether its bytes are made of others than those that lie in their order in the file."""
        return self.made is not None or isinstance(self.info, Packed)

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read for it."""
        if self.is_beside:
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
    path: str,
    header: bytes,
    entries: Sequence[Entry],
    alignment: int = 1,
    *,
    pads_end: bool = False,
) -> OutFile:
    """A file with these entries one after the other, each at a multiple of ``alignment``.

    The first follows the header, at such a multiple, too. With ``pads_end``, the file's length is
    one as well.
    """
    at, out = len(header), []
    for entry in entries:
        at = round_up(at, alignment)
        out.append(OutTensor(*entry, at, at + entry.nbytes))
        at = out[-1].stop
    return OutFile(path, header, round_up(at, alignment) if pads_end else at, tuple(out))


@dataclass(frozen=True)
class Model:
    """What is converted: everything that a writer decides by.

    Attributes:
        path: the source, for errors.
        config: what config.json says.
        tensors: by name, as models have them, with the dtypes and formats that were asked for.
        metadata: what the source says of itself, for formats that keep it.
        beside: the files that go with the source, by name: each gives its bytes.
        dtype: the dtype that was asked for all tensors; None where none was, or by pattern.
        quant: the format that was asked for with the pattern "*", or None.
    """

    path: Location
    config: Mapping[str, Any]
    tensors: Mapping[str, Wanted]
    metadata: Mapping[str, str]
    beside: Mapping[str, Callable[[], bytes]]
    dtype: DType | None = None
    quant: str | None = None

    @cached_property
    def family(self) -> str:
        """``model_type`` of the configuration; "" where it says none."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""

    def number(self, key: str, otherwise: int | None = None) -> int:
        """A whole number above 0 that the configuration says, or ``otherwise``.

        Raises:
            CheckpointError: it says something else, or nothing where nothing is known otherwise.
        """
        found = self.config.get(key)
        found = otherwise if found is None else found
        if type(found) is not int or not 0 < found < 2**31:
            self.refuse(f"{key} of config.json is invalid", "a whole number above 0", repr(found))
        return found

    def check_values(self, runtime: str, values: Mapping[str, tuple[object, ...]]) -> None:
        """Hold the configuration to what a runtime computes.

        Args:
            runtime: its name, for the message.
            values: by key, all that it has code for; the first is what silence means.

        Raises:
            CheckpointError: a key has another value.
        """
        for key, known in values.items():
            found = self.config.get(key, known[0])
            if found not in known:
                expected = " or ".join(map(repr, known))
                self.refuse(f"{runtime} has no such {key} in config.json", expected, repr(found))

    def refuse(
        self, problem: str, expected: object = None, found: object = None, tensor: str | None = None
    ) -> NoReturn:
        """Raise CheckpointError for a model that the format cannot take."""
        known = None if tensor is None else self.tensors.get(tensor)
        where = self.path if known is None else known.info.shard
        raise CheckpointError(where, problem, expected, found, tensor=tensor)


class PerModel(Generic[_T]):
    """What a writer makes of a model once, for those of its methods that need it.

    It is held for one model at a time, which may be gone.
    """

    def __init__(self, make: Callable[[Model], _T]) -> None:
        """Hold nothing yet; ``make`` is called for each model."""
        self._make = make
        self._made: tuple[weakref.ref[Model], _T] | None = None

    def of(self, model: Model) -> _T:
        """What was made of this model; threads may ask for others meanwhile."""
        made = self._made
        if made is None or made[0]() is not model:
            self._made = made = weakref.ref(model), self._make(model)
        return made[1]

    def drop(self) -> None:
        """Hold nothing again."""
        self._made = None


class FormatWriter(Protocol):
    """Writes a format; its file says where the format's description is.

    Attributes:
        name: of the format, as users write it: ``convert --to NAME``.
        max_shard_size: most bytes of a file where users say nothing.
        quants: names of formats that only its files have, see `streamload.codecs.scheme.register`.
        keeps_beside: whether the files beside the source (tokenizer, configuration) are copied.
        copied: without that, the names of those that are.
        wants_sums: whether `documents` needs the md5 sums of the files.
        takes_blocks: whether blocks of GGUF files stay as they are where no dtype is asked for.
    """

    name: str
    max_shard_size: str = DEFAULT_SHARD_SIZE
    quants: tuple[str, ...] = ()
    keeps_beside: bool = False
    copied: tuple[str, ...] = ()
    wants_sums: bool = False
    takes_blocks: bool = False

    def asked(self, dtype: Any, quant: Any) -> tuple[Any, Any]:
        """What ``dtype=`` and ``quant=`` of `convert` stand for in this format.

        Raises:
            ValueError: the format has no such thing; the message says what it has.
        """
        return dtype, quant

    @abstractmethod
    def tensors(self, model: Model) -> Sequence[Sequence[Wanted]]:
        """What is written, in order; what is in one list stays in one file.

        Raises:
            CheckpointError: the format cannot take the model.
            UnsupportedCastError: it cannot take a dtype.
        """

    @abstractmethod
    def files(
        self, model: Model, entries: Sequence[Sequence[Entry]], max_nbytes: int
    ) -> Sequence[OutFile]:
        """The files, of at most ``max_nbytes`` each unless one list of entries is longer.

        Raises:
            CheckpointError: the format cannot hold them.
        """

    def documents(
        self, model: Model, files: Sequence[OutFile], sums: Mapping[str, str]
    ) -> Mapping[str, bytes]:
        """Small files beside them, by name; the last one is published after all other files.

        Args:
            model: the model.
            files: the files.
            sums: with `wants_sums` by path the md5 sum of each file, in hexadecimal. It is called
                once with zeros in their place, to know how long the documents are.
        """
        return {}

    def notes(self, model: Model) -> Sequence[str]:
        """What a user may want to know of, one sentence each."""
        return ()


_writers: dict[str, FormatWriter] = {}


def register_writer(writer: FormatWriter) -> None:
    """Make a format known by its name: its file calls this when it is imported."""
    assert _writers.setdefault(writer.name, writer) is writer, writer.name


def writers() -> Mapping[str, FormatWriter]:
    """All writers by their names; imports the files of this package."""
    import_all()
    return dict(sorted(_writers.items(), key=lambda item: (item[0] != SAFETENSORS, item[0])))
