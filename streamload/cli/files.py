"""The commands ``convert``, ``verify`` and ``diff``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack

import typer

from streamload.cli import flags
from streamload.cli.output import complain, print_lines
from streamload.conversion.convert import convert as convert_checkpoint
from streamload.conversion.disk import WORK
from streamload.conversion.rename import RenamePatterns
from streamload.core.location import without_secrets
from streamload.core.progress import Progress
from streamload.verification import diff as compare
from streamload.verification.verify import Verification, verify_checkpoint


class CompareFlags(TypedDict, total=False):
    """The options of ``verify`` and ``diff`` by which the first checkpoint is converted."""

    dtype: Annotated[
        list[str] | None,
        flags.option(
            "DTYPE",
            "Cast the floats of the first before they are compared: float16, or PATTERN=DTYPE by "
            "tensor name; repeatable. Default: nothing is cast.",
            "--dtype",
        ),
    ]
    quant: Annotated[
        list[str] | None,
        flags.option(
            "FORMAT",
            "Quantize weights of the first before they are compared, as --quant of convert does; "
            "repeatable.",
            "--quant",
        ),
    ]
    out_of_range: flags.OutOfRangeOption
    rename: Annotated[
        list[str] | None,
        flags.option(
            "FROM=TO",
            "Rename tensors of the first as they are named in the second, with * for any text; "
            "repeatable.",
            "--rename",
        ),
    ]
    select: flags.SelectOption
    exclude: flags.ExcludeOption


class VerifyFlags(flags.SourceFlags, CompareFlags, total=False):
    """The options of ``verify``."""


#: Options of commands here that `_parsed` leaves out.
_OTHERS = flags.SourceFlags.__annotations__.keys() | {"nodes", "budget", "adapter"}


def _parsed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `diff` and `convert`, parsed."""
    parsed = {
        "dtype": flags.read_rules(given["dtype"]),
        "quant": flags.read_quant(given["quant"]),
        "rename": flags.read_renames(given["rename"]),
        "select": given["select"] or (),
        "exclude": given["exclude"] or (),
    }
    return {name: value for name, value in given.items() if name not in _OTHERS} | parsed


@flags.command
def verify(
    path: flags.PathArgument,
    *,
    converted: Annotated[
        str | None,
        typer.Argument(
            metavar="CONVERTED",
            help="The result of a conversion of PATH. Without it, PATH is checked against its "
            "streamload.json.",
            show_default=False,
        ),
    ] = None,
    no_progress: flags.NoProgressOption = False,
    as_json: flags.JsonOption = False,
    quiet: flags.SilentOption = False,
    **given: Unpack[VerifyFlags],
) -> None:
    """Check a checkpoint's digests, or a conversion.

    Reads every byte. CONVERTED is compared with the conversion of PATH by numpy: as its
    streamload.json describes, or by the options.
    """
    checkpoint = flags.read_path(path, given)
    progress: Progress = False if no_progress or quiet else "auto"
    found: compare.Comparison | Verification
    how = {key: value for key, value in _parsed(given).items() if value and value != "inf"}
    by = how.keys() & {"dtype", "quant", "rename", "out_of_range"}
    if converted is not None:
        said = compare.made_by(checkpoint, converted)
        if by:
            said = {}
        elif isinstance(said.get("rename"), dict):
            said["rename"] = RenamePatterns(tuple(said["rename"].items()))
        found = compare.diff(checkpoint, converted, **(said | how), progress=progress)
    elif by:
        raise typer.BadParameter("--dtype, --quant, --out-of-range and --rename need CONVERTED")
    else:
        found = verify_checkpoint(checkpoint, **how, progress=progress)
    *lines, verdict = found.lines()
    if as_json:
        print_lines(found.to_json())
    elif not quiet:
        print_lines(*lines, *[verdict] * found.ok)
    if not found.ok:
        complain(verdict)
        raise typer.Exit(1)


@flags.command
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as PATH of inspect.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    *,
    revision: Annotated[
        list[str] | None,
        flags.option("NAME", "A revision of A, a repository; given twice, of A and of B."),
    ] = None,
    no_progress: flags.NoProgressOption = False,
    as_json: flags.JsonOption = False,
    quiet: flags.SilentOption = False,
    **given: Unpack[CompareFlags],
) -> None:
    """List what differs between two checkpoints.

    Names, dtypes, shapes and values are compared, in any files. The exit code is 0 if nothing
    differs, else 1.
    """
    if len(revisions := revision or ()) > 2:
        raise typer.BadParameter("--revision: one for A and one for B at most")
    paths = zip_longest((first, second), revisions)
    found = compare.diff(
        *(flags.read_revision(path or "", name) for path, name in paths),
        **_parsed(given),
        progress=False if no_progress or quiet else "auto",
    )
    if as_json:
        print_lines(found.to_json())
    elif not quiet:
        print_lines(*found.lines())
    if not found.ok:
        raise typer.Exit(1)


