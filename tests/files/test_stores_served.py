"""Checkpoints in buckets of moto's S3 and of an emulator of Google Cloud Storage."""

from __future__ import annotations

import email.utils
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from store_server import error_of, loaded, set_environment

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import ShardNotFoundError

pytestmark = pytest.mark.slow

needs.module("obstore")

KEY, SECRET = "AKIAcaNaRy5", "caNaRy5secret"


@pytest.fixture
def s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of moto's S3, which has the folder at s3://models/llama/; keys are given."""
    moto = needs.runtime("moto.server")
    boto3 = needs.runtime("boto3")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "2")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    set_environment(monkeypatch, f"http://{host}:{port}")
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for path in folder.iterdir():
        client.put_object(Bucket="models", Key=f"llama/{path.name}", Body=path.read_bytes())
    yield client
    server.stop()


@pytest.fixture
def gcs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The storage of an emulator, which has the folder at gs://models/llama/.

    Its downloads get the headers that it lacks and that all objects have: ETag, Last-Modified.
    """
    emulator = needs.runtime("gcp_storage_emulator.server")
    from gcp_storage_emulator.handlers import objects

    def download(request: Any, response: Any, storage: Any, *more: Any, **named: Any) -> None:
        objects.download(request, response, storage, *more, **named)
        if response.status < 400:
            at = request.params["bucket_name"], request.params["object_id"]
            response["ETag"] = f'"{storage.get_file_obj(*at)["md5Hash"]}"'
            response["Last-Modified"] = email.utils.formatdate(1.7e9, usegmt=True)

    *others, (pattern, public) = emulator.HANDLERS
    changed = (*others, (pattern, public | {"GET": download}))
    monkeypatch.setattr(emulator, "HANDLERS", changed)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="models")
    server.start()
    set_environment(monkeypatch, f"http://127.0.0.1:{server._api._httpd.server_port}")
    for path in folder.iterdir():
        put(server, path.name, path.read_bytes())
    yield server
    server.stop()


def put(server: Any, name: str, content: bytes) -> None:
    import urllib.request

    url = f"http://127.0.0.1:{server._api._httpd.server_port}/models/llama/{name}"
    urllib.request.urlopen(urllib.request.Request(url, content, method="PUT")).close()


def test_s3_is_the_same_checkpoint(
    s3: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder, an index, a file, and a conversion; no key is logged."""
    caplog.set_level(logging.DEBUG)
    for path in ("llama/", "llama/model.safetensors.index.json"):
        assert loaded(f"s3://models/{path}") == loaded(folder)
    name = open_checkpoint(folder).shards[0].path.name
    assert loaded(f"s3://models/llama/{name}") == loaded(folder / name)
    streamload.convert("s3://models/llama/", tmp_path / "out", progress=False)
    assert loaded(tmp_path / "out") == loaded(folder)
    assert "caNaRy5" not in caplog.text


def test_s3_has_many_objects(s3: Any, folder: Path) -> None:
    """A listing of several pages, an empty object and odd names."""
    for number in range(2100):
        s3.put_object(Bucket="models", Key=f"llama/logs/a b%#ü+{number}", Body=b"")
    assert loaded("s3://models/llama/") == loaded(folder)
    s3.put_object(Bucket="models", Key="llama/a b%#ü+/x.safetensors", Body=b"")
    error = error_of(lambda: open_checkpoint("s3://models/llama/a%20b%25%23%C3%BC+/x.safetensors"))
    assert "no such file" not in str(error)


def test_s3_errors(s3: Any, folder: Path) -> None:
    """A bucket or a key that is missing, a file that is replaced or removed under way."""
    assert "NoSuchBucket" in str(error_of(lambda: open_checkpoint("s3://other/llama/")))
    assert "NoSuchKey" in str(error_of(lambda: open_checkpoint("s3://models/a.safetensors")))
    assert "an empty folder" in str(error_of(lambda: open_checkpoint("s3://models/other/")))
    checkpoint = open_checkpoint("s3://models/llama/")
    key = f"llama/{checkpoint.shards[0].path.name}"
    whole = s3.get_object(Bucket="models", Key=key)["Body"].read()
    s3.put_object(Bucket="models", Key=key, Body=whole[:-1] + b"x")
    error = error_of(lambda: loaded(checkpoint))
    assert "has changed since its header was read" in str(error)
    assert "412 Precondition Failed" in str(error)
    s3.delete_object(Bucket="models", Key=key)
    assert isinstance(error_of(lambda: loaded(checkpoint)), ShardNotFoundError)


def test_a_profile_is_found_by_boto3(
    s3: Any,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keys and region of a profile in ~/.aws; a profile that is missing, and one without keys."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "credentials").write_text(
        f"[mine]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    )
    (tmp_path / "config").write_text("[profile mine]\nregion = us-east-1\n[profile bare]\n")
    for name in ("credentials", "config"):
        variable = "AWS_SHARED_CREDENTIALS_FILE" if name == "credentials" else "AWS_CONFIG_FILE"
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert loaded("s3://models/llama/") == loaded(folder)
    for name, found in (("other", "settings in the environment"), ("bare", "no credentials")):
        monkeypatch.setenv("AWS_PROFILE", name)
        error = error_of(lambda: open_checkpoint("s3://models/llama/"))
        assert found in str(error) and "AWS_ACCESS_KEY_ID" in str(error)
    assert "caNaRy5" not in caplog.text


def test_google_cloud_storage_is_the_same_checkpoint(gcs: Any, folder: Path) -> None:
    """By its index and by a file; a missing one, and one that is replaced under way."""
    index = "gs://models/llama/model.safetensors.index.json"
    assert loaded(index) == loaded(folder)
    checkpoint = open_checkpoint(index)
    name = checkpoint.shards[0].path.name
    assert loaded(f"gs://models/llama/{name}") == loaded(folder / name)
    assert isinstance(
        error_of(lambda: open_checkpoint("gs://models/llama/a.safetensors")), ShardNotFoundError
    )
    put(gcs, name, (folder / name).read_bytes()[:-1] + b"x")
    assert "has changed since" in str(error_of(lambda: loaded(checkpoint)))
