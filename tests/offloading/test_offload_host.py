"""What streams on the host's side: views on the files, the tier in host memory, the page cache."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import offloading_models as models
import pytest
import torch
from boxes import Boxes
from make_checkpoint import make_checkpoint, make_header, shape_of_size
from parameters import product
from torch import nn

import streamload
from streamload.core.dtypes import BF16, parse_dtype
from streamload.errors import CheckpointError, FileChangedError, OffloadError, PlanInfeasibleError
from streamload.offloading import plan as planning

LAYERS, WIDTH = 8, 256
LAYER_NBYTES = WIDTH * WIDTH * 4
# a third of it: two slots, and what stays
BUDGET = 4 * LAYER_NBYTES


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        linears = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        self.layers = nn.ModuleList(linears)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def made() -> Stack:
    with torch.device("meta"):
        return Stack().eval()


def write(path: Path, offset: int, dtype: str = "float32") -> Path:
    """A checkpoint whose data begins at this place modulo 64."""
    shapes = [(f"layers.{n}.weight", (WIDTH, WIDTH)) for n in range(LAYERS)]
    torch.manual_seed(0)
    with path.open("wb") as file:
        file.write(make_header(shapes, parse_dtype(dtype), offset))
        assert file.tell() % 64 == offset
        for _ in shapes:
            weight = (torch.randn(WIDTH, WIDTH) / WIDTH**0.5).to(getattr(torch, dtype))
            file.write(weight.view(torch.uint8).numpy().tobytes())
    return path


@pytest.fixture
def aligned(tmp_path: Path) -> Path:
    return write(tmp_path / "model.safetensors", 0)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, WIDTH)


def expected(path: Path, x: torch.Tensor, **options: Any) -> torch.Tensor:
    model = made()
    streamload.load_state_dict(model, path, device="cpu", progress=False, **options)
    with torch.no_grad():
        found: torch.Tensor = model(x)
    return found


def offloaded(path: Path, **options: Any) -> tuple[Stack, streamload.Offloaded]:
    model = made()
    settings = {"budget": BUDGET, "device": "cpu", "progress": False} | options
    return model, streamload.offload(model, path, **settings)


def mapped_nbytes(path: str) -> int:
    """What this process has in memory of a file's pages, as the kernel says."""
    found, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            of_file = path in line
        elif of_file and head == "Rss:":
            found += int(line.split()[1]) * 1024
    return found


# --- views ----------------------------------------------------------------------------------------


def test_layers_are_views_on_the_file(aligned: Path, x: torch.Tensor) -> None:
    model, handle = offloaded(aligned)
    assert handle.plan.views
    assert "pages of the mapped files" in str(handle.plan)
    assert 'residence="mapped" is faster' in str(handle.report)
    most, addresses = 0, set()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: addresses.add(mapped_nbytes(str(aligned))))
    with handle, torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected(aligned, x))
        most = max(addresses)
        assert 0 < most <= handle.plan.residency.arena_nbytes + 2**18
        assert handle.report.read_nbytes >= 2 * handle.plan.residency.pass_nbytes
    assert mapped_nbytes(str(aligned)) == 0


@pytest.mark.parametrize("offset", [8])
def test_other_alignments_are_copied(tmp_path: Path, x: torch.Tensor, offset: int) -> None:
    """Products change with alignment, so that views begin at multiples of 64 only."""
    path = write(tmp_path / "model.safetensors", offset)
    model, handle = offloaded(path)
    assert not handle.plan.views
    with handle, torch.no_grad():
        assert torch.equal(model(x), expected(path, x))


def test_a_converted_file_is_computed_on(tmp_path: Path, x: torch.Tensor) -> None:
    path = write(tmp_path / "model.safetensors", 8)
    line = "layers.0.weight does not begin at a multiple of 64 in its file"
    model, handle = offloaded(path)
    with handle, torch.no_grad():
        assert line in str(handle.plan)
        assert "streamload convert PATH OUT" in str(handle.plan)
        copied = model(x)
    streamload.convert(path, tmp_path / "converted", progress=False)
    model, handle = offloaded(tmp_path / "converted")
    with handle, torch.no_grad():
        assert handle.plan.views
        assert "multiple of 64" not in str(handle.plan)
        assert torch.equal(model(x), copied)
    _, handle = offloaded(path, host="1GB")  # host memory has them at multiples of 64
    with handle:
        assert handle.plan.views
        assert "multiple of 64" not in str(handle.plan)
    _, handle = offloaded(path, reader="pread")
    with handle:
        assert "multiple of 64" not in str(handle.plan)


