"""What a device and a framework are to streamload, and how they are found.

A device is a few methods. There are two ways in: a *host-visible* device gives windows on its own
memory, and the cast writes there; a *staged* one copies from a staging buffer of the host. One
file a framework implements both `Device` and `Framework`, and is imported only when asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, overload, runtime_checkable

import numpy as np

from streamload.dtypes import DType
from streamload.errors import DeviceNotFoundError
from streamload.nesting import parse_json
from streamload.plan.allocators import NO_COSTS, AllocatorKind, TensorCosts

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
        maps_host_memory: copies from windows on a mapped file as well as from staging.
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
    maps_host_memory: bool = False
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


BulkStage = Literal["wait", "read", "end", "copy", "lock"]


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
    """

    at: int
    nbytes: int
    address: int
    kernel: int = 0
    numel: int = 0
    out: int = 0
    tally: int = 0
    blocks: int = 0


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
        offset: first file byte; of a window a multiple of the page, of a direct read one of the
            reader's alignment.
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
        stage: "wait" (for a copy from the slot before), "read", "end" (of the file), "copy" (or
            cast) or "lock" (of a window's pages).
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

    def window(self, fd: int, file_nbytes: int) -> Staging:
        """A slot for `run` that is a window on a file: its copies are from the page cache.

        What it shows is page-locked from its read on until the slot's next read, or its `close`.
        It has no `view`.

        Raises:
            AllocationError: the file cannot be mapped.
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
            fd: the file; windows are of this file.
            reads: what to do, in order.
            slots: read ``i`` goes to slot ``i % len(slots)``; of one kind, staging or windows.
            busy: how many of the slots, the last ones, may have copies under way; those are waited
                for before the slot is filled.
        """


class Device(Protocol):
    """Where parameters go."""

    @property
    def info(self) -> DeviceInfo:
        """What it is; looked up afresh, computes nothing."""

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate memory for one parameter; raises AllocationError."""

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Bytes ``start`` to ``stop`` (exclusive) of a host-visible buffer, writable.

        What they held before is lost. Valid inside the ``with``; several threads may hold windows
        on different bytes.
        """

    def staging(self, nbytes: int) -> Staging:
        """Host memory that this device copies from, pinned where it has such."""

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """Copy ``nbytes`` of staging from ``start`` on to byte ``offset`` of the buffer.

        May be asynchronous: those bytes of staging are free again after ``Ticket.wait()``.
        """

    @property
    def bulk(self) -> BulkCopier | None:
        """Many reads and copies in one call; None where the device has no such call."""

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

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read bytes back from the device: the raw bytes, whatever the dtype."""

    def release(self, buffer: Buffer) -> None:
        """Give back the memory of a buffer that nothing else uses."""

    def trim(self) -> None:
        """Give back what the allocator keeps of freed memory."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def allocated_nbytes(self) -> int | None:
        """What the framework's own counter says is allocated; None where it has none."""

    def counters(self) -> Mapping[str, int]:
        """The framework's own counters of memory in bytes, by their names there."""


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


class Parameter(Protocol):
    """One parameter of a model, keyed by the memory it stands on."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which the model holds it; tied parameters have several."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> str:
        """Long name of its dtype."""

    @property
    def device(self) -> str | None:
        """Canonical name of the device that holds it, or held it before a load failed, or None."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""

    @property
    def keeps(self) -> DType | None:
        """The dtype that it keeps unless another is asked for; None where it has no say."""

    @property
    def fixed(self) -> str:
        """Why it can only be written in place (it is a view of ...), or ""."""

    @property
    def refused(self) -> str:
        """Why it cannot be written at all, or ""."""

    @property
    def invalid(self) -> bool:
        """Whether an earlier load failed and left it without values."""

    @property
    def span(self) -> tuple[int, int, int] | None:
        """The memory that it stands on; None where it holds none.

        As (identity of the allocation, first byte, stop): two parameters whose bytes overlap in
        one allocation stand on the same memory.
        """

    def memory(self) -> Sequence[tuple[int, int]]:
        """Where the CPU sees the bytes that it holds, as (address, bytes); () where it does not."""

    def buffer(self) -> Buffer:
        """The memory that it holds, to be written in place."""

    def release(self) -> str:
        """Let go of the memory that it holds; it then holds nothing readable.

        Returns:
            "" if the memory is gone. Otherwise what is known of who still holds it, and the
            parameter is as it was.
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


class Framework(Protocol):
    """One framework's tensors and devices."""

    name: str

    def parameters(self, model: Any) -> list[Parameter]:
        """The model's parameters, tied ones once."""

    def unstored(self, model: Any) -> Mapping[str, str]:
        """Tensors of a model that no checkpoint has, with their devices ("meta": no values)."""

    def device(self, name: str) -> Device:
        """Open a device by its name without the framework; raises DeviceNotFoundError."""

    def canonical(self, name: str) -> str:
        """The canonical form of a device's name, without opening it."""

    def default_device(self) -> str:
        """The device that the framework would use; raises DeviceNotFoundError if it has none."""

    def candidates(self) -> Sequence[str]:
        """Devices worth a probe, best first."""

    def trusted(self, name: str) -> bool:
        """Whether computing there cannot end or hang this process: a probe needs no child."""

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Compute on the device, in this process; the caller runs it in a child if need be.

        With ``full``, every dtype and every cast of its own is tried too.
        """

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """What a dtype is on a device, by computing on a real buffer in this process."""

    def lasting(self, name: str) -> bool:
        """Whether what this process computes there, any other would: it is kept as a child's is."""

    def fingerprint(self, name: str) -> str:
        """Text that changes whenever a probe of the device may come out differently."""

    def tensor(self, device: Device, buffer: Buffer, dtype: DType, shape: tuple[int, ...]) -> Any:
        """The framework's tensor over a buffer, without a copy."""


class HostStaging:
    """Staging in a page-aligned anonymous map, which is given back when it is closed."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, max(nbytes, 1))
        self.view = memoryview(self._map)[:nbytes]

    def close(self) -> None:
        """Give the memory back."""
        with suppress(BufferError):  # an error's traceback refers to it: it goes then
            self.view.release()
            self._map.close()


class _Done:
    """The ticket of a copy that has finished."""

    def wait(self) -> None:
        """Return at once."""


#: The ticket of every copy that has finished when it returns.
DONE = _Done()


def trim_heap() -> None:
    """Hand freed heap memory back to the kernel, where the C library can."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MIN_POPULATED_NBYTES = 16 * mmap.PAGESIZE


def populate(window: memoryview) -> None:
    """Have the kernel fill a window with fresh pages in one call, where it can.

    First touch is the limit of a load into fresh memory, and a fault for each 4 KiB page is a good
    part of that. Tried beside it: huge pages (MADV_HUGEPAGE). They are faster where the machine has
    2 MiB blocks at hand, and were 2 to 3 times slower (2.2 to 2.8 CPU seconds for 2.3 GB, against
    1.1) in virtual machines whose host takes freed blocks back; this way was the faster one or
    level there, 0.74 s for 1.72 s of the same load to OpenCL.
    """
    if window.nbytes < _MIN_POPULATED_NBYTES or sys.platform != "linux":
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(window))
    # whole pages inside the window: what lies around it is not ours to touch
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + window.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(first, stop - first, _MADV_POPULATE_WRITE)  # refused: pages come as touched


