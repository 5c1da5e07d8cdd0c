"""LoRA adapters that are merged into weights during a load or a conversion: ``adapters=``.

W + scale * (B @ A) is computed in float64 from the checkpoint's values, and rounded once to the
dtype of the parameter: in float32, sums near zero were two float16 numbers away. Source of names,
scales and layouts: peft 0.21, ``LoraConfig``, ``tuners/lora/layer.py`` (``get_delta_weight``),
``tuners/lora/variants.py`` (``DoraLinearVariant``) and ``tuners/trainable_tokens/layer.py``.

A GGUF file of ``general.type`` "adapter" has the architecture of its base, ``adapter.lora.alpha``,
and two factors of each matrix: ``blk.0.attn_q.weight.lora_a`` and ``.lora_b``. The second has rows
in the order of GGUF, which depends on the numbers of heads in the base's configuration. That of an
embedding has its first factor transposed. Source: convert_lora_to_gguf.py and
``llama_adapter_lora`` in src/llama-adapter.cpp of llama.cpp.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from streamload.checkpoint.digests import hasher
from streamload.checkpoint.open import Checkpoint, open_checkpoint
from streamload.codecs.weights import read_whole
from streamload.core.location import Location, without_secrets
from streamload.core.memory import first_that_fits
from streamload.core.patterns import ending_in
from streamload.core.system import callers_level
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files.folder import Folder, fingerprint, folder_at, locate
from streamload.files.header import Header, check_object, describe, parse_json_object
from streamload.formats.gguf.architectures import ARCHITECTURE, ARCHITECTURES, Architecture
from streamload.planning.sources import HEADS, is_conv1d, tied_names
from streamload.planning.transforms import Change, Changes, Rows, Transform

_ALPHA, _KIND = "adapter.lora.alpha", "adapter.type"
_INVOKED = "adapter.alora.invocation_tokens"
_FACTOR = re.compile(r"(?P<name>.+\.weight)\.lora_(?P<part>[ab])")
_EMBEDDING = "token_embd.weight"


class Translated(NamedTuple):
    """An adapter in the names of peft.

    `orders`: by peft's name, the indices of the file's rows in the order of models; None: the
    transpose of all.
    """

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    orders: Mapping[str, np.ndarray[Any, Any] | None]


def translated(adapter: Checkpoint, base: Checkpoint) -> Translated:
    """Return an adapter in peft's names; CheckpointError if it is invalid or for another base."""
    said, path = adapter.metadata, adapter.path
    architecture = ARCHITECTURES.get(said.get(ARCHITECTURE, ""))
    if architecture is None:
        known, found = ", ".join(ARCHITECTURES), describe(said.get(ARCHITECTURE))
        raise CheckpointError(path, f"its {ARCHITECTURE} is not known", known, found)
    model = base.config.get("model_type")
    if model not in architecture.models:
        expected = f"config.json with a model_type of {', '.join(architecture.models)}"
        raise CheckpointError(path, f"the adapter does not fit {base.path}", expected, model)
    try:
        alpha = float(said.get(_ALPHA, "0"))
    except ValueError:  # of a bool or a string
        alpha = 0.0
    if said.get(_KIND, "lora") != "lora" or not 0 < alpha < float("inf") or _INVOKED in said:
        stated = {key: said.get(key) for key in (_KIND, _ALPHA, _INVOKED) if key in said}
        expected = f"{_KIND} lora, {_ALPHA} above 0, no {_INVOKED}"
        raise CheckpointError(path, "only LoRA of matrices is merged", expected, stated)
    tensors: dict[str, TensorInfo] = {}
    orders: dict[str, np.ndarray[Any, Any] | None] = {}
    for name, info in adapter.tensors.items():
        match = _FACTOR.fullmatch(name)
        theirs = architecture.to_hugging_face(match["name"]) if match else None
        if match is None or theirs is None or "{}" in theirs or not theirs.endswith(".weight"):
            expected = "lora_a and lora_b of a matrix that models have, too"
            problem = "only LoRA of matrices is merged"
            raise CheckpointError(info.shard, problem, expected, name, tensor=name)
        is_embedding, part = match["name"] == _EMBEDDING, match["part"].upper()
        middle = f"lora_embedding_{part}" if is_embedding else f"lora_{part}.weight"
        new = f"{theirs.removesuffix('weight')}{middle}"
        tensors[new] = replace(info, name=new)
        if part == "A" and is_embedding:
            orders[new] = None
        elif part == "B" and (order := _order(architecture, match["name"], info, base)) is not None:
            orders[new] = order
    return Translated(tensors, {"peft_type": "LORA", "lora_alpha": alpha}, orders)


