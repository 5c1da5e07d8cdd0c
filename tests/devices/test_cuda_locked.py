"""`devices.cuda_copies`, with a small C library in the place of CUDA's driver.

It refuses copies from memory that is not locked, and runs them when somebody waits for them.
"""

from __future__ import annotations

from pathlib import Path

import cuda_stand_in
import numpy as np
import pytest

PRELUDE = """
import ctypes, os, sys
import numpy as np
from streamload.core import memory
from streamload.devices import cuda_copies
from streamload.devices.base import Copy, Read, ReadTable
from streamload.devices.cuda import Context, DeviceMemory, _driver
from streamload.devices.cuda_copies import _loop
from streamload.devices.cuda_copies import Refiller

path = sys.argv[1]
data = open(path, "rb").read()
cuda_copies._LEAST_NBYTES = 4000
driver = ctypes.CDLL("libcuda.so.1")
context = Context.primary("cuda:0", 0)
fd = os.open(path, os.O_RDONLY)
there = DeviceMemory(context, 2 * 2**20)

def count(name):
    return ctypes.c_int.in_dll(driver, name).value

# each a (file byte, bytes, byte on the device); two ranges of the file, with small gaps inside
PIECES = {
    "one": [(100, 5000, 0), (5100, 5000, 5000), (10_200, 4097, 10_240), (700_001, 90_000, 20_480)],
    "two": [(1_000_000, 300_000, 200_704)],
    "three": [(14_000, 8000, 600_064), (14_000, 8000, 608_256), (30_000, 300, 617_000)],
    "small": [(31_000, 9, 618_000), (90_000, 400, 618_100)],
}

def table(name):
    base = there.address
    return ReadTable.of([
        Read(start, nbytes, nbytes, (Copy(0, nbytes - 9, base + to),
                                     Copy(nbytes - 9, 9, base + to + nbytes - 9)))
        for start, nbytes, to in PIECES[name]
    ])

TABLES = {name: table(name) for name in PIECES}
refiller = Refiller(context, _loop(), 3, 2, 2**19)

def run(names, shift, locks=True):
    ctypes.memset(there.address, 0, 2 * 2**20)
    mark = refiller.next
    assert refiller.run(fd, [(TABLES[n], shift) for n in names], locks) is None
    mark.wait()
    found, expected = ctypes.string_at(there.address, 2 * 2**20), bytearray(2 * 2**20)
    for name in names:
        for start, nbytes, to in PIECES[name]:
            expected[to + shift : to + shift + nbytes] = data[start : start + nbytes]
    assert found == bytes(expected)
    if (thread := refiller._locked._thread) is not None:
        thread.join()

def end():
    refiller.close()
    there.close()
    assert not memory.LOCKED.nbytes
    left = {n: count(n) for n in ("registered", "streams", "events")}
    assert not any(left.values()), left
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of random bytes, in the page cache as it was just written."""
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(0).bytes(1_500_000))
    return path


def run(driver: Path, path: Path, code: str) -> None:
    cuda_stand_in.run(driver, PRELUDE + code, path)


def test_what_is_read_again_is_copied_from_locked_pages(driver: Path, path: Path) -> None:
    """With other tables that are not locked yet, to other addresses; and nothing is read then."""
    code = """
slots = count("registered")
run(["one"], 0)
assert not memory.LOCKED.nbytes
run(["one"], 512)
once = memory.LOCKED.nbytes
assert once and count("registered") == slots + 2, count("registered")
run(["one", "two"], 1024)
run(["two", "one", "three", "small"], 0)
run(["three", "small", "two", "one"], 4096)
run(["three", "small", "two", "one"], 5000)
assert count("registered") == slots + 4 and memory.LOCKED.nbytes > once  # not of "small"
lanes = [*refiller._team._lanes][3::4]
run(["three", "two", "one"], 0)
assert [*refiller._team._lanes][7::4] == lanes[1:]  # the other threads were not woken
end()
"""
    run(driver, path, code)


