"""The host device: numpy arrays and state dicts of them."""

from __future__ import annotations

import copy
import operator
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from array_files import floats, load, save
from safetensors_files import write_safetensors

from streamload.core.dtypes import BY_CODE, BY_NAME, F32
from streamload.devices.host import FRAMEWORK, InvalidArray
from streamload.devices.names import framework_of
from streamload.errors import (
    AllocationError,
    BudgetExceededError,
    DeviceError,
    DeviceNotFoundError,
    OutOfRangeError,
    StateDictMismatchError,
    UnsupportedCastError,
)


def test_every_dtype_of_a_byte_or_more_is_an_array(tmp_path: Path) -> None:
    """All bits arrive in numpy's dtypes and in those of ml_dtypes; rank 0 and size 0 too."""
    tensors: dict[str, Any] = {}
    for dtype in BY_NAME.values():
        if dtype.bits >= 8:
            data = np.random.default_rng(1).bytes(dtype.itemsize * 6)
            data = bytes(b & 1 for b in data) if dtype.kind == "bool" else data
            tensors[dtype.name] = (dtype.code, (2, 3), data)
    tensors["scalar"] = ("F32", (), b"\x00\x00\x80\x3f")
    tensors["nothing"] = ("BF16", (0, 7), b"")
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    state = load(None, path, device="host", dtype="checkpoint").state_dict
    for name, (code, shape, data) in tensors.items():
        assert state[name].dtype == BY_CODE[code].numpy
        assert state[name].shape == shape
        assert state[name].tobytes() == data
    assert state["bfloat16"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2"])
def test_dtypes_below_a_byte_are_refused_by_name(tmp_path: Path, code: str) -> None:
    data = bytes(BY_CODE[code].nbytes(8))
    path = write_safetensors(tmp_path / "x.safetensors", {"small": (code, (8,), data)})
    with pytest.raises(UnsupportedCastError, match="small"):
        load(None, path, device="host")


def test_arrays_of_the_same_dtype_are_written_in_place(tmp_path: Path) -> None:
    array = np.zeros((3, 4), np.float32)
    model = {"block": {"w": array}}
    load(model, save(tmp_path, {"block.w": floats(1, 3, 4)}))
    assert model["block"]["w"] is array
    assert (array == floats(1, 3, 4)).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((3, 4), np.float64),
        lambda: np.zeros((3, 4), ">f4"),
        lambda: np.asfortranarray(np.zeros((3, 4), np.float32)),
    ],
    ids=["another dtype", "another byte order", "another order of axes"],
)
def test_other_arrays_are_replaced_and_gone(
    tmp_path: Path, make: Callable[[], np.ndarray[Any, Any]]
) -> None:
    model = {"w": make()}
    gone = weakref.ref(model["w"])
    load(model, save(tmp_path, {"w": floats(1, 3, 4)}), dtype="checkpoint")
    assert gone() is None
    assert (model["w"] == floats(1, 3, 4)).all()


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "bfloat16"])
def test_an_array_keeps_its_dtype_and_is_filled(tmp_path: Path, kind: str) -> None:
    array = np.zeros((3, 4), BY_NAME[kind].numpy)
    path = save(tmp_path, {"w": floats(1, 3, 4)}, "BF16")
    model = {"w": array}
    report = load(model, path)
    expected = floats(1, 3, 4).astype(ml_dtypes.bfloat16).astype(np.float32).astype(array.dtype)
    assert model["w"] is array
    assert array.tobytes() == expected.tobytes()
    assert report.plan.placements[0].action == "in_place"
    load(model, path, dtype="checkpoint")
    assert model["w"].dtype == ml_dtypes.bfloat16


def test_an_array_whose_dtype_cannot_be_kept_is_named_with_what_to_write(tmp_path: Path) -> None:
    """Integers are not cast: the error says how to take the checkpoint's dtype."""
    model = {"ids": np.zeros(3, np.int32)}
    data = np.arange(3, dtype=np.int64)
    tensors = {"ids": ("I64", (3,), data.tobytes())}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    with pytest.raises(UnsupportedCastError, match='ids in int32; dtype="checkpoint"'):
        load(model, path)
    load(model, path, dtype="checkpoint")
    assert model["ids"].dtype == np.int64
    assert (model["ids"] == data).all()


def test_an_array_keeps_its_dtype_through_a_failed_load(tmp_path: Path) -> None:
    array = np.zeros(3, np.float16)
    model: dict[str, Any] = {"w": array}
    path = save(tmp_path, {"w": np.array([1e30, 1, 2], np.float32)})
    with pytest.raises(OutOfRangeError):
        load(model, path, out_of_range="error")
    load(model, path, out_of_range="clamp")
    assert model["w"] is array
    assert array.tolist() == [65504, 1, 2]


