"""Files that a conversion writes: how their bytes get to the disk, and the lock on a destination.

Written bytes leave memory behind the cursor: the disk begins with them at once, and is waited for a
few blocks later. So dirty pages never fill a small machine, and the last fsync has little to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamload._system import libc, read_at, sync, sync_folder
from streamload.checkpoint.header import is_there, unreadable
from streamload.digests import digest_of
from streamload.errors import CheckpointError

#: In the destination: what is being written, until it is whole.
WORK = ".streamload"

# Source: sync_file_range(2).
_WRITE = 2
_WRITE_AND_WAIT = 1 | 2 | 4

# Errors of writing: the disk, or the user's share of it, is full.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# What filesystems without locks say, as some of networks: there, users keep conversions apart.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
_WRITES_BEHIND = sys.platform == "linux"
_PIECE_NBYTES = 2**20


def unwritable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """What stands in the way of writing to a path, as one of our errors."""
    if error.errno in _NO_ROOM:
        problem = "no room is left; what is finished is kept, and resume continues"
        return CheckpointError(path, problem, found=error.strerror)
    expected = "a smaller maximum for files" if error.errno == errno.EFBIG else None
    return CheckpointError(path, "cannot be written", expected, error.strerror)


@contextmanager
def writing_to(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what the system says of writing as a CheckpointError that names a path."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def exists(path: Path) -> bool:
    """Whether there is something of that name; raises CheckpointError where hidden."""
    with writing_to(path):
        return is_there(path)


class Output:
    """A file that is written at known places by several threads.

    Raises:
        CheckpointError: from each method, where it cannot be written.
    """

    def __init__(self, path: Path, name: Path) -> None:
        """Open ``path``, which errors call ``name``: where it will be."""
        self._name = name
        self._lock = threading.Lock()
        self._lost: OSError | None = None
        with writing_to(name):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def write(self, start: int, data: memoryview) -> None:
        """Write, and let the disk begin with it."""
        done = 0
        with writing_to(self._name):
            while done < data.nbytes:
                with data[done:] as rest:
                    done += os.pwrite(self._fd, rest, start + done)
            _sync_range(self._fd, start, data.nbytes, _WRITE)

    def read_into(self, start: int, out: memoryview) -> None:
        """Read what was written; what is behind the end is zeros."""
        done = 0
        with writing_to(self._name):
            while done < out.nbytes and (count := read_at(self._fd, start + done, out[done:])):
                done += count
        out[done:] = bytes(out.nbytes - done)

    def drop(self, start: int, nbytes: int, *, keeps: bool = False) -> None:
        """Wait for what was written a while ago, and take it out of the page cache.

        With ``keeps`` it stays there until the file is closed, for it is read again.
        """
        with self._lock:
            if self._fd >= 0:  # else it is whole and closed
                self._bring(lambda: _sync_range(self._fd, start, nbytes, _WRITE_AND_WAIT))
                if not keeps:
                    _drop_range(self._fd, start, nbytes)

    def sync(self) -> None:
        """Bring all that was written to the disk.

        After an error always the same one: the system tells that pages were lost once, and the
        next time says that all is well.
        """
        self._bring(lambda: sync(self._fd))

    def _bring(self, to_disk: Callable[[], None]) -> None:
        if self._lost is None:
            try:
                to_disk()
            except OSError as error:
                self._lost = error
        if self._lost is not None:
            raise unwritable(self._name, self._lost) from self._lost

    def close(self) -> None:
        """Close it; may be called twice."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                _drop_range(fd, 0, 0)
                os.close(fd)


def _sync_range(fd: int, start: int, nbytes: int, flags: int) -> None:
    """Bring a part of a file to the disk, on Linux; drops the GIL."""
    if not _WRITES_BEHIND or libc().sync_file_range(fd, start, nbytes, flags) == 0:
        return
    code = ctypes.get_errno()
    # a filesystem that does not know of it; an error of the disk is not to be lost: it is told once
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code))


def _drop_range(fd: int, start: int, nbytes: int) -> None:
    if _WRITES_BEHIND:
        with suppress(OSError):  # only advice
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def write_file(path: Path, data: Iterable[bytes], mode: int | None = None) -> None:
    """Write a small file anew, with its permissions, and bring it to the disk."""
    path.unlink(missing_ok=True)  # of an earlier run, and perhaps not to be written to
    with open(path, "wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())
    if mode is not None:
        path.chmod(mode)


def pieces(source: Path) -> Iterator[bytes]:
    """A file's bytes, a few at a time."""
    try:
        with open(source, "rb") as file:
            while piece := file.read(_PIECE_NBYTES):
                yield piece
    except OSError as error:
        raise unreadable(source, error) from error


def file_sum(path: Path, nbytes: int) -> str:
    """The md5 sum of a file of tensors, in hexadecimal; it is made as long as it will be."""
    extend(path, nbytes)
    found = hashlib.md5(usedforsecurity=False)
    for piece in pieces(path):
        found.update(piece)
    return found.hexdigest()


def extend(path: Path, nbytes: int) -> None:
    """Make a file as long as it will be: what is behind the last tensor is zeros."""
    with writing_to(path):
        if path.stat().st_size < nbytes:
            os.truncate(path, nbytes)


def file_digest(path: Path) -> str:
    """The digest of a file's bytes."""
    return digest_of(map(memoryview, pieces(path)))


@contextmanager
def locked(destination: Path) -> Iterator[None]:
    """Keep others out of a destination, which is made where it is not there.

    What was made and is empty is removed again.

    Raises:
        CheckpointError: another conversion is in it, or it cannot be written.
    """
    made = [p for p in (destination, *destination.parents) if not exists(p)]
    work = destination / WORK
    fd = -1
    try:
        with writing_to(destination):
            fd = _lock(work)
            for folder in reversed(made):
                with suppress(PermissionError):  # it may be written and not read
                    sync_folder(folder.parent)
        yield
    finally:
        with suppress(OSError):
            if fd >= 0 and os.listdir(work) == ["lock"]:
                (work / "lock").unlink()
                work.rmdir()
            for folder in made:
                folder.rmdir()
        if fd >= 0:
            os.close(fd)


def _lock(work: Path) -> int:
    """The descriptor that holds the lock."""
    while True:
        work.parent.mkdir(parents=True, exist_ok=True)
        # unfinished files are as private as finished ones
        work.mkdir(mode=0o700, exist_ok=True)
        try:
            fd = os.open(work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # another one has just finished and cleaned up
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise CheckpointError(
                work.parent, "another conversion is being written there"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(fd)
                raise
        with suppress(OSError):  # not where the file was removed meanwhile
            if os.path.samestat(os.fstat(fd), os.stat(work / "lock")):
                return fd
        os.close(fd)
