"""Files of the Hugging Face Hub: the token for their server, the local cache, and downloads to it.

huggingface_hub (extra ``hub``) does all of that, so that its environment and its login hold. Texts
and logs of its errors quote signed URLs: none leave this file. A file is a `Url` that names its
commit, whose content never changes.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit
from uuid import uuid4

from streamload.core.location import Location, Url, is_url, local
from streamload.core.memory import available_host_nbytes
from streamload.core.system import filesystem_in_memory, install
from streamload.core.units import format_bytes
from streamload.errors import (
    CheckpointError,
    DeviceError,
    HeaderError,
    ShardNotFoundError,
    StreamloadError,
)
from streamload.files import connections as wire
from streamload.files.connections import Patience
from streamload.files.header import (
    Part,
    check_nbytes,
    describe,
    most_nbytes,
    parse_json_object,
    some,
)
from streamload.files.local import PreadReader, expanded
from streamload.files.reader import Fetch, PartsReader

T = TypeVar("T")


_FILE = re.compile(r"(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<commit>[0-9a-f]{40})/(?P<path>.*)")
_CACHED = re.compile(
    r"/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(/|$)(?P<path>.*)"
)
_PORTS = {"http": 80, "https": 443}
# of an answer of the API, which lists a repository's files: 100,000 of them take 25 MB
_API_NBYTES = 2**25
_SPARE_NBYTES = 2**30  # left free on the cache's disk
_SIGNED = (401, 403, 404, 410)  # statuses of a signed URL that has expired
_STOP_SECONDS = 12.0  # the library's own timeout is 10 s
_POLL_SECONDS = 0.1


def library(where: Location | str) -> Any:
    """Import and return huggingface_hub; raise CheckpointError without the extra ``hub``."""
    try:
        import huggingface_hub
        import huggingface_hub.file_download  # and with it its errors and utils
    except ImportError as error:
        raise ShardNotFoundError(
            where,
            "no such file or folder; a repository of the Hugging Face Hub needs huggingface_hub, "
            f"the extra hub: {install('hub')}",
        ) from error
    return huggingface_hub


def settings() -> Any:
    """Return the library's settings, read from the environment; None if it is not installed."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    return constants


def is_endpoint(href: str) -> bool:
    """Return whether a URL is on the server that ``HF_ENDPOINT`` names."""
    known = settings()
    if known is None or "@" in urlsplit(href).netloc:
        return False
    one, other = (
        (parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme))
        for parts in map(urlsplit, (href, known.ENDPOINT))
    )
    return one == other


def authorization(where: Url, href: str) -> dict[str, str]:
    """Return the header with the token for a request to the hub's server; {} for all others."""
    if not is_endpoint(href):
        return {}
    if settings().is_offline_mode():
        raise offline(where)
    token = ask(where, lambda: library(where).utils.build_hf_headers().get("authorization", ""))
    if not (token.isascii() and token.isprintable()):
        raise _bad_token(where)
    return {"Authorization": token} if token else {}


def _bad_token(where: Location | str) -> CheckpointError:
    return CheckpointError(where, "the token (HF_TOKEN) cannot be sent", "ASCII", "another text")


class HubFile(NamedTuple):
    """A file or folder of a repository at a commit; the path of its root is ""."""

    repo: str
    commit: str
    path: str

    def __str__(self) -> str:
        return f"hf://{self.repo}@{self.commit}/{self.path}"


def file_of(location: Location) -> HubFile | None:
    """Return the file or folder of the hub that a location names; None for any other."""
    if not isinstance(location, Url) or (known := settings()) is None:
        return None
    root = known.ENDPOINT + "/"
    found = _FILE.fullmatch(location.href.removeprefix(root))
    if found is None or not location.href.startswith(root) or "?" in location.href:
        return None
    return HubFile(found["repo"], found["commit"], unquote(found["path"]))


def in_cache(path: Path) -> HubFile | None:
    """Return the file or folder of the hub that a path in the local cache names."""
    found = _CACHED.search(path.as_posix())
    return found and HubFile(found["repo"].replace("--", "/"), found["commit"], found["path"])


def repo_folder(repo: str) -> Path:
    """Return the folder of a repository in the local cache."""
    name = library(repo).file_download.repo_folder_name(repo_id=repo, repo_type="model")
    return Path(settings().HF_HUB_CACHE, name)


