"""The report of a load: bytes predicted, held, and measured by counters of kernel and framework."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streamload.codecs.cast_table import CastCounts, OutOfRange
from streamload.codecs.parts import QuantCounts
from streamload.core.chart import as_html
from streamload.core.system import callers_level
from streamload.core.units import format_bytes, format_rate
from streamload.devices.base import Device
from streamload.errors import printable, printed
from streamload.files.header import FileState, open_regular
from streamload.planning.plan import PARTS, Plan
from streamload.streaming.memory_watch import process_nbytes

_SAMPLE_EVERY_S = 0.02  # reading /proc takes tens of microseconds


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The part of one node in a load across nodes.

    Attributes:
        node: the node's id.
        rank: the node's rank.
        tensors: how many parameters the node loaded.
        read_nbytes: file bytes that the node read.
        resident_nbytes: bytes of parameters on the node's device.
        seconds: wall time of the node's load.
        pass_nbytes: bytes that each pass of the model reads there, if the node offloads its part.
    """

    node: str
    rank: int
    tensors: int
    read_nbytes: int
    resident_nbytes: int
    seconds: float
    pass_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The measurements of a load. Prints as a short table.

    Attributes:
        path: the checkpoint.
        plan: the plan that the load followed.
        read_nbytes: file bytes read.
        resident_nbytes: bytes of parameters on all devices, as the allocators round.
        seconds: wall time of the whole call.
        stream_seconds: wall time of reading, casting and placing alone.
        transfer_seconds: of that, from the first read on until the last byte was in place: without
            staging and first parameters, which are allocated before, and without their release.
        predicted_nbytes: the plan's peak on each device; "staging" for host staging, "process" for
            the growth of the process.
        held_nbytes: the most that the ledger held on each device and in "staging".
        measured_nbytes: peaks by other counters, above their values at the beginning:
            "process" is RssAnon + RssShmem (Linux), a device's name its framework's own count.
        counts: overflowed, flushed and rounded values of each tensor whose cast changed values.
        errors: the error of each tensor that was quantized.
        skipped: checkpoint names that were not loaded.
        missing: parameter names that were not loaded (``strict=False``).
        tied: names of parameters that share the tensor of another name.
        device_map: the devices of the model's modules, in the form of accelerate: the name of the
            largest modules on one device ("" for the whole model) to the device, a number for
            CUDA's.
        allocators: by device, the framework's own memory counters after the load
            ("max_memory_allocated", ...), which count the whole process, if it has any.
        notes: choices of the load, one sentence each.
        page_cache: the treatment of the page cache, and its reason; "" if none was used.
        dropped_nbytes: file bytes that were dropped from the page cache.
        nodes: of a load across nodes, each node's part, by rank.
        lost: of a load across nodes with ``on_loss="replan"``, the nodes without which it ended.
        recovery: of such a load, the `streamload.distributed.Recovery` for losses after it.
        state_dict: with ``model=None``, the tensors by name.
        files: size, time and identity of each of the checkpoint's files on this machine.
    """

    path: str
    plan: Plan
    read_nbytes: int
    resident_nbytes: int
    seconds: float
    stream_seconds: float
    transfer_seconds: float
    predicted_nbytes: Mapping[str, int]
    held_nbytes: Mapping[str, int]
    measured_nbytes: Mapping[str, int]
    counts: Mapping[str, CastCounts]
    errors: Mapping[str, QuantCounts] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    device_map: Mapping[str, str | int] = field(default_factory=dict)
    allocators: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    page_cache: str = ""
    dropped_nbytes: int = 0
    nodes: tuple[NodeReport, ...] = ()
    lost: tuple[str, ...] = ()
    recovery: Any = field(default=None, repr=False)
    state_dict: dict[str, Any] = field(default_factory=dict, repr=False)
    files: Mapping[str, FileState] = field(default_factory=dict, repr=False)

    @classmethod
    def of_plan(cls, path: str, plan: Plan) -> LoadReport:
        """Return the report of a load that has not begun."""
        predicted = {each.device: each.peak_nbytes for each in plan.devices}
        predicted |= {"process": plan.process_nbytes}
        return cls(path, plan, 0, 0, 0.0, 0.0, 0.0, predicted, {}, {}, {}, notes=plan.notes)

    def check_files(self) -> None:
        """Check that the checkpoint's files have not changed since they were loaded.

        Weights that are views on mapped files change with these.

        Raises:
            FileChangedError: a file was written or replaced.
            TruncatedFileError: a file is shorter.
            ShardNotFoundError: a file is gone.
        """
        for path, state in self.files.items():
            with open_regular(Path(path)) as file:
                state.check(FileState.of(file.fileno()), Path(path))

    @property
    def gigabytes_per_second(self) -> float:
        """File bytes over the time of the whole call, in GB/s (10^9)."""
        return self.read_nbytes / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def process_ratio(self) -> float | None:
        """Measured growth of the process over the predicted growth; None if either is unknown."""
        predicted = self.predicted_nbytes["process"]
        measured = self.measured_nbytes.get("process")
        return None if measured is None or not predicted else measured / predicted

    def to_json(self) -> str:
        """Return everything but the tensors as JSON; `Plan.from_json` reads the value of "plan"."""
        left_out = ("plan", "state_dict", "files", "recovery")
        names = [name for name in self.__slots__ if name not in left_out]
        data = {name: getattr(self, name) for name in names} | {
            "digest": self.plan.digest,
            "tensors": len(self.plan.placements),
            "mapped_nbytes": sum(d.mapped_nbytes for d in self.plan.devices),
            "gigabytes_per_second": self.gigabytes_per_second,
            "budget_nbytes": {d.device: d.budget_nbytes for d in self.plan.devices},
            "process_ratio": self.process_ratio,
            "reading": self.plan.reading,
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(data, default=_plain)

    def __str__(self) -> str:
        total = sum(self.counts.values(), CastCounts())
        rows = [
            ("checkpoint", self.path),
            ("tensors", f"{len(self.plan.placements)}" + _also(self)),
            (
                "read",
                f"{format_bytes(self.read_nbytes)} in {self.seconds:.2f} s, "
                + format_rate(self.read_nbytes, self.seconds),
            ),
        ]
        if "direct" in self.plan.readers:
            rows += [("read by", line) for line in self.plan.reading]
        if self.dropped_nbytes:
            said = f"{format_bytes(self.dropped_nbytes)} dropped; {self.page_cache}"
            rows.append(("page cache", said))
        for d in self.plan.devices:
            sizes = (d.resident_nbytes, d.peak_nbytes, self.held_nbytes[d.device], d.budget_nbytes)
            resident, peak, held, budget = map(format_bytes, sizes)
            said = f"{resident} resident; peak predicted {peak}, held {held}, budget {budget}"
            rows.append((d.device, said))
            if d.mapped_nbytes:
                mapped = format_bytes(d.mapped_nbytes)
                said = f"{mapped} stay in the files, which the kernel can drop"
                rows.append((f"{d.device} maps", said))
            if counters := self.allocators.get(d.device):
                said = ", ".join(f"{key} {format_bytes(n)}" for key, n in counters.items())
                rows.append((f"{d.device} counts", said))
        if self.plan.host_nbytes:
            rows.append(("staging", format_bytes(self.plan.host_nbytes)))
        if "process" in self.measured_nbytes:
            each = (self.measured_nbytes["process"], self.predicted_nbytes["process"])
            said = ", predicted ".join(map(format_bytes, each))
            ratio = self.process_ratio
            rows.append(("process grew by", said + ("" if ratio is None else f" ({ratio:.1%})")))
        if total.total:
            said = f"{total.overflowed} overflowed, {total.flushed} flushed to zero"
            rows.append(("cast", f"{said}, {total.rounded} rounded"))
        if self.errors:
            rows.append(("quantised", quantized_text(self.errors)))
        rows += [
            (
                f"node {node.node}",
                f"{node.tensors} tensors, read {format_bytes(node.read_nbytes)}, "
                f"{format_bytes(node.resident_nbytes)} resident, {node.seconds:.2f} s"
                + f"; a pass reads {format_bytes(node.pass_nbytes)}"
                * bool(node.pass_nbytes),
            )
            for node in self.nodes
        ]
        rows += [("note", note) for note in self.notes]
        width = max(len(key) for key, _ in rows)
        return printed(f"{key:<{width}}  {value}" for key, value in rows)

    __repr__ = __str__  # a prompt shows the table, not each tensor

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: the table, and the bars of the plan."""
        return as_html(str(self), PARTS, self.plan.bars)


