"""Write files of a conversion to the disk, and lock its destination.

The kernel starts to write pages to the disk at once, and a thread waits for them a few blocks
later. So dirty pages never fill a small machine's memory, and the last fsync is short.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from streamload.checkpoint.digests import digest_of
from streamload.checkpoint.shards import cut
from streamload.core.interrupt import deferred_interrupt
from streamload.core.system import Descriptor, libc, read_at, sync, sync_folder
from streamload.errors import CheckpointError
from streamload.files.header import is_there, unreadable

#: Folder in the destination for files that are not finished.
WORK = ".streamload"

# Source: sync_file_range(2).
_WRITE = 2
_WRITE_AND_WAIT = 1 | 2 | 4

# Errors of writing: the disk, or the user's share of it, is full.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
# Errors of filesystems without locks, such as some of networks: users keep conversions apart.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
# opens a folder for names in it, even if it cannot be listed
_A_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_WRITES_BEHIND = sys.platform == "linux"
_PIECE_NBYTES = 2**20


def unwritable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Return the CheckpointError to raise for an OSError of writing to a path."""
    if error.errno in _NO_ROOM:
        problem = "no room is left; what is finished is kept, and resume continues"
        return CheckpointError(path, problem, found=error.strerror)
    expected = "a smaller maximum for files" if error.errno == errno.EFBIG else None
    return CheckpointError(path, "cannot be written", expected, error.strerror)