def test_what_convert_cannot_align_is_not_told(tmp_path: Path) -> None:
    """Tensors whose lengths are no multiples of 64 are copied wherever they begin."""
    path, width = tmp_path / "model.safetensors", WIDTH - 1
    shapes = [(f"layers.{n}.weight", (width, width)) for n in range(LAYERS)]
    with path.open("wb") as file:
        file.write(make_header(shapes, parse_dtype("float32"), 8))
        file.write(bytes(LAYERS * width * width * 4))
    model = made()
    with torch.device("meta"):
        linears = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model.layers = nn.ModuleList(linears)
    options = {"budget": BUDGET, "device": "cpu", "progress": False}
    with streamload.offload(model.eval(), path, **options) as handle:
        assert not handle.plan.views
        assert "multiple of 64" not in str(handle.plan)


@pytest.mark.parametrize(
    "options", [{"reader": "pread"}, {"dtype": "float16"}, {"dtype": "bfloat16"}]
)
def test_what_is_cast_or_not_to_be_mapped_is_copied(
    aligned: Path, x: torch.Tensor, options: dict[str, Any]
) -> None:
    model, handle = offloaded(aligned, **options)
    assert not handle.plan.views
    dtype = getattr(torch, options.get("dtype", "float32"))
    with handle, torch.no_grad():
        assert torch.equal(model(x.to(dtype)), expected(aligned, x.to(dtype), **options))


def test_tiny_budgets_to_everything(aligned: Path, x: torch.Tensor) -> None:
    """The same bits under each budget."""
    wanted = expected(aligned, x)
    for layers in range(2, LAYERS + 1):
        model, handle = offloaded(aligned, budget=layers * LAYER_NBYTES)
        with handle, torch.no_grad():
            assert torch.equal(model(x), wanted), layers
        assert handle.plan.peak_nbytes <= layers * LAYER_NBYTES


def test_file_that_becomes_shorter_is_an_error(aligned: Path, x: torch.Tensor) -> None:
    model, handle = offloaded(aligned)
    with handle, torch.no_grad():
        model(x)
        wait_for_idle()
        os.truncate(aligned, aligned.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="shorter"):
            model(x)


def test_writer_waits_while_a_layer_is_computed_on(aligned: Path, x: torch.Tensor) -> None:
    """A file that is computed on is not cut short: that would kill the process."""
    model, handle = offloaded(aligned)
    inside, cut = threading.Event(), threading.Event()

    def truncate() -> None:
        inside.wait()
        os.truncate(aligned, 0)  # the kernel holds it back for as long as the file is leased
        cut.set()

    original, calls = nn.functional.linear, iter(range(1000))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        if f"layers.{next(calls) % LAYERS}" in handle.plan.residency.streams:
            inside.set()
            time.sleep(0.5)
            assert not cut.is_set()
        return original(x, weight, bias)

    thread = threading.Thread(target=truncate)
    thread.start()
    with handle, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", linear)
        with pytest.raises(FileChangedError):
            model(x)
        thread.join()
    assert cut.is_set()


def wait_for_idle() -> None:
    until = time.monotonic() + 10
    while any(t.name.startswith("streamload") for t in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.05)


# --- the host tier --------------------------------------------------------------------------------


def memory_files() -> list[int]:
    found = {}  # by number of the file: maps of Python hold a descriptor too
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith("/memfd:streamload"):
                found[os.stat(fd).st_ino] = os.stat(fd).st_blocks * 512
        except OSError:
            continue
    return [*found.values()]


