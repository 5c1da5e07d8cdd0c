"""Parameters of torch's modules and of dicts of tensors; torch's devices are in `torch.device`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from streamload.codecs.scheme import CodedWeight
from streamload.core.computed import is_computed
from streamload.core.dtypes import BY_NAME, DType
from streamload.core.tensors import Block
from streamload.devices.parameters import Slot, SlotParameter, dict_slots, make_parameters
from streamload.errors import DeviceError

# without floats below 8 bits: torch's shapes count bytes of those, a checkpoint's their elements
TO_TORCH: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name, dtype in BY_NAME.items()
    if dtype.bits >= 8 and hasattr(torch, name)
}
_FROM_TORCH = {dtype: name for name, dtype in TO_TORCH.items()}
_MIN_TRIMMED_NBYTES = 2**20  # below, a block of CUDA's allocator shares its segment with others

_BEFORE = "_streamload_before"  # attribute of an invalid tensor: the tensor that it replaces
#: Attribute of a module: the `CodedWeight` of each quantized weight, by the last part of its name.
CODED = "_streamload_coded"
#: Attribute of a module: the keys of its buffers that are scales or tables of quantized weights.
PARTS = "_streamload_parts"
#: Attribute of the tensor that replaces a streamed weight in a module: the weight's name.
STREAMED = "_streamload_streamed"
#: Attribute of bitsandbytes' `QuantState`: a checkpoint's JSON of it, as a tensor of bytes.
FACTS = "_streamload_facts"
# attribute of invalid tensors, one object for tied ones; ``kept``: whether the memory is kept
_INVALID = "_streamload_invalid"


# Functions that may be called with an invalid tensor. All others would compute: torch's matrix
# products on the CPU do not notice a tensor without values, and read address 0 or fresh memory.
_ASKED = frozenset(
    (
        "__get__", "__set__", "__deepcopy__", "__reduce_ex__", "__repr__", "detach", "dim",
        "element_size", "empty_like", "is_complex", "is_contiguous", "is_floating_point",
        "numel", "requires_grad_", "clone",
        "_has_compatible_shallow_copy_type", "size", "stride", "is_inference",
        "register_hook", "register_post_accumulate_grad_hook",
    )
)  # fmt: skip


#: Functions that an `UnstoredBuffer` may be called with, too.
_MOVES = frozenset(("to", "half", "float", "double", "bfloat16", "type", "cpu", "cuda"))


class _Raises:
    """Base of tensors without values: functions that compute with them raise DeviceError."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions that read shape, dtype or device; raise DeviceError for all others."""
        if func.__name__ not in _ASKED:
            raise DeviceError(
                "torch",
                "this tensor has no values: a load failed, its offload was closed, "
                "or it is a buffer that no checkpoint has, of a model made on the meta device: the "
                "load's notes name those; to keep what model code computes, make the model in "
                f"`with accelerate.init_empty_weights():` ({func.__name__})",
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            if type(out) is torch.Tensor and out.device.type == "meta":  # .data, .detach()
                out = out.as_subclass(InvalidTensor)
        return out


class InvalidTensor(_Raises, torch.Tensor):
    """A buffer that a failed load left without values."""


class InvalidParameter(_Raises, nn.Parameter):
    """A parameter that a failed load left without values."""


class UnstoredBuffer(_Raises, torch.Tensor):
    """A buffer on the meta device that no checkpoint stores, once its model is loaded."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call functions that move it or read shape, dtype or device; raise for all others."""
        if func.__name__ in _MOVES:
            # moved to another device, torch raises: it has no data
            with torch._C.DisableTorchFunctionSubclass(), suppress(NotImplementedError):
                out = func(*args, **(kwargs or {}))
                return _marked_unstored(out) if out.is_meta else out
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), _marked_unstored(torch.empty_like(self)))


