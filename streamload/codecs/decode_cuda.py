"""Dequantising as CUDA kernels: PTX that LLVM makes of the instructions that the host's have.

One kernel for each kind of values and each target. A thread takes the values of a byte, finds their
scale by where they lie in the weight, and goes on in strides. Elements may go to the place that a
transpose gives them: what a chunk writes meets in the device's cache. Elements and counts are those
of `quant.dequant`, the sign and payload of a NaN aside. See `devices.ptx` for what the text depends
on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.cast_cuda import (
    BLOCK_THREADS,
    CLEAR,
    COUNTS,
    GRID,
    PRELUDE,
    compile_ptx,
    tell,
)
from streamload.codecs.decode import PLACE_NBYTES, Weight, values_of
from streamload.codecs.decode_kernels import Values, load, product, scale_of
from streamload.codecs.group import Packed
from streamload.codecs.kernels import loop
from streamload.codecs.scheme import Array
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

#: The kernel's name in its PTX.
SYMBOL = "dequantise"
_MAX_BLOCKS = 2048  # as in `devices.ptx`
_THREAD_BYTES = 4
# what a weight begins with: 32 bits each, and the offset of what follows them
_PLACE = ("width", "rows", "tall", "wide", "per.row", "per.matrix", "outer", "inner")
_OFFSETS = ("zeros.offset", "table.offset")

_KERNEL = (
    PRELUDE
    + """
