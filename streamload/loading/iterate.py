"""`iterate`: the tensors of a checkpoint one after the other, for loops of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from streamload.checkpoint.open import Checkpoint, CheckpointLike
from streamload.loading.load import read_call, run, uncollected
from streamload.loading.options import IterateOptions, takes
from streamload.loading.prepare import Call, Decision, Options, Place
from streamload.loading.report import Clock
from streamload.planning.requests import DeviceSpec
from streamload.planning.sources import Found, Source

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
    read = replace(read, one_device=True)
    place = Place.look(None, checkpoint, read, device)
    wants = read.quantised(checkpoint, fill)
    needs_native = wants.needs_native_bf16(read.policy)
    (spec,) = place.specs(read, needs_native)
    nbytes: dict[str, int] = {}
    sizes = wants.nbytes(read.policy, spec.native_bf16)
    beside = spec.objects.most_nbytes + spec.info.costs.kernel_nbytes
    for name, size, coding in zip(wants.names, sizes, wants.codings, strict=True):
        if coding is None or not coding.part:
            codes = name
        nbytes[codes] = nbytes.get(codes, 0) + size + beside  # its other parts follow it
    loop = _Loop(place, checkpoint, read, fill, needs_native, nbytes)
    groups = [*loop.groups(lambda: _together_nbytes(spec))]
    if groups:
        largest = max(groups, key=lambda names: sum(nbytes[name] for name in names))
        loop.decided(largest)
    return loop.tensors()


def _together_nbytes(spec: DeviceSpec) -> int:
    """The most that tensors take which are read at once: of the budget, and of what is free."""
    room = min(n for n in (spec.budget_nbytes, spec.free_nbytes) if n is not None)
    return min(_TOGETHER_NBYTES, room // 2)


@dataclass(frozen=True, slots=True)
class _Loop:
    """A checkpoint that is read tensor by tensor.

    Attributes:
        needs_native: whether some dtype depends on native bfloat16 of the device.
        nbytes: of each parameter, with the memory of its objects.
    """

    place: Place
    checkpoint: Checkpoint
    read: Options
    fill: Mapping[str, Source]
    needs_native: bool
    nbytes: Mapping[str, int]

    def groups(self, most_nbytes: Callable[[], int]) -> Iterator[list[str]]:
        """Parameters in the order of the files, as many at once as fit into what is asked for."""
        number_of = {header.path: number for number, header in enumerate(self.checkpoint.shards)}

        def place(name: str) -> tuple[int, int]:
            info = self.checkpoint.tensors[self.fill[name].rows[0].tensor]
            return number_of[info.shard], info.start

        group: list[str] = []
        taken, most = 0, most_nbytes()
        for name in sorted(self.nbytes, key=place):
            if group and taken + self.nbytes[name] > most:
                yield group
                group, taken, most = [], 0, most_nbytes()
            group.append(name)
            taken += self.nbytes[name]
        if group:
            yield group

    def decided(self, names: Sequence[str]) -> Decision:
        """Plan to load some parameters."""
        chosen = {name: self.fill[name] for name in names}
        tensors = self.checkpoint.tensors
        shards = {tensors[r.tensor].shard for s in chosen.values() for r in s.rows}
        headers = tuple(header for header in self.checkpoint.shards if header.path in shards)
        part = replace(self.checkpoint, shards=headers)
        call = Call(part, self.read, Found(chosen))
        return Decision.make(self.place, call, None, offers=("quant",))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Read them; what the caller keeps is free no more, and fewer are read at once."""

        def most_nbytes() -> int:
            (spec,) = self.place.specs(self.read, self.needs_native)
            return _together_nbytes(spec)

        for names in self.groups(most_nbytes):
            with uncollected():
                found = run(self.decided(names), False, Clock()).state_dict
            for name in list(found):
                yield name, found.pop(name)
