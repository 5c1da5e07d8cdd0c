"""Blocks of GGUF become gguf-py's numbers bit for bit: by the kernel, by numpy, in any part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from needs import module

from streamload.codecs.cast_reference import cast_bytes
from streamload.codecs.cast_table import ZERO, CastCounts
from streamload.codecs.decode import decoder_of, scales_nbytes, there_nbytes
from streamload.codecs.llvm import Engine
from streamload.codecs.parts import Array
from streamload.codecs.scheme import Decoder
from streamload.codecs.weights import Packed, QuantizedWeight
from streamload.core.dtypes import BF16, F16, F32, PACKED, DType
from streamload.core.tensors import TensorInfo

gguf = module("gguf")

KINDS = tuple(kind for kind, dtype in PACKED.items() if dtype.block > 1 and kind[:3] != "mlx")


def _decoder(kind: str, dst: DType, engine: Engine, out_of_range: str = "inf") -> Decoder:
    path = Path("a.gguf")
    values = TensorInfo("w", PACKED["int8"], (1,), path, 0, 1)
    group = QuantizedWeight(kind, "w", {"weight": values}, (1, 256), (1, 256), 8)
    info = Packed("w", PACKED[kind], (1, 256), path, 0, 1, group=group, headers=())
    assert not scales_nbytes(group)
    assert not there_nbytes(group)
    return decoder_of(info, dst, lambda _: b"", engine=engine, out_of_range=out_of_range)  # type: ignore[arg-type]


def _theirs(kind: str, blocks: Array) -> Array:
    """What gguf-py makes of blocks, flat."""
    name = kind.removeprefix("gguf-").upper()
    with np.errstate(all="ignore"):
        found: Array = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return found.reshape(-1)


def _random(kind: str, count: int, seed: int = 0) -> Array:
    """Blocks of random bytes: their scales are of all magnitudes, NaN and infinity among them."""
    shape = count, PACKED[kind].nbytes(1)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _run(
    decoder: Decoder, data: Array, dst: DType, first: int, stop: int, kind: str
) -> tuple[Array, CastCounts]:
    begin, end = PACKED[kind].span(first, stop)
    out = np.empty((stop - first) * dst.itemsize, np.uint8)
    given = memoryview(np.ascontiguousarray(data).reshape(-1)[begin:end])
    counts = decoder.decode(given, memoryview(out), first)
    return out.view(f"u{dst.itemsize}"), counts


def _same(mine: Array, theirs: Array) -> None:
    left, right = mine.view(np.float32), theirs.view(np.float32)
    nan = np.isnan(left)
    assert (nan == np.isnan(right)).all()
    assert (left.view(np.uint32)[~nan] == right.view(np.uint32)[~nan]).all()


@pytest.mark.parametrize("engine", ["llvm", "numpy"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_what_gguf_py_makes(kind: str, engine: Engine) -> None:
    """Random bytes, with scales of all kinds, are gguf-py's numbers bit for bit."""
    blocks = _random(kind, 4099)
    numel = blocks.shape[0] * PACKED[kind].block
    found, counts = _run(_decoder(kind, F32, engine), blocks, F32, 0, numel, kind)
    _same(found, _theirs(kind, blocks))
    assert counts == ZERO


