"""bitsandbytes' 4-bit layout: nf4 and fp4, blocks of 64 elements, plain or nested statistics.

Layout: codes two a byte, the first in the high bits, as a column; a float32 absmax a block; the
map of the 16 values; JSON with the rest (`QuantState.as_dict(packed=True)`). Nested ("-nested"
after the name; transformers' ``bnb_4bit_use_double_quant``), the absmax less their mean are bytes
of the 8-bit dynamic type (`bitsandbytes_nested`), and the mean is in the JSON. That is padded with
spaces then: its length is planned before the mean is known.

Arithmetic, bit for bit that of bitsandbytes 0.50.2 on a CPU (`quantize_4bit` of its default
backend, in torch): an element is multiplied by 1 / absmax (absmax at least 1e-38 there) in float32,
and its rank is the number of midpoints between values that are less. A short last block is divided
by absmax instead, which is stored as at least 1e-38. A block of zeros has absmax 0 and the code of
0; an odd last code is that of 0. fp4 has the code 8, another zero, for what is above 0 and rounds
to 0. The mean is rounded once here; torch's is a float32 sum, which depends on its threads, and
is within a unit in the last place for weights.

On CUDA (`kQuantizeBlockwise`, csrc/kernels.cu, compiled with ``--use_fast_math``) subnormals are
zeros, 1 / absmax is ``rcp.approx.ftz``, short blocks are as others, fp4's midpoints are constants
of six digits and its ties go to zero on both sides, and in a block of zeros every code is 0. The
arithmetic "cuda" does that; on the host its reciprocal is the nearest, on CUDA the device's own,
which is at most a step in the last place from it (PTX ISA, "rcp.approx.ftz.f32": 1 ulp).

Decoding follows ``QuantState``, `dequantize_4bit` and `dequantize_blockwise` in
bitsandbytes/functional.py: nested statistics are the code's value times the statistic of their
block, then the offset added, each rounded to float32. bitsandbytes rounds the product to float32
and then to the target; here it is rounded once. The two may differ by one unit in the last place if
the float32 product is a midpoint of the target.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn

import numpy as np

from streamload.codecs.decode import ScaledLayout, Weight, check_finite, floats
from streamload.codecs.decode_kernels import Values
from streamload.codecs.encode import Encoded, Units
from streamload.codecs.encode_kernels import Recipe, Scalars
from streamload.codecs.ir import Vector, chosen, flushed_ir, looked_up
from streamload.codecs.parts import Arithmetic, Array, Part, check_source, flushed, stepped
from streamload.codecs.product import Form, Formed
from streamload.codecs.scheme import Library, Quantized, Read
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.codecs.weights import Layouts, QuantizedWeight
from streamload.core.bounded_json import parse_json
from streamload.core.dtypes import BY_CODE, BY_NAME, F32, PACKED, DType
from streamload.core.tensors import TensorInfo

Kind = Literal["nf4", "fp4"]

#: Elements of a block that bitsandbytes supports.
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
#: The 16 values of each type, by code.
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
#: Codes in ascending order of their values, as torch sorts them.
_ORDER: Mapping[Kind, tuple[int, ...]] = {
    "nf4": tuple(range(16)),
    "fp4": (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3),
}
#: Bounds that magnitudes exceed on CUDA for fp4's codes 1, 6, 7, 4, 5, 2 and 3.
_FP4_CUDA = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)
_LEAST = float(np.float32(1e-38))
_NORMAL = 2.0**-126  # the least magnitude that CUDA's arithmetic keeps
_JSON_FLOAT = 25  # characters that a float takes at most
_STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True)
class _Ranks:
    """Tables from scaled elements to codes, by an element's rank among 15 bounds.

    `bounds`: 15 ascending numbers; an element's rank is the count of lesser ones.
    """

    bounds: tuple[float, ...]
    order: tuple[int, ...]
    values: tuple[float, ...]


def _ranks(kind: Kind, arithmetic: Arithmetic) -> _Ranks:
    """Return the tables of a type for bitsandbytes' arithmetic on a CPU or on CUDA."""
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
class _Recipe(Recipe):
    kind: Kind
    numel: int
    arithmetic: Arithmetic
    approximates: bool = False  # takes the GPU's approximate reciprocal
    packing = "pairs"

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
        factor = one.select(is_zero, "float", 0.0, inverse)
        shift = one.select(is_zero, "float", zero, 0.0)
        return Scalars((factor, largest, shift), statistic=largest)

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        inverse, largest, *shift = scalars
        if shift:  # as on CUDA
            scaled = flushed_ir(v, v.op("fmul", "float", flushed_ir(v, x), inverse))
            scaled = v.op("fadd", "float", scaled, shift[0])
        else:
            scaled = v.op("fmul", "float", x, inverse)
        ranks = _ranks(self.kind, self.arithmetic)
        masks: list[str] = []
        for level in range(4):
            some = ranks.bounds[2 ** (3 - level) - 1 :: 2 ** (4 - level)]
            bound = chosen(v, "float", reversed(masks), some)
            masks.append(v.op("fcmp ogt", "float", scaled, bound))
        value = chosen(v, "float", reversed(masks), ranks.values)
        return _code(v, masks, ranks.order), v.op("fmul", "float", value, largest)


