"""The CUDA driver's library, by ctypes. Source: the CUDA driver API reference."""

from __future__ import annotations

import ctypes
from typing import Any

_int, _uint, _size, _u64 = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_uint64
_pointer, _out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuCtxGetDevice": (ctypes.POINTER(_int),),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_out,),
    "cuDeviceGet": (ctypes.POINTER(_int), _int),
    "cuDeviceGetAttribute": (ctypes.POINTER(_int), _int, _int),
    "cuDeviceGetName": (ctypes.c_char_p, _int, _int),
    "cuDevicePrimaryCtxRetain": (_out, _int),
    "cuEventCreate": (_out, _uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventQuery": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuGetErrorString": (_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuInit": (_uint,),
    # grid, block, bytes of shared memory; stream, parameters, options
    "cuLaunchKernel": (_pointer, *(_uint,) * 7, _pointer, _out, _pointer),
    "cuMemAlloc_v2": (ctypes.POINTER(_u64), _size),
    "cuMemFree_v2": (_u64,),
    "cuMemGetInfo_v2": (ctypes.POINTER(_u64), ctypes.POINTER(_u64)),
    "cuMemHostRegister_v2": (_pointer, _size, _uint),
    "cuMemHostUnregister": (_pointer,),
    "cuMemcpyDtoHAsync_v2": (_pointer, _u64, _size, _pointer),
    "cuMemcpyHtoDAsync_v2": (_u64, _pointer, _size, _pointer),
    "cuMemsetD8Async": (_u64, ctypes.c_ubyte, _size, _pointer),
    "cuModuleGetFunction": (_out, _pointer, ctypes.c_char_p),
    "cuModuleLoadDataEx": (_out, ctypes.c_char_p, _uint, ctypes.POINTER(_int), _out),
    "cuModuleUnload": (_pointer,),
    "cuStreamCreate": (_out, _uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamGetCtx": (_pointer, _out),
    "cuStreamQuery": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuStreamWaitEvent": (_pointer, _pointer, _uint),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(_int),),
}


class Driver:
    """The CUDA driver's library, loaded twice.

    Attributes:
        quick: for calls that return at once: they keep the interpreter's lock.
        slow: for calls that may wait: they release it.

    Raises OSError: there is no driver.
    """

    def __init__(self) -> None:
        self.quick: Any = ctypes.PyDLL("libcuda.so.1")
        self.slow: Any = ctypes.CDLL("libcuda.so.1")
        for library in (self.quick, self.slow):
            for name, types in _PROTOTYPES.items():
                getattr(library, name).argtypes = types

    def reason(self, status: int) -> str:
        """Return the driver's text for a status."""
        text = ctypes.c_char_p()
        self.quick.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode()
