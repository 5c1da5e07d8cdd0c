"""The commands ``inspect``, ``plan``, ``load`` and ``devices``."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Unpack

import typer

from streamload.checkpoint.open import Checkpoint, CheckpointLike, opened
from streamload.cli import flags
from streamload.cli.output import complain, print_json, print_lines
from streamload.codecs.stored import read_states
from streamload.codecs.weights import QuantizedWeight
from streamload.core.chart import ASCII, BLOCKS, Stack, draw_stacks, draw_text
from streamload.core.location import Url
from streamload.core.memory import available_host_nbytes
from streamload.core.memory_rate import kept_rate
from streamload.core.units import format_bytes, format_table, parse_bytes
from streamload.devices.names import (
    FRAMEWORKS,
    INSTALLS,
    framework,
    installed,
    spelled_as,
    split_name,
)
from streamload.devices.probing import probe
from streamload.distributed.launch import find_launch
from streamload.errors import DeviceNotFoundError, PlanInfeasibleError, printable
from streamload.loading.load import load_state_dict
from streamload.loading.load import plan as plan_load
from streamload.loading.load import split as split_layers
from streamload.planning.plan import PARTS, Plan
from streamload.planning.planner import speed_line

#: A suggestion of the command ``plan``, if a load does not fit: no command runs a model.
_PLAN_OFFLOAD = "streamload.offload in Python, which plan shows with --offload"


@flags.command
def inspect(
    path: flags.PathArgument,
    *,
    as_json: flags.JsonOption = False,
    quiet: flags.QuietOption = False,
    **given: Unpack[flags.SourceFlags],
) -> None:
    """List the tensors of a checkpoint. Reads headers only.

    The tensors of a quantized weight are one line; the few bytes with its shape are read, too.
    """
    checkpoint = opened(flags.read_path(path, given))
    remote = isinstance(checkpoint.path, Url)  # there each shape would be a request
    quantised = checkpoint.groups if remote else read_states(checkpoint.layouts, checkpoint.groups)
    if as_json:
        print_json(
            {
                "path": str(checkpoint.path),
                "nbytes": checkpoint.nbytes,
                "metadata": dict(checkpoint.metadata),
                "shards": [
                    {
                        "path": str(header.path),
                        "file_nbytes": header.file_nbytes,
                        "data_start": header.data_start,
                        "tensors": len(header.tensors),
                    }
                    for header in checkpoint.shards
                ],
                "tensors": [
                    {
                        "name": info.name,
                        "dtype": info.dtype.name,
                        "shape": list(info.shape),
                        "nbytes": info.nbytes,
                        "shard": info.shard.name,
                        "start": info.start,
                        "stop": info.stop,
                    }
                    for info in checkpoint.tensors.values()
                ],
                "quantised": [
                    {
                        "name": group.name,
                        "kind": group.kind,
                        "shape": None if group.shape is None else list(group.shape),
                        "block": list(group.block),
                        "nbytes": group.nbytes,
                        "members": {role: info.name for role, info in group.members.items()},
                    }
                    for group in quantised.values()
                ],
            }
        )
        return
    _print_inspection(checkpoint, quantised)


def _print_inspection(checkpoint: Checkpoint, quantised: Mapping[str, QuantizedWeight]) -> None:
    """Print a table of tensors, with a line for each quantized weight, and their sums."""
    kinds: Counter[str] = Counter()
    rows = []
    shown = set()
    belongs = checkpoint.members
    for info in checkpoint.tensors.values():
        kinds[info.dtype.name] += info.nbytes
        name, dtype, dims, nbytes = info.name, info.dtype.name, info.shape, info.nbytes
        if (group := belongs.get(name)) is not None:
            if group.name in shown:
                continue
            shown.add(group.name)
            group = quantised[group.name]
            name, dtype, nbytes = group.name, group.kind, group.nbytes
            dims = group.values.shape if group.shape is None else group.shape
        shape = " x ".join(map(str, dims)) or "scalar"
        rows.append((name, dtype, shape, format_bytes(nbytes)))
    by_dtype = ", ".join(f"{name} {format_bytes(n)}" for name, n in kinds.most_common())
    count = len(shown)
    files = sum(len(header.files) for header in checkpoint.shards)
    weights = f", of {count} quantised weights and {len(rows) - count} others" if count else ""
    print_lines(
        *format_table(("tensor", "dtype", "shape", "bytes"), rows, right=1),
        f"{len(checkpoint.tensors)} tensors{weights} in {files} file{'s' * (files != 1)}, "
        f"{format_bytes(checkpoint.nbytes)}" + (f": {by_dtype}" if by_dtype else ""),
        *(f"metadata {key}: {value}" for key, value in checkpoint.metadata.items()),
    )


class PlanFlags(flags.LoadFlags, total=False):
    """The options of ``plan``."""

    bars: Annotated[
        bool | None,
        flags.switch(
            "--bars/--no-bars",
            "Draw a bar for each device or node. Default: where stdout is a terminal.",
        ),
    ]
    plot: Annotated[str | None, flags.option("FILE", "Draw an SVG chart there.")]
    tokens: flags.TokensOption
    stay: flags.StayOption
    layers: flags.LayersOption
    host: flags.HostOption
    rate: Annotated[
        str | None,
        flags.option(
            "SIZE",
            "With --offload: bytes a second that reach the device, such as 40GB, to show how long "
            "a pass takes.",
        ),
    ]


@flags.command
def plan(
    path: flags.PathArgument,
    *,
    nodes: Annotated[
        str | None,
        flags.option(
            "N|NAMES",
            "Split the layers over nodes: how many, or their names separated by commas. With "
            "--budget one size for all, or one for each.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        flags.option(
            "WHAT",
            "With --nodes: layers, tensor for equal slices of each tensor on every node, or a mesh "
            "such as 2x4: layers over 2 groups, tensors over 4 nodes of each. Default: layers.",
        ),
    ] = None,
    offload: Annotated[
        bool,
        flags.switch(
            "--offload",
            "Show the weights that would stay on the device (with --nodes on each), and those that "
            "would stream at every pass.",
        ),
    ] = False,
    as_json: flags.JsonOption = False,
    quiet: flags.QuietOption = False,
    **given: Unpack[PlanFlags],
) -> None:
    """Show the plan of a load, and whether it fits. Reads headers only."""
    asked = flags.read_flags(given)
    tokens, rate, layers, host = given["tokens"], given["rate"], given["layers"], given["host"]
    bars, plot, kept = given["bars"], given["plot"], given["stay"] or ()
    if not offload:
        for_offload = {
            "tokens": tokens,
            "rate": rate,
            "stay": given["stay"],
            "layers": layers,
            "host": host,
        }
        flags.refuse_without_offload(for_offload)
    over = flags.read_nodes(nodes, given["budget"], given["device"])
    over_tensors = split not in (None, "layers")
    if over_tensors and (over is None or offload or plot is not None or bars):
        raise typer.BadParameter("--split needs --nodes, and takes no --offload, --plot or --bars")
    if offload and over is not None and (layers or host):
        raise typer.BadParameter("--layers and --host are for one device, without --nodes")
    place = flags.read_place(given) if over is None else {}
    checkpoint = flags.read_path(path, given)
    if over_tensors and over is not None:
        from streamload.distributed.tensor_split import split_tensors  # few need it

        shares = split_tensors(checkpoint, nodes=over, split=split or "", **asked)
        print_lines(*(shares.to_json() if as_json else str(shares)).splitlines())
        return
    if offload and over is not None:
        from streamload.distributed.offload_split import split_offload  # few need it

        over_nodes = split_offload(checkpoint, nodes=over, tokens=tokens, stay=kept, **asked)
        show = over_nodes.to_json if as_json else over_nodes.table
        print_lines(*show(None if rate is None else parse_bytes(rate)).splitlines())
        return
    if offload:
        from streamload.offloading.offload import plan_offload  # few need it

        asked |= {"layers": layers or (), "host": host or 0}
        found = plan_offload(checkpoint, tokens=tokens, stay=kept, **place, **asked)
        if as_json:
            print_lines(found.to_json())
            return
        print_lines(*str(found).splitlines())
        if rate is not None:
            seconds = found.seconds(parse_bytes(rate))
            print_lines(f"{seconds:.3g} s a pass for transfers, at {rate} a second")
        return
    if over is not None:
        made = split_layers(checkpoint, nodes=over, **asked)
    else:
        try:
            made = plan_load(checkpoint, **place, **asked)
        except PlanInfeasibleError as error:
            raise error.calling("streamload.plan_offload", _PLAN_OFFLOAD) from None
    if plot is not None:
        total = f"{format_bytes(made.resident_nbytes)} of weights, {made.path}"
        title = "What each device or node holds"
        drawn = draw_stacks(title, printable(total), PARTS, _stacks(made))
        Path(plot).expanduser().write_text(drawn, encoding="utf-8")
    if as_json:
        print_lines(made.to_json())
        return
    rates = {d.device: kept_rate(d.device) for d in made.devices} if over is None else {}
    print_lines(*str(made).splitlines(), *filter(None, [speed_line(made, rates)]))
    if bars if bars is not None else sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        print_lines("", *draw_text(PARTS, _stacks(made), width=width, marks=_marks()))


def _stacks(made: Plan) -> list[Stack]:
    """Return the bars of a plan for a chart, with printable names."""
    return [replace(stack, name=printable(stack.name)) for stack in made.bars]


def _marks() -> str:
    """Return the characters to draw bars with, ASCII if stdout can encode no others."""
    try:
        BLOCKS.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS


@flags.command
def load(
    path: flags.PathArgument,
    *,
    verify: Annotated[
        bool,
        flags.switch(
            "--verify", "Read every tensor back and compare it with plain reads and the numpy cast."
        ),
    ] = False,
    split: Annotated[
        str,
        flags.option(
            "WHAT",
            "Over nodes: layers to each, replicate (everything to all), balanced (by bytes alone), "
            "tensor (slices of each tensor), or a mesh of layers and tensors, such as 2x4.",
        ),
    ] = "layers",
    timeout: Annotated[
        float, flags.option("SECONDS", "Over nodes: most time until the loss of one is known.")
    ] = 60.0,
    no_progress: flags.NoProgressOption = False,
    as_json: flags.JsonOption = False,
    quiet: flags.SilentOption = False,
    **given: Unpack[flags.LoadFlags],
) -> None:
    """Load a checkpoint onto a device, and report time and memory.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment, each rank loads its part, and rank 0 reports for all.
    """
    asked = {**flags.read_flags(given), **flags.read_place(given)}
    asked["progress"] = False if no_progress or quiet else "auto"
    launch, silent = find_launch(), False
    checkpoint: CheckpointLike
    if launch is not None and launch.size != 1:
        if isinstance(asked["device"], list):
            raise ValueError("over nodes, each rank loads to one device: start a rank for each")
        if asked.pop("residence") != "memory":
            raise ValueError("over nodes, weights are loaded to memory: leave --residence away")
        for given_path, problem in (
            (given["variant"], "PATH is a variant's file or index: leave --variant away"),
            (given["key"], "PATH has one dict of tensors: convert it with --key first"),
            (given["like"], "PATH has no shapes: convert it with --like first"),
        ):
            if given_path is not None:
                raise ValueError(f"over nodes, {problem}")
        from streamload.distributed import load as distributed  # its engines may be missing

        checkpoint = path = flags.read_revision(path, given["revision"])
        report = distributed.load_state_dict(
            None,
            path,
            split=split,
            timeout=timeout,
            verify="none" if verify else "crc32",  # every byte is compared below
            **asked,
        )
        silent = launch.rank > 0
    else:
        checkpoint = flags.read_path(path, given)
        report = load_state_dict(None, checkpoint, **asked)
    problems: list[str] = []
    if verify:
        from streamload.verification.verify import verify as compare

        problems = [str(m) for m in compare(report, opened(checkpoint))]
    verdict = {"verified": not problems, "mismatches": problems} if verify else {}
    if as_json and not silent:
        print_json(json.loads(report.to_json()) | verdict)
    elif not silent and not quiet:
        print_lines(*str(report).splitlines())
        if verify and not problems:
            print_lines(f"verified: {len(report.plan.placements)} tensors, byte by byte")
    if problems:
        complain(f"{len(problems)} tensors differ from the checkpoint: {'; '.join(problems[:3])}")
        raise typer.Exit(1)


def devices(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Devices to test.  [default: all]"),
    ] = None,
    as_json: flags.JsonOption = False,
    quiet: flags.QuietOption = False,
) -> None:
    """Compute on every device and show what works. Takes seconds for each."""
    found = []
    for owner_name, name in _wanted(names):
        lacks = [package for package in ("llvmlite", owner_name) if not installed(package)]
        missing = {"missing": {package: INSTALLS[package] for package in lacks}}
        try:
            owner = framework(owner_name)
        except DeviceNotFoundError as error:
            row = {"framework": owner_name, "device": owner_name, "works": False}
            found.append(row | {"problem": error.problem} | missing)
            continue
        for one in owner.candidates() if name is None else [owner.canonical(name)]:
            result = probe(owner.name, one, full=True)
            row = {"framework": owner.name, **asdict(result)} | missing
            if result.works:
                found_info = owner.device(one).info
                info = asdict(found_info)
                if found_info.in_process:  # its memory and limit are the host's
                    free = (info["free_nbytes"], available_host_nbytes())
                    info["free_nbytes"] = min(n for n in free if n is not None)
                info["unsupported"] = sorted(info["unsupported"])
                row["info"] = info
            found.append(row)
    if as_json:
        print_json(found)
    else:
        print_lines(*_listed(found))
    if names and not all(row["works"] for row in found):
        raise typer.Exit(1)


def _wanted(names: Sequence[str] | None) -> list[tuple[str, str | None]]:
    """Return pairs of a framework and its device; None in place of a device for all."""
    if not names:
        return [(name, None) for name in FRAMEWORKS]
    split = [split_name(name) for name in names]
    return [(owner or spelled_as(name), name or None) for owner, name in split]


def _listed(found: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Yield the lines that ``devices`` prints for its rows of results."""
    for row in found:
        if not row["works"]:
            yield f"{row['device']}: does not work: {row['problem']}"
            continue
        info = row["info"]
        yield f"{row['device']} ({row['framework']}): works. {info['description']}".rstrip()
        sizes = [
            f"{label} {format_bytes(info[key])}"
            for key, label in (
                ("free_nbytes", "free"),
                ("total_nbytes", "total"),
                ("largest_allocation_nbytes", "largest allocation"),
            )
            if info[key] is not None
        ]
        way = "written in place" if info["host_visible"] else "through staging"
        yield f"  memory: {', '.join([*sizes, way])}"
        for status in ("native", "emulated", "broken", "absent"):
            listed = [name for name, s in row["dtypes"].items() if s == status]
            if listed:
                yield f"  {status}: {', '.join(listed)}"
    for package, command in {k: v for row in found for k, v in row["missing"].items()}.items():
        yield f"{package} is not installed: {command}"
