"""Interfaces of devices, of frameworks and of a model's parameters.

The CPU writes the memory of a *host-visible* device, and the cast goes straight there; a *staged*
device copies from a staging buffer in host memory.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import (
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    Self,
    runtime_checkable,
)

import numpy as np

from streamload.codecs.scheme import CodedWeight
from streamload.core.dtypes import DType
from streamload.core.interrupt import nothing
from streamload.core.system import bytes_at, released, trim_heap
from streamload.core.tensors import Block
from streamload.devices.allocators import NO_COSTS, AllocatorKind, TensorCosts
from streamload.errors import DeviceError

DTypeStatus = Literal["native", "emulated", "broken", "absent"]

Buffer = Any  # one parameter's memory; its type is the device's own


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Abilities and limits of a device.

    Attributes:
        name: canonical name, without the framework ("CL", "CPU:1", "host").
        host_visible: the CPU can write its memory in place.
        shared_memory: its memory is host memory.
        charged: such memory counts in this process's RSS and memory cgroup; CUDA's does not.
        free_nbytes: free bytes by the driver; None if it does not report them.
        granularity_nbytes: allocations are rounded up to a multiple of this.
        allocator: how its allocator takes memory from the device.
        costs: host memory of each tensor besides its elements.
        max_buffers: how many more buffers it can hold, of any size; None for no limit.
        threads: how many threads may write at once; 0 for the calling thread only.
        native_bf16: computes in bfloat16 natively, or float16 is no better there.
        casts: runs streamload's cast kernels, which are exact and count the values they change.
        maps: computes on mapped files in place, see `Device.view`.
        unsupported: names of dtypes that it cannot hold.
        caveat: memory that a plan cannot predict, one sentence, or "".
    """

    name: str
    framework: str
    description: str = ""
    host_visible: bool = True
    shared_memory: bool = True
    charged: bool = True
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

    @property
    def in_process(self) -> bool:
        """Whether its memory is host memory that counts as this process's."""
        return self.shared_memory and self.charged


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of a probe, which computes on a device.

    Attributes:
        works: an addition was right.
        dtypes: status by dtype name: a real buffer was written, computed on, read back.
        device_casts: (src, dst) dtype names that the framework's own cast converts exactly, for
            every bit pattern of ``src``.
    """

    device: str
    works: bool
    problem: str = ""
    dtypes: Mapping[str, DTypeStatus] = field(default_factory=dict)
    device_casts: tuple[tuple[str, str], ...] = ()


class Ticket(Protocol):
    """A copy to a device, which may still be running."""

    def wait(self) -> None:
        """Return when the copy has finished; raise DeviceError if it failed."""


class QueuedWork(Ticket, Protocol):
    """All work that was queued on a stream of a device until some time."""

    @property
    def stream(self) -> int:
        """The stream: later work on it ends later."""

    @property
    def events(self) -> Sequence[Any]:
        """The driver's events that other streams have to wait for."""


class Staging(Protocol):
    """Host memory that a device copies from."""

    @property
    def view(self) -> memoryview:
        """The memory's bytes, writable."""

    def close(self) -> None:
        """Free the memory; no copy from it may be under way."""


class StagedElements(NamedTuple):
    """Elements of a dtype in staging memory: ``nbytes`` from byte ``start`` on."""

    staging: Staging
    start: int
    nbytes: int
    dtype: DType


BulkStage = Literal["wait", "read", "end", "copy"]


