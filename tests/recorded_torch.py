"""A staged device over torch's memory on the CPU, and a reader: they record, and fail on demand.

What `recording.RecordingDevice` is to buffers of its own, for buffers that are torch tensors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from recording import FILL, Faults, RecordingDevice

from streamload.checkpoint.readers import Reader
from streamload.devices.base import BulkFailure, DeviceInfo, Read, Staging, Ticket
from streamload.devices.bulk import Loop
from streamload.devices.torch import CPUDevice
from streamload.dtypes import DType
from streamload.errors import CheckpointError, DeviceError


def storage_address(tensor: Any) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    return int(tensor.untyped_storage().data_ptr())


@dataclass(eq=False)
class RecordedTorchDevice(RecordingDevice):
    """Host memory behind staging, under the name of torch's CPU: modules find themselves there.

    Attributes:
        live: bytes of each allocation that was not released, by address.
        written_nbytes: bytes that copies and casts wrote.
        way: which loop makes many reads and copies in one call; "" where there is no such call.
        disk: what bulk reads find of the files; None for what there is.
        lost: copies that failed when they were waited for: they were not made, and never will be.
    """

    name: str = "cpu"
    live: dict[int, int] = field(default_factory=dict)
    written_nbytes: int = 0
    way: Literal["", "python", "compiled"] = ""
    disk: Disk | None = None
    lost: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cpu = CPUDevice("cpu")
        self._bulk = RecordedBulk(self) if self.way else None

    @property
    def bulk(self) -> RecordedBulk | None:
        """Many reads and copies in one call, if it has a way to."""
        return self._bulk

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int
    ) -> RecordedTicket:
        """Remember the copy; it is made when a ticket is waited for."""
        ticket: Any = super().copy(staging, start, nbytes, buffer, offset)
        return RecordedTicket(self, (ticket.copy,), ticket)

    @property
    def info(self) -> DeviceInfo:
        """torch's CPU, as if it could not be written."""
        return replace(
            self._cpu.info,
            host_visible=self.host_visible,
            shared_memory=self.shared_memory,
            threads=self.threads,
            native_bf16=True,
        )

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A tensor of bytes that are `FILL`."""
        self._note("allocate", shape)
        tensor = self._cpu.allocate(dtype, shape)
        if tensor.nbytes:
            with self._cpu.window(tensor, 0, tensor.nbytes) as view:
                view[:] = bytes([FILL]) * tensor.nbytes
            self.live[storage_address(tensor)] = tensor.nbytes
        return tensor

    @contextmanager
    def window(self, buffer: Any, start: int, stop: int) -> Iterator[memoryview]:
        """The memory itself, where it is said to be host-visible; its old bytes are lost."""
        if not self.host_visible:
            self.wrongs.append("a window on a staged device")
        self._note("window", (start, stop))
        with self._cpu.window(buffer, start, stop) as view:
            view[:] = bytes([FILL]) * (stop - start)
            yield view
        with self.lock:
            self.written_nbytes += stop - start

    def _put(self, buffer: Any, offset: int, data: bytes) -> None:
        """Write bytes of a buffer; the caller holds the lock."""
        if not 0 <= offset < offset + len(data) <= buffer.nbytes:
            self.wrongs.append(f"{len(data)} bytes at {offset} of a buffer of {buffer.nbytes}")
            return
        with self._cpu.window(buffer, offset, offset + len(data)) as view:
            view[:] = data
        self.written_nbytes += len(data)

    def finish(self, copy: Any) -> None:
        """Make a copy now; the caller holds the lock."""
        if copy.done:
            return
        if self.way:  # a slot's copies are made in their order
            for other in [other for other in self.pending if other.staging is copy.staging]:
                if other is copy:
                    break
                self.finish(other)
        now = bytes(copy.staging.view[copy.start : copy.stop])
        if now != copy.seen:
            self.wrongs.append("staging was written under a copy")
        self._put(copy.buffer, copy.offset, now)
        copy.done = True
        self.pending.remove(copy)

    def cast_copy(
        self,
        staging: Staging,
        start: int,
        nbytes: int,
        src: DType,
        buffer: Any,
        offset: int,
        dst: DType,
    ) -> None:
        """Cast by torch."""
        self._note("cast_copy", (start, nbytes, offset))
        raw = torch.frombuffer(bytearray(staging.view[start : start + nbytes]), dtype=torch.uint8)
        made = raw.view(getattr(torch, src.name)).to(getattr(torch, dst.name))
        with self.lock:
            self._put(buffer, offset, bytes(made.view(torch.uint8).numpy()))

    def read(self, buffer: Any, start: int, stop: int) -> bytes:
        """Read back."""
        return self._cpu.read(buffer, start, stop)

    def release(self, buffer: Any) -> None:
        """Let go of the memory."""
        address = storage_address(buffer)
        if any(storage_address(copy.buffer) == address for copy in self.pending):
            self.wrongs.append("a buffer was released under a copy")
        self.live.pop(address, None)
        self._cpu.release(buffer)
        self._note("release", address)

    def allocated_nbytes(self) -> int | None:
        """Bytes of what was allocated here and not released."""
        return sum(self.live.values())


@dataclass(eq=False)
class RecordedTicket:
    """Of some copies of one slot; all of them end when it is waited for.

    Attributes:
        device: where they go.
        copies: those.
        inner: the ticket of the last.
    """

    device: RecordedTorchDevice
    copies: tuple[Any, ...]
    inner: Ticket

    def wait(self) -> None:
        """Finish some others first, then these; raises where one was lost."""
        self.inner.wait()
        with self.device.lock:
            for copy in self.copies:
                self.device.finish(copy)
        if any(copy in self.device.lost for copy in self.copies):
            raise DeviceError(self.device.name, "a copy was lost")


class RecordedBulk:
    """Many reads and copies in one call. Reads are real, and short at times; copies are late.

    The calls of a driver end here, one by one, whichever loop makes them: they are recorded,
    checked, and fail on demand. An error that no driver knows leaves by `run` itself, with copies
    under way. The operations, beside the device's own: run, ran (its end), record; unread is a read
    that the disk refused.

    Attributes:
        status: what a failed call of the driver returns.
    """

    status = 719

    def __init__(self, device: RecordedTorchDevice) -> None:
        self._device = device
        self._buffers: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._tickets: dict[int, list[RecordedTicket]] = {}  # by slot: those of its last read
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
        self._compiled: Loop | None = None
        if device.way == "compiled":
            self._compiled = Loop(
                {
                    name: ctypes.cast(call, ctypes.c_void_p).value or 0
                    for name, call in self._calls.items()
                }
            )

    def address(self, buffer: Any) -> int:
        """Where the tensor's memory begins."""
        address = int(buffer.data_ptr())
        with self._device.lock:
            self._buffers[address] = buffer
        return address

    def ticket(self, slot: Staging) -> Ticket:
        """Of the copies of the slot's last read, as many as were begun."""
        with self._device.lock:
            tickets = self._tickets.get(self._number(slot), [])
        copies = tuple(copy for ticket in tickets for copy in ticket.copies)
        return RecordedTicket(self._device, copies, tickets[-1].inner) if tickets else _NOTHING

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Make the calls, by one loop or the other."""
        device = self._device
        device._note("run", len(reads))
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
        failure = (self._compiled or self._interpreted)(fd, reads, flat)
        if self._mine.raised is not None:
            raise self._mine.raised
        device._note("ran", len(reads))
        return failure

    def _interpreted(
        self, fd: int, reads: Sequence[Read], slots: Sequence[tuple[int, int, int, bool]]
    ) -> BulkFailure | None:
        """What the compiled loop does."""
        busy = [slot[3] for slot in slots]
        for index, read in enumerate(reads):
            which = index % len(slots)
            address, stream, event, _ = slots[which]
            if busy[which] and self._wait(event):
                return BulkFailure(index, "wait", self.status)
            done = 0
            while done < read.needed:
                got = self._pread(fd, address + done, read.asked - done, read.offset + done)
                if got == 0:
                    return BulkFailure(index, "end", 0)
                if got > 0:
                    done += got
                elif self._mine.errno.value != errno.EINTR:
                    return BulkFailure(index, "read", self._mine.errno.value)
            busy[which] = True
            for copy in read.copies:
                if self._copy(copy.address, address + copy.at, copy.nbytes, stream):
                    return BulkFailure(index, "copy", self.status)
            if self._record(event, stream):
                return BulkFailure(index, "copy", self.status)
        return None

    def _wrong(self, what: str) -> None:
        with self._device.lock:
            self._device.wrongs.append(what)

    def _number(self, slot: Staging) -> int:
        """A slot's stream and event: 1 and more."""
        with self._device.lock:
            return 1 + next(i for i, s in enumerate(self._device.stagings) if s is slot)

    def _slot(self, number: int) -> Any:
        with self._device.lock:
            return self._device.stagings[number - 1]

    def _failed(self, error: BaseException) -> int:
        """The status for what was injected."""
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
            if stream in self._recorded or stream not in self._tickets:
                self._tickets[stream] = []
            self._recorded.discard(stream)
            self._tickets[stream].append(ticket)
        return 0

    def _record(self, event: int, stream: int) -> int:
        try:
            self._device._note("record", event)
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
            some = device.random.sample(others, device.random.randint(0, len(others)))
            for copy in (*some, *mine):
                device.finish(copy)
        return 0


