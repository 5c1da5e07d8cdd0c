"""The quantization of 4-bit blocks' statistics on CUDA; see `bitsandbytes_nested.quantized`.

Codes are those of bitsandbytes' `kQuantizeBlockwise` of 256 values, with the device's reciprocal. A
warp quantizes a block of values. The map is read from its stored array.
"""

from __future__ import annotations

from functools import cache, partial

from streamload.codecs.ir import flushed_ir, loop, magnitude_bits, maximum
from streamload.codecs.ptx import BLOCK_THREADS, WARP, ThreadWriter, kept_ptx
from streamload.codecs.schemes.bitsandbytes_nested import BLOCK

#: The kernel's name in its PTX.
SYMBOL = "nest"
_MAX_BLOCKS = 512
_EACH = BLOCK // WARP  # values of a thread


def nested_blocks(numel: int) -> int:
    """Return how many CUDA blocks to launch for ``numel`` statistics; any number is correct."""
    return min(max(-(-numel // (_EACH * BLOCK_THREADS)), 1), _MAX_BLOCKS)


@cache
def nested_ptx() -> str:
    """Return PTX of ``nest(values, out, numel, offset, scales, map)``, all of 64 bits.

    From ``numel`` float32 statistics at device address ``values`` the kernel subtracts the float32
    with bits ``offset``, and writes a code each from ``out`` on, and a float32 scale for each 256
    from ``scales`` on. ``map`` is the address of the 256 values of `dynamic_map`. It is launched in
    any number of blocks (`nested_blocks` suggests one) of `BLOCK_THREADS` threads in one dimension,
    without dynamic shared memory.
    """
    t = ThreadWriter()
    t.lines += [
        "%before = mul i32 %ctaid, %ntid",
        "%number = add i32 %before, %tid",
        "%all = mul i32 %nctaid, %ntid",
        "%warp = lshr i32 %number, 5",
        "%warps = lshr i32 %all, 5",
        "%first = zext i32 %warp to i64",
        "%stride = zext i32 %warps to i64",
        "%member = zext i32 %lane to i64",
        "%offset.low = trunc i64 %offset.bits to i32",
        "%offset = bitcast i32 %offset.low to float",
        f"%more = add i64 %numel, {BLOCK - 1}",
        f"%units = udiv i64 %more, {BLOCK}",
    ]
    loop(t, "%first", "%units", "%stride", [], lambda block, _: _nest(t, block))
    ir = t.kernel(SYMBOL, "values out numel offset.bits scales map")
    return kept_ptx(ir, ("float32", "uint8"))


def _nest(t: ThreadWriter, block: str) -> list[str]:
    """Write a loop's body, in which a warp quantizes block number ``block``; nothing is carried."""
    begin = t.op("mul", "i64", block, BLOCK)
    values, places = [], []
    most = "0"
    for index in range(_EACH):
        at = t.op("add", "i64", t.op("add", "i64", begin, "%member"), index * WARP)
        exists = t.op("icmp ult", "i64", at, "%numel")
        x = t.load("float", 4, "%values", t.select(exists, "i64", at, 0))
        x = flushed_ir(t, t.op("fsub", "float", x, "%offset"))
        values.append(t.select(exists, "float", x, 0.0))
        places.append((at, exists))
        most = maximum(t, "i32", most, magnitude_bits(t, values[-1]))
    most = t.over_warp(most, lambda a, b: maximum(t, "i32", a, b))
    scale = t.as_float(most)
    inverse = t.emit(f"call float @llvm.nvvm.rcp.approx.ftz.f(float {scale})")
    is_zero = t.op("icmp eq", "i32", most, 0)
    for x, (at, exists) in zip(values, places, strict=True):
        # zero times infinity is NaN, and above nothing
        code = t.select(is_zero, "i32", 0, _searched(t, t.op("fmul", "float", x, inverse)))
        store = "i8", 1, t.convert("trunc", "i32", code, "i8"), "%out", at
        t.when(exists, partial(t.store, *store))
    is_first = t.op("icmp eq", "i64", "%member", 0)
    t.when(is_first, lambda: t.store("float", 4, scale, "%scales", block))
    return []


def _searched(t: ThreadWriter, x: str) -> str:
    """Write IR of a scaled value's code, found as by bitsandbytes' `dQuantize`; return its name."""

    def value(index: str) -> str:
        return t.load("float", 4, "%map", t.convert("zext", "i32", index, "i64"))

    pivot, above, below = (t.op("add", "i32", start, 0) for start in (127, 255, 0))
    for step in (64, 32, 16, 8, 4, 2, 1):
        is_above = t.op("fcmp ogt", "float", x, value(pivot))
        below = t.select(is_above, "i32", pivot, below)
        above = t.select(is_above, "i32", above, pivot)
        pivot = t.op("add", "i32", pivot, t.select(is_above, "i32", step, -step))
    middle = value(pivot)
    is_above = t.op("fcmp ogt", "float", x, middle)
    up, down = (
        t.op("fmul", "float", t.op("fadd", "float", value(bound), middle), 0.5)
        for bound in (above, below)
    )
    upper = t.select(t.op("fcmp ogt", "float", x, up), "i32", above, pivot)
    lower = t.select(t.op("fcmp olt", "float", x, down), "i32", below, pivot)
    return t.select(is_above, "i32", upper, lower)
