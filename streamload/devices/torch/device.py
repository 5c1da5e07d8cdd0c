"""The devices of torch; its tensors and modules are in `torch.tensors`.

The CPU's memory is written in place. All other backends are staged: CUDA by `devices.cuda_copies`,
the others through plain memory and torch's own blocking copies.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby, repeat
from typing import Any

import torch

from streamload.core.dtypes import BF16, BY_NAME, DType
from streamload.core.system import trim_heap
from streamload.devices import cuda
from streamload.devices.allocators import AllocatorKind, ObjectCosts, TensorCosts
from streamload.devices.base import (
    Device,
    DeviceInfo,
    DTypeStatus,
    HeapDevice,
    ProbeResult,
    QueuedWork,
    StagedElements,
    Staging,
    Swap,
    Ticket,
)
from streamload.devices.cuda_copies import Copies
from streamload.devices.names import NO_DEVICE, environment
from streamload.devices.probing import ComputingFramework, nvidia_parts
from streamload.devices.staging import DONE, HostStaging
from streamload.devices.torch import own_code
from streamload.devices.torch.streams import current_stream
from streamload.devices.torch.tensors import (
    TO_TORCH,
    coded_of,
    name_of,
    parameters_of,
    places_of,
    unstored_of,
)
from streamload.errors import AllocationError, DeviceError, DeviceNotFoundError

_UNSUPPORTED = frozenset(BY_NAME) - frozenset(TO_TORCH)

_CPU_ALIGNMENT_NBYTES = 64  # gAlignment of c10/core/impl/alloc_cpu.h
_CUDA_BLOCK_NBYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator
_COSTS = TensorCosts(ObjectCosts(600), ObjectCosts(500))
_LEFT_NBYTES = 4608  # of a tensor on the CPU: a page, and what aligning it leaves
_REFIT_NBYTES = 2 * _CPU_ALIGNMENT_NBYTES  # glibc looks for as much more, to align in it

# Pairs worth a probe: narrow sources, so that every code can be tried.
_DEVICE_CASTS = tuple(
    (BY_NAME[src], BY_NAME[dst])
    for src, targets in (
        ("bfloat16", ("float16", "float32")),
        ("float16", ("float32", "bfloat16")),
        ("float8_e4m3fn", ("float16", "bfloat16")),
        ("float8_e5m2", ("float16", "bfloat16")),
    )
    for dst in targets
    if src in TO_TORCH
)

# Environment variables (beginnings of their names) that change what a device can do.
_SETTINGS = ("CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ZE_", "PYTORCH_", "LD_LIBRARY_PATH")


@contextmanager
def _unfilled() -> Iterator[None]:
    """Keep torch's deterministic mode from filling new memory, since a load writes all of it."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    if not (before and torch.are_deterministic_algorithms_enabled()):
        yield
        return
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 tensor over the memory of a contiguous tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return flat.set_(tensor.untyped_storage(), offset, (tensor.nbytes,), (1,))


