"""Weights that bitsandbytes quantised: nf4, fp4 and int8.

Source: ``QuantState.as_dict`` and ``from_dict`` in bitsandbytes/functional.py, and
``Linear8bitLt._save_to_state_dict`` in bitsandbytes/nn/modules.py, version 0.50.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import NoReturn

from streamload.codecs.group import Group, Layouts
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BY_NAME
from streamload.core.tensors import TensorInfo

_STATE = "quant_state.bitsandbytes__"
_TYPES = ("nf4", "fp4")
_CODES = 16  # of a value of 4 bits
_NESTED_CODES = 256
_FLOATS = ("float16", "bfloat16", "float32")
_MOST_STATE_NBYTES = 2**16
_MOST_BLOCK = 4096  # elements, of the blocks that bitsandbytes has

#: Last components of names that mark a group.
LEAVES = (
    *(f"bitsandbytes__{kind}" for kind in _TYPES),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB"),
)


def is_state(leaf: str) -> bool:
    """Whether the last component of a name is that of a quantisation state, of any type."""
    return leaf.startswith("bitsandbytes__")


def group_of(layouts: Layouts, name: str, leaf: str) -> Group | None:
    """The group of a tensor that marks one."""
    if leaf == "SCB":
        return _int8(layouts, name)
    weight = name.partition(f".{_STATE}")[0] if is_state(leaf) else name.removesuffix(f".{leaf}")
    return _four_bits(layouts, weight)


def _four_bits(layouts: Layouts, weight: str) -> Group | None:
    """The group of a weight of 4 bits; its shape is in the values of its state."""
    values = layouts.find(weight)
    if values is None and not any(layouts.find(f"{weight}.{_STATE}{kind}") for kind in _TYPES):
        return None  # a buffer of something else
    values = layouts.need(weight, f"{weight}.absmax", "weight")
    states = [kind for kind in _TYPES if layouts.find(f"{weight}.{_STATE}{kind}")]
    if len(states) != 1:
        expected = f"one of {', '.join(f'{weight}.{_STATE}{kind}' for kind in _TYPES)}"
        names = layouts.tensors
        other = next((name for name in names if name.startswith(f"{weight}.quant_state.")), "none")
        found = " and ".join(states) or other
        layouts.refuse(weight, "its quantisation state is missing or unclear", expected, found)
    members = {"weight": values}
    for role in ("absmax", "quant_map"):
        members[role] = layouts.need(f"{weight}.{role}", weight, role)
    nested = members["absmax"].dtype.code == "U8"
    for role in ("nested_absmax", "nested_quant_map"):
        if nested or layouts.find(f"{weight}.{role}") is not None:
            members[role] = layouts.need(f"{weight}.{role}", weight, role)
            layouts.check(members["absmax"], ("U8",))
            shapes = [(_NESTED_CODES,)] if role == "nested_quant_map" else []
            layouts.check(members[role], ("F32",), *shapes)
    layouts.check(members["absmax"], ("F32", "U8"), (members["absmax"].numel,))
    layouts.check(members["quant_map"], ("F32",), (_CODES,))
    state = layouts.need(f"{weight}.{_STATE}{states[0]}", weight, "quantisation state")
    layouts.check(state, ("U8",), (state.numel,))
    if state.numel > _MOST_STATE_NBYTES:
        layouts.refuse(
            state.name,
            "the quantisation state is too long",
            f"at most {_MOST_STATE_NBYTES} bytes",
            state.numel,
        )
    members["quant_state"] = state
    blocks = members["absmax"].numel
    if not 0 <= blocks <= 2 * values.nbytes or (values.nbytes and not blocks):
        layouts.refuse(
            members["absmax"].name,
            "its length does not fit the bytes of the weight",
            f"at most one for each of {2 * values.nbytes} values",
            blocks,
        )
    return Group(f"bnb-{states[0]}", weight, members, None, (), 4, "flat")


def with_state(layouts: Layouts, group: Group, data: bytes) -> Group:
    """The group, with what the bytes of its state say; they are checked against the headers."""
    info = group.members["quant_state"]

    def refuse(problem: str, expected: object, found: object) -> NoReturn:
        layouts.refuse(info.name, f"the quantisation state {problem}", expected, found)

    try:
        state = parse_json(data)
    except (ValueError, RecursionError) as error:
        refuse("is not valid JSON", "an object", str(error))
    if type(state) is not dict:
        refuse("is not valid", "an object of JSON", type(state).__name__)
    kind = group.kind.removeprefix("bnb-")
    if state.get("quant_type") != kind:
        refuse("names another type than the tensor", kind, state.get("quant_type"))
    if state.get("dtype") not in _FLOATS:
        refuse("names no dtype of weights", " or ".join(_FLOATS), state.get("dtype"))
    size = _block_size(state.get("blocksize"))
    if size is None:
        expected = f"a power of two up to {_MOST_BLOCK}"
        refuse("has no valid blocksize", expected, state.get("blocksize"))
    shape = state.get("shape")
    if type(shape) is not list or not all(type(n) is int and n >= 0 for n in shape):
        refuse("has no valid shape", "a list of lengths", shape)
    numel, nbytes = math.prod(shape), group.values.nbytes
    itemsize = group.values.dtype.itemsize
    if -(-numel // 2 // itemsize) * itemsize != nbytes and -(-numel // 2) != nbytes:
        refuse(
            "does not fit the bytes of the weight", f"a shape of {2 * nbytes} values", list(shape)
        )
    _check_count(layouts, group.members["absmax"], -(-numel // size), numel, size)
    facts = {"blocksize": size, "quant_type": kind}
    if "nested_absmax" in group.members:
        nested = _block_size(state.get("nested_blocksize"))
        offset = state.get("nested_offset")
        is_float32 = isinstance(offset, int | float) and abs(offset) < 2**128
        if nested is None or not is_float32:
            expected = "nested_blocksize and nested_offset"
            refuse("says nothing valid of the nested statistics", expected, sorted(state))
        blocks = group.members["absmax"].numel
        _check_count(layouts, group.members["nested_absmax"], -(-blocks // nested), blocks, nested)
        facts |= {"nested_blocksize": nested, "nested_offset": offset}
    return replace(
        group,
        shape=tuple(shape),
        block=(size,),
        dtype=BY_NAME[state["dtype"]],
        facts=MappingProxyType(facts),
    )


def _block_size(value: object) -> int | None:
    """A number of elements of a block, or None: a power of two that bitsandbytes has."""
    if type(value) is not int or not 0 < value <= _MOST_BLOCK or value & (value - 1):
        return None
    return value


def _check_count(layouts: Layouts, info: TensorInfo, expected: int, numel: int, size: int) -> None:
    if info.shape != (expected,):
        layouts.refuse(
            info.name,
            f"its length is not that of {numel} values in blocks of {size}",
            [expected],
            list(info.shape),
        )


def _int8(layouts: Layouts, name: str) -> Group | None:
    """The group of the scales of a weight of int8, one for each row."""
    module = name.removesuffix("SCB")
    values = layouts.need(f"{module}weight", name, "weight")
    scales = layouts.need(name, values.name, "SCB")
    layouts.check(values, ("I8",))
    if len(values.shape) != 2 and (len(values.shape) != 3 or values.shape[2] != 1):
        layouts.refuse(values.name, "it is no matrix", "two axes", list(values.shape))
    layouts.check(scales, ("F32",), values.shape[:1])
    members = {"weight": values, "SCB": scales}
    form = layouts.find(f"{module}weight_format")
    if form is not None:
        layouts.check(form, ("U8",), (), (1,))
        members["weight_format"] = form
    return Group("bnb-int8", values.name, members, values.shape[:2], (1, values.shape[1]), 8)
