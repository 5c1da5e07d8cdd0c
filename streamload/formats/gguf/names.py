"""Translates names of tensors and settings between GGUF and Hugging Face, both ways.

GGUF names a tensor by its module in the architecture (``blk.0.attn_q.weight``) and a setting by the
architecture and a key (``llama.block_count``). Mistral has the architecture "llama".

A GGUF of the architecture "llama" has query and key rows interleaved, as Meta's checkpoints have
them: element i of the second half of a head comes after element i of the first. GPT-2's Conv1D
keeps the inputs along its first axis, GGUF along its last.

Sources: docs/gguf.md in github.com/ggml-org/ggml; the tables ``Keys``, ``MODEL_TENSORS``,
``TENSOR_NAMES`` in gguf/constants.py and ``TensorNameMap`` in gguf/tensor_mapping.py of gguf-py,
version 0.19; `GGUF_CONFIG_MAPPING` in transformers/integrations/ggml.py, version 5; Meta's
``apply_scaling`` in llama/model.py of Llama 3.1, as transformers has it in
modeling_rope_utils.py; the constructor of ``llama_context`` in llama-context.cpp of llama.cpp (its
own factor of YaRN).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from streamload.core.model_config import head_size
from streamload.core.tensors import RowTranspose

ARCHITECTURE = "general.architecture"
ROPE_FREQS = "rope_freqs.weight"
_LAYER = re.compile(r"(?<=\.)(0|[1-9]\d{0,8})(?=\.)")
#: Buffers that old checkpoints hold, and no GGUF.
_COMPUTED = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The names of one GGUF architecture's tensors and settings, and Hugging Face's for them.

    Attributes:
        name: the architecture's name in GGUF files.
        models: class with a language model's head by model_type of config.json; the first is the
            default for GGUF files.
        prefix: prefix of Hugging Face's names, which a model without its head lacks.
        modules: Hugging Face's module by GGUF's; "{}" is the layer's number.
        settings: key of config.json by GGUF's key without the architecture.
        values: by key of config.json, the values that llama.cpp implements; the first is the
            default.
        rotated: by GGUF module whose rows are interleaved, the config key of its number of heads.
        transposed: GGUF modules whose weights are transposed.
    """

    name: str
    models: Mapping[str, str]
    prefix: str
    modules: Mapping[str, str]
    settings: Mapping[str, str]
    values: Mapping[str, tuple[object, ...]]
    rotated: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()

    def to_hugging_face(self, name: str) -> str | None:
        """Return Hugging Face's name of a GGUF tensor; None if it is unknown."""
        return _renamed(name, self.modules)

    def to_gguf(self, name: str) -> str | None:
        """Return GGUF's name of a Hugging Face tensor, with or without prefix; None if unknown."""
        modules = {theirs: ours for ours, theirs in self.modules.items()}
        return _renamed(name, modules) or _renamed(self.prefix + name, modules)

    def is_transposed(self, name: str) -> bool:
        """Return whether a tensor, by GGUF's name, is the transpose of Hugging Face's."""
        module, _ = _template(name)
        return name.endswith(".weight") and module in self.transposed

    def interleaved(self, name: str, rows: int, config: Mapping[str, Any]) -> RowTranspose | None:
        """Return the row permutation into GGUF's order, or None; ValueError for partial heads."""
        key = self.rotated.get(_template(name)[0])
        if key is None:
            return None
        heads = config.get(key, config.get("num_attention_heads"))
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise ValueError(f"{rows} rows are not {heads} heads of an even size ({key})")
        return RowTranspose(heads, 2, rows // heads // 2)


@lru_cache(maxsize=16)  # called several times for one tensor
def _template(name: str) -> tuple[str, str]:
    """Return a tensor's module with "{}" for the layer's number, and the number ("" for none)."""
    module = name.rpartition(".")[0]
    found = _LAYER.search(name)
    if found is None:
        return module, ""
    return module[: found.start()] + "{}" + module[found.end() :], found[0]


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    """Return a tensor's name with its module replaced by the table; None if the table lacks it."""
    module, layer = _template(name)
    found = modules.get(module)
    return None if found is None else f"{found.format(layer)}.{name.rpartition('.')[2]}"


def _of_layers(prefix: str, **modules: str) -> dict[str, str]:
    """Return a table of the modules in a layer: Hugging Face's name by GGUF's."""
    return {f"blk.{{}}.{ours}": f"{prefix}.{{}}.{theirs}" for ours, theirs in modules.items()}


_LLAMA_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **_of_layers(
        "model.layers",
        attn_norm="input_layernorm",
        attn_q="self_attn.q_proj",
        attn_k="self_attn.k_proj",
        attn_v="self_attn.v_proj",
        attn_output="self_attn.o_proj",
        ffn_norm="post_attention_layernorm",
        ffn_gate="mlp.gate_proj",
        ffn_up="mlp.up_proj",
        ffn_down="mlp.down_proj",
    ),
}
_QWEN3_MODULES = _LLAMA_MODULES | _of_layers(
    "model.layers", attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm"
)
_GPT2_MODULES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **_of_layers(
        "transformer.h",
        attn_norm="ln_1",
        attn_qkv="attn.c_attn",
        attn_output="attn.c_proj",
        ffn_norm="ln_2",
        ffn_up="mlp.c_fc",
        ffn_down="mlp.c_proj",
    ),
}
_LLAMA_SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
_GPT2_SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_GPT2_VALUES = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
}

