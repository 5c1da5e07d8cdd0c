"""Servers that keep a client waiting, in every phase of a request: a deadline or a stop ends it."""

from __future__ import annotations

import os
import queue
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import needs
import pytest
from remote_server import (
    Act,
    Answer,
    Drip,
    Handler,
    RawSite,
    Redirect,
    etag,
    full,
    make_certificate,
    no_proxy,
    patiently,
    serve,
    serve_raw,
)
from safetensors_files import write_safetensors

from streamload.core.location import Url
from streamload.errors import CheckpointError
from streamload.files.remote import HttpReader, Patience

needs.module("httpx2")

__all__ = ["no_proxy"]

NBYTES = 200_000
FOREVER = 20.0  # seconds, to which no wait may come
BRIEF = Patience(connect_seconds=0.4, read_seconds=0.4, tries=1)
LONG = Patience(connect_seconds=60, read_seconds=60, tries=1)


@dataclass(frozen=True, slots=True)
class Phase:
    act: Drip  # what it does
    reason: str  # what the error says
    scheme: str = "http"  # of the URL
    proxy: bool = False  # whether it is a proxy


PART = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-199999/200000\r\n"
    b"Content-Length: 200000\r\n\r\n"
)
CHUNKED = PART.replace(b"Content-Length: 200000", b"Transfer-Encoding: chunked")
LONG_BODY = b"\r\nContent-Length: 9000\r\n\r\n"
#: A record of TLS that is announced as 16 KiB.
RECORD = b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc\x03\x03"

PHASES = {
    "silence": Phase(Drip(), "no answer within 0.4 s"),
    "head": Phase(Drip(b"HTTP/1.1 206 OK\r\nX: ", again=b"y"), "no answer within 0.4 s"),
    "interim": Phase(Drip(again=b"HTTP/1.1 100 Continue\r\n\r\n"), "no answer within 0.4 s"),
    "error body": Phase(
        Drip(b"HTTP/1.1 500 No" + LONG_BODY, again=b"x"), "500 Internal Server Error"
    ),
    "redirect": Phase(
        Drip(b"HTTP/1.1 302 Found\r\nLocation: /f" + LONG_BODY, again=b"x"),
        "no answer within 0.4 s",
    ),
    "body": Phase(Drip(PART, again=b"x"), "bytes in 0.8 s"),
    "stall": Phase(Drip(PART + b"x" * 1000), "nothing came for 0.4 s"),
    "burst": Phase(Drip(PART + b"x" * 60_000, again=b"x"), "bytes in 0.8 s"),
    "chunk": Phase(Drip(CHUNKED + b"9;", again=b"x"), "bytes in 0.8 s"),
    "handshake": Phase(Drip(slowly=RECORD, again=b"x"), "no ", scheme="https"),
    "no handshake": Phase(Drip(), "no ", scheme="https"),
    "proxy": Phase(Drip(again=b"HTTP/1.1 100 Continue\r\n\r\n"), "no answer", "https", proxy=True),
    "proxied": Phase(
        Drip(b"HTTP/1.1 200 OK\r\n\r\n", RECORD, b"x"), "no ", scheme="https", proxy=True
    ),
}
SIMILAR = ("body", "stall", "chunk", "no handshake", "proxied")  # to others that are tested first
STOPPED = ("silence", "interim", "error body", "stall", "handshake", "proxy", "proxied")


@pytest.fixture
def in_phase(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], tuple[RawSite, Url]]]:
    """Starts a server that keeps its clients waiting; gives it and a URL of it."""
    with ExitStack() as stack:

        def start(name: str) -> tuple[RawSite, Url]:
            phase = PHASES[name]
            site = stack.enter_context(serve_raw(phase.act))
            if phase.proxy:
                monkeypatch.setenv("HTTPS_PROXY", site.url)
                return site, Url.parse("https://there.example/f")
            return site, Url.parse(site.url.replace("http", phase.scheme) + "f")

        yield start


def read(reader: HttpReader) -> Exception | None:
    try:
        reader.read_into(0, memoryview(bytearray(NBYTES)))
    except CheckpointError as error:
        return error
    return None


def begin(reader: HttpReader) -> Callable[[], Exception | None]:
    """Read the file in another thread; the call waits for its error, and not for ever."""
    found: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(read(reader)), daemon=True).start()
    return lambda: found.get(timeout=FOREVER)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SIMILAR)) for n in PHASES]
)
def test_a_try_has_one_deadline(in_phase: Callable[[str], tuple[RawSite, Url]], name: str) -> None:
    """A server that sends a byte now and then holds no phase of a request beyond it."""
    _, url = in_phase(name)
    with patiently(BRIEF, HttpReader, url, NBYTES) as reader:
        error = begin(reader)()
    assert PHASES[name].reason in str(error)
    assert "in 1 try: " in str(error)


