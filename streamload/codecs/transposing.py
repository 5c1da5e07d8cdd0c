"""A kernel that transposes matrices of short elements, in blocks that lie in registers.

A block of 8 lines of 8 elements becomes its transpose by three rounds that interleave the lines of
its first half with those of its second half: each round turns the bits of an element's number, of
line and column, by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_size_t, c_void_p
from functools import cache
from typing import Any

import numpy as np

from streamload.codecs.cast import Vector
from streamload.codecs.kernels import kept_object, loop
from streamload.codecs.llvm import link_kernel

_SYMBOL = "transpose"
_BLOCK = 8  # lines, and columns
_LINE_NBYTES = 64  # of a line, read at once: what the CPU's cache has at least
_ITEMSIZES = (1, 2, 4, 8)

_KERNEL = """
define void @{symbol}(
    ptr %src, ptr %out, i64 %lines, i64 %columns, i64 %src.pitch, i64 %out.pitch
) nounwind {{
entry:
  {body}
  ret void
}}
"""
_KERNEL_TYPE = CFUNCTYPE(None, c_void_p, c_void_p, *4 * [c_size_t])
_compiling = threading.Lock()


def transpose(found: np.ndarray[Any, Any], to: np.ndarray[Any, Any]) -> bool:
    """``to[...] = found``, of matrices of one dtype, where ``to`` lies as the transpose.

    Returns:
        False where it lies otherwise, or there is no kernel for it: nothing is written then.
    """
    n = to.itemsize
    if n not in _ITEMSIZES or not to.strides[0] == n == found.strides[1]:
        return False
    with _compiling:
        kernel = _compile(n)
    if not callable(kernel):
        return False
    lines, columns = (of // step * step for of, step in zip(to.shape, _steps(n), strict=True))
    at, out = (array.__array_interface__["data"][0] for array in (found, to))
    kernel(at, out, lines, columns, found.strides[0], to.strides[1])
    to[lines:] = found[lines:]
    to[:lines, columns:] = found[:lines, columns:]
    return True


def _steps(itemsize: int) -> tuple[int, int]:
    """The kernel takes multiples of so many lines and columns."""
    return _BLOCK, _LINE_NBYTES // itemsize


@cache
def _compile(itemsize: int) -> Callable[..., None] | str:
    """The kernel for this CPU, or why there is none."""
    text = _kernel_ir(itemsize)
    found: Callable[..., None] | str = link_kernel(
        lambda native_half, architecture: text, _SYMBOL, _KERNEL_TYPE, kept_object
    )
    return found


def _kernel_ir(itemsize: int) -> str:
    """LLVM IR of ``void transpose(src, out, lines, columns, source pitch, output pitch)``.

    Pitches are bytes from one line's beginning to the next one's. A step takes what lies together
    of 8 lines, and goes down the lines: so it writes a few columns one element after the other.
    """
    v, item = Vector(1, False), f"i{8 * itemsize}"
    line_step, column_step = _steps(itemsize)

    def place(start: str, pitch: str, line: str, offset: int, element: str) -> str:
        number = v.op("add", "i64", line, offset)
        begin = v.op("mul", "i64", number, pitch)
        line_start = v.emit(f"getelementptr i8, ptr {start}, i64 {begin}")
        return v.emit(f"getelementptr {item}, ptr {line_start}, i64 {element}")

    def step(column: str, line: str) -> None:
        starts = [place("%src", "%src.pitch", line, i, column) for i in range(_BLOCK)]
        of = f"<{_BLOCK} x {item}>"
        for first in range(0, column_step, _BLOCK):
            rows = []
            for start in starts:
                at = v.emit(f"getelementptr {item}, ptr {start}, i64 {first}")
                rows.append(v.emit(f"load {of}, ptr {at}, align 1"))
            for i, row in enumerate(_transposed(v, of, rows), first):
                at = place("%out", "%out.pitch", column, i, line)
                v.lines.append(f"store {of} {row}, ptr {at}, align 1")

    def down(column: str, _: list[str]) -> Sequence[str]:
        def body(line: str, _: list[str]) -> Sequence[str]:
            step(column, line)
            return ()

        return loop(v, "0", "%lines", line_step, (), body)

    loop(v, "0", "%columns", column_step, (), down)
    return _KERNEL.format(symbol=_SYMBOL, body="\n  ".join(v.lines))


def _transposed(v: Vector, of: str, rows: list[str]) -> list[str]:
    half = _BLOCK // 2
    masks = [
        ", ".join(f"i32 {i}, i32 {i + _BLOCK}" for i in range(start, start + half))
        for start in (0, half)
    ]
    for _ in range(_BLOCK.bit_length() - 1):
        rows = [
            v.emit(f"shufflevector {of} {a}, {of} {b}, <{_BLOCK} x i32> <{mask}>")
            for a, b in zip(rows[:half], rows[half:], strict=True)
            for mask in masks
        ]
    return rows
