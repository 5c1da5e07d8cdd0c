"""Compare streamload with other loaders and the machine's limits, on one checkpoint and device.

Loads alternate, each in a process of its own, so that changes on the machine affect all alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from streamload.bench import machine
from streamload.bench.loaders import LOADERS, OURS, Loader
from streamload.bench.processes import Child, MeasurementError, call, device_meter, load_job
from streamload.bench.results import Comparison, Limit, Of, Run
from streamload.checkpoint.open import open_checkpoint
from streamload.core.memory_rate import UNNAMED, keep_rate
from streamload.devices.names import environment_device, installed, spelled_as, split_name
from streamload.devices.probing import probe
from streamload.errors import CheckpointError, DeviceError, DeviceNotFoundError
from streamload.files.page_cache import resident_fraction

_RESIDENT = 0.99  # a file with this share in the page cache counts as cached
_READ_NBYTES = 2**23  # of each read that warms the page cache
#: Devices to try, in this order, if none is named.
_DEFAULT_DEVICES = ("cuda:0", "CL", "cpu", "CPU", "host")
_LIMITS = {
    "cached": "reading the page cache",
    "direct": "reading by O_DIRECT",
    "copy": "copying from pinned memory",
}
#: By name, how to start the process of a measurement, and how to measure in it.
Measures = Mapping[str, tuple[Callable[[], Child], Callable[[Child], None]]]


@dataclass(frozen=True, slots=True)
class Options:
    """The checkpoint, the device, the loaders and the rounds of a comparison."""

    path: str  # the checkpoint
    device: str | None = None  # None: ``STREAMLOAD_DEVICE``, or the first that works
    runs: int = 5  # processes of each loader, alternating
    peers: tuple[str, ...] | None = None  # names in `LOADERS`; None for all of the device
    states: tuple[str, ...] = ("warm",)  # states of the page cache: "warm", "cold"
    dtype: str = "checkpoint"  # the dtype to cast all floats to
    budget: str | int | None = None  # streamload's budget on the device
    timeout_s: float = 600.0  # for each load
    cores: int = 0  # CPUs of each process; 0 for all
    # folders that come first on a loader's import path, by its name
    sites: Mapping[str, str] = field(default_factory=dict)
    limits: bool = True  # measure the machine's limits
    seconds: float | None = None  # start no round, besides the first, after this time
    say: Callable[[str], None] = lambda text: None  # called with each step, in words


# --- the page cache -------------------------------------------------------------------------------


def warm(files: Sequence[Path]) -> str:
    """Read files into the page cache and write dirty pages; return why that failed, or ""."""
    block = memoryview(bytearray(_READ_NBYTES))
    for file in files:
        with open(file, "rb", buffering=0) as data:
            os.fsync(data.fileno())
            if (resident_fraction(data.fileno()) or 0) < _RESIDENT:
                while data.readinto(block):
                    pass
    known = [part for file in files if (part := resident_fraction(file)) is not None]
    if len(known) < len(files):
        return "the system does not report the content of the page cache"
    least = min(known, default=1)
    return "" if least >= _RESIDENT else f"only {least:.0%} of a file stays in the page cache"


def forget(files: Sequence[Path]) -> str:
    """Drop files from the page cache; return why that failed, or ""."""
    if not hasattr(os, "posix_fadvise"):
        return "this system drops no file from its page cache"
    for file in files:
        with open(file, "rb") as data:
            os.fsync(data.fileno())  # dirty pages are not dropped
            os.posix_fadvise(data.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    most = max((resident_fraction(file) or 0 for file in files), default=0)
    if most <= 1 - _RESIDENT:
        return ""
    return f"{most:.0%} of a file stays in the page cache: it is in memory, or in use"


class _NotColdError(Exception):
    """Files cannot be dropped from the page cache; the message is the reason."""


#: The function that brings files into each state of the page cache, and the limit of reading then.
STATES: Mapping[str, tuple[Callable[[Sequence[Path]], str], str]] = {
    "warm": (warm, "cached"),
    "cold": (forget, "direct"),
}


# --- comparing ------------------------------------------------------------------------------------


def resolve(device: str | None) -> tuple[str, str]:
    """Return framework and name of a device; None: ``STREAMLOAD_DEVICE``, or one that works."""
    device = device or environment_device()
    for name in (device,) if device else _DEFAULT_DEVICES:
        owner, rest = split_name(name)
        owner = owner or spelled_as(name)
        if device or (installed(owner) and probe(owner, rest).works):
            return owner, rest
    raise DeviceNotFoundError("auto", f"none of {', '.join(_DEFAULT_DEVICES)} works")


def cuda_index(device: str) -> int | None:
    """Return the index of a CUDA device, in any framework's spelling; None for other devices."""
    kind, _, index = device.partition(":")
    return int(index or 0) if kind.lower() == "cuda" else None


