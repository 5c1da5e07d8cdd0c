"""The quantized weights of a checkpoint, and the casts that they forbid.

Names, dtypes, shapes and the configuration identify them. Nothing is read, but for `read_states`:
it reads the few bytes in which some layouts store a weight's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

from streamload.codecs.scheme import LIBRARIES, complete_of, finder_of, is_blocks
from streamload.codecs.weights import (
    Layouts,
    Packed,
    QuantizedWeight,
    read_whole,
    scale_beside,
    scale_of,
)
from streamload.core.dtypes import BY_CODE, PACKED, DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, UnsupportedCastError

_T = TypeVar("_T")

#: The "quant_method" in config.json of what only streamload's modules hold.
OWN_METHOD = "streamload"

#: Last components of the names of tensors that only quantized weights have next to them.
_COMPANIONS = ("scales", "qzeros", "zeros", "absmax", "SCB", "weight_scale", "scale_inv")

#: Dtypes of quantized values, by id; a checkpoint without any has no quantized weight.
_MARKS = frozenset(
    id(BY_CODE[code])
    for code in ("U8", "I8", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
)


def groups(layouts: Layouts) -> Mapping[str, QuantizedWeight]:
    """Return the quantized weights of a checkpoint by name, found in its headers alone."""
    dtypes = set(map(id, map(attrgetter("dtype"), layouts.tensors.values())))
    if dtypes.isdisjoint(_MARKS):
        return {}
    out = {
        name: QuantizedWeight(one.kind, name, {"weight": info}, one.shape, one.block, one.bits)
        for header in layouts.shards
        for name, one in header.stored.items()
        if (info := layouts.tensors.get(name)) is not None and not isinstance(info, Packed)
    } | _own_blocks(layouts)
    owners = out.copy()
    finder = cache(partial(finder_of, LIBRARIES.ours))  # the last components of names are few
    for info in layouts.tensors.values():
        if info.name in owners:
            continue
        leaf = info.name.rpartition(".")[2]
        find = finder(leaf)
        weight = find(layouts, info) if find is not None else None
        if weight is None and id(info.dtype) in _MARKS:
            find = finder_of(LIBRARIES.others, leaf)
            weight = find(layouts, info) if find is not None else None
        if weight is None:
            continue
        for one in weight.members.values():
            other = owners.setdefault(one.name, weight)
            if other is not weight:
                raise CheckpointError(
                    one.shard,
                    "it belongs to two quantised weights",
                    weight.name,
                    f"{other.name} ({other.kind})",
                    tensor=one.name,
                )
        out[weight.name] = weight
    return MappingProxyType(out)


def own_formats(layouts: Layouts) -> list[tuple[str, list[Any]]]:
    """Return formats of streamload's modules and the names of their weights, by config.json."""
    said = layouts.quantization.get("formats") if layouts.method == OWN_METHOD else None
    pairs = said.items() if isinstance(said, Mapping) else ()
    return [(kind, names) for kind, names in pairs if isinstance(names, list)]


def _own_blocks(layouts: Layouts) -> dict[str, QuantizedWeight]:
    """Return weights in blocks of safetensors files that streamload wrote, by config.json."""
    out: dict[str, QuantizedWeight] = {}
    for kind, names in own_formats(layouts):
        if not is_blocks(str(kind)):
            continue
        dtype = PACKED[str(kind)]
        for name in names:
            info = layouts.find(name) if isinstance(name, str) else None
            if info is None or info.dtype.code != "U8" or isinstance(info, Packed):
                continue
            *rows, nbytes = info.shape or (0,)
            if nbytes % dtype.nbytes(dtype.block):
                expected = f"whole blocks of {dtype.nbytes(dtype.block)} bytes a row"
                layouts.refuse_shape(info, expected)
            shape = (*rows, dtype.numel(nbytes))
            members = {"weight": info}
            out[name] = QuantizedWeight(str(kind), name, members, shape, (dtype.block,), 8)
    return out


