"""The host as a device: numpy arrays, with dtypes of ml_dtypes that numpy lacks."""

from __future__ import annotations

import math
import mmap
import sys
import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any, NoReturn

import numpy as np

from streamload.core.dtypes import BY_NAME, DType
from streamload.devices.allocators import ObjectCosts, TensorCosts
from streamload.devices.base import DeviceInfo, DTypeStatus, Framework, HeapDevice, ProbeResult
from streamload.devices.parameters import SlotParameter, dict_slots, make_parameters
from streamload.errors import AllocationError, DeviceError, DeviceNotFoundError

_COSTS = TensorCosts(ObjectCosts(300), ObjectCosts(700), left_nbytes=1280, refit_nbytes=0)
_UNSUPPORTED = frozenset(name for name, dtype in BY_NAME.items() if dtype.bits < 8)
# From this size on numpy asks Linux for huge pages, which may be slow in virtual machines: loading
# 0.9 GB took 2 to 4 times as long as into torch's pages.
_HUGE_NBYTES = 2**22


class _Memory(mmap.mmap):
    """The memory of one large array, an anonymous map that is unmapped with the array."""


class HostDevice(HeapDevice):
    """The device "host": memory of this process, in numpy arrays."""

    name = "host"

    @property
    def info(self) -> DeviceInfo:
        # numpy allocates large arrays in whole pages, small ones in multiples of 16
        return DeviceInfo(
            "host",
            "host",
            "numpy",
            unsupported=_UNSUPPORTED,
            granularity_nbytes=16,
            costs=_COSTS,
            maps=True,
        )

    def allocate(self, dtype: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        nbytes = dtype.nbytes(math.prod(shape))
        try:
            if nbytes < _HUGE_NBYTES or sys.platform != "linux":
                return np.empty(shape, dtype.numpy)
            return np.ndarray(shape, dtype.numpy, _Memory(-1, nbytes, flags=mmap.MAP_PRIVATE))
        except (MemoryError, ValueError, OverflowError, OSError) as error:
            raise AllocationError("host", str(error), nbytes=nbytes) from error

    def view(
        self, memory: mmap.mmap, start: int, dtype: DType, shape: tuple[int, ...]
    ) -> np.ndarray[Any, Any]:
        return np.ndarray(shape, dtype.numpy, memory, start)

    def address(self, buffer: np.ndarray[Any, Any]) -> int:
        address: int = buffer.__array_interface__["data"][0]
        return address


class InvalidArray(np.lib.mixins.NDArrayOperatorsMixin):
    """The entry of a state dict whose array a failed load left without values.

    Operators, numpy's functions, attributes and items raise DeviceError.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], kept: Any = None) -> None:
        """Stand for an array; ``kept``: the array, if a later load is to write it again."""
        self.name, self.dtype_name, self.shape, self._kept = name, dtype, shape, kept

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise DeviceError(
            "host", f"parameter {self.name!r} holds no values, since a load failed; load it again"
        )

    __array__ = __array_ufunc__ = __array_function__ = _refuse
    __getitem__ = __setitem__ = __iter__ = __len__ = _refuse
    __bool__ = __int__ = __float__ = __complex__ = __matmul__ = _refuse

    def __getattr__(self, attribute: str) -> NoReturn:
        """Refuse attributes of arrays."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._refuse()


def _references(view: np.ndarray[Any, Any]) -> int:
    """Return the number of references to the array under a view, including this call's."""
    return sys.getrefcount(view.base)


_ALONE = _references(np.empty(2).reshape(1, 2))


def _is_own(view: np.ndarray[Any, Any]) -> bool:
    """Whether a view spans a whole array that only the view refers to, as after ``reshape``."""
    base = view.base
    whole = (
        isinstance(base, np.ndarray)
        and base.nbytes == view.nbytes
        and (base.flags.owndata or isinstance(base.base, _Memory))
    )
    del base  # it would be counted
    return whole and _references(view) <= _ALONE


def _span(array: np.ndarray[Any, Any]) -> tuple[int, int, int] | None:
    """Return an array's memory as (0, first address, stop); None if it has no elements."""
    if array.size == 0:
        return None
    first = stop = array.ctypes.data
    for count, stride in zip(array.shape, array.strides, strict=True):
        reach = (count - 1) * stride
        first, stop = first + min(reach, 0), stop + max(reach, 0)
    return 0, first, stop + array.itemsize


def _of_map(array: np.memmap[Any, Any]) -> tuple[str, str]:
    """Return (why an np.memmap is only written in place, why it cannot be written), or ""."""
    if not array.flags.writeable:
        return "", (
            "it is an np.memmap that is open for reading: open it with "
            'mode="r+", which writes its file, or mode="c", which does not'
        )
    shared = array.mode in ("r+", "w+")
    return "it is an np.memmap, whose file is written" if shared else "", ""


class HostParameter(SlotParameter):
    """A parameter over entries of a state dict that are the same array."""

    def _look(self) -> None:
        entry = self._objects()[0]
        self.shape = tuple(entry.shape)
        self.invalid = isinstance(entry, InvalidArray)
        self.dtype = entry.dtype_name if self.invalid else entry.dtype.name
        self.keeps = BY_NAME.get(self.dtype)
        value = self._value()
        if value is None:
            return
        self.span = _span(value)
        self.device, self.nbytes = "host", value.nbytes
        # numpy calls an array of the other byte order by the same name
        whole = value.flags.c_contiguous and value.flags.writeable and value.dtype.isnative
        if isinstance(value.base, np.ndarray) and not _is_own(value):
            # a contiguous view can be written in place; replacing it would detach it from its array
            self.fixed = "it is a view of another array"
            if not whole:
                self.refused = "it is a view of another array, and not writable in one piece"
        elif not whole:  # never equal: it is replaced
            writable = value.flags.writeable and value.dtype.isnative
            self.dtype += " (not contiguous)" if writable else " (not writable in place)"
        if isinstance(value, np.memmap):
            fixed, refused = _of_map(value)
            self.fixed, self.refused = self.fixed or fixed, refused or self.refused

    def _value(self) -> Any:
        """Return the array in use, else the array that `invalidate` kept; None if none was."""
        entry = self._objects()[0]
        return entry._kept if isinstance(entry, InvalidArray) else entry

    def buffer(self) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = self._value()
        return array

    def release(self) -> str:
        """Take the array out of the state dict; return "" if that freed it, else the reason."""
        value = self._value()
        if value is None:
            return ""
        if isinstance(value.base, np.ndarray) and not _is_own(value):
            return "something else refers to the array that it is a view of"
        kept = value is not self._objects()[0]
        gone = weakref.ref(value)
        self.invalidate(keep=False)
        del value
        if gone() is not None:
            self._collect()
        held = gone()
        if held is None:
            return ""
        self._swap(lambda _: held)
        if kept:
            self.invalidate(keep=True)
        return "something else still refers to the array"

    def attach(self, buffer: np.ndarray[Any, Any], dtype: DType) -> None:
        self._swap(lambda _: buffer)

    def invalidate(self, keep: bool) -> None:
        """Put one `InvalidArray`, which keeps the array if ``keep``, into all (tied) slots."""
        kept = self._value() if keep else None
        dtype = self.dtype.partition(" ")[0]
        entry = InvalidArray(self.names[0], dtype, self.shape, kept)
        self._swap(lambda _: entry)

    def revive(self) -> None:
        value = self._value()
        self._swap(lambda _: value)


class HostFramework(Framework):
    """The framework numpy, with one device, "host"."""

    name = "host"

    def parameters(self, model: Any) -> Sequence[HostParameter]:
        """Return the arrays of a (nested) dict; entries with the same array are one parameter."""
        if not isinstance(model, MutableMapping):
            raise ValueError(f"arrays are loaded into a dict, not a {type(model).__name__}")
        slots = dict_slots(model, (np.ndarray, InvalidArray))
        return make_parameters(slots, lambda slot: id(slot[0][slot[1]]), HostParameter)

    def canonical(self, name: str) -> str:
        if name.lower() != "host":
            raise DeviceNotFoundError(name, "arrays of numpy live on the host", working=("host",))
        return "host"

    def device(self, name: str) -> HostDevice:
        self.canonical(name)
        return HostDevice()

    def candidates(self) -> Sequence[str]:
        return ("host",)

    def trusted(self, name: str) -> bool:
        return True

    def probe(self, name: str, full: bool = True) -> ProbeResult:
        dtypes = {dtype.name: self.dtype_status("host", dtype) for dtype in BY_NAME.values()}
        return ProbeResult("host", True, dtypes=dtypes)

    def dtype_status(self, name: str, dtype: DType) -> DTypeStatus:
        """Return "absent" below 8 bits, "native" for numpy's dtypes but float16, else "emulated".

        "emulated" are float16 and the dtypes of ml_dtypes, which compute by conversion.
        """
        if dtype.name in _UNSUPPORTED:
            return "absent"
        own = type(dtype.numpy.type(0)).__module__ == "numpy" and dtype.name != "float16"
        return "native" if own else "emulated"


FRAMEWORK = HostFramework()
