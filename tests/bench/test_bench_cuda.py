"""The bench on a GPU: its loaders, and what the driver says. Skipped on machines without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import needs
import pytest

torch = needs.module("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from bench_parts.compared import Compared, Comparing  # noqa: E402

from streamload.bench import limits  # noqa: E402
from streamload.bench.loaders import OURS  # noqa: E402
from streamload.bench.processes import device_meter  # noqa: E402


def test_loaders_are_compared_on_cuda(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(1_000_000_000, shards=3)
    found = Comparing(Compared(str(path), "cuda:0", runs=2, together=True, timeout_s=120)).run()
    told = "\n".join(found.lines())
    print(told)
    assert OURS not in found.skipped, told
    assert OURS in found.loaders and "safetensors" in found.loaders, told
    for name, of in found.loaders.items():
        assert of.checked, f"{name}\n{told}"
        for run in of.runs["warm"]:
            # the driver's own count: the weights, and not twice them for streamload
            assert run.memory.device_nbytes is not None, told
            assert run.memory.device_nbytes > 0.95 * found.nbytes, f"{name}\n{told}"
    for run in found.loaders[OURS].runs["warm"]:
        assert run.memory.device_nbytes < 1.1 * found.nbytes, told
        assert run.pinned_nbytes is not None and run.pinned_nbytes <= 2**26, told
    assert set(found.limits) == {
        "warm, reading the page cache",
        "warm, copying from pinned memory",
    }, told
    # slower than the slowest bus, or faster than any: the limit itself was not measured
    assert 1 < found.limits["warm, copying from pinned memory"].median < 500, told
    share = found.share("warm")
    assert share is not None and share < 1.5, told


def test_tinygrad_is_compared_on_cuda(tmp_checkpoint: Callable[..., Path]) -> None:
    needs.device("CUDA")
    path = tmp_checkpoint(200_000_000)
    found = Comparing(Compared(str(path), "CUDA", runs=1, limits=False, together=True)).run()
    told = "\n".join(found.lines())
    print(told)
    assert set(found.loaders) == {OURS, "tinygrad"}, told
    assert all(of.checked for of in found.loaders.values()), told


def test_the_driver_tells_what_is_taken() -> None:
    used_nbytes = device_meter(0)
    torch.ones(1, device="cuda:0")
    before = used_nbytes()
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
    assert used_nbytes() - before >= 2**28
    del held
    torch.cuda.empty_cache()
    assert used_nbytes() - before < 2**27


def test_copies_from_pinned_memory_are_timed() -> None:
    """The best of two ways; all memory is given back."""
    used_nbytes = device_meter(0)
    limits.copy(0)
    before = used_nbytes()
    rate = limits.copy(0)
    assert rate.gigabytes_per_second > 1
    assert "pinned slots" in rate.how
    assert used_nbytes() - before < 2**26
