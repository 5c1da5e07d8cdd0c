"""Devices and files that record what a stream does to them, and fail on demand.

`RecordingDevice` has memory of its own; `recorded_torch.RecordedTorchDevice` is the same over
torch's memory. Copies end late, and in any order. `Disk` is to files what they are to memory.
"""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from streamload.checkpoint import shards as reading
from streamload.core.dtypes import DType
from streamload.core.location import Location
from streamload.devices.base import DeviceInfo, StagedElements, Staging
from streamload.errors import CheckpointError, DeviceError
from streamload.files.reader import Reader

FILL = 0xA5  # what fresh memory holds
_ONE_MORE = bytes(min(count + 1, 255) for count in range(256))


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
class Copy:
    staging: RecordedStaging
    start: int
    stop: int
    seen: bytes
    buffer: Any
    offset: int
    done: bool = False


@dataclass(eq=False)
class RecordedStaging:
    """Staging of a recording device. Closing it while a copy is under way is noted as wrong."""

    device: RecordingDevice
    view: memoryview
    closed: bool = False

    def close(self) -> None:
        device = self.device
        with device.lock:
            if self.closed:
                device.wrongs.append("staging closed twice")
            if any(copy.staging is self for copy in device.pending):
                device.wrongs.append("staging closed under a copy")
            self.closed = True
        device.faults.pass_by("close")


@dataclass(eq=False)
class RecordedTicket:
    """Of some copies of one slot, none of them lost; all of them end when it is waited for."""

    device: RecordingDevice
    copies: tuple[Copy, ...]

    def wait(self) -> None:
        """Finish some other copies first, in any order, then these; raises where one was lost."""
        if not self.copies:
            return
        device = self.device
        with device.lock:
            others = [copy for copy in device.pending if copy not in self.copies]
            for copy in (*device.some_of(others), *self.copies):
                device.finish(copy)
        device.faults.pass_by("wait")
        if any(copy in device.lost for copy in self.copies):
            raise DeviceError(device.name, "a copy was lost")


@dataclass(eq=False)
class RecordingDevice:
    """A device in host memory that behaves as badly as the protocol allows.

    A copy reads its staging only when some ticket is waited for, so that bytes which are
    overwritten too early arrive wrong; and it is checked that staging still holds what it held.
    Other kinds of memory override `_make`, `_bytes`, `_key` and `_free`.
    """

    name: str = "REC"
    host_visible: bool = False
    shared_memory: bool = False
    threads: int = 16
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    watch: Callable[[str], None] = lambda operation: None  # called at each operation, with its name
    in_order: bool = False  # the copies of a slot are made in their order
    wrongs: list[str] = field(default_factory=list)  # breaches of the protocol, one sentence each
    events: list[tuple[str, object]] = field(default_factory=list)  # (operation, detail), in order
    # all that were allocated of this device's own memory
    buffers: list[RecordedBuffer] = field(default_factory=list)
    # bytes of each allocation that was not released, by key
    live: dict[int, int] = field(default_factory=dict)
    written_nbytes: int = 0  # bytes that windows, copies and casts wrote
    stagings: list[RecordedStaging] = field(default_factory=list)  # all that were given out
    pending: list[Copy] = field(default_factory=list)  # copies that were asked for and not made
    # copies that failed when they were waited for: they were not made, and never will be
    lost: set[Copy] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def info(self) -> DeviceInfo:
        return DeviceInfo(
            self.name,
            "recording",
            host_visible=self.host_visible,
            shared_memory=self.shared_memory,
            threads=self.threads,
        )

    # --- its memory ---

    def _make(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        nbytes = dtype.nbytes(math.prod(shape))
        self.buffers.append(RecordedBuffer(dtype, shape, bytearray(nbytes), bytearray(nbytes)))
        return self.buffers[-1]

    @contextmanager
    def _bytes(self, buffer: Any) -> Iterator[memoryview]:
        with memoryview(buffer.data) as view:
            yield view

    def _key(self, buffer: Any) -> int:
        """The same number for all that share a buffer's memory."""
        return id(buffer)

    def _free(self, buffer: Any) -> None:
        buffer.released = True

    def _write(self, buffer: Any, start: int, data: bytes) -> None:
        """Put bytes into a buffer, and note that; the caller holds the lock."""
        with self._bytes(buffer) as view:
            stop = start + len(data)
            if not 0 <= start < stop <= len(view):
                self.wrongs.append(f"bytes {start} to {stop} of a buffer of {len(view)}")
                return
            view[start:stop] = data
        self.written_nbytes += len(data)
        if isinstance(buffer, RecordedBuffer):
            if buffer.released:
                self.wrongs.append("a released buffer was written")
            buffer.writes[start:stop] = buffer.writes[start:stop].translate(_ONE_MORE)

    # --- what a stream asks of it ---

    def note(self, operation: str, detail: object) -> None:
        with self.lock:
            self.events.append((operation, detail))
        self.watch(operation)
        self.faults.pass_by(operation)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        nbytes = dtype.nbytes(math.prod(shape))
        self.note("allocate", nbytes)
        buffer = self._make(dtype, shape)
        if nbytes:
            with self._bytes(buffer) as view:
                view[:] = bytes([FILL]) * nbytes
            self.live[self._key(buffer)] = nbytes
        return buffer

    @contextmanager
    def window(self, buffer: Any, start: int, stop: int) -> Iterator[memoryview]:
        """The memory itself; its old bytes are lost."""
        if not self.host_visible:
            self.wrongs.append("a window on a staged device")
        self.note("window", (start, stop))
        with self.lock:
            self._write(buffer, start, bytes([FILL]) * (stop - start))
        with self._bytes(buffer) as view, view[start:stop] as part:
            yield part

    def staging(self, nbytes: int) -> Staging:
        self.note("staging", nbytes)
        staging = RecordedStaging(self, memoryview(bytearray(nbytes)))
        with self.lock:
            self.stagings.append(staging)
        return staging

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int
    ) -> RecordedTicket:
        """Remember the copy; it is made when a ticket is waited for."""
        assert isinstance(staging, RecordedStaging)
        self.note("copy", (start, nbytes, offset))
        with self.lock:
            if staging.closed:
                self.wrongs.append("a copy from closed staging")
            for other in self.pending:
                if other.staging is staging and other.start < start + nbytes and start < other.stop:
                    self.wrongs.append("staging was filled again under a copy")
            seen = bytes(staging.view[start : start + nbytes])
            copy = Copy(staging, start, start + nbytes, seen, buffer, offset)
            self.pending.append(copy)
        return RecordedTicket(self, (copy,))

    def some_of(self, copies: list[Copy]) -> list[Copy]:
        return self.random.sample(copies, self.random.randint(0, len(copies)))

    def finish(self, copy: Copy) -> None:
        """Make a copy now; the caller holds the lock."""
        if copy.done:
            return
        if self.in_order:
            for other in [other for other in self.pending if other.staging is copy.staging]:
                if other is copy:
                    break
                self.finish(other)
        now = bytes(copy.staging.view[copy.start : copy.stop])
        if now != copy.seen:
            self.wrongs.append("staging was written under a copy")
        self._write(copy.buffer, copy.offset, now)
        copy.done = True
        self.pending.remove(copy)

    @property
    def bulk(self) -> Any:
        return None

    def cast_copy(self, source: StagedElements, buffer: Any, offset: int, dst: DType) -> None:
        start, nbytes = source.start, source.nbytes
        self.note("cast_copy", (start, nbytes, offset))
        with np.errstate(all="ignore"):
            raw = np.frombuffer(source.staging.view[start : start + nbytes], source.dtype.numpy)
            data = raw.astype(np.float32).astype(dst.numpy).tobytes()
        with self.lock:
            self._write(buffer, offset, data)

    def read(self, buffer: Any, start: int, stop: int) -> bytes:
        with self._bytes(buffer) as view:
            return bytes(view[start:stop])

    def release(self, buffer: Any) -> None:
        key = self._key(buffer)
        if any(self._key(copy.buffer) == key for copy in self.pending):
            self.wrongs.append("a buffer was released under a copy")
        self.live.pop(key, None)
        self._free(buffer)
        self.note("release", key)

    def trim(self) -> None:
        """Nothing is kept."""

    def synchronize(self) -> None:
        """Copies are made by their tickets."""

    def allocated_nbytes(self) -> int | None:
        return sum(self.live.values())

    def counters(self) -> Mapping[str, int]:
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
        return buffer


