"""Readers of one shard's byte ranges: by a memory map, pread, direct reads, or from a server.

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
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from streamload.core.interrupt import deferred_interrupt
from streamload.core.location import Location, Url
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
from streamload.errors import CheckpointError, FileChangedError, HeaderError, TruncatedFileError
from streamload.files import hub
from streamload.files.header import RENAME, FileState, Part, View, open_regular, unreadable
from streamload.files.page_cache import PageCacheKind, resident_fraction
from streamload.files.reader import Addresses, PartsReader, StridedReader
from streamload.files.reader import Reader as Reader
from streamload.files.remote import HttpReader

if sys.platform == "linux":
    import fcntl

ReaderKind = Literal["auto", "mmap", "pread", "direct"]
#: For URLs alone: "http", "store" for those of buckets, and "cache" after a download from the hub.
ResolvedKind = Literal["mmap", "pread", "direct", "http", "store", "cache"]
REMOTE_KINDS = ("http", "store")

# fmt: off
#: Filesystems that "auto" maps. All others are read by pread, which always works: network and FUSE
#: filesystems (nfs, cifs, smb3, fuse.sshfs, lustre, gpfs, beegfs, glusterfs, ceph, afs, 9p,
#: virtiofs), zfs (a map copies its cache into another), and unknown ones.
MAPPED_FILESYSTEMS = frozenset({
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "nilfs2", "ntfs3", "overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat",
    "xfs",
})
#: Filesystems on a disk of this machine that support direct reads: "auto" uses them for files
#: mostly not in the page cache. Those in memory and read-only images are left out.
DIRECT_FILESYSTEMS = MAPPED_FILESYSTEMS - {
    "erofs", "iso9660", "ramfs", "squashfs", "tmpfs", "ubifs", "udf",
}
#: Filesystems on which even "direct" reads through the page cache: they are in memory or on another
#: machine. So are types that begin with "fuse".
BUFFERED_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gluster", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ramfs", "smb3", "smbfs", "tmpfs", "virtiofs",
})
# fmt: on

# From this resident fraction on, "auto" reads through the page cache; below, direct reads are
# faster on every disk measured (docs/measurements.md).
_MOSTLY_RESIDENT = 0.5
# Bounds of the fractions that `_RESIDENT` names: words, since numbers would differ for each shard.
# Almost nothing is resident after its header was read.
_SHARES = (0.05, _MOSTLY_RESIDENT, 1.0)
_RESIDENT = ("not ", "mostly not ", "mostly ", "")

_REFUSALS = {
    errno.EACCES: "it is another user's, and this process cannot hold back who truncates it",
    errno.EAGAIN: "a process has it open for writing",
}

_ADDRESS_BITS = sys.maxsize.bit_length() + 1
_MAX_MAPPED_NBYTES_32 = 2**30  # of one shard, with addresses of 32 bits
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
        if not parts:
            return StridedReader(open_reader(shard, file_nbytes, kind, state), views)
        files = (Part(shard, file_nbytes, state), *parts)
        return StridedReader(
            PartsReader(files, lambda part: open_reader(part.path, part.nbytes, kind, part.state)),
            views,
        )
    resolved = resolve_reader(shard, kind)
    if isinstance(shard, Url):
        return (CachedReader if resolved == "cache" else HttpReader)(shard, file_nbytes)
    # an empty file cannot be mapped or read directly
    opened = {"mmap": MmapReader, "direct": DirectReader} if file_nbytes else {}
    return opened.get(resolved, PreadReader)(shard, file_nbytes, state)


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """The reader chosen for a shard, and the reason."""

    kind: ResolvedKind
    reason: str  # for a report; equal for shards in the same state
    resident: float | None = None  # fraction in the page cache, if it was measured


def choose_reader(
    path: str | os.PathLike[str],
    kind: ReaderKind | ResolvedKind,
    *,
    page_cache: PageCacheKind = "auto",
    whole_slots: bool = True,
) -> ReaderChoice:
    """Return how to read a shard; takes less than 2 ms for any length.

    "auto" chooses direct reads for files of a local disk that are mostly not in the page cache,
    unless ``page_cache`` is "keep", and `resolve_reader` for all others. Files that no lease
    protects from truncation are never mapped. ``whole_slots``: the shard is read into page-aligned
    memory with room for over-reading; without it direct reads need a copy, which halves their speed
    (from 2.6 to 3.2 GB/s to 1.4 to 2.1 on a virtual disk, the speed of a map).
    """
    choice = _choose(path, kind, page_cache, whole_slots)
    if choice.kind == "mmap" and (why := not_mapped(Path(path))):
        return replace(choice, kind="pread", reason=f"{choice.reason}, and not mapped: {why}")
    return choice


def _choose(
    path: str | os.PathLike[str],
    kind: ReaderKind | ResolvedKind,
    page_cache: PageCacheKind,
    whole_slots: bool,
) -> ReaderChoice:
    """Return `choose_reader`'s choice without checking whether the file can be mapped now."""
    remote = isinstance(path, Url)
    if kind not in get_args(ReaderKind) and not (kind in (*REMOTE_KINDS, "cache") and remote):
        raise ValueError(f"unknown reader {kind!r}; known: {', '.join(get_args(ReaderKind))}")
    if kind in ("mmap", "direct") and remote:
        raise ValueError(f'reader="{kind}" is for files, and {path} is read from a server')
    if isinstance(path, Url):
        if path.is_store:
            return ReaderChoice("store", f"from the bucket {path.bucket}")
        return ReaderChoice("cache" if kind == "cache" else "http", f"from {path.host}")
    if kind != "auto":
        return ReaderChoice(kind, f'reader="{kind}" was asked for')
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
        return ReaderChoice("direct", f"on {filesystem}, {reason}", resident)
    return ReaderChoice(buffered, reason, resident)