class Copy(NamedTuple):
    """One copy from a staging slot to a device, and the kernel that casts its bytes there.

    Attributes:
        at: first byte in the slot.
        address: device address of the copied bytes.
        kernel: handle of the cast kernel; 0 for none.
        numel: elements to cast.
        out: device address of the cast elements; ``address`` if cast in place.
        tally: device address of three counts of 8 bytes: elements that overflowed, that became
            zero, and that changed at all; 0 to count none.
        blocks: thread blocks of the kernel.
        statistics: device address of the scales that a kernel reads, or statistics that it writes.
        unit: if the kernel quantizes, elements of a block that share one statistic; if it
            dequantizes, index of the first element in the stored tensor.
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


#: Rows of numbers, C-contiguous; of copies, with the fields of `Copy` as columns.
Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Read:
    """One read into a slot, and the copies of its bytes.

    Attributes:
        offset: first file byte; of a direct read a multiple of the reader's alignment.
        asked: bytes to request.
        needed: fewest bytes to accept; less than ``asked`` past the file's end, 0 if the slot holds
            the bytes already.
        copies: the copies of its bytes to the device, in order; a table if they are many.
    """

    offset: int
    asked: int
    needed: int
    copies: Sequence[Copy] | Table


class ReadTable(NamedTuple):
    """Reads with their copies, as tables for the compiled loop.

    Attributes:
        rows: (offset, bytes to ask for, bytes needed, first copy, copies, shift) of each read;
            ``shift`` is added to the addresses of its copies.
        copies: the fields of each `Copy`.
    """

    rows: Table
    copies: Table

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Self:
        """Return reads as a table."""
        rows, copies, first = array("q"), array("q"), 0
        for read in reads:
            rows.extend((read.offset, read.asked, read.needed, first, len(read.copies), 0))
            first += len(read.copies)
            if isinstance(read.copies, np.ndarray):
                copies.frombytes(read.copies.tobytes())
                continue
            for copy in read.copies:
                copies.extend(copy)
        columns = len(Copy._fields)
        return cls(np.array(rows).reshape(-1, 6), np.array(copies).reshape(-1, columns))

    @classmethod
    def joined(cls, parts: Sequence[tuple[ReadTable, int]]) -> Self:
        """Return several tables as one; with each, the shift of its addresses."""
        rows = np.concatenate([table.rows for table, _ in parts])
        at = first = 0
        for table, shift in parts:
            mine = rows[at : at + len(table.rows)]
            mine[:, 3] += first
            mine[:, 5] = shift
            at, first = at + len(table.rows), first + len(table.copies)
        return cls(rows, np.concatenate([table.copies for table, _ in parts]))


@dataclass(frozen=True, slots=True)
class BulkFailure:
    """The read at which a bulk run of reads and copies failed, and why.

    Attributes:
        index: of the failed read; the copies of all reads before it were started.
        stage: "wait" for the slot's earlier copy, "read", "end" of the file, "copy" or cast.
        code: errno of a read, or the status of the driver's call.
    """

    index: int
    stage: BulkStage
    code: int


class Device(Protocol):
    """A device that holds parameters.

    A host-visible device overrides `window`, a staged device `staging` and `copy`.
    """

    #: A `cuda_copies.BulkCopier` of many reads and copies in one call; None if it cannot.
    bulk: Any = None

    @property
    def info(self) -> DeviceInfo:
        """The device's abilities and limits now; nothing is computed on it."""

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate memory for one parameter; raises AllocationError."""

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read raw bytes ``start`` to ``stop`` (exclusive) back from the device."""

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Map bytes ``start`` to ``stop`` (exclusive) of a host-visible buffer for writing.

        The bytes' old values are lost. The view is valid inside the ``with``; several threads may
        hold windows on different bytes.
        """
        _refuse(self, "its memory cannot be written by the CPU")

    def staging(self, nbytes: int) -> Staging:
        """Allocate host memory that this device copies from, pinned if the driver can."""
        _refuse(self, "its memory is written in place")

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """Copy ``nbytes`` of staging from ``start`` on to byte ``offset`` of the buffer.

        May be asynchronous: those bytes of staging are free again after ``Ticket.wait()``.
        """
        _refuse(self, "its memory is written in place")

    def cast_copy(self, source: StagedElements, buffer: Buffer, offset: int, dst: DType) -> None:
        """Copy elements, cast by the device to ``dst``, to byte ``offset`` of the buffer.

        Returns when ``source`` may be written again.
        """
        _refuse(self, "it has no cast of its own")

    def view(self, memory: mmap.mmap, start: int, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Return a buffer over a mapped file, without a copy; the buffer keeps the map open.

        The map is private and writable, ``start`` a byte, a multiple of the dtype's size; the shape
        has elements.
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

    def follow(self, tickets: Iterable[Ticket]) -> None:
        """Make work that the calling thread queues from now on wait for copies, at least one."""
        for ticket in tickets:
            ticket.wait()

    def mark(self) -> QueuedWork | None:
        """Return a ticket for the end of the calling thread's queued work; None if it has ended."""
        self.synchronize()
        return None

    def allocated_nbytes(self) -> int | None:
        """Return the bytes allocated by the framework's own counter; None if it has none."""
        return None

    def counters(self) -> Mapping[str, int]:
        """Return the framework's own memory counters, in bytes, by the framework's names."""
        return {}


