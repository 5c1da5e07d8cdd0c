"""Opens a `Checkpoint` from a file, a folder, an index, a URL or the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from streamload.codecs import stored
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.bounded_json import parse_json
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError
from streamload.files.folder import Folder, locate
from streamload.files.header import (
    Header,
    Limits,
    RepeatedNames,
    Stored,
    Turn,
    check_memory,
    check_strings,
    describe,
    limited,
    parse_json_object,
    some,
)
from streamload.formats.chunks import joined_shards
from streamload.formats.reader import (
    DEFAULT,
    FORMATS,
    UNREAD_SUFFIXES,
    Format,
    known_suffixes,
    read_header,
)

_SUFFIX = ".safetensors"
_INDEX_END = ".index.json"
_PIPELINE = "model_index.json"
_LISTED = 8  # names shown in a message

_MEMBER = re.compile(r"(?P<set>.*)-(?P<number>\d+)-of-(?P<total>\d+)(?P<rest>.*)", re.ASCII)
_ORIGINAL = re.compile(r"consolidated\b.*")  # the same weights in the authors' own layout


@dataclass(frozen=True)
class Checkpoint(Mapping[str, TensorInfo]):
    """An opened checkpoint: its validated headers; no data is read.

    A mapping of tensor names to `TensorInfo`, in the order of `tensors`; true even without tensors.
    Pickling removes user, password and query from URLs: the copy compares and prints, and reading
    it raises CheckpointError if there were any.

    Attributes:
        path: the file, folder or index that was opened; of a repository that the Hugging Face cache
            has, the folder of the snapshot; a `Url` if it is read from a server.
        shards: the headers of its files, in order of name.
        tensors: all tensors by name, in order of shard and place in the file.
        metadata: the shards' ``__metadata__`` together, without keys whose values differ.
        config: the content of ``config.json`` next to the tensors, or a file's own settings in its
            place; empty if there is neither.
    """

    path: Location
    shards: tuple[Header, ...] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    metadata: Mapping[str, str]
    config: Mapping[str, Any] = field(repr=False)

    def __getitem__(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __bool__(self) -> bool:
        return True

    @cached_property
    def headers(self) -> Mapping[Location, Header]:
        """The shards' headers, by path."""
        return {header.path: header for header in self.shards}

    @cached_property
    def turns(self) -> Mapping[str, Turn]:
        """By tensor name, the permutation of the rows into the order of the model."""
        return {name: turn for header in self.shards for name, turn in header.turns.items()}

    @property
    def says_config(self) -> bool:
        """Whether `config` is from the files themselves, not from a ``config.json``."""
        return any(each.config and each.config == self.config for each in self.shards)

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """By tensor name, how a file stores a quantized weight as blocks."""
        return {name: one for header in self.shards for name, one in header.stored.items()}

    @property
    def versions(self) -> Mapping[str, Mapping[str, Any]]:
        """By module name, the versions and other facts that torch stores with its tensors."""
        return {name: each for header in self.shards for name, each in header.versions.items()}

    @cached_property
    def layouts(self) -> Layouts:
        """The tensors, headers and configuration, in which quantized weights are recognized."""
        return Layouts(self.path, self.tensors, self.shards, self.config)

    @cached_property
    def groups(self) -> Mapping[str, QuantizedWeight]:
        """The quantized weights by name, found in the headers alone.

        Raises:
            CheckpointError: a tensor of a weight is missing, or contradicts its other tensors.
        """
        return stored.groups(self.layouts)

    @cached_property
    def members(self) -> Mapping[str, QuantizedWeight]:
        """Maps each tensor of a quantized weight to that weight; raises as `groups`."""
        return {
            info.name: group for group in self.groups.values() for info in group.members.values()
        }

    @cached_property
    def nbytes(self) -> int:
        """Bytes of data of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def shard_numbers(self, infos: Sequence[TensorInfo]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return for each tensor of this checkpoint the index of its shard in `shards`."""
        number_of = {header.path: number for number, header in enumerate(self.shards)}
        paths = [info.shard for info in infos]
        # a path's own hash takes ten times as long, and the paths are few objects
        keys = list(map(id, paths))
        numbers = {k: number_of[path] for k, path in dict(zip(keys, paths, strict=True)).items()}
        return np.fromiter(map(numbers.__getitem__, keys), np.int64, len(keys))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_headers, (self.path, self.shards, dict(self.config))


