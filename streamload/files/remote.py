"""Reading over HTTP: byte ranges of a file, each thread over its own connection.

Files in buckets of object stores are requested by `streamload.files.stores`, and read likewise.

Transient failures (no connection, a reset, a stall, a body that ends early, 429, 502 and the like)
are retried after a wait, and only the missing bytes are requested. Permanent ones (no such file, no
permission, ranges ignored, contradicting headers) raise at once. Each response names its version of
the file: another one than the header's is an error. Versions are compared here before the body is
read, since a server that compares them itself (If-Range) sends the whole file if they differ.

Each try has one deadline until the last header, and a least rate after it; see `Patience`. A stop
wakes it in every phase. Errors and logs of the HTTP library may hold secrets: none leave this file.

Source: RFC 9110 (HTTP semantics), sections 8.8, 10.2.3, 13 and 14.
"""

from __future__ import annotations

import io
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, TypeVar

from streamload.core.location import Url
from streamload.core.system import install
from streamload.errors import (
    CheckpointError,
    HeaderError,
    ShardNotFoundError,
    StreamloadError,
    TruncatedFileError,
)
from streamload.files import connections as wire
from streamload.files import hub, stores
from streamload.files.connections import Patience
from streamload.files.header import describe
from streamload.files.reader import Reader

if TYPE_CHECKING:
    import httpx2

    Response: TypeAlias = httpx2.Response | stores.StoreResponse

T = TypeVar("T")

# First read of a header: more than most have, and as fast as a round trip at 100 Mbit/s.
_FIRST_NBYTES = 2**18
_REQUEST_NBYTES = 2**26  # of one request; longer ranges take several
# The count of failed tries restarts after one that brought this much.
_PROGRESS_NBYTES = 2**16
_MOST_REDIRECTS = 10
_DRAINED_NBYTES = 2**14
_DRAIN_SECONDS = 1.0  # connecting again takes no longer

_ABSENT = (404, 410)
_REFUSED = (401, 403)
_NUMBER = wire.NUMBER
_CONTENT_RANGE = re.compile(rf"bytes ({_NUMBER})-({_NUMBER})/({_NUMBER}|\*)", re.ASCII)
_UNSATISFIED = re.compile(rf"bytes \*/({_NUMBER})", re.ASCII)
_QUOTED = re.compile(r"\s*(?::|bytearray|(?<!\w)b?['\"])")  # before text quoted from the server

_jitter = random.Random()  # not the global one, which a program may have seeded


def read_file(url: Url, most_nbytes: int) -> bytes:
    """Return a whole file; raise HeaderError if it is longer than ``most_nbytes``."""
    out = io.BytesIO()
    download(url, out, most_nbytes)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Look:
    """The beginning of a file on a server, with the file's length, version and content type."""

    url: Url  # with the file's version
    nbytes: int | None  # the file's length; None if unknown
    content_type: str  # in lower case, without parameters
    head: bytes  # the file's first bytes
    whole: bool  # whether ``head`` is the whole file


def look(url: Url, most_nbytes: int) -> Look:
    """Read the first ``most_nbytes`` bytes of a file of any kind and length."""
    with connections():
        return _File(url, None).look(most_nbytes)


def download(url: Url, out: BinaryIO, most_nbytes: int) -> None:
    """Write a whole file to ``out``, rewound for retries; HeaderError above ``most_nbytes``."""
    with connections():
        _File(url, None).download(out, most_nbytes)


def exists(url: Url) -> bool:
    """Return whether a readable file exists; raise CheckpointError without an answer."""
    with connections():
        try:
            _File(url, None).read(0, memoryview(bytearray(1)))
        except ShardNotFoundError:
            return False
    return True


