"""Functions that cast bytes from one dtype to another, by kernel or numpy.

Floating-point dtypes of 16 bits and more cast to each other, and two 8-bit ones to those; nothing
narrows to 8 bits. Every other dtype is only copied.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from streamload.codecs.cast import compile_kernel
from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.floats import FLOATS, PAIRS
from streamload.codecs.llvm import Engine, kernel_for
from streamload.core.dtypes import DType
from streamload.errors import UnsupportedCastError

OutOfRange = Literal["inf", "clamp", "error"]

_SUPPORTED = frozenset(PAIRS)
_Tally = ctypes.c_uint64 * 3


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Counts of the elements whose value a cast changed; NaN and infinity are never counted.

    Attributes:
        overflowed: finite values beyond the largest finite one of the target, clamped or not.
        flushed: values that are not zero and became zero.
        rounded: values that changed in any other way.
    """

    overflowed: int = 0
    flushed: int = 0
    rounded: int = 0

    @classmethod
    def of(cls, overflowed: int, flushed: int, changed: int) -> CastCounts:
        """Return the counts of a kernel's tally, in which ``changed`` has the others, too."""
        return cls(overflowed, flushed, changed - overflowed - flushed)

    @property
    def total(self) -> int:
        """All elements whose value changed."""
        return self.overflowed + self.flushed + self.rounded

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(
            self.overflowed + other.overflowed,
            self.flushed + other.flushed,
            self.rounded + other.rounded,
        )


#: the counts of a cast that kept every value.
ZERO = CastCounts()

#: ``(source bytes, out bytes)`` to counts. Both are C-contiguous and hold the same number of whole
#: elements, at any address; they do not overlap, and the source may be read-only. Lengths that do
#: not match raise ValueError before anything is written.
Cast = Callable[[memoryview, memoryview], CastCounts]


def supported(src: DType, dst: DType) -> bool:
    """Whether `make_cast` has a cast from ``src`` to ``dst``; any dtype can be copied to itself."""
    return src == dst or (src, dst) in _SUPPORTED


def make_cast(
    src: DType, dst: DType, *, engine: Engine = "auto", out_of_range: OutOfRange = "inf"
) -> Cast:
    """Return the function that casts ``src`` to ``dst``: to nearest, ties to even, rounded once.

    NaN stays NaN, infinities stay, and subnormals are right on both sides; bytes are little-endian.
    "llvm" and "numpy" give the same bits, the payload of a NaN aside. "error" computes as "inf"
    does: the caller knows the tensor, and raises if ``overflowed``.

    Any threads may call the result at once, with source bytes and target memory. Copies and kernels
    drop the GIL and allocate nothing; "numpy" takes a few MB. Raises ValueError for other names.
    """
    if out_of_range not in get_args(OutOfRange):
        raise ValueError(f"out_of_range is one of {get_args(OutOfRange)}, not {out_of_range!r}")
    clamp = out_of_range == "clamp"
    found = cast_engine(src, dst, engine, clamp=clamp)
    if found == "copy":
        return _copy
    kernel = compile_kernel(src, dst, clamp=clamp) if found == "llvm" else None

    def cast(data: memoryview, out: memoryview) -> CastCounts:
        numel = _checked_numel(data, src.itemsize, out, dst.itemsize)
        if numel == 0:
            return ZERO
        if kernel is None:
            return CastCounts(*cast_bytes(src, dst, data, out, clamp=clamp))
        # the exports keep both memories in place until the call is over
        source, target = np.frombuffer(data, np.uint8), ctypes.c_char.from_buffer(out)
        tally = _Tally()
        address = source.__array_interface__["data"][0]
        kernel(address, ctypes.addressof(target), numel, tally)
        return CastCounts.of(*tally)

    return cast


def cast_engine(
    src: DType, dst: DType, engine: Engine = "auto", *, clamp: bool = False
) -> Literal["copy", "llvm", "numpy"]:
    """Return the engine of `make_cast`, whose kernel is compiled; raises as `make_cast`."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine is one of {get_args(Engine)}, not {engine!r}")
    if src == dst:
        return "copy"
    if not supported(src, dst):
        raise UnsupportedCastError(src.name, dst.name, reason=_why_not(src, dst))
    if sys.byteorder != "little":
        reason = "checkpoints are little-endian and this CPU is not"
        raise UnsupportedCastError(src.name, dst.name, reason=reason)
    kernel = kernel_for(engine, lambda: compile_kernel(src, dst, clamp=clamp))
    return "numpy" if kernel is None else "llvm"


def _why_not(src: DType, dst: DType) -> str:
    if src.code not in FLOATS:
        return f"{src.name} is only passed unchanged"
    targets = sorted({target.name for source, target in PAIRS if source == src})
    return f"{src.name} goes to {', '.join(targets)}"


def _copy(data: memoryview, out: memoryview) -> CastCounts:
    nbytes = _checked_numel(data, 1, out, 1)
    if nbytes:
        np.frombuffer(out, np.uint8)[:] = np.frombuffer(data, np.uint8)  # drops the GIL
    return ZERO


def _checked_numel(data: memoryview, src_nbytes: int, out: memoryview, dst_nbytes: int) -> int:
    numel, rest = divmod(data.nbytes, src_nbytes)
    if rest or out.nbytes != numel * dst_nbytes:
        raise ValueError(
            f"{data.nbytes} bytes of elements of {src_nbytes} bytes do not become "
            f"{out.nbytes} bytes of elements of {dst_nbytes} bytes"
        )
    if out.readonly or not (out.c_contiguous and data.c_contiguous):
        raise ValueError("a cast reads contiguous bytes and writes contiguous, writable ones")
    return numel
