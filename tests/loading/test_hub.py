"""Repositories of a Hugging Face Hub: names, refusals, faults, the cache that is shared, ranks."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from hub_server import COMMIT, LATER, TOKEN, Hub, hub, use_hub
from remote_server import Answer
from safetensors.numpy import save
from thread_group import World, run

import streamload
from streamload.cli import main as command
from streamload.core.location import Url
from streamload.errors import (
    CheckpointError,
    FileChangedError,
    HeaderError,
    ShardNotFoundError,
    StreamloadError,
)
from streamload.files.page_cache import drop_pages, resident_fraction

huggingface_hub = needs.module("huggingface_hub")

__all__ = ["hub"]

NAME = "org/name"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
ROWS = 300


def arrays(*names: str, seed: int = 0) -> dict[str, Any]:
    make = np.random.default_rng([seed, *map(len, names)]).standard_normal
    return {name: make((ROWS, 1000)).astype("float32") for name in names}


def files_of(tensors: Mapping[str, Any]) -> dict[str, bytes]:
    names = [*tensors]
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    weight_map = {name: file for file, each in halves.items() for name in each}
    return {
        "README.md": b"# A model",
        "config.json": b'{"model_type": "llama"}',
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        **{file: save({name: tensors[name] for name in each}) for file, each in halves.items()},
        "onnx/model.onnx": b"another format",
    }


TENSORS = arrays("a", "b", "c", "d")
FILES = files_of(TENSORS)


@pytest.fixture
def repo(hub: Hub) -> Hub:
    hub.add(NAME, FILES)
    return hub


def load(path: Any = NAME, **options: Any) -> Any:
    return streamload.load_state_dict(None, path, device="host", **{"progress": False, **options})


def assert_right(report: Any, tensors: Mapping[str, Any] = TENSORS) -> None:
    assert report.state_dict.keys() == tensors.keys()
    for name, value in tensors.items():
        assert np.array_equal(report.state_dict[name], value), name


def kept(home: Path) -> set[str]:
    """The names of the files in a cache's snapshots, and whatever is half written."""
    found = (path for path in home.rglob("*") if not path.is_dir())
    whole = {path.name for path in found if "snapshots" in path.parts}
    return whole | {path.name for path in home.rglob("*.incomplete")}


class _Dripping:
    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers

    def __call__(self, handler: Any, content: bytes) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        with suppress(OSError):
            for byte in f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode():
                handler.wfile.write(bytes([byte]))
                handler.wfile.flush()
                time.sleep(0.05)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        *(NAME, f"{NAME}@main", f"{NAME}@{COMMIT}", f"hf://{NAME}", f"hf://models/{NAME}@main"),
        *("hf://alone", "alone", "alone@main", "hf://alone@main", "{}/org/name/resolve/main/"),
    ],
)
def test_what_names_a_repository(hub: Hub, written: str) -> None:
    """With an owner or without, by a scheme or without, at a revision, and by its URL."""
    hub.add(NAME, FILES)
    hub.add("alone", FILES)
    checkpoint = streamload.open_checkpoint(written.format(hub.url))
    assert [*checkpoint] == [*TENSORS]
    assert isinstance(checkpoint.path, Url)
    assert str(checkpoint.path).endswith(f"/resolve/{COMMIT}/")
    assert checkpoint.config == {"model_type": "llama"}


def test_a_file_and_a_folder_of_a_repository(hub: Hub) -> None:
    """By ``hf://`` and a path; a file without an owner needs its revision."""
    inside = {f"sub/{name}": data for name, data in FILES.items()}
    for name in (NAME, "alone"):
        hub.add(name, inside)
    for written in (f"hf://{NAME}/sub", f"hf://{NAME}@main/sub/", "hf://alone@main/sub"):
        assert [*streamload.open_checkpoint(written)] == [*TENSORS]
    assert [*streamload.open_checkpoint(f"hf://{NAME}/sub/{SECOND}")] == ["c", "d"]
    assert [*streamload.open_checkpoint(f"hf://alone@{COMMIT}/sub/{INDEX}")] == [*TENSORS]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("hf://", "no repository of the hub"),
        ("hf://a/b/../c", "no such file or folder"),
        ("org/name@../../x", "no such file or folder"),
        ("hf://org/name@..%2F..%2Fx", "no such file or folder"),
        ("hf://datasets/org/name", "found a dataset"),
        ("hf://org/name/absent.safetensors", rf"no such file in the repository.*{FIRST}"),
        ("org--x/name", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
    ],
)
def test_what_names_none(repo: Hub, written: str, said: str) -> None:
    """One error each."""
    with pytest.raises(ShardNotFoundError, match=said):
        streamload.open_checkpoint(written)


