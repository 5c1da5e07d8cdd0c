"""Commands that compare: verify, diff."""

from __future__ import annotations

from typing import Annotated

import typer

from streamload import compare
from streamload.cli.flags import (
    ExcludeOption,
    JsonOption,
    NoProgressOption,
    OutOfRangeOption,
    PathArgument,
    SelectOption,
    option,
    read_dtype,
    read_renames,
)
from streamload.cli.output import complain, print_lines
from streamload.progress import Progress

BecameOption = Annotated[
    list[str] | None,
    option(
        "DTYPE",
        "What the floats of the first are cast to before they are compared: float16, or "
        "PATTERN=DTYPE by tensor name; repeatable. Default: nothing is cast.",
        "--dtype",
    ),
]
RenamedOption = Annotated[
    list[str] | None,
    option(
        "FROM=TO",
        "What names of the first are in the second, with * for any text; repeatable.",
        "--rename",
    ),
]


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
    out_of_range: OutOfRangeOption = "inf",
    rename: RenamedOption = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a checkpoint's digests, or a conversion.

    Reads every byte. A conversion is compared with what numpy makes of the first checkpoint.
    """
    progress: Progress = False if no_progress else "auto"
    found: compare.Comparison | compare.Verification
    if converted is not None:
        found = compare.diff(
            path,
            converted,
            dtype=read_dtype(dtype),
            out_of_range=out_of_range,
            rename=read_renames(rename),
            select=select or (),
            exclude=exclude or (),
            progress=progress,
        )
    elif dtype or rename or out_of_range != "inf":
        raise typer.BadParameter("--dtype, --out-of-range and --rename need CONVERTED")
    else:
        found = compare.verify_checkpoint(
            path, select=select or (), exclude=exclude or (), progress=progress
        )
    *lines, verdict = found.lines()
    if as_json:
        print_lines(found.to_json())
    else:
        print_lines(*lines, *[verdict] * found.ok)
    if not found.ok:
        complain(verdict)
        raise typer.Exit(1)


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint, as PATH of inspect.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    dtype: BecameOption = None,
    out_of_range: OutOfRangeOption = "inf",
    rename: RenamedOption = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    """List what differs between two checkpoints.

    Names, dtypes, shapes and values, whatever files the tensors are in. The exit code is 0 where
    nothing differs and 1 where something does.
    """
    found = compare.diff(
        first,
        second,
        dtype=read_dtype(dtype),
        out_of_range=out_of_range,
        rename=read_renames(rename),
        select=select or (),
        exclude=exclude or (),
        progress=False if no_progress else "auto",
    )
    if as_json:
        print_lines(found.to_json())
    else:
        print_lines(*found.lines())
    if not found.ok:
        raise typer.Exit(1)