@pytest.mark.parametrize("engine", ["llvm", pytest.param("numpy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gguf-mxfp4"])
def test_hostile_scales_are_what_gguf_py_makes_of_them(kind: str, engine: Engine) -> None:
    """Every float16 in the place of the scale, subnormal, infinite and NaN ones among them."""
    blocks = _random(kind, 1 << 16, seed=1)
    at = {"q2_k": 80, "q3_k": 108, "q6_k": 208}.get(kind, 0)
    blocks[:, at : at + 2] = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    numel = blocks.shape[0] * PACKED[kind].block
    found, _ = _run(_decoder(kind, F32, engine), blocks, F32, 0, numel, kind)
    _same(found, _theirs(kind, blocks))


def test_all_exponents_of_mxfp4_are_what_gguf_py_makes_of_them() -> None:
    """Every exponent with every code: the least are subnormal, 255 is no NaN there."""
    blocks = np.empty((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | (15 - np.arange(16)) << 4
    for engine in ("llvm", "numpy"):
        found, _ = _run(_decoder("gguf-mxfp4", F32, engine), blocks, F32, 0, 8192, "gguf-mxfp4")
        _same(found, _theirs("gguf-mxfp4", blocks))


@pytest.mark.parametrize("out_of_range", ["inf", "clamp"])
@pytest.mark.parametrize("dst", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_16_bits_are_the_float32_numbers_cast(
    kind: str, dst: DType, out_of_range: str
) -> None:
    """Elements and counts are those of the cast of gguf-py's numbers."""
    blocks = _random(kind, 1500)
    exact = _theirs(kind, blocks)
    expected = np.empty(exact.size, np.uint16)
    views = memoryview(exact.view(np.uint8)), memoryview(expected.view(np.uint8))
    clamp = out_of_range == "clamp"
    counts = CastCounts(*cast_bytes(F32, dst, *views, clamp=clamp))
    assert bool(counts.total) is not (kind == "gguf-mxfp4" and dst is BF16)  # these are exact
    for engine in ("llvm", "numpy"):
        decoder = _decoder(kind, dst, engine, out_of_range)
        found, seen = _run(decoder, blocks, dst, 0, exact.size, kind)
        nan = np.isnan(exact)
        assert (found[~nan] == expected[~nan]).all()
        assert np.isnan(found.view(dst.numpy)[nan].astype(np.float32)).all()
        assert seen == counts


@pytest.mark.parametrize("dst", [F32, F16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_the_whole(kind: str, dst: DType) -> None:
    block = PACKED[kind].block
    blocks = _random(kind, 40)
    numel = block * 40
    decoder = _decoder(kind, dst, "llvm")
    whole, counts = _run(decoder, blocks, dst, 0, numel, kind)
    cuts = [0, 1, 5, block - 1, block, block + 3, 3 * block, 5 * block + 7, 5 * block + 9, numel]
    total = ZERO
    for first, stop in pairwise(cuts):
        part, some = _run(decoder, blocks, dst, first, stop, kind)
        nan = np.isnan(whole.view(dst.numpy)[first:stop])
        assert (part[~nan] == whole[first:stop][~nan]).all()
        total += some
    assert total == counts
    assert _run(decoder, blocks, dst, 3, 3, kind)[1] == ZERO


@pytest.mark.parametrize("kind", ["q4_0", "q6_k"])
def test_lengths_that_do_not_go_together_are_refused(kind: str) -> None:
    decoder, nbytes = _decoder(kind, F32, "llvm"), PACKED[kind].nbytes(1)
    for data, out, first, lines in (
        (nbytes - 1, 4 * PACKED[kind].block, 0, 1),
        (nbytes, 4 * PACKED[kind].block + 4, 0, 1),
        (nbytes, 3, 0, 1),
        (2 * nbytes, 8, 1, 2),
    ):
        with pytest.raises(ValueError, match="do not become"):
            decoder.decode(memoryview(bytearray(data)), memoryview(bytearray(out)), first, lines)
    whole = memoryview(bytes(4 * PACKED[kind].block))
    with pytest.raises(ValueError, match="contiguous"):
        decoder.decode(memoryview(bytes(nbytes)), whole, 0)


def _seconds(function: Callable[[], object]) -> float:
    begun = time.thread_time()
    function()
    return time.thread_time() - begun


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_take_a_fifth_of_the_time_of_gguf_py(kind: str) -> None:
    blocks = _random(kind, (1 << 22) // PACKED[kind].block)
    blocks[:, :2] = blocks[:, -2:] = np.array([0, 40], np.uint8)  # an ordinary scale
    data = memoryview(blocks.reshape(-1))
    runs: dict[str, list[float]] = {"gguf": [], "float32": [], "float16": []}
    decoders = {dst.name: _decoder(kind, dst, "llvm") for dst in (F32, F16)}
    out = {
        name: memoryview(bytearray((1 << 22) * size))
        for name, size in (("float32", 4), ("float16", 2))
    }
    for _ in range(5):
        runs["gguf"].append(_seconds(lambda: _theirs(kind, blocks)))
        for name, decoder in decoders.items():
            runs[name].append(_seconds(lambda d=decoder, n=name: d.decode(data, out[n], 0)))  # type: ignore[misc]
    theirs, *ours = (statistics.median(found) for found in runs.values())
    print(
        kind, [f"{theirs / mine:.1f}" for mine in ours], [f"{4.2e-3 / m:.2f} Gel/s" for m in ours]
    )
    assert all(5 * mine <= theirs for mine in ours)
