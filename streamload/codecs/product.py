"""Products of a quantized weight with a few vectors, and its decoding, on the host.

A kernel computes ``out[t, r] = sum over k of weight[r, k] * x[t, k]``, or writes rows of the weight
as floats. It decodes in registers, with the instructions that decode the layout elsewhere: scales
are exact, and sums are in float32. Threads call it with one job, and claim rows until none is left.
`product_cuda` has the same for CUDA.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from functools import cache, partial, reduce

from streamload.codecs.decode_blocks import WIDTH, Blocks, BlockWriter
from streamload.codecs.decode_kernels import Values, load, scale_at
from streamload.codecs.ir import NARROW, fused, kernel_text, loop, shuffle, splat
from streamload.codecs.llvm import HostFunction, Kernel, Target, host_target
from streamload.codecs.parts import Part
from streamload.codecs.scheme import CodedWeight, codec_of
from streamload.core.dtypes import BF16, DType

FUNCTION = HostFunction("product", (c_void_p,))
#: The fields of a job, of 64 bits each: see `kernel_ir`.
JOB = (
    *("src", "x", "out", "scales", "zeros", "table", "nested", "map", "offset", "factor"),
    *("stop", "width", "tall", "per.row", "pitch", "claim", "next"),
)
#: The most vectors that a kernel multiplies; for more, decoding is faster.
MOST_TOKENS = 8
_POINTERS = JOB[:8]
_FLOATS = ("offset", "factor")
_LINE_NBYTES = 64  # of the CPU's cache
_SUBNORMAL = 0x90  # of `llvm.is.fpclass`: of both signs
_UNROLLED = 8 * WIDTH  # columns of a block of `Values` whose steps are unrolled
_ALL_ROWS = 2**31 - 1


def float_bits(x: float) -> int:
    """Return the bits of a float32."""
    return int.from_bytes(struct.pack("<f", x), "little")


@dataclass(frozen=True)
class Form:
    """How products read a quantized weight.

    Attributes:
        codes: its blocks, or its values with scales in other arrays.
        parts: the suffix of the part (`Quantized.parts`) that holds each other array: "scales",
            "table", and of nested scales "nested", "map", and "state", JSON with their offset.
        wide: columns that share a scale, for `Values`; 0 for all of a row.
        tall: rows that share their scales, for `Values`; 0 for all of the matrix.
        factor: multiplies each scale.
    """

    codes: Blocks | Values
    parts: tuple[tuple[str, str], ...] = ()
    wide: int = 0
    factor: float = 1.0
    tall: int = 1

    def per_row(self, width: int) -> int:
        """Return the blocks or scales of a row of ``width`` columns; 0 if no kernel reads it."""
        wide = self.codes.numel if isinstance(self.codes, Blocks) else self.wide
        return 0 if width % max(wide, WIDTH) or wide % WIDTH else width // (wide or width)

    def row_nbytes(self, width: int) -> int:
        """Return the bytes of a row's codes."""
        if isinstance(self.codes, Blocks):
            return self.per_row(width) * self.codes.nbytes
        return width * self.codes.bits // 8

    def constants(self, width: int) -> dict[str, int]:
        """Return what is equal in all jobs and kernels for weights of ``width`` columns."""
        constants = {"factor": float_bits(self.factor), "width": width}
        return constants | {"tall": self.tall or _ALL_ROWS, "per.row": self.per_row(width)}


class Formed(ABC):
    """A codec whose values and scales kernels read."""

    @abstractmethod
    def form(self, detail: str) -> Form:
        """Return how products read weights; ``detail`` states it if there are several forms."""


@cache
def coded_form(coded: CodedWeight) -> Form | None:
    """Return how products read a weight, of format "name" or "name:detail"; None if none can."""
    name, _, detail = coded.format.partition(":")
    codec = codec_of(name)
    if isinstance(codec, Formed):
        return codec.form(detail)
    return Form(codec) if isinstance(codec, Blocks) else None


