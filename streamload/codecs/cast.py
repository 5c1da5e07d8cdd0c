"""LLVM IR for each cast, compiled for this CPU and called without the GIL.

One template makes every kernel: a loop over vectors with two bodies. Nearly all vectors of real
weights hold only zeros and numbers that are normal before and after the cast (`plain_range`). For
them the cast is one instruction, or a shift and an addition, nothing overflows or vanishes, and
what is lost are the low bits (`_plain`). `careful` is right for any elements: a value is widened
to float32 bits (`WIDEN`; float64 comes down to float32 rounded to odd) and narrowed from there
(`NARROW`), so that it is rounded once: rounding to odd keeps in the last bit whether anything was
lost, and float32 has more than two bits beyond both 16-bit formats (S. Boldo and G. Melquiond,
"Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
Transactions on Computers 57(4), 2008).

Kernels depend on nothing outside themselves:

- No external symbol. Where a CPU lacks an instruction, LLVM calls a helper (``__truncsfhf2`` and
  its kind) that a JIT does not resolve, and the process dies in the call. Each object is scanned
  before it is linked (`llvm.undefined_symbols`), and half precision has an integer form for CPUs
  that cannot convert it.
- No floating-point state of the calling thread. On x86-64 and AArch64 a kernel runs in the default
  environment of IEEE 754 (nearest even, subnormals kept, no traps) and restores the caller's:
  libraries compiled with ``-ffast-math`` leave flush-to-zero set in threads that are not theirs.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, c_uint64, c_void_p
from functools import cache
from typing import Any

from streamload.codecs.floats import (
    FORMATS,
    FloatFormat,
    flush_stop,
    lossless,
    overflow_start,
    plain_range,
)
from streamload.codecs.llvm import link_kernel
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

_BLOCK_VECTORS = 1 << 15  # a count of one block fits the 16-bit lanes that it is kept in
_WIDTH = 32  # elements of a step; a power of two
_SYMBOL = "cast"


class Vector:
    """Straight-line IR over ``width`` elements at a time.

    Operands are names of values, or numbers, which stand for that number in every element.

    Attributes:
        width: elements.
        native_half: there are instructions between float16 and float32.
        lines: the instructions, one each.
    """

    def __init__(self, width: int, native_half: bool) -> None:
        self.width = width
        self.native_half = native_half
        self.lines: list[str] = []

    def type(self, scalar: str) -> str:
        """The type of elements of a scalar type."""
        # not <1 x T>: LLVM 20 aborts on <1 x half> for AArch64
        return scalar if self.width == 1 else f"<{self.width} x {scalar}>"

    def emit(self, instruction: str) -> str:
        """Add an instruction; returns the name of its value."""
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {instruction}")
        return name

    def op(self, name: str, scalar: str, *operands: str | float) -> str:
        """An operation on operands of one type."""
        texts = ", ".join(self._operand(scalar, operand) for operand in operands)
        return self.emit(f"{name} {self.type(scalar)} {texts}")

    def convert(self, name: str, scalar: str, value: str, target: str) -> str:
        """A conversion from one scalar type to another."""
        return self.emit(f"{name} {self.type(scalar)} {value} to {self.type(target)}")

    def select(self, mask: str, scalar: str, yes: str | float, no: str | float) -> str:
        """One of two values, element by element."""
        texts = (f"{self.type(scalar)} {self._operand(scalar, value)}" for value in (yes, no))
        return self.emit(f"select {self.type('i1')} {mask}, {', '.join(texts)}")

    def reduced(self, name: str, scalar: str, value: str) -> str:
        """The instruction that makes one scalar of all elements; ``name`` is "add" or "or"."""
        if self.width == 1:
            return f"{name} {scalar} {value}, 0"
        of = self.type(scalar)
        return f"call {scalar} @llvm.vector.reduce.{name}.v{self.width}{scalar}({of} {value})"

    def _operand(self, scalar: str, value: str | float) -> str:
        if isinstance(value, str):
            return value
        # LLVM writes a float constant as the bits of the double of the same value
        text = f"0x{struct.pack('>d', value).hex()}" if isinstance(value, float) else str(value)
        return text if self.width == 1 else f"splat ({scalar} {text})"


def _same(v: Vector, x: str) -> str:
    return x


def _widen_by_integers(source: FloatFormat) -> Callable[[Vector, str], str]:
    def widen(v: Vector, x: str) -> str:
        wide = v.convert("zext", f"i{source.bits}", x, "i32")
        magnitude = v.op("and", "i32", wide, source.magnitude)
        sign = v.op("shl", "i32", v.op("xor", "i32", wide, magnitude), 32 - source.bits)
        shifted = v.op("shl", "i32", magnitude, 23 - source.mantissa_bits)
        normal = v.op("add", "i32", shifted, (127 - source.bias) << 23)
        # a subnormal is an integer times a power of two, and normal in float32
        units = v.convert("sitofp", "i32", magnitude, "float")
        scaled = v.op("fmul", "float", units, 2.0 ** (1 - source.bias - source.mantissa_bits))
        subnormal = v.convert("bitcast", "float", scaled, "i32")
        is_subnormal = v.op("icmp ult", "i32", magnitude, 1 << source.mantissa_bits)
        finite = v.select(is_subnormal, "i32", subnormal, normal)
        is_special = v.op("icmp uge", "i32", magnitude, source.special)
        special = v.op("or", "i32", shifted, 0x7F800000)
        return v.op("or", "i32", v.select(is_special, "i32", special, finite), sign)

    return widen


def _widen_f16(v: Vector, x: str) -> str:
    if not v.native_half:
        return _widen_by_integers(FORMATS["F16"])(v, x)
    half = v.convert("bitcast", "i16", x, "half")
    return v.convert("bitcast", "float", v.convert("fpext", "half", half, "float"), "i32")


def _widen_bf16(v: Vector, x: str) -> str:
    return v.op("shl", "i32", v.convert("zext", "i16", x, "i32"), 16)


def _widen_f32(v: Vector, x: str) -> str:
    """Float32 bits to float64 bits."""
    value = v.convert("bitcast", "i32", x, "float")
    return v.convert("bitcast", "double", v.convert("fpext", "float", value, "double"), "i64")


def _nearest_f32(v: Vector, x: str) -> str:
    value = v.convert("bitcast", "i64", x, "double")
    return v.convert("bitcast", "float", v.convert("fptrunc", "double", value, "float"), "i32")


def _odd_f32(v: Vector, x: str) -> str:
    """Float64 bits to float32 bits rounded to odd: towards zero, the last bit set if inexact."""
    nearest = _nearest_f32(v, x)
    lengths = [
        v.convert("bitcast", "i64", v.op("and", "i64", bits, FORMATS["F64"].magnitude), "double")
        for bits in (_widen_f32(v, nearest), x)
    ]
    was_raised = v.op("fcmp ogt", "double", *lengths)
    is_inexact = v.op("fcmp one", "double", *lengths)
    truncated = v.op("add", "i32", nearest, v.convert("sext", "i1", was_raised, "i32"))
    return v.op("or", "i32", truncated, v.convert("zext", "i1", is_inexact, "i32"))


def _narrow_to_f16(v: Vector, x: str) -> str:
    if v.native_half:
        value = v.convert("bitcast", "i32", x, "float")
        return v.convert("bitcast", "half", v.convert("fptrunc", "float", value, "half"), "i16")
    magnitude = v.op("and", "i32", x, 0x7FFFFFFF)
    sign = v.op("lshr", "i32", v.op("xor", "i32", x, magnitude), 16)
    last = v.op("and", "i32", v.op("lshr", "i32", magnitude, 13), 1)
    raised = v.op("add", "i32", v.op("add", "i32", magnitude, last), 0xFFF - (112 << 23))
    normal = v.op("lshr", "i32", raised, 13)
    # below 2^-14 the last bit is 2^-24, as it is of a float32 from 0.5 to 1: the sum rounds there
    shifted = v.op("fadd", "float", v.convert("bitcast", "i32", magnitude, "float"), 0.5)
    subnormal = v.op("sub", "i32", v.convert("bitcast", "float", shifted, "i32"), 0x3F000000)
    is_subnormal = v.op("icmp ult", "i32", magnitude, (127 - 14) << 23)
    finite = v.select(is_subnormal, "i32", subnormal, normal)
    is_nan = v.op("icmp ugt", "i32", magnitude, 0x7F800000)
    special = v.select(is_nan, "i32", 0x7E00, 0x7C00)
    is_large = v.op("icmp uge", "i32", magnitude, (127 + 16) << 23)  # below, 65520 has carried
    bits = v.op("or", "i32", v.select(is_large, "i32", special, finite), sign)
    return v.convert("trunc", "i32", bits, "i16")


def _narrow_to_bf16(v: Vector, x: str) -> str:
    high = v.op("lshr", "i32", x, 16)
    last = v.op("and", "i32", high, 1)
    raised = v.op("add", "i32", v.op("add", "i32", x, last), 0x7FFF)
    magnitude = v.op("and", "i32", x, 0x7FFFFFFF)
    is_nan = v.op("icmp ugt", "i32", magnitude, 0x7F800000)
    quiet = v.op("or", "i32", high, 0x40)  # a payload in the low bits alone would become infinity
    bits = v.select(is_nan, "i32", quiet, v.op("lshr", "i32", raised, 16))
    return v.convert("trunc", "i32", bits, "i16")


#: by code: elements, as integers, to float32 bits (float64 rounded to odd).
WIDEN: Mapping[str, Callable[[Vector, str], str]] = {
    "F8_E5M2": _widen_by_integers(FORMATS["F8_E5M2"]),
    "F8_E4M3": _widen_by_integers(FORMATS["F8_E4M3"]),
    "F16": _widen_f16,
    "BF16": _widen_bf16,
    "F32": _same,
    "F64": _odd_f32,
}
#: by code: float32 bits to elements, as integers, to nearest even.
NARROW: Mapping[str, Callable[[Vector, str], str]] = {
    "F16": _narrow_to_f16,
    "BF16": _narrow_to_bf16,
    "F32": _same,
    "F64": _widen_f32,
}
# pairs that take an instruction or two whatever the values are
_DIRECT = frozenset({("BF16", "F32"), ("BF16", "F64"), ("F32", "F64"), ("F64", "F32")})
_DIRECT_WITH_NATIVE_HALF = frozenset(
    {("F16", "F32"), ("F16", "F64"), ("F32", "F16"), ("BF16", "F16")}
)


def _hub(v: Vector, src: DType, dst: DType, x: str) -> str:
    """Float32 bits that hold the value, or what the target will keep of it."""
    if dst.code == "F32" and src.code == "F64":
        return _nearest_f32(v, x)  # the one rounding there is
    return WIDEN[src.code](v, x)


def _plain(
    v: Vector, src: DType, dst: DType, x: str, sums: list[str], *, direct: bool
) -> tuple[str, list[str]]:
    """Cast elements that are zero or in `plain_range`; returns them and the sums after them."""
    source, target = FORMATS[src.code], FORMATS[dst.code]
    lost = source.mantissa_bits - target.mantissa_bits
    if sums and lost > 0:
        lane = f"i{src.bits}"
        low = v.op("and", lane, x, (1 << lost) - 1)
        sums = [*sums[:2], _count(v, lane, sums[2], v.op("icmp ne", lane, low, 0))]
    if direct:
        return NARROW[dst.code](v, _hub(v, src, dst, x)), sums

    lane = f"i{max(src.bits, dst.bits)}"
    if src.bits < dst.bits:
        x = v.convert("zext", f"i{src.bits}", x, lane)
    magnitude = v.op("and", lane, x, source.magnitude)
    sign = v.op("xor", lane, x, magnitude)
    if lost > 0:
        last = v.op("and", lane, v.op("lshr", lane, magnitude, lost), 1)
        raised = v.op("add", lane, v.op("add", lane, magnitude, last), (1 << (lost - 1)) - 1)
        y = v.op("lshr", lane, raised, lost)
    else:
        y = v.op("shl", lane, magnitude, -lost)
    if target.bias != source.bias:
        y = v.op("add", lane, y, (target.bias - source.bias) << target.mantissa_bits)
        y = v.select(v.op("icmp ne", lane, magnitude, 0), lane, y, 0)
    if src.bits < dst.bits:
        return v.op("or", lane, y, v.op("shl", lane, sign, dst.bits - src.bits)), sums
    y = v.op("or", lane, y, v.op("lshr", lane, sign, src.bits - dst.bits))
    return (v.convert("trunc", lane, y, f"i{dst.bits}") if src.bits > dst.bits else y), sums


def careful(
    v: Vector, src: DType, dst: DType, x: str, *, clamp: bool
) -> tuple[str, tuple[str | None, str | None, str | None]]:
    """Cast any elements.

    Args:
        v: where the instructions go.
        src: dtype of the elements.
        dst: what they become; with ``src`` one of `floats.PAIRS`.
        x: the elements, as integers of ``src.bits``.
        clamp: see `kernel_ir`.

    Returns:
        The elements, as integers of ``dst.bits``, and where they overflowed, vanished, and changed
        at all: masks, or None where no element of ``src`` can.
    """
    source, lane = FORMATS[src.code], f"i{src.bits}"
    hub = _hub(v, src, dst, x)
    y = NARROW[dst.code](v, hub)
    overflows = vanishes = changes = None
    magnitude = v.op("and", lane, x, source.magnitude)
    start, stop = overflow_start(src, dst), flush_stop(src, dst)
    if start is not None:
        beyond = v.op("sub", lane, magnitude, start)
        overflows = v.op("icmp ult", lane, beyond, source.special - start)
    if stop is not None:
        vanishes = v.op("icmp ult", lane, v.op("sub", lane, magnitude, 1), stop - 1)
    if not lossless(src, dst):
        wide, of, before = ("i64", "double", x) if dst.code == "F32" else ("i32", "float", hub)
        after = _widen_f32(v, y) if dst.code == "F32" else WIDEN[dst.code](v, y)
        values = (v.convert("bitcast", wide, value, of) for value in (before, after))
        changes = v.op("fcmp one", of, *values)  # false for NaN
    if clamp and overflows:  # the largest finite value is the one before infinity
        target = f"i{dst.bits}"
        y = v.op("add", target, y, v.convert("sext", "i1", overflows, target))
    return y, (overflows, vanishes, changes)


def _count(v: Vector, lane: str, total: str, mask: str) -> str:
    return v.op("sub", lane, total, v.convert("sext", "i1", mask, lane))


def _function(
    name: str, src: DType, dst: DType, *, clamp: bool, native_half: bool, width: int
) -> str:
    """IR of ``void name(src, out, numel, tally)``, where ``width`` divides ``numel``."""
    v = Vector(width, native_half)
    pair = (src.code, dst.code)
    direct = pair in _DIRECT or (native_half and pair in _DIRECT_WITH_NATIVE_HALF)
    lane = f"i{src.bits}"
    sums = [f"%sum{slot}" for slot in range(0 if lossless(src, dst) else 3)]

    x = v.emit(f"load {v.type(lane)}, ptr %src.at, align 1")
    special = "false"
    if sums or not direct:
        start, stop = plain_range(src, dst, direct=direct)
        magnitude = v.op("and", lane, x, FORMATS[src.code].magnitude)
        outside = v.op("icmp uge", lane, v.op("sub", lane, magnitude, start), stop - start)
        outside = v.op("and", "i1", outside, v.op("icmp ne", lane, magnitude, 0))
        special = v.emit(v.reduced("or", "i1", outside))
    v.lines += [f"br i1 {special}, label %careful, label %plain", "careful:"]
    cared, masks = careful(v, src, dst, x, clamp=clamp)
    careful_sums = [
        _count(v, lane, total, mask) if mask else total
        for total, mask in zip(sums, masks, strict=False)
    ]
    v.lines += ["br label %join", "plain:"]
    plain, plain_sums = _plain(v, src, dst, x, sums, direct=direct)
    v.lines += ["br label %join", "join:"]
    y = v.emit(f"phi {v.type(f'i{dst.bits}')} [{cared}, %careful], [{plain}, %plain]")

    carried, ends = [], []
    for slot, (total, a, b) in enumerate(zip(sums, careful_sums, plain_sums, strict=True)):
        after = v.emit(f"phi {v.type(lane)} [{a}, %careful], [{b}, %plain]")
        carried.append(f"{total} = phi {v.type(lane)} [zeroinitializer, %entry], [{after}, %join]")
        widen = "zext" if src.bits < 64 else "bitcast"  # an extension must extend
        wide = f"{widen} {v.type(lane)} {after} to {v.type('i64')}"
        ends.append(
            f"%wide{slot} = {wide}\n  %add{slot} = " + v.reduced("add", "i64", f"%wide{slot}")
        )
        ends.append(TOLD.format(slot=slot, value=f"%add{slot}"))
    return LOOP.format(
        name=name,
        arguments="ptr %src, ptr %out, i64 %numel, ptr %tally",
        attributes="noinline",
        target=f"i{dst.bits}",
        index="%at",
        stored=v.type(f"i{dst.bits}"),
        width=width,
        carried="\n  ".join(carried),
        body="\n  ".join([f"%src.at = getelementptr {lane}, ptr %src, i64 %at", *v.lines]),
        y=y,
        ends="\n  ".join(ends),
    )


#: Adds a value of 64 bits to a count of the tally.
TOLD = """
  %slot{slot} = getelementptr i64, ptr %tally, i64 {slot}
  %old{slot} = load i64, ptr %slot{slot}
  %new{slot} = add i64 %old{slot}, {value}
  store i64 %new{slot}, ptr %slot{slot}
