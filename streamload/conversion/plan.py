"""Plan a conversion from headers alone: its files, and the place of each tensor in them.

Pure, except that it lists the checkpoint's folder. The output format's `FormatWriter` decides the
tensors, their names and the files: see `streamload.formats.writer`.

Sources of what runtimes need (``streamload convert --for``): ``Config`` of models in mistralrs 0.9
and of candle's examples, which need ``rope_theta`` at the top of config.json, and ``ModelArgs`` of
models in mlx-lm 0.32, which default to 10,000 for it and to tied embeddings, and need ``n_ctx`` of
GPT-2. All of them open ``model.safetensors``, or several files by ``model.safetensors.index.json``
(mlx-lm: ``model*.safetensors``), with Hugging Face's names; mlx-lm GPT-2 as it was published,
without "transformer.".
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from streamload.checkpoint.digests import SIDECAR, hasher
from streamload.checkpoint.open import Checkpoint, from_headers
from streamload.codecs.cast_table import OutOfRange, supported
from streamload.codecs.decode import check_target
from streamload.codecs.stored import check_cast, kept_dtype, together
from streamload.codecs.weights import Packed
from streamload.conversion.companions import (
    CONFIG,
    NO_PART,
    NODE_PLAN,
    SmallFile,
    content_of,
    document,
    files_beside,
    followed_config,
    main_dtype,
)
from streamload.conversion.disk import file_digest
from streamload.conversion.openable import Verdict
from streamload.conversion.quantize import all_entries, described, kept_back, wanted_of
from streamload.conversion.rename import check_rename, rules_of
from streamload.core.chart import Shown
from streamload.core.dtypes import DType, DTypeArgument
from streamload.core.patterns import Selection, check_patterns, did_you_mean, fits
from streamload.core.units import format_bytes, format_table, parse_bytes, round_up
from streamload.errors import CheckpointError, UnsupportedCastError, printed
from streamload.files.folder import ResolvedKind
from streamload.files.header import SAFETENSORS, is_text
from streamload.formats.gguf.sizes import check_config
from streamload.formats.imatrix import Importance, read_imatrix
from streamload.formats.safetensors import parse_header
from streamload.formats.writer import (
    FormatWriter,
    Model,
    OutFile,
    OutTensor,
    writer_of,
    written,
)
from streamload.loading.load import split
from streamload.loading.options import check_value
from streamload.planning.dequantize import all_names
from streamload.planning.match import stated_by_tensors
from streamload.planning.moves import DTypePolicy
from streamload.planning.partition import Node
from streamload.planning.quant_policy import NO_QUANT, QuantArgument, QuantPolicy, check_distinct
from streamload.planning.sources import Rename, Source, sources

_TEXT = "text_config"  # the text model's section of a model with several
_FULL, _SLIDING = "full_attention", "sliding_attention"  # kinds of layers in transformers 5
_HEADS = ("lm_head.weight", "output.weight")
_OF_GPT2 = "transformer."
_DTYPE = "float16"

#: By runtime, the reason for float16 if users choose no dtype.
RUNTIMES = {
    "candle": "it computes in bfloat16 on few devices",
    "mlx": "Apple's first chips only emulate bfloat16",
}


def dtype_for(
    runtime: str, to: str, dtype: DTypeArgument, quant: QuantArgument
) -> tuple[DTypeArgument, list[str]]:
    """Return the dtype of floats for a runtime, by default float16, and sentences for users.

    Raises ValueError if the runtime is unknown, cannot read the format ``to``, or ``quant`` is set.
    """
    if runtime not in RUNTIMES:
        known, meant = ", ".join(RUNTIMES), did_you_mean(runtime, RUNTIMES)
        raise ValueError(f"runtime is one of {known}, not {runtime!r}{meant}")
    if to != SAFETENSORS:
        raise ValueError(f"{runtime} reads safetensors, not {to}")
    if quant is not None:
        raise ValueError(f"{runtime} reads no weights that are quantised here: leave quant")
    if dtype is not None:
        return dtype, []
    why = RUNTIMES[runtime]
    return _DTYPE, [f"for {runtime}, floats become {_DTYPE}: {why}; dtype= says otherwise"]


def config_for(
    runtime: str, config: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return keys to add to the model's ``config`` for a runtime, and sentences for users."""
    is_gpt2 = config.get("model_type") == "gpt2"
    if runtime == "mlx" and is_gpt2 and any(name.startswith(_OF_GPT2) for name in names):
        raise ValueError(
            f'mlx-lm has the names of GPT-2 without "{_OF_GPT2}": '
            f'rename=lambda name: name.removeprefix("{_OF_GPT2}") (--rename "{_OF_GPT2}*=*")'
        )
    said = _rope(config)
    if is_gpt2 and "n_ctx" not in config and "n_positions" in config:
        said["n_ctx"] = config["n_positions"]
    if config.get("model_type") == "qwen3_moe" and "num_experts" not in config:
        said["num_experts"] = config.get("num_local_experts", 128)  # transformers' own default
    keys = list(said)
    text = config.get(_TEXT)
    if isinstance(text, Mapping) and (inner := _rope(text)):
        said[_TEXT] = inner
        keys += [f"{key} in {_TEXT}" for key in inner]
    architectures = config.get("architectures")
    known = architectures if isinstance(architectures, list) else []
    if "tie_word_embeddings" not in config and any(
        str(name).endswith("ForCausalLM") for name in known
    ):
        said["tie_word_embeddings"] = not any(head in names for head in _HEADS)
        keys.append("tie_word_embeddings")
    return said, [f"for {runtime}, config.json says {key} itself" for key in keys]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_parameters`` of transformers 5 under earlier keys; {} if not needed.

    Models whose layers attend to a window, or to all tokens, have parameters for each kind.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping):
        return {}
    rope, local = given.get(_FULL, given), given.get(_SLIDING)
    said: dict[str, Any] = {}
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        said["rope_theta"] = rope["rope_theta"]
        if rope.get("partial_rotary_factor") is not None:
            said["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if config.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
            said["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    if isinstance(local, Mapping) and "rope_theta" in local:
        said["rope_local_base_freq"] = local["rope_theta"]
        kinds = config.get("layer_types")
        if isinstance(kinds, list) and _FULL in kinds:
            said["sliding_window_pattern"] = kinds.index(_FULL) + 1
    return {key: value for key, value in said.items() if config.get(key) is None}


_SUM_DIGITS = 32  # of an md5 sum in hexadecimal
_BLOCK_NBYTES = 4096  # a file takes a multiple of this on the disk
_BOOK_NBYTES = 512  # of each tensor in journal and sidecar


def in_folder(folder: str, name: str) -> str:
    """Return the path of the file ``name`` in ``folder``; both are relative to the destination."""
    return f"{folder}/{name}" if folder else name


def folder_of(path: str) -> str:
    """Return the folder of a path below the destination; "" for the destination itself."""
    return path.rpartition("/")[0]


def folders_above(path: str) -> Iterator[str]:
    """Yield the folders between a path and the destination, innermost first."""
    while path := folder_of(path):
        yield path


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The arguments of `streamload.convert`, checked."""

    policy: DTypePolicy
    out_of_range: OutOfRange
    max_shard_nbytes: int  # most bytes of a file with several tensors
    nodes: tuple[Node, ...] = ()
    selection: Selection = field(default_factory=Selection)
    rename: Rename | None = None
    quant: QuantPolicy = NO_QUANT
    writer: type[FormatWriter] = field(default_factory=lambda: writer_of(SAFETENSORS))
    runtime: str | None = None  # one of `RUNTIMES`
    notes: tuple[str, ...] = ()  # sentences for users
    adapters: tuple[Sequence[str | float], ...] = ()  # path, scale and digest of each
    imatrix: Mapping[str, Importance] | None = None
    imatrix_digest: str = ""
    # weights that modules of transformers can hold quantized; None if that was not asked
    verdict: Verdict | None = None

    @classmethod
    def parse(
        cls,
        to: str,
        runtime: str | None,
        dtype: DTypeArgument,
        quant: QuantArgument,
        *,
        out_of_range: OutOfRange,
        max_shard_size: float | str | None,
        nodes: Sequence[Node] | None,
        imatrix: str | os.PathLike[str] | None,
    ) -> Self:
        """Check the arguments of `convert` that depend on the output format.

        Raises ValueError, or CheckpointError for an importance matrix that cannot be read.
        """
        check_value("out_of_range", out_of_range)
        writer = writer_of(to)
        notes: list[str] = []
        if runtime is not None:
            dtype, notes = dtype_for(runtime, to, dtype, quant)
        dtype, quant = writer.asked(dtype, quant)
        max_nbytes = parse_bytes(
            writer.max_shard_size if max_shard_size is None else max_shard_size
        )
        if not max_nbytes:
            raise ValueError("max_shard_size is at least 1 byte")
        if nodes is not None and not (nodes and all(isinstance(node, Node) for node in nodes)):
            raise ValueError("nodes is a list of Node, and each has a budget of its own")
        options = cls(
            DTypePolicy.parse(dtype),
            out_of_range,
            max_nbytes,
            tuple(nodes or ()),
            quant=QuantPolicy.parse(quant, writer.quants),
            writer=writer,
            runtime=runtime,
            notes=tuple(notes),
        )
        if imatrix is None:
            return options
        if not any(format in writer.weighted for _, format in options.quant.rules):
            of = [f'to="{name}"' for name in written() if writer_of(name).weighted]
            known = " or ".join(writer.weighted) or f"those of {' or '.join(of)}"
            raise ValueError(f"imatrix weighs quant {known} alone")
        path = Path(imatrix)
        found = read_imatrix(path)
        for each in found.values():  # refused before anything is written
            each.read()
        return replace(options, imatrix=found, imatrix_digest=file_digest(path))

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values; a callable ``rename`` becomes a fixed text."""
        rules = rules_of(self.rename)
        rename = "by a function" if self.rename is not None else None
        kinds = () if self.verdict is None else self.verdict.kinds
        # left out by default: journals of earlier versions, which can be resumed, have no such keys
        optional = {
            "quant": self.quant and [list(rule) for rule in self.quant.rules[len(kinds) :]],
            "left": list(kinds),
            "to": self.writer.name if self.writer.name != SAFETENSORS else "",
            "for": self.runtime,
            "adapters": [list(each) for each in self.adapters],
            "imatrix": self.imatrix_digest,
        }
        return {
            **{key: value for key, value in optional.items() if value},
            "dtype": [[p, "checkpoint" if d is None else d.name] for p, d in self.policy.rules],
            "out_of_range": self.out_of_range,
            "max_shard_nbytes": self.max_shard_nbytes,
            "nodes": [[node.name, node.budget] for node in self.nodes],
            "select": list(self.selection.select),
            "exclude": list(self.selection.exclude),
            "rename": rename if rules is None else [list(rule) for rule in rules],
        }


@dataclass(frozen=True, slots=True)
class ConvertPlan(Shown):
    """All files that a conversion will write.

    Attributes:
        files: the files of tensors, in the order in which they are written.
        small: the other files: copies, config.json, and each node's ``plan.json``.
        indexes: one for each folder that has several files; they are published last.
        wants_sums: whether some small files need the md5 sums of the files.
    """

    path: str
    destination: Path
    files: tuple[OutFile, ...]
    small: tuple[SmallFile, ...]
    indexes: tuple[SmallFile, ...]
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    wants_sums: bool = False
    verdict: Verdict | None = None  # see `ConvertOptions`

    @property
    def read_nbytes(self) -> int:
        """Bytes of tensors to read from the source."""
        return sum(t.reads.total() for file in self.files for t in file.tensors)

    @property
    def written_nbytes(self) -> int:
        """Bytes of all files of tensors, headers included."""
        return sum(file.nbytes for file in self.files)

    @property
    def needed_nbytes(self) -> int:
        """Disk bytes that all files take, with journal and sidecars."""
        lengths = [file.nbytes for file in self.files]
        lengths += [file.nbytes for file in (*self.small, *self.indexes)]
        lengths.append(self.tensor_count * _BOOK_NBYTES)
        return sum(round_up(nbytes, _BLOCK_NBYTES) for nbytes in lengths)

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of checkpoints: "" for the destination itself, or one below it for each node."""
        return tuple(dict.fromkeys(folder_of(file.path) for file in self.files))

    @property
    def subfolders(self) -> tuple[str, ...]:
        """Folders of small files (``1_Pooling``) that are not in `folders`; outer ones first."""
        above = (folder for f in self.small for folder in reversed([*folders_above(f.path)]))
        return tuple(folder for folder in dict.fromkeys(above) if folder not in self.folders)

    @property
    def tensor_count(self) -> int:
        """Number of tensors to write."""
        return sum(len(file.tensors) for file in self.files)

    @property
    def casts(self) -> dict[tuple[DType, DType], None]:
        """The (source, output) dtypes of all elements that are not dequantized."""
        return dict.fromkeys(
            (info.read_dtype, t.dtype if t.coding is None else t.src)
            for file in self.files
            for t in file.tensors
            if t.coding is None or t.made is not None
            for info in t.infos
            if not info.dtype.is_packed
        )

    def tensors(self) -> Iterator[tuple[str, OutFile, OutTensor]]:
        """Yield (key, file, tensor), as the journal counts them; a key is NAME, or NODE/NAME."""
        for file in self.files:
            for tensor in file.tensors:
                yield in_folder(folder_of(file.path), tensor.name), file, tensor

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of all files below the destination, in the order of publication: indexes last."""
        small = (file.path for file in self.small)
        sidecars = (in_folder(folder, SIDECAR) for folder in self.folders)
        large = (file.path for file in self.files)
        order = (*self.subfolders, *self.folders).index
        paths = sorted((*small, *sidecars, *large), key=lambda path: order(folder_of(path)))
        return (*paths, *(file.path for file in self.indexes))

    @property
    def digest(self) -> str:
        """Digest of each file's header and sources, by which a resumed call checks its plan."""
        digest = hasher()
        for file in self.files:
            digest.update(memoryview(json.dumps(file.path).encode()))
            digest.update(memoryview(file.header))
            for t in file.tensors:
                info = t.info
                read = [t.name, info.name, info.dtype.code, info.shard.name, info.start, t.start]
                if t.coding is not None:
                    read += [t.coding.format, t.coding.part]
                if t.made is not None:
                    read += [t.dtype.code, str(t.made.turn)]
                    read += [
                        str((p.info and p.info.name, p.first, p.stop, p.turn, p.data, p.shift))
                        for p in t.made.pieces
                    ]
                digest.update(memoryview(json.dumps(read).encode()))
        return digest.hexdigest()

    def to_json(self) -> str:
        """Return the plan as JSON."""
        written = [f for f in self.small if isinstance(f.content, bytes)]
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
                                "shape": list(t.shape),
                                **({"quant": t.became} if t.coding is not None else {}),
                                "start": t.start,
                                "stop": t.stop,
                            }
                            for t in file.tensors
                        ],
                    }
                    for file in self.files
                ],
                "documents": [f.path for f in (*written, *self.indexes)],
                "copied": [f.path for f in self.small if f not in written],
                "notes": list(self.notes),
            }
        )

    def __str__(self) -> str:
        """Return a table of the files, the casts and the notes."""
        rows = [
            (file.path, str(len(file.tensors)), format_bytes(file.nbytes)) for file in self.files
        ]
        casts = Counter(
            (t.info.dtype.name, t.became)
            for file in self.files
            for t in file.tensors
            if t.became != t.info.dtype.name and not t.is_auxiliary
        )
        others = [file.path for file in (*self.indexes, *self.small)]
        return printed(
            [
                *format_table(("file", "tensors", "bytes"), rows, right=2),
                *(f"{n} tensors from {src} to {dst}" for (src, dst), n in casts.items()),
                f"{format_bytes(self.read_nbytes)} to be read, {format_bytes(self.needed_nbytes)} "
                f"of disk taken in {self.destination}",
                *([f"with {', '.join(others)}"] if others else []),
                *(f"note: {note}" for note in self.notes),
            ]
        )

    __repr__ = __str__


