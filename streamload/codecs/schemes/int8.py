"""Eight bits an element, with one scale a row.

"int8": a row is all that one index of the first axis holds. Its scale is its largest magnitude
divided by 127, in float32, and a code is an element divided by the scale, to nearest even, within
127 of zero. A row of zeros has the scale 0 and codes 0; so has a row whose scale float32 cannot
hold. The scale is named and shaped as in the "int-quantized" layout of compressed-tensors
(``weight_scale``, one column), so that ``code * scale`` decodes it there too.

"bitsandbytes-int8": the layout of bitsandbytes 0.50.2 for ``load_in_8bit`` (``weight``, ``SCB``,
``weight_format``), bit for bit. A matrix is rounded to float16 first (`Int8Params._quantize`). The
statistic of a row is its largest magnitude there, and a code is an element times (1 / statistic *
127), to nearest even (`int8_vectorwise_quant` of its default backend, in torch). Where an element
is beyond float16 the statistic is infinite and the codes of its row are 0, as bitsandbytes has
them: such elements are counted as overflowed. On CUDA (`kInt8VectorQuant`) the reciprocal is
approximate (``__fdividef``), at most a step in the last place from the nearest one.

Error: half a step, that is half the scale, and what float32 rounds; in bitsandbytes' layout also
what float16 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from streamload.codecs.cast import NARROW, WIDEN, Vector
from streamload.codecs.encode import Encoded, Units
from streamload.codecs.kernels import Packing, Scalars, magnitude_bits
from streamload.codecs.scheme import Array, Part, check_source, register, stepped
from streamload.core.dtypes import BY_CODE, F32, DType

_I8, _U8 = BY_CODE["I8"], BY_CODE["U8"]
#: Added to a float32 below 2^22 in magnitude, it leaves the nearest integer in the last bits.
_ROUNDER = 1.5 * 2.0**23
_ROUNDER_BITS = 0x4B400000
_INFINITE = 0x7F800000
#: 1 / 127, by which bitsandbytes multiplies when it decodes.
BITSANDBYTES_STEP = np.float32(7.874015718698502e-3)


def nearest(v: Vector, x: str) -> tuple[str, str]:
    """Float32 values below 2^22 to the nearest integers, ties to even: as i32, and as float32."""
    raised = v.op("fadd", "float", x, _ROUNDER)
    bits = v.convert("bitcast", "float", raised, "i32")
    return v.op("sub", "i32", bits, _ROUNDER_BITS), v.op("fsub", "float", raised, _ROUNDER)


@dataclass(frozen=True)
class _Recipe:
    numel = 0
    packing: Packing = "bytes"
    header_nbytes = 0
    signed = False
    goes_through_half = False

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
class _BitsandbytesRecipe:
    approximates: bool = False  # CUDA's own reciprocal
    numel = 0
    packing: Packing = "bytes"
    header_nbytes = 0
    signed = False
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
        return Scalars(
            (one.select(is_usable, "float", factor, 0.0), statistic), statistic=statistic
        )

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        factor, statistic = scalars
        half = _through_half(v, x)
        is_infinite = v.op("icmp eq", "i32", magnitude_bits(v, half), _INFINITE)
        steps = v.op("fmul", "float", v.select(is_infinite, "float", 0.0, half), factor)
        code, value = nearest(v, steps)
        decoded = v.op(
            "fmul", "float", v.op("fmul", "float", value, statistic), float(BITSANDBYTES_STEP)
        )
        return code, decoded


def _through_half(v: Vector, x: str) -> str:
    half = NARROW["F16"](v, v.convert("bitcast", "float", x, "i32"))
    return v.convert("bitcast", "i32", WIDEN["F16"](v, half), "float")


class _Rows(Units):
    """What both layouts share: a unit is a row."""

    has_statistics = True

    @property
    def unit_numel(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a row of codes."""
        return self.unit_numel

    @property
    def device_parts(self) -> tuple[str, ...]:
        """See `Units.device_parts`."""
        return (self.parts[1].suffix,)

    def _rows(self, parts: Mapping[str, Any], scales: str) -> tuple[Array, Array]:
        """The codes as float32, and the statistics, with as many axes."""
        codes = self.part(parts, "").astype(np.float32)
        return codes, self.part(parts, scales).reshape(-1, *(1,) * (len(self.shape) - 1))


