"""Reads GGUF files, versions 2 and 3: metadata, and tensors of plain elements or of blocks.

A file is "GGUF", the version (32 bits), how many tensors and how many pairs of metadata there are
(64 bits each), the pairs (key, type, value), an entry for each tensor (name, dimensions, the
innermost first, type, offset), and the data from the next multiple of the alignment on. A set of
files is numbered, ``name-00001-of-00003.gguf``; the first has the metadata of all.

Tensors of known architectures have the names of Hugging Face: see `gguf.names`.

Source: docs/gguf.md in github.com/ggml-org/ggml. Stricter than it: names of tensors are unique, and
tensors share no bytes.
"""

from __future__ import annotations

import json
import math
import re
import struct
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter
from typing import Any, NoReturn, TypeAlias

import numpy as np

from streamload.core.dtypes import BY_CODE, DType
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo, records
from streamload.core.units import round_up
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError
from streamload.files.folder import open_file
from streamload.files.header import (
    MAX_HEADER_NBYTES,
    Header,
    Stored,
    Turn,
    check_nbytes,
    check_tensors,
    describe,
    is_text,
    most_nbytes,
)
from streamload.formats.gguf import vocabulary as gguf_vocabulary
from streamload.formats.gguf.architectures import architecture_of
from streamload.formats.gguf.constants import (
    ALIGNMENT,
    ARRAY,
    BOOL,
    MAGIC,
    SCALARS,
    STRING,
    TENSOR_TYPES,
    TYPE_NAMES,
    VERSIONS,
)
from streamload.formats.gguf.names import MOST_LAYERS, ROPE_TENSORS, config_of, unsaid_of
from streamload.formats.gguf.placement import FileTensor, in_models
from streamload.formats.reader import File, FormatReader
from streamload.formats.writer import numbered

_FIRST_NBYTES = 2**18  # of the first read
_MOST_NBYTES = 2**22  # that are read at once
_MOST_AXES = 5  # llama.cpp reads 4; files of video models have more
_MOST_NESTED = 4
_MOST_LAYERS = 2**12  # of an array of settings
_LEAST_PAIR_NBYTES, _LEAST_TENSOR_NBYTES = 8 + 4 + 1, 8 + 4 + 4 + 8
_MOST_U64 = 2**64 - 1
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."  # of a tensor that was reshaped into rows of blocks
_MEMBER = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf", re.ASCII)

#: The end of a tensor's entry, after the number of axes: the axes, its type, its offset.
_AFTER_AXES = [struct.Struct(f"<{axes}QIQ") for axes in range(_MOST_AXES + 1)]
#: A tensor's entry: its name, its shape, the number of its type, its offset.
_Said: TypeAlias = "tuple[str, tuple[int, ...], int, int]"


