"""Names and row orders of model families: how a checkpoint's tensors become parameters.

Sources: the conversion of Meta's Llama weights by transformers
(``convert_llama_weights_to_hf.py``: names, and ``permute`` of the query and key rows), and
Meta's ``llama/model.py`` (``tok_embeddings``, ``attention.wq``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.header import records
from streamload.errors import CheckpointError
from streamload.planning.plan import RowRange, RowTranspose, all_rows, whole
from streamload.selection import did_you_mean

Rename = Mapping[str, str] | Callable[[str], str | None]

_HF_TO_META = (
    (r"model\.embed_tokens\.(.+)", r"tok_embeddings.\1"),
    (r"model\.norm\.(.+)", r"norm.\1"),
    (r"lm_head\.(.+)", r"output.\1"),
    (r"model\.layers\.(\d+)\.input_layernorm\.(.+)", r"layers.\1.attention_norm.\2"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(.+)", r"layers.\1.ffn_norm.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.([qkvo])_proj\.(.+)", r"layers.\1.attention.w\2.\3"),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.(.+)", r"layers.\1.attention.\2_norm.\3"),
    (r"model\.layers\.(\d+)\.mlp\.gate_proj\.(.+)", r"layers.\1.feed_forward.w1.\2"),
    (r"model\.layers\.(\d+)\.mlp\.down_proj\.(.+)", r"layers.\1.feed_forward.w2.\2"),
    (r"model\.layers\.(\d+)\.mlp\.up_proj\.(.+)", r"layers.\1.feed_forward.w3.\2"),
)
_META_TO_HF = (
    (r"tok_embeddings\.(.+)", r"model.embed_tokens.\1"),
    (r"norm\.(.+)", r"model.norm.\1"),
    (r"output\.(.+)", r"lm_head.\1"),
    (r"layers\.(\d+)\.attention_norm\.(.+)", r"model.layers.\1.input_layernorm.\2"),
    (r"layers\.(\d+)\.ffn_norm\.(.+)", r"model.layers.\1.post_attention_layernorm.\2"),
    (r"layers\.(\d+)\.attention\.w([qkvo])\.(.+)", r"model.layers.\1.self_attn.\2_proj.\3"),
    (r"layers\.(\d+)\.attention\.([qk])_norm\.(.+)", r"model.layers.\1.self_attn.\2_norm.\3"),
    (r"layers\.(\d+)\.feed_forward\.w1\.(.+)", r"model.layers.\1.mlp.gate_proj.\2"),
    (r"layers\.(\d+)\.feed_forward\.w2\.(.+)", r"model.layers.\1.mlp.down_proj.\2"),
    (r"layers\.(\d+)\.feed_forward\.w3\.(.+)", r"model.layers.\1.mlp.up_proj.\2"),
)


@dataclass(frozen=True, slots=True)
class _Family:
    """Renaming rules, and whether query and key rows become interleaved or half-split."""

    rules: tuple[tuple[str, str], ...]
    interleave: bool
    rotated: str  # pattern of the checkpoint's names whose rows are rotated; group 1 is q or k


_FAMILIES = {
    "hf-llama": _Family(_HF_TO_META, True, r".*\.self_attn\.([qk])_(?:proj|norm)\.\w+"),
    "meta-llama": _Family(_META_TO_HF, False, r".*\.attention\.(?:w([qk])|([qk])_norm)\.\w+"),
}

#: Names that ``mapping=`` takes.
MAPPINGS = tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class Source:
    """What fills one parameter.

    Attributes:
        rows: row ranges (along the first dimension), one after the other.
        transpose: a permutation of all those rows.
        shape: the parameter's shape, where it is not that of the rows put together: experts that
            are stacked, for one. As many elements, in the same order.
    """

    rows: tuple[RowRange, ...]
    transpose: RowTranspose | None = None
    shape: tuple[int, ...] | None = None


Sources: TypeAlias = str | RowRange | Sequence[str | RowRange] | Source
MappingArgument: TypeAlias = str | Mapping[str, Sources]


class Unchanged(Mapping[str, Source]):
    """Every tensor of a checkpoint, all of it, under its own name.

    Sources are made when one is asked for, all at once: 0.5 microseconds each, one by one 1.4. A
    load without a model asks for none.
    """

    __slots__ = ("_found", "checkpoint")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._found: dict[str, Source] | None = None

    def __getitem__(self, name: str) -> Source:
        if self._found is None:
            names = list(self.checkpoint.tensors)
            rows = list(zip(all_rows(tuple(self.checkpoint.tensors.values()))))
            made = records(Source, rows, repeat(None), repeat(None))
            self._found = dict(zip(names, made, strict=True))
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.checkpoint.tensors)

    def __len__(self) -> int:
        return len(self.checkpoint.tensors)


def sources(
    checkpoint: Checkpoint, mapping: MappingArgument | None, rename: Rename | None
) -> tuple[Mapping[str, Source], list[str], dict[str, str]]:
    """Say what fills each parameter, by the model's names.

    Args:
        checkpoint: the headers.
        mapping: a family's name, or for some parameters the tensors (or row ranges of tensors)
            whose rows they are, concatenated, or a `Source`; all other tensors keep their names.
        rename: what becomes of names after that: a dict (others stay), or a callable that returns
            a name, or None to skip.

    Returns:
        The sources by parameter name; the checkpoint's names that ``rename`` skipped; and the
        parameter names that are not stored because config.json ties them to another one's.

    Raises:
        CheckpointError: a family's head counts are not in config.json, rows cannot be reordered,
            or two tensors would become one parameter.
        ValueError: there is no such family, a tensor named in ``mapping`` is not there, or an
            argument is invalid.
    """
    if mapping is None and rename is None:
        return Unchanged(checkpoint), [], dict(_tied_names(checkpoint))
    named = _mapped(checkpoint, mapping)
    by_tensor = {source.rows[0].tensor: name for name, source in named}
    tied: dict[str, str] = {}
    out: dict[str, Source] = {}
    origin: dict[str, str] = {}
    skipped: list[str] = []
    for name, source in named:
        new = name if rename is None else _renamed(name, rename)
        first = source.rows[0].tensor
        if new is None:
            skipped.append(first)
            continue
        if new in out:
            raise CheckpointError(
                checkpoint.path,
                f"{origin[new]!r} and this tensor would both become parameter {new!r}",
                tensor=first,
            )
        out[new], origin[new] = source, first
    for head, embedding in _tied_names(checkpoint):
        new_head = _renamed(_new_name(head, mapping), rename)
        new_embedding = _renamed(by_tensor.get(embedding, embedding), rename)
        if new_head is not None and new_embedding in out and new_head not in out:
            tied[new_head] = new_embedding
    return out, skipped, tied


_HEADS = ("lm_head.weight", "output.weight", "embed_out.weight")
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared)\.weight"
)


def _tied_names(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(head, embedding) of a language model that stores its embedding alone.

    ``tie_word_embeddings`` is true where config.json does not say otherwise: the default of
    transformers' configurations.
    """
    architectures = checkpoint.config.get("architectures")
    language_model = isinstance(architectures, list) and any(
        str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures
    )
    if not language_model or checkpoint.config.get("tie_word_embeddings", True) is not True:
        return []
    if any(head in checkpoint.tensors for head in _HEADS):
        return []
    found = [name for name in checkpoint.tensors if _EMBEDDINGS.fullmatch(name)]
    return [("lm_head.weight", found[0])] if len(found) == 1 else []


