"""Modules of torch through `load_state_dict` on the CPU: what torch's own loading gives."""

from __future__ import annotations

import copy
import io
import json
import pickle
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from load_helpers import load
from parameters import few

import streamload
from streamload import RowRange, open_checkpoint
from streamload.errors import (
    DeviceError,
    OutOfRangeError,
    PlanInfeasibleError,
    StateDictMismatchError,
    UnsupportedCastError,
)
from streamload.verification.verify import Mismatch, verify

torch = needs.module("torch")
nn = torch.nn

from safetensors.torch import load_file, save_file  # noqa: E402
from torch_staged_helpers import same_bits  # noqa: E402


def randomize(model: Any, seed: int) -> Any:
    """Give everything that a module stores random values."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.data.copy_(torch.randint(0, 99, tensor.shape, generator=generator))
    return model


def save(model: Any, folder: Path, *, shards: int = 1, dtype: Any = None) -> Path:
    """Write what a module stores, each tensor once; gives the folder."""
    tensors: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            value = tensor.detach().clone().contiguous()
            tensors[name] = value.to(dtype) if dtype and value.is_floating_point() else value
    folder.mkdir()
    names = list(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, folder / file)
        index.update(dict.fromkeys(names[i::shards], file))
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def stored(folder: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def mlp() -> Any:
    """Linear layers, a norm with buffers, a layer that is there twice."""
    shared = nn.Linear(12, 12)
    return nn.Sequential(nn.Linear(5, 12), shared, nn.BatchNorm1d(12), shared, nn.Linear(12, 3))


def tied() -> Any:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp,
    "tied": tied,
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 3, 3), nn.InstanceNorm2d(3)
    ),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ),
    "lstm": lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 7)),
}


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


# --- what torch's own loading gives ---------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", ["meta", "cpu"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("reader", ["mmap", "pread"])
def test_a_module_is_what_torch_would_have_loaded(
    tmp_path: Path, name: str, place: str, shards: int, reader: str
) -> None:
    make = MODELS[name]
    folder = save(randomize(make(), 1), tmp_path / "x", shards=shards)
    theirs = make()
    theirs.load_state_dict(stored(folder), strict=False, assign=True)
    if name == "tied":
        theirs["head"].weight = theirs["embed"].weight
    ours = on_meta(make) if place == "meta" else randomize(make(), 2)
    report = load(ours, folder, reader=reader, chunk_nbytes=1000, device="cpu")
    assert_same(ours.state_dict(), theirs.state_dict())
    assert [type(p) for p in ours.parameters()] == [type(p) for p in theirs.parameters()]
    assert all(p.requires_grad for p in ours.parameters())
    assert verify(report, open_checkpoint(folder), ours) == []
    assert report.device_map == {"": "cpu"}


@pytest.mark.parametrize("name", ["mlp", "convolutions", "transformer"])
def test_a_loaded_module_computes_and_trains(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    x = {"mlp": (4, 5), "convolutions": (2, 3, 9, 9), "transformer": (2, 7, 16)}[name]
    saved = randomize(MODELS[name](), 1).eval()
    if name == "mlp":
        saved[2].running_var.abs_()
    folder = save(saved, tmp_path / "x")
    ours = on_meta(MODELS[name]).eval()
    load(ours, folder)
    data = torch.randn(x)
    out, expected = ours(data), saved(data)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for mine, its in zip(ours.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)
    before = [p.detach().clone() for p in ours.parameters()]
    torch.optim.SGD(ours.parameters(), lr=1e-3).step()
    assert any(not torch.equal(a, b) for a, b in zip(before, ours.parameters(), strict=True))


# fmt: off
DTYPES = (
    "bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "float8_e5m2", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64", "complex64",
)
# fmt: on


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    tensors = {}
    for i in range(draw(st.integers(1, 8))):
        dtype = getattr(torch, draw(st.sampled_from(DTYPES)))
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        numel = torch.Size(shape).numel()
        width = torch.empty(0, dtype=dtype).element_size()
        most = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, most, (numel * width,), generator=generator, dtype=torch.uint8)
        tensors[f"t{i}"] = raw.view(dtype).reshape(shape)
    return tensors


@settings(max_examples=few(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tensors=checkpoints(),
    place=st.sampled_from(["none", "meta", "cpu", "mixed"]),
    chunk_nbytes=st.sampled_from([16, 100, 2**20]),
    threads=st.integers(1, 3),
    reader=st.sampled_from(["mmap", "pread"]),
)
def test_any_bits_arrive_as_they_are(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: dict[str, Any],
    place: str,
    chunk_nbytes: int,
    threads: int,
    reader: str,
) -> None:
    path = tmp_path_factory.mktemp("bits") / "x.safetensors"
    save_file(tensors, path)
    model: Any = None
    if place != "none":
        model = {
            name: torch.empty_like(t, device="meta" if place == "meta" or i % 2 else "cpu")
            if place != "cpu"
            else torch.empty_like(t)
            for i, (name, t) in enumerate(tensors.items())
        }
    report = load(
        model,
        path,
        device="cpu",
        dtype="checkpoint",
        chunk_nbytes=chunk_nbytes,
        threads=threads,
        reader=reader,
    )
    found = model if model is not None else report.state_dict
    assert_same(found, load_file(path))
    assert report.read_nbytes == sum(t.nbytes for t in tensors.values())


@pytest.mark.parametrize("device", ["cpu", "torch:cpu", "torch:CPU", "torch"])
def test_without_a_model_there_is_a_dict_of_torchs_tensors(tmp_path: Path, device: str) -> None:
    """Names that are torch's give plain tensors on its CPU, in the order of the file."""
    folder = save(randomize(mlp(), 1), tmp_path / "x", dtype=torch.bfloat16)
    report = load(None, folder, device=device)
    assert_same(report.state_dict, stored(folder))
    assert {type(t) for t in report.state_dict.values()} == {torch.Tensor}
    assert not any(t.requires_grad for t in report.state_dict.values())
    assert {d.device for d in report.plan.devices} == {"cpu"}
    fresh = mlp()
    fresh.load_state_dict({k: v for k, v in report.state_dict.items()}, assign=True, strict=False)


