"""Arguments that several commands take, and functions that parse them."""

# annotations are evaluated here, once: two commands read them

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

import typer

from streamload.checkpoint.fetch import revised
from streamload.checkpoint.open import CheckpointLike, open_checkpoint
from streamload.cli.output import be_quiet
from streamload.codecs.cast_table import OutOfRange
from streamload.conversion.rename import RenamePatterns
from streamload.core.location import is_url
from streamload.errors import BudgetError, Fit, PlanInfeasibleError
from streamload.files.hub import Fetch
from streamload.files.local import ReaderKind
from streamload.files.page_cache import PageCacheKind
from streamload.loading.options import CastArgument, takes
from streamload.planning.partition import Node
from streamload.planning.planner import Residence
from streamload.planning.quant_policy import QuantArgument
from streamload.planning.sources import MAPPINGS, Rename


def option(metavar: str | None, text: str, *names: str) -> Any:
    """Return an option of a command, with a value.

    Args:
        metavar: name of the value in the help; None: that of its type.
        text: the help.
        *names: names of the option; without, the parameter's name.
    """
    return typer.Option(*names, metavar=metavar, help=text)


def switch(name: str, text: str) -> Any:
    """Return an option of a command without a value; ``text`` is its help."""
    return typer.Option(name, help=text)


PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A file (.safetensors, .gguf, .pth, .bin, .pt, .irpa), a folder, an index.json, "
        "the URL of one of these (http, https, s3, gs, az; of a folder: ending in /), or a "
        "repository of the Hugging Face Hub: org/name, org/name@revision, hf://org/name/file.",
    ),
]
RevisionOption = Annotated[
    str | None,
    option("NAME", "Of a repository of the Hugging Face Hub, a branch, a tag or a commit."),
]
VariantOption = Annotated[
    str | None,
    option(
        "NAME",
        "Of a folder, the files with this in their names: fp16 for model.fp16.safetensors. "
        "Default: those without.",
    ),
]
KeyOption = Annotated[
    str | None,
    option(
        "KEY",
        "Of a file that torch.save wrote or a DCP folder, the dict of the tensors: state_dict, or "
        "ema.state_dict for one inside another. Default: the only one.",
    ),
]
LikeOption = Annotated[
    str | None,
    option(
        "PATH",
        "Of a .irpa file that has no dtypes and shapes, a checkpoint with tensors of the same "
        "names that has them.",
    ),
]
OutOfRangeOption = Annotated[
    OutOfRange,
    option(
        "WHAT",
        "How to cast finite values that the dtype cannot represent: inf, clamp or error.",
    ),
]
SelectOption = Annotated[
    list[str] | None,
    option("PATTERN", "Only tensors whose name matches, such as 'model.layers.*'; repeatable."),
]
ExcludeOption = Annotated[
    list[str] | None, option("PATTERN", "Not tensors whose name matches; repeatable.")
]
AdapterOption = Annotated[
    list[str] | None,
    option(
        "PATH[=SCALE]",
        "Merge a LoRA adapter as peft saves it, its products times SCALE (1); repeatable.",
    ),
]
TokensOption = Annotated[
    int | None,
    option("N", "With --offload: leave memory for the activations of a pass of so many tokens."),
]
StayOption = Annotated[
    list[str] | None,
    option("PATTERN", "With --offload: parameters that stay, such as 'lm_head.*'; repeatable."),
]
LayersOption = Annotated[
    list[str] | None,
    option(
        "PATTERN",
        "With --offload: modules that are layers, if names do not show it; repeatable.",
    ),
]
HostOption = Annotated[
    str | None,
    option("SIZE", "With --offload: most bytes of layers to keep in host memory, such as 8GB."),
]
NoProgressOption = Annotated[bool, switch("--no-progress", "Show no progress.")]
JsonOption = Annotated[bool, switch("--json", "Print JSON on stdout.")]
#: ``--quiet`` of commands that print a result.
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=be_quiet, help="Print the result and errors alone, no notes."
    ),
]
#: ``--quiet`` of commands that change something, and report.
SilentOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=be_quiet, help="Print errors alone, and what --json asks for."
    ),
]


class SourceFlags(TypedDict, total=False):
    """The options of commands that open PATH."""

    revision: RevisionOption
    variant: VariantOption
    key: KeyOption
    like: LikeOption


