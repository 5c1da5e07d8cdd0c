"""The header of a checkpoint's file in any format, and tools to read headers.

Each module of `streamload.formats` parses a format into a `Header`: tensors, dtypes and file
ranges. The tools open files and parse the strict JSON of headers and indexes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Self

from streamload.core.bounded_json import check_nesting
from streamload.core.location import Location, Url
from streamload.core.memory import first_that_fits
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.errors import (
    CheckpointError,
    FileChangedError,
    HeaderError,
    ShardNotFoundError,
    TruncatedFileError,
)

#: The longest JSON of a header or an index that is read, in bytes: safetensors' own limit.
MAX_HEADER_NBYTES = 100_000_000

_MAX_INT_LENGTH = len(str(-(2**64 - 1)))  # in characters
# JSON may need more memory than is free: it is held three times while it is parsed, and the objects
# of a member take 220 to 250 bytes. Shorter JSON than this is not checked.
_LONG_NBYTES = 2**16
_COPIES = 3
_MEMBER_NBYTES = 280
#: What to do to change a file that is read, for errors.
RENAME = "write new files beside it and rename them over it, then load again"
_LISTED = 8  # names shown in a message
_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class FileState(NamedTuple):
    """The identity, length and times of a file, to detect that it was changed or replaced."""

    device: int  # number of the filesystem
    inode: int
    nbytes: int
    written_ns: int  # mtime
    changed_ns: int  # ctime, which users cannot set
    # links, mode, owner and group: changing them sets ``changed_ns`` as well
    others: tuple[int, int, int, int]

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> Self:
        """Return the state of a path or a descriptor; raises OSError."""
        found = os.stat(file)
        others = (found.st_nlink, found.st_mode, found.st_uid, found.st_gid)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(found.st_dev, found.st_ino, found.st_size, *times, others)

    def check(self, now: FileState, path: Path) -> None:
        """Raise CheckpointError if ``now`` has other content; links, mode and owner may differ."""
        if self == now:
            return
        problem = f"has changed since its header was read; {RENAME}"
        if self[:2] != now[:2]:
            problem = "has been replaced since its header was read; load again"
            before, found = (f"inode {s.inode} of device {s.device}" for s in (self, now))
        elif now.nbytes < self.nbytes:
            problem = "has become shorter since its header was read"
            raise TruncatedFileError(path, problem, self.nbytes, now.nbytes)
        elif now.nbytes != self.nbytes:
            before, found = (f"{s.nbytes} bytes" for s in (self, now))
        elif now.written_ns != self.written_ns:
            before, found = (f"last written at {_time(s.written_ns)}" for s in (self, now))
        elif now.changed_ns != self.changed_ns and now.others == self.others:
            before, found = (f"last changed at {_time(s.changed_ns)}" for s in (self, now))
        else:
            return
        raise FileChangedError(path, problem, before, found)


def _time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest:09} UTC"


class Turn(NamedTuple):
    """What brings a tensor of the file to that of the model: a permutation, or another shape."""

    transpose: RowTranspose | None
    shape: tuple[int, ...] | None = None  # the model's if the file's differs


class Chunk(NamedTuple):
    """A box of a tensor, from index ``origin`` on, whose elements are strided in the file's bytes.

    ``at`` is the file byte of its first element. No length of the shape is 0; strides count bytes,
    0 or more.
    """

    origin: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor whose elements are not contiguous in its file: chunks that cover it, each once.

    It gets a virtual range after the file's end, from byte ``start`` on, where its elements are
    contiguous; see `streamload.files.reader`. The chunks are in order of their origins. ``shift``
    is added to the elements, which are float32 if it is not 0.
    """

    start: int
    itemsize: int
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    shift: float = 0.0

    @classmethod
    def strided(
        cls,
        start: int,
        at: int,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        shift: float = 0.0,
    ) -> View:
        """Return the view of one chunk."""
        return cls(start, itemsize, shape, (Chunk((0,) * len(shape), shape, at, strides),), shift)

    @property
    def stop(self) -> int:
        """End of the virtual range, exclusive."""
        return self.start + self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a file stores a quantized weight as blocks of values and scales.

    The header has the weight as a U8 tensor (rows, bytes of a row), the only member of a
    `streamload.codecs.weights.QuantizedWeight`. ``kind`` is a key of `PACKED`, ``shape`` the shape
    in elements, ``block`` the elements that share a scale along each of the last axes, and ``bits``
    the bits of a value.
    """

    kind: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    bits: int


class Part(NamedTuple):
    """One of the files whose bytes a header's views address as one, in order."""

    path: Location
    nbytes: int
    state: FileState | None = None


