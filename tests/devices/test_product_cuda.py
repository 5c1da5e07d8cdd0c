"""`devices.torch.product` on a CUDA device: every form, against float64."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from product_samples import FORMS, Matrix, matrix, worst  # noqa: E402

from streamload.devices.torch.product import Operand, _dtypes, decode, form_of, linear  # noqa: E402

_EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def operand(name: str, of: Matrix) -> Any:
    parts = [of.arrays["src"].reshape(-1)]
    for role, _ in of.form.parts:
        state = json.dumps({"nested_offset": of.offset}).encode()
        parts.append(np.frombuffer(state, np.uint8) if role == "state" else of.arrays[role])
    rows, width = of.exact.shape
    held = [torch.from_numpy(np.array(each)).cuda() for each in parts]
    expected = _dtypes(name, width)
    held = [each.view(to) for each, to in zip(held, expected, strict=True)] if expected else held
    return Operand(name, held, 0, rows, width)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FORMS)
def test_products_are_within_rounding(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, width = int(random.integers(1, 700)), 256 * int(random.integers(1, 18))
    tokens = int(random.choice([1, 2, 3, 4, 5, 17]))
    dtype = [*_EPS][seed % 3]
    of = matrix(FORMS[name], rows, width, seed=seed)
    assert form_of(name, width) is not None
    x = torch.from_numpy(random.standard_normal((tokens, width))).to(dtype).cuda()
    held = operand(name, of)
    with torch.inference_mode():
        found = linear(x, held, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = linear(x, held, None)
        again.fill_(torch.nan)
        graph.replay()
    y, x = found.double().cpu().numpy(), x.double().cpu().numpy()
    # tiles are decoded to the dtype, and torch multiplies them by its own rules
    eps = _EPS[dtype] if tokens <= 4 else max(_EPS[dtype], 2.0**-10)
    if tokens > 4:
        assert np.linalg.norm(y - x @ of.exact.T) <= 2 * eps * np.linalg.norm(x @ of.exact.T)
    else:
        assert worst(y, x, of.exact, eps) < 1
    assert torch.equal(found, again)


@pytest.mark.parametrize("name", FORMS)
def test_infinity_and_nan_are_carried(name: str) -> None:
    of = matrix(FORMS[name], 5, 512, finite=False)
    x = torch.randn(1, 512, device="cuda")
    with torch.inference_mode():
        y = linear(x, operand(name, of), None)
    worst(y.double().cpu().numpy(), x.double().cpu().numpy(), of.exact)


@pytest.mark.parametrize("name", FORMS)
def test_decoded_rows_are_the_oracles(name: str) -> None:
    of = matrix(FORMS[name], 37, 768)
    held = operand(name, of)
    right = torch.from_numpy(of.exact).float().cuda()
    assert torch.allclose(decode(held, torch.float32), right, rtol=1e-6, atol=0)
    some = decode(held.between(3, 20), torch.bfloat16)
    assert torch.allclose(some.float(), right[3:20], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("own_stream", [False, True])
def test_streams_of_another_context_are_launched_in(own_stream: bool) -> None:
    """tinygrad leaves its context current: torch's new streams, and its null stream, are there."""
    of = matrix(FORMS["nf4"], 37, 768)
    held, x = operand("nf4", of), torch.randn(2, 768, device="cuda")
    with torch.inference_mode():
        expected = linear(x, held, None)
        torch.cuda.synchronize()
        driver, other = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert driver.cuCtxCreate_v2(ctypes.byref(other), 0, 0) == 0
        try:
            stream = ctypes.c_void_p()
            assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
            if own_stream:
                driver.cuCtxPopCurrent_v2(ctypes.byref(other))
            # not ExternalStream(0), which is a stream of torch's pool
            given = torch.cuda.ExternalStream(stream.value) if own_stream else None
            with torch.cuda.stream(given):
                found = linear(x, held, None)
            driver.cuCtxPushCurrent_v2(other)  # torch may have made its own current as it left
            assert driver.cuCtxSynchronize() == 0
        finally:
            for _ in range(1 if own_stream else 2):
                driver.cuCtxPopCurrent_v2(ctypes.byref(other))
    assert torch.equal(found, expected)
