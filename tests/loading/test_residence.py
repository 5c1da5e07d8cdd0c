"""Weights that stay in their files: views on private maps, and what keeps a weight from it."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boxes import Boxes
from safetensors.torch import save_file
from safetensors_files import write_safetensors
from torch import nn

import streamload
from streamload import load_state_dict, plan
from streamload.errors import (
    FileChangedError,
    PlanInfeasibleError,
    ResidenceError,
    ShardNotFoundError,
    TruncatedFileError,
)
from streamload.streaming.memory_watch import process_nbytes

LAYERS = 8


def module(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*[nn.Linear(256, 256) for _ in range(LAYERS)])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    state = {name: torch.randn_like(t, device="cpu") for name, t in module().state_dict().items()}
    for shard in (0, 1):
        part = {n: t for n, t in state.items() if int(n[0]) % 2 == shard}
        save_file(part, tmp_path / f"{shard}.safetensors")
    return tmp_path, state


def is_on_a_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a mapped file, as the kernel says."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return ".safetensors" in line and line.split()[1] == "rw-p"
    return False


def test_weights_are_views_on_the_files(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    model = module()
    before = process_nbytes()
    report = load_state_dict(model, path, residence="mapped")
    after = process_nbytes()
    assert before is not None
    assert after is not None
    assert after - before < 2**20
    nbytes = sum(t.nbytes for t in state.values())
    (device,) = report.plan.devices
    assert (device.resident_nbytes, device.mapped_nbytes, report.read_nbytes) == (0, nbytes, 0)
    assert "stay in the files" in str(report)
    assert "stay in the mapped files" in str(report.plan)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
        assert is_on_a_file(tensor), name
    assert report.plan == type(report.plan).from_json(report.plan.to_json())


@pytest.mark.parametrize("device", ["cpu", "host"])
def test_without_a_model(saved: tuple[Path, dict[str, torch.Tensor]], device: str) -> None:
    """Arrays and tensors by name; they keep the map, whatever else goes."""
    path, state = saved
    found = dict(load_state_dict(None, path, device=device, residence="mapped").state_dict)
    for name, value in found.items():
        assert np.array_equal(np.asarray(value), state[name].numpy()), name
    assert plan(path, device=device, budget="1MB", residence="mapped").devices[0].mapped_nbytes


def test_what_is_written_stays_in_the_process(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    files = {shard: shard.read_bytes() for shard in path.glob("*.safetensors")}
    model = module()
    load_state_dict(model, path, residence="mapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    first = model.get_parameter("0.weight").detach()
    assert not torch.equal(first, state["0.weight"])
    pid = os.fork()
    if pid == 0:
        first.zero_()
        os._exit(bool(first.any()))
    assert os.waitpid(pid, 0)[1] == 0
    assert first.any()
    with pytest.raises(RuntimeError, match="not resizable"):  # a map has the length of its file
        model.get_parameter("1.bias").data.resize_(1024)
    assert {shard: shard.read_bytes() for shard in files} == files
    load_state_dict(model, path, residence="memory", strict=False)  # over the views
    assert torch.equal(model.get_parameter("0.weight"), state["0.weight"])
    assert {shard: shard.read_bytes() for shard in files} == files


def test_what_a_model_holds_is_released(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    model = module(device="cpu")
    report = load_state_dict(model, path, residence="mapped")
    assert {p.action for p in report.plan.placements} == {"replace"}
    assert all(is_on_a_file(t) for t in model.state_dict().values())
    assert torch.equal(model.get_parameter("2.weight"), state["2.weight"])


def test_auto_loads_what_cannot_be_mapped(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = saved
    model = module()
    report = load_state_dict(model, path, residence="auto", dtype={"*.bias": "bfloat16"})
    for name, tensor in model.state_dict().items():
        assert is_on_a_file(tensor) == name.endswith("weight"), name
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    (device,) = report.plan.devices
    assert device.mapped_nbytes == LAYERS * 256 * 256 * 4
    assert report.read_nbytes == LAYERS * 256 * 4
    both = load_state_dict(
        None,
        path,
        device="cpu",
        residence="auto",
        mapping={"both": ["0.weight", "2.weight"], "rows": streamload.RowRange("1.weight", 2, 7)},
    ).state_dict
    assert not is_on_a_file(both["both"])
    assert torch.equal(both["both"], torch.cat([state["0.weight"], state["2.weight"]]))
    assert is_on_a_file(both["rows"])
    assert torch.equal(both["rows"], state["1.weight"][2:7])


def test_auto_writes_views_of_larger_tensors_in_place(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """A view of a larger tensor cannot become a view on a file: "mapped" refuses it by name."""
    path, state = saved
    model = {name: torch.zeros_like(t) for name, t in state.items()}
    whole = torch.zeros(2, 256, 256)
    model["0.weight"] = whole[1]
    with pytest.raises(ResidenceError, match=r"'0.weight'.*it is a view of a larger tensor"):
        load_state_dict(model, path, residence="mapped")
    report = load_state_dict(model, path, residence="auto")
    assert torch.equal(whole[1], state["0.weight"])
    assert not whole[0].any()
    placed = {p.name: (p.action, p.cast) for p in report.plan.placements}
    assert placed.pop("0.weight") == ("in_place", "copy")
    assert set(placed.values()) == {("replace", "mapped")}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "float32 becomes float16"),
        ({"device": "CPU"}, "CPU does not compute on mapped files"),
        ({"mapping": {"a": ["0.bias", "1.bias"]}}, "its rows do not follow each other"),
    ],
)
def test_mapped_refuses_what_needs_a_copy(
    saved: tuple[Path, dict[str, torch.Tensor]], arguments: dict[str, Any], said: str
) -> None:
    asked = {"device": "cpu", **arguments, "residence": "mapped"}
    with pytest.raises(ResidenceError, match=said) as caught:
        load_state_dict(None, saved[0], **asked)
    assert 'residence="auto" loads it' in str(caught.value)
    assert copy.copy(caught.value).parameter == caught.value.parameter
    load_state_dict(None, saved[0], **{**asked, "residence": "auto"})


def test_bytes_that_are_not_aligned(tmp_path: Path) -> None:
    """torch takes them without a word, and some CPUs do not: they are copied."""
    data = np.arange(10, dtype=np.float32).tobytes()
    tensors = {"odd": ("U8", [1], b"1"), "floats": ("F32", [10], data)}
    path = write_safetensors(tmp_path / "x.safetensors", tensors, align=0)
    with pytest.raises(ResidenceError, match="no multiple of the 32 bits of float32"):
        load_state_dict(None, path, device="host", residence="mapped")
    found = load_state_dict(None, path, device="host", residence="auto").state_dict
    assert found["floats"].tolist() == list(range(10))


def test_empty_tensors_and_scalars(tmp_path: Path) -> None:
    """What has no bytes has nothing to map."""
    state = {"none": torch.zeros(0, 3), "one": torch.tensor(2.5), "many": torch.ones(5)}
    save_file(state, tmp_path / "x.safetensors")
    found = load_state_dict(None, tmp_path, device="cpu", residence="mapped").state_dict
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert found["none"].shape == (0, 3)


def test_a_file_that_changes(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Before the load it is refused; afterwards it is found by request."""
    path, state = saved
    shard = path / "1.safetensors"
    checkpoint = streamload.open_checkpoint(path)
    report = load_state_dict(module(), checkpoint, residence="mapped")
    report.check_files()
    whole = shard.read_bytes()
    shard.write_bytes(whole)
    with pytest.raises(FileChangedError):
        report.check_files()
    model = module()
    with pytest.raises(FileChangedError) as caught:
        load_state_dict(model, checkpoint, residence="mapped")
    assert caught.value.state is not None
    assert {name[0] for name in caught.value.state.loaded} <= {"0", "2", "4", "6"}
    load_state_dict(model, path, residence="mapped")
    assert torch.equal(model.get_parameter("1.weight"), state["1.weight"])
    os.truncate(shard, len(whole) - 1)
    with pytest.raises(TruncatedFileError):
        report.check_files()
    shard.unlink()
    with pytest.raises(ShardNotFoundError):
        report.check_files()


