"""torch's modules whose weights are in slots: brought before a module computes, and gone after."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from types import MethodType
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
from streamload.offloading.layers import Slots
from streamload.offloading.prefetch import Rounds
from streamload.offloading.stays import Stays
from streamload.offloading.torch_faces import Face
from streamload.offloading.torch_lent import (
    after_error,
    forget,
    is_kept,
    is_lent,
    kept_in,
    lend,
    take_back,
    weight_of,
    why_kept,
)

# Functions that need no values of a weight.
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

# Functions that write into their first argument.
_IN_PLACE = re.compile(r"[^_].*_|__i(?!nvert)\w+__")

# Attributes that are values, or views of them.
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))


class StreamedParameter(torch.Tensor):
    """Stands for a weight that comes when its module computes; has a shape, and no memory."""

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
        """Make one, with a name for errors; ``stays`` collects its uses, which raise without it."""
        made: StreamedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        made._streamload_streamed, made._streamload_stays = name, stays
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
        kwargs = kwargs or {}
        if name not in _ASKED:
            own = args
            args, kwargs = tree_map_only(StreamedParameter, partial(_zeros, name), (args, kwargs))
            if _IN_PLACE.fullmatch(name):  # nothing is written into zeros without memory
                return own[0]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing computes with it."""
        given = tree_map_only(StreamedParameter, partial(_zeros, str(func)), (args, kwargs or {}))
        return func(*given[0], **given[1])

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


def _zeros(what: str, weight: StreamedParameter) -> torch.Tensor:
    """Zeros without memory for a weight used outside of its layer: the pass will raise."""
    stays = weight._streamload_stays
    reason = (
        f"streams from its file when its layer computes, and is not here now ({what}): a model "
        "that is offloaded cannot be saved, moved, copied, trained or changed; read the "
        "checkpoint, close() the offload first, or where a model uses it outside of its layer"
    )
    (Stays() if stays is None else stays).cannot(weight._streamload_streamed, reason, outside=True)
    return zeros_like(weight)


def zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """Zeros of a weight's shape that take no memory."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)


@contextmanager
def stood_in(model: nn.Module) -> Iterator[None]:
    """Put zeros without memory, marked as initialised, in place of weights that stream.

    A package that initialises the others of a model passes over them.
    """
    zeros: dict[int, nn.Parameter] = {}
    own: dict[int, StreamedParameter] = {}
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
    """The containers, keys and values of a model's parameters and buffers."""
    return [
        (container, key, value)
        for module in model.modules()
        for container in (module._parameters, module._buffers)
        for key, value in container.items()
    ]


