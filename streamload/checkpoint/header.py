"""One safetensors header, parsed and held to the rules of the format.

A file is 8 bytes with the length N of the header (unsigned, little-endian), N bytes of JSON that
begin with ``{``, and the data. The JSON maps each tensor's name to its ``dtype``, ``shape`` and
``data_offsets`` (first byte and last byte, exclusive, counted from the start of the data);
``__metadata__`` maps strings to strings. The data is covered without gap or overlap.

Source: the format's description in the README of github.com/huggingface/safetensors, and the
checks of the safetensors crate, version 0.8. Two rules are stricter here than there, as the
description has them: names are unique, and ``__metadata__`` is not null. Unknown keys of a tensor's
entry are ignored, here as there.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import FileIO
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import numpy as np

from streamload.checkpoint.guard import FileState
from streamload.checkpoint.url import Location, Url
from streamload.dtypes import BY_CODE, DType
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.nesting import check_nesting
from streamload.planning.budget import first_that_fits

#: The longest header that the format allows, in bytes of JSON.
MAX_HEADER_NBYTES = 100_000_000

#: The length of the header comes first, in as many bytes.
PREFIX_NBYTES = 8
_MAX_U64 = 2**64 - 1
_MAX_INT_LENGTH = len(str(-_MAX_U64))  # in characters
_MOST_DIGITS = 4300  # that Python reads unless it is told otherwise
# A file of JSON may be longer than memory has room for: it is held three times while it is parsed,
# and the objects of a member take 220 to 250 bytes. What is shorter than this is not worth a look.
_LONG_NBYTES = 2**16
_COPIES = 3
_MEMBER_NBYTES = 280
_U64 = "an integer from 0 to 2**64 - 1"
_FILE_ORDER = attrgetter("start", "stop", "name")  # an empty tensor before the one it touches
_COLUMNS = tuple(map(itemgetter, ("dtype", "shape", "data_offsets")))

#: What is often found under the name of a safetensors file, by its first bytes.
_LOOKALIKES = {
    b"version ": "a Git LFS pointer, not the file that it stands for",
    b"<!DOCTYP": "a web page",
    b"<!doctyp": "a web page",
    b"PK\x03\x04": "a zip archive, as torch.save writes",
    b"GGUF": "a GGUF file",
}

_FILE_TYPES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint, and where its bytes lie.

    Attributes:
        name: its name; may be empty, is unique in its checkpoint.
        dtype: its dtype.
        shape: its shape; ``()`` for a scalar.
        shard: the file.
        start: first byte, counted from the start of the file.
        stop: last byte, exclusive; ``start`` where the tensor has no elements.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    shard: Location
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What one safetensors file says that it holds; valid.

    Attributes:
        path: the file.
        file_nbytes: its length in bytes, exactly what the header calls for.
        data_start: first byte of the data, counted from the start of the file.
        tensors: by first byte; tensors without elements come before the one they touch, and those
            at the same place are in order of name.
        metadata: its ``__metadata__``; read-only.
        state: what the file was when its header was read; None for a URL, or where not known.
    """

    path: Location
    file_nbytes: int
    data_start: int
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    state: FileState | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    def __reduce__(self) -> tuple[Any, ...]:
        # a mapping proxy cannot be pickled
        rest = (self.path, self.file_nbytes, self.data_start, self.tensors)
        return Header, (*rest, dict(self.metadata), self.state)

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


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of a safetensors file. No byte of the data is read.

    Raises:
        HeaderError: the header breaks a rule of the format.
        TruncatedFileError: the file is shorter than its header says.
        ShardNotFoundError: there is no such file.
        FileChangedError: it was changed meanwhile.
        CheckpointError: it is not a regular file, or cannot be read.
    """
    path = Path(path)
    with open_regular(path) as file:
        try:
            state = FileState.of(file.fileno())
            raw = read_up_to(file, PREFIX_NBYTES)
            nbytes = json_nbytes(raw, path, state.nbytes)
            check_memory(path, nbytes)
            raw += read_up_to(file, nbytes)
            state.check(FileState.of(file.fileno()), path)
        except OSError as error:
            raise unreadable(path, error) from error
    return replace(parse_header(raw, path, state.nbytes), state=state)


def parse_header(raw: bytes, path: Location, file_nbytes: int) -> Header:
    """Parse a header that is in memory already.

    Args:
        raw: the file's first bytes, the 8 of the length prefix and the header itself; anything
            that follows is ignored.
        path: the file, for `TensorInfo.shard` and for errors; it is not touched.
        file_nbytes: the length of the file in bytes.

    Raises:
        HeaderError: the header breaks a rule of the format.
        TruncatedFileError: the file is shorter than its header says, or ``raw`` than the header.
    """
    data_start = PREFIX_NBYTES + json_nbytes(raw, path, file_nbytes)
    if len(raw) < data_start:  # the file shrank since its length was taken
        raise TruncatedFileError(path, "the header is cut off", data_start, len(raw))
    check_memory(path, data_start, raw)
    text = raw[PREFIX_NBYTES:data_start]
    return _plain(text, path, file_nbytes) or _strict(text, path, file_nbytes)


def records(
    kind: type[_Record], first: Collection[Any], *columns: Iterable[Any]
) -> Sequence[_Record]:
    """Many objects of a frozen dataclass with slots, of columns of its fields.

    Its own ``__init__`` sets one field after the other by ``object.__setattr__``: it takes 0.72
    microseconds for a `TensorInfo`, this 0.37. No ``__post_init__`` is called.

    Args:
        kind: the dataclass.
        first: its first field of each object; as many are made.
        columns: its other fields, in order, for at least as many.
    """
    made = list(map(object.__new__, repeat(kind, len(first))))
    fields = kind.__slots__  # type: ignore[attr-defined]
    for name, column in zip(fields, (first, *columns), strict=True):
        deque(map(getattr(kind, name).__set__, made, column), maxlen=0)
    return made


def _plain(text: bytes, path: Location, file_nbytes: int) -> Header | None:
    """The header, where there is nothing unusual about it; None where `_strict` is to look.

    Usual is what libraries write: tensors that are not empty, in the order of their bytes, with
    three keys each. That is looked at in columns, which takes 2.6 microseconds a tensor, the JSON's
    own 0.9 among them, where `_strict` takes 3.9.
    """
    data_start = PREFIX_NBYTES + len(text)
    if text[:1] != b"{" or rb"\u003" in text:
        return None
    if not 0 < sys.get_int_max_str_digits() <= _MOST_DIGITS:  # a number of MBs takes minutes
        return None
    try:
        check_nesting(text)
        document: dict[str, Any] = json.loads(text.decode("utf-8"))
        has_metadata = "__metadata__" in document
        metadata = check_strings(document.pop("__metadata__", {}), path, "__metadata__")
        entries = document.values()
        if set(map(type, entries)) != {dict}:
            return None
        codes, dims, offsets = ([*map(column, entries)] for column in _COLUMNS)
        types = [set(map(type, column)) for column in (codes, dims, offsets)]
        if types != [{str}, {list}, {list}] or set(map(len, offsets)) != {2}:
            return None
        if set(map(type, chain.from_iterable(dims + offsets))) != {int}:  # true would pass as 1
            return None
        keys = list(zip(codes, map(tuple, dims), strict=True))
        layouts = {key: _layout(*key, partial(HeaderError, path)) for key in set(keys)}
        dtypes, shapes, nbits = zip(*map(layouts.__getitem__, keys), strict=True)
        bits = np.array(nbits, np.int64)
        starts, stops = np.fromiter(chain(*offsets), np.int64).reshape(-1, 2).T
    except (ValueError, KeyError, OverflowError, RecursionError):
        return None
    # A name that occurs twice has lost a member, and other keys are more of them. Each that was
    # written has a colon, and there are no others but in strings; no escape (\u003a) is one.
    strings = "".join(chain(document, metadata, metadata.values()))
    members = 4 * len(document) + has_metadata + len(metadata)
    if text.count(b":") != members + strings.count(":") or not is_text(strings):
        return None
    follow = starts[0] == 0 and (starts[1:] == stops[:-1]).all() and (stops > starts).all()
    if not follow or (bits % 8).any() or (stops - starts != bits // 8).any():
        return None
    if data_start + int(stops[-1]) != file_nbytes:
        return None
    places = (starts + data_start).tolist(), (stops + data_start).tolist()
    infos = records(TensorInfo, document, dtypes, shapes, repeat(path), *places)
    return Header(path, file_nbytes, data_start, tuple(infos), metadata)


def _strict(text: bytes, path: Location, file_nbytes: int) -> Header:
    """The header, each entry held to every rule by itself."""
    data_start = PREFIX_NBYTES + len(text)
    document = parse_json_object(text, path)
    if isinstance(document, RepeatedNames):
        raise HeaderError(
            path,
            "a name is not unique",
            "each name once",
            f"{describe(document.name)} more than once",
            tensor=None if document.name == "__metadata__" else document.name,
        )
    metadata = check_strings(document.pop("__metadata__", {}), path, "__metadata__")
    layouts: _Layouts = {}
    tensors = [_tensor(name, entry, path, data_start, layouts) for name, entry in document.items()]
    tensors.sort(key=_FILE_ORDER)
    _check_coverage(tensors, path, data_start, file_nbytes)
    return Header(path, file_nbytes, data_start, tuple(tensors), metadata)


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading; anything else is refused at once, without opening it.

    It has no buffer, and reads nothing ahead.

    Raises:
        ShardNotFoundError: there is no such file.
        CheckpointError: it is not a regular file, or cannot be opened.
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


def read_up_to(file: FileIO, nbytes: int) -> bytes:
    """Read ``nbytes``, or what there is up to the end of the file."""
    raw = file.read(nbytes)
    while len(raw) < nbytes and (more := file.read(nbytes - len(raw))):
        raw += more
    return raw


def check_memory(path: Location, nbytes: int, raw: bytes = b"") -> None:
    """Raise PlanInfeasibleError where free memory has no room to parse ``nbytes`` of JSON.

    ``raw`` is the JSON itself, where it was read already.
    """
    if nbytes >= _LONG_NBYTES:
        needed_nbytes = _COPIES * nbytes + _MEMBER_NBYTES * raw.count(b":")
        first_that_fits([(None, needed_nbytes)], [(f"the JSON of {path}", needed_nbytes)])


def is_there(path: Path) -> bool:
    """Whether there is something of that name; raises OSError where the system hides it.

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
    """What the operating system said, as an error of ours; to be raised ``from`` it."""
    found = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return CheckpointError(path, "cannot be read", found=found)