#: A checkpoint, or its path for `open_checkpoint`.
CheckpointLike: TypeAlias = str | os.PathLike[str] | Checkpoint


def opened(path: CheckpointLike) -> Checkpoint:
    """Return ``path`` if it is a `Checkpoint`, else open the one at that path."""
    if isinstance(path, Checkpoint):
        return path
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of a checkpoint, not {type(path).__name__}")
    return open_checkpoint(path)


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    variant: str | None = None,
    key: str | None = None,
    like: CheckpointLike | None = None,
    limits: Limits | None = None,
) -> Checkpoint:
    """Open a checkpoint: read and validate all of its headers.

    Args:
        path: a file; a folder; an index (``*.safetensors.index.json``); or, where
            nothing of that name exists, ``org/name`` or ``org/name@revision`` on the Hugging Face
            Hub; or ``hf://org/name[@revision][/file]``. These need the extra ``hub``. Or the URL
            (``http://``, ``https://``, ``s3://``, ``gs://``, ``az://``) of a file, of an index (it
            ends with ``.json``) or of a folder (it ends with ``/``); URLs need the extra ``remote``
            or ``stores``. ``~`` is the home folder.
        variant: of a folder, the files that have this in their names: "fp16" for
            ``model.fp16.safetensors``. None: the files without variant, if several files hold the
            same tensors.
        key: of a file that torch.save wrote, or of a folder of torch.distributed.checkpoint, the
            dict whose tensors are the checkpoint: "state_dict", or "ema.state_dict" for one inside
            another, "." for the outermost. None: the only one that holds tensors by name, without
            optimizers, and without single elements among others.
        like: for IREE's parameter archives, which may hold bytes alone: a checkpoint whose tensors
            of the same names give dtypes and shapes. None: tensors without them are
            one-dimensional U8.
        limits: the most bytes of headers, and tensors, for services that open untrusted files.

    A folder's checkpoint consists of the files that ``model.safetensors.index.json`` names; or, if
    ``model.safetensors`` exists and no index names it, of that file alone; or else of all
    ``*.safetensors``, whose names differ in numbers alone, except hidden ones and, if there are
    others, ``consolidated*``. The Hub and
    buckets list their folders; at other URLs only the first two are found. A folder without
    safetensors files may hold ``pytorch_model.bin``, its index and its files, ``*.pth`` and the
    like, or ``.metadata`` and ``*.distcp``.

    A ``.gguf`` file is a checkpoint, too, and any file of a set of them stands for all. Its tensors
    have the names of Hugging Face, and its metadata take the place of ``config.json``.

    A query of the URL, and user and password in it, are sent with each request, and shown nowhere.
    A repository is read at the commit that its revision has now. Its token goes to the host of
    ``HF_ENDPOINT`` alone. What the local cache has is read there. Each request waits for
    ``STREAMLOAD_HTTP_TIMEOUT`` seconds (30) and is tried ``STREAMLOAD_HTTP_TRIES`` times (6).

    Raises:
        ShardNotFoundError: nothing is there, or a shard is missing.
        HeaderError: a header, the index or ``config.json`` is not valid, or they do not agree; or
            they are more than ``limits`` allow.
        TruncatedFileError: a file is shorter than its header states.
        CheckpointError: something cannot be read, or a tensor has another length in ``like``.
        ValueError: ``key`` or ``like`` is given, and files of this format cannot use it.
    """
    with limited(limits):
        folder = locate(path)
        try:
            with folder.opening():
                checkpoint = _opened(folder, variant, key)
        except ShardNotFoundError as error:
            raise folder.explained(error) from error.__cause__
        found = folder.settled([header.path for header in checkpoint.shards])
    checkpoint = replace(checkpoint, path=found) if found != folder.found else checkpoint
    if like is None:
        return checkpoint
    shaped = shaped_like(checkpoint.path, checkpoint.shards, opened(like).tensors)
    return from_headers(checkpoint.path, shaped, checkpoint.config)


