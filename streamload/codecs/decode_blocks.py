"""Decoding of blocks that hold their own scales: the kernel, oracle and decoder for GGUF.

A layout states the bytes of a block, and decodes it twice: in numpy (the oracle), and as LLVM
instructions. Both follow gguf-py 0.19 (`gguf.quants`) operation by operation in float32, so that
float32 elements are gguf-py's bit for bit, the payload of a NaN aside. Targets of 16 bits are cast
from these like any float32, and counted.

Scales that are NaN or infinite make elements NaN or infinite, as in gguf-py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_uint64, c_void_p
from functools import partial

import numpy as np

from streamload.codecs.cast_table import ZERO, Cast, CastCounts, OutOfRange, make_cast
from streamload.codecs.decode import check_lengths
from streamload.codecs.ir import WIDEN, Vector, chosen, kernel_text, loop, shuffle, splat
from streamload.codecs.llvm import Engine, HostFunction, Kernel, kernel_for
from streamload.codecs.parts import Array, Part, check_source
from streamload.codecs.scheme import Codec, Decoder, Quantized, Read
from streamload.codecs.weights import Packed, QuantizedWeight
from streamload.core.dtypes import BY_CODE, F32, PACKED, DType

FUNCTION = HostFunction("decode_blocks", (c_void_p, c_void_p, c_uint64))
WIDTH = 32  # elements of a vector; divides the elements of every block
_SCRATCH_NUMEL = 1 << 16  # float32 elements decoded before they are cast, in the CPU's cache
_ORACLE_BLOCKS = 1 << 8


class Blocks(Codec):
    """Blocks that hold their own scales; a subclass decodes those of one format.

    Attributes:
        dtype: the dtype of a block; from `PACKED` by default.
        numel: elements of a block.
        nbytes: bytes of a block.
    """

    of_linears = True

    def __init__(self, name: str, dtype: DType | None = None) -> None:
        self.name, self.kind, self.dtype = name, name, dtype or PACKED[name]
        self.numel, self.nbytes = self.dtype.block, self.dtype.nbytes(1)

    def of(self, shape: tuple[int, ...], src: DType) -> Quantized:
        """Return how blocks of the last axis are stored: in one array of bytes, as in GGUF."""
        check_source(self.name, shape, src)
        if not shape or shape[-1] % self.numel:
            raise ValueError(
                f"{self.name} has blocks of {self.numel} elements along the last axis, "
                f"which does not divide shape {shape}"
            )
        part = Part("", BY_CODE["U8"], (*shape[:-1], self.dtype.nbytes(shape[-1])))
        return Quantized(self, shape, src, (part,), self.numel, self.nbytes)

    @abstractmethod
    def decoded(self, blocks: Array) -> Array:
        """Decode in numpy: bytes, one block a row, to float32 elements, one block a row."""

    @abstractmethod
    def instructions(self, b: BlockWriter) -> None:
        """Write IR that decodes a block and stores all elements in order (`BlockWriter.store`)."""

    def decoder(
        self, info: Packed, dst: DType, read: Read, engine: Engine, out_of_range: OutOfRange
    ) -> BlockDecoder:
        """Return the decoder of a weight; see `decode.decoder_of`."""
        kernel = kernel_for(engine, lambda: compile_kernel(self))

        def floats(source: Array, out: Array, first: int) -> None:
            self._floats(kernel, source, out)

        size = self.numel, self.nbytes
        return BlockDecoder(self.name, size, dst, floats, engine, out_of_range, alike=True)

    def _floats(self, kernel: Kernel | None, source: Array, out: Array) -> None:
        blocks = source.size // self.nbytes
        if kernel is not None:
            at, to = (array.__array_interface__["data"][0] for array in (source, out))
            kernel(at, to, blocks)
            return
        flat, width = out.view(np.uint8), 4 * self.numel
        for at in range(0, blocks, _ORACLE_BLOCKS):
            some = source[at * self.nbytes : (at + _ORACLE_BLOCKS) * self.nbytes]
            with np.errstate(all="ignore"):
                made = self.decoded(some.reshape(-1, self.nbytes))
            flat[at * width :][: made.nbytes] = made.reshape(-1).view(np.uint8)

    def compile(self, weight: QuantizedWeight, dst: DType, *, clamp: bool) -> Kernel:
        """Compile the kernel that decodes blocks; see `Codec.compile`."""
        return compile_kernel(self)


class BlockDecoder(Decoder):
    """Decodes blocks to float32 elements, and casts these if the target is another dtype.

    Args:
        name: of the blocks, for errors.
        size: elements and bytes of a block.
        floats: decodes the bytes of whole blocks to float32 elements; the third argument is the
            number of the first block in its weight.
        alike: whether blocks decode alike wherever they are in their weight.
    """

    def __init__(
        self,
        name: str,
        size: tuple[int, int],
        dst: DType,
        floats: Callable[[Array, Array, int], None],
        engine: Engine,
        out_of_range: OutOfRange,
        *,
        alike: bool,
    ) -> None:
        self._name, self._dst, self._floats, self._alike = name, dst, floats, alike
        self._numel, self._nbytes = size
        self._cast: Cast | None = None
        if dst is not F32:
            self._cast = make_cast(F32, dst, engine=engine, out_of_range=out_of_range)

    def decode(
        self, data: memoryview, out: memoryview, first: int, lines: int = 1, pitch: int = 0
    ) -> CastCounts:
        """Decode the blocks of lines; see `Decoder.decode`."""
        numel, odd = divmod(out.nbytes, self._dst.itemsize * lines)
        skipped = first % self._numel
        nbytes = -(-(skipped + numel) // self._numel) * self._nbytes
        is_cut = lines > 1 and (skipped or numel % self._numel or pitch % self._numel)
        fits = not odd and data.nbytes == nbytes * lines and not is_cut
        check_lengths(self._name, data, out, self._dst, first, lines, fits)
        counts, source = ZERO, np.frombuffer(data, np.uint8)
        at_once = lines if self._alike else 1
        step, width = nbytes * at_once, numel * self._dst.itemsize * at_once
        for at in range(lines // at_once):
            to = out[at * width : (at + 1) * width]
            counts += self._line(source[at * step : (at + 1) * step], to, first + at * pitch)
        return counts

    def _line(self, source: Array, out: memoryview, first: int) -> CastCounts:
        """Decode consecutive elements from element ``first`` of the weight on."""
        block, skipped = divmod(first, self._numel)
        n = self._dst.itemsize
        numel = out.nbytes // n
        if self._cast is None and not (skipped or numel % self._numel):
            self._floats(source, np.frombuffer(out, np.float32), block)
            return ZERO
        step = min(_SCRATCH_NUMEL // self._numel, source.size // self._nbytes)
        scratch = np.empty(step * self._numel, np.float32)
        counts, done = ZERO, 0
        for at in range(0, source.size, step * self._nbytes):
            some = source[at : at + step * self._nbytes]
            blocks = some.size // self._nbytes
            made = scratch[: blocks * self._numel]
            self._floats(some, made, block)
            wanted = made[skipped:][: numel - done]  # the outer blocks may be cut
            to = out[done * n : (done + wanted.size) * n]
            if self._cast is None:
                np.frombuffer(to, np.uint8)[:] = wanted.view(np.uint8)
            else:
                counts += self._cast(memoryview(wanted.data).cast("B"), to)
            done, skipped, block = done + wanted.size, 0, block + blocks
        return counts


# --- kernels --------------------------------------------------------------------------------------


class BlockWriter:
    """Collects the IR that decodes one block; arguments and results are names of IR values."""

    def __init__(self, native_half: bool, lanes: int = 0) -> None:
        self._native_half, self._lanes = native_half, lanes
        self.block = "%block"
        self.lines: list[str] = []
        self.one, self.wide = self.of(1), self.of(WIDTH)
        self._stored = 0

    def of(self, width: int) -> Vector:
        """Return a writer of instructions on vectors of ``width`` values, which adds to `lines`."""
        v = Vector(width, self._native_half, self._lanes)
        v.lines = self.lines
        return v

    def load(self, offset: int, count: int = 1, of: str = "i8") -> str:
        """Load ``count`` little-endian values of type ``of`` from byte ``offset`` of the block."""
        place = self.one.emit(f"getelementptr i8, ptr {self.block}, i64 {offset}")
        return self.one.emit(f"load {self.of(count).type(of)}, ptr {place}, align 1")

    def half(self, offset: int) -> str:
        """Load the float16 at byte ``offset`` of the block, as float32."""
        bits = WIDEN["F16"](self.one, self.load(offset, of="i16"))
        return self.one.as_float(bits)

    def picked(self, a: str, b: str, of: str, count: int, order: Sequence[int]) -> str:
        """Select elements of two vectors of ``count`` values; ``order``: indices, b's after a's."""
        return shuffle(self.one, f"<{count} x {of}>", a, b, order)

    def joined(self, a: str, b: str, count: int, of: str = "i8") -> str:
        """Concatenate two vectors of ``count`` values each."""
        return self.picked(a, b, of, count, range(2 * count))

    def shifted(self, x: str, shifts: Sequence[int], of: str = "i8") -> str:
        """Shift element i of ``x`` right by ``shifts[i]`` bits."""
        v = self.of(len(shifts))
        listed = ", ".join(f"{of} {shift}" for shift in shifts)
        return v.emit(f"lshr {v.type(of)} {x}, <{listed}>")

    def halves(self, x: str, width: int) -> tuple[str, str]:
        """Return the low and the high four bits of ``width`` bytes."""
        v = self.of(width)
        return v.op("and", "i8", x, 15), v.op("lshr", "i8", x, 4)

    def scaled(self, codes: str, d: str, width: int = 1) -> str:
        """Multiply ``width`` signed bytes by the single float ``d``, in float32."""
        v = self.of(width)
        wide = v.convert("sitofp", "i8", codes, "float")
        return v.op("fmul", "float", wide, splat(v, "float", d))

    def spread(self, values: str, count: int, first: int, each: int) -> str:
        """Return a vector of `WIDTH` floats: ``values`` from ``first`` on, each ``each`` times."""
        order = [first + at // each for at in range(WIDTH)]
        return self.picked(values, values, "float", count, order)

    def flags(self, offset: int) -> str:
        """Load `WIDTH` bits from byte ``offset`` on, the lowest bit first, as i1 values."""
        return self.wide.emit(
            f"bitcast i32 {self.load(offset, of='i32')} to {self.wide.type('i1')}"
        )

    def chosen(self, codes: str, table: Sequence[int]) -> str:
        """Look `WIDTH` codes of 4 bits up in a table of 16 bytes."""
        v = self.wide
        bits = (v.op("icmp ne", "i8", v.op("and", "i8", codes, 1 << n), 0) for n in range(4))
        return str(chosen(v, "i8", bits, table))

    def store(self, x: str) -> None:
        """Store the block's next `WIDTH` float32 elements."""
        place = self.one.emit(f"getelementptr float, ptr %to, i64 {self._stored}")
        self.lines.append(f"store {self.wide.type('float')} {x}, ptr {place}, align 1")
        self._stored += WIDTH


def kernel_ir(layout: Blocks, *, native_half: bool, architecture: str) -> str:
    """Return LLVM IR of ``void decode_blocks(src, out, blocks)``, which writes float32 elements."""
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
    """Return the compiled kernel that decodes blocks; see `kernel_ir`, `HostFunction.kernel`."""
    return FUNCTION.kernel(layout, (layout.name, F32.name), partial(kernel_ir, layout))
