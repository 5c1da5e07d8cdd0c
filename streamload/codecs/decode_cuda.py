"""Dequantization as CUDA kernels, one for each kind of stored values and each target dtype.

A thread takes the values of a byte, finds their scale by their index in the weight, and goes on in
strides. A kernel may also transpose: the device's cache joins the scattered writes of a chunk. The
instructions of an element are the host's, and so are elements and counts, but for the sign and
payload of a NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

from streamload.codecs.cast_cuda import SHARED_COUNTS
from streamload.codecs.decode import PLACE_NBYTES, Weight
from streamload.codecs.decode_kernels import Values, load, product, scale_of
from streamload.codecs.ir import loop
from streamload.codecs.parts import Array
from streamload.codecs.ptx import BLOCK_THREADS, COUNTS, ThreadWriter, kept_ptx
from streamload.core.dtypes import DType

#: The kernel's name in its PTX.
SYMBOL = "dequantise"
_MAX_BLOCKS = 2048  # as in `cast_cuda`
_THREAD_BYTES = 4
# the header of `weight_parts`: 32 bits each
_HEADER = (
    *("width", "rows", "tall", "wide", "per.row", "per.matrix", "outer", "inner"),
    *("zeros.offset", "table.offset"),
)


def blocks(numel: int, bits: int) -> int:
    """Return how many CUDA blocks to launch for values of ``bits`` each; any number is correct."""
    nbytes = numel * bits // 8
    return min(max(-(-nbytes // (_THREAD_BYTES * BLOCK_THREADS)), 1), _MAX_BLOCKS)


def weight_parts(weight: Weight, turned: tuple[int, int] | None) -> list[Array]:
    """Return the auxiliary arrays that the kernel reads: header, scales, zeros and table.

    The weight has up to `MOST_NUMEL` elements; values that share a byte share their scale. `turned`
    is (rows, columns) of each matrix if the kernel transposes them, else None.
    """
    scales = weight.scales
    if scales.nbytes % 4:  # scales of one byte: align the floats after them
        scales = np.pad(scales, (0, -scales.nbytes % 4))
    zeros = PLACE_NBYTES + scales.nbytes
    header = (
        *(weight.width, weight.rows, weight.tall, weight.wide, weight.per_row, weight.per_matrix),
        *(*(turned or (1, 1)), zeros, zeros + weight.zeros.nbytes),
    )
    place = np.zeros(PLACE_NBYTES // 4, np.uint32)
    place[: len(header)] = header
    return [part for part in (place, scales, weight.zeros, weight.table) if part.size]


@cache
def dequant_ptx(values: Values, dst: DType, *, clamp: bool, turned: bool) -> str:
    """Return PTX of ``dequantise(src, out, numel, tally, weight, first)``, of 64 bits each.

    The kernel dequantizes ``numel`` elements, whose values begin at device address ``src``, from
    index ``first`` of the weight on, an even index if values have 4 bits. The elements are written
    in order from device address ``out`` on, a multiple of the size of an element; or if ``turned``,
    to their places in the transpose (see `weight_parts`) of the whole weight at ``out``.
    ``weight`` (a multiple of 8) is the device address of `weight_parts`. Counts are added to
    ``tally`` as by `cast_cuda.cast_ptx`. It is launched in any number of blocks (`blocks` suggests
    one) of `BLOCK_THREADS` threads, without dynamic shared memory.
    """
    return kept_ptx(_kernel_ir(values, dst, clamp, turned), (values.name, dst.name))


def _kernel_ir(values: Values, dst: DType, clamp: bool, turned: bool) -> str:
    t = ThreadWriter()
    t.by_threads()
    t.clear_shared("i32", COUNTS)
    for slot, name in enumerate(_HEADER):
        place = t.place("%weight", str(4 * slot))
        t.lines.append(f"%{name} = load i32, ptr addrspace(1) {place}, align 4")
    t.lines.append(f"%src = {_generic(t, '%from')}")
    t.lines.append(f"%scales = {_generic(t, '%weight', str(PLACE_NBYTES))}")
    for name in ("zeros", "table"):
        offset = t.convert("zext", "i32", f"%{name}.offset", "i64")
        t.lines.append(f"%{name} = {_generic(t, '%weight', offset)}")
    t.lines.append("%number.first = trunc i64 %beginning to i32")
    each = 8 // values.bits
    units = t.op("udiv", "i64", t.op("add", "i64", "%numel", each - 1), each)

    def body(at: str, sums: list[str]) -> Sequence[str]:
        first = t.op("mul", "i64", at, each)
        number = t.op("add", "i32", "%number.first", t.convert("trunc", "i64", first, "i32"))
        scale_of(values, t, _scale_index(t, number))
        moved = _moved(t, number) if turned else ""
        for index in range(each):
            # the last byte of a weight may have one value fewer
            at = t.op("add", "i64", first, index)
            exists = t.op("icmp ult", "i64", at, "%numel")
            key = f".{index}"
            t.lines += [f"br i1 {exists}, label %there{key}, label %past{key}", f"there{key}:"]
            y, ends = product(t, values, dst, load(t, values, at), sums, clamp=clamp, key=key)
            to = at
            if moved:  # the values of a byte are of one line
                to = t.op("add", "i32", moved, "%outer") if index else moved
                to = t.convert("zext", "i32", to, "i64")
            t.store(f"i{dst.bits}", dst.itemsize, y, "%out", to)
            t.lines += [f"br label %stored{key}", f"stored{key}:", f"br label %next{key}"]
            t.lines += [f"past{key}:", f"br label %next{key}", f"next{key}:"]
            sums = [
                t.emit(f"phi i64 [{end}, %stored{key}], [{total}, %past{key}]")
                for end, total in zip(ends, sums, strict=True)
            ]
        return sums

    sums = loop(t, "%first", units, "%stride", [("i64", "0")] * COUNTS, body)
    t.add_counts({n: t.convert("trunc", "i64", total, "i32") for n, total in enumerate(sums)})
    return t.kernel(SYMBOL, "from out numel tally weight beginning", SHARED_COUNTS)


def _scale_index(t: ThreadWriter, number: str) -> str:
    """Write IR of the index of the scale of element ``number`` of the weight; return its name."""
    row_number, column = _divided(t, number, "%width")
    matrix, row = _divided(t, row_number, "%rows")
    down, across = t.op("udiv", "i32", row, "%tall"), t.op("udiv", "i32", column, "%wide")
    before = t.op("mul", "i32", matrix, "%per.matrix")
    above = t.op("add", "i32", before, t.op("mul", "i32", down, "%per.row"))
    return t.convert("zext", "i32", t.op("add", "i32", above, across), "i64")


def _moved(t: ThreadWriter, number: str) -> str:
    """Write IR of the index of element ``number`` in the transposed weight; return its name."""
    line, column = _divided(t, number, "%inner")
    group, line = _divided(t, line, "%outer")
    row = t.op("add", "i32", t.op("mul", "i32", group, "%inner"), column)
    return t.op("add", "i32", t.op("mul", "i32", row, "%outer"), line)


def _divided(t: ThreadWriter, x: str, by: str) -> tuple[str, str]:
    """Write LLVM IR that divides two i32; return quotient and remainder."""
    quotient = t.op("udiv", "i32", x, by)
    return quotient, t.op("sub", "i32", x, t.op("mul", "i32", quotient, by))


def _generic(t: ThreadWriter, address: str, offset: str = "0") -> str:
    """Return the instruction that makes an address a generic pointer, as the host's IR uses."""
    return f"addrspacecast ptr addrspace(1) {t.place(address, offset)} to ptr"
