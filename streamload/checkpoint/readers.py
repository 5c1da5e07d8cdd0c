"""Byte ranges of one shard: through a memory map in windows, or by pread.

Both open the file read-only and hold nothing of it between two calls. A map is the faster way on a
local filesystem. On a network or FUSE filesystem it is many times slower, and there a file that
somebody truncates under a map kills the process (SIGBUS): those are read by pread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, get_args

from streamload.checkpoint.header import open_regular, unreadable
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError

ReaderKind = Literal["auto", "mmap", "pread"]
ResolvedKind = Literal["mmap", "pread"]

# fmt: off
#: Filesystems that "auto" maps. Every other is read by pread, which is right everywhere: network
#: and FUSE filesystems (nfs, cifs, smb3, fuse.sshfs, lustre, gpfs, beegfs, glusterfs, ceph, afs,
#: 9p, virtiofs), zfs (a map copies its cache into another), and what nobody has heard of yet.
MAPPED_FILESYSTEMS = frozenset({
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "nilfs2", "ntfs3", "overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat",
    "xfs",
})
# fmt: on

_ADDRESS_BITS = sys.maxsize.bit_length() + 1
_MAX_MAPPED_NBYTES_32 = 2**30  # of one shard, where addresses have 32 bits
_MAX_READ_NBYTES = 2**30  # in one call: systems refuse or cut what is near 2**31

_PAGE = mmap.PAGESIZE
# A fault maps the pages around its own too: 64 KiB, or all of a large folio of the page cache, at
# most this long with pages of 4 KiB. What windows map is therefore dropped in blocks of this size.
_BLOCK = 2**21
_MADV_POPULATE_READ = 22  # Linux 5.14 and later
_MAP_FAILED = ctypes.c_void_p(-1).value


class Reader(Protocol):
    """One open shard. Any number of threads may use it at once; it outlives their calls."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def mapped(self) -> bool:
        """Whether `view` is a window of a memory map, which takes no memory of the process."""

    def view(self, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Bytes ``start`` to ``stop`` (exclusive) of the file, read-only, valid inside the with.

        Raises:
            TruncatedFileError: the file has become shorter; on leaving the with, too.
            CheckpointError: the bytes cannot be read.
            ValueError: the range is not within the file, or the reader is closed.
        """

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the file's bytes from ``start`` on; allocates nothing.

        Args:
            start: first byte, counted from the start of the file.
            out: where to; writable, C-contiguous.

        Raises:
            TruncatedFileError: the file has become shorter; what ``out`` holds is undefined.
            CheckpointError: the bytes cannot be read.
            ValueError: the range is not within the file, or the reader is closed.
        """

    def close(self) -> None:
        """Close the file; may be called twice."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


def open_reader(shard: Path, file_nbytes: int, kind: ReaderKind = "auto") -> Reader:
    """Open a shard.

    Args:
        shard: the file.
        file_nbytes: its length in bytes, from its `Header`.
        kind: how to read it; "auto" is `resolve_reader`.

    Raises:
        TruncatedFileError: the file has become shorter since its header was read.
        HeaderError: it has become longer.
        ShardNotFoundError: it is gone.
        CheckpointError: it cannot be opened or mapped.
        ValueError: there is no such kind.
    """
    if resolve_reader(shard, kind) == "mmap" and file_nbytes:  # an empty file cannot be mapped
        return MmapReader(shard, file_nbytes)
    return PreadReader(shard, file_nbytes)


def resolve_reader(path: str | os.PathLike[str], kind: ReaderKind) -> ResolvedKind:
    """What "auto" means for a file; the other kinds are what they are.

    Raises:
        ValueError: there is no such kind.
    """
    if kind not in get_args(ReaderKind):
        raise ValueError(f"unknown reader {kind!r}; known: {', '.join(get_args(ReaderKind))}")
    if kind != "auto":
        return kind
    try:
        nbytes = os.stat(path).st_size
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
    except OSError:  # no such file, or not Linux
        return "pread"
    return reader_for(filesystem_of(os.path.realpath(path), mountinfo), nbytes)


def reader_for(filesystem: str, nbytes: int, *, address_bits: int = _ADDRESS_BITS) -> ResolvedKind:
    """The reader for a file of ``nbytes`` on a filesystem of this type (as in mountinfo)."""
    if address_bits <= 32 and nbytes > _MAX_MAPPED_NBYTES_32:
        return "pread"
    return "mmap" if filesystem in MAPPED_FILESYSTEMS else "pread"


def filesystem_of(path: str, mountinfo: str) -> str:
    """The type of the filesystem that holds ``path``, or "" where that is not said.

    By name and not by device number: files on btrfs and overlay have numbers that no mount has.

    Args:
        path: an absolute path without symlinks.
        mountinfo: the text of ``/proc/self/mountinfo`` (proc(5)): the mount point is the fifth
            field, with octal escapes, and the type the first after a lone hyphen.
    """
    best, found = "", ""
    for line in mountinfo.split("\n"):
        before, hyphen, after = line.partition(" - ")
        fields = before.split(" ")
        if not hyphen or len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one point, the later covers the earlier
            best, found = point, after.split(" ")[0]
    return found


class _Shard:
    """An open file of a known length, read by pread."""

    def __init__(self, path: Path, file_nbytes: int) -> None:
        self.path = path
        self._file_nbytes = file_nbytes
        self._file = open_regular(path)
        try:
            found = self._found_nbytes()
            if found < file_nbytes:
                raise self._truncated(found)
            if found > file_nbytes:
                raise HeaderError(
                    path,
                    "has become longer since its header was read",
                    expected=file_nbytes,
                    found=found,
                )
            if hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # only advice
                    os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        except BaseException:
            self._file.close()
            raise

    def read_into(self, start: int, out: memoryview) -> None:
        """See `Reader.read_into`."""
        self._check_range(start, start + out.nbytes)
        if not out.nbytes:  # a memoryview of nothing cannot be cast
            return
        with out.cast("B") as target:
            done = 0
            while done < target.nbytes:
                with target[done : done + _MAX_READ_NBYTES] as rest:
                    try:
                        nbytes = os.preadv(self._file.fileno(), [rest], start + done)
                    except OSError as error:
                        raise unreadable(self.path, error) from error
                if nbytes == 0:
                    raise self._truncated(min(self._found_nbytes(), start + done))
                done += nbytes

    def close(self) -> None:
        """See `Reader.close`."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self._file_nbytes:
            raise ValueError(
                f"{self.path}: bytes {start} to {stop} are not within its {self._file_nbytes}"
            )

    def _found_nbytes(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise unreadable(self.path, error) from error

    def _truncated(self, found: int) -> TruncatedFileError:
        return TruncatedFileError(
            self.path,
            "has become shorter since its header was read",
            expected=self._file_nbytes,
            found=found,
        )


class PreadReader(_Shard):
    """Reads by pread. `view` allocates the bytes that it gives out; `read_into` nothing."""

    mapped = False

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[memoryview]:
        """See `Reader.view`."""
        self._check_range(start, stop)
        window = memoryview(bytearray(stop - start))
        try:
            self.read_into(start, window)
            yield window.toreadonly()
        finally:
            with suppress(BufferError):  # something of the caller's still refers to it
                window.release()


class MmapReader(_Shard):
    """Maps the file. A window is populated before it is given out, and dropped behind.

    `read_into` is pread here as well: that cannot meet a SIGBUS.
    """

    mapped = True

    def __init__(self, path: Path, file_nbytes: int) -> None:
        super().__init__(path, file_nbytes)
        # elsewhere, and before Linux 5.14, pages are faulted in as they are touched
        self._populates = sys.platform == "linux"
        try:
            self._map: _Map | None = _Map(self._file.fileno(), file_nbytes)
        except (OSError, OverflowError) as error:
            self._file.close()
            raise CheckpointError(
                path,
                'cannot be mapped (reader="pread" needs no map)',
                expected=f"{file_nbytes} bytes of address space",
                found=str(error),
            ) from error

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[memoryview]:
        """See `Reader.view`."""
        self._check_range(start, stop)
        self._check_length(stop)
        held = self._map  # whatever happens to the reader, the addresses stay ours till the end
        if held is None or start == stop:
            yield memoryview(b"")
            return
        window = held.data[start:stop]
        held.enter(start, stop)
        try:
            self._populate(held, start, stop)
            yield window
            # bytes past a new end, in its last page, were zeros instead of a SIGBUS
            self._check_length(stop)
        finally:
            with suppress(BufferError):  # something of the caller's still refers to it
                window.release()
            held.leave(start, stop)

    def close(self) -> None:
        """See `Reader.close`. The map goes when the last window of it has."""
        super().close()
        self._map = None

    def _check_length(self, stop: int) -> None:
        found = self._found_nbytes()
        if found < stop:
            raise self._truncated(found)

    def _populate(self, held: _Map, start: int, stop: int) -> None:
        """Bring a window in; past a truncated end this is refused where a touch would kill."""
        while self._populates:
            code = held.populate(start, stop)
            match code:
                case 0:
                    return
                case errno.EINTR:
                    continue
                case errno.EINVAL:  # not known to this kernel
                    self._populates = False
                case errno.EFAULT:
                    self._check_length(stop)
                    # the file is as long as it should be: the storage did not give its bytes
                    raise unreadable(self.path, OSError(errno.EIO, os.strerror(errno.EIO)))
                case _:
                    raise unreadable(self.path, OSError(code, os.strerror(code)))


class _Map:
    """A file's first ``nbytes``, mapped read-only.

    The map lives until the last memoryview of it is gone: none is left pointing nowhere. Python's
    own `mmap.mmap` does not tell its address, and its madvise holds the interpreter's lock while
    pages are read.

    Raises:
        OSError: the kernel refused.
        OverflowError: the process has no such addresses.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        array = ctypes.c_ubyte * nbytes  # first: refuses more than the process can address
        address: int | None = _map_function(_libc())(
            None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0
        )
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        owner = array.from_address(address)
        # not when the process ends: other threads may still look then
        weakref.finalize(owner, _libc().munmap, address, nbytes).atexit = False
        self.data = memoryview(owner).cast("B").toreadonly()
        self._address = address
        self._stop = address + nbytes
        self._lock = threading.Lock()
        self._windows: dict[int, int] = {}  # how many there are, by block

    def populate(self, start: int, stop: int) -> int:
        """Map the pages of a window, reading what is not in memory; returns 0 or an errno."""
        first = (self._address + start) // _PAGE * _PAGE
        return _madvise(first, self._address + stop, _MADV_POPULATE_READ)

    def enter(self, start: int, stop: int) -> None:
        """Count a window in."""
        with self._lock:
            for block in self._blocks(start, stop):
                self._windows[block] = self._windows.get(block, 0) + 1

    def leave(self, start: int, stop: int) -> None:
        """Count a window out, and unmap the blocks that no window is in any more.

        The pages go from this process only; the page cache keeps them.
        """
        empty = []
        with self._lock:
            for block in self._blocks(start, stop):
                self._windows[block] -= 1
                if not self._windows[block]:
                    del self._windows[block]
                    empty.append(block)
        # a window that begins in such a block meanwhile finds its pages again as it touches them
        for block in empty:
            first, last = block * _BLOCK, (block + 1) * _BLOCK
            _madvise(max(first, self._address), min(last, self._stop), mmap.MADV_DONTNEED)

    def _blocks(self, start: int, stop: int) -> range:
        return range((self._address + start) // _BLOCK, (self._address + stop - 1) // _BLOCK + 1)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    size_t, int_, void_p = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    map_ = _map_function(libc)
    map_.argtypes = (void_p, size_t, int_, int_, int_, ctypes.c_int64)
    map_.restype = void_p
    libc.munmap.argtypes = (void_p, size_t)
    libc.madvise.argtypes = (void_p, size_t, int_)
    return libc


def _map_function(libc: Any) -> Any:
    """mmap(2) with an offset of 64 bits, which has a name of its own in glibc."""
    return libc.mmap64 if hasattr(libc, "mmap64") else libc.mmap


def _madvise(first: int, last: int, advice: int) -> int:
    """madvise(2) on addresses ``first`` to ``last``, exclusive; returns 0 or an errno."""
    return 0 if _libc().madvise(first, last - first, advice) == 0 else ctypes.get_errno()
