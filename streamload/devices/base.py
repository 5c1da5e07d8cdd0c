"""What a device, a framework and a parameter are to streamload.

A device is a few methods. There are two ways in: a *host-visible* device gives windows on its own
memory, and the cast writes there; a *staged* one copies from a staging buffer of the host. The
protocols say what is usual; the file of each framework states what is its own.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, overload, runtime_checkable

import numpy as np

from streamload.codecs.scheme import CodedWeight
from streamload.core.dtypes import DType
from streamload.core.system import bytes_at, trim_heap
from streamload.core.tensors import Block
from streamload.devices.allocators import NO_COSTS, AllocatorKind, TensorCosts
from streamload.errors import DeviceError

DTypeStatus = Literal["native", "emulated", "broken", "absent"]

Buffer = Any  # whatever the device's framework calls memory; only its device looks inside


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is and has.

    Attributes:
        name: canonical name, without the framework ("CL", "CPU:1", "host").
        framework: "tinygrad", "host", ....
        description: what the driver calls it.
        host_visible: the CPU can write its memory in place.
        shared_memory: its memory is the host's.
        free_nbytes: free bytes as the device tells; None where it does not.
        total_nbytes: bytes in all; None where it does not tell.
        largest_allocation_nbytes: the largest single allocation; None for no limit.
        max_transfer_nbytes: the largest single transfer; None for no limit.
        granularity_nbytes: allocations are rounded up to a multiple of this.
        allocator: how its allocator takes memory from the device.
        costs: what each tensor takes of the host beside its bytes.
        max_buffers: how many more buffers it can hold, whatever their size; None for no limit.
        threads: how many threads may write at once; 0 for the calling thread only.
        native_bf16: computes in bfloat16 natively, or in float16 no better.
        casts: casts what it was sent where that lies, exactly, and counts what changes.
        maps: it computes on memory of this process as it is: on a mapped file, see `OnFiles`.
        unsupported: names of dtypes that it cannot hold.
        caveat: what a plan cannot know of it, one sentence, or "".
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
    """What computing on a device showed.

    Attributes:
        device: its name.
        works: an addition came out right.
        problem: why it does not work, or "".
        dtypes: status of each dtype, by name: a real buffer was written, computed on, read back.
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
        """Give it back; no copy from it may be under way."""


BulkStage = Literal["wait", "read", "end", "copy"]


class Copy(NamedTuple):
    """Bytes of a slot that go to a device, and what the device casts them to.

    Attributes:
        at: offset in the slot.
        nbytes: how many.
        address: device address that they go to.
        kernel: what casts them there; 0 for bytes that stay as they are.
        numel: elements to cast.
        out: device address of the cast elements; ``address`` where they are cast in place.
        tally: device address of what the kernel counts: elements that overflowed, that became
            zero, and that changed at all, 8 bytes each; 0 where nothing is counted.
        blocks: of threads of the kernel.
        statistics: device address of what a kernel that quantises writes beside the codes.
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
class CopyTable(Sequence[Copy]):
    """Many copies as one table, for the compiled loop: its rows are made into `Copy` when asked.

    Attributes:
        rows: the fields of a `Copy` each; int64, C-contiguous.
    """

    rows: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> Copy: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Copy, ...]: ...
    def __getitem__(self, at: int | slice) -> Copy | tuple[Copy, ...]:
        """One copy, or several."""
        found = self.rows[at].tolist()
        return tuple(map(Copy._make, found)) if isinstance(at, slice) else Copy(*found)


@dataclass(frozen=True, slots=True)
class Read:
    """One read into a slot, and where its bytes go.

    Attributes:
        offset: first file byte; of a direct read a multiple of the reader's alignment.
        asked: bytes to ask for.
        needed: how many of those there must be; fewer where the read runs past the file's end, 0
            where the slot holds what is to be copied.
        copies: in the order in which they are made.
    """

    offset: int
    asked: int
    needed: int
    copies: Sequence[Copy]


@dataclass(frozen=True, slots=True)
class BulkFailure:
    """Where many reads and copies ended early.

    Attributes:
        index: of the read. Those before it have been read, and their copies begun.
        stage: "wait" (for a copy from the slot before), "read", "end" (of the file), or "copy" (or
            cast).
        code: errno of a read, or the status of the driver's call.
    """

    index: int
    stage: BulkStage
    code: int


class DeviceMemory(Protocol):
    """Memory of a device beside its buffers, zeros at first."""

    @property
    def address(self) -> int:
        """The device address of its first byte."""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive), when what was begun before has ended or not."""

    def write(self, start: int, data: np.ndarray[Any, Any]) -> None:
        """Write an array from byte ``start`` on; what is begun afterwards reads it.

        Any thread may.
        """

    def run(self, kernel: int, blocks: int, arguments: Sequence[int]) -> None:
        """Run a `BulkCopier.function`, with arguments of 64 bits each, to its end."""

    def close(self) -> None:
        """Give it back; nothing may be under way that uses it."""


