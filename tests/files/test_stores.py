"""Checkpoints in buckets, over a loopback server: ranges, versions, faults, and no secrets."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import needs
import numpy as np
import pytest
from conversions import files_of
from remote_server import Act, Answer, Drip, Site, etag, patience, patiently, serve_raw
from store_server import BUCKET, FOLDER, SECRET, bucket, error_of, loaded, refused

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.core.location import Url, local
from streamload.errors import (
    CheckpointError,
    ResidenceError,
    ShardNotFoundError,
    TruncatedFileError,
)
from streamload.files import remote
from streamload.files.connections import Patience
from streamload.files.folder import choose_reader, folder_at
from streamload.files.remote import HttpReader

needs.module("obstore")

__all__ = ["bucket", "patience"]

SOON = Patience(0.3, 0.3, 2, 0.01, 0.01)
F = f"{FOLDER}f"


@pytest.fixture
def folder(folder: Path) -> Path:
    """A small Llama in three shards, with a tokenizer and a folder of a module."""
    (folder / "tokenizer.json").write_text('{"some": "words"}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_a_bucket_is_the_same_checkpoint(scheme: str, bucket: Site, folder: Path) -> None:
    index = "model.safetensors.index.json"
    found = open_checkpoint(f"{scheme}://models/llama/{index}")
    assert found.tensors.keys() == open_checkpoint(folder).tensors.keys()
    assert loaded(f"{scheme}://models/llama/{index}") == loaded(folder)
    for name in (header.path.name for header in found.shards):
        version = f'"{etag(bucket.files[FOLDER + name])}"'
        asked = [r for r in bucket.requests if unquote(r.path) == FOLDER + name]
        sent = [request.headers.get("if-match") for request in asked]
        assert sent[0] is None and version in sent


@pytest.mark.parametrize("listed", [True, False])
def test_a_folder_is_listed(listed: bool, bucket: Site, folder: Path) -> None:
    if not listed:
        bucket.always[BUCKET] = refused(403, "AccessDenied")
    assert loaded("s3://models/llama/") == loaded(folder)
    del bucket.files[FOLDER + "model.safetensors.index.json"]
    if listed:  # the shards have no usual names
        assert loaded("s3://models/llama/") == loaded(folder)
    else:
        missing = str(error_of(lambda: loaded("s3://models/llama/")))
        assert "model.safetensors, found 404 Not Found" in missing
        missing = str(error_of(lambda: loaded("s3://models/llama")))
        assert "expected s3://models/llama/ for a folder, found 404 Not Found" in missing
        for name in ("model.safetensors.index.json", "model.safetensors"):
            bucket.always[FOLDER + name] = refused(403, "AccessDenied")
        forbidden = str(error_of(lambda: loaded("s3://models/llama/")))
        assert "AWS_ACCESS_KEY_ID" in forbidden and "403 Forbidden (AccessDenied)" in forbidden


def test_a_conversion_copies_what_is_listed(bucket: Site, folder: Path, tmp_path: Path) -> None:
    streamload.convert("s3://models/llama/", tmp_path / "far", progress=False)
    streamload.convert(folder, tmp_path / "near", progress=False)
    far, near = (
        {
            name: data
            for name, data in files_of(tmp_path / where).items()
            if name != "streamload.json"
        }
        for where in ("far", "near")
    )
    assert far == near
    assert "1_Pooling/config.json" in far


def test_commands_take_buckets(bucket: Site, here: Callable[..., tuple[str, str]]) -> None:
    url = "s3://models/llama/"
    assert "21 tensors in 3 files" in here("inspect", url)[0]
    assert "21 tensors" in here("plan", url, "--device", "host", "--budget", "1GB")[0]
    assert url in here("load", url, "--device", "host", "--budget", "1GB")[0]


def test_a_pickled_checkpoint_can_be_read(bucket: Site, folder: Path) -> None:
    """The URL of a bucket has no secrets, so that the copy has all of it."""
    copy = pickle.loads(pickle.dumps(open_checkpoint("s3://models/llama/")))
    assert loaded(copy) == loaded(folder)


def test_names_are_those_of_urls(bucket: Site) -> None:
    """A key's spaces and signs are escaped as in any URL, and an empty object is read."""
    bucket.files[f"{FOLDER}a b%#ü+"] = b"words"
    bucket.files[f"{FOLDER}empty"] = b""
    assert remote.read_file(Url.parse("s3://models/llama/a%20b%25%23%C3%BC+"), 10) == b"words"
    assert remote.read_file(Url.parse("s3://models/llama/empty"), 10) == b""
    bucket.always[f"{FOLDER}empty"] = bucket.always[F] = Answer()
    assert folder_at(Url.parse("s3://models/llama/")).exists("empty")
    assert not folder_at(Url.parse("s3://models/llama/")).exists("f")


