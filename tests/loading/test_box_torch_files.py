"""Files of torch.save in little memory: as safetensors files are, views and all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from bench_parts.section import forget, measure
from boxes import Boxes

from streamload.bench.processes import call
from streamload.verification.diff import diff

torch = needs.module("torch")
dcp = needs.module("torch.distributed.checkpoint")

BOX_NBYTES = 2**28


def save(path: Path, nbytes: int, form: str = "zip") -> Path:
    """A state dict of so many bytes below "model", some transposed and sliced.

    ``form``: of torch.save ("zip", or "old" before version 1.6), or "dcp", a folder.
    """
    path.parent.mkdir()
    rows = max(nbytes // 2 // 4096 // 24, 2)
    whole = {f"layers.{i}": torch.randn(rows, 4096).bfloat16() for i in range(21)}
    turned = torch.randn(4096, rows).bfloat16().t()
    wide = torch.randn(rows, 8192).bfloat16()
    value = {**whole, "turned": turned, "columns": wide[:, 1000:5096], "again": whole["layers.0"]}
    whole = {"model": value, "optimizer": {"state": {0: {"step": torch.zeros(1)}}}}
    if form == "dcp":
        dcp.save(whole, checkpoint_id=path, no_dist=True)
    else:
        torch.save(whole, path, _use_new_zipfile_serialization=form == "zip")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("form", ["zip", "old", "dcp"])
def test_conversion_in_a_small_box(cgroup: Boxes, tmp_path: Path, form: str) -> None:
    """1.2 GB become float16 in 256 MB, page cache and all, and every value is right."""
    source, out = save(tmp_path / "in" / "model.pth", 1_200_000_000, form), tmp_path / "out"
    forget(source.parent)
    command: list[Any] = [sys.executable, "-m", "streamload", "convert", source, out]
    done = cgroup.run([*command, "--dtype", "float16", "--verify", "--no-progress"], BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert "verified" in done.stdout
    assert diff(source, out, dtype="float16", progress=False).ok


@pytest.mark.slow
@pytest.mark.parametrize("form", ["zip", "old", "dcp"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, form: str) -> None:
    """1.2 GB take at most 100 MB of anonymous memory over what 1 MB takes."""
    peaks = []
    for nbytes in (1_000_000, 1_200_000_000):
        source = save(tmp_path / str(nbytes) / "model.pth", nbytes, form)
        paths = {"path": str(source), "out": str(tmp_path / f"out{nbytes}")}
        job = call("bench_parts.jobs:convert", way="streamload", **paths)
        peaks.append(measure(job, sample_s=0.0005).peak.anon_nbytes)
    assert 0 < peaks[0] <= peaks[1] + 10_000_000
    assert peaks[1] <= peaks[0] + 100_000_000


def test_views_take_what_was_predicted(tmp_path: Path) -> None:
    turned = {f"{i}": torch.ones(1000, 1000).t() for i in range(8)}
    torch.save(turned, tmp_path / "model.pth")
    del turned
    said = forked.fresh(VIEWS, tmp_path / "model.pth")
    held, predicted, measured = map(int, said.split())
    assert held == 2 * 3 * 2**20
    assert 32_000_000 < measured <= predicted


VIEWS = """
import sys
import streamload

report = streamload.load_state_dict(None, sys.argv[1], device="host", threads=2, progress=False)
print(
    report.plan.devices[0].scratch_nbytes,
    report.predicted_nbytes["process"],
    report.measured_nbytes["process"],
)
"""

LOAD = """
import sys
import streamload

seen = 0
for name, array in streamload.iterate(sys.argv[1], device="host", dtype="checkpoint"):
    seen += array.nbytes
    del array
print(seen)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["zip", "old", "dcp"])
def test_tensors_one_by_one_in_a_small_box(cgroup: Boxes, tmp_path: Path, form: str) -> None:
    """1.2 GB pass through 256 MB, a tensor at a time."""
    source = save(tmp_path / "in" / "model.pth", 1_200_000_000, form)
    forget(source.parent)
    done = cgroup.run([sys.executable, "-c", LOAD, source], BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert int(done.stdout) > 1_190_000_000
