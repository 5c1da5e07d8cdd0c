"""The sections "gpu-...": a CUDA device, beside the other loaders and what the machine can do.

They run on any device, so that they can be tried without a GPU; what they are to reach is meant for
one H200 with 16 cores, and a bf16 checkpoint of 15 GB or more.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from make_checkpoint import Shape, make_checkpoint, many_of_size, shape_of_size

from bench_parts.sections import NotHereError, Section, Target
from streamload.bench.compare import Comparison, compare, refusal, resolve
from streamload.bench.compare import Options as Compared
from streamload.bench.loaders import LOADERS, OURS
from streamload.bench.processes import MeasurementError
from streamload.devices.probing import probe
from streamload.dtypes import parse_dtype
from streamload.errors import DeviceNotFoundError
from streamload.units import format_bytes

MIB = 2**20
FEW_CORES = 2
MANY_SHARDS = 100
LEAST_RUNS = 3  # of loaders that are far slower: their medians decide nothing
BUFFERED = "instanttensor"


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What the user asked for.

    Attributes:
        nbytes: size of the large checkpoints.
        cold_nbytes: size of those that are read from the disk, and of the variants.
        tensors: how many small tensors.
        shards: of the large checkpoint.
        runs: how many processes of each kind.
        seconds: of one comparison; it begins no further round then.
        torch_device: in torch's spelling.
        tinygrad_device: in tinygrad's.
        sites: for a loader, a folder that comes first on its import path.
        work: a folder for checkpoints.
        say: told what is being done.
        timeout_s: for each load.
        keep: leave all checkpoints where they are, for the next time.
    """

    nbytes: int
    cold_nbytes: int
    tensors: int
    shards: int
    runs: int
    seconds: float
    torch_device: str
    tinygrad_device: str
    sites: Mapping[str, str]
    work: Path
    say: Callable[[str], None]
    timeout_s: float = 120.0
    keep: bool = False

    def compared(self, path: Path, device: str, **more: Any) -> Compared:
        """What `streamload.bench.compare` is to do."""
        given = more.get("peers") or (more.get("peers") is None and tuple(LOADERS)) or ()
        framework, name = resolve(device)
        sites = {
            peer: folder
            for peer, folder in self.sites.items()
            if peer in given and LOADERS[peer].takes(framework, name)
        }
        options = Compared(
            path=str(path),
            device=device,
            runs=self.runs,
            seconds=self.seconds,
            timeout_s=self.timeout_s,
            again=2,
            least_runs=LEAST_RUNS,
            together=True,
            sites=sites,
            say=self.say,
        )
        return replace(options, **more)


@contextmanager
def _checkpoint(
    options: GpuOptions,
    name: str,
    shape: Shape,
    nbytes: int,
    *,
    keep: bool = False,
    **arguments: Any,
) -> Iterator[Path]:
    """A checkpoint, made once; removed afterwards unless more sections want it.

    Raises:
        NotHereError: there is no room for it.
    """
    out = options.work / f"{name}-{nbytes}"
    if not out.exists():  # complete, or not there
        free_nbytes = shutil.disk_usage(options.work).free
        if free_nbytes < nbytes + 2**28:
            raise NotHereError(f"{options.work} has {format_bytes(free_nbytes)} free")
        options.say(f"writing a checkpoint of {format_bytes(nbytes)}: {name}")
        make_checkpoint(out, shape, **arguments)
    try:
        yield out
    finally:
        if not (keep or options.keep):
            shutil.rmtree(out, ignore_errors=True)


@contextmanager
def _large(options: GpuOptions) -> Iterator[Path]:
    shape = shape_of_size(options.nbytes, parse_dtype("bfloat16"))
    with _checkpoint(
        options, "large", shape, options.nbytes, keep=True, shards=options.shards
    ) as path:
        yield path


@contextmanager
def _medium(options: GpuOptions, dtype: str = "bfloat16", shards: int = 0) -> Iterator[Path]:
    shape = shape_of_size(options.cold_nbytes, parse_dtype(dtype))
    shards = shards or options.shards
    plain = (dtype, shards) == ("bfloat16", options.shards)
    with _checkpoint(
        options,
        f"medium-{dtype}-{shards}",
        shape,
        options.cold_nbytes,
        keep=plain,
        dtype=dtype,
        shards=shards,
    ) as path:
        yield path


def _need(device: str) -> None:
    """Raise NotHereError where a device does not work."""
    try:
        framework, name = resolve(device)
        found = probe(framework, name)
    except DeviceNotFoundError as error:
        raise NotHereError(str(error)) from error
    if not found.works:
        raise NotHereError(f"{device}: {found.problem}")


