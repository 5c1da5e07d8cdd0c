"""torch's CPU as a device with a compiled copy loop, which streams layers like a GPU."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from streamload.core.dtypes import DType
from streamload.core.system import address_of
from streamload.devices import cuda, cuda_copies
from streamload.devices.base import BulkFailure, DeviceInfo, Read, ReadTable, Staging, Ticket
from streamload.devices.bulk import Loop, Team, libc_calls
from streamload.devices.cuda_copies import Copies
from streamload.devices.staging import HostStaging
from streamload.devices.torch import device as torch_devices


class Slot(HostStaging):
    stream = 0

    def wait(self) -> None:
        """Wait for nothing."""


class Refills:
    """Slots that threads of the compiled loop fill together."""

    def __init__(self, loop: Loop, reads: list[Read], slots: Sequence[Slot], count: int) -> None:
        self._reads, self._slots = reads, slots
        self._team = Team(loop, [(address_of(s.view), 1, 1) for s in slots], count, nullcontext)
        self.next = Slot(1)

    def run(
        self,
        fd: int,
        parts: Sequence[tuple[ReadTable, int]],
        locks: bool,
        after: Sequence[Ticket] = (),
    ) -> BulkFailure | None:
        """Run the loop; another ticket is the next."""
        reads = ReadTable.joined(parts)
        self._reads += [Read(*row[:3], ()) for row in reads.rows.tolist()]
        self.next = Slot(1)
        return self._team.run(fd, reads)

    def is_locked(self, reads: ReadTable) -> bool:
        return False

    def wait(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        self._team.close()


class Bulk:
    """Reads and copies by the compiled loop, with a driver that copies at once and counts."""

    address = staticmethod(torch.Tensor.data_ptr)

    def __init__(self, counts: Counter[str], reads: list[Read]) -> None:
        self._counts, self._reads = counts, reads
        one, two, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
        self._calls = {
            "copy": ctypes.CFUNCTYPE(number, two, two, two, one)(self._copy),
            "record": ctypes.CFUNCTYPE(number, one, one)(lambda event, stream: 0),
            "wait": ctypes.CFUNCTYPE(number, one)(lambda event: 0),
        }
        calls = {n: ctypes.cast(call, one).value or 0 for n, call in self._calls.items()}
        self._loop = Loop(libc_calls() | calls)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        if self._counts["refused"]:
            self._counts["refused"] -= 1
            return 719
        ctypes.memmove(target, source, nbytes)
        self._counts["copies"] += 1
        return 0

    def ticket(self, slot: Staging) -> Any:
        return slot

    def refiller(self, count: int, slots: int, nbytes: int) -> Refills:
        return Refills(self._loop, self._reads, [Slot(nbytes) for _ in range(count * slots)], count)

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        self._reads += reads
        flat = [(address_of(slot.view), 1, 1, False) for slot in slots]
        return self._loop(fd, reads, flat)


COUNTS: Counter[str] = Counter()
READS: list[Read] = []


class Staged(torch_devices.CPUDevice):
    """torch's CPU, as a device that only bulk copies write."""

    host_visible = False
    counts, reads = COUNTS, READS

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.bulk: Any = Bulk(self.counts, self.reads)

    @property
    def info(self) -> DeviceInfo:
        """The CPU's, as if it could not be written and had memory of its own."""
        own = {"host_visible": False, "shared_memory": False, "maps": False}
        return replace(super().info, **own, native_bf16=True, free_nbytes=2**34)

    def staging(self, nbytes: int) -> Staging:
        return Slot(nbytes)

    def follow(self, tickets: Sequence[Ticket]) -> None:
        """Do nothing: copies have ended."""

    def mark(self) -> Ticket | None:
        self.counts["marks"] += 1
        return Slot(1)


class Driven(Copies, torch_devices.CPUDevice):
    """torch's CPU, whose memory is a device's of `cuda_stand_in`: its driver's calls fill it.

    What torch computes ends at once. It waits for copies by a stream that is the driver's.
    """

    host_visible = False
    threads = 16

    def __init__(self, name: str) -> None:
        torch_devices.CPUDevice.__init__(self, name)
        context = cuda.Context.primary("cuda:0", 0)
        Copies.__init__(self, context, torch.Tensor.data_ptr)
        self._stream = _stream(context)

    @property
    def info(self) -> DeviceInfo:
        """The CPU's, as if it could not be written and had memory of its own."""
        own = {"host_visible": False, "shared_memory": False, "charged": False, "maps": False}
        return replace(super().info, **own, native_bf16=True, free_nbytes=2**29)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory of the driver, which is freed with the tensor's storage."""
        nbytes = dtype.nbytes(math.prod(shape))
        if not nbytes:
            return super().allocate(dtype, shape)
        address = ctypes.c_uint64()
        with self.context.current():
            self.context.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(address.value)
        weakref.finalize(memory, self._free, address.value).atexit = False
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(torch_devices.TO_TORCH[dtype.name]).view(shape)

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[torch.Tensor]:
        return [self.allocate(*kind) for kind in kinds]

    def _free(self, address: int) -> None:
        with self.context.current():
            self.context.call("cuMemFree_v2", address)

    def follow(self, tickets: Iterable[Any]) -> None:
        """Let the stream wait, and so what torch computes from now on."""
        events = [event for ticket in tickets for event in ticket.events]
        self.context.order(self._stream, events)

    def mark(self) -> Any:
        mark: Any = None
        with self.context.current():
            mark = cuda_copies.Mark(self.context, [self._stream])
            mark.record()
        mark.stream = self._stream
        return mark


@cache
def _stream(context: cuda.Context) -> int:
    stream = ctypes.c_void_p()
    with context.current():
        context.call("cuStreamCreate", ctypes.byref(stream), 1)
    return stream.value or 0


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Staged]]:
    monkeypatch.setitem(torch_devices._WAYS, "cpu", Staged)
    Staged.counts.clear()
    Staged.reads.clear()
    yield Staged
