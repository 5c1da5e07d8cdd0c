"""Chunks: every byte of every parameter once, from the right byte of the file."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from plan_helpers import checkpoint_of, chunks

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BY_CODE, F16, F32, F64, DType
from streamload.core.tensors import RowRange, RowTranspose
from streamload.planning.chunks import Chunk, StridedRead
from streamload.planning.moves import Kind, Move, Moves
from streamload.planning.plan import Plan, slot_nbytes

Array = np.ndarray[Any, Any]

START = 1000  # first data byte of each shard


def plan_of(chunk_nbytes: int, *placements: Move) -> Plan:
    """A plan of these placements; its numbers of bytes do not matter here."""
    return Plan(
        path="model",
        placements=Moves(placements),
        devices=(),
        host_nbytes=0,
        host_budget_nbytes=0,
        chunk_nbytes=chunk_nbytes,
        slot_nbytes=slot_nbytes(chunk_nbytes),
        threads=1,
        readers=("mmap",),
        out_of_range="inf",
    )


def place(
    name: str,
    shape: tuple[int, ...],
    source: Sequence[RowRange],
    *,
    src: DType = F32,
    dst: DType = F32,
    transpose: RowTranspose | None = None,
    cast: str = "llvm",
) -> Move:
    """A placement on a device of no interest."""
    how = "copy" if src is dst else cast
    nbytes = dst.nbytes(math.prod(shape))
    rows, strided = sum(r.stop - r.start for r in source), any(r.columns for r in source)
    kind = Kind("d", shape, src, dst, rows, transpose, "new", how, strided=strided)
    return Move(name, tuple(source), kind, nbytes)


def played(plan: Plan, cut: Sequence[Chunk], files: Sequence[Array]) -> list[Array]:
    """The parameters that the chunks make; ``files`` are the shards' data, in float32.

    No byte may be written twice or left out, and none outside of its chunk.
    """
    sizes = [p.dst.nbytes(math.prod(p.shape)) for p in plan.placements]
    out = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
    times = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
    for chunk in cut:
        p = plan.placements[chunk.placement]
        for run in chunk.runs:
            raw = files[chunk.shard].view(np.uint8)[run.start - START : run.stop - START]
            for row, part in enumerate(np.split(raw, run.rows)):
                if p.src is not p.dst:
                    part = part.view(np.float32).astype(p.dst.numpy).view(np.uint8)
                at = run.offset + row * run.stride
                assert chunk.start <= at <= at + len(part) <= chunk.stop
                out[chunk.placement][at : at + len(part)] = part
                times[chunk.placement][at : at + len(part)] += 1
    assert all((count == 1).all() for count in times)
    return [data.view(p.dst.numpy) for data, p in zip(out, plan.placements, strict=True)]


def test_a_tensor_is_cut_anywhere() -> None:
    checkpoint = checkpoint_of({"w": ("F32", [5, 3])})
    plan = plan_of(16, place("w", (5, 3), [RowRange("w", 0, 5)]))
    cut = list(chunks(plan, checkpoint))
    assert [(c.start, c.stop) for c in cut] == [(0, 16), (16, 32), (32, 48), (48, 60)]
    assert cut[1].runs == (StridedRead(START + 16, 16, offset=16),)
    assert {(c.placement, c.shard) for c in cut} == {(0, 0)}


@pytest.mark.parametrize(("src", "dst"), [(F64, F16), (F16, F64)])
def test_the_longer_side_bounds_a_chunk(src: DType, dst: DType) -> None:
    checkpoint = checkpoint_of({"w": (src.code, [100])})
    plan = plan_of(80, place("w", (100,), [RowRange("w", 0, 100)], src=src, dst=dst))
    cut = list(chunks(plan, checkpoint))
    assert len(cut) == 10
    assert {max(c.read_nbytes, c.stop - c.start) for c in cut} == {80}
    p = plan.placements[0]
    assert {c.staged_nbytes(p) for c in cut} == {10 * dst.itemsize}


def test_a_device_cast_stages_raw_bytes() -> None:
    checkpoint = checkpoint_of({"w": ("F32", [10])})
    plan = plan_of(80, place("w", (10,), [RowRange("w", 0, 10)], dst=F16, cast="device"))
    (chunk,) = chunks(plan, checkpoint)
    assert (chunk.staged_nbytes(plan.placements[0]), chunk.stop - chunk.start) == (40, 20)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 7)])
def test_no_elements_is_one_empty_chunk(shape: tuple[int, ...]) -> None:
    checkpoint = checkpoint_of({"a": ("F32", [2]), "w": ("F32", shape)})
    plan = plan_of(8, place("w", shape, [RowRange("w", 0, shape[0])]))
    assert list(chunks(plan, checkpoint)) == [Chunk(0, 0, 0, 0, ())]


def test_a_scalar_is_one_row() -> None:
    checkpoint = checkpoint_of({"a": ("F32", [2]), "w": ("F32", [])})
    plan = plan_of(8, place("w", (), [RowRange("w", 0, 1)]))
    assert list(chunks(plan, checkpoint)) == [Chunk(0, 0, 0, 4, (StridedRead(START + 8, 4),))]


@pytest.mark.parametrize("code", ["F4", "F6_E2M3"])
def test_dtypes_below_a_byte_are_bytes(code: str) -> None:
    dtype = BY_CODE[code]
    checkpoint = checkpoint_of({"w": (code, [4, 8])})
    plan = plan_of(5, place("w", (4, 8), [RowRange("w", 0, 4)], src=dtype, dst=dtype))
    cut = list(chunks(plan, checkpoint))
    assert cut[-1].stop == dtype.nbytes(32)
    assert [c.start for c in cut] == list(range(0, dtype.nbytes(32), 5))


def test_files_are_read_front_to_back() -> None:
    checkpoint = checkpoint_of({"a": ("F32", [8]), "b": ("F32", [8])}, {"c": ("F32", [8])})
    placements = [
        place("x", (16,), [RowRange("c", 0, 8), RowRange("b", 0, 8)]),
        place("y", (8,), [RowRange("a", 0, 8)]),
    ]
    cut = list(chunks(plan_of(16, *placements), checkpoint))
    at = [(c.shard, c.runs[0].start) for c in cut]
    assert at == sorted(at)
    assert [c.placement for c in cut] == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("chunk_nbytes", [1, 4, 7, 64, 96, 100, 10**6])
@pytest.mark.parametrize(
    "transpose", [RowTranspose(4, 2, 3), RowTranspose(4, 3, 2), RowTranspose(1, 24, 1)]
)
def test_row_permutation(transpose: RowTranspose, chunk_nbytes: int) -> None:
    checkpoint = checkpoint_of({"pad": ("F32", [3]), "w": ("F32", [24, 5])})
    values = np.arange(3 + 120, dtype=np.float32)
    rows = values[3:].reshape(transpose.groups, transpose.outer, transpose.inner, 5)
    expected = rows.swapaxes(1, 2).reshape(-1)
    for dst in (F32, F16, F64):
        p = place("w", (24, 5), [RowRange("w", 0, 24)], dst=dst, transpose=transpose)
        plan = plan_of(chunk_nbytes, p)
        cut = list(chunks(plan, checkpoint))
        assert np.array_equal(played(plan, cut, [values])[0], expected)
        longest = max(chunk_nbytes, p.src.itemsize, dst.itemsize)  # an element is never cut
        assert all(max(c.read_nbytes, c.stop - c.start) <= longest for c in cut)


def random_placements(
    rng: random.Random, checkpoint: Checkpoint, files: list[Array]
) -> tuple[list[Move], list[Array]]:
    """Parameters put together of random rows, and what they are by numpy's own indexing."""
    placements, expected = [], []
    for number in range(rng.randint(1, 5)):
        width = rng.choice([None, 1, 3, 8])
        shape = () if width is None else (width,)
        fitting = [i for i in checkpoint.tensors.values() if i.shape[1:] == shape]
        source, values = [], []
        for _ in range(rng.randint(1, 4)):
            info = rng.choice(fitting)
            a, b = sorted(rng.randint(0, info.shape[0]) for _ in range(2))
            source.append(RowRange(info.name, a, b))
            shard = int(info.shard.stem[-1])
            first = (info.start - START) // 4
            numel = math.prod(info.shape)
            values.append(files[shard][first : first + numel].reshape(info.shape)[a:b])
        whole = np.concatenate(values)
        transpose = None
        if len(whole) and len(whole) % 2 == 0 and rng.random() < 0.6:
            outer = rng.choice([n for n in range(1, len(whole) + 1) if len(whole) % n == 0])
            inner = rng.choice([n for n in range(1, 50) if (len(whole) // outer) % n == 0])
            transpose = RowTranspose(len(whole) // outer // inner, outer, inner)
            split = whole.reshape(transpose.groups, outer, inner, -1)
            whole = split.swapaxes(1, 2).reshape(whole.shape)
        dst = rng.choice([F32, F16, F64])
        placements.append(place(f"p{number}", whole.shape, source, dst=dst, transpose=transpose))
        expected.append(whole.reshape(-1))
    return placements, expected


def test_random_sources() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        shards = [
            {
                f"{shard}.{i}": ("F32", [rng.randint(1, 12), *([width] if width else [])])
                for i, width in enumerate([None, 1, 3, 8])
            }
            for shard in range(rng.randint(1, 3))
        ]
        checkpoint = checkpoint_of(*shards)
        files = []
        for header in checkpoint.shards:
            nbytes = header.file_nbytes - START
            files.append(np.arange(nbytes // 4, dtype=np.float32) + 300 * len(files))
        placements, expected = random_placements(rng, checkpoint, files)
        chunk_nbytes = rng.choice([8, 11, 50, 200, 5000])
        plan = plan_of(chunk_nbytes, *placements)
        cut = list(chunks(plan, checkpoint))
        for p, found, wanted in zip(placements, played(plan, cut, files), expected, strict=True):
            assert np.array_equal(found, wanted), (seed, p)
        for chunk in cut:
            assert max(chunk.read_nbytes, chunk.stop - chunk.start) <= chunk_nbytes
        at = [(c.shard, c.runs[0].start if c.runs else 0) for c in cut]
        assert at == sorted(at)
        spans = sorted((c.placement, c.start, c.stop) for c in cut)
        for (p1, _, stop), (p2, start, _) in pairwise(spans):
            assert p1 != p2 or stop <= start


@pytest.mark.parametrize("transpose", [None, RowTranspose(10, 100, 2), RowTranspose(10, 2, 100)])
def test_chunks_to_come_take_no_memory(transpose: RowTranspose | None) -> None:
    rows = [[RowRange("a", 0, 800), RowRange("b", 0, 1200)], [RowRange("a", 0, 2000)]]
    checkpoint = checkpoint_of({"a": ("F32", [2000, 250])}, {"b": ("F32", [2000, 250])})
    placements = [place(f"p{i}", (2000, 250), r, transpose=transpose) for i, r in enumerate(rows)]
    plan = plan_of(1000, *placements)
    next(chunks(plan, checkpoint))
    tracemalloc.start()
    try:
        assert sum(chunk.read_nbytes for chunk in chunks(plan, checkpoint)) == 4_000_000
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