def _plain(value: Any) -> dict[str, Any]:
    """Return a dict for JSON, from a mapping of another class or from a dataclass."""
    return dict(value) if isinstance(value, Mapping) else asdict(value)


def quantized_text(errors: Mapping[str, QuantCounts]) -> str:
    """Return one line for users: the error of all quantized tensors, and of the worst one."""
    whole = sum(errors.values(), QuantCounts())
    worst = max(errors, key=lambda name: errors[name].relative)
    said = (
        f"{len(errors)} tensors, error {whole.relative:.2%} of their values (root mean square); "
        f"most {errors[worst].relative:.2%} in {worst}"
    )
    strange = f"; {whole.nan} NaN became 0, {whole.inf} infinities the largest finite of their unit"
    return said + (strange if whole.nan or whole.inf else "")


def _also(report: LoadReport) -> str:
    found = {what: len(getattr(report, what)) for what in ("tied", "skipped", "missing")}
    also = [f"{count} {what}" for what, count in found.items() if count]
    return f" ({', '.join(also)})" if also else ""


def device_map(devices: Mapping[str, str], others: Iterable[str] = ()) -> dict[str, str | int]:
    """Return accelerate's ``device_map``: the largest modules on one device, with their devices.

    ``devices``: of each loaded tensor; ``others``: tensors that are not loaded. Modules are in the
    order of the tensors; CUDA devices are numbers. A tensor of a module on several devices is named
    itself.
    """
    places = {device: _accelerate_name(device) for device in devices.values()}
    if len(places) == 1:
        return {"": next(iter(places.values()))}
    placed: dict[str, str | int] = {}
    inside: dict[str, dict[str | int, None]] = {}  # by module: the places of its tensors, in order
    for name in dict.fromkeys((*devices, *others)) if devices else ():
        around = _modules_around(name)
        if name in devices:
            placed[name] = places[devices[name]]
        else:
            placed[name] = next(next(iter(inside[m])) for m in around if m in inside)
        for module in around:
            inside.setdefault(module, {})[placed[name]] = None
    out: dict[str, str | int] = {}
    for name, where in placed.items():
        whole = [m for m in _modules_around(name) if len(inside[m]) == 1]
        out[whole[-1] if whole else name] = where
    return out


