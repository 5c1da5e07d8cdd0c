"""Copies to CUDA devices by the driver's own calls, in the context of any framework.

Slots are page-locked; each has an event, and shares one of the context's few streams, on which cast
kernels run, too.
Calls that return at once keep the interpreter's lock: with many threads, to release and regain it
takes longer than the call. Source: the CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.cast_cuda import SYMBOL
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.interrupt import nothing
from streamload.core.memory import available_cpus, available_system_nbytes, overhead_nbytes
from streamload.core.system import address_of, direct_memory, populate
from streamload.core.units import format_bytes
from streamload.errors import AllocationError, DeviceError

_STREAMS = 4
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered after the null stream
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_...: a wait sleeps instead of spinning

# With more CPUs than this, waits for copies spin: docs/measurements.md, "Waits that spin". With
# fewer, a spinning wait would keep other threads from reading.
_SLEEP_CPUS = 8
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_LOG_BUFFER, _LOG_BUFFER_NBYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
_LOG_NBYTES = 4096
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_int, _uint, _size, _u64 = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetDevice": (ctypes.POINTER(_int),),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_out,),
    "cuDeviceGet": (ctypes.POINTER(_int), _int),
    "cuDeviceGetAttribute": (ctypes.POINTER(_int), _int, _int),
    "cuDeviceGetName": (ctypes.c_char_p, _int, _int),
    "cuDevicePrimaryCtxRetain": (_out, _int),
    "cuEventCreate": (_out, _uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventQuery": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuInit": (_uint,),
    # grid, block, bytes of shared memory; stream, parameters, options
    "cuLaunchKernel": (_pointer, *(_uint,) * 7, _pointer, _out, _pointer),
    "cuMemAlloc_v2": (ctypes.POINTER(_u64), _size),
    "cuMemFree_v2": (_u64,),
    "cuMemGetInfo_v2": (ctypes.POINTER(_u64), ctypes.POINTER(_u64)),
    "cuMemHostRegister_v2": (_pointer, _size, _uint),
    "cuMemHostUnregister": (_pointer,),
    "cuMemcpyDtoHAsync_v2": (_pointer, _u64, _size, _pointer),
    "cuMemcpyHtoDAsync_v2": (_u64, _pointer, _size, _pointer),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _size, _pointer),
    "cuModuleGetFunction": (_out, _pointer, ctypes.c_char_p),
    "cuModuleLoadDataEx": (_out, ctypes.c_char_p, _uint, ctypes.POINTER(_int), _out),
    "cuModuleUnload": (_pointer,),
    "cuStreamCreate": (_out, _uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamGetCtx": (_pointer, _out),
    "cuStreamQuery": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_int),),
}


class Driver:
    """The CUDA driver's library, loaded twice.

    Attributes:
        quick: for calls that return at once: they keep the interpreter's lock.
        slow: for calls that may wait: they release it.

    Raises OSError: there is no driver.
    """

    def __init__(self) -> None:
        self.quick: Any = ctypes.PyDLL("libcuda.so.1")
        self.slow: Any = ctypes.CDLL("libcuda.so.1")
        for library in (self.quick, self.slow):
            for name, types in _PROTOTYPES.items():
                getattr(library, name).argtypes = types

    def reason(self, status: int) -> str:
        """Return the driver's text for a status."""
        text = ctypes.c_char_p()
        self.quick.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


@cache
def _driver() -> Driver:
    return Driver()


_thread = threading.local()


def allow_captures() -> None:
    """Let other threads capture CUDA graphs while this thread allocates, and waits for copies.

    Without this, such calls make a capture in another thread fail.
    """
    if not getattr(_thread, "allows_captures", False):
        _driver().quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        _thread.allows_captures = True