def _add(section: Section, found: Comparison, what: str = "") -> None:
    """Everything that a comparison found."""
    section.raw.append({"what": what} | found.to_json())
    chart = "-".join(filter(None, (section.name, what.replace(" ", "-").replace(",", ""))))
    section.charts[chart] = found.svg()
    for name, of in found.loaders.items():
        for state, runs in of.runs.items():
            seconds = [run.seconds for run in runs]
            again_s = of.median_s(state, again=True)
            transfer = "stream_s" in runs[0].says and found.transfer(state, name)
            section.rows.append(
                {
                    "what": what,
                    "loader": f"{name} {next(iter(of.versions.values()), '')}".strip(),
                    "cache": state,
                    "runs": len(runs),
                    "seconds": round(median(seconds), 3),
                    "from": round(min(seconds), 3),
                    "to": round(max(seconds), 3),
                    "GB/s": _round(found.rate(name, state)),
                    "transfer": _round(transfer or None),
                    "again_s": None if again_s is None else round(again_s, 3),
                    "streamload is": _round(found.times(name, state)),
                    "host": format_bytes(max(run.memory.anon_nbytes for run in runs)),
                    "pinned": _most([run.pinned_nbytes for run in runs]),
                    "machine": format_bytes(max(0, *(r.memory.system_nbytes for r in runs))),
                    "device": _most([run.memory.device_nbytes for run in runs]),
                    "checked": of.checked,
                }
            )
    for key, limit in found.limits.items():
        section.rows.append(
            {
                "what": what,
                "loader": f"limit: {limit.how}",
                "cache": key,
                "runs": len(limit.rates),
                "GB/s": _round(limit.median),
            }
        )
    for name, why in found.skipped.items():
        section.rows.append({"what": what, "loader": name, "cache": f"not compared: {why}"})
    for note in found.notes:
        section.rows.append({"what": what, "loader": "note", "cache": note})


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _most(sizes: Sequence[int | None]) -> str | None:
    known = [n for n in sizes if n is not None]
    return format_bytes(max(known)) if known else None


def _pinned(found: Comparison, state: str = "warm") -> float:
    """The most that streamload had pinned, in bytes."""
    of = found.loaders.get(OURS)
    runs = of.runs.get(state, ()) if of else ()
    return max((run.pinned_nbytes or 0 for run in runs), default=0)


def _peers(
    section: Section,
    found: Comparison,
    wanted: Mapping[str, float],
    others: float,
    state: str = "warm",
) -> None:
    """A target for each peer that was compared."""
    for name in found.loaders:
        times = found.times(name, state)
        if name != OURS and times is not None:
            at_least = wanted.get(name, others)
            section.targets.append(Target(f"{state}: times {name}", times, at_least=at_least))


def _arrived(section: Section, found: Comparison, what: str) -> None:
    """Tensors were compared with the files, bit for bit."""
    for name, of in found.loaders.items():
        if name.startswith(OURS):
            section.targets.append(
                Target(f"{what}: tensors equal to the file's", of.checked or 0, at_least=1)
            )
    if OURS in found.skipped:
        section.targets.append(Target(f"{what}: loads", 0, at_least=1))


# --- 1: warm --------------------------------------------------------------------------------------


def warm(options: GpuOptions) -> Section:
    """The transfer against the slowest wire, the whole call against every peer."""
    _need(options.torch_device)
    section = Section(
        "gpu-warm",
        "the file in the page cache, all cores; transfer: streamload's reading and copying alone, "
        "in GB/s; host, machine, device: growth during the load, of the process's anonymous "
        "memory, of the machine's, of the device's",
    )
    with _large(options) as path:
        found = compare(options.compared(path, options.torch_device))
    _add(section, found)
    section.targets.append(
        Target("transfer, share of the slowest wire", found.share("warm") or 0, at_least=0.9)
    )
    section.targets.append(Target("pinned bytes", _pinned(found), at_most=64 * MIB))
    _peers(section, found, {BUFFERED: 1.15}, 2.0)
    _arrived(section, found, "warm")
    return section


def cores(options: GpuOptions) -> Section:
    """The same on two cores: no staging, and ahead of everybody."""
    _need(options.torch_device)
    section = Section("gpu-cores", f"the file in the page cache, {FEW_CORES} cores")
    with _large(options) as path:
        found = compare(
            options.compared(path, options.torch_device, cores=FEW_CORES, again=0, least_runs=2)
        )
    _add(section, found)
    _peers(section, found, {"safetensors": 3.0}, 1.0)
    section.targets.append(Target("pinned bytes", _pinned(found), at_most=0))
    _arrived(section, found, "two cores")
    return section


