"""The section "torch": a table of peaks, and of who is killed, on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench_parts.processes import Measured, WorkerError, argv, environment, measure, result_of
from bench_parts.sections import (
    SMALL_NBYTES,
    NotHereError,
    Options,
    Section,
    Target,
    cached_checkpoint,
    forget,
    need_memory,
    read_all,
)
from bench_parts.torch_jobs import WAYS, Way
from streamload.devices.probing import probe
from streamload.units import format_bytes

#: What the box leaves beside the weights and a process that has loaded a tiny model.
MARGIN_NBYTES = 64_000_000
MARGIN_SHARE = 1 / 8  # of the weights: what a budget that is not stated leaves alone, and a bit
#: What streamload may take beside the weights and what the tiny load takes.
SLACK_NBYTES = 64_000_000
PEAKS_AT_TWICE = 1.9
#: The usual ways that hold the file's pages and the weights side by side, each judged by itself.
COPYING = ("model, load_file, load_state_dict", "transformers, float16", "accelerate, float16")
BUDGET_RATIO = 1.02
_FILES: Mapping[str, Callable[[Path], None]] = {"cached": read_all, "not cached": forget}


def torch_box(options: Options) -> Section:
    """Peaks of every way to load a model of transformers, and a box of the weights and a base."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise NotHereError(f"{name} is not installed")
    found = probe("torch", "cpu")
    if not found.works:
        raise NotHereError(f"torch: {found.problem}")
    need_memory(4 * options.nbytes + 2**30)
    maker = _boxes()
    ways = {
        name: way
        for name, way in WAYS.items()
        if way.works and (not options.ways or any(part in name for part in options.ways))
    }
    if not ways:
        raise NotHereError(f"no way to load of {', '.join(WAYS)}")
    tiny = _tiny_nbytes(options, ways)
    base_nbytes = max(tiny.values())
    margin_nbytes = MARGIN_NBYTES + int(options.nbytes * MARGIN_SHARE)
    limit_nbytes = options.nbytes + base_nbytes + margin_nbytes
    section = Section(
        "torch",
        f"torch on the CPU, a Llama of transformers in bf16, {format_bytes(options.nbytes)}; "
        f"the box: a memory cgroup of {format_bytes(limit_nbytes)}, no swap, which is the weights, "
        f"{format_bytes(base_nbytes)} for a process that has imported transformers and loaded "
        f"{format_bytes(SMALL_NBYTES)} (the largest RSS of any way), and "
        f"{format_bytes(margin_nbytes)}. anon: peak of RssAnon + RssShmem, "
        "as another process sees it; RSS: peak of all, mapped file included, "
        "until the load is done, and until every weight was used; rests: by how much anonymous "
        "memory had grown when the load was done (what is not there is still in the file). "
        "x: RSS over that of the same way with 1 MB, as a multiple of the file. All of these with "
        "the file cached. cgroup: what a cgroup with room for all is charged, file not cached, "
        "page cache included. In the box each way also reads all weights",
    )
    peaks = _peaks(options, ways, maker, tiny, section)
    for offset in (8, 0):
        _in_box(options, ways, maker, limit_nbytes, offset, section)
    _judge(ways, peaks, tiny, section, options.nbytes)
    return section


def _boxes() -> Any:
    boxes = importlib.import_module("boxes")
    try:
        return boxes.Boxes()
    except (boxes.NoBoxesError, OSError) as error:
        raise NotHereError(str(error)) from error


def _tiny_nbytes(options: Options, ways: Iterable[str]) -> dict[str, int]:
    """Peaks of RSS where there is nearly nothing to load: the process alone."""
    with cached_checkpoint(options, SMALL_NBYTES) as path:
        return {
            name: int(measure("torch_load", path=str(path), way=name).result["rss_peak_nbytes"])
            for name in ways
        }


