"""Quantising on a GPU. Skipped on machines without one.

What a machine for PTX can show is in test_quant_ptx.py: here are the device's own reciprocal,
bitsandbytes' CUDA kernels, and speed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import needs
import numpy as np
import pytest
from ptx_cuda_helpers import Gpu, gpu
from quant_kernels_helpers import BLOCKED, assert_same_counts, shaped
from quant_ptx_helpers import KERNELS, NAMES, Task, by_oracle, kernel_id, there
from quant_samples import Sample, samples

from streamload.codecs.encode_cuda import SYMBOL, TALLY_NBYTES, blocks, quant_ptx
from streamload.codecs.parts import QuantCounts
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.codecs.schemes.bitsandbytes_nested_cuda import SYMBOL as NEST
from streamload.codecs.schemes.bitsandbytes_nested_cuda import nested_blocks, nested_ptx
from streamload.core.dtypes import BF16, DType
from streamload.devices import cuda
from streamload.devices.cuda import load_function

__all__ = ["gpu"]
Array = np.ndarray[Any, np.dtype[Any]]
EXACT = ("int8", "q8_0", "q4_0")  # without an approximate reciprocal
CHUNK_NBYTES = 4 * 2**20


@cache
def kernel(name: str, src: DType) -> int:
    ptx = quant_ptx(there(name).of((64, 64), src), src)
    return load_function(cuda._driver(), "cuda:0", ptx, SYMBOL).handle


def quantized_there(
    gpu: Gpu, name: str, src: DType, x: Array, grid: int | None = None
) -> tuple[bytes, Array, QuantCounts]:
    """Codes, statistics and counts of a kernel; nothing else may be written."""
    tensor = there(name).of(x.shape, src)
    task = Task(tensor, x, gpu.address, bytes(TALLY_NBYTES))
    gpu.put(0, task.memory)
    chosen = blocks(tensor, x.size) if grid is None else grid
    gpu.launch(kernel(name, src), chosen, task.arguments)
    return task.found(gpu.get(0, task.memory.size))


def assert_same(found: Any, expected: Any, name: str, label: str) -> None:
    """All is equal; codes that hang on the reciprocal's last bit may be a step apart."""
    assert np.array_equal(found[1], expected[1]), label
    if name in EXACT:
        assert found[0] == expected[0], label
        assert_same_counts(found[2], expected[2], label)
        return
    codes = [np.frombuffer(one[0], np.uint8) for one in (found, expected)]
    assert np.count_nonzero(codes[0] != codes[1]) <= 1 + codes[0].size // 1000, label
    for field in ("largest", "numel", "nan", "inf", "overflowed"):
        assert getattr(found[2], field) == getattr(expected[2], field), (label, field)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_the_oracle(gpu: Gpu, name: str) -> None:
    for sample in samples(columns=32 if name in BLOCKED else 1):
        x = sample.x
        x = shaped(name, x)
        found = quantized_there(gpu, name, sample.src, x)
        assert_same(found, by_oracle(name, sample.src, x), name, sample.name)


@pytest.mark.parametrize("kernel_of", KERNELS, ids=kernel_id)
def test_large_tensors(gpu: Gpu, kernel_of: tuple[str, DType]) -> None:
    """Tensors of many units a warp, on grids that divide them or not."""
    name, src = kernel_of
    x = np.random.default_rng(1).standard_normal((1021, 1056)).astype(np.float32).astype(src.numpy)
    expected = by_oracle(name, src, x)
    for grid in (None, 1, 7, 2048):
        assert_same(quantized_there(gpu, name, src, x, grid), expected, name, str(grid))


def _torched(torch: Any, sample: Sample) -> Any:
    if sample.src == BF16:
        return torch.from_numpy(sample.x.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(sample.x.copy()).cuda()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit(gpu: Gpu, kind: Any) -> None:
    """Codes and absmax equal bitsandbytes' on CUDA for finite tensors; nested, given its mean."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    nest = load_function(cuda._driver(), "cuda:0", nested_ptx(), NEST).handle
    for sample in samples(non_finite=False):
        given = _torched(torch, sample)
        packed, state = bitsandbytes.functional.quantize_4bit(given, blocksize=64, quant_type=kind)
        codes, absmax, _ = quantized_there(gpu, kind, sample.src, sample.x)
        assert codes == packed.cpu().numpy().tobytes(), sample.name
        assert np.array_equal(absmax, state.absmax.cpu().numpy()), sample.name

        _, state = bitsandbytes.functional.quantize_4bit(
            given, blocksize=64, quant_type=kind, compress_statistics=True
        )
        offset = np.float32(state.offset.item())
        if not np.isfinite(offset):
            continue
        count = -(-absmax.size // dynamic.BLOCK)
        gpu.put(0, dynamic.dynamic_map().view(np.uint8))
        gpu.put(1 << 20, absmax.view(np.uint8))
        at = gpu.address
        addresses = [at + (1 << 20), at + (2 << 20), absmax.size, int(offset.view(np.uint32))]
        gpu.launch(nest, nested_blocks(absmax.size), (*addresses, at + (3 << 20), at))
        found = gpu.get(2 << 20, absmax.size), gpu.get(3 << 20, 4 * count).view(np.float32)
        assert np.array_equal(found[0], state.absmax.cpu().numpy()), sample.name
        assert np.array_equal(found[1], state.state2.absmax.cpu().numpy()), sample.name


@pytest.mark.slow
def test_bitsandbytes_int8(gpu: Gpu) -> None:
    """Codes and statistics equal bitsandbytes' on CUDA for matrices that float16 reaches."""
    bitsandbytes = needs.runtime("bitsandbytes")
    torch = pytest.importorskip("torch")
    for sample in samples(non_finite=False):
        x = sample.x.reshape(-1, sample.x.shape[-1])
        half = _torched(torch, sample._replace(x=x)).to(torch.float16)
        if not half.isfinite().all():
            continue
        codes, statistics, _ = bitsandbytes.functional.int8_vectorwise_quant(half)
        found = quantized_there(gpu, "bitsandbytes-int8", sample.src, x)
        assert found[0] == codes.cpu().numpy().tobytes(), sample.name
        assert np.array_equal(found[1], statistics.cpu().numpy()), sample.name


@pytest.mark.parametrize("name", NAMES)
def test_keeps_up_with_the_bus(gpu: Gpu, name: str) -> None:
    """A kernel takes a chunk of 4 MiB of bf16 in less than its copy over PCIe takes."""
    columns = 4096
    rows = CHUNK_NBYTES // 2 // columns
    tensor = there(name).of((rows, columns), BF16)
    x = np.random.default_rng(2).standard_normal(rows * columns).astype(np.float32)
    gpu.put(256, x.astype(BF16.numpy).view(np.uint8))
    at = gpu.address
    out, statistics = at + (16 << 20), at + (32 << 20)
    arguments = (at + 256, out, x.size, at, statistics, tensor.unit_numel)
    grid = blocks(tensor, x.size)
    handle = kernel(name, BF16)

    def work() -> None:
        for _ in range(50):
            gpu.launch(handle, grid, arguments)

    work()
    rate = CHUNK_NBYTES * 50 / gpu.microseconds(work) / 1000
    print(f"{name}: {rate:.0f} GB/s of bf16")
    assert rate > 80, name
