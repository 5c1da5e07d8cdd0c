"""Modules of torch whose weights stay quantized, and are multiplied so.

A module keeps its identity, its other parameters and its hooks. It gets another class, and in place
of a parameter its format's tensors (quantized values, scales, tables) as buffers, the weight's
"parts", under the names that they have in a checkpoint.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from streamload.codecs.parts import SOURCES, QuantCounts
from streamload.codecs.product import coded_form, operands
from streamload.codecs.scheme import SCHEMES, CodedWeight, Quantized, is_blocks
from streamload.core.dtypes import BY_NAME, F32, DType
from streamload.devices.base import Swap
from streamload.devices.torch.decoded import Origin, decoded, interpreted, origin_of
from streamload.devices.torch.deferred import deferred
from streamload.devices.torch.product import (
    TILE_NBYTES,
    Operand,
    compile_kernels,
    dense,
    form_of,
    linear,
)
from streamload.devices.torch.refused import (
    allow_saving,
    refuse_moves,
    refuse_saving,
    refuse_wrapping,
)
from streamload.devices.torch.tensors import CODED, tie_key

_Parts = Mapping[str, torch.Tensor]

_STEP_NUMEL = 2**20  # elements quantized at once


# --- modules --------------------------------------------------------------------------------------


class Coded(nn.Module):
    """Base of modules that hold weights quantized.

    The parts of a weight are its tensors in the module: the quantized values, scales and tables.
    `requantized`: errors of quantizing weights that were written since they were loaded.
    """

    _streamload_dtype: torch.dtype  # of the weights before they were quantized
    _streamload_name = ""  # the module's name in its model
    requantized = QuantCounts()

    def dense(
        self,
        leaf: str,
        dtype: torch.dtype | None = None,
        index: int | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return a weight dequantized, or its ``index`` on the first axis; no other memory is used.

        Each value is rounded once to ``dtype``; None: the dtype before quantizing. ``device``
        computes the result, after the parts are moved there; None: where they are.
        """
        of = self.operand(leaf, index, device)
        dtype = dtype or self._streamload_dtype
        found = dense(of, dtype)
        shape = self._coded[leaf].shape
        return found.view(shape if index is None else shape[1:])

    def operand(
        self, leaf: str, index: int | None = None, device: torch.device | None = None
    ) -> Operand:
        """Return a weight for products; see `dense` for ``index`` and ``device``."""
        coded = self._coded[leaf]
        rows, width = coded.matrix
        first, stop = 0, rows
        if index is not None:
            each = rows // coded.shape[0]
            first = range(coded.shape[0])[index] * each
            stop = first + each
        of = _traced_operands if torch.compiler.is_compiling() else _operands
        parts = [self._buffers[name] for name in of(coded, leaf)]
        if device is not None and parts[0].device != device:
            parts = [part.to(device) for part in parts]
        return Operand(coded.format, parts, first, stop, width)

    @interpreted
    def shown(self, leaf: str, index: int | None = None, **options: Any) -> torch.Tensor:
        """Return a weight, or the matrix of expert ``index``, dequantized by `dense` (``options``).

        The result is a `DecodedWeight` in the layout of the module's original class. Raises
        RuntimeError if accelerate is the caller.
        """
        refuse_moves(self.address(leaf))
        transposed = self._coded[leaf].transposed
        with torch.inference_mode(False):  # inference tensors do not count writes
            values = self.dense(leaf, index=index, **options)
        values = values.t() if transposed else values
        return decoded(values, Origin(values, self, leaf, transposed, partial=index is not None))

    def requantize(self, leaf: str, values: torch.Tensor) -> QuantCounts:
        """Quantize new values of a weight, on the CPU, into the memory of its parts.

        Returns the quantization errors, which are added to `requantized`. Raises ValueError: the
        values are no floats, or of another shape than the quantized weight; or nothing here
        quantizes to its format.
        """
        coded, found = self._coded[leaf], tuple(values.shape)
        if coded.format not in SCHEMES:
            raise ValueError(f"cannot write to {self.address(leaf)}: {self.advice(leaf)}")
        if found != coded.shape or not values.is_floating_point():
            raise ValueError(
                f"cannot quantize {self.address(leaf)} again: expected floats of the shape "
                f"{list(coded.shape)}, found {values.dtype} of {list(found)}"
            )
        parts = self._parts(leaf)
        made = SCHEMES[coded.format].of(coded.matrix, _source(parts))
        kept = values.dtype in _ENCODED
        encoder = made.encoder(_ENCODED[values.dtype if kept else torch.float32])
        codes = torch.empty(made.parts[0].nbytes, dtype=torch.uint8, device="cpu")
        counts, flat = QuantCounts(), values.detach().reshape(-1)
        for at, end in _steps(made, values.numel()):
            piece = flat[at:end].to("cpu", None if kept else torch.float32).contiguous()
            out = codes[made.codes_nbytes(at) : made.codes_nbytes(end)]
            counts += encoder.encode(_bytes(piece), _bytes(out), at)
        written = {"": memoryview(codes.numpy()), **encoder.finish()}
        with torch.no_grad():
            for suffix, part in parts.items():
                new = torch.frombuffer(bytearray(written[suffix]), dtype=torch.uint8)
                part.copy_(new.view(part.dtype).view(part.shape))
        self.requantized = self.requantized + counts
        return counts

    def stamp(self, leaf: str) -> tuple[int, ...]:
        """Return torch's version counters of a weight's parts: a write to one changes them."""
        parts = self._parts(leaf).values()
        return tuple(0 if part.is_inference() else part._version for part in parts)

    @property
    def _coded(self) -> Mapping[str, CodedWeight]:
        coded: Mapping[str, CodedWeight] = self.__dict__.get(CODED, {})
        return coded

    def _parts(self, leaf: str) -> dict[str, torch.Tensor]:
        """Return the parts of a weight, by the suffixes of their names; "" for the values."""
        return {p.suffix: self._buffers[p.name(leaf)] for p in self._coded[leaf].made.parts}

    def address(self, leaf: str) -> str:
        """Return the name of a weight in the model, as it was loaded."""
        return f"{self._streamload_name}.{leaf}" if self._streamload_name else leaf

    def advice(self, leaf: str) -> str:
        """Return what to write in place of a write to a decoded copy, for errors."""
        format = self._coded[leaf].format
        if format in SCHEMES:
            return f"write module.{leaf} = torch.nn.Parameter(new), which quantizes it again"
        return (
            f"nothing here quantizes to {format}, as it is stored; load it as floats: "
            f'quant={{"{self.address(leaf)}": None, "*": "stored"}}'
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Quantize a parameter assigned to a weight; share another module's weight if assigned.

        Codes of the same shape and dtype are taken as they are.
        """
        if name not in self._coded:
            super().__setattr__(name, value)
            return
        coded, origin, codes = self._coded[name], origin_of(value), self._buffers.get(name)
        is_tensor = isinstance(value, torch.Tensor) and codes is not None
        if is_tensor and value.dtype == codes.dtype and value.shape == codes.shape:
            self._buffers[name] = value
        elif origin is not None:
            self._share(name, origin.holder, origin.leaf)
        elif isinstance(value, nn.Parameter):
            own = value.detach()
            self.requantize(name, own.t() if coded.transposed else own)
        else:
            raise TypeError(
                f"cannot assign a {type(value).__name__} to {self.address(name)}, which is held as "
                f"{coded.format}: {self.advice(name)}"
            )

    def _share(self, leaf: str, other: Coded, its: str) -> None:
        """Tie weight ``leaf`` to weight ``its`` of module ``other``, by holding the same parts."""
        mine, theirs = self._coded[leaf], other._coded[its]
        if mine != theirs:
            raise TypeError(
                f"cannot tie {self.address(leaf)} to {other.address(its)}: one is {mine.format} of "
                f"{list(mine.shape)}, the other {theirs.format} of {list(theirs.shape)}; give both "
                "one format"
            )
        for name, named in zip(mine.names(leaf), theirs.names(its), strict=True):
            self._buffers[name] = other._buffers[named]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the original class: the module's current class is created at runtime."""
        own = type(self).__bases__[1]
        return _empty, (own, frozenset(self._coded)), self.__dict__

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the module for ``.to()`` and the like; parts keep their dtypes.

        If memory is too small for the move, all parts stay where they were.
        """
        held = {name: self._buffers.pop(name) for name in _names(self._coded)}
        try:
            device = next(iter(held.values())).device
            like = fn(torch.empty(0, dtype=self._streamload_dtype, device=device))
            super()._apply(fn, recurse)
            flat = {name: old.detach().reshape(-1).view(torch.uint8) for name, old in held.items()}
            moved = {
                name: fn(flat[name]).view(old.dtype).reshape(old.shape)
                for name, old in held.items()
            }
            held = {name: _moved(old, moved[name]) for name, old in held.items()}
            self._streamload_dtype = like.dtype
        finally:
            self._buffers.update(held)
        return self

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Yield parameters, but no quantized weights; raise if peft calls to wrap such a weight."""
        refuse_wrapping({self.address(leaf) for leaf in self._coded})
        own: Iterator[tuple[str, Any]] = super().named_parameters(*arguments, **options)
        return own

    def _save_to_state_dict(self, *arguments: Any) -> None:
        """Add all parts to a state dict; raise if accelerate calls, which would move them."""
        for leaf in self._buffers.keys() & self._coded.keys():  # none inside of `set_aside`
            refuse_moves(self.address(leaf))
        super()._save_to_state_dict(*arguments)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        """Load parts, also those with a dot in their names, which torch reads as submodules."""
        own = {prefix + name for name in _names(self._coded)}
        for leaf, each in self._coded.items():
            codes = state.get(prefix + leaf)
            if isinstance(codes, torch.Tensor) and codes.is_floating_point():
                # 8-bit values may have its shape, and copying would round it to integers
                state = {key: value for key, value in state.items() if key != prefix + leaf}
                others[4].append(
                    f"{prefix}{leaf} is held as {each.format}, and {codes.dtype} was given: "
                    f"{self.advice(leaf)}"
                )
        super()._load_from_state_dict(state, prefix, *others)
        unexpected = others[3]
        unexpected[:] = [name for name in unexpected if name not in own]


@cache
def _operands(coded: CodedWeight, leaf: str) -> list[str]:
    return [part.name(leaf) for part in operands(coded)]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traced_operands(coded: CodedWeight, leaf: str) -> list[str]:
    """Return the names of `operands`, which a compiler takes as a constant."""
    return _operands(coded, leaf)


_ENCODED = {getattr(torch, src.name): src for src in SOURCES}


def _source(parts: _Parts) -> DType:
    """Return a weight's dtype before quantizing, from bitsandbytes' state; float32 without one."""
    for suffix, part in parts.items():
        if _is_state(suffix):
            return BY_NAME[json.loads(bytes(part.cpu().numpy()))["dtype"]]
    return F32


def _is_state(suffix: str) -> bool:
    """Whether the suffix of a part's name is that of bitsandbytes' state."""
    return suffix.startswith(".quant_state")


def _steps(made: Quantized, numel: int) -> Iterator[tuple[int, int]]:
    """Cut ``numel`` elements into pieces of whole blocks; yield (start, stop exclusive) of each."""
    step = max(_STEP_NUMEL // made.unit_numel, 1) * made.unit_numel
    return pairwise([*range(0, numel, step), numel])


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def _moved(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the moved tensor, in the old object if torch allows it: modules may share it."""
    if old.is_inference() or not torch._has_compatible_shallow_copy_type(old, new):
        return new
    old.data = new
    return old


def _names(coded: Mapping[str, CodedWeight]) -> list[str]:
    """Return the names of all parts of a module's quantized weights."""
    return [name for leaf, each in coded.items() for name in each.names(leaf)]


class _Product(Coded):
    """Base of modules that multiply by a quantized weight of shape (outputs, inputs)."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight, dequantized at each access; see `DecodedWeight`."""
        return self.shown("weight")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the input multiplied by the weight; see `product.linear`."""
        if isinstance(input, torch.fx.Proxy):  # one node in its graph, like torch's own modules
            tracer: Any = input.tracer
            path = tracer.path_of_module(self)
            node: torch.Tensor = tracer.create_proxy("call_module", path, (input,), {})
            return node
        return linear(input, self.operand("weight", device=input.device), self.bias)


class QuantLinear(_Product, nn.Linear):
    """A ``torch.nn.Linear`` that holds its weight quantized."""


class _Dense:
    """The quantized weights of all experts of a module; indexing returns one, `deferred`."""

    _is_hf_initialized = True  # transformers leaves it as it is

    def __init__(self, leaf: str, module: Coded) -> None:
        refuse_moves(module.address(leaf))
        self._leaf, self._module = leaf, module

    @interpreted
    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        """Return an expert's matrix, on the device of ``expert`` if that is a tensor."""
        device, module, leaf = getattr(expert, "device", None), self._module, self._leaf
        coded = module._coded[leaf]
        index = range(coded.shape[0])[int(expert)]
        if form_of(coded.format, coded.shape[-1]) is None:
            return module.shown(leaf, index, device=device)
        return deferred(
            coded.shape[1:],
            module._streamload_dtype,
            device or module._buffers[leaf].device,
            partial(module.operand, leaf, index, device),
            partial(module.shown, leaf, index, device=device),
            transposed=False,
        )

    def __setitem__(self, expert: Any, values: Any) -> None:
        """Raise RuntimeError: one expert cannot be quantized again alone."""
        Origin(torch.empty(0), self._module, self._leaf, partial=True).write("one expert")


@cache
def _class_of(own: Any, leaves: frozenset[str]) -> type[Any]:
    """Return the subclass that replaces ``own`` if its parameters ``leaves`` are quantized.

    A class of experts computes one expert after the other, as transformers does without kernels;
    its weights are `_Dense`, so that only the experts in use are dequantized.
    """
    if own is nn.Linear:
        return QuantLinear
    if leaves == {"weight"}:
        return type(f"Quant{own.__name__}", (_Product, own), {})
    entries: dict[str, Any] = {leaf: property(partial(_Dense, leaf)) for leaf in leaves}
    eager = inspect.unwrap(own.forward)

    def forward(self: Any, hidden_states: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        self._streamload_dtype = hidden_states.dtype  # what its weights are multiplied with
        found: torch.Tensor = eager(self, hidden_states, *rest, **named)
        return found

    entries["forward"] = forward
    return type(f"Quant{own.__name__}", (Coded, own), entries)


def _empty(own: Any, leaves: frozenset[str]) -> Any:
    """Return a module without a state, for unpickling."""
    return object.__new__(_class_of(own, leaves))


def make_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Give quantized modules their original classes back, with dequantized weights."""
    made: dict[int, nn.Parameter] = {}  # by id of the quantized values, which modules may share
    for module in list(model.modules()):
        if not isinstance(module, Coded):
            continue
        for leaf, said in module._coded.items():
            codes = module._buffers[leaf]
            assert codes is not None
            if id(codes) not in made:
                dense = module.dense(leaf, dtype)
                dense = dense.t().contiguous() if said.transposed else dense
                made[id(codes)] = nn.Parameter(dense)
            module._parameters[leaf] = made[id(codes)]
            for name in said.names(leaf):
                del module._buffers[name]
        _become(module, type(module).__bases__[1])


def _become(module: nn.Module, own: type[nn.Module]) -> None:
    """Give a module its original class, ``own``, back."""
    module.__class__ = own
    for key in (CODED, "_streamload_dtype", "_streamload_name"):
        module.__dict__.pop(key, None)


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Remove quantized weights' parts from all modules inside the ``with``: nothing moves them."""
    held = [
        (module, {name: module._buffers.pop(name) for name in _names(getattr(module, CODED))})
        for module in model.modules()
        if hasattr(module, CODED)
    ]
    try:
        yield
    finally:
        for module, parts in held:
            module._buffers.update(parts)


# --- the place of modules in a model --------------------------------------------------------------


@cache
def computed() -> tuple[str, ...]:
    """Return the names of the formats that modules compute with."""
    return tuple(name for name in SCHEMES if coded_form(CodedWeight(name, (1, 256))))


_Place = tuple[nn.Module, str]
_CONV1D = "transformers.pytorch_utils.Conv1D"
#: The classes that can hold quantized weights, for errors.
_HOLDERS = "torch's Linear, and transformers' Conv1D and fused experts"


def _is_experts(module: nn.Module, parameter: torch.Tensor) -> bool:
    """Whether a module is one of transformers' fused experts, with several implementations.

    Their eager forward indexes one expert's matrix after the other.
    """
    decorated = hasattr(type(module).forward, "__wrapped__")
    return parameter.dim() == 3 and decorated and hasattr(module, "is_transposed")


def _said(module: nn.Module, leaf: str, format: str) -> CodedWeight | None:
    """Return the `CodedWeight` by which a module can hold parameter ``leaf``; None if it cannot."""
    parameter = module._parameters[leaf]
    if type(parameter) is not nn.Parameter:  # sharded, quantized by others, or None
        return None
    shape = tuple(parameter.shape)
    coded, own = CodedWeight(format, shape), type(module)
    if leaf == "weight" and own is nn.Linear:
        return coded
    if leaf == "weight" and f"{own.__module__}.{own.__name__}" == _CONV1D:
        return CodedWeight(format, shape[::-1], transposed=True)
    if not _is_experts(module, parameter):
        return None
    with suppress(ValueError):  # the format cannot hold it: the load's error names the tensor
        made = coded.made
        if math.prod(shape[1:]) % made.unit_numel or any(part.is_sibling for part in made.parts):
            return None  # an expert begins within a block, or two weights share a part's name
    return coded


def _tied(module: nn.Module, leaf: str) -> Any:
    """Return a key that is equal for parameters that are one weight."""
    parameter = module._parameters[leaf]
    return None if parameter is None else tie_key(parameter)


def swapping(
    model: nn.Module, places: Iterable[tuple[str, _Place]], formats: Mapping[str, str]
) -> Swap:
    """Return the `Swap` that lets a model's modules hold weights in ``formats``, by name.

    ``places``: (name, (module, name in it)) of all parameters; shared ones under each name. Raises
    ValueError if there is no module for a format.
    """
    known = computed()
    for format in formats.values():
        if format not in known and not is_blocks(format):
            raise ValueError(f"quant: torch computes with {', '.join(known)}, not with {format}")
    by_name: dict[str, _Place] = {}
    shared: dict[Any, dict[_Place, str]] = {}
    for name, (module, leaf) in places:
        if leaf in module._parameters:
            by_name[name] = module, leaf
            shared.setdefault(_tied(module, leaf), {}).setdefault((module, leaf), name)
    coded: dict[str, CodedWeight] = {}
    groups: list[tuple[CodedWeight, dict[_Place, str]]] = []
    refused: dict[str, str] = {}
    dense_nbytes = 0
    for name, format in formats.items():
        if name not in by_name:
            continue
        module, leaf = by_name[name]
        holders = shared[_tied(module, leaf)]
        weight, *others = {_said(*place, format) for place in holders}
        if weight is None or others:
            # shared with a module, such as an embedding, that needs the weight unquantized
            kinds = dict.fromkeys(type(holder).__name__ for holder, _ in holders)
            refused[name] = " and ".join(kinds) + ", which share it" * (len(kinds) > 1)
            continue
        coded |= dict.fromkeys((*holders.values(), name), weight)
        groups.append((weight, holders))
        itemsize = module._parameters[leaf].itemsize
        one = math.prod(weight.shape[-2:]) * itemsize  # one expert at a time, of others a tile
        dense_nbytes = max(dense_nbytes, one if len(weight.shape) > 2 else min(one, TILE_NBYTES))

    def compile(devices: Mapping[str, str]) -> None:
        for weight, holders in groups:
            name = next((name for name in holders.values() if name in devices), None)
            if name is not None:
                module, leaf = next(iter(holders))
                dtype = module._parameters[leaf].dtype
                compile_kernels(weight, dtype, torch.device(devices[name]))

    return Swap(coded, lambda: _put(model, groups), compile, dense_nbytes, _HOLDERS, refused)


def _put(
    model: nn.Module, groups: Iterable[tuple[CodedWeight, Mapping[_Place, str]]]
) -> Callable[[], None]:
    """Make modules quantized, without values yet; return a function that undoes it.

    ``groups``: each weight, with the names of the (module, attribute) places that share it.
    """
    before: dict[int, tuple[nn.Module, Any, dict[str, Any], dict[str, Any]]] = {}
    for said, holders in groups:
        others = {
            part: torch.empty(part.shape, dtype=getattr(torch, part.dtype.name), device="meta")
            for part in said.made.parts[1:]
        }
        first, its = next(iter(holders))
        held = first._parameters[its]  # tied parameters may be several objects over one memory
        assert held is not None
        for (module, leaf), name in holders.items():
            kept = dict(module._parameters), dict(module._buffers)
            before.setdefault(id(module), (module, type(module), *kept))
            # the old weight stays as the buffer until the load releases it
            del module._parameters[leaf]
            module._buffers[leaf] = held
            module._buffers.update({part.name(leaf): empty for part, empty in others.items()})
            module.__dict__.setdefault(CODED, {})[leaf] = said
            module.__dict__["_streamload_dtype"] = held.dtype
            module.__dict__["_streamload_name"] = name.rpartition(".")[0]
    for module, own, _, _ in before.values():
        module.__class__ = _class_of(own, frozenset(getattr(module, CODED)))
    silent = refuse_saving(model, Coded)

    def undo() -> None:
        for each in silent:
            allow_saving(each)
        for module, own, parameters, buffers in before.values():
            _become(module, own)
            for entries, kept in ((module._parameters, parameters), (module._buffers, buffers)):
                entries.clear()
                entries.update(kept)

    return undo
