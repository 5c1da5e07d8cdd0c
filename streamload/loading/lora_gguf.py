"""LoRA adapters in GGUF, as llama.cpp's convert_lora_to_gguf.py writes them.

A file of ``general.type`` "adapter" has the architecture of its base, ``adapter.lora.alpha``, and
two factors of each matrix: ``blk.0.attn_q.weight.lora_a`` and ``.lora_b``. The second has rows in
the order of GGUF, which depends on the numbers of heads in the base's configuration. That of an
embedding has its first factor transposed.

Source: convert_lora_to_gguf.py and ``llama_adapter_lora`` in src/llama-adapter.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.errors import CheckpointError
from streamload.files.header import Turn, describe
from streamload.formats.gguf.architectures import ARCHITECTURE, ARCHITECTURES, Architecture

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


def undone(order: RowTranspose | Turn) -> np.ndarray[Any, Any]:
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
