"""The kernels for CUDA, run without a GPU by a machine for PTX.

What only a GPU can show is in test_ptx_cuda.py.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from cast_reference_helpers import CASTS, Bits, as_bits, pair_id, samples, tallied
from ptx_machine import Ahead, Machine

from streamload.codecs.cast_cuda import blocks, cast_ptx
from streamload.codecs.floats import PAIRS, flush_stop, lossless, overflow_start
from streamload.codecs.ptx import BLOCK_THREADS, compile_ptx
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, F64, DType
from streamload.devices.cuda import load_function
from streamload.errors import DeviceError, UnsupportedCastError

BASE = 0x7F_0000_0000  # the address of the first byte of memory
TALLY = 0  # where the tally is, from there
FILL = 0xA5
LARGEST = 60_000  # as many samples go through the machine: others are seen by the GPU


def cast_there(
    src: DType,  # dtype of ``x``
    dst: DType,  # what it is cast to
    x: Bits,  # the elements, as integers
    *,
    clamp: bool = False,  # see `cast_ptx`
    # elements between a multiple of 256 and the source, and the target
    shifts: tuple[int, int] = (0, 0),
    in_place: bool = False,  # the target is the source
    grid: int | None = None,  # how many blocks; as many as suggested without
    tally: tuple[int, int, int] = (0, 0, 0),  # what it is before
    ahead: Ahead = None,  # see `Machine.launch`
) -> tuple[Bits, tuple[int, ...]]:
    """What a kernel makes of elements, and the tally after it; nothing else may be written."""
    start = 256 + shifts[0] * src.itemsize
    out = -(-(start + x.nbytes + 1) // 256) * 256 + shifts[1] * dst.itemsize
    out = start if in_place else out
    stop = out + x.size * dst.itemsize
    memory = np.full(max(stop, start + x.nbytes) + 256, FILL, np.uint8)
    memory[start : start + x.nbytes] = x.view(np.uint8)
    memory[TALLY : TALLY + 24] = np.array(tally, np.uint64).view(np.uint8)
    expected = memory.copy()

    machine = Machine(cast_ptx(src, dst, clamp=clamp), memory, BASE)
    told = 0 if lossless(src, dst) else BASE + TALLY
    arguments = (BASE + start, BASE + out, x.size, told)
    chosen = blocks(x.size) if grid is None else grid
    machine.launch(chosen, BLOCK_THREADS, arguments, ahead=ahead)

    expected[out:stop] = memory[out:stop]
    expected[TALLY : TALLY + 24] = memory[TALLY : TALLY + 24]
    assert np.array_equal(memory, expected), "written beside the target"
    counts = memory[TALLY : TALLY + 24].view(np.uint64).tolist()
    return as_bits(bytearray(memory[out:stop].tobytes()), dst), tuple(counts)


def some(dtype: DType, numel: int) -> Bits:
    """Some of the samples of a dtype, in no order."""
    x = samples(dtype)
    return np.random.default_rng(2).choice(x, numel, replace=numel > x.size)


def kernel_id(kernel: tuple[DType, DType, bool]) -> str:
    src, dst, clamp = kernel
    return f"{src.code}-{dst.code}-{'clamp' if clamp else 'inf'}"


@pytest.mark.parametrize("kernel", CASTS, ids=kernel_id)
def test_kernels_equal_the_reference(kernel: tuple[DType, DType, bool]) -> None:
    src, dst, clamp = kernel
    x = samples(src)
    x = x if x.size <= 1 << 16 else some(src, LARGEST)
    before = (10, 20, 1 << 40)
    bits, tally = cast_there(src, dst, x, clamp=clamp, tally=before)
    expected, counts = tallied(src, dst, x, clamp)
    assert np.array_equal(bits, expected)
    assert tally == tuple(a + b for a, b in zip(before, counts, strict=True))


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_every_length_and_alignment(pair: tuple[DType, DType]) -> None:
    src, dst = pair
    x = some(src, 80)
    bits, _ = tallied(src, dst, x)
    width = 16 // max(src.itemsize, dst.itemsize)
    for numel in (0, 1, *range(width - 1, width + 2), 2 * width, 2 * width + 1, 79, 80):
        for shifts in {(0, 0), (1, 1), (width - 1, width - 1), (0, 1), (1, 0), (3, 2)}:
            found, tally = cast_there(src, dst, x[:numel], shifts=shifts)
            assert np.array_equal(found, bits[:numel]), (numel, shifts)
            assert tally == tallied(src, dst, x[:numel])[1], (numel, shifts)


@pytest.mark.parametrize("pair", [(BF16, F16), (F16, BF16)], ids=pair_id)
@pytest.mark.parametrize("shift", [0, 1, 7])
def test_in_place(pair: tuple[DType, DType], shift: int) -> None:
    """Where elements keep their size the target may be the source."""
    x = some(pair[0], 5003)
    found = cast_there(*pair, x, in_place=True, shifts=(shift, 0))
    bits, counts = tallied(*pair, x)
    assert np.array_equal(found[0], bits)
    assert found[1] == counts


@pytest.mark.parametrize("grid", [1, 2, 7, 40])
@pytest.mark.parametrize("shifts", [(3, 3), (0, 1)], ids=["vectors", "one by one"])
def test_any_grid(grid: int, shifts: tuple[int, int]) -> None:
    """Fewer blocks than there is work for go on in strides; more have nothing to do."""
    x = some(F32, 20_011)
    found = cast_there(F32, F16, x, grid=grid, shifts=shifts)
    bits, counts = tallied(F32, F16, x)
    assert np.array_equal(found[0], bits)
    assert found[1] == counts


@pytest.mark.parametrize("ahead", ["first", "last"])
def test_warps_that_come_apart(ahead: Ahead) -> None:
    """In whatever order warps run, a block's counts are begun, summed and told in theirs."""
    x = some(BF16, 5003)
    found = cast_there(BF16, F16, x, ahead=ahead, shifts=(1, 1))
    bits, counts = tallied(BF16, F16, x)
    assert np.array_equal(found[0], bits)
    assert found[1] == counts