def _opened(folder: Folder, variant: str | None, key: str | None) -> Checkpoint:
    found, name = folder.found, folder.name
    if not name:
        if (names := folder.names()) is not None:
            return _open_folder(folder, names, variant, key)
        return _open_unlisted(folder, variant, key)
    if variant is not None and not is_of_variant(name, variant):
        raise ShardNotFoundError(
            found, f"is not of variant {variant!r}", "a folder, or a file of that", name
        )
    if name.endswith(".json"):
        config = _read_config(folder)
        format = _format_of_index(name).keyed(key)
        weight_map = _read_weight_map(folder, name, format)
        return from_headers(found, _indexed(folder, name, weight_map, format), config)
    header = read_header(folder.place(name), key=key)
    headers, format = [header], FORMATS[header.format]
    if format is not DEFAULT:  # one of a set, such as those of a split GGUF
        files = [each for each in format.reader().siblings(header) if each != header.path.name]
        headers += _headers(header.path, folder, files, format)
    mine, others = {info.name for info in header.tensors}, list[Header]()
    for each in _next_rank(header.path.name):
        with suppress(CheckpointError):  # none, or not readable: this file is opened alone
            others.append(read_header(folder.place(each)))
    if any(info.name in mine for other in others for info in other.tensors):
        raise _of_rank(header)
    if not (config := dict(_own_config(headers))):
        # config.json may belong to another file of the folder
        with suppress(CheckpointError):
            config = _read_config(folder)
    return from_headers(found, headers, config)


def _own_config(headers: Iterable[Header]) -> Mapping[str, Any]:
    return next((header.config for header in headers if header.config), {})


def _open_unlisted(folder: Folder, variant: str | None, key: str | None) -> Checkpoint:
    try:
        headers = _usual_headers(folder, DEFAULT, variant)
        DEFAULT.keyed(key)
    except ShardNotFoundError as error:
        for format in FORMATS.values():
            if format is not DEFAULT and format.single:
                with suppress(ShardNotFoundError):
                    headers = _usual_headers(folder, format.keyed(key), variant)
                    break
        else:
            raise error
    return from_headers(folder.path, headers, _read_config(folder) or _own_config(headers))


def _usual_headers(folder: Folder, format: Format, variant: str | None) -> list[Header]:
    index, single = (varied(name, variant) for name in (format.index, format.single))
    try:
        weight_map = _read_weight_map(folder, index, format)
    except ShardNotFoundError:
        try:
            return [read_header(folder.place(single), format=format)]
        except ShardNotFoundError as error:
            needed = f"{index} or {single}" + (f"; {error.expected}" if error.expected else "")
            problem = f"holds no {format.name} file"
            raise ShardNotFoundError(folder.path, problem, needed, error.found) from error
    # a single file that the index does not name takes precedence, as for local folders
    if single in weight_map.values() or not folder.exists(single):
        return _indexed(folder, index, weight_map, format)
    return [read_header(folder.place(single), format=format)]


def from_headers(
    path: Location, headers: Iterable[Header], config: Mapping[str, Any] = MappingProxyType({})
) -> Checkpoint:
    """Return the checkpoint of these headers; raise HeaderError if files share a tensor's name."""
    shards = tuple(sorted(headers, key=lambda header: header.path.name))
    tensors: dict[str, TensorInfo] = {}
    for header in shards:
        found = {info.name: info for info in header.tensors}
        if tensors.keys().isdisjoint(found):  # the loop only finds the name for the error
            tensors |= found
            continue
        for info in header.tensors:
            first = tensors.setdefault(info.name, info)
            if first is not info:
                both = f"{first.shard.name} and {info.shard.name}"
                raise HeaderError(
                    path, "the tensor is in two files", "one file", both, tensor=info.name
                )
    values: dict[str, set[str]] = {}
    for header in shards:
        for key, value in header.metadata.items():
            values.setdefault(key, set()).add(value)
    metadata = {key: found.pop() for key, found in values.items() if len(found) == 1}
    return Checkpoint(
        path,
        shards,
        MappingProxyType(tensors),
        MappingProxyType(metadata),
        MappingProxyType(dict(config)),
    )


