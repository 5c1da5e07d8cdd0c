"""LoRA adapters that are merged into weights during a load: ``adapters=["path"]``.

W + scale * (B @ A) is computed in float64 from the checkpoint's values, and rounded once to the
dtype of the parameter: in float32, sums near zero were two float16 numbers away. Source of names,
scales and layouts: peft, ``LoraConfig`` and ``tuners/lora/layer.py`` (``get_delta_weight``).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.checkpoint.open import Checkpoint, open_checkpoint, read_json_file
from streamload.checkpoint.shards import open_shard
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError
from streamload.files.header import parse_json_object
from streamload.planning.transforms import Change, Changes, Rows, Transform

_CONFIG = "adapter_config.json"
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<part>[AB])"
    r"(?:\.weight)?"
)
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
    *("qalora_group_size", "ensure_weight_tying"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"),
}
# Values of the other keys that mean "not used".
_NOTHING: tuple[Any, ...] = (None, False, "none", [], {}, "")
_PLAIN_INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva")


def changes_of(
    checkpoint: Checkpoint, transform: Transform | None, adapters: Sequence[Any] | None
) -> Changes:
    """Return the changes of values in a load: by ``adapters=``, and then by ``transform=``."""
    if isinstance(adapters, (str, os.PathLike)) or not isinstance(adapters, Sequence | None):
        raise ValueError(f'adapters is a list of paths, such as ["my-lora/"], not {adapters!r}')
    found: dict[str, list[Change]] = {}
    nbytes = thread_nbytes = 0
    for path in adapters or ():
        for name, merge in _read(checkpoint, path):
            found.setdefault(name, []).append(merge)
            nbytes += merge.left.nbytes + merge.right.nbytes
            thread_nbytes = max(thread_nbytes, merge.right.size * 8)
    return Changes(found, nbytes, thread_nbytes).then(checkpoint, transform)


@dataclass(frozen=True, slots=True)
class _Merge:
    """A `Change` that adds ``left @ right * scale`` to the rows of a tensor, in float64."""

    left: Rows
    right: Rows
    scale: float

    def __call__(self, rows: Rows, first: int) -> Rows:
        out = rows.astype(np.float64)
        right = self.right.astype(np.float64)
        right *= self.scale
        rank, columns = right.shape
        width = max(min(_BLOCK_COLUMNS, columns, _BLOCK_PRODUCTS // rank), 1)
        height = max(_BLOCK_PRODUCTS // (rank * width), 1)
        stop = first + len(rows)
        for begin in range(first // height * height, stop, height):
            left = self.left[begin : begin + height].astype(np.float64)
            a, b = max(begin, first), min(begin + height, stop)
            for column in range(0, columns, width):
                delta = left @ right[:, column : column + width]
                part = out[a - first : b - first, column : column + width]
                np.add(part, delta[a - begin : b - begin], out=part)
        return out


def _read(checkpoint: Checkpoint, path: Any) -> Iterator[tuple[str, _Merge]]:
    """Yield the names of the tensors that an adapter changes, with the change of each."""
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"expected the path of an adapter, not {path!r}")
    adapter = open_checkpoint(path)
    config = _config(adapter.shards[0].path.parent / _CONFIG)
    parts: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
    for name, info in adapter.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(
                info.shard, "only plain LoRA is merged", "lora_A and lora_B", name, tensor=name
            )
        key = match["module"], match["embedding"] is not None
        parts.setdefault(key, {})[match["part"]] = info
    for (module, embedding), pair in parts.items():
        some = next(iter(pair.values()))
        if len(pair) < 2 or any(len(info.shape) != 2 for info in pair.values()):
            raise CheckpointError(
                some.shard,
                "only LoRA of matrices is merged",
                f"lora_A and lora_B of {module!r}, of two axes each",
                {f"lora_{part}": list(info.shape) for part, info in pair.items()},
                tensor=some.name,
            )
        target = _target(checkpoint, module, some)
        transposed = embedding or bool(config.get("fan_in_fan_out"))
        scale = _scale(config, module, pair["A"].shape[0])
        yield target.name, _merge(adapter, pair, target, scale, transposed)


def _config(path: Location) -> Mapping[str, Any]:
    """Read peft's configuration; raise CheckpointError, with the key, if it is not plain LoRA."""
    config = parse_json_object(read_json_file(path), path)
    if (found := config.get("peft_type")) != "LORA":
        raise CheckpointError(path, "only plain LoRA is merged", "peft_type LORA", found)
    for key, value in config.items():
        plain = value in _PLAIN_INITIALISATIONS if key == "init_lora_weights" else value in _NOTHING
        if key not in _WITHOUT_EFFECT and not plain:
            raise CheckpointError(
                path,
                f"only plain LoRA is merged, and this adapter has {key}: merge it with peft "
                "(merge_and_unload), and load what that saves",
                f"no {key}",
                json.dumps(value),
            )
    return config


def _target(checkpoint: Checkpoint, module: str, part: TensorInfo) -> TensorInfo:
    """Return the weight that a module of an adapter changes; names may differ by a prefix."""
    name = f"{module}.weight"
    shorter = name.partition(".")[2]
    longer = [other for other in checkpoint.tensors if other.endswith(f".{name}")]
    found = [one for one in (name, shorter) if one in checkpoint.tensors][:1] or longer
    if len(found) != 1:
        raise CheckpointError(
            part.shard,
            f"the adapter does not fit {checkpoint.path}",
            f"a tensor {name!r} there",
            found or "none",
            tensor=part.name,
        )
    return checkpoint.tensors[found[0]]


def _merge(
    adapter: Checkpoint,
    pair: Mapping[str, TensorInfo],
    target: TensorInfo,
    scale: float,
    transposed: bool,
) -> _Merge:
    """Return the change of the weight `target` by a pair of matrices, lora_A and lora_B."""
    a, b = (_values(adapter, pair[part]) for part in "AB")
    left, right = (a.T, b.T) if transposed else (b, a)
    if left.shape[1] != right.shape[0] or (len(left), right.shape[1]) != target.shape:
        raise CheckpointError(
            pair["A"].shard,
            f"the adapter does not fit {target.name!r}",
            f"factors of a matrix of {list(target.shape)}",
            f"{list(left.shape)} and {list(right.shape)}",
            tensor=pair["A"].name,
        )
    if target.dtype.kind != "float" or target.dtype.bits < 16:
        raise CheckpointError(
            target.shard,
            "an adapter is merged into floats of 16 bits or more",
            "such a dtype",
            target.dtype.name,
            tensor=target.name,
        )
    return _Merge(left, np.ascontiguousarray(right), scale)


def _scale(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of the product for a module: alpha / rank, or alpha / sqrt(rank)."""
    own = (config.get("alpha_pattern") or {}).items()  # matched as by peft's get_pattern_key
    found = (value for p, value in own if re.fullmatch(rf"(.*\.)?({p})", module))
    alpha = next(found, config.get("lora_alpha", 8))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _values(adapter: Checkpoint, info: TensorInfo) -> Rows:
    """Read a tensor of an adapter; CheckpointError unless it has floats of at least 16 bits."""
    if info.dtype.kind != "float" or info.dtype.bits < 16:
        raise CheckpointError(
            info.shard, "its dtype is not one of LoRA", "floats", info.dtype.name, tensor=info.name
        )
    data = bytearray(info.nbytes)
    with open_shard(adapter.headers[info.shard]) as reader:
        reader.read_into(info.start, memoryview(data))
    return np.frombuffer(data, info.dtype.numpy).reshape(info.shape)
