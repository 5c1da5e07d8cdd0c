"""Offload models of tinygrad: find their layers, and make the layers fetch their weights.

tinygrad computes late: a call returns a graph, whose kernels run when something asks for values. So
all tensors that depend on a layer's weights are computed at the end of its call (`settle`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import tinygrad
from tinygrad import Tensor, TinyJit, dtypes, nn
from tinygrad.device import Buffer, BufferSpec
from tinygrad.engine.realize import capturing
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import Ops, UOp

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import DType
from streamload.devices.base import Device
from streamload.devices.tinygrad.buffers import AbsentBuffer
from streamload.devices.tinygrad.linear import put_into, walk
from streamload.devices.tinygrad.tensors import (
    ALLOCATORS,
    TO_TINYGRAD,
    TinygradParameter,
    backend_of,
    has,
    over,
)
from streamload.errors import AllocationError, OffloadError
from streamload.offloading.model import (
    LayerWeights,
    ModelAdapter,
    Passes,
    RowReader,
    tokens_of,
)
from streamload.offloading.plan import OffloadPlan, Problem
from streamload.offloading.prefetch import Rounds
from streamload.offloading.slots import Slots
from streamload.planning.moves import TensorRequests

Reference = Callable[[], Tensor | None]  # to a tensor, as in ``all_tensors``

#: The class of TinyJits.
JIT = type(TinyJit(lambda: None))


# --- slots ----------------------------------------------------------------------------------------


class TinygradSlots(Slots):
    """Device memory cut into slots for streamed layers, with buffers of tinygrad over it."""

    packs = False  # drivers of OpenCL have larger alignments

    def __init__(self, memory: Buffer, plan: OffloadPlan, checkpoint: Checkpoint) -> None:
        """Cut ``memory`` into slots; OffloadError if the device cannot make views of buffers."""
        super().__init__(memory, plan, checkpoint)
        _view_of(memory, 0, memory.nbytes, memory.dtype)

    def _view(
        self, start: int, stop: int, dtype: DType, shape: tuple[int, ...]
    ) -> tuple[UOp, Buffer]:
        """Return a graph over a buffer, to compute with, and the buffer."""
        buffer = _view_of(self._memory, start, math.prod(shape), TO_TINYGRAD[dtype.name])
        return over(buffer, dtype, shape), buffer


class LentSlots(TinygradSlots):
    """Slots that lend tensors to a loop of `stream_layers`, one layer at a time."""

    _lent: tuple[Sequence[Tensor], Sequence[UOp]] = (), ()
    _before: Sequence[Reference] = ()  # the program's tensors when they were lent

    def refuse_capture(self) -> None:
        refuse_capture("a layer")

    def lend(self, graphs: Sequence[UOp]) -> list[Tensor]:
        """Return tensors of ``graphs`` over a slot, valid until `take_back`."""
        self._before = [*all_tensors]
        tensors = [Tensor(graph) for graph in graphs]
        self._lent = tensors, graphs
        return tensors

    def take_back(self) -> None:
        """Compute all tensors that depend on lent tensors; the lent tensors raise from now on."""
        (tensors, graphs), self._lent = self._lent, ((), ())
        for tensor in tensors:
            shape = tuple(map(int, tensor.shape))
            tensor.uop = absent("the layer before", shape, tensor.dtype, str(tensor.device))
        before, self._before = self._before, ()
        settle({graph.base for graph in graphs}, before)


def _view_of(buffer: Buffer, start: int, numel: int, dtype: Any) -> Buffer:
    if numel == 0:
        return Buffer(buffer.device, 0, dtype)
    with ALLOCATORS:
        if has(buffer.allocator, "_offset"):
            return buffer.view(numel, dtype, start).ensure_allocated()
    if backend_of(buffer.device) != "CL":
        raise OffloadError(f"nothing is offloaded on {buffer.device}: its buffers have no views")
    # OpenCL's sub-buffer, which tinygrad has no call for
    from tinygrad.runtime.autogen import opencl as cl

    region = cl.cl_buffer_region(origin=start, size=numel * dtype.itemsize)
    status = ctypes.c_int32()
    kind = cl.CL_MEM_READ_WRITE, cl.CL_BUFFER_CREATE_TYPE_REGION
    place = ctypes.cast(ctypes.byref(region), ctypes.c_void_p)
    memory = cl.clCreateSubBuffer(buffer._buf, *kind, place, ctypes.byref(status))
    if status.value != 0:
        problem = f"clCreateSubBuffer: {status.value}"
        raise AllocationError(buffer.device, problem, nbytes=numel * dtype.itemsize)
    # external memory: tinygrad neither counts it nor keeps it in its cache
    view = Buffer(buffer.device, numel, dtype, opaque=memory, options=BufferSpec(external_ptr=1))
    view.of = buffer  # keeps it alive
    return view


# --- callable objects -----------------------------------------------------------------------------


class Wrapped:
    """A substitute for an object's ``__call__``; the object gets a class derived from its class."""

    def __init__(self, module: Any) -> None:
        self._module, self._class = module, type(module)

    def put(self) -> None:
        """Give the object the derived class, whose ``__call__`` calls this substitute."""

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        def refuse(*args: Any) -> Any:
            raise OffloadError(
                "a model that is offloaded cannot be copied or saved: close() it first"
            )

        names = ("__module__", "__qualname__", "__doc__")
        kept = {name: getattr(self._class, name) for name in names}
        own = {"__slots__": (), "__call__": call, "__deepcopy__": refuse, "__reduce_ex__": refuse}
        make: Any = type(self._class)
        self._module.__class__ = make(self._class.__name__, (self._class,), {**kept, **own})

    def take_out(self) -> None:
        self._module.__class__ = self._class

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._class.__call__(self._module, *args, **kwargs)