def test_a_commit_is_pinned_before_the_first_header(repo: Hub) -> None:
    checkpoint = streamload.open_checkpoint(NAME)
    repo.add(NAME, files_of(arrays("a", "b", "c", "d", seed=1)), LATER)
    assert_right(load(checkpoint, fetch="stream"))
    assert_right(load(checkpoint, fetch="cache"))
    asked = [path for path in repo.paths() if "/resolve/" in path]
    assert asked and all(f"/resolve/{COMMIT}/" in path for path in asked)
    assert_right(load(f"{NAME}@{LATER}"), arrays("a", "b", "c", "d", seed=1))


def test_several_gguf_files_are_refused_with_what_to_write(hub: Hub) -> None:
    """With sizes, before any header is read; files in folders, too; the parts of one are one."""
    hub.add(NAME, {"q4.gguf": b"x" * 4_100_000, "q8.gguf": b"x" * 8_000_000, "README.md": b""})
    with pytest.raises(ShardNotFoundError) as refused:
        streamload.open_checkpoint(NAME)
    said = "hf://org/name/q4.gguf (4.10 MB), hf://org/name/q8.gguf (8.00 MB)"
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not any(path.endswith(".gguf") for path in hub.paths())
    hub.add("org/other", {"Q4/x-00001-of-00002.gguf": b"", "Q4/x-00002-of-00002.gguf": b""})
    with pytest.raises(ShardNotFoundError, match="hf://org/other@main/Q4/x-00001-of"):
        streamload.open_checkpoint("org/other@main")


# -- stream and cache ------------------------------------------------------------------------------


def test_a_stream_leaves_nothing_on_the_disk(repo: Hub, tmp_path: Path) -> None:
    report = load(fetch="stream", rename=lambda name: name if name == "d" else None)
    assert_right(report, {"d": TENSORS["d"]})
    assert report.plan.readers == ("http", "http")
    assert not (tmp_path / "home").exists()
    read = sum(stop - start for start, stop in filter(None, repo.ranges(FILES[SECOND])))
    assert read < len(FILES[SECOND]) * 0.8
    assert repo.ranges(FILES[FIRST]) == [(0, 2**18)]  # its header


def test_the_cache_is_the_default_and_gets_what_is_read(repo: Hub, tmp_path: Path) -> None:
    """The shard that is wanted, config.json and the index, and no other file."""
    report = load(rename=lambda name: name if name == "d" else None)
    assert_right(report, {"d": TENSORS["d"]})
    assert report.plan.readers == ("cache", "cache")
    assert kept(tmp_path) == {"config.json", INDEX, SECOND}
    assert "huggingface" not in str(report)


def test_each_reads_the_cache_of_the_other(
    repo: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_right(load())
    before = len(repo.storage.requests)
    for name in (FIRST, SECOND, "config.json", INDEX):
        path = huggingface_hub.hf_hub_download(NAME, name)
        assert Path(path).read_bytes() == FILES[name]
    assert len(repo.storage.requests) == before
    use_hub(monkeypatch, repo.url, tmp_path / "home", offline=True)
    assert_right(load())
    assert Path(huggingface_hub.hf_hub_download(NAME, FIRST)).read_bytes() == FILES[FIRST]
    use_hub(monkeypatch, repo.url, tmp_path / "theirs")
    huggingface_hub.snapshot_download(NAME, allow_patterns=["*.safetensors", "*.json"])
    before = len(repo.storage.requests)
    report = load()
    assert_right(report)
    assert len(repo.storage.requests) == before
    assert isinstance(streamload.open_checkpoint(NAME).path, Path)
    use_hub(monkeypatch, repo.url, tmp_path / "theirs", offline=True)
    assert_right(load(fetch="stream"))


def test_a_part_that_is_cached_is_not_asked_for_again(repo: Hub) -> None:
    huggingface_hub.hf_hub_download(NAME, FIRST)
    before = len(repo.ranges(FILES[FIRST]))
    assert_right(load(fetch="stream"))
    assert_right(load(fetch="cache"))
    assert len(repo.ranges(FILES[FIRST])) == before


def test_shards_load_while_later_ones_download(repo: Hub, monkeypatch: Any) -> None:
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "1")
    checkpoint = streamload.open_checkpoint(NAME)
    second = f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}"
    repo.storage.acts[second].append(Answer(403, ranges=False, body=b"no"))
    with pytest.raises(CheckpointError, match="403 Forbidden of a signed URL") as failed:
        load(checkpoint, fetch="cache")
    assert failed.value.state is not None and failed.value.state.loaded == ("a", "b")
    told: list[tuple[int, int]] = []
    assert_right(load(checkpoint, progress=lambda *each: told.append(each)))
    total = sum(each.nbytes for each in TENSORS.values()) + len(FILES[SECOND])  # the first is there
    assert told[-1] == (total, total)
    assert told == sorted(told)


