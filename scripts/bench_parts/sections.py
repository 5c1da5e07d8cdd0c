"""The sections box, memory, speed, cast, convert and many."""

from __future__ import annotations

import importlib.util
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from boxes import Boxes, BoxRun
from make_checkpoint import many_of_size

from bench_parts.compared import add, compared, peer_targets, runs_of
from bench_parts.jobs import WAYS
from bench_parts.section import (
    FILES,
    SMALL_NBYTES,
    Measured,
    NotHereError,
    Options,
    Section,
    boxes_here,
    cached,
    checkpoint,
    files_nbytes,
    in_box,
    in_turns,
    measure,
    need_disk,
    need_memory,
    read_all,
)
from streamload.bench.loaders import OURS
from streamload.bench.processes import call, command
from streamload.core.dtypes import BF16
from streamload.core.units import format_bytes

JOBS = "bench_parts.jobs:"

# --- the box --------------------------------------------------------------------------------------

#: What the box is to the checkpoint, at any size: 3 GB for 2.27 GB.
BOX_RATIO = 3.0 / 2.27
LARGEST_STEP = 1 / 60  # of the box: 50 MB of 3 GB
LARGEST_TARGET = 2.8 / 3.0  # of the box


def box(options: Options) -> Section:
    """A memory cgroup in which tinygrad is killed and streamload finishes."""
    maker = boxes_here()
    limit_nbytes = int(options.nbytes * BOX_RATIO)
    section = Section(
        "box",
        f"memory cgroup of {format_bytes(limit_nbytes)}, no swap; bf16 to fp16; peak of the "
        "cgroup with page cache; exit 3 is a refusal before any data is read",
    )

    def run(what: str, path: Path, argv: list[str], box_nbytes: int = limit_nbytes) -> BoxRun:
        options.say(f"box: {what}")
        done = maker.run(argv, box_nbytes, timeout_s=1800)
        size = files_nbytes(path)
        section.rows.append(
            {
                "what": what,
                "checkpoint": format_bytes(size),
                "box": format_bytes(box_nbytes),
                "outcome": done.outcome,
                "peak": format_bytes(done.peak_nbytes or 0),
                "said": (done.stderr.strip().splitlines() or [""])[-1][:200],
            }
        )
        return done

    def load(path: Path, device: str, *more: str) -> list[str]:
        argv = [sys.executable, "-P", "-m", "streamload", "load", str(path), "--device", device]
        return [*argv, "--dtype", "float16", "--no-progress", "--json", *more]

    def verified(done: BoxRun) -> bool:
        return not done.returncode and done.said.get("verified") is True

    with checkpoint(options, options.nbytes) as path:
        file = str(path / "model.safetensors")
        for way in WAYS if "CL" in options.devices else ():
            job = call(JOBS + "tinygrad", path=file, device="CL", way=way)
            done = run(f"tinygrad to CL, {way}", path, command(job, at_once=True))
            if way == "cast":
                section.target("tinygrad is killed", float(done.oom_killed), at_least=1)
        for device in options.devices:
            for state, prepare in FILES.items():
                prepare(path)
                what = f"streamload to {device}, file {state}"
                budget = ("--budget", str(int(options.nbytes * 1.02)), "--verify")
                good = verified(run(what, path, load(path, device, *budget)))
                what = f"streamload to {device} finishes, file {state}"
                section.target(what, good, at_least=1)
    half_nbytes = int(options.nbytes * 2 / 2.27)
    with checkpoint(options, half_nbytes) as path:
        for device in options.devices:
            what = f"streamload to {device}, no budget"
            done = run(what, path, load(path, device), half_nbytes // 2)
            refused = done.returncode == 3 and not done.oom_killed
            section.target(f"{what}, in half: refused", refused, at_least=1)
    for device in options.devices[:1]:
        largest, nbytes = 0, math.ceil(limit_nbytes * LARGEST_TARGET)
        while nbytes < limit_nbytes:
            with checkpoint(options, nbytes) as path:
                argv = load(path, device, "--budget", str(limit_nbytes), "--verify")
                if not verified(run(f"streamload to {device}, larger", path, argv)):
                    break
            largest, nbytes = nbytes, nbytes + int(limit_nbytes * LARGEST_STEP)
        what = f"largest checkpoint to {device}, as a share of the box"
        section.target(what, largest / limit_nbytes, at_least=LARGEST_TARGET)
    return section


# --- memory ---------------------------------------------------------------------------------------

SLACK_NBYTES = 64_000_000
SAMPLE_S = 0.0005


def memory(options: Options) -> Section:
    """Peak of a load by each reader, beyond its weights."""
    need_memory(2 * options.nbytes)
    section = Section(
        "memory",
        "bf16 to fp16; host: growth of RssAnon + RssShmem during a load, sampled by another "
        "process; excess is over the weights",
    )
    ways = {
        f"{reader}, {threads} threads": {"options": {"reader": reader, "threads": threads}}
        for reader in ("mmap", "pread")
        for threads in (1, 2)
    }
    plain: dict[str, Any] = {"dtype": "float16", "peers": (), "limits": False, "again": 0}
    worst = 0
    with checkpoint(options, options.nbytes) as path:
        for device in options.devices:
            found = compared(options, path, device, variants=ways, **plain)
            add(section, found, device)
            peaks = [run.memory.anon_nbytes for name in ways for run in runs_of(found, name)]
            worst = max(worst, *(nbytes - found.nbytes for nbytes in peaks))
    section.target("largest excess, bytes", worst, at_most=SLACK_NBYTES)
    return section


# --- speed ----------------------------------------------------------------------------------------

#: Of tinygrad by device: least times its rate, most of its CPU time.
TINYGRAD_TARGETS = {"CL": (5.0, 1 / 5), "CPU": (3.0, 1 / 2)}


def speed(options: Options) -> Section:
    """Against the loaders of each device, and the page cache."""
    need_memory(int(4.2 * options.nbytes))
    section = Section("speed", "bf16 to fp16, the file in the page cache; processes take turns")
    with checkpoint(options, options.nbytes) as path:
        for device in options.devices:
            found = compared(options, path, device, dtype="float16")
            times, share = TINYGRAD_TARGETS.get(device, (1.0, 1.0))
            add(section, found, device)
            peer_targets(section, found, device, {"tinygrad": times}, 1.0)
            ours, theirs = ([r.cpu_s for r in runs_of(found, n)] for n in (OURS, "tinygrad"))
            if ours and theirs:
                what = f"{device}: share of tinygrad's CPU time"
                section.target(what, median(ours) / median(theirs), at_most=share)
    return section


# --- the cast -------------------------------------------------------------------------------------

#: How many times each engine's speed the LLVM kernel should have.
CAST_TARGETS: Mapping[str, float] = {"memcpy": 1.0, "ml_dtypes": 5.0, "numpy": 15.0}
CAST_LAPS = 3


def cast(options: Options) -> Section:
    """The cast on one core, against memcpy and what else Python has."""
    section = Section(
        "cast",
        "bf16 to fp16 with counts, one core, windows of 8 MiB through 256 MiB of memory that "
        "exists; GB/s of source bytes, medians",
    )
    jobs = {
        name: partial(measure, call(JOBS + "cast", engine=name), laps=CAST_LAPS)
        for name in ("llvm", *CAST_TARGETS)
    }
    rates = {
        name: median(lap["nbytes"] / 1e9 / lap["seconds"] for run in runs for lap in run.laps[1:])
        for name, runs in in_turns(jobs, options.runs, options.say).items()
    }
    section.rows = [{"what": name, "GB/s": round(rate, 2)} for name, rate in rates.items()]
    for name, times in CAST_TARGETS.items():
        section.target(f"times {name}", rates["llvm"] / rates[name], at_least=times)
    return section


# --- conversions ----------------------------------------------------------------------------------

CONVERT_BOX_NBYTES = 2**28
#: What a conversion of any size may take over that of 1 MB, in anonymous memory.
CONVERT_SLACK_NBYTES = 100_000_000


def convert(options: Options) -> Section:
    """Bf16 to fp16 on the disk: time, memory, and what a cgroup of 256 MB leaves of it."""
    # the checkpoint, what is made of it, and what the page cache may still have to write
    need_disk(options.work, 2 * options.nbytes + 2**30)
    section = Section(
        "convert",
        "medians; bf16 to fp16, to the disk (fsync) and back to nothing; the source is in the page "
        "cache where nothing else is said; processes take turns; cp casts nothing; the box is a "
        f"memory cgroup of {format_bytes(CONVERT_BOX_NBYTES)}, no swap",
    )
    ways = ["cp", "streamload", "numpy"]
    if importlib.util.find_spec("torch") is not None:
        ways.append("torch")
    out = options.work / "converted"

    def run(path: Path, way: str, **more: Any) -> Measured:
        try:
            return measure(call(JOBS + "convert", path=str(path), out=str(out), way=way), **more)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    with checkpoint(options, SMALL_NBYTES) as path:
        base = {way: run(path, way, sample_s=SAMPLE_S).peak.anon_nbytes for way in ways}
    with checkpoint(options, options.nbytes) as path:
        jobs = {f"convert by {way}": partial(run, path, way) for way in ways}
        found = in_turns(jobs, options.runs, cached(options, path))
        times = {}
        for way, (name, runs) in zip(ways, found.items(), strict=True):
            seconds = [m.first["seconds"] for m in runs]
            times[way] = median(seconds)
            read_all(path)
            peak_nbytes = run(path, way, sample_s=SAMPLE_S).peak.anon_nbytes
            section.rows.append(
                {
                    "what": name,
                    "wall_s": round(times[way], 2),
                    "cpu_s": round(median(m.cpu_s for m in runs), 2),
                    "GB/s": round(options.nbytes / 1e9 / times[way], 2),
                    "anonymous memory": format_bytes(peak_nbytes),
                    "of 1 MB": format_bytes(base[way]),
                }
            )
            if way == "streamload":
                what, excess = "bytes over a conversion of 1 MB", peak_nbytes - base[way]
                section.target(what, excess, at_most=CONVERT_SLACK_NBYTES)
            section.raw.append({"what": name, "wall_s": seconds})
        section.target("share of cp's speed", times["cp"] / times["streamload"], at_least=0.8)
        section.target("times numpy's speed", times["numpy"] / times["streamload"], at_least=5.0)
        try:
            maker = boxes_here()
        except NotHereError as error:
            section.note += f"; no box here: {error}"
        else:
            for way in ways[1:]:
                _convert_in_box(options, section, maker, path, out, way)
    return section


def _convert_in_box(
    options: Options, section: Section, maker: Boxes, path: Path, out: Path, way: str
) -> None:
    what = f"convert by {way}"
    job = call(JOBS + "convert", path=str(path), out=str(out), way=way)
    for state, done in in_box(options, what, path, job, maker, CONVERT_BOX_NBYTES):
        whole = (out / "model.safetensors").exists()
        shutil.rmtree(out, ignore_errors=True)
        section.rows.append(
            {
                "what": f"{what}, {state}",
                "in the box": done.outcome,
                "peak of the box": format_bytes(done.peak_nbytes or 0),
            }
        )
        if way == "streamload":
            good = float(done.outcome == "done" and whole)
            section.target(f"finishes in the box, {state}", good, at_least=1)


# --- many small tensors ---------------------------------------------------------------------------

TENSOR_NBYTES = 2048
MANY_SHARDS = 4


def many(options: Options) -> Section:
    """Microseconds a tensor, of streamload's steps and beside safetensors' own loader."""
    section = Section(
        "many",
        f"medians of processes, of the second lap of each; {options.tensors} tensors of bf16 of "
        f"{TENSOR_NBYTES} bytes in {MANY_SHARDS} files, in the page cache; load: the whole call, "
        "to torch's CPU where there is torch, else to numpy; load_file is by safetensors, which "
        "maps the file and copies nothing",
    )
    ways = ["streamload"]
    if importlib.util.find_spec("torch") is not None:
        ways.append("load_file")
    nbytes = options.tensors * TENSOR_NBYTES
    shape = many_of_size(nbytes, BF16, options.tensors)
    with checkpoint(options, nbytes, shape, shards=MANY_SHARDS) as path:
        jobs = {  # the first lap imports and compiles
            f"many by {way}": partial(measure, call(JOBS + "many", path=str(path), way=way), laps=2)
            for way in ways
        }
        found = in_turns(jobs, options.runs, cached(options, path))
    for way, runs in found.items():
        last = [run.laps[-1]["steps"] for run in runs]
        for step in last[0]:
            us = median(lap[step] for lap in last) / options.tensors * 1e6
            section.rows.append({"what": way, "step": step, "us a tensor": round(us, 2)})
        laps = [[lap["steps"] for lap in run.laps] for run in runs]
        section.raw.append({"what": way, "laps": laps})
    return section


SECTIONS: dict[str, Callable[[Options], Section]] = {
    "box": box,
    "memory": memory,
    "speed": speed,
    "cast": cast,
    "convert": convert,
    "many": many,
}
