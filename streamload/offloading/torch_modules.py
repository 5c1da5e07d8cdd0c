"""torch's modules whose weights are in slots: fetched before a module computes, then released."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from types import FrameType, MethodType
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.dlpack import from_dlpack, to_dlpack

from streamload.core.dtypes import DType
from streamload.devices.parameters import Slot
from streamload.devices.torch.tensors import TO_TORCH, changes_nothing
from streamload.errors import OffloadError
from streamload.offloading import torch_lent
from streamload.offloading.layers import Slots
from streamload.offloading.prefetch import Rounds, call_layer
from streamload.offloading.rows import RowReader
from streamload.offloading.stays import Stays
from streamload.offloading.torch_faces import Face

# Names of functions of tensors that need no values of a weight.
_ASKED = frozenset(
    (
        "__get__", "__set__", "__repr__", "dim", "element_size", "is_complex", "is_floating_point",
        "numel", "requires_grad_", "size", "stride", "is_inference", "is_contiguous", "__hash__",
        "__eq__", "ndimension", "__len__", "nelement", "storage_offset", "get_device",
        "_is_view", "is_same_size", "type", "__format__",
    )
)  # fmt: skip


# Attributes of recurrent modules with their weights.
_LISTS = ("_flat_weights", "_flat_weight_refs")

# Names of functions that write into their first argument.
_IN_PLACE = re.compile(r"[^_].*_|__i(?!nvert)\w+__")

# Packages that add LoRAs: they ask for names and shapes of weights, and load their own.
_OF_LORA = ("diffusers.loaders.", "peft.", "transformers.integrations.peft")

# Attributes that are the values of a tensor, or views of them.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class StreamedParameter(torch.Tensor):
    """Placeholder of a weight that streams: it has a shape and dtype, but no memory.

    A function that needs values raises, or in a pass gets zeros: the pass raises at its end.
    """

    _streamload_streamed: str
    _streamload_stays: Stays | None
    _is_param = True  # to torch it is a parameter

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        requires_grad: bool = False,
        stays: Stays | None = None,
    ) -> StreamedParameter:
        """Make a placeholder; ``name``: for errors; ``stays`` collects uses, None: each raises."""
        made: StreamedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._streamload_streamed, made._streamload_stays = name, stays
        return made

    def __repr__(self) -> str:
        """Return class, name, shape and dtype."""
        kind = type(self).__name__
        return f"{kind}({self._streamload_streamed}, {list(self.shape)}, {self.dtype})"

    def values(self, what: str, *, writes: bool = False) -> torch.Tensor:
        """Return zeros for function ``what``, and note as an error that it uses the weight here.

        ``writes``: whether the function changes the weight.
        """
        stays = self._streamload_stays
        reason = (
            f"streams from its file when its layer computes, and is not here now ({what}): a model "
            "that is offloaded cannot be saved, moved, copied, trained or changed; read the "
            "checkpoint, close() the offload first, or where a model uses it outside of its layer"
        )
        (Stays() if stays is None else stays).cannot(
            self._streamload_streamed, reason, outside=True
        )
        return zeros_like(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions that need no values; others get `values`."""
        name = func.__name__
        if name in ("__get__", "__set__"):  # access to an attribute
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            name = f".{attribute}" if attribute in _VALUES else name
        kwargs = kwargs or {}
        if name not in _ASKED:
            own = args[0] if args else None
            writes = _IN_PLACE.fullmatch(name) or func.__name__ in ("__set__", "__setitem__")
            if name == ".data" and not writes and _adds_lora():
                return own
            if writes and isinstance(own, StreamedParameter):
                own.values(name, writes=True)  # zeros without memory cannot be written
                return own
            args, kwargs = _with_values(name, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call operators of autograd and C++ code with `values`."""
        args, kwargs = _with_values(str(func), args, kwargs or {})
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise OffloadError: a copy would share the slots."""
        raise OffloadError(
            f"{self._streamload_streamed}: a model that is offloaded cannot be copied"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise OffloadError: there are no values to pickle."""
        raise OffloadError(
            f"{self._streamload_streamed}: a model that is offloaded cannot be saved"
        )


def _adds_lora() -> bool:
    """Return whether one of the callers adds a LoRA."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OF_LORA):
        frame = frame.f_back
    return frame is not None


def _with_values(what: str, args: Any, kwargs: Any) -> Any:
    """Return arguments of function ``what`` with the values of placeholders."""
    return tree_map_only(StreamedParameter, lambda each: each.values(what), (args, kwargs))


def zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """Return zeros of a weight's shape that take no memory."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


@contextmanager
def stood_in(model: nn.Module) -> Iterator[None]:
    """Put zeros without memory, marked as initialized, in place of weights that stream.

    A package that initializes the other weights of a model then skips these.
    """
    zeros: dict[int, nn.Parameter] = {}  # by id of the weight
    own: dict[int, StreamedParameter] = {}  # by id of the zeros
    try:
        for container, key, value in _entries(model):
            if isinstance(value, StreamedParameter):
                if id(value) not in zeros:
                    made = nn.Parameter(zeros_like(value), requires_grad=False)
                    made._is_hf_initialized = True
                    zeros[id(value)], own[id(made)] = made, value
                container[key] = zeros[id(value)]
        yield
    finally:
        for container, key, value in _entries(model):
            if id(value) in own:
                container[key] = own[id(value)]


def _entries(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the (dict, key, value) of each parameter and buffer of a model."""
    return [
        (container, key, value)
        for module in model.modules()
        for container in (module._parameters, module._buffers)
        for key, value in container.items()
    ]


class TensorSlots(Slots):
    """Slots (parts of device memory) with plain tensors of torch, for loops of `stream_layers`."""

    def _view(self, start: int, stop: int, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, Any]:
        with torch.inference_mode(False), torch.no_grad():
            made = self._held(self._memory[start:stop].view(TO_TORCH[dtype.name]).view(shape))
            return made, made.detach()

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        """Free the memory, even if something still refers to a tensor over it."""
        both = chain.from_iterable(self._made.values())
        for view in (self._memory, *chain.from_iterable(both)):
            view.data = torch.empty(0, dtype=view.dtype, device=view.device)
            torch_lent.forget(view)
        self._made.clear()

    def refuse_capture(self) -> None:
        """Raise OffloadError if torch traces, exports or captures."""
        refuse_capture()

    def take_back(self) -> None:
        """Make a later ``backward`` that needs lent tensors raise: it would read another layer."""
        torch.autograd.graph.increment_version(self._memory)


class TorchSlots(TensorSlots):
    """Slots with parameters over them, for modules; a storage per parameter, to count its uses."""

    weight_of = staticmethod(torch_lent.weight_of)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        own = from_dlpack(to_dlpack(tensor.reshape(-1).view(torch.uint8)))
        return torch_lent.weight_of(own.view(tensor.dtype).view(tensor.shape))

    def pools(self, expert: int) -> list[torch.Tensor]:
        """Return a tensor for each weight of an expert: that weight in all slots, on a first axis.

        ``expert``: its number among all layers. Experts of equal shapes share the tensors.
        """
        kinds, found = self._layers[expert], list[torch.Tensor]()
        key = "all slots", self._alike[expert]
        if key not in self._made:
            count, nbytes = self._residency.cache_slots, self._residency.cache_slot_nbytes
            with torch.inference_mode(False), torch.no_grad():
                for kind, offset in zip(kinds, self._offsets[expert], strict=True):
                    at = self._starts[self.layers] + offset
                    one = self._memory[at : at + kind.nbytes].view(TO_TORCH[kind.dst.name])
                    strides = one.view(kind.shape).stride()
                    pitch = nbytes // one.element_size()
                    found.append(one.as_strided((count, *kind.shape), (pitch, *strides)))
            self._made[key] = found, []
        return self._made[key][0]


def refuse_capture() -> None:
    """Raise OffloadError if torch traces, exports or captures: a replay would not fetch weights."""
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if torch.jit.is_tracing() or proxies or captured:
        raise OffloadError(
            "layers that stream cannot be traced, exported or captured in a CUDA graph: what was "
            "recorded would compute with whatever is in their slots; load the model instead"
        )


def _run(wrapped: Any, args: Any, kwargs: Any) -> Any:
    refuse_capture()
    return wrapped(*args, **kwargs)


@cache
def _uncompiled() -> Callable[..., Any]:
    """Return a function that calls a substitute; torch.compile compiles nothing in it."""
    return cast("Callable[..., Any]", torch.compiler.disable(_run))


class Wrapped:
    """A substitute for a method of a module, its ``forward``; subclasses define what it computes.

    It keeps no reference to the module, so that a model without users is freed at once.
    """

    def __init__(self, module: nn.Module, name: str = "forward") -> None:
        self._refer, self._name = weakref.ref(module), name
        self._had = module.__dict__.get(name)

    @property
    def _module(self) -> nn.Module:
        module = self._refer()
        if module is None:
            raise OffloadError("a copy of a module of a model that is gone cannot compute")
        return module

    def put(self) -> None:
        """Replace the module's method by an object that looks like it, and calls this."""
        refusal = "a model that is offloaded cannot be copied or saved"
        face: Any = Face(self._own, self._call, refusal)
        setattr(self._module, self._name, face)

    def _own(self) -> Callable[..., Any]:
        """Return the module's own method, bound to it."""
        module = self._module
        theirs = getattr(type(module), self._name)
        own = MethodType(theirs, module) if self._had is None else self._had
        return cast("Callable[..., Any]", own)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the substitute, and let torch.compile compile nothing of it.

        Until dynamo is imported, which takes more than a second, nothing is compiled anyway.
        """
        run = _uncompiled() if "torch._dynamo" in sys.modules else _run
        return run(self, args, kwargs)

    def take_out(self) -> None:
        """Restore the module's own method, if there is still a module."""
        module = self._refer()
        if module is not None:
            module.__dict__.pop(self._name, None)
            if self._had is not None:
                setattr(module, self._name, self._had)


def refuse_training(module: nn.Module) -> None:
    """Raise OffloadError if a module is in training mode, and gradients are enabled."""
    if module.training and torch.is_grad_enabled():
        raise OffloadError(
            "a model that is offloaded cannot be trained: call model.eval(), or run it under "
            "torch.no_grad()"
        )


class _NoBackward(torch.autograd.Function):
    """Identity for outputs of a model, whose ``backward`` raises OffloadError."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Return a view of ``output``; ``token`` needs gradients, so `backward` gets called."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise OffloadError: gradients do not go through layers that stream."""
        raise OffloadError(
            "a model that is offloaded cannot be trained: no gradients go through layers that "
            "stream; load the model, or call it under torch.no_grad()"
        )


def no_backward(found: Any) -> Any:
    """Return a model's output with tensors that refuse ``backward``, which would be partial."""
    if isinstance(found, torch.Tensor):
        if not found.is_floating_point() or found.requires_grad:
            return found
        return _NoBackward.apply(found, torch.zeros((), requires_grad=True))
    if type(found) in (tuple, list):
        return type(found)(map(no_backward, found))
    if isinstance(found, dict):
        for key, value in found.items():
            if isinstance(value, torch.Tensor):
                found[key] = no_backward(value)
    return found


class StreamedModule(Wrapped):
    """A substitute for a layer's ``forward`` that has its weights in slots while it computes."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        places: Sequence[tuple[int, Slot]],
        rounds: Rounds,
        stays: Stays,
    ) -> None:
        """Change nothing yet; ``places``: of each weight, its buffer's index, its (dict, key)."""
        super().__init__(module)
        self._number, self._rounds = number, rounds
        self._places = [(at, held, key, held[key]) for at, (held, key) in places]
        self._stays = stays
        self._listed = WeakSet(m for m in module.modules() if isinstance(m, nn.RNNBase))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the layer's weights, which are in slots until the end of the call."""
        refuse_training(self._module)

        def compute() -> Any:
            with self._there(), torch.no_grad():
                return self._own()(*args, **kwargs)

        return call_layer(self._rounds, compute)

    @contextmanager
    def _there(self) -> Iterator[None]:
        self._stays.check()
        before, buffers, ended = list[Any](), list[torch.Tensor](), False
        inside_itself = self._rounds.computes_with(self._number)
        try:  # before acquiring: Ctrl-C may come at its end
            buffers = [*self._rounds.acquire(self._number)]  # raises if another thread has it
            before = [self._before(*place[1:], inside_itself) for place in self._places]
            for at, container, key, absent in self._places:
                torch_lent.lend(buffers[at], absent)
                container[key] = buffers[at]
            counts = [sys.getrefcount(buffers[at]) for at in range(len(buffers))]
            with self._restored():
                yield
            self._check_given_back(buffers, counts)
            ended = True
        finally:
            try:
                for (_, container, key, _), had in zip(self._places, before, strict=bool(before)):
                    container[key] = had
                for buffer in buffers:
                    torch_lent.take_back(buffer)
                if not ended and not inside_itself:
                    self._check_attributes(buffers)
            finally:
                self._rounds.release(self._number)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Disable autocast's cache, and restore the lists of weights that recurrent modules keep.

        The cache identifies weights by their objects, which layers share.
        """
        lists = [(each, {key: each.__dict__.get(key) for key in _LISTS}) for each in self._listed]
        caches = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            for each, before in lists:
                each.__dict__.update(before)

    def _check_given_back(self, buffers: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """Note as errors weights that a call changed or keeps; ``counts``: references before it."""
        for at, container, key, absent in self._places:
            problem = torch_lent.why_kept(container.get(key), buffers[at])
            if not problem and torch_lent.is_kept(buffers, at, counts[at]):
                problem = "keeps or gives it"
            if problem:
                self._cannot(absent, problem)
            else:
                self._stays.fine.add(absent._streamload_streamed)

    def _check_attributes(self, buffers: Sequence[torch.Tensor]) -> None:
        """After a failed call, note weights that attributes keep; the traceback may keep others."""
        if not buffers:
            return
        torch_lent.after_error(buffers)
        kept = torch_lent.kept_in(self._module, buffers)
        for at, _, _, absent in self._places:
            if at in kept:
                self._cannot(absent, "keeps it or a view of it")

    def _cannot(self, absent: Any, problem: str) -> None:
        """Note ``problem``, a misuse of the weight of placeholder ``absent``, as an error."""
        said = f"streams, and {type(self._module).__name__} {problem} when it computes"
        name = absent._streamload_streamed
        self._stays.cannot(name, f"{said}; the memory is another layer's next")

    def _before(
        self, held: MutableMapping[str, Any], key: str, absent: Any, inside_itself: bool
    ) -> Any:
        """Return what goes to ``held[key]`` after the call: what is there, or the placeholder.

        A lent weight is there in a call inside itself, or if Ctrl-C came as a call ended.
        """
        had = held[key]
        if torch_lent.is_lent(had):
            return had if inside_itself else absent
        if not isinstance(had, StreamedParameter):
            reason = (
                "streams, and something has put another tensor in its place, which would not be "
                "used: close() the offload first, or"
            )
            self._stays.cannot(absent._streamload_streamed, reason, outside=True)
        return had


class GatheredEmbedding(Wrapped):
    """A substitute for an embedding's ``forward`` that reads only the needed rows of the file."""

    def __init__(self, module: nn.Embedding, reader: RowReader, device: torch.device) -> None:
        """Change nothing yet; ``reader`` reads rows of the weight, and ``device`` gets them."""
        super().__init__(module)
        self._reader, self._device = reader, device

    def __call__(self, input: torch.Tensor) -> Any:
        """Return the rows for ``input``, indices in any shape; reads each row once."""
        refuse_training(self._module)
        asked, inverse = torch.unique(input, return_inverse=True)
        read = torch.from_numpy(self._reader.read(asked.tolist()))
        rows = read.view(TO_TORCH[self._reader.dst.name]).view(len(asked), *self._reader.row_shape)
        with torch.no_grad():  # the module is not changed: other threads may call it
            return nn.functional.embedding(inverse, rows.to(self._device))


class Refusals:
    """Substitutes for methods that save, move, copy or load a model, which raise OffloadError."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Change nothing yet; ``models``: the model, and its modules that contain layers."""
        self._models = WeakSet(models)

    def put(self) -> None:
        """Replace methods that save, move, copy or load."""
        for model in self._models:
            for name in _WORDS:
                if name == "__deepcopy__" or hasattr(type(model), name):
                    model.__dict__[name] = _refusing(name, weakref.ref(model))

    def take_out(self) -> None:
        """Restore the methods."""
        for model in self._models:
            for name in _WORDS:
                model.__dict__.pop(name, None)


_WORDS: Mapping[str, str] = {
    "_apply": "moved or cast (.to, .half, .cuda)",
    "state_dict": "asked for its state_dict, which would hold all that does not fit",
    "load_state_dict": "loaded again",
    "save_pretrained": "saved",
    "__deepcopy__": "copied",
    "enable_group_offload": "offloaded again, by diffusers",
    "fuse_lora": "changed by a LoRA for good",
}


def _refusing(name: str, refer: Callable[[], Any]) -> Any:
    refusal = (
        f"a model that is offloaded cannot be {_WORDS[name]}: its weights are in the "
        "checkpoint; read that, or close() the model first"
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if name == "_apply" and args and changes_nothing(refer(), args[0]):
            return refer()
        if name == "state_dict" and _adds_lora():
            return {**dict(refer().named_parameters()), **dict(refer().named_buffers())}
        if name == "load_state_dict" and _adds_lora():
            return type(refer()).load_state_dict(refer(), *args, **kwargs)
        raise OffloadError(refusal)

    if name == "__deepcopy__":  # modules have none
        return refuse
    return Face(lambda: getattr(type(refer()), name).__get__(refer()), refuse, refusal)