class Int8Rows(_Rows):
    """A tensor as "int8"."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The codes, and the scales in a column."""
        return Part("", _I8, self.shape), Part("_scale", F32, (self.shape[0], 1))

    @property
    def recipe(self) -> _Recipe:
        """See `quant.kernels.Recipe`."""
        return _Recipe()

    def encoded(self, x: Array) -> Encoded:
        """See `Units.encoded`."""
        scales = np.abs(x).max(axis=1) / np.float32(127)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = x / np.where(scales == 0, np.float32(np.inf), scales)[:, None]
        codes = np.rint(np.clip(steps, -127, 127))
        return Encoded(codes.astype(np.int8), codes * scales[:, None], scales)

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """See `Quantised.decode`."""
        codes, scales = self._rows(parts, "_scale")
        decoded: Array = codes * scales
        return decoded

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """Half a scale, and roundings of float32: of subnormal scales, and of the product."""
        _, scales = self._rows(parts, "_scale")
        wide = scales.astype(np.float64)
        return wide * (0.5 + 127 * 2.0**-22) + 128 * 2.0**-149


@dataclass(frozen=True)
class BitsandbytesRows(_Rows):
    """A matrix as bitsandbytes' ``Int8Params``.

    Args:
        steps: on CUDA, how far the reciprocal is from the nearest, in the last place.
    """

    steps: int = 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """``weight``, ``SCB`` and ``weight_format``, which says that rows follow each other."""
        return (
            Part("", _I8, self.shape),
            Part("SCB", F32, self.shape[:1], beside=True),
            Part("weight_format", _U8, (), beside=True),
        )

    @property
    def recipe(self) -> _BitsandbytesRecipe:
        """See `quant.kernels.Recipe`."""
        return _BitsandbytesRecipe()

    @property
    def on_cuda(self) -> tuple[BitsandbytesRows, ...]:
        """See `Quantised.on_cuda`."""
        return tuple(replace(self, steps=steps) for steps in (0, -1, 1))

    @property
    def device_recipe(self) -> _BitsandbytesRecipe:
        """See `Units.device_recipe`."""
        return _BitsandbytesRecipe(approximates=True)

    def encoded(self, x: Array) -> Encoded:
        """See `Units.encoded`."""
        with np.errstate(all="ignore"):
            half = x.astype(np.float16)
            statistics = np.abs(half).max(axis=1).astype(np.float32)
            factors = stepped(np.float32(1) / statistics, self.steps) * np.float32(127)
            steps = half.astype(np.float32) * factors[:, None]
            codes = np.rint(np.where(np.isfinite(steps), steps, np.float32(0)))
            decoded = codes * statistics[:, None] * BITSANDBYTES_STEP
        overflowed = int(np.count_nonzero(np.isinf(half)))
        return Encoded(codes.astype(np.int8), decoded, statistics, overflowed)

    def constants(self, offset: float = 0.0) -> dict[str, Array]:
        """See `Units.constants`."""
        return {"weight_format": np.zeros(1, np.uint8)}

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """See `Quantised.decode`; as `int8_vectorwise_dequant` computes it."""
        codes, statistics = self._rows(parts, "SCB")
        with np.errstate(invalid="ignore"):
            decoded: Array = codes * statistics * BITSANDBYTES_STEP
        return decoded

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """Half of 1/127 of the statistic, and the rounding to float16, subnormal or not."""
        _, statistics = self._rows(parts, "SCB")
        wide = statistics.astype(np.float64)
        return wide * (0.5 / 127 + 2.0**-11 + 2.0**-20) + 2.0**-24


@dataclass(frozen=True)
class Int8:
    """A format of this file.

    Attributes:
        name: as users write it.
        layout: "rows" as compressed-tensors has it, or that of bitsandbytes.
    """

    name: str
    layout: Literal["rows", "bitsandbytes"]

    @property
    def turns_conv1d(self) -> bool:
        """See `Format`."""
        return self.layout == "bitsandbytes"

    def of(self, shape: tuple[int, ...], src: DType) -> Int8Rows | BitsandbytesRows:
        """See `Format.of`."""
        check_source(self.name, shape, src)
        if self.layout == "rows":
            if len(shape) < 2:
                raise ValueError(f"{self.name} has a scale a row, and shape {shape} has no rows")
            return Int8Rows(self.name, shape, src)
        if len(shape) != 2:
            raise ValueError(f"{self.name} is of matrices, and shape {shape} is none")
        return BitsandbytesRows(self.name, shape, src)

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any]:
        """See `Format.config`: of transformers 5.23, and of compressed-tensors 0.20."""
        if self.layout == "bitsandbytes":
            return {
                "quant_method": "bitsandbytes",
                "load_in_4bit": False,
                "load_in_8bit": True,
                "llm_int8_threshold": 6.0,
                "llm_int8_has_fp16_weight": False,
                "llm_int8_skip_modules": list(left),
            }
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        group = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left),
        }


register(Int8("int8", "rows"), Int8("bitsandbytes-int8", "bitsandbytes"))