def parse_json_object(raw: bytes, path: Location) -> dict[str, Any]:
    """Parse the strict JSON of headers and indexes: one object, in UTF-8, that begins with ``{``.

    NaN and infinities are refused, and integers far beyond 64 bits. An object in which a name
    occurs twice becomes a `RepeatedNames`.

    Raises:
        HeaderError: it is not that.
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
    except ValueError as error:
        raise HeaderError(path, "the JSON is not valid", "JSON", str(error)) from error
    except RecursionError as error:
        raise HeaderError(
            path, "the JSON is not valid", "JSON", "too many levels of nesting"
        ) from error
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


def json_nbytes(raw: bytes, path: Location, file_nbytes: int) -> int:
    """The header's length in bytes from its prefix, the first 8 bytes of ``raw``.

    Raises:
        HeaderError: the header is longer than the format allows.
        TruncatedFileError: the file, of ``file_nbytes``, is too short.
    """
    if len(raw) < PREFIX_NBYTES or file_nbytes < PREFIX_NBYTES:
        raise TruncatedFileError(
            path,
            "is too short for a safetensors file",
            f"at least {PREFIX_NBYTES}",
            min(len(raw), file_nbytes),
        )
    nbytes = int.from_bytes(raw[:PREFIX_NBYTES], "little")
    if nbytes > MAX_HEADER_NBYTES:
        for magic, what in _LOOKALIKES.items():
            if raw.startswith(magic):
                raise HeaderError(path, "is not a safetensors file", "a header", what)
        raise HeaderError(
            path, "the header is too long", f"at most {MAX_HEADER_NBYTES} bytes", nbytes
        )
    if PREFIX_NBYTES + nbytes > file_nbytes:
        raise TruncatedFileError(path, "the header is cut off", PREFIX_NBYTES + nbytes, file_nbytes)
    return nbytes


#: By code and dimensions, of those that are valid: the dtype, the shape, and the bits of the data.
_Layouts = dict[tuple[str, tuple[int, ...]], tuple[DType, tuple[int, ...], int]]


def _tensor(
    name: str, entry: Any, path: Location, data_start: int, layouts: _Layouts
) -> TensorInfo:
    """One entry of the header, held to every rule that concerns it alone.

    ``layouts`` has those found so far: most tensors of a long header are like another one.
    """
    fail = partial(HeaderError, path, tensor=name)
    if type(entry) is not dict:
        if isinstance(entry, RepeatedNames):
            raise fail(
                "a key is not unique", "each key once", f"{describe(entry.name)} more than once"
            )
        raise fail("the entry is not an object", "an object", describe(entry))
    if not (name.isascii() or is_text(name)):
        raise fail("the name is not valid", "Unicode text", "half a surrogate pair")
    try:
        code, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        keys = ", ".join(describe(key) for key in list(entry)[:8]) or "none"
        raise fail("a key is missing", error.args[0], keys) from None

    if type(code) is not str or code not in BY_CODE:
        raise fail("unknown dtype", f"one of {', '.join(BY_CODE)}", describe(code))
    if type(dims) is not list:
        raise fail("the shape is not a list", f"a list of {_U64}", describe(dims))
    for dim in dims:  # before they are looked up: true would be found as 1
        if type(dim) is not int:
            raise fail("a dimension of the shape is not valid", _U64, describe(dim))
    layout = layouts.get((code, shape := tuple(dims)))
    if layout is None:
        layout = layouts[code, shape] = _layout(code, shape, fail)
    dtype, shape, nbits = layout

    if type(offsets) is not list or len(offsets) != 2:
        raise fail("data_offsets are not valid", "a list of 2", describe(offsets))
    for offset in offsets:
        if type(offset) is not int or not 0 <= offset <= _MAX_U64:
            raise fail("data_offsets are not valid", _U64, describe(offset))
    start, stop = offsets
    if start > stop:
        raise fail("data_offsets are not valid", "a start before the stop", f"{start} to {stop}")

    if nbits % 8:
        raise fail("the data is not whole bytes", "a multiple of 8 bits", nbits)
    if nbits != (stop - start) * 8:
        raise fail("the shape and data_offsets do not agree", nbits // 8, stop - start)
    return TensorInfo(name, dtype, shape, path, data_start + start, data_start + stop)


def _layout(
    code: str, shape: tuple[int, ...], fail: Callable[[str, object, object], HeaderError]
) -> tuple[DType, tuple[int, ...], int]:
    """The dtype, the shape and the bits of a tensor that is not too large to be counted."""
    dtype = BY_CODE[code]
    numel = 1
    for dim in shape:
        if not 0 <= dim <= _MAX_U64:
            raise fail("a dimension of the shape is not valid", _U64, describe(dim))
        numel *= dim
        if numel > _MAX_U64:  # in this order, as the reference reader multiplies
            raise fail(
                "the shape is too large", "at most 2**64 - 1 elements", _describe_shape(shape)
            )
    nbits = numel * dtype.bits
    if nbits > _MAX_U64:
        raise fail("the shape is too large", "at most 2**64 - 1 bits", _describe_shape(shape))
    return dtype, shape, nbits


def _describe_shape(shape: tuple[int, ...]) -> str:
    """A shape for an error; the first few dimensions where it has many."""
    return describe(list(shape)) if len(shape) > 8 else str(list(shape))


def _check_coverage(
    tensors: list[TensorInfo], path: Location, data_start: int, file_nbytes: int
) -> None:
    """Every byte from the start of the data to the end of the file is in exactly one tensor."""
    end = data_start
    for info in tensors:
        if info.start != end:
            where = "after a hole" if info.start > end else "inside another tensor"
            raise HeaderError(
                path,
                f"data_offsets begin {where}",
                end - data_start,
                info.start - data_start,
                tensor=info.name,
            )
        end = info.stop
    if file_nbytes < end:
        last = next((info.name for info in tensors if info.stop > file_nbytes), None)
        raise TruncatedFileError(
            path, "is shorter than its header says", end, file_nbytes, tensor=last
        )
    if file_nbytes > end:
        raise HeaderError(path, "is longer than its header says", end, file_nbytes)
