"""tinygrad on CUDA: the right bits, little host memory, nothing left behind. Needs a GPU.

Run it with ``-s`` to see the rates and what the machine offers tinygrad. What needs no GPU is in
test_devices_tinygrad_cuda.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.core.dtypes import BY_NAME
from streamload.devices.allocators import taken
from streamload.errors import PlanInfeasibleError
from streamload.verification.verify import verify

MIB = 2**20


def _devices() -> tuple[int, str]:
    """How many CUDA devices the driver has, and else why there are none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, str(error)
    status, count = driver.cuInit(0), ctypes.c_int()
    status = status or driver.cuDeviceGetCount(ctypes.byref(count))
    return (0, f"cuInit: {status}") if status else (count.value, "it lists none")


DEVICES, PROBLEM = _devices()
if not DEVICES:
    pytest.skip(f"no CUDA device here: {PROBLEM}", allow_module_level=True)

# --- what tinygrad compiles with ----------------------------------------------------------------

COMPUTES = """
from tinygrad import Device, Tensor, dtypes
for dtype in (dtypes.float32, dtypes.float16):
    a = Tensor([[1.0, 2.0], [3.0, 4.0]], device="CUDA").cast(dtype).contiguous().realize()
    assert (a @ a).tolist() == [[7.0, 10.0], [15.0, 22.0]], dtype
print(type(Device["CUDA"].renderer).__name__)
"""


def _wheels() -> dict[str, str]:
    """Settings for the compiler that comes with torch, where it is installed; else none."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    libraries = [f for root in roots for f in sorted(root.glob("*/lib/libnvrtc.so.[0-9]*"))]
    headers = [f for root in roots for f in sorted(root.glob("*/include/cuda_fp16.h"))]
    found = {}
    if libraries:
        found["NVRTC_PATH"] = str(libraries[0])
        # the library opens another one beside it, by its name
        folders = (str(libraries[0].parent), os.environ.get("LD_LIBRARY_PATH"))
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    if headers:
        found["CUDA_PATH"] = str(headers[0].parent.parent)
    return found


def _choices() -> Iterator[dict[str, str]]:
    yield {"DEV": "CUDA"}
    yield {"DEV": "CUDA"} | _wheels()
    yield {"DEV": "CUDA:PTX"}


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The first settings with which tinygrad multiplies matrices, for this process and its own."""
    said = []
    for settings in _choices():
        # a cache of its own: a warm one hides what the compiler lacks
        cache = {"CACHEDB": str(tmp_path_factory.mktemp("cache") / "cache.db")}
        done = subprocess.run(
            [sys.executable, "-c", COMPUTES],
            env=os.environ | settings | cache,
            capture_output=True,
            text=True,
            timeout=300,
        )
        shown = {k: v for k, v in settings.items() if k != "LD_LIBRARY_PATH"}
        if done.returncode == 0:
            print(f"\ntinygrad computes with {shown}: {done.stdout.strip()}")
            break
        said.append(f"with {shown}: {done.stderr.strip()[-1500:]}")
        print(f"\ntinygrad does not compute {said[-1]}")
    else:
        pytest.fail("tinygrad computes with none of the settings:\n" + "\n".join(said))
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    for library in sorted(Path(settings.get("NVRTC_PATH", "/")).parent.glob("libnvrtc-builtins*")):
        ctypes.CDLL(str(library))  # LD_LIBRARY_PATH is read once, when a process begins
    from tinygrad.helpers import Context

    with Context(DEV=settings["DEV"]):
        yield
    for key, value in before.items():
        os.environ.pop(key, None)
        if value is not None:
            os.environ[key] = value


# --- helpers ------------------------------------------------------------------------------------


def current_context() -> int | None:
    found = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(found))
    return found.value


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No copy of tinygrad's is pending after a test, and its cache is empty after a load."""
    yield
    gc.collect()
    from tinygrad import Device

    Device["CUDA"].synchronize()
    assert Device["CUDA"].pending_copyin == []


def load(model: Any, path: Path, **arguments: Any) -> streamload.LoadReport:
    """Load quietly, and see that nothing stays in tinygrad's allocator or in the thread."""
    from tinygrad import Device

    Device["CUDA"].synchronize()
    arguments.setdefault("device", "CUDA")
    arguments.setdefault("budget", "20GB")
    before = current_context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # values that overflow are wanted here
        report = streamload.load_state_dict(model, path, progress=False, **arguments)
    assert current_context() == before
    assert Device["CUDA"].pending_copyin == []
    cache = Device["CUDA"].allocator.cache
    assert not any(cache.values()), {key: len(kept) for key, kept in cache.items() if kept}
    return report


