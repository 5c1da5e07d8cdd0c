"""`recording.RecordingDevice` over torch's memory on the CPU, with reads and copies in bulk."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from recording import Copy, Disk, RecordedTicket, RecordingDevice

from streamload.core.dtypes import DType
from streamload.devices.base import BulkFailure, DeviceInfo, Read, Staging
from streamload.devices.bulk import Loop
from streamload.devices.torch.device import CPUDevice
from streamload.errors import CheckpointError, DeviceError


@dataclass(eq=False)
class RecordedTorchDevice(RecordingDevice):
    """Host memory behind staging, under the name of torch's CPU: modules find themselves there."""

    name: str = "cpu"
    in_bulk: bool = False  # many reads and copies can be made in one call
    disk: Disk | None = None  # what bulk reads find of the files; None for what there is

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cpu = CPUDevice("cpu")
        self._bulk = RecordedBulk(self) if self.in_bulk else None
        self.in_order = self.in_bulk

    @property
    def bulk(self) -> RecordedBulk | None:
        """Many reads and copies in one call, if it has a way to."""
        return self._bulk

    @property
    def info(self) -> DeviceInfo:
        return replace(
            self._cpu.info,
            host_visible=self.host_visible,
            shared_memory=self.shared_memory,
            threads=self.threads,
            native_bf16=True,
        )

    def _make(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        return self._cpu.allocate(dtype, shape)

    @contextmanager
    def _bytes(self, buffer: Any) -> Iterator[memoryview]:
        with self._cpu.window(buffer, 0, buffer.nbytes) as view:
            yield view

    def _key(self, buffer: Any) -> int:
        return int(buffer.untyped_storage().data_ptr())

    def _free(self, buffer: Any) -> None:
        self._cpu.release(buffer)


class RecordedBulk:
    """Many reads and copies in one call. Reads are real, and short at times; copies are late.

    The compiled loop has this as its driver: its calls are recorded, checked, and fail on demand.
    An error that no driver knows leaves by `run` itself, with copies under way. The operations,
    beside the device's own: run, ran (its end), record; unread is a read that the disk refused.
    """

    status = 719

    def __init__(self, device: RecordedTorchDevice) -> None:
        self._device = device
        self._buffers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._copies: dict[int, list[Copy]] = {}  # by slot: those of its last read
        self._recorded: set[int] = set()  # slots of which the last copies have an event
        self._mine = threading.local()  # errno, what was raised, the slots of this call
        self._calls = {
            "pread": ctypes.CFUNCTYPE(
                ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64
            )(self._pread),
            "errno": ctypes.CFUNCTYPE(ctypes.c_void_p)(self._errno),
            "copy": ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p
            )(self._copy),
            "record": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
                self._record
            ),
            "wait": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._wait),
        }
        self._loop = Loop(
            {
                name: ctypes.cast(call, ctypes.c_void_p).value or 0
                for name, call in self._calls.items()
            }
        )

    def address(self, buffer: Any) -> int:
        address = int(buffer.data_ptr())
        with self._device.lock:
            self._buffers[address] = buffer
        return address

    def ticket(self, slot: Staging) -> RecordedTicket:
        """Of the copies of the slot's last read, as many as were begun."""
        with self._device.lock:
            return RecordedTicket(self._device, tuple(self._copies.get(self._number(slot), ())))

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        device = self._device
        device.note("run", len(reads))
        if not 0 <= busy <= len(slots):
            self._wrong(f"{busy} of {len(slots)} slots are said to be busy")
        flat = []
        for index, slot in enumerate(slots):
            number = self._number(slot)
            may_be_busy = index >= len(slots) - busy
            with device.lock:
                under_way = any(copy.staging is slot for copy in device.pending)
                closed = device.stagings[number - 1].closed
            fills = any(read.needed for read in reads)
            if under_way and fills and not may_be_busy:
                self._wrong(f"slot {index} of {len(slots)} is busy, and {busy} are said to be")
            if closed:
                self._wrong("a closed slot")
            flat.append((_address(slot), number, number, may_be_busy))
        nbytes = min(slot.view.nbytes for slot in slots)
        for read in reads:
            if not 0 <= read.needed <= read.asked <= nbytes:
                self._wrong(f"{read} into {nbytes} bytes")
                return BulkFailure(0, "read", errno.EFAULT)
            there = read.needed or nbytes  # of a read of nothing, the slot was filled before
            if any(copy.at < 0 or copy.at + copy.nbytes > there for copy in read.copies):
                self._wrong(f"{read} copies what is not read")
        self._mine.errno, self._mine.raised = ctypes.c_int(0), None
        self._mine.slots = slots
        failure = self._loop(fd, reads, flat)
        if self._mine.raised is not None:
            raise self._mine.raised
        device.note("ran", len(reads))
        return failure

    def _wrong(self, what: str) -> None:
        with self._device.lock:
            self._device.wrongs.append(what)

    def _number(self, slot: Staging) -> int:
        with self._device.lock:
            return 1 + next(i for i, s in enumerate(self._device.stagings) if s is slot)

    def _slot(self, number: int) -> Any:
        with self._device.lock:
            return self._device.stagings[number - 1]

    def _failed(self, error: BaseException) -> int:
        if not isinstance(error, DeviceError):
            self._mine.raised = error
        return self.status

    def _pread(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        device = self._device
        with device.lock:
            for copy in device.pending:
                at = _address(copy.staging)
                if at <= address < at + copy.staging.view.nbytes:
                    device.wrongs.append("a slot was filled under its copies")
            chance = device.random.random()
            if chance < 0.2:  # as many bytes as the storage likes
                nbytes = device.random.randint(1, nbytes)
        if chance > 0.9:
            self._mine.errno.value = errno.EINTR
            return -1
        disk = device.disk
        if disk is not None:
            if offset < disk.bad.start < offset + nbytes:
                nbytes = disk.bad.start - offset  # those before the bad ones arrive
            try:
                disk.touch(Path(os.readlink(f"/proc/self/fd/{fd}")), offset, offset + nbytes)
            except BaseException as error:
                if not isinstance(error, CheckpointError):
                    self._mine.raised = error
                self._mine.errno.value = errno.EIO
                device.events.append(("unread", offset))
                return -1
        array = (ctypes.c_ubyte * nbytes).from_address(address)
        try:
            return os.preadv(fd, [memoryview(array).cast("B")], offset)
        except OSError as error:
            self._mine.errno.value = error.errno or errno.EIO
            return -1

    def _errno(self) -> int:
        return ctypes.addressof(self._mine.errno)

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        device, slot = self._device, self._slot(stream)
        with device.lock:
            found = [
                (buffer, target - address)
                for address, buffer in list(self._buffers.items())
                if buffer.data_ptr() == address and 0 <= target - address < max(buffer.nbytes, 1)
            ]
        if not any(slot is mine for mine in self._mine.slots) or not found:
            self._wrong(f"a copy to {target:x} of slot {stream}")
            return self.status
        try:
            ticket = device.copy(slot, source - _address(slot), nbytes, *found[0])
        except BaseException as error:
            return self._failed(error)
        with device.lock:
            if stream in self._recorded or stream not in self._copies:
                self._copies[stream] = []
            self._recorded.discard(stream)
            self._copies[stream].extend(ticket.copies)
        return 0

    def _record(self, event: int, stream: int) -> int:
        try:
            self._device.note("record", event)
        except BaseException as error:
            return self._failed(error)
        with self._device.lock:
            self._recorded.add(stream)
        return 0

    def _wait(self, event: int) -> int:
        device, slot = self._device, self._slot(event)
        try:
            device.faults.pass_by("wait")
        except BaseException as error:
            with device.lock:  # what is waited for was lost
                for copy in [copy for copy in device.pending if copy.staging is slot]:
                    copy.done = True
                    device.lost.add(copy)
                    device.pending.remove(copy)
            return self._failed(error)
        with device.lock:
            mine = [copy for copy in device.pending if copy.staging is slot]
            others = [copy for copy in device.pending if copy.staging is not slot]
            for copy in (*device.some_of(others), *mine):
                device.finish(copy)
        return 0


def _address(slot: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.view))