@pytest.mark.parametrize(
    "text",
    [
        "s3:///key",
        f"s3://key:{SECRET}@models/llama/",
        f"s3://{SECRET}@models/llama/",
        "s3://models:80/llama/",
        f"s3://models/llama/?X-Amz-Signature={SECRET}",
        "s3://models/a b",
    ],
)
def test_what_is_no_url_of_a_bucket(text: str) -> None:
    """Without a bucket, or with a user, a port or a query."""
    assert "s3://bucket/path" in str(error_of(lambda: open_checkpoint(text)))


def test_other_urls_are_named(small_checkpoint: Path) -> None:
    """A scheme that is not read, and a URL that went through Path, are errors that say so."""
    for path in ("s3a://models/llama/", Path("s3://models/llama/")):
        assert "gs://bucket/path" in str(error_of(lambda p=path: local(p)))  # type: ignore[misc]
    with pytest.raises(ValueError, match="written to a folder"):
        streamload.convert(small_checkpoint, "s3://models/out/", progress=False)


def test_a_file_on_disk_is_needed(bucket: Site) -> None:
    """Weights that stay in their files, and maps, are refused as for other URLs."""
    url = Url.parse("s3://models/llama/")
    with pytest.raises(ValueError, match="from a server"):
        choose_reader(url, "mmap")
    with pytest.raises(ResidenceError):
        streamload.load_state_dict(None, str(url), device="host", residence="mapped")


def test_it_needs_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    error = error_of(lambda: open_checkpoint("gs://models/llama/"))
    assert "needs obstore, the extra stores: pip install 'obstore>=0.12'" in str(error)


# -- faults ----------------------------------------------------------------------------------------


def reader(bucket: Site, nbytes: int = 300_000) -> HttpReader:
    """A reader of a file in the bucket, of the version that is there now."""
    bucket.files[F] = np.random.default_rng(0).bytes(nbytes)
    url = Url.parse("s3://models/llama/f").of_version(f'ETag: "{etag(bucket.files[F])}"')
    return HttpReader(url, nbytes)


@pytest.mark.parametrize(
    ("act", "rest"),
    [
        (refused(503, "SlowDown"), 0),
        (refused(429, "TooManyRequests"), 0),
        (refused(500, "InternalError"), 0),
        (Answer(reset=True, cut=0), 0),
        (Answer(cut=200_000), 200_000),
        (Answer(cut=200_000, reset=True), 200_000),
    ],
)
def test_what_passes_is_tried_again(act: Act, rest: int, bucket: Site) -> None:
    with patiently(SOON, reader, bucket) as open_reader:
        bucket.acts[F].append(act)
        out = bytearray(300_000)
        open_reader.read_into(0, memoryview(out))
    assert bytes(out) == bucket.files[F]
    asked = bucket.asked(F)
    assert len(asked) == 2 and asked[0] == (0, 300_000) and asked[1] is not None
    # of a body, what has not filled a piece is lost with it
    assert rest - 2**17 < asked[1][0] <= rest and asked[1][1] == 300_000
    assert {r.headers["if-match"] for r in bucket.requests} == {f'"{etag(bucket.files[F])}"'}


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (refused(404, "NoSuchKey"), "no such file: found 404 Not Found (NoSuchKey)"),
        (refused(404, "NoSuchBucket"), "no such file: found 404 Not Found (NoSuchBucket)"),
        (refused(403, "AccessDenied"), "AWS_ACCESS_KEY_ID"),
        (refused(401, "InvalidAccessKeyId"), "401 Unauthorized (InvalidAccessKeyId)"),
        (refused(301, "PermanentRedirect"), "expected its region in AWS_REGION"),
        (refused(400, "AuthorizationHeaderMalformed"), "expected its region in AWS_REGION"),
        (refused(400, "ExpiredToken"), "found 400 Bad Request (ExpiredToken)"),
        (refused(412, "PreconditionFailed"), "has changed since its header was read"),
        (Answer(ranges=False), "expected 206 Partial Content, found 200, the whole file"),
        (Answer(piece=50), "found another range"),
        (Answer(headers={"ETag": '"other"'}), "has changed since its header was read"),
        (Answer(headers={"ETag": None}), "has changed since its header was read"),
        (refused(503, SECRET + "&"), "found 0 of them in 2 tries, the last: 503 Service"),
    ],
)
def test_what_stays_wrong_is_one_error(act: Act, expected: str, bucket: Site) -> None:
    bucket.always[F] = act
    with patiently(SOON, reader, bucket) as open_reader:
        error = error_of(lambda: open_reader.read_into(0, memoryview(bytearray(1000))))
    assert expected in str(error), str(error)
    assert len(bucket.asked(F)) == 1 + ("2 tries" in expected)


def test_a_file_that_is_replaced(bucket: Site) -> None:
    """Between the header and the tensors: another version, a shorter file, or none."""
    checkpoint = open_checkpoint("s3://models/llama/")
    name = FOLDER + checkpoint.shards[0].path.name
    whole = bucket.files[name]
    load = {"device": "host", "progress": False}
    for content, expected in (
        (whole[:-1] + b"x", CheckpointError),
        (whole[:-1], TruncatedFileError),
        (None, ShardNotFoundError),
    ):
        bucket.files.pop(name)
        if content is not None:
            bucket.files[name] = content
        error = error_of(lambda: streamload.load_state_dict(None, checkpoint, **load))
        assert isinstance(error, expected)
        assert checkpoint.shards[0].path.name in str(error)