def undone(order: RowTranspose) -> np.ndarray[Any, Any]:
    """Return the index of each row of a permutation's input in its output."""
    rows = np.arange(order.groups * order.outer * order.inner)
    return rows.reshape(order.groups, order.inner, order.outer).swapaxes(1, 2).ravel()


def _order(
    architecture: Architecture, name: str, info: TensorInfo, base: Checkpoint
) -> np.ndarray[Any, Any] | None:
    """Return the indices of the file's rows in the order of models; None if they are the same."""
    rows = info.shape[0] if info.shape else 0
    try:
        order = architecture.interleaved(name, rows, base.config)
        heads = architecture.heads(name, rows, base.config)
    except ValueError as error:
        problem = "its rows cannot be split into heads"
        raise CheckpointError(info.shard, problem, str(error), info.shape, tensor=name) from error
    if order is not None:
        return undone(order)
    if heads is None:
        return None
    keys, queries, size = heads
    own, shared = np.split(np.arange(rows), [keys * queries * size])
    parts = own.reshape(keys, queries, size), shared.reshape(2, keys, size).swapaxes(0, 1)
    return np.concatenate(parts, axis=1).ravel()


#: The argument ``adapters=``: folders, or (folder, scale).
AdaptersArgument: TypeAlias = Sequence[
    str | os.PathLike[str] | tuple[str | os.PathLike[str], float]
]

_CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX = "base_model.model."
_MODULE = rf"(?:{re.escape(_PREFIX)})?(?P<module>.+)"
_NAME = re.compile(
    rf"{_MODULE}\.lora_(?P<embedding>embedding_)?(?P<part>A|B|magnitude_vector)"
    r"(?:\.weight|(?P<bias>\.bias))?"
)
_TOKENS = re.compile(rf"{_MODULE}\.token_adapter\.trainable_tokens_delta")
# Multiplications of a block, and its columns. OpenBLAS computes so few in the calling thread: its
# own threads, with those of the load, were ten times slower. Blocks depend on the tensor's shape
# alone, since the order of sums may depend on theirs.
_BLOCK_PRODUCTS = 2**18
_BLOCK_COLUMNS = 1024

