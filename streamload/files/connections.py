"""Connections of the HTTP library: each try has one deadline, can be stopped, and logs nothing.

The library restarts its timeout at every read of a socket, so that a byte now and then holds a
request for ever. It does not name the socket of a request before a response arrives. And it logs
whole URLs and headers. Here each thread registers its current try; its connections take their
deadline from it, and log records of a thread with a try are dropped.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from http import HTTPStatus
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

from streamload.files.header import describe

T = TypeVar("T")


#: Bytes of a body per second; less is a stall.
LEAST_RATE = 1024
_MOST_HEAD_NBYTES = 2**18  # of all headers of one response
# prefixes of the names of loggers that show URLs
_LOGGERS = ("httpx", "httpcore", "h11", "huggingface_hub", "boto", "urllib3")

_thread = threading.local()  # attempt: the `Attempt` that this thread runs now, or None
_owning = threading.Lock()  # guards `_Connection.owner`, `Attempt.connection` and `_awaited`


class OverdueError(Exception):
    """Raised in the thread of a request whose deadline has passed."""


class StoppedError(Exception):
    """Raised in the thread of a request that `_File.stop` has cancelled."""


class EndlessError(Exception):
    """Raised if a response has more than 256 KiB of headers, or is longer than `Paced` allows."""


class CompressedError(Exception):
    """Raised if a response to a library's request is compressed, so that its length is unknown."""


class RequestError(Exception):
    """Raised for an error of a library's request, its cause: the library retries none."""


class SettingsError(Exception):
    """Raised if the HTTP library rejects the environment's proxy or certificate settings."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts and number of tries of HTTP requests.

    Attributes:
        connect_seconds: limit to connect to one address of a host.
        read_seconds: limit from resolving the host's name to the last header, redirects included;
            then for the next bytes of the body, whose rate must be at least 1 KiB a second on
            average over twice as many seconds.
        tries: consecutive tries without progress on a range before giving up.
        backoff_seconds: wait before the second try, doubled before each later one; up to half of it
            is subtracted at random so that many clients do not return together.
        most_backoff_seconds: upper bound of that wait.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    tries: int = 6
    backoff_seconds: float = 0.5
    most_backoff_seconds: float = 30.0

    @classmethod
    def from_environment(cls) -> Patience:
        """Return the defaults changed by ``STREAMLOAD_HTTP_TIMEOUT`` (seconds) and ``_TRIES``."""
        seconds = _setting("STREAMLOAD_HTTP_TIMEOUT", _USUAL.read_seconds)
        tries = _setting("STREAMLOAD_HTTP_TRIES", _USUAL.tries)
        return cls(min(_USUAL.connect_seconds, seconds), seconds, math.ceil(tries))

    def backoff(self, tried: int) -> float:
        """Return the most seconds to wait after so many tries."""
        return min(self.backoff_seconds * 2.0 ** (tried - 1), self.most_backoff_seconds)


_USUAL = Patience()


def _setting(name: str, usual: float) -> float:
    text = os.environ.get(name) or str(usual)
    with suppress(ValueError):
        value = float(text)
        if 0 < value < math.inf:
            return value
    raise ValueError(f"{name} is a number above 0, not {text!r}")


class Attempt:
    """One try at a request, redirects included; holds its deadline and cancels its waits."""

    def __init__(self, seconds: float, stopped: threading.Event) -> None:
        self.until = time.monotonic() + seconds  # deadline
        self.overdue = f"no answer within {seconds:g} s"  # error text once the deadline has passed
        self.connection: _Connection | None = None  # the last one that it used
        self._seconds = seconds
        self._stopped = stopped
        self.head_nbytes: int | None = None  # bytes of headers so far; None in a body
        self._awaited: Future[Any] | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Make this the calling thread's try inside the block; connections obey its deadline."""
        before, _thread.attempt = getattr(_thread, "attempt", None), self
        try:
            yield
        finally:
            _thread.attempt = before

    def sends(self) -> None:
        """Note that a request begins."""

    def came(self, nbytes: int) -> None:
        """Count bytes that came; raise EndlessError for long headers."""
        if self.head_nbytes is not None:
            self.head_nbytes += nbytes
            if self.head_nbytes > _MOST_HEAD_NBYTES:
                raise EndlessError

    def left(self, most: float | None = None) -> float:
        """Return the try's seconds left, at most ``most``; raise StoppedError or OverdueError."""
        if self._stopped.is_set():
            raise StoppedError
        left = self.until - time.monotonic()
        if left <= 0:
            raise OverdueError
        return left if most is None else min(left, most)

    def wake(self) -> None:
        """Wake the thread that waits in this try; called by the stopping thread."""
        with _owning:
            if self._awaited is not None:
                self._awaited.cancel()
            if self.connection is not None and self.connection.owner is self:
                self.connection.shut_down()

    def connect(self, future: Future[Any]) -> Any:
        """Return the stream that ``future`` connects; close it if it arrives after the deadline."""
        try:
            return self.wait(future)
        except BaseException as error:
            if not future.cancelled() and future.exception() is None:  # it came just now
                future.result().close()
            if isinstance(error, OverdueError):
                self.overdue = f"no connection within {self._seconds:g} s"
            raise

    def wait(self, future: Future[T]) -> T:
        """Return the result of ``future``, cancelled at the try's deadline or by `wake`."""
        with _owning:
            self._awaited = future
        try:
            return future.result(self.left())
        except TimeoutError:
            raise OverdueError from None
        finally:
            future.cancel()  # has no effect on one that is done
            self._awaited = None


