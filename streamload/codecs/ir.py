"""Writers of LLVM IR that kernels share, for the host and for CUDA.

Casts go through float32 bits: `WIDEN` makes them (of float64 rounded to odd), and `NARROW` makes
the target, so that a value is rounded once in all. Rounding to odd keeps in the last bit whether
anything was lost, and float32 has more than two bits beyond both 16-bit formats (S. Boldo
and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding
to odd", IEEE Transactions on Computers 57(4), 2008).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from streamload.codecs.floats import FLOATS, FloatFormat
from streamload.core.dtypes import DType


class Vector:
    """Collects LLVM IR instructions on vectors of ``width`` elements.

    Operands are names of IR values, or numbers, which mean that number in every element. Methods
    that add an instruction return the name of its value.

    Attributes:
        width: elements of a vector; 1 for scalars.
        native_half: whether the CPU converts between float16 and float32.
        lanes: float32 lanes of registers in which the CPU permutes: 16, 8 (AVX-512, AVX2), or 0.
        lines: the instructions so far.
    """

    def __init__(self, width: int, native_half: bool, lanes: int = 0) -> None:
        self.width = width
        self.native_half = native_half
        self.lanes = lanes
        self.lines: list[str] = []

    def type(self, scalar: str) -> str:
        """Return the IR type of a vector of a scalar type."""
        # not <1 x T>: LLVM 20 aborts on <1 x half> for AArch64
        return scalar if self.width == 1 else f"<{self.width} x {scalar}>"

    def emit(self, instruction: str) -> str:
        """Add an instruction; return the name of its value."""
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {instruction}")
        return name

    def op(self, name: str, scalar: str, *operands: str | float) -> str:
        """Add operation ``name`` on operands of one type; return the name of its value."""
        texts = ", ".join(self.operand(scalar, operand) for operand in operands)
        return self.emit(f"{name} {self.type(scalar)} {texts}")

    def convert(self, name: str, scalar: str, value: str, target: str) -> str:
        """Add conversion ``name`` of a value from a type to ``target``; return its value's name."""
        return self.emit(f"{name} {self.type(scalar)} {value} to {self.type(target)}")

    def as_bits(self, value: str) -> str:
        """Add the bitcast of float32 values to i32; return the name of its value."""
        return self.convert("bitcast", "float", value, "i32")

    def as_float(self, bits: str) -> str:
        """Add the bitcast of i32 bits to float32 values; return the name of its value."""
        return self.convert("bitcast", "i32", bits, "float")

    def select(self, mask: str, scalar: str, yes: str | float, no: str | float) -> str:
        """Add the choice, for each element, of ``yes`` if ``mask`` or ``no``; return its name."""
        texts = (f"{self.type(scalar)} {self.operand(scalar, value)}" for value in (yes, no))
        return self.emit(f"select {self.type('i1')} {mask}, {', '.join(texts)}")

    def reduced(self, name: str, scalar: str, value: str) -> str:
        """Return, but do not add, the reduction of all elements by "add", "or" or "umax"."""
        if self.width == 1:
            return f"{name} {scalar} {value}, 0"
        of = self.type(scalar)
        return f"call {scalar} @llvm.vector.reduce.{name}.v{self.width}{scalar}({of} {value})"

    def operand(self, scalar: str, value: str | float) -> str:
        """Return the text of an operand: a value's name, or a number in every element."""
        if isinstance(value, str):
            return value
        # LLVM writes a float constant as the bits of the double of the same value
        text = f"0x{struct.pack('>d', value).hex()}" if isinstance(value, float) else str(value)
        return text if self.width == 1 else f"splat ({scalar} {text})"


def _same(v: Vector, x: str) -> str:
    return x


