"""bitsandbytes' 8-bit layout, of ``load_in_8bit``: ``weight``, ``SCB`` and ``weight_format``.

Encoding is that of bitsandbytes 0.50.2, bit for bit. A matrix is rounded to float16 first
(`Int8Params._quantize`). The statistic of a row is its largest magnitude there, and a code is an
element times (1 / statistic * 127), to nearest even (`int8_vectorwise_quant` of its default
backend, in torch). If an element is beyond float16 the statistic is infinite and the codes of its
row are 0, as bitsandbytes has them: such elements are counted as overflowed. On CUDA
(`kInt8VectorQuant`) the reciprocal is approximate (``__fdividef``), at most a step in the last
place from the nearest one.

Decoding: `int8_vectorwise_dequant` multiplies codes by ``SCB`` and by 1/127 in float32, rounded
twice there and then to the target. Here ``SCB`` / 127 is rounded to float32, so that float32
elements differ by at most 2 units in the last place, and 16-bit ones if that is enough for the
neighbour.

Recognition follows ``Linear8bitLt._save_to_state_dict`` in bitsandbytes/nn/modules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamload.codecs.decode import Weight, by_blocks, floats
from streamload.codecs.encode import Encoded
from streamload.codecs.encode_kernels import Recipe, Scalars
from streamload.codecs.ir import NARROW, WIDEN, Vector, magnitude_bits
from streamload.codecs.parts import Array, Part, check_source, stepped
from streamload.codecs.product import Form
from streamload.codecs.scheme import Library, Quantized, Read
from streamload.codecs.schemes.scaled import Int8, Int8Values, nearest
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.dtypes import BY_CODE, F32, PACKED, DType
from streamload.core.tensors import TensorInfo
from streamload.errors import CheckpointError

_U8 = BY_CODE["U8"]
_INFINITE = 0x7F800000
#: 1 / 127, by which bitsandbytes multiplies when it decodes.
STEP = np.float32(7.874015718698502e-3)


@dataclass(frozen=True)
class _Recipe(Recipe):
    approximates: bool = False  # takes the GPU's approximate reciprocal
    numel = 0
    goes_through_half = True

    def scalars(self, one: Vector, largest: str) -> Scalars:
        statistic = _through_half(one, largest)
        if self.approximates:
            inverse = one.emit(f"call float @llvm.nvvm.rcp.approx.ftz.f(float {statistic})")
        else:
            inverse = one.op("fdiv", "float", 1.0, statistic)
        factor = one.op("fmul", "float", inverse, 127.0)
        bits = magnitude_bits(one, statistic)
        is_usable = one.op("icmp ult", "i32", one.op("sub", "i32", bits, 1), _INFINITE - 1)
        factor = one.select(is_usable, "float", factor, 0.0)
        return Scalars((factor, statistic), statistic=statistic)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        factor, statistic = scalars
        half = _through_half(v, x)
        is_infinite = v.op("icmp eq", "i32", magnitude_bits(v, half), _INFINITE)
        steps = v.op("fmul", "float", v.select(is_infinite, "float", 0.0, half), factor)
        code, value = nearest(v, steps)
        decoded = v.op("fmul", "float", v.op("fmul", "float", value, statistic), float(STEP))
        return code, decoded


def _through_half(v: Vector, x: str) -> str:
    """Write IR that rounds float32 values to float16, and widens them again; return its name."""
    half = NARROW["F16"](v, v.as_bits(x))
    return v.as_float(WIDEN["F16"](v, half))


class _Int8(Int8):
    """bitsandbytes' ``load_in_8bit``, the bytes of its ``Int8Params``.

    Args:
        steps: units in the last place by which CUDA's reciprocal differs from the nearest one.
    """

    name, kind = "bitsandbytes-int8", "bnb-int8"
    dtype = PACKED[kind]
    of_linears = True
    device_parts = ("SCB",)
    recipe, device_recipe = _Recipe(), _Recipe(approximates=True)

    def __init__(self, steps: int = 0) -> None:
        self._steps = steps

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        check_source(self.name, shape, src)
        if len(shape) != 2:
            raise ValueError(f"{self.name} is of matrices, and shape {shape} is none")
        scales = Part("SCB", F32, shape[:1], is_sibling=True)
        return self.by_rows(shape, src, scales, Part("weight_format", _U8, (), is_sibling=True))

    @property
    def on_cuda(self) -> tuple[_Int8, ...]:
        return tuple(map(_Int8, (0, -1, 1)))

    def encoded(self, x: Array) -> Encoded:
        with np.errstate(all="ignore"):
            half = x.astype(np.float16)
            statistics = np.abs(half).max(axis=1).astype(np.float32)
            factors = stepped(np.float32(1) / statistics, self._steps) * np.float32(127)
            steps = half.astype(np.float32) * factors[:, None]
            codes = np.rint(np.where(np.isfinite(steps), steps, np.float32(0)))
            decoded = codes * statistics[:, None] * STEP
        overflowed = int(np.count_nonzero(np.isinf(half)))
        return Encoded(codes.astype(np.int8), decoded, statistics, overflowed)

    def constants(self, tensor: Quantized, offset: float = 0.0) -> dict[str, Array]:
        return {"weight_format": np.zeros(1, np.uint8)}

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": False,
            "load_in_8bit": True,
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(left),
        }

    def form(self, detail: str) -> Form:
        return Form(Int8Values(), (("scales", "SCB"),), factor=float(STEP))

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        form = weight.members.get("weight_format")
        if form is not None and any(found := read(form)):
            problem = "the rows of the weight do not follow each other"
            raise CheckpointError(form.shard, problem, [0], list(found), tensor=form.name)
        scb = weight.members["SCB"]
        scales = floats(scb, read(scb)).astype(np.float64) * np.float64(STEP)
        weight = replace(weight, members={"weight": weight.values, "scale": scb})
        return by_blocks(weight, self.values(weight), scales.astype(np.float32))


def _find(layouts: Layouts, info: TensorInfo) -> QuantizedWeight | None:
    """Return the weight whose scales, one for each row, a tensor holds."""
    module = info.name.removesuffix("SCB")
    values = layouts.need(f"{module}weight", info.name, "weight")
    layouts.check(values, ("I8",))
    if len(values.shape) != 2 and (len(values.shape) != 3 or values.shape[2] != 1):
        layouts.refuse(values.name, "it is no matrix", "two axes", list(values.shape))
    layouts.check(info, ("F32",), values.shape[:1])
    members = {"weight": values, "SCB": info}
    form = layouts.find(f"{module}weight_format")
    if form is not None:
        layouts.check(form, ("U8",), (), (1,))
        members["weight_format"] = form
    return QuantizedWeight(
        "bnb-int8", values.name, members, values.shape[:2], (1, values.shape[1]), 8
    )


LIBRARY = Library(_Int8(), find=_find)