def plan_conversion(
    checkpoint: Checkpoint, destination: Path, options: ConvertOptions
) -> ConvertPlan:
    """Plan a conversion without reading or writing a tensor."""
    if options.nodes and options.writer.name != SAFETENSORS:
        raise ValueError(f"{options.writer.name} files are not split over nodes")
    chosen, fill, dtypes = _chosen(checkpoint, options)
    of_modules = not options.writer.takes_blocks
    wanted = wanted_of(chosen, fill, dtypes, options.quant, of_modules=of_modules)
    notes = kept_back(checkpoint, dtypes, options.policy)
    beside, left = files_beside(checkpoint)
    settled = stated_by_tensors(chosen)
    model = Model(
        checkpoint.path,
        {**checkpoint.config, **{key: value for key, (value, _) in settled.items()}},
        wanted,
        checkpoint.metadata,
        {name: partial(content_of, file) for name, file in beside.items()},
        next((dtype for pattern, dtype in options.policy.rules if pattern == "*"), None),
        next((format for pattern, format in options.quant.rules if pattern == "*"), None),
        options.imatrix,
        {key: reason for key, (_, reason) in settled.items()},
        len(chosen.tensors) == len(checkpoint.tensors),
    )
    writer = options.writer(model)
    lists = all_entries(writer.tensors(), options.quant)
    named = Counter(e.name for one in lists for each in one for e in each)
    if named and max(named.values()) > 1:
        if any(each.quant is not None for each in wanted.values()):
            check_distinct([*named.elements()], wanted)
        (twice, count), *_ = named.most_common(1)
        raise CheckpointError(checkpoint.path, f"{count} tensors would be called {twice!r}")
    notes += writer.notes()
    said = {k: v for k, (v, _) in settled.items() if checkpoint.config.get(k) not in (None, v)}
    notes += [
        f"config.json has {key} {checkpoint.config[key]}, and {settled[key][1]}: it is {value} in "
        "what is written"
        for key, value in said.items()
    ]
    if writer.keeps_companions:
        check_config(model, checkpoint.members)
        by_tensor = {each[0].info.name: each for listed in lists for each in listed}
        notes += options.notes
        notes += _follow(checkpoint, dtypes, by_tensor, beside, left, options, said)
    else:
        beside = {name: file for name, file in beside.items() if name in writer.copied}
        notes += _not_copied([name for name in left if name.endswith(NO_PART)])
    parts, node_plans = _parts(chosen, options, lists)
    files: list[OutFile] = []
    small: list[SmallFile] = []
    indexes: list[SmallFile] = []
    for folder, tensors in parts.items():
        if not tensors:
            notes.append(f"{folder} holds nothing: there are fewer parts than nodes")
            continue
        # the parts of a quantised weight that is kept stay together
        rows = ((entries[0].info.name, entries) for entries in tensors)
        listed = [[*chain(*one)] for one in together(checkpoint.members, rows)]
        here = writer.files(listed, options.max_shard_nbytes)
        files += (replace(file, path=in_folder(folder, file.path)) for file in here)
        documents = [*_documents(writer, here, folder)]
        small += documents[:-1]
        indexes += documents[-1:]
        small += [replace(f, path=in_folder(folder, name)) for name, f in beside.items()]
        if folder in node_plans:
            mine = [file for file in files if folder_of(file.path) == folder]
            small.append(_node_plan(folder, mine, destination, options, node_plans[folder]))
    return ConvertPlan(
        path=str(checkpoint.path),
        destination=destination,
        files=tuple(files),
        small=tuple(small),
        indexes=tuple(indexes),
        options=MappingProxyType(options.to_json()),
        notes=tuple(notes),
        wants_sums=writer.wants_sums,
        verdict=options.verdict,
    )


