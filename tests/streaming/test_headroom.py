"""Others take memory while a load runs: it stops with its numbers, and is not killed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from bench_parts.section import forget
from boxes import Boxes, BoxRun, remove
from parameters import product
from safetensors.numpy import save_file

from streamload import plan
from streamload.core.memory import HostMemory
from streamload.devices.probing import probe
from streamload.streaming.memory_watch import Headroom

NBYTES = 120_000_000
#: What holds the process, a checkpoint and a half, and a thief; by device.
BOXES: Mapping[str, int] = {
    "host": 260_000_000,
    "CL": 320_000_000,
    "CPU": 320_000_000,
    "cpu": 440_000_000,
}

# Loads a checkpoint, twice. During the first load, from a tenth on, another process takes what is
# free but for 60% of the checkpoint: at once ("fast": the load waits for it), or beside it.
ROBBED = """
import json, subprocess, sys, time
import streamload
from streamload.errors import MemoryTakenError
from streamload.core.memory import available_host_nbytes

# of each unit: ten a second are too few for a load this fast
streamload.core.progress._TELL_EVERY_S = 0
path, tiny, device, speed = sys.argv[1:]
THIEF = '''
import mmap, sys, time
nbytes = int(sys.stdin.readline())
taken = mmap.mmap(-1, nbytes)
for at in range(0, nbytes, 2**20):
    taken[at : at + 2**20] = bytes(min(2**20, nbytes - at))
    if sys.argv[1] == "slow":
        time.sleep(0.001)
print(flush=True)
sys.stdin.readline()
'''
argv = [sys.executable, "-S", "-c", THIEF, speed]
thief = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def load(path, **arguments):
    arguments = {"device": device, "dtype": "checkpoint", "chunk_nbytes": 2**20} | arguments
    return streamload.load_state_dict(None, path, budget="150MB", **arguments)


load(tiny, progress=False)
to_take = available_host_nbytes() - NBYTES * 6 // 10
begun = False


def progress(done, total):
    global begun
    if not begun and done > total // 10:
        begun = True
        thief.stdin.write(f"{to_take}\\n")
        thief.stdin.flush()
        if speed == "fast":
            thief.stdout.readline()
    elif begun and speed == "slow":
        time.sleep(0.02)


try:
    load(path, progress=progress)
except MemoryTakenError as error:
    said = {key: getattr(error, key) for key in ("device", "needed_nbytes", "free_nbytes")}
    said |= {"taken_nbytes": error.taken_nbytes, "to_take": to_take}
    said["left"] = [len(error.state.loaded), len(error.state.untouched), len(error.state.invalid)]
    print(json.dumps(said))
thief.kill()
thief.wait()
again = load(path, progress=False).state_dict
print(sum(float(tensor.numpy().sum()) if device != "host" else float(tensor.sum())
          for tensor in again.values()))
"""

# Loads a checkpoint when it is told to.
ONE = """
import sys
import streamload
from streamload.errors import BudgetError

path, tiny, device = sys.argv[1:]
arguments = {"device": device, "dtype": "checkpoint", "budget": "150MB", "progress": False}
streamload.load_state_dict(None, tiny, **arguments)
print("ready", flush=True)
sys.stdin.readline()
try:
    tensors = streamload.load_state_dict(None, path, **arguments).state_dict
    print("loaded", sum(float(tensor.sum()) for tensor in tensors.values()), flush=True)
except BudgetError as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
"""

# Two of them at once.
TWO = """
import subprocess, sys

