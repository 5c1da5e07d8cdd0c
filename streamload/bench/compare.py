"""One checkpoint, one device: streamload beside other loaders, and beside what the machine can do.

Loads take turns, each in a process of its own, so that what changes on the machine meanwhile meets
them all alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from streamload.bench import machine
from streamload.bench.chart import Bars, draw
from streamload.bench.loaders import LOADERS, OURS, Loader
from streamload.bench.processes import (
    Child,
    DriverMeter,
    MeasurementError,
    Memory,
    call,
    measure,
)
from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.checkpoint.page_cache import resident_fraction
from streamload.devices.names import environment_device, installed, spelled_as, split_name
from streamload.devices.probing import probe
from streamload.errors import CheckpointError, DeviceError, DeviceNotFoundError
from streamload.units import format_bytes, format_table

_RESIDENT = 0.99  # of a file: as much as counts as all of it
_READ_NBYTES = 2**23
_SLOW = 4.0  # times as long

#: tried in this order where no device is named
_DEFAULT_DEVICES = ("cuda:0", "CL", "cpu", "CPU", "host")


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be compared.

    Attributes:
        path: the checkpoint.
        device: a device's name, or None: ``STREAMLOAD_DEVICE``, or the first that works.
        runs: processes of each loader, in turn.
        peers: names in `LOADERS`, or None for all that load to the device.
        states: of the page cache: "warm", "cold".
        dtype: what all floats become, or "checkpoint".
        budget: for streamload; the others have none.
        timeout_s: for each load.
        cores: how many CPUs the processes may use; 0 for all.
        sites: for a loader, a folder that comes first on its import path.
        variants: more ways to use streamload, by a name of their own: what differs of its task
            ("dtype", "budget", "options").
        again: in how many rounds the warm processes load a second time; None for all.
        least_runs: rounds for a loader that takes more than four times as long as streamload;
            None for all.
        together: let the processes of a round get ready side by side: quicker on many cores.
        limits: measure what the machine could do at most.
        seconds: begin no further round after that time; every loader has one.
        options: more arguments of `load_state_dict`, for streamload.
        say: told what is being done.
    """

    path: str
    device: str | None = None
    runs: int = 5
    peers: tuple[str, ...] | None = None
    states: tuple[str, ...] = ("warm",)
    dtype: str = "checkpoint"
    budget: str | int | None = None
    timeout_s: float = 600.0
    cores: int = 0
    sites: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    again: int | None = None
    least_runs: int | None = None
    together: bool = False
    limits: bool = True
    seconds: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True)
class Run:
    """One process of a loader.

    Attributes:
        seconds: of the first load of the checkpoint, until the device was synchronised.
        cpu_s: CPU time of it, of all threads.
        again_s: of the loads after it, by the median, or None.
        memory: the most that was held during the first, above what was held before.
        says: what the loader, and its framework, say of themselves.
        import_s: importing the loader's modules.
        open_s: importing the framework, opening the device, and loading a few values.
    """

    seconds: float
    cpu_s: float
    again_s: float | None
    memory: Memory
    says: dict[str, Any]
    import_s: float
    open_s: float

    @property
    def pinned_nbytes(self) -> int | None:
        """Page-locked memory, the largest of what the kernel, loader and framework say."""
        keys = ("pinned_nbytes", "staging_nbytes", "torch_pinned_nbytes")
        said = [int(self.says[key]) for key in keys if key in self.says]
        if self.memory.locked_nbytes > 0:
            said.append(self.memory.locked_nbytes)
        return max(said, default=None)


@dataclass(slots=True)
class Of:
    """What was seen of one loader.

    Attributes:
        name: in `LOADERS`.
        what: how it is used.
        versions: of its packages.
        runs: by state of the page cache.
        checked: how many of its tensors were compared with the files; None where it failed.
    """

    name: str
    what: str
    versions: dict[str, str] = field(default_factory=dict)
    runs: dict[str, list[Run]] = field(default_factory=dict)
    checked: int | None = None

    def median_s(self, state: str, *, again: bool = False) -> float | None:
        """Seconds of the whole call."""
        found = [run.again_s if again else run.seconds for run in self.runs.get(state, ())]
        return _middle(found)


@dataclass(slots=True)
class Limit:
    """The most that the machine did, each round.

    Attributes:
        how: in words.
        rates: GB/s.
    """

    how: str
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """GB/s."""
        return median(self.rates)


