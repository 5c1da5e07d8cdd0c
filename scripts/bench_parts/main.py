"""The command line of ``scripts/bench``, and its tables."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench_parts.convert_section import convert
from bench_parts.gpu_section import GPU_SECTIONS, GpuOptions
from bench_parts.many_section import many
from bench_parts.nodes_section import nodes
from bench_parts.processes import SCRIPTS
from bench_parts.sections import SECTIONS as OF_STREAMLOAD
from bench_parts.sections import NotHereError, Options, Section, working
from bench_parts.torch_section import torch_box
from bench_parts.torture_section import torture
from streamload.bench import machine
from streamload.bench.loaders import LOADERS
from streamload.units import parse_bytes

SECTIONS = {**OF_STREAMLOAD, "convert": convert, "many": many, "nodes": nodes, "torch": torch_box}
ASKED_FOR = {"torture": torture}  # they take many minutes
KNOWN = (*SECTIONS, *ASKED_FOR, *GPU_SECTIONS)
DEVICES = ("CL", "CPU", "host")
DEFAULT_SIZE = "2.27GB"
DEFAULT_RUNS = 5


def main() -> None:
    """Measure, print tables, and write JSON."""
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure streamload on this machine, beside tinygrad's own loader, memset, "
        "memcpy, numpy and ml_dtypes, and beside the loaders of torch, transformers and accelerate "
        "where they are installed. Each measurement is a process of its own.",
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)} (default: all of these), "
        f"{', '.join((*ASKED_FOR, *GPU_SECTIONS))}",
    )
    parser.add_argument("--gpu", action="store_true", help="all sections gpu-...")
    parser.add_argument("--size", default=DEFAULT_SIZE, help="checkpoint (default: %(default)s)")
    parser.add_argument(
        "--runs",
        type=int,
        default=DEFAULT_RUNS,
        help="processes of each kind, in turn (%(default)s)",
    )
    parser.add_argument("--devices", default=",".join(DEVICES), help="default: %(default)s")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of the section torch: those ways to load whose names contain one of these",
    )
    parser.add_argument(
        "--tensors",
        type=int,
        default=50_000,
        help="small ones, of the sections many and gpu-small (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the section torture (%(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="of the section torture: run N alone")
    parser.add_argument(
        "--usable",
        action="store_true",
        help="of the section torture: find how much of a box can be used, instead",
    )
    # not the system's temporary folder: that may be in memory
    parser.add_argument(
        "--work",
        type=Path,
        default=SCRIPTS.parent / ".cache",
        help="folder on a disk, in which checkpoints are made and removed (default: .cache)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    gpu = parser.add_argument_group("of the sections gpu-...")
    gpu.add_argument("--cold-size", default="4GB", help="read from the disk (%(default)s)")
    gpu.add_argument("--shards", type=int, default=4, help="files (%(default)s)")
    gpu.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="of one comparison: no further round is begun then (%(default)s)",
    )
    gpu.add_argument("--torch-device", default="cuda:0", help="default: %(default)s")
    gpu.add_argument("--tinygrad-device", default="CUDA", help="default: %(default)s")
    gpu.add_argument(
        "--site",
        action="append",
        default=[],
        metavar="LOADER=FOLDER",
        help="import a loader from there, to compare another version of it; repeatable",
    )
    gpu.add_argument("--keep", action="store_true", help="leave the checkpoints for the next time")
    gpu.add_argument("--charts", type=Path, metavar="FOLDER", help="draw SVG files there")
    args = parser.parse_args()
    unknown = [name for name in args.sections if name not in KNOWN]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    if args.runs < 1:
        parser.error("--runs is at least 1")
    sites = dict(site.partition("=")[::2] for site in args.site)
    if not all(folder and name in LOADERS for name, folder in sites.items()):
        parser.error(f"--site is LOADER=FOLDER, of {', '.join(LOADERS)}")
    try:
        nbytes, cold_nbytes = parse_bytes(args.size), parse_bytes(args.cold_size)
    except ValueError as error:
        parser.error(str(error))
    names = [*args.sections, *(n for n in GPU_SECTIONS if args.gpu and n not in args.sections)]
    names = names or list(SECTIONS)

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    command = shlex.join(["scripts/bench", *sys.argv[1:]])
    facts = machine.facts()
    # opening a device takes its time: not where none of these is used
    wanted = tuple(args.devices.split(",")) if set(names) - set(GPU_SECTIONS) else ()
    devices = working(wanted)
    facts["devices that do not work"] = ", ".join(name for name in wanted if name not in devices)
    report: dict[str, Any] = {"command": command, "machine": facts, "sections": {}}
    console.print(_table([{"machine": key, "": value} for key, value in facts.items()]))
    failed: list[str] = []
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.work) as work:
        options = Options(
            nbytes=nbytes,
            runs=args.runs,
            devices=devices,
            work=Path(work),
            ways=tuple(args.ways),
            tensors=args.tensors,
            seed=args.seed,
            only=args.only,
            usable=args.usable,
            say=_say,
        )
        gpu_options = GpuOptions(
            nbytes=nbytes,
            cold_nbytes=min(cold_nbytes, nbytes),
            tensors=args.tensors,
            shards=args.shards,
            runs=args.runs,
            seconds=args.seconds,
            torch_device=args.torch_device,
            tinygrad_device=args.tinygrad_device,
            sites=sites,
            work=args.work if args.keep else Path(work),
            say=_say,
            keep=args.keep,
        )
        for name in names:
            _say(f"--- {name}")
            try:
                if name in GPU_SECTIONS:
                    section = GPU_SECTIONS[name](gpu_options)
                else:
                    section = (SECTIONS | ASKED_FOR)[name](options)
            except NotHereError as error:
                console.print(f"\n{name}: not here: {error}", markup=False)
                report["sections"][name] = {"not_here": str(error)}
                continue
            except Exception as error:  # the other sections have taken their time, or will
                traceback.print_exc()
                report["sections"][name] = {"failed": f"{type(error).__name__}: {error}"}
                failed.append(name)
                continue
            _print(console, section)
            report["sections"][name] = section.to_json()
            failed += [f"{name} {failure}" for failure in section.failures]
            if args.json:  # after each: the next may take more time than there is
                args.json.write_text(json.dumps(report, indent=2) + "\n")
            if args.charts:
                args.charts.mkdir(parents=True, exist_ok=True)
                for chart, text in section.charts.items():
                    (args.charts / f"{chart}.svg").write_text(text)
    console.print(f"\nagain: {command}", markup=False)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(console: Console, section: Section) -> None:
    console.print(f"\n{section.name}: {section.note}", markup=False)
    console.print(_table(section.rows))
    for title, more in ((title, rows) for title, rows in section.tables.items() if rows):
        console.print(f"\n{title}:", markup=False)
        console.print(_table(more))
    rows = [
        {
            "target": target.what,
            "measured": f"{target.value:.4g}",
            "wanted": _wanted(target.at_least, target.at_most),
            "": "met" if target.met else "MISSED",
        }
        for target in section.targets
    ]
    console.print(_table(rows))


def _wanted(at_least: float | None, at_most: float | None) -> str:
    low = "" if at_least is None else f">= {at_least:.4g}"
    high = "" if at_most is None else f"<= {at_most:.4g}"
    return " ".join(filter(None, (low, high)))


def _table(rows: list[dict[str, Any]]) -> Table:
    """Rows as a table; a column for each key of any row, in order."""
    table = Table(box=None, pad_edge=False)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        numbers = any(isinstance(row.get(column), (int, float)) for row in rows)
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        # texts, not markup: what the kernel says has brackets in it
        table.add_row(*(Text("" if row.get(c) is None else str(row[c])) for c in columns))
    return table
