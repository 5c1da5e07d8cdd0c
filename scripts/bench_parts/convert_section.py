"""The section "convert": against a copy, and the scripts that one would write; and in a box."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from bench_parts.processes import Measured, argv, environment, measure
from bench_parts.sections import (
    SMALL_NBYTES,
    NotHereError,
    Options,
    Section,
    Target,
    cached_checkpoint,
    forget,
    read_all,
)
from streamload.units import format_bytes

BOX_NBYTES = 2**28
#: What a conversion of any size may take over that of 1 MB, in anonymous memory.
SLACK_NBYTES = 100_000_000
OURS = "convert by streamload"


def convert(options: Options) -> Section:
    """Bf16 to fp16 on the disk: time, memory, and what a cgroup of 256 MB leaves of it."""
    # the checkpoint, what is made of it, and what the page cache may still have to write
    room = shutil.disk_usage(options.work).free
    if room < 2 * options.nbytes + 2**30:
        raise NotHereError(f"{options.work} has {format_bytes(room)} free")
    section = Section(
        "convert",
        "medians; bf16 to fp16, to the disk (fsync) and back to nothing; the source is in the page "
        "cache where nothing else is said; processes take turns; cp casts nothing; the box is a "
        f"memory cgroup of {format_bytes(BOX_NBYTES)}, no swap",
    )
    ways = ["convert by cp", OURS, "convert by numpy"]
    if importlib.util.find_spec("torch") is not None:
        ways.append("convert by torch")
    out = options.work / "converted"

    def run(path: Path, way: str, **more: Any) -> Measured:
        try:
            return measure(way, path=str(path), out=str(out), **more)
        finally:
            shutil.rmtree(out, ignore_errors=True)

    with cached_checkpoint(options, SMALL_NBYTES) as path:
        base = {way: run(path, way, sampled=True).peak_nbytes for way in ways}
    with cached_checkpoint(options, options.nbytes) as path:
        found: dict[str, list[Measured]] = {way: [] for way in ways}
        for number in range(options.runs):
            for way in ways:
                options.say(f"convert: run {number + 1} of {options.runs}, {way}")
                read_all(path)
                found[way].append(run(path, way))
        times = {way: median(m.first["wall_s"] for m in runs) for way, runs in found.items()}
        for way, runs in found.items():
            read_all(path)
            peak_nbytes = run(path, way, sampled=True).peak_nbytes
            section.rows.append(
                {
                    "what": way,
                    "wall_s": round(times[way], 2),
                    "cpu_s": round(median(m.cpu_s for m in runs), 2),
                    "GB/s": round(options.nbytes / 1e9 / times[way], 2),
                    "anonymous memory": format_bytes(peak_nbytes),
                    "of 1 MB": format_bytes(base[way]),
                }
            )
            if way == OURS:
                excess = peak_nbytes - base[way]
                target = Target("bytes over a conversion of 1 MB", excess, at_most=SLACK_NBYTES)
                section.targets.append(target)
            section.raw.append({"what": way, "wall_s": [m.first["wall_s"] for m in runs]})
        ours = times[OURS]
        section.targets += [
            Target("share of cp's speed", times["convert by cp"] / ours, at_least=0.8),
            Target("times numpy's speed", times["convert by numpy"] / ours, at_least=5.0),
        ]
        _box(options, section, path, out, [way for way in ways if way != "convert by cp"])
    return section


def _box(options: Options, section: Section, path: Path, out: Path, ways: list[str]) -> None:
    """What becomes of each way in the box."""
    boxes = importlib.import_module("boxes")
    try:
        maker = boxes.Boxes()
    except (boxes.NoBoxesError, OSError) as error:
        section.note += f"; no box here: {error}"
        return
    for way in ways:
        for what, prepare in (("cached", read_all), ("not cached", forget)):
            options.say(f"convert: in the box, {what}, {way}")
            prepare(path)
            command = argv(way, path=str(path), out=str(out))
            done = maker.run(command, BOX_NBYTES, env=environment(), timeout_s=1800)
            whole = (out / "model.safetensors").exists()
            shutil.rmtree(out, ignore_errors=True)
            section.rows.append(
                {
                    "what": f"{way}, {what}",
                    "in the box": "killed"
                    if done.oom_killed
                    else f"exit {done.returncode}"
                    if done.returncode
                    else "done",
                    "peak of the box": format_bytes(done.peak_nbytes or 0),
                }
            )
            if way == OURS:
                good = float(not done.returncode and not done.oom_killed and whole)
                section.targets.append(Target(f"finishes in the box, {what}", good, at_least=1))