def test_upper_case_is_tinygrads(tmp_path: Path) -> None:
    """Without a model, "CPU" is tinygrad's device and gives its tensors."""
    needs.device("CPU")
    from tinygrad import Tensor

    folder = save(randomize(mlp(), 1), tmp_path / "x")
    report = load(None, folder, device="CPU")
    assert {type(t) for t in report.state_dict.values()} == {Tensor}
    values = stored(folder)
    assert all((t.numpy() == values[n].numpy()).all() for n, t in report.state_dict.items())


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("asked", [None, "checkpoint", "float16", "float32"])
def test_what_is_there_keeps_its_dtype_unless_asked(
    tmp_path: Path, kept: str, saved: str, asked: str | None
) -> None:
    folder = save(randomize(nn.Linear(5, 6), 1), tmp_path / "x", dtype=getattr(torch, saved))
    model = nn.Linear(5, 6).to(getattr(torch, kept))
    model.bias = nn.Parameter(model.bias.to("meta"))
    pointer = model.weight.data_ptr()
    with warnings.catch_warnings(action="error"):
        report = load(model, folder, dtype=asked, device="cpu")
    weight = getattr(torch, kept if asked is None else saved if asked == "checkpoint" else asked)
    bias = getattr(torch, saved if asked in (None, "checkpoint") else asked)
    values = stored(folder)
    assert same_bits(model.weight, values["weight"].to(weight))
    assert same_bits(model.bias, values["bias"].to(bias))
    actions = {p.name: p.action for p in report.plan.placements}
    assert (model.weight.data_ptr() == pointer) or actions["weight"] == "replace"
    assert (actions["weight"] == "in_place") == (weight == getattr(torch, kept))
    assert actions["bias"] == "new"


def test_patterns_choose_dtypes(tmp_path: Path) -> None:
    folder = save(randomize(mlp(), 1), tmp_path / "x")
    model = mlp()
    load(model, folder, dtype={"2.*": "float64", "0.*": "bfloat16"})
    values = stored(folder)
    for name, tensor in model.state_dict().items():
        want = {"2": torch.float64, "0": torch.bfloat16}.get(name[0], torch.float32)
        if name in values and tensor.is_floating_point():
            assert same_bits(tensor, values[name].to(want)), name


