"""The architectures of language models in GGUF: names of tensors and settings, orders of rows.

GGUF names a tensor by its module in the architecture (``blk.0.attn_q.weight``) and a setting by the
architecture and a key (``llama.block_count``). Mistral has the architecture "llama".

A GGUF of the architecture "llama" has query and key rows interleaved, as Meta's checkpoints have
them: element i of the second half of a head comes after element i of the first. GPT-2's Conv1D
keeps the inputs along its first axis, GGUF along its last. GGUF stacks the experts of a layer, and
adds 1 to the norms of Gemma. Falcon's fused queries, keys and values are grouped by key head in
models, and GGUF has all queries first. The experts of gpt-oss interleave rows of gate and up, and
each is transposed; GGUF has two tensors.

Sources: the tables ``MODEL_TENSORS``, ``TENSOR_NAMES`` in gguf/constants.py and ``TensorNameMap``
in gguf/tensor_mapping.py of gguf-py, version 0.19; the modules of ``conversion/`` and of
``src/models/`` in llama.cpp, as in llama-cpp-python 0.3.36; `GGUF_CONFIG_MAPPING` in
transformers/integrations/ggml.py, version 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from streamload.core.tensors import RowTranspose

ARCHITECTURE = "general.architecture"
#: Of config.json, by key the values that llama.cpp implements.
_Values: TypeAlias = dict[str, tuple[object, ...]]
_NUMBER = re.compile(r"(?<=\.)(0|[1-9]\d{0,8})(?=\.)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The names of one GGUF architecture's tensors and settings, and Hugging Face's for them.

    Attributes:
        models: class with a language model's head by model_type of config.json; the first is the
            default for GGUF files.
        prefix: prefix of Hugging Face's names, which a model without its head lacks.
        modules: Hugging Face's module by GGUF's, or tensor by tensor. The first "{}" is the layer's
            number; a second one numbers the modules that GGUF stacks along its first axis.
        settings: key of config.json by GGUF's key without the architecture.
        values: by key of config.json, the values that llama.cpp implements; the first is the
            default.
        defaults: settings of config.json that llama.cpp computes with, and GGUF has no key for.
        rotated: by GGUF module whose rows are interleaved, the config key of its number of heads.
        transposed: GGUF modules whose weights are transposed; each matrix of a stack.
        grouped: GGUF modules of fused queries, keys and values that models group by key head.
        in_turn: by GGUF module of a layer, the one with whose rows models interleave its rows.
        as_rows: GGUF's vectors that models have as matrices of one row.
        norm_shift: GGUF's weights of norms minus those of models.
        window: every layer of this number attends to all tokens, the others to a window.
        wide_layers: the number of layers of a model whose attention is scaled by the width of a
            head in hidden_size, not by head_dim.
        rotates_part: whether config.json may have parts of heads rotated.
    """

    name: str
    models: Mapping[str, str]
    prefix: str
    modules: Mapping[str, str]
    settings: Mapping[str, str]
    values: Mapping[str, tuple[object, ...]]
    defaults: Mapping[str, object] = field(default_factory=dict)
    rotated: Mapping[str, str] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()
    grouped: frozenset[str] = frozenset()
    in_turn: Mapping[str, str] = field(default_factory=dict)
    as_rows: frozenset[str] = frozenset()
    norm_shift: float = 0.0
    window: int = 0
    wide_layers: int = 0
    rotates_part: bool = False

    def to_hugging_face(self, name: str) -> str | None:
        """Return Hugging Face's name of a GGUF tensor, "{}" for a number in a stack, or None."""
        return _renamed(name, self.modules)

    def to_gguf(self, name: str) -> str | None:
        """Return GGUF's name of a Hugging Face tensor, with or without prefix; None if unknown."""
        modules = {theirs: ours for ours, theirs in self.modules.items()}
        return _renamed(name, modules) or _renamed(self.prefix + name, modules)

    def number_in_stack(self, name: str) -> int | None:
        """Return a Hugging Face tensor's number in a stack of GGUF; None if it is in none."""
        _, numbers = template(name)
        return int(numbers[1]) if len(numbers) == 2 else None

    def is_transposed(self, name: str) -> bool:
        """Return whether a tensor, by GGUF's name, is the transpose of Hugging Face's."""
        return name.endswith(".weight") and module_of(name) in self.transposed

    def shift(self, name: str) -> float:
        """Return the number that GGUF adds to all elements of a tensor, by GGUF's name."""
        return self.norm_shift if name.endswith("_norm.weight") else 0.0

    def interleaved(self, name: str, rows: int, config: Mapping[str, Any]) -> RowTranspose | None:
        """Return the row permutation into GGUF's order, or None; ValueError for partial heads."""
        key = self.rotated.get(module_of(name))
        if key is None:
            return None
        heads = config.get(key, config.get("num_attention_heads"))
        if type(heads) is not int or heads < 1 or rows % (2 * heads):
            raise ValueError(f"{rows} rows are not {heads} heads of an even size ({key})")
        return RowTranspose(heads, 2, rows // heads // 2)

    def heads(self, name: str, rows: int, config: Mapping[str, Any]) -> tuple[int, int, int] | None:
        """Return key heads, queries of each, and rows of a head, of fused rows that are grouped.

        None if no rows are in another order. Raise ValueError if config.json has another number.
        """
        if module_of(name) not in self.grouped:
            return None
        queries = config.get("num_attention_heads")
        keys = config.get("num_kv_heads", queries)
        if not config.get("new_decoder_architecture") and config.get("multi_query", True):
            keys = 1  # whatever Falcon 7B states
        if type(queries) is not int or type(keys) is not int or not 1 <= keys <= queries:
            raise ValueError(f"num_attention_heads {queries} and num_kv_heads {keys} are invalid")
        if rows < 1 or queries % keys or rows % (queries + 2 * keys):
            raise ValueError(f"{rows} rows are not {queries} queries and twice {keys} keys")
        return keys, queries // keys, rows // (queries + 2 * keys)


@lru_cache(maxsize=16)  # called several times for one tensor
def template(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a tensor's name with "{}" for each number, and the numbers."""
    return _NUMBER.sub("{}", name), tuple(_NUMBER.findall(name))


def module_of(name: str) -> str:
    """Return a tensor's module with "{}" for each number."""
    return template(name)[0].rpartition(".")[0]


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    """Return a tensor's name with its module replaced by the table; None if the table lacks it."""
    whole, numbers = template(name)
    found = modules.get(whole)
    if found is None:
        module, _, leaf = whole.rpartition(".")
        if module not in modules:
            return None
        found = f"{modules[module]}.{leaf}"
    return found.format(*numbers, "{}")


def _of_layers(prefix: str = "model.layers", /, **modules: str) -> dict[str, str]:
    """Return a table of the modules in a layer: Hugging Face's name by GGUF's."""
    return {f"blk.{{}}.{ours}": f"{prefix}.{{}}.{theirs}" for ours, theirs in modules.items()}


def _without(table: Mapping[str, str], *keys: str) -> dict[str, str]:
    return {key: value for key, value in table.items() if key not in keys}


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
_QK_NORMS = _of_layers(attn_q_norm="self_attn.q_norm", attn_k_norm="self_attn.k_norm")
_EXPERTS = _of_layers(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{}.gate_proj",
    ffn_up_exps="mlp.experts.{}.up_proj",
    ffn_down_exps="mlp.experts.{}.down_proj",
)
_SHARED_EXPERT = _of_layers(
    ffn_gate_inp_shexp="mlp.shared_expert_gate",
    ffn_gate_shexp="mlp.shared_expert.gate_proj",
    ffn_up_shexp="mlp.shared_expert.up_proj",
    ffn_down_shexp="mlp.shared_expert.down_proj",
)
_GEMMA_NORMS = _of_layers(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_FUSED = _of_layers(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")
_GPT_OSS_MODULES = _without(_LLAMA_MODULES, "blk.{}.ffn_norm") | _of_layers(
    post_attention_norm="post_attention_layernorm",
    ffn_gate_inp="mlp.router",
    **{
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",  # with the rows of ffn_up_exps
        "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
        "ffn_down_exps.weight": "mlp.experts.down_proj",
        "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    },
)
_STABLELM_NORMS = _of_layers(
    attn_q_norm="self_attn.q_layernorm.norms.{}", attn_k_norm="self_attn.k_layernorm.norms.{}"
)
_FALCON_MODULES = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    **_of_layers(
        "transformer.h",
        attn_norm="input_layernorm",
        attn_qkv="self_attention.query_key_value",
        attn_output="self_attention.dense",
        ffn_up="mlp.dense_h_to_4h",
        ffn_down="mlp.dense_4h_to_h",
    ),
}
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
_MOE_SETTINGS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GEMMA_SETTINGS = _without(_LLAMA_SETTINGS, "rope.dimension_count") | {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_PARTIAL_SETTINGS = _without(
    *(_LLAMA_SETTINGS, "rope.dimension_count", "attention.key_length", "attention.value_length")
)
_FALCON_SETTINGS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "ffn_hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
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

_SILU: _Values = {"hidden_act": ("silu", "swish")}
_UNTIED: _Values = {"tie_word_embeddings": (False,)}
_MOE_VALUES: _Values = _SILU | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_GEMMA_VALUES: _Values = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}
_FALCON_VALUES = {
    "activation": ("gelu",),
    "alibi": (False,),
    "bias": (False,),
    "parallel_attn": (True,),
}

_LLAMA = Architecture(
    "llama",
    {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"},
    "model.",
    _LLAMA_MODULES,
    _LLAMA_SETTINGS,
    _SILU | {"partial_rotary_factor": (1.0, None)},
    rotated={"blk.{}.attn_q": "num_attention_heads", "blk.{}.attn_k": "num_key_value_heads"},
)
_QWEN2 = replace(_LLAMA, name="qwen2", models={"qwen2": "Qwen2ForCausalLM"}, rotated={})
_QWEN3 = replace(
    _QWEN2,
    name="qwen3",
    models={"qwen3": "Qwen3ForCausalLM"},
    modules=_LLAMA_MODULES | _QK_NORMS,
)
_QWEN2_MOE = replace(
    _QWEN2,
    name="qwen2moe",
    models={"qwen2_moe": "Qwen2MoeForCausalLM"},
    modules=_LLAMA_MODULES | _EXPERTS | _SHARED_EXPERT,
    settings=_LLAMA_SETTINGS
    | _MOE_SETTINGS
    | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    values=_MOE_VALUES | {"norm_topk_prob": (False,)} | _UNTIED,
    as_rows=frozenset({"blk.{}.ffn_gate_inp_shexp"}),
)
_QWEN3_MOE = replace(
    _QWEN3,
    name="qwen3moe",
    models={"qwen3_moe": "Qwen3MoeForCausalLM"},
    modules=_LLAMA_MODULES | _QK_NORMS | _EXPERTS,
    settings=_LLAMA_SETTINGS | _MOE_SETTINGS,
    values=_MOE_VALUES | {"norm_topk_prob": (True,)},
    defaults={"norm_topk_prob": True},
)
_GEMMA2 = replace(
    _QWEN2,
    name="gemma2",
    models={"gemma2": "Gemma2ForCausalLM"},
    modules=_LLAMA_MODULES | _GEMMA_NORMS,
    settings=_GEMMA_SETTINGS,
    values=_GEMMA_VALUES | {"tie_word_embeddings": (True,)},
    norm_shift=1.0,
    window=2,
    wide_layers=46,
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3",
    models={"gemma3_text": "Gemma3ForCausalLM"},
    modules=_LLAMA_MODULES | _GEMMA_NORMS | _QK_NORMS,
    settings=_GEMMA_SETTINGS | {"rope.freq_base_swa": "rope_local_base_freq"},
    values=_GEMMA_VALUES | {"attn_logit_softcapping": (None,), "sliding_window_pattern": (6, None)},
    window=6,
    wide_layers=62,
)
_PHI3 = replace(
    _QWEN2,
    name="phi3",
    models={"phi3": "Phi3ForCausalLM"},
    modules=_without(
        _LLAMA_MODULES | _FUSED,
        *(f"blk.{{}}.{n}" for n in ("attn_q", "attn_k", "attn_v", "ffn_gate")),
    ),
    settings=_PARTIAL_SETTINGS,
    values=_SILU,
    rotates_part=True,
)
_STABLELM = replace(
    _PHI3,
    name="stablelm",
    models={"stablelm": "StableLmForCausalLM"},
    modules=_LLAMA_MODULES | _STABLELM_NORMS,
    values=_SILU | _UNTIED,
    settings=_without(_PARTIAL_SETTINGS, "attention.layer_norm_rms_epsilon")
    | {
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
    },
)
_GPT_OSS = replace(
    _QWEN2,
    name="gpt-oss",
    models={"gpt_oss": "GptOssForCausalLM"},
    modules=_GPT_OSS_MODULES,
    settings=_LLAMA_SETTINGS
    | {
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size",
    },
    transposed=frozenset({"blk.{}.ffn_gate_exps", "blk.{}.ffn_down_exps"}),
    in_turn={"ffn_gate_exps": "ffn_up_exps"},
    window=2,
)
_FALCON = Architecture(
    "falcon",
    {"falcon": "FalconForCausalLM"},
    "transformer.",
    _FALCON_MODULES,
    _FALCON_SETTINGS,
    _FALCON_VALUES,
    defaults={"parallel_attn": True, "alibi": False},
    grouped=frozenset({"blk.{}.attn_qkv"}),
)
#: Falcon 40B and 180B, which norm the input of attention and that of the feed-forward layer apart.
_FALCON_TWO_NORMS = replace(
    _FALCON,
    modules=_FALCON_MODULES
    | _of_layers("transformer.h", attn_norm="ln_mlp", attn_norm_2="ln_attn"),
)
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
    one.name: one
    for one in (
        *(_LLAMA, _QWEN2, _QWEN3, _QWEN2_MOE, _QWEN3_MOE, _GEMMA2, _GEMMA3, _PHI3, _STABLELM),
        *(_GPT_OSS, _FALCON, _GPT2),
    )
}
#: By model_type of config.json, those that are written, too.
OF_MODEL: Mapping[str, Architecture] = {
    model: one for one in ARCHITECTURES.values() for model in one.models if not one.in_turn
}


def architecture_of(metadata: Mapping[str, Any], names: Iterable[str]) -> Architecture | None:
    """Return the architecture of a file with tensors of these names; None if it is unknown."""
    found = ARCHITECTURES.get(str(metadata.get(ARCHITECTURE)))
    if found is _FALCON and any(".attn_norm_2." in name for name in names):
        return _FALCON_TWO_NORMS
    return found


def of_model(config: Mapping[str, Any]) -> Architecture | None:
    """Return the architecture in which a model of a config.json is written; None for none."""
    found = OF_MODEL.get(str(config.get("model_type")))
    is_new = config.get("new_decoder_architecture") and config.get("num_ln_in_parallel_attn") != 1
    return _FALCON_TWO_NORMS if found is _FALCON and is_new else found