def _peaks(
    options: Options,
    ways: Mapping[str, Way],
    maker: Any,
    tiny: Mapping[str, int],
    section: Section,
) -> dict[str, Measured]:
    """Each way with room for everything."""
    peaks: dict[str, Measured] = {}
    with cached_checkpoint(options, options.nbytes) as path:
        for name, way in ways.items():
            arguments: dict[str, Any] = {"path": str(path), "way": name}
            options.say(f"torch: peaks: {name}")
            read_all(path)
            done = measure("torch_load", sampled=True, **arguments)
            forget(path)
            box_nbytes = 4 * options.nbytes + 2**30
            charged = maker.run(argv("torch_load", **arguments), box_nbytes, env=environment())
            if charged.returncode:
                raise WorkerError(f"{name}, with room: {charged.stderr.strip()[-500:]}")
            peaks[name] = done
            rss_nbytes = done.result["rss_peak_nbytes"]
            section.rows.append(
                {
                    "what": name,
                    "weights": way.dtype,
                    "anon": format_bytes(done.peak_nbytes),
                    "RSS": format_bytes(rss_nbytes),
                    "x": round((rss_nbytes - tiny[name]) / options.nbytes, 2),
                    "RSS, used": format_bytes(done.result["rss_used_nbytes"]),
                    "rests": format_bytes(max(0, done.result["anon_nbytes"])),
                    "cgroup": format_bytes(charged.peak_nbytes or 0),
                    "wall_s": round(done.first["wall_s"], 2),
                }
            )
    return peaks


def _in_box(
    options: Options,
    ways: Mapping[str, Way],
    maker: Any,
    limit_nbytes: int,
    offset: int,
    section: Section,
) -> None:
    """Each way in the box: the outcomes are added to its row."""
    rows = {row["what"]: row for row in section.rows}
    budget_nbytes = int(options.nbytes * BUDGET_RATIO)
    with cached_checkpoint(options, options.nbytes, offset_mod_16=offset) as path:
        for name, way in ways.items():
            for what, prepare in _FILES.items():
                options.say(f"torch: box, data at {offset} modulo 16, {what}: {name}")
                prepare(path)
                command = argv("torch_load", path=str(path), way=name, budget_nbytes=budget_nbytes)
                done = maker.run(command, limit_nbytes, env=environment(), timeout_s=1800)
                outcome = "killed" if done.oom_killed else f"exit {done.returncode}"
                if outcome == "exit 0":
                    seconds = result_of(done.stdout)["laps"][0]["wall_s"]
                    outcome = f"done, {seconds:.1f} s"
                elif not done.oom_killed:
                    options.say(done.stderr.strip()[-500:])
                rows[name][f"box, {offset}, {what}"] = outcome
                if way.ours:
                    section.targets.append(
                        Target(
                            f"{name}: finishes in the box, data at {offset}, {what}",
                            float(done.returncode == 0),
                            at_least=1,
                        )
                    )


def _judge(
    ways: Mapping[str, Way],
    peaks: Mapping[str, Measured],
    tiny: Mapping[str, int],
    section: Section,
    nbytes: int,
) -> None:
    """Compare bits and peaks."""
    rows = {row["what"]: row for row in section.rows}
    for name in (name for name, way in ways.items() if way.ours):
        other = next((n for n, w in ways.items() if not w.ours and w.dtype == ways[name].dtype), "")
        if other:
            same = peaks[name].result["crc32"] == peaks[other].result["crc32"]
            section.targets.append(
                Target(f"{name}: the same bits as by {other!r}", float(same), at_least=1)
            )
        excess = peaks[name].result["rss_peak_nbytes"] - tiny[name] - nbytes
        section.targets.append(
            Target(
                f"{name}: RSS beyond the weights and what the process takes, bytes",
                excess,
                at_most=SLACK_NBYTES,
            )
        )
    for name in COPYING:
        if name in rows:
            section.targets.append(
                Target(f"{name}: peak, x", rows[name]["x"], at_least=PEAKS_AT_TWICE)
            )
