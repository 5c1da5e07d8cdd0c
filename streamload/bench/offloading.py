"""Seconds a pass against the budget: a model of transformers that is offloaded, beside its peers.

Each budget, and each peer, has a process of its own.
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
from streamload.offloading.plan import ENDLESS_NBYTES, OffloadPlan

_POINTS = 8  # budgets, where none are named
OURS = "streamload"
_MODULE = "streamload.bench.passes"
#: Ways of others to run a model that does not fit, by name: what makes a pass of them.
PEERS: Mapping[str, str] = {
    "accelerate": f"{_MODULE}:accelerate_passes",
    "diffusers": f"{_MODULE}:group_passes",
    "diffusers, low memory": f"{_MODULE}:lean_group_passes",
    "AirLLM": f"{_MODULE}:layered_passes",
}


@dataclass(frozen=True, slots=True)
class Point:
    """What passes took under one budget.

    Attributes:
        name: whose they are.
        budget_nbytes: what the device was to hold; None where a peer has no such thing.
        seconds: of each pass but the first.
        pass_nbytes: what a pass reads; None of peers.
        device_nbytes: the most that the framework had allocated; None where it does not tell.
        host_nbytes: the most RssAnon + RssShmem of the process.
        problem: why there is no figure, or "".
    """

    name: str
    budget_nbytes: int | None
    seconds: tuple[float, ...] = ()
    pass_nbytes: int | None = None
    device_nbytes: int | None = None
    host_nbytes: int | None = None
    problem: str = ""

    @property
    def said(self) -> str:
        """One line of it."""
        took = f"{median(self.seconds):.3f} s a pass" if self.seconds else self.problem
        return f"{self.name}, {_size(self.budget_nbytes)}: {took}"


@dataclass(frozen=True, slots=True)
class OffloadBench:
    """What was measured. Prints as a table.

    Attributes:
        path: the checkpoint.
        device: where it ran.
        tokens: of a pass.
        points: ours by budget, and then the peers'.
        notes: what a reader should know.
    """

    path: str
    device: str
    tokens: int
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """A line for each point."""
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
            *(point.said for point in self.points if point.problem),
            *(f"note: {note}" for note in self.notes),
        ]

    def svg(self) -> str:
        """Bars of the seconds a pass."""
        rows = [
            Bars(
                f"{point.name if point.name != OURS else ''} {_size(point.budget_nbytes)}".strip(),
                (median(point.seconds),),
                ours=point.name == OURS,
            )
            for point in self.points
            if point.seconds
        ]
        subtitle = f"{self.path}, {self.tokens} tokens, {self.device}"
        return draw("Seconds a pass by budget", subtitle, "s", ("seconds a pass",), rows)

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def measure(
    path: str,
    device: str,
    *,
    budgets: Sequence[str] = (),
    tokens: int = 128,
    runs: int = 5,
    peers: Sequence[str] = (),
    peer_budget: str | None = None,
    dtype: str = "checkpoint",
    stay: Sequence[str] = (),
    layers: Sequence[str] = (),
    host: float | str = 0,
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> OffloadBench:
    """Measure passes of a model of transformers under several budgets.

    Args:
        path: the checkpoint, with ``config.json``.
        device: one of torch's.
        budgets: sizes; none: eight from the least that will do to one that all fits in.
        tokens: of a pass.
        runs: passes of each process, after a first that is not counted.
        peers: names in `PEERS`.
        peer_budget: what peers may hold on the device; None for the second least budget.
        dtype: what all floats become.
        stay: as in `streamload.offload`; so are ``layers`` and ``host``.
        layers: see ``stay``.
        host: see ``stay``.
        timeout_s: for each answer of a process.
        say: told what was measured, a line for each process.

    Raises:
        PlanInfeasibleError: not even the least fits.
        CheckpointError: the checkpoint is invalid.
    """
    how: dict[str, Any] = {"dtype": dtype, "device": device, "tokens": tokens}
    how |= {"stay": list(stay), "layers": list(layers), "host": host}
    sizes = [parse_bytes(budget) for budget in budgets] or _budgets(path, how)
    points = []
    for nbytes in sizes:
        job = call(f"{_MODULE}:passes", path=path, budget=nbytes, **how)
        points.append(_measured(OURS, nbytes, job, runs, timeout_s))
        say(points[-1].said)
    allowed = parse_bytes(peer_budget) if peer_budget else sizes[min(1, len(sizes) - 1)]
    for name in peers:
        job = call(PEERS[name], path=path, device=device, budget=allowed, tokens=tokens)
        budget = allowed if name == "accelerate" else None
        points.append(_measured(name, budget, job, runs, timeout_s))
        say(points[-1].said)
    notes: list[str] = []
    with suppress(PlanInfeasibleError):  # said of its point
        notes = plan_offload(path, budget=sizes[0], **how).faster
    return OffloadBench(path, device, tokens, tuple(points), tuple(notes))


def _budgets(path: str, given: Mapping[str, Any]) -> list[int]:
    """Budgets from the least that will do to all."""
    whole: OffloadPlan = plan_offload(path, budget=ENDLESS_NBYTES, **given)
    most, least = whole.needed_nbytes, 1
    low, high = 0, most
    while high - low > most // 1000:  # the least is in between
        middle = (low + high) // 2
        try:
            least = plan_offload(path, budget=max(middle, 1), **given).needed_nbytes
            high = middle
        except MemoryError:
            low = middle
    least = max(least, high)
    step = (most - least) / (_POINTS - 1)
    return [int(least + step * at) for at in range(_POINTS - 1)] + [int(most * 1.01)]


def _measured(
    name: str, budget_nbytes: int | None, job: dict[str, Any], runs: int, timeout_s: float
) -> Point:
    try:
        with Child(job, timeout_s=timeout_s) as child:
            said = [child.lap()[0] for _ in range(runs + 1)][1:]
            host = child.peak.anon_nbytes
    except MeasurementError as error:
        return Point(name, budget_nbytes, problem=str(error))
    last = said[-1]
    return Point(
        name,
        budget_nbytes,
        tuple(lap["seconds"] for lap in said),
        last.get("pass_nbytes"),
        last.get("device_nbytes"),
        host,
    )
