"""Bring a checkpoint's files from the Hugging Face Hub to its local cache, before or during a load.

Only files that the load reads are downloaded, by huggingface_hub.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.core.location import Location, Url
from streamload.core.progress import Progress, reporting
from streamload.errors import CheckpointError
from streamload.files.folder import is_of_hub, place_of
from streamload.files.header import FileState, Header
from streamload.files.reader import Fetch

_DOCUMENT = re.compile(r"config\.json|generation_config\.json|[\w-]+\.py|adapter_[^/]+")


def choose_fetch(checkpoint: Checkpoint, fetch: Fetch, *, needed: bool) -> Fetch:
    """Return how a load reads the hub's files that the cache lacks: "stream" or "cache".

    With ``needed``, weights stay in the files: they have to be on this machine.
    """
    files, paths = _of_hub(checkpoint), [header.path for header in checkpoint.shards]
    if fetch == "cache" and any(isinstance(p, Url) and p not in files for p in paths):
        problem = "is not of the Hugging Face Hub, and has no cache: write fetch='stream'"
        raise CheckpointError(checkpoint.path, problem)
    if not files:
        return "stream"
    from streamload.files import hub

    where = next(iter(files)).parent
    if needed and fetch == "stream":
        problem = "weights that stay in files need them on this machine: write fetch='cache'"
        raise CheckpointError(where, problem)
    return hub.choose("cache" if needed else fetch, files, where)


def _of_hub(checkpoint: Checkpoint) -> dict[Url, int]:
    return {
        header.path: header.file_nbytes
        for header in checkpoint.shards
        if isinstance(header.path, Url) and is_of_hub(header.path)
    }


def _with_documents(files: Collection[Url]) -> list[Url]:
    from streamload.files import hub

    folder = next(iter(files)).parent
    names = [
        name
        for name in hub.listing(folder) or ()
        if name == "config.json" or (name.endswith(".json") and ".index." in name)
    ]
    documents = (folder / name for name in names if "/" not in name)
    return [*(url for url in documents if isinstance(hub.cached(url), Url)), *files]


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
    from streamload.files import hub

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
    from streamload.files import hub

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
    if not is_of_hub(found):
        yield found
        return
    from streamload.files import hub, remote

    folder = found.parent
    assert isinstance(folder, Url), found
    listed = hub.listing(folder) or {}
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
    path = place_of(header.path)
    if not isinstance(path, Path) or path is header.path:  # of another server, or there before
        return header
    found = path.stat().st_size
    if found != header.file_nbytes:
        raise CheckpointError(path, "is not as long as on the hub", header.file_nbytes, found)
    tensors = tuple(replace(info, shard=path) for info in header.tensors)
    return replace(header, path=path, tensors=tensors, state=FileState.of(path))
