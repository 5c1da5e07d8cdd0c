"""The nesting of 4-bit blocks' statistics as a CUDA kernel: `quant.dynamic` there.

Codes are those of bitsandbytes' `kQuantizeBlockwise` of 256 values, with the device's reciprocal. A
warp takes a block of values. The map is read from the part that holds it.
"""

from __future__ import annotations

from functools import cache

from streamload.codecs.cast import Vector
from streamload.codecs.cast_cuda import BLOCK_THREADS, TRIPLE, compile_ptx
from streamload.codecs.kernels import loop, magnitude_bits, maximum
from streamload.codecs.schemes.bitsandbytes import flushed_ir
from streamload.codecs.schemes.bitsandbytes_nested import BLOCK
from streamload.core.disk_cache import keep, read_kept
from streamload.errors import UnsupportedCastError

#: The kernel's name in its PTX.
SYMBOL = "nest"
_WARP = 32
_MAX_BLOCKS = 512
_EACH = BLOCK // _WARP  # values of a thread

_KERNEL = """
target triple = "{triple}"

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32) convergent
declare float @llvm.nvvm.rcp.approx.ftz.f(float)

define ptx_kernel void @{symbol}(
    i64 %values, i64 %out, i64 %numel, i64 %offset.bits, i64 %scales, i64 %map
) nounwind {{
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %ntid = call i32 @llvm.nvvm.read.ptx.sreg.ntid.x()
  %ctaid = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %nctaid = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
  %before = mul i32 %ctaid, %ntid
  %thread = add i32 %before, %tid
  %threads = mul i32 %nctaid, %ntid
  %warp = lshr i32 %thread, 5
  %warps = lshr i32 %threads, 5
  %first = zext i32 %warp to i64
  %stride = zext i32 %warps to i64
  %lane = and i32 %tid, 31
  %member = zext i32 %lane to i64
  %offset.low = trunc i64 %offset.bits to i32
  %offset = bitcast i32 %offset.low to float
  %more = add i64 %numel, {last}
  %blocks = udiv i64 %more, {block}
  {body}
  ret void
}}
"""


def nested_blocks(numel: int) -> int:
    """How many blocks to launch for so many statistics: any other number gives the same codes."""
    return min(max(-(-numel // (_EACH * BLOCK_THREADS)), 1), _MAX_BLOCKS)


def nested_ptx() -> str:
    """PTX of the kernel: ``nest(values, out, numel, offset, scales, map)``, all of 64 bits.

    From ``numel`` float32 statistics at device address ``values`` it takes the float32 whose bits
    are ``offset``, and writes a code each from ``out`` on, and a float32 scale for each 256 from
    ``scales`` on. ``map`` is the address of the 256 values of `dynamic.dynamic_map`. It is launched
    in any number of blocks (`nested_blocks` suggests one) of `BLOCK_THREADS` threads in one
    dimension, without dynamic shared memory.

    Raises:
        UnsupportedCastError: the text is not kept, and llvmlite is missing or has no NVPTX.
    """
    try:
        return _nested_ptx()
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCastError(
            "float32", "uint8", reason=f"no CUDA kernel without llvmlite's NVPTX: {error}"
        ) from error


@cache
def _nested_ptx() -> str:
    v = Vector(1, native_half=True)
    loop(v, "%first", "%blocks", "%stride", [], lambda block, _: _nest(v, block))
    ir = _KERNEL.format(
        triple=TRIPLE, symbol=SYMBOL, last=BLOCK - 1, block=BLOCK, body="\n  ".join(v.lines)
    )
    depends_on = ("ptx", "nest", ir)
    kept = read_kept(*depends_on)
    if kept is not None:
        return kept.decode()
    ptx = compile_ptx(ir)
    keep(ptx.encode(), *depends_on)
    return ptx


def _nest(v: Vector, block: str) -> list[str]:
    """Instructions for a thread of a block of values."""
    begin = v.op("mul", "i64", block, BLOCK)
    values, places = [], []
    most = "0"
    for index in range(_EACH):
        at = v.op("add", "i64", v.op("add", "i64", begin, "%member"), index * _WARP)
        is_there = v.op("icmp ult", "i64", at, "%numel")
        x = _float(v, "%values", v.select(is_there, "i64", at, 0))
        x = flushed_ir(v, v.op("fsub", "float", x, "%offset"))
        values.append(v.select(is_there, "float", x, 0.0))
        places.append((at, is_there))
        most = maximum(v, "i32", most, magnitude_bits(v, values[-1]))
    for distance in (16, 8, 4, 2, 1):
        there = v.emit(
            f"call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 {most}, i32 {distance}, i32 31)"
        )
        most = maximum(v, "i32", most, there)
    scale = v.convert("bitcast", "i32", most, "float")
    inverse = v.emit(f"call float @llvm.nvvm.rcp.approx.ftz.f(float {scale})")
    is_zero = v.op("icmp eq", "i32", most, 0)
    codes = [
        # zero times infinity is NaN, and above nothing
        v.select(is_zero, "i32", 0, _searched(v, v.op("fmul", "float", x, inverse)))
        for x in values
    ]
    stores = [
        (is_there, f"store i8 {v.convert('trunc', 'i32', code, 'i8')}", ("%out", at, 1))
        for code, (at, is_there) in zip(codes, places, strict=True)
    ]
    is_first = v.op("icmp eq", "i64", "%member", 0)
    for mask, store, place in [
        *stores,
        (is_first, f"store float {scale}", ("%scales", block, 4)),
    ]:
        label = f"s{len(v.lines)}"
        v.lines += [f"br i1 {mask}, label %{label}.yes, label %{label}.no", f"{label}.yes:"]
        v.lines.append(f"{store}, ptr addrspace(1) {_place(v, *place)}, align {place[2]}")
        v.lines += [f"br label %{label}.no", f"{label}.no:"]
    return []


def _place(v: Vector, base: str, index: str, nbytes: int) -> str:
    at = v.op("add", "i64", base, v.op("mul", "i64", index, nbytes))
    return v.emit(f"inttoptr i64 {at} to ptr addrspace(1)")


def _float(v: Vector, base: str, index: str) -> str:
    return v.emit(f"load float, ptr addrspace(1) {_place(v, base, index, 4)}, align 4")


def _searched(v: Vector, x: str) -> str:
    """The code of a value, found as bitsandbytes' `dQuantize` does."""

    def value(index: str) -> str:
        return _float(v, "%map", v.convert("zext", "i32", index, "i64"))

    pivot, above, below = (v.op("add", "i32", start, 0) for start in (127, 255, 0))
    step = 64
    while step:
        is_above = v.op("fcmp ogt", "float", x, value(pivot))
        below = v.select(is_above, "i32", pivot, below)
        above = v.select(is_above, "i32", above, pivot)
        pivot = v.op("add", "i32", pivot, v.select(is_above, "i32", step, -step))
        step //= 2
    middle = value(pivot)
    is_above = v.op("fcmp ogt", "float", x, middle)
    up, down = (
        v.op("fmul", "float", v.op("fadd", "float", value(bound), middle), 0.5)
        for bound in (above, below)
    )
    upper = v.select(v.op("fcmp ogt", "float", x, up), "i32", above, pivot)
    lower = v.select(v.op("fcmp olt", "float", x, down), "i32", below, pivot)
    return v.select(is_above, "i32", upper, lower)
