"""tinygrad's devices and tensors: every way in, and what a load promises about a model."""

from __future__ import annotations

import gc
import json
import mmap
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import ml_dtypes
import numpy as np
import pytest
from array_files import floats, load, save
from parameters import product
from plan_helpers import device_spec, plan_of
from safetensors_files import write_safetensors
from tinygrad import Device, Tensor, TinyJit, dtypes, nn
from tinygrad.device import Buffer
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import UOp

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.core.dtypes import BF16, BY_CODE, BY_NAME, F16, F32
from streamload.core.memory import STAGING, Ledger
from streamload.core.pagemap import reusable_nbytes
from streamload.core.tensors import RowRange
from streamload.devices.tinygrad import device as ours
from streamload.devices.tinygrad import tensors as tinygrad_tensors
from streamload.errors import (
    AllocationError,
    BudgetExceededError,
    DeviceError,
    DeviceNotFoundError,
    OutOfRangeError,
    StateDictMismatchError,
    StreamloadError,
    UnsupportedCastError,
)
from streamload.planning.moves import DeviceSpec, TensorRequest
from streamload.streaming.loop import stream
from streamload.streaming.sink import ModelTarget
from streamload.streaming.state import Transfer
from streamload.verification.verify import verify

ROOT = str(Path(streamload.__file__).parent.parent)
DEVICES = ("CL", "CPU")


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    """A test leaves nothing under way on OpenCL, and nothing in a cache that a load emptied."""
    yield
    gc.collect()
    assert Device["CL"].pending_copyin == []


def cached_nbytes(device: str) -> int:
    cache = getattr(Device[device].allocator, "cache", {})
    return sum(size * len(kept) for (size, _), kept in cache.items())


def used_nbytes(device: str) -> int:
    gc.collect()
    return int(GlobalCounters.mem_used_per_device[device])


def full(value: float, *shape: int, device: str, dtype: Any = dtypes.float32) -> Tensor:
    return Tensor.full(shape, value, dtype=dtype, device=device).contiguous().realize()


# --- in place, or replaced ----------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_same_size_and_dtype_is_written_in_place(tmp_path: Path, device: str) -> None:
    values = {"w": floats(1, 8, 8)}
    model = {"w": full(1, 8, 8, device=device)}
    x = full(1, 8, 8, device=device)
    double = TinyJit(lambda x: (x * model["w"] * 2).realize())
    for _ in range(4):
        double(x)
    other = Tensor(model["w"].uop)
    memory = model["w"].uop.base.buffer
    report = load(model, save(tmp_path, values))
    assert [p.action for p in report.plan.placements] == ["in_place"]
    assert model["w"].uop.base.buffer is memory
    assert (model["w"].numpy() == values["w"]).all()
    assert (other.numpy() == values["w"]).all()
    assert (double(x).numpy() == values["w"] * 2).all()
    assert ((x + model["w"]).numpy() == values["w"] + 1).all()


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.float64], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_realised_tensors_keep_their_dtype_and_lazy_ones_do_not(
    tmp_path: Path, device: str, dtype: Any
) -> None:
    path = save(tmp_path, {"here": floats(1, 30), "lazy": floats(2, 30)}, "BF16")
    model = {
        "here": full(1, 30, device=device, dtype=dtype),
        "lazy": Tensor.ones(30, device=device, dtype=dtype) * 2,
    }
    memory = model["here"].uop.base.buffer
    load(model, path, device=device)
    expected = floats(1, 30).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert model["here"].uop.base.buffer is memory
    assert model["here"].dtype == dtype
    assert (model["here"].numpy() == expected).all()
    assert model["lazy"].dtype == dtypes.float16


