"""Dequantising on CUDA, run without a GPU by a machine for PTX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import dequant_samples
import numpy as np
import pytest
from dequant_ptx_helpers import BASE, FILL, Array, Counts, Task, expected_of, extremes, opened, same
from dequant_samples import Sample, every
from ptx_machine import Machine

from streamload.codecs.decode import TARGETS, Weight
from streamload.codecs.decode_cuda import blocks, dequant_ptx
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.dtypes import BF16, F16, F32, DType

SAMPLES = every()


def by_machine(
    weight: Weight,
    data: bytes,
    dst: DType,
    first: int,
    stop: int,
    *,
    clamp: bool = False,
    turned: tuple[int, int] | None = None,
    grid: int | None = None,
) -> tuple[Array, Counts]:
    task = Task(weight, data, dst, first, stop, turned)
    ptx = dequant_ptx(weight.values, dst, clamp=clamp, turned=turned is not None)
    memory = task.memory.copy()
    many = blocks(stop - first, weight.values.bits) if grid is None else grid
    Machine(ptx, memory, BASE).launch(many, BLOCK_THREADS, task.arguments)
    return task.found(memory)


def pieces(numel: int, bits: int) -> list[tuple[int, int]]:
    """Parts of a weight, as chunks cut it: of 4 bits they begin at whole bytes."""
    step = 8 // bits
    some = ((0, min(numel, 3001)), (0, 1), (6, numel - 1), (numel // step * step - 40, numel))
    return [(max(first, 0), stop) for first, stop in some if stop - max(first, 0) <= 6000]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("dst", TARGETS, ids=str)
def test_kernels_equal_the_oracle(tmp_path: Path, sample: Sample, dst: DType) -> None:
    info, oracle, data = opened(tmp_path, sample, dst)
    for first, stop in pieces(info.numel, info.dtype.bits):
        found = by_machine(oracle.weight, data, dst, first, stop)
        same(found, expected_of(oracle, data, dst, first, stop))


def test_any_grid(tmp_path: Path) -> None:
    """Fewer blocks than there is work for go on in strides; more have nothing to do."""
    info, oracle, data = opened(tmp_path, dequant_samples.four_bit(), BF16)
    expected = expected_of(oracle, data, BF16, 0, info.numel)
    for grid in (1, 2, 30):
        same(by_machine(oracle.weight, data, BF16, 0, info.numel, grid=grid), expected)


@pytest.mark.parametrize("dst", [BF16, F32], ids=str)
def test_turned(tmp_path: Path, dst: DType) -> None:
    """Elements go to where a transpose moves them, whatever piece they are of."""
    sample = dequant_samples.mxfp4(shape=(3, 20, 64))
    info, oracle, data = opened(tmp_path, sample, dst)
    whole = sample.rounded(dst.name).reshape(-1)  # as models have it
    expected = expected_of(oracle, data, dst, 0, info.numel)[1]
    filled, counts = by_machine(oracle.weight, data, dst, 0, info.numel, turned=(20, 64))
    same((filled, counts), (whole, expected))
    part, _ = by_machine(oracle.weight, data, dst, 1290, 2500, turned=(20, 64))
    moved = np.swapaxes(np.arange(info.numel).reshape(3, 20, 64), 1, 2).reshape(-1)
    mine = (moved >= 1290) & (moved < 2500)
    assert np.array_equal(part[mine], whole[mine])
    assert (part.view(np.uint8).reshape(-1, dst.itemsize)[~mine] == FILL).all()


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("dst", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "nf4", "int8"])
def test_scales_of_any_size(tmp_path: Path, kind: str, dst: DType, clamp: bool) -> None:
    """Subnormal, huge, short, negative and zero scales; every code, NaN and infinity included."""
    info, oracle, data = opened(tmp_path, extremes(kind), dst, "clamp" if clamp else "inf")
    found = by_machine(oracle.weight, data, dst, 0, info.numel, clamp=clamp)
    same(found, expected_of(oracle, data, dst, 0, info.numel))


def texts(folder: Path) -> dict[str, str]:
    found = {}
    for index, sample in enumerate(SAMPLES):
        _, oracle, _ = opened(folder / str(index), sample, F16)
        values = oracle.weight.values
        for dst in TARGETS:
            for turned in (False, True):
                name = f"{values}-{dst}-{turned}"
                found[name] = dequant_ptx(values, dst, clamp=True, turned=turned)
    return found


def test_the_text(tmp_path: Path) -> None:
    """PTX of an old architecture that depends on nothing, and fuses no operations."""
    for name, ptx in texts(tmp_path).items():
        found = re.findall(r"^\.(?:version|target) .*", ptx, re.M)
        assert found == [".version 6.0", ".target sm_50"], name
        assert re.findall(r"\.entry (\w+)", ptx) == ["dequantise"], name
        assert not re.search(r"\.(extern|func)\b|\bcall\b|fma\.rn|mad\.rn|\.approx", ptx), name
        assert not re.search(r"(?<![.\w])(add|sub|mul)\.f", ptx), name
        assert not re.search(r"\bld\.[bfsu]\d", ptx), name  # all loads know their memory


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's assembler is not installed")
def test_the_assembler_takes_it(tmp_path: Path) -> None:
    """NVIDIA's own translation accepts every kernel, and finds registers for all of it."""
    for name, ptx in texts(tmp_path).items():
        path = tmp_path / "kernel.ptx"
        path.write_text(ptx)
        command = ["ptxas", "-v", "-arch=sm_90", path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)
        assert "0 bytes spill stores" in done.stderr, name