def _open_folder(
    folder: Folder, names: Sequence[str], variant: str | None, key: str | None
) -> Checkpoint:
    config = _read_config(folder)
    format = _format_of_folder(names, variant).keyed(key)
    single, index = (varied(name, variant) for name in (format.single, format.index))
    if index and index in names:
        weight_map = _read_weight_map(folder, index, format)
        # saving a single file over a set of shards leaves a stale index: take the file, as
        # transformers does
        if single not in names or single in weight_map.values():
            headers = _indexed(folder, index, weight_map, format)
            return from_headers(folder.path, headers, config or _own_config(headers))
    shards = [single] if single in names else _unindexed(folder, names, variant, format)
    headers = [read_header(folder.place(name), format=format) for name in shards]
    found = _of_one_variant(folder.path, joined_shards(headers), variant)
    return from_headers(folder.path, found, config or _own_config(found))


def _format_of_folder(names: Sequence[str], variant: str | None) -> Format:
    if varied(DEFAULT.index, variant) in names:
        return DEFAULT
    for format in FORMATS.values():
        known = [name for name in names if _is_weights(name, format)]
        if known and (format is DEFAULT or format.reader().weights(known)):
            return format
    return DEFAULT


def _is_weights(name: str, format: Format) -> bool:
    ending = name if format is DEFAULT else name.lower()
    return ending.endswith(format.suffixes) and not name.startswith(".")


def _format_of_index(name: str) -> Format:
    stem = name.removesuffix(_INDEX_END)
    if stem == name or stem.endswith(DEFAULT.suffixes):
        return DEFAULT
    return next((r for r in FORMATS.values() if r.index and stem.endswith(r.suffixes)), DEFAULT)


def _unindexed(
    folder: Folder, names: Sequence[str], variant: str | None, format: Format
) -> list[str]:
    shards = list(format.reader().weights([name for name in names if _is_weights(name, format)]))
    shards = [name for name in shards if not _ORIGINAL.fullmatch(name)] or shards
    folder.check_single(shards)
    if variant is not None:
        known = shards
        shards = [name for name in shards if is_of_variant(name, variant)]
        if known and not shards:
            expected = varied(f"*{_SUFFIX}", variant)
            raise ShardNotFoundError(
                folder.path, f"holds no file of variant {variant!r}", expected, some(known)
            )
    if not shards and _PIPELINE in names:
        raise ShardNotFoundError(
            folder.path,
            "is a pipeline of diffusers, with a folder for each of its models",
            "one of these, or streamload.diffusers.from_pretrained for all of them",
            some(folder.folders(names)),
        )
    if not shards:
        others = sorted(names, key=lambda name: not name.endswith(UNREAD_SUFFIXES))
        known, below = known_suffixes(), _folders_of_weights(folder, names)
        one = f", but its folders do; write {below[0]!r}" if below else ""
        raise ShardNotFoundError(
            folder.path,
            f"holds no file of weights{one}",
            f"{', '.join(known[:-1])} or {known[-1]}",
            some(others) if others else "an empty folder",
        )
    sets: dict[tuple[str, str, str], set[int]] = {}
    for member in filter(None, map(_MEMBER.fullmatch, shards)):
        key = (member["set"], member["total"], member["rest"])
        sets.setdefault(key, set()).add(int(member["number"]))
    for (stem, width, rest), numbers in sets.items():
        first = 0 if 0 in numbers else 1  # some writers count from 0
        wanted = range(first, first + int(width))
        count = int(width) - sum(n in wanted for n in numbers)
        if count:
            gaps = islice((n for n in wanted if n not in numbers), _LISTED)
            missing = [f"{stem}-{n:0{len(width)}}-of-{width}{rest}" for n in gaps]
            raise _missing(folder.path, missing, count, int(width))
    return shards


def _missing(path: Location, names: Sequence[str], count: int, total: int) -> ShardNotFoundError:
    return ShardNotFoundError(
        path, "shards are missing", some(names, count), f"{total - count} of {total} files"
    )