@pytest.mark.parametrize("name", STOPPED)
def test_a_stop_wakes_every_phase(
    in_phase: Callable[[str], tuple[RawSite, Url]], name: str
) -> None:
    site, url = in_phase(name)
    with patiently(LONG, HttpReader, url, NBYTES) as reader:
        error = begin(reader)
        assert site.reached.wait(FOREVER)
        reader.stop()
        assert "reading was stopped" in str(error())


def test_no_connection_is_waited_for_beyond_the_deadline() -> None:
    with full() as port:
        url = Url.parse(f"http://127.0.0.1:{port}/f")
        with patiently(BRIEF, HttpReader, url, NBYTES) as reader:
            assert "no connection within 0.4 s" in str(read(reader))
        with patiently(LONG, HttpReader, url, NBYTES) as reader:
            error = begin(reader)
            time.sleep(0.3)  # nothing shows that it has begun
            reader.stop()
            assert "reading was stopped" in str(error())


def test_a_proxy_of_tls_that_drips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS in TLS, whose records may come in any number of pieces, has the deadline and the stop."""
    certificate, key = make_certificate(tmp_path, "127.0.0.1", "IP")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    inside = Drip(b"HTTP/1.1 200 OK\r\n\r\n", RECORD, b"x")

    def act(site: RawSite, connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as outer:
            inside(site, outer)

    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serve_raw(act) as site:
        monkeypatch.setenv("HTTPS_PROXY", site.url.replace("http", "https"))
        url = Url.parse("https://there.example/f")
        with patiently(BRIEF, HttpReader, url, NBYTES) as reader:
            assert "in 1 try: no " in str(begin(reader)())
        site.reached.clear()
        with patiently(LONG, HttpReader, url, NBYTES) as reader:
            error = begin(reader)
            assert site.reached.wait(FOREVER)
            reader.stop()
            assert "reading was stopped" in str(error())


@pytest.mark.parametrize("kind", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X: y\r\n"])
def test_headers_that_do_not_end_are_one_error_at_once(kind: bytes) -> None:
    """A server that never stops sending them is not listened to until the deadline."""
    head = b"" if kind.startswith(b"HTTP") else b"HTTP/1.1 206 OK\r\n"
    with serve_raw(Drip(head, again=kind * 1000, seconds=0)) as site:
        url = Url.parse(site.url + "f")
        with patiently(Patience(read_seconds=60, tries=1), HttpReader, url, NBYTES) as reader:
            begun = time.process_time()
            error = begin(reader)()
            burnt = time.process_time() - begun
    assert isinstance(error, CheckpointError)
    assert len(site.requests) == 1
    assert burnt < 5  # of 60 seconds


def test_a_slow_line_that_gets_on_is_no_stall() -> None:
    """A body of 1 KiB a second or more comes whole, though it takes many times the timeout."""
    whole = os.urandom(NBYTES)

    def slowly(site: RawSite, connection: socket.socket) -> None:
        connection.recv(2**16)
        connection.sendall(PART)
        for at in range(0, NBYTES, NBYTES // 20):
            connection.sendall(whole[at : at + NBYTES // 20])
            if site.stopped.wait(0.06):
                return

    out = bytearray(NBYTES)
    with (
        serve_raw(slowly) as site,
        patiently(BRIEF, HttpReader, Url.parse(site.url + "f"), NBYTES) as reader,
    ):
        reader.read_into(0, memoryview(out))
    assert out == whole


def test_time_that_the_caller_takes_is_not_the_servers() -> None:
    """A body is not cut off because what it is written to was slow."""

    class Slow:
        def seek(self, at: int) -> None: ...
        def truncate(self) -> None: ...
        def write(self, data: bytes) -> None:
            sizes.append(len(data))
            time.sleep(0.3)

    from streamload.files.remote import download

    sizes: list[int] = []
    with serve({"/f": os.urandom(NBYTES)}) as site:
        patience = Patience(read_seconds=0.2, tries=1)
        patiently(patience, download, Url.parse(site.url + "f"), Slow(), NBYTES)  # type: ignore[arg-type]
    assert sum(sizes) == NBYTES


def test_an_end_that_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a body whose bytes are all there, the mark of its end is not insisted on."""
    body = os.urandom(NBYTES)
    with serve_raw(Drip(CHUNKED + b"%x\r\n" % NBYTES + body + b"\r\n")) as site:
        out = bytearray(NBYTES)
        with patiently(BRIEF, HttpReader, Url.parse(site.url + "f"), NBYTES) as reader:
            reader.read_into(0, memoryview(out))
    assert out == body
    assert len(site.requests) == 1