def url_of(file: HubFile) -> Url:
    """Return the URL of a file, or of a folder, whose path ends with "/" or is ""."""
    hub = library(file.repo)
    href = hub.hf_hub_url(file.repo, file.path, revision=file.commit, endpoint=settings().ENDPOINT)
    return Url.parse(href)


def cached(location: Location) -> Location:
    """Return the path of a file in the local cache if it is there, else the location itself."""
    file = file_of(location)
    if file is None or not file.path:
        return location
    found = library(location).try_to_load_from_cache(file.repo, file.path, revision=file.commit)
    return Path(found) if isinstance(found, str) else location


def offline(where: Location | str, repo: str = "") -> CheckpointError:
    """Return the error for a file that the local cache lacks, under ``HF_HUB_OFFLINE``."""
    file = file_of(where) if isinstance(where, Url) else None
    problem = f"is not in the Hugging Face cache, and {unset(file.repo if file else repo)}"
    return ShardNotFoundError(where, problem, found=str(settings().HF_HUB_CACHE))


def unset(name: str) -> str:
    """Return what to do where ``HF_HUB_OFFLINE`` is set and the cache lacks a file."""
    line = f"`hf download {name}`"
    return f"HF_HUB_OFFLINE is set: unset it, or write {line} where there is a network"


def refused(where: Location | str, status: int, headers: Mapping[str, str]) -> CheckpointError:
    """Return the error for a refusal of the hub's server, with the line to write."""
    code, found = headers.get("X-Error-Code", ""), wire.status_text(status)
    if code == "RevisionNotFound":
        return ShardNotFoundError(where, "the repository has no such revision", found=found)
    if code == "EntryNotFound":
        return ShardNotFoundError(where, "no such file in the repository", found=found)
    if status not in (401, 403, 404):
        return CheckpointError(where, "the hub refuses the request", found=found)
    has_token = False
    with suppress(Exception):  # a login that cannot be read gives no token
        has_token = "authorization" in library(where).utils.build_hf_headers()
    login = "use a token that may read it" if has_token else "run `hf auth login` or set HF_TOKEN"
    problem = f"there is no such repository, or it is private: check its name, or {login}"
    if code == "GatedRepo":
        problem = f"is gated: accept its conditions on its page of the hub, and {login}"
    return ShardNotFoundError(where, problem, found=found)


class _Failure(NamedTuple):
    error: CheckpointError
    wait_seconds: float | None = None  # before a retry; None: no retry can help
    answered: bool = True  # whether there was an answer at all


