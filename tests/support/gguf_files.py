"""GGUF files made by gguf-py's writer, of small models of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from needs import module

from streamload.core.dtypes import PACKED

gguf = module("gguf")

_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_experts": 4}
_LOCAL = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + at / 32 for at in range(24)],
    "long_factor": [1.5 + at / 16 for at in range(24)],
}
#: By a test's name of a model, its type and architecture in gguf-py, and a small configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LLAMA", {"num_key_value_heads": 2, "tie_word_embeddings": False}),
    "mistral": (
        "mistral",
        "LLAMA",
        {"num_key_value_heads": 4, "sliding_window": None, "head_dim": 128},
    ),
    "qwen2": ("qwen2", "QWEN2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", "QWEN3", {"num_key_value_heads": 2, "head_dim": 128}),
    "gpt2": ("gpt2", "GPT2", {}),
    "gemma2": (
        "gemma2",
        "GEMMA2",
        {"num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
        | {"sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3_text",
        "GEMMA3",
        {"num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
        | {
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": {
                **_LOCAL,
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "phi3": ("phi3", "PHI3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    "phi3-long": (
        "phi3",
        "PHI3",
        {"num_key_value_heads": 2, "pad_token_id": 0, "rope_parameters": _LONG}
        | {"original_max_position_embeddings": 16},
    ),
    "qwen2moe": (
        "qwen2_moe",
        "QWEN2MOE",
        {"num_key_value_heads": 2, "shared_expert_intermediate_size": 256} | _EXPERTS,
    ),
    "qwen3moe": (
        "qwen3_moe",
        "QWEN3MOE",
        {"num_key_value_heads": 2, "head_dim": 128, "norm_topk_prob": True} | _EXPERTS,
    ),
    "gpt-oss": (
        "gpt_oss",
        "GPT_OSS",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"intermediate_size": 256, "sliding_window": 8},
    ),
    "stablelm": ("stablelm", "STABLELM", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-12b": (
        "stablelm",
        "STABLELM",
        {"num_key_value_heads": 2, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "falcon-7b": ("falcon", "FALCON", {"num_kv_heads": 1}),
    "falcon-11b": (
        "falcon",
        "FALCON",
        {"num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-40b": ("falcon", "FALCON", {"num_kv_heads": 2, "new_decoder_architecture": True}),
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


def small_model(name: str, **more: Any) -> Any:
    """A model of random values, and sizes that blocks of 256 elements divide."""
    torch, transformers = module("torch"), module("transformers")
    model_type, _, own = MODELS[name]
    sizes = (_GPT2_SIZES if model_type == "gpt2" else _SIZES) | own | more
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 or key.endswith(("_bias", "sinks")):  # 0 or 1 at first
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
                # 1 is added and taken away again exactly, except from -0.0, which becomes 0.0
                parameter.mul_(1024).round_().div_(1024).add_(0.0)
    return model


def architecture_of(config: Any) -> Any:
    kinds = {model_type: kind for model_type, kind, _ in MODELS.values()}
    return gguf.MODEL_ARCH[kinds[config.model_type]]


def tensors_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """A model's tensors under gguf-py's names, as llama.cpp's converter makes them.

    Its permutations of rows, transposes, sums and stacks are written here once more, for
    themselves.
    """
    config = model.config
    names = gguf.get_tensor_name_map(architecture_of(config), config.num_hidden_layers)
    out = {}
    norms: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".norms." in name:  # of each head; they come in order
            norms.setdefault(name.partition(".norms.")[0], []).append(tensor.float().numpy())
            continue
        for key, array in _converted(name, tensor.float().numpy(), config):
            own = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert own is not None, key
            out[own] = np.ascontiguousarray(array)
    for name, listed in norms.items():
        out[f"{names.get_name(name)}.weight"] = np.stack(listed)
    if rope := getattr(config, "rope_parameters", {}).get("long_factor"):
        out["rope_factors_long.weight"] = np.array(rope, np.float32)
        short = config.rope_parameters["short_factor"]
        out["rope_factors_short.weight"] = np.array(short, np.float32)
    return out


def _converted(name: str, array: np.ndarray[Any, Any], config: Any) -> Any:
    """Yield a tensor of Hugging Face's as llama.cpp's converter has it, or the two it becomes."""
    kind = config.model_type
    if kind in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads
        if "k_proj" in name:
            heads = config.num_key_value_heads
        two = array.reshape(heads, 2, array.shape[0] // heads // 2, -1)
        array = two.swapaxes(1, 2).reshape(array.shape)
    if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        array = array.T
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        array = array + 1
    if "query_key_value" in name:
        keys = config.num_kv_heads
        each = array.reshape(keys, config.num_attention_heads // keys + 2, -1, *array.shape[1:])
        parts = each[:, :-2], each[:, -2], each[:, -1]
        array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
    if name.endswith("shared_expert_gate.weight"):
        array = array.squeeze()
    if "sinks" in name:
        name += ".weight"
    if ".experts." in name:
        stem, _, leaf = name.rpartition(".")
        leaf = leaf.replace("_proj_bias", "_proj.bias")
        leaf = leaf if leaf.endswith(".bias") else f"{leaf}.weight"
        if kind == "gpt_oss" and leaf.endswith(".weight"):
            array = array.swapaxes(-1, -2)
        if "gate_up" in leaf:
            half = array.shape[1] // 2
            gate, up = (
                (array[:, ::2], array[:, 1::2])
                if kind == "gpt_oss"
                else (array[:, :half], array[:, half:])
            )
            yield f"{stem}.{leaf.replace('gate_up', 'gate')}", gate
            yield f"{stem}.{leaf.replace('gate_up', 'up')}", up
            return
        name = f"{stem}.{leaf}"
    yield name, array


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
    out, types = dict(tensors), {n: kind_of(n) for n, a in tensors.items() if is_matrix(n, a)}
    for seed, (name, kind) in enumerate(types.items()):
        *lead, rows, width = tensors[name].shape
        blocks = random_blocks(kind.lower(), math.prod(lead) * rows, width, seed)
        out[name] = blocks.reshape(*lead, rows, -1)
    return out, types


def is_matrix(name: str, array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor may be of blocks: not a vector for each head or expert, nor a router."""
    return array.ndim > 1 and not name.endswith((".bias", "_norm.weight", "gate_inp.weight"))


