"""Quantising as CUDA kernels: PTX that LLVM makes of the recipes that the host's kernels have.

One kernel for each recipe and source. A warp takes a block; a whole CUDA block takes a row. Threads
go over their unit twice, each element is loaded alone, and neighbours lie in neighbouring threads.
A launch is short of work for the device rather than of bandwidth: it keeps up with any bus. Errors
and counts are summed by shuffles in a warp, in shared memory in a block, and then added to the
tally, once a block.

Codes are those of a format's arithmetic "cuda" where it has one (`Units.device_recipe`), and else
those of the host. See `devices.ptx` for what the text depends on; atomic sums of float64 need
compute capability 6.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

from streamload.codecs.cast import Vector
from streamload.codecs.cast_cuda import BLOCK_THREADS, TRIPLE, compile_ptx
from streamload.codecs.encode import Units
from streamload.codecs.floats import FORMATS, FloatFormat, overflow_start
from streamload.codecs.kernels import (
    Recipe,
    Scalars,
    Tally,
    as_float,
    clean,
    loop,
    magnitude_bits,
    maximum,
    square_sum,
)
from streamload.codecs.scheme import Quantised
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import F16, DType
from streamload.errors import UnsupportedCastError

#: The kernel's name in its PTX.
SYMBOL = "quantise"
#: Bytes of a tally, a `quant.kernels.Tally`.
TALLY_NBYTES = ctypes.sizeof(Tally)

_CPU = "sm_60"
_WARP = 32
_WARPS = BLOCK_THREADS // _WARP
_MAX_BLOCKS = (
    512  # each adds to the tally once; four for each multiprocessor of the largest devices
)
# bits of the largest error and of the largest element, sums of squares, three counts, and the sum
# of the statistics
_SUMS = ("i32", "i32", "double", "double", "i32", "i32", "i32", "double")

_KERNEL = """
target triple = "{triple}"

@sums = internal addrspace(3) global [{slots} x i64] undef, align 8
@maxima = internal addrspace(3) global [{warps} x i32] undef, align 4

declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
declare i32 @llvm.nvvm.shfl.sync.bfly.i32(i32, i32, i32, i32) convergent
declare i32 @llvm.nvvm.vote.ballot.sync(i32, i1) convergent
declare void @llvm.nvvm.barrier0() convergent
declare float @llvm.nvvm.rcp.approx.ftz.f(float)

