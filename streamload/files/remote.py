"""Reading over HTTP: ranges of a file, each thread's over a connection of its own.

Passing failures (no connection, a reset, a stall, a body that ends early, 429, 502 and the like)
are tried again after a while, and only the missing bytes are requested. Lasting ones (no such file,
no permission, ranges ignored, headers that contradict each other) raise at once. Each response
names its version of the file: another one than that of the header is an error. Versions are
compared here before the body is read, since a server that compares them itself (If-Range) sends the
whole file if they differ.

Each try has one deadline until the last header, and a least rate after it; see `Patience`. A stop
wakes it in every phase. Errors and logs of the HTTP library may have secrets: none leave this file.

Source: RFC 9110 (HTTP semantics), sections 8.8, 10.2.3, 13 and 14.
"""

from __future__ import annotations

import io
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from streamload.core.location import Url
from streamload.errors import (
    CheckpointError,
    HeaderError,
    ShardNotFoundError,
    StreamloadError,
    TruncatedFileError,
)
from streamload.files import connections as wire
from streamload.files.connections import Patience
from streamload.files.header import describe
from streamload.files.reader import Reader

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

# More than most headers have, and on a line of 100 Mbit/s as fast as another round trip.
_FIRST_NBYTES = 2**18
_REQUEST_NBYTES = 2**26  # of one request: a long range continues at its cut
# Tries are counted anew after one that brought as much, and not after each byte.
_PROGRESS_NBYTES = 2**16
_LEAST_RATE = 1024  # bytes a second of a body: slower than that is a stall
_MOST_WAIT_SECONDS = 120.0  # a user waits no longer
_MOST_REDIRECTS = 10
_DRAINED_NBYTES = 2**14
_DRAIN_SECONDS = 1.0  # to connect anew takes no longer

_ABSENT = (404, 410)
_REFUSED = (401, 403)
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_NUMBER = r"\d{1,19}"  # Python reads no integer of 5,000 digits, and no file has more than these
_CONTENT_RANGE = re.compile(rf"bytes ({_NUMBER})-({_NUMBER})/({_NUMBER}|\*)", re.ASCII)
_UNSATISFIED = re.compile(rf"bytes \*/({_NUMBER})", re.ASCII)
_DIGITS = re.compile(_NUMBER, re.ASCII)
_QUOTED = re.compile(r"\s*(?::|bytearray|(?<!\w)b?['\"])")  # where the server's own words begin
_HUB = "huggingface.co"
_VALIDATORS = ("ETag", "Last-Modified")  # the first that is there tells versions apart

_STATUSES = frozenset(HTTPStatus)

_jitter = random.Random()  # not the one that a program may have seeded


def read_file(url: Url, most_nbytes: int, patience: Patience | None = None) -> bytes:
    """Read a whole file; HeaderError if it is longer than ``most_nbytes``."""
    out = io.BytesIO()
    download(url, out, most_nbytes, patience)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Look:
    """The beginning of a file, as a server sends it."""

    url: Url  # with its version
    nbytes: int | None  # its length; None if the server does not say
    content_type: str  # in lower case, without parameters
    head: bytes  # its first bytes
    whole: bool  # whether they are all of it


def look(url: Url, most_nbytes: int, patience: Patience | None = None) -> Look:
    """Read the first ``most_nbytes`` bytes of a file of any kind and length."""
    with connections():
        return _File(url, None, patience).look(most_nbytes)


def download(url: Url, out: BinaryIO, most_nbytes: int, patience: Patience | None = None) -> None:
    """Write a whole file to ``out``, piece by piece; it seeks back for another try."""
    with connections():
        _File(url, None, patience).download(out, most_nbytes)


def exists(url: Url, patience: Patience | None = None) -> bool:
    """Whether there is a file that may be read; CheckpointError if the server does not say."""
    with connections():
        try:
            _File(url, None, patience).read(0, memoryview(bytearray(1)))
        except ShardNotFoundError:
            return False
    return True


