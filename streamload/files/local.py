"""Byte ranges of one shard: through a memory map, by pread, past the page cache, or over HTTP.

A file is opened read-only, and no byte of it is held between two calls. A map is the fastest way on
a local filesystem, where a lease holds back a process that would truncate the file: under a map
that kills the reading process (SIGBUS). On a network or FUSE filesystem a lease holds back no
other machine, and a map is many times slower: those are read by pread. Bytes of a local disk that
are not in the page cache can go straight to their destination (O_DIRECT), which costs the CPU next
to nothing and leaves the page cache as it is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from streamload.core.location import Location, Url
from streamload.core.system import (
    address_of,
    direct_memory,
    filesystem_and_length,
    libc,
    read_at,
    scatter,
)
from streamload.core.units import round_up
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError
from streamload.files.guard import FileState, Guard, take_lease
from streamload.files.header import View, open_regular, unreadable
from streamload.files.mapped import FileMap
from streamload.files.page_cache import PageCacheKind, resident_fraction
from streamload.files.reader import Addresses
from streamload.files.reader import Reader as Reader
from streamload.files.remote import HttpReader
from streamload.files.strided import StridedReader

ReaderKind = Literal["auto", "mmap", "pread", "direct"]
#: "http" is the only one of a URL, and of nothing else: users need not ask for it.
ResolvedKind = Literal["mmap", "pread", "direct", "http"]

# fmt: off
#: Filesystems that "auto" maps. Every other is read by pread, which is right everywhere: network
#: and FUSE filesystems (nfs, cifs, smb3, fuse.sshfs, lustre, gpfs, beegfs, glusterfs, ceph, afs,
#: 9p, virtiofs), zfs (a map copies its cache into another), and unknown ones.
MAPPED_FILESYSTEMS = frozenset({
    "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "iso9660", "jfs",
    "nilfs2", "ntfs3", "overlay", "ramfs", "reiserfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat",
    "xfs",
})
#: Filesystems that hold their files on a disk of this machine and read past the page cache:
#: "auto" does so for bytes that are not in it. Not those in memory, nor read-only images.
DIRECT_FILESYSTEMS = MAPPED_FILESYSTEMS - {
    "erofs", "iso9660", "ramfs", "squashfs", "tmpfs", "ubifs", "udf",
}
#: Filesystems on which even "direct" reads through the page cache: it is in memory, or another
#: machine's, and there are no blocks to read past it. FUSE, "fuse" and whatever follows, as well.
BUFFERED_FILESYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "gluster", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ramfs", "smb3", "smbfs", "tmpfs", "virtiofs",
})
# fmt: on

# Above it "auto" reads through the page cache; below, direct reads are faster on any disk that was
# tried (docs/measurements.md).
_MOSTLY_RESIDENT = 0.5
# In words, since numbers would be different for each of a hundred shards: next to nothing (headers
# have been read), less than that share, as much or more, all.
_SHARES = (0.05, _MOSTLY_RESIDENT, 1.0)
_RESIDENT = ("not ", "mostly not ", "mostly ", "")

_ADDRESS_BITS = sys.maxsize.bit_length() + 1
_MAX_MAPPED_NBYTES_32 = 2**30  # of one shard, with addresses of 32 bits
_MAX_READ_NBYTES = 2**30  # in one call: systems refuse or cut reads near 2**31
#: In one call without reading ahead: pages that are being read cannot be reclaimed.
EXACT_NBYTES = 2**18

_PAGE = mmap.PAGESIZE

# The alignment of direct reads if the kernel does not state it: right for every disk of 512
# or 4096 bytes a sector.
_USUAL_ALIGNMENT = 4096
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_AT_EMPTY_PATH = 0x1000
#: Each thread's own, for what cannot be read straight to its place; where nothing is read ahead,
#: `EXACT_NBYTES` of it are touched.
BOUNCE_NBYTES = 2**20
# Errors of a kernel that does not read this file, or at this alignment, past its page cache.
_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


def open_reader(
    shard: Location,
    file_nbytes: int,
    kind: ReaderKind | ResolvedKind = "auto",
    state: FileState | None = None,
    views: Sequence[View] = (),
) -> Reader:
    """Open a shard.

    ``kind`` "auto" is `resolve_reader`; a file that a lease does not protect from truncation is
    read by pread in place of a map, see `Reader.fallback`. The rest is from the file's `Header`.
    """
    if views:
        return StridedReader(open_reader(shard, file_nbytes, kind, state), views)
    resolved = resolve_reader(shard, kind)
    if isinstance(shard, Url):
        return HttpReader(shard, file_nbytes)
    # nothing can be mapped of nothing, nor read past the page cache
    opened = {"mmap": MmapReader, "direct": DirectReader} if file_nbytes else {}
    return opened.get(resolved, PreadReader)(shard, file_nbytes, state)


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """How a shard is read."""

    kind: ResolvedKind
    reason: str  # why, for a report; the same for shards that are in the same state
    resident: float | None = None  # the fraction in the page cache, if it was looked at


def choose_reader(
    path: str | os.PathLike[str],
    kind: ReaderKind | ResolvedKind,
    *,
    page_cache: PageCacheKind = "auto",
    whole_slots: bool = True,
) -> ReaderChoice:
    """How to read a shard; takes less than 2 ms for any length.

    "auto" reads files of a local disk that are mostly not in the page cache past it, unless
    ``page_cache`` is "keep"; all others as `resolve_reader`. Files that a lease does not protect
    from truncation are never mapped. ``whole_slots`` means that the shard is read into memory that
    begins at a page, and may be over-read: without it direct reads need a copy, which halves them
    (2.6 to 3.2 GB/s became 1.4 to 2.1 on a virtual disk, as much as a map).
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
    """The same, whether or not the file can be mapped now."""
    remote = isinstance(path, Url)
    if kind not in get_args(ReaderKind) and not (kind == "http" and remote):
        raise ValueError(f"unknown reader {kind!r}; known: {', '.join(get_args(ReaderKind))}")
    if kind in ("mmap", "direct") and remote:
        raise ValueError(f'reader="{kind}" is for files, and {path} is read over HTTP')
    if isinstance(path, Url):
        return ReaderChoice("http", f"from {path.host}")
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


