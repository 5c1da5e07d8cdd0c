"""MLC's groups: kernels equal their oracle, the oracle a description, cuts change nothing."""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from quant_bounds import bound, elements_of
from quant_kernels_helpers import assert_same_counts, encoded, fitting, shaped

from streamload.codecs.parts import SOURCES, QuantCounts
from streamload.codecs.scheme import ALL_SCHEMES, SCHEMES
from streamload.core.dtypes import BF16, F16, F32, DType
from streamload.planning.quant_policy import QuantPolicy

Array = np.ndarray[Any, np.dtype[Any]]
GROUPS = {"q4f16_1": 32, "q4f16_0": 32, "q3f16_1": 40, "q4f32_1": 32, "q4bf16_1": 32}
BITS = dict.fromkeys(GROUPS, 4) | {"q3f16_1": 3}
KINDS = dict.fromkeys(GROUPS, F16.numpy) | {"q4f32_1": F32.numpy, "q4bf16_1": BF16.numpy}
SEVERAL = pytest.mark.parametrize("name", GROUPS)


def described(name: str, x: Array) -> tuple[Array, Array]:
    """Words and scales of rows, one element after the other, as the format is described."""
    bits, group = BITS[name], GROUPS[name]
    most, in_word = 2 ** (bits - 1) - 1, 32 // bits
    rows, columns = x.shape
    groups = -(-columns // group)
    words = np.zeros((rows, groups * group // in_word), np.uint32)
    kind = KINDS[name]
    scales = np.zeros((rows, groups), kind)
    for row, g in itertools.product(range(rows), range(groups)):
        some = x[row, g * group : (g + 1) * group].astype(np.float32)
        scale = scales[row, g] = (np.abs(some).max() / np.float32(most)).astype(kind)
        for i, value in enumerate(some, g * group):
            steps = np.float32(value / np.float32(scale)) if scale else np.float32(0)
            code = min(max(round(float(steps + np.float32(most))), 0), 2 * most)
            words[row, i // in_word] |= np.uint32(code << i % in_word * bits)
    return words, scales


@SEVERAL
def test_words_and_scales_are_as_described(name: str) -> None:
    """Element r of a word is at its bits r b; what is beyond a row is 0; _0 is transposed."""
    for columns in (32, 96, 160) if name == "q4f16_0" else (1, 7, 39, 40, 41, 77, 160):
        x = np.random.default_rng(columns).standard_normal((5, columns)).astype(np.float32)
        words, scales = described(name, x)
        parts, _ = encoded(ALL_SCHEMES[name], shaped(name, x), F32)
        made = ALL_SCHEMES[name].of(shaped(name, x).shape, F32)
        if name == "q4f16_0":
            words, scales = words.T, scales.T
        assert [part.shape for part in made.parts] == [words.shape, scales.shape]
        assert parts == {"": words.tobytes(), "q_scale": scales.tobytes()}, columns


@SEVERAL
def test_errors_are_at_most_half_a_step(name: str) -> None:
    """And what rounding does to the scale: so large is the bound that errors are compared with."""
    most = 2 ** (BITS[name] - 1) - 1
    info = ml_dtypes.finfo(KINDS[name])
    for sample in fitting(name, non_finite=False):
        tensor = ALL_SCHEMES[name].of(sample.x.shape, sample.src)
        parts, counts = encoded(ALL_SCHEMES[name], sample.x, sample.src)
        if not counts.overflowed:
            limit = bound(tensor, parts).max()
            scales = np.frombuffer(parts["q_scale"], KINDS[name]).astype(np.float64)
            rounding = (most + 1) * float(info.eps) / 2
            least = (most + 1) * float(info.smallest_subnormal) / 2
            assert limit <= scales.max() * (0.5 + rounding + 2**-20) + least


@SEVERAL
@pytest.mark.parametrize("src", SOURCES, ids=str)
@pytest.mark.parametrize("columns", [160, 96, 77])
def test_any_cut_gives_the_bytes_of_the_whole(name: str, src: DType, columns: int) -> None:
    columns = columns // 32 * 32 if name == "q4f16_0" else columns
    x = np.random.default_rng(7).standard_normal((64, columns)).astype(np.float32)
    x = shaped(name, x).astype(src.numpy)
    form = ALL_SCHEMES[name]
    tensor = form.of(x.shape, src)
    whole, counts = encoded(form, x, src)
    for cuts in ((1,), (tensor.units - 1,), tuple(range(1, tensor.units))):
        parts, some = encoded(form, x, src, cuts=cuts)
        assert parts == whole, cuts
        assert_same_counts(some, counts, str(cuts))
    data = memoryview(b"\0" + x.tobytes())[1:]
    out = memoryview(bytearray(1 + tensor.parts[0].nbytes))[1:]
    encoder, n, code = tensor.encoder(src), tensor.unit_numel, tensor.unit_nbytes

    def encode(unit: int) -> QuantCounts:
        some = data[unit * n * src.itemsize : (unit + 1) * n * src.itemsize]
        return encoder.encode(some, out[unit * code : (unit + 1) * code], unit * n)

    with ThreadPoolExecutor(8) as pool:
        found = sum(pool.map(encode, reversed(range(tensor.units))), QuantCounts())
    assert {"": bytes(out), "q_scale": bytes(encoder.finish()["q_scale"])} == whole
    assert_same_counts(found, counts, name)


@SEVERAL
def test_nan_infinity_zeros_and_overflow(name: str) -> None:
    """They are counted; a group beyond float16 is infinite, and the next one is not touched."""
    group = GROUPS[name]
    x = np.random.default_rng(10).standard_normal((1, 4 * group)).astype(np.float32)
    holed, filled = x.copy(), x.copy()
    holed[0, 5], filled[0, 5] = np.nan, 0
    holed[0, group + 7] = -np.inf
    filled[0, group + 7] = -np.delete(np.abs(x[0, group : 2 * group]), 7).max()
    holed[0, 2 * group : 3 * group] = filled[0, 2 * group : 3 * group] = 0
    form = ALL_SCHEMES[name]
    parts, counts = encoded(form, shaped(name, holed), F32)
    expected, plain = encoded(form, shaped(name, filled), F32)
    assert parts == expected
    assert (counts.nan, counts.inf) == (1, 1)
    assert counts.squared_error == pytest.approx(plain.squared_error)
    decoded = elements_of(form.of(shaped(name, x).shape, F32), parts).reshape(4, group)
    assert not decoded[2].any() and np.isfinite(decoded).all()
    filled[0, 3 * group + 1] = 1e9
    parts, counts = encoded(form, shaped(name, filled), F32)
    if KINDS[name] is not F16.numpy:  # their exponents reach as far as those of the elements
        assert counts.overflowed == 0 and counts.largest_error < 1e9 / 7
        return
    assert (counts.overflowed, counts.largest_error) == (group, math.inf)
    if name != "q4f16_0":  # a short group counts no more than it has
        _, counts = encoded(form, filled[:, : 3 * group + 2].copy(), F32)
        assert (counts.overflowed, counts.numel) == (2, 3 * group + 2)


def by_numpy(x: Array, bits: int, group: int, kind: Any) -> tuple[Array, Array]:
    most = np.float32(2 ** (bits - 1) - 1)
    groups = x.astype(np.float32).reshape(-1, group)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / most).astype(kind)
    codes = np.clip(np.rint(groups / scales.astype(np.float32) + most), 0, 2 * most)
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    by_word = codes.astype(np.uint32).reshape(-1, 32 // bits) << shifts
    return np.bitwise_or.reduce(by_word, axis=1), scales


@pytest.mark.slow
@SEVERAL
@pytest.mark.parametrize("src", SOURCES, ids=str)
def test_it_is_five_times_as_fast_as_numpy(name: str, src: DType) -> None:
    x = np.random.default_rng(1).standard_normal((400, 2560)).astype(np.float32).astype(src.numpy)
    data, form = memoryview(shaped(name, x).tobytes()), ALL_SCHEMES[name]
    tensor = form.of(shaped(name, x).shape, src)
    encoder, out = tensor.encoder(src), memoryview(bytearray(tensor.parts[0].nbytes))
    seconds: dict[str, list[float]] = {"mine": [], "numpy": []}
    for _ in range(5):
        begun = time.thread_time()
        encoder.encode(data, out, 0)
        seconds["mine"].append(time.thread_time() - begun)
        begun = time.thread_time()
        words, scales = by_numpy(x, BITS[name], GROUPS[name], KINDS[name])
        seconds["numpy"].append(time.thread_time() - begun)
    if name != "q4f16_0":
        assert bytes(out) == words.tobytes()
        assert bytes(encoder.finish()["q_scale"]) == scales.tobytes()
    assert min(seconds["mine"]) * 5 <= min(seconds["numpy"]), seconds


def test_only_files_have_them() -> None:
    """Loads know no such format."""
    assert not set(GROUPS) & set(SCHEMES) and set(GROUPS) < set(ALL_SCHEMES)
    with pytest.raises(ValueError, match="quant is one of"):
        QuantPolicy.parse("q4f16_1")
    with pytest.raises(KeyError):
        SCHEMES["q4f16_1"]
    tensor = ALL_SCHEMES["q3f16_1"].of((64, 64), F16)
    assert [part.name("a.q_weight") for part in tensor.parts] == ["a.q_weight", "a.q_scale"]
