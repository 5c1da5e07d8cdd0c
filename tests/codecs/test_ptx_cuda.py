"""The kernels on a GPU: bits and counts of the reference. Skipped on machines without one."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import pytest
from cast_reference_helpers import CASTS, Bits, as_bits, pair_id, samples, tallied
from ptx_cuda_helpers import FILL, Gpu, gpu

from streamload.codecs.cast_cuda import blocks, cast_ptx
from streamload.codecs.floats import PAIRS, lossless
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.dtypes import BF16, F16, F32, DType
from streamload.devices import cuda
from streamload.devices.cuda import load_function
from streamload.errors import DeviceError

__all__ = ["gpu"]


@cache
def kernel(src: DType, dst: DType, clamp: bool = False) -> int:
    ptx = cast_ptx(src, dst, clamp=clamp)
    return load_function(cuda._driver(), "cuda:0", ptx).handle


def cast_there(
    gpu: Gpu,
    src: DType,
    dst: DType,
    x: Bits,
    *,
    clamp: bool = False,
    shifts: tuple[int, int] = (0, 0),
    in_place: bool = False,
    grid: int | None = None,
    tally: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Bits, tuple[int, ...]]:
    """What a kernel makes of elements, and the tally after it; nothing else may be written."""
    start = 256 + shifts[0] * src.itemsize
    out = -(-(start + x.nbytes + 1) // 256) * 256 + shifts[1] * dst.itemsize
    out = start if in_place else out
    stop = out + x.size * dst.itemsize
    expected = np.full(max(stop, start + x.nbytes) + 256, FILL, np.uint8)
    expected[start : start + x.nbytes] = x.view(np.uint8)
    expected[:24] = np.array(tally, np.uint64).view(np.uint8)
    gpu.put(0, expected)

    chosen = blocks(x.size) if grid is None else grid
    told = 0 if lossless(src, dst) else gpu.address
    handle = kernel(src, dst, clamp)
    gpu.launch(handle, chosen, (gpu.address + start, gpu.address + out, x.size, told))
    found = gpu.get(0, expected.size)

    expected[out:stop] = found[out:stop]
    expected[:24] = found[:24]
    beside = np.flatnonzero(found != expected)
    assert not beside.size, f"written beside the target, from byte {beside[0] - out} of it"
    counts = found[:24].view(np.uint64).tolist()
    return as_bits(bytearray(found[out:stop].tobytes()), dst), tuple(counts)


def check(
    found: tuple[Bits, tuple[int, ...]],
    expected: tuple[Bits, tuple[int, ...]],
    x: Bits,
    case: object = "",
) -> None:
    """The same elements and counts; else show some that are not."""
    wrong = np.flatnonzero(found[0] != expected[0])
    shown = [f"[{i}] {x[i]:#x} became {found[0][i]:#x}, not {expected[0][i]:#x}" for i in wrong[:8]]
    assert not shown, f"{case}: {wrong.size} of {x.size} differ: {'; '.join(shown)}"
    assert found[1] == expected[1], f"{case}: overflowed, flushed, changed"


@pytest.mark.parametrize(
    "case", CASTS, ids=lambda c: f"{c[0].code}-{c[1].code}-{'clamp' if c[2] else 'inf'}"
)
def test_kernels_equal_the_reference(gpu: Gpu, case: tuple[DType, DType, bool]) -> None:
    src, dst, clamp = case
    x = samples(src)
    bits, counts = tallied(src, dst, x, clamp)
    before = (10, 20, 1 << 40)
    after = tuple(a + b for a, b in zip(before, counts, strict=True))
    shuffled = np.random.default_rng(0).permutation(x.size)
    for order in (np.arange(x.size), shuffled):
        found = cast_there(gpu, src, dst, x[order], clamp=clamp, tally=before)
        check(found, (bits[order], after), x[order])


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_every_length_and_alignment(gpu: Gpu, pair: tuple[DType, DType]) -> None:
    src, dst = pair
    x = np.random.default_rng(2).choice(samples(src), 6000)
    bits, _ = tallied(src, dst, x)
    width = 16 // max(src.itemsize, dst.itemsize)
    for shifts in {(0, 0), (1, 1), (width - 1, width - 1), (0, 1), (1, 0), (3, 2), (2, 1)}:
        for numel in (*range(2 * width + 3), 255, 256, 257, 2047, 2049, 5999, 6000):
            found = cast_there(gpu, src, dst, x[:numel], shifts=shifts)
            counts = tallied(src, dst, x[:numel])[1]
            check(found, (bits[:numel], counts), x[:numel], (numel, shifts))


@pytest.mark.parametrize("clamp", [False, True], ids=["inf", "clamp"])
@pytest.mark.parametrize("pair", [(BF16, F16), (F16, BF16)], ids=pair_id)
def test_in_place(gpu: Gpu, pair: tuple[DType, DType], clamp: bool) -> None:
    """Where elements keep their size the target may be the source, wherever that begins."""
    x = samples(pair[0])
    for shift in range(9):
        for part in (x, x[: -1 - shift], x[30_000 : 30_000 + 7 * shift]):
            found = cast_there(gpu, *pair, part, clamp=clamp, in_place=True, shifts=(shift, 0))
            check(found, tallied(*pair, part, clamp), part, (part.size, shift))


@pytest.mark.parametrize("shifts", [(3, 3), (0, 1)], ids=["vectors", "one by one"])
def test_any_grid(gpu: Gpu, shifts: tuple[int, int]) -> None:
    """Fewer blocks than there is work for go on in strides; more have nothing to do."""
    x = samples(F32)
    expected = tallied(F32, F16, x)
    for grid in (1, 2, 7, 131, 5000, 100_000):
        found = cast_there(gpu, F32, F16, x, grid=grid, shifts=shifts)
        check(found, expected, x, grid)


@pytest.mark.parametrize("code", [0x4780, 0x0001, 0x3301])
def test_long_tensors_are_counted(gpu: Gpu, code: int) -> None:
    """Many elements that all overflow, vanish or are rounded, cast in place."""
    x = np.full(100_000_003, code, np.uint16)
    _, tally = cast_there(gpu, BF16, F16, x, in_place=True)
    assert tally == (x.size * (code == 0x4780), x.size * (code == 0x0001), x.size)


def test_launches_share_a_tally(gpu: Gpu) -> None:
    """Kernels that run one after the other, or at once, add up."""
    x = np.full(1_000_003, 0x3301, np.uint16)
    gpu.put(0, np.zeros(256, np.uint8))
    streams = [ctypes.c_void_p() for _ in range(8)]
    gpu.put(256, x)
    out = gpu.address + 4 * 2**20
    values = [ctypes.c_uint64(v) for v in (gpu.address + 256, 0, x.size, gpu.address)]
    pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in values))
    shape = (blocks(x.size), 1, 1, BLOCK_THREADS, 1, 1)
    for index, stream in enumerate(streams):
        gpu.call("cuStreamCreate", ctypes.byref(stream), 1)
        values[1].value = out + index * 4 * 2**20
        for _ in range(10):  # parameters are read when the launch returns
            gpu.call("cuLaunchKernel", kernel(BF16, F16), *shape, 0, stream, pointers, None)
    for stream in streams:
        gpu.call("cuStreamSynchronize", stream)
        gpu.call("cuStreamDestroy_v2", stream)
    assert gpu.get(0, 24).view(np.uint64).tolist() == [0, 0, 80 * x.size]


def test_a_refused_text_says_why(gpu: Gpu) -> None:
    """The driver's compiler is quoted, and so is the name of a function that is not there."""
    good = cast_ptx(BF16, F16, clamp=False)
    with pytest.raises(DeviceError, match=r"cuModuleLoadDataEx: .*cvt") as caught:
        load_function(cuda._driver(), "cuda:0", good.replace("cvt.rn.f16.f32", "cvt.none.f16.f32"))
    print(f"\nrefused as: {caught.value}")
    with pytest.raises(DeviceError, match="cuModuleGetFunction: other"):
        load_function(cuda._driver(), "cuda:0", good, "other")
