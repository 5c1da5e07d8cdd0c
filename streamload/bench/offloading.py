"""Measure seconds a pass by budget, of an offloaded transformers model, and with other libraries.

Each budget and each other library (peer) has its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from streamload.bench.processes import Child, MeasurementError, call
from streamload.core.chart import Bars, draw
from streamload.core.units import format_bytes, format_table, parse_bytes
from streamload.errors import PlanInfeasibleError
from streamload.offloading.offload import plan_offload
from streamload.offloading.plan import ENDLESS_NBYTES

_POINTS = 8  # number of budgets, if none are given
OURS = "streamload"
#: Other libraries that run a model larger than the device, in `streamload.bench.passes`.
PEERS = ("accelerate", "diffusers", "diffusers, low memory", "AirLLM")


@dataclass(frozen=True, slots=True)
class PassOptions:
    """A model of transformers, and the passes to measure."""

    path: str  # the checkpoint, with ``config.json``
    device: str  # a device of torch
    budgets: Sequence[str] = ()  # sizes; none: eight from the least that works to all
    tokens: int = 128  # tokens of a pass
    runs: int = 5  # passes of each process, after one that is not counted
    peers: Sequence[str] = ()  # names in `PEERS`, which get the second least budget
    dtype: str = "checkpoint"  # the dtype to cast all floats to
    stay: Sequence[str] = ()  # as in `streamload.offload`
    layers: Sequence[str] = ()  # as in `streamload.offload`
    host: float | str = 0  # as in `streamload.offload`
    timeout_s: float = 600.0  # for each answer of a process
    say: Callable[[str], None] = lambda text: None  # called with a line for each process


@dataclass(frozen=True, slots=True)
class Point:
    """The figures of passes under one budget, in a process."""

    name: str  # `OURS`, or a peer
    budget_nbytes: int | None  # device memory allowed; None for peers without a budget
    seconds: tuple[float, ...] = ()  # of each pass but the first
    pass_nbytes: int | None = None  # bytes read by a pass; None for peers
    device_nbytes: int | None = None  # peak of the framework's allocator, if known
    host_nbytes: int | None = None  # peak of the process's RssAnon + RssShmem
    problem: str = ""  # the reason if nothing was measured

    @property
    def text(self) -> str:
        """A line with name, budget and seconds a pass, or the problem."""
        took = f"{median(self.seconds):.3f} s a pass" if self.seconds else self.problem
        return f"{self.name}, {_size(self.budget_nbytes)}: {took}"


@dataclass(frozen=True, slots=True)
class OffloadBench:
    """The result of `measure`: seconds a pass by budget."""

    path: str  # the checkpoint
    device: str
    tokens: int  # tokens of a pass
    points: tuple[Point, ...]  # those of streamload by budget, then those of peers
    notes: tuple[str, ...] = ()  # ways to make passes faster

    @property
    def has_figures(self) -> bool:
        """Whether any pass was measured."""
        return any(point.seconds for point in self.points)

    def lines(self) -> list[str]:
        """Return a table of the points, then problems and notes, a line each."""
        rows = [
            (
                point.name,
                _size(point.budget_nbytes),
                f"{median(point.seconds):.3f}" if point.seconds else "-",
                _size(point.pass_nbytes),
                _size(point.device_nbytes),
                _size(point.host_nbytes),
            )
            for point in self.points
        ]
        titles = ("who", "budget", "s a pass", "reads", "on the device", "of the host")
        return [
            f"{self.path} on {self.device}, {self.tokens} tokens",
            *format_table(titles, rows, right=1),
            *(point.text for point in self.points if point.problem),
            *(f"note: {note}" for note in self.notes),
        ]

    def svg(self) -> str:
        """Return a bar chart of the seconds a pass, as SVG text."""
        rows = []
        for point in self.points:
            if point.seconds:
                own, size = point.name == OURS, _size(point.budget_nbytes)
                name = size if own else f"{point.name} {size}"
                rows.append(Bars(name, (median(point.seconds),), ours=own))
        subtitle = f"{self.path}, {self.tokens} tokens, {self.device}"
        return draw("Seconds a pass by budget", subtitle, "s", ("seconds a pass",), rows)

    def to_json(self) -> dict[str, Any]:
        """Return all figures, as data for JSON."""
        return asdict(self)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def measure(options: PassOptions) -> OffloadBench:
    """Measure passes under several budgets, and of peers; return the figures."""
    path, device, tokens = options.path, options.device, options.tokens
    how: dict[str, Any] = {"dtype": options.dtype, "device": device, "tokens": tokens}
    how |= {"stay": list(options.stay), "layers": list(options.layers), "host": options.host}
    sizes = [parse_bytes(budget) for budget in options.budgets] or _budgets(path, how)
    second = sizes[min(1, len(sizes) - 1)]
    given = {"path": path, "device": device, "tokens": tokens}
    asked = [(OURS, nbytes, how) for nbytes in sizes] + [(n, second, given) for n in options.peers]
    points: list[Point] = []
    for name, nbytes, arguments in asked:
        function = f"streamload.bench.passes:{'passes' if name == OURS else 'peer_passes'}"
        who = {} if name == OURS else {"peer": name}
        job = call(function, **who, **{**arguments, "path": path, "budget": nbytes})
        heeds = name in (OURS, "accelerate")
        points.append(_measured(name, nbytes if heeds else None, job, options))
        options.say(points[-1].text)
    notes: list[str] = []
    with suppress(PlanInfeasibleError):  # the problem of its point
        notes = plan_offload(path, budget=sizes[0], **how).faster
    return OffloadBench(path, device, tokens, tuple(points), tuple(notes))


def _budgets(path: str, given: Mapping[str, Any]) -> list[int]:
    """Return budgets in bytes, evenly spread from the least that works to one for all weights."""
    most = least = plan_offload(path, budget=ENDLESS_NBYTES, **given).needed_nbytes
    try:
        plan_offload(path, budget=1, **given)
    except PlanInfeasibleError as error:
        least = error.needed_nbytes + most // 1000  # a load keeps a bit free
    step = (most - least) / (_POINTS - 1)
    return [int(least + step * at) for at in range(_POINTS - 1)] + [int(most * 1.01)]


def _measured(
    name: str, budget_nbytes: int | None, job: Mapping[str, Any], options: PassOptions
) -> Point:
    try:
        with Child(job, timeout_s=options.timeout_s) as child:
            laps = [child.lap()[0] for _ in range(options.runs + 1)][1:]
            host = child.peak.anon_nbytes
    except MeasurementError as error:
        return Point(name, budget_nbytes, problem=str(error))
    seconds = tuple(lap["seconds"] for lap in laps)
    reads, used = (laps[-1].get(key) for key in ("pass_nbytes", "device_nbytes"))
    return Point(name, budget_nbytes, seconds, reads, used, host)
