"""Map a checkpoint's tensors to parameters: by a family's rules, or by the user's mapping.

Sources of the rules: the conversion of Meta's Llama weights by transformers
(``convert_llama_weights_to_hf.py``: names, and ``permute`` of the query and key rows); Meta's
``llama/model.py`` (``tok_embeddings``, ``attention.wq``, ...); tinygrad's models
(``examples/gpt2.py``, ``examples/mixtral.py``, ``examples/olmoe.py``, ``examples/whisper.py``,
``extra/models/llama.py``, ``tinygrad/llm/model.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.weights import Packed
from streamload.core.model_config import head_size, stated
from streamload.core.patterns import check_names, did_you_mean
from streamload.core.tensors import (
    END,
    RowRange,
    RowTranspose,
    TensorInfo,
    all_rows,
    records,
    whole,
)
from streamload.errors import CheckpointError

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


Rename = Mapping[str, str] | Callable[[str], str | None]

#: Names that ``mapping=`` takes.
MAPPINGS = tuple(FAMILIES)

# In place of a `RowTranspose` of the last two axes, whose lengths are not known yet.
_LAST_AXES = RowTranspose(0, 0, 0)


@dataclass(frozen=True, slots=True, init=False)
class Source:
    """The tensors that fill one parameter: a value of ``mapping={parameter: Source(...)}``.

    Examples:
        ``Source("h.0.attn.c_attn.weight", transpose=True)``: a Conv1D of GPT-2 into a Linear.

        ``Source(["experts.0.w1", "experts.1.w1"], shape=(2, 14336, 4096))``: experts, stacked.

        ``Source([RowRange("qkv", 0, 4096)])``: the first rows of a fused tensor.

    Attributes:
        rows: row ranges (along the first dimension), one after the other.
        transpose: a permutation of all those rows.
        shape: the parameter's shape, if it differs from the concatenated rows' (stacked experts,
            for one): as many elements, in the rows' order.
    """

    rows: tuple[RowRange, ...]
    transpose: RowTranspose | None
    shape: tuple[int, ...] | None

    def __init__(
        self,
        rows: str | RowRange | Iterable[str | RowRange],
        transpose: RowTranspose | bool | None = None,
        shape: Iterable[int] | None = None,
    ) -> None:
        """Name the rows that fill a parameter.

        Args:
            rows: tensors of the checkpoint, or row ranges of them, one after the other.
            transpose: True exchanges the last two axes of the concatenated rows. A `RowTranspose`
                is a permutation of the rows.
            shape: the parameter's shape; None if it is that of the rows, or of their transpose.
        """
        parts = (rows,) if isinstance(rows, (str, RowRange)) else tuple(rows)
        found = tuple(RowRange(part) if isinstance(part, str) else part for part in parts)
        if isinstance(transpose, bool):
            transpose = _LAST_AXES if transpose else None
        object.__setattr__(self, "rows", found)
        object.__setattr__(self, "transpose", transpose)
        object.__setattr__(self, "shape", None if shape is None else tuple(shape))


Sources: TypeAlias = str | RowRange | Sequence[str | RowRange] | Source
Layouts: TypeAlias = Mapping[str, Sources]
MappingArgument: TypeAlias = str | Layouts | tuple[str, Layouts]


class Found(NamedTuple):
    """The result of mapping a checkpoint: the rows that fill each parameter.

    Attributes:
        fill: the sources by parameter name.
        skipped: names of the checkpoint that ``rename`` skipped.
        tied: by parameter name that is not stored, the parameter to which config.json ties it.
    """

    fill: Mapping[str, Source]
    skipped: Sequence[str] = ()
    tied: Mapping[str, str] = MappingProxyType({})


class Unchanged(Mapping[str, Source]):
    """A mapping of every tensor of a checkpoint, unchanged and under its own name.

    The first access makes all sources at once: 0.5 microseconds each, one by one 1.4. A load
    without a model needs none.
    """

    __slots__ = ("_sources", "checkpoint")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._sources: dict[str, Source] | None = None

    def __getitem__(self, name: str) -> Source:
        if self._sources is None:
            self._sources = dict(_as_they_are(tuple(self.checkpoint.tensors.values())))
        return self._sources[name]

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.tensors)


def parameters_of(
    mapping: MappingArgument | None, rename: Rename | None, tensors: Iterable[str]
) -> dict[str, list[str]]:
    """Return the parameters that each tensor fills, like `sources`, but from names alone."""
    chosen, layouts = _read(mapping)
    family = FAMILIES.get(chosen, Family(()))
    out: dict[str, list[str]] = {}
    for name, given in layouts.items():
        for part in _parts(given):
            tensor = part.tensor if isinstance(part, RowRange) else str(part)
            new = renamed(name, rename)
            out.setdefault(tensor, []).extend([] if new is None else [new])
    for tensor in tensors:
        rule = family.rule(tensor)
        if tensor in out or (rule is not None and rule[2] == "drop"):
            continue
        new = renamed(family.name(tensor), rename)
        out[tensor] = [] if new is None else [new]
    return out


def named_by_user(mapping: MappingArgument | None, rename: Rename | None) -> set[str | None]:
    """Return the names of the parameters for which a ``mapping=`` gives the sources."""
    return {renamed(name, rename) for name in _read(mapping)[1]}


def _parts(given: object) -> Sequence[object]:
    """Return the tensors and row ranges that a user listed for a parameter."""
    rows = given.rows if isinstance(given, Source) else given
    return rows if isinstance(rows, (list, tuple)) else [rows]


def sources(
    checkpoint: Checkpoint,
    mapping: MappingArgument | None,
    rename: Rename | None,
    *,
    all_match: bool = False,
) -> Found:
    """Return the rows that fill each parameter, by the model's names.

    ``mapping`` is applied first and ``rename`` to its names. With ``all_match`` a family that
    matches no tensor, and a key of ``rename`` without a tensor, are errors.
    """
    turned = _turned(checkpoint)
    if mapping is None and rename is None and not turned:
        return Found(Unchanged(checkpoint), [], dict(tied_names(checkpoint)))
    chosen, layouts = _read(mapping)
    family = FAMILIES.get(chosen, Family(()))
    named = _mapped(checkpoint, family, layouts, turned)
    if all_match and chosen and not any(map(family.matches, checkpoint.tensors)):
        raise ValueError(f"mapping {chosen!r} matches no tensor of {checkpoint.path}")
    heads = tied_names(checkpoint)
    if all_match and isinstance(rename, Mapping):
        there = dict.fromkeys([name for name, _ in named] + [family.name(n) for n, _ in heads])
        check_names("rename", rename, there)
    by_tensor = {source.rows[0].tensor: name for name, source in named}
    tied: dict[str, str] = {}
    out: dict[str, Source] = {}
    skipped: list[str] = []
    for name, source in named:
        new = renamed(name, rename)
        first = source.rows[0].tensor
        if new is None:
            skipped.append(first)
            continue
        if new in out:
            raise CheckpointError(
                checkpoint.path,
                f"{out[new].rows[0].tensor!r} and this tensor would both become parameter {new!r}",
                tensor=first,
            )
        out[new] = source
    for head, embedding in heads:
        new_head = renamed(family.name(head), rename)
        new_embedding = renamed(by_tensor.get(embedding, embedding), rename)
        if new_head is not None and new_embedding in out and new_head not in out:
            tied[new_head] = new_embedding
    return Found(out, skipped, tied)


def _turned(checkpoint: Checkpoint) -> Mapping[str, Source]:
    """Return by tensor the sources that permute weights from the file's to the models' order."""
    packed = (info for info in checkpoint.tensors.values() if isinstance(info, Packed))
    turned = {
        info.name: _with_lengths(checkpoint, info.name, Source(whole(info), transpose=True))
        for info in packed
        if info.group.is_transposed
    }
    for name, (transpose, shape) in checkpoint.turns.items():
        info = checkpoint.tensors.get(name)
        if info is not None and not (shape is not None and _is_blocks(checkpoint, info)):
            turned[name] = Source(whole(info), transpose, shape)
    return turned


def _is_blocks(checkpoint: Checkpoint, info: TensorInfo) -> bool:
    """Return whether a tensor is stored as bytes of blocks, which permute only by whole rows.

    A module that holds such bytes of a transposed matrix has them in the file's order.
    """
    return info.name in checkpoint.stored and not isinstance(info, Packed)


#: Names of the output layer that may share the weight of the embedding.
HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|embeddings|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight"
)


def tied_names(
    checkpoint: Checkpoint, kinds: tuple[str, ...] = ("ForCausalLM", "LMHeadModel")
) -> list[tuple[str, str]]:
    """Return [(head, embedding)] for a language model that stores its embedding alone; else [].

    ``tie_word_embeddings`` is true unless config.json has another value: the default of
    transformers' configurations. ``kinds``: ends of names of language models' classes.
    """
    if not is_language_model(checkpoint, kinds):
        return []
    if checkpoint.config.get("tie_word_embeddings", True) is not True:
        return []
    if any(head in checkpoint.tensors for head in HEADS):
        return []
    embedding = embedding_of(checkpoint)
    return [] if embedding is None else [("lm_head.weight", embedding)]


def is_language_model(
    checkpoint: Checkpoint, kinds: tuple[str, ...] = ("ForCausalLM", "LMHeadModel")
) -> bool:
    """Return whether config.json names a language model's class, by the ends of names."""
    architectures = checkpoint.config.get("architectures")
    return isinstance(architectures, list) and any(
        str(name).endswith(kinds) for name in architectures
    )


