"""Which tensors of a checkpoint make up a quantised weight, and which casts that forbids.

They are recognised by names, dtypes, shapes and the configuration. Nothing is read: only
`read_states` reads the few bytes in which some layouts keep a weight's shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from streamload.codecs.group import Group, Layouts, Packed, read_whole
from streamload.codecs.schemes import packed as stored_packed
from streamload.codecs.schemes import stored_bnb, stored_scaled
from streamload.codecs.schemes import torchao as stored_torchao
from streamload.codecs.schemes.stored_scaled import scale_of
from streamload.core.dtypes import BY_CODE, DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError, UnsupportedCastError

__all__ = [
    "Group",
    "by_weight",
    "check_cast",
    "groups",
    "kept_dtype",
    "read_states",
    "scale_of",
    "together",
]

_T = TypeVar("_T")

#: A checkpoint without tensors of these has no group.
_MARKS = frozenset(
    id(BY_CODE[code])
    for code in ("U8", "I8", "I32", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
)
_NONE: Mapping[str, Group] = MappingProxyType({})


def groups(layouts: Layouts) -> Mapping[str, Group]:
    """Find the quantized weights of a checkpoint, by name, from headers alone.

    Raises:
        CheckpointError: a tensor of a weight is missing, or does not fit it.
    """
    dtypes = set(map(id, map(attrgetter("dtype"), layouts.tensors.values())))
    if dtypes.isdisjoint(_MARKS):
        return _NONE
    said = {
        name: Group(one.kind, name, {"weight": info}, one.shape, one.block, one.bits)
        for header in layouts.shards
        for name, one in header.stored.items()
        if (info := layouts.tensors.get(name)) is not None and not isinstance(info, Packed)
    }
    out: dict[str, Group] = dict(said)
    owners: dict[str, Group] = dict(said)
    for info in layouts.tensors.values():
        if info.name in owners:
            continue
        group = _group_of(layouts, info)
        if group is None:
            continue
        for one in group.members.values():
            other = owners.setdefault(one.name, group)
            if other is not group:
                raise CheckpointError(
                    one.shard,
                    "it belongs to two quantised weights",
                    group.name,
                    f"{other.name} ({other.kind})",
                    tensor=one.name,
                )
        out[group.name] = group
    return MappingProxyType(out)


def _group_of(layouts: Layouts, info: TensorInfo) -> Group | None:
    """The group that a tensor marks, if it marks one."""
    name = info.name
    leaf = name.rpartition(".")[2]
    if leaf in stored_bnb.LEAVES or stored_bnb.is_state(leaf):
        return stored_bnb.group_of(layouts, name, leaf)
    if leaf in stored_packed.LEAVES:
        return stored_packed.group_of(layouts, name, leaf)
    if leaf.endswith(stored_torchao.END):
        return stored_torchao.group_of(layouts, name)
    if leaf.endswith(stored_scaled.ENDS):
        return stored_scaled.group_of(layouts, name)
    stored_scaled.int8_without_scale(layouts, info)
    return stored_scaled.fp8_of(layouts, info)


def read_states(layouts: Layouts, groups: Mapping[str, Group]) -> Mapping[str, Group]:
    """Return quantized weights with their shapes; reads the few bytes that hold some of them.

    Raises:
        CheckpointError: as of `groups`, or what is read does not fit the headers.
    """
    found = dict(groups)
    wanted = [
        (info, group)
        for group in found.values()
        if group.shape is None
        for role in ("quant_state", "shape")
        if (info := group.members.get(role)) is not None
    ]
    read = read_whole(layouts.shards, [info for info, _ in wanted])
    for (_, group), data in zip(wanted, read, strict=True):
        if "quant_state" in group.members:
            found[group.name] = stored_bnb.with_state(layouts, group, data)
        else:
            shape = np.frombuffer(data, group.members["shape"].dtype.numpy).tolist()
            found[group.name] = stored_packed.with_shape(layouts, group, shape)
    return found


def kept_dtype(members: Mapping[str, Group], info: TensorInfo) -> DType | None:
    """The dtype that a tensor keeps, whatever is asked for, since it belongs to a quantised weight.

    Returns:
        None for other tensors, and for floats of 8 bits: where another dtype is asked for,
        `check_cast` refuses it.
    """
    group = members.get(info.name)
    if group is None:
        return None
    is_float = info is group.values and info.dtype.kind == "float" and info.dtype.bits <= 8
    return None if is_float else info.dtype


def check_cast(layouts: Layouts, name: str, dst: DType, instead: str) -> None:
    """Raise UnsupportedCastError for quantised values that would be cast without their scale.

    Args:
        layouts: the headers.
        name: a tensor that would change its dtype.
        dst: what it would become.
        instead: what to write in place of the dtype.
    """
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


def together(members: Mapping[str, Group], rows: Iterable[tuple[str, _T]]) -> list[list[_T]]:
    """Group values by the quantised weight that their tensors belong to.

    Args:
        members: the quantized weights, by tensor.
        rows: (tensor, value), in order.

    Returns:
        A list for each weight and one for each other tensor, in the order of their first values.
    """
    out: dict[str, list[_T]] = {}
    alone: list[list[_T]] = []
    for tensor, value in rows:
        group = members.get(tensor)
        if group is None:
            alone.append([value])
        elif group.name in out:
            out[group.name].append(value)
        else:
            out[group.name] = [value]
            alone.append(out[group.name])
    return alone


def by_weight(
    rows: Iterable[tuple[str, str]], quantised: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Join lines about tensors: one row for each quantised weight, one for each other tensor.

    Args:
        rows: (tensor, text about it).
        quantised: the weights that tensors belong to, of `weights`.
    """
    out: dict[str, str] = {}
    for name, said in rows:
        weight = quantised.get(name)
        if weight is None:
            out[name] = said
        else:
            stem = weight.rpartition(" (")[0]
            rest = name.removeprefix(stem).removeprefix(stem.rpartition(".")[0]).lstrip("._")
            said = f"{rest or 'values'}: {said}"
            out[weight] = f"{out[weight]}; {said}" if weight in out else said
    return list(out.items())
