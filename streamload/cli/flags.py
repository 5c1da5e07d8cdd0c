"""Arguments of several commands, and their parsers."""

# annotations are evaluated here, once: two commands read them

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypedDict

import typer

from streamload.checkpoint.open import CheckpointLike, open_checkpoint
from streamload.cli.output import be_quiet
from streamload.codecs.cast_table import OutOfRange
from streamload.conversion.rename import RenamePatterns
from streamload.errors import BudgetError, Fit, PlanInfeasibleError
from streamload.files.local import ReaderKind
from streamload.files.page_cache import PageCacheKind
from streamload.loading.options import CastArgument
from streamload.planning.partition import Node
from streamload.planning.planner import Residence
from streamload.planning.quant_policy import QuantArgument
from streamload.planning.sources import MAPPINGS, Rename


def option(metavar: str | None, text: str, *names: str) -> Any:
    """An option: the name of its value, its help, and its names if not the parameter's."""
    return typer.Option(*names, metavar=metavar, help=text)


def switch(name: str, text: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=text)


PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A file (.safetensors, .gguf, .pth, .bin, .pt, .irpa), a folder, an index.json, "
        "the URL of one of these (of a folder: ending in /), or org/name in the local Hugging "
        "Face cache.",
    ),
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
        "Of a file that torch.save wrote, the dict whose tensors are meant: state_dict, or "
        "ema.state_dict for one inside another. Default: the only one.",
    ),
]
LikeOption = Annotated[
    str | None,
    option(
        "PATH",
        "Of a .irpa file that says no dtypes and shapes, a checkpoint with tensors of the same "
        "names that does.",
    ),
]
OutOfRangeOption = Annotated[
    OutOfRange,
    option(
        "WHAT",
        "What becomes of finite values that the dtype cannot represent: inf, clamp or error.",
    ),
]
SelectOption = Annotated[
    list[str] | None,
    option("PATTERN", "Only tensors whose name matches, such as 'model.layers.*'; repeatable."),
]
ExcludeOption = Annotated[
    list[str] | None, option("PATTERN", "Not tensors whose name matches; repeatable.")
]
TokensOption = Annotated[
    int | None,
    option("N", "With --offload: leave room for what a pass of so many computes."),
]
StayOption = Annotated[
    list[str] | None,
    option("PATTERN", "With --offload: parameters that stay, such as 'lm_head.*'; repeatable."),
]
LayersOption = Annotated[
    list[str] | None,
    option(
        "PATTERN",
        "With --offload: modules that are layers, where names do not tell; repeatable.",
    ),
]
HostOption = Annotated[
    str | None,
    option("SIZE", "With --offload: most bytes of layers that host memory keeps, such as 8GB."),
]
NoProgressOption = Annotated[bool, switch("--no-progress", "Show no progress.")]
JsonOption = Annotated[bool, switch("--json", "Print JSON on stdout.")]
#: Of commands that print a result.
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=be_quiet, help="Print the result and errors alone, no notes."
    ),
]
#: Of commands that change something, and report.
SilentOption = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=be_quiet, help="Print errors alone, and what --json asks for."
    ),
]


class LoadFlags(TypedDict, total=False):
    """The options of a load and its plan; the defaults are those of a load."""

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
            "becomes float16 where the device does not compute in it natively.",
        ),
    ]
    quant: Annotated[
        list[str] | None,
        option(
            "FORMAT",
            "Quantise the weights of layers: q8_0, int8, nf4, fp4, q4_0, auto (what fits and "
            "loses least), or PATTERN=FORMAT (or =none) by tensor name; repeatable.",
        ),
    ]
    out_of_range: OutOfRangeOption
    cast: Annotated[CastArgument, option("ENGINE", "What casts: auto, llvm, numpy or device.")]
    reader: Annotated[
        ReaderKind,
        option("READER", "How files are read: auto, mmap, pread, or direct (past the page cache)."),
    ]
    page_cache: Annotated[
        PageCacheKind,
        option(
            "WHAT",
            "What becomes of the page cache that the load fills: auto (dropped where memory is "
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
            "What stays free on each device or node, of its budget: for activations and others.",
        ),
    ]
    context: Annotated[
        int | None,
        option(
            "TOKENS",
            "Leave room for the KV cache of so many tokens, for the layers that a device or node "
            "holds, as config.json tells.",
        ),
    ]
    batch: Annotated[int, option("N", "With --context: how many sequences at once.")]
    cache_dtype: Annotated[
        str | None,
        option("DTYPE", "With --context: the dtype of the cache. Default: that of the weights."),
    ]


def as_flags(error: BudgetError) -> BudgetError:
    """The error with its suggestions as flags."""
    if not isinstance(error, PlanInfeasibleError):
        return error
    fits = [_as_flag(fit) if isinstance(fit, Fit) else fit for fit in error.would_fit]
    return replace(error, would_fit=[fit for fit in fits if fit])


def _as_flag(fit: Fit) -> str:
    """A change as flags; "" for one without."""
    if fit.option == "budget":
        return ""
    values = [each.strip(' "') for each in fit.rest[1:].strip("[]").split(",")]
    if fit.option == "layers":  # in quotes, which a shell needs
        return Fit(" ".join(f"--layers {each}" for each in values), "", fit.needs)
    if not fit.rest.startswith("="):
        return fit
    return Fit(f"--{fit.option} {','.join(values)}".replace("'", ""), "", fit.needs)


def refuse_without_offload(given: Mapping[str, object]) -> None:
    """Raise BadParameter for flags that need ``--offload``."""
    names = [f"--{name}" for name, value in given.items() if value is not None]
    if names:
        raise typer.BadParameter(f"{' and '.join(names)}: only with --offload")


def read_path(path: str, variant: str | None, key: str | None, like: str | None) -> CheckpointLike:
    """The checkpoint of ``PATH``, opened if a variant, key or shapes are given."""
    if variant is None and key is None and like is None:
        return path
    return open_checkpoint(path, variant=variant, key=key, like=like)


def read_flags(flags: LoadFlags) -> dict[str, Any]:
    """The options of a load without those of `read_place`."""
    options: dict[str, Any] = {**flags, "dtype": read_rules(flags["dtype"])}
    options["quant"] = read_quant(flags["quant"])
    for name in ("budget", "device", "residence"):
        del options[name]
    return options


def read_place(flags: LoadFlags) -> dict[str, Any]:
    """The options device, budget and residence of a load."""
    names = read_names(flags["device"])
    device = names if len(names) > 1 else flags["device"]
    budget = _read_budget(flags["budget"], names)
    return {"device": device, "budget": budget, "residence": flags["residence"]}


def read_names(device: str | None) -> list[str]:
    """The devices of ``--device``."""
    names = [name.strip() for name in device.split(",")] if device is not None else []
    if not all(names):
        raise typer.BadParameter(f"--device: expected names separated by commas, found {device!r}")
    return names


def _read_budget(text: str | None, devices: Sequence[str]) -> str | dict[str, str | None] | None:
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
    """The nodes of ``--nodes``, or one for each size of ``--budget``; None for none."""
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
    """The value of ``--quant``: a format, or formats by pattern."""
    rules = read_rules(values)
    if not isinstance(rules, dict):
        return rules
    return {pattern: None if name == "none" else name for pattern, name in rules.items()}


def read_rules(values: list[str] | None) -> str | dict[str, str] | None:
    """The value of an option, or its values by pattern."""
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
    """The names of ``--rename``."""
    return RenamePatterns.parse(values) if values else None
