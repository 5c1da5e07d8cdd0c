"""tinygrad's CUDA devices, with a small C library in the place of the driver.

tinygrad's own ``ops_cuda`` runs on it, in child processes. What only a GPU can show is in
test_tinygrad_cuda.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_stand_in
import numpy as np
import pytest
from safetensors_files import write_safetensors

PRELUDE = """
import ctypes, gc, json, os, sys, threading

import ml_dtypes
import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.helpers import GlobalCounters

import streamload
from streamload.devices import base, probing
from streamload.devices.tinygrad import device as ours
from streamload.core.dtypes import BY_NAME
from streamload.errors import AllocationError, DeviceError

path = sys.argv[1]
driver = ctypes.CDLL(os.environ.get("CUDA_PATH", "libcuda.so.1"))
# the stand-in computes nothing: this is what is known of a device that has been probed
for name in ("CUDA", "CUDA:1"):
    probing._PROBES["tinygrad", name, False] = base.ProbeResult(name, True)

def count(name):
    return ctypes.c_int.in_dll(driver, name)

def used(index=0):
    return (ctypes.c_size_t * 2).in_dll(driver, "used_nbytes")[index]

def context():
    found = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(found))
    return found.value

def load(model, **arguments):
    arguments.setdefault("dtype", "checkpoint")
    arguments.setdefault("cast", "llvm")
    return streamload.load_state_dict(
        model, path, budget=streamload.Budget(50_000_000, host=8 * 2**20), chunk_nbytes=65536,
        progress=False, **arguments
    )

def memory(tensor):
    # as it lies there, nobody having waited for anything
    buffer = tensor.uop.base.buffer
    return ctypes.string_at(buffer._buf.value, buffer.nbytes)

def check_clean():
    left = {n: count(n).value for n in ("registered", "host_allocated", "streams", "events")}
    assert not any(left.values()), left
    for device in Device[Device.canonicalize("CUDA")].devices:
        assert device.pending_copyin == []
        assert not any(device.allocator.cache.values()), device.allocator.cache

def expected():
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}

def as_half(data):
    with np.errstate(all="ignore"):
        return np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32).astype(np.float16)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors from one byte to several chunks and one, and many small ones."""
    rng = np.random.default_rng(3)
    sizes = {"large": 300_001, "whole": 65536, "more": 65538, "few": 7, "none": 0}
    tensors: dict[str, Any] = {
        name: ("BF16", (n,), rng.standard_normal(n).astype("<f4").view("<u2")[1::2].tobytes())
        for name, n in sizes.items()
    }
    tensors |= {"byte": ("U8", (1,), b"x"), "odd": ("I8", (3, 70_001), rng.bytes(210_003))}
    tensors |= {f"small{i}": ("I32", (i,), rng.bytes(4 * i)) for i in range(1, 200)}
    return write_safetensors(tmp_path_factory.mktemp("path") / "model.safetensors", tensors)


def run(driver: Path, path: Path, code: str, **variables: str) -> None:
    cuda_stand_in.run(driver, PRELUDE + code, path, **variables)


def test_a_load_is_exact_and_leaves_nothing_behind(driver: Path, path: Path) -> None:
    code = """
Device["CUDA"]
problems = []

def loads():
    try:
        assert context() is None
        for dtype in ("checkpoint", "float16"):
            report = load(None, device="CUDA", dtype=dtype)
            assert report.plan.threads > 0 and report.plan.devices[0].device == "CUDA"
            assert report.predicted_nbytes["CUDA"] >= used() == sum(
                t.nbytes() for t in report.state_dict.values()
            )
            for name, data in expected().items():
                tensor = report.state_dict[name]
                assert tensor.device == "CUDA"
                if dtype == "float16" and tensor.dtype == dtypes.float16:
                    data = as_half(data).tobytes()
                assert not data or memory(tensor) == data, (dtype, name)
            del report, tensor
            gc.collect()
            ours.FRAMEWORK.device("CUDA").trim()
            assert used() == 0
        assert context() is None
    except BaseException as error:
        problems.append(error)

