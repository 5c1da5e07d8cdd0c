"""LLVM IR that dequantizes values by their scales on the host; `Values` has a layout's part.

Nearly all vectors multiply in float32 and narrow the product. That is right if the product is
normal before and after, and no midpoint of the target: float32 then rounds to the same side as one
rounding of the exact product would. A product that is a midpoint, or a value that the target holds,
may have been rounded to it, unless scale and value are short enough. Such vectors, and those with
NaN, elements out of range or a scale of 0, multiply in float64 (exact) and take `cast.careful`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import c_void_p
from functools import partial

import numpy as np

from streamload.codecs.cast import ADD_COUNT, LOOP, careful
from streamload.codecs.floats import FLOATS, plain_range
from streamload.codecs.ir import NARROW, Vector, kernel_text, loop, shuffle, splat
from streamload.codecs.llvm import HostFunction, Kernel
from streamload.codecs.parts import Array
from streamload.core.dtypes import F32, F64, DType

FUNCTION = HostFunction("dequantise", (c_void_p,) * 7)
_WIDTH = 32  # elements of a step


class Values(ABC):
    """How a layout stores values, as codes of 4 or 8 bits; equal objects share a kernel.

    Attributes:
        bits: bits of a code: 4 or 8.
        high_first: whether the first of the two codes in a byte has the high bits.
        significant_bits: significant bits of the number that a code stands for.
        exponents: scales are bytes b for 2^(b - 127), else float32.
        has_nan: an exponent of 255 is NaN, else infinity.
        has_zeros: a zero point is subtracted from each value.
        has_table: values are those of `Weight.table`.
        nested: how many scales share a nested one; 0 if scales are stored as they are.
    """

    name: str
    significant_bits: int
    bits: int = 8
    high_first: bool = False
    exponents: bool = False
    has_nan: bool = False
    has_zeros: bool = False
    has_table: bool = False
    nested: int = 0

    @abstractmethod
    def instructions(self, v: Vector, codes: str) -> str:
        """Write IR from codes (i8) to float32, by ``%table`` (`Weight.table`); return its name."""

    @abstractmethod
    def decoded(self, codes: Array, table: Array) -> Array:
        """Return the float32 values of codes, one in a byte; ``table`` is `Weight.table`."""

    def unpacked(self, packed: Array) -> Array:
        """Return the codes in packed bytes, one in a byte."""
        if self.bits == 8:
            return packed
        both = (packed >> 4, packed & 15) if self.high_first else (packed & 15, packed >> 4)
        return np.stack(both, axis=1).reshape(-1)


def load(v: Vector, values: Values, index: str = "%index") -> str:
    """Write IR that loads codes from element ``index`` of ``%src`` on, as i8; return its name."""
    if values.bits == 8:
        place = v.emit(f"getelementptr i8, ptr %src, i64 {index}")
        return v.emit(f"load {v.type('i8')}, ptr {place}, align 1")
    place = v.emit("getelementptr i8, ptr %src, i64 " + v.emit(f"lshr i64 {index}, 1"))
    if v.width == 1:
        both = v.emit(f"load i8, ptr {place}, align 1")
        is_second = v.emit(f"trunc i64 {index} to i1")
        low, high = v.op("and", "i8", both, 15), v.op("lshr", "i8", both, 4)
        first, second = (high, low) if values.high_first else (low, high)
        return v.select(is_second, "i8", second, first)
    half = v.width // 2
    of = f"<{half} x i8>"
    both = v.emit(f"load {of}, ptr {place}, align 1")
    low, high = v.emit(f"and {of} {both}, splat (i8 15)"), v.emit(f"lshr {of} {both}, splat (i8 4)")
    first, second = (high, low) if values.high_first else (low, high)
    return shuffle(v, of, first, second, [j for i in range(half) for j in (i, i + half)])


def _count(v: Vector, total: str, mask: str) -> str:
    if v.width == 1:
        more = v.emit(f"zext i1 {mask} to i64")
    else:
        bits = v.emit(f"bitcast {v.type('i1')} {mask} to i{v.width}")
        ones = v.emit(f"call i{v.width} @llvm.ctpop.i{v.width}(i{v.width} {bits})")
        more = v.emit(f"zext i{v.width} {ones} to i64")
    return v.emit(f"add i64 {total}, {more}")


def _exact(
    v: Vector, dst: DType, value: str, scale: str, sums: list[str], *, clamp: bool
) -> tuple[str, list[str]]:
    """Write IR that rounds the exact ``value * scale`` to ``dst``; return it and the counts."""
    wide = (v.convert("fpext", "float", each, "double") for each in (value, scale))
    product = v.convert("bitcast", "double", v.op("fmul", "double", *wide), "i64")
    y, (over, flushed, changed) = careful(v, F64, dst, product, clamp=clamp)
    is_lost = v.op("fcmp oeq", "float", scale, 0.0)
    is_lost = v.op("and", "i1", is_lost, v.op("fcmp one", "float", value, 0.0))
    masks = (over, *(v.op("or", "i1", mask or is_lost, is_lost) for mask in (flushed, changed)))
    return y, [
        _count(v, total, mask) if mask else total for total, mask in zip(sums, masks, strict=True)
    ]


def product(
    v: Vector,
    values: Values,
    dst: DType,
    codes: str,
    sums: list[str],
    *,
    clamp: bool,
    key: str = "",
) -> tuple[str, list[str]]:
    """Write LLVM IR of elements from codes, ``%scale``, ``%zero`` and ``%guard`` (see `scale_of`).

    ``codes`` are i8, ``sums`` i64 counts of the masks of `cast.careful`; returned are the elements
    and the updated counts. Labels end in ``key``; the last is ``join`` and this.
    """
    value = values.instructions(v, codes)
    if values.has_zeros:
        value = v.op("fsub", "float", value, splat(v, "float", "%zero"))
    scale = splat(v, "float", "%scale")
    if dst is F32:
        y, ends = _exact(v, dst, value, scale, sums, clamp=clamp)
        v.lines += [f"br label %join{key}", f"join{key}:"]
        return y, ends
    lost = FLOATS["F32"].mantissa_bits - FLOATS[dst.code].mantissa_bits
    bits = v.as_bits(v.op("fmul", "float", value, scale))
    start, stop = plain_range(F32, dst, direct=False)
    magnitude = v.op("and", "i32", bits, FLOATS["F32"].magnitude)
    is_special = v.op("icmp uge", "i32", v.op("sub", "i32", magnitude, start), stop - start)
    low = v.op("and", "i32", bits, (1 << (lost - 1)) - 1)
    is_doubtful = v.op("icmp eq", "i32", low, splat(v, "i32", "%guard"))
    is_special = v.op("or", "i1", is_special, is_doubtful)
    is_special = v.op("and", "i1", is_special, v.op("fcmp une", "float", value, 0.0))
    any_special = v.emit(v.reduced("or", "i1", is_special))
    v.lines += [f"br i1 {any_special}, label %careful{key}, label %plain{key}", f"careful{key}:"]
    cared, cared_sums = _exact(v, dst, value, scale, sums, clamp=clamp)
    v.lines += [f"br label %join{key}", f"plain{key}:"]
    narrowed = NARROW[dst.code](v, bits)
    is_rounded = v.op("icmp ne", "i32", v.op("and", "i32", bits, (1 << lost) - 1), 0)
    plain_sums = [*sums[:2], _count(v, sums[2], is_rounded)]
    v.lines += [f"br label %join{key}", f"join{key}:"]
    of = v.type(f"i{dst.bits}")
    y = v.emit(f"phi {of} [{cared}, %careful{key}], [{narrowed}, %plain{key}]")
    ends = [
        v.emit(f"phi i64 [{a}, %careful{key}], [{b}, %plain{key}]")
        for a, b in zip(cared_sums, plain_sums, strict=True)
    ]
    return y, ends


def _segment(
    name: str, values: Values, dst: DType, *, clamp: bool, native_half: bool, width: int
) -> str:
    """Return IR of a function that dequantizes elements with a common scale, ``width`` a step."""
    v = Vector(width, native_half)
    sums = [f"%sum{slot}" for slot in range(3)]
    y, ends = product(v, values, dst, load(v, values), sums, clamp=clamp)
    carried = [
        f"{total} = phi i64 [0, %entry], [{end}, %join]"
        for total, end in zip(sums, ends, strict=True)
    ]
    return LOOP.format(
        name=name,
        arguments=_ARGUMENTS,
        attributes="alwaysinline" if width > 1 else "noinline",
        carried="\n  ".join(carried),
        body="\n  ".join(["%index = add i64 %first, %at", *v.lines]),
        target=f"i{dst.bits}",
        index="%index",
        stored=v.type(f"i{dst.bits}"),
        y=y,
        width=width,
        ends="".join(ADD_COUNT.format(slot=slot, value=end) for slot, end in enumerate(ends)),
    )


_ARGUMENTS = """
    ptr noalias %src, ptr noalias %out, i64 %first, i64 %numel, float %scale, float %zero,
    i32 %guard, ptr noalias %table, ptr noalias %tally
