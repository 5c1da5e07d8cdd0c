"""The section offload: passes of a model that is larger than its budget, on torch's CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, process_time
from typing import Any

from bench_parts.section import NotHereError, Options, Section, checkpoint, in_turns
from streamload.bench.machine import installed_version
from streamload.bench.processes import call, measure
from streamload.core.units import format_bytes

_JOB = "bench_parts.offload_section:"
_TOKENS = 16
_PASSES = 5  # of each process, after one
_SHARE = 3  # the budget is one of so many parts
_BLOCK_NBYTES = 2**23
_THREADS = 2
TIMES_ACCELERATE = 3.0
TIMES_LIMIT = 1.15

Lap = Callable[[], object]


def _model(path: str) -> Any:
    """The model without weights; what it computes itself it has."""
    import accelerate
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with accelerate.init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def _passes(model: Any, **more: Any) -> Lap:
    """A lap of some passes, after one that brings what is lazy."""
    import torch

    ids = torch.arange(_TOKENS)[None]

    def once() -> tuple[float, float]:
        begun, cpu = perf_counter(), process_time()
        with torch.no_grad():
            model(ids, use_cache=False)
        return perf_counter() - begun, process_time() - cpu

    def lap() -> dict[str, Any]:
        walls, cpus = zip(*(once() for _ in range(_PASSES)), strict=True)
        return {"pass_s": median(walls), "cpu_s": median(cpus), **more}

    once()
    return lap


def resident(path: str) -> Lap:
    """All of it in memory: what passes compute."""
    import streamload

    model = _model(path)
    streamload.load_state_dict(model, path, device="cpu", progress=False)
    return _passes(model)


def ours(path: str, budget_nbytes: int, **options: Any) -> Lap:
    """streamload.offload."""
    import streamload

    model = _model(path)
    handle = streamload.offload(
        model, path, budget=budget_nbytes, device="cpu", progress=False, **options
    )
    return _passes(model, pass_nbytes=handle.plan.residency.pass_nbytes, views=handle.plan.views)


def disk_offload(path: str, folder: str) -> Lap:
    """accelerate.disk_offload: every weight from a file of its own."""
    import accelerate
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    accelerate.disk_offload(model, folder, execution_device="cpu")
    return _passes(model)


def device_map(path: str, budget_nbytes: int, folder: str) -> Lap:
    """transformers and accelerate: what fits in memory, the rest on the disk."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": budget_nbytes},
        offload_folder=folder,
    )
    return _passes(model.eval())


def wire(path: str) -> Lap:
    """Threads that read a file into hot memory: how fast the page cache gives it."""
    file = str(Path(path) / "model.safetensors")
    nbytes = os.stat(file).st_size

    def read(start: int, stop: int) -> None:
        fd, block = os.open(file, os.O_RDONLY), memoryview(bytearray(_BLOCK_NBYTES))
        while start < stop:
            start += os.preadv(fd, [block[: stop - start]], start)
        os.close(fd)

    def lap() -> dict[str, float]:
        begun, part = perf_counter(), -(-nbytes // _THREADS)
        threads = [
            Thread(target=read, args=(at, min(at + part, nbytes))) for at in range(0, nbytes, part)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"rate": nbytes / (perf_counter() - begun)}

    lap()
    return lap


def offload(options: Options) -> Section:
    """Seconds a pass, beside what computing and reading take alone, and beside accelerate."""
    for name in ("torch", "transformers", "accelerate"):
        if not installed_version(name):
            raise NotHereError(f"{name} is not installed")
    budget_nbytes = options.nbytes // _SHARE
    section = Section(
        "offload",
        f"torch on the CPU, a Llama of transformers in bf16, {format_bytes(options.nbytes)}, "
        f"{_TOKENS} tokens a pass, budget {format_bytes(budget_nbytes)}, file in the page cache; "
        f"seconds a pass, the median of {options.runs} processes in turn, and the least; CPU: "
        "seconds of all cores; limit: the larger of computing alone and reading alone, in the same "
        "run; sum: both of them, one after the other",
    )
    for offset in (0, 8):
        _compare(options, budget_nbytes, offset, section)
    return section


def _compare(options: Options, budget_nbytes: int, offset: int, section: Section) -> None:
    """All ways with a checkpoint whose data begins at this place modulo 64."""
    with checkpoint(options, options.nbytes, offset_mod_16=offset) as path:
        folder = str(options.work / "accelerate")
        budget: Mapping[str, int] = {"budget_nbytes": budget_nbytes}
        jobs = {
            "computing alone": call(_JOB + "resident", path=str(path)),
            "reading alone": call(_JOB + "wire", path=str(path)),
            "streamload": call(_JOB + "ours", path=str(path), **budget),
            'streamload, reader="pread"': call(
                _JOB + "ours", path=str(path), reader="pread", **budget
            ),
            "accelerate, disk_offload": call(_JOB + "disk_offload", path=str(path), folder=folder),
            "accelerate, device_map": call(
                _JOB + "device_map", path=str(path), folder=folder, **budget
            ),
        }
        what = f"offload, data at {offset} modulo 64"
        found = in_turns(
            options, what, path, {name: partial(measure, job) for name, job in jobs.items()}
        )
    rate = median(done.first["rate"] for done in found.pop("reading alone"))
    seconds = {name: [d.first["pass_s"] for d in all_of] for name, all_of in found.items()}
    cpus = {name: median(d.first["cpu_s"] for d in all_of) for name, all_of in found.items()}
    nbytes = found["streamload"][0].first["pass_nbytes"]
    views = found["streamload"][0].first["views"]
    computing, reading = median(seconds["computing alone"]), nbytes / rate
    limit = max(computing, reading)
    for name, each in seconds.items():
        section.rows.append(
            {
                "data at": offset,
                "what": name + (", views" if name == "streamload" and views else ""),
                "s a pass": round(median(each), 3),
                "least": round(min(each), 3),
                "CPU": round(cpus[name], 3),
                "x limit": round(median(each) / limit, 2),
                "x sum": round(median(each) / (computing + reading), 2),
            }
        )
    what = f"reading {format_bytes(nbytes)} alone"
    section.rows.append({"data at": offset, "what": what, "s a pass": round(reading, 3)})
    mine = median(seconds["streamload"])
    for name in ("accelerate, disk_offload", "accelerate, device_map"):
        times = median(seconds[name]) / mine
        section.target(f"times {name}, data at {offset}", times, at_least=TIMES_ACCELERATE)
    section.target(f"x limit, data at {offset}", mine / limit, at_most=TIMES_LIMIT)
