"""The commands: inspect, plan, load, devices, bench, verify, diff, convert.

Exit codes: 0 done, 1 bad input or a failure, 2 wrong usage, 3 does not fit, 130 Ctrl-C. Errors are
one line on stderr.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from streamload.bench.chart import ASCII, BLOCKS, Stack, draw_stacks, draw_text
from streamload.checkpoint.checkpoint import Checkpoint, open_checkpoint
from streamload.checkpoint.url import without_secrets
from streamload.convert.convert import DEFAULT_SHARD_SIZE
from streamload.convert.convert import convert as convert_checkpoint
from streamload.convert.planning import RenamePatterns
from streamload.devices.base import framework, installed, probe, spelled_as, split_name
from streamload.errors import BudgetError, DeviceNotFoundError, StreamloadError
from streamload.interrupt import end_by_interrupts, raise_interrupts
from streamload.load import load_state_dict, split
from streamload.load import plan as make_plan
from streamload.mapping import MAPPINGS, Rename
from streamload.nodes.launch import find_launch
from streamload.options import SplitOptions
from streamload.plan.budget import available_host_nbytes
from streamload.plan.partition import Node
from streamload.plan.plan import Plan
from streamload.progress import Progress
from streamload.units import format_bytes, format_table

app = typer.Typer(
    help="Stream safetensors checkpoints onto devices that are too small for the usual loaders.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain text: it pipes, greps, and fits a narrow terminal
)

# typer exports this one of click's usage errors only; their common base is all that is needed
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)

_CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended


class OutOfRangeChoice(StrEnum):
    """``--out-of-range``."""

    inf = "inf"
    clamp = "clamp"
    error = "error"


class CastChoice(StrEnum):
    """``--cast``."""

    auto = "auto"
    llvm = "llvm"
    numpy = "numpy"
    device = "device"


class ReaderChoice(StrEnum):
    """``--reader``."""

    auto = "auto"
    mmap = "mmap"
    pread = "pread"
    direct = "direct"


class PageCacheChoice(StrEnum):
    """``--page-cache``."""

    auto = "auto"
    keep = "keep"
    drop = "drop"


class SplitChoice(StrEnum):
    """``--split``."""

    layers = "layers"
    replicate = "replicate"
    balanced = "balanced"


class TransferChoice(StrEnum):
    """``--transfer``."""

    auto = "auto"
    staged = "staged"
    mapped = "mapped"


PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A .safetensors file, a folder, an index.json, the URL of one of these (of a folder: "
        "ending in /), or org/name in the local Hugging Face cache.",
        show_default=False,
    ),
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Most bytes per device: 3GB, 2.5GiB, 80% (of what is free), one size for each device "
        "(3GB,8GB), or DEVICE=SIZE,...  Default: what is free, less a reserve.",
        show_default=False,
    ),
]
DTypeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DTYPE",
        help="float16, checkpoint (as it is there), or PATTERN=DTYPE by tensor name, such as "
        "'*norm*=float32'; repeatable, the first that matches decides. Default: bfloat16 becomes "
        "float16 where the device does not compute in it natively.",
        show_default=False,
    ),
]
OutOfRangeOption = Annotated[
    OutOfRangeChoice,
    typer.Option(
        metavar="WHAT",
        help="What becomes of finite values that the dtype cannot represent: inf, clamp or error.",
    ),
]
CastOption = Annotated[
    CastChoice,
    typer.Option(metavar="ENGINE", help="What casts: auto, llvm, numpy or device."),
]
ReaderOption = Annotated[
    ReaderChoice,
    typer.Option(
        metavar="READER",
        help="How files are read: auto, mmap, pread, or direct (past the page cache).",
    ),
]
PageCacheOption = Annotated[
    PageCacheChoice,
    typer.Option(
        metavar="WHAT",
        help="What becomes of the page cache that the load fills: auto (dropped where memory is "
        "short), keep or drop.",
    ),
]
TransferOption = Annotated[
    TransferChoice,
    typer.Option(
        metavar="WAY",
        help="How bytes get to a GPU: auto, staged (through page-locked memory) or mapped "
        "(straight from the page cache).",
    ),
]
MappingOption = Annotated[
    str | None,
    typer.Option(
        metavar="FAMILY",
        help=f"Rename and reorder a family's tensors: {' or '.join(MAPPINGS)}.",
        show_default=False,
    ),
]
ReserveOption = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="What stays free on each device or node, of its budget: for activations and others.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Leave room for the KV cache of so many tokens, for the layers that a device or node "
        "holds, as config.json tells.",
        show_default=False,
    ),
]
BatchOption = Annotated[
    int, typer.Option(metavar="N", help="With --context: how many sequences at once.")
]
CacheDTypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="With --context: the dtype of the cache. Default: that of the weights.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


@app.command()
def inspect(path: PathArgument, as_json: JsonOption = False) -> None:
    """Show what a checkpoint holds. Reads headers only."""
    checkpoint = open_checkpoint(path)
    if as_json:
        _print_json(
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
            }
        )
        return
    _print_inspection(checkpoint)


def _print_inspection(checkpoint: Checkpoint) -> None:
    kinds: Counter[str] = Counter()
    rows = []
    for info in checkpoint.tensors.values():
        kinds[info.dtype.name] += info.nbytes
        shape = " x ".join(map(str, info.shape)) or "scalar"
        rows.append((info.name, info.dtype.name, shape, format_bytes(info.nbytes)))
    by_dtype = ", ".join(f"{name} {format_bytes(n)}" for name, n in kinds.most_common())
    _print(
        *format_table(("tensor", "dtype", "shape", "bytes"), rows, right=1),
        f"{len(rows)} tensors in {len(checkpoint.shards)} "
        f"file{'s' * (len(checkpoint.shards) != 1)}, {format_bytes(checkpoint.nbytes)}"
        + (f": {by_dtype}" if by_dtype else ""),
        *(f"metadata {key}: {value}" for key, value in checkpoint.metadata.items()),
    )


@app.command()
def plan(
    path: PathArgument,
    budget: BudgetOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A device, or several separated by commas: their layers are split.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|NAMES",
            help="Split the layers over nodes: how many, or their names separated by commas. With "
            "--budget one size for all, or one for each.",
            show_default=False,
        ),
    ] = None,
    dtype: DTypeOption = None,
    out_of_range: OutOfRangeOption = OutOfRangeChoice.inf,
    cast: CastOption = CastChoice.auto,
    reader: ReaderOption = ReaderChoice.auto,
    page_cache: PageCacheOption = PageCacheChoice.auto,
    transfer: TransferOption = TransferChoice.auto,
    mapping: MappingOption = None,
    reserve: ReserveOption = "0",
    context: ContextOption = None,
    batch: BatchOption = 1,
    cache_dtype: CacheDTypeOption = None,
    bars: Annotated[
        bool | None,
        typer.Option(
            "--bars/--no-bars",
            help="Draw a bar for each device or node. Default: where stdout is a terminal.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw an SVG chart there.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a load would do, and whether it fits. Reads headers only."""
    names = _names(device)
    over = _nodes(nodes, budget, device)
    asked = SplitOptions(
        dtype=_dtype(dtype),
        out_of_range=out_of_range.value,
        cast=cast.value,
        reader=reader.value,
        page_cache=page_cache.value,
        transfer=transfer.value,
        mapping=mapping,
        reserve=reserve,
        context=context,
        batch=batch,
        cache_dtype=cache_dtype,
    )
    if over is not None:
        made = split(path, nodes=over, **asked)
    else:
        where = names if len(names) > 1 else device
        made = make_plan(path, budget=_budget(budget, names), device=where, **asked)
    if plot is not None:
        total = f"{format_bytes(made.resident_nbytes)} of weights, {made.path}"
        title = "What each device or node holds"
        drawn = draw_stacks(title, _printable(total), _PARTS, _stacks(made))
        Path(plot).write_text(drawn, encoding="utf-8")
    if as_json:
        _print(made.to_json())
        return
    _print(*str(made).splitlines())
    if bars if bars is not None else sys.stdout is not None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        _print("", *draw_text(_PARTS, _stacks(made), width=width, marks=_marks()))