def resolve_reader(path: str | os.PathLike[str], kind: ReaderKind | ResolvedKind) -> ResolvedKind:
    """Resolve "auto" for a file that is read through the page cache; others stay.

    Of a URL, "auto" and "pread" (reads, and no map) are both "http".
    """
    return _choose(path, kind, "auto", whole_slots=False).kind


def _no_lease(filesystem: str) -> str:
    """Why a lease on a file would hold back no process of this machine; "" if it does."""
    if filesystem in MAPPED_FILESYSTEMS:
        return ""
    return f"{filesystem or 'an unknown filesystem'} does not hold back who changes its files"


def not_mapped(path: Location) -> str:
    """Why a file cannot be mapped now; "" if it can.

    A process that truncates a file under a map kills this one, unless a lease holds it back.
    """
    if isinstance(path, Url):
        return "it is read over HTTP"
    try:
        with open_regular(path) as file:
            refusal = _no_lease(filesystem_and_length(path)[0])
            return refusal or take_lease(file.fileno())
    except CheckpointError:
        return ""  # reading it will say what is wrong with it


def reader_for(
    filesystem: str, nbytes: int, *, address_bits: int = _ADDRESS_BITS
) -> Literal["mmap", "pread"]:
    """The reader through the page cache for ``nbytes`` on a filesystem of this type."""
    if address_bits <= 32 and nbytes > _MAX_MAPPED_NBYTES_32:
        return "pread"
    return "mmap" if filesystem in MAPPED_FILESYSTEMS else "pread"


