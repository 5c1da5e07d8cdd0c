"""Folders of torch.distributed.checkpoint: the same tensors as dcp.load, wherever they are read."""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from conversions import quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from torch_loads import bits, check

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.distributed.index import Index, write_index
from streamload.errors import CheckpointError, FileChangedError, HeaderError, ShardNotFoundError
from streamload.files.folder import ReaderKind, folder_at, open_reader
from streamload.files.header import Chunk, Part, View
from streamload.verification.diff import diff

torch = needs.module("torch")
dcp = needs.module("torch.distributed.checkpoint")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(f"ranks{request.param}")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    variables = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(request.param),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(ROOT / "tests" / "support" / "dcp_rank.py"), str(folder)]
    ranks = [
        forked.start(command, forked.TORCH, env=variables | {"RANK": str(rank)})
        for rank in range(request.param)
    ]
    try:
        said = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * request.param, said[0][-3000:]
    return folder


def of_dcp(folder: Path, prefix: str = "", **options: Any) -> dict[str, Any]:
    """What dcp.load makes of the tensors whose flat names begin so."""
    reader = options.get("storage_reader") or dcp.FileSystemReader(folder)
    stated = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.zeros(each.size, dtype=each.properties.dtype)
        for name, each in stated.items()
        if name.startswith(prefix) and hasattr(each, "size")
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def save(folder: Path, state: Mapping[str, Any]) -> Path:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    return folder


def test_nested_state(saved: Path) -> None:
    """The model's weights are found; the optimizer's tensors at a key."""
    check(saved / "nested", expected := of_dcp(saved / "nested", "model."))
    assert set(open_checkpoint(saved / "nested")) == set(expected)
    key = "optimizer.state.0.weight"
    check(open_checkpoint(saved / "nested", key=key), of_dcp(saved / "nested", f"{key}."))


def test_torchtitans_state(saved: Path) -> None:
    """The model's tensors at the top are not confused with the optimizer's, nor with counters."""
    whole = of_dcp(saved / "titan")
    others = ("optimizer.", "train_state.")
    check(saved / "titan", expected := {n: t for n, t in whole.items() if not n.startswith(others)})
    assert set(open_checkpoint(saved / "titan")) == set(expected)
    flat = of_dcp(saved / "titan", "optimizer.")
    check(open_checkpoint(saved / "titan", key="optimizer"), flat)


def test_several_dicts_need_a_key(saved: Path) -> None:
    with pytest.raises(HeaderError, match=r"open_checkpoint\(path, key='model'\)"):
        open_checkpoint(saved / "two")
    check(open_checkpoint(saved / "two", key="ema"), of_dcp(saved / "two", "ema."))


@pytest.mark.parametrize("reader", ["mmap", "pread", "direct"])
def test_every_way_to_shard(saved: Path, reader: ReaderKind) -> None:
    expected = of_dcp(saved / "meshes")
    check(saved / "meshes", expected, reader=reader)
    check(saved / "meshes", expected, chunk_nbytes=2**16, threads=2)


@pytest.mark.parametrize("form", ["hf", "hf_files", "hf_whole", "hf_whole/sharded"])
def test_safetensors_of_dcp(saved: Path, form: str) -> None:
    """Chunks in safetensors files, one or several of each rank; and what torch consolidates."""
    reader = dcp.HuggingFaceStorageReader(str(saved / form))
    expected = of_dcp(saved / form, storage_reader=reader)
    whole = of_dcp(saved / "meshes")
    assert all(bits(tensor) == bits(whole[name]) for name, tensor in expected.items())
    check(saved / form, expected)


def test_converts_and_compares(saved: Path, tmp_path: Path) -> None:
    quiet(saved / "meshes", tmp_path / "out", verify=True)
    check(tmp_path / "out", expected := of_dcp(saved / "meshes"))
    assert diff(saved / "meshes", tmp_path / "out", progress=False).ok
    shutil.copytree(saved / "meshes", tmp_path / "in")
    checkpoint = open_checkpoint(tmp_path / "in")
    (tmp_path / "in" / "__1_0.distcp").touch()
    with pytest.raises(FileChangedError, match="__1_0"):
        check(checkpoint, expected)


def test_other_processes_and_ranks(saved: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved / "meshes")
    check(pickle.loads(pickle.dumps(checkpoint)), of_dcp(saved / "meshes"))
    message = write_index(checkpoint)
    index = Index.read(message, folder_at(saved / "meshes"))
    assert index.checkpoint.shards[0].views == checkpoint.shards[0].views
    assert index.check() == []
    check(index.checkpoint, of_dcp(saved / "meshes"))
    copy = shutil.copytree(saved / "meshes", tmp_path / "copy")
    data = bytearray((copy / "__1_0.distcp").read_bytes())
    (copy / "__1_0.distcp").write_bytes(data[::-1])
    with pytest.raises(CheckpointError, match="is not the file that rank 0 has"):
        Index.read(message, folder_at(copy)).check()