def test_integers_are_not_cast_to_floats(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(4)}, path)
    model = {"w": torch.ones(4)}
    with pytest.raises(UnsupportedCastError, match="w"):
        load(model, path)
    assert same_bits(model["w"], torch.ones(4))


def test_values_that_overflow_are_counted_clamped_or_refused(tmp_path: Path) -> None:
    """Into a float16 parameter in place: infinite with a warning, the largest, or an error."""
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.tensor([1.0, 1e6, -1e6, 1e-9])}, path)
    model = {"w": torch.zeros(4, dtype=torch.float16)}
    with pytest.warns(RuntimeWarning, match="2 finite values"):
        report = load(model, path)
    assert report.counts["w"].overflowed == 2
    assert model["w"].tolist() == [1.0, float("inf"), float("-inf"), 0.0]
    with pytest.warns(RuntimeWarning, match="clamped"):
        load(model, path, out_of_range="clamp")
    assert model["w"].tolist() == [1.0, 65504.0, -65504.0, 0.0]
    with pytest.raises(OutOfRangeError) as caught:
        load(model, path, out_of_range="error")
    assert caught.value.state is not None
    assert caught.value.state.invalid == ("w",)


# --- in place, and what is left alone -------------------------------------------------------------


def test_loading_again_is_in_place(tmp_path: Path) -> None:
    first = save(randomize(mlp(), 1), tmp_path / "a")
    second = save(randomize(mlp(), 2), tmp_path / "b")
    model = on_meta(mlp)
    load(model, first)
    pointers = {n: t.data_ptr() for n, t in model.state_dict().items()}
    alias = model[0].weight.detach()
    objects = [id(p) for p in model.parameters()]
    report = load(model, second)
    assert {p.action for p in report.plan.placements} == {"in_place"}
    assert pointers == {n: t.data_ptr() for n, t in model.state_dict().items()}
    assert objects == [id(p) for p in model.parameters()]
    assert same_bits(alias, stored(second)["0.weight"])


def test_a_module_of_both_kinds(tmp_path: Path) -> None:
    """What is real is written in place, what is on meta is made."""
    folder = save(randomize(mlp(), 1), tmp_path / "x")
    model = mlp()
    model[0].to("meta")
    model[2].to("meta")
    pointer = model[4].weight.data_ptr()
    report = load(model, folder)
    assert model[4].weight.data_ptr() == pointer
    assert_same({n: t for n, t in model.state_dict().items() if n[0] != "3"}, stored(folder))
    actions = {p.name: p.action for p in report.plan.placements}
    assert {n for n, action in actions.items() if action == "new"} == {
        n for n in actions if n[0] in "02"
    }


def test_flags_modes_and_hooks_stay(tmp_path: Path) -> None:
    folder = save(randomize(mlp(), 1), tmp_path / "x")
    model = on_meta(mlp)
    model[0].requires_grad_(False)
    model[2].eval()
    calls: list[str] = []
    model[4].register_forward_hook(lambda *_: calls.append("hook"))
    load(model, folder)
    assert [p.requires_grad for p in model[0].parameters()] == [False, False]
    assert all(p.requires_grad for p in model[4].parameters())
    assert (model[2].training, model[0].training) == (False, True)
    model(torch.ones(2, 5))
    assert calls == ["hook"]


@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_names_that_do_not_match(tmp_path: Path, place: str) -> None:
    folder = save(randomize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), 1), tmp_path / "x")
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6), nn.Linear(6, 7))
    if place == "meta":
        model.to("meta")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(StateDictMismatchError) as caught:
        load(model, folder, device="cpu")
    assert sorted(caught.value.missing) == ["2.bias", "2.weight"]
    assert sorted(m.name for m in caught.value.wrong_shape) == ["1.bias", "1.weight"]
    with pytest.raises(StateDictMismatchError) as caught:  # as torch does
        load(model, folder, device="cpu", strict=False)
    assert sorted(m.name for m in caught.value.wrong_shape) == ["1.bias", "1.weight"]
    report = load(model, folder, device="cpu", strict=False, shapes="skip")
    assert sorted(report.missing) == ["1.bias", "1.weight", "2.bias", "2.weight"]
    assert sorted(report.skipped) == ["1.bias", "1.weight"]
    values = stored(folder)
    for name, tensor in model.state_dict().items():
        if name[0] == "0":
            assert same_bits(tensor, values[name])
        elif place == "meta":
            assert tensor.is_meta
        else:
            assert same_bits(tensor, before[name])
    with pytest.raises(StateDictMismatchError) as caught:
        load(nn.Sequential(nn.Linear(3, 4)), folder)
    assert sorted(caught.value.unexpected) == ["1.bias", "1.weight"]