thread = threading.Thread(target=loads)
thread.start()
thread.join()
for problem in problems:
    raise problem
check_clean()
"""
    run(driver, path, code)


WAYS: dict[str, dict[str, str]] = {"auto": {}, "direct": {"reader": "direct"}}


def test_casts_and_ways_to_the_device_come_with_the_driver(driver: Path, path: Path) -> None:
    """Casts in the device's memory, and bytes through the page cache or past it."""
    code = f"""
import warnings
import cuda_stand_in
from streamload.core.dtypes import BF16, F16, F32

kernels = cuda_stand_in.Kernels(driver, [(BF16, F16), (BF16, F32)])
bits = expected()
for way in {list(WAYS.values())}:
    for dtype, kind in (("checkpoint", None), ("float16", np.float16), ("float32", np.float32)):
        before = count("launches").value
        report = load(None, device="CUDA", cast="auto", dtype=dtype, **way)
        casts = {{p.cast for p in report.plan.placements}}
        assert casts == ({{"copy"}} if kind is None else {{"copy", "device"}}), casts
        assert (count("launches").value > before) == (kind is not None)
        for name, tensor in report.state_dict.items():
            data = bits[name]
            if kind is not None and tensor.dtype in (dtypes.float16, dtypes.float32):
                data = np.frombuffer(data, ml_dtypes.bfloat16).astype(kind).tobytes()
            assert not data or memory(tensor) == data, (way, dtype, name)
        del report, tensor
        gc.collect()
        ours.FRAMEWORK.device("CUDA").trim()
        assert used() == 0
        check_clean()
"""
    run(driver, path, code)


def test_a_cast_that_the_driver_refuses_is_the_hosts(driver: Path, path: Path) -> None:
    """It is known before anything is read or allocated; only the kernels that are needed are asked.

    Where the device is to cast, it is an error.
    """
    code = """
import warnings
import cuda_stand_in
from streamload.core.dtypes import BF16, F32

warnings.simplefilter("ignore")
bits = expected()
try:
    load(None, device="CUDA", cast="device", dtype="float16")
    sys.exit("not refused")
except DeviceError as error:
    assert "cuModuleLoadDataEx" in str(error), error
    assert used() == 0 and error.state is None, error.state
report = load(None, device="CUDA", cast="auto", dtype="float16", out_of_range="clamp")
assert {p.cast for p in report.plan.placements} == {"copy", "llvm"}
(note,) = [n for n in report.notes if "casts nothing" in n]
assert "CUDA" in note and "cuModuleLoadDataEx" in note, note
assert not any("casts nothing" in n for n in load(None, device="CUDA", cast="auto").notes)
finite = np.nan_to_num(as_half(bits["large"]), posinf=65504, neginf=-65504)
assert memory(report.state_dict["large"]) == finite.tobytes()
# one pair is known, and no other is asked for
kernels = cuda_stand_in.Kernels(driver, [(BF16, F32)])
report = load(None, device="CUDA", cast="device", dtype="float32")
assert {p.cast for p in report.plan.placements} == {"copy", "device"} and not report.notes
ours.FRAMEWORK.device("CUDA").trim()  # what the reports before held
check_clean()
"""
    run(driver, path, code)


def test_a_device_that_nobody_looks_at_is_planned_as_cuda(path: Path) -> None:
    """By its name in tinygrad's spelling: staged, by the driver's blocks, and casting itself."""
    from streamload import plan
    from streamload.loading.place import unseen_spec

    for name in ("CUDA", "CUDA:1", "tinygrad:cuda"):
        spec = unseen_spec(name, 10**9)
        assert (spec.info.host_visible, spec.info.shared_memory) == (False, False)
        assert (spec.info.allocator, spec.info.threads) == ("cuda_driver", 16)
        assert spec.casts
    assert unseen_spec("cuda", 10**9).info.allocator == "cuda_caching"  # torch's spelling
    assert unseen_spec("CL", 10**9).info.allocator == "exact"
    made = plan(path, device="CUDA", budget="3GB", dtype="float16")
    assert made.host_nbytes > 0
    assert {p.cast for p in made.placements} == {"copy", "device"}
    # all tensors are small: they share a block, and there is one of scratch
    assert made.device("CUDA").peak_nbytes == 2 * 2**21


