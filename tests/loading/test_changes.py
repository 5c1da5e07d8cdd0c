"""`transform=`: rows go through functions on their way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import write_arrays, write_safetensors

import streamload
from streamload import RowRange, Source
from streamload.errors import PlanInfeasibleError, ResidenceError, UnsupportedCastError
from streamload.verification.verify import verify

Array = np.ndarray[Any, Any]
SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (40, 30), "a.bias": (40,), "b.weight": (64, 3, 5), "s": (), "none": (0, 3)
}  # fmt: skip


def write(path: Path, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    found = {n: rng.standard_normal(s).astype(np.float32).astype(dtype) for n, s in SHAPES.items()}
    write_arrays(path, found, align=8)
    return found


def load(path: Path, **options: Any) -> dict[str, Array]:
    given: dict[str, Any] = {"device": "host", "budget": "1GB", "dtype": "checkpoint"} | options
    report = streamload.load_state_dict(None, path, progress=False, **given)
    found = report.state_dict
    return {
        n: t if isinstance(t, np.ndarray) else t.numpy() for n, t in found.items() if n != "none"
    }


def centred(rows: Array) -> Array:
    """Each row less its mean, in float32: a row of any shape."""
    wide = rows.astype(np.float32)
    axes = tuple(range(1, wide.ndim))
    return wide - wide.mean(axis=axes, keepdims=True) if axes else wide * 2


@pytest.mark.parametrize("chunk_nbytes", [1, 100, 1000, None])
@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("device", ["host", "CPU", "CL"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_whole_rows(
    tmp_path: Path, chunk_nbytes: int | None, reader: str, device: str, dtype: str
) -> None:
    """The same whatever the chunks are, rounded once, and only what a pattern matches first."""
    path = tmp_path / "x.safetensors"
    arrays = write(path, ml_dtypes.bfloat16)
    seen: set[tuple[int, ...]] = set()

    def noted(rows: Array) -> Array:
        assert not rows.flags.writeable
        assert rows.dtype == ml_dtypes.bfloat16
        seen.add(rows.shape[1:])
        return centred(rows)

    options: dict[str, Any] = {"chunk_nbytes": chunk_nbytes, "reader": reader, "device": device}
    options["dtype"] = {"a.*": "float16", "*": "float32"} if dtype == "float16" else "float32"
    transform = {"a.*": noted, "b.weight": noted, "*.weight": pytest.fail}
    found = load(path, transform=transform, **options)
    for name in ("a.weight", "a.bias", "b.weight"):
        expected = centred(arrays[name])
        expected = expected.astype(np.float16 if name[0] == "a" and dtype == "float16" else "f4")
        assert found[name].dtype == expected.dtype
        assert np.array_equal(found[name], expected), name
    assert np.array_equal(found["s"], arrays["s"].astype(np.float32))
    assert seen == {(30,), (), (3, 5)}


def test_with_rows_of_several_tensors(tmp_path: Path) -> None:
    """Concatenated, permuted and stacked rows change as rows of their own tensors."""
    path = tmp_path / "x.safetensors"
    arrays = write(path)
    mapping: dict[str, Any] = {
        "cat": [RowRange("a.weight", 30), RowRange("a.weight", 3, 10)],
        "stack": Source(["b.weight"], shape=(8, 8, 15)),
    }
    for chunk_nbytes in (100, None):
        transform = {"*.weight": centred}
        found = load(path, transform=transform, mapping=mapping, chunk_nbytes=chunk_nbytes)
        whole = centred(arrays["a.weight"])
        assert np.array_equal(found["cat"], np.concatenate([whole[30:], whole[3:10]]))
        assert np.array_equal(found["stack"], centred(arrays["b.weight"]).reshape(8, 8, 15))
    with pytest.raises(ValueError, match=r"^t: .* transposed"):
        load(path, transform=transform, mapping={"t": Source("a.weight", transpose=True)})


def test_into_a_model_and_by_iterate(tmp_path: Path) -> None:
    """In place, and tensor by tensor; such a load cannot be verified against the checkpoint."""
    path = tmp_path / "x.safetensors"
    arrays = write(path)
    model = {n: np.ones(s, np.float32) for n, s in SHAPES.items()}
    kept = model["a.weight"]
    report = streamload.load_state_dict(model, path, transform={"a.*": centred}, progress=False)
    assert np.array_equal(kept, centred(arrays["a.weight"]))
    assert np.array_equal(model["b.weight"], arrays["b.weight"])
    found = dict(streamload.iterate(path, device="host", transform={"a.*": centred}))
    assert np.array_equal(found["a.weight"], kept)
    with pytest.raises(ValueError, match=r"a\.weight: its values were changed"):
        verify(report, streamload.open_checkpoint(path), model)


def test_what_changes_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    arrays = write(path)
    with pytest.raises(ResidenceError, match="its values change on the way"):
        load(path, transform={"a.*": centred}, residence="mapped")
    found = load(path, transform={"a.*": centred}, residence="auto")
    assert np.array_equal(found["a.weight"], centred(arrays["a.weight"]))
    assert np.array_equal(found["b.weight"], arrays["b.weight"])


def test_its_memory_is_in_the_plan(tmp_path: Path) -> None:
    """Three arrays of float32 for each thread; a row may be longer than a chunk."""
    path = tmp_path / "x.safetensors"
    data = np.arange(2_000_000, dtype=np.float32)
    write_safetensors(path, {"w": ("F32", (2, 1_000_000), data.tobytes())})
    lengths = set()

    def noted(rows: Array) -> Array:
        lengths.add(rows.shape)
        return -rows

    options: dict[str, Any] = {"device": "host", "threads": 2, "transform": {"w": noted}}
    report = streamload.load_state_dict(
        None, path, budget="1GB", chunk_nbytes=1000, progress=False, **options
    )
    assert np.array_equal(report.state_dict["w"].reshape(-1), -data)
    assert lengths == {(1, 1_000_000)}
    (device,) = report.plan.devices
    assert report.plan.chunk_nbytes == 4_000_000
    assert device.scratch_nbytes == report.plan.threads * 3 * 4_000_000
    with pytest.raises(PlanInfeasibleError):
        streamload.load_state_dict(None, path, budget="15MB", progress=False, **options)


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        ({"nope.*": centred}, ValueError, r"transform: no tensor's name matches 'nope\.\*'"),
        ({"a.*": 3}, ValueError, "from patterns to functions"),
        ([centred], ValueError, "from patterns to functions"),
        ({"a.*": lambda rows: rows[:1, :2]}, (ValueError, IndexError), "."),
        ({"a.weight": lambda rows: rows[:, :2]}, ValueError, r"transform of 'a\.weight': expected"),
        ({"a.weight": lambda rows: None}, ValueError, r"found NoneType"),
        ({"a.weight": lambda rows: rows.astype("U4")}, ValueError, "found an array of <U4"),
        ({"a.weight": lambda rows: rows.astype(int)}, UnsupportedCastError, "int64"),
        ({"a.weight": lambda rows: rows / "x"}, TypeError, "."),
    ],
)
def test_bad_transforms(tmp_path: Path, transform: Any, error: Any, message: str) -> None:
    """What is wrong before the load or at the first rows; the tensor is named."""
    path = tmp_path / "x.safetensors"
    write(path)
    with pytest.raises(error, match=message) as caught:
        load(path, transform=transform)
    if isinstance(caught.value, TypeError):
        assert any("a.weight" in note for note in caught.value.__notes__)
    assert not [t for t in threading.enumerate() if t.name.startswith("streamload")]


@pytest.mark.parametrize("quant", [None, {"a.weight": "nf4"}, {"a.weight": "int8"}])
def test_dtypes_that_cannot_be_cast_are_named(tmp_path: Path, quant: Any) -> None:
    """Functions that return integers for floats, quantised or not: with the tensor and the file."""
    path = tmp_path / "x.safetensors"
    write(path)
    with pytest.raises(UnsupportedCastError, match="returned int32: return float32") as caught:
        load(path, transform={"a.*": lambda rows: rows.astype(np.int32)}, quant=quant)
    assert caught.value.tensor in ("a.weight", "a.bias")
    assert caught.value.path == str(path)
    changed = {"a.weight": lambda rows: rows.astype(np.int32)}
    with pytest.raises(UnsupportedCastError, match=r"tensor 'a\.weight'"):
        load(path, transform=changed, quant=quant)
