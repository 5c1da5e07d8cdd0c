"""Translates settings between GGUF's metadata and config.json, both ways.

Sources: docs/gguf.md in github.com/ggml-org/ggml; the table ``Keys`` in gguf/constants.py of
gguf-py, version 0.19; Meta's ``apply_scaling`` in llama/model.py of Llama 3.1, as transformers has
it in modeling_rope_utils.py; the constructor of ``llama_context`` in llama-context.cpp (its own
factor of YaRN), ``load_swa_pattern`` in llama-model.cpp and the modules of ``src/models/`` in
llama.cpp (windows, and the scale of Gemma's attention).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from streamload.core.model_config import head_size, stated
from streamload.formats.gguf.architectures import (
    ARCHITECTURE,
    ARCHITECTURES,
    OF_MODEL,
    Architecture,
    architecture_of,
    of_model,
)

ROPE_FREQS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = (f"rope_factors_{of}.weight" for of in ("long", "short"))
#: Tensors of GGUF that are settings of models.
ROPE_TENSORS = (ROPE_FREQS, _LONG_FACTORS, _SHORT_FACTORS)
#: The most layers, and experts of one, that are believed.
MOST_LAYERS = 2**12
_HEADS, _ORIGINAL = "num_attention_heads", "original_max_position_embeddings"
_SLIDING, _FULL = "sliding_attention", "full_attention"
#: Buffers that old checkpoints hold, and no GGUF.
_COMPUTED = re.compile(r".*\.(attn\.(masked_)?bias|rotary_emb\.inv_freq)")


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
    rope: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the config.json for a GGUF file; {} for an unknown architecture.

    ``shapes`` are by GGUF's names; ``rope`` has the values of `ROPE_TENSORS`, by name. Raise
    ValueError if layers have different settings, or are very many.
    """
    architecture = architecture_of(metadata, shapes)
    if architecture is None:
        return {}
    found: dict[str, Any] = dict(architecture.defaults)
    for key in (
        "block_count",
        "expert_count",
    ):  # a model of them takes memory, however short its file
        value = metadata.get(f"{architecture.name}.{key}", 0)
        if isinstance(value, int | float) and not 0 <= value <= MOST_LAYERS:
            raise ValueError(f"{architecture.name}.{key} {value}")
    for key, ours in architecture.settings.items():
        value = _of_all_layers(f"{architecture.name}.{key}", metadata)
        if isinstance(value, int | float) and isinstance(value, bool) == ours.startswith("use_"):
            found.setdefault(ours, shortest(value) if isinstance(value, float) else value)
    window = found.get("sliding_window")
    models = list(architecture.models)
    model = "mistral" if window and "mistral" in models else models[0]
    if model.startswith(("qwen2", "qwen3")) and window:
        found["use_sliding_window"] = True
    embedding = shapes.get("token_embd.weight", ())
    if "vocab_size" not in found and len(embedding) == 2:
        found["vocab_size"] = embedding[0]
    if model == "gpt2":
        found["n_ctx"] = found.get("n_positions")
    else:
        found |= _rope_of(architecture, metadata, found, rope)
    found |= _of_windows(architecture, metadata, found) | of_tensors(model, found, shapes)
    found |= {ours: metadata[key] for key, ours in TOKENS.items() if type(metadata.get(key)) is int}
    padding = found.pop("pad_token_id", None)
    words = found.get("vocab_size")
    return {
        "architectures": [architecture.models[model]],
        "model_type": model,
        **{key: value for key, value in found.items() if value is not None},
        # stated if there is none, too: transformers' default may be no word of this vocabulary
        "pad_token_id": padding if words is None or (padding or 0) < words else None,
        "tie_word_embeddings": "output.weight" not in shapes,
    }


