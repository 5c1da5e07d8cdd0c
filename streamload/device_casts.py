"""Casts that a device makes of what it was sent, during one load: kernels, memory, counts."""

from __future__ import annotations

import struct
import threading

from streamload.cast.table import CastCounts
from streamload.devices.base import Copy, Device
from streamload.devices.ptx import blocks
from streamload.dtypes import DType
from streamload.errors import AllocationError
from streamload.planning.plan import TALLY_NBYTES, Placement, Plan


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
        self._kernels: dict[tuple[DType, DType], int] = {}
        for _, p in mine:
            if (p.src, p.dst) not in self._kernels:
                self._kernels[p.src, p.dst] = bulk.kernel(p.src, p.dst, clamp)
        nbytes = next(d.scratch_nbytes for d in plan.devices if d.device == name)
        self._tallies_at = nbytes - TALLY_NBYTES * len(mine)
        try:
            self._memory = bulk.memory(nbytes)
        except AllocationError:
            device.trim()  # what its allocator keeps is free to us
            self._memory = bulk.memory(nbytes)
        self._tallies = {index: at for at, (index, _) in enumerate(mine)}
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
        self, index: int, p: Placement, at: int, nbytes: int, address: int, scratch: int
    ) -> Copy:
        """A copy of ``nbytes``, whole elements of ``p.src`` at ``at`` in a slot, with its cast.

        The cast elements go to ``address``; those that change their size by way of ``scratch``.
        """
        numel = nbytes // p.src.itemsize
        return Copy(
            at,
            nbytes,
            address if p.src.itemsize == p.dst.itemsize else scratch,
            self._kernels[p.src, p.dst],
            numel,
            address,
            self._memory.address + self._tallies_at + self._tallies[index] * TALLY_NBYTES,
            blocks(numel),
        )

    def counts(self, index: int) -> CastCounts:
        """The counts of a placement, when its copies have ended."""
        return self._counts(self._tallies[index], 1)[0]

    def all_counts(self) -> dict[int, CastCounts]:
        """The counts of all placements, by index."""
        return dict(zip(self._tallies, self._counts(0, len(self._tallies)), strict=True))

    def _counts(self, first: int, count: int) -> list[CastCounts]:
        start = self._tallies_at + first * TALLY_NBYTES
        tallies = struct.iter_unpack("<3Q", self._memory.read(start, start + count * TALLY_NBYTES))
        return [CastCounts(over, zeros, changed - over - zeros) for over, zeros, changed in tallies]

    def close(self) -> None:
        """Give the memory back, when all copies have ended."""
        self._memory.close()
