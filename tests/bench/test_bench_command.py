"""``streamload bench``: real loads in real processes; how fast they are is for people to judge."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import needs
import pytest
from bench_parts.compared import Compared, Comparing
from bench_parts.section import measure

from streamload.bench import limits
from streamload.bench.compare import Options, choose, compare, cuda_index, forget, warm
from streamload.bench.loaders import CHECKED_TENSORS, LOADERS, OURS, Load, sample
from streamload.bench.processes import Child, MeasurementError, call, load_job, process_memory
from streamload.core.chart import Bars, draw
from streamload.core.memory_rate import kept_rate
from streamload.devices.host import HostDevice
from streamload.errors import DeviceError
from streamload.files.page_cache import resident_fraction

MIB = 2**20


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamload", "bench", *arguments]
    return forked.run(command, forked.COMMANDS)


def job_of(path: Path, loader: str = OURS, **task: str) -> dict[str, Any]:
    files = [str(file) for file in sorted(path.glob("*.safetensors"))]
    given = {"path": str(path), "files": files, "framework": "host", "device": "host", **task}
    return load_job(loader, **given)


def site(folder: Path, text: str) -> str:
    folder.mkdir()
    (folder / "ml_dtypes.py").write_text(text)
    return str(folder)


@pytest.mark.slow
def test_the_command_compares_and_writes(tmp_checkpoint: Callable[..., Path]) -> None:
    """A table, JSON and a chart; the tensors of each loader are those of the files."""
    path = tmp_checkpoint(3_000_000, shards=2, dtype="float16")
    out, chart = path / "bench.json", path / "bench.svg"
    arguments = ("--device", "host", "--runs", 1, "--cold", "--peers", "numpy")
    done = run(path, *arguments, "--json", out, "--svg", chart)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["device"], found["files"], found["dtype"]) == ("host", 2, "checkpoint")
    assert found["machine"]["kernel"]
    assert {OURS, "numpy"} == set(found["loaders"])
    for of in found["loaders"].values():
        assert of["checked"] > 0
        assert [len(of["runs"][state]) for state in of["runs"]] == [1] * len(of["runs"])
        for state, summary in of["summary"].items():
            assert math.isfinite(summary["first"]["gigabytes_per_second"])
            assert (summary["again"] is not None) == (state == "warm")
    assert found["limits"]["warm, reading the page cache"]["median"] > 0
    assert found["shares"]["warm"]["share"] > 0
    for name in found["loaders"]:
        assert f"\n{name} " in done.stdout
    assert "cold, round 1 of 1: numpy" in done.stderr
    texts = {e.text for e in ElementTree.parse(chart).iter() if e.tag.endswith("}text")}
    assert {OURS, "numpy", "warm, again"} <= texts


#: What a loader's module may do when it is imported, and what is said of that.
BROKEN = {
    "raise RuntimeError('broken\\non purpose')": "RuntimeError: broken on purpose",
    "import not_there_at_all": "not installed: No module named 'not_there_at_all'",
    "import os; os.kill(os.getpid(), 11)": "killed by SIGSEGV",
    "print('words'); raise SystemExit(3)": "SystemExit: 3",
    "import os; os.write(2, b'last'); os._exit(3)": "exit status 3: last",
}


def test_a_process_that_fails_says_why(small_checkpoint: Path, tmp_path: Path) -> None:
    children = [
        Child(
            job_of(small_checkpoint, "numpy"),
            timeout_s=60,
            sites=[site(tmp_path / str(number), text)],
        )
        for number, text in enumerate(BROKEN)
    ]
    for child, why in zip(children, BROKEN.values(), strict=True):
        with child, pytest.raises(MeasurementError) as caught:
            child.ready()
        assert str(caught.value) == why


def test_a_loader_that_does_not_work_is_named(small_checkpoint: Path, tmp_path: Path) -> None:
    """The others are compared all the same, and the reason is one line."""
    text, why = next(iter(BROKEN.items()))
    options = Options(
        str(small_checkpoint),
        device="host",
        runs=1,
        peers=("numpy",),
        sites={"numpy": site(tmp_path / "site", text)},
        limits=False,
    )
    found = compare(options)
    assert found.skipped == {"numpy": why}
    assert list(found.loaders) == [OURS]
    assert f"not compared: numpy: {why}" in found.lines()


def test_safetensors_only_maps_on_the_cpu(small_checkpoint: Path) -> None:
    """Its tensors are views on its files, which is what is said of it there."""
    st = needs.module("safetensors.torch")
    file = next(small_checkpoint.glob("*.safetensors"))
    tensors = st.load_file(file)
    assert any(str(file) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert tensors and LOADERS["safetensors"].maps
    assert not any(loader.maps for name, loader in LOADERS.items() if name != "safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "noted"), [("checkpoint", True), ("bfloat16", False)])
def test_a_loader_that_only_maps_is_named(small_checkpoint: Path, dtype: str, noted: bool) -> None:
    """On the CPU that is no comparison of like with like; with a cast safetensors copies, too."""
    asked = {"device": "torch:cpu", "dtype": dtype, "runs": 1, "limits": False}
    found = compare(Options(str(small_checkpoint), peers=("safetensors",), **asked))
    assert {OURS, "safetensors"} == set(found.loaders)
    assert any("note: safetensors only maps" in line for line in found.lines()) == noted


def test_a_hanging_loader_leaves_nothing(small_checkpoint: Path, tmp_path: Path) -> None:
    wrote = tmp_path / "pid"
    folder = site(
        tmp_path / "site",
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        f"open({str(wrote)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n",
    )
    with Child(job_of(small_checkpoint, "numpy"), timeout_s=1, sites=[folder]) as child:
        with pytest.raises(MeasurementError, match="took longer than 1 s"):
            child.ready()
        for _ in range(1000):
            if wrote.exists() and wrote.read_text():
                break
            time.sleep(0.01)
        child.close(at_once=True)
    started = int(wrote.read_text())
    for _ in range(1000):
        stat = Path(f"/proc/{started}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("it runs still")


def test_memory_is_seen_from_outside(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(60_000_000)
    with Child(job_of(path), timeout_s=60) as child:
        assert child.ready()["versions"]["streamload"]
        first, memory = child.lap()
        again, _ = child.lap()
        assert child.check() == {"checked": CHECKED_TENSORS}
    assert 55_000_000 < memory.anon_nbytes < 60_000_000 + 64_000_000
    assert first["tensors"] == again["tensors"]
    assert first["says"]["read_nbytes"] <= 60_000_000
    assert process_memory("self").anon_nbytes > 10_000_000
    assert process_memory(2**30).anon_nbytes == 0


def test_wrong_bytes_are_found(small_checkpoint: Path) -> None:
    """A tensor that is not the file's, or is not there, is no measurement."""
    measured = Load("numpy", **job_of(small_checkpoint)["task"])
    measured()
    assert measured.check()["checked"] > 0
    assert measured._loaded is not None
    tensors = measured._loaded.tensors
    name = next(iter(tensors))
    flat = tensors[name].reshape(-1).view("u1")
    flat[0] ^= 1
    with pytest.raises(ValueError, match=f"{name} differs from the file"):
        measured.check()
    flat[0] ^= 1
    assert measured.check()["checked"] > 0
    del tensors[name]
    with pytest.raises(ValueError, match=r"loaded .* tensors of"):
        measured.check()


