"""What a path means: a folder or a file of this machine, of a server, of the Hub, in a bucket.

`locate` understands it once; the `Folder` that it returns does the rest. `open_file`, `open_reader`
and `choose_reader` take one file of any kind. Code of servers is imported when their files are met.
"""

from __future__ import annotations

import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from streamload.core.location import Location, Url, is_url, local
from streamload.core.system import filesystem_and_length
from streamload.errors import CheckpointError
from streamload.files.header import FileState, Header, Part, View, open_regular
from streamload.files.local import (
    MAPPED_FILESYSTEMS,
    DirectReader,
    LocalFile,
    MmapReader,
    PreadReader,
    exists,
    expanded,
    no_lease,
    take_lease,
)
from streamload.files.local import Folder as Folder
from streamload.files.local import open_file as open_local
from streamload.files.page_cache import PageCacheKind, resident_fraction
from streamload.files.reader import PartsReader, Reader, StridedReader

if TYPE_CHECKING:
    from streamload.files.hub import HubFile
    from streamload.files.remote import RemoteFile

ReaderKind = Literal["auto", "mmap", "pread", "direct"]
#: For URLs alone: "http", "store" for those of buckets, and "cache" after a download from the hub.
ResolvedKind = Literal["mmap", "pread", "direct", "http", "store", "cache"]
REMOTE_KINDS = ("http", "store")

# fmt: off
#: Filesystems on a disk of this machine that support direct reads: "auto" uses them for files
#: mostly not in the page cache. Those in memory and read-only images are left out.
DIRECT_FILESYSTEMS = MAPPED_FILESYSTEMS - {
    "erofs", "iso9660", "ramfs", "squashfs", "tmpfs", "ubifs", "udf",
}
# fmt: on

# From this resident fraction on, "auto" reads through the page cache; below, direct reads are
# faster on every disk measured (docs/measurements.md).
_MOSTLY_RESIDENT = 0.5
# Bounds of the fractions that `_RESIDENT` names: words, since numbers would differ for each shard.
# Almost nothing is resident after its header was read.
_SHARES = (0.05, _MOSTLY_RESIDENT, 1.0)
_RESIDENT = ("not ", "mostly not ", "mostly ", "")

_ADDRESS_BITS = sys.maxsize.bit_length() + 1
_MAX_MAPPED_NBYTES_32 = 2**30  # of one shard, with addresses of 32 bits

# a folder of the hub's local cache, which may lack files of its repository
_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/[0-9a-f]{40}(/|$)")


def locate(path: str | os.PathLike[str], pinned: HubFile | None = None) -> Folder:
    """Understand the path of a checkpoint; raise ShardNotFoundError if nothing is there.

    ``pinned``: the file or folder that a repository's name stands for; None: ask the hub.
    """
    text = os.fsdecode(path.href if isinstance(path, Url) else path)
    if not (is_url(text) or text.startswith("hf://")):
        found = expanded(local(text))
        if text and exists(found):  # `local` makes the current folder of ""
            return folder_at(found)
    from streamload.files import remote

    return folder_at(remote.locate(path, text, pinned))


def folder_at(found: Location) -> Folder:
    """Return the `Folder` of a file, or at a folder."""
    path = found if isinstance(found, Path) and os.path.isdir(found) else found.parent
    if isinstance(found, Path) and not _SNAPSHOT.search(str(found)):
        return Folder(found, path)
    from streamload.files import remote

    return remote.folder_at(found, path)


def place_of(file: Location) -> Location:
    """Return where a file is now: in the hub's local cache if it is there."""
    if isinstance(file, Path):
        return file
    from streamload.files import hub

    return hub.cached(file)


def is_of_hub(file: Location) -> bool:
    """Return whether a file is read from the hub's server."""
    if isinstance(file, Path):
        return False
    from streamload.files import hub

    return hub.file_of(file) is not None


def fingerprint(header: Header) -> dict[str, str | int]:
    """Return `Header.fingerprint`; of the hub's files, the same for a URL and for the cache."""
    file = folder_at(header.path).identity(header.path.name)
    return header.fingerprint() if file is None else {"file": file, "nbytes": header.file_nbytes}


@contextmanager
def open_file(path: str | os.PathLike[str]) -> Iterator[LocalFile | RemoteFile]:
    """Yield an open file of any place, to read its header; raise CheckpointError if it changes."""
    if not isinstance(path, Url):
        with open_local(Path(path)) as file:
            yield file
        return
    from streamload.files.connections import connections
    from streamload.files.remote import RemoteFile

    with connections():
        yield RemoteFile(path)


