"""Staging memory, not pinned, of devices whose copies block."""

from __future__ import annotations

import mmap
from contextlib import suppress


class HostStaging:
    """Staging in a page-aligned anonymous map, which `close` frees."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.view = memoryview(self._map)[:nbytes]

    def close(self) -> None:
        with suppress(BufferError):  # an error's traceback still refers to it
            self.view.release()
            self._map.close()


class _Done:
    def wait(self) -> None:
        """Return at once."""


#: The ticket of every copy that blocks until it has finished.
DONE = _Done()