"""

_PLACE = (
    *("lines", "line.nbytes", "numel", "first", "pitch"),
    *("rows", "width", "tall", "wide", "per.row", "per.matrix"),
)

_PARAMETERS = """
    ptr noalias %src, ptr noalias %out, ptr noalias %scales, ptr noalias %zeros,
    ptr noalias %table, ptr noalias %place, ptr noalias %tally
"""

_LINE = """
  %src.offset = mul i64 {line}, %line.nbytes
  %src.line = getelementptr i8, ptr %src, i64 %src.offset
  %out.offset = mul i64 {line}, %numel
  %out.line = getelementptr {target}, ptr %out, i64 %out.offset
  %beyond = mul i64 {line}, %pitch
  %element = add i64 %first, %beyond
  %row.number = udiv i64 %element, %width
  %column.first = urem i64 %element, %width
  %matrix.first = udiv i64 %row.number, %rows
  %row.first = urem i64 %row.number, %rows
"""

_INDEX = """
  %across = udiv i64 {column}, %wide
  %down = udiv i64 {row}, %tall
  %before = mul i64 {matrix}, %per.matrix
  %above = mul i64 %down, %per.row
  %block.row = add i64 %before, %above
  %index = add i64 %block.row, %across
"""

_SEGMENT = """
  %block.next = add i64 %across, 1
  %block.end = mul i64 %block.next, %wide
  %stop = call i64 @llvm.umin.i64(i64 %block.end, i64 %width)
  %here = sub i64 %stop, {column}
  %left = sub i64 %numel, {at}
  %take = call i64 @llvm.umin.i64(i64 %here, i64 %left)
  %whole = and i64 %take, -{vector}
  %few = sub i64 %take, %whole
  %at.few = add i64 {at}, %whole
  call void @vectors(ptr %src.line, ptr %out.line, i64 {at}, i64 %whole, float %scale, float %zero,
                     i32 %guard, ptr %table, ptr %tally)
  %is.whole = icmp eq i64 %few, 0
  br i1 %is.whole, label %after, label %rest
