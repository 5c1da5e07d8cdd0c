"""The devices of tinygrad.

This file and `tinygrad.tensors` use internals of tinygrad 0.13 and 0.14: ``Buffer``, ``UOp``, the
allocators' ``_as_buffer``, ``_offset``, ``_copyin``, ``_copyout`` and ``cache``, the context of its
CUDA devices, and the bindings of OpenCL and CUDA. None is chosen by a version: internals that all
devices need are checked at import; if a backend lacks another, it is written through the public
``Tensor`` API (`_TensorDevice`), more slowly and within the same bounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import math
import mmap
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tinygrad
from tinygrad import Device as _Devices
from tinygrad import Tensor, dtypes
from tinygrad.device import ALL_DEVICES, Buffer
from tinygrad.helpers import EMULATED_DTYPES, GlobalCounters
from tinygrad.uop.ops import UOp

from streamload.codecs.scheme import CodedWeight
from streamload.core.dtypes import BF16, BY_NAME, F16, F32, DType
from streamload.core.system import address_of, bytes_at
from streamload.devices.allocators import ObjectCosts, TensorCosts
from streamload.devices.base import (
    Device,
    DeviceInfo,
    DTypeStatus,
    StagedElements,
    Staging,
    Swap,
    Ticket,
)
from streamload.devices.cuda_copies import Copies
from streamload.devices.names import NO_DEVICE, environment
from streamload.devices.probing import ComputingFramework, nvidia_parts
from streamload.devices.staging import DONE, HostStaging
from streamload.devices.tinygrad.tensors import (
    ALLOCATORS,
    SHARED,
    TO_TINYGRAD,
    backend_of,
    context_of,
    current,
    empty_cache,
    has,
    map_opencl,
    opened,
    over,
    parameters_of,
)
from streamload.errors import AllocationError, DeviceError, DeviceNotFoundError

_UNSUPPORTED = frozenset(BY_NAME) - frozenset(TO_TINYGRAD)

# Backends that compute in bfloat16 if their renderer lists it. The others keep it as ushort or
# promote each operation (OpenCL, clang), which tinygrad reports as supported, too.
_BF16_NATIVE = frozenset({"AMD", "CUDA", "HIP", "METAL", "NV"})
# Pairs worth a probe: narrow sources, so that every code can be tried.
_DEVICE_CASTS = ((BF16, F16), (BF16, F32), (F16, F32), (F16, BF16))

# Multiples that allocations are rounded up to, by backend; on CUDA the least.
_GRANULARITY_NBYTES = {"CPU": mmap.PAGESIZE, "CUDA": 512}
# tinygrad makes an object for each extent, size and shape, and on the CPU a ctypes class for each
# size: docs/measurements.md, "What a tensor takes".
_COSTS = TensorCosts(ObjectCosts(2500, 750, 300, 700, 450), ObjectCosts(1700, 0, 300))
# On the CPU each buffer is a map of its own, of shared memory: 1,975 bytes of the kernel each.
_MAPPED_COSTS = TensorCosts(
    ObjectCosts(2600, 700, 300, 750, 3400), ObjectCosts(1800, 0, 300, 0, 2900), kernel_nbytes=2048
)

# Environment variables (beginnings of their names) that change what a device can do.
_SETTINGS = (
    *("DEV", "CC", "POCL_", "OCL_", "CUDA_", "NVRTC_", "NVIDIA_"),
    *("EMULATED_DTYPES", "LD_LIBRARY_PATH"),
)
_NVIDIA = frozenset({"CUDA", "NV"})
_AT_FAULT = re.compile(r"\berror:", re.IGNORECASE)  # as clang and nvrtc mark their messages


def _max_buffers() -> int | None:
    """Return how many more memory maps Linux allows this process, less 1,000; None if unknown."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_text())
        with Path("/proc/self/maps").open("rb") as maps:
            return max(most - sum(1 for _ in maps) - 1000, 0)
    except (OSError, ValueError):
        return None


