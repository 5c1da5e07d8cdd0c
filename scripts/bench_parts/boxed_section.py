"""The section "boxed": entrances in memory cgroups about as large as they need.

Each entrance runs with a stated budget above what is free, with none, and with a percentage, on a
cached file and on one that is not. Refusals give the size of the box; boxes of 0.9 to 3 times as
much follow. The kernel may kill in none of them, and from 1.1 on none may be refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import boxes

from bench_parts.section import FILES, Options, Section, boxes_here, checkpoint, in_turns
from streamload.bench.processes import Child, MeasurementError, call
from streamload.core.units import format_bytes

ENTRANCES = ("stream_layers", "offload", "in place")
#: By name, as they are given; the first is above all boxes.
BUDGETS: Mapping[str, str | None] = {"stated": "1TB", "none": None, "80%": "80%"}
#: Of the needed bytes, the smallest and the largest box.
FACTORS = (0.9, 3.0)
#: From this factor on no box may refuse.
SURE = 1.1
#: Of the rate of the version compared with.
LEAST_RATE = 0.9
#: Outcomes of a box; those after "stopped" are failures.
OUTCOMES = ("loaded", "refused", "stopped", "killed", "wrong", "other", "hung")
FAILURES = OUTCOMES[3:]
_BY_ERROR = {
    **{"loaded": "loaded", "MemoryTakenError": "stopped"},
    **{"PlanInfeasibleError": "refused", "UnsupportedCastError": "refused"},
}
_NO_LIMIT_NBYTES = 2**40
_TAKEN = ("taken_nbytes", "charged_nbytes")  # in the order of `Box.memory`
_ANSWER_S = 180.0
_SAMPLE_S = 0.001
_FIRST_NBYTES = 15_000_000  # a box that is too small
_TRIES = 8
_STEP_NBYTES = 2**17  # processes differ by as much

Cell = tuple[str, str, str]  # entrance, name of the budget, state of the file
Ran = dict[str, Any]


def boxed(
    maker: boxes.Boxes,
    job: Mapping[str, Any],
    limit: Callable[[int], int] | None = None,
    sites: Sequence[str] = (),
) -> Ran:
    """Run a job in a box of its own, which gets its limit once the process is ready.

    Args:
        maker: makes the box.
        job: its laps return an "outcome": "loaded", or the name of an error; it can check itself.
        limit: from the bytes charged then to the limit; None for none.
        sites: folders that come first on its import path.

    Returns:
        "outcome" is one of `OUTCOMES`; "why" an error, or wrong tensors; "said" the answer of the
        lap; "taken_nbytes" the largest growth of anonymous and shared memory, "charged_nbytes" the
        same with page tables and other memory of the kernel; "room_nbytes" the limit beyond the
        bytes charged when the load began.
    """
    ran: Ran = {"said": {}, "taken_nbytes": 0, "charged_nbytes": 0, "room_nbytes": None}
    box = maker.make(_NO_LIMIT_NBYTES)
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
        box.limit(_NO_LIMIT_NBYTES)  # comparing takes memory of its own
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


def run(
    maker: boxes.Boxes,
    path: Path,
    cell: Cell,
    room_nbytes: int | None,
    sites: Sequence[str] = (),
    **options: Any,
) -> Ran:
    """Run an entrance in a box with this much beyond its process; None for no limit.

    ``options`` of the call replace the budget of the cell.
    """
    entrance, budget, state = cell
    FILES[state](path)
    given = {"budget": BUDGETS[budget], **options}
    job = call("bench_parts.boxed_job:Job", entrance=entrance, path=str(path), **given)
    limit = None if room_nbytes is None else (lambda charged: charged + room_nbytes)
    return {"cell": cell, "limit_nbytes": room_nbytes, **boxed(maker, job, limit, sites)}


def needed_nbytes(maker: boxes.Boxes, path: Path, cell: Cell) -> tuple[int, Ran]:
    """The room that an entrance needs by its refusals, and the run in that."""
    room, share = _FIRST_NBYTES, 0.8 if cell[1] == "80%" else 1
    for _ in range(_TRIES):
        ran = run(maker, path, cell, room)
        if ran["outcome"] != "refused":
            break
        said = ran["said"]
        room += int((said["needed_nbytes"] - said["budget_nbytes"]) / share) + _STEP_NBYTES
    return room, ran


def cells() -> Iterator[Cell]:
    """Every entrance, budget and state of the file."""
    return itertools.product(ENTRANCES, BUDGETS, FILES)


def failure(ran: Ran, needed_nbytes: int) -> str:
    """Describe a forbidden outcome; "" for a good one."""
    outcome, factor = ran["outcome"], ran["limit_nbytes"] / needed_nbytes
    if outcome == "loaded" or (outcome == "refused" and factor < SURE):
        return ""
    what = ", ".join(ran["cell"])
    return f"{what}: {outcome} in {ran['limit_nbytes']} bytes, {factor:.2f} of them: {ran['why']}"


def boxed_entrances(options: Options) -> Section:
    """Try every cell in ``--runs`` boxes; ``--site streamload=FOLDER`` compares cold rates."""
    maker = boxes_here()
    low, high = FACTORS
    section = Section(
        "boxed",
        f"a Llama of {format_bytes(options.nbytes)} in {options.runs} boxes of {low} to {high:g} "
        "times the bytes needed beyond the process, each in a process of its own",
    )
    with checkpoint(options, options.nbytes, offset_mod_16=8) as path:
        for cell in cells():
            options.say(f"boxed: {', '.join(cell)}")
            needed, first = needed_nbytes(maker, path, cell)
            most = max(options.runs - 1, 1)
            steps = [low * (high / low) ** (n / most) for n in range(options.runs)]
            all_of = [first, *(run(maker, path, cell, int(needed * step)) for step in steps)]
            rates = [ran["said"]["rate"] / 1e9 for ran in all_of if ran["outcome"] == "loaded"]
            section.failures += filter(None, (failure(ran, needed) for ran in all_of))
            section.raw += all_of
            names = dict(zip(("entrance", "budget", "file"), cell, strict=True))
            counts = Counter(ran["outcome"] for ran in all_of)
            rate = round(median(rates), 2) if rates else None
            section.rows.append(names | {"needs": format_bytes(needed)} | counts | {"GB/s": rate})
        for site in filter(None, [options.sites.get("streamload")]):
            _compare(options, maker, path, site, section)
    killed = sum(ran["outcome"] == "killed" for ran in section.raw)
    section.target(f"killed, of {len(section.raw)} boxes", killed, at_most=0)
    section.target("other failures", len(section.failures) - killed, at_most=0)
    return section


def _compare(options: Options, maker: boxes.Boxes, path: Path, site: str, section: Section) -> None:
    """Cold rates with room for all, alternating with another version of the library."""
    half = {"budget": str(options.nbytes // 2)}
    for entrance in ENTRANCES:
        more = half if entrance != "in place" else {}
        cell = (entrance, "stated", "not cached")
        jobs = {
            which: partial(run, maker, path, cell, None, sites, **more)
            for which, sites in (("now", []), ("before", [site]))
        }
        now, before = (
            median(ran["said"]["rate"] for ran in tried)
            for tried in in_turns(jobs, max(options.runs, 3)).values()
        )
        section.target(f"{entrance}, cold: rate of before", now / before, at_least=LEAST_RATE)