#: The name of the default format to convert to.
SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Header:
    """The validated header of one checkpoint file: its tensors and their file ranges.

    Attributes:
        file_nbytes: the file's length in bytes, in agreement with the header.
        data_start: first byte of the data, counted from the start of the file.
        tensors: by first byte; tensors without elements come before the one they touch, and those
            at the same place are in order of name. In formats other than safetensors there may be
            bytes between them, and they may share bytes.
        state: the file's state when its header was read; None for a URL, or if unknown.
        config: the model's settings in the file, as ``config.json`` has them; read-only.
        stored: by tensor name, how a quantized weight is stored; read-only.
        turns: by tensor name, the permutation of the rows; read-only.
        views: the ranges of tensors that are not contiguous, in order, all after the file's end.
        untyped: names of tensors for which the file has bytes but no dtype and shape.
        parts: other files with bytes of the tensors, which are all views: their bytes follow those
            of ``path``.
        versions: by name of a module, the facts that torch wrote for its own code; read-only.
    """

    path: Location
    file_nbytes: int
    data_start: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    state: FileState | None = field(default=None, compare=False)
    format: str = SAFETENSORS
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stored: Mapping[str, Stored] = field(default_factory=dict, repr=False)
    turns: Mapping[str, Turn] = field(default_factory=dict, repr=False)
    views: tuple[View, ...] = field(default=(), repr=False)
    untyped: frozenset[str] = field(default=frozenset(), repr=False)
    parts: tuple[Part, ...] = field(default=(), compare=False, repr=False)
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    @property
    def files(self) -> tuple[Part, ...]:
        """All files with bytes of the tensors."""
        return Part(self.path, self.file_nbytes, self.state), *self.parts

    @property
    def reach_nbytes(self) -> int:
        """End of the file and of the views after it, exclusive: no tensor reaches further."""
        return self.views[-1].stop if self.views else self.file_nbytes

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # a mapping proxy cannot be pickled
        values = (getattr(self, each.name) for each in fields(self))
        return Header, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def fingerprint(self) -> dict[str, str | int]:
        """Return the file's length, times and inode as a JSON object; reads no file.

        The object changes if the file is changed or replaced, but not if the file is moved. If
        `state` is None it has the path instead, with the length, and of a URL the version.
        """
        # both times, since users can set only one; no device number, since many filesystems get
        # another one at each mount
        found: dict[str, str | int] = {"nbytes": self.file_nbytes}
        for part in self.parts:
            found[part.path.name] = str(part.state and part.state[1:5])
        if (state := self.state) is not None:
            found |= {"mtime_ns": state.written_ns, "inode": state.inode}
            return found | {"ctime_ns": state.changed_ns}
        if isinstance(self.path, Url):
            found["version"] = self.path.version
        return {"path": str(self.path)} | found


_MAPPINGS = ("metadata", "config", "stored", "turns", "versions")


def open_regular(path: Path) -> FileIO:
    """Open a regular file, unbuffered; raise CheckpointError for anything else, never opened."""
    try:
        # before opening: opening a FIFO waits for a writer, and a device may do anything
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError) as error:
        dangling = os.path.islink(path)
        raise ShardNotFoundError(
            path, "a symlink that leads nowhere" if dangling else "no such file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: an impossible name
        raise unreadable(path, error) from error
    found = _FILE_TYPES.get(stat.S_IFMT(mode), "something else")
    raise CheckpointError(path, "is not a file", "a regular file", found)


def check_memory(path: Location, nbytes: int, raw: bytes = b"") -> None:
    """Raise PlanInfeasibleError if free memory is too small to parse ``nbytes`` of JSON.

    ``raw`` is the JSON, if it was read already: its members are counted, too.
    """
    # ``raw`` is the JSON itself if it was read already: its colons give the number of members
    if nbytes >= _LONG_NBYTES:
        needed_nbytes = _COPIES * nbytes + _MEMBER_NBYTES * raw.count(b":")
        first_that_fits([(None, needed_nbytes)], [(f"the JSON of {path}", needed_nbytes)])


def is_there(path: Path) -> bool:
    """Return whether a path exists; raise OSError if permissions prevent the check."""
    # `Path.exists` suppresses that error from Python 3.14 on
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP):
            return False
        raise
    except ValueError:  # a zero byte
        return False
    return True


def unreadable(path: Location, error: OSError | ValueError) -> CheckpointError:
    """Return the CheckpointError for an error of the operating system; raise it ``from`` that."""
    found = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CheckpointError(path, "cannot be read", found=found)