class TensorSlots(Slots):
    """Plain tensors of torch over slots, for loops of a user's own."""

    def _view(self, start: int, stop: int, dtype: DType, shape: tuple[int, ...]) -> tuple[Any, Any]:
        with torch.inference_mode(False), torch.no_grad():
            made = self._held(self._memory[start:stop].view(TO_TORCH[dtype.name]).view(shape))
            return made, made.detach()

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        """Let go of the memory, even where something still refers to a view."""
        both = chain.from_iterable(self._made.values())
        for view in (self._memory, *chain.from_iterable(both)):
            view.data = torch.empty(0, dtype=view.dtype, device=view.device)
            forget(view)
        self._made.clear()

    def lend(self, buffers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the buffers, until `take_back`."""
        refuse_capture()
        return buffers

    def take_back(self) -> None:
        """Make a ``backward`` that needs lent tensors raise: it would read the next layer."""
        torch.autograd.graph.increment_version(self._memory)


class TorchSlots(TensorSlots):
    """Parameters over slots, whose storages count references; workers have others."""

    weight_of = staticmethod(weight_of)

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        own = from_dlpack(to_dlpack(tensor.reshape(-1).view(torch.uint8)))
        return weight_of(own.view(tensor.dtype).view(tensor.shape))


def refuse_capture() -> None:
    """Raise OffloadError while computation is recorded: a replay would not bring weights."""
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

    def put(self) -> None:
        """Stand in the place of the module's own, and look like it."""
        face: Any = Face(
            self._own, self._call, "a model that is offloaded cannot be copied or saved"
        )
        self._module.forward = face

    def _own(self) -> Callable[..., Any]:
        """The module's own ``forward``."""
        module = self._module
        own = MethodType(type(module).forward, module) if self._had is None else self._had
        return cast("Callable[..., Any]", own)

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


def refuse_training(module: nn.Module) -> None:
    """Raise OffloadError if gradients are wanted of a module in training."""
    if module.training and torch.is_grad_enabled():
        raise OffloadError(
            "a model that is offloaded cannot be trained: call model.eval(), or run it under "
            "torch.no_grad()"
        )


class _NoBackward(torch.autograd.Function):
    """An output that refuses gradients."""

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
    """A model's output, with tensors that refuse ``backward``, which would do half."""
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
        rounds: Rounds,
        stays: Stays,
    ) -> None:
        """Change nothing yet; ``places``: the buffer's number and the place of each weight."""
        super().__init__(module)
        self._number, self._rounds = number, rounds
        self._places = [(at, held, key, held[key]) for at, (held, key) in places]
        self._stays = stays
        self._listed = WeakSet(m for m in module.modules() if isinstance(m, nn.RNNBase))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the layer's weights."""
        refuse_training(self._module)
        with self._there(), torch.no_grad():
            return self._own()(*args, **kwargs)

    @contextmanager
    def _there(self) -> Iterator[None]:
        self._stays.check()
        before, buffers, ended = list[Any](), list[torch.Tensor](), False
        try:  # from here on: Ctrl-C may come as soon as the layer is there
            buffers = [*self._rounds.acquire(self._number)]  # raises where another thread has it
            before = [container[key] for _, container, key, _ in self._places]
            for had, (*_, absent) in zip(before, self._places, strict=True):
                self._check(had, absent)
            for at, container, key, absent in self._places:
                lend(buffers[at], absent)
                container[key] = buffers[at]
            counts = [sys.getrefcount(buffers[at]) for at in range(len(buffers))]
            with self._restored():
                yield
            ended = True
            self._check_given_back(buffers, counts)
        finally:
            try:
                for (_, container, key, _), had in zip(self._places, before, strict=bool(before)):
                    container[key] = had
                for buffer in buffers:
                    take_back(buffer)
                if not ended and not any(map(is_lent, before)):  # else it runs inside of itself
                    self._check_attributes(buffers)
            finally:
                self._rounds.release(self._number)

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Keep autocast from caching casts, and recurrent modules from keeping lists of weights.

        Autocast identifies weights by their objects, which layers share.
        """
        with ExitStack() as after:
            for each in self._listed:
                before = {key: each.__dict__.get(key) for key in _LISTS}
                after.callback(each.__dict__.update, before)
            after.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            yield

    def _check_given_back(self, buffers: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """Report weights that changed: the next pass would not notice."""
        for at, container, key, absent in self._places:
            problem = why_kept(container.get(key), buffers[at])
            if not problem and is_kept(buffers, at, counts[at]):
                problem = "keeps or gives it"
            if problem:
                self._cannot(absent, problem)
            else:
                self._stays.fine.add(absent._streamload_streamed)

    def _check_attributes(self, buffers: Sequence[torch.Tensor]) -> None:
        """Report weights that attributes keep after an error, whose traceback refers to others."""
        if not buffers:
            return
        kept = kept_in(self._module, buffers)
        after_error(buffers)
        for at, _, _, absent in self._places:
            if at in kept:
                self._cannot(absent, "keeps it or a view of it")

    def _cannot(self, absent: Any, problem: str) -> None:
        """Report a weight that is not as it was."""
        said = f"streams, and {type(self._module).__name__} {problem} when it computes"
        name = absent._streamload_streamed
        self._stays.cannot(name, f"{said}; the memory is another layer's next")

    def _check(self, had: Any, absent: Any) -> None:
        """Report another tensor in place of a weight."""
        if not isinstance(had, StreamedParameter) and not is_lent(had):
            reason = (
                "streams, and something has put another tensor in its place, which would not be "
                "used: close() the offload first, or"
            )
            self._stays.cannot(absent._streamload_streamed, reason, outside=True)


class GatheredEmbedding(Wrapped):
    """Reads the rows that an embedding is asked for from the file."""

    def __init__(self, module: nn.Embedding, rows: Callable[[Sequence[int]], torch.Tensor]) -> None:
        """Change nothing yet; ``rows`` reads rows of the weight, on the device."""
        super().__init__(module)
        self._rows = rows

    def __call__(self, input: torch.Tensor) -> Any:
        """Embed: with a weight of the rows that are asked for, and their numbers in it."""
        refuse_training(self._module)
        asked, inverse = torch.unique(input, return_inverse=True)
        rows = self._rows(asked.tolist())
        with torch.no_grad():  # the module is not changed: other threads may call it
            return nn.functional.embedding(inverse, rows)


class Refusals:
    """Methods of an offloaded model that raise OffloadError, before they do half."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        """Change nothing yet; ``models``: the model, and its modules that hold layers."""
        self._models = WeakSet(models)

    def put(self) -> None:
        """Refuse."""
        for model in self._models:
            for name in _WORDS:
                if name == "__deepcopy__" or hasattr(type(model), name):
                    model.__dict__[name] = _refusing(name, weakref.ref(model))

    def take_out(self) -> None:
        """Let the methods be as they were."""
        for model in self._models:
            for name in _WORDS:
                model.__dict__.pop(name, None)


_WORDS: Mapping[str, str] = {
    "_apply": "moved or cast (.to, .half, .cuda)",
    "state_dict": "asked for its state_dict, which would hold all that does not fit",
    "load_state_dict": "loaded again",
    "save_pretrained": "saved",
    "__deepcopy__": "copied",
}


def _refusing(name: str, refer: Callable[[], Any]) -> Any:
    refusal = (
        f"a model that is offloaded cannot be {_WORDS[name]}: its weights are in the "
        "checkpoint; read that, or close() the model first"
    )

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if name == "_apply" and args and changes_nothing(refer(), args[0]):
            return refer()
        raise OffloadError(refusal)

    if name == "__deepcopy__":  # modules have none
        return refuse
    return Face(lambda: getattr(type(refer()), name).__get__(refer()), refuse, refusal)


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
    """Ids of modules whose weights other modules use without calling them."""
    attentions = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    return {id(child) for module in attentions for child in module.children()}


def looked_at(model: nn.Module) -> set[int]:
    """Ids of the dicts of parameters that other modules read before they call their module.

    `nn.TransformerEncoder` packs padded sequences if its first layer's are plain tensors.
    """
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder))
    nested = (m for m in encoders if m.enable_nested_tensor and len(m.layers))
    return {id(module._parameters) for m in nested for module in m.layers[0].modules()}


def let_go(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, even if others refer to it."""
    with suppress(RuntimeError):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
