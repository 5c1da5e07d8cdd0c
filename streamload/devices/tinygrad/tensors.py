"""Parameters of tinygrad's models: tensors, the memory under them, and graphs over it.

tinygrad's internals are used only in this folder and for layers that stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import tinygrad
from tinygrad import Device as _Devices
from tinygrad import Tensor, dtypes
from tinygrad.device import Allocator, Buffer
from tinygrad.engine.jit import CapturedJit
from tinygrad.uop.ops import Ops, UOp

from streamload.codecs.weights import is_text
from streamload.core.computed import is_computed, is_statistic
from streamload.core.dtypes import BY_NAME, DType
from streamload.core.system import address_of, trim_heap
from streamload.core.tensors import Block
from streamload.devices import cuda
from streamload.devices.parameters import EntryParameter, make_parameters
from streamload.devices.tinygrad.buffers import InvalidBuffer, invalid_buffer, is_absent
from streamload.errors import OffloadError

_UNLIKE = {"float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2"}  # tinygrad's own names
#: tinygrad's dtype by our long name, for those that it has.
TO_TINYGRAD = {
    name: getattr(dtypes, _UNLIKE.get(name, name))
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *(*_UNLIKE, "float16", "bfloat16", "float32", "float64"),
    )
}
_FROM_TINYGRAD = {dtype: name for name, dtype in TO_TINYGRAD.items()}

_VIEWS = ("contiguous_view", "contiguous_view_offset")  # since 0.14, and before


def _check_internals() -> None:
    """Raise ImportError if the installed tinygrad lacks an internal that all devices here need."""
    used: dict[type, Iterable[str]] = {
        Buffer: ("allocate", "base", "deallocate", "ensure_allocated", "is_allocated", "view"),
        UOp: (
            *("base", "buffer", "from_buffer", "has_buffer_identity", "is_realized"),
            *("reshape", "substitute", "toposort", "variable"),
        ),
        Allocator: ("alloc", "free"),
    }
    lacking = [
        f"{cls.__name__}.{n}" for cls, names in used.items() for n in names if n not in dir(cls)
    ]
    if not any(hasattr(UOp, name) for name in _VIEWS):
        lacking.append(f"UOp.{_VIEWS[0]}")
    if lacking:
        raise ImportError(
            f"this tinygrad ({tinygrad.__file__}) has no {', '.join(lacking)}, which streamload "
            "uses: install one that it is tested with (pip install 'tinygrad>=0.13,<0.15')"
        )


_check_internals()

#: Backends whose devices use host memory.
SHARED = frozenset({"CL", "CPU", "METAL", "PYTHON", "QCOM", "DSP"})

#: Held while an allocator of tinygrad is used: they have no locks, and loads may run in parallel.
ALLOCATORS = threading.RLock()


def backend_of(name: str) -> str:
    """Return the backend in a device's name: "CUDA" for "CUDA:1"."""
    return name.partition(":")[0]


def opened(name: str) -> Any:
    """Open and return tinygrad's device; raises any exception of its backend.

    Opening a CUDA device changes the current context; the earlier context (torch's) is restored.
    One thread opens a device at a time: two that open OpenCL's crash in its driver.
    """
    with ALLOCATORS:
        return _opened(name)


def _opened(name: str) -> Any:
    if backend_of(name) != "CUDA":
        return _Devices[name]
    from tinygrad.runtime.autogen import cuda as driver

    before = driver.CUcontext()
    with contextlib.suppress(AttributeError):  # without a driver; opening fails below
        driver.cuCtxGetCurrent(ctypes.byref(before))
    try:
        return _Devices[name]
    finally:
        if before:
            driver.cuCtxSetCurrent(before)


@cache
def context_of(device: Any) -> cuda.Context | None:
    """Return the context of a CUDA device of tinygrad; None for other devices.

    None, too, if `devices.cuda` does not know the name of the driver's library (Windows).
    """
    if backend_of(device.device) != "CUDA":
        return None
    handle = ctypes.cast(device.context, ctypes.c_void_p).value or 0
    try:
        return cuda.Context(device.device, handle)
    except OSError:
        return None


