"""Windows on mapped files as the stream uses them, with a strict stand-in for CUDA's driver.

The devices are tinygrad's, in child processes: what fails is a real file, a real limit of address
space, or a lock that the stand-in refuses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cuda_stand_in
import numpy as np
import pytest
from bench_parts.section import forget
from boxes import Boxes
from safetensors_files import write_safetensors

PRELUDE = """
import ctypes, json, os, resource, sys, threading, time
import streamload
from streamload.devices import base, cuda, probing
from streamload.errors import FileChangedError
from tinygrad import Device

path = sys.argv[1]
driver = ctypes.CDLL("libcuda.so.1")
probing._PROBES["tinygrad", "CUDA", False] = base.ProbeResult("CUDA", True)
Device["CUDA"]

def count(name):
    return ctypes.c_int.in_dll(driver, name)

def check_clean():
    wrong = (ctypes.c_char * 256).in_dll(driver, "violation").value.decode()
    assert not wrong, wrong
    left = {n: count(n).value for n in ("registered", "streams", "events")}
    assert not any(left.values()), left

def load(**arguments):
    return streamload.load_state_dict(
        None, path, device="CUDA", dtype="checkpoint", transfer="mapped", reader="mmap",
        progress=False, **arguments
    )

def truncate(nbytes):
    threading.Thread(target=os.truncate, args=(path, nbytes)).start()
    while "BREAKING" not in open("/proc/locks").read():  # held back by the reader's lease
        time.sleep(0.001)

def check(report):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    for name, entry in header.items():
        buffer = report.state_dict[name].uop.base.buffer
        found = ctypes.string_at(buffer._buf.value, buffer.nbytes)
        assert found == data[slice(*entry["data_offsets"])], name
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in for the driver's library is."""
    return cuda_stand_in.build(tmp_path_factory.mktemp("driver")).parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Some tensors that are longer than a window, and some that share one."""
    rng = np.random.default_rng(5)
    sizes = [1, 70_001, 9_000_001, 500, 20_000_000, 3, 4096, 12_345_678]
    tensors = {f"t{i}": ("U8", (n,), rng.bytes(n)) for i, n in enumerate(sizes)}
    return write_safetensors(tmp_path / "model.safetensors", tensors)


def test_windows_are_exact_and_leave_nothing_behind(folder: Path, path: Path) -> None:
    """Whatever the threads and the sizes of windows, by the stand-in's strict rules."""
    code = """
for threads, chunk_nbytes in ((1, None), (2, 2**20), (4, 300_000), (3, 2**22)):
    report = load(threads=threads, chunk_nbytes=chunk_nbytes)
    assert report.plan.transfer == "mapped"
    assert not any("lock" in note or "mapped for" in note for note in report.notes), report.notes
    check(report)
    del report
    check_clean()
"""
    cuda_stand_in.run(folder, PRELUDE + code, path)


@pytest.mark.parametrize("locks", [0, 1, 5])
def test_pages_that_cannot_be_locked_are_staged(folder: Path, path: Path, locks: int) -> None:
    """From then on, with a note, and every byte is there."""
    code = f"""
real = cuda.PinnedStaging.__init__

def staging(self, *arguments):
    count("locks_left").value = -1  # slots may be locked
    real(self, *arguments)

cuda.PinnedStaging.__init__ = staging
count("locks_left").value = {locks}
report = load(threads=1, chunk_nbytes=2**20)
assert any("could not be locked" in note for note in report.notes), report.notes
check(report)
check_clean()
"""
    cuda_stand_in.run(folder, PRELUDE + code, path)


def test_without_addresses_for_maps_bytes_are_staged(folder: Path, path: Path) -> None:
    """A limit of address space, as clusters set it, leaves room for slots alone."""
    code = """
real = cuda.Window.__init__

def window(self, *arguments):
    now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + 2**20, before[1]))
    try:
        real(self, *arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)

cuda.Window.__init__ = window
report = load(threads=1, chunk_nbytes=2**20)
assert any("cannot be mapped for the device" in note for note in report.notes), report.notes
check(report)
check_clean()
"""
    cuda_stand_in.run(folder, PRELUDE + code, path)


@pytest.mark.parametrize("left", [30_000_000, 9_500_000, 100])
def test_a_file_that_is_cut_before_its_windows_open(folder: Path, path: Path, left: int) -> None:
    """One error that names the tensor; memory beside the map is neither locked nor cleared."""
    code = f"""
real = cuda.Window.__init__

def window(self, *arguments):
    truncate({left})  # the reader has looked at it
    real(self, *arguments)

cuda.Window.__init__ = window
try:
    load(threads=1, chunk_nbytes=2**20)
    sys.exit("not refused")
except FileChangedError as error:
    assert error.path == path and error.held_back and error.tensor, error
check_clean()
"""
    cuda_stand_in.run(folder, PRELUDE + code, path)


def test_a_file_that_loses_the_end_of_its_last_page(folder: Path, path: Path) -> None:
    """Whoever wants to truncate it waits for the window, and the load ends."""
    code = """
real = cuda._BulkCopier.run
nbytes = os.path.getsize(path)

def run(self, fd, reads, slots, busy):
    if any(read.offset + read.needed == nbytes for read in reads):
        truncate(nbytes - 1)
    return real(self, fd, reads, slots, busy)

cuda._BulkCopier.run = run
try:
    load(threads=1, chunk_nbytes=2**20)
    sys.exit("not refused")
except FileChangedError as error:
    assert error.held_back and error.tensor == "t7", error
check_clean()
"""
    cuda_stand_in.run(folder, PRELUDE + code, path)


@pytest.mark.parametrize("transfer", ["mapped", "staged"])
def test_a_file_that_is_larger_than_the_cgroup(
    folder: Path, tmp_path: Path, cgroup: Boxes, transfer: str
) -> None:
    """Locked pages cannot be reclaimed: 64 MiB at most are, the rest of the file comes and goes.

    The stand-in locks pages as the driver does, in memory that the kernel counts. Of the 256 MB, 64
    are for them and the others for the process; the device's memory is none of the host's.
    """
    big = write_safetensors(
        tmp_path / "model.safetensors",
        {f"t{i}": ("U8", (50_000_000,), bytes([i]) * 50_000_000) for i in range(8)},
    )
    code = f"""
count("sink").value = 1
threads = []
for reader in ("mmap",) if "{transfer}" == "mapped" else ("mmap", "pread", "direct"):
    report = streamload.load_state_dict(
        None, path, device="CUDA", dtype="checkpoint", transfer="{transfer}", reader=reader,
        progress=False, threads=4,
    )
    assert report.plan.transfer == "{transfer}" and report.read_nbytes == 400_000_000
    assert 32 * 2**20 < report.plan.host_nbytes <= 64 * 2**20
    assert not any("locked" in note for note in report.notes), report.notes
    del report
    check_clean()
"""
    forget(big.parent)  # so that its pages are charged to the cgroup
    done = cgroup.run(
        [sys.executable, "-c", PRELUDE + code, str(big)],
        256_000_000,
        env=cuda_stand_in.environment(folder),
    )
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert done.peak_nbytes is None or done.peak_nbytes <= 256_000_000
