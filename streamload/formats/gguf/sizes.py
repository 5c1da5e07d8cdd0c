"""Compares a language model's tensors with the sizes that config.json states for them.

GGUF's metadata are these sizes, so this serves other formats, too: a reader builds the model by
config.json, and opens no other shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from streamload.codecs.weights import Packed
from streamload.formats.gguf.architectures import ARCHITECTURE, module_of, of_model
from streamload.formats.gguf.mixture import EMBEDDING, HEAD
from streamload.formats.gguf.names import is_computed, of_tensors, sized
from streamload.formats.writer import Model

_NORM = "output_norm.weight"
_OF_HEADS = ("ForCausalLM", "LMHeadModel")  # ends of the names of classes that have a head
#: Settings that state whether there are certain tensors.
_OF_TENSORS = (
    *("attention_bias", "mlp_bias", "use_qkv_bias", "qkv_bias", "bias", "qk_layernorm"),
    "use_parallel_residual",
)
#: Sizes for which these models have a default that follows from no other size.
_DEFAULTED = {
    "head_dim": ("gemma2", "gemma3_text", "qwen3"),
    "num_key_value_heads": (
        *("gemma2", "gemma3_text", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        "stablelm",
    ),
}


def check_config(model: Model, coded: Collection[str]) -> None:
    """Raise CheckpointError if a model by config.json would have other tensors.

    ``coded``: names of tensors that are parts of quantized weights. Models that are not written as
    GGUF are not checked.
    """
    config, architecture = model.config, of_model(model.config)
    if architecture is None:
        return
    shapes, layers = dict[str, tuple[tuple[int, ...], str]](), dict[int, set[str]]()
    stacks, names = dict[str, set[int]](), set[str]()
    start, _, _ = architecture.modules["blk.{}.attn_norm"].partition("{}")
    starts = (start, start.removeprefix(architecture.prefix))
    for name, target in model.by_name().items():
        if is_computed(name):
            continue
        own = architecture.to_gguf(name)
        if first := next((each for each in starts if name.startswith(each)), ""):
            number, _, inner = name.removeprefix(first).partition(".")
            if number.isdecimal():
                layers.setdefault(int(number), set()).add(inner if own is not None else "")
        if own is None or not own.endswith((".weight", ".bias")):
            continue
        names.add(own)
        turns = architecture.is_transposed(own)
        is_turned = turns and target.quant is not None  # as torch's Linear has it
        is_coded = target.info.name in coded and not isinstance(target.info, Packed)
        if is_coded or target.dtype.kind != "float" or is_turned:
            continue
        shape = target.shape[::-1] if turns else target.shape
        if (expert := architecture.number_in_stack(name)) is not None:
            stacks.setdefault(own, set()).add(expert)
            shape = (len(stacks[own]), *shape)
        if shape[:1] == (1,) and module_of(own) in architecture.as_rows:
            shape = shape[1:]
        shapes[own] = shape, target.info.name
    keys: dict[str, Any] = {ARCHITECTURE: architecture.name}
    lacking = (key for key, models in _DEFAULTED.items() if model.family in models)
    with suppress(ValueError):  # a size is missing, or no whole number
        given = sized(architecture, config)
        if all(config.get(key) is not None for key in lacking):
            for key, ours in architecture.settings.items():
                if type(given.get(ours)) is int:
                    keys[f"{architecture.name}.{key}"] = given[ours]
    check_shapes(model, keys, shapes)
    modules = {_module(name) for name in names}
    if not (model.is_whole and {_module(EMBEDDING), _module(_NORM)} <= modules):
        return  # a part of a model
    for key, value in of_tensors(model.family, config, names).items():
        if coded:
            break  # quantizers write biases of zeros
        if key in _OF_TENSORS and config.get(key) not in (None, value):
            model.refuse(f"{key} of config.json is not that of its tensors", value, config[key])
    classes = config.get("architectures")
    named = classes if isinstance(classes, list) else []
    if any(str(each).endswith(_OF_HEADS) for each in named) and _module(HEAD) not in modules:
        check_head(model, config.get("tie_word_embeddings"))
    _check_layers(model, architecture.settings["block_count"], layers)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _check_layers(model: Model, key: str, layers: Mapping[int, Collection[str]]) -> None:
    """Raise CheckpointError if there are more or fewer layers than ``key`` of config.json states.

    ``layers``: by number, the names in it, "" for those that the architecture lacks. Layers after
    the last that have such names predict more tokens, and are no layers of the model.
    """
    count = model.config.get(key)
    if type(count) is not int or not layers:
        return
    lacking = next((n for n in range(min(count, len(layers) + 1)) if n not in layers), None)
    more = [n for n, names in layers.items() if n >= count and "" not in names]
    if lacking is not None or more:
        found = len([n for n in layers if n < count]) + len(more)
        problem = "it has more layers than config.json states"
        if lacking is not None:
            problem = f"layer {lacking} has no tensor"
        model.refuse(problem, f"{key} {found}", count)


def check_head(model: Model, is_tied: object) -> None:
    """Raise CheckpointError for a model without a head if config.json does not tie it."""
    if is_tied is False:
        model.refuse(
            "the head is missing, and config.json does not tie it to the embedding "
            "(tie_word_embeddings is false): save the model with it",
            "lm_head.weight",
            "no such tensor",
        )


def check_shapes(
    model: Model, keys: Mapping[str, Any], found: Mapping[str, tuple[tuple[int, ...], str]]
) -> None:
    """Raise CheckpointError if a model by the metadata ``keys`` would have tensors of other shapes.

    ``found``: shape and name in the checkpoint by GGUF's name.
    """
    shapes = expected_shapes(keys)
    for own, (shape, name) in found.items():
        expected = shapes.get(module_of(own), shape)
        expected = expected if own.endswith(".weight") else expected[:-1] or expected
        if shape != expected:
            model.refuse(
                "its shape is not that of a model by the settings of config.json",
                list(expected),
                list(shape),
                name,
            )


def expected_shapes(found: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return by module of GGUF the shape that its weight has by a file's metadata ``found``.

    A bias has all axes but the last. Modules and axes that the metadata do not state are left out.
    """
    name = found["general.architecture"]
    keys = ("embedding_length", "feed_forward_length", "vocab_size", "context_length")
    width, inner, rows, context = (found.get(f"{name}.{key}") for key in keys)
    heads = found.get(f"{name}.attention.head_count")
    shared = found.get(f"{name}.attention.head_count_kv", heads)
    if not (width and heads and shared):
        return {}
    size = found.get(f"{name}.attention.key_length", width // heads)
    queries, keys_rows = heads * size, shared * size
    experts, own, together = (
        found.get(f"{name}.expert_{key}")
        for key in ("count", "feed_forward_length", "shared_feed_forward_length")
    )
    up = 2 * inner if name == "phi3" and inner else inner
    per_head = name == "stablelm"
    shapes: dict[str, tuple[int | None, ...]] = {
        "token_embd": (rows, width),
        "output": (rows, width),
        "position_embd": (context, width),
        "output_norm": (width,),
        "blk.{}.attn_q": (queries, width),
        "blk.{}.attn_k": (keys_rows, width),
        "blk.{}.attn_v": (keys_rows, width),
        "blk.{}.attn_qkv": (queries + 2 * keys_rows, width),
        "blk.{}.attn_output": (width, queries),
        "blk.{}.attn_q_norm": (heads, size) if per_head else (size,),
        "blk.{}.attn_k_norm": (shared, size) if per_head else (size,),
        "blk.{}.ffn_gate": (inner, width),
        "blk.{}.ffn_up": (up, width),
        "blk.{}.ffn_down": (width, inner),
        "blk.{}.ffn_gate_inp": (experts, width),
        "blk.{}.ffn_gate_inp_shexp": (width,),
    }
    for ours, count, length in (("exps", (experts,), own), ("shexp", (), together)):
        shapes |= {f"blk.{{}}.ffn_{of}_{ours}": (*count, length, width) for of in ("gate", "up")}
        shapes[f"blk.{{}}.ffn_down_{ours}"] = (*count, width, length)
    norms = ("attn_norm", "attn_norm_2", "ffn_norm", "post_attention_norm", "post_ffw_norm")
    shapes |= {f"blk.{{}}.{norm}": (width,) for norm in norms}
    return {
        module: tuple(n for n in shape if n is not None)
        for module, shape in shapes.items()
        if None not in shape
    }
