"""Copies by the driver's calls, with a small C library in its place: host memory, in order.

What only a GPU can show is in test_torch_cuda.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import pytest

#: Every call checks what the real one would refuse: no current context, no stream, no such device.
DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int depth, retained, registered, streams, events;

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { if (index > 1) return 101; *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    retained++; *context = (void *)(intptr_t)(4096 + device); return 0;
}
int cuCtxPushCurrent_v2(void *context) { depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { depth--; *context = 0; return 0; }
int cuEventCreate(void **event, unsigned flags) { events++; *event = malloc(8); return 0; }
int cuEventDestroy_v2(void *event) { events--; free(event); return 0; }
int cuEventQuery(void *event) { return 600; }
int cuEventRecord(void *event, void *stream) { return depth && stream ? 0 : 201; }
int cuEventSynchronize(void *event) { return 0; }
int cuGetErrorString(int status, const char **text) { *text = "the stand-in refuses"; return 0; }
int cuMemHostRegister_v2(void *bytes, size_t n, unsigned flags) {
    if (!depth || n > 1 << 20) return 2;
    registered++; return 0;
}
int cuMemHostUnregister(void *bytes) { registered--; return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t n, void *stream) {
    if (!depth || !stream) return 201;
    memcpy((void *)target, source, n); return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { streams++; *stream = malloc(8); return 0; }
int cuStreamDestroy_v2(void *stream) { streams--; free(stream); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
"""

PRELUDE = """
import ctypes, os, sys
from streamload.devices import cuda
from streamload.devices.base import Read
from streamload.errors import AllocationError, DeviceError

driver = ctypes.CDLL("libcuda.so.1")

def count(name):
    return ctypes.c_int.in_dll(driver, name).value

def nothing_is_left():
    return [count(n) for n in ("depth", "registered", "streams", "events")] == [0, 0, 0, 0]

target = bytearray(10_000)
address = ctypes.addressof(ctypes.c_char.from_buffer(target))
context = cuda.Context.primary("cuda:1", 1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in for the driver's library is."""
    compiler = shutil.which("clang") or shutil.which("cc")
    if compiler is None:
        needs.lacking("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = [compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


def _run(folder: Path, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env=os.environ | {"LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_device_that_is_not_there_retains_no_context(folder: Path) -> None:
    """Each call is made only after the one before it has succeeded."""
    _run(
        folder,
        """
try:
    cuda.Context.primary("cuda:9", 9)
    sys.exit("not refused")
except DeviceError as error:
    assert "cuda:9" in str(error) and "cuDeviceGet: the stand-in refuses" in str(error), error
assert count("retained") == 1
""",
    )


def test_bytes_of_a_slot_are_copied_and_all_is_given_back(folder: Path) -> None:
    """At an offset of the slot, to an address, in the context; closing twice does no harm."""
    _run(
        folder,
        """
slot = cuda.PinnedStaging(context, 1000)
slot.view[:] = bytes(range(250)) * 4
context.copy(slot, 10, 500, address + 3)
slot.wait()
assert target[3:503] == (bytes(range(250)) * 4)[10:510] and not any(target[503:])
slot.close()
slot.close()
assert nothing_is_left()
""",
    )


def test_memory_that_cannot_be_locked_is_given_back(folder: Path) -> None:
    """With one error that says what was asked for."""
    _run(
        folder,
        """
try:
    cuda.PinnedStaging(context, 2**21)
    sys.exit("not refused")
except AllocationError as error:
    assert error.nbytes == 2**21 and "cuMemHostRegister" in str(error), error
assert nothing_is_left()
""",
    )


def test_many_reads_and_copies_in_one_call(folder: Path) -> None:
    """By the compiled loop, with the functions of the library itself."""
    _run(
        folder,
        """
data = os.urandom(10_000)
path = os.path.join(os.environ["LD_LIBRARY_PATH"], "data")
with open(path, "wb") as file:
    file.write(data)
slots = [cuda.PinnedStaging(context, 1000) for _ in range(2)]
bulk = cuda.bulk_copier(context, lambda buffer: buffer)
reads = [Read(at, 1000, 1000, ((0, 1000, address + at),)) for at in range(0, 10_000, 1000)]
with open(path, "rb") as file:
    assert bulk.run(file.fileno(), reads, slots, 0) is None
for slot in slots:
    bulk.ticket(slot).wait()
    slot.close()
assert target == data and nothing_is_left()
""",
    )