@contextmanager
def writing_to(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise, for an OSError inside the with, a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from error


def exists(path: Path) -> bool:
    """Whether a path exists; raises CheckpointError if the system does not show it."""
    with writing_to(path):
        return is_there(path)


class Folder(Descriptor):
    """An open folder, in which files are written and removed without following links.

    Paths are relative to it, with "/". A link in the place of a folder or a file is an error,
    wherever it leads and whenever it appears.

    Raises:
        CheckpointError: from each method, if a part of a path is a link.
        OSError: from each method.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder; ``path`` itself may be a link."""
        super().__init__(path, _A_FOLDER)
        self.path = path

    @contextmanager
    def _above(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the folder that a path is in; yields its descriptor, and the path's last part."""
        *folders, name = path.split("/")
        with ExitStack() as opened:
            fd = self.fd
            for n, part in enumerate(folders, 1):
                inner = _open_unlinked(fd, part, _A_FOLDER, self.path.joinpath(*folders[:n]))
                fd = opened.enter_context(inner)
            yield fd, name

    def open(self, path: str, flags: int, mode: int = 0o666) -> Descriptor:
        """Open a file as `os.open`."""
        with self._above(path) as (fd, name):
            return _open_unlinked(fd, name, flags, self.path / path, mode)

    def make(self, path: str, mode: int = 0o777) -> None:
        """Make a folder and those above it if they are missing."""
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            with self._above("/".join(parts[:end])) as (fd, name):
                with suppress(FileExistsError):
                    os.mkdir(name, mode, dir_fd=fd)
                _open_unlinked(fd, name, _A_FOLDER, self.path.joinpath(*parts[:end])).close()

    def unlink(self, path: str) -> None:
        """Remove a file, or a link itself, if it exists."""
        with self._above(path) as (fd, name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=fd)

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, or a link itself, if it exists."""
        # shutil does not close a folder that it has just opened
        with deferred_interrupt(), self._above(path) as (fd, name):
            try:
                _open_unlinked(fd, name, _A_FOLDER, self.path / path).close()
            except FileNotFoundError:
                return
            except CheckpointError:
                os.unlink(name, dir_fd=fd)
            else:
                shutil.rmtree(name, dir_fd=fd)

    def move(self, path: str, to: str) -> None:
        """Rename a file, and replace an older file of the new name."""
        with self._above(path) as (fd, name), self._above(to) as (other, new):
            os.replace(name, new, src_dir_fd=fd, dst_dir_fd=other)

    def write(self, path: str, data: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new small file and sync it; ``mode``: its permissions, None for the default."""
        self.unlink(path)  # an earlier run's, which may be read-only
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with self.open(path, flags) as fd, open(fd, "wb", closefd=False) as file:
            file.writelines(data)
            file.flush()
            if mode is not None:
                os.fchmod(fd, mode)
            os.fsync(fd)


def _open_unlinked(fd: int, name: str, flags: int, path: Path, mode: int = 0o666) -> Descriptor:
    """Open a name in the folder ``fd``, not through a link; ``path`` names it in errors."""
    try:
        return Descriptor(name, flags | os.O_NOFOLLOW, mode, fd)
    except OSError as error:
        with suppress(OSError):
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                raise linked(path) from error
        raise


def linked(path: Path) -> CheckpointError:
    """Return the error for a symbolic link in the place of a file or folder to write or remove."""
    expected = "a folder of its own" if os.path.isdir(path) else "a file of its own"
    found = "a link"
    with suppress(OSError):
        found = f"a link to {os.readlink(path)}"
    problem = "would be written through a link"
    return CheckpointError(path, problem, f"{expected}: remove the link", found)


class Output:
    """An output file that several threads write at given offsets."""

    def __init__(self, folder: Folder, path: str, name: Path) -> None:
        """Open or create a file in a folder; ``name``, its final path, names it in errors."""
        self._name = name
        self._lock = threading.Lock()
        self._lost: OSError | None = None
        with writing_to(name):
            self._own = folder.open(path, os.O_RDWR | os.O_CREAT)  # fd: -1 once it is closed

    def write(self, start: int, data: memoryview) -> None:
        """Write bytes from ``start`` on, and start their transfer to the disk."""
        done = 0
        with writing_to(self._name):
            while done < data.nbytes:
                with data[done:] as rest:
                    done += os.pwrite(self._own.fd, rest, start + done)
            _sync_range(self._own.fd, start, data.nbytes, _WRITE)

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the file's bytes from ``start`` on, and zeros after its end."""
        done = 0
        with writing_to(self._name):
            while done < out.nbytes and (count := read_at(self._own.fd, start + done, out[done:])):
                done += count
        out[done:] = bytes(out.nbytes - done)

    def drop(self, start: int, nbytes: int, checksum: FileSum | None) -> None:
        """Wait until written bytes from ``start`` on are on disk; drop them from the page cache.

        Bytes that ``checksum`` has yet to read again stay cached until the file is closed.
        """
        with self._lock:
            if self._own.fd >= 0:  # else it is whole and closed
                self.sync(start, nbytes)
                if checksum is None or checksum.has(start + nbytes):
                    _drop_range(self._own.fd, start, nbytes)

    def sync(self, start: int = 0, nbytes: int | None = None) -> None:
        """Sync written bytes from ``start`` on to the disk, or all if ``nbytes`` is None.

        After an error, each call raises it again: the system reports lost pages only once.
        """
        if self._lost is None:
            try:
                if nbytes is None:
                    sync(self._own.fd)
                else:
                    _sync_range(self._own.fd, start, nbytes, _WRITE_AND_WAIT)
            except OSError as error:
                self._lost = error
        if self._lost is not None:
            raise unwritable(self._name, self._lost) from self._lost

    def close(self) -> None:
        """Drop the file's cached pages and close it; may be called twice."""
        with self._lock:
            if self._own.fd >= 0:
                _drop_range(self._own.fd, 0, 0)
                self._own.close()


def _sync_range(fd: int, start: int, nbytes: int, flags: int) -> None:
    """Call sync_file_range(2) with ``flags``, which start a transfer or wait for it; on Linux."""
    if not _WRITES_BEHIND or libc().sync_file_range(fd, start, nbytes, flags) == 0:
        return
    code = ctypes.get_errno()
    # the filesystem has no such call; an error of the disk is reported once, and must be raised
    if code not in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code))


def _drop_range(fd: int, start: int, nbytes: int) -> None:
    """Drop part of a file from the page cache; all after ``start`` if ``nbytes`` is 0."""
    if _WRITES_BEHIND:
        with suppress(OSError):  # only advice
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)


def pieces(source: Path) -> Iterator[bytes]:
    """Yield a source file's bytes, 1 MiB at a time; raises CheckpointError if unreadable."""
    try:
        # links were resolved, within their bounds, when the file was listed
        with (
            Descriptor(source, os.O_RDONLY | os.O_NOFOLLOW) as fd,
            open(fd, "rb", closefd=False) as file,
        ):
            while piece := file.read(_PIECE_NBYTES):
                yield piece
    except OSError as error:
        raise unreadable(source, error) from error