def test_what_may_not_or_cannot_be_locked_is_read(driver: Path, path: Path) -> None:
    """A reader that drops pages, too little memory, or a driver that refuses."""
    code = """
slots = count("registered")
for shift in range(3):
    run(["one"], shift, locks=False)
available, memory.available_host_nbytes = memory.available_host_nbytes, lambda: 100_000
for shift in range(3):
    run(["one", "two"], shift)
memory.available_host_nbytes = available
assert count("registered") == slots
ctypes.c_int.in_dll(driver, "locks_left").value = 1  # of the two ranges
for shift in range(3):
    run(["one", "two"], shift)
assert count("registered") == slots and not memory.LOCKED.nbytes
end()
"""
    run(driver, path, code)


def test_copies_wait_for_work_of_other_streams(driver: Path, path: Path) -> None:
    code = """
from types import SimpleNamespace
from streamload.devices.cuda import Event, PinnedStaging
zeros, stream = PinnedStaging(context, 300_000), ctypes.c_void_p()
at = there.address + 200_704
with context.current():
    context.call("cuStreamCreate", ctypes.byref(stream), 1)
    event = Event(context)
for locked in (False, False, True):
    assert refiller.is_locked(TABLES["two"]) is locked
    with context.current():
        context.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(at), ctypes.c_void_p(zeros.address),
                     ctypes.c_size_t(300_000), stream)
        context.call("cuEventRecord", event, stream)
    mark = refiller.next
    work = SimpleNamespace(events=(event,))
    assert refiller.run(fd, [(TABLES["two"], 0)], True, [work]) is None
    mark.wait()
    with context.current():
        context.call("cuStreamSynchronize", stream)
    assert ctypes.string_at(at, 300_000) == data[1_000_000:1_300_000]
    if (thread := refiller._locked._thread) is not None:
        thread.join()
with context.current():
    context.call("cuStreamDestroy_v2", stream)
del event, work, mark
zeros.close()
end()
"""
    run(driver, path, code)


def test_pages_are_unlocked_when_memory_is_short(driver: Path, path: Path) -> None:
    code = """
slots = count("registered")
for shift in range(3):
    run(["one", "two"], shift)
assert count("registered") == slots + 3
memory.available_host_nbytes = lambda: 350_000  # besides what is locked
memory.proc_fields = lambda path: {}  # what other processes have locked
refiller._locked._looked_s = -1e9
run(["one", "two"], 0)
assert count("registered") == slots + 1 and memory.LOCKED.nbytes < 350_000
run(["one", "two"], 77)
end()
"""
    run(driver, path, code)


def test_small_copies_are_read_into_slots_that_are_as_small(driver: Path, path: Path) -> None:
    """Reads that follow each other, in the file and on the device, would make a larger copy."""
    code = """
cuda_copies._LEAST_NBYTES = 2**18
PIECES["long"] = [(at, 60_000, 700_000 + at) for at in range(0, 240_000, 60_000)]
PIECES["long"] += [(400_000, 300_000, 1_200_000)]
few = Refiller(context, _loop(), 3, 2, 60_000)
def part(start, nbytes, to):  # a multiple of the slot
    n = 60_000
    return [Read(at, n, n, (Copy(0, n, there.address + to + at - start),))
            for at in range(start, start + nbytes, n)]
reads = ReadTable.of([each for piece in PIECES["long"] for each in part(*piece)])
for shift in (0, 9, 100, 1000):
    ctypes.memset(there.address, 0, 2 * 2**20)
    mark = few.next
    assert few.run(fd, [(reads, shift)], True) is None
    mark.wait()
    for start, nbytes, to in PIECES["long"]:
        place = there.address + to + shift
        assert ctypes.string_at(place, nbytes) == data[start : start + nbytes], (shift, start)
    if (thread := few._locked._thread) is not None:
        thread.join()
assert len(few._locked.find(reads).small.rows) == 4
few.close()
mark = None
end()
"""
    run(driver, path, code)


def test_descriptors_that_run_out_are_no_failure(driver: Path, path: Path) -> None:
    code = """
import resource
for each in PIECES:
    run([each], 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 1, 4096))
for _ in range(3):
    run([*PIECES], 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 4096))
assert not memory.LOCKED.nbytes
before = len(os.listdir("/proc/self/fd"))
end()
assert len(os.listdir("/proc/self/fd")) <= before
"""
    run(driver, path, code)
