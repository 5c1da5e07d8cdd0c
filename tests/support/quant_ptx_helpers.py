"""Helpers that `test_quant_ptx` shares with other tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from streamload.codecs.parts import SOURCES, QuantCounts
from streamload.codecs.scheme import SCHEMES
from streamload.codecs.schemes.bitsandbytes import FourBit
from streamload.core.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]


NAMES = tuple(name for name in SCHEMES if not name.endswith("-nested"))


KERNELS = [(name, src) for name in NAMES for src in SOURCES]


def there(name: str) -> Any:
    """A format as CUDA computes it."""
    form: Any = SCHEMES[name]
    return replace(form, arithmetic="cuda") if isinstance(form, FourBit) else form


def kernel_id(kernel: tuple[str, DType]) -> str:
    """A kernel's name in the output of pytest."""
    return f"{kernel[0]}-{kernel[1].code}"


def by_oracle(name: str, src: DType, x: Array) -> tuple[bytes, Array, QuantCounts]:
    """What a kernel owes."""
    tensor = there(name).of(x.shape, src)
    encoder = tensor.encoder(src, "numpy")
    out = bytearray(tensor.parts[0].nbytes)
    counts = encoder.encode(memoryview(x.tobytes()), memoryview(out), 0)
    return bytes(out), encoder.statistics, counts