def current(device: Any) -> AbstractContextManager[None]:
    """Make a CUDA device's context current inside the ``with``; do nothing for other devices.

    tinygrad frees memory in the current context, and leaves contexts current. A thread that has not
    computed has no current context.
    """
    context = context_of(device)
    return nullcontext() if context is None else context.current()


def empty_cache(allocator: Any, keep_nbytes: int = 0) -> None:
    """Free an allocator's cache, except one buffer of ``keep_nbytes``, which is needed next."""
    freed = getattr(allocator, "cache", {})
    emptied = False
    with ALLOCATORS:
        for key in list(freed):
            nbytes, options = key
            kept = freed.get(key, [])
            # one by one, out of the cache first: after Ctrl-C, tinygrad's own free_cache would free
            # some twice
            while len(kept) > (nbytes == keep_nbytes and options is None):
                try:
                    opaque = kept.pop()
                except IndexError:  # a thread that computes has just taken it
                    break
                with current(allocator.dev):
                    Allocator.free(allocator, opaque, nbytes, options)
                emptied = True
            if not kept:
                freed.pop(key, None)  # otherwise it grows by a list for every size
    if emptied and backend_of(allocator.dev.device) in SHARED:
        trim_heap()  # a driver's buffers may be heap memory (PoCL), which malloc keeps


def has(allocator: Any, method: str) -> bool:
    """Whether an allocator's class implements a method itself: inherited ones may only raise."""
    own = getattr(type(allocator), method, None)
    return own is not None and own is not getattr(Allocator, method, None)


def over(buffer: Any, dtype: DType, shape: tuple[int, ...]) -> UOp:
    """Return a tensor's graph over a buffer of `TinygradDevice.allocate`, without a copy."""
    kind = TO_TINYGRAD[dtype.name]
    if isinstance(buffer, Tensor):  # of bytes, from _TensorDevice
        return buffer.bitcast(kind).reshape(shape).uop
    if buffer.size == 0:
        return Tensor.empty(*shape, dtype=kind, device=buffer.device).uop
    flat = UOp.from_buffer(buffer)
    return flat if shape == (buffer.size,) else flat.reshape(shape)


# tinygrad's names for files and arrays of numpy, which are no devices for parameters
_NOT_DEVICES = ("DISK", "NPY", "TINYFS")
# nodes that no two tensors share unless they are tied; UNIQUE is of tinygrad 0.13
_OWN = (Ops.BUFFER, getattr(Ops, "UNIQUE", Ops.BUFFER))
_MIN_HELD_NBYTES = 4096  # smaller buffers under a lazy graph are seeds and counters


class _Tensors(EntryParameter):
    """Base of parameters over tinygrad's tensors."""

    def _put(self, uop: UOp) -> None:
        """Make all tensors compute from the graph ``uop``, reshaped to their shapes."""
        for tensor in self._entries:  # tied ones may have shapes of their own
            tensor.uop = uop if tensor.shape == uop.shape else uop.reshape(tensor.shape)

    def _hollow(self, where: str, shape: Sequence[int], kept: UOp | None) -> None:
        """Give all tensors one `InvalidBuffer`, on device ``where`` and holding ``kept``."""
        first, numel = self._entries[0], math.prod(shape)
        buffer = InvalidBuffer(self.names[0], where, numel, first.dtype, kept, self.keeps)
        self._put(UOp.from_buffer(buffer).reshape(shape))

    def _shown(self, buffer: Buffer | None) -> Sequence[tuple[int, int]]:
        """Return (CPU address, bytes) of the parameter in a buffer; () without a CPU address."""
        address = None if buffer is None else _address(buffer.base)
        if self.span is None or address is None:
            return ()
        _, first, stop = self.span
        return ((address + first, stop - first),)


