"""`iterate`: yield the tensors of a checkpoint one by one, for loops that callers write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from streamload.checkpoint.open import CheckpointLike
from streamload.core.location import Location
from streamload.core.tensors import TensorInfo
from streamload.files.folder import place_of
from streamload.files.page_cache import PageCache, ShardCache
from streamload.loading.load import read_call, run, uncollected
from streamload.loading.options import CACHE, OF_MODELS, LoadOptions, Options, takes
from streamload.loading.prepare import Call, Decision, Place, wants_under
from streamload.loading.report import Clock
from streamload.planning.moves import DeviceSpec
from streamload.planning.quant_policy import AUTO, keep_blocks
from streamload.planning.sources import Found

# Most bytes of tensors that are read at once: planning and starting threads takes milliseconds.
_TOGETHER_NBYTES = 2**26


@takes(without=(*OF_MODELS, *CACHE, "residence"), devices='device="cuda:0"')
def iterate(path: CheckpointLike, **options: Unpack[LoadOptions]) -> Iterator[tuple[str, Any]]:
    """Read a checkpoint tensor by tensor, under a budget in bytes, in the order of the files.

    A tensor counts against the budget until the next step. Memory that you keep longer is not
    counted, nor is a tensor that a variable still holds while the next is read: ``del`` it.

        for name, tensor in streamload.iterate("Llama-3-8B/", budget="1GB", device="cpu"):
            quantised[name] = quantise(tensor)
            del tensor

    Small tensors are read several at a time, which then count together.

    Args:
        path: as in `load_state_dict`, or an open checkpoint.
        device: one device; see `load_state_dict`.
        **options: see `LoadOptions`.

    Returns:
        An iterator of (name, tensor), with tensors of the device's framework.

    Raises:
        CheckpointError: the checkpoint is invalid; at a step, a file cannot be read or has changed.
        PlanInfeasibleError: the largest tensor does not fit (before any data is read), or other
            processes have taken memory (at a step).
        UnsupportedCastError: a dtype cannot be cast or held.
        DeviceNotFoundError: the device is not there, or does not work.
        ValueError: an argument is invalid.
    """
    checkpoint, read, found = read_call(path, Options.parse(options))
    if read.device is not None and not isinstance(read.device, str):
        raise ValueError(f"tensors go to one device, one after the other, not to {read.device!r}")
    if AUTO in read.quant.names:
        raise ValueError('quant="auto" is for loads of all at once: name a format')
    checkpoint, found, *_ = keep_blocks(checkpoint, found, read.quant, read.changes.by_tensor)
    place = replace(Place.look(None, checkpoint, read), alone=True)
    wants = wants_under(read, checkpoint, found.fill)
    needs_native = wants.needs_native_bf16(read.policy)
    (spec,) = place.specs(read, needs_native)
    nbytes: dict[str, int] = {}
    sizes = wants.nbytes(read.policy, spec.native_bf16)
    beside = spec.objects.most_nbytes + spec.info.costs.kernel_nbytes
    for want, size in zip(wants, sizes, strict=True):
        if want.coding is None or not want.coding.part:
            codes = want.name
        nbytes[codes] = nbytes.get(codes, 0) + size + beside  # its other parts follow it
    loop = _Loop(place, Call(checkpoint, read, found), needs_native, nbytes)
    if groups := [*loop.groups(lambda: _together_nbytes(spec))]:
        loop.decided(max(groups, key=lambda names: sum(nbytes[name] for name in names)))
    return loop.tensors()


def _together_nbytes(spec: DeviceSpec) -> int:
    """Return the most bytes of tensors to read at once: half of the budget or of free memory."""
    room = min(n for n in (spec.budget_nbytes, spec.free_nbytes) if n is not None)
    return min(_TOGETHER_NBYTES, room // 2)


@dataclass(frozen=True, slots=True)
class _Loop:
    """A checkpoint that is read tensor by tensor."""

    place: Place
    call: Call
    needs_native: bool
    nbytes: Mapping[str, int]

    def groups(self, most_nbytes: Callable[[], int]) -> Iterator[list[str]]:
        """Yield names of parameters to read at once, in file order, within `most_nbytes()`."""
        checkpoint, _, (fill, _, _) = self.call
        number_of = {header.path: number for number, header in enumerate(checkpoint.shards)}

        def place(name: str) -> tuple[int, int]:
            info = checkpoint.tensors[fill[name].rows[0].tensor]
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
        """Return the planned load of these parameters alone."""
        checkpoint, read, (fill, _, _) = self.call
        chosen = {name: fill[name] for name in names}
        shards = {checkpoint.tensors[r.tensor].shard for s in chosen.values() for r in s.rows}
        part = replace(checkpoint, shards=tuple(h for h in checkpoint.shards if h.path in shards))
        return Decision.make(self.place, Call(part, read, Found(chosen)), None, offers=("quant",))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield all parameters by name; fewer are read at once if the caller keeps tensors."""

        def most_nbytes() -> int:
            (spec,) = self.place.specs(self.call.options, self.needs_native)
            return _together_nbytes(spec)

        with ExitStack() as closing:
            caches: dict[Location, ShardCache] = {}
            for names in self.groups(most_nbytes):
                decided = self.decided(names)
                if decided.call.options.page_cache == "drop":
                    # what the kernel reads ahead of a group stays until the next group drops it
                    for shard in decided.call.checkpoint.headers:
                        if shard not in caches and isinstance(path := place_of(shard), Path):
                            caches[shard] = PageCache("drop", to_read_nbytes=0).open(path)
                            closing.callback(caches[shard].close)
                with uncollected():
                    found = run(decided, False, Clock()).state_dict
                for info in self._read(names):
                    if info.shard in caches:
                        caches[info.shard].done(info.start, info.stop)
                for name in list(found):
                    yield name, found.pop(name)

    def _read(self, names: Sequence[str]) -> Iterator[TensorInfo]:
        """Yield the tensors of the checkpoint that filled parameters."""
        checkpoint, _, (fill, _, _) = self.call
        yield from (checkpoint.tensors[r.tensor] for name in names for r in fill[name].rows)