#: The parts of a device's budget, from left to right.
_PARTS = ("weights", "KV cache", "while loading", "reserve", "free")


def _stacks(made: Plan) -> list[Stack]:
    """What becomes of the budget of each device; what a load takes meanwhile may be the cache's."""
    stacks = []
    for d in made.devices:
        loading = d.needed_nbytes - d.run_nbytes
        free = d.budget_nbytes - d.needed_nbytes
        parts = (d.resident_nbytes, d.cache_nbytes, loading, d.reserve_nbytes, free)
        label = f"{format_bytes(d.stated_nbytes - free)} of {format_bytes(d.stated_nbytes)}"
        stacks.append(Stack(_printable(d.device), parts, label))
    return stacks


def _marks() -> str:
    """What bars are drawn with, where stdout shows it."""
    try:
        BLOCKS.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return ASCII
    return BLOCKS


def _names(device: str | None) -> list[str]:
    names = [name.strip() for name in device.split(",")] if device is not None else []
    if not all(names):
        raise typer.BadParameter(f"--device: expected names separated by commas, found {device!r}")
    return names


def _nodes(text: str | None, budget: str | None, device: str | None) -> list[Node] | None:
    if text is None:
        several = budget is not None and "," in budget and "=" not in budget and device is None
        return _nodes(str(len((budget or "").split(","))), budget, None) if several else None
    if device is not None:
        raise typer.BadParameter("--nodes and --device exclude each other")
    if budget is None:
        raise typer.BadParameter("--nodes needs --budget: one size for all nodes, or one for each")
    if text.lstrip("+-").isdecimal():
        if not 1 <= int(text) <= 100_000:
            raise typer.BadParameter(f"--nodes: {text} is not from 1 to 100,000")
        names = [f"node{i}" for i in range(int(text))]
    else:
        names = [name.strip() for name in text.split(",")]
        if not all(names):
            raise typer.BadParameter(f"--nodes: expected a number or names, found {text!r}")
    sizes = budget.split(",")
    if len(sizes) == 1:
        sizes *= len(names)
    if len(sizes) != len(names):
        raise typer.BadParameter(f"{len(sizes)} budgets for {len(names)} nodes")
    return [Node(name, size.strip()) for name, size in zip(names, sizes, strict=True)]


