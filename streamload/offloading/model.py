"""Find the layers of a model and let them stream: the code that all frameworks share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from streamload.core.location import Url
from streamload.core.patterns import matches
from streamload.devices.base import Device, Parameter
from streamload.errors import OffloadError
from streamload.offloading.groups import (
    LayerGroup,
    Module,
    grouped,
    groups_by_name,
    outer_modules,
    without,
    without_small,
)
from streamload.offloading.layers import Slots
from streamload.offloading.overrun import TokenRoom
from streamload.offloading.plan import OffloadPlan
from streamload.offloading.prefetch import Rounds
from streamload.offloading.problem import Problem
from streamload.offloading.residency import LayerKind
from streamload.offloading.rows import RowReader
from streamload.planning.requests import TensorRequests

P = TypeVar("P", bound=Parameter)
LayerWeights = Sequence[tuple[int, str]]  # of each weight, the index of its buffer, and its name
ExpertWeights = Sequence[Mapping[str, int]]  # of each expert, by weight, the index of its buffer


@dataclass(slots=True)
class Timed:
    """Number and seconds of ended passes (calls of a model); ``running``: passes under way."""

    passes: int = 0
    seconds: float = 0.0
    running: int = 0

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        """Count and time the pass in a ``with`` block."""
        begun = time.perf_counter()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.passes += 1
            self.seconds += time.perf_counter() - begun


class Wrapped(Protocol):
    """A substitute for a method of a module, in place while the model is offloaded."""

    def put(self) -> None:
        """Put the substitute in place of the method."""

    def take_out(self) -> None:
        """Restore the module's own method."""