class _Nothing:
    """The ticket of a slot that nothing was copied from."""

    def wait(self) -> None:
        """Return at once."""


_NOTHING = _Nothing()


def _address(slot: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot.view))


@dataclass(eq=False)
class Disk:
    """What the files of a stream do: what is read of them, and where they fail.

    Attributes:
        reads: file bytes that were asked for, first and stop, in order.
        bad: file bytes that cannot be read.
        forgiving: the bad bytes fail once, and can be read from then on.
        faults: for the operation "read".
    """

    reads: list[tuple[int, int]] = field(default_factory=list)
    bad: range = range(0)
    forgiving: bool = False
    faults: Faults = field(default_factory=Faults)

    def open(self, reader: Reader) -> RecordedReader:
        """A reader of this disk over a real one."""
        return RecordedReader(reader, self)

    def touch(self, path: Path, start: int, stop: int) -> None:
        """Note a read; raises what the storage gives."""
        self.reads.append((start, stop))
        self.faults.pass_by("read")
        if start < self.bad.stop and self.bad.start < stop:
            if self.forgiving:
                self.bad = range(0)
            raise CheckpointError(path, "cannot be read", found="[Errno 5] Input/output error")


@dataclass(eq=False)
class RecordedReader:
    """A real reader, and what its disk makes of it."""

    inner: Reader
    disk: Disk

    @property
    def path(self) -> Path:
        """The file."""
        return self.inner.path

    @property
    def nbytes(self) -> int:
        """As the real one."""
        return self.inner.nbytes

    @property
    def mapped(self) -> bool:
        """As the real one."""
        return self.inner.mapped

    @property
    def has_file(self) -> bool:
        """As the real one."""
        return self.inner.has_file

    @property
    def alignment(self) -> int:
        """As the real one."""
        return self.inner.alignment

    @property
    def fallback(self) -> str:
        """As the real one."""
        return self.inner.fallback

    def unchanged(self) -> AbstractContextManager[None]:
        """As the real one."""
        return self.inner.unchanged()

    def fileno(self) -> int:
        """The real one's: who reads from it asks the disk himself."""
        return self.inner.fileno()

    def read_aligned(self, start: int, stop: int, out: memoryview) -> int:
        """The real one's, if the disk gives it."""
        self.disk.touch(self.path, start, stop)
        return self.inner.read_aligned(start, stop, out)

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[memoryview]:
        """The real one's, if the disk gives it."""
        self.disk.touch(self.path, start, stop)
        with self.inner.view(start, stop) as view:
            yield view

    def read_into(self, start: int, out: memoryview) -> None:
        """The bytes before the bad ones arrive."""
        stop = start + out.nbytes
        good = min(max(self.disk.bad.start, start), stop) if self.disk.bad else stop
        self.inner.read_into(start, out[: good - start])
        self.disk.touch(self.path, start, stop)
        self.inner.read_into(good, out[good - start :])

    def stop(self) -> None:
        """As the real one."""
        self.inner.stop()

    def close(self) -> None:
        """Close the real one."""
        self.inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
