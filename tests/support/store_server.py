"""A bucket of an object store on the loopback server, which can be told to do everything wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import numpy as np
import pytest
from remote_server import Answer, Handler, Site, serve

import streamload
from streamload.errors import CheckpointError

BUCKET = "/models"
FOLDER = "/models/llama/"
SECRET = "caNaRy5"

#: Environment variables of the three kinds of stores, without credentials.
_ENVIRONMENT = {
    "AWS_ENDPOINT_URL": "{}",
    "AWS_ALLOW_HTTP": "true",
    "AWS_SKIP_SIGNATURE": "true",
    "GOOGLE_BASE_URL": "{}",
    "GOOGLE_ALLOW_HTTP": "true",
    "GOOGLE_SKIP_SIGNATURE": "true",
    "AZURE_STORAGE_ENDPOINT": "{}",
    "AZURE_STORAGE_ACCOUNT_NAME": "account",
    "AZURE_ALLOW_HTTP": "true",
    "AZURE_SKIP_SIGNATURE": "true",
}


def set_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Name the endpoint of all stores, and leave nothing of the machine's own settings."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE", "REGION"):
        patch.delenv(f"AWS_{name}", raising=False)
    for name, value in _ENVIRONMENT.items():
        patch.setenv(name, value.format(endpoint.rstrip("/")))


class Listing:
    """Lists a bucket as S3 and Google Cloud Storage do, two objects to a page."""

    def __call__(self, handler: Handler, content: bytes) -> None:
        query = {k: v[0] for k, v in parse_qs(handler.path.partition("?")[2]).items()}
        files = handler.server.site.files
        keys = sorted(path.removeprefix(BUCKET + "/") for path in files)
        keys = [key for key in keys if key.startswith(query.get("prefix", ""))]
        first = int(query.get("continuation-token", 0))
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(files[f'{BUCKET}/{key}'])}</Size>"
            "<LastModified>2023-11-20T19:24:27.000Z</LastModified></Contents>"
            for key in keys[first : first + 2]
        )
        if first + 2 < len(keys):
            found += f"<NextContinuationToken>{first + 2}</NextContinuationToken>"
        body = f"<ListBucketResult>{found}</ListBucketResult>".encode()
        Answer(200, ranges=False, body=body)(handler, content)


def refused(status: int, code: str) -> Answer:
    """Refuse a request as S3 does, with a key and a signature in the body."""
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>"
    return Answer(status, ranges=False, body=body.encode())


def error_of(call: Callable[[], object]) -> CheckpointError:
    """The error of a call, which shows no secret in any part of its traceback."""
    with pytest.raises(CheckpointError) as caught:
        call()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    return caught.value


def loaded(path: str | Path) -> dict[str, bytes]:
    options: dict[str, Any] = {"chunk_nbytes": 2**18, "progress": False}
    report = streamload.load_state_dict(None, path, device="host", **options)
    return {name: np.asarray(each).tobytes() for name, each in report.state_dict.items()}


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    files = {
        FOLDER + path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    with serve(files) as site:
        site.always[BUCKET] = Listing()
        set_environment(monkeypatch, site.url)
        yield site
