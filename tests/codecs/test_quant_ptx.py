"""Quantising on CUDA, run without a GPU by a machine for PTX."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_machine import Ahead, Machine
from quant_kernels_helpers import BLOCKED, assert_same_counts, encoded, shaped
from quant_ptx_helpers import FILL, KERNELS, NAMES, Array, Task, by_oracle, kernel_id, there
from quant_samples import samples

from streamload.codecs.encode_cuda import TALLY_NBYTES, blocks, quant_ptx
from streamload.codecs.encode_kernels import Tally
from streamload.codecs.parts import QuantCounts
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.codecs.scheme import SCHEMES
from streamload.codecs.schemes import bitsandbytes_nested as dynamic
from streamload.codecs.schemes.bitsandbytes_nested_cuda import nested_blocks, nested_ptx
from streamload.core.dtypes import BF16, F16, F32, DType

BASE = 0x7F_0000_0000


def quantized_there(
    name: str,  # of the format
    src: DType,  # dtype of ``x``
    x: Array,  # the tensor
    *,
    grid: int | None = None,  # how many blocks; as many as suggested without
    tally: bytes = bytes(TALLY_NBYTES),  # what it is before
    ahead: Ahead = None,  # see `Machine.launch`
) -> tuple[bytes, Array, QuantCounts]:
    """Codes, statistics and counts of a kernel; nothing else may be written.

    The tally has the sum of the statistics too: no device has to send them back for their mean.
    """
    tensor = there(name).of(x.shape, src)
    task = Task(tensor, x, BASE, tally)
    memory = task.memory.copy()
    chosen = blocks(tensor, x.size) if grid is None else grid
    machine = Machine(quant_ptx(tensor, src), memory, BASE)
    machine.launch(chosen, BLOCK_THREADS, task.arguments, ahead=ahead)
    codes, statistics, counts = task.found(memory)
    if not any(tally):
        total = float(statistics.sum(dtype=np.float64))
        told = Tally.from_buffer_copy(memory[:TALLY_NBYTES].tobytes())
        assert told.statistics == pytest.approx(total, rel=1e-13)
    return codes, statistics, counts


def assert_same(
    found: tuple[bytes, Array, QuantCounts], expected: tuple[bytes, Array, QuantCounts], name: str
) -> None:
    assert found[0] == expected[0], name
    assert np.array_equal(found[1], expected[1]), name
    assert_same_counts(found[2], expected[2], name)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_equal_the_oracle(name: str) -> None:
    for sample in samples(24, columns=32 if name in BLOCKED else 1):
        x = sample.x
        x = shaped(name, x)
        found = quantized_there(name, sample.src, x)
        assert_same(found, by_oracle(name, sample.src, x), sample.name)


@pytest.mark.parametrize("name", NAMES)
def test_any_grid(name: str) -> None:
    """Fewer blocks than there are units go on in strides; more have nothing to do."""
    random = np.random.default_rng(4)
    for grid, src in ((1, BF16), (3, F16), (12, F32)):
        x = random.standard_normal((11, 192)).astype(np.float32).astype(src.numpy)
        assert_same(quantized_there(name, src, x, grid=grid), by_oracle(name, src, x), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ahead", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_warps_that_come_apart(name: str, ahead: Ahead) -> None:
    """In whatever order warps run, maxima and sums are those of all."""
    x = np.random.default_rng(5).standard_normal((5, 320)).astype(np.float16)
    assert_same(quantized_there(name, F16, x, ahead=ahead), by_oracle(name, F16, x), name)


@pytest.mark.parametrize("name", NAMES)
def test_counts_are_added(name: str) -> None:
    x = np.random.default_rng(6).standard_normal((4, 64)).astype(np.float32)
    x[0, 0], x[1, 1] = np.nan, np.inf
    before = Tally(0x7F000000, 1, 2.0, 4.0, 10, 20, 30)
    _, _, counts = quantized_there(name, F32, x, tally=bytes(before))
    _, _, plain = by_oracle(name, F32, x)
    assert counts.largest_error == float(np.uint32(0x7F000000).view(np.float32))
    assert counts.squared == pytest.approx(plain.squared + 4)
    assert counts.squared_error == pytest.approx(plain.squared_error + 2)
    assert (counts.nan, counts.inf, counts.overflowed) == (11, 21, 30)
    assert counts.largest == plain.largest


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 127])
def test_short_blocks(kind: Any, numel: int) -> None:
    """A short last block is as others; an odd code is followed by that of 0."""
    x = np.random.default_rng(numel).standard_normal(numel).astype(np.float32).astype(BF16.numpy)
    assert_same(quantized_there(kind, BF16, x), by_oracle(kind, BF16, x), kind)


def test_the_host_has_other_codes() -> None:
    """Where bitsandbytes' CPU and CUDA kernels differ, so do ours: blocks of zeros, for one."""
    zeros = np.zeros((1, 64), np.float32)
    host, _ = encoded(SCHEMES["nf4"], zeros, F32)
    assert (set(host[""]), set(quantized_there("nf4", F32, zeros)[0])) == ({0x77}, {0})