def _refuse(device: Any, problem: str) -> NoReturn:
    """Raise DeviceError with ``problem``, from a method that the device does not support."""
    raise DeviceError(device.info.name, problem)


@runtime_checkable
class Addressed(Protocol):
    """A device that allocates many buffers in one call, and whose buffers have addresses.

    If the device is host-visible, buffers may be written without a `Device.window`.
    """

    def address(self, buffer: Buffer) -> int:
        """Return the address of a buffer's first byte; the buffer is contiguous."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        """Allocate a buffer for each (dtype, shape); on AllocationError all of them are freed."""


class HeapDevice(Addressed, Device, Protocol):
    """The base of devices whose buffers are contiguous memory of this process."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        return [self.allocate(dtype, shape) for dtype, shape in kinds]

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        return ctypes.string_at(self.address(buffer) + start, stop - start)

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        return released(bytes_at(self.address(buffer) + start, stop - start))

    def trim(self) -> None:
        trim_heap()


class Parameter(Protocol):
    """One parameter of a model: all its tensors with the same memory.

    Attributes:
        names: all its names in the model; tied parameters have several.
        dtype: long name of its dtype.
        nbytes: bytes of memory that it holds.
        keeps: the dtype that it keeps unless the user requests another; None: the checkpoint's.
        fixed: why it can only be written in place ("it is a view of ..."); "" if it need not.
        refused: why it cannot be written at all; "" if it can.
        invalid: an earlier load failed and left it without values.
        block: the block of the checkpoint's tensor that it holds, if it is a shard; else None.
        shard: suffix of its name in a plan, if this process holds several shards of a tensor.
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
        """Whether the model computes its values, so that a checkpoint may lack them."""
        return False

    def memory(self) -> Sequence[tuple[int, int]]:
        """Return its memory as (address, bytes) ranges of this process; () if it has none here."""
        if self.span is None:
            return ()
        _, first, stop = self.span
        return ((first, stop - first),)

    def buffer(self) -> Buffer:
        """Return the parameter's memory as a device's buffer, to be written in place."""

    def release(self) -> str:
        """Free its memory; return "", or if that fails the possible holders of the memory."""

    def attach(self, buffer: Buffer, dtype: DType) -> None:
        """Make the parameter a tensor of ``dtype`` over the buffer's memory."""

    def invalidate(self, keep: bool) -> None:
        """Leave the parameter without readable values; using it then raises.

        With ``keep`` later loads write the memory again, after `revive`, and ``nbytes`` counts it.
        """

    def revive(self) -> None:
        """Use the memory that `invalidate` kept again, once a load wrote it; else do nothing."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A replacement of a model's modules by modules that hold quantized weights.

    Attributes:
        coded: the weights that will be held quantized, by each of their names.
        put: puts the modules in place, without values, and returns the function that undoes it. A
            quantized parameter keeps the weight's memory until `Parameter.release`.
        compile: compiles the kernels with which weights are multiplied, from the device of each by
            its name; before bytes move, since compilers take memory.
        dense_nbytes: bytes of the largest weight that a module dequantizes at once, to compute.
        holders: the classes of modules that can hold such weights, in words.
        refused: for each weight that cannot be held quantized, by name, the class of its module.
    """

    coded: Mapping[str, CodedWeight]
    put: Callable[[], Callable[[], None]]
    compile: Callable[[Mapping[str, str]], None] = lambda _: None
    dense_nbytes: int = 0
    holders: str = "none"
    refused: Mapping[str, str] = field(default_factory=dict)


