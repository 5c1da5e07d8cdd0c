"""Readers of file formats: how a file is recognized, and how its header is read.

To read a new format, derive a class from `FormatReader`, and give it a row in `FORMATS`, or an
entry point of ``streamload.formats``. `open_checkpoint` finds its files, and everything works on
the `Checkpoint`: inspect, plan, loads, nodes, offload, convert. A header has Hugging Face's names,
safetensors dtypes, shapes and file ranges, and besides:

- `Header.stored` describes the blocks of a quantized weight, which is one U8 tensor; a layout of
  `streamload.codecs` decodes them;
- `Header.turns` has permutations of rows, and transposes;
- `Header.views` has tensors whose elements are not contiguous;
- `Header.config` replaces ``config.json``; `FormatReader.documents` makes other files, such as
  ``tokenizer.json``, if `convert` needs them.

A reader never trusts a number in a file: it reads ranges through `File.read`, which returns no more
bytes than the file has, and raises HeaderError or TruncatedFileError for an invalid file.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from streamload.core.location import Location
from streamload.core.registry import Registry, Row, load
from streamload.errors import HeaderError, TruncatedFileError
from streamload.files.folder import open_file
from streamload.files.header import SAFETENSORS, Header, check_tensors
from streamload.files.local import LocalFile

# fmt: off
#: Suffixes of files with weights in formats that are not read, for errors.
UNREAD_SUFFIXES = (
    ".dduf", ".ggml", ".h5", ".keras", ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot",
    ".pb", ".tflite",
)
# fmt: on
#: First bytes of a file that `FormatReader.looks` gets.
HEAD_NBYTES = 512


#: What is given for a file of weights by mistake: the pattern of its first bytes, its kind, and
#: what is wanted in its place.
_LOOKALIKES: Sequence[tuple[re.Pattern[bytes], tuple[str, str]]] = [
    (re.compile(pattern, re.I | re.S), (what, instead))
    for pattern, what, instead in (
        (
            rb"version https://git-lfs",
            "a Git LFS pointer",
            "the file: run `git lfs pull`",
        ),
        (rb"\s*<(!doctype|html|\?xml)", "a web page", "the file itself: download it again"),
        (rb"\s*[{[][^\0-\x08]*\Z", "JSON, such as a server's error", "the file: download it again"),
        (rb"(\.\.?/|/)[^\0-\x1f]*\Z", "the text of a link", "the file that it leads to"),
        (rb"\x93NUMPY", "an array of numpy", "a file of tensors by name"),
        (rb"\x89HDF", "an HDF5 file", "the model saved as safetensors"),
        (rb"PK\x03\x04", "a zip archive", "the file in it, unpacked"),
        (rb"[^\0-\x08\x0e-\x1f\xf8-\xff]{9,}\Z", "text", "the file: download it again"),
    )
]


class File(Protocol):
    """A file of this machine or of a server, open to read its header."""

    @property
    def path(self) -> Location:
        """The file; if it is on a server, with the version that is read."""

    @property
    def nbytes(self) -> int:
        """The file's length in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``, exclusive; fewer if the file ends before.

        On a server each call is a request, except for the first 256 KiB: read in long pieces.
        Raises CheckpointError: they cannot be read.
        """


def read_exactly(file: File, start: int, stop: int, what: str) -> bytes:
    """Return bytes ``start`` to ``stop``; raise TruncatedFileError about ``what`` for fewer."""
    raw = file.read(start, stop)
    if len(raw) < stop - start:
        raise TruncatedFileError(file.path, f"{what} is cut off", stop, file.nbytes)
    return raw


class FormatReader(ABC):
    """Base class of a format's reader of headers; its module names the format's description."""

    def __init__(self, key: str | None = None) -> None:
        """``key``: of the dict in a file that is the checkpoint, see `open_checkpoint`."""
        self.key = key

    def looks(self, head: bytes) -> bool:
        """Return whether a file is of this format that begins with ``head`` (`HEAD_NBYTES`).

        `Format.magic` matches ``head``.
        """
        return True

    @abstractmethod
    def read_header(self, file: File) -> Header:
        """Return the validated header of a file. No data is read.

        Raises:
            HeaderError: the header breaks a rule of the format.
            TruncatedFileError: the file is shorter than its header states.
            CheckpointError: it cannot be read.
        """

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        """Return the files that hold weights among ``names``, a folder's files of this format."""
        return names

    def in_file(self, header: Header) -> Header:
        """Return a header with names, shapes and bytes as the file has them, not its models.

        Raises CheckpointError: the file cannot be read again.
        """
        return header

    def siblings(self, header: Header) -> Sequence[str]:
        """Return the file names of an opened file's set, all in its folder; () for a single one."""
        return ()

    def documents(self, headers: Sequence[Header]) -> Mapping[str, bytes]:
        """Return the bytes of other files that a checkpoint's files contain, by file name.

        A tokenizer, for example, but not config.json; for conversion to safetensors. Raises
        CheckpointError: the files cannot be read.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class Format(Row):
    """A file format: how its files are recognized, what reads them and what writes them.

    Attributes:
        reads: its `FormatReader`, to import: "module:class"; "" for none.
        writes: its `FormatWriter`, in the same way.
        suffixes: suffixes of its files, in lower case, with the dot.
        magic: pattern of the first bytes of its files; `FormatReader.looks` decides if files of
            others match it, too.
        single: usual name of a folder's only file; "" for none.
        index: usual name of the JSON that lists the files of a set, as safetensors has; "" for
            none.
        untyped: whether files may hold bytes without a dtype and a shape: `open_checkpoint` takes
            both from another checkpoint (``like=``).
        has_keys: whether files hold dicts, of which ``key`` may be the checkpoint.
    """

    reads: str = ""
    writes: str = ""
    suffixes: tuple[str, ...] = ()
    magic: bytes = b"(?!)"
    single: str = ""
    index: str = ""
    untyped: bool = False
    has_keys: bool = False
    key: str | None = None

    def reader(self) -> FormatReader:
        """Import and return the reader."""
        found: FormatReader = load(self.reads)(self.key)
        return found

    def begins(self, head: bytes) -> bool:
        """Return whether ``head`` matches `magic`."""
        return re.match(self.magic, head, re.DOTALL) is not None

    def looks(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` is of this format."""
        return self.begins(head) and self.reader().looks(head)

    def keyed(self, key: str | None) -> Format:
        """Return the format of the dict at ``key`` in files; ValueError if they have none."""
        if key is None:
            return self
        if not self.has_keys:
            wrong = f"key={key!r} is for files that torch.save writes, not for {self.name}"
            raise ValueError(wrong)
        return replace(self, key=key)