class BulkCopier(Protocol):
    """What a device offers where many reads and copies can be done in one call."""

    def memory(self, nbytes: int) -> DeviceMemory:
        """Memory for tallies and for elements that are still to be cast; raises AllocationError."""

    def kernel(self, src: DType, dst: DType, clamp: bool) -> int:
        """What `Copy.kernel` is for a cast, compiled once; any thread may ask.

        Raises:
            UnsupportedCastError: it cannot be compiled.
            DeviceError: the driver does not take it.
        """

    def function(self, ptx: str, symbol: str) -> int:
        """What `Copy.kernel` is for a function in PTX, loaded once; any thread may ask.

        Raises:
            DeviceError: the driver does not take it.
        """

    def address(self, buffer: Any) -> int:
        """The device address of a buffer's first byte."""

    def ticket(self, slot: Staging) -> Ticket:
        """Of the copies that were begun from a slot last."""

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Read into the slots in turn, from the first on, and begin the copies.

        When it returns, all slots that were used may have copies under way: the `ticket` of each
        tells when they have ended. Drops the interpreter's lock.

        Args:
            fd: the file.
            reads: what to do, in order.
            slots: read ``i`` goes to slot ``i % len(slots)``.
            busy: how many of the slots, the last ones, may have copies under way; those are waited
                for before the slot is filled.
        """


class HostVisible(Protocol):
    """The way into a device whose memory the CPU writes in place."""

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Bytes ``start`` to ``stop`` (exclusive) of a host-visible buffer, writable.

        What they held before is lost. Valid inside the ``with``; several threads may hold windows
        on different bytes.
        """
        _refuse(self, "its memory cannot be written by the CPU")


class Staged(Protocol):
    """The way into a device that copies from a staging buffer of the host."""

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

    #: Many reads and copies in one call; None where the device has no such call.
    bulk: BulkCopier | None = None

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


class Device(HostVisible, Staged, Protocol):
    """Where parameters go. A device states one way in, and what differs from the defaults here."""

    @property
    def info(self) -> DeviceInfo:
        """What it is; looked up afresh, computes nothing."""

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate memory for one parameter; raises AllocationError."""

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read bytes back from the device: the raw bytes, whatever the dtype."""

    def release(self, buffer: Buffer) -> None:
        """Give back the memory of a buffer that nothing else uses: it goes with the buffer."""
        return None

    def trim(self) -> None:
        """Give back what the allocator keeps of freed memory."""
        return None

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        return None

    def follow(self, ticket: Ticket) -> None:
        """Let what the calling thread queues from now on come after a copy of this device."""
        ticket.wait()

    def mark(self) -> Ticket | None:
        """The end of what the calling thread has queued so far; None where it has ended."""
        self.synchronize()
        return None

    def allocated_nbytes(self) -> int | None:
        """What the framework's own counter says is allocated; None where it has none."""
        return None

    def counters(self) -> Mapping[str, int]:
        """The framework's own counters of memory in bytes, by their names there."""
        return {}


def _refuse(device: Any, problem: str) -> NoReturn:
    raise DeviceError(device.info.name, problem)


@runtime_checkable
class Addressed(Protocol):
    """What a device may offer besides: many buffers in one call, and where their bytes are.

    Those of a host-visible device may be written at their addresses, without a `Device.window`.
    """

    def address(self, buffer: Buffer) -> int:
        """The address of a buffer's first byte; its bytes follow each other."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        """Do what `Device.allocate` does, for several parameters, one after the other.

        Raises:
            AllocationError: one cannot be had; those before it have been given back.
        """


@runtime_checkable
class OnFiles(Protocol):
    """A device that computes on mapped files as they are."""

    def view(self, memory: mmap.mmap, start: int, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """A buffer over mapped bytes from ``start`` on; it keeps the map open.

        Args:
            memory: a private, writable map: what is written is copied, page by page.
            start: first byte, a multiple of the dtype's size.
            dtype: of whole bytes.
            shape: with at least one element.
        """


class HeapDevice(Addressed, Device, Protocol):
    """A device whose buffers are memory of this process, each in one piece."""

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[Buffer]:
        """Several buffers."""
        return [self.allocate(dtype, shape) for dtype, shape in kinds]

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """The buffer's own bytes."""
        return ctypes.string_at(self.address(buffer) + start, stop - start)

    @contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        """The buffer's own bytes."""
        view = bytes_at(self.address(buffer) + start, stop - start)
        try:
            yield view
        finally:
            with suppress(BufferError):  # the traceback of an error still refers to it
                view.release()

    def trim(self) -> None:
        """Hand freed heap memory back to the kernel, where the C library can."""
        trim_heap()