@pytest.mark.parametrize("stall", [0, 50_000])
def test_silence_has_a_deadline(stall: int, bucket: Site) -> None:
    """Of headers and of a body; another thread's stop ends the wait at once."""
    bucket.always[F] = Answer(stall=stall)
    with patiently(SOON, reader, bucket) as open_reader:
        began = time.monotonic()
        error = error_of(lambda: open_reader.read_into(0, memoryview(bytearray(300_000))))
        assert time.monotonic() - began < 5
        assert "bytes in 0.6 s" in str(error), str(error)
    with patiently(Patience(9, 99, 1, 1, 1), reader, bucket) as open_reader:
        stopping = threading.Timer(0.3, open_reader.stop)
        stopping.start()
        began = time.monotonic()
        error = error_of(lambda: open_reader.read_into(0, memoryview(bytearray(300_000))))
        assert "reading was stopped" in str(error)
        assert time.monotonic() - began < 5
        stopping.join()


@pytest.mark.parametrize(
    ("scheme", "variable", "value", "expected"),
    [
        ("s3", "AWS_ENDPOINT_URL", "http://127.0.0.1:{}", "in 2 tries, the last: Connection ref"),
        ("s3", "AWS_ENDPOINT_URL", f"nonsense {SECRET}", "settings in the environment that are"),
        ("s3", "AWS_ALLOW_HTTP", None, "AWS_ALLOW_HTTP=true"),
        ("az", "AZURE_STORAGE_ACCOUNT_NAME", None, "expected AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_what_cannot_be_reached(
    scheme: str, variable: str, value: str | None, expected: str, monkeypatch: Any, bucket: Site
) -> None:
    """A port that takes no connection is tried again; an endpoint of http:// has to be allowed."""
    monkeypatch.delenv(variable)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if value is not None:
            monkeypatch.setenv(variable, value.format(held.getsockname()[1]))
        error = error_of(lambda: patiently(SOON, open_checkpoint, f"{scheme}://models/f.gguf"))
    assert expected in str(error)


def test_credentials_are_asked_for_in_time(bucket: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metadata address that is silent has the deadline of a try; none there, and it ends."""
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with serve_raw(Drip()) as metadata:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url.rstrip("/"))
        began = time.monotonic()
        error = error_of(lambda: patiently(SOON, open_checkpoint, "s3://models/f.gguf"))
        assert time.monotonic() - began < 5
        assert "in 2 tries, the last: no answer within 0.3 s" in str(error)
        assert len(metadata.requests) == 2
    busy = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    with serve_raw(Drip(busy)) as metadata:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.url.rstrip("/"))
        error = error_of(lambda: patiently(SOON, open_checkpoint, "s3://models/f.gguf"))
        assert "in 2 tries, the last: no credentials" in str(error)
    error = error_of(lambda: patiently(SOON, open_checkpoint, "s3://models/f.gguf"))
    assert "found no credentials" in str(error) and "AWS_SKIP_SIGNATURE=true" in str(error)


def test_settings_may_change_between_calls(bucket: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of a bucket ends with its last reader: the next call heeds the environment."""
    open_checkpoint("s3://models/llama/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    before = len(bucket.requests)
    open_checkpoint("s3://models/llama/")
    assert all("authorization" in each.headers for each in bucket.requests[before:])


def test_nothing_is_logged(
    bucket: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    report = streamload.load_state_dict(None, "s3://models/llama/", device="host", progress=False)
    assert SECRET not in f"{report}{report.to_json()}{caplog.text}"


def _open_in_child(answers: Any) -> None:
    try:
        open_checkpoint("s3://models/llama/")
    except CheckpointError as error:
        answers.put(str(error))


def test_a_forked_process_is_told(bucket: Site) -> None:
    """obstore hangs in a process that is forked off one that used it: that is an error at once."""
    open_checkpoint("s3://models/llama/")
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_open_in_child, args=(answers,))
    child.start()
    assert "spawn" in answers.get(timeout=20)
    child.join()


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "8"])
def test_memory_is_what_is_planned(
    threads: str, bucket: Site, tmp_checkpoint: Callable[..., Path]
) -> None:
    """A fresh process grows by no more than the plan says."""
    for path in tmp_checkpoint(200_000_000, shards=3).iterdir():
        bucket.files[f"/models/large/{path.name}"] = path.read_bytes()
    program = (
        "import sys, streamload\n"
        "report = streamload.load_state_dict(None, 's3://models/large/', device='host', "
        "dtype='bfloat16', threads=int(sys.argv[1]), progress=False)\n"
        "print(report.process_ratio)"
    )
    argv = [sys.executable, "-c", program, threads]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    assert 0.8 < float(done.stdout) <= 1