_LLAMA = Architecture(
    "llama",
    {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    "model.",
    _LLAMA_MODULES,
    _LLAMA_SETTINGS,
    {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0, None)},
    rotated={"blk.{}.attn_q": "num_attention_heads", "blk.{}.attn_k": "num_key_value_heads"},
)
_QWEN2 = replace(_LLAMA, name="qwen2", models={"qwen2": "Qwen2ForCausalLM"}, rotated={})
_QWEN3 = replace(_QWEN2, name="qwen3", models={"qwen3": "Qwen3ForCausalLM"}, modules=_QWEN3_MODULES)
_GPT2_MATRICES = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
_GPT2 = Architecture(
    "gpt2",
    {"gpt2": "GPT2LMHeadModel"},
    "transformer.",
    _GPT2_MODULES,
    _GPT2_SETTINGS,
    _GPT2_VALUES,
    transposed=frozenset(f"blk.{{}}.{module}" for module in _GPT2_MATRICES),
)
#: By the name that files have.
ARCHITECTURES: Mapping[str, Architecture] = {
    one.name: one for one in (_LLAMA, _QWEN2, _QWEN3, _GPT2)
}
#: By model_type of config.json.
OF_MODEL: Mapping[str, Architecture] = {
    model: one for one in ARCHITECTURES.values() for model in one.models
}
#: By GGUF's key, the key of config.json; each is a token's number.
TOKENS: Mapping[str, str] = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


def is_computed(name: str) -> bool:
    """Return whether a tensor is a buffer that models compute themselves, absent from GGUF."""
    return _COMPUTED.fullmatch(name) is not None


# --- settings -------------------------------------------------------------------------------------


