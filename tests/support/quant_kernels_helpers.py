"""Helpers that `test_quant_kernels` shares with other tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from quant_samples import Sample, samples

from streamload.codecs.llvm import Engine
from streamload.codecs.parts import QuantCounts
from streamload.core.dtypes import DType

Array = np.ndarray[Any, np.dtype[Any]]

BLOCKED = ("q8_0", "q4_0")
#: Formats whose scales are searched for; a unit of the first two is a row.
SEARCHED = ("q5_0", "q5_1", "q4_k", "q5_k", "q6_k")


def columns_of(name: str) -> int:
    """What divides the rows of a format's tensors."""
    return 256 if name.endswith("_k") else 32 if name in (*BLOCKED, *SEARCHED, "q4f16_0") else 1


def shaped(name: str, x: Array) -> Array:
    """Rows as a format takes them: matrices for bitsandbytes-int8, strips for q4f16_0."""
    if name == "q4f16_0":
        return np.ascontiguousarray(x.reshape(-1, x.shape[-1] // 32, 32).swapaxes(0, 1))
    return x.reshape(-1, x.shape[-1]) if name == "bitsandbytes-int8" else x


def fitting(name: str, count: int = 500, *, non_finite: bool = True) -> Iterator[Sample]:
    for sample in samples(count, columns=columns_of(name), non_finite=non_finite):
        yield sample._replace(x=shaped(name, sample.x))


def encoded(
    form: Any, x: Array, src: DType, engine: Engine = "auto", cuts: tuple[int, ...] = ()
) -> tuple[dict[str, bytes], QuantCounts]:
    """All parts of a tensor, by suffix, cut before the units of some numbers; and its counts."""
    tensor = form.of(x.shape, src)
    encoder = tensor.encoder(src, engine)
    data = memoryview(x.tobytes())
    out = memoryview(bytearray(tensor.parts[0].nbytes))
    numel = math.prod(x.shape)
    edges = [0, *(cut * tensor.unit_numel for cut in cuts), numel]
    counts = QuantCounts()
    for first, stop in itertools.pairwise(edges):
        some = data[first * src.itemsize : stop * src.itemsize]
        at = first // tensor.unit_numel * tensor.unit_nbytes
        end = at + tensor.codes_nbytes(stop - first)
        counts += encoder.encode(some, out[at:end], first)
    rest = {suffix: bytes(part) for suffix, part in encoder.finish().items()}
    for part in tensor.parts[1:]:
        assert len(rest[part.suffix]) == part.nbytes, part.suffix
    return {"": bytes(out), **rest}, counts


def assert_same_counts(found: QuantCounts, expected: QuantCounts, name: str) -> None:
    """Counts are equal, sums of squares but for the order in which they are summed."""
    for field in ("largest_error", "largest", "numel", "nan", "inf", "overflowed"):
        assert getattr(found, field) == getattr(expected, field), (name, field)
    for field in ("squared_error", "squared"):
        sums = getattr(found, field), getattr(expected, field)
        assert sums[0] == pytest.approx(sums[1], rel=1e-12, abs=0), (name, field)
