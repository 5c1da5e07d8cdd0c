"""A server of files on this machine that can be told to do everything wrong."""

from __future__ import annotations

import email.utils
import hashlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import needs
import pytest
from range_server import RangeHandler

from streamload.files.connections import Patience

T = TypeVar("T")

Act = Callable[["Handler", bytes], None]

MTIME = 1_700_000_000


@lru_cache
def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def modified(content: bytes) -> str:
    return email.utils.formatdate(MTIME + int(etag(content), 16) % 10**6, usegmt=True)


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    range: tuple[int, int] | None  # stop is exclusive
    port: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """Ranges of the file as they should be, but for what is stated."""

    status: int | None = None  # another status than 206 or 200
    # instead of its own; None leaves one out
    headers: Mapping[str, str | None] = field(default_factory=dict)
    ranges: bool = True  # whether Range is looked at
    cut: int | None = None  # bytes of the body after which the connection ends
    reset: bool = False  # whether it ends by a reset
    stall: int | None = None  # bytes of the body after which nothing more comes
    # most bytes of a body, as some servers have it; the headers are of that range
    piece: int | None = None
    body: bytes | None = field(default=None, repr=False)  # another body
    dribble: float | None = None  # one byte of the body at a time, this many seconds apart

    def __call__(self, handler: Handler, content: bytes) -> None:
        wanted = handler.wanted if self.ranges else None
        total = len(content)
        headers: dict[str, str | None] = {
            "ETag": f'"{etag(content)}"',
            "Last-Modified": modified(content),
        }
        if wanted is None:
            status, body = 200, content
        elif wanted[0] >= total:
            status, body = 416, b"that is not there"
            headers["Content-Range"] = f"bytes */{total}"
        else:
            stop = min(wanted[1], total, wanted[0] + (self.piece or total))
            status, body = 206, content[wanted[0] : stop]
            headers["Content-Range"] = f"bytes {wanted[0]}-{stop - 1}/{total}"
        body = body if self.body is None else self.body
        handler.send_response(self.status or status)
        for name, value in (headers | {"Content-Length": str(len(body))} | self.headers).items():
            if value is not None:
                handler.send_header(name, value)
        handler.end_headers()
        handler.send_body(self, body)


@dataclass(frozen=True, slots=True)
class Redirect:
    """To another address, with a few words."""

    location: str
    status: int = 302

    def __call__(self, handler: Handler, content: bytes) -> None:
        Answer(self.status, {"Location": self.location}, ranges=False, body=b"over there")(
            handler, content
        )


class Handler(RangeHandler):
    """One connection."""

    server: _Server

    def do_GET(self) -> None:
        site = self.server.site
        port = self.client_address[1]
        with site.lock:
            site.requests.append(Request(self.path, self.wanted, port, dict(self.headers)))
            name = self.path.partition("?")[0]
            acts = site.acts[name]
            act = acts.popleft() if acts else site.always.get(name, Answer())
        content = site.files.get(name, site.files.get(unquote(name)))
        if content is None and isinstance(act, Answer) and act.status is None:
            act = Answer(404, ranges=False, body=b"no")
        act(self, content or b"")

    do_HEAD = do_GET

    def send_body(self, answer: Answer, body: bytes) -> None:
        """Send a body, or a part of it; nothing to who asked for the headers."""
        if self.command == "HEAD":
            return
        stopped = self.server.site.stopped
        if answer.dribble is not None:
            for index in range(len(body)):
                if stopped.wait(answer.dribble):
                    return
                self.wfile.write(body[index : index + 1])
        elif answer.cut is not None:
            self.wfile.write(body[: answer.cut])
            self.wfile.flush()
            if answer.reset:  # by closing it with no time to linger
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
        elif answer.stall is not None:
            self.wfile.write(body[: answer.stall])
            self.wfile.flush()
            stopped.wait()
            self.close_connection = True
        else:
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32
    site: Site

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is none."""

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            super().finish_request(request, client_address)
        finally:
            with self.site.lock:
                self.site.open_connections -= 1
                self.site.lock.notify_all()

    def shutdown_request(self, request: Any) -> None:
        """Close it, and not its sending side first, after which there is no reset."""
        self.close_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.site.lock:
            self.site.open_connections += 1
            self.site.connections += 1
        super().process_request(request, client_address)


class Site:
    def __init__(self, url: str, files: Mapping[str, bytes]) -> None:
        self.url = url
        self.files = dict(files)  # by path, from "/" on
        self.acts: defaultdict[str, deque[Act]] = defaultdict(deque)  # by path, in order
        self.always: dict[str, Act] = {}  # by path, after those
        self.requests: list[Request] = []  # in the order in which they came
        self.connections = self.open_connections = 0
        self.lock = threading.Condition()
        self.stopped = threading.Event()

    def asked(self, path: str) -> list[tuple[int, int] | None]:
        return [request.range for request in self.requests if request.path == path]

    def wait_until_left(self) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: not self.open_connections, timeout=10)


class _Proxy(Handler):
    """A proxy that is itself the server behind it, whichever that is."""

    server: _TlsServer

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with self.server.tls.wrap_socket(self.connection, server_side=True) as connection:
            Handler(connection, self.client_address, self.server)


class _TlsServer(_Server):
    tls: ssl.SSLContext


@contextmanager
def tls_proxy(certificate: Path, key: Path) -> Iterator[tuple[str, Site]]:
    """A proxy's URL, and what it shows as the files of every https server."""
    server = _TlsServer(("127.0.0.1", 0), _Proxy)
    server.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.tls.load_cert_chain(certificate, key)
    with _serving(server, {}) as site:
        yield site.url, site


