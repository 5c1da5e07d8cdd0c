"""Weights that torchao flattened: its tensor subclasses, in safetensors files with metadata.

Source: ``flatten_tensor_state_dict`` in torchao/prototype/safetensors, version 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from streamload.nesting import parse_json
from streamload.quant.group import Group, Layouts

#: The end of the last components of names that mark a group.
END = "_qdata"
_DATA_NAMES = "_tensor_data_names"
_PACKED_IN_BYTES = 4  # bits of values of which a byte has two


def group_of(layouts: Layouts, name: str) -> Group | None:
    """The group of a tensor ``{module}._{parameter}_qdata``."""
    module, dot, leaf = name.rpartition(".")
    if not leaf.startswith("_"):
        return None
    parameter = leaf.removeprefix("_").removesuffix(END)
    weight = f"{module}{dot}{parameter}"
    said = next((h.metadata[weight] for h in layouts.checkpoint.shards if weight in h.metadata), "")
    if not said and layouts.method != "torchao":
        return None
    form = _form(layouts, name, weight, said)
    data, values = form["_data"], layouts.checkpoint.tensors[name]
    members = {"weight": values}
    for role in form[_DATA_NAMES]:
        if role != "qdata":
            members[role] = layouts.need(f"{module}{dot}_{parameter}_{role}", name, role)
    packed = values.dtype.code == "U8"
    shape = values.shape
    if packed:
        shape = (*shape[:-1], 2 * shape[-1])
    block = data.get("block_size")
    sizes = tuple(block) if isinstance(block, list) else ()
    if not all(type(n) is int and n > 0 for n in sizes) or len(sizes) not in (0, len(shape)):
        layouts.refuse(
            name, "its metadata have no valid block_size", f"{len(shape)} lengths", block
        )
    scale = members.get("scale")
    if sizes and scale is not None and not packed:
        grid = tuple(-(-n // size) for n, size in zip(shape, sizes, strict=True))
        layouts.check(
            scale, ("F32", "BF16", "F16", "F8_E8M0"), grid, () if scale.numel == 1 else grid
        )
    bits = _PACKED_IN_BYTES if packed else values.dtype.bits
    kind = f"torchao-{form['_type']}"
    return Group(kind, weight, members, shape, sizes, bits, facts=MappingProxyType(data))


def _form(layouts: Layouts, name: str, weight: str, said: str) -> Mapping[str, Any]:
    """What the metadata say of a weight."""
    try:
        form = parse_json(said.encode()) if said else None
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
            said[:80] or "nothing",
        )
    return form
