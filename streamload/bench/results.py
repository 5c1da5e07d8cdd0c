"""The result of a comparison of loaders: figures, as a table, JSON and a chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from streamload.bench.loaders import OURS
from streamload.bench.processes import Memory
from streamload.core.chart import Bars, draw
from streamload.core.units import format_bytes, format_table


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one process of a loader."""

    seconds: float  # of the first load, until the device was synchronized
    cpu_s: float  # CPU seconds of the first load, all threads
    again_s: float | None  # median seconds of later loads
    memory: Memory  # growth to the peak of each figure during the first load
    says: dict[str, Any]  # figures of the loader and its framework, by name
    import_s: float  # to import the loader's modules
    open_s: float  # to import the framework, open the device, and load a few values

    @property
    def pinned_nbytes(self) -> int | None:
        """Page-locked memory: the largest figure of kernel, loader and framework; None if none."""
        keys = ("pinned_nbytes", "staging_nbytes", "torch_pinned_nbytes")
        known = [max(self.memory.locked_nbytes, 0) or None, *(self.says.get(key) for key in keys)]
        return max((int(n) for n in known if n is not None), default=None)


@dataclass(slots=True)
class Of:
    """The figures of one loader, from all its processes."""

    name: str  # in `LOADERS`
    what: str  # the functions that are called, in words
    versions: dict[str, str] = field(default_factory=dict)  # versions of its packages, by name
    runs: dict[str, list[Run]] = field(default_factory=dict)  # by state of the page cache
    checked: int | None = None  # tensors equal to the files' in a comparison; None if it failed

    def median_s(self, state: str, *, again: bool = False) -> float | None:
        """Return the median seconds of the whole first call, or of later ones; None if unknown."""
        return _middle([run.again_s if again else run.seconds for run in self.runs.get(state, ())])


@dataclass(slots=True)
class Limit:
    """A limit of the machine: the fastest that it reads or copies, measured in each round."""

    how: str  # threads and blocks, in words
    rates: list[float] = field(default_factory=list)  # GB/s

    @property
    def median(self) -> float:
        """The median rate of all rounds, in GB/s."""
        return median(self.rates)


