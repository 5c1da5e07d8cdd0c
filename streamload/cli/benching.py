"""The command ``bench``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamload.checkpoint.fetch import on_disk
from streamload.cli import flags
from streamload.cli.output import complain, print_lines
from streamload.devices.names import environment_device

if TYPE_CHECKING:  # other commands do not import the bench
    from streamload.bench.offloading import OffloadBench
    from streamload.bench.results import Comparison


def bench(
    path: flags.PathArgument,
    revision: flags.RevisionOption = None,
    device: Annotated[
        str | None,
        flags.option(
            "NAME",
            "A device, as load has them. Default: STREAMLOAD_DEVICE, or the first that works "
            "of cuda:0, CL, cpu, CPU and host.",
        ),
    ] = None,
    runs: Annotated[int, flags.option("N", "Processes of each loader, in turn.")] = 5,
    peers: Annotated[
        str | None,
        flags.option(
            "NAMES",
            "Loaders to compare with, separated by commas; none for none. Default: all that "
            "load to the device.",
        ),
    ] = None,
    cold: Annotated[
        bool, flags.switch("--cold", "Also with the files dropped from the page cache.")
    ] = False,
    dtype: Annotated[str, flags.option("DTYPE", "What all floats become.")] = "checkpoint",
    budget: Annotated[
        str | None, flags.option("SIZE", "Most bytes that streamload may take on the device.")
    ] = None,
    cores: Annotated[int, flags.option("N", "CPUs that each process may use; 0 for all.")] = 0,
    site: Annotated[
        list[str] | None,
        flags.option(
            "NAME=FOLDER",
            "Import a loader from a folder, to compare another version of it; repeatable.",
        ),
    ] = None,
    timeout: Annotated[float, flags.option("SECONDS", "Most time for one load.")] = 600.0,
    seconds: Annotated[
        float | None,
        flags.option("SECONDS", "Begin no further round after so long, warm and cold each."),
    ] = None,
    limits: Annotated[
        bool, flags.option(None, "Measure what the machine could do at most, too.")
    ] = True,
    json_file: Annotated[
        str | None, flags.option("FILE", "Write all figures there.", "--json")
    ] = None,
    svg_file: Annotated[str | None, flags.option("FILE", "Draw a chart there.", "--svg")] = None,
    offload: Annotated[
        bool,
        flags.switch(
            "--offload",
            "Measure passes of an offloaded model of transformers: seconds a pass by budget. "
            "--budget names budgets, separated by commas; --peers accelerate, diffusers and "
            '"diffusers, low memory", "AirLLM", separated by semicolons.',
        ),
    ] = False,
    tokens: Annotated[int, flags.option("N", "With --offload: tokens of a pass.")] = 128,
    stay: flags.StayOption = None,
    layers: flags.LayersOption = None,
    host: flags.HostOption = None,
    no_progress: flags.NoProgressOption = False,
    quiet: flags.QuietOption = False,
) -> None:
    """Compare loaders on one checkpoint and device.

    Each load is a process of its own. Loaders that are not installed or do not work are named,
    with the reason.
    """
    say = (lambda text: None) if no_progress or quiet else complain
    named = None if peers is None else _names(peers, ";" if offload else ",")
    found: Comparison | OffloadBench
    path = flags.read_revision(path, revision)
    if not os.path.exists(path):  # other loaders read files on this machine
        path = str(on_disk(path, "cache", False if no_progress or quiet else "auto").path)
    if offload:
        from streamload.bench.offloading import PEERS, PassOptions, measure

        if unknown := [name for name in named or () if name not in PEERS]:
            expected = "; ".join(PEERS)
            raise typer.BadParameter(f"--peers: expected {expected}, found {unknown[0]}")
        passes = PassOptions(
            path=path,
            device=device or environment_device() or "cpu",
            budgets=budget.split(",") if budget else (),
            tokens=tokens,
            runs=runs,
            peers=named or (),
            dtype=dtype,
            stay=stay or (),
            layers=layers or (),
            host=host or 0,
            timeout_s=timeout,
            say=say,
        )
        found = measure(passes)
    else:
        flags.refuse_without_offload({"stay": stay, "layers": layers, "host": host})
        from streamload.bench.compare import Options, compare

        pairs = [entry.partition("=") for entry in site or ()]
        if not all(name and folder for name, _, folder in pairs):
            raise typer.BadParameter(f"--site: expected NAME=FOLDER, found {', '.join(site or ())}")
        loads = Options(
            path=path,
            device=device,
            runs=runs,
            peers=named,
            states=("warm", "cold") if cold else ("warm",),
            dtype=dtype,
            budget=budget,
            timeout_s=timeout,
            seconds=seconds,
            cores=cores,
            sites={name: folder for name, _, folder in pairs},
            limits=limits,
            say=say,
        )
        found = compare(loads)
    if json_file:
        Path(json_file).expanduser().write_text(json.dumps(found.to_json(), indent=2) + "\n")
    if svg_file:
        Path(svg_file).expanduser().write_text(found.svg())
    print_lines(*found.lines())
    if not found.has_figures:
        raise typer.Exit(1)


def _names(text: str, separator: str) -> tuple[str, ...]:
    """Return the names of ``--peers``, split at ``separator``; () for "none"."""
    return () if text == "none" else tuple(name.strip() for name in text.split(separator))