def test_arrays_that_cannot_be_filled_are_named(tmp_path: Path) -> None:
    fixed = np.zeros((3, 4), np.float32)
    fixed.setflags(write=False)
    columns = np.asfortranarray(np.zeros((3, 4), np.float32))
    model = {"fixed": fixed, "columns": columns}
    del columns
    report = load(model, save(tmp_path, {name: floats(1, 3, 4) for name in model}, "BF16"))
    assert [array.dtype for array in model.values()] == [np.float32] * 2
    notes = "; ".join(report.notes)
    assert re.search(r"1 parameters are replaced by contiguous ones.*: columns", notes)
    assert re.search(r"1 parameters are replaced by others.*read-only.*: fixed", notes)


def test_a_readonly_array_is_replaced(tmp_path: Path) -> None:
    array = np.zeros((3, 4), np.float32)
    array.setflags(write=False)
    model = {"w": array}
    load(model, save(tmp_path, {"w": floats(1, 3, 4)}))
    assert (array == 0).all()
    assert (model["w"] == floats(1, 3, 4)).all()


@pytest.mark.parametrize("mode", ["r+", "w+", "c"])
@pytest.mark.parametrize("device", ["host", None])
def test_arrays_on_mapped_files_are_written_where_they_are(
    tmp_path: Path, mode: Any, device: str | None
) -> None:
    wanted = floats(0, 30, 50)
    path, file = save(tmp_path / "in", {"a": wanted, "b": wanted}), tmp_path / "out.bin"
    file.write_bytes(bytes(2 * wanted.nbytes))
    both = np.memmap(file, np.float32, mode, shape=(2, 30, 50))
    model = {"a": both[0], "b": both[1]}
    report = load(model, path, device=device)
    assert {p.action for p in report.plan.placements} == {"in_place"}
    assert np.array_equal(both, [wanted, wanted])
    both.flush()
    del both, model
    written = np.fromfile(file, np.float32).reshape(2, 30, 50)
    assert np.array_equal(written, [wanted, wanted] if mode != "c" else np.zeros_like(written))


def test_an_array_on_a_mapped_file_is_not_replaced(tmp_path: Path) -> None:
    """Its file would not be written; what is a private copy of it may be replaced."""
    path, file = save(tmp_path / "in", {"a": floats(0, 4, 5)}), tmp_path / "out.bin"
    file.write_bytes(bytes(80))
    model = {"a": np.memmap(file, np.float32, "r+", shape=(4, 5))}
    with pytest.raises(StateDictMismatchError, match=r"a: it is an np\.memmap, whose file is wri"):
        load(model, path, dtype="float16")
    model = {"a": np.memmap(file, np.float32, "c", shape=(4, 5))}
    load(model, path, dtype="float16")
    assert model["a"].dtype == np.float16


@pytest.mark.parametrize("part", [slice(None), slice(0, 4)])
def test_a_mapped_file_that_is_open_for_reading_is_refused_by_name(
    tmp_path: Path, part: slice
) -> None:
    path = save(tmp_path / "in", {"a": floats(0, 4, 5), "b": floats(1, 4, 5)})
    np.save(tmp_path / "a.npy", np.zeros((4, 5), np.float32))
    model = {"a": np.load(tmp_path / "a.npy", mmap_mode="r")[part], "b": np.zeros((4, 5), "f4")}
    with pytest.raises(StateDictMismatchError, match=r'a: it is an np\.memmap.*mode="r\+"'):
        load(model, path)
    assert not model["b"].any()


def test_tied_arrays_stay_tied(tmp_path: Path) -> None:
    for dtype in (np.float32, np.float16):
        array = np.zeros(5, dtype)
        model = {"a": array, "b": {"c": array}}
        del array
        report = load(model, save(tmp_path, {"a": floats(1, 5)}), dtype="checkpoint")
        assert model["a"] is model["b"]["c"]
        assert report.tied == ("b.c",)
        assert (model["a"] == floats(1, 5)).all()


def test_a_view_is_written_where_it_lies_or_refused(tmp_path: Path) -> None:
    whole = np.zeros((10, 4), np.float32)
    load({"rows": whole[2:5]}, save(tmp_path, {"rows": floats(1, 3, 4)}))
    assert (whole[2:5] == floats(1, 3, 4)).all()
    assert (whole[5:] == 0).all()
    path = save(tmp_path, {"columns": floats(1, 10, 2)})
    with pytest.raises(StateDictMismatchError, match="columns: it is a view"):
        load({"columns": whole[:, :2]}, path)
    path = save(tmp_path, {"rows": floats(1, 3, 4)}, "F16")
    with pytest.raises(StateDictMismatchError, match="rows: it is a view"):
        load({"rows": whole[2:5]}, path, dtype="checkpoint")


