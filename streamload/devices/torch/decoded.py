"""The values of a weight that a module of torch holds as codes: a copy, to which no write is lost.

torch's own functions are intercepted (`__torch_function__`). One that writes to the copy, or to a
view of it, raises. What is written by the functions in `_TAKEN` is quantised again instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Modules whose writes replace a weight by one that is meant to be close to it: what peft merges,
#: unmerges and takes out, and RWKV's powers of two.
_TAKEN = ("peft.", "transformers.models.rwkv.")
_PASSED = ("torch.", "streamload.")  # on the way from who writes to here


# What torch.compile takes into its graphs: what asks what a tensor is, and products with it.
_TRACED = frozenset(("__get__", "size", "dim", "numel", "element_size", "linear", "matmul"))


def interpreted(function: _Function) -> _Function:
    """Let torch.compile leave a function, and all that it calls, to the interpreter.

    So does `torch.compiler.disable`, which imports the compiler for it: 2.5 s.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


class Holder(Protocol):
    """The module that holds the codes."""

    def requantize(self, leaf: str, values: torch.Tensor) -> object:
        """Quantise other values in place of a weight."""

    def stamp(self, leaf: str) -> object:
        """What differs when the codes of a weight have been written."""

    def address(self, leaf: str) -> str:
        """The name of a weight in the model."""


@dataclass(eq=False)
class Origin:
    """The weight that a copy was decoded from.

    Attributes:
        values: all of the copy, as a plain tensor.
        holder: the module.
        leaf: of the weight's name.
        transposed: whether the codes are those of the transpose.
        partial: whether the copy is a part of the weight: an expert's matrix.
    """

    values: torch.Tensor
    holder: Holder
    leaf: str
    transposed: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        self._stamp = self.holder.stamp(self.leaf)

    def write(self, what: str, values: torch.Tensor | None = None) -> None:
        """Quantize the copy again, or other values; raise for an unknown writer.

        Raises:
            RuntimeError: nobody else may write, or the weight was written since it was decoded.
        """
        name = self.holder.address(self.leaf)
        new = f"module.{self.leaf} = torch.nn.Parameter(new)"
        if self.partial or not caller().startswith(_TAKEN):
            raise RuntimeError(
                f"cannot write to {name} ({what}): {type(self.holder).__name__} holds codes, and "
                f"the tensor is a decoded copy of them; write {new}, which quantises it again, or "
                "clone() the tensor first"
            )
        if self._stamp != self.holder.stamp(self.leaf):
            raise RuntimeError(
                f"cannot write to {name} ({what}): it was written since this copy was decoded; "
                f"read module.{self.leaf} again"
            )
        if values is not None:
            self.values = values
        with torch.no_grad():
            values = self.values.detach()
            self.holder.requantize(self.leaf, values.t() if self.transposed else values)
        self._stamp = self.holder.stamp(self.leaf)


def caller(passed: tuple[str, ...] = _PASSED) -> str:
    """The module of the first function on the stack that is none of those, by default torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__") or ""
        if not f"{name}.".startswith(passed):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class DecodedWeight(torch.Tensor):
    """Decoded values. What shares their memory is such a tensor; all other results are plain."""

    _streamload_origin: Origin
    _streamload_is_weight = False
    _is_hf_initialized = True  # transformers leaves it as it is

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as on plain tensors, and see to what was written."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() and getattr(func, "__name__", "") in _TRACED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _watched(func, args, kwargs)

    @property
    @interpreted
    def data(self) -> torch.Tensor:
        """The same values."""
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        _set_data(self, new)

    @property
    def _is_param(self) -> bool:
        """Whether it is a parameter: never, and what is made one is no copy of ours any more."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter
        self.__dict__.clear()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Write, as other functions do: torch does not intercept it."""
        return _watched(torch.Tensor.set_, (self, *args), kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """An array that cannot be written."""
        array = plain_of(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: nobody sees what others write to the memory."""
        name = self._streamload_origin.holder.address(self._streamload_origin.leaf)
        raise BufferError(f"cannot export {name}, a decoded copy of codes: clone() it first")

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Views along the first axis."""
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A plain tensor."""
        return plain_of(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor."""
        return plain_of(self).__reduce_ex__(protocol)


@interpreted
def _watched(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch on plain tensors, and see to the weights that it has written."""
    weights = list(_weights((args, kwargs)))
    with torch._C.DisableTorchFunctionSubclass():
        before = [(each._version, _key(each)) for each in weights]
        result = func(*args, **kwargs)
        after = [(each._version, _key(each)) for each in weights]
        written = [w for w, b, a in zip(weights, before, after, strict=True) if a != b]
        result = _shared(result, weights)
    for origin in {id(w._streamload_origin): w._streamload_origin for w in written}.values():
        origin.write(getattr(func, "__name__", str(func)))
    return result


@interpreted
def _set_data(weight: DecodedWeight, new: torch.Tensor) -> None:
    """Let a weight have other values; a view of one has other memory then, as in torch."""
    plain = plain_of(new) if isinstance(new, DecodedWeight) else new
    if weight._streamload_is_weight:
        origin = weight._streamload_origin
        if _key(plain) == _key(origin.values):
            return  # it was written when it was changed
        origin.write(".data =", plain)
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(weight, plain)
    if not weight._streamload_is_weight:
        weight.__class__ = type(new)
        weight.__dict__.clear()
        weight.__dict__.update(new.__dict__)


def decoded(values: torch.Tensor, origin: Origin) -> torch.Tensor:
    """A module's shown weight; tensors that are not plain, as those of tracers, are returned."""
    return values if type(values) is not torch.Tensor else _as_weight(values, origin, True)


def plain_of(weight: DecodedWeight) -> torch.Tensor:
    """A plain tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.as_subclass(torch.Tensor)


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """The weight that a tensor is, as a module showed it; None for all other tensors."""
    is_weight = isinstance(tensor, DecodedWeight) and tensor._streamload_is_weight
    return tensor._streamload_origin if is_weight else None


def _as_weight(tensor: torch.Tensor, origin: Origin, is_weight: bool) -> DecodedWeight:
    # torch 2.11 follows `_base` of what it compiles: that of a weight is None, of a view the weight
    made: DecodedWeight = (
        torch.Tensor._make_subclass(DecodedWeight, tensor)
        if is_weight
        else tensor.as_subclass(DecodedWeight)
    )
    made._streamload_origin, made._streamload_is_weight = origin, is_weight
    return made


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The memory of a tensor, and its layout there."""
    layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return (tensor.untyped_storage()._cdata, *layout)


def _weights(values: Any) -> Iterator[DecodedWeight]:
    """Decoded values among arguments, which may be in lists."""
    if isinstance(values, DecodedWeight):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _weights(each)
    elif isinstance(values, dict):
        yield from _weights(list(values.values()))


def _shared(result: Any, weights: list[DecodedWeight]) -> Any:
    """A result, with views of weights as such."""
    if type(result) in (list, tuple):
        return type(result)(_shared(each, weights) for each in result)
    if type(result) is not torch.Tensor or result.layout is not torch.strided:
        return result
    memory = result.untyped_storage()._cdata
    for weight in weights:
        if weight.untyped_storage()._cdata == memory:
            return _as_weight(result, weight._streamload_origin, False)
    return result