def choose(options: Options, framework: str, device: str) -> dict[str, Loader]:
    """Return the loaders to compare by name, streamload first; ValueError for an invalid name."""
    takes = {name: one for name, one in LOADERS.items() if one.takes(framework, device)}
    for name in options.peers or ():
        if name not in LOADERS:
            raise ValueError(f"no loader {name!r}; there are {', '.join(LOADERS)}")
        if name not in takes:
            raise ValueError(f"{name} does not load to {device} of {framework}")
    named = takes if options.peers is None else options.peers
    return {name: LOADERS[name] for name in (OURS, *named)}


def compare(options: Options) -> Comparison:
    """Measure all loaders, and return their figures."""
    return Comparing(options).run()


class Comparing:
    """A comparison: starts the processes that measure, and collects their figures."""

    def __init__(self, options: Options) -> None:
        for state in options.states:
            if state not in STATES:
                known = ", ".join(STATES)
                raise ValueError(f"no state {state!r} of the page cache; there are {known}")
        if options.runs < 1:
            raise ValueError(f"runs is at least 1, not {options.runs}")
        checkpoint = open_checkpoint(options.path)
        self._options = options
        self._framework, self._device = resolve(options.device)
        self._chosen = self._choose()
        for name in options.sites:
            if name not in self._chosen:
                raise ValueError(f"a folder for {name!r}, which is not compared")
        self._files = [h.path for h in checkpoint.shards if isinstance(h.path, Path)]
        if len(self._files) < len(checkpoint.shards):
            raise CheckpointError(checkpoint.path, "loaders are measured on files, not URLs")
        self._ways: dict[str, dict[str, int]] = {}  # the fastest threads and blocks of a limit
        self.found = Comparison(
            path=str(checkpoint.path),
            nbytes=checkpoint.nbytes,
            files=len(checkpoint.shards),
            tensors=len(checkpoint.tensors),
            device=self._device,
            dtype=options.dtype,
            cores=options.cores,
            machine=machine.facts(),
            loaders={name: Of(name, loader.what) for name, loader in self._chosen.items()},
        )
        self._index = cuda_index(self._device)
        self._used_nbytes: Callable[[], int] | None = None
        if self._index is not None:
            try:
                self._used_nbytes = device_meter(self._index)
            except DeviceError as error:
                self.found.notes.append(f"memory of the device was not measured: {error}")

    def run(self) -> Comparison:
        """Measure all states of the page cache, and return the figures."""
        if self._options.limits and not self._options.cores:
            self._measure_memory()
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
        if self._device == "cpu" and self._options.dtype == "checkpoint":
            self.found.notes += [
                f"{name} only maps the files here: its tensors are views of the page cache, which "
                "streamload reads into its own memory. The two differ: "
                'load_state_dict(..., residence="mapped") maps, too'
                for name in self.found.loaders
                if self._chosen[name].maps
            ]
        return self.found

    def _state(self, state: str) -> None:
        options, begun = self._options, time.monotonic()
        for number in range(options.runs):
            if number and options.seconds and time.monotonic() - begun > options.seconds:
                self.found.notes.append(f"{state}: {number} rounds, no time for {options.runs}")
                break
            where = f"{state}, round {number + 1} of {options.runs}"
            measures = {}
            for name in self._limits_of(state, where) if options.limits else ():
                start = partial(self._limit_child, name, **self._ways.get(name, {}))
                measures[f"limit: {name}"] = start, partial(self._take_limit, name, state)
            for name in self._chosen:
                if name not in self.found.skipped and self._is_due(name, state, number):
                    take = partial(self._take_load, name, state, self._repeats(state, number))
                    measures[name] = partial(self._load_child, name), take
            self._measure(where, measures)

    def _measure(self, where: str, measures: Measures) -> None:
        for name, (start, take) in measures.items():
            self._options.say(f"{where}: {name}")
            try:
                with start() as child:
                    take(child)
            except MeasurementError as error:
                self.found.skipped[name] = str(error)

    # what comparisons by developers change

    def _choose(self) -> dict[str, Loader]:
        return choose(self._options, self._framework, self._device)

    def _is_due(self, name: str, state: str, number: int) -> bool:
        """Return whether a loader runs in a round, counted from 0."""
        return name in (self._options.peers or ()) or state in self._chosen[name].states

    def _repeats(self, state: str, number: int) -> bool:
        """Return whether the processes of a round load a second time."""
        return state == "warm"

    def _task(self, name: str) -> dict[str, Any]:
        return {
            "loader": name,
            "path": self.found.path,
            "files": [str(file) for file in self._files],
            "framework": self._framework,
            "device": self._device,
            "dtype": self._options.dtype,
            "budget": self._options.budget,
        }

    # loaders and limits

    def _load_child(self, name: str) -> Child:
        site = self._options.sites.get(name)
        return self._child(load_job(**self._task(name)), (site,) if site else ())

    def _take_load(self, name: str, state: str, again: bool, child: Child) -> None:
        ready = child.ready()
        self._prepare(state)
        answer, memory = child.lap()
        again_s = child.again()["seconds"] if again else None
        of = self.found.loaders[name]
        if of.checked is None:
            of.checked = child.check()["checked"]
        of.versions = ready["versions"]
        times = {key: ready[key] for key in ("import_s", "open_s")}
        measured = {key: answer[key] for key in ("seconds", "cpu_s", "says")}
        run = Run(**measured, again_s=again_s, memory=memory, **times)
        of.runs.setdefault(state, []).append(run)

    def _prepare(self, state: str) -> None:
        """Cache the files ("warm") or drop them ("cold"); raise _NotColdError if impossible."""
        problem = STATES[state][0](self._files)
        if problem and state == "cold":
            raise _NotColdError(problem)
        note = f"{state}: {problem}"
        if problem and note not in self.found.notes:
            self.found.notes.append(note)

    def _limits_of(self, state: str, where: str) -> list[str]:
        """Return names of limits, after tuning threads and blocks; ``where``: starts messages."""
        name = STATES[state][1]
        if name not in self._ways and f"limit: {name}" not in self.found.skipped:
            self._options.say(f"{where}: looking for the fastest way of {_LIMITS[name]}")
            self._prepare(state)
            try:
                with self._limit_child(name) as child:
                    rate = child.lap()[0]
                self._ways[name] = {key: rate[key] for key in ("threads", "block_nbytes")}
            except MeasurementError as error:
                self.found.skipped[f"limit: {name}"] = str(error)
        names = [name] if self._index is None else [name, "copy"]
        return [name for name in names if f"limit: {name}" not in self.found.skipped]

    def _limit_child(self, name: str, **more: Any) -> Child:
        how: dict[str, Any] = {"index": self._index}
        if name != "copy":
            how = {"paths": list(map(str, self._files)), "direct": name == "direct", **more}
        return self._child(call("streamload.bench.limits:limit", **how))

    def _take_limit(self, name: str, state: str, child: Child) -> None:
        child.ready()
        self._prepare(state)
        rate = child.lap()[0]
        limit = self.found.limits.setdefault(f"{state}, {_LIMITS[name]}", Limit(""))
        limit.how = rate["how"]
        limit.rates.append(rate["nbytes"] / 1e9 / rate["seconds"])

    def _measure_memory(self) -> None:
        """Measure the rate of the device's memory, and keep it for plans."""
        self._options.say(f"memory of {self._device}")
        how = {"owner": self._framework, "device": self._device, "index": self._index}
        try:
            with self._child(call("streamload.bench.limits:memory", **how)) as child:
                rate = child.lap()[0]
        except MeasurementError as error:
            self.found.skipped["limit: memory"] = str(error)
            return
        measured = rate["nbytes"] / 1e9 / rate["seconds"]
        self.found.memory = Limit(rate["how"], [measured])
        for name in (self._device, UNNAMED)[: 1 if self._options.device else 2]:
            keep_rate(name, measured)

    def _child(self, job: Mapping[str, Any], sites: Sequence[str] = ()) -> Child:
        return Child(
            {**job, "cores": self._options.cores},
            timeout_s=self._options.timeout_s,
            sites=sites,
            device_nbytes=self._used_nbytes,
        )
