"""The box that kills: tinygrad's own load and streamload's in one small memory cgroup."""

from __future__ import annotations

import compileall
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import needs
import pytest
from bench_parts.section import forget
from box_load import run_boxed
from boxes import Boxes, BoxRun
from make_checkpoint import ManyTensors, make_checkpoint, shape_of_size
from parameters import product
from safetensors_files import write_safetensors

import streamload
from streamload.bench.processes import call, command
from streamload.core.dtypes import BF16
from streamload.devices.probing import probe
from streamload.verification.diff import diff

BOX_NBYTES = 400_000_000
FITS_NBYTES = 280_000_000
SMALL_BOX_NBYTES = (
    140_000_000  # half of that checkpoint, and enough for a driver and an interpreter
)
DEVICES = ("CL", "CPU", "host")

# Runs its arguments in a cgroup without a limit of its own, below the one that it is in.
NESTED = """
import subprocess, sys, time
from pathlib import Path

groups = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
(name,) = {Path(group).name for group in groups if Path(group).name.startswith("streamload-")}
inner = next(Path("/sys/fs/cgroup").rglob(name)) / "inner"
inner.mkdir()
enter = 'echo $$ >"$0" && exec "$@"'
done = subprocess.run(["sh", "-c", enter, inner / "cgroup.procs", *sys.argv[1:]])
while inner.exists():
    try:
        inner.rmdir()
    except OSError:  # the kernel is still taking the process apart
        time.sleep(0.01)
sys.exit(done.returncode)
"""


