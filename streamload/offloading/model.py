"""What `offload` asks of a model, whatever its framework: its layers, and to let them stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from streamload.checkpoint.open import Checkpoint
from streamload.codecs.cast_table import OutOfRange
from streamload.core.dtypes import DType
from streamload.core.location import Url
from streamload.core.patterns import matches
from streamload.devices.base import Device, Parameter
from streamload.errors import OffloadError
from streamload.offloading.groups import Group, groups_by_name, outer_modules
from streamload.offloading.layers import SlotMemory
from streamload.offloading.overrun import TokenRoom
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.rows import RowReader
from streamload.offloading.views import FileViews
from streamload.planning.requests import TensorRequests


@dataclass(slots=True)
class Timed:
    """The passes of a model.

    Attributes:
        passes: how many there were.
        seconds: wall time of them.
        running: how many there are now.
    """

    passes: int = 0
    seconds: float = 0.0
    running: int = 0

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Take the time of one."""
        begun = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.passes += 1
            self.seconds += time.perf_counter() - begun


class Wrapped(Protocol):
    """What stands in the place of something of a module while a model is offloaded."""

    def put(self) -> None:
        """Stand in its place."""

    def take_out(self) -> None:
        """Let the module have its own again."""


class ModelAdapter(ABC):
    """Where a model's layers are, and what puts them into slots. A framework's file says how.

    Args:
        parameters: those that are filled, by the names that plans have.
        layers: patterns of names of modules that are layers, where names do not tell.

    Attributes:
        timed: its passes.
        room: for how many tokens there is room, and how many passes had.
        notes: what a user may want to know of its layers, one sentence each.
    """

    def __init__(self, parameters: Mapping[str, Parameter], layers: Sequence[str]) -> None:
        self.timed, self.room = Timed(), TokenRoom()
        self.notes: list[str] = []
        self._layers = layers
        self._wrapped: list[Wrapped] = []
        for name, parameter in parameters.items():
            if parameter.block is not None:
                raise OffloadError(f"{name} is sharded: offload the model of each process whole")
            if parameter.fixed:
                raise OffloadError(f"{name} cannot be offloaded: {parameter.fixed}")

    # --- what a framework says ----------------------------------------------------------------

    @abstractmethod
    def parameter(self, name: str) -> Parameter:
        """A parameter by its name in plans."""

    @abstractmethod
    def module(self, name: str) -> Any:
        """A module by its name; None where there is none."""

    @abstractmethod
    def can_stream(self, module: Any) -> bool:
        """Whether a module's weights are used by calling it, and by nothing else."""

    def only_holds(self, module: Any) -> bool:
        """Whether a module is there to hold others, and is not called itself."""
        return False

    @abstractmethod
    def is_embedding(self, module: Any) -> bool:
        """Whether all that a module does is to look up rows of its weight."""

    @abstractmethod
    def must_stay(self, name: str) -> bool:
        """Whether a parameter cannot stream, whatever has it."""

    @abstractmethod
    def slots(self, plan: OffloadPlan, device: Device) -> SlotMemory:
        """Allocate the slots."""

    def views(self, plan: OffloadPlan, checkpoint: Checkpoint, device: Device) -> FileViews | None:
        """Map the files of what streams; None where the framework does not compute on these."""
        return None

    @abstractmethod
    def empty_parameter(self, name: str) -> str:
        """Let go of what the model holds of a parameter that streams; returns why it cannot."""

    @abstractmethod
    def begin_streaming(
        self, plan: OffloadPlan, dtypes: Mapping[str, DType], device: Device
    ) -> None:
        """Let the weights that stream hold nothing; ``dtypes`` are those of all parameters."""

    @abstractmethod
    def stream_layer(
        self,
        name: str,
        number: int,
        weights: Sequence[tuple[int, str]],
        rounds: Rounds,
        device: Device,
    ) -> None:
        """Let a module bring its weights.

        Args:
            name: of the module.
            number: of the layer in ``rounds``.
            weights: for each, the number of its buffer, and its name.
            rounds: what brings them.
            device: where they are.
        """

    def experts(
        self, wants: TensorRequests, stay: Sequence[str], changed: Mapping[str, Any]
    ) -> list[Group]:
        """Experts that a cache can hold one by one; see `groups`. None, where nothing says so."""
        return []

    def stream_experts(
        self,
        name: str,
        number: int,
        weights: Sequence[Mapping[str, int]],
        rounds: Rounds,
        device: Device,
    ) -> None:
        """Let a module bring the experts that its router chose.

        Args:
            name: of the module.
            number: of the layer among those that have experts.
            weights: for each expert, the numbers of its buffers by the names of the parameters.
            rounds: what brings them.
            device: where they are.
        """
        raise AssertionError(f"{type(self).__name__} has no experts")

    @abstractmethod
    def gather_rows(self, name: str, weight: str, reader: RowReader, device: Device) -> None:
        """Let an embedding ask for rows of its weight."""

    @abstractmethod
    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """All modules that stream are in place: count passes, and refuse what cannot be."""

    @abstractmethod
    def watch(self) -> None:
        """Count the tokens of passes of a model of which nothing streams."""

    def take_out(self) -> None:
        """Let the model be as a load that failed leaves it: what streamed holds nothing."""
        for wrapped in reversed(self._wrapped):
            wrapped.take_out()
        self._wrapped.clear()

    def _wrap(self, wrapped: Wrapped) -> None:
        """Put something in place, until `take_out`."""
        wrapped.put()
        self._wrapped.append(wrapped)

    # --- deciding -----------------------------------------------------------------------------

    def groups(
        self,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        nbytes: Sequence[int],
        stay: Sequence[str],
        changed: Mapping[str, Any],
    ) -> list[Group]:
        """The layers, in the order in which they run.

        Args:
            checkpoint: the headers.
            wants: all parameters.
            nbytes: of each on the device.
            stay: patterns of names of parameters that stay.
            changed: tensors whose values change on the way.
        """
        found = self._called(groups_by_name(wants.names, nbytes, self._layers), wants.names)
        layers = [name for name, _, in_layer in found if in_layer]
        outer = outer_modules(found)
        groups, heads = [], []
        experts = self.experts(wants, stay, changed)
        taken = {at for group in experts for at in group.wants}
        for name, every, _ in found:
            numbers = [at for at in every if at not in taken]
            fixed: list[int] = []
            shared: list[int] = []
            mine: list[int] = []
            for at in numbers:
                modules = self._modules_of(wants.names[at], layers)
                if self.stays(wants.names[at], stay):
                    fixed.append(at)
                else:
                    (shared if len(modules) > 1 else mine).append(at)
            for at in shared:
                head = self._head_with(at, wants, checkpoint, layers, changed)
                if head is None:
                    fixed.append(at)
                else:
                    heads.append(head)
            if fixed:
                groups.append(Group(f"{name} (stays)" if mine else name, tuple(fixed), "fixed"))
            if not mine:
                continue
            module = self.module(name)
            if self._is_gathered(module, mine, wants, checkpoint, changed):
                groups.append(Group(name, tuple(mine), "rows"))
            elif module is not None and self.can_stream(module) and name not in outer:
                groups.append(Group(name, tuple(mine), "layer"))
            else:
                groups.append(Group(name, tuple(mine), "fixed"))
        return _joined(groups, heads) + experts

    def _called(
        self, groups: Sequence[tuple[str, list[int], bool]], names: Sequence[str]
    ) -> list[tuple[str, list[int], bool]]:
        """The same with the modules in a layer that only holds them: those are called."""
        found = []
        for name, numbers, in_layer in groups:
            parts: dict[str, list[int]] = {}
            if in_layer and self.only_holds(self.module(name)):
                for at in numbers:
                    child, dot, _ = names[at].removeprefix(f"{name}.").partition(".")
                    parts.setdefault(f"{name}.{child}" if dot else "", []).append(at)
            if not parts or "" in parts:
                found.append((name, numbers, in_layer))
            else:
                found += self._called([(*part, True) for part in parts.items()], names)
        return found

    def stays(self, name: str, stay: Sequence[str]) -> bool:
        """Whether a parameter cannot stream, or is asked to stay."""
        names = self.parameter(name).names
        return self.must_stay(name) or any(matches(each, stay) for each in names)

    def _modules_of(self, name: str, layers: Sequence[str]) -> list[str]:
        """The modules that have a parameter: layers, or the parents of its names."""
        found: dict[str, None] = {}
        for each in self.parameter(name).names:
            layer = next((layer for layer in layers if each.startswith(f"{layer}.")), None)
            found[layer or each.rpartition(".")[0]] = None
        return list(found)

    def _head_with(
        self,
        at: int,
        wants: TensorRequests,
        checkpoint: Checkpoint,
        layers: Sequence[str],
        changed: Mapping[str, Any],
    ) -> Group | None:
        """The head that has an embedding's weight: it streams, and the embedding is gathered."""
        names = self._modules_of(wants.names[at], layers)
        rows = [
            name
            for name in names
            if self._is_gathered(self.module(name), [at], wants, checkpoint, changed)
        ]
        heads = [name for name in names if name not in rows]
        if len(rows) != 1 or len(heads) != 1 or heads[0] in layers:
            return None
        module = self.module(heads[0])
        if module is None or not self.can_stream(module):
            return None
        return Group(heads[0], (at,), "layer", rows[0])

    def _is_gathered(
        self,
        module: Any,
        numbers: Sequence[int],
        wants: TensorRequests,
        checkpoint: Checkpoint,
        changed: Mapping[str, Any],
    ) -> bool:
        """Whether rows of a module's weight can be read from the file as a pass asks for them."""
        if len(numbers) != 1 or not self.is_embedding(module):
            return False
        want, src = wants[numbers[0]], wants.srcs[numbers[0]]
        if len(want.source) != 1 or want.transpose is not None or want.coding is not None:
            return False
        (row,) = want.source
        info = checkpoint.tensors[row.tensor]
        whole = row.start == 0 and row.stop == info.shape[0] and row.columns is None
        plain = whole and info.shape == want.shape and src.bits >= 8 and not src.is_packed
        return plain and row.tensor not in changed and not isinstance(info.shard, Url)

    # --- putting in place ---------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        """Let go of what the model holds of that which streams.

        Raises:
            OffloadError: something else holds it too.
        """
        absent = plan.residency.absent
        for group in plan.groups:
            for at in group.wants if group.name in absent else ():
                reason = self.empty_parameter(wants.names[at])
                if reason:
                    raise OffloadError(f"{wants.names[at]} streams, and {reason}")

    def put(
        self,
        plan: OffloadPlan,
        checkpoint: Checkpoint,
        wants: TensorRequests,
        dsts: Sequence[DType],
        device: Device,
        rounds: Rounds | None,
        out_of_range: OutOfRange,
    ) -> None:
        """Let the modules bring their weights."""
        self.begin_streaming(plan, dict(zip(wants.names, dsts, strict=True)), device)
        by_name = {group.name: group for group in plan.groups}

        def gather(name: str, group: Group) -> None:
            names = {at: self.parameter(wants.names[at]).names for at in group.wants}
            parents = {at: {each.rpartition(".")[0] for each in names[at]} for at in names}
            at = next(at for at in group.wants if name in parents[at])
            info = checkpoint.tensors[wants.sources[at][0].tensor]
            reader = RowReader(checkpoint, info, dsts[at], out_of_range)
            self.gather_rows(name, wants.names[at], reader, device)

        for number, name in enumerate(plan.residency.streams):
            group = by_name[name]
            assert rounds is not None and plan.stream is not None
            order = plan.stream.placements.names
            place = {order[at]: n for n, at in enumerate(plan.layer_placements[number])}
            weights = [(place[wants.names[at]], wants.names[at]) for at in group.wants]
            self.stream_layer(name, number, weights, rounds, device)
            if group.rows:
                gather(group.rows, group)
        for name in plan.residency.gathers:
            gather(name, by_name[name])
        if plan.residency.experts:
            assert rounds is not None
            self._put_experts(plan, rounds, device)
        self.end_putting(plan, rounds)

    def _put_experts(self, plan: OffloadPlan, rounds: Rounds, device: Device) -> None:
        assert plan.stream is not None
        by_name = {group.name: group for group in plan.groups}
        order = plan.stream.placements.names
        placements = iter(plan.layer_placements[len(plan.residency.streams) :])
        for number, name in enumerate(plan.residency.experts):
            group = by_name[name]
            weights = [
                {order[at].rpartition("[")[0]: n for n, at in enumerate(next(placements))}
                for _ in range(group.experts)
            ]
            self.stream_experts(name, number, weights, rounds, device)


def _joined(groups: Sequence[Group], heads: Sequence[Group]) -> list[Group]:
    """Groups and heads with an embedding's weight; a head with a bias is one layer with it."""
    found = {group.name: group for group in groups}
    for head in heads:
        own = found.pop(head.name, None)
        if own is not None and own.kind == "layer":
            head = replace(head, wants=head.wants + own.wants)
        elif own is not None:
            found[f"{own.name} (stays)"] = replace(own, name=f"{own.name} (stays)")
        found[head.name] = head
    return [*found.values()]