def _failure(where: Location | str, error: BaseException | None, attempt: wire.Paced) -> _Failure:
    hub, http = library(where).errors, wire.httpx()
    if isinstance(error, wire.RequestError):
        error = error.__cause__
    if isinstance(error, wire.StoppedError):
        return _Failure(CheckpointError(where, "reading was stopped"))
    if isinstance(error, wire.OverdueError):
        problem = f"cannot be read from {settings().ENDPOINT}: check the network, or HF_ENDPOINT"
        failed = CheckpointError(where, problem, found=attempt.overdue)
        return _Failure(failed, 0.0, answered=False)
    if isinstance(error, wire.EndlessError):
        most = f"at most {attempt.most_nbytes} bytes"
        most += ", by limits=" * (attempt.most_nbytes != _API_NBYTES)
        return _Failure(HeaderError(where, "the hub's answer is too long", most, "more"))
    if isinstance(error, wire.CompressedError):
        problem = "the hub compresses what was asked for as it is"
        return _Failure(CheckpointError(where, problem, "no Content-Encoding"))
    if isinstance(error, hub.OfflineModeIsEnabled):
        return _Failure(offline(where), answered=False)
    if isinstance(error, hub.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # the library has retried
        return _failure(where, error.__cause__, attempt)._replace(wait_seconds=None)
    known, response = error, None  # the library may have failed to read it, too
    while known is not None and (response := getattr(known, "response", None)) is None:
        known = known.__cause__ or known.__context__
    if response is not None:
        status = response.status_code
        expired = status in _SIGNED and not is_endpoint(str(response.request.url))
        if status not in wire.PASSING and not expired:
            return _Failure(refused(where, status, response.headers))
        found = wire.status_text(status) + " of a signed URL" * expired
        failed = CheckpointError(where, "cannot be read from the hub", found=found)
        return _Failure(failed, wire.retry_after(response.headers), answered=status < 500)
    if isinstance(error, http.HTTPError):
        cause = wire.cause_of(error)
        lasting = wire.lasting(error, cause)
        problem = f"cannot be read from {settings().ENDPOINT}: check the network, or HF_ENDPOINT"
        found = lasting or (str(cause) if cause else type(error).__name__)
        failed = CheckpointError(where, problem, found=found)
        failed.__cause__ = cause
        return _Failure(failed, None if lasting else 0.0, answered=False)
    if isinstance(error, UnicodeEncodeError):
        return _Failure(_bad_token(where))
    if isinstance(error, hub.FileMetadataError):
        return _Failure(CheckpointError(where, "HF_ENDPOINT names no hub: no commit is sent"))
    if isinstance(error, OSError) and error.errno is None:  # the library's check of the length
        failed = CheckpointError(where, "the server sent fewer or more bytes than it said")
        return _Failure(failed, 0.0)
    if isinstance(error, OSError):
        failed = CheckpointError(
            where,
            f"{error.filename or settings().HF_HUB_CACHE} cannot be used: set HF_HOME",
            found=os.strerror(error.errno or 0),
        )
        failed.__cause__ = error
        return _Failure(failed)
    return _Failure(CheckpointError(where, f"{type(error).__name__} in huggingface_hub"))


def ask(
    where: Location | str,
    call: Callable[[], T],
    stopped: threading.Event | None = None,
    instead: Callable[[], T | None] = lambda: None,
    most_nbytes: int | None = None,
) -> T:
    """Return ``call()``, a call of the library, retried by `Patience`, with its least rate.

    ``stopped`` ends the wait for the next try. ``instead`` is called if there is no answer; a
    result other than None is returned. The library's errors become a CheckpointError.
    """
    patience, stopped = Patience.from_environment(), stopped or threading.Event()
    tried = 0
    while True:
        attempt = wire.Paced(patience.read_seconds, stopped, most_nbytes)
        try:
            with wire.connections(), wire.hushed(), attempt.under_way():
                return call()
        except (StreamloadError, MemoryError):
            raise
        except Exception as error:
            failed, wait, answered = _failure(where, error, attempt)
        if not answered and (found := instead()) is not None:
            return found
        tried += 1
        if wait is None or tried >= patience.tries or wait > wire.MOST_WAIT_SECONDS:
            raise failed  # outside of the except clause: the library's error is no context
        stopped.wait(max(wait, patience.backoff(tried)))


def _lend(hub: Any) -> Any:
    """Let the library send over `Pool`; return its client. A program's own stays as it is."""
    http, client = hub.utils._http, hub.get_session()
    if http._GLOBAL_CLIENT_FACTORY is http.default_client_factory:
        wire.POOL.lend(client)
    return client


def described(
    where: Location | str, repo: str, revision: str | None, instead: Callable[[], T | None]
) -> dict[str, Any] | T:
    """Ask the hub for a repository's commit and files: the JSON object of its API, or `instead`.

    Its bytes count as a header's, by `Limits`.
    """
    hub, path = library(where), f"{settings().ENDPOINT}/api/models/{repo}"
    path += "" if revision is None else f"/revision/{quote(revision, safe='')}"
    most = min(most_nbytes(Url.parse(path)), _API_NBYTES)

    def call() -> bytes | T:
        client, headers = _lend(hub), hub.utils.build_hf_headers(library_name="streamload")
        response = client.get(path, params={"blobs": True}, headers=headers)
        hub.utils.hf_raise_for_status(response)
        found: bytes = response.content
        return found

    raw = ask(where, call, instead=instead, most_nbytes=most)
    if not isinstance(raw, bytes):
        return raw
    check_nbytes(Url.parse(path), "the hub's answer is too long", len(raw))
    return parse_json_object(raw, Url.parse(path))


def choose(fetch: Fetch, files: Mapping[Url, int], where: Location) -> Fetch:
    """Return how to read files of the hub: "cache" if asked for or if the disk has room."""
    if fetch == "stream" or not files:
        return "stream"
    lacking = {url: n for url, n in files.items() if isinstance(cached(url), Url)}
    if not lacking:
        return "cache"
    folder, closed = Path(settings().HF_HUB_CACHE), _closed(next(iter(lacking)))
    free, needed = shutil.disk_usage(_there(folder)).free, sum(lacking.values())
    if filesystem_in_memory(folder):
        with suppress(DeviceError):
            free = min(free, available_host_nbytes())
    if closed is None and free >= needed + (_SPARE_NBYTES if fetch == "auto" else 0):
        return "cache"
    if fetch != "cache":
        return "stream"
    instead = "write fetch='stream', or set HF_HOME"
    if closed is not None:
        raise CheckpointError(where, f"{closed} cannot be written: {instead}")
    sizes = f"{format_bytes(needed)} free", format_bytes(free)
    raise CheckpointError(where, f"the files do not fit in {folder}: {instead}", *sizes)


def _there(folder: Path) -> Path:
    return next(each for each in (folder, *folder.parents) if each.is_dir())


def _closed(url: Url) -> Path | None:
    file = file_of(url)
    assert file is not None, url
    folder = repo_folder(file.repo)
    written = (folder / "blobs", folder / "snapshots", folder.parent / ".locks" / folder.name)
    return next((at for at in map(_there, written) if not os.access(at, os.W_OK)), None)


_lock = threading.Lock()  # guards `_coming`
_coming: dict[str, Future[Path]] = {}  # by URL, files that `downloading` fetches now or later


@contextmanager
def downloading(
    urls: Sequence[Url], progress: Callable[[int], None], cancel: Callable[[BaseException], None]
) -> Iterator[None]:
    """Download files to the local cache inside the block, in this order, by one thread.

    Leaving the block stops it: whole files stay, and of the one under way nothing. ``progress``
    gets the bytes so far, of all files; an error of it ends the download, goes to ``cancel``, which
    ends the block, and is raised then.
    """
    stopped = threading.Event()
    failed: list[BaseException] = []  # errors of `progress`
    with _lock:
        mine = {u: Future[Path]() for u in urls if u.href not in _coming}
        _coming.update({url.href: future for url, future in mine.items()})

    def run() -> None:
        done = 0
        for url, future in mine.items():
            if stopped.is_set():
                future.cancel()
                continue
            before = done

            def tell(nbytes: int, before: int = before) -> None:
                nonlocal done
                done = before + nbytes
                try:
                    progress(done)
                except BaseException as error:
                    failed.append(error)
                    stopped.set()
                    cancel(error)
                    raise

            try:
                path = _download(url, tell, stopped)
                tell(path.stat().st_size)  # it may have been there
                future.set_result(path)
            except BaseException as error:
                if stopped.is_set():  # other loads that wait for the file download it themselves
                    future.cancel()
                else:
                    future.set_exception(error)

    thread = threading.Thread(target=run, name="streamload-download", daemon=True)
    if mine:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        if mine:
            thread.join(_STOP_SECONDS)
        with _lock:
            for url in mine:
                del _coming[url.href]
        if failed:
            raise failed[0] from None


def fetched(url: Url, stopped: threading.Event) -> Path:
    """Return a file's path in the local cache, once it is there; download it if nobody does."""
    found = cached(url)
    while not isinstance(found, Path):
        with _lock:
            future = _coming.get(url.href)
        if future is None:
            return _download(url, lambda nbytes: None, stopped)
        with suppress(TimeoutError, CancelledError):
            found = future.result(_POLL_SECONDS)
        if stopped.is_set():
            raise CheckpointError(url, "reading was stopped")
        if future.cancelled():
            time.sleep(_POLL_SECONDS)  # until the other load has let go
    return found


def _download(url: Url, tell: Callable[[int], None], stopped: threading.Event) -> Path:
    """Download a file to the local cache by the library, which keeps nothing of a failed one."""
    hub, file = library(url), file_of(url)
    assert file is not None, url

    class Bar(hub.utils.tqdm):  # type: ignore[misc, name-defined]
        """Passes on what came, and ends the download by an error once it is stopped."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})
            self.came, self.most = 0, options.get("total")

        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise CheckpointError(url, "reading was stopped")
            self.came += int(n or 0)
            if self.most is not None and self.came > self.most:
                raise CheckpointError(url, "the server sent more than it said", self.most)
            tell(self.came)

        def update_transfer(self, n: float) -> None:
            """Ignore bytes of Xet's wire, which may be fewer."""

        def set_transfer_postfix_str(self, *arguments: Any, **options: Any) -> None:
            """Ignore the rate of these bytes."""

    def call() -> Path:
        _lend(hub)
        return Path(
            hub.hf_hub_download(
                file.repo,
                file.path,
                revision=file.commit,
                endpoint=settings().ENDPOINT,
                library_name="streamload",
                tqdm_class=Bar,
            )
        )

    found, there = ask(url, call, stopped), cached(url)
    return there if isinstance(there, Path) else found  # the library resolves links in its path


#: Begins the name of a repository, or of one of its files, where a path could be meant as well.
SCHEME = "hf://"

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+(/[\w.-]+)*)?", re.ASCII)
#: Name of a file of weights or of its index, which is no folder.
A_FILE = re.compile(r".*\.(safetensors|gguf|bin|pth?|irpa|npz|json)", re.IGNORECASE)
_RESOLVED = re.compile(r"(?P<name>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<path>.*)")
_COMMIT = re.compile("[0-9a-f]{40}")
_FORM = f"{SCHEME}org/name[@revision][/file]"


