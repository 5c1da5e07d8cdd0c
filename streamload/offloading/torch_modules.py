"""torch's modules whose weights are in slots: fetched before a module computes, then released."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import (
    Callable,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass
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
from streamload.core.patterns import matches
from streamload.devices.parameters import Slot
from streamload.devices.torch.tensors import TO_TORCH, changes_nothing
from streamload.errors import OffloadError
from streamload.offloading.model import RowReader
from streamload.offloading.prefetch import Rounds
from streamload.offloading.slots import Slots

# Characters that are special in patterns of `fnmatch`; a number between the points of a name.
_SPECIAL = re.compile(r"([*?[])")
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
_MOST_NAMED = 4


class UnstreamableWeights:
    """Collects weights that passes show to be unable to stream, and raises one error for all.

    A pass goes on to its end, to find all of them; then it raises in place of returning its output.
    """

    def __init__(self) -> None:
        self.streams: dict[str, str] = {}  # by each name of a weight, its name in errors
        self._kept: dict[str, str] = {}  # by weight, why it cannot stream in any pass
        self._outside: dict[str, str] = {}  # by weight, why it cannot stream in this pass
        self.fine: set[str] = set()  # weights that a layer used in this pass, and left unchanged
        self._passes = 0  # passes under way, one inside the other

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Wrap a pass: raise OffloadError at its end for all weights that cannot stream."""
        self.check()
        if self._passes:  # a pass inside of another
            yield
            return
        self._outside.clear()
        self.fine.clear()
        self._passes += 1
        try:
            yield
        except Exception as error:
            if not (self._kept or self._outside):
                raise
            raise self._error() from error
        finally:
            self._passes -= 1
        if self._kept or self._outside:
            raise self._error()

    def check(self) -> None:
        if self._kept and not self._passes:
            raise self._error()

    def cannot(self, name: str, reason: str, *, outside: bool = False) -> None:
        """Note why a weight cannot stream: raises OffloadError now, or in a pass at its end.

        ``outside``: a module outside of the weight's layer used it, an error in this pass only.
        """
        (self._outside if outside else self._kept).setdefault(name, reason)
        if not self._passes:
            self.fine.clear()
            raise self._error()

    def _error(self) -> OffloadError:
        found = {**self._kept, **self._outside}
        quoted = [f'"{each}"' for each in _patterns(found, self.streams, self.fine)]
        hint = quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"
        (first, reason), *rest = found.items()
        if not self._passes:
            self._outside.clear()
        likewise = ", ".join(name for name, _ in rest[:_MOST_NAMED])
        if len(rest) > _MOST_NAMED:
            likewise += f" and {len(rest) - _MOST_NAMED} more"
        beside = f"; nor can {likewise} stream" if rest else ""
        return OffloadError(f"{first} {reason}{beside}: let the weight stay, with stay={hint}")


def _patterns(found: Iterable[str], streams: Mapping[str, str], fine: Container[str]) -> list[str]:
    """Return patterns of names that match the weights ``found``, for ``stay=``.

    A pattern has "*" for numbers, unless that matches a weight of ``fine``, which can stream.
    ``streams``: by each name of a weight, its name in errors.
    """
    mine = {*found}
    out: list[str] = []
    for name in found:
        if matches(name, out):
            continue
        exact = _SPECIAL.sub(r"[\1]", name)
        kind = _NUMBER.sub("*", exact)
        others = {own for each, own in streams.items() if matches(each, [kind])} - mine
        out.append(exact if any(each in fine for each in others) else kind)
    return out


# Attributes of the face itself; all others are those of its method.
_OWN = frozenset(("__call__", "__reduce_ex__", "__reduce__", "__deepcopy__"))


