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
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from streamload.checkpoint.url import Location, Url
from streamload.digests import SIDECAR, hasher
from streamload.dtypes import DType, parse_dtype
from streamload.errors import CheckpointError, ShardNotFoundError, UnsupportedCastError
from streamload.load import split
from streamload.mapping import Rename, sources
from streamload.nesting import parse_json
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
#: What the dtype of a model is in.
CONFIG = "config.json"
_DTYPE_KEYS = ("dtype", "torch_dtype")  # transformers 5, and before
_BLOCK_NBYTES = 4096  # what a file takes of a disk is a multiple of this
_BOOK_NBYTES = 512  # of journal and sidecar, for each tensor

# Beside a checkpoint, what is not copied: weights in any format, and their indexes.
# fmt: off
_WEIGHTS = (
    ".safetensors", ".index.json", ".bin", ".ckpt", ".dduf", ".ggml", ".gguf", ".h5", ".keras",
    ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pb", ".pt", ".pth", ".tflite",
)
# fmt: on
#: Longer files are left where they are: vocabularies and tables have tens of MB.
LARGEST_COPIED_NBYTES = 2**28
_HELD_NBYTES = 2**20  # of a file on a server: more is fetched when it is written
_HTML = ("text/html", "application/xhtml+xml")
_SPACE = b" \t\r\n"
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
    """A file from beside the checkpoint that is copied, with its permissions where it has any.

    Attributes:
        path: where to, below the destination.
        source: the file.
        nbytes: its length; of one on a server that does not say, what was seen of it.
        mode: its permissions; None for those of any new file.
    """

    path: str
    source: Location
    nbytes: int
    mode: int | None = None


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
            digest.update(memoryview(json.dumps(file.path).encode()))
            digest.update(memoryview(file.header))
            for t in file.tensors:
                info = t.info
                read = (t.name, info.name, info.dtype.code, info.shard.name, info.start, t.start)
                digest.update(memoryview(json.dumps(read).encode()))
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
    wanted = _wanted(chosen, options.rename)
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
    config = _followed(checkpoint, dtypes)
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
            mode = beside.copied[CONFIG].mode if CONFIG in beside.copied else None
            documents.append(Document(in_folder(folder, CONFIG), config, mode))
        documents += [
            Document(in_folder(folder, name), data)
            for name, data in beside.held.items()
            if name != CONFIG or config is None
        ]
        copied += [
            replace(found, path=in_folder(folder, name))
            for name, found in beside.copied.items()
            if name != CONFIG or config is None
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


def _wanted(chosen: Checkpoint, rename: Rename | None) -> dict[str, str]:
    """The tensors that are left, by their new names."""
    renamed, _, _ = sources(chosen, None, rename)
    return {name: source.rows[0].tensor for name, source in renamed.items()}


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
    made = split(
        chosen,
        nodes=options.nodes,
        dtype=rules | {"*": rules.get("*", "checkpoint")},
        out_of_range=options.out_of_range,
        rename=options.rename,
    )
    parts: dict[str, dict[str, str]] = {node.name: {} for node in options.nodes}
    for p in made.placements:
        parts[p.device][p.name] = p.source[0].tensor
    return parts, {device.device: device for device in made.devices}


def _node_plan(
    folder: str, files: Sequence[OutFile], destination: Path, options: Options, held: Any
) -> Document:
    """The plan of a load of a node's folder, with the layers that it has of the whole."""
    headers = [parse_header(file.header, destination / file.path, file.nbytes) for file in files]
    node = next(node for node in options.nodes if node.name == folder)
    made = split(from_headers(destination / folder, headers), nodes=[node], dtype="checkpoint")
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
    shards: list[Sequence[_Wanted]] = []
    first = 0
    while first < len(tensors):
        count = _most(tensors, first, metadata, max_nbytes)
        shards.append(tensors[first : first + count])
        first += count
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    return [
        _file(in_folder(folder, name), shard, metadata)
        for name, shard in zip(names, shards, strict=True)
    ]


def _most(
    tensors: Sequence[_Wanted], first: int, metadata: Mapping[str, str], max_nbytes: int
) -> int:
    """How many tensors from one on go into a file; one does in any case.

    How long a header is depends on the digits of all offsets, and so on the order that the tensors
    have in the file. Where bounds on that do not decide, headers are made to see.
    """
    header_nbytes = len(_header((), metadata))
    data_nbytes = sure = count = 0
    for i in range(first, len(tensors)):
        name, info, dtype = tensors[i]
        # with offsets of one digit; where tensors are few the padding decides
        header_nbytes += len(_entry(name, dtype, info.shape, 0, 0)) + 1
        data_nbytes += dtype.nbytes(info.numel)
        least = header_nbytes - _ALIGNMENT + 1
        if least + data_nbytes > max_nbytes or least - 8 > MAX_HEADER_NBYTES:
            break
        count += 1
        most = header_nbytes + _ALIGNMENT + 2 * count * len(str(data_nbytes))
        if most + data_nbytes <= max_nbytes and most - 8 <= MAX_HEADER_NBYTES:
            sure = count

    def too_long(number: int) -> bool:
        ordered = _ordered(tensors[first : first + number])
        header = _header(ordered, metadata)
        nbytes = len(header) + sum(dtype.nbytes(info.numel) for _, info, dtype in ordered)
        return nbytes > max_nbytes or len(header) - 8 > MAX_HEADER_NBYTES

    return max(1, sure + bisect_right(range(sure + 1, count + 1), False, key=too_long))


def _ordered(tensors: Sequence[_Wanted]) -> list[_Wanted]:
    """The order that tensors have in a file."""
    # stable: but for the few of odd lengths, in the order in which they are read
    return sorted(tensors, key=lambda t: -_divisor(t[2].nbytes(t[1].numel)))


def _header(ordered: Iterable[_Wanted], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these tensors, one after the other."""
    entries = [b'"__metadata__":' + _json(dict(metadata))]
    start = 0
    for name, info, dtype in ordered:
        stop = start + dtype.nbytes(info.numel)
        entries.append(_entry(name, dtype, info.shape, start, stop))
        start = stop
    text = b"{" + b",".join(entries) + b"}"
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entry(name: str, dtype: DType, shape: Sequence[int], start: int, stop: int) -> bytes:
    """What a header says of a tensor."""
    said = {"dtype": dtype.code, "shape": list(shape), "data_offsets": [start, stop]}
    return _json(name) + b":" + _json(said)


def _file(path: str, tensors: Sequence[_Wanted], metadata: Mapping[str, str]) -> OutFile:
    ordered = _ordered(tensors)
    header = _header(ordered, metadata)
    out = []
    start = len(header)
    for name, info, dtype in ordered:
        stop = start + dtype.nbytes(info.numel)
        out.append(OutTensor(name, info, dtype, start, stop))
        start = stop
    return OutFile(path, header, start, tuple(out))


def _divisor(nbytes: int) -> int:
    """The largest power of two up to the alignment that divides a length."""
    return min(nbytes & -nbytes or _ALIGNMENT, _ALIGNMENT)


_encoder = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)


def _json(document: object) -> bytes:
    return _encoder.encode(document).encode()


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
        copied: files to be copied, by name.
        held: the bytes of small files that are not on this machine, by name.
        left: names of what is not copied and might have been expected.
    """

    copied: dict[str, Copied] = field(default_factory=dict)
    held: dict[str, bytes] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


def _beside(checkpoint: Checkpoint) -> _Beside:
    path = checkpoint.path
    if isinstance(path, Url):
        return _served(path.parent) if checkpoint.config else _Beside()
    belongs: Callable[[str], object] = _OF_A_MODEL.fullmatch
    try:
        is_folder = path.is_dir()
        folder = path if is_folder else path.parent
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(path, error) from error
    if is_folder or path.name in (SINGLE, INDEX):
        belongs = bool  # the folder is the model's own
    found = _Beside()
    if belongs is not bool and CONFIG not in names:
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
        if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_COPIED_NBYTES:
            mode = stat.S_IMODE(status.st_mode)
            found.copied[name] = Copied(name, folder / name, status.st_size, mode)
        else:
            found.left.append(name + "/" * stat.S_ISDIR(status.st_mode))
    return found


def _served(folder: Url) -> _Beside:
    """What a server has of the files that models have: it does not list its folders.

    Some answer with a page where there is no file, and say that all is well: what cannot be the
    file is left.
    """
    found = _Beside()
    with remote.connections():
        for name in _USUAL:
            try:
                seen = remote.look(folder / name, _HELD_NBYTES)
            except ShardNotFoundError:
                continue
            nbytes = seen.nbytes or len(seen.head)
            if seen.content_type in _HTML:
                found.left.append(f"{name} (the server sends a page of HTML)")
            elif name.endswith(".json") and not _is_json(seen.head, whole=seen.whole):
                found.left.append(f"{name} (the server sends something else than JSON)")
            elif nbytes > LARGEST_COPIED_NBYTES:
                found.left.append(name)
            elif seen.whole:
                found.held[name] = seen.head
            else:
                found.copied[name] = Copied(name, seen.url, nbytes)
    return found


def _is_json(head: bytes, *, whole: bool) -> bool:
    """Whether a file is JSON; of a longer one, whether it begins as such."""
    if not whole:
        return head.lstrip(_SPACE)[:1] in (b"{", b"[")
    try:
        parse_json(head)
    except (ValueError, RecursionError):
        return False
    return True


def _followed(checkpoint: Checkpoint, dtypes: Mapping[str, DType]) -> bytes | None:
    """config.json with the dtypes that the tensors will have, or None where none changes."""
    became: dict[str, Counter[str]] = {}
    overall: Counter[str] = Counter()
    for name, dtype in dtypes.items():
        info = checkpoint.tensors[name]
        if dtype.kind == "float":
            became.setdefault(info.dtype.name, Counter())[dtype.name] += dtype.nbytes(info.numel)
            overall[dtype.name] += dtype.nbytes(info.numel)
    if all(checkpoint.tensors[name].dtype is dtype for name, dtype in dtypes.items()):
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