@app.command()
def load(
    path: PathArgument,
    budget: BudgetOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A device (CL, CPU and so on are tinygrad's; cuda:0, cpu and so on torch's; "
            "host), several separated by commas, or auto. Default: STREAMLOAD_DEVICE, or "
            "tinygrad's own choice.",
            show_default=False,
        ),
    ] = None,
    dtype: DTypeOption = None,
    out_of_range: OutOfRangeOption = OutOfRangeChoice.inf,
    cast: CastOption = CastChoice.auto,
    reader: ReaderOption = ReaderChoice.auto,
    page_cache: PageCacheOption = PageCacheChoice.auto,
    transfer: TransferOption = TransferChoice.auto,
    mapping: MappingOption = None,
    reserve: ReserveOption = "0",
    context: ContextOption = None,
    batch: BatchOption = 1,
    cache_dtype: CacheDTypeOption = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every tensor back and compare it with plain reads and the numpy cast.",
        ),
    ] = False,
    split: Annotated[
        SplitChoice,
        typer.Option(help="Over nodes: layers to each, everything to all, or by bytes alone."),
    ] = SplitChoice.layers,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Over nodes: how soon the loss of one is known."),
    ] = 60.0,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Load a checkpoint onto a device, and report what that took.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment, each rank loads its part, and rank 0 reports for all.
    """
    names = _names(device)
    asked: dict[str, Any] = {
        "budget": _budget(budget, names),
        "dtype": _dtype(dtype),
        "out_of_range": out_of_range.value,
        "cast": cast.value,
        "reader": reader.value,
        "page_cache": page_cache.value,
        "transfer": transfer.value,
        "mapping": mapping,
        "reserve": reserve,
        "context": context,
        "batch": batch,
        "cache_dtype": cache_dtype,
        "progress": False if no_progress else "auto",
    }
    launch = find_launch()
    silent = False
    if launch is not None and launch.size != 1:
        if len(names) > 1:
            raise ValueError("over nodes, each rank loads to one device: start a rank for each")
        from streamload import distributed  # its engines are not always installed

        report = distributed.load_state_dict(
            None,
            path,
            device=device,
            split=split.value,
            timeout=timeout,
            verify="none" if verify else "crc32",  # every byte is compared below
            **asked,
        )
        silent = launch.rank > 0
    else:
        report = load_state_dict(None, path, device=names if len(names) > 1 else device, **asked)
    problems: list[str] = []
    if verify:
        from streamload.verify import verify as compare

        problems = [str(m) for m in compare(report, open_checkpoint(path))]
    if as_json and not silent:
        data = json.loads(report.to_json())
        if verify:
            data["verified"] = not problems
            data["mismatches"] = problems
        _print_json(data)
    elif not silent:
        _print(*str(report).splitlines())
        if verify and not problems:
            _print(f"verified: {len(report.plan.placements)} tensors, byte by byte")
    if problems:
        _complain(f"{len(problems)} tensors differ from the checkpoint: {'; '.join(problems[:3])}")
        raise typer.Exit(1)


@app.command()
def devices(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME...", help="Devices to look at.  [default: all]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute on every device and show what works. Takes seconds for each."""
    found = []
    for owner_name, name in _wanted(names):
        try:
            owner = framework(owner_name)
        except DeviceNotFoundError as error:
            found.append({"device": owner_name, "works": False, "problem": str(error)})
            continue
        for one in owner.candidates() if name is None else [owner.canonical(name)]:
            result = probe(owner.name, one, full=True)
            row: dict[str, Any] = {"framework": owner.name, **asdict(result)}
            if result.works:
                info = asdict(owner.device(one).info)
                if info["shared_memory"]:  # what it has is the host's, and so is its limit
                    free = (info["free_nbytes"], available_host_nbytes())
                    info["free_nbytes"] = min(n for n in free if n is not None)
                info["unsupported"] = sorted(info["unsupported"])
                row["info"] = info
            found.append(row)
    if as_json:
        _print_json(found)
    else:
        _print(*_listed(found))
    if names and not all(row["works"] for row in found):
        raise typer.Exit(1)


