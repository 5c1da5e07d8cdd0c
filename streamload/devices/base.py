"""Interfaces of devices, of frameworks and of a model's parameters.

A *host-visible* device gives windows on its own memory, and the cast writes there; a *staged* one
copies from a staging buffer of the host.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    runtime_checkable,
)

import numpy as np

from streamload.codecs.scheme import CodedWeight
from streamload.core.dtypes import DType
from streamload.core.interrupt import nothing
from streamload.core.system import bytes_at, trim_heap
from streamload.core.tensors import Block
from streamload.devices.allocators import NO_COSTS, AllocatorKind, TensorCosts
from streamload.errors import DeviceError

if TYPE_CHECKING:
    from streamload.devices.cuda import BulkCopier

DTypeStatus = Literal["native", "emulated", "broken", "absent"]

Buffer = Any  # memory of a device, which only its own device reads


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Abilities and limits of a device.

    Attributes:
        name: canonical name, without the framework ("CL", "CPU:1", "host").
        framework: "tinygrad", "host", ....
        description: the driver's name for it.
        host_visible: the CPU can write its memory in place.
        shared_memory: its memory is the host's.
        free_nbytes: free bytes by the driver; None if it does not report them.
        total_nbytes: bytes in all; None if the driver does not report them.
        largest_allocation_nbytes: the largest single allocation; None for no limit.
        max_transfer_nbytes: the largest single transfer; None for no limit.
        granularity_nbytes: allocations are rounded up to a multiple of this.
        allocator: how its allocator takes memory from the device.
        costs: host memory of each tensor besides its bytes.
        max_buffers: how many more buffers it can hold, of any size; None for no limit.
        threads: how many threads may write at once; 0 for the calling thread only.
        native_bf16: computes in bfloat16 natively, or in float16 no better.
        casts: casts in kernels of streamload's, exactly, and counts the values that change.
        maps: computes on mapped files in place, see `Device.view`.
        unsupported: names of dtypes that it cannot hold.
        caveat: memory that a plan cannot predict, one sentence, or "".
    """

    name: str
    framework: str
    description: str = ""
    host_visible: bool = True
    shared_memory: bool = True
    free_nbytes: int | None = None
    total_nbytes: int | None = None
    largest_allocation_nbytes: int | None = None
    max_transfer_nbytes: int | None = None
    granularity_nbytes: int = 1
    allocator: AllocatorKind = "exact"
    costs: TensorCosts = NO_COSTS
    max_buffers: int | None = None
    threads: int = 16
    native_bf16: bool = False
    casts: bool = False
    maps: bool = False
    unsupported: frozenset[str] = frozenset()
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Results of computing on a device.

    Attributes:
        device: its name.
        works: an addition was right.
        problem: why it does not work, or "".
        dtypes: status by dtype name: a real buffer was written, computed on, read back.
        device_casts: (src, dst) names of the pairs that its own cast gets right on every code.
    """

    device: str
    works: bool
    problem: str = ""
    dtypes: Mapping[str, DTypeStatus] = field(default_factory=dict)
    device_casts: tuple[tuple[str, str], ...] = ()


class Ticket(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when the copy has finished; raise DeviceError if it failed."""


class Staging(Protocol):
    """Host memory to copy from."""

    @property
    def view(self) -> memoryview:
        """Its bytes, writable."""

    def close(self) -> None:
        """Free it; no copy from it may be under way."""


BulkStage = Literal["wait", "read", "end", "copy"]


class Copy(NamedTuple):
    """Bytes of a slot that are copied to a device, and the kernel that casts them there.

    Attributes:
        at: offset in the slot.
        address: device address of the copied bytes.
        kernel: handle of the cast kernel; 0 for none.
        numel: elements to cast.
        out: device address of the cast elements; ``address`` if cast in place.
        tally: device address of three counts of 8 bytes: elements that overflowed, that became
            zero, and that changed at all; 0 to count none.
        blocks: thread blocks of the kernel.
        statistics: device address of the statistics of a quantizing kernel.
        unit: elements of a unit of these.
    """

    at: int
    nbytes: int
    address: int
    kernel: int = 0
    numel: int = 0
    out: int = 0
    tally: int = 0
    blocks: int = 0
    statistics: int = 0
    unit: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Many copies as one table, for the compiled loop; `Copy` objects are made on demand.

    Attributes:
        rows: the fields of a `Copy` each; int64, C-contiguous.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Copy]:
        return map(Copy._make, self.rows.tolist())