def _read_config(folder: Folder) -> dict[str, Any]:
    """Return the content of ``config.json``, {} if there is none; Infinity and NaN are allowed."""
    path = folder.file(name := "config.json")
    try:
        raw = folder.read(name)
    except ShardNotFoundError:
        return {}
    check_memory(path, len(raw), raw)
    try:
        config = parse_json(raw)
    except (ValueError, RecursionError) as error:
        raise HeaderError(path, "the JSON is not valid", "JSON", str(error)) from error
    if type(config) is not dict:
        raise HeaderError(path, "is not a JSON object", "an object", describe(config))
    return config


def _read_weight_map(folder: Folder, name: str, format: Format) -> dict[str, str]:
    index = folder.file(name)
    document = parse_json_object(folder.read(name), index)
    if isinstance(document, RepeatedNames):
        found = f"{describe(document.name)} more than once"
        raise HeaderError(index, "a key is not unique", "each key once", found)
    weight_map = check_strings(document.get("weight_map"), index, "weight_map")
    if not weight_map:
        raise HeaderError(index, "weight_map is not valid", "at least one tensor", "none")
    for tensor, shard in weight_map.items():
        is_below = not {*shard.split("/")} & {"", ".", ".."} and not {*shard} & {*"\\\0"}
        if not (is_below and shard.endswith(format.suffixes)):
            raise HeaderError(
                index,
                "weight_map names no file in its own folder or below",
                f"the path of a {format.suffixes[0]} file from the folder of the index on",
                describe(shard),
                tensor=tensor,
            )
    files = {*weight_map.values()}
    if len({shard.rpartition("/")[2] for shard in files}) < len(files):
        problem, expected = "weight_map has files of one name in two folders", "a name for each"
        raise HeaderError(index, problem, expected, some(sorted(files)))
    return weight_map


def _indexed(
    folder: Folder, name: str, weight_map: Mapping[str, str], format: Format
) -> list[Header]:
    files, index = sorted(set(weight_map.values())), folder.file(name)
    headers = _headers(index, folder, files, format)
    found: set[str] = set()
    for file, header in zip(files, headers, strict=True):
        for info in header.tensors:
            shard = weight_map.get(info.name)
            if shard != file:
                problem, holds = "weight_map and the shards do not agree", f"{file}, which holds it"
                raise HeaderError(index, problem, holds, shard or "no entry", tensor=info.name)
            found.add(info.name)
    for tensor, shard in weight_map.items():
        if tensor not in found:
            problem = "weight_map names a tensor that its shard does not hold"
            raise HeaderError(index, problem, f"it in {shard}", "it in no shard", tensor=tensor)
    return headers


def _headers(of: Location, folder: Folder, names: Sequence[str], format: Format) -> list[Header]:
    headers: list[Header] = []
    missing = folder.missing(names)
    for name in () if missing else names:  # on a server, requesting a header shows if it exists
        try:
            headers.append(read_header(folder.place(name), format=format))
        except ShardNotFoundError:
            missing.append(name)
    if missing:
        raise _missing(of, missing, len(missing), len(names))
    return headers


def _folders_of_weights(folder: Folder, names: Sequence[str]) -> list[str]:
    found = []
    for path in folder.folders(names) if isinstance(folder.path, Path) else ():
        with suppress(OSError):
            held = os.listdir(path)
            if any(_is_weights(name, format) for format in FORMATS.values() for name in held):
                found.append(path)
    return found


_NUMBER = re.compile(r"-\d+-of-\d+", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)
#: Files of ranks that each hold slices: Meta's, Megatron's and DeepSpeed's, vLLM's.
_OF_RANK = re.compile(r"(consolidated\.|mp_rank_|model-rank-)(\d+)([._-].*)", re.ASCII)


def varied(name: str, variant: str | None) -> str:
    """Return a file's name in a variant: "a.fp16.bin" for "a.bin"; unchanged for None."""
    stem, dot, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}{dot}{ending}"


def is_of_variant(name: str, variant: str) -> bool:
    """Return whether a file of weights, or an index, belongs to a variant, by its name."""
    name = _NUMBER.sub("", name)
    return name.endswith((varied(".safetensors", variant), varied(".index.json", variant)))


def without_variants(names: Iterable[str]) -> list[str]:
    """Return ``names`` without each variant ("a.fp16.bin") whose plain name ("a.bin") is listed."""
    plainly = {name: _NUMBER.sub("", name) for name in names}
    known = set(plainly.values())
    return [name for name, one in plainly.items() if _plain(one) not in known]


