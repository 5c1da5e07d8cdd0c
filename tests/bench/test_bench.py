"""scripts/bench: that it runs; what it measures is for people to judge."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.main import main
from bench_parts.torch_jobs import WAYS

STEPS = ("open", "plan", "plan for nodes", "load")
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"


def bench(folder: Path, *arguments: str) -> Any:
    out = folder / "bench.json"
    command = [sys.executable, SCRIPT, *arguments, "--json", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        ("host", ("box", "speed")),
        pytest.param("host", ("box", "convert"), marks=pytest.mark.slow, id="convert"),
        pytest.param(
            "CL,CPU,host", ("box", "memory", "speed", "cast"), marks=pytest.mark.slow, id="all"
        ),
    ],
)
def test_the_bench_runs_and_writes_json(
    tmp_path: Path, devices: str, sections: Sequence[str]
) -> None:
    """Every section runs at a small size, or says why it cannot, and the figures are numbers."""
    report = bench(tmp_path, *sections, "--size", "8MB", "--runs", "1", "--devices", devices)
    assert report["command"].startswith(f"scripts/bench {' '.join(sections)} --size 8MB")
    assert report["machine"]["kernel"]
    assert list(report["sections"]) == list(sections)
    for name in sections[1:]:
        section = report["sections"][name]
        assert section["rows"] and section["targets"]
        assert all(math.isfinite(target["value"]) for target in section["targets"])
    if "convert" in sections:
        assert "convert by streamload" in {row["what"] for row in section["rows"]}


@pytest.mark.slow
def test_what_a_small_tensor_costs(tmp_path: Path) -> None:
    """Each step of streamload's, and safetensors' loader where torch is here, in microseconds."""
    report = bench(tmp_path, "many", "--tensors", "500", "--runs", "1", "--devices", "host")
    rows = report["sections"]["many"]["rows"]
    steps = [row["step"] for row in rows]
    assert steps in ([*STEPS], [*STEPS, "load_file"])
    assert all(row["us a tensor"] > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways",
    [["streamload, meta, no budget"], [name for name, way in WAYS.items() if way.works]],
    ids=["one way", "all ways"],
)
def test_ways_to_load_a_model_of_torch_are_compared(tmp_path: Path, ways: list[str]) -> None:
    """Each way has its peaks and its fate in the box; streamload's bits are those of the others."""
    needs.module("torch")
    needs.module("transformers")
    report = bench(tmp_path, "torch", "--size", "8MB", "--devices", "host", "--ways", *ways)
    section = report["sections"]["torch"]
    if "not_here" in section:
        needs.lacking(section["not_here"])
    assert {row["what"] for row in section["rows"]} == set(ways)
    for row in section["rows"]:
        assert {"anon", "RSS", "x", "box, 8, cached", "box, 0, not cached"} <= row.keys()
    same = [target["met"] for target in section["targets"] if "the same bits" in target["what"]]
    assert all(same)
    assert bool(same) == (len(ways) > 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["sped"], ["sped", "speed"]), (["gpu-warm", "--site", "nobody=/tmp"], ["--site"])],
    ids=["section", "site"],
)
def test_wrong_usage(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: list[str],
) -> None:
    """An unknown section is named, with those that are there; --site names a loader."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words)
