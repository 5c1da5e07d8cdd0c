"""Weights of 8 bits with scales in separate tensors: int8 and FP8.

The scheme "int8": a row is all elements of one index of the first axis. Its scale is its
largest magnitude divided by 127, in float32, and a code is an element divided by the scale, to
nearest even, within 127 of zero. A row of zeros has the scale 0 and codes 0; so has a row whose
scale float32 cannot hold. The scale is named and shaped as in the "int-quantized" layout of
compressed-tensors (``weight_scale``, one column), so that ``code * scale`` decodes it there too.

Sources: ``FP8Linear`` and ``Fp8Dequantize`` in transformers/integrations/finegrained_fp8.py
(``weight_scale_inv``, blocks), by which values are multiplied; compressed-tensors' int-quantized
and float-quantized formats (``weight_scale``) and ``dequantize`` in
compressed_tensors/quantization/lifecycle/forward.py, version 0.20: values less zero points, times
the scale, in the scale's dtype. If that is the target, the one rounding is the same; libraries that
multiply in float32 and then round to the target may return the adjacent value if the float32
product is a midpoint of the target, or a value of the target that the exact product is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.codecs.decode import ScaledLayout, Weight, by_blocks, floats
from streamload.codecs.decode_kernels import Values
from streamload.codecs.encode import Encoded, Units
from streamload.codecs.encode_kernels import Recipe, Scalars
from streamload.codecs.floats import FLOATS
from streamload.codecs.ir import WIDEN, Vector
from streamload.codecs.parts import Array, Part, check_source
from streamload.codecs.product import Form, Formed
from streamload.codecs.scheme import Library, Quantized, Read
from streamload.codecs.weights import Layouts, QuantizedWeight, scale_beside
from streamload.core.dtypes import BY_CODE, F32, PACKED, DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError

#: Added to a float32 below 2^22 in magnitude, it leaves the nearest integer in the last bits.
_ROUNDER = 1.5 * 2.0**23
_ROUNDER_BITS = 0x4B400000
_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
#: Values of quant_method whose 8-bit weights must have scales.
_SCALED_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8")
_USUAL_BLOCK = 128
#: Names of other tensors that may belong to a weight.
_OTHERS = (
    *("weight_zero_point", "weight_scale_2", "weight_global_scale", "weight_g_idx"),
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale"),
)


def nearest(v: Vector, x: str) -> tuple[str, str]:
    """Write IR that rounds float32 values below 2^22, ties to even; return i32s and float32s."""
    raised = v.op("fadd", "float", x, _ROUNDER)
    bits = v.as_bits(raised)
    return v.op("sub", "i32", bits, _ROUNDER_BITS), v.op("fsub", "float", raised, _ROUNDER)


@dataclass(frozen=True)
class _Recipe(Recipe):
    numel = 0

    def scalars(self, one: Vector, largest: str) -> Scalars:
        scale = one.op("fdiv", "float", largest, 127.0)
        is_zero = one.op("fcmp oeq", "float", scale, 0.0)
        divisor = one.select(is_zero, "float", math.inf, scale)
        return Scalars((divisor, scale), statistic=scale)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        divisor, scale = scalars
        steps = v.op("fdiv", "float", x, divisor)
        for compare, most in (("fcmp ogt", 127.0), ("fcmp olt", -127.0)):
            steps = v.select(v.op(compare, "float", steps, most), "float", most, steps)
        code, value = nearest(v, steps)
        return code, v.op("fmul", "float", value, scale)


@dataclass(frozen=True)
class Int8Values(Values):
    """Signed integers of 8 bits, with or without zero points."""

    has_zeros: bool = False
    name = "int8"
    significant_bits = 8

    def instructions(self, v: Vector, codes: str) -> str:
        """Write LLVM IR from bytes to float32; see `Values.instructions`."""
        return v.convert("sitofp", "i8", codes, "float")

    def decoded(self, codes: Array, table: Array) -> Array:
        """Return bytes as float32; see `Values.decoded`."""
        return codes.view(np.int8).astype(np.float32)


class Int8(ScaledLayout, Units, Formed):
    """Signed bytes with float scales, and zero points if there are any.

    Encoded, it is compressed-tensors' int-quantized layout.
    """

    name = kind = "int8"
    dtype = PACKED["int8"]
    has_statistics = True
    device_parts = ("_scale",)
    other_roles = ("scale_2", "global_scale", "g_idx")
    recipe: Recipe = _Recipe()

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return the rows of a tensor, each with a scale; see `Codec.of`."""
        check_source(self.name, shape, src)
        if len(shape) < 2:
            raise ValueError(f"{self.name} has a scale a row, and shape {shape} has no rows")
        return self.by_rows(shape, src, Part("_scale", F32, (shape[0], 1)))

    def by_rows(self, shape: tuple[int, ...], src: DType, *parts: Part) -> Quantized:
        """Return a tensor whose units are rows of bytes; ``parts``: all but the codes."""
        width = math.prod(shape[1:])
        return Quantized(self, shape, src, (Part("", BY_CODE["I8"], shape), *parts), width, width)

    def encoded(self, x: Array) -> Encoded:
        """Quantize rows in numpy; see `Units.encoded`."""
        scales = np.abs(x).max(axis=1) / np.float32(127)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = x / np.where(scales == 0, np.float32(np.inf), scales)[:, None]
        codes = np.rint(np.clip(steps, -127, 127))
        return Encoded(codes.astype(np.int8), codes * scales[:, None], scales)

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any]:
        """Return compressed-tensors' settings; see `Codec.config`."""
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        group = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left),
        }

    def form(self, detail: str) -> Form:
        """Return how products read it; see `Formed.form`."""
        return Form(Int8Values(), (("scales", "_scale"),))

    def values(self, weight: QuantizedWeight) -> Values:
        """Return int8 storage, with zero points if the weight has a tensor of them."""
        return Int8Values(has_zeros="zero_point" in weight.members)

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        """Read scales and zero points of a weight; raise CheckpointError if they are invalid."""
        scale, zero = weight.members["scale"], weight.members.get("zero_point")
        scales = floats(scale, read(scale))
        if zero is None:
            return by_blocks(weight, self.values(weight), scales)
        zeros = np.frombuffer(read(zero), zero.dtype.numpy)
        least, most = int(zeros.min(initial=0)), int(zeros.max(initial=0))
        if least < -128 or most > 127:
            problem = "a zero point is no number of 8 bits"
            found = f"{least} to {most}"
            raise CheckpointError(zero.shard, problem, "-128 to 127", found, tensor=zero.name)
        return by_blocks(weight, self.values(weight), scales, zeros.astype(np.float32))


