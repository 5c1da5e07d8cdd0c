"""What a load really takes, by the kernel's counters as another process reads them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from bench_parts.section import measure
from make_checkpoint import make_checkpoint, shape_of_size
from parameters import product
from safetensors_files import write_safetensors

from streamload.bench.processes import call
from streamload.core.dtypes import BF16
from streamload.core.memory import HostMemory
from streamload.devices.probing import probe
from streamload.errors import PlanInfeasibleError
from streamload.loading import prepare
from streamload.loading.load import read_call
from streamload.loading.options import Options

NBYTES = 200_000_000
MEDIUM_NBYTES = 20_000_000
SMALL_NBYTES = 1_000_000
SLACK_NBYTES = 64_000_000
DEVICES = ("CL", "CPU", "host")
# in the fast suite one device of tinygrad stands for both
FEWER_DEVICES = ("CL", pytest.param("CPU", marks=pytest.mark.slow), "host")
READERS = ("mmap", "pread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints: "large", "sharded" (as large, in five files), "medium" and "small"."""
    root = tmp_path_factory.mktemp("memory")
    for name, nbytes, shards in (
        ("large", NBYTES, 1),
        ("sharded", NBYTES, 5),
        ("medium", MEDIUM_NBYTES, 1),
        ("small", SMALL_NBYTES, 1),
    ):
        make_checkpoint(root / name, shape_of_size(nbytes, BF16), shards=shards)
    return root


def _peak_nbytes(path: Path, device: str, loads: int = 1, **arguments: Any) -> int:
    """Peak RssAnon + RssShmem of a process that loads a checkpoint, from its start to its end."""
    framework = "host" if device == "host" else "tinygrad"
    result = probe(framework, device)
    if not result.works:
        needs.lacking(f"{device}: {result.problem}")
    job = call("bench_parts.jobs:streamload", path=str(path), device=device, **arguments)
    return measure(job, laps=loads, sample_s=0.0005).peak.anon_nbytes


@cache
def _least_nbytes(path: Path, device: str, reader: str) -> int:
    """The peak of loading almost nothing: interpreter, libraries, drivers, the same casts."""
    return _peak_nbytes(path, device, reader=reader)


@pytest.mark.parametrize(
    ("device", "reader", "threads"),
    product(
        DEVICES,
        READERS,
        [1, 2],
        fast=lambda device, reader, threads: (device, reader, threads) == ("CL", "mmap", 2),
    ),
)
def test_a_load_takes_the_weights_and_little_more(
    folder: Path, device: str, reader: str, threads: int
) -> None:
    least = _least_nbytes(folder / "small", device, reader)
    peak = _peak_nbytes(folder / "large", device, reader=reader, threads=threads)
    assert peak <= least + NBYTES + SLACK_NBYTES


@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_shards_take_no_more(folder: Path, device: str) -> None:
    least = _least_nbytes(folder / "small", device, "mmap")
    peak = _peak_nbytes(folder / "sharded", device, reader="mmap")
    assert peak <= least + NBYTES + SLACK_NBYTES


def test_chunks_take_no_memory(folder: Path) -> None:
    """Of 20,000 chunks that a load is cut into only those under way are there."""
    least = _least_nbytes(folder / "medium", "host", "mmap")
    peak = _peak_nbytes(folder / "medium", "host", reader="mmap", chunk_nbytes=1000)
    assert peak <= least + 3_000_000


@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_loading_again_takes_no_more(folder: Path, device: str) -> None:
    least = _least_nbytes(folder / "small", device, "mmap")
    peak = _peak_nbytes(folder / "large", device, reader="mmap", loads=2)
    assert peak <= least + NBYTES + SLACK_NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("device", FEWER_DEVICES)
def test_old_weights_do_not_stand_beside_new_ones(folder: Path, device: str) -> None:
    least = _least_nbytes(folder / "small", device, "mmap")
    # twice: a model's kernels are compiled once on a machine, by a compiler that takes 70 MB
    times = 1 if device == "host" else 2
    peaks = [
        _peak_nbytes(folder / "large", device, reader="mmap", model="float32") for _ in range(times)
    ]
    peak = min(peaks)
    assert peak <= least + 2 * NBYTES + SLACK_NBYTES


