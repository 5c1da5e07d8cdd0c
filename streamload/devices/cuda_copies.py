"""The copies of a framework's CUDA device, one by one or many in a call; see `devices.cuda`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from streamload.codecs.cast_cuda import SYMBOL, cast_ptx
from streamload.core.dtypes import DType
from streamload.devices.base import BulkFailure, Read, Staging, Ticket
from streamload.devices.bulk import Loop, addresses_of, libc_calls
from streamload.devices.cuda import Context, DeviceMemory, PinnedStaging, _driver, load_kept
from streamload.devices.cuda_refill import Refiller


class BulkCopier:
    """Runs many reads, copies and casts in one call, by the compiled loop of `devices.bulk`."""

    def __init__(self, context: Context, loop: Loop, address: Callable[[Any], int]) -> None:
        self.address = address
        self._context, self._loop = context, loop

    def memory(self, nbytes: int) -> DeviceMemory:
        """Allocate device memory for counts and for elements to cast; raises AllocationError."""
        return DeviceMemory(self._context, nbytes)

    def kernel(self, src: DType, dst: DType, clamp: bool) -> int:
        """Return the handle of a cast kernel, compiled once; any thread may call this.

        With ``clamp``, finite values beyond the range of ``dst`` become its largest finite value.
        """
        return self.function(cast_ptx(src, dst, clamp=clamp), SYMBOL)

    def function(self, ptx: str, symbol: str) -> int:
        """Return the handle of a function in PTX, loaded once; any thread may call this."""
        return load_kept(self._context, ptx, symbol)

    def ticket(self, slot: Staging) -> Ticket:
        """Return the ticket of the last copies started from a slot."""
        assert isinstance(slot, PinnedStaging)
        return slot.event

    def refiller(self, count: int, slots: int, nbytes: int) -> Refiller:
        return Refiller(self._context, self._loop, count, slots, nbytes)

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Read into the slots cyclically and start the copies, without the interpreter's lock.

        Copies from the last ``busy`` slots may be running: each is filled after these. Afterwards,
        copies from any used slot may be running: see `ticket`. Returns the read that failed, or
        None.
        """
        flat = []
        for index, slot in enumerate(slots):
            assert isinstance(slot, PinnedStaging)
            under_way = index >= len(slots) - busy
            flat.append((slot.address, slot.stream, slot.event.value or 0, under_way))
        with self._context.current():
            failure = self._loop(fd, reads, flat)
            if failure is not None and failure.stage == "copy":
                # copies of that read may be running, and its slot's event does not cover them
                _driver().slow.cuStreamSynchronize(flat[failure.index % len(flat)][1])
        return failure


class Copies:
    """Base of a framework's CUDA device: staging, copies and casts by the driver."""

    def __init__(self, context: Context, address: Callable[[Any], int]) -> None:
        """Use a context; ``address`` returns the device address of a buffer."""
        self.context = context
        self._address = address
        loop = _loop()
        self.bulk: BulkCopier | None = BulkCopier(context, loop, address) if loop else None

    def staging(self, nbytes: int) -> PinnedStaging:
        return PinnedStaging(self.context, nbytes)

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        assert isinstance(staging, PinnedStaging)
        self.context.copy(staging, start, nbytes, self._address(buffer) + offset)
        return staging.event


@cache
def _loop() -> Loop | None:
    """Return the compiled copy loop over the driver's calls; None if LLVM is not usable here."""
    driver = _driver().slow
    calls = {
        "copy": driver.cuMemcpyHtoDAsync_v2,
        "record": driver.cuEventRecord,
        "wait": driver.cuEventSynchronize,
        "launch": driver.cuLaunchKernel,
    }
    try:
        return Loop(libc_calls() | addresses_of(calls))
    except (ImportError, OSError, RuntimeError):  # streaming copies by its loop in Python
        return None
