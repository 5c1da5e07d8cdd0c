"""The section offload: passes of a model that is larger than its budget, on torch's CPU."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench_parts.section import Options, Section, checkpoint, need_packages
from streamload.bench.offloading import OURS, PassOptions, measure
from streamload.core.units import format_bytes

_TOKENS = 16
_PASSES = 5  # of each process, after one
_SHARE = 3  # the budget holds one of so many parts, and activations
_ACTIVATIONS_NBYTES = 16_000_000
TIMES_ACCELERATE = 3.0
TIMES_RESIDENT = 1.15


def offload(options: Options) -> Section:
    """Seconds a pass under a budget, with all resident, and by accelerate."""
    need_packages("torch", "transformers", "accelerate")
    budget_nbytes = options.nbytes // _SHARE + _ACTIVATIONS_NBYTES
    all_nbytes = 2 * options.nbytes + _ACTIVATIONS_NBYTES
    section = Section(
        "offload",
        f"torch on the CPU, a Llama of transformers in bf16, {format_bytes(options.nbytes)}, "
        f"{_TOKENS} tokens a pass, budget {format_bytes(budget_nbytes)}, file in the page cache; "
        f"seconds a pass, the median and the least of {_PASSES} of each of {options.runs} "
        "processes; resident: a budget that holds all",
    )
    for offset in (0, 8):
        passes: dict[str, list[float]] = {name: [] for name in (OURS, "resident", "accelerate")}
        with checkpoint(options, options.nbytes, offset_mod_16=offset) as path:
            for _ in range(options.runs):
                for budget, peers in ((budget_nbytes, ["accelerate"]), (all_nbytes, [])):
                    asked = PassOptions(
                        str(path),
                        "cpu",
                        budgets=[str(budget)],
                        tokens=_TOKENS,
                        runs=_PASSES,
                        peers=peers,
                        say=options.say,
                    )
                    found = measure(asked)
                    section.raw.append(found.to_json())
                    for point in found.points:
                        is_all = point.budget_nbytes == all_nbytes
                        name = "resident" if is_all else point.name
                        passes[name] += point.seconds
                        section.failures += filter(None, [point.problem])
        for name, seconds in passes.items():
            row: dict[str, Any] = {"data at": offset, "what": name}
            if seconds:
                row |= {"s a pass": round(median(seconds), 3), "least": round(min(seconds), 3)}
            section.rows.append(row)
        if all(passes.values()):
            ours, resident, theirs = map(median, passes.values())
            what = f"data at {offset}"
            section.target(f"times accelerate, {what}", theirs / ours, at_least=TIMES_ACCELERATE)
            section.target(f"x resident, {what}", ours / resident, at_most=TIMES_RESIDENT)
    return section
