"""`codecs.product`: products with quantised weights, and their decoding, on the host."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from parameters import few
from product_samples import FORMS, job, matrix, worst

from streamload.codecs.llvm import (
    Target,
    compile_object,
    host_target,
    link_object,
    undefined_symbols,
)
from streamload.codecs.product import FUNCTION, MOST_TOKENS, compile_product, kernel_ir
from streamload.core.dtypes import BF16, F16, F32, DType

_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def run(kernel: Any, jobs: Any) -> None:
    kernel(ctypes.addressof(jobs))


@pytest.mark.parametrize("name", FORMS)
def test_products_are_within_rounding(name: str) -> None:
    form = FORMS[name]
    random = np.random.default_rng(1)
    for tokens in (1, 2, MOST_TOKENS):
        kernel = compile_product(form, tokens, F32)
        for rows, width in ((1, 256), (7, 512), (37, 1280)):
            of = matrix(form, rows, width, seed=rows)
            x = random.standard_normal((tokens, width)).astype(np.float32)
            out = np.full((tokens, rows), np.nan, np.float32)
            run(kernel, job(of, x, out))
            assert worst(out, x, of.exact) < 0.5


@pytest.mark.parametrize("name", FORMS)
def test_infinity_and_nan_are_carried(name: str) -> None:
    """A scale that is no finite number makes the rows that it is in what float64 makes of them."""
    form = FORMS[name]
    of = matrix(form, 5, 512, finite=False)
    x = np.random.default_rng(2).standard_normal((1, 512)).astype(np.float32)
    out = np.zeros((1, 5), np.float32)
    run(compile_product(form, 1, F32), job(of, x, out))
    worst(out, x, of.exact)


@pytest.mark.parametrize("dst", [F32, F16, BF16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", FORMS)
def test_decoded_rows_are_the_oracles(name: str, dst: DType) -> None:
    form = FORMS[name]
    of = matrix(form, 9, 512)
    kind = _NUMPY[dst.code]
    out = np.zeros((9, 512), kind)
    run(compile_product(form, 0, dst), job(of, out, out, next=2, stop=7))
    right = of.exact.astype(np.float32).astype(kind)
    if form.factor != 1.0:  # two roundings
        np.testing.assert_allclose(out[2:7].astype(float), of.exact[2:7], rtol=2.0**-7, atol=1e-9)
    else:
        np.testing.assert_array_equal(out[2:7].view(np.uint8), right[2:7].view(np.uint8))
    assert not out[:2].any() and not out[7:].any()


def test_threads_share_the_rows_of_a_job() -> None:
    form = FORMS["q8_0"]
    of = matrix(form, 4001, 256)
    x = np.random.default_rng(3).standard_normal((1, 256)).astype(np.float32)
    out = np.full((1, 4001), np.nan, np.float32)
    shared = job(of, x, out, claim=8)
    kernel = compile_product(form, 1, F32)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, [kernel] * 4, [shared] * 4))
    assert worst(out, x, of.exact) < 0.5


@pytest.mark.parametrize("lanes", [0, 8])
@pytest.mark.parametrize("name", list(FORMS)[: few(len(FORMS))])
def test_older_cpus_have_right_kernels(name: str, lanes: int) -> None:
    host = host_target()
    if host.architecture != "x86_64" or (lanes and host.lanes < lanes):
        pytest.skip("needs an x86-64 CPU with AVX2")
    cpu, features = ("haswell", "+avx2,+fma,+f16c") if lanes else ("x86-64", "")
    target = Target(host.triple, cpu, features)
    form = FORMS[name]
    ir = partial(kernel_ir, form, lanes=lanes, native_half=target.native_half)
    for tokens in (0, 1, 4):
        text = ir(tokens, F32, architecture=target.architecture)
        image = compile_object(text, target)
        assert not undefined_symbols(image)
        kernel = link_object(image, target, FUNCTION.symbol, FUNCTION.prototype)
        of = matrix(form, 6, 512)
        x = np.random.default_rng(4).standard_normal((max(tokens, 1), 512)).astype(np.float32)
        out = np.full((tokens, 6) if tokens else (6, 512), np.nan, np.float32)
        run(kernel, job(of, x, out))
        if tokens:
            assert worst(out, x, of.exact) < 0.5
        else:
            np.testing.assert_allclose(out, of.exact, rtol=1e-6)
