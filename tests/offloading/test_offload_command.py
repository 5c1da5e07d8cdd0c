"""``--offload`` on the command line: plan and bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked
import pytest


def run(*arguments: object, code: int = 0) -> str:
    found = forked.run([sys.executable, "-m", "streamload", *arguments], forked.COMMANDS)
    assert found.returncode == code, found.stderr
    return found.stdout if not code else " ".join(found.stderr.split())


def test_plan_takes_what_offload_takes(llama: Path) -> None:
    asked = ("plan", llama, "--budget", "600kB", "--offload", "--json")
    plain = json.loads(run(*asked))
    assert plain["streams"] and not plain["host"]
    kept = json.loads(run(*asked, "--stay", "lm_head.*", "--host", "10MB"))
    assert "lm_head" not in kept["streams"]
    assert kept["host"] == kept["streams"]
    assert kept["places"]["host memory"] == kept["pass_nbytes"]
    parts = json.loads(run(*asked, "--layers", "model.layers.*.mlp"))
    assert any(name.endswith(".mlp") for name in (*parts["streams"], *parts["stays"]))
    said = run(*asked[:-1], "--rate", "1GB")
    assert "s a pass for transfers, at 1GB a second" in said
    said = run(*asked[:-1], "--device", "cpu")
    assert said.count('residence="mapped" is faster') == 1
    said = run("plan", llama, "--budget", "1kB", "--offload", code=3)
    assert "with layers that stream" in said


def test_plan_names_offload_where_that_fits(llama: Path) -> None:
    said = run("plan", llama, "--budget", "600kB", "--dtype", "float32", code=3)
    assert "streamload.offload in Python, which plan shows with --offload (" in said
    assert "streamload.plan_offload" not in said
    said = run("plan", llama, "--budget", "1kB", "--dtype", "float32", code=3)
    assert "--offload" not in said
    said = run("plan", llama, "--budget", "9MB", "--stay", "lm_head.*", "--host", "1MB", code=2)
    assert "only with --offload" in said


@pytest.mark.slow
def test_bench_measures_passes_with_what_offload_takes(llama: Path, tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    asked = ("--tokens", "4", "--runs", "2", "--no-progress", "--json", written)
    budgets = ("--device", "cpu", "--budget", "9MB,20MB")
    run("bench", llama, "--offload", *budgets, *asked)
    plain = json.loads(written.read_text())["points"]
    assert [bool(point["pass_nbytes"]) for point in plain] == [True, False]
    run("bench", llama, "--offload", *budgets, *asked, "--stay", "*", "--host", "1MB")
    assert "does not fit" in json.loads(written.read_text())["points"][0]["problem"]
    said = run("bench", llama, "--stay", "lm_head.*", code=2)
    assert "only with --offload" in said


def test_the_command_line_imports_offloading_when_it_is_asked_for() -> None:
    """It took 20 to 50 ms of each command."""
    seen = "any('streamload.offloading' in name for name in sys.modules)"
    assert forked.fresh(f"import sys, streamload.cli; print({seen})") == "False\n"