class Repository(NamedTuple):
    """A repository of a model, the revision asked for (None: the default), and a path in it."""

    name: str
    revision: str | None
    path: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{SCHEME}{self.name}{revision}" + f"/{self.path}" * bool(self.path)

    @classmethod
    def parse(cls, text: str) -> Repository:
        """Parse ``org/name[@revision]``, ``hf://org/name[@revision][/path]`` or a hub's URL."""
        if is_url(text):
            root = settings().ENDPOINT + "/"
            match = _RESOLVED.fullmatch(text.removeprefix(root))
            assert match is not None, "is_named"
            found = cls(match["name"], unquote(match["revision"]), unquote(match["path"]))
        elif text.startswith(SCHEME):
            found = cls._of_uri(text)
        else:
            name, _, revision = text.partition("@")
            found = cls(name, revision or None)
            if not _NAME.fullmatch(text) or A_FILE.fullmatch(name):
                raise ShardNotFoundError(text, "no such file or folder")
        hub = library(text)
        inside = (*(found.revision or "").split("/"), *found.path.rstrip("/").split("/"))
        try:
            hub.utils.validate_repo_id(found.name)
        except ValueError:
            inside = ("..",)
        if {".", ".."}.intersection(inside):
            raise ShardNotFoundError(text, "no such file or folder", f"a path, or {_FORM}")
        return found

    @classmethod
    def _of_uri(cls, text: str) -> Repository:
        body = text.removeprefix(SCHEME).strip("/")
        # the library parses no names without an owner
        owner = "" if "/" in body.partition("@")[0] else "x/"
        hub = library(text)
        try:
            uri = hub.utils.parse_hf_uri(f"{SCHEME}{owner}{body}")
        except ValueError as error:
            raise ShardNotFoundError(text, "is no repository of the hub", _FORM) from error
        if uri.type != "model":
            raise ShardNotFoundError(text, "is no repository of a model", _FORM, f"a {uri.type}")
        return cls(uri.id.removeprefix(owner), uri.revision, uri.path_in_repo)