def scatter(
    fd: int,
    offset: int,
    addresses: np.ndarray[Any, np.dtype[np.int64]],
    sizes: np.ndarray[Any, np.dtype[np.int64]],
) -> bool:
    """Read bytes of a file that follow each other to many places at once, by one preadv(2).

    Args:
        fd: the file.
        offset: first file byte.
        addresses: where to; at most 1024, the least IOV_MAX of the systems that have the call.
        sizes: how many bytes to each.

    Returns:
        Whether all of it was read. Otherwise what those places hold is undefined.
    """
    preadv = _preadv()
    if preadv is None:
        return False
    places = np.column_stack((addresses, sizes))  # struct iovec: an address and a size
    return bool(preadv(fd, places.ctypes.data, len(places), offset) == sizes.sum())


@cache
def _preadv() -> Any:
    """The call with an offset of 64 bits, which drops the interpreter's lock; None without it."""
    libc = ctypes.CDLL(None)
    found = getattr(libc, "preadv64", None) or getattr(libc, "preadv", None)
    if found is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    found.restype = ctypes.c_ssize_t
    return found


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


_FRAMEWORKS = {
    "tinygrad": "streamload.devices.tinygrad",
    "torch": "streamload.devices.torch",
    "host": "streamload.devices.host",
}
# torch's own spelling; tinygrad's names are in upper case
_TORCH_NAME = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")


