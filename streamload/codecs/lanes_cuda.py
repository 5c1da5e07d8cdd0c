"""Decoding of blocks by groups of a CUDA warp's lanes, from the instructions of the host.

Eight lanes decode one block: each vector of `WIDTH` elements in a layout's instructions is spread
over them, `EACH` elements a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from streamload.codecs.decode_blocks import WIDTH, BlockWriter
from streamload.codecs.ir import Vector
from streamload.codecs.ptx import WARP, ThreadWriter

#: Elements of a vector of `WIDTH` that one lane has.
EACH = 4
#: Lanes that decode a block.
GROUP = WIDTH // EACH


class _Spread(Vector):
    """Writes instructions on a lane's four elements of a vector that `GROUP` lanes share."""

    def convert(self, name: str, scalar: str, value: str, target: str) -> str:
        if (name, scalar, target) != ("sitofp", "i8", "float"):
            return super().convert(name, scalar, value, target)
        # the bits of 2^23 + n are those of 2^23 plus n: faster than a conversion
        bits = self.emit(f"bitcast {self.type('i8')} {value} to i32")
        bits = self.emit(f"xor i32 {bits}, {0x80808080}")
        found = "poison"
        for at in range(EACH):
            call = f"call i32 @llvm.nvvm.prmt(i32 {bits}, i32 {0x4B000000}, i32 {0x7540 | at})"
            one = self.emit(f"bitcast i32 {self.emit(call)} to float")
            found = self.emit(f"insertelement <4 x float> {found}, float {one}, i32 {at}")
        return super().op("fsub", "float", found, 2.0**23 + 128)

    def op(self, name: str, scalar: str, *operands: str | float) -> str:
        # four bytes are one register: LLVM would split them
        value, other = (*operands, "")[:2]
        is_known = name in ("and", "or", "xor")
        if name in ("add", "sub", "lshr", "shl"):
            is_known = isinstance(other, int)
        if scalar != "i8" or not is_known:
            return super().op(name, scalar, *operands)
        a = self.emit(f"bitcast {self.type('i8')} {value} to i32")
        if name in ("add", "sub"):  # no carry leaves a byte
            more = (int(other) if name == "add" else -int(other)) % 256 * 0x01010101
            low = self.emit(f"and i32 {a}, {0x7F7F7F7F}")
            total = self.emit(f"add i32 {low}, {more & 0x7F7F7F7F}")
            high = self.emit(f"and i32 {self.emit(f'xor i32 {a}, {more}')}, {0x80808080}")
            found = self.emit(f"xor i32 {total}, {high}")
        elif name in ("and", "or", "xor"):
            b = f"{int(other) * 0x01010101}" if not isinstance(other, str) else ""
            b = b or self.emit(f"bitcast {self.type('i8')} {other} to i32")
            found = self.emit(f"{name} i32 {a}, {b}")
        else:
            shift = int(other)
            mask = (0xFF >> shift if name == "lshr" else 0xFF << shift & 0xFF) * 0x01010101
            found = self.emit(f"and i32 {self.emit(f'{name} i32 {a}, {shift}')}, {mask}")
        return self.emit(f"bitcast i32 {found} to {self.type('i8')}")


#: Takes a lane group's next elements: the index of the first, and this lane's.
Put = Callable[[int, str], None]