def test_files_that_do_not_belong_together(saved: Path, tmp_path: Path) -> None:
    """A missing file, an unfinished save and a file alone are refused by name."""
    copy = shutil.copytree(saved / "meshes", tmp_path / "copy")
    with pytest.raises(HeaderError, match="is one of the files of a DCP folder"):
        open_checkpoint(copy / "__0_0.distcp")
    check(copy / ".metadata", of_dcp(copy))
    (copy / "__1_0.distcp").unlink()
    with pytest.raises(ShardNotFoundError, match="__1_0"):
        open_checkpoint(copy)
    (copy / ".metadata").unlink()
    with pytest.raises(ShardNotFoundError, match=r"\.metadata"):
        open_checkpoint(copy)


def test_one_process(tmp_path: Path) -> None:
    dtypes = ("float64", "float16", "bfloat16", "int32", "int8", "uint8", "bool", "float8_e4m3fn")
    state = {name: torch.arange(6).to(getattr(torch, name)) for name in dtypes}
    state |= {"turned": torch.randn(4, 6).t(), "none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    state |= {"sliced": torch.randn(9, 9)[2:5, ::2]}
    check(save(tmp_path / "saved", state), state)
    (header,) = open_checkpoint(tmp_path / "saved").shards
    assert header.format == "dcp"


@st.composite
def _cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Any, ...]]]:
    """A shape, and boxes that cover it, cut again and again."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        origin, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[axis]))
        for start, length in ((0, at), (at, sizes[axis] - at)):
            if length:
                moved, made = list(origin), list(sizes)
                moved[axis] += start
                made[axis] = length
                boxes.append((tuple(moved), tuple(made)))
    return shape, boxes


@settings(max_examples=few(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(cut=_cut(), data=st.data())
def test_any_range_of_any_chunks(
    tmp_path_factory: pytest.TempPathFactory, cut: Any, data: st.DataObject
) -> None:
    shape, boxes = cut
    folder = tmp_path_factory.getbasetemp()
    whole = np.arange(int(np.prod(shape)), dtype="<u2").reshape(shape)
    parts, chunks, start = [], [], 0
    for number, (origin, sizes) in enumerate(sorted(boxes)):
        part = whole[tuple(slice(a, a + n) for a, n in zip(origin, sizes, strict=True))]
        turned = data.draw(st.booleans())
        raw = b"\xff" * 3 + (part.T if turned else part).tobytes()
        path = folder / f"{number}.part"
        path.write_bytes(raw)
        strides = (part.T.copy().T if turned else part.copy()).strides
        chunks.append(Chunk(origin, sizes, start + 3, strides))
        parts.append(Part(path, len(raw)))
        start += len(raw)
    view = View(start + 8, 2, shape, tuple(chunks))
    with open_reader(parts[0].path, parts[0].nbytes, "pread", None, [view], parts[1:]) as reader:
        first = data.draw(st.integers(0, whole.nbytes))
        stop = data.draw(st.integers(first, whole.nbytes))
        out = bytearray(stop - first)
        reader.read_into(view.start + first, memoryview(out))
        assert out == whole.tobytes()[first:stop]


def test_more_files_than_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamload.files.reader._MOST_OPEN", 2)
    parts = []
    for number in range(6):
        (path := tmp_path / f"{number}").write_bytes(bytes([number] * 4))
        parts.append(Part(path, 4))
    view = View(64, 1, (24,), (Chunk((0,), (24,), 0, (1,)),))
    with open_reader(parts[0].path, 4, "pread", None, [view], parts[1:]) as reader:
        out = bytearray(24)
        reader.read_into(64, memoryview(out))
    assert out == b"".join(bytes([number] * 4) for number in range(6))
    with pytest.raises(ValueError, match="closed"):
        reader.read_into(64, memoryview(out))


def test_loads_a_module(saved: Path) -> None:
    module = torch.nn.Sequential(
        *(torch.nn.Linear(7, 13), torch.nn.LayerNorm(13)),
        *(torch.nn.Linear(13, 5, bias=False), torch.nn.BatchNorm1d(5)),
    )
    streamload.load_state_dict(module, saved / "nested", device="cpu", progress=False)
    expected = of_dcp(saved / "nested", "model.")
    for name, tensor in module.state_dict().items():
        assert bits(tensor) == bits(expected[name]), name