def test_names_may_be_changed_on_the_way(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    w, b = torch.randn(4, 3), torch.randn(4)
    save_file({"old.w": w, "old.b": b, "extra": torch.ones(2)}, path)
    names = {"old.w": "weight", "old.b": "bias", "extra": None}
    for rename in (
        lambda name: names[name],
        lambda name: None if name == "extra" else {"w": "weight", "b": "bias"}[name[-1]],
    ):
        model = on_meta(lambda: nn.Linear(3, 4))
        report = load(model, path, rename=rename)
        assert_same(model.state_dict(), {"weight": w, "bias": b})
        assert report.skipped == ("extra",)
    model = on_meta(lambda: nn.Linear(3, 4))
    load(model, path, rename={"old.w": "weight", "old.b": "bias"}, strict=False)
    assert_same(model.state_dict(), {"weight": w, "bias": b})


def test_parameters_of_several_tensors(tmp_path: Path) -> None:
    """A mapping from parameters to tensors and rows: concatenated, and cut."""
    path = tmp_path / "x.safetensors"
    q, k, v = (torch.randn(4, 3) for _ in range(3))
    save_file({"q": q, "k": k, "v": v}, path)
    for device in ("cpu", "meta"):
        model = nn.Linear(3, 12, bias=False, device=device)
        load(model, path, mapping={"weight": ["q", "k", "v"]}, chunk_nbytes=20)
        assert torch.equal(model.weight, torch.cat([q, k, v]))
    model = nn.Linear(3, 3, bias=False)
    load(model, path, mapping={"weight": [RowRange("v", 1, 2), RowRange("q", 2, 4)]}, strict=False)
    assert torch.equal(model.weight, torch.cat([v[1:2], q[2:4]]))


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["meta", "cpu", "mixed"])
def test_what_does_not_fit_is_refused_before_anything_is_touched(
    tmp_path: Path, place: str
) -> None:
    folder = save(randomize(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), 1), tmp_path / "x")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if place != "cpu":
        model[0].to("meta")
    if place == "meta":
        model[1].to("meta")
    else:
        model[1](torch.ones(64)).sum().backward()
    before = {n: (id(p), p.data_ptr(), p.detach().clone()) for n, p in model.named_parameters()}
    grad = None if place == "meta" else model[1].weight.grad
    weights = 2 * (64 * 64 + 64) * 8
    with pytest.raises(PlanInfeasibleError) as caught:
        load(model, folder, device="cpu", dtype="float64", budget=weights - 1)
    error = caught.value
    assert (error.device, error.needed_nbytes) == ("cpu", weights)
    assert error.budget_nbytes == weights - 1
    assert any("float16" in s for s in error.would_fit)
    assert {name for name, _ in error.largest} >= {"0.weight", "1.weight"}
    for name, parameter in model.named_parameters():
        identity, pointer, values = before[name]
        assert (id(parameter), parameter.data_ptr()) == (identity, pointer)
        assert parameter.is_meta if values.is_meta else torch.equal(parameter, values)
    assert place == "meta" or model[1].weight.grad is grad
    report = load(model, folder, device="cpu", dtype="float64", budget=weights)
    assert report.held_nbytes["cpu"] <= report.predicted_nbytes["cpu"] == weights


def test_old_weights_go_first(tmp_path: Path) -> None:
    layers = 6
    folder = save(
        randomize(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))), 1),
        tmp_path / "x",
    )
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers)))
    one = 64 * 64
    report = load(model, folder, dtype="float16", budget=layers * one * 4)
    assert report.held_nbytes["cpu"] <= layers * one * 4
    assert report.resident_nbytes == layers * one * 2
    report = load(model, folder, dtype="float32", budget=layers * one * 4)
    assert report.held_nbytes["cpu"] == layers * one * 4
    assert_same(model.state_dict(), stored(folder))