def test_the_loop_asks_for_a_list_once(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """Group by group, for what the cache lacks; pages of a download are dropped as any others."""
    monkeypatch.setattr("streamload.loading.iterate._TOGETHER_NBYTES", 1)  # a group for each tensor
    options: Any = {"device": "host", "page_cache": "drop"}
    found = {name: np.array(value) for name, value in streamload.iterate(NAME, **options)}
    assert all(np.array_equal(found[name], value) for name, value in TENSORS.items())
    assert sum(path.startswith("/api/") for path in repo.paths()) == 1
    assert [len(repo.ranges(FILES[name])) for name in (FIRST, SECOND)] == [2, 2]
    assert [resident_fraction(path) for path in large_blobs(tmp_path)] == [0, 0]


def large_blobs(home: Path) -> list[Path]:
    return [path for path in home.rglob("blobs/*") if path.stat().st_size > 2**20]


@pytest.mark.parametrize("there", [False, True], ids=["downloaded", "downloaded meanwhile"])
def test_pages_of_the_cache_are_dropped(repo: Hub, tmp_path: Path, there: bool) -> None:
    checkpoint = streamload.open_checkpoint(NAME)
    if there:
        load()
    for path in large_blobs(tmp_path):
        with path.open() as file:
            os.fsync(file)
        drop_pages(path, 0, path.stat().st_size)
    report = load(checkpoint, page_cache="drop", rename=lambda name: None if name == "a" else name)
    assert [resident_fraction(path) for path in large_blobs(tmp_path)] == [0, 0]
    assert report.dropped_nbytes >= sum(TENSORS[name].nbytes for name in "bcd") - 2**16
    assert report.page_cache == 'page_cache="drop" was asked for'


def test_a_file_of_the_cache_that_changes(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """What was loaded of it is invalid, as of any other file."""
    monkeypatch.setattr("streamload.core.progress._TELL_EVERY_S", 0)
    checkpoint = streamload.open_checkpoint(NAME)
    load()
    (blob,) = tmp_path.rglob(f"blobs/{hashlib.sha256(FILES[SECOND]).hexdigest()}")
    with blob.open("r+b", buffering=0) as writer:  # before the load, which gets no lease

        def change(done: int, total: int) -> None:
            if done > 3 * TENSORS["a"].nbytes:
                writer.write(b"other")

        with pytest.raises(FileChangedError) as changed:
            load(checkpoint, progress=change, threads=1, chunk_nbytes=2**18)
    state = changed.value.state
    assert state is not None and state.loaded == ("a", "b") and "c" in state.invalid


def test_a_file_of_the_cache_that_is_deleted(repo: Hub, tmp_path: Path) -> None:
    huggingface_hub.hf_hub_download(NAME, FIRST)
    checkpoint = streamload.open_checkpoint(NAME)
    for blob in tmp_path.rglob("blobs/*"):
        blob.unlink()
    for residence in ("memory", "mapped"):
        with pytest.raises(ShardNotFoundError, match=f"{FIRST}: a symlink that leads nowhere"):
            load(checkpoint, residence=residence)
    assert_right(load())


def test_the_commit_of_the_load_is_noted(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """For the branch, also if it has moved since: the next load finds it without the hub."""
    checkpoint = streamload.open_checkpoint(NAME)
    repo.add(NAME, files_of(arrays("a", "b", "c", "d", seed=1)), LATER)
    assert_right(load(checkpoint, fetch="cache"))
    use_hub(monkeypatch, repo.url, tmp_path / "home", offline=True)
    assert_right(load())


class OfUserError(OSError):
    """An error without a number, as one of the library that a retry may fix."""


@pytest.mark.parametrize("residence", ["memory", "mapped"])
@pytest.mark.parametrize("at", [1, 1_000_000, 3_000_000, 4_800_000])
def test_an_error_of_progress_is_raised_as_it_is(
    repo: Hub, tmp_path: Path, monkeypatch: Any, at: int, residence: str
) -> None:
    """Wherever it comes, and once; another load, which waits for the same files, completes."""
    monkeypatch.setattr("streamload.core.progress._TELL_EVERY_S", 0)
    raised = []

    def tell(done: int, total: int) -> None:
        if done >= at and not raised:
            raised.append(done)
            raise OfUserError("enough")

    def slowly(handler: Any, content: bytes) -> None:
        time.sleep(0.1)
        Answer()(handler, content)

    for name in (FIRST, SECOND):
        repo.storage.always[f"/{hashlib.sha256(FILES[name]).hexdigest()}"] = slowly
    other: list[Any] = []
    beside = threading.Thread(target=lambda: other.append(load()))
    checkpoint = streamload.open_checkpoint(NAME)
    beside.start()
    with pytest.raises(OfUserError, match="enough"):
        load(checkpoint, progress=tell, chunk_nbytes=2**18, residence=residence)
    beside.join()
    assert_right(other[0])
    assert not any(name.endswith(".incomplete") for name in kept(tmp_path))


def test_where_the_disk_has_no_room(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """By default nothing is written; if the cache is asked for, that is one error."""
    free = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: free)
    assert_right(load())
    assert not kept(tmp_path)
    with pytest.raises(CheckpointError, match=r"do not fit in .*: write fetch='stream'.* 1.05 MB"):
        load(fetch="cache")
    with pytest.raises(CheckpointError, match="do not fit"):
        load(residence="mapped")
    assert load(residence="auto").plan.readers == ("http", "http")


@pytest.mark.parametrize("closed", ["hub", "hub/models--org--name"])
def test_a_cache_that_cannot_be_written(
    repo: Hub, tmp_path: Path, small_disk: Callable[[str], Path], closed: str
) -> None:
    """Another user's, or a part of it: the default reads past it, or else one error names it."""
    (tmp_path / "home" / closed).parent.mkdir(parents=True)
    (tmp_path / "home" / closed).symlink_to(small_disk("size=4m"))
    huggingface_hub.hf_hub_download(NAME, FIRST)
    small_disk("ro")
    assert_right(load())
    with pytest.raises(CheckpointError, match=f"{closed}.* cannot be written: write fetch='str"):
        load(fetch="cache")
    assert kept(tmp_path / "disk") == {FIRST}


def test_what_stays_in_files_needs_them(repo: Hub, tmp_path: Path) -> None:
    """Mapped weights and passes: files are downloaded before the plan, or a stream is refused."""
    # with the path of its documents, as `from_pretrained` opens it
    checkpoint = replace(streamload.open_checkpoint(NAME), path=tmp_path)
    with pytest.raises(CheckpointError, match=f"^{repo.url}/{NAME}/.*: write fetch='cache'"):
        load(checkpoint, residence="mapped", fetch="stream")
    assert not kept(tmp_path)
    report = load(residence="mapped")
    assert_right(report)
    assert report.plan.readers == ("mmap", "mmap")
    assert kept(tmp_path) == {"config.json", INDEX, FIRST, SECOND}
    assert streamload.plan(NAME, residence="mapped", device="host").readers == ("mmap", "mmap")


def test_the_layers_of_an_offload_come_from_the_cache(hub: Hub, tmp_path: Path) -> None:
    """`stream_layers` reads them at every step: a stream is refused, else they are downloaded."""
    tensors = arrays("model.layers.0.w", "model.layers.1.w", "model.layers.2.w", "lm_head.weight")
    hub.add(NAME, files_of(tensors))
    options: Any = {"device": "host", "budget": "4MB"}
    with pytest.raises(CheckpointError, match="write fetch='cache'"):
        streamload.stream_layers(NAME, fetch="stream", **options)
    with streamload.stream_layers(NAME, **options) as layers:
        found = {n: np.array(t) for _, each in layers for n, t in each.items()}
    assert all(np.array_equal(found[name], tensors[name]) for name in found)
    assert {FIRST, SECOND} < kept(tmp_path)


def test_a_fetch_that_is_none(repo: Hub, tmp_path: Path) -> None:
    """Of another server there is no cache; and it is one of three words."""
    path = f"{repo.storage.url}{hashlib.sha256(FILES[FIRST]).hexdigest()}?Signature=se-cret0"
    with pytest.raises(CheckpointError, match="write fetch='stream'"):
        load(path, fetch="cache")
    with pytest.raises(ValueError, match="fetch is one of auto, stream, cache"):
        load(fetch="both")


def test_what_does_not_fit_downloads_nothing(repo: Hub, tmp_path: Path) -> None:
    for options in ({}, {"residence": "mapped", "transform": {"a": np.negative}}):
        with pytest.raises(StreamloadError):
            load(budget="100kB", **options)
    with pytest.raises(StreamloadError):
        streamload.stream_layers(NAME, device="host", budget="100kB")
    with pytest.raises(ValueError, match="budget"):
        load(residence="mapped", budget="much")
    assert not kept(tmp_path)


# -- refusals --------------------------------------------------------------------------------------


def refusal(path: str = NAME) -> str:
    with pytest.raises(StreamloadError) as refused:
        load(path)
    said = str(refused.value)
    assert "\n" not in said and TOKEN not in said and "se-cret" not in said
    error: BaseException | None = refused.value
    while error is not None:
        assert TOKEN not in repr(error) and "se-cret" not in repr(error)
        error = error.__cause__ or error.__context__
    return said


def test_a_token_that_cannot_be_sent(repo: Hub, monkeypatch: Any) -> None:
    """One line, as of the list and of a file."""
    checkpoint = streamload.open_checkpoint(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_t\u00f6ken")
    for path, options in ((NAME, {}), (checkpoint, {"fetch": "stream"}), (checkpoint, {})):
        with pytest.raises(CheckpointError, match=r"the token \(HF_TOKEN\) cannot be sent"):
            load(path, **options)


def test_gated_private_and_missing(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    """What to do, with a token and without one."""
    repo.add("org/gated", FILES).gated = True
    repo.add("org/private", FILES).private = True
    login = "run `hf auth login` or set HF_TOKEN"
    assert f"accept its conditions on its page of the hub, and {login}" in refusal("org/gated")
    for name in ("org/private", "org/absent"):
        assert f"no such repository, or it is private: check its name, or {login}" in refusal(name)
    assert "no such revision" in refusal(f"{NAME}@absent")
    monkeypatch.setenv("HF_TOKEN", "hf_of-another")
    assert "and use a token that may read it" in refusal("org/gated")
    assert not kept(tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "token").write_text(TOKEN)  # as `hf auth login` does
    for name in ("org/gated", "org/private"):
        for fetch in ("stream", "cache"):
            assert_right(load(name, fetch=fetch))
    assert all("Authorization" not in headers for headers in repo.seen_by_storage)


def test_offline(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint = streamload.open_checkpoint(NAME)
    before = len(repo.site.requests)
    use_hub(monkeypatch, repo.url, tmp_path / "home", offline=True)
    said = "HF_HUB_OFFLINE is set: unset it, or write `hf download org/name"
    for path in (NAME, f"hf://{NAME}/{FIRST}", f"{repo.url}/{NAME}/resolve/main/{FIRST}"):
        assert f"{said}`" in refusal(path)
    for fetch in ("stream", "cache"):
        with pytest.raises(CheckpointError, match=said):
            load(checkpoint, fetch=fetch)
    assert len(repo.site.requests) == before
    use_hub(monkeypatch, repo.url, tmp_path / "home")
    load(rename=lambda name: name if name == "a" else None)
    for offline, what in ((True, said), (False, f"`hf download {NAME} --revision {COMMIT}`")):
        use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "home", offline=offline)
        monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "1")
        assert f"expected {SECOND}" in refusal() and what in refusal()


def test_no_server(repo: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    assert_right(load())
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path / "home")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "1")
    assert_right(load())
    said = "cannot be read from http://127.0.0.1:1: check the network, or HF_ENDPOINT"
    assert said in refusal("org/other")


def test_a_mirror_gets_the_token_and_nobody_else(repo: Hub, monkeypatch: Any) -> None:
    """That of HF_ENDPOINT: neither its storage nor another server."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for fetch in ("stream", "cache"):
        assert_right(load(fetch=fetch))
    sent = [request.headers.get("Authorization") for request in repo.site.requests]
    sent += [request.headers.get("authorization") for request in repo.site.requests]
    assert f"Bearer {TOKEN}" in sent
    assert repo.seen_by_storage
    assert all("uthorization" not in " ".join(headers) for headers in repo.seen_by_storage)


def test_without_the_library(repo: Hub) -> None:
    program = """
        import sys
        sys.modules["huggingface_hub"] = None
        import streamload
        for path in sys.argv[1:]:
            try:
                print([*streamload.open_checkpoint(path)])
            except ValueError as error:
                print(error)
    """
    signed = f"{repo.storage.url}{hashlib.sha256(FILES[FIRST]).hexdigest()}?Signature=se-cret0"
    said = forked.fresh(program, NAME, f"hf://{NAME}", signed, NO_PROXY="127.0.0.1")
    *refused, read = said.splitlines()
    assert len(refused) == 2 and all("pip install 'huggingface" in line for line in refused)
    assert read == "['a', 'b']"


# -- faults ----------------------------------------------------------------------------------------

Storage = Callable[[Hub, str, bytes], None]  # does something wrong with a file of the storage


def _act(*acts: Any, always: Any = None) -> Storage:
    def break_it(hub: Hub, path: str, data: bytes) -> None:
        hub.storage.acts[path].extend(acts)
        if always is not None:
            hub.storage.always[path] = always

    return break_it


def _expire(hub: Hub, path: str, data: bytes) -> None:
    hub.expires_after = 1


def _expired_at_once(hub: Hub, path: str, data: bytes) -> None:
    hub.storage.acts[path].append(Answer(403, ranges=False, body=b"expired"))


#: What goes wrong once or twice, after which the bytes are right: by a stream, and to the cache.
PASSING: dict[str, Storage] = {
    "a connection that is cut": _act(Answer(cut=100_000)),
    "a connection that is reset": _act(Answer(cut=100_000, reset=True)),
    "two of them": _act(Answer(cut=100_000), Answer(cut=0)),
    "a short answer": _act(Answer(cut=1_000_000)),
    "429": _act(Answer(429, {"Retry-After": "0"}, ranges=False)),
    "503": _act(Answer(503, {"Retry-After": "0"}, ranges=False)),
    "500": _act(Answer(500, ranges=False)),
    "a signed URL that expires": _expire,
    "a signed URL that has expired": _expired_at_once,
}


@pytest.mark.parametrize("fetch", ["stream", "cache"])
@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes(repo: Hub, tmp_path: Path, fault: str, fetch: Any) -> None:
    """The bytes are right, and nothing half written is left."""
    checkpoint = streamload.open_checkpoint(NAME)
    path = f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}"
    PASSING[fault](repo, path, FILES[SECOND])
    assert_right(load(checkpoint, fetch=fetch))
    assert kept(tmp_path) == ({"config.json", INDEX, FIRST, SECOND} if fetch == "cache" else set())


def _changed(hub: Hub, path: str, data: bytes) -> None:
    other = bytes(reversed(data))
    hub.storage.always[path] = lambda handler, content: Answer()(handler, other)


#: What does not pass, with what the error says: of a stream, and of a download.
LASTING: dict[str, tuple[Storage, str, str]] = {
    "another ETag": (_changed, "has changed since its header was read", ""),
    "another length": (
        _act(always=lambda handler, content: Answer()(handler, content + b"more")),
        "has become longer since",
        "the server sent fewer or more bytes than it said",
    ),
    "a shorter file": (
        _act(always=lambda handler, content: Answer()(handler, content[:-9])),
        "has become shorter",
        "the server sent fewer or more bytes than it said",
    ),
    "cut again and again": (
        _act(always=Answer(cut=0)),
        "cannot be read",
        "cannot be read|fewer or more bytes",
    ),
    "403 from the storage": (
        _act(always=Answer(403, ranges=False, body=b"se-cret")),
        "403 Forbidden where a redirect had led",
        "403 Forbidden of a signed URL",
    ),
    "a page instead of a file": (
        _act(always=Answer(200, {"Content-Type": "text/html"}, ranges=False, body=b"<html>")),
        "does not read parts of files",
        "the server sent fewer or more bytes than it said",
    ),
}


@pytest.mark.parametrize("fetch", ["stream", "cache"])
@pytest.mark.parametrize("fault", LASTING)
def test_a_fault_that_lasts(
    repo: Hub, tmp_path: Path, fault: str, fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that says what is wrong; whole files stay, and nothing of the one under way."""
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "2")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits for a second
    checkpoint = streamload.open_checkpoint(NAME)
    act, streamed, cached = LASTING[fault]
    act(repo, f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}", FILES[SECOND])
    said = streamed if fetch == "stream" else cached
    if not said:
        return
    with pytest.raises(CheckpointError, match=said) as refused:
        load(checkpoint, fetch=fetch)
    assert "\n" not in str(refused.value) and "se-cret" not in str(refused.value)
    assert kept(tmp_path) == ({"config.json", INDEX, FIRST} if fetch == "cache" else set())
    assert not threading.enumerate() or all(
        "streamload-download" not in thread.name for thread in threading.enumerate()
    )


@pytest.mark.parametrize(
    "fault",
    [
        *(Answer(429, {"Retry-After": "0"}, ranges=False), Answer(502, ranges=False, body=b"no")),
        *(Answer(cut=0), Answer(503, {"Retry-After": "0"}, ranges=False)),
    ],
)
def test_a_fault_of_the_list(repo: Hub, fault: Answer) -> None:
    """The list of files is asked for again."""
    repo.faults.append(fault)
    assert_right(load(fetch="stream"))


def test_a_list_that_is_none(repo: Hub) -> None:
    """One line, without what the server sent."""
    repo.faults.append(Answer(200, {}, ranges=False, body=b"<html>se-cret</html>"))
    assert "is not a JSON object" in refusal()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"sha": None}, "sha"),
        ({"sha": 7}, "sha"),
        ({"sha": "main"}, "sha"),
        ({"sha": COMMIT, "siblings": 7}, r"siblings\[0\]"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "a"}, {"rfilename": 7}]}, r"siblings\[1\]"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": 1e400}]}, "the size of 'a'"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": "7"}]}, "the size of 'a'"),
        ({"sha": COMMIT, "siblings": [{"rfilename": "a", "size": -7}]}, "the size of 'a'"),
    ],
)
def test_a_list_of_other_types_is_one_error(repo: Hub, said: Any, named: str) -> None:
    body = json.dumps(said).replace("Infinity", "1e400").encode()
    repo.faults.append(Answer(200, {}, ranges=False, body=body))
    with pytest.raises(CheckpointError, match=named) as caught:
        load()
    assert NAME in str(caught.value)
    assert len(repo.paths()) == 1


