"""Bring a checkpoint's files from the Hugging Face Hub to its local cache, before or during a load.

Only files that the load reads are downloaded, by huggingface_hub.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from streamload.checkpoint.open import Checkpoint, CheckpointLike, expanded, opened
from streamload.core.location import Location, Url, is_url, local
from streamload.core.progress import Progress, reporting
from streamload.errors import CheckpointError
from streamload.files import hub, remote
from streamload.files.header import FileState, Header
from streamload.files.hub import Fetch

_DOCUMENT = re.compile(r"config\.json|generation_config\.json|[\w-]+\.py|adapter_[^/]+")


def repository_of(path: str | os.PathLike[str]) -> hub.Repository | None:
    """Return the repository that a path names, maybe by its URL; None for any other path."""
    name = os.fsdecode(path)
    if isinstance(path, Url):
        return None
    if not hub.is_named(name) and (is_url(name) or os.path.lexists(expanded(local(name)))):
        return None
    return hub.Repository.parse(name)


def revised(path: str | os.PathLike[str], revision: str | None) -> str | os.PathLike[str]:
    """Return a repository's name with a revision, if it has none; any other path unchanged."""
    found = None if revision is None else repository_of(path)
    return path if found is None or found.revision else str(found._replace(revision=revision))


def choose_fetch(checkpoint: Checkpoint, fetch: Fetch, *, needed: bool) -> Fetch:
    """Return how a load reads the hub's files that the cache lacks: "stream" or "cache".

    With ``needed``, weights stay in the files: they have to be on this machine.
    """
    paths = [header.path for header in checkpoint.shards]
    if fetch == "cache" and any(isinstance(p, Url) and hub.file_of(p) is None for p in paths):
        problem = "is not of the Hugging Face Hub, and has no cache: write fetch='stream'"
        raise CheckpointError(checkpoint.path, problem)
    files = _of_hub(checkpoint)
    where = next(iter(files)).parent if files else checkpoint.path
    if needed and files and fetch == "stream":
        problem = "weights that stay in files need them on this machine: write fetch='cache'"
        raise CheckpointError(where, problem)
    return hub.choose("cache" if needed else fetch, files, where)


def _of_hub(checkpoint: Checkpoint) -> dict[Url, int]:
    """Return lengths in bytes of the hub's files that the cache lacked on opening."""
    return {
        header.path: header.file_nbytes
        for header in checkpoint.shards
        if isinstance(header.path, Url) and hub.file_of(header.path) is not None
    }


def _with_documents(files: Collection[Url]) -> list[Url]:
    """Return ``files`` after config.json and the index, which opening the cache needs."""
    folder = next(iter(files)).parent
    names = [
        name
        for name in hub.listing(folder) or ()
        if name == "config.json" or (name.endswith(".json") and ".index." in name)
    ]
    documents = (folder / name for name in names if "/" not in name)
    return [*(url for url in documents if not isinstance(hub.cached(url), Path)), *files]


@contextmanager
def coming(
    files: Collection[Url],
    progress: Callable[[int], None],
    cancel: Callable[[BaseException], None],
) -> Iterator[None]:
    """Download files of the hub inside the block, while others are read; see `hub.downloading`."""
    if not files:
        yield
        return
    with hub.downloading(_with_documents(files), progress, cancel):
        yield
    hub.keep_ref(next(iter(files)))


def on_disk(path: CheckpointLike, fetch: Fetch, progress: Progress) -> Checkpoint:
    """Return a checkpoint whose files of the hub were downloaded, for weights that stay in them.

    It is the same object if all files are on this machine already, or of another server.
    """
    checkpoint = opened(path)
    files = _of_hub(checkpoint)
    if not files:
        return checkpoint
    choose_fetch(checkpoint, fetch, needed=True)
    download(_with_documents(files), sum(files.values()), progress)
    headers = tuple(_local(header) for header in checkpoint.shards)
    shards = {h.path: new.path for h, new in zip(checkpoint.shards, headers, strict=True)}
    tensors = {
        name: replace(info, shard=shards[info.shard]) for name, info in checkpoint.tensors.items()
    }
    path = checkpoint.path
    return replace(
        checkpoint,
        path=headers[0].path.parent / path.name if isinstance(path, Url) else path,
        shards=headers,
        tensors=MappingProxyType(tensors),
    )


def download(files: Sequence[Url], nbytes: int, progress: Progress) -> list[Path]:
    """Download files of the hub, of so many bytes, to its local cache; return their paths."""
    ended = threading.Event()
    with (
        reporting(progress, nbytes, "downloaded") as tell,
        hub.downloading(files, tell, lambda error: ended.set()),
    ):
        paths = [hub.fetched(url, ended) for url in files]
    for url in files[:1]:
        hub.keep_ref(url)
    return paths


@contextmanager
def documents(found: Location, fetch: Fetch) -> Iterator[Location]:
    """Yield a checkpoint's path with its configurations, code and adapter on this machine.

    Those of the hub are in its local cache, or under ``fetch="stream"`` in a temporary folder. A
    path of another kind is yielded unchanged.
    """
    folder = found.parent
    listed = hub.listing(folder) if isinstance(found, Url) else None
    if not isinstance(folder, Url) or listed is None:
        yield found
        return
    names = [name for name in listed if _DOCUMENT.fullmatch(name)]
    urls = [folder / name for name in names]
    if fetch != "stream" and hub.choose(fetch, {u: listed[u.name] for u in urls}, found) == "cache":
        paths = download(urls, sum(listed[name] for name in names), progress=False)
        yield paths[0].parent / found.name if found.name else paths[0].parent
        return
    with TemporaryDirectory(prefix="streamload-") as scratch:
        for url in urls:
            with open(Path(scratch, url.name), "wb") as out:
                remote.download(url, out, listed[url.name])
        yield Path(scratch, found.name)


def _local(header: Header) -> Header:
    """Return the header of a downloaded file; CheckpointError if it has another length."""
    path = hub.cached(header.path)
    if not isinstance(path, Path) or path is header.path:  # of another server, or there before
        return header
    found = path.stat().st_size
    if found != header.file_nbytes:
        raise CheckpointError(path, "is not as long as on the hub", header.file_nbytes, found)
    tensors = tuple(replace(info, shard=path) for info in header.tensors)
    return replace(header, path=path, tensors=tensors, state=FileState.of(path))