def _renamed(name: str, rename: Rename | None) -> str | None:
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


def _mapped(checkpoint: Checkpoint, mapping: MappingArgument | None) -> list[tuple[str, Source]]:
    if isinstance(mapping, str):
        if mapping not in _FAMILIES:
            raise ValueError(f"no mapping {mapping!r}; there are {', '.join(_FAMILIES)}")
        return _of_family(checkpoint, _FAMILIES[mapping])
    if mapping is not None and not isinstance(mapping, Mapping):
        raise ValueError(f"mapping is {', '.join(_FAMILIES)} or a dict, not {mapping!r}")
    explicit = []
    used = set()
    for parameter, given in (mapping or {}).items():
        parts: Sequence[object] = given if isinstance(given, (list, tuple)) else [given]
        if isinstance(given, Source):
            parts = given.rows
        rows = []
        for part in parts:
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
            used.add(name)
            rows.append(whole(checkpoint.tensors[name]) if isinstance(part, str) else part)
        if not rows:
            raise ValueError(f"mapping of {parameter!r}: no tensor is given")
        explicit.append((parameter, given if isinstance(given, Source) else Source(tuple(rows))))
    rest = [
        (name, Source((whole(info),)))
        for name, info in checkpoint.tensors.items()
        if name not in used
    ]
    return explicit + rest


def _of_family(checkpoint: Checkpoint, family: _Family) -> list[tuple[str, Source]]:
    rotated = re.compile(family.rotated)
    out = []
    for name in checkpoint.tensors:
        row = whole(checkpoint.tensors[name])
        match = rotated.fullmatch(name)
        transpose = None
        if match:
            kind = next(group for group in match.groups() if group)
            if _in_rows(checkpoint, name, row.stop):
                transpose = _rotation(checkpoint, name, kind, row.stop, family.interleave)
        out.append((_family_name(name, family), Source((row,), transpose)))
    return out


def _family_name(name: str, family: _Family) -> str:
    for pattern, replacement in family.rules:
        match = re.fullmatch(pattern, name)  # re keeps the compiled patterns
        if match:
            return match.expand(replacement)
    return name


def _new_name(name: str, mapping: MappingArgument | None) -> str:
    return _family_name(name, _FAMILIES[mapping]) if isinstance(mapping, str) else name


def _in_rows(checkpoint: Checkpoint, name: str, rows: int) -> bool:
    """Whether a tensor of a rotated module has the module's rows; False for one value for all.

    Raises:
        CheckpointError: it is packed or in blocks, so that its rows are not those of the weight.
    """
    module, _, leaf = name.rpartition(".")
    packed = checkpoint.tensors[name].dtype.kind == "uint"
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
    """The permutation of query or key rows, head by head."""
    config: Mapping[str, Any] = checkpoint.config
    queries = config.get("num_attention_heads", config.get("n_heads"))
    heads = queries
    if kind == "k":
        stated = config.get("num_key_value_heads", config.get("n_kv_heads"))
        heads = queries if stated is None else stated  # null: as many as there are queries
    if "_norm" in name and rows == _head_size(config, queries):
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


def _head_size(config: Mapping[str, Any], queries: object) -> object:
    """Rows of one head by config.json, or None where it does not say."""
    stated = config.get("head_dim")
    width = config.get("hidden_size", config.get("dim"))
    if stated is not None or type(width) is not int or type(queries) is not int or queries < 1:
        return stated
    return width // queries
