"""Torch's own loading code: hooks, `_load_from_state_dict` overrides and `_version` upgrades."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_helpers import load as load_rank
from safetensors.torch import save_file
from thread_group import World, run
from torch import nn

import streamload
from streamload.errors import OffloadError, StateDictMismatchError


class Upgraded(nn.Linear):
    """A layer whose first version was stored under another name, and at half its scale."""

    _version = 2
    rescales = False

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        version = metadata.get("version")
        if (version is None or version < 2) and f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
            if self.rescales:
                state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Rescaled(Upgraded):
    """The same, which needs the values."""

    rescales = True


class Pooling(nn.Module):
    """One that ties by a hook, and drops what it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.register_load_state_dict_pre_hook(self._before)

    @staticmethod
    def _before(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        state.pop(f"{prefix}steps", None)
        state.setdefault(f"{prefix}head.weight", state[f"{prefix}embed.weight"])


class Reads(Pooling):
    """Its hook looks at a value."""

    @staticmethod
    def _before(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        if state[f"{prefix}embed.weight"].max() > 100:
            state[f"{prefix}embed.weight"].div_(2)


class Writes(Pooling):
    """Its hook writes into the module."""

    @staticmethod
    def _before(module: Any, state: Any, prefix: str, *rest: Any) -> None:
        module.head.weight.data.copy_(state[f"{prefix}embed.weight"])


class Marks(nn.Linear):
    """Its override changes the module, not the tensors."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.scale = float(args[0][f"{args[1]}weight"].shape[0])


class Ignores(nn.Linear):
    """Its override loads nothing."""

    def _load_from_state_dict(self, *args: Any) -> None:
        return


class Extra(nn.Linear):
    """It has a state that is no parameter."""

    scale = 1.0

    def get_extra_state(self) -> Any:
        return torch.tensor([self.scale])

    def set_extra_state(self, state: Any) -> None:
        self.scale = float(state[0])


class Adds(nn.Linear):
    """Its override makes what older files lack."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        state.setdefault(f"{prefix}bias", torch.full((4,), 7.0))
        super()._load_from_state_dict(state, prefix, *rest)


def weight_norm() -> tuple[nn.Module, dict[str, Any]]:
    """What torch wrote of weight_norm before it was a parametrization."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        old = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(3, 4, 2)), nn.BatchNorm1d(4))
    new = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), nn.BatchNorm1d(4)
    )
    state = dict(old.state_dict())
    assert "0.weight_g" in state
    return new, state


def upgraded(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    state = dict(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).state_dict())
    state["0.kernel"] = state.pop("0.weight")
    return nn.Sequential(kind(3, 4), nn.Linear(4, 4)), state  # type: ignore[call-arg]


def pooling(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    state = {"steps": torch.ones(2), "embed.weight": torch.randn(8, 4)}
    if kind is not Pooling:
        state = {"embed.weight": torch.randn(8, 4), "head.weight": torch.randn(8, 4)}
    return kind(), state


def linear(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Any]]:
    state = dict(nn.Sequential(nn.Linear(4, 4)).state_dict())
    if kind is Adds:
        del state["0.bias"]
    if kind is Extra:
        state["0._extra_state"] = torch.tensor([3.0])
    return nn.Sequential(kind(4, 4)), state  # type: ignore[call-arg]


def fake_quantized() -> tuple[nn.Module, dict[str, Any]]:
    """A layer of torch.ao, which resizes its buffers to the file's and copies."""
    model = nn.Sequential(torch.ao.quantization.FakeQuantize(), nn.Linear(2, 2))
    state = model.state_dict()
    state["0.scale"] = torch.tensor([0.25])
    return model, state


FOLLOWED: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "weight_norm": weight_norm,
    "version": lambda: upgraded(Upgraded),
    "hook": lambda: pooling(Pooling),
}
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], str]] = {
    "version": (lambda: upgraded(Rescaled), r"0 \(Rescaled\): Rescaled._load_from_state_dict"),
    "reads": (lambda: pooling(Reads), r"the model \(Reads\): the pre-hook Reads._before.*max"),
    "writes": (
        lambda: pooling(Writes),
        r"the model \(Writes\): the pre-hook Writes._before.*copy_",
    ),
    "marks": (lambda: linear(Marks), r"0 \(Marks\).*sets attributes"),
    "extra": (lambda: linear(Extra), r"0 \(Extra\): Extra\.set_extra_state.*it takes 0\._extra_st"),
    "ignores": (lambda: linear(Ignores), r"0 \(Ignores\).*does not call nn.Module's own"),
    "adds": (lambda: linear(Adds), r"0 \(Adds\).*adds 0.bias"),
}


