"""Layers that stream, and loads in place, in boxes of about what they need: none is killed.

Budgets are above what is free, and files are not in the page cache: what the kernel reads ahead
counts in a memory cgroup, and cannot be reclaimed before it has been read.
"""

from __future__ import annotations

from pathlib import Path

import needs
import pytest
from bench_parts.boxed_section import cells, failure, needed_nbytes, run
from boxes import Boxes
from make_checkpoint import make_checkpoint, shape_of_size

from streamload.core.dtypes import BF16

NBYTES = 100_000_000

ALIGNED = pytest.param(0, id="aligned", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param(8, id="copied"), ALIGNED])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bf16; where its data is aligned, slots may be views on the file."""
    out = tmp_path_factory.mktemp("boxed") / "checkpoint"
    make_checkpoint(out, shape_of_size(NBYTES, BF16), offset_mod_16=request.param)
    return out


def test_a_cold_file_in_little_memory(cgroup: Boxes, checkpoint: Path) -> None:
    """In what a refusal says, and a little more, all bytes come right; nothing is killed."""
    cell = ("stream_layers", "stated", "not cached")
    needed, ran = needed_nbytes(cgroup, checkpoint, cell)
    assert ran["outcome"] == "loaded", ran["why"]
    ran = run(cgroup, checkpoint, cell, int(1.4 * needed))
    assert not failure(ran, needed)


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(cells()), ids=", ".join)
def test_no_entrance_is_killed(cgroup: Boxes, checkpoint: Path, cell: tuple[str, str, str]) -> None:
    """Every entrance, with a stated budget, with none, with a percentage; cold and warm."""
    needs.module("torch")
    needed, ran = needed_nbytes(cgroup, checkpoint, cell)
    assert ran["outcome"] == "loaded", ran["why"]
    for factor in (0.9, 0.97, 1.03, 1.1, 1.2, 1.5, 2.0, 3.0):
        ran = run(cgroup, checkpoint, cell, int(factor * needed))
        assert not failure(ran, needed)