def _documents(writer: FormatWriter, files: Sequence[OutFile], folder: str) -> Iterator[SmallFile]:
    """Yield small files that ``writer`` creates; contents with md5 sums are computed at the end."""

    def late(name: str, sums: Mapping[str, str]) -> bytes:
        return writer.documents(files, sums)[name]

    # only safetensors, which have no sums, are split into folders: paths are names
    sums = {file.path: "0" * _SUM_DIGITS for file in files}
    for name, data in writer.documents(files, sums).items():
        content = partial(late, name) if writer.wants_sums else data
        yield SmallFile(in_folder(folder, name), content, len(data))


def _follow(
    checkpoint: Checkpoint,
    dtypes: Mapping[str, DType],
    made: Mapping[str, Sequence[OutTensor]],
    beside: dict[str, SmallFile],
    left: Sequence[str],
    options: ConvertOptions,
    settled: Mapping[str, Any],
) -> list[str]:
    """Adapt config.json among the small files, by name, to the output tensors.

    ``made``: output tensors by source tensor; ``left``: names of files that are not copied;
    ``settled``: keys of config.json that tensors contradict. Returns sentences for users.
    """
    notes = _not_copied(left)
    if checkpoint.groups and any(isinstance(i, Packed) for i in checkpoint.tensors.values()):
        still = ", ".join(list(checkpoint.groups)[:8])
        notes.append(f"config.json still says how weights are quantised, for some are: {still}")
    said, quant_notes = described(
        checkpoint, made, main_dtype(checkpoint, dtypes), options.quant, options.verdict
    )
    said |= settled
    notes += quant_notes
    if options.runtime is not None and checkpoint.config:
        names = [entries[0].name for entries in made.values()]
        wants, runtime_notes = config_for(options.runtime, checkpoint.config, names)
        said |= wants
        notes += runtime_notes
    if (config := followed_config(checkpoint, dtypes, said)) is not None:
        mode = beside[CONFIG].mode if CONFIG in beside else None
        beside[CONFIG] = document(CONFIG, config, mode)
    return notes


