"""Blocks of tensors, as strided ranges of files, and parameters that are shards."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import streamload
from streamload.core.dtypes import BY_NAME
from streamload.core.tensors import Block, Columns, RowRange, TensorInfo, region_of
from streamload.errors import PlanInfeasibleError
from streamload.planning.match import cut
from streamload.planning.plan import Plan
from streamload.planning.sources import Source
from streamload.verification.verify import verify


@st.composite
def blocks(draw: Any) -> Block:
    """A part of a tensor of up to four axes, which may be empty."""
    whole = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    first = tuple(draw(st.integers(0, n - 1)) for n in whole)
    shape = tuple(draw(st.integers(0, n - f)) for n, f in zip(whole, first, strict=True))
    return Block(whole, first, shape)


def elements(ranges: tuple[RowRange, ...], arrays: dict[str, np.ndarray[Any, Any]]) -> list[int]:
    """What ranges consist of, by their definition."""
    out: list[int] = []
    for r in ranges:
        flat = arrays[r.tensor]
        lines = flat if r.columns is None else flat.reshape(-1, r.columns.width)
        lines = lines[r.start : r.stop]
        if r.columns is not None:
            lines = lines[:, r.columns.start : r.columns.stop]
        out += lines.ravel().tolist()
    return out


def part_of(array: np.ndarray[Any, Any], block: Block) -> np.ndarray[Any, Any]:
    """The block, by numpy."""
    cuts = zip(block.first, block.shape, strict=True)
    return array.reshape(block.whole)[tuple(slice(f, f + n) for f, n in cuts)]


@given(blocks())
@settings(deadline=None)
def test_a_block_is_made_of_ranges(block: Block) -> None:
    array = np.arange(math.prod(block.whole)).reshape(block.whole)
    found = cut([RowRange("a", 0, block.whole[0])], math.prod(block.whole[1:]), block)
    assert found is not None
    assert elements(found, {"a": array}) == part_of(array, block).ravel().tolist()
    if len(block.whole) > 2:  # experts, for one: each a tensor of its own
        stacked = {str(n): part for n, part in enumerate(array)}
        rows = [RowRange(name, 0, block.whole[1]) for name in stacked]
        found = cut(rows, math.prod(block.whole[2:]), block)
        assert found is not None
        assert elements(found, stacked) == part_of(array, block).ravel().tolist()


def test_rows_stay_rows() -> None:
    rows = [RowRange("a", 2, 6), RowRange("b", 0, 4)]
    found = cut(rows, 3, Block((8, 3), (3, 0), (4, 3)))
    assert found == (RowRange("a", 5, 6), RowRange("b", 0, 3))
    found = cut(rows, 3, Block((8, 3), (3, 1), (4, 2)))
    columns = Columns(1, 3, 3)
    assert found == (RowRange("a", 5, 6, columns), RowRange("b", 0, 3, columns))


@pytest.mark.parametrize("shape", [(5, 2, 3), (4,), (), (3, 0)])
def test_where_rows_lie_in_the_file(shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    info = TensorInfo("a", BY_NAME["uint16"], shape, Path("a"), 10, 10 + array.nbytes)
    data = bytes(10) + array.tobytes()
    count = shape[0] if shape else 1
    rows = [RowRange("a", start, stop) for stop in range(count + 1) for start in range(stop + 1)]
    if shape == (5, 2, 3):
        rows += [RowRange("a", 1, 4, Columns(2, 5, 6)), RowRange("a", 1, 9, Columns(0, 1, 3))]
    for r in rows:
        found = [data[start:stop] for start, stop in region_of(info, r).ranges()]
        taken = [] if not array.size else elements((r,), {"a": array.reshape(array.shape or (1,))})
        assert b"".join(found) == np.array(taken, np.uint16).tobytes(), r
        assert region_of(info, r).nbytes == len(taken) * 2


READERS = ("mmap", "pread", "direct")


@pytest.mark.parametrize("chunk_nbytes", [None, 64, 3])
@pytest.mark.parametrize("dtype", ["checkpoint", "float16", "float64"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("device", ["host", "cpu", "CL"])
def test_columns_are_loaded_on_every_way(
    device: str, reader: Any, dtype: str, chunk_nbytes: int | None, tmp_path: Path
) -> None:
    array = np.random.default_rng(1).standard_normal((37, 5, 11)).astype(np.float32)
    path = tmp_path / "x.safetensors"
    save_file({"before": np.ones(3, np.float32), "w": array}, path)
    columns = Columns(14, 40, 55)
    mapping = {"w": Source((RowRange("w", 3, 30, columns),), shape=(27, 26))}
    options: dict[str, Any] = {"reader": reader, "dtype": dtype, "mapping": mapping}
    report = streamload.load_state_dict(
        *(None, path),
        device=device,
        progress=False,
        chunk_nbytes=chunk_nbytes and max(chunk_nbytes, 8),
        **options,
    )
    kind = {"checkpoint": np.float32, "float16": np.float16, "float64": np.float64}[dtype]
    expected = array.reshape(37, 55)[3:30, 14:40].astype(kind)
    found = report.state_dict["w"]
    found = found if device == "host" else found.numpy()
    assert found.dtype == kind
    assert found.tobytes() == expected.tobytes()
    assert report.read_nbytes == 27 * 26 * 4 + 12
    assert verify(report, streamload.open_checkpoint(path)) == []
    assert Plan.from_json(report.plan.to_json()) == report.plan


@pytest.mark.parametrize(
    "row",
    [
        RowRange("w", 0, 5, Columns(0, 2, 3)),
        RowRange("w", 0, 4, Columns(0, 4, 3)),
        RowRange("w", 0, 4, Columns(2, 2, 3)),
        RowRange("w", 0, 1, Columns(0, 2, 5)),
    ],
    ids=["rows", "columns", "none", "width"],
)
def test_columns_that_are_not_there(row: RowRange, tmp_path: Path) -> None:
    """They are refused before anything is read."""
    path = tmp_path / "x.safetensors"
    save_file({"w": np.ones((4, 3), np.float32)}, path)
    with pytest.raises(streamload.errors.StateDictMismatchError, match="w"):
        streamload.load_state_dict(None, path, device="host", mapping={"w": row}, progress=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transposed_blocks_in_small_chunks(tmp_path: Path) -> None:
    """A plan knows the least that transposed blocks convert in; what a refusal names is enough."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=256, n_head=4, vocab_size=64, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "in")
    streamload.convert(tmp_path / "in", tmp_path / "g", to="gguf", quant="q8_0", progress=False)
    expected = transformers.GPT2LMHeadModel(config)
    options = {"device": "cpu", "dtype": "float32", "progress": False}
    streamload.load_state_dict(expected, tmp_path / "g", **options)

    def same(**more: Any) -> bool:
        model = transformers.GPT2LMHeadModel(config)
        streamload.load_state_dict(model, tmp_path / "g", **options, **more)
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return all(torch.equal(a, b) for a, b in pairs)

    for chunk in (2**16, 2**14, 2**10):
        assert same(chunk_nbytes=chunk)
    with pytest.raises(PlanInfeasibleError) as raised:
        same(budget=10**5)
    for more in (0, 200_000):
        assert same(budget=raised.value.needed_nbytes + more)
