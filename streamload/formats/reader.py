"""Readers of file formats: how a file is recognized, and how its header is read.

A format is a module of this package. To read a new one, derive a class from `FormatReader`,
with its name, the suffixes of its files, `FormatReader.looks` (from the first bytes alone) and
`FormatReader.read_header`, and call `register_reader` with an instance at the end of the file.
`open_checkpoint` finds its files, and everything works on the `Checkpoint`: inspect, plan, loads,
nodes, offload, convert. A header has Hugging Face's names, safetensors dtypes, shapes and file
ranges, and besides:

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

import importlib
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from io import FileIO
from pathlib import Path
from typing import Protocol

from streamload.core.location import Location, Url
from streamload.errors import HeaderError, TruncatedFileError
from streamload.files import remote
from streamload.files.guard import FileState
from streamload.files.header import SAFETENSORS, Header, open_regular, unreadable
from streamload.files.limits import check_tensors

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


class FormatReader(Protocol):
    """Base class of a format's reader of headers; its module names the format's description.

    Attributes:
        suffixes: suffixes of the format's files, in lower case, with the dot.
        single: usual name of a folder's only file; "" for none.
        index: usual name of the JSON that lists the files of a set, as safetensors has; "" for
            none.
        magic: first bytes of all of its files that files of others may have, too: the reader
            itself names the kind of such a file.
        untyped: whether files may hold bytes without a dtype and a shape: `open_checkpoint` takes
            both from another checkpoint (``like=``).
    """

    name: str
    suffixes: tuple[str, ...]
    single: str = ""
    index: str = ""
    magic: bytes = b""
    untyped: bool = False

    def looks(self, head: bytes) -> bool:
        """Return whether a file that begins with ``head`` (`HEAD_NBYTES`) is of this format."""
        return False

    @abstractmethod
    def read_header(self, file: File) -> Header:
        """Return the validated header of a file. No data is read.

        Raises:
            HeaderError: the header breaks a rule of the format.
            TruncatedFileError: the file is shorter than its header states.
            CheckpointError: it cannot be read.
        """

    def keyed(self, key: str | None) -> FormatReader:
        """Return a reader of the dict at ``key`` in files (see `open_checkpoint`), self for None.

        Raises ValueError: there is a key, and files of this format have none.
        """
        if key is None:
            return self
        raise ValueError(f"key={key!r} is for files that torch.save writes, not for {self.name}")

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


#: Modules that register readers and writers when they are imported. A new one is added here.
_MODULES = (
    "streamload.formats.safetensors",
    "streamload.formats.gguf.reader",
    "streamload.formats.gguf.writer",
    "streamload.formats.irpa",
    "streamload.formats.llmc",
    "streamload.formats.mlc.writer",
    "streamload.formats.torch.archive",
    "streamload.formats.torch.dcp",
)
_readers: dict[str, FormatReader] = {}


def register_reader(reader: FormatReader) -> None:
    """Register a format's reader under its name; its module calls this when it is imported."""
    assert _readers.setdefault(reader.name, reader) is reader, reader.name


def default_reader() -> FormatReader:
    """Return the reader of safetensors; imports no other format."""
    importlib.import_module("streamload.formats.safetensors")
    return _readers[SAFETENSORS]


def readers() -> Mapping[str, FormatReader]:
    """Return all readers by name, safetensors first; imports all formats."""
    default_reader()
    import_all()
    return _readers


@cache
def import_all() -> None:
    """Import the modules of all formats, which register their readers and writers."""
    for module in _MODULES:
        importlib.import_module(module)


def reader_of(file: File) -> FormatReader:
    """Return a file's reader: safetensors by name, others by the first bytes, else by name.

    Raise HeaderError for a file with neither the name nor the first bytes of any format.
    """
    # the reader that only the name suggests will refuse the file
    default = default_reader()
    if file.path.name.endswith(default.suffixes):
        return default
    head = file.read(0, HEAD_NBYTES)
    named = [r for r in readers().values() if file.path.name.lower().endswith(r.suffixes)]
    for reader in (*named, *readers().values()):
        if reader.looks(head):
            return reader
    if not named and (known := _lookalike(head)) is not None:
        suffixes = [f"*{suffix}" for each in readers().values() for suffix in each.suffixes]
        raise HeaderError(file.path, "is not a weights file", ", ".join(suffixes), known[0])
    return (*named, default)[0]


def _lookalike(head: bytes) -> tuple[str, str] | None:
    """Return what a file is that begins with ``head``, and what to do, by `_LOOKALIKES`."""
    return next((told for pattern, told in _LOOKALIKES if pattern.match(head)), None)


def _told(file: File, reader: FormatReader) -> HeaderError | None:
    """Return the error for a file that ``reader`` refused and that is known to be another thing."""
    head = file.read(0, HEAD_NBYTES)
    if not head or reader.looks(head) or (reader.magic and head.startswith(reader.magic)):
        return None
    fail = partial(HeaderError, file.path, f"is not a {reader.name} file")
    for other in readers().values():
        if other is not reader and other.looks(head):
            stem = file.path.name.removesuffix(Path(file.path.name).suffix)
            return fail(f"the name {stem}{other.suffixes[0]}", f"a {other.name} file")
    known = _lookalike(head)
    return None if known is None else fail(known[1], known[0])


def read_header(
    path: str | os.PathLike[str],
    *,
    reader: FormatReader | None = None,
    key: str | None = None,
) -> Header:
    """Return the header of a file of any format; no data is read."""
    with open_location(path) as file:
        chosen = (reader or reader_of(file)).keyed(key)
        try:
            header = chosen.read_header(file)
        except (HeaderError, TruncatedFileError) as error:
            if error.tensor is None and (told := _told(file, chosen)) is not None:
                raise told from error
            raise
    if isinstance(file, LocalFile):
        header = replace(header, state=file.state)
    check_tensors(header.path, len(header.tensors))
    return header


class LocalFile:
    """An open local file as a `File`; ``state`` is its identity and times when it was opened."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file
        self.state = self.now()
        self.nbytes = self.state.nbytes

    def read(self, start: int, stop: int) -> bytes:
        raw = b""
        stop = min(stop, self.nbytes)
        try:
            while start < stop and (more := os.pread(self._file.fileno(), stop - start, start)):
                raw, start = raw + more if raw else more, start + len(more)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return raw

    def now(self) -> FileState:
        """Return the file's present state, to detect changes."""
        try:
            return FileState.of(self._file.fileno())
        except OSError as error:
            raise unreadable(self.path, error) from error


@contextmanager
def open_location(path: str | os.PathLike[str]) -> Iterator[LocalFile | remote.RemoteFile]:
    """Yield an open file, a local one by `open_file` or one on a server, to read its header."""
    if isinstance(path, Url):
        with remote.connections():
            yield remote.RemoteFile(path)
    else:
        with open_file(Path(path)) as file:
            yield file


@contextmanager
def open_file(path: Path) -> Iterator[LocalFile]:
    """Yield an open local file; raise on leaving if it has changed, instead of any other error."""
    with open_regular(path) as opened:
        file = LocalFile(path, opened)
        try:
            yield file
        finally:
            file.state.check(file.now(), path)
