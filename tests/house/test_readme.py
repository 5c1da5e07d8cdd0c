"""The README and the pages of docs/ are true: their examples run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from options_table import on_page_markdown

from streamload.loading.options import OPTIONS

_ROOT = Path(__file__).parents[2]
_PAGES = {
    str(path.relative_to(_ROOT)): path.read_text()
    for path in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
}
#: Pages that only `scripts/test --all` runs: they take long.
_LONG_EXAMPLES = ("docs/options.md", "docs/recipes.md")
_LONG_COMMANDS = ("docs/commands.md",)
_BLOCK = re.compile(r"^( *)```(.*)\n((?s:.*?))^\1```$", re.M)

# Runs the blocks of a page, which it gets as a list, each with names of its own.
_RUN = """
import ast, sys
sys.path.insert(0, "")
for line, text in ast.literal_eval(sys.stdin.read()):
    print(f"-- line {line}", flush=True)
    exec(compile("\\n" * line + text, sys.argv[1], "exec"), {"__name__": "__main__"})
"""


def _blocks(page: str, kind: str) -> list[tuple[int, str]]:
    """The blocks of that kind, and how many lines stand before each."""
    text = _PAGES[page]
    return [
        (text.count("\n", 0, found.start(3)), textwrap.dedent(found[3]))
        for found in _BLOCK.finditer(text)
        if found[2] == kind
    ]


def _commands(page: str) -> list[str]:
    lines = [line for _, text in _blocks(page, "sh") for line in text.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.startswith("streamload ")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo"
    make = [sys.executable, str(_ROOT / "scripts/make_checkpoint.py"), str(path)]
    subprocess.run([*make, "--size", "110MB"], check=True, capture_output=True)
    return path


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    """A folder as `scripts/demo` leaves it: a checkpoint in .cache/demo, scripts beside it."""
    (tmp_path / "scripts").symlink_to(_ROOT / "scripts")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache/demo").symlink_to(checkpoint)
    return tmp_path


def _each(pages: Iterable[str], long: Sequence[str]) -> list[Any]:
    """Pages to run, the long ones with the slow tests."""
    return [pytest.param(page, marks=[pytest.mark.slow] * (page in long)) for page in pages]


def _run(argv: list[str], imported: tuple[str, ...], folder: Path, stdin: str = "") -> str:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT),
    }
    done = forked.run(argv, imported, cwd=folder, env=environment, input=stdin)
    assert done.returncode == 0, f"{shlex.join(argv[-3:])}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip()
    return done.stdout


def test_pages_have_the_examples_that_they_should() -> None:
    """Models of three kinds, a state dict, files, devices, and the commands."""
    python = {page: len(_blocks(page, "python")) for page in _PAGES}
    assert python["README.md"] >= 2
    assert sum(python.values()) >= 10
    starts = ("tinygrad", "torch", "transformers", "dicts", "clusters")
    assert all(python[f"docs/start/{name}.md"] for name in starts)
    commands = {"inspect", "plan", "load", "devices", "bench", "convert", "verify", "diff"}
    assert {shlex.split(c)[1] for c in _commands("docs/commands.md")} == commands


def test_blocks_are_run_or_say_that_they_are_not() -> None:
    for page, text in _PAGES.items():
        kinds = [found[2] for found in _BLOCK.finditer(text)]
        assert set(kinds) <= {"python", "sh", "text", "yaml"}, page
        assert 2 * len(kinds) == len(re.findall("^ *```", text, re.M)), page


@pytest.mark.parametrize(
    "page", _each((page for page in _PAGES if _blocks(page, "python")), _LONG_EXAMPLES)
)
def test_python_examples_run(page: str, folder: Path) -> None:
    blocks = _blocks(page, "python")
    imported = forked.COMMANDS
    for name in ("torch", "transformers", "accelerate"):
        used = (f"import {name}", f"from {name}", f"{name}_", f"streamload.{name}")
        if any(use in text for _, text in blocks for use in used):
            needs.module(name)
            imported = forked.TORCH
    for command in _commands(page):
        if shlex.split(command)[1] == "convert":  # blocks load what it writes
            _run([sys.executable, "-m", *shlex.split(command)], forked.COMMANDS, folder)
    said = _run([sys.executable, "-c", _RUN, page], imported, folder, repr(blocks))
    outputs = re.split(r"^-- line \d+\n", said, flags=re.M)[1:]
    assert len(outputs) == len(blocks)
    assert all(output.strip() for output in outputs)


@pytest.mark.parametrize(
    "page", _each((page for page in _PAGES if _commands(page)), _LONG_COMMANDS)
)
def test_commands_run(page: str, folder: Path) -> None:
    for command in _commands(page):
        _run([sys.executable, "-m", *shlex.split(command)], forked.COMMANDS, folder)


def test_every_option_has_a_row() -> None:
    made = on_page_markdown(_PAGES["docs/options.md"])
    assert re.findall(r"^\| `(\w+)` \| `", made, re.M) == [*OPTIONS]


def test_links_of_the_readme_lead_somewhere() -> None:
    """Files and headings that it names are there; those of docs/ are checked when it is built."""
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", _PAGES["README.md"])
    assert any(link.startswith("docs/") for link in links)
    for link in links:
        path, _, anchor = link.partition("#")
        assert (_ROOT / path).is_file(), link
        headings = re.findall("^#+ (.*)$", _PAGES[path], re.M) if anchor else []
        assert not anchor or anchor in {h.lower().replace(" ", "-") for h in headings}, link
