"""The section "torture": random loads in memory cgroups that are about as large as they need.

Each case is loaded twice, each time in a process and a cgroup of its own: with room for all, which
tells what it needs, and in a box that is drawn from that. A process imports its framework and makes
its target with room; when it says that it is ready, the box gets its limit, and the load begins.

What a load takes is told twice. Reported is RssAnon + RssShmem, from when the load looks at what is
free until it is done, as its report has it. Charged is the anonymous and shared memory of the
cgroup, looked at from outside every millisecond, from before the load is called: that has what the
first load of a process takes once (a driver that is opened, a kernel that is compiled), a page that
two processes share once, and one that is copied on write again, as where memory runs out. The
cgroup's own peak is exact, but counts page cache; VmHWM is exact, but counts windows of mapped
files, and not what a copy on write adds.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boxes
from make_checkpoint import make_checkpoint, make_header, shape_of_size

from bench_parts.section import (
    FILES,
    Options,
    Section,
    boxes_here,
    need_disk,
    need_memory,
    read_all,
)
from streamload.bench.processes import Child, MeasurementError, call
from streamload.core.dtypes import BF16, DType, parse_dtype
from streamload.core.memory import available_cpus
from streamload.core.units import format_bytes

Case = dict[str, Any]
Run = Mapping[str, Any]

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
    **{"loaded": "loaded", "MemoryTakenError": "stopped"},
    **{"PlanInfeasibleError": "refused", "UnsupportedCastError": "refused"},
}
LARGE_NBYTES = 100 * MB
SLACK_NBYTES = 4 * MB  # that a load of less may be over what is predicted
RATIO_NBYTES = 16 * MB  # a ratio to less says nothing
#: Boxes, and the share of what they leave free that is to be usable.
USABLE_BOXES = {10**9: 0.9, 3 * 10**9: 0.95}
USABLE_BUDGETS = ("stated", "80%", None)
USABLE_STEP = 0.005  # of the box
_TAKEN = ("taken_nbytes", "charged_nbytes")  # as a box tells them
_ANSWER_S = 180.0
_SAMPLE_S = 0.001


def draw(seed: int, number: int, most: int) -> Case:
    """Draw a case, of at most so many megabytes: the same for the same arguments."""
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
    most = min(most, 50) if chunk == 1000 else most  # each takes tens of microseconds
    return {
        "number": number,
        "device": device,
        "kind": kind,
        "state": state,
        "src": src,
        "held": held,
        "dtype": dtype,
        "shape": shape,
        "megabytes": rng.choice([n for n in sizes if n <= most] or [most]),
        "options": {
            "reader": rng.choice(("auto", "auto", "mmap", "pread", "direct")),
            "threads": rng.choice((None, None, 1, 2, 8)),
            "chunk_nbytes": chunk,
            "page_cache": rng.choice(("auto", "auto", "keep", "drop")),
            "dtype": dtype,
        },
        "cached": rng.random() < 0.6,
        "budget": rng.choice(("stated", "80%", None)),
        # of what is predicted, and of what is taken with room
        "budget_factor": rng.choice((1.0, rng.uniform(0.8, 1.05))),
        "box_factor": rng.uniform(0.8, 1.05),
        "slack_nbytes": rng.choice((0, rng.randrange(64 * MB), rng.randrange(32 * MB, 48 * MB))),
        # whether what a budget leaves alone that is not stated comes on top
        "roomy": rng.random() < 0.5,
    }


def told(case: Case) -> str:
    """A case in words."""
    options = {k: v for k, v in case["options"].items() if k != "dtype" and v not in (None, "auto")}
    return (
        "{device}: {shape} {megabytes} MB {src} as {dtype} into {state} {kind} {held}; "
        "budget {budget}, cached {cached}".format(**case)
        + "".join(f", {name} {value}" for name, value in options.items())
    )


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint of tensors of these names and shapes."""

    named: Mapping[str, tuple[int, ...]]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes."""
        return dict(self.named)

    def config(self, dtype: DType) -> dict[str, Any]:
        """The content of config.json."""
        return {"torch_dtype": dtype.name}


def _shapes(name: str, numel: int) -> Mapping[str, tuple[int, ...]]:
    """The tensors of a checkpoint of about so many elements."""
    if name == "giant":
        return {"model.weight": (numel // 1024, 1024)}
    if name in ("tiny", "small"):
        count = 20_000 if name == "tiny" else numel // 17_000
        return {f"experts.{i}.weight": (numel // count,) for i in range(count)}
    dim = math.isqrt(numel // 200) // 16 * 16  # of 200 parts 144 are in the layers
    layer: dict[str, tuple[int, ...]] = {"ln_1": (dim,), "ln_2": (dim,)} | {
        part: (dim, columns * dim)
        for part, columns in {"attn.c_attn": 3, "attn.c_proj": 1, "mlp.c_fc": 4}.items()
    }
    layer["mlp.c_proj"] = (4 * dim, dim)
    named: dict[str, tuple[int, ...]] = {
        **{"wte.weight": (56 * dim, dim), "wpe.weight": (1024, dim)}
    }
    for i, (part, shape) in itertools.product(range(12), layer.items()):
        named |= {f"h.{i}.{part}.weight": shape, f"h.{i}.{part}.bias": shape[-1:]}
    return named


def _checkpoint(folder: Path, case: Case, dtype: str, seed: int) -> Path:
    """The checkpoint of a case in a dtype, made when it is first asked for."""
    name, megabytes, src = case["shape"], case["megabytes"], parse_dtype(case["src"])
    out = folder / f"{name}-{megabytes}-{src}-{dtype}-{seed}"
    if not out.exists():
        llama = name == "llama"
        nbytes = megabytes * MB
        shape = (
            shape_of_size(nbytes, src) if llama else Named(_shapes(name, nbytes // src.itemsize))
        )
        make_checkpoint(out, shape, dtype=dtype, seed=seed, shards=3 if llama else 1)
        read_all(out)
    return out


def run_boxed(
    maker: boxes.Boxes, case: Mapping[str, Any], limit: Callable[[int], int] | None = None
) -> dict[str, Any]:
    """Run a case of a `bench_parts.torture_job.Job` in a box; see `boxed`."""
    return boxed(maker, call("bench_parts.torture_job:Job", case=dict(case)), limit)


def boxed(
    maker: boxes.Boxes,
    job: Mapping[str, Any],
    limit: Callable[[int], int] | None = None,
    sites: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a job that loads something in a box.

    Args:
        maker: of boxes.
        job: its laps say an "outcome": "loaded", or the name of an error. It can check what it did.
        limit: from what is charged when the process is ready to the limit; None: there is none.
        sites: folders that come first on its path.

    Returns:
        "outcome" is one of `OUTCOMES`; "why" an error, or what is wrong; "said" what the process
        said of the load; "taken_nbytes" the most by which anonymous and shared memory grew,
        "charged_nbytes" the same with page tables and what else the kernel charges; "room_nbytes"
        what the limit left beside what was charged when the load began.
    """
    ran: dict[str, Any] = {"said": {}, "taken_nbytes": 0, "charged_nbytes": 0, "room_nbytes": None}
    box = maker.make(ROOM_NBYTES)
    child = Child(job, timeout_s=_ANSWER_S, sites=sites, prefix=box.enter, sample_s=_SAMPLE_S)
    try:
        child.ready()
        before = box.memory()
        if limit is not None:
            ran["room_nbytes"] = limit(before[1]) - before[1]
            box.limit(before[1] + ran["room_nbytes"])

        def look() -> None:
            for name, then, now in zip(_TAKEN, before, box.memory(), strict=True):
                ran[name] = max(ran[name], now - then)

        said = ran["said"] = child.lap(look)[0]
        look()
        box.limit(ROOM_NBYTES)  # comparing takes memory of its own
        wrong = child.check()["wrong"]
        outcome = "wrong" if wrong else _BY_ERROR.get(said["outcome"], "other")
        if box.oom_killed:  # another process of the box than the one that loads
            outcome = "killed"
        ran |= {"outcome": outcome, "why": "; ".join(wrong) or said.get("error", "")}
    except OSError as error:  # no such limit
        ran |= {"outcome": "other", "why": str(error)}
    except MeasurementError as error:
        outcome = "hung"
        if error.status is not None:
            killed = box.oom_killed or not 0 <= error.status <= 128  # or one that was forked
            outcome = "killed" if killed else "other"
        ran |= {"outcome": outcome, "why": str(error)}
    finally:
        boxes.remove(box.folder)  # ends the process
        child.close(at_once=True)
    return ran


