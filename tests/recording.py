"""Devices that record what a stream does to them, finish copies late, and fail on demand."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamload.devices.base import DeviceInfo, Staging, Ticket
from streamload.dtypes import DType

FILL = 0xA5  # what fresh memory holds


class Faults:
    """Raises at the n-th call (counted from 1) of an operation.

    The operations: allocate, window, staging, copy, cast_copy, wait, close (of staging), release.
    """

    def __init__(self, at: Mapping[str, int] | None = None, error: BaseException | None = None):
        self.calls: Counter[str] = Counter()
        self._at = dict(at or {})
        self._error = error or RuntimeError("injected")
        self._lock = threading.Lock()

    def pass_by(self, operation: str) -> None:
        """Count a call, and raise if it is the one."""
        with self._lock:
            self.calls[operation] += 1
            now = self.calls[operation]
        if self._at.get(operation) == now:
            raise self._error


@dataclass(eq=False)
class RecordedBuffer:
    """Device memory: its bytes, and how often each was written."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytearray
    writes: bytearray
    released: bool = False

    @property
    def written_once(self) -> bool:
        """Every byte was written, and none twice."""
        return self.writes == b"\x01" * len(self.data)


@dataclass(eq=False)
class _Copy:
    staging: RecordedStaging
    start: int
    stop: int
    seen: bytes  # what staging held when the copy was asked for
    buffer: RecordedBuffer
    offset: int
    done: bool = False


@dataclass(eq=False)
class RecordedStaging:
    """Staging of a recording device. Closing it while a copy is under way is noted as wrong."""

    device: RecordingDevice
    view: memoryview
    closed: bool = False

    def close(self) -> None:
        """Give it back."""
        device = self.device
        with device.lock:
            if self.closed:
                device.wrongs.append("staging closed twice")
            if any(copy.staging is self for copy in device.pending):
                device.wrongs.append("staging closed under a copy")
            self.closed = True
        device.faults.pass_by("close")


@dataclass(eq=False)
class _Ticket:
    device: RecordingDevice
    copy: _Copy

    def wait(self) -> None:
        """Finish some other copies first, in any order, then this one."""
        device = self.device
        with device.lock:
            others = [copy for copy in device.pending if copy is not self.copy]
            for copy in device.random.sample(others, device.random.randint(0, len(others))):
                device.finish(copy)
            device.finish(self.copy)
        device.faults.pass_by("wait")


