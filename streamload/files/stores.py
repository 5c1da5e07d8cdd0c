"""Requests to object stores (S3, Google Cloud Storage, Azure) through obstore, in terms of HTTP.

Each request is a task of an event loop, where it can be cancelled: obstore's timeouts do not cover
its sources of credentials, and it cannot be stopped. Nothing is retried here; see `remote`.
obstore's texts quote requests and responses, which may hold keys: none leave this file.

Source: ``_get.pyi``, ``_list.pyi`` and ``auth/boto3.py`` of obstore 0.12.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from streamload.core.location import Url
from streamload.errors import CheckpointError
from streamload.files.connections import Attempt, SettingsError, hush

T = TypeVar("T")

_PIECE_NBYTES = 2**16  # least bytes of a piece of a body; 256 KiB are no faster
_LISTED = 100  # objects that are waited for at once; a response lists up to 1000
_ETAG = "ETag: "
_KINDS = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}  # of environment variables
#: What to set if a bucket may not be read, by the URL's scheme.
CREDENTIALS = {
    "s3": "credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws and "
    "boto3), or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "credentials (GOOGLE_APPLICATION_CREDENTIALS), or GOOGLE_SKIP_SIGNATURE=true for a "
    "public bucket",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and credentials (AZURE_STORAGE_ACCOUNT_KEY) or "
    "AZURE_SKIP_SIGNATURE=true for a public container",
}
_STATUS = re.compile(r"status code: (\d{3})")
_PASSING = re.compile(r"status code: (?:429|5\d\d)")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>", re.ASCII)
_MESSAGE = re.compile(r'code: \d+,\s+kind: \w+,\s+message: "([^"]*)"')  # the operating system's
# first lines of obstore's texts about requests for credentials
_OF_CREDENTIALS = re.compile(
    r"performing (?:token request|PUT|POST)|://(?:169\.254\.|\[?fd00:ec2)|"
    r"External \w+ credential provider"
)
_MALFORMED = "<Code>AuthorizationHeaderMalformed"
_OTHER_REGION = ("another region than the bucket's", "its region in AWS_REGION")
# by a part of obstore's text: what was found, and what a user needs instead
_LASTING = {
    "redirect without LOCATION": _OTHER_REGION,
    _MALFORMED: _OTHER_REGION,
    "BadScheme": ("an endpoint of http://", "https://, or {}_ALLOW_HTTP=true"),
    "InvalidCertificate": ("a certificate that is not to be trusted", "one that is"),
    "Name or service not known": ("there is no such host", "the endpoint of the store"),
    "NotPartial": ("200, the whole file", "206 Partial Content"),
    "UnexpectedRange": ("another range", "the range that was asked for"),
    "path segment": ("a part of the path that is no name", "names between single slashes"),
}

_pid = 0  # of the process that has used obstore


def library() -> Any:
    """Import and return obstore; raise ImportError without the extra ``stores``."""
    import obstore

    return obstore


@dataclass(frozen=True, slots=True)
class StoreResponse:
    """A response of an object store, as HTTP has it."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Iterator[bytes] = field(default_factory=lambda: iter(()), repr=False)
    code: str = ""  # the store's name of an error, such as NoSuchBucket

    def iter_raw(self) -> Iterator[bytes]:
        """Return the pieces of the body."""
        return self.pieces

    def close(self) -> None:
        """Do nothing: the rest of the body is dropped with this object."""