class LoadFlags(SourceFlags, total=False):
    """The options of the commands ``load`` and ``plan`` that are options of a load."""

    budget: Annotated[
        str | None,
        option(
            "SIZE",
            "Most bytes per device: 3GB, 2.5GiB, 80% (of what is free), one size for each device "
            "(3GB,8GB), or DEVICE=SIZE,...  Default: what is free, less a reserve.",
        ),
    ]
    device: Annotated[
        str | None,
        option(
            "NAME",
            "A device (CL, CPU and so on are tinygrad's; cuda:0, cpu and so on torch's; host), "
            "several separated by commas (the layers are split over them), or auto. Default: "
            "STREAMLOAD_DEVICE, or the choice of tinygrad (where it is not installed, of torch).",
        ),
    ]
    residence: Annotated[
        Residence,
        option(
            "WHERE",
            "memory, mapped (weights stay in the files, where the CPU computes), or auto (those "
            "that can).",
        ),
    ]
    dtype: Annotated[
        list[str] | None,
        option(
            "DTYPE",
            "float16, checkpoint (as it is there), or PATTERN=DTYPE by tensor name, such as "
            "'*norm*=float32'; repeatable, the first that matches decides. Default: bfloat16 "
            "becomes float16 if the device does not compute in it natively.",
        ),
    ]
    quant: Annotated[
        list[str] | None,
        option(
            "FORMAT",
            "Quantize the weights of layers: q8_0, int8, nf4, fp4, q4_0, stored (GGUF's blocks as "
            "they are), auto (what fits and loses least), or PATTERN=FORMAT (or =none) by tensor "
            "name; repeatable.",
        ),
    ]
    out_of_range: OutOfRangeOption
    cast: Annotated[CastArgument, option("ENGINE", "Cast by: auto, llvm, numpy or device.")]
    reader: Annotated[
        ReaderKind,
        option("READER", "How files are read: auto, mmap, pread, or direct (past the page cache)."),
    ]
    fetch: Annotated[
        Fetch,
        option(
            "HOW",
            "How files of the Hugging Face Hub are read: stream (the bytes that are needed, "
            "nothing stays on the disk), cache (downloaded to its local cache), or auto (cache "
            "where the disk has room).",
        ),
    ]
    page_cache: Annotated[
        PageCacheKind,
        option(
            "WHAT",
            "What to do with the page cache that the load fills: auto (drop it if memory is "
            "short), keep or drop.",
        ),
    ]
    mapping: Annotated[
        str | None,
        option("FAMILY", f"Rename and reorder a family's tensors: {' or '.join(MAPPINGS)}."),
    ]
    reserve: Annotated[
        str,
        option(
            "SIZE",
            "Bytes of the budget to leave free on each device or node: for activations and others.",
        ),
    ]
    context: Annotated[
        int | None,
        option(
            "TOKENS",
            "Leave memory for the KV cache of so many tokens, for the layers that a device or node "
            "has, by config.json.",
        ),
    ]
    batch: Annotated[int, option("N", "With --context: how many sequences at once.")]
    cache_dtype: Annotated[
        str | None,
        option("DTYPE", "With --context: the dtype of the cache. Default: that of the weights."),
    ]


#: Options of loads that `read_flags` parses.
_LOADS = LoadFlags.__annotations__.keys() - SourceFlags.__annotations__.keys()
#: Decorator of commands with ``**given: Unpack[...]``: these options, and those of loads.
command = takes(
    dict.fromkeys(
        (
            *SourceFlags.__annotations__,
            *("tokens", "stay", "layers", "host", "rate", "bars", "plot"),
            *("runtime", "max_shard_size", "nodes", "adapter", "imatrix", "select", "exclude"),
        )
    )
    | {"to": "safetensors"}
    | dict.fromkeys(("resume", "overwrite", "verify", "dry_run"), False)
)


def as_flags(error: BudgetError) -> BudgetError:
    """Return an error whose suggestions are written as flags of a command, not as Python."""
    if not isinstance(error, PlanInfeasibleError):
        return error
    fits = [_as_flag(fit) if isinstance(fit, Fit) else fit for fit in error.would_fit]
    return replace(error, would_fit=[fit for fit in fits if fit])