# --- 2: cold --------------------------------------------------------------------------------------


def cold(options: GpuOptions) -> Section:
    """Against a plain O_DIRECT reader."""
    _need(options.torch_device)
    section = Section("gpu-cold", "the file dropped from the page cache before each load")
    framework, name = resolve(options.torch_device)
    wanted = ("safetensors", "instanttensor-direct")
    peers = tuple(peer for peer in wanted if LOADERS[peer].takes(framework, name))
    with _medium(options) as path:
        found = compare(options.compared(path, options.torch_device, states=("cold",), peers=peers))
    _add(section, found)
    section.targets.append(
        Target("transfer, share of an O_DIRECT reader", found.share("cold") or 0, at_least=0.95)
    )
    _peers(section, found, {}, 1.0, "cold")
    _arrived(section, found, "cold")
    return section


# --- 3: tinygrad ----------------------------------------------------------------------------------


def tinygrad(options: GpuOptions) -> Section:
    """Against tinygrad's own load."""
    _need(options.tinygrad_device)
    section = Section("gpu-tinygrad", "tinygrad, its own loader beside streamload; page cache")
    with _large(options) as path:
        found = compare(
            options.compared(
                path, options.tinygrad_device, peers=("tinygrad",), again=1, limits=False
            )
        )
    _add(section, found)
    section.targets.append(
        Target("times tinygrad", found.times("tinygrad", "warm") or 0, at_least=20)
    )
    of = found.loaders.get(OURS)
    grown = max((run.memory.anon_nbytes for run in of.runs["warm"]), default=0) if of else 0
    section.targets.append(Target("growth of host memory, bytes", grown, at_most=100e6))
    _arrived(section, found, "tinygrad")
    return section


# --- 4: casts -------------------------------------------------------------------------------------


def casts(options: GpuOptions) -> Section:
    """On the way to another dtype: what it costs, and what the device holds at most."""
    _need(options.torch_device)
    section = Section("gpu-cast", "bf16 as it is, and to fp16; in turn; page cache, all cores")
    narrow = "streamload float16"
    with _large(options) as path:
        found = compare(
            options.compared(
                path,
                options.torch_device,
                peers=(),
                limits=False,
                least_runs=None,
                variants={narrow: {"dtype": "float16"}},
            )
        )
    _add(section, found)
    raw, cast = (found.loaders.get(name) for name in (OURS, narrow))
    if raw is None or cast is None:
        section.targets.append(Target("both load", 0, at_least=1))
        return section
    seconds = [of.median_s("warm") or 0 for of in (raw, cast)]
    section.targets.append(Target("fp16 over raw, seconds", seconds[1] / seconds[0], at_most=1.1))
    streams = [median(run.says["stream_s"] for run in of.runs["warm"]) for of in (raw, cast)]
    section.targets.append(
        Target("fp16 over raw, seconds of the transfer", streams[1] / streams[0], at_most=1.1)
    )
    for of in (raw, cast):
        peaks = [
            run.memory.device_nbytes / run.says["resident_nbytes"]
            for run in of.runs["warm"]
            if run.memory.device_nbytes is not None
        ]
        planned = [r.says["held_nbytes"] / r.says["resident_nbytes"] for r in of.runs["warm"]]
        for what, shares in (("the driver", peaks), ("the ledger", planned)):
            if shares:
                section.targets.append(
                    Target(
                        f"{of.name}: peak of the device over weights, by {what}",
                        max(shares),
                        at_most=1.01,
                    )
                )
    return section


# --- 5: budgets, many tensors, many files, other dtypes -------------------------------------------


def budget(options: GpuOptions) -> Section:
    """Exactly what is predicted is enough; a MiB less is refused."""
    section = Section("gpu-budget", "a budget of exactly the plan's peak, and of one MiB less")
    with _medium(options) as path:
        for device in (options.torch_device, options.tinygrad_device):
            _need(device)
            for dtype in ("checkpoint", "float16", "float32"):
                what = f"{device}, {dtype}"
                options.say(f"gpu-budget: {what}")
                try:
                    said = refusal(options.compared(path, device, dtype=dtype))
                except MeasurementError as error:
                    section.rows.append({"what": what, "refusal": str(error)})
                    section.targets.append(Target(f"{what}: exactly enough loads", 0, at_least=1))
                    continue
                section.raw.append({"what": what} | said)
                scratch = said["exact_nbytes"] - said["weights_nbytes"]
                section.rows.append(
                    {
                        "what": what,
                        "weights": format_bytes(said["weights_nbytes"]),
                        "beside them": format_bytes(scratch),
                        "held": format_bytes(said["held_nbytes"]),
                        "refusal": said["refusal"][:160],
                    }
                )
                unchanged = said["allocated_before"] == said["allocated_after_refusal"]
                section.targets += [
                    Target(f"{what}: exactly enough loads", said["loaded"], at_least=1),
                    Target(f"{what}: a MiB less is refused", float(said["refused"]), at_least=1),
                    Target(f"{what}: nothing was allocated then", float(unchanged), at_least=1),
                ]
    return section


