"""Copies, casts and windows by the driver's calls, with a strict stand-in in the driver's place.

What only a GPU can show is in test_torch_cuda.py, test_tinygrad_cuda.py and test_ptx_cuda.py.
"""

from __future__ import annotations

from pathlib import Path

import cuda_stand_in
import pytest

PRELUDE = """
import ctypes, os, struct, sys, tempfile
import cuda_stand_in
from streamload.devices import cuda
from streamload.devices.cuda_copies import Copies
from streamload.devices.base import Copy, Read
from streamload.core.dtypes import BY_CODE
from streamload.errors import AllocationError, DeviceError, UnsupportedCastError

driver = ctypes.CDLL("libcuda.so.1")
context = cuda.Context.primary("cuda:1", 1)
bulk = Copies(context, lambda buffer: buffer).bulk

def count(name):
    return ctypes.c_int.in_dll(driver, name)

def check_clean():
    left = {n: count(n).value for n in ("registered", "streams", "events")}
    assert not any(left.values()), left
    used = (ctypes.c_size_t * 2).in_dll(driver, "used_nbytes")
    assert list(used) == [0, 0], list(used)

def file_of(data):
    file = tempfile.TemporaryFile()
    file.write(data)
    file.flush()
    return file
"""


def _run(driver: Path, code: str) -> None:
    cuda_stand_in.run(driver, PRELUDE + code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("driver.cuEventDestroy_v2(event)\nevent.wait()", "cuEventQuery: an event that was des"),
        (
            "stream = slot.stream\nslot.close()\ncall('cuStreamSynchronize', stream)",
            "cuStreamSynchronize: a stream that was destroyed",
        ),
        (
            "address = slot.address\nslot.close()\ncall('cuMemcpyHtoDAsync_v2', memory.address, "
            "address, 8, 0)",
            "a copy: from memory that is not locked",
        ),
        (
            "context.copy(slot, 0, 8, memory.address)\ncall('cuMemFree_v2', memory.address)",
            "cuMemFree: a copy of this memory has not ended",
        ),
        (
            "address = memory.address\nmemory.close()\ncontext.copy(slot, 0, 8, address)",
            "a copy: to memory that is not this context's",
        ),
        (
            "kernels = cuda_stand_in.Kernels(driver, [(BY_CODE['BF16'], BY_CODE['F16'])])\n"
            "kernel = bulk.kernel(BY_CODE['BF16'], BY_CODE['F16'], True)\n"
            "call('cuModuleUnload', kernel)\nmemory.run(kernel, 1, [memory.address] * 4)",
            "cuLaunchKernel: a module that was destroyed",
        ),
        (
            "driver.cuCtxDestroy_v2(ctypes.c_void_p(context.handle))\nslot.close()",
            "cuCtxPushCurrent: a context that was destroyed",
        ),
    ],
)
def test_what_was_destroyed_may_not_be_used(code: str, said: str, driver: Path) -> None:
    with pytest.raises(AssertionError, match=f"the stand-in of CUDA's driver: {said}"):
        _run(
            driver,
            """
slot, memory = cuda.PinnedStaging(context, 100), bulk.memory(100)
event = slot.event

def call(name, *arguments):
    with context.current():
        context.call(name, *arguments)

"""
            + code,
        )


def test_a_device_that_is_not_there_is_named(driver: Path) -> None:
    code = """
try:
    cuda.Context.primary("cuda:9", 9)
    sys.exit("not refused")
except DeviceError as error:
    assert "cuda:9" in str(error) and "cuDeviceGet: the stand-in refuses" in str(error), error
"""
    _run(driver, code)


def test_bytes_of_a_slot_are_copied_and_all_is_given_back(driver: Path) -> None:
    code = """
slot, memory = cuda.PinnedStaging(context, 1000), bulk.memory(2000)
assert memory.read(0, 2000) == bytes(2000)
slot.view[:] = bytes(range(250)) * 4
context.copy(slot, 10, 500, memory.address + 3)
slot.event.wait()
out = memory.read(0, 2000)
assert out[3:503] == (bytes(range(250)) * 4)[10:510] and not any(out[503:]) and not any(out[:3])
assert memory.read(3, 8) == out[3:8]
for closed in (slot, slot, memory, memory):
    closed.close()
check_clean()
"""
    _run(driver, code)


