"""Helpers that `test_quant_ptx` shares with other tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from quant_kernels_helpers import SEARCHED

from streamload.codecs.encode_kernels import Tally
from streamload.codecs.parts import SOURCES, QuantCounts
from streamload.codecs.scheme import SCHEMES
from streamload.codecs.schemes.bitsandbytes import FourBit
from streamload.core.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

FILL = 0xA5

#: Formats that CUDA kernels quantize to.
NAMES = tuple(name for name in SCHEMES if name not in SEARCHED and not name.endswith("-nested"))

KERNELS = [(name, src) for name in NAMES for src in SOURCES]


def there(name: str) -> Any:
    form: Any = SCHEMES[name]
    return FourBit(form.type, arithmetic="cuda") if isinstance(form, FourBit) else form


def kernel_id(kernel: tuple[str, DType]) -> str:
    return f"{kernel[0]}-{kernel[1].code}"


def by_oracle(name: str, src: DType, x: Array) -> tuple[bytes, Array, QuantCounts]:
    """What a kernel owes."""
    tensor = there(name).of(x.shape, src)
    encoder = tensor.encoder(src, "numpy")
    out = bytearray(tensor.parts[0].nbytes)
    counts = encoder.encode(memoryview(x.tobytes()), memoryview(out), 0)
    return bytes(out), encoder.statistics, counts


class Task:
    """A tensor to quantize on a device, and the memory for it from address ``base`` on."""

    def __init__(self, tensor: Any, x: Array, base: int, tally: bytes) -> None:
        data = np.frombuffer(x.tobytes(), np.uint8)
        source = 256
        out = -(-(source + data.size + 1) // 256) * 256
        statistics = -(-(out + tensor.parts[0].nbytes + 1) // 256) * 256
        # with the elements, and room for codes and statistics
        self.memory = np.full(statistics + tensor.statistics_nbytes + 256, FILL, np.uint8)
        self.memory[source : source + data.size] = data
        self.memory[: len(tally)] = np.frombuffer(tally, np.uint8)
        self.written = (
            slice(0, len(tally)),
            slice(out, out + tensor.parts[0].nbytes),
            slice(statistics, statistics + tensor.statistics_nbytes),
        )
        addresses = base + source, base + out, x.size, base, base + statistics
        self.arguments = (*addresses, tensor.unit_numel)
        self._numel = x.size

    def found(self, memory: Array) -> tuple[bytes, Array, QuantCounts]:
        expected = self.memory.copy()
        for some in self.written:
            expected[some] = memory[some]
        assert np.array_equal(memory, expected), "written beside the codes"
        tally, codes, statistics = (memory[some].tobytes() for some in self.written)
        counts = Tally.from_buffer_copy(tally).counts(self._numel)
        return codes, np.frombuffer(statistics, np.float32), counts