def _marked_unstored(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().as_subclass(UnstoredBuffer)


def mark_unstored(model: nn.Module) -> None:
    """Let computing with a module's buffers on the meta device, which no load fills, raise."""
    for _, (buffers, key) in _module_slots(model, persistent=False):
        if type(buffers[key]) is torch.Tensor and buffers[key].is_meta:
            buffers[key] = _marked_unstored(buffers[key])


class TorchParameter(SlotParameter):
    """A parameter over entries of a module or dict with the same memory.

    The tensor objects stay the same if torch allows it, so that optimizers and hooks keep them.
    """

    of_module = False  # otherwise of a dict, whose tensors are never computed
    _lent: torch.Tensor | None = None

    def _look(self) -> None:
        entry = self._objects()[0]
        self.invalid = hasattr(entry, _BEFORE)
        kept = self.invalid and getattr(entry, _INVALID).kept
        before, tensor = getattr(entry, _BEFORE, entry), self._tensors()[0]
        self.refused = "" if self.invalid else _why_refused(tensor) or _why_no_block(before)
        if self.refused:
            return
        self.block = _block(before)
        self.shape = tuple(entry.shape) if self.block is None else self.block.shape
        self.dtype = _FROM_TORCH.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        if tensor.device.type == "meta":
            return
        self.keeps = BY_NAME.get(self.dtype)
        if self.invalid and not kept:
            self.device = name_of(tensor.device)  # a load restores it there
        else:
            self._look_at(tensor)

    def _look_at(self, tensor: torch.Tensor) -> None:
        """Set the attributes of `Parameter` that depend on the tensor's memory."""
        storage_nbytes = tensor.untyped_storage().nbytes()
        if tensor.numel() and storage_nbytes == 0:
            return  # it was freed
        self.device = name_of(tensor.device)
        self.nbytes = min(tensor.nbytes, storage_nbytes)
        if tensor.numel() == 0:
            return
        contiguous = tensor.is_contiguous()
        reach_nbytes = tensor.nbytes
        if not contiguous:
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            reach_nbytes = (reach + 1) * tensor.element_size()
        first = tensor.data_ptr()
        self.span = (0, first, first + reach_nbytes)
        if storage_nbytes > tensor.nbytes:
            # a contiguous view can be written in place; replacing it would detach it from its base
            self.fixed = "it is a view of a larger tensor"
            if not contiguous:
                self.refused = "it is a view of a larger tensor, and not contiguous"
        elif not contiguous:
            self.dtype += " (not contiguous)"  # never equal: it is replaced

    def is_computed(self) -> bool:
        """Whether it is a module's buffer with values, and has a name of computed tensors."""
        holds = self.device is not None and not self.invalid and self.of_module
        if not holds or isinstance(self._objects()[0], nn.Parameter):
            return False
        return any(is_computed(name, self.shape) for name in self.names)

    def _tensors(self) -> list[torch.Tensor]:
        """Return the tensors: for an invalid tensor the kept one, for a DTensor the local shard."""
        return [_local(getattr(entry, _BEFORE, entry)) for entry in self._objects()]

    def memory(self) -> Sequence[tuple[int, int]]:
        return super().memory() if self.device == "cpu" else ()

    def buffer(self) -> torch.Tensor:
        self._lent = self._tensors()[0].detach()
        return self._lent

    def release(self) -> str:
        """Free the memory; the tensor objects stay. Returns "" or why it cannot be freed."""
        tensors = self._tensors()
        storage = tensors[0].untyped_storage()
        if tensors[0].device.type == "meta" or storage.nbytes() == 0:
            return ""
        if self.fixed:
            return self.fixed
        memory = StorageWeakRef(storage)
        del storage
        device = tensors[0].device
        layout = tensors[0].storage_offset(), tensors[0].shape, tensors[0].stride()
        grads = [tensor.grad if tensor.is_leaf else None for tensor in tensors]
        for tensor in tensors:
            with torch.inference_mode(tensor.is_inference()):  # an inference tensor stays one
                tensor.data = _empty(tensor)
            tensor.grad = None  # of the old values
        if not memory.expired():
            self._collect()
        if memory.expired():
            if device.type == "cuda" and self.nbytes >= _MIN_TRIMMED_NBYTES:
                with suppress(RuntimeError):  # the device's next user gets the error
                    torch.cuda.empty_cache()
            return ""
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        for tensor, grad in zip(tensors, grads, strict=True):
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = _empty(tensor).set_(storage, *layout)
            tensor.grad = grad
        return "something else still holds its memory (a graph, a view, another tensor)"

    def attach(self, buffer: torch.Tensor, dtype: DType) -> None:
        """Give the tensors the buffer's memory; replace tensors for which torch cannot do that."""
        self._swap(lambda old: _with_data(getattr(old, _BEFORE, old), buffer))

    def invalidate(self, keep: bool) -> None:
        """Replace the tensors by meta tensors; ``keep`` their memory for `revive`."""

        def meta(old: torch.Tensor) -> torch.Tensor:
            before = getattr(old, _BEFORE, old)
            with torch.inference_mode(False):
                empty = torch.empty(self.shape, dtype=before.dtype, device="meta")
                cls = InvalidParameter if isinstance(before, nn.Parameter) else InvalidTensor
                entry = torch.Tensor._make_subclass(cls, empty, before.requires_grad)
            setattr(entry, _BEFORE, before)
            setattr(entry, _INVALID, mark)
            return entry

        if self._lent is not None:  # an error's traceback may keep it
            self._lent.data = _empty(self._lent)
        mark = SimpleNamespace(kept=keep)
        self._swap(meta)
        for tensor in self._tensors():
            _changed(tensor)  # half-written, or gone
        self.invalid = True

    def revive(self) -> None:
        """Put back the tensors whose memory was written, and notify autograd."""
        self._lent = None
        self._swap(lambda old: getattr(old, _BEFORE, old))
        for tensor in self._tensors():
            _changed(tensor)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without elements, with the dtype and device of another."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; does not import ``torch.distributed.tensor``."""
    found = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(tensor, found.DTensor)


def _local(tensor: Any) -> torch.Tensor:
    """Return this process's shard of a DTensor; any other tensor itself."""
    if not _is_sharded(tensor):
        return tensor
    with torch.no_grad():  # otherwise autograd records a view
        return tensor.to_local()


def _why_no_block(tensor: Any) -> str:
    """Return why this process's shard of a DTensor is not one block of it, or ""."""
    if not _is_sharded(tensor):
        return ""
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.get_coordinate() is None:
        return "this process is not in its mesh"
    for at, placement in enumerate(placements):
        if placement.is_partial():
            return f"it is a DTensor of partial sums ({placement})"
        # FSDP over tensor parallelism: it cuts the shards of later axes of the mesh again
        factor = getattr(placement, "split_factor", None)
        later = (n for n, p in enumerate(placements) if n > at and p.is_shard(placement.dim))
        if factor is None or _parts(tensor) is not None:
            continue
        if factor != math.prod(mesh.size(n) for n in later):
            return f"its shards are not blocks ({placement})"
    return ""


def _parts(tensor: Any) -> Block | None:
    """Return this process's block of a DTensor of fused parts, each cut alike; None if it is not.

    transformers cuts so the gates of experts, which are fused with their inputs.
    """
    cuts = [(at, p) for at, p in enumerate(tensor.placements) if not p.is_replicate()]
    if len(cuts) != 1 or (parts := getattr(cuts[0][1], "split_factor", 1)) == 1:
        return None
    (at, placement), whole = cuts[0], tuple(tensor.shape)
    axis = placement.dim % len(whole)
    length, rest = divmod(whole[axis], parts * tensor.device_mesh.size(at))
    first = [0] * len(whole)
    first[axis] = tensor.device_mesh.get_coordinate()[at] * length
    shape = (*whole[:axis], parts * length, *whole[axis + 1 :])
    return None if rest else Block(whole, tuple(first), shape, parts)


def _block(tensor: Any) -> Block | None:
    """Return this process's block of a DTensor; None for any other tensor."""
    if not _is_sharded(tensor):
        return None
    if (block := _parts(tensor)) is not None:
        return block
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as computed

    whole = tuple(tensor.shape)
    shape, first = computed(whole, tensor.device_mesh, tensor.placements)
    return Block(whole, tuple(map(int, first)), tuple(map(int, shape)))


_PLAIN = (torch.Tensor, nn.Parameter)


def _why_refused(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be written as a block of bytes, or ""."""
    if isinstance(tensor, _Raises):
        return ""
    if hasattr(tensor, STREAMED):
        return "it is offloaded: close() the model first"
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return "it has no shape yet: run its lazy module once"
    if type(tensor) not in _PLAIN and type(tensor.data) is not torch.Tensor:
        return f"it is a {type(tensor.data).__name__}, not a plain tensor"
    if tensor.is_nested or tensor._is_zerotensor():
        return "it is nested, or has no memory by design"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"it is quantized, or its layout is not strided ({tensor.layout})"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazily conjugated or negated view"
    return ""


def _changed(tensor: torch.Tensor) -> None:
    """Notify autograd of new values: graphs that saved the old ones raise."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _with_data(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return tensor ``old`` with new memory; a similar tensor if torch cannot keep the object."""
    if _is_sharded(old):
        return _with_local(old, new)
    if old.dtype != new.dtype or old.device != new.device:
        old.grad = None  # autograd refuses one of another dtype or device
    same_kind = old.is_inference() == new.is_inference()
    # as torch's own Module.to decides
    if same_kind and torch._has_compatible_shallow_copy_type(old, new):
        if old.requires_grad and not _can_have_grad(new):
            old.requires_grad_(False)
        with torch.inference_mode(False):
            old.data = new
        _changed(old)
        return old
    with torch.inference_mode(False):
        return _like(old, new)


def _with_local(old: Any, new: torch.Tensor) -> torch.Tensor:
    """Return a DTensor whose local shard is ``new``: the old object, or a similar DTensor."""
    local = _local(old)
    alike = (local.dtype, local.device) == (new.dtype, new.device)
    if alike and old.is_inference() == new.is_inference():
        local.data = new
        _changed(local)
        return old
    like = {"run_check": False, "shape": old.shape, "stride": old.stride()}
    made = type(old).from_local(new, old.device_mesh, old.placements, **like)
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(made, old.requires_grad and _can_have_grad(new))
    made.__dict__.update({k: v for k, v in old.__dict__.items() if k not in made.__dict__})
    return made


def _can_have_grad(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _like(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return a tensor over new memory with the class, grad flag, hooks and attributes of old."""
    made: torch.Tensor = new
    if isinstance(old, nn.Parameter):
        made = torch.Tensor._make_subclass(
            # a copy of an invalid one has lost its class
            nn.Parameter if isinstance(old, InvalidParameter) else type(old),
            new,
            old.requires_grad and _can_have_grad(new),
        )
    elif old.requires_grad and _can_have_grad(new):
        made = new.detach().requires_grad_()
    made.__dict__.update({k: v for k, v in old.__dict__.items() if k not in (_BEFORE, _INVALID)})
    # the same dicts: handles that remove hooks refer to them
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        registered = getattr(old, hooks, None)
        if registered:
            setattr(made, hooks, registered)
    return made


@cache
def name_of(device: torch.device) -> str:
    """Return a torch device's name, with an index if the machine may have several: "cuda:0"."""
    has_index = device.type not in ("cpu", "mps", "meta")
    return f"{device.type}:{device.index or 0}" if has_index else str(device.type)


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all modules inside it, with the prefixes of their tensors' names."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        yield f"{prefix}." if prefix else "", child


def _module_slots(module: nn.Module, persistent: bool) -> Iterator[tuple[str, Slot]]:
    """Yield (name, slot) of parameters and persistent buffers, or of all other buffers.

    The names are those in ``state_dict``, unless a hook of the module changes them there.
    """
    for dot, child in _children(module):
        for key, parameter in child._parameters.items() if persistent else ():
            if parameter is not None:
                yield dot + key, (child._parameters, key)
        for key, slot in _parts_of_library(child) if persistent else ():
            yield dot + key, slot
        for key, buffer in child._buffers.items():
            if buffer is not None and persistent == (key not in child._non_persistent_buffers_set):
                yield dot + key, (child._buffers, key)


def _parts_of_library(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Yield scales, tables and facts that bitsandbytes keeps as attributes of a module's weight.

    Those of int8 move to the module's state when it first computes.
    """
    weight, kind = _weight_of_library(module)
    if kind == "Int8Params":
        for each in (weight, getattr(module, "state", None)):
            if each is not None and vars(each).get("SCB") is not None:
                yield "SCB", (vars(each), "SCB")
                return
    state = four_bit_state(module)
    if state is None:
        return
    outer = [("nested_", state.state2)] if state.nested else []
    for prefix, of in (("", state), *outer):
        for key, attribute in (("absmax", "absmax"), ("quant_map", "code")):
            yield f"weight.{prefix}{key}", (vars(of), attribute)
    name = f"quant_state.bitsandbytes__{state.quant_type}"
    if FACTS not in vars(state):
        setattr(state, FACTS, state.as_dict(packed=True)[name].to(weight.device))
    yield f"weight.{name}", (vars(state), FACTS)


def _weight_of_library(module: nn.Module) -> tuple[Any, str]:
    """Return a module's weight and the name of its class, also after a load that failed."""
    weight: Any = dict(module._parameters.items()).get("weight")  # TorchScript's has no get()
    weight = getattr(weight, _BEFORE, weight)
    return weight, type(weight).__name__


def is_of_library(weight: Any) -> bool:
    """Return whether a weight is one of bitsandbytes', with scales as its attributes."""
    return type(weight).__name__ in ("Int8Params", "Params4bit")


def four_bit_state(module: nn.Module) -> Any:
    """Return the `QuantState` of a weight of bitsandbytes in 4 bits; None for any other module.

    None also if bitsandbytes has repacked the codes for a CPU.
    """
    weight, kind = _weight_of_library(module)
    state = weight.quant_state if kind == "Params4bit" else None
    return None if getattr(state, "packing_format_for_cpu", False) else state


def tie_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tied tensors: the object, or the memory and its layout."""
    if hasattr(tensor, _INVALID):
        return id(getattr(tensor, _INVALID))
    if tensor.device.type == "meta" or _why_refused(tensor) or tensor.numel() == 0:
        return id(tensor)
    if tensor.untyped_storage().nbytes() == 0:  # freed: its elements are nowhere
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def parameters_of(model: Any) -> list[TorchParameter]:
    """Return a module's parameters and persistent buffers, or a dict's tensors, as parameters.

    Tied tensors are one. Names lack the prefixes of wrappers; `Parameter.wrapped` has them. Raises
    ValueError: the model is neither a module nor a dict.
    """
    wrapped: dict[str, str] = {}
    slots: Iterable[tuple[str, Slot]]
    if isinstance(model, nn.Module):
        unwrapped = unwrapped_names(model)
        named = [(unwrapped(name), name, s) for name, s in _module_slots(model, persistent=True)]
        wrapped = {inner: name for inner, name, _ in named if inner != name}
        slots = ((inner, slot) for inner, _, slot in named)
    elif isinstance(model, MutableMapping):
        slots = dict_slots(model, (torch.Tensor,))
    else:
        raise ValueError(
            f"tensors of torch are loaded into a module or a dict, not a {type(model).__name__}"
        )
    found = make_parameters(slots, lambda slot: tie_key(slot[0][slot[1]]), TorchParameter)
    for parameter in found:
        parameter.of_module = isinstance(model, nn.Module)
        parameter.wrapped = tuple(wrapped[n] for n in parameter.names if n in wrapped)
    return found


def unwrapped_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function that removes wrappers' prefixes from names inside a model.

    Wrappers are the modules of DataParallel, DistributedDataParallel and torch.compile.
    """
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # slow to import, and there if needed
    inner: list[tuple[type, str]] = [
        (nn.DataParallel, "module."),
        (nn.parallel.DistributedDataParallel, "module."),
        *([(compiled.OptimizedModule, "_orig_mod.")] if compiled is not None else []),
    ]
    found = [
        (dot + attribute, dot)
        for dot, child in _children(model)
        for kind, attribute in inner
        if isinstance(child, kind)
    ]
    found.sort(key=lambda each: -len(each[0]))  # the innermost first

    def unwrapped(name: str) -> str:
        for before, after in found:
            if name.startswith(before):
                name = after + name.removeprefix(before)
        return name

    return unwrapped


def places_of(model: Any) -> list[tuple[str, tuple[nn.Module, str]]]:
    """Return (name, (module, name in it)) of each parameter; if shared, under each name."""
    if not isinstance(model, nn.Module):
        return []
    unwrapped = unwrapped_names(model)
    return [
        (unwrapped(dot + leaf), (child, leaf))
        for dot, child in _children(model)
        for leaf in child._parameters
    ]


def coded_of(model: Any) -> dict[str, CodedWeight]:
    """Return the weights that a module holds quantized, by their names."""
    if not isinstance(model, nn.Module):
        return {}
    unwrapped = unwrapped_names(model)
    return {
        unwrapped(dot + leaf): said
        for dot, child in _children(model)
        for leaf, said in getattr(child, CODED, {}).items()
    }


def parts_of(module: nn.Module) -> set[str]:
    """Return the keys of a module's buffers that are parts of quantized weights."""
    coded: dict[str, CodedWeight] = getattr(module, CODED, {})
    names = (name for leaf, said in coded.items() for name in said.names(leaf))
    return {*getattr(module, PARTS, ()), *names}


def unstored_of(model: Any) -> dict[str, str]:
    """Return the devices of a module's non-persistent buffers, by name."""
    if not isinstance(model, nn.Module):
        return {}
    unwrapped = unwrapped_names(model)
    slots = _module_slots(model, persistent=False)
    return {unwrapped(name): name_of(b[key].device) for name, (b, key) in slots}


def changes_nothing(model: nn.Module, change: Callable[[Any], Any]) -> bool:
    """Whether ``change``, as ``.to()`` applies it to tensors, keeps their devices and dtypes."""

    def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.device, tensor.dtype, tensor.is_shared()

    tensors = (*model.parameters(), *model.buffers())
    for device, dtype in {(each.device, each.dtype) for each in tensors}:
        probe = torch.empty(0, dtype=dtype, device=device)
        if kind(change(probe.clone())) != kind(probe):
            return False
    return True
