"""Models that MLC-LLM has: names and shapes of their tensors, and fields of their configuration.

Names are those of Hugging Face, except of tensors that are joined by rows: query, key and value are
``qkv_proj`` (``c_attn`` of Qwen), gate and up ``gate_up_proj``; and of Phi-3. Experts of Qwen3 are
stacked: ``moe_gate_up_proj`` and ``moe_down_proj`` are (experts, rows, columns).

Source: github.com/mlc-ai/mlc-llm, ``*_model.py`` and ``*_loader.py`` of python/mlc_llm/model;
``is_moe_gate`` of quantization/utils.py (gates that are not quantized).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streamload.core.model_config import stated
from streamload.formats.writer import Model

#: The head's name here and there.
HEAD = "lm_head.weight"
_QWEN3 = ("qwen3", "qwen3_moe")
_PLAIN_EXPERTS = 256
_GEMMA3_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
_ORIGINAL, _TOP = "original_max_position_embeddings", "norm_topk_prob"
#: Fields of every configuration that no source has.
_ONE_DEVICE = {"tensor_parallel_shards": 1, "max_batch_size": 128}


class Parameter(NamedTuple):
    """A tensor of MLC's model: the rows of its sources, joined."""

    name: str
    sources: Mapping[str, tuple[int, ...]]  # shapes by name; a Conv1D's is transposed
    is_linear: bool = False
    is_embedding: bool = False
    is_conv1d: bool = False
    experts: int = 0  # whose matrices are joined and stacked; 0 for a matrix or a vector
    shift: float = 0.0  # is added to the elements; MLC has Gemma's norms plus 1


def _rows(name: str, *sources: str, rows: Sequence[int], columns: int = 0) -> Parameter:
    """Return a linear layer's weight, joined from ``sources`` (by default ``name`` alone).

    ``rows`` has the rows of each source. Without ``columns`` return a vector: ``rows`` has the
    elements of each source then.
    """
    axes = (columns,) if columns else ()
    shapes = {s: (count, *axes) for s, count in zip(sources or (name,), rows, strict=True)}
    return Parameter(name, shapes, is_linear=bool(columns))