@pytest.mark.parametrize(
    ("numel", "expected"), [(0, 1), (1, 1), (2048, 1), (2049, 2), (1 << 20, 512), (1 << 40, 2048)]
)
def test_blocks(numel: int, expected: int) -> None:
    """At least one, at most as many as a device runs at once, and else eight elements a thread."""
    assert blocks(numel) == expected


@pytest.mark.parametrize("kernel", CASTS, ids=kernel_id)
def test_the_text(kernel: tuple[DType, DType, bool]) -> None:
    """Old PTX that depends on nothing, and rounds each element once with subnormals kept."""
    src, dst, clamp = kernel
    counted = not lossless(src, dst)
    ptx = cast_ptx(src, dst, clamp=clamp)
    assert re.findall(r"^\.(?:version|target) .*", ptx, re.M) == [".version 6.0", ".target sm_50"]
    assert re.findall(r"\.entry (\w+)", ptx) == ["cast"]
    assert len(re.findall(r"\.param \.u64 cast_param_\d", ptx)) == 4
    assert not re.search(r"\.(extern|func)\b|\b(call|fma|mad\.rn|ex2|div)\b|\.ftz|\.approx", ptx)
    assert not re.search(r"\b(add|sub|mul)\.f", ptx)  # without .rn, two may become one
    roundings = set(re.findall(r"cvt\.r\w+\.f\d\d\.f\d\d", ptx))
    allowed = {"F16": {"cvt.rn.f16.f32"}, "F32": {"cvt.rn.f32.f64"} if src == F64 else set()}
    via_odd = {"cvt.rn.f32.f64"} if src == F64 else set()
    assert roundings <= allowed.get(dst.code, set()) | via_odd
    assert ("cvt.rn.f16.f32" in roundings) == (dst == F16)
    sides = {"ld": src, "st": dst}
    wider = max(sides, key=lambda side: sides[side].itemsize)
    assert re.search(rf"{wider}\.global\.(v4\.\w32|v2\.\w64)", ptx)
    assert ("atom.global.add.u64" in ptx) == counted
    kinds = (overflow_start(src, dst), flush_stop(src, dst), 1)  # those that there can be
    assert ptx.count("atom.shared.add.u32") == counted * sum(k is not None for k in kinds)


