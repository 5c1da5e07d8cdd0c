"""Copies to CUDA devices by the driver's own calls, for every framework that has a context there.

Page-locked slots with a stream and an event of their own, and no work for the interpreter beside
the calls themselves. Those that return at once keep the interpreter's lock: giving it up and
getting it back among many threads takes longer than they do. Function by function this is the
CUDA driver API reference.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from streamload.devices.base import BulkFailure, Read, Staging, populate
from streamload.devices.bulk import Loop, libc_calls
from streamload.errors import AllocationError, DeviceError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered after the null stream
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2  # CU_EVENT_...: a wait sleeps instead of spinning
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts

_pointer = ctypes.POINTER(ctypes.c_void_p)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_pointer,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_pointer, ctypes.c_int),
    "cuEventCreate": (_pointer, ctypes.c_uint),
    "cuEventDestroy_v2": (ctypes.c_void_p,),
    "cuEventQuery": (ctypes.c_void_p,),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventSynchronize": (ctypes.c_void_p,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuInit": (ctypes.c_uint,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemcpyHtoDAsync_v2": (
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    ),
    "cuStreamCreate": (_pointer, ctypes.c_uint),
    "cuStreamDestroy_v2": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
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

    Args:
        name: the device's, for errors.
        handle: a ``CUcontext``.
    """

    def __init__(self, name: str, handle: int) -> None:
        self.name = name
        self._handle = handle
        quick = _driver().quick
        self._memcpy, self._record = quick.cuMemcpyHtoDAsync_v2, quick.cuEventRecord
        self._push, self._pop = quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())

    @classmethod
    def primary(cls, name: str, index: int) -> Context:
        """The context that the CUDA runtime, and with it torch, uses on a device."""
        return cls(name, _primary(name, index))

    def check(self, status: int, call: str) -> None:
        """Raise DeviceError for what a call returned."""
        if status:
            raise DeviceError(self.name, f"{call}: {_driver().reason(status)}")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the thread's current context for a while."""
        self.check(self._push(self._handle), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._pop(self._popped)

    def copy(self, staging: PinnedStaging, start: int, nbytes: int, address: int) -> None:
        """Begin to copy bytes of staging to a device address; `PinnedStaging.wait` ends it."""
        self.check(self._push(self._handle), "cuCtxPushCurrent")
        status = self._memcpy(address, staging.address + start, nbytes, staging.stream)
        # an event after each copy: the last one that was recorded is the one waited for
        recorded = self._record(staging.event, staging.stream) if not status else 0
        self._pop(self._popped)
        self.check(status, "cuMemcpyHtoDAsync")
        self.check(recorded, "cuEventRecord")


@cache
def _primary(name: str, index: int) -> int:
    driver = _driver()
    device, handle = ctypes.c_int(), ctypes.c_void_p()

    def call(function: str, *arguments: Any) -> None:
        status = getattr(driver.slow, function)(*arguments)
        if status:
            raise DeviceError(name, f"{function}: {driver.reason(status)}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    # never released: it is the process's own, and torch holds it as well
    call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), device)
    return handle.value or 0


class PinnedStaging:
    """Page-locked memory with a stream and an event of its own: one copy after the other.

    Attributes:
        view: the bytes.
        address: of the first.
        stream: a ``CUstream``.
        event: a ``CUevent``, recorded after each copy.

    Raises:
        AllocationError: the memory cannot be had, or not be page-locked.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        self._context = context
        self._slow = _driver().slow
        self._query = _driver().quick.cuEventQuery
        self._map: mmap.mmap | None = None
        self._registered = False
        self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p()
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1))
            self.view = memoryview(self._map)[:nbytes]
            populate(self.view)  # by this thread: the driver locks pages for one at a time
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            with context.current():
                status = self._slow.cuMemHostRegister_v2(self.address, max(nbytes, 1), _PORTABLE)
                context.check(status, "cuMemHostRegister")
                self._registered = True
                for created, call, flags in (
                    (self.stream, "cuStreamCreate", _NON_BLOCKING),
                    (self.event, "cuEventCreate", _BLOCKING_SYNC | _DISABLE_TIMING),
                ):
                    context.check(getattr(self._slow, call)(ctypes.byref(created), flags), call)
        except (DeviceError, OSError) as error:
            with suppress(DeviceError):
                self.close()
            problem = error.problem if isinstance(error, DeviceError) else str(error)
            raise AllocationError("staging", problem, nbytes=nbytes) from error

    def wait(self) -> None:
        """Return when the last copy that was begun has finished."""
        if self._query(self.event) == 0:  # most have: no need to give up the interpreter's lock
            return
        status = self._slow.cuEventSynchronize(self.event)
        if status:
            self._context.check(status, "a copy")

    def close(self) -> None:
        """Give everything back; waits for a copy under way."""
        failure = 0
        # raises where the context is gone, and with it all that was page-locked in it
        with self._context.current():
            if self.stream:
                failure = self._slow.cuStreamSynchronize(self.stream)
                self._slow.cuStreamDestroy_v2(self.stream)
            if self.event:
                self._slow.cuEventDestroy_v2(self.event)
            if self._registered:
                failure = self._slow.cuMemHostUnregister(self.address) or failure
        self.stream, self.event = ctypes.c_void_p(), ctypes.c_void_p()
        self._registered = False
        if self._map is not None:
            with suppress(BufferError):  # an error's traceback refers to it: it goes then
                self.view.release()
                self._map.close()
        if failure:
            self._context.check(failure, "giving staging back")


class _BulkCopier:
    """`devices.base.BulkCopier` for one context."""

    def __init__(self, context: Context, loop: Loop, address: Callable[[Any], int]) -> None:
        self.address = address
        self._context, self._loop = context, loop

    def ticket(self, slot: Staging) -> PinnedStaging:
        """A slot is its own ticket."""
        assert isinstance(slot, PinnedStaging)
        return slot

    def run(
        self, fd: int, reads: Sequence[Read], slots: Sequence[Staging], busy: int
    ) -> BulkFailure | None:
        """See `devices.base.BulkCopier.run`."""
        flat = []
        for index, slot in enumerate(slots):
            assert isinstance(slot, PinnedStaging)
            under_way = index >= len(slots) - busy
            stream, event = slot.stream.value or 0, slot.event.value or 0
            flat.append((slot.address, stream, event, under_way))
        with self._context.current():
            failure = self._loop(fd, reads, flat)
            if failure is not None and failure.stage == "copy":
                # copies of that read may be under way: its slot's ticket is to cover them
                _, stream, event, _ = flat[failure.index % len(flat)]
                _driver().quick.cuEventRecord(event, stream)
        return failure


def bulk_copier(context: Context, address: Callable[[Any], int]) -> _BulkCopier | None:
    """Reads and copies by a compiled loop; None where none can be compiled.

    Args:
        context: where the slots' streams are.
        address: gives the device address of a buffer.
    """
    loop = _loop()
    return None if loop is None else _BulkCopier(context, loop, address)


@cache
def _loop() -> Loop | None:
    driver = _driver().slow
    calls = {
        "copy": driver.cuMemcpyHtoDAsync_v2,
        "record": driver.cuEventRecord,
        "wait": driver.cuEventSynchronize,
    }
    addresses = {
        name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in calls.items()
    }
    try:
        return Loop(libc_calls() | addresses)
    except (ImportError, OSError, RuntimeError):  # no LLVM here: the stream's own loop does it
        return None