def run_case(case: Case, maker: boxes.Boxes, folder: Path) -> dict[str, Any]:
    """Load a case with room, then in its box; everything that was seen."""
    path = _checkpoint(folder, case, case["src"], seed=0)
    donor = _checkpoint(folder, case, case["held"], seed=1) if case["state"] == "mapped" else path
    job = {"path": str(path), "shapes": str(donor)} | case
    read_all(path)
    room, boxed = run_boxed(maker, job), None
    if room["outcome"] == "loaded":
        budget = case["budget"]
        if budget == "stated":
            budget = str(int(room["said"]["device_nbytes"] * case["budget_factor"]) or 1)
        job["options"] = case["options"] | {"budget": budget}
        FILES["cached" if case["cached"] else "not cached"](path)
        left_alone = {None: 0.1, "80%": 0.2}.get(case["budget"], 0) if case["roomy"] else 0
        needed_nbytes = room["charged_nbytes"] / (1 - left_alone)
        more_nbytes = int(needed_nbytes * case["box_factor"]) + case["slack_nbytes"]
        boxed = run_boxed(maker, job, lambda charged: charged + more_nbytes)
    return {
        "case": case,
        "text": told(case),
        "file_nbytes": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        "outcome": (boxed or room)["outcome"],
        "room": room,
        "boxed": boxed,
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
    maker = boxes_here()
    if options.usable:
        return usable(maker, options)
    jobs, most = min(available_cpus(), 2), max(min(options.nbytes // MB, MOST_MEGABYTES), 1)
    need_memory(jobs * 5 * most * MB)
    need_disk(options.work, 40 * most * MB)
    numbers = range(options.runs) if options.only is None else (options.only,)
    drawn = [draw(options.seed, number, most) for number in numbers]
    cases = [case for case in drawn if case["device"] in _here(options)]
    done: list[str] = []
    # a file that one load wants in the page cache is not dropped from it for another
    locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def one(case: Case) -> dict[str, Any]:
        begun = time.monotonic()
        with locks[f"{case['shape']} {case['megabytes']}"]:
            found = run_case(case, maker, options.work)
        size = f"--size {most}MB " * (most < MOST_MEGABYTES)
        found["again"] = (
            f"scripts/bench torture {size}--seed {options.seed} --only {case['number']}"
        )
        done.append(found["outcome"])
        took = f"{found['outcome']}, {time.monotonic() - begun:.1f} s"
        number = f"#{case['number']}"
        options.say(f"torture: {len(done)} of {len(cases)}: {took}: {number} {found['text']}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        runs = list(pool.map(one, cases))
    note = f"{_NOTE}; {len(drawn) - len(cases)} are left out, whose devices are not here"
    section = Section("torture", note, rows=_outcomes(runs), raw=runs)
    _judge(section, runs)
    bad = [run for run in runs if run["outcome"] in FAILURES]
    section.failures = [f"#{run['case']['number']}: {run['outcome']}" for run in bad]
    section.tables = {
        "failures; what they take with room, what was predicted, and what the box left": [
            _failure(run) for run in bad
        ],
        "reported over predicted, of loads that ended": _distribution(_loads(runs)),
        "charged over predicted, of loads that ended": _distribution(
            _loads(runs, lambda ran: ran["taken_nbytes"])
        ),
    }
    return section


def _here(options: Options) -> list[str]:
    torch = ["torch"] if importlib.util.find_spec("torch") else []
    return [device for device in STATES if device in (*options.devices, *torch)]


def _failure(run: Run) -> dict[str, Any]:
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


def _outcomes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """How many ended how, by device and state."""
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for run in runs:
        device, state = run["case"]["device"], run["case"]["state"]
        for key in ((device, state), (device, "all"), ("all", "")):
            counts[key][run["outcome"]] += 1
    order = [(device, state) for device in STATES for state in (*STATES[device], "all")]
    return [
        {"device": key[0], "target": key[1]} | {name: counts[key][name] or "" for name in OUTCOMES}
        for key in (*order, ("all", ""))
        if key in counts
    ]


Load = tuple[Run, int, int]  # (run, bytes taken, bytes predicted)


def _loads(
    runs: Iterable[Run],
    taken_nbytes: Callable[[Run], int] = lambda ran: ran["said"]["reported_nbytes"],
) -> list[Load]:
    """The loads that ended, with room and in boxes."""
    return [
        (run, taken_nbytes(ran), ran["said"]["predicted_nbytes"])
        for run in runs
        for ran in (run["room"], run["boxed"])
        if ran is not None and ran["outcome"] == "loaded"
    ]


def _is_large(run: Run) -> bool:
    return bool(run["file_nbytes"] >= LARGE_NBYTES)


def _distribution(loads: Iterable[Load]) -> list[dict[str, Any]]:
    """Ratios to what was predicted, and bytes over it, of all loads and by what they were."""
    groups: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for run, taken, predicted in loads:
        case = run["case"]
        size = "files from 100 MB on" if _is_large(run) else "smaller files"
        for name in ("all", size, *(f"{key} {case[key]}" for key in ("device", "shape", "state"))):
            groups[name].append((taken, predicted))
    rows = []
    for name in sorted(groups, key=lambda name: (" " in name, name)):
        found = groups[name]
        ratios = sorted(taken / said for taken, said in found if said >= RATIO_NBYTES)
        over = sorted((taken - said) / MB for taken, said in found)
        rows.append(
            {
                **{"loads": name, "n": len(found)},
                **_quantiles("x", ratios, 3),
                **{"over": sum(n > 0 for n in over)},
                **_quantiles("MB over", over, 1),
            }
        )
    return rows


def _quantiles(what: str, values: Sequence[float], digits: int) -> dict[str, float | None]:
    """Of ascending values."""
    return {
        f"{what}, {name}": round(values[round(share * (len(values) - 1))], digits)
        if values
        else None
        for name, share in (("median", 0.5), ("p95", 0.95), ("max", 1.0))
    }


def _judge(section: Section, runs: Sequence[Run]) -> None:
    """Add what is promised: never over, and not far under."""
    loads = _loads(runs)
    off = sorted(abs(n / p - 1) for run, n, p in loads if _is_large(run) and p >= RATIO_NBYTES)
    small = [abs(n - p) for run, n, p in loads if not _is_large(run)]
    bad = sum(run["outcome"] in FAILURES for run in runs)
    over = sum(taken > predicted for _, taken, predicted in loads)
    section.target("runs that failed", bad, at_most=0)
    section.target("loads over what was predicted", over, at_most=0)
    if off:
        section.target("100 MB and more: off, median", off[len(off) // 2], at_most=0.01)
        section.target("100 MB and more: off, p95", off[int(len(off) * 0.95)], at_most=0.02)
    if small:
        section.target("less than 100 MB: off, bytes", max(small), at_most=SLACK_NBYTES)


def usable(maker: boxes.Boxes, options: Options) -> Section:
    """The largest checkpoint that loads in a box, as a share of what is free after imports.

    Each step halves the range and is a real load, of zeros from a file with holes: one that is not
    refused must end well.
    """
    section = Section(
        "torture",
        "the largest checkpoint that loads, without a model, of what a box leaves free after the "
        f"imports, to {USABLE_STEP:.1%} of the box; every load that was not refused was run to its "
        "end",
    )
    path = options.work / "hollow"
    cases = itertools.product(USABLE_BOXES, _here(options), USABLE_BUDGETS)
    for limit_nbytes, device, budget in cases:
        # one that is stated is beyond the box: then what is free decides
        given = str(limit_nbytes) if budget == "stated" else budget
        job = {
            **{"path": str(path), "device": device, "state": "none", "held": "bfloat16"},
            **{"options": {"budget": given, "dtype": "checkpoint"}, "unchecked": True},
        }
        low, high, free_nbytes = 0, limit_nbytes, limit_nbytes
        while high - low > USABLE_STEP * limit_nbytes:
            nbytes = _hollow(path, (low + high) // 2)
            ran = run_boxed(maker, job, lambda charged, limit=limit_nbytes: limit)  # type: ignore[misc]
            free_nbytes = ran["room_nbytes"] or free_nbytes
            low, high = (nbytes, high) if ran["outcome"] == "loaded" else (low, nbytes)
            if ran["outcome"] in FAILURES:
                what = f"{device}, budget {budget}, {nbytes} bytes in {limit_nbytes}"
                section.failures.append(f"{what}: {ran['outcome']} {ran['why']}")
                options.say(f"torture: {section.failures[-1]}")
        what = f"{device}, budget {budget}, box of {format_bytes(limit_nbytes)}"
        options.say(f"torture: {what}: {low / free_nbytes:.1%}")
        section.rows.append(
            {
                **{"box": format_bytes(limit_nbytes), "device": device, "budget": budget},
                **{"free": format_bytes(free_nbytes), "largest": format_bytes(low)},
                "share": f"{low / free_nbytes:.1%}",
            }
        )
        if budget != "80%":
            least = USABLE_BOXES[limit_nbytes]
            section.target(f"{what}: share", low / free_nbytes, at_least=least)
    return section


def _hollow(path: Path, nbytes: int) -> int:
    """Write a checkpoint of about so many bytes that takes none of the disk; returns its bytes."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    one = nbytes // 64 // 4096 * 4096
    header = make_header([(f"w{n}", (one // 4096, 2048)) for n in range(64)], BF16)
    with open(path / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + 64 * one)
    return 64 * one
