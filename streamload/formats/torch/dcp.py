"""Reads folders of torch.distributed.checkpoint (DCP): ``.metadata``, ``__0_0.distcp`` and so on.

``.metadata`` is a pickle: the shape, dtype and chunks of each tensor; where each chunk is in a
file, a small archive of torch.save with one tensor; and the keys of the nested state by flat name.
Each chunk is read where it is: see `streamload.formats.chunks`.

Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` and ``default_planner.py``
of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from streamload.core.dtypes import BY_NAME, DType
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError
from streamload.files.header import Chunk, Header, Part, describe
from streamload.files.local import LocalFile, open_file
from streamload.formats.chunks import Chunked, joined
from streamload.formats.reader import File, FormatReader, read_exactly
from streamload.formats.torch.archive import Archive, TorchSave
from streamload.formats.torch.choosing import chosen
from streamload.formats.torch.globals import (
    DTYPES,
    Global,
    Instance,
    Opaque,
    Storage,
    Tensor,
    key_of,
    kind_of,
    named,
)
from streamload.formats.torch.pickles import check_length, unpickle

_NAME = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "MetadataIndex", "StorageMeta"),
)
_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
#: By module and name, the role and the value of each global that ``.metadata`` may name.
_GLOBALS: Mapping[tuple[str, str], tuple[str, str]] = {
    **{(_MODULE, name): ("instance", "") for name in _CLASSES},
    _STORAGE_INFO: ("instance", ""),
    (_MODULE, "_MEM_FORMAT_ENCODING"): ("plain", ""),
    ("torch.serialization", "_get_layout"): ("plain", ""),
    ("torch", "Size"): ("size", ""),
    ("pathlib", "PosixPath"): ("plain", ""),
    ("pathlib._local", "PosixPath"): ("plain", ""),  # Python 3.13
    **{("torch", name): ("dtype", name) for name in DTYPES},
}
_MOST_AXES = 64
_MOST_LENGTH = 2**62
#: Makes an error about a tensor.
_Fail = Callable[..., HeaderError]


class _Item(NamedTuple):
    """A chunk of a tensor, and the range of a file that has it as an archive."""

    file: str
    start: int
    stop: int
    name: str
    dtype: DType
    origin: tuple[int, ...]
    shape: tuple[int, ...]


class Dcp(FormatReader):
    """Reads the metadata of DCP's folders; see `FormatReader`."""

    def looks(self, head: bytes) -> bool:
        return TorchSave().looks(head) or (head[:1] == b"\x80" and _MODULE.encode() in head)

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        return [_NAME] if names else []

    def read_header(self, file: File) -> Header:
        path = file.path
        if not isinstance(path, Path):
            raise HeaderError(path, "is a DCP folder on a server", "a copy of it on this machine")
        if path.name != _NAME:
            problem = "is one of the files of a DCP folder"
            raise HeaderError(path, problem, f"the path of the folder, which has {_NAME}")
        check_length(file, file.nbytes, _NAME)
        raw = read_exactly(file, 0, file.nbytes, _NAME)
        root = unpickle(file, raw, _NAME, lookup=partial(named, table=_GLOBALS)).root
        stated, keys, stored = (
            _fields(root, f"{_MODULE}.Metadata").get(name)
            for name in ("state_dict_metadata", "planner_data", "storage_data")
        )
        if type(stated) is not dict or type(stored) is not dict:
            problem = "is not the metadata of a DCP folder"
            raise HeaderError(path, problem, "tensors, and where they are stored")
        found = chosen(file, _nested(stated, keys if type(keys) is dict else {}), self.key)
        places = _places(stored)
        tensors: dict[str, Chunked] = {}
        items: list[_Item] = []
        for name, tensor in found.items():
            assert tensor.storage is not None, "_nested gives it the flat name"
            fail = partial(HeaderError, path, tensor=name)
            dtype, shape, chunks = _stated(stated[tensor.storage.key], fail)
            tensors[name] = Chunked(dtype, shape, [])
            for chunk in chunks:
                origin, sizes = (_shape(_fields(chunk).get(n), fail) for n in ("offsets", "sizes"))
                if len(origin) != len(shape) or len(sizes) != len(shape):
                    raise fail("a chunk has other axes", len(shape), len(sizes))
                if 0 not in sizes:
                    place = _range(places.get((tensor.storage.key, origin)), origin, fail)
                    items.append(_Item(*place, name, dtype, origin, sizes))
        parts = []
        for file_name, group in groupby(sorted(items, key=itemgetter(0, 1)), key=itemgetter(0)):
            with open_file(path.parent / file_name) as opened:
                end = 0
                for item in group:
                    if item.start < end:  # else a small folder is as much work as a large one
                        problem = "a chunk begins inside another one"
                        raise HeaderError(opened.path, problem, end, item.start, tensor=item.name)
                    end = item.stop
                    tensors[item.name].pieces.append((opened.path, _chunk(opened, item)))
                parts.append(Part(opened.path, opened.nbytes, opened.state))
        return joined(Part(path, file.nbytes), parts, tensors, {"format": "pt"})


