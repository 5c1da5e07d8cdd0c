"""LLVM IR that quantizes units on the host, from a scheme's own instructions: see `Recipe`.

A kernel passes twice over a unit while it is in the cache: for its largest magnitude, a maximum of
integers, then for its codes. Only if the maximum is not finite are NaN and infinity counted, one
element after the other; their replacement takes a few integer instructions in every unit. Errors
are float32 differences, and squares are summed in float64.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Literal

from streamload.codecs.floats import FLOATS, overflow_start
from streamload.codecs.ir import (
    Vector,
    clean,
    kernel_text,
    loop,
    magnitude_bits,
    maximum,
    numbers,
    shuffle,
    splat,
    square_sum,
    to_float,
)
from streamload.codecs.llvm import HostFunction, Kernel
from streamload.codecs.parts import QuantCounts
from streamload.core.dtypes import F16, DType

#: How codes are packed: one in a byte; two, the first in the high bits ("pairs") or in the low ones
#: ("low pairs"); two, codes of the unit's first half in the low bits ("halves"); ten of 3 bits in a
#: little-endian uint32, the first in the low bits ("tens").
Packing = Literal["bytes", "pairs", "low pairs", "halves", "tens"]

FUNCTION = HostFunction("quantise", (*3 * (c_void_p,), c_uint64, c_uint64, c_void_p))
_WIDTH = 32  # elements of a step; divides every block of bytes
_WORD_NBYTES, _WORDS_WIDTH, _TENS = 4, 8, 10  # bytes of a word, elements of a step, codes of a word
_UNROLLED = 128  # blocks of up to so many elements are straight-line code
# bits of the largest error, the sum of squared errors, the sum of squares
_SUMS = ("i32", "double", "double")


@dataclass(frozen=True, slots=True)
class Scalars:
    """The IR values that `Recipe.scalars` computes for a unit.

    Attributes:
        elements: float32 values that `Recipe.encode` takes for every element.
        header: the integer of `Recipe.header_nbytes` stored before the codes, or "".
        statistic: the unit's float32 statistic, or "".
        overflowed: an i1, set if float16 cannot hold the unit's scale, or "".
    """

    elements: tuple[str, ...]
    header: str = ""
    statistic: str = ""
    overflowed: str = ""


class Recipe(ABC):
    """A scheme's instructions for a unit, on the host and on CUDA; equal recipes share a kernel.

    Attributes:
        numel: elements of a unit; 0 if the kernel's caller passes it.
        header_nbytes: bytes of a unit before its codes.
        signed: whether `scalars` takes the largest magnitude with the sign of its first element.
        goes_through_half: whether elements beyond float16 are counted.
    """

    numel: int
    packing: Packing = "bytes"
    header_nbytes: int = 0
    signed: bool = False
    goes_through_half: bool = False

    @abstractmethod
    def scalars(self, one: Vector, largest: str) -> Scalars:
        """Write IR of a unit's common values, such as its scale, from its largest magnitude."""

    @abstractmethod
    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        """Write IR of codes (i32, low bits) of finite float32 ``x``, and of what codes decode to.

        ``scalars`` are `Scalars.elements`, each as a vector like ``x``.
        """


class Tally(Structure):
    """The C struct to which kernels add errors and counts of the units that they encode."""

    _fields_ = (
        ("largest_error", c_uint32),  # bits of a float32
        ("largest", c_uint32),
        ("squared_error", c_double),
        ("squared", c_double),
        ("nan", c_uint64),
        ("inf", c_uint64),
        ("overflowed", c_uint64),
        ("statistics", c_double),  # the sum of statistics, on CUDA alone
    )

    def counts(self, numel: int) -> QuantCounts:
        """Return the tally as the counts of ``numel`` elements."""
        error, largest = struct.unpack("<2f", struct.pack("<2I", self.largest_error, self.largest))
        error = math.inf if math.isnan(error) else error
        squared_error = math.inf if math.isnan(self.squared_error) else self.squared_error
        return QuantCounts(
            error, squared_error, self.squared, largest, numel, self.nan, self.inf, self.overflowed
        )