def test_a_list_that_is_nested_deeply(repo: Hub) -> None:
    """One error, whatever the recursion limit is."""
    body = b'{"sha": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    repo.faults.append(Answer(200, {}, ranges=False, body=body))
    assert "levels of nesting" in refusal()


def test_a_list_is_bounded(repo: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(b'{"sha": "' + bytes(2**26) + b'"}')
    repo.faults.append(Answer(200, {"Content-Encoding": "gzip"}, ranges=False, body=packed))
    tracemalloc.start()
    try:
        assert "compresses" in refusal()
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
    limits = streamload.Limits(header_nbytes=500)
    with pytest.raises(HeaderError, match="at most 500 bytes, by limits="):
        streamload.open_checkpoint(NAME, limits=limits)
    with pytest.raises(HeaderError, match="by limits="):  # with the headers of the shards
        streamload.open_checkpoint(NAME, limits=streamload.Limits(header_nbytes=1300))
    streamload.open_checkpoint(NAME, limits=streamload.Limits(header_nbytes=20_000))
    repo.faults.append(Answer(200, {}, ranges=False, body=b"{" + b" " * 2**26))
    assert "the hub's answer is too long" in refusal()


@pytest.mark.parametrize("what", ["list", "file", "headers"])
def test_an_answer_that_drips_ends(
    repo: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    """The least rate holds for what the library asks for, too: it is tried again, and given up."""
    monkeypatch.setenv("STREAMLOAD_HTTP_TIMEOUT", "0.5")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "2")
    drips = Answer(ranges=False, dribble=0.05)
    if what == "list":
        repo.faults.extend([Answer(body=b"{" + b" " * 10**6, ranges=False, dribble=0.05)] * 2)
        assert "less than 1024 bytes a second" in refusal()
        return
    checkpoint = streamload.open_checkpoint(NAME)
    if what == "headers":
        long = {f"X-{i}": "x" * 50 for i in range(50)}
        repo.faults.extend([_Dripping(long)] * 6)  # of two documents, and of a file
    else:
        repo.storage.always[f"/{hashlib.sha256(FILES[FIRST]).hexdigest()}"] = drips
    with pytest.raises(CheckpointError, match="less than 1024 bytes a second"):
        load(checkpoint, fetch="cache")
    assert not any(name.endswith(".incomplete") for name in kept(tmp_path))


def test_a_session_of_the_program_keeps_its_own_way(repo: Hub) -> None:
    """Other threads use the library's client as before, also packed answers."""
    load(fetch="cache")
    client = huggingface_hub.get_session()
    packed = gzip.compress(b"{}")
    repo.faults.append(Answer(200, {"Content-Encoding": "gzip"}, ranges=False, body=packed))
    assert client.get(f"{repo.url}/api/models/{NAME}").json() == {}


def test_a_server_that_is_no_hub(repo: Hub) -> None:
    """A redirect to nowhere, without what a hub says of a file."""
    checkpoint = streamload.open_checkpoint(NAME)
    path = f"/{NAME}/resolve/{COMMIT}/{SECOND}"
    assert path in repo.paths()
    repo.answer = lambda path, sent: (200, {}, b"")  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="HF_ENDPOINT names no hub"):
        load(checkpoint, fetch="cache")