def config_of(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: Sequence[float] = (),
) -> dict[str, Any]:
    """Return the config.json for a GGUF file; {} for an unknown architecture.

    ``shapes`` are by GGUF's names; ``rope_freqs`` are the values of rope_freqs.weight. Raise
    ValueError if layers have different settings.
    """
    architecture = ARCHITECTURES.get(str(metadata.get(ARCHITECTURE)))
    if architecture is None:
        return {}
    found: dict[str, Any] = {}
    for key, ours in architecture.settings.items():
        value = _of_all_layers(f"{architecture.name}.{key}", metadata)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault(ours, shortest(value) if isinstance(value, float) else value)
    window = found.get("sliding_window")
    models = list(architecture.models)
    model = "mistral" if window and "mistral" in models else models[0]
    if model in ("qwen2", "qwen3") and window:
        found["use_sliding_window"] = True
    embedding = shapes.get("token_embd.weight", ())
    if "vocab_size" not in found and len(embedding) == 2:
        found["vocab_size"] = embedding[0]
    if model == "gpt2":
        found["n_ctx"] = found.get("n_positions")
    else:
        found |= _rope_of(architecture.name, metadata, found, rope_freqs)
    if model in ("llama", "qwen3"):
        found["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if model == "llama":
        found["mlp_bias"] = "blk.0.ffn_up.bias" in shapes
    found |= {ours: metadata[key] for key, ours in TOKENS.items() if type(metadata.get(key)) is int}
    return {
        "architectures": [architecture.models[model]],
        "model_type": model,
        **{key: value for key, value in found.items() if value is not None},
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _of_all_layers(key: str, metadata: Mapping[str, Any]) -> Any:
    """Return a setting stored once or per layer, or None; raise ValueError if layers differ."""
    value = metadata.get(key)
    if not isinstance(value, np.ndarray):
        return value
    values = set(value.tolist())
    if len(values) != 1:
        raise ValueError(f"{key} {value.tolist()[:8]}")
    return values.pop()


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a GGUF file for a config.json: integers, floats and strings.

    Raise ValueError for settings that GGUF cannot express. The scaling "llama3" of rotary
    embeddings is not among them but a tensor: see `llama3_factors`.
    """
    model = config.get("model_type")
    architecture = OF_MODEL.get(str(model))
    if architecture is None:
        raise ValueError(f"model_type is one of {', '.join(OF_MODEL)}, not {model!r}")
    rope = _rope(config)
    given = {**config, "rope_theta": rope.get("rope_theta"), "head_dim": head_size(config)}
    if architecture.name == "gpt2":
        given["n_inner"] = config.get("n_inner") or 4 * _count(config, "n_embd")
    elif given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    if model in ("qwen2", "qwen3"):
        least = config.get("max_window_layers", 28)  # the layers from here on have a window
        if config.get("use_sliding_window") and least < _count(config, "num_hidden_layers"):
            raise ValueError("llama.cpp has no windows for Qwen: use_sliding_window is false there")
        given["sliding_window"] = None
    found: dict[str, Any] = {ARCHITECTURE: architecture.name}
    for key, ours in architecture.settings.items():
        if given.get(ours) is not None:
            number = _number if key.endswith(("epsilon", "freq_base")) else _count
            found[f"{architecture.name}.{key}"] = number(given, ours)
    for key, ours in TOKENS.items():
        value = config.get(ours)
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int:
            found[key] = value
    scaling = _scaling_of(rope, config)
    return found | {f"{architecture.name}.rope.scaling.{key}": v for key, v in scaling.items()}


def _number(given: Mapping[str, Any], key: str) -> float:
    """Return the setting ``key`` as a float above 0; raise ValueError for anything else."""
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is a number above 0, not {value!r}")
    return float(value)


def _count(given: Mapping[str, Any], key: str) -> int:
    """Return the setting ``key`` as an integer of 32 bits; raise ValueError for anything else."""
    value = given.get(key)
    if type(value) is not int or not 0 <= value < 2**32:
        raise ValueError(f"{key} is a whole number, not {value!r}")
    return value


def shortest(value: float) -> float:
    """Return a float32 as the float with the fewest digits that identify it: 1e-05."""
    return float(str(np.float32(value)))


# --- rotary embeddings ----------------------------------------------------------------------------

#: By the scaling's type, its settings: GGUF's key to the key of config.json.
_SCALINGS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "llama3": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
#: The betas of YaRN in llama.cpp: for these architectures it reads none from a file.
_YARN_BETAS = {"beta_fast": 32, "beta_slow": 1}

#: Of the scaling of Llama 3: factors, and contexts, those near 8192 first.
_FACTORS = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_CONTEXTS = sorted((2**power for power in range(3, 25)), key=lambda n: abs(math.log2(n / 8192)))


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's settings of rotary embeddings, of transformers 4 or 5."""
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), Mapping):
            found |= config[key]
    return found