def _code(v: Vector, masks: Sequence[str], order: tuple[int, ...]) -> str:
    """Write IR of ranks' codes by ``order``; ``masks``: ranks' bits, highest first; return name."""
    if order != tuple(range(16)):
        return str(chosen(v, "i32", reversed(masks), order))
    bits = [v.select(mask, "i32", 8 >> index, 0) for index, mask in enumerate(masks)]
    return v.op("or", "i32", v.op("or", "i32", *bits[:2]), v.op("or", "i32", *bits[2:]))


@dataclass(frozen=True)
class _Values(Values):
    nested: int = 0
    name = "nf4 or fp4"
    significant_bits = 24
    bits, high_first, has_table = 4, True, True

    def instructions(self, v: Vector, codes: str) -> str:
        return looked_up(v, "%table", codes)

    def decoded(self, codes: Array, table: Array) -> Array:
        return table[codes]


class FourBit(ScaledLayout, Units, Formed):
    """bitsandbytes' quantization to 4 bits, in one of `BLOCKS`.

    Args:
        nested: whether the blocks' largest magnitudes are quantized, too.
        arithmetic: the device whose results are reproduced.
        steps: units in the last place by which CUDA's reciprocal differs from the nearest one.
    """

    of_linears = True
    has_statistics = True

    def __init__(
        self,
        type: Kind,
        nested: bool = False,
        block: int = 64,
        arithmetic: Arithmetic = "cpu",
        steps: int = 0,
    ) -> None:
        self.type, self.nested, self.block = type, nested, block
        self.arithmetic, self.steps = arithmetic, steps
        self.name, self.kind = f"{type}-nested" if nested else type, f"bnb-{type}"
        self.dtype = PACKED[self.kind]
        self.device_parts = (".absmax", ".nested_absmax") if nested else (".absmax",)
        self.recipe = _Recipe(type, block, arithmetic)
        self.device_recipe = _Recipe(type, block, "cuda", approximates=True)

    @property
    def on_cuda(self) -> tuple[FourBit, ...]:
        """The steps that CUDA's reciprocal may be off by; see `Codec.on_cuda`."""
        own = self.type, self.nested, self.block
        return tuple(FourBit(*own, "cuda", steps) for steps in (0, -1, 1))

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return how a tensor is quantized to 4 bits; see `Codec.of`."""
        check_source(self.name, shape, src)
        if self.block not in BLOCKS:
            raise ValueError(f"{self.name}: a block is of {BLOCKS} elements, not {self.block}")
        numel = math.prod(shape)
        units, u8 = -(-numel // self.block), BY_CODE["U8"]
        state_nbytes = len(self._state(shape, src, 0.0))
        nested: tuple[Part, ...] = ()
        if self.nested:
            state_nbytes += _JSON_FLOAT - len("0.0")
            scales = Part(".nested_absmax", F32, (-(-units // dynamic.BLOCK),))
            nested = scales, Part(".nested_quant_map", F32, (256,))
        parts = (
            Part("", u8, (-(-numel // 2), 1)),
            Part(".absmax", u8 if self.nested else F32, (units,)),
            Part(".quant_map", F32, (16,)),
            *nested,
            Part(f".{_STATE}{self.type}", u8, (state_nbytes,)),
        )
        return Quantized(self, shape, src, parts, self.block, self.block // 2)

    def _state(self, shape: tuple[int, ...], src: DType, offset: float) -> bytes:
        state: dict[str, Any] = {
            "quant_type": self.type,
            "blocksize": self.block,
            "dtype": src.name,
            "shape": shape,
        }
        if self.nested:
            state |= {
                "nested_blocksize": dynamic.BLOCK,
                "nested_dtype": "float32",
                "nested_offset": offset,
            }
        return json.dumps(state).encode()

    def encoded(self, x: Array) -> Encoded:
        """Quantize blocks in numpy; see `Units.encoded`."""
        ranks = _ranks(self.type, self.arithmetic)
        scaled, absmax = (self._scaled_cpu if self.arithmetic == "cpu" else self._scaled_cuda)(x)
        rank = np.searchsorted(np.array(ranks.bounds, np.float32), scaled, side="left")
        codes = np.array(ranks.order, np.uint8)[rank]
        decoded = np.array(ranks.values, np.float32)[rank] * absmax[:, None]
        if codes.shape[1] % 2:
            zero = int(np.searchsorted(np.array(ranks.bounds), 0.0, side="left"))
            if self.arithmetic == "cuda" and self.type == "nf4" and absmax[-1] == 0:
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
        if self.type == "nf4":
            scaled[is_zero] = -1
        return scaled, absmax

    def constants(self, tensor: Quantized, offset: float = 0.0) -> dict[str, Array]:
        """Return the maps and the state; see `Codec.constants`."""
        last = tensor.parts[-1]
        state = self._state(tensor.shape, tensor.dtype, offset).ljust(last.nbytes)
        found: dict[str, Array] = {
            ".quant_map": np.array(VALUES[self.type], np.float32),
            last.suffix: np.frombuffer(state, np.uint8),
        }
        return {**found, ".nested_quant_map": dynamic.dynamic_map()} if self.nested else found

    def finished(self, tensor: Quantized, statistics: Array) -> dict[str, Array]:
        """Return all parts but the codes, statistics quantized if nested; see `Units.finished`."""
        if not self.nested:
            return super().finished(tensor, statistics)
        offset = np.float32(statistics.mean(dtype=np.float64))
        codes, scales = dynamic.quantized(statistics - offset, self.arithmetic)
        nested = {".absmax": codes, ".nested_absmax": scales}
        return {**nested, **self.constants(tensor, float(offset))}

    def config(self, left: Sequence[str], dtype: str) -> dict[str, Any]:
        """Return `BitsAndBytesConfig.to_dict` of transformers 5.23; see `Codec.config`."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.type,
            "bnb_4bit_use_double_quant": self.nested,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(left),
        }

    def form(self, detail: str) -> Form:
        """Return blocks of values of 4 bits; nested scales are decoded where they are used."""
        parts = [("scales", ".absmax"), ("table", ".quant_map")]
        if self.nested:
            parts += [("nested", ".nested_absmax"), ("map", ".nested_quant_map")]
            parts += [("state", f".{_STATE}{self.type}")]
        return Form(_Values(nested=dynamic.BLOCK * self.nested), tuple(parts), self.block)

    def values(self, weight: QuantizedWeight) -> _Values:
        """Return how codes are stored; see `ScaledLayout.values`."""
        return _Values()

    def weight(self, weight: QuantizedWeight, read: Read) -> Weight:
        """Read statistics, nested or not, and the map; see `ScaledLayout.weight`."""
        absmax, values = weight.members["absmax"], weight.members["quant_map"]
        assert weight.shape is not None, weight.name
        if "nested_absmax" not in weight.members:
            scales = floats(absmax, read(absmax))
        else:
            scales = _denested(weight, np.frombuffer(read(absmax), np.uint8), read)
        numel = max(math.prod(weight.shape), 1)
        table = floats(values, read(values))
        return Weight(_Values(), 1, numel, 1, weight.block[0], scales, table=table)