@pytest.mark.parametrize("offset", [0, 8])
def test_layers_in_host_memory(tmp_path: Path, x: torch.Tensor, offset: int) -> None:
    """They take their bytes there and no more, and give the same bits."""
    path = write(tmp_path / "model.safetensors", offset)
    model, handle = offloaded(path, host=3 * LAYER_NBYTES + 1000)
    plan = handle.plan
    assert len(plan.host) == 3
    assert plan.host_nbytes == 3 * LAYER_NBYTES
    assert plan.places["host memory"] == 3 * LAYER_NBYTES
    assert sum(plan.places.values()) == LAYERS * LAYER_NBYTES
    assert "host memory 786 kB" in str(plan)
    (nbytes,) = memory_files()
    assert 3 * LAYER_NBYTES <= nbytes <= 3 * LAYER_NBYTES + 2 * 4096
    with handle, torch.no_grad():
        assert torch.equal(model(x), expected(path, x))
        assert torch.equal(model(x), expected(path, x))
    assert memory_files() == []


def test_all_layers_in_host_memory_need_the_file_no_more(aligned: Path, x: torch.Tensor) -> None:
    wanted = expected(aligned, x)
    model, handle = offloaded(aligned, host="1GB")
    assert handle.plan.host == handle.plan.residency.streams
    aligned.unlink()
    with handle, torch.no_grad():
        assert torch.equal(model(x), wanted)


