"""The md5 sum of a file that several threads write, computed while its parts are in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable

from streamload.checkpoint.shards import cut

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