def test_saving_over_the_same_file(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """A file that is replaced, and not rewritten, leaves the views as they were."""
    path, state = saved
    model = module()
    load_state_dict(model, path, residence="mapped")
    part = {n: t for n, t in model.state_dict().items() if int(n[0]) % 2 == 0}
    save_file({n: t + 1 for n, t in part.items()}, path / "new")
    os.replace(path / "new", path / "0.safetensors")
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_what_does_not_fit_is_suggested(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(PlanInfeasibleError) as caught:
        load_state_dict(module(), saved[0], budget="100kB")
    assert 'residence="mapped"' in caught.value.would_fit
    with pytest.raises(PlanInfeasibleError) as caught:
        load_state_dict(module(), saved[0], budget="100kB", dtype={"0.bias": "float16"})
    assert 'residence="auto"' in caught.value.would_fit
    with pytest.raises(PlanInfeasibleError) as caught:
        load_state_dict(module(), saved[0], budget="100kB", dtype="float16")
    assert not any("residence" in line for line in caught.value.would_fit)
    with pytest.raises(ValueError, match="residence is one of memory, mapped, auto"):
        load_state_dict(module(), saved[0], residence="disk")  # type: ignore[typeddict-item]


_BOX = """
import sys, torch, streamload
path, residence = sys.argv[1:]
report = streamload.load_state_dict(None, path, device="cpu", residence=residence)
print(sum(float(t[::4096].sum()) for t in report.state_dict.values()))
"""


@pytest.mark.slow
def test_more_than_the_box_has(tmp_path: Path, cgroup: Boxes) -> None:
    """A checkpoint that is longer than the box is used there, and refused where it is loaded."""
    folder = tmp_path / "large"
    folder.mkdir()
    for shard in range(4):
        save_file({f"{shard}": torch.ones(2**25)}, folder / f"{shard}.safetensors")  # 537 MB in all
    code = [sys.executable, "-c", _BOX, str(folder)]
    done = cgroup.run([*code, "mapped"], 450 * 2**20)
    assert (done.returncode, float(done.stdout)) == (0, 4 * 2**13), done
    done = cgroup.run([*code, "memory"], 450 * 2**20)
    assert done.returncode == 1
    assert 'residence="mapped"' in done.stderr