def _can_be_wrapped(module: Any) -> bool:
    return isinstance(getattr(module, "__dict__", None), dict) and callable(module)


class Layer(Wrapped):
    """A layer that stays, whose call ends by computing all tensors that depend on its weights.

    So kernels have the same boundaries under every budget, whether it stays or streams.
    """

    def __init__(self, module: Any, weights: Sequence[Tensor]) -> None:
        super().__init__(module)
        self._weights = weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        finally:
            if not capturing:
                settle({tensor.uop.base for tensor in self._weights})


class StreamedLayer(Wrapped):
    """A substitute for a layer's call that has its weights in slots while it computes."""

    def __init__(
        self,
        name: str,
        module: Any,
        number: int,
        places: Sequence[tuple[int, Sequence[Tensor]]],
        rounds: Rounds,
    ) -> None:
        """Change nothing yet; ``places``: for each weight, its buffer's index, and its tensors."""
        super().__init__(module)
        self._name, self._number = name, number
        self._rounds = rounds
        self._places = [(at, each, each.uop) for at, tensors in places for each in tensors]
        self._captured: dict[tuple[int, int], tuple[Any, int, Any]] = {}  # by TinyJit and slot

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer with its weights, which are in slots until the end of the call."""
        refuse_capture(self._name)
        # TRAINING in a context; in 0.13 `Tensor.training`
        training = getattr(tinygrad.helpers, "TRAINING", None)
        if getattr(Tensor, "training", False) if training is None else training:
            raise OffloadError(
                "a model that is offloaded cannot be trained: run it without Context(TRAINING=1)"
            )
        for _, tensor, absent in self._places:
            if tensor.uop is not absent:
                raise OffloadError(
                    f"a weight of {self._name} was written while the model is offloaded, and the "
                    "layer would not see it: close() the model first"
                )
        own = super().__call__

        def compute() -> Any:
            graphs = self._rounds.acquire(self._number)
            try:
                with self._there(graphs):
                    return own(*args, **kwargs)
            finally:
                self._rounds.release(self._number)

        return self._rounds.call(compute)

    @contextmanager
    def _there(self, graphs: Sequence[UOp]) -> Iterator[None]:
        before, slot = [*all_tensors], id(graphs)
        try:
            for at, tensor, _ in self._places:
                graph = graphs[at]
                tensor.uop = graph if graph.shape == tensor.shape else graph.reshape(tensor.shape)
            # a TinyJit gets its capture for this slot: a capture is bound to memory
            for jit in jits_in(self._module):
                _, jit.cnt, jit.captured = self._captured.get((id(jit), slot), (jit, 0, None))
            try:
                yield
            finally:
                for jit in jits_in(self._module):
                    self._captured[id(jit), slot] = jit, jit.cnt, jit.captured
                    jit.reset()
        finally:
            for _, tensor, absent in self._places:
                tensor.uop = absent
            settle({graph.base for graph in graphs}, before)

    def take_out(self) -> None:
        super().take_out()
        self._captured.clear()


class GatheredEmbedding(Wrapped):
    """A substitute for an embedding's call that reads only the rows it looks up from the file."""

    def __init__(self, name: str, module: nn.Embedding, reader: RowReader, device: Device) -> None:
        super().__init__(module)
        self._name, self._reader, self._device = name, reader, device

    def __call__(self, idx: Tensor) -> Tensor:
        """Return the rows ``idx`` (indices in any shape); values replace its bound variables."""
        refuse_capture(self._name)
        graph, values = idx.uop.unbind_all()
        if values:
            idx = Tensor(graph.substitute({v: v.const_like(n) for v, n in values.items()}))
        dim = int(self._module.weight.shape[1])
        ids = np.array(idx.tolist(), np.int64).reshape(-1)
        asked, inverse = np.unique(ids, return_inverse=True)
        dtype = self._reader.dst
        rows = self._reader.read(asked.tolist()).reshape(len(asked), dtype.nbytes(dim))
        found = rows[inverse].reshape(-1)
        shape = *map(int, idx.shape), dim
        buffer = self._device.allocate(dtype, shape)
        if found.nbytes:
            staging = self._device.staging(found.nbytes)
            try:
                staging.view[:] = memoryview(found.data)
                self._device.copy(staging, 0, found.nbytes, buffer, 0).wait()
            finally:
                staging.close()
        return Tensor(over(buffer, dtype, shape))


