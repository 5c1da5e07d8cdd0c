"""A memory map of a file whose pages are populated window by window and dropped after use."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import Counter

from streamload.core.system import libc, map_file, populate_shared

# A fault also maps the pages around it: 64 KiB, or a large folio of the page cache, which has at
# most this size with pages of 4 KiB. Windows are therefore dropped in blocks of this size.
_BLOCK = 2**21


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