def _modules_around(name: str) -> list[str]:
    """Return the names of the modules around a tensor, from the smallest to the model ("")."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _accelerate_name(device: str) -> str | int:
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index else device


def warn_of_overflow(
    path: object, counts: Mapping[str, CastCounts], out_of_range: OutOfRange
) -> None:
    """Warn of finite values that casts could not keep; the warning names the caller's line."""
    over = [name for name, count in counts.items() if count.overflowed]
    if over:
        became = "were clamped" if out_of_range == "clamp" else "became infinite"
        warnings.warn(
            printable(
                f"{path}: {sum(counts[n].overflowed for n in over)} finite values {became} "
                f"in {len(over)} tensors: {', '.join(over[:8])}{', ...' if len(over) > 8 else ''}"
            ),
            RuntimeWarning,
            stacklevel=callers_level(),
        )


@dataclass(frozen=True, slots=True)
class Clock:
    """A stopwatch for the report, which runs from its creation; and the process's memory then."""

    begun: float = field(default_factory=time.perf_counter)
    process_nbytes: int | None = field(default_factory=process_nbytes)

    def grown_nbytes(self, now_nbytes: int | None) -> int:
        """Return by how many bytes the process had grown when it had ``now_nbytes``; 0 if unknown.

        That is mostly what the compiler of kernels keeps.
        """
        if now_nbytes is None or self.process_nbytes is None:
            return 0
        return max(now_nbytes - self.process_nbytes, 0)

    @property
    def seconds(self) -> float:
        """Seconds of wall time since the creation."""
        return time.perf_counter() - self.begun


class Meter:
    """Peaks of memory counters of kernel and frameworks, above their values before a load."""

    def __init__(self, devices: Mapping[str, Device], process_nbytes: int | None = None) -> None:
        """Read the counters now; `process_nbytes` replaces the process's, if it was read before."""
        self._devices = devices
        self._begun = self._now()
        if process_nbytes is not None:
            self._begun["process"] = process_nbytes
        self._last = time.monotonic()
        self.peaks = dict.fromkeys(self._begun, 0)

    def _now(self) -> dict[str, int]:
        now = {name: device.allocated_nbytes() for name, device in self._devices.items()}
        now["process"] = process_nbytes()
        return {name: nbytes for name, nbytes in now.items() if nbytes is not None}

    def sample(self, *, at_once: bool = False) -> None:
        """Read the counters and update `peaks`, at most every 20 ms unless `at_once`."""
        now = time.monotonic()
        if now - self._last < _SAMPLE_EVERY_S and not at_once:
            return
        self._last = now
        for name, nbytes in self._now().items():
            self.peaks[name] = max(self.peaks.get(name, 0), nbytes - self._begun.get(name, 0))
