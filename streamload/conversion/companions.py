"""Small files that a conversion copies or adapts, such as config.json and tokenizers."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from streamload.checkpoint.digests import SIDECAR
from streamload.checkpoint.open import Checkpoint
from streamload.codecs.weights import CONFIG_KEYS
from streamload.conversion.disk import WORK
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import DType, parse_dtype
from streamload.core.location import Location, Url
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files.folder import Folder, folder_at
from streamload.files.header import SAFETENSORS, unreadable
from streamload.formats.reader import FORMATS, UNREAD_SUFFIXES
from streamload.formats.safetensors import INDEX, SINGLE
from streamload.planning.dequantize import all_dequantized

NODE_PLAN = "plan.json"
#: The model's settings, its dtype among them.
CONFIG = "config.json"
#: The modules of a sentence-transformers model.
MODULES = "modules.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before

#: Longer files are not copied: vocabularies and tables have tens of MB.
LARGEST_COPIED_NBYTES = 2**28
_HELD_NBYTES = 2**20  # fetched of a file on a server when planning; the rest when writing
_HTML = ("text/html", "application/xhtml+xml")
_SPACE = b" \t\r\n"
#: With a single file of any name, only files of these names belong to the model.
_OF_A_MODEL = re.compile(
    r"config\.json|generation_config\.json|(.*_)?tokenizer.*|special_tokens_map\.json|"
    r"added_tokens\.json|vocab.*|merges\.txt|chat_template.*|(pre)?processor_config\.json|"
    r"(.*\.)?spiece\.model"
)
#: Follows the name of a file that is not copied.
NO_PART = "(weights that are no part of this checkpoint)"
_CACHED = re.compile(r"(models|datasets|spaces)--")  # folders of the Hugging Face cache
#: Names to request from a server that does not list its files.
_USUAL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "spiece.model"),
    *("preprocessor_config.json", "processor_config.json", MODULES),
    *("config_sentence_transformers.json", "sentence_bert_config.json"),
)


#: Returns a small file's bytes from the md5 sums of all tensor files, by path.
Late: TypeAlias = Callable[[Mapping[str, str]], bytes]


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file without tensors that a conversion writes."""

    path: str  # below the destination; with "/" on any system
    # its bytes; the file to copy; or a function that returns its bytes at the end
    content: bytes | Location | Late = field(repr=False)
    nbytes: int  # its length; if a server does not give it, the bytes seen so far
    mode: int | None = None  # its permissions; None for those of any new file


def content_of(file: SmallFile) -> bytes:
    """Return the bytes of a small file to copy; raises CheckpointError if unreadable."""
    if isinstance(file.content, Url):
        from streamload.files import remote

        return remote.read_file(file.content, LARGEST_COPIED_NBYTES)
    if isinstance(file.content, Path):
        try:
            return file.content.read_bytes()
        except OSError as error:
            raise unreadable(file.content, error) from error
    assert isinstance(file.content, bytes), file.path
    return file.content


def document(path: str, data: bytes, mode: int | None = None) -> SmallFile:
    """Return a `SmallFile` with these bytes; ``mode``: permissions, None for the default."""
    return SmallFile(path, data, len(data), mode)


def files_beside(checkpoint: Checkpoint) -> tuple[dict[str, SmallFile], list[str]]:
    """Return a checkpoint's files without tensors by name, and names of files not copied.

    Configuration and vocabulary inside a tensor file (GGUF) become files as well.
    """
    found, left = _lying_beside(checkpoint)
    made: dict[str, SmallFile] = {}
    if headers := [header for header in checkpoint.shards if header.format != SAFETENSORS]:
        said = dict(FORMATS[headers[0].format].reader().documents(headers))
        if any(header.config and header.config == checkpoint.config for header in headers):
            said[CONFIG] = json.dumps(dict(checkpoint.config), indent=2).encode() + b"\n"
        made = {name: document(name, data) for name, data in said.items()}
    # files of a folder may hold more than a tensor file of it, and may belong to another one
    is_folder = not folder_at(checkpoint.path).name
    return made | found if is_folder else found | made, left