class PreadReader(Reader):
    """Reads by pread. `view` allocates the bytes that it gives out; `read_into` nothing."""

    has_file = True

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes)
        self._most_nbytes = _MAX_READ_NBYTES
        self._file = open_regular(path)
        try:
            refusal = _no_lease(filesystem_and_length(path)[0])
            self._guard = Guard(self._file, path, state, refusal=refusal)
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
        """See `Reader.stop_ahead`."""
        self._most_nbytes = EXACT_NBYTES
        self._advise("POSIX_FADV_RANDOM")

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        """See `Reader.scatter`."""
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
        """See `Reader.fileno`."""
        return self._file.fileno()

    def unchanged(self) -> AbstractContextManager[None]:
        """See `Reader.unchanged`."""
        return self._guard

    def close(self) -> None:
        """See `Reader.close`."""
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
    """Maps the file. A window is populated before it is given out, and dropped behind.

    `read_into` is pread here as well. Without a lease `view` is, too, and `fallback` says why:
    nothing but a lease keeps a file from being truncated between a look at its length and the
    touch of a window, which is a SIGBUS.
    """

    def __init__(self, path: Path, file_nbytes: int, state: FileState | None = None) -> None:
        super().__init__(path, file_nbytes, state)
        # elsewhere, and before Linux 5.14, pages are faulted in as they are touched
        self._populates = sys.platform == "linux"
        self._map: FileMap | None = None
        self.mapped = not self._guard.refusal
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
        """See `Reader.view`."""
        self._check_range(start, stop)
        return self._window(start, stop) if self.mapped else self._filled(start, stop)

    @contextmanager
    def _window(self, start: int, stop: int) -> Iterator[memoryview]:
        with self._guard:
            held = self._map  # the addresses stay ours, also if the reader is closed
            if held is None or start == stop:
                yield memoryview(b"")
                return
            window = held.data[start:stop]
            held.enter(start, stop)
            try:
                self._populate(held, start, stop)
                yield window
            finally:
                with suppress(BufferError):  # something of the caller's still refers to it
                    window.release()
                held.leave(start, stop)

    def stop_ahead(self) -> None:
        """See `Reader.stop_ahead`: pages that a touch reads come with those around them."""
        super().stop_ahead()
        self.mapped = False

    def close(self) -> None:
        """See `Reader.close`. The map goes when the last window of it has."""
        super().close()
        self._map = None

    def _populate(self, held: FileMap, start: int, stop: int) -> None:
        """Read a window in: a touch of bytes that the storage does not give would kill."""
        while self._populates and (code := held.populate(start, stop)):
            if code == errno.EINVAL:  # not known to this kernel
                self._populates = False
            elif code == errno.EFAULT:
                if (found := self._found_nbytes()) < stop:  # a lease is broken after 45 s
                    raise self._truncated(found)
                # the file is as long as it should be: the storage did not give its bytes
                raise unreadable(self.path, OSError(errno.EIO, os.strerror(errno.EIO)))
            elif code != errno.EINTR:
                raise unreadable(self.path, OSError(code, os.strerror(code)))


class DirectReader(PreadReader):
    """Reads past the page cache (O_DIRECT), into memory that is aligned without a copy.

    Unaligned bytes go through 1 MiB that each thread keeps for them: where the places in memory and
    in the file agree modulo `alignment`, only the blocks at the ends, elsewhere all of it, which is
    slower; `read_aligned` avoids it.

    A file that cannot be read like that is read through the page cache, from the beginning or from
    then on, and `fallback` says why: that is no error.
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
        """See `Reader.fileno`."""
        if self._direct is None or self.fallback:
            return super().fileno()
        return self._direct.fileno()

    def scatter(self, start: int, addresses: Addresses, sizes: Addresses) -> bool:
        """See `Reader.scatter`: through the page cache, and only if little comes into it."""
        exact = self._most_nbytes == EXACT_NBYTES
        return exact and super().scatter(start, addresses, sizes)

    def close(self) -> None:
        """See `Reader.close`."""
        super().close()
        if self._direct is not None:
            self._direct.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        if self.fallback:
            super()._read(start, target, nbytes)
            return
        unit, stop = self.alignment, start + nbytes
        # the whole blocks that are read straight to their place, if there are any
        first, last = round_up(start, unit), round_up(stop, unit)
        if last - start > target.nbytes:  # no room for what comes after
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
        """Fill ``target`` through this thread's own memory."""
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
        """Read whole blocks; the first ``nbytes`` have to be there."""
        done = 0
        while done < nbytes:
            read = 0
            if not self.fallback:
                with target[done : done + _MAX_READ_NBYTES] as rest:
                    read = self._read_direct(start + done, rest)
            done += read
            # the file's end, a fallback, or a piece after which nothing is aligned any more
            if done < nbytes and (not read or read % self.alignment):
                with target[done:] as rest:
                    super()._read(start + done, rest, nbytes - done)
                return

    def _read_direct(self, start: int, blocks: memoryview) -> int:
        """One direct read; returns the bytes read, 0 at the file's end and on a fallback."""
        assert self._direct is not None
        try:
            return os.preadv(self._direct.fileno(), [blocks], start)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise unreadable(self.path, error) from error
            self.fallback = f"it cannot be read past the page cache: {error.strerror}"
            return 0


_thread = threading.local()  # memory: of `_bounce`


def _bounce() -> memoryview:
    """Memory of this thread that begins at a page; allocated by the first use."""
    if not hasattr(_thread, "memory"):
        _thread.memory = direct_memory(BOUNCE_NBYTES)
    memory: memoryview = _thread.memory
    return memory


def _open_direct(fd: int) -> FileIO:
    """Open an open file again for direct reads, also if it was renamed; raises OSError."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    return FileIO(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flag | os.O_CLOEXEC))


def _direct_alignment(fd: int) -> int:
    """Addresses, offsets and lengths of direct reads of a file must be multiples of this, in bytes.

    A power of two, at most the page; raises OSError where the kernel reads the file at no such
    alignment. Source: statx(2), STATX_DIOALIGN.
    """
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
