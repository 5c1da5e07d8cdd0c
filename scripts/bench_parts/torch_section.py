"""The section "torch": a table of peaks, and the outcome of each way in a box, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

from boxes import Boxes

from bench_parts.section import (
    SMALL_NBYTES,
    Measured,
    NotHereError,
    Options,
    Section,
    boxes_here,
    checkpoint,
    forget,
    in_box,
    measure,
    need_memory,
    need_packages,
    read_all,
)
from bench_parts.sections import SAMPLE_S
from bench_parts.torch_jobs import WAYS, Way
from streamload.bench.processes import MeasurementError, call, command
from streamload.core.units import format_bytes
from streamload.devices.probing import probe

#: What the box leaves beside the weights and a process that has loaded a tiny model.
MARGIN_NBYTES = 64_000_000
MARGIN_SHARE = 1 / 8  # of the weights: what a budget that is not stated leaves alone, and a bit
#: What streamload may take beside the weights and what the tiny load takes.
SLACK_NBYTES = 64_000_000
PEAKS_AT_TWICE = 1.9
#: The usual ways that hold the file's pages and the weights side by side, each judged by itself.
COPYING = ("model, load_file, load_state_dict", "transformers, float16", "accelerate, float16")
BUDGET_RATIO = 1.02
JOB = "bench_parts.torch_jobs:load"


def torch_box(options: Options) -> Section:
    """Peaks of every way to load a model of transformers, and a box of the weights and a base."""
    need_packages("torch", "transformers")
    found = probe("torch", "cpu")
    if not found.works:
        raise NotHereError(f"torch: {found.problem}")
    need_memory(4 * options.nbytes + 2**30)
    maker = boxes_here()
    ways = {
        name: way
        for name, way in WAYS.items()
        if way.works and (not options.ways or any(part in name for part in options.ways))
    }
    if not ways:
        raise NotHereError(f"no way to load of {', '.join(WAYS)}")
    tiny: dict[str, int] = {}  # peaks of RSS where there is nearly nothing to load
    with checkpoint(options, SMALL_NBYTES) as path:
        for name in ways:
            done = measure(call(JOB, path=str(path), way=name))
            tiny[name] = done.first["rss_peak_nbytes"]
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


def _peaks(
    options: Options,
    ways: Mapping[str, Way],
    maker: Boxes,
    tiny: Mapping[str, int],
    section: Section,
) -> dict[str, Measured]:
    """Each way with room for everything."""
    peaks: dict[str, Measured] = {}
    with checkpoint(options, options.nbytes) as path:
        for name, way in ways.items():
            job = call(JOB, path=str(path), way=name)
            options.say(f"torch: peaks: {name}")
            read_all(path)
            done = peaks[name] = measure(job, sample_s=SAMPLE_S)
            forget(path)
            charged = maker.run(command(job, at_once=True), 4 * options.nbytes + 2**30)
            if charged.returncode:
                raise MeasurementError(f"{name}, with room: {charged.stderr.strip()[-500:]}")
            rss_nbytes = done.first["rss_peak_nbytes"]
            section.rows.append(
                {
                    "what": name,
                    "weights": way.dtype,
                    "anon": format_bytes(done.peak.anon_nbytes),
                    "RSS": format_bytes(rss_nbytes),
                    "x": round((rss_nbytes - tiny[name]) / options.nbytes, 2),
                    "RSS, used": format_bytes(done.first["rss_used_nbytes"]),
                    "rests": format_bytes(max(0, done.first["anon_nbytes"])),
                    "cgroup": format_bytes(charged.peak_nbytes or 0),
                    "wall_s": round(done.first["seconds"], 2),
                }
            )
    return peaks


def _in_box(
    options: Options,
    ways: Mapping[str, Way],
    maker: Boxes,
    limit_nbytes: int,
    offset: int,
    section: Section,
) -> None:
    """Each way in the box: the outcomes are added to its row."""
    rows = {row["what"]: row for row in section.rows}
    budget_nbytes = int(options.nbytes * BUDGET_RATIO)
    with checkpoint(options, options.nbytes, offset_mod_16=offset) as path:
        for name, way in ways.items():
            job = call(JOB, path=str(path), way=name, budget_nbytes=budget_nbytes)
            what = f"torch: {name}, data at {offset} modulo 16"
            for state, done in in_box(options, what, path, job, maker, limit_nbytes):
                outcome = done.outcome
                if outcome == "done":
                    outcome += f", {done.said['seconds']:.1f} s"
                elif not done.oom_killed:
                    options.say(done.stderr.strip()[-500:])
                rows[name][f"box, {offset}, {state}"] = outcome
                if way.ours:
                    what = f"{name}: finishes in the box, data at {offset}, {state}"
                    section.target(what, float(done.returncode == 0), at_least=1)


def _judge(
    ways: Mapping[str, Way],
    peaks: Mapping[str, Measured],
    tiny: Mapping[str, int],
    section: Section,
    nbytes: int,
) -> None:
    """Compare bits and peaks."""
    for name in (name for name, way in ways.items() if way.ours):
        other = next((n for n, w in ways.items() if not w.ours and w.dtype == ways[name].dtype), "")
        if other:
            same = peaks[name].first["crc32"] == peaks[other].first["crc32"]
            section.target(f"{name}: the same bits as by {other!r}", float(same), at_least=1)
        excess = peaks[name].first["rss_peak_nbytes"] - tiny[name] - nbytes
        what = f"{name}: RSS beyond the weights and what the process takes, bytes"
        section.target(what, excess, at_most=SLACK_NBYTES)
    for row in section.rows:
        if row["what"] in COPYING:
            section.target(f"{row['what']}: peak, x", row["x"], at_least=PEAKS_AT_TWICE)