#: Prints what a lap of a job imports and starts; the job is the first argument.
WATCHED = """
import json, sys
from streamload.bench.loaders import Load

job = json.loads(sys.argv[1])
measured = Load(job["loader"], **job["task"])
before, started = set(sys.modules), []
sys.addaudithook(lambda event, said: event == "subprocess.Popen" and started.append(str(said[1])))
measured()
print(json.dumps([sorted(set(sys.modules) - before), started]))
"""


@pytest.mark.parametrize("device", ["host", pytest.param("CPU", marks=pytest.mark.slow)])
def test_only_the_load_is_timed(small_checkpoint: Path, tmp_path: Path, device: str) -> None:
    """On a machine where nothing is kept, imports and probes of the device come before the time."""
    if device == "CPU":
        needs.device(device)
    framework = "host" if device == "host" else "tinygrad"
    job = job_of(small_checkpoint, framework=framework, device=device)
    said = forked.fresh(WATCHED, json.dumps(job), XDG_CACHE_HOME=str(tmp_path))
    assert json.loads(said) == [[], []]


def test_short_loads_are_repeated(small_checkpoint: Path) -> None:
    with Child(job_of(small_checkpoint), timeout_s=60) as child:
        first, _ = child.lap()
        found = child.again()
        assert child.check()["checked"] > 0
    assert found["laps"] > 1 or first["seconds"] > 0.1
    assert found["seconds"] > 0


def test_a_sample_is_spread_over_all() -> None:
    names = [str(i) for i in range(1000)]
    found = list(sample(names))
    assert len(set(found)) == CHECKED_TENSORS
    assert (found[0], found[-1]) == ("0", "999")
    assert list(sample(names[:5])) == names[:5]
    assert list(sample([])) == []


