"""The disk cache for later processes: results of device probes, compiled kernels, the copy loop.

Some files are machine code, so only files that no other user can have written are read. Without a
writable cache, each process recomputes its contents.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

_FORMAT = "3"  # raised when the same IR is compiled to something else, or kept otherwise
_SEAL_NBYTES = hashlib.sha256().digest_size


def read_kept(kind: str, *depends_on: str) -> bytes | None:
    """Return the data that `keep` stored under the same ``kind`` and ``depends_on``, or None.

    Like ssh's keys, the file and its folder must belong to this user or to root, and be writable
    for nobody else. The file begins with a digest of its data and name: damaged and renamed files
    are ignored.
    """
    try:
        path = _file(kind, depends_on)
        if not _is_private(os.stat(path.parent)):
            return None
        with path.open("rb") as file:
            data = file.read() if _is_private(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    seal, found = data[:_SEAL_NBYTES], data[_SEAL_NBYTES:]
    return found if seal == _seal(path, found) else None


def keep(data: bytes, kind: str, *depends_on: str) -> None:
    """Store ``data`` for `read_kept` under ``kind`` and all texts that the data depends on.

    Does nothing if the folder is not private or not writable. A reader sees the whole file or none.
    """
    with suppress(OSError):
        path = _file(kind, depends_on)
        _make_private(path.parent)
        if not _is_private(os.stat(path.parent)):
            return
        opened, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(opened, "wb") as file:
                file.write(_seal(path, data) + data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def kept(make: Callable[[], bytes], kind: str, *depends_on: str) -> bytes:
    """Return the data stored under ``kind`` and ``depends_on``, else call ``make`` and store it."""
    found = read_kept(kind, *depends_on)
    if found is None:
        found = make()
        keep(found, kind, *depends_on)
    return found


def _file(kind: str, depends_on: tuple[str, ...]) -> Path:
    """Return the file for a kind and texts; raises FileNotFoundError for a user without a home."""
    digest = hashlib.sha256("\n".join((_FORMAT, *depends_on)).encode()).hexdigest()[:32]
    # a folder of its own: earlier versions made the one above under any umask
    return _cache_home() / "streamload" / "kept" / f"{kind}-{digest}"


def _cache_home() -> Path:
    """Return the user's folder for caches, by XDG_CACHE_HOME or the home."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(root):  # a user without a home
        raise FileNotFoundError(f"{root} is no absolute path for a cache")
    return Path(root)


def _make_private(folder: Path) -> None:
    """Make a folder and its missing parents, writable only for this user under any umask."""
    for one in (*reversed(folder.parents), folder):
        one.mkdir(mode=0o700, exist_ok=True)


def _is_private(info: os.stat_result) -> bool:
    """Whether a file belongs to this user or root, and nobody else can write it."""
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022


def _seal(path: Path, data: bytes) -> bytes:
    """Return the digest of a file's name and data."""
    return hashlib.sha256(path.name.encode() + data).digest()


@cache
def lend_caches() -> None:
    """Set a temporary cache folder for PoCL and tinygrad if the user's cache is not writable.

    Without a writable cache PoCL (POCL_CACHE_DIR) does not compile at all, and tinygrad (CACHEDB)
    only if caching is disabled (CACHELEVEL). Call this before either is loaded; the settings of a
    tinygrad that is loaded already are changed, too.
    """
    try:
        _make_private(_cache_home())
        with tempfile.TemporaryFile(dir=_cache_home()) as file:
            file.write(b"x")  # a disk may be full
        return
    except OSError:
        pass
    loaded: Any = sys.modules.get("tinygrad.helpers")
    try:
        lent = tempfile.mkdtemp(prefix="streamload-cache-")
    except OSError:  # nothing can be written here
        os.environ["CACHELEVEL"] = "0"
        if loaded is not None:
            loaded.CACHELEVEL.value = 0
        return
    atexit.register(shutil.rmtree, lent, ignore_errors=True)
    if "CACHEDB" not in os.environ:
        os.environ["CACHEDB"] = os.path.join(lent, "cache.db")
        if loaded is not None:
            loaded.CACHEDB = os.environ["CACHEDB"]
    os.environ.setdefault("POCL_CACHE_DIR", os.path.join(lent, "pocl"))