def is_slow(path: Location) -> bool:
    """Return whether a file is far away: behind a URL, or on a network or FUSE filesystem."""
    filesystem = "" if isinstance(path, Url) else filesystem_and_length(path)[0]
    return isinstance(path, Url) or filesystem not in MAPPED_FILESYSTEMS | {""}


def resolve_reader(path: str | os.PathLike[str], kind: ReaderKind | ResolvedKind) -> ResolvedKind:
    """Return ``kind``, "auto" as "mmap" or "pread"; for a URL, both as "http" or "store"."""
    return _choose(path, kind, "auto", whole_slots=False).kind


def _no_lease(filesystem: str) -> str:
    """Return why leases on a filesystem do not block its writers; "" if they do."""
    if filesystem in MAPPED_FILESYSTEMS:
        return ""
    return f"{filesystem or 'an unknown filesystem'} does not hold back who changes its files"


def not_mapped(path: Location) -> str:
    """Return why a file cannot be mapped safely (truncation would kill the process), or ""."""
    if isinstance(path, Url):
        return "it is read from a server"
    try:
        with open_regular(path) as file:
            refusal = _no_lease(filesystem_and_length(path)[0])
            return refusal or take_lease(file.fileno())
    except CheckpointError:
        return ""  # reading the file will raise the error


