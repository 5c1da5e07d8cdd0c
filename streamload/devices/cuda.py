"""Copies to CUDA devices by the driver's own calls, for every framework that has a context there.

Page-locked slots with a stream and an event of their own, casts by kernels on those streams, and no
work for the interpreter besides the calls themselves. Calls that return at once keep the
interpreter's lock: among many threads, to give it up and get it back takes longer than the call.
Function by function this is the CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from streamload.codecs.cast_cuda import SYMBOL, cast_ptx
from streamload.codecs.ptx import BLOCK_THREADS
from streamload.core.dtypes import DType
from streamload.core.memory import available_cpus
from streamload.core.system import address_of, direct_memory, populate
from streamload.devices.base import BulkFailure, Read, Staging, Ticket
from streamload.devices.bulk import Loop, addresses_of, libc_calls
from streamload.errors import AllocationError, DeviceError

_STREAMS = 4
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered after the null stream
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_...: a wait sleeps instead of spinning

# With more CPUs than this waits for copies spin: docs/measurements.md, "Waits that spin". With
# fewer, a wait that spins keeps others from reading.
_SLEEP_CPUS = 8
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_LOG_BUFFER, _LOG_BUFFER_NBYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER, ..._SIZE_BYTES
_LOG_NBYTES = 4096
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts

_int, _uint, _size, _u64 = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_out,),
    "cuDeviceGet": (ctypes.POINTER(_int), _int),
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
    "cuStreamQuery": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
}


class _Driver:
    """The driver's library.

    Attributes:
        quick: its functions for calls that return at once: they keep the interpreter's lock.
        slow: the same for calls that may wait: they give it up.

    Raises:
        OSError: there is no driver.
    """

    def __init__(self) -> None:
        self.quick: Any = ctypes.PyDLL("libcuda.so.1")
        self.slow: Any = ctypes.CDLL("libcuda.so.1")
        for library in (self.quick, self.slow):
            for name, types in _PROTOTYPES.items():
                getattr(library, name).argtypes = types

    def reason(self, status: int) -> str:
        """What a status means."""
        text = ctypes.c_char_p()
        self.quick.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode()


@cache
def _driver() -> _Driver:
    return _Driver()


class Context:
    """A device's context: what a copy is made in.

    Attributes:
        name: the device's, for errors.
        handle: a ``CUcontext``.
    """

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self.handle = handle
        quick = _driver().quick
        self._memcpy, self._record = quick.cuMemcpyHtoDAsync_v2, quick.cuEventRecord
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._query = quick.cuStreamQuery
        self._popped = ctypes.byref(ctypes.c_void_p())

    @classmethod
    @cache
    def primary(cls, name: str, index: int) -> Context:
        """The context that the CUDA runtime, and with it torch, uses on a device."""
        context, device, handle = cls(name, 0), ctypes.c_int(), ctypes.c_void_p()
        context.call("cuInit", 0)
        context.call("cuDeviceGet", ctypes.byref(device), index)
        # never released: it is the process's own, and torch holds it as well
        context.call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
        context.handle = handle.value or 0
        return context

    def check(self, status: int, call: str) -> None:
        """Raise DeviceError for what a call returned."""
        if status:
            raise DeviceError(self.name, f"{call}: {_driver().reason(status)}")

    def call(self, function: str, *arguments: Any) -> None:
        """Make a call that may wait; raises DeviceError for what it returns."""
        status = getattr(_driver().slow, function)(*arguments)
        self.check(status, function.removesuffix("_v2"))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the thread's current context for a while."""
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._pop(self._popped)

    def finish(self, stream: int) -> None:
        """Wait for what was queued on a stream, 0 for the null stream. Mostly there is nothing."""
        with self.current():
            status = self._query(stream)
            if status == _NOT_READY:
                status = _driver().slow.cuStreamSynchronize(stream)
            self.check(status, "earlier work on the device")

    def order(self, stream: int, slot: PinnedStaging) -> None:
        """Let a stream wait for the copies that were begun from a slot last."""
        with self.current():
            status = _driver().quick.cuStreamWaitEvent(stream, slot.event, 0)
            self.check(status, "cuStreamWaitEvent")

    def copy(self, staging: PinnedStaging, start: int, nbytes: int, address: int) -> None:
        """Begin to copy bytes of staging to a device address; `PinnedStaging.wait` ends it."""
        self.check(self._push(self.handle), "cuCtxPushCurrent")
        status = self._memcpy(address, staging.address + start, nbytes, staging.stream)
        # an event after each copy: the last one that was recorded is the one waited for
        recorded = self._record(staging.event, staging.stream) if not status else 0
        self._pop(self._popped)
        self.check(status, "cuMemcpyHtoDAsync")
        self.check(recorded, "cuEventRecord")


