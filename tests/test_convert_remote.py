"""Conversions whose source is at a URL, and what a server sees of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import needs
import pytest
from conversions import files_of, quiet, tensors_of, visible
from remote_server import Answer, Site, serve

from streamload.checkpoint.checkpoint import open_checkpoint
from streamload.convert.convert import convert
from streamload.convert.planning import SINGLE, WORK
from streamload.errors import CheckpointError

needs.module("httpx2")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries, and servers of this machine are asked directly, whatever its settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "2")


@pytest.fixture
def folder(tmp_checkpoint: Callable[..., Path]) -> Path:
    """A small Llama of bfloat16 in three shards, with a tokenizer."""
    folder = tmp_checkpoint(2_000_000, shards=3)
    (folder / "tokenizer.json").write_text('{"some": "words"}')
    return folder


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    """It, served."""
    with serve(folder) as served:
        yield served


def shown(out: Path) -> dict[str, bytes]:
    """The files of a conversion but for the sidecar, which says where it came from."""
    return {name: data for name, data in files_of(out).items() if name != "streamload.json"}


def test_it_is_the_same_as_from_the_folder(folder: Path, site: Site, tmp_path: Path) -> None:
    """The same files, tokenizer included; each byte of data is asked for once."""
    convert(site.url, tmp_path / "far", dtype="float16", progress=False)
    quiet(folder, tmp_path / "near", dtype="float16")
    assert shown(tmp_path / "far") == shown(tmp_path / "near")
    for header in open_checkpoint(folder).shards:
        asked = sorted(r for r in site.asked(f"/{header.path.name}") if r and r[0])
        assert asked[0][0] == header.data_start
        assert asked[-1][1] == header.file_nbytes
        assert all(one[1] == other[0] for one, other in pairwise(asked))
    site.wait_until_left()


@pytest.mark.parametrize(
    "fault",
    [Answer(500, ranges=False), Answer(cut=1000, reset=True), Answer(ranges=False)],
    ids=["500", "reset", "no ranges"],
)
def test_a_server_that_fails_in_the_middle(
    folder: Path, site: Site, tmp_path: Path, fault: Answer
) -> None:
    """One clear error; the resumption asks for nothing that was finished."""
    out, last = tmp_path / "out", open_checkpoint(folder).shards[-1]

    def fail(done: int, total: int) -> None:
        site.always[f"/{last.path.name}"] = fault

    with pytest.raises(CheckpointError) as raised:
        convert(site.url, out, progress=fail)
    assert raised.value.path == site.url + last.path.name
    assert not visible(out)
    site.always.clear()
    lines = [json.loads(line) for line in (out / WORK / "journal").read_text().splitlines()]
    finished = {line["tensor"][0] for line in lines if "tensor" in line}
    site.requests.clear()
    report = convert(site.url, out, resume=True, progress=False)
    assert report.resumed == len(finished)
    tensors = [t.info for file in report.plan.files for t in file.tensors]
    for index in finished:
        info = tensors[index]
        for asked in site.asked(f"/{info.shard.name}"):
            # headers are asked for with what follows them
            assert asked is None or asked[0] == 0 or asked[1] <= info.start or asked[0] >= info.stop
    assert tensors_of(out) == tensors_of(folder)


def test_a_file_that_is_another_one_now(folder: Path, site: Site, tmp_path: Path) -> None:
    """It is not continued, nor mixed with what was read of the old one."""
    out, name = tmp_path / "out", f"/{open_checkpoint(folder).shards[0].path.name}"

    def swap(done: int, total: int) -> None:
        data = site.files[name]
        site.files[name] = data[:-1] + bytes([data[-1] ^ 1])

    with pytest.raises(CheckpointError):
        convert(site.url, out, progress=swap)
    with pytest.raises(CheckpointError, match="another state"):
        convert(site.url, out, resume=True, progress=False)
    assert not visible(out)


def test_secrets_stay_out(folder: Path, site: Site, tmp_path: Path) -> None:
    """What a query carries is in no report, sidecar or journal."""
    report = convert(site.url + f"{_first(folder)}?sig=se-cret", tmp_path / "out", progress=False)
    assert "se-cret" not in report.to_json() + str(report)
    assert all(b"se-cret" not in data for data in files_of(tmp_path / "out").values())
    assert (tmp_path / "out" / SINGLE).exists()


def _first(folder: Path) -> str:
    return open_checkpoint(folder).shards[0].path.name