def _llama(model: Model) -> Iterator[Parameter]:
    """Yield the tensors of MLC's Llama, Mistral and Qwen models."""
    n = _llama_numbers(model)
    width, vocabulary = n["hidden_size"], n["vocab_size"]
    inner, mixed = n["intermediate_size"], n["num_attention_heads"] * n["head_dim"]
    shared = n["num_key_value_heads"] * n["head_dim"]
    rows = (mixed, shared, shared)
    is_qwen = model.family.startswith("qwen")
    has_bias = model.family == "qwen2" or (is_qwen and model.config.get("attention_bias"))
    embedding = "model.embed_tokens.weight"
    yield Parameter(embedding, {embedding: (vocabulary, width)}, is_embedding=True)
    for layer in range(n["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        attention, mlp = f"{start}self_attn.", f"{start}mlp."
        joined = attention + ("c_attn" if is_qwen else "qkv_proj")
        parts = [f"{attention}{each}_proj" for each in "qkv"]
        weights = (f"{part}.weight" for part in parts)
        yield _rows(f"{joined}.weight", *weights, rows=rows, columns=width)
        if has_bias:
            yield _rows(f"{joined}.bias", *(f"{part}.bias" for part in parts), rows=rows)
        yield _rows(f"{attention}o_proj.weight", rows=[width], columns=mixed)
        if has_bias and model.family in _QWEN3:
            yield _rows(f"{attention}o_proj.bias", rows=[width])
        if model.family in _QWEN3:
            for each in "qk":
                yield _rows(f"{attention}{each}_norm.weight", rows=[n["head_dim"]])
        if model.family == "qwen3_moe":
            yield from _experts(model, mlp, width)
        else:
            parts = [f"{mlp}{each}_proj.weight" for each in ("gate", "up")]
            yield _rows(f"{mlp}gate_up_proj.weight", *parts, rows=(inner, inner), columns=width)
            yield _rows(f"{mlp}down_proj.weight", rows=[width], columns=inner)
        for each in ("input", "post_attention"):
            yield _rows(f"{start}{each}_layernorm.weight", rows=[width])
    yield _rows("model.norm.weight", rows=[width])
    is_tied = model.config.get("tie_word_embeddings")
    if not is_tied or model.family in ("mistral", "qwen3_moe"):  # MLC's have no other head
        source = embedding if is_tied else HEAD
        yield _rows(HEAD, source, rows=[vocabulary], columns=width)


def _experts(model: Model, mlp: str, width: int) -> Iterator[Parameter]:
    """Yield the tensors of a mixture of experts, ``mlp`` being the start of their names."""
    n = _experts_numbers(model)
    count, inner = n["num_experts"], n["moe_intermediate_size"]
    gate = f"{mlp}gate.weight"  # MLC keeps those of up to 256 experts as they are
    yield Parameter(gate, {gate: (count, width)}, is_linear=count > _PLAIN_EXPERTS)
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    for name, kinds in (("moe_gate_up_proj", ("gate", "up")), ("moe_down_proj", ("down",))):
        sources = {
            f"{mlp}experts.{i}.{kind}_proj.weight": shapes[kind]
            for i in range(count)
            for kind in kinds
        }
        yield Parameter(f"{mlp}{name}.weight", sources, is_linear=True, experts=count)


def _phi3(model: Model) -> Iterator[Parameter]:
    """Yield the tensors of MLC's Phi-3, whose parts are joined in the source, too."""
    n = _llama_numbers(model)
    width, vocabulary, inner = n["hidden_size"], n["vocab_size"], n["intermediate_size"]
    mixed, shared = (n[f"num_{kind}_heads"] * n["head_dim"] for kind in ("attention", "key_value"))
    embedding = "model.embed_tokens.weight"
    name, shapes = "transformer.embd.weight", {embedding: (vocabulary, width)}
    yield Parameter(name, shapes, is_embedding=True)
    for layer in range(n["num_hidden_layers"]):
        start, source = f"transformer.h.{layer}.", f"model.layers.{layer}."
        for name, other, rows, columns in (
            ("ln", "input_layernorm", width, 0),
            ("mixer.qkv_proj", "self_attn.qkv_proj", mixed + 2 * shared, width),
            ("mixer.out_proj", "self_attn.o_proj", width, mixed),
            ("post_attention_layernorm", "post_attention_layernorm", width, 0),
            ("mlp.gate_up_proj", "mlp.gate_up_proj", 2 * inner, width),
            ("mlp.down_proj", "mlp.down_proj", width, inner),
        ):
            sources = f"{source}{other}.weight"
            yield _rows(f"{start}{name}.weight", sources, rows=[rows], columns=columns)
    yield _rows("transformer.norm.weight", "model.norm.weight", rows=[width])
    if not model.config.get("tie_word_embeddings"):
        yield _rows(HEAD, rows=[vocabulary], columns=width)


def _gemma3(model: Model) -> Iterator[Parameter]:
    """Yield the tensors of MLC's Gemma 3, of text alone."""
    n = _llama_numbers(model)
    width, inner, head = n["hidden_size"], n["intermediate_size"], n["head_dim"]
    mixed, shared = (n[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    embedding, to = "model.embed_tokens.weight", "language_model."
    yield Parameter(to + embedding, {embedding: (n["vocab_size"], width)}, is_embedding=True)
    for layer in range(n["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, rows, columns in (
            *(
                (f"self_attn.{each}_proj", rows, width)
                for each, rows in zip("qkv", (mixed, shared, shared), strict=True)
            ),
            ("self_attn.o_proj", width, mixed),
            *((f"self_attn.{each}_norm", head, 0) for each in "qk"),
            ("mlp.down_proj", width, inner),
            *((f"{each}_layernorm", width, 0) for each in _GEMMA3_NORMS),
        ):
            source = f"{start}{name}.weight"
            found = _rows(to + source, source, rows=[rows], columns=columns)
            yield found if columns else found._replace(shift=1.0)
        parts = [f"{start}mlp.{each}_proj.weight" for each in ("gate", "up")]
        name = f"{to}{start}mlp.gate_up_proj.weight"
        yield _rows(name, *parts, rows=(inner, inner), columns=width)
    norm = _rows(f"{to}model.norm.weight", "model.norm.weight", rows=[width])
    yield norm._replace(shift=1.0)


def _gpt2(model: Model) -> Iterator[Parameter]:
    """Yield the tensors of MLC's GPT-2; the source's names lack "transformer."."""
    n = _gpt2_numbers(model)
    width, inner = n["n_embd"], n["n_inner"]
    rows = {"wte.weight": n["vocab_size"], "wpe.weight": n["n_positions"]}
    for name, count in rows.items():
        yield Parameter(f"transformer.{name}", {name: (count, width)}, is_embedding=True)
    layer = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    norms = [f"h.{i}.{each}" for i in range(n["n_layer"]) for each in ("ln_1", "ln_2")]
    for i in range(n["n_layer"]):
        for each, shape in layer.items():
            name = f"h.{i}.{each}"
            shapes = {f"{name}.weight": shape}
            yield Parameter(f"transformer.{name}.weight", shapes, is_linear=True, is_conv1d=True)
            yield _rows(f"transformer.{name}.bias", f"{name}.bias", rows=shape[1:])
    for name in (*norms, "ln_f"):
        for kind in ("weight", "bias"):
            yield _rows(f"transformer.{name}.{kind}", f"{name}.{kind}", rows=[width])
    is_tied = model.config.get("tie_word_embeddings", True)
    source = "wte.weight" if is_tied else HEAD
    yield _rows(HEAD, source, rows=[n["vocab_size"]], columns=width)


# --- the configuration ----------------------------------------------------------------------------


def _llama_numbers(model: Model) -> dict[str, int]:
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    found = model.numbers(**dict.fromkeys((*keys, "vocab_size")))
    heads = found["num_attention_heads"]
    found["num_key_value_heads"] = model.number("num_key_value_heads", heads)
    found["head_dim"] = model.number("head_dim", found["hidden_size"] // heads)
    return found


def _experts_numbers(model: Model) -> dict[str, int]:
    count = stated(model.config, "num_experts")
    found = model.numbers(moe_intermediate_size=None, num_experts_per_tok=None)
    return {"num_experts": model.number("num_experts", count), **found}


def _gpt2_numbers(model: Model) -> dict[str, int]:
    keys = ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")
    found = model.numbers(**dict.fromkeys(keys))
    return {**found, "n_inner": model.number("n_inner", 4 * found["n_embd"])}


def _scaling(model: Model) -> Mapping[str, Any]:
    """Return the scaling of rotary embeddings as config.json has it; {} without one."""
    found = model.config.get("rope_parameters") or model.config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        model.refuse("rope_scaling of config.json is invalid", "an object", repr(found))
    return found


def _kind(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _rope(model: Model) -> tuple[float, dict[str, Any] | None]:
    """Return the base and the scaling, or None, of rotary embeddings; refuse one MLC lacks."""
    scaling = _scaling(model)
    if scaling.get("partial_rotary_factor") not in (None, 1):
        model.refuse("MLC rotates all of a head", "no partial_rotary_factor in config.json")
    base = model.config.get("rope_theta", scaling.get("rope_theta", 10000))
    kind = _kind(scaling)
    if kind == "default":
        return base, None
    if kind != "llama3" or model.family != "llama":
        model.refuse(f"MLC's {model.family} has no such scaling of rotary embeddings", found=kind)
    return base, {key: value for key, value in scaling.items() if key != "rope_theta"}


def _llama_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's Llama, Mistral or Qwen."""
    family, (base, scaling) = model.family, _rope(model)
    window = model.config.get("sliding_window") if family == "mistral" else None
    context = -1 if window else model.number("max_position_embeddings")
    is_qwen = family.startswith("qwen")
    found: dict[str, Any] = {
        **_llama_numbers(model),
        "rms_norm_eps": model.config.get("rms_norm_eps", 1e-6),
        "context_window_size": context,
        "prefill_chunk_size": min(window or context, 2048 if is_qwen else 8192),
        "rope_theta" if is_qwen else "position_embedding_base": base,
        **_ONE_DEVICE,
    }
    if family == "mistral":
        return {**found, "sliding_window_size": window or -1, "attention_sink_size": 4}
    found["tie_word_embeddings"] = bool(model.config.get("tie_word_embeddings"))
    if family == "llama":
        more = {"pipeline_parallel_stages": 1, "disaggregation": False}
        return {**found, "rope_scaling": scaling, **more}
    found |= {"hidden_act": model.config.get("hidden_act", "silu"), "dtype": "float32"}
    if family in _QWEN3:
        biased = bool(model.config.get("attention_bias"))
        found |= {"attention_bias": biased, "weight_block_size": None}
    if family == "qwen3_moe":
        more = {"decoder_sparse_step": 1}
        found |= {**_experts_numbers(model), **more, _TOP: bool(model.config.get(_TOP))}
    return found


def _phi3_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's Phi-3."""
    found, scaling = _llama_numbers(model), _scaling(model)
    if found["head_dim"] * found["num_attention_heads"] != found["hidden_size"]:
        model.refuse("MLC's phi3 has no such head_dim in config.json", found=found["head_dim"])
    context = model.number("max_position_embeddings")
    original = model.number(_ORIGINAL, scaling.get(_ORIGINAL, context))
    kind = _kind(scaling)
    if kind not in ("default", "longrope", "su"):
        model.refuse("MLC's phi3 has no such scaling of rotary embeddings", "longrope", kind)
    factors = {key: scaling.get(key) for key in ("long_factor", "short_factor")}
    if kind != "default" and not all(isinstance(each, list) for each in factors.values()):
        model.refuse("rope_scaling of config.json is invalid", "lists of factors", factors)
    factor = context / original  # from which MLC computes attention_factor
    if kind != "default" and scaling.get("factor") not in (None, factor):
        model.refuse("MLC's phi3 has no such factor of RoPE", factor, scaling["factor"])
    if kind != "default" and scaling.get("attention_factor") is not None:
        model.refuse("MLC's phi3 has no attention_factor of RoPE", found=scaling)
    places = {"max_position_embeddings": context, _ORIGINAL: original}
    longrope = {"type": "longrope", "rope_type": "longrope", **factors, **places}
    part = model.config.get("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0))
    return {
        **found,
        "rms_norm_eps": model.config.get("rms_norm_eps", 1e-5),
        **places,
        "position_embedding_base": model.config.get("rope_theta", scaling.get("rope_theta", 10000)),
        "rope_scaling": None if kind == "default" else longrope,
        "context_window_size": context,
        "prefill_chunk_size": min(context, 8192),
        "tie_word_embeddings": bool(model.config.get("tie_word_embeddings")),
        "partial_rotary_factor": part,
        **_ONE_DEVICE,
    }


def _gemma3_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's Gemma 3; its layers see a window but each sixth."""
    found, scaling = _llama_numbers(model), _scaling(model)
    local = scaling.get("sliding_attention", {})
    scaling = scaling.get("full_attention", scaling)
    for each in (scaling, local):
        if not isinstance(each, Mapping) or _kind(each) != "default":
            model.refuse("MLC's gemma3 has no scaling of rotary embeddings", found=each)
    kinds = model.config.get("layer_types")
    layers = range(1, found["num_hidden_layers"] + 1)
    known = ["sliding_attention" if i % 6 else "full_attention" for i in layers]
    if kinds not in (None, known):
        model.refuse("MLC's gemma3 has no such layer_types in config.json", known, kinds)
    if model.config.get("sliding_window", 4096) is None:
        model.refuse("MLC's gemma3 needs a sliding_window in config.json", "a number", "null")
    window = model.number("sliding_window", 4096)
    chunk = min(model.number("max_position_embeddings", 131072), 8192)
    vocabulary = found.pop("vocab_size")
    sizes = {
        "context_window_size": max(window, 8192),
        "prefill_chunk_size": chunk,
        "sliding_window_size": window,
    }
    text = {
        **found,
        "attention_bias": False,
        "rms_norm_eps": model.config.get("rms_norm_eps", 1e-6),
        "hidden_activation": "gelu_pytorch_tanh",
        "position_embedding_base": scaling.get(
            "rope_theta", model.config.get("rope_theta", 1_000_000)
        ),
        "rope_scaling": 0,
        "query_pre_attn_scalar": model.config.get("query_pre_attn_scalar", 256),
        **sizes,
    }
    whole = {"vocab_size": vocabulary, "is_text_model": True}
    return {"text_config": text, **whole, **sizes, **_ONE_DEVICE}


def _gpt2_config(model: Model) -> dict[str, Any]:
    """Return the ``model_config`` of MLC's GPT-2."""
    found = _gpt2_numbers(model)
    context = found.pop("n_positions")
    scales = "scale_attn_by_inverse_layer_idx"
    return {
        **found,
        "head_dim": found["n_embd"] // found["n_head"],
        "layer_norm_epsilon": model.config.get("layer_norm_epsilon", 1e-5),
        "context_window_size": context,
        "prefill_chunk_size": min(context, 8192),
        scales: bool(model.config.get(scales)),
        **_ONE_DEVICE,
    }


class Family(NamedTuple):
    """Functions and tables by which models of some families are written for MLC."""

    parameters: Callable[[Model], Iterator[Parameter]]  # lists MLC's tensors
    config: Callable[[Model], dict[str, Any]]  # makes ``model_config``
    values: Mapping[str, tuple[object, ...]]  # those of config.json that MLC implements
    dropped: re.Pattern[str]  # names of tensors that are left out
    prefix: str  # removed from names of the source


_LLAMA = Family(
    _llama,
    _llama_config,
    {
        "hidden_act": ("silu", "swish"),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1.0, None),
        "decoder_sparse_step": (1, None),  # of qwen3_moe, as the next
        "mlp_only_layers": ([], None),
    },
    re.compile(r".*\.rotary_emb\.inv_freq|lm_head\.weight"),
    "",
)
_PHI3 = Family(
    _phi3,
    _phi3_config,
    {"hidden_act": ("silu", "swish")},
    _LLAMA.dropped,
    "",
)
_GEMMA3 = Family(
    _gemma3,
    _gemma3_config,
    {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True, None),
        "attention_bias": (False, None),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "sliding_window_pattern": (6, None),
        "use_bidirectional_attention": (False, None),
    },
    _LLAMA.dropped,
    "",
)
_GPT2 = Family(
    _gpt2,
    _gpt2_config,
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
    },
    re.compile(r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"),
    "transformer.",
)
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", *_QWEN3), _LLAMA),
    "gemma3_text": _GEMMA3,
    "phi3": _PHI3,
    "gpt2": _GPT2,
}


def notes_of(model: Model) -> Sequence[str]:
    """Return notes on what MLC's model computes otherwise than the source's."""
    window = model.config.get("sliding_window")
    if model.family == "phi3" and window is not None:
        return (f"MLC's phi3 attends to all tokens, the source to the last {window}",)
    if model.family == "gemma3_text":
        return ("MLC's gemma3 has one base of rotary embeddings for all layers, the source two",)
    return ()


def family_of(model: Model) -> Family:
    """Return the record of a model's family; raise CheckpointError for an unknown family."""
    found = _FAMILIES.get(model.family)
    if found is None:
        expected = f"model_type {', '.join(_FAMILIES)} in config.json"
        model.refuse("cannot write MLC: it has no model for the family", expected, model.family)
    return found