def test_options_that_make_no_difference() -> None:
    """Where nothing can overflow there is one kernel."""
    for src, dst in ((BF16, F32), (F16, BF16)):
        assert cast_ptx(src, dst, clamp=True) == cast_ptx(src, dst, clamp=False)


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's assembler is not installed")
def test_the_assembler_takes_it(tmp_path: Path) -> None:
    """NVIDIA's own translation accepts every kernel, and finds registers for all of it."""
    for src, dst in PAIRS:
        path = tmp_path / f"{src.code}-{dst.code}.ptx"
        path.write_text(cast_ptx(src, dst, clamp=True))
        command = ["ptxas", "-v", "-arch=sm_90", path, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr


@pytest.mark.parametrize("pair", [(BF16, BF16), (F16, BY_CODE["F8_E4M3"]), (BY_CODE["I32"], F32)])
def test_refuses_pairs_without_a_kernel(pair: tuple[DType, DType]) -> None:
    with pytest.raises(UnsupportedCastError, match=f"{pair[0]}.*there is no such kernel"):
        cast_ptx(*pair, clamp=False)


def test_says_that_llvmlite_is_missing(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["llvmlite"] = None  # as good as not installed
from streamload.codecs.cast_cuda import cast_ptx
from streamload.core.dtypes import BF16, F16
from streamload.errors import UnsupportedCastError
try:
    cast_ptx(BF16, F16, clamp=False)
except UnsupportedCastError as error:
    assert isinstance(error.__cause__, ImportError)
    print(error)
"""
    said = forked.fresh(program, XDG_CACHE_HOME=str(tmp_path))
    assert "cannot cast bfloat16 to float16: no CUDA kernel without llvmlite" in said


def test_a_target_that_llvm_was_built_without() -> None:
    with pytest.raises(RuntimeError, match="sparse64"):
        compile_ptx("", triple="sparse64-unknown-none")


class RecordingDriver:
    """Notes what it is asked to load; the call ``refuse`` fails, with ``log`` of the compiler."""

    def __init__(self, refuse: str = "", log: bytes = b"") -> None:
        self.slow = self
        self.calls: list[tuple[str, object]] = []
        self._refuse, self._log = refuse, log

    def reason(self, status: int) -> str:
        return f"status {status}"

    def _called(self, name: str, what: object) -> int:
        self.calls.append((name, what))
        return 218 if name == self._refuse else 0

    def cuModuleLoadDataEx(
        self, module: Any, image: bytes, count: int, options: Any, values: Any
    ) -> int:
        asked = dict(zip(options[:count], values[:count], strict=True))
        log = self._log[: asked[6] - 1] + b"\0"  # CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
        ctypes.memmove(asked[5], log, len(log))  # CU_JIT_ERROR_LOG_BUFFER
        ctypes.cast(module, ctypes.POINTER(ctypes.c_void_p))[0] = 11
        return self._called("load", image)

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        ctypes.cast(function, ctypes.POINTER(ctypes.c_void_p))[0] = 22
        return self._called("get", (module.value, name))

    def cuModuleUnload(self, module: Any) -> int:
        return self._called("unload", module.value)


def test_a_function_is_loaded() -> None:
    driver = RecordingDriver()
    function = load_function(driver, "cuda:0", "// text")
    assert (function.module, function.handle) == (11, 22)
    assert driver.calls == [("load", b"// text"), ("get", (11, b"cast"))]


def test_a_refused_text_says_why() -> None:
    """The error has the driver's status, and what its compiler wrote, however much that is."""
    driver = RecordingDriver("load", b"ptxas fatal :\n  Unresolved extern function 'foo'\n")
    expected = "cuModuleLoadDataEx: status 218: ptxas fatal : Unresolved extern function 'foo'"
    with pytest.raises(DeviceError, match=re.escape(expected)):
        load_function(driver, "cuda:0", "// text")
    with pytest.raises(DeviceError, match="x" * 1000):
        load_function(RecordingDriver("load", b"x" * 10**6), "cuda:0", "// text")
    with pytest.raises(DeviceError, match=r"status 218$"):
        load_function(RecordingDriver("load"), "cuda:0", "// text")


def test_a_function_that_is_not_there() -> None:
    """The error names it, and the module is unloaded."""
    driver = RecordingDriver("get")
    with pytest.raises(DeviceError, match="cuModuleGetFunction: other: status 218"):
        load_function(driver, "cuda:0", "// text", "other")
    assert driver.calls[-1] == ("unload", 11)
