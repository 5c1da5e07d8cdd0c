"""The command load."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Unpack

import typer

from streamload.checkpoint.checkpoint import open_checkpoint
from streamload.cli.flags import (
    JsonOption,
    LoadFlags,
    NoProgressOption,
    PathArgument,
    option,
    read_flags,
    read_place,
    switch,
)
from streamload.cli.output import complain, print_json, print_lines
from streamload.load import load_state_dict
from streamload.nodes.launch import find_launch
from streamload.options import takes


@takes()
def load(
    path: PathArgument,
    *,
    verify: Annotated[
        bool,
        switch(
            "--verify", "Read every tensor back and compare it with plain reads and the numpy cast."
        ),
    ] = False,
    split: Annotated[
        Literal["layers", "replicate", "balanced"],
        option(None, "Over nodes: layers to each, everything to all, or by bytes alone."),
    ] = "layers",
    timeout: Annotated[
        float, option("SECONDS", "Over nodes: how soon the loss of one is known.")
    ] = 60.0,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
    **flags: Unpack[LoadFlags],
) -> None:
    """Load a checkpoint onto a device, and report what that took.

    Under torchrun, mpirun or srun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment, each rank loads its part, and rank 0 reports for all.
    """
    asked = {**read_flags(flags), **read_place(flags)}
    asked["progress"] = False if no_progress else "auto"
    launch = find_launch()
    silent = False
    if launch is not None and launch.size != 1:
        if isinstance(asked["device"], list):
            raise ValueError("over nodes, each rank loads to one device: start a rank for each")
        from streamload import distributed  # its engines are not always installed

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
        report = load_state_dict(None, path, **asked)
    problems: list[str] = []
    if verify:
        from streamload.verify import verify as compare

        problems = [str(m) for m in compare(report, open_checkpoint(path))]
    if as_json and not silent:
        data = json.loads(report.to_json())
        if verify:
            data["verified"] = not problems
            data["mismatches"] = problems
        print_json(data)
    elif not silent:
        print_lines(*str(report).splitlines())
        if verify and not problems:
            print_lines(f"verified: {len(report.plan.placements)} tensors, byte by byte")
    if problems:
        complain(f"{len(problems)} tensors differ from the checkpoint: {'; '.join(problems[:3])}")
        raise typer.Exit(1)