def test_weights_are_written_in_place_or_replaced(driver: Path, path: Path) -> None:
    code = """
bits = expected()
model = {
    "large": Tensor.empty(300_001, dtype=dtypes.bfloat16, device="CUDA"),
    "odd": Tensor(np.ones((3, 70_001), np.int8), device="CUDA").realize(),
    "whole": Tensor(np.ones(65536, np.float32), device="CUDA").realize(),
    "more": Tensor.empty(65538, dtype=dtypes.bfloat16, device="CUDA"),
}
model["large"].uop.buffer.ensure_allocated()
assert Device["CUDA"].pending_copyin
other = ctypes.c_void_p(1)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(other), 1)
driver.cuCtxSetCurrent(other)  # somebody else's
addresses = {n: model[n].uop.base.buffer._buf.value for n in ("large", "odd")}
report = load(model, strict=False)
actions = {p.name: p.action for p in report.plan.placements}
assert actions["whole"] == "replace" and actions["more"] == "new", actions
for name, address in addresses.items():
    assert actions[name] == "in_place" and model[name].uop.base.buffer._buf.value == address
assert context() == other.value
for name in model:
    assert memory(model[name]) == bits[name], name
assert used() == sum(len(bits[name]) for name in model)
check_clean()
assert (model["odd"].numpy().tobytes()) == bits["odd"]
"""
    run(driver, path, code)


def test_two_devices_have_their_own_contexts(driver: Path, path: Path) -> None:
    """Each tensor lies where the plan put it, and is freed there."""
    code = """
other = ctypes.c_void_p(1)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(other), 0)
driver.cuCtxSetCurrent(other)  # somebody else's
names = ["CUDA", "cuda:1"]
report = streamload.load_state_dict(
    None, path, device=["tinygrad:" + n for n in names], dtype="checkpoint", progress=False,
    budget={"CUDA": 2**21, "CUDA:1": 2**21}, chunk_nbytes=65536,
)
places = {p.name: p.device for p in report.plan.placements}
assert set(places.values()) == {"CUDA", "CUDA:1"}
bits = expected()
for name, tensor in report.state_dict.items():
    assert tensor.device == places[name]
    assert not bits[name] or memory(tensor) == bits[name], name
for index, device in enumerate(("CUDA", "CUDA:1")):
    assert used(index) == sum(len(bits[n]) for n in bits if places[n] == device)
assert context() == other.value
del report, tensor
gc.collect()
for index, device in enumerate(("CUDA", "CUDA:1")):
    ours.FRAMEWORK.device(device).trim()
    assert used(index) == 0
check_clean()
assert count("contexts_made").value == 2
"""
    run(driver, path, code)


def test_a_device_says_what_it_has_and_keeps_what_is_in_use(driver: Path, path: Path) -> None:
    """Memory comes from the driver's own numbers; what kernels may still use is waited for."""
    code = """
device = ours.FRAMEWORK.device("cuda:0")
assert type(device) is ours._CUDADevice and device.name == "CUDA"
info = device.info
assert (info.free_nbytes, info.total_nbytes) == (2**30, 2**30)
assert info.description == "stand-in 0" and not info.host_visible and not info.shared_memory
buffer = device.allocate(BY_NAME["float32"], (1000,))
assert device.info.free_nbytes == 2**30 - 4000
assert device.allocated_nbytes() == 4000
first = buffer._buf.value
buffer.deallocate()
count("null_busy").value = 1  # a kernel that reads what has just been freed
buffer = device.allocate(BY_NAME["float16"], (2000,))
assert buffer._buf.value == first
assert (count("null_busy").value, count("null_waits").value) == (0, 1)
assert count("contexts_made").value == 1 and device.bulk is not None
slot = device.staging(4000)
slot.view[:] = bytes(range(250)) * 16
ticket = device.copy(slot, 1000, 1000, buffer, 2000)
assert device.read(buffer, 2000, 3000) == bytes(range(250)) * 4  # waits, as tinygrad does
ticket.wait()
slot.close()
assert count("events").value == 1  # the ticket's
del ticket
other = ctypes.c_void_p(1)
driver.cuDevicePrimaryCtxRetain(ctypes.byref(other), 1)
driver.cuCtxSetCurrent(other)  # somebody else's
assert device.read(buffer, 2000, 2010) == bytes(range(10)) and device.read(buffer, 0, 0) == b""
device.synchronize()
assert context() == other.value
device.release(buffer)
assert used() == 0
try:
    device.allocate(BY_NAME["uint8"], (2**31,))
    sys.exit("not refused")
except AllocationError as error:
    assert error.nbytes == 2**31 and "Allocation of" in str(error), error
check_clean()
"""
    run(driver, path, code)


