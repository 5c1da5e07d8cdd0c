"""The header of a checkpoint's file in any format, and the tools to read one.

Each format is a file of `streamload.formats`. Here are tensors, dtypes and file ranges, the open
file, and the strict JSON that headers and indexes are written in.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from streamload.core.bounded_json import check_nesting
from streamload.core.location import Location, Url
from streamload.core.memory import first_that_fits
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError
from streamload.files.guard import FileState

#: The longest JSON of a header or an index that is read, in bytes: safetensors' own limit.
MAX_HEADER_NBYTES = 100_000_000

_MAX_INT_LENGTH = len(str(-(2**64 - 1)))  # in characters
# A file of JSON may be longer than memory has room for: it is held three times while it is parsed,
# and the objects of a member take 220 to 250 bytes. Shorter ones than this are not checked.
_LONG_NBYTES = 2**16
_COPIES = 3
_MEMBER_NBYTES = 280
_LISTED = 8  # names shown in a message
_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Turn(NamedTuple):
    """The permutation of a tensor's rows in its file, if models have another order.

    Rows seen as (groups, outer, inner), with the last two axes swapped, are those of models, as of
    a `streamload.core.tensors.RowTranspose`. ``shape`` is the models' if the file has another one.
    """

    groups: int
    outer: int
    inner: int
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor whose elements are not contiguous in its file.

    It gets a place after the file's end, from byte ``start`` on, where they are contiguous; see
    `streamload.files.strided`. Its first element is at the file byte ``at``. No length of the shape
    is 0; strides count bytes, 0 or more.
    """

    start: int
    at: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Last byte of its place, exclusive."""
        return self.start + self.itemsize * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored blocks of a quantized weight, if its file describes them.

    The weight is a tensor of U8 in the header, (rows, bytes of a row), and the only member of a
    `streamload.codecs.weights.QuantizedWeight`. ``kind`` is a key of `PACKED`, ``shape`` the
    unpacked one, ``block`` the elements that share a scale along each of the last axes, and
    ``bits`` those of a value.
    """

    kind: str
    shape: tuple[int, ...]
    block: tuple[int, ...]
    bits: int


#: The name of the format that all are converted to by default.
SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Header:
    """The content of one file; valid.

    Attributes:
        path: the file.
        file_nbytes: its length in bytes, in agreement with the header.
        data_start: first byte of the data, counted from the start of the file.
        tensors: by first byte; tensors without elements come before the one they touch, and those
            at the same place are in order of name. In formats other than safetensors there may be
            bytes between them, and they may share bytes.
        metadata: its ``__metadata__``; read-only.
        state: of the file when its header was read; None for a URL, or if unknown.
        format: the name of its format.
        config: its settings of the model, as ``config.json`` has them; read-only.
        stored: by tensor, how a quantised weight is stored; read-only.
        turns: by tensor, the permutation of its rows; read-only.
        views: tensors whose elements are not together in the file, by their first bytes, all after
            its end.
        untyped: names of tensors without dtype and shape: they are bytes.
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

    @property
    def reach_nbytes(self) -> int:
        """The last byte that a tensor has, exclusive, of the file or of the views after it."""
        return self.views[-1].stop if self.views else self.file_nbytes

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        # a mapping proxy cannot be pickled
        values = (getattr(self, each.name) for each in fields(self))
        return Header, tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)

    def fingerprint(self) -> dict[str, str | int]:
        """A fingerprint that changes when the file does, for JSON; the file is not read for it.

        A local file keeps it wherever it is moved: users can set only one of its times, and its
        device is left out since many filesystems get another number at each mount.
        """
        found: dict[str, str | int] = {"nbytes": self.file_nbytes}
        if (state := self.state) is not None:
            found |= {"mtime_ns": state.written_ns, "inode": state.inode}
            return found | {"ctime_ns": state.changed_ns}
        if isinstance(self.path, Url):
            found["version"] = self.path.version
        return {"path": str(self.path)} | found


_MAPPINGS = ("metadata", "config", "stored", "turns")


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; anything else is refused at once, without opening it.

    It has no buffer, and reads nothing ahead.
    """
    try:
        # before it is opened: opening a FIFO waits for a writer, opening a device may do anything
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError) as error:
        dangling = os.path.islink(path)
        raise ShardNotFoundError(
            path, "a symlink that leads nowhere" if dangling else "no such file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unreadable(path, error) from error
    found = _FILE_TYPES.get(stat.S_IFMT(mode), "something else")
    raise CheckpointError(path, "is not a file", "a regular file", found)


def check_memory(path: Location, nbytes: int, raw: bytes = b"") -> None:
    """Raise PlanInfeasibleError if free memory has no room to parse ``nbytes`` of JSON.

    ``raw`` is the JSON itself, if it was read already.
    """
    if nbytes >= _LONG_NBYTES:
        needed_nbytes = _COPIES * nbytes + _MEMBER_NBYTES * raw.count(b":")
        first_that_fits([(None, needed_nbytes)], [(f"the JSON of {path}", needed_nbytes)])


def is_there(path: Path) -> bool:
    """Whether the path exists; raises OSError if the system hides it.

    `Path.exists` hides that from Python 3.14 on.
    """
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
    """The CheckpointError for an error of the operating system, to be raised ``from`` it."""
    found = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CheckpointError(path, "cannot be read", found=found)


def parse_json_object(raw: bytes, path: Location) -> dict[str, Any]:
    """Parse the strict JSON of headers and indexes: one object, in UTF-8, that begins with ``{``.

    NaN and infinities are refused, and integers far beyond 64 bits. An object in which a name
    occurs twice becomes a `RepeatedNames`.
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
        raise HeaderError(
            path,
            "the JSON is not UTF-8",
            "UTF-8",
            f"{error.object[error.start : error.end]!r} at byte {error.start} of the JSON",
        ) from error
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        found = "too many levels of nesting" if deep else str(error)
        raise HeaderError(path, "the JSON is not valid", "JSON", found) from error
    return document


def check_strings(entries: Any, path: Location, what: str) -> dict[str, str]:
    """Hold parsed JSON to an object of strings, each name once, or raise a HeaderError of it."""
    if type(entries) is not dict:
        if isinstance(entries, RepeatedNames):
            expected, found = "each name once", f"{describe(entries.name)} more than once"
        else:
            expected, found = "an object", describe(entries)
        raise HeaderError(path, f"{what} is not valid", expected, found)
    for key, value in entries.items():
        if type(value) is not str or not (is_text(key) and is_text(value)):
            raise HeaderError(
                path, f"{what} is not valid", "strings only", f"{describe(key)}: {describe(value)}"
            )
    return entries


def is_text(text: str) -> bool:
    """Whether a string can be written as UTF-8: JSON escapes can spell half a surrogate pair."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def some(names: Sequence[str], count: int | None = None) -> str:
    """The first few names of so many, for an error."""
    rest = (len(names) if count is None else count) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def describe(value: object) -> str:
    """A JSON value in a few words, for an error; short whatever the value."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
        case _:
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