@cache
def operands(coded: CodedWeight) -> list[Part]:
    """Return the arrays that products read: the codes, then those of `Form.parts`."""
    made, form = coded.made, coded_form(coded)
    if form is None:
        return [*made.parts]
    parts = {part.suffix: part for part in made.parts}
    return [parts[suffix] for suffix in ("", *(suffix for _, suffix in form.parts))]


class _Rows(BlockWriter):
    """Multiplies the elements of blocks by the vectors, or stores them, as they are decoded."""

    def __init__(
        self, native_half: bool, native_bf16: bool, lanes: int, tokens: int, dst: DType
    ) -> None:
        super().__init__(native_half, lanes)
        self._tokens, self._dst = tokens, dst
        self._native = native_bf16 and dst is BF16
        # many sums are vectors of one register each
        self.total = self.of(lanes if lanes and tokens >= MOST_TOKENS // 2 else WIDTH)
        self.sums: list[list[str]] = []
        self._column = self._to = ""

    def begin(self, block: str, column: str, to: str, sums: list[list[str]]) -> None:
        """Continue with a block from ``column`` on; its elements are stored at ``to``, if at all.

        ``sums``: of each token, vectors of sums of products (`total` writes them); blocks of
        several vectors use them alternately. `store` replaces them.
        """
        self.block, self._column, self._to, self.sums, self._stored = block, column, to, sums, 0

    def store(self, x: str) -> None:
        """Multiply or store the block's next `WIDTH` elements."""
        if not self._tokens:
            self.write(self._to, x, self._stored)
        for token in range(self._tokens):
            sums, column = self.sums[token], self.one.op("add", "i64", self._column, self._stored)
            at = self._stored // WIDTH % len(sums)
            sums[at] = self.added(x, token, column, sums[at])
        self._stored += WIDTH

    def added(self, x: str, token: int, column: str, total: str) -> str:
        """Add the products of `WIDTH` elements with a token's vector to a sum's elements."""
        y, v = self.vector(token, column), self.wide
        if self.total.width == WIDTH:
            return fused(v, x, y, total)
        for start in range(0, WIDTH, self.total.width):
            order = range(start, start + self.total.width)
            a, b = (shuffle(v, v.type("float"), each, each, order) for each in (x, y))
            total = fused(self.total, a, b, total)
        return total

    def prefetch(self, place: str, offset: str, nbytes: int, level: int) -> None:
        """Fetch ``nbytes`` that will be read soon, from ``offset`` bytes after a pointer on.

        The CPU's own prefetching ends with a page of memory, which may hold a single row.
        ``level`` is that of the cache, 1 or 2, the faster one for the form.
        """
        there = self.one.emit(f"getelementptr i8, ptr {place}, i64 {offset}")
        for at in range(0, nbytes, _LINE_NBYTES):
            line = self.one.emit(f"getelementptr i8, ptr {there}, i64 {at}")
            self.lines.append(
                f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 {4 - level}, i32 1)"
            )

    def vector(self, token: int, column: str) -> str:
        """Load the elements of a token's vector from ``column`` on."""
        place = self.one.emit(f"getelementptr float, ptr %x.{token}, i64 {column}")
        return self.one.emit(f"load {self.wide.type('float')}, ptr {place}, align 4")

    def write(self, to: str, x: str, index: int = 0) -> None:
        """Store `WIDTH` float32 elements as the target dtype, from element ``index`` of ``to``."""
        v, of = self.wide, f"i{self._dst.bits}"
        bits = self._native_bits(x) if self._native else NARROW[self._dst.code](v, v.as_bits(x))
        place = self.one.emit(f"getelementptr {of}, ptr {to}, i64 {index}")
        self.lines.append(f"store {v.type(of)} {bits}, ptr {place}, align 1")

    def _native_bits(self, x: str) -> str:
        """Write IR of bfloat16 elements by the CPU's instruction, if none is subnormal."""
        v, label = self.wide, f"n{len(self.lines)}"
        ones = f"<{WIDTH} x i1>"
        name = f"{ones} @llvm.is.fpclass.v{WIDTH}f32({v.type('float')} {x}, i32 {_SUBNORMAL})"
        any_small = v.emit(v.reduced("or", "i1", v.emit(f"call {name}")))
        v.lines += [
            f"br i1 {any_small}, label %{label}.slow, label %{label}.fast",
            f"{label}.slow:",
        ]
        slow = NARROW["BF16"](v, v.as_bits(x))
        v.lines += [f"br label %{label}.join", f"{label}.fast:"]
        fast = v.convert("bitcast", "bfloat", v.convert("fptrunc", "float", x, "bfloat"), "i16")
        v.lines += [f"br label %{label}.join", f"{label}.join:"]
        return v.emit(f"phi {v.type('i16')} [{slow}, %{label}.slow], [{fast}, %{label}.fast]")