@dataclass(frozen=True, slots=True)
class Read:
    """One read into a slot, and the copies of its bytes.

    Attributes:
        offset: first file byte; of a direct read a multiple of the reader's alignment.
        asked: bytes to request.
        needed: fewest bytes to accept; less than ``asked`` past the file's end, 0 if the slot holds
            the bytes already.
        copies: in order.
    """

    offset: int
    asked: int
    needed: int
    copies: Sequence[Copy] | CopyTable


@dataclass(frozen=True, slots=True)
class BulkFailure:
    """Where many reads and copies ended early.

    Attributes:
        index: of the read. Those before it were read, and their copies begun.
        stage: "wait" (for a copy from the slot before), "read", "end" (of the file), or "copy" (or
            cast).
        code: errno of a read, or the status of the driver's call.
    """

    index: int
    stage: BulkStage
    code: int


class Device(Protocol):
    """Memory that parameters go to: host-visible or staged; a device overrides its own way in."""

    #: Many reads and copies in one call, if the device has such a call.
    bulk: BulkCopier | None = None

    @property
    def info(self) -> DeviceInfo:
        """Its abilities and limits; looked up afresh, computes nothing."""

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate memory for one parameter; raises AllocationError."""

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read raw bytes ``start`` to ``stop`` (exclusive) back from the device."""

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Bytes ``start`` to ``stop`` (exclusive) of a host-visible buffer, writable.

        Their old values are lost. Valid inside the ``with``; several threads may hold windows on
        different bytes.
        """
        _refuse(self, "its memory cannot be written by the CPU")

    def staging(self, nbytes: int) -> Staging:
        """Host memory that this device copies from, pinned where the driver can."""
        _refuse(self, "its memory is written in place")

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """Copy ``nbytes`` of staging from ``start`` on to byte ``offset`` of the buffer.

        May be asynchronous: those bytes of staging are free again after ``Ticket.wait()``.
        """
        _refuse(self, "its memory is written in place")

    def cast_copy(
        self,
        staging: Staging,
        start: int,
        nbytes: int,
        src: DType,
        buffer: Buffer,
        offset: int,
        dst: DType,
    ) -> None:
        """Copy ``nbytes`` of ``src`` elements, and let the device cast them to byte ``offset``."""
        _refuse(self, "it has no cast of its own")

    def view(self, memory: mmap.mmap, start: int, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A buffer over a private, writable map; it keeps the map open.

        Args:
            memory: the map.
            start: first byte, a multiple of the dtype's size.
            dtype: of whole bytes.
            shape: with at least one element.
        """
        _refuse(self, "it does not compute on mapped files")

    def release(self, buffer: Buffer) -> None:
        """Free the memory of a buffer that nothing else uses."""
        return None

    def trim(self) -> None:
        """Free the allocator's cache of freed memory."""
        return None

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        return None

    def follow(self, ticket: Ticket) -> None:
        """Order the calling thread's later work after a copy of this device."""
        ticket.wait()

    def mark(self) -> Ticket | None:
        """The end of the calling thread's queued work; None if it has ended."""
        self.synchronize()
        return None

    def allocated_nbytes(self) -> int | None:
        """Allocated bytes by the framework's own counter; None if it has none."""
        return None

    def counters(self) -> Mapping[str, int]:
        """The framework's own counters of memory in bytes, by their names there."""
        return {}


def _refuse(device: Any, problem: str) -> NoReturn:
    raise DeviceError(device.info.name, problem)


@runtime_checkable
class Addressed(Protocol):
    """A device that allocates many buffers in one call, and whose buffers have addresses.

    If it is host-visible, those may be written without a `Device.window`.
    """

    def address(self, buffer: Buffer) -> int:
        """The address of a buffer's first byte; its bytes follow each other."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        """Allocate several parameters in order; frees all before it raises AllocationError."""


class HeapDevice(Addressed, Device, Protocol):
    """A device whose buffers are memory of this process, each in one piece."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        return [self.allocate(dtype, shape) for dtype, shape in kinds]

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        return ctypes.string_at(self.address(buffer) + start, stop - start)

    @contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        view = bytes_at(self.address(buffer) + start, stop - start)
        try:
            yield view
        finally:
            with suppress(BufferError):  # the traceback of an error still refers to it
                view.release()

    def trim(self) -> None:
        trim_heap()


