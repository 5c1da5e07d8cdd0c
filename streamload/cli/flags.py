"""Arguments that several commands take, and functions that parse them."""

# annotations are evaluated here, once: two commands read them

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import typer

from streamload.checkpoint.open import CheckpointLike, open_checkpoint
from streamload.cli.output import be_quiet
from streamload.codecs.cast_table import OutOfRange
from streamload.conversion.rename import RenamePatterns
from streamload.core.location import is_url
from streamload.errors import BudgetError, Fit, PlanInfeasibleError
from streamload.files.hub import revised
from streamload.loading.options import OF_PASSES, OPTIONS, TYPES, shows
from streamload.planning.partition import Node
from streamload.planning.quant_policy import QuantArgument
from streamload.planning.sources import Rename

_Command = TypeVar("_Command", bound=Callable[..., Any])


def option(metavar: str | None, text: str, *names: str) -> Any:
    """Return an option of a command, with a value.

    Args:
        metavar: name of the value in the help; None: that of its type.
        text: the help.
        *names: names of the option; without, the parameter's name.
    """
    return typer.Option(*names, metavar=metavar, help=text)


def flag(name: str) -> Any:
    """Return the flag of an option of a load."""
    found = OPTIONS[name]
    text = " ".join(found.lines).replace('"', "").replace("`", "")
    is_value = found.lines[0].startswith('"')
    return option(found.flag, found.flag_help or (text if is_value else text[0].upper() + text[1:]))


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
OutOfRangeOption = Annotated[OutOfRange, flag("out_of_range")]
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
TokensOption = Annotated[int | None, flag("tokens")]
StayOption = Annotated[list[str] | None, flag("stay")]
LayersOption = Annotated[list[str] | None, flag("layers")]
HostOption = Annotated[str | None, flag("host")]
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
    """The options of the commands ``load`` and ``plan``; `command` adds others of a load."""

    budget: Annotated[str | None, flag("budget")]
    device: Annotated[str | None, flag("device")]


#: Options of loads that are flags, by name.
_LOADS = {n: each for n, each in OPTIONS.items() if each.flag and n not in OF_PASSES}


def command(function: _Command) -> _Command:
    """Show each flag of a command by name in place of ``**given: Unpack[...]``."""
    (dictionary,) = get_args(get_type_hints(function)["given"])
    types = get_type_hints(dictionary, include_extras=True)
    if LoadFlags.__annotations__.keys() <= types.keys():
        types = {name: kind for name, kind in types.items() if name not in _LOADS}
        types |= {name: Annotated[_type(name), flag(name)] for name in _LOADS}
    values = {name: each.default for name, each in _LOADS.items()} | {"to": "safetensors"}
    parameters = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=values.get(name, False if get_args(kind)[0] is bool else None),
            annotation=kind,
        )
        for name, kind in types.items()
    ]
    shows(function, parameters)
    return function


def _type(name: str) -> Any:
    """Return the type of an option's value on the command line."""
    kind, default = TYPES[name], OPTIONS[name].default
    if name in ("dtype", "quant"):
        return list[str] | None
    if get_origin(kind) is Literal or int in (kind, *get_args(kind)):
        return kind
    return str | None if default is None else str


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


def read_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parsed options of a load besides device, budget and residence."""
    names = _LOADS.keys() - {"budget", "device", "residence"}
    options: dict[str, Any] = {n: value for n, value in flags.items() if n in names}
    parsed = {"dtype": read_rules(flags["dtype"]), "quant": read_quant(flags["quant"])}
    return options | parsed


def read_place(flags: Mapping[str, Any]) -> dict[str, Any]:
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