def _widen_by_integers(v: Vector, x: str, code: str) -> str:
    source = FLOATS[code]
    wide = v.convert("zext", f"i{source.bits}", x, "i32")
    magnitude = v.op("and", "i32", wide, source.magnitude)
    sign = v.op("shl", "i32", v.op("xor", "i32", wide, magnitude), 32 - source.bits)
    shifted = v.op("shl", "i32", magnitude, 23 - source.mantissa_bits)
    normal = v.op("add", "i32", shifted, (127 - source.bias) << 23)
    # a subnormal is an integer times a power of two, and normal in float32
    units = v.convert("sitofp", "i32", magnitude, "float")
    scaled = v.op("fmul", "float", units, 2.0 ** (1 - source.bias - source.mantissa_bits))
    subnormal = v.as_bits(scaled)
    is_subnormal = v.op("icmp ult", "i32", magnitude, 1 << source.mantissa_bits)
    finite = v.select(is_subnormal, "i32", subnormal, normal)
    is_special = v.op("icmp uge", "i32", magnitude, source.special)
    special = v.op("or", "i32", shifted, 0x7F800000)
    return v.op("or", "i32", v.select(is_special, "i32", special, finite), sign)


def _widen_f16(v: Vector, x: str) -> str:
    if not v.native_half:
        return _widen_by_integers(v, x, "F16")
    half = v.convert("bitcast", "i16", x, "half")
    return v.as_bits(v.convert("fpext", "half", half, "float"))


def _widen_bf16(v: Vector, x: str) -> str:
    return v.op("shl", "i32", v.convert("zext", "i16", x, "i32"), 16)


def widen_f32(v: Vector, x: str) -> str:
    """Write LLVM IR from float32 bits to float64 bits; return the result's name."""
    value = v.as_float(x)
    return v.convert("bitcast", "double", v.convert("fpext", "float", value, "double"), "i64")


def nearest_f32(v: Vector, x: str) -> str:
    """Write LLVM IR from float64 bits to float32 bits, rounded to nearest; return its name."""
    value = v.convert("bitcast", "i64", x, "double")
    return v.as_bits(v.convert("fptrunc", "double", value, "float"))


def _odd_f32(v: Vector, x: str) -> str:
    """Write LLVM IR from float64 bits to float32 bits: truncated, the last bit set if inexact."""
    nearest = nearest_f32(v, x)
    lengths = [
        v.convert("bitcast", "i64", v.op("and", "i64", bits, FLOATS["F64"].magnitude), "double")
        for bits in (widen_f32(v, nearest), x)
    ]
    was_raised = v.op("fcmp ogt", "double", *lengths)
    is_inexact = v.op("fcmp one", "double", *lengths)
    truncated = v.op("add", "i32", nearest, v.convert("sext", "i1", was_raised, "i32"))
    return v.op("or", "i32", truncated, v.convert("zext", "i1", is_inexact, "i32"))


def _narrow_to_f16(v: Vector, x: str) -> str:
    if v.native_half:
        value = v.as_float(x)
        return v.convert("bitcast", "half", v.convert("fptrunc", "float", value, "half"), "i16")
    magnitude = v.op("and", "i32", x, 0x7FFFFFFF)
    sign = v.op("lshr", "i32", v.op("xor", "i32", x, magnitude), 16)
    last = v.op("and", "i32", v.op("lshr", "i32", magnitude, 13), 1)
    raised = v.op("add", "i32", v.op("add", "i32", magnitude, last), 0xFFF - (112 << 23))
    normal = v.op("lshr", "i32", raised, 13)
    # below 2^-14 the last bit is 2^-24, as it is of a float32 from 0.5 to 1: the sum rounds there
    shifted = v.op("fadd", "float", v.as_float(magnitude), 0.5)
    subnormal = v.op("sub", "i32", v.as_bits(shifted), 0x3F000000)
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


#: dtype code to a writer of IR from elements, as integers, to float32 bits (float64 rounded to odd)
WIDEN: Mapping[str, Callable[[Vector, str], str]] = {
    "F8_E5M2": partial(_widen_by_integers, code="F8_E5M2"),
    "F8_E4M3": partial(_widen_by_integers, code="F8_E4M3"),
    "F16": _widen_f16,
    "BF16": _widen_bf16,
    "F32": _same,
    "F64": _odd_f32,
}
#: dtype code to a writer of IR from float32 bits to elements, as integers, to nearest even
NARROW: Mapping[str, Callable[[Vector, str], str]] = {
    "F16": _narrow_to_f16,
    "BF16": _narrow_to_bf16,
    "F32": _same,
    "F64": widen_f32,
}