class Parameter(Protocol):
    """One parameter of a model, keyed by the memory it stands on.

    Attributes:
        names: all names under which the model holds it; tied parameters have several.
        shape: its shape.
        dtype: long name of its dtype.
        device: canonical name of the device that holds it, or held it before a load failed.
        nbytes: bytes of memory that it holds.
        keeps: the dtype that it keeps unless another is asked for; None where it has no say.
        fixed: why it can only be written in place (it is a view of ...), or "".
        refused: why it cannot be written at all, or "".
        invalid: whether an earlier load failed and left it without values.
        block: what it is of the checkpoint's tensor, where it holds one shard; None for all.
        shard: what is added to its name in a plan, where this process has several of its shards.
        span: the memory that it stands on, as (identity of the allocation, first byte, stop); None
            where it holds none. Two parameters whose bytes overlap in one allocation stand on the
            same memory.
        wrapped: its names as a wrapper of modules would have them (``module.``, ``_orig_mod.``).
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
        """Whether it has values that the model computes: no checkpoint has to hold them."""
        return False

    def memory(self) -> Sequence[tuple[int, int]]:
        """Where the CPU sees the bytes that it holds, as (address, bytes); () where it does not."""
        if self.span is None:
            return ()
        _, first, stop = self.span
        return ((first, stop - first),)

    def buffer(self) -> Buffer:
        """The memory that it holds, to be written in place."""

    def release(self) -> str:
        """Let go of the memory that it holds; it then holds nothing readable.

        Returns:
            "" if the memory is gone. Otherwise the parameter is as it was, and this says what may
            still hold it.
        """

    def attach(self, buffer: Buffer, dtype: DType) -> None:
        """Make it a tensor over the buffer."""

    def invalidate(self, keep: bool) -> None:
        """Make it hold nothing readable; using it then raises.

        Args:
            keep: keep the memory that it holds, for `revive` to show again. Until then it is
                reported as held, here and by `Framework.parameters` in a later load, so that the
                same memory is written again. Otherwise the parameter lets go of it.
        """

    def revive(self) -> None:
        """Stand on the kept memory again, which has been written; nothing where none is kept."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Modules for quantised weights that can stand in the place of a model's own.

    Attributes:
        coded: the weights that parameters will hold as codes, by each name of these.
        put: puts the modules in place, without values, and returns what lets the model be as it
            was. A codes' parameter goes on holding the memory of the weight until that is released.
        dense_nbytes: of the largest weight that these modules dequantise at once, to compute.
        holders: the classes of modules that can hold such weights, in words.
        refused: of each other weight, the class of its module.
    """

    coded: Mapping[str, CodedWeight]
    put: Callable[[], Callable[[], None]]
    dense_nbytes: int = 0
    holders: str = "none"
    refused: Mapping[str, str] = field(default_factory=dict)


def nothing() -> None:
    """Undo nothing."""


#: Of a model that stays as it is.
NO_SWAP = Swap({}, lambda: nothing)


class ModelTensors(Protocol):
    """A framework's tensors."""

    def parameters(self, model: Any) -> Sequence[Parameter]:
        """The model's parameters, tied ones once."""

    def unstored(self, model: Any) -> Mapping[str, str]:
        """Tensors of a model that no checkpoint has, with their devices ("meta": no values)."""
        return {}

    def coded(self, model: Any) -> Mapping[str, CodedWeight]:
        """The weights that parameters hold as codes, by each name of these."""
        return {}

    def swap(self, model: Any, formats: Mapping[str, str]) -> Swap:
        """Modules for weights that are quantised; the model is not touched before `Swap.put`.

        Args:
            model: whose parameters these are.
            formats: by name of a parameter. What no module can hold is not in `Swap.coded`.

        Raises:
            ValueError: there are no modules for a format.
        """
        return NO_SWAP

    def tensor(self, device: Device, buffer: Buffer, dtype: DType, shape: tuple[int, ...]) -> Any:
        """The framework's tensor over a buffer, without a copy: the buffer, where it is one."""
        return buffer


class DeviceFinder(Protocol):
    """A framework's devices, by their names without the framework."""

    def device(self, name: str) -> Device:
        """Open a device; raises DeviceNotFoundError."""

    def canonical(self, name: str) -> str:
        """The canonical form of a device's name, without opening it."""

    def default_device(self) -> str:
        """The device that the framework would use; raises DeviceNotFoundError if it has none."""
        return self.candidates()[0]

    def candidates(self) -> Sequence[str]:
        """Devices worth a probe, best first."""


class Prober(Protocol):
    """What computing on a framework's devices shows."""

    def trusted(self, name: str) -> bool:
        """Whether computing there cannot end or hang this process: a probe needs no child."""
        return False

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Compute on the device, in this process; the caller runs it in a child if need be.

        With ``full``, every dtype and every cast of its own is tried too.
        """

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """What a dtype is on a device, by computing on a real buffer in this process."""

    def lasting(self, name: str) -> bool:
        """Whether what this process computes there, any other would: it is kept as a child's is."""
        return False

    def fingerprint(self, name: str) -> str:
        """Text that changes whenever a probe of the device may come out differently."""
        return ""


class Framework(ModelTensors, DeviceFinder, Prober, Protocol):
    """One framework. Its file states what differs from the defaults here."""

    name: str