class ModelAdapter(ABC, Generic[P]):
    """Finds the layers of a model, and makes its modules fetch their weights when called.

    Each framework has a subclass. ``parameters`` are by their names in plans, ``modules`` by their
    names without wrappers, and ``layers`` are patterns of names of layers.
    """

    slots: type[Slots]

    def __init__(
        self,
        model: Any,
        parameters: Mapping[str, P],
        modules: dict[str, Any],
        layers: Sequence[str],
    ) -> None:
        self.timed, self.room = Timed(), TokenRoom()
        self.notes: list[str] = []
        self._model, self._parameters, self._modules = model, parameters, modules
        self._layers = layers
        self._wrapped: list[Wrapped] = []
        self._emptied: list[str] = []  # names of parameters without memory, as they stream
        for name, parameter in parameters.items():
            if parameter.block is not None:
                raise OffloadError(f"{name} is sharded: offload the model of each process whole")
            if parameter.fixed:
                raise OffloadError(f"{name} cannot be offloaded: {parameter.fixed}")

    # --- of each framework --------------------------------------------------------------------

    @abstractmethod
    def can_stream(self, module: Any) -> bool:
        """Whether a module's weights are used only when it is called."""

    def only_holds(self, module: Any) -> bool:
        """Whether a module only contains others, and is not called itself."""
        return False

    @abstractmethod
    def is_embedding(self, module: Any) -> bool:
        """Whether a module only looks up rows of its weight."""

    @abstractmethod
    def must_stay(self, name: str) -> bool:
        """Whether the parameter of this name has to stay, even if its module streams."""

    @abstractmethod
    def begin_streaming(self, plan: OffloadPlan, problem: Problem, device: Device) -> None:
        """Put placeholders without memory in place of all weights that stream."""

    @abstractmethod
    def stream_layer(self, name: str, number: int, weights: LayerWeights, rounds: Rounds) -> None:
        """Make a module get its weights from ``rounds``, as layer ``number``, at each call."""

    def experts(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Return groups of experts that can be cached one by one; ``stay``: patterns that stay."""
        return []

    def stream_experts(self, name: str, layer: int, weights: ExpertWeights, rounds: Rounds) -> None:
        """Make a module fetch only chosen experts; ``layer``: its number among such modules."""
        raise AssertionError(f"{type(self).__name__} has no experts")

    @abstractmethod
    def gather_rows(self, name: str, reader: RowReader, device: Device) -> None:
        """Make an embedding read only the rows that it looks up, from the file to the device."""

    @abstractmethod
    def end_putting(self, plan: OffloadPlan, rounds: Rounds | None) -> None:
        """End `put`: make the model count passes, and refuse to be saved or moved.

        Without ``rounds``, if nothing streams, only the tokens of passes are counted.
        """

    def take_out(self) -> None:
        """Restore the modules; streamed weights hold no values until the model is loaded again."""
        for wrapped in reversed(self._wrapped):
            wrapped.take_out()
        self._wrapped.clear()
        for name in self._emptied:
            self._parameters[name].invalidate(keep=False)
        self._emptied.clear()

    def _wrap(self, wrapped: Wrapped) -> None:
        """Put a substitute for a module's method in place, until `take_out`."""
        wrapped.put()
        self._wrapped.append(wrapped)

    # --- planning -----------------------------------------------------------------------------

    def groups(self, problem: Problem, stay: Sequence[str]) -> list[LayerGroup]:
        """Return the layers in running order; ``stay``: patterns of parameters that stay."""
        wants = problem.wants
        found = self._called(groups_by_name(wants.names, problem.nbytes, self._layers), wants.names)
        layers = [name for name, _, in_layer in found if in_layer]
        outer = outer_modules(found)
        experts = self.experts(problem, stay)
        taken = {at for group in experts for at in group.wants}
        fixed: set[int] = set()
        heads: list[LayerGroup] = []
        for at in [at for module in without(found, taken) for at in module.numbers]:
            modules = self._modules_of(wants.names[at], layers)
            if self.stays(wants.names[at], stay):
                fixed.add(at)
            elif len(modules) > 1:
                if head := self._head_with(at, modules, problem, layers):
                    heads.append(head)
                    taken.add(at)
                else:
                    fixed.add(at)

        def group_of(name: str, numbers: tuple[int, ...], _: bool) -> LayerGroup:
            module = self._modules.get(name)
            kind: LayerKind = "fixed"
            if self._is_gathered(module, numbers, problem):
                kind = "rows"
            elif module is not None and self.can_stream(module) and name not in outer:
                kind = "layer"
            return LayerGroup(name, numbers, kind)

        rest, small = without_small(without(found, taken), problem.nbytes)
        groups = grouped(rest, fixed.__contains__, group_of)
        return _joined([*groups], heads) + experts + small

    def _called(self, groups: Sequence[Module], names: Sequence[str]) -> list[Module]:
        """Return ``groups``, with each layer that is never called replaced by its children."""
        found = []
        for name, numbers, in_layer in groups:
            parts: dict[str, list[int]] = {}
            if in_layer and self.only_holds(self._modules.get(name)):
                for at in numbers:
                    child, dot, _ = names[at].removeprefix(f"{name}.").partition(".")
                    parts.setdefault(f"{name}.{child}" if dot else "", []).append(at)
            if not parts or "" in parts:
                found.append(Module(name, numbers, in_layer))
            else:
                found += self._called([Module(*part, True) for part in parts.items()], names)
        return found

    def stays(self, name: str, stay: Sequence[str]) -> bool:
        """Whether a parameter has to stay, or matches one of the patterns of ``stay``."""
        names = self._parameters[name].names
        return self.must_stay(name) or any(matches(each, stay) for each in names)

    def _modules_of(self, name: str, layers: Sequence[str]) -> list[str]:
        """Return names of the layers, or else parent modules, that hold a parameter."""
        found: dict[str, None] = {}
        for each in self._parameters[name].names:
            layer = next((layer for layer in layers if each.startswith(f"{layer}.")), None)
            found[layer or each.rpartition(".")[0]] = None
        return list(found)

    def _head_with(
        self, at: int, names: Sequence[str], problem: Problem, layers: Sequence[str]
    ) -> LayerGroup | None:
        """Return the head that shares weight ``at`` with an embedding; None if it has to stay.

        ``names``: the modules that hold the weight; ``layers``: names of layers.
        """
        rows = [n for n in names if self._is_gathered(self._modules.get(n), [at], problem)]
        heads = [name for name in names if name not in rows]
        if len(rows) != 1 or len(heads) != 1 or heads[0] in layers:
            return None
        module = self._modules.get(heads[0])
        if module is None or not self.can_stream(module):
            return None
        return LayerGroup(heads[0], (at,), "layer", rows[0])

    def _is_gathered(self, module: Any, numbers: Sequence[int], problem: Problem) -> bool:
        """Whether a module is an embedding whose rows can be read from the file in a pass."""
        if len(numbers) != 1 or not self.is_embedding(module):
            return False
        want = problem.wants[numbers[0]]
        if len(want.source) != 1 or want.transpose is not None or want.coding is not None:
            return False
        (row,) = want.source
        info = problem.checkpoint.tensors[row.tensor]
        whole = row.start == 0 and row.stop == info.shape[0] and row.columns is None
        plain = whole and info.shape == want.shape and problem.is_plain(numbers[0])
        return plain and not isinstance(info.shard, Url)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: TensorRequests) -> None:
        """Free the weights that stream; raises OffloadError if something else holds their bytes."""
        absent = plan.residency.absent
        numbers = (at for group in plan.groups if group.name in absent for at in group.wants)
        for name in (wants.names[at] for at in numbers):
            if reason := self._parameters[name].release():
                raise OffloadError(f"{name} streams, and {reason}")
            self._emptied.append(name)

    def put(
        self, plan: OffloadPlan, problem: Problem, device: Device, rounds: Rounds | None
    ) -> None:
        """Make modules fetch what streams when called; without ``rounds``, embeddings only."""
        wants, dsts = problem.wants, problem.dsts
        self.begin_streaming(plan, problem, device)
        by_name = {group.name: group for group in plan.groups}

        def gather(name: str, group: LayerGroup) -> None:
            names = {at: self._parameters[wants.names[at]].names for at in group.wants}
            parents = {at: {each.rpartition(".")[0] for each in names[at]} for at in names}
            at = next(at for at in group.wants if name in parents[at])
            info = problem.checkpoint.tensors[wants.sources[at][0].tensor]
            reader = RowReader(problem.checkpoint, info, dsts[at], problem.options.out_of_range)
            self.gather_rows(name, reader, device)

        order = plan.stream.placements.names if plan.stream is not None else ()
        placements = iter(plan.layer_placements)
        for number, name in enumerate(plan.residency.streams):
            group = by_name[name]
            assert rounds is not None
            place = {order[at]: n for n, at in enumerate(next(placements))}
            weights = [(place[wants.names[at]], wants.names[at]) for at in group.wants]
            self.stream_layer(name, number, weights, rounds)
            if group.rows:
                gather(group.rows, group)
        for name in plan.residency.gathers:
            gather(name, by_name[name])
        for number, name in enumerate(plan.residency.experts):
            assert rounds is not None
            each = [
                {order[at].rpartition("[")[0]: n for n, at in enumerate(next(placements))}
                for _ in range(by_name[name].experts)
            ]
            self.stream_experts(name, number, each, rounds)
        self.end_putting(plan, rounds)


def _joined(groups: Sequence[LayerGroup], heads: Sequence[LayerGroup]) -> list[LayerGroup]:
    """Return groups with tied heads added, each merged with the group of its other weights."""
    found = {group.name: group for group in groups}
    for head in heads:
        own = found.pop(head.name, None)
        if own is not None and own.kind == "layer":
            head = replace(head, wants=head.wants + own.wants)
        elif own is not None:
            found[f"{own.name} (stays)"] = replace(own, name=f"{own.name} (stays)")
        found[head.name] = head
    return [*found.values()]