@contextmanager
def serve(files: Mapping[str, bytes] | Path) -> Iterator[Site]:
    if isinstance(files, Path):
        files = {f"/{path.name}": path.read_bytes() for path in files.iterdir() if path.is_file()}
    with _serving(_Server(("127.0.0.1", 0), Handler), files) as site:
        yield site


@contextmanager
def _serving(server: _Server, files: Mapping[str, bytes]) -> Iterator[Site]:
    server.site = site = Site(f"http://127.0.0.1:{server.server_address[1]}/", files)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(slots=True)
class RawSite:
    """A server of bytes that need not be HTTP."""

    port: int  # where it listens
    # set when a client has got to where it is to wait
    reached: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)  # set when the server ends
    requests: list[bytes] = field(default_factory=list)  # what each client sent first

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@contextmanager
def serve_raw(act: Callable[[RawSite, socket.socket], None]) -> Iterator[RawSite]:
    """Have ``act`` treat each connection, in a thread of its own, until the client has gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        site = RawSite(listener.getsockname()[1])
        threads: list[threading.Thread] = []

        def treat(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                act(site, connection)

        def accept() -> None:
            with suppress(OSError):  # it is closed
                while True:
                    thread = threading.Thread(target=treat, args=listener.accept()[:1])
                    threads.append(thread)
                    thread.start()

        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield site
        finally:
            site.stopped.set()
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@dataclass(frozen=True, slots=True)
class Drip:
    """Some bytes at once, and others one by one or again and again, for ever."""

    begin: bytes = field(default=b"", repr=False)  # what is sent at once
    slowly: bytes = b""  # what is sent after that, byte by byte
    again: bytes = b""  # what is sent after that, without end; nothing: silence
    seconds: float = 0.05  # from one to the next; 0: as fast as it is taken

    def __call__(self, site: RawSite, connection: socket.socket) -> None:
        site.requests.append(connection.recv(2**16))
        connection.sendall(self.begin)
        site.reached.set()
        each = (self.slowly[i : i + 1] for i in range(len(self.slowly)))
        while not site.stopped.wait(self.seconds):
            if data := next(each, self.again):
                connection.sendall(data)
            elif not connection.recv(2**16):
                return


def make_certificate(folder: Path, host: str, kind: str = "DNS") -> tuple[Path, Path]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    if shutil.which("openssl") is None:
        needs.lacking("openssl is not installed")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={host}"),
            *("-addext", f"subjectAltName={kind}:{host}", "-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@contextmanager
def full() -> Iterator[int]:
    """A port that takes no connection, and refuses none: its queue is full."""
    with socket.socket() as listener, ExitStack() as held:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def patiently(patience: Patience, call: Callable[..., T], *arguments: object) -> T:
    """Call with other timeouts and tries than those of the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Patience, "from_environment", lambda: patience)
        return call(*arguments)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tries, and servers of this machine are asked directly, whatever its settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STREAMLOAD_HTTP_TRIES", "2")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this machine are asked directly, whatever the machine's settings."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    with serve(folder) as served:
        yield served
