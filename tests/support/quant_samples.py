"""Tensors to quantise: odd shapes, planted extremes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from streamload.core.dtypes import BF16, F16, F32, DType

Array = np.ndarray[Any, np.dtype[Any]]
COUNT = 500


class Sample(NamedTuple):
    """A tensor: ``x`` in its dtype, and whether all of it is finite."""

    name: str
    src: DType
    x: Array
    finite: bool


def _extremes(src: DType) -> list[float]:
    info = np.finfo(np.float32) if src == F32 else None
    largest = {"F32": 3.4e38, "BF16": 3.38e38, "F16": 65504.0}[src.code]
    least = {"F32": 1.4e-45, "BF16": 9.2e-41, "F16": 6e-8}[src.code]
    normal = float(info.tiny) if info else (1.18e-38 if src == BF16 else 6.1e-5)
    return [largest, largest / 3, least, normal, normal / 2, 1e-3, 65504.0, 60000.0, 0.0, -0.0]


def _values(random: np.random.Generator, kind: int, numel: int, src: DType) -> Array:
    extremes = np.array(_extremes(src))
    x = random.standard_normal(numel) * 10.0 ** random.integers(-3, 2)
    if kind == 1:  # some planted, of both signs
        planted = random.choice(extremes, numel) * random.choice([-1, 1], numel)
        x = np.where(random.random(numel) < 0.02, planted, x)
    elif kind == 2:  # every magnitude there is
        x = np.exp2(random.uniform(-150, 127, numel)) * random.choice([-1, 1], numel)
    elif kind == 3:  # stretches of zeros, of one value, and of subnormals
        stretches = np.repeat(random.integers(0, 4, numel // 32 + 1), 32)[:numel]
        same = np.repeat(random.standard_normal(numel // 32 + 1), 32)[:numel]
        tiny = random.choice(extremes[[2, 4, 9]], numel)
        x = np.choose(stretches, [np.zeros(numel), same, tiny, x])
    elif kind == 4:  # few values: ties, and equal magnitudes of both signs
        x = random.integers(-8, 9, numel) * 0.25
    return x


def samples(count: int = COUNT, *, columns: int = 1, non_finite: bool = True) -> Iterator[Sample]:
    """Some tensors, always the same; ``columns`` divides the last axis."""
    random = np.random.default_rng(16)
    for index in range(count):
        src = (F32, BF16, F16)[index % 3]
        kind = int(random.integers(0, 5))
        lead = (int(random.integers(1, 9)), *random.integers(1, 4, int(random.integers(0, 2))))
        last = (
            int(random.integers(1, 12)) * columns if columns > 1 else int(random.integers(1, 300))
        )
        shape = (*map(int, lead), last)
        x = _values(random, kind, int(np.prod(shape)), src)
        finite = True
        if non_finite and index % 5 == 0:
            holes = random.random(x.size) < random.choice([0.01, 0.5, 1.0])
            x = np.where(holes, random.choice([np.nan, np.inf, -np.inf], x.size), x)
            finite = not holes.any()
        with np.errstate(over="ignore"):
            cast = x.astype(np.float32).astype(src.numpy).reshape(shape)
        if finite:  # rounding may have left what the dtype reaches
            wide = cast.astype(np.float32)
            cast = np.where(np.isfinite(wide), wide, np.sign(wide)).astype(src.numpy)
        yield Sample(f"{index}-{src.code}-kind {kind}-{shape}", src, cast, finite)