# Keys of peft's configuration whose values do not change the sum, or that are computed with here.
_WITHOUT_EFFECT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "target_modules", "exclude_modules", "lora_dropout"),
    *("layers_to_transform", "layers_pattern", "megatron_core", "runtime_config", "loftq_config"),
    *("qalora_group_size", "ensure_weight_tying", "use_dora", "lora_bias", "bias"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"),
    *("modules_to_save", "trainable_token_indices"),
}
# Values of the other keys that mean "not used".
_NOTHING: tuple[Any, ...] = (None, False, "none", [], {}, "")
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(slots=True)
class Adapters:
    """The adapters of one call, read for one checkpoint.

    Attributes:
        by_tensor: functions that change the values of a tensor, by its name, in order.
        replaced: by the name of a tensor, the one that an adapter has in its place.
        identity: path, scale and digest of each adapter, as JSON values.
    """

    by_tensor: dict[str, list[Change]] = field(default_factory=dict)
    replaced: dict[str, TensorInfo] = field(default_factory=dict)
    headers: list[Header] = field(default_factory=list)
    identity: list[list[str | float]] = field(default_factory=list)

    @classmethod
    def read(cls, checkpoint: Checkpoint, adapters: AdaptersArgument | None) -> Adapters:
        """Read ``adapters=``, all but whole tensors; raises CheckpointError or ValueError."""
        if isinstance(adapters, (str, os.PathLike)) or not isinstance(adapters, Sequence | None):
            shown = without_secrets(repr(adapters))
            raise ValueError(f'adapters is a list of paths, such as ["my-lora/"], not {shown}')
        found = cls()
        for each in adapters or ():
            path, scale = (
                each if isinstance(each, (tuple, list)) and len(each) == 2 else (each, 1.0)
            )
            is_number = isinstance(scale, (int, float)) and abs(scale) <= sys.float_info.max
            if not isinstance(path, (str, os.PathLike)) or not is_number:
                shown = without_secrets(repr(each))
                raise ValueError(f"expected the path of an adapter, or (path, scale), not {shown}")
            _Reader(checkpoint, path, float(scale), found).read()
        if found.replaced or found.by_tensor:
            _check_ties(checkpoint, found)
            _warn_of_ties(checkpoint, found)
        return found

    @property
    def changes(self) -> Changes:
        """The functions, and the memory that they take."""
        merges = [each for found in self.by_tensor.values() for each in found]
        nbytes = sum(each.nbytes for each in merges if isinstance(each, _Merge | _Assign))
        most = max((m.right.size * 8 for m in merges if isinstance(m, _Merge)), default=0)
        return Changes(self.by_tensor, nbytes, most)


def changes_of(
    checkpoint: Checkpoint, transform: Transform | None, adapters: AdaptersArgument | None
) -> Changes:
    """Return the changes of values in a load: by ``adapters=``, and then by ``transform=``."""
    found = Adapters.read(checkpoint, adapters)
    for name, info in found.replaced.items():
        raise CheckpointError(
            info.shard,
            "a load merges LoRA, and does not replace whole tensors (modules_to_save, bias, "
            'embeddings): write streamload.convert(path, OUT, adapters=[...]), and load "OUT"',
            tensor=name,
        )
    return found.changes.then(checkpoint, transform)