class TinygradParameter(_Tensors):
    """A parameter over tensors of a model with the same memory, or with a lazy graph over it."""

    def _look(self) -> None:
        self._entries = list({id(tensor): tensor for tensor in self._entries}.values())
        first = self._entries[0]
        self.shape = tuple(int(n) if isinstance(n, int) else -1 for n in first.shape)
        self.dtype = _FROM_TINYGRAD.get(first.dtype, str(first.dtype))
        invalid = invalid_buffer(first.uop)
        self.invalid = invalid is not None
        self.keeps = invalid.keeps if invalid is not None else None
        self._under: list[UOp] = []  # memory that the lazy graph computes with
        if any(not isinstance(n, int) for n in first.shape):
            self.refused = "its shape is symbolic"
        else:
            self._look_at(_stands_on(first.uop))

    def _look_at(self, uop: UOp) -> None:
        """Set the attributes of `Parameter` that depend on the tensor's memory."""
        memory = _memory(uop)
        if memory is None:
            return
        base = memory.buffer
        self.span = (id(base.base), base.offset, base.offset + base.nbytes)
        self.keeps = BY_NAME.get(self.dtype)
        if uop.has_buffer_identity():  # all of it, in order
            self.device, self.nbytes = base.device, base.nbytes
            return
        if uop.base is not memory:
            # a pending store, or a bitcast: it cannot be written in place, only replaced
            self.device, self.nbytes = base.device, base.nbytes
            self.dtype += " (of a graph)"
            self.keeps = None
            return
        if 0 in self.shape:
            return
        what = f"a view of {base.nbytes} bytes on {base.device}"
        if not has(_Devices[base.device].allocator, "_offset"):
            self.refused = f"it is {what}, and that device has no views"
            return
        begins = view_start(uop)
        if begins is None:
            self.refused = f"it is {what} that is not contiguous"
            return
        self.fixed = f"it is {what}"
        self.device = base.device
        self.nbytes = math.prod(self.shape) * uop.dtype.itemsize
        first = base.offset + begins
        self.span = (id(base.base), first, first + self.nbytes)

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The model's tensors, each once."""
        return self._entries

    def is_computed(self) -> bool:
        """Whether the model computed its values, by tinygrad's ``is_param`` or by its name."""
        if self.invalid or any(is_statistic(name) for name in self.names):
            return False
        is_parameter = any(getattr(tensor, "is_param", True) for tensor in self._entries)
        return not is_parameter or any(is_computed(name, self.shape) for name in self.names)

    def hold(self, memory: Iterable[UOp]) -> None:
        """Count ``memory``, buffers under this parameter's lazy graph: they are freed with it."""
        by_device: dict[str, list[UOp]] = {}
        for uop in memory:
            by_device.setdefault(uop.buffer.device, []).append(uop)
        if not by_device:
            return
        # a parameter has one device: the one with most of the bytes
        sizes = {d: sum(u.buffer.nbytes for u in uops) for d, uops in by_device.items()}
        self.device = max(sizes, key=lambda d: sizes[d])
        self.nbytes, self._under = sizes[self.device], by_device[self.device]
        self.dtype += " (of a graph)"

    def memory(self) -> Sequence[tuple[int, int]]:
        """Return (address, bytes) of the tensor's or its graph's memory; () if not addressable."""
        if self._under:
            found = ((_address(uop.buffer), uop.buffer.nbytes) for uop in self._under)
            return [(address, nbytes) for address, nbytes in found if address is not None]
        held = None if self.span is None else _memory(_stands_on(self._entries[0].uop))
        return self._shown(None if held is None else held.buffer)

    def buffer(self) -> Buffer:
        return _stands_on(self._entries[0].uop).buffer.ensure_allocated()

    def release(self) -> str:
        if self.fixed:
            return self.fixed
        # without a cache (LRU=0), tinygrad frees memory with its last reference
        with nullcontext() if self.device is None else current(_Devices[self.device]):
            return self._release_graph() if self._under else self._release_memory()

    def _release_memory(self) -> str:
        """Free the tensors' memory; return "", or why something still holds it."""
        kept = invalid_buffer(self._entries[0].uop) is not None
        self.revive()
        held = _memory(self._entries[0].uop)
        if held is None:
            return ""
        allocator = held.buffer.allocator
        graphs = [weakref.ref(tensor.uop) for tensor in self._entries]
        graph, memory = weakref.ref(held), weakref.ref(held.buffer)
        del held
        self.invalidate(keep=False)
        if memory() is not None:
            self._collect()
        buffer = memory()
        if buffer is None:
            empty_cache(allocator)  # the load may not use its device
            return ""
        # restore it; the graph may be gone if only the memory is held
        base = graph()
        if base is None:
            base = UOp.from_buffer(buffer)
        for tensor, before in zip(self._entries, graphs, strict=True):
            old = before()
            tensor.uop = base.reshape(tensor.shape) if old is None else old
        if kept:
            self.invalidate(keep=True)
        return _HELD

    def _release_graph(self) -> str:
        """Drop the lazy graph; return "", or why something still holds the memory under it."""
        allocator = self._under[0].buffer.allocator
        nodes = [weakref.ref(uop) for uop in self._under]
        memories = [weakref.ref(uop.buffer) for uop in self._under]
        # the graph is kept over buffers without memory, so that it can be restored
        empty = [UOp.from_buffer(Buffer(b.device, b.size, b.dtype)) for b in _alive(memories)]
        stands_for = dict(zip(self._under, empty, strict=True))
        graphs = [tensor.uop.substitute(stands_for) for tensor in self._entries]
        self._under = []
        del stands_for
        self.invalidate(keep=False)
        if _alive(memories):
            self._collect()
        held = [memory() for memory in memories]
        empty_cache(allocator)
        if not any(held):
            return ""
        found = [node() for node in nodes]
        back = {
            hollow: UOp.from_buffer(buffer) if uop is None else uop
            for hollow, uop, buffer in zip(empty, found, held, strict=True)
            if buffer is not None
        }
        if len(back) == len(empty):  # otherwise values are lost
            self._under = list(back.values())
            for tensor, graph in zip(self._entries, graphs, strict=True):
                tensor.uop = graph.substitute(back)
        return _HELD

    def attach(self, buffer: Any, dtype: DType) -> None:
        if not any(map(is_text, self.names)):
            self._put(over(buffer, dtype, self.shape))
            return
        length = buffer.numel() if isinstance(buffer, Tensor) else buffer.size
        for tensor in self._entries:
            tensor.uop = over(buffer, dtype, (length,))

    def invalidate(self, keep: bool) -> None:
        if 0 not in self.shape:
            first = self._entries[0]
            self._hollow(first.device, self.shape, _stands_on(first.uop) if keep else None)

    def revive(self) -> None:
        invalid = invalid_buffer(self._entries[0].uop)
        if invalid is not None and invalid.kept is not None:
            self._put(invalid.kept)


