"""Values of ``config.json``: the language model's part, and numbers under any usual key."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

#: Keys of the language model's configuration in a model of several parts.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

#: Other names of the same numbers, as transformers, Meta and others write them.
_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
        "intermediate_size": ("n_inner", "ffn_dim", "d_ff"),
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("n_head", "n_heads", "num_heads"),
        "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
        "num_experts_per_tok": (*("num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts"),),
        "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    }
)


def language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the language model's settings, nested in ``config`` or all, and its ``model_type``."""
    values, kind = config, str(config.get("model_type"))
    while part := next((v for k in _PARTS if isinstance(v := values.get(k), Mapping)), None):
        # a part without a type: the text model of "gemma3" is "gemma3_text"
        values, kind = part, str(part.get("model_type", f"{kind}_text"))
    return values, kind


def stated(values: Mapping[str, Any], key: str) -> Any:
    """Return the value under ``key`` or one of its synonyms in `_NAMES`; None if there is none."""
    found = (values.get(name) for name in (key, *_NAMES.get(key, ())))
    return next((value for value in found if value is not None), None)


def integer(values: Mapping[str, Any], key: str) -> int | None:
    """Return the whole number under ``key`` or one of its synonyms in `_NAMES`, or None."""
    value = stated(values, key)
    return value if type(value) is int else None


def head_size(values: Mapping[str, Any]) -> int | None:
    """Return the number of elements of an attention head; None if it is not stated."""
    width, heads = integer(values, "hidden_size"), integer(values, "num_attention_heads")
    return integer(values, "head_dim") or (width // heads if width and heads else None)