class Lanes(BlockWriter):
    """Writes a layout's instructions for the eight lanes that share a block.

    Element e of a vector of n values, n at least 4, belongs to the lanes whose number in the group
    is ``e // 4`` modulo ``n / 4``, as their element ``e % 4``. `lane`: name of a lane's number in
    its group, i32.
    """

    def __init__(self, t: ThreadWriter, aligned: int, put: Put) -> None:
        """Write to ``t``; blocks begin at multiples of ``aligned`` bytes."""
        self._t = t
        super().__init__(native_half=True)
        self.lines = t.lines
        self.one, self.wide = t, self.of(WIDTH)
        self._aligned, self._put = aligned, put
        self.lane = "%sub"

    def of(self, width: int) -> Vector:
        """Return a writer of instructions on a lane's elements of vectors of ``width`` values."""
        if width == 1:
            return self._t
        v = _Spread(EACH, native_half=True)
        v.lines = self._t.lines
        return v

    def begin(self, block: str) -> None:
        """Continue with the block at address ``block``."""
        self.block, self._stored = block, 0

    def load(self, offset: int, count: int = 1, of: str = "i8") -> str:
        """Load a lane's part of ``count`` values from byte ``offset`` of the block."""
        t = self._t
        if count == 1:
            nbytes = int(of[1:]) // 8
            at = t.op("add", "i64", self.block, offset)
            return self._joined_load(at, offset, nbytes)
        at = t.op("add", "i64", self.block, offset)
        if count > EACH:
            lane = t.op("and", "i32", self.lane, count // EACH - 1)
            lane = t.convert("zext", "i32", lane, "i64")
            at = t.op("add", "i64", at, t.op("mul", "i64", lane, EACH))
        return t.emit(f"bitcast i32 {self._joined_load(at, offset, 4)} to <4 x i8>")

    def _joined_load(self, at: str, offset: int, nbytes: int) -> str:
        """Load an integer of ``nbytes`` from an address, in aligned pieces."""
        t = self._t
        piece = next(n for n in (4, 2, 1) if n <= nbytes and not (offset % n or self._aligned % n))
        found = ""
        for index in range(0, nbytes, piece):
            some = t.load(f"i{8 * piece}", piece, t.op("add", "i64", at, index))
            if piece == nbytes:
                return some
            some = t.emit(f"zext i{8 * piece} {some} to i{8 * nbytes}")
            if index:
                some = t.emit(f"shl i{8 * nbytes} {some}, {8 * index}")
            found = t.emit(f"or i{8 * nbytes} {found}, {some}") if found else some
        return found

    def _by_lane(self, numbers: Sequence[int]) -> str:
        """Write IR of the number of this lane, below 16: those of its group are given."""
        t = self._t
        if len(set(numbers)) == 1:
            return str(numbers[0])
        packed = sum(number << 4 * at for at, number in enumerate(numbers))
        shifted = t.emit(f"lshr i32 {packed}, {t.op('mul', 'i32', self.lane, 4)}")
        return t.op("and", "i32", shifted, 15)

    def _elements(self, x: str, of: str) -> list[str]:
        """Write IR of the four elements of a lane."""
        return [self._t.emit(f"extractelement <4 x {of}> {x}, i32 {at}") for at in range(EACH)]

    def _vector(self, elements: Sequence[str], of: str) -> str:
        """Write IR of the vector of a lane's four elements."""
        found = "poison"
        for at, each in enumerate(elements):
            found = self._t.emit(f"insertelement <4 x {of}> {found}, {of} {each}, i32 {at}")
        return found

    def picked(self, a: str, b: str, of: str, count: int, order: Sequence[int]) -> str:
        """Select elements of two vectors, from other lanes where they are there."""
        t = self._t
        if list(order) == list(range(2 * count)):  # joined: lanes of the upper half take b's
            upper = t.op("and", "i32", self.lane, count // EACH)
            is_upper = t.op("icmp ne", "i32", upper, 0)
            return t.emit(f"select i1 {is_upper}, <4 x {of}> {b}, <4 x {of}> {a}")
        sources = [
            [order[(EACH * lane + at) % len(order)] for lane in range(GROUP)] for at in range(EACH)
        ]
        if count == EACH:  # each lane has all of both
            elements = self._elements(a, of) + self._elements(b, of)
            return self._vector([self._selected(elements, each, of) for each in sources], of)
        assert a == b and of == "float"
        known: dict[tuple[int, ...], str] = {}
        for each in map(tuple, sources):
            if each not in known:
                known[each] = self._from_lanes(a, each)
        return self._vector([known[tuple(each)] for each in sources], of)

    def _selected(self, elements: Sequence[str], sources: Sequence[int], of: str) -> str:
        """Write IR of the element of this lane, where ``sources`` has those of the group's."""
        t, first = self._t, sources[0]
        found = elements[first]
        for other in sorted(set(sources) - {first}):
            mask = sum(1 << lane for lane, source in enumerate(sources) if source == other)
            bit = t.op("and", "i32", t.emit(f"lshr i32 {mask}, {self.lane}"), 1)
            is_other = t.op("icmp ne", "i32", bit, 0)
            found = t.emit(f"select i1 {is_other}, {of} {elements[other]}, {of} {found}")
        return found

    def _from_lanes(self, x: str, sources: Sequence[int]) -> str:
        """Write IR of a float32 that other lanes hold: element ``sources[lane]`` of ``x``."""
        t = self._t
        elements = self._elements(x, "float")
        from_lane = self._by_lane([source // EACH for source in sources])
        found: dict[int, str] = {}
        for at in sorted({source % EACH for source in sources}):
            bits = t.as_bits(elements[at])
            call = "call i32 @llvm.nvvm.shfl.sync.idx.i32"
            segment = (WARP - GROUP) << 8 | 31  # lanes are numbered within groups
            name = t.emit(f"{call}(i32 -1, i32 {bits}, i32 {from_lane}, i32 {segment})")
            found[at] = t.as_float(name)
        if len(found) == 1:
            return next(iter(found.values()))
        listed = [found.get(at, next(iter(found.values()))) for at in range(EACH)]
        return self._selected(listed, [source % EACH for source in sources], "float")

    def shifted(self, x: str, shifts: Sequence[int], of: str = "i8") -> str:
        """Shift element i of the whole vector right by ``shifts[i]`` bits."""
        out = []
        for at, each in enumerate(self._elements(x, of)):
            own = [shifts[(EACH * lane + at) % len(shifts)] for lane in range(GROUP)]
            shift = self._by_lane(own)
            if not shift.isdigit():
                narrow = "trunc" if int(of[1:]) < 32 else "bitcast"
                shift = self._t.emit(f"{narrow} i32 {shift} to {of}")
            out.append(self._t.emit(f"lshr {of} {each}, {shift}"))
        return self._vector(out, of)

    def flags(self, offset: int) -> str:
        """Load a lane's bits of the 32 from byte ``offset`` on."""
        t = self._t
        bits = self.load(offset, of="i32")
        bits = t.op("lshr", "i32", bits, t.op("mul", "i32", self.lane, EACH))
        each = (t.op("and", "i32", t.op("lshr", "i32", bits, at), 1) for at in range(EACH))
        return self._vector([t.op("icmp ne", "i32", one, 0) for one in each], "i1")

    def chosen(self, codes: str, table: Sequence[int]) -> str:
        """Look a lane's codes of 4 bits up in a table of 16 bytes, which two registers hold."""
        t = self._t
        halves = [
            sum((value & 255) << 8 * at for at, value in enumerate(table[half : half + 8]))
            for half in (0, 8)
        ]
        out = []
        for code in self._elements(codes, "i8"):
            wide = t.emit(f"zext i8 {code} to i64")
            is_high = t.emit(f"icmp ugt i8 {code}, 7")
            half = t.emit(f"select i1 {is_high}, i64 {halves[1]}, i64 {halves[0]}")
            shift = t.op("shl", "i64", t.op("and", "i64", wide, 7), 3)
            out.append(t.emit(f"trunc i64 {t.op('lshr', 'i64', half, shift)} to i8"))
        return self._vector(out, "i8")

    def store(self, x: str) -> None:
        """Give the lane's elements of the next `WIDTH` to the kernel."""
        self._put(self._stored, x)
        self._stored += WIDTH