def file_sum(path: Path) -> str:
    """Return the md5 sum of a file in hexadecimal."""
    found = hashlib.md5(usedforsecurity=False)
    for piece in pieces(path):
        found.update(piece)
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """Return the xxh3 digest of a file's bytes in hexadecimal."""
    return digest_of(map(memoryview, pieces(path)))


@contextmanager
def locked(destination: Path) -> Iterator[Folder]:
    """Lock a destination against other conversions, made if missing; yields the open folder.

    Folders made here that are empty at the end are removed.
    """
    made = [p for p in (destination, *destination.parents) if not exists(p)]
    with ExitStack() as opened:
        # called last
        opened.callback(remove_empty, made)
        with writing_to(destination), deferred_interrupt():
            destination.mkdir(parents=True, exist_ok=True)
            to = Folder(destination)
            opened.enter_context(to)
            opened.enter_context(_lock(to))
            opened.callback(_unlock, to)
            for folder in reversed(made):
                with suppress(PermissionError):  # it can be written and not read
                    sync_folder(folder.parent)
        yield to


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, inner ones first."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unlock(destination: Folder) -> None:
    """Remove the lock's file and folder unless the folder has other files."""
    with (
        suppress(OSError, CheckpointError),
        destination.open(WORK, os.O_RDONLY | os.O_DIRECTORY) as fd,
    ):
        if os.listdir(fd) == ["lock"]:
            os.unlink("lock", dir_fd=fd)
            os.rmdir(WORK, dir_fd=destination.fd)


def _lock(destination: Folder) -> Descriptor:
    """Lock a destination; returns the file that holds the lock until it is closed."""
    while True:
        # unfinished files are as private as finished ones
        destination.make(WORK, 0o700)
        try:
            own = destination.open(f"{WORK}/lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another one has just finished and cleaned up
            continue
        try:
            fcntl.flock(own.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            own.close()
            raise CheckpointError(
                destination.path, "another conversion is being written there"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                own.close()
                raise
        with suppress(OSError):  # the file may have been removed
            if os.path.samestat(os.fstat(own.fd), os.stat(destination.path / WORK / "lock")):
                return own
        own.close()


_READ_NBYTES = 2**18  # at once: it stays in the CPU's cache


class FileSum:
    """The md5 sum of a file whose parts come in any order, each once, from several threads.

    A part is added from memory if all bytes before it are in the sum. Else the thread that adds the
    missing bytes reads it back from the file.
    """

    def __init__(self, nbytes: int, coming: Iterable[tuple[int, int]]) -> None:
        """Start the sum of a file of ``nbytes``.

        ``coming``: parts to expect, as ascending (first byte, stop exclusive). Bytes between these
        parts are in the file already, or zeros.
        """
        self._done = 0  # all before this byte is in the sum
        self._waiting: dict[int, int] = {}  # ranges written and not in the sum: first byte, last
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._lock = threading.Lock()
        self._is_busy = False
        at = 0
        for start, stop in (*coming, (nbytes, nbytes)):
            if at < start:
                self._waiting[at] = start
            at = stop

    def add(self, start: int, data: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """Add ``data``, written at byte ``start``; ``read(byte, out)`` reads the file back."""
        with self._lock:
            self._waiting[start] = start + data.nbytes
            if self._is_busy:  # the thread that updates the sum adds this part, too
                return
            self._is_busy = True
        while True:
            with self._lock:
                first, stop = self._done, self._waiting.pop(self._done, None)
                if stop is None:
                    self._is_busy = False
                    return
            if first == start:
                self._md5.update(data)
            else:
                self._read_back(first, stop, read)
            self._done = stop

    def has(self, stop: int) -> bool:
        """Whether all bytes before ``stop`` are in the sum."""
        return self._done >= stop

    def hexdigest(self) -> str:
        """Return the md5 sum in hexadecimal, once every part was added."""
        assert not self._waiting, self._waiting
        return self._md5.hexdigest()

    def _read_back(self, start: int, stop: int, read: Callable[[int, memoryview], None]) -> None:
        """Add bytes ``start`` to ``stop`` (exclusive) to the sum, from the file."""
        room = memoryview(bytearray(min(stop - start, _READ_NBYTES)))
        for first, last in cut(start, stop, _READ_NBYTES):
            read(first, room[: last - first])
            self._md5.update(room[: last - first])