def embedding_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of a language model's embedding; None if there is none, or are several."""
    found = [name for name in checkpoint.tensors if _EMBEDDINGS.fullmatch(name)]
    return found[0] if len(found) == 1 else None


def renamed(name: str, rename: Rename | None) -> str | None:
    """Return a name after ``rename``; None if its tensor is skipped."""
    if rename is None:
        return name
    new: object
    if isinstance(rename, Mapping):
        new = rename.get(name, name)
    elif callable(rename):
        new = rename(name)
    else:
        raise ValueError(f"rename is a dict or a callable, not {rename!r}")
    if new is not None and not isinstance(new, str):
        raise ValueError(f"rename made {new!r} of {name!r}: expected a name, or None to skip it")
    return new


def _read(mapping: MappingArgument | None) -> tuple[str, Layouts]:
    """Return the family in a ``mapping=`` ("" for none) and the sources that the user gave."""
    given: tuple[object, ...] = (mapping,)
    if isinstance(mapping, (tuple, list)) and len(mapping) == 2:
        given = tuple(mapping)
    family, layouts = "", {}
    for part in given:
        if isinstance(part, str):
            if part not in FAMILIES:
                raise ValueError(f"no mapping {part!r}; there are {', '.join(FAMILIES)}")
            family = part
        elif isinstance(part, Mapping):
            layouts = dict(part)
        elif part is not None:
            raise ValueError(
                f"mapping is {', '.join(FAMILIES)} or a dict, or a tuple of both, not {mapping!r}"
            )
    return family, layouts