class ShardParameter(_Tensors):
    """One device's shard of tensors that ``Tensor.shard`` spread over several.

    Memory is written in place. A lazy tensor gets new memory once all of its shards are loaded.
    """

    def __init__(self, whole: TinygradParameter, at: int, others: list[ShardParameter]) -> None:
        self._whole, self._at, self._others = whole, at, others
        self._new: Buffer | None = None  # to be attached with the others
        self._written = False
        super().__init__(whole.names, whole._entries, whole._collect)

    def _look(self) -> None:
        first = self._entries[0]
        uop = _stands_on(first.uop)
        self.invalid = invalid_buffer(first.uop) is not None
        self.dtype = _FROM_TINYGRAD.get(first.dtype, str(first.dtype))
        devices, axis, shape = uop.device, uop.axis, tuple(map(int, first.shape))
        begins, part = [0] * len(shape), list(shape)
        if axis is not None:
            part[axis] //= len(devices)
            begins[axis] = self._at * part[axis]
        self.shape = tuple(part)
        self.block = Block(shape, tuple(begins), self.shape)
        self.device = devices[self._at]
        self.shard = f"[{self.device}]"
        memory = _spread(uop) if uop.has_buffer_identity() else None
        if memory is None or not memory.bufs[self._at].is_allocated():
            return
        buffer = memory.bufs[self._at]
        self.nbytes = buffer.nbytes
        self.span = (id(buffer.base), buffer.offset, buffer.offset + buffer.nbytes)
        self.keeps = BY_NAME.get(self.dtype)
        self.fixed = f"it is one of {len(devices)} shards"

    def memory(self) -> Sequence[tuple[int, int]]:
        return self._shown(None if self.span is None else self.buffer())

    def buffer(self) -> Buffer:
        return _spread(_stands_on(self._entries[0].uop)).bufs[self._at]

    def is_computed(self) -> bool:
        return self._whole.is_computed()

    def release(self) -> str:
        """Return why one shard cannot be freed alone; "" for a lazy tensor without memory."""
        return self.fixed

    def attach(self, buffer: Buffer, dtype: DType) -> None:
        """Keep the buffer until all shards have one, then give them to the tensors."""
        self._new = buffer
        if any(other._new is None for other in self._others):
            return
        first = Tensor(_stands_on(self._entries[0].uop))
        made = first.cast(TO_TINYGRAD[dtype.name]).empty_like()
        _spread(made.uop).bufs[:] = [other._new for other in self._others]
        self._put(made.uop)
        for other in self._others:
            other._new = None

    def invalidate(self, keep: bool) -> None:
        """Make the memory of all shards raise when used; keep it, even without ``keep``."""
        first = self._entries[0]
        self._written = False
        if invalid_buffer(first.uop) is None and 0 not in first.shape:
            self._hollow(str(self.device), first.shape, first.uop)

    def revive(self) -> None:
        """Restore the kept memory once all shards of it were written."""
        self._written = True
        invalid = invalid_buffer(self._entries[0].uop)
        if invalid is not None and all(other._written for other in self._others):
            self._put(invalid.kept)


