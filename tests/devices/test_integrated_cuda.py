"""CUDA devices without memory of their own, with a small C library in the place of the driver.

No such machine was here: the library answers as Jetson boards and the DGX Spark are described to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda_stand_in
import numpy as np
import pytest
from boxes import Boxes
from plan_helpers import checkpoint_of, device_spec, plan_of
from safetensors_files import write_safetensors

from streamload.core.memory import Budget, overhead_nbytes
from streamload.devices.base import DeviceInfo
from streamload.errors import DeviceError, PlanInfeasibleError
from streamload.loading import place
from streamload.offloading import plan as problem

MIB = 2**20
NBYTES = 64 * MIB

PRELUDE = """
import ctypes, mmap, os, sys
from pathlib import Path

import streamload
from streamload.core.memory import available_host_nbytes, available_system_nbytes
from streamload.core.system import address_of
from streamload.devices import base, cuda, probing
from streamload.errors import AllocationError, PlanInfeasibleError

MIB = 2**20
path, pool_path = sys.argv[1:3]
driver = ctypes.CDLL("libcuda.so.1")

def size(name):
    return ctypes.c_size_t.in_dll(driver, name)

ctypes.c_int.in_dll(driver, "integrated").value = 1
size("memory_nbytes").value = 2**40  # more than any host has
size("memfree_nbytes").value = 8 * MIB

def check_clean():
    for name in ("registered", "host_allocated", "streams", "events"):
        assert ctypes.c_int.in_dll(driver, name).value == 0, name
"""

TINYGRAD = (
    PRELUDE
    + """
from tinygrad import Device

probing._PROBES["tinygrad", "CUDA", False] = base.ProbeResult("CUDA", True)

def load(**arguments):
    arguments = {"budget": streamload.Budget(None, host=8 * MIB), "cast": "llvm"} | arguments
    options = {"device": "CUDA", "dtype": "checkpoint", "progress": False, "cast": "llvm"}
    return streamload.load_state_dict(None, path, **options | arguments)
"""
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {f"w{i}": ("U8", (4 * MIB,), rng.bytes(4 * MIB)) for i in range(16)}
    return write_safetensors(tmp_path_factory.mktemp("path") / "model.safetensors", tensors)


def test_a_load_fits_beside_page_cache_and_beyond_the_cgroup(
    driver: Path, path: Path, tmp_path: Path, cgroup: Boxes
) -> None:
    """The driver's memory is no cgroup's; pages that the load reads are dropped behind it."""
    # written here: this process's cgroup pays for the device's memory
    (tmp_path / "pool").write_bytes(bytes(NBYTES + MIB))
    (tmp_path / "junk").write_bytes(bytes(512 * MIB))
    code = (
        TINYGRAD
        + """
device = streamload.devices.names.framework("tinygrad").device("CUDA")
pool = mmap.mmap(os.open(pool_path, os.O_RDWR), 0)
ctypes.c_void_p.in_dll(driver, "pool").value = address_of(memoryview(pool))
eaten = bytearray(b"x") * (available_host_nbytes() - 40 * MIB)
with open(sys.argv[3], "rb", buffering=0) as junk:
    while junk.read(MIB):  # the cgroup is full of page cache
        pass
info = device.info
assert info.shared_memory and not info.charged and not info.in_process, info
assert available_host_nbytes() < 45 * MIB < 64 * MIB < info.free_nbytes, info
assert abs(info.free_nbytes - available_system_nbytes()) < 512 * MIB
fd = os.open(path, os.O_RDONLY)
os.fsync(fd)  # dirty pages cannot be dropped
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
report = load(reader="pread")
assert report.page_cache == "dropped: the memory of CUDA is the host's", report.page_cache
assert report.dropped_nbytes > 60 * MIB, report.dropped_nbytes
plan = report.plan.device("CUDA")
assert plan.shared_memory and not plan.charged and report.plan.host_nbytes <= 8 * MIB
assert report.predicted_nbytes["process"] < 40 * MIB, report.predicted_nbytes
del eaten
data = Path(path).read_bytes()
data = data[8 + int.from_bytes(data[:8], "little"):]
for number in range(16):
    buffer = report.state_dict[f"w{number}"].uop.base.buffer
    found = ctypes.string_at(buffer._buf.value, buffer.nbytes)
    assert data.find(found) % (4 * MIB) == 0, number
report = None
check_clean()

ctypes.c_int.in_dll(driver, "integrated").value = 0
device.context.__dict__.pop("integrated")
size("memory_nbytes").value = size("used_nbytes").value + 8 * MIB
try:
    load()
    sys.exit("8 MiB held 64")
except PlanInfeasibleError as error:
    assert "CUDA" in str(error), error
"""
    )
    argv = [sys.executable, "-c", code, path, tmp_path / "pool", tmp_path / "junk"]
    done = cgroup.run(list(map(str, argv)), 512 * MIB, env=cuda_stand_in.environment(driver))
    assert done.outcome == "done", (done.outcome, done.stdout, done.stderr)


def test_memory_is_measured_before_each_allocation(driver: Path, path: Path) -> None:
    """Memory that others took since the plan, or that the driver does not give, is an error."""
    code = (
        TINYGRAD
        + """
left = []
cuda.available_system_nbytes = lambda: left.pop() if left else available_system_nbytes()

def fails(said):
    try:
        load(budget=streamload.Budget(80 * MIB, host=8 * MIB), page_cache="keep")
        sys.exit("it was loaded")
    except AllocationError as error:
        assert said in str(error) and "'w" in str(error), error
        assert len(error.state.loaded) < 16
        loads = error
    del loads
    check_clean()