def reader_for(
    filesystem: str, nbytes: int, *, address_bits: int = _ADDRESS_BITS
) -> Literal["mmap", "pread"]:
    """Return "mmap" if it is safe on a filesystem and ``nbytes`` fit in addresses, else "pread"."""
    if address_bits <= 32 and nbytes > _MAX_MAPPED_NBYTES_32:
        return "pread"
    return "mmap" if filesystem in MAPPED_FILESYSTEMS else "pread"


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
                    f"is about to be changed; {RENAME}",
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
        _madvise(self._address, self._stop, mmap.MADV_RANDOM)

    def enter(self, start: int, stop: int) -> None:
        """Register an open window of bytes ``start`` to ``stop``, so that its pages stay mapped."""
        with self._lock:
            self._windows.update(self._blocks(start, stop))

    def leave(self, start: int, stop: int) -> None:
        """Unregister a window; drop unused blocks from this process only, not the page cache."""
        blocks = self._blocks(start, stop)
        with self._lock:
            self._windows.subtract(blocks)
            empty = [block for block in blocks if not self._windows[block]]
            for block in empty:
                del self._windows[block]
        # a window that begins in such a block then faults its pages in again
        for block in empty:
            first, last = block * _BLOCK, (block + 1) * _BLOCK
            _madvise(max(first, self._address), min(last, self._stop), mmap.MADV_DONTNEED)

    def _blocks(self, start: int, stop: int) -> range:
        return range((self._address + start) // _BLOCK, (self._address + stop - 1) // _BLOCK + 1)


def _madvise(first: int, last: int, advice: int) -> None:
    """Call madvise(2) on addresses ``first`` to ``last``, exclusive."""
    libc().madvise(first, last - first, advice)


class PreadReader(Reader):
    """Reads a file by pread. `view` allocates the memory of its window; `read_into` none."""

    has_file = True

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes)
        self._most_nbytes = _MAX_READ_NBYTES
        self._file = open_regular(path)
        try:
            refusal = _no_lease(filesystem_and_length(path)[0])
            self._guard = Guard(self._file, path, state, refusal=refusal)
            self.leased = not self._guard.refusal
            found = self._found_nbytes()
            if found < file_nbytes:
                raise self._truncated(found)
            if found > file_nbytes:
                raise HeaderError(
                    path, "has become longer since its header was read", file_nbytes, found
                )
            self._advise("POSIX_FADV_SEQUENTIAL")
        except BaseException:
            self._file.close()
            raise

    def _advise(self, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only advice
                os.posix_fadvise(self._file.fileno(), 0, 0, getattr(os, advice))

    def stop_ahead(self) -> None:
        self._most_nbytes = EXACT_NBYTES
        self._advise("POSIX_FADV_RANDOM")

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
                raise self._truncated(min(self._found_nbytes(), start + done))
            done += read

    def fileno(self) -> int:
        return self._file.fileno()

    def unchanged(self) -> AbstractContextManager[None]:
        return self._guard

    def close(self) -> None:
        self._guard.close()
        self._file.close()

    def _found_nbytes(self) -> int:
        try:
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise unreadable(self.path, error) from error

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
            window = held.data[start:stop]
            held.enter(start, stop)
            try:
                self._populate(held, start, stop)
                yield window
            finally:
                with suppress(BufferError):  # the caller still refers to it
                    window.release()
                held.leave(start, stop)

    def stop_ahead(self) -> None:
        super().stop_ahead()
        if self._map is not None:
            self._map.stop_ahead()

    def close(self) -> None:
        """Close the file; the map is unmapped after its last window."""
        super().close()
        self._map = None

    def _populate(self, held: FileMap, start: int, stop: int) -> None:
        """Read a window's pages; raise CheckpointError if touching them would end in SIGBUS."""
        code = held.populate(start, stop)
        if code == errno.EFAULT:
            if (found := self._found_nbytes()) < stop:  # a lease is broken after 45 s
                raise self._truncated(found)
            # the file has its length: reading the storage failed
            code = errno.EIO
        if code:
            raise unreadable(self.path, OSError(code, os.strerror(code)))


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
        """Fill ``target`` with bytes from ``start`` on, copied through this thread's buffer."""
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
        """Read whole blocks into ``target``; raise TruncatedFileError for fewer than ``nbytes``."""
        done = 0
        while done < nbytes:
            read = 0
            if not self.fallback:
                with target[done : done + _MAX_READ_NBYTES] as rest:
                    read = self._read_direct(start + done, rest)
            done += read
            # the file's end, a fallback, or a short read, after which nothing is aligned
            if done < nbytes and (not read or read % self.alignment):
                with target[done:] as rest:
                    super()._read(start + done, rest, nbytes - done)
                return

    def _read_direct(self, start: int, blocks: memoryview) -> int:
        """Make one direct read; return its bytes, 0 at the file's end and on a fallback."""
        assert self._direct is not None
        try:
            return os.preadv(self._direct.fileno(), [blocks], start)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise unreadable(self.path, error) from error
            self.fallback = f"it cannot be read past the page cache: {error.strerror}"
            return 0


_thread = threading.local()  # memory: the buffer of `_bounce`


def _bounce() -> memoryview:
    """Return this thread's page-aligned buffer, allocated by the first use."""
    if not hasattr(_thread, "memory"):
        _thread.memory = direct_memory(BOUNCE_NBYTES)
    memory: memoryview = _thread.memory
    return memory


def _open_direct(fd: int) -> FileIO:
    """Reopen an open file for direct reads, even if it was renamed; raises OSError."""
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


class CachedReader(Reader):
    """Reads a file of the hub by pread from the local cache; each read waits for its download."""

    _how = "from the Hugging Face cache"

    def __init__(self, url: Url, file_nbytes: int) -> None:
        super().__init__(url, file_nbytes)
        self._url = url
        self._lock = threading.Lock()  # guards `_file` and `_exact`
        self._file: PreadReader | None = None
        self._exact = False
        self._stopped = threading.Event()

    def stop_ahead(self) -> None:
        self._exact = True

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        with self._lock:
            if self._file is not None:
                self._file.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        with target[:nbytes] as part:
            self._opened().read_into(start, part)

    def _opened(self) -> PreadReader:
        path = hub.fetched(self._url, self._stopped)
        with self._lock:
            if self._file is None:
                self._file = PreadReader(path, self.nbytes)
                if self._exact:
                    self._file.stop_ahead()
            return self._file
