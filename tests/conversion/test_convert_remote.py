"""Conversions whose source is at a URL, and what a server sees of them."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from conversions import files_of, quiet, tensors_of, visible
from gguf_models import write_model
from hub_server import COMMIT, Hub, hub, use_hub
from lora_files import adapter
from remote_server import Answer, Site, patience, serve, site

from streamload.checkpoint.open import open_checkpoint
from streamload.conversion.companions import SINGLE
from streamload.conversion.convert import convert
from streamload.conversion.disk import WORK
from streamload.errors import CheckpointError

needs.module("httpx2")
huggingface_hub = needs.module("huggingface_hub")

__all__ = ["hub", "patience", "site"]


@pytest.fixture
def folder(folder: Path) -> Path:
    """A small Llama of bfloat16 in three shards, with a tokenizer."""
    (folder / "tokenizer.json").write_text('{"some": "words"}')
    return folder


def shown(out: Path) -> dict[str, bytes]:
    """The files of a conversion but for the sidecar, which says where it came from."""
    return {name: data for name, data in files_of(out).items() if name != "streamload.json"}


@pytest.mark.parametrize(
    ("options", "count"), [({"to": "gguf"}, 2), ({"to": "mlc", "quant": "q4f16_1"}, 3)]
)
def test_a_long_tokenizer_is_read_once(options: dict[str, str], count: int, tmp_path: Path) -> None:
    """A look at its beginning, one request to read it, and one more where the file is copied."""
    needs.module("tokenizers")
    path = write_model(tmp_path / "in", "llama", rope_scaling=None) / "tokenizer.json"
    path.write_text(path.read_text().replace("{", "{" + " " * 2**20, 1))
    with serve(path.parent) as site:
        quiet(site.url, tmp_path / "far", **options)
        assert len(site.asked("/tokenizer.json")) == count


def test_it_is_the_same_as_from_the_folder(folder: Path, site: Site, tmp_path: Path) -> None:
    convert(site.url, tmp_path / "far", dtype="float16", progress=False)
    quiet(folder, tmp_path / "near", dtype="float16")
    assert shown(tmp_path / "far") == shown(tmp_path / "near")
    for header in open_checkpoint(folder).shards:
        asked = sorted(r for r in site.asked(f"/{header.path.name}") if r and r[0])
        assert asked[0][0] == header.data_start
        assert asked[-1][1] == header.file_nbytes
        assert all(one[1] == other[0] for one, other in pairwise(asked))
    site.wait_until_left()


def test_weights_are_quantized_on_the_way(folder: Path, site: Site, tmp_path: Path) -> None:
    """The same bytes as from the folder, and the same configuration.

    A model is asked about a local checkpoint alone; of one at a URL, all modules that are not
    quantised are listed, not only the Linears among them.
    """
    convert(site.url, tmp_path / "far", quant="nf4-nested", progress=False)
    quiet(folder, tmp_path / "near", quant="nf4-nested")
    far, near = shown(tmp_path / "far"), shown(tmp_path / "near")
    of_far, of_near = (json.loads(files.pop("config.json")) for files in (far, near))
    assert far == near
    kept = "llm_int8_skip_modules"
    listed = (set(each["quantization_config"].pop(kept)) for each in (of_near, of_far))
    assert next(listed) <= next(listed)
    assert of_far == of_near
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
    first = open_checkpoint(folder).shards[0].path.name
    report = convert(f"{site.url}{first}?sig=se-cret", tmp_path / "out", progress=False)
    assert "se-cret" not in report.to_json() + str(report)
    assert all(b"se-cret" not in data for data in files_of(tmp_path / "out").values())
    assert (tmp_path / "out" / SINGLE).exists()


def in_repository(hub: Hub, folder: Path) -> str:
    """Put a folder's files into a repository's folder on a branch; return its URL."""
    files = {f"sub/{name}": data for name, data in files_of(folder).items()}
    hub.add("me/mine", {**files, "other.txt": b"x"}).refs["a/b"] = COMMIT
    return f"{hub.url}/me/mine/resolve/a%2Fb/sub/"


def with_folders(folder: Path) -> None:
    """Put folders beside a checkpoint, as sentence-transformers does, and weights of others."""
    inner = ("1_Pooling/config.json", "2_Dense/model.safetensors", "notes/deep/a.txt")
    for path in (*inner, "onnx/model.onnx", ".cache/x.json"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(json.dumps(path))
    modules = [{"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": ""}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "README.md").write_text("Read it.")


@pytest.mark.parametrize("has_config", [True, False])
def test_folders_of_a_repository(folder: Path, tmp_path: Path, hub: Hub, has_config: bool) -> None:
    """The hub lists its files: small folders come as from a folder, and all files do."""
    with_folders(folder)
    if not has_config:
        (folder / "config.json").unlink()
    url = in_repository(hub, folder)
    report = convert(url, tmp_path / "far", dtype="float16", progress=False)
    asked = [path for path in hub.paths() if path.startswith("/api/")]
    assert asked == ["/api/models/me/mine/revision/a%2Fb?blobs=true"]
    one = convert(url + "model.safetensors.index.json", tmp_path / "one", progress=False)
    quiet(folder, tmp_path / "near", dtype="float16")
    assert shown(tmp_path / "far") == shown(tmp_path / "near")
    assert {"2_Dense/model.safetensors", "notes/deep/a.txt"} < shown(tmp_path / "far").keys()
    assert report.plan.notes == one.plan.notes == ("not copied: onnx/",)
    assert not (tmp_path / "home" / "hub").exists()


@pytest.mark.parametrize("filled", ["model-00002", "model", "config.json", ""])
def test_a_cache_that_is_filled_meanwhile(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, filled: str
) -> None:
    """With any part of a repository and an adapter in it, the same files are written, and resumed.

    What the cache has is not asked for again. Without the hub, a note says that it may lack files.
    """
    with_folders(folder)
    small = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    name = "model.layers.0.self_attn.q_proj"
    width = open_checkpoint(folder).tensors[f"{name}.weight"].shape[0]
    parts = {"A": np.ones((2, width), "float32"), "B": np.ones((width, 2), "float32")}
    arrays = {f"base_model.model.{name}.lora_{k}.weight": v for k, v in parts.items()}
    url = in_repository(hub, folder)
    hub.add("me/lora", files_of(adapter(tmp_path / "lora", arrays, **small)))
    options: dict[str, Any] = {"dtype": "float16", "adapters": ["me/lora"]}
    convert(url, tmp_path / "far", progress=False, **options)

    def fail(done: int, total: int) -> None:
        if done:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        convert(url, tmp_path / "out", progress=fail, **options)
    for name in files_of(folder):
        if name.startswith((filled, "config.json")):
            huggingface_hub.hf_hub_download("me/mine", f"sub/{name}", revision=COMMIT)
    huggingface_hub.hf_hub_download("me/lora", "adapter_model.safetensors", revision=COMMIT)
    is_whole = filled in ("model", "")
    assert isinstance(open_checkpoint(url).path, Path) is is_whole
    before = len(hub.paths("GET"))
    again = convert(url, tmp_path / "again", progress=False, **options)
    asked = [path for path in hub.paths("GET")[before:] if "/resolve/" in path]
    assert not any(f"/sub/{filled}" in path for path in asked)
    assert again.plan.notes == ("not copied: onnx/",)
    convert(url, tmp_path / "out", resume=True, progress=False, **options)
    assert shown(tmp_path / "out") == shown(tmp_path / "again") == shown(tmp_path / "far")
    assert convert(url, tmp_path / "far", resume=True, progress=False, **options).read_nbytes == 0
    if is_whole:
        use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "home", offline=True)
        alone = convert(f"hf://me/mine@{COMMIT}/sub", tmp_path / "alone", progress=False)
        assert "lacks (the Hub was not asked)" in alone.plan.notes[0]


def test_folders_that_are_not_listed(folder: Path, tmp_path: Path) -> None:
    """Of another server, folders that modules.json names are said to be missing."""
    with_folders(folder)
    with serve(folder) as site:
        report = convert(site.url, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "modules.json").exists()
    unlisted = "(the server does not list its files)"
    assert report.plan.notes == (f"not copied: 1_Pooling/ {unlisted}, 2_Dense/ {unlisted}",)


def test_folders_that_are_long_are_left(folder: Path, tmp_path: Path, hub: Hub) -> None:
    with_folders(folder)
    (folder / "notes" / "b.txt").write_text("b")
    hub.size = 2**27 + 1
    report = convert(in_repository(hub, folder), tmp_path / "out", progress=False)
    assert not any("/notes/" in path for path in hub.paths())
    assert report.plan.notes == ("not copied: notes/, onnx/",)


PAGE = b"<!doctype html><title>no such page, but here is a nice one</title>"


def test_a_page_is_no_file_of_a_model(folder: Path, site: Site, tmp_path: Path) -> None:
    """Where a server answers with HTML what it has not got, it is left out, and the report says so.

    A table that is HTML by what the server says of it is none either; JSON must be JSON.
    """
    said = {"Content-Type": "text/html; charset=utf-8"}
    site.always["/merges.txt"] = Answer(200, said, ranges=False, body=PAGE)
    site.always["/vocab.json"] = Answer(200, said, ranges=False, body=b"{}")
    for name in ("generation_config.json", "special_tokens_map.json"):
        site.always[f"/{name}"] = Answer(200, ranges=False, body=PAGE)
    site.always["/added_tokens.json"] = Answer(200, ranges=False, body=PAGE + b" " * 2**21)
    report = convert(site.url, tmp_path / "out", dtype="float16", progress=False)
    names = {path.name for path in (tmp_path / "out").glob("*")}
    assert {"config.json", "tokenizer.json"} < names
    assert not names & {"merges.txt", "vocab.json", "generation_config.json", "added_tokens.json"}
    (note,) = report.plan.notes
    assert "merges.txt (the server sends a page of HTML)" in note
    assert "generation_config.json (the server sends something else than JSON)" in note


def test_a_page_is_no_configuration(site: Site, tmp_path: Path) -> None:
    site.always["/config.json"] = Answer(200, ranges=False, body=PAGE)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert(site.url, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_long_files_beside_are_not_held(folder: Path, site: Site, tmp_path: Path) -> None:
    table = json.dumps({"words": "x" * 60_000_000}).encode()
    site.files["/tokenizer.json"] = site.files["/merges.txt"] = table
    cut, cuts = Answer(cut=20_000_000, ranges=False), site.acts["/tokenizer.json"]
    tracemalloc.start()
    try:

        def later(done: int, total: int) -> None:
            cuts.extend([cut] * (not cuts))  # once

        report = convert(site.url, tmp_path / "out", progress=later)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == table
    assert (tmp_path / "out/merges.txt").read_bytes() == table
    assert peak < 40_000_000  # a block for each thread, and what was seen of each
    assert report.plan.needed_nbytes > 2 * len(table)


def test_a_long_file_beside_that_changes(folder: Path, site: Site, tmp_path: Path) -> None:
    """Between the look at it and its copy: an error, and the resumption takes the new one."""
    out = tmp_path / "out"
    site.files["/merges.txt"] = b"a b\n" * 2**19

    def change(done: int, total: int) -> None:
        site.files["/merges.txt"] = b"c d\n" * 2**19

    with pytest.raises(CheckpointError, match=r"merges\.txt.*has changed"):
        convert(site.url, out, progress=change)
    assert not visible(out)
    convert(site.url, out, resume=True, progress=False)
    assert (out / "merges.txt").read_bytes() == site.files["/merges.txt"]


def test_a_long_file_that_does_not_end_as_json(folder: Path, site: Site, tmp_path: Path) -> None:
    """It is not published."""
    site.files["/tokenizer.json"] = b'{"half": "' + b"x" * 2**21
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*is not JSON"):
        convert(site.url, tmp_path / "out", progress=False)
    assert not visible(tmp_path / "out")


def test_files_beside_that_are_too_long_are_left(folder: Path, site: Site, tmp_path: Path) -> None:
    said = {"Content-Length": str(2**28 + 1)}
    site.always["/merges.txt"] = Answer(200, said, ranges=False, body=bytes(2**20 + 1), cut=2**21)
    report = convert(site.url, tmp_path / "out", progress=False)
    assert report.plan.notes == ("not copied: merges.txt",)


def test_another_file_at_another_address(folder: Path, tmp_path: Path) -> None:
    """A server that tells no versions: what was finished from there is not taken for this one."""
    out = tmp_path / "out"
    silent = Answer(headers={"ETag": None, "Last-Modified": None})
    with serve(folder) as one, serve(folder) as other:
        for site in (one, other):
            for path in list(site.files):
                site.always[path] = silent
        convert(one.url, out, progress=False)
        assert convert(one.url, out, resume=True, progress=False).resumed
        with pytest.raises(CheckpointError, match="not of this source"):
            convert(other.url, out, resume=True, progress=False)