def _wanted(names: Sequence[str] | None) -> list[tuple[str, str | None]]:
    """(framework, device) of what was asked for; None stands for all devices."""
    if not names:
        return [(name, None) for name in ("tinygrad", "torch", "host") if installed(name)]
    split = [split_name(name) for name in names]
    return [(owner or spelled_as(name), name or None) for owner, name in split]


def _listed(found: Sequence[dict[str, Any]]) -> Iterable[str]:
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


def _budget(text: str | None, devices: Sequence[str]) -> str | dict[str, str | None] | None:
    if text is None or ("=" not in text and "," not in text):
        return text
    parts = text.split(",")
    if "=" not in text:
        if len(parts) != len(devices):
            raise typer.BadParameter(
                f"--budget: {len(parts)} sizes for {len(devices)} devices named by --device"
            )
        parts = [f"{name}={size}" for name, size in zip(devices, parts, strict=True)]
    out: dict[str, str | None] = {}
    for part in parts:
        name, _, size = part.rpartition("=")
        if not name.strip():
            raise typer.BadParameter(f"--budget: expected DEVICE=SIZE, found {part!r}")
        out[name.strip()] = size.strip()
    return out


def _dtype(values: list[str] | None) -> str | dict[str, str] | None:
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    rules: dict[str, str] = {}
    for value in values:
        pattern, _, dtype = value.rpartition("=")
        rules.setdefault(pattern or "*", dtype)
    return rules


@app.command()
def bench(
    path: PathArgument,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A device, as load has them. Default: STREAMLOAD_DEVICE, or the first that works "
            "of cuda:0, CL, cpu, CPU and host.",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option(metavar="N", help="Processes of each loader, in turn.")] = 5,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Loaders to compare with, separated by commas; none for none. Default: all that "
            "load to the device.",
            show_default=False,
        ),
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also with the files dropped from the page cache.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="What all floats become.")
    ] = "checkpoint",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most bytes that streamload may take on the device.",
            show_default=False,
        ),
    ] = None,
    cores: Annotated[
        int, typer.Option(metavar="N", help="CPUs that each process may use; 0 for all.")
    ] = 0,
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="Import a loader from a folder, to compare another version of it; repeatable.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most time for one load.")
    ] = 600.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Begin no further round after so long, warm and cold each.",
            show_default=False,
        ),
    ] = None,
    limits: Annotated[
        bool, typer.Option(help="Measure what the machine could do at most, too.")
    ] = True,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write all figures there.", show_default=False),
    ] = None,
    svg_file: Annotated[
        str | None,
        typer.Option("--svg", metavar="FILE", help="Draw a chart there.", show_default=False),
    ] = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
) -> None:
    """Compare loaders on one checkpoint and device.

    Each load is a process of its own. Loaders that are not installed or do not work are named,
    with the reason.
    """
    from streamload.bench.compare import Options, compare
    from streamload.bench.loaders import OURS

    pairs = [entry.partition("=") for entry in site or ()]
    if not all(name and folder for name, _, folder in pairs):
        raise typer.BadParameter(f"--site: expected NAME=FOLDER, found {', '.join(site or ())}")
    named = None
    if peers is not None:
        named = () if peers == "none" else tuple(name.strip() for name in peers.split(","))
    found = compare(
        Options(
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
            say=(lambda text: None) if no_progress else _complain,
        )
    )
    if json_file:
        Path(json_file).write_text(json.dumps(found.to_json(), indent=2) + "\n")
    if svg_file:
        Path(svg_file).write_text(found.svg())
    _print(*found.lines())
    if OURS not in found.loaders:
        raise typer.Exit(1)


SelectOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Only tensors whose name matches, such as 'model.layers.*'; repeatable.",
        show_default=False,
    ),
]
ExcludeOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN", help="Not tensors whose name matches; repeatable.", show_default=False
    ),
]
BecameOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="What the floats of the first are cast to before they are compared: float16, or "
        "PATTERN=DTYPE by tensor name; repeatable. Default: nothing is cast.",
        show_default=False,
    ),
]
RenamedOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        metavar="FROM=TO",
        help="What names of the first are in the second, with * for any text; repeatable.",
        show_default=False,
    ),
]


@app.command()
def verify(
    path: PathArgument,
    converted: Annotated[
        str | None,
        typer.Argument(
            metavar="CONVERTED",
            help="What PATH was converted to. Without it, PATH is checked against its "
            "streamload.json.",
            show_default=False,
        ),
    ] = None,
    dtype: BecameOption = None,
    out_of_range: OutOfRangeOption = OutOfRangeChoice.inf,
    rename: RenamedOption = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint's digests, or a conversion.

    Reads every byte. A conversion is compared with what numpy makes of the first checkpoint.
    """
    from streamload.compare import Comparison, Verification, diff, verify_checkpoint

    progress: Progress = False if no_progress else "auto"
    found: Comparison | Verification
    if converted is not None:
        found = diff(
            path,
            converted,
            dtype=_dtype(dtype),
            out_of_range=out_of_range.value,
            rename=_renames(rename),
            select=select or (),
            exclude=exclude or (),
            progress=progress,
        )
    elif dtype or rename or out_of_range is not OutOfRangeChoice.inf:
        raise typer.BadParameter("--dtype, --out-of-range and --rename need CONVERTED")
    else:
        found = verify_checkpoint(
            path, select=select or (), exclude=exclude or (), progress=progress
        )
    *lines, verdict = found.lines()
    if as_json:
        _print(found.to_json())
    else:
        _print(*lines, *[verdict] * found.ok)
    if not found.ok:
        _complain(verdict)
        raise typer.Exit(1)


@app.command("diff")
def show_differences(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as PATH of inspect.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    dtype: BecameOption = None,
    out_of_range: OutOfRangeOption = OutOfRangeChoice.inf,
    rename: RenamedOption = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List what differs between two checkpoints.

    Names, dtypes, shapes and values, whatever files the tensors are in. The exit code is 0 where
    nothing differs and 1 where something does.
    """
    from streamload.compare import diff

    found = diff(
        first,
        second,
        dtype=_dtype(dtype),
        out_of_range=out_of_range.value,
        rename=_renames(rename),
        select=select or (),
        exclude=exclude or (),
        progress=False if no_progress else "auto",
    )
    if as_json:
        _print(found.to_json())
    else:
        _print(*found.lines())
    if not found.ok:
        raise typer.Exit(1)


def _renames(values: list[str] | None) -> Rename | None:
    return RenamePatterns.parse(values) if values else None


@app.command()
def convert(
    path: PathArgument,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A folder; made where there is none.")
    ],
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DTYPE",
            help="What floats become: float16, checkpoint (as it is there), or PATTERN=DTYPE by "
            "tensor name, such as '*norm*=float32'; repeatable, the first that matches decides. "
            "Default: nothing is cast.",
            show_default=False,
        ),
    ] = None,
    out_of_range: OutOfRangeOption = OutOfRangeChoice.inf,
    max_shard_size: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Most bytes of a file, unless one tensor is larger."),
    ] = DEFAULT_SHARD_SIZE,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|NAMES",
            help="One folder for each node, with the layers that fit it: how many, or their names "
            "separated by commas.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --nodes: most bytes that a node holds, one size for all or one for each "
            "(3GB,3GB,6GB).",
            show_default=False,
        ),
    ] = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM=TO",
            help="What a name becomes, with * for any text: 'model.*=*'; repeatable, the first "
            "that matches decides.",
            show_default=False,
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue what was left unfinished there.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the checkpoint that is there, when all is written: every safetensors "
            "file, index and config.json, what an earlier conversion copied, and its folders of "
            "nodes. Or begin an unfinished conversion again.",
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read back what was written, before it is published.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be written; write nothing.")
    ] = False,
    no_progress: Annotated[bool, typer.Option("--no-progress", help="Show no progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint in other dtypes, files or names.

    Or split over nodes; in little memory, whatever its size. A conversion that was interrupted
    continues with --resume.
    """
    if budget is not None and nodes is None and "," not in budget:
        raise typer.BadParameter("--budget needs --nodes")
    report = convert_checkpoint(
        path,
        destination,
        dtype=_dtype(dtype),
        out_of_range=out_of_range.value,
        max_shard_size=max_shard_size,
        nodes=_nodes(nodes, budget, None),
        select=select or (),
        exclude=exclude or (),
        rename=_renames(rename),
        resume=resume,
        overwrite=overwrite,
        verify=verify,
        dry_run=dry_run,
        progress=False if no_progress else "auto",
    )
    _print(*([report.to_json()] if as_json else str(report).splitlines()))


# --- output ---------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    """Text from a file, without what a terminal would obey: names may hold any character."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _print(*lines: str) -> None:
    """Write lines to stdout; ends the program quietly where nobody reads them any more."""
    if sys.stdout is None:  # closed by the shell: nobody wants to read
        return
    try:
        for line in lines:
            print(_printable(line))
        sys.stdout.flush()
    except BrokenPipeError:
        # what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_CLOSED_PIPE) from None


def _print_json(data: Any) -> None:
    _print(json.dumps(data))


def _complain(message: str) -> None:
    if sys.stderr is None:  # closed by the shell: nobody wants to read
        return
    with suppress(OSError):  # a full disk must not change the exit code
        print(f"streamload: {_printable(' '.join(message.split()))}", file=sys.stderr)


def _without_secrets(message: str) -> str:
    """What is wrong with the arguments, without the secrets in those that are URLs."""
    for argument in sys.argv[1:]:
        for text in (argument, argument.partition("=")[2]):  # of --option=text
            if (shown := without_secrets(text)) != text:
                # typer writes what is not printable in a way of its own
                typed = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
                for said in (text, typed, repr(text)[1:-1]):
                    message = message.replace(said, shown)
    return message


def _show_warning(message: Warning | str, *rest: Any, **more: Any) -> None:
    _complain(f"warning: {message}")


def main() -> None:
    """Run a command; the entry point of ``streamload``."""
    _open_closed_streams()
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("streamload").setLevel(logging.INFO)
    warnings.showwarning = _show_warning
    if hasattr(sys.stdout, "reconfigure"):  # a name that the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    ended_before = False
    try:
        ended_before = raise_interrupts()
        code = app(sys.argv[1:] or ["--help"], prog_name="streamload", standalone_mode=False)
    except BudgetError as error:
        code, message = 3, str(error)
    except (KeyboardInterrupt, typer.Abort):
        code, message = 130, "interrupted"
    except (StreamloadError, OSError) as error:
        code, message = 1, str(error)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "streamload"
        code, message = 2, f"{_without_secrets(error.format_message())} (see {command} --help)"
    except ValueError as error:  # an argument that could not be read
        code, message = 2, _without_secrets(str(error))
    else:
        # typer makes an exit code of Ctrl-C itself
        message = "interrupted" if code == 130 else ""
    if ended_before:
        end_by_interrupts()
    if message:
        _complain(message)
    sys.exit(code or 0)


def _open_closed_streams() -> None:
    """Have no file that a command opens take the place of stdin, stdout or stderr.

    Libraries in C write there whatever it is.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
