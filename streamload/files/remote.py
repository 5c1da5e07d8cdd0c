"""Reading from servers: folders, and byte ranges of a file, each thread over its own connection.

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
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, TypeVar

from streamload.core.bounded_json import parse_json
from streamload.core.location import Location, Url, is_url
from streamload.core.system import install
from streamload.core.units import format_bytes
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
from streamload.files.header import check_nbytes, describe, most_nbytes
from streamload.files.local import Folder
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


def locate(path: str | os.PathLike[str], text: str, pinned: hub.HubFile | None) -> Location:
    """Return the URL that a path, as ``text``, means, or a path in the hub's local cache."""
    is_commit = isinstance(path, Url) and hub.file_of(path) is not None
    if is_url(text) and (is_commit or not hub.is_named(text)):
        return path if isinstance(path, Url) and path.is_shown else Url.parse(text)
    return hub.url_of(pinned) if pinned else hub.locate(text)


def folder_at(found: Location, path: Location) -> Folder:
    """Return the `Folder` at ``path`` that has, or is, what was found on a server or in a cache."""
    if isinstance(path, Path):
        return Snapshot(found, path)
    kind = BucketFolder if path.is_store else WebFolder if hub.file_of(path) is None else HubFolder
    return kind(found, path)


class WebFolder(Folder):
    """A folder of a server that lists no files, over HTTP."""

    found: Url
    path: Url

    def lengths(self) -> Mapping[str, int] | None:
        """Return bytes of its files, and of those in its folders, by path; None if unlisted."""
        return None

    def names(self) -> list[str] | None:
        lengths = self.lengths()
        return None if lengths is None else sorted({"".join(p.partition("/")[:2]) for p in lengths})

    def read(self, name: str) -> bytes:
        place = self.place(name)
        return (
            _json(place) if isinstance(place, Url) else Folder(place, place.parent).read(place.name)
        )

    def file(self, name: str) -> Url:
        return self.found if name == self.name else self.path / name

    def exists(self, name: str) -> bool:
        with wire.connections():
            try:
                _File(self.file(name), None).fill(0, memoryview(bytearray(1)))
            except ShardNotFoundError:
                return False
        return True

    def folders(self, names: Sequence[str]) -> list[str]:
        return [f"{self.written()}{name.rstrip('/')}" for name in names if name.endswith("/")]

    def written(self) -> str:
        """Return how a user writes it, with a slash at its end."""
        return str(self.path)

    def missing(self, names: Sequence[str]) -> list[str]:
        return []

    def opening(self) -> AbstractContextManager[None]:
        return wire.connections()

    def explained(self, error: ShardNotFoundError) -> CheckpointError:
        if not self.name or hub.A_FILE.fullmatch(self.name) or error.expected is not None:
            return error
        return replace(error, expected=f"{self.found}/ for a folder")


class BucketFolder(WebFolder):
    """A folder of objects in a bucket, or all of it."""

    def lengths(self) -> Mapping[str, int] | None:
        try:
            document = parse_json(read_file(self.path, most_nbytes(self.path)))
            return _shown({entry["rfilename"]: entry["size"] for entry in document["siblings"]})
        except ShardNotFoundError:
            return None
        except CheckpointError:  # a ValueError, too
            raise
        except (ValueError, RecursionError, TypeError, KeyError):
            return None


class HubFolder(WebFolder):
    """A folder of a repository at a commit; files that the local cache has are read there."""

    def lengths(self) -> Mapping[str, int]:
        return _shown(hub.listing(self.path) or {})

    def place(self, name: str) -> Location:
        return hub.cached(super().place(name))

    def identity(self, name: str) -> str | None:
        return str(hub.file_of(self.file(name)))

    def written(self) -> str:
        file = hub.file_of(self.path)
        assert file is not None, self.path
        known = hub.known_listing(file)
        revision = known.revision if known else file.commit
        return f"{hub.Repository(file.repo, revision, file.path)}".rstrip("/") + "/"

    def check_single(self, shards: Sequence[str]) -> None:
        listed = hub.listing(self.path) or {}
        found = [name for name in shards or listed if name.lower().endswith(".gguf")]
        models = {re.sub(r"-\d+-of-\d+", "", name) for name in found}
        if listed and len(models) > bool(shards):
            lines = [f"{self.written()}{name} ({format_bytes(listed[name])})" for name in found]
            problem = "holds several GGUF files, or has them in folders"
            raise ShardNotFoundError(self.path, problem, "the path of one", ", ".join(lines))

    def settled(self, shards: Sequence[Location]) -> Location:
        needed = [*shards]
        if (config := "config.json") in (hub.listing(self.path) or ()):
            needed.append(self.place(config))
        if not shards or any(isinstance(path, Url) for path in needed):
            return self.found
        parent = shards[0].parent
        return parent / self.name if self.name else parent


class Snapshot(Folder):
    """A folder of a repository in the hub's local cache, which may lack some of its files."""

    found: Path

    def read(self, name: str) -> bytes:
        place = hub.cached(hub.origin(self.path / name))
        return _json(place) if isinstance(place, Url) else super().read(name)

    def identity(self, name: str) -> str | None:
        found = hub.in_cache(Path(self.path, name))
        return None if found is None else str(found)

    def origin(self) -> Location:
        return hub.origin(self.path)

    def opening(self) -> AbstractContextManager[None]:
        return wire.connections()

    def explained(self, error: ShardNotFoundError) -> CheckpointError:
        file, known = hub.in_cache(self.found), hub.settings()
        if file is None or known is None:
            return error
        name = f"{file.repo} --revision {file.commit}"
        line = (
            hub.unset(name) if known.is_offline_mode() else f"`hf download {name}` brings the rest"
        )
        part = f"the Hugging Face cache may have a part of it, and {line}"
        return replace(error, problem=f"{error.problem}; {part}")


