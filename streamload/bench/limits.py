"""Measure the machine's limits: reading page cache, disk and memory, and copying to CUDA.

No loader runs here: only reads into small buffers, and copies from pinned memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from streamload.bench.processes import open_context
from streamload.core.memory import available_cpus, available_host_nbytes
from streamload.core.system import read_at
from streamload.devices.cuda import Context, DeviceMemory, PinnedStaging
from streamload.devices.names import framework
from streamload.errors import DeviceError

_MIB = 2**20
# between reads threads wait for the GIL, which large blocks hide; small ones stay in a core's cache
_CACHED_BLOCKS = (_MIB, 2 * _MIB, 4 * _MIB)
_DIRECT_BLOCKS = (4 * _MIB, 16 * _MIB)
_DIRECT_THREADS = (4, 8, 16)
_RING_NBYTES = 64 * _MIB  # pinned memory that is copied from
_SLOTS = (4 * _MIB, 16 * _MIB)  # sizes of a copy to try
_TARGET_NBYTES = 512 * _MIB  # device memory that is copied to
_MOST_ROUNDS = 8  # most times that small files are read
_COPIES = 8  # inside device memory, between two clocks
_SPEED = attrgetter("gigabytes_per_second")
_WINDOW_S = 0.4  # time of a measurement of memory; disks take longer


@dataclass(frozen=True, slots=True)
class Rate:
    """The result of a measurement: bytes read or copied in a time."""

    nbytes: int  # bytes moved
    seconds: float  # time taken
    how: str  # threads and sizes of blocks, in words
    threads: int = 1  # threads that read
    block_nbytes: int = 0  # bytes of each read or copy

    @property
    def gigabytes_per_second(self) -> float:
        """The rate in GB/s (10^9 bytes)."""
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
    """Measure reading files in blocks by several threads, each into its own buffer.

    ``block_nbytes`` is a multiple of 4096. Blocks are read from ``first_block`` on, counted over
    all files, for ``seconds``, each at most 8 times; None: each once. Raises OSError, also for
    empty files.
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
    """Return the best rate of reading files, over numbers of threads and sizes of blocks.

    Each try reads other blocks, since those just read may be in a cache of the disk.
    """
    cpus = available_cpus()
    counts = _DIRECT_THREADS if direct else sorted({n for n in (cpus, 8, 12) if n <= cpus})
    blocks, seconds = (_DIRECT_BLOCKS, 0.8) if direct else (_CACHED_BLOCKS, _WINDOW_S)
    rates: list[Rate] = []
    for threads, block in itertools.product(counts, blocks):
        at = sum(rate.nbytes for rate in rates) // block + 1
        rates.append(read(paths, threads, block, direct=direct, seconds=seconds, first_block=at))
    return max(rates, key=_SPEED)


def copy(index: int) -> Rate:
    """Return the fastest rate of copies from 64 MiB of pinned memory to a CUDA device."""
    context = open_context(index)
    with closing(DeviceMemory(context, _TARGET_NBYTES)) as target:
        return max((_copy(context, target.address, slot) for slot in _SLOTS), key=_SPEED)


def _copy(context: Context, address: int, slot_nbytes: int) -> Rate:
    targets = itertools.cycle(range(address, address + _TARGET_NBYTES, slot_nbytes))
    with ExitStack() as stack:
        slots: list[PinnedStaging] = []
        for _ in range(_RING_NBYTES // slot_nbytes):
            slots.append(stack.enter_context(closing(PinnedStaging(context, slot_nbytes))))

        def once(copies: bool = True) -> None:  # each slot waits for its own copy alone
            for slot in slots:
                slot.event.wait()
                if copies:
                    context.copy(slot, 0, slot_nbytes, next(targets))

        once()  # the first use of a stream is slower
        once(copies=False)
        moved, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < _WINDOW_S:
            once()
            moved += _RING_NBYTES
        once(copies=False)
        took = time.perf_counter() - begun
    how = f"{len(slots)} pinned slots of {slot_nbytes // _MIB} MiB"
    return Rate(moved, took, how, 1, slot_nbytes)


def memory(owner: str, device: str, index: int | None) -> Callable[[], dict[str, Any]]:
    """Return a function that measures reading a device's memory; a job of `processes.call`.

    CUDA's by copies inside it, which read and write; memory that is the host's by sums over it.
    ``owner``: the device's framework; ``index``: the number of a CUDA device.
    """
    if index is not None:
        return lambda: asdict(_device_memory(index))
    if not framework(owner).device(device).info.shared_memory:
        raise DeviceError(device, "the rate of its memory is not measured")
    return lambda: asdict(_host_memory())


def _device_memory(index: int) -> Rate:
    context = open_context(index)
    half = _TARGET_NBYTES // 2
    with closing(DeviceMemory(context, _TARGET_NBYTES)) as memory, context.current():
        target, source = (ctypes.c_uint64(memory.address + at) for at in (0, half))
        nbytes = ctypes.c_size_t(half)

        def copies() -> Iterable[object]:
            for _ in range(_COPIES):
                context.call("cuMemcpyDtoD_v2", target, source, nbytes)
            context.call("cuCtxSynchronize")
            return ()

        seconds = _least_s(copies)
    return Rate(_COPIES * _TARGET_NBYTES, seconds, "copies of 256 MiB inside it, both ways")


def _host_memory() -> Rate:
    """Return the best rate of sums over 512 MiB, or an eighth of what is free if that is less."""
    nbytes = min(_TARGET_NBYTES, (available_host_nbytes() or _TARGET_NBYTES) // 8)
    values = np.ones(max(nbytes // 8, 1), dtype=np.int64)
    rates: list[Rate] = []
    cpus = available_cpus()
    for threads in sorted({n for n in (1, 2, 4, 8, 16, cpus) if n <= cpus}):
        parts = np.array_split(values, threads)
        with ThreadPoolExecutor(threads) as crew:
            seconds = _least_s(partial(crew.map, np.sum, parts))
        how = f"sums by {threads} thread{'s' * (threads != 1)}"
        rates.append(Rate(values.nbytes, seconds, how, threads))
    return max(rates, key=_SPEED)


def _least_s(once: Callable[[], Iterable[object]]) -> float:
    seconds: list[float] = []
    until = time.perf_counter() + _WINDOW_S
    while not seconds or time.perf_counter() < until:
        begun = time.perf_counter()
        deque(once(), 0)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def limit(index: int | None = None, **how: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that measures a limit; a job of `streamload.bench.processes.call`.

    It runs `copy` to the CUDA device ``index`` if given; else, with the arguments ``how``, `read`
    if "threads" is one of them, or `fastest`.
    """
    if index is not None:
        return lambda: asdict(copy(index))
    if "threads" not in how:
        return lambda: asdict(fastest(**how))
    return lambda: asdict(read(**how, seconds=None if how["direct"] else _WINDOW_S))
