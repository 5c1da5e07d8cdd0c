"""Random quantised matrices for products, in every form that kernels read."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamload.codecs.decode_blocks import Blocks
from streamload.codecs.decode_kernels import Values
from streamload.codecs.product import JOB, Form, Formed
from streamload.codecs.scheme import codec_of
from streamload.codecs.schemes.bitsandbytes import VALUES
from streamload.codecs.schemes.bitsandbytes_nested import dynamic_map

Array = np.ndarray[Any, np.dtype[Any]]
#: Offsets of the float16 scales in a block.
_HALVES = {
    **dict.fromkeys(("q8_0", "q4_0", "q5_0", "iq4_nl", "iq4_xs"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "gguf-mxfp4": ()},
}
#: Layouts without a scheme, and their forms.
_DETAILS = (
    *(("fp8", "F8_E4M3:F32:2:128"), ("fp8", "F8_E5M2:F32:0:0")),
    *(("fp8", "F8_E4M3:F8_E8M0:4:256"), ("fp8", "F8_E5M2:U8:1:32"), ("mxfp4", "")),
)
_ALL_ROWS = 2**31 - 1


def forms() -> Iterator[tuple[str, Form]]:
    """Name and form of the formats that modules hold, and of all blocks."""
    schemes = ((name, "") for name in ("int8", "bitsandbytes-int8", "nf4", "nf4-nested", "fp4"))
    for name, detail in (*schemes, *_DETAILS):
        codec = codec_of(name)
        assert isinstance(codec, Formed), name
        yield f"{name}:{detail}" if detail else name, codec.form(detail)
    for name in _HALVES:
        layout = codec_of(name)
        assert isinstance(layout, Blocks)
        yield name, Form(layout)


FORMS = dict(forms())


@dataclass
class Matrix:
    """A quantised matrix: its arrays by their roles, and its elements in float64."""

    form: Form
    arrays: Mapping[str, Array]
    exact: Array
    offset: float = 0.0

    def fields(self, **others: int) -> dict[str, int]:
        rows, width = self.exact.shape
        tall = self.form.tall or _ALL_ROWS
        found = {"stop": rows, "width": width, "tall": tall, "pitch": rows, "claim": 4}
        found["per.row"] = self.form.per_row(width)
        return found | {"offset": bits(self.offset), "factor": bits(self.form.factor)} | others


def bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


def matrix(form: Form, rows: int, width: int, seed: int = 0, *, finite: bool = True) -> Matrix:
    """A random matrix; with ``finite=False`` a scale is infinite and another one NaN."""
    random = np.random.default_rng(seed)
    if isinstance(form.codes, Blocks):
        layout = form.codes
        blocks = random.integers(0, 256, (rows * width // layout.numel, layout.nbytes), np.uint8)
        for offset in _HALVES[layout.name]:
            scales = (random.standard_normal(len(blocks)) * 0.01).astype(np.float16)
            if not finite:
                scales[:2] = np.inf, np.nan
            blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
        if layout.name == "gguf-mxfp4":
            blocks[:, 0] = random.integers(110, 130, len(blocks))
        with np.errstate(invalid="ignore", over="ignore"):
            exact = layout.decoded(blocks).astype(np.float64).reshape(rows, width)
        return Matrix(form, {"src": blocks}, exact)
    return _of_values(form, form.codes, rows, width, random, finite=finite)


def _of_values(
    form: Form, values: Values, rows: int, width: int, random: np.random.Generator, *, finite: bool
) -> Matrix:
    codes = random.integers(0, 256, rows * width * values.bits // 8, np.uint8)
    if values.name == "fp8":  # finite
        codes[codes & 0x7C == 0x7C] ^= 0x40
    tall = form.tall or rows
    count = -(-rows // tall) * form.per_row(width)
    arrays: dict[str, Array] = {"src": codes}
    scales = (random.random(count) * 0.01).astype(np.float32)
    offset = 0.0
    if values.nested:
        outer = random.random(-(-count // values.nested)).astype(np.float32)
        arrays["scales"] = random.integers(0, 256, count, np.uint8)
        arrays["map"], arrays["nested"], offset = dynamic_map(), outer, 1.25
        each = np.repeat(outer, values.nested)[:count]
        scales = arrays["map"][arrays["scales"]] * each + np.float32(offset)
    elif values.exponents:
        exponents = random.integers(100, 118, count, np.uint8)
        scales = np.exp2(exponents.astype(np.float32) - 127)
        if not finite:
            exponents[:2], scales[:2] = 255, np.nan if values.has_nan else np.inf
        arrays["scales"] = exponents
    else:
        if not finite:
            scales[:2] = (np.inf, np.nan) if count > 1 else np.nan
        arrays["scales"] = scales
    table = np.array(VALUES["nf4"], np.float32)
    if values.has_table:
        arrays["table"] = table
    with np.errstate(invalid="ignore"):
        exact = values.decoded(values.unpacked(codes), table).astype(np.float64)
        each = scales.reshape(-1, form.per_row(width), 1).repeat(tall, 0)[:rows]
        exact = exact.reshape(rows, -1, form.wide or width) * each
        exact = exact.reshape(rows, width) * form.factor
    return Matrix(form, arrays, exact, offset)


def job(of: Matrix, x: Array, out: Array, **others: int) -> Any:
    """A job of a kernel on the host, which lives as long as its arrays."""
    places = {role: array.ctypes.data for role, array in of.arrays.items()}
    fields = of.fields(**places, x=x.ctypes.data, out=out.ctypes.data, **others)
    return (ctypes.c_uint64 * len(JOB))(*(fields.get(name, 0) for name in JOB))


def worst(y: Array, x: Array, exact: Array, eps: float = 2.0**-23) -> float:
    """The largest error of ``y = x @ exact.T``, as a part of what is allowed.

    Allowed are ``K * 2^-24`` times the sum of ``|w| |x|`` over K columns, and a rounding, ``eps``.
    NaN and infinity have to be where they are in float64.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        right = x.astype(np.float64) @ exact.T
        allowed = np.abs(x).astype(np.float64) @ np.abs(exact).T * (exact.shape[1] * 2.0**-24)
        allowed += np.abs(right) * eps + np.finfo(np.float32).tiny
        finite = np.isfinite(right)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(right))
        np.testing.assert_array_equal(y[np.isinf(right)], right[np.isinf(right)])
        return float((np.abs(y - right) / allowed)[finite].max(initial=0.0))