@dataclass(slots=True)
class Comparison:
    """All figures of a comparison of loaders."""

    path: str  # the checkpoint
    nbytes: int  # bytes of all tensors
    files: int  # number of files
    tensors: int  # number of tensors
    device: str
    dtype: str  # the dtype that all floats were cast to
    cores: int  # CPUs of each process; 0 for all
    machine: dict[str, str]  # facts about the machine, by name
    loaders: dict[str, Of] = field(default_factory=dict)  # by name; streamload first
    limits: dict[str, Limit] = field(default_factory=dict)  # by "state, name" ("warm, cached")
    memory: Limit | None = None  # reading the device's memory
    skipped: dict[str, str] = field(default_factory=dict)  # why a loader or limit is missing
    notes: list[str] = field(default_factory=list)

    @property
    def has_figures(self) -> bool:
        """Whether streamload was measured."""
        return OURS in self.loaders

    def rate(self, name: str, state: str, *, again: bool = False) -> float | None:
        """Return median GB/s of the whole first call, or of later ones; None if not measured."""
        of = self.loaders.get(name)
        seconds = of.median_s(state, again=again) if of else None
        return self.nbytes / 1e9 / seconds if seconds else None

    def times(self, name: str, state: str, *, again: bool = False) -> float | None:
        """Return streamload's speed divided by a loader's, by median calls; None if unknown."""
        ours, other = (self.rate(n, state, again=again) for n in (OURS, name))
        return ours / other if ours and other else None

    def transfer(self, state: str, name: str = OURS) -> float | None:
        """Return median GB/s of reading, casting and copying alone; None if not reported."""
        of = self.loaders.get(name)
        runs = of.runs.get(state, ()) if of else ()
        said = [run.says for run in runs if "stream_s" in run.says]
        return _middle([says["read_nbytes"] / 1e9 / says["stream_s"] for says in said])

    def wire(self, state: str) -> float | None:
        """Return GB/s of the slowest limit in a state, by the median; None if not measured."""
        found = [limit.median for key, limit in self.limits.items() if key.startswith(state)]
        return min(found, default=None)

    def share(self, state: str) -> float | None:
        """Return streamload's transfer rate as a share of the slowest limit; None if unknown."""
        transfer, wire = self.transfer(state), self.wire(state)
        return transfer / wire if transfer and wire else None

    def to_json(self) -> dict[str, Any]:
        """Return all figures, of each run and summarized, as data for JSON."""
        data = asdict(self)
        for name, of in self.loaders.items():
            data["loaders"][name]["summary"] = {
                state: {
                    "runs": len(runs),
                    "first": _spread([run.seconds for run in runs], self.nbytes),
                    "again": _spread([run.again_s for run in runs], self.nbytes),
                    "times": self.times(name, state),
                    "times_again": self.times(name, state, again=True),
                    "host_nbytes": median(run.memory.anon_nbytes for run in runs),
                    "pinned_nbytes": max((run.pinned_nbytes or 0 for run in runs), default=0),
                    "device_nbytes": _middle([run.memory.device_nbytes for run in runs]),
                }
                for state, runs in of.runs.items()
            }
        for key, limit in self.limits.items():
            data["limits"][key]["median"] = limit.median
        shares = {"transfer": self.transfer, "limit": self.wire, "share": self.share}
        data["shares"] = {
            state: {name: of(state) for name, of in shares.items()} for state in self.states()
        }
        return data

    def states(self) -> list[str]:
        """Return the states of the page cache that were measured."""
        return list(dict.fromkeys(state for of in self.loaders.values() for state in of.runs))

    def lines(self) -> list[str]:
        """Return the lines of a report: a table for each state, limits, skipped loaders, notes."""
        cores = f", {self.cores} CPUs" if self.cores else ""
        out = [
            f"{self.path}: {format_bytes(self.nbytes)}, {self.tensors} tensors in {self.files} "
            f"file{'s' * (self.files != 1)}, to {self.device}, dtype {self.dtype}{cores}"
        ]
        for state in self.states():
            out += ["", *self._table(state)]
        if self.limits:
            out.append("")
        for key, limit in self.limits.items():
            out.append(f"limit, {key}: {limit.median:.3g} GB/s ({limit.how})")
        if self.memory is not None:
            rate = f"{self.memory.median:,.{0 if self.memory.median >= 100 else 1}f} GB/s"
            out.append(f"memory of {self.device}: {rate} ({self.memory.how})")
        for state in self.states():
            share, transfer = self.share(state), self.transfer(state)
            if share and transfer:
                out.append(
                    f"{OURS}'s transfer, {state}: {transfer:.3g} GB/s, {share:.0%} of the limit"
                )
        out += [f"not compared: {name}: {why}" for name, why in self.skipped.items()]
        return out + [f"note: {note}" for note in self.notes]

    def rows(self, state: str) -> Iterator[dict[str, Any]]:
        """Yield the figures of each loader in a state, by column; None for missing ones."""
        for name, of in self.loaders.items():
            runs = of.runs.get(state)
            if not runs:
                continue
            seconds = [run.seconds for run in runs]
            other = "" if name == OURS else name
            yield {
                "loader": f"{name} {next(iter(of.versions.values()), '')}".strip(),
                "cache": state,
                "runs": len(runs),
                "seconds": median(seconds),
                "from": min(seconds),
                "to": max(seconds),
                "GB/s": self.rate(name, state),
                "again": self.rate(name, state, again=True),
                "transfer": self.transfer(state, name),
                "again_s": of.median_s(state, again=True),
                "streamload is": self.times(other, state),
                "again: streamload is": self.times(other, state, again=True),
                "host": format_bytes(max(run.memory.anon_nbytes for run in runs)),
                "pinned": _size([run.pinned_nbytes for run in runs]),
                "machine": format_bytes(max(0, *(run.memory.system_nbytes for run in runs))),
                "device": _size([run.memory.device_nbytes for run in runs]),
                "checked": of.checked,
            }

    def _table(self, state: str) -> Iterator[str]:
        keys = (
            *("GB/s", "again", "streamload is", "again: streamload is"),
            *("host", "pinned", "machine", "device", "checked"),
        )
        rows = [
            (
                *(row["loader"], f"{row['seconds']:.3g}", f"{row['from']:.3g}-{row['to']:.3g}"),
                *(_cell(row[key]) for key in keys),
            )
            for row in self.rows(state)
        ]
        named = (key.partition(":")[0] for key in keys)
        titles = (f"{state} page cache", "seconds", "from-to", *named)
        return format_table(titles, rows, right=len(titles) - 1)

    def svg(self) -> str:
        """Return a bar chart of all loaders' rates, as SVG text."""
        series = [
            (state, again)
            for state in self.states()
            for again in (False, True)
            if any(self.rate(name, state, again=again) for name in self.loaders)
        ]
        rates = {
            name: tuple(self.rate(name, state, again=again) for state, again in series)
            for name in self.loaders
        }
        return draw(
            f"{Path(self.path).name}: {format_bytes(self.nbytes)} to {self.device}",
            f"{self.machine.get('CPU', '')}, {self.machine.get('CPUs of this process', '')} CPUs; "
            "whole call, medians; higher is better",
            "GB/s",
            [f"{state}, {'again' if again else 'first'}" for state, again in series],
            [Bars(name, of, ours=name == OURS) for name, of in rates.items() if any(of)],
            [(key, limit.median) for key, limit in self.limits.items()],
        )


def _size(sizes: Sequence[int | None]) -> str | None:
    """Return the largest known size in words; None if none is known."""
    known = [n for n in sizes if n is not None]
    return format_bytes(max(known)) if known else None


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def _middle(values: Sequence[float | None]) -> float | None:
    """Return the median of known values; None if none is known."""
    known = [n for n in values if n is not None]
    return median(known) if known else None


def _spread(seconds: Sequence[float | None], nbytes: int) -> dict[str, float] | None:
    """Return median, extremes and rate of loads of ``nbytes``; None if no time is known."""
    known = [s for s in seconds if s is not None]
    if not known:
        return None
    middle = median(known)
    spread = {"median_s": middle, "min_s": min(known), "max_s": max(known)}
    return spread | {"gigabytes_per_second": nbytes / 1e9 / middle}