class Context:
    """A device's CUDA context, in which its copies run."""

    def __init__(self, name: str, handle: int) -> None:
        self.name, self.handle, quick = name, handle, _driver().quick
        self._memcpy, self._record = quick.cuMemcpyHtoDAsync_v2, quick.cuEventRecord
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._query, self._wait = quick.cuStreamQuery, quick.cuStreamWaitEvent
        self._launch, self._of_stream = quick.cuLaunchKernel, quick.cuStreamGetCtx
        self._popped = ctypes.byref(ctypes.c_void_p())

    @classmethod
    @cache
    def primary(cls, name: str, index: int) -> Context:
        """Return the context that the CUDA runtime, and so torch, uses on a device."""
        context, device, handle = cls(name, 0), ctypes.c_int(), ctypes.c_void_p()
        context.call("cuInit", 0)
        context.call("cuDeviceGet", ctypes.byref(device), index)
        # never released: it belongs to the process, and torch holds it, too
        context.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
        context.handle = handle.value or 0
        return context

    def of_stream(self, stream: int) -> Context:
        """Return the context of a stream of this device; of stream 0, the thread's current one.

        That may be another: tinygrad leaves its own current, and torch makes its streams there.
        """
        handle = ctypes.c_void_p()
        status = self._of_stream(stream, ctypes.byref(handle))
        if status or handle.value in (None, self.handle):  # an error: the thread has none
            return self
        return _other_context(self, handle.value)

    def check(self, status: int, call: str) -> None:
        """Raise DeviceError if ``status``, returned by ``call``, is not 0."""
        if status:
            raise DeviceError(self.name, f"{call}: {_driver().reason(status)}")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that may wait; raises DeviceError if it fails."""
        status = getattr(_driver().slow, function)(*arguments)
        self.check(status, function.removesuffix("_v2"))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context the thread's current one inside the ``with``."""
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._pop(self._popped)

    @cached_property
    def integrated(self) -> bool:
        """Whether the device has no memory of its own, but the host's, as on Jetson boards."""
        return bool(self.attribute(_INTEGRATED))

    def attribute(self, number: int) -> int:
        """Return the value of a ``CUdevice_attribute``."""
        device, value = ctypes.c_int(), ctypes.c_int()
        with self.current():
            self.call("cuCtxGetDevice", ctypes.byref(device))
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def memory_nbytes(self) -> tuple[int, int]:
        """Return (free, total) bytes.

        The driver's free bytes are MemFree on an integrated device: the page cache counts as used.
        MemAvailable is returned in their place. No cgroup limits it, since none is charged.
        """
        free, total = ctypes.c_uint64(), ctypes.c_uint64()
        with self.current():
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if not self.integrated:
            return free.value, total.value
        return min(total.value, available_system_nbytes()), total.value

    def check_room(self, nbytes: int, trim: Callable[[], None] = nothing) -> None:
        """Raise AllocationError if an integrated device would take memory that the host lacks.

        The host's memory is measured for each allocation: other programs take some, and the
        driver takes the last of it. ``trim`` frees what an allocator caches.
        """
        if not self.integrated:
            return
        for free in (trim, nothing):
            available = available_system_nbytes()
            # half of it is for memory that the process itself takes, as in `Headroom`
            if nbytes <= available - overhead_nbytes(available) // 2:
                return
            free()
        problem = (
            f"it shares the host's memory, and {format_bytes(available)} of that are available "
            "now; stop other programs, or state a smaller budget="
        )
        raise AllocationError(self.name, problem, nbytes=nbytes)

    def launch(self, kernel: int, blocks: int, stream: int, arguments: Sequence[int]) -> None:
        """Queue a kernel with 64-bit arguments on a stream."""
        values = (ctypes.c_uint64 * len(arguments))(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        shape = (blocks, 1, 1, BLOCK_THREADS, 1, 1)
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        status = self._launch(kernel, *shape, 0, stream, places, None)
        self._pop(self._popped)
        self.check(status, "cuLaunchKernel")

    def finish(self, stream: int) -> None:
        """Wait for all work queued on a stream; 0 is the null stream."""
        with self.current():
            status = self._query(stream)
            if status == _NOT_READY:  # rare
                status = _driver().slow.cuStreamSynchronize(stream)
            self.check(status, "earlier work on the device")

    def order(self, stream: int, events: Iterable[ctypes.c_void_p]) -> None:
        """Make work queued on a stream from now on wait for events."""
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        status = max(self._wait(stream, event, 0) for event in events)
        self._pop(self._popped)
        self.check(status, "cuStreamWaitEvent")

    def copy(self, staging: PinnedStaging, start: int, nbytes: int, address: int) -> None:
        """Start copying bytes of staging to a device address; `PinnedStaging.event` follows."""
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        status = self._memcpy(address, staging.address + start, nbytes, staging.stream)
        # recorded again after each copy: a wait is for the last one
        recorded = self._record(staging.event, staging.stream) if not status else 0
        self._pop(self._popped)
        self.check(status, "cuMemcpyHtoDAsync")
        self.check(recorded, "cuEventRecord")


class Event(ctypes.c_void_p):
    """A ``CUevent``, as the ticket of the copies that were started before it was recorded last.

    It is destroyed when nothing refers to it: no ticket outlives its event, whatever is closed. Any
    thread may wait for it, or be the last to drop it.
    """

    def __init__(self, context: Context) -> None:
        """Create an event in the current context; its waits spin if there are CPUs for that."""
        super().__init__()
        self._context = context
        flags = _DISABLE_TIMING if _spins() else _DISABLE_TIMING | _BLOCKING_SYNC
        context.call("cuEventCreate", ctypes.byref(self), flags)
        # not at exit, while other threads may wait
        weakref.finalize(self, _destroy, context, self.value or 0).atexit = False

    @property
    def events(self) -> tuple[Event]:
        """The event, for streams that wait."""
        return (self,)

    def wait(self) -> None:
        """Return when the copies have ended; raise DeviceError if one failed."""
        if _driver().quick.cuEventQuery(self) == 0:  # most have: keep the interpreter's lock
            return
        self._context.check(_driver().slow.cuEventSynchronize(self), "a copy")


def _destroy(context: Context, event: int) -> None:
    with suppress(DeviceError), context.current():
        _driver().slow.cuEventDestroy_v2(event)


@cache
def _other_context(context: Context, handle: int) -> Context:
    other, devices = Context(context.name, handle), (ctypes.c_int(), ctypes.c_int())
    for each, device in zip((context, other), devices, strict=True):
        with each.current():
            each.call("cuCtxGetDevice", ctypes.byref(device))
    return other if devices[0].value == devices[1].value else context


# `_STREAMS` for all slots of a context, so that kernels of one overlap copies of another; more copy
# no faster: docs/measurements.md, "Streams of a context".
_sharing = threading.Lock()
_users = Counter[tuple[int, int]]()  # slots by (context, stream), under the lock


def _take_stream(context: Context) -> int:
    """Return a ``CUstream`` for a slot; slots share a few of them. The context must be current."""
    with _sharing:
        mine = [key for key in _users if key[0] == context.handle]
        if len(mine) < _STREAMS:
            created = ctypes.c_void_p()
            context.call("cuStreamCreate", ctypes.byref(created), _NON_BLOCKING)
            mine = [(context.handle, created.value or 0)]
        key = min(mine, key=_users.__getitem__)
        _users[key] += 1
        return key[1]


def _give_back(context: Context, stream: int) -> None:
    """Return the stream of a slot whose copies have ended; the last slot's return destroys it."""
    with _sharing:
        key = (context.handle, stream)
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            _driver().slow.cuStreamDestroy_v2(stream)


@cache
def _spins() -> bool:
    return available_cpus() > _SLEEP_CPUS


class _Stream:
    """Base of memory with an event, and with a CUDA stream that runs its copies in order.

    Attributes:
        stream: a ``CUstream``, which other memory may share.
        event: recorded after each copy; deleted as the memory is closed.
    """

    what: str
    event: Event

    def __init__(self, context: Context) -> None:
        self._context = context
        self._slow = _driver().slow
        self.stream = 0

    def _create(self) -> None:
        self.stream = _take_stream(self._context)
        self.event = Event(self._context)

    @contextmanager
    def _allocating(self, name: str, nbytes: int) -> Iterator[None]:
        """Close this memory and raise AllocationError for ``name`` if the ``with`` block fails."""
        try:
            yield
        except (DeviceError, OSError) as error:
            with suppress(DeviceError):
                self.close()
            problem = error.problem if isinstance(error, DeviceError) else str(error)
            raise AllocationError(name, problem, nbytes=nbytes) from error

    @abstractmethod
    def _free(self) -> int:
        """Free the memory in the current context; return the driver's status."""

    def close(self) -> None:
        """Free memory and stream; waits for a copy under way."""
        failure = 0
        # raises if the context is gone, which has freed all that was page-locked in it
        with self._context.current():
            if self.stream:  # the event is not enough: the last copy may have failed before it
                failure = self._slow.cuStreamSynchronize(self.stream)
                _give_back(self._context, self.stream)
            self.stream = 0
            vars(self).pop("event", None)
            failure = self._free() or failure
        if failure:
            self._context.check(failure, f"giving {self.what} back")


class PinnedStaging(_Stream):
    """A page-locked staging slot.

    It uses huge pages if it can: docs/measurements.md, "Page-locked slots". `view`: the bytes; they
    begin at a page.
    """

    what = "staging"

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
        allow_captures()  # a thread that copies has staging of its own
        self._registered = False
        self.view = memoryview(b"")
        with self._allocating(self.what, nbytes):
            self.view = direct_memory(max(nbytes, 1))
            populate(self.view)  # by this thread: the driver locks pages for one at a time
            self.address = address_of(self.view)
            with context.current():
                context.call("cuMemHostRegister_v2", self.address, max(nbytes, 1), _PORTABLE)
                self._registered = True
                self._create()

    def _free(self) -> int:
        status = self._slow.cuMemHostUnregister(self.address) if self._registered else 0
        self._registered = False
        with suppress(BufferError):  # an error's traceback still refers to it
            self.view.release()
        return int(status)


class DeviceMemory(_Stream):
    """Device memory from the driver, for scratch and counts of casts; zeros at first."""

    what = "memory"

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
        allocated = ctypes.c_uint64()
        self.address = 0
        with self._allocating(context.name, nbytes), context.current():
            context.check_room(nbytes)
            self._create()
            context.call("cuMemAlloc_v2", ctypes.byref(allocated), nbytes)
            self.address = allocated.value
            context.call("cuMemsetD8Async", self.address, 0, nbytes, self.stream)
            context.call("cuStreamSynchronize", self.stream)

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop`` (exclusive), without waiting for other streams."""
        out = ctypes.create_string_buffer(stop - start)
        with self._context.current():
            source = self.address + start
            self._context.call("cuMemcpyDtoHAsync_v2", out, source, stop - start, self.stream)
            self._context.check(self._slow.cuStreamSynchronize(self.stream), "reading counts")
        return out.raw

    def write(self, start: int, data: np.ndarray[Any, Any]) -> None:
        """Write an array from byte ``start`` on, and wait for that; any thread may call this."""
        with self._context.current():
            arguments = (self.address + start, data.ctypes.data, data.nbytes, self.stream)
            self._context.call("cuMemcpyHtoDAsync_v2", *arguments)
            self._context.call("cuStreamSynchronize", self.stream)

    def run(self, kernel: int, blocks: int, arguments: Sequence[int]) -> None:
        """Run a kernel, a `BulkCopier.function`, with 64-bit arguments, and wait for its end."""
        with self._context.current():
            self._context.launch(kernel, blocks, self.stream, arguments)
            self._context.call("cuStreamSynchronize", self.stream)

    def _free(self) -> int:
        status = self._slow.cuMemFree_v2(self.address) if self.address else 0
        self.address = 0
        return int(status)


class Function(NamedTuple):
    """A ``CUfunction`` loaded into a context, and its ``CUmodule``."""

    handle: int
    module: int


def load_function(driver: Driver, device: str, ptx: str, name: str = SYMBOL) -> Function:
    """Compile PTX for the current context's device, load it, and return its function ``name``.

    That takes milliseconds; the driver caches the result for later processes. ``device`` is the
    device's name, for errors.
    """
    log = ctypes.create_string_buffer(_LOG_NBYTES)
    options = (ctypes.c_int * 2)(_LOG_BUFFER, _LOG_BUFFER_NBYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_NBYTES)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    status = driver.slow.cuModuleLoadDataEx(
        ctypes.byref(module), ptx.encode(), len(options), options, values
    )
    if status:
        said = " ".join(log.value.decode(errors="replace").split())
        problem = f"cuModuleLoadDataEx: {driver.reason(status)}{': ' * bool(said)}{said}"
        raise DeviceError(device, problem)
    status = driver.slow.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    if status:
        driver.slow.cuModuleUnload(module)
        raise DeviceError(device, f"cuModuleGetFunction: {name}: {driver.reason(status)}")
    return Function(function.value or 0, module.value or 0)


_compiling = threading.Lock()


def load_kept(context: Context, ptx: str, symbol: str) -> int:
    """Return the handle of a function in PTX, loaded once a context; any thread may call this."""
    with _compiling:
        return _function(context, ptx, symbol)


@cache
def _function(context: Context, ptx: str, symbol: str) -> int:
    with context.current():
        return load_function(_driver(), context.name, ptx, symbol).handle