def test_another_dtype_while_the_error_is_handled(tmp_path: Path) -> None:
    """What a failed load began is no obstacle to the next, inside the very except block."""
    tensors = {f"t{i}": torch.randn(5000) for i in range(8)}
    tensors["t4"][3000] = 1e30
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    for threads in (1, 3):
        model = {name: torch.zeros(5000, dtype=torch.float16) for name in tensors}
        try:
            load(model, path, out_of_range="error", chunk_nbytes=4000, threads=threads)
        except OutOfRangeError as error:
            assert error.state is not None
            assert "t4" in error.state.invalid
            # exactly the new weights: every old one has to go before its new one comes
            report = load(model, path, dtype="float32", budget=8 * 20_032)
            assert report.held_nbytes["cpu"] <= 8 * 20_032
        assert_same(model, tensors)


# --- the report, verification, and what comes after -----------------------------------------------


def test_the_report_says_what_was_done(tmp_path: Path) -> None:
    folder = save(randomize(tied(), 1), tmp_path / "x")
    model = on_meta(tied)
    report = load(model, folder, budget="1MB", device="cpu")
    assert report.read_nbytes == 50 * 8 * 4
    assert report.resident_nbytes == 50 * 8 * 4
    assert len(report.tied) == 1
    assert report.tied[0] in ("head.weight", "embed.weight")
    assert report.device_map == {"": "cpu"}
    assert report.skipped == report.missing == ()
    assert report.held_nbytes["cpu"] <= report.predicted_nbytes["cpu"] <= 10**6
    assert report.state_dict == {}
    text = str(report)
    assert all(part in text for part in ("cpu", "1 tied", "1.60 kB"))
    assert json.loads(report.to_json())["read_nbytes"] == 1600
    ticks: list[tuple[int, int]] = []
    streamload.load_state_dict(model, folder, progress=lambda *at: ticks.append(at))
    assert ticks[-1] == (1600, 1600)


def test_buffers_that_no_checkpoint_has_are_named(tmp_path: Path) -> None:
    def make() -> Any:
        model = nn.Linear(3, 3)
        model.register_buffer("angles", torch.ones(3), persistent=False)
        return model

    folder = save(randomize(make(), 1), tmp_path / "x")
    model = on_meta(make)
    report = load(model, folder, device="cpu")
    (note,) = [note for note in report.notes if "angles" in note]
    assert "meta" in note
    assert model.angles.is_meta
    assert note in str(report)
    real = make()
    assert not any("angles" in note for note in load(real, folder).notes)
    assert same_bits(real.angles, torch.ones(3))