@dataclass(frozen=True)
class _FP8Values(Values):
    """Floats of 8 bits; ``code`` is their dtype's safetensors code."""

    code: str
    significant_bits: int
    exponents: bool = False
    has_nan: bool = False
    name = "fp8"

    def instructions(self, v: Vector, codes: str) -> str:
        return v.as_float(WIDEN[self.code](v, codes))

    def decoded(self, codes: Array, table: Array) -> Array:
        found: Array = codes.view(BY_CODE[self.code].numpy).astype(np.float32)
        return found


class _FP8Layout(ScaledLayout, Formed):
    name = kind = "fp8"
    dtype = PACKED["fp8"]
    other_roles = ("scale_2", "global_scale", "zero_point")

    def refused(self, weight: QuantizedWeight) -> str:
        if weight.values.dtype.code not in FLOATS:
            return f"{weight.values.dtype.name} is only passed unchanged"
        return super().refused(weight)

    def values(self, weight: QuantizedWeight) -> Values:
        code = weight.values.dtype.code
        return _FP8Values(code, FLOATS[code].mantissa_bits + 1)

    def form(self, detail: str) -> Form:
        """Return the form of "values:scales:tall:wide": codes of dtypes, and `Form`'s sizes."""
        code, scale, tall, wide = detail.split(":")
        is_float = scale == F32.code
        values = _FP8Values(
            code, FLOATS[code].mantissa_bits + 1, not is_float, has_nan=scale == "F8_E8M0"
        )
        return Form(values, (("scales", "_scale"),), int(wide), tall=int(tall))


# --- recognizing ---