rest:
  call void @scalars(ptr %src.line, ptr %out.line, i64 %at.few, i64 %few, float %scale, float %zero,
                     i32 %guard, ptr %table, ptr %tally)
  br label %after
after:
  %column.end = add i64 {column}, %take
  %is.row.end = icmp eq i64 %column.end, %width
  %column.next = select i1 %is.row.end, i64 0, i64 %column.end
  %row.more = zext i1 %is.row.end to i64
  %row.end = add i64 {row}, %row.more
  %is.matrix.end = icmp eq i64 %row.end, %rows
  %row.next = select i1 %is.matrix.end, i64 0, i64 %row.end
  %matrix.more = zext i1 %is.matrix.end to i64
  %matrix.next = add i64 {matrix}, %matrix.more
"""


def scale_at(values: Values, one: Vector, index: str) -> tuple[str, str]:
    """Write LLVM IR that loads the scale and the zero point at ``index``; return their names.

    Nested scales are codes at ``%scales``, for values at ``%map``, times ``%nested``, plus
    ``%offset``.
    """
    if values.nested:
        place = one.emit(f"getelementptr i8, ptr %scales, i64 {index}")
        code = one.emit(f"zext i8 {one.emit(f'load i8, ptr {place}')} to i64")
        outer = one.op("udiv", "i64", index, values.nested)
        found = (
            one.emit(f"load float, ptr {one.emit(f'getelementptr float, ptr {of}, i64 {at}')}")
            for of, at in (("%map", code), ("%nested", outer))
        )
        scale = one.op("fadd", "float", one.op("fmul", "float", *found), "%offset")
    elif values.exponents:
        place = one.emit(f"getelementptr i8, ptr %scales, i64 {index}")
        wide = one.emit(f"zext i8 {one.emit(f'load i8, ptr {place}')} to i32")
        shifted = one.op("shl", "i32", wide, 23)
        is_least = one.op("icmp eq", "i32", wide, 0)
        bits = one.select(is_least, "i32", 1 << 22, shifted)  # 2^-127: subnormal
        if values.has_nan:
            bits = one.select(one.op("icmp eq", "i32", wide, 255), "i32", 0x7FC00000, bits)
        scale = one.as_float(bits)
    else:
        place = one.emit(f"getelementptr float, ptr %scales, i64 {index}")
        scale = one.emit(f"load float, ptr {place}")
    if not values.has_zeros:
        return scale, "0.0"
    place = one.emit(f"getelementptr float, ptr %zeros, i64 {index}")
    return scale, one.emit(f"load float, ptr {place}")


def scale_of(values: Values, one: Vector, index: str = "%index") -> None:
    """Write LLVM IR that loads ``%scale`` and ``%zero`` at ``index`` of ``%scales`` and ``%zeros``.

    ``one`` receives the instructions. ``%guard`` becomes 0 if a float32 product whose low bits are
    0 may have been rounded to a midpoint or a value of the target, and -1 if scale and value are so
    short that all products are exact.
    """
    scale, zero = scale_at(values, one, index)
    one.lines += [f"%scale = fadd float {scale}, -0.0", f"%zero = fadd float {zero}, -0.0"]
    # a value and a scale of 24 bits together have an exact product
    mask = (1 << min(values.significant_bits, 23)) - 1
    is_short = one.op("icmp eq", "i32", one.op("and", "i32", one.as_bits("%scale"), mask), 0)
    one.lines.append(f"%guard = select i1 {is_short}, i32 -1, i32 0")


def kernel_ir(
    values: Values, dst: DType, *, clamp: bool, native_half: bool, architecture: str
) -> str:
    """Return LLVM IR of ``void dequantise(src, out, scales, zeros, table, place, tally)``.

    The kernel dequantizes ``src`` to ``out`` by the scales, zeros and table of a `Weight`, and adds
    to ``tally`` as that of `cast.kernel_ir`. ``place`` has 64 bits each: lines, bytes of a line,
    elements of a line, first and pitch as of `Decoder.decode`; then rows, width, tall, wide,
    per_row and per_matrix of the `Weight`.
    """
    functions = (
        _segment(name, values, dst, clamp=clamp, native_half=native_half, width=width)
        for name, width in (("vectors", _WIDTH), ("scalars", 1))
    )
    one = Vector(1, native_half)
    for slot, name in enumerate(_PLACE):
        place = one.emit(f"getelementptr i64, ptr %place, i64 {slot}")
        one.lines.append(f"%{name} = load i64, ptr {place}")

    def segment(at: str, carried: list[str]) -> Sequence[str]:
        position = dict(zip(("column", "row", "matrix"), carried, strict=True))
        one.lines.append(_INDEX.format(**position))
        scale_of(values, one)
        one.lines.append(_SEGMENT.format(at=at, vector=_WIDTH, **position))
        return "%column.next", "%row.next", "%matrix.next"

    def line(number: str, _: list[str]) -> Sequence[str]:
        one.lines.append(_LINE.format(line=number, target=f"i{dst.bits}"))
        starts = [("i64", f"%{name}.first") for name in ("column", "row", "matrix")]
        loop(one, "0", "%numel", "%take", starts, segment)
        return ()

    loop(one, "0", "%lines", 1, (), line)
    return "".join(functions) + kernel_text(FUNCTION.symbol, _PARAMETERS, one.lines, architecture)


def compile_kernel(values: Values, dst: DType, *, clamp: bool) -> Kernel:
    """Return the compiled kernel that dequantizes; see `kernel_ir`, `HostFunction.kernel`."""
    ir = partial(kernel_ir, values, dst, clamp=clamp)
    return FUNCTION.kernel((values, dst, clamp), (values.name, dst.name), ir)
