"""Comparisons by `streamload bench`, with what developers ask for, and as sections show them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_parts.section import NotHereError, Options, Section
from streamload.bench import compare
from streamload.bench.compare import Measures, resolve
from streamload.bench.loaders import LOADERS, OURS, Loader
from streamload.bench.processes import MeasurementError
from streamload.bench.results import Comparison, Run
from streamload.devices.probing import probe
from streamload.errors import DeviceNotFoundError

_SLOW = 4.0  # a loader that takes this many times as long as streamload runs fewer rounds
TIMEOUT_S = 120.0  # for each load


@dataclass(frozen=True, slots=True)
class Compared(compare.Options):
    """A comparison of loaders, and of streamload with other arguments."""

    # more loaders: streamload with other "dtype", "budget" or "options", by a name
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    again: int | None = None  # rounds in which warm processes load a second time; None for all
    # rounds for a loader that takes more than four times as long as streamload; None for all
    least_runs: int | None = None
    together: bool = False  # start the processes of a round in parallel: faster on many cores


class Comparing(compare.Comparing):
    """A comparison of `Compared`."""

    _options: Compared

    def _choose(self) -> dict[str, Loader]:
        ours = dict.fromkeys((OURS, *self._options.variants), LOADERS[OURS])
        return ours | super()._choose()

    def _task(self, name: str) -> dict[str, Any]:
        changed = self._options.variants.get(name)
        return super()._task(name) if changed is None else {**super()._task(OURS), **changed}

    def _is_due(self, name: str, state: str, number: int) -> bool:
        least = self._options.least_runs
        if least is not None and number >= least:
            times = self.found.times(name, state)
            if times is not None and times >= _SLOW:
                return False
        return super()._is_due(name, state, number)

    def _repeats(self, state: str, number: int) -> bool:
        again = self._options.again
        return super()._repeats(state, number) and (again is None or number < again)

    def _measure(self, where: str, measures: Measures) -> None:
        with ExitStack() as stack:
            if self._options.together:
                begun = {
                    name: stack.enter_context(start()) for name, (start, _) in measures.items()
                }
                for child in begun.values():
                    with suppress(MeasurementError):  # raised again by its lap
                        child.ready()
                # entering a child again returns it
                measures = {n: (begun[n].__enter__, take) for n, (_, take) in measures.items()}
            super()._measure(where, measures)


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
    return Comparing(replace(asked, **more)).run()


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
