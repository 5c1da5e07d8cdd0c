"""`streamload.iterate`: one tensor after the other."""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boxes import Boxes
from safetensors_files import write_arrays, write_safetensors

import streamload
from streamload import Source
from streamload.errors import CheckpointError, PlanInfeasibleError
from streamload.files.page_cache import resident_fraction

SHAPES = {"b": (300, 1000), "a": (500, 1000), "s": (), "none": (0, 4), "c": (7,)}


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def write(folder: Path, shards: int = 2) -> dict[str, np.ndarray[Any, Any]]:
    found = arrays()
    for shard in range(shards):
        write_arrays(folder / f"{shard}.safetensors", dict(list(found.items())[shard::shards]))
    return found


@pytest.mark.parametrize("device", ["host", "cpu", "CPU"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_every_tensor_once_in_the_order_of_the_files(
    tmp_path: Path, device: str, dtype: str
) -> None:
    if device == "cpu":
        pytest.importorskip("torch")
    expected = write(tmp_path)
    found = list(streamload.iterate(tmp_path, device=device, dtype=dtype, budget="50MB"))
    assert [name for name, _ in found] == ["b", "s", "c", "a", "none"]
    for name, tensor in found:
        assert tuple(tensor.shape) == SHAPES[name]
        if expected[name].size:
            array = tensor if device == "host" else tensor.numpy()
            kind = "float32" if dtype == "checkpoint" else dtype
            assert np.array_equal(array, expected[name].astype(kind))


def test_a_tensor_counts_until_the_next_step(tmp_path: Path) -> None:
    write(tmp_path)
    seen = []
    for name, tensor in streamload.iterate(tmp_path, device="host", budget="2.2MB"):
        assert all(ref() is None for ref in seen), name
        seen.append(weakref.ref(tensor))
        del tensor
    assert len(seen) == 5
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.iterate(tmp_path, device="host", budget="1.9MB")  # at once: no step is made
    assert caught.value.largest[0][0] == "a"


# Reads tensors of 4 MB each one by one, under a budget that is more than there is, and then what
# is left beside those that it keeps.
IN_A_BOX = """
import sys
import streamload
from streamload.errors import PlanInfeasibleError

kept = []
try:
    for name, tensor in streamload.iterate(sys.argv[1], device="host", budget="20GB"):
        assert (tensor == 1).all()
        if len(sys.argv) > 2:
            kept.append(tensor)
        del tensor
    print("done")
except PlanInfeasibleError as error:
    print("refused", len(kept))
"""


def test_what_is_free_bounds_how_many_are_read_at_once(cgroup: Boxes, tmp_path: Path) -> None:
    """However large the budget is; what the loop keeps leaves room for fewer."""
    ones = np.ones(10**6, np.float32).tobytes()
    write_safetensors(
        tmp_path / "x.safetensors", {f"{n}": ("F32", (10**6,), ones) for n in range(20)}
    )
    command = [sys.executable, "-c", IN_A_BOX, str(tmp_path)]
    done = cgroup.run(command, 100_000_000)
    assert (done.stdout, done.oom_killed) == ("done\n", False), done.stderr
    done = cgroup.run([*command, "keep"], 100_000_000)
    assert not done.oom_killed
    refused, kept = done.stdout.split()
    assert refused == "refused"
    assert int(kept) >= 5


@pytest.mark.parametrize("reader", ["mmap", "pread"])
def test_dropped_pages(tmp_path: Path, reader: Any) -> None:
    path = tmp_path / "x.safetensors"
    data = bytes(2**21)
    write_safetensors(path, {f"{n:02}": ("U8", (2**21,), data) for n in range(32)})
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_fraction(path) != 0:
        pytest.skip("the file stays in the page cache")
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead of the next line
    os.pread(fd, 2**20, 2**25)
    os.close(fd)
    checkpoint = streamload.open_checkpoint(path)
    for _ in streamload.iterate(
        checkpoint, device="host", budget="12MB", page_cache="drop", reader=reader
    ):
        pass
    found = resident_fraction(path)
    assert found is not None and 0.01 < found < 0.05


def test_one_device_is_not_told_of_others(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data = np.ones((500, 1000), np.float32).tobytes()
    write_safetensors(tmp_path / "x.safetensors", {"l.weight": ("F32", (500, 1000), data)})
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.iterate(tmp_path, device="cpu", quant="nf4", budget=300_000)
    assert caught.value.would_fit == ()


def test_names_and_layouts(tmp_path: Path) -> None:
    """What a load takes of names and layouts, it takes."""
    expected = write(tmp_path)
    rows = {"t": Source("a", transpose=True)}
    steps = streamload.iterate(
        tmp_path, device="host", mapping=rows, rename=lambda n: None if n == "b" else n.upper()
    )
    found = dict(steps)
    assert found.keys() == {"T", "S", "NONE", "C"}
    assert np.array_equal(found["T"], expected["a"].T)


def test_a_file_that_breaks_ends_the_loop(tmp_path: Path) -> None:
    expected = write(tmp_path)
    steps = streamload.iterate(tmp_path, device="host", budget="2.2MB")
    name, tensor = next(steps)
    assert np.array_equal(tensor, expected[name])
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors"):
        list(steps)


def test_its_options(tmp_path: Path) -> None:
    """They are those of a load that make sense for one tensor; errors come before the first."""
    write(tmp_path)
    names = inspect.signature(streamload.iterate).parameters
    assert {"budget", "device", "dtype", "mapping", "rename", "reader", "threads"} <= names.keys()
    assert not {"strict", "progress", "context"} & names.keys()
    with pytest.raises(ValueError, match="one device"):
        streamload.iterate(tmp_path, device=["host", "host:1"])  # type: ignore[arg-type]