def test_files_are_brought_in_and_dropped(tmp_checkpoint: Callable[..., Path]) -> None:
    """Warm is all of a file in the page cache, cold is none."""
    files = sorted(tmp_checkpoint(9_000_000, shards=2).glob("*.safetensors"))
    if problem := forget(files):
        pytest.skip(problem)
    assert [resident_fraction(file) for file in files] == [0, 0]
    assert warm(files) == ""
    assert [resident_fraction(file) for file in files] == [1, 1]


def test_what_cannot_be_cold_is_said(tmp_checkpoint: Callable[..., Path]) -> None:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no /dev/shm")
    path = tmp_checkpoint(200_000) / "model.safetensors"
    there = memory / f"streamload-bench-{os.getpid()}.safetensors"
    there.write_bytes(path.read_bytes())
    try:
        found = compare(
            Options(str(there), "host", 1, (), states=("cold",), limits=False, timeout_s=60)
        )
    finally:
        there.unlink()
    assert "stays in the page cache" in found.skipped["cold"]
    assert not found.loaders


@pytest.mark.slow
def test_variants_are_measured_beside(tmp_checkpoint: Callable[..., Path]) -> None:
    path = tmp_checkpoint(2_000_000)
    options = Compared(
        str(path),
        "host",
        runs=2,
        peers=(),
        again=1,
        together=True,
        limits=False,
        variants={"as float16": {"dtype": "float16"}},
    )
    found = Comparing(options).run()
    runs = {name: of.runs["warm"] for name, of in found.loaders.items()}
    assert {name: len(of) for name, of in runs.items()} == {OURS: 2, "as float16": 2}
    assert [run.again_s is None for run in runs[OURS]] == [False, True]
    assert runs["as float16"][0].says["casts"] != runs[OURS][0].says["casts"]
    assert found.times("as float16", "warm") is not None


def test_few_cores_are_few(tmp_checkpoint: Callable[..., Path]) -> None:
    """A load on one CPU has one thread."""
    found = compare(Options(str(tmp_checkpoint()), "host", 1, (), cores=1, limits=False))
    assert found.loaders[OURS].runs["warm"][0].says["threads"] <= 1
    assert "1 CPUs" in found.lines()[0]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("threads", [1, 5])
def test_a_plain_reader_reads_every_byte(
    tmp_checkpoint: Callable[..., Path], direct: bool, threads: int
) -> None:
    files = sorted(tmp_checkpoint(3_000_000, shards=2).glob("*.safetensors"))
    paths = [str(file) for file in files]
    try:
        rate = limits.read(paths, threads, MIB, direct=direct)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert rate.nbytes == sum(file.stat().st_size for file in files)
    assert rate.gigabytes_per_second > 0
    longer = limits.read(paths, threads, MIB, direct=direct, seconds=60, first_block=2)
    assert longer.nbytes == pytest.approx(8 * rate.nbytes, abs=2 * MIB)  # round and round
    assert limits.read(paths, threads, MIB, direct=direct, seconds=0).nbytes == 0


@pytest.mark.slow
def test_the_rate_of_memory_is_kept_for_plans(
    small_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: Callable[..., tuple[str, str]],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan = ("plan", small_checkpoint, "--budget", "1GB", "--dtype", "float16", "--device")
    assert "; streamload bench PATH --device host measures" in here(*plan, "host")[0]
    options = Options(str(small_checkpoint), device="host", runs=1, peers=(), limits=False)
    assert compare(options).memory is None
    assert compare(replace(options, limits=True, cores=1)).memory is None
    assert kept_rate("host") is None
    found = compare(replace(options, limits=True))
    assert found.memory is not None and found.skipped == {}
    rate = kept_rate("host")
    assert rate == pytest.approx(found.memory.median, rel=1e-5)
    assert found.wire("warm") == found.limits["warm, reading the page cache"].median
    assert f"memory of host: {rate:,.{0 if rate >= 100 else 1}f} GB/s (sums by " in "\n".join(
        found.lines()
    )
    for device in ("host", "cpu"):
        assert "GB/s measured by streamload bench)" in here(*plan, device)[0]
    assert "streamload bench" not in here(*plan, "host", "--json")[0]
    assert kept_rate("device") is None  # the device was named


def test_memory_of_other_devices_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(HostDevice().info, shared_memory=False)
    monkeypatch.setattr(HostDevice, "info", info)
    with pytest.raises(DeviceError, match="not measured"):
        limits.memory("host", "host", None)


def test_a_plain_reader_says_what_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        limits.read([str(tmp_path / "none")], 2, MIB, direct=False)
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(OSError, match="no bytes"):
        limits.read([str(empty)], 2, MIB, direct=False)


def test_exactly_the_prediction_is_enough(tmp_checkpoint: Callable[..., Path]) -> None:
    path = str(tmp_checkpoint(3_000_000))
    said = measure(call("bench_parts.jobs:refusal", path=path, device="host")).first
    assert said["refused"] and "does not fit" in said["refusal"]
    assert said["loaded"] > 0
    assert said["held_nbytes"] <= said["exact_nbytes"]
    assert said["exact_nbytes"] >= said["weights_nbytes"]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"peers": ("nobody",)}, "nobody"),
        ({"peers": ("tinygrad",)}, "tinygrad does not load to host"),
        ({"runs": 0}, "runs"),
        ({"states": ("lukewarm",)}, "lukewarm"),
        ({"peers": (), "sites": {"numpy": "/"}}, "not compared"),
    ],
)
def test_wrong_arguments_are_refused(
    small_checkpoint: Path, wrong: dict[str, Any], word: str
) -> None:
    with pytest.raises(ValueError, match=word):
        compare(replace(Options(str(small_checkpoint), "host"), **wrong))


