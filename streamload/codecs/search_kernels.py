"""LLVM IR of the searches of `search`, for many groups at once: a group in each lane of a vector.

Each lane does the operations of `search` in their order, so that results are the same bits. A
kernel copies the elements and weights of its groups to the stack, where they stay in the cache,
and passes over them once or twice for each range that it tries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_uint64, c_void_p
from functools import partial

import numpy as np

from streamload.codecs.ir import Vector, kernel_text, loop, magnitude_bits, maximum, minimum, splat
from streamload.codecs.llvm import HostFunction, Kernel
from streamload.codecs.parts import Array
from streamload.codecs.search import LEAST, ROUNDER, Fits, Search

FUNCTION = HostFunction("search", (*4 * (c_void_p,), *3 * (c_uint64,)))
_LANES = 16
_MOST_ROWS = 32  # elements of a group
_UNROLLED = 8  # elements of an iteration; divides those of a group


def searched(kernel: Kernel | None, search: Search, x: Array, weights: Array) -> Fits:
    """Return the fits of groups by a kernel of `compile_search`, or by numpy if there is none."""
    if kernel is None:
        return search(x, weights)
    rows, groups = x.shape
    short = -groups % _LANES
    if short:
        x, weights = (np.pad(each, ((0, 0), (0, short))) for each in (x, weights))
    found = np.empty((4, groups + short), np.float32)
    ranges = np.array((search.most, *search.ranges), np.float32)
    places = (a.__array_interface__["data"][0] for a in (x, weights, found, ranges))
    kernel(*places, rows, groups + short, len(ranges))
    return Fits(*found[:, :groups])


def compile_search(search: Search, name: str) -> Kernel:
    """Return the compiled kernel for ``search``, of scheme ``name``; see `HostFunction.kernel`."""
    return FUNCTION.kernel(search.is_affine, ("float32", name), partial(search_ir, search))


def search_ir(search: Search, *, native_half: bool, architecture: str) -> str:
    """Return IR of ``void search(x, weights, out, ranges, rows, groups, count)``.

    ``x`` and ``weights`` have ``rows`` rows of float32 with a group in each of ``groups`` columns,
    a multiple of 16. ``ranges`` are `Search.most` and `Search.ranges`, ``count`` in all. ``out``
    receives a row of ``groups`` for each field of `Fits`.
    """
    parameters = "ptr %x, ptr %w, ptr %out, ptr %ranges, i64 %rows, i64 %groups, i64 %count"
    lines = _Writer(search.is_affine, native_half).text()
    return kernel_text(FUNCTION.symbol, parameters, lines, architecture)


class _Writer:
    """Writes the kernel of the affine or of the symmetric search."""

    def __init__(self, is_affine: bool, native_half: bool) -> None:
        self.is_affine = is_affine
        self.v, self.one = Vector(_LANES, native_half), Vector(1, native_half)
        self.one.lines = self.v.lines
        self.of = self.v.type("float")
        self.least = self.greatest = ""  # bits of `ROUNDER` plus the least and the largest code

    def text(self) -> list[str]:
        """Return the instructions of the kernel's body."""
        v, one = self.v, self.one
        for name in ("xs", "ws", "codes"):
            v.lines.append(f"%{name} = alloca [{_MOST_ROWS} x {self.of}], align 64")
        most = one.emit("load float, ptr %ranges")
        ends = (
            one.as_bits(one.op("fadd", "float", float(ROUNDER), end))
            for end in (0.0 if self.is_affine else one.emit(f"fneg float {most}"), most)
        )
        least, top = (splat(v, "i32", end) for end in ends)
        self.least, self.greatest = least, top if self.is_affine else v.op("sub", "i32", top, 1)
        self.most = splat(v, "float", most)
        find = self._affine if self.is_affine else self._symmetric
        loop(one, "0", "%groups", _LANES, [], partial(self._groups, find))
        return v.lines

    def _groups(
        self, find: Callable[[], Sequence[str]], first: str, carried: list[str]
    ) -> Sequence[str]:
        """Write IR that copies the groups from ``first`` on, searches, and stores their fits."""
        self.first = first
        for row, value in enumerate(find()):
            at = self.one.op("mul", "i64", "%groups", row)
            self._store("%out", self.one.op("add", "i64", at, first), value, "float", 4)
        return []

    def _load(self, place: str, at: str, scalar: str, align: int) -> str:
        place = self.v.emit(f"getelementptr {scalar}, ptr {place}, i64 {at}")
        return self.v.emit(f"load {self.of}, ptr {place}, align {align}")

    def _store(self, place: str, at: str, value: str, scalar: str, align: int) -> None:
        place = self.v.emit(f"getelementptr {scalar}, ptr {place}, i64 {at}")
        self.v.lines.append(f"store {self.of} {value}, ptr {place}, align {align}")

    def _over(
        self,
        carried: Sequence[str | float],
        body: Callable[[str, str, str, list[str]], Sequence[str]],
        *,
        copies: bool = False,
    ) -> list[str]:
        """Write ``body`` for each row: its index, elements, weights and the carried floats.

        ``copies``: rows are read from the kernel's arguments, and copied to the stack.
        """

        def rows(start: str, values: list[str]) -> list[str]:
            for index in range(_UNROLLED):
                at = self.one.op("add", "i64", start, index)
                if copies:
                    row = self.one.op("mul", "i64", at, "%groups")
                    row = self.one.op("add", "i64", row, self.first)
                    x, w = (self._load(name, row, "float", 4) for name in ("%x", "%w"))
                    for name, value in (("%xs", x), ("%ws", w)):
                        self._store(name, at, value, self.of, 64)
                else:
                    x, w = (self._load(name, at, self.of, 64) for name in ("%xs", "%ws"))
                values = list(body(at, x, w, values))
            return values

        firsts = [(self.of, self.v.operand("float", value)) for value in carried]
        return loop(self.one, "0", "%rows", _UNROLLED, firsts, rows)

    def _ranges(
        self,
        carried: Sequence[str | float],
        body: Callable[[str, str, list[str]], Sequence[str]],
    ) -> list[str]:
        """Write ``body`` for each range: its index from 1 on, its value, and carried floats."""

        def one(index: str, values: list[str]) -> Sequence[str]:
            place = self.one.emit(f"getelementptr float, ptr %ranges, i64 {index}")
            tried = splat(self.v, "float", self.one.emit(f"load float, ptr {place}"))
            return body(index, tried, values)

        firsts = [(self.of, self.v.operand("float", value)) for value in carried]
        return loop(self.one, "1", "%count", 1, firsts, one)

    def _do(self, name: str, *operands: str | float) -> str:
        return self.v.op(name, "float", *operands)

    def _sum(self, total: str, *factors: str) -> str:
        """Write IR that adds the product of ``factors``, from the left, to ``total``."""
        product = factors[0]
        for factor in factors[1:]:
            product = self._do("fmul", product, factor)
        return self._do("fadd", total, product)

    def _chosen(self, mask: str, pairs: Sequence[tuple[str | float, str | float]]) -> list[str]:
        return [self.v.select(mask, "float", *pair) for pair in pairs]

    def _codes(self, x: str) -> str:
        """Write IR of the codes nearest to ``x``, clipped, as float32; see `search.nearest`."""
        v = self.v
        bits = v.as_bits(self._do("fadd", x, float(ROUNDER)))
        # other float32 values than those around `ROUNDER` count by their low bits, too
        bits = v.op("or", "i32", v.op("and", "i32", bits, 0x7FFFFF), 0x4B000000)
        bits = minimum(v, "i32", maximum(v, "i32", bits, self.least), self.greatest)
        return self._do("fsub", v.as_float(bits), float(ROUNDER))

    def _affine(self) -> Sequence[str]:
        v = self.v
        x0 = self._load("%x", self.first, "float", 4)

        def measure(at: str, x: str, w: str, carried: list[str]) -> Sequence[str]:
            low, high, sum_w, sum_x = carried
            (low,) = self._chosen(self._do("fcmp olt", x, low), [(x, low)])
            (high,) = self._chosen(self._do("fcmp ogt", x, high), [(x, high)])
            return low, high, self._sum(sum_w, w), self._sum(sum_x, w, x)

        low, high, sum_w, sum_x = self._over((x0, x0, 0.0, 0.0), measure, copies=True)
        (least,) = self._chosen(self._do("fcmp ogt", low, 0.0), [(0.0, low)])
        is_flat = self._do("fcmp oeq", high, least)

        def error_of(codes_of: Callable[[str, str], str], scale: str, low: str) -> str:
            def add(at: str, x: str, w: str, carried: list[str]) -> Sequence[str]:
                value = self._do("fadd", self._do("fmul", scale, codes_of(at, x)), low)
                difference = self._do("fsub", value, x)
                square = self._do("fmul", difference, difference)
                return (self._sum(carried[0], w, square),)

            return self._over((0.0,), add)[0]

        def near(x: str, slope: str, low: str) -> str:
            return self._codes(self._do("fmul", slope, self._do("fsub", x, low)))

        slope = self._do("fdiv", self.most, self._do("fsub", high, least))
        scale = self._do("fdiv", 1.0, slope)
        error = error_of(lambda at, x: near(x, slope, least), scale, least)

        def attempt(index: str, tried: str, best: list[str]) -> Sequence[str]:
            error, _, _, low, _ = best
            steps = self._do("fdiv", tried, self._do("fsub", high, low))

            def fit(at: str, x: str, w: str, sums: list[str]) -> Sequence[str]:
                codes = near(x, steps, low)
                self._store("%codes", at, codes, self.of, 64)
                weighted = self._do("fmul", w, codes)
                factors = (weighted,), (weighted, codes), (weighted, x)
                return [self._sum(t, *f) for t, f in zip(sums, factors, strict=True)]

            sum_l, sum_l2, sum_xl = self._over((0.0, 0.0, 0.0), fit)

            def crossed(a: str, b: str, c: str, d: str) -> str:
                return self._do("fsub", self._do("fmul", a, b), self._do("fmul", c, d))

            determinant = crossed(sum_w, sum_l2, sum_l, sum_l)
            scale = self._do("fdiv", crossed(sum_w, sum_xl, sum_x, sum_l), determinant)
            below = self._do("fdiv", crossed(sum_l2, sum_x, sum_l, sum_xl), determinant)
            through_zero = self._do("fdiv", sum_xl, sum_l2)
            is_above = self._do("fcmp ogt", below, 0.0)
            scale, below = self._chosen(is_above, [(through_zero, scale), (0.0, below)])
            found = error_of(lambda at, x: self._load("%codes", at, self.of, 64), scale, below)
            masks = self._do("fcmp ogt", determinant, 0.0), self._do("fcmp olt", found, error)
            new = found, scale, steps, below, low
            return self._chosen(v.op("and", "i1", *masks), list(zip(new, best, strict=True)))

        _, scale, slope, low, offset = self._ranges((error, scale, slope, least, least), attempt)
        flat = self._chosen(is_flat, [(0.0, scale), (0.0, slope), (least, low)])
        return *flat, offset

    def _symmetric(self) -> Sequence[str]:
        v = self.v

        def measure(at: str, x: str, w: str, carried: list[str]) -> Sequence[str]:
            masks = [magnitude_bits(v, value) for value in (x, carried[0])]
            return self._chosen(v.op("icmp ugt", "i32", *masks), [(x, carried[0])])

        (peak,) = self._over((0.0,), measure, copies=True)

        def attempt(index: str, tried: str, best: list[str]) -> Sequence[str]:
            steps = self._do("fdiv", tried, peak)

            def fit(at: str, x: str, w: str, sums: list[str]) -> Sequence[str]:
                codes = self._codes(self._do("fmul", steps, x))
                return self._sum(sums[0], w, x, codes), self._sum(sums[1], w, codes, codes)

            sum_xl, sum_l2 = self._over((0.0, 0.0), fit)
            is_zero = self._do("fcmp oeq", sum_l2, 0.0)
            (scale,) = self._chosen(is_zero, [(0.0, self._do("fdiv", sum_xl, sum_l2))])
            reached = self._do("fmul", sum_xl, sum_xl), self._do("fmul", best[2], sum_l2)
            better = self._do("fcmp ogt", *reached)
            better = v.op("and", "i1", better, self._do("fcmp ogt", sum_l2, 0.0))
            is_first = self.one.op("icmp eq", "i64", index, 1)
            better = v.op("or", "i1", better, splat(v, "i1", is_first))
            new = scale, steps, self._do("fmul", scale, sum_xl)
            return self._chosen(better, list(zip(new, best, strict=True)))

        scale, slope, _ = self._ranges((0.0, 0.0, 0.0), attempt)
        length = v.as_float(magnitude_bits(v, peak))
        is_zero = self._do("fcmp olt", length, float(LEAST))
        found = self._chosen(is_zero, [(0.0, scale), (0.0, slope)])
        zero = v.operand("float", 0.0)
        return *found, zero, zero