def stored(folder: Path, state: dict[str, Any]) -> Path:
    save_file({k: v.detach().clone() for k, v in state.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("residence", ["memory", "mapped"])
@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("name", FOLLOWED)
def test_names_are_those_that_torchs_code_gives(
    tmp_path: Path, name: str, place: str, residence: Any
) -> None:
    """What renames, copies or drops is followed: the state is what torch loads."""
    model, state = FOLLOWED[name]()
    path = stored(tmp_path, state)
    expected = FOLLOWED[name]()[0]
    expected.load_state_dict(state)
    target = model.to(place)
    streamload.load_state_dict(target, path, progress=False, residence=residence)
    found = target.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_needs_values_is_refused_by_module(tmp_path: Path, name: str) -> None:
    (make, problem), given = REFUSED[name], {"progress": False, "strict": False}
    model, state = make()
    path = stored(tmp_path, state)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(StateDictMismatchError, match=problem) as caught:
        streamload.load_state_dict(model, path, **given)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    with pytest.raises(StateDictMismatchError, match=problem):
        streamload.offload(model, path, budget="1GB", device="cpu", **given)
    line = caught.value.problems[-1].rpartition("; write ")[2].partition(", with assign=True")[0]
    expected = copy.deepcopy(model)
    expected.load_state_dict(state)
    eval(line, {"model": model, "streamload": streamload})
    for key, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


def test_versions_that_torch_saved_count(tmp_path: Path) -> None:
    model = nn.Sequential(Rescaled(3, 4), nn.Linear(4, 4))
    state = model.state_dict()
    for dotted in (False, True):
        path = tmp_path / f"{dotted}.pth"
        torch.save({"model": state, "epoch": 3} if dotted else state, path)
        assert streamload.open_checkpoint(path).versions["0"] == {"version": 2}
        found = nn.Sequential(Rescaled(3, 4), nn.Linear(4, 4))
        streamload.load_state_dict(found, path, progress=False)
        assert all(torch.equal(found.state_dict()[k], v) for k, v in state.items())
    quantized, state = fake_quantized()
    torch.save(state, tmp_path / "fake.pth")
    with torch.device("meta"):
        found = fake_quantized()[0]
    streamload.load_state_dict(found, tmp_path / "fake.pth", progress=False)
    quantized.load_state_dict(state)
    assert all(torch.equal(found.state_dict()[k], v) for k, v in quantized.state_dict().items())
    old, tensors = upgraded(Rescaled)
    torch.save(tensors, tmp_path / "old.pth")
    with pytest.raises(StateDictMismatchError, match=r"Rescaled\._load_from_state_dict"):
        streamload.load_state_dict(old, tmp_path / "old.pth", progress=False)


def test_sources_that_the_user_names_are_as_they_are(tmp_path: Path) -> None:
    model, state = upgraded(Rescaled)
    path = stored(tmp_path, state)
    streamload.load_state_dict(model, path, mapping={"0.weight": "0.kernel"}, progress=False)
    assert torch.equal(model.state_dict()["0.weight"], state["0.kernel"])


def test_offloaded_layers_have_the_names_of_hooks(tmp_path: Path) -> None:
    model, state = weight_norm()
    path = stored(tmp_path, state)
    expected = weight_norm()[0]
    expected.load_state_dict(state)
    expected.eval()
    x = torch.randn(2, 3, 5)
    model.eval()
    with streamload.offload(
        model, path, budget="1GB", device="cpu", layers=["0", "1"], progress=False
    ):
        assert torch.equal(model(x), expected(x))


def test_hooks_after_a_load_are_called(tmp_path: Path) -> None:
    model, state = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)).state_dict()
    path = stored(tmp_path, {"0.weight": state["0.weight"], "more": torch.ones(2)})
    seen: list[tuple[str, Any]] = []
    model.register_load_state_dict_post_hook(lambda m, keys: seen.append(("outer", keys)))

    def negate(module: Any, keys: Any) -> None:
        seen.append(("inner", keys))
        module.weight.data.neg_()

    model[0].register_load_state_dict_post_hook(negate)
    streamload.load_state_dict(model, path, strict=False, progress=False)
    assert [name for name, _ in seen] == ["inner", "outer"]
    assert seen[0][1] == (["0.bias"], ["more"])
    assert torch.equal(model[0].weight, -state["0.weight"])
    options: dict[str, Any] = {"budget": "1GB", "device": "cpu", "progress": False}
    with pytest.raises(
        OffloadError, match=r"the model, 0: load .*write module(\.\w+\.clear\(\))"
    ) as e:
        streamload.offload(model, path, strict=False, **options)
    for module in (model, model[0]):  # the line that the error gives
        exec(str(e.value).rpartition("write ")[2], {"module": module})
    streamload.offload(model, path, strict=False, **options).close()


def test_ranks_refuse_what_a_module_renames(tmp_path: Path) -> None:
    """Their plan has the names of the checkpoint: `rename=` says it on all of them."""
    _, state = weight_norm()
    path = stored(tmp_path, state)
    models = {rank: weight_norm()[0] for rank in range(2)}
    given: dict[str, Any] = {"device": "cpu", "split": "replicate"}
    for said in run(World(2), load_rank(path, model=models.__getitem__, **given)):
        assert isinstance(said, StateDictMismatchError)
        assert "0.weight_g: the model's own code renames it: write rename=" in str(said)
    new = {"g": "original0", "v": "original1"}
    rename = {f"0.weight_{k}": f"0.parametrizations.weight.{v}" for k, v in new.items()}
    run(World(2), load_rank(path, model=models.__getitem__, rename=rename, **given))
    for model in models.values():
        found = model.state_dict()["0.parametrizations.weight.original0"]
        assert np.array_equal(found, state["0.weight_g"])