def parse_json_object(raw: bytes, path: Location) -> dict[str, Any]:
    """Return the object in the strict JSON of a header or an index: UTF-8 that begins with ``{``.

    Raise HeaderError for anything else, NaN, infinities, and integers far beyond 64 bits. An object
    in which a name occurs twice becomes a `RepeatedNames`.
    """
    check_memory(path, len(raw), raw)
    if raw[:1] != b"{":
        raise HeaderError(path, "is not a JSON object", "'{' as its first byte", repr(raw[:1])[1:])
    try:
        text = raw.decode("utf-8")
        check_nesting(raw)
        document: dict[str, Any] = json.loads(
            text, object_pairs_hook=_object, parse_int=_parse_int, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        found = f"{error.object[error.start : error.end]!r} at byte {error.start} of the JSON"
        raise HeaderError(path, "the JSON is not UTF-8", "UTF-8", found) from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        found = "too many levels of nesting" if deep else str(error)
        raise HeaderError(path, "the JSON is not valid", "JSON", found) from error
    return document


def check_strings(entries: Any, path: Location, what: str) -> dict[str, str]:
    """Return ``entries``; raise HeaderError about ``what`` unless a JSON object of strings."""
    found = check_object(entries, path, what)
    for key, value in found.items():
        if type(value) is not str or not (is_text(key) and is_text(value)):
            raise HeaderError(
                path, f"{what} is not valid", "strings only", f"{describe(key)}: {describe(value)}"
            )
    return found


def check_object(value: object, path: Location, what: str) -> dict[str, Any]:
    """Return ``value``; raise HeaderError about ``what`` unless an object with unique names."""
    if type(value) is dict:
        return value
    if isinstance(value, RepeatedNames):
        expected, found = "each name once", f"{describe(value.name)} more than once"
    else:
        expected, found = "an object", describe(value)
    raise HeaderError(path, f"{what} is not valid", expected, found)


def check_entry(name: str, entry: object, path: Location) -> dict[str, Any]:
    """Return a tensor's entry; raise HeaderError unless it is an object and the name is text."""
    if type(entry) is not dict:
        problem, expected, found = "the entry is not an object", "an object", describe(entry)
        if isinstance(entry, RepeatedNames):
            problem, expected = "a key is not unique", "each key once"
            found = f"{describe(entry.name)} more than once"
        raise HeaderError(path, problem, expected, found, tensor=name)
    check_name(name, path)
    return entry


def check_name(name: str, path: Location) -> None:
    """Raise HeaderError if a tensor's name cannot be written as UTF-8."""
    if not is_text(name):
        problem, found = "the name is not valid", "half a surrogate pair"
        raise HeaderError(path, problem, "Unicode text", found, tensor=name)


def is_text(text: str) -> bool:
    """Return whether a string can be written as UTF-8: JSON can escape half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def some(names: Sequence[str], count: int | None = None) -> str:
    """Return the first eight ``names`` as text for an error; ``count`` is their full number."""
    rest = (len(names) if count is None else count) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def describe(value: object) -> str:
    """Return a JSON value in a few words for an error, at most 80 characters."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class RepeatedNames(dict[str, Any]):
    """A JSON object in which ``name`` occurs more than once."""

    name: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    repeated = RepeatedNames(result)
    repeated.name = Counter(name for name, _ in pairs).most_common(1)[0][0]
    return repeated


def _parse_int(digits: str) -> int:
    # before the conversion, whose time grows with the square of the length
    if len(digits) > _MAX_INT_LENGTH:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits for opening a checkpoint from an untrusted source.

    Opening reads headers alone; its time and memory are proportional to their bytes. Without
    limits, each header may have 100 MB.

    Attributes:
        header_nbytes: most bytes of all headers and other JSON (config.json, an index) together;
            None for 100 MB of each.
        tensors: most tensors of all files together; None for any number.
    """

    header_nbytes: int | None = None
    tensors: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"Limits: {each.name} is an integer of 0 or more, not {value!r}")


@dataclass(slots=True)
class _Count:
    """Header bytes and tensors counted so far; a file that is read again counts once."""

    limits: Limits
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by file and part
    tensors: Counter[str] = field(default_factory=Counter)  # by file
    all_nbytes: int = 0  # the sums, kept since there may be very many files
    all_tensors: int = 0


_count: ContextVar[_Count | None] = ContextVar("limits", default=None)


@contextmanager
def limited(limits: Limits | None) -> Iterator[None]:
    """Apply ``limits`` to all headers read in the block; None applies the formats' own."""
    before = _count.set(None if limits is None else _Count(limits))
    try:
        yield
    finally:
        _count.reset(before)


def most_nbytes(path: Location, what: str = "") -> int:
    """Return the most bytes that a file's header, or its part ``what``, may have by the limits."""
    count = _count.get()
    if count is None or count.limits.header_nbytes is None:
        return MAX_HEADER_NBYTES
    others = count.all_nbytes - count.nbytes[str(path), what]
    return max(min(MAX_HEADER_NBYTES, count.limits.header_nbytes - others), 0)


def check_nbytes(path: Location, problem: str, nbytes: int, what: str = "") -> None:
    """Count bytes of a header to parse; raise HeaderError, with ``problem``, above the limits."""
    most = most_nbytes(path, what)
    if nbytes > most:
        limit = "" if most == MAX_HEADER_NBYTES else ", by limits="
        raise HeaderError(path, problem, f"at most {most} bytes{limit}", nbytes)
    if (count := _count.get()) is not None:
        count.all_nbytes += nbytes - count.nbytes[str(path), what]
        count.nbytes[str(path), what] = nbytes


def check_tensors(path: Location, tensors: int) -> None:
    """Count a file's tensors; raise HeaderError if all files have more than the limit."""
    count = _count.get()
    if count is None or count.limits.tensors is None:
        return
    count.all_tensors += tensors - count.tensors[str(path)]
    count.tensors[str(path)] = tensors
    if count.all_tensors > count.limits.tensors:
        expected = f"at most {count.limits.tensors}, by limits="
        raise HeaderError(path, "there are too many tensors", expected, count.all_tensors)