class Face:
    """Looks like a method, and calls another function.

    Class, signature, name, docstring, annotations, code and object are those of the method:
    packages read arguments of a model's ``forward`` from its signature.
    """

    __slots__ = ("__weakref__", "_call", "_function", "_method", "_refusal")

    def __new__(cls, method: Callable[..., Any], call: Any, refusal: str = "") -> Any:
        """Make a face; if ``method`` is a face, bind it to the object ``call`` (for WeakMethod)."""
        if type(method) is Face:
            return MethodType(method, call)
        return object.__new__(cls)

    def __init__(
        self, method: Callable[[], Any], call: Callable[..., Any], refusal: str = ""
    ) -> None:
        """Call ``call`` in place of the method that ``method`` returns.

        ``method`` must not keep the object alive. ``refusal``: the error of a copy or pickle.
        """
        self._method, self._call, self._refusal = method, call, refusal
        self._function: Face | None = None

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        if name == "_torchdynamo_disable":  # dynamo would bypass the face, and run the method
            return True
        method = _method_of(self)
        if name != "__func__":
            return getattr(method, name)
        function = object.__getattribute__(self, "_function")
        if function is None:  # kept: packages have weak references to it
            call, refusal = (object.__getattribute__(self, each) for each in ("_call", "_refusal"))
            function = self._function = _function_of(method, call, refusal)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return object.__getattribute__(self, "_call")(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(_method_of(self) == (_method_of(other) if type(other) is Face else other))

    def __hash__(self) -> int:
        return hash(_method_of(self))

    def __repr__(self) -> str:
        return repr(_method_of(self))

    def __dir__(self) -> list[str]:
        return dir(_method_of(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError(object.__getattribute__(self, "_refusal"))

    __deepcopy__ = __reduce_ex__


def _method_of(face: Face) -> Any:
    return object.__getattribute__(face, "_method")()


def _function_of(method: Any, call: Callable[..., Any], refusal: str) -> Face:
    function, owner = method.__func__, id(method.__self__)

    def called(*args: Any, **kwargs: Any) -> Any:
        if args and id(args[0]) == owner:
            return call(*args[1:], **kwargs)
        return function(*args, **kwargs)

    found: Face = Face(lambda: function, called, refusal)
    return found


_LENT = "_streamload_lent"  # attribute of a weight in a slot: its state when it was first lent

# torch.compile's attributes of a tensor, which do not depend on values.
_OF_COMPILE = ("_dynamo_static_input_type", "_dynamo_dynamic_indices")


@dataclass(slots=True)
class _Lent:
    """The state of a weight when a module got it, to detect changes."""

    address: int
    version: int  # torch's count of writes
    uses: int  # references of tensors and Python to its storage
    home: torch.Tensor  # another tensor over its memory
    left: int = 0  # references that a traceback may have; counted again until there are none

    @classmethod
    def of(cls, weight: torch.Tensor, home: torch.Tensor) -> _Lent:
        """Return the state of a weight now; ``home``: a tensor over the same memory."""
        storage = home.untyped_storage()  # one object per storage
        uses = torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
        return cls(weight.data_ptr(), weight._version, uses, home)


def weight_of(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter over a tensor in a slot, with its own storage, to lend to modules."""
    with torch.inference_mode(False), torch.no_grad():
        made = nn.Parameter(tensor, requires_grad=False)
    del tensor
    setattr(made, _LENT, None)
    return made


def is_lent(value: object) -> bool:
    """Return whether an object is a weight in a slot, made by `weight_of`."""
    return hasattr(value, _LENT)


def lend(weight: torch.Tensor, stands: torch.Tensor) -> None:
    """Note the state of a weight before a module gets it, in place of the placeholder ``stands``.

    The weight gets the placeholder's ``requires_grad``, by which kernels are chosen, too.
    """
    if weight.requires_grad != stands.requires_grad:
        weight.requires_grad_(stands.requires_grad)
    was: _Lent | None = getattr(weight, _LENT)
    if was is None:
        setattr(weight, _LENT, _Lent.of(weight, weight.detach()))
    elif was.left:
        was.left = max(_Lent.of(weight, was.home).uses - was.uses, 0)


def after_error(weights: Sequence[torch.Tensor]) -> None:
    """Allow one more reference to each weight, by the error's traceback, which may be kept."""
    for weight in weights:
        was: _Lent | None = getattr(weight, _LENT)
        if was is not None:
            was.left = max(was.left, 1)


def kept_in(module: nn.Module, weights: Sequence[torch.Tensor]) -> set[int]:
    """Return indices of the weights that attributes of a module or its children refer to."""
    storages = {weight.untyped_storage()._cdata: at for at, weight in enumerate(weights)}
    found, seen = set[int](), set[int]()
    todo: list[Any] = [vars(each) for each in module.modules()]
    with torch._C.DisableTorchFunctionSubclass():
        while todo:
            value = todo.pop()
            if id(value) in seen:  # a container may hold itself
                continue
            seen.add(id(value))
            if isinstance(value, dict):
                todo += value.values()
            elif isinstance(value, (list, tuple, set)):
                todo += value
            elif isinstance(value, torch.Tensor) and torch._C._has_storage(value):
                found.add(storages.get(value.untyped_storage()._cdata, -1))
            elif isinstance(value, torch.UntypedStorage):
                found.add(storages.get(value._cdata, -1))
    return found


def take_back(weight: torch.Tensor) -> None:
    """Restore a lent weight, its memory and attributes: the next layer gets the same object."""
    was: _Lent | None = getattr(weight, _LENT, None)
    if was is not None and weight.data_ptr() != was.address:
        weight.data = was.home
    for key in {*weight.__dict__} - {_LENT, *_OF_COMPILE}:
        delattr(weight, key)


def forget(weight: torch.Tensor) -> None:
    """Drop the state that `lend` noted, as the weight is lent no more."""
    if is_lent(weight):
        setattr(weight, _LENT, None)


def is_kept(weights: Sequence[torch.Tensor], at: int, before: int) -> bool:
    """Return whether Python has more than ``before`` references to ``weights[at]``: it is kept."""
    if sys.getrefcount(weights[at]) > before:
        gc.collect()  # an unused cycle may hold it
    return sys.getrefcount(weights[at]) > before


def why_kept(weight: Any, given: torch.Tensor) -> str:
    """Return the misuse of lent ``given``, in words, or ""; the module now has ``weight``."""
    if weight is not given:
        return "puts another tensor in its place"
    was: _Lent = getattr(given, _LENT)
    found = _Lent.of(given, was.home)
    if found.address != was.address:
        return "puts other data in its place"
    if found.version != was.version:
        was.version = found.version  # so that only this layer is reported
        return "writes into it"
    if found.uses > was.uses + was.left:
        gc.collect()
        if _Lent.of(given, was.home).uses > was.uses + was.left:
            return "keeps or gives a view of it"
    return ""


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
    _streamload_stays: UnstreamableWeights | None
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
        stays: UnstreamableWeights | None = None,
    ) -> StreamedParameter:
        """Make a placeholder; ``name``: for errors; ``stays`` collects uses, None: each raises."""
        made: StreamedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._streamload_streamed, made._streamload_stays = name, stays
        return made

    def __repr__(self) -> str:
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
        (UnstreamableWeights() if stays is None else stays).cannot(
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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OF_LORA):
        frame = frame.f_back
    return frame is not None


def _with_values(what: str, args: Any, kwargs: Any) -> Any:
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
            forget(view)
        self._made.clear()

    def refuse_capture(self) -> None:
        refuse_capture()

    def take_back(self) -> None:
        """Make a later ``backward`` that needs lent tensors raise: it would read another layer."""
        torch.autograd.graph.increment_version(self._memory)


class TorchSlots(TensorSlots):
    """Slots with parameters over them, for modules; a storage per parameter, to count its uses."""

    weight_of = staticmethod(weight_of)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        own = from_dlpack(to_dlpack(tensor.reshape(-1).view(torch.uint8)))
        return weight_of(own.view(tensor.dtype).view(tensor.shape))

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
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
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
        stays: UnstreamableWeights,
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

        return self._rounds.call(compute)

    @contextmanager
    def _there(self) -> Iterator[None]:
        self._stays.check()
        before, buffers, ended = list[Any](), list[torch.Tensor](), False
        inside_itself = self._number in self._rounds.users
        try:  # before acquiring: Ctrl-C may come at its end
            buffers = [*self._rounds.acquire(self._number)]  # raises if another thread has it
            before = [self._before(*place[1:], inside_itself) for place in self._places]
            for at, container, key, absent in self._places:
                lend(buffers[at], absent)
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
                    take_back(buffer)
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
            problem = why_kept(container.get(key), buffers[at])
            if not problem and is_kept(buffers, at, counts[at]):
                problem = "keeps or gives it"
            if problem:
                self._cannot(absent, problem)
            else:
                self._stays.fine.add(absent._streamload_streamed)

    def _check_attributes(self, buffers: Sequence[torch.Tensor]) -> None:
        """After a failed call, note weights that attributes keep; the traceback may keep others."""
        if not buffers:
            return
        after_error(buffers)
        kept = kept_in(self._module, buffers)
        for at, _, _, absent in self._places:
            if at in kept:
                self._cannot(absent, "keeps it or a view of it")

    def _cannot(self, absent: Any, problem: str) -> None:
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
        if is_lent(had):
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
        self._models = WeakSet(models)

    def put(self) -> None:
        for model in self._models:
            for name in _WORDS:
                if name == "__deepcopy__" or hasattr(type(model), name):
                    model.__dict__[name] = _refusing(name, weakref.ref(model))

    def take_out(self) -> None:
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
