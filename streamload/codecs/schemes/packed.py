"""Weights packed into words of 32 bits: compressed-tensors, AWQ and GPTQ.

Sources: ``pack_to_int32`` in compressed_tensors/compressors/pack_quantized, version 0.20; the
``QuantLinear`` modules of gptqmodel (``qweight``, ``qzeros``, ``scales``, ``g_idx``), and
``WQLinear_GEMM`` of AutoAWQ.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamload.codecs.scheme import Library
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.tensors import TensorInfo

_WORD_BITS = 32
_FLOATS = ("F16", "BF16", "F32")
_SHAPE_DTYPES = ("I64", "I32")
_AWQ_BITS = 4

#: Formats whose words are in a kernel's order, which cannot be decoded here.
_OF_KERNELS = ("marlin", "bitblas", "gemv", "gemv_fast", "llm-awq", "qqq", "paroquant")

#: Names of other tensors that may belong to a weight of compressed-tensors.
_OTHERS = (
    *("weight_zero_point", "weight_g_idx", "weight_global_scale"),
    *("input_scale", "input_zero_point", "input_global_scale"),
)


def _find(layouts: Layouts, info: TensorInfo) -> QuantizedWeight | None:
    """Return the weight whose packed values a tensor holds, or None."""
    if info.name.endswith("weight_packed"):
        return _compressed(layouts, info.name.removesuffix("weight_packed"))
    return _by_columns(layouts, info.name.removesuffix("qweight"))


def _compressed(layouts: Layouts, module: str) -> QuantizedWeight | None:
    """Return a module's weight of compressed-tensors; None if its layout is unknown.

    The shape of a weight of int32 words is None until `_with_shape` adds it.
    """
    values = layouts.need(f"{module}weight_packed", module, "weight")
    if values.dtype.code not in ("I32", "U8") or layouts.find(f"{module}scale_packed"):
        return None  # marlin-24, for one
    if len(values.shape) != 2:
        layouts.refuse(values.name, "it is no matrix", "two axes", list(values.shape))
    members = {"weight": values}
    scale = layouts.need(f"{module}weight_scale", values.name, "scale")
    members["scale"] = scale
    shape = layouts.find(f"{module}weight_shape")
    if values.dtype.code == "I32":
        shape = layouts.need(f"{module}weight_shape", values.name, "weight_shape")
    if shape is not None:
        layouts.check(shape, _SHAPE_DTYPES, (2,))
        members["shape"] = shape
    for leaf in _OTHERS:
        if (info := layouts.find(module + leaf)) is not None:
            members[leaf.removeprefix("weight_")] = info
    if values.dtype.code == "U8":  # two floats of 4 bits in a byte: nvfp4, mxfp4
        rows, width = values.shape[0], 2 * values.shape[1]
        layouts.check(scale, ("F8_E4M3", "F8_E8M0", "U8"))
        block = _groups_of(layouts, values, scale, rows, width)
        return QuantizedWeight("ct-fp4", f"{module}weight", members, (rows, width), (1, block), 4)
    layouts.check(scale, _FLOATS)
    bits = _stated_bits(layouts) or 0
    return QuantizedWeight("ct-packed", f"{module}weight", members, None, (), bits)


def _with_shape(layouts: Layouts, weight: QuantizedWeight, data: bytes) -> QuantizedWeight:
    """Return the weight with the shape that weight_shape holds, checked against the headers."""
    values, info = weight.values, weight.members["shape"]
    found, name = np.frombuffer(data, info.dtype.numpy).tolist(), info.name
    rows, words = values.shape
    width = found[1]
    bits = (weight.bits or _WORD_BITS * words // width) if width > 0 else 0
    fits = 0 < bits <= 8 and words in (
        -(-width // (_WORD_BITS // bits)),  # whole values in each word
        -(-width * bits // _WORD_BITS),
    )
    if found[0] != rows or not fits:
        bits_text = f" of {bits} bits" if bits else ""
        layouts.refuse(
            name,
            "its values do not fit the packed weight",
            f"{rows} rows of values{bits_text} in {words} words",
            found,
        )
    block = _groups_of(layouts, values, weight.members["scale"], rows, width)
    if (zeros := weight.members.get("zero_point")) is not None:
        groups = width // block
        packed = -(-rows * bits // _WORD_BITS), -(-rows // (_WORD_BITS // bits))
        layouts.check(zeros, ("I32", "I8"), *[(n, groups) for n in (*packed, rows)])
    if (order := weight.members.get("g_idx")) is not None:
        layouts.check(order, ("I32", "I64"), (width,))
    return replace(weight, shape=(rows, width), block=(1, block), bits=bits)


def _stated_bits(layouts: Layouts) -> int | None:
    """Return the bits of packed values if ``config.json`` states one number for all, else None."""
    stated = (each for each in layouts.stated_weights() if each.get("type", "int") == "int")
    found = {each.get("num_bits") for each in stated}
    bits = found.pop() if len(found) == 1 else None
    return bits if type(bits) is int and 0 < bits <= 8 else None


def _groups_of(
    layouts: Layouts, values: TensorInfo, scale: TensorInfo, rows: int, width: int
) -> int:
    """Return how many values of a row share a scale."""
    if scale.numel == 1:
        return width
    if len(scale.shape) != 2 or scale.shape[0] != rows or not scale.shape[1]:
        layouts.refuse_shape(scale, f"[{rows}, groups of the {width} values of a row]")
    size, rest = divmod(width, scale.shape[1])
    if rest or not size:
        layouts.refuse(
            scale.name,
            f"its groups do not divide the {width} values of a row of {values.name}",
            f"a divisor of {width}",
            scale.shape[1],
        )
    return size


def _by_columns(layouts: Layouts, module: str) -> QuantizedWeight | None:
    """Return a weight of AWQ or GPTQ, stored with the inputs along its first axis, or None."""
    values = layouts.need(f"{module}qweight", module, "weight")
    stated = [layouts.quantization.get(key) for key in ("checkpoint_format", "format", "version")]
    others = [layouts.find(module + leaf) for leaf in ("scales", "qzeros", "g_idx")]
    known = any(others) or layouts.method in ("awq", "gptq")
    if values.dtype.code != "I32" or not known or any(str(s) in _OF_KERNELS for s in stated):
        return None
    if len(values.shape) != 2:
        layouts.refuse(values.name, "it is no matrix", "two axes", list(values.shape))
    scales = layouts.need(f"{module}scales", values.name, "scale")
    zeros = layouts.need(f"{module}qzeros", values.name, "zero point")
    members = {"weight": values, "scale": scales, "zero_point": zeros}
    order = layouts.find(f"{module}g_idx")
    layouts.check(scales, _FLOATS)
    layouts.check(zeros, ("I32",))
    if len(scales.shape) != 2 or len(zeros.shape) != 2 or zeros.shape[0] != scales.shape[0]:
        layouts.refuse_shape(zeros, f"a row for each of {scales.name} ({list(scales.shape)})")
    groups, outputs = scales.shape
    awq = order is None and values.shape[1] != outputs
    bits = _AWQ_BITS if awq else _WORD_BITS * zeros.shape[1] // max(outputs, 1)
    inputs = values.shape[0] if awq else _WORD_BITS * values.shape[0] // max(bits, 1)
    words = -(-outputs * bits // _WORD_BITS)
    fits = values.shape[1] == (words if awq else outputs) and zeros.shape[1] == words
    if not fits or not 0 < bits <= 8:
        layouts.refuse(
            values.name,
            "the shapes of a packed weight, its scales and its zero points do not go together",
            f"those of {outputs} outputs",
            f"qweight {list(values.shape)}, qzeros {list(zeros.shape)}",
        )
    stated_bits = layouts.quantization.get("bits")
    of_each = layouts.quantization.get("dynamic") or layouts.quantization.get("extra_config")
    if type(stated_bits) is int and stated_bits != bits and not of_each:
        layouts.refuse(
            values.name, "it is not of the bits of quantization_config", stated_bits, bits
        )
    size, rest = divmod(inputs, max(groups, 1))
    if order is not None:
        layouts.check(order, ("I32", "I64"), (inputs,))
        members["g_idx"] = order
        if rest:  # the last group may be shorter: each input has its own
            size, rest = -(-inputs // groups), 0
    if rest or not size:
        layouts.refuse(
            scales.name, f"its groups do not divide {inputs} inputs", "a divisor", groups
        )
    kind = "awq" if awq else "gptq"
    return QuantizedWeight(kind, f"{module}weight", members, (outputs, inputs), (1, size), bits)


LIBRARY = Library(
    find=_find,
    complete={"shape": _with_shape},
)
