"""The section diffusers: images of a Flux-shaped pipeline on a device that is too small for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench_parts.diffusers_jobs import OURS, RESIDENT, WAYS, write
from bench_parts.section import Options, Section, files_nbytes, measure, need_packages
from streamload.bench.processes import MeasurementError, call, system_nbytes
from streamload.core.units import format_bytes, parse_bytes

_JOB = "bench_parts.diffusers_jobs:images"
_TIMEOUT_S = 900.0
#: For activations of an image of 1024 pixels, and the workspaces of libraries.
_RESERVE_NBYTES = 1_200_000_000
TIMES_OTHERS = 2.0
HOST_NBYTES = 200_000_000


def diffusers(options: Options) -> Section:
    """Seconds an image, by budget and way."""
    need_packages("torch", "diffusers", "transformers", "accelerate")
    folder = (options.keep or options.work) / f"flux-{options.scale:g}"
    write(folder, options.scale, options.say)
    nbytes = files_nbytes(folder)
    section = Section(
        "diffusers",
        f"a pipeline of Flux's shape, random bf16, {format_bytes(nbytes)}, on "
        f"{options.torch_device}; {options.steps} steps, {options.pixels} pixels a side; seconds "
        f"an image, the median of {options.runs} after one of few steps (*: by the steps of a "
        "shorter one); on the device: the most that torch's allocator held, in tensors or "
        "reserved; of the host: RssAnon + RssShmem beyond that of the process with all imported, "
        "and what the machine took that is no page cache",
    )
    for name, budget in _wanted(options):
        _measure(section, options, folder, name, budget)
    for budget in map(parse_bytes, options.budgets):
        _targets(section, budget)
    return section


def _wanted(options: Options) -> Iterator[tuple[str, int]]:
    """The ways asked for, with each budget; 0 for those that heed none."""
    for name, way in WAYS.items():
        if not options.ways or any(part in name for part in options.ways):
            budgets = map(parse_bytes, options.budgets) if way.budgets else [0]
            yield from ((name, budget) for budget in budgets)


def _measure(section: Section, options: Options, folder: Path, name: str, budget: int) -> None:
    """Add the row of one way and budget, or its problem."""
    row: dict[str, Any] = {"way": name, "budget": format_bytes(budget) if budget else ""}
    options.say(f"diffusers: {name} {row['budget']}")
    job = call(
        _JOB,
        path=str(folder),
        device=options.torch_device,
        way=name,
        budget=budget,
        reserve=int(_RESERVE_NBYTES * min(options.scale, 1) * (options.pixels / 1024) ** 2),
        steps=options.steps,
        pixels=options.pixels,
    )
    raw: dict[str, Any] = {"way": name, "budget": budget}
    before = system_nbytes()
    try:
        done = measure(job, laps=options.runs + 1, sample_s=0.02, timeout_s=_TIMEOUT_S)
    except MeasurementError as error:
        section.rows.append(row | {"problem": str(error)})
        section.raw.append(raw | {"problem": str(error)})
        if name == OURS:
            section.failures.append(f"{name} {row['budget']}: {error}")
        return
    laps, peak = done.laps[1:], done.peak
    seconds, last = median(lap["seconds"] for lap in laps), laps[-1]
    raw |= {"laps": laps, "seconds": seconds, "host_nbytes": peak.anon_nbytes - last["base_nbytes"]}
    raw |= {"device_nbytes": last.get("device_nbytes", 0)}
    section.raw.append(raw)
    row |= {"s an image": f"{seconds:.2f}{'*' * (last['steps'] < options.steps)}"}
    row |= {"s a step": f"{last['step_s']:.3f}", "image": f"{last['image']:08x}"}
    if "device_nbytes" in last:
        row["tensors"] = format_bytes(last["allocated_nbytes"])
        row["reserved"] = format_bytes(last["device_nbytes"])
    row["of the host"] = format_bytes(max(raw["host_nbytes"], 0))
    row["of the machine"] = format_bytes(max(peak.system_nbytes - before, 0))
    options.say(f"  {row['s an image']} s an image, {row['of the host']} of the host")
    section.rows.append(row | ({} if last["finite"] else {"problem": "the image is not finite"}))


def _targets(section: Section, budget: int) -> None:
    """Compare streamload under one budget with the best others that take no more of the device."""
    found = [raw for raw in section.raw if "seconds" in raw]
    mine = next((r for r in found if (r["way"], r["budget"]) == (OURS, budget)), None)
    if mine is None:
        return
    size = format_bytes(budget)
    # what the frameworks' libraries take, to compute the same image
    resident = next((raw["host_nbytes"] for raw in found if raw["way"] == RESIDENT), 0)
    own = (mine["host_nbytes"] - resident) / 1e6
    beyond = " beyond that of all on the device" if resident else ""
    section.target(f"host memory, MB{beyond}, {size}", own, at_most=HOST_NBYTES / 1e6)
    if not mine["device_nbytes"]:
        return
    section.target(f"GPU peak / budget, {size}", mine["device_nbytes"] / budget, at_most=1.0)
    most = max(mine["device_nbytes"], budget)
    others = [r for r in found if r["way"] != OURS and r["device_nbytes"] <= most]
    if others:
        best = min(others, key=lambda raw: float(raw["seconds"]))
        times = best["seconds"] / mine["seconds"]
        section.target(f"times {best['way']}, {size}", times, at_least=TIMES_OTHERS)
