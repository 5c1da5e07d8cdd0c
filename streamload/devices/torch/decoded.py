"""Decoded copies of quantized weights in torch's modules, in which no write is lost.

torch's functions on such a copy are intercepted (`__torch_function__`). A write to the copy, or to
a view of it, raises; a write by the modules in `_TAKEN` quantizes the weight again instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Modules whose writes to a decoded weight are quantized again: peft's merging and unmerging of
#: adapters, and RWKV's scaling by powers of two.
_TAKEN = ("peft.", "transformers.models.rwkv.")
_PASSED = ("torch.", "streamload.")  # modules on the stack between a writer and this one


# Functions that torch.compile takes into its graphs: shapes, dtypes and products.
_TRACED = frozenset(("__get__", "size", "dim", "numel", "element_size", "linear", "matmul"))


def interpreted(function: _Function) -> _Function:
    """Decorator: torch.compile leaves the function, and all that it calls, to the interpreter.

    `torch.compiler.disable` does so, too, and imports the compiler for it: 2.5 s.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


@dataclass(eq=False)
class Origin:
    """The quantized weight that a decoded copy was made from.

    Attributes:
        values: the whole copy, as a plain tensor.
        transposed: whether the module holds the transpose of ``values``.
        partial: whether ``values`` is one expert's matrix of the weight.
    """

    values: torch.Tensor
    holder: Any  # a `quantized.Coded`, which imports this file
    leaf: str
    transposed: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        self._stamp = self.holder.stamp(self.leaf)

    def write(self, what: str, values: torch.Tensor | None = None) -> None:
        """Overwrite the weight with the copy, or ``values``, quantized; ``what`` is for errors.

        Raises RuntimeError: the caller is not in `_TAKEN`, libraries that may write, or the weight
        was written since it was decoded.
        """
        name = self.holder.address(self.leaf)
        if self.partial or not caller().startswith(_TAKEN):
            raise RuntimeError(
                f"cannot write to {name} ({what}): {type(self.holder).__name__} holds codes, and "
                f"the tensor is a decoded copy of them; {self.holder.advice(self.leaf)}, or "
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
    """Return the innermost calling module's name outside of ``passed`` packages; "" for none."""
    frame = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__") or ""
        if not f"{name}.".startswith(passed):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class DecodedWeight(torch.Tensor):
    """A decoded copy of a quantized weight, or a view of one; results of functions are plain."""

    _streamload_origin: Origin
    _streamload_is_weight = False
    _is_hf_initialized = True  # transformers leaves it as it is

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as on plain tensors; requantize or refuse if the function wrote to a weight."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() and getattr(func, "__name__", "") in _TRACED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _watched(func, args, kwargs)

    @property
    @interpreted
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        _set_data(self, new)

    @property
    def _is_param(self) -> bool:
        """False; torch sets it to make a parameter of the copy, which ends the interception."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter
        self.__dict__.clear()

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``set_`` as `__torch_function__` calls others, since torch does not intercept it."""
        return _watched(torch.Tensor.set_, (self, *args), kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that cannot be written."""
        array = plain_of(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise BufferError: writes by other libraries would be lost."""
        name = self._streamload_origin.holder.address(self._streamload_origin.leaf)
        raise BufferError(f"cannot export {name}, a decoded copy of codes: clone() it first")

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Iterate over views along the first axis."""
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """Copy to a plain tensor."""
        return plain_of(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return plain_of(self).__reduce_ex__(protocol)


@interpreted
def _watched(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function on plain tensors, then `Origin.write` for each weight it wrote to."""
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
    """Assign ``.data``: a whole weight is quantized again; a view gets the memory of ``new``."""
    plain = plain_of(new) if isinstance(new, DecodedWeight) else new
    if weight._streamload_is_weight:
        origin = weight._streamload_origin
        if _key(plain) == _key(origin.values):
            return  # it was requantized when it was written
        origin.write(".data =", plain)
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(weight, plain)
    if not weight._streamload_is_weight:
        weight.__class__ = type(new)
        weight.__dict__.clear()
        weight.__dict__.update(new.__dict__)


def decoded(values: torch.Tensor, origin: Origin) -> torch.Tensor:
    """Return ``values``, decoded from the weight ``origin``, as a `DecodedWeight`.

    A subclass of Tensor, such as FakeTensor under torch.compile, is returned unchanged.
    """
    return values if type(values) is not torch.Tensor else _as_weight(values, origin, True)


def plain_of(weight: DecodedWeight) -> torch.Tensor:
    """Return a plain tensor over the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return weight.as_subclass(torch.Tensor)


def origin_of(tensor: torch.Tensor) -> Origin | None:
    """Return the quantized weight that a tensor is a whole copy of; None for other tensors."""
    is_weight = isinstance(tensor, DecodedWeight) and tensor._streamload_is_weight
    return tensor._streamload_origin if is_weight else None


def _as_weight(tensor: torch.Tensor, origin: Origin, is_weight: bool) -> DecodedWeight:
    """Wrap a tensor as a decoded copy of a weight if ``is_weight``, else as a view of one."""
    # torch 2.11 follows `_base` in compiled code: a weight must have None, a view the weight
    made: DecodedWeight = (
        torch.Tensor._make_subclass(DecodedWeight, tensor)
        if is_weight
        else tensor.as_subclass(DecodedWeight)
    )
    made._streamload_origin, made._streamload_is_weight = origin, is_weight
    return made


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same memory and layout."""
    layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return (tensor.untyped_storage()._cdata, *layout)


def _weights(values: Any) -> Iterator[DecodedWeight]:
    """Yield the decoded weights among arguments, also inside of lists and dicts."""
    if isinstance(values, DecodedWeight):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _weights(each)
    elif isinstance(values, dict):
        yield from _weights(list(values.values()))


def _shared(result: Any, weights: list[DecodedWeight]) -> Any:
    """Return a function's result; tensors in it that share a weight's memory become its views."""
    if type(result) in (list, tuple):
        return type(result)(_shared(each, weights) for each in result)
    if type(result) is not torch.Tensor or result.layout is not torch.strided:
        return result
    memory = result.untyped_storage()._cdata
    for weight in weights:
        if weight.untyped_storage()._cdata == memory:
            return _as_weight(result, weight._streamload_origin, False)
    return result