def framework(name: str) -> Framework:
    """Import a framework's file; raises DeviceNotFoundError where it is not installed."""
    _lend_caches()
    try:
        module = importlib.import_module(_FRAMEWORKS[name])
    except KeyError:
        raise DeviceNotFoundError(name, "no such framework", working=tuple(_FRAMEWORKS)) from None
    except ImportError as error:
        raise DeviceNotFoundError(name, f"it cannot be imported: {error}") from error
    return module.FRAMEWORK  # type: ignore[no-any-return]


@cache
def _lend_caches() -> None:
    """Under a home that cannot be written, lend compilers a folder until this process ends.

    Without one PoCL (POCL_CACHE_DIR) does not compile at all, and tinygrad (CACHEDB) unless it is
    told to keep nothing (CACHELEVEL). They are told by the environment, before they are loaded; a
    tinygrad that is loaded already has read it.
    """
    try:
        _make_private(_cache_home())
        with tempfile.TemporaryFile(dir=_cache_home()) as file:
            file.write(b"x")  # a disk may be full
        return
    except OSError:
        pass
    loaded: Any = sys.modules.get("tinygrad.helpers")
    try:
        lent = tempfile.mkdtemp(prefix="streamload-cache-")
    except OSError:  # nothing can be written here
        os.environ["CACHELEVEL"] = "0"
        if loaded is not None:
            loaded.CACHELEVEL.value = 0
        return
    atexit.register(shutil.rmtree, lent, ignore_errors=True)
    if "CACHEDB" not in os.environ:
        os.environ["CACHEDB"] = os.path.join(lent, "cache.db")
        if loaded is not None:
            loaded.CACHEDB = os.environ["CACHEDB"]
    os.environ.setdefault("POCL_CACHE_DIR", os.path.join(lent, "pocl"))


def framework_of(model: Any) -> str | None:
    """Name of the framework whose tensors a model holds, without importing any; None if empty.

    Looks at the classes of the model and of what it holds, a few levels deep, in order. Arrays of
    numpy decide where there is nothing else: models of every framework keep some beside.
    """
    seen: set[int] = set()
    found: str | None = None
    level: list[Any] = [model]
    for _ in range(8):
        following: list[Any] = []
        for obj in level:
            if id(obj) in seen:
                continue
            seen.add(id(obj))
            roots = {cls.__module__.partition(".")[0] for cls in type(obj).__mro__}
            if "torch" in roots:
                return "torch"
            if "tinygrad" in roots and type(obj).__name__ == "Tensor":
                return "tinygrad"
            arrays = roots & {"numpy", "streamload"}
            if arrays and type(obj).__name__ in ("ndarray", "InvalidArray"):
                found = "host"
            if isinstance(obj, Mapping):
                following.extend(obj.values())
            elif isinstance(obj, (list, tuple)):
                following.extend(obj)
            else:
                following.extend(getattr(obj, "__dict__", {}).values())
        level = following
    return found


def split_name(device: str) -> tuple[str | None, str]:
    """Split "tinygrad:CL" into framework and device; the framework is None where not named."""
    head, _, rest = device.partition(":")
    if head.lower() in _FRAMEWORKS and rest:
        return head.lower(), rest
    if device.lower() == "host":
        return "host", "host"
    if device.lower() in _FRAMEWORKS:
        return device.lower(), ""
    return None, device


def spelled_as(device: str) -> str:
    """The framework in whose spelling a device is named: "cuda:0" is torch's, "CUDA" tinygrad's."""
    return "torch" if _TORCH_NAME.fullmatch(device) else "tinygrad"