def _shown(lengths: Mapping[str, int]) -> Mapping[str, int]:
    return {
        path: nbytes
        for path, nbytes in lengths.items()
        if "\0" not in path and all(p and not p.startswith(".") for p in path.split("/"))
    }


def _json(url: Url) -> bytes:
    raw = read_file(url, most_nbytes(url))
    check_nbytes(url, "the file is too long", len(raw))
    return raw


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
    with wire.connections():
        return _File(url, None).look(most_nbytes)


def download(url: Url, out: BinaryIO, most_nbytes: int) -> None:
    """Write a whole file to ``out``, rewound for retries; HeaderError above ``most_nbytes``."""
    with wire.connections():
        _File(url, None).download(out, most_nbytes)


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
        wire.POOL.enter()

    def stop(self) -> None:
        self._file.stop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stop()
            wire.POOL.leave()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        self._file.fill(start, target)

    def _check_range(self, start: int, stop: int) -> None:
        if self._closed:
            raise ValueError(f"{self.path}: the reader is closed")
        super()._check_range(start, stop)


@dataclass(eq=False)
class _Again(Exception):
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
        self.url = url
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

    def fill(self, start: int, out: memoryview) -> int:
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
                    self.url.of_version(wire.version(response.headers, "")),
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
                        raise HeaderError(self.url, "the file is too long", most, f"{done} or more")
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
                    seconds = self._patience.backoff(in_a_row) * _jitter.uniform(0.5, 1)
                    self.stopped.wait(max(asked, seconds))

    @contextmanager
    def _response(self, wanted: range | None) -> Iterator[tuple[Response, Iterator[bytes]]]:
        moved = self._moved
        with (
            self._attempt() as attempt,
            closing(self._send(attempt, moved or self.url.href, wanted)) as response,
        ):
            status = response.status_code
            if status not in (200, 206):
                self._drain(attempt, response)
            expired = moved is not None and status in (*_REFUSED, *_ABSENT)
            # of the hub, a signed URL may have expired when it is first used
            signed = status in _REFUSED and hub.file_of(self.url) is not None
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
        if (url := self.url).is_store:
            make = partial(stores.Bucket, url, self._patience.connect_seconds)
            bucket = self._call(attempt, wire.POOL.kept, (url.scheme, url.bucket), make)
            return self._call(
                attempt, bucket.request, url.of_version(self.version), wanted, attempt
            )

        def send(request: httpx2.Request) -> httpx2.Response:
            return wire.POOL.client().send(request, stream=True)

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
        headers |= hub.authorization(self.url, str(target))
        if wanted is not None:
            headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        timeout = wire.httpx().Timeout(patience.read_seconds, connect=patience.connect_seconds)
        return wire.POOL.client().build_request("GET", target, headers=headers, timeout=timeout)

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
            cause = None if self.url.is_store else wire.cause_of(error)
            failed = self._failure(attempt, error, cause)
        failed.__cause__ = cause  # outside of the except clause: ``error`` is no context
        raise failed

    def _failure(
        self, attempt: wire.Attempt, error: Exception, cause: OSError | None
    ) -> _Again | CheckpointError:
        if self.stopped.is_set():
            return self._error("reading was stopped")
        if isinstance(error, wire.OverdueError) or time.monotonic() >= attempt.until:
            return _Again(attempt.overdue)
        if self.url.is_store:
            found, wanted = stores.problem(error, self.url)
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
        length = response.headers.get("Content-Length", "")
        if wire.DIGITS.fullmatch(length) and int(length) <= _DRAINED_NBYTES:
            until = attempt.until
            attempt.until = min(until, time.monotonic() + _DRAIN_SECONDS)
            with suppress(_Again):
                self._call(attempt, lambda: deque(response.iter_raw(), maxlen=0))
            attempt.until = until

    def _check_status(self, response: Response, wanted: int) -> None:
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
            needed = stores.CREDENTIALS[self.url.scheme]
        gone = status in _ABSENT and "X-Error-Code" not in response.headers
        if status in (*_ABSENT, *_REFUSED) and not gone and _is_of_hub(response):
            raise hub.refused(self.url, status, response.headers)
        if gone:
            raise ShardNotFoundError(self.url, "no such file", found=found)
        if status in (*_ABSENT, *_REFUSED):
            raise ShardNotFoundError(self.url, "is not there, or may not be read", needed, found)
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
            return TruncatedFileError(self.url, "has become shorter", self.nbytes, found)
        return HeaderError(
            self.url, "has become longer since its header was read", self.nbytes, found
        )

    def _body(self, attempt: wire.Attempt, response: Response) -> Iterator[bytes]:
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


class RemoteFile(_File):
    """A `File` on a server; requests and keeps the first 256 KiB, which hold most headers."""

    nbytes: int

    def __init__(self, url: Url) -> None:
        super().__init__(url, None)
        self._first = self._ask(0, _FIRST_NBYTES)

    @property
    def path(self) -> Url:
        """The URL, with the version of the file."""
        return self.url.of_version(self.version)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop``: by one request, or none for the first 256 KiB."""
        kept = self._first[start:stop]
        at, stop = start + len(kept), min(stop, self.nbytes)
        return kept + self._ask(at, stop) if at < stop else kept

    def _ask(self, start: int, stop: int) -> bytes:
        out = memoryview(bytearray(stop - start))
        return bytes(out[: self.fill(start, out)])


def _is_of_hub(response: Response) -> bool:
    if isinstance(response, stores.StoreResponse):
        return False
    return hub.is_endpoint(str(response.request.url))
