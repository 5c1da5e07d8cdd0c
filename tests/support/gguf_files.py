"""GGUF files made by gguf-py's writer, of small models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from needs import module

from streamload.core.dtypes import PACKED

gguf = module("gguf")

#: By model type, its architecture in gguf-py, and a small configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LLAMA", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "mistral": ("LLAMA", {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 128}),
    "qwen2": ("QWEN2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("QWEN3", {"num_key_value_heads": 2, "head_dim": 128}),
    "gpt2": ("GPT2", {}),
}
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GPT2_SIZES = {"vocab_size": 96, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 64}


def small_model(model_type: str, **more: Any) -> Any:
    """A model of random values, and sizes that blocks of 256 elements divide."""
    torch, transformers = module("torch"), module("transformers")
    sizes = (_GPT2_SIZES if model_type == "gpt2" else _SIZES) | MODELS[model_type][1] | more
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tensors_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A model's tensors under gguf-py's names, as llama.cpp's converter makes them.

    Its permutation of rows and its transposes are written here once more, for themselves.
    """
    config = model.config
    architecture = gguf.MODEL_ARCH[MODELS[config.model_type][0]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    out = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture.name == "LLAMA" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads
            if "k_proj" in name:
                heads = config.num_key_value_heads
            two = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
            array = two.swapaxes(1, 2).reshape(array.shape)
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            array = array.T
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(array)
    return out


def random_blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Blocks of random codes, with scales that make ordinary weights."""
    dtype = PACKED[kind if kind != "mxfp4" else "gguf-mxfp4"]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows * width // dtype.block, dtype.nbytes(1)), np.uint8)
    places = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "q4_1": (0, 2), "q5_1": (0, 2)}
    places |= dict.fromkeys(("q4_k", "q5_k"), (0, 2))
    for at in places.get(kind, (0,)):
        if kind == "mxfp4":
            blocks[:, 0] = rng.integers(118, 124, len(blocks))
            break
        scales = rng.uniform(2e-5, 5e-5, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def in_blocks(
    tensors: Mapping[str, np.ndarray[Any, Any]], kind_of: Callable[[str], str]
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Random blocks in place of each matrix, and the type of each, both by gguf-py's names."""
    out, types = dict(tensors), {n: kind_of(n) for n, a in tensors.items() if a.ndim == 2}
    for seed, (name, kind) in enumerate(types.items()):
        out[name] = random_blocks(kind.lower(), *tensors[name].shape, seed)
    return out, types


def q4_k_m(name: str) -> str:
    """The type of a matrix in a mixture such as llama.cpp's Q4_K_M: half of the values have 6 bits.

    Embeddings have 4 bits here, the head 6.
    """
    wide = "attn_v" in name or "ffn_down" in name
    return "Q6_K" if name.startswith("output") or (wide and ".0." in name) else "Q4_K"


def settings_of(writer: Any, config: Any) -> None:
    """Write a model's settings, as llama.cpp's converter does."""
    if config.model_type == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)


def write(
    path: Path,  # of the file
    # by name, float32, or the bytes of blocks where ``types`` has a name for them
    tensors: Mapping[str, np.ndarray[Any, Any]],
    types: Mapping[str, str] | None = None,  # by name, GGUF's types; other tensors stay float32
    *,
    config: Any = None,  # a model's, whose settings are written
    architecture: str = "llama",  # that it says where there is no model
    # methods of gguf-py's writer to call, and their arguments
    more: Iterable[tuple[str, tuple[Any, ...]]] = (),
    **options: Any,  # of gguf-py's writer
) -> None:
    """Write a file, or a set of files."""
    if config is not None:
        architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[MODELS[config.model_type][0]]]
    writer = gguf.GGUFWriter(path, architecture, **options)
    if config is not None:
        settings_of(writer, config)
    for method, arguments in more:
        getattr(writer, method)(*arguments)
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
            continue
        number = gguf.GGMLQuantizationType[kind]
        if array.dtype != np.uint8:
            array = gguf.quants.quantize(array, number)
        writer.add_tensor(name, array, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_types(tensors: Mapping[str, np.ndarray[Any, Any]], kind: str) -> dict[str, str]:
    """The type for each matrix."""
    return {name: kind for name, array in tensors.items() if array.ndim == 2}