class RemoteFile:
    """A `File` on a server; requests and keeps the first 256 KiB, which hold most headers."""

    def __init__(self, url: Url) -> None:
        """Request the first bytes; raise ShardNotFoundError for status 401, 403 and 404."""
        self._url = url
        self._file = _File(url, None)
        self._first = self._ask(0, _FIRST_NBYTES)
        assert self._file.nbytes is not None, "set by the response"
        self.nbytes: int = self._file.nbytes

    @property
    def path(self) -> Url:
        """The URL, with the version of the file."""
        return self._url.of_version(self._file.version)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``: by one request, or none for the first 256 KiB."""
        kept = self._first[start:stop]
        at, stop = start + len(kept), min(stop, self.nbytes)
        return kept + self._ask(at, stop) if at < stop else kept

    def _ask(self, start: int, stop: int) -> bytes:
        """Request bytes ``start`` to ``stop``; return fewer if the file ends before."""
        out = memoryview(bytearray(stop - start))
        return bytes(out[: self._file.read(start, out)])


class HttpReader(Reader):
    """Reads a shard over HTTP; see `Reader`.

    A call sends one request for each 64 MiB; each thread has a connection. Opening sends no
    request: each response shows whether the file has changed.
    """

    _how = "from a server"

    def __init__(self, url: Url, file_nbytes: int) -> None:
        super().__init__(url, file_nbytes)
        self._file = _File(url, file_nbytes)
        self._closed = False
        _pool.enter()

    def stop(self) -> None:
        self._file.stop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stop()
            _pool.leave()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        self._file.read(start, target)

    def _check_range(self, start: int, stop: int) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: the reader is closed")
        super()._check_range(start, stop)


_pool = wire.Pool()


@contextmanager
def connections() -> Iterator[None]:
    """Keep connections open between the requests of the block, as an open `HttpReader` does."""
    _pool.enter()
    try:
        yield
    finally:
        _pool.leave()


@dataclass(eq=False)
class _Again(Exception):
    """Raised by a try that failed in a way that a retry may fix."""

    reason: str
    at_once: bool = False  # retry without waiting
    asked_seconds: float = 0.0  # the server's Retry-After
    progressed: bool = False  # at least 64 KiB of the range came


class _File:
    """A file on a server, requested with retries. Thread-safe once its length is known."""

    def __init__(self, url: Url, nbytes: int | None) -> None:
        if url.is_shown:
            raise CheckpointError(
                url,
                "cannot be read: its user, password or query was left out of a pickle",
                "open_checkpoint(...) of the whole URL in this process",
            )
        name, extra = ("obstore", "stores") if url.is_store else ("httpx2", "remote")
        try:
            (stores.library if url.is_store else wire.httpx)()
        except ImportError as error:
            needs = f"reading {url.scheme}:// needs {name}, the extra {extra}: {install(extra)}"
            raise CheckpointError(url, needs) from error
        self.nbytes = nbytes  # the file's length; None before the first response
        self.version = url.version
        self.stopped = threading.Event()
        self._url = url
        self._error = partial(CheckpointError, url)
        self._patience = Patience.from_environment()
        self._moved: httpx2.URL | None = None  # where redirects led
        self._lock = threading.Lock()  # guards `_attempts`
        self._attempts: set[wire.Attempt] = set()  # running tries of all threads

    def stop(self) -> None:
        """Make all threads that wait for bytes raise CheckpointError."""
        with self._lock:
            self.stopped.set()
            for attempt in self._attempts:
                attempt.wake()

    def read(self, start: int, out: memoryview) -> int:
        """Fill ``out`` from byte ``start`` on; return the bytes read, fewer at the file's end."""
        done = 0
        while done < out.nbytes and (self.nbytes is None or start + done < self.nbytes):
            with out[done : done + _REQUEST_NBYTES] as part:
                n = self._read_range(start + done, part)
            if not n:
                break
            done += n
        return done

    def _read_range(self, start: int, out: memoryview) -> int:
        """Fill ``out`` by one request, retried for the missing bytes; return the bytes read."""
        done = 0

        def attempt() -> int:
            nonlocal done
            before = done
            stop = start + out.nbytes
            if self.nbytes is not None:
                stop = min(stop, self.nbytes)
            try:
                with self._response(range(start + done, stop)) as (response, body):
                    nbytes = self._check_range(response, start + done, stop)
                    for data in body if nbytes else ():
                        if (got := done - before + len(data)) > nbytes:
                            raise self._error("the server sent more than it said", "its range", got)
                        out[done : done + len(data)] = data
                        done += len(data)
                if done < min(out.nbytes, (self.nbytes or 0) - start):
                    raise _Again(f"the server sent {done - before} bytes", at_once=True)
            except _Again as again:
                if done < stop - start:  # else all bytes came, and only the end mark is missing
                    again.progressed = done - before >= _PROGRESS_NBYTES
                    raise
            return done

        def gave_up(found: str) -> CheckpointError:
            return self._error(
                f"bytes {start} to {start + out.nbytes} cannot be read",
                f"{out.nbytes} bytes",
                f"{done} of them {found}",
            )

        return self._insist(attempt, gave_up)

    def look(self, most_nbytes: int) -> Look:
        """Return the file's first ``most_nbytes`` bytes, its length, version and content type."""

        def attempt() -> Look:
            with self._response(None) as (response, body):
                self._check_status(response, 200)
                head, length = bytearray(), response.headers.get("Content-Length", "")
                for data in body:
                    head += data
                    if len(head) > most_nbytes:
                        break
                return Look(
                    self._url.of_version(wire.version(response.headers, "")),
                    int(length) if wire.DIGITS.fullmatch(length) else None,
                    response.headers.get("Content-Type", "").partition(";")[0].strip().lower(),
                    bytes(head[:most_nbytes]),
                    len(head) <= most_nbytes,
                )

        return self._insist(attempt)

    def download(self, out: BinaryIO, most_nbytes: int) -> None:
        """Write the whole file to ``out``; see `download`."""

        def attempt() -> None:
            out.seek(0)
            out.truncate()
            with self._response(None) as (response, body):
                self._check_status(response, 200)
                version = wire.version(response.headers, self.version)
                if self.version and version != self.version:
                    raise self._of_another_version(version)
                done = 0
                for data in body:
                    if (done := done + len(data)) > most_nbytes:
                        most = f"at most {most_nbytes} bytes"
                        raise HeaderError(
                            self._url, "the file is too long", most, f"{done} or more"
                        )
                    out.write(data)

        self._insist(attempt)

    def _insist(
        self, attempt: Callable[[], T], gave_up: Callable[[str], CheckpointError] | None = None
    ) -> T:
        """Return ``attempt()``, retried after `_Again` up to the limit of tries without progress.

        Then raise ``gave_up(reason)``, or without ``gave_up`` a CheckpointError with the reason.
        """
        tries = in_a_row = 0
        while True:
            self._check_stopped()
            tries, in_a_row = tries + 1, in_a_row + 1
            try:
                return attempt()
            except _Again as again:
                in_a_row = 0 if again.progressed else in_a_row
                asked = again.asked_seconds
                if in_a_row >= self._patience.tries or asked > wire.MOST_WAIT_SECONDS:
                    count = f"{tries} tries, the last" if tries > 1 else "1 try"
                    found = f"in {count}: {again.reason}"
                    unread = self._error("cannot be read", found=found)
                    raise (gave_up(found) if gave_up else unread) from again.__cause__
                if not again.at_once:
                    seconds = self._patience.backoff_seconds * 2.0 ** (in_a_row - 1)
                    seconds = min(seconds, self._patience.most_backoff_seconds)
                    self.stopped.wait(max(asked, seconds * _jitter.uniform(0.5, 1)))

    @contextmanager
    def _response(self, wanted: range | None) -> Iterator[tuple[Response, Iterator[bytes]]]:
        """Send a GET request; yield response and body, or raise `_Again` for a transient status."""
        moved = self._moved
        with (
            self._attempt() as attempt,
            closing(self._send(attempt, moved or self._url.href, wanted)) as response,
        ):
            status = response.status_code
            if status not in (200, 206):
                self._drain(attempt, response)
            expired = moved is not None and status in (*_REFUSED, *_ABSENT)
            # of the hub, a signed URL may have expired when it is first used
            signed = status in _REFUSED and hub.file_of(self._url) is not None
            if expired or (signed and not _is_of_hub(response)):
                self._moved = None  # redirects expire
                raise _Again(f"{wire.status_text(status)} where a redirect had led", at_once=True)
            if status in wire.PASSING:
                asked = wire.retry_after(response.headers)
                later = f", to be asked again in {asked:.0f} s" if asked else ""
                raise _Again(wire.status_text(status) + later, asked_seconds=asked)
            yield response, self._body(attempt, response)

    @contextmanager
    def _attempt(self) -> Iterator[wire.Attempt]:
        """Yield a new try for this thread, registered so that `stop` wakes it."""
        attempt = wire.Attempt(self._patience.read_seconds, self.stopped)
        with self._lock:
            self._attempts.add(attempt)
        try:
            with attempt.under_way():
                yield attempt
        finally:
            with self._lock:
                self._attempts.discard(attempt)

    def _send(
        self, attempt: wire.Attempt, target: httpx2.URL | str, wanted: range | None
    ) -> Response:
        """Send a request and follow redirects; return the response with its body unread."""
        if (url := self._url).is_store:
            make = partial(stores.Bucket, url, self._patience.connect_seconds)
            bucket = self._call(attempt, _pool.kept, (url.scheme, url.bucket), make)
            return self._call(
                attempt, bucket.request, url.of_version(self.version), wanted, attempt
            )

        def send(request: httpx2.Request) -> httpx2.Response:
            return _pool.client().send(request, stream=True)

        request = self._call(attempt, self._request, target, wanted)
        for hops in range(_MOST_REDIRECTS):
            attempt.head_nbytes = 0
            response = self._call(attempt, send, request)
            attempt.head_nbytes = None
            if response.next_request is None:
                # later requests go there at once: redirects are slow and rate-limited
                if hops and response.status_code == 206 and "Authorization" not in request.headers:
                    self._moved = request.url
                return response
            with closing(response):
                self._drain(attempt, response)
            # the library drops credentials for another server
            request = response.next_request
        raise self._error("is redirected again and again")

    def _request(self, target: httpx2.URL | str, wanted: range | None) -> httpx2.Request:
        patience = self._patience
        headers = {"Accept-Encoding": "identity", "User-Agent": "streamload"}
        headers |= hub.authorization(self._url, str(target))
        if wanted is not None:
            headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        timeout = wire.httpx().Timeout(patience.read_seconds, connect=patience.connect_seconds)
        return _pool.client().build_request("GET", target, headers=headers, timeout=timeout)

    def _call(self, attempt: wire.Attempt, call: Callable[..., T], *arguments: object) -> T:
        """Call a function of the HTTP library; raise `_Again` or CheckpointError for its errors.

        The library's error texts quote requests and responses, which may hold secrets: only an
        error of the operating system becomes the cause.
        """
        try:
            return call(*arguments)
        except (StreamloadError, MemoryError):
            raise
        except Exception as error:
            cause = None if self._url.is_store else wire.cause_of(error)
            failed = self._failure(attempt, error, cause)
        failed.__cause__ = cause  # outside of the except clause: ``error`` is no context
        raise failed

    def _failure(
        self, attempt: wire.Attempt, error: Exception, cause: OSError | None
    ) -> _Again | CheckpointError:
        """Return the error to raise for an error of the HTTP library with its OSError ``cause``."""
        if self.stopped.is_set():
            return self._error("reading was stopped")
        if isinstance(error, wire.OverdueError) or time.monotonic() >= attempt.until:
            return _Again(attempt.overdue)
        if self._url.is_store:
            found, wanted = stores.problem(error, self._url)
            return self._error("cannot be read", wanted, found) if wanted else _Again(found)
        library, seconds = wire.httpx(), self._patience.read_seconds
        if lasting := wire.lasting(error, cause):
            return self._error("cannot be read", found=lasting)
        if isinstance(error, library.ConnectTimeout):
            return _Again(f"no connection within {self._patience.connect_seconds:g} s")
        if isinstance(error, library.TimeoutException):
            return _Again(f"nothing came for {seconds:g} s")
        if isinstance(error, library.ProxyError):
            return _Again(f"the proxy refused: {str(error)[:3]}")  # its status
        if cause is not None:
            return _Again(str(cause))
        return _Again(_QUOTED.split(str(error))[0] or type(error).__name__)

    def _drain(self, attempt: wire.Attempt, response: httpx2.Response) -> None:
        """Read a body of up to 16 KiB to its end, so that the connection can be reused."""
        length = response.headers.get("Content-Length", "")
        if wire.DIGITS.fullmatch(length) and int(length) <= _DRAINED_NBYTES:
            until = attempt.until
            attempt.until = min(until, time.monotonic() + _DRAIN_SECONDS)
            with suppress(_Again):
                self._call(attempt, lambda: deque(response.iter_raw(), maxlen=0))
            attempt.until = until

    def _check_status(self, response: Response, wanted: int) -> None:
        """Raise CheckpointError unless a response has the wanted status and no compression."""
        status = response.status_code
        if status == wanted:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding == "identity":
                return
            problem = "the server compresses what was asked for as it is"
            raise self._error(problem, "no Content-Encoding", wire.said(encoding))
        found, needed = wire.status_text(status), None
        if isinstance(response, stores.StoreResponse):
            found += f" ({response.code})" * bool(response.code)
            needed = stores.CREDENTIALS[self._url.scheme]
        gone = status in _ABSENT and "X-Error-Code" not in response.headers
        if status in (*_ABSENT, *_REFUSED) and not gone and _is_of_hub(response):
            raise hub.refused(self._url, status, response.headers)
        if gone:
            raise ShardNotFoundError(self._url, "no such file", found=found)
        if status in (*_ABSENT, *_REFUSED):
            raise ShardNotFoundError(self._url, "is not there, or may not be read", needed, found)
        if status == 412:
            raise self._of_another_version(found)
        if status == 200:
            problem = "the server does not read parts of files"
            raise self._error(problem, "206 Partial Content", "200, the whole file")
        raise self._error("cannot be read", wire.status_text(wanted), found)

    def _check_range(self, response: Response, start: int, stop: int) -> int:
        """Return the bytes in a response's range, 0 past the file's end; raise for bad headers."""
        headers = response.headers
        if response.status_code == 416:
            found = _UNSATISFIED.fullmatch(headers.get("Content-Range", ""))
            if found and self.nbytes is None and int(found[1]) <= start:
                self.nbytes = int(found[1])
                return 0
            if found and self.nbytes is not None and int(found[1]) < self.nbytes:
                raise self._of_another_length(int(found[1]))
        self._check_status(response, 206)
        stated = headers.get("Content-Range", "")
        if (kind := headers.get("Content-Type", "")).lower().startswith("multipart/"):
            stated = kind  # several ranges, each with its own headers
        found = _CONTENT_RANGE.fullmatch(stated)
        if not found or int(found[1]) != start or not start <= int(found[2]) < stop:
            total = "*" if self.nbytes is None else self.nbytes
            raise self._error(
                "the server sent another range than was asked for",
                f"bytes {start}-{stop - 1}/{total}",
                wire.said(stated) if stated else "no Content-Range",
            )
        version = wire.version(headers, self.version)
        if self.nbytes is None:
            if found[3] == "*":
                raise self._error("the server does not state how long the file is", found=stated)
            self.nbytes, self.version = int(found[3]), version
        elif found[3] != "*" and int(found[3]) != self.nbytes:
            raise self._of_another_length(int(found[3]))
        elif self.version and version != self.version:
            raise self._of_another_version(version)
        nbytes = int(found[2]) + 1 - start
        length = headers.get("Content-Length", str(nbytes))
        if length != str(nbytes):
            raise self._error(
                f"the server contradicts itself about {stated}",
                f"Content-Length {nbytes}",
                describe(length),
            )
        return nbytes

    def _of_another_version(self, found: str) -> CheckpointError:
        return self._error(
            "has changed since its header was read",
            describe(self.version),
            describe(found) if found else "a response that does not say",
        )

    def _of_another_length(self, found: int) -> CheckpointError:
        assert self.nbytes is not None, "nothing to compare with"
        if found < self.nbytes:
            return TruncatedFileError(self._url, "has become shorter", self.nbytes, found)
        return HeaderError(
            self._url, "has become longer since its header was read", self.nbytes, found
        )

    def _body(self, attempt: wire.Attempt, response: Response) -> Iterator[bytes]:
        """Yield the pieces of a response's body; raise `_Again` if they come too slowly."""
        seconds, pieces = 2 * self._patience.read_seconds, response.iter_raw()
        got = 0
        until = time.monotonic() + seconds
        while True:
            attempt.until, attempt.overdue = until, f"{got} bytes in {seconds:g} s"
            data = self._call(attempt, next, pieces, b"")
            if not data:
                return
            got += len(data)
            handed = time.monotonic()
            yield data
            now = time.monotonic()
            until += now - handed  # the caller's time, not the server's
            if got >= seconds * wire.LEAST_RATE:
                until, got = now + seconds, 0
            self._check_stopped()

    def _check_stopped(self) -> None:
        if self.stopped.is_set():
            raise self._error("reading was stopped")


def _is_of_hub(response: Response) -> bool:
    """Whether the hub's server itself has answered, and not one that it redirects to."""
    if isinstance(response, stores.StoreResponse):
        return False
    return hub.is_endpoint(str(response.request.url))
