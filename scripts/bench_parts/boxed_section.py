"""The section "boxed": entrances in memory cgroups that are about as large as they need.

Each entrance runs with a stated budget above what is free, with none, and with a percentage, on a
file that is in the page cache and on one that is not. Refusals tell how large a box has to be; then
boxes are tried from 0.9 of that to three times as much. In none may the kernel kill, and from 1.1
on none may be refused.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import boxes

from bench_parts.section import FILES, Options, Section, boxes_here, checkpoint
from bench_parts.torture_section import boxed
from streamload.bench.processes import call
from streamload.core.units import format_bytes

ENTRANCES = ("stream_layers", "offload", "in place")
#: By name, as they are given; the first is above all boxes.
BUDGETS: Mapping[str, str | None] = {"stated": "1TB", "none": None, "80%": "80%"}
#: What boxes have of what they need, at the ends.
FACTORS = (0.9, 3.0)
#: From here on none is refused.
SURE = 1.1
#: Of the rate of the library before.
LEAST_RATE = 0.9
_FIRST_NBYTES = 15_000_000  # a box that is too small
_TRIES = 8
_STEP_NBYTES = 2**17  # what a process takes differs by as much

Ran = dict[str, Any]


def run(
    maker: boxes.Boxes,
    path: Path,
    cell: tuple[str, str, str],
    room_nbytes: int | None,
    sites: Sequence[str] = (),
    **options: Any,
) -> Ran:
    """Run an entrance in a box that has so much beside the process; None is no limit.

    Args:
        maker: of boxes.
        path: the checkpoint.
        cell: the entrance, the name of the budget, and the state of the file.
        room_nbytes: bytes.
        sites: folders that come first on the path.
        options: of the call, in the place of the budget's.
    """
    entrance, budget, state = cell
    FILES[state](path)
    given = {"budget": BUDGETS[budget], **options}
    job = call("bench_parts.boxed_job:Job", entrance=entrance, path=str(path), **given)
    limit = None if room_nbytes is None else (lambda charged: charged + room_nbytes)
    ran = boxed(maker, job, limit, sites)
    return {"cell": cell, "limit_nbytes": room_nbytes, **ran}


def needed_nbytes(maker: boxes.Boxes, path: Path, cell: tuple[str, str, str]) -> tuple[int, Ran]:
    """The room that an entrance needs, as its refusals say, and what became of it there."""
    room, share = _FIRST_NBYTES, 0.8 if cell[1] == "80%" else 1
    for _ in range(_TRIES):
        ran = run(maker, path, cell, room)
        if ran["outcome"] != "refused":
            break
        said = ran["said"]
        room += int((said["needed_nbytes"] - said["budget_nbytes"]) / share) + _STEP_NBYTES
    return room, ran


def cells() -> Iterator[tuple[str, str, str]]:
    """Every entrance, budget and state of the file."""
    return itertools.product(ENTRANCES, BUDGETS, FILES)


def failure(ran: Ran, needed_nbytes: int) -> str:
    """What must not be, in words; "" where all is well."""
    outcome, factor = ran["outcome"], ran["limit_nbytes"] / needed_nbytes
    if outcome == "loaded" or (outcome == "refused" and factor < SURE):
        return ""
    what = ", ".join(ran["cell"])
    return f"{what}: {outcome} in {ran['limit_nbytes']} bytes, {factor:.2f} of them: {ran['why']}"


def boxed_entrances(options: Options) -> Section:
    """Try every cell in ``--runs`` boxes; ``--site streamload=FOLDER`` compares cold rates."""
    maker = boxes_here()
    section = Section(
        "boxed",
        f"a Llama of {format_bytes(options.nbytes)} in {options.runs} boxes of {FACTORS[0]} to "
        f"{FACTORS[1]:g} times what is needed beside the process, each in a process of its own",
    )
    low, high = FACTORS
    with checkpoint(options, options.nbytes, offset_mod_16=8) as path:
        for cell in cells():
            options.say(f"boxed: {', '.join(cell)}")
            needed, first = needed_nbytes(maker, path, cell)
            most = max(options.runs - 1, 1)
            steps = [low * (high / low) ** (n / most) for n in range(options.runs)]
            all_of = [first, *(run(maker, path, cell, int(needed * step)) for step in steps)]
            counts = Counter(ran["outcome"] for ran in all_of)
            rates = [ran["said"]["rate"] / 1e9 for ran in all_of if ran["outcome"] == "loaded"]
            section.failures += filter(None, (failure(ran, needed) for ran in all_of))
            section.raw += all_of
            names = dict(zip(("entrance", "budget", "file"), cell, strict=True))
            rate = round(median(rates), 2) if rates else None
            section.rows.append(names | {"needs": format_bytes(needed)} | counts | {"GB/s": rate})
        for site in filter(None, [options.sites.get("streamload")]):
            _compare(options, maker, path, site, section)
    killed = sum(ran["outcome"] == "killed" for ran in section.raw)
    section.target(f"killed, of {len(section.raw)} boxes", killed, at_most=0)
    section.target("other failures", len(section.failures) - killed, at_most=0)
    return section


def _compare(options: Options, maker: boxes.Boxes, path: Path, site: str, section: Section) -> None:
    """Cold rates with room for all, in turn with another version of the library."""
    half = {"budget": str(options.nbytes // 2)}
    for entrance in ENTRANCES:
        more = half if entrance != "in place" else {}
        rates: dict[str, list[float]] = {"": [], site: []}
        for which in [*rates] * max(options.runs, 3):
            sites = [which] if which else []
            ran = run(maker, path, (entrance, "stated", "not cached"), None, sites, **more)
            rates[which].append(ran["said"]["rate"])
        now, before = median(rates[""]), median(rates[site])
        section.target(f"{entrance}, cold: rate of before", now / before, at_least=LEAST_RATE)