def _mapped(
    checkpoint: Checkpoint, family: Family, layouts: Layouts, turned: Mapping[str, Source]
) -> list[tuple[str, Source]]:
    """Return (parameter, source): the user's ``layouts``, then the family's for other tensors."""
    explicit = [(name, _source(checkpoint, name, given)) for name, given in layouts.items()]
    used = {r.tensor for _, source in explicit for r in source.rows}
    rest = _of_family(checkpoint, family, [name for name in checkpoint.tensors if name not in used])
    if family.rules:  # the user's sources replace the family's
        rest = [(name, source) for name, source in rest if name not in layouts]
    if not turned:
        return explicit + rest
    # of blocks that models have transposed, users name the tensor as stored
    named = {name: source for name, source in turned.items() if name in checkpoint.turns}
    return [
        (name, _from_file(checkpoint, source, orders))
        for listed, orders in ((explicit, named), (rest, turned))
        for name, source in listed
    ]


def _from_file(checkpoint: Checkpoint, source: Source, turned: Mapping[str, Source]) -> Source:
    """Return a source with the permutation in ``turned`` from the file's to the models' order.

    Raises CheckpointError if the source takes some of the rows, or permutes them in another way.
    """
    stored = next((turned[r.tensor] for r in source.rows if r.tensor in turned), None)
    if stored is None:
        return source
    t, then = stored.transpose, source.transpose
    if t is None and source.rows != stored.rows:
        return source
    if source.rows == stored.rows and then is None:
        return replace(source, transpose=t, shape=source.shape or stored.shape)
    if source.rows == stored.rows and (t is None or then == t.inverse):
        return replace(source, transpose=then if t is None else None)
    raise CheckpointError(
        checkpoint.path,
        "the file has its rows in another order than models: they would be reordered again",
        "all of it, in the order that models have",
        f"{len(source.rows)} row ranges" if then is None else str(then),
        tensor=stored.rows[0].tensor,
    )


