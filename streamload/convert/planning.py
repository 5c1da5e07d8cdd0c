"""What a conversion will write, from headers alone: every file, and every tensor's place in it.

Pure but for looking at what lies beside the checkpoint. The files are in the layout of Hugging
Face: ``model.safetensors``, or ``model-00001-of-00002.safetensors`` and so on with
``model.safetensors.index.json`` (source: "Serializing to files" in the documentation of
huggingface_hub). The data of each begins at a multiple of 64 bytes, and so does every tensor but
those that follow one whose length is no multiple of 64: those come last, and begin at a multiple of
their element at least.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamload.cast.table import OutOfRange, supported
from streamload.checkpoint import remote
from streamload.checkpoint.checkpoint import Checkpoint, from_headers
from streamload.checkpoint.header import (
    MAX_HEADER_NBYTES,
    TensorInfo,
    is_text,
    parse_header,
    unreadable,
)
from streamload.checkpoint.readers import ResolvedKind
from streamload.checkpoint.url import Url
from streamload.digests import SIDECAR, hasher
from streamload.dtypes import DType, parse_dtype
from streamload.errors import CheckpointError, ShardNotFoundError, UnsupportedCastError
from streamload.load import plan as plan_load
from streamload.mapping import Rename, sources
from streamload.plan.partition import Node
from streamload.plan.planner import DTypePolicy
from streamload.selection import Selection, check_patterns
from streamload.units import format_bytes, format_table, round_up

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NODE_PLAN = "plan.json"
#: In the destination: what is being written, until it is whole.
WORK = ".streamload"

_ALIGNMENT = 64
_CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before
_BLOCK_NBYTES = 4096  # what a file takes of a disk is a multiple of this
_BOOK_NBYTES = 512  # of journal and sidecar, for each tensor
# Of a header, what an entry takes beside its name and shape: keys, quotes, a dtype, two offsets.
_ENTRY_NBYTES = 96

# Beside a checkpoint, what is not copied: weights in any format, and their indexes.
# fmt: off
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".ckpt", ".dduf", ".ggml", ".gguf", ".h5", ".keras",
    ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pb", ".pt", ".pth", ".tflite",
)
# fmt: on
_LARGEST_COPIED_NBYTES = 2**28  # vocabularies and tables have tens of MB
#: Beside a single file of any name, only what is known to belong to a model is.
_OF_A_MODEL = re.compile(
    r"config\.json|generation_config\.json|(.*_)?tokenizer.*|special_tokens_map\.json|"
    r"added_tokens\.json|vocab.*|merges\.txt|chat_template.*|(pre)?processor_config\.json|"
    r"(.*\.)?spiece\.model"
)
#: Of those, what is asked for where nothing is listed.
_USUAL = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "spiece.model"),
    *("preprocessor_config.json", "processor_config.json"),
)


@dataclass(frozen=True, slots=True)
class RenamePatterns:
    """Renames by patterns: the first that matches a whole name decides; others keep theirs.

    A ``*`` in a pattern stands for any text, and each ``*`` in what it becomes for the text of
    the ``*`` at the same place: ``model.*`` to ``*`` takes a prefix away.

    Attributes:
        rules: (pattern, what it becomes), in order.
    """

    rules: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> RenamePatterns:
        """Read ``FROM=TO`` texts.

        Raises:
            ValueError: one is not that, or has more ``*`` behind than before.
        """
        rules = []
        for text in texts:
            before, equals, after = text.partition("=")
            if not equals or not before or not after:
                raise ValueError(f"expected FROM=TO, found {text!r}")
            if after.count("*") > before.count("*"):
                raise ValueError(f"{text!r} has more * in what names become than in the pattern")
            rules.append((before, after))
        return cls(tuple(rules))

    @staticmethod
    def match(before: str, name: str) -> re.Match[str] | None:
        """How a name matches what stands before a "="; a group for each ``*``."""
        pattern = "(.*)".join(re.escape(part) for part in before.split("*"))
        return re.fullmatch(pattern, name, re.DOTALL)

    def __call__(self, name: str) -> str:
        """What a name becomes."""
        for before, after in self.rules:
            match = self.match(before, name)
            if match:
                first, *rest = after.split("*")
                texts = zip(match.groups(), rest, strict=False)
                return first + "".join(text + part for text, part in texts)
        return name


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for.

    Attributes:
        policy: the dtypes.
        out_of_range: what becomes of finite values that a dtype cannot represent.
        max_shard_nbytes: most bytes of a file with more than one tensor.
        nodes: one folder for each; () for one checkpoint.
        selection: which tensors are converted.
        rename: what names become.
    """

    policy: DTypePolicy
    out_of_range: OutOfRange
    max_shard_nbytes: int
    nodes: tuple[Node, ...] = ()
    selection: Selection = field(default_factory=Selection)
    rename: Rename | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values; of a callable ``rename``, that there is one."""
        rename: object = None
        if isinstance(self.rename, RenamePatterns):
            rename = [list(rule) for rule in self.rename.rules]
        elif isinstance(self.rename, Mapping):
            rename = [list(rule) for rule in self.rename.items()]
        elif self.rename is not None:
            rename = "by a function"
        return {
            "dtype": [[p, "checkpoint" if d is None else d.name] for p, d in self.policy.rules],
            "out_of_range": self.out_of_range,
            "max_shard_nbytes": self.max_shard_nbytes,
            "nodes": [[node.name, node.budget] for node in self.nodes],
            "select": list(self.selection.select),
            "exclude": list(self.selection.exclude),
            "rename": rename,
        }


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A tensor as it will be written.

    Attributes:
        name: its name in the output.
        info: what it is read from.
        dtype: its dtype in the output.
        start: first byte, counted from the start of its file.
        stop: last byte, exclusive.
    """

    name: str
    info: TensorInfo
    dtype: DType
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OutFile:
    """A safetensors file that will be written.

    Attributes:
        path: where, below the destination; with "/" on any system.
        header: its first bytes: the length prefix, the JSON, and spaces up to the data.
        nbytes: its length.
        tensors: by first byte.
    """

    path: str
    header: bytes = field(repr=False)
    nbytes: int
    tensors: tuple[OutTensor, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Document:
    """A small file that is written as it stands here.

    Attributes:
        path: where, below the destination.
        data: its bytes.
        mode: its permissions, or None for those of any new file.
    """

    path: str
    data: bytes = field(repr=False)
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """A file from beside the checkpoint that is copied with its permissions.

    Attributes:
        path: where to, below the destination.
        source: the file.
        nbytes: its length.
        mode: its permissions.
    """

    path: str
    source: Path
    nbytes: int
    mode: int


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Everything that a conversion will write.

    Attributes:
        path: the source.
        destination: the folder that it will be in.
        files: the safetensors files, in the order in which they are written.
        documents: config.json where its dtype changes, and the plans of nodes.
        indexes: one for each folder that has several files; they are published last.
        copied: what is copied.
        options: what was asked for, as plain JSON values.
        notes: what a user may want to know of, one sentence each.
    """

    path: str
    destination: Path
    files: tuple[OutFile, ...]
    documents: tuple[Document, ...]
    indexes: tuple[Document, ...]
    copied: tuple[Copied, ...]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def read_nbytes(self) -> int:
        """Bytes of data that are read."""
        return sum(t.info.nbytes for file in self.files for t in file.tensors)

    @property
    def written_nbytes(self) -> int:
        """Bytes of the safetensors files."""
        return sum(file.nbytes for file in self.files)

    @property
    def needed_nbytes(self) -> int:
        """Bytes of disk that all of it takes."""
        small = [len(d.data) for d in (*self.documents, *self.indexes)]
        lengths = [file.nbytes for file in self.files] + small + [c.nbytes for c in self.copied]
        tensors = sum(len(file.tensors) for file in self.files)
        disk = sum(round_up(nbytes, _BLOCK_NBYTES) for nbytes in lengths)
        return disk + round_up(tensors * _BOOK_NBYTES, _BLOCK_NBYTES)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the checkpoints, below the destination: "" for itself, or the nodes'."""
        return tuple(dict.fromkeys(folder_of(file.path) for file in self.files))

    def names(self, folder: str) -> tuple[str, ...]:
        """Every path that is published in a folder, in that order; the index is the last one."""
        small = [*(c.path for c in self.copied), *(d.path for d in self.documents)]
        large = [*(file.path for file in self.files), *(index.path for index in self.indexes)]
        whole = (*small, in_folder(folder, SIDECAR), *large)
        return tuple(path for path in whole if folder_of(path) == folder)

    @property
    def digest(self) -> str:
        """Of what is written where, from what: the same plan has the same."""
        digest = hasher()
        for file in self.files:
            tensors = [
                (t.name, t.info.name, t.info.dtype.code, t.info.shard.name, t.info.start, t.start)
                for t in file.tensors
            ]
            for part in (json.dumps([file.path, tensors]).encode(), file.header):
                digest.update(memoryview(part))
        return digest.hexdigest()

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(
            {
                "path": self.path,
                "destination": str(self.destination),
                "options": dict(self.options),
                "read_nbytes": self.read_nbytes,
                "written_nbytes": self.written_nbytes,
                "needed_nbytes": self.needed_nbytes,
                "files": [
                    {
                        "path": file.path,
                        "nbytes": file.nbytes,
                        "data_start": len(file.header),
                        "tensors": [
                            {
                                "name": t.name,
                                "source": t.info.name,
                                "src": t.info.dtype.name,
                                "dtype": t.dtype.name,
                                "shape": list(t.info.shape),
                                "start": t.start,
                                "stop": t.stop,
                            }
                            for t in file.tensors
                        ],
                    }
                    for file in self.files
                ],
                "documents": [d.path for d in (*self.documents, *self.indexes)],
                "copied": [c.path for c in self.copied],
                "notes": list(self.notes),
            }
        )

    def __str__(self) -> str:
        """A table of the files, and what is cast."""
        rows = [
            (file.path, str(len(file.tensors)), format_bytes(file.nbytes)) for file in self.files
        ]
        casts = Counter(
            (t.info.dtype.name, t.dtype.name)
            for file in self.files
            for t in file.tensors
            if t.info.dtype is not t.dtype
        )
        others = [d.path for d in (*self.indexes, *self.documents)]
        others += [c.path for c in self.copied]
        return "\n".join(
            [
                *format_table(("file", "tensors", "bytes"), rows, right=2),
                *(f"{n} tensors from {src} to {dst}" for (src, dst), n in casts.items()),
                f"{format_bytes(self.read_nbytes)} to be read, {format_bytes(self.needed_nbytes)} "
                f"of disk taken in {self.destination}",
                *([f"with {', '.join(others)}"] if others else []),
                *(f"note: {note}" for note in self.notes),
            ]
        )


def in_folder(folder: str, name: str) -> str:
    """The path of a file in a folder below the destination."""
    return f"{folder}/{name}" if folder else name


def folder_of(path: str) -> str:
    """The folder below the destination that a path is in."""
    return path.rpartition("/")[0]


def plan_conversion(checkpoint: Checkpoint, destination: Path, options: Options) -> ConvertPlan:
    """Decide a conversion.

    Raises:
        CheckpointError: two tensors would get one name, a name cannot be written, or what lies
            beside the checkpoint cannot be listed.
        PlanInfeasibleError: a node cannot hold its part.
        UnsupportedCastError: a dtype cannot be cast, or must not be.
        ValueError: a pattern matches no tensor, none is left, or a node's name is no folder's.
    """
    chosen = _chosen(checkpoint, options.selection)
    check_patterns("dtype", (pattern for pattern, _ in options.policy.rules), checkpoint.tensors)
    _check_rename(options.rename, checkpoint.tensors)
    renamed, _, _ = sources(chosen, None, options.rename)
    wanted = {name: source.rows[0].tensor for name, source in renamed.items()}
    if not wanted:
        raise ValueError("no tensor is left to be converted")
    for name, tensor in wanted.items():
        if name == "__metadata__" or not is_text(name):
            raise CheckpointError(
                checkpoint.path, f"{name!r} cannot be a tensor's name", tensor=tensor
            )
    dtypes = {tensor: _dtype(checkpoint, tensor, options.policy) for tensor in wanted.values()}
    notes = [
        f"__metadata__ {key!r} is left out: the files do not agree on it"
        for key in sorted({k for h in checkpoint.shards for k in h.metadata})
        if key not in checkpoint.metadata
    ]
    beside = _beside(checkpoint)
    if beside.left:
        more = f" and {len(beside.left) - 8} more" * (len(beside.left) > 8)
        notes.append(f"not copied: {', '.join(beside.left[:8])}{more}")
    config = _followed(checkpoint, list(dtypes.items()))
    parts, node_plans = _parts(chosen, options, wanted)
    files: list[OutFile] = []
    documents: list[Document] = []
    indexes: list[Document] = []
    copied: list[Copied] = []
    metadata = {"format": "pt", **checkpoint.metadata}
    for folder, tensors in parts.items():
        if not tensors:
            notes.append(f"{folder} holds nothing: there are fewer parts than nodes")
            continue
        infos = [(name, checkpoint.tensors[t], dtypes[t]) for name, t in tensors.items()]
        mine = _files(folder, infos, metadata, options.max_shard_nbytes)
        files += mine
        if len(mine) > 1:
            indexes.append(_index(folder, mine))
        if config is not None:
            mode = beside.local[_CONFIG].mode if _CONFIG in beside.local else None
            documents.append(Document(in_folder(folder, _CONFIG), config, mode))
        documents += [
            Document(in_folder(folder, name), data)
            for name, data in beside.fetched.items()
            if name != _CONFIG or config is None
        ]
        copied += [
            replace(found, path=in_folder(folder, name))
            for name, found in beside.local.items()
            if name != _CONFIG or config is None
        ]
        if folder in node_plans:
            documents.append(_node_plan(folder, mine, destination, options, node_plans[folder]))
    return ConvertPlan(
        path=str(checkpoint.path),
        destination=destination,
        files=tuple(files),
        documents=tuple(documents),
        indexes=tuple(indexes),
        copied=tuple(copied),
        options=MappingProxyType(options.to_json()),
        notes=tuple(notes),
    )


# --- which tensors, as what -----------------------------------------------------------------------


def _check_rename(rename: Rename | None, names: Collection[str]) -> None:
    """Hold every rule to rename something, as far as rules are known.

    Raises:
        ValueError: one is of no tensor.
    """
    unmatched = None
    if isinstance(rename, RenamePatterns):
        rules = (before for before, _ in rename.rules)
        unmatched = next((b for b in rules if not any(rename.match(b, n) for n in names)), None)
    elif isinstance(rename, Mapping):
        unmatched = next((name for name in rename if name not in names), None)
    if unmatched is not None:
        raise ValueError(f"rename: no tensor's name matches {unmatched!r}")


def _chosen(checkpoint: Checkpoint, selection: Selection) -> Checkpoint:
    """The checkpoint with those tensors alone that are meant."""
    selection.check(checkpoint.tensors)
    tensors = {name: info for name, info in checkpoint.tensors.items() if name in selection}
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def _dtype(checkpoint: Checkpoint, name: str, policy: DTypePolicy) -> DType:
    info = checkpoint.tensors[name]
    # what nothing is said of stays as it is
    dst = policy.resolve(name, info.dtype, native_bf16=True)
    if dst is info.dtype:
        return dst
    if not supported(info.dtype, dst):
        raise UnsupportedCastError(info.dtype.name, dst.name, tensor=name, path=info.shard)
    scale = checkpoint.scale_of(name)
    if scale is not None:
        raise UnsupportedCastError(
            info.dtype.name,
            dst.name,
            reason=f"its values mean nothing without their scale ({scale}); "
            f'keep them with the dtype "checkpoint"',
            tensor=name,
            path=info.shard,
        )
    return dst


def _parts(
    chosen: Checkpoint, options: Options, wanted: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """By folder: the tensors to be written, name to source; and of nodes, what they hold."""
    if not options.nodes:
        return {"": dict(wanted)}, {}
    for node in options.nodes:
        if not re.fullmatch(r"[^./\\\0][^/\\\0]*", node.name) or len(os.fsencode(node.name)) > 200:
            raise ValueError(f"the node {node.name!r} cannot have a folder of that name")
    rules = {pattern: dtype or "checkpoint" for pattern, dtype in options.policy.rules}
    split = plan_load(
        chosen,
        nodes=options.nodes,
        dtype=rules | {"*": rules.get("*", "checkpoint")},
        out_of_range=options.out_of_range,
        rename=options.rename,
    )
    parts: dict[str, dict[str, str]] = {node.name: {} for node in options.nodes}
    for p in split.placements:
        parts[p.device][p.name] = p.source[0].tensor
    return parts, {device.device: device for device in split.devices}


def _node_plan(
    folder: str, files: Sequence[OutFile], destination: Path, options: Options, held: Any
) -> Document:
    """The plan of a load of a node's folder, with the layers that it has of the whole."""
    headers = [parse_header(file.header, destination / file.path, file.nbytes) for file in files]
    node = next(node for node in options.nodes if node.name == folder)
    made = plan_load(from_headers(destination / folder, headers), nodes=[node], dtype="checkpoint")
    (device,) = made.devices
    device = replace(device, layers=held.layers, embedding=held.embedding, head=held.head)
    # of no machine: where it lies and how it is best read is seen where it is loaded
    pread: ResolvedKind = "pread"
    readers = tuple(pread for _ in files)
    made = replace(made, path=".", devices=(device,), readers=readers, reader_reasons=())
    return Document(in_folder(folder, NODE_PLAN), made.to_json().encode() + b"\n")


# --- files ----------------------------------------------------------------------------------------

_Wanted = tuple[str, TensorInfo, DType]


def _files(
    folder: str, tensors: Sequence[_Wanted], metadata: Mapping[str, str], max_nbytes: int
) -> list[OutFile]:
    """Fill files one after the other, in the order given."""
    base = 8 + _ALIGNMENT + len(_json({"__metadata__": dict(metadata)}))
    shards: list[list[_Wanted]] = []
    header_nbytes = data_nbytes = 0
    for name, info, dtype in tensors:
        entry = len(_json([name, list(info.shape)])) + _ENTRY_NBYTES
        nbytes = dtype.nbytes(info.numel)
        header_nbytes += entry
        data_nbytes += nbytes
        if (
            not shards
            or header_nbytes + data_nbytes > max_nbytes
            or header_nbytes > MAX_HEADER_NBYTES
        ):
            shards.append([])
            header_nbytes, data_nbytes = base + entry, nbytes
        shards[-1].append((name, info, dtype))
    single = len(shards) == 1
    return [
        _file(
            in_folder(
                folder,
                SINGLE if single else f"model-{i:05}-of-{len(shards):05}.safetensors",
            ),
            shard,
            metadata,
        )
        for i, shard in enumerate(shards, start=1)
    ]


def _file(path: str, tensors: Sequence[_Wanted], metadata: Mapping[str, str]) -> OutFile:
    # stable: but for the few of odd lengths, in the order in which they are read
    ordered = sorted(tensors, key=lambda t: -_divisor(t[2].nbytes(t[1].numel)))
    document: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets = []
    start = 0
    for name, info, dtype in ordered:
        stop = start + dtype.nbytes(info.numel)
        document[name] = {
            "dtype": dtype.code,
            "shape": list(info.shape),
            "data_offsets": [start, stop],
        }
        offsets.append((start, stop))
        start = stop
    text = _json(document)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    out = tuple(
        OutTensor(name, info, dtype, len(header) + first, len(header) + last)
        for (name, info, dtype), (first, last) in zip(ordered, offsets, strict=True)
    )
    return OutFile(path, header, len(header) + start, out)


def _divisor(nbytes: int) -> int:
    """The largest power of two up to the alignment that divides a length."""
    return min(nbytes & -nbytes or _ALIGNMENT, _ALIGNMENT)


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _index(folder: str, files: Sequence[OutFile]) -> Document:
    document = {
        "metadata": {"total_size": sum(t.nbytes for file in files for t in file.tensors)},
        "weight_map": {
            t.name: file.path.rpartition("/")[2] for file in files for t in file.tensors
        },
    }
    return Document(in_folder(folder, INDEX), json.dumps(document, indent=2).encode() + b"\n")


# --- beside the checkpoint ------------------------------------------------------------------------


@dataclass(slots=True)
class _Beside:
    """What lies beside a checkpoint.

    Attributes:
        local: files to be copied, by name.
        fetched: the bytes of those that are not on this machine, by name.
        left: names of what is not copied and might have been expected.
    """

    local: dict[str, Copied] = field(default_factory=dict)
    fetched: dict[str, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def _beside(checkpoint: Checkpoint) -> _Beside:
    path = checkpoint.path
    if isinstance(path, Url):
        return _Beside(fetched=_fetched(path.parent) if checkpoint.config else {})
    belongs: Callable[[str], object] = _OF_A_MODEL.fullmatch
    if path.is_dir() or path.name in (SINGLE, INDEX):
        belongs = bool  # the folder is the model's own
    folder = path if path.is_dir() else path.parent
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error
    found = _Beside()
    if belongs is not bool and _CONFIG not in names:
        return found
    for name in names:
        if name.startswith(".") or name in (SIDECAR, NODE_PLAN) or name.endswith(_WEIGHTS):
            continue
        if not belongs(name):
            continue
        try:
            status = os.stat(folder / name)
        except OSError:  # a symlink that leads nowhere
            found.left.append(name)
            continue
        if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST_COPIED_NBYTES:
            mode = stat.S_IMODE(status.st_mode)
            found.local[name] = Copied(name, folder / name, status.st_size, mode)
        else:
            found.left.append(name + "/" * stat.S_ISDIR(status.st_mode))
    return found


def _fetched(folder: Url) -> dict[str, bytes]:
    """What a server has of the files that models have: it does not list its folders."""
    found = {}
    with remote.connections():
        for name in _USUAL:
            with suppress(ShardNotFoundError):
                found[name] = remote.read_file(folder / name, _LARGEST_COPIED_NBYTES)
    return found


def _followed(checkpoint: Checkpoint, dtypes: Sequence[tuple[str, DType]]) -> bytes | None:
    """config.json with the dtypes that the tensors will have, or None where none changes."""
    became: dict[str, Counter[str]] = {}
    overall: Counter[str] = Counter()
    for name, dtype in dtypes:
        info = checkpoint.tensors[name]
        if dtype.kind == "float":
            became.setdefault(info.dtype.name, Counter())[dtype.name] += dtype.nbytes(info.numel)
            overall[dtype.name] += dtype.nbytes(info.numel)
    if all(checkpoint.tensors[name].dtype is dtype for name, dtype in dtypes):
        return None
    (main, _), *_ = overall.most_common(1)

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
        return {k: follow(v) if k in _DTYPE_KEYS else v for k, v in values.items()}

    config = section(checkpoint.config)
    for key, value in config.items():
        # the parts of a model with several: text_config, vision_config; not how it is quantised
        if key.endswith("_config") and isinstance(value, dict) and "quantization" not in key:
            config[key] = section(value)
    if config == dict(checkpoint.config):
        return None
    return json.dumps(config, indent=2).encode() + b"\n"


def all_paths(plan: ConvertPlan) -> Iterator[str]:
    """Every path that will be published, in that order: all indexes last."""
    lasts = {index.path for index in plan.indexes}
    names = [path for folder in plan.folders for path in plan.names(folder)]
    yield from (path for path in names if path not in lasts)
    yield from lasts