def test_a_buffer_without_values_raises_where_it_is_used(tmp_path: Path) -> None:
    """BERT's positions: torch looks up rows by an index on meta, and computes with any memory."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)
            self.register_buffer("ids", torch.arange(5), persistent=False)

        def forward(self, x: Any) -> Any:
            return x + self.table(self.ids[: len(x)])

    real = randomize(Positions(), 1)
    real.ids = torch.arange(5)
    folder, x = save(real, tmp_path / "x"), torch.ones(3, 4)
    model = on_meta(Positions)
    load(model, folder, device="cpu")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model.ids))):
        with pytest.raises(DeviceError, match="a buffer that no checkpoint has"):
            each(x) if isinstance(each, nn.Module) else each + 1
    streams = on_meta(Positions)
    with (
        streamload.offload(streams, folder, device="cpu", budget="1MB", progress=False),
        pytest.raises(DeviceError, match="a buffer that no checkpoint has"),
    ):
        streams(x)
    assert model.half().float().ids.is_meta  # the table is rounded: it is loaded again
    load(model, folder, device="cpu")
    assert torch.empty_like(model.ids, device="cpu").shape == (5,)
    model.ids = torch.arange(5)
    assert torch.equal(model(x), real(x))


@pytest.mark.parametrize("budget", [None, "100kB"])
def test_a_buffer_without_values_is_named_and_raises_where_it_is_moved(
    tmp_path: Path, budget: str | None
) -> None:
    """Rotary frequencies, offloaded and loaded; the line of the error keeps them."""
    accelerate = needs.module("accelerate")

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
            self.register_buffer("inv_freq", torch.arange(64.0), persistent=False)

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return x * self.inv_freq.to(device=x.device, dtype=x.dtype)

    real = randomize(Rotary(), 1)
    real.inv_freq = torch.arange(64.0)
    folder, x = save(real, tmp_path / "x"), torch.ones(3, 64)
    options: dict[str, Any] = {"device": "cpu", "budget": budget, "progress": False}
    model = on_meta(Rotary).eval()
    with streamload.offload(model, folder, **options) as offloaded:
        (note,) = [note for note in offloaded.report.notes if "inv_freq" in note]
        assert note in str(offloaded.report) and "meta" in note
        assert bool(offloaded.plan.residency.streams) is (budget is not None)
        with pytest.raises(DeviceError, match=r"with accelerate\.init_empty_weights") as caught:
            model(x)
    line = re.search(r"`(with .*:)`", str(caught.value))
    assert line is not None
    names = {"accelerate": accelerate, "Rotary": Rotary}
    exec(f"{line[1]} model = Rotary()", names)
    model = names["model"].eval()
    with streamload.offload(model, folder, **options) as offloaded:
        assert not any("inv_freq" in note for note in offloaded.report.notes)
        assert torch.equal(model(x), real(x))


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("kind", ["module", "none"])
def test_verification_finds_one_wrong_bit(tmp_path: Path, dtype: str | None, kind: str) -> None:
    folder = save(randomize(mlp(), 1), tmp_path / "x")
    model = on_meta(mlp) if kind == "module" else None
    report = load(model, folder, device="cpu", dtype=dtype)
    checkpoint = open_checkpoint(folder)
    assert verify(report, checkpoint, model) == []
    tensors = model.state_dict() if model is not None else report.state_dict
    flat = tensors["4.weight"].view(-1)
    width = flat.element_size()
    before = bytes(flat.view(torch.uint8)[7 * width : 8 * width].tolist())
    flat.view(torch.uint8)[8 * width - 1] ^= 1
    after = bytes(flat.view(torch.uint8)[7 * width : 8 * width].tolist())
    assert verify(report, checkpoint, model) == [Mismatch("4.weight", 7, before.hex(), after.hex())]


def test_verification_sees_a_change_since(tmp_path: Path) -> None:
    folder = save(randomize(tied(), 1), tmp_path / "x")
    model = on_meta(tied)
    report = load(model, folder, device="cpu")
    model["head"](torch.ones(8)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    (found,) = verify(report, open_checkpoint(folder), model)
    assert found.name in ("head.weight", "embed.weight")


def test_a_loaded_module_can_be_copied_and_saved(tmp_path: Path) -> None:
    folder = save(randomize(tied(), 1), tmp_path / "x")
    model = on_meta(tied)
    load(model, folder, device="cpu")
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    save_file({"embed.weight": model["embed"].weight}, tmp_path / "again.safetensors")
    assert same_bits(
        load_file(tmp_path / "again.safetensors")["embed.weight"], expected["embed.weight"]
    )
    assert_same(torch.load(file), expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other["head"].weight is other["embed"].weight
        assert other["head"].weight.data_ptr() != model["head"].weight.data_ptr()
        assert_same(other.state_dict(), expected)
        other["head"].weight.data.zero_()
    assert_same(model.state_dict(), expected)
    half = copy.deepcopy(model).half()
    assert same_bits(half["head"].weight, expected["head.weight"].half())


def test_an_open_checkpoint_and_its_index(tmp_path: Path) -> None:
    folder = save(randomize(mlp(), 1), tmp_path / "x", shards=4)
    for path in (folder, folder / "model.safetensors.index.json", open_checkpoint(folder)):
        model = on_meta(mlp)
        report = streamload.load_state_dict(model, path, progress=False, device="cpu")
        assert_same({n: t for n, t in model.state_dict().items() if n[0] != "3"}, stored(folder))
        assert len(report.plan.readers) == 4


def test_loads_of_two_threads_do_not_meet(tmp_path: Path) -> None:
    folder = save(randomize(MODELS["transformer"](), 1), tmp_path / "x")
    models = [on_meta(MODELS["transformer"]) for _ in range(4)]

    def work(model: Any) -> None:
        for dtype in (None, "float16", "float32"):
            load(model, folder, device="cpu", dtype=dtype, chunk_nbytes=500)

    with ThreadPoolExecutor(len(models)) as pool:
        list(pool.map(work, models))
    for model in models:
        assert_same(model.state_dict(), stored(folder))


@pytest.mark.parametrize(
    "seed", [s if s < 2 else pytest.param(s, marks=pytest.mark.slow) for s in range(6)]
)
def test_random_sequences_of_loads(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    folders = [
        save(randomize(mlp(), i), tmp_path / f"{i}", dtype=dtype, shards=1 + i % 2)
        for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ]
    model = on_meta(mlp)

    def with_grads() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    steps: Sequence[Callable[[], Any]] = (
        lambda: model.half(),
        lambda: model.float(),
        lambda: model.to("meta"),
        lambda: model[0].to("meta"),
        lambda: model.share_memory() if not model[1].weight.is_meta else None,
        lambda: model[4].to_empty(device="cpu"),
        with_grads,
    )
    for _ in range(12):
        with warnings.catch_warnings(action="ignore"):
            generator.choice(steps)()
        folder = generator.choice(folders)
        dtype = generator.choice(("checkpoint", "float16", "float32", "bfloat16"))
        report = load(model, folder, device="cpu", dtype=dtype, chunk_nbytes=200)
        values = stored(folder)
        found = model.state_dict()
        for name, value in values.items():
            if value.is_floating_point() and dtype != "checkpoint":
                value = value.to(getattr(torch, dtype))
            assert same_bits(found[name], value), (name, dtype)
        assert model[1].weight is model[3].weight
        assert verify(report, open_checkpoint(folder), model) == []


def test_a_device_that_fails_for_good_leaves_what_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA after an illegal access: every later call raises, giving memory back too."""
    from streamload.devices.torch import device as ours

    class Failing(ours.CPUDevice):
        """Its second window fails, and from then on everything that is asked of it."""

        opened: list[int] = []  # noqa: RUF012

        def window(self, buffer: Any, start: int, stop: int) -> Any:
            self.opened.append(start)
            self._check()
            return super().window(buffer, start, stop)

        def _check(self) -> None:
            if len(self.opened) > 1:
                raise RuntimeError("an illegal memory access was encountered")

        def trim(self) -> None:
            self._check()

        synchronize = trim

        def release(self, buffer: Any) -> None:
            self._check()

    path = save(randomize(nn.Sequential(*(nn.Linear(50, 50) for _ in range(6))), 1), tmp_path / "m")
    module = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6))).half()
    with monkeypatch.context() as patch:
        patch.setitem(ours._WAYS, "cpu", Failing)
        with pytest.raises(RuntimeError, match="illegal memory access") as caught:
            load(module, path, dtype="float32", threads=1, chunk_nbytes=1000)
    (note,) = caught.value.__notes__
    assert note.startswith("parameters: ")
    shapes = {tuple(p.shape) for p in module.parameters()}
    assert shapes == {(50, 50), (50,)}
    load(module, path, dtype="float32")
    assert_equal = {
        k: torch.equal(v, load_file(path / "model.safetensors")[k])
        for k, v in module.state_dict().items()
    }
    assert all(assert_equal.values())