class UnitWriter:
    """Writes the IR that a recipe's kernels for host and CUDA share.

    ``count`` and ``most`` are the IR types of counts and of the largest magnitude.
    """

    def __init__(self, recipe: Recipe, src: DType, count: str, most: str) -> None:
        self.recipe, self.src = recipe, src
        self.count, self.most = count, most
        self.source, self.lane = FLOATS[src.code], f"i{src.bits}"
        # magnitudes from here on are beyond float16
        self.half_start = overflow_start(src, F16) if recipe.goes_through_half else None

    def magnitude(self, v: Vector, x: str) -> str:
        """Write LLVM IR of the magnitudes of elements, as integers; return the result's name."""
        return v.op("and", self.lane, x, self.source.magnitude)

    def scanned(self, v: Vector, x: str, carried: list[str]) -> list[str]:
        """Write IR that updates ``carried`` by ``x``: the largest finite magnitude, then counts.

        The counts are of NaN, infinity and finite elements beyond float16.
        """
        most, nans, infs, overs = carried
        special, magnitude = self.source.special, self.magnitude(v, x)
        is_finite = v.op("icmp ult", self.lane, magnitude, special)
        finite = v.select(is_finite, self.lane, magnitude, 0)
        if self.most != self.lane:
            finite = v.convert("zext", self.lane, finite, self.most)
        most = maximum(v, self.most, most, finite)
        nans = self._counted(v, nans, v.op("icmp ugt", self.lane, magnitude, special))
        infs = self._counted(v, infs, v.op("icmp eq", self.lane, magnitude, special))
        if self.half_start is not None:
            is_over = v.op("icmp uge", self.lane, magnitude, self.half_start)
            overs = self._counted(v, overs, v.op("and", "i1", is_over, is_finite))
        return [most, nans, infs, overs]

    def with_infinities(self, v: Vector, most: str, infs: str, overs: str) -> str:
        """Write IR that adds ``infs`` to ``overs`` if the magnitude ``most`` is beyond float16."""
        if self.half_start is None:
            return overs
        is_over = v.op("icmp uge", self.most, most, self.half_start)
        return v.op("add", self.count, overs, v.select(is_over, self.count, infs, 0))

    def encoded(
        self, v: Vector, x: str, most: str, scalars: Sequence[str], sums: Sequence[str]
    ) -> tuple[str, list[str]]:
        """Write LLVM IR that quantizes ``x``; return codes and updated sums of errors (`_SUMS`)."""
        error, squared_error, squared = sums
        value = to_float(v, self.src, clean(v, self.source, x, most))
        code, decoded = self.recipe.encode(v, value, scalars)
        difference = v.op("fsub", "float", value, decoded)
        error = maximum(v, "i32", error, magnitude_bits(v, difference))
        squared_error = square_sum(v, difference, squared_error)
        return code, [error, squared_error, square_sum(v, value, squared)]

    def _counted(self, v: Vector, total: str, mask: str) -> str:
        return v.op("add", self.count, total, v.convert("zext", "i1", mask, self.count))