def _scaling_of(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return GGUF's keys, without their prefix, for a scaling of rotary embeddings.

    Raise ValueError for a scaling that GGUF or llama.cpp cannot express.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = _SCALINGS.get(kind)
    if names is None:
        raise ValueError(f"GGUF has no scaling {kind!r} of rotary embeddings")
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("GGUF has no partial_rotary_factor for this architecture")
    if not names:
        return {}
    if kind == "yarn":
        rope = _whole_yarn(rope, config)
    found: dict[str, Any] = {"type": kind, "factor": _number(rope, "factor")}
    for key, ours in names.items():
        if rope.get(ours) is not None:
            is_count = ours == "original_max_position_embeddings"
            found[key] = _count(rope, ours) if is_count else _number(rope, ours)
    if "attention_factor" in rope:
        found["attn_factor"] = _number(rope, "attention_factor") / _yarn_factor(found["factor"])
    return found


def _yarn_factor(factor: float) -> float:
    """Return llama.cpp's multiplier of rotated elements for a YaRN ``factor``, as YaRN's paper."""
    return 0.1 * math.log(factor) + 1


def _whole_yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's settings with those that transformers computes if they are missing.

    See transformers' `_compute_yarn_parameters`. Raise ValueError for settings llama.cpp ignores.
    """
    if rope.get("truncate") is False:
        raise ValueError("GGUF has no truncate: llama.cpp rounds YaRN's range (truncate is true)")
    for key, computed in _YARN_BETAS.items():
        if rope.get(key) not in (None, computed):
            said = f"llama.cpp computes YaRN with {key} {computed} for these models"
            raise ValueError(f"{said}, and reads no other from a file: not {rope[key]!r}")
    found = {key: value for key, value in rope.items() if value is not None}
    if "factor" not in found:
        context = _count(rope, "original_max_position_embeddings")
        found["factor"] = _count(config, "max_position_embeddings") / max(context, 1)
    if "attention_factor" not in found and found.get("mscale") and found.get("mscale_all_dim"):
        size = math.log(max(_number(found, "factor"), 1))
        over, under = (_number(found, key) for key in ("mscale", "mscale_all_dim"))
        found["attention_factor"] = (0.1 * over * size + 1) / (0.1 * under * size + 1)
    return found


def _rope_of(
    name: str, metadata: Mapping[str, Any], found: Mapping[str, Any], freqs: Sequence[float]
) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of config.json by a file's metadata.

    ``name`` is the architecture, ``found`` config.json so far, ``freqs`` rope_freqs.weight.
    """
    out: dict[str, Any] = {"rope_theta": found.get("rope_theta", 10000.0)}
    kind = metadata.get(f"{name}.rope.scaling.type")
    names = _SCALINGS.get(str(kind), {})
    if names:
        scaling: dict[str, Any] = {"rope_type": kind}
        for key, ours in names.items():
            value = metadata.get(f"{name}.rope.scaling.{key}")
            if isinstance(value, int | float):
                scaling[ours] = shortest(value) if isinstance(value, float) else value
        factor, times = (scaling.get("factor"), metadata.get(f"{name}.rope.scaling.attn_factor"))
        if kind == "yarn" and isinstance(times, float) and isinstance(factor, float) and factor > 0:
            scaling["attention_factor"] = float(f"{times * _yarn_factor(factor):.6g}")
        out["rope_scaling"] = scaling
    elif (llama3 := llama3_scaling(freqs, out["rope_theta"])) is not None:
        out["rope_scaling"] = llama3
    return out


def unsaid_of(
    metadata: Mapping[str, Any], config: Mapping[str, Any], rope_freqs: Sequence[float]
) -> str | None:
    """Return a sentence on a GGUF file's RoPE settings that config.json cannot express, or None."""
    name = metadata[ARCHITECTURE]
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("none", *_SCALINGS):
        return f"it scales rotary embeddings by {kind!r}"
    if any(factor != 1 for factor in rope_freqs) and "rope_scaling" not in config:
        return f"{ROPE_FREQS} is no scaling of Llama 3 that is known"
    rotated = metadata.get(f"{name}.rope.dimension_count")
    size = metadata.get(f"{name}.attention.key_length") or head_size(
        {key: value for key, value in config.items() if key != "head_dim"}
    )
    if isinstance(rotated, int) and isinstance(size, int) and rotated != size:
        return f"it rotates {rotated} of the {size} elements of a head"
    return None


def llama3_factors(config: Mapping[str, Any]) -> list[float] | None:
    """Return the values of rope_freqs.weight, Llama 3's divisors of frequencies; None for none."""
    # raises ValueError for invalid settings
    rope, size = _rope(config), head_size(config)
    if rope.get("rope_type", rope.get("type")) != "llama3" or size is None:
        return None
    base = 10000.0 if rope["rope_theta"] is None else _number(rope, "rope_theta")
    low, high = (_number(rope, f"{each}_freq_factor") for each in ("low", "high"))
    if not low < high:
        raise ValueError(f"low_freq_factor is less than high_freq_factor, not {low} and {high}")
    context = _number(rope, "original_max_position_embeddings")
    return _factors(base, size // 2, _number(rope, "factor"), low, high, context)


def _factors(
    base: float, count: int, factor: float, low: float, high: float, context: float
) -> list[float]:
    """Return Llama 3's divisor of each of ``count`` frequencies; see `llama3_factors`.

    ``low`` and ``high`` are config.json's low_freq_factor and high_freq_factor, ``context`` is
    original_max_position_embeddings, ``base`` rope_theta.
    """
    out = []
    for at in range(count):
        turns = context * base ** (-at / count) / (2 * math.pi)  # within the original context
        if turns > high:
            out.append(1.0)
        elif turns < low:
            out.append(float(factor))
        else:
            part = (turns - low) / (high - low)
            out.append(1 / ((1 - part) / factor + part))
    return out


def llama3_scaling(factors: Sequence[float], base: float) -> dict[str, Any] | None:
    """Return config.json's rope_scaling for the values of rope_freqs.weight; None if none fits."""
    # tries usual factors and contexts of powers of two: Llama 3.1 and 3.2 differ in the factor
    # alone; of several that fit, the context nearest to 8192 is returned
    if not factors or not all(0 < factor < math.inf for factor in factors):
        return None
    if max(factors) <= 1 or not 1 < base < math.inf:
        return None
    largest = float(f"{max(factors):.6g}")  # a quotient of two float32
    # the slowest frequencies have the whole factor, unless the context is long for the base
    for factor, context in product((largest, *_FACTORS), _CONTEXTS):
        made = _factors(base, len(factors), factor, 1.0, 4.0, context)
        if np.allclose(made, factors, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    return None
