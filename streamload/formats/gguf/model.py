"""A model as GGUF has it, from its tensors' names and shapes and what lies beside them.

What becomes of each tensor (its name, the order of its rows, its type), which values GGUF holds
besides, and the metadata. The types are llama.cpp's own choice for files of one type: vectors, and
the positions of GPT-2, stay F32; a matrix whose rows are no whole blocks becomes F16.

Sources: docs/gguf.md in github.com/ggml-org/ggml (keys of ``general``); "Tensor Encoding Schemes"
in the wiki of llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from streamload.core.tensors import RowTranspose
from streamload.errors import CheckpointError
from streamload.formats.gguf.constants import FILE_TYPES, TENSOR_TYPE_OF, TensorType
from streamload.formats.gguf.layout import Described
from streamload.formats.gguf.names import (
    ARCHITECTURES,
    OF_MODEL,
    Architecture,
    is_computed,
    llama3_factors,
    metadata_of,
)

_F32, _F16 = TENSOR_TYPE_OF["F32"], TENSOR_TYPE_OF["F16"]
_POSITIONS = "position_embd.weight"
_HEAD = "output.weight"
EMBEDDING = "token_embd.weight"
_QUANTIZATION_VERSION = 2  # of ggml's blocks
# Keys without which llama.cpp opens no file.
_REQUIRED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"),
    *("layer_norm_rms_epsilon", "layer_norm_epsilon"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor of a checkpoint that is to be written.

    Attributes:
        name: as Hugging Face has it.
        shape: as models have it.
        kind: the type that it is to have; for vectors and narrow matrices another one.
        stays: it is blocks of that type already, and lies as GGUF has it but for its rows' order.
    """

    name: str
    shape: tuple[int, ...]
    kind: TensorType
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """What a tensor becomes.

    Attributes:
        source: its name in the checkpoint.
        entry: as the file has it.
        order: of its rows; None where they stay.
        transposed: the matrix is written as its transpose.
    """

    source: str
    entry: Described
    order: RowTranspose | None
    transposed: bool


def architecture_of(path: str | PathLike[str], config: Mapping[str, Any]) -> Architecture:
    """How GGUF has models of a config.json.

    Raises:
        CheckpointError: it has no such models, or streamload does not write them.
    """
    model = config.get("model_type")
    expected = f"config.json with a model_type of {', '.join(OF_MODEL)}"
    experts = next((key for key in _EXPERTS if config.get(key)), None)
    if experts is not None:
        raise CheckpointError(
            path,
            "a model with experts (MoE) is not written as GGUF; llama.cpp's own "
            "convert_hf_to_gguf.py does",
            expected,
            f"{model!r} with {experts} {config[experts]}",
        )
    found = OF_MODEL.get(str(model))
    if found is None:
        raise CheckpointError(
            path,
            "is no model that is written as GGUF; llama.cpp's own convert_hf_to_gguf.py knows more",
            expected,
            repr(model) if config else "no config.json",
        )
    return found


def placed(
    path: str | PathLike[str],
    config: Mapping[str, Any],
    architecture: Architecture,
    tensors: Iterable[Given],
) -> list[Placed]:
    """What each tensor becomes, in the order given; those that GGUF does not hold are left out.

    Raises:
        CheckpointError: a tensor has no name in GGUF, or rows that are no heads.
    """
    out: list[Placed] = []
    seen: dict[str, str] = {}
    for given in tensors:
        if is_computed(given.name):
            continue
        name = architecture.to_gguf(given.name)
        if name is None or not name.endswith((".weight", ".bias")):
            raise CheckpointError(
                path,
                f"it has no name in GGUF for the architecture {architecture.name}: leave it out "
                f'with exclude=["{given.name}"] (--exclude)',
                tensor=given.name,
            )
        if name == _HEAD and _ties(config, architecture):
            continue
        if name in seen:
            raise CheckpointError(
                path,
                f"{seen[name]!r} would have the same name in GGUF, {name}",
                tensor=given.name,
            )
        seen[name] = given.name
        transposed = architecture.is_transposed(name) and not given.stays
        shape = given.shape[::-1] if transposed else given.shape
        try:
            rows = given.shape[0] if given.shape else 1
            order = architecture.interleaved(name, rows, config)
        except ValueError as error:
            raise CheckpointError(
                path, f"its rows cannot be reordered: {error}", tensor=given.name
            ) from error
        kind = given.kind if given.stays else type_of(name, shape, given.kind)
        entry = Described(name, shape, kind)
        out.append(Placed(given.name, entry, order, transposed))
    if EMBEDDING in seen and _HEAD not in seen and config.get("tie_word_embeddings") is False:
        raise CheckpointError(
            path,
            "the head is missing, and config.json does not tie it to the embedding "
            "(tie_word_embeddings is false): save the model with it",
            "lm_head.weight",
            "no such tensor",
        )
    return out


def _ties(config: Mapping[str, Any], architecture: Architecture) -> bool:
    """Whether models take the embedding for the head, whatever the file holds."""
    stated = config.get("tie_word_embeddings")
    return stated is True or (stated is None and architecture.name == "gpt2")


def type_of(name: str, shape: Sequence[int], asked: TensorType) -> TensorType:
    """The type that a tensor of GGUF's name gets where a type was asked for."""
    if len(shape) < 2 or name == _POSITIONS:
        return _F32
    return _F16 if shape[-1] % asked.numel else asked


def rope_freqs(
    path: str | PathLike[str], config: Mapping[str, Any], architecture: Architecture
) -> bytes:
    """The data of the tensor rope_freqs.weight, in float32; b"" where a model needs none.

    Raises:
        CheckpointError: config.json lacks a setting of the scaling, or it is no number.
    """
    if architecture.name == "gpt2":
        return b""
    with _said_by_config(path):
        factors = llama3_factors(config)
    return b"" if factors is None else np.array(factors, "<f4").tobytes()


def metadata(
    path: str | PathLike[str],
    config: Mapping[str, Any],
    entries: Sequence[Described],
) -> dict[str, Any]:
    """All keys of a file but those of its vocabulary.

    Args:
        path: the checkpoint, for errors.
        config: what config.json says.
        entries: all tensors.

    Raises:
        CheckpointError: config.json lacks a setting, or has one that GGUF has no key for.
    """
    with _said_by_config(path):
        settings = metadata_of(config)
    architecture = ARCHITECTURES[settings.pop("general.architecture")]
    for key, ours in architecture.settings.items():
        if key.endswith(_REQUIRED) and f"{architecture.name}.{key}" not in settings:
            raise CheckpointError(path, f"config.json: {ours} is missing, which llama.cpp needs")
    name = config.get("_name_or_path")  # of the older transformers; a folder's name is no model's
    nbytes: Counter[str] = Counter()
    for entry in entries:
        nbytes[entry.kind.name] += entry.nbytes
    main = nbytes.most_common(1)[0][0] if nbytes else "F32"
    return {
        "general.architecture": architecture.name,
        "general.type": "model",
        **({"general.name": name.rpartition("/")[2]} if isinstance(name, str) and name else {}),
        **settings,
        "general.file_type": FILE_TYPES[main],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


@contextmanager
def _said_by_config(path: str | PathLike[str]) -> Iterator[None]:
    """Name config.json in errors of what it says."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(path, f"config.json: {error}") from error
