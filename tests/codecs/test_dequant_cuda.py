"""Weights dequantised on CUDA in the calls that copy. Skipped on machines without a GPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import dequant_samples
import needs
import numpy as np
import pytest
from dequant_ptx_helpers import Task, expected_of, extremes, opened
from dequant_ptx_helpers import same as assert_same
from dequant_samples import Sample, every, four_bit, fp8, int8, mxfp4, same, write
from ptx_cuda_helpers import Gpu, gpu

import streamload
from streamload import RowRange, Source
from streamload.codecs.decode import TARGETS, Weight
from streamload.codecs.decode_cuda import SYMBOL, blocks, dequant_ptx
from streamload.codecs.decode_kernels import Values
from streamload.core.dtypes import BF16, DType
from streamload.core.tensors import Columns
from streamload.devices import cuda
from streamload.devices.cuda import load_function
from streamload.errors import OutOfRangeError
from streamload.verification.verify import verify

torch = needs.module("torch")
__all__ = ["gpu"]
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

SAMPLES = every()
LARGE = [
    fp8("l.5.q.weight", (3001, 2052)),
    fp8("l.6.q.weight", (1500, 4096), "float8_e5m2", (1, 4096)),
    int8("l.5.k.weight"),
    four_bit("l.5.o.weight", (1001, 4097)),
    four_bit("l.6.o.weight", (2048, 4096), "fp4", nested=True),
    mxfp4("l.5.experts.gate_up_proj", (4, 1440, 2880)),
]


@cache
def kernel(values: Values, dst: DType, clamp: bool, turned: bool) -> int:
    ptx = dequant_ptx(values, dst, clamp=clamp, turned=turned)
    return load_function(cuda._driver(), "cuda:0", ptx, SYMBOL).handle


def there(
    gpu: Gpu,
    weight: Weight,
    data: bytes,
    dst: DType,
    first: int,
    stop: int,
    *,
    clamp: bool = False,
    turned: tuple[int, int] | None = None,
    grid: int | None = None,
) -> tuple[Any, tuple[int, ...]]:
    task = Task(weight, data, dst, first, stop, turned, base=gpu.address)
    gpu.put(0, task.memory)
    many = blocks(stop - first, weight.values.bits) if grid is None else grid
    gpu.launch(kernel(weight.values, dst, clamp, turned is not None), many, task.arguments)
    return task.found(gpu.get(0, task.memory.size))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("dst", TARGETS, ids=str)
def test_kernels_equal_the_oracle(gpu: Gpu, tmp_path: Path, sample: Sample, dst: DType) -> None:
    info, oracle, data = opened(tmp_path, sample, dst)
    step = 8 // info.dtype.bits
    for first, stop, grid in ((0, info.numel, None), (6, 7, 3), (30 // step * step, 35, 1)):
        stop = min(stop, info.numel)
        found = there(gpu, oracle.weight, data, dst, first, stop, grid=grid)
        assert_same(found, expected_of(oracle, data, dst, first, stop))


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("dst", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "nf4", "int8"])
def test_scales_of_any_size(gpu: Gpu, tmp_path: Path, kind: str, dst: DType, clamp: bool) -> None:
    """Subnormal, huge, short, negative and zero scales; every code, NaN and infinity included."""
    info, oracle, data = opened(tmp_path, extremes(kind), dst, "clamp" if clamp else "inf")
    found = there(gpu, oracle.weight, data, dst, 0, info.numel, clamp=clamp)
    assert_same(found, expected_of(oracle, data, dst, 0, info.numel))


def load(path: Path, dtype: Any, device: str = "cuda:0", **options: Any) -> streamload.LoadReport:
    given: dict[str, Any] = {"budget": "400MB", "progress": False}
    return streamload.load_state_dict(None, path, dtype=dtype, device=device, **given | options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [{}, {"chunk_nbytes": 2**17, "threads": 1}, {"reader": "direct"}],
    ids=["whole", "chunks", "direct"],
)
def test_every_layout(tmp_path: Path, dtype: str, options: Any) -> None:
    """Each weight is what the host makes of it, and its counts are those of the host."""
    samples = [*SAMPLES, *LARGE]
    path = write(tmp_path, samples, shards=3)
    gpu = load(path, dtype, **options)
    host = load(path, dtype, "cuda:0", cast="llvm")
    kinds = {p.cast for p in gpu.plan.placements if p.src.is_packed}
    assert kinds == {"device"}
    assert {p.cast for p in host.plan.placements if p.src.is_packed} == {"llvm"}
    for sample in samples:
        found = gpu.state_dict[sample.name]
        assert found.is_cuda
        assert torch.equal(found, host.state_dict[sample.name]), sample.name
        assert same(found.cpu(), sample.rounded(dtype)), sample.name
    assert gpu.counts == host.counts
    assert verify(gpu, streamload.open_checkpoint(path)) == []
    (device,) = gpu.plan.devices
    assert gpu.measured_nbytes[device.device] <= device.peak_nbytes


def test_rows_and_columns(tmp_path: Path) -> None:
    """What is put together of parts comes from the host, or the device where it is one part."""
    samples = [fp8("a.weight", (300, 64), seed=1), fp8("b.weight", (200, 64), seed=2)]
    samples.append(four_bit("c.weight", (40, 64)))
    path = write(tmp_path, samples)
    a, b, c = (s.rounded("float32") for s in samples)
    mapping = {
        "rows": Source([RowRange("a.weight", 130, 290), RowRange("b.weight", 0, 200)]),
        "columns": Source([RowRange("b.weight", 3, 200, Columns(7, 50, 64))], shape=(197, 43)),
        "turned": Source("a.weight", transpose=True),
        "turned 4": Source("c.weight", transpose=True),
        "half": Source([RowRange("c.weight", 11, 40)]),
        "some": Source([RowRange("a.weight", 131, 290)]),
    }
    expected = {
        "rows": np.concatenate([a[130:290], b]),
        "columns": b[3:200, 7:50],
        "turned": a.T,
        "turned 4": c.T,
        "half": c[11:],
        "some": a[131:290],
    }
    for options in ({}, {"chunk_nbytes": 4096, "threads": 1}):
        report = load(path, "float32", mapping=mapping, **options)
        by = {p.name: p.cast for p in report.plan.placements}
        on_host = {"rows", "columns"}
        assert {name for name in expected if by[name] == "llvm"} == on_host
        for name, array in expected.items():
            assert same(report.state_dict[name].cpu(), array), name
        assert verify(report, streamload.open_checkpoint(path)) == []


def test_what_is_held_fits_one_large_weight_after_the_other(tmp_path: Path) -> None:
    samples = [four_bit(f"l.{n}.o.weight", (1024, 1024), seed=n) for n in range(24)]
    path = write(tmp_path, samples)
    report = load(path, "bfloat16")
    assert report.plan.devices[0].scratch_nbytes <= 72 * 2**20
    for sample in samples:
        assert same(report.state_dict[sample.name].cpu(), sample.rounded("bfloat16"))


def test_beyond_float16_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [fp8(block=(0, 0))])
    info = dequant_samples.entry(np.full(1, 1e9, np.float32), ())
    sample = fp8(block=(0, 0))
    sample.tensors[f"{sample.name}_scale"] = info
    path = write(tmp_path / "big", [sample])
    with pytest.raises(OutOfRangeError, match=r"l\.0\.q"):
        load(path, "float16", out_of_range="error")
    found = load(path, "float16", out_of_range="clamp").state_dict[sample.name]
    assert found.abs().max().item() == 65504


@pytest.mark.parametrize("index", range(len(LARGE)), ids=[s.name for s in LARGE])
def test_keeps_up_with_the_bus(gpu: Gpu, tmp_path: Path, index: int) -> None:
    """A kernel takes less time than the copy of its values over PCIe."""
    info, oracle, data = opened(tmp_path, LARGE[index], BF16)
    weight = oracle.weight
    turned = info.shape[-2:] if info.group.is_transposed else None
    task = Task(weight, data, BF16, 0, info.numel, turned, base=gpu.address)
    gpu.put(0, task.memory)
    handle = kernel(weight.values, BF16, False, turned is not None)
    many = blocks(info.numel, weight.values.bits)

    def work() -> None:
        for _ in range(20):
            gpu.launch(handle, many, task.arguments)

    work()
    # the best of some: other processes may share the device
    rate = info.nbytes * 20 / min(gpu.microseconds(work) for _ in range(5)) / 1000
    print(f"{info.name} {info.dtype}: {rate:.0f} GB/s of values")
    assert rate > (30 if info.nbytes > 2**20 else 0), info.name
