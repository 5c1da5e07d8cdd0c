"""`codecs.product_cuda`: products and decoding on CUDA, run without a GPU by a machine for PTX."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from product_samples import FORMS, Matrix, matrix, worst
from ptx_machine import Machine

from streamload.codecs.product import Form
from streamload.codecs.product_cuda import PARAMETERS, is_exact, launch, product_ptx
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.dtypes import BF16, F16, F32, DType

BASE = 0x7F00_0000_0000
_NUMPY: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_EPS = {"F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}
Array = np.ndarray[Any, np.dtype[Any]]


def by_machine(
    of: Matrix,
    dtype: DType,
    tokens: int,
    x: Array,
    bias: Array | None = None,
    *,
    first: int = 0,
    splits: int | None = None,
) -> Array:
    """What a kernel writes for the rows from the first on; other bytes stay as they were."""
    rows, width = of.exact.shape
    kind = _NUMPY[dtype.code]
    shape = (tokens, rows - first) if tokens else (rows - first, width)
    arrays = dict(of.arrays) | {"x": x, "out": np.zeros(shape, kind)}
    if bias is not None:
        arrays["bias"] = bias[first:]
    places, at = {}, 0
    for role, array in arrays.items():
        places[role] = at
        at += -(-array.nbytes // 64) * 64 + 64
    memory = np.full(at, 0xA5, np.uint8)
    for role, array in arrays.items():
        memory[places[role] :][: array.nbytes] = array.reshape(-1).view(np.uint8)
    fields = of.fields(**{role: BASE + place for role, place in places.items()})
    count, blocks = launch(of.form, rows - first, width, tokens)
    if splits is not None and tokens:
        count, blocks = splits, blocks * 8  # more blocks than rows have nothing to do
    size = np.dtype(kind).itemsize
    fields["out"] -= first * size * (1 if tokens else width)
    if bias is not None:
        fields["bias"] -= first * size
    fields |= {"first": first, "splits": count, "pitch": rows - first}
    ptx = product_ptx(of.form, dtype, tokens, is_exact(of.form, width))
    arguments = [fields.get(name, 0) for name in PARAMETERS]
    Machine(ptx, memory, BASE).launch(blocks, BLOCK_THREADS, arguments)
    found = memory[places["out"] :]
    nbytes = arrays["out"].nbytes
    assert (found[nbytes : nbytes + 64] == 0xA5).all()
    return found[:nbytes].view(kind).reshape(shape)


def vectors(tokens: int, width: int, dtype: DType) -> Array:
    x = np.random.default_rng(tokens + width).standard_normal((max(tokens, 1), width))
    return x.astype(_NUMPY[dtype.code])


def checked(form: Form, rows: int, width: int, dtype: DType, tokens: int, **others: Any) -> None:
    """Compare products of a random matrix with those in float64."""
    of, x = matrix(form, rows, width, seed=rows), vectors(tokens, width, dtype)
    y = by_machine(of, dtype, tokens, x, **others).astype(np.float64)
    exact = of.exact[others.get("first", 0) :]
    bias = others.get("bias")
    if bias is not None:
        y = y - bias[others.get("first", 0) :].astype(np.float64)
        assert np.allclose(y, x.astype(np.float64) @ exact.T, rtol=1e-4, atol=1e-4)
    else:
        assert worst(y, x, exact, _EPS[dtype.code]) < 1


@pytest.mark.parametrize("name", FORMS)
def test_products_are_within_rounding(name: str) -> None:
    form = FORMS[name]
    checked(form, 5, 1024, BF16, 1)
    checked(form, 3, 1280, BF16, 2)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
@pytest.mark.parametrize("name", ["int8", "nf4-nested", "q8_0", "q6_k"])
def test_dtypes_and_more_vectors(name: str, dtype: DType) -> None:
    """Vectors of other dtypes, and as many as a kernel takes."""
    checked(FORMS[name], 3, 1280, dtype, 4)


@pytest.mark.parametrize("name", ["int8", "nf4", "q4_0", "q4_k"])
def test_warps_share_rows(name: str) -> None:
    for splits in (2, 8):
        checked(FORMS[name], 6, 2048, BF16, 1, splits=splits, first=1)


def test_a_bias_is_added() -> None:
    bias = vectors(1, 7, F32)[0]
    checked(FORMS["int8"], 7, 512, F32, 2, bias=bias)
    checked(FORMS["q4_0"], 7, 512, F32, 1, bias=bias, first=3)


@pytest.mark.parametrize("name", ["nf4", "q8_0", "q3_k"])
def test_infinity_and_nan_are_carried(name: str) -> None:
    """A scale that is no finite number makes of its rows what float64 does."""
    of = matrix(FORMS[name], 4, 768, finite=False)
    x = vectors(1, 768, F32)
    worst(by_machine(of, F32, 1, x), x, of.exact)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_decoded_rows_are_the_oracles(name: str, dtype: DType) -> None:
    form = FORMS[name]
    for width in (1024, 1280):
        of = matrix(form, 3, width)
        found = by_machine(of, dtype, 0, vectors(0, width, dtype), first=1)
        right = of.exact[1:].astype(np.float32).astype(_NUMPY[dtype.code])
        if form.factor != 1.0:  # two roundings
            np.testing.assert_allclose(found.astype(float), of.exact[1:], rtol=2.0**-7)
        else:
            np.testing.assert_array_equal(found.view(np.uint8), right.view(np.uint8))