def _not_copied(left: Sequence[str]) -> list[str]:
    """Return a sentence for users about files that are not copied, if there are any."""
    more = f" and {len(left) - 8} more" * (len(left) > 8)
    return [f"not copied: {', '.join(left[:8])}{more}"] if left else []


# --- which tensors, as what -----------------------------------------------------------------------


def _chosen(
    checkpoint: Checkpoint, options: ConvertOptions
) -> tuple[Checkpoint, Mapping[str, Source], dict[str, DType]]:
    """Return the selected tensors, their sources by output name, and dtypes by source tensor."""
    names = all_names(checkpoint)
    options.selection.check(names)
    tensors = {n: info for n, info in checkpoint.tensors.items() if n in options.selection}
    chosen = replace(checkpoint, tensors=MappingProxyType(tensors))
    check_patterns("dtype", (pattern for pattern, _ in options.policy.rules), names)
    check_patterns("quant", (pattern for pattern, _ in options.quant.rules), names)
    check_rename(options.rename, checkpoint.tensors)
    fill, _, _ = sources(chosen, None, options.rename)
    wanted = {name: source.rows[0].tensor for name, source in fill.items()}
    if not wanted:
        raise ValueError("no tensor is left to be converted")
    for name, tensor in wanted.items():
        if name == "__metadata__" or not is_text(name):
            raise CheckpointError(
                checkpoint.path, f"{name!r} cannot be a tensor's name", tensor=tensor
            )
    dtypes = {tensor: _dtype(checkpoint, tensor, options.policy) for tensor in wanted.values()}
    return chosen, fill, dtypes