class Parameter(Protocol):
    """One parameter of a model, keyed by its memory.

    Attributes:
        names: all its names in the model; tied parameters have several.
        shape: its shape.
        dtype: long name of its dtype.
        device: canonical name of its device, also if a failed load has released its memory.
        nbytes: bytes of memory that it holds.
        keeps: the dtype that it keeps unless another is requested; None if it has no preference.
        fixed: why it can only be written in place (it is a view of ...), or "".
        refused: why it cannot be written at all, or "".
        invalid: an earlier load failed and left it without values.
        block: its part of the checkpoint's tensor, if it holds one shard; None for all.
        shard: suffix of its name in a plan, if this process has several of its shards.
        span: its memory as (identity of the allocation, first byte, stop); None if it holds none.
            Two parameters whose bytes overlap in one allocation share memory.
        wrapped: its names under a wrapper of modules (``module.``, ``_orig_mod.``).
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str | None = None
    nbytes: int = 0
    keeps: DType | None = None
    fixed: str = ""
    refused: str = ""
    invalid: bool = False
    block: Block | None = None
    shard: str = ""
    span: tuple[int, int, int] | None = None
    wrapped: tuple[str, ...] = ()

    def is_computed(self) -> bool:
        """Whether the model computes its values: no checkpoint has to hold them."""
        return False

    def memory(self) -> Sequence[tuple[int, int]]:
        """Its bytes as the CPU addresses them: (address, bytes); () if it cannot."""
        if self.span is None:
            return ()
        _, first, stop = self.span
        return ((first, stop - first),)

    def buffer(self) -> Buffer:
        """Its memory, to be written in place."""

    def release(self) -> str:
        """Free its memory; it then holds nothing readable.

        Returns:
            "" if the memory is freed. Otherwise the parameter is unchanged, and this names the
            possible holders of the memory.
        """

    def attach(self, buffer: Buffer, dtype: DType) -> None:
        """Make it a tensor over the buffer."""

    def invalidate(self, keep: bool) -> None:
        """Make it hold nothing readable; using it then raises.

        Args:
            keep: keep its memory for `revive`, and report it as held, here and in later loads, so
                that they write the same memory again. Otherwise the memory is let go of.
        """

    def revive(self) -> None:
        """Show the kept memory again, which was written; does nothing if none is kept."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Modules for quantized weights, to replace a model's own.

    Attributes:
        coded: the weights that parameters will hold as codes, by each of their names.
        put: puts the modules in place, without values, and returns the function that undoes it. A
            parameter of codes holds the weight's memory until that is released.
        dense_nbytes: of the largest weight that these modules dequantize at once, to compute.
        holders: the classes of modules that can hold such weights, in words.
        refused: the class of the module of each other weight.
    """

    coded: Mapping[str, CodedWeight]
    put: Callable[[], Callable[[], None]]
    dense_nbytes: int = 0
    holders: str = "none"
    refused: Mapping[str, str] = field(default_factory=dict)


#: Of a model that stays as it is.
NO_SWAP = Swap({}, lambda: nothing)


class Framework(Protocol):
    """One framework: its tensors, and its devices by their names without the framework."""

    name: str

    def parameters(self, model: Any) -> Sequence[Parameter]:
        """The model's parameters, tied ones once."""

    def unstored(self, model: Any) -> Mapping[str, str]:
        """Tensors of a model that no checkpoint has, with their devices ("meta": no values)."""
        return {}

    def coded(self, model: Any) -> Mapping[str, CodedWeight]:
        """The weights that parameters hold as codes, by each of their names."""
        return {}

    def swap(self, model: Any, formats: Mapping[str, str]) -> Swap:
        """Modules for weights that are quantized; the model is unchanged until `Swap.put`.

        Args:
            model: the model.
            formats: by name of a parameter. A weight that no module can hold is not in
                `Swap.coded`.

        Raises:
            ValueError: there are no modules for a format.
        """
        return NO_SWAP

    def tensor(self, device: Device, buffer: Buffer, dtype: DType, shape: tuple[int, ...]) -> Any:
        """The framework's tensor over a buffer, without a copy."""
        return buffer

    def device(self, name: str) -> Device:
        """Open a device; raises DeviceNotFoundError."""

    def canonical(self, name: str) -> str:
        """The canonical form of a device's name, without opening it."""

    def default_device(self) -> str:
        """The framework's default device; raises DeviceNotFoundError if it has none."""
        return self.candidates()[0]

    def candidates(self) -> Sequence[str]:
        """Devices worth a probe, best first."""

    def trusted(self, name: str) -> bool:
        """Whether computing there cannot end or hang this process: a probe needs no child."""
        return False

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Compute on the device, in this process; ``full`` tries every dtype and its own casts."""

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """Status of a dtype, by computing on a real buffer in this process."""

    def lasting(self, name: str) -> bool:
        """Whether results in this process hold for any other: they are cached as a child's are."""
        return False

    def fingerprint(self, name: str) -> str:
        """Text that changes whenever a probe of the device may give another result."""
        return ""
