"""The count of this process's memory that can be overwritten without taking more memory.

A tensor need not have memory: pages of ``torch.empty``, ``np.zeros`` and ``Tensor.empty`` are
allocated at the first write; a mapped file's pages belong to the page cache until then, and pages
shared with a forked process are copied then. ``/proc/self/pagemap`` lists the pages of private
memory, mincore(2) those of shared memory: a forked process maps these when it touches them. Source:
Linux, Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from streamload.core.system import Descriptor, failure, libc
from streamload.core.units import merged

_PRESENT, _FILE_OR_SHARED, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
_ENTRY_NBYTES = 8
_MOST_ENTRIES = 2**17  # read at once: 1 MiB, for 512 MiB of pages of 4 KiB
# Shared memory without a file on a disk, by the names in /proc/self/maps: anonymous maps,
# memfd_create(2), shm_open(3), shmget(2).
_SHARED_ANONYMOUS = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV")

_Column = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]
_Runs = Sequence[tuple[int, int]]  # first and last (exclusive) page


def reusable_nbytes(ranges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the bytes of each (address, bytes) range that can be overwritten in place.

    A private page counts if it is present, mapped by no other process and not of a file. A page of
    shared anonymous memory counts if it is in memory. All other pages take memory when they are
    written: those never written, the zero page, files, swap, pages shared by fork(2).

    Returns:
        Bytes for each range; None without /proc/self/pagemap.
    """
    if not ranges:
        return []
    page = mmap.PAGESIZE
    starts, sizes = np.array(ranges, np.int64).reshape(-1, 2).T
    stops = starts + sizes
    firsts = starts // page
    lasts = np.maximum(-(-stops // page), firsts + 1)
    found = np.zeros(len(ranges), np.int64)
    try:
        edges, kinds = _mappings()
        kind = np.where(sizes > 0, kinds[np.searchsorted(edges, starts, "right")], -1)
        for number, flags_of in enumerate((_private, _resident)):
            (at,) = np.nonzero(kind == number)
            runs = merged(zip(firsts[at].tolist(), lasts[at].tolist(), strict=True))
            flags = np.concatenate([np.zeros(0, np.bool_), *flags_of(runs)])
            before = np.cumsum([0, *(last - first for first, last in runs)])
            run_firsts = np.array([first for first, _ in runs], np.int64)
            run = np.searchsorted(run_firsts, firsts[at], "right") - 1
            shift = before[run] - run_firsts[run]
            first, last = firsts[at] + shift, lasts[at] + shift
            counts = np.concatenate(([0], np.cumsum(flags)))
            found[at] = (counts[last] - counts[first]) * page
            found[at] -= np.where(flags[first], starts[at] % page, 0)
            found[at] -= np.where(flags[last - 1], -stops[at] % page, 0)
    except (OSError, ValueError):
        return None
    return found.tolist()


def _mappings() -> tuple[_Column, _Column]:
    """Return the ends of this process's mappings, and the kinds of memory between them.

    Returns:
        Addresses, ascending, and for each the kind of the memory before it: 0 for private memory, 1
        for shared anonymous memory, -1 for any other (a shared file, a driver's memory, none).
    """
    edges: list[int] = []
    kinds: list[int] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            addresses, mode, _, _, _, *name = line.split(maxsplit=5)
            first, _, stop = addresses.partition("-")
            private = not mode.endswith("s")
            shared = not private and "".join(name).startswith(_SHARED_ANONYMOUS)
            edges += int(first, 16), int(stop, 16)
            kinds += -1, 0 if private else 1 if shared else -1
    last = np.iinfo(np.int64).max  # [vsyscall] is beyond
    return np.array([min(edge, last) for edge in edges], np.int64), np.array([*kinds, -1])


def _pieces(runs: _Runs) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most `_MOST_ENTRIES` pages that make up ``runs``."""
    for first, stop in runs:
        yield from pairwise([*range(first, stop, _MOST_ENTRIES), stop])


def _private(runs: _Runs) -> Iterator[_Flags]:
    """Yield for pages of private memory whether they are present, and this process's alone."""
    with Descriptor("/proc/self/pagemap", os.O_RDONLY) as fd:
        for first, stop in _pieces(runs):
            raw = os.pread(fd, (stop - first) * _ENTRY_NBYTES, first * _ENTRY_NBYTES)
            entries = np.frombuffer(raw, np.uint64)
            if len(entries) != stop - first:
                raise ValueError("the page map ends early")
            yield entries & (_PRESENT | _EXCLUSIVE | _FILE_OR_SHARED) == _PRESENT | _EXCLUSIVE


def _resident(runs: _Runs) -> Iterator[_Flags]:
    """Yield for pages of shared memory whether they are in memory."""
    for first, stop in _pieces(runs):
        flags = np.empty(stop - first, np.uint8)
        nbytes = (stop - first) * mmap.PAGESIZE
        if libc().mincore(first * mmap.PAGESIZE, nbytes, flags.ctypes.data):
            raise failure()
        yield flags & 1 != 0