@dataclass(slots=True)
class Comparison:
    """What was found.

    Attributes:
        path: the checkpoint.
        nbytes: of its tensors.
        files: how many.
        tensors: how many.
        device: where to.
        dtype: what floats became.
        cores: how many CPUs each process had.
        machine: what it ran on.
        loaders: what was seen, by name; streamload first.
        limits: by "state, name" ("warm, cached").
        skipped: why what was asked for is not there, by name.
        notes: what a reader should know.
    """

    path: str
    nbytes: int
    files: int
    tensors: int
    device: str
    dtype: str
    cores: int
    machine: dict[str, str]
    loaders: dict[str, Of] = field(default_factory=dict)
    limits: dict[str, Limit] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def rate(self, name: str, state: str, *, again: bool = False) -> float | None:
        """GB/s of a loader's whole call, by the median."""
        of = self.loaders.get(name)
        seconds = of.median_s(state, again=again) if of else None
        return self.nbytes / 1e9 / seconds if seconds else None

    def times(self, name: str, state: str, *, again: bool = False) -> float | None:
        """The rate of streamload over that of a loader, by the medians of the whole calls."""
        ours, other = (self.rate(n, state, again=again) for n in (OURS, name))
        return ours / other if ours and other else None

    def transfer(self, state: str, name: str = OURS) -> float | None:
        """GB/s of streamload's reading, casting and copying alone, by the median."""
        of = self.loaders.get(name)
        runs = of.runs.get(state, ()) if of else ()
        said = [run.says for run in runs if "stream_s" in run.says]
        return _middle([says["read_nbytes"] / 1e9 / says["stream_s"] for says in said])

    def wire(self, state: str) -> float | None:
        """GB/s of the slowest part of the way, by the median; None where it was not measured."""
        found = [limit.median for key, limit in self.limits.items() if key.startswith(state)]
        return min(found, default=None)

    def share(self, state: str) -> float | None:
        """The rate of streamload's transfer over that of the slowest part of the way."""
        transfer, wire = self.transfer(state), self.wire(state)
        return transfer / wire if transfer and wire else None

    def to_json(self) -> dict[str, Any]:
        """All of it, with each run."""
        data = asdict(self)
        for name, of in self.loaders.items():
            rows: dict[str, Any] = {}
            for state, runs in of.runs.items():
                rows[state] = {
                    "runs": len(runs),
                    "first": _spread([run.seconds for run in runs], self.nbytes),
                    "again": _spread([run.again_s for run in runs], self.nbytes),
                    "times": self.times(name, state),
                    "times_again": self.times(name, state, again=True),
                    "host_nbytes": median(run.memory.anon_nbytes for run in runs),
                    "pinned_nbytes": max((run.pinned_nbytes or 0 for run in runs), default=0),
                    "device_nbytes": _middle([run.memory.device_nbytes for run in runs]),
                }
            data["loaders"][name]["summary"] = rows
        for key, limit in self.limits.items():
            data["limits"][key]["median"] = limit.median
        data["shares"] = {
            state: {
                "transfer": self.transfer(state),
                "limit": self.wire(state),
                "share": self.share(state),
            }
            for state in self.states()
        }
        return data

    def states(self) -> list[str]:
        """The states of the page cache in which something was measured."""
        return list(dict.fromkeys(state for of in self.loaders.values() for state in of.runs))

    def lines(self) -> list[str]:
        """For people."""
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
        for state in self.states():
            share, transfer = self.share(state), self.transfer(state)
            if share and transfer:
                out.append(
                    f"{OURS}'s transfer, {state}: {transfer:.3g} GB/s, {share:.0%} of the limit"
                )
        out += [f"not compared: {name}: {why}" for name, why in self.skipped.items()]
        return out + [f"note: {note}" for note in self.notes]

    def rows(self, state: str) -> Iterator[dict[str, Any]]:
        """What was measured of each loader in a state, by column; None where nothing was."""
        for name, of in self.loaders.items():
            runs = of.runs.get(state)
            if not runs:
                continue
            seconds = [run.seconds for run in runs]
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
                "streamload is": None if name == OURS else self.times(name, state),
                "again: streamload is": None
                if name == OURS
                else self.times(name, state, again=True),
                "host": format_bytes(max(run.memory.anon_nbytes for run in runs)),
                "pinned": _size([run.pinned_nbytes for run in runs]),
                "machine": format_bytes(max(0, *(run.memory.system_nbytes for run in runs))),
                "device": _size([run.memory.device_nbytes for run in runs]),
                "checked": of.checked,
            }

    def _table(self, state: str) -> Iterator[str]:
        rows = []
        for row in self.rows(state):
            numbers = ("GB/s", "again", "streamload is", "again: streamload is")
            texts = ("host", "pinned", "machine", "device", "checked")
            rows.append(
                (
                    row["loader"],
                    f"{row['seconds']:.3g}",
                    f"{row['from']:.3g}-{row['to']:.3g}",
                    *("" if row[key] is None else f"{row[key]:.3g}" for key in numbers),
                    *("" if row[key] is None else str(row[key]) for key in texts),
                )
            )
        titles = (
            *(f"{state} page cache", "seconds", "from-to", "GB/s", "again"),
            *("streamload is", "again", "host", "pinned", "machine", "device", "checked"),
        )
        return format_table(titles, rows, right=len(titles) - 1)

    def svg(self) -> str:
        """The rates as bars."""
        states = self.states()
        series = [
            (state, again)
            for state in states
            for again in (False, True)
            if any(self.rate(name, state, again=again) for name in self.loaders)
        ]
        rows = [
            Bars(
                name,
                tuple(self.rate(name, state, again=again) for state, again in series),
                ours=name == OURS,
            )
            for name in self.loaders
        ]
        return draw(
            f"{Path(self.path).name}: {format_bytes(self.nbytes)} to {self.device}",
            f"{self.machine.get('CPU', '')}, {self.machine.get('CPUs of this process', '')} CPUs; "
            "whole call, medians; higher is better",
            "GB/s",
            [f"{state}, {'again' if again else 'first'}" for state, again in series],
            [row for row in rows if any(row.values)],
            [(key, limit.median) for key, limit in self.limits.items()],
        )


