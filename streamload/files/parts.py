"""Several files read as one, for tensors whose chunks several processes saved."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from streamload.files.header import Part
from streamload.files.reader import Reader

_MOST_OPEN = 256  # files that stay open; a process may have 1024


class PartsReader(Reader):
    """Reads files whose bytes follow each other; each is opened when it is first read."""

    _how = "together with other files"

    def __init__(self, parts: Sequence[Part], open_part: Callable[[Part], Reader]) -> None:
        self._stops = [*accumulate(part.nbytes for part in parts)]
        super().__init__(parts[0].path, self._stops[-1])
        self._parts, self._open_part = parts, open_part
        self._lock = threading.Lock()  # guards the three below
        self._open: dict[int, Reader] = {}
        self._exact = self._closed = False

    def stop_ahead(self) -> None:
        self._exact = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for reader in self._open.values():
                reader.close()

    def _read(self, start: int, target: memoryview, nbytes: int) -> None:
        stop, first = start + nbytes, start
        while first < stop:
            number = bisect_right(self._stops, first)
            end = min(stop, self._stops[number])
            before = self._stops[number] - self._parts[number].nbytes
            with self._opened(number) as reader, target[first - start : end - start] as part:
                reader.read_into(first - before, part)
            first = end

    @contextmanager
    def _opened(self, number: int) -> Iterator[Reader]:
        """Yield the reader of a file, which stays open unless there are many."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path}: its reader is closed")
            reader = self._open.get(number)
            if reader is None and len(self._open) < _MOST_OPEN:
                reader = self._open[number] = self._new(number)
        if reader is not None:
            yield reader
            return
        with self._new(number) as reader:
            yield reader

    def _new(self, number: int) -> Reader:
        reader = self._open_part(self._parts[number])
        if self._exact:
            reader.stop_ahead()
        return reader