def test_host_that_has_no_room_is_refused(aligned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_host_nbytes", lambda: 2_000_000)
    model = made()
    with pytest.raises(PlanInfeasibleError, match=r"layers in host memory \(host=\)") as caught:
        streamload.offload(model, aligned, budget=BUDGET, host="1GB", device="cpu", progress=False)
    assert caught.value.device == "host"
    assert caught.value.budget_nbytes == 2_000_000
    assert caught.value.needed_nbytes > BUDGET
    assert all(p.device.type == "meta" for p in model.parameters())
    assert memory_files() == []


def test_no_host_memory_by_default(aligned: Path) -> None:
    """The page cache is the tier."""
    _, handle = offloaded(aligned)
    with handle:
        assert handle.plan.host == ()
        assert handle.plan.places["host memory"] == 0
        assert memory_files() == []


def test_failed_offload_gives_host_memory_back(
    aligned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamload.offloading import offload as entrance

    def fail(*_: Any) -> None:
        raise RuntimeError("no slots")

    monkeypatch.setattr(entrance.Rounds, "open", fail)
    with pytest.raises(RuntimeError, match="no slots"):
        offloaded(aligned, host="1GB")
    assert memory_files() == []


# --- the page cache -------------------------------------------------------------------------------


def test_what_does_not_fit_comes_from_the_disk(
    aligned: Path, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is dropped behind each layer; what fits is kept for the next pass."""
    from streamload.files.page_cache import resident_fraction

    for free_nbytes, place, cached in ((2**20, "disk", False), (2**40, "page cache", True)):
        with monkeypatch.context() as patch:
            patch.setattr(planning, "free_host_nbytes", lambda n=free_nbytes: n)
            model, handle = offloaded(aligned)
        assert handle.plan.cached is cached
        assert handle.plan.places[place] == handle.plan.residency.pass_nbytes
        assert f"{place} " in str(handle.plan)
        with handle, torch.no_grad():
            assert torch.equal(model(x), expected(aligned, x))
            model(x)
        resident = resident_fraction(aligned)
        assert resident is not None
        assert (resident > 0.9) is cached


@pytest.fixture(scope="module")
def wider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wider") / "model"
    return models.save(models.built(request.param, times=8), path)


@pytest.mark.parametrize(
    ("wider", "device"),
    product(
        ["llama", "t5"],
        ["cpu", "cuda:0", "CUDA"],
        fast=lambda model, device: (model, device) != ("t5", "CUDA"),
    ),
    indirect=["wider"],
)
def test_what_an_error_says_is_needed_is_accepted(device: str, wider: Path) -> None:
    """With what its allocator rounds small tensors to, and what loading those that stay takes."""
    asked: dict[str, Any] = {"device": device, "dtype": "float32", "tokens": 64}
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.plan_offload(wider, budget=1000, **asked)
    needed = caught.value.needed_nbytes
    for more in range(4):  # what a little more lets stay may be rounded to a lot
        plan = streamload.plan_offload(wider, budget=needed + more * 3 * 10**6, **asked)
        assert plan.needed_nbytes <= needed + more * 3 * 10**6
        assert plan.load_nbytes <= plan.peak_nbytes


def test_plan_of_a_checkpoint_says_the_same(aligned: Path) -> None:
    plan = streamload.plan_offload(
        aligned, budget=BUDGET, device="cpu", dtype="float32", host=LAYER_NBYTES
    )
    assert plan.views
    assert len(plan.host) == 1
    said = json.loads(plan.to_json())
    assert said["places"]["host memory"] == LAYER_NBYTES
    assert said["views"] is True


# --- a box ----------------------------------------------------------------------------------------

JOB = """
import json, sys, threading, time
import accelerate, torch, streamload
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
path, budget, tokens, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with accelerate.init_empty_weights(include_buffers=False):
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
def anon():
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {n: int(v.split()[0]) * 1024 for n, v in (l.split(":") for l in lines if "Rss" in l)}
    return found["RssAnon"] + found["RssShmem"], found["RssFile"]
ids = torch.arange(tokens)[None] % 1000
before, peaks, seconds = anon(), [0, 0], []
def watch():
    while True:
        now = anon()
        peaks[:] = map(max, peaks, now)
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
with streamload.offload(model, path, budget=budget, device="cpu", progress=False, **options) as h:
    with torch.no_grad():
        for _ in range(3):
            begun = time.perf_counter()
            logits = model(ids, use_cache=False).logits
            seconds.append(time.perf_counter() - begun)
r = h.plan.residency
print(json.dumps({"before": before, "peaks": peaks, "seconds": seconds, "views": h.plan.views,
    "resident": r.resident_nbytes, "arena": r.arena_nbytes, "cached": h.plan.cached,
    "sum": float(logits.double().sum())}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("large") / "llama"
    make_checkpoint(path, shape_of_size(1_500_000_000, BF16), offset_mod_16=0)
    yield path
    for file in path.iterdir():
        file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_passes_in_a_box_that_is_smaller_than_the_model(
    large: Path, cgroup: Boxes, reader: str
) -> None:
    """1.5 GB in a cgroup of 600 MB: nothing is killed, and memory is what was planned."""
    options = json.dumps({"reader": reader})
    argv = [sys.executable, "-c", JOB, str(large), "250MB", "16", options]
    done = cgroup.run(argv, 600_000_000)
    assert done.returncode == 0, done.stderr
    said = done.said
    assert not said["cached"]
    weights = said["resident"] + (0 if said["views"] else said["arena"])
    grown = said["peaks"][0] - said["before"][0]
    # what torch, its threads and a pass take beside weights and slots
    assert weights * 0.98 <= grown <= weights * 1.02 + 60_000_000
    assert said["views"] is (reader == "auto")
    if said["views"]:
        assert said["peaks"][1] - said["before"][1] <= said["arena"] * 1.02 + 40_000_000
    assert done.peak_nbytes is not None
    assert done.peak_nbytes <= 600_000_000


def test_a_layer_inside_another_without_room_leaves_its_files(tmp_path: Path) -> None:
    """The error is raised through the outer layer, which lets go of what it has mapped."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
            self.inner = [inner]  # of another module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.inner[0](x @ self.weight)
            return found

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
            self.layers = nn.ModuleList(Outer(self.shared) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    shapes = [(name, (WIDTH, WIDTH)) for name, _ in Both().named_parameters()]
    path = tmp_path / "model.safetensors"
    path.write_bytes(make_header(shapes, parse_dtype("float32"), 0))
    with path.open("ab") as file:
        file.write(bytes(len(shapes) * LAYER_NBYTES))
    model = Both().eval()
    with streamload.offload(model, path, device="cpu", budget=LAYER_NBYTES * 5 // 4) as handle:
        assert handle.plan.views and handle.plan.residency.slots == 1
        for _ in range(2):
            with torch.no_grad(), pytest.raises(OffloadError, match="no room for both"):
                model(torch.zeros(1, WIDTH))
        assert handle._rounds is not None
        assert handle._rounds._views is not None
        assert not any(handle._rounds._views._entered.values())  # type: ignore[attr-defined]
