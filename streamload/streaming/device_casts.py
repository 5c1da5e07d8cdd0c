"""Casts by a device's own kernels during one load: the kernels, their memory and their counts."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, count
from typing import TYPE_CHECKING

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.codecs import decode_cuda as dequant_ptx
from streamload.codecs import encode_cuda as ptx
from streamload.codecs.cast_cuda import blocks
from streamload.codecs.cast_table import CastCounts
from streamload.codecs.decode import Weight, layout_of
from streamload.codecs.encode_kernels import Tally
from streamload.codecs.parts import QuantCounts
from streamload.codecs.schemes import bitsandbytes_nested_cuda as nested_ptx
from streamload.codecs.schemes.bitsandbytes_nested import MAP_NBYTES, dynamic_map
from streamload.codecs.weights import Packed
from streamload.devices.base import Copy, Device
from streamload.errors import AllocationError
from streamload.planning.moves import Kind, Move
from streamload.planning.plan import STAGING_SLOTS, STATISTIC_NBYTES, Plan, senders
from streamload.planning.quant_policy import coded

if TYPE_CHECKING:
    from streamload.devices.cuda_copies import BulkCopier


class DeviceCasts:
    """The kernels, scratch memory and counts of one device's casts, until `close`.

    Elements that keep their width are cast in place. Other elements are copied to scratch, a part
    for each staging slot, and cast from there. Raises AllocationError if device memory is short.

    The streaming thread takes and frees memory in it; workers ask for addresses; a thread
    "streamload-scales" sends scales. They share no lock: a placement's entries are written before
    its units are handed out and removed after they are done, and `scratch` counts atomically.
    """

    def __init__(self, name: str, device: Device, plan: Plan, checkpoint: Checkpoint) -> None:
        bulk: BulkCopier | None = device.bulk
        assert bulk is not None, name
        mine = [
            (index, p)
            for index, p in enumerate(plan.placements)
            if p.kind.device == name and p.kind.cast == "device"
        ]
        self._checkpoint = checkpoint
        self._kernels = {
            key: _kernel(bulk, p.kind, self._info(p), clamp=plan.out_of_range == "clamp")
            for key, p in {self._key(p): p for _, p in mine}.items()
        }
        nests = any(p.kind.coding is not None and p.kind.coding.nests for _, p in mine)
        self._nest = bulk.function(nested_ptx.nested_ptx(), nested_ptx.SYMBOL) if nests else 0
        *offsets, tallies_nbytes = accumulate((p.kind.tally_nbytes for _, p in mine), initial=0)
        # (offset, placement) by index
        self._tallies = {i: (at, p) for (i, p), at in zip(mine, offsets, strict=True)}
        nbytes = next(d.scratch_nbytes for d in plan.devices if d.device == name)
        self._tallies_at = nbytes - tallies_nbytes
        try:
            self._memory = bulk.memory(nbytes)
        except AllocationError:
            device.trim()  # its allocator may keep freed memory
            self._memory = bulk.memory(nbytes)
        self._slot_nbytes = plan.slot_nbytes
        self._slots = count()
        self._resizes = any(p.kind.src.bits != p.kind.dst.bits for _, p in mine)
        slots = max(plan.threads, 1) * STAGING_SLOTS if self._resizes else 0
        self._held_at = slots * plan.slot_nbytes
        self._table_at = self._tallies_at - MAP_NBYTES * nests
        if nests:
            self._memory.write(self._table_at, dynamic_map())
        self._held = _Ring(self._table_at - self._held_at)
        # scales are sent ahead: a small copy waits for large ones under way
        most = max((p.kind.scales_nbytes for _, p in mine), default=0)
        self._senders = ThreadPoolExecutor(senders(most), "streamload-scales")
        self._sent: dict[int, Future[None]] = {}

    def scratch(self) -> int:
        """Return the device address of scratch for one more staging slot; 0 if none is needed.

        Any thread may call this, once for each slot of the plan.
        """
        if not self._resizes:
            return 0
        at = next(self._slots) * self._slot_nbytes  # atomic
        assert at + self._slot_nbytes <= self._held_at, "more slots than planned"
        return self._memory.address + at

    def hold(self, index: int, p: Kind, make: Callable[[], Weight]) -> bool:
        """Reserve memory for a placement's scales or statistics; False if the memory is full.

        Another thread reads the scales by ``make`` and sends them.
        """
        if index in self._held.taken:
            return True
        if not self._held.take(index, p.there_nbytes):
            return False
        if p.src.is_packed:
            self._sent[index] = self._senders.submit(self._send, index, make)
        return True

    def let_go(self, index: int) -> None:
        """Free the memory that `hold` reserved for a placement."""
        self._sent.pop(index, None)
        self._held.give_back(index)

    def held(self, index: int) -> int:
        """Return the address that `hold` reserved for a placement."""
        return self._memory.address + self._held_at + self._held.taken[index]

    def weight(self, index: int) -> int:
        """Wait for a placement's scales, and return their address; raises the sender's error."""
        self._sent[index].result()
        return self.held(index)

    def _send(self, index: int, make: Callable[[], Weight]) -> None:
        t = self._tallies[index][1].kind.transpose
        at = self.held(index) - self._memory.address
        for part in dequant_ptx.weight_parts(make(), (t.outer, t.inner) if t else None):
            self._memory.write(at, part)
            at += part.nbytes

    def nest(self, index: int, codes: int, scales: int) -> float:
        """Quantize a placement's statistics; write them to device addresses ``codes``, ``scales``.

        Returns the mean of the statistics, which was subtracted first.
        """
        p = self._tallies[index][1]
        assert p.kind.coding is not None, p.name
        units = coded(p.kind.coding, p.kind.src).units
        values, table = self.held(index), self._memory.address + self._table_at
        tally = Tally.from_buffer_copy(self._tally_bytes(index))
        mean = np.float32(tally.statistics / units)
        arguments = (values, codes, units, int(mean.view(np.uint32)), scales, table)
        self._memory.run(self._nest, nested_ptx.nested_blocks(units), arguments)
        return float(mean)

    def copy(self, index: int, copy: Copy, scratch: int, auxiliary: int, first: int) -> Copy:
        """Return a copy of whole elements with the kernel that casts them to the copy's address.

        ``first``: index in the placement of the first element copied; ``auxiliary``: device address
        of scales or statistics; ``scratch``: device address of the slot's scratch.
        """
        at, nbytes, address = copy[:3]
        base, p = self._tallies[index]
        numel = nbytes * 8 // p.kind.src.bits
        tally = self._memory.address + self._tallies_at + base
        kernel = self._kernels[self._key(p)]
        if p.kind.coding is not None:
            many = ptx.blocks(coded(p.kind.coding, p.kind.src), numel)
            unit = p.kind.coding.unit_numel
            statistics = auxiliary and auxiliary + first // p.kind.unit_numel * STATISTIC_NBYTES
            return Copy(at, nbytes, scratch, kernel, numel, address, tally, many, statistics, unit)
        if p.kind.src.is_packed:
            numel = min(numel, p.kind.numel - first)  # the last byte may have one value
            many = dequant_ptx.blocks(numel, p.kind.src.bits)
            number = first + p.source[0].start * p.kind.row_numel
            return Copy(at, nbytes, scratch, kernel, numel, address, tally, many, auxiliary, number)
        target = address if p.kind.src.itemsize == p.kind.dst.itemsize else scratch
        return Copy(at, nbytes, target, kernel, numel, address, tally, blocks(numel))

    def counts(self, index: int) -> CastCounts | QuantCounts:
        """Return the counts of one placement, whose copies must have ended."""
        p = self._tallies[index][1]
        return _counts(p.kind, self._tally_bytes(index))

    def all_counts(self) -> dict[int, CastCounts | QuantCounts]:
        """Return the counts of all placements that the device casts, by index."""
        nbytes = sum(p.kind.tally_nbytes for _, p in self._tallies.values())
        found = self._memory.read(self._tallies_at, self._tallies_at + nbytes)
        return {
            index: _counts(p.kind, found[at : at + p.kind.tally_nbytes])
            for index, (at, p) in self._tallies.items()
        }

    def close(self) -> None:
        """End the sending threads, and free the memory; all copies must have ended."""
        self._senders.shutdown(cancel_futures=True)
        self._memory.close()

    def _tally_bytes(self, index: int) -> bytes:
        at, p = self._tallies[index]
        start = self._tallies_at + at
        return self._memory.read(start, start + p.kind.tally_nbytes)

    def _info(self, p: Move) -> Packed | None:
        info = self._checkpoint.tensors[p.source[0].tensor] if p.kind.src.is_packed else None
        assert info is None or isinstance(info, Packed), p.name
        return info

    def _key(self, p: Move) -> tuple[object, ...]:
        info = self._info(p)
        if info is None:
            return p.kind.src, p.kind.dst, p.kind.coding
        return layout_of(info).values(info.group), p.kind.dst, p.kind.order == "device"


class _Ring:
    """A ring buffer's bookkeeping: ranges are taken, and mostly given back in the same order.

    `taken`: first byte of each range, by the number it was taken under.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._order: deque[tuple[int, int, int]] = deque()  # number, from, to
        self.taken: dict[int, int] = {}

    def take(self, index: int, nbytes: int) -> bool:
        """Reserve ``nbytes`` as range number ``index``; return False if there is no room."""
        start, stop = 0, self._nbytes
        if self._order:
            (_, first, _), (_, last, start) = self._order[0], self._order[-1]
            if last < first:
                stop = first
            elif start + nbytes > stop:
                start, stop = 0, first
        if start + nbytes > stop:
            assert self._order, "more is held than planned"
            return False
        self.taken[index] = start
        self._order.append((index, start, start + nbytes))
        return True

    def give_back(self, index: int) -> None:
        """Free the range number ``index``."""
        del self.taken[index]
        while self._order and self._order[0][0] not in self.taken:
            self._order.popleft()


def _kernel(bulk: BulkCopier, p: Kind, info: Packed | None, *, clamp: bool) -> int:
    if info is not None:
        values = layout_of(info).values(info.group)
        text = dequant_ptx.dequant_ptx(values, p.dst, clamp=clamp, turned=p.order == "device")
        return bulk.function(text, dequant_ptx.SYMBOL)
    if p.coding is not None:
        return bulk.function(ptx.quant_ptx(coded(p.coding, p.src), p.src), ptx.SYMBOL)
    return bulk.kernel(p.src, p.dst, clamp)


def _counts(p: Kind, tally: bytes) -> CastCounts | QuantCounts:
    if p.coding is not None:
        return Tally.from_buffer_copy(tally).counts(p.numel)
    return CastCounts.of(*struct.unpack("<3Q", tally))