@dataclass(eq=False)
class RecordingDevice:
    """A device in host memory that behaves as badly as the protocol allows.

    A copy reads its staging only when some ticket is waited for, so that bytes which are
    overwritten too early arrive wrong; and it is checked that staging still holds what it held.

    Attributes:
        wrongs: breaches of the protocol, one sentence each.
        events: (operation, detail), in order.
        buffers: all that were allocated.
        stagings: all that were given out.
        watch: called at each operation, with its name.
    """

    name: str = "REC"
    host_visible: bool = False
    shared_memory: bool = False
    threads: int = 16
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    watch: Callable[[str], None] = lambda operation: None
    wrongs: list[str] = field(default_factory=list)
    events: list[tuple[str, object]] = field(default_factory=list)
    buffers: list[RecordedBuffer] = field(default_factory=list)
    stagings: list[RecordedStaging] = field(default_factory=list)
    pending: list[_Copy] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def info(self) -> DeviceInfo:
        """What it is."""
        return DeviceInfo(
            self.name,
            "recording",
            host_visible=self.host_visible,
            shared_memory=self.shared_memory,
            threads=self.threads,
        )

    def _note(self, operation: str, detail: object) -> None:
        with self.lock:
            self.events.append((operation, detail))
        self.watch(operation)
        self.faults.pass_by(operation)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> RecordedBuffer:
        """Allocate memory that holds `FILL`."""
        nbytes = dtype.nbytes(math.prod(shape))
        self._note("allocate", nbytes)
        buffer = RecordedBuffer(dtype, shape, bytearray([FILL]) * nbytes, bytearray(nbytes))
        self.buffers.append(buffer)
        return buffer

    def _write(self, buffer: RecordedBuffer, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(buffer.data):
            self.wrongs.append(f"bytes {start} to {stop} of a buffer of {len(buffer.data)}")
        if buffer.released:
            self.wrongs.append("a released buffer was written")
        for at in range(start, stop):
            buffer.writes[at] = min(buffer.writes[at] + 1, 255)

    @contextmanager
    def window(self, buffer: RecordedBuffer, start: int, stop: int) -> Iterator[memoryview]:
        """The memory itself; its old bytes are lost."""
        if not self.host_visible:
            self.wrongs.append("a window on a staged device")
        self._note("window", (start, stop))
        with self.lock:
            self._write(buffer, start, stop)
        with memoryview(buffer.data)[start:stop] as view:
            view[:] = bytes([FILL]) * (stop - start)
            yield view

    def staging(self, nbytes: int) -> Staging:
        """Host memory."""
        self._note("staging", nbytes)
        staging = RecordedStaging(self, memoryview(bytearray(nbytes)))
        with self.lock:
            self.stagings.append(staging)
        return staging

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: RecordedBuffer, offset: int
    ) -> Ticket:
        """Remember the copy; it is made when a ticket is waited for."""
        assert isinstance(staging, RecordedStaging)
        self._note("copy", (start, nbytes, offset))
        with self.lock:
            if staging.closed:
                self.wrongs.append("a copy from closed staging")
            for other in self.pending:
                if other.staging is staging and other.start < start + nbytes and start < other.stop:
                    self.wrongs.append("staging was filled again under a copy")
            seen = bytes(staging.view[start : start + nbytes])
            copy = _Copy(staging, start, start + nbytes, seen, buffer, offset)
            self.pending.append(copy)
        return _Ticket(self, copy)

    def finish(self, copy: _Copy) -> None:
        """Make a copy now; the caller holds the lock."""
        if copy.done:
            return
        now = bytes(copy.staging.view[copy.start : copy.stop])
        if now != copy.seen:
            self.wrongs.append("staging was written under a copy")
        self._write(copy.buffer, copy.offset, copy.offset + len(now))
        copy.buffer.data[copy.offset : copy.offset + len(now)] = now
        copy.done = True
        self.pending.remove(copy)

    @property
    def bulk(self) -> Any:
        """None: each copy is recorded."""
        return None

    def cast_copy(
        self,
        staging: Staging,
        start: int,
        nbytes: int,
        src: DType,
        buffer: RecordedBuffer,
        offset: int,
        dst: DType,
    ) -> None:
        """Widen and narrow with numpy."""
        import numpy as np

        self._note("cast_copy", (start, nbytes, offset))
        with np.errstate(all="ignore"):
            raw = np.frombuffer(staging.view[start : start + nbytes], src.numpy)
            data = raw.astype(np.float32).astype(dst.numpy).tobytes()
        with self.lock:
            self._write(buffer, offset, offset + len(data))
            buffer.data[offset : offset + len(data)] = data

    def read(self, buffer: RecordedBuffer, start: int, stop: int) -> bytes:
        """Read back."""
        return bytes(buffer.data[start:stop])

    def release(self, buffer: RecordedBuffer) -> None:
        """Mark it."""
        if any(copy.buffer is buffer for copy in self.pending):
            self.wrongs.append("a buffer was released under a copy")
        buffer.released = True
        self._note("release", len(buffer.data))

    def trim(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Copies are made by their tickets."""

    def allocated_nbytes(self) -> int | None:
        """Bytes of the buffers that were not released."""
        return sum(len(b.data) for b in self.buffers if not b.released)

    def counters(self) -> Mapping[str, int]:
        """None."""
        return {}

    def check_ended(self) -> None:
        """After a stream: nothing is under way, all staging is closed, the protocol was kept."""
        assert not self.pending
        assert all(staging.closed for staging in self.stagings)
        assert self.wrongs == [], self.wrongs[:3]


class RecordingFramework:
    """The part of a framework that a target without a model needs."""

    name = "recording"

    def tensor(self, device: Any, buffer: RecordedBuffer, dtype: DType, shape: Any) -> Any:
        """The buffer itself."""
        return buffer