class ConvertFlags(flags.SourceFlags, total=False):
    """The options of ``convert``."""

    to: Annotated[
        str, flags.option("NAME", "The format of the files: safetensors, llm.c and others.")
    ]
    runtime: Annotated[
        str | None,
        flags.option(
            "NAME",
            "The runtime that reads the safetensors: candle or mlx. Its further needs are met and "
            "reported.",
            "--for",
        ),
    ]
    dtype: Annotated[
        list[str] | None,
        flags.option(
            "DTYPE",
            "Cast floats to: float16, checkpoint (as it is there), or PATTERN=DTYPE by tensor "
            "name, such as '*norm*=float32'; repeatable, the first that matches decides. "
            "Default: nothing is cast.",
        ),
    ]
    quant: Annotated[
        list[str] | None,
        flags.option(
            "FORMAT",
            "Quantize the weights of layers: nf4, fp4, int8, bitsandbytes-int8, q8_0, q6_k, q4_0, "
            "with --to gguf also q4_k_m, or PATTERN=FORMAT (or =none) by tensor name; repeatable.",
        ),
    ]
    out_of_range: flags.OutOfRangeOption
    max_shard_size: Annotated[
        str | None,
        flags.option(
            "SIZE",
            "Most bytes of a file, unless one tensor is larger. Default: usual for the format, 5GB "
            "of safetensors.",
        ),
    ]
    nodes: Annotated[
        str | None,
        flags.option(
            "N|NAMES",
            "One folder for each node, with the layers that fit it: how many, or their names "
            "separated by commas.",
        ),
    ]
    budget: Annotated[
        str | None,
        flags.option(
            "SIZE",
            "With --nodes: most bytes that a node holds, one size for all or one for each "
            "(3GB,3GB,6GB).",
        ),
    ]
    select: flags.SelectOption
    exclude: flags.ExcludeOption
    rename: Annotated[
        list[str] | None,
        flags.option(
            "FROM=TO",
            "Rename tensors, with * for any text: 'model.*=*'; repeatable, the first that matches "
            "decides.",
        ),
    ]
    adapter: flags.AdapterOption
    imatrix: Annotated[
        str | None,
        flags.option(
            "FILE",
            "An importance matrix of llama.cpp, by which the K-quants of GGUF are weighted.",
        ),
    ]
    resume: Annotated[
        bool, flags.switch("--resume", "Continue a conversion that was left unfinished there.")
    ]
    overwrite: Annotated[
        bool,
        flags.switch(
            "--overwrite",
            "Replace the checkpoint that is there, when all is written: every safetensors "
            "file, index and config.json, what an earlier conversion copied, and its folders. Or "
            "begin an unfinished conversion again.",
        ),
    ]
    verify: Annotated[
        bool, flags.switch("--verify", "Read all files back before they are published.")
    ]
    dry_run: Annotated[
        bool, flags.switch("--dry-run", "Show what would be written; write nothing.")
    ]


@flags.command
def convert(
    path: flags.PathArgument,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A folder; made if there is none.")
    ],
    *,
    no_progress: flags.NoProgressOption = False,
    as_json: flags.JsonOption = False,
    quiet: flags.SilentOption = False,
    **given: Unpack[ConvertFlags],
) -> None:
    """Write a checkpoint in other dtypes, files, names or formats.

    With --nodes, split the checkpoint over nodes. Takes little memory for any size. An interrupted
    conversion continues with --resume.
    """
    nodes, budget = given["nodes"], given["budget"]
    if budget is not None and nodes is None and "," not in budget:
        raise typer.BadParameter("--budget needs --nodes")
    try:
        report = convert_checkpoint(
            flags.read_path(path, given),
            destination,
            nodes=flags.read_nodes(nodes, budget, None),
            adapters=flags.read_adapters(given["adapter"]),
            progress=False if no_progress or quiet else "auto",
            **_parsed(given),
        )
    except KeyboardInterrupt:
        if Path(destination, WORK, "journal").exists():
            words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
            again = without_secrets(shlex.join(["streamload", *words, "--resume"]))
            complain(f"what is finished is kept; this continues: {again}")
        raise
    if as_json or given["dry_run"] or not quiet:
        print_lines(*([report.to_json()] if as_json else str(report).splitlines()))