@dataclass(frozen=True, slots=True)
class _Merge:
    """A `Change` that adds ``left @ right * scale`` to the rows of a matrix, in float64.

    With ``magnitude``, rows of the sum are then scaled to these lengths (DoRA). The rows of a
    vector are its elements: ``right`` is then (1, 1).
    """

    left: Rows
    right: Rows
    scale: float
    magnitude: Rows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        held = [self.left, self.right, *([] if self.magnitude is None else [self.magnitude])]
        return sum(each.nbytes for each in held)

    def __call__(self, rows: Rows, first: int) -> Rows:
        out = rows.astype(np.float64)
        sums = out.reshape(len(out), -1)
        right = self.right.astype(np.float64)
        rank, columns = right.shape
        width = max(min(_BLOCK_COLUMNS, columns, _BLOCK_PRODUCTS // rank), 1)
        height = max(_BLOCK_PRODUCTS // (rank * width), 1)
        stop = first + len(rows)
        for begin in range(first // height * height, stop, height):
            left = self.left[begin : begin + height].astype(np.float64)
            a, b = max(begin, first), min(begin + height, stop)
            for column in range(0, columns, width):
                delta = left @ right[:, column : column + width]
                delta *= self.scale  # after the product, as peft does
                part = sums[a - first : b - first, column : column + width]
                np.add(part, delta[a - begin : b - begin], out=part)
        if self.magnitude is not None:
            lengths = np.sqrt(np.add.reduce(sums * sums, axis=1))
            sums *= (self.magnitude[first:stop].astype(np.float64) / lengths)[:, None]
        return out


@dataclass(frozen=True, slots=True)
class _Assign:
    """A `Change` that replaces rows of a matrix by ``values``: trained tokens of an embedding."""

    indices: Rows
    values: Rows

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        return self.indices.nbytes + self.values.nbytes

    def __call__(self, rows: Rows, first: int) -> Rows:
        out = rows.astype(np.float64)
        here = (self.indices >= first) & (self.indices < first + len(rows))
        out[self.indices[here] - first] = self.values[here]
        return out


class _Reader:
    """Reads one adapter into `Adapters`."""

    def __init__(
        self, checkpoint: Checkpoint, path: str | os.PathLike[str], scale: float, to: Adapters
    ) -> None:
        self._checkpoint, self._scale, self._to = checkpoint, scale, to
        self._adapter, folder = open_adapter(path)
        self._orders: Mapping[str, np.ndarray[Any, Any] | None] = {}
        if _is_of_gguf(self._adapter):
            from streamload.loading.lora import translated

            self._path = self._adapter.path
            tensors, self._config, self._orders = translated(self._adapter, checkpoint)
            self._adapter = replace(self._adapter, tensors=tensors)
            raw = json.dumps(self._config).encode()
        else:
            self._path = folder.file(_CONFIG)
            try:
                raw = folder.read(_CONFIG)
            except ShardNotFoundError as error:
                raise replace(error, problem=f"{error.problem}; {_OTHERS}") from error
            self._config = _checked(parse_json_object(raw, self._path), self._path)
        self._hasher = hasher()
        self._hasher.update(raw)

    def read(self) -> None:
        """Add the adapter's changes, tensors and identity."""
        parts: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
        for name, info in self._adapter.tensors.items():
            if info.dtype.kind != "float" or info.dtype.bits < 16:
                found = info.dtype.name
                self._refuse(info, "its dtype is not one of LoRA", "floats of 16 bits", found)
            if match := _NAME.fullmatch(name):
                key = match["module"], match["embedding"] is not None
                parts.setdefault(key, {})["bias" if match["bias"] else match["part"]] = info
            elif match := _TOKENS.fullmatch(name):
                self._assign(match["module"], info)
            else:
                self._replace(name, info)
        modules = [module for module, _ in parts]
        self._ranks = self._numbers("r", modules)
        self._alphas = self._numbers("lora_alpha", modules)
        held_nbytes = sum(info.nbytes for found in parts.values() for info in found.values())
        first_that_fits([(None, held_nbytes)], [(f"the adapter {self._path.parent}", held_nbytes)])
        for (module, embedding), found_parts in parts.items():
            self._merge(module, found_parts, embedding=embedding)
        to, shards = self._to, self._adapter.shards
        saved, names = self._config.get("modules_to_save") or [], self._adapter.tensors
        if not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
            problem, expected = "modules_to_save is invalid", "a list of names"
            raise CheckpointError(self._path, problem, expected, json.dumps(saved))
        lacking = [each for each in saved if not any(f".{each}." in f".{name}" for name in names)]
        if lacking or not names:
            expected = ", ".join(map(str, lacking)) or "lora_A and lora_B"
            raise CheckpointError(self._path, "the adapter lacks tensors", expected, "none")
        path = shards[0].path
        shown = folder_at(path).identity(path.name) or (
            os.path.abspath(path.parent) if isinstance(path, Path) else path.parent
        )
        to.headers += [replace(header, metadata={}) for header in shards]
        to.identity.append([str(shown), self._scale, self._hasher.hexdigest()])

    def _merge(self, module: str, parts: Mapping[str, TensorInfo], *, embedding: bool) -> None:
        """Add the change of a weight by lora_A and lora_B, and of its bias by that of lora_B."""
        config, some = self._config, next(iter(parts.values()))
        asked = {"magnitude_vector": "use_dora", "bias": "lora_bias"}
        wanted = {"A", "B", *(part for part, key in asked.items() if config.get(key))}
        shapes = {f"lora_{part}": list(info.shape) for part, info in parts.items()}
        is_plain = parts.keys() == wanted and all(
            len(info.shape) == (2 if part in "AB" else 1) and info.numel
            for part, info in parts.items()
        )
        if not is_plain:
            expected = f"{' and '.join(f'lora_{part}' for part in sorted(wanted))} of {module!r}"
            stated = ", ".join(f"{key} {bool(config.get(key))}" for key in asked.values())
            problem = "only LoRA of matrices is merged"
            if not _is_of_gguf(self._adapter):
                problem += f", and {_CONFIG} states {stated}"
            self._refuse(some, problem, f"{expected}, A and B of two axes each", shapes)
        target = self._target(f"{module}.weight", some, may_turn=True)
        values = {part: self._values(info) for part, info in parts.items()}
        a, b = values["A"], values["B"]
        plain, turned = (len(b), a.shape[1]), (a.shape[1], len(b))
        if a.shape[0] != b.shape[1] or target.shape not in (plain, turned):
            fits = f"factors of a matrix of {list(target.shape)}"
            self._refuse(some, f"the adapter does not fit {target.name!r}", fits, shapes)
        rank = len(a)
        if (stated := self._ranks[module]) not in (rank, None):
            line = f'"r": {rank}, or "rank_pattern": {{"{module}": {rank}}}'
            problem = f"{_CONFIG} states another rank than the factors have, which the scale "
            problem += f"depends on: write {line} there if the factors are right"
            self._refuse(some, problem, f"rank {stated:g}", shapes)
        root = math.sqrt(rank) if self._config.get("use_rslora") else rank
        scale = self._scale * (self._alphas[module] / root)
        # a Conv1D of a square matrix: peft's flag is that of the module that it wrapped last
        is_conv = is_conv1d(self._checkpoint.config, target.name) or config.get("fan_in_fan_out")
        is_turned = embedding or target.shape != plain or (plain == turned and bool(is_conv))
        left, right = (a.T, b.T) if is_turned else (b, a)
        left = left[self._rows_of(target)]
        magnitude = values.get("magnitude_vector")
        if magnitude is not None and (is_turned or self._to.by_tensor.get(target.name)):
            problem = "use_dora is merged into a Linear, and before other adapters"
            self._refuse(some, problem, "a matrix of (outputs, inputs)", target.name)
        if magnitude is not None and len(magnitude) != len(left):
            self._refuse(parts["magnitude_vector"], "its length is wrong", len(left), shapes)
        if magnitude is not None:
            magnitude = magnitude[self._rows_of(target)]
        self._change(target, _Merge(left, np.ascontiguousarray(right), scale, magnitude))
        if "bias" in values:
            bias = self._target(f"{module}.bias", parts["bias"], may_turn=True)
            if bias.shape != values["bias"].shape:
                self._refuse(parts["bias"], f"does not fit {bias.name!r}", bias.shape, shapes)
            column = values["bias"][self._rows_of(bias), None]
            self._change(bias, _Merge(column, np.ones((1, 1)), scale))

    def _assign(self, module: str, info: TensorInfo) -> None:
        """Add the change of an embedding by rows of trained tokens."""
        if self._scale != 1:  # peft has none for them, either
            problem = "trainable_token_indices replace rows, which have no scale: leave it out"
            self._refuse(info, problem, "scale 1", self._scale)
        target = self._target(f"{module}.weight", info)
        stated = self._config.get("trainable_token_indices")
        if isinstance(stated, Mapping):
            ends = (v for k, v in stated.items() if f".{module}".endswith(f".{k}"))
            stated = next(ends, None)
        rows = target.shape[0] if target.shape else 0
        indices = stated if isinstance(stated, list) else []
        valid = all(type(i) is int and 0 <= i < rows for i in indices)
        if not valid or (len(indices), *target.shape[1:]) != info.shape:
            expected = f"trainable_token_indices of {list(info.shape)[:1]} rows below {rows}"
            self._refuse(info, f"the adapter does not fit {target.name!r}", expected, stated)
        for each in self._to.by_tensor.get(target.name, ()):
            if isinstance(each, _Assign) and np.isin(indices, each.indices).any():
                self._refuse(info, "an earlier adapter has trained some of the same tokens")
        self._change(target, _Assign(np.array(indices, np.int64), self._values(info)))

    def _replace(self, key: str, info: TensorInfo) -> None:
        """Take a whole tensor of the adapter in place of the checkpoint's."""
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        target = self._target(name, info)
        if target.name in self._to.replaced or self._to.by_tensor.get(target.name):
            self._refuse(info, f"{target.name!r} is replaced, and changed by an earlier adapter")
        if target.shape != info.shape:
            problem = f"it does not fit {target.name!r}: give a grown vocabulary to the base first"
            self._refuse(info, problem, list(target.shape), list(info.shape))
        tied = [pair for pair in tied_names(self._checkpoint) if target.name in pair]
        if tied and ".base_layer." not in key:
            problem = f"{' and '.join(tied[0])} are tied: peft would replace one of both; "
            self._refuse(info, problem + _UNTIED, "tie_word_embeddings false", "true")
        self._to.replaced[target.name] = info
        state = fingerprint(self._adapter.headers[info.shard])
        self._hasher.update(json.dumps([key, state]).encode())

    def _target(self, name: str, part: TensorInfo, *, may_turn: bool = False) -> TensorInfo:
        """Return the checkpoint's tensor that a part changes; names may differ by a prefix.

        Raise CheckpointError if its rows are in another order than models have, unless `may_turn`.
        """
        tensors, shorter = self._checkpoint.tensors, name.partition(".")[2]
        longer = [other for other in tensors if other.endswith(f".{name}")]
        found = [one for one in (name, shorter) if one in tensors][:1] or longer
        if len(found) != 1:
            problem = f"the adapter does not fit {self._checkpoint.path}"
            for head, embedding in tied_names(self._checkpoint):
                if name.endswith(head):
                    problem += f", whose head is tied to {embedding}: {_UNTIED}"
            self._refuse(part, problem, f"a tensor {name!r} there", found or "none")
        target = tensors[found[0]]
        if target.dtype.kind != "float" or target.dtype.bits < 16 or target.is_computed:
            raise CheckpointError(
                target.shard,
                "an adapter is merged into floats of 16 bits or more: dequantise the base first, "
                'with streamload.convert(path, OUT, dtype="float16")',
                "such a dtype",
                target.dtype.name,
                tensor=target.name,
            )
        turn = self._checkpoint.turns.get(target.name)
        if turn is not None and (turn.shape is not None or not may_turn):
            problem = "the base has rows in another order: convert it alone first, to safetensors"
            self._refuse(part, problem, found=target.name)
        return target

    def _rows_of(self, target: TensorInfo) -> Any:
        """Return the index of each of the base's rows, in its file's order, in that of models."""
        turn = self._checkpoint.turns.get(target.name)
        if turn is None or turn.transpose is None:
            return slice(None)
        from streamload.loading.lora import undone

        return undone(turn.transpose)

    def _change(self, target: TensorInfo, change: Change) -> None:
        self._to.by_tensor.setdefault(target.name, []).append(change)

    def _numbers(self, key: str, modules: list[str]) -> dict[str, Any]:
        """Return "r" (None if unstated) or "lora_alpha" of each module, by their patterns."""
        kind = "rank_pattern" if key == "r" else "alpha_pattern"
        usual = self._config.get(key, None if key == "r" else 8)
        own = check_object(self._config.get(kind) or {}, self._path, kind)
        stated = [] if (key, usual) == ("r", None) else [(key, usual)]
        for name, value in (*stated, *((f"{kind} of {n!r}", v) for n, v in own.items())):
            if type(value) not in (int, float) or not math.isfinite(value):
                problem, expected = f"{name} is invalid", "a number"
                raise CheckpointError(self._path, problem, expected, describe(value))
        try:
            found = ending_in(list(own), modules)
        except ValueError as error:
            problem, expected = f"{kind} is invalid", "regular expressions that end soon"
            raise CheckpointError(self._path, problem, expected, str(error)) from error
        return {
            module: own.get(module if name is None else name, usual)
            for module, name in zip(modules, found, strict=True)
        }

    def _values(self, info: TensorInfo) -> Rows:
        """Read a tensor of the adapter."""
        data = next(read_whole(self._adapter.shards, [info]))
        self._hasher.update(json.dumps([info.name, info.dtype.code, info.shape]).encode())
        self._hasher.update(data)
        values = np.frombuffer(data, info.dtype.numpy).reshape(info.shape)
        if info.name not in self._orders:
            return values
        order = self._orders[info.name]
        return values.T if order is None else values[order]

    def _refuse(
        self, info: TensorInfo, problem: str, expected: object = None, found: object = None
    ) -> NoReturn:
        raise CheckpointError(info.shard, problem, expected, found, tensor=info.name)


def _is_of_gguf(adapter: Checkpoint) -> bool:
    return adapter.metadata.get("general.type") == "adapter"


def open_adapter(path: str | os.PathLike[str]) -> tuple[Checkpoint, Folder]:
    """Open the weights of an adapter, whose folder may hold its base; return them and the folder.

    The cache may have the weights of a repository without the configuration: both are looked for in
    the folder at the hub.
    """
    folder = locate(path)
    if folder.name:
        return open_checkpoint(folder.found), folder
    try:
        return open_checkpoint(folder.file(_FILES[0])), folder
    except ShardNotFoundError as error:
        with suppress(ShardNotFoundError):
            return open_checkpoint(folder.file(_FILES[1])), folder
        raise replace(error, problem=f"{error.problem}; {_OTHERS}") from error


def _checked(config: Mapping[str, Any], path: Location) -> Mapping[str, Any]:
    """Return peft's configuration; raise CheckpointError, with the key, if it has other parts."""
    if (found := config.get("peft_type")) != "LORA":
        raise CheckpointError(path, "only LoRA is merged", "peft_type LORA", found)
    for key, value in config.items():
        plain = value in _PLAIN_INITIALISATIONS if key == "init_lora_weights" else value in _NOTHING
        if key not in _WITHOUT_EFFECT and not plain:
            raise CheckpointError(
                path,
                f"only LoRA of matrices is merged, and this adapter has {key}: merge it with peft "
                "(merge_and_unload), and read what that saves",
                f"no {key}",
                json.dumps(value),
            )
    return config


#: What a user writes for LoRA that peft has not saved.
_OTHERS = (
    "adapters= takes folders that peft has saved. For LoRA of kohya or diffusers write pipe = "
    'streamload.diffusers.from_pretrained(BASE), and pipe.load_lora_weights("FILE"); for one of '
    'peft\'s names alone write {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA} as '
    f"{_CONFIG} beside {_FILES[0]}"
)
#: What a user writes for a base with a head of its own.
_UNTIED = (
    "save the base untied first: model = AutoModelForCausalLM.from_pretrained(BASE); "
    "model.config.tie_word_embeddings = False; model.lm_head.weight = torch.nn.Parameter("
    'model.get_input_embeddings().weight.detach().clone()); model.save_pretrained("UNTIED"), and '
    'give "UNTIED" as the base'
)


def _warn_of_ties(checkpoint: Checkpoint, found: Adapters) -> None:
    for head, embedding in tied_names(checkpoint):
        if embedding in found.by_tensor:
            warnings.warn(
                f"the adapter changes {embedding}, which {head} is tied to: merged, it changes the "
                "head, too, which it did not in training (peft's merge does the same). If logits "
                f"matter, {_UNTIED}",
                stacklevel=callers_level(),
            )


def _check_ties(checkpoint: Checkpoint, found: Adapters) -> None:
    """Raise CheckpointError if one of two stored copies of a tied weight would change."""
    if checkpoint.config.get("tie_word_embeddings") is not True:
        return
    without = {n: i for n, i in checkpoint.tensors.items() if n not in HEADS}
    pairs = tied_names(replace(checkpoint, tensors=without))
    touched = found.by_tensor.keys() | found.replaced.keys()
    for pair in pairs:
        stored = [name for name in checkpoint.tensors if name == pair[1] or name in HEADS]
        if len(stored) == 2 and touched.intersection(stored):
            raise CheckpointError(
                checkpoint.path,
                f"{' and '.join(stored)} are tied, both are stored, and an adapter changes one",
                "tie_word_embeddings false in config.json, or one of both",
                "true",
            )
