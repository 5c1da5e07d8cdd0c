"""The sections of the bench: what is run, in which order, and what it must reach."""

from __future__ import annotations

import importlib
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from make_checkpoint import make_checkpoint, shape_of_size

from bench_parts.processes import Measured, WorkerError, argv, environment, measure, result_of
from bench_parts.worker import WAYS
from streamload.devices.probing import probe
from streamload.dtypes import BF16
from streamload.plan.budget import available_host_nbytes
from streamload.units import format_bytes

#: What the box is to the checkpoint, at any size: 3 GB for 2.27 GB.
BOX_RATIO = 3.0 / 2.27
SLACK_NBYTES = 64_000_000
SMALL_NBYTES = 1_000_000
LARGEST_STEP = 1 / 60  # of the box: 50 MB of 3 GB
LARGEST_TARGET = 2.8 / 3.0  # of the box


class NotHereError(Exception):
    """A section cannot be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and what it should be.

    Attributes:
        what: in words.
        value: as measured.
        at_least: the least that is good, or None.
        at_most: the most that is good, or None.
    """

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is what it should be."""
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)


@dataclass(slots=True)
class Section:
    """What a section found.

    Attributes:
        name: the section.
        note: how to read its rows.
        rows: one measurement or median each, by column.
        targets: what its figures should be.
        raw: all that was measured, where that is more than the rows.
        charts: SVG files, by name.
        tables: more rows, by title.
        failures: what must not be: the command ends with an error.
    """

    name: str
    note: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)
    charts: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        targets = [asdict(target) | {"met": target.met} for target in self.targets]
        more = {"tables": self.tables} if self.tables else {}
        found = {"note": self.note, "rows": self.rows, "targets": targets, "raw": self.raw}
        return found | more


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    Attributes:
        nbytes: size of the checkpoint.
        runs: how many processes of each kind.
        devices: names of the devices, as far as they work here.
        work: a folder for checkpoints.
        say: told what is being done.
        ways: names, or parts of names, of the ways to load that the section torch takes.
        tensors: how many small ones the section many has.
        seed: of the random loads of the section torture.
        only: the number of the one that it runs; None: the first ``runs``.
        usable: what it tells is how much of a box can be used, and nothing else.
    """

    nbytes: int
    runs: int
    devices: tuple[str, ...]
    work: Path
    say: Callable[[str], None]
    ways: tuple[str, ...] = ()
    tensors: int = 50_000
    seed: int = 0
    only: int | None = None
    usable: bool = False


@contextmanager
def cached_checkpoint(options: Options, nbytes: int, **arguments: Any) -> Iterator[Path]:
    """A bf16 checkpoint in the page cache, data at 8 modulo 16; removed afterwards.

    Raises:
        NotHereError: there is no room for it.
    """
    out = options.work / f"checkpoint-{nbytes}"
    free_nbytes = shutil.disk_usage(options.work).free
    if free_nbytes < nbytes + 2**28:
        raise NotHereError(f"{options.work} has {format_bytes(free_nbytes)} free for checkpoints")
    options.say(f"writing a checkpoint of {format_bytes(nbytes)}")
    try:
        arguments = {"offset_mod_16": 8} | arguments
        make_checkpoint(out, shape_of_size(nbytes, BF16), **arguments)
        read_all(out)
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def read_all(path: Path) -> None:
    """Bring a checkpoint into the page cache, and its dirty pages to the disk."""
    block = bytearray(2**22)
    for file in path.glob("*.safetensors"):
        with open(file, "rb", buffering=0) as data:
            os.fsync(data.fileno())
            while data.readinto(block):
                pass


