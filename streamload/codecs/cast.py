"""Cast kernels for the CPU: LLVM IR, compiled once per process and called without the GIL.

Every kernel is a loop over vectors with two bodies. Nearly all vectors of real
weights hold only zeros and numbers that are normal before and after the cast (`plain_range`). For
them the cast is one instruction, or a shift and an addition, nothing overflows or vanishes, and
only low bits are lost (`_plain`). `careful` is right for any elements.

Kernels depend on nothing outside themselves:

- No external symbol. If a CPU lacks an instruction, LLVM calls a helper (``__truncsfhf2`` and its
  kind) that a JIT does not resolve, and the process dies in the call. Each object is scanned before
  it is linked (`llvm.undefined_symbols`), and half precision has an integer form for CPUs that
  cannot convert it.
- No floating-point state of the calling thread. On x86-64 and AArch64 a kernel runs in the default
  environment of IEEE 754 (nearest even, subnormals kept, no traps) and restores the caller's:
  libraries compiled with ``-ffast-math`` leave flush-to-zero set in foreign threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from functools import partial

from streamload.codecs.floats import FLOATS, flush_stop, lossless, overflow_start, plain_range
from streamload.codecs.ir import NARROW, WIDEN, Vector, kernel_text, loop, nearest_f32, widen_f32
from streamload.codecs.llvm import HostFunction, Kernel
from streamload.core.dtypes import DType

_BLOCK_VECTORS = 1 << 15  # the counts of so many vectors fit 16-bit lanes
_WIDTH = 32  # elements of a step; a power of two


# dtype pairs whose every value one or two instructions cast
_DIRECT = frozenset({("BF16", "F32"), ("BF16", "F64"), ("F32", "F64"), ("F64", "F32")})
_DIRECT_WITH_NATIVE_HALF = frozenset(
    {("F16", "F32"), ("F16", "F64"), ("F32", "F16"), ("BF16", "F16")}
)


def _hub(v: Vector, src: DType, dst: DType, x: str) -> str:
    """Write IR that converts elements to float32 bits, the input of `NARROW`; return their name."""
    if dst.code == "F32" and src.code == "F64":
        return nearest_f32(v, x)  # the one rounding there is
    return WIDEN[src.code](v, x)


def _plain(
    v: Vector, src: DType, dst: DType, x: str, sums: list[str], *, direct: bool
) -> tuple[str, list[str]]:
    """Write IR that casts elements, each zero or in `plain_range`; return them and new counts.

    ``sums`` are counts so far of elements that overflowed, became zero, and changed in value; empty
    if nothing is counted. ``direct``: the CPU has an instruction for the cast.
    """
    source, target = FLOATS[src.code], FLOATS[dst.code]
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
    """Write IR that casts any elements, zero, infinity and NaN included, by integer operations.

    Also returns masks of those that overflowed, became zero, and changed in value; a mask is None
    if that cannot happen to any element of ``src``.
    """
    source, lane = FLOATS[src.code], f"i{src.bits}"
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
        after = widen_f32(v, y) if dst.code == "F32" else WIDEN[dst.code](v, y)
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
    """Return IR of ``void name(src, out, numel, tally)``: a cast, ``width`` elements a step."""
    v = Vector(width, native_half)
    pair = (src.code, dst.code)
    direct = pair in _DIRECT or (native_half and pair in _DIRECT_WITH_NATIVE_HALF)
    lane = f"i{src.bits}"
    sums = [f"%sum{slot}" for slot in range(0 if lossless(src, dst) else 3)]

    x = v.emit(f"load {v.type(lane)}, ptr %src.at, align 1")
    special = "false"
    if sums or not direct:
        start, stop = plain_range(src, dst, direct=direct)
        magnitude = v.op("and", lane, x, FLOATS[src.code].magnitude)
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
        ends.append(ADD_COUNT.format(slot=slot, value=f"%add{slot}"))
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


#: IR template: add the i64 ``value`` to item ``slot`` of ``%tally``.
ADD_COUNT = """
  %slot{slot} = getelementptr i64, ptr %tally, i64 {slot}
  %old{slot} = load i64, ptr %slot{slot}
  %new{slot} = add i64 %old{slot}, {value}
  store i64 %new{slot}, ptr %slot{slot}
"""

#: IR template of a function that writes elements to ``%out`` in steps of ``width``, which divides
#: ``%numel``. ``body`` ends in the label ``join``, and computes the elements ``y`` from ``%at`` on.
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

_BLOCK = """
  %left = sub i64 %whole, {at}
  %is.last = icmp ult i64 %left, {block}
  %take = select i1 %is.last, i64 %left, i64 {block}
  %src.at = getelementptr {source}, ptr %src, i64 {at}
  %out.at = getelementptr {target}, ptr %out, i64 {at}
  call void @vectors(ptr %src.at, ptr %out.at, i64 %take, ptr %tally)
"""

_REST = """
  %src.rest = getelementptr {source}, ptr %src, i64 %whole
  %out.rest = getelementptr {target}, ptr %out, i64 %whole
  %few = sub i64 %numel, %whole
  call void @scalars(ptr %src.rest, ptr %out.rest, i64 %few, ptr %tally)
"""


def kernel_ir(src: DType, dst: DType, *, clamp: bool, native_half: bool, architecture: str) -> str:
    """Return LLVM IR of a cast kernel: ``void cast(src, out, numel, tally)``.

    The kernel casts ``numel`` little-endian elements from ``src`` to ``out``, which may have any
    alignment and must not overlap, and adds to ``tally[0:3]`` (64-bit, aligned) how many finite
    elements overflowed, how many nonzero ones became zero, and how many changed in value at all
    (those two included); a lossless pair leaves the tally alone. With ``clamp`` finite elements
    that overflow become the largest finite value of their sign. On an unknown ``architecture`` it
    runs in the caller's floating-point environment.
    """
    functions = (
        _function(name, src, dst, clamp=clamp, native_half=native_half, width=width)
        for name, width in (("vectors", _WIDTH), ("scalars", 1))
    )
    one = Vector(1, native_half)
    lanes = {"source": f"i{src.bits}", "target": f"i{dst.bits}"}

    def block(at: str, _: list[str]) -> Sequence[str]:
        one.lines.append(_BLOCK.format(at=at, block=_WIDTH * _BLOCK_VECTORS, **lanes))
        return ()

    one.lines.append(f"%whole = and i64 %numel, -{_WIDTH}")
    loop(one, "0", "%whole", "%take", (), block)
    one.lines.append(_REST.format(**lanes))
    parameters = "ptr %src, ptr %out, i64 %numel, ptr %tally"
    return "".join(functions) + kernel_text(FUNCTION.symbol, parameters, one.lines, architecture)


FUNCTION = HostFunction("cast", (c_void_p, c_void_p, c_uint64, c_void_p), is_kept=False)


def compile_kernel(src: DType, dst: DType, *, clamp: bool = False) -> Kernel:
    """Return the compiled `kernel_ir` of a pair of `floats.PAIRS`; see `HostFunction.kernel`."""
    clamp = clamp and overflow_start(src, dst) is not None
    ir = partial(kernel_ir, src, dst, clamp=clamp)
    return FUNCTION.kernel((src, dst, clamp), (src.name, dst.name), ir)
