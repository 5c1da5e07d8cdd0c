"""`iterate`: the tensors of a checkpoint one after the other, for loops of the caller's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from streamload.checkpoint.checkpoint import Checkpoint, CheckpointLike
from streamload.decide import Decision, Options, Place
from streamload.load import read_call, run, uncollected
from streamload.mapping import Source
from streamload.options import IterateOptions, Strictness, takes
from streamload.report import Clock

# Tensors that are read at once: to plan and to start threads takes some milliseconds.
_TOGETHER_NBYTES = 2**26


@takes(devices='device="cuda:0"')
def iterate(path: CheckpointLike, **options: Unpack[IterateOptions]) -> Iterator[tuple[str, Any]]:
    """Read a checkpoint tensor by tensor, under a budget in bytes, in the order of the files.

    A tensor counts against the budget until the next step. What you keep of it beyond that is
    yours, and so is a name that still refers to it while the next one is read: ``del`` it.

        for name, tensor in streamload.iterate("Llama-3-8B/", budget="1GB", device="cpu"):
            quantised[name] = quantise(tensor)
            del tensor

    Small tensors are read several at a time, which then count together.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        device: one device; see `load_state_dict`.
        **options: see `LoadOptions`.

    Returns:
        An iterator of (name, tensor), with the framework's tensors.

    Raises:
        CheckpointError: the checkpoint is invalid; at a step, a file cannot be read or has changed.
        PlanInfeasibleError: the largest tensor does not fit; before any data is read. Others may
            have taken memory at a step.
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: the device is not there, or does not work.
        ValueError: an argument is invalid.
    """
    checkpoint, read, (fill, _, _) = read_call(path, **options)
    device = options["device"]
    if device is not None and not isinstance(device, str):
        raise ValueError(f"tensors go to one device, one after the other, not to {device!r}")
    if read.quant.is_auto:
        raise ValueError('quant="auto" is for loads of all at once: name a format')
    place = Place.look(None, checkpoint, read, device)
    wants = read.quantised(checkpoint, fill)
    (spec,) = place.specs(read, wants.needs_native_bf16(read.policy))
    nbytes: dict[str, int] = {}
    sizes = wants.nbytes(read.policy, spec.native_bf16)
    for name, size, coding in zip(wants.names, sizes, wants.codings, strict=True):
        if coding is None or not coding.part:
            codes = name
        nbytes[codes] = nbytes.get(codes, 0) + size  # its other parts follow it
    groups = _groups(checkpoint, fill, nbytes, min(_TOGETHER_NBYTES, spec.budget_nbytes // 2))
    if groups:
        largest = max(groups, key=lambda names: sum(nbytes[name] for name in names))
        _decided(place, checkpoint, read, fill, largest)
    return _tensors(place, checkpoint, read, fill, groups)


def _groups(
    checkpoint: Checkpoint, fill: Mapping[str, Source], nbytes: Mapping[str, int], most_nbytes: int
) -> list[list[str]]:
    """Parameters in the order of the files, as many together as fit into ``most_nbytes``."""
    number_of = {header.path: number for number, header in enumerate(checkpoint.shards)}

    def place(name: str) -> tuple[int, int]:
        info = checkpoint.tensors[fill[name].rows[0].tensor]
        return number_of[info.shard], info.start

    groups: list[list[str]] = []
    taken = 0
    for name in sorted(nbytes, key=place):
        if not groups or taken + nbytes[name] > most_nbytes:
            groups.append([])
            taken = 0
        groups[-1].append(name)
        taken += nbytes[name]
    return groups


def _decided(
    place: Place,
    checkpoint: Checkpoint,
    read: Options,
    fill: Mapping[str, Source],
    names: Sequence[str],
) -> Decision:
    """Plan to load some parameters."""
    chosen = {name: fill[name] for name in names}
    shards = {checkpoint.tensors[r.tensor].shard for s in chosen.values() for r in s.rows}
    headers = tuple(header for header in checkpoint.shards if header.path in shards)
    part = replace(checkpoint, shards=headers)
    return Decision.make(place, part, read, (chosen, [], {}), Strictness(), offers=("quant",))


def _tensors(
    place: Place,
    checkpoint: Checkpoint,
    read: Options,
    fill: Mapping[str, Source],
    groups: Sequence[Sequence[str]],
) -> Iterator[tuple[str, Any]]:
    for names in groups:
        with uncollected():
            decided = _decided(place, checkpoint, read, fill, names)
            tensors = run(decided, False, Clock()).state_dict
        for name in list(tensors):
            yield name, tensors.pop(name)