def test_a_load_that_fails_leaves_nothing_under_way(driver: Path, path: Path) -> None:
    """A copy that is refused, and memory that is short: every parameter in a stated condition."""
    code = """
count("copies_left").value = 5
model = {"large": Tensor.empty(300_001, dtype=dtypes.bfloat16, device="CUDA"),
         "whole": Tensor.empty(65536, dtype=dtypes.bfloat16, device="CUDA")}
try:
    load(model, strict=False)
    sys.exit("not refused")
except DeviceError as error:
    assert "copy" in str(error) or "Memcpy" in str(error), error
    assert error.state.loaded == () and error.state.untouched == ("large", "whole"), error.state
count("copies_left").value = -1
check_clean()
load(model, strict=False)
bits = expected()
assert memory(model["large"]) == bits["large"] and memory(model["whole"]) == bits["whole"]
check_clean()

held = used()
ctypes.c_size_t.in_dll(driver, "lost_nbytes").value = 2**30 - held - 100_000
model["odd"] = Tensor.empty(3, 70_001, dtype=dtypes.int8, device="CUDA")
try:
    load(model, strict=False)
    sys.exit("not refused")
except AllocationError as error:
    assert "odd" in str(error) and error.nbytes == 210_003, error
assert used() == held
check_clean()
"""
    run(driver, path, code)


def test_without_a_cache_memory_is_freed_in_its_context(driver: Path, path: Path) -> None:
    """LRU=0: tinygrad then frees as soon as it lets go, in whatever context is current."""
    code = """
model = {"whole": Tensor(np.ones(65536, np.float32), device="CUDA").realize()}
Device["CUDA"].synchronize()
driver.cuCtxSetCurrent(None)
load(model, strict=False)
assert memory(model["whole"]) == expected()["whole"] and used() == 2 * 65536
check_clean()
os._exit(0)  # what is freed at exit is tinygrad's own affair
"""
    run(driver, path, code, LRU="0")


def test_a_driver_of_another_name_is_used_through_tinygrad(path: Path, tmp_path: Path) -> None:
    """As on Windows: the generic way, as exact, one copy after the other."""
    library = cuda_stand_in.build(tmp_path, "libother.so")
    (tmp_path / "libcuda.so.1").write_text("no library, in the place of a real driver's")
    code = """
device = ours.FRAMEWORK.device("CUDA")
assert type(device) is ours._OffsetDevice and device.bulk is None and device.info.threads == 0
report = load(None, device="CUDA")
for name, data in expected().items():
    assert not data or memory(report.state_dict[name]) == data, name
check_clean()
"""
    run(tmp_path, path, code, CUDA_PATH=str(library))


def test_cold_files_are_read_by_few_threads_into_long_slots(driver: Path, path: Path) -> None:
    """Past the page cache, by two of 16 MiB at most, unless others are asked for; else 8 MiB."""
    code = """
direct, pread = (
    streamload.plan(path, device="CUDA", reader=reader)
    for reader in ("direct", "pread")
)
assert direct.threads <= 2 and 15 * 2**20 <= direct.chunk_nbytes <= 2**24, direct
assert pread.chunk_nbytes <= 2**23, pread
asked = streamload.plan(path, device="CUDA", reader="direct", threads=4)
assert asked.threads == 4 and asked.host_nbytes <= 2**26, asked
"""
    run(driver, path, code)
