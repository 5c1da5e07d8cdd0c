"""The sections "gpu-...": a CUDA device, beside the other loaders and what the machine can do.

They run on any device, so that they can be tried without a GPU; their targets are meant for one
H200 with 16 cores, and a bf16 checkpoint of 15 GB or more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from make_checkpoint import many_of_size, shape_of_size

from bench_parts.compared import TIMEOUT_S, add, compared, need, peer_targets, runs_of
from bench_parts.section import NotHereError, Options, Section, checkpoint, measure
from streamload.bench.compare import resolve
from streamload.bench.loaders import LOADERS, OURS
from streamload.bench.processes import MeasurementError, call
from streamload.bench.results import Comparison
from streamload.core.dtypes import parse_dtype
from streamload.core.units import format_bytes

MIB = 2**20
FEW_CORES = 2
MANY_SHARDS = 100
LEAST_RUNS = 3  # of loaders that are far slower: their medians decide nothing
BUFFERED = "instanttensor"
REFUSAL = "bench_parts.jobs:refusal"


def _compared(options: Options, path: Path, device: str, **more: Any) -> Comparison:
    return compared(
        options, path, device, **{"again": 2, "least_runs": LEAST_RUNS, "together": True, **more}
    )


# --- checkpoints ----------------------------------------------------------------------------------


def _checkpoint(
    options: Options, name: str, nbytes: int, *, keep: bool = False, **more: Any
) -> AbstractContextManager[Path]:
    """A checkpoint that is made once; removed afterwards unless more sections want it."""
    keep |= options.keep is not None
    return checkpoint(options, nbytes, folder=options.keep, name=name, keep=keep, **more)


def _large(options: Options) -> AbstractContextManager[Path]:
    return _checkpoint(options, "large", options.nbytes, keep=True, shards=options.shards)


def _medium(
    options: Options, dtype: str = "bfloat16", shards: int = 0
) -> AbstractContextManager[Path]:
    nbytes, shards = options.cold_nbytes, shards or options.shards
    shape = shape_of_size(nbytes, parse_dtype(dtype))
    plain = (dtype, shards) == ("bfloat16", options.shards)
    name, more = f"medium-{dtype}-{shards}", {"dtype": dtype, "shards": shards}
    return _checkpoint(options, name, nbytes, keep=plain, shape=shape, **more)


def _pinned(section: Section, found: Comparison, at_most: int) -> None:
    pinned = max((run.pinned_nbytes or 0 for run in runs_of(found)), default=0)
    section.target("pinned bytes", pinned, at_most=at_most)


# --- one comparison each --------------------------------------------------------------------------


def _compare(
    section: Section,
    options: Options,
    device: str,
    made: Callable[[Options], AbstractContextManager[Path]],
    arrived: str = "",
    **more: Any,
) -> Comparison:
    """Add one comparison of a checkpoint and a device to a section; ``more`` is its `Compared`."""
    need(device)
    with made(options) as path:
        found = _compared(options, path, device, **more)
    add(section, found, arrived=arrived)
    return found


def warm(options: Options) -> Section:
    """The transfer against the slowest wire, the whole call against every peer."""
    section = Section(
        "gpu-warm",
        "the file in the page cache, all cores; transfer: streamload's reading and copying alone, "
        "in GB/s; host, machine, device: growth during the load, of the process's anonymous "
        "memory, of the machine's, of the device's",
    )
    found = _compare(section, options, options.torch_device, _large, "warm")
    share = found.share("warm") or 0
    section.target("transfer, share of the slowest wire", share, at_least=0.9)
    _pinned(section, found, 64 * MIB)
    peer_targets(section, found, "", {BUFFERED: 1.15}, 2.0)
    return section


def cores(options: Options) -> Section:
    """The same on two cores: no staging, and ahead of everybody."""
    section = Section("gpu-cores", f"the file in the page cache, {FEW_CORES} cores")
    more = {"cores": FEW_CORES, "again": 0, "least_runs": 2}
    found = _compare(section, options, options.torch_device, _large, "two cores", **more)
    peer_targets(section, found, "", {"safetensors": 3.0}, 1.0)
    _pinned(section, found, 0)
    return section


def cold(options: Options) -> Section:
    """Against a plain O_DIRECT reader."""
    section = Section("gpu-cold", "the file dropped from the page cache before each load")
    device = options.torch_device
    need(device)
    wanted = ("safetensors", "instanttensor-direct")
    peers = tuple(peer for peer in wanted if LOADERS[peer].takes(*resolve(device)))
    found = _compare(section, options, device, _medium, "cold", states=("cold",), peers=peers)
    share = found.share("cold") or 0
    section.target("transfer, share of an O_DIRECT reader", share, at_least=0.95)
    peer_targets(section, found, "", {}, 1.0)
    return section


def tinygrad(options: Options) -> Section:
    """Against tinygrad's own load."""
    section = Section("gpu-tinygrad", "tinygrad, its own loader beside streamload; page cache")
    more: dict[str, Any] = {"peers": ("tinygrad",), "again": 1, "limits": False}
    found = _compare(section, options, options.tinygrad_device, _large, "tinygrad", **more)
    section.target("times tinygrad", found.times("tinygrad", "warm") or 0, at_least=20)
    grown = max((run.memory.anon_nbytes for run in runs_of(found)), default=0)
    section.target("growth of host memory, bytes", grown, at_most=100e6)
    return section