def _source(checkpoint: Checkpoint, parameter: str, given: object) -> Source:
    """Return a user's entry as a complete `Source`; ValueError if it names no stored tensor."""
    listed = _parts(given)
    for part in listed:
        if not isinstance(part, (str, RowRange)):
            raise ValueError(
                f"mapping of {parameter!r}: expected tensor names or RowRanges, not {part!r}"
            )
        name = part if isinstance(part, str) else part.tensor
        if name not in checkpoint.tensors:
            raise ValueError(
                f"mapping of {parameter!r}: no tensor {name!r} in {checkpoint.path}"
                + did_you_mean(name, checkpoint.tensors)
            )
    if not listed:
        raise ValueError(f"mapping of {parameter!r}: no tensor is given")
    source = given if isinstance(given, Source) else Source(listed)  # type: ignore[arg-type]
    rows = tuple(
        replace(r, stop=whole(checkpoint.tensors[r.tensor]).stop) if r.stop == END else r
        for r in source.rows
    )
    if len(rows) == 1 and source.shape is not None:
        info = checkpoint.tensors[rows[0].tensor]
        if rows[0] == whole(info) and _is_blocks(checkpoint, info):
            source = replace(source, shape=None)  # it is of floats, and a module takes the bytes
    return _with_lengths(checkpoint, parameter, replace(source, rows=rows))


def _with_lengths(checkpoint: Checkpoint, parameter: str, source: Source) -> Source:
    """Fill in the axes' lengths of a source that transposes the last two axes.

    Return any other source unchanged. ``parameter`` is for the error.
    """
    if source.transpose != _LAST_AXES:
        return source
    shape = source.shape
    if shape is None:
        first = model_shape(checkpoint, source.rows[0].tensor)
        is_all = source.rows == (whole(checkpoint.tensors[source.rows[0].tensor]),)
        shape = first if is_all else (sum(r.stop - r.start for r in source.rows), *first[1:])
        if len(first) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
    if len(shape) < 2:
        raise ValueError(
            f"mapping of {parameter!r}: a transpose needs two axes, and its shape is {list(shape)}"
        )
    *before, inner, outer = shape
    transpose = RowTranspose(math.prod(before), outer, inner) if inner > 1 < outer else None
    return replace(source, transpose=transpose, shape=tuple(shape))


def model_shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    """Return a tensor's shape in models; the file may have it transposed or reshaped."""
    turn, info = checkpoint.turns.get(name), checkpoint.tensors[name]
    if turn is None or turn.shape is None or _is_blocks(checkpoint, info):
        return info.shape
    return turn.shape


def _as_they_are(infos: Sequence[TensorInfo]) -> Iterator[tuple[str, Source]]:
    """Yield (name, source) of whole tensors under their own names."""
    made = records(Source, list(zip(all_rows(infos))), repeat(None), repeat(None))
    return zip((info.name for info in infos), made, strict=True)