def _of_windows(
    architecture: Architecture, metadata: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of attention to a window, and the scale of Gemma's attention."""
    if not architecture.window:
        # of Phi-3 0 means none
        return {"sliding_window": found.get("sliding_window") or None}
    out: dict[str, Any] = {}
    name, layers, heads = architecture.name, found.get("num_hidden_layers"), found.get(_HEADS)
    pattern = metadata.get(f"{name}.attention.sliding_window_pattern", architecture.window)
    if name == "gemma3" and not found.get("sliding_window"):
        pattern = 0
    if type(layers) is int and 0 < layers <= MOST_LAYERS:
        out["layer_types"] = _layer_types(pattern, layers)
    if architecture.norm_shift and type(heads) is int and heads > 0:
        is_wide = layers == architecture.wide_layers
        of_width = found.get("hidden_size", 0) // heads
        out["query_pre_attn_scalar"] = of_width if is_wide else found.get("head_dim", of_width)
    return out


def _layer_types(pattern: Any, layers: int) -> list[str]:
    """Return the kind of each layer's attention: every n-th to all tokens, or by an array."""
    if isinstance(pattern, np.ndarray) and len(pattern) == layers:
        return [_SLIDING if slides else _FULL for slides in pattern.tolist()]
    if type(pattern) is not int or pattern < 0:
        raise ValueError(f"attention.sliding_window_pattern {pattern} of {layers} layers")
    return [_FULL if not pattern or (at + 1) % pattern == 0 else _SLIDING for at in range(layers)]


def of_tensors(
    model: str, found: Mapping[str, Any], names: Collection[str]
) -> dict[str, bool | int | None]:
    """Return settings of a ``model_type`` that its tensors state, by GGUF's names."""
    out: dict[str, bool | int | None] = {}
    if model in ("llama", "qwen3", "qwen3_moe"):
        out["attention_bias"] = "blk.0.attn_q.bias" in names
    if model == "llama":
        out["mlp_bias"] = "blk.0.ffn_up.bias" in names
    if model == "stablelm":
        out["use_qkv_bias"] = "blk.0.attn_q.bias" in names
        out["qk_layernorm"] = "blk.0.attn_q_norm.weight" in names
        out["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in names
    if model == "qwen2_moe":
        out["qkv_bias"] = "blk.0.attn_q.bias" in names
    if model == "falcon":
        keys, two = found.get("num_kv_heads", 1), "blk.0.attn_norm_2.weight" in names
        is_new = two or keys > 1
        out["num_kv_heads"] = keys
        out["multi_query"] = keys == 1
        out["new_decoder_architecture"] = is_new
        out["num_ln_in_parallel_attn"] = (2 if two else 1) if is_new else None
        out["bias"] = "blk.0.attn_qkv.bias" in names
    return out


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
    architecture = of_model(config)
    if architecture is None:
        raise ValueError(f"model_type is one of {', '.join(OF_MODEL)}, not {model!r}")
    rope = _rope(config)
    given = {**sized(architecture, config), "rope_theta": rope.get("rope_theta")}
    if str(model).startswith(("qwen2", "qwen3")):
        if _has_windows(config):
            raise ValueError("llama.cpp has no windows for Qwen: use_sliding_window is false there")
        given["sliding_window"] = None
    found: dict[str, Any] = {ARCHITECTURE: architecture.name}
    found |= _of_model(architecture, given, rope)
    for key, ours in architecture.settings.items():
        if type(given.get(ours)) is bool and ours.startswith("use_"):
            found[f"{architecture.name}.{key}"] = given[ours]
        elif given.get(ours) is not None:
            is_real = key.endswith(("epsilon", "freq_base", "freq_base_swa", "softcapping"))
            number = _number if is_real else _count
            found[f"{architecture.name}.{key}"] = number(given, ours)
    for key, ours in TOKENS.items():
        value = config.get(ours)
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and 0 <= value < 2**32:  # -1 stands for none
            found[key] = value
    scaling = _scaling_of(rope, config)
    return found | {f"{architecture.name}.rope.scaling.{key}": v for key, v in scaling.items()}


def sized(architecture: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the sizes that follow from others, if it lacks them."""
    given = {**config, "head_dim": head_size(config)}
    if architecture.name == "gpt2":
        given["n_inner"] = config.get("n_inner") or 4 * _count(config, "n_embd")
    elif given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = given.get("num_attention_heads")
    if "expert_count" in architecture.settings:
        given["num_experts"] = stated(config, "num_experts")
    if architecture.name == "falcon":
        given["ffn_hidden_size"] = given.get("ffn_hidden_size") or 4 * _count(given, "hidden_size")
        if not given.get("new_decoder_architecture") and given.get("multi_query", True):
            given["num_kv_heads"] = 1
    return given


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Return whether any layer of a Qwen model attends to a window, as transformers has it."""
    model, kinds = config.get("model_type"), config.get("layer_types")
    bound = _count({"max_window_layers": 28, **config}, "max_window_layers")
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return False
    if model == "qwen3_moe":  # all layers do, even if others are stated
        return True
    if isinstance(kinds, list):
        return any(kind != _FULL for kind in kinds)
    # every other layer before the bound, or all from there on
    return bound > 0 if model == "qwen2_moe" else bound < _count(config, "num_hidden_layers")


def _of_model(
    architecture: Architecture, given: dict[str, Any], rope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return keys that single architectures have; completes ``given``, the settings to write.

    Raise ValueError for settings that llama.cpp computes in another way.
    """
    name = architecture.name
    out: dict[str, Any] = {}
    if architecture.window:
        given["rope_local_base_freq"] = rope.get("rope_local_base_freq")
        for key in ("num_hidden_layers", _HEADS, "hidden_size"):
            _number(given, key)
        expected = _of_windows(architecture, {}, given)
        for key, default in (("layer_types", None), ("query_pre_attn_scalar", 256)):
            if given.get(key, default) not in (expected.get(key), None):
                problem = f"llama.cpp computes with {key} {expected.get(key)}"
                raise ValueError(f"{problem}, not {given.get(key, default)}")
    if name == "gemma2":  # without them, llama.cpp computes with the defaults
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            _number({key: 1.0, **given}, key)
    if name == "falcon":
        out["falcon.tensor_data_layout"] = "jploski"  # of fused queries, keys and values
        given.setdefault("max_position_embeddings", 2048)
    if architecture.rotates_part:
        part = rope.get("partial_rotary_factor", 0.25 if name == "stablelm" else 1.0)
        size, of_width = _count(given, "head_dim"), head_size({**given, "head_dim": None})
        if size != of_width:
            raise ValueError(f"llama.cpp computes with head_dim {of_width}, not {size}")
        out[f"{name}.rope.dimension_count"] = int(_number({"part": part}, "part") * size)
    if name == "phi3":
        given["sliding_window"] = given.get("sliding_window") or 0
        # transformers ignores that of rope_parameters
        context = _count({_ORIGINAL: given.get(_ORIGINAL) or 4096}, _ORIGINAL)
        out["phi3.rope.scaling.original_context_length"] = context
        if phi3_factors(rope):
            if context < 2:
                raise ValueError(f"{_ORIGINAL} is at least 2, not {context}")
            scale = _count(given, "max_position_embeddings") / context
            scale = scale if rope.get("factor") is None else _number(rope, "factor")
            computed = _longrope_factor(scale, context)
            own = rope.get("attention_factor")
            attention = computed if own is None else _number(rope, "attention_factor")
            out["phi3.rope.scaling.attn_factor"] = attention
    return out


def _longrope_factor(scale: float, context: int) -> float:
    """Return transformers' multiplier of rotated elements for longrope; ``context`` is over 1."""
    return math.sqrt(1 + math.log(scale) / math.log(context)) if scale > 1 else 1.0


_LARGEST = float(np.finfo(np.float32).max)


def _number(given: Mapping[str, Any], key: str) -> float:
    """Return the setting ``key`` as a float above 0; raise ValueError for anything else.

    GGUF has it in float32: a larger number is none.
    """
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
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
    """Return config.json's settings of rotary embeddings, of transformers 4 or 5.

    Those of layers that attend to a window are under the key ``rope_local_base_freq`` alone.
    """
    own = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
    found: dict[str, Any] = {key: config[key] for key in own if config.get(key) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        given = config.get(key)
        if isinstance(given, Mapping):
            local = given.get(_SLIDING)
            if isinstance(local, Mapping):
                if (kind := local.get("rope_type", local.get("type", "default"))) != "default":
                    raise ValueError(f"GGUF has no scaling {kind!r} of layers with a window")
                if "rope_theta" in local:
                    found["rope_local_base_freq"] = local["rope_theta"]
            of_all = given.get(_FULL, given)
            found |= of_all if isinstance(of_all, Mapping) else {}
    return {"rope_theta": None, **found}


def _scaling_of(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return GGUF's keys, without their prefix, for a scaling of rotary embeddings.

    Raise ValueError for a scaling that GGUF or llama.cpp cannot express.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = _SCALINGS.get(kind)
    architecture = of_model(config)
    if architecture is not None and architecture.name == "phi3" and kind in ("longrope", "su"):
        return {}  # its factors are tensors
    if names is None:
        raise ValueError(f"GGUF has no scaling {kind!r} of rotary embeddings")
    partial = architecture is not None and architecture.rotates_part
    if not partial and rope.get("partial_rotary_factor") not in (None, 1):
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
    architecture: Architecture,
    metadata: Mapping[str, Any],
    found: Mapping[str, Any],
    rope: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the settings of rotary embeddings in config.json by a file's metadata.

    ``found`` is config.json so far, ``rope`` has the values of `ROPE_TENSORS`.
    """
    name = architecture.name
    out: dict[str, Any] = {"rope_theta": found.get("rope_theta", 10000.0)}
    rotated, size = metadata.get(f"{name}.rope.dimension_count"), head_size(found)
    if architecture.rotates_part and isinstance(rotated, int) and size:
        out["partial_rotary_factor"] = rotated / size
    context = metadata.get(f"{name}.rope.scaling.original_context_length")
    if name == "phi3" and isinstance(context, int):
        out["original_max_position_embeddings"] = context
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
        if kind == "yarn" and name == "gpt-oss":  # no key of GGUF states it
            scaling["truncate"] = False
        out["rope_scaling"] = scaling
    elif _LONG_FACTORS in rope and _SHORT_FACTORS in rope:
        out["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": [*map(shortest, rope[_LONG_FACTORS])],
            "short_factor": [*map(shortest, rope[_SHORT_FACTORS])],
        }
        most = found.get("max_position_embeddings")
        times = metadata.get(f"{name}.rope.scaling.attn_factor")
        computed = 0.0
        if isinstance(most, int) and isinstance(context, int) and context > 1:
            computed = _longrope_factor(most / context, context)
        if isinstance(times, float) and 0 < times < math.inf and np.float32(computed) != times:
            out["rope_scaling"]["attention_factor"] = shortest(times)
    elif (llama3 := llama3_scaling(rope.get(ROPE_FREQS, ()), out["rope_theta"])) is not None:
        out["rope_scaling"] = llama3
    return out


def unsaid_of(
    metadata: Mapping[str, Any], config: Mapping[str, Any], rope: Mapping[str, Sequence[float]]
) -> str | None:
    """Return a sentence on a GGUF file's RoPE settings that config.json cannot express, or None."""
    name = metadata[ARCHITECTURE]
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    is_long = kind == "longrope" and "rope_scaling" in config
    if kind not in ("none", *_SCALINGS) and not is_long:
        return f"it scales rotary embeddings by {kind!r}"
    if any(factor != 1 for factor in rope.get(ROPE_FREQS, ())) and "rope_scaling" not in config:
        return f"{ROPE_FREQS} is no scaling of Llama 3 that is known"
    rotated = metadata.get(f"{name}.rope.dimension_count")
    size = metadata.get(f"{name}.attention.key_length") or head_size(
        {key: value for key, value in config.items() if key != "head_dim"}
    )
    partial = ARCHITECTURES[name].rotates_part
    if not partial and isinstance(rotated, int) and isinstance(size, int) and rotated != size:
        return f"it rotates {rotated} of the {size} elements of a head"
    return None


def phi3_factors(rope: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the values of rope_factors_long.weight and the short one; {} for none."""
    if rope.get("rope_type", rope.get("type")) not in ("longrope", "su"):
        return {}
    out = {}
    for name, key in ((_LONG_FACTORS, "long_factor"), (_SHORT_FACTORS, "short_factor")):
        values = rope.get(key)
        if not isinstance(values, list) or not values:
            raise ValueError(f"{key} is a list of numbers, not {values!r}")
        out[name] = [_number({key: value}, key) for value in values]
    return out


def rope_tensors(config: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the values of `ROPE_TENSORS` for a config.json, by name."""
    architecture = of_model(config)
    if architecture is None or architecture.name == "gpt2":
        return {}
    if architecture.name == "phi3":
        return phi3_factors(_rope(config))
    factors = llama3_factors(config)
    return {} if factors is None else {ROPE_FREQS: factors}


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