@pytest.mark.parametrize("device", DEVICES)
def test_a_dtype_is_kept_through_moves_and_failed_loads(tmp_path: Path, device: str) -> None:
    """A realised tensor that goes to another device keeps its dtype, also after a failed load."""
    other = {"CL": "CPU", "CPU": "CL"}[device]
    model = {"w": full(1, 3, device=other)}
    path = save(tmp_path, {"w": np.array([1e39, 1, 2], np.float64)}, "F64")
    with pytest.raises(OutOfRangeError):
        load(model, path, device=device, out_of_range="error")
    load(model, path, device=device, out_of_range="inf")
    assert (model["w"].device, model["w"].dtype) == (device, dtypes.float32)
    assert model["w"].tolist() == [np.inf, 1, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_another_dtype_replaces_and_the_old_memory_is_gone(tmp_path: Path, device: str) -> None:
    values = {f"w{i}": floats(i, 300 + i, 100) for i in range(5)}
    before = used_nbytes(device)
    model = {k: full(1, *v.shape, device=device) for k, v in values.items()}
    old = [weakref.ref(t.uop.base.buffer) for t in model.values()]
    report = load(model, save(tmp_path, values, "F16"), dtype="checkpoint")
    assert {p.action for p in report.plan.placements} == {"replace"}
    assert [ref() for ref in old] == [None] * 5
    assert cached_nbytes(device) == 0
    assert 0 <= used_nbytes(device) - before - sum(v.size * 2 for v in values.values()) < 64
    for name, value in values.items():
        assert model[name].dtype == dtypes.float16
        assert read_back(model[name]) == value.astype(np.float16).tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_old_and_new_fit_where_only_one_has_room(tmp_path: Path, device: str) -> None:
    """The budget of the larger of old and new is enough to replace all parameters."""
    values = {f"w{i}": floats(i, 1 << 16) for i in range(6)}
    model = {k: full(1, 1 << 16, device=device) for k in values}
    report = load(model, save(tmp_path, values, "F16"), budget=6 * (4 << 16), dtype="checkpoint")
    assert report.held_nbytes[device] <= 6 * (4 << 16)
    assert all(read_back(model[k]) == v.astype(np.float16).tobytes() for k, v in values.items())


def _jit_holder(tensor: Tensor) -> Any:
    @TinyJit
    def step(x: Tensor) -> Tensor:
        return (x + tensor).realize()

    x = full(0, *tensor.shape, device=str(tensor.device))
    for _ in range(4):
        step(x)
    return step


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a captured TinyJit": _jit_holder,
    "a lazy graph": lambda tensor: tensor * 2 + 1,
    "a view": lambda tensor: tensor[1:],
    "its buffer": lambda tensor: tensor.uop.base.buffer,
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_something_else_holds_is_counted_twice_or_refused(
    tmp_path: Path, device: str, holder: str
) -> None:
    """Memory that cannot go is counted beside the new; without room the load refuses, saying so."""
    values = {"w": floats(1, 1 << 14)}
    path = save(tmp_path, values, "F16")
    model = {"w": full(3, 1 << 14, device=device)}
    keeps = HOLDERS[holder](model["w"])
    with pytest.raises(BudgetExceededError, match=r"w: something else still holds") as caught:
        load(model, path, budget=4 << 14, chunk_nbytes=4096, dtype="float16")
    assert caught.value.state is not None
    assert caught.value.state.untouched == ("w",)
    assert model["w"].dtype == dtypes.float32
    assert (model["w"].numpy() == 3).all()
    report = load(model, path, budget=8 << 14, dtype="float16")
    assert report.held_nbytes[device] >= 6 << 14
    assert read_back(model["w"]) == values["w"].astype(np.float16).tobytes()
    del keeps


# --- tied, views, and other parameters that are not plain ---------------------------------------


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_tied_parameters_are_loaded_once_and_stay_tied(
    tmp_path: Path, device: str, dtype: Any
) -> None:
    """One object under two names, or two over one graph: one name in the checkpoint is enough."""
    values = {"a": floats(1, 6, 4)}
    a = full(1, 6, 4, device=device, dtype=dtype)
    model = {"a": a, "same": a, "other": Tensor(a.uop), "deep": {"x": [Tensor(a.uop)]}}
    report = load(model, save(tmp_path, values), dtype="checkpoint")
    assert report.read_nbytes == 96
    assert sorted(report.tied) == ["deep.x.0", "other", "same"]
    memory = model["a"].uop.base.buffer
    for tensor in (model["same"], model["other"], model["deep"]["x"][0]):
        assert tensor.uop.base.buffer is memory
        assert (tensor.numpy() == values["a"]).all()


def test_tied_lazy_parameters_stay_tied(tmp_path: Path) -> None:
    lazy = Tensor.ones(4, device="CL") * 3
    model = {"a": lazy, "b": Tensor(lazy.uop), "c": Tensor.ones(4, device="CL") * 4}
    load(model, save(tmp_path, {"a": floats(1, 4), "c": floats(2, 4)}), device="CL")
    assert model["a"].uop is model["b"].uop
    assert (model["b"].numpy() == floats(1, 4)).all()
    assert (model["c"].numpy() == floats(2, 4)).all()


def test_initial_values_that_are_equal_are_not_tied(tmp_path: Path) -> None:
    """Parameters of one constant graph are one node to tinygrad, and each gets its own values."""
    model = {name: Tensor.arange(1, 5).log() for name in "ab"}
    assert model["a"].uop is model["b"].uop
    model["c"] = model["b"]
    report = load(model, save(tmp_path, {"a": floats(1, 4), "b": floats(2, 4)}), device="CPU")
    assert report.tied == ("c",)
    assert (model["a"].numpy() == floats(1, 4)).all()
    assert (model["c"].numpy() == floats(2, 4)).all()


def test_a_view_is_written_in_place_where_the_device_has_views(tmp_path: Path) -> None:
    """On the CPU a slice of another tensor is written where it lies, and nothing else is."""
    whole = full(1, 10, 4, device="CPU")
    model = {"slice": whole[2:5], "whole": whole}
    values = {"slice": floats(1, 3, 4), "whole": floats(2, 10, 4)}
    load(model, save(tmp_path, {"slice": values["slice"]}), strict=False)
    expected = np.ones((10, 4), np.float32)
    expected[2:5] = values["slice"]
    assert (whole.numpy() == expected).all()
    assert (model["slice"].numpy() == values["slice"]).all()


def test_a_view_that_would_change_its_dtype_is_refused(tmp_path: Path) -> None:
    """A view cannot be replaced without parting from what it is a view of: nothing is touched."""
    whole = full(1, 10, 4, device="CPU")
    model = {"slice": whole[2:5]}
    with pytest.raises(StreamloadError, match="slice"):
        load(model, save(tmp_path, {"slice": floats(1, 3, 4)}, "F16"), dtype="checkpoint")
    assert (whole.numpy() == 1).all()


@pytest.mark.parametrize(
    ("device", "cut", "why"),
    [
        ("CL", lambda t: t[2:5], "no views"),
        ("CL", lambda t: t.permute(1, 0), "no views"),
        ("CPU", lambda t: t.permute(1, 0), "not contiguous"),
        ("CPU", lambda t: t[:, 1:3], "not contiguous"),
        ("CPU", lambda t: t[::2], "not contiguous"),
    ],
)
def test_a_view_that_cannot_be_written_is_refused_by_name(
    tmp_path: Path, device: str, cut: Callable[[Tensor], Tensor], why: str
) -> None:
    whole = full(1, 10, 10, device=device)
    model = {"part": cut(whole)}
    path = save(tmp_path, {"part": floats(1, *map(int, model["part"].shape))})
    with pytest.raises(StateDictMismatchError, match=f"part.*{why}"):
        load(model, path)
    assert (whole.numpy() == 1).all()


SPREAD = ("CPU", "CPU:1")


def sharded(dtype: Any, *, lazy: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by rows, by columns, by an axis between, copied, and of one device; with values."""
    axes = {"rows": 0, "columns": 1, "between": 1, "copied": None}
    values = {"rows": floats(1, 8, 6), "columns": floats(2, 7, 6), "between": floats(3, 3, 4, 5)}
    values |= {"copied": floats(4, 5), "alone": floats(5, 3)}
    model = {}
    for name, value in values.items():
        tensor = Tensor.zeros(*value.shape, device="CPU", dtype=dtype).contiguous()
        if name in axes:
            tensor.shard_(SPREAD, axis=axes[name])
        model[name] = tensor if lazy else tensor.realize()
    return model, values


@pytest.mark.parametrize("code", ["F32", "BF16"])
@pytest.mark.parametrize("lazy", [False, True])
def test_each_device_reads_its_own_shard(tmp_path: Path, lazy: bool, code: str) -> None:
    """Rows and columns of its own; equal to the full load that is sharded afterwards."""
    model, values = sharded(dtypes.float32, lazy=lazy)
    path = save(tmp_path, values, code)
    report = load(model, path)
    stored = {name: v.astype(BY_CODE[code].numpy) for name, v in values.items()}
    whole = sum(v.nbytes for v in stored.values())
    assert report.read_nbytes == whole + stored["copied"].nbytes
    kind = np.float32 if code == "F32" or not lazy else np.float16
    for name, tensor in model.items():
        assert tensor.device == ("CPU" if name == "alone" else SPREAD)
        expected = stored[name].astype(np.float32).astype(kind)
        assert (tensor.numpy() == expected).all()
        assert ((tensor + 1).numpy() == expected + kind(1)).all()
    assert [p.device for p in report.plan.placements if p.name.startswith("rows")] == [*SPREAD]
    assert verify(report, open_checkpoint(path), model) == []
    load(model, path)
    assert all((t.numpy() == stored[n].astype(kind)).all() for n, t in model.items())


def test_a_failed_load_into_shards_is_completed_by_another(tmp_path: Path) -> None:
    model = {"w": Tensor.zeros(4, 4, dtype=dtypes.float16, device="CPU").contiguous()}
    model["w"].shard_(SPREAD, axis=0).realize()
    value = np.ones((4, 4), np.float32)
    value[3] = 1e9
    path = save(tmp_path, {"w": value})
    with pytest.raises(OutOfRangeError):
        load(model, path, out_of_range="error")
    with pytest.raises(DeviceError, match="'w' holds no values"):
        model["w"].numpy()
    with pytest.raises(OutOfRangeError):
        load(model, path, out_of_range="error")
    with pytest.raises(DeviceError, match="'w' holds no values"):
        model["w"].numpy()
    load(model, path, out_of_range="clamp")
    assert model["w"].numpy()[:3].tolist() == [[1] * 4] * 3
    assert model["w"].device == SPREAD


def test_shards_stay_where_they_are(tmp_path: Path) -> None:
    for lazy, options, said in (
        (False, {"dtype": "float16"}, "it is one of 2 shards"),
        (True, {"device": "CPU"}, "it is a shard on CPU:1: leave device= away"),
    ):
        model, values = sharded(dtypes.float32, lazy=lazy)
        with pytest.raises(StateDictMismatchError, match=said):
            load(model, save(tmp_path, values), **options)


class Net:
    def __init__(self) -> None:
        self.first = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)
        self.blocks = [nn.Linear(4, 4, bias=False) for _ in range(2)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_that_was_never_realised_is_filled(tmp_path: Path, device: str) -> None:
    """Lazy initialisers are not run: the parameters are new on the device asked for."""
    model = Net()
    names = nn.state.get_state_dict(model)
    values = {k: floats(i, *map(int, t.shape)) for i, (k, t) in enumerate(names.items())}
    report = load(model, save(tmp_path, values), device=device)
    assert {p.action for p in report.plan.placements} == {"new"}
    for name, tensor in nn.state.get_state_dict(model).items():
        assert tensor.device == device
        assert (tensor.numpy() == values[name]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_model_is_filled(tmp_path: Path, device: str) -> None:
    """Tensor.empty names its device, and has no memory yet."""
    model = {"w": Tensor.empty(5, 5, device=device), "n": Tensor.empty(0, 3, device=device)}
    load(model, save(tmp_path, {"w": floats(1, 5, 5), "n": floats(1, 0, 3)}), device=device)
    assert (model["w"].numpy() == floats(1, 5, 5)).all()
    assert model["n"].numpy().shape == (0, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_store_that_was_not_run_is_replaced_with_its_memory(tmp_path: Path, device: str) -> None:
    """A parameter with a pending assign gets the checkpoint's values, and keeps them."""
    tensor = full(1, 4096, device=device)
    before = used_nbytes(device)
    tensor.assign(tensor + 1)
    model = {"w": tensor}
    load(model, save(tmp_path, {"w": floats(1, 4096)}), device=device)
    assert (model["w"].numpy() == floats(1, 4096)).all()
    assert (model["w"].realize().numpy() == floats(1, 4096)).all()
    assert used_nbytes(device) == before


def test_a_model_of_disk_tensors_goes_to_the_device(tmp_path: Path) -> None:
    path = save(tmp_path, {"w": floats(1, 4, 4)})
    model = {"w": nn.state.safe_load(str(path))["w"]}
    other = save(tmp_path / "other", {"w": floats(2, 4, 4)})
    before = path.read_bytes()
    load(model, other, device="CL")
    assert model["w"].device == "CL"
    assert (model["w"].numpy() == floats(2, 4, 4)).all()
    assert path.read_bytes() == before


def test_tensors_of_one_memory_and_several_shapes(tmp_path: Path) -> None:
    a = full(1, 6, 4, device="CL", dtype=dtypes.float16)
    model = {"a": a, "flat": a.reshape(24)}
    load(model, save(tmp_path, {"a": floats(1, 6, 4)}), dtype="checkpoint")
    assert model["flat"].shape == (24,)
    assert model["flat"].uop.base is model["a"].uop.base
    assert (model["flat"].numpy() == floats(1, 24).reshape(-1)).all()


# --- dtypes -------------------------------------------------------------------------------------

HELD = sorted(set(BY_NAME) - ours._UNSUPPORTED)


def _bits(name: str) -> bytes:
    """Awkward bits: subnormals, NaN, infinities, all of a 16-bit dtype's codes."""
    dtype = BY_NAME[name]
    if dtype.kind == "bool":
        return bytes([0, 1, 1, 0, 1])
    codes = np.arange(1 << min(dtype.bits, 16), dtype=np.uint64)
    return (
        (codes * (0x0001_0001_0001_0001 if dtype.bits > 16 else 1))
        .astype(f"u{dtype.itemsize}")
        .tobytes()
    )


def read_back(tensor: Tensor) -> bytes:
    """The raw bytes of a tensor's memory, by tinygrad's own copy."""
    buffer = tensor.uop.base.buffer
    return bytes(buffer.as_memoryview())[: buffer.nbytes]


@pytest.mark.parametrize("device", DEVICES)
def test_every_dtype_that_tinygrad_has_arrives_bit_for_bit(tmp_path: Path, device: str) -> None:
    """dtype="checkpoint" keeps all bits, bfloat16 and float8 too, whatever the device emulates."""
    tensors: dict[str, Any] = {}
    for name in HELD:
        data = _bits(name)
        tensors[name] = (BY_NAME[name].code, (len(data) // BY_NAME[name].itemsize,), data)
    tensors["scalar"] = ("F32", (), b"\x00\x00\x80\x3f")
    tensors["nothing"] = ("BF16", (0, 7), b"")
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    state = load(None, path, device=device, dtype="checkpoint", chunk_nbytes=999).state_dict
    assert state.keys() == tensors.keys()
    for name in HELD:
        assert state[name].dtype == tinygrad_tensors.TO_TINYGRAD[name]
        assert read_back(state[name]) == tensors[name][2], name
    assert state["scalar"].item() == 1
    assert state["scalar"].shape == ()
    assert state["nothing"].shape == (0, 7)
    assert state["nothing"].device == device


@pytest.mark.parametrize(
    ("code", "shape"),
    [("F4", (4,)), ("F6_E2M3", (4,)), ("F6_E3M2", (4,)), ("F8_E8M0", (3,)), ("C64", (1,))],
)
@pytest.mark.parametrize("dtype", ["checkpoint", None])
def test_a_dtype_that_tinygrad_lacks_is_refused_before_anything(
    tmp_path: Path, code: str, shape: tuple[int, ...], dtype: str | None
) -> None:
    nbytes = BY_CODE[code].nbytes(shape[0])
    tensors = {"fine": ("F32", (1,), bytes(4)), "odd": (code, shape, bytes(nbytes))}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    before = used_nbytes("CL")
    with pytest.raises(UnsupportedCastError, match=r"'odd'.*CL has no such dtype") as caught:
        load(None, path, device="CL", dtype=dtype)
    assert caught.value.tensor == "odd"
    assert caught.value.src == BY_CODE[code].name
    assert used_nbytes("CL") == before


# --- what a failed load leaves ------------------------------------------------------------------

USES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "data": lambda t: t.data(),
    "expression": lambda t: (t + 1).realize(),
    "reduction": lambda t: t.sum().item(),
    "view": lambda t: t[1:].numpy(),
    "bitcast": lambda t: t.bitcast(dtypes.uint32).numpy(),
    "to": lambda t: t.to("PYTHON").numpy(),
    "clone": lambda t: t.clone().realize(),
    "jit": lambda t: [TinyJit(lambda x: (x + t).realize())(Tensor.ones(8, device=t.device))],
}


@pytest.mark.parametrize("device", DEVICES)
def test_an_invalid_parameter_raises_whenever_it_is_used(tmp_path: Path, device: str) -> None:
    values = {f"w{i}": floats(i, 8) for i in range(10)}
    values["w1"] = np.full(8, 1e6, np.float32)
    path = save(tmp_path, values)
    before = used_nbytes(device)
    dtype = dtypes.float16
    model = {k: full(1, 8, device=device, dtype=dtype) for k in values}
    jit = TinyJit(lambda x: (x + model["w1"]).realize())
    with pytest.raises(OutOfRangeError) as caught:
        load(model, path, dtype="float16", out_of_range="error", chunk_nbytes=16, threads=1)
    state = caught.value.state
    assert state is not None
    assert state.loaded == ("w0",)
    assert "w1" in state.invalid  # and what had been begun after it
    assert "w9" in state.untouched
    assert caught.value.__notes__ == [f"parameters: {state}"]
    assert read_back(model["w0"]) == values["w0"].astype(np.float16).tobytes()
    assert (model["w9"].numpy() == 1).all()
    held = 16 * 10  # what was being written in place is kept for the next load
    assert 0 <= used_nbytes(device) - before - held < 64
    for use, call in USES.items():
        if use == "bitcast":
            continue
        with pytest.raises(DeviceError, match="'w1' holds no values"):
            call(model["w1"])
    with pytest.raises(DeviceError, match="'w1' holds no values"):
        jit(full(1, 8, device=device, dtype=dtype))
    with pytest.warns(RuntimeWarning, match="w1"):
        load(model, path, dtype="float16", out_of_range="clamp", device=device)
    assert (model["w1"].numpy() == 65504).all()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("device", [*DEVICES, "PYTHON"])
def test_every_use_of_an_invalid_parameter_raises(device: str, use: str) -> None:
    parameter = tinygrad_tensors.TinygradParameter(("w",), [tensor := full(1, 8, device=device)])
    parameter.invalidate(keep=False)
    for _ in range(2):
        with pytest.raises(DeviceError, match="'w' holds no values"):
            USES[use](tensor)
    again = tinygrad_tensors.TinygradParameter(("w",), [tensor])
    assert (again.device, again.nbytes, again.release()) == (None, 0, "")


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_load_leaves_old_values_where_they_still_are(tmp_path: Path, device: str) -> None:
    values = {"held": np.full(4096, 1e6, np.float32), "lazy": np.full(64, 1e6, np.float32)}
    path = save(tmp_path, values)
    lazy = Tensor.ones(64, device=device) * 3
    model = {"held": full(5, 4096, device=device), "lazy": lazy}
    graph = model["held"] + 1
    with pytest.raises(OutOfRangeError) as caught:
        load(model, path, device=device, dtype="float16", out_of_range="error")
    assert caught.value.state is not None
    assert caught.value.state.untouched == ("held", "lazy")
    assert cached_nbytes(device) == 0
    assert (model["held"].numpy() == 5).all()
    assert (model["lazy"].numpy() == 3).all()
    assert (graph.numpy() == 6).all()


# --- the ways in --------------------------------------------------------------------------------


class _OffsetOnCPU(ours._OffsetDevice):
    """The way of CUDA and AMD, on an allocator that has the same calls."""


WAYS: dict[str, Callable[[], ours.TinygradDevice]] = {
    "CL mapped": lambda: ours._OpenCLDevice("CL", mapped=True),
    "CL staged": lambda: ours._OpenCLDevice("CL", mapped=False),
    "CPU": lambda: ours._HostVisibleDevice("CPU"),
    "CPU:1": lambda: ours._HostVisibleDevice("CPU:1"),
    "PYTHON": lambda: ours._HostVisibleDevice("PYTHON"),
    "CPU by offset": lambda: _OffsetOnCPU("CPU"),
    "PYTHON by offset": lambda: ours._OffsetDevice("PYTHON"),
    "CPU by tensors": lambda: ours._TensorDevice("CPU"),
    "CL by tensors": lambda: ours._TensorDevice("CL"),
}


def stream_to(
    device: ours.TinygradDevice, path: Path, dtype: Any = "checkpoint", **arguments: Any
) -> tuple[dict[str, Tensor], ModelTarget, Ledger]:
    """Stream all of a checkpoint to a device object."""
    checkpoint = open_checkpoint(path)
    info = device.info
    plan = plan_of(
        checkpoint,
        DeviceSpec(
            replace(info, granularity_nbytes=1),
            10**9,
            device_casts=frozenset({("bfloat16", "float32")}),
        ),
        wants=[
            TensorRequest(n, t.shape, (RowRange(n, 0, t.shape[0] if t.shape else 1),))
            for n, t in checkpoint.tensors.items()
        ],
        dtype=dtype,
        cast=arguments.pop("cast", "llvm"),
        **arguments,
    )
    ledger = Ledger({info.name: 10**9, STAGING: plan.host_nbytes})
    target = ModelTarget(plan, ours.FRAMEWORK, {info.name: device}, None, ledger)
    stream(Transfer(plan, checkpoint, {info.name: device}), target, ledger)
    return target.state_dict, target, ledger


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_is_exact(tmp_path: Path, way: str) -> None:
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {
        "half": ("F16", (65536,), np.arange(65536, dtype="<u2").tobytes()),
        "bf16": ("BF16", (2, 77), rng.bytes(308)),
        "odd": ("U8", (12345,), rng.bytes(12345)),
        "wide": ("I64", (3,), rng.bytes(24)),
        "one": ("F32", (), rng.bytes(4)),
        "none": ("F32", (0,), b""),
    }
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    device = WAYS[way]()
    state, _, ledger = stream_to(device, path, chunk_nbytes=40_000)
    for name, (code, shape, data) in tensors.items():
        tensor = state[name]
        assert tensor.shape == tuple(shape)
        assert tensor.dtype == tinygrad_tensors.TO_TINYGRAD[BY_CODE[code].name]
        assert tensor.device == device.name
        if data:
            raw = tensor.reshape(-1).bitcast(dtypes.uint8)
            assert bytes(raw.contiguous().data()) == data, name
    assert ledger.held(device.name) == sum(len(data) for _, _, data in tensors.values())
    device.trim()
    assert cached_nbytes(device.name) == 0


@pytest.mark.parametrize("way", WAYS)
def test_a_device_reads_back_what_was_written(way: str) -> None:
    device = WAYS[way]()
    buffer = device.allocate(BY_NAME["uint8"], (1000,))
    staging = device.staging(1000)
    staging.view[:] = bytes(1000)
    device.copy(staging, 0, 1000, buffer, 0).wait()
    data = np.random.default_rng(1).bytes(1000)
    staging.view[:] = data
    device.copy(staging, 100, 57, buffer, 333).wait()
    staging.close()
    assert device.read(buffer, 333, 390) == data[100:157]
    assert device.read(buffer, 0, 1000) == bytes(333) + data[100:157] + bytes(610)
    assert device.read(buffer, 5, 5) == b""
    device.release(buffer)


@pytest.mark.parametrize("way", ["CL mapped", "CL staged", "CL by tensors"])
def test_the_devices_own_cast_is_exact_where_it_is_used(tmp_path: Path, way: str) -> None:
    """bfloat16 to float32 on OpenCL: all codes, in chunks that cut through the tensor."""
    codes = np.arange(65536, dtype="<u2")
    path = write_safetensors(tmp_path / "x.safetensors", {"w": ("BF16", (65536,), codes.tobytes())})
    device = WAYS[way]()
    before = used_nbytes("CL")
    state, _, _ = stream_to(device, path, "float32", cast="device", chunk_nbytes=50_001)
    got = np.frombuffer(state["w"].bitcast(dtypes.uint32).data(), np.uint32)
    want = codes.astype(np.uint32) << 16
    nan = np.isnan(want.view(np.float32))
    assert (got[~nan] == want[~nan]).all()
    assert np.isnan(got.view(np.float32)[nan]).all()
    device.trim()
    assert used_nbytes("CL") - before <= 65536 * 4
    assert cached_nbytes("CL") == 0


def test_support_bf16_1_falls_back_where_the_device_is_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SUPPORT_BF16=1 asks for the device's cast; PoCL's is wrong, so LLVM's runs and it is said."""
    values = floats(1, 5000).astype(ml_dtypes.bfloat16)
    path = save(tmp_path, {"w": values}, "BF16")
    for setting, said in (("1", True), ("0", False)):
        monkeypatch.setenv("SUPPORT_BF16", setting)
        report = load(None, path, device="CL")
        assert [(p.dst, p.cast) for p in report.plan.placements] == [(F16, "llvm")]
        assert any("not on the device" in note for note in report.notes) is said
        bits = np.frombuffer(read_back(report.state_dict["w"]), np.uint16)
        assert (bits == values.astype(np.float32).astype(np.float16).view(np.uint16)).all()
    monkeypatch.setenv("SUPPORT_BF16", "2")
    with pytest.raises(ValueError, match="SUPPORT_BF16"):
        load(None, path, device="CL")


def test_cast_device_is_used_where_it_is_exact(tmp_path: Path) -> None:
    """cast="device" on OpenCL widens bfloat16 there: raw bits go up."""
    values = floats(1, 3, 5000).astype(ml_dtypes.bfloat16)
    path = save(tmp_path, {"w": values}, "BF16")
    report = load(None, path, device="CL", dtype="float32", cast="device")
    assert [(p.src, p.dst, p.cast) for p in report.plan.placements] == [(BF16, F32, "device")]
    assert (report.state_dict["w"].numpy() == values.astype(np.float32)).all()
    assert cached_nbytes("CL") == 0


def test_bf16_becomes_fp16_on_opencl_and_stays_when_asked(tmp_path: Path) -> None:
    """By default bfloat16 becomes float16 where it is emulated; "checkpoint" keeps the bits."""
    path = save(tmp_path, {"w": floats(1, 100)}, "BF16")
    assert load(None, path, device="CL").state_dict["w"].dtype == dtypes.float16
    kept = load(None, path, device="CL", dtype="checkpoint").state_dict["w"]
    assert kept.dtype == dtypes.bfloat16
    assert read_back(kept) == floats(1, 100).astype(ml_dtypes.bfloat16).tobytes()


# --- memory -------------------------------------------------------------------------------------

MEASURED = """
import json, sys, threading
import numpy as np
import streamload
from streamload.core.memory import STAGING

def now():
    total = 0
    for line in open("/proc/self/status"):
        if line.startswith(("RssAnon:", "RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total

device, small, large = sys.argv[1:]
warm = streamload.load_state_dict(None, small, device=device, budget="1GB", progress=False)
del warm
base = peak = now()
done = threading.Event()

def sample():
    global peak
    while not done.wait(0.002):
        peak = max(peak, now())

sampler = threading.Thread(target=sample)
sampler.start()
report = streamload.load_state_dict(None, large, device=device, budget="1GB", progress=False)
done.set()
sampler.join()
peak = max(peak, now())
predicted = report.predicted_nbytes["process"]
print(json.dumps([peak - base, predicted, report.resident_nbytes]))
"""


@pytest.mark.parametrize(
    ("device", "dtype"),
    product(
        DEVICES, ["BF16", "F16"], fast=lambda device, dtype: (device == "CL") == (dtype == "BF16")
    ),
)
def test_memory_stays_at_what_the_plan_says(tmp_path: Path, device: str, dtype: str) -> None:
    small = save(tmp_path / "small", {"w": floats(1, 1000)}, dtype)
    large = save(tmp_path / "large", {f"w{i}": floats(i, 4_000_000) for i in range(8)}, dtype)
    said = forked.fresh(MEASURED, device, small, large, cwd=tmp_path)
    used, predicted, resident = json.loads(said)
    assert resident == 8 * 8_000_000 + (8 * (-8_000_000 % 4096) if device == "CPU" else 0)
    # nearly: garbage of the time before is given back as well
    assert used >= 0.9 * 8 * 8_000_000
    assert used <= predicted + 8 * 2**20


def test_memory_is_not_resident_before_it_is_written() -> None:
    """A byte in each of many buffers makes at most those buffers resident, no neighbour.

    Whatever else takes memory meanwhile is not in the buffers, and what an earlier test left in
    them is not new: the lesser of both counts.
    """
    device = ours._OpenCLDevice("CL", mapped=True)
    size = 2 * 2**20 + 12345
    code = "RssAnon:"

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(code))

    device.trim()
    before = now()
    buffers = [device.allocate(BY_NAME["uint8"], (size,)) for _ in range(16)]
    ranges = []
    for buffer in buffers:
        with device.window(buffer, size - 1, size) as view:
            view[0] = 1
            ranges.append((np.frombuffer(view, np.uint8).ctypes.data - (size - 1), size))
    resident_nbytes = sum(reusable_nbytes(ranges) or [16 * size])
    assert min(now() - before, resident_nbytes) <= 16 * 65536 + 2**20
    for buffer in buffers:
        device.release(buffer)


# --- finding devices ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cl", "CL", "CL:0", "cl:0"])
def test_names_are_tinygrads(name: str) -> None:
    assert ours.FRAMEWORK.canonical(name) == "CL"
    assert ours.FRAMEWORK.device(name).name == "CL"


@pytest.mark.parametrize("name", ["NOSUCH", "CL:7", "CUDA:99"])
def test_a_device_that_is_not_there_is_an_error_of_ours(name: str) -> None:
    with pytest.raises(DeviceNotFoundError):
        ours.FRAMEWORK.device(name)


def test_an_allocation_beyond_the_largest_is_an_error_of_ours() -> None:
    device = ours.FRAMEWORK.device("CL")
    before = used_nbytes("CL")
    most = device.info.largest_allocation_nbytes
    assert most is not None
    with pytest.raises(AllocationError) as caught:
        device.allocate(BY_NAME["uint8"], (most * 4,))
    assert caught.value.nbytes == most * 4
    assert used_nbytes("CL") == before


def test_a_freed_buffer_of_the_size_is_taken_again_and_no_other_stays() -> None:
    """tinygrad's cache never holds what the ledger counts as gone when memory is allocated."""
    device = ours.FRAMEWORK.device("CL")
    device.trim()
    buffers = [device.allocate(BY_NAME["uint8"], (n,)) for n in (1 << 20, 2 << 20, 2 << 20)]
    freed = [buffer._buf for buffer in buffers[1:]]
    for buffer in reversed(buffers):
        buffer.deallocate()
    assert cached_nbytes("CL") == 5 << 20
    new = device.allocate(BY_NAME["float16"], (1 << 20,))
    assert any(new._buf is memory for memory in freed)
    assert cached_nbytes("CL") == 0
    device.release(new)
    assert cached_nbytes("CL") == 0


def test_opening_a_device_says_what_it_is() -> None:
    info = ours.FRAMEWORK.device("CL").info
    assert info.host_visible
    assert info.shared_memory
    assert not info.native_bf16
    assert info.total_nbytes and info.largest_allocation_nbytes
    assert info.granularity_nbytes >= 1
    assert info.free_nbytes is not None and info.free_nbytes <= info.total_nbytes
    cpu = ours.FRAMEWORK.device("CPU").info
    assert cpu.granularity_nbytes == os.sysconf("SC_PAGESIZE")


def test_a_tensor_stands_on_its_buffer() -> None:
    device = ours.FRAMEWORK.device("CL")
    buffer = device.allocate(F32, (2, 3))
    assert isinstance(buffer, Buffer)
    tensor = ours.FRAMEWORK.tensor(device, buffer, F32, (2, 3))
    assert tensor.uop.base.buffer is buffer
    assert tensor.uop.base is UOp.from_buffer(buffer)
    gone = weakref.ref(buffer)
    del buffer
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


# --- a load after one that failed ---------------------------------------------------------------


def fail(model: Any, folder: Path, **arguments: Any) -> Path:
    """Make a load fail in the midst of writing ``w``; returns a checkpoint that can be loaded."""
    shape = tuple(int(n) for n in model["w"].shape)
    good = save(folder / "good", {"w": floats(7, *shape)})
    bad = np.full(shape, 1e300)
    path = write_safetensors(folder / "bad.safetensors", {"w": ("F64", shape, bad.tobytes())})
    with pytest.raises(OutOfRangeError) as caught:
        load(model, path, dtype="float32", out_of_range="error", **arguments)
    assert caught.value.state is not None
    assert caught.value.state.invalid == ("w",)
    with pytest.raises(DeviceError, match="'w' holds no values"):
        model["w"].numpy()
    return good


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_after_a_failed_one_writes_the_same_memory(tmp_path: Path, device: str) -> None:
    model: dict[str, Any] = {"w": full(1, 64, 64, device=device)}
    model["same"] = Tensor(model["w"].uop)
    model["flat"] = model["w"].reshape(4096)
    step = TinyJit(lambda x: (x * model["w"]).realize())
    x = full(1, 64, 64, device=device)
    for _ in range(4):
        step(x)
    before = ours.FRAMEWORK.parameters(model)[0]
    facts = (before.device, before.nbytes, before.dtype, before.shape, before.span, before.fixed)
    memory = before.buffer()
    used = used_nbytes(device)
    path = fail(model, tmp_path)
    assert used_nbytes(device) == used
    (after,) = ours.FRAMEWORK.parameters(model)
    assert sorted(after.names) == ["flat", "same", "w"]
    assert facts == (after.device, after.nbytes, after.dtype, after.shape, after.span, after.fixed)
    assert after.buffer() is memory
    report = load(model, path)
    assert [p.action for p in report.plan.placements] == ["in_place"]
    assert model["w"].uop.base.buffer is memory
    assert used_nbytes(device) == used
    values = floats(7, 64, 64)
    assert (step(x).numpy() == values).all()
    for tensor in (model["w"], model["same"], model["flat"].reshape(64, 64)):
        assert (tensor.numpy() == values).all()


def test_a_view_is_still_one_after_a_failed_load(tmp_path: Path) -> None:
    whole = full(1, 10, 4, device="CPU")
    model = {"w": whole[2:5]}
    path = fail(model, tmp_path)
    (parameter,) = ours.FRAMEWORK.parameters(model)
    assert parameter.fixed
    assert np.isnan(whole.numpy()[2:5]).all()
    load(model, path)
    expected = np.ones((10, 4), np.float32)
    expected[2:5] = floats(7, 3, 4)
    assert (whole.numpy() == expected).all()
    assert (model["w"].numpy() == expected[2:5]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_a_failed_load_kept_goes_when_it_is_replaced(
    tmp_path: Path, device: str
) -> None:
    """Another dtype releases it; where something else holds it that is said, and it stays kept."""
    (full(1, 2, device=device) + 1).numpy()  # for its first, tinygrad takes 16 bytes of its own
    before = used_nbytes(device)
    model = {"w": full(1, 64, 64, device=device)}
    memory = model["w"].uop.base.buffer
    path = fail(model, tmp_path)
    with pytest.raises(BudgetExceededError, match="w: something else still holds"):
        load(model, path, dtype="float16", budget=64 * 64 * 4, chunk_nbytes=1024)
    (parameter,) = ours.FRAMEWORK.parameters(model)
    assert parameter.buffer() is memory
    with pytest.raises(DeviceError, match="'w' holds no values"):
        model["w"].numpy()
    del memory, parameter
    load(model, path, dtype="float16", budget=64 * 64 * 4, chunk_nbytes=1024)
    assert used_nbytes(device) - before == 64 * 64 * 2
    assert (model["w"].numpy() == floats(7, 64, 64).astype(np.float16)).all()


def test_a_failed_load_keeps_counting_the_memory_that_it_keeps(tmp_path: Path) -> None:
    model = {"w": full(1, 8, device="CPU")}
    checkpoint = open_checkpoint(save(tmp_path, {"w": floats(1, 8)}))
    device = ours.FRAMEWORK.device("CPU")
    (parameter,) = ours.FRAMEWORK.parameters(model)
    plan = plan_of(
        checkpoint,
        device_spec("CPU", 10**6),
        wants=[TensorRequest("w", (8,), (RowRange("w", 0, 8),), held=("CPU", "float32", 32))],
        dtype=None,
    )
    ledger = Ledger({"CPU": 10**6, STAGING: 0})
    target = ModelTarget(plan, ours.FRAMEWORK, {"CPU": device}, {"w": parameter}, ledger)
    target.begin_all()
    target.begin([0])
    assert target.fail().invalid == ("w",)
    assert ledger.held("CPU") == 32


# --- where parameters stand ---------------------------------------------------------------------


def test_spans_tell_which_parameters_share_memory() -> None:
    """In one allocation by bytes; what holds no memory has none."""
    whole = full(1, 10, 4, device="CPU")
    model = {
        "whole": whole,
        "slice": whole[2:5],
        "other": full(1, 4, device="CPU"),
        "store": full(1, 4, device="CPU").assign(Tensor.ones(4, device="CPU")),
        "lazy": Tensor.ones(4, device="CPU") * 2,
        "empty": Tensor.empty(4, device="CPU"),
    }
    spans = {p.names[0]: p.span for p in ours.FRAMEWORK.parameters(model)}
    assert spans["whole"] is not None
    assert spans["other"] is not None
    assert spans["store"] is not None
    assert spans["whole"][1:] == (0, 160)
    assert spans["slice"] == (spans["whole"][0], 32, 80)
    assert spans["other"][1:] == (0, 16)
    assert len({spans[name][0] for name in ("whole", "other", "store")}) == 3  # type: ignore[index]
    assert spans["lazy"] is spans["empty"] is None


# --- memory under lazy graphs -------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_memory_under_a_lazy_graph_is_counted_and_goes(tmp_path: Path, device: str) -> None:
    """``w.half()`` that was not realised holds ``w``, which goes before the new memory comes."""
    values = {f"w{i}": floats(i, 1 << 16) for i in range(4)}
    path = save(tmp_path, values, "F16")
    before = used_nbytes(device)
    model = {k: full(1, 1 << 16, device=device).half() for k in values}
    report = load(model, path, budget=4 * (4 << 16), chunk_nbytes=4096)
    (mine,) = report.plan.devices
    assert mine.device == device
    assert mine.held_nbytes == 4 * (4 << 16)
    assert {p.action for p in report.plan.placements} == {"replace"}
    assert used_nbytes(device) - before == 4 * (2 << 16)
    assert cached_nbytes(device) == 0
    assert all(read_back(model[k]) == v.astype(np.float16).tobytes() for k, v in values.items())


@pytest.mark.parametrize("device", DEVICES)
def test_memory_under_a_lazy_graph_that_is_held_leaves_it_as_it_was(
    tmp_path: Path, device: str
) -> None:
    weights = [full(3, 1 << 14, device=device), full(4, 1 << 14, device=device)]
    model = {"w": (weights[0] + weights[1]).half()}
    path = save(tmp_path, {"w": floats(1, 1 << 14)}, "F16")
    with pytest.raises(BudgetExceededError, match="w: something else still holds") as caught:
        load(model, path, budget=8 << 14, chunk_nbytes=4096)
    assert caught.value.state is not None
    assert caught.value.state.untouched == ("w",)
    assert (model["w"].numpy() == 7).all()


def test_memory_under_lazy_graphs_is_counted_once() -> None:
    own, shared = full(1, 4096, device="CPU"), full(1, 8192, device="CPU")
    model = {
        "own": own,
        "of own": own.half(),
        "first": shared.half(),
        "second": (shared * 2).half(),
        "linear": nn.Linear(64, 64),
        "constant": Tensor.ones(4096, device="CPU"),
    }
    held = {p.names[0]: (p.device, p.nbytes) for p in ours.FRAMEWORK.parameters(model)}
    assert held == {
        "own": ("CPU", 4096 * 4),
        "of own": (None, 0),
        "first": ("CPU", 8192 * 4),
        "second": (None, 0),
        "linear.weight": (None, 0),
        "linear.bias": (None, 0),
        "constant": (None, 0),
    }


# --- allocators ---------------------------------------------------------------------------------


def test_a_model_that_moves_leaves_nothing_on_the_device_it_was_on(tmp_path: Path) -> None:
    before = used_nbytes("CPU")
    model = {f"w{i}": full(1, 100_000 + i, device="CPU") for i in range(3)}
    values = {k: floats(1, *map(int, t.shape)) for k, t in model.items()}
    load(model, save(tmp_path, values), device="CL")
    assert used_nbytes("CPU") == before
    assert cached_nbytes("CPU") == 0
    assert all((model[k].numpy() == v).all() for k, v in values.items())


def test_two_loads_may_run_side_by_side_on_one_device(tmp_path: Path) -> None:
    values = {f"w{i}": floats(i, 100 + i) for i in range(60)}
    path = save(tmp_path, values)

    def run(_: int) -> None:
        for _ in range(6):
            state = load(None, path, device="CPU").state_dict
            assert all((read_back(state[k]) == v.tobytes()) for k, v in values.items())

    load(None, path, device="CPU")
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))


def test_an_allocation_that_fails_names_the_parameter(tmp_path: Path) -> None:
    class Full(ours._HostVisibleDevice):
        def allocate(self, dtype: Any, shape: tuple[int, ...]) -> Any:
            raise AllocationError(self.name, "no room", nbytes=32)

    path = save(tmp_path, {"w": floats(1, 8)})
    with pytest.raises(AllocationError, match=r"no room \(for 'w'\)") as caught:
        stream_to(Full("CPU"), path)
    assert (caught.value.device, caught.value.nbytes) == ("CPU", 32)
    assert isinstance(caught.value.__cause__, AllocationError)


@pytest.mark.skipif(sys.platform != "linux", reason="maps are counted on Linux")
def test_a_device_says_how_many_buffers_it_can_hold() -> None:
    """On the CPU each is a map of its own, which the kernel counts; elsewhere there is no limit."""
    device = ours.FRAMEWORK.device("CPU")
    before = device.info.max_buffers
    assert before is not None
    most = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert 0 < before < most
    maps = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ << (i % 2)) for i in range(200)]
    after = device.info.max_buffers
    assert after is not None
    assert before - after >= 100  # neighbours of the same kind are one map
    del maps
    assert ours.FRAMEWORK.device("CL").info.max_buffers is None


