"""Small models in Hugging Face's layout, and what gguf-py makes of their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from conversions import Gpt2Shape
from safetensors_files import write_safetensors
from vocabularies import SPECIAL, byte_level, sentencepiece_metadata

from streamload.checkpoint.open import open_checkpoint
from streamload.formats.gguf.vocabulary import from_gguf

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0},
    "mistral": _COMMON | {"sliding_window": 64},
    "qwen2": _COMMON,
    "qwen3": _COMMON | {"tie_word_embeddings": True, "head_dim": 32},
    "gpt2": {
        "n_positions": 48,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "layer_norm_epsilon": 1e-5,
    },
}
_PRE = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "gpt2": "gpt-2"}
SETTINGS = {
    "bos_token": SPECIAL[0],
    "eos_token": SPECIAL[1],
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def tokenizer_of(family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if family == "mistral":
        files = from_gguf("x", sentencepiece_metadata())
        return files["tokenizer.json"], files["tokenizer_config.json"]
    return byte_level(_PRE[family], bos=family == "llama"), dict(SETTINGS)


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """config.json; the embedding has more rows than there are tokens."""
    tokenizer, _ = tokenizer_of(family)
    rows = max(each["id"] for each in tokenizer["added_tokens"])
    rows = max(rows, *tokenizer["model"]["vocab"].values()) + 1
    return {
        "model_type": family,
        "vocab_size": -(-rows // 32) * 32 + 32,
        **CONFIGS[family],
    } | changes


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if config["model_type"] == "gpt2":
        return Gpt2Shape.of(config).bare()
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = (config[k] * size for k in ("num_attention_heads", "num_key_value_heads"))
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            out[f"{layer}self_attn.{name}_proj.weight"] = (rows, width)
            if config["model_type"] == "qwen2":
                out[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        out[f"{layer}self_attn.o_proj.weight"] = (width, queries)
        if config["model_type"] == "qwen3":
            out |= {f"{layer}self_attn.{n}_norm.weight": (size,) for n in "qk"}
        out |= {f"{layer}mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        out[f"{layer}mlp.down_proj.weight"] = (width, inner)
        out |= {f"{layer}{n}_layernorm.weight": (width,) for n in ("input", "post_attention")}
    out["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = (config["vocab_size"], width)
    return out


def write_model(
    folder: Path, family: str, *, dtype: str = "BF16", tokenizer: bool = True, **changes: Any
) -> Path:
    config, random = config_of(family, **changes), np.random.default_rng(18)
    kinds = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    tensors = {
        name: (dtype, shape, random.normal(0, 0.5, shape).astype(kinds[dtype]).tobytes())
        for name, shape in shapes_of(config).items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        for name, document in zip(
            ("tokenizer.json", "tokenizer_config.json"), tokenizer_of(family), strict=True
        ):
            (folder / name).write_text(json.dumps(document))
    return folder


def made_by_gguf_py(
    folder: Path, kind: str | None
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type (``kind`` or the checkpoint's), shape and bytes of each tensor, by gguf-py's names."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    arch = {"mistral": "LLAMA"}.get(family, family.upper())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 2)
    out = {}
    for name, info in open_checkpoint(folder).tensors.items():
        if name.endswith(".attn.bias"):
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        with open(info.shard, "rb") as file:
            file.seek(info.start)
            raw = np.frombuffer(file.read(info.nbytes), info.dtype.numpy)
        x = raw.astype(np.float32).reshape(info.shape)
        if arch == "LLAMA" and ("attn_q." in new or "attn_k." in new):
            heads = config["num_attention_heads" if "attn_q." in new else "num_key_value_heads"]
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if family == "gpt2" and x.ndim == 2 and ".c_" in name:
            x = np.ascontiguousarray(x.T)
        asked = kind or info.dtype.code
        if x.ndim == 1 or new == "position_embd.weight":
            asked = "F32"
        elif asked.startswith("Q") and x.shape[1] % 32:
            asked = "F16"
        data = gguf.quants.quantize(x, gguf.GGMLQuantizationType[asked])
        out[new] = (asked, x.shape, data.tobytes())
    return out


def read_by_gguf_py(
    path: Path,
) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {field.name: field.contents() for field in reader.fields.values()}
    tensors = {
        t.name: (t.tensor_type.name, tuple(reversed(t.shape.tolist())), t.data.tobytes())
        for t in reader.tensors
    }
    return fields, tensors