#: architecture to IR that enters the default floating-point environment, and IR that leaves it
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


def kernel_text(symbol: str, parameters: str, body: Iterable[str], architecture: str = "") -> str:
    """Return a kernel's IR; it sets the default float environment if `ENVIRONMENT` has the IR."""
    enter, leave = ENVIRONMENT.get(architecture, ("", ""))
    lines = "\n  ".join((enter, *body, leave))
    return f"define void @{symbol}({parameters}) nounwind {{\nentry:\n  {lines}\n  ret void\n}}\n"


def numbers(values: Iterable[int]) -> str:
    """Return the IR text of a constant vector of i32."""
    return f"<{', '.join(f'i32 {value}' for value in values)}>"


def shuffle(v: Vector, of: str, a: str, b: str, order: Sequence[int]) -> str:
    """Write IR of elements ``order`` of ``a`` joined with ``b`` (type ``of``); return its name."""
    return v.emit(f"shufflevector {of} {a}, {of} {b}, <{len(order)} x i32> {numbers(order)}")


def chosen(
    v: Vector, scalar: str, masks: Iterable[str], values: Sequence[str | float]
) -> str | float:
    """Write IR of one of 2^n values per element; n ``masks``: index bits, low first; return it."""
    some = list(values)
    for mask in masks:
        pairs = zip(some[1::2], some[::2], strict=True)
        some = [v.select(mask, scalar, high, low) for high, low in pairs]
    return some[0]


def looked_up(v: Vector, table: str, codes: str) -> str:
    """Write IR of the float32 values at i8 codes below 16 in a table of 16; return its name."""
    if v.width == 1:
        index = v.convert("zext", "i8", codes, "i64")
        place = v.emit(f"getelementptr float, ptr {table}, i64 {index}")
        return v.emit(f"load float, ptr {place}")
    if v.lanes < 8 or v.width % v.lanes:
        values = []
        for code in range(16):
            place = v.emit(f"getelementptr float, ptr {table}, i64 {code}")
            values.append(splat(v, "float", v.emit(f"load float, ptr {place}")))
        bits = (v.op("icmp ne", "i8", v.op("and", "i8", codes, 1 << n), 0) for n in range(4))
        return str(chosen(v, "float", list(bits), values))
    n = v.lanes
    permute = {16: "@llvm.x86.avx512.permvar.sf.512", 8: "@llvm.x86.avx2.permps"}[n]
    some = Vector(n, v.native_half, n)
    some.lines = v.lines
    of, ints = some.type("float"), some.type("i32")
    parts = []
    for start in range(0, 16, n):
        place = v.emit(f"getelementptr float, ptr {table}, i64 {start}")
        parts.append(v.emit(f"load {of}, ptr {place}, align 4"))
    found = []
    for start in range(0, v.width, n):
        order = numbers(range(start, start + n))
        piece = v.emit(
            f"shufflevector {v.type('i8')} {codes}, {v.type('i8')} poison, <{n} x i32> {order}"
        )
        wide = some.convert("zext", "i8", piece, "i32")
        each = [v.emit(f"call {of} {permute}({of} {part}, {ints} {wide})") for part in parts]
        if len(each) == 2:
            is_high = some.op("icmp ugt", "i32", wide, 7)
            each = [some.select(is_high, "float", each[1], each[0])]
        found.append(each[0])
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [shuffle(v, f"<{n} x float>", a, b, range(2 * n)) for a, b in pairs]
        n *= 2
    return found[0]


def splat(v: Vector, scalar: str, value: str) -> str:
    """Write LLVM IR of a vector that has a scalar in every element; return the result's name."""
    if v.width == 1:
        return value
    of = v.type(scalar)
    first = v.emit(f"insertelement {of} poison, {scalar} {value}, i32 0")
    return v.emit(f"shufflevector {of} {first}, {of} poison, <{v.width} x i32> zeroinitializer")


def maximum(v: Vector, scalar: str, a: str, b: str) -> str:
    """Write LLVM IR of the larger of two unsigned integers, for each element; return its name."""
    return _intrinsic(v, "umax", scalar, a, b)


