"""Weights of torchao's tensor subclasses, flattened to safetensors files with metadata.

Source: ``flatten_tensor_state_dict`` in torchao/prototype/safetensors, version 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from streamload.codecs.scheme import Library
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.bounded_json import parse_json
from streamload.core.tensors import TensorInfo

_END = "_qdata"
_DATA_NAMES = "_tensor_data_names"
_PACKED_BITS = 4
#: Classes whose values have the weight's shape, and those with two values in a byte; other classes
#: store the layouts of their kernels.
_PLAIN = ("Int8Tensor", "Float8Tensor")
_NIBBLES = ("Int4Tensor",)


def _find(layouts: Layouts, values: TensorInfo) -> QuantizedWeight | None:
    """Return the weight whose values are the tensor ``{module}._{parameter}_qdata``, or None."""
    name = values.name
    module, dot, leaf = name.rpartition(".")
    if not leaf.startswith("_"):
        return None
    parameter = leaf.removeprefix("_").removesuffix(_END)
    weight = f"{module}{dot}{parameter}"
    stated = next((h.metadata[weight] for h in layouts.shards if weight in h.metadata), "")
    if not stated and layouts.method != "torchao":
        return None
    form = _form(layouts, name, weight, stated)
    data = form["_data"]
    members = {"weight": values}
    for role in form[_DATA_NAMES]:
        if role != "qdata":
            members[role] = layouts.need(f"{module}{dot}_{parameter}_{role}", name, role)
    block = data.get("block_size")
    sizes = tuple(block) if isinstance(block, list) else ()
    if not all(type(n) is int and n > 0 for n in sizes):
        layouts.refuse(name, "its metadata have no valid block_size", "lengths", block)
    bits, shape = _PACKED_BITS, None
    if form["_type"] in _PLAIN:
        bits, shape = values.dtype.bits, values.shape
        _check_scale(layouts, members, sizes)
    elif form["_type"] in _NIBBLES and values.shape:
        shape = (*values.shape[:-1], 2 * values.shape[-1])
    kind = f"torchao-{form['_type']}"
    return QuantizedWeight(kind, weight, members, shape, sizes, bits, facts=MappingProxyType(data))


def _check_scale(
    layouts: Layouts, members: Mapping[str, TensorInfo], sizes: tuple[int, ...]
) -> None:
    """Raise CheckpointError unless the scale has one value for each block."""
    values, scale = members["weight"], members.get("scale")
    if len(sizes) != len(values.shape):
        problem, found = "its metadata have no valid block_size", list(sizes)
        layouts.refuse(values.name, problem, f"{len(values.shape)} lengths", found)
    if scale is not None:
        grid = tuple(-(-n // size) for n, size in zip(values.shape, sizes, strict=True))
        shapes = [grid, ()] if scale.numel == 1 else [grid]
        layouts.check(scale, ("F32", "BF16", "F16", "F8_E8M0"), *shapes)


def _form(layouts: Layouts, name: str, weight: str, stated: str) -> Mapping[str, Any]:
    """Return a weight's metadata, the JSON in ``stated``; raise CheckpointError if invalid."""
    try:
        form = parse_json(stated.encode()) if stated else None
    except (ValueError, RecursionError):
        form = None
    names = form.get(_DATA_NAMES) if isinstance(form, dict) else None
    if (
        not isinstance(form, dict)
        or not isinstance(form.get("_type"), str)
        or not isinstance(form.get("_data"), dict)
        or not isinstance(names, list)
        or not all(isinstance(role, str) for role in names)
        or "qdata" not in names
    ):
        layouts.refuse(
            name,
            f"the file's metadata do not say what {weight} is",
            f"_type, _data and {_DATA_NAMES} with qdata",
            stated[:80] or "nothing",
        )
    return form


LIBRARY = Library(find=_find)