class _Kernel:
    """Writes the IR of a kernel."""

    def __init__(self, form: Form, tokens: int, dst: DType, b: _Rows, lanes: int) -> None:
        self.form, self.tokens, self.dst, self.b = form, tokens, dst, b
        self.is_blocks = isinstance(form.codes, Blocks)
        several = isinstance(form.codes, Blocks) and form.codes.numel > WIDTH
        # sums that do not wait for each other: of rows at once, or of vectors of a block
        self.chains = 2 if several and tokens else 1
        registers = 16 if lanes >= 16 else 8  # for sums
        each = max(tokens, 1) * self.chains * (b.total.width // (lanes or 4))
        self.at_once = 1 if several and tokens < 4 else max(min(registers // each, 4), 1)

    def text(self, architecture: str) -> str:
        """Return the IR of the whole kernel."""
        b, one = self.b, self.b.one
        for slot, name in enumerate(JOB):
            place = one.emit(f"getelementptr i64, ptr %job, i64 {slot}")
            of = "ptr" if name in _POINTERS else "float" if name in _FLOATS else "i64"
            if name != "next":
                b.lines.append(f"%{name} = load {of}, ptr {place}")
        for token in range(self.tokens):
            offset = one.op("mul", "i64", "%width", token)
            b.lines.append(f"%x.{token} = getelementptr float, ptr %x, i64 {offset}")
        b.lines += ["%last = sub i64 %stop, 1", "br label %claiming", "claiming:"]
        first = one.emit(f"atomicrmw add ptr {place}, i64 %claim monotonic")
        stop = one.op("add", "i64", first, "%claim")
        stop = one.emit(f"call i64 @llvm.umin.i64(i64 {stop}, i64 %stop)")
        is_left = one.emit(f"icmp ult i64 {first}, %stop")
        b.lines += [f"br i1 {is_left}, label %claimed, label %done", "claimed:"]
        loop(one, first, stop, self.at_once, (), self._rows)
        b.lines += ["br label %claiming", "done:"]
        return kernel_text(FUNCTION.symbol, "ptr noalias %job", b.lines, architecture)

    def _rows(self, row: str, _: Sequence[str]) -> Sequence[str]:
        """Write IR for `at_once` rows from ``row`` on; a row past the end is the last one again."""
        one = self.b.one
        more = [one.op("add", "i64", row, index) for index in range(1, self.at_once)]
        rows = [row, *(one.emit(f"call i64 @llvm.umin.i64(i64 {n}, i64 %last)") for n in more)]
        sums = (self._of_blocks if self.is_blocks else self._of_values)(rows)
        for index, total in enumerate(sums):
            each, token = divmod(index, self.tokens)
            at = one.op("add", "i64", rows[each], one.op("mul", "i64", "%pitch", token))
            to = one.emit(f"getelementptr float, ptr %out, i64 {at}")
            self.b.lines.append(f"store float {self._total(total)}, ptr {to}, align 4")
        return ()

    def _total(self, x: str) -> str:
        """Write IR of the sum of a vector's elements."""
        v = self.b.total
        name = f"@llvm.vector.reduce.fadd.v{v.width}f32"
        return v.emit(f"call reassoc float {name}(float 0.0, {v.type('float')} {x})")

    def _zeros(self, rows: Sequence[str]) -> list[tuple[str, str]]:
        count = len(rows) * self.tokens * self.chains
        return [(self.b.total.type("float"), "zeroinitializer")] * count

    def _places(self, rows: Sequence[str]) -> list[str]:
        """Write IR of pointers to the elements of rows in the output."""
        one, of = self.b.one, f"i{self.dst.bits}"
        starts = (one.op("mul", "i64", row, "%width") for row in rows)
        return [one.emit(f"getelementptr {of}, ptr %out, i64 {start}") for start in starts]

    def _of_blocks(self, rows: Sequence[str]) -> Sequence[str]:
        """Write IR that reads rows of blocks; return the names of the sums of rows and tokens."""
        b, one, layout, chains = self.b, self.b.one, self.form.codes, self.chains
        assert isinstance(layout, Blocks)
        row_nbytes = one.op("mul", "i64", "%per.row", layout.nbytes)
        ahead = one.op("mul", "i64", row_nbytes, self.at_once)
        offsets = [one.op("mul", "i64", row, row_nbytes) for row in rows]
        starts = [one.emit(f"getelementptr i8, ptr %src, i64 {offset}") for offset in offsets]
        places = self._places(rows)

        def block(at: str, carried: Sequence[str]) -> Sequence[str]:
            offset = one.op("mul", "i64", at, layout.nbytes)
            column = one.op("mul", "i64", at, layout.numel)
            ends: list[str] = []
            for index, (start, place) in enumerate(zip(starts, places, strict=True)):
                source = one.emit(f"getelementptr i8, ptr {start}, i64 {offset}")
                b.prefetch(source, ahead, layout.nbytes, 1)
                to = one.emit(f"getelementptr i{self.dst.bits}, ptr {place}, i64 {column}")
                each = self.tokens * chains
                mine = carried[index * each : (index + 1) * each]
                sums = [list(mine[n : n + chains]) for n in range(0, each, chains)]
                b.begin(source, column, to, sums)
                layout.instructions(b)
                ends += [name for some in b.sums for name in some]
            return ends

        found = loop(one, "0", "%per.row", 1, self._zeros(rows), block)
        if chains == 1:
            return found
        pairs = zip(found[::2], found[1::2], strict=True)
        return [b.total.op("fadd", "float", *pair) for pair in pairs]

    def _of_values(self, rows: Sequence[str]) -> Sequence[str]:
        """Write IR that reads rows of values; return the names of the sums of rows and tokens."""
        b, one, v, values, form = self.b, self.b.one, self.b.wide, self.form.codes, self.form
        assert isinstance(values, Values)
        starts = [one.op("mul", "i64", row, "%width") for row in rows]
        places = self._places(rows)
        scales = [
            one.op("mul", "i64", one.op("udiv", "i64", row, "%tall"), "%per.row") for row in rows
        ]
        zeros = self._zeros(rows)
        shift = (8 // values.bits).bit_length() - 1
        row_nbytes = one.op("lshr", "i64", "%width", shift)
        ahead = one.op("mul", "i64", row_nbytes, self.at_once)

        def step(column: str, sums: Sequence[str], found: Sequence[tuple[str, str]]) -> list[str]:
            ends: list[str] = []
            for index, (start, (scale, zero)) in enumerate(zip(starts, found, strict=True)):
                first = one.op("add", "i64", start, column)
                codes = load(v, values, first)
                place = one.emit(
                    f"getelementptr i8, ptr %src, i64 {one.op('lshr', 'i64', first, shift)}"
                )
                b.prefetch(place, ahead, 1, 2)
                x = values.instructions(v, codes)
                if values.has_zeros:
                    x = v.op("fsub", "float", x, splat(v, "float", zero))
                if scale:
                    x = v.op("fmul", "float", x, splat(v, "float", scale))
                if not self.tokens:
                    of = f"i{self.dst.bits}"
                    to = one.emit(f"getelementptr {of}, ptr {places[index]}, i64 {column}")
                    b.write(to, x)
                mine = sums[index * self.tokens : (index + 1) * self.tokens]
                ends += [b.added(x, n, column, total) for n, total in enumerate(mine)]
            return ends

        def scaled(at: str) -> list[tuple[str, str]]:
            found = [scale_at(values, one, one.op("add", "i64", base, at)) for base in scales]
            if form.factor == 1.0:
                return found
            return [(one.op("fmul", "float", scale, "%factor"), zero) for scale, zero in found]

        def block(at: str, sums: Sequence[str], *, scales_later: bool = False) -> Sequence[str]:
            found = [("" if scales_later else scale, zero) for scale, zero in scaled(at)]
            begin = one.op("mul", "i64", at, form.wide) if form.wide else "0"
            if form.wide and form.wide <= _UNROLLED:
                for offset in range(0, form.wide, WIDTH):
                    sums = step(one.op("add", "i64", begin, offset), sums, found)
                return sums
            end = one.op("add", "i64", begin, form.wide) if form.wide else "%width"
            of = b.total.type("float")
            return loop(
                one,
                begin,
                end,
                WIDTH,
                [(of, each) for each in sums],
                lambda n, x: step(n, x, found),
            )

        if form.wide:
            return loop(one, "0", "%per.row", 1, zeros, block)
        first = [start for _, start in zeros]
        if not self.tokens:
            return block("0", first)
        return self._careful(block("0", first, scales_later=True), scaled("0"), first, block)

    def _careful(
        self,
        sums: Sequence[str],
        scales: Sequence[tuple[str, str]],
        zeros: Sequence[str],
        block: Callable[[str, Sequence[str]], Sequence[str]],
    ) -> Sequence[str]:
        """Write IR that multiplies sums by scales; if that overflows, ``block`` scales elements."""
        one, t, label = self.b.one, self.b.total, f"o{len(self.b.lines)}"
        fast: list[str] = []
        doubts: list[str] = []
        for index, total in enumerate(sums):
            scale = splat(t, "float", scales[index // self.tokens][0])
            fast.append(t.op("fmul", "float", total, scale))
            rest = t.op("fsub", "float", fast[-1], fast[-1])  # NaN of infinity and NaN
            doubts.append(t.op("fcmp uno", "float", rest, 0.0))
        doubt = reduce(lambda a, b: t.op("or", "i1", a, b), doubts)
        any_doubt = one.emit(t.reduced("or", "i1", doubt))
        t.lines += [f"br i1 {any_doubt}, label %{label}.slow, label %{label}.fast"]
        t.lines += [f"{label}.slow:"]
        slow = block("0", zeros)
        t.lines += [f"br label %{label}.scaled", f"{label}.scaled:", f"br label %{label}.join"]
        t.lines += [f"{label}.fast:", f"br label %{label}.join", f"{label}.join:"]
        return [
            t.emit(f"phi {t.type('float')} [{a}, %{label}.scaled], [{b}, %{label}.fast]")
            for a, b in zip(slow, fast, strict=True)
        ]


def kernel_ir(
    form: Form,
    tokens: int,
    dst: DType,
    *,
    lanes: int,
    native_bf16: bool = False,
    native_half: bool,
    architecture: str,
) -> str:
    """Return LLVM IR of ``void product(job)`` for ``tokens`` vectors; 0: the weight is decoded.

    A job (`JOB`) has addresses of the weight's codes, of the vectors (float32, contiguous), of the
    output, and of scales, zero points, the table, nested scales and their map, where `form` has
    such; two float32; the end of the rows, exclusive, the columns, the rows that share a scale, and
    the scales or blocks of a row; elements from one token's output to the next one's; the rows that
    a thread claims at once, and the next row to claim, at first the first row. The output is that
    of row 0, and is written from the first row on. Products are float32, decoded elements ``dst``.
    """
    b = _Rows(native_half, native_bf16, lanes, tokens, dst)
    return _Kernel(form, tokens, dst, b, lanes).text(architecture)


def compile_product(form: Form, tokens: int, dst: DType) -> Kernel:
    """Compile the kernel of `kernel_ir` for this CPU; see `HostFunction.kernel`."""
    try:
        target = host_target()
    except (ImportError, OSError):  # `kernel` raises it
        target = Target("")
    ir = partial(kernel_ir, form, tokens, dst, lanes=target.lanes, native_bf16=target.native_bf16)
    return FUNCTION.kernel((form, tokens, dst), (form.codes.name, dst.name), ir)
