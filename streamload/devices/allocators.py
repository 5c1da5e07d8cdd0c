"""Predictions of the device memory that frameworks' allocators take for tensors.

Sizes and rules of torch's allocator for CUDA: ``c10/cuda/CUDACachingAllocator.cpp``
(``round_size``, ``get_allocation_size``, ``get_free_block``, ``should_split``).

The rules of CUDA's driver are not published. Measured on an H200 (driver 580): the fall of
``cuMemGetInfo`` after one and eight ``cuMemAlloc``, and the distance of their addresses:

| bytes | one | eight | distance |
|---|---|---|---|
| 1 | 2 MiB | 2 MiB | 512 |
| 65,536 | 2 MiB | 2 MiB | 65,536 |
| 524,288 | 2 MiB | 4 MiB | 524,288 |
| 1,048,576 | 2 MiB | 8 MiB | 1,048,576 |
| 1,048,577 | 2 MiB | 16 MiB | 2 MiB |
| 2 MiB | 2 MiB | 16 MiB | 2 MiB |
| 2 MiB + 1 | 4 MiB | 32 MiB | 4 MiB |
| 5 MiB | 6 MiB | 48 MiB | 6 MiB |

The 120 tensors of a Llama of 999,994,368 bytes took 1,077,936,128: 514 blocks of 2 MiB. The
prediction is 515, since its small tensors fitted into an earlier block.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import groupby, repeat
from typing import Literal

from streamload.core.units import round_up

#: How an allocator takes memory: the requested size, rounded up; by torch's rules for CUDA, with
#: fixed or expandable segments; or by the rules of CUDA's driver.
AllocatorKind = Literal["exact", "cuda_caching", "cuda_expandable", "cuda_driver"]

_MIB = 2**20
_BLOCK_NBYTES = 512  # kMinBlockSize
_SMALL_NBYTES = _MIB  # kSmallSize: up to here, blocks come from small segments
_SMALL_SEGMENT_NBYTES = 2 * _MIB  # kSmallBuffer
_OWN_SEGMENT_NBYTES = 10 * _MIB  # kMinLargeAlloc: from here on, a segment is as large as its block
_LARGE_SEGMENT_NBYTES = 20 * _MIB  # kLargeBuffer
_SEGMENT_ROUNDING_NBYTES = 2 * _MIB  # kRoundLarge

#: CUDA's driver gives memory in blocks of this size: whole ones for each allocation larger than
#: `DRIVER_SHARED_NBYTES`, while smaller ones share blocks, rounded to 512 bytes.
DRIVER_BLOCK_NBYTES = 2 * _MIB
DRIVER_SHARED_NBYTES = _MIB


#: Host memory that a load frees before it returns freed heap to the kernel.
TRIM_NBYTES = 4 * _MIB


@dataclass(frozen=True, slots=True)
class ObjectCosts:
    """Host memory of tensors besides their data: objects of Python, the framework and a load.

    Attributes:
        tensor_nbytes: for each tensor.
        view_nbytes: added for each tensor whose rank is not 1, if it is a view of a flat tensor.
        kind_nbytes: added once for each pair of dtype and shape.
        shape_nbytes: added once for each shape whose rank is not 1.
        size_nbytes: added once for each size in bytes.
    """

    tensor_nbytes: int = 0
    view_nbytes: int = 0
    kind_nbytes: int = 0
    shape_nbytes: int = 0
    size_nbytes: int = 0

    @property
    def most_nbytes(self) -> int:
        """Bytes for a tensor that shares dtype, shape and size with no other."""
        return sum(astuple(self))

    def of(self, tensors: Iterable[tuple[str, tuple[int, ...], int, int]]) -> int:
        """Return the bytes for tensors, given as (dtype, shape, bytes of one, count)."""
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
    """Host memory that tensors of one framework take besides their data.

    Attributes:
        objects: host memory of the tensor objects in a new state dict.
        parameters: host memory of the tensor objects that fill parameters of a model.
        kernel_nbytes: for each tensor, kernel memory that no counter of the process includes.
        left_nbytes: for each released tensor, heap that stays in use: other data is on its pages.
        refit_nbytes: a new tensor that is smaller by so much takes a released one's place in the
            heap; None: none does.
    """

    objects: ObjectCosts = NO_OBJECTS
    parameters: ObjectCosts = NO_OBJECTS
    kernel_nbytes: int = 0
    left_nbytes: int = 0
    refit_nbytes: int | None = None


NO_COSTS = TensorCosts()


def taken(kind: AllocatorKind, granularity_nbytes: int, sizes: Iterable[int]) -> Iterator[int]:
    """Yield the bytes that each allocation, of ``sizes`` in order, newly takes from the device.

    Nothing is freed in between, and the allocator's cache is empty at first. An allocation that
    fits into the rest of an earlier block takes nothing. Only "exact" rounds up to a multiple of
    ``granularity_nbytes``.
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
    """The free blocks of torch's pool for small tensors (``small``), or for large tensors."""

    def __init__(self, *, small: bool) -> None:
        self._small = small
        self._free: list[int] = []  # sizes of free blocks, ascending
        self._mapped = self._used = 0

    def take(self, size: int, count: int) -> Iterator[int]:
        """Allocate ``count`` blocks of one size; yield the new segment's bytes for each, or 0."""
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
            # the best fit's rest stays the best fit while it is large enough: so many at once,
            # instead of 0.9 microseconds each
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
        """Allocate a block from one expandable segment; return the bytes newly mapped."""
        self._used += size
        page = _SMALL_SEGMENT_NBYTES if self._small else _LARGE_SEGMENT_NBYTES
        grown = max(round_up(self._used, page) - self._mapped, 0)
        self._mapped += grown
        return grown
