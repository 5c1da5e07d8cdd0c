"""Connections of the HTTP library: each try has one deadline, can be stopped, and logs nothing.

The library restarts its timeout at every read of a socket, so that a byte now and then holds a
request for ever. It does not name the socket of a request before a response arrives. And it logs
whole URLs and headers. Here each thread registers its try, which its connections and the library's
loggers ask.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

# Of one answer: the library's limit for a single header line, with what may follow it, is less.
_MOST_HEAD_NBYTES = 2**18
_LOGGERS = ("httpx", "httpcore", "h11")  # what names of loggers begin with

_thread = threading.local()  # attempt: the one that the thread is at
_owning = threading.Lock()


class OverdueError(Exception):
    """A try has had its time."""


class StoppedError(Exception):
    """The answer is not wanted any more."""


class EndlessError(Exception):
    """An answer's headers do not end."""


class SettingsError(Exception):
    """The library cannot be set up with the environment's proxy or certificates."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and tries of requests.

    Attributes:
        connect_seconds: for a connection, to each of a host's addresses.
        read_seconds: from the name's resolution to the last header, with all redirects; and then
            for the next bytes of the body. Its rate is 1 KiB a second or more, on average of twice
            as many seconds.
        tries: how many in a row may fail to progress with a range.
        backoff_seconds: before the second try; doubled before each after it, less up to a half at
            random, so that many clients do not come back together.
        most_backoff_seconds: the most of that.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    tries: int = 6
    backoff_seconds: float = 0.5
    most_backoff_seconds: float = 30.0

    @classmethod
    def from_environment(cls) -> Patience:
        """Read ``STREAMLOAD_HTTP_TIMEOUT`` (seconds) and ``STREAMLOAD_HTTP_TRIES``."""
        usual = cls()
        seconds = _setting("STREAMLOAD_HTTP_TIMEOUT", usual.read_seconds)
        tries = _setting("STREAMLOAD_HTTP_TRIES", usual.tries)
        return cls(min(usual.connect_seconds, seconds), seconds, math.ceil(tries))


def _setting(name: str, usual: float) -> float:
    text = os.environ.get(name) or str(usual)
    with suppress(ValueError):
        value = float(text)
        if 0 < value < math.inf:
            return value
    raise ValueError(f"{name} is a number above 0, not {text!r}")


class Attempt:
    """One try at a request, redirects included."""

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        self.until = time.monotonic() + seconds  # its deadline
        self.overdue = f"no answer within {seconds:g} s"  # the reason after it
        self._seconds = seconds
        self._stopped = stopped
        self._head_nbytes: int | None = None
        self._connection: _Connection | None = None
        self._connecting: Future[Any] | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Connections that this thread uses in the block ask this try."""
        _thread.attempt = self
        try:
            yield
        finally:
            _thread.attempt = None

    @contextmanager
    def head(self) -> Iterator[None]:
        """Bound the length of the head that is received in the block."""
        self._head_nbytes = 0
        yield
        self._head_nbytes = None

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Bound the time of the block."""
        until, self.until = self.until, min(self.until, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.until = until

    def left(self, most: float | None = None) -> float:
        """Seconds left to wait, at most ``most``; raises StoppedError or OverdueError for none."""
        if self._stopped.is_set():
            raise StoppedError
        left = self.until - time.monotonic()
        if left <= 0:
            raise OverdueError
        return left if most is None else min(left, most)

    def wake(self) -> None:
        """Wake the thread that waits for this try after it was stopped."""
        with _owning:
            if self._connecting is not None:
                self._connecting.cancel()
            if self._connection is not None and self._connection.owner is self:
                self._connection.shut_down()

    def received(self, nbytes: int) -> None:
        """Count received bytes; EndlessError if headers do not end."""
        if self._head_nbytes is not None:
            self._head_nbytes += nbytes
            if self._head_nbytes > _MOST_HEAD_NBYTES:
                raise EndlessError

    def take(self, connection: _Connection) -> None:
        """Make this try the only one that wakes a connection."""
        if connection.owner is not self:
            with _owning:
                connection.owner, self._connection = self, connection

    def connect(self, future: Future[Any]) -> Any:
        """Wait for a connection; it is closed if it comes too late."""
        with _owning:
            self._connecting = future
        try:
            return future.result(self.left())
        except BaseException as error:
            if not future.cancel() and future.exception() is None:  # it came just now
                future.result().close()
            if isinstance(error, TimeoutError):
                self.overdue = f"no connection within {self._seconds:g} s"
                raise OverdueError from None
            raise
        finally:
            self._connecting = None


class _Backend:
    """Connects in place of the library's own backend."""

    def connect_tcp(self, host: str, port: int, timeout: float | None, **options: Any) -> Any:
        """Resolve a name and connect, in a thread: neither can be interrupted."""
        attempt: Attempt = _thread.attempt
        future: Future[Any] = Future()
        seconds = attempt.left(timeout)

        def connect() -> None:
            try:
                stream = _httpcore().SyncBackend().connect_tcp(host, port, seconds, **options)
            except Exception as error:
                with suppress(InvalidStateError):  # no thread waits any more
                    future.set_exception(error)
                return
            try:
                future.set_result(stream)
            except InvalidStateError:
                stream.close()

        try:
            threading.Thread(target=connect, name="streamload-connect", daemon=True).start()
        except RuntimeError:  # no more threads under this limit
            connect()
        return _Connection(attempt.connect(future))


