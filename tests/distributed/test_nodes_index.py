"""The headers on their way to other ranks, and whether the files there are the same."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from remote_server import serve
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint, from_headers, open_checkpoint
from streamload.core.dtypes import BY_CODE
from streamload.core.location import Url
from streamload.distributed.index import Index, check_present, write_index
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.files.folder import folder_at, locate
from streamload.formats.safetensors import parse_header

ODD = ("", " ", "a/b", "ü€😀", "\x00\x1f", '"quoted"\\', "__metadata", "x" * 3000)


def same(here: Checkpoint, there: Checkpoint) -> None:
    assert list(here.tensors) == list(there.tensors)
    assert (here.metadata, here.config) == (there.metadata, there.config)
    for one, other in zip(here.shards, there.shards, strict=True):
        assert (one.file_nbytes, one.data_start) == (other.file_nbytes, other.data_start)
        assert dict(one.metadata) == dict(other.metadata)
        for a, b in zip(one.tensors, other.tensors, strict=True):
            assert (a.name, a.dtype, a.shape, a.start, a.stop) == (
                *(b.name, b.dtype, b.shape, b.start, b.stop),
            )
            assert (a.shard, b.shard) == (one.path, other.path)


def moved(path: Path, to: Path) -> Index:
    """The index of a checkpoint as a rank has it that finds it elsewhere."""
    data = write_index(open_checkpoint(path))
    shutil.copytree(path if path.is_dir() else path.parent, to)
    return Index.read(data, locate(to if path.is_dir() else to / path.name))


def test_every_kind_of_header_comes_back(tmp_path: Path) -> None:
    generator = random.Random(0)
    for shard in range(3):
        tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        for at, dtype in enumerate(BY_CODE.values()):
            for shape in ((), (0,), (3, 0, 5), (8,), (2, 16), (1, 1, 1, 8)):
                numel = 1
                for length in shape:
                    numel *= length
                if numel * dtype.bits % 8 == 0:
                    name = f"{shard}.{at}.{shape}"
                    tensors[name] = (dtype.code, shape, bytes(dtype.nbytes(numel)))
        for name in ODD:
            tensors[f"{name}{shard}"] = ("U8", (5,), generator.randbytes(5))
        items = list(tensors.items())
        generator.shuffle(items)
        write_safetensors(
            tmp_path / f"a/model-0000{shard + 1}-of-00003.safetensors",
            dict(items),
            metadata={"of": f"{shard}", **dict.fromkeys(ODD, "ü")} if shard else None,
            pad_nbytes=shard,
        )
    (tmp_path / "a/config.json").write_text('{"x": [1, Infinity, null], "y": {"z": "\\ud800"}}')
    index = moved(tmp_path / "a", tmp_path / "b")
    same(open_checkpoint(tmp_path / "a"), index.checkpoint)
    same(open_checkpoint(tmp_path / "b"), index.checkpoint)
    assert index.checkpoint.path == tmp_path / "b"
    assert index.check() == []


def test_sixty_thousand_tensors_take_half_a_megabyte(tmp_path: Path) -> None:
    """The index of 60,000 tensors of a mixture of experts is some 0.4 MB, and comes back."""
    header: dict[str, object] = {}
    at = 0
    for layer in range(60):
        for expert in range(333):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = [768, 2048] if part != "down_proj" else [2048, 768]
                nbytes = 768 * 2048 * 2
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
                at += nbytes
    raw = json.dumps(header).encode()
    whole = len(raw).to_bytes(8, "little") + raw
    url = Url.parse("http://127.0.0.1:1/model.safetensors")
    made = from_headers(url, [parse_header(whole, url, len(whole) + at)], {})
    data = write_index(made)
    assert len(header) == 59_940
    assert len(data) < 500_000
    same(made, Index.read(data, locate(url)).checkpoint)


def test_a_single_file_may_have_another_name(tmp_path: Path) -> None:
    """One file is the one that a rank was given, whatever rank 0 calls its own."""
    here = write_safetensors(tmp_path / "a/x.safetensors", {"t": ("U8", (4,), b"abcd")})
    there = tmp_path / "y.safetensors"
    shutil.copy(here, there)
    index = Index.read(write_index(open_checkpoint(here)), locate(there))
    assert index.check() == []
    assert [header.path for header in index.checkpoint.shards] == [there]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Index]:
    for shard in (1, 2):
        write_safetensors(
            tmp_path / f"a/model-{shard}-of-2.safetensors",
            {f"t{shard}": ("U8", (300_000,), random.Random(shard).randbytes(300_000))},
        )
    return tmp_path / "b", moved(tmp_path / "a", tmp_path / "b")


def test_files_of_another_length_are_refused(pair: tuple[Path, Index]) -> None:
    folder, index = pair
    file = folder / "model-2-of-2.safetensors"
    with file.open("ab") as more:
        more.write(b"\0")
    with pytest.raises(CheckpointError, match="is not the file that rank 0 has") as raised:
        index.check()
    assert raised.value.path == str(file)
    assert raised.value.found == file.stat().st_size


@pytest.mark.parametrize("where", ["header", "all", "end"])
def test_files_of_other_content_are_refused(pair: tuple[Path, Index], where: str) -> None:
    folder, index = pair
    file = folder / "model-1-of-2.safetensors"
    data = bytearray(file.read_bytes())
    if where == "header":
        data[20] ^= 1
    elif where == "end":
        data[-1] ^= 1
    else:
        data[200:] = random.Random(9).randbytes(len(data) - 200)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="though it is as long"):
        index.check()


def test_digests_are_compared_where_both_have_them(tmp_path: Path) -> None:
    names = ("here", "there")
    data = bytearray(random.Random(1).randbytes(300_000))
    for name in names:
        data[110_000] ^= 1  # between two blocks
        source = write_safetensors(
            tmp_path / f"of/{name}.safetensors",
            {"a": ("U8", (300_000,), bytes(data)), "b": ("U8", (4,), b"abcd")},
        )
        streamload.convert(source, tmp_path / name, progress=False)
    here, there = (tmp_path / name for name in names)

    def found(host: str = "two") -> bool:
        index = Index.read(write_index(open_checkpoint(here), "one"), locate(there))
        assert index.check() == []
        return index.is_sampled(host)

    with pytest.raises(CheckpointError, match="says other bytes than that of rank 0") as raised:
        found()
    assert (raised.value.path, raised.value.tensor) == (str(there / "streamload.json"), "a")
    (sidecar,) = there.glob("streamload.json")
    kept = sidecar.read_bytes()
    sidecar.unlink()
    assert found()  # the page says that this passes, and the report says so, too
    shutil.copy(here / "model.safetensors", there)
    (there / "streamload.json").write_bytes((here / "streamload.json").read_bytes())
    assert not found()
    (here / "streamload.json").unlink()
    sidecar.write_bytes(kept)
    assert found()
    sidecar.unlink()
    here, there = there, there
    assert not found("one") and found()  # the same file, unless the host is another


def test_missing_files_matter_to_who_needs_them(pair: tuple[Path, Index]) -> None:
    folder, index = pair
    (folder / "model-1-of-2.safetensors").unlink()
    missing = index.check()
    assert missing == ["model-1-of-2.safetensors"]
    whole = index.checkpoint
    with pytest.raises(ShardNotFoundError, match=r"needs are missing: expected model-1-of-2"):
        check_present(whole, missing)
    needed = from_headers(whole.path, [whole.shards[1]], {})
    check_present(needed, missing)


def test_a_folder_in_the_place_of_a_file(pair: tuple[Path, Index]) -> None:
    """Something else of that name is refused, and not opened."""
    folder, index = pair
    file = folder / "model-1-of-2.safetensors"
    nbytes = file.stat().st_size
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError):
        index.check()
    file.unlink()
    with file.open("wb") as hole:
        hole.truncate(nbytes)
    with pytest.raises(CheckpointError, match="though it is as long"):
        index.check()


def test_small_and_empty_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a/model-1-of-2.safetensors", {})
    write_safetensors(tmp_path / "a/model-2-of-2.safetensors", {"t": ("U8", (3,), b"abc")})
    index = moved(tmp_path / "a", tmp_path / "b")
    assert index.check() == []
    file = tmp_path / "b/model-2-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="though it is as long"):
        index.check()


def test_urls(tmp_path: Path) -> None:
    """What is at a URL is indexed from its headers; no rank reads there to compare."""
    file = write_safetensors(tmp_path / "model.safetensors", {"t": ("U8", (4,), b"abcd")})
    with serve({"/m/model.safetensors": file.read_bytes()}) as site:
        data = write_index(open_checkpoint(f"{site.url}m/"))
        asked = len(site.requests)
        index = Index.read(data, locate(f"{site.url}m/"))
        assert index.check() == []
        assert len(site.requests) == asked
        same(open_checkpoint(f"{site.url}m/"), index.checkpoint)
    local = Index.read(data, locate(tmp_path))  # rank 0 had a URL, this one has the file
    assert local.check() == []
    assert local.checkpoint.shards[0].path == file


def test_the_version_of_what_a_server_has_goes_along(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "x.safetensors", {"a": ("U8", (4,), b"abcd")})
    local = open_checkpoint(tmp_path / "x.safetensors")
    url = Url.parse("http://127.0.0.1:1/x.safetensors")
    (header,) = local.shards
    remote = from_headers(url, [replace(header, path=url.of_version("etag-1"))])
    (read,) = Index.read(write_index(remote), folder_at(url)).checkpoint.shards
    assert read.path == url.of_version("etag-1")
    assert {info.shard for info in read.tensors} == {url.of_version("etag-1")}
