"""torch's modules whose weights are in slots: brought before a module computes, and gone after."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from streamload.devices.slots import Slot
from streamload.devices.torch_tensors import TO_TORCH
from streamload.errors import OffloadError
from streamload.planning.residency import SlotPlaces

_LENT = "_streamload_lent"  # on a weight that a module has for a call: what it was

# What torch.compile says of a tensor, whatever it holds.
_OF_COMPILE = ("_dynamo_static_input_type", "_dynamo_dynamic_indices")

# What may be asked of a weight that is not there: what it is.
_ASKED = frozenset(
    (
        "__get__", "__set__", "__repr__", "dim", "element_size", "is_complex", "is_floating_point",
        "numel", "requires_grad_", "size", "stride", "is_inference", "is_contiguous", "__hash__",
        "__eq__", "ndimension", "__len__", "nelement", "storage_offset", "get_device",
        "_is_view", "is_same_size", "type", "__format__",
    )
)  # fmt: skip


# Attributes that are values, or views of them.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class StreamedParameter(torch.Tensor):
    """What stands in a module for a weight that is brought when the module computes.

    It has a shape, a dtype and a device, and no memory.
    """

    _streamload_streamed: str
    _is_param = True  # to torch it is a parameter

    @staticmethod
    def __new__(
        cls, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> StreamedParameter:
        """Make one; ``name`` is for errors."""
        made: StreamedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=False
        )
        made._streamload_streamed = name
        return made

    def __repr__(self) -> str:
        """Without values."""
        return (
            f"{type(self).__name__}({self._streamload_streamed}, {list(self.shape)}, {self.dtype})"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what the tensor is; raise for all else."""
        name = func.__name__
        if name in ("__get__", "__set__"):  # of an attribute
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            name = f".{attribute}" if attribute in _VALUES else name
        if name not in _ASKED:
            raise _not_here(name, args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing computes with it."""
        raise _not_here(str(func), args)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse: a copy would share the slots."""
        raise OffloadError(
            f"{self._streamload_streamed}: a model that is offloaded cannot be copied"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled."""
        raise OffloadError(
            f"{self._streamload_streamed}: a model that is offloaded cannot be saved"
        )


def _not_here(what: str, args: Any) -> OffloadError:
    """The error for one who wants a weight's values."""
    found = (each for each in args if isinstance(each, StreamedParameter))
    name = next((each._streamload_streamed for each in found), "a weight")
    return OffloadError(
        f"{name} streams from its file when its layer computes, and is not here now ({what}): a "
        "model that is offloaded cannot be saved, moved, copied, trained or changed; read the "
        "checkpoint, close() the offload first, or let the weight stay where a model uses it "
        f'outside of its layer: stay="{name}"'
    )


class TorchSlots:
    """Slots of a device side by side, in one piece of memory."""

    def __init__(self, memory: torch.Tensor, places: SlotPlaces) -> None:
        """Take a flat uint8 tensor of all slots."""
        self._memory, self._places = memory, places
        self._views: dict[Any, list[torch.Tensor]] = {}

    def buffers(self, layer: int, slot: int) -> Sequence[torch.Tensor]:
        """Parameters over the slot's memory; the same objects for layers that are alike."""
        key = self._places.alike(layer, slot)
        if key not in self._views:
            with torch.inference_mode(False), torch.no_grad():
                self._views[key] = [*self._made(layer, slot)]
        return self._views[key]

    def _made(self, layer: int, slot: int) -> Iterator[torch.Tensor]:
        for start, stop, dtype, shape in self._places.of(layer, slot):
            flat = self._memory[start:stop].view(TO_TORCH[dtype.name])
            yield self._held(flat.view(shape))

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a module holds of a tensor in a slot: a storage that tells who refers to it."""
        own = from_dlpack(to_dlpack(tensor.reshape(-1).view(torch.uint8)))
        return weight_of(own.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        """Let go of the memory, even where something still refers to a view."""
        for view in (self._memory, *(each for views in self._views.values() for each in views)):
            view.data = torch.empty(0, dtype=view.dtype, device=view.device)
            view.__dict__.pop(_LENT, None)
        self._views.clear()


class TensorSlots(TorchSlots):
    """The same, of plain tensors, for loops of a user's own."""

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def lend(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What a loop gets of the buffers of a slot, until `take_back`."""
        refuse_capture()
        return buffers

    def take_back(self) -> None:
        """Let a ``backward`` that needs what was lent raise: it would read the next layer."""
        torch.autograd.graph.increment_version(self._memory)


@dataclass(frozen=True, slots=True)
class _Lent:
    """What a weight was when a module got it.

    Attributes:
        address: where its memory begins.
        version: how often it was written by operators of torch.
        uses: how many tensors refer to its memory.
        home: a tensor over that memory.
    """

    address: int
    version: int
    uses: int
    home: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, home: torch.Tensor) -> _Lent:
        """Look at a weight."""
        uses = torch._C._storage_Use_Count(home.untyped_storage()._cdata)
        return cls(weight.data_ptr(), weight._version, uses, home)


def weight_of(tensor: torch.Tensor) -> nn.Parameter:
    """What a module gets of a weight for a call; nothing else may refer to the tensor's storage."""
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(tensor, requires_grad=False)
    del tensor
    setattr(made, _LENT, None)
    return made


def is_lent(value: object) -> bool:
    """Whether a module has it for a call."""
    return hasattr(value, _LENT)


def _lend(weight: torch.Tensor) -> None:
    """Remember what a weight is, when it is first lent: from then on modules give it back so."""
    if getattr(weight, _LENT) is None:
        setattr(weight, _LENT, _Lent.of(weight, weight.detach()))


def _take_back(weight: torch.Tensor) -> None:
    """Let a weight be what was lent, whatever a module did: the next layer has the same object."""
    was: _Lent | None = getattr(weight, _LENT, None)
    if was is not None and weight.data_ptr() != was.address:
        weight.data = was.home
    for key in {*weight.__dict__} - {_LENT, *_OF_COMPILE}:
        delattr(weight, key)


def _why_kept(weight: Any, given: torch.Tensor) -> str:
    """What a module did with a weight that it had for a call, or "": its memory is another's next.

    Args:
        weight: what the module has.
        given: what it was given.
    """
    if weight is not given:
        return "puts another tensor in its place"
    was: _Lent = getattr(given, _LENT)
    found = _Lent.of(given, was.home)
    if found.address != was.address:
        return "puts other data in its place"
    if found.version != was.version:
        setattr(given, _LENT, replace(was, version=found.version))  # of this layer alone
        return "writes into it"
    if found.uses > was.uses:
        gc.collect()  # a cycle may hold a view that nobody needs any more
        if _Lent.of(given, was.home).uses > was.uses:
            return "keeps or gives a view of it"
    return ""


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for n in shape:
        numel *= n
    return numel


class Source(Protocol):
    """Where the weights of layers come from."""

    def acquire(self, number: int) -> Sequence[torch.Tensor]:
        """Wait for those of a layer."""

    def release(self, number: int, ticket: Any) -> None:
        """They are not needed any more, when a ticket's work has ended."""


def refuse_capture() -> None:
    """Raise OffloadError where what is computed is recorded, to be run again without us."""
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


# The same, and nothing of it is compiled: made when somebody compiles.
_UNCOMPILED: list[Callable[..., Any]] = []


class Wrapped:
    """The ``forward`` of a module that streams.

    It does not keep the module: the memory of a model that nobody refers to is freed at once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._refer = weakref.ref(module)
        self._had = module.__dict__.get("forward")

    @property
    def _module(self) -> nn.Module:
        module = self._refer()
        if module is None:
            raise OffloadError("a copy of a module of a model that is gone cannot compute")
        return module

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self._had is not None:
            return self._had(*args, **kwargs)
        module = self._module
        return type(module).forward(module, *args, **kwargs)

    def put(self) -> None:
        """Stand in the place of the module's own; compiled code calls it as it is."""
        self._module.forward = self._call

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, and let nothing of it be compiled.

        torch.compile imports dynamo, which takes more than a second: before that, nothing is.
        """
        if "torch._dynamo" not in sys.modules:
            return _run(self, args, kwargs)
        if not _UNCOMPILED:
            _UNCOMPILED.append(torch.compiler.disable(_run))
        return _UNCOMPILED[0](self, args, kwargs)

    def take_out(self) -> None:
        """Let the module have its own again."""
        module = self._refer()
        if module is not None:
            module.__dict__.pop("forward", None)
            if self._had is not None:
                module.forward = self._had

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadError("a model that is offloaded cannot be copied: close() it first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError("a model that is offloaded cannot be saved: close() it first")


def refuse_training(module: nn.Module) -> None:
    """Raise OffloadError where gradients are wanted of a module that is trained."""
    if module.training and torch.is_grad_enabled():
        raise OffloadError(
            "a model that is offloaded cannot be trained: call model.eval(), or run it under "
            "torch.no_grad()"
        )


class _NoBackward(torch.autograd.Function):
    """What a model computes, of which nobody can ask for gradients."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The same."""
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse."""
        raise OffloadError(
            "a model that is offloaded cannot be trained: no gradients go through layers that "
            "stream; load the model, or call it under torch.no_grad()"
        )


def no_backward(found: Any) -> Any:
    """What a model gave, with tensors that refuse ``backward``: else it would do part of it."""
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
    """Brings a layer's weights while its module computes."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        places: Sequence[tuple[int, Slot]],
        source: Source,
        mark: Callable[[], Any],
    ) -> None:
        """Change nothing yet.

        Args:
            module: of the layer.
            number: of the layer.
            places: where the module has each of its weights: number of the buffer, and place.
            source: of the weights.
            mark: gives a ticket of what was queued.
        """
        super().__init__(module)
        self._number, self._source, self._mark = number, source, mark
        self._places = [(at, container, key) for at, (container, key) in places]
        self._absent = [container[key] for _, container, key in self._places]
        self._problem = ""  # why it cannot stream, once that is known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the layer's weights."""
        refuse_training(self._module)
        with self._there(), torch.no_grad():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _there(self) -> Iterator[None]:
        if self._problem:
            raise OffloadError(self._problem)
        before, buffers = self._absent, list[torch.Tensor]()
        try:  # from here on: Ctrl-C may come as soon as the layer is there
            buffers = [*self._source.acquire(self._number)]
            before = [
                self._checked(*place) for place in zip(self._places, self._absent, strict=True)
            ]
            for at, container, key in self._places:
                _lend(buffers[at])
                container[key] = buffers[at]
            yield
            self._check_given_back(buffers)
        finally:
            try:
                for (_, container, key), had in zip(self._places, before, strict=True):
                    container[key] = had
                for buffer in buffers:
                    _take_back(buffer)
            finally:
                ticket = None
                try:
                    ticket = self._mark()
                finally:
                    self._source.release(self._number, ticket)

    def _check_given_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Raise OffloadError where a weight is not as it was: the next pass would not see that."""
        for (at, container, key), absent in zip(self._places, self._absent, strict=True):
            problem = _why_kept(container.get(key), buffers[at])
            if problem:
                kind, name = type(self._module).__name__, absent._streamload_streamed
                self._problem = (
                    f"{name} streams, and {kind} {problem} when it computes; the memory is another "
                    f'layer\'s next: let the weight stay, with stay="{name}"'
                )
                raise OffloadError(self._problem)

    @staticmethod
    def _checked(place: tuple[int, Any, str], absent: Any) -> Any:
        """What stands in the place of a weight, where that is what was put there."""
        _, container, key = place
        had = container[key]
        if not isinstance(had, StreamedParameter) and not is_lent(had):
            name = absent._streamload_streamed
            raise OffloadError(
                f"{name} streams, and something has put another tensor in its place, which would "
                f'not be used: let it stay, with stay="{name}", or close() the offload first'
            )
        return had


class GatheredEmbedding(Wrapped):
    """Reads the rows that an embedding is asked for from the file."""

    def __init__(
        self, module: nn.Embedding, place: Slot, rows: Callable[[Sequence[int]], torch.Tensor]
    ) -> None:
        """Change nothing yet.

        Args:
            module: the embedding.
            place: where it has its weight.
            rows: gives rows of the weight, on the device, by their numbers.
        """
        super().__init__(module)
        self._container, self._key = place
        self._absent, self._rows = self._container[self._key], rows

    def __call__(self, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Embed: with a weight of the rows that are asked for, and their numbers in it."""
        module = self._module
        assert isinstance(module, nn.Embedding)
        refuse_training(module)
        asked, inverse = torch.unique(ids, return_inverse=True)
        rows = self._rows(asked.tolist())
        padding, module.padding_idx = module.padding_idx, None
        try:
            self._container[self._key] = nn.Parameter(rows, requires_grad=False)
            with torch.no_grad():
                return self._forward(inverse, *args, **kwargs)
        finally:
            self._container[self._key] = self._absent
            module.padding_idx = padding


_REFUSED = ("_apply", "state_dict", "load_state_dict", "save_pretrained", "__deepcopy__")


class Refusals:
    """What a model that is offloaded does not do: each method says so, before it does half."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Change nothing yet; ``models``: the model, and its modules that hold layers."""
        self._models = [weakref.ref(model) for model in models]

    def put(self) -> None:
        """Refuse."""
        for model in self._alive():
            for name in _REFUSED:
                model.__dict__[name] = _refusing(name)

    def take_out(self) -> None:
        """Let the methods be as they were."""
        for model in self._alive():
            for name in _REFUSED:
                model.__dict__.pop(name, None)

    def _alive(self) -> list[nn.Module]:
        found = (refer() for refer in self._models)
        return [model for model in found if model is not None]


_WORDS: Mapping[str, str] = {
    "_apply": "moved or cast (.to, .half, .cuda)",
    "state_dict": "asked for its state_dict, which would hold all that does not fit",
    "load_state_dict": "loaded again",
    "save_pretrained": "saved",
    "__deepcopy__": "copied",
}


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OffloadError(
            f"a model that is offloaded cannot be {_WORDS[name]}: its weights are in the "
            "checkpoint; read that, or close() the model first"
        )

    return refuse


def modules_by_name(model: nn.Module, unwrapped: Callable[[str], str]) -> dict[str, nn.Module]:
    """Modules by the names that they have without wrappers; the outermost of each."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(unwrapped(f"{name}.").removesuffix("."), module)
    return found


def computes(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own, through which its weights are used."""
    own = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    return own and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def used_elsewhere(model: nn.Module) -> set[int]:
    """Ids of modules whose weights others use without calling them."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found.update(map(id, module.children()))
    return found


def looked_at(model: nn.Module) -> set[int]:
    """Ids of the dicts of parameters that others look at before they call what has these.

    `nn.TransformerEncoder` looks at its first layer's, and packs padded sequences where these are
    plain tensors: what it gives at the padding depends on that.
    """
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder))
    nested = (m for m in encoders if m.enable_nested_tensor and len(m.layers))
    return {id(module._parameters) for m in nested for module in m.layers[0].modules()}


def let_go(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, whoever refers to it."""
    with suppress(RuntimeError):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
