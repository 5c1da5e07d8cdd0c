"""The section "nodes": hosts in network namespaces, storage behind a link, ranks in boxes."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from cluster_parts.hosts import Cluster, NoClusterError
from cluster_parts.running import Running
from make_checkpoint import PRESETS

from bench_parts.section import NotHereError, Options, Section, checkpoint, files_nbytes, forget
from streamload.bench.processes import call, command
from streamload.core.memory import available_host_nbytes
from streamload.core.units import format_bytes

HOSTS = (4, 14)
LINK_NBYTES = 1_000_000_000
#: Hosts, their link, its bits per second, and most bytes of the model.
LINKS = (
    (4, "1gbit", 1e9, LINK_NBYTES),
    (14, "1gbit", 1e9, LINK_NBYTES),
    # a link that two cores, which are all hosts, keep up with
    (14, "100mbit", 1e8, LINK_NBYTES // 4),
)
#: Of a load over the time that the link takes for the model's bytes.
MOST_OVER_LINK = 1.25
SHARED = ("layers", "replicate")
OTHERS = ("every rank reads all", "rank 0 broadcasts")
#: The bytes of a replicated load through the engine's collective: not read, not kept.
EXCHANGE = "exchange alone"
LAUNCHERS = {"torch": "env", "mpi": "mpirun"}

# the headline: Llama-3-8B in full
PRESET_NBYTES = 16_060_522_496


class Headline(NamedTuple):
    """How a model is split that is larger than any of the boxes."""

    split: str
    launcher: str
    ranks: int
    budget: int  # of a rank
    # of a rank: with the interpreter, torch or tinygrad, LLVM, and windows of mapped files
    box_nbytes: int


#: Layers are cast; slices are read as they are, by ranks of MPI.
HEADLINES = (
    Headline("layers", "env", 6, 3_000_000_000, 3_500_000_000),
    Headline("2x4", "mpirun", 8, 2_200_000_000, 2_500_000_000),
    Headline("tensor", "mpirun", 8, 2_200_000_000, 2_500_000_000),
)
#: Ranks of transformers' tensor parallelism, each with its budget and a model of so many bytes.
SHARDS = (4, 1_000_000_000, 2_200_095_744)


def nodes(options: Options) -> Section:
    """What an engine takes, what a link allows, and a model larger than any of its boxes."""
    section = Section(
        "nodes",
        "hosts in network namespaces; storage is a range server behind a link, and so is each "
        "host; all share this machine's processors; seconds are of the slowest rank, from when all "
        "are ready, with the device open; medians; where a link is measured nothing is cast or "
        "read back (14 hosts would compile 14 times and read back 3.6 GB on these processors); "
        "processes take turns",
    )
    try:
        Cluster(1).close()
    except (NoClusterError, OSError) as error:
        raise NotHereError(str(error)) from error
    _engines(options, section)
    _links(options, section)
    for headline in HEADLINES:
        _headline(options, section, headline)
    _shards(options, section)
    return section


def _run(
    hosts: Cluster, launcher: str, timeout_s: float = 600.0, jobs: str = "nodes_jobs", **asked: Any
) -> list[dict[str, Any]]:
    """Run a job of ``bench_parts.nodes_jobs``, or others, on all hosts; what each rank said."""
    job = call(f"bench_parts.{jobs}:rank", begun=time.time(), **asked)
    ended = Running(hosts, launcher, command(job, at_once=True)).wait(timeout_s)
    said: list[dict[str, Any]] = []
    for one in ended:
        if one.returncode:
            lines = one.stderr.strip().splitlines() or ["it said nothing"]
            raise RuntimeError(f"host {one.host}: exit {one.returncode}: {lines[-1]}")
        said += filter(None, _objects(one.stdout))  # a rank that is ready says {}
    return said


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text: mpirun may put what two ranks said into one line."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        found, stop = decoder.raw_decode(text, at)
        yield found
        at = text.find("{", stop)


def _engines(options: Options, section: Section) -> None:
    """Memory and time until all ranks are ready, of each engine that is installed."""
    for engine, launcher in LAUNCHERS.items():
        if importlib.util.find_spec("torch" if engine == "torch" else "mpi4py") is None:
            continue
        for count in HOSTS:
            options.say(f"nodes: engine {engine}, {count} hosts")
            with Cluster(count) as hosts:
                said = _run(hosts, launcher, way="nothing")
            section.rows.append(
                {
                    "what": f"engine {said[0]['engine']} by {launcher}",
                    "hosts": count,
                    "ready_s": round(max(one["ready_s"] for one in said), 1),
                    "memory of a rank": format_bytes(int(median(o["ready_nbytes"] for o in said))),
                }
            )


def _links(options: Options, section: Section) -> None:
    """Loads from storage behind links."""
    for count, link, bits_per_s, most_nbytes in LINKS:
        nbytes = min(options.nbytes, most_nbytes)
        found: dict[str, list[tuple[float, int]]]
        found = {way: [] for way in (*SHARED, EXCHANGE, *OTHERS)}
        asked = {
            "budget": nbytes + 64_000_000,
            "timeout": 120.0,
            "device": "CL" if "CL" in options.devices else "host",
            "dtype": "checkpoint",
            "verify": "none",
        }
        with (
            checkpoint(options, nbytes, shards=4) as path,
            Cluster(count, link=link, storage=path) as hosts,
        ):
            model_nbytes = files_nbytes(path)
            turns = [(n, way) for n in range(options.runs) for way in found]
            for number, way in turns:
                if way in OTHERS and number:  # they take long, and are here to be seen once
                    continue
                options.say(f"nodes: {count} hosts, {link}, run {number + 1}, {way}")
                before = hosts.served().nbytes
                wants = {"nbytes": model_nbytes} if way == EXCHANGE else asked
                said = _run(hosts, "env", way=way, path=hosts.storage_url, **wants)
                served = hosts.served().nbytes - before
                found[way].append((max(one["seconds"] for one in said), served))
        least_s = model_nbytes * 8 / bits_per_s
        for way, runs in found.items():
            seconds = median(s for s, _ in runs)
            section.rows.append(
                {
                    "what": f"{way}, {link}",
                    "hosts": count,
                    "seconds": round(seconds, 2),
                    "of the link's time": round(seconds / least_s, 2),
                    "served": round(median(n for _, n in runs) / model_nbytes, 3),
                }
            )
            section.raw.append({"what": way, "link": link, "hosts": count, "runs": runs})
            if way in SHARED:
                what = f"{way}, {count} hosts, {link}, over the link's {least_s:.2f} s"
                section.target(what, seconds / least_s, at_most=MOST_OVER_LINK)


def _headline(options: Options, section: Section, asked: Headline) -> None:
    """Llama-3-8B over ranks whose boxes are smaller than a fourth of it."""
    split, launcher, ranks, budget, limit = asked
    is_cast = split == "layers"
    room, memory = shutil.disk_usage(options.work).free, available_host_nbytes()
    if room < PRESET_NBYTES + 2**30 or memory < PRESET_NBYTES + ranks * (limit - budget):
        section.note += (
            f"; no Llama-3-8B by {split} here: {format_bytes(room)} of disk and "
            f"{format_bytes(memory)} free"
        )
        return
    with checkpoint(options, PRESET_NBYTES, PRESETS["llama-3-8b"], shards=4) as path:
        options.say(f"nodes: Llama-3-8B by {split}, {ranks} hosts of {format_bytes(limit)}")
        with Cluster(ranks, memory_nbytes=limit) as hosts:
            said = _run(
                hosts,
                launcher,
                3600.0,
                way="layers",
                path=str(path),
                budget=budget,
                device="CL" if "CL" in options.devices and is_cast else "host",
                dtype="float16" if is_cast else "checkpoint",
                split=split,
                timeout=300.0,
            )
            boxes = [host.box for host in hosts.hosts if host.box is not None]
            peaks = [box.peak_nbytes or 0 for box in boxes]
            killed = sum(box.oom_killed for box in boxes)
    section.rows.append(
        {
            "what": f"Llama-3-8B by {split}, budgets of {format_bytes(budget)}, boxes of "
            f"{format_bytes(limit)}",
            "hosts": ranks,
            "seconds": round(max(one["seconds"] for one in said), 1),
            "served": round(sum(one["read_nbytes"] for one in said) / PRESET_NBYTES, 3),
            "memory of a rank": f"box at most {format_bytes(max(peaks))}",
        }
    )
    if is_cast:
        section.rows.append(
            {
                "what": "computed: as many layers on each, embedding and head on all",
                "hosts": ranks,
                "memory of a rank": f"{format_bytes(_by_count(ranks))} of weights",
            }
        )
    section.target(f"ranks killed for memory, by {split}", killed, at_most=0)
    section.target(f"ranks that loaded, by {split}", len(said), at_least=ranks)


def _shards(options: Options, section: Section) -> None:
    """transformers' tensor parallelism: its own load, torch's, and streamload's."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return
    from bench_parts.shards_jobs import WAYS  # they import torch

    ranks, budget, nbytes = SHARDS
    with checkpoint(options, nbytes, PRESETS["tinyllama-1.1b"]) as path:
        for way in WAYS:
            options.say(f"nodes: shards of {ranks} ranks by {way}")
            forget(path)
            with Cluster(ranks) as hosts:
                asked: dict[str, Any] = {"way": way, "path": str(path), "budget": budget}
                said = _run(hosts, "env", jobs="shards_jobs", **asked)
            most = {name: max(one[name] for one in said) for name in said[0]}
            disk, called = (sum(o[n] for o in said) for n in ("disk_nbytes", "called_nbytes"))
            section.rows.append(
                {
                    "what": f"TinyLlama's shards by {way}, files not cached",
                    "hosts": ranks,
                    "seconds": round(most["seconds"], 1),
                    "memory of a rank": f"{format_bytes(most['grown_nbytes'])} for "
                    f"{format_bytes(most['weights_nbytes'])} of weights",
                    "read": f"{format_bytes(called)} by calls, {format_bytes(disk)} of the disk",
                }
            )
            section.raw.append({"what": f"shards by {way}", "ranks": said})


def _by_count(ranks: int) -> int:
    """Bytes on the fullest node of Llama-3-8B where cuts count layers, and all have both ends."""
    shape = PRESETS["llama-3-8b"]
    ends = layers = 0
    for name, dims in shape.tensors().items():
        nbytes = 2 * math.prod(dims)
        layers, ends = (layers + nbytes, ends) if ".layers." in name else (layers, ends + nbytes)
    return layers // shape.layers * -(-shape.layers // ranks) + ends
