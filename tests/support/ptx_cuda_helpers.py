"""Helpers that `test_ptx_cuda` shares with other tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cast_reference_helpers import Bits

from streamload.codecs.ptx import BLOCK_THREADS
from streamload.devices import cuda
from streamload.errors import DeviceError

try:
    CONTEXT = cuda.Context.primary("cuda:0", 0)
except (OSError, DeviceError) as error:  # CI has none: what needs no GPU is in test_devices_ptx.py
    pytest.skip(f"no CUDA device here: {error}", allow_module_level=True)

FILL = 0xA5

MEMORY_NBYTES = 640 * 2**20  # the longest samples, and more chunks than any cache holds

BUSY_NBYTES = 128 * 2**20  # at the end of it, to keep the device busy with


class Gpu:
    """Memory of the device, and launches on the null stream."""

    def __init__(self, nbytes: int) -> None:
        self._driver = cuda._driver()
        self._timing = ctypes.CDLL("libcuda.so.1")  # what the library itself has no use for
        self._timing.cuEventElapsedTime.argtypes = (
            ctypes.POINTER(ctypes.c_float),
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        self.address, self.nbytes = address.value, nbytes

    def call(self, name: str, *arguments: object) -> None:
        CONTEXT.check(getattr(self._driver.slow, name)(*arguments), name)

    def put(self, at: int, data: Bits) -> None:
        whole = np.ascontiguousarray(data)
        assert at + whole.nbytes <= self.nbytes
        self.call("cuMemcpyHtoDAsync_v2", self.address + at, whole.ctypes.data, whole.nbytes, None)
        self.call("cuStreamSynchronize", None)

    def get(self, at: int, nbytes: int) -> Bits:
        assert at + nbytes <= self.nbytes
        out = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoHAsync_v2", out.ctypes.data, self.address + at, nbytes, None)
        self.call("cuStreamSynchronize", None)
        return out

    def launch(self, handle: int, grid: int, arguments: tuple[int, ...]) -> None:
        count = len(arguments)
        values = (ctypes.c_uint64 * count)(*arguments)
        begin = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(begin, begin + 8 * count, 8))
        self.call(
            "cuLaunchKernel", handle, grid, 1, 1, BLOCK_THREADS, 1, 1, 0, None, pointers, None
        )

    def microseconds(self, work: Callable[[], None]) -> float:
        """How long the device takes from the first to the last thing that is begun.

        It is kept busy until all has been begun: what Python takes for that is not measured.
        """
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self.call("cuEventCreate", ctypes.byref(event), 0)
        for _ in range(150):  # some milliseconds
            end = self.address + self.nbytes
            self.call("cuMemsetD8Async", end - BUSY_NBYTES, FILL, BUSY_NBYTES, None)
        self.call("cuEventRecord", events[0], None)
        work()
        self.call("cuEventRecord", events[1], None)
        self.call("cuEventSynchronize", events[1])
        elapsed = ctypes.c_float()
        status = self._timing.cuEventElapsedTime(ctypes.byref(elapsed), *events)
        CONTEXT.check(status, "cuEventElapsedTime")
        for event in events:
            self.call("cuEventDestroy_v2", event)
        return elapsed.value * 1000

    def close(self) -> None:
        self.call("cuMemFree_v2", self.address)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    with CONTEXT.current():
        gpu = Gpu(MEMORY_NBYTES)
        yield gpu
        gpu.close()