def _variants_in(names: Iterable[str]) -> list[str]:
    parts = (_NUMBER.sub("", name).split(".") for name in names)
    return sorted({part[-2] for part in parts if len(part) > 2})


def _of_one_variant(
    folder: Location, headers: Sequence[Header], variant: str | None
) -> Sequence[Header]:
    """Return the headers without variants (``a.fp16.bin``) of files that exist, too (``a.bin``).

    All stay with a ``variant`` or if no tensor repeats. Raise HeaderError if a folder holds several
    variants and no file without one, a model more than once in files of other formats, or files
    whose names differ in more than numbers: without an index these are parts of no one checkpoint.
    """
    tensors = [info.name for header in headers for info in header.tensors]
    repeat = len({*tensors}) < len(tensors)
    names = [header.path.name for header in headers]
    kept, is_other = set(names), headers[0].format != DEFAULT.name
    if repeat and not (variant or is_other):
        kept = set(without_variants(names))
        if len(kept) == len(names) and len(known := _variants_in(names)) > 1:
            written = " or ".join(f'open_checkpoint(path, variant="{name}")' for name in known)
            raise HeaderError(folder, "holds several variants", written, some(names))
    if repeat and set(_next_rank(names[0])) & set(names):
        raise _of_rank(headers[0])
    if len({_DIGITS.sub("0", name) for name in kept}) > 1 or (repeat and is_other):
        raise HeaderError(
            folder,
            "holds several checkpoints",
            "the path of one file, an index, or files that are numbered alike",
            some(names),
        )
    return [header for header in headers if header.path.name in kept]


def _next_rank(name: str) -> list[str]:
    match = _OF_RANK.fullmatch(name)
    if match is None:
        return []
    before, number, after = match.groups()
    others = (n for n in (int(number) + 1, int(number) - 1) if n >= 0)
    return [f"{before}{n:0{len(number)}}{after}" for n in others]


def _of_rank(header: Header) -> HeaderError:
    return HeaderError(
        header.path,
        "is one rank's part of a checkpoint: other files have slices of the same tensors",
        "whole tensors: the repository's files in Hugging Face's form, outside of original/",
        header.path.name,
    )


def _plain(name: str) -> str | None:
    stem, dot, ending = name.rpartition(".")
    head, _, _ = stem.rpartition(".")
    return f"{head}{dot}{ending}" if head else None


_LISTED = 3  # names shown in a message


def shaped_like(
    path: Location, headers: Sequence[Header], like: Mapping[str, TensorInfo]
) -> Iterator[Header]:
    """Yield the headers, with dtypes and shapes from ``like`` for tensors of the same names.

    Only tensors that a header lists as untyped change. Raise ValueError if no file is of a format
    without dtypes, CheckpointError if no name matches or lengths in bytes differ.
    """
    untyped = [name for name, row in FORMATS.items() if row.untyped]
    if not any(header.format in untyped for header in headers):
        formats = ", ".join(sorted({header.format for header in headers}))
        expected = " or ".join(untyped)
        raise ValueError(f"like= is for files without dtypes ({expected}), and {path} is {formats}")
    names = [info.name for header in headers for info in header.tensors]
    if names and like.keys().isdisjoint(names):
        some, others = (", ".join(islice(each, _LISTED)) for each in (like, names))
        raise CheckpointError(path, "no tensor has the name of one of like=", some, others)
    for header in headers:
        if header.format in untyped:
            infos = (
                _shaped(info, like.get(info.name)) if info.name in header.untyped else info
                for info in header.tensors
            )
            header = replace(header, tensors=tuple(infos))
        yield header


def _shaped(info: TensorInfo, other: TensorInfo | None) -> TensorInfo:
    if other is None:
        return info
    if info.nbytes != other.nbytes:
        raise CheckpointError(
            info.shard,
            "its length is not that of its namesake of like=",
            f"{other.nbytes} bytes, {other.dtype.name} of the shape {list(other.shape)}",
            f"{info.nbytes} bytes",
            tensor=info.name,
        )
    return replace(info, dtype=other.dtype, shape=other.shape)
