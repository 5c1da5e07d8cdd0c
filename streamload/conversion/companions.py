"""Small files that go with the tensors of a conversion, such as config.json and tokenizers."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from streamload.checkpoint.digests import SIDECAR
from streamload.checkpoint.open import Checkpoint, read_json_file
from streamload.codecs.weights import CONFIG_KEYS
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import DType, parse_dtype
from streamload.core.location import Location, Url
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files import remote
from streamload.files.header import SAFETENSORS, unreadable
from streamload.formats.reader import UNREAD_SUFFIXES, readers
from streamload.formats.safetensors import INDEX, SINGLE
from streamload.planning.dequantize import all_dequantized

NODE_PLAN = "plan.json"
#: What the dtype of a model is in.
CONFIG = "config.json"
#: What the modules of a sentence-transformers model are in.
MODULES = "modules.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before

#: Longer files are left where they are: vocabularies and tables have tens of MB.
LARGEST_COPIED_NBYTES = 2**28
_WORK = ".streamload"  # in the destination of a conversion
_HELD_NBYTES = 2**20  # of a file on a server: more is fetched when it is written
_HTML = ("text/html", "application/xhtml+xml")
_SPACE = b" \t\r\n"
#: With a single file of any name, only files of these names belong to the model.
_OF_A_MODEL = re.compile(
    r"config\.json|generation_config\.json|(.*_)?tokenizer.*|special_tokens_map\.json|"
    r"added_tokens\.json|vocab.*|merges\.txt|chat_template.*|(pre)?processor_config\.json|"
    r"(.*\.)?spiece\.model"
)
_CACHED = re.compile(r"(models|datasets|spaces)--")  # folders of the Hugging Face cache
#: Those that are looked for on a server that does not list its files.
_USUAL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "spiece.model"),
    *("preprocessor_config.json", "processor_config.json", MODULES),
    *("config_sentence_transformers.json", "sentence_bert_config.json"),
)


#: Makes a file's bytes when all large files are whole: of their md5 sums, by path.
Late: TypeAlias = Callable[[Mapping[str, str]], bytes]


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A small file of a conversion."""

    path: str  # below the destination; with "/" on any system
    # its bytes, the file that is copied, or what makes it of the sums of all large files
    content: bytes | Location | Late = field(repr=False)
    nbytes: int  # its length; if a server does not give it, the bytes seen so far
    mode: int | None = None  # its permissions; None for those of any new file


def content_of(file: SmallFile) -> bytes:
    """The bytes of a companion; raises CheckpointError if unreadable."""
    if isinstance(file.content, Url):
        return remote.read_file(file.content, LARGEST_COPIED_NBYTES)
    if isinstance(file.content, Path):
        try:
            return file.content.read_bytes()
        except OSError as error:
            raise unreadable(file.content, error) from error
    assert isinstance(file.content, bytes), file.path
    return file.content


def document(path: str, data: bytes, mode: int | None = None) -> SmallFile:
    """A small file of these bytes."""
    return SmallFile(path, data, len(data), mode)


def files_beside(checkpoint: Checkpoint) -> tuple[dict[str, SmallFile], list[str]]:
    """The files that go with a checkpoint, by name; and names of others that are not copied.

    Contents of a tensor file that other formats have in files of their own become such files.
    """
    found, left = _lying_beside(checkpoint)
    made = _said_inside(checkpoint)
    # files of a folder may hold more than a tensor file of it, and may belong to another one
    is_folder = checkpoint.path in (header.path.parent for header in checkpoint.shards)
    return made | found if is_folder else found | made, left


def _said_inside(checkpoint: Checkpoint) -> dict[str, SmallFile]:
    """Contents of files of other formats, as files of their own."""
    headers = [header for header in checkpoint.shards if header.format != SAFETENSORS]
    if not headers:
        return {}
    said = dict(readers()[headers[0].format].documents(headers))
    if any(header.config and header.config == checkpoint.config for header in headers):
        said[CONFIG] = json.dumps(dict(checkpoint.config), indent=2).encode() + b"\n"
    return {name: document(name, data) for name, data in said.items()}