def refuse_capture(name: str) -> None:
    """Raise OffloadError if a TinyJit captures layer ``name``: a replay would not fetch weights."""
    if capturing:
        raise OffloadError(
            f"a TinyJit captures {name}, whose weights would not be brought when it is run again: "
            "jit what a layer does, or what is outside of the layers, and not the model"
        )


# --- tensors that wait for weights ----------------------------------------------------------------


def settle(weights: set[UOp], before: Iterable[Reference] | None = None) -> None:
    """Compute all tensors that depend on ``weights``, so that these can change.

    ``before``: the program's tensors before a call that had weights in slots; None: they stay. Then
    new tensors over the weights get memory of their own, and those that cannot be computed raise
    when they are used: they would have values of another layer.
    """
    # Others that were given a whole weight raise, too, as where a TinyJit runs one layer for all:
    # a copy of a weight would take memory beyond the budget.
    for tensor in (tensor for reference in before or () if (tensor := reference()) is not None):
        if tensor.uop.base in weights and tensor.uop.numel() == tensor.uop.base.numel():
            shape = tuple(map(int, tensor.shape))
            tensor.uop = absent("a layer's weight", shape, tensor.dtype, str(tensor.device))
    found, reached = [], dict[UOp, bool]()
    for tensor in [t for reference in list(all_tensors) if (t := reference()) is not None]:
        for node in tensor.uop.toposort(gate=lambda node: node not in reached):
            reached[node] = node in weights or any(reached.get(src, False) for src in node.src)
        if reached[tensor.uop] and (before is not None or tensor.uop.base not in weights):
            found.append(tensor)
    try:
        for tensor in found:
            # views; and results of functions, which stay graphs when realized
            if tensor.uop.base in weights or tensor.uop.base.op is Ops.GETTUPLE:
                tensor.uop = tensor.clone().uop
        if found:
            Tensor.realize(*found)
        left = [tensor for tensor in found if not weights.isdisjoint(tensor.uop.toposort())]
        if left and before is not None:
            raise OffloadError(
                f"a tensor of {list(left[0].shape)} still waits for its layer's weights when it is "
                "realised: let the layer give .contiguous() or .clone() of it"
            )
    except BaseException:
        for tensor in found if before is not None else ():
            if all(isinstance(n, int) for n in tensor.shape):
                what = "what a layer did not end computing"
                tensor.uop = absent(what, tensor.shape, tensor.dtype, str(tensor.device))
        raise


def absent(name: str, shape: tuple[int, ...], dtype: Any, device: str) -> UOp:
    """Return a graph over memory that raises when it is used; ``name`` is for that error."""
    return UOp.from_buffer(AbsentBuffer(name, device, math.prod(shape), dtype)).reshape(shape)


# --- TinyJits of a model --------------------------------------------------------------------------