define ptx_kernel void @{symbol}(
    i64 %src, i64 %out, i64 %numel, i64 %tally, i64 %statistics, i64 %given
) nounwind {{
entry:
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %ctaid = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %nctaid = call i32 @llvm.nvvm.read.ptx.sreg.nctaid.x()
  %lane = and i32 %tid, 31
  %warp = lshr i32 %tid, 5
  %thread = zext i32 %tid to i64
  %block = zext i32 %ctaid to i64
  %blocks = zext i32 %nctaid to i64
  %leads = icmp eq i32 %lane, 0
  %is.first = icmp eq i32 %tid, 0
  %clears = icmp ult i32 %tid, {slots}
  br i1 %clears, label %clear, label %cleared
clear:
  %clear.p = getelementptr i64, ptr addrspace(3) @sums, i32 %tid
  store i64 0, ptr addrspace(3) %clear.p
  br label %cleared
cleared:
  {sizes}
  {body}
  ret void
}}
"""


def blocks(tensor: Quantised, numel: int) -> int:
    """How many blocks to launch for some elements: any other number gives the same codes."""
    assert isinstance(tensor, Units)
    units = -(-numel // tensor.unit_numel)
    a_row_each = tensor.device_recipe.numel == 0
    return min(max(units if a_row_each else -(-units // _WARPS), 1), _MAX_BLOCKS)


def quant_ptx(tensor: Quantised, src: DType) -> str:
    """PTX of the kernel of a format: ``quantise(src, out, numel, tally, statistics, unit)``.

    All are 64 bits. It quantises ``numel`` elements from device address ``src`` on (a multiple of
    the size of an element), which begin with a unit and end with one or with the tensor, to codes
    from device address ``out`` on (a multiple of 2 for formats of GGUF). From ``statistics`` on (a
    multiple of 4) it writes a float32 a unit, where the format has statistics. ``unit`` is
    `Units.unit_numel`; kernels of blocks do not look at it. Errors and counts are added to the
    `quant.kernels.Tally` at device address ``tally`` (a multiple of 8). A launch takes fewer than
    2^32 elements. It is launched in any number of blocks (`blocks` suggests one) of `BLOCK_THREADS`
    threads in one dimension, without dynamic shared memory.

    Returns:
        The text, made once in a process, and kept for later ones. CUDA is not needed to make it.

    Raises:
        UnsupportedCastError: the text is not kept, and llvmlite is missing or has no NVPTX.
    """
    assert isinstance(tensor, Units)
    try:
        return _quant_ptx(tensor.device_recipe, src)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCastError(
            src.name, tensor.format, reason=f"no CUDA kernel without llvmlite's NVPTX: {error}"
        ) from error


@cache
def _quant_ptx(recipe: Recipe, src: DType) -> str:
    ir = _Writer(recipe, src).text()
    depends_on = ("ptx", _CPU, ir)
    kept = read_kept(*depends_on)
    if kept is not None:
        return kept.decode()
    ptx = compile_ptx(ir, cpu=_CPU)
    keep(ptx.encode(), *depends_on)
    return ptx


@dataclass(slots=True)
class _Writer:
    """The kernel of a recipe and a source: instructions for one thread."""

    recipe: Recipe
    src: DType
    v: Vector = field(init=False)

    def __post_init__(self) -> None:
        self.v = Vector(1, native_half=True)

    @property
    def source(self) -> FloatFormat:
        return FORMATS[self.src.code]

    @property
    def lane(self) -> str:
        return f"i{self.src.bits}"

    @property
    def each(self) -> int:
        """Elements of a thread at a time: those of a byte."""
        return 2 if self.recipe.packing == "pairs" else 1

    def text(self) -> str:
        """The kernel's IR."""
        recipe, v = self.recipe, self.v
        rows = recipe.numel == 0
        sizes = [
            f"%unit = add i64 {recipe.numel or '%given'}, 0",
            f"%unit.codes = lshr i64 %unit, {0 if recipe.packing == 'bytes' else 1}",
            f"%unit.nbytes = add i64 %unit.codes, {recipe.header_nbytes}",
            "%more = add i64 %numel, %unit",
            "%last = sub i64 %more, 1",
            "%units = udiv i64 %last, %unit",
            "%warp.wide = zext i32 %warp to i64",
            f"%block.warp = mul i64 %block, {1 if rows else _WARPS}",
            f"%first = add i64 %block.warp, {0 if rows else '%warp.wide'}",
            f"%stride = mul i64 %blocks, {1 if rows else _WARPS}",
            f"%member = and i64 %thread, {BLOCK_THREADS - 1 if rows else _WARP - 1}",
            f"%start = mul i64 %member, {self.each}",
            "%is.leader = icmp eq i64 %member, 0",
        ]
        zeros = [(of, "0" if of == "i32" else "0.0") for of in _SUMS]
        self._tell(loop(v, "%first", "%units", "%stride", zeros, self._unit))
        return _KERNEL.format(
            triple=TRIPLE,
            symbol=SYMBOL,
            warps=_WARPS,
            slots=TALLY_NBYTES // 8,
            sizes="\n  ".join(sizes),
            body="\n  ".join(v.lines),
        )

    def _unit(self, unit: str, carried: list[str]) -> list[str]:
        v, recipe = self.v, self.recipe
        error, largest, squared_error, squared, nans, infs, overs, total = carried
        begin = v.op("mul", "i64", unit, "%unit")
        left = v.op("sub", "i64", "%numel", begin)
        is_short = v.op("icmp ult", "i64", left, "%unit")
        stop = v.select(is_short, "i64", left, "%unit")
        source = self._plus("%src", v.op("mul", "i64", begin, self.src.itemsize))
        out = self._plus("%out", v.op("mul", "i64", unit, "%unit.nbytes"))

        most, nans, infs, overs = self._scan(source, stop, nans, infs, overs)
        value = as_float(v, self.src, most)
        largest = maximum(v, "i32", largest, magnitude_bits(v, value))
        if recipe.signed:
            value = self._with_sign(source, most, value)
        scalars = recipe.scalars(v, value)
        if scalars.overflowed:
            counted = v.op("and", "i1", scalars.overflowed, "%is.leader")
            overs = v.op("add", "i32", overs, v.select(counted, "i32", recipe.numel, 0))
        if scalars.statistic:
            mine = v.select("%is.leader", "float", scalars.statistic, 0.0)
            total = v.op("fadd", "double", total, v.convert("fpext", "float", mine, "double"))
        self._lead(unit, out, scalars)
        out = self._plus(out, str(recipe.header_nbytes))
        sums = self._codes(source, out, stop, most, scalars, [error, squared_error, squared])
        return [sums[0], largest, *sums[1:], nans, infs, overs, total]

    def _plus(self, address: str, nbytes: str) -> str:
        return self.v.op("add", "i64", address, nbytes)

    def _place(self, address: str, index: str, nbytes: int) -> str:
        at = self._plus(address, self.v.op("mul", "i64", index, nbytes))
        return self.v.emit(f"inttoptr i64 {at} to ptr addrspace(1)")

    def _load(self, source: str, index: str, stop: str) -> str:
        """An element; past the tensor's end, 0."""
        v = self.v
        is_there = v.op("icmp ult", "i64", index, stop)
        place = self._place(source, v.select(is_there, "i64", index, 0), self.src.itemsize)
        x = v.emit(f"load {self.lane}, ptr addrspace(1) {place}, align {self.src.itemsize}")
        return v.select(is_there, self.lane, x, 0)

    def _over(
        self, stop: str, carried: list[tuple[str, str]], body: Callable[[str, list[str]], list[str]]
    ) -> list[str]:
        """A loop over a thread's elements of a unit."""
        members = BLOCK_THREADS if self.recipe.numel == 0 else _WARP
        return loop(self.v, "%start", stop, members * self.each, carried, body)

    def _scan(
        self, source: str, stop: str, nans: str, infs: str, overs: str
    ) -> tuple[str, str, str, str]:
        """The largest finite magnitude of a unit, in all its threads; and the counts after it."""
        v, special = self.v, self.source.special
        start = overflow_start(self.src, F16) if self.recipe.goes_through_half else None

        def body(at: str, carried: list[str]) -> list[str]:
            most, nan, inf, over = carried
            for index in range(self.each):
                x = self._load(source, v.op("add", "i64", at, index), stop)
                magnitude = v.op("and", self.lane, x, self.source.magnitude)
                is_finite = v.op("icmp ult", self.lane, magnitude, special)
                finite = self._wide(v.select(is_finite, self.lane, magnitude, 0))
                most = maximum(v, "i32", most, finite)
                nan = self._count(nan, v.op("icmp ugt", self.lane, magnitude, special))
                inf = self._count(inf, v.op("icmp eq", self.lane, magnitude, special))
                if start is not None:
                    is_over = v.op("icmp uge", self.lane, magnitude, start)
                    over = self._count(over, v.op("and", "i1", is_over, is_finite))
            return [most, nan, inf, over]

        zeros = [("i32", value) for value in ("0", "0", "0", "0")]
        most, nan, inf, over = self._over(stop, zeros, body)
        most = self._reduced(most, lambda a, b: maximum(v, "i32", a, b))
        if self.recipe.numel == 0:
            most = self._in_block(most)
        if start is not None:  # an infinity counts as the largest
            is_over = v.op("icmp uge", "i32", most, start)
            over = v.op("add", "i32", over, v.select(is_over, "i32", inf, 0))
        sums = [v.op("add", "i32", a, b) for a, b in ((nans, nan), (infs, inf), (overs, over))]
        narrow = v.convert("trunc", "i32", most, self.lane) if self.src.bits < 32 else most
        return narrow, sums[0], sums[1], sums[2]

    def _wide(self, x: str) -> str:
        return self.v.convert("zext", self.lane, x, "i32") if self.src.bits < 32 else x

    def _count(self, total: str, mask: str) -> str:
        return self.v.op("add", "i32", total, self.v.convert("zext", "i1", mask, "i32"))

    def _shuffled(self, x: str, distance: int) -> str:
        """The value that the thread has whose lane differs in one bit."""
        return self.v.emit(
            f"call i32 @llvm.nvvm.shfl.sync.bfly.i32(i32 -1, i32 {x}, i32 {distance}, i32 31)"
        )

    def _reduced(self, x: str, join: Callable[[str, str], str]) -> str:
        """A 32-bit value of all threads of a warp."""
        for distance in (16, 8, 4, 2, 1):
            x = join(x, self._shuffled(x, distance))
        return x

    def _summed(self, x: str) -> str:
        """The sum of a float64 of all threads of a warp."""
        v = self.v
        for distance in (16, 8, 4, 2, 1):
            bits = v.convert("bitcast", "double", x, "i64")
            halves = [
                v.convert("trunc", "i64", half, "i32")
                for half in (bits, v.op("lshr", "i64", bits, 32))
            ]
            low, high = (
                v.convert("zext", "i32", self._shuffled(half, distance), "i64") for half in halves
            )
            both = v.op("or", "i64", low, v.op("shl", "i64", high, 32))
            x = v.op("fadd", "double", x, v.convert("bitcast", "i64", both, "double"))
        return x

    def _in_block(self, most: str) -> str:
        """The maximum of all warps of a block."""
        v = self.v
        self._when("%leads", lambda: self._store_shared("@maxima", "%warp", most))
        v.lines.append("call void @llvm.nvvm.barrier0()")
        for warp in range(_WARPS):
            place = v.emit(f"getelementptr i32, ptr addrspace(3) @maxima, i32 {warp}")
            most = maximum(v, "i32", most, v.emit(f"load i32, ptr addrspace(3) {place}"))
        v.lines.append("call void @llvm.nvvm.barrier0()  ; all have read before the next row")
        return most

    def _store_shared(self, name: str, index: str, value: str) -> None:
        place = self.v.emit(f"getelementptr i32, ptr addrspace(3) {name}, i32 {index}")
        self.v.lines.append(f"store i32 {value}, ptr addrspace(3) {place}")

    def _when(self, mask: str, body: Callable[[], None]) -> None:
        """Instructions of those threads only for which a mask is set."""
        v = self.v
        label = f"w{len(v.lines)}"
        v.lines += [f"br i1 {mask}, label %{label}.yes, label %{label}.no", f"{label}.yes:"]
        body()
        v.lines += [f"br label %{label}.no", f"{label}.no:"]

    def _with_sign(self, source: str, most: str, value: str) -> str:
        """The largest magnitude, with the sign of the first element that has it: one a thread."""
        v = self.v
        assert self.recipe.numel == _WARP
        x = clean(v, self.source, self._load(source, "%member", "%unit"), most)
        magnitude = v.op("and", self.lane, x, self.source.magnitude)
        masks = (v.op("icmp eq", self.lane, magnitude, most), v.op("icmp slt", self.lane, x, 0))
        has, below = (
            v.emit(f"call i32 @llvm.nvvm.vote.ballot.sync(i32 -1, i1 {mask})") for mask in masks
        )
        first = v.op("and", "i32", has, v.op("sub", "i32", 0, has))
        is_below = v.op("icmp ne", "i32", v.op("and", "i32", first, below), 0)
        return v.select(is_below, "float", v.emit(f"fneg float {value}"), value)

    def _lead(self, unit: str, out: str, scalars: Scalars) -> None:
        """Store what a unit has once."""
        v = self.v

        def body() -> None:
            if scalars.header:
                place = self._place(out, "0", 1)
                v.lines.append(f"store i16 {scalars.header}, ptr addrspace(1) {place}, align 2")
            if scalars.statistic:
                place = self._place("%statistics", unit, 4)
                v.lines.append(
                    f"store float {scalars.statistic}, ptr addrspace(1) {place}, align 4"
                )

        if scalars.header or scalars.statistic:
            self._when("%is.leader", body)

    def _codes(
        self, source: str, out: str, stop: str, most: str, scalars: Scalars, sums: Sequence[str]
    ) -> list[str]:
        v = self.v

        def body(at: str, carried: list[str]) -> list[str]:
            error, squared_error, squared = carried
            codes = []
            for index in range(self.each):
                bits = self._load(source, v.op("add", "i64", at, index), stop)
                x = as_float(v, self.src, clean(v, self.source, bits, most))
                code, decoded = self.recipe.encode(v, x, scalars.elements)
                codes.append(code)
                difference = v.op("fsub", "float", x, decoded)
                error = maximum(v, "i32", error, magnitude_bits(v, difference))
                squared_error = square_sum(v, difference, squared_error)
                squared = square_sum(v, x, squared)
            self._store(out, at, codes)
            return [error, squared_error, squared]

        types = ("i32", "double", "double")
        return self._over(stop, list(zip(types, sums, strict=True)), body)

    def _store(self, out: str, at: str, codes: list[str]) -> None:
        v, packing = self.v, self.recipe.packing

        def store(code: str, index: str) -> None:
            place = self._place(out, index, 1)
            byte = v.convert("trunc", "i32", code, "i8")
            v.lines.append(f"store i8 {byte}, ptr addrspace(1) {place}, align 1")

        if packing == "bytes":
            store(codes[0], at)
        elif packing == "pairs":
            both = v.op("or", "i32", v.op("shl", "i32", codes[0], 4), codes[1])
            store(both, v.op("lshr", "i64", at, 1))
        else:
            # both threads of a byte store it: then no thread runs ahead
            other = self._shuffled(codes[0], _WARP // 2)
            is_low = v.op("icmp ult", "i64", at, _WARP // 2)
            low = v.select(is_low, "i32", codes[0], other)
            high = v.select(is_low, "i32", other, codes[0])
            both = v.op("or", "i32", low, v.op("shl", "i32", high, 4))
            store(both, v.op("and", "i64", at, _WARP // 2 - 1))

    def _tell(self, ends: list[str]) -> None:
        """Add each thread's sums to the tally."""
        v = self.v
        error, largest, squared_error, squared, *counts, total = ends
        v.lines.append("call void @llvm.nvvm.barrier0()  ; after the clearing")
        totals = [
            *(self._reduced(x, lambda a, b: maximum(v, "i32", a, b)) for x in (error, largest)),
            *(self._summed(x) for x in (squared_error, squared)),
            *(self._reduced(x, lambda a, b: v.op("add", "i32", a, b)) for x in counts),
        ]
        wide = [
            *totals[:4],
            *(v.convert("zext", "i32", count, "i64") for count in totals[4:]),
            self._summed(total),
        ]

        def place(base: str, offset: int) -> str:
            if base == "@sums":
                return v.emit(f"getelementptr i8, ptr addrspace(3) {base}, i32 {offset}")
            return self._place(base, str(offset), 1)

        def add(base: str, space: int, values: Sequence[str]) -> None:
            scope = "" if space == 3 else 'syncscope("device") '
            for (op, of, offset), value in zip(_ADDED, values, strict=True):
                at = place(base, offset)
                v.emit(f"atomicrmw {op} ptr addrspace({space}) {at}, {of} {value} {scope}monotonic")

        self._when("%leads", lambda: add("@sums", 3, wide))
        v.lines.append("call void @llvm.nvvm.barrier0()")

        def tell() -> None:
            loaded = [
                v.emit(f"load {of}, ptr addrspace(3) {place('@sums', offset)}")
                for _, of, offset in _ADDED
            ]
            add("%tally", 1, loaded)

        self._when("%is.first", tell)


#: How each sum joins those of other threads: operation, type, and place in a tally.
_ADDED = (
    *(("umax", "i32", 0), ("umax", "i32", 4), ("fadd", "double", 8), ("fadd", "double", 16)),
    *(("add", "i64", 24), ("add", "i64", 32), ("add", "i64", 40), ("fadd", "double", 48)),
)