def _lying_beside(checkpoint: Checkpoint) -> tuple[dict[str, SmallFile], list[str]]:
    path = checkpoint.path
    belongs: Callable[[str], object] = _OF_A_MODEL.fullmatch
    if isinstance(path, Url):
        belongs = bool if path.name in ("", SINGLE, INDEX) else belongs
        return _served(path.parent, belongs) if checkpoint.config else ({}, [])
    try:
        is_folder = path.is_dir()
        folder = path if is_folder else path.parent
        names = sorted(os.listdir(folder))
        bounds = _Bounds.of(folder)
    except OSError as error:
        raise unreadable(path, error) from error
    if is_folder or path.name in (SINGLE, INDEX):
        belongs = bool  # the folder is the model's own
    elif CONFIG not in names:
        return {}, []
    found: dict[str, SmallFile] = {}
    left: list[str] = []
    modules = _module_folders(folder) if MODULES in names else frozenset()
    for name in names:
        if not _is_beside(name) or not belongs(name):
            continue
        try:
            status = os.stat(folder / name)
        except OSError:  # a symlink that leads nowhere
            left.append(name)
            continue
        if stat.S_ISDIR(status.st_mode) and belongs is bool:
            if name not in modules and not bounds.hold(folder / name):
                left.append(f"{name}/ (a link that leads out of the checkpoint's folder)")
                continue
            inner = _small_folder(folder, name, bounds, holds_weights=name in modules)
            found |= inner
            left += [f"{name}/"] * (not inner)
        elif stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_COPIED_NBYTES:
            mode = stat.S_IMODE(status.st_mode)
            found[name] = SmallFile(name, bounds.real(folder / name), status.st_size, mode)
        else:
            left.append(name + "/" * stat.S_ISDIR(status.st_mode))
    return found, left


def _is_weights(name: str) -> bool:
    """Whether a file of that name holds weights of any format, or is their index."""
    suffixes = (suffix for reader in readers().values() for suffix in reader.suffixes)
    return name.lower().endswith((*suffixes, *UNREAD_SUFFIXES, ".index.json"))


def _is_beside(name: str) -> bool:
    """Whether a file or folder of that name may go with tensors: no weights, and not our own."""
    ours = name in (SIDECAR, NODE_PLAN) or name.startswith(".")
    return not ours and not _is_weights(name)


