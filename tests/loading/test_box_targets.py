"""The box that kills, for what a model holds before: absent, shared, replaced, or very small.

Each load runs in a process and a box of its own, which gets its limit when the model stands.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.boxed_section import run
from box_load import run_boxed
from boxes import Boxes
from make_checkpoint import ManyTensors, make_checkpoint, shape_of_size
from parameters import product
from safetensors_files import write_safetensors

from streamload.bench.compare import forget
from streamload.core.dtypes import BF16

needs.module("torch")

NBYTES = 120_000_000
#: Beside the weights: what no plan counts, and the compiler of the first cast.
ROOM_NBYTES = 30_000_000
MiB = 2**20
BUDGETS = {"stated": NBYTES + MiB, "none": None, "percent": "80%"}
STATES = {"host": "resident", "torch": "meta", "CL": "lazy", "CPU": "lazy"}
HELD = {"host": "bfloat16", "torch": "bfloat16", "CL": "float16", "CPU": "float16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, 3,000 tensors of 34 kB ("small"), 6,000 and 3,000 of 8 kB, and 20,000 ("many")."""
    root = tmp_path_factory.mktemp("targets")
    make_checkpoint(root / "large", shape_of_size(NBYTES, BF16))
    make_checkpoint(root / "small", ManyTensors(3000, 17_000))
    make_checkpoint(root / "6000", ManyTensors(6000, 4096))
    make_checkpoint(root / "3000", ManyTensors(3000, 4096))
    make_checkpoint(root / "many", ManyTensors(20_000, 450))
    return root


def _load(
    cgroup: Boxes,
    path: Path,
    device: str,
    state: str,
    room_nbytes: int | None,
    *,
    held: str | None = None,
    dtype: str | None = None,
    kind: str = "dict",
    **options: Any,
) -> dict[str, Any]:
    """What happened to a load that had ``room_nbytes`` beside what its process held before.

    With a limit all bytes are compared; without one it is asked what was predicted and taken.
    """
    if device in ("CL", "CPU"):
        needs.device(device)
    held = held or HELD[device]
    case = {
        **{"path": str(path), "device": device, "state": state, "kind": kind, "held": held},
        "options": {"dtype": dtype or held} | options,
        "unchecked": room_nbytes is None,
    }
    limit = None if room_nbytes is None else lambda charged: charged + room_nbytes
    return run_boxed(cgroup, case, limit)


