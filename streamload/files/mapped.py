"""A file's map, whose pages are brought in window by window and let go of behind."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref

from streamload.core.system import libc, map_file

_PAGE = mmap.PAGESIZE
# A fault maps the pages around its own too: 64 KiB, or all of a large folio of the page cache, at
# most this long with pages of 4 KiB. Windows are therefore dropped in blocks of this size.
_BLOCK = 2**21
_MADV_POPULATE_READ = 22  # Linux 5.14 and later


class FileMap:
    """A file's first ``nbytes``, mapped read-only.

    The map lives until its last memoryview is gone. Python's own `mmap.mmap` does not tell its
    address, and its madvise holds the interpreter's lock while pages are read. OSError and
    OverflowError say that the kernel refused, or that the process has no such addresses.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        array = ctypes.c_ubyte * nbytes  # first: refuses more than the process can address
        address = map_file(fd, 0, nbytes)
        owner = array.from_address(address)
        # not when the process ends: other threads may still look then
        weakref.finalize(owner, libc().munmap, address, nbytes).atexit = False
        self.data = memoryview(owner).cast("B").toreadonly()
        self._address = address
        self._stop = address + nbytes
        self._lock = threading.Lock()
        self._windows: dict[int, int] = {}  # how many there are, by block

    def populate(self, start: int, stop: int) -> int:
        """Map the pages of a window, and read those not in memory; returns 0 or an errno."""
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
        # a window that begins in such a block in between finds its pages again as it touches them
        for block in empty:
            first, last = block * _BLOCK, (block + 1) * _BLOCK
            _madvise(max(first, self._address), min(last, self._stop), mmap.MADV_DONTNEED)

    def _blocks(self, start: int, stop: int) -> range:
        return range((self._address + start) // _BLOCK, (self._address + stop - 1) // _BLOCK + 1)


def _madvise(first: int, last: int, advice: int) -> int:
    """madvise(2) on addresses ``first`` to ``last``, exclusive; returns 0 or an errno."""
    return 0 if libc().madvise(first, last - first, advice) == 0 else ctypes.get_errno()