def _size(sizes: Sequence[int | None]) -> str | None:
    known = [n for n in sizes if n is not None]
    return format_bytes(max(known)) if known else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [n for n in values if n is not None]
    return median(known) if known else None


def _spread(seconds: Sequence[float | None], nbytes: int) -> dict[str, float] | None:
    known = [s for s in seconds if s is not None]
    if not known:
        return None
    middle = median(known)
    return {
        "median_s": middle,
        "min_s": min(known),
        "max_s": max(known),
        "gigabytes_per_second": nbytes / 1e9 / middle,
    }


# --- the page cache -------------------------------------------------------------------------------


def warm(files: Sequence[Path]) -> str:
    """Bring files into the page cache, and dirty pages to the disk; says what is wrong, or ""."""
    block = memoryview(bytearray(_READ_NBYTES))
    for file in files:
        with open(file, "rb", buffering=0) as data:
            os.fsync(data.fileno())
            if (resident_fraction(data.fileno()) or 0) < _RESIDENT:
                while data.readinto(block):
                    pass
    known = [part for file in files if (part := resident_fraction(file)) is not None]
    if len(known) < len(files):
        return "the system does not say what is in the page cache"
    least = min(known, default=1)
    return "" if least >= _RESIDENT else f"only {least:.0%} of a file stays in the page cache"


def forget(files: Sequence[Path]) -> str:
    """Drop files from the page cache; says what is wrong, or ""."""
    if not hasattr(os, "posix_fadvise"):
        return "this system drops no file from its page cache"
    for file in files:
        with open(file, "rb") as data:
            os.fsync(data.fileno())  # pages that are to be written stay
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    most = max((resident_fraction(file) or 0 for file in files), default=0)
    if most <= 1 - _RESIDENT:
        return ""
    return f"{most:.0%} of a file stays in the page cache: it is in memory, or in use"


class _NotColdError(Exception):
    """Files cannot be dropped from the page cache; the message says why."""


#: By state of the page cache: what brings files into it, and whether loads make sense without.
_STATES: dict[str, tuple[Callable[[Sequence[Path]], str], bool]] = {
    "warm": (warm, False),
    "cold": (forget, True),
}
STATES = tuple(_STATES)


# --- comparing ------------------------------------------------------------------------------------


def resolve(device: str | None) -> tuple[str, str]:
    """The framework and the device, in its spelling.

    Args:
        device: as in `load_state_dict`, or None: ``STREAMLOAD_DEVICE``, or the first that works.

    Raises:
        DeviceNotFoundError: none works.
    """
    device = device or environment_device()
    for name in (device,) if device else _DEFAULT_DEVICES:
        owner, rest = split_name(name)
        owner = owner or spelled_as(name)
        if device or (installed(owner) and probe(owner, rest).works):
            return owner, rest
    raise DeviceNotFoundError("auto", f"none of {', '.join(_DEFAULT_DEVICES)} works")