def _spread(uop: UOp) -> Any:
    """Return the buffers of a tensor on several devices, as a ``MultiBuffer``."""
    while uop.op is not Ops.BUFFER:
        uop = uop.src[0]
    return uop.buffer


def _shards_of(whole: TinygradParameter) -> list[Any]:
    """Return a parameter's shards, one for each device; just the parameter if it has one device."""
    devices = _stands_on(whole._entries[0].uop).device
    if not isinstance(devices, tuple) or whole.refused:
        return [whole]
    shards: list[ShardParameter] = []
    shards += [ShardParameter(whole, at, shards) for at in range(len(devices))]
    return shards


def map_opencl(device: Any, buffer: Buffer, flags: int, start: int, nbytes: int) -> tuple[int, int]:
    """Map bytes of a buffer for the CPU; return OpenCL's status and their address."""
    from tinygrad.runtime.autogen import opencl as cl

    status = ctypes.c_int32()
    place = (flags, start, nbytes, 0, None, None, status)
    pointer = cl.clEnqueueMapBuffer(device.queue, buffer._buf, True, *place)
    return status.value, ctypes.cast(pointer, ctypes.c_void_p).value or 0


def _address(buffer: Buffer) -> int | None:
    """Return the CPU's address of a buffer's memory; None if the CPU cannot address it."""
    device = _Devices[buffer.device]
    if backend_of(buffer.device) == "CL":
        from tinygrad.runtime.autogen import opencl as cl

        status, address = map_opencl(device, buffer, cl.CL_MAP_READ, 0, 1)
        if status != 0:
            return None
        place = ctypes.c_void_p(address)
        cl.clEnqueueUnmapMemObject(device.queue, buffer._buf, place, 0, None, None)
        return address
    if backend_of(buffer.device) not in SHARED or not has(device.allocator, "_as_buffer"):
        return None
    return address_of(device.allocator._as_buffer(buffer._buf))