def test_deterministic_mode_fills_nothing(tmp_path: Path) -> None:
    """torch would write NaN into new memory, late on a device's own stream."""
    path = save(randomize(nn.Linear(500, 500), 2), tmp_path / "m")
    with torch.device("meta"):
        module = nn.Linear(500, 500)
    torch.use_deterministic_algorithms(True)
    try:
        report = load(module, path, device="cpu")
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert torch.empty(3).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert verify(report, open_checkpoint(path), module) == []


def test_bytes_kept_in_reserve(tmp_path: Path) -> None:
    path = save(nn.Linear(500, 500), tmp_path / "m")
    with torch.device("meta"):
        module = nn.Linear(500, 500)
    with pytest.raises(PlanInfeasibleError, match="kept free"):
        load(module, path, device="cpu", budget="2MB", reserve="1MB")
    with pytest.raises(PlanInfeasibleError, match="the free memory less 100 TB kept free is 0"):
        load(module, path, device="cpu", budget="101TB", reserve="100TB")
    assert load(module, path, device="cpu", budget="3MB", reserve="1MB").plan.devices[0]
    with pytest.raises(PlanInfeasibleError):
        streamload.plan(path, budget="2MB", device="torch:cpu", dtype="float32", reserve="1MB")


def test_a_cuda_device_is_planned_as_one_without_being_there(tmp_path: Path) -> None:
    """Staged, and with the segments of torch's allocator: what a load there would take."""
    path = save(nn.Linear(2000, 2000), tmp_path / "m")  # 16 MB, and 8 kB
    made = streamload.plan(path, budget="1GB", device="cuda:0", dtype="checkpoint")
    assert made.devices[0].peak_nbytes == (16 + 2) * 2**20
    assert made.host_nbytes > 0