def test_an_array_that_something_else_holds_is_counted_twice_or_refused(tmp_path: Path) -> None:
    """Both arrays are in memory: the budget must have room for both."""
    held = np.full(1 << 16, 3, np.float32)
    model = {"w": held}
    path = save(tmp_path, {"w": floats(1, 1 << 16)}, "F16")
    with pytest.raises(BudgetExceededError, match="w: something else still refers") as caught:
        load(model, path, budget=4 << 16, chunk_nbytes=4096, dtype="checkpoint")
    assert caught.value.state is not None
    assert caught.value.state.untouched == ("w",)
    assert model["w"] is held
    report = load(model, path, budget="1MB", chunk_nbytes=4096, dtype="checkpoint")
    assert report.held_nbytes["host"] >= 6 << 16
    assert model["w"].dtype == np.float16


USES: dict[str, Callable[[Any], Any]] = {
    "asarray": np.asarray,
    "function": lambda a: np.concatenate([a, a]),
    "ufunc": np.exp,
    "add": lambda a: a + 1,
    "radd": lambda a: np.ones(3) * a,
    "iadd": lambda a: operator.iadd(a, 1),
    "matmul": lambda a: a @ np.ones(3),
    "equal": lambda a: a == 1,
    "item": lambda a: a[0],
    "set": lambda a: operator.setitem(a, 0, 1),
    "sum": lambda a: a.sum(),
    "dtype": lambda a: a.dtype,
    "iterate": list,
    "len": len,
    "bool": bool,
    "float": float,
}


@pytest.mark.parametrize("use", USES)
def test_an_invalid_array_raises_whenever_it_is_used(use: str) -> None:
    with pytest.raises(DeviceError, match="'w' holds no values"):
        USES[use](InvalidArray("w", "float32", (3,)))


def test_a_failed_load_can_be_called_again(tmp_path: Path) -> None:
    model: dict[str, Any] = {"w": np.zeros(3, np.float32)}
    path = save(tmp_path, {"w": np.array([1e30, 1, 2], np.float32)})
    with pytest.raises(OutOfRangeError) as caught:
        load(model, path, dtype="float16", out_of_range="error")
    assert caught.value.state is not None
    assert caught.value.state.invalid == ("w",)
    assert framework_of(model) == "host"
    assert framework_of(copy.deepcopy(model)) == "host"
    assert isinstance(pickle.loads(pickle.dumps(model))["w"], InvalidArray)
    load(model, path)
    assert (model["w"] == np.array([1e30, 1, 2], np.float32)).all()


@pytest.mark.parametrize(
    "model", [SimpleNamespace(w=np.zeros(3)), [np.zeros(3)], MappingProxyType({"w": np.zeros(3)})]
)
def test_only_a_dict_of_arrays_can_be_filled(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ValueError, match="into a dict"):
        load(model, save(tmp_path, {"w": floats(1, 3)}))


def test_there_is_one_host() -> None:
    device = FRAMEWORK.device("HOST")
    assert device.info.host_visible
    assert device.info.shared_memory
    with pytest.raises(DeviceNotFoundError, match="host"):
        FRAMEWORK.device("CL")
    with pytest.raises(DeviceError):
        device.staging(10)
    with pytest.raises(AllocationError) as caught:
        device.allocate(F32, (1 << 60,))
    assert caught.value.nbytes == 1 << 62
    statuses = FRAMEWORK.probe("host").dtypes
    assert statuses["float32"] == "native"
    assert statuses["bfloat16"] == statuses["float16"] == "emulated"
    assert statuses["float4_e2m1fn"] == "absent"


def test_a_window_is_the_arrays_own_memory() -> None:
    device = FRAMEWORK.device("host")
    buffer = device.allocate(F32, (2, 3))
    buffer[...] = 7
    with device.window(buffer, 4, 8) as view:
        view[:] = np.float32(9).tobytes()
    assert buffer.reshape(-1).tolist() == [7, 9, 7, 7, 7, 7]
    assert device.read(buffer, 4, 12) == np.array([9, 7], np.float32).tobytes()
    scalar = device.allocate(F32, ())
    with device.window(scalar, 0, 4) as view:
        view[:] = np.float32(2).tobytes()
    assert scalar[()] == 2