def test_a_stop_leaves_the_connections_of_others(tmp_path: Path) -> None:
    whole = os.urandom(NBYTES)
    with serve({"/f": whole}) as site:
        url = Url.parse(site.url + "f").of_version(f'ETag: "{etag(whole)}"')
        site.acts["/f"].extend([Answer(), Answer(stall=1000)])
        one, other = (
            patiently(LONG, HttpReader, url, NBYTES),
            patiently(LONG, HttpReader, url, NBYTES),
        )
        one.read_into(0, memoryview(bytearray(10)))
        error = begin(other)
        while len(site.requests) < 2:
            time.sleep(0.001)
        assert site.connections == 1
        one.close()
        time.sleep(0.2)
        assert site.open_connections == 1
        other.close()
        assert "reading was stopped" in str(error())


# -- Ctrl-C ----------------------------------------------------------------------------------------

PROGRAM = """
    import sys, time
    import streamload
    from streamload.files.connections import connections
    import httpx2, httpcore2
    try:
        checkpoint = streamload.open_checkpoint(sys.argv[1]) if sys.argv[2] == "load" else None
        print("ready", flush=True)
        sys.stdin.readline()
        begun = time.process_time()
        if checkpoint is None:
            streamload.open_checkpoint(sys.argv[1])
        options = {"device": "host"}
        if "CL" in sys.argv:
            options = {"device": "CL", "dtype": "float32", "cast": "device"}
        streamload.load_state_dict(None, checkpoint, progress=False, **options)
    except KeyboardInterrupt:
        print("interrupted", time.process_time() - begun)
"""


def interrupted(
    url: str, what: str, ready: Callable[[], None], reached: threading.Event, device: str = ""
) -> float:
    """Interrupt a process that reads; the seconds of CPU time that it took while it waited."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), url, what, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        ready()
        process.stdin.write("\n")
        process.stdin.flush()
        assert reached.wait(FOREVER)
        time.sleep(1.0)  # so that it waits, and what it burns is seen
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5)
    finally:
        process.kill()
    assert process.returncode == 0, err
    word, seconds = out.split()
    assert word == "interrupted"
    return float(seconds)


@pytest.mark.parametrize(
    "name",
    [
        "interim",
        *[pytest.param(name, marks=pytest.mark.slow) for name in PHASES if name != "interim"],
    ],
)
def test_ctrl_c_ends_every_phase(in_phase: Callable[[str], tuple[RawSite, Url]], name: str) -> None:
    """Of headers that the main thread reads: within seconds, and no core was burnt meanwhile."""
    site, url = in_phase(name)
    assert interrupted(url.href, "open", lambda: None, site.reached) < 1


@pytest.mark.slow
def test_ctrl_c_ends_a_connection_that_is_not_there() -> None:
    reached = threading.Event()
    with full() as port:
        url = f"http://127.0.0.1:{port}/f"
        assert interrupted(url, "open", reached.set, reached) < 1


ACTS: dict[str, Act] = {
    "error body": Answer(
        dribble=0.05, status=503, headers={"Content-Length": "9000"}, body=b"x" * 99
    ),
    "body": Answer(stall=10),
    "later": Answer(503, {"Retry-After": "100"}, body=b"later"),
    "redirect": Redirect("/never"),
}


@pytest.mark.parametrize(
    "name",
    ["body", *[pytest.param(name, marks=pytest.mark.slow) for name in ACTS if name != "body"]],
)
def test_ctrl_c_ends_a_load(tmp_path: Path, name: str) -> None:
    path = write_safetensors(tmp_path / "f.safetensors", {"a": ("U8", [NBYTES], bytes(NBYTES))})
    with serve({"/f.safetensors": path.read_bytes()}) as site:
        reached = threading.Event()

        def hang(handler: Handler, data: bytes) -> None:
            site.stopped.wait()

        def ready() -> None:
            act = ACTS[name]

            def then(handler: Handler, data: bytes) -> None:
                reached.set()
                act(handler, data)

            site.always["/f.safetensors"] = then
            site.always["/never"] = hang

        assert interrupted(site.url + "f.safetensors", "load", ready, reached) < 1


@pytest.mark.slow
def test_ctrl_c_ends_a_load_of_one_thread(tmp_path: Path) -> None:
    """Also where the main thread reads, since the device is that thread's alone."""
    needs.device("CL")
    path = write_safetensors(tmp_path / "f.safetensors", {"a": ("BF16", [8, 1000], bytes(16_000))})
    with serve({"/f.safetensors": path.read_bytes()}) as site:
        reached = threading.Event()

        def wait(handler: Handler, data: bytes) -> None:
            reached.set()
            Answer(stall=10)(handler, data)

        def ready() -> None:
            site.always["/f.safetensors"] = wait

        interrupted(site.url + "f.safetensors", "load", ready, reached, "CL")