def _rates(
    options: GpuOptions, section: Section, device: str, paths: Mapping[str, Path]
) -> dict[str, Comparison]:
    """Streamload's loads of several checkpoints to one device, in turn."""
    found: dict[str, Comparison] = {}
    until = time.monotonic() + options.seconds
    for number in range(options.runs):
        if number and time.monotonic() > until:
            break
        for what, path in paths.items():
            one = compare(
                options.compared(
                    path,
                    device,
                    runs=1,
                    peers=(),
                    limits=False,
                    again=int(number == 0),
                )
            )
            if what not in found:
                found[what] = one
            elif OURS in one.loaders and OURS in found[what].loaders:
                found[what].loaders[OURS].runs["warm"] += one.loaders[OURS].runs["warm"]
            found[what].skipped |= one.skipped
    for what, one in found.items():
        _add(section, one, f"{what}, {device}")
        _arrived(section, one, f"{what}, {device}")
    return found


def _ratio(
    section: Section,
    found: Mapping[str, Comparison],
    what: str,
    device: str,
    at_least: float | None,
) -> None:
    """Targets for a checkpoint's rates over those of the plain one."""
    plain, other = found["plain"], found[what]
    rates = [one.rate(OURS, "warm") for one in (other, plain)]
    streams = [one.transfer("warm") for one in (other, plain)]
    for name, (mine, theirs) in (("whole call", rates), ("transfer", streams)):
        if mine and theirs:
            section.targets.append(
                Target(f"{what}, {device}: {name}, share of plain", mine / theirs, at_least)
            )


def small(options: GpuOptions) -> Section:
    """Many small tensors, to torch and to tinygrad."""
    _need(options.torch_device)
    section = Section(
        "gpu-small",
        f"{options.tensors} tensors of one size beside a Llama of the same bytes; tinygrad makes a "
        "tensor in 0.1 ms, so its share is only told",
    )
    shape = many_of_size(options.nbytes, parse_dtype("bfloat16"), options.tensors)
    with (
        _large(options) as plain,
        _checkpoint(options, "small", shape, options.nbytes) as many,
    ):
        paths = {"plain": plain, "small": many}
        for device, at_least in ((options.torch_device, 0.6), (options.tinygrad_device, None)):
            if device == options.tinygrad_device:
                try:
                    _need(device)
                except NotHereError as error:
                    section.rows.append({"what": f"not here: {error}"})
                    continue
            found = _rates(options, section, device, paths)
            _ratio(section, found, "small", device, at_least)
            one = found["small"].loaders.get(OURS)
            if one is not None:
                seconds = one.median_s("warm") or 0
                section.rows.append(
                    {
                        "what": f"small, {device}",
                        "loader": f"{OURS}, whole call",
                        "us a tensor": _round(seconds / options.tensors * 1e6),
                    }
                )
    return section


def files(options: GpuOptions) -> Section:
    """A hundred shards, 8-bit and 16-bit files."""
    _need(options.torch_device)
    section = Section(
        "gpu-files", f"{MANY_SHARDS} shards, fp8, fp16, beside bf16 in {options.shards} shards"
    )
    with (
        _medium(options) as plain,
        _medium(options, shards=MANY_SHARDS) as many,
        _medium(options, "float8_e4m3fn") as eight,
        _medium(options, "float16") as half,
    ):
        paths = {"plain": plain, f"{MANY_SHARDS} shards": many, "fp8": eight, "fp16": half}
        found = _rates(options, section, options.torch_device, paths)
    for what in paths:
        if what != "plain":
            _ratio(section, found, what, options.torch_device, 0.6)
    return section


GPU_SECTIONS: dict[str, Callable[[GpuOptions], Section]] = {
    "gpu-warm": warm,
    "gpu-cores": cores,
    "gpu-cold": cold,
    "gpu-tinygrad": tinygrad,
    "gpu-cast": casts,
    "gpu-budget": budget,
    "gpu-small": small,
    "gpu-files": files,
}
