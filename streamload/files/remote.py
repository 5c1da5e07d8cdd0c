"""Reading over HTTP: ranges of a file, each thread's over a connection of its own.

What a server may do wrong is met in three ways. What may pass (no connection, a reset, a stall, a
body that ends early, 429, 502 and the like) is tried again after a while, and only what is still
missing is asked for. What will not pass (no such file, no leave, ranges that are ignored, headers
that contradict each other) is one error at once. And each response says which version of the file
it is of: one that is not the version whose header was read is an error, and never a mixture.

Versions are compared here, before a byte of the body is taken. A server that compares them itself
(If-Range) sends the whole file where they differ, and does not say why.

Each try has one deadline until the last header, and a least rate after it; see `Patience`. A stop
wakes it in every phase. Errors and logs of the HTTP library may have secrets: none leave this file.

Source: RFC 9110 (HTTP semantics), sections 8.8, 10.2.3, 13 and 14.
"""

from __future__ import annotations

import io
import math
import os
import random
import re
import socket
import ssl
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
from streamload.files.header import describe
from streamload.files.reader import Reader

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

# Of a header, the first request asks for this much: more than most have, and on a line of 100
# Mbit/s read in the time that another request would take to go there and back.
_FIRST_NBYTES = 2**18
_REQUEST_NBYTES = 2**26  # asked for at once: a long range is begun anew where it was cut
# Tries are counted anew after one that brought as much. Fewer bytes are no progress: a server that
# gives one at a time would be asked millions of times.
_PROGRESS_NBYTES = 2**16
_LEAST_RATE = 1024  # bytes a second of a body: slower than that is a stall
_MOST_WAIT_SECONDS = 120.0  # a user who looks on waits no longer
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


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a server is waited for.

    Attributes:
        connect_seconds: for a connection, to each of a host's addresses.
        read_seconds: until an answer begins, from the name's resolution to the last header, with
            all redirects on the way; and then for the next bytes of its body, which as well brings
            1 KiB a second on average, measured anew each twice as many seconds. So a long body
            may take long where it gets on.
        tries: how many in a row may fail to get on with a range.
        backoff_seconds: before the second try; twice as long before each after it, less up to a
            half at random, so that many clients do not come back together.
        most_backoff_seconds: the most of that.
    """

    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    tries: int = 6
    backoff_seconds: float = 0.5
    most_backoff_seconds: float = 30.0

    @classmethod
    def from_environment(cls) -> Patience:
        """With what ``STREAMLOAD_HTTP_TIMEOUT`` (seconds) and ``STREAMLOAD_HTTP_TRIES`` say.

        Raises:
            ValueError: one of them is not a number, or none above 0.
        """
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


def read_file(url: Url, most_nbytes: int, patience: Patience | None = None) -> bytes:
    """Read a whole file of at most ``most_nbytes``.

    Raises:
        ShardNotFoundError: there is no such file.
        HeaderError: it is longer.
        CheckpointError: it cannot be read.
    """
    out = io.BytesIO()
    download(url, out, most_nbytes, patience)
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Look:
    """The beginning of a file, as a server sends it."""

    url: Url  # with the version that was looked at
    nbytes: int | None  # how long it is; None where the server does not say before its end
    content_type: str  # in lower case, without parameters
    head: bytes  # its first bytes
    whole: bool  # whether they are all of it


def look(url: Url, most_nbytes: int, patience: Patience | None = None) -> Look:
    """Read the first ``most_nbytes`` bytes of a file that may be of any kind and length.

    Raises:
        ShardNotFoundError: there is no such file.
        CheckpointError: it cannot be read.
    """
    with connections():
        return _File(url, None, patience).look(most_nbytes)


def download(url: Url, out: BinaryIO, most_nbytes: int, patience: Patience | None = None) -> None:
    """Write a whole file to ``out``, piece by piece, from its first byte on.

    Args:
        url: the file; of a version, where it has one.
        out: a file that can seek: a try that failed is begun anew.
        most_nbytes: the longest file that is wanted.
        patience: how long the server is waited for.

    Raises:
        ShardNotFoundError: there is no such file.
        HeaderError: it is longer.
        CheckpointError: it cannot be read, or is of another version.
        OSError: ``out`` cannot be written.
    """
    with connections():
        _File(url, None, patience).download(out, most_nbytes)


def exists(url: Url, patience: Patience | None = None) -> bool:
    """Whether there is a file that may be read; raises CheckpointError where that is not said."""
    with connections():
        try:
            _File(url, None, patience).read(0, memoryview(bytearray(1)))
        except ShardNotFoundError:
            return False
    return True


class RemoteFile:
    """A file on a server whose header is read; see `streamload.formats.reader.File`.

    The first 256 KiB are asked for at once, and kept: they hold most headers.

    Attributes:
        nbytes: its length.
    """

    def __init__(self, url: Url, patience: Patience | None = None) -> None:
        """Ask for its first bytes.

        Raises:
            ShardNotFoundError: there is no such file, or the server does not say whether there is
                (401, 403), as huggingface.co and stores with hidden folders do.
            CheckpointError: it cannot be read, or only as a whole.
        """
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

    A call is one request, or one for each 64 MiB; many threads at once are as many connections.
    Opening it asks for nothing: each response shows whether the file is still the same.
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
    """Keep connections open between requests, and close them at the end of the outermost.

    An open `HttpReader` does so as well.
    """
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
    asked_seconds: float = 0.0  # how long the server asks to wait
    got_on: bool = False  # it brought some of the bytes


class _File:
    """A file on a server. Any number of threads may read it, once its length is known."""

    def __init__(self, url: Url, nbytes: int | None, patience: Patience | None) -> None:
        if url.is_shown:
            raise CheckpointError(
                url,
                "cannot be read: its user, password or query was left out of a pickle",
                "open_checkpoint(...) of the whole URL in this process",
            )
        _check_installed(url)
        self.nbytes = nbytes  # None until a response has said it
        self.version = url.version
        self.stopped = threading.Event()  # the bytes are not wanted any more
        self._url = url
        self._error = partial(CheckpointError, url)
        self._patience = patience or Patience.from_environment()
        self._moved: httpx2.URL | None = None  # where redirects led
        self._lock = threading.Lock()
        self._attempts: set[wire.Attempt] = set()  # of all threads

    def stop(self) -> None:
        """Wake all threads that wait for bytes, perhaps of a host that is gone; with an error."""
        with self._lock:
            self.stopped.set()
            for attempt in self._attempts:
                attempt.wake()

    def read(self, start: int, out: memoryview) -> int:
        """Fill ``out``, which is not empty, from byte ``start`` on.

        Returns how many bytes there were: fewer only where the length was not known.
        """
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
                        if done - before + len(data) > nbytes:
                            raise self._error(
                                "the server sent more than it said",
                                "its range",
                                done - before + len(data),
                            )
                        out[done : done + len(data)] = data
                        done += len(data)
                if done < min(out.nbytes, (self.nbytes or 0) - start):
                    raise _Again(f"the server sent {done - before} bytes", at_once=True)
            except _Again as again:
                if done < stop - start:  # else all is there but the mark of its end
                    again.got_on = done - before >= _PROGRESS_NBYTES
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
        """The first bytes of the file, and what is said of it."""

        def attempt() -> Look:
            with self._whole() as (response, body):
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
            with self._whole() as (response, body):
                version = _version(response.headers, self.version)
                if self.version and version != self.version:
                    raise self._of_another_version(version)
                done = 0
                for data in body:
                    if (done := done + len(data)) > most_nbytes:
                        raise HeaderError(
                            self._url,
                            "the file is too long",
                            f"at most {most_nbytes} bytes",
                            f"{done} or more",
                        )
                    out.write(data)

        self._insist(attempt)

    @contextmanager
    def _whole(self) -> Iterator[tuple[httpx2.Response, Iterator[bytes]]]:
        with self._response(None) as (response, body):
            self._check_status(response, 200)
            yield response, body

    def _insist(
        self, attempt: Callable[[], T], gave_up: Callable[[str], CheckpointError] | None = None
    ) -> T:
        """Try until a try succeeds, or trying is of no use; ``gave_up`` makes the error then."""
        tries = in_a_row = 0
        while True:
            self._check_stopped()
            tries, in_a_row = tries + 1, in_a_row + 1
            try:
                return attempt()
            except _Again as again:
                in_a_row = 0 if again.got_on else in_a_row
                asked = again.asked_seconds
                if in_a_row >= self._patience.tries or asked > _MOST_WAIT_SECONDS:
                    count = f"{tries} tries, the last" if tries > 1 else "1 try"
                    found = f"in {count}: {again.reason}"
                    unread = self._error("cannot be read", found=found)
                    raise (gave_up(found) if gave_up else unread) from again.__cause__
                if not again.at_once:
                    patience = self._patience
                    seconds = patience.backoff_seconds * 2.0 ** (in_a_row - 1)
                    seconds = min(seconds, patience.most_backoff_seconds)
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
        request = self._call(attempt, self._request, target, byte_range)
        for hops in range(_MOST_REDIRECTS):
            response = self._call(attempt, self._receive_head, attempt, request)
            if response.next_request is None:
                # the next request goes there: asking for the way each time is slow, and rationed
                if hops and response.status_code == 206 and "Authorization" not in request.headers:
                    self._moved = request.url
                return response
            with closing(response):
                self._drain(attempt, response)
            # credentials are left out of it where it leads to another server
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

    @staticmethod
    def _receive_head(attempt: wire.Attempt, request: httpx2.Request) -> httpx2.Response:
        with attempt.head():
            return _pool.client().send(request, stream=True)

    def _call(self, attempt: wire.Attempt, call: Callable[..., T], *arguments: object) -> T:
        """Have the HTTP library do something; raise its errors as _Again or CheckpointError.

        They are no causes of ours: their texts have parts of requests and answers, which may be
        secret. What the operating system said is.
        """
        try:
            return call(*arguments)
        except (StreamloadError, MemoryError):
            raise
        except Exception as error:
            cause = _cause(error)
            failed = self._failure(attempt, error, cause)
        failed.__cause__ = cause  # outside of the except clause, where it would be the context
        raise failed

    def _failure(
        self, attempt: wire.Attempt, error: Exception, cause: OSError | None
    ) -> _Again | CheckpointError:
        library, seconds = wire.httpx(), self._patience.read_seconds
        if self.stopped.is_set():
            return self._error("reading was stopped")
        if isinstance(error, wire.OverdueError) or time.monotonic() >= attempt.until:
            return _Again(attempt.overdue)
        if lasting := _lasting(error, cause):
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
        """What Hugging Face's own tools send to its server, and to no other."""
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
            raise self._error(
                "the server does not read parts of files",
                "206 Partial Content",
                "200, the whole file",
            )
        raise self._error("cannot be read", _status(wanted), _status(status))

    def _check_range(self, response: httpx2.Response, start: int, stop: int) -> int:
        """Whether a response is of the range and of the file; returns how long its body is."""
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
        """What a response brings, piece by piece, at the least rate or more."""
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


