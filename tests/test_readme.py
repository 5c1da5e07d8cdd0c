"""The README is true: its examples run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import needs
import pytest

_ROOT = Path(__file__).parent.parent
_BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", (_ROOT / "README.md").read_text(), re.S)
_PYTHON = [text for kind, text in _BLOCKS if kind == "python" and ".cache/demo" in text]
_COMMANDS = [
    line.partition("#")[0].strip()
    for kind, text in _BLOCKS
    if kind == "sh"
    for line in text.splitlines()
    if line.startswith("streamload ")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `scripts/demo` leaves it: a checkpoint in .cache/demo, scripts beside it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "scripts").symlink_to(_ROOT / "scripts")
    make = [sys.executable, str(_ROOT / "scripts/make_checkpoint.py"), ".cache/demo"]
    (folder / ".cache").mkdir()
    subprocess.run([*make, "--size", "110MB"], cwd=folder, check=True, capture_output=True)
    return folder


def _run(argv: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
    }
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True)


def test_readme_has_the_examples_that_it_should() -> None:
    """Models of three kinds, a state dict, files, devices, and the commands."""
    assert len(_PYTHON) == 10
    commands = {"inspect", "plan", "load", "devices", "bench", "convert", "verify", "diff"}
    assert {shlex.split(c)[1] for c in _COMMANDS} == commands


@pytest.mark.parametrize("text", _PYTHON, ids=lambda text: text.split('", ')[0][-30:].strip())
def test_python_examples_run(text: str, folder: Path) -> None:
    """Every Python example that names the demo's checkpoint ends without an error."""
    for name in ("torch", "transformers", "accelerate"):
        if f"import {name}" in text or f"from {name}" in text or f"{name}_" in text:
            needs.module(name)
    done = _run([sys.executable, "-c", text], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("command", _COMMANDS)
def test_commands_run(command: str, folder: Path) -> None:
    """Every command of the README ends with exit code 0."""
    done = _run([sys.executable, "-m", *shlex.split(command)], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
