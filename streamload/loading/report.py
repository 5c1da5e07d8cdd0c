"""What a load did, in numbers: predicted, held, and measured by counters that are not ours."""

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
from streamload.core.units import format_bytes
from streamload.devices.base import Device
from streamload.errors import printable, printed
from streamload.files.guard import FileState
from streamload.files.header import open_regular
from streamload.planning.plan import PARTS, Plan
from streamload.streaming.memory_watch import process_nbytes

_SAMPLE_EVERY_S = 0.02  # reading /proc takes tens of microseconds


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node of a load across nodes did.

    Attributes:
        node: its id.
        rank: its rank.
        tensors: how many parameters it loaded.
        read_nbytes: file bytes that it read.
        resident_nbytes: bytes of parameters on its device.
        seconds: wall time of its load.
        pass_nbytes: bytes that a pass reads there, where it offloads its part.
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
    """What a load did. Prints as a short table.

    Attributes:
        path: the checkpoint.
        plan: what was planned.
        read_nbytes: file bytes read.
        resident_nbytes: bytes of parameters on all devices, as the allocators round.
        seconds: wall time of the whole call.
        stream_seconds: wall time of reading, casting and placing alone.
        transfer_seconds: of that, from the first read on until the last byte was in place: without
            staging and first parameters, which are allocated before, and without their release.
        predicted_nbytes: the plan's peak on each device, "staging" for host staging, "process" by
            how much the process was to grow.
        held_nbytes: the most that the ledger held there.
        measured_nbytes: peaks by other counters, above what was there at the beginning:
            "process" is RssAnon + RssShmem (Linux), a device's name its framework's own count.
        counts: of each tensor whose cast changed a value.
        errors: of each tensor that was quantised, how far its codes are from it.
        skipped: checkpoint names that were not loaded.
        missing: parameter names that were not loaded (``strict=False``).
        tied: parameter names that share another's tensor.
        device_map: where the parts of the model are, in the form of accelerate: the name of the
            largest modules that are in one place ("" for the whole model) to the device, a number
            for CUDA's.
        allocators: of each device whose framework has counters of its own, those after the load
            ("max_memory_allocated", ...): they count all that the process did.
        notes: choices that the load made, one sentence each.
        page_cache: what became of the page cache, and why; "" where none was used.
        dropped_nbytes: file bytes that were dropped from it.
        nodes: of a load across nodes, what each did, by rank.
        state_dict: with ``model=None``, the tensors by name.
        files: the files of the checkpoint that are on this machine, and what each was.
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
    state_dict: dict[str, Any] = field(default_factory=dict, repr=False)
    files: Mapping[str, FileState] = field(default_factory=dict, repr=False)

    def check_files(self) -> None:
        """See that the checkpoint's files are what they were when they were loaded.

        Weights that are views on mapped files change with these.

        Raises:
            FileChangedError: one was written, or is another file.
            TruncatedFileError: one is shorter.
            ShardNotFoundError: one is gone.
        """
        for path, state in self.files.items():
            with open_regular(Path(path)) as file:
                state.check(FileState.of(file.fileno()), Path(path))

    @property
    def gigabytes_per_second(self) -> float:
        """File bytes over the time of the whole call, in GB/s."""
        return self.read_nbytes / 1e9 / self.seconds if self.seconds else 0.0

    @property
    def process_ratio(self) -> float | None:
        """What the process grew by over what was predicted; None without either."""
        predicted = self.predicted_nbytes["process"]
        measured = self.measured_nbytes.get("process")
        return None if measured is None or not predicted else measured / predicted

    def to_json(self) -> str:
        """Write everything but the tensors as JSON; "plan" is what `Plan.from_json` reads."""
        names = [name for name in self.__slots__ if name not in ("plan", "state_dict", "files")]
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
                f"{self.gigabytes_per_second:.2f} GB/s",
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
            counters = self.allocators.get(d.device)
            if counters:
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
        """What a notebook shows: the table, and the bars of the plan."""
        return as_html(str(self), PARTS, self.plan.bars)


def _plain(value: Any) -> dict[str, Any]:
    """What JSON has in place of counts, or of a mapping that is no dict."""
    return dict(value) if isinstance(value, Mapping) else asdict(value)


def quantized_text(errors: Mapping[str, QuantCounts]) -> str:
    """The error of all that was quantised, and of what lost most."""
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
    """The largest modules that are in one place, in the form of accelerate's ``device_map``.

    Returns:
        Module names to devices, in the order of the tensors; a number for one of CUDA. A tensor
        of a module that is in several places is named itself.
    """
    places = {device: _accelerate_name(device) for device in devices.values()}
    if len(places) == 1:
        return {"": next(iter(places.values()))}
    placed = {name: places[device] for name, device in devices.items()}
    first: dict[str, str | int] = {}  # by module: where its first tensor is
    for name, device in placed.items():
        for module in _modules_around(name):
            first.setdefault(module, device)
    for name in others:
        if name not in placed and first:
            placed[name] = next(first[m] for m in _modules_around(name) if m in first)
    inside: dict[str, set[str | int]] = {}
    for name, where in placed.items():
        for module in _modules_around(name):
            inside.setdefault(module, set()).add(where)
    out: dict[str, str | int] = {}
    for name, where in placed.items():
        whole = [m for m in _modules_around(name) if len(inside[m]) == 1]
        out[whole[-1] if whole else name] = where
    return out


def _modules_around(name: str) -> list[str]:
    """The modules that a tensor is in, from the smallest to the whole model ("")."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _accelerate_name(device: str) -> str | int:
    kind, _, index = device.partition(":")
    return int(index) if kind == "cuda" and index else device


def warn_of_overflow(
    path: object, counts: Mapping[str, CastCounts], out_of_range: OutOfRange
) -> None:
    """Warn of finite values that a cast could not keep, in the line that called streamload."""
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


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Wall time since then."""
        return time.perf_counter() - self._begun


class Meter:
    """Peaks by counters that are not ours, above their values at the beginning."""

    def __init__(self, devices: Mapping[str, Device], process_nbytes: int | None = None) -> None:
        """Begin now."""
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
        """Read the counters, unless they were read a moment ago."""
        now = time.monotonic()
        if now - self._last < _SAMPLE_EVERY_S and not at_once:
            return
        self._last = now
        for name, nbytes in self._now().items():
            self.peaks[name] = max(self.peaks.get(name, 0), nbytes - self._begun.get(name, 0))