class GGUF(FormatReader):
    """Reads the headers of GGUF files; see `FormatReader`."""

    def read_header(self, file: File) -> Header:
        metadata, tensors, data_start = _read(file)
        of_model, shapes = _of_set(file, metadata, tensors)
        is_adapter = of_model.get("general.type") == "adapter"
        known = None if is_adapter else architecture_of(of_model, shapes)
        rope = {} if known is None else _rope(file, tensors)
        try:
            settings = {} if known is None else config_of(of_model, shapes, rope)
        except ValueError as error:
            problem = "its layers have different settings, or are too many"
            expected = f"one number for all, and at most {MOST_LAYERS} layers, and experts of one"
            raise HeaderError(file.path, problem, expected, str(error)) from error
        config = settings if of_model is metadata else {}  # the first file's, for all
        if config and (unsaid := unsaid_of(of_model, config, rope)):
            warnings.warn(
                f"{file.path}: {unsaid}, and config.json cannot express this: tensors load; put a "
                "config.json next to the file, or pass config=, to build the model",
                UserWarning,
                stacklevel=2,
            )
            config = {}
        kept, views = in_models(file, known, tensors, settings)
        names: list[str] = []
        dtypes: list[DType] = []
        dims: list[tuple[int, ...]] = []
        stored: dict[str, Stored] = {}
        turns: dict[str, Turn] = {}
        for each in kept:  # there may be millions
            dtype, shape = each.type.dtype, each.shape
            if dtype.is_packed:
                stored[each.name] = Stored(dtype.name, shape, (dtype.block,), 8)
                shape = (*shape[:-1], dtype.nbytes(shape[-1]))
                dtype = BY_CODE["U8"]
            names.append(each.name)
            dtypes.append(dtype)
            dims.append(shape)
            original = metadata.get(_ORIGINAL_SHAPE + each.name)
            if original is not None:
                turns[each.name] = _reshaped(file, each, original)
            elif each.turn is not None:
                turns[each.name] = each.turn
        path, places = file.path, ((each.start for each in kept), (each.stop for each in kept))
        made = records(TensorInfo, names, dtypes, dims, repeat(path), *places)
        infos = sorted(made, key=attrgetter("start", "stop", "name"))
        _check_distinct(file, names)
        said = {
            k: v for k, v in metadata.items() if k.startswith("general.") and isinstance(v, str)
        }
        said |= {k: str(v) for k, v in metadata.items() if k.startswith("adapter.")}
        return Header(
            *(path, file.nbytes, data_start, tuple(infos), said),
            format="gguf",
            config=config,
            stored=stored,
            turns=turns,
            views=tuple(views),
        )

    def in_file(self, header: Header) -> Header:
        tensors = []
        for each in _read_other(header.path)[1]:
            dtype, shape = each.type.dtype, each.shape
            if dtype.is_packed:
                shape, dtype = (*shape[:-1], dtype.nbytes(shape[-1])), BY_CODE["U8"]
            tensors.append(TensorInfo(each.name, dtype, shape, header.path, each.start, each.stop))
        tensors.sort(key=attrgetter("start", "stop", "name"))
        return replace(header, tensors=tuple(tensors), stored={}, turns={}, views=())

    def siblings(self, header: Header) -> Sequence[str]:
        match = _MEMBER.fullmatch(header.path.name)
        if match is None or int(match["total"]) == 1:
            return ()
        return numbered(int(match["total"]), ".gguf", match["stem"])

    def documents(self, headers: Sequence[Header]) -> Mapping[str, bytes]:
        """Return the tokenizer's files by name, {} if no file has one."""
        for header in headers:
            with open_file(header.path) as file:
                metadata = _Cursor(file).metadata(arrays=True)[0]
            if "tokenizer.ggml.model" in metadata:
                found = gguf_vocabulary.from_gguf(header.path, metadata)
                return {
                    name: json.dumps(document, ensure_ascii=False).encode()
                    for name, document in found.items()
                }
        return {}


def _reshaped(file: File, tensor: FileTensor, original: Any) -> Turn:
    """Return the change of a tensor's shape to its original one, by city96's ComfyUI-GGUF."""
    shape = tuple(original.tolist()) if isinstance(original, np.ndarray) else ()
    valid = len(shape) <= _MOST_AXES and all(type(n) is int and n > 0 for n in shape)
    if not valid or math.prod(shape) != math.prod(tensor.shape):
        problem, expected = "its original shape is not valid", f"that of {list(tensor.shape)}"
        found = list(shape) if shape else describe(original)
        raise HeaderError(file.path, problem, expected, found, tensor=tensor.name)
    return Turn(None, shape)


def _rope(file: File, tensors: Sequence[FileTensor]) -> dict[str, Sequence[float]]:
    """Return the values of tensors that divide the frequencies of RoPE, by name."""
    found = {each.name: each for each in tensors if each.name in ROPE_TENSORS}
    return {
        name: tuple(np.frombuffer(file.read(each.start, each.stop), "<f4").tolist())
        for name, each in found.items()
        if each.type.name == "F32" and each.stop - each.start <= _FIRST_NBYTES
    }


# --- sets of files --------------------------------------------------------------------------------


