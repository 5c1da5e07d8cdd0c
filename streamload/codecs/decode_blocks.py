"""Blocks that hold their scales: the kernel, oracle and decoder that GGUF's layouts share.

A layout gives the bytes of a block, its elements in numpy (the oracle), and the same as
instructions of LLVM. Both follow gguf-py 0.19 (`gguf.quants`) operation by operation in float32, so
that float32 elements are gguf-py's bit for bit, the payload of a NaN aside. Those of 16 bits are
these, cast as any float32 is, and counted. There is no other error.

Scales that are NaN or infinite make elements NaN or infinite, as in gguf-py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from ctypes import c_uint64, c_void_p
from functools import partial

import numpy as np

from streamload.codecs.cast_table import ZERO, Cast, CastCounts, OutOfRange, make_cast
from streamload.codecs.decode import check_lengths
from streamload.codecs.ir import WIDEN, Vector, kernel_text, loop, splat
from streamload.codecs.llvm import Engine, HostFunction, Kernel, kernel_for
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Decoder, Layout, Read
from streamload.codecs.weights import Packed, QuantizedWeight
from streamload.core.dtypes import F32, PACKED, DType

FUNCTION = HostFunction("decode_blocks", (c_void_p, c_void_p, c_uint64))
WIDTH = 32  # elements that a kernel makes at once; blocks have a multiple
_SCRATCH_NUMEL = 1 << 16  # float32 elements on their way to 16 bits: they stay in the CPU's cache
_ORACLE_BLOCKS = 1 << 8


class Blocks(Layout):
    """A layout of blocks.

    Attributes:
        name: of the layout, the kind of its weights.
        dtype: of a block; that of `PACKED` by default.
        numel: elements of a block.
        nbytes: bytes of a block.
    """

    def __init__(self, name: str, dtype: DType | None = None) -> None:
        self.name, self.dtype = name, dtype or PACKED[name]
        self.numel, self.nbytes = self.dtype.block, self.dtype.nbytes(1)

    @abstractmethod
    def decoded(self, blocks: Array) -> Array:
        """The oracle: bytes, a block a row, to float32 elements, a block a row."""

    @abstractmethod
    def instructions(self, b: BlockWriter) -> None:
        """Instructions for a block: `BlockWriter.store` takes all of its elements, in order."""

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> _BlockDecoder:
        """See `decode.decoder_of`."""
        kernel = kernel_for(engine, lambda: compile_kernel(self))
        cast = None
        if dst is not F32:
            engine = engine if kernel is not None or engine == "numpy" else "auto"
            cast = make_cast(F32, dst, engine=engine, out_of_range=out_of_range)
        return _BlockDecoder(self, dst, kernel, cast)

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> None:
        """See `Layout.compile`."""
        compile_kernel(self)


class _BlockDecoder(Decoder):
    """Dequantises blocks; see `Decoder`."""

    def __init__(
        self, layout: Blocks, dst: DType, kernel: Kernel | None, cast: Cast | None
    ) -> None:
        self._layout, self._dst, self._kernel, self._cast = layout, dst, kernel, cast

    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        layout, n = self._layout, self._dst.itemsize
        numel, odd = divmod(out.nbytes, n * lines)
        skipped = first % layout.numel
        blocks = -(-(skipped + numel) // layout.numel) * lines
        cut = skipped or numel % layout.numel
        fits = not odd and data.nbytes == blocks * layout.nbytes and not (lines > 1 and cut)
        check_lengths(layout.name, data, out, self._dst, first, lines, fits)
        counts, at, done = ZERO, 0, 0
        if skipped:  # the first block is wanted in part; it may be the last, too
            done = min(layout.numel - skipped, numel)
            counts += self._part(data[: layout.nbytes], out[: done * n], skipped)
            at = layout.nbytes
        whole = (numel * lines - done) // layout.numel
        after, end = at + whole * layout.nbytes, done + whole * layout.numel
        if whole:
            counts += self._whole(data[at:after], out[done * n : end * n])
        if end < numel * lines:
            counts += self._part(data[after:], out[end * n :], 0)
        return counts

    def _part(self, block: memoryview, out: memoryview, skipped: int) -> CastCounts:
        """Some elements of one block."""
        elements = np.empty(self._layout.numel, np.float32)
        self._floats(np.frombuffer(block, np.uint8), elements)
        some = elements[skipped : skipped + out.nbytes // self._dst.itemsize]
        return self._placed(some, out)

    def _whole(self, data: memoryview, out: memoryview) -> CastCounts:
        source = np.frombuffer(data, np.uint8)
        if self._cast is None:
            target = np.frombuffer(out, np.uint8)
            self._floats(source, target)
            return ZERO
        layout, n = self._layout, self._dst.itemsize
        step = _SCRATCH_NUMEL // layout.numel
        scratch = np.empty(step * layout.numel, np.float32)
        counts = ZERO
        for at in range(0, data.nbytes // layout.nbytes, step):
            some = source[at * layout.nbytes : (at + step) * layout.nbytes]
            made = scratch[: some.size // layout.nbytes * layout.numel]
            self._floats(some, made)
            to = at * layout.numel * n
            counts += self._placed(made, out[to : to + made.size * n])
        return counts

    def _placed(self, elements: Array, out: memoryview) -> CastCounts:
        if self._cast is not None:
            return self._cast(memoryview(elements.data).cast("B"), out)
        np.frombuffer(out, np.uint8)[:] = elements.view(np.uint8)
        return ZERO

    def _floats(self, source: Array, out: Array) -> None:
        layout = self._layout
        blocks = source.size // layout.nbytes
        if self._kernel is not None:
            at, to = (array.__array_interface__["data"][0] for array in (source, out))
            self._kernel(at, to, blocks)
            return
        flat = out.view(np.uint8)
        width = 4 * layout.numel
        for at in range(0, blocks, _ORACLE_BLOCKS):
            some = source[at * layout.nbytes : (at + _ORACLE_BLOCKS) * layout.nbytes]
            with np.errstate(all="ignore"):
                made = layout.decoded(some.reshape(-1, layout.nbytes))
            flat[at * width :][: made.nbytes] = made.reshape(-1).view(np.uint8)


# --- kernels --------------------------------------------------------------------------------------


class BlockWriter:
    """Instructions for one block; operands are names of values.

    Attributes:
        one: for single values.
        wide: for `WIDTH` values.
        lines: the instructions, one each.
    """

    def __init__(self, native_half: bool) -> None:
        self._native_half = native_half
        self.lines: list[str] = []
        self.one, self.wide = self.of(1), self.of(WIDTH)
        self._stored = 0

    def of(self, width: int) -> Vector:
        """The same instructions, for so many values at once."""
        v = Vector(width, self._native_half)
        v.lines = self.lines
        return v

    def load(self, offset: int, count: int = 1, of: str = "i8") -> str:
        """Little-endian values from a byte of the block on."""
        place = self.one.emit(f"getelementptr i8, ptr %block, i64 {offset}")
        return self.one.emit(f"load {self.of(count).type(of)}, ptr {place}, align 1")

    def half(self, offset: int) -> str:
        """A float16 of the block, as float32."""
        bits = WIDEN["F16"](self.one, self.load(offset, of="i16"))
        return self.one.as_float(bits)

    def picked(self, a: str, b: str, of: str, count: int, order: Sequence[int]) -> str:
        """Elements of two vectors of ``count`` each, numbered through."""
        kind = f"<{count} x {of}>"
        listed = ", ".join(f"i32 {index}" for index in order)
        return self.one.emit(
            f"shufflevector {kind} {a}, {kind} {b}, <{len(order)} x i32> <{listed}>"
        )

    def joined(self, a: str, b: str, count: int, of: str = "i8") -> str:
        """Two vectors of ``count`` elements, one after the other."""
        return self.picked(a, b, of, count, range(2 * count))

    def shifted(self, x: str, shifts: Sequence[int], of: str = "i8") -> str:
        """Each element shifted right by its own number of bits."""
        v = self.of(len(shifts))
        listed = ", ".join(f"{of} {shift}" for shift in shifts)
        return v.emit(f"lshr {v.type(of)} {x}, <{listed}>")

    def halves(self, x: str, width: int) -> tuple[str, str]:
        """The low and the high four bits of bytes."""
        v = self.of(width)
        return v.op("and", "i8", x, 15), v.op("lshr", "i8", x, 4)

    def scaled(self, codes: str, d: str, width: int = 1) -> str:
        """Signed bytes times a single value, in float32."""
        v = self.of(width)
        return v.op(
            "fmul", "float", v.convert("sitofp", "i8", codes, "float"), splat(v, "float", d)
        )

    def spread(self, values: str, count: int, first: int, each: int) -> str:
        """`WIDTH` values of ``count``: from the first on, each of them ``each`` times."""
        order = [first + at // each for at in range(WIDTH)]
        return self.picked(values, values, "float", count, order)

    def chosen(self, codes: str, table: Sequence[int]) -> str:
        """`WIDTH` codes of 4 bits as the bytes that a table has for them."""
        v = self.wide
        values: list[str | float] = list(table)
        for bit in range(4):
            is_set = v.op("icmp ne", "i8", v.op("and", "i8", codes, 1 << bit), 0)
            pairs = zip(values[1::2], values[::2], strict=True)
            values = [v.select(is_set, "i8", *pair) for pair in pairs]
        return str(values[0])

    def store(self, x: str) -> None:
        """The next `WIDTH` float32 elements."""
        place = self.one.emit(f"getelementptr float, ptr %to, i64 {self._stored}")
        self.lines.append(f"store {self.wide.type('float')} {x}, ptr {place}, align 1")
        self._stored += WIDTH


def kernel_ir(layout: Blocks, *, native_half: bool, architecture: str) -> str:
    """LLVM IR of ``void decode_blocks(src, out, blocks)``: of any alignment, to float32."""
    b = BlockWriter(native_half)

    def block(at: str, carried: list[str]) -> list[str]:
        one = b.one
        offset = one.op("mul", "i64", at, layout.nbytes)
        b.lines.append(f"%block = getelementptr i8, ptr %src, i64 {offset}")
        element = one.op("mul", "i64", at, layout.numel)
        b.lines.append(f"%to = getelementptr float, ptr %out, i64 {element}")
        layout.instructions(b)
        return carried

    loop(b.one, "0", "%blocks", 1, [], block)
    parameters = "ptr noalias %src, ptr noalias %out, i64 %blocks"
    return kernel_text(FUNCTION.symbol, parameters, b.lines, architecture)


def compile_kernel(layout: Blocks) -> Kernel:
    """Return the kernel of a layout; see `HostFunction.kernel`."""
    return FUNCTION.kernel(layout, (layout.name, F32.name), partial(kernel_ir, layout))