def check(report: Any, path: Path, model: Any = None) -> None:
    """Bit for bit, and no growth above the prediction by tinygrad's own counter."""
    for d in report.plan.devices:
        assert report.measured_nbytes[d.device] <= d.peak_nbytes
    assert verify(report, streamload.open_checkpoint(path), model) == []


def empty_model(path: Path, dtype: str | None = None) -> dict[str, Any]:
    """Tensors on the device without values, as a checkpoint has them or in another dtype."""
    from tinygrad import Tensor

    from streamload.devices.tinygrad.tensors import TO_TINYGRAD

    model = {}
    for name, info in streamload.open_checkpoint(path).tensors.items():
        kind = TO_TINYGRAD[dtype or info.dtype.name]
        model[name] = Tensor.empty(*info.shape, dtype=kind, device="CUDA")
        if 0 not in info.shape:
            model[name].uop.buffer.ensure_allocated()
    return model


def free_nbytes() -> int:
    from streamload.devices.tinygrad.device import FRAMEWORK

    device = FRAMEWORK.device("CUDA")
    device.trim()
    free = device.info.free_nbytes
    assert free is not None
    return free


class HostMemory:
    """The most anonymous and shared memory that this process has, while in the block."""

    def __enter__(self) -> HostMemory:
        self.before = self.most = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def grown_nbytes(self) -> int:
        return self.most - self.before

    def _now(self) -> int:
        text = Path("/proc/self/status").read_text()
        found = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", text, re.MULTILINE)
        return 1024 * sum(map(int, found))

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self._now())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 16-bit codes, sizes from none to several chunks and one, every code of a few dtypes."""
    rng = np.random.default_rng(5)
    codes = np.arange(65536, dtype="<u2").tobytes()
    tensors: dict[str, Any] = {
        "half": ("F16", (65536,), codes),
        "bf16": ("BF16", (256, 256), codes),
        "bytes": ("U8", (1,), b"x"),
        "odd": ("U8", (12_345_677,), rng.bytes(12_345_677)),
        "wide": ("I64", (3,), rng.bytes(24)),
        "one": ("F32", (), rng.bytes(4)),
        "none": ("F32", (0,), b""),
        "float": ("F32", (1_000_003,), rng.standard_normal(1_000_003, np.float32).tobytes()),
        "fp8": ("F8_E4M3", (256,), bytes(range(256))),
    }
    tensors |= {f"small{i}": ("BF16", (i,), rng.bytes(2 * i)) for i in range(1, 500)}
    return write_safetensors(tmp_path_factory.mktemp("small") / "model.safetensors", tensors)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped checkpoint of 1 GB in bfloat16, in two shards, in the page cache."""
    from make_checkpoint import make_checkpoint, shape_of_size

    out = tmp_path_factory.mktemp("large") / "checkpoint"
    make_checkpoint(out, shape_of_size(10**9, BY_NAME["bfloat16"]), dtype="bfloat16", shards=2)
    return out


# --- what it is ---------------------------------------------------------------------------------


def test_the_device_is_what_the_driver_says() -> None:
    from streamload.devices.probing import probe
    from streamload.devices.tinygrad import device as ours

    device = ours.FRAMEWORK.device("cuda:0")
    info = device.info
    print("\n", info)
    found = probe("tinygrad", "CUDA", full=True)
    print({name: status for name, status in found.dtypes.items() if status != "absent"})
    print(found.device_casts, found.problem)
    assert type(device) is ours._CUDADevice
    assert device.bulk is not None
    assert info.free_nbytes and info.total_nbytes and info.free_nbytes <= info.total_nbytes
    assert not info.host_visible and not info.shared_memory
    assert found.works, found.problem
    for name in ("float32", "float16", "uint8", "int64"):
        assert found.dtypes[name] == "native", (name, found)