def _module_folders(folder: Location) -> frozenset[str]:
    """The folders of the modules of a sentence-transformers model."""
    try:
        listed = parse_json(read_json_file(folder / MODULES))
    except (CheckpointError, ValueError, RecursionError):  # of something else
        return frozenset()
    entries = listed if isinstance(listed, list) else []
    paths = (entry.get("path") for entry in entries if isinstance(entry, dict))
    return frozenset(path for path in paths if isinstance(path, str))


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Where links in a checkpoint's folder may lead: what is copied, people publish.

    In the Hugging Face cache, files of a snapshot are links to blobs of the same repository.
    """

    folders: tuple[str, ...]  # without links

    @classmethod
    def of(cls, folder: Path) -> _Bounds:
        """The bounds of a folder, which may be reached through links itself."""
        real = Path(os.path.realpath(folder))
        parents = (real, *real.parents)
        repositories = (
            above.parent.parent / "blobs"
            for above in parents
            if above.parent.name == "snapshots" and _CACHED.match(above.parent.parent.name)
        )
        return cls((str(real), *map(str, repositories)))

    def hold(self, path: Path) -> bool:
        """Whether a path leads into them."""
        real = os.path.realpath(path)
        return any(os.path.commonpath((folder, real)) == folder for folder in self.folders)

    def real(self, path: Path) -> Path:
        """A path without links; raises CheckpointError where it leads elsewhere."""
        if not self.hold(path):
            raise CheckpointError(
                path,
                "is a link that leads out of the checkpoint's folder, and would be copied",
                f"a file, or a link within {self.folders[0]}: put a copy there, or remove the link",
                os.path.realpath(path),
            )
        return Path(os.path.realpath(path))


def _small_folder(
    folder: Path, name: str, bounds: _Bounds, *, holds_weights: bool
) -> dict[str, SmallFile]:
    """The files of a folder next to the tensors, by their paths, if they are to be copied."""
    found: dict[str, SmallFile] = {}
    bounds.real(folder / name)
    for root, inner, names in os.walk(folder / name):
        if _WORK in inner:  # a conversion is written there
            return {}
        inner[:] = sorted(each for each in inner if not each.startswith("."))
        for each in sorted(names):
            at = Path(root, each)
            if each.startswith("."):
                continue
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
    return {path: replace(f, content=bounds.real(folder / path)) for path, f in found.items()}


def _go_together(lengths: Mapping[str, int], *, holds_weights: bool) -> bool:
    """Whether all files of a folder next to the tensors are copied; else none is.

    Not if they are long together, hold the weights of the model in another form (``onnx/``), or are
    a conversion. A module of sentence-transformers has weights of its own.
    """
    if sum(lengths.values()) > LARGEST_COPIED_NBYTES:
        return False
    if any(path.rpartition("/")[2] == SIDECAR for path in lengths):
        return False
    return holds_weights or not any(map(_is_weights, lengths))


def _listed(folder: Url) -> dict[str, int] | None:
    """The lengths of the files of a folder and below it; None if the server does not list them."""
    if (where := folder.listing) is None:
        return None
    listing, inside = where
    try:
        document = parse_json(read_json_file(listing))
        entries = [(entry["rfilename"], entry["size"]) for entry in document["siblings"]]
    except ShardNotFoundError:
        return None
    except CheckpointError:  # a ValueError, too
        raise
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    found = {}
    for path, nbytes in entries:
        if type(path) is not str or type(nbytes) is not int or not path.startswith(inside):
            continue
        path = path.removeprefix(inside)
        if "\0" not in path and all(p and not p.startswith(".") for p in path.split("/")):
            found[path] = nbytes
    return found


def _chosen(
    folder: Url, listed: Mapping[str, int], belongs: Callable[[str], object]
) -> tuple[list[str], list[str]]:
    """Of all files of a folder, those to copy; and names of others that are not."""
    names = [path for path in listed if "/" not in path and _is_beside(path) and belongs(path)]
    left: list[str] = []
    modules = _module_folders(folder) if MODULES in names else frozenset()
    inner = sorted({path.partition("/")[0] for path in listed if "/" in path})
    for name in inner if belongs is bool else ():
        lengths = {path: n for path, n in listed.items() if path.startswith(f"{name}/")}
        if _is_beside(name) and _go_together(lengths, holds_weights=name in modules):
            names += lengths
        else:
            left.append(f"{name}/")
    return names, left


def _served(
    folder: Url, belongs: Callable[[str], object]
) -> tuple[dict[str, SmallFile], list[str]]:
    """A server's files that go with models, as `files_beside`.

    Some servers answer with a page and status 200 for a missing file: that page is left out.
    """
    found: dict[str, SmallFile] = {}
    with remote.connections():
        listed = _listed(folder)
        names, left = ([*_USUAL], []) if listed is None else _chosen(folder, listed, belongs)
        for name in names:
            url = folder
            for part in name.split("/"):
                url = url / part
            try:
                seen = remote.look(url, _HELD_NBYTES)
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
    """Whether a file is JSON; of a longer one, whether it begins as such."""
    if not whole:
        return head.lstrip(_SPACE)[:1] in (b"{", b"[")
    try:
        parse_json(head)
    except (ValueError, RecursionError):
        return False
    return True


def main_dtype(checkpoint: Checkpoint, dtypes: Mapping[str, DType]) -> str:
    """The dtype that most bytes of floats have; "" without floats."""
    overall: Counter[str] = Counter()
    for name, dtype in dtypes.items():
        if dtype.kind == "float":
            overall[dtype.name] += dtype.nbytes(checkpoint.tensors[name].numel)
    return next((name for name, _ in overall.most_common(1)), "")


def followed_config(
    checkpoint: Checkpoint, dtypes: Mapping[str, DType], said: Mapping[str, Any]
) -> bytes | None:
    """config.json with the dtypes that are written and the keys of ``said``; None if unchanged.

    If all quantized weights are dequantized, it loses its quantization settings.
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
        # the parts of a model with several: text_config, vision_config; not how it is quantised
        if key.endswith("_config") and isinstance(value, dict) and "quantization" not in key:
            config[key] = section(value)
    for key, value in said.items():
        inner = {} if "quantization" in key else config.get(key)
        joins = isinstance(inner, dict) and isinstance(value, dict)
        config[key] = {**(inner or {}), **value} if joins else value
    if config == dict(checkpoint.config):
        return None
    return json.dumps(config, indent=2).encode() + b"\n"
