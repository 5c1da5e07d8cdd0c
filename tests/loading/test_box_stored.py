"""Blocks of a GGUF file that stay in modules of torch, in memory cgroups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.boxed_section import boxed
from boxes import Boxes
from gguf_files import random_blocks, write

from streamload.bench.processes import call

needs.module("torch")

KINDS = ("Q4_K", "Q6_K", "Q3_K", "IQ4_XS")
#: Beside what was predicted: what a load leaves free, and the compiler of the first cast.
ROOM_NBYTES = 30_000_000
#: What llvmlite and the kernels of products take, once in a process.
COMPILER_NBYTES = 8_000_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 79 MB: eight matrices of 4096 x 4096 in several types, 268 MB as float16."""
    out = tmp_path_factory.mktemp("stored") / "model.gguf"
    types = {f"{i}.weight": KINDS[i % len(KINDS)] for i in range(8)}
    blocks = {name: random_blocks(kind.lower(), 4096, 4096) for name, kind in types.items()}
    write(out, blocks, types, architecture="none")
    return out


def run(cgroup: Boxes, path: Path, room_nbytes: int | None, **options: Any) -> dict[str, Any]:
    """A load that has so many bytes beside what its process holds."""
    limit = None if room_nbytes is None else (lambda charged: charged + room_nbytes)
    return boxed(cgroup, call("stored_job:Job", path=str(path), **options), limit)


@pytest.mark.slow
def test_blocks_take_what_was_predicted(cgroup: Boxes, path: Path) -> None:
    """By the kernel's count; in a box of that they load, floats are refused, "auto" takes them."""
    found = run(cgroup, path, None, quant="stored", budget="1GB")
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    predicted, needed = (found["said"][f"{key}_nbytes"] for key in ("predicted", "needed"))
    taken = found["taken_nbytes"]
    assert 78_000_000 < taken <= predicted < 85_000_000 + COMPILER_NBYTES
    assert 0 < path.stat().st_size - needed < 1000  # the header
    found = run(cgroup, path, predicted + ROOM_NBYTES, quant="auto", budget=needed)
    assert (found["outcome"], found["why"]) == ("loaded", ""), found
    found = run(cgroup, path, predicted + ROOM_NBYTES, quant="stored", budget=needed - 1)
    assert found["outcome"] == "refused", found
    found = run(cgroup, path, predicted + ROOM_NBYTES, budget=needed)
    assert (found["outcome"], 'quant="stored"' in found["why"]) == ("refused", True), found
