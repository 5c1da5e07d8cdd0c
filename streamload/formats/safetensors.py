"""safetensors: parses and validates headers, and writes files.

A file is 8 bytes with the length N of the header (unsigned, little-endian), N bytes of JSON that
begin with ``{``, and the data. The JSON maps each tensor's name to its ``dtype``, ``shape`` and
``data_offsets`` (first byte and last byte, exclusive, counted from the start of the data);
``__metadata__`` maps strings to strings. The data is covered without gap or overlap.

Source: the format's description in the README of github.com/huggingface/safetensors, and the
checks of the safetensors crate, version 0.8. One rule is stricter here than there, as the
description has it: names are unique. Unknown keys of a tensor's entry are ignored, and
``__metadata__`` may be null, here as there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from streamload.core.bounded_json import check_nesting
from streamload.core.dtypes import BY_CODE, DType
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo, records
from streamload.errors import HeaderError, TruncatedFileError
from streamload.files.header import (
    MAX_HEADER_NBYTES,
    SAFETENSORS,
    Header,
    RepeatedNames,
    check_entry,
    check_memory,
    check_nbytes,
    check_strings,
    describe,
    is_text,
    parse_json_object,
)
from streamload.formats.reader import DEFAULT, File, FormatReader
from streamload.formats.writer import (
    FormatWriter,
    OutFile,
    OutTensor,
    index_document,
    numbered,
    placed,
    shards,
)

SINGLE, INDEX = DEFAULT.single, DEFAULT.index
#: Bytes at the start of a file that hold the header's length.
PREFIX_NBYTES = 8
_ALIGNMENT = 64
_MAX_U64 = 2**64 - 1
_MOST_DIGITS = 4300  # of an integer that Python parses by default
_U64 = "an integer from 0 to 2**64 - 1"
_FILE_ORDER = attrgetter("start", "stop", "name")  # an empty tensor before the one it touches
_COLUMNS = tuple(map(itemgetter, ("dtype", "shape", "data_offsets")))


class Safetensors(FormatReader):
    """Reads the headers of safetensors files; see `FormatReader`."""

    def looks(self, head: bytes) -> bool:
        length, after = int.from_bytes(head[:PREFIX_NBYTES], "little"), head[PREFIX_NBYTES:]
        return 1 < length <= MAX_HEADER_NBYTES and after[:1] == b"{"

    def read_header(self, file: File) -> Header:
        raw = file.read(0, PREFIX_NBYTES)
        nbytes = json_nbytes(raw, file.path, file.nbytes)
        check_memory(file.path, nbytes)
        raw += file.read(PREFIX_NBYTES, PREFIX_NBYTES + nbytes)
        return parse_header(raw, file.path, file.nbytes)


def parse_header(raw: bytes, path: Location, file_nbytes: int) -> Header:
    """Return the header that ``raw`` begins with; raise HeaderError or TruncatedFileError."""
    data_start = PREFIX_NBYTES + json_nbytes(raw, path, file_nbytes)
    if len(raw) < data_start:  # the file shrank since its length was taken
        raise TruncatedFileError(path, "the header is cut off", data_start, len(raw))
    check_memory(path, data_start, raw)
    text = raw[PREFIX_NBYTES:data_start]
    return _plain(text, path, file_nbytes) or _strict(text, path, file_nbytes)


def _plain(text: bytes, path: Location, file_nbytes: int) -> Header | None:
    """Return the header if it is in the usual form; None if `_strict`, slower, has to parse it."""
    # Libraries write tensors that are not empty, in the order of their bytes, with three keys each.
    # By columns a tensor takes 2.6 microseconds, 0.9 of them for the JSON, with `_strict` 3.9.
    data_start = PREFIX_NBYTES + len(text)
    if text[:1] != b"{" or rb"\u003" in text:
        return None
    if not 0 < sys.get_int_max_str_digits() <= _MOST_DIGITS:  # a number of MBs takes minutes
        return None
    try:
        check_nesting(text)
        document: dict[str, Any] = json.loads(text.decode("utf-8"))
        has_metadata = "__metadata__" in document
        metadata = _metadata(document, path)
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
    # Count the colons outside of strings, one for each member that was written (an escape, \u003a,
    # was refused above): a repeated name has lost a member, and unknown keys add some.
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
    """Return the header after checking each entry against every rule; raise HeaderError."""
    data_start = PREFIX_NBYTES + len(text)
    document = parse_json_object(text, path)
    if isinstance(document, RepeatedNames):
        found = f"{describe(document.name)} more than once"
        tensor = None if document.name == "__metadata__" else document.name
        raise HeaderError(path, "a name is not unique", "each name once", found, tensor=tensor)
    metadata = _metadata(document, path)
    layouts: _Layouts = {}
    tensors = [_tensor(name, entry, path, data_start, layouts) for name, entry in document.items()]
    tensors.sort(key=_FILE_ORDER)
    _check_coverage(tensors, path, data_start, file_nbytes)
    return Header(path, file_nbytes, data_start, tuple(tensors), metadata)


def _metadata(document: dict[str, Any], path: Location) -> dict[str, str]:
    found = document.pop("__metadata__", None)  # null, which safetensors takes, is none
    return {} if found is None else check_strings(found, path, "__metadata__")


def json_nbytes(raw: bytes, path: Location, file_nbytes: int) -> int:
    """Return the bytes of the header's JSON, by ``raw``, the first bytes of the file."""
    if len(raw) < PREFIX_NBYTES or file_nbytes < PREFIX_NBYTES:
        problem, found = "is too short for a safetensors file", min(len(raw), file_nbytes)
        raise TruncatedFileError(path, problem, f"at least {PREFIX_NBYTES}", found)
    nbytes = int.from_bytes(raw[:PREFIX_NBYTES], "little")
    check_nbytes(path, "the header is too long", nbytes)
    if PREFIX_NBYTES + nbytes > file_nbytes:
        raise TruncatedFileError(path, "the header is cut off", PREFIX_NBYTES + nbytes, file_nbytes)
    return nbytes