define ptx_kernel void @{symbol}(
    i64 %from, i64 %out, i64 %numel, i64 %tally, i64 %weight, i64 %beginning
) nounwind {{
entry:
  {grid}
  {clear}
  br label %begin
begin:
  {body}
  {tell}
  ret void
}}
"""
)


def blocks(numel: int, bits: int) -> int:
    """How many blocks to launch for so many elements: any other number gives the same result.

    Args:
        numel: elements.
        bits: of a value.
    """
    nbytes = numel * bits // 8
    return min(max(-(-nbytes // (_THREAD_BYTES * BLOCK_THREADS)), 1), _MAX_BLOCKS)


def weight_parts(weight: Weight, turned: tuple[int, int] | None) -> list[Array]:
    """What the kernel reads beside values, one after the other: places of scales, and scales.

    Args:
        weight: of up to `MOST_NUMEL` elements; those of a byte share their scale.
        turned: rows and columns of each matrix, where these are transposed.
    """
    outer, inner = turned or (1, 1)
    scales = weight.scales
    if scales.nbytes % 4:  # of bytes; nothing follows that is not aligned
        scales = np.pad(scales, (0, -scales.nbytes % 4))
    zeros = PLACE_NBYTES + scales.nbytes
    header = (
        *(weight.width, weight.rows, weight.tall, weight.wide, weight.per_row, weight.per_matrix),
        *(outer, inner, zeros, zeros + weight.zeros.nbytes),
    )
    place = np.zeros(PLACE_NBYTES // 4, np.uint32)
    place[: len(header)] = header
    return [part for part in (place, scales, weight.zeros, weight.table) if part.size]


def packed_ptx(info: Packed, dst: DType, *, clamp: bool, turned: bool) -> str:
    """`dequant_ptx` for a weight."""
    return dequant_ptx(values_of(info), dst, clamp=clamp, turned=turned)


def dequant_ptx(values: Values, dst: DType, *, clamp: bool, turned: bool) -> str:
    """PTX of the kernel: ``dequantise(src, out, numel, tally, weight, first)``, of 64 bits each.

    It dequantises ``numel`` elements of which the values lie from device address ``src`` on: those
    from number ``first`` of the weight on, an even one where values have 4 bits. They go to device
    address ``out`` on, a multiple of the size of an element: to where they follow each other; or if
    ``turned``, each to where the transpose of `weight_parts` moves it, ``out`` being the beginning
    of the whole. ``weight`` (a multiple of 8) is the device address of `weight_parts`. Counts are
    added to ``tally`` as by `devices.ptx.cast_ptx`. It is launched in any number of blocks
    (`blocks` suggests one) of `BLOCK_THREADS` threads, without dynamic shared memory.

    Raises:
        UnsupportedCastError: the text is not kept, and llvmlite is missing or has no NVPTX.
    """
    try:
        return _dequant_ptx(values, dst, clamp, turned)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCastError(
            values.name, dst.name, reason=f"no CUDA kernel without llvmlite's NVPTX: {error}"
        ) from error


@cache
def _dequant_ptx(values: Values, dst: DType, clamp: bool, turned: bool) -> str:
    ir = _kernel_ir(values, dst, clamp, turned)
    depends_on = ("ptx", SYMBOL, ir)
    kept = read_kept(*depends_on)
    if kept is not None:
        return kept.decode()
    ptx = compile_ptx(ir)
    keep(ptx.encode(), *depends_on)
    return ptx


def _kernel_ir(values: Values, dst: DType, clamp: bool, turned: bool) -> str:
    v = Vector(1, native_half=True)
    for slot, name in enumerate((*_PLACE, *_OFFSETS)):
        place = _pointer(v, v.op("add", "i64", "%weight", 4 * slot))
        v.lines.append(f"%{name} = load i32, ptr addrspace(1) {place}, align 4")
    v.lines.append(f"%src = {_generic(v, '%from')}")
    v.lines.append(f"%scales = {_generic(v, v.op('add', 'i64', '%weight', PLACE_NBYTES))}")
    for name in ("zeros", "table"):
        offset = v.convert("zext", "i32", f"%{name}.offset", "i64")
        v.lines.append(f"%{name} = {_generic(v, v.op('add', 'i64', '%weight', offset))}")
    v.lines.append("%number.first = trunc i64 %beginning to i32")
    each = 8 // values.bits
    units = v.op("udiv", "i64", v.op("add", "i64", "%numel", each - 1), each)

    def body(at: str, sums: list[str]) -> Sequence[str]:
        first = v.op("mul", "i64", at, each)
        number = v.op("add", "i32", "%number.first", v.convert("trunc", "i64", first, "i32"))
        scale_of(values, v, _scale_index(v, number))
        moved = _moved(v, number) if turned else ""
        for index in range(each):
            sums = _element(v, values, dst, first, moved, index, sums, clamp)
        return sums

    zeros = [("i64", "0")] * COUNTS
    sums = loop(v, "%first", units, "%stride", zeros, body)
    counted = {slot: v.convert("trunc", "i64", total, "i32") for slot, total in enumerate(sums)}
    text = "\n  ".join(v.lines)
    return _KERNEL.format(symbol=SYMBOL, grid=GRID, clear=CLEAR, body=text, tell=tell(v, counted))


def _scale_index(v: Vector, number: str) -> str:
    """Which scale an element has, by its number in the weight."""
    row_number, column = _divided(v, number, "%width")
    matrix, row = _divided(v, row_number, "%rows")
    down, across = v.op("udiv", "i32", row, "%tall"), v.op("udiv", "i32", column, "%wide")
    before = v.op("mul", "i32", matrix, "%per.matrix")
    above = v.op("add", "i32", before, v.op("mul", "i32", down, "%per.row"))
    return v.convert("zext", "i32", v.op("add", "i32", above, across), "i64")


def _moved(v: Vector, number: str) -> str:
    """Where a transpose moves an element."""
    line, column = _divided(v, number, "%inner")
    group, line = _divided(v, line, "%outer")
    row = v.op("add", "i32", v.op("mul", "i32", group, "%inner"), column)
    return v.op("add", "i32", v.op("mul", "i32", row, "%outer"), line)


def _divided(v: Vector, x: str, by: str) -> tuple[str, str]:
    """Quotient and rest."""
    quotient = v.op("udiv", "i32", x, by)
    return quotient, v.op("sub", "i32", x, v.op("mul", "i32", quotient, by))


def _element(
    v: Vector,
    values: Values,
    dst: DType,
    first: str,
    moved: str,
    index: int,
    sums: list[str],
    clamp: bool,
) -> list[str]:
    """One value of a byte: the last byte of a weight may have one fewer."""
    key = f".{index}"
    at = v.op("add", "i64", first, index)
    is_there = v.op("icmp ult", "i64", at, "%numel")
    v.lines += [f"br i1 {is_there}, label %there{key}, label %past{key}", f"there{key}:"]
    y, ends = product(v, values, dst, load(v, values, at), sums, clamp=clamp, key=key)
    to = at
    if moved:  # those of a byte are of one line
        to = v.op("add", "i32", moved, "%outer") if index else moved
        to = v.convert("zext", "i32", to, "i64")
    place = _pointer(v, v.op("add", "i64", "%out", v.op("mul", "i64", to, dst.itemsize)))
    v.lines.append(f"store i{dst.bits} {y}, ptr addrspace(1) {place}, align {dst.itemsize}")
    v.lines += [f"br label %stored{key}", f"stored{key}:", f"br label %next{key}"]
    v.lines += [f"past{key}:", f"br label %next{key}", f"next{key}:"]
    return [
        v.emit(f"phi i64 [{end}, %stored{key}], [{total}, %past{key}]")
        for end, total in zip(ends, sums, strict=True)
    ]


def _pointer(v: Vector, address: str) -> str:
    return v.emit(f"inttoptr i64 {address} to ptr addrspace(1)")


def _generic(v: Vector, address: str) -> str:
    """A pointer as the host's instructions have them; LLVM finds that it is to global memory."""
    return f"addrspacecast ptr addrspace(1) {_pointer(v, address)} to ptr"