class _Connection:
    """A connection of the library; it waits as long as the try of its thread may."""

    def __init__(self, stream: Any) -> None:
        self.owner: Attempt | None = None  # the last try that used it
        self._stream = stream
        # another object for the same connection: TLS takes the first one's descriptor away
        self._handle = stream.get_extra_info("socket").dup()
        self._wrapped = 0  # in how many layers of TLS

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive some bytes; none at the end."""
        attempt = self._taken()
        with self._bounded(attempt.left(timeout)) as seconds:
            data: bytes = self._stream.read(max_bytes, seconds)
        attempt.received(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of it."""
        with self._bounded(self._taken().left(timeout)) as seconds:
            self._stream.write(buffer, seconds)

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _Connection:
        """Encrypt all that follows."""
        self._wrapped += 1
        try:
            with self._bounded(self._taken().left(timeout)) as seconds:
                self._stream = self._stream.start_tls(ssl_context, server_hostname, seconds)
        except BaseException:
            self.close()  # the library does not
            raise
        return self

    def close(self) -> None:
        """Close it."""
        with _owning:  # `shut_down` must not meet another file of the same number
            self._handle.close()
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        """See the library."""
        return self._stream.get_extra_info(info)

    def shut_down(self) -> None:
        """Wake the thread that waits for it."""
        with suppress(OSError):  # it is closed already, on one side or the other
            self._handle.shutdown(socket.SHUT_RDWR)

    def _taken(self) -> Attempt:
        attempt: Attempt = _thread.attempt
        attempt.take(self)
        return attempt

    @contextmanager
    def _bounded(self, seconds: float) -> Iterator[float]:
        """Shut the connection down after so many seconds.

        In TLS in TLS, of an https proxy, the library restarts its timeout at each piece.
        """
        if self._wrapped < 2:
            yield seconds
            return
        timer = threading.Timer(seconds, self.shut_down)
        timer.daemon = True
        timer.start()
        try:
            yield seconds
        finally:
            timer.cancel()


class Pool:
    """One client for all readers of the process, while there are any. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._client: Any = None
        self._pid = 0

    def enter(self) -> None:
        """Count one more user of the client."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count one user less; the last one closes all connections."""
        with self._lock:
            self._users -= 1
            if self._users or self._client is None:
                return
            client, self._client = self._client, None
        if self._pid == os.getpid():
            client.close()

    def client(self) -> Any:
        """The client, created by the first call; SettingsError for the environment's proxies."""
        with self._lock:
            if self._client is None or self._pid != os.getpid():  # a child shares no connections
                # many threads keep as many connections; idle ones go with the last reader
                library = httpx()
                limits = library.Limits(max_connections=None, max_keepalive_connections=None)
                # no cookies: one that cannot be sent back would end all requests after it
                jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
                try:
                    client = library.Client(verify=_tls(), limits=limits, cookies=jar)
                except (ValueError, OSError, ImportError, library.InvalidURL) as error:
                    raise SettingsError from error
                # it takes a backend by no argument; one transport is each proxy's
                for transport in (client._transport, *client._mounts.values()):
                    if transport is not None:
                        transport._pool._network_backend = _Backend()
                _hush()
                self._client, self._pid = client, os.getpid()
            return self._client


def _hush() -> None:
    """Keep the library's log records of our requests, and only of ours, out of all logs."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_LOGGERS):
            logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return getattr(_thread, "attempt", None) is None


@cache
def _tls() -> ssl.SSLContext:
    """Read once: certificates take longer to read than a header."""
    context: ssl.SSLContext = httpx().create_ssl_context()
    return context


@cache
def httpx() -> Any:
    """The HTTP library."""
    import httpx2

    _httpcore()
    return httpx2


@cache
def _httpcore() -> Any:
    import httpcore2

    return httpcore2


def cause_of(error: BaseException | None) -> OSError | None:
    """The error of the operating system or TLS behind one of the HTTP library."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def lasting(error: Exception, cause: OSError | None) -> str:
    """An error of a request that no other try would change, in words; "" for others."""
    library = httpx()
    if isinstance(error, library.UnsupportedProtocol):
        return "a redirect to something else than HTTP"
    if isinstance(error, EndlessError):
        return "an answer whose headers do not end"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate is not to be trusted: {cause.verify_message}"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "there is no such host"
    if isinstance(error, SettingsError):
        return "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE cannot be used as they are"
    if isinstance(error, library.LocalProtocolError | library.InvalidURL | UnicodeError):
        return "a request that cannot be sent"
    if cause is None and not isinstance(error, library.HTTPError):
        return f"{type(error).__name__} in the HTTP library"
    return ""