def start():
    return subprocess.Popen(
        [sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

both = [start(), start()]
for one in both:
    one.stdout.readline()
for one in both:
    one.stdin.write("\\n")
    one.stdin.flush()
for one in both:
    print(one.stdout.readline().strip() or "killed")
for one in both:
    one.communicate("\\n")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ones and twos: a checkpoint of `NBYTES` ("large"), and one of 4 kB ("tiny")."""
    root = tmp_path_factory.mktemp("headroom")
    for name, numel in (("large", NBYTES // 4 // 12), ("tiny", 100)):
        values = {f"{i}.w": np.full(numel, 1 + i % 2, np.float32) for i in range(12)}
        (root / name).mkdir()
        save_file(values, root / name / "model.safetensors")
    return root


TOTAL = 1.5 * (NBYTES // 4)


def _works(device: str) -> None:
    if device == "cpu":
        needs.module("torch")
    framework = {"host": "host", "cpu": "torch"}.get(device, "tinygrad")
    result = probe(framework, device)
    if not result.works:
        needs.lacking(f"{device}: {result.problem}")


def _run(cgroup: Boxes, limit_nbytes: int, script: str, *arguments: Any) -> BoxRun:
    script = script.replace("NBYTES", str(NBYTES))
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return cgroup.run(command, limit_nbytes, timeout_s=120)


@pytest.mark.parametrize(
    ("device", "speed"),
    product(
        BOXES,
        ["fast", "slow"],
        fast=lambda device, speed: (device, speed) in {("host", "slow"), ("CL", "fast")},
    ),
)
def test_a_load_that_is_robbed_stops(cgroup: Boxes, folder: Path, device: str, speed: str) -> None:
    _works(device)
    done = _run(cgroup, BOXES[device], ROBBED, folder / "large", folder / "tiny", device, speed)
    assert (done.returncode, done.oom_killed) == (0, False), (done.stdout, done.stderr)
    told, total = done.stdout.splitlines()
    said = json.loads(told)
    assert said["device"] == device
    assert said["needed_nbytes"] < NBYTES
    assert said["free_nbytes"] < 2 * said["needed_nbytes"]
    assert said["to_take"] // 2 < said["taken_nbytes"] < said["to_take"] + 16_000_000
    loaded, untouched, invalid = said["left"]
    assert (loaded + untouched, invalid) == (12, 0)
    assert untouched
    assert float(total) == TOTAL


# Holds arrays of ones and twos, and loads into them in a forked process; the box gets as much more
# as that process takes, and what a load leaves alone.
FORKED = """
import os, sys
import numpy as np
import streamload
from streamload.errors import MemoryTakenError, PlanInfeasibleError
from streamload.core.memory import available_host_nbytes

path, dtype = sys.argv[1:]
checkpoint = streamload.open_checkpoint(path)
arrays = {t.name: np.full(t.shape, 9, dtype) for t in checkpoint.tensors.values()}
taken = bytearray(max(available_host_nbytes() - NBYTES - 28_000_000, 0))
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
streamload.load_state_dict(
    arrays, checkpoint, dtype="checkpoint", budget="1GB", progress=False, chunk_nbytes=2**20
)
print(sum(float(array.sum(dtype=np.float64)) for array in arrays.values()))
"""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_what_a_forked_process_writes_is_its_own(cgroup: Boxes, folder: Path, dtype: str) -> None:
    limit_nbytes = {"float32": 350_000_000, "float64": 480_000_000}[dtype]
    done = _run(cgroup, limit_nbytes, FORKED, folder / "large", dtype)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert float(done.stdout) == TOTAL


def _two(cgroup: Boxes, folder: Path, device: str, limit_nbytes: int) -> list[str]:
    arguments = ("-c", ONE, folder / "large", folder / "tiny", device)
    done = _run(cgroup, limit_nbytes, TWO, *arguments)
    assert (done.returncode, done.oom_killed) == (0, False), (done.stdout, done.stderr)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "rounds", [pytest.param(2, id="short"), pytest.param(20, id="long", marks=pytest.mark.slow)]
)
def test_two_loads_that_fit_one_by_one(cgroup: Boxes, folder: Path, rounds: int) -> None:
    """Of two at once none is killed: each loads right, or is refused, or stops."""
    ends = []
    for turn in range(rounds):
        if turn % 2:
            forget(folder / "large")
        ends += _two(cgroup, folder, "host", 230_000_000 + turn % 10 * 9_000_000)
    assert set(ends) <= {f"loaded {TOTAL}", "MemoryTakenError", "PlanInfeasibleError"}
    assert "MemoryTakenError" in ends


# Two of them at once, in threads of one process, the second `delay` seconds after the first.
THREADS = """
import sys, threading, time
import streamload
from streamload.errors import BudgetError

path, tiny, device, delay = sys.argv[1:]
arguments = {"device": device, "dtype": "checkpoint", "budget": "150MB", "progress": False}
streamload.load_state_dict(None, tiny, **arguments)
kept, gate = [], threading.Barrier(2)


def load(delay):
    gate.wait()
    time.sleep(delay)
    try:
        kept.append(streamload.load_state_dict(None, path, **arguments).state_dict)
        print("loaded", sum(float(tensor.sum()) for tensor in kept[-1].values()))
    except BudgetError as error:
        print(type(error).__name__)


threads = [threading.Thread(target=load, args=(each,)) for each in (0, float(delay))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize(
    "rounds", [pytest.param(2, id="short"), pytest.param(24, id="long", marks=pytest.mark.slow)]
)
def test_two_loads_in_one_process(cgroup: Boxes, folder: Path, rounds: int) -> None:
    """The growth of one hides the needs of none: neither kills, and one of them loads."""
    arguments = (folder / "large", folder / "tiny", "host")
    for turn in range(rounds):
        if turn % 2:
            forget(folder / "large")
        limit_nbytes = 200_000_000 + turn % 6 * 18_000_000
        done = _run(cgroup, limit_nbytes, THREADS, *arguments, (0, 0.02, 0.05)[turn % 3])
        assert (done.returncode, done.oom_killed) == (0, False), (limit_nbytes, done.stderr)
        ends = done.stdout.splitlines()
        assert set(ends) <= {f"loaded {TOTAL}", "MemoryTakenError", "PlanInfeasibleError"}
        assert f"loaded {TOTAL}" in ends


# Passes over layers that stream, beside a process that takes all memory, 5 MB a second.
PASSES = """
import subprocess, sys, time
import streamload
from streamload.errors import MemoryTakenError

path, device, entrance = sys.argv[1:]
THIEF = '''
import mmap, time
taken = mmap.mmap(-1, 2**30)
for at in range(0, 2**30, 2**20):
    taken[at : at + 2**20] = bytes(2**20)
    time.sleep(0.2)
'''
options = {"device": device, "dtype": "checkpoint", "budget": "35MB"}
if entrance == "stream_layers":
    streamed = streamload.stream_layers(path, **options)
else:
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.empty(NBYTES // 48, device="meta"))

        def forward(self, x):
            return x + self.w[0]

    model = torch.nn.Sequential(*(Layer() for _ in range(12))).eval()
    streamed = streamload.offload(model, path, progress=False, **options)


def one_pass():
    if entrance == "offload":
        return float(model(torch.zeros(1)))
    read = (lambda tensor: tensor) if device == "host" else (lambda tensor: tensor.numpy())
    return sum(float(read(each)[0]) for _, tensors in streamed for each in tensors.values())


with streamed:
    assert one_pass() == 18
    thief = subprocess.Popen([sys.executable, "-S", "-c", THIEF])
    try:
        while thief.poll() is None:
            assert one_pass() == 18
            time.sleep(0.01)
    except MemoryTakenError as error:
        print(error.taken_nbytes, error.free_nbytes)
    thief.kill()
    thief.wait()
    assert one_pass() == 18
"""


@pytest.mark.parametrize(
    ("device", "entrance"),
    [
        ("host", "stream_layers"),
        pytest.param("cpu", "stream_layers", marks=pytest.mark.slow),
        pytest.param("CL", "stream_layers", marks=pytest.mark.slow),
        pytest.param("cpu", "offload", marks=pytest.mark.slow),
    ],
)
def test_passes_that_are_robbed_stop(
    cgroup: Boxes, folder: Path, device: str, entrance: str
) -> None:
    """Of layers that stream, too, and go on once there is memory again."""
    _works(device)
    limit_nbytes = BOXES[device] - NBYTES
    done = _run(cgroup, limit_nbytes, PASSES, folder / "large", device, entrance)
    assert (done.returncode, done.oom_killed) == (0, False), (done.stdout, done.stderr)
    taken_nbytes, free_nbytes = map(int, done.stdout.split())
    assert 0 < free_nbytes < 30_000_000 < taken_nbytes


# Loads a checkpoint; from a tenth on, its group gets a limit, or it moves to a tighter group.
TIGHTER = """
import sys
from pathlib import Path
import streamload
from streamload.errors import MemoryTakenError

streamload.core.progress._TELL_EVERY_S = 0
path, tiny, device, tighter, room = sys.argv[1:]
groups = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()]
(name,) = {Path(group).name for group in groups if Path(group).name.startswith("streamload-")}
group = next(Path("/sys/fs/cgroup").rglob(name))
limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
usage = limit.replace("max", "current").replace("limit", "usage")
arguments = {"device": device, "dtype": "checkpoint", "budget": "150MB", "chunk_nbytes": 2**20}
streamload.load_state_dict(None, tiny, progress=False, **arguments)
begun = False


def progress(done, total):
    global begun
    if not begun and done > total // 10:
        begun = True
        if tighter:
            Path(tighter, "cgroup.procs").write_text("0")
        else:
            (group / limit).write_text(str(int((group / usage).read_text()) + int(room)))


try:
    streamload.load_state_dict(None, path, progress=progress, **arguments)
    print("loaded")
except MemoryTakenError as error:
    print(error.needed_nbytes, error.free_nbytes)
"""


@pytest.mark.parametrize(
    ("device", "how"),
    product(["host", "CL", "cpu"], ["limited", "moved"], fast=lambda device, how: device == "host"),
)
def test_a_limit_that_comes_during_a_load(
    cgroup: Boxes, folder: Path, device: str, how: str
) -> None:
    """Limits and groups are read again: a load that does not fit any more stops."""
    _works(device)
    for room_nbytes in (30_000_000, 60_000_000, 90_000_000, 160_000_000):
        tighter = cgroup.make(room_nbytes)
        where = tighter.folder if how == "moved" else ""
        try:
            arguments = (folder / "large", folder / "tiny", device, where, room_nbytes)
            done = _run(cgroup, 2**40, TIGHTER, *arguments)
        finally:
            remove(tighter.folder)
        assert done.returncode == 0, (room_nbytes, done.stderr)
        if room_nbytes > NBYTES:
            assert done.stdout == "loaded\n"
        else:
            needed_nbytes, free_nbytes = map(int, done.stdout.split())
            assert free_nbytes < needed_nbytes + 20_000_000


@pytest.mark.slow
def test_a_load_in_a_box_that_just_fits_is_not_stopped(cgroup: Boxes, folder: Path) -> None:
    """Neither its own growth nor the page cache of its file is taken by others."""
    arguments = ["-m", "streamload", "load", folder / "large", "--device", "host", "--no-progress"]
    command = [sys.executable, *arguments, "--budget", "150MB"]
    limit_nbytes, ends = NBYTES + 16_000_000, []  # less than the interpreter has
    while not ends or ends[-1] == 3:  # it is refused until there is room for all of it
        forget(folder / "large")
        limit_nbytes += 4_000_000
        done = cgroup.run(command, limit_nbytes)
        assert not done.oom_killed, limit_nbytes
        assert "others took" not in done.stderr
        ends.append(done.returncode)
    assert ends[-1] == 0
    assert len(ends) > 1


def test_another_load_of_the_process_counts_once(
    tmp_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads that fit together run, whatever one has handed out and not yet written."""
    made = plan(tmp_checkpoint(60_000_000), device="host", budget="1GB")
    free_nbytes = 2 * made.device("host").fresh_nbytes + 20 * 2**20
    monkeypatch.setattr(HostMemory, "available_nbytes", lambda self: free_nbytes)
    loads = [Headroom(made, {"host"}) for _ in range(2)]
    for load in loads:
        load.begin()
    try:
        monkeypatch.setattr(loads[0], "_is_due", lambda: True)
        loads[0].hand_out(50_000_000)
        loads[0].hand_out(0)
    finally:
        for load in loads:
            load.end()