# Holds arrays for a checkpoint, and loads it into them where a second argument says so.
IN_PLACE = """
import sys
import numpy as np
import streamload
from streamload.errors import PlanInfeasibleError

checkpoint = streamload.open_checkpoint(sys.argv[1])
arrays = {t.name: np.full(t.shape, 1, t.dtype.numpy) for t in checkpoint.tensors.values()}
nbytes = sum(array.nbytes for array in arrays.values())
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM:")))
if len(sys.argv) > 2:
    try:
        report = streamload.load_state_dict(
            arrays, checkpoint, budget=nbytes + 2**21, dtype="checkpoint", reader=sys.argv[2]
        )
    except PlanInfeasibleError as error:
        sys.exit(f"refused: {error}")
    assert {p.action for p in report.plan.placements} == {"in_place"}
    print("loaded by", *report.plan.readers)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint whose data begins at 8 modulo 16, where tinygrad copies every source."""
    out = tmp_path_factory.mktemp("box") / "checkpoint"
    make_checkpoint(out, shape_of_size(FITS_NBYTES, BF16), offset_mod_16=8)
    return out


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "memory"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True)
    if mount.returncode:
        needs.lacking(f"no tmpfs can be mounted: {mount.stderr.decode()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def _works(device: str) -> str:
    framework = "host" if device == "host" else "tinygrad"
    result = probe(framework, device)
    if not result.works:
        needs.lacking(f"{device}: {result.problem}")
    return device


def _load(path: Path, device: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", "streamload", "load", str(path), "--device", device]
    return [*command, "--no-progress", *options]


def _job(name: str, **arguments: Any) -> list[str]:
    return command(call(f"bench_parts.jobs:{name}", **arguments), at_once=True)


def _run(cgroup: Boxes, command: Sequence[str], limit_nbytes: int) -> BoxRun:
    return cgroup.run(command, limit_nbytes)


def test_the_box_kills_the_usual_load(cgroup: Boxes, checkpoint: Path) -> None:
    """tinygrad's safe_load, a cast and load_state_dict to OpenCL are killed for memory."""
    _works("CL")
    file = checkpoint / "model.safetensors"
    done = _run(cgroup, _job("tinygrad", path=str(file), device="CL", way="cast"), BOX_NBYTES)
    assert done.oom_killed
    assert done.returncode == -9


@pytest.mark.parametrize(
    ("device", "reader"),
    product(
        DEVICES,
        ["mmap", "pread"],
        fast=lambda device, reader: (device, reader) in {("CL", "mmap"), ("host", "pread")},
    ),
)
def test_streamload_finishes_in_the_box(
    cgroup: Boxes, checkpoint: Path, device: str, reader: str
) -> None:
    options = ("--budget", "290MB", "--reader", reader, "--verify")
    done = _run(cgroup, _load(checkpoint, _works(device), *options), BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert "verified:" in done.stdout


@pytest.mark.parametrize("reader", ["mmap", pytest.param("pread", marks=pytest.mark.slow)])
def test_a_file_that_is_not_cached_is_no_burden(
    cgroup: Boxes, checkpoint: Path, reader: str
) -> None:
    """Pages of the file that are read in the box, and charged to it, make way for weights."""
    _works("CL")
    forget(checkpoint)
    options = ("--budget", "290MB", "--reader", reader, "--verify")
    done = _run(cgroup, _load(checkpoint, "CL", *options), BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert "verified:" in done.stdout


@pytest.mark.parametrize(
    ("device", "budget"),
    product(
        DEVICES,
        [None, "1GB"],
        fast=lambda device, budget: device == "CL" or (device == "CPU") == (budget is None),
    ),
)
def test_twice_the_box_is_refused(
    cgroup: Boxes, checkpoint: Path, device: str, budget: str | None
) -> None:
    options = ("--budget", budget) if budget else ()
    done = _run(cgroup, _load(checkpoint, _works(device), *options), SMALL_BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (3, False), done.stderr
    assert "does not fit" in done.stderr
    if budget is None:
        assert "the free memory less a reserve of " in done.stderr


@pytest.mark.slow
def test_small_chunks_fit_where_large_ones_do(cgroup: Boxes, checkpoint: Path) -> None:
    """280,000 chunks cost time, and no memory."""
    options = {"device": "host", "budget": "290MB", "chunk_nbytes": 1000}
    done = _run(cgroup, _job("streamload", path=str(checkpoint), **options), 350_000_000)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr


def test_without_a_budget_what_fits_is_loaded(cgroup: Boxes, checkpoint: Path) -> None:
    """The budget that is guessed leaves enough alone for the load to end."""
    _works("CL")
    done = _run(cgroup, _load(checkpoint, "CL", "--verify"), BOX_NBYTES + 40_000_000)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr


def test_the_limit_of_a_group_above_counts(cgroup: Boxes, checkpoint: Path) -> None:
    """In a cgroup without a limit, below one with a limit, that limit is what is free."""
    command = [sys.executable, "-c", NESTED, *_load(checkpoint, "host")]
    done = _run(cgroup, command, SMALL_BOX_NBYTES)
    assert (done.returncode, done.oom_killed) == (3, False), done.stderr
    assert "does not fit" in done.stderr


@pytest.mark.parametrize("reader", ["auto", pytest.param("mmap", marks=pytest.mark.slow)])
def test_a_load_in_place_beside_little_free_memory_is_not_killed(
    cgroup: Boxes, checkpoint: Path, reader: str
) -> None:
    """Nothing is allocated, but a file that is not cached has to come through what is left."""
    measured = cgroup.run([sys.executable, "-c", IN_PLACE, str(checkpoint)], 2**30)
    held_nbytes = int(measured.stdout) * 1024
    outcomes = []
    for room_nbytes in (5_000_000, 15_000_000, 30_000_000, 100_000_000):
        forget(checkpoint)
        command = [sys.executable, "-c", IN_PLACE, str(checkpoint), reader]
        done = _run(cgroup, command, held_nbytes + room_nbytes)
        assert not done.oom_killed, room_nbytes
        outcomes.append(done.stdout.splitlines()[-1] if done.returncode == 0 else "refused")
        assert done.returncode == 0 or "refused: does not fit on host" in done.stderr
    if reader == "auto":
        assert "loaded by direct" in outcomes
    assert outcomes[-1] == "loaded by mmap"


# --- conversions and checks -----------------------------------------------------------------------

#: Of what is needed, the boxes to try: killed is what must not happen in any.
SHARES = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05)
_NUMBERS = re.compile(r"needs .*?(\d+) bytes.*? free memory is .*?(\d+) bytes")
HELD = """
import llvmlite.binding, llvmlite.ir
import streamload.cli.files, streamload.conversion.convert, streamload.verification.verify
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("RssAnon:")))
"""
# Runs a command in 1 GiB until it looks for room: what is taken then, and the least that it needs.
ASKED = """
import os, runpy
from streamload.core import memory

def first_that_fits(ways, *_, **__):
    print(2**30 - memory.available_host_nbytes(), ways[-1][1], flush=True)
    os._exit(0)

memory.first_that_fits = first_that_fits
runpy.run_module("streamload", run_name="__main__", alter_sys=True)
"""


def _command(name: str | Path, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "streamload", str(name), *map(str, arguments), "--no-progress"]


def _boxes(
    cgroup: Boxes, command: Sequence[str], shares: Sequence[float], made: Path
) -> Iterator[int]:
    # to compile a module takes more than the little room: none may be compiled in a box
    compileall.compile_dir(Path(streamload.__file__).parent, quiet=2)
    held = _run(cgroup, [sys.executable, "-c", HELD], 2**30)
    least = limit = int(held.stdout) * 1024 + 10_000_000  # the command line, and a little room
    while (done := _run(cgroup, command, limit)).returncode == 3:
        found = _NUMBERS.search(done.stderr)
        assert found is not None, done.stderr
        limit += int(found[1]) - int(found[2]) + 2**18
    assert not done.oom_killed, f"killed in {limit} bytes: {done.stderr}"
    assert limit > least, "what is needed is not known"
    shutil.rmtree(made, ignore_errors=True)
    yield from (max(least, int(share * limit)) for share in shares)


def _convert_in_boxes(
    cgroup: Boxes,
    source: Path,
    out: Path,
    shares: Sequence[float],
    *options: str,
    quant: str | None = None,
) -> list[int]:
    quantised = ("--quant", quant) if quant is not None else ()
    command = _command("convert", source, out, "--dtype", "float16", *quantised, *options)
    codes = []
    for limit_nbytes in _boxes(cgroup, command, shares, out):
        for cached in (True, False):
            forget(source)
            if cached:
                for file in source.glob("*.safetensors"):
                    file.read_bytes()
            done = _run(cgroup, command, limit_nbytes)
            assert not done.oom_killed, (limit_nbytes, cached, done.stderr)
            codes.append(done.returncode)
            if done.returncode:
                assert done.returncode == 3, done.stderr
                assert "does not fit on host" in done.stderr
                assert not out.exists()  # not a byte was written
            else:
                assert diff(source, out, dtype="float16", quant=quant, progress=False).ok
            shutil.rmtree(out, ignore_errors=True)
    return codes


def test_a_conversion_is_done_or_refused(cgroup: Boxes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_checkpoint(source, shape_of_size(40_000_000, BF16))
    # what the process itself takes differs by some 100 kB from one run to the next
    codes = _convert_in_boxes(cgroup, source, tmp_path / "out", (0.9, 1.01))
    assert codes == [3, 3, 0, 0]


@pytest.mark.parametrize("quant", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_a_conversion_to_memory_is_done_or_refused(
    cgroup: Boxes, tmp_path: Path, in_memory: Path, quant: str | None
) -> None:
    """Files on a tmpfs stay in the box's memory: they count, and the error says so."""
    source, out = tmp_path / "source", in_memory / "out"
    make_checkpoint(source, shape_of_size(60_000_000, BF16))
    shares = (0.7, 1.01)
    assert _convert_in_boxes(cgroup, source, out, shares, quant=quant) == [3, 3, 0, 0]
    command = _command("convert", source, out)
    done = _run(cgroup, command, 90_000_000)
    assert f"{out} is on tmpfs, which keeps files in memory: write to a disk" in done.stderr


def test_a_conversion_to_memory_takes_what_its_refusal_says(
    cgroup: Boxes, tmp_path: Path, in_memory: Path
) -> None:
    """Within 2%, with what opening and compiling took before, by the kernel's counters."""
    make_checkpoint(tmp_path / "source", shape_of_size(100_000_000, BF16))
    case = {"path": str(tmp_path / "source"), "convert": str(in_memory / "out"), "device": "host"}
    case |= {"state": "none", "options": {"dtype": "float16"}}
    found = run_boxed(cgroup, case, lambda charged: charged + 100_000_000)
    assert found["outcome"] == "refused", found
    predicted = found["room_nbytes"] + found["said"]["lacks_nbytes"]
    found = run_boxed(cgroup, case, lambda charged: charged + predicted + 500_000)
    assert found["outcome"] == "loaded", found
    assert predicted < 1.02 * found["charged_nbytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nbytes", "tensors", "options"),
    [
        (10**9, 0, ()),
        (10**9, 0, ("--max-shard-size", "20MB", "--verify")),
        (10**6, 0, ()),
        (64_000_000, 1_000, ()),
        (100_000_000, 50_000, ()),
        (20_000_000, 20_000, ("--json",)),
    ],
    ids=str,
)
def test_no_conversion_that_is_told_it_fits_is_killed(
    cgroup: Boxes, tmp_path: Path, nbytes: int, tensors: int, options: Sequence[str]
) -> None:
    """From 20% under what is needed to 5% over: done right, or refused."""
    source = tmp_path / "source"
    shape = ManyTensors(tensors, nbytes // tensors // 2) if tensors else shape_of_size(nbytes, BF16)
    make_checkpoint(source, shape)
    codes = _convert_in_boxes(cgroup, source, tmp_path / "out", SHARES, *options)
    assert codes[:2] == [3, 3]
    assert codes[-2:] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant", "count"),
    [
        ("nf4", 0),
        ("nf4-nested", 0),
        ("int8", 0),
        ("q8_0", 0),
        ("nf4-nested", 300),
        ("nf4-nested", 2_000),
    ],
    ids=str,
)
def test_no_conversion_that_quantizes_is_killed(
    cgroup: Boxes, tmp_path: Path, quant: str, count: int
) -> None:
    source = tmp_path / "source"
    if count:
        one = ("BF16", (64, 64), bytes(8192))
        tensors = {f"model.layers.{i}.mlp.up_proj.weight": one for i in range(count)}
        write_safetensors(source / "model.safetensors", tensors)
    else:
        make_checkpoint(source, shape_of_size(300_000_000, BF16))
    codes = _convert_in_boxes(cgroup, source, tmp_path / "out", SHARES, quant=quant)
    assert codes[:2] == [3, 3]
    assert codes[-2:] == [0, 0]


@pytest.mark.parametrize(
    "shares", [(0.5, 1.1), pytest.param((0.5, 0.9, 1.0, 1.1, 3.0), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        "conversion",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("digests", "differences")),
    ],
)
def test_a_check_is_done_or_refused(
    cgroup: Boxes, tmp_path: Path, name: str, shares: Sequence[float]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_checkpoint(source, shape_of_size(40_000_000, BF16))
    streamload.convert(source, out, dtype="float16", progress=False)
    arguments, right = {
        "digests": (("verify", out), 0),
        "conversion": (("verify", source, out, "--dtype", "float16"), 0),
        "differences": (("diff", source, out), 1),
    }[name]
    _check_in_boxes(cgroup, arguments, right, shares, (source, out))


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["nf4-nested", "int8"])
def test_a_check_of_what_was_quantized_is_done_or_refused(
    cgroup: Boxes, tmp_path: Path, quant: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    make_checkpoint(source, shape_of_size(40_000_000, BF16))
    streamload.convert(source, out, quant=quant, progress=False)
    shares = (0.5, 0.9, 1.0, 1.1, 3.0)
    _check_in_boxes(cgroup, ("verify", source, out, "--quant", quant), 0, shares, (source, out))


def _check_in_boxes(
    cgroup: Boxes,
    arguments: Sequence[str | Path],
    right: int,
    shares: Sequence[float],
    folders: Sequence[Path],
) -> None:
    """Check with shares of what is needed: the first is refused, the last done, none is killed."""
    command = _command(*arguments)
    asked = _run(cgroup, [sys.executable, "-c", ASKED, *command[3:]], 2**30)
    taken_nbytes, needed_nbytes = map(int, asked.stdout.split())
    codes = []
    for share in shares:
        for folder in folders:
            forget(folder)
        done = _run(cgroup, command, taken_nbytes + int(share * needed_nbytes))
        assert not done.oom_killed, share
        assert done.returncode in (3, right), done.stderr
        codes.append(done.returncode)
    assert codes[0] == 3
    assert codes[-1] == right