def _lying_beside(checkpoint: Checkpoint) -> tuple[dict[str, SmallFile], list[str]]:
    """Return small files to copy from a checkpoint's folder by name; names of files not copied."""
    place = folder_at(checkpoint.path)
    owns = place.name in ("", SINGLE, INDEX)
    place = folder_at(place.origin())  # of the hub: its cache may have some of the files
    folder = place.path
    if isinstance(folder, Url):
        return _served(place, owns=owns, has_config=bool(checkpoint.config))
    try:
        names = sorted(os.listdir(folder))
        bounds = _bounds(folder)
    except OSError as error:
        raise unreadable(checkpoint.path, error) from error
    if not owns and CONFIG not in names:
        return {}, []
    found: dict[str, SmallFile] = {}
    left = []
    if place.identity("") is not None:
        left.append("what the Hugging Face cache lacks (the Hub was not asked)")
    modules = _module_folders(place) if MODULES in names else frozenset()
    others = _unlisted(checkpoint, names) if owns else []
    left += [f"{name} {NO_PART}" for name in others]
    for name in names:
        if not _belongs(name, owns=owns):
            continue
        try:
            status = os.stat(folder / name)
        except OSError:  # a symlink that leads nowhere
            left.append(name)
            continue
        if stat.S_ISDIR(status.st_mode) and owns:
            if name not in modules and not _is_within(bounds, folder / name):
                left.append(f"{name}/ (a link that leads out of the checkpoint's folder)")
                continue
            inner = _small_folder(folder, name, bounds, holds_weights=name in modules)
            found |= inner
            left += [f"{name}/"] * (not inner)
        elif stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_COPIED_NBYTES:
            mode = stat.S_IMODE(status.st_mode)
            found[name] = SmallFile(name, _real(bounds, folder / name), status.st_size, mode)
        else:
            left.append(name + "/" * stat.S_ISDIR(status.st_mode))
    return found, left


def _is_weights(name: str) -> bool:
    """Whether a file holds weights in any format, or is their index, judging by its name."""
    suffixes = (suffix for row in FORMATS.values() for suffix in row.suffixes)
    return name.lower().endswith((*suffixes, *UNREAD_SUFFIXES, ".index.json"))


def _unlisted(checkpoint: Checkpoint, names: Sequence[str]) -> list[str]:
    """Return the files of a folder in a checkpoint's format that are none of its files."""
    formats = {header.format for header in checkpoint.shards}
    suffixes = tuple(s for name in formats for s in FORMATS[name].suffixes)
    mine = {part.path.name for header in checkpoint.shards for part in header.files}
    return [n for n in names if n.endswith(suffixes) and n not in mine and not n.startswith(".")]


def _belongs(name: str, *, owns: bool) -> bool:
    """Whether a file or folder next to the tensors may be copied, judging by its name.

    ``owns``: whether all of the folder is the model's; else only files of usual names are copied.
    """
    ours = name in (SIDECAR, NODE_PLAN) or name.startswith(".")
    return not ours and not _is_weights(name) and (owns or bool(_OF_A_MODEL.fullmatch(name)))


def _module_folders(folder: Folder) -> frozenset[str]:
    """Return the folders that modules.json of a sentence-transformers model lists."""
    try:
        listed = parse_json(folder.read(MODULES))
    except (CheckpointError, ValueError, RecursionError):  # it is no such file
        return frozenset()
    entries = listed if isinstance(listed, list) else []
    paths = (entry.get("path") for entry in entries if isinstance(entry, dict))
    return frozenset(path for path in paths if isinstance(path, str))


