"""`streamload.nn` on CUDA: a few tokens by compiled kernels, run without a GPU.

tinygrad's own ``ops_cuda`` launches them, with a small C library in the place of the driver and a
machine for PTX. Other kernels of tinygrad do not run there. What only a GPU can show is in
test_tinygrad_cuda.py.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import cuda_stand_in
import pytest

pytestmark = pytest.mark.skipif(
    version("tinygrad").startswith("0.13"), reason="it runs no program of others"
)

PRELUDE = """
import ctypes, sys

import numpy as np
from cuda_stand_in import Machines
from nn_helpers import made
from product_samples import worst
from tinygrad import Tensor, TinyJit, Variable, dtypes
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops

from streamload.devices.tinygrad import product

driver = ctypes.CDLL("libcuda.so.1")
machines = Machines(driver)

def vectors(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

def on(array, device="CUDA"):
    return Tensor(array, device=device).realize()

def takes_kernel(y):
    return any(node.op is Ops.PROGRAM for node in y.uop.toposort())
"""


def test_a_few_tokens_are_one_kernel(driver: Path) -> None:
    code = """
half, single = np.float16, np.float32
eps = {single: 2.0**-23, half: 2.0**-10}
for format, tokens, dtype in (
    ("int8", 1, half), ("q8_0", 1, single), ("q4_0", 3, half), ("nf4", 16, single)
):
    layer, weight = made(format, 5, 320, "CUDA:1")
    x = vectors(1, tokens, 320, dtype=dtype)
    given = on(x, "CUDA:1")
    assert product._works("CUDA:1")
    kernels, launches = GlobalCounters.kernel_count, machines.launches
    y = layer(given).realize()
    assert (machines.launches - launches, GlobalCounters.kernel_count - kernels) == (1, 1)
    assert (y.shape, y.dtype, y.device) == ((1, tokens, 5), given.dtype, "CUDA:1")
    assert worst(y.numpy()[0], x[0], weight, eps[dtype]) < 1, format
layer, weight = made("q8_0", 8, 64, "CUDA", bias=on(np.arange(8, dtype=np.float32)))
step = TinyJit(lambda x: layer(x).realize())
for seed in range(4):
    if seed == 1:
        product._works.cache_clear()  # it is tried while TinyJit captures
    x = vectors(1, 1, 64, seed=seed)
    assert np.allclose(step(on(x)).numpy(), x @ weight.T + np.arange(8), atol=1e-4)
"""
    cuda_stand_in.run(driver, PRELUDE + code)


def test_others_take_the_expression(driver: Path) -> None:
    code = """
layer, _ = made("q8_0", 8, 64, "CUDA")
assert takes_kernel(layer(on(vectors(1, product.MOST_TOKENS, 64))))
assert not takes_kernel(layer(on(vectors(product.MOST_TOKENS + 1, 64))))
assert not takes_kernel(layer(on(vectors(1, 4, 64))[:, : Variable("tokens", 1, 4).bind(2)]))
assert not takes_kernel(layer(on(vectors(1, 64, dtype=np.float64))))
assert not takes_kernel(made("int8", 8, 48, "CUDA")[0](on(vectors(1, 48))))
layer.bias = on(np.arange(8, dtype=np.float32))
assert not takes_kernel(layer(on(vectors(1, 64, dtype=np.float16))))  # it would be rounded
layer.bias = None

# views are copied, but for those that are contiguous already
flat = on(vectors(200))
for x, kernels in (
    (flat[1:65], 2), (flat[1:129].reshape(64, 2).T.contiguous(), 2), (flat[4:68].contiguous(), 1)
):
    y = layer(x)
    assert takes_kernel(y) and len(Tensor.linear_with_vars(y)[0].src) == kernels
assert not takes_kernel(layer(flat[1:65].contiguous()))
view = flat.uop.buffer.view(64, dtypes.float32, 4).ensure_allocated()
assert not takes_kernel(layer(Tensor(type(flat.uop).from_buffer(view))))
"""
    cuda_stand_in.run(driver, PRELUDE + code)


def test_without_its_means_a_device_takes_the_expression(driver: Path, tmp_path: Path) -> None:
    """No compiler and no kept code, or a tinygrad that runs such programs in another way."""
    code = """
from unittest.mock import patch
from tinygrad.runtime import ops_cuda

layer, _ = made("q8_0", 8, 64, "CUDA")
x = on(vectors(1, 64))
for lost in (
    patch.dict(sys.modules, {"llvmlite": None}),
    patch.object(sys.modules["tinygrad.uop.ops"], "ProgramInfo"),
    patch.object(ops_cuda.CUDAProgram, "__call__", lambda *_, **__: None),
):
    product._works.cache_clear()
    product._kernel.cache_clear()
    with lost:
        assert not takes_kernel(layer(x))
product._works.cache_clear()
product._kernel.cache_clear()
assert takes_kernel(layer(x))
"""
    cuda_stand_in.run(driver, PRELUDE + code, XDG_CACHE_HOME=str(tmp_path))