class Paced(Attempt):
    """A call of a library that sends requests itself: all bytes that it awaits have a least rate.

    The rate is 1 KiB a second, on average over twice ``seconds``, from each request on. The time
    between two waits is the library's own. More than ``most_nbytes`` are an EndlessError.
    """

    def __init__(
        self, seconds: float, stopped: threading.Event, most_nbytes: int | None = None
    ) -> None:
        super().__init__(2 * seconds, stopped)
        self.nbytes = 0  # that came
        self.most_nbytes = most_nbytes
        self._got = 0  # of the current average
        self._waited = time.monotonic()  # the end of the last wait
        self.overdue = f"less than {LEAST_RATE} bytes a second in {2 * seconds:g} s"

    def left(self, most: float | None = None) -> float:
        now = time.monotonic()
        self.until, self._waited = self.until + now - self._waited, now
        return super().left(most)

    def sends(self) -> None:
        self._waited = time.monotonic()
        self.until, self._got = self._waited + self._seconds, 0

    def came(self, nbytes: int) -> None:
        self._waited = time.monotonic()
        self.nbytes, self._got = self.nbytes + nbytes, self._got + nbytes
        if self.most_nbytes is not None and self.nbytes > self.most_nbytes + _MOST_HEAD_NBYTES:
            raise EndlessError
        if self._got >= self._seconds * LEAST_RATE:
            self.sends()


