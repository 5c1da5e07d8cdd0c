"""torch's modules whose weights are in slots: brought before a module computes, and gone after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import nn

from streamload.devices.slots import Slot
from streamload.devices.torch_tensors import TO_TORCH
from streamload.dtypes import DType
from streamload.errors import OffloadError
from streamload.units import round_up

#: Tensors in a slot begin at multiples of this: of torch's allocators, CUDA's rounds to it and the
#: CPU's to 64. What a matrix product gives may depend on where its weights begin.
ALIGNMENT_NBYTES = 512

# What may be asked of a weight that is not there: what it is.
_ASKED = frozenset(
    (
        "__get__", "__set__", "__repr__", "dim", "element_size", "is_complex", "is_floating_point",
        "numel", "requires_grad_", "size", "stride", "is_inference", "is_contiguous", "__hash__",
        "__eq__", "ndimension", "__len__", "nelement", "storage_offset", "get_device",
        "_is_view", "is_same_size", "type", "__format__",
    )
)  # fmt: skip


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
        if func.__name__ not in _ASKED:
            found = next((each for each in args if isinstance(each, cls)), None)
            name = found._streamload_streamed if found is not None else "a weight"
            raise OffloadError(
                f"{name} streams from its file when its layer computes, and is not here now "
                f"({func.__name__}): a model that is offloaded cannot be saved, moved, copied, "
                "trained or compiled as a whole; read the checkpoint, or close() it first"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing computes with it."""
        raise OffloadError(f"a weight that streams has no values here ({func})")

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


class TorchSlots:
    """Slots of a device side by side, in one piece of memory."""

    def __init__(
        self,
        memory: torch.Tensor,
        slot_nbytes: int,
        layers: Sequence[Sequence[tuple[DType, tuple[int, ...]]]],
    ) -> None:
        """Take memory.

        Args:
            memory: a flat uint8 tensor of all slots.
            slot_nbytes: bytes of a slot, a multiple of `ALIGNMENT_NBYTES`.
            layers: dtypes and shapes of the placements of each.
        """
        self._memory, self._slot_nbytes, self._layers = memory, slot_nbytes, layers
        self._views: dict[Any, list[torch.Tensor]] = {}

    def buffers(self, layer: int, slot: int) -> Sequence[torch.Tensor]:
        """Parameters over the slot's memory; the same objects for layers that are alike."""
        key = slot, tuple((dtype.name, shape) for dtype, shape in self._layers[layer])
        if key not in self._views:
            with torch.inference_mode(False), torch.no_grad():
                self._views[key] = [*self._made(layer, slot * self._slot_nbytes)]
        return self._views[key]

    def _made(self, layer: int, at: int) -> Iterator[torch.Tensor]:
        for dtype, shape in self._layers[layer]:
            nbytes = dtype.nbytes(_numel(shape))
            flat = self._memory[at : at + nbytes].view(TO_TORCH[dtype.name])
            yield nn.Parameter(flat.view(shape), requires_grad=False)
            at += round_up(nbytes, ALIGNMENT_NBYTES)

    def close(self) -> None:
        """Let go of the memory, even where something still refers to a view."""
        for view in (self._memory, *(each for views in self._views.values() for each in views)):
            view.data = torch.empty(0, dtype=view.dtype, device=view.device)
        self._views.clear()


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


class Wrapped:
    """The ``forward`` of a module that streams."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._had = module.__dict__.get("forward")
        self._forward = module.forward

    def put(self) -> None:
        """Stand in the place of the module's own; compiled code calls it as it is."""
        self._module.forward = torch.compiler.disable(self)

    def take_out(self) -> None:
        """Let the module have its own again."""
        self._module.__dict__.pop("forward", None)
        if self._had is not None:
            self._module.forward = self._had

    def __deepcopy__(self, memo: Any) -> Any:
        raise OffloadError("a model that is offloaded cannot be copied: close() it first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise OffloadError("a model that is offloaded cannot be saved: close() it first")


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the layer's weights."""
        if self._module.training and torch.is_grad_enabled():
            raise OffloadError(
                "a model that is offloaded cannot be trained: call model.eval(), or run it under "
                "torch.no_grad()"
            )
        with self._there(), torch.no_grad():
            return self._forward(*args, **kwargs)

    @contextmanager
    def _there(self) -> Iterator[None]:
        buffers = self._source.acquire(self._number)
        ticket = None
        try:
            for at, container, key in self._places:
                container[key] = buffers[at]
            yield
        finally:
            for (_, container, key), absent in zip(self._places, self._absent, strict=True):
                container[key] = absent
            try:
                ticket = self._mark()
            finally:
                self._source.release(self._number, ticket)


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
        asked, inverse = torch.unique(ids, return_inverse=True)
        rows = self._rows(asked.tolist())
        padding, module.padding_idx = module.padding_idx, None
        self._container[self._key] = nn.Parameter(rows, requires_grad=False)
        try:
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
        self._models = models

    def put(self) -> None:
        """Refuse."""
        for model in self._models:
            for name in _REFUSED:
                model.__dict__[name] = _refusing(name)

    def take_out(self) -> None:
        """Let the methods be as they were."""
        for model in self._models:
            for name in _REFUSED:
                model.__dict__.pop(name, None)


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
    own = type(module).forward is not nn.Module.forward
    return own and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def used_elsewhere(model: nn.Module) -> set[int]:
    """Ids of modules whose weights others use without calling them."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found.update(map(id, module.children()))
    return found


def let_go(tensor: torch.Tensor) -> None:
    """Free a tensor's memory, whoever refers to it."""
    with suppress(RuntimeError):
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
