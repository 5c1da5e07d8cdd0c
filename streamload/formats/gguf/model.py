"""Chooses a model's architecture in GGUF, the types of its tensors, and its metadata.

The types are llama.cpp's own choice for files of one type: vectors, routers, and the positions of
GPT-2, stay F32; a matrix whose rows are not whole blocks becomes F16.

Sources: docs/gguf.md in github.com/ggml-org/ggml (keys of ``general``); "Tensor Encoding Schemes"
in the wiki of llama.cpp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np

from streamload.errors import CheckpointError
from streamload.files.header import describe
from streamload.formats.gguf.architectures import ARCHITECTURES, OF_MODEL, Architecture, of_model
from streamload.formats.gguf.constants import FILE_TYPES, TENSOR_TYPE_OF, TensorType
from streamload.formats.gguf.layout import Described
from streamload.formats.gguf.names import metadata_of, rope_tensors

_F32, _F16 = TENSOR_TYPE_OF["F32"], TENSOR_TYPE_OF["F16"]
#: Ends of names of matrices that stay F32: positions, routers, and a norm for each head.
_PLAIN = ("position_embd.weight", ".ffn_gate_inp.weight", "_norm.weight")
_QUANTIZATION_VERSION = 2  # of ggml's blocks
# Keys without which llama.cpp opens no file.
_REQUIRED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "head_count"),
    *("layer_norm_rms_epsilon", "layer_norm_epsilon"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def architecture_of(path: str | PathLike[str], config: Mapping[str, Any]) -> Architecture:
    """Return GGUF's architecture for a config.json; raise CheckpointError if none is supported."""
    model = config.get("model_type")
    found = of_model(config)
    experts = next((key for key in _EXPERTS if config.get(key)), None)
    if found is not None and (experts is None or "expert_count" in found.settings):
        return found
    stated = describe(model) if config else "no config.json"
    raise CheckpointError(
        path,
        "is no model that is written as GGUF; llama.cpp's own convert_hf_to_gguf.py knows more",
        f"config.json with a model_type of {', '.join(OF_MODEL)}",
        stated if experts is None else f"{stated} with {experts} {describe(config[experts])}",
    )


def type_of(name: str, shape: Sequence[int], asked: TensorType) -> TensorType:
    """Return the type to write for GGUF's tensor ``name``; ``asked`` is the type for matrices."""
    if len(shape) < 2 or name.endswith(_PLAIN):
        return _F32
    return _F16 if shape[-1] % asked.dtype.block else asked


def rope_bytes(path: str | PathLike[str], config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return by name the float32 bytes of tensors that divide the frequencies of RoPE."""
    with _naming_config(path):
        found = rope_tensors(config)
    return {name: np.array(values, "<f4").tobytes() for name, values in found.items()}


def metadata(
    path: str | PathLike[str],
    config: Mapping[str, Any],
    entries: Sequence[Described],
) -> dict[str, Any]:
    """Return the metadata of a model's GGUF file, except the vocabulary's keys.

    ``entries`` are the model's tensors: the type with the most bytes becomes the file's type. Raise
    CheckpointError, which names ``path``, for a missing setting.
    """
    with _naming_config(path):
        settings = metadata_of(config)
    architecture = ARCHITECTURES[settings.pop("general.architecture")]
    for key, ours in architecture.settings.items():
        if key.endswith(_REQUIRED) and f"{architecture.name}.{key}" not in settings:
            raise CheckpointError(path, f"config.json: {ours} is missing, which llama.cpp needs")
    name = config.get("_name_or_path")  # of the older transformers; a folder's name is no model's
    return {
        "general.architecture": architecture.name,
        "general.type": "model",
        **({"general.name": name.rpartition("/")[2]} if isinstance(name, str) and name else {}),
        **settings,
        **numbers(entries),
    }


def numbers(entries: Sequence[Described]) -> dict[str, int]:
    """Return the metadata on the types of a file's tensors."""
    nbytes: Counter[str] = Counter()
    for entry in entries:
        nbytes[entry.kind.name] += entry.nbytes
    main = nbytes.most_common(1)[0][0] if nbytes else "F32"
    return {
        "general.file_type": FILE_TYPES[main],
        "general.quantization_version": _QUANTIZATION_VERSION,
    }


@contextmanager
def _naming_config(path: str | PathLike[str]) -> Iterator[None]:
    """Convert ValueErrors of the block to CheckpointErrors that name config.json."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(path, f"config.json: {error}") from error