#: Of valid dtype codes and dimensions: the dtype, the shape, and the bits of the data.
_Layouts = dict[tuple[str, tuple[int, ...]], tuple[DType, tuple[int, ...], int]]


def _tensor(
    name: str, entry: Any, path: Location, data_start: int, layouts: _Layouts
) -> TensorInfo:
    """Return the tensor of a header's entry; raise HeaderError if it breaks a rule."""
    # ``layouts`` caches `_layout`: most tensors of a long header share its results
    fail = partial(HeaderError, path, tensor=name)
    if type(entry) is not dict or not name.isascii():
        check_entry(name, entry, path)
    try:
        code, dims, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        keys = ", ".join(describe(key) for key in list(entry)[:8]) or "none"
        raise fail("a key is missing", error.args[0], keys) from None

    if type(code) is not str or code not in BY_CODE:
        raise fail("unknown dtype", f"one of {', '.join(BY_CODE)}", describe(code))
    if type(dims) is not list:
        raise fail("the shape is not a list", f"a list of {_U64}", describe(dims))
    for dim in dims:  # before the lookup: true equals 1
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
    """Return the dtype, the shape and the bits of a tensor; raise ``fail(...)`` beyond 64 bits."""
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
    """Return a shape as text for an error; the number of dimensions if there are many."""
    return describe(list(shape)) if len(shape) > 8 else str(list(shape))


def _check_coverage(
    tensors: list[TensorInfo], path: Location, data_start: int, file_nbytes: int
) -> None:
    """Raise HeaderError for gaps and overlaps of data, TruncatedFileError if the file is short."""
    end = data_start
    for info in tensors:
        if info.start != end:
            where = "after a hole" if info.start > end else "inside another tensor"
            problem, found = f"data_offsets begin {where}", info.start - data_start
            raise HeaderError(path, problem, end - data_start, found, tensor=info.name)
        end = info.stop
    if file_nbytes < end:
        last = next((info.name for info in tensors if info.stop > file_nbytes), None)
        raise TruncatedFileError(
            path, "is shorter than its header says", end, file_nbytes, tensor=last
        )
    if file_nbytes > end:
        raise HeaderError(path, "is longer than its header says", end, file_nbytes)


# --- writing --------------------------------------------------------------------------------------


class SafetensorsWriter(FormatWriter):
    """Writes safetensors in the layout of Hugging Face; see `FormatWriter`.

    ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
    ``model.safetensors.index.json`` (source: "Serializing to files" in the documentation of
    huggingface_hub). Each file's data begins at a multiple of 64 bytes. Tensors whose length is no
    multiple of 64 come last: all begin at a multiple of 64, or at least of their element.
    """

    name = SAFETENSORS
    keeps_companions = True

    def files(self, lists: Sequence[Sequence[OutTensor]], max_nbytes: int) -> Sequence[OutFile]:
        metadata = {"format": "pt", **self.model.metadata}
        overhead_nbytes = len(_file("", (), metadata).header) + _ALIGNMENT

        def header_nbytes(each: OutTensor) -> int:
            """Return the most bytes of a tensor's entry: offsets have no more digits than this."""
            return len(_entry(each, max_nbytes, max_nbytes)) + 1

        found = [
            [each for listed in part for each in listed]
            for shard in shards(
                lists, max_nbytes - overhead_nbytes, lambda each: header_nbytes(each) + each.nbytes
            )
            for part in shards(shard, MAX_HEADER_NBYTES - overhead_nbytes, header_nbytes)
        ]
        names = numbered(len(found), ".safetensors")
        return [_file(name, part, metadata) for name, part in zip(names, found, strict=True)]

    def documents(self, files: Sequence[OutFile], sums: Mapping[str, str]) -> Mapping[str, bytes]:
        total_nbytes = sum(t.nbytes for file in files for t in file.tensors)
        return index_document(INDEX, files, metadata={"total_size": total_nbytes})


def _file(path: str, tensors: Sequence[OutTensor], metadata: Mapping[str, str]) -> OutFile:
    """Return a file of these tensors, placed, with its header."""
    # by the largest power of two up to 64 that divides the length; stable: but for the few of odd
    # lengths, in the order in which they are read
    ordered = sorted(tensors, key=lambda t: -min(t.nbytes & -t.nbytes or _ALIGNMENT, _ALIGNMENT))
    at = 0
    # grown in place: there may be very many tensors
    text = bytearray(PREFIX_NBYTES)
    text += b'{"__metadata__":' + _json(dict(metadata)).encode()
    for each in ordered:
        text += b"," + _entry(each, at, at := at + each.nbytes)
    text += b"}"
    text += b" " * (-len(text) % _ALIGNMENT)
    text[:PREFIX_NBYTES] = (len(text) - PREFIX_NBYTES).to_bytes(PREFIX_NBYTES, "little")
    return placed(path, bytes(text), ordered)


def _entry(each: OutTensor, start: int, stop: int) -> bytes:
    """Return a tensor's member of the header's JSON; offsets count from the start of the data."""
    said = {"dtype": each.dtype.code, "shape": list(each.shape), "data_offsets": [start, stop]}
    return f"{_json(each.name)}:{_json(said)}".encode()


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
