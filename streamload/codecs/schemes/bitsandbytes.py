"""bitsandbytes' 4-bit layout: nf4 and fp4, blocks of 64 elements, nested statistics or not.

Layout: codes two a byte, the first in the high bits, as a column; a float32 absmax a block; the
map of the 16 values; JSON with the rest (`QuantState.as_dict(packed=True)`). Nested ("-nested"
after the name; transformers' ``bnb_4bit_use_double_quant``), the absmax less their mean are bytes
of the 8-bit dynamic type (`quant.dynamic`), and the mean is in the JSON. The JSON is padded with
spaces then: its length is planned before the mean is known.

Arithmetic, bit for bit that of bitsandbytes 0.50.2 on a CPU (`quantize_4bit` of its default
backend, in torch): an element is multiplied by 1 / absmax (absmax at least 1e-38 there) in float32,
and its rank is the number of midpoints between values that are less. A short last block is divided
by absmax instead, which is stored as at least 1e-38. A block of zeros has absmax 0 and the code of
0; an odd last code is that of 0. fp4 has the code 8, another zero, for what is above 0 and rounds
to 0. The mean is rounded once here; torch's is a float32 sum, which depends on its threads, and
lies within a unit in the last place for weights.

On CUDA (`kQuantizeBlockwise`, csrc/kernels.cu, compiled with ``--use_fast_math``) subnormals are
zeros, 1 / absmax is ``rcp.approx.ftz``, short blocks are as others, fp4's midpoints are constants
of six digits and its ties go to zero on both sides, and in a block of zeros every code is 0. The
arithmetic "cuda" does that; on the host its reciprocal is the nearest, on CUDA the device's own,
which is at most a step in the last place from it (PTX ISA, "rcp.approx.ftz.f32": 1 ulp).

Error: half the widest gap between values, times absmax; nested, also that of absmax itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.encode import Encoded, Units
from streamload.codecs.kernels import Packing, Scalars, magnitude_bits
from streamload.codecs.scheme import (
    Arithmetic,
    Array,
    Part,
    check_source,
    flushed,
    register,
    stepped,
)
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.core.dtypes import BY_CODE, F32, DType

Kind = Literal["nf4", "fp4"]

#: Blocks that bitsandbytes has.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: Values by code.
VALUES: Mapping[Kind, tuple[float, ...]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(
        float(np.float32(sign * value) / np.float32(12)) + 0.0  # both zeros are positive
        for sign in (1, -1)
        for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
    ),
}
#: Codes by rank of their values, as torch sorts them.
_ORDER: Mapping[Kind, tuple[int, ...]] = {
    "nf4": tuple(range(16)),
    "fp4": (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3),
}
#: What a magnitude exceeds on CUDA, for fp4's codes 1, 6, 7, 4, 5, 2 and 3.
_FP4_CUDA = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)
_LEAST = float(np.float32(1e-38))
_NORMAL = 2.0**-126  # the least magnitude that CUDA's arithmetic keeps
_JSON_FLOAT = 25  # characters that a float takes at most


@dataclass(frozen=True)
class _Ranks:
    """How scaled elements become codes, by their rank among 15 bounds.

    Attributes:
        bounds: 15, ascending; an element's rank is how many are less.
        order: codes by rank.
        values: by rank.
    """

    bounds: tuple[float, ...]
    order: tuple[int, ...]
    values: tuple[float, ...]


def _ranks(kind: Kind, arithmetic: Arithmetic) -> _Ranks:
    values = np.array(VALUES[kind], np.float32)
    order = _ORDER[kind]
    if kind == "fp4" and arithmetic == "cuda":
        order = (*order[:6], 9, 8, *order[7:8], *order[9:])
        above = np.array(_FP4_CUDA, np.float32)
        below = np.nextafter(-above[::-1], np.float32(-1))  # a tie goes to zero
        bounds = np.concatenate([below, [np.float32(-_NORMAL / 2)], above])
    else:
        ranked = values[list(order)]
        bounds = (ranked[:-1] + ranked[1:]) / np.float32(2)
    return _Ranks(tuple(bounds.tolist()), order, tuple(values[list(order)].tolist()))


@dataclass(frozen=True)
class _Recipe:
    kind: Kind
    numel: int
    arithmetic: Arithmetic
    approximates: bool = False  # CUDA's own reciprocal
    packing: Packing = "pairs"
    header_nbytes = 0
    signed = False
    goes_through_half = False

    def scalars(self, one: Vector, largest: str) -> Scalars:
        if self.arithmetic == "cpu":
            is_less = one.op("fcmp olt", "float", largest, _LEAST)
            divisor = one.select(is_less, "float", _LEAST, largest)
            return Scalars((one.op("fdiv", "float", 1.0, divisor), largest), statistic=largest)
        largest = flushed_ir(one, largest)
        if self.approximates:
            inverse = one.emit(f"call float @llvm.nvvm.rcp.approx.ftz.f(float {largest})")
        else:
            inverse = flushed_ir(one, one.op("fdiv", "float", 1.0, largest))
        # where all is zero, zero times infinity is NaN, and above no bound
        is_zero = one.op("fcmp oeq", "float", largest, 0.0)
        zero = -1.0 if self.kind == "nf4" else 0.0
        return Scalars(
            (
                one.select(is_zero, "float", 0.0, inverse),
                largest,
                one.select(is_zero, "float", zero, 0.0),
            ),
            statistic=largest,
        )

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        inverse, largest, *shift = scalars
        if shift:  # CUDA's
            scaled = flushed_ir(v, v.op("fmul", "float", flushed_ir(v, x), inverse))
            scaled = v.op("fadd", "float", scaled, shift[0])
        else:
            scaled = v.op("fmul", "float", x, inverse)
        ranks = _ranks(self.kind, self.arithmetic)
        masks: list[str] = []
        for level in range(4):
            some = ranks.bounds[2 ** (3 - level) - 1 :: 2 ** (4 - level)]
            bound = _chosen(v, "float", masks, some)
            masks.append(v.op("fcmp ogt", "float", scaled, bound))
        value = _chosen(v, "float", masks, ranks.values)
        return _code(v, masks, ranks.order), v.op("fmul", "float", value, largest)


def _code(v: Vector, masks: Sequence[str], order: tuple[int, ...]) -> str:
    """A code by the bits of its rank, from the highest on."""
    if order != tuple(range(16)):
        return str(_chosen(v, "i32", masks, order))
    bits = [v.select(mask, "i32", 8 >> index, 0) for index, mask in enumerate(masks)]
    return v.op("or", "i32", v.op("or", "i32", *bits[:2]), v.op("or", "i32", *bits[2:]))


def _chosen(
    v: Vector, scalar: str, masks: Sequence[str], values: Sequence[float | str]
) -> float | str:
    """One of 2^n values by the bits of its index, from the highest on."""
    some = list(values)
    for mask in reversed(masks):
        some = [
            v.select(mask, scalar, high, low)
            for low, high in zip(some[::2], some[1::2], strict=True)
        ]
    return some[0]


def flushed_ir(v: Vector, x: str) -> str:
    """Subnormal float32 values become zeros of their sign."""
    is_normal = v.op("icmp uge", "i32", magnitude_bits(v, x), 1 << 23)
    bits = v.convert("bitcast", "float", x, "i32")
    sign = v.op("and", "i32", bits, -(1 << 31))
    return v.convert("bitcast", "i32", v.select(is_normal, "i32", bits, sign), "float")


@dataclass(frozen=True)
class FourBitBlocks(Units):
    """A tensor as nf4 or fp4.

    Args:
        kind: the 16 values.
        block: elements of a block.
        nested: whether absmax are quantised as well.
        arithmetic: the device to compute like.
        steps: of CUDA's arithmetic, how far its reciprocal is from the nearest, in the last place.
    """

    kind: Kind
    block: int
    nested: bool
    arithmetic: Arithmetic
    steps: int = 0

    has_statistics = True

    @property
    def unit_numel(self) -> int:
        """Elements of a block."""
        return self.block

    @property
    def unit_nbytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block // 2

    @property
    def on_cuda(self) -> tuple[FourBitBlocks, ...]:
        """See `Quantised.on_cuda`."""
        return tuple(replace(self, arithmetic="cuda", steps=steps) for steps in (0, -1, 1))

    @property
    def _state(self) -> str:
        return f".quant_state.bitsandbytes__{self.kind}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those of a state dict that transformers saved."""
        u8 = BY_CODE["U8"]
        maps = Part(".quant_map", F32, (16,))
        state = Part(self._state, u8, (self._state_nbytes,))
        codes = Part("", u8, (-(-self.numel // 2), 1))
        if not self.nested:
            return codes, Part(".absmax", F32, (self.units,)), maps, state
        return (
            codes,
            Part(".absmax", u8, (self.units,)),
            maps,
            Part(".nested_absmax", F32, (-(-self.units // dynamic.BLOCK),)),
            Part(".nested_quant_map", F32, (256,)),
            state,
        )

    @property
    def device_parts(self) -> tuple[str, ...]:
        """See `Units.device_parts`; nested, absmax are quantised when all are there."""
        return (".absmax", ".nested_absmax") if self.nested else (".absmax",)

    @property
    def recipe(self) -> _Recipe:
        """See `quant.kernels.Recipe`."""
        return _Recipe(self.kind, self.block, self.arithmetic)

    @property
    def device_recipe(self) -> _Recipe:
        """See `Units.device_recipe`: CUDA's arithmetic, with its reciprocal."""
        return _Recipe(self.kind, self.block, "cuda", approximates=True)

    @property
    def _state_nbytes(self) -> int:
        return len(self._state_json(0.0)) + (_JSON_FLOAT - len("0.0") if self.nested else 0)

    def _state_json(self, offset: float) -> bytes:
        state: dict[str, Any] = {
            "quant_type": self.kind,
            "blocksize": self.block,
            "dtype": self.dtype.name,
            "shape": self.shape,
        }
        if self.nested:
            state |= {
                "nested_blocksize": dynamic.BLOCK,
                "nested_dtype": "float32",
                "nested_offset": offset,
            }
        return json.dumps(state).encode()

    def encoded(self, x: Array) -> Encoded:
        """See `Units.encoded`."""
        ranks = _ranks(self.kind, self.arithmetic)
        scaled, absmax = (self._scaled_cpu if self.arithmetic == "cpu" else self._scaled_cuda)(x)
        rank = np.searchsorted(np.array(ranks.bounds, np.float32), scaled, side="left")
        codes = np.array(ranks.order, np.uint8)[rank]
        decoded = np.array(ranks.values, np.float32)[rank] * absmax[:, None]
        if codes.shape[1] % 2:
            zero = int(np.searchsorted(np.array(ranks.bounds), 0.0, side="left"))
            if self.arithmetic == "cuda" and self.kind == "nf4" and absmax[-1] == 0:
                zero = 0
            codes = np.pad(codes, ((0, 0), (0, 1)), constant_values=ranks.order[zero])
        return Encoded(codes[:, ::2] << 4 | codes[:, 1::2], decoded, absmax)

    def _scaled_cpu(self, x: Array) -> tuple[Array, Array]:
        absmax = np.abs(x).max(axis=1)
        divisor = np.maximum(absmax, np.float32(_LEAST))
        if x.shape[1] < self.block:
            return x / divisor[:, None], divisor
        return x * (np.float32(1) / divisor)[:, None], absmax

    def _scaled_cuda(self, x: Array) -> tuple[Array, Array]:
        x = flushed(x)
        absmax = np.abs(x).max(axis=1)
        with np.errstate(divide="ignore"):
            inverse = flushed(stepped(np.float32(1) / absmax, self.steps))
        is_zero = absmax == 0
        inverse[is_zero] = 0
        scaled = flushed(x * inverse[:, None])
        if self.kind == "nf4":
            scaled[is_zero] = -1
        return scaled, absmax

    def constants(self, offset: float = 0.0) -> dict[str, Array]:
        """See `Units.constants`."""
        state = self._state_json(offset).ljust(self._state_nbytes)
        found: dict[str, Array] = {
            ".quant_map": np.array(VALUES[self.kind], np.float32),
            self._state: np.frombuffer(state, np.uint8),
        }
        return {**found, ".nested_quant_map": dynamic.dynamic_map()} if self.nested else found

    def finished(self, statistics: Array) -> dict[str, Array]:
        """See `Units.finished`."""
        if not self.nested:
            return super().finished(statistics)
        offset = np.float32(statistics.mean(dtype=np.float64))
        codes, scales = dynamic.quantised(statistics - offset, self.arithmetic)
        nested = {".absmax": codes, ".nested_absmax": scales}
        return {**nested, **self.constants(float(offset))}

    def _absmax(self, parts: Mapping[str, Any]) -> tuple[Array, Array]:
        """Each block's absmax, and how far it is from the true one at most."""
        found = self.part(parts, ".absmax")
        if not self.nested:
            return found, np.zeros(found.shape)
        scales = self.part(parts, ".nested_absmax")
        offset = np.float32(json.loads(bytes(self.part(parts, self._state)))["nested_offset"])
        absmax = dynamic.decoded(found, scales) + offset
        errors = np.repeat(scales.astype(np.float64), dynamic.BLOCK)[: found.size]
        rounded = 2.0**-23 * (np.abs(absmax.astype(np.float64)) + abs(float(offset)) + errors)
        return absmax, errors * dynamic.LARGEST_ERROR + rounded

    def decode(self, parts: Mapping[str, Any]) -> Array:
        """See `Quantised.decode`."""
        packed = self.part(parts, "").reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: self.numel]
        absmax, _ = self._absmax(parts)
        values = np.array(VALUES[self.kind], np.float32)[codes]
        decoded: Array = values * np.repeat(absmax, self.block)[: self.numel]
        return decoded.reshape(self.shape)

    def bound(self, parts: Mapping[str, Any]) -> Array:
        """Half the widest gap, times the largest that absmax can be; and absmax's own error.

        Two more terms cover magnitudes that CPUs and CUDA take for zero, and blocks beyond 2^126,
        where CUDA's reciprocal is zero.
        """
        absmax, error = self._absmax(parts)
        largest = np.abs(absmax.astype(np.float64)) + error
        half_gap = float(np.diff(np.sort(np.array(VALUES[self.kind]))).max()) / 2
        bound = largest * (half_gap + 2.0**-20) + error + 2 * _NORMAL
        if self.arithmetic == "cuda":
            bound = np.where(largest > 2.0**125, largest, bound)
        return np.repeat(bound, self.block)[: self.numel].reshape(self.shape)


@dataclass(frozen=True)
class FourBit:
    """A format of this file.

    Attributes:
        kind: the 16 values.
        nested: whether absmax are quantised as well.
        block: elements of a block, one of `BLOCKS`.
        arithmetic: the device to compute like.
    """

    kind: Kind
    nested: bool = False
    block: int = 64
    arithmetic: Arithmetic = "cpu"
    turns_conv1d = True

    @property
    def name(self) -> str:
        """As users write it."""
        return f"{self.kind}-nested" if self.nested else self.kind

    def of(self, shape: tuple[int, ...], src: DType) -> FourBitBlocks:
        """See `Format.of`."""
        check_source(self.name, shape, src)
        if self.block not in BLOCKS:
            raise ValueError(f"{self.name}: a block is of {BLOCKS} elements, not {self.block}")
        return FourBitBlocks(
            self.name, shape, src, self.kind, self.block, self.nested, self.arithmetic
        )

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any]:
        """See `Format.config`: `BitsAndBytesConfig.to_dict` in transformers 5.23."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.nested,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(left),
        }


register(*(FourBit(kind, nested) for kind in ("nf4", "fp4") for nested in (False, True)))