def open_reader(
    shard: Location,
    file_nbytes: int,
    kind: ReaderKind | ResolvedKind = "auto",
    state: FileState | None = None,
    views: Sequence[View] = (),
    parts: Sequence[Part] = (),
) -> Reader:
    """Return an open `Reader` of a shard; the arguments but ``kind`` are from its `Header`.

    ``kind`` "auto" is resolved by `resolve_reader`. If no lease protects a file from truncation it
    is read by pread instead of a map; `Reader.fallback` gives the reason.
    """
    if views:

        def open_part(part: Part) -> Reader:
            return open_reader(part.path, part.nbytes, kind, part.state)

        own = Part(shard, file_nbytes, state)
        whole = PartsReader([own, *parts], open_part) if parts else open_part(own)
        return StridedReader(whole, views)
    resolved = resolve_reader(shard, kind)
    if isinstance(shard, Url):
        from streamload.files import hub, remote

        return (hub.CachedReader if resolved == "cache" else remote.HttpReader)(shard, file_nbytes)
    # an empty file cannot be mapped or read directly
    opened = {"mmap": MmapReader, "direct": DirectReader} if file_nbytes else {}
    return opened.get(resolved, PreadReader)(shard, file_nbytes, state)


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The reader chosen for a shard, and the reason."""

    kind: ResolvedKind
    reason: str  # for a report; equal for shards in the same state


def resolve_reader(path: str | os.PathLike[str], kind: ReaderKind | ResolvedKind) -> ResolvedKind:
    """Return ``kind``, "auto" as "mmap" or "pread"; a URL is always read from its server."""
    kind = "auto" if isinstance(path, Url) and kind in get_args(ReaderKind) else kind
    return choose_reader(path, kind, whole_slots=False, checked=False).kind


def choose_reader(
    path: str | os.PathLike[str],
    kind: ReaderKind | ResolvedKind,
    *,
    page_cache: PageCacheKind = "auto",
    whole_slots: bool = True,
    checked: bool = True,
) -> ReaderChoice:
    """Return how to read a shard; takes less than 2 ms for any length.

    "auto" chooses direct reads for files of a local disk that are mostly not in the page cache,
    unless ``page_cache`` is "keep", and `resolve_reader` for all others. Files that no lease
    protects from truncation are never mapped, unless this is not ``checked``. ``whole_slots``: the
    shard is read into page-aligned memory with room for over-reading; without it direct reads need
    a copy, which halves their speed (from 2.6 to 3.2 GB/s to 1.4 to 2.1 on a virtual disk, the
    speed of a map).
    """
    url = path if isinstance(path, Url) else None
    if kind not in get_args(ReaderKind) and not (kind in (*REMOTE_KINDS, "cache") and url):
        raise ValueError(f"unknown reader {kind!r}; known: {', '.join(get_args(ReaderKind))}")
    if url is not None:
        if kind in ("mmap", "direct"):
            raise ValueError(f'reader="{kind}" is for files, and {url} is read from a server')
        if url.is_store:
            return ReaderChoice("store", f"from the bucket {url.bucket}")
        return ReaderChoice("cache" if kind == "cache" else "http", f"from {url.host}")
    if kind == "auto":
        choice = _automatic(path, page_cache, whole_slots)
    else:
        choice = ReaderChoice(kind, f'reader="{kind}" was asked for')
    if choice.kind != "mmap" or not checked:
        return choice
    why = ""
    with suppress(CheckpointError), open_regular(Path(path)) as file:  # reading it will raise it
        why = no_lease(filesystem_and_length(path)[0]) or take_lease(file.fileno())
    if why:
        choice = replace(choice, kind="pread", reason=f"{choice.reason}, and not mapped: {why}")
    return choice


def _automatic(
    path: str | os.PathLike[str], page_cache: PageCacheKind, whole_slots: bool
) -> ReaderChoice:
    filesystem, nbytes = filesystem_and_length(path)
    buffered = reader_for(filesystem, nbytes)
    if filesystem not in MAPPED_FILESYSTEMS:
        reason = f"{filesystem or 'an unknown filesystem'} is read through the page cache"
        return ReaderChoice(buffered, reason)
    if not whole_slots:
        return ReaderChoice(buffered, f"on {filesystem}, for memory that the CPU writes")
    resident = resident_fraction(path)
    reason = "it is not known how much is in the page cache"
    if resident is not None:
        reason = f"{_RESIDENT[bisect_right(_SHARES, resident)]}in the page cache"
    if filesystem not in DIRECT_FILESYSTEMS:
        reason = f"{filesystem} is read through the page cache"
    elif page_cache == "keep":
        reason = 'page_cache="keep" fills the page cache'
    elif resident is not None and resident < _MOSTLY_RESIDENT:
        return ReaderChoice("direct", f"on {filesystem}, {reason}")
    return ReaderChoice(buffered, reason)


def reader_for(
    filesystem: str, nbytes: int, *, address_bits: int = _ADDRESS_BITS
) -> Literal["mmap", "pread"]:
    """Return "mmap" if it is safe on a filesystem and ``nbytes`` fit in addresses, else "pread"."""
    if address_bits <= 32 and nbytes > _MAX_MAPPED_NBYTES_32:
        return "pread"
    return "mmap" if filesystem in MAPPED_FILESYSTEMS else "pread"


def is_slow(path: Location) -> bool:
    """Return whether a file is far away: behind a URL, or on a network or FUSE filesystem."""
    filesystem = "" if isinstance(path, Url) else filesystem_and_length(path)[0]
    return isinstance(path, Url) or filesystem not in MAPPED_FILESYSTEMS | {""}
