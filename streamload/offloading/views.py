"""Layers that are used in their mapped files, whose pages are read before use and dropped after.

If the CPU computes on mapped files, a layer that streams is not copied into a slot. Its weights are
views on the files. The workers that would fill the slot map the layer's pages (MADV_POPULATE_READ),
and when the slot goes to another layer, they are unmapped (MADV_DONTNEED). So mapped pages take no
more than the slots would, and nothing faults in random order.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import map_shard, open_shard
from streamload.core.location import Location
from streamload.core.system import most_open_files, populate_shared, unmap_pages
from streamload.core.tensors import first_byte
from streamload.devices.base import Buffer, Device
from streamload.errors import CheckpointError
from streamload.files.header import unreadable
from streamload.files.local import Reader
from streamload.files.page_cache import drop_pages
from streamload.offloading.layers import Slots
from streamload.offloading.plan import OffloadPlan
from streamload.planning.plan import Plan

#: Views begin at multiples of this in their files, as tensors of torch's allocator do in memory:
#: the result of a matrix product depends on the address of its weights.
ALIGNMENT_NBYTES = 64


class Viewable(NamedTuple):
    """Whether the CPU can compute on layers in their files, and the obstacle if not."""

    views: bool = False  # it can, with pages that come and go with the slots
    unaligned: str = ""  # a tensor whose start is the only obstacle; `convert` aligns to 64
    mappable: bool = False  # a load can leave all in the files, whose pages the kernel drops


def can_be_views(plan: Plan, checkpoint: Checkpoint) -> Viewable:
    """Return a `Viewable`: whether the CPU can compute on the files, without copies of tensors.

    ``plan``: for ``residence="auto"``; its ``cast`` is "mapped" where a tensor can be mapped.
    """
    placements = plan.placements
    unaligned, movable = "", True
    for kind, source in zip(placements.kinds, placements.sources, strict=True):
        if kind.cast != "mapped":
            return Viewable()
        (row,) = source
        info = checkpoint.tensors[row.tensor]
        start = first_byte(info, row)
        if start % ALIGNMENT_NBYTES:
            unaligned = unaligned or info.name
        if (start - info.start) % ALIGNMENT_NBYTES or info.nbytes % ALIGNMENT_NBYTES:
            movable = False
    return Viewable(not unaligned, unaligned if movable else "", mappable=True)


class FileViews(Slots):
    """Weights of layers as views on private maps of their files, in place of memory of slots."""

    def __init__(
        self,
        made: OffloadPlan,
        checkpoint: Checkpoint,
        device: Device,
        weight_of: Callable[[Any], Any],
    ) -> None:
        """Map the files, and read nothing; ``weight_of`` makes a weight over a mapped tensor."""
        plan = made.stream
        assert plan is not None
        self.count = len(made.residency.slot_starts)
        self._device, self._ahead = device, plan.ahead
        # If the page cache is short of room, pages behind are dropped: else the kernel would drop
        # pages that are needed next.
        self._keeps = made.cached
        self._checkpoint = checkpoint
        self._open: dict[Location, Reader] = {}  # each with a lease, while passes run
        self._entered: dict[int, list[ExitStack]] = {}  # by layer, which may be inside itself
        self._maps: dict[Location, mmap.mmap] = {}
        self._addresses: dict[Location, int] = {}
        self._views: list[tuple[list[Buffer], list[Buffer]]] = []
        self._ranges: list[list[tuple[Location, int, int]]] = []
        kinds, sources = plan.placements.kinds, plan.placements.sources
        for placements in made.layer_placements:
            found: list[tuple[Location, int, int]] = []
            plain: list[Buffer] = []
            for at in placements:
                (row,) = sources[at]
                info = checkpoint.tensors[row.tensor]
                memory, start = self._map(info.shard), first_byte(info, row)
                plain.append(device.view(memory, start, kinds[at].dst, kinds[at].shape))
                found.append((info.shard, start, start + kinds[at].nbytes))
            self._views.append(([*map(weight_of, plain)], plain))
            self._ranges.append(_merged(found))

    def _map(self, shard: Location) -> mmap.mmap:
        if shard not in self._maps:
            memory = self._maps[shard] = map_shard(self._checkpoint.headers[shard])
            if not self._ahead:  # a fault would read neighbours, too
                memory.madvise(mmap.MADV_RANDOM)
            self._addresses[shard] = np.frombuffer(memory, np.uint8).ctypes.data
        return self._maps[shard]

    def _of(self, layer: int, slot: int) -> tuple[list[Buffer], list[Buffer]]:
        return self._views[layer]

    def bring(self, shard: Location, start: int, stop: int) -> None:
        """Map the pages of bytes ``start`` to ``stop`` (exclusive), and read the uncached ones."""
        first = self._addresses[shard]
        code = populate_shared(first + start, first + stop, ahead=self._ahead)
        if code:
            raise unreadable(shard, OSError(code, "its pages cannot be mapped"))

    def let_go(self, layer: int) -> None:
        """Unmap the pages of a layer; drop them from the page cache, too, if it lacks room."""
        for shard, start, stop in self._ranges[layer]:
            unmap_pages(self._addresses[shard] + start, self._addresses[shard] + stop)
            if not self._keeps and isinstance(shard, Path):
                drop_pages(shard, start, stop)

    def enter(self, layer: int) -> None:
        """Guard the files of a layer against changes while it computes, until `leave`."""
        with ExitStack() as entered:
            for shard in {shard for shard, _, _ in self._ranges[layer]}:
                entered.enter_context(self._opened(shard, layer).unchanged())
            self._entered.setdefault(layer, []).append(entered.pop_all())

    def _opened(self, shard: Location, layer: int) -> Reader:
        reader = self._open.pop(shard, None)
        if reader is None:
            entered = (*self._entered, layer)
            used = {at for each in entered for at, _, _ in self._ranges[each]}
            idle = [at for at in self._open if at not in used]
            for at in idle[: max(len(self._open) + 1 - most_open_files(), 0)]:
                self._open.pop(at).close()
            reader = self._guarded(shard)
        self._open[shard] = reader  # the most recently used last
        return reader

    def _guarded(self, shard: Location) -> Reader:
        # without views of the header: the file itself is mapped
        reader = open_shard(replace(self._checkpoint.headers[shard], views=()), "mmap")
        if not reader.mapped:  # if a mapped file is truncated, the process dies
            reader.close()
            raise CheckpointError(shard, f"cannot be computed on: {reader.fallback}")
        return reader

    def leave(self, layers: Sequence[int]) -> None:
        """End `enter` for each of ``layers``; raises CheckpointError if a file has changed."""
        with ExitStack() as left:  # leaves all, even if one raises
            for layer in layers:
                entered = self._entered[layer]
                left.callback(entered.pop().close)
                if not entered:
                    del self._entered[layer]

    def close_files(self) -> None:
        """Close all files, until the next `enter`."""
        for reader in self._open.values():
            reader.close()
        self._open.clear()

    def close(self) -> None:
        """Release the views, even if something still refers to one, and the maps."""
        self.close_files()
        for layer in range(len(self._views)):
            self.let_go(layer)
        for view in chain.from_iterable(chain.from_iterable(self._views)):
            self._device.release(view)
        self._views.clear()
        self._maps.clear()


def _merged(ranges: Sequence[tuple[Location, int, int]]) -> list[tuple[Location, int, int]]:
    """Return ranges (file, start, stop), in order, with adjacent ones of a file merged."""
    found: list[tuple[Location, int, int]] = []
    for shard, start, stop in ranges:
        if found and (found[-1][0], found[-1][2]) == (shard, start):
            start = found.pop()[1]
        found.append((shard, start, stop))
    return found
