"""The command line of ``scripts/bench``, and its tables."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench_parts import sections
from bench_parts.boxed_section import boxed_entrances
from bench_parts.diffusers_section import diffusers
from bench_parts.gpu_offload_section import gpu_offload
from bench_parts.gpu_section import GPU_SECTIONS
from bench_parts.nodes_section import nodes
from bench_parts.offload_section import offload
from bench_parts.quant_section import QUANT_SECTIONS
from bench_parts.section import NotHereError, Options, Section
from bench_parts.torch_section import torch_box
from streamload.bench import machine
from streamload.bench.loaders import LOADERS
from streamload.core.units import format_table, parse_bytes
from streamload.devices.probing import probe

ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS = {**sections.SECTIONS, "nodes": nodes, "torch": torch_box}
ASKED_FOR = {
    "boxed": boxed_entrances,
    "offload": offload,
    "diffusers": diffusers,
    "gpu-offload": gpu_offload,
    **QUANT_SECTIONS,
    **GPU_SECTIONS,
}
KNOWN: dict[str, Callable[[Options], Section]] = SECTIONS | ASKED_FOR
_OPTIONS = {field.name for field in fields(Options)}


def main() -> None:
    """Measure, print tables, and write JSON."""
    args = _arguments()
    command = shlex.join(["scripts/bench", *sys.argv[1:]])
    facts = machine.facts()
    # opening a device takes its time: not where none of these is used
    others = set(args.sections) - {"diffusers", "gpu-offload", *GPU_SECTIONS}
    wanted = args.devices.split(",") if others else ()
    devices = [n for n in wanted if probe("host" if n == "host" else "tinygrad", n).works]
    facts["devices that do not work"] = ", ".join(n for n in wanted if n not in devices)
    report: dict[str, Any] = {"command": command, "machine": facts, "sections": {}}
    _print_rows([{"machine": key, "": value} for key, value in facts.items()])
    failed: list[str] = []
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=args.work) as work:
        asked = {name: value for name, value in vars(args).items() if name in _OPTIONS}
        asked |= {"sites": dict(args.sites), "keep": args.work if args.keep else None}
        asked |= {"cold_nbytes": min(args.cold_nbytes, args.nbytes), "devices": tuple(devices)}
        options = Options(**asked | {"work": Path(work), "say": _say})
        for name in args.sections:
            _say(f"--- {name}")
            try:
                section = KNOWN[name](options)
            except NotHereError as error:
                print(f"\n{name}: not here: {error}")
                report["sections"][name] = {"not_here": str(error)}
                continue
            except Exception as error:  # the other sections have taken their time, or will
                traceback.print_exc()
                report["sections"][name] = {"failed": f"{type(error).__name__}: {error}"}
                failed.append(name)
                continue
            _print(section)
            report["sections"][name] = section.to_json()
            failed += [f"{name} {failure}" for failure in section.failures]
            if args.json:  # after each: the next may take more time than there is
                args.json.write_text(json.dumps(report, indent=2) + "\n")
            for chart, text in section.charts.items() if args.charts else ():
                args.charts.mkdir(parents=True, exist_ok=True)
                (args.charts / f"{chart}.svg").write_text(text)
    print(f"\nagain: {command}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        sys.exit(f"bench: failed: {', '.join(failed)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure streamload on this machine against the loaders of tinygrad, torch, "
        "transformers and accelerate where they are installed, and against numpy, ml_dtypes and "
        "the machine's own rates. Each measurement is a process of its own.",
    )
    add = parser.add_argument
    add(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)} (default: all of these), {', '.join(ASKED_FOR)}",
    )
    add("--gpu", action="store_true", help="all sections gpu-...")
    size = "checkpoint (default: %(default)s)"
    add("--size", dest="nbytes", type=_nbytes, default="2.27GB", metavar="SIZE", help=size)
    add("--runs", type=int, default=5, help="processes of each kind, in turn (%(default)s)")
    add("--devices", default="CL,CPU,host", help="default: %(default)s")
    ways = "of the sections torch and diffusers: those ways whose names contain one of these"
    add("--ways", nargs="+", default=[], metavar="NAME", help=ways)
    small = "small ones, of the sections many and gpu-small (%(default)s)"
    add("--tensors", type=int, default=50_000, help=small)
    add("--run", action="store_true", help="of the section quant: products, not quantising")
    add("--scale", type=float, default=1.0, help="of the section diffusers: Flux's size (1)")
    add("--steps", type=int, default=20, help="likewise: of an image (%(default)s)")
    add("--pixels", type=int, default=1024, help="likewise: of a side (%(default)s)")
    budgets = "likewise: bytes of the device (%(default)s)"
    add("--budgets", type=_list, default="6GB,8GB,12GB,24GB", help=budgets)
    # not the system's temporary folder: that may be in memory
    add(
        "--work",
        type=Path,
        default=ROOT / ".cache",
        help="folder on a disk, in which checkpoints are made and removed (default: .cache)",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add = parser.add_argument_group("of the sections gpu-...").add_argument
    cold = "read from the disk (%(default)s)"
    as_nbytes: dict[str, Any] = {"dest": "cold_nbytes", "type": _nbytes, "metavar": "COLD_SIZE"}
    add("--cold-size", default="4GB", help=cold, **as_nbytes)
    add("--shards", type=int, default=4, help="files (%(default)s)")
    seconds = "of one comparison: no further round is begun then (%(default)s)"
    add("--seconds", type=float, default=60.0, help=seconds)
    add("--torch-device", default="cuda:0", help="default: %(default)s")
    add("--tinygrad-device", default="CUDA", help="default: %(default)s")
    add(
        "--site",
        dest="sites",
        type=_site,
        action="append",
        default=[],
        metavar="LOADER=FOLDER",
        help="import a loader from there, to compare another version of it; repeatable",
    )
    keep = "leave the checkpoints for the next time; those of the section diffusers, too"
    add("--keep", action="store_true", help=keep)
    add("--charts", type=Path, metavar="FOLDER", help="draw SVG files there")
    args = parser.parse_args()
    unknown = [name for name in args.sections if name not in KNOWN]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    if args.runs < 1:
        parser.error("--runs is at least 1")
    args.sections += [n for n in GPU_SECTIONS if args.gpu and n not in args.sections]
    args.sections = args.sections or list(SECTIONS)
    return args


def _nbytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _list(text: str) -> list[str]:
    return text.split(",")


def _site(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if not folder or name not in LOADERS:
        raise argparse.ArgumentTypeError(f"is LOADER=FOLDER, of {', '.join(LOADERS)}")
    return name, folder


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(section: Section) -> None:
    print(f"\n{section.name}: {section.note}")
    _print_rows(section.rows)
    for title, more in ((title, rows) for title, rows in section.tables.items() if rows):
        print(f"\n{title}:")
        _print_rows(more)
    targets = [
        {
            "target": target.what,
            "measured": f"{target.value:.4g}",
            "wanted": target.wanted,
            "": "met" if target.met else "MISSED",
        }
        for target in section.targets
    ]
    _print_rows(targets)


def _print_rows(rows: list[dict[str, Any]]) -> None:
    """Print a table; a column for each key of any row, in order."""
    titles = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["" if row.get(c) is None else str(row[c]) for c in titles] for row in rows]
    if rows:
        print(*format_table(titles, cells, right=0), sep="\n")
