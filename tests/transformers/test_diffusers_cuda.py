"""Pipelines of diffusers that take turns on a GPU: their images, and the budget of the allocator.

Skipped on machines without a CUDA device.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
needs.module("transformers")
diffusers = needs.module("diffusers")

from diffusion import PIPELINES, image, saved  # noqa: E402

import streamload  # noqa: E402
from streamload.errors import PlanInfeasibleError  # noqa: E402

CUDA: dict[str, Any] = {"device": "cuda:0", "progress": False}
SEGMENTS_NBYTES = 48 * 2**20  # of the allocator, for activations and what it rounds up


def least(folder: Path) -> int:
    """A budget in which every model has its turn, without smaller layers than usual."""
    budget = 2**20
    while True:
        try:
            streamload.diffusers.from_pretrained(folder, **CUDA, offload=True, budget=budget)
            return budget
        except PlanInfeasibleError as error:  # of the first model that does not fit
            budget += error.needed_nbytes - error.budget_nbytes


@pytest.mark.parametrize("name", PIPELINES)
def test_images_on_a_gpu(tmp_path: Path, name: str) -> None:
    """Two of them, at budgets from the least; weights leave when another model's turn begins."""
    folder = saved(tmp_path, name)
    whole = streamload.diffusers.from_pretrained(folder, **CUDA)
    expected, nbytes = image(whole), whole.streamload_report.resident_nbytes
    del whole
    fewest = least(folder)
    for budget in (fewest, fewest * 3 // 2, 2 * nbytes + SEGMENTS_NBYTES):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        pipeline = streamload.diffusers.from_pretrained(folder, **CUDA, offload=True, budget=budget)
        pipeline.to("cuda")
        for _ in range(2):
            assert np.allclose(image(pipeline), expected, atol=1e-4), budget
        assert torch.cuda.max_memory_reserved() - before <= budget + SEGMENTS_NBYTES
        pipeline.streamload_offload.close()
        del pipeline