class _Lent:
    """A transport of a `Pool` for the client of another library, which gets plain bytes."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def handle_request(self, request: Any) -> Any:
        """Send a request; raise RequestError or CompressedError."""
        request.headers["Accept-Encoding"] = "identity"
        try:
            response = self._transport.handle_request(request)
        except httpx().HTTPError as error:
            raise RequestError from error
        if response.headers.get("Content-Encoding", "identity") != "identity":
            response.close()
            raise CompressedError
        return response


class _Backend:
    def connect_tcp(self, host: str, port: int, timeout: float | None, **options: Any) -> Any:
        """Connect in a thread, since resolving cannot be cancelled; return the `_Connection`."""
        import httpcore2

        attempt: Attempt = _thread.attempt
        attempt.sends()
        future: Future[Any] = Future()
        seconds = attempt.left(timeout)

        def connect() -> None:
            try:
                stream = httpcore2.SyncBackend().connect_tcp(host, port, seconds, **options)
            except Exception as error:
                with suppress(InvalidStateError):  # cancelled: no thread waits
                    future.set_exception(error)
                return
            try:
                future.set_result(stream)
            except InvalidStateError:
                stream.close()

        try:
            threading.Thread(target=connect, name="streamload-connect", daemon=True).start()
        except RuntimeError:  # the process may start no more threads
            connect()
        return _Connection(attempt.connect(future))


class _Connection:
    def __init__(self, stream: Any) -> None:
        self.owner: Attempt | None = None  # the last try that used this connection
        self._stream = stream
        # a second handle to shut down: TLS detaches the first one's descriptor
        self._handle = stream.get_extra_info("socket").dup()
        self._wrapped = 0  # layers of TLS

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Receive up to ``max_bytes`` bytes; b"" at the end; EndlessError for long headers."""
        attempt = self._owned()
        try:
            with self._bounded(attempt.left(timeout)) as seconds:
                data: bytes = self._stream.read(max_bytes, seconds)
        except Exception:
            if time.monotonic() >= attempt.until:
                raise OverdueError from None
            raise
        attempt.came(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send all of ``buffer``."""
        attempt = self._owned()
        attempt.sends()
        with self._bounded(attempt.left(timeout)) as seconds:
            self._stream.write(buffer, seconds)

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> _Connection:
        """Start TLS on this connection and return it; close it on failure."""
        self._wrapped += 1
        try:
            with self._bounded(self._owned().left(timeout)) as seconds:
                self._stream = self._stream.start_tls(ssl_context, server_hostname, seconds)
        except BaseException:
            self.close()  # the library does not
            raise
        return self

    def close(self) -> None:
        with _owning:  # `shut_down` must not hit another file with this descriptor
            self._handle.close()
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def shut_down(self) -> None:
        """Shut the socket down, which wakes the thread that waits for it."""
        with suppress(OSError):  # closed by either side
            self._handle.shutdown(socket.SHUT_RDWR)

    def _owned(self) -> Attempt:
        """Return the calling thread's try, and make it the only one that may shut this down."""
        attempt: Attempt = _thread.attempt
        if self.owner is not attempt:
            with _owning:
                self.owner, attempt.connection = attempt, self
        return attempt

    @contextmanager
    def _bounded(self, seconds: float) -> Iterator[float]:
        """Yield ``seconds``, the block's timeout; with an https proxy, a timer enforces it."""
        # TLS in TLS: the library restarts its timeout at each piece
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
    """Shares one HTTP client, and one client of each bucket, among all readers of the process.

    They last while any reader exists. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._client: Any = None
        self._kept: dict[object, Any] = {}
        self._pid = 0

    def enter(self) -> None:
        """Register a user of the client."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Unregister a user; the last one closes all connections."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            kept, self._kept = [*self._kept.values()], {}
            client, self._client = self._client, None
        if client is not None and self._pid == os.getpid():
            kept.append(client)
        for each in kept:
            each.close()

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """Return ``make()``, called once for a key and closed when the last user leaves."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            found: T = self._kept[key]
            return found

    def lend(self, client: Any) -> None:
        """Let another client of the HTTP library send by this pool in threads with a `Paced`."""
        if "_transport_for_url" in vars(client):
            return
        usual = client._transport_for_url

        def chosen(url: Any) -> Any:
            if not isinstance(getattr(_thread, "attempt", None), Paced):
                return usual(url)
            return _Lent(self.client()._transport_for_url(url))

        client._transport_for_url = chosen

    def client(self) -> Any:
        """Return the client, created once; raise SettingsError for bad proxies or certificates."""
        with self._lock:
            if self._client is None or self._pid != os.getpid():  # a child shares no connections
                # each thread keeps a connection; idle ones close with the last reader
                library = httpx()
                limits = library.Limits(max_connections=None, max_keepalive_connections=None)
                # no cookies: one that cannot be sent back would fail all later requests
                jar = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
                try:
                    client = library.Client(verify=_tls(), limits=limits, cookies=jar)
                except (ValueError, OSError, ImportError, library.InvalidURL) as error:
                    raise SettingsError from error
                # the client has no argument for a backend; each proxy has a transport
                for transport in (client._transport, *client._mounts.values()):
                    if transport is not None:
                        transport._pool._network_backend = _Backend()
                hush()
                self._client, self._pid = client, os.getpid()
            return self._client


#: The pool of this process.
POOL = Pool()


@contextmanager
def connections() -> Iterator[None]:
    """Keep connections open between the requests of the block, as an open reader does."""
    POOL.enter()
    try:
        yield
    finally:
        POOL.leave()


@contextmanager
def hushed() -> Iterator[None]:
    """Drop log records of HTTP libraries in this thread: they may hold secrets."""
    hush()
    _thread.hushed = True
    try:
        yield
    finally:
        _thread.hushed = False


def hush() -> None:
    """Drop the libraries' log records of streamload's own requests: they may hold secrets."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(_LOGGERS):
            logging.getLogger(name).addFilter(_is_of_others)


def _is_of_others(record: logging.LogRecord) -> bool:
    return getattr(_thread, "attempt", None) is None and not getattr(_thread, "hushed", False)


@cache
def _tls() -> ssl.SSLContext:
    """Return the TLS settings, cached: reading certificates takes longer than reading a header."""
    context: ssl.SSLContext = httpx().create_ssl_context()
    return context


def httpx() -> Any:
    """Import and return the HTTP library; raise ImportError without the extra ``remote``."""
    import httpx2

    return httpx2


def cause_of(error: BaseException | None) -> OSError | None:
    """Return the operating system's or TLS error behind an error of the HTTP library, or None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def lasting(error: Exception, cause: OSError | None) -> str:
    """Return why no retry can fix a failed request, "" if one may; ``cause`` is from `cause_of`."""
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


NUMBER = r"\d{1,19}"  # Python reads no integer of 5,000 digits, and no file has more than these
DIGITS = re.compile(NUMBER, re.ASCII)
#: Statuses that a later try may not get, and the longest ``Retry-After`` that is waited for.
PASSING = (408, 425, 429, 500, 502, 503, 504)
MOST_WAIT_SECONDS = 120.0
_VALIDATORS = ("ETag", "Last-Modified")  # headers that identify a version; the first one is used
_STATUSES = frozenset(HTTPStatus)


def version(headers: Mapping[str, str], known: str) -> str:
    """Return a file's version, such as "ETag: ...", of the kind of ``known``; "" without any."""
    kinds = (known.partition(": ")[0],) if known else _VALIDATORS
    for kind in kinds:
        if value := headers.get(kind, "").removeprefix("W/"):
            return f"{kind}: {value}"
    return ""


def retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds that a response asks to wait, by a number or a date; 0 for none."""
    value = headers.get("Retry-After", "").strip()
    if DIGITS.fullmatch(value):
        return float(value)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def said(value: str) -> str:
    """Return a header's value for an error; "an address" for a URL, which may hold secrets."""
    return "an address" if re.search(r"@|\?|//", value) else describe(value)


def status_text(status: int) -> str:
    """Return a status with its standard phrase: the server's own may hold secrets."""
    return f"{status} {HTTPStatus(status).phrase}" if status in _STATUSES else str(status)
