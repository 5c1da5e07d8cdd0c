"""Helpers that `test_dequant_ptx` shares with other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dequant_samples
import ml_dtypes
import numpy as np
from dequant_helpers import decoders
from dequant_samples import Sample, entry, write

from streamload.codecs.decode import Weight
from streamload.codecs.decode_cuda import weight_parts
from streamload.codecs.weights import Packed, read_whole
from streamload.core.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

Counts = tuple[int, ...]

BASE = 0x7F_0000_0000

FILL = 0xA5


class Task:
    """Some elements of a weight, and the memory of a device on which they are to be made."""

    def __init__(
        self,
        weight: Weight,  # what decodes the values
        data: bytes,  # all values
        dst: DType,  # what they become
        first: int,  # the first element
        stop: int,  # the one after the last
        turned: tuple[int, int] | None = None,  # see `weight_parts`
        base: int = BASE,  # address of the memory
        tally: Counts = (0, 0, 0),  # what it is before
    ) -> None:
        bits = weight.values.bits
        there = b"".join(part.tobytes() for part in weight_parts(weight, turned))
        values = data[first * bits // 8 : -(-stop * bits // 8)]
        numel = len(data) * 8 // bits if turned else stop - first
        source = 256 + -(-len(there) // 256) * 256 + 3
        out = -(-(source + len(values) + 1) // 256) * 256 + dst.itemsize
        # bytes of the device, with values, scales, and room for elements
        self.memory = np.full(out + numel * dst.itemsize + 256, FILL, np.uint8)
        self.memory[:24] = np.array(tally, np.uint64).view(np.uint8)
        for at, some in ((256, there), (source, values)):
            self.memory[at : at + len(some)] = np.frombuffer(some, np.uint8)
        # of the kernel, for memory that begins at ``base``
        self.arguments = (base + source, base + out, stop - first, base, base + 256, first)
        self.written = slice(out, out + numel * dst.itemsize)  # the bytes that a kernel may write
        self._dst, self._numel = dst, stop - first

    def found(self, memory: Array) -> tuple[Array, Counts]:
        """Elements and counts in the memory after a kernel; nothing else may be written."""
        expected = self.memory.copy()
        for some in (slice(0, 24), self.written):
            expected[some] = memory[some]
        assert np.array_equal(memory, expected), "written beside the elements"
        elements = memory[self.written].copy().view(self._dst.numpy)
        return elements, tuple(memory[:24].copy().view(np.uint64).tolist())


def expected_of(decoder: Any, data: bytes, dst: DType, first: int, stop: int) -> Any:
    """What a kernel owes, by the oracle."""
    bits = decoder.weight.values.bits
    out = np.zeros(stop - first, dst.numpy)
    given = memoryview(data)[first * bits // 8 : -(-stop * bits // 8)]
    counts = decoder.decode(given, memoryview(out.view(np.uint8).data), first)
    told = counts.overflowed, counts.flushed
    return out, (*told, sum(told) + counts.rounded)


def same(found: tuple[Array, Counts], expected: tuple[Array, Counts]) -> None:
    nan = np.isnan(found[0].astype(np.float32)) & np.isnan(expected[0].astype(np.float32))
    unsigned = f"u{found[0].itemsize}"
    assert np.array_equal(found[0].view(unsigned)[~nan], expected[0].view(unsigned)[~nan])
    assert found[1] == expected[1]


def opened(folder: Path, sample: Sample, dst: DType, out_of_range: Any = "inf") -> Any:
    """A weight of a checkpoint: its tensor, its oracle, and its values."""
    info, by = decoders(write(folder, [sample]), sample.name, dst, out_of_range)
    assert isinstance(info, Packed)
    (data,) = read_whole(info.headers, [info])
    return info, by["numpy"], data


def extremes(kind: str) -> Sample:
    """A weight with scales at the ends of their range, and all codes."""
    rng = np.random.default_rng(7)
    some = [1e-42, 1e-38, 1e-20, 1e-5, 1.0, 1e5, 1e36, 0.0, -1.0, 2.0**-14, 3 * 2.0**-130]
    scales = (rng.choice(some, 32) * rng.choice([1, rng.random()], 32)).astype(np.float32)
    if kind == "nf4":
        sample = dequant_samples.four_bit("w.weight", (32, 64))
        sample.tensors["w.weight.absmax"] = entry(scales)
        return sample
    codes = np.tile(np.arange(256, dtype=np.uint8), (32, 1))
    values = codes.view(np.int8 if kind == "int8" else getattr(ml_dtypes, kind))
    tensors = {"w.weight": entry(values), "w.weight_scale": entry(scales[:, None])}
    return Sample("w.weight", tensors, codes)