def _denested(weight: QuantizedWeight, codes: Array, read: Read) -> Array:
    """Read and decode nested statistics, whose codes are given, to float32."""
    outer, values = weight.members["nested_absmax"], weight.members["nested_quant_map"]
    each = np.repeat(floats(outer, read(outer)), weight.facts["nested_blocksize"])[: codes.size]
    scales: Array = floats(values, read(values))[codes]
    scales *= each
    scales += np.float32(weight.facts["nested_offset"])
    check_finite(outer, np.isfinite(scales))
    return scales


# --- recognizing ---

_TYPES = ("nf4", "fp4")
_CODES = 16  # of a value of 4 bits
_NESTED_CODES = 256
_FLOATS = ("float16", "bfloat16", "float32")
_MOST_STATE_NBYTES = 2**16
_MOST_BLOCK = 4096  # elements, of the blocks that bitsandbytes has


def _find(layouts: Layouts, info: TensorInfo) -> QuantizedWeight | None:
    """Return the 4-bit weight that a tensor is part of, or None; `_with_state` adds its shape."""
    leaf = info.name.rpartition(".")[2]
    weight = info.name.removesuffix(f".{leaf}")
    if leaf.startswith("bitsandbytes__"):
        weight = info.name.partition(f".{_STATE}")[0]
    states = [kind for kind in _TYPES if layouts.find(f"{weight}.{_STATE}{kind}")]
    if not states and layouts.find(weight) is None:
        return None  # a buffer of something else
    values = layouts.need(weight, f"{weight}.absmax", "weight")
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
    return QuantizedWeight(f"bnb-{states[0]}", weight, members, None, (), 4)


