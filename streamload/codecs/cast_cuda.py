"""Casts as CUDA kernels, one for each pair of `floats.PAIRS`.

An element takes the instructions that the host's kernels have (`cast.careful`): bits and counts
equal those of `cast_reference`, but for the sign and payload of a NaN. A kernel passes over memory
once. Between the first and the last address at which both sides are aligned, elements go by
vectors, of 16 bytes on the side with the wider elements: a GPU's memory has its bandwidth for
accesses of that size. Those before and after go one by one, and so do all if the two sides are
never aligned together. Counts are summed by shuffles in a warp and in shared memory in a block,
which then adds each that is not zero to the tally.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from streamload.codecs.cast import careful
from streamload.codecs.floats import PAIRS, flush_stop, lossless, overflow_start
from streamload.codecs.ir import loop
from streamload.codecs.ptx import BLOCK_THREADS, COUNTS, ThreadWriter, kept_ptx
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

#: The kernel's name in its PTX.
SYMBOL = "cast"
#: IR of the shared memory in which a block sums its counts of elements.
SHARED_COUNTS = f"@sums = internal addrspace(3) global [{COUNTS} x i32] undef, align 4"

_MAX_BLOCKS = 2048  # the largest devices run as many threads at once; threads take strides
_THREAD_NUMEL = 8  # one vector if both dtypes have 16 bits, two if one has 32
_VECTOR_NBYTES = 16  # the widest access of a thread

# IR: elements before the first vector, vectors (if both sides are aligned there), single elements
_SIZES = """
  %past = sub i64 0, %out
  %ahead.nbytes = and i64 %past, {out_mask}
  %ahead = udiv i64 %ahead.nbytes, {out_nbytes}
  %is.short = icmp ult i64 %numel, %ahead
  %head = select i1 %is.short, i64 %numel, i64 %ahead
  %head.nbytes = mul i64 %head, {src_nbytes}
  %src.head = add i64 %src, %head.nbytes
  %src.past = and i64 %src.head, {src_mask}
  %is.aligned = icmp eq i64 %src.past, 0
  %rest = sub i64 %numel, %head
  %whole = udiv i64 %rest, {width}
  %vectors = select i1 %is.aligned, i64 %whole, i64 0
  %covered = mul i64 %vectors, {width}
  %singles = sub i64 %numel, %covered
"""


def blocks(numel: int) -> int:
    """Return how many CUDA blocks to launch to cast ``numel`` elements; any number is correct."""
    return min(max(-(-numel // (_THREAD_NUMEL * BLOCK_THREADS)), 1), _MAX_BLOCKS)


@cache
def cast_ptx(src: DType, dst: DType, *, clamp: bool) -> str:
    """Return PTX of the cast kernel `SYMBOL`: ``cast(u64 src, u64 out, u64 numel, u64 tally)``.

    The kernel reads ``numel`` elements from device address ``src`` on, and writes them cast from
    device address ``out`` on. Each address is a multiple of the size of its elements. If both sizes
    are equal ``out`` may be ``src``; otherwise the two do not overlap. To the three 64-bit counts
    at device address ``tally`` (a multiple of 8) it adds how many finite elements overflowed, how
    many nonzero ones became zero, and how many changed in value at all, those two included; a
    lossless pair does not use it. A launch that counts takes fewer than 2^32 elements. It is
    launched in any number of blocks (`blocks` suggests one) of `BLOCK_THREADS` threads in one
    dimension, without dynamic shared memory.
    """
    if (src, dst) not in PAIRS:
        raise UnsupportedCastError(src.name, dst.name, reason="there is no such kernel")
    # kept, since compiling the first takes 50 to 72 ms: docs/measurements.md, "What is kept"
    return kept_ptx(_kernel_ir(src, dst, clamp), (src.name, dst.name))


def _kernel_ir(src: DType, dst: DType, clamp: bool) -> str:
    t = ThreadWriter()
    width = _VECTOR_NBYTES // max(src.itemsize, dst.itemsize)
    possible = overflow_start(src, dst), flush_stop(src, dst), None if lossless(src, dst) else 0
    slots = [slot for slot, start in enumerate(possible) if start is not None]
    t.by_threads()
    if slots:
        t.clear_shared("i32", COUNTS)
    sizes = {"out_mask": width * dst.itemsize - 1, "src_mask": width * src.itemsize - 1}
    nbytes = {"out_nbytes": dst.itemsize, "src_nbytes": src.itemsize}
    t.lines.append(_SIZES.format(width=width, **sizes, **nbytes))

    def added(sums: list[str], at: str, numel: int) -> Sequence[str]:
        more = _cast_elements(t, (src, dst), at, numel, clamp)
        return [t.op("add", "i32", total, one) for total, one in zip(sums, more, strict=True)]

    def vectors(index: str, sums: list[str]) -> Sequence[str]:
        at = t.op("add", "i64", "%head", t.op("mul", "i64", index, width))
        return added(sums, at, width)

    def singles(index: str, sums: list[str]) -> Sequence[str]:
        is_head = t.op("icmp ult", "i64", index, "%head")
        at = t.op("add", "i64", index, t.select(is_head, "i64", 0, "%covered"))
        return added(sums, at, 1)

    sums = ["0" for _ in slots]
    for stop, body in (("%vectors", vectors), ("%singles", singles)):
        sums = loop(t, "%first", stop, "%stride", [("i32", total) for total in sums], body)
    if slots:
        t.add_counts(dict(zip(slots, sums, strict=True)))
    return t.kernel(SYMBOL, "src out numel tally", SHARED_COUNTS if slots else "")


def _cast_elements(
    t: ThreadWriter, pair: tuple[DType, DType], at: str, numel: int, clamp: bool
) -> list[str]:
    """Write LLVM IR that casts ``numel`` elements from index ``at`` on; return their counts."""
    src, dst = pair
    places = [
        t.place(base, at, each.itemsize) for base, each in zip(("%src", "%out"), pair, strict=True)
    ]
    loaded, stored = (f"<{numel} x i{d.bits}>" if numel > 1 else f"i{d.bits}" for d in pair)
    x = t.emit(f"load {loaded}, ptr addrspace(1) {places[0]}, align {numel * src.itemsize}")
    y = "poison"
    counts: dict[int, str] = {}
    for index in range(numel):
        one = t.emit(f"extractelement {loaded} {x}, i32 {index}") if numel > 1 else x
        cared, masks = careful(t, src, dst, one, clamp=clamp)
        insert = f"insertelement {stored} {y}, i{dst.bits} {cared}, i32 {index}"
        y = t.emit(insert) if numel > 1 else cared
        for slot, mask in enumerate(masks):
            if mask:
                found = t.convert("zext", "i1", mask, "i32")
                counts[slot] = t.op("add", "i32", counts[slot], found) if slot in counts else found
    t.lines.append(
        f"store {stored} {y}, ptr addrspace(1) {places[1]}, align {numel * dst.itemsize}"
    )
    return list(counts.values())
