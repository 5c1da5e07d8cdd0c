"""A staged device over torch's memory on the CPU, and a reader: they record, and fail on demand.

What `recording.RecordingDevice` is to buffers of its own, for buffers that are torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from recording import FILL, Faults, RecordingDevice

from streamload.checkpoint.readers import Reader
from streamload.devices.base import DeviceInfo, Staging
from streamload.devices.torch import CPUDevice
from streamload.dtypes import DType
from streamload.errors import CheckpointError


def storage_address(tensor: Any) -> int:
    """Where a tensor's memory begins; 0 where it has none."""
    return int(tensor.untyped_storage().data_ptr())


@dataclass(eq=False)
class RecordedTorchDevice(RecordingDevice):
    """Host memory behind staging, under the name of torch's CPU: modules find themselves there.

    Attributes:
        live: bytes of each allocation that was not released, by address.
        written_nbytes: bytes that copies and casts wrote.
    """

    name: str = "cpu"
    live: dict[int, int] = field(default_factory=dict)
    written_nbytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._cpu = CPUDevice("cpu")

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
    def mapped(self) -> bool:
        """As the real one."""
        return self.inner.mapped

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
