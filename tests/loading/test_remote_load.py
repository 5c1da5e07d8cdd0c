"""Loads, plans and commands whose checkpoint is at a URL, whatever the server does meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from remote_server import Act, Answer, Handler, Site, patience, serve, site
from safetensors_files import write_safetensors

import streamload
from streamload.errors import CheckpointError, ShardNotFoundError
from streamload.planning.plan import Plan

needs.module("httpx2")

__all__ = ["patience", "site"]


def load(path: str | Path, **arguments: Any) -> dict[str, Any]:
    arguments = {"device": "host", "chunk_nbytes": 2**18, "progress": False} | arguments
    return dict(streamload.load_state_dict(None, path, **arguments).state_dict)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "streamload", *arguments]
    return forked.run(argv, forked.COMMANDS, env=os.environ | {"STREAMLOAD_HTTP_TRIES": "1"})


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.asarray(one[n]).tobytes() == np.asarray(other[n]).tobytes() for n in one
    )


def test_chunks_that_are_less_than_a_request(folder: Path, site: Site) -> None:
    """The error names the least; the least loads, and files of this machine take any."""
    with pytest.raises(ValueError, match="chunk_nbytes is at least 65536 for files on a server"):
        load(site.url, chunk_nbytes=2**16 - 1)
    assert same(load(site.url, chunk_nbytes=2**16), load(folder, chunk_nbytes=4096))
    with pytest.raises(ValueError, match=r"quantises, not 4096: .* write chunk_nbytes=65536$"):
        load(folder, chunk_nbytes=4096, quant="nf4")
    load(folder, chunk_nbytes=2**16, quant="nf4")


@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
@pytest.mark.parametrize("threads", [None, 8])
def test_a_load_is_the_same_as_from_the_folder(
    folder: Path, site: Site, dtype: str, threads: int | None
) -> None:
    expected = load(folder, dtype=dtype)
    for url in (site.url, site.url + "model.safetensors.index.json"):
        assert same(load(url, dtype=dtype, threads=threads), expected)
    site.wait_until_left()


def test_only_what_is_wanted_is_read(folder: Path, site: Site) -> None:
    checkpoint = streamload.open_checkpoint(site.url)
    headers = len(site.requests)
    wanted = [name for name in checkpoint.tensors if "layers.0.self_attn" in name]
    infos = [checkpoint.tensors[name] for name in wanted]
    model = {i.name: np.zeros(i.shape, np.uint16).view(i.dtype.numpy) for i in infos}
    streamload.load_state_dict(
        model, checkpoint, device="host", strict=False, dtype="checkpoint", progress=False
    )
    asked = sorted((r.path, r.range) for r in site.requests[headers:])
    assert [(f"/{i.shard.name}", (i.start, i.stop)) for i in infos] != []
    assert sum(stop - start for _, (start, stop) in asked) == sum(i.nbytes for i in infos)
    for path, (start, stop) in asked:
        inside = [i for i in infos if f"/{i.shard.name}" == path and i.start <= start < i.stop]
        assert len(inside) == 1
        assert stop <= inside[0].stop


def test_what_is_cast_is_read_into_memory_that_is_planned(tmp_path: Path) -> None:
    """Each thread reads into a buffer of its own: the process grows by no more than was said."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"w": ("BF16", (2**26,), bytes(2**27))})
    with serve(tmp_path) as site:
        found = command("load", site.url, "--device", "host", "--dtype", "float16", "--json")
    report = json.loads(found.stdout)
    slots_nbytes = 8 * report["plan"]["slot_nbytes"]
    assert report["plan"]["devices"][0]["scratch_nbytes"] == slots_nbytes == 2**26
    assert report["measured_nbytes"]["process"] <= report["predicted_nbytes"]["process"]


def test_a_plan_reads_no_data_and_says_how_it_is_read(folder: Path, site: Site) -> None:
    made = streamload.plan(site.url + "?sig=se-cret", device="host", budget="1GB")
    assert all(r.range in (None, (0, 2**18), (0, 1)) for r in site.requests)
    assert set(made.readers) == {"http"}
    assert "read by http: 3 files (from 127.0.0.1)" in str(made)
    assert Plan.from_json(made.to_json()) == made
    assert "se-cret" not in made.to_json() + str(made)
    assert made.resident_nbytes == streamload.plan(folder, device="host").resident_nbytes


FAULTS: dict[str, list[Act]] = {
    "resets": [Answer(cut=1000, reset=True), Answer(), Answer(503, body=b"")],
    "half": [Answer(cut=100_000), Answer(cut=70_000), Answer(piece=1000)],
    "pieces": [Answer(piece=100_000)] * 50,
}


@pytest.mark.parametrize("acts", FAULTS.values(), ids=list(FAULTS))
def test_a_load_ends_right_whatever_may_pass(folder: Path, site: Site, acts: list[Act]) -> None:
    checkpoint = streamload.open_checkpoint(site.url)
    for name in list(site.files):
        site.acts[name].extend(acts)
    assert same(load(checkpoint), load(folder))


WRONG: dict[str, tuple[Act, str]] = {
    "overload": (Answer(503, body=b"later"), "2 tries, the last: 503 Service Unavailable"),
    "reset": (Answer(cut=0, reset=True), "2 tries, the last: "),
    "whole": (Answer(ranges=False), "does not read parts of files"),
    "lies": (Answer(headers={"Content-Length": "1"}), "contradicts itself"),
    "changed": (Answer(headers={"ETag": '"other"'}), "has changed since its header was read"),
    "vanished": (Answer(404, body=b"no"), "no such file: found 404 Not Found"),
    "refused": (Answer(401, body=b"no"), "may not be read"),
}


@pytest.mark.parametrize(("act", "problem"), WRONG.values(), ids=list(WRONG))
def test_a_load_ends_with_one_error_of_what_does_not_pass(
    site: Site, act: Act, problem: str
) -> None:
    checkpoint = streamload.open_checkpoint(site.url)
    shard = checkpoint.shards[1].path
    site.always[f"/{shard.name}"] = act
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    assert caught.value.path == site.url + shard.name
    assert caught.value.tensor in checkpoint.tensors
    assert caught.value.state is not None
    assert problem in str(caught.value)
    site.wait_until_left()


def test_a_file_that_changes_during_a_load_is_no_mixture(site: Site) -> None:
    checkpoint = streamload.open_checkpoint(site.url)
    name = f"/{checkpoint.shards[0].path.name}"

    def swap(handler: Handler, data: bytes) -> None:
        site.files[name] = data[:-1] + bytes([data[-1] ^ 1])
        Answer()(handler, data)

    site.acts[name].append(swap)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        load(checkpoint)


def test_what_is_for_files_is_refused_of_a_url(site: Site) -> None:
    """There is nothing to map, and no disk to read past a cache from."""
    for reader in ("mmap", "direct"):
        with pytest.raises(ValueError, match="from a server"):
            load(site.url, reader=reader)
    assert load(site.url, reader="pread")


def test_the_commands_take_urls(folder: Path, site: Site) -> None:
    there, here = (
        json.loads(command("inspect", "--json", place).stdout) for place in (site.url, str(folder))
    )
    assert there["path"] == site.url
    assert there["tensors"] == here["tensors"]
    assert command("plan", site.url, "--device", "host").returncode == 0
    missing = command("inspect", site.url + "nothing.safetensors?sig=se-cret")
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "nothing.safetensors?...: no such file: found 404 Not Found" in missing.stderr


def test_a_vanished_checkpoint_is_not_found(site: Site) -> None:
    site.files.clear()
    with pytest.raises(ShardNotFoundError):
        load(site.url)
