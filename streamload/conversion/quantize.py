"""Weights that a conversion quantizes: their output tensors and ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.cast_table import supported
from streamload.codecs.decode import check_target
from streamload.codecs.scheme import ALL_SCHEMES, SCHEMES
from streamload.codecs.stored import OWN_METHOD
from streamload.codecs.weights import Packed, config_key, shape_in_models
from streamload.conversion.openable import Verdict
from streamload.core.dtypes import DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.formats.writer import Joined, OutTensor
from streamload.planning.dequantize import all_dequantized
from streamload.planning.match import wants_of
from streamload.planning.moves import DTypePolicy
from streamload.planning.quant_policy import QuantPolicy, codings_of, leaving
from streamload.planning.sources import Source, is_conv1d
from streamload.planning.transforms import Changed

_WEIGHT = ".weight"
#: Matrices outside of Linear modules: transformers has the experts of a layer in one tensor.
_NOT_LINEAR = re.compile(r"\.experts\.|embed|(^|\.)(wte|wpe)\.")
#: A head that shares the embedding's weight has no tensor: transformers would quantise it.
_HEAD = "lm_head"


def coded_otherwise(checkpoint: Checkpoint, policy: QuantPolicy) -> list[str]:
    """Return GGUF-quantized weights to dequantize, since ``policy`` gives them another format."""
    asked = ((group, policy.rule(group.name)) for group in checkpoint.groups.values())
    return [
        group.name
        for group, rule in asked
        if group.name in checkpoint.stored and rule[1] not in (None, group.kind)
    ]


def wanted_of(
    chosen: Checkpoint,
    fill: Mapping[str, Source],
    dtypes: Mapping[str, DType],
    policy: QuantPolicy,
    *,
    of_modules: bool,
) -> dict[str, OutTensor]:
    """Return by output name the `OutTensor` of each tensor to write: its source, dtype and format.

    ``fill``: sources by output name; ``dtypes``: by source tensor, dtypes of weights that are not
    quantized; ``of_modules``: whether weights are stored as modules hold them, a Conv1D's
    transposed, and not in an order that the writer chooses.
    """
    formats: Sequence[str | None] = [None] * len(fill)
    if policy:  # else tensors may belong to a quantized weight that is not selected whole
        formats = policy.formats(chosen, wants_of(chosen, fill))
    stored = {name: one for header in chosen.shards for name, one in header.stored.items()}
    out: dict[str, OutTensor] = {}
    for (name, source), format in zip(fill.items(), formats, strict=True):
        info = chosen.tensors[source.rows[0].tensor]
        made, shape = Joined.of(info) if isinstance(info, Changed) else None, shape_in_models(info)
        if info.name in chosen.turns:
            shape = source.shape or shape
            if source.transpose is not None:
                made = Joined.of(info, source.transpose)
        scheme = ALL_SCHEMES.get(format or "")  # a writer's own format may be none
        turns = scheme is not None and scheme.of_linears and len(shape) == 2
        if of_modules and turns and is_conv1d(chosen.config, info.name):
            made = (made or Joined.of(info)).transposed(*shape)
            shape = shape[::-1]
        known = stored.get(info.name) if not isinstance(info, Packed) else None
        out[name] = OutTensor(name, info, dtypes[info.name], shape, format, made, known)
    return out


def all_entries(
    lists: Iterable[Sequence[OutTensor]], policy: QuantPolicy
) -> list[list[list[OutTensor]]]:
    """Return the output tensors of each target, nested like ``lists``: several if it is quantized.

    One UnsupportedCastError names all weights that cannot be quantized.
    """
    refused: dict[str, UnsupportedCastError] = {}
    taken: list[str] = []
    out: list[list[list[OutTensor]]] = []
    for listed in lists:
        out.append([])
        for wanted in listed:
            info, made, quant = wanted.info, wanted.made, wanted.quant
            assert made is None or made.numel == wanted.numel, wanted.name
            for each in made.infos if made is not None else ():
                _check_dtypes(each, wanted)
            if quant is None:
                if not (info.dtype is wanted.dtype or isinstance(info, Packed)):
                    _check_dtypes(info, wanted)
                out[-1].append([wanted])
                continue
            src = info.dtype if made is None else made.src
            try:
                parts = codings_of(info, wanted.shape, src, quant)
            except UnsupportedCastError as error:
                refused[info.name] = error
                continue
            taken.append(info.name)
            out[-1].append(
                [
                    wanted._replace(
                        name=part.name(wanted.name),
                        dtype=part.dtype,
                        shape=part.shape,
                        coding=coding,
                    )
                    for part, coding in parts
                ]
            )
    if refused:
        raise leaving(refused, taken, policy)
    return out


def _check_dtypes(info: TensorInfo, wanted: OutTensor) -> None:
    """Raise UnsupportedCastError if ``info`` cannot be cast, or permuted, as ``wanted`` asks."""
    dst = wanted.dtype if wanted.quant is None else wanted.source.src
    if isinstance(info, Packed):
        check_target(info, dst)
        return
    fits = supported(info.dtype, dst) and (info.dtype.itemsize or wanted.made is None)
    if not fits:
        reason = "its rows cannot be put in another order" if info.dtype is dst else ""
        raise UnsupportedCastError(
            info.dtype.name, dst.name, reason=reason, tensor=info.name, path=info.shard
        )


def kept_back(
    checkpoint: Checkpoint, dtypes: Mapping[str, DType], policy: DTypePolicy
) -> list[str]:
    """Return sentences for users on metadata left out, and on quantized weights kept as is."""
    notes = [
        f"__metadata__ {key!r} is left out: the files do not agree on it"
        for key in sorted({k for h in checkpoint.shards for k in h.metadata})
        if key not in checkpoint.metadata
    ]
    kept = sum(
        policy.resolve(t, checkpoint.tensors[t].dtype, native_bf16=True) is not dtype
        for t, dtype in dtypes.items()
    )
    if kept:
        notes.append(f"{kept} tensors of quantised weights keep their dtypes")
    return notes


def described(
    checkpoint: Checkpoint,
    made: Mapping[str, Sequence[OutTensor]],
    main: str,
    policy: QuantPolicy,
    verdict: Verdict | None,
) -> tuple[dict[str, Any], list[str]]:
    """Return keys of config.json for the quantized weights, {} if none fits, and notes.

    ``made``: output tensors by source tensor; ``main``: the dtype of most floats if nothing was
    quantized; ``verdict``: transformers' answer, None if it was not asked. Raises ValueError if
    transformers opens no weights of this format in the model.
    """
    codes = {p[0].name: p[0] for p in made.values() if p[0].coding is not None}
    by_format: dict[str, list[str]] = {}
    for name, group in checkpoint.groups.items():
        if name in checkpoint.stored and name in made:  # its blocks stay as the file has them
            by_format.setdefault(group.kind, []).append(made[name][0].name)
    if not codes and not by_format:
        return {}, []
    kept = bool(by_format)
    for name, each in codes.items():
        assert each.coding is not None, name
        by_format.setdefault(each.coding.format, []).append(name)
    names = sorted(by_format)
    own = {"quantization_config": {"quant_method": OWN_METHOD, "formats": by_format}}
    left = [
        each.name.removesuffix(_WEIGHT)
        for each, *_ in made.values()
        if each.coding is None
        and len(each.shape) == 2
        and each.dtype.kind == "float"
        and each.name.endswith(_WEIGHT)
    ]
    if _HEAD not in left and _HEAD + _WEIGHT not in codes:
        left.append(_HEAD)
    if verdict is not None and verdict.modules is not None:
        left = verdict.modules
    elif not kept and verdict is not None and verdict.said is not None:
        return {"quantization_config": dict(verdict.said)}, [
            f"the weights are {' and '.join(names)}, for which transformers has no modules: "
            "streamload.transformers.from_pretrained opens them, and load_state_dict of tinygrad's "
            "models"
        ]
    found = [None if kept else SCHEMES[name].config(left, main) for name in names]
    config = found[0]
    if config is None or any(other != config for other in found):
        why = "no quantization_config says both" if config else "transformers has no such weights"
        return own, [
            f"the weights are {' and '.join(names)}, and {why}: only streamload reads them, for "
            "tinygrad into the modules of streamload.nn"
        ]
    key = config_key(checkpoint.config)
    if key is not None and not all_dequantized(checkpoint):
        raise CheckpointError(
            checkpoint.path, f"config.json says already how it is quantised ({key}), and can once"
        )
    _check_transposed(checkpoint, codes, policy)
    if verdict is not None and verdict.known and verdict.modules is None:
        raise ValueError(
            f"quant: transformers opens no {names[0]} in this model, and read what is written as "
            'floats: write quant="nf4", which bitsandbytes opens, or "q8_0" for streamload alone'
        )
    if not checkpoint.config:
        return {}, ["there is no config.json to say how the weights are quantised"]
    others = [
        name
        for name, each in codes.items()
        if len(each.info.shape) != 2 or not name.endswith(_WEIGHT) or _NOT_LINEAR.search(name)
    ]
    notes = []
    if others:
        notes.append(
            f"{len(others)} quantised tensors are no weights of Linear layers, such as "
            f"{others[0]}: transformers cannot open them"
        )
    return {"quantization_config": config}, notes


def _check_transposed(
    checkpoint: Checkpoint, codes: Mapping[str, OutTensor], policy: QuantPolicy
) -> None:
    """Raise UnsupportedCastError for transposed (Conv1D) weights in formats without a module."""
    refused: dict[str, UnsupportedCastError] = {}
    taken: list[str] = []
    for each in codes.values():
        tensor = each.info.name
        if each.coding is None or each.turn or not is_conv1d(checkpoint.config, tensor):
            taken.append(tensor)
            continue
        refused[tensor] = UnsupportedCastError(
            each.info.dtype.name,
            each.coding.format,
            reason="its model stores it transposed (Conv1D), and transformers has no such module "
            "in that format; bitsandbytes-int8 and nf4 have one",
            tensor=tensor,
            path=each.info.shard,
        )
    if refused:
        raise leaving(refused, taken, policy)