def casts(options: Options) -> Section:
    """On the way to another dtype: what it costs, and what the device holds at most."""
    section = Section("gpu-cast", "bf16 as it is, and to fp16; in turn; page cache, all cores")
    narrow = "streamload float16"
    more: dict[str, Any] = {"peers": (), "limits": False, "least_runs": None}
    more["variants"] = {narrow: {"dtype": "float16"}}
    found = _compare(section, options, options.torch_device, _large, **more)
    runs = {name: runs_of(found, name) for name in (OURS, narrow)}
    if not all(runs.values()):
        section.target("both load", 0, at_least=1)
        return section
    for what, seconds in (
        ("fp16 over raw, seconds", lambda run: run.seconds),
        ("fp16 over raw, seconds of the transfer", lambda run: run.says["stream_s"]),
    ):
        raw, cast = (median(map(seconds, of)) for of in runs.values())
        section.target(what, cast / raw, at_most=1.1)
    for name, of in runs.items():
        for who, peaks in (
            ("the driver", [run.memory.device_nbytes for run in of]),
            ("the ledger", [run.says["held_nbytes"] for run in of]),
        ):
            both = zip(peaks, of, strict=True)
            shares = [n / run.says["resident_nbytes"] for n, run in both if n is not None]
            if shares:
                what = f"{name}: peak of the device over weights, by {who}"
                section.target(what, max(shares), at_most=1.01)
    return section


# --- budgets, many tensors, many files, other dtypes -------------------------------------------


def budget(options: Options) -> Section:
    """Exactly what is predicted is enough; a MiB less is refused."""
    section = Section("gpu-budget", "a budget of exactly the plan's peak, and of one MiB less")
    with _medium(options) as path:
        for device in (options.torch_device, options.tinygrad_device):
            need(device)
            for dtype in ("checkpoint", "float16", "float32"):
                what = f"{device}, {dtype}"
                options.say(f"gpu-budget: {what}")
                try:
                    job = call(REFUSAL, path=str(path), device=device, dtype=dtype)
                    said = measure(job, timeout_s=TIMEOUT_S).first
                except MeasurementError as error:
                    section.rows.append({"what": what, "refusal": str(error)})
                    section.target(f"{what}: exactly enough loads", 0, at_least=1)
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
                unchanged = float(said["allocated_before"] == said["allocated_after_refusal"])
                refused = float(said["refused"])
                section.target(f"{what}: exactly enough loads", said["loaded"], at_least=1)
                section.target(f"{what}: a MiB less is refused", refused, at_least=1)
                section.target(f"{what}: nothing was allocated then", unchanged, at_least=1)
    return section


def _against_plain(
    options: Options,
    section: Section,
    device: str,
    paths: Mapping[str, Path],
    at_least: float | None,
) -> dict[str, Comparison]:
    """Streamload's loads of several checkpoints to one device, in turn.

    Targets are the rates of each over those of the one named "plain".
    """
    found: dict[str, Comparison] = {}
    until = time.monotonic() + options.seconds
    for number in range(options.runs):
        if number and time.monotonic() > until:
            break
        more: dict[str, Any] = {"runs": 1, "peers": (), "limits": False, "again": int(number == 0)}
        for what, path in paths.items():
            one = _compared(options, path, device, **more)
            first = found.setdefault(what, one)
            if first is not one and runs_of(one) and runs_of(first):
                runs_of(first).extend(runs_of(one))
            first.skipped |= one.skipped
    for what, one in found.items():
        add(section, one, f"{what}, {device}", arrived=f"{what}, {device}")
    plain = found["plain"]
    for what, one in found.items():
        for name, mine, theirs in (
            ("whole call", one.rate(OURS, "warm"), plain.rate(OURS, "warm")),
            ("transfer", one.transfer("warm"), plain.transfer("warm")),
        ):
            if what != "plain" and mine and theirs:
                target = f"{what}, {device}: {name}, share of plain"
                section.target(target, mine / theirs, at_least)
    return found


def small(options: Options) -> Section:
    """Many small tensors, to torch and to tinygrad."""
    need(options.torch_device)
    section = Section(
        "gpu-small",
        f"{options.tensors} tensors of one size beside a Llama of the same bytes; tinygrad makes a "
        "tensor in 0.1 ms, so its share is only told",
    )
    shape = many_of_size(options.nbytes, parse_dtype("bfloat16"), options.tensors)
    with (
        _large(options) as plain,
        _checkpoint(options, "small", options.nbytes, shape=shape) as many,
    ):
        paths = {"plain": plain, "small": many}
        for device, at_least in ((options.torch_device, 0.6), (options.tinygrad_device, None)):
            try:
                need(device)
            except NotHereError as error:
                section.rows.append({"what": f"not here: {error}"})
                continue
            found = _against_plain(options, section, device, paths, at_least)
            seconds = [run.seconds for run in runs_of(found["small"])]
            if seconds:
                section.rows.append(
                    {
                        "what": f"small, {device}",
                        "loader": f"{OURS}, whole call",
                        "us a tensor": float(f"{median(seconds) / options.tensors * 1e6:.3g}"),
                    }
                )
    return section


def files(options: Options) -> Section:
    """A hundred shards, 8-bit and 16-bit files."""
    need(options.torch_device)
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
        _against_plain(options, section, options.torch_device, paths, 0.6)
    return section


GPU_SECTIONS: dict[str, Callable[[Options], Section]] = {
    "gpu-warm": warm,
    "gpu-cores": cores,
    "gpu-cold": cold,
    "gpu-tinygrad": tinygrad,
    "gpu-cast": casts,
    "gpu-budget": budget,
    "gpu-small": small,
    "gpu-files": files,
}