def read_states(
    layouts: Layouts, groups: Mapping[str, QuantizedWeight]
) -> Mapping[str, QuantizedWeight]:
    """Return quantized weights with shapes, after reading the small tensors that state some."""
    found = dict(groups)
    unknown = [weight for weight in groups.values() if weight.shape is None]
    wanted = [(weight, one) for weight in unknown if (one := complete_of(weight)) is not None]
    read = read_whole(layouts.shards, [info for _, (info, _) in wanted])
    for (weight, (_, complete)), data in zip(wanted, read, strict=True):
        found[weight.name] = complete(layouts, weight, data)
    return found


def unknown_codes(layouts: Layouts, known: Mapping[str, QuantizedWeight]) -> Mapping[str, str]:
    """Return integer weights of no known layout that are next to scales, with the name of these."""
    out: dict[str, str] = {}
    codes = [
        info
        for info in layouts.tensors.values()
        if info.dtype.kind in ("int", "uint") and len(info.shape) > 1 and info.name not in known
    ]
    formats = own_formats(layouts) if codes else []
    own = {str(name) for _, names in formats for name in names}
    for info in codes:
        if info.name in own:
            continue
        module, dot, leaf = info.name.rpartition(".")
        names = (*(f"{module}{dot}{each}" for each in _COMPANIONS), f"{info.name}.absmax")
        beside = next((n for n in names if n != info.name and n in layouts.tensors), None)
        beside = beside or scale_beside(layouts, info.name)
        if beside is not None and beside not in known and leaf not in _COMPANIONS:
            out[info.name] = beside
    return out


def kept_dtype(members: Mapping[str, QuantizedWeight], info: TensorInfo) -> DType | None:
    """Return the dtype that a tensor of a quantized weight keeps under any ``dtype=`` option.

    Returns None for other tensors, and for floats of 8 bits: `check_cast` refuses to cast them.
    """
    group = members.get(info.name)
    if group is None:
        return None
    is_float = info is group.values and info.dtype.kind == "float" and info.dtype.bits <= 8
    return None if is_float else info.dtype


def check_cast(layouts: Layouts, name: str, dst: DType, instead: str) -> None:
    """Raise UnsupportedCastError, with the advice ``instead``, for a cast without the scale."""
    scale = scale_of(layouts, name)
    if scale is None:
        return
    info = layouts.tensors[name]
    raise UnsupportedCastError(
        info.dtype.name,
        dst.name,
        reason=f"its values mean nothing without their scale ({scale}); {instead}",
        tensor=name,
        path=info.shard,
    )


def together(
    members: Mapping[str, QuantizedWeight], rows: Iterable[tuple[str, _T]]
) -> list[list[_T]]:
    """Group rows of (tensor name, value) by quantized weight; ``members`` has these by tensor name.

    Returns the values of each weight, and of each other tensor, in the order of their first rows.
    """
    out: dict[str | int, list[_T]] = {}
    for number, (tensor, value) in enumerate(rows):
        group = members.get(tensor)
        out.setdefault(number if group is None else group.name, []).append(value)
    return list(out.values())


def by_weight(rows: Iterable[tuple[str, str]], weights: Mapping[str, str]) -> list[tuple[str, str]]:
    """Join the texts of (tensor name, text) rows of one weight under its title.

    ``weights`` has titles, "name (details)", by tensor name; rows of other tensors stay.
    """
    out: dict[str, str] = {}
    for name, text in rows:
        weight = weights.get(name)
        if weight is None:
            out[name] = text
        else:
            stem = weight.rpartition(" (")[0]
            rest = name.removeprefix(stem).removeprefix(stem.rpartition(".")[0]).lstrip("._")
            text = f"{rest or 'values'}: {text}"
            out[weight] = f"{out[weight]}; {text}" if weight in out else text
    return list(out.items())
