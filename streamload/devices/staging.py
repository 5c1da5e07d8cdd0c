"""Staging of devices whose copies block, in memory that is not pinned."""

from __future__ import annotations

import mmap
from contextlib import suppress


class HostStaging:
    """Staging in a page-aligned anonymous map, which `close` frees."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.view = memoryview(self._map)[:nbytes]

    def close(self) -> None:
        with suppress(BufferError):  # an error's traceback refers to it: it goes then
            self.view.release()
            self._map.close()


class _Done:
    """The ticket of a copy that has finished."""

    def wait(self) -> None:
        pass


#: The ticket of every copy that has finished when it returns.
DONE = _Done()