def installed(framework_name: str) -> bool:
    """Whether a framework could be imported; imports nothing."""
    return framework_name == "host" or importlib.util.find_spec(framework_name) is not None


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """The environment variables whose names begin with one of the prefixes."""
    return {key: value for key, value in os.environ.items() if key.startswith(prefixes)}


def environment_device() -> str | None:
    """``STREAMLOAD_DEVICE``, or None where it is not set."""
    return os.environ.get("STREAMLOAD_DEVICE") or None


def environment_fp16_cast() -> Literal["device", "llvm"] | None:
    """What ``SUPPORT_BF16`` asks for: "1" fp16 by the device's cast, "0" by the LLVM cast.

    Raises:
        ValueError: it is set to something else.
    """
    value = os.environ.get("SUPPORT_BF16", "")
    choices: dict[str, Literal["device", "llvm"] | None] = {"": None, "1": "device", "0": "llvm"}
    if value not in choices:
        raise ValueError(f"SUPPORT_BF16 is {value!r}; expected 0 or 1")
    return choices[value]


_PROBES: dict[tuple[str, str, bool], ProbeResult] = {}
_PROBE_TIMEOUT_S = 120.0
_ROOT = str(Path(__file__).absolute().parents[2])


def probe(
    framework_name: str, device: str, *, full: bool = False, timeout_s: float = _PROBE_TIMEOUT_S
) -> ProbeResult:
    """Compute on a device, in a child process if need be, and remember what came out.

    An addition always; with ``full`` every dtype and the device's own casts too (seconds).

    The child takes nothing from compile caches, since a warm one hides a missing compiler, and its
    stderr is captured. Results are kept on disk under a fingerprint of what they depend on
    (versions, drivers, GPUs, compilers), where a cache directory can be written: the first kernels
    of a process took 18 of the 50 ms before the first read of a load to one H200. A child that
    takes longer than ``timeout_s`` is ended, with all that it started: the device does not work.
    """
    owner = framework(framework_name)
    key = (framework_name, owner.canonical(device), full)
    if key in _PROBES:
        return _PROBES[key]
    trusted = owner.trusted(device)
    if trusted and not owner.lasting(device):
        _PROBES[key] = owner.probe(device, full)
        return _PROBES[key]
    parts = ["probe", *map(str, key), owner.fingerprint(device), sys.version, sys.executable]
    result = _read_probe(read_kept(*parts))
    if result is None:
        result = owner.probe(device, full) if trusted else _probe_in_child(*key, timeout_s)
        # a failure may be mended without the fingerprint changing; and what seems broken in a
        # process that does other things may have found the device full
        if result.works and not (trusted and "broken" in result.dtypes.values()):
            keep(json.dumps(asdict(result)).encode(), *parts)
    _PROBES[key] = result
    return result


def nvidia_parts() -> list[str]:
    """What NVIDIA's driver for Linux says of itself and of each GPU: for fingerprints.

    Folders that are kept may be shared by machines that differ in their GPUs alone.
    """
    root = Path("/proc/driver/nvidia")
    parts = []
    for path in (root / "version", *sorted(root.glob("gpus/*/information"))):
        with suppress(OSError):
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
    return parts