def _check_installed(url: Url) -> None:
    try:
        wire.httpx()
    except ImportError as error:
        raise CheckpointError(
            url, 'reading over HTTP needs httpx2: pip install "streamload[remote]"'
        ) from error


def _cause(error: BaseException | None) -> OSError | None:
    """What the operating system or TLS said, where an error of the HTTP library is of that."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _lasting(error: Exception, cause: OSError | None) -> str:
    """What no other try changes about an error of a request, in words; "" of all others."""
    library = wire.httpx()
    if isinstance(error, library.UnsupportedProtocol):
        return "a redirect to something else than HTTP"
    if isinstance(error, wire.EndlessError):
        return "an answer whose headers do not end"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the certificate is not to be trusted: {cause.verify_message}"
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_NONAME:
        return "there is no such host"
    if isinstance(error, wire.SettingsError):
        return "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or SSL_CERT_FILE cannot be used as they are"
    if isinstance(error, library.LocalProtocolError | library.InvalidURL | UnicodeError):
        return "a request that cannot be sent"
    if cause is None and not isinstance(error, library.HTTPError):
        return f"{type(error).__name__} in the HTTP library"
    return ""


def _version(headers: Mapping[str, str], known: str) -> str:
    """The line that tells versions of a file apart: of the kind that is known, where one is."""
    kinds = (known.partition(": ")[0],) if known else _VALIDATORS
    for kind in kinds:
        if value := headers.get(kind, "").removeprefix("W/"):
            return f"{kind}: {value}"
    return ""


def _retry_after(headers: Mapping[str, str]) -> float:
    """How many seconds a server asks to wait: it says a number, or when."""
    value = headers.get("Retry-After", "").strip()
    if _DIGITS.fullmatch(value):
        return float(value)
    with suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _said(value: str) -> str:
    """A header in a few words, unless it is an address, which may have secrets."""
    return "an address" if re.search(r"@|\?|//", value) else describe(value)


def _status(status: int) -> str:
    """In words that are not the server's."""
    return f"{status} {HTTPStatus(status).phrase}" if status in _STATUSES else str(status)
