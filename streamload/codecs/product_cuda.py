"""Products of a quantized weight with a few vectors, and its decoding, as CUDA kernels.

A warp multiplies a few rows. Of blocks, eight lanes decode one: each vector of 32 elements in a
layout's instructions is spread over them, four elements a lane (`Lanes`). Of values with separate
scales, each lane decodes consecutive ones. Sums are float32, joined over the warp at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from streamload.codecs.decode_blocks import WIDTH, Blocks
from streamload.codecs.decode_kernels import Values, scale_at
from streamload.codecs.ir import NARROW, WIDEN, fused, loop
from streamload.codecs.lanes_cuda import EACH, GROUP, Lanes
from streamload.codecs.product import Form
from streamload.codecs.ptx import BLOCK_THREADS, WARP, ThreadWriter, kept_ptx
from streamload.core.dtypes import DType

SYMBOL = "product"
#: The 64-bit parameters of the kernels, in order: see `product_ptx`.
PARAMETERS = (
    *("src", "x", "out", "bias", "scales", "zeros", "table", "nested", "map", "offset", "factor"),
    *("first", "stop", "width", "tall", "per.row", "pitch", "splits"),
)
_ADDRESSES = ("scales", "zeros", "nested", "map")  # of arrays that `scale_at` reads
_FLOATS = ("offset", "factor")
_COUNTS = ("first", "stop", "tall", "per.row", "splits")
_WARPS = BLOCK_THREADS // WARP
_UNROLLED = 4 * WIDTH  # elements of blocks that lanes decode before the next step
_BLOCKS = WARP // GROUP  # blocks that a warp decodes at once
_WANTED_WARPS = 1 << 13  # enough to keep every current device busy
_STEP = 16 * WARP  # columns that a warp reads at once, about


def _rows(form: Form, tokens: int) -> int:
    """Return how many rows a warp reads at once."""
    return 1 if not tokens or (tokens == 1 and isinstance(form.codes, Blocks)) else 2


class Launch(NamedTuple):
    """How a kernel is launched."""

    splits: int
    blocks: int


def launch(form: Form, rows: int, width: int, tokens: int) -> Launch:
    """Return how to launch a kernel for a number of rows; ``tokens`` is 0 to decode them."""
    each, splits = _rows(form, tokens), 1
    most = min(_WARPS, width // _STEP)
    while splits * 2 <= most and -(-rows // each) * splits < _WANTED_WARPS:
        splits *= 2
    return Launch(splits, -(-rows // (_WARPS // splits * each)))


class _Kernel:
    """Collects the IR of one kernel."""

    def __init__(
        self, form: Form, dtype: DType, tokens: int, exact: bool, fixed: Mapping[str, int]
    ) -> None:
        self.form, self.dtype, self.tokens, self.exact = form, dtype, tokens, exact
        self.fixed = fixed
        self.rows = _rows(form, tokens)
        self.t = ThreadWriter()

    def text(self) -> str:
        """Return the IR of the whole kernel."""
        t = self.t
        names = dict.fromkeys(_COUNTS, "wide") | dict.fromkeys(_FLOATS, "bits")
        names |= dict.fromkeys((*_ADDRESSES, "table"), "at")
        names = {name: f"{name}.{names[name]}" if name in names else name for name in PARAMETERS}
        t.lines += [f"%{names[name]} = add i64 0, {value}" for name, value in self.fixed.items()]
        t.lines += [f"%sub = and i32 %lane, {GROUP - 1}", "%group = lshr i32 %lane, 3"]
        for name in _COUNTS:
            t.lines.append(f"%{name} = trunc i64 %{name}.wide to i32")
        for name in _FLOATS:
            bits = t.emit(f"trunc i64 %{name}.bits to i32")
            t.lines.append(f"%{name} = bitcast i32 {bits} to float")
        for name in _ADDRESSES:
            at = t.place(f"%{name}.at")
            t.lines.append(f"%{name} = addrspacecast ptr addrspace(1) {at} to ptr")
        shared = self._table()
        number = t.op("lshr", "i32", "%tid", WARP.bit_length() - 1)
        share = t.op("udiv", "i32", number, "%splits")  # of the CUDA block's rows
        split = t.op("sub", "i32", number, t.op("mul", "i32", share, "%splits"))
        t.lines += [f"%split = zext i32 {split} to i64", f"%shares = udiv i32 {_WARPS}, %splits"]
        t.lines += ["%before = mul i32 %ctaid, %shares", "%last = sub i32 %stop, 1"]
        rows = [self._row(share, index) for index in range(self.rows)]
        # all warps wait at barriers: those without a row repeat the last one
        rows = [t.emit(f"call i32 @llvm.umin.i32(i32 {row}, i32 %last)") for row in rows]
        sums = (self._blocks if isinstance(self.form.codes, Blocks) else self._scaled)(rows)
        if self.tokens:
            self._finish(sums)
            shared += f"\n@sums = internal addrspace(3) global [{_WARPS * len(sums)} x float] undef"
        listed = " ".join(names[name] for name in PARAMETERS if name not in self.fixed)
        return t.kernel(SYMBOL, listed, shared)

    def _row(self, share: str, index: str | int) -> str:
        """Write IR of row ``index`` of a share of the CUDA block's rows."""
        t = self.t
        before = t.op("mul", "i32", t.op("add", "i32", "%before", share), self.rows)
        return t.op("add", "i32", "%first", t.op("add", "i32", before, index))

    def _table(self) -> str:
        """Write IR that copies the table to shared memory; return its definition."""
        t, values = self.t, self.form.codes
        if isinstance(values, Blocks) or not values.has_table:
            return ""

        def copy() -> None:
            value = t.load("float", 4, "%table.at", "%thread")
            place = t.emit("getelementptr float, ptr addrspace(3) @table, i32 %tid")
            t.lines.append(f"store float {value}, ptr addrspace(3) {place}")

        t.when(t.op("icmp ult", "i32", "%tid", 16), copy)
        t.barrier()
        t.lines.append("%table = addrspacecast ptr addrspace(3) @table to ptr")
        return "@table = internal addrspace(3) global [16 x float] undef, align 64"

    def _loaded(self, base: str, at: str, count: int) -> list[str]:
        """Write IR that loads ``count`` elements of the dtype from number ``at``; as float32."""
        t, dtype = self.t, self.dtype
        of, n = f"i{dtype.bits}", dtype.itemsize
        out: list[str] = []
        most = min(count, 16 // n)
        for start in range(0, count, most):
            index = t.op("add", "i64", at, start)
            place = t.place(base, index, n)
            some = t.emit(f"load <{most} x {of}>, ptr addrspace(1) {place}, align {most * n}")
            each = (t.emit(f"extractelement <{most} x {of}> {some}, i32 {i}") for i in range(most))
            out += [t.as_float(WIDEN[dtype.code](t, one)) for one in each]
        return out

    def _stored(self, at: str, values: Sequence[str]) -> None:
        """Write IR that stores float32 elements as the dtype from number ``at`` of the result."""
        t, dtype = self.t, self.dtype
        of, n = f"i{dtype.bits}", dtype.itemsize
        most = min(len(values), 16 // n)
        for start in range(0, len(values), most):
            vector = "poison"
            for index, value in enumerate(values[start : start + most]):
                bits = NARROW[dtype.code](t, t.as_bits(value))
                vector = t.emit(f"insertelement <{most} x {of}> {vector}, {of} {bits}, i32 {index}")
            place = t.place("%out", t.op("add", "i64", at, start), n)
            t.lines.append(
                f"store <{most} x {of}> {vector}, ptr addrspace(1) {place}, align {most * n}"
            )

    def _row_start(self, row: str) -> str:
        """Write IR of the number of the first element of an i32 row, as i64."""
        t = self.t
        return t.op("mul", "i64", t.convert("zext", "i32", row, "i64"), "%width")

    def _blocks(self, rows: Sequence[str]) -> Sequence[str]:
        """Write IR that multiplies or stores rows of blocks; return the names of the sums."""
        t, layout, tokens = self.t, self.form.codes, self.tokens
        assert isinstance(layout, Blocks)
        count = len(rows) * tokens
        starts = [self._row_start(row) for row in rows]
        row_nbytes = t.op("mul", "i64", "%per.row.wide", layout.nbytes)
        bases = []
        for row in rows:
            offset = t.op("mul", "i64", t.convert("zext", "i32", row, "i64"), row_nbytes)
            bases.append(t.op("add", "i64", "%src", offset))
        group = t.convert("zext", "i32", "%group", "i64")
        unrolled = max(_UNROLLED // layout.numel, 1)
        at_once = _BLOCKS * unrolled
        steps = t.op("udiv", "i64", t.op("add", "i64", "%per.row.wide", at_once - 1), at_once)
        end = t.op("sub", "i64", "%per.row.wide", 1)

        def blocks(at: str, carried: Sequence[str]) -> Sequence[str]:
            for index in range(unrolled):
                number = t.op("mul", "i64", at, at_once)
                number = t.op("add", "i64", number, t.op("add", "i64", group, _BLOCKS * index))
                carried = block(number, carried)
            return carried

        def block(number: str, carried: Sequence[str]) -> Sequence[str]:
            exists = "true"
            if not self.exact:
                exists = t.op("icmp ule", "i64", number, end)
                # all lanes take part in shuffles: those without a block read the last one
                number = t.emit(f"call i64 @llvm.umin.i64(i64 {number}, i64 {end})")
            own = t.op("mul", "i32", "%sub", EACH)
            column = t.op("mul", "i64", number, layout.numel)
            column = t.op("add", "i64", column, t.convert("zext", "i32", own, "i64"))
            known: dict[tuple[int, int], list[str]] = {}
            sums: list[str] = []
            for index, base in enumerate(bases):
                totals = ["0.0"] * tokens

                def put(first: int, x: str, index: int = index, totals: list[str] = totals) -> None:
                    elements = [
                        t.emit(f"extractelement <4 x float> {x}, i32 {i}") for i in range(EACH)
                    ]
                    at = t.op("add", "i64", column, first)
                    if not tokens:
                        to = t.op("add", "i64", starts[index], at)
                        t.when(exists, lambda: self._stored(to, elements))
                    for token in range(tokens):
                        key = first, token
                        if key not in known:
                            number = t.op("mul", "i64", "%width", token)
                            number = t.op("add", "i64", at, number)
                            known[key] = self._loaded("%x", number, EACH)
                        for value, other in zip(elements, known[key], strict=True):
                            totals[token] = fused(t, value, other, totals[token])

                lanes = Lanes(t, layout.nbytes & -layout.nbytes, put)
                place = t.op("add", "i64", base, t.op("mul", "i64", number, layout.nbytes))
                lanes.begin(place)
                layout.instructions(lanes)
                sums += [t.select(exists, "float", total, 0.0) for total in totals]
            return [
                t.op("fadd", "float", total, more)
                for total, more in zip(carried, sums, strict=True)
            ]

        return loop(t, "%split", steps, "%splits.wide", [("float", "0.0")] * count, blocks)

    def _scaled(self, rows: Sequence[str]) -> Sequence[str]:
        """Write IR that multiplies or stores rows of values; return the names of the sums."""
        t, values, tokens = self.t, self.form.codes, self.tokens
        assert isinstance(values, Values)
        # columns of a lane: codes of 16 bytes; or elements of 16 bytes, and codes of 4 at least
        each = 128 // values.bits if tokens else max(16 // self.dtype.itemsize, 32 // values.bits)
        if self.form.wide:
            each = min(each, self.form.wide)
        starts = [self._row_start(row) for row in rows]
        scales = []
        for row in rows:
            down = t.op("udiv", "i32", row, "%tall")
            scales.append(t.op("mul", "i32", down, "%per.row"))
        first = t.convert("zext", "i32", t.op("mul", "i32", "%lane", each), "i64")
        first = t.op("add", "i64", first, t.op("mul", "i64", "%split", WARP * each))
        stride = t.op("mul", "i64", "%splits.wide", WARP * each)

        def step(column: str, carried: Sequence[str]) -> Sequence[str]:
            places = [t.op("mul", "i64", "%width", token) for token in range(tokens)]
            known = [self._loaded("%x", t.op("add", "i64", column, n), each) for n in places]
            ends: list[str] = []
            narrow = t.convert("trunc", "i64", column, "i32")
            across = t.op("udiv", "i32", narrow, self.form.wide) if self.form.wide else "0"
            for index, start in enumerate(starts):
                codes = self._codes(values, t.op("add", "i64", start, column), each)
                number = t.op("add", "i32", scales[index], across)
                scale, zero = scale_at(values, t, t.convert("zext", "i32", number, "i64"))
                elements = []
                for code in codes:
                    value = values.instructions(t, code)
                    if values.has_zeros:
                        value = t.op("fsub", "float", value, zero)
                    value = t.op("fmul", "float", value, scale)
                    if self.form.factor != 1.0:
                        value = t.op("fmul", "float", value, "%factor")
                    elements.append(value)
                if not tokens:
                    self._stored(t.op("add", "i64", start, column), elements)
                for token in range(tokens):
                    total = carried[index * tokens + token]
                    for value, other in zip(elements, known[token], strict=True):
                        total = fused(t, value, other, total)
                    ends.append(total)
            return ends

        count = len(rows) * tokens
        return loop(t, first, "%width", stride, [("float", "0.0")] * count, step)

    def _codes(self, values: Values, at: str, count: int) -> list[str]:
        """Write IR that loads ``count`` codes, i8, from element ``at`` of the weight on."""
        t = self.t
        nbytes = count * values.bits // 8
        if values.bits == 4:
            at = t.op("lshr", "i64", at, 1)
        words = nbytes // 4
        place = t.emit(f"inttoptr i64 {t.op('add', 'i64', '%src', at)} to ptr addrspace(1)")
        some = t.emit(f"load <{words} x i32>, ptr addrspace(1) {place}, align {nbytes}")
        out: list[str] = []
        for word in range(words):
            one = t.emit(f"extractelement <{words} x i32> {some}, i32 {word}")
            for byte in range(4):
                shifts = [8 * byte] if values.bits == 8 else [8 * byte, 8 * byte + 4]
                for shift in reversed(shifts) if values.high_first else shifts:
                    code = t.op("lshr", "i32", one, shift)
                    code = t.op("and", "i32", code, 15) if values.bits == 4 else code
                    out.append(t.convert("trunc", "i32", code, "i8"))
        return out

    def _finish(self, sums: Sequence[str]) -> None:
        """Write IR that joins the sums of lanes and warps, adds the bias, and stores them."""
        t, count = self.t, len(sums)

        def add(a: str, b: str) -> str:
            return t.as_bits(t.op("fadd", "float", t.as_float(a), t.as_float(b)))

        totals = [t.as_float(t.over_warp(t.as_bits(total), add)) for total in sums]
        first = t.op("mul", "i32", t.op("lshr", "i32", "%tid", WARP.bit_length() - 1), count)

        def keep() -> None:
            for index, total in enumerate(totals):
                at = t.op("add", "i32", first, index)
                place = t.emit(f"getelementptr float, ptr addrspace(3) @sums, i32 {at}")
                t.lines.append(f"store float {total}, ptr addrspace(3) {place}")

        t.when("%leads", keep)
        t.barrier()
        share = t.op("udiv", "i32", "%tid", count)
        index = t.op("sub", "i32", "%tid", t.op("mul", "i32", share, count))
        row = t.op("udiv", "i32", index, self.tokens)
        token = t.op("sub", "i32", index, t.op("mul", "i32", row, self.tokens))
        row = self._row(share, row)
        begin = t.op("mul", "i32", t.op("mul", "i32", share, "%splits"), count)
        begin = t.op("add", "i32", begin, index)
        is_own = t.op("icmp ult", "i32", share, "%shares")
        is_own = t.op("and", "i1", is_own, t.op("icmp ult", "i32", row, "%stop"))

        def write() -> None:
            def one(split: str, carried: Sequence[str]) -> Sequence[str]:
                narrow = t.convert("trunc", "i64", split, "i32")
                at = t.op("add", "i32", begin, t.op("mul", "i32", narrow, count))
                place = t.emit(f"getelementptr float, ptr addrspace(3) @sums, i32 {at}")
                some = t.emit(f"load float, ptr addrspace(3) {place}")
                return [t.op("fadd", "float", carried[0], some)]

            (total,) = loop(t, "0", "%splits.wide", 1, [("float", "0.0")], one)
            wide = t.convert("zext", "i32", row, "i64")
            at = t.op("mul", "i64", t.convert("zext", "i32", token, "i64"), "%pitch")
            at = t.op("add", "i64", at, wide)
            has_bias = t.op("icmp ne", "i64", "%bias", 0)
            label = f"b{len(t.lines)}"
            t.lines += [f"br i1 {has_bias}, label %{label}.yes, label %{label}.no", f"{label}.yes:"]
            (bias,) = self._loaded("%bias", wide, 1)
            added = t.op("fadd", "float", total, bias)
            self._stored(at, [added])
            t.lines += [f"br label %{label}.join", f"{label}.no:"]
            self._stored(at, [total])
            t.lines += [f"br label %{label}.join", f"{label}.join:"]

        t.when(is_own, write)


def is_exact(form: Form, width: int) -> bool:
    """Whether rows of a width have no fewer blocks in the last step of a warp."""
    codes = form.codes
    return isinstance(codes, Values) or not width % (_BLOCKS * max(_UNROLLED, codes.numel))


@cache
def product_ptx(
    form: Form, dtype: DType, tokens: int, exact: bool, fixed: tuple[tuple[str, int], ...] = ()
) -> str:
    """Return PTX of ``product``, with `PARAMETERS` of 64 bits each.

    They are the device addresses of the weight's codes, of the vectors (contiguous), the output and
    the bias (0 for none), all of ``dtype`` (BF16, F16 or F32), and of scales, zero points, the
    table, nested scales and their map, where the form has such; the bits of two float32; then rows,
    columns and numbers as in `product.kernel_ir`, and `Launch.splits`. Codes, vectors and decoded
    rows begin at multiples of 16 bytes.

    With 0 ``tokens`` the weight is decoded; ``exact`` is what `is_exact` returns for its width;
    ``fixed`` are `PARAMETERS` that the kernel holds and does not take.
    """
    ir = _Kernel(form, dtype, tokens, exact, dict(fixed)).text()
    return kept_ptx(ir, (form.codes.name, dtype.name))
