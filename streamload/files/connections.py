"""Connections of the HTTP library: each try has one deadline, can be stopped, and logs nothing.

The library gives every read of a socket the whole time again, so that a byte now and then holds a
request for ever. It does not tell which socket a request uses before a response is there. And it
logs whole URLs and headers. Here each thread says which try it makes, and its connections and the
library's loggers ask that try.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
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
    """Nobody wants the answer any more."""


class EndlessError(Exception):
    """An answer's headers do not end."""


class SettingsError(Exception):
    """The library cannot be set up as the environment says."""


class Attempt:
    """One try at a request, redirects included."""

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        self.until = time.monotonic() + seconds  # when it is over
        self.overdue = f"no answer within {seconds:g} s"  # what is said then
        self._seconds = seconds
        self._stopped = stopped
        self._head_nbytes: int | None = None
        self._connection: _Connection | None = None
        self._connecting: Future[Any] | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Connections that this thread uses meanwhile ask this try."""
        _thread.attempt = self
        try:
            yield
        finally:
            _thread.attempt = None

    @contextmanager
    def head(self) -> Iterator[None]:
        """A request is sent meanwhile and the head of its answer received, of a bounded length."""
        self._head_nbytes = 0
        yield
        self._head_nbytes = None

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Do something that is worth no more time than this."""
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
        """Wake the thread that waits for this try, which finds that it is stopped."""
        with _owning:
            if self._connecting is not None:
                self._connecting.cancel()
            if self._connection is not None and self._connection.owner is self:
                self._connection.shut_down()

    def received(self, nbytes: int) -> None:
        """Count what came; raises EndlessError where headers do not end."""
        if self._head_nbytes is not None:
            self._head_nbytes += nbytes
            if self._head_nbytes > _MOST_HEAD_NBYTES:
                raise EndlessError

    def take(self, connection: _Connection) -> None:
        """From now on only this try wakes a connection."""
        if connection.owner is not self:
            with _owning:
                connection.owner, self._connection = self, connection

    def connect(self, future: Future[Any]) -> Any:
        """Wait for a connection, which is closed if it comes too late."""
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
    """What connects, in place of the library's own."""

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
    """A connection of the library's, which waits as long as the try under way in its thread may."""

    def __init__(self, stream: Any) -> None:
        self.owner: Attempt | None = None  # the last try that used it
        self._stream = stream
        # another object for the same connection: TLS takes the first one's descriptor away
        self._handle = stream.get_extra_info("socket").dup()
        self._wrapped = 0  # in how many layers of TLS

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive something; nothing at the end."""
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
            self.close()  # the library takes it that this has been done
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
        """Shut the connection down after so many seconds, where the library would wait longer.

        Of TLS in TLS, which an https proxy makes, it gives each piece of a record the whole time.
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
        """The client, made when it is first asked for.

        Raises:
            SettingsError: the environment names a proxy or certificates that are none.
        """
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
    """Keep what the library would log of our requests, and only of ours, out of all logs."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_LOGGERS):
            logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return getattr(_thread, "attempt", None) is None


@cache
def _tls() -> ssl.SSLContext:
    """Certificates take longer to read than a header; they are shared by all connections."""
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
