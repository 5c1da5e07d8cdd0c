"""`load_state_dict` and `plan`: every argument, on real devices, against numpy's own reading."""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import forked
import ml_dtypes
import needs
import numpy as np
import pytest
from load_helpers import Array, raw, write
from safetensors_files import write_safetensors

import streamload
from streamload import Budget, Node
from streamload.core import registry
from streamload.core.dtypes import BY_CODE
from streamload.errors import (
    CheckpointError,
    DeviceNotFoundError,
    OutOfRangeError,
    PlanInfeasibleError,
    StateDictMismatchError,
    UnsupportedCastError,
)


def bf16(*values: float) -> Array:
    return np.array(values, ml_dtypes.bfloat16)


SMALL: dict[str, Array] = {
    "w": np.arange(12, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 4),
    "norm": np.array([0.1, 1, 3], np.float32),
    "ids": np.arange(5),
    "mask": np.array([True, False]),
    "scalar": np.array(7, np.float16),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkpoint of every kind of tensor, a few bytes each."""
    return write(tmp_path / "small", SMALL)


def load(path: Path, model: Any = None, **arguments: Any) -> streamload.LoadReport:
    """Load quietly, onto the host where nothing else is said."""
    arguments = {"progress": False} | arguments
    if model is None:
        arguments.setdefault("device", "host")
    return streamload.load_state_dict(model, path, **arguments)


def device(name: str) -> str:
    needs.device(name)
    return name


# --- model ----------------------------------------------------------------------------------------


def test_without_a_model_on_the_host(small: Path) -> None:
    """Arrays by name; bfloat16 is float16 by default, and ml_dtypes' where it is asked for."""
    found = load(small).state_dict
    assert found.keys() == SMALL.keys()
    assert found["w"].dtype == np.float16
    assert np.array_equal(found["w"], SMALL["w"].astype(np.float16))
    kept = load(small, dtype="checkpoint").state_dict
    for name, array in SMALL.items():
        assert kept[name].dtype == array.dtype, name
        assert np.array_equal(kept[name], array), name


@pytest.mark.parametrize("code", ["F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "BF16", "C64"])
def test_dtypes_of_the_host(tmp_path: Path, code: str) -> None:
    """The host holds what numpy and ml_dtypes have, as it is."""
    dtype = BY_CODE[code].numpy
    array = np.arange(0, 160, dtype=np.uint8).view(dtype)
    path = write(tmp_path, {"w": array})
    found = load(path, dtype="checkpoint").state_dict["w"]
    assert found.dtype == dtype
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("name", ["CL", "CPU"])
def test_without_a_model_on_a_device(small: Path, name: str) -> None:
    """tinygrad's tensors by name, of the right device, shape, dtype and bytes."""
    found = load(small, device=device(name), budget="1MB").state_dict
    expected = SMALL | {"w": SMALL["w"].astype(np.float16)}
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert found[key].device == name
        assert tuple(found[key].shape) == array.shape
        assert raw(found[key]) == array.tobytes(), key


@pytest.mark.parametrize("name", ["CL", "CPU"])
def test_into_a_model_of_tinygrad(tmp_path: Path, name: str) -> None:
    from tinygrad import Tensor, nn

    class Model:
        def __init__(self) -> None:
            self.eps = np.float32(1e-5)
            self.frequencies = np.zeros(3)
            self.layers = [nn.Linear(4, 3), nn.Linear(3, 2)]

    rng = np.random.default_rng(0)
    tensors = {
        f"layers.{i}.{kind}": rng.standard_normal(shape).astype(np.float32)
        for i, (n, m) in enumerate(((4, 3), (3, 2)))
        for kind, shape in (("weight", (m, n)), ("bias", (m,)))
    }
    model = Model()
    load(write(tmp_path, tensors), model, device=device(name), budget="1MB")
    x = rng.standard_normal((5, 4)).astype(np.float32)
    y = Tensor(x, device=name)
    for layer in model.layers:
        y = layer(y)
    expected = x
    for i in range(2):
        expected = expected @ tensors[f"layers.{i}.weight"].T + tensors[f"layers.{i}.bias"]
    assert np.allclose(y.numpy(), expected, atol=1e-5)


def test_into_a_nested_dict_of_arrays(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.w": np.ones(4, np.float32), "b": bf16(1, 2)})
    kept = np.zeros(4, np.float32)
    model = {"a": {"w": kept}, "b": np.zeros(2, np.float32)}
    report = load(path, model, dtype={"a.*": "checkpoint", "b": "float16"})
    assert model["a"]["w"] is kept
    assert np.array_equal(kept, np.ones(4))
    assert model["b"].dtype == np.float16
    assert {p.name: p.action for p in report.plan.placements} == {"a.w": "in_place", "b": "replace"}
    assert report.state_dict == {}


def test_a_model_that_holds_more_than_the_budget(tmp_path: Path) -> None:
    from tinygrad import Tensor

    name = device("CPU")
    path = write(tmp_path, {n: np.arange(5000, dtype=np.float16) for n in "ab"})
    model = {n: Tensor.zeros(5000, device=name).contiguous().realize() for n in "ab"}
    report = load(path, model, budget=25_000, dtype="checkpoint")
    assert report.plan.device(name).release_first
    assert report.plan.device(name).held_nbytes == 40_000
    assert all(raw(t) == np.arange(5000, dtype=np.float16).tobytes() for t in model.values())


def test_a_view_is_not_parted_from_its_array(tmp_path: Path) -> None:
    path = write(tmp_path, {"v": np.arange(4, dtype=np.float32)})
    base = np.zeros(8, np.float32)
    load(path, {"v": base[2:6]})
    assert base.tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    with pytest.raises(StateDictMismatchError, match="view"):
        load(path, {"v": base[2:6]}, dtype="float16")
    assert base.tolist() == [0, 0, 0, 1, 2, 3, 0, 0]


def test_parameters_on_two_devices_stay_there(tmp_path: Path) -> None:
    from tinygrad import Tensor

    arrays = {n: np.full(100, i, np.float32) for i, n in enumerate("abc")}
    where = {"a": device("CL"), "b": device("CPU"), "c": "CL"}
    model = {n: Tensor.zeros(100, device=d).contiguous().realize() for n, d in where.items()}
    path = write(tmp_path, arrays)
    report = load(path, model, budget={"CL": "2kB", "CPU": "4096"})
    assert {n: t.device for n, t in model.items()} == where
    assert {n: raw(t) for n, t in model.items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert {d.device: d.budget_nbytes for d in report.plan.devices} == {"CL": 2000, "CPU": 4096}
    with pytest.raises(PlanInfeasibleError) as caught:
        load(path, model, budget={"CL": "799", "CPU": "1MB"})
    assert caught.value.device == "CL"


def test_a_tied_head_of_a_dict_and_of_config(tmp_path: Path) -> None:
    """Tied tensors stay one; a head that the checkpoint does not store gets the embedding."""
    from tinygrad import Tensor

    name = device("CPU")
    config = {"architectures": ["LlamaForCausalLM"]}
    path = write(tmp_path, {"model.embed_tokens.weight": bf16(1, 2, 3, 4).reshape(2, 2)}, config)
    shared = Tensor.empty(2, 2, device=name)
    model = {"model.embed_tokens.weight": shared, "lm_head.weight": shared}
    report = load(path, model, device=name, budget="1MB")
    assert model["lm_head.weight"] is model["model.embed_tokens.weight"]
    assert (len(report.plan.placements), report.tied) == (1, ("lm_head.weight",))
    apart = {n: Tensor.empty(2, 2, device=name) for n in model}
    report = load(path, apart, device=name, budget="1MB")
    assert len(report.plan.placements) == 2
    assert raw(apart["lm_head.weight"]) == raw(apart["model.embed_tokens.weight"])
    assert any("copy" in note for note in report.notes)


def test_everything_that_does_not_match_before_any_reading(tmp_path: Path) -> None:
    path = write(tmp_path, {n: np.zeros(4, np.float32) for n in ("a", "b", "extra")})
    model = {"a": np.zeros(4, np.float32), "b": np.zeros(5, np.float32), "c": np.zeros(1)}
    with pytest.raises(StateDictMismatchError) as caught:
        load(path, model)
    error = caught.value
    assert (error.missing, error.unexpected) == (("c",), ("extra",))
    assert [m.name for m in error.wrong_shape] == ["b"]
    assert error.state is None
    with pytest.raises(StateDictMismatchError) as caught:
        load(path, model, strict=False)
    assert (caught.value.missing, caught.value.unexpected) == ((), ())
    assert [m.name for m in caught.value.wrong_shape] == ["b"]
    with pytest.raises(StateDictMismatchError) as caught:
        load(path, model, shapes="skip")
    assert (caught.value.missing, caught.value.wrong_shape) == (("c",), ())
    with pytest.warns(UserWarning, match=r"fills 1 of the model's 3 parameters, and 2 of its 3"):
        report = load(path, model, strict=False, shapes="skip")
    assert [p.name for p in report.plan.placements] == ["a"]
    assert set(report.missing) == {"b", "c"}
    assert set(report.skipped) == {"b", "extra"}


def test_buffers_that_models_compute_are_dropped(tmp_path: Path) -> None:
    """``rotary_emb.inv_freq`` of older checkpoints is not unexpected; it is told as skipped."""
    inv = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = write(tmp_path, {"w": np.ones(2, np.float32), inv: np.ones(2, np.float32)})
    report = load(path, {"w": np.zeros(2, np.float32)})
    assert report.skipped == (inv,)


def test_concatenated_tensors_are_not_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, {n: np.ones((2, 2), np.float32) for n in "abc"})
    report = load(
        path, {"ab": np.zeros((4, 2), np.float32)}, mapping={"ab": ["a", "b"]}, strict=False
    )
    assert report.skipped == ("c",)


@pytest.mark.parametrize("model", [[np.zeros(3)], 3, "model"])
def test_what_is_no_model(small: Path, model: Any) -> None:
    with pytest.raises(ValueError):
        load(small, model)


def test_a_model_of_torch_without_torch(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework that cannot be imported is refused by name."""
    monkeypatch.setitem(sys.modules, "torch", None)  # Python's way to say: not to be imported
    monkeypatch.delitem(sys.modules, "streamload.devices.torch.device", raising=False)
    registry.load.cache_clear()

    class Parameter:
        """Looks like one of torch's."""

    Parameter.__module__ = "torch.nn.parameter"
    with pytest.raises(DeviceNotFoundError, match="torch"):
        load(small, {"w": Parameter()})


# --- budget ---------------------------------------------------------------------------------------

SMALL_NBYTES = 3 * 4 * 2 + 12 + 40 + 2 + 2


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        (1000, 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ({"host": "2kB"}, 2000),
        ({"HOST": 3000}, 3000),
        (Budget("5kB", host="8MiB"), 5000),
        (Budget({"host": "6kB"}), 6000),
    ],
)
def test_budgets(small: Path, budget: Any, nbytes: int) -> None:
    """Every form of a budget is the number of bytes that it says."""
    report = load(small, budget=budget)
    assert report.plan.device("host").budget_nbytes == nbytes
    assert report.predicted_nbytes["host"] <= nbytes


def test_budgets_by_what_is_free(small: Path) -> None:
    """A percentage and None are less than all that is free, and more than nothing."""
    half, most = (
        load(small, budget=budget).plan.device("host").budget_nbytes for budget in ("50%", None)
    )
    assert 0 < half < most


@pytest.mark.parametrize(
    "budget", ["", "3 parsecs", 0, -1, "0%", "101%", True, 2.5, [], {"host": "x"}, {"": 3}]
)
def test_bad_budgets(small: Path, budget: Any) -> None:
    """What is no size is a ValueError, before anything is opened."""
    with pytest.raises((ValueError, TypeError)):
        load(small / "nowhere", budget=budget)


def test_a_budget_for_another_device(small: Path) -> None:
    with pytest.raises(ValueError, match=r"budget names cl.*host"):
        load(small, budget={"CL": "1MB"})
    with pytest.raises(ValueError, match="budget names"):
        streamload.plan(small, device=["CL"], budget={"CL": "1MB", "CPU": "1MB"}, dtype="float16")


@pytest.mark.parametrize("name", ["host", "CL", "CPU"])
def test_a_budget_too_small(small: Path, name: str) -> None:
    """Refused before any allocation, with both numbers; the model is as it was."""
    if name != "host":
        device(name)
    with pytest.raises(PlanInfeasibleError) as caught:
        load(small, device=name, budget=SMALL_NBYTES - 1)
    error = caught.value
    assert error.device == name
    assert error.needed_nbytes > error.budget_nbytes == SMALL_NBYTES - 1
    assert error.largest[0] == ("ids", 40)
    assert error.state is None


# --- dtype, cast, out of range --------------------------------------------------------------------


def test_patterns_of_dtypes(small: Path) -> None:
    found = load(small, dtype={"*norm*": "float64", "w": "checkpoint", "*": "float16"}).state_dict
    kinds = {name: array.dtype.name for name, array in found.items()}
    assert kinds == {
        "w": "bfloat16",
        "norm": "float64",
        "ids": "int64",
        "mask": "bool",
        "scalar": "float16",
        "empty": "float16",
    }


@pytest.mark.parametrize("dtype", ["float32", "F32", "fp32", "torch.float32", np.float32])
def test_spellings_of_a_dtype(small: Path, dtype: Any) -> None:
    assert load(small, dtype=dtype).state_dict["w"].dtype == np.float32


def test_dtypes_of_tinygrad(small: Path) -> None:
    from tinygrad import dtypes

    assert load(small, dtype=dtypes.half).state_dict["norm"].dtype == np.float16


def test_what_a_device_cannot_hold(tmp_path: Path) -> None:
    name = device("CPU")
    path = write_safetensors(tmp_path / "m.safetensors", {"odd": ("F4", (4,), bytes(2))})
    for where in (name, "host"):
        with pytest.raises(UnsupportedCastError) as caught:
            load(path, device=where)
        assert (caught.value.tensor, caught.value.dst) == ("odd", "float4_e2m1fn")


@pytest.mark.parametrize(
    ("out_of_range", "expected"), [("inf", [np.inf, -np.inf]), ("clamp", [65504, -65504])]
)
def test_out_of_range(tmp_path: Path, out_of_range: Any, expected: list[float]) -> None:
    """Values beyond float16 become infinite or the largest; a warning names tensors and line."""
    path = write(tmp_path, {"fine": bf16(1, np.inf), "big": bf16(1e6, -1e30, np.inf, 2)})
    with pytest.warns(RuntimeWarning, match="big") as caught:
        report = streamload.load_state_dict(
            None, path, device="host", out_of_range=out_of_range, progress=False
        )
    assert [Path(w.filename).name for w in caught] == ["test_load.py"]
    assert "fine" not in str(caught[0].message)
    assert report.state_dict["big"].tolist() == [*expected, np.inf, 2]
    assert {n: c.overflowed for n, c in report.counts.items()} == {"big": 2}


def test_out_of_range_as_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, {"big": bf16(1e6, 1)})
    model = {"big": np.zeros(2, np.float32)}
    with pytest.raises(OutOfRangeError) as caught:
        load(path, model, dtype="float16", out_of_range="error")
    error = caught.value
    assert (error.tensor, error.src, error.dst) == ("big", "bfloat16", "float16")
    assert error.overflowed >= 1
    assert error.state is not None
    assert error.state.invalid == ("big",)
    with pytest.raises(streamload.errors.DeviceError):
        np.asarray(model["big"])
    load(path, model, dtype="float16", out_of_range="clamp")
    assert model["big"].tolist() == [65504, 1]


def test_no_warning_where_nothing_overflows(small: Path) -> None:
    with warnings.catch_warnings(action="error"):
        report = load(small, dtype="float16")
    assert report.counts["norm"].rounded == 1


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("name", ["CPU", "CL"])
def test_support_bf16(small: Path, monkeypatch: pytest.MonkeyPatch, value: str, name: str) -> None:
    """Set to 0 or 1 it asks for float16, one way or the other, with the same bits."""
    monkeypatch.setenv("SUPPORT_BF16", value)
    report = load(small, device=device(name), budget="1MB")
    assert raw(report.state_dict["w"]) == SMALL["w"].astype(np.float16).tobytes()
    casts = {p.cast for p in report.plan.placements if p.name == "w"}
    assert casts == {"llvm"} or (value == "1" and casts == {"device"})
    assert bool(report.notes) == (value == "1" and casts == {"llvm"})


def test_support_bf16_set_to_something_else(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUPPORT_BF16", "yes")
    with pytest.raises(ValueError, match="SUPPORT_BF16"):
        load(small)


def test_an_open_checkpoint_and_what_is_none(small: Path) -> None:
    """A checkpoint that is open is taken as it is; what names no file is a ValueError."""
    report = load(streamload.open_checkpoint(small), dtype="checkpoint")  # type: ignore[arg-type]
    assert np.array_equal(report.state_dict["w"], SMALL["w"])
    for path in (None, {"w": SMALL["w"]}, 3):
        with pytest.raises(ValueError, match="path of a checkpoint"):
            load(path)  # type: ignore[arg-type]


def test_plans_for_nodes_look_at_no_device(small: Path) -> None:
    """Each node has its own budget; bfloat16 is planned as float16, which takes as many bytes."""
    code = (
        "import sys, streamload\n"
        f"plan = streamload.split({str(small)!r}, nodes=[streamload.Node('a', '1GB')])\n"
        "assert plan.devices[0].budget_nbytes == 10**9\n"
        "assert 'tinygrad' not in sys.modules"
    )
    forked.fresh(code)
    with pytest.raises(TypeError, match="unexpected keyword argument 'budget'"):
        streamload.split(small, nodes=[Node("a", "1GB")], budget="1GB")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="budget of its own"):
        streamload.split(small, nodes=[("a", "1GB")])  # type: ignore[list-item]


def test_former_arguments_of_plan(small: Path) -> None:
    """An error says what to write in their place."""
    with pytest.raises(TypeError, match=r"'devices': write device=\["):
        streamload.plan(small, devices=["CL", "CPU"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"'nodes': write streamload.split\(path, nodes="):
        streamload.plan(small, nodes=[Node("a", "1GB")])  # type: ignore[call-arg]


def test_the_tensor_that_overflowed_is_named(tmp_path: Path) -> None:
    for file, name, value in (("m1", "good", 1.0), ("m2", "bad", 1e30)):
        raw = {name: ("F32", (4,), np.full(4, value, np.float32).tobytes())}
        write_safetensors(tmp_path / f"{file}.safetensors", raw)
    with pytest.raises(streamload.errors.OutOfRangeError) as caught:
        load(tmp_path, mapping={"w": ["good", "bad"]}, dtype="float16", out_of_range="error")
    assert caught.value.tensor == "bad"
    assert caught.value.path.endswith("m2.safetensors")


def test_ties_are_read_only_when_all_fits(tmp_path: Path) -> None:
    """Two stored values of one parameter are compared last, after a plan that does not fit."""
    path = write(tmp_path, {"a": np.zeros(1000, np.float32), "b": np.ones(1000, np.float32)})
    array = np.zeros(1000, np.float32)
    with pytest.raises(streamload.errors.PlanInfeasibleError):
        load(path, {"a": array, "b": array}, budget="1kB")
    with pytest.raises(streamload.errors.StateDictMismatchError, match="values differ"):
        load(path, {"a": array, "b": array})
    assert not array.any()


def test_more_buffers_than_the_system_allows(tmp_path: Path) -> None:
    """tinygrad's CPU maps each buffer: too many are refused before the first one."""
    device("CPU")
    maps = int(Path("/proc/sys/vm/max_map_count").read_text())
    if maps > 300_000:
        pytest.skip(f"vm.max_map_count is {maps}: a checkpoint of so many tensors takes minutes")
    path = write(tmp_path, {f"w{i}": np.zeros(1, np.float32) for i in range(maps + 1)})
    with pytest.raises(streamload.errors.DeviceError, match=f"needs {maps + 1} buffers"):
        load(path, device="CPU", budget="5GB")


def test_what_was_invalid_stays_so(tmp_path: Path) -> None:
    path = write(tmp_path, {n: np.full(1000, 1e30, np.float32) for n in "ab"})
    model = {n: np.zeros(1000, np.float64) for n in "ab"}
    for _ in range(2):
        with pytest.raises(streamload.errors.OutOfRangeError) as caught:
            load(path, model, dtype="float16", out_of_range="error", threads=1)
        assert caught.value.state is not None
        assert "a" in caught.value.state.invalid
    load(path, model, dtype="float32")
    assert all((a == np.float32(1e30)).all() for a in model.values())


def test_parameters_on_parts_of_one_array(tmp_path: Path) -> None:
    """One would overwrite the other: refused before anything is read."""
    path = write(tmp_path, {"qkv": np.zeros((8, 4), np.float32), "q": np.ones((4, 4), np.float32)})
    qkv = np.full((8, 4), 7, np.float32)
    with pytest.raises(streamload.errors.StateDictMismatchError, match="shares memory"):
        load(path, {"qkv": qkv, "q": qkv[:4]})
    assert (qkv == 7).all()


def test_an_interrupt_when_all_is_done_has_its_notes(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overflow warnings that are errors come when all is loaded, and say so."""
    big = small.parent / "big"
    big.mkdir()
    write(big, {"w": np.full(4, 1e30, np.float32)})
    with warnings.catch_warnings(action="error"), pytest.raises(RuntimeWarning) as caught:
        load(big, dtype="float16")
    assert caught.value.__notes__ == ["parameters: 1 loaded (w); 0 untouched; 0 invalid"]


@pytest.mark.parametrize("cast", ["auto", "llvm", "numpy", "device"])
@pytest.mark.parametrize("reader", ["auto", "mmap", "pread"])
def test_every_cast_and_reader(small: Path, cast: Any, reader: Any) -> None:
    found = load(small, cast=cast, reader=reader, dtype="float16").state_dict
    assert np.array_equal(found["w"], SMALL["w"].astype(np.float16))
    assert np.array_equal(found["norm"], SMALL["norm"].astype(np.float16))


@pytest.mark.parametrize(
    "arguments",
    [
        {"out_of_range": "wrap"},
        {"cast": "gpu"},
        {"reader": "fast"},
        {"chunk_nbytes": 0},
        {"threads": 0},
        {"progress": "yes"},
        {"progress": 3},
        {"dtype": "int8"},
        {"dtype": "float99"},
        {"mapping": "gpt"},
        {"rename": 3},
        {"device": []},
        {"device": ["auto", "CPU"]},
        {"device": ["host", "host"]},
        {"device": 5},
        {"device": [1]},
        {"threads": "2"},
        {"threads": 1.5},
        {"threads": True},
        {"chunk_nbytes": 1e6},
        {"strict": "no"},
        {"shapes": "ignore"},
    ],
    ids=str,
)
def test_bad_arguments(small: Path, arguments: dict[str, Any]) -> None:
    """Each is a ValueError that says what is expected; nothing is written."""
    model = {"w": np.zeros((3, 4), np.float16)}
    with pytest.raises(ValueError):
        load(small, model, **{"strict": False} | arguments)
    assert not model["w"].any()


@pytest.mark.parametrize("path", ["", "nowhere.safetensors", "org/name-that-is-not-there"])
def test_a_checkpoint_that_is_not_there(path: str) -> None:
    """An error of ours, with the path."""
    with pytest.raises(CheckpointError):
        streamload.load_state_dict(None, path, device="host")


# --- device ---------------------------------------------------------------------------------------


def test_devices_by_argument_environment_and_model(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinygrad import Device, Tensor

    device("CPU")
    device("CL")
    model = {"w": Tensor.zeros(3, 4, device="CPU").contiguous().realize()}
    free = {"w": Tensor.empty(3, 4, device="CPU")}

    def place(given: Any, **arguments: Any) -> list[str]:
        report = streamload.load_state_dict(
            given, small, strict=False, progress=False, budget="1MB", **arguments
        )
        return [d.device for d in report.plan.devices]

    assert place(None) == [Device.DEFAULT]
    monkeypatch.setenv("STREAMLOAD_DEVICE", "CL")
    assert place(None) == ["CL"]
    assert place(None, device="tinygrad:CPU") == ["CPU"]
    assert place(model) == ["CPU"]
    assert place(free) == ["CL"]
    assert free["w"].device == "CL"
    monkeypatch.setenv("STREAMLOAD_DEVICE", "host")
    assert place(None) == ["host"]
    assert place(None, device="Cpu:0") == ["CPU"]
    assert place(None, device="cl:0") == ["CL"]


def test_a_device_that_is_not_there(small: Path) -> None:
    """The error lists what works here."""
    device("CPU")
    with pytest.raises(DeviceNotFoundError) as caught:
        load(small, device="NOPE")
    assert {"CPU", "host"} <= set(caught.value.working)


def test_a_name_in_the_spelling_of_torch_where_there_is_no_torch(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what to install, and how tinygrad's devices are written."""
    monkeypatch.setitem(sys.modules, "torch", None)  # Python's way to say: not to be imported
    with pytest.raises(DeviceNotFoundError, match=r"pip install torch.*upper case"):
        load(small, device="cuda:0")


def test_devices_of_two_frameworks(small: Path) -> None:
    """A load has one framework."""
    with pytest.raises(DeviceNotFoundError):
        load(small, device=["tinygrad:CPU", "host"])


def test_auto_says_what_it_took(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    device("CPU")
    with caplog.at_level(logging.WARNING, "streamload"):
        report = load(small, device="auto", budget="1MB")
    (used,) = (d.device for d in report.plan.devices)
    assert any(f"took {used}" in note for note in report.notes)
    assert any(f"took {used}" in record.message for record in caplog.records)


LAYERS = {f"layers.{i}.w": np.full(1000, i, np.float32) for i in range(6)}


@pytest.mark.parametrize("names", [["CPU", "CPU:1"], ["CL", "CPU"], ["CPU", "CL"]])
def test_several_devices(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        device(name.partition(":")[0])
    path = write(tmp_path, LAYERS)
    budgets = dict(zip(names, (9000, 18000), strict=True))
    report = load(path, device=names, budget=budgets)
    where = [report.state_dict[n].device for n in LAYERS]
    assert where == [names[0]] * 2 + [names[1]] * 4
    assert all(raw(report.state_dict[n]) == a.tobytes() for n, a in LAYERS.items())
    assert all(report.held_nbytes[n] <= report.predicted_nbytes[n] <= budgets[n] for n in names)
    planned = streamload.plan(path, device=names, budget=budgets, dtype="float32")
    assert [p.device for p in planned.placements] == where


def test_devices_twice_and_none(small: Path) -> None:
    """One device under two spellings, or no node at all, is no split."""
    with pytest.raises(ValueError, match="different names"):
        streamload.plan(small, device=["CPU", "cpu:0"], budget="1MB", dtype="float16")
    with pytest.raises(ValueError, match="different names"):
        streamload.split(small, nodes=[], dtype="float16")
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        streamload.split(small, nodes=[Node("a", 1)], device="CPU")  # type: ignore[call-arg]


# --- progress -------------------------------------------------------------------------------------


def test_progress_as_a_callable(tmp_path: Path) -> None:
    path = write(tmp_path, {"w": np.zeros(100_000, np.float32)})
    told: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: told.append((done, total)), chunk_nbytes=1000)
    assert told[-1] == (400_000, 400_000)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {400_000}


def test_progress_that_raises(tmp_path: Path) -> None:
    path = write(tmp_path, {n: np.ones(1000, np.float32) for n in "ab"})
    model = {n: np.zeros(1000, np.float64) for n in "ab"}

    def fail(done: int, total: int) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop") as caught:
        load(path, model, progress=fail, chunk_nbytes=1000, dtype="checkpoint")
    assert any("invalid" in note or "untouched" in note for note in caught.value.__notes__)
    load(path, model, dtype="checkpoint")
    assert all(a.all() and a.dtype == np.float32 for a in model.values())


# --- real loads: memory and bits ------------------------------------------------------------------

# Peaks are taken by a thread that reads /proc, over what the same process had after a first load
# of the same casts: imports, compiled kernels and the device's own threads are no part of a load.
CHILD = """
import json, sys, threading, time
import ml_dtypes, numpy as np
import streamload
sys.path.insert(0, sys.argv[2])
from load_helpers import raw, write
case = json.loads(sys.argv[1])
from pathlib import Path
folder = Path(case["folder"])

def now():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(l.split()[1]) * 1024 for l in lines if l.startswith(("RssAnon", "RssShmem")))

def load(path, model):
    return streamload.load_state_dict(model, path, device=case["device"], progress=False,
        dtype=case["dtype"], reader=case["reader"], cast=case["cast"], budget=case["budget"],
        chunk_nbytes=case["chunk_nbytes"], threads=case["threads"])

def old(path):
    if not case["model"]:
        return None
    found = streamload.open_checkpoint(path).tensors
    if case["device"] == "host":
        return {n: np.ones(i.shape, np.float32) for n, i in found.items()}
    from tinygrad import Device, Tensor
    model = {n: Tensor.full(i.shape, 1.0, device=case["device"]).contiguous().realize()
             for n, i in found.items()}
    Device[case["device"]].synchronize()  # kernels that still run touch memory that is not ours
    return model

load(folder / "warm", old(folder / "warm"))
model = old(folder / "real")
base, peak, stop = now(), 0, threading.Event()
def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, now() - base)
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
report = load(folder / "real", model)
stop.set()
thread.join()
peak = max(peak, now() - base)
found = model if model is not None else report.state_dict
wrong = []
for name, info in streamload.open_checkpoint(folder / "real").tensors.items():
    data = np.fromfile(info.shard, np.uint8, info.nbytes, offset=info.start)
    with np.errstate(all="ignore"):
        values = data.view(info.dtype.numpy)
        placed = next(p for p in report.plan.placements if p.name == name)
        want = values.astype(placed.dst.numpy)
        got = np.frombuffer(raw(found[name]), placed.dst.numpy)
        left, right = (a.view(np.uint8).reshape(len(want), -1) for a in (got, want))
        same = left == right
        floats = placed.dst.kind == "float"
        both = (np.isnan(got) & np.isnan(want)) if floats else np.zeros(len(want), bool)
    if not (same.all(axis=1) | both).all():
        wrong.append(name)
mine = report.plan.devices[0]
print(json.dumps({"peak": peak, "fresh": mine.fresh_nbytes, "predicted": mine.peak_nbytes,
    "budget": mine.budget_nbytes, "wrong": wrong, "chunk": report.plan.chunk_nbytes,
    "measured": dict(report.measured_nbytes), "held": dict(report.held_nbytes),
    "total": sum(p.nbytes for p in report.plan.placements)}))
"""

#: What a load may take beside what was planned: page tables of the sampler's thread, allocator
#: arenas of worker threads, Python objects of the plan.
OVERHEAD_NBYTES = 4 * 2**20


@pytest.mark.parametrize(
    "seed", [s if s < 2 else pytest.param(s, marks=pytest.mark.slow) for s in range(20)]
)
def test_real_loads_keep_their_predictions(tmp_path: Path, seed: int) -> None:
    """Random checkpoints, devices, budgets and chunks: the kernel's peak is at most the plan's."""
    rng = np.random.default_rng(seed)
    name = ("host", "CPU", "CL")[seed % 3]
    if name != "host":
        device(name)
    kinds = [np.float32, np.float16, np.float64, np.int32, np.uint8, ml_dtypes.bfloat16]
    for folder, scale in (("warm", 1000), ("real", int(rng.integers(300_000, 3_000_000)))):
        tensors = {}
        for i, kind in enumerate([*kinds, ml_dtypes.bfloat16]):
            rows = max(1, int(rng.random() * scale) // 64)
            size = np.dtype(kind).itemsize
            values = rng.integers(0, 256, rows * 64 * size, dtype=np.uint8).view(kind)
            tensors[f"layers.{i}.w"] = values.reshape(rows, 64)
        write(tmp_path / folder, tensors)
    dtype = ("float16", "float32", "checkpoint")[int(rng.integers(3))]
    if dtype == "checkpoint" and name == "CPU":
        dtype = "float16"  # its compiler may not have bfloat16, in which the bytes are read back
    planned = streamload.plan(tmp_path / "real", budget="1GB", dtype=dtype)
    model = bool(rng.integers(2))
    old_nbytes = 4 * sum(math.prod(p.shape) for p in planned.placements) * model
    case = {
        "folder": str(tmp_path),
        "device": name,
        "dtype": dtype,
        "reader": ("mmap", "pread")[int(rng.integers(2))],
        "cast": ("llvm", "numpy")[int(rng.integers(2))],
        "chunk_nbytes": int(rng.choice([50_000, 2**20, 8 * 2**20])),
        "threads": int(rng.integers(1, 4)),
        "model": model,
        # tight: buffers and threads must become fewer to leave room for numpy's temporaries
        "budget": max(planned.resident_nbytes, old_nbytes) + int(rng.integers(5e6, 2e7)),
    }
    tests = str(Path(__file__).parents[1] / "support")
    python = os.pathsep.join([tests, os.environ["PYTHONPATH"]])
    ignoring = ("-W", "ignore")
    said = forked.fresh(CHILD, json.dumps(case), tests, options=ignoring, PYTHONPATH=python)
    found = json.loads(said)
    assert found["wrong"] == [], case
    assert found["peak"] <= found["fresh"] + OVERHEAD_NBYTES, (case, found)
    assert found["predicted"] <= found["budget"]
    assert found["held"][name] <= found["budget"]
    if name != "host":
        assert found["measured"][name] <= found["predicted"], (case, found)


def test_what_a_load_leaves(tmp_path: Path) -> None:
    from tinygrad.helpers import GlobalCounters

    name = device("CL")
    path = write(tmp_path, {"w": np.zeros(100_000, np.float32)})

    def used() -> int:
        return int(GlobalCounters.mem_used_per_device[name])

    before = used()
    report: Any = load(path, device=name, budget="1MB")
    assert used() == before + 400_000
    del report
    assert used() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_python_looks_for_no_garbage_during_a_load(small: Path, enabled: bool) -> None:
    seen: list[bool] = []

    def told(done: int, total: int) -> None:
        seen.append(gc.isenabled())

    def fails(done: int, total: int) -> None:
        raise RuntimeError("not told")

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        streamload.load_state_dict(None, small, device="host", budget="1GB", progress=told)
        assert seen and not any(seen)
        assert gc.isenabled() is enabled
        with pytest.raises(RuntimeError, match="not told"):
            streamload.load_state_dict(None, small, device="host", budget="1GB", progress=fails)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