def test_a_load_after_a_failed_one_writes_the_same_array(tmp_path: Path) -> None:
    array = np.zeros(3, np.float32)
    model: dict[str, Any] = {"w": array, "b": {"c": array}}
    bad = write_safetensors(
        tmp_path / "bad.safetensors", {"w": ("F64", (3,), np.full(3, 1e300).tobytes())}
    )
    (before,) = FRAMEWORK.parameters(model)
    with pytest.raises(OutOfRangeError):
        load(model, bad, dtype="float32", out_of_range="error")
    assert np.isnan(array).all()
    with pytest.raises(DeviceError, match="'w' holds no values"):
        np.asarray(model["w"])
    (after,) = FRAMEWORK.parameters(model)
    assert after.names == ("w", "b.c")
    assert (after.device, after.nbytes, after.dtype) == ("host", 12, "float32")
    assert after.span == before.span
    assert after.buffer() is array
    report = load(model, save(tmp_path, {"w": floats(1, 3)}))
    assert [p.action for p in report.plan.placements] == ["in_place"]
    assert model["w"] is model["b"]["c"] is array
    assert (array == floats(1, 3)).all()


def test_a_kept_array_goes_when_it_is_replaced(tmp_path: Path) -> None:
    """Unless something else refers to it: then it stays what it was, invalid."""
    array = np.zeros(1 << 14, np.float32)
    model: dict[str, Any] = {"w": array}
    (parameter,) = FRAMEWORK.parameters(model)
    parameter.invalidate(keep=True)
    assert "refers" in parameter.release()
    assert isinstance(model["w"], InvalidArray)
    assert parameter.buffer() is array
    gone = weakref.ref(array)
    del array
    load(model, save(tmp_path, {"w": floats(1, 1 << 14)}, "F16"), dtype="checkpoint")
    assert gone() is None
    assert model["w"].dtype == np.float16


def test_a_reshaped_array_is_one_of_its_own(tmp_path: Path) -> None:
    """``reshape`` leaves a view of an array that nobody else has: it may be replaced."""
    values = {"w": floats(1, 3, 4)}
    model = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    path = save(tmp_path, values, "F16")
    report = load(model, path, dtype="checkpoint")
    assert [p.action for p in report.plan.placements] == ["replace"]
    assert model["w"].dtype == np.float16
    base = np.arange(12, dtype=np.float32)
    model = {"w": base.reshape(3, 4)}
    with pytest.raises(StateDictMismatchError, match="w: it is a view"):
        load(model, path, dtype="checkpoint")
    assert (base == np.arange(12)).all()


def large(path: Path) -> Path:
    """A file with a tensor that numpy would ask for huge pages for."""
    return save(path, {"w": floats(1, 2, 3 * 2**19)})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has huge pages to ask for")
def test_large_arrays_ask_for_no_huge_pages(tmp_path: Path) -> None:
    """Their memory is as torch's is: where huge pages come slowly, no load waits for them."""
    array = load(None, large(tmp_path), device="host").state_dict["w"]
    middle, flags, inside = array.ctypes.data + array.nbytes // 2, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "rd" in flags.split() and "hg" not in flags.split()


def test_large_arrays_are_arrays_as_any_other(tmp_path: Path) -> None:
    """They are written in place, copied, pickled and, reshaped, replaced; all is given back."""
    path = large(tmp_path)
    model = load(None, path, device="host").state_dict
    array = model["w"]
    assert (array == floats(1, *array.shape)).all()
    for same in (copy.deepcopy(array), pickle.loads(pickle.dumps(array))):
        assert (same == array).all()
    array[:] = 0
    load(model, path)
    assert model["w"] is array
    assert (array == floats(1, *array.shape)).all()
    memory = weakref.ref(array.base)
    model["w"] = array.reshape(-1)
    del array, same
    model["w"] = model["w"].reshape(2, -1)
    report = load(model, path, dtype="float16", budget="40MB")
    assert [p.action for p in report.plan.placements] == ["replace"]
    assert model["w"].dtype == np.float16
    assert memory() is None


def test_a_view_that_comes_later_keeps_an_array() -> None:
    """It is looked at again when the array is to be released."""
    model = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    (parameter,) = FRAMEWORK.parameters(model)
    assert parameter.fixed == ""
    other = model["w"][1:]
    assert "refers" in parameter.release()
    assert (model["w"][1:] == other).all()


def test_spans_are_addresses() -> None:
    """What overlaps shares memory, whichever way the array runs."""
    whole = np.zeros((10, 4), np.float32)
    model = {
        "whole": whole,
        "rows": whole[2:5],
        "back": whole[4:1:-1],
        "none": whole[:0],
        "invalid": InvalidArray("invalid", "float32", (3,)),
    }
    spans = {p.names[0]: p.span for p in FRAMEWORK.parameters(model)}
    start = whole.ctypes.data
    assert spans["whole"] == (0, start, start + 160)
    assert spans["rows"] == spans["back"] == (0, start + 32, start + 80)
    assert spans["none"] is spans["invalid"] is None
