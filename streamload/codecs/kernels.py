"""LLVM IR that quantises units on the host, of the pieces that a format gives: see `Recipe`.

A unit takes two passes over it while it is in the cache: its largest magnitude, then its codes. The
first is a maximum of integers. Only where that is not finite are NaN and infinity counted, one
element after the other; making them finite takes a few integer instructions, and is always done.
Errors are float32 differences, and squares are summed in float64.

Like the kernels of `cast.kernels`, these call no function of another object.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import CFUNCTYPE, Structure, c_double, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

from streamload.codecs.cast import ENVIRONMENT, WIDEN, Vector
from streamload.codecs.floats import FORMATS, FloatFormat, overflow_start
from streamload.codecs.llvm import Target, compile_object, link_kernel
from streamload.codecs.scheme import QuantCounts
from streamload.core.disk_cache import keep, read_kept
from streamload.core.dtypes import F16, DType
from streamload.errors import UnsupportedCastError

#: How codes lie: one in a byte; two in a byte, the first in the high bits ("pairs") or in the low
#: ones ("low pairs"); two in a byte, one of the unit's first half in the low bits ("halves"); ten
#: of 3 bits in a little-endian uint32, the first in the low bits ("tens").
Packing = Literal["bytes", "pairs", "low pairs", "halves", "tens"]

#: The kernel's name.
SYMBOL = "quantise"
_WIDTH = 32  # elements of a step; every block is a multiple, but for those of words
_WORD_NBYTES, _WORDS_WIDTH = 4, 8
_IN_WORDS: Mapping[Packing, int] = {"tens": 10}  # codes of a word
_UNROLLED = 128  # blocks up to here are straight-line code
# bits of the largest error, the sum of squared errors, the sum of squares
_SUMS = ("i32", "double", "double")


@dataclass(frozen=True, slots=True)
class Scalars:
    """What a recipe makes of a unit's largest magnitude.

    Attributes:
        elements: float32 values that its elements need.
        header: an i16 that is stored before the codes.
        statistic: the float32 statistic.
        overflowed: an i1: float16 does not reach the unit's scale.
    """

    elements: tuple[str, ...]
    header: str = ""
    statistic: str = ""
    overflowed: str = ""


class Recipe(Protocol):
    """A format's own instructions, for the host and for CUDA.

    Attributes:
        numel: elements of a unit; 0 where each call says how many.
        packing: how the codes of a unit lie.
        header_nbytes: bytes of a unit before its codes.
        signed: whether the largest element keeps its sign; of several, the first counts.
        goes_through_half: whether elements beyond float16 are counted.
    """

    @property
    def numel(self) -> int: ...  # noqa: D102
    @property
    def packing(self) -> Packing: ...  # noqa: D102
    @property
    def header_nbytes(self) -> int: ...  # noqa: D102
    @property
    def signed(self) -> bool: ...  # noqa: D102
    @property
    def goes_through_half(self) -> bool: ...  # noqa: D102

    def __hash__(self) -> int: ...

    def scalars(self, one: Vector, largest: str) -> Scalars:
        """Instructions for a unit, from its float32 largest magnitude (with a sign if `signed`)."""

    def encode(self, v: Vector, x: str, scalars: Sequence[str]) -> tuple[str, str]:
        """Instructions for float32 elements: their codes (i32, low bits), and what those decode to.

        Args:
            v: where they go.
            x: finite elements.
            scalars: `Scalars.elements`, each in every element.
        """


class Tally(Structure):
    """What a kernel adds to: errors and counts of all units of its calls."""

    _fields_ = (
        ("largest_error", c_uint32),  # bits of a float32
        ("largest", c_uint32),
        ("squared_error", c_double),
        ("squared", c_double),
        ("nan", c_uint64),
        ("inf", c_uint64),
        ("overflowed", c_uint64),
        ("statistics", c_double),  # their sum, where a device has them
    )

    def counts(self, numel: int) -> QuantCounts:
        """The counts of ``numel`` elements."""
        error, largest = struct.unpack("<2f", struct.pack("<2I", self.largest_error, self.largest))
        squared_error = float(self.squared_error)
        return QuantCounts(
            math.inf if math.isnan(error) else error,
            math.inf if math.isnan(squared_error) else squared_error,
            float(self.squared),
            largest,
            numel,
            int(self.nan),
            int(self.inf),
            int(self.overflowed),
        )


def splat(v: Vector, scalar: str, value: str) -> str:
    """A scalar in every element."""
    if v.width == 1:
        return value
    of = v.type(scalar)
    first = v.emit(f"insertelement {of} poison, {scalar} {value}, i32 0")
    return v.emit(f"shufflevector {of} {first}, {of} poison, <{v.width} x i32> zeroinitializer")


def maximum(v: Vector, scalar: str, a: str, b: str) -> str:
    """The larger of two unsigned integers, element by element."""
    return _intrinsic(v, "umax", scalar, a, b)


def minimum(v: Vector, scalar: str, a: str, b: str | int) -> str:
    """The smaller of two unsigned integers, element by element; the second may be a number."""
    if isinstance(b, int):
        b = str(b) if v.width == 1 else f"splat ({scalar} {b})"
    return _intrinsic(v, "umin", scalar, a, b)


def _intrinsic(v: Vector, name: str, scalar: str, *operands: str) -> str:
    of = v.type(scalar)
    short = {"double": "f64"}.get(scalar, scalar)
    suffix = short if v.width == 1 else f"v{v.width}{short}"
    listed = ", ".join(f"{of} {operand}" for operand in operands)
    return v.emit(f"call {of} @llvm.{name}.{suffix}({listed})")


def square_sum(v: Vector, x: str, total: str) -> str:
    """The sum with the squares of float32 elements added, in float64."""
    wide = v.convert("fpext", "float", x, "double")
    return _intrinsic(v, "fmuladd", "double", wide, wide, total)


def clean(v: Vector, source: FloatFormat, x: str, largest: str) -> str:
    """Elements, as integers, without NaN and infinity.

    Args:
        v: where the instructions go.
        source: the elements' format.
        x: the elements.
        largest: the largest finite magnitude of their unit, in every element.
    """
    lane = f"i{source.bits}"
    magnitude = v.op("and", lane, x, source.magnitude)
    is_nan = v.op("icmp ugt", lane, magnitude, source.special)
    sign = v.op("xor", lane, x, magnitude)
    kept = v.op("or", lane, minimum(v, lane, magnitude, largest), sign)
    return v.select(is_nan, lane, 0, kept)


def as_float(v: Vector, src: DType, x: str) -> str:
    """Elements, as integers, to float32 values."""
    return v.convert("bitcast", "i32", WIDEN[src.code](v, x), "float")


def magnitude_bits(v: Vector, x: str) -> str:
    """The bits of the magnitude of float32 values, which sort as they do, NaN last."""
    return v.op("and", "i32", v.convert("bitcast", "float", x, "i32"), 0x7FFFFFFF)


def loop(
    v: Vector,
    start: str,
    stop: str,
    step: int | str,
    carried: Sequence[tuple[str, str]],
    body: Callable[[str, list[str]], Sequence[str]],
) -> list[str]:
    """A loop of IR; returns the carried values after it.

    Args:
        v: where it goes.
        start: the first index.
        stop: the index after the last, exclusive.
        step: what an iteration adds to the index.
        carried: (type, value at first) of each value.
        body: takes the index and the carried values, and returns those after an iteration.
    """
    key = f"%l{len(v.lines)}"
    label = key[1:]
    v.lines += [f"br label {key}.before", f"{label}.before:", f"br label {key}.head"]
    v.lines += [f"{label}.head:", "", f"{key}.more = icmp ult i64 {key}.i, {stop}"]
    phis = len(v.lines) - 2
    v.lines += [f"br i1 {key}.more, label {key}.body, label {key}.exit", f"{label}.body:"]
    names = [f"{key}.c{index}" for index in range(len(carried))]
    ends = body(f"{key}.i", names)
    v.lines += [f"br label {key}.end", f"{label}.end:", f"{key}.next = add i64 {key}.i, {step}"]
    v.lines += [f"br label {key}.head", f"{label}.exit:"]
    index = f"{key}.i = phi i64 [{start}, {key}.before], [{key}.next, {key}.end]"
    v.lines[phis] = "\n  ".join(
        [
            index,
            *(
                f"{name} = phi {of} [{first}, {key}.before], [{end}, {key}.end]"
                for name, (of, first), end in zip(names, carried, ends, strict=True)
            ),
        ]
    )
    return names


@dataclass(slots=True)
class _Writer:
    """The kernel of a recipe and a source; instructions of all widths go to one list."""

    recipe: Recipe
    src: DType
    native_half: bool
    one: Vector = field(init=False)
    wide: Vector = field(init=False)
    begun: str = field(default="", init=False)  # the word that the last step did not fill

    def __post_init__(self) -> None:
        widths = 1, _WORDS_WIDTH if self.recipe.packing in _IN_WORDS else _WIDTH
        self.one, self.wide = (Vector(width, self.native_half) for width in widths)
        self.one.lines = self.wide.lines

    @property
    def source(self) -> FloatFormat:
        return FORMATS[self.src.code]

    @property
    def lane(self) -> str:
        return f"i{self.src.bits}"

    def text(self) -> str:
        """The instructions of the kernel's body."""
        v, one = self.wide, self.one
        sums = [(v.type(of), "zeroinitializer") for of in _SUMS]
        sums += [(of, "0" if of == "i32" else "0.0") for of in (*_SUMS, "i32")]
        ends = loop(one, "0", "%units", 1, sums, self._unit)
        self._tell(ends)
        return "\n  ".join(v.lines)

    def _unit(self, unit: str, carried: list[str]) -> list[str]:
        one, recipe = self.one, self.recipe
        first = one.op("mul", "i64", unit, "%numel")
        source = one.emit(f"getelementptr {self.lane}, ptr %src, i64 {first}")
        nbytes = one.op("mul", "i64", unit, "%unit.nbytes")
        out = one.emit(f"getelementptr i8, ptr %out, i64 {nbytes}")
        largest = self._finite(source, self._largest(source))
        value = as_float(one, self.src, largest)
        bits = maximum(one, "i32", carried[-1], magnitude_bits(one, value))
        if recipe.signed:
            value = self._with_sign(source, largest, value)
        scalars = recipe.scalars(one, value)
        if scalars.header:
            one.lines.append(f"store i16 {scalars.header}, ptr {out}, align 1")
            out = one.emit(f"getelementptr i8, ptr {out}, i64 {recipe.header_nbytes}")
        if scalars.statistic:
            at = one.emit(f"getelementptr float, ptr %statistics, i64 {unit}")
            one.lines.append(f"store float {scalars.statistic}, ptr {at}, align 4")
        if scalars.overflowed:
            self._add(5, one.select(scalars.overflowed, "i64", "%numel", 0))
        return [*self._codes(source, out, largest, scalars, carried[:-1]), bits]

    def _over(
        self,
        carried: tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]],
        body: Callable[[Vector, str, list[str]], Sequence[str]],
    ) -> list[str]:
        """A body for all elements of a unit, by vectors, and for those that are left one by one."""
        wide, narrow = carried
        if 0 < self.recipe.numel <= _UNROLLED:
            ends = [value for _, value in wide]
            for at in range(0, self.recipe.numel, self.wide.width):
                ends = list(body(self.wide, str(at), ends))
        else:
            ends = loop(self.one, "0", "%whole", _WIDTH, wide, lambda i, c: body(self.wide, i, c))
        if self.recipe.numel:  # of whole vectors
            return [*ends, *(value for _, value in narrow)]
        rest = loop(self.one, "%whole", "%numel", 1, narrow, lambda i, c: body(self.one, i, c))
        return [*ends, *rest]

    def _load(self, v: Vector, source: str, at: str) -> str:
        place = v.emit(f"getelementptr {self.lane}, ptr {source}, i64 {at}")
        return v.emit(f"load {v.type(self.lane)}, ptr {place}, align 1")

    def _largest(self, source: str) -> str:
        """The largest magnitude of a unit, NaN and infinity included."""

        def body(v: Vector, at: str, carried: list[str]) -> list[str]:
            x = self._load(v, source, at)
            magnitude = v.op("and", self.lane, x, self.source.magnitude)
            return [maximum(v, self.lane, carried[0], magnitude)]

        of = self.wide.type(self.lane)
        wide, narrow = self._over(([(of, "zeroinitializer")], [(self.lane, "0")]), body)
        return maximum(self.one, self.lane, self._reduced("umax", self.lane, wide), narrow)

    def _reduced(self, name: str, scalar: str, value: str) -> str:
        return self.wide.emit(self.wide.reduced(name, scalar, value))

    def _finite(self, source: str, largest: str) -> str:
        """The largest finite magnitude of a unit; counts NaN, infinity, and what half cannot hold.

        Most units have none of them, and are not read again.
        """
        one, lane = self.one, self.lane
        special = self.source.special
        start = overflow_start(self.src, F16) if self.recipe.goes_through_half else None
        is_special = one.op("icmp uge", lane, largest, special if start is None else start)
        one.lines += ["br label %scan.test", "scan.test:"]
        one.lines += [f"br i1 {is_special}, label %scan, label %scan.no", "scan:"]

        def body(at: str, carried: list[str]) -> list[str]:
            most, nans, infs, overs = carried
            x = one.op("and", lane, self._load(one, source, at), self.source.magnitude)
            is_finite = one.op("icmp ult", lane, x, special)
            most = maximum(one, lane, most, one.select(is_finite, lane, x, 0))
            nans = _count(one, nans, one.op("icmp ugt", lane, x, special))
            infs = _count(one, infs, one.op("icmp eq", lane, x, special))
            if start is not None:
                over = one.op("icmp uge", lane, x, start)
                overs = _count(one, overs, one.op("and", "i1", is_finite, over))
            return [most, nans, infs, overs]

        zeros = [(lane, "0"), *3 * [("i64", "0")]]
        most, *counts = loop(one, "0", "%numel", 1, zeros, body)
        if start is not None:  # an infinity counts as the largest
            is_over = one.op("icmp uge", lane, most, start)
            more = one.select(is_over, "i64", counts[1], 0)
            counts[2] = one.op("add", "i64", counts[2], more)
        for slot, count in enumerate(counts, 3):
            self._add(slot, count)
        one.lines += ["br label %scan.yes", "scan.yes:", "br label %scan.no", "scan.no:"]
        return one.emit(f"phi {lane} [{largest}, %scan.test], [{most}, %scan.yes]")

    def _add(self, slot: int, value: str) -> None:
        """Add to a count of the tally; slots are of 8 bytes."""
        one = self.one
        place = one.emit(f"getelementptr i64, ptr %tally, i64 {slot}")
        before = one.emit(f"load i64, ptr {place}")
        one.lines.append(f"store i64 {one.op('add', 'i64', before, value)}, ptr {place}")

    def _with_sign(self, source: str, largest: str, value: str) -> str:
        """The largest magnitude, with the sign of the first element that has it."""
        v, one, lane = self.wide, self.one, self.lane
        assert self.recipe.numel == _WIDTH
        most = splat(v, lane, largest)
        x = clean(v, self.source, self._load(v, source, "0"), most)
        magnitude = v.op("and", lane, x, self.source.magnitude)
        masks = (v.op("icmp eq", lane, magnitude, most), v.op("icmp slt", lane, x, 0))
        mask = f"i{_WIDTH}"
        has, below = (one.emit(f"bitcast {v.type('i1')} {m} to {mask}") for m in masks)
        first = one.op("and", mask, has, one.op("sub", mask, 0, has))
        is_below = one.op("icmp ne", mask, one.op("and", mask, first, below), 0)
        return one.select(is_below, "float", one.emit(f"fneg float {value}"), value)

    def _codes(
        self, source: str, out: str, largest: str, scalars: Scalars, carried: list[str]
    ) -> list[str]:
        recipe = self.recipe
        values = {
            w.width: (
                splat(w, self.lane, largest),
                [splat(w, "float", value) for value in scalars.elements],
            )
            for w in (self.wide, *(() if recipe.numel else (self.one,)))
        }

        def body(v: Vector, at: str, sums: list[str]) -> list[str]:
            most, each = values[v.width]
            x = as_float(v, self.src, clean(v, self.source, self._load(v, source, at), most))
            code, decoded = recipe.encode(v, x, each)
            self._store(v, code, out, at)
            error = v.op("fsub", "float", x, decoded)
            return [
                maximum(v, "i32", sums[0], magnitude_bits(v, error)),
                square_sum(v, error, sums[1]),
                square_sum(v, x, sums[2]),
            ]

        types = [[w.type(of) for of in _SUMS] for w in (self.wide, self.one)]
        wide, narrow = (
            list(zip(of, some, strict=True))
            for of, some in zip(types, (carried[:3], carried[3:]), strict=True)
        )
        return self._over((wide, narrow), body)

    def _store(self, v: Vector, codes: str, out: str, at: str) -> None:
        packing, width = self.recipe.packing, v.width
        if packing in _IN_WORDS:
            self._store_words(v, codes, out, at)
            return
        codes = v.convert("trunc", "i32", codes, "i8")
        if packing != "bytes":
            half = width // 2
            firsts = range(half) if packing == "halves" else range(0, width, 2)
            seconds = range(half, width) if packing == "halves" else range(1, width, 2)
            low, high = (
                v.emit(
                    f"shufflevector <{width} x i8> {codes}, <{width} x i8> poison, "
                    f"<{half} x i32> <{', '.join(f'i32 {index}' for index in indices)}>"
                )
                for indices in (firsts, seconds)
            )
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
        """Add a step's codes to the words that they are in, and store those that are full."""
        first, in_word = int(at), _IN_WORDS[self.recipe.packing]
        indices = range(first, first + v.width)
        bits = 8 * _WORD_NBYTES // in_word
        shifted = v.op("shl", "i32", codes, _numbers(bits * (i % in_word) for i in indices))
        for word in range(first // in_word, indices[-1] // in_word + 1):
            masks = [-(i // in_word == word) for i in indices]
            mine = shifted if all(masks) else v.op("and", "i32", shifted, _numbers(masks))
            if first > word * in_word:
                mine = v.op("or", "i32", self.begun, mine)
            self.begun = mine
            if (word + 1) * in_word <= indices.stop:
                full = v.emit(v.reduced("or", "i32", mine))
                place = v.emit(f"getelementptr i8, ptr {out}, i64 {word * _WORD_NBYTES}")
                v.lines.append(f"store i32 {full}, ptr {place}, align 1")

    def _tell(self, ends: list[str]) -> None:
        """Add the sums of all units to the tally."""
        one = self.one
        errors = maximum(one, "i32", self._reduced("umax", "i32", ends[0]), ends[3])
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
            total = one.emit(
                f"call double @llvm.vector.reduce.fadd.v{self.wide.width}f64"
                f"(double {start}, {of} {wide})"
            )
            one.lines.append(f"store double {total}, ptr {place}")


def _numbers(values: Iterable[int]) -> str:
    return f"<{', '.join(f'i32 {value}' for value in values)}>"


def _count(v: Vector, total: str, mask: str) -> str:
    return v.op("add", "i64", total, v.convert("zext", "i1", mask, "i64"))


_KERNEL = """
define void @{symbol}(
    ptr %src, ptr %out, ptr %statistics, i64 %units, i64 %unit, ptr %tally
) nounwind {{
entry:
  {enter}
  {sizes}
  {body}
  {leave}
  ret void
}}
"""


def kernel_ir(recipe: Recipe, src: DType, *, native_half: bool, architecture: str) -> str:
    """LLVM IR of ``void quantise(src, out, statistics, units, unit, tally)``.

    It quantises ``units`` units of ``unit`` elements each from ``src`` on to codes from ``out`` on,
    writes a float32 a unit from ``statistics`` on where the recipe has one, and adds to a `Tally`.

    Args:
        recipe: the format's instructions.
        src: dtype of the elements.
        native_half: the CPU converts between float16 and float32.
        architecture: see `cast.kernels.kernel_ir`.
    """
    writer = _Writer(recipe, src, native_half)
    enter, leave = ENVIRONMENT.get(architecture, ("", ""))
    numel = str(recipe.numel) if recipe.numel else "%unit"
    # codes of so many bytes are in one of so many
    nbytes, codes = (1, 1 if recipe.packing == "bytes" else 2)
    if recipe.packing in _IN_WORDS:
        nbytes, codes = _WORD_NBYTES, _IN_WORDS[recipe.packing]
    sizes = (
        f"%numel = add i64 {numel}, 0",
        f"%unit.steps = udiv i64 %numel, {codes}",
        f"%unit.codes = mul i64 %unit.steps, {nbytes}",
        f"%unit.nbytes = add i64 %unit.codes, {recipe.header_nbytes}",
        f"%whole = and i64 %numel, -{_WIDTH}",
    )
    return _KERNEL.format(
        symbol=SYMBOL,
        enter=enter,
        sizes="\n  ".join(sizes),
        body=writer.text(),
        leave=leave,
    )


#: ``(src address, out address, statistics address, units, elements of a unit, tally address)``, see
#: `kernel_ir`; it drops the interpreter's lock, and any number of threads may be in it.
Kernel = Callable[[int, int, int, int, int, int], None]
_KERNEL_TYPE = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_uint64, c_uint64, c_void_p)
_compiling = threading.Lock()


def compile_kernel(recipe: Recipe, src: DType, name: str) -> Kernel:
    """The kernel of a recipe for this CPU, compiled once per process; any thread may call it.

    Args:
        recipe: the format's instructions; equal ones share a kernel.
        src: dtype of the elements.
        name: the format's, for the error.

    Raises:
        UnsupportedCastError: llvmlite is missing or cannot compile for this machine.
    """
    with _compiling:
        found = _compile(recipe, src)
    if isinstance(found, str):
        raise UnsupportedCastError(src.name, name, reason=found)
    return found


@cache
def _compile(recipe: Recipe, src: DType) -> Kernel | str:
    def ir(native_half: bool, architecture: str) -> str:
        return kernel_ir(recipe, src, native_half=native_half, architecture=architecture)

    kernel: Kernel | str = link_kernel(ir, SYMBOL, _KERNEL_TYPE, kept_object)
    return kernel


def kept_object(ir: str, target: Target) -> bytes:
    """The object file of a kernel, kept for later processes; see `cast.llvm.link_kernel`."""
    depends_on = ("quant", target.triple, target.cpu, target.features, ir)
    kept = read_kept(*depends_on)
    if kept is None:
        kept = compile_object(ir, target)
        keep(kept, *depends_on)
    return kept