_HELD = "something else still holds its memory (a captured TinyJit or a lazy graph)"


def _alive(buffers: Iterable[weakref.ref[Buffer]]) -> list[Buffer]:
    return [buffer for memory in buffers if (buffer := memory()) is not None]


def _stands_on(uop: UOp) -> UOp:
    """Return a tensor's graph; for an invalid tensor the graph that was kept, if any."""
    invalid = invalid_buffer(uop)
    return uop if invalid is None or invalid.kept is None else invalid.kept


def _memory(uop: UOp) -> UOp | None:
    """Return the buffer node that a tensor is, or is a view of; None for a lazy graph."""
    base = uop.base
    while base.op in (Ops.AFTER, Ops.BITCAST):
        base = base.src[0].base
    return base if _is_allocated(base) else None


def _is_allocated(uop: UOp) -> bool:
    """Whether a graph node is allocated memory on one device."""
    if uop.op is not Ops.BUFFER or isinstance(uop.device, tuple) or not uop.is_realized:
        return False
    return backend_of(uop.device) not in _NOT_DEVICES


def view_start(uop: UOp) -> int | None:
    """Return the first byte of a view in its memory; None if it is not contiguous."""
    if not hasattr(uop, "contiguous_view"):  # before 0.14
        begins = uop.contiguous_view_offset()
        return None if begins is None else int(begins) * int(uop.dtype.itemsize)
    view = uop.contiguous_view()
    return None if view is None else int(view[1]) * int(view[0].dtype.itemsize)


def _share_out(parameters: Sequence[TinygradParameter]) -> None:
    """Assign memory under lazy graphs (an unrealized ``w.half()``) to parameters, each buffer once.

    Memory that is a parameter's own is left out: it is not freed with a graph.
    """
    counted = {p.span[0] for p in parameters if p.span is not None}
    # each node is visited once: lazy initializers share nodes of their random numbers
    seen: dict[UOp, None] = {}

    def is_new(node: UOp) -> bool:
        return node not in seen

    for parameter in parameters:
        uop = parameter._entries[0].uop
        if parameter.refused or parameter.span is not None or uop.has_buffer_identity():
            continue  # it is no graph
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


def tie_key(tensors: Iterable[Tensor]) -> Callable[[Tensor], Any]:
    """Return a function from a tensor to a key that is equal for tied tensors.

    The key is the memory, or the graph over it.
    """
    found = Counter(uop for uop, _ in {(tensor.uop, id(tensor)) for tensor in tensors})
    several = [uop for uop, count in found.items() if count > 1]
    # a graph of constants (Tensor.arange(4).log()) is one node for all tensors: these are not tied
    apart = {u for u in several if not any(node.op in _OWN for node in u.toposort())}

    def key(tensor: Tensor) -> Any:
        uop = tensor.uop
        return id(tensor) if uop in apart else uop.base if uop.has_buffer_identity() else uop

    return key


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return ``get_state_dict`` of a model, without results that its TinyJits have captured."""
    get = tinygrad.nn.state.get_state_dict
    captured = tuple(f"{name}." for name in get(model, tensor_type=CapturedJit))
    return {name: t for name, t in get(model).items() if not name.startswith(captured)}


def parameters_of(model: Any) -> list[TinygradParameter | ShardParameter]:
    """Return a model's parameters, by ``get_state_dict``; tied tensors are one parameter."""
    tensors = tensors_of(model)
    for name, tensor in tensors.items():
        if is_absent(tensor.uop):
            raise OffloadError(f"{name} streams: the model is offloaded, close() it first")
    found = make_parameters(tensors.items(), tie_key(tensors.values()), TinygradParameter)
    _share_out(found)
    return [shard for parameter in found for shard in _shards_of(parameter)]
