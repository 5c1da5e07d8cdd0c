"""The section gpu-offload: passes of models that stream to a GPU, as stored in bf16 and nf4."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench_parts.offload_jobs import write_mixture
from bench_parts.section import (
    Options,
    Section,
    checkpoint,
    files_nbytes,
    measure,
    need_disk,
    need_packages,
    read_all,
)
from streamload import convert
from streamload.bench.offloading import PassOptions
from streamload.bench.offloading import measure as measure_passes
from streamload.bench.processes import MeasurementError, call
from streamload.core.units import format_bytes

_PASSES = 15  # pages are locked during the first ones
_TOKENS = 32
_LAPS = 5  # of so many tokens, after one
_SHARE = {"bf16": 5 / 16, "nf4": 1 / 2}  # of a checkpoint, that its budget has
_MIXTURE_SHARE = 1 / 4
NF4_OF_BF16 = 0.8
TOKENS_A_SECOND = 15.0
READY_S = 2.0


def gpu_offload(options: Options) -> Section:
    """GB/s of passes of one and of 128 tokens, and tokens a second of a mixture of experts."""
    need_packages("torch", "transformers", "accelerate", "bitsandbytes")
    section = Section(
        "gpu-offload",
        f"a Llama of {format_bytes(options.nbytes)} of bf16 and its nf4 on {options.torch_device}, "
        f"GB/s that passes read, medians of {_PASSES} of each of {options.runs} processes, in "
        f"turn; a mixture of that size, tokens a second of {_TOKENS}, medians of {_LAPS}",
    )
    keep = options.keep is not None
    rates: dict[tuple[str, int], list[float]] = {}
    with checkpoint(options, options.nbytes, folder=options.keep, keep=keep) as path:
        nf4 = path.with_name(f"{path.name}-nf4")
        if not nf4.exists():
            need_disk(nf4.parent, options.nbytes // 2)
            convert(path, nf4, quant="nf4", progress=False)
        for _ in range(options.runs):
            for name, folder in (("bf16", path), ("nf4", nf4)):
                for count in (1, 128):
                    _passes(section, options, name, folder, count, rates)
    for count in (1, 128):
        found = {name: rates.get((name, count)) for name in _SHARE}
        if found["bf16"] and found["nf4"]:
            part = median(found["nf4"]) / median(found["bf16"])
            section.target(f"nf4's rate / bf16's, {count} tokens", part, at_least=NF4_OF_BF16)
    _mixture(section, options)
    return section


def _passes(
    section: Section,
    options: Options,
    name: str,
    folder: Path,
    count: int,
    rates: dict[tuple[str, int], list[float]],
) -> None:
    """Measure passes in a process."""
    read_all(folder)
    nbytes = files_nbytes(folder)
    asked = PassOptions(
        str(folder),
        options.torch_device,
        budgets=[str(int(_SHARE[name] * nbytes))],
        tokens=count,
        runs=_PASSES,
        say=options.say,
    )
    found = measure_passes(asked)
    section.raw.append(found.to_json())
    (point,) = found.points
    section.failures += filter(None, [point.problem])
    if not point.seconds or not point.pass_nbytes:
        return
    seconds = median(point.seconds)
    rate = point.pass_nbytes / seconds / 1e9
    rates.setdefault((name, count), []).append(rate)
    row: dict[str, Any] = {"weights": name, "budget": format_bytes(point.budget_nbytes or 0)}
    row |= {"tokens": count, "s a pass": round(seconds, 4), "GB/s": round(rate, 1)}
    section.rows.append(row | {"read": format_bytes(point.pass_nbytes)})


def _mixture(section: Section, options: Options) -> None:
    """Measure tokens a second of a mixture under a budget, and of one that stays."""
    out = (options.keep or options.work) / f"mixture-{options.nbytes}"
    if not out.exists():
        need_disk(out.parent, options.nbytes + 2**30)
        write_mixture(out, options.nbytes)
    read_all(out)
    nbytes = files_nbytes(out)
    sums = set[int]()
    for budget in (int(_MIXTURE_SHARE * nbytes), 0):
        job = call(
            "bench_parts.offload_jobs:tokens",
            path=str(out),
            device=options.torch_device,
            budget=budget,
            count=_TOKENS,
        )
        options.say(f"mixture, {format_bytes(budget) if budget else 'resident'}")
        try:
            laps = measure(job, laps=_LAPS + 1, timeout_s=300.0).laps
        except MeasurementError as error:
            section.failures.append(str(error))
            continue
        section.raw.append({"mixture": nbytes, "budget": budget, "laps": laps})
        rate, ready_s = median(lap["rate"] for lap in laps[1:]), laps[0]["ready_s"]
        sums.update(lap["sum"] for lap in laps)
        row: dict[str, Any] = {"weights": f"mixture, {format_bytes(nbytes)}"}
        row |= {"budget": format_bytes(budget) if budget else "", "tokens/s": round(rate, 1)}
        row |= {"first": round(laps[0]["rate"], 1), "ready, s": round(ready_s, 2)}
        section.rows.append(row | {"locked": format_bytes(laps[-1]["locked"])})
        if budget:
            section.target("tokens a second", rate, at_least=TOKENS_A_SECOND)
            section.target("ready, s", ready_s, at_most=READY_S)
    if len(sums) > 1:
        section.failures.append("the tokens differ")