def _dtype(checkpoint: Checkpoint, name: str, policy: DTypePolicy) -> DType:
    """Return a source tensor's output dtype; UnsupportedCastError if it cannot be cast to it."""
    info = checkpoint.tensors[name]
    # without a rule a tensor stays as it is
    dst = policy.resolve(name, info.dtype, native_bf16=True)
    if dst is info.dtype:
        return dst
    if isinstance(info, Packed):
        check_target(info, dst)
        return dst
    if not supported(info.dtype, dst):
        raise UnsupportedCastError(info.dtype.name, dst.name, tensor=name, path=info.shard)
    if (kept := kept_dtype(checkpoint.members, info)) is not None:
        return kept
    check_cast(checkpoint.layouts, name, dst, 'keep them with the dtype "checkpoint"')
    return dst


def _parts(
    chosen: Checkpoint, options: ConvertOptions, lists: Sequence[Sequence[Sequence[OutTensor]]]
) -> tuple[dict[str, list[Sequence[OutTensor]]], dict[str, Any]]:
    """Split output tensors over nodes: return them by folder, and `DevicePlan`s by node.

    ``lists``: for each file, the entries of each tensor. Without nodes, all go to folder "".
    """
    if not options.nodes:
        return {"": [[*chain(*listed)] for listed in lists]}, {}
    made = {entries[0].info.name: entries for listed in lists for entries in listed}
    for node in options.nodes:
        if not re.fullmatch(r"[^./\\\0][^/\\\0]*", node.name) or len(os.fsencode(node.name)) > 200:
            raise ValueError(f"the node {node.name!r} cannot have a folder of that name")
    # names were checked: a pattern may be of tensors that are not chosen
    names = all_names(chosen)
    rules = {p: dtype or "checkpoint" for p, dtype in options.policy.rules if fits(p, names)}
    plan = split(
        chosen,
        nodes=options.nodes,
        quant={p: name for p, name in options.quant.rules if fits(p, names)} or None,
        dtype=rules | {"*": rules.get("*", "checkpoint")},
        out_of_range=options.out_of_range,
        rename=options.rename,
    )
    parts: dict[str, list[Sequence[OutTensor]]] = {node.name: [] for node in options.nodes}
    for p in plan.placements:
        as_made = made[p.source[0].tensor]
        if p.kind.coding is None:  # a head that shares the embedding's weight has a name of its own
            parts[p.kind.device].append([as_made[0]._replace(name=p.name)])
        elif not p.kind.coding.part:
            parts[p.kind.device].append(as_made)
    held = {device.device: device for device in plan.devices}
    return parts, held


def _node_plan(
    folder: str, files: Sequence[OutFile], destination: Path, options: ConvertOptions, held: Any
) -> SmallFile:
    """Return a node's ``plan.json``: its load plan, with layers of ``held`` (a `DevicePlan`)."""
    headers = [parse_header(file.header, destination / file.path, file.nbytes) for file in files]
    node = next(node for node in options.nodes if node.name == folder)
    made = split(from_headers(destination / folder, headers), nodes=[node], dtype="checkpoint")
    (device,) = made.devices
    ends = {"embedding": held.embedding, "head": held.head}
    # config.json, which decides on the bytes a token, is not in the headers
    device = replace(device, layers=held.layers, token_nbytes=held.token_nbytes, **ends)
    # it holds on any machine: the load chooses path and reader
    pread: ResolvedKind = "pread"
    readers = tuple(pread for _ in files)
    made = replace(made, path=".", devices=(device,), readers=readers, reader_reasons=())
    return document(in_folder(folder, NODE_PLAN), made.to_json().encode() + b"\n")