def test_what_the_driver_takes_for_an_allocation() -> None:
    """No more than was planned; what is freed comes back. Printed: what it is."""
    from streamload.devices.tinygrad.device import FRAMEWORK

    device = FRAMEWORK.device("CUDA")
    before = free_nbytes()
    lines, wrong = [], []
    sizes = (1, 512, 65536, MIB // 2, MIB, MIB + 1, 3 * MIB // 2, 2 * MIB, 2 * MIB + 1, 5 * MIB)
    for nbytes in sizes:
        for count in (1, 8):
            start = free_nbytes()
            buffers = [device.allocate(BY_NAME["uint8"], (nbytes,)) for _ in range(count)]
            took, planned = start - free_nbytes(), sum(taken("cuda_driver", 512, [nbytes] * count))
            lines.append(f"{count} x {nbytes}: {took}, planned {planned}")
            if took > planned:
                wrong.append(lines[-1])
            addresses = sorted(buffer._buf.value for buffer in buffers)
            if count > 1:
                steps = {b - a for a, b in pairwise(addresses)}
                lines[-1] += f", {min(steps)} to {max(steps)} apart"
            while buffers:
                device.release(buffers.pop())
    print("\ntaken from the device:", *lines, sep="\n  ")
    assert not wrong
    assert before - free_nbytes() <= 4 * MIB  # the driver may keep a block


Choice = Callable[[list[int], list[int]], int]  # of blocks that fit, by what is free in all
STRATEGIES: Mapping[str, Choice] = {
    "the fullest that fits": lambda fits, free: min(fits, key=lambda block: free[block]),
    "the first that fits": lambda fits, free: fits[0],
    "the last that fits": lambda fits, free: fits[-1],
    "the emptiest": lambda fits, free: max(fits, key=lambda block: free[block]),
}


def blocks_by(choice: Choice, sizes: list[int]) -> int:
    """Blocks of 2 MiB that small allocations would share if each went where a strategy says."""
    free: list[int] = []
    for size in sizes:
        fits = [block for block, room in enumerate(free) if room >= size]
        if not fits:
            free.append(2 * MIB)
            fits = [len(free) - 1]
        free[choice(fits, free)] -= size
    return len(free)


@pytest.mark.parametrize("mix", ["any size", "mostly tiny", "weights and biases"])
def test_small_allocations_share_the_drivers_blocks_as_planned(mix: str) -> None:
    """Sizes up to 1 MiB in no order. Printed: the strategies of sharing with which it agrees."""
    from streamload.devices.tinygrad.device import FRAMEWORK

    rng = np.random.default_rng(7)
    draw: Callable[[], int] = {
        "any size": lambda: int(rng.integers(1, MIB + 1)),
        "mostly tiny": lambda: int(2 ** rng.uniform(0, 20)),
        "weights and biases": lambda: int(rng.choice([768, 1536, 3072, 294_912, MIB])),
    }[mix]
    sizes = [-(-draw() // 512) * 512 for _ in range(1000)]
    device = FRAMEWORK.device("CUDA")
    start = free_nbytes()
    buffers = [device.allocate(BY_NAME["uint8"], (nbytes,)) for nbytes in sizes]
    took, planned = start - free_nbytes(), sum(taken("cuda_driver", 512, sizes))
    while buffers:
        device.release(buffers.pop())
    others = {name: blocks_by(choice, sizes) for name, choice in STRATEGIES.items()}
    said = f"{mix}: {took / 2 / MIB} blocks taken, {planned // 2 // MIB} planned, by {others}"
    print("\n" + said)
    assert took <= planned, said


# --- the bits -----------------------------------------------------------------------------------

MODES: Mapping[str, tuple[str | None, dict[str, Any]]] = {
    "new": (None, {"dtype": "checkpoint"}),
    "in place": ("", {"dtype": "checkpoint"}),
    "replaced": ("float32", {"dtype": {"*": "float16"}}),
    "float16 on the way": (None, {"dtype": "float16", "cast": "llvm"}),
    "float16 as it likes": (None, {"dtype": "float16"}),
    "float16 clamped": (None, {"dtype": "float16", "out_of_range": "clamp"}),
    "float32 as it likes": (None, {"dtype": "float32"}),
    "direct": (None, {"dtype": "checkpoint", "reader": "direct"}),
    "pread": (None, {"dtype": "checkpoint", "reader": "pread"}),
    "in the calling thread's pace": (None, {"dtype": "checkpoint", "threads": 1}),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", ["small", "large"])
def test_every_mode_is_exact(request: pytest.FixtureRequest, size: str, mode: str) -> None:
    path = request.getfixturevalue(size)
    holds, arguments = MODES[mode]
    model = None if holds is None else empty_model(path, holds or None)
    addresses = {n: t.uop.buffer._buf.value for n, t in (model or {}).items() if t.numel()}
    report = load(model, path, **arguments)
    casts = {p.cast for p in report.plan.placements}
    print(f"\n{size}, {mode}: {casts}, {report.read_nbytes / report.stream_seconds / 1e9:.1f} GB/s")
    check(report, path, model)
    if holds == "":
        actions = {p.name: p.action for p in report.plan.placements if p.nbytes}
        assert set(actions.values()) == {"in_place"}
        assert model is not None
        assert addresses == {n: t.uop.buffer._buf.value for n, t in model.items() if t.numel()}


def test_the_weights_compute(tmp_path: Path) -> None:
    from tinygrad import Tensor, TinyJit

    rng = np.random.default_rng(1)
    w = (rng.standard_normal((64, 48)) / 8).astype(np.float32)
    path = write_safetensors(tmp_path / "w.safetensors", {"w": ("F32", w.shape, w.tobytes())})
    model = {"w": Tensor.empty(64, 48, device="CUDA")}
    model["w"].uop.buffer.ensure_allocated()
    x = rng.standard_normal((32, 64)).astype(np.float32)
    step = TinyJit(lambda x: (x @ model["w"]).realize())
    device_x = Tensor(x, device="CUDA").realize()
    for _ in range(4):
        step(device_x)
    report = load(model, path)
    assert [p.action for p in report.plan.placements] == ["in_place"]
    for got in ((device_x @ model["w"]).numpy(), step(device_x).numpy()):
        np.testing.assert_allclose(got, x @ w, rtol=2e-3, atol=2e-3)


def test_bf16_stays_or_becomes_what_was_asked(large: Path) -> None:
    """bfloat16 stays where tinygrad computes in it here; printed: whether it does."""
    from streamload.devices.tinygrad.device import FRAMEWORK

    native = FRAMEWORK.device("CUDA").info.native_bf16
    report = load(None, large)
    kinds = {p.dst.name for p in report.plan.placements}
    print(f"\nbf16 native: {native}; loaded as {kinds}")
    assert kinds == {"bfloat16"} if native else kinds <= {"bfloat16", "float16"}
    check(report, large)


def test_what_is_queued_is_not_disturbed(tmp_path: Path) -> None:
    """Kernels that were queued before a load read what was there before it."""
    from tinygrad import Tensor

    n = 2048
    new = np.full((n, n), 7, np.float32)
    path = write_safetensors(tmp_path / "w.safetensors", {"w": ("F32", (n, n), new.tobytes())})
    x = (Tensor.ones(n, n, device="CUDA") / n).contiguous().realize()
    old = Tensor.full((n, n), 3.0, device="CUDA").contiguous().realize()
    for model in ({"w": old}, {"w": Tensor.empty(n, n, device="CUDA")}):
        freed = Tensor.full((n, n), 3.0, device="CUDA").contiguous().realize()
        y = old
        for _ in range(30):
            y = (y @ x).contiguous().realize()
        z = (freed + y).contiguous().realize()
        del freed
        load(model, path)
        np.testing.assert_allclose(z.numpy(), 6, rtol=1e-2)
        assert (model["w"].numpy() == 7).all()
        old = Tensor.full((n, n), 3.0, device="CUDA").contiguous().realize()


# --- memory and rates ---------------------------------------------------------------------------


HELD: Mapping[str, tuple[str | None, str]] = {
    "new": (None, "checkpoint"),
    "new, float16": (None, "float16"),
    "new, float32": (None, "float32"),
    "in place": ("bfloat16", "checkpoint"),
    "smaller in the place of larger ones": ("float32", "float16"),
    "larger in the place of smaller ones": ("bfloat16", "float32"),
}


def test_the_device_holds_what_was_planned_and_no_more(large: Path) -> None:
    from streamload.devices.tinygrad.device import FRAMEWORK

    for dtype in ("float16", "float32"):
        load(None, large, dtype=dtype)
        gc.collect()
    device = FRAMEWORK.device("CUDA")
    wrong = []
    for case, (holds, dtype) in HELD.items():
        model = None if holds is None else empty_model(large, holds)
        before = least = free_nbytes()

        def sample(done: int, total: int) -> None:
            nonlocal least
            least = min(least, device.info.free_nbytes or 0)

        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            report = streamload.load_state_dict(
                model, large, device="CUDA", budget="20GB", progress=sample, dtype=dtype
            )
        mine = report.plan.device("CUDA")
        taken_most, taken_last = before - least, before - free_nbytes()
        said = (
            f"{case}: held {mine.held_nbytes} before, weights {mine.resident_nbytes}, scratch "
            f"{mine.scratch_nbytes}, predicted {mine.peak_nbytes}, of that new {mine.fresh_nbytes};"
            f" taken at most {taken_most}, in the end {taken_last}"
        )
        print("\n" + said)
        if taken_most > mine.fresh_nbytes:
            wrong.append(f"more than predicted: {said}")
        if holds is None and not 0 <= mine.resident_nbytes - taken_last <= 2 * MIB:
            wrong.append(f"not what was predicted: {said}")
        del report, model
        gc.collect()
    assert not wrong


def test_the_budget_is_exact(large: Path) -> None:
    predicted = load(None, large, dtype="checkpoint").predicted_nbytes["CUDA"]
    gc.collect()
    load(None, large, dtype="checkpoint", budget=predicted)
    gc.collect()
    before = free_nbytes()
    with pytest.raises(PlanInfeasibleError):
        load(None, large, dtype="checkpoint", budget=predicted - MIB)
    assert free_nbytes() == before


GROWS = """
import re, sys, threading
from tinygrad import Device, Tensor
import streamload

def now():
    found = re.findall(r"^Rss(?:Anon|Shmem):\\s+(\\d+) kB", open("/proc/self/status").read(), re.M)
    return 1024 * sum(map(int, found))

def watch():
    global most
    while not ended.wait(0.005):
        most = max(most, now())

assert (Tensor([1.0, 2.0], device="CUDA") + 1).tolist() == [2.0, 3.0]
Device["CUDA"].synchronize()
before = most = now()
ended = threading.Event()
threading.Thread(target=watch, daemon=True).start()
report = streamload.load_state_dict(
    None, sys.argv[1], device="tinygrad:CUDA", budget="20GB", progress=False, **eval(sys.argv[2])
)
ended.set()
print(report)
print("the host grew by", (most - before) // 10**6, "MB, and held", before // 10**6, "before")
assert most - before <= 100_000_000
"""


@pytest.mark.parametrize("arguments", [{"dtype": "checkpoint"}, {"dtype": "float16"}])
def test_the_first_load_of_a_process_grows_it_by_little(
    large: Path, arguments: dict[str, str]
) -> None:
    """At most 100 MB of anonymous and shared memory, with what is compiled and imported once."""
    forked.fresh(GROWS, large, repr(arguments), options=("-W", "ignore"))


def test_the_host_holds_little(large: Path) -> None:
    """At most 100 MB more than before."""
    load(None, large, dtype="checkpoint")  # what is compiled once
    gc.collect()
    for _ in range(3):
        model = empty_model(large)
        with HostMemory() as host:
            report = load(model, large, dtype="checkpoint")
        assert host.grown_nbytes <= 100_000_000
        check(report, large, model)
        del model, report
        gc.collect()


def test_many_small_tensors(tmp_path: Path) -> None:
    """50,000 tensors of 8 kB."""
    from streamload.devices.tinygrad.device import FRAMEWORK

    count, numel = 50_000, 4096
    block = np.random.default_rng(2).bytes(2 * numel)
    path = write_safetensors(
        tmp_path / "many.safetensors",
        {f"layer.{i}.w": ("BF16", (numel,), block) for i in range(count)},
    )
    report = load(None, path, dtype="checkpoint")
    device = FRAMEWORK.device("CUDA")
    for tensor in report.state_dict.values():
        assert device.read(tensor.uop.base.buffer, 0, len(block)) == block


@pytest.mark.skipif(DEVICES < 2, reason="one CUDA device here")
def test_two_devices_share_a_model(large: Path) -> None:
    report = load(
        None,
        large,
        device=["tinygrad:CUDA", "tinygrad:CUDA:1"],
        budget={"CUDA": "700MB", "CUDA:1": "700MB"},
        dtype="checkpoint",
    )
    assert {t.device for t in report.state_dict.values()} == {"CUDA", "CUDA:1"}
    check(report, large)


def test_a_thread_that_has_no_context_loads_as_well(small: Path) -> None:
    done: list[Callable[[], None]] = []

    def loads() -> None:
        try:
            report = streamload.load_state_dict(
                None, small, device="CUDA", dtype="checkpoint", budget="1GB", progress=False
            )
            assert current_context() is None
            done.append(lambda: check(report, small))
        except BaseException as error:
            failure = error

            def fail() -> None:
                raise failure

            done.append(fail)

    thread = threading.Thread(target=loads)
    thread.start()
    thread.join()
    done[0]()


# --- quantised Linears --------------------------------------------------------------------------

FORMATS = ("int8", "q8_0", "q4_0", "nf4")
compiled = pytest.mark.skipif(
    importlib.metadata.version("tinygrad").startswith("0.13"), reason="it runs no program of others"
)


@compiled
@pytest.mark.parametrize("format", FORMATS)
def test_a_few_tokens_take_a_compiled_kernel(format: str) -> None:
    """Within rounding, for dtypes and numbers of tokens, of widths that fill a step and do not."""
    from nn_helpers import made
    from product_samples import worst
    from tinygrad import Tensor, dtypes
    from tinygrad.uop.ops import Ops

    half, bf16, single = dtypes.float16, dtypes.bfloat16, dtypes.float32
    eps = {half: 2.0**-10, bf16: 2.0**-7, single: 2.0**-23}
    cases = ((1024, half, 1), (1280, half, 2), (1280, bf16, 3), (1280, half, 16), (1280, single, 1))
    for width, dtype, tokens in cases:
        layer, weight = made(format, 37, width, "CUDA")
        x = Tensor.randn(1, tokens, width, device="CUDA").cast(dtype).realize()
        y = layer(x)
        assert any(node.op is Ops.PROGRAM for node in y.uop.toposort())
        found, given = (t.float().numpy().astype(np.float64)[0] for t in (y, x))
        assert worst(found, given, weight, eps[dtype]) < 1, (width, dtype, tokens)
    offsets = np.arange(37, dtype=np.float32)
    layer.bias = Tensor(offsets, device="CUDA").realize()
    assert np.allclose(layer(x).numpy()[0], found + offsets, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS)
def test_a_captured_model_takes_compiled_kernels(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nn_helpers import Transformer, fill, quantised
    from tinygrad import Tensor, TinyJit

    from streamload.devices.tinygrad import product
    from streamload.nn import QuantLinear, replace_linears

    Tensor.manual_seed(0)
    model = Transformer()
    replace_linears(model, lambda name: format if name.startswith("layers.") else None)
    for seed, layer in enumerate(x for m in model.layers for x in vars(m).values()):
        if isinstance(layer, QuantLinear):
            fill(layer, quantised(format, *layer.shape, seed)[0])
    tokens = [Tensor([[token]], device="CUDA").realize() for token in range(1, 6)]
    step = TinyJit(lambda ids: model(ids).realize())
    found = [step(ids).numpy().copy() for ids in tokens]
    with monkeypatch.context() as patch:
        patch.setattr(product, "MOST_TOKENS", 0)
        expected = [model(ids).numpy() for ids in tokens]
    most = np.abs(expected).max()
    assert np.abs(np.array(found) - np.array(expected)).max() <= 1e-5 * most


@compiled
def test_one_token_takes_less_time_than_float16() -> None:
    """Printed: microseconds of a Linear of 14336 x 4096, by TinyJit over sixteen, in turn."""
    from tinygrad import Device, Tensor, TinyJit, dtypes, nn

    from streamload.nn import QuantLinear

    def linears(format: str) -> Callable[[Any], Any]:
        held: list[Any] = []
        for _ in range(16):
            layer: Any = nn.Linear(4096, 14336, bias=False)
            if format == "float16":
                layer.weight = Tensor.zeros(14336, 4096, dtype=dtypes.float16, device="CUDA")
            else:
                layer = QuantLinear(format, 4096, 14336, device="CUDA")
            for tensor in nn.state.get_parameters(layer):
                tensor.replace(tensor.zeros_like().contiguous().realize())
            held.append(layer)
        return TinyJit(lambda x: [layer(x).realize() for layer in held])

    x = Tensor.zeros(1, 4096, dtype=dtypes.float16, device="CUDA").contiguous().realize()
    steps = {format: linears(format) for format in ("float16", *FORMATS)}
    times: dict[str, list[float]] = {format: [] for format in steps}
    for _ in range(3 + 5):
        for format, step in steps.items():
            Device["CUDA"].synchronize()
            begun = time.perf_counter()
            for _ in range(10):
                step(x)
            Device["CUDA"].synchronize()
            times[format].append((time.perf_counter() - begun) / 160 * 1e6)
    medians = {format: sorted(found[3:])[2] for format, found in times.items()}
    print("\n" + ", ".join(f"{format} {median:.1f}" for format, median in medians.items()))
    assert max(medians[format] for format in FORMATS) < medians["float16"]
