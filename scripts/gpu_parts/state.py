"""What ``scripts/gpu`` runs, and whether ``docs/gpu.json`` is of today's sources.

Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "gpu.json"
#: Modules without which nothing runs.
NEEDED = (
    *("accelerate", "hypothesis", "ml_dtypes", "numpy", "pytest", "rich", "safetensors"),
    *("tinygrad", "torch", "transformers", "typer", "xxhash"),
)
#: Rooms of which a byte reaches a GPU, or decides where it goes.
ROOMS = (
    *("codecs", "core", "devices", "files", "loading"),
    *("offloading", "planning", "streaming", "transformers"),
)
SHARDS = (1, 4)
KINDS = (
    *("load", "from_pretrained", "offload, 1 token", "offload, 128 tokens", "stored nf4"),
    *("quant=nf4", "quant=int8", "mixture", "pipeline"),
)
ROWS = tuple(f"{kind}, {n} shard{'s' * (n > 1)}" for kind in KINDS for n in SHARDS)
#: Begin the reason of a test that was skipped and need not run.
MAY_LACK = ("bitsandbytes", "no two CUDA devices", "one CUDA device")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description="Run the CUDA tests, and loads and passes of real sizes beside plain torch, on "
        "a machine with one GPU; write docs/gpu.json.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run nothing: say whether the results are of today's sources, and right",
    )
    parser.add_argument(
        "--two",
        action="store_true",
        help="on a machine with two GPUs: what is spread over both, beside one; needs --json to "
        "keep results",
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="end by then, with what there is (9)"
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="rows and test files to run, such as 'offload*' or 'tests/*'; of others, results of "
        "the same sources are kept",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="tiny models on the CPU and no tests; results are kept with --json alone",
    )
    parser.add_argument("--json", type=Path, help="the file for results (docs/gpu.json)")
    parser.add_argument("--work", type=Path, help="a folder for 56 GB of files (/dev/shm)")
    parser.add_argument("--commit", help="the commit, where there is no git")
    args = parser.parse_args()
    if args.json is None and (args.check or not (args.rehearse or args.two)):
        args.json = RESULTS
    return args


def digests(root: Path = ROOT) -> dict[str, str]:
    """Return the SHA-256 of the Python sources of each room, by name."""
    found = {}
    for room in ROOMS:
        digest = hashlib.sha256()
        folder = root / "streamload" / room
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.as_posix()):
            data = path.read_bytes()
            digest.update(f"{path.relative_to(folder).as_posix()} {len(data)}\n".encode() + data)
        found[room] = digest.hexdigest()
    return found


def digest(rooms: Mapping[str, str]) -> str:
    """Return the SHA-256 over the digests of rooms."""
    lines = (f"{room} {rooms[room]}\n" for room in sorted(rooms))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_files(root: Path = ROOT) -> list[str]:
    """Return the test files that need a GPU, or a stand-in for its driver."""
    found = (root / "tests").rglob("test_*cuda*.py")
    return sorted(path.relative_to(root).as_posix() for path in found)


def problems(results: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """Return why a results file does not show that today's sources are right on a GPU."""
    run = "run scripts/gpu on a machine with a GPU"
    try:
        found: dict[str, Any] = json.loads(results.read_text())
    except FileNotFoundError:
        return [f"{results} is missing: {run}"]
    except ValueError as error:
        return [f"{results} is not JSON ({error}): {run}"]
    today, rooms = digests(root), found.get("rooms", {})
    wrong = [
        f"streamload/{room} has changed since: {run}"
        for room in today
        if rooms.get(room) != today[room]
    ]
    if found.get("digest") != digest(rooms):
        wrong.append(f"{results}: the digest is not that of its rooms")
    if found.get("rehearsed", True):
        wrong.append(f"{results} is of a rehearsal without a GPU: {run}")
    rows = {row["name"]: row for row in found.get("rows", [])}
    wrong += [f"{name}: {why}" for name in ROWS if (why := row_problem(rows.get(name)))]
    tests = {test["file"]: test for test in found.get("tests", [])}
    for file in test_files(root):
        if why := test_problem(tests.get(file)):
            wrong.append(f"{file}: {why}")
    return wrong


def row_problem(row: Mapping[str, Any] | None) -> str:
    """Return what is wrong with a row; "" if it is right."""
    if row is None:
        return "not run"
    return "" if row.get("right") is True else row.get("wrong") or "not right"


def test_problem(test: Mapping[str, Any] | None) -> str:
    """Return what is wrong with a test file; "" if all of it passed that can run here."""
    if test is None:
        return "not run"
    if test["ended"]:
        return str(test["ended"])
    if test["failed"]:
        return f"{test['failed']} failed"
    needless = all(why.startswith(MAY_LACK) for why in test["skips"])
    return "" if test["passed"] or (test["skipped"] and needless) else "nothing was tested"
