"""Choose how the files of a load are read, and bound the page cache that this fills at once.

Pages that a disk is filling are locked: they count in a memory cgroup, and cannot be reclaimed. The
kernel reads ahead of every thread, 8 to 16 MiB on some disks, so a load that leaves less than that
free is killed. If a plan leaves little, the kernel reads nothing ahead: cold files are read past
the page cache, and others in pieces of 256 KiB. reader="mmap" maps them in such pieces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from streamload.core.location import Url
from streamload.files.header import Header
from streamload.files.hub import Fetch, file_of
from streamload.files.local import ReaderChoice, ReaderKind, choose_reader
from streamload.files.page_cache import PageCacheKind
from streamload.planning.plan import Plan

#: "ahead" lets the kernel read ahead. The others do not: "direct" reads cold files past the page
#: cache, which takes memory for what is unaligned, "exact" reads through it.
Reading = Literal["ahead", "direct", "exact"]

# Page cache that the kernel may fill at once per thread, and at least (docs/measurements.md).
_AHEAD_THREAD_NBYTES = 32 * 2**20
_LEAST_AHEAD_NBYTES = 64 * 2**20


def ahead_nbytes(plan: Plan) -> int:
    """Return the most bytes of page cache that read-ahead may fill at once while a plan runs."""
    if not {"mmap", "pread", "cache"}.intersection(plan.readers) or not plan.placements:
        return 0
    return max(plan.threads * _AHEAD_THREAD_NBYTES, _LEAST_AHEAD_NBYTES)


def reading_of(plan: Plan) -> Reading:
    """Return how a plan reads files: with read-ahead, past the page cache, or in exact pieces."""
    return "ahead" if plan.ahead else "direct" if "direct" in plan.readers else "exact"


def reader_choice(
    header: Header,
    reader: ReaderKind,
    page_cache: PageCacheKind,
    reading: Reading,
    *,
    whole_slots: bool,
    fetch: Fetch = "stream",
) -> ReaderChoice:
    """Choose the reader of a file, with the reason; `whole_slots`: it fills page-aligned slots."""
    if fetch == "cache" and file_of(header.path) is not None:
        return choose_reader(header.path, "cache")
    if header.views and not isinstance(header.path, Url):
        views = "views with strides" if not header.parts else "in chunks of several files"
        return ReaderChoice("pread", f"some of its tensors are {views}")
    choice = choose_reader(header.path, reader, page_cache=page_cache, whole_slots=whole_slots)
    if reading == "ahead" or choice.kind != "mmap" or reader == "mmap":
        return choice
    return replace(choice, kind="pread", reason="not mapped: the host has little memory")
