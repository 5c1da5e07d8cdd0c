"""The section "torture": random loads in memory cgroups that are about as large as they need.

Each case is loaded twice, each time in a process and a cgroup of its own: with room for all, which
tells what it needs, and in a box that is drawn from that. A process imports its framework and makes
its target with room; when it says that it is ready, the box gets its limit, and the load begins.

What a load takes is anonymous and shared memory that the kernel charges to the cgroup, looked at
from outside every millisecond. That is RssAnon + RssShmem, but a page that two processes share
counts once, and one that is copied on write counts again, as it does where memory runs out. The
cgroup's own peak is exact, but counts page cache; VmHWM is exact, but counts windows of mapped
files, and not what a copy on write adds.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import boxes
from make_checkpoint import ManyTensors, Shape, make_checkpoint, shape_of_size

from bench_parts.processes import environment
from bench_parts.sections import NotHereError, Options, Section, Target, need_memory, read_all
from streamload.dtypes import DType, parse_dtype
from streamload.plan.budget import available_cpus
from streamload.units import format_bytes

MB = 10**6
MOST_MEGABYTES = 400
ROOM_NBYTES = 2**40  # no limit
STATES = {
    "host": ("none", "resident", "empty", "zeros", "mapped", "forked"),
    "torch": ("none", "meta", "resident", "empty", "zeros", "to_empty", "mapped", "forked"),
    "CPU": ("none", "lazy", "resident", "empty", "forked"),
    "CL": ("none", "lazy", "resident", "empty"),  # no driver of OpenCL's lives through a fork
}
DTYPES = ("bfloat16", "float16", "float32")
#: What a case ends in: those after "stopped" are failures.
OUTCOMES = ("loaded", "refused", "stopped", "killed", "wrong", "other", "hung")
FAILURES = OUTCOMES[3:]
_BY_ERROR = {
    "loaded": "loaded",
    "PlanInfeasibleError": "refused",
    "UnsupportedCastError": "refused",
    "MemoryTakenError": "stopped",
}
LARGE_NBYTES = 100 * MB
SLACK_NBYTES = 4 * MB  # that a load of less may be over what is predicted
RATIO_NBYTES = 16 * MB  # a ratio to less says nothing
#: Boxes, and the share of what they leave free that is to be usable.
USABLE_BOXES = {10**9: 0.9, 3 * 10**9: 0.95}
USABLE_BUDGETS = ("stated", "80%", None)
USABLE_STEP = 0.005  # of the box
_ANSWER_S = 180.0
_SAMPLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Case:
    """What is drawn; the same for the same seed and number, whatever was run before.

    Attributes:
        number: of the run.
        device: "host", "torch" (its CPU), "CPU" or "CL" (tinygrad's).
        kind: of the model: "dict", or a module or object.
        state: of its memory before the load.
        src: dtype of the file.
        held: dtype that the model holds.
        dtype: dtype that is asked for.
        shape: of the checkpoint.
        megabytes: of the file.
        options: other arguments of the load.
        cached: whether the file is in the page cache.
        budget: "stated", "80%" or None.
        budget_factor: of what is predicted, where it is stated.
        box_factor: of what the load takes with room.
        slack_nbytes: beside that.
        roomy: the box is larger by what a budget that is not stated leaves.
    """

    number: int
    device: str
    kind: str
    state: str
    src: str
    held: str
    dtype: str
    shape: str
    megabytes: int
    options: dict[str, Any]
    cached: bool
    budget: str | None
    budget_factor: float
    box_factor: float
    slack_nbytes: int
    roomy: bool

    @classmethod
    def draw(cls, seed: int, number: int, megabytes: int) -> Case:
        """Draw one of at most some size."""
        rng = random.Random(f"{seed}/{number}")
        device = rng.choice(tuple(STATES))
        src, dtype = rng.choice(DTYPES), rng.choice(("checkpoint", *DTYPES))
        wanted = src if dtype == "checkpoint" else dtype
        chunk = rng.choice((None, None, None, 1000, 2**16, 2**26))
        shape = rng.choice(("giant", "tiny", "small", "llama", "llama", "gpt2"))
        kind, state = rng.choice(("dict", "object")), rng.choice(STATES[device])
        held = wanted if rng.random() < 0.7 else rng.choice(DTYPES)
        if (device, state) == ("host", "mapped"):
            held = wanted  # numpy's views of a map are not replaced: they are refused
        sizes = {"tiny": (18,), "small": (50, 100)}.get(shape, (20, 50, 100, 200, 400))
        most = min(megabytes, 50 if chunk == 1000 else megabytes)
        return cls(
            number=number,
            device=device,
            kind=kind,
            state=state,
            src=src,
            held=held,
            dtype=dtype,
            shape=shape,
            megabytes=rng.choice([n for n in sizes if n <= most] or [most]),
            options={
                "reader": rng.choice(("auto", "auto", "mmap", "pread", "direct")),
                "threads": rng.choice((None, None, 1, 2, 8)),
                "chunk_nbytes": chunk,
                "page_cache": rng.choice(("auto", "auto", "keep", "drop")),
                "dtype": dtype,
            },
            cached=rng.random() < 0.6,
            budget=rng.choice(("stated", "80%", None)),
            budget_factor=rng.choice((1.0, rng.uniform(0.8, 1.05))),
            box_factor=rng.uniform(0.8, 1.05),
            slack_nbytes=rng.choice((0, rng.randrange(64 * MB), rng.randrange(32 * MB, 48 * MB))),
            roomy=rng.random() < 0.5,
        )

    def __str__(self) -> str:
        options = ", ".join(
            f"{name} {value}"
            for name, value in self.options.items()
            if name != "dtype" and value not in (None, "auto")
        )
        into = f"{self.state} {self.kind if self.state != 'none' else ''} {self.held}".split()
        return (
            f"{self.device}: {self.shape} {self.megabytes} MB {self.src} as {self.dtype} into "
            f"{' '.join(into)}; budget {self.budget}, {'' if self.cached else 'not '}cached"
            + (f"; {options}" if options else "")
        )


@dataclass(frozen=True, slots=True)
class Mix:
    """A checkpoint of tensors that are named one by one."""

    named: dict[str, tuple[int, ...]]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes."""
        return self.named

    def config(self, dtype: DType) -> dict[str, Any]:
        """The content of config.json."""
        return {"model_type": "mix", "torch_dtype": dtype.name}


def _shape(name: str, nbytes: int, dtype: DType) -> Shape:
    numel = nbytes // dtype.itemsize
    if name == "giant":
        return Mix({"model.weight": (numel // 1024, 1024)})
    if name == "tiny":
        return ManyTensors(20_000, numel // 20_000)
    if name == "small":
        return ManyTensors(numel // 17_000, 17_000)
    if name == "llama":
        return shape_of_size(nbytes, dtype)
    dim = math.isqrt(numel // 200) // 16 * 16 or 16  # 144 of 200 are in the layers
    named: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (56 * dim, dim),
        "transformer.wpe.weight": (1024, dim),
    }
    for layer in range(12):
        for part, rows, columns in (
            *(("attn.c_attn", dim, 3 * dim), ("attn.c_proj", dim, dim)),
            *(("mlp.c_fc", dim, 4 * dim), ("mlp.c_proj", 4 * dim, dim)),
        ):
            named[f"transformer.h.{layer}.{part}.weight"] = (rows, columns)
            named[f"transformer.h.{layer}.{part}.bias"] = (columns,)
        for norm in ("ln_1", "ln_2"):
            named |= {f"transformer.h.{layer}.{norm}.{part}": (dim,) for part in ("weight", "bias")}
    return Mix(named)


class Files:
    """Checkpoints, made when they are first asked for; each is lent to one case at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    @contextmanager
    def lend(self, case: Case) -> Iterator[Path]:
        """The checkpoint of a case."""
        with self._guard:
            lock = self._locks[f"{case.shape}-{case.megabytes}-{case.src}"]
        with lock:
            yield self._made(case, case.src, seed=0)

    def donor(self, case: Case) -> Path:
        """The checkpoint that a case's model is mapped from: other values, the dtype it holds."""
        with self._guard:
            return self._made(case, case.held, seed=1)

    def _made(self, case: Case, dtype: str, seed: int) -> Path:
        out = self._folder / f"{case.shape}-{case.megabytes}-{case.src}-{dtype}-{seed}"
        if not out.exists():
            shape = _shape(case.shape, case.megabytes * MB, parse_dtype(case.src))
            shards = 3 if case.shape == "llama" else 1
            make_checkpoint(out, shape, dtype=dtype, seed=seed, shards=shards)
            read_all(out)
        return out


@dataclass(slots=True)
class Ran:
    """One process and how it ended.

    Attributes:
        outcome: one of `OUTCOMES`.
        said: what it said of the load.
        why: an error, or what was wrong.
        taken_nbytes: by how much anonymous and shared memory grew at the most.
        charged_nbytes: the same with page tables and what else the kernel charges.
        room_nbytes: what the box left beside what was charged when the load began.
    """

    outcome: str
    said: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    taken_nbytes: int = 0
    charged_nbytes: int = 0
    room_nbytes: int | None = None


class _Silent(Exception):
    """The process has ended, or says nothing; the message is one of `FAILURES`."""


def run_boxed(
    maker: boxes.Boxes, job: dict[str, Any], limit: Callable[[int], int] | None = None
) -> Ran:
    """Run a load in a box.

    Args:
        maker: of boxes.
        job: for `bench_parts.torture_job`.
        limit: from what is charged when the process is ready to the limit; None: there is none.
    """
    box = maker.make(ROOM_NBYTES)
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            [
                *("sh", "-c", 'echo $$ >"$0" && exec "$@"', box.procs),
                *(sys.executable, "-m", "bench_parts.torture_job", json.dumps(job)),
            ],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None and process.stdout is not None
        ran = Ran("other")
        try:
            _answer(process, lambda: None)
            taken, charged = box.memory()
            if limit is not None:
                ran.room_nbytes = limit(charged) - charged
                box.limit(limit(charged))
            process.stdin.write(b"1")
            process.stdin.flush()

            def look() -> None:
                now = box.memory()
                ran.taken_nbytes = max(ran.taken_nbytes, now[0] - taken)
                ran.charged_nbytes = max(ran.charged_nbytes, now[1] - charged)

            ran.said = _answer(process, look)
            look()
            ran.outcome = _BY_ERROR.get(ran.said["outcome"], "other")
            ran.why = ran.said.get("error", "")
            box.limit(ROOM_NBYTES)  # comparing takes memory of its own
            process.stdin.write(b"1")
            process.stdin.flush()
            wrong = _answer(process, lambda: None)["wrong"]
            if wrong:
                ran.outcome, ran.why = "wrong", "; ".join(wrong)
        except (_Silent, OSError) as error:
            ended = process.poll() if str(error) == "hung" else process.wait(_ANSWER_S)
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            ran.why = f"exit status {ended} {' '.join(last)}"
            by_signal = ended is not None and (ended < 0 or ended > 128)
            killed = box.oom_killed or by_signal
            ran.outcome = "killed" if killed else str(error) if ended is None else "other"
        finally:
            boxes.remove(box.folder)  # ends the process
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
    return ran


def _answer(process: subprocess.Popen[bytes], look: Callable[[], None]) -> dict[str, Any]:
    """The next line of JSON that a process says; meanwhile ``look`` is called again and again."""
    assert process.stdout is not None
    fd, received, until = process.stdout.fileno(), b"", time.monotonic() + _ANSWER_S
    while True:
        if select.select([fd], [], [], _SAMPLE_S)[0]:
            piece = os.read(fd, 2**16)
            if not piece:
                raise _Silent("other")
            received += piece
            for line in received.splitlines(keepends=True):
                if line.startswith(b"{") and line.endswith(b"}\n"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        look()
        if time.monotonic() > until:
            raise _Silent("hung")


def run_case(case: Case, maker: boxes.Boxes, files: Files) -> dict[str, Any]:
    """Load a case with room, then in its box; everything that was seen."""
    with files.lend(case) as path:
        donor = files.donor(case) if case.state == "mapped" else None
        job = {"path": str(path), "donor": donor and str(donor)} | {
            name: getattr(case, name) for name in ("device", "kind", "state", "held")
        }
        read_all(path)
        room = run_boxed(maker, job | {"options": case.options})
        boxed = None
        if room.outcome == "loaded":
            budget = case.budget
            if budget == "stated":
                budget = str(int(room.said["device_nbytes"] * case.budget_factor) or 1)
            if case.cached:
                read_all(path)
            else:
                boxes.forget(path)
            job["options"] = case.options | {"budget": budget}
            needed_nbytes = room.charged_nbytes
            if case.roomy and case.budget != "stated":
                needed_nbytes = int(needed_nbytes / (0.8 if case.budget else 0.9))
            more_nbytes = int(needed_nbytes * case.box_factor) + case.slack_nbytes
            boxed = run_boxed(maker, job, lambda charged: charged + more_nbytes)
    last = boxed or room
    return {
        "case": asdict(case),
        "text": str(case),
        "file_nbytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "outcome": last.outcome,
        "where": "box" if boxed else "with room",
        "room": asdict(room),
        "boxed": asdict(boxed) if boxed else None,
    }


_NOTE = (
    "loads in memory cgroups of about what they take; see bench_parts/torture_section.py. "
    "Outcomes of the loads in boxes"
)


def torture(options: Options) -> Section:
    """Run cases, and tell of their outcomes and of what they took.

    Raises:
        NotHereError: no memory cgroups can be made, or a load would not fit into this machine.
    """
    try:
        maker = boxes.Boxes()
    except (boxes.NoBoxesError, OSError) as error:
        raise NotHereError(str(error)) from error
    if options.usable:
        return usable(maker, options)
    jobs, most = min(available_cpus(), 2), min(options.nbytes // MB, MOST_MEGABYTES)
    need_memory(jobs * 5 * most * MB)
    numbers = range(options.runs) if options.only is None else (options.only,)
    files, done = Files(options.work), []

    def one(case: Case) -> dict[str, Any]:
        begun = time.monotonic()
        found = run_case(case, maker, files)
        size = f"--size {most}MB " * (most < MOST_MEGABYTES)
        found["again"] = f"scripts/bench torture {size}--seed {options.seed} --only {case.number}"
        done.append(found)
        took = f"{found['outcome']}, {time.monotonic() - begun:.1f} s"
        options.say(f"torture: {len(done)} of {len(numbers)}: {took}: #{case.number} {case}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(one, [Case.draw(options.seed, n, most) for n in numbers]))
    section = Section("torture", _NOTE, rows=_outcomes(runs), targets=_targets(runs), raw=runs)
    bad = [run for run in runs if run["outcome"] in FAILURES]
    section.failures = [f"#{run['case']['number']}: {run['outcome']}" for run in bad]
    section.tables = {
        "failures; what they take with room, what was predicted, and what the box left": [
            _failure(run) for run in bad
        ],
        "measured over predicted: RssAnon + RssShmem of loads that ended": _distribution(runs),
    }
    return section


def _failure(run: Mapping[str, Any]) -> dict[str, Any]:
    room, last = run["room"], run["boxed"] or run["room"]
    return {
        "outcome": run["outcome"],
        "case": run["text"],
        "takes": format_bytes(room["taken_nbytes"]),
        "predicted": format_bytes(room["said"].get("predicted_nbytes", 0)),
        "room": format_bytes(last["room_nbytes"] or 0),
        "why": last["why"],
        "again": run["again"],
    }


def _outcomes(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How many ended how, by device and state."""
    rows = []
    for device, states in STATES.items():
        for state in (*states, None):
            mine = Counter(
                run["outcome"]
                for run in runs
                if run["case"]["device"] == device and state in (run["case"]["state"], None)
            )
            if mine:
                rows.append({"device": device, "target": state or "all of these"} | dict(mine))
    total = Counter(run["outcome"] for run in runs)
    rows.append({"device": "all", "target": ""} | dict(total))
    return [{key: row.get(key, "") for key in ("device", "target", *OUTCOMES)} for row in rows]


def _loads(runs: Iterable[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], int, int]]:
    """The loads that ended, with room and in boxes: (run, bytes taken, bytes predicted)."""
    return [
        (run, ran["taken_nbytes"], ran["said"]["predicted_nbytes"])
        for run in runs
        for ran in (run["room"], run["boxed"])
        if ran is not None and ran["outcome"] == "loaded"
    ]


def _distribution(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ratios to what was predicted, and bytes over it."""
    loads = _loads(runs)
    groups: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        "all": lambda run: True,
        "files from 100 MB on": lambda run: run["file_nbytes"] >= LARGE_NBYTES,
        "smaller files": lambda run: run["file_nbytes"] < LARGE_NBYTES,
    }
    for device in STATES:
        groups[device] = lambda run, device=device: run["case"]["device"] == device  # type: ignore[misc]
    for shape in ("giant", "llama", "gpt2", "small", "tiny"):
        groups[shape] = lambda run, shape=shape: run["case"]["shape"] == shape  # type: ignore[misc]
    for state in dict.fromkeys(state for states in STATES.values() for state in states):
        groups[state] = lambda run, state=state: run["case"]["state"] == state  # type: ignore[misc]
    rows = []
    for name, mine in groups.items():
        found = [(taken, predicted) for run, taken, predicted in loads if mine(run)]
        ratios = sorted(
            taken / predicted for taken, predicted in found if predicted >= RATIO_NBYTES
        )
        over = sorted((taken - predicted) / MB for taken, predicted in found)
        if found:
            rows.append(
                {
                    "loads": name,
                    "n": len(found),
                    **_quantiles("x", ratios, 3),
                    "over": sum(n > 0 for n in over),
                    **_quantiles("MB over", over, 1),
                }
            )
    return rows


def _quantiles(what: str, values: Sequence[float], digits: int) -> dict[str, float | None]:
    """Of ascending values."""

    def at(share: float) -> float | None:
        return round(values[round(share * (len(values) - 1))], digits) if values else None

    return {f"{what}, median": at(0.5), f"{what}, p95": at(0.95), f"{what}, max": at(1.0)}


def _targets(runs: Sequence[Mapping[str, Any]]) -> list[Target]:
    """What is promised: never over, and not far under."""
    loads = _loads(runs)
    large = [(n, p) for run, n, p in loads if run["file_nbytes"] >= LARGE_NBYTES]
    small = [n - p for run, n, p in loads if run["file_nbytes"] < LARGE_NBYTES]
    off = sorted(abs(n / p - 1) for n, p in large if p >= RATIO_NBYTES)
    bad = [run for run in runs if run["outcome"] in FAILURES]
    found = [Target("runs that failed", len(bad), at_most=0)]
    found.append(
        Target("loads over what was predicted", sum(n > p for _, n, p in loads), at_most=0)
    )
    if off:
        found.append(Target("100 MB and more: off, median", off[len(off) // 2], at_most=0.01))
        found.append(Target("100 MB and more: off, p95", off[int(len(off) * 0.95)], at_most=0.02))
    if small:
        most = max(map(abs, small))
        found.append(Target("less than 100 MB: off, bytes", most, at_most=SLACK_NBYTES))
    return found


def usable(maker: boxes.Boxes, options: Options) -> Section:
    """The largest checkpoint that loads in a box, as a share of what is free after imports.

    Each step halves the range and is a real load, of zeros from a file with holes: one that is not
    refused must end well.
    """
    section = Section(
        "torture",
        "the largest checkpoint that loads, without a model, of what a box leaves free after the "
        f"imports, to {USABLE_STEP:.1%}; every load that was not refused was run to its end",
    )
    for limit_nbytes, device, budget in itertools.product(USABLE_BOXES, STATES, USABLE_BUDGETS):
        path = options.work / "hollow"
        job = {
            **{"path": str(path), "donor": None, "device": device, "kind": "dict"},
            **{"state": "none", "held": "bfloat16", "unchecked": True},
            # one that is stated is beyond the box: then what is free decides
            "options": {
                "budget": str(limit_nbytes) if budget == "stated" else budget,
                "dtype": "checkpoint",
            },
        }
        low, high, free_nbytes, peak_nbytes = 0, limit_nbytes, 0, 0
        while high - low > USABLE_STEP * limit_nbytes:
            nbytes = _hollow(path, (low + high) // 2)
            ran = run_boxed(maker, job, lambda charged, nbytes=limit_nbytes: nbytes)  # type: ignore[misc]
            free_nbytes = ran.room_nbytes or 0
            if ran.outcome == "loaded":
                low, peak_nbytes = nbytes, ran.charged_nbytes
            else:
                high = nbytes
            if ran.outcome in FAILURES:
                what = f"{device}, budget {budget}, {nbytes} bytes in {limit_nbytes}"
                section.failures.append(f"{what}: {ran.outcome} {ran.why}")
        share = low / free_nbytes if free_nbytes else 0.0
        options.say(f"torture: {device}, budget {budget}: {share:.1%}")
        section.rows.append(
            {
                **{"box": format_bytes(limit_nbytes), "device": device, "budget": budget},
                **{"free": format_bytes(free_nbytes), "largest": format_bytes(low)},
                **{"share": f"{share:.1%}", "peak": f"{peak_nbytes / max(free_nbytes, 1):.1%}"},
            }
        )
        if budget != "80%":
            what = f"{device}, budget {budget}, box of {format_bytes(limit_nbytes)}: share"
            section.targets.append(Target(what, share, at_least=USABLE_BOXES[limit_nbytes]))
    return section


def _hollow(path: Path, nbytes: int) -> int:
    """Write a checkpoint of about so many bytes that takes none of the disk; returns its bytes."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    one = nbytes // 64 // 4096 * 4096
    header = json.dumps(
        {
            f"w{n}": {
                **{"dtype": "BF16", "shape": [one // 4096, 2048]},
                "data_offsets": [n * one, (n + 1) * one],
            }
            for n in range(64)
        }
    ).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 64 * one)
    return 64 * one
