"""The machine's limits: reading the page cache and the disk, and copying to CUDA.

No code of a loader runs here: plain reads into small buffers, and plain copies from pinned memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from streamload.core.system import read_at
from streamload.devices.cuda import Context, PinnedStaging
from streamload.errors import DeviceError

_MIB = 2**20
# between reads threads wait for the GIL, which large blocks hide; small ones stay in a core's cache
_CACHED_BLOCKS = (_MIB, 2 * _MIB, 4 * _MIB)
_DIRECT_BLOCKS = (4 * _MIB, 16 * _MIB)
_DIRECT_THREADS = (4, 8, 16)
_RING_NBYTES = 64 * _MIB
_SLOTS = (4 * _MIB, 16 * _MIB)
_TARGET_NBYTES = 512 * _MIB
_MOST_ROUNDS = 8  # over small files
_SPEED = attrgetter("gigabytes_per_second")
_WINDOW_S = 0.4  # of memory; disks take longer


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes moved in a time."""

    nbytes: int
    seconds: float
    how: str  # in words
    threads: int = 1  # of reads
    block_nbytes: int = 0  # each read or copy

    @property
    def gigabytes_per_second(self) -> float:
        """In GB/s."""
        return self.nbytes / 1e9 / self.seconds


def read(
    paths: Sequence[str],
    threads: int,
    block_nbytes: int,
    *,
    direct: bool,
    seconds: float | None = None,
    first_block: int = 0,
) -> Rate:
    """Read files in blocks, as if they were one, each thread into a buffer of its own.

    Blocks are multiples of 4096 bytes; ``direct`` uses O_DIRECT. With ``seconds`` it repeats for
    that time, at most 8 times; else it reads every block once. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    with ExitStack() as stack:
        blocks: list[tuple[int, int]] = []
        for path in paths:
            fd = os.open(path, flags)
            stack.callback(os.close, fd)
            blocks += [(fd, at) for at in range(0, os.fstat(fd).st_size, block_nbytes)]
        if not blocks:
            raise OSError("no bytes to read")
        buffers = [mmap.mmap(-1, block_nbytes) for _ in range(threads)]  # aligned to pages
        for buffer in buffers:
            buffer.write(b"\1" * block_nbytes)  # resident
        turns = itertools.count(first_block)
        most = first_block + len(blocks) * (1 if seconds is None else _MOST_ROUNDS)
        begin = threading.Barrier(threads + 1)

        def work(buffer: mmap.mmap) -> int:
            moved, into = 0, memoryview(buffer)
            begin.wait()
            while (turn := next(turns)) < most and time.perf_counter() < until:
                fd, at = blocks[turn % len(blocks)]
                moved += read_at(fd, at, into)
            return moved

        with ThreadPoolExecutor(threads) as crew:
            counts = [crew.submit(work, buffer) for buffer in buffers]
            begun = time.perf_counter()
            until = math.inf if seconds is None else begun + seconds
            begin.wait()
            nbytes = sum(count.result() for count in counts)
            took = time.perf_counter() - begun
    how = f"{threads} thread{'s' * (threads != 1)}, blocks of {block_nbytes // _MIB or 1} MiB"
    return Rate(nbytes, took, how, threads, block_nbytes)


def fastest(paths: Sequence[str], *, direct: bool) -> Rate:
    """The fastest numbers of threads and sizes of blocks, each tried on other blocks.

    Blocks that were just read may be in a cache of the disk.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    counts = _DIRECT_THREADS if direct else sorted({n for n in (cpus, 8, 12) if n <= cpus})
    blocks, seconds = (_DIRECT_BLOCKS, 0.8) if direct else (_CACHED_BLOCKS, _WINDOW_S)
    rates: list[Rate] = []
    for threads, block in itertools.product(counts, blocks):
        at = sum(rate.nbytes for rate in rates) // block + 1
        rates.append(read(paths, threads, block, direct=direct, seconds=seconds, first_block=at))
    return max(rates, key=_SPEED)


def copy(index: int) -> Rate:
    """The fastest copies from 64 MiB of pinned memory to a CUDA device; raises DeviceError."""
    try:
        context = Context.primary(f"cuda:{index}", index)
        driver: Any = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"cuda:{index}", str(error)) from error
    driver.cuMemAlloc_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t)
    driver.cuMemFree_v2.argtypes = (ctypes.c_uint64,)
    address = ctypes.c_uint64()
    with context.current():
        context.check(driver.cuMemAlloc_v2(ctypes.byref(address), _TARGET_NBYTES), "cuMemAlloc")
    try:
        return max((_copy(context, address.value, slot) for slot in _SLOTS), key=_SPEED)
    finally:
        with context.current():
            driver.cuMemFree_v2(address)


def _copy(context: Context, address: int, slot_nbytes: int) -> Rate:
    """Copy from slots that each have a stream."""
    slots: list[PinnedStaging] = []
    try:
        for _ in range(_RING_NBYTES // slot_nbytes):
            slots.append(PinnedStaging(context, slot_nbytes))
        targets = itertools.cycle(range(address, address + _TARGET_NBYTES, slot_nbytes))
        moved = 0

        def once() -> None:
            for slot in slots:
                slot.wait()
                context.copy(slot, 0, slot_nbytes, next(targets))

        once()  # the first use of a stream is slower
        for slot in slots:
            slot.wait()
        begun = time.perf_counter()
        while time.perf_counter() - begun < _WINDOW_S:
            once()
            moved += _RING_NBYTES
        for slot in slots:
            slot.wait()
        took = time.perf_counter() - begun
    finally:
        for slot in slots:
            slot.close()
    how = f"{len(slots)} pinned slots of {slot_nbytes // _MIB} MiB"
    return Rate(moved, took, how, 1, slot_nbytes)


def limit(index: int | None = None, **how: Any) -> Callable[[], dict[str, Any]]:
    """A job of `streamload.bench.processes.call`: `copy` to a CUDA device, `fastest`, or `read`."""
    if index is not None:
        return lambda: asdict(copy(index))
    if "threads" not in how:
        return lambda: asdict(fastest(**how))
    return lambda: asdict(read(**how, seconds=None if how["direct"] else _WINDOW_S))
