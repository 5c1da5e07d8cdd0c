"""How the files of a load are read, and the page cache that this fills at a time.

Pages that a disk is filling are locked: they count in a memory cgroup, and cannot be reclaimed. The
kernel reads ahead of every thread, 8 to 16 MiB on some disks, so a load that leaves less than that
free is killed. Where a plan leaves little, nothing is read ahead: cold files are read past the page
cache, and others in pieces of 256 KiB.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from streamload.core.location import Url
from streamload.files.header import Header
from streamload.files.local import ReaderChoice, ReaderKind, choose_reader
from streamload.files.page_cache import PageCacheKind
from streamload.planning.plan import Plan

#: "ahead" lets the kernel read ahead. The others do not: "direct" reads cold files past the page
#: cache, which takes memory for what is unaligned, "exact" reads through it.
Reading = Literal["ahead", "direct", "exact"]

# What the kernel may have on its way for each thread, and at least for all (docs/measurements.md).
_AHEAD_THREAD_NBYTES = 32 * 2**20
_LEAST_AHEAD_NBYTES = 64 * 2**20


def ahead_nbytes(plan: Plan) -> int:
    """Page cache that may be on its way at once while a plan runs with read-ahead, in bytes."""
    if not {"mmap", "pread"}.intersection(plan.readers) or not plan.placements:
        return 0
    return max(plan.threads * _AHEAD_THREAD_NBYTES, _LEAST_AHEAD_NBYTES)


def reading_of(plan: Plan) -> Reading:
    """How a plan reads."""
    return "ahead" if plan.ahead else "direct" if "direct" in plan.readers else "exact"


def reader_choice(
    header: Header,
    reader: ReaderKind,
    page_cache: PageCacheKind,
    reading: Reading,
    *,
    whole_slots: bool,
) -> ReaderChoice:
    """How a file is read; ``whole_slots`` is for `choose_reader`."""
    if header.views and not isinstance(header.path, Url):
        return ReaderChoice("pread", "some of its tensors are views with strides")
    choice = choose_reader(header.path, reader, page_cache=page_cache, whole_slots=whole_slots)
    if reading == "ahead" or choice.kind != "mmap":
        return choice
    return replace(choice, kind="pread", reason="not mapped: the host has little memory")