# More streams copy no faster; several, so that the kernels of one overlap the copies of another:
# docs/measurements.md, "Streams of a context".
_sharing = threading.Lock()
_users = Counter[tuple[int, int]]()  # slots by (context, stream), under the lock


def _take_stream(context: Context) -> int:
    """A stream for a slot, shared by a few; the context is current.

    Raises:
        DeviceError: the driver refused.
    """
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
    """Take a stream back from a slot whose copies have ended; the context is current.

    It goes with its last slot.
    """
    with _sharing:
        key = (context.handle, stream)
        _users[key] -= 1
        if not _users[key]:
            del _users[key]
            _driver().slow.cuStreamDestroy_v2(stream)


@cache
def _spins() -> bool:
    """Whether waits for copies spin; asked once, since a slot is a matter of a millisecond."""
    return available_cpus() > _SLEEP_CPUS


class _Stream:
    """Memory with a stream, and an event of its own: one copy after the other.

    Attributes:
        what: the memory, for errors.
        stream: a ``CUstream``.
        event: a ``CUevent``, recorded after each copy.
    """

    what: str

    def __init__(self, context: Context) -> None:
        self._context = context
        self._slow = _driver().slow
        self._query = _driver().quick.cuEventQuery
        self.stream, self.event = 0, ctypes.c_void_p()

    def _create(self) -> None:
        """Make both, in the current context."""
        self.stream = _take_stream(self._context)
        flags = _DISABLE_TIMING if _spins() else _DISABLE_TIMING | _BLOCKING_SYNC
        self._context.call("cuEventCreate", ctypes.byref(self.event), flags)

    def wait(self) -> None:
        if self._query(self.event) == 0:  # most have: no need to give up the interpreter's lock
            return
        status = self._slow.cuEventSynchronize(self.event)
        if status:
            self._context.check(status, "a copy")

    @contextmanager
    def _allocating(self, name: str, nbytes: int) -> Iterator[None]:
        """Close it if it cannot be had, and raise AllocationError."""
        try:
            yield
        except (DeviceError, OSError) as error:
            with suppress(DeviceError):
                self.close()
            problem = error.problem if isinstance(error, DeviceError) else str(error)
            raise AllocationError(name, problem, nbytes=nbytes) from error

    @abstractmethod
    def _free(self) -> int:
        """Give the memory back, in the current context; returns a status."""

    def close(self) -> None:
        """Give everything back; waits for a copy under way."""
        failure = 0
        # raises where the context is gone, and with it all that was page-locked in it
        with self._context.current():
            if self.stream:  # not for the event alone: the last copy may have failed before it
                failure = self._slow.cuStreamSynchronize(self.stream)
            if self.event:
                self._slow.cuEventDestroy_v2(self.event)
            if self.stream:
                _give_back(self._context, self.stream)
            self.stream, self.event = 0, ctypes.c_void_p()
            failure = self._free() or failure
        if failure:
            self._context.check(failure, f"giving {self.what} back")


class PinnedStaging(_Stream):
    """Page-locked memory with an event of its own.

    Of huge pages, where there are any: docs/measurements.md, "Page-locked slots".

    Attributes:
        view: the bytes; they begin at a page.
        address: of the first.

    Raises:
        AllocationError: the memory cannot be had, or not be page-locked.
    """

    what = "staging"

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
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
        with suppress(BufferError):  # an error's traceback refers to it: it goes then
            self.view.release()
        return int(status)