class RemoteFile:
    """A file on a server whose header is read; see `streamload.formats.reader.File`.

    The first 256 KiB are requested at once, and kept: they hold most headers.
    """

    def __init__(self, url: Url, patience: Patience | None = None) -> None:
        """Request its first bytes; 401 and 403 are ShardNotFoundErrors, as 404 is."""
        self._url = url
        self._file = _File(url, None, patience)
        self._first = self._ask(0, _FIRST_NBYTES)
        assert self._file.nbytes is not None, "a response said it"
        self.nbytes: int = self._file.nbytes

    @property
    def path(self) -> Url:
        """The URL, with the version of the file."""
        return self._url.of_version(self._file.version)

    def read(self, start: int, stop: int) -> bytes:
        """See `streamload.formats.reader.File.read`: one request, or none for the first bytes."""
        kept = self._first[start:stop]
        at, stop = start + len(kept), min(stop, self.nbytes)
        return kept + self._ask(at, stop) if at < stop else kept

    def _ask(self, start: int, stop: int) -> bytes:
        raw = bytearray(stop - start)
        with memoryview(raw) as out:
            n = self._file.read(start, out)
        del raw[n:]
        return bytes(raw)


class HttpReader(Reader):
    """A shard that is read over HTTP; see `Reader`.

    A call is one request for each 64 MiB; each thread has a connection. Opening sends no request:
    each response shows whether the file is still the same.
    """

    _how = "over HTTP"

    def __init__(self, url: Url, file_nbytes: int, patience: Patience | None = None) -> None:
        super().__init__(url, file_nbytes)
        self._file = _File(url, file_nbytes, patience)
        self._closed = False
        _pool.enter()

    def stop(self) -> None:
        """See `Reader.stop`."""
        self._file.stop()

    def close(self) -> None:
        """See `Reader.close`."""
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
    """Keep connections open between requests, as an open `HttpReader` does."""
    _pool.enter()
    try:
        yield
    finally:
        _pool.leave()


@dataclass(eq=False)
class _Again(Exception):
    """A try that failed, after which there may be another."""

    reason: str
    at_once: bool = False  # there is nothing to wait for
    asked_seconds: float = 0.0  # the server's Retry-After
    progressed: bool = False  # it brought some of the bytes