class TinygradDevice(Device):
    """The base of tinygrad's devices; subclasses write their memory.

    `needs`: name of the allocator's method without which the class is not used, or "".
    """

    host_visible = False
    threads = 0
    needs = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self._device = opened(name)

    @property
    def info(self) -> DeviceInfo:
        backend = backend_of(self.name)
        return DeviceInfo(
            name=self.name,
            framework="tinygrad",
            description=str(getattr(self._device, "device_name", "")),
            host_visible=self.host_visible,
            shared_memory=backend in SHARED,
            granularity_nbytes=_GRANULARITY_NBYTES.get(backend, 1),
            allocator="cuda_driver" if backend == "CUDA" else "exact",  # cuMemAlloc, once for each
            costs=_MAPPED_COSTS if backend == "CPU" else _COSTS,
            max_buffers=_max_buffers() if backend == "CPU" else None,  # each is a map
            threads=self.threads,
            native_bf16=backend in _BF16_NATIVE and self._computes_in(dtypes.bfloat16),
            unsupported=_UNSUPPORTED,
        )

    def _computes_in(self, dtype: Any) -> bool:
        """Whether a dtype is native: the renderer lists it, and tinygrad does not emulate it."""
        supported = getattr(self._device.renderer, "supported_dtypes", None)
        listed = supported is not None and dtype in supported()
        return listed and dtype not in EMULATED_DTYPES.tolist(dtypes)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        buffer = Buffer(self.name, math.prod(shape), TO_TINYGRAD[dtype.name])
        if buffer.size == 0:
            return buffer  # without memory
        try:
            with ALLOCATORS:
                empty_cache(self._device.allocator, keep_nbytes=buffer.nbytes)
                buffer.allocate()
        except (MemoryError, RuntimeError, OSError, AssertionError) as error:
            raise AllocationError(self.name, str(error), nbytes=buffer.nbytes) from error
        return buffer

    def staging(self, nbytes: int) -> Staging:
        return HostStaging(nbytes)

    def cast_copy(self, source: StagedElements, buffer: Any, offset: int, dst: DType) -> None:
        result = self._uploaded(source).cast(TO_TINYGRAD[dst.name])
        self._store(result, buffer, offset, dst.nbytes(source.dtype.numel(source.nbytes)))
        self._device.synchronize()

    def _uploaded(self, source: StagedElements) -> Tensor:
        """Copy staged elements to the device, and return them as a tensor there."""
        raw = self.allocate(source.dtype, (source.dtype.numel(source.nbytes),))
        self.copy(source.staging, source.start, source.nbytes, raw, 0).wait()
        return Tensor(UOp.from_buffer(raw))

    def _store(self, result: Tensor, buffer: Buffer, offset: int, nbytes: int) -> None:
        """Compute ``result``, of ``nbytes``, into a buffer from byte ``offset`` on."""
        view = buffer.view(nbytes // buffer.dtype.itemsize, buffer.dtype, offset)
        Tensor(UOp.from_buffer(view.ensure_allocated())).assign(result).realize()

    def read(self, buffer: Any, start: int, stop: int) -> bytes:
        out = bytearray(stop - start)
        if out:
            self._read(buffer, start, out)
        return bytes(out)

    def _read(self, buffer: Any, start: int, out: bytearray) -> None:
        view = self._device.allocator._offset(buffer._buf, len(out), start)
        self._device.allocator._copyout(memoryview(out), view)

    def release(self, buffer: Buffer) -> None:
        if buffer.is_allocated():
            buffer.deallocate()
        self.trim()

    def trim(self) -> None:
        empty_cache(self._device.allocator)

    def synchronize(self) -> None:
        with ALLOCATORS, current(self._device):
            self._device.synchronize()

    def allocated_nbytes(self) -> int | None:
        return int(GlobalCounters.mem_used_per_device[self.name])


class _HostVisibleDevice(TinygradDevice):
    """CPU, Metal, QCOM and PYTHON: the CPU can address their memory."""

    host_visible = True
    threads = 16
    needs = "_as_buffer"

    def _view(self, buffer: Buffer) -> memoryview:
        view: memoryview = self._device.allocator._as_buffer(buffer._buf)
        return view.cast("B") if view.format != "B" or view.ndim != 1 else view

    @contextlib.contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        with self._view(buffer)[start:stop] as view:
            yield view

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        self._device.synchronize()
        with self.window(buffer, offset, offset + nbytes) as view:
            view[:] = staging.view[start : start + nbytes]
        return DONE

    def _read(self, buffer: Buffer, start: int, out: bytearray) -> None:
        self._device.synchronize()
        out[:] = self._view(buffer)[start : start + len(out)]


class _OpenCLDevice(TinygradDevice):
    """OpenCL: chunks are mapped if memory is unified, else written at an offset.

    Mapping takes tens of microseconds a chunk, and works from several threads. A driver that copies
    on mapping then holds one chunk at most.
    """

    threads = 16
    needs = "_copyin"

    def __init__(self, name: str, *, mapped: bool | None = None) -> None:
        super().__init__(name)
        from tinygrad.runtime.autogen import opencl
        from tinygrad.runtime.ops_cl import cl_errors

        self._cl, self._errors = opencl, cl_errors
        # by the queue: tinygrad has had several names for it
        self._id = opencl.cl_device_id()
        place = ctypes.sizeof(self._id), ctypes.byref(self._id), None
        self._call("clGetCommandQueueInfo", self._device.queue, opencl.CL_QUEUE_DEVICE, *place)
        unified = bool(self._query(opencl.CL_DEVICE_HOST_UNIFIED_MEMORY, ctypes.c_uint32))
        self._unified = unified
        self.host_visible = unified if mapped is None else mapped

    def _query(self, what: int, kind: Any) -> int:
        value = kind()
        size, place = ctypes.sizeof(value), ctypes.byref(value)
        self._call("clGetDeviceInfo", self._id, what, size, place, None)
        return int(value.value)

    def _call(self, name: str, *arguments: Any) -> None:
        # the bindings return the status unchecked
        self._check(getattr(self._cl, name)(*arguments), name)

    def _check(self, status: int, call: str) -> None:
        if status != 0:
            raise DeviceError(self.name, f"{call}: {self._errors.get(status, status)}")

    def _enqueue(self, name: str, *arguments: Any) -> None:
        """Call a function of OpenCL's queue without events; raises DeviceError."""
        self._call(name, self._device.queue, *arguments, 0, None, None)

    @property
    def info(self) -> DeviceInfo:
        cl, wide = self._cl, ctypes.c_uint64
        total = self._query(cl.CL_DEVICE_GLOBAL_MEM_SIZE, wide)
        align = self._query(cl.CL_DEVICE_MEM_BASE_ADDR_ALIGN, ctypes.c_uint32) // 8
        return replace(
            super().info,
            shared_memory=self._unified,
            free_nbytes=max(total - int(self.allocated_nbytes() or 0), 0),
            total_nbytes=total,
            largest_allocation_nbytes=self._query(cl.CL_DEVICE_MAX_MEM_ALLOC_SIZE, wide),
            granularity_nbytes=max(align, 1),
        )

    @contextlib.contextmanager
    def window(self, buffer: Buffer, start: int, stop: int) -> Iterator[memoryview]:
        flags = self._cl.CL_MAP_WRITE_INVALIDATE_REGION
        status, address = map_opencl(self._device, buffer, flags, start, stop - start)
        self._check(status, "clEnqueueMapBuffer")
        try:
            yield bytes_at(address, stop - start)
        finally:
            self._enqueue("clEnqueueUnmapMemObject", buffer._buf, ctypes.c_void_p(address))

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        source = ctypes.c_void_p(address_of(staging.view) + start)
        self._enqueue("clEnqueueWriteBuffer", buffer._buf, True, offset, nbytes, source)
        return DONE

    def _store(self, result: Tensor, buffer: Buffer, offset: int, nbytes: int) -> None:
        # no sub-buffers here: the cast goes to a buffer of its own, and is copied on the device
        scratch = result.contiguous().realize().uop.base.buffer
        self._enqueue("clEnqueueCopyBuffer", scratch._buf, buffer._buf, 0, offset, nbytes)
        self._device.synchronize()

    def _read(self, buffer: Buffer, start: int, out: bytearray) -> None:
        target = ctypes.c_void_p(address_of(memoryview(out)))  # ctypes.cast would leave a cycle
        self._enqueue("clEnqueueReadBuffer", buffer._buf, True, start, len(out), target)


class _CUDADevice(Copies, TinygradDevice):
    """CUDA: the driver's own calls copy from page-locked slots, in tinygrad's context.

    tinygrad launches kernels on the null stream; copies run on streams that do not wait for it.
    """

    threads = 16
    needs = "_offset"

    def __init__(self, name: str) -> None:
        TinygradDevice.__init__(self, name)
        context = context_of(self._device)
        assert context is not None, "libcuda.so.1 cannot be loaded"
        Copies.__init__(self, context, lambda buffer: int(buffer._buf.value))

    @property
    def info(self) -> DeviceInfo:
        free, total = self.context.memory_nbytes()
        text = ctypes.create_string_buffer(256)
        with self.context.current():
            self.context.call("cuDeviceGetName", text, len(text), self._device.cu_device)
        return replace(
            super().info,
            description=text.value.decode(errors="replace"),
            shared_memory=self.context.integrated,
            charged=False,
            free_nbytes=free,
            total_nbytes=total,
            casts=self.bulk is not None,
        )

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """Allocate memory that no queued work uses any more.

        tinygrad's cache may have memory that queued kernels still use.
        """
        with self.context.current():
            self.context.check_room(dtype.nbytes(math.prod(shape)), self.trim)
            buffer = super().allocate(dtype, shape)
        self.context.finish(0)  # the null stream, where tinygrad's kernels run
        return buffer

    def _read(self, buffer: Buffer, start: int, out: bytearray) -> None:
        with ALLOCATORS, self.context.current():
            super()._read(buffer, start, out)

    def release(self, buffer: Buffer) -> None:
        with self.context.current():  # without a cache (LRU=0), tinygrad frees it here
            super().release(buffer)


class _OffsetDevice(TinygradDevice):
    """HIP, NV and AMD: their allocator can copy to an offset in a buffer."""

    needs = "_offset"

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        allocator = self._device.allocator
        source = staging.view[start : start + nbytes]
        with ALLOCATORS:
            allocator._copyin(allocator._offset(buffer._buf, nbytes, offset), source)
            self.synchronize()  # until then it keeps the source
        return DONE


class _TensorDevice(TinygradDevice):
    """Any other backend, driven only by public ``Tensor`` calls.

    A parameter is a tensor of bytes, assigned slice by slice and then bitcast to its dtype; nothing
    computes in that dtype before, since it may be emulated.
    """

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        nbytes = dtype.nbytes(math.prod(shape))
        self.trim()
        try:
            empty = Tensor.empty(nbytes, dtype=dtypes.uint8, device=self.name)
            return (empty if nbytes == 0 else empty.zeros_like().contiguous()).realize()
        except (MemoryError, RuntimeError, OSError, AssertionError) as error:
            raise AllocationError(self.name, str(error), nbytes=nbytes) from error

    def copy(self, staging: Staging, start: int, nbytes: int, buffer: Any, offset: int) -> Ticket:
        self._assign(buffer, offset, self._bytes(staging, start, nbytes))
        self._device.synchronize()
        return DONE

    def _bytes(self, staging: Staging, start: int, nbytes: int) -> Tensor:
        data = bytes(staging.view[start : start + nbytes])
        return Tensor(data, dtype=dtypes.uint8, device=self.name)

    def _assign(self, buffer: Tensor, offset: int, chunk: Tensor) -> None:
        # a variable offset: the kernel of one chunk size is compiled once
        at = UOp.variable("offset", 0, max(buffer.shape[0] - chunk.shape[0], 1)).bind(offset)
        buffer[at : at + chunk.shape[0]].assign(chunk).realize()

    def _uploaded(self, source: StagedElements) -> Tensor:
        raw = self._bytes(source.staging, source.start, source.nbytes)
        return raw.bitcast(TO_TINYGRAD[source.dtype.name])

    def _store(self, result: Tensor, buffer: Tensor, offset: int, nbytes: int) -> None:
        self._assign(buffer, offset, result.contiguous().bitcast(dtypes.uint8).contiguous())

    def _read(self, buffer: Any, start: int, out: bytearray) -> None:
        out[:] = bytes(buffer[start : start + len(out)].contiguous().data())

    def release(self, buffer: Any) -> None:
        self.trim()


_WAYS: dict[str, type[TinygradDevice]] = {
    "CL": _OpenCLDevice,
    "CUDA": _CUDADevice,
    **dict.fromkeys(("CPU", "METAL", "PYTHON", "QCOM"), _HostVisibleDevice),
    **dict.fromkeys(("AMD", "HIP", "NV"), _OffsetDevice),
}


def _problem(error: Exception) -> str:
    """Return the line of an error's message that names the problem: a compiler's "error:" line."""
    if isinstance(error, ExceptionGroup):  # one error for each of tinygrad's renderers
        return "; ".join(dict.fromkeys(map(_problem, error.exceptions)))
    problem = error.problem if isinstance(error, DeviceError) else str(error)
    lines = problem.strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if _AT_FAULT.search(line)), lines[-1])