def minimum(v: Vector, scalar: str, a: str, b: str | int) -> str:
    """Write LLVM IR of the smaller of two unsigned integers, for each element; return its name."""
    return _intrinsic(v, "umin", scalar, a, b)


def _intrinsic(v: Vector, name: str, scalar: str, *operands: str | float) -> str:
    of = v.type(scalar)
    short = {"double": "f64", "float": "f32"}.get(scalar, scalar)
    suffix = short if v.width == 1 else f"v{v.width}{short}"
    listed = ", ".join(f"{of} {v.operand(scalar, operand)}" for operand in operands)
    return v.emit(f"call {of} @llvm.{name}.{suffix}({listed})")


def fused(v: Vector, a: str, b: str, c: str) -> str:
    """Write LLVM IR of ``a * b + c`` in float32, rounded once if the CPU can; return its name."""
    return _intrinsic(v, "fmuladd", "float", a, b, c)


def square_sum(v: Vector, x: str, total: str) -> str:
    """Write LLVM IR that adds the squares of float32 elements to float64 sums; return its name."""
    wide = v.convert("fpext", "float", x, "double")
    return _intrinsic(v, "fmuladd", "double", wide, wide, total)


def clean(v: Vector, source: FloatFormat, x: str, largest: str) -> str:
    """Write IR on float bits: NaN becomes 0, magnitudes at most ``largest``; return its name."""
    lane = f"i{source.bits}"
    magnitude = v.op("and", lane, x, source.magnitude)
    is_nan = v.op("icmp ugt", lane, magnitude, source.special)
    sign = v.op("xor", lane, x, magnitude)
    kept = v.op("or", lane, minimum(v, lane, magnitude, largest), sign)
    return v.select(is_nan, lane, 0, kept)


def to_float(v: Vector, src: DType, x: str) -> str:
    """Write IR from elements of dtype ``src``, as integers, to float32 values; return its name."""
    return v.as_float(WIDEN[src.code](v, x))


def magnitude_bits(v: Vector, x: str) -> str:
    """Write LLVM IR of the bits of float32 magnitudes; these integers sort alike, NaN last."""
    return v.op("and", "i32", v.as_bits(x), 0x7FFFFFFF)


def flushed_ir(v: Vector, x: str) -> str:
    """Write IR that replaces subnormal float32 values by zeros of their sign; return its name."""
    is_normal = v.op("icmp uge", "i32", magnitude_bits(v, x), 1 << 23)
    bits = v.as_bits(x)
    sign = v.op("and", "i32", bits, -(1 << 31))
    return v.as_float(v.select(is_normal, "i32", bits, sign))


def loop(
    v: Vector,
    start: str,
    stop: str,
    step: int | str,
    carried: Sequence[tuple[str, str]],
    body: Callable[[str, list[str]], Sequence[str]],
) -> list[str]:
    """Write a loop over i64 indices, ``stop`` exclusive; return the carried values at its end.

    ``carried``: (IR type, first value) of each value that iterations update; ``body`` writes an
    iteration from the index and the carried values, and returns their updates.
    """
    key = f"%l{len(v.lines)}"
    label = key[1:]
    v.lines += [f"br label {key}.before", f"{label}.before:", f"br label {key}.head"]
    v.lines += [f"{label}.head:", "", f"{key}.more = icmp ult i64 {key}.i, {stop}"]
    head = len(v.lines) - 2
    v.lines += [f"br i1 {key}.more, label {key}.body, label {key}.exit", f"{label}.body:"]
    names = [f"{key}.c{index}" for index in range(len(carried))]
    ends = body(f"{key}.i", names)
    v.lines += [f"br label {key}.end", f"{label}.end:", f"{key}.next = add i64 {key}.i, {step}"]
    v.lines += [f"br label {key}.head", f"{label}.exit:"]
    phis = [("i64", start), *carried]
    afters = zip((f"{key}.i", *names), phis, (f"{key}.next", *ends), strict=True)
    v.lines[head] = "\n  ".join(
        f"{name} = phi {of} [{first}, {key}.before], [{end}, {key}.end]"
        for name, (of, first), end in afters
    )
    return names
