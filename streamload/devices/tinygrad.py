"""tinygrad's devices and tensors. Everything that touches tinygrad's internals is in this file.

The internals used are those of tinygrad 0.14 (the version is pinned): ``Buffer``, ``UOp``, the
allocators' ``_as_buffer``, ``_offset``, ``_copyin``, ``_copyout`` and ``cache``, and the OpenCL
bindings. A backend that lacks what the faster ways need is written through the public ``Tensor``
API instead (`_TensorDevice`), slower and within the same bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import math
import mmap
import os
import re
import shutil
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import tinygrad
from tinygrad import Device as _Devices
from tinygrad import Tensor, dtypes
from tinygrad.device import ALL_DEVICES, Allocator, Buffer
from tinygrad.helpers import EMULATED_DTYPES, GlobalCounters
from tinygrad.uop.ops import Ops, UOp, buffers

from streamload.devices.base import (
    DONE,
    BulkCopier,
    Device,
    DeviceInfo,
    DTypeStatus,
    HostStaging,
    Parameter,
    ProbeResult,
    Staging,
    Ticket,
    environment,
    trim_heap,
)
from streamload.dtypes import BF16, BY_NAME, F16, F32, DType
from streamload.errors import AllocationError, DeviceError, DeviceNotFoundError

#: tinygrad's dtype for each of ours that it has.
_TO_TINYGRAD = {
    "bool": dtypes.bool,
    "uint8": dtypes.uint8,
    "int8": dtypes.int8,
    "uint16": dtypes.uint16,
    "int16": dtypes.int16,
    "uint32": dtypes.uint32,
    "int32": dtypes.int32,
    "uint64": dtypes.uint64,
    "int64": dtypes.int64,
    "float8_e4m3fn": dtypes.fp8e4m3,
    "float8_e5m2": dtypes.fp8e5m2,
    "float16": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "float32": dtypes.float32,
    "float64": dtypes.float64,
}
_FROM_TINYGRAD = {dtype: name for name, dtype in _TO_TINYGRAD.items()}
_UNSUPPORTED = frozenset(BY_NAME) - frozenset(_TO_TINYGRAD)

# Backends that compute in bfloat16 where their renderer lists it. The others keep it as ushort or
# promote each operation (OpenCL, clang), which tinygrad reports as supported all the same.
_BF16_NATIVE = frozenset({"AMD", "CUDA", "HIP", "METAL", "NV"})
# Pairs worth a probe: narrow sources, so that every code can be tried.
_DEVICE_CASTS = ((BF16, F16), (BF16, F32), (F16, F32), (F16, BF16))

# Environment variables (beginnings of their names) that change what a device can do.
_SETTINGS = ("DEV", "CC", "POCL_", "OCL_", "CUDA_", "EMULATED_DTYPES", "LD_LIBRARY_PATH")


_ALLOCATORS = threading.RLock()  # tinygrad's have no locks, and loads may run side by side


def _empty_cache(allocator: Any, keep_nbytes: int = 0) -> None:
    """Free what an allocator keeps, but for one buffer of ``keep_nbytes``, soon to be taken."""
    freed = getattr(allocator, "cache", {})
    emptied = False
    with _ALLOCATORS:
        for key in list(freed):
            nbytes, options = key
            kept = freed.get(key, [])
            # one by one, out of the cache first: tinygrad's own free_cache would free them again
            # where Ctrl-C has interrupted it
            while len(kept) > (nbytes == keep_nbytes and options is None):
                try:
                    opaque = kept.pop()
                except IndexError:  # a thread that computes has just taken it
                    break
                Allocator.free(allocator, opaque, nbytes, options)
                emptied = True
            if not kept:
                freed.pop(key, None)  # else there is a list for every size there ever was
    if emptied:
        trim_heap()  # a driver's buffers may be heap memory (PoCL), which malloc keeps


def _max_buffers() -> int | None:
    """How many more maps the kernel lets this process have, less some for everybody else."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return max(most - sum(1 for _ in maps) - 1000, 0)
    except (OSError, ValueError):
        return None


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _bytes_at(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


def _has(allocator: Any, method: str) -> bool:
    """Whether an allocator has a method of its own; the base class has some that only raise."""
    own = getattr(type(allocator), method, None)
    return own is not None and own is not getattr(Allocator, method, None)


def _over(buffer: Any, dtype: DType, shape: tuple[int, ...]) -> UOp:
    """A tensor's graph over what `TinygradDevice.allocate` gave: no copy, no computation."""
    kind = _TO_TINYGRAD[dtype.name]
    if isinstance(buffer, Tensor):  # of bytes: see _TensorDevice
        return buffer.bitcast(kind).reshape(shape).uop
    if buffer.size == 0:
        return Tensor.empty(*shape, dtype=kind, device=buffer.device).uop
    flat = UOp.from_buffer(buffer)
    return flat if shape == (buffer.size,) else flat.reshape(shape)


class TinygradDevice(ABC):
    """What all of tinygrad's devices share; the ways in are the subclasses."""

    host_visible = False
    threads = 0

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            self._device = _Devices[name]
        except Exception as error:  # each backend raises what it likes
            raise DeviceNotFoundError(name, f"tinygrad cannot open it: {error}") from error

    @property
    def info(self) -> DeviceInfo:
        """What it is and has."""
        backend = self.name.partition(":")[0]
        return DeviceInfo(
            name=self.name,
            framework="tinygrad",
            description=str(getattr(self._device, "device_name", "")),
            host_visible=self.host_visible,
            shared_memory=backend in _SHARED,
            granularity_nbytes=mmap.PAGESIZE if backend == "CPU" else 1,
            max_buffers=_max_buffers() if backend == "CPU" else None,  # each is a map
            threads=self.threads,
            native_bf16=backend in _BF16_NATIVE and self._computes_in(dtypes.bfloat16),
            unsupported=_UNSUPPORTED,
        )

    def _computes_in(self, dtype: Any) -> bool:
        """Whether its renderer lists a dtype, and tinygrad was not told to emulate it."""
        supported = getattr(self._device.renderer, "supported_dtypes", None)
        listed = supported is not None and dtype in supported()
        return listed and dtype not in EMULATED_DTYPES.tolist(dtypes)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate; the buffer of a tensor without elements stays without memory."""
        buffer = Buffer(self.name, math.prod(shape), _TO_TINYGRAD[dtype.name])
        if buffer.size == 0:
            return buffer
        try:
            with _ALLOCATORS:
                _empty_cache(self._device.allocator, keep_nbytes=buffer.nbytes)
                buffer.allocate()
        except (MemoryError, RuntimeError, OSError, AssertionError) as error:
            raise AllocationError(self.name, str(error), nbytes=buffer.nbytes) from error
        return buffer

    def window(self, buffer: Buffer, start: int, stop: int) -> AbstractContextManager[memoryview]:
        """Host-visible devices only."""
        raise DeviceError(self.name, "its memory cannot be written by the CPU")

    def staging(self, nbytes: int) -> Staging:
        """Plain host memory."""
        return HostStaging(nbytes)

    @abstractmethod
    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        """Copy from staging to the buffer."""

    @property
    def bulk(self) -> BulkCopier | None:
        """tinygrad's copies are made one by one."""
        return None

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
        """Bring raw ``src`` bits up, cast them with tinygrad's own kernel, write them at offset."""
        numel = nbytes // src.itemsize
        raw = self.allocate(src, (numel,))
        self.copy(staging, start, nbytes, raw, 0).wait()
        result = Tensor(UOp.from_buffer(raw)).cast(_TO_TINYGRAD[dst.name])
        self._store(result, buffer, offset, dst.nbytes(numel))
        self._device.synchronize()

    def _store(self, result: Tensor, buffer: Buffer, offset: int, nbytes: int) -> None:
        view = buffer.view(nbytes // buffer.dtype.itemsize, buffer.dtype, offset)
        Tensor(UOp.from_buffer(view.ensure_allocated())).assign(result).realize()

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read raw bytes back."""
        if start == stop:
            return b""
        out = bytearray(stop - start)
        view = self._device.allocator._offset(buffer._buf, stop - start, start)
        self._device.allocator._copyout(memoryview(out), view)
        return bytes(out)

    def release(self, buffer: Buffer) -> None:
        """Give the memory back: the caller's was the last reference."""
        if buffer.is_allocated():
            buffer.deallocate()
        self.trim()

    def trim(self) -> None:
        """Empty the allocator's cache of freed buffers."""
        _empty_cache(self._device.allocator)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._device.synchronize()

    def allocated_nbytes(self) -> int | None:
        """tinygrad's own count for this device."""
        return int(GlobalCounters.mem_used_per_device[self.name])

    def counters(self) -> Mapping[str, int]:
        """tinygrad has no others."""
        return {}

    def tensor(self, buffer: Any, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """tinygrad's tensor over the buffer, without a copy."""
        return Tensor(_over(buffer, dtype, shape))


class _HostVisibleDevice(TinygradDevice):
    """CPU, Metal, QCOM and PYTHON: the allocator shows their memory to the CPU."""

    host_visible = True
    threads = 16

    def _view(self, buffer: Buffer) -> memoryview:
        view: memoryview = self._device.allocator._as_buffer(buffer._buf)
        return view.cast("B") if view.format != "B" or view.ndim != 1 else view

    @contextlib.contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        """The device's own memory."""
        with self._view(buffer)[start:stop] as view:
            yield view

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """A copy on the host."""
        self._device.synchronize()
        with self.window(buffer, offset, offset + nbytes) as view:
            view[:] = staging.view[start : start + nbytes]
        return DONE

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read raw bytes back."""
        if start == stop:
            return b""
        self._device.synchronize()
        return bytes(self._view(buffer)[start:stop])


class _OpenCLDevice(TinygradDevice):
    """OpenCL: chunks are mapped where memory is unified, written at an offset elsewhere.

    Mapping chunk by chunk costs tens of microseconds each, works from several threads, and costs a
    driver that shadows maps one chunk at most.
    """

    threads = 16

    def __init__(self, name: str, *, mapped: bool | None = None) -> None:
        super().__init__(name)
        from tinygrad.runtime.autogen import opencl
        from tinygrad.runtime.ops_cl import cl_errors

        self._cl, self._errors = opencl, cl_errors
        unified = bool(self._query(opencl.CL_DEVICE_HOST_UNIFIED_MEMORY, ctypes.c_uint32))
        self._unified = unified
        self.host_visible = unified if mapped is None else mapped

    def _query(self, what: int, kind: Any) -> int:
        value = kind()
        self._check(
            self._cl.clGetDeviceInfo(
                self._device.cl_dev, what, ctypes.sizeof(value), ctypes.byref(value), None
            ),
            "clGetDeviceInfo",
        )
        return int(value.value)

    def _check(self, status: int, call: str) -> None:
        if status != 0:  # the bindings return the status unchecked
            raise DeviceError(self.name, f"{call}: {self._errors.get(status, status)}")

    @property
    def info(self) -> DeviceInfo:
        """What it is, from clGetDeviceInfo."""
        base = super().info
        total = self._query(self._cl.CL_DEVICE_GLOBAL_MEM_SIZE, ctypes.c_uint64)
        align = self._query(self._cl.CL_DEVICE_MEM_BASE_ADDR_ALIGN, ctypes.c_uint32) // 8
        return DeviceInfo(
            name=base.name,
            framework=base.framework,
            description=base.description,
            host_visible=self.host_visible,
            shared_memory=self._unified,
            free_nbytes=max(total - int(self.allocated_nbytes() or 0), 0),
            total_nbytes=total,
            largest_allocation_nbytes=self._query(
                self._cl.CL_DEVICE_MAX_MEM_ALLOC_SIZE, ctypes.c_uint64
            ),
            granularity_nbytes=max(align, 1),
            threads=self.threads,
            native_bf16=False,
            unsupported=base.unsupported,
        )

    @contextlib.contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        """Map the bytes for writing, unmap them at the end."""
        cl, status = self._cl, ctypes.c_int32()
        pointer = cl.clEnqueueMapBuffer(
            self._device.queue,
            buffer._buf,
            True,
            cl.CL_MAP_WRITE_INVALIDATE_REGION,
            start,
            stop - start,
            0,
            None,
            None,
            status,
        )
        self._check(status.value, "clEnqueueMapBuffer")
        address = (
            pointer if isinstance(pointer, int) else ctypes.cast(pointer, ctypes.c_void_p).value
        )
        try:
            yield _bytes_at(address or 0, stop - start)
        finally:
            self._check(
                cl.clEnqueueUnmapMemObject(
                    self._device.queue, buffer._buf, ctypes.c_void_p(address), 0, None, None
                ),
                "clEnqueueUnmapMemObject",
            )

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """A blocking write at the offset."""
        self._check(
            self._cl.clEnqueueWriteBuffer(
                self._device.queue,
                buffer._buf,
                True,
                offset,
                nbytes,
                ctypes.c_void_p(_address(staging.view) + start),
                0,
                None,
                None,
            ),
            "clEnqueueWriteBuffer",
        )
        return DONE

    def _store(self, result: Tensor, buffer: Buffer, offset: int, nbytes: int) -> None:
        # no sub-buffers here: the cast goes to a buffer of its own, and is copied on the device
        scratch = result.contiguous().realize().uop.base.buffer
        self._check(
            self._cl.clEnqueueCopyBuffer(
                self._device.queue, scratch._buf, buffer._buf, 0, offset, nbytes, 0, None, None
            ),
            "clEnqueueCopyBuffer",
        )
        self._device.synchronize()

    def read(self, buffer: Buffer, start: int, stop: int) -> bytes:
        """Read raw bytes back."""
        if start == stop:
            return b""
        out = bytearray(stop - start)
        self._check(
            self._cl.clEnqueueReadBuffer(
                self._device.queue,
                buffer._buf,
                True,
                start,
                stop - start,
                ctypes.c_void_p(_address(memoryview(out))),  # ctypes.cast would leave a cycle
                0,
                None,
                None,
            ),
            "clEnqueueReadBuffer",
        )
        return bytes(out)


class _OffsetDevice(TinygradDevice):
    """Backends whose allocator points into a buffer: CUDA, HIP, NV, AMD."""

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: Buffer, offset: int
    ) -> Ticket:
        """tinygrad's own copy, to an offset; it keeps the source until it has synchronised."""
        allocator = self._device.allocator
        source = staging.view[start : start + nbytes]
        allocator._copyin(allocator._offset(buffer._buf, nbytes, offset), source)
        self._device.synchronize()
        return DONE


class _TensorDevice(TinygradDevice):
    """Any other backend, through public ``Tensor`` calls alone.

    A parameter is a tensor of bytes whose slices are assigned chunk by chunk, then seen as its
    dtype; the bytes are never computed on in that dtype, which may be emulated.
    """

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """A tensor of bytes."""
        nbytes = dtype.nbytes(math.prod(shape))
        self.trim()
        try:
            empty = Tensor.empty(nbytes, dtype=dtypes.uint8, device=self.name)
            return (empty if nbytes == 0 else empty.zeros_like().contiguous()).realize()
        except (MemoryError, RuntimeError, OSError, AssertionError) as error:
            raise AllocationError(self.name, str(error), nbytes=nbytes) from error

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        """Assign a slice of bytes."""
        data = bytes(staging.view[start : start + nbytes])
        self._assign(buffer, offset, Tensor(data, dtype=dtypes.uint8, device=self.name))
        return DONE

    def _assign(self, buffer: Tensor, offset: int, chunk: Tensor) -> None:
        # a variable offset: the kernel of one chunk size is compiled once
        at = UOp.variable("offset", 0, max(buffer.shape[0] - chunk.shape[0], 1)).bind(offset)
        buffer[at : at + chunk.shape[0]].assign(chunk).realize()
        self._device.synchronize()

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
        """Cast with tinygrad's own kernel, and assign the bytes."""
        data = bytes(staging.view[start : start + nbytes])
        raw = Tensor(data, dtype=dtypes.uint8, device=self.name)
        result = raw.bitcast(_TO_TINYGRAD[src.name]).cast(_TO_TINYGRAD[dst.name]).contiguous()
        self._assign(buffer, offset, result.bitcast(dtypes.uint8).contiguous())

    def read(self, buffer: Any, start: int, stop: int) -> bytes:
        """Read raw bytes back."""
        if start == stop:
            return b""
        return bytes(buffer[start:stop].contiguous().data())

    def release(self, buffer: Any) -> None:
        """The tensor goes with its last reference."""
        self.trim()


_WAYS: dict[str, type[TinygradDevice]] = {
    "CL": _OpenCLDevice,
    "CPU": _HostVisibleDevice,
    "METAL": _HostVisibleDevice,
    "PYTHON": _HostVisibleDevice,
    "QCOM": _HostVisibleDevice,
    "AMD": _OffsetDevice,
    "CUDA": _OffsetDevice,
    "HIP": _OffsetDevice,
    "NV": _OffsetDevice,
}
_SHARED = frozenset({"CL", "CPU", "METAL", "PYTHON", "QCOM", "DSP"})
_NEEDED = {_HostVisibleDevice: "_as_buffer", _OffsetDevice: "_offset", _OpenCLDevice: "_copyin"}


class _InvalidBuffer(Buffer):
    """The memory of a parameter that a failed load left without values: using it raises.

    Attributes:
        parameter: its name.
        kept: the graph over the memory that another load writes again; None where it is gone.
    """

    def __init__(self, name: str, device: str, size: int, dtype: Any, kept: UOp | None) -> None:
        self.parameter, self.kept = name, kept
        super().__init__(device, size, dtype)

    def allocate(self, opaque: Any = None, external_ptr: Any = None) -> Buffer:
        """Refuse: there are no values."""
        raise DeviceError(
            self.device,
            f"parameter {self.parameter!r} holds no values, since a load failed; load it again",
        )


# what tensors stand on that is no home for a parameter: files, and arrays of numpy
_NOT_DEVICES = ("DISK", "NPY", "TINYFS")
_MIN_HELD_NBYTES = 4096  # smaller buffers under a lazy graph are seeds and counters


class TinygradParameter:
    """Tensors of a model that stand on the same memory.

    Args:
        names: all names under which the model has them.
        tensors: each object once.
        collect: collects garbage cycles, which may hold memory.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        tensors: list[Tensor],
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self.names = names
        self._collect = collect
        self._tensors = tensors
        first = tensors[0]
        self.shape = tuple(int(n) if isinstance(n, int) else -1 for n in first.shape)
        self.dtype = _FROM_TINYGRAD.get(first.dtype, str(first.dtype))
        self.device: str | None = None
        self.nbytes = 0
        self.keeps: DType | None = None
        self.fixed = ""
        self.refused = ""
        self.invalid = _invalid(first.uop) is not None
        self.span: tuple[int, int, int] | None = None
        self._under: list[UOp] = []  # the memory that a lazy graph computes with
        if isinstance(first.device, tuple):
            self.refused = f"it is sharded over {', '.join(first.device)}"
        elif any(not isinstance(n, int) for n in first.shape):
            self.refused = "its shape is symbolic"
        else:
            self._look(_stands_on(first.uop))

    def _look(self, uop: UOp) -> None:
        memory = _memory(uop)
        if memory is None:
            return
        base = memory.buffer
        self.span = (id(base.base), base.offset, base.offset + base.nbytes)
        if _is_plain(uop):
            self.device, self.nbytes = base.device, base.nbytes
            return
        if uop.base is not memory:
            # a store that is still to be run, or bytes seen as another dtype: not to be written
            # in place, and gone when it is replaced
            self.device, self.nbytes = base.device, base.nbytes
            self.dtype += " (of a graph)"
            return
        if 0 in self.shape:
            return
        what = f"a view of {base.nbytes} bytes on {base.device}"
        if not _has(_Devices[base.device].allocator, "_offset"):
            self.refused = f"it is {what}, and that device has no views"
            return
        view = uop.contiguous_view()
        if view is None:
            self.refused = f"it is {what} that is not contiguous"
            return
        self.fixed = f"it is {what}"
        self.device = base.device
        self.nbytes = math.prod(self.shape) * uop.dtype.itemsize
        first = base.offset + view[1] * view[0].dtype.itemsize
        self.span = (id(base.base), first, first + self.nbytes)

    @property
    def graph(self) -> UOp | None:
        """What it is computed from, where it is lazy: it has no memory of its own."""
        uop = self._tensors[0].uop
        return None if self.refused or self.span is not None or _is_plain(uop) else uop

    def hold(self, memory: Iterable[UOp]) -> None:
        """Count what a lazy graph computes with: memory that goes when the graph goes.

        Args:
            memory: the allocated buffers that nothing else in the model accounts for.
        """
        by_device: dict[str, list[UOp]] = {}
        for uop in memory:
            by_device.setdefault(uop.buffer.device, []).append(uop)
        if not by_device:
            return
        # a parameter has one device: that with most of them
        sizes = {d: sum(u.buffer.nbytes for u in uops) for d, uops in by_device.items()}
        self.device = max(sizes, key=lambda d: sizes[d])
        self.nbytes, self._under = sizes[self.device], by_device[self.device]
        self.dtype += " (of a graph)"

    def buffer(self) -> Buffer:
        """The memory that it holds."""
        return _stands_on(self._tensors[0].uop).buffer.ensure_allocated()

    def release(self) -> str:
        """Let go of the memory, and see that it is gone."""
        if self.fixed:
            return self.fixed
        if self._under:
            return self._release_graph()
        kept = _invalid(self._tensors[0].uop) is not None
        self.revive()
        held = _memory(self._tensors[0].uop)
        if held is None:
            return ""
        allocator = held.buffer.allocator
        graphs = [weakref.ref(tensor.uop) for tensor in self._tensors]
        graph, memory = weakref.ref(held), weakref.ref(held.buffer)
        del held
        self.invalidate(keep=False)
        if memory() is not None:
            self._collect()
        buffer = memory()
        if buffer is None:
            _empty_cache(allocator)  # its device may be none of the load's
            return ""
        # as it was; the graph may be gone where only the memory is held
        base = graph()
        if base is None:
            base = UOp.from_buffer(buffer)
        for tensor, before in zip(self._tensors, graphs, strict=True):
            old = before()
            tensor.uop = base.reshape(tensor.shape) if old is None else old
        if kept:
            self.invalidate(keep=True)
        return _HELD

    def _release_graph(self) -> str:
        """Let go of a lazy graph, and see that the memory under it is gone."""
        allocator = self._under[0].buffer.allocator
        nodes = [weakref.ref(uop) for uop in self._under]
        memories = [weakref.ref(uop.buffer) for uop in self._under]
        # the graph itself is kept over buffers without memory, so that it can come back
        empty = [UOp.from_buffer(Buffer(b.device, b.size, b.dtype)) for b in _alive(memories)]
        stands_for = dict(zip(self._under, empty, strict=True))
        graphs = [tensor.uop.substitute(stands_for) for tensor in self._tensors]
        self._under = []
        del stands_for
        self.invalidate(keep=False)
        if _alive(memories):
            self._collect()
        held = [memory() for memory in memories]
        _empty_cache(allocator)
        if not any(held):
            return ""
        found = [node() for node in nodes]
        back = {
            hollow: UOp.from_buffer(buffer) if uop is None else uop
            for hollow, uop, buffer in zip(empty, found, held, strict=True)
            if buffer is not None
        }
        if len(back) == len(empty):  # else some are gone, and with them the values
            self._under = list(back.values())
            for tensor, graph in zip(self._tensors, graphs, strict=True):
                tensor.uop = graph.substitute(back)
        return _HELD

    def attach(self, buffer: Any, dtype: DType) -> None:
        """Make every tensor of it one over the buffer."""
        self._put(_over(buffer, dtype, self.shape))

    def invalidate(self, keep: bool) -> None:
        """Put memory in its place that raises when it is used."""
        first = self._tensors[0]
        numel = math.prod(self.shape)
        if numel == 0:
            return
        kept = _stands_on(first.uop) if keep else None
        buffer = _InvalidBuffer(self.names[0], first.device, numel, first.dtype, kept)
        self._put(UOp.from_buffer(buffer).reshape(self.shape))

    def revive(self) -> None:
        """Put the kept memory back in its place."""
        invalid = _invalid(self._tensors[0].uop)
        if invalid is not None and invalid.kept is not None:
            self._put(invalid.kept)

    def _put(self, uop: UOp) -> None:
        for tensor in self._tensors:  # tied ones may have shapes of their own
            tensor.uop = uop if tensor.shape == self.shape else uop.reshape(tensor.shape)


_HELD = "something else still holds its memory (a captured TinyJit or a lazy graph)"


def _alive(buffers: Iterable[weakref.ref[Buffer]]) -> list[Buffer]:
    return [buffer for memory in buffers if (buffer := memory()) is not None]


def _invalid(uop: UOp) -> _InvalidBuffer | None:
    """The memory that raises, where a tensor stands on such."""
    buffer = buffers.get(uop.base)
    return buffer if isinstance(buffer, _InvalidBuffer) else None


def _stands_on(uop: UOp) -> UOp:
    """A tensor's graph; for one that is invalid that over the memory which it keeps."""
    invalid = _invalid(uop)
    return uop if invalid is None or invalid.kept is None else invalid.kept


def _is_plain(uop: UOp) -> bool:
    """Whether a tensor is its memory, all of it, in order."""
    return bool(uop.has_buffer_identity())


def _memory(uop: UOp) -> UOp | None:
    """The allocated memory that a tensor stands on, directly or as a view; None for a graph."""
    base = uop.base
    while base.op in (Ops.AFTER, Ops.BITCAST):
        base = base.src[0].base
    return base if _is_allocated(base) else None


def _is_allocated(uop: UOp) -> bool:
    """Whether a node is the memory of one device."""
    if uop.op is not Ops.BUFFER or isinstance(uop.device, tuple) or not uop.is_realized:
        return False
    return uop.device.partition(":")[0] not in _NOT_DEVICES


def _share_out(parameters: Sequence[TinygradParameter]) -> None:
    """Count the memory under lazy graphs (``w.half()`` that was not realised), each buffer once.

    What is a parameter's own memory is counted there, and stays.
    """
    counted = {p.span[0] for p in parameters if p.span is not None}
    # each node is looked at once: lazy initialisers hang together, by their random numbers
    seen: dict[UOp, None] = {}

    def is_new(node: UOp) -> bool:
        return node not in seen

    for parameter in parameters:
        uop = parameter.graph
        if uop is None:
            continue
        under = []
        nodes = uop.toposort(gate=is_new)
        seen |= nodes
        for node in nodes:
            if not _is_allocated(node) or node.buffer.nbytes < _MIN_HELD_NBYTES:
                continue
            memory = id(node.buffer.base)
            if memory not in counted:
                counted.add(memory)
                under.append(node)
        parameter.hold(under)


def _key(tensor: Tensor) -> Any:
    """What tied tensors share: the memory, and what is seen of it."""
    uop = tensor.uop
    return uop.base if _is_plain(uop) else uop


class TinygradFramework:
    """tinygrad, as `devices.base.Framework`."""

    name = "tinygrad"

    def parameters(self, model: Any) -> list[Parameter]:
        """The parameters as ``nn.state.get_state_dict`` sees them, tied ones once."""
        groups: dict[Any, tuple[list[str], dict[int, Tensor]]] = {}
        for name, tensor in tinygrad.nn.state.get_state_dict(model).items():
            names, tensors = groups.setdefault(_key(tensor), ([], {}))
            names.append(name)
            tensors[id(tensor)] = tensor
        collect = cache(gc.collect)  # once a load: it is slow, and nothing makes cycles meanwhile
        found = [TinygradParameter(tuple(n), list(t.values()), collect) for n, t in groups.values()]
        _share_out(found)
        return list(found)

    def unstored(self, model: Any) -> Mapping[str, str]:
        """What tinygrad's state dict has is all that it knows of."""
        return {}

    def canonical(self, name: str) -> str:
        """tinygrad's own form: upper case, without ":0"."""
        return str(_Devices.canonicalize(name)) if name else self.default_device()

    def device(self, name: str) -> TinygradDevice:
        """Open a device by the fastest way in that it has."""
        name = self.canonical(name)
        way = _WAYS.get(name.partition(":")[0], _TensorDevice)
        needed = _NEEDED.get(way)
        try:
            if needed is not None and not _has(_Devices[name].allocator, needed):
                way = _TensorDevice
            return way(name)
        except DeviceNotFoundError:
            raise
        except Exception as error:  # each backend raises what it likes
            raise DeviceNotFoundError(name, f"tinygrad cannot open it: {error}") from error

    def default_device(self) -> str:
        """tinygrad's default."""
        try:
            return str(_Devices.DEFAULT)
        except Exception as error:
            raise DeviceNotFoundError(
                "tinygrad", f"it has no device: {error}", working=("host",)
            ) from error

    def candidates(self) -> Sequence[str]:
        """tinygrad's order, without those for which this machine cannot have a device."""
        return [name for name in ALL_DEVICES if name not in ("DSP", "WEBGPU")]

    def trusted(self, name: str) -> bool:
        """None: compilers and drivers end processes."""
        return False

    def fingerprint(self, name: str) -> str:
        """Versions, compilers, drivers and settings that a device's working depends on."""
        parts = [importlib.metadata.version("tinygrad"), str(tinygrad.__file__), sys.platform]
        settings = environment(_SETTINGS)
        for program in (settings.get("CC", "clang"), "nvcc", "ptxas"):
            found = shutil.which(program)
            parts.append(f"{program}={found}{_stamp(found)}")
        for folder in (settings.get("OCL_ICD_VENDORS", ""), "/etc/OpenCL/vendors"):
            if folder and Path(folder).is_dir():
                parts += [f"{p}{_stamp(str(p))}" for p in sorted(Path(folder).iterdir())]
        settings.pop("POCL_CACHE_DIR", None)
        if re.fullmatch("[A-Z]*", settings.get("DEV", "")):
            settings.pop("DEV", None)  # which device is the default, and tinygrad sets that itself
        parts += [f"{key}={value}" for key, value in sorted(settings.items())]
        return "\n".join(parts)

    def tensor(self, device: Device, buffer: Any, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        """tinygrad's tensor over a buffer."""
        assert isinstance(device, TinygradDevice)
        return device.tensor(buffer, dtype, shape)

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Add numbers on the device; with ``full`` try every dtype and cast on real buffers."""
        name = self.canonical(name)
        try:
            device = self.device(name)
            found = (Tensor([1.0, 2.0, 3.0], device=name) + 1).tolist()
            if found != [2.0, 3.0, 4.0]:
                return ProbeResult(name, False, f"[1, 2, 3] + 1 gave {found}")
        except Exception as error:
            # the problem alone: who reports this result names the device
            problem = error.problem if isinstance(error, DeviceError) else str(error)
            lines = problem.strip().splitlines()
            return ProbeResult(name, False, lines[-1] if lines else type(error).__name__)
        if not full:
            return ProbeResult(name, True)
        statuses: dict[str, DTypeStatus] = dict.fromkeys(sorted(_UNSUPPORTED), "absent")
        for ours in _TO_TINYGRAD:
            statuses[ours] = _dtype_status(device, BY_NAME[ours])
        casts = tuple(
            (src.name, dst.name) for src, dst in _DEVICE_CASTS if _casts_exactly(device, src, dst)
        )
        return ProbeResult(name, True, "", statuses, casts)

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """Write ones to a real buffer, double them on the device, read the bytes back."""
        return "absent" if dtype.name in _UNSUPPORTED else _dtype_status(self.device(name), dtype)


def _stamp(path: str | None) -> str:
    try:
        status = os.stat(path or "")
    except OSError:
        return ""
    return f":{status.st_size}:{status.st_mtime_ns}"


def _filled(device: TinygradDevice, dtype: DType, data: bytes) -> Any:
    buffer = device.allocate(dtype, (len(data) // dtype.itemsize,))
    staging = device.staging(len(data))
    staging.view[:] = data
    device.copy(staging, 0, len(data), buffer, 0).wait()
    staging.close()
    return buffer


def _dtype_status(device: TinygradDevice, dtype: DType) -> DTypeStatus:
    """Write ones to a real buffer, double them on the device, read the bytes back."""
    import numpy as np

    one, two = (np.full(4, value).astype(dtype.numpy).tobytes() for value in (1, 2))
    kind = _TO_TINYGRAD[dtype.name]
    try:
        tensor = device.tensor(_filled(device, dtype, one), dtype, (4,))
        doubled = (tensor | tensor) if dtype.kind == "bool" else (tensor + tensor)
        got = bytes(doubled.contiguous().realize().bitcast(dtypes.uint8).data())
        if got != (one if dtype.kind == "bool" else two):
            return "broken"
    except Exception:
        return "broken"
    backend = device.name.partition(":")[0]
    if not device._computes_in(kind) or (kind is dtypes.bfloat16 and backend not in _BF16_NATIVE):
        return "emulated"
    return "native"


def _casts_exactly(device: TinygradDevice, src: DType, dst: DType) -> bool:
    """Compare the device's cast of every code with the reference, NaN payloads aside."""
    import numpy as np

    codes = np.arange(1 << src.bits, dtype=f"<u{src.itemsize}").tobytes()
    with np.errstate(all="ignore"):
        want = np.frombuffer(codes, src.numpy).astype(np.float32).astype(dst.numpy)
        nan = np.isnan(want)
    staging = device.staging(len(codes))
    staging.view[:] = codes
    try:
        buffer = device.allocate(dst, (1 << src.bits,))
        device.cast_copy(staging, 0, len(codes), src, buffer, 0, dst)
        got = np.frombuffer(device.read(buffer, 0, want.nbytes), dst.numpy)
    except Exception:
        return False
    finally:
        staging.close()
    same = got.view(f"u{dst.itemsize}") == want.view(f"u{dst.itemsize}")
    with np.errstate(all="ignore"):
        return bool(np.all(same | (nan & np.isnan(got))))


FRAMEWORK = TinygradFramework()