def test_memory_that_cannot_be_had_is_given_back(driver: Path) -> None:
    code = """
count("locks_left").value = 0
try:
    cuda.PinnedStaging(context, 2**21)
    sys.exit("not refused")
except AllocationError as error:
    assert error.nbytes == 2**21 and "cuMemHostRegister" in str(error), error
try:
    bulk.memory(2**40)
    sys.exit("not refused")
except AllocationError as error:
    assert error.nbytes == 2**40 and "cuMemAlloc: out of memory" in str(error), error
check_clean()
"""
    _run(driver, code)


def test_many_reads_and_copies_in_one_call(driver: Path) -> None:
    code = """
data = os.urandom(10_000)
memory = bulk.memory(10_000)
slots = [cuda.PinnedStaging(context, 1000) for _ in range(2)]
reads = [
    Read(at, 1000, 1000, (Copy(0, 1000, memory.address + at),)) for at in range(0, 10_000, 1000)
]
with file_of(data) as file:
    assert bulk.run(file.fileno(), reads, slots, 0) is None
for slot in slots:
    bulk.ticket(slot).wait()
    slot.close()
assert memory.read(0, 10_000) == data
memory.close()
check_clean()
"""
    _run(driver, code)


def test_threads_fill_buffers_again_and_again(driver: Path) -> None:
    code = """
from streamload.devices.base import ReadTable
data = os.urandom(100_000)
memory = bulk.memory(200_000)
refiller = bulk.refiller(3, 2, 1000)
reads = [
    Read(at, 1000, 1000, (Copy(0, 1000, memory.address + at),)) for at in range(0, 100_000, 1000)
]
table = ReadTable.of(reads)
with file_of(data) as file:
    for shift in (0, 100_000, 3, 50_000, 70_000):
        ticket = refiller.next
        assert refiller.run(file.fileno(), [(table, shift)], False) is None
        assert refiller.next is not ticket
        ticket.wait()
        assert memory.read(shift, shift + 100_000) == data
    none = ReadTable.of([Read(10**6, 10, 10, ())])
    assert refiller.run(file.fileno(), [(none, 0)], False).stage == "end"
    count("copies_left").value = 5
    failure = refiller.run(file.fileno(), [(table, 0)], False)
    assert (failure.stage, failure.code) == ("copy", 719), failure
    count("copies_left").value = -1
    ticket = refiller.next
    assert refiller.run(file.fileno(), [(table, 0)], False) is None
    ticket.wait()
refiller.close()
ticket.wait()  # it outlives what it is of
del ticket
memory.close()
check_clean()
count("locks_left").value = 3
try:
    bulk.refiller(3, 2, 1000)
    sys.exit("not refused")
except AllocationError as error:
    assert "cuMemHostRegister" in str(error), error
check_clean()
"""
    _run(driver, code)


def test_what_was_copied_is_cast_on_the_device(driver: Path) -> None:
    code = """
F32, F16, BF16 = (BY_CODE[code] for code in ("F32", "F16", "BF16"))
kernels = cuda_stand_in.Kernels(driver, [(BF16, F16), (F16, F32)])
narrow, widen = bulk.kernel(BF16, F16, True), bulk.kernel(F16, F32, False)
assert bulk.kernel(BF16, F16, True) == narrow
try:
    bulk.kernel(F32, BF16, False)
    sys.exit("not refused")
except DeviceError as error:
    assert "cuModuleLoadDataEx" in str(error), error

memory = bulk.memory(4096)
slot = cuda.PinnedStaging(context, 1000)
values = struct.pack("<4H", 0x3F80, 0x7F00, 0xFF00, 0x0001)  # 1, two too large, one too small
slot.view[:8] = values
slot.view[8:12] = struct.pack("<2e", 1.5, -2.0)
place, scratch, tally = memory.address, memory.address + 512, memory.address + 1024
copies = (
    Copy(0, 8, place, narrow, 4, place, tally, 1),
    Copy(8, 4, scratch, widen, 2, place + 8, tally + 24, 1),
    Copy(0, 8, place + 16),
)
assert bulk.run(0, [Read(0, 0, 0, copies)], [slot], 0) is None
slot.event.wait()
assert memory.read(0, 8) == struct.pack("<4H", 0x3C00, 0x7BFF, 0xFBFF, 0)
assert memory.read(8, 16) == struct.pack("<2f", 1.5, -2.0)
assert memory.read(16, 24) == values
assert struct.unpack("<6Q", memory.read(1024, 1072)) == (2, 1, 3, 0, 0, 0)
slot.close()
memory.close()
check_clean()
"""
    _run(driver, code)