def cuda_index(device: str) -> int | None:
    """Which CUDA device a name is of, in any framework's spelling; None for another device."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind.lower() == "cuda" else None


def choose(options: Options, framework: str, device: str) -> dict[str, Loader]:
    """The loaders to compare; streamload first.

    Raises:
        ValueError: one that is named does not exist, or does not load to the device.
    """
    ours = dict.fromkeys((OURS, *options.variants), LOADERS[OURS])
    if options.peers is None:
        return ours | {n: one for n, one in LOADERS.items() if one.takes(framework, device)}
    for name in options.peers:
        if name not in LOADERS:
            raise ValueError(f"no loader {name!r}; there are {', '.join(LOADERS)}")
        if not LOADERS[name].takes(framework, device):
            raise ValueError(f"{name} does not load to {device} of {framework}")
    return ours | {name: LOADERS[name] for name in options.peers}


def compare(options: Options) -> Comparison:
    """Measure.

    Raises:
        CheckpointError: the checkpoint is invalid, or not in files.
        DeviceNotFoundError: no device works.
        ValueError: an argument is invalid.
    """
    for state in options.states:
        if state not in _STATES:
            raise ValueError(f"no state {state!r} of the page cache; there are {', '.join(STATES)}")
    if options.runs < 1:
        raise ValueError(f"runs is at least 1, not {options.runs}")
    checkpoint = open_checkpoint(options.path)
    framework, device = resolve(options.device)
    chosen = choose(options, framework, device)
    for name in options.sites:
        if name not in chosen:
            raise ValueError(f"a folder for {name!r}, which is not compared")
    return _Comparing(options, checkpoint, framework, device, chosen).run()


class _Comparing:
    """A comparison under way."""

    def __init__(
        self,
        options: Options,
        checkpoint: Checkpoint,
        framework: str,
        device: str,
        chosen: Mapping[str, Loader],
    ) -> None:
        self._options = options
        self._framework, self._device = framework, device
        self._chosen = chosen
        self._files = [h.path for h in checkpoint.shards if isinstance(h.path, Path)]
        if len(self._files) < len(checkpoint.shards):
            raise CheckpointError(checkpoint.path, "what is measured is read from files, not URLs")
        self._index = cuda_index(device)
        self._meter: DriverMeter | None = None
        self._ways: dict[str, dict[str, int]] = {}  # how a limit is best measured, by its name
        self.found = Comparison(
            path=str(checkpoint.path),
            nbytes=checkpoint.nbytes,
            files=len(checkpoint.shards),
            tensors=len(checkpoint.tensors),
            device=device,
            dtype=options.dtype,
            cores=options.cores,
            machine=machine.facts(),
        )
        if self._index is not None:
            try:
                self._meter = DriverMeter(self._index)
            except DeviceError as error:
                self.found.notes.append(f"memory of the device was not measured: {error}")

    def run(self) -> Comparison:
        """All states."""
        for name, loader in self._chosen.items():
            self.found.loaders[name] = Of(name, loader.what)
        for state in self._options.states:
            try:
                self._state(state)
            except _NotColdError as error:
                self.found.skipped[state] = str(error)
            except KeyboardInterrupt:
                if not any(of.runs for of in self.found.loaders.values()):
                    raise
                self.found.notes.append(f"{state}: ended by Ctrl-C")
                break
        self.found.loaders = {n: of for n, of in self.found.loaders.items() if of.runs}
        return self.found

    def _state(self, state: str) -> None:
        options = self._options
        begun = time.monotonic()
        for number in range(options.runs):
            if number and options.seconds and time.monotonic() - begun > options.seconds:
                self.found.notes.append(f"{state}: {number} rounds, no time for {options.runs}")
                break
            again = state == "warm" and (options.again is None or number < options.again)
            self._round(state, f"{state}, round {number + 1} of {options.runs}", number, again)

    def _round(self, state: str, where: str, number: int, again: bool) -> None:
        """Every limit and every loader once."""
        measures: dict[str, tuple[Callable[[], Child], Callable[[Child], None]]] = {}
        if self._options.limits:
            for name in self._limits_of(state, where):
                measures[f"limit: {name}"] = (
                    partial(self._limit_child, name, **self._ways.get(name, {})),
                    partial(self._take_limit, name, state),
                )
        for name in self._chosen:
            if self._is_due(name, state, number):
                measures[name] = (
                    partial(self._load_child, name),
                    partial(self._take_load, name, state, again),
                )
        with ExitStack() as stack:
            children: dict[str, Child] = {}
            if self._options.together:
                for name, (start, _) in measures.items():
                    children[name] = stack.enter_context(start())
                for child in children.values():
                    with suppress(MeasurementError):  # said when it is this one's turn
                        child.ready()
            for name, (start, take) in measures.items():
                self._options.say(f"{where}: {name}")
                try:
                    with children.get(name) or start() as child:
                        take(child)
                except MeasurementError as error:
                    self.found.skipped[name] = str(error)

    def _is_due(self, name: str, state: str, number: int) -> bool:
        """Whether a loader has its turn in a round."""
        options = self._options
        if name in self.found.skipped:
            return False
        named = options.peers is not None and name in options.peers
        if not named and state not in self._chosen[name].states:
            return False
        if options.least_runs is None or number < options.least_runs:
            return True
        times = self.found.times(name, state)
        return times is None or times < _SLOW

    def _load_child(self, name: str) -> Child:
        options = self._options
        task = {
            "path": self.found.path,
            "files": [str(file) for file in self._files],
            "framework": self._framework,
            "device": self._device,
            "dtype": options.dtype,
            "budget": options.budget,
            "options": dict(options.options),
            **options.variants.get(name, {}),
        }
        loader = OURS if name in options.variants else name
        job = {"kind": "load", "loader": loader, "task": task}
        site = options.sites.get(name)
        return self._child(job, (site,) if site else ())

    def _take_load(self, name: str, state: str, again: bool, child: Child) -> None:
        ready = child.ready()
        self._prepare(state)
        said, memory = child.lap()
        again_s = child.again()["seconds"] if again else None
        of = self.found.loaders[name]
        if of.checked is None:
            of.checked = child.check()["checked"]
        of.versions = ready["versions"]
        of.runs.setdefault(state, []).append(
            Run(
                said["seconds"],
                said["cpu_s"],
                again_s,
                memory,
                said["says"],
                ready["import_s"],
                ready["open_s"],
            )
        )

    def _prepare(self, state: str) -> None:
        prepare, needed = _STATES[state]
        problem = prepare(self._files)
        if problem and needed:
            raise _NotColdError(problem)
        note = f"{state}: {problem}"
        if problem and note not in self.found.notes:
            self.found.notes.append(note)

    def _limits_of(self, state: str, where: str) -> list[str]:
        """The limits that are measured in a state; finds the best way to do it first."""
        names = {"warm": ["cached"], "cold": ["direct"]}[state]
        for name in names:
            if name not in self._ways and f"limit: {name}" not in self.found.skipped:
                self._options.say(f"{where}: looking for the fastest way of {_LIMITS[name]}")
                self._prepare(state)
                try:
                    with self._limit_child(name) as child:
                        said = child.lap()[0]
                    self._ways[name] = {key: said[key] for key in ("threads", "block_nbytes")}
                except MeasurementError as error:
                    self.found.skipped[f"limit: {name}"] = str(error)
        if self._index is not None:
            names.append("copy")
        return [name for name in names if f"limit: {name}" not in self.found.skipped]

    def _limit_child(self, name: str, **more: Any) -> Child:
        how: dict[str, Any] = {"index": self._index}
        if name != "copy":
            how = {"paths": list(map(str, self._files)), "direct": name == "direct", **more}
        return self._child(call("streamload.bench.limits:limit", **how))

    def _take_limit(self, name: str, state: str, child: Child) -> None:
        child.ready()
        self._prepare(state)
        said = child.lap()[0]
        limit = self.found.limits.setdefault(f"{state}, {_LIMITS[name]}", Limit(""))
        limit.how = said["how"]
        limit.rates.append(said["nbytes"] / 1e9 / said["seconds"])

    def _child(self, job: Mapping[str, Any], sites: Sequence[str] = ()) -> Child:
        return Child(
            {**job, "cores": self._options.cores},
            timeout_s=self._options.timeout_s,
            sites=sites,
            device_nbytes=self._meter.used_nbytes if self._meter else None,
        )


_LIMITS = {
    "cached": "reading the page cache",
    "direct": "reading by O_DIRECT",
    "copy": "copying from pinned memory",
}


def refusal(options: Options) -> dict[str, Any]:
    """Whether a budget of exactly what is predicted succeeds, and a MiB less is refused.

    Returns:
        What `streamload.bench.worker` says of it.

    Raises:
        MeasurementError: the load failed.
    """
    framework, device = resolve(options.device)
    job = call(
        "streamload.bench.worker:refusal",
        path=str(open_checkpoint(options.path).path),
        files=(),
        framework=framework,
        device=device,
        dtype=options.dtype,
        options=dict(options.options),
    )
    return measure({**job, "cores": options.cores}, timeout_s=options.timeout_s).first
