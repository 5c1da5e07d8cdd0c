"""``scripts/gpu``, without a GPU: what it says of results, of crashes, and of its time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import make_checkpoint as mk
import needs
import pytest
from gpu_parts import main, state

from streamload.core.dtypes import BF16

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu"
CRASHES = """
import ctypes
def row(**arguments):
    laps = iter([{"step": "open"}])
    return lambda: next(laps, None) or ctypes.string_at(0)
"""
TESTS = """
import ctypes, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2, "the reason"
def test_is_skipped(): pytest.skip("bitsandbytes is not installed")
@pytest.fixture
def broken(): raise OSError("no fixture")
def test_lacks(broken): pass
"""


# --- --check --------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for room in state.ROOMS:
        folder = tmp_path / "streamload" / room / "deeper"
        folder.mkdir(parents=True)
        (folder / "one.py").write_text(f"# {room}\n")
    (tmp_path / "tests/devices").mkdir(parents=True)
    (tmp_path / "tests/devices/test_one_cuda.py").write_text("")
    write(tmp_path)
    return tmp_path


def write(tree: Path, **changes: Any) -> None:
    rooms = state.digests(tree)
    counts = {"passed": 2, "failed": 0, "skipped": 0, "skips": {}, "ended": ""}
    found = {
        "rooms": rooms,
        "digest": state.digest(rooms),
        "rehearsed": False,
        "rows": [{"name": name, "right": True, "wrong": ""} for name in state.ROWS],
        "tests": [{"file": file, **counts} for file in state.test_files(tree)],
    }
    (tree / "gpu.json").write_text(json.dumps(found | changes))


def problems(tree: Path) -> list[str]:
    return state.problems(tree / "gpu.json", tree)


def test_results_of_todays_sources_have_no_problem(tree: Path) -> None:
    assert problems(tree) == []


@pytest.mark.parametrize("change", ["edit", "add", "remove", "rename"])
def test_a_changed_room_is_named(tree: Path, change: str) -> None:
    path = tree / "streamload/streaming/deeper/one.py"
    (path.parent / "notes.txt").write_text("no source")
    (tree / "streamload/formats").mkdir()
    (tree / "streamload/formats/one.py").write_text("")
    assert problems(tree) == []
    if change == "edit":
        path.write_text("# other\n")
    elif change == "add":
        (path.parent / "two.py").write_text("")
    elif change == "remove":
        path.unlink()
    else:
        path.rename(path.with_name("two.py"))
    (only,) = problems(tree)
    assert only.startswith("streamload/streaming has changed")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (None, "not run"),
        ({"right": False, "wrong": "killed by SIGSEGV after open"}, "killed by SIGSEGV"),
        ({"right": False, "wrong": "No module named 'diffusers'"}, "No module named 'diffusers'"),
        ({"right": False}, "not right"),
    ],
)
def test_a_row_that_is_not_right_is_named(
    tree: Path, row: dict[str, Any] | None, expected: str
) -> None:
    """One that is missing, crashed, failed for what a machine must have, or does not say."""
    rows = [{"name": name, "right": True} for name in state.ROWS[1:]]
    write(tree, rows=rows + ([{"name": state.ROWS[0], **row}] if row else []))
    (only,) = problems(tree)
    assert only.startswith(f"{state.ROWS[0]}: {expected}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"failed": 1}, "1 failed"),
        ({"ended": "killed by SIGSEGV"}, "killed by SIGSEGV"),
        ({"passed": 0, "skipped": 1, "skips": {"no CUDA device here": 1}}, "nothing was tested"),
        ({"passed": 0, "skipped": 1, "skips": {"no two CUDA devices here": 1}}, ""),
        ({"passed": 0}, "nothing was tested"),
    ],
)
def test_a_test_file_that_is_not_right_is_named(
    tree: Path, changes: dict[str, Any], expected: str
) -> None:
    """A file of which nothing ran shows nothing, unless it needs what need not be there."""
    (test,) = json.loads((tree / "gpu.json").read_text())["tests"]
    write(tree, tests=[test | changes])
    assert problems(tree) == [f"{test['file']}: {expected}"] * bool(expected)


def test_a_test_file_that_is_new_has_not_run(tree: Path) -> None:
    (tree / "tests/devices/test_two_cuda.py").write_text("")
    assert problems(tree) == ["tests/devices/test_two_cuda.py: not run"]


def test_a_rehearsal_shows_nothing(tree: Path) -> None:
    """Nor does a file that says nothing of it, or is missing or broken."""
    write(tree, rehearsed=True)
    assert ["rehearsal" in problem for problem in problems(tree)] == [True]
    (tree / "gpu.json").write_text("{}")
    assert any("rehearsal" in problem for problem in problems(tree))
    (tree / "gpu.json").write_text("{")
    assert "is not JSON" in problems(tree)[0]
    (tree / "gpu.json").unlink()
    assert "is missing" in problems(tree)[0]


def test_check_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """Of this checkout: exit status 0 if all is right, 1 and the room if it is not."""
    rooms = state.digests()
    counts = {"passed": 2, "failed": 0, "skipped": 0, "skips": {}, "ended": ""}
    found = {
        "rooms": rooms,
        "digest": state.digest(rooms),
        "rehearsed": False,
        "rows": [{"name": name, "right": True} for name in state.ROWS],
        "tests": [{"file": file, **counts} for file in state.test_files()],
    }
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-S", SCRIPT, "--check", "--json", out]
    for digest, code in ((rooms["devices"], 0), ("0", 1)):
        rooms["devices"] = digest
        found["digest"] = state.digest(rooms)
        out.write_text(json.dumps(found))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done
        assert ("streamload/devices has changed" in done.stdout) == bool(code)


def test_files_that_need_a_gpu_have_a_name_that_is_found() -> None:
    found = set(state.test_files())
    assert "tests/offloading/test_offload_cuda.py" in found
    asks = re.compile(r"if not torch\.cuda\.is_available\(\)|if torch\.cuda\.device_count\(\) <")
    files = {path for path in (ROOT / "tests").rglob("test_*.py") if asks.search(path.read_text())}
    assert {path.relative_to(ROOT).as_posix() for path in files} <= found


# --- the run --------------------------------------------------------------------------------------


def made_run(folder: Path, seconds: float = 100.0) -> main.Run:
    until = time.monotonic() + seconds
    found: dict[str, Any] = {"rows": [], "tests": []}
    return main.Run(folder / "gpu.json", until, folder, "cpu", True, found)


def test_a_crash_is_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "crashes.py").write_text(CRASHES)
    monkeypatch.syspath_prepend(tmp_path)
    run = made_run(tmp_path)
    trace = {"trace": str(tmp_path / "trace")}
    rows = [
        main._Row("load, 1 shard", "crashes:row", trace, ()),
        main._Row("load, 4 shards", "nowhere:row", trace, ()),
    ]
    monkeypatch.setattr(main, "_all_rows", lambda run, only: rows)
    main._rows(run, "*")
    found = {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}
    assert "killed by SIGSEGV" in state.row_problem(found["load, 1 shard"])
    assert found["load, 1 shard"]["wrong"].endswith("after open")
    assert "nowhere" in state.row_problem(found["load, 4 shards"])


@pytest.mark.parametrize("crash", [False, True])
def test_outcomes_of_a_test_file(tmp_path: Path, crash: bool) -> None:
    """Counts, reasons and failures; of a file that crashes, those until then and its last test."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # names are relative to its folder
    file = tmp_path / "test_some.py"
    file.write_text(TESTS + "def test_z(): ctypes.string_at(0)\n" * crash)
    run = made_run(tmp_path)
    main._tested(run, str(file), time.monotonic() + 100)
    (test,) = json.loads((tmp_path / "gpu.json").read_text())["tests"]
    assert [test[key] for key in ("passed", "failed", "skipped")] == [1, 2, 1]
    assert list(test["skips"]) == ["bitsandbytes is not installed"]
    assert "the reason" in test["failures"]["test_some.py::test_fails"]
    assert "no fixture" in test["failures"]["test_some.py::test_lacks"]
    assert test["ended"] == ("killed by SIGSEGV in test_some.py::test_z" if crash else "")


