"""The server of files that tests of clusters and `scripts/cluster` read from."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import needs
import pytest
import range_server
from range_server import Serving

import streamload

CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "data").write_bytes(CONTENT)
    (tmp_path / "secret").write_text("not served")
    return folder


@pytest.fixture
def serving(folder: Path) -> Iterator[Serving]:
    with closing(range_server.start(folder, ("127.0.0.1", 0))) as serving:
        yield serving


@pytest.fixture
def connection(serving: Serving) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(serving.url)
    with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as connection:
        yield connection


def _ask(
    connection: http.client.HTTPConnection, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    response = connection.getresponse()
    return response.status, response.read(), response.headers


def test_ranges_and_whole_files_come_over_one_connection(
    connection: http.client.HTTPConnection, serving: Serving
) -> None:
    """Ranges, what is past the end, and all of a file, with the same ETag; what was sent counts."""
    status, body, first = _ask(connection, "/data", Range="bytes=10-299")
    socket = connection.sock
    assert (status, body) == (206, CONTENT[10:300])
    assert first["Content-Range"] == f"bytes 10-299/{len(CONTENT)}"
    status, body, _ = _ask(connection, "/data", Range=f"bytes={len(CONTENT) - 5}-{2**40}")
    assert (status, body) == (206, CONTENT[-5:])
    status, body, last = _ask(connection, "/data")
    assert (status, body) == (200, CONTENT)
    assert first["ETag"] == last["ETag"]
    status, body, headers = _ask(connection, "/data", Range=f"bytes={len(CONTENT)}-{2**40}")
    assert (status, body, headers["Content-Range"]) == (416, b"", f"bytes */{len(CONTENT)}")
    status, body, headers = _ask(connection, "/data", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(CONTENT)))
    assert connection.sock is socket
    counts = serving.counts()
    assert counts.requests == 5
    assert counts.nbytes == 290 + 5 + len(CONTENT)
    end = len(CONTENT)
    assert counts.ranges == {"/data": [(10, 300), (end - 5, end), (0, end)]}


def test_a_file_that_has_changed_comes_whole(
    connection: http.client.HTTPConnection, folder: Path
) -> None:
    tag = _ask(connection, "/data", Range="bytes=0-0")[2]["ETag"]
    assert _ask(connection, "/data", Range="bytes=1-2", If_Range=tag)[:2] == (206, CONTENT[1:3])
    (folder / "data").write_bytes(b"something new")
    status, body, _ = _ask(connection, "/data", Range="bytes=1-2", If_Range=tag)
    assert (status, body) == (200, b"something new")


@pytest.mark.parametrize("path", ["/nothing", "/", "/../secret", "/%2e%2e/secret", "//../secret"])
def test_nothing_else_is_served(
    connection: http.client.HTTPConnection, serving: Serving, path: str
) -> None:
    assert _ask(connection, path)[0] == 404
    assert serving.counts().nbytes == 0


def test_one_file_is_served_alone(folder: Path) -> None:
    (folder / "other").write_text("x")
    with closing(range_server.start(folder / "data", ("127.0.0.1", 0))) as serving:
        parts = urlsplit(serving.url)
        with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as connection:
            assert _ask(connection, "/data", Range="bytes=0-2")[1] == CONTENT[:3]
            assert _ask(connection, "/other")[0] == 404


def test_many_clients_are_served_at_once(serving: Serving) -> None:
    parts = urlsplit(serving.url)
    count, nbytes = 14, len(CONTENT) // 16

    def read(index: int) -> bytes:
        start = index * nbytes
        with closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as connection:
            wanted = f"bytes={start}-{start + nbytes - 1}"
            return bytes(_ask(connection, "/data", Range=wanted)[1])

    with ThreadPoolExecutor(count) as pool:
        assert b"".join(pool.map(read, range(count))) == CONTENT[: count * nbytes]
    until = time.monotonic() + 20  # what was sent is counted when all of it was sent
    while serving.counts().nbytes < count * nbytes and time.monotonic() < until:
        time.sleep(0.01)
    assert serving.counts().nbytes == count * nbytes


def test_what_cannot_be_served_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere cannot be served"):
        range_server.start(tmp_path / "nowhere", ("127.0.0.1", 0))
    with closing(range_server.start(tmp_path, ("127.0.0.1", 0))) as serving:
        taken = urlsplit(serving.url).port
        assert taken
        with pytest.raises(OSError, match=f":{taken}: .*in use"):
            range_server.start(tmp_path, ("127.0.0.1", taken))


def test_a_checkpoint_is_loaded_from_it(
    tmp_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs.module("httpx2")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_checkpoint(1_000_000, shards=2)
    with closing(range_server.start(folder, ("127.0.0.1", 0))) as serving:
        checkpoint = streamload.open_checkpoint(serving.url)
        before = serving.counts()
        report = streamload.load_state_dict(None, checkpoint, device="host", progress=False)
        after = serving.counts()
    assert after.nbytes - before.nbytes == sum(t.nbytes for t in checkpoint.tensors.values())
    assert report.state_dict.keys() == checkpoint.tensors.keys()
