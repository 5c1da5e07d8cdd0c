"""Names, row orders and layouts of model families, as rules.

Sources: the conversion of Meta's Llama weights by transformers (``convert_llama_weights_to_hf.py``:
names, and ``permute`` of the query and key rows); Meta's ``llama/model.py`` (``tok_embeddings``,
``attention.wq``, ...); tinygrad's models (``examples/gpt2.py``, ``examples/mixtral.py``,
``examples/olmoe.py``, ``examples/whisper.py``, ``extra/models/llama.py``,
``tinygrad/llm/model.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

#: Change of a tensor besides its name: none, transpose the last two axes, stack with others to one
#: parameter (in the order of the rule's group ``n``), flatten a matrix of one row to a vector, or
#: drop the tensor.
Layout = Literal["", "transpose", "stack", "flatten", "drop"]


class Family(NamedTuple):
    """Rules by which a family's tensors become parameters; a tensor without a rule stays as it is.

    Attributes:
        rules: (pattern of the checkpoint's name, the parameter's name, a layout such as
            "transpose"); the first that matches decides.
        interleave: order that query and key rows get for rotary embeddings: interleaved (True),
            half-split (False), or as stored (None).
        rotated: pattern of the names of those query and key weights; one group is q or k.
    """

    rules: tuple[tuple[str, str, Layout], ...]
    interleave: bool | None = None
    rotated: str = ""

    def rule(self, name: str) -> tuple[re.Match[str], str, Layout] | None:
        """Return the match, new name and `Layout` of the first rule for a tensor; None if none."""
        for pattern, new, layout in self.rules:
            if match := re.fullmatch(pattern, name):  # re keeps the compiled patterns
                return match, new, layout
        return None

    def matches(self, name: str) -> bool:
        """Return whether the family changes a tensor of this name."""
        is_rotated = self.interleave is not None and re.fullmatch(self.rotated, name)
        return self.rule(name) is not None or bool(is_rotated)

    def name(self, name: str) -> str:
        """Return the name of the parameter that a tensor becomes, or becomes a part of."""
        found = self.rule(name)
        return found[0].expand(found[1]) if found else name


def _rules(names: Mapping[str, str], layout: Layout = "") -> tuple[tuple[str, str, Layout], ...]:
    return tuple((pattern, new, layout) for pattern, new in names.items())


_LAYER = r"model\.layers\.(\d+)\."
#: Llama's parts as Hugging Face names them, and as Meta does.
_LLAMA = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers.#.input_layernorm": "layers.#.attention_norm",
    "model.layers.#.post_attention_layernorm": "layers.#.ffn_norm",
    **{f"model.layers.#.self_attn.{x}_proj": f"layers.#.attention.w{x}" for x in "qkvo"},
    **{f"model.layers.#.self_attn.{x}_norm": f"layers.#.attention.{x}_norm" for x in "qk"},
    "model.layers.#.mlp.gate_proj": "layers.#.feed_forward.w1",
    "model.layers.#.mlp.down_proj": "layers.#.feed_forward.w2",
    "model.layers.#.mlp.up_proj": "layers.#.feed_forward.w3",
}


def _renaming(old: str, new: str) -> tuple[str, str, Layout]:
    """Return the rule that renames a part of a model; "#" is the number of a layer."""
    pattern = re.escape(old).replace(r"\#", r"(?P<layer>\d+)") + r"\.(?P<rest>.+)"
    return pattern, new.replace("#", r"\g<layer>") + r".\g<rest>", ""


_HF_TO_META = tuple(_renaming(hf, meta) for hf, meta in _LLAMA.items())
_META_TO_HF = tuple(_renaming(meta, hf) for hf, meta in _LLAMA.items())
# Conv1D keeps the inputs along its first axis, Linear along its last.
_CONV1D = r"(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)"
_GPT2 = (
    *_rules({r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias": ""}, "drop"),
    *_rules({rf"(?:transformer\.)?(h\.\d+\.{_CONV1D}\.weight)": r"\1"}, "transpose"),
    *_rules({r"transformer\.(.+)": r"\1"}),
)
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_LAYERS = re.compile(r"(^|\.)(c_attn|q_attn|c_proj|c_fc)\.weight$")
_MIXTRAL = (
    *_HF_TO_META,
    *_rules({rf"{_LAYER}block_sparse_moe\.(.+)": r"layers.\1.feed_forward.\2"}),
)
_OLMOE = (
    *_rules(
        {
            rf"{_LAYER}mlp\.experts\.(?P<n>\d+)\.(gate|up|down)_proj\.weight": (
                r"layers.\1.feed_forward.\3_proj"
            )
        },
        "stack",
    ),
    *_rules({rf"{_LAYER}mlp\.gate\.(.+)": r"layers.\1.feed_forward.gate.\2"}),
    *_HF_TO_META,
)
# The names of GGUF, which tinygrad.llm's Transformer has: its rows are half-split, as they are in
# the checkpoint.
_QWEN = (
    *_rules(
        {
            rf"{_LAYER}mlp\.experts\.(?P<n>\d+)\.(gate|up|down)_proj\.weight": (
                r"blk.\1.ffn_\3_exps.weight"
            )
        },
        "stack",
    ),
    *_rules(
        {rf"{_LAYER}mlp\.shared_expert_gate\.weight": r"blk.\1.ffn_gate_inp_shexp.weight"},
        "flatten",
    ),
    *_rules(
        {
            r"model\.embed_tokens\.(.+)": r"token_embd.\1",
            r"model\.norm\.(.+)": r"output_norm.\1",
            r"lm_head\.(.+)": r"output.\1",
            rf"{_LAYER}input_layernorm\.(.+)": r"blk.\1.attn_norm.\2",
            rf"{_LAYER}post_attention_layernorm\.(.+)": r"blk.\1.ffn_norm.\2",
            rf"{_LAYER}self_attn\.([qkv])_proj\.(.+)": r"blk.\1.attn_\2.\3",
            rf"{_LAYER}self_attn\.o_proj\.(.+)": r"blk.\1.attn_output.\2",
            rf"{_LAYER}self_attn\.([qk])_norm\.(.+)": r"blk.\1.attn_\2_norm.\3",
            rf"{_LAYER}mlp\.gate\.(.+)": r"blk.\1.ffn_gate_inp.\2",
            rf"{_LAYER}mlp\.(gate|up|down)_proj\.(.+)": r"blk.\1.ffn_\2.\3",
            rf"{_LAYER}mlp\.shared_expert\.(gate|up|down)_proj\.(.+)": r"blk.\1.ffn_\2_shexp.\3",
        }
    ),
)
# OpenAI's names, which examples/whisper.py has.
_WHISPER_LAYER = r"(?:model\.)?(\w+)\.layers\.(\d+)\."
_WHISPER = (
    *_rules({r"proj_out\.weight": ""}, "drop"),  # it is the embedding of the decoder
    *_rules(
        {
            rf"{_WHISPER_LAYER}{old}\.(.+)": rf"\1.blocks.\2.{new}.\3"
            for old, new in {
                "self_attn_layer_norm": "attn_ln",
                "encoder_attn_layer_norm": "cross_attn_ln",
                "final_layer_norm": "mlp_ln",
                "fc1": "mlp.0",
                "fc2": "mlp.2",
                **{
                    rf"{attention}\.{part}_proj": f"{its}.{name}"
                    for attention, its in (("self_attn", "attn"), ("encoder_attn", "cross_attn"))
                    for part, name in (("q", "query"), ("k", "key"), ("v", "value"))
                },
                r"self_attn\.out_proj": "attn.out",
                r"encoder_attn\.out_proj": "cross_attn.out",
            }.items()
        }
    ),
    *_rules(
        {
            r"(?:model\.)?(encoder|decoder)\.embed_positions\.weight": r"\1.positional_embedding",
            r"(?:model\.)?decoder\.embed_tokens\.(.+)": r"decoder.token_embedding.\1",
            r"(?:model\.)?decoder\.layer_norm\.(.+)": r"decoder.ln.\1",
            r"(?:model\.)?encoder\.layer_norm\.(.+)": r"encoder.ln_post.\1",
            r"model\.(encoder\..+)": r"\1",
        }
    ),
)

_HF_ROTATED = r".*\.self_attn\.([qk])_(?:proj|norm)\.\w+"
_META_ROTATED = r".*\.attention\.(?:w([qk])|([qk])_norm)\.\w+"

#: By the name that ``mapping=`` takes.
FAMILIES = {
    "hf-llama": Family(_HF_TO_META, True, _HF_ROTATED),
    "meta-llama": Family(_META_TO_HF, False, _META_ROTATED),
    "hf-gpt2": Family(_GPT2),
    "hf-mixtral": Family(_MIXTRAL, True, _HF_ROTATED),
    "hf-olmoe": Family(_OLMOE, True, _HF_ROTATED),
    "hf-qwen": Family(_QWEN),
    "hf-whisper": Family(_WHISPER),
}


def is_conv1d(config: Mapping[str, Any], name: str) -> bool:
    """Return whether transformers' model of ``config`` has a Conv1D's weight under this name."""
    is_such = config.get("model_type") in _CONV1D_MODELS
    return is_such and _CONV1D_LAYERS.search(name) is not None


# --- tensor parallelism ---------------------------------------------------------------------------


class Side(NamedTuple):
    """How tensor parallelism cuts a weight.

    Attributes:
        of: "out" cuts the outputs of a linear layer (Megatron's column-parallel layers) or the
            vocabulary, "in" its inputs (row-parallel layers).
        parts: "halves" and "qkv" (queries, keys, values) are matrices fused along that axis, each
            of which is cut.
        heads: the number in config.json of the heads that the axis consists of, or "".
    """

    of: Literal["out", "in"]
    parts: Literal["", "halves", "qkv"] = ""
    heads: Literal["", "num_attention_heads", "num_key_value_heads"] = ""


_OUT, _IN = Side("out"), Side("in")
#: transformers' styles of tensor parallelism (transformers/distributed/tensor_parallel.py) that cut
#: weights; weights of all other styles stay whole.
_STYLES = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "embedding_rowwise"), _OUT),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "embedding_colwise"), _IN),
    "packed_colwise": Side("out", "halves"),
    "packed_rowwise": Side("in", "halves"),
}
#: Ends of a model, and experts that are stored one by one.
_EVERYWHERE = (
    (r"embed_tokens|tok_embeddings|word_embeddings|wte|embed_in|shared|lm_head|embed_out", _OUT),
    (r"^output", _OUT),
    (r"experts\.\*\.(?:gate_proj|up_proj|w1|w3)", _OUT),
    (r"experts\.\*\.(?:down_proj|w2)", _IN),
)
_ATTENTION = r"(?:self_attn|attention|attn)"
#: Layers of Llama and similar models, of Meta's, GPT-2, GPT-NeoX, OPT and Phi.
_LAYERS = (
    (rf"{_ATTENTION}\.(?:[qkv]_proj|q_b_proj|kv_b_proj|w[qkv]|qkv_proj|c_attn)", _OUT),
    (rf"{_ATTENTION}\.(?:o_proj|out_proj|dense|wo|c_proj)", _IN),
    (r"gpt_neox\.layers\.\*\.attention\.query_key_value", _OUT),
    (r"(?:gate_proj|up_proj|gate_up_proj|feed_forward\.w[13]|fc1|c_fc|dense_h_to_4h)", _OUT),
    (r"(?:down_proj|feed_forward\.w2|fc2|mlp\.c_proj|dense_4h_to_h)", _IN),
)
_FUSED: Mapping[str, Literal["halves", "qkv"]] = {
    **dict.fromkeys(("qkv_proj", "c_attn"), "qkv"),
    "gate_up_proj": "halves",
}
_OF_HEADS = re.compile(
    rf"{_ATTENTION}\.(?:(?P<kv>k_proj|v_proj|wk|wv|query_key_value)|q_proj|q_b_proj|kv_b_proj|wq"
    r"|o_proj|out_proj|dense|wo|c_proj|sinks)$"
)
_NOT_TEXT = re.compile(r"(?:^|[._])(?:vision|visual|image|audio|speech)")
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)|^[0-9]+(?=\.)")


def general(name: str) -> str:
    """Return a name with "*" for the numbers of layers and experts."""
    return _NUMBER.sub("*", name)


def side_of(name: str, styles: Mapping[str, str]) -> Side | None:
    """Return how tensor parallelism cuts a weight; None if it stays whole.

    ``name`` is as `general` returns it; ``styles``: transformers' plan of the model, a style by
    module; if empty, rules for families.
    """
    module = name.rpartition(".")[0]
    if _NOT_TEXT.search(name) is not None:
        return None
    path, side = module, _matched(_EVERYWHERE, module)
    if side is None and styles:
        path, style = _styled(name, styles) or _styled(module, styles) or ("", "")
        side = _STYLES.get(style)
    elif side is None:
        side = _matched(_LAYERS, module)
    if side is None:
        return None
    parts = side.parts or _FUSED.get(path.rpartition(".")[2], "")
    heads = _OF_HEADS.search(path)
    if parts == "qkv" or heads is None:
        return side._replace(parts=parts)
    return side._replace(heads="num_key_value_heads" if heads["kv"] else "num_attention_heads")


def is_styled(name: str, styles: Mapping[str, str]) -> bool:
    """Return whether a style of transformers' plan is for a tensor; ``name``: as in `side_of`."""
    return bool(_styled(name, styles) or _styled(name.rpartition(".")[0], styles))


def _matched(rules: Iterable[tuple[str, Side]], module: str) -> Side | None:
    return next((s for rule, s in rules if re.search(rf"(?:^|\.)(?:{rule})$", module)), None)


def _styled(path: str, styles: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a path, and the style in a plan whose names lack the first components of the path."""
    ends = (path.split(".", cut)[-1] for cut in range(path.count(".") + 1))
    return next(((path, styles[end]) for end in ends if end in styles), None)
