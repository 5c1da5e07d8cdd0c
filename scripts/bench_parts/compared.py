"""Comparisons by `streamload bench`, as sections show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_parts.section import NotHereError, Options, Section
from streamload.bench.compare import Options as Compared
from streamload.bench.compare import compare, resolve
from streamload.bench.loaders import LOADERS, OURS
from streamload.bench.results import Comparison, Run
from streamload.devices.probing import probe
from streamload.errors import DeviceNotFoundError

TIMEOUT_S = 120.0  # for each load


def need(device: str) -> None:
    """Raise NotHereError if a device does not work."""
    try:
        found = probe(*resolve(device))
    except DeviceNotFoundError as error:
        raise NotHereError(str(error)) from error
    if not found.works:
        raise NotHereError(f"{device}: {found.problem}")


def compared(options: Options, path: Path, device: str, **more: Any) -> Comparison:
    """Compare loaders with the options of a section; ``more`` replaces fields of `Compared`."""
    given = LOADERS if more.get("peers") is None else more["peers"]
    to = resolve(device)
    asked = Compared(
        path=str(path),
        device=device,
        runs=options.runs,
        seconds=options.seconds,
        timeout_s=TIMEOUT_S,
        sites={p: s for p, s in options.sites.items() if p in given and LOADERS[p].takes(*to)},
        say=options.say,
    )
    return compare(replace(asked, **more))


def add(section: Section, found: Comparison, what: str = "", arrived: str = "") -> None:
    """Add a comparison to a section; ``arrived`` adds targets that tensors equal the files'."""
    section.raw.append({"what": what} | found.to_json())
    chart = "-".join(filter(None, (section.name, what.replace(" ", "-").replace(",", ""))))
    section.charts[chart] = found.svg()
    rows = [row for state in found.states() for row in found.rows(state)]
    for key, limit in found.limits.items():
        loader, runs = f"limit: {limit.how}", len(limit.rates)
        rows.append({"loader": loader, "cache": key, "runs": runs, "GB/s": limit.median})
    rows += [{"loader": n, "cache": f"not compared: {why}"} for n, why in found.skipped.items()]
    rows += [{"loader": "note", "cache": note} for note in found.notes]
    for row in rows:
        short = {k: float(f"{v:.3g}") if isinstance(v, float) else v for k, v in row.items()}
        section.rows.append({"what": what} | short)
    if arrived:
        for name, of in found.loaders.items():
            if name.startswith(OURS):
                target = f"{arrived}: tensors equal to the file's"
                section.target(target, of.checked or 0, at_least=1)
        if OURS in found.skipped:
            section.target(f"{arrived}: loads", 0, at_least=1)


def runs_of(found: Comparison, name: str = OURS) -> list[Run]:
    """The warm runs of a loader."""
    of = found.loaders.get(name)
    return of.runs.get("warm", []) if of else []


def peer_targets(
    section: Section, found: Comparison, what: str, wanted: Mapping[str, float], others: float
) -> None:
    """A target for each peer: how many times its rate, at least as ``wanted`` or ``others`` say."""
    for state in found.states():
        for name in found.loaders:
            times = found.times(name, state)
            if name != OURS and times is not None:
                least = wanted.get(name, others)
                section.target(f"{what or state}: times {name}", times, at_least=least)