def test_blocks() -> None:
    """A row a block, eight blocks of elements a block, and no more than tell the tally quickly."""
    rows, fours = (there(name).of((1 << 20, 640), F32) for name in ("int8", "nf4"))
    assert [blocks(rows, 640 * n) for n in (0, 1, 9, 1 << 20)] == [1, 1, 9, 512]
    assert [blocks(fours, n) for n in (1, 512, 513, 1 << 29)] == [1, 1, 2, 512]
    assert [nested_blocks(n) for n in (1, 2048, 2049, 1 << 30)] == [1, 1, 2, 512]


@pytest.mark.parametrize("kernel", KERNELS, ids=kernel_id)
def test_the_text(kernel: tuple[str, DType]) -> None:
    """PTX of capability 6.0 that depends on nothing, and fuses no float32 operations."""
    name, src = kernel
    ptx = quant_ptx(there(name).of((64, 64), src), src)
    assert re.findall(r"^\.(?:version|target) .*", ptx, re.M) == [".version 6.0", ".target sm_60"]
    assert re.findall(r"\.entry (\w+)", ptx) == ["quantise"]
    assert len(re.findall(r"\.param \.u64 quantise_param_\d", ptx)) == 6
    assert not re.search(r"\.(extern|func)\b|\bcall\b|fma\.rn\.f32|mad\.rn", ptx)
    assert not re.search(r"(?<![.\w])(add|sub|mul)\.f", ptx)  # without .rn, two may become one
    approximate = re.findall(r"\w+\.approx[.\w]*", ptx)
    expected = {"nf4", "fp4", "bitsandbytes-int8"}
    assert approximate == (["rcp.approx.ftz.f32"] if name in expected else [])


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's assembler is not installed")
def test_the_assembler_takes_it(tmp_path: Path) -> None:
    """NVIDIA's own translation accepts every kernel, and finds registers for all of it."""
    for name, src in KERNELS:
        path = tmp_path / f"{name}-{src.code}.ptx"
        path.write_text(quant_ptx(there(name).of((64, 64), src), src))
        command = ["ptxas", "-v", "-arch=sm_90", path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr


def nested_there(values: Array, offset: np.float32) -> tuple[Array, Array]:
    count = -(-values.size // dynamic.BLOCK)
    scales = 1280 + -(-values.nbytes // 256) * 256
    out = scales + 256 * (count // 64 + 1)
    memory = np.full(out + values.size + 256, FILL, np.uint8)
    memory[:1024] = dynamic.dynamic_map().view(np.uint8)
    memory[1280 : 1280 + values.nbytes] = values.view(np.uint8)
    expected = memory.copy()
    machine = Machine(nested_ptx(), memory, BASE)
    bits = int(offset.view(np.uint32))
    addresses = (BASE + 1280, BASE + out, values.size, bits, BASE + scales, BASE)
    machine.launch(nested_blocks(values.size), BLOCK_THREADS, addresses)
    for some in (slice(out, out + values.size), slice(scales, scales + 4 * count)):
        expected[some] = memory[some]
    assert np.array_equal(memory, expected), "written beside the codes"
    codes = memory[out : out + values.size].copy()
    return codes, memory[scales : scales + 4 * count].copy().view(np.float32)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 3000])
def test_nested_statistics(numel: int) -> None:
    values = np.abs(np.random.default_rng(numel).standard_normal(numel).astype(np.float32))
    values[::7] = 0
    offset = np.float32(values.mean())
    codes, scales = nested_there(values, offset)
    expected_codes, expected_scales = dynamic.quantized(values - offset, "cuda")
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(scales, expected_scales)


def test_nested_equal_statistics() -> None:
    """Where all statistics are their mean, codes are 0, as CUDA's are of NaN."""
    codes, scales = nested_there(np.full(300, 0.25, np.float32), np.float32(0.25))
    assert not codes.any()
    assert not scales.any()