class TinygradFramework(ComputingFramework):
    """The framework tinygrad: devices, tensors and models."""

    name = "tinygrad"
    held, casts = TO_TINYGRAD, _DEVICE_CASTS

    _problem = staticmethod(_problem)
    parameters = staticmethod(parameters_of)

    def layers(self) -> Sequence[str]:
        from streamload.devices.tinygrad.linear import FORMATS

        return FORMATS

    def coded(self, model: Any) -> Mapping[str, CodedWeight]:
        from streamload.devices.tinygrad.linear import coded

        return coded(model)

    def swap(self, model: Any, formats: Mapping[str, str]) -> Swap:
        from streamload.devices.tinygrad.linear import swapping

        return swapping(model, formats)

    def canonical(self, name: str) -> str:
        return str(_Devices.canonicalize(name)) if name else self.default_device()

    def device(self, name: str) -> TinygradDevice:
        name = self.canonical(name)
        way = _WAYS.get(backend_of(name), _TensorDevice)
        try:
            if way is _CUDADevice and context_of(opened(name)) is None:
                way = _OffsetDevice
            if way.needs and not has(opened(name).allocator, way.needs):
                way = _TensorDevice
            with contextlib.suppress(AttributeError, ImportError):  # internals that moved
                return way(name)
            return _TensorDevice(name)
        except DeviceNotFoundError:
            raise
        except Exception as error:  # each backend raises what it likes
            module = f"tinygrad.runtime.ops_{backend_of(name).lower()}"
            lacking = isinstance(error, ImportError) and error.name == module
            problem = NO_DEVICE if lacking else error
            raise DeviceNotFoundError(name, f"tinygrad cannot open it: {problem}") from error

    def default_device(self) -> str:
        try:
            return str(_Devices.DEFAULT)
        except Exception as error:
            raise DeviceNotFoundError(
                "tinygrad", f"it has no device: {error}", working=("host",)
            ) from error

    def candidates(self) -> Sequence[str]:
        return [name for name in ALL_DEVICES if name not in ("DSP", "WEBGPU")]

    def fingerprint(self, name: str) -> str:
        """Return versions, compilers, drivers and settings that a device depends on, as lines."""
        parts = [_version(), str(tinygrad.__file__), sys.platform]
        settings = environment(_SETTINGS)
        for program in (settings.get("CC", "clang"), "nvcc", "ptxas"):
            found = shutil.which(program)
            parts.append(f"{program}={found}{_stamp(found)}")
        for folder in (settings.get("OCL_ICD_VENDORS", ""), "/etc/OpenCL/vendors"):
            if folder and Path(folder).is_dir():
                parts += [f"{p}{_stamp(str(p))}" for p in sorted(Path(folder).iterdir())]
        if backend_of(self.canonical(name)) in _NVIDIA:
            from tinygrad.runtime.autogen import nvrtc

            found = getattr(nvrtc.dll, "_name", None)  # None if there is no such library
            parts.append(f"nvrtc={found}{_stamp(found)}")
            parts += nvidia_parts()
        settings.pop("POCL_CACHE_DIR", None)
        if re.fullmatch("[A-Z]*", settings.get("DEV", "")):
            settings.pop("DEV", None)  # the default device, which tinygrad sets, too
        parts += [f"{key}={value}" for key, value in sorted(settings.items())]
        return "\n".join(parts)

    def tensor(self, device: Device, buffer: Any, dtype: DType, shape: tuple[int, ...]) -> Tensor:
        return Tensor(over(buffer, dtype, shape))

    def _add_one(self, name: str, numbers: list[float]) -> list[float]:
        return (Tensor(numbers, device=name) + 1).tolist()  # type: ignore[no-any-return]

    def _double(self, device: Any, dtype: DType, ones: bytes) -> tuple[bytes, DTypeStatus]:
        kind = TO_TINYGRAD[dtype.name]
        buffer = device.allocate(dtype, (len(ones) // dtype.itemsize,))
        staging = device.staging(len(ones))
        staging.view[:] = ones
        device.copy(staging, 0, len(ones), buffer, 0).wait()
        staging.close()
        tensor = self.tensor(device, buffer, dtype, (len(ones) // dtype.itemsize,))
        doubled = (tensor | tensor) if dtype.kind == "bool" else (tensor + tensor)
        native = kind is not dtypes.bfloat16 or backend_of(device.name) in _BF16_NATIVE
        status: DTypeStatus = "native" if native and device._computes_in(kind) else "emulated"
        return bytes(doubled.contiguous().realize().bitcast(dtypes.uint8).data()), status


def _version() -> str:
    """Return tinygrad's version, and its file's size and time, which change in a git clone."""
    stamp = _stamp(tinygrad.__file__)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tinygrad") + stamp
    return stamp


def _stamp(path: str | None) -> str:
    """Return ":size:modification time" of a file, or "" if there is none."""
    try:
        status = os.stat(path or "")
    except OSError:
        return ""
    return f":{status.st_size}:{status.st_mtime_ns}"


FRAMEWORK = TinygradFramework()