def forget(path: Path) -> None:
    """Drop a checkpoint from the page cache."""
    for file in path.glob("*.safetensors"):
        with open(file, "rb") as data:
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def working(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those devices that work here."""
    return tuple(
        name for name in names if probe("host" if name == "host" else "tinygrad", name).works
    )


def need_memory(nbytes: int) -> None:
    """Raise NotHereError where less is free."""
    free_nbytes = available_host_nbytes()
    if free_nbytes < nbytes:
        raise NotHereError(
            f"needs {format_bytes(nbytes)} of free memory, there are {format_bytes(free_nbytes)}: "
            "choose a smaller --size"
        )


# --- the box --------------------------------------------------------------------------------------


def box(options: Options) -> Section:
    """A memory cgroup in which tinygrad is killed and streamload finishes."""
    boxes = importlib.import_module("boxes")
    try:
        maker = boxes.Boxes()
    except (boxes.NoBoxesError, OSError) as error:
        raise NotHereError(str(error)) from error
    limit_nbytes = int(options.nbytes * BOX_RATIO)
    section = Section(
        "box",
        f"memory cgroup of {format_bytes(limit_nbytes)}, no swap; bf16 to fp16; peak of the "
        "cgroup with page cache; exit 3 is a refusal before any data is read",
    )

    def run(what: str, path: Path, command: list[str], box_nbytes: int = limit_nbytes) -> Any:
        options.say(f"box: {what}")
        done = maker.run(command, box_nbytes, env=environment(), timeout_s=1800)
        outcome = "killed" if done.oom_killed else f"exit {done.returncode}"
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        section.rows.append(
            {
                "what": what,
                "checkpoint": format_bytes(size),
                "box": format_bytes(box_nbytes),
                "outcome": "done" if outcome == "exit 0" else outcome,
                "peak": format_bytes(done.peak_nbytes or 0),
                "said": (done.stderr.strip().splitlines() or [""])[-1][:200],
            }
        )
        return done

    def load(path: Path, device: str, *more: str) -> list[str]:
        command = [sys.executable, "-m", "streamload", "load", str(path), "--device", device]
        return [*command, "--dtype", "float16", "--no-progress", "--json", *more]

    def verified(done: Any) -> bool:
        return not done.returncode and result_of(done.stdout).get("verified") is True

    with cached_checkpoint(options, options.nbytes) as path:
        file = str(path / "model.safetensors")
        if "CL" in options.devices:
            for way in WAYS:
                command = argv("tinygrad", path=file, device="CL", way=way)
                done = run(f"tinygrad to CL, {way}", path, command)
                if way == "cast":
                    killed = float(done.oom_killed)
                    section.targets.append(Target("tinygrad is killed", killed, at_least=1))
        for device in options.devices:
            for what, prepare in (("cached", read_all), ("not cached", forget)):
                prepare(path)
                budget = ("--budget", str(int(options.nbytes * 1.02)), "--verify")
                done = run(
                    f"streamload to {device}, file {what}", path, load(path, device, *budget)
                )
                section.targets.append(
                    Target(
                        f"streamload to {device} finishes, file {what}",
                        verified(done),
                        at_least=1,
                    )
                )
    half_nbytes = int(options.nbytes * 2 / 2.27)
    with cached_checkpoint(options, half_nbytes) as path:
        for device in options.devices:
            what = f"streamload to {device}, no budget"
            done = run(what, path, load(path, device), half_nbytes // 2)
            refused = done.returncode == 3 and not done.oom_killed
            section.targets.append(Target(f"{what}, in half: refused", refused, at_least=1))
    for device in options.devices[:1]:
        largest = _largest(options, limit_nbytes, device, run, load, verified)
        section.targets.append(
            Target(
                f"largest checkpoint to {device}, as a share of the box",
                largest / limit_nbytes,
                at_least=LARGEST_TARGET,
            )
        )
    return section


def _largest(
    options: Options,
    limit_nbytes: int,
    device: str,
    run: Callable[..., Any],
    load: Callable[..., list[str]],
    verified: Callable[[Any], bool],
) -> int:
    """The largest checkpoint that loads in the box, from the target on upwards, in bytes."""
    largest = 0
    nbytes = math.ceil(limit_nbytes * LARGEST_TARGET)
    while nbytes < limit_nbytes:
        with cached_checkpoint(options, nbytes) as path:
            command = load(path, device, "--budget", str(limit_nbytes), "--verify")
            if not verified(run(f"streamload to {device}, larger", path, command)):
                break
        largest = nbytes
        nbytes += int(limit_nbytes * LARGEST_STEP)
    return largest


# --- memory ---------------------------------------------------------------------------------------


def memory(options: Options) -> Section:
    """Peak of a load over that of a load of 1 MB, as another process sees it."""
    need_memory(2 * options.nbytes)
    section = Section(
        "memory",
        "peak RssAnon + RssShmem, sampled twice a millisecond by another process; excess is over "
        "the weights and the peak of a 1 MB load",
    )
    with (
        cached_checkpoint(options, options.nbytes) as path,
        cached_checkpoint(options, SMALL_NBYTES) as small,
    ):
        for device in options.devices:
            for reader in ("mmap", "pread"):
                arguments: dict[str, Any] = {"device": device, "reader": reader}
                least = measure("streamload", sampled=True, path=str(small), **arguments)
                for threads in (1, 2):
                    options.say(f"memory: {device}, {reader}, {threads} threads")
                    done = measure(
                        "streamload", sampled=True, path=str(path), threads=threads, **arguments
                    )
                    excess = done.peak_nbytes - least.peak_nbytes - options.nbytes
                    section.rows.append(
                        {
                            "device": device,
                            "reader": reader,
                            "threads": threads,
                            "weights": format_bytes(int(done.result["nbytes"])),
                            "1 MB load": format_bytes(least.peak_nbytes),
                            "peak": format_bytes(done.peak_nbytes),
                            "excess_nbytes": excess,
                        }
                    )
        worst = max((row["excess_nbytes"] for row in section.rows), default=0)
        section.targets.append(Target("largest excess, bytes", worst, at_most=SLACK_NBYTES))
    return section


# --- speed ----------------------------------------------------------------------------------------

#: Fresh memory as each device takes it, and tinygrad's targets: times its wall time, share of CPU.
FRESH = {"CL": "private", "CPU": "shared", "host": "private"}
TINYGRAD_TARGETS = {"CL": (5.0, 1 / 5), "CPU": (3.0, 1 / 2)}
RELOADS = 3


def speed(options: Options) -> Section:
    """Against tinygrad's own load, memset of fresh memory, and memcpy."""
    need_memory(int(4.2 * options.nbytes))
    section = Section(
        "speed",
        "medians; the file is in the page cache; processes take turns; bf16 to fp16. memset: fresh "
        "anonymous memory (private for CL and host, shared for CPU) without huge pages; memcpy: "
        "memory that exists; both with streamload's threads where it is not said otherwise",
    )
    with cached_checkpoint(options, options.nbytes) as path:
        for device in options.devices:
            _speed_of(device, options, path, section)
    return section


def _speed_of(device: str, options: Options, path: Path, section: Section) -> None:
    options.say(f"speed: {device}: touching memory, warming caches")
    measure("touch", nbytes=int(4 * options.nbytes))
    ours = measure("streamload", path=str(path), device=device, loads=1)
    threads, nbytes = int(ours.result["threads"]), int(ours.result["nbytes"])
    file = str(path / "model.safetensors")
    way = _fastest_way(device, options, file, section)
    jobs: dict[str, Callable[[], Measured]] = {
        "streamload": lambda: measure(
            "streamload", path=str(path), device=device, loads=1 + RELOADS
        ),
        "memset": lambda: measure("memset", nbytes=nbytes, threads=threads, kind=FRESH[device]),
        "memcpy": lambda: measure("memcpy", nbytes=nbytes, threads=threads, loads=RELOADS),
        "memcpy, one thread": lambda: measure("memcpy", nbytes=nbytes, threads=1, loads=RELOADS),
        "pread": lambda: measure("pread", path=file, threads=threads, loads=RELOADS),
    }
    if way:
        jobs["tinygrad"] = lambda: measure("tinygrad", path=file, device=device, way=way)
    found: dict[str, list[Measured]] = {name: [] for name in jobs}
    for number in range(options.runs):
        for name, job in jobs.items():
            options.say(f"speed: {device}: run {number + 1} of {options.runs}, {name}")
            read_all(path)
            found[name].append(job())
    laps = {
        "streamload": [m.first for m in found["streamload"]],
        "streamload, in place": [lap for m in found["streamload"] for lap in m.result["laps"][1:]],
        "memset, fresh": [m.first for m in found["memset"]],
        "memcpy, in place": _all_laps(found["memcpy"]),
        "memcpy, in place, one thread": _all_laps(found["memcpy, one thread"]),
        "pread, in place, no cast": _all_laps(found["pread"]),
    }
    if way:
        laps[f"tinygrad, {way}"] = [m.first for m in found["tinygrad"]]
    wholes = {"streamload": found["streamload"], f"tinygrad, {way}": found.get("tinygrad", [])}
    middle = {
        name: {key: median(lap[key] for lap in of) for key in ("wall_s", "cpu_s")}
        for name, of in laps.items()
    }
    for name, lap in middle.items():
        whole = [m.wall_s - _again_s(m) for m in wholes.get(name, ())]
        section.rows.append(
            {
                "device": device,
                "what": name,
                "wall_s": round(lap["wall_s"], 3),
                "cpu_s": round(lap["cpu_s"], 3),
                "GB/s": round(nbytes / 1e9 / lap["wall_s"], 2),
                "process_wall_s": round(median(whole), 3) if whole else None,
            }
        )
    one = middle["streamload"]
    if way and device in TINYGRAD_TARGETS:
        other = middle[f"tinygrad, {way}"]
        times, share = TINYGRAD_TARGETS[device]
        section.targets += [
            Target(
                f"{device}: times tinygrad's speed", other["wall_s"] / one["wall_s"], at_least=times
            ),
            Target(
                f"{device}: share of tinygrad's CPU", one["cpu_s"] / other["cpu_s"], at_most=share
            ),
        ]
    section.targets += [
        Target(
            f"{device}: share of memset's rate, fresh",
            middle["memset, fresh"]["wall_s"] / one["wall_s"],
            at_least=0.8,
        ),
        Target(
            # one thread's: the page cache bounds a file's bytes to about that, while two threads
            # copy memory that is mapped already nearly twice as fast
            f"{device}: share of one thread's memcpy rate, in place",
            middle["memcpy, in place, one thread"]["wall_s"]
            / middle["streamload, in place"]["wall_s"],
            at_least=0.9,
        ),
    ]


def _all_laps(runs: list[Measured]) -> list[dict[str, float]]:
    return [lap for measured in runs for lap in measured.result["laps"]]


def _again_s(measured: Measured) -> float:
    """Seconds of the laps after the first, which are no part of a plain load."""
    return sum(float(lap["wall_s"]) for lap in measured.result["laps"][1:])


def _fastest_way(device: str, options: Options, file: str, section: Section) -> str:
    """The way of tinygrad's that is fastest here, each tried once; "" where none works."""
    if device == "host":
        return ""
    seconds: dict[str, float] = {}
    for way in WAYS:
        options.say(f"speed: {device}: tinygrad, {way}")
        try:
            measure("tinygrad", path=file, device=device, way=way)  # compiles
            seconds[way] = measure("tinygrad", path=file, device=device, way=way).first["wall_s"]
        except WorkerError as error:
            section.rows.append({"device": device, "what": f"tinygrad, {way}: {error}"})
    return min(seconds, key=lambda way: seconds[way], default="")


# --- the cast -------------------------------------------------------------------------------------

#: How many times each engine's speed the LLVM kernel should have.
CAST_TARGETS: Mapping[str, float] = {"memcpy": 1.0, "ml_dtypes": 5.0, "numpy": 15.0}
CAST_LOADS = 3


def cast(options: Options) -> Section:
    """The cast on one core, against memcpy and what else Python has."""
    section = Section(
        "cast",
        "bf16 to fp16 with counts, one core, windows of 8 MiB through 256 MiB of memory that "
        "exists; GB/s of source bytes, medians",
    )
    laps: dict[str, list[float]] = {name: [] for name in ("llvm", *CAST_TARGETS)}
    for number in range(options.runs):
        for name, seconds in laps.items():
            options.say(f"cast: run {number + 1} of {options.runs}, {name}")
            done = measure("cast", engine=name, loads=CAST_LOADS)
            seconds += [
                done.result["nbytes"] / 1e9 / lap["wall_s"] for lap in done.result["laps"][1:]
            ]
    rates = {name: median(of) for name, of in laps.items()}
    section.rows = [{"what": name, "GB/s": round(rate, 2)} for name, rate in rates.items()]
    section.targets = [
        Target(f"times {name}", rates["llvm"] / rates[name], at_least=times)
        for name, times in CAST_TARGETS.items()
    ]
    return section


SECTIONS: dict[str, Callable[[Options], Section]] = {
    "box": box,
    "memory": memory,
    "speed": speed,
    "cast": cast,
}