def _with_state(layouts: Layouts, weight: QuantizedWeight, data: bytes) -> QuantizedWeight:
    """Return the weight with shape, block, dtype of ``data``, its state's JSON, once checked."""
    info = weight.members["quant_state"]

    def refuse(problem: str, expected: object, found: object) -> NoReturn:
        layouts.refuse(info.name, f"the quantisation state {problem}", expected, found)

    try:
        state = parse_json(data)
    except (ValueError, RecursionError) as error:
        refuse("is not valid JSON", "an object", str(error))
    if type(state) is not dict:
        refuse("is not valid", "an object of JSON", type(state).__name__)
    kind = weight.kind.removeprefix("bnb-")
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
    numel, nbytes = math.prod(shape), weight.values.nbytes
    itemsize = weight.values.dtype.itemsize
    if -(-numel // 2 // itemsize) * itemsize != nbytes and -(-numel // 2) != nbytes:
        refuse(
            "does not fit the bytes of the weight", f"a shape of {2 * nbytes} values", list(shape)
        )
    _check_count(layouts, weight.members["absmax"], -(-numel // size), numel, size)
    facts = {"blocksize": size, "quant_type": kind}
    if "nested_absmax" in weight.members:
        nested = _block_size(state.get("nested_blocksize"))
        offset = state.get("nested_offset")
        is_float32 = isinstance(offset, int | float) and abs(offset) < 2**128
        if nested is None or not is_float32:
            expected = "nested_blocksize and nested_offset"
            refuse("says nothing valid of the nested statistics", expected, sorted(state))
        blocks = weight.members["absmax"].numel
        _check_count(layouts, weight.members["nested_absmax"], -(-blocks // nested), blocks, nested)
        facts |= {"nested_blocksize": nested, "nested_offset": offset}
    return replace(
        weight,
        shape=tuple(shape),
        block=(size,),
        dtype=BY_NAME[state["dtype"]],
        facts=MappingProxyType(facts),
    )


def _block_size(value: object) -> int | None:
    """Return a block's size in elements if it is a power of two up to `_MOST_BLOCK`, else None."""
    if type(value) is not int or not 0 < value <= _MOST_BLOCK or value & (value - 1):
        return None
    return value


def _check_count(layouts: Layouts, info: TensorInfo, expected: int, numel: int, size: int) -> None:
    """Raise CheckpointError unless a tensor has one statistic for each block of ``size``."""
    if info.shape != (expected,):
        layouts.refuse(
            info.name,
            f"its length is not that of {numel} values in blocks of {size}",
            [expected],
            list(info.shape),
        )


LIBRARY = Library(
    *(FourBit(kind, nested) for kind in VALUES for nested in (False, True)),
    find=_find,
    complete={"quant_state": _with_state},
)