"""

#: A function that makes elements of ``%out`` in steps of ``width``, which divides ``%numel``: a
#: body of blocks from ``loop`` to ``join`` makes ``y`` from ``%at`` on.
LOOP = """
define internal void @{name}({arguments}) {attributes} nounwind {{
entry:
  %any = icmp ne i64 %numel, 0
  br i1 %any, label %loop, label %exit
loop:
  %at = phi i64 [0, %entry], [%next, %join]
  {carried}
  {body}
  %out.at = getelementptr {target}, ptr %out, i64 {index}
  store {stored} {y}, ptr %out.at, align 1
  %next = add i64 %at, {width}
  %more = icmp ult i64 %next, %numel
  br i1 %more, label %loop, label %end
end:
  {ends}
  br label %exit
exit:
  ret void
}}
"""

_KERNEL = """
define void @{symbol}(ptr %src, ptr %out, i64 %numel, ptr %tally) nounwind {{
entry:
  {enter}
  %whole = and i64 %numel, -{width}
  br label %test
test:
  %at = phi i64 [0, %entry], [%next, %block]
  %more = icmp ult i64 %at, %whole
  br i1 %more, label %block, label %rest
block:
  %left = sub i64 %whole, %at
  %is.last = icmp ult i64 %left, {block}
  %take = select i1 %is.last, i64 %left, i64 {block}
  %src.at = getelementptr {source}, ptr %src, i64 %at
  %out.at = getelementptr {target}, ptr %out, i64 %at
  call void @vectors(ptr %src.at, ptr %out.at, i64 %take, ptr %tally)
  %next = add i64 %at, %take
  br label %test
rest:
  %src.rest = getelementptr {source}, ptr %src, i64 %whole
  %out.rest = getelementptr {target}, ptr %out, i64 %whole
  %few = sub i64 %numel, %whole
  call void @scalars(ptr %src.rest, ptr %out.rest, i64 %few, ptr %tally)
  {leave}
  ret void
}}
"""

#: architecture to (enter, leave): the default floating-point environment, then the caller's again
ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "x86_64": (
        """%saved = alloca i32
  %default = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %saved)
  store i32 8064, ptr %default
  call void @llvm.x86.sse.ldmxcsr(ptr %default)""",
        "call void @llvm.x86.sse.ldmxcsr(ptr %saved)",
    ),
    "aarch64": (
        """%saved = call i64 @llvm.aarch64.get.fpcr()
  call void @llvm.aarch64.set.fpcr(i64 0)""",
        "call void @llvm.aarch64.set.fpcr(i64 %saved)",
    ),
}


def kernel_ir(
    src: DType,
    dst: DType,
    *,
    clamp: bool,
    native_half: bool,
    architecture: str,
) -> str:
    """LLVM IR of the kernel of a pair: ``void cast(src, out, numel, tally)``.

    It casts ``numel`` little-endian elements from ``src`` to ``out``, which may have any alignment
    and must not overlap, and adds to ``tally[0:3]`` (64-bit, aligned) how many finite elements
    overflowed, how many that are not zero became zero, and how many changed in value at all (those
    two included); a lossless pair leaves the tally alone.

    Args:
        src: dtype of the source.
        dst: dtype of the target; with ``src`` one of `floats.PAIRS`.
        clamp: finite elements that overflow become the largest finite value of their sign.
        native_half: the CPU converts between float16 and float32.
        architecture: first part of the target triple, which decides how the kernel gets the
            default floating-point environment; on one not known here it runs in the caller's.
    """
    enter, leave = ENVIRONMENT.get(architecture, ("", ""))
    functions = (
        _function(name, src, dst, clamp=clamp, native_half=native_half, width=width)
        for name, width in (("vectors", _WIDTH), ("scalars", 1))
    )
    return "".join(functions) + _KERNEL.format(
        symbol=_SYMBOL,
        source=f"i{src.bits}",
        target=f"i{dst.bits}",
        width=_WIDTH,
        block=_WIDTH * _BLOCK_VECTORS,
        enter=enter,
        leave=leave,
    )


#: ``(src address, out address, numel, tally address)``, see `kernel_ir`; it drops the interpreter's
#: lock, and any number of threads may be in it.
Kernel = Callable[[int, int, int, Any], None]
KERNEL_TYPE = CFUNCTYPE(None, c_void_p, c_void_p, c_uint64, c_void_p)
_compiling = threading.Lock()


def compile_kernel(src: DType, dst: DType, *, clamp: bool = False) -> Kernel:
    """The kernel of a pair for this CPU, compiled once per process; any thread may call it.

    Args:
        src: dtype of the source.
        dst: dtype of the target; with ``src`` one of `floats.PAIRS`.
        clamp: see `kernel_ir`.

    Raises:
        UnsupportedCastError: llvmlite is missing or cannot compile for this machine.
    """
    with _compiling:
        found = _compile(src, dst, clamp and overflow_start(src, dst) is not None)
    if isinstance(found, str):
        raise UnsupportedCastError(src.name, dst.name, reason=found)
    return found


@cache
def _compile(src: DType, dst: DType, clamp: bool) -> Kernel | str:
    """The kernel, or why there is none; either answer stays the same for the whole process."""

    def ir(native_half: bool, architecture: str) -> str:
        return kernel_ir(src, dst, clamp=clamp, native_half=native_half, architecture=architecture)

    kernel: Kernel | str = link_kernel(ir, _SYMBOL, KERNEL_TYPE)
    return kernel