def q4_k_m(name: str) -> str:
    """The type of a matrix in a mixture such as llama.cpp's Q4_K_M: half of the values have 6 bits.

    Embeddings have 4 bits here, the head 6.
    """
    wide = "attn_v" in name or "ffn_down" in name
    return "Q6_K" if name.startswith("output") or (wide and ".0." in name) else "Q4_K"


def settings_of(writer: Any, config: Any) -> None:
    kind = config.model_type
    if kind == "gpt2":
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(4 * config.n_embd)
        writer.add_block_count(config.n_layer)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_context_length(2048 if kind == "falcon" else config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    heads = config.num_kv_heads if kind == "falcon" else config.num_key_value_heads
    writer.add_head_count_kv(heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if kind == "falcon":
        writer.add_tensor_data_layout("jploski")
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if kind == "stablelm":
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * size))
        writer.add_parallel_residual(config.use_parallel_residual)
        writer.add_layer_norm_eps(config.layer_norm_eps)
        return
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if kind != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if kind == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * size))
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_pad_token_id(config.pad_token_id)
        if "long_factor" in rope:
            scale = config.max_position_embeddings / config.original_max_position_embeddings
            ratio = math.log(scale) / math.log(config.original_max_position_embeddings)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + ratio))
        return
    if kind in ("llama", "mistral", "qwen2"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(size)
    if hasattr(config, "head_dim") or kind in ("llama", "mistral"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, key, None):
            getattr(writer, f"add_{key}")(getattr(config, key))
    if kind.startswith("gemma") or kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if "sliding_attention" in config.rope_parameters:
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if (experts := getattr(config, "num_experts", None)) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        inner = "intermediate_size" if kind == "gpt_oss" else "moe_intermediate_size"
        writer.add_expert_feed_forward_length(getattr(config, inner))
    if kind == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


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
    if config is not None:
        architecture = gguf.MODEL_ARCH_NAMES[architecture_of(config)]
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
    return {name: kind for name, array in tensors.items() if is_matrix(name, array)}