def _probe_in_child(framework_name: str, device: str, full: bool, timeout_s: float) -> ProbeResult:
    code = (
        "import json, sys; from dataclasses import asdict; from streamload.devices import base; "
        "result = base.framework(sys.argv[1]).probe(sys.argv[2], sys.argv[3] == 'True'); "
        "print('\\n' + json.dumps(asdict(result)))"
    )
    variables = os.environ | {
        "CACHELEVEL": "0",  # of tinygrad's cache
        # without the current folder, by any of its names: what lies in a folder of downloads
        # is not to be imported (-P leaves it out, too); this package is found wherever it is
        "PYTHONPATH": os.pathsep.join([*filter(os.path.isabs, sys.path), _ROOT]),
    }
    hint = ""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="streamload-probe-"))
        except OSError:
            hint = "; no folder for temporary files can be written, which compilers may need: "
            hint += "set TMPDIR to one that can"
        else:  # PoCL and others compile below XDG_CACHE_HOME
            variables |= {"XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": folder}
        # files, not pipes: a compiler left behind would hold a pipe open
        stdout, stderr = (stack.enter_context(_nameless_file()) for _ in range(2))
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", code, framework_name, device, str(full)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult(device, False, f"no child process could be started: {error}")
        try:
            child.wait(timeout_s)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # what it started, too
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return ProbeResult(device, False, f"it did not answer in {timeout_s:g} s")
        lines, said = (_lines(file) for file in (stdout, stderr))
    result = _read_probe(lines[-1].encode() if lines else None)
    if result is None:
        died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit {child.returncode}"
        result = ProbeResult(device, False, f"{died}: {said[-1] if said else 'no message'}")
    return result if result.works else replace(result, problem=result.problem + hint)


def _nameless_file() -> BinaryIO:
    """A file in no folder, which need not be one that can be written, where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("streamload"), "w+b")
    return tempfile.TemporaryFile()


def _lines(file: BinaryIO) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def _read_probe(data: bytes | None) -> ProbeResult | None:
    try:
        found = parse_json(data or b"")
        casts = tuple((src, dst) for src, dst in found.pop("device_casts"))
        return ProbeResult(**found, device_casts=casts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


# --- what is kept for later processes -------------------------------------------------------------

_FORMAT = "2"  # raised when the same IR is compiled to something else, or kept otherwise
_SEAL_NBYTES = hashlib.sha256().digest_size


def read_kept(kind: str, *depends_on: str) -> bytes | None:
    """What `keep` kept of the same ``kind`` for the same texts, or None.

    It may be run, so it counts only if nobody else can have written it, as ssh has it for its
    keys: the file and its folder belong to this user or to root, and nobody else may write there.
    Ahead of it is a digest of it and of the file's name: what was damaged or cut short, or was
    kept for something else, does not count either.
    """
    try:
        path = _kept_file(kind, depends_on)
        if not _is_private(os.stat(path.parent)):
            return None
        with path.open("rb") as file:
            data = file.read() if _is_private(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    seal, found = data[:_SEAL_NBYTES], data[_SEAL_NBYTES:]
    return found if seal == _seal(path, found) else None


def keep(data: bytes, kind: str, *depends_on: str) -> None:
    """Keep what took long to find out, where there is a place that `read_kept` trusts.

    Whoever reads the file sees it whole or not at all.

    Args:
        data: what was found, or compiled.
        kind: first part of the file's name.
        depends_on: all that it was made from.
    """
    temporary = None
    try:
        path = _kept_file(kind, depends_on)
        _make_private(path.parent)
        if not _is_private(os.stat(path.parent)):
            return
        opened, temporary = tempfile.mkstemp(dir=path.parent)
        with open(opened, "wb") as file:
            file.write(_seal(path, data) + data)
        os.replace(temporary, path)
        temporary = None
    except OSError:
        pass  # nothing can be written: the next process does it again
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def _kept_file(kind: str, depends_on: tuple[str, ...]) -> Path:
    """The file of what is kept: ``kind`` with a digest of all that it depends on.

    Raises:
        FileNotFoundError: there is no place for it.
    """
    if os.name != "posix":
        raise FileNotFoundError("who may write a file is not told by its mode")
    digest = hashlib.sha256("\n".join((_FORMAT, *depends_on)).encode()).hexdigest()[:32]
    # a folder of its own: earlier versions made the one above under any umask
    return _cache_home() / "streamload" / "kept" / f"{kind}-{digest}"


def _cache_home() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(root):  # a user without a home
        raise FileNotFoundError(f"{root} is no place for what is kept")
    return Path(root)


def _make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, this user's alone under any umask."""
    for one in (*reversed(folder.parents), folder):
        one.mkdir(mode=0o700, exist_ok=True)


def _is_private(info: os.stat_result) -> bool:
    return info.st_uid in (0, os.geteuid()) and not info.st_mode & 0o022


def _seal(path: Path, data: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + data).digest()
