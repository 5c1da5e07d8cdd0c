"""IREE's parameter archives, ``.irpa``: reads them, and writes them as IREE itself does.

A header of 88 bytes (little-endian, as everything) has magic, version, its own length, the distance
to the header of another archive in the same file (0 for none), and three segments: entries,
metadata and storage, each an offset from the header and a length. An entry has its length, a type,
its name and its metadata as ranges of the metadata segment, and an alignment. Data is a range of
the storage segment; a splat is a length, and a pattern of 1 to 16 bytes that fills it. Entries
begin at multiples of 16 bytes, data at multiples of 64, and files end at a multiple of 4096.

Dtype and shape are in the entry's metadata, as IREE's own Python writes them: ``TENSORv0:``
(earlier ``PYTORCH:``) and a JSON object with ``type`` (``Tensor``), ``dtype`` (numpy's name) and
``shape``. Entries without them are bytes, one-dimensional U8: `open_checkpoint` gives them the
dtypes and shapes of another checkpoint (``like=``).

Source: github.com/iree-org/iree, ``runtime/src/iree/schemas/parameter_archive.h`` for the format,
``runtime/src/iree/io/formats/irpa/irpa_parser.c`` for the rules that files must follow, and
``iree.runtime.io`` for the metadata of tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from streamload.core.dtypes import BY_CODE, BY_NAME, DType
from streamload.core.location import Location
from streamload.core.memory import first_that_fits
from streamload.core.tensors import TensorInfo
from streamload.core.units import round_up
from streamload.errors import HeaderError, TruncatedFileError
from streamload.files.header import Header, View, check_nbytes, describe, parse_json_object
from streamload.formats.reader import FORMATS, File, FormatReader, read_exactly
from streamload.formats.writer import (
    FormatWriter,
    OutFile,
    OutTensor,
    index_document,
    numbered,
    placed,
    shards,
)

_MAGIC = b"IRPA"
_PREFIX = struct.Struct("<4sHHQQQ")  # magic, version, its length, the next header, flags
_SEGMENTS = struct.Struct("<7Q")  # number of entries; offset and length of three segments
_HEADER_NBYTES = _PREFIX.size + _SEGMENTS.size
_ENTRY = struct.Struct("<QI6Q")  # length, type, flags, name, metadata, alignment
_RANGE = struct.Struct("<QQ")
_SPLAT = struct.Struct("<Q16sB")  # length, pattern, bytes of the pattern
_DATA_NBYTES = _ENTRY.size + _RANGE.size
_SPLAT_NBYTES = _ENTRY.size + _SPLAT.size
_SKIPPED, _IS_SPLAT, _IS_DATA, _IS_EXTERNAL = range(4)
_PATTERNS = (1, 2, 4, 8, 16)

_ENTRY_ALIGNMENT = 16
_ALIGNMENT = 64
_PAGE = 4096
_MOST_NBYTES = 2**62  # end of the last splat's virtual range: fits an int64
_MEMORY = 8  # bytes of memory for each byte of a header while it is read
_SAYS_TENSOR = (b"TENSORv0:", b"PYTORCH:")
_U8 = BY_CODE["U8"]
_Layout: TypeAlias = "tuple[DType, tuple[int, ...]]"  # of a tensor: its dtype and its shape
_Fail = Callable[..., HeaderError]  # makes the error for one tensor: problem, expected, found


class Irpa(FormatReader):
    """Reads the headers of parameter archives; see `FormatReader`."""

    def read_header(self, file: File) -> Header:
        found = _Contents(file)
        base = 0
        while distance := _Archive(found, base).read():
            base += distance
        found.infos.sort(key=lambda info: (info.start, info.stop, info.name))
        return Header(
            file.path,
            file.nbytes,
            min((info.start for info in found.infos), default=0),
            tuple(found.infos),
            {},
            format="irpa",
            views=tuple(found.views),
            untyped=frozenset(found.untyped),
        )


class _Contents:
    """Collects the tensors of all archives of a file, and bounds the bytes that are read."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.infos: list[TensorInfo] = []
        self.views: list[View] = []
        self.untyped: set[str] = set()
        self._names: set[str] = set()
        self._after = round_up(file.nbytes, _PAGE) + _PAGE  # start of the next virtual range
        self._read_nbytes = 0
        self._checked_nbytes = 0

    def take(self, nbytes: int) -> None:
        """Count bytes of headers, each time they are read; raise HeaderError over the limit."""
        # several archives may refer to the same bytes over and over
        path, most = self.file.path, self.file.nbytes
        self._read_nbytes += nbytes
        check_nbytes(path, "the headers are too long", self._read_nbytes)
        if self._read_nbytes > most:
            expected = f"at most {most} bytes"
            raise HeaderError(path, "the headers are too long", expected, self._read_nbytes)
        needed_nbytes = _MEMORY * self._read_nbytes
        if needed_nbytes >= self._checked_nbytes + 2**20:  # a check takes a millisecond
            self._checked_nbytes = needed_nbytes
            first_that_fits([(None, needed_nbytes)], [(f"the header of {path}", needed_nbytes)])

    def add(self, name: str, dtype: DType, shape: tuple[int, ...], start: int, stop: int) -> None:
        """Add a tensor of file bytes ``start`` to ``stop``; raise HeaderError for a known name."""
        if name in self._names:
            raise HeaderError(self.file.path, "a name is not unique", "each name once", tensor=name)
        self._names.add(name)
        self.infos.append(TensorInfo(name, dtype, shape, self.file.path, start, stop))

    def add_splat(
        self, name: str, dtype: DType, shape: tuple[int, ...], at: int, pattern: int, nbytes: int
    ) -> None:
        """Add a tensor of ``nbytes`` that repeats the ``pattern`` bytes at file byte ``at``."""
        if nbytes <= pattern:
            self.add(name, dtype, shape, at, at + nbytes)
            return
        view = View.strided(self._after, at, pattern, (nbytes // pattern,), (0,))
        if view.stop > _MOST_NBYTES:
            limit = f"at most {_MOST_NBYTES} bytes of splats"
            raise HeaderError(self.file.path, "a splat is too long", limit, nbytes, tensor=name)
        self.add(name, dtype, shape, view.start, view.stop)
        self.views.append(view)
        self._after = round_up(view.stop, _ALIGNMENT)


class _Archive:
    """Reads one archive of a file, which begins at byte ``base``."""

    def __init__(self, contents: _Contents, base: int) -> None:
        self._contents = contents
        self._file = contents.file
        self._base = base
        self._said: dict[tuple[int, int], _Layout | None] = {}  # by range: entries may share one
        self._same: dict[bytes, _Layout | None] = {}  # by text: most are equal

    def read(self) -> int:
        """Add the archive's tensors; return the distance to the next archive, 0 for none."""
        path, base = self._file.path, self._base
        raw = self._file.read(base, base + _HEADER_NBYTES)
        if not raw.startswith(_MAGIC):
            found = describe(raw[: len(_MAGIC)])
            raise HeaderError(path, f"no parameter archive is at byte {base}", _MAGIC, found)
        if len(raw) < _HEADER_NBYTES:
            stop = base + _HEADER_NBYTES
            raise TruncatedFileError(path, "the header is cut off", stop, self._file.nbytes)
        distance: int
        _, major, minor, nbytes, distance, _ = _PREFIX.unpack_from(raw)
        if (major, minor) != (0, 0):
            raise HeaderError(path, "unknown version", "0.0", f"{major}.{minor}")
        if nbytes != _HEADER_NBYTES:
            raise HeaderError(path, "the header's length is not valid", _HEADER_NBYTES, nbytes)
        self._contents.take(_HEADER_NBYTES)
        count, *numbers = _SEGMENTS.unpack_from(raw, _PREFIX.size)
        # file bytes of each segment
        entries, metadata, self._storage = (
            self._segment(what, offset, length)
            for what, offset, length in zip(
                ("entries", "metadata", "data"), numbers[::2], numbers[1::2], strict=True
            )
        )
        self._contents.take(entries[1] - entries[0] + metadata[1] - metadata[0])
        self._metadata = read_exactly(self._file, *metadata, "the metadata")
        self._left = len(self._metadata)  # bytes that entries may still refer to
        self._read_entries(count, entries[0], read_exactly(self._file, *entries, "the entries"))
        return distance

    def _segment(self, what: str, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the file range of a segment; raise TruncatedFileError if the file is shorter."""
        if not nbytes:
            return self._base, self._base
        start, stop = self._base + offset, self._base + offset + nbytes
        if stop > self._file.nbytes:
            problem = f"is shorter than its header says: the {what} are cut off"
            raise TruncatedFileError(self._file.path, problem, stop, self._file.nbytes)
        return start, stop

    def _read_entries(self, count: int, start: int, table: bytes) -> None:
        """Add the tensors of ``count`` entries in ``table``, which is at file byte ``start``."""
        at = 0
        for number in range(count):
            left = len(table) - at
            nbytes = int.from_bytes(table[at : at + 8], "little")
            if not _ENTRY.size <= nbytes <= left:
                problem = f"entry {number} is cut off, or its length is not valid"
                expected = f"{count} entries of {_ENTRY.size} bytes or more in {len(table)}"
                found = f"{nbytes} of {max(left, 0)} bytes that are left"
                raise HeaderError(self._file.path, problem, expected, found)
            self._read_entry(start + at, table[at : at + nbytes])
            at = round_up(at + nbytes, _ENTRY_ALIGNMENT)

    def _read_entry(self, start: int, raw: bytes) -> None:
        """Add the tensor of the entry ``raw``, which begins at file byte ``start``."""
        path = self._file.path
        _, kind, _, *text_at, offset, length, alignment = _ENTRY.unpack_from(raw)
        if kind == _SKIPPED:
            return
        text = self._text(*text_at)
        try:
            name = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise HeaderError(path, "a name is not UTF-8", "UTF-8", describe(text)) from error
        fail = partial(HeaderError, path, tensor=name)
        if kind == _IS_DATA and len(raw) >= _DATA_NBYTES:
            first, nbytes = _RANGE.unpack_from(raw, _ENTRY.size)
            at = self._place(fail, first, nbytes, alignment)
            layout = self._layout(name, offset, length, nbytes)
            self._contents.add(name, *layout, at, at + nbytes)
        elif kind == _IS_SPLAT and len(raw) >= _SPLAT_NBYTES:
            nbytes, _, pattern = _SPLAT.unpack_from(raw, _ENTRY.size)
            if pattern not in _PATTERNS or nbytes % pattern:
                expected = "a pattern of 1, 2, 4, 8 or 16 bytes that divides the length"
                raise fail("a splat is not valid", expected, f"{pattern} bytes for {nbytes}")
            at = start + _ENTRY.size + 8
            layout = self._layout(name, offset, length, nbytes)
            self._contents.add_splat(name, *layout, at, pattern, nbytes)
        elif kind == _IS_EXTERNAL:
            expected = "an archive with all data in it, as iree-convert-parameters writes"
            raise fail("its data is in another file", expected)
        else:
            expected = f"{_DATA_NBYTES} bytes of data or {_SPLAT_NBYTES} of a splat"
            found = f"{len(raw)} bytes of type {kind}"
            raise fail("the entry's type or length is not valid", expected, found)

    def _place(self, fail: _Fail, offset: int, nbytes: int, alignment: int) -> int:
        """Return the first file byte of an entry's data; raise ``fail(...)`` if it is not valid."""
        first, last = self._storage
        if not nbytes:
            return first
        if offset + nbytes > last - first:
            expected = f"at most {last - first} bytes"
            raise fail(
                "leads out of the archive's data", expected, f"{offset} to {offset + nbytes}"
            )
        at = first + offset
        if alignment & (alignment - 1) or (alignment and at % alignment):
            raise fail("is not aligned", f"a multiple of a power of two, {alignment}", at)
        return at

    def _text(self, offset: int, nbytes: int, tensor: str | None = None) -> bytes:
        """Return a range of the metadata segment; raise HeaderError if ranges exceed it."""
        if nbytes and (offset + nbytes > len(self._metadata) or nbytes > self._left):
            problem = "names and metadata lead out of the archive's metadata, or overlap there"
            expected = f"{len(self._metadata)} bytes of metadata"
            found = f"{offset} to {offset + nbytes}"
            raise HeaderError(self._file.path, problem, expected, found, tensor=tensor)
        self._left -= nbytes
        return self._metadata[offset : offset + nbytes]

    def _layout(self, name: str, offset: int, length: int, nbytes: int) -> _Layout:
        """Return dtype and shape from an entry's metadata; without them U8, listed as untyped."""
        fail = partial(HeaderError, self._file.path, tensor=name)
        if (offset, length) not in self._said:
            raw = self._text(offset, length, name)
            if raw not in self._same:
                self._same[raw] = _said(raw, self._file.path, fail)
            self._said[offset, length] = self._same[raw]
        said = self._said[offset, length]
        if said is None:
            self._contents.untyped.add(name)
            return _U8, (nbytes,)
        dtype, shape = said
        if (nbits := dtype.bits * math.prod(shape)) != 8 * nbytes:
            found = f"{nbytes} bytes"
            raise fail("the shape and the length do not agree", f"{nbits} bits", found)
        return said


def _said(metadata: bytes, path: Location, fail: _Fail) -> _Layout | None:
    """Return dtype and shape from an entry's metadata, None without; ``fail(...)`` if invalid."""
    prefix = next((each for each in _SAYS_TENSOR if metadata.startswith(each)), None)
    if prefix is None:
        return None
    try:
        said = parse_json_object(metadata.removeprefix(prefix), path)
    except HeaderError as error:
        raise fail("its metadata are not valid", error.expected, error.found) from error
    code, dims = said.get("dtype"), said.get("shape")
    dtype = BY_NAME.get(code) if isinstance(code, str) else None
    if said.get("type") != "Tensor" or dtype is None:
        return None
    if type(dims) is not list or any(type(n) is not int or n < 0 for n in dims):
        raise fail("its shape is not valid", "a list of whole numbers", describe(dims))
    nbits = dtype.bits
    for n in dims:
        nbits *= n
        if nbits > 8 * _MOST_NBYTES:
            raise fail("its shape is too large", f"at most {_MOST_NBYTES} bytes", describe(dims))
    return dtype, tuple(dims)


# --- writing --------------------------------------------------------------------------------------


class IrpaWriter(FormatWriter):
    """Writes ``model.irpa``, byte for byte as IREE does; see `FormatWriter`.

    With a smaller `max_shard_size`, ``model-00001-of-00002.irpa`` and so on; IREE takes several
    archives for one scope, and does not read the index.
    """

    name = "irpa"
    max_shard_size = "16TiB"  # one file
    keeps_companions = True

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        room = max_nbytes // _PAGE * _PAGE - _HEADER_NBYTES - _ALIGNMENT
        found = shards(lists, room, _most_nbytes)
        return [
            _file(name, [each for listed in shard for each in listed])
            for name, shard in zip(numbered(len(found), ".irpa"), found, strict=True)
        ]

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        return index_document(FORMATS["irpa"].index, files)


def _metadata(tensor: OutTensor) -> bytes:
    """Return a tensor's metadata, dtype and shape, as IREE's own Python writes them."""
    said = {"type": "Tensor", "dtype": tensor.dtype.name, "shape": list(tensor.shape)}
    return _SAYS_TENSOR[0] + json.dumps(said).encode()


def _most_nbytes(tensor: OutTensor) -> int:
    """Return the most bytes that a tensor adds to a file: entry, metadata and data."""
    nbytes = round_up(_DATA_NBYTES, _ENTRY_ALIGNMENT) + round_up(tensor.nbytes, _ALIGNMENT)
    return nbytes + len(tensor.name.encode()) + len(_metadata(tensor))


def _file(path: str, tensors: Sequence[OutTensor]) -> OutFile:
    """Return a file of these tensors, with its header and the place of each tensor."""
    table, texts, stop = bytearray(), bytearray(), 0
    for each in tensors:
        name, said = each.name.encode(), _metadata(each)
        at = round_up(stop, _ALIGNMENT)
        ranges = len(texts), len(name), len(texts) + len(name), len(said)
        table += bytes(-len(table) % _ENTRY_ALIGNMENT)
        table += _ENTRY.pack(_DATA_NBYTES, _IS_DATA, 0, *ranges, _ALIGNMENT)
        table += _RANGE.pack(at, each.nbytes)
        texts += name + said
        stop = at + each.nbytes
    begin = round_up(_HEADER_NBYTES, _ENTRY_ALIGNMENT)
    storage = round_up(begin + len(table) + len(texts), _ALIGNMENT)
    segments = begin, len(table), begin + len(table), len(texts), storage, stop
    header = _PREFIX.pack(_MAGIC, 0, 0, _HEADER_NBYTES, 0, 0)
    header += _SEGMENTS.pack(len(tensors), *segments)
    header = (header.ljust(begin, b"\0") + table + texts).ljust(storage, b"\0")
    return placed(path, header, tensors, _ALIGNMENT, _PAGE)