def _staged(staging: Staging, start: int, nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor over ``nbytes`` of staging from byte ``start`` on."""
    return torch.frombuffer(staging.view[start : start + nbytes], dtype=torch.uint8)


class TorchDevice(Device):
    """A device of any backend, driven by torch's generic calls from the calling thread."""

    host_visible = False
    threads = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch_device = torch.device(name)

    @property
    def info(self) -> DeviceInfo:
        free, total = self._memory()
        return DeviceInfo(
            name=self.name,
            framework="torch",
            description=self.torch_device.type,
            host_visible=self.host_visible,
            shared_memory=self.torch_device.type in ("cpu", "mps"),
            free_nbytes=free,
            total_nbytes=total,
            costs=_COSTS,
            threads=self.threads,
            native_bf16=True,
            unsupported=_UNSUPPORTED,
            caveat=f"{self.name}: what its allocator takes beyond the tensors is not known",
        )

    def _memory(self) -> tuple[int | None, int | None]:
        """Return (free bytes, total bytes) of the device; None for each if it reports none."""
        if (ask := self._call("mem_get_info")) is not None:
            with suppress(RuntimeError):
                free, total = ask(self.torch_device)
                return free, total
        return None, None

    def _call(self, name: str) -> Callable[..., Any] | None:
        """Return a function of the backend's module (torch.xpu, torch.mps, ...), or None."""
        return getattr(getattr(torch, self.torch_device.type, None), name, None)

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        try:
            kind = TO_TORCH[dtype.name]
            modes = torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()
            if not any(modes):  # entering none takes longer than allocating
                return torch.empty(shape, dtype=kind, device=self.torch_device)
            # no inference tensor, which could not be trained outside of the mode
            with torch.inference_mode(False), _unfilled():
                return torch.empty(shape, dtype=kind, device=self.torch_device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            nbytes = dtype.nbytes(math.prod(shape))
            raise AllocationError(self.name, _first_line(error), nbytes=nbytes) from error

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[torch.Tensor]:
        # torch.empty_like takes half the time of torch.empty
        made: list[torch.Tensor] = []
        like: dict[Any, torch.Tensor] = {}
        dtype, shape = kinds[0]
        try:
            with torch.inference_mode(False), _unfilled():  # as in `allocate`
                for (dtype, shape), group in groupby(kinds):
                    key, count = (dtype.name, shape), len(list(group))
                    if key not in like:
                        kind = TO_TORCH[dtype.name]
                        like[key] = torch.empty(shape, dtype=kind, device=self.torch_device)
                        made.append(like[key])
                        count -= 1
                    # 0.9 microseconds each; from a loop of Python's 1.3
                    made.extend(map(torch.empty_like, repeat(like[key], count)))
        except (RuntimeError, MemoryError) as error:
            for tensor in made:  # the error's traceback keeps them
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.trim()
            nbytes = dtype.nbytes(math.prod(shape))
            raise AllocationError(self.name, _first_line(error), nbytes=nbytes) from error
        return made

    #: Returns the address of a buffer's first byte.
    address = staticmethod(torch.Tensor.data_ptr)

    def staging(self, nbytes: int) -> Staging:
        return HostStaging(nbytes)

    def copy(
        self, staging: Staging, start: int, nbytes: int, buffer: torch.Tensor, offset: int
    ) -> Ticket:
        target = _flat_bytes(buffer)[offset : offset + nbytes]
        with self._translated("a copy"):
            target.copy_(_staged(staging, start, nbytes))
            self.synchronize()
        return DONE

    def cast_copy(
        self, source: StagedElements, buffer: torch.Tensor, offset: int, dst: DType
    ) -> None:
        with self._translated("a cast"):
            raw = self._uploaded(source)
            size = dst.nbytes(source.dtype.numel(source.nbytes))
            target = _flat_bytes(buffer)[offset : offset + size].view(TO_TORCH[dst.name])
            target.copy_(raw.view(TO_TORCH[source.dtype.name]))
            self.synchronize()

    def _uploaded(self, source: StagedElements) -> torch.Tensor:
        """Copy staged elements to the device, and return them as a tensor of bytes there."""
        data = _staged(source.staging, source.start, source.nbytes)
        return data.to(self.torch_device, copy=True)

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Raise DeviceError for torch's errors; ``what`` names the work that failed."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, DeviceError):
                raise
            raise DeviceError(self.name, f"{what} failed: {_first_line(error)}") from error

    def read(self, buffer: torch.Tensor, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        with self._translated("reading"):
            return bytes(_flat_bytes(buffer.detach())[start:stop].cpu().numpy())

    def release(self, buffer: torch.Tensor) -> None:
        """Free the memory, even if something still holds the tensor."""
        buffer.data = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        self.trim()

    def trim(self) -> None:
        if (empty_cache := self._call("empty_cache")) is not None:
            with self._translated("giving memory back"):
                empty_cache()

    def synchronize(self) -> None:
        if (synchronize := self._call("synchronize")) is not None:
            with self._translated("earlier work on the device"):
                synchronize()


class CPUDevice(TorchDevice, HeapDevice):
    """torch's CPU, whose memory is written in place.

    torch computes in bfloat16 on every CPU. Float16 is no better there, and has less range, unless
    the CPU has instructions for float16 and none for bfloat16.
    """

    host_visible = True
    threads = 16

    @property
    def info(self) -> DeviceInfo:
        return replace(
            super().info,
            description=f"CPU ({torch.backends.cpu.get_cpu_capability()})",
            granularity_nbytes=_CPU_ALIGNMENT_NBYTES,
            costs=replace(_COSTS, left_nbytes=_LEFT_NBYTES, refit_nbytes=_REFIT_NBYTES),
            native_bf16=_cpu_multiplies("bfloat16") or not _cpu_multiplies("float16"),
            maps=True,
            caveat="",
        )

    def view(
        self, memory: mmap.mmap, start: int, dtype: DType, shape: tuple[int, ...]
    ) -> torch.Tensor:
        with torch.inference_mode(False):  # as in `allocate`
            flat = torch.frombuffer(
                memory, dtype=TO_TORCH[dtype.name], count=math.prod(shape), offset=start
            )
            return flat.view(shape)

    def trim(self) -> None:
        trim_heap()


#: torch's functions that ask for a CPU feature, by dtype; not every version has all of them.
_CPU_FEATURES = {
    "bfloat16": ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported"),
    "float16": ("_is_amx_fp16_supported", "_is_avx512_fp16_supported"),
}


def _cpu_multiplies(dtype: str) -> bool:
    """Whether the CPU has instructions that multiply the 16-bit ``dtype``, according to torch."""
    names = _CPU_FEATURES[dtype]
    asks = (getattr(torch.cpu, n, None) or getattr(torch._C._cpu, n, None) for n in names)
    if any(ask() for ask in asks if ask is not None):
        return True
    if dtype == "float16":  # Armv8.2 and later list it as "asimdhp"
        with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return any("asimdhp" in line.split() for line in file)
    return False


class _Event:
    """The ticket of all work queued on a stream so far."""

    def __init__(self, device: ROCmDevice, event: torch.cuda.Event, stream: int) -> None:
        self._device, self._event, self.stream = device, event, stream

    @property
    def events(self) -> tuple[ctypes.c_void_p]:
        """The driver's handle, for streams that wait."""
        return (ctypes.c_void_p(self._event.cuda_event),)

    def wait(self) -> None:
        if isinstance(self._device, CUDADevice):
            cuda.allow_captures()
        with self._device._translated("what a model computed"):
            self._event.synchronize()


class ROCmDevice(TorchDevice):
    """An AMD GPU, which torch calls "cuda", too; the base of `CUDADevice`.

    It has torch's caching allocator, and torch's own copies.
    """

    @property
    def info(self) -> DeviceInfo:
        with self._translated("asking what it is"), torch.cuda.device(self.torch_device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return replace(
            super().info,
            description=torch.cuda.get_device_name(self.torch_device),
            granularity_nbytes=_CUDA_BLOCK_NBYTES,
            allocator=_cuda_allocator(),
            native_bf16=native,
            caveat=_cuda_caveat(self.name),
        )

    def _memory(self) -> tuple[int | None, int | None]:
        with self._translated("asking for its memory"), torch.cuda.device(self.torch_device):
            free, total = self._unused()
            # memory in the allocator's cache is free for a load
            free += torch.cuda.memory_reserved(self.torch_device)
            free -= torch.cuda.memory_allocated(self.torch_device)
        return free, total

    def _unused(self) -> tuple[int, int]:
        """Return (free, total) bytes, without what the allocator caches."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return free, total

    def synchronize(self) -> None:
        with self._translated("earlier work on the device"):
            torch.cuda.synchronize(self.torch_device)

    def mark(self) -> QueuedWork | None:
        event = torch.cuda.Event(blocking=True)
        stream = torch.cuda.current_stream(self.torch_device)
        event.record(stream)
        return _Event(self, event, stream.cuda_stream)

    def allocated_nbytes(self) -> int | None:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def counters(self) -> Mapping[str, int]:
        names = "max_memory_allocated", "max_memory_reserved", "memory_reserved"
        return {name: int(getattr(torch.cuda, name)(self.torch_device)) for name in names}


class CUDADevice(Copies, ROCmDevice):
    """An NVIDIA GPU: the driver's own calls copy to it from page-locked slots."""

    threads = 16

    def __init__(self, name: str) -> None:
        ROCmDevice.__init__(self, name)
        self._index = self.torch_device.index
        context = cuda.Context.primary(name, self._index)
        Copies.__init__(self, context, torch.Tensor.data_ptr)

    @property
    def info(self) -> DeviceInfo:
        return replace(
            super().info,
            shared_memory=self.context.integrated,
            charged=False,
            casts=self.bulk is not None,
        )

    def _unused(self) -> tuple[int, int]:
        return self.context.memory_nbytes()

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an uninitialized tensor whose memory no queued work uses any more.

        torch reuses memory that kernels on its stream may still use; copies run on other streams.
        """
        self.context.check_room(dtype.nbytes(math.prod(shape)), self.trim)
        tensor = super().allocate(dtype, shape)
        self._finish()
        return tensor

    def allocate_all(self, kinds: Sequence[tuple[DType, tuple[int, ...]]]) -> list[torch.Tensor]:
        nbytes = sum(dtype.nbytes(math.prod(shape)) for dtype, shape in kinds)
        self.context.check_room(nbytes, self.trim)
        tensors = super().allocate_all(kinds)
        self._finish()
        return tensors

    def follow(self, tickets: Iterable[Ticket]) -> None:
        """Let the current stream wait for copies; the calling thread goes on."""
        mine: Iterable[Any] = tickets
        events = [event for ticket in mine for event in ticket.events]
        context, stream = current_stream(self._index)
        context.order(stream, events)

    def _finish(self) -> None:
        """Wait for all work that torch has queued on its current stream."""
        context, stream = current_stream(self._index)
        context.finish(stream)

    def _uploaded(self, source: StagedElements) -> torch.Tensor:
        raw = torch.empty(source.nbytes, dtype=torch.uint8, device=self.torch_device)
        self.synchronize()  # kernels queued before may still use its memory
        self.copy(source.staging, source.start, source.nbytes, raw, 0).wait()
        return raw


def _cuda_allocator() -> AllocatorKind:
    """Return how torch's CUDA allocator takes memory from the driver, by its settings."""
    if torch.cuda.get_allocator_backend() != "native":
        return "exact"
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in environment(("PYTORCH_NO_CUDA_MEMORY_CACHING",)):
        return "cuda_driver"  # each tensor is the driver's own
    expandable = "expandable_segments:true" in _cuda_settings()
    return "cuda_expandable" if expandable else "cuda_caching"


def _cuda_settings() -> str:
    """Return the allocator's settings in the environment, in lower case without blanks."""
    settings = environment(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC"))
    return ",".join(settings.values()).replace(" ", "").lower()


def _cuda_caveat(name: str) -> str:
    """Return a sentence about settings of the allocator that plans do not cover, or ""."""
    text = _cuda_settings()
    keys = ("roundup_power2_divisions", "max_split_size_mb", "large_segment_size_mb")
    found = [key for key in keys if key in text]
    if not found:
        return ""
    return (
        f"{name}: PYTORCH_ALLOC_CONF sets {' and '.join(found)}, with which torch's allocator may "
        "take more from the device than was planned"
    )


class TorchFramework(ComputingFramework):
    """The framework torch: devices, tensors and modules."""

    name = "torch"
    held, casts = TO_TORCH, _DEVICE_CASTS

    parameters = staticmethod(parameters_of)
    unstored = staticmethod(unstored_of)
    coded = staticmethod(coded_of)
    changed_names = staticmethod(own_code.changed_names)
    followed_by = staticmethod(own_code.followed_by)
    after_load = staticmethod(own_code.after_load)

    def swap(self, model: Any, formats: Mapping[str, str]) -> Swap:
        from streamload.devices.torch.quantized import swapping

        return swapping(model, places_of(model), formats)

    def canonical(self, name: str) -> str:
        """Return torch's name of a device with an index: "cuda:0" for "cuda"; "cpu" has none."""
        try:
            return name_of(torch.device(name.lower() or self.default_device()))
        except RuntimeError as error:
            said = _first_line(error)
            problem = NO_DEVICE if said.startswith("Expected one of") else said
            raise DeviceNotFoundError(name, problem) from error

    def device(self, name: str) -> TorchDevice:
        name = self.canonical(name)
        kind = name.partition(":")[0]
        if kind == "meta":
            raise DeviceNotFoundError(name, "it holds no values")
        try:
            torch.empty(0, device=name)  # opens it, and takes no memory of it
        except (RuntimeError, AssertionError, ImportError) as error:
            raise DeviceNotFoundError(name, _first_line(error)) from error
        return _WAYS.get(kind, TorchDevice)(name)

    def default_device(self) -> str:
        """Return the default device set in torch, else the first accelerator, else the CPU."""
        default = torch.get_default_device()
        if default.type not in ("cpu", "meta"):
            return name_of(default)
        return super().default_device()

    def candidates(self) -> Sequence[str]:
        names = []
        for kind in ("cuda", "xpu", "mps"):
            module = getattr(torch, kind, None)
            if module is not None and module.is_available():
                count = module.device_count()
                names += [name_of(torch.device(kind, index)) for index in range(count)]
        return [*names, "cpu"]

    def trusted(self, name: str) -> bool:
        """Whether the device is the CPU, or of a backend that this process uses already."""
        kind = self.canonical(name).partition(":")[0]
        initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
        return kind == "cpu" or (initialized is not None and bool(initialized()))

    def lasting(self, name: str) -> bool:
        """Whether the device is an NVIDIA GPU, whose fingerprint covers a probe's dependencies."""
        return self.canonical(name).startswith("cuda") and bool(torch.version.cuda)

    def fingerprint(self, name: str) -> str:
        parts = [str(torch.__version__), str(torch.version.cuda), str(torch.version.hip)]
        parts += [str(torch.__file__), sys.platform, *nvidia_parts()]
        parts += [f"{key}={value}" for key, value in sorted(environment(_SETTINGS).items())]
        return "\n".join(parts)

    def probe(self, name: str, full: bool) -> ProbeResult:
        """Probe a device; if results are cached on disk, test bfloat16, too: each load needs it."""
        result = super().probe(name, full)
        if full or not result.works or not self.lasting(name):
            return result
        status = self.dtype_status(name, BF16)
        # not "broken": the device may have been full
        return result if status == "broken" else replace(result, dtypes={"bfloat16": status})

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """Return a dtype's status, cached unless "broken": first kernels take milliseconds."""
        key = (self.canonical(name), dtype.name)
        status = _WORKED.get(key) or super().dtype_status(name, dtype)
        if status != "broken":  # the device may have been full
            _WORKED[key] = status
        return status

    def _add_one(self, name: str, numbers: list[float]) -> list[float]:
        return (torch.tensor(numbers, device=name) + 1).tolist()  # type: ignore[no-any-return]

    def _problem(self, error: Exception) -> str:
        return getattr(error, "problem", "") or _first_line(error)

    def _double(self, device: Any, dtype: DType, ones: bytes) -> tuple[bytes, DTypeStatus]:
        status: DTypeStatus = "native"
        tensor = device.allocate(dtype, (len(ones) // dtype.itemsize,))
        _flat_bytes(tensor).copy_(torch.frombuffer(bytearray(ones), dtype=torch.uint8))
        try:
            doubled = tensor.logical_or(tensor) if dtype.kind == "bool" else tensor + tensor
        except RuntimeError:
            # torch has few operations for 8-bit floats and wide unsigned integers: they are cast
            wide = tensor.to(torch.float32 if dtype.kind == "float" else torch.int64)
            doubled, status = (wide + wide).to(tensor.dtype), "emulated"
        if dtype.name in _CPU_FEATURES and device.name == "cpu":
            status = "native" if _cpu_multiplies(dtype.name) else "emulated"
        elif dtype is BF16 and not device.info.native_bf16:
            status = "emulated"
        return device.read(doubled.contiguous(), 0, len(ones)), status


_WAYS: dict[str, type[TorchDevice]] = {
    "cpu": CPUDevice,
    "cuda": CUDADevice if torch.version.cuda else ROCmDevice,
}


_WORKED: dict[tuple[str, str], DTypeStatus] = {}


FRAMEWORK = TorchFramework()