def repository_of(path: str | os.PathLike[str]) -> Repository | None:
    """Return the repository that a path names, maybe by its URL; None for any other path."""
    name = os.fsdecode(path)
    if isinstance(path, Url):
        return None
    if not is_named(name) and (is_url(name) or os.path.lexists(expanded(local(name)))):
        return None
    return Repository.parse(name)


def revised(path: str | os.PathLike[str], revision: str | None) -> str | os.PathLike[str]:
    """Return a repository's name with a revision, if it has none; any other path unchanged."""
    found = None if revision is None else repository_of(path)
    return path if found is None or found.revision else str(found._replace(revision=revision))


class _Listing(NamedTuple):
    files: Mapping[str, int]  # lengths in bytes, by path
    revision: str | None  # that was asked for


_listings: dict[tuple[str, str, str], _Listing] = {}  # by server, repository and commit


def known_listing(file: HubFile | None) -> _Listing | None:
    """Return the listing of a file's repository if this process has asked for it."""
    if file is None or (known := settings()) is None:
        return None
    return _listings.get((known.ENDPOINT, file.repo, file.commit))


def is_named(text: str) -> bool:
    """Return whether text names a repository: by ``hf://``, or as a URL of the hub's server."""
    if not is_url(text):
        return text.startswith(SCHEME)
    known = settings()
    root = known.ENDPOINT + "/" if known is not None else ""
    path = text.removeprefix(root)
    return path != text and not {"?", "#"}.intersection(path) and bool(_RESOLVED.fullmatch(path))


