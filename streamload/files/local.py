"""Files of this machine: a folder, and readers by a memory map, pread or direct reads.

A file is opened read-only, and no byte is kept between calls. A map is fastest on a local
filesystem. Truncation under a map kills the process (SIGBUS), and a lease prevents that. On a
network or FUSE filesystem a lease blocks no other machine, and a map is many times slower: there,
pread. Bytes of a local disk that are not in the page cache can go straight to their destination
(O_DIRECT), which costs the CPU almost nothing and leaves the page cache unchanged.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np

from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Location
from streamload.core.system import (
    address_of,
    direct_memory,
    filesystem_and_length,
    libc,
    map_file,
    populate_shared,
    read_at,
    scatter,
)
from streamload.core.units import round_up
from streamload.errors import (
    CheckpointError,
    FileChangedError,
    HeaderError,
    ShardNotFoundError,
    TruncatedFileError,
)
from streamload.files.header import (
    RENAME,
    FileState,
    check_memory,
    check_nbytes,
    is_there,
    open_regular,
    unreadable,
)
from streamload.files.reader import Addresses, Reader

if sys.platform == "linux":
    import fcntl

# fmt: off
#: Filesystems that "auto" maps. All others are read by pread, which always works: network and FUSE
#: filesystems (nfs, cifs, smb3, fuse.sshfs, lustre, gpfs, beegfs, glusterfs, ceph, afs, 9p,
#: virtiofs), zfs (a map copies its cache into another), and unknown ones.
MAPPED_FILESYSTEMS = frozenset({
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "nilfs2", "ntfs3", "overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat",
    "xfs",
})
#: Filesystems on which even "direct" reads through the page cache: they are in memory or on another
#: machine. So are types that begin with "fuse".
BUFFERED_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gluster", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ramfs", "smb3", "smbfs", "tmpfs", "virtiofs",
})
# fmt: on

_REFUSALS = {
    errno.EACCES: "it is another user's, and this process cannot hold back who truncates it",
    errno.EAGAIN: "a process has it open for writing",
}

_MAX_READ_NBYTES = 2**30  # in one call: systems refuse or cut reads near 2**31
#: Most bytes of one call after `Reader.stop_ahead`: pages being read cannot be reclaimed.
EXACT_NBYTES = 2**18

_PAGE = mmap.PAGESIZE
# A fault also maps the pages around it: 64 KiB, or a large folio of the page cache, which has at
# most this size with pages of 4 KiB. Windows are therefore dropped in blocks of this size.
_BLOCK = 2**21

# The alignment of direct reads if the kernel does not state it: right for every disk of 512
# or 4096 bytes a sector.
_USUAL_ALIGNMENT = 4096
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_AT_EMPTY_PATH = 0x1000
#: Size of each thread's buffer for direct reads of unaligned bytes; after `Reader.stop_ahead` only
#: `EXACT_NBYTES` of it are touched.
BOUNCE_NBYTES = 2**20
# Errors of a kernel that cannot read this file directly, or not at this alignment.
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def no_lease(filesystem: str) -> str:
    """Return why leases on a filesystem do not block its writers; "" if they do."""
    if filesystem in MAPPED_FILESYSTEMS:
        return ""
    return f"{filesystem or 'an unknown filesystem'} does not hold back who changes its files"


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
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self._check(entering=False)
        finally:
            with self._lock:
                self._inside -= 1
                unused = self._failed is not None and not self._inside
            if unused:  # no thread touches a map of it
                self.close()

    def close(self) -> None:
        """Release the lease; the file is still open. May be called twice."""
        with self._lock:
            if self._leased and not self._file.closed:
                self._leased = False
                with suppress(OSError):
                    fcntl.fcntl(self._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)

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
                    f"is about to be changed; {RENAME}",
                    "no writer while it is read",
                    "one who opens it for writing or truncates it, and was held back",
                    held_back=True,
                )
        raise replace(self._failed)


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


class FileMap:
    """Maps a file's first ``nbytes`` read-only; unmapped when the last memoryview of it is gone.

    Python's own `mmap.mmap` does not expose its address, and its madvise holds the GIL while pages
    are read. Raises OSError if the kernel refuses, OverflowError if no address is that large.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        array = ctypes.c_ubyte * nbytes  # first: refuses more than the process can address
        address = map_file(fd, 0, nbytes)
        owner = array.from_address(address)
        # not at exit: other threads may still read then
        weakref.finalize(owner, libc().munmap, address, nbytes).atexit = False
        self.data = memoryview(owner).cast("B").toreadonly()
        self._address = address
        self._stop = address + nbytes
        self._ahead = True
        self._lock = threading.Lock()
        self._windows: Counter[int] = Counter()  # number of open windows, by block

    def populate(self, start: int, stop: int) -> int:
        """Read and map the pages of bytes ``start`` to ``stop``; see `populate_shared`."""
        return populate_shared(self._address + start, self._address + stop, ahead=self._ahead)

    def stop_ahead(self) -> None:
        """Let no fault, and no `populate`, read more than its pages."""
        self._ahead = False
        libc().madvise(self._address, self._stop - self._address, mmap.MADV_RANDOM)

    @contextmanager
    def window(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes ``start`` to ``stop``, whose pages stay mapped in the block.

        Then drop unused blocks from this process only, not from the page cache.
        """
        first, last = self._address + start, self._address + stop - 1
        blocks = range(first // _BLOCK, last // _BLOCK + 1)
        window = self.data[start:stop]
        with self._lock:
            self._windows.update(blocks)
        try:
            yield window
        finally:
            with suppress(BufferError):  # the caller still refers to it
                window.release()
            with self._lock:
                self._windows.subtract(blocks)
                empty = [block for block in blocks if not self._windows[block]]
                for block in empty:
                    del self._windows[block]
            # a window that begins in such a block then faults its pages in again
            for block in empty:
                first = max(block * _BLOCK, self._address)
                last = min((block + 1) * _BLOCK, self._stop)
                libc().madvise(first, last - first, mmap.MADV_DONTNEED)


def state_of(file: FileIO, path: Location) -> FileState:
    """Return the present state of an open file, to detect changes."""
    try:
        return FileState.of(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from error


def _advise(file: FileIO, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(file.fileno(), 0, 0, getattr(os, advice))


class PreadReader(Reader):
    """Reads a file by pread. `view` allocates the memory of its window; `read_into` none."""

    has_file = True

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes)
        self._most_nbytes = _MAX_READ_NBYTES
        self._file = open_regular(path)
        try:
            refusal = no_lease(filesystem_and_length(path)[0])
            self._guard = Guard(self._file, path, state, refusal=refusal)
            self.leased = not self._guard.refusal
            found = state_of(self._file, self.path).nbytes
            if found < file_nbytes:
                raise self._truncated(found)
            if found > file_nbytes:
                raise HeaderError(
                    path, "has become longer since its header was read", file_nbytes, found
                )
            _advise(self._file, "POSIX_FADV_SEQUENTIAL")
        except BaseException:
            self._file.close()
            raise

    def stop_ahead(self) -> None:
        self._most_nbytes = EXACT_NBYTES
        _advise(self._file, "POSIX_FADV_RANDOM")

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        stops = np.cumsum(sizes)
        with self._guard:
            at = done = 0
            while at < len(sizes):
                most = done + max(self._most_nbytes, int(sizes[at]))
                end = int(np.searchsorted(stops, most, "right"))
                fd = self._file.fileno()
                if not scatter(fd, start + done, addresses[at:end], sizes[at:end]):
                    return False
                at, done = end, int(stops[end - 1])
        return True

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            with target[done : min(done + self._most_nbytes, nbytes)] as rest:
                try:
                    read = read_at(self._file.fileno(), start + done, rest)
                except OSError as error:
                    raise unreadable(self.path, error) from error
            if read == 0:
                raise self._truncated(min(state_of(self._file, self.path).nbytes, start + done))
            done += read

    def fileno(self) -> int:
        return self._file.fileno()

    def unchanged(self) -> AbstractContextManager[None]:
        return self._guard

    def close(self) -> None:
        self._guard.close()
        self._file.close()

    def _truncated(self, found: int) -> TruncatedFileError:
        return TruncatedFileError(
            self.path, "has become shorter since its header was read", self.nbytes, found
        )


class MmapReader(PreadReader):
    """Reads a file through a memory map, whose windows are populated first and dropped after use.

    `read_into` uses pread. Without a lease `view` does too, and `fallback` has the reason: only a
    lease prevents truncation between a check of the length and the access, which is a SIGBUS.
    """

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes, state)
        self._map: FileMap | None = None
        self.mapped = self.leased
        if not self.mapped:
            self.fallback = f"read by pread: {self._guard.refusal}"
            return
        try:
            self._map = FileMap(self._file.fileno(), file_nbytes)
        except (OSError, OverflowError) as error:
            self.close()
            raise CheckpointError(
                path,
                'cannot be mapped (reader="pread" needs no map)',
                f"{file_nbytes} bytes of address space",
                str(error),
            ) from error

    def view(self, start: int, stop: int) -> AbstractContextManager[memoryview]:
        self._check_range(start, stop)
        return self._window(start, stop) if self.mapped else self._filled(start, stop)

    @contextmanager
    def _window(self, start: int, stop: int) -> Iterator[memoryview]:
        with self._guard:
            held = self._map  # keeps the map, even if the reader is closed then
            if held is None or start == stop:
                yield memoryview(b"")
                return
            with held.window(start, stop) as window:
                code = held.populate(start, stop)
                if code == errno.EFAULT:  # touching them would end in SIGBUS
                    found = state_of(self._file, self.path).nbytes
                    if found < stop:  # a lease is broken after 45 s
                        raise self._truncated(found)
                    # the file has its length: reading the storage failed
                    code = errno.EIO
                if code:
                    raise unreadable(self.path, OSError(code, os.strerror(code)))
                yield window

    def stop_ahead(self) -> None:
        super().stop_ahead()
        if self._map is not None:
            self._map.stop_ahead()

    def close(self) -> None:
        """Close the file; the map is unmapped after its last window."""
        super().close()
        self._map = None


class DirectReader(PreadReader):
    """Reads a file past the page cache (O_DIRECT), without a copy into aligned memory.

    Unaligned bytes are copied through a buffer of 1 MiB that each thread keeps: only the blocks at
    both ends if the memory address and the file offset agree modulo `alignment`, else all bytes,
    which is slower. `read_aligned` avoids the copy.

    If direct reads are impossible, at first or later, the file is read through the page cache, and
    `fallback` has the reason: that is no error.
    """

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes, state)
        self._direct: FileIO | None = None
        filesystem, _ = filesystem_and_length(path)
        if filesystem in BUFFERED_FILESYSTEMS or filesystem.startswith("fuse"):
            self.fallback = f"{filesystem} is read through the page cache"
            return
        try:
            alignment = _direct_alignment(self._file.fileno())
            self._direct = _open_direct(self._file.fileno())
        except OSError as error:
            self.fallback = f"it cannot be opened for direct reads: {error.strerror}"
            return
        except BaseException:
            self.close()
            raise
        self.alignment = alignment

    def fileno(self) -> int:
        if self._direct is None or self.fallback:
            return super().fileno()
        return self._direct.fileno()

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        """After `stop_ahead`, read through the page cache (few pages enter); else return False."""
        exact = self._most_nbytes == EXACT_NBYTES
        return exact and super().scatter(start, addresses, sizes)

    def close(self) -> None:
        super().close()
        if self._direct is not None:
            self._direct.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        if self.fallback:
            super()._read(start, target, nbytes)
            return
        unit, stop = self.alignment, start + nbytes
        # the whole blocks that are read directly into ``target``, if any
        first, last = round_up(start, unit), round_up(stop, unit)
        if last - start > target.nbytes:  # no room for the bytes of the last block after ``stop``
            last = stop // unit * unit
        if (address_of(target) - start) % unit or first >= last:
            first = last = stop
        self._read_bounced(start, target[: first - start])
        if first < last:
            wanted = min(stop, last) - first
            with target[first - start : last - start] as straight:
                self._read_blocks(first, straight, wanted)
        if last < stop:
            self._read_bounced(last, target[last - start : nbytes])

    def _read_bounced(self, start: int, target: memoryview) -> None:
        stop = start + target.nbytes
        at, most = start, min(self._most_nbytes, BOUNCE_NBYTES)
        while at < stop:
            first = at // self.alignment * self.alignment
            last = min(first + most, round_up(stop, self.alignment))
            upto = min(last, stop)
            bounce = _bounce()
            with bounce[: last - first] as blocks:
                self._read_blocks(first, blocks, upto - first)
            target[at - start : upto - start] = bounce[at - first : upto - first]
            at = upto

    def _read_blocks(self, start: int, target: memoryview, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            read = 0
            if not self.fallback:
                assert self._direct is not None
                with target[done : done + _MAX_READ_NBYTES] as rest:
                    try:
                        read = os.preadv(self._direct.fileno(), [rest], start + done)
                    except OSError as error:
                        if error.errno not in _NOT_DIRECT:
                            raise unreadable(self.path, error) from error
                        self.fallback = f"it cannot be read past the page cache: {error.strerror}"
            done += read
            # the file's end, a fallback, or a short read, after which nothing is aligned
            if done < nbytes and (not read or read % self.alignment):
                with target[done:] as rest:
                    super()._read(start + done, rest, nbytes - done)
                return


_thread = threading.local()  # memory: the buffer of `_bounce`


def _bounce() -> memoryview:
    if not hasattr(_thread, "memory"):
        _thread.memory = direct_memory(BOUNCE_NBYTES)
    memory: memoryview = _thread.memory
    return memory


def _open_direct(fd: int) -> FileIO:
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    with deferred_interrupt():
        return FileIO(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flag | os.O_CLOEXEC))


def _direct_alignment(fd: int) -> int:
    """Return the alignment of direct reads in bytes; raise OSError if it is no power of two."""
    # of addresses, offsets and lengths; at most the page. Source: statx(2), STATX_DIOALIGN
    if not hasattr(libc(), "statx"):
        return _USUAL_ALIGNMENT
    # struct statx, 256 bytes: stx_mask is its first word, stx_dio_mem_align and
    # stx_dio_offset_align are those at 152 and 156
    found = (ctypes.c_uint32 * 64)()
    failed = libc().statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found)
    if failed or not found[0] & _STATX_DIOALIGN:
        return _USUAL_ALIGNMENT
    alignment = max(found[38], found[39])
    if not min(found[38], found[39]) or alignment > _PAGE or alignment & (alignment - 1):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return alignment


class LocalFile:
    """An open local file as a `File`; ``state`` is its identity and times when it was opened."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file
        self.state = state_of(file, path)
        self.nbytes = self.state.nbytes

    def read(self, start: int, stop: int) -> bytes:
        raw = b""
        stop = min(stop, self.nbytes)
        try:
            while start < stop and (more := os.pread(self._file.fileno(), stop - start, start)):
                raw, start = raw + more if raw else more, start + len(more)
        except OSError as error:
            raise unreadable(self.path, error) from error
        return raw


@contextmanager
def open_file(path: Path) -> Iterator[LocalFile]:
    """Yield an open local file; raise on leaving if it has changed, instead of any other error."""
    with open_regular(path) as opened:
        # pages read ahead of the rest cannot be freed for a while
        _advise(opened, "POSIX_FADV_RANDOM")
        file = LocalFile(path, opened)
        try:
            yield file
        finally:
            file.state.check(state_of(opened, path), path)


class Folder:
    """A path that was understood: the folder of a checkpoint's files, and perhaps one of them.

    This one is on this machine; `streamload.files.remote` has those of servers.

    Attributes:
        found: what the path leads to.
        path: the folder; a URL ends with "/".
        name: of the file in it that was given; "" for the folder itself.
    """

    path: Location

    def __init__(self, found: Location, path: Location) -> None:
        self.found, self.path = found, path
        self.name = "" if found == path else found.name

    def names(self) -> list[str] | None:
        """Return its names, in order, of folders on servers with a slash; None if unlisted."""
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            raise unreadable(self.path, error) from error

    def file(self, name: str) -> Location:
        """Return the path or URL of a file in it."""
        return self.found if name == self.name else self.path / name

    def place(self, name: str) -> Location:
        """Return where a file is read: its `file`, or one in the hub's local cache."""
        return self.file(name)

    def read(self, name: str) -> bytes:
        """Return the bytes of a JSON file; raise HeaderError if it is too long for a header."""
        path = Path(self.path, name)
        with open_file(path) as file:
            check_nbytes(path, "the file is too long", file.nbytes)
            check_memory(path, file.nbytes)
            return file.read(0, file.nbytes)

    def exists(self, name: str) -> bool:
        return exists(Path(self.path, name))

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the files that do not exist; of servers none, since each would take a request."""
        return [name for name in names if not self.exists(name)]

    def folders(self, names: Sequence[str]) -> list[str]:
        """Return how a user writes those of `names` that are folders."""
        return [str(self.path / name) for name in names if Path(self.path, name).is_dir()]

    def identity(self, name: str) -> str | None:
        """Return the hub's name of a file's content, which never changes; None for other files."""
        return None

    def origin(self) -> Location:
        """Return the folder; of the hub's local cache, the URL that has the files it lacks."""
        return self.path

    def check_single(self, shards: Sequence[str]) -> None:
        """Raise ShardNotFoundError, with what to write, if a repository holds several models."""

    def opening(self) -> AbstractContextManager[None]:
        """Return a context that keeps connections between requests."""
        return nullcontext()

    def explained(self, error: ShardNotFoundError) -> CheckpointError:
        """Return an error of opening it with what to write instead, if that is known."""
        return error

    def settled(self, shards: Sequence[Location]) -> Location:
        """Return the path of a checkpoint with these files: `found`, or one in the local cache."""
        return self.found


def exists(path: Path) -> bool:
    """Return whether a path exists; raise CheckpointError if that cannot be found out."""
    try:
        return is_there(path)
    except OSError as error:  # a folder that may not be searched, a name too long
        raise unreadable(path, error) from error


def expanded(path: Path) -> Path:
    """Return a path with ``~`` replaced by the home folder, unless the path itself exists."""
    if len(path.parts) < 2 or not path.parts[0].startswith("~") or os.path.lexists(path):
        return path
    return Path(os.path.expanduser(path))
