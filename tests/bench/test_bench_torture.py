"""Random loads in memory cgroups: the same for the same number, and every outcome is noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from bench_parts import torture_job
from bench_parts.torture_section import FAILURES, STATES, draw, run_boxed
from boxes import Boxes
from make_checkpoint import ManyTensors, make_checkpoint

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tensors of 2 kB."""
    out = tmp_path_factory.mktemp("torture") / "checkpoint"
    make_checkpoint(out, ManyTensors(3, 1000))
    return out


def job(path: Path) -> dict[str, Any]:
    """A load to the host."""
    return {
        **{"path": str(path), "device": "host", "kind": "dict", "state": "none"},
        **{"held": "bfloat16", "options": {"dtype": "checkpoint"}},
    }


def test_a_run_is_the_same_by_itself() -> None:
    """The number and the seed say all of a case; many cases have every target there is."""
    cases = [draw(0, number, 400) for number in range(300)]
    assert draw(0, 137, 400) == cases[137] != draw(1, 137, 400)
    drawn = {(case["device"], case["state"]) for case in cases}
    assert drawn == {(device, state) for device in STATES for state in STATES[device]}


@pytest.mark.parametrize("count", [3, pytest.param(12, marks=pytest.mark.slow)])
def test_few_random_loads_end_well(cgroup: Boxes, tmp_path: Path, count: int) -> None:
    """The short form of ``scripts/bench torture``: loaded right, refused or stopped, no more."""
    needs.module("torch")
    needs.device("CL")
    needs.device("CPU")
    out = tmp_path / "runs.json"
    options = ("--runs", str(count), "--size", "20MB", "--seed", "439", "--json", str(out))
    done = subprocess.run(
        [sys.executable, SCRIPT, "torture", *options, "--work", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    runs = json.loads(out.read_text())["sections"]["torture"]["raw"]
    assert [run["case"]["number"] for run in runs] == list(range(count))
    assert not any(run["outcome"] in FAILURES for run in runs)
    assert any(run["outcome"] == "loaded" for run in runs)


def test_a_load_that_ends_well_is_measured(cgroup: Boxes, checkpoint: Path) -> None:
    """What it took is near what it was predicted to take."""
    found = run_boxed(cgroup, job(checkpoint))
    assert (found["outcome"], found["why"]) == ("loaded", "")
    assert found["said"]["predicted_nbytes"] >= 6000
    assert 0 <= found["taken_nbytes"] <= found["charged_nbytes"] + 2**20


def test_a_process_that_is_killed_is_noticed(cgroup: Boxes, checkpoint: Path) -> None:
    """By whatever signal, and whenever."""
    psutil = needs.module("psutil")

    def limit(charged: int) -> int:
        children = psutil.Process().children()
        (child,) = (
            c for c in children if any("bench_parts.torture_job" in word for word in c.cmdline())
        )
        child.kill()
        return charged + 2**30

    assert run_boxed(cgroup, job(checkpoint), limit)["outcome"] == "killed"


def test_a_process_that_fails_is_noticed(cgroup: Boxes, tmp_path: Path) -> None:
    """An error that is none of a load's own is told."""
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]")  # no header
    found = run_boxed(cgroup, job(tmp_path))
    assert found["outcome"] == "other"
    assert "TypeError" in found["why"]


def test_a_wrong_byte_is_noticed(checkpoint: Path) -> None:
    """Every byte is compared."""
    raws = torture_job.tensors_of(checkpoint)
    tensors = {
        name: np.fromfile(raw.file, np.uint8, 2000, offset=raw.start) for name, raw in raws.items()
    }
    assert list(torture_job.wrong("host", "checkpoint", tensors, raws)) == []
    name = next(reversed(raws))
    tensors[name][-1] ^= 1
    assert list(torture_job.wrong("host", "checkpoint", tensors, raws)) == [
        f"{name}: from element 0 on"
    ]
