"""File formats that are read: how a file is recognized, and how its header is read.

A format is a file of this package. To add one that is read, derive a class from `FormatReader`,
with its name, the suffixes of its files, `FormatReader.looks` (from the first bytes alone) and
`FormatReader.read_header`, and call `register_reader` with an instance at the end of the file.
`open_checkpoint` finds its files, and everything works on the `Checkpoint`: inspect, plan, loads,
nodes, offload, convert. A header has Hugging Face's names, safetensors dtypes, shapes and file
ranges, and besides:

- `Header.stored` describes the blocks of a quantized weight, which is one tensor of U8; a layout of
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
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Protocol

from streamload.core.location import Location, Url
from streamload.errors import TruncatedFileError
from streamload.files import remote
from streamload.files.guard import FileState
from streamload.files.header import SAFETENSORS, Header, open_regular, unreadable
from streamload.files.limits import check_tensors

# fmt: off
#: Of files with weights in formats that are not read.
UNREAD_SUFFIXES = (
    ".dduf", ".ggml", ".h5", ".keras", ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot",
    ".pb", ".tflite",
)
# fmt: on
#: Bytes that `FormatReader.looks` gets.
HEAD_NBYTES = 512


class File(Protocol):
    """A file whose header is read: of this machine, or of a server."""

    @property
    def path(self) -> Location:
        """The file; of a server, with the version that is read."""

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop``, exclusive; fewer where the file ends before.

        Of a server each call is a request, but for the first 256 KiB: read in long pieces.

        Raises:
            CheckpointError: they cannot be read.
        """


def read_exactly(file: File, start: int, stop: int, what: str) -> bytes:
    """Read a whole range of a file; the TruncatedFileError names ``what``."""
    raw = file.read(start, stop)
    if len(raw) < stop - start:
        raise TruncatedFileError(file.path, f"{what} is cut off", stop, file.nbytes)
    return raw


class FormatReader(Protocol):
    """Reads the headers of a format; its module's docstring names the format's description.

    Attributes:
        name: of the format, as users write it.
        suffixes: of its files, in lower case, with the dot.
        single: the name of the file that is the checkpoint of a folder alone; "" for none.
        index: the name of the JSON that names the files of a set, as safetensors has; "" for none.
        untyped: whether files may hold bytes without a dtype and a shape: `open_checkpoint` gives
            them those of another checkpoint.
    """

    name: str
    suffixes: tuple[str, ...]
    single: str = ""
    index: str = ""
    untyped: bool = False

    def looks(self, head: bytes) -> bool:
        """Whether a file that begins with these bytes, `HEAD_NBYTES` or all, is of this format."""
        return False

    @abstractmethod
    def read_header(self, file: File) -> Header:
        """Read the header of a file. No byte of the data is read.

        Raises:
            HeaderError: the header breaks a rule of the format.
            TruncatedFileError: the file is shorter than its header says.
            CheckpointError: it cannot be read.
        """

    def keyed(self, key: str | None) -> FormatReader:
        """The reader of one of several dicts of tensors in a file; see `open_checkpoint`.

        Raises:
            ValueError: there is a key, and files of this format have none.
        """
        if key is None:
            return self
        raise ValueError(f"key={key!r} is for files that torch.save writes, not for {self.name}")

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        """Of the names of a folder's files of this format, those that hold weights."""
        return names

    def siblings(self, header: Header) -> Sequence[str]:
        """Names of all files of the set that a file belongs to, in its folder; () if it is alone.

        It is called if a user names one file.
        """
        return ()

    def documents(self, headers: Sequence[Header]) -> Mapping[str, bytes]:
        """The other files of a safetensors checkpoint, by their names, but config.json.

        Raises:
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
    "streamload.formats.mlc",
    "streamload.formats.torch.archive",
)
_readers: dict[str, FormatReader] = {}


def register_reader(reader: FormatReader) -> None:
    """Make a format known by its name: its file calls this when it is imported."""
    assert _readers.setdefault(reader.name, reader) is reader, reader.name


def default_reader() -> FormatReader:
    """The reader of safetensors; imports no other."""
    importlib.import_module("streamload.formats.safetensors")
    return _readers[SAFETENSORS]


def readers() -> Mapping[str, FormatReader]:
    """All readers by their names, safetensors first; imports the files of this package."""
    default_reader()
    import_all()
    return _readers


@cache
def import_all() -> None:
    """Import the modules of all formats."""
    for module in _MODULES:
        importlib.import_module(module)


def reader_of(file: File) -> FormatReader:
    """The reader of a file: by its name if that is enough, else by its first bytes.

    If no format recognizes the bytes, the format of the name refuses them.
    """
    default = default_reader()
    if file.path.name.endswith(default.suffixes):
        return default
    head = file.read(0, HEAD_NBYTES)
    named = [r for r in readers().values() if file.path.name.lower().endswith(r.suffixes)]
    for reader in (*named, *readers().values()):
        if reader.looks(head):
            return reader
    return (*named, default)[0]


def read_header(
    path: str | os.PathLike[str],
    *,
    reader: FormatReader | None = None,
    key: str | None = None,
) -> Header:
    """Read the header of a file of any format. No byte of the data is read."""
    with open_location(path) as file:
        header = (reader or reader_of(file)).keyed(key).read_header(file)
    if isinstance(file, LocalFile):
        header = replace(header, state=file.state)
    check_tensors(header.path, len(header.tensors))
    return header


class LocalFile:
    """A `File` of this machine."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file
        self.state = self.now()
        self.nbytes = self.state.nbytes

    def read(self, start: int, stop: int) -> bytes:
        """See `File.read`."""
        raw = b""
        stop = min(stop, self.nbytes)
        try:
            while start < stop and (more := os.pread(self._file.fileno(), stop - start, start)):
                raw, start = raw + more if raw else more, start + len(more)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return raw

    def now(self) -> FileState:
        """Its state at this time."""
        try:
            return FileState.of(self._file.fileno())
        except OSError as error:
            raise unreadable(self.path, error) from error


@contextmanager
def open_location(path: str | os.PathLike[str]) -> Iterator[LocalFile | remote.RemoteFile]:
    """Yield an open file of this machine or a server, to read its header; see `open_file`."""
    if isinstance(path, Url):
        with remote.connections():
            yield remote.RemoteFile(path)
    else:
        with open_file(Path(path)) as file:
            yield file


@contextmanager
def open_file(path: Path) -> Iterator[LocalFile]:
    """Open a file of this machine; a change of it replaces any other error of the block."""
    with open_regular(path) as opened:
        file = LocalFile(path, opened)
        try:
            yield file
        finally:
            file.state.check(file.now(), path)