def _of_family(
    checkpoint: Checkpoint, family: Family, names: Sequence[str]
) -> list[tuple[str, Source]]:
    """Return (parameter, source) for the named tensors by a family's rules."""
    if not family.rules:
        return list(_as_they_are([checkpoint.tensors[name] for name in names]))
    rotated = re.compile(family.rotated)
    out = []
    stacks: dict[str, dict[int, str]] = {}
    for name in names:
        row = whole(checkpoint.tensors[name])
        rule = family.rule(name)
        match, template, layout = rule if rule is not None else (None, name, None)
        new = match.expand(template) if match is not None else name
        if layout == "drop":
            continue
        if layout == "stack" and match is not None:
            stacks.setdefault(new, {})[int(match["n"])] = name
            continue
        source = Source(row)
        rotation = rotated.fullmatch(name) if family.interleave is not None else None
        if layout == "transpose":
            source = _with_lengths(checkpoint, new, Source(row, transpose=True))
        elif layout == "flatten":
            source = Source(row, shape=(math.prod(checkpoint.tensors[name].shape),))
        elif rotation and _in_rows(checkpoint, name, row.stop):
            kind = next(group for group in rotation.groups() if group)
            turned = _rotation(checkpoint, name, kind, row.stop, family.interleave is True)
            source = Source(row, turned)
        out.append((new, source))
    return out + [(new, _stack(checkpoint, new, parts)) for new, parts in stacks.items()]


def _stack(checkpoint: Checkpoint, parameter: str, parts: Mapping[int, str]) -> Source:
    """Return the source that stacks numbered tensors; CheckpointError if a number is missing."""
    missing = next((n for n in range(len(parts)) if n not in parts), None)
    if missing is not None:
        last = parts[max(parts)]
        raise CheckpointError(
            checkpoint.path,
            f"it cannot be stacked to {parameter!r}: number {missing} is missing",
            f"tensors numbered 0 to {max(parts)}",
            f"{len(parts)} of them",
            tensor=last,
        )
    infos = [checkpoint.tensors[parts[n]] for n in range(len(parts))]
    return Source(map(whole, infos), shape=(len(infos), *infos[0].shape))


def _in_rows(checkpoint: Checkpoint, name: str, rows: int) -> bool:
    """Return whether a tensor of a query or key layer has a row for each output, to permute.

    False: one value for all outputs. Raises CheckpointError if its ``rows`` rows are neither.
    """
    module, _, leaf = name.rpartition(".")
    info = checkpoint.tensors[name]
    packed = info.dtype.kind == "uint" and not _is_blocks(checkpoint, info)
    if leaf in ("weight", "bias") and not packed:
        return True
    if rows == 1:
        return False
    weight = checkpoint.tensors.get(f"{module}.weight")
    expected = weight.shape[0] if weight is not None and weight.shape else None
    if packed or rows != expected:
        raise CheckpointError(
            checkpoint.path,
            "its rows cannot be reordered with those of the layer: it is packed or in blocks",
            "one row for each output of the layer",
            f"{rows} rows of {checkpoint.tensors[name].dtype}",
            tensor=name,
        )
    return True


def _rotation(
    checkpoint: Checkpoint, name: str, kind: str, rows: int, interleave: bool
) -> RowTranspose:
    """Return the permutation, inside each head, of ``rows`` rows for rotary embeddings.

    ``kind``: "q" or "k". ``interleave``: to interleaved order; False: back to half-split.
    """
    config: Mapping[str, Any] = checkpoint.config
    heads = stated(config, "num_attention_heads")
    if kind == "k":  # null: as many as there are queries
        shared = stated(config, "num_key_value_heads")
        heads = heads if shared is None else shared
    if "_norm" in name and rows == head_size(config):
        heads = 1  # one vector of head size, shared by all heads
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            checkpoint.path,
            "its rows cannot be split into heads",
            "num_attention_heads (and num_key_value_heads) in config.json that divide "
            f"its {rows} rows into heads of even size",
            heads,
            tensor=name,
        )
    half = rows // heads // 2
    return RowTranspose(heads, 2, half) if interleave else RowTranspose(heads, half, 2)