# Gives what it needs under a limit of the system: the sum of the first elements, or an error.
LIMITED = """
import json, resource, sys
import streamload
from streamload.errors import PlanInfeasibleError, StreamloadError

path, how, limit, room, options = sys.argv[1:]
options = json.loads(options)
streamload.load_state_dict(None, path, device="host", progress=False, dtype="checkpoint")
room = int(room)
if limit == "RLIMIT_AS":
    with open("/proc/self/statm") as file:
        room += int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(getattr(resource, limit), (room, room))


def total(pairs):
    return sum(float(tensor.reshape(-1)[0]) for _, tensor in pairs)


try:
    if how == "stream_layers":
        budget = {"budget": "300kB"}
        with streamload.stream_layers(path, device="host", **budget, **options) as layers:
            totals = {total(p for _, each in layers for p in each.items()) for _ in range(2)}
        print("views" if layers.plan.views else "slots", *totals)
    else:
        report = streamload.load_state_dict(None, path, device="host", progress=False, **options)
        print(report.plan.readers[0], total(report.state_dict.items()))
except PlanInfeasibleError as error:
    print("refused:", error)
except StreamloadError as error:
    print("failed:", error)
"""


def _limited(path: Path, how: str, limit: str, room: int, **options: Any) -> str:
    command = [sys.executable, "-c", LIMITED, path, how, limit, str(room), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("aligned", [True, False])
def test_more_files_than_may_be_open(tmp_path: Path, aligned: bool) -> None:
    for n in range(147):
        path = tmp_path / f"model-{n + 1:05d}-of-00147.safetensors"
        weights = {f"model.layers.{n}.w": ("F32", (4096,), np.full(4096, n, np.float32).tobytes())}
        start = write_safetensors(path, weights).stat().st_size - 4 * 4096
        write_safetensors(path, weights, pad_nbytes=-start % 64 + 4 * (not aligned))
    wanted = sum(range(147))
    for how, options, said in (
        ("load", {}, "mmap"),
        ("load", {"residence": "mapped"}, "mmap"),
        ("stream_layers", {}, "views" if aligned else "slots"),
        ("stream_layers", {"host": "10MB"}, "views"),
    ):
        found = _limited(tmp_path, how, "RLIMIT_NOFILE", 64, dtype="checkpoint", **options)
        assert found == f"{said} {wanted:.1f}", (how, options)


def test_a_limit_of_addresses(tmp_path: Path) -> None:
    """Files are read where they cannot be mapped; what does not fit is refused before that."""
    path, nbytes = tmp_path / "model.safetensors", 100_000_000
    ones = np.ones(nbytes // 40, np.float32).tobytes()
    write_safetensors(path, {f"{n}.w": ("F32", (nbytes // 40,), ones) for n in range(10)}, align=0)

    def load(room: float, **options: Any) -> str:
        return _limited(path, "load", "RLIMIT_AS", int(room * nbytes), **options)

    assert load(4) == "mmap 10.0"
    assert load(1.9) == "pread 10.0"
    assert load(1.4) == "pread 10.0"
    assert load(0.9).startswith("refused: does not fit on host: needs 100.00 MB")
    assert load(1.4, residence="mapped") == "mmap 10.0"
    for options in ({"residence": "mapped"}, {"reader": "mmap"}):
        found = load(0.9 if "residence" in options else 1.9, budget="1GB", **options)
        assert "refused: does not fit on host" in found
        assert "the rest of RLIMIT_AS is" in found
        assert ('reader="pread"' in found) == ("reader" in options)


@pytest.mark.parametrize("device", ["host", "CL"])
def test_more_memory_never_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Nor where to compile the casts takes some of it after the devices were looked at."""
    if device != "host" and not probe("tinygrad", device).works:
        needs.lacking(device)
    free = {"nbytes": 0}
    compiler = prepare.host_engine

    def compile_casts(*arguments: Any, **options: Any) -> Any:
        free["nbytes"] -= 7_000_000
        return compiler(*arguments, **options)

    monkeypatch.setattr(prepare, "host_engine", compile_casts)
    monkeypatch.setattr(prepare, "has_room_to_try", lambda parameters: False)
    monkeypatch.setattr(HostMemory, "available_nbytes", lambda self: free["nbytes"])
    make_checkpoint(tmp_path, shape_of_size(40_000_000, BF16))
    given = {"device": device, "budget": "1TB", "quant": "nf4", "reader": "pread"}
    call = read_call(tmp_path, Options.parse(given))
    fits = []
    for nbytes in range(30_000_000, 130_000_000, 1_000_000):
        free["nbytes"] = nbytes
        place = prepare.Place.look(None, call.checkpoint, call.options)
        try:
            prepare.Decision.make(place, call, None)
            fits.append(True)
        except PlanInfeasibleError:
            fits.append(False)
    assert sorted(fits) == fits
    assert not fits[0]
    assert fits[-1]
