"""Parameters that are shards: DTensors of FSDP2 and of tensor parallelism, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import needs
import numpy as np
import pytest
import sharded_rank
from distributed_helpers import run_ranks
from safetensors.numpy import save_file

ROOT = Path(__file__).parents[2]
RANKS = 4


@pytest.mark.slow
@pytest.mark.parametrize("case", sharded_rank.CASES)
def test_every_rank_reads_its_own_shard(case: str, tmp_path: Path) -> None:
    needs.module("torch")
    rng = np.random.default_rng(0)
    sizes = sharded_rank.IN, sharded_rank.MIDDLE, sharded_rank.OUT
    shapes = {"0.weight": sizes[1::-1], "0.bias": sizes[1:2], "2.weight": sizes[:0:-1]}
    shapes["2.bias"] = sizes[2:]
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    program = ROOT / "tests" / "support" / "sharded_rank.py"
    run_ranks([sys.executable, program, case, tmp_path], [0] * RANKS)
    assert len(list(tmp_path.glob("*.json"))) == RANKS
