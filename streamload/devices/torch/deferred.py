"""Quantized matrices that are decoded when a function other than a product reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn import functional
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from streamload.devices.torch.decoded import DecodedWeight, interpreted
from streamload.devices.torch.product import Operand, linear

_SAID = ("shape", "dtype", "device", "ndim", "is_cuda", "is_meta", "requires_grad")
_KNOWN = frozenset(  # functions whose results the wrapper has
    (
        *(getattr(torch.Tensor, name).__get__ for name in _SAID),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.element_size),
    )
)
_MATMUL = (torch.matmul, torch.Tensor.matmul)


class Deferred(torch.Tensor):
    """A matrix that products read quantized; other functions replace it by its decoded values.

    ``linear(x, it)`` is a product if the matrix has the stored rows, ``x @ it`` if it has their
    transpose.
    """

    _streamload_operand: Callable[[], Operand]
    _streamload_decode: Callable[[], torch.Tensor]
    _streamload_transposed: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Multiply by the stored rows, or call a function with the decoded values."""
        return _called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decode for functions that were called while `__torch_function__` is disabled."""
        args, kwargs = tree_map_only(
            Deferred, lambda each: each._streamload_decode(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``set_``, which torch does not intercept, of the decoded values."""
        swap_tensors(self, self._streamload_decode())
        return self.set_(*args, **kwargs)  # of another class now


def deferred(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    operand: Callable[[], Operand],
    decode: Callable[[], torch.Tensor],
    *,
    transposed: bool,
) -> torch.Tensor:
    """Return a matrix of this shape, dtype and device that is decoded when that is needed.

    ``operand`` returns the stored rows, whose transpose the matrix may be.
    """
    made: Any = torch.Tensor._make_wrapper_subclass(Deferred, shape, dtype=dtype, device=device)
    made._streamload_operand, made._streamload_decode = operand, decode
    made._streamload_transposed = transposed
    found: torch.Tensor = made
    return found


@interpreted
def _called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that has a `Deferred` among its arguments."""
    if func in _KNOWN:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func is functional.linear and len(args) > 1:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if _is_product(args[0], args[1], transposed=False):
            return linear(args[0], args[1]._streamload_operand(), bias)
    elif func in _MATMUL and len(args) > 1 and _is_product(args[0], args[1], transposed=True):
        return linear(args[0], args[1]._streamload_operand(), None)
    for each in tree_leaves((args, kwargs)):
        if type(each) is Deferred:  # in place, for all that hold it; its class changes, too
            with suppress(RuntimeError):  # there are weak references to it
                swap_tensors(each, each._streamload_decode())
    args, kwargs = tree_map_only(Deferred, lambda each: each._streamload_decode(), (args, kwargs))
    own = None
    if args and isinstance(args[0], DecodedWeight):  # which overrides some methods
        own = vars(DecodedWeight).get(getattr(func, "__name__", ""))
    return (own or func)(*args, **kwargs)


def _is_product(x: Any, weight: Any, *, transposed: bool) -> bool:
    """Whether a function of ``x`` and a matrix is a product with the stored rows."""
    if type(weight) is not Deferred or not isinstance(x, torch.Tensor) or type(x) is Deferred:
        return False
    if weight._streamload_transposed is not transposed or x.device != weight.device:
        return False
    return bool(x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
