"""The section "many": what each of very many small tensors costs to plan and to load."""

from __future__ import annotations

import importlib.util
from statistics import median

from make_checkpoint import make_checkpoint, many_of_size

from bench_parts.processes import Measured, measure
from bench_parts.sections import Options, Section, read_all
from streamload.dtypes import BF16

TENSOR_NBYTES = 2048
SHARDS = 4


def many(options: Options) -> Section:
    """Microseconds a tensor, of streamload's steps and beside safetensors' own loader."""
    section = Section(
        "many",
        f"medians of processes, of the second lap of each; {options.tensors} tensors of bf16 of "
        f"{TENSOR_NBYTES} bytes in {SHARDS} files, in the page cache; load: the whole call, to "
        "torch's CPU where there is torch, else to numpy; load_file is by safetensors, which maps "
        "the file and copies nothing",
    )
    ways = ["many by streamload"]
    if importlib.util.find_spec("torch") is not None:
        ways.append("many by load_file")
    path = options.work / "many"
    nbytes = options.tensors * TENSOR_NBYTES
    make_checkpoint(path, many_of_size(nbytes, BF16, options.tensors), shards=SHARDS)
    found: dict[str, list[Measured]] = {way: [] for way in ways}
    for number in range(options.runs):
        for way in ways:
            options.say(f"many: run {number + 1} of {options.runs}, {way}")
            read_all(path)
            found[way].append(measure(way, path=str(path)))
    for way, runs in found.items():
        last = [run.result["laps"][-1] for run in runs]
        for step in last[0]:
            us = median(lap[step] for lap in last) / options.tensors * 1e6
            section.rows.append({"what": way, "step": step, "us a tensor": round(us, 2)})
        section.raw.append({"what": way, "laps": [run.result["laps"] for run in runs]})
    return section