def _of_set(
    file: File, metadata: dict[str, Any], tensors: Sequence[FileTensor]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the first file's metadata and the shapes of all files' tensors, by GGUF's names.

    Raise HeaderError if the files do not belong together. A single file counts as the first.
    """
    number, count = (metadata.get(f"split.{key}", 0) for key in ("no", "count"))
    shapes = {each.name: each.shape for each in tensors}
    if type(number) is not int or type(count) is not int:
        found = describe([number, count])
        raise HeaderError(file.path, "split.no and split.count are invalid", "numbers", found)
    others = _others(file.path, number, count)
    if number:
        first, more, _ = _read_other(others[0])
        return first, shapes | {each.name: each.shape for each in more}
    counts = [len(tensors)]
    for other in others[1:]:  # the configuration depends on all tensors
        try:
            more = _read_other(other)[1]
        except CheckpointError:
            break  # missing or invalid: opening that file raises the error
        shapes |= {each.name: each.shape for each in more}
        counts.append(len(more))
    stated = metadata.get("split.tensors.count", sum(counts))
    if 1 < count == len(counts) and stated != sum(counts):
        problem = "the files of its set do not belong together"
        expected = f"split.tensors.count, {describe(stated)}"
        raise HeaderError(file.path, problem, expected, f"{sum(counts)} tensors")
    return metadata, shapes


def _others(path: Location, number: int, count: int) -> list[Location]:
    """Return all files of a set of ``count``, by the name of one; [] for a single file."""
    match = _MEMBER.fullmatch(path.name)
    if count <= 1:
        if match is not None and int(match["total"]) > 1:
            problem = "is a whole checkpoint, and has the name of one file of a set: rename it"
            expected = f"split.count {int(match['total'])}"
            raise HeaderError(path, problem, expected, f"split.count {count}" if count else "none")
        return []
    if match is None or (int(match["number"]) - 1, int(match["total"])) != (number, count):
        expected = f"a name that ends with -{number + 1:05}-of-{count:05}.gguf"
        raise HeaderError(path, "is one file of a set, and has another name", expected, path.name)
    return [path.parent / name for name in numbered(count, ".gguf", match["stem"])]


def _read_other(path: Location) -> tuple[dict[str, Any], list[FileTensor], int]:
    """Return metadata, tensors and first data byte of another file of the set; see `_read`."""
    with open_file(path) as file:
        return _read(file)


# --- the grammar ----------------------------------------------------------------------------------


def _read(file: File) -> tuple[dict[str, Any], list[FileTensor], int]:
    """Return the metadata without long arrays, the tensors, and the first byte of the data."""
    cursor = _Cursor(file)
    metadata, count = cursor.metadata(arrays=False)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        cursor.refuse("general.alignment is not valid", "a power of two", alignment)
    if count * _LEAST_TENSOR_NBYTES > cursor.left_nbytes:
        cursor.refuse("says that it has more tensors than fit into it", "fewer", count)
    check_tensors(file.path, count)
    said = cursor.tensors(count)
    check_nbytes(file.path, "the header is too long", cursor.at)
    data_start = round_up(cursor.at, alignment)
    tensors = _placed(file, said, alignment, data_start)
    end = data_start
    for each in sorted(tensors, key=attrgetter("start", "stop")):
        if each.start < end and each.stop > each.start:
            raise HeaderError(
                *(file.path, "begins inside another tensor", end, each.start), tensor=each.name
            )
        end = max(end, each.stop)
    _check_distinct(file, [each.name for each in tensors])
    return metadata, tensors, data_start


def _check_distinct(file: File, names: Sequence[str]) -> None:
    """Raise HeaderError if a name of a tensor occurs twice."""
    if len(set(names)) < len(names):
        ((twice, count),) = Counter(names).most_common(1)
        found = f"{count} times"
        raise HeaderError(file.path, "a name is not unique", "each name once", found, tensor=twice)


def _placed(file: File, said: Sequence[_Said], alignment: int, data_start: int) -> list[FileTensor]:
    """Return the tensors of entries, with file bytes; raise if an entry is not valid."""
    # one loop, since there may be millions
    name, most = "", file.nbytes
    out: list[FileTensor] = []

    def refuse(problem: str, expected: object, found: object) -> NoReturn:
        raise HeaderError(file.path, problem, expected, found, tensor=name)

    for name, shape, number, offset in said:
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TENSOR_TYPES.values())
            refuse("its type is not read", known, TYPE_NAMES.get(number, number))
        numel, block = math.prod(shape), kind.dtype.block
        if block > 1 and (width := shape[-1] if shape else 1) % block:
            refuse(f"its rows are not blocks of {kind.name}", f"a multiple of {block}", width)
        if numel > _MOST_U64:
            refuse("the shape is too large", "at most 2**64 - 1 elements", list(shape))
        if offset % alignment:
            refuse("its offset is not aligned", f"a multiple of {alignment}", offset)
        start = data_start + offset
        stop = start + kind.dtype.nbytes(numel)
        if stop > most:
            raise TruncatedFileError(
                file.path, "is shorter than its header says", stop, most, tensor=name
            )
        out.append(FileTensor(name, kind, shape, start, stop))
    return out


class _Cursor:
    """Parses a GGUF header from the file's first byte on, read in pieces; checks every number."""

    def __init__(self, file: File) -> None:
        self._file = file
        self._raw, self._start, self._next_nbytes = b"", 0, _FIRST_NBYTES
        self._most_nbytes = most_nbytes(file.path)
        self.at = 0

    @property
    def left_nbytes(self) -> int:
        """Upper bound of the header's bytes from here on."""
        return min(self._file.nbytes, MAX_HEADER_NBYTES) - self.at

    def refuse(self, problem: str, expected: object, found: object) -> NoReturn:
        """Raise HeaderError with a description of ``found``."""
        found = found if isinstance(found, str) else describe(found)
        raise HeaderError(self._file.path, problem, expected, found)

    def metadata(self, *, arrays: bool) -> tuple[dict[str, Any], int]:
        """Return the metadata and the number of tensors; long arrays only with ``arrays``."""
        magic = self._take(4)
        if magic != MAGIC:
            self.refuse("is not a GGUF file", MAGIC.decode(), repr(magic))
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            big = swapped in (1, *VERSIONS)
            found = f"a big-endian file of version {swapped}" if big else f"version {version}"
            self.refuse("is not read", "version 2 or 3, little-endian", found)
        tensors, pairs = self._number("Q"), self._number("Q")
        if pairs * _LEAST_PAIR_NBYTES > self.left_nbytes:
            self.refuse("says that it has more metadata than fits into it", "less", pairs)
        out: dict[str, Any] = {}
        seen: set[str] = set()
        for _ in range(pairs):
            key = self._name("a key")
            if key in seen:
                self.refuse("a key is not unique", "each key once", f"{describe(key)} twice")
            seen.add(key)
            kind = self._number("I")
            value = self._value(kind, key, keeps=arrays or kind != ARRAY)
            if value is not None:
                out[key] = value
        return out, tensors

    def tensors(self, count: int) -> list[_Said]:
        """Return the entries of the next ``count`` tensors."""
        out: list[_Said] = []
        while len(out) < count:
            out.append(self._tensor())  # reads more bytes, and raises for an invalid entry
            self._take_tensors(out, count)
        return out

    def _take_tensors(self, out: list[_Said], count: int) -> None:
        """Add entries in memory to ``out``; stop before one that is cut off or not valid."""
        # fast; `_tensor` reads that one, or raises its error
        raw, at, end = self._raw, self.at - self._start, len(self._raw)
        length, number = struct.Struct("<Q").unpack_from, struct.Struct("<I").unpack_from
        for _ in range(count - len(out)):
            if at + 8 > end or (stop := at + 8 + length(raw, at)[0]) + 4 > end:
                break
            axes = number(raw, stop)[0]
            if axes > _MOST_AXES or stop + 4 + _AFTER_AXES[axes].size > end:
                break
            try:
                name = raw[at + 8 : stop].decode()
            except UnicodeDecodeError:
                break
            if not name:
                break
            *shape, kind, offset = _AFTER_AXES[axes].unpack_from(raw, stop + 4)
            out.append((name, tuple(shape[::-1]), kind, offset))
            at = stop + 4 + _AFTER_AXES[axes].size
        self.at = self._start + at

    def _tensor(self) -> _Said:
        """Return the entry of the next tensor; raise HeaderError if it is not valid."""
        name = self._name("a tensor's name")
        axes = self._number("I")
        if axes > _MOST_AXES:
            raise HeaderError(
                self._file.path, "it has too many axes", f"at most {_MOST_AXES}", axes, tensor=name
            )
        shape = tuple(self._number("Q") for _ in range(axes))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _name(self, what: str) -> str:
        """Return the next string, not empty; the error for an invalid one names ``what``."""
        try:
            found = self._string().decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not valid", "UTF-8", str(error))
        if not found or not is_text(found):
            self.refuse(f"{what} is not valid", "text", found)
        return found

    def _value(self, kind: int, key: str, *, keeps: bool, nested: int = 0) -> Any:
        """Return the next value of type ``kind``; None if it is skipped (not ``keeps``)."""
        if kind == STRING:
            text = self._string()
            return text.decode(errors="replace") if keeps else None
        if kind == BOOL:
            found = self._take(1)[0]
            if found > 1:
                self.refuse(f"{describe(key)} is not valid", "a bool of 0 or 1", found)
            return bool(found)
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY or nested == _MOST_NESTED:
            expected = f"0 to 12, arrays in arrays up to {_MOST_NESTED}"
            self.refuse(f"the type of {describe(key)} is not valid", expected, kind)
        inner, count = self._number("I"), self._number("Q")
        if inner in SCALARS:
            keeps = keeps or (count <= _MOST_LAYERS and not nested)
            raw = self._take(count * struct.calcsize(f"<{SCALARS[inner]}"), keeps=keeps)
            return np.frombuffer(raw, f"<{SCALARS[inner]}") if keeps else None
        least_nbytes = 8 if inner == STRING else 12
        if count * least_nbytes > self.left_nbytes:
            problem = f"{describe(key)} is longer than what is left of the header"
            self.refuse(problem, "fewer elements", count)
        if inner == STRING and not keeps:
            return self._pass_strings(count)
        listed = [self._value(inner, key, keeps=keeps, nested=nested + 1) for _ in range(count)]
        return listed if keeps else None

    def _pass_strings(self, count: int) -> None:
        """Skip ``count`` strings: a vocabulary has hundreds of thousands, 0.1 microseconds each."""
        length = struct.Struct("<Q").unpack_from
        while count:
            nbytes = self._take(8, keeps=True)
            self._take(int.from_bytes(nbytes, "little"), keeps=False)
            count -= 1
            raw, at = self._raw, self.at - self._start
            last = len(raw) - 8
            while count and at <= last:
                after = at + 8 + length(raw, at)[0]
                if after > len(raw):
                    break
                at, count = after, count - 1
            self.at = self._start + at

    def _string(self) -> bytes:
        return self._take(self._number("Q"))

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _take(self, nbytes: int, *, keeps: bool = True) -> bytes:
        """Return the next bytes, b"" if not ``keeps``; raise beyond the file or the limit."""
        begin = self.at - self._start
        end = self.at + nbytes
        if end > self._start + len(self._raw):
            if end > self._file.nbytes:
                problem = "the header is cut off"
                raise TruncatedFileError(self._file.path, problem, end, self._file.nbytes)
            if end > self._most_nbytes:
                check_nbytes(self._file.path, "the header is too long", end)
            begin = 0
            self._start = self.at if keeps else end
            self._raw = self._file.read(self._start, max(end, self._start + self._next_nbytes))
            self._next_nbytes = min(2 * self._next_nbytes, _MOST_NBYTES)
            if self._start + len(self._raw) < end:  # the file shrank since its length was taken
                got = self._start + len(self._raw)
                raise TruncatedFileError(self._file.path, "the header is cut off", end, got)
        self.at = end
        return self._raw[begin : begin + nbytes] if keeps else b""
