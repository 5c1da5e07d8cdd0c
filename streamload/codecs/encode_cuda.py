"""Quantization as CUDA kernels, one for each recipe (`Units.device_recipe`) and source dtype.

A warp quantizes a block of elements; a whole CUDA block quantizes a row. Threads pass twice over
their unit; each loads single elements, and neighbouring threads take neighbours. A kernel keeps up
with any bus. Errors and counts are summed by shuffles in a warp, in shared memory in a block, and
then added to the tally once a block. Atomic sums of float64 need compute capability 6.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from streamload.codecs.encode import Units
from streamload.codecs.encode_kernels import Recipe, Tally, UnitWriter
from streamload.codecs.ir import clean, loop, magnitude_bits, maximum, to_float
from streamload.codecs.ptx import BLOCK_THREADS, WARP, ThreadWriter, kept_ptx
from streamload.codecs.scheme import Quantized
from streamload.core.dtypes import DType

#: The kernel's name in its PTX.
SYMBOL = "quantise"
#: Bytes of a tally, an `encode_kernels.Tally`.
TALLY_NBYTES = ctypes.sizeof(Tally)

_CPU = "sm_60"
_WARPS = BLOCK_THREADS // WARP
_MAX_BLOCKS = 512  # four for each multiprocessor of the largest devices
# bits of the largest error and of the largest element, sums of squared errors and of squares,
# counts of NaN, infinity and overflow, and the sum of the statistics
_SUMS = ("i32", "i32", "double", "double", "i32", "i32", "i32", "double")
_SHARED = f"""
@sums = internal addrspace(3) global [{TALLY_NBYTES // 8} x i64] undef, align 8
@maxima = internal addrspace(3) global [{_WARPS} x i32] undef, align 4
"""


def blocks(tensor: Quantized, numel: int) -> int:
    """Return how many CUDA blocks to launch to quantize ``numel`` elements; any number works."""
    units = -(-numel // tensor.unit_numel)
    a_row_each = _recipe(tensor).numel == 0
    return min(max(units if a_row_each else -(-units // _WARPS), 1), _MAX_BLOCKS)


def quant_ptx(tensor: Quantized, src: DType) -> str:
    """Return PTX of a scheme's kernel: ``quantise(src, out, numel, tally, statistics, unit)``.

    All arguments have 64 bits. The kernel quantizes ``numel`` elements from device address ``src``
    on (a multiple of the size of an element), whole units but for the tensor's last one, to codes
    from device address ``out`` on (a multiple of 2 for schemes of GGUF). From ``statistics`` on (a
    multiple of 4) it writes a float32 a unit, if the scheme has statistics.
    ``unit`` is `Quantized.unit_numel`; kernels of blocks do not use it. Errors and counts are added
    to the `Tally` at device address ``tally`` (a multiple of 8). A launch takes fewer than 2^32
    elements. It is launched in any number of blocks (`blocks` suggests one) of `BLOCK_THREADS`
    threads in one dimension, without dynamic shared memory.
    """
    return _quant_ptx(_recipe(tensor), src, tensor.format)


def _recipe(tensor: Quantized) -> Recipe:
    assert isinstance(tensor.codec, Units), tensor
    return tensor.codec.device_recipe or tensor.codec.recipe


@cache
def _quant_ptx(recipe: Recipe, src: DType, name: str) -> str:
    return kept_ptx(_Writer(recipe, src).text(), (src.name, name), _CPU)


class _Writer(UnitWriter):
    """Writes the CUDA kernel that quantizes units by a recipe: the IR of one thread."""

    def __init__(self, recipe: Recipe, src: DType) -> None:
        super().__init__(recipe, src, "i32", "i32")
        self.t = ThreadWriter()
        self.each = 2 if recipe.packing == "pairs" else 1  # elements of a thread, those of a byte
        self.is_row = recipe.numel == 0
        self.members = BLOCK_THREADS if self.is_row else WARP  # threads of a unit

    def text(self) -> str:
        """Return the kernel's IR."""
        recipe, t = self.recipe, self.t
        t.clear_shared("i64", TALLY_NBYTES // 8)
        t.lines += [
            "%is.first = icmp eq i32 %tid, 0",
            "%warp = lshr i32 %tid, 5",
            f"%unit = add i64 {recipe.numel or '%given'}, 0",
            f"%unit.codes = lshr i64 %unit, {0 if recipe.packing == 'bytes' else 1}",
            f"%unit.nbytes = add i64 %unit.codes, {recipe.header_nbytes}",
            "%more = add i64 %numel, %unit",
            "%last = sub i64 %more, 1",
            "%units = udiv i64 %last, %unit",
            "%warp.wide = zext i32 %warp to i64",
            f"%block.warp = mul i64 %block, {1 if self.is_row else _WARPS}",
            f"%first = add i64 %block.warp, {0 if self.is_row else '%warp.wide'}",
            f"%stride = mul i64 %blocks, {1 if self.is_row else _WARPS}",
            f"%member = and i64 %thread, {self.members - 1}",
            f"%start = mul i64 %member, {self.each}",
            "%is.leader = icmp eq i64 %member, 0",
        ]
        zeros = [(of, "0" if of == "i32" else "0.0") for of in _SUMS]
        self._add_sums(loop(t, "%first", "%units", "%stride", zeros, self._unit))
        return t.kernel(SYMBOL, "src out numel tally statistics given", _SHARED)

    def _unit(self, unit: str, carried: list[str]) -> list[str]:
        t, recipe = self.t, self.recipe
        error, largest, squared_error, squared, *counts, total = carried
        begin = t.op("mul", "i64", unit, "%unit")
        left = t.op("sub", "i64", "%numel", begin)
        is_short = t.op("icmp ult", "i64", left, "%unit")
        stop = t.select(is_short, "i64", left, "%unit")
        source = t.op("add", "i64", "%src", t.op("mul", "i64", begin, self.src.itemsize))
        out = t.op("add", "i64", "%out", t.op("mul", "i64", unit, "%unit.nbytes"))

        most, (nans, infs, overs) = self._scan(source, stop, counts)
        value = to_float(t, self.src, most)
        largest = maximum(t, "i32", largest, magnitude_bits(t, value))
        if recipe.signed:
            value = self._with_sign(source, most, value)
        scalars = recipe.scalars(t, value)
        if scalars.overflowed:
            counted = t.op("and", "i1", scalars.overflowed, "%is.leader")
            overs = t.op("add", "i32", overs, t.select(counted, "i32", recipe.numel, 0))
        if scalars.statistic:
            mine = t.select("%is.leader", "float", scalars.statistic, 0.0)
            total = t.op("fadd", "double", total, t.convert("fpext", "float", mine, "double"))
        if scalars.header:
            nbytes = recipe.header_nbytes
            t.when("%is.leader", lambda: t.store(f"i{8 * nbytes}", nbytes, scalars.header, out))
        if scalars.statistic:
            store = "float", 4, scalars.statistic, "%statistics", unit
            t.when("%is.leader", lambda: t.store(*store))
        codes = t.op("add", "i64", out, recipe.header_nbytes)
        types = zip(("i32", "double", "double"), (error, squared_error, squared), strict=True)

        def encode(at: str, sums: list[str]) -> list[str]:
            found = []
            for index in range(self.each):
                x = self._load(source, t.op("add", "i64", at, index), stop)
                code, sums = self.encoded(t, x, most, scalars.elements, sums)
                found.append(code)
            self._store(codes, at, found)
            return sums

        error, squared_error, squared = self._over(stop, list(types), encode)
        return [error, largest, squared_error, squared, nans, infs, overs, total]

    def _load(self, source: str, index: str, stop: str) -> str:
        """Write IR that loads an element of a unit; 0 past the tensor's end; return its name."""
        t = self.t
        exists = t.op("icmp ult", "i64", index, stop)
        x = t.load(self.lane, self.src.itemsize, source, t.select(exists, "i64", index, 0))
        return t.select(exists, self.lane, x, 0)

    def _over(
        self, stop: str, carried: list[tuple[str, str]], body: Callable[[str, list[str]], list[str]]
    ) -> list[str]:
        """Write a loop over the elements of a unit that one thread takes; see `ir.loop`."""
        return loop(self.t, "%start", stop, self.members * self.each, carried, body)

    def _scan(self, source: str, stop: str, counts: list[str]) -> tuple[str, list[str]]:
        """Write IR of a unit's largest finite magnitude, for all threads; return it, new counts."""
        t = self.t

        def body(at: str, carried: list[str]) -> list[str]:
            for index in range(self.each):
                x = self._load(source, t.op("add", "i64", at, index), stop)
                carried = self.scanned(t, x, carried)
            return carried

        most, nans, infs, overs = self._over(stop, [("i32", "0")] * 4, body)
        most = t.over_warp(most, self._larger)
        if self.is_row:
            most = self._in_block(most)
        more = nans, infs, self.with_infinities(t, most, infs, overs)
        sums = [t.op("add", "i32", a, b) for a, b in zip(counts, more, strict=True)]
        return t.convert("trunc", "i32", most, self.lane) if self.src.bits < 32 else most, sums

    def _larger(self, a: str, b: str) -> str:
        return maximum(self.t, "i32", a, b)

    def _summed(self, x: str) -> str:
        """Write LLVM IR of the sum of a float64 over all threads of a warp; return its name."""
        t = self.t
        for distance in (16, 8, 4, 2, 1):
            bits = t.convert("bitcast", "double", x, "i64")
            low, high = (
                t.convert("trunc", "i64", half, "i32")
                for half in (bits, t.op("lshr", "i64", bits, 32))
            )
            low, high = (
                t.convert("zext", "i32", t.shuffled(half, distance), "i64") for half in (low, high)
            )
            both = t.op("or", "i64", low, t.op("shl", "i64", high, 32))
            x = t.op("fadd", "double", x, t.convert("bitcast", "i64", both, "double"))
        return x

    def _in_block(self, most: str) -> str:
        """Write LLVM IR of the maximum of an i32 over all warps of a block; return its name."""
        t = self.t

        def place(index: str) -> str:
            return t.emit(f"getelementptr i32, ptr addrspace(3) @maxima, i32 {index}")

        def store() -> None:
            t.lines.append(f"store i32 {most}, ptr addrspace(3) {place('%warp')}")

        t.when("%leads", store)
        t.barrier()
        found = most
        for warp in range(_WARPS):
            found = self._larger(found, t.emit(f"load i32, ptr addrspace(3) {place(str(warp))}"))
        t.barrier()  # all have read before the next row
        return found

    def _with_sign(self, source: str, most: str, value: str) -> str:
        """Write IR of a unit's largest magnitude with the sign of its first element that has it.

        ``value`` is that magnitude as float32. Each thread of the warp takes one element.
        """
        t = self.t
        assert self.recipe.numel == WARP
        x = clean(t, self.source, self._load(source, "%member", "%unit"), most)
        is_most = t.op("icmp eq", self.lane, self.magnitude(t, x), most)
        masks = is_most, t.op("icmp slt", self.lane, x, 0)
        has, below = (
            t.emit(f"call i32 @llvm.nvvm.vote.ballot.sync(i32 -1, i1 {mask})") for mask in masks
        )
        first = t.op("and", "i32", has, t.op("sub", "i32", 0, has))
        is_below = t.op("icmp ne", "i32", t.op("and", "i32", first, below), 0)
        return t.select(is_below, "float", t.emit(f"fneg float {value}"), value)

    def _store(self, out: str, at: str, codes: list[str]) -> None:
        t, packing = self.t, self.recipe.packing
        byte = codes[0]
        if packing == "pairs":
            byte = t.op("or", "i32", t.op("shl", "i32", codes[0], 4), codes[1])
            at = t.op("lshr", "i64", at, 1)
        elif packing == "halves":
            # both threads of a byte store it: then no thread runs ahead
            other = t.shuffled(codes[0], WARP // 2)
            is_low = t.op("icmp ult", "i64", at, WARP // 2)
            low = t.select(is_low, "i32", codes[0], other)
            high = t.select(is_low, "i32", other, codes[0])
            byte = t.op("or", "i32", low, t.op("shl", "i32", high, 4))
            at = t.op("and", "i64", at, WARP // 2 - 1)
        t.store("i8", 1, t.convert("trunc", "i32", byte, "i8"), out, at)

    def _add_sums(self, ends: list[str]) -> None:
        """Write LLVM IR that adds each thread's sums of errors to the tally."""
        t = self.t
        error, largest, squared_error, squared, *counts, total = ends
        t.barrier()  # after the clearing
        totals = [
            *(t.over_warp(x, self._larger) for x in (error, largest)),
            *(self._summed(x) for x in (squared_error, squared)),
            *(t.over_warp(x, t.sum) for x in counts),
        ]
        totals[4:] = [t.convert("zext", "i32", count, "i64") for count in totals[4:]]
        totals.append(self._summed(total))

        def shared(offset: int) -> str:
            return t.emit(f"getelementptr i8, ptr addrspace(3) @sums, i32 {offset}")

        def to_shared() -> None:
            for (op, of, offset), value in zip(_ADDED, totals, strict=True):
                place = f"ptr addrspace(3) {shared(offset)}"
                t.emit(f"atomicrmw {op} {place}, {of} {value} monotonic")

        def to_tally() -> None:
            loaded = [
                t.emit(f"load {of}, ptr addrspace(3) {shared(offset)}") for _, of, offset in _ADDED
            ]
            for (op, of, offset), value in zip(_ADDED, loaded, strict=True):
                place = f"ptr addrspace(1) {t.place('%tally', str(offset))}"
                t.emit(f'atomicrmw {op} {place}, {of} {value} syncscope("device") monotonic')

        t.when("%leads", to_shared)
        t.barrier()
        t.when("%is.first", to_tally)


#: How each sum is added to a tally: atomic operation, type, byte offset.
_ADDED = (
    *(("umax", "i32", 0), ("umax", "i32", 4), ("fadd", "double", 8), ("fadd", "double", 16)),
    *(("add", "i64", 24), ("add", "i64", 32), ("add", "i64", 40), ("fadd", "double", 48)),
)