class Bucket:
    """A client of one bucket by the environment's settings, with its event loop. Thread-safe."""

    def __init__(self, url: Url, connect_seconds: float) -> None:
        global _pid
        if _pid not in (0, os.getpid()):
            raise _forked(url)
        # without a time it ends each request, with its body, after 30 s
        config = {"timeout": "7d", "connect_timeout": f"{connect_seconds * 1000:.0f}ms"}
        given: dict[str, Any] = {"retry_config": {"max_retries": 0}}
        self._store = None
        with suppress(Exception):  # its text may hold keys
            if url.scheme == "s3" and (profile := _profile()) is not None:
                given["credential_provider"] = profile
            make = getattr(library().store, _KINDS[url.scheme])
            self._store = make(url.bucket, config=config | {"user_agent": "streamload"}, **given)
        if self._store is None:
            raise SettingsError
        _pid = os.getpid()
        began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = Future()
        serve = partial(asyncio.run, _serve(began))
        self._thread = threading.Thread(target=serve, name="streamload-store", daemon=True)
        self._thread.start()
        self._loop, self._ended = began.result()

    def close(self) -> None:
        """End the event loop and its requests."""
        if _pid == os.getpid():
            self._loop.call_soon_threadsafe(self._ended.set_result, None)
            self._thread.join()

    def request(self, url: Url, wanted: range | None, attempt: Attempt) -> StoreResponse:
        """Request bytes of a file of the version of ``url``, or all; for a folder, its listing."""
        if _pid != os.getpid():
            raise _forked(url)

        def wait(call: Callable[[], Awaitable[Any]]) -> Any:
            return attempt.wait(asyncio.run_coroutine_threadsafe(_awaited(call), self._loop))

        if not url.name:
            return self._listing(url, wait)
        options: dict[str, Any] = {}
        if url.version.startswith(_ETAG):
            options["if_match"] = url.version.removeprefix(_ETAG)
        if wanted is not None:
            options["range"] = (wanted.start, wanted.stop)
        get = partial(library().get_async, self._store, url.key, options=options)
        found = _answered(partial(wait, get))
        if isinstance(found, StoreResponse) and found.status_code == 416:
            meta = _answered(partial(wait, partial(library().head_async, self._store, url.key)))
            if not isinstance(meta, StoreResponse):
                return StoreResponse(416, {"Content-Range": f"bytes */{meta['size']}"})
        if isinstance(found, StoreResponse):
            return found
        meta, (start, stop) = found.meta, found.range
        headers = {
            "Last-Modified": email.utils.format_datetime(meta["last_modified"], usegmt=True),
            "Content-Length": str(stop - start),
            "Content-Type": found.attributes.get("Content-Type", ""),
        }
        if meta["e_tag"]:
            headers["ETag"] = meta["e_tag"]
        if wanted is not None:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{meta['size']}"
        pieces = _pieces(wait, found.stream(_PIECE_NBYTES))
        return StoreResponse(200 if wanted is None else 206, headers, pieces)

    def _listing(self, folder: Url, wait: Callable[..., Any]) -> StoreResponse:
        prefix = folder.key
        pages = _pieces(wait, library().list(self._store, prefix or None, chunk_size=_LISTED))
        first = _answered(lambda: next(pages, []))
        if isinstance(first, StoreResponse):
            return first

        def pieces() -> Iterator[bytes]:
            page, before = first, '{"siblings": ['
            while page:
                for path, nbytes in ((each["path"], each["size"]) for each in page):
                    if path.startswith(prefix):
                        entry = {"rfilename": path.removeprefix(prefix), "size": nbytes}
                        yield (before + json.dumps(entry)).encode()
                        before = ","
                page = next(pages, [])
            yield b"]}" if before == "," else f"{before}]}}".encode()

        return StoreResponse(200, pieces=pieces())


def problem(error: Exception, url: Url) -> tuple[str, str]:
    """Return what an error of a request was, and what is needed; "" if a retry may fix it."""
    # obstore panics at settings that make no request
    if isinstance(error, SettingsError) or type(error).__name__ == "RustPanic":
        return "settings in the environment that are not valid", CREDENTIALS[url.scheme]
    text = str(error)
    if _lacks_credentials(text):
        passing = _PASSING.search(text) is not None
        return "no credentials", "" if passing else CREDENTIALS[url.scheme]
    for part, (found, needed) in _LASTING.items():
        if part in text:
            return found, needed.format(_PREFIXES[url.scheme])
    if "IncompleteBody" in text:
        return "the response ended early", ""
    message = _MESSAGE.search(text)
    return message[1] if message else f"{type(error).__name__} in obstore", ""


def _answered(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        text = str(error)
        status = _STATUS.search(text)
        if status is None or _lacks_credentials(text) or _MALFORMED in text:
            raise
    code = _CODE.search(text)
    return StoreResponse(int(status[1]), code=code[1] if code else "")


def _lacks_credentials(text: str) -> bool:
    return _OF_CREDENTIALS.search(text.partition("\n")[0]) is not None


def _pieces(wait: Callable[..., Any], stream: AsyncIterator[Any]) -> Iterator[Any]:
    while True:
        try:
            piece = wait(partial(anext, stream))
        except StopAsyncIteration:
            return
        yield piece


async def _serve(
    began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]],
) -> None:
    """Run an event loop until its future is set; then cancel what it still runs."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    began.set_result((loop, ended))
    await ended


async def _awaited(call: Callable[[], Awaitable[T]]) -> T:
    return await call()


def _forked(url: Url) -> CheckpointError:
    return CheckpointError(
        url,
        "cannot be read in a process that was forked after obstore was used",
        'a process started by multiprocessing.get_context("spawn")',
    )


class _Profile:
    """Gives obstore the credentials that boto3 finds, asked for within the deadline of a try."""

    def __init__(self, session: Any) -> None:
        self.config: dict[str, str] = {}
        if session.region_name and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & os.environ.keys():
            self.config["region"] = session.region_name
        self._session = session
        self._provider: Any = None

    def __call__(self) -> Any:
        with Attempt(0, threading.Event()).under_way():  # log records are dropped
            hush()
            if self._provider is None:
                from obstore.auth.boto3 import Boto3CredentialProvider

                self._provider = Boto3CredentialProvider(self._session)
            return self._provider()


def _profile() -> _Profile | None:
    if {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & os.environ.keys():
        return None
    try:
        import boto3
    except ImportError:
        return None
    return _Profile(boto3.Session())