def origin(path: Location) -> Location:
    """Return the URL of a path in the local cache if this process has listed its repository."""
    file = in_cache(path) if isinstance(path, Path) else None
    known = known_listing(file)
    inside = _inside(known.files, file.path) if file and known else None
    return path if file is None or inside is None else url_of(file._replace(path=inside))


def locate(text: str) -> Location:
    """Return the folder or file that a repository's name means, of a commit or in the cache."""
    asked = Repository.parse(text)
    try:
        if settings().is_offline_mode():
            if (kept := snapshot(asked)) is None:
                raise offline(text, asked.name)
            return kept
        found = _listed(text, asked, partial(snapshot, asked))
        return found if isinstance(found, Path) else url_of(found)
    except CheckpointError as error:
        if is_named(text):
            raise
        problem = f"no such file or folder; as a repository: {error.problem}"
        raise replace(error, problem=problem) from error.__cause__


def _listed(
    text: Location | str, asked: Repository, instead: Callable[[], Path | None] = lambda: None
) -> HubFile | Path:
    found = described(text, asked.name, asked.revision, instead)
    if isinstance(found, Path):
        return found
    commit, siblings = found.get("sha"), found.get("siblings")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise _invalid(text, "sha", "40 hexadecimal digits", commit)
    files = {}
    for number, each in enumerate(siblings if isinstance(siblings, list) else [siblings]):
        if not isinstance(each, dict) or not isinstance(name := each.get("rfilename"), str):
            raise _invalid(text, f"siblings[{number}]", "an object with a rfilename", each)
        nbytes = each.get("size") or 0
        if type(nbytes) is not int or nbytes < 0:
            raise _invalid(text, f"the size of {name!r}", "a number of bytes", nbytes)
        files[name] = nbytes
    _listings[settings().ENDPOINT, asked.name, commit] = _Listing(files, asked.revision)
    path = _inside(files, asked.path.rstrip("/"))
    if path is None:
        problem = "no such file in the repository"
        raise ShardNotFoundError(text, problem, found=some(sorted(files)))
    return HubFile(asked.name, commit, path)


def _invalid(where: Location | str, field: str, expected: str, found: object) -> CheckpointError:
    problem = f"{field} in the hub's answer is invalid"
    return CheckpointError(where, problem, expected, describe(found))


def _inside(files: Mapping[str, int], path: str) -> str | None:
    if not path or path in files:
        return path
    path += "/"
    return path if any(each.startswith(path) for each in files) else None


def snapshot(asked: Repository) -> Path | None:
    """Return the path of a repository, or of its file, in the local cache; None if it is absent."""
    hub = library(asked.name)
    try:
        found = hub.HfApi().resolve_revision(
            asked.name, revision=asked.revision, local_files_only=True
        )
    except (hub.errors.RevisionResolutionError, OSError, ValueError):
        return None
    if not re.fullmatch(r"\w+", found.resolved, re.ASCII):
        return None
    path = repo_folder(asked.name) / "snapshots" / found.resolved / asked.path
    return path if path.exists() else None


def listing(folder: Location) -> Mapping[str, int] | None:
    """Return lengths in bytes of a repository's files in a folder, by path; None if it is none."""
    file = file_of(folder)
    if file is None:
        return None
    if known_listing(file) is None:  # another process has found the commit
        _listed(folder, Repository(file.repo, file.commit))
    known = known_listing(file)
    assert known is not None, folder
    inside = file.path.rpartition("/")[0] + "/" * ("/" in file.path)
    return {path[len(inside) :]: n for path, n in known.files.items() if path.startswith(inside)}


def keep_ref(url: Location) -> None:
    """Note in the local cache the commit of the revision asked for, for loads without the hub."""
    file = file_of(url)
    known = known_listing(file)
    if file is None or known is None or known.revision == file.commit:
        return
    revision = (known.revision or settings().DEFAULT_REVISION).strip("/")
    ref = repo_folder(file.repo) / "refs" / revision
    made = ref.with_name(f"{ref.name}.{uuid4().hex}")
    with suppress(OSError):  # this load does not need it
        ref.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(file.commit)
        made.replace(ref)


class CachedReader(PartsReader):
    """Reads a file of the hub by pread from the local cache; each read waits for its download."""

    _how = "from the Hugging Face cache"

    def __init__(self, url: Url, file_nbytes: int) -> None:
        self._stopped = threading.Event()
        part = Part(url, file_nbytes)
        super().__init__([part], lambda _: PreadReader(fetched(url, self._stopped), file_nbytes))

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        super().close()
