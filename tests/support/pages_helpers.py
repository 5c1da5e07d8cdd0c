"""Helpers that `test_pages` shares with other tests."""

from __future__ import annotations

import mmap

import numpy as np

from streamload.core.pagemap import reusable_nbytes

NBYTES = 40 * mmap.PAGESIZE


def _own(flags: int = mmap.MAP_PRIVATE) -> mmap.mmap:
    """Anonymous memory, in pages of the usual size, none of them there yet."""
    own = mmap.mmap(-1, NBYTES, flags=flags | mmap.MAP_ANONYMOUS)
    own.madvise(mmap.MADV_NOHUGEPAGE)
    return own


def _address(buffer: object) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)  # type: ignore[call-overload]


def _reusable(buffer: object, start: int = 0, nbytes: int = NBYTES) -> int:
    found = reusable_nbytes([(_address(buffer) + start, nbytes)])
    assert found is not None
    return found[0]
