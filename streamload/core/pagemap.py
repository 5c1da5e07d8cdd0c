"""The count of this process's memory that can be overwritten without taking more memory.

A tensor need not have memory: pages of ``torch.empty``, ``np.zeros`` and ``Tensor.empty`` are
allocated at the first write; a mapped file's pages belong to the page cache until then, and pages
shared with a forked process are copied then. ``/proc/self/pagemap`` lists all pages. Source: Linux,
Documentation/admin-guide/mm/pagemap.rst.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from streamload.core.system import Descriptor
from streamload.core.units import merged

_PRESENT, _FILE_OR_SHARED, _EXCLUSIVE = 1 << 63, 1 << 61, 1 << 56
_ENTRY_NBYTES = 8
_MOST_ENTRIES = 2**17  # read at once: 1 MiB, for 512 MiB of pages of 4 KiB
# Shared memory without a file on a disk, by the names in /proc/self/maps: anonymous maps,
# memfd_create(2), shm_open(3), shmget(2).
_SHARED_ANONYMOUS = ("/dev/zero", "/memfd:", "/dev/shm/", "/SYSV")

_Column = np.ndarray[Any, np.dtype[np.int64]]
_Flags = np.ndarray[Any, np.dtype[np.bool_]]


def reusable_nbytes(ranges: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return the bytes of each (address, bytes) range that can be overwritten in place.

    A private page counts if it is present, mapped by no other process and not of a file. A page of
    shared anonymous memory counts if it is present. All other pages take memory when they are
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
    try:
        edges, kinds = _mappings()
        runs = merged(zip(firsts.tolist(), lasts.tolist(), strict=True))
        flags = _flags(runs)
    except (OSError, ValueError):
        return None
    run_firsts = np.array([first for first, _ in runs], np.int64)
    before = np.cumsum([0, *(last - first for first, last in runs)])
    run = np.searchsorted(run_firsts, firsts, "right") - 1
    shift = before[run] - run_firsts[run]
    firsts, lasts = firsts + shift, lasts + shift
    found = np.zeros(len(ranges), np.int64)
    kind = kinds[np.searchsorted(edges, starts, "right")]
    for number, present in enumerate(flags):
        counts = np.concatenate(([0], np.cumsum(present)))
        held = (counts[lasts] - counts[firsts]) * page
        held -= np.where(present[firsts], starts % page, 0)
        held -= np.where(present[lasts - 1], -stops % page, 0)
        found = np.where((kind == number) & (sizes > 0), held, found)
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


def _flags(runs: Sequence[tuple[int, int]]) -> tuple[_Flags, _Flags]:
    """Return two flags for each page of ``runs``: reusable if private, reusable if shared.

    ``runs`` are (first, stop exclusive) page numbers.
    """
    found: list[tuple[_Flags, _Flags]] = [(np.zeros(0, np.bool_), np.zeros(0, np.bool_))]
    with Descriptor("/proc/self/pagemap", os.O_RDONLY) as fd:
        for first, stop in runs:
            for at, end in pairwise([*range(first, stop, _MOST_ENTRIES), stop]):
                raw = os.pread(fd, (end - at) * _ENTRY_NBYTES, at * _ENTRY_NBYTES)
                entries = np.frombuffer(raw, np.uint64)
                if len(entries) != end - at:
                    raise ValueError("the page map ends early")
                present = entries & _PRESENT != 0
                mine = entries & (_EXCLUSIVE | _FILE_OR_SHARED) == _EXCLUSIVE
                found.append((present & mine, present))
    private, shared = map(np.concatenate, zip(*found, strict=True))
    return private, shared