def test_headers_of_xet_are_ignored(repo: Hub) -> None:
    """Under HF_HUB_DISABLE_XET, files come over HTTP."""
    repo.xet = True
    for fetch in ("stream", "cache"):
        assert_right(load(fetch=fetch))
    assert not any(path.startswith("/api/xet") for path in repo.paths())


def test_no_log_shows_a_signature(repo: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    loggers = [logging.getLogger(name) for name in ("", "huggingface_hub", "httpx2", "httpcore2")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        second = f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}"
        for fetch in ("stream", "cache"):
            repo.storage.acts[second].append(Answer(cut=1000))
            assert_right(load(fetch=fetch))
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
    assert "se-cret" not in written.getvalue() and TOKEN not in written.getvalue()


def test_an_interrupt_leaves_nothing_half_written(repo: Hub, tmp_path: Path) -> None:
    checkpoint = streamload.open_checkpoint(NAME)
    second = f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}"

    def interrupt(handler: Any, content: bytes) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        Answer(stall=500_000)(handler, content)

    repo.storage.acts[second].append(interrupt)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        load(checkpoint, fetch="cache")
    assert time.monotonic() - begun < 15
    assert kept(tmp_path) == {"config.json", INDEX, FIRST}
    assert_right(load())


def test_a_kill_leaves_whole_files(repo: Hub, tmp_path: Path) -> None:
    second = f"/{hashlib.sha256(FILES[SECOND]).hexdigest()}"
    repo.storage.acts[second] += [Answer(), Answer(stall=500_000)]  # its header, and its bytes
    code = "import streamload; streamload.load_state_dict(None, 'org/name', device='host')"
    environment = repo.environment(tmp_path / "home")
    child = subprocess.Popen([sys.executable, "-c", code], env=environment)
    while len(repo.ranges(FILES[SECOND])) < 2:
        assert child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.wait()
    before = len(repo.ranges(FILES[FIRST]))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(repo.ranges(FILES[FIRST])) == before
    assert {"config.json", INDEX, FIRST, SECOND} <= kept(tmp_path)