def _bounds(folder: Path) -> Sequence[str]:
    """Return the real folders that links in a checkpoint's folder may lead into.

    Links to other folders are refused: users publish copies, which could leak private files. In the
    Hugging Face cache, files of a snapshot are links to blobs of the same repository.
    """
    real = Path(os.path.realpath(folder))
    repositories = (
        above.parent.parent / "blobs"
        for above in (real, *real.parents)
        if above.parent.name == "snapshots" and _CACHED.match(above.parent.parent.name)
    )
    return (str(real), *map(str, repositories))


def _is_within(bounds: Sequence[str], path: Path) -> bool:
    """Whether a path, with links resolved, is in one of the folders ``bounds``."""
    real = os.path.realpath(path)
    return any(os.path.commonpath((folder, real)) == folder for folder in bounds)


def _real(bounds: Sequence[str], path: Path) -> Path:
    """Return a path with links resolved; CheckpointError if it is in none of ``bounds``."""
    if not _is_within(bounds, path):
        raise CheckpointError(
            path,
            "is a link that leads out of the checkpoint's folder, and would be copied",
            f"a file, or a link within {bounds[0]}: put a copy there, or remove the link",
            os.path.realpath(path),
        )
    return Path(os.path.realpath(path))


def _small_folder(
    folder: Path, name: str, bounds: Sequence[str], *, holds_weights: bool
) -> dict[str, SmallFile]:
    """Return the files of subfolder ``name`` by path; {} if it is not copied."""
    found: dict[str, SmallFile] = {}
    _real(bounds, folder / name)
    for root, inner, names in os.walk(folder / name):
        if WORK in inner:  # a conversion is written there
            return {}
        inner[:] = sorted(each for each in inner if not each.startswith("."))
        for each in sorted(name for name in names if not name.startswith(".")):
            at = Path(root, each)
            try:
                status = at.stat()
            except OSError:  # a symlink that leads nowhere
                return {}
            if not stat.S_ISREG(status.st_mode):
                return {}
            path = at.relative_to(folder).as_posix()
            found[path] = SmallFile(path, at, status.st_size, stat.S_IMODE(status.st_mode))
    lengths = {path: file.nbytes for path, file in found.items()}
    if not _go_together(lengths, holds_weights=holds_weights):
        return {}
    return {path: replace(f, content=_real(bounds, folder / path)) for path, f in found.items()}


def _go_together(lengths: Mapping[str, int], *, holds_weights: bool) -> bool:
    """Whether to copy a folder next to the tensors; ``lengths``: its files' bytes by path.

    A folder is left out if it is large, is a conversion, or holds weights in another format
    (``onnx/``). ``holds_weights``: a module of sentence-transformers, copied with its weights.
    """
    if sum(lengths.values()) > LARGEST_COPIED_NBYTES:
        return False
    if any(path.rpartition("/")[2] == SIDECAR for path in lengths):
        return False
    return holds_weights or not any(map(_is_weights, lengths))


def _chosen(place: Folder, listed: Mapping[str, int], *, owns: bool) -> tuple[list[str], list[str]]:
    """Return paths to copy of ``listed`` (path to length), and folders left out."""
    names = [path for path in listed if "/" not in path and _belongs(path, owns=owns)]
    left: list[str] = []
    modules = _module_folders(place) if MODULES in names else frozenset()
    inner = sorted({path.partition("/")[0] for path in listed if "/" in path})
    for name in inner if owns else ():
        lengths = {path: n for path, n in listed.items() if path.startswith(f"{name}/")}
        if _belongs(name, owns=True) and _go_together(lengths, holds_weights=name in modules):
            names += lengths
        else:
            left.append(f"{name}/")
    return names, left