def test_a_test_file_that_hangs_is_ended(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "test_some.py"
    file.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(60)\n")
    run = made_run(tmp_path)
    begun = time.monotonic()
    main._tested(run, str(file), begun + 8)
    assert time.monotonic() - begun < 40
    (test,) = run.found["tests"]
    assert (test["passed"], test["ended"]) == (1, "out of time in test_some.py::test_b")


def test_files_that_measure_the_devices_memory_run_alone() -> None:
    """Beside those whose driver is a stand-in; the long ones first of the others."""
    alone, beside, others = main.parted(state.test_files())
    assert alone == ["tests/bench/test_bench_cuda.py", "tests/devices/test_tinygrad_cuda.py"]
    assert "tests/devices/test_integrated_cuda.py" in beside
    asks = re.compile(r"mem_get_info|device_meter|info\.free_nbytes")
    assert [file for file in others if asks.search((ROOT / file).read_text())] == []
    assert others[0] == "tests/streaming/test_stream_readers_cuda.py"
    assert sorted(alone + beside + others) == state.test_files()


def test_the_checkpoint_has_layers_that_span_files() -> None:
    shapes = mk.PRESETS["llama-3-8b"].tensors()
    sizes = {name: BF16.nbytes(math.prod(shape)) for name, shape in shapes.items()}
    parts = mk._split(sizes, 4)
    layers = [{name.rpartition(".layers.")[2].split(".")[0] for name in part} for part in parts]
    assert sum(bool(before & after) for before, after in pairwise(layers)) == 2


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_wrong_weights_are_told_from_rounding(tmp_path: Path, kind: str) -> None:
    """A scale or a row of one layer, and another rounding of all; sums in other orders are none."""
    torch = needs.module("torch")
    from gpu_parts import jobs

    path, out = str(tmp_path / "llama"), tmp_path / "expected.pt"
    mk.make_checkpoint(Path(path), mk.shape_of_size(8_000_000, BF16))
    jobs._expect(path, "cpu", kind, str(out), (32,))
    wanted = torch.load(out)
    change = jobs._CHANGES[kind]

    def problems(change: Callable[[str, Any], Any], dtype: Any = torch.bfloat16) -> list[str]:
        model = jobs._plain(path, "cpu", dtype, change)
        ids = jobs.ids_of(wanted["vocabulary"], 32, "cpu")
        found = jobs.products(model, list(wanted["products"]), ids[:, :16])
        most = jobs.ROWS_TIMES * wanted["rows error"]
        logits, most_logits = wanted["logits 32"], jobs.LOGITS_TIMES * wanted["error 32"]
        whys = jobs.difference(jobs.logits_of(model, ids), logits, most_logits)[0]
        return [jobs.unlike(found, wanted["products"], most), whys]

    assert problems(change) == ["", ""]
    # float16 has rounding errors of its own, as kernels that sum in another order have
    assert problems(change, torch.float16) == ["", ""]

    def scaled(name: str, weight: Any) -> Any:
        weight = change(name, weight).clone()
        if name == "model.layers.1.mlp.up_proj.weight":
            weight[5, 64:128] *= 1.5
        return weight

    def moved(name: str, weight: Any) -> Any:
        weight = change(name, weight).clone()
        if name == "model.layers.1.mlp.up_proj.weight":
            weight[5] = weight[6]
        return weight

    for wrong in (scaled, moved):
        assert "model.layers.1.mlp.up_proj: row 5" in problems(wrong)[0]
    assert any("differs" in why for why in problems(jobs._as_stored))
    other = jobs.int8 if kind == "nf4" else jobs.nf4
    assert all("differs" in why for why in problems(other))
    assert all(problems(lambda name, weight: change(name, weight) * torch.nan))
    assert "no product" in jobs.unlike({}, wanted["products"], 1.0)


@pytest.mark.slow
def test_rows_run_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--rehearse", "--only", "*, 4 shards"]
    command += ["--json", out, "--work", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == sorted(state.ROWS[1::2])
    for row in found["rows"]:
        assert not state.row_problem(row), (row, done.stderr)
    assert done.returncode == 0, done.stderr
    assert found["rehearsed"] and found["digest"] == state.digest(state.digests())
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


@pytest.mark.slow
def test_rows_of_two_gpus_run_without_one(tmp_path: Path) -> None:
    """Two ranks over gloo, and models beside each other on the CPU."""
    needs.module("transformers")
    out = tmp_path / "two.json"
    command = [sys.executable, SCRIPT, "--two", "--rehearse", "--only", "*two*"]
    command += ["--json", out, "--work", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    found = json.loads(out.read_text())
    assert {"two ranks, layers", "two ranks, tensor", "two ranks, offload"} <= {
        row["name"] for row in found["rows"]
    }
    for row in found["rows"]:
        assert not state.row_problem(row), (row, done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_ends_in_time(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, SCRIPT, "--rehearse", "--minutes", "0.4", "--json", out]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert time.monotonic() - begun < 50
    assert done.returncode == 1
    assert "out of time" in done.stdout + done.stderr
    assert json.loads(out.read_text())["rehearsed"]