def test_two_loads_share_a_download(repo: Hub) -> None:
    with ThreadPoolExecutor(3) as pool:
        for report in pool.map(load, [NAME] * 3):
            assert_right(report)
    whole = [each for each in repo.ranges(FILES[SECOND]) if each is None]
    assert len(whole) <= 3


# -- entrances -------------------------------------------------------------------------------------


def test_a_rank_of_three_reads_its_third(hub: Hub, tmp_path: Path) -> None:
    from streamload import distributed

    tensors = arrays(*(f"model.layers.{i}.w.weight" for i in range(9)))
    files = files_of(tensors)
    hub.add(NAME, files)

    def rank(group: Any) -> Any:
        return distributed.load_state_dict(
            None, NAME, device="host", group=group, budget="1GB", dtype="float32", progress=False
        )

    streamload.open_checkpoint(NAME)  # connects
    before, sent_before = len(hub.paths()), len(hub.storage.requests)
    reports = run(World(3), rank)
    found: dict[str, Any] = {}
    for report in reports:
        assert len(report.state_dict) == 3
        found |= report.state_dict
    assert all(np.array_equal(found[name], tensors[name]) for name in tensors)
    ranges = [request.range for request in hub.storage.requests[sent_before:]]
    sent = sum(stop - start for start, stop in filter(None, ranges))
    assert sent < sum(each.nbytes for each in tensors.values()) + 2 * 2**18 + 2**16
    assert not kept(tmp_path)
    assert sum(path.startswith("/api/") for path in hub.paths()[before:]) == 1