def _served(
    folder: Folder, *, owns: bool, has_config: bool
) -> tuple[dict[str, SmallFile], list[str]]:
    """Return small files to copy from a server's folder by name; names of files not copied.

    ``owns``: all files of the folder are the model's; else only usual names are copied. Some
    servers answer with a page and status 200 for a missing file: that page is left out.
    """
    from streamload.files import remote

    assert isinstance(folder, remote.WebFolder), folder.path
    found: dict[str, SmallFile] = {}
    with folder.opening():
        listed = folder.lengths()
        if not (has_config if listed is None else owns or CONFIG in listed):
            return {}, []
        names, left = ([*_USUAL], []) if listed is None else _chosen(folder, listed, owns=owns)
        for name in names:
            there = folder.place(name)
            if isinstance(there, Path):
                there = _real(_bounds(there.parent), there)
                found[name] = SmallFile(name, there, there.stat().st_size)
                continue
            try:
                seen = remote.look(there, _HELD_NBYTES)
            except ShardNotFoundError:
                continue
            nbytes = seen.nbytes or len(seen.head)
            if seen.content_type in _HTML:
                left.append(f"{name} (the server sends a page of HTML)")
            elif name.endswith(".json") and not _is_json(seen.head, whole=seen.whole):
                left.append(f"{name} (the server sends something else than JSON)")
            elif nbytes > LARGEST_COPIED_NBYTES:
                left.append(name)
            else:
                found[name] = SmallFile(name, seen.head if seen.whole else seen.url, nbytes)
        if listed is None and MODULES in found:
            modules = sorted(_module_folders(folder) - {""})
            left += [f"{name}/ (the server does not list its files)" for name in modules]
    return found, left


def _is_json(head: bytes, *, whole: bool) -> bool:
    """Whether a server's file is JSON, judging by its first bytes; ``whole`` if these are all."""
    if not whole:
        return head.lstrip(_SPACE)[:1] in (b"{", b"[")
    try:
        parse_json(head)
    except (ValueError, RecursionError):
        return False
    return True


def main_dtype(checkpoint: Checkpoint, dtypes: Mapping[str, DType]) -> str:
    """Return the name of the float dtype with most bytes in ``dtypes`` (by tensor); "" if none."""
    overall: Counter[str] = Counter()
    for name, dtype in dtypes.items():
        if dtype.kind == "float":
            overall[dtype.name] += dtype.nbytes(checkpoint.tensors[name].numel)
    return next((name for name, _ in overall.most_common(1)), "")


def followed_config(
    checkpoint: Checkpoint, dtypes: Mapping[str, DType], said: Mapping[str, Any]
) -> bytes | None:
    """Return config.json with the output ``dtypes`` and new keys; None if unchanged.

    Quantization settings are removed if all quantized weights are dequantized.
    """
    is_plain = all_dequantized(checkpoint)
    became: dict[str, Counter[str]] = {}
    for name, dtype in dtypes.items():
        info = checkpoint.tensors[name]
        if dtype.kind == "float":
            became.setdefault(info.dtype.name, Counter())[dtype.name] += dtype.nbytes(info.numel)
    if not said and all(checkpoint.tensors[name].dtype is dtype for name, dtype in dtypes.items()):
        return None
    main = main_dtype(checkpoint, dtypes)

    def follow(value: object) -> object:
        try:
            stated = parse_dtype(value) if isinstance(value, str) else None
        except ValueError:
            stated = None
        if stated is None or stated.kind != "float":
            return value  # "auto", or nothing that a tensor has
        counts = became.get(stated.name)
        return counts.most_common(1)[0][0] if counts else main

    def section(values: Mapping[str, Any]) -> dict[str, Any]:
        left = {k: v for k, v in values.items() if not (is_plain and k in CONFIG_KEYS)}
        return {k: follow(v) if k in _DTYPE_KEYS else v for k, v in left.items()}

    config = section(checkpoint.config)
    for key, value in config.items():
        # sections of a model with several: text_config, vision_config; not quantization_config
        if key.endswith("_config") and isinstance(value, dict) and "quantization" not in key:
            config[key] = section(value)
    for key, value in said.items():
        inner = {} if "quantization" in key else config.get(key)
        joins = isinstance(inner, dict) and isinstance(value, dict)
        config[key] = {**(inner or {}), **value} if joins else value
    if config == dict(checkpoint.config):
        return None
    return json.dumps(config, indent=2).encode() + b"\n"