# before each allocation: twice, if there is too little the first time
left = [2 * MIB, 2 * MIB] + [2**40] * 6
fails("it shares the host's memory, and 2.10 MB of that are available now")
assert not left
size("lost_nbytes").value = 2**40 - 10 * MIB
fails("failed on CUDA")
size("lost_nbytes").value = 0
size("used_nbytes").value = 0
assert load(reader="pread").page_cache.startswith("dropped")
assert load(reader="pread", page_cache="keep").page_cache.startswith("page_cache=")
"""
    )
    cuda_stand_in.run(driver, code, path, "")


def test_torch_counts_as_tinygrad_does(driver: Path, path: Path) -> None:
    code = (
        PRELUDE
        + """
from contextlib import nullcontext

import torch
from streamload.core.dtypes import BY_NAME
from streamload.devices.torch import device as ours

cached, trimmed = 3 * MIB, []
for name, value in {
    "get_device_name": "stand-in", "is_bf16_supported": True, "device": nullcontext(),
    "memory_reserved": 5 * MIB, "memory_allocated": 2 * MIB,
    "get_allocator_backend": "native", "empty_cache": None,
}.items():
    setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
found = ours.CUDADevice("cuda:0")
found.trim = lambda: trimmed.append(1)
cuda.available_system_nbytes = lambda: 2**30
info = found.info
assert info.shared_memory and not info.charged, info
assert (info.free_nbytes, info.total_nbytes) == (2**30 + cached, 2**40), info
u8 = BY_NAME["uint8"]
for allocate in (
    lambda: found.allocate(u8, (2**30,)),
    lambda: found.allocate_all([(u8, (2**20,))] * 1024),
):
    try:
        allocate()
        sys.exit("it was allocated")
    except AllocationError as error:
        assert "1.07 GB of that are available" in str(error), error
assert len(trimmed) == 2

ctypes.c_int.in_dll(driver, "integrated").value = 0
info = ours.CUDADevice("cuda:1").info
assert not info.shared_memory and info.free_nbytes == 2**40 + cached, info
"""
    )
    cuda_stand_in.run(driver, code, path, "")


def test_a_cgroup_limits_only_what_it_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices in a process's memory, and a driver's, share the host's; one is in the cgroup."""
    monkeypatch.setattr(place, "available_host_nbytes", lambda: 1000 * MIB)
    monkeypatch.setattr(place, "available_system_nbytes", lambda: 3000 * MIB)
    host, system = (n * MIB - overhead_nbytes(n * MIB) for n in (1000, 3000))
    cpu = DeviceInfo("cpu", "torch")
    cuda = DeviceInfo("cuda:0", "torch", charged=False)
    gpu = DeviceInfo("cuda:1", "torch", shared_memory=False, charged=False)
    every = {info.name: info for info in (cpu, cuda, gpu)}

    def given(**budgets: Any) -> dict[str, int | None]:
        budget = Budget.parse(budgets or None)
        return {k: pool.given_nbytes for k, pool in place._pools(every, budget).items()}

    assert given() == {"cpu": host, "cuda:0": system // 2}
    assert given(**{"cuda:0": "2.5GiB"}) == {"cpu": system - 2560 * MIB, "cuda:0": system}
    assert given(cpu="100MiB") == {"cpu": host, "cuda:0": system - 100 * MIB}
    # to compute what is not stated needs the host's memory, and only then
    monkeypatch.undo()
    monkeypatch.setattr(place, "available_system_nbytes", _unknown)
    assert place._pools({"c": cuda}, Budget.parse("1GB"))["c"] == (None, None)
    with pytest.raises(DeviceError, match="unknown"):
        place._pools({"c": cuda}, Budget.parse(None))


def _unknown() -> int:
    raise DeviceError("host", "unknown")


def test_the_driver_and_the_process_share_what_is_free() -> None:
    """Each within its own, both together and their staging within the host's."""
    checkpoint = checkpoint_of({"a": ("U8", (30 * MIB,)), "b": ("U8", (30 * MIB,))})

    def planned(cpu_nbytes: int, all_nbytes: int) -> None:
        specs = (
            device_spec("cpu", 40 * MIB, host_free_nbytes=cpu_nbytes),
            device_spec(
                *("cuda:0", 40 * MIB),
                host_free_nbytes=all_nbytes,
                host_visible=False,
                charged=False,
                allocator="cuda_driver",
            ),
        )
        plan_of(checkpoint, *specs, host_budget_nbytes=16 * MIB)

    planned(32 * MIB, 80 * MIB)
    with pytest.raises(PlanInfeasibleError, match=r"cpu, cuda:0.*\n?.*staging"):
        planned(32 * MIB, 62 * MIB)
    with pytest.raises(PlanInfeasibleError, match="does not fit on cpu:"):
        planned(29 * MIB, 80 * MIB)


def test_layers_in_host_memory_have_the_cgroup_to_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``offload(host=)`` counts a driver's memory as taken from the system, not from the cgroup."""
    monkeypatch.setattr(problem, "free_host_nbytes", lambda: 1000 * MIB)
    made: Any = SimpleNamespace(host=True, host_nbytes=800 * MIB, needed_nbytes=1500 * MIB)
    spec = device_spec("cuda:0", 2000 * MIB, charged=False)
    monkeypatch.setattr(problem, "available_system_nbytes", lambda: 3000 * MIB)
    problem._check_host(made, spec)
    monkeypatch.setattr(problem, "available_system_nbytes", lambda: 2300 * MIB)
    with pytest.raises(PlanInfeasibleError, match="cuda:0"):
        problem._check_host(made, spec)
    with pytest.raises(PlanInfeasibleError, match="cpu"):
        problem._check_host(made, device_spec("cpu", 2000 * MIB))
