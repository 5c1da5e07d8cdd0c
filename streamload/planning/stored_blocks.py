"""Weights that a load keeps as GGUF or MLX stores them, by ``quant=``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.parts import Part
from streamload.codecs.scheme import CodedWeight
from streamload.core.tensors import RowTranspose, TensorInfo, whole
from streamload.devices.base import NO_SWAP, Swap
from streamload.planning.dequantize import kept_kinds, with_blocks
from streamload.planning.quant_policy import STORED, QuantPolicy, no_holder, of_layers
from streamload.planning.requests import TensorRequests
from streamload.planning.sources import Found, Source

_LISTED = 8  # weights named in a note


class Kept(NamedTuple):
    """A checkpoint with weights that stay in blocks.

    Attributes:
        checkpoint: has those weights as bytes.
        blocks: the parameters that hold blocks, by name; empty without a model.
    """

    checkpoint: Checkpoint
    found: Found
    blocks: Mapping[str, CodedWeight] = MappingProxyType({})
    notes: tuple[str, ...] = ()


def keep_blocks(
    checkpoint: Checkpoint,
    found: Found,
    quant: QuantPolicy,
    changed: Collection[str],
    swap: Callable[[Mapping[str, str]], Swap] | None = None,
    *,
    holds: bool = False,
) -> Kept:
    """Undo the dequantization of weights that ``quant`` keeps as stored, or in their block type.

    ``changed``: tensors whose rows functions change; ``swap`` returns modules for formats by
    parameter, None without a model; ``holds``: the model holds quantized weights already. Raises
    ValueError if no module holds or can hold any.
    """
    asked, left = _asked(checkpoint, quant, of_model=swap is not None)
    if not (asked or left):
        return Kept(checkpoint, found)
    fill = found.fill
    alone = {
        name: checkpoint.tensors[source.rows[0].tensor]
        for name, source in fill.items()
        if len(kinds := {asked.get(r.tensor) for r in source.rows}) == 1
        and None not in kinds
        and not any(r.tensor in changed for r in source.rows)
    }
    made = NO_SWAP
    if swap is not None and alone:
        made = swap({name: asked[info.name] for name, info in alone.items()})
    sources = {
        name: source
        for name, info in alone.items()
        if swap is None or name in made.coded
        if (source := _as_blocks(info, fill[name], made.coded.get(name))) is not None
    }
    while len(alike := _alone(sources, fill)) < len(sources):
        sources = alike
    kept = {r.tensor for source in sources.values() for r in source.rows}
    beside = {
        part.name(name): _beside(source, part)
        for name, source in sources.items()
        for part in CodedWeight(asked[alone[name].name], alone[name].shape).made.parts[1:]
    }
    left |= {name: asked[name] for name in asked if name not in kept and quant.stores(name)}
    if swap is not None and alone and left and not (made.coded or holds):
        classes = ", ".join(dict.fromkeys(made.refused.values()))
        raise ValueError(no_holder(list(left), made.holders, classes))
    listed = ", ".join(f"{name} ({kind})" for name, kind in islice(left.items(), _LISTED))
    more = ", ..." * (len(left) > _LISTED)
    note = f"dequantised, for no module holds their blocks as they are: {listed}{more}"
    return Kept(
        with_blocks(checkpoint, kept) if kept else checkpoint,
        found._replace(fill={**fill, **sources, **beside}) if kept else found,
        {name: made.coded[name] for name in sources if swap is not None},
        (note,) if left else (),
    )


def _asked(
    checkpoint: Checkpoint, quant: QuantPolicy, *, of_model: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the block types of dequantized weights that may stay in blocks, by tensor name.

    And those of weights that "stored" cannot keep: without a model, "*" leaves out embeddings,
    whose modules need floats.
    """
    kept: dict[str, str] = {}
    left: dict[str, str] = {}
    kinds = kept_kinds(checkpoint) if quant else {}
    if not kinds:
        return kept, left
    wants = TensorRequests.every(checkpoint)
    inside = of_layers(checkpoint.tensors, "head")
    for info, format in zip(wants.infos, quant.formats(checkpoint, wants), strict=True):
        if (kind := kinds.get(info.name)) is None:
            continue
        by_star = quant.rule(info.name) == ("*", STORED)
        if by_star and not of_model and info.name not in inside:
            left[info.name] = kind
        elif quant.stores(info.name) or kind == format:
            kept[info.name] = kind
    return kept, left


def _alone(sources: Mapping[str, Source], fill: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources whose tensors fill no parameter of `fill` that is not in `sources`."""
    # such a tensor is dequantized for all
    others = {r.tensor for name, source in fill.items() if name not in sources for r in source.rows}
    return {
        name: source
        for name, source in sources.items()
        if others.isdisjoint(r.tensor for r in source.rows)
    }


def _beside(source: Source, part: Part) -> Source:
    """Return the source of the part of a weight that is next to its codes, by their source."""
    rows = (replace(r, tensor=part.name(r.tensor)) for r in source.rows)
    return Source(rows, source.transpose)


def _as_blocks(info: TensorInfo, source: Source, held: CodedWeight | None) -> Source | None:
    """Return the source of a weight's blocks; None if they would have to be cut.

    ``info`` may be the first of weights that are joined by rows; ``source`` is that of floats;
    ``held``: what the parameter holds instead, None without a model.
    """
    turned, of_matrix = source.transpose, len(info.shape) == 2
    found = (sum(r.stop - r.start for r in source.rows), *info.shape[1:])
    # then the file has the order of the blocks
    is_turned = of_matrix and turned == RowTranspose(1, *found)
    fits = held is None or (held.shape, held.transposed) == (found, is_turned)
    by_rows = turned is None or (of_matrix and turned.rows == found[0])
    is_cut = source.rows != (whole(info),) and not of_matrix
    if is_cut or not fits or not (is_turned or by_rows):
        return None
    shape = None if held is None or of_matrix else held.made.parts[0].shape
    return Source(source.rows, None if is_turned else turned, shape)