@dataclass(eq=False)
class Disk:
    """What the files of a stream do: what is read of them, and where they fail."""

    # file bytes that were asked for, (file name, first, stop), in order
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    bad: range = range(0)  # file bytes that cannot be read
    forgiving: bool = False  # the bad bytes fail once, and can be read from then on
    faults: Faults = field(default_factory=Faults)  # for the operation "read"

    def touch(self, path: Path, start: int, stop: int) -> None:
        """Note a read; raises what the storage gives."""
        self.reads.append((path.name, start, stop))
        self.faults.pass_by("read")
        if start < self.bad.stop and self.bad.start < stop:
            if self.forgiving:
                self.bad = range(0)
            raise CheckpointError(path, "cannot be read", found="[Errno 5] Input/output error")


class RecordedReader:
    """A real reader, and what its disk makes of it. Readers by its descriptor ask the disk."""

    def __init__(self, inner: Reader, disk: Disk) -> None:
        self._inner, self._disk = inner, disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_aligned(self, start: int, stop: int, out: memoryview) -> int:
        """The real one's, if the disk gives it."""
        self._disk.touch(self.path, start, stop)
        return self._inner.read_aligned(start, stop, out)

    @contextmanager
    def view(self, start: int, stop: int) -> Iterator[memoryview]:
        """The real one's, if the disk gives it."""
        self._disk.touch(self.path, start, stop)
        with self._inner.view(start, stop) as view:
            yield view

    def read_into(self, start: int, out: memoryview) -> None:
        """The bytes before the bad ones arrive."""
        stop = start + out.nbytes
        bad = self._disk.bad
        good = min(max(bad.start, start), stop) if bad else stop
        self._inner.read_into(start, out[: good - start])
        self._disk.touch(self.path, start, stop)
        self._inner.read_into(good, out[good - start :])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.close()


@contextmanager
def recorded(folder: Path | None = None) -> Iterator[Disk]:
    """The files are real; what this process reads of them, or of a folder, the disk says."""
    disk, real = Disk(), reading.open_reader

    def open_recorded(path: Location, *arguments: Any) -> Any:
        reader = real(path, *arguments)
        return RecordedReader(reader, disk) if folder in (None, path.parent) else reader

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "open_reader", open_recorded)
        yield disk