def _as_flag(fit: Fit) -> str:
    """Return a suggestion as flags of a command; "" if no flag can do it."""
    if fit.option == "budget":
        return ""
    values = [each.strip(' "') for each in fit.rest[1:].strip("[]").split(",")]
    if fit.option == "layers":  # in quotes, which a shell needs
        return Fit(" ".join(f"--layers {each}" for each in values), "", fit.needs)
    if not fit.rest.startswith("="):
        return fit
    return Fit(f"--{fit.option} {','.join(values)}".replace("'", ""), "", fit.needs)


def refuse_without_offload(given: Mapping[str, object]) -> None:
    """Raise BadParameter if one of these flags, which need ``--offload``, has a value."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise typer.BadParameter(f"{' and '.join(names)}: only with --offload")


def read_revision(path: str, revision: str | None) -> str:
    """Return ``PATH`` with the revision of ``--revision``; BadParameter if it can have none."""
    found = os.fsdecode(revised(path, revision))
    if revision is not None and found == path and not path.endswith(f"@{revision}"):
        raise typer.BadParameter(f"--revision: {path} is no repository, or names another revision")
    return found


def read_path(path: str, given: SourceFlags) -> CheckpointLike:
    """Return ``PATH`` as it is, or its opened checkpoint if an option to open it was given."""
    path = read_revision(path, given["revision"])
    variant, key, like = given["variant"], given["key"], given["like"]
    if variant is None and key is None and like is None:
        return path
    return open_checkpoint(path, variant=variant, key=key, like=like)


def read_flags(flags: LoadFlags) -> dict[str, Any]:
    """Return the parsed options of a load besides device, budget and residence."""
    names = _LOADS - {"budget", "device", "residence"}
    options: dict[str, Any] = {n: value for n, value in flags.items() if n in names}
    parsed = {"dtype": read_rules(flags["dtype"]), "quant": read_quant(flags["quant"])}
    return options | parsed


def read_place(flags: LoadFlags) -> dict[str, Any]:
    """Return the options device, budget and residence of a load, parsed."""
    names = read_names(flags["device"])
    device = names if len(names) > 1 else flags["device"]
    budget = _read_budget(flags["budget"], names)
    return {"device": device, "budget": budget, "residence": flags["residence"]}


def read_names(device: str | None) -> list[str]:
    """Return the names in ``--device``, which commas separate; BadParameter for an empty one."""
    names = [name.strip() for name in device.split(",")] if device is not None else []
    if not all(names):
        raise typer.BadParameter(f"--device: expected names separated by commas, found {device!r}")
    return names


def _read_budget(text: str | None, devices: Sequence[str]) -> str | dict[str, str | None] | None:
    """Return the value of ``--budget``, by device if there are several sizes."""
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


def read_nodes(text: str | None, budget: str | None, device: str | None) -> list[Node] | None:
    """Return the nodes of ``--nodes`` with their budgets, or one for each size of ``--budget``.

    None without ``--nodes`` and with at most one size.
    """
    if text is None:
        several = budget is not None and "," in budget and "=" not in budget and device is None
        return read_nodes(str(len((budget or "").split(","))), budget, None) if several else None
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


def read_quant(values: list[str] | None) -> QuantArgument:
    """Return the value of ``--quant``: a format, or formats by pattern of names ("none": None)."""
    rules = read_rules(values)
    if not isinstance(rules, dict):
        return rules
    return {pattern: None if name == "none" else name for pattern, name in rules.items()}


def read_rules(values: list[str] | None) -> str | dict[str, str] | None:
    """Return one value for all names, values by pattern ("PATTERN=VALUE"), or None if not given."""
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    rules: dict[str, str] = {}
    for value in values:
        pattern, _, dtype = value.rpartition("=")
        rules.setdefault(pattern or "*", dtype)
    return rules


def read_renames(values: list[str] | None) -> Rename | None:
    """Return a function from old to new names by the patterns of ``--rename``; None without any."""
    return RenamePatterns.parse(values) if values else None


def read_adapters(values: list[str] | None) -> list[tuple[str, float]]:
    """Return paths and scales of ``--adapter``; text behind the last "=" is a scale if a number."""
    out = []
    for value in values or ():
        path, _, scale = value.rpartition("=")
        if is_url(value) and "?" in path:  # the rest is of the query
            path = ""
        try:
            out.append((path, float(scale)) if path else (value, 1.0))
        except ValueError:
            out.append((value, 1.0))
    return out
