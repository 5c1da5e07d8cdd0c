"""The command convert."""

from __future__ import annotations

from typing import Annotated

import typer

from streamload.cli.flags import (
    ExcludeOption,
    JsonOption,
    NoProgressOption,
    OutOfRangeOption,
    PathArgument,
    SelectOption,
    option,
    read_dtype,
    read_nodes,
    read_renames,
    switch,
)
from streamload.cli.output import print_lines
from streamload.convert.convert import DEFAULT_SHARD_SIZE
from streamload.convert.convert import convert as convert_checkpoint


def convert(
    path: PathArgument,
    destination: Annotated[
        str, typer.Argument(metavar="DESTINATION", help="A folder; made where there is none.")
    ],
    dtype: Annotated[
        list[str] | None,
        option(
            "DTYPE",
            "What floats become: float16, checkpoint (as it is there), or PATTERN=DTYPE by "
            "tensor name, such as '*norm*=float32'; repeatable, the first that matches decides. "
            "Default: nothing is cast.",
        ),
    ] = None,
    out_of_range: OutOfRangeOption = "inf",
    max_shard_size: Annotated[
        str, option("SIZE", "Most bytes of a file, unless one tensor is larger.")
    ] = DEFAULT_SHARD_SIZE,
    nodes: Annotated[
        str | None,
        option(
            "N|NAMES",
            "One folder for each node, with the layers that fit it: how many, or their names "
            "separated by commas.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        option(
            "SIZE",
            "With --nodes: most bytes that a node holds, one size for all or one for each "
            "(3GB,3GB,6GB).",
        ),
    ] = None,
    select: SelectOption = None,
    exclude: ExcludeOption = None,
    rename: Annotated[
        list[str] | None,
        option(
            "FROM=TO",
            "What a name becomes, with * for any text: 'model.*=*'; repeatable, the first "
            "that matches decides.",
        ),
    ] = None,
    resume: Annotated[bool, switch("--resume", "Continue what was left unfinished there.")] = False,
    overwrite: Annotated[
        bool,
        switch(
            "--overwrite",
            "Replace the checkpoint that is there, when all is written: every safetensors "
            "file, index and config.json, what an earlier conversion copied, and its folders of "
            "nodes. Or begin an unfinished conversion again.",
        ),
    ] = False,
    verify: Annotated[
        bool, switch("--verify", "Read back what was written, before it is published.")
    ] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be written; write nothing.")
    ] = False,
    no_progress: NoProgressOption = False,
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
        dtype=read_dtype(dtype),
        out_of_range=out_of_range,
        max_shard_size=max_shard_size,
        nodes=read_nodes(nodes, budget, None),
        select=select or (),
        exclude=exclude or (),
        rename=read_renames(rename),
        resume=resume,
        overwrite=overwrite,
        verify=verify,
        dry_run=dry_run,
        progress=False if no_progress else "auto",
    )
    print_lines(*([report.to_json()] if as_json else str(report).splitlines()))
