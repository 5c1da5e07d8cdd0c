"""Detects changes of a file while it is read.

A read lease makes the kernel block a process that opens the file for writing or truncates it until
the lease is released. The guard asks the kernel whether a writer waits, before a read and after it:
no byte changes in between, and no writer waits longer than a read takes. Without a lease, a change
is detected by the file's inode, length and times.

Source: fcntl(2), "Leases"; fs/locks.c of Linux 6.12.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Self

from streamload.errors import CheckpointError, FileChangedError, TruncatedFileError

if sys.platform == "linux":
    import fcntl

_RENAME = "write new files beside it and rename them over it, then load again"
_REFUSALS = {
    errno.EACCES: "it is another user's, and this process cannot hold back who truncates it",
    errno.EAGAIN: "a process has it open for writing",
}


class FileState(NamedTuple):
    """The identity, length and times of a file, to detect that it was changed or replaced."""

    device: int  # number of the filesystem
    inode: int
    nbytes: int
    written_ns: int  # mtime
    changed_ns: int  # ctime, which users cannot set
    # links, mode, owner and group: changing them sets ``changed_ns`` as well
    others: tuple[int, int, int, int]

    @classmethod
    def of(cls, file: str | os.PathLike[str] | int) -> Self:
        """Return the state of a path or a descriptor; raises OSError."""
        found = os.stat(file)
        others = (found.st_nlink, found.st_mode, found.st_uid, found.st_gid)
        times = (found.st_mtime_ns, found.st_ctime_ns)
        return cls(found.st_dev, found.st_ino, found.st_size, *times, others)

    def check(self, now: FileState, path: Path) -> None:
        """Raise CheckpointError if ``now`` has other content; links, mode and owner may differ."""
        if self == now:
            return
        problem = f"has changed since its header was read; {_RENAME}"
        if self[:2] != now[:2]:
            problem = "has been replaced since its header was read; load again"
            before, found = (f"inode {s.inode} of device {s.device}" for s in (self, now))
        elif now.nbytes < self.nbytes:
            problem = "has become shorter since its header was read"
            raise TruncatedFileError(path, problem, self.nbytes, now.nbytes)
        elif now.nbytes != self.nbytes:
            before, found = (f"{s.nbytes} bytes" for s in (self, now))
        elif now.written_ns != self.written_ns:
            before, found = (f"last written at {_time(s.written_ns)}" for s in (self, now))
        elif now.changed_ns != self.changed_ns and now.others == self.others:
            before, found = (f"last changed at {_time(s.changed_ns)}" for s in (self, now))
        else:
            return
        raise FileChangedError(path, problem, before, found)


def _time(ns: int) -> str:
    seconds, rest = divmod(ns, 10**9)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{rest:09} UTC"


class Guard:
    """Detects changes of an open file: write ``with guard:`` around reads of its bytes.

    Any number of threads may be inside at once. Entering and leaving raise CheckpointError if the
    file has changed, or another process waits, blocked by the lease, to write to it or truncate it.
    Every later use raises the error again.
    """

    def __init__(
        self, file: FileIO, path: Path, expected: FileState | None, *, refusal: str = ""
    ) -> None:
        """Take a lease; raise CheckpointError if the file has changed already.

        The caller closes the guard first, then ``file``. ``expected``: its state when its header
        was read, if known; ``refusal``: why to take no lease; "" to try.
        """
        self._file = file
        self._path = path
        self._lock = threading.Lock()
        self._inside = 0
        self._failed: CheckpointError | None = None
        # why no lease was taken; "" if one was
        self.refusal = refusal or take_lease(file.fileno())
        self._leased = not self.refusal
        try:
            found = FileState.of(file.fileno())
            self._expected = found if expected is None else expected
            self._expected.check(found, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
        try:
            self._check(entering=True)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self._check(entering=False)
        finally:
            self._leave()

    def close(self) -> None:
        """Release the lease; the file is still open. May be called twice."""
        with self._lock:
            self._release()

    def _check(self, *, entering: bool) -> None:
        if self._failed is None:
            if not self.refusal:
                # while the lease is held nothing can have changed but times, which do not matter
                if fcntl.fcntl(self._file.fileno(), fcntl.F_GETLEASE) == fcntl.F_RDLCK:
                    return
            elif entering:  # without a lease, a check after the read is enough
                return
            try:
                self._expected.check(FileState.of(self._file.fileno()), self._path)
            except CheckpointError as error:
                self._failed = error
            else:
                if self.refusal:
                    return
                # set before the lease is released: threads that are still inside will see it
                self._failed = FileChangedError(
                    self._path,
                    f"is about to be changed; {_RENAME}",
                    "no writer while it is read",
                    "one who opens it for writing or truncates it, and was held back",
                    held_back=True,
                )
        raise replace(self._failed)

    def _leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._failed is not None and not self._inside:  # no thread touches a map of it
                self._release()

    def _release(self) -> None:
        if self._leased and not self._file.closed:
            self._leased = False
            with suppress(OSError):
                fcntl.fcntl(self._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)


def take_lease(fd: int) -> str:
    """Take a lease: writers wait until ``fd``, read-only, is closed; return "", or why it fails."""
    # no signal announces a writer: the owner of the lease polls
    if sys.platform != "linux":
        return "this system has no leases"
    try:
        # not SIGIO, which ends the process: the lease sets this process as the signal's receiver
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETOWN, 0)
    except OSError as error:
        return _REFUSALS.get(error.errno or 0, f"its filesystem has no leases: {error.strerror}")
    return ""