def run_command(capsys: Any, monkeypatch: Any, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["streamload", *arguments])
    with pytest.raises(SystemExit) as ended:
        command()
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out + out.err


def test_commands_take_repositories(
    repo: Hub, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    repo.add(NAME, files_of(arrays("x", "y")), LATER)

    def run(*arguments: str) -> str:
        code, said = run_command(capsys, monkeypatch, *arguments)
        assert code == 0, said
        return said

    assert "x " in run("inspect", NAME)
    assert "a " in run("inspect", NAME, "--revision", COMMIT)
    assert "http" in run("plan", NAME, "--device", "host", "--fetch", "stream")
    run("load", f"hf://{NAME}", "--revision", COMMIT, "--device", "host", "--verify")
    assert FIRST in kept(tmp_path)
    run("convert", NAME, str(tmp_path / "out"), "--revision", COMMIT, "--no-progress")
    run("verify", NAME, str(tmp_path / "out"), "--revision", COMMIT)
    run("diff", NAME, str(tmp_path / "out"), "--revision", COMMIT)
    run("diff", NAME, NAME, "--revision", LATER, "--revision", LATER)
    code, said = run_command(
        capsys, monkeypatch, "inspect", str(tmp_path / "out"), "--revision", "x"
    )
    assert (code, "is no repository" in said) == (2, True)


def test_every_entrance_takes_a_name(repo: Hub) -> None:
    nodes = [streamload.Node("a", "1GB"), streamload.Node("b", "1GB")]
    assert streamload.plan(NAME, device="host").readers == ("cache", "cache")
    assert streamload.split(NAME, nodes=nodes).placements
    assert {n: t.shape for n, t in streamload.iterate(NAME, device="host")} == {
        name: value.shape for name, value in TENSORS.items()
    }
    assert streamload.diff(NAME, f"{NAME}@{COMMIT}").ok


def test_a_sidecar_that_is_not_cached(repo: Hub, tmp_path: Path) -> None:
    """A repository is verified, and a file of it, whichever files the cache has."""
    streamload.convert(NAME, tmp_path / "out", progress=False, max_shard_size="1.5MB")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    repo.add("me/mine", files)
    shards = [name for name in files if name.endswith(".safetensors")]
    for name in (shards[0], "config.json"):
        huggingface_hub.hf_hub_download("me/mine", name)
        for path in ("me/mine", f"hf://me/mine/{shards[0]}"):
            found = streamload.verify_checkpoint(path, progress=False)
            assert found.ok and found.verified_count == 4 - 3 * (path != "me/mine"), found


def test_redirects_of_the_hub_itself(repo: Hub) -> None:
    repo.renamed["org/was"] = NAME
    for fetch in ("stream", "cache"):
        assert_right(load("org/was", fetch=fetch))