def jits_in(obj: Any) -> list[Any]:
    """Return all distinct TinyJits inside an object that wrap a function."""
    found = {id(jit): jit for _, jit in walk(obj, JIT) if type(jit) is JIT and jit.fxn is not None}
    return list(found.values())


def set_aside(model: Any, layers: Collection[Any]) -> Callable[[], None]:
    """Replace TinyJits outside of layers by their functions, and return a function that undoes it.

    All TinyJits of the model drop their captures.
    """
    inside = {id(jit) for layer in layers for jit in jits_in(layer)}
    found = jits_in(model)
    jits = [jit for jit in found if id(jit) not in inside]
    for jit in found:
        jit.reset()
    plain = {id(jit): partial(jit.fxn) for jit in jits}
    put_into(model, plain)
    return lambda: put_into(model, {id(plain[id(jit)]): jit for jit in jits})


class TinygradModel(ModelAdapter[TinygradParameter]):
    """The adapter of a tinygrad model, whose layers are callable objects in it."""

    slots = TinygradSlots

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], layers: Sequence[str] = ()
    ) -> None:
        modules: dict[str, Any] = {}
        for prefix, module in walk(model, JIT):
            modules.setdefault(prefix.removesuffix("."), module)
        super().__init__(model, parameters, modules, layers)
        if not _can_be_wrapped(model):
            raise OffloadError(
                f"a model of tinygrad that is offloaded is an object that is called, not a "
                f"{type(model).__name__}: its layers are brought when they are called"
            )
        self._device: Device | None = None
        self._put_back: Callable[[], None] | None = None  # undoes `set_aside`

    # --- planning -----------------------------------------------------------------------------

    def can_stream(self, module: Any) -> bool:
        return module is not self._model and _can_be_wrapped(module)

    def is_embedding(self, module: Any) -> bool:
        return isinstance(module, nn.Embedding)

    def must_stay(self, name: str) -> bool:
        """Whether a tensor is no parameter to tinygrad, but a constant of the model."""
        return not all(getattr(t, "is_param", True) for t in self._parameters[name].tensors)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        if plan.residency.streams or plan.residency.gathers:
            layers = [self._modules[name] for name in (*plan.residency.streams, *plan.bounded)]
            self._put_back = set_aside(self._model, layers)
        super().empty(plan, wants)

    def begin_streaming(self, plan: OffloadPlan, problem: Problem, device: Device) -> None:
        self._device, names = device, problem.wants.names
        dtypes = dict(zip(names, problem.dsts, strict=True))
        for name in self._emptied:
            parameter, kind = self._parameters[name], TO_TINYGRAD[dtypes[name].name]
            first = parameter.names[0]
            for tensor in parameter.tensors:
                tensor.uop = absent(first, tensor.shape, kind, device.info.name)
        weights = {group.name: group.wants for group in plan.groups}
        for name in plan.bounded:
            tensors = [t for at in weights[name] for t in self._parameters[names[at]].tensors]
            self._wrap(Layer(self._modules[name], tensors))

    def stream_layer(self, name: str, number: int, weights: LayerWeights, rounds: Rounds) -> None:
        module = self._modules[name]
        places = [(at, self._parameters[weight].tensors) for at, weight in weights]
        self._wrap(StreamedLayer(name, module, number, places, rounds))

    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        self._wrap(GatheredEmbedding(name, self._modules[name], reader, device))

    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        self._wrap(Pass(self._model, self.passes, streams=bool(plan.residency.absent)))

    def take_out(self) -> None:
        super().take_out()
        if self._put_back is not None:
            self._put_back()
            self._put_back = None
        if self._device is not None:
            self._device.trim()


class Pass(Wrapped):
    """A substitute for a model's call: counts passes and new tokens, not those in the KV cache."""

    def __init__(self, model: Any, passes: Passes, *, streams: bool) -> None:
        super().__init__(model)
        self._passes, self._streams = passes, streams

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._passes.timed() if self._streams else nullcontext():
            if self._passes.has_room:
                given = {f"{at}": each for at, each in enumerate((*args, *kwargs.values()))}
                tokens, _ = tokens_of(given, _has_integers)
                self._passes.see(tokens, 0)
            return super().__call__(*args, **kwargs)


def _has_integers(value: Any) -> bool:
    return isinstance(value, Tensor) and dtypes.is_int(value.dtype)