_LEGACY = rb".{0,19}\x8a\nl\xfc\x9cF\xf9 j|.{0,4}L119547037146038801333356"
#: All formats. A name or first bytes select a row; its reader is imported then.
FORMATS = Registry(
    "streamload.formats",
    Format,
    Format(
        name=SAFETENSORS,
        reads="streamload.formats.safetensors:Safetensors",
        writes="streamload.formats.safetensors:SafetensorsWriter",
        suffixes=(".safetensors",),
        magic=rb".{3}[\x00-\x05]\x00{4}\{",
        single="model.safetensors",
        index="model.safetensors.index.json",
    ),
    Format(
        name="gguf",
        reads="streamload.formats.gguf.reader:GGUF",
        writes="streamload.formats.gguf.writer:GGUF",
        suffixes=(".gguf",),
        magic=b"GGUF",
        single="model.gguf",
    ),
    Format(
        name="irpa",
        reads="streamload.formats.irpa:Irpa",
        writes="streamload.formats.irpa:IrpaWriter",
        suffixes=(".irpa",),
        magic=b"IRPA",
        single="model.irpa",
        index="model.irpa.index.json",
        untyped=True,
    ),
    Format(
        name="torch",
        reads="streamload.formats.torch.archive:TorchSave",
        suffixes=(".pth", ".bin", ".pt", ".ckpt"),
        magic=rb"PK\x03\x04|" + _LEGACY,
        single="pytorch_model.bin",
        index="pytorch_model.bin.index.json",
        has_keys=True,
    ),
    Format(
        name="dcp",
        reads="streamload.formats.torch.dcp:Dcp",
        suffixes=(".distcp",),
        magic=rb"PK\x03\x04.{26}[^/]+/data(\.pkl|/\d)|\x80|" + _LEGACY,
        has_keys=True,
    ),
    Format(name="llm.c", writes="streamload.formats.llmc:LlmC"),
    Format(name="mlc", writes="streamload.formats.mlc.writer:MLC"),
)
#: The format that is looked for first.
DEFAULT = FORMATS[SAFETENSORS]


def known_suffixes() -> list[str]:
    """Return patterns of the files of all formats, for errors."""
    return [f"*{suffix}" for row in FORMATS.values() for suffix in row.suffixes]


def format_of(file: File) -> Format:
    """Return a file's format: safetensors by name, others by the first bytes, else by name.

    Raise HeaderError for a file with neither the name nor the first bytes of any format.
    """
    if file.path.name.endswith(DEFAULT.suffixes):
        return DEFAULT
    head, name, rows = file.read(0, HEAD_NBYTES), file.path.name.lower(), FORMATS.values()
    for row in chain((row for row in rows if name.endswith(row.suffixes)), rows):
        if row.looks(head):
            return row
    named = [row for row in rows if name.endswith(row.suffixes)]
    if not named and (known := _lookalike(head)) is not None:
        raise HeaderError(file.path, "is not a weights file", ", ".join(known_suffixes()), known[0])
    return (*named, DEFAULT)[0]  # which will refuse the file


def _lookalike(head: bytes) -> tuple[str, str] | None:
    """Return what a file is that begins with ``head``, and what to do, by `_LOOKALIKES`."""
    return next((told for pattern, told in _LOOKALIKES if pattern.match(head)), None)


def _told(file: File, format: Format) -> HeaderError | None:
    """Return the error for a file that ``format`` refused and that is known to be another thing."""
    head = file.read(0, HEAD_NBYTES)
    if not head or format.begins(head):
        return None
    fail = partial(HeaderError, file.path, f"is not a {format.name} file")
    for other in FORMATS.values():
        if other.looks(head):
            stem = file.path.name.removesuffix(Path(file.path.name).suffix)
            return fail(f"the name {stem}{other.suffixes[0]}", f"a {other.name} file")
    known = _lookalike(head)
    return None if known is None else fail(known[1], known[0])


def read_header(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    key: str | None = None,
) -> Header:
    """Return the header of a file of any format; no data is read."""
    with open_file(path) as file:
        chosen = (format or format_of(file)).keyed(key)
        try:
            header = chosen.reader().read_header(file)
        except (HeaderError, TruncatedFileError) as error:
            if error.tensor is None and (told := _told(file, chosen)) is not None:
                raise told from error
            raise
    if isinstance(file, LocalFile):
        header = replace(header, state=file.state)
    check_tensors(header.path, len(header.tensors))
    return header