def test_threads_are_as_many_as_help(tmp_path: Path) -> None:
    """What the host only reads takes more of them than its casts do; what is asked for is had."""
    from streamload.loading.options import Options
    from streamload.loading.place import unseen_spec
    from streamload.loading.prepare import plan_within, request_of, specs_under
    from streamload.planning.match import wants_of
    from streamload.planning.sources import sources

    checkpoint = open_checkpoint(save(nn.Linear(2000, 2000), tmp_path / "m"))
    wants = wants_of(checkpoint, sources(checkpoint, None, None)[0])
    spec = unseen_spec("cuda:0", 10**9)

    def threads(dtype: str, count: int | None, cast: Any = "llvm") -> int:
        given = {"dtype": dtype, "cast": cast, "threads": count}
        options = Options.parse(given | {"reader": "pread", "chunk_nbytes": 2**23})
        request = request_of(options, checkpoint, wants, specs_under(options, [spec]), "llvm")
        return plan_within(options, request).threads

    assert threads("float16", 12) == threads("checkpoint", 12) == 12
    assert threads("float16", None) == min(threads("checkpoint", None), 8)
    assert threads("float16", None, "auto") == threads("checkpoint", None)


def wrapped(kind: str, inner: nn.Module) -> nn.Module:
    if kind == "DataParallel":
        return nn.DataParallel(inner)
    if kind == "compile":
        return torch.compile(inner)  # type: ignore[no-any-return]
    if kind == "both":
        return nn.DataParallel(torch.compile(inner))
    inner[1] = torch.compile(inner[1])  # a layer of it
    return inner


@pytest.mark.parametrize(
    "kind", ["DataParallel", pytest.param("compile", marks=pytest.mark.slow), "both", "layer"]
)
@pytest.mark.parametrize("stored", ["plain", "wrapped"])
def test_wrapped_modules(tmp_path: Path, kind: str, stored: str) -> None:
    """They take a checkpoint of what they wrap, and one of their own."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5)))

    source = randomize(made(), 1)
    model = wrapped(kind, made())
    path = tmp_path / "x"
    if stored == "plain":
        save(source, path)
    else:
        theirs = wrapped(kind, made())
        plain = source.state_dict()
        wrapper_names = list(theirs.state_dict())
        theirs.load_state_dict(dict(zip(wrapper_names, plain.values(), strict=True)))
        save(theirs, path)
    report = load(model, path, device="cpu")
    assert report.missing == report.skipped == report.tied == ()
    for name, tensor in zip(source.state_dict(), model.state_dict().values(), strict=True):
        assert same_bits(tensor, source.state_dict()[name]), name


def test_a_module_of_distributed_data_parallel(tmp_path: Path) -> None:
    """DDP's names have a prefix too, which checkpoints have not."""
    source = randomize(nn.Linear(3, 4), 1)
    save(source, tmp_path / "x")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 4))
        load(model, tmp_path / "x", device="cpu")
        assert same_bits(model.module.weight, source.weight)
    finally:
        torch.distributed.destroy_process_group()
