"""scripts/bench: that it runs; what it measures is for people to judge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "bench"


@pytest.mark.parametrize("devices", ["host", pytest.param("CL,CPU,host", marks=pytest.mark.slow)])
def test_the_bench_runs_and_writes_json(tmp_path: Path, devices: str) -> None:
    """Every section runs at a small size, or says why it cannot, and the figures are numbers."""
    out = tmp_path / "bench.json"
    command = [sys.executable, SCRIPT, "--size", "8MB", "--runs", "1", "--json", out]
    done = subprocess.run([*command, "--devices", devices], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert report["command"].startswith("scripts/bench --size 8MB")
    assert report["machine"]["kernel"]
    assert list(report["sections"]) == ["box", "memory", "speed", "cast"]
    for name in ("memory", "speed", "cast"):
        section = report["sections"][name]
        assert section["rows"] and section["targets"]
        assert all(math.isfinite(target["value"]) for target in section["targets"])


def test_an_unknown_section_is_wrong_usage() -> None:
    """A section that is not there is named, with those that are."""
    done = subprocess.run([sys.executable, SCRIPT, "sped"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "sped" in done.stderr and "speed" in done.stderr