class _Writer(UnitWriter):
    """Writes the host kernel that quantizes units by a recipe, by vectors and by elements."""

    def __init__(self, recipe: Recipe, src: DType, native_half: bool) -> None:
        super().__init__(recipe, src, "i64", f"i{src.bits}")
        widths = 1, _WORDS_WIDTH if recipe.packing == "tens" else _WIDTH
        self.one, self.wide = (Vector(width, native_half) for width in widths)
        self.one.lines = self.wide.lines
        self.begun = ""  # the word that the last step left incomplete

    def text(self) -> list[str]:
        """Return the instructions of the kernel's body."""
        v, one = self.wide, self.one
        sums = [(v.type(of), "zeroinitializer") for of in _SUMS]
        sums += [(of, "0" if of == "i32" else "0.0") for of in (*_SUMS, "i32")]
        ends = loop(one, "0", "%units", 1, sums, self._unit)
        self._add_sums(ends)
        return v.lines

    def _unit(self, unit: str, carried: list[str]) -> list[str]:
        one, recipe = self.one, self.recipe
        first = one.op("mul", "i64", unit, "%numel")
        source = one.emit(f"getelementptr {self.lane}, ptr %src, i64 {first}")
        nbytes = one.op("mul", "i64", unit, "%unit.nbytes")
        out = one.emit(f"getelementptr i8, ptr %out, i64 {nbytes}")
        largest = self._finite(source, self._largest(source))
        value = to_float(one, self.src, largest)
        bits = maximum(one, "i32", carried[-1], magnitude_bits(one, value))
        if recipe.signed:
            value = self._with_sign(source, largest, value)
        scalars = recipe.scalars(one, value)
        if scalars.header:
            of = f"i{8 * recipe.header_nbytes}"
            one.lines.append(f"store {of} {scalars.header}, ptr {out}, align 1")
            out = one.emit(f"getelementptr i8, ptr {out}, i64 {recipe.header_nbytes}")
        if scalars.statistic:
            at = one.emit(f"getelementptr float, ptr %statistics, i64 {unit}")
            one.lines.append(f"store float {scalars.statistic}, ptr {at}, align 4")
        if scalars.overflowed:
            self._add(5, one.select(scalars.overflowed, "i64", "%numel", 0))
        return [*self._codes(source, out, largest, scalars, carried[:-1]), bits]

    def _over(
        self,
        wide: Sequence[tuple[str, str]],
        narrow: Sequence[tuple[str, str]],
        body: Callable[[Vector, str, list[str]], Sequence[str]],
    ) -> list[str]:
        """Write ``body`` for a unit's elements, by vectors, then one by one; return carried values.

        ``wide`` and ``narrow``: (IR type, first value) of each value that steps by vectors and by
        one element carry. ``body`` writes a step at an index from carried values, and returns their
        updates.
        """
        if 0 < self.recipe.numel <= _UNROLLED:
            ends = [value for _, value in wide]
            for at in range(0, self.recipe.numel, self.wide.width):
                ends = list(body(self.wide, str(at), ends))
        else:
            ends = loop(self.one, "0", "%whole", _WIDTH, wide, lambda i, c: body(self.wide, i, c))
        if self.recipe.numel:  # whole vectors only
            return [*ends, *(value for _, value in narrow)]
        rest = loop(self.one, "%whole", "%numel", 1, narrow, lambda i, c: body(self.one, i, c))
        return [*ends, *rest]

    def _load(self, v: Vector, source: str, at: str) -> str:
        place = v.emit(f"getelementptr {self.lane}, ptr {source}, i64 {at}")
        return v.emit(f"load {v.type(self.lane)}, ptr {place}, align 1")

    def _largest(self, source: str) -> str:
        """Write IR of a unit's largest magnitude, NaN and infinity included; return its name."""

        def body(v: Vector, at: str, carried: list[str]) -> list[str]:
            x = self._load(v, source, at)
            return [maximum(v, self.lane, carried[0], self.magnitude(v, x))]

        of = self.wide.type(self.lane)
        wide, narrow = self._over([(of, "zeroinitializer")], [(self.lane, "0")], body)
        reduced = self.wide.emit(self.wide.reduced("umax", self.lane, wide))
        return maximum(self.one, self.lane, reduced, narrow)

    def _finite(self, source: str, largest: str) -> str:
        """Write IR of a unit's largest finite magnitude; it counts NaN, infinity and overflow."""
        one, lane = self.one, self.lane
        start = self.source.special if self.half_start is None else self.half_start
        is_special = one.op("icmp uge", lane, largest, start)
        one.lines += ["br label %scan.test", "scan.test:"]
        one.lines += [f"br i1 {is_special}, label %scan, label %scan.no", "scan:"]

        def body(at: str, carried: list[str]) -> list[str]:
            return self.scanned(one, self._load(one, source, at), carried)

        zeros = [(lane, "0"), *3 * [("i64", "0")]]
        most, nans, infs, overs = loop(one, "0", "%numel", 1, zeros, body)
        for slot, count in enumerate((nans, infs, self.with_infinities(one, most, infs, overs)), 3):
            self._add(slot, count)
        one.lines += ["br label %scan.yes", "scan.yes:", "br label %scan.no", "scan.no:"]
        return one.emit(f"phi {lane} [{largest}, %scan.test], [{most}, %scan.yes]")

    def _add(self, slot: int, value: str) -> None:
        """Write LLVM IR that adds an i64 to item ``slot`` (8 bytes each) of the tally."""
        one = self.one
        place = one.emit(f"getelementptr i64, ptr %tally, i64 {slot}")
        before = one.emit(f"load i64, ptr {place}")
        one.lines.append(f"store i64 {one.op('add', 'i64', before, value)}, ptr {place}")

    def _with_sign(self, source: str, largest: str, value: str) -> str:
        """Write IR of ``value``, the largest magnitude, with the sign of its first element."""
        v, one, lane = self.wide, self.one, self.lane
        assert self.recipe.numel == _WIDTH
        most = splat(v, lane, largest)
        x = clean(v, self.source, self._load(v, source, "0"), most)
        masks = (v.op("icmp eq", lane, self.magnitude(v, x), most), v.op("icmp slt", lane, x, 0))
        mask = f"i{_WIDTH}"
        has, below = (one.emit(f"bitcast {v.type('i1')} {m} to {mask}") for m in masks)
        first = one.op("and", mask, has, one.op("sub", mask, 0, has))
        is_below = one.op("icmp ne", mask, one.op("and", mask, first, below), 0)
        return one.select(is_below, "float", one.emit(f"fneg float {value}"), value)

    def _codes(
        self, source: str, out: str, largest: str, scalars: Scalars, carried: list[str]
    ) -> list[str]:
        """Write IR that encodes a unit's elements; return updated wide and narrow error sums."""
        values = {
            w.width: (
                splat(w, self.lane, largest),
                [splat(w, "float", value) for value in scalars.elements],
            )
            for w in (self.wide, *(() if self.recipe.numel else (self.one,)))
        }

        def body(v: Vector, at: str, sums: list[str]) -> list[str]:
            most, each = values[v.width]
            code, ends = self.encoded(v, self._load(v, source, at), most, each, sums)
            self._store(v, code, out, at)
            return ends

        wide = zip(map(self.wide.type, _SUMS), carried[:3], strict=True)
        return self._over(list(wide), list(zip(_SUMS, carried[3:], strict=True)), body)

    def _store(self, v: Vector, codes: str, out: str, at: str) -> None:
        packing, width = self.recipe.packing, v.width
        if packing == "tens":
            self._store_words(v, codes, out, at)
            return
        codes = v.convert("trunc", "i32", codes, "i8")
        if packing != "bytes":
            half, order = width // 2, range(width)
            halves = order[:half], order[half:]
            orders = halves if packing == "halves" else (order[::2], order[1::2])
            low, high = (shuffle(v, f"<{width} x i8>", codes, "poison", each) for each in orders)
            if packing == "pairs":
                low, high = high, low
            shifted = v.emit(f"shl <{half} x i8> {high}, splat (i8 4)")
            codes = v.emit(f"or <{half} x i8> {low}, {shifted}")
            at = v.emit(f"lshr i64 {at}, 1")
            width = half
        place = v.emit(f"getelementptr i8, ptr {out}, i64 {at}")
        of = "i8" if width == 1 else f"<{width} x i8>"
        v.lines.append(f"store {of} {codes}, ptr {place}, align 1")

    def _store_words(self, v: Vector, codes: str, out: str, at: str) -> None:
        """Write IR that packs 3-bit codes into 32-bit words of ten, and stores the full words."""
        first, bits = int(at), 8 * _WORD_NBYTES // _TENS
        indices = range(first, first + v.width)
        shifted = v.op("shl", "i32", codes, numbers(bits * (i % _TENS) for i in indices))
        for word in range(first // _TENS, indices[-1] // _TENS + 1):
            masks = [-(i // _TENS == word) for i in indices]
            mine = shifted if all(masks) else v.op("and", "i32", shifted, numbers(masks))
            if first > word * _TENS:
                mine = v.op("or", "i32", self.begun, mine)
            self.begun = mine
            if (word + 1) * _TENS <= indices.stop:
                full = v.emit(v.reduced("or", "i32", mine))
                place = v.emit(f"getelementptr i8, ptr {out}, i64 {word * _WORD_NBYTES}")
                v.lines.append(f"store i32 {full}, ptr {place}, align 1")

    def _add_sums(self, ends: list[str]) -> None:
        """Write LLVM IR that adds the sums of errors of all units to the tally."""
        one = self.one
        reduced = self.wide.emit(self.wide.reduced("umax", "i32", ends[0]))
        errors = maximum(one, "i32", reduced, ends[3])
        for index, value in ((0, errors), (1, ends[6])):
            place = one.emit(f"getelementptr i32, ptr %tally, i64 {index}")
            before = one.emit(f"load i32, ptr {place}")
            one.lines.append(f"store i32 {maximum(one, 'i32', before, value)}, ptr {place}")
        for slot in (1, 2):
            of = self.wide.type("double")
            wide, narrow = ends[slot], ends[slot + 3]
            place = one.emit(f"getelementptr double, ptr %tally, i64 {slot}")
            before = one.emit(f"load double, ptr {place}")
            start = one.op("fadd", "double", before, narrow)
            reduce = f"call double @llvm.vector.reduce.fadd.v{self.wide.width}f64"
            total = one.emit(f"{reduce}(double {start}, {of} {wide})")
            one.lines.append(f"store double {total}, ptr {place}")


def kernel_ir(recipe: Recipe, src: DType, *, native_half: bool, architecture: str) -> str:
    """Return LLVM IR of ``void quantise(src, out, statistics, units, unit, tally)``.

    The kernel quantizes ``units`` units of ``unit`` elements each from ``src`` on to codes from
    ``out`` on, writes a float32 a unit from ``statistics`` on if the recipe has statistics, and
    adds to a `Tally`. For ``native_half`` and ``architecture`` see `cast.kernel_ir`.
    """
    writer = _Writer(recipe, src, native_half)
    numel = str(recipe.numel) if recipe.numel else "%unit"
    # how many codes are packed together, and into how many bytes
    codes, nbytes = {"bytes": (1, 1), "tens": (_TENS, _WORD_NBYTES)}.get(recipe.packing, (2, 1))
    sizes = (
        f"%numel = add i64 {numel}, 0",
        f"%unit.steps = udiv i64 %numel, {codes}",
        f"%unit.codes = mul i64 %unit.steps, {nbytes}",
        f"%unit.nbytes = add i64 %unit.codes, {recipe.header_nbytes}",
        f"%whole = and i64 %numel, -{_WIDTH}",
    )
    parameters = "ptr %src, ptr %out, ptr %statistics, i64 %units, i64 %unit, ptr %tally"
    return kernel_text(FUNCTION.symbol, parameters, (*sizes, *writer.text()), architecture)


def compile_kernel(recipe: Recipe, src: DType, name: str) -> Kernel:
    """Return the compiled kernel of scheme ``name``; see `kernel_ir`, `HostFunction.kernel`."""
    return FUNCTION.kernel((recipe, src), (src.name, name), partial(kernel_ir, recipe, src))
