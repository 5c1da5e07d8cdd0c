"""The target of a load: each parameter is loaded, untouched or invalid at any moment."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.checkpoint.shards import map_shard
from streamload.core.location import Location
from streamload.core.memory import Ledger
from streamload.core.pagemap import reusable_nbytes
from streamload.core.tensors import region_of
from streamload.devices.allocators import TRIM_NBYTES
from streamload.devices.base import Addressed, Buffer, Device, Framework, Parameter
from streamload.errors import AllocationError, LoadState
from streamload.planning.moves import Move
from streamload.planning.plan import Plan
from streamload.streaming.state import Sink

_POISON_NBYTES = 2**24


class ModelTarget(Sink):
    """Allocates and fills the parameters of a model, or the tensors of a new state dict.

    `state_dict`: without a model, the finished tensors by name.
    """

    def __init__(
        self,
        plan: Plan,
        framework: Framework,
        devices: Mapping[str, Device],
        parameters: Mapping[str, Parameter] | None,
        ledger: Ledger,
    ) -> None:
        """Touch nothing yet; ``parameters`` are the model's by name, None for a new state dict."""
        self.state_dict: dict[str, Any] = {}
        self._plan = plan
        self._framework = framework
        self._devices = devices
        self._parameters = parameters
        self._ledger = ledger
        self._all_new = plan.placements.all_new
        self._buffers: dict[int, Buffer] = {}  # begun and not finished, by index
        self._released: set[int] = set()  # parameters whose old memory was freed
        # freed heap bytes since the last trim, by device; other devices trim as they release
        self._freed = {name: 0 for name, device in devices.items() if device.info.in_process}
        self._loaded: set[int] = set()
        self._revoked: set[int] = set()  # finished with bytes that may be wrong

    def _parameter(self, index: int) -> Parameter | None:
        if self._parameters is None:
            return None
        return self._parameters[self._plan.placements[index].name]

    def begin_all(self) -> None:
        """Count the model's memory in the ledger; release it if the plan releases all first."""
        made = self._plan
        held = () if self._all_new else made.placements
        for p in held:
            if (
                nbytes := p.resident_nbytes
                if p.kind.action == "in_place"
                else p.kind.released_nbytes
            ):
                self._ledger.reserve(p.kind.device, nbytes)
        for index, p in enumerate(held):
            if p.kind.action == "replace" and made.device(p.kind.device).release_first:
                self._release(index)
        for d in made.devices:
            if d.release_first:
                self._devices[d.device].trim()

    def map_all(self, checkpoint: Checkpoint) -> None:
        """Make the parameters that stay in their file views on the mapped file, without reading."""
        placements = self._plan.placements
        maps: dict[Location, mmap.mmap] = {}
        for index, (_, source, kind, *_) in enumerate(placements):
            if kind.cast != "mapped":
                continue
            (row,) = source
            info = checkpoint.tensors[row.tensor]
            if info.shard not in maps:
                maps[info.shard] = map_shard(checkpoint.headers[info.shard])
            if kind.action == "replace":
                self._release(index)
            place = maps[info.shard], region_of(info, row).start
            self._buffers[index] = self._devices[kind.device].view(*place, kind.dst, kind.shape)
            self.finish([index])

    def _release(self, index: int) -> str:
        """Free a parameter's old memory; return "", or why it cannot be freed."""
        if index in self._released:
            return ""
        p = self._plan.placements[index]
        parameter = self._parameter(index)
        reason = parameter.release() if parameter else ""
        if not reason:
            self._released.add(index)
            self._ledger.release(p.kind.device, p.kind.released_nbytes)
            if p.kind.device in self._freed:
                self._freed[p.kind.device] += p.kind.released_nbytes
                if self._freed[p.kind.device] >= TRIM_NBYTES:
                    self._devices[p.kind.device].trim()
                    self._freed[p.kind.device] = 0
        return reason

    def begin(self, indices: Sequence[int]) -> list[Buffer]:
        """Allocate parameters of one device, given by index, and return their buffers."""
        placements = self._plan.placements
        kinds = [placements[index].kind for index in indices]
        name = kinds[0].device
        device = self._devices[name]
        new = self._all_new or all(kind.action == "new" for kind in kinds)
        if len(kinds) == 1 or not new or not isinstance(device, Addressed):
            return [self._begin(index) for index in indices]
        nbytes = sum(placements[index].resident_nbytes for index in indices)
        self._ledger.reserve(name, nbytes)
        try:
            buffers = device.allocate_all([(kind.dst, kind.shape) for kind in kinds])
        except BaseException as error:
            self._ledger.release(name, nbytes)
            if isinstance(error, AllocationError):  # one by one: the error names the tensor
                return [self._begin(index) for index in indices]
            raise
        self._buffers.update(zip(indices, buffers, strict=True))
        return buffers

    def _begin(self, index: int) -> Buffer:
        p = self._plan.placements[index]
        parameter = self._parameter(index)
        if p.kind.action == "in_place" and parameter is not None:
            self._buffers[index] = parameter.buffer()
            return self._buffers[index]
        reason = self._release(index) if p.kind.action == "replace" else ""
        device = self._devices[p.kind.device]
        self._ledger.reserve(
            p.kind.device, p.resident_nbytes, reason=f"{p.name}: {reason}" if reason else ""
        )
        try:
            self._buffers[index] = device.allocate(p.kind.dst, p.kind.shape)
        except BaseException as error:
            self._ledger.release(p.kind.device, p.resident_nbytes)
            if isinstance(error, AllocationError):
                raise AllocationError(
                    error.device, f"{error.problem} (for {p.name!r})", nbytes=error.nbytes
                ) from error
            raise
        return self._buffers[index]

    def finish(self, indices: Sequence[int]) -> None:
        """Make tensors over the complete buffers of parameters, given by index."""
        moves = [self._plan.placements[index] for index in indices]
        if self._parameters is None:
            kinds = [move.kind for move in moves]
            columns = (
                [self._devices[kind.device] for kind in kinds],
                [self._buffers[index] for index in indices],
                [kind.dst for kind in kinds],
                [kind.shape for kind in kinds],
            )
            tensors = map(self._framework.tensor, *columns)
            self.state_dict.update(zip([move.name for move in moves], tensors, strict=True))
            self._loaded.update(indices)
            deque(map(self._buffers.__delitem__, indices), maxlen=0)
            return
        for index, (name, _, kind, *_) in zip(indices, moves, strict=True):
            if kind.action == "in_place":
                self._parameters[name].revive()  # an earlier load may have failed
            else:
                self._parameters[name].attach(self._buffers[index], kind.dst)
            self._loaded.add(index)
            del self._buffers[index]

    def revoke(self, indices: Iterable[int]) -> None:
        """Count finished parameters, given by index, as invalid: their bytes may be wrong."""
        for index in self._loaded.intersection(indices):
            p = self._plan.placements[index]
            parameter = self._parameter(index)
            self._loaded.remove(index)
            self._revoked.add(index)
            if p.kind.action == "in_place" and parameter is not None:
                self._buffers[index] = parameter.buffer()
                continue
            if parameter is not None:
                parameter.release()
            self.state_dict.pop(p.name, None)
            self._ledger.release(p.kind.device, p.resident_nbytes)

    def fail(self) -> LoadState:
        """Free half-filled parameters, and return the state of each.

        Memory that was written in place is kept, and stays in the ledger: another load writes it
        again, which all references to it then see.
        """
        placements = self._plan.placements
        begun = (self._released | self._revoked | set(self._buffers)) - self._loaded
        # a parameter that keeps its old memory until its new buffer is full is untouched
        invalid = {
            i for i in begun if i in self._released or placements[i].kind.action == "in_place"
        } | self._revoked
        given_up: list[tuple[Move, Buffer]] = []
        for index in sorted(begun):
            p = placements[index]
            buffer = self._buffers.pop(index, None)
            parameter = self._parameter(index)
            device = self._devices[p.kind.device]
            if buffer is not None and p.kind.action == "in_place":
                _poison(device, buffer, p.kind.nbytes)
            if parameter is not None and index in invalid:
                parameter.invalidate(keep=p.kind.action == "in_place")
            if buffer is not None and p.kind.action != "in_place":
                given_up.append((p, buffer))
        # last, when every parameter's state is set: a device that has failed may fail again
        for p, buffer in given_up:
            with suppress(Exception):
                self._devices[p.kind.device].release(buffer)
            self._ledger.release(p.kind.device, p.resident_nbytes)
        names = placements.names
        everything = {*range(len(names))}
        if self._parameters is not None:  # also parameters that an earlier failure invalidated
            invalid |= {i for i in everything if self._parameters[names[i]].invalid} - self._loaded
        states = (self._loaded, everything - self._loaded - invalid, invalid)
        return LoadState(*(tuple(names[i] for i in sorted(which)) for which in states))


def _poison(device: Device, buffer: Buffer, nbytes: int) -> None:
    """Fill half-written memory, which may still be in use, so that every float in it is NaN.

    Blocks whose pages hold no memory yet are left out: writing would take memory.
    """
    if not device.info.host_visible:
        return
    with suppress(Exception):
        for at in range(0, nbytes, _POISON_NBYTES):
            stop = min(at + _POISON_NBYTES, nbytes)
            with device.window(buffer, at, stop) as view:
                block = np.frombuffer(view, np.uint8)
                if reusable_nbytes([(block.ctypes.data, block.nbytes)]) != [0]:
                    block[:] = 0xFF
                del block  # it keeps the window open
