"""Dequantising on CUDA, run without a GPU by a machine for PTX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import dequant_samples
import ml_dtypes
import numpy as np
import pytest
from dequant_samples import Sample, entry, every, write
from ptx_machine import Machine
from test_dequant import decoders

from streamload.codecs.cast_cuda import BLOCK_THREADS
from streamload.codecs.decode import TARGETS, Weight
from streamload.codecs.decode_cuda import blocks, dequant_ptx, weight_parts
from streamload.codecs.group import Packed, read_whole
from streamload.core.dtypes import BF16, F16, F32, DType

Array = np.ndarray[Any, np.dtype[Any]]
Counts = tuple[int, ...]
BASE = 0x7F_0000_0000
FILL = 0xA5
SAMPLES = every()


class Task:
    """Some elements of a weight, and the memory of a device on which they are to be made.

    Attributes:
        memory: bytes of the device, with values, scales, and room for elements.
        arguments: of the kernel, for memory that begins at ``base``.
        written: the bytes that a kernel may write.
    """

    def __init__(
        self,
        weight: Weight,
        data: bytes,
        dst: DType,
        first: int,
        stop: int,
        turned: tuple[int, int] | None = None,
        base: int = BASE,
        tally: Counts = (0, 0, 0),
    ) -> None:
        """Lay everything out.

        Args:
            weight: what decodes the values.
            data: all values.
            dst: what they become.
            first: the first element.
            stop: the one after the last.
            turned: see `weight_parts`.
            base: address of the memory.
            tally: what it is before.
        """
        bits = weight.values.bits
        there = b"".join(part.tobytes() for part in weight_parts(weight, turned))
        values = data[first * bits // 8 : -(-stop * bits // 8)]
        numel = len(data) * 8 // bits if turned else stop - first
        source = 256 + -(-len(there) // 256) * 256 + 3
        out = -(-(source + len(values) + 1) // 256) * 256 + dst.itemsize
        self.memory = np.full(out + numel * dst.itemsize + 256, FILL, np.uint8)
        self.memory[:24] = np.array(tally, np.uint64).view(np.uint8)
        for at, some in ((256, there), (source, values)):
            self.memory[at : at + len(some)] = np.frombuffer(some, np.uint8)
        self.arguments = (base + source, base + out, stop - first, base, base + 256, first)
        self.written = slice(out, out + numel * dst.itemsize)
        self._dst, self._numel = dst, stop - first

    def found(self, memory: Array) -> tuple[Array, Counts]:
        """Elements and counts in the memory after a kernel; nothing else may be written."""
        expected = self.memory.copy()
        for some in (slice(0, 24), self.written):
            expected[some] = memory[some]
        assert np.array_equal(memory, expected), "written beside the elements"
        elements = memory[self.written].copy().view(self._dst.numpy)
        return elements, tuple(memory[:24].copy().view(np.uint64).tolist())


def expected_of(decoder: Any, data: bytes, dst: DType, first: int, stop: int) -> Any:
    """What a kernel owes, by the oracle."""
    bits = decoder.weight.values.bits
    out = np.zeros(stop - first, dst.numpy)
    given = memoryview(data)[first * bits // 8 : -(-stop * bits // 8)]
    counts = decoder.decode(given, memoryview(out.view(np.uint8).data), first)
    told = counts.overflowed, counts.flushed
    return out, (*told, sum(told) + counts.rounded)


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
    """Elements and counts by the machine."""
    task = Task(weight, data, dst, first, stop, turned)
    ptx = dequant_ptx(weight.values, dst, clamp=clamp, turned=turned is not None)
    memory = task.memory.copy()
    many = blocks(stop - first, weight.values.bits) if grid is None else grid
    Machine(ptx, memory, BASE).launch(many, BLOCK_THREADS, task.arguments)
    return task.found(memory)


def same(found: tuple[Array, Counts], expected: tuple[Array, Counts]) -> None:
    """The same bits but for those of NaN, and the same counts."""
    nan = np.isnan(found[0].astype(np.float32)) & np.isnan(expected[0].astype(np.float32))
    unsigned = f"u{found[0].itemsize}"
    assert np.array_equal(found[0].view(unsigned)[~nan], expected[0].view(unsigned)[~nan])
    assert found[1] == expected[1]


def opened(folder: Path, sample: Sample, dst: DType, out_of_range: Any = "inf") -> Any:
    """A weight of a checkpoint: its tensor, its oracle, and its values."""
    info, by = decoders(write(folder, [sample]), sample.name, dst, out_of_range)
    assert isinstance(info, Packed)
    (data,) = read_whole(info.headers, [info])
    return info, by["numpy"], data


def pieces(numel: int, bits: int) -> list[tuple[int, int]]:
    """Parts of a weight, as chunks cut it: of 4 bits they begin at whole bytes."""
    step = 8 // bits
    some = ((0, min(numel, 3001)), (0, 1), (6, numel - 1), (numel // step * step - 40, numel))
    return [(max(first, 0), stop) for first, stop in some if stop - max(first, 0) <= 6000]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
@pytest.mark.parametrize("dst", TARGETS, ids=str)
def test_kernels_equal_the_oracle(tmp_path: Path, sample: Sample, dst: DType) -> None:
    """Elements and counts of every layout, wherever a piece begins and ends."""
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


def extremes(kind: str) -> Sample:
    """A weight with scales at the ends of their range, and all codes."""
    rng = np.random.default_rng(7)
    some = [1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e5, 1e36, 0.0, -1.0, 2.0**-14, 3 * 2.0**-130]
    scales = (rng.choice(some, 32) * rng.choice([1, rng.random()], 32)).astype(np.float32)
    if kind == "nf4":
        sample = dequant_samples.four_bit("w.weight", (32, 64))
        sample.tensors["w.weight.absmax"] = entry(scales)
        return sample
    codes = np.tile(np.arange(256, dtype=np.uint8), (32, 1))
    values = codes.view(np.int8 if kind == "int8" else getattr(ml_dtypes, kind))
    tensors = {"w.weight": entry(values), "w.weight_scale": entry(scales[:, None])}
    return Sample("w.weight", tensors, codes)


def texts(folder: Path) -> dict[str, str]:
    """Every kernel, by name."""
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
