"""What a conversion quantises: the parts of each weight, and what config.json says of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.header import TensorInfo
from streamload.decide import wants_of
from streamload.dequantise import all_dequantised
from streamload.dtypes import DType
from streamload.errors import CheckpointError, UnsupportedCastError
from streamload.families import is_conv1d
from streamload.mapping import Source
from streamload.planning.parts import Coding
from streamload.quant.base import FORMATS, Quantised
from streamload.quant.group import config_key, shape_in_models
from streamload.quantise import QuantPolicy, check_distinct, parts_of, turned

_WEIGHT = ".weight"
#: Matrices that transformers has in no Linear: it holds the experts of a layer in one tensor.
_NOT_LINEAR = re.compile(r"\.experts\.|embed|(^|\.)(wte|wpe)\.")
#: A head that shares the embedding's weight has no tensor: transformers would quantise it.
_HEAD = "lm_head"


class Wanted(NamedTuple):
    """A tensor that is to be written: one of the source, or a part of what a weight becomes."""

    name: str  # in the output
    info: TensorInfo  # what it is made of
    dtype: DType
    shape: tuple[int, ...]
    coding: Coding | None = None
    turned: bool = False  # its transpose is quantised


def becomes(
    chosen: Checkpoint, fill: Mapping[str, Source], dtypes: Mapping[str, DType], policy: QuantPolicy
) -> dict[str, list[Wanted]]:
    """What each tensor becomes, by its name in the source.

    Args:
        chosen: what is converted.
        fill: by the name in the output, the tensor.
        dtypes: by tensor, what it is cast to where it is not quantised.
        policy: what is quantised.

    Raises:
        UnsupportedCastError: a tensor cannot be in its format.
        ValueError: parts of two tensors would have one name.
    """
    if not policy:  # what is chosen may be a part of a quantised weight, without the others
        found = ((name, chosen.tensors[source.rows[0].tensor]) for name, source in fill.items())
        return {i.name: [Wanted(n, i, dtypes[i.name], shape_in_models(i))] for n, i in found}
    wants = wants_of(chosen, fill)
    out: dict[str, list[Wanted]] = {}
    # one by one: there may be very many, and a want takes much more than what is kept of it
    for want, info, format in zip(wants, wants.infos, policy.formats(chosen, wants), strict=True):
        mine = out.setdefault(info.name, [])
        if format is None:
            mine.append(Wanted(want.name, info, dtypes[info.name], want.shape))
            continue
        want = turned(chosen, want, format)
        is_turned = want.transpose is not None
        for part in parts_of(chosen, want, info.dtype, format, of_rows=False):
            assert part.dtype is not None, part.name
            mine.append(Wanted(part.name, info, part.dtype, part.shape, part.coding, is_turned))
    check_distinct([each.name for parts in out.values() for each in parts], wants.names)
    return out


def weights_of(
    chosen: Checkpoint, fill: Mapping[str, Source], policy: QuantPolicy
) -> tuple[list[Quantised], bool]:
    """The weights that are quantised, one object for all alike; without those that cannot be.

    And whether the transpose of some is.
    """
    wants = wants_of(chosen, fill)
    kinds: dict[tuple[str, tuple[int, ...], DType], Quantised] = {}
    keys = []
    any_turned = False
    formats = policy.formats(chosen, wants)
    for want, src, format in zip(wants, wants.srcs, formats, strict=True):
        if format is not None:
            as_made = turned(chosen, want, format)
            any_turned |= as_made is not want
            keys.append((format, as_made.shape, src))
    for key in dict.fromkeys(keys):
        with suppress(ValueError):  # planning refuses it by name
            kinds[key] = FORMATS[key[0]].of(*key[1:])
    return [made for key in keys if (made := kinds.get(key)) is not None], any_turned


def described(
    checkpoint: Checkpoint, made: Mapping[str, Sequence[Wanted]], main: str
) -> tuple[dict[str, Any], list[str]]:
    """What is quantised, for config.json, and in sentences for users.

    Args:
        checkpoint: the source.
        made: what each tensor becomes.
        main: the dtype that most of the floats would have otherwise.

    Raises:
        CheckpointError: config.json says already how weights are quantised that stay so.
        UnsupportedCastError: transformers would read a weight as another one.
    """
    codes = {p[0].name: p[0] for p in made.values() if p[0].coding is not None}
    if not codes:
        return {}, []
    names = sorted({each.coding.format for each in codes.values() if each.coding is not None})
    left = _left(parts[0] for parts in made.values())
    if _HEAD not in left and _HEAD + _WEIGHT not in codes:
        left.append(_HEAD)
    found = [FORMATS[name].config(left, main) for name in names]
    config = found[0]
    if config is None or any(other != config for other in found):
        why = "no quantization_config says both" if config else "transformers has no such weights"
        return {}, [
            f"the weights are {' and '.join(names)}, and {why}: only streamload reads them, for "
            "tinygrad into the modules of streamload.nn"
        ]
    key = config_key(checkpoint.config)
    if key is not None and not all_dequantised(checkpoint):
        raise CheckpointError(
            checkpoint.path, f"config.json says already how it is quantised ({key}), and can once"
        )
    _check_transposed(checkpoint, codes)
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


def _left(tensors: Iterable[Wanted]) -> list[str]:
    """The modules with matrices that are left as they are."""
    return [
        each.name.removesuffix(_WEIGHT)
        for each in tensors
        if each.coding is None
        and len(each.shape) == 2
        and each.dtype.kind == "float"
        and each.name.endswith(_WEIGHT)
    ]


def _check_transposed(checkpoint: Checkpoint, codes: Mapping[str, Wanted]) -> None:
    """Refuse weights of Conv1D in a format whose library has no module for them."""
    for each in codes.values():
        tensor = each.info.name
        if each.coding is not None and not each.turned and is_conv1d(checkpoint.config, tensor):
            raise UnsupportedCastError(
                each.info.dtype.name,
                each.coding.format,
                reason="its model stores it transposed (Conv1D), and transformers has no such "
                "module in that format; bitsandbytes-int8 and nf4 have one, or leave it: "
                f'quant={{"{tensor}": None, "*": "{each.coding.format}"}}',
                tensor=tensor,
                path=each.info.shard,
            )