def test_a_problem_names_the_device_once() -> None:
    result = ours.FRAMEWORK.probe("NOSUCH", False)
    assert not result.works
    assert "NOSUCH" not in result.problem.partition("tinygrad cannot open it")[0]


NVRTC = """Nvrtc Error 6, NVRTC_ERROR_COMPILATION
<null>(3): catastrophic error: cannot open source file "cuda_fp16.h"

1 catastrophic error detected in the compilation of "<null>".
Compilation terminated.
"""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError(NVRTC), 'cannot open source file "cuda_fp16.h"'),
        (RuntimeError("CUDA Error 100, no CUDA-capable device is detected"), "no CUDA-capable"),
        (ExceptionGroup("none", [OSError("no nvrtc"), OSError("no nvcc")]), "no nvrtc; no nvcc"),
        (ExceptionGroup("none", [OSError("no clang"), OSError("no clang")]), "no clang"),
        (RuntimeError(""), "RuntimeError"),
    ],
)
def test_a_problem_is_the_line_that_says_what_is_wrong(error: Exception, said: str) -> None:
    problem = ours._problem(error)
    assert said in problem
    assert "\n" not in problem and problem.count(said) == 1


def test_a_probe_of_cuda_is_remembered_for_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for nvrtc, and where tinygrad finds it, is in the fingerprint; only there."""
    before = {name: ours.FRAMEWORK.fingerprint(name) for name in ("CUDA", "NV:1", "CL")}
    assert "nvrtc=" in before["CUDA"] and "nvrtc=" in before["NV:1"]
    assert "nvrtc=" not in before["CL"]
    monkeypatch.setenv("NVRTC_PATH", "/somewhere/libnvrtc.so.13")
    assert ours.FRAMEWORK.fingerprint("CUDA") != before["CUDA"]


def test_lazy_parameters_that_hang_together_are_walked_once() -> None:
    """Lazy initialisers share a chain of random numbers, of which each node is looked at once."""
    model = [nn.Linear(8, 8) for _ in range(20)]
    graphs = [tensor.uop.toposort() for tensor in nn.state.get_state_dict(model).values()]
    nodes = set().union(*graphs)
    calls = 0

    def count_calls(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is tinygrad_tensors._is_allocated.__code__

    sys.setprofile(count_calls)
    try:
        ours.FRAMEWORK.parameters(model)
    finally:
        sys.setprofile(None)
    assert 0 < calls <= len(nodes) + len(graphs) < sum(map(len, graphs)) / 2


def test_one_thread_opens_a_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCL's driver crashes if two open it at once."""
    inside: list[str] = []
    most: list[int] = []

    class Slow:
        def __getitem__(self, name: str) -> str:
            inside.append(name)
            time.sleep(0.01)
            most.append(len(inside))
            inside.pop()
            return name

    monkeypatch.setattr(tinygrad_tensors, "_Devices", Slow())
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(tinygrad_tensors.opened, ["CL"] * 4)] == ["CL"] * 4
    assert max(most) == 1