@pytest.mark.parametrize(
    ("device", "state", "budget"),
    product(
        [
            *(("host", "zeros"), ("host", "mapped"), ("host", "forked")),
            *(("torch", "to_empty"), ("torch", "mapped"), ("torch", "forked")),
            *(("CL", "empty"), ("CPU", "empty")),
        ],
        BUDGETS,
        fast=lambda device, state, budget: (
            (device, state) == ("host", "zeros")
            or (budget == "stated" and state in ("to_empty", "empty") and device != "CPU")
        ),
    ),
)
def test_memory_that_is_not_there_is_counted(
    cgroup: Boxes, folder: Path, device: str, state: str, budget: str
) -> None:
    """A model whose pages are not there, or not its own, is refused where they have no room."""
    found = _load(cgroup, folder / "large", device, state, NBYTES // 2, budget=BUDGETS[budget])
    assert (found["outcome"], "does not fit" in found["why"]) == ("refused", True), found
    if budget == "stated":
        assert "count as new" in found["why"]


@pytest.mark.parametrize(
    ("device", "budget"),
    product(
        ["host", "torch", "CL", "CPU"],
        BUDGETS,
        fast=lambda device, budget: (device, budget) in {("host", "stated"), ("torch", "none")},
    ),
)
def test_memory_that_is_there_is_written_again(
    cgroup: Boxes, folder: Path, device: str, budget: str
) -> None:
    """A model that was written before loads in place beside little memory, whatever the budget."""
    found = _load(cgroup, folder / "large", device, "resident", ROOM_NBYTES, budget=BUDGETS[budget])
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    assert found["taken_nbytes"] < NBYTES // 4


@pytest.mark.slow
def test_a_first_test_of_a_device_has_no_room(
    cgroup: Boxes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends the process that tests a device, and not the one with the model."""
    needs.device("CPU")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = _load(cgroup, folder / "large", "CPU", "resident", NBYTES // 3, budget="1GB")
    assert found["said"]["outcome"] == "DeviceNotFoundError", found
    assert "streamload devices" in found["why"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", ["host", "torch"])
def test_what_is_replaced_is_given_back_in_time(
    cgroup: Boxes, folder: Path, device: str, dtype: str
) -> None:
    """Small tensors that become longer or shorter take what was predicted, and load in it."""
    held = "float16" if dtype == "float32" else "float32"
    said: dict[str, Any] = {"held": held, "dtype": dtype, "budget": "1GB"}
    found = _load(cgroup, folder / "small", device, "resident", None, **said)
    predicted = found["said"]["predicted_nbytes"]
    assert found["said"]["reported_nbytes"] <= predicted, found
    weights = 3000 * 17_000 * (4 if dtype == "float32" else 2)
    assert predicted < (0.85 if dtype == "float32" else 0.25) * weights
    found = _load(cgroup, folder / "small", device, "resident", predicted + ROOM_NBYTES, **said)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found


def test_a_map_needs_no_room_for_what_is_read_ahead(cgroup: Boxes, folder: Path) -> None:
    """It is read in small pieces, as by pread, where it was refused with 20 MB to spare."""
    [file] = (folder / "large").glob("*.safetensors")
    forget([file])
    said = {"reader": "mmap", "held": "float16", "budget": "1GB"}
    found = _load(cgroup, folder / "large", "host", "none", NBYTES + ROOM_NBYTES, **said)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    assert found["said"]["readers"] == ["mmap"]


@pytest.mark.slow
def test_opening_a_checkpoint_has_room(cgroup: Boxes, folder: Path) -> None:
    """A load in place is refused before it opens files: it was killed in two of three boxes."""
    for room_nbytes in (2_000_000, 2_350_000, 3_000_000):
        found = _load(cgroup, folder / "large", "CL", "resident", room_nbytes, budget="1GB")
        assert (found["outcome"], "does not fit" in found["why"]) == ("refused", True), found


@pytest.mark.slow
def test_arrays_of_the_same_size_take_the_place_of_old_ones(cgroup: Boxes, folder: Path) -> None:
    """No heap is counted for 20,000 that become bfloat16; 36 MB in all were, and 10 are taken."""
    said = {"held": "float16", "dtype": "bfloat16", "budget": "1GB"}
    found = _load(cgroup, folder / "many", "host", "resident", 58_000_000, **said)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found


@pytest.mark.parametrize(
    ("device", "kind"),
    product(
        ["host", "torch", "CL", "CPU"],
        ["none", "dict"],
        fast=lambda device, kind: (device, kind) == ("host", "none"),
    ),
)
def test_many_tensors_take_what_was_predicted(
    cgroup: Boxes, folder: Path, device: str, kind: str
) -> None:
    state = "none" if kind == "none" else STATES[device]
    # tinygrad takes so much for each that half as many are seen as well
    count = 3000 if device in ("CL", "CPU") else 6000
    found = _load(cgroup, folder / str(count), device, state, None)
    predicted, grew = (found["said"][f"{what}_nbytes"] for what in ("predicted", "reported"))
    beside = count * 8192 if state != "resident" else 0
    assert grew <= predicted, found
    # less is taken where the heap had freed memory: torch's parameters took 250 to 430 bytes
    assert predicted - grew < 0.7 * (predicted - beside) + MiB, found
    # and with the kernel's part it loads in that much
    room_nbytes = found["charged_nbytes"] + ROOM_NBYTES
    found = _load(cgroup, folder / str(count), device, state, room_nbytes, budget="1GB")
    assert (found["outcome"], found["why"]) == ("loaded", ""), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "dict"])
@pytest.mark.parametrize("device", ["host", "torch", "CL", "CPU"])
def test_tensors_that_are_unlike_take_what_was_predicted(
    cgroup: Boxes, tmp_path: Path, device: str, kind: str
) -> None:
    """Many sizes, shapes and dtypes: some frameworks keep something for each."""
    count = 3000
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for i in range(count):
        code, n = ("F32", "F16", "BF16")[i % 3], 1 + i * 7919 % 2000
        shape = ((n,), (1, n), (n, 1), (n, 1, 2))[i % 4]
        data = bytes(math.prod(shape) * (4 if code == "F32" else 2))
        tensors[f"layers.{i}.weight"] = code, shape, data
    write_safetensors(tmp_path / "model.safetensors", tensors)
    state = "none" if kind == "none" else STATES[device]
    found = _load(cgroup, tmp_path, device, state, None, dtype="checkpoint", held="float32")
    predicted, grew = (found["said"][f"{what}_nbytes"] for what in ("predicted", "reported"))
    assert grew <= predicted, found
    if (device, kind) == ("CL", "none"):
        assert predicted - grew < 0.1 * predicted + 3 * MiB, found  # that much is for any load
    room_nbytes = found["charged_nbytes"] + ROOM_NBYTES
    said = {"dtype": "checkpoint", "held": "float32", "budget": "1GB"}
    found = _load(cgroup, tmp_path, device, state, room_nbytes, **said)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found


def test_a_budget_of_exactly_the_peak_is_enough(cgroup: Boxes, folder: Path) -> None:
    """Also in a small box, where the file is read otherwise than it was planned with room."""
    said = {"held": "float16", "budget": "1GB"}
    found = _load(cgroup, folder / "large", "host", "none", None, **said)
    peak = found["said"]["device_nbytes"]
    found = _load(
        cgroup, folder / "large", "host", "none", peak + ROOM_NBYTES, **said | {"budget": peak}
    )
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    assert "pread" in found["said"]["readers"]


@pytest.mark.parametrize(
    ("device", "state", "room_nbytes"),
    [
        ("host", "resident", 36_000_000),
        ("host", "resident", 48_000_000),
        pytest.param("CL", "lazy", 30_000_000, marks=pytest.mark.slow),
    ],
)
def test_planning_itself_has_room(
    cgroup: Boxes, folder: Path, device: str, state: str, room_nbytes: int
) -> None:
    """20,000 parameters take 22 MB to match and plan, and that is looked at first."""
    held = {"held": "float32", "dtype": "float16"} if device == "host" else {}
    found = _load(cgroup, folder / "many", device, state, room_nbytes, budget="80%", **held)
    assert (found["outcome"], "does not fit" in found["why"]) == ("refused", True), found


@pytest.mark.parametrize(
    ("device", "kind"),
    product(
        ["host", "torch", "CL"],
        ["plain", "cast", "nf4", "chunks", "layers"],
        fast=lambda device, kind: device == "host" and kind in ("nf4", "chunks"),
    ),
)
def test_predictions_are_within_two_percent(
    cgroup: Boxes, folder: Path, tmp_path: Path, device: str, kind: str
) -> None:
    """As read from outside, with what the compiler keeps, of loads and passes of 60 MB and more.

    nf4 to CL is half a percent above that at 57 MB.
    """
    path, options = folder / "large", {"budget": "70MB" if kind == "layers" else "1GB"}
    if kind == "chunks":
        import torch
        from torch.distributed import checkpoint

        weight = torch.ones(1024, 4096, dtype=torch.bfloat16)
        state = {f"model.layers.{n}.w": weight + n for n in range(12)}
        checkpoint.save(state, checkpoint_id=tmp_path / "chunks", no_dist=True)
        path = tmp_path / "chunks"
    case = {
        **{"path": str(path), "shapes": str(folder / "large"), "device": device, "state": "none"},
        **{"kind": "dict", "held": "bfloat16", "unchecked": True},
        "layers": kind == "layers",
        "options": options
        | {"dtype": {"cast": "float32", "layers": "float16"}.get(kind, "checkpoint")}
        | {"quant": "nf4" if kind == "nf4" else None},
    }
    if device == "CL":  # a child process tests the device once, which takes more
        run_boxed(cgroup, case)
    found = run_boxed(cgroup, case)
    assert found["outcome"] == "loaded", found
    predicted = found["said"]["predicted_nbytes"]
    assert predicted > 50_000_000
    most = 0.025 if (device, kind) == ("CL", "nf4") else 0.02
    assert abs(predicted / found["taken_nbytes"] - 1) < most, found


def test_passes_take_memory_that_the_load_has_freed(cgroup: Boxes, folder: Path) -> None:
    """Scratch of the load and slots of the passes are not added: 16.8 MB of 62.8 were too much."""
    case = {
        **{"path": str(folder / "large"), "device": "host", "state": "none", "layers": True},
        "options": {"budget": "1GB", "dtype": "float16"},
    }
    found = run_boxed(cgroup, case, lambda charged: charged + 60_000_000)
    assert found["outcome"] == "loaded", found
    assert abs(found["said"]["predicted_nbytes"] / found["taken_nbytes"] - 1) < 0.04, found


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["60MB", "90MB"])
def test_an_offload_takes_what_was_predicted(cgroup: Boxes, folder: Path, budget: str) -> None:
    """Within 2%, but for activations, of which the plan states the most."""
    cell = ("offload", "stated", "cached")
    found = run(cgroup, folder / "large", cell, None, budget=budget)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    predicted, activations = (found["said"][f"{key}_nbytes"] for key in ("predicted", "activation"))
    assert predicted - activations < 1.02 * found["taken_nbytes"], found
    assert found["taken_nbytes"] < 1.02 * predicted, found