#: Replaces nothing.
NO_SWAP = Swap({}, lambda: nothing)


class Seen(NamedTuple):
    """A tensor of a checkpoint, as code of a model may see it before a load.

    Attributes:
        dtype: its long name.
        read: reads the bytes; called for tensors of one element alone.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], bytes]


class Framework(Protocol):
    """A framework (numpy, torch, tinygrad): its tensors and devices.

    Names of devices do not contain the framework's name: "CL", not "tinygrad:CL".
    """

    name: str

    def parameters(self, model: Any) -> Sequence[Parameter]:
        """Return the model's parameters; tied tensors are one parameter."""

    def unstored(self, model: Any) -> Mapping[str, str]:
        """Return the device, by name, of tensors that no checkpoint stores; "meta": no values."""
        return {}

    def layers(self) -> Sequence[str]:
        """Return the formats that `streamload.nn.replace_linears` can give layers of models."""
        return ()

    def coded(self, model: Any) -> Mapping[str, CodedWeight]:
        """Return the weights that the model holds quantized, by each of their names."""
        return {}

    def changed_names(
        self,
        model: Any,
        tensors: Callable[[], Mapping[str, Seen]],
        versions: Mapping[str, Mapping[str, Any]],
    ) -> tuple[Mapping[str, str], Sequence[str]] | None:
        """Follow the code with which a model's modules change what they load.

        ``tensors`` describes each tensor; ``versions`` are facts that modules stored. Returns by
        each name that remains, the name before, and reasons why code cannot be followed; None if
        the model has no such code.
        """
        return None

    def followed_by(self, model: Any) -> Sequence[str]:
        """Return the names of modules that want to be called after a load."""
        return ()

    def after_load(self, model: Any, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Call what `followed_by` names, and let buffers without values raise when they are used.

        ``missing`` and ``unexpected`` are names of tensors.
        """
        return

    def swap(self, model: Any, formats: Mapping[str, str]) -> Swap:
        """Return modules that hold weights quantized; the model is unchanged until `Swap.put`.

        ``formats`` are by a name of the parameter; `Swap.coded` lacks weights that no module can
        hold. Raises ValueError if there are no modules for a format.
        """
        return NO_SWAP

    def tensor(self, device: Device, buffer: Buffer, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Return the framework's tensor over a buffer, without a copy."""
        return buffer

    def device(self, name: str) -> Device:
        """Open a device; raises DeviceNotFoundError."""

    def canonical(self, name: str) -> str:
        """Return the canonical form of a device's name, without opening the device."""

    def default_device(self) -> str:
        """Return the default device's name; raises DeviceNotFoundError if there is none."""
        return self.candidates()[0]

    def candidates(self) -> Sequence[str]:
        """Return the names of devices that may exist here, best first."""

    def trusted(self, name: str) -> bool:
        """Whether a device is probed in this process: the probe can neither crash nor hang."""
        return False

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Test by an addition whether a device works; a crash ends the calling process.

        ``full``: also test every dtype, and the casts that the framework does itself.
        """

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """Return a dtype's status, found by computing on a real buffer in this process."""

    def lasting(self, name: str) -> bool:
        """Whether a probe's result here holds for other processes, so that it is cached on disk."""
        return False

    def fingerprint(self, name: str) -> str:
        """Return text that changes whenever a probe of the device may give another result."""
        return ""
