"""What frameworks' allocators take from a device for what is asked of them.

Sizes and rules of torch's allocator for CUDA: ``c10/cuda/CUDACachingAllocator.cpp``
(``round_size``, ``get_allocation_size``, ``get_free_block``, ``should_split``).

Those of CUDA's driver are not published. What ``cuMemAlloc`` took of an H200 (driver 580), by how
much ``cuMemGetInfo`` fell, and how far the addresses were apart:

| bytes | of one | of eight | apart |
|---|---|---|---|
| 1 | 2 MiB | 2 MiB | 512 |
| 65,536 | 2 MiB | 2 MiB | 65,536 |
| 524,288 | 2 MiB | 4 MiB | 524,288 |
| 1,048,576 | 2 MiB | 8 MiB | 1,048,576 |
| 1,048,577 | 2 MiB | 16 MiB | 2 MiB |
| 2 MiB | 2 MiB | 16 MiB | 2 MiB |
| 2 MiB + 1 | 4 MiB | 32 MiB | 4 MiB |
| 5 MiB | 6 MiB | 48 MiB | 6 MiB |

The 120 tensors of a Llama of 999,994,368 bytes took 1,077,936,128: 514 blocks of 2 MiB. Predicted
are 515, for its small tensors found room in a block that was there before.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Literal

from streamload.core.units import round_up

#: How an allocator takes memory: as much as is asked, rounded; by torch's rules for CUDA, with
#: fixed segments or with expandable ones; or as CUDA's driver itself does.
AllocatorKind = Literal["exact", "cuda_caching", "cuda_expandable", "cuda_driver"]

_MIB = 2**20
_BLOCK_NBYTES = 512  # kMinBlockSize
_SMALL_NBYTES = _MIB  # kSmallSize: up to here, blocks come from small segments
_SMALL_SEGMENT_NBYTES = 2 * _MIB  # kSmallBuffer
_OWN_SEGMENT_NBYTES = 10 * _MIB  # kMinLargeAlloc: from here on, a segment is as large as its block
_LARGE_SEGMENT_NBYTES = 20 * _MIB  # kLargeBuffer
_SEGMENT_ROUNDING_NBYTES = 2 * _MIB  # kRoundLarge

#: What CUDA's driver gives memory in: whole ones for each allocation that is larger than
#: `DRIVER_SHARED_NBYTES`, while smaller ones share them, rounded to 512 bytes.
DRIVER_BLOCK_NBYTES = 2 * _MIB
DRIVER_SHARED_NBYTES = _MIB


#: Old memory of the host that is released before freed heap goes back to the kernel.
TRIM_NBYTES = 4 * _MIB


@dataclass(frozen=True, slots=True)
class ObjectCosts:
    """Bytes of Python's and the framework's objects, and of a load's records of tensors.

    Attributes:
        tensor_nbytes: for each tensor.
        view_nbytes: more for each whose rank is not 1, if it is a view of a flat one.
        kind_nbytes: once for all of one dtype and shape.
        shape_nbytes: once for each shape whose rank is not 1.
        size_nbytes: once for each size in bytes.
    """

    tensor_nbytes: int = 0
    view_nbytes: int = 0
    kind_nbytes: int = 0
    shape_nbytes: int = 0
    size_nbytes: int = 0

    @property
    def most_nbytes(self) -> int:
        """For a tensor unlike all others."""
        each = self.tensor_nbytes + self.view_nbytes
        return each + self.kind_nbytes + self.shape_nbytes + self.size_nbytes

    def of(self, tensors: Iterable[tuple[str, tuple[int, ...], int, int]]) -> int:
        """For tensors, each as (dtype, shape, bytes of one, count)."""
        found = [*tensors]
        shapes = {shape for _, shape, _, _ in found if len(shape) != 1}
        return (
            self.tensor_nbytes * sum(count for *_, count in found)
            + self.view_nbytes * sum(count for _, shape, _, count in found if len(shape) != 1)
            + self.kind_nbytes * len({(dtype, shape) for dtype, shape, _, _ in found})
            + self.shape_nbytes * len(shapes)
            + self.size_nbytes * len({nbytes for _, _, nbytes, _ in found})
        )


NO_OBJECTS = ObjectCosts()


@dataclass(frozen=True, slots=True)
class TensorCosts:
    """Host memory of tensors besides their bytes.

    Attributes:
        objects: for tensors without a model.
        parameters: for those that fill parameters of a model.
        kernel_nbytes: for each, in the kernel, which no counter of the process includes.
        left_nbytes: heap that stays used when one is released, since others share its pages.
    """

    objects: ObjectCosts = NO_OBJECTS
    parameters: ObjectCosts = NO_OBJECTS
    kernel_nbytes: int = 0
    left_nbytes: int = 0


NO_COSTS = TensorCosts()


def taken(kind: AllocatorKind, granularity_nbytes: int, sizes: Iterable[int]) -> Iterator[int]:
    """Bytes that each of several allocations in order newly takes from the device.

    Nothing is freed in between, and the allocator has no free memory of its own at first. An
    allocation that fits into the rest of an earlier block takes nothing. ``granularity_nbytes``
    is for "exact".
    """
    if kind == "exact":
        for nbytes in sizes:
            yield round_up(nbytes, granularity_nbytes)
        return
    pools = {True: _Pool(small=True), False: _Pool(small=False)}
    for nbytes, same in groupby(sizes):
        count = len(list(same))
        size = max(round_up(nbytes, _BLOCK_NBYTES), _BLOCK_NBYTES) if nbytes else 0
        pool = pools[size <= _SMALL_NBYTES]
        if kind == "cuda_expandable":
            yield from map(pool.extend, repeat(size, count))
        elif kind == "cuda_driver" and size > DRIVER_SHARED_NBYTES:
            yield from repeat(round_up(size, DRIVER_BLOCK_NBYTES), count)
        else:  # the driver's shared blocks are as large as torch's small segments, and shared alike
            yield from pool.take(size, count)


class _Pool:
    """The segments of one of the two pools: what is free in them."""

    def __init__(self, *, small: bool) -> None:
        self._small = small
        self._free: list[int] = []  # sizes of free blocks, ascending
        self._mapped = self._used = 0

    def take(self, size: int, count: int) -> Iterator[int]:
        """Allocate blocks of one size; yields for each the bytes of a new segment, or 0."""
        if size == 0:
            yield from repeat(0, count)
            return
        while count:
            grown = 0
            at = bisect_left(self._free, size)
            if at < len(self._free):
                block = self._free.pop(at)
            else:
                block = grown = self._segment(size)
            # what is left of the smallest that is large enough is the smallest, while it is that:
            # many at once, where one by one took 0.9 microseconds each
            n = min(count, block // size) if self._small else 1
            rest = block - n * size
            # should_split: a large block keeps a rest of up to 1 MiB to itself
            if rest >= _BLOCK_NBYTES if self._small else rest > _SMALL_NBYTES:
                insort(self._free, rest)
            yield grown
            yield from repeat(0, n - 1)
            count -= n

    def _segment(self, size: int) -> int:
        if self._small:
            return _SMALL_SEGMENT_NBYTES
        if size < _OWN_SEGMENT_NBYTES:
            return _LARGE_SEGMENT_NBYTES
        return round_up(size, _SEGMENT_ROUNDING_NBYTES)

    def extend(self, size: int) -> int:
        """Allocate from one segment that grows; returns the bytes newly mapped."""
        self._used += size
        page = _SMALL_SEGMENT_NBYTES if self._small else _LARGE_SEGMENT_NBYTES
        grown = max(round_up(self._used, page) - self._mapped, 0)
        self._mapped += grown
        return grown