class DeviceMemory(_Stream):
    """Memory besides buffers, from the driver itself and no allocator; zeros at first."""

    what = "memory"

    def __init__(self, context: Context, nbytes: int) -> None:
        super().__init__(context)
        allocated = ctypes.c_uint64()
        self.address = 0
        with self._allocating(context.name, nbytes), context.current():
            self._create()
            context.call("cuMemAlloc_v2", ctypes.byref(allocated), nbytes)
            self.address = allocated.value
            context.call("cuMemsetD8Async", self.address, 0, nbytes, self.stream)
            context.call("cuStreamSynchronize", self.stream)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` (exclusive), without waiting for other streams."""
        out = ctypes.create_string_buffer(stop - start)
        with self._context.current():
            arguments = (out, self.address + start, stop - start, self.stream)
            self._context.call("cuMemcpyDtoHAsync_v2", *arguments)
            self._context.check(self._slow.cuStreamSynchronize(self.stream), "reading counts")
        return out.raw

    def write(self, start: int, data: np.ndarray[Any, Any]) -> None:
        """Write an array from byte ``start`` on, for later work; any thread may call it."""
        with self._context.current():
            arguments = (self.address + start, data.ctypes.data, data.nbytes, self.stream)
            self._context.call("cuMemcpyHtoDAsync_v2", *arguments)
            self._context.call("cuStreamSynchronize", self.stream)

    def run(self, kernel: int, blocks: int, arguments: Sequence[int]) -> None:
        """Run a `BulkCopier.function` with arguments of 64 bits, to its end."""
        values = [ctypes.c_uint64(value) for value in arguments]
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        shape = (blocks, 1, 1, BLOCK_THREADS, 1, 1)
        with self._context.current():
            self._context.call("cuLaunchKernel", kernel, *shape, 0, self.stream, places, None)
            self._context.call("cuStreamSynchronize", self.stream)

    def _free(self) -> int:
        status = self._slow.cuMemFree_v2(self.address) if self.address else 0
        self.address = 0
        return int(status)


class BulkCopier:
    """Many reads and copies in one call."""

    def __init__(self, context: Context, loop: Loop, address: Callable[[Any], int]) -> None:
        self.address = address
        self._context, self._loop = context, loop

    def memory(self, nbytes: int) -> DeviceMemory:
        """Memory for tallies and for elements to cast; raises AllocationError."""
        return DeviceMemory(self._context, nbytes)

    def kernel(self, src: DType, dst: DType, clamp: bool) -> int:
        """Handle of a cast kernel, compiled once; any thread may call it.

        Raises:
            UnsupportedCastError: it cannot be compiled.
            DeviceError: the driver refuses it.
        """
        return self.function(cast_ptx(src, dst, clamp=clamp), SYMBOL)

    def function(self, ptx: str, symbol: str) -> int:
        """Handle of a function in PTX, loaded once; any thread may call it."""
        with _compiling:
            return _function(self._context, ptx, symbol)

    def ticket(self, slot: Staging) -> Ticket:
        """A slot is the ticket of the copies that were begun from it last."""
        assert isinstance(slot, _Stream)
        return slot

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """Read into the slots cyclically and begin the copies, without the interpreter's lock.

        Afterwards any slot that was used may have copies under way: see `ticket`.

        Args:
            fd: the file.
            reads: read ``i`` goes to slot ``i % len(slots)``.
            slots: where to.
            busy: how many of the slots, the last ones, may have copies under way; they are waited
                for before they are filled.
        """
        flat = []
        for index, slot in enumerate(slots):
            assert isinstance(slot, PinnedStaging)
            under_way = index >= len(slots) - busy
            stream, event = slot.stream, slot.event.value or 0
            flat.append((slot.address, stream, event, under_way))
        with self._context.current():
            failure = self._loop(fd, reads, flat)
            if failure is not None and failure.stage == "copy":
                # copies of that read may be under way, and its slot's event does not cover them
                _driver().slow.cuStreamSynchronize(flat[failure.index % len(flat)][1])
        return failure


class Function(NamedTuple):
    """A ``CUfunction`` that was loaded into a context, and its ``CUmodule``."""

    handle: int
    module: int


def load_function(driver: _Driver, device: str, ptx: str, name: str = SYMBOL) -> Function:
    """Compile PTX for the device of the current context, and load a function of it.

    It takes milliseconds; the driver caches the result for the next process.

    Raises:
        DeviceError: the driver refuses, with its compiler's message.
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


@cache
def _function(context: Context, ptx: str, symbol: str) -> int:
    """A function, in the module of a context that lives as long as the process."""
    with context.current():
        return load_function(_driver(), context.name, ptx, symbol).handle


class Copies:
    """The part of a framework's device that the driver does: staging, copies, casts in a context.

    Attributes:
        context: where the framework has its memory.
        bulk: reads, copies and casts by a compiled loop, where one can be compiled.
    """

    def __init__(self, context: Context, address: Callable[[Any], int]) -> None:
        """Take a context; ``address`` gives the device address of a buffer."""
        self.context = context
        self._address = address
        loop = _loop()
        self.bulk: BulkCopier | None = BulkCopier(context, loop, address) if loop else None

    def staging(self, nbytes: int) -> PinnedStaging:
        return PinnedStaging(self.context, nbytes)

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        assert isinstance(staging, PinnedStaging)
        self.context.copy(staging, start, nbytes, self._address(buffer) + offset)
        return staging


@cache
def _loop() -> Loop | None:
    driver = _driver().slow
    calls = {
        "copy": driver.cuMemcpyHtoDAsync_v2,
        "record": driver.cuEventRecord,
        "wait": driver.cuEventSynchronize,
        "launch": driver.cuLaunchKernel,
    }
    try:
        return Loop(libc_calls() | addresses_of(calls))
    except (ImportError, OSError, RuntimeError):  # no LLVM here: the stream's own loop does it
        return None