def _find(layouts: Layouts, info: TensorInfo) -> QuantizedWeight | None:
    """Return the weight of which a tensor is the int8 scale or the FP8 values, else None."""
    if info.name.endswith("weight_scale"):
        values = layouts.find(info.name.removesuffix("_scale"))
        if values is None or values.dtype.code != "I8" or not values.shape:
            return None
        return _scaled(layouts, values, info, "int8")
    is_weight = info.name.endswith(".weight")
    expected = f"{info.name}_scale"
    is_compressed = info.dtype.code == "I8" and layouts.method == "compressed-tensors"
    if is_compressed and is_weight and layouts.find(expected) is None:
        layouts.refuse(info.name, "its scale is missing", expected, "no such tensor")
    if info.dtype.code not in _FP8 or not info.shape or info.name.endswith("_scale"):
        return None
    scale = scale_beside(layouts, info.name)
    if scale is None:
        if is_weight and layouts.method in _SCALED_METHODS:
            layouts.refuse(info.name, "its scale is missing", expected, "no such tensor")
        return None
    return _scaled(layouts, info, layouts.tensors[scale], "fp8")


def _scaled(layouts: Layouts, values: TensorInfo, scale: TensorInfo, kind: str) -> QuantizedWeight:
    """Return the weight with these values and this scale, and its other tensors, checked."""
    layouts.check(scale, _SCALE_DTYPES)
    block = _block(layouts, values, scale)
    members = {"weight": values, "scale": scale}
    module = values.name[: values.name.rfind(".") + 1]
    if values.name == f"{module}weight":
        for leaf in _OTHERS:
            info = layouts.find(module + leaf)
            if info is not None and info is not scale:
                members[leaf.removeprefix("weight_")] = info
    if (zeros := members.get("zero_point")) is not None:
        layouts.check(zeros, ("I8", "I32", values.dtype.code), scale.shape)
    return QuantizedWeight(kind, values.name, members, values.shape, block, 8)


def _block(layouts: Layouts, values: TensorInfo, scale: TensorInfo) -> tuple[int, ...]:
    """Return how many rows and columns share a scale, from the shapes of values and scale."""
    *outer, columns = values.shape
    rows = outer.pop() if outer else 1
    lead = tuple(outer)
    if scale.numel == 1:
        return (rows, columns)
    found = scale.shape
    if found[: len(lead)] == lead and all(n == 1 for n in found[len(lead) :]):
        return (rows, columns)  # one for each matrix of a stack
    grid = found[len(lead) :] if found[: len(lead)] == lead else ()
    stated = _stated_blocks(layouts)
    # stated sizes first: blocks of 128 in 64 x 8192 are a grid of 1 x 64, as one scale a row
    if (block := _fitting(stated, rows, columns, grid)) is not None:
        return block
    if grid in ((rows,), (1, rows)):
        return (1, columns)
    if len(grid) == 2:
        sizes = stated or [(_USUAL_BLOCK, _USUAL_BLOCK)]
        if (block := _fitting(sizes, rows, columns, grid)) is not None:
            return block
        even = all(n and not whole % n for n, whole in zip(grid, (rows, columns), strict=True))
        if even and not stated:
            return (rows // grid[0], columns // grid[1])
        if grid[0] == rows and grid[1] and not columns % grid[1]:
            return (1, columns // grid[1])
        layouts.refuse(
            scale.name,
            f"its blocks do not divide {values.name} ({list(values.shape)})",
            f"blocks of {' or '.join(f'{a} x {b}' for a, b in sizes)}",
            list(found),
        )
    each = f"one for all of {values.name} ({list(values.shape)}), for each row or each block"
    layouts.refuse_shape(scale, each)


def _fitting(
    sizes: Sequence[tuple[int, int]], rows: int, columns: int, grid: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the first block size that cuts a matrix into ``grid``, or None; at most the matrix."""
    for tall, wide in sizes:
        if grid == (-(-rows // tall), -(-columns // wide)):
            return (min(tall, rows), min(wide, columns))
    return None


def _stated_blocks(layouts: Layouts) -> list[tuple[int, int]]:
    """Return the (rows, columns) of blocks that ``config.json`` states."""
    stated = [layouts.quantization.get("weight_block_size")]
    stated += [weights.get("block_structure") for weights in layouts.stated_weights()]
    return [
        (size[0], size[1])
        for size in stated
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ]


LIBRARY = Library(Int8(), _FP8Layout(), find=_find)
