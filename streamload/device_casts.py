"""Casts that a device makes of what it was sent, during one load: kernels, memory, counts."""

from __future__ import annotations

import struct
import threading

from streamload.cast.table import CastCounts
from streamload.devices.base import Copy, Device
from streamload.devices.ptx import blocks
from streamload.dtypes import DType
from streamload.errors import AllocationError
from streamload.planning.parts import Coding
from streamload.planning.plan import Placement, Plan
from streamload.quant import ptx
from streamload.quant.base import QuantCounts, Quantised
from streamload.quant.kernels import Tally
from streamload.quant.ptx import quant_ptx
from streamload.quantise import coded


class DeviceCasts:
    """The casts of one device.

    Elements that stay as wide as they are are cast where they lie. Others are sent to scratch, as
    much as a slot for each slot, and cast from there to their place. All of it, and the tallies of
    the parameters, is the plan's scratch on the device, until `close`.

    Raises:
        UnsupportedCastError: there is no kernel for a cast of the plan, or not for this device.
        AllocationError: the device does not have the memory.
    """

    def __init__(self, name: str, device: Device, plan: Plan) -> None:
        bulk = device.bulk
        assert bulk is not None, name
        mine = [
            (index, p)
            for index, p in enumerate(plan.placements)
            if p.device == name and p.cast == "device"
        ]
        clamp = plan.out_of_range == "clamp"
        self._kernels: dict[tuple[DType, DType, Coding | None], int] = {}
        self._tallies: dict[int, tuple[int, Placement]] = {}  # where each is among them
        tallies_nbytes = 0
        for index, p in mine:
            self._tallies[index] = tallies_nbytes, p
            tallies_nbytes += p.tally_nbytes
            key = p.src, p.dst, p.coding
            if key in self._kernels:
                continue
            if p.coding is None:
                self._kernels[key] = bulk.kernel(p.src, p.dst, clamp)
            else:
                self._kernels[key] = bulk.function(quant_ptx(_made(p), p.src), ptx.SYMBOL)
        nbytes = next(d.scratch_nbytes for d in plan.devices if d.device == name)
        self._tallies_at = nbytes - tallies_nbytes
        try:
            self._memory = bulk.memory(nbytes)
        except AllocationError:
            device.trim()  # what its allocator keeps is free to us
            self._memory = bulk.memory(nbytes)
        self._lock = threading.Lock()
        self._slot_nbytes = plan.slot_nbytes
        self._slots = 0
        self._resizes = any(p.src.itemsize != p.dst.itemsize for _, p in mine)

    def scratch(self) -> int:
        """The address of a part of the scratch, for a slot that keeps it to the end; 0 for none.

        Any thread may ask, as often as the plan has slots.
        """
        if not self._resizes:
            return 0
        with self._lock:
            at = self._slots * self._slot_nbytes
            self._slots += 1
        assert at + self._slot_nbytes <= self._tallies_at, "more slots than planned"
        return self._memory.address + at

    def copy(
        self,
        index: int,
        p: Placement,
        at: int,
        nbytes: int,
        address: int,
        scratch: int,
        statistics: int,
    ) -> Copy:
        """A copy of ``nbytes``, whole elements of ``p.src`` at ``at`` in a slot, with its cast.

        The cast elements go to ``address``; those that change their size by way of ``scratch``.
        What a kernel writes beside codes goes to ``statistics``.
        """
        numel = nbytes // p.src.itemsize
        tally = self._memory.address + self._tallies_at + self._tallies[index][0]
        kernel = self._kernels[p.src, p.dst, p.coding]
        if p.coding is not None:
            many = ptx.blocks(_made(p), numel)
            unit = p.coding.unit_numel
            return Copy(at, nbytes, scratch, kernel, numel, address, tally, many, statistics, unit)
        target = address if p.src.itemsize == p.dst.itemsize else scratch
        return Copy(at, nbytes, target, kernel, numel, address, tally, blocks(numel))

    def counts(self, index: int) -> CastCounts | QuantCounts:
        """The counts of a placement, when its copies have ended."""
        at, p = self._tallies[index]
        start = self._tallies_at + at
        return _counts(p, self._memory.read(start, start + p.tally_nbytes))

    def all_counts(self) -> dict[int, CastCounts | QuantCounts]:
        """The counts of all placements, by index."""
        nbytes = sum(p.tally_nbytes for _, p in self._tallies.values())
        found = self._memory.read(self._tallies_at, self._tallies_at + nbytes)
        return {
            index: _counts(p, found[at : at + p.tally_nbytes])
            for index, (at, p) in self._tallies.items()
        }

    def close(self) -> None:
        """Give the memory back, when all copies have ended."""
        self._memory.close()


def _made(p: Placement) -> Quantised:
    """What a placement becomes that a device quantises."""
    assert p.coding is not None, p.name
    return coded(p.coding, p.src)


def _counts(p: Placement, tally: bytes) -> CastCounts | QuantCounts:
    if p.coding is not None:
        return Tally.from_buffer_copy(tally).counts(p.numel)
    over, zeros, changed = struct.unpack("<3Q", tally)
    return CastCounts(over, zeros, changed - over - zeros)