def test_wrong_usage(small_checkpoint: Path) -> None:
    """Exit code 2 and one line."""
    done = run(small_checkpoint, "--device", "host", "--site", "numpy")
    assert done.returncode == 2
    assert "NAME=FOLDER" in done.stderr
    assert done.stderr.count("\n") == 1


def test_loaders_are_chosen_by_device() -> None:
    options = Options("", peers=None)

    def names(framework: str, device: str) -> set[str]:
        return set(choose(options, framework, device)) - {OURS}

    cuda_only = {"safetensors-prefetch", "instanttensor", "instanttensor-direct"}
    torch = {"safetensors", "fastsafetensors", "runai"}
    assert names("torch", "cpu") == torch
    assert names("torch", "cuda:1") == torch | cuda_only
    assert names("tinygrad", "CUDA") == names("tinygrad", "CL") == {"tinygrad"}
    assert names("host", "host") == {"numpy", "safetensors-numpy"}
    some = choose(replace(options, peers=("numpy",)), "host", "host")
    assert list(some) == [OURS, "numpy"]
    assert {name: cuda_index(name) for name in ("cuda:1", "CUDA", "CUDA:2", "CL", "cpu")} == {
        "cuda:1": 1,
        "CUDA": 0,
        "CUDA:2": 2,
        "CL": None,
        "cpu": None,
    }
    assert all(loader.imports for loader in LOADERS.values())


def test_the_chart_is_to_scale() -> None:
    rows = [Bars("<us>", (10.0, 5.0), ours=True), Bars("& them", (2.5, None))]
    text = draw("a < b", "c", "GB/s", ("first", "again"), rows, [("limit", 12.0)])
    root = ElementTree.fromstring(text)
    bars = [float(e.get("width", "")) for e in root if e.get("x") == "190" and e.get("y") != "57"]
    assert len(bars) == 3
    assert bars[0] == pytest.approx(2 * bars[1], abs=0.2) == pytest.approx(4 * bars[2], abs=0.4)
    texts = [e.text for e in root if e.tag.endswith("}text")]
    assert {"a < b", "<us>", "& them", "10 GB/s", "limit: 12 GB/s"} <= set(texts)
    (line,) = [e for e in root if e.tag.endswith("}line")]
    assert float(line.get("x1", "")) - 190 == pytest.approx(bars[0] * 1.2, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "peer"), [("cpu", "safetensors"), ("CL", "tinygrad"), ("CPU", "tinygrad")]
)
def test_frameworks_are_compared_with_their_own_loaders(
    tmp_checkpoint: Callable[..., Path], device: str, peer: str
) -> None:
    """torch and tinygrad, on devices of the CPU; the bits of both are the files'."""
    if device == "cpu":
        needs.module("torch")
    else:
        needs.device(device)
    path = tmp_checkpoint(300_000, shards=2)
    options = Compared(str(path), device, 1, (peer,), limits=False, together=True, timeout_s=100)
    found = Comparing(options).run()
    assert found.skipped == {}
    for of in found.loaders.values():
        assert of.checked and of.checked > 0
    assert found.times(peer, "warm") is not None


@pytest.mark.slow
def test_without_a_driver_the_device_is_not_measured(small_checkpoint: Path) -> None:
    torch = needs.module("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run(small_checkpoint, "--device", "cuda:0", "--runs", 1, "--peers", "none")
    assert done.returncode == 1
    assert "not compared: streamload:" in done.stdout
    assert "memory of the device was not measured" in done.stdout