def _nested(stated: Mapping[Any, Any], keys: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the nested state: tensors, whose storages' keys are the flat names, and others."""
    root: dict[Any, Any] = {}
    for flat, each in stated.items():
        way = keys.get(flat)
        if not _are(way, (str, int)):
            way = (flat,)
        found, way = root, [key_of(key) for key in way]
        for key in way[:-1]:
            below = found.setdefault(key, {})
            found = below if type(below) is dict else {}
        size = _fields(each, f"{_MODULE}.TensorStorageMetadata").get("size")
        value: Any = Opaque()
        if _are(size, (int,)) and type(flat) is str:
            value = Tensor(Storage(flat, "", 0), "", shape=size)
        found.update({key: value for key in way[-1:]})
    return root


def _places(stored: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]:
    """Return where chunks are stored, by flat name and offsets."""
    places = {}
    for index, place in stored.items():
        fields = _fields(index, f"{_MODULE}.MetadataIndex")
        flat, offsets = fields.get("fqn"), fields.get("offset")
        if type(flat) is str and _are(offsets, (int,)):
            places[flat, offsets] = _fields(place, ".".join(_STORAGE_INFO))
    return places


def _stated(found: Any, fail: _Fail) -> tuple[DType, tuple[int, ...], list[Any]]:
    """Return the dtype, shape and chunks of a tensor's metadata."""
    fields = _fields(found)
    properties, chunks = fields.get("properties"), fields.get("chunks")
    match properties:
        case Instance(state=(Global(role="dtype", value=name), *_)):
            dtype = BY_NAME.get(name)
        case _:
            name, dtype = kind_of(properties), None
    if dtype is None or not dtype.itemsize:
        raise fail("unknown dtype", f"one of {', '.join(BY_NAME)}", name)
    if type(chunks) is not list:
        raise fail("its chunks are not valid", "a list", kind_of(chunks))
    return dtype, _shape(fields.get("size"), fail), chunks


def _range(
    place: Mapping[str, Any] | None, origin: tuple[int, ...], fail: _Fail
) -> tuple[str, int, int]:
    """Return the file of a chunk, and its range there."""
    if place is None:
        raise fail("a chunk is missing", f"it at {list(origin)} in storage_data", "no such item")
    if place.get("transform_descriptors"):
        problem = "was saved with transforms, such as a compression"
        raise fail(problem, "dcp.save without extensions", "transform_descriptors")
    file, start, nbytes = (place.get(name) for name in ("relative_path", "offset", "length"))
    if type(file) is not str or not file.endswith(".distcp") or {*file} & {*"/\\\0"}:
        raise fail("a chunk is outside of the folder", "a file *.distcp in it", describe(file))
    if type(start) is not int or type(nbytes) is not int or min(start, nbytes) < 0:
        raise fail("the place of a chunk is not valid", "an offset and a length in bytes")
    return file, start, start + nbytes


def _chunk(file: LocalFile, item: _Item) -> Chunk:
    """Return a chunk with its place in a file, after reading its archive's pickle."""
    if item.stop > file.nbytes:
        problem = "a chunk is cut off"
        raise TruncatedFileError(file.path, problem, item.stop, file.nbytes, tensor=item.name)
    try:
        archive = Archive.of(_Slice(file, item.start, item.stop - item.start))
        tensor = archive.root
        if type(tensor) is not Tensor:
            raise HeaderError(file.path, "a chunk is no tensor", "a tensor", kind_of(tensor))
        dtype, at = archive.locate(item.name, tensor)
        if (dtype, tensor.shape) != (item.dtype, item.shape):
            shown = (f"{d} {list(n)}" for d, n in ((item.dtype, item.shape), (dtype, tensor.shape)))
            raise HeaderError(file.path, "a chunk contradicts the metadata", *shown)
    except CheckpointError as error:
        raise error.of_tensor(item.name) from error
    strides = tuple(stride * dtype.itemsize for stride in tensor.strides)
    return Chunk(item.origin, item.shape, item.start + at, strides)


class _Slice:
    """Bytes of a file as a `File`."""

    def __init__(self, file: File, start: int, nbytes: int) -> None:
        self.path, self.nbytes = file.path, nbytes
        self._file, self._start = file, start

    def read(self, start: int, stop: int) -> bytes:
        return self._file.read(self._start + start, self._start + min(stop, self.nbytes))


def _fields(found: Any, name: str = "") -> Mapping[str, Any]:
    """Return the attributes of an instance of a class with this name (any if ""); {} for none."""
    if type(found) is not Instance or name not in ("", found.name):
        return {}
    return found.state if type(found.state) is dict else {}


def _are(found: Any, types: tuple[type, ...]) -> TypeGuard[tuple[Any, ...]]:
    """Return whether an object is a tuple of few members, all of these types."""
    few = type(found) is tuple and len(found) <= _MOST_AXES  # many objects may share a long one
    return few and all(type(each) in types for each in found)


def _shape(found: Any, fail: _Fail) -> tuple[int, ...]:
    """Return a tuple of lengths."""
    if _are(found, (int,)) and all(0 <= length <= _MOST_LENGTH for length in found):
        return found
    raise fail("a shape is not valid", f"lengths of 0 to {_MOST_LENGTH}", kind_of(found))