class _File:
    """A file on a server. Any number of threads may read it, once its length is known."""

    def __init__(self, url: Url, nbytes: int | None, patience: Patience | None) -> None:
        if url.is_shown:
            raise CheckpointError(
                url,
                "cannot be read: its user, password or query was left out of a pickle",
                "open_checkpoint(...) of the whole URL in this process",
            )
        try:
            wire.httpx()
        except ImportError as error:
            raise CheckpointError(
                url, 'reading over HTTP needs httpx2: pip install "streamload[remote]"'
            ) from error
        self.nbytes = nbytes  # None before a response has it
        self.version = url.version
        self.stopped = threading.Event()  # the bytes are not wanted any more
        self._url = url
        self._error = partial(CheckpointError, url)
        self._patience = patience or Patience.from_environment()
        self._moved: httpx2.URL | None = None  # the target of redirects
        self._lock = threading.Lock()
        self._attempts: set[wire.Attempt] = set()  # of all threads

    def stop(self) -> None:
        """Wake all threads that wait for bytes; they raise."""
        with self._lock:
            self.stopped.set()
            for attempt in self._attempts:
                attempt.wake()

    def read(self, start: int, out: memoryview) -> int:
        """Fill ``out``, not empty; returns fewer bytes only if the length was not known."""
        done = 0
        while done < out.nbytes and (self.nbytes is None or start + done < self.nbytes):
            with out[done : done + _REQUEST_NBYTES] as part:
                n = self._read_range(start + done, part)
            if not n:
                break
            done += n
        return done

    def _read_range(self, start: int, out: memoryview) -> int:
        done = 0

        def attempt() -> int:
            nonlocal done
            before = done
            stop = start + out.nbytes
            if self.nbytes is not None:
                stop = min(stop, self.nbytes)
            try:
                with self._response(f"bytes={start + done}-{stop - 1}") as (response, body):
                    nbytes = self._check_range(response, start + done, stop)
                    for data in body if nbytes else ():
                        if (got := done - before + len(data)) > nbytes:
                            raise self._error("the server sent more than it said", "its range", got)
                        out[done : done + len(data)] = data
                        done += len(data)
                if done < min(out.nbytes, (self.nbytes or 0) - start):
                    raise _Again(f"the server sent {done - before} bytes", at_once=True)
            except _Again as again:
                if done < stop - start:  # else all is there but the mark of its end
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
        """The first bytes of the file, and its headers."""

        def attempt() -> Look:
            with self._response(None) as (response, body):
                self._check_status(response, 200)
                head, length = bytearray(), response.headers.get("Content-Length", "")
                for data in body:
                    head += data
                    if len(head) > most_nbytes:
                        break
                return Look(
                    self._url.of_version(_version(response.headers, "")),
                    int(length) if _DIGITS.fullmatch(length) else None,
                    response.headers.get("Content-Type", "").partition(";")[0].strip().lower(),
                    bytes(head[:most_nbytes]),
                    len(head) <= most_nbytes,
                )

        return self._insist(attempt)

    def download(self, out: BinaryIO, most_nbytes: int) -> None:
        """Write the whole file to ``out``."""

        def attempt() -> None:
            out.seek(0)
            out.truncate()
            with self._response(None) as (response, body):
                self._check_status(response, 200)
                version = _version(response.headers, self.version)
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
        """Try until a try succeeds, or all have failed; ``gave_up`` makes the error then."""
        tries = in_a_row = 0
        while True:
            self._check_stopped()
            tries, in_a_row = tries + 1, in_a_row + 1
            try:
                return attempt()
            except _Again as again:
                in_a_row = 0 if again.progressed else in_a_row
                asked = again.asked_seconds
                if in_a_row >= self._patience.tries or asked > _MOST_WAIT_SECONDS:
                    count = f"{tries} tries, the last" if tries > 1 else "1 try"
                    found = f"in {count}: {again.reason}"
                    unread = self._error("cannot be read", found=found)
                    raise (gave_up(found) if gave_up else unread) from again.__cause__
                if not again.at_once:
                    seconds = self._patience.backoff_seconds * 2.0 ** (in_a_row - 1)
                    seconds = min(seconds, self._patience.most_backoff_seconds)
                    self.stopped.wait(max(asked, seconds * _jitter.uniform(0.5, 1)))

    @contextmanager
    def _response(
        self, byte_range: str | None
    ) -> Iterator[tuple[httpx2.Response, Iterator[bytes]]]:
        """Send a request; a response that no other try would change, and the pieces of its body."""
        moved = self._moved
        with (
            self._attempt() as attempt,
            closing(self._send(attempt, moved or self._url.href, byte_range)) as response,
        ):
            status = response.status_code
            if status not in (200, 206):
                self._drain(attempt, response)
            if moved is not None and status in (*_REFUSED, *_ABSENT):
                self._moved = None  # such addresses are good for a while
                raise _Again(f"{_status(status)} where a redirect had led", at_once=True)
            if status in _PASSING:
                asked = _retry_after(response.headers)
                later = f", to be asked again in {asked:.0f} s" if asked else ""
                raise _Again(_status(status) + later, asked_seconds=asked)
            yield response, self._body(attempt, response)

    @contextmanager
    def _attempt(self) -> Iterator[wire.Attempt]:
        """One try, which `stop` wakes."""
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
        self, attempt: wire.Attempt, target: httpx2.URL | str, byte_range: str | None
    ) -> httpx2.Response:
        def received() -> httpx2.Response:
            with attempt.head():
                return _pool.client().send(request, stream=True)

        request = self._call(attempt, self._request, target, byte_range)
        for hops in range(_MOST_REDIRECTS):
            response = self._call(attempt, received)
            if response.next_request is None:
                # the next request goes there: redirects are slow, and rationed
                if hops and response.status_code == 206 and "Authorization" not in request.headers:
                    self._moved = request.url
                return response
            with closing(response):
                self._drain(attempt, response)
            # the library leaves credentials out of a request to another server
            request = response.next_request
        raise self._error("is redirected again and again")

    def _request(self, target: httpx2.URL | str, byte_range: str | None) -> httpx2.Request:
        patience = self._patience
        headers = {"Accept-Encoding": "identity", "User-Agent": "streamload"} | self._token(target)
        if byte_range is not None:
            headers["Range"] = byte_range
        timeout = wire.httpx().Timeout(patience.read_seconds, connect=patience.connect_seconds)
        client = _pool.client()
        return client.build_request("GET", target, headers=headers, timeout=timeout)

    def _call(self, attempt: wire.Attempt, call: Callable[..., T], *arguments: object) -> T:
        """Call the HTTP library; raise its errors as _Again or CheckpointError.

        Their texts have parts of requests and answers, which may be secret: only an error of the
        operating system becomes the cause.
        """
        try:
            return call(*arguments)
        except (StreamloadError, MemoryError):
            raise
        except Exception as error:
            cause = wire.cause_of(error)
            failed = self._failure(attempt, error, cause)
        failed.__cause__ = cause  # outside of the except clause: ``error`` is no context
        raise failed

    def _failure(
        self, attempt: wire.Attempt, error: Exception, cause: OSError | None
    ) -> _Again | CheckpointError:
        library, seconds = wire.httpx(), self._patience.read_seconds
        if self.stopped.is_set():
            return self._error("reading was stopped")
        if isinstance(error, wire.OverdueError) or time.monotonic() >= attempt.until:
            return _Again(attempt.overdue)
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
        """Read a short body to its end, so that the connection can be used again."""
        length = response.headers.get("Content-Length", "")
        if _DIGITS.fullmatch(length) and int(length) <= _DRAINED_NBYTES:
            with attempt.at_most(_DRAIN_SECONDS), suppress(_Again):
                self._call(attempt, lambda: deque(response.iter_raw(), maxlen=0))

    def _token(self, target: httpx2.URL | str) -> dict[str, str]:
        """The authorization that Hugging Face's own tools send to its server, and to no other."""
        token = os.environ.get("HF_TOKEN", "").strip()
        url = wire.httpx().URL(target)
        known = url.host == _HUB and url.scheme == "https" and not url.userinfo
        if not token or not known:
            return {}
        if not (token.isascii() and token.isprintable()):
            raise self._error("HF_TOKEN cannot be sent", "ASCII", "other characters")
        return {"Authorization": f"Bearer {token}"}

    def _check_status(self, response: httpx2.Response, wanted: int) -> None:
        status = response.status_code
        if status == wanted:
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding == "identity":
                return
            problem = "the server compresses what was asked for as it is"
            raise self._error(problem, "no Content-Encoding", _said(encoding))
        if status in _ABSENT:
            raise ShardNotFoundError(self._url, "no such file", found=_status(status))
        if status in _REFUSED:
            unset = self._url.host == _HUB and not os.environ.get("HF_TOKEN", "").strip()
            found = _status(status) + " (HF_TOKEN is not set)" * unset
            raise ShardNotFoundError(self._url, "is not there, or may not be read", found=found)
        if status == 200:
            problem = "the server does not read parts of files"
            raise self._error(problem, "206 Partial Content", "200, the whole file")
        raise self._error("cannot be read", _status(wanted), _status(status))

    def _check_range(self, response: httpx2.Response, start: int, stop: int) -> int:
        """Check that a response has the range and the file; returns its body's bytes."""
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
            stated = kind  # its body has headers of its own
        found = _CONTENT_RANGE.fullmatch(stated)
        if not found or int(found[1]) != start or not start <= int(found[2]) < stop:
            total = "*" if self.nbytes is None else self.nbytes
            raise self._error(
                "the server sent another range than was asked for",
                f"bytes {start}-{stop - 1}/{total}",
                _said(stated) if stated else "no Content-Range",
            )
        version = _version(headers, self.version)
        if self.nbytes is None:
            if found[3] == "*":
                raise self._error("the server does not say how long the file is", found=stated)
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

    def _body(self, attempt: wire.Attempt, response: httpx2.Response) -> Iterator[bytes]:
        """The pieces of a response, at the least rate or more."""
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
            until += now - handed  # which the server did not take
            if got >= seconds * _LEAST_RATE:
                until, got = now + seconds, 0
            self._check_stopped()

    def _check_stopped(self) -> None:
        if self.stopped.is_set():
            raise self._error("reading was stopped")


def _version(headers: Mapping[str, str], known: str) -> str:
    """The header that identifies a version of a file, of the kind that is ``known``."""
    kinds = (known.partition(": ")[0],) if known else _VALIDATORS
    for kind in kinds:
        if value := headers.get(kind, "").removeprefix("W/"):
            return f"{kind}: {value}"
    return ""


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a server asks to wait: it sends a number, or a date."""
    value = headers.get("Retry-After", "").strip()
    if _DIGITS.fullmatch(value):
        return float(value)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _said(value: str) -> str:
    """A header's value, unless it is an address, which may have secrets."""
    return "an address" if re.search(r"@|\?|//", value) else describe(value)


def _status(status: int) -> str:
    """In words that are not the server's."""
    return f"{status} {HTTPStatus(status).phrase}" if status in _STATUSES else str(status)
