"""A module of torch whose layers stream."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamload.cast.table import OutOfRange
from streamload.checkpoint.checkpoint import Checkpoint
from streamload.checkpoint.url import Url
from streamload.devices.base import Device, Parameter
from streamload.devices.torch_experts import (
    StreamedExperts,
    Sums,
    number_chosen,
    number_of_experts,
    sums_of,
)
from streamload.devices.torch_streamed import (
    GatheredEmbedding,
    Refusals,
    StreamedModule,
    StreamedParameter,
    TorchSlots,
    Wrapped,
    computes,
    let_go,
    modules_by_name,
    no_backward,
    refuse_training,
    used_elsewhere,
    weight_of,
)
from streamload.devices.torch_tensors import TO_TORCH, TorchParameter, unwrapped_names
from streamload.dtypes import BY_NAME, DType
from streamload.errors import OffloadError
from streamload.offloading.deciding import OffloadPlan
from streamload.offloading.groups import Group, groups_by_name, rows_of_experts
from streamload.offloading.rounds import Rounds
from streamload.offloading.rows import RowReader
from streamload.offloading.views import FileViews
from streamload.planning.demand import Wants
from streamload.selection import matches


class TorchModel:
    """Where a module's layers are, and what puts them into slots."""

    def __init__(self, model: Any, parameters: Mapping[str, Parameter]) -> None:
        """Look at a module.

        Args:
            model: the module.
            parameters: those that are filled, by the names that plans have.

        Raises:
            OffloadError: it is no module, is offloaded already, or is sharded.
        """
        if not isinstance(model, nn.Module):
            raise OffloadError(
                f"a model of torch that is offloaded is a module, not a {type(model).__name__}: "
                "its layers are brought when their modules compute"
            )
        self._model = model
        self._parameters: dict[str, TorchParameter] = {}
        for name, parameter in parameters.items():
            assert isinstance(parameter, TorchParameter), name
            if parameter.block is not None:
                raise OffloadError(f"{name} is sharded: offload the model of each process whole")
            if parameter.fixed:
                raise OffloadError(f"{name} cannot be offloaded: {parameter.fixed}")
            self._parameters[name] = parameter
        self._unwrapped = unwrapped_names(model)
        self._modules = modules_by_name(model, self._unwrapped)
        self._absent: list[tuple[TorchParameter, list[Any]]] = []  # what streams, and what it was
        self._wrapped: list[Wrapped] = []
        self._refusals: Refusals | None = None
        self._sums: dict[str, Sums] = {}  # by module of experts that stay in the file
        self.notes: list[str] = []
        self.timed = Timed(model)

    # --- deciding -----------------------------------------------------------------------------

    def groups(
        self,
        checkpoint: Checkpoint,
        wants: Wants,
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
        elsewhere = used_elsewhere(self._model)
        found = groups_by_name(wants.names, nbytes)
        layers = [name for name, _, in_layer in found if in_layer]
        groups, heads = [], []
        experts = self._experts(wants, stay, changed)
        taken = {at for group in experts for at in group.wants}
        for name, every, _ in found:
            numbers = [at for at in every if at not in taken]
            fixed: list[int] = []
            shared: list[int] = []
            mine: list[int] = []
            for at in numbers:
                modules = self._modules_of(wants.names[at], layers)
                if self._stays(wants.names[at], stay):
                    fixed.append(at)
                else:
                    (shared if len(modules) > 1 else mine).append(at)
            for at in shared:
                head = self._head_with(at, wants, checkpoint, layers, elsewhere, changed)
                if head is None:
                    fixed.append(at)
                else:
                    heads.append(head)
            if fixed:
                groups.append(Group(f"{name} (stays)" if mine else name, tuple(fixed), "fixed"))
            if not mine:
                continue
            module = self._modules.get(name)
            if self._is_gathered(module, mine, wants, checkpoint, changed):
                groups.append(Group(name, tuple(mine), "rows"))
            elif module is not None and self._can_stream(name, module, elsewhere, found):
                groups.append(Group(name, tuple(mine), "layer"))
            else:
                groups.append(Group(name, tuple(mine), "fixed"))
        return groups + heads + experts

    def _experts(
        self, wants: Wants, stay: Sequence[str], changed: Mapping[str, Any]
    ) -> list[Group]:
        """Fused experts that a cache can hold one by one."""
        place = {name: at for at, name in enumerate(wants.names)}
        known: dict[Any, Sums | None] = {}  # those of a model are alike
        groups, others = [], []
        for name, module in self._modules.items():
            count = number_of_experts(module)
            numbers = (
                [place.get(f"{name}.{key}", -1) for key in module._parameters] if count else []
            )
            if not count or all(self._stays(wants.names[at], stay) for at in numbers if at >= 0):
                continue
            key = type(module), *(tuple(each.shape) for each in module.parameters())
            if key not in known:
                known[key] = sums_of(module)
            sums = known[key]
            if sums is None or not all(
                at >= 0 and self._is_expert(wants, at, count, stay, changed) for at in numbers
            ):
                others.append(name)
                continue
            self._sums[name] = sums
            chosen = number_chosen(module)
            groups.append(Group(name, tuple(numbers), "experts", "", count, chosen))
        if others:
            self.notes.append(
                f"experts of {others[0]}{' and others' if len(others) > 1 else ''} stream with "
                "their layer, chosen or not: their form is not known, or not rows of the file"
            )
        return groups

    def _is_expert(
        self, wants: Wants, at: int, count: int, stay: Sequence[str], changed: Mapping[str, Any]
    ) -> bool:
        """Whether a parameter's experts can be read one by one."""
        parameter, want, src = self._parameters[wants.names[at]], wants[at], wants.srcs[at]
        plain = src.bits >= 8 and not src.is_packed and len(parameter.names) == 1
        own = plain and not self._stays(wants.names[at], stay)
        unchanged = not any(row.tensor in changed for row in want.source)
        return own and unchanged and rows_of_experts(want, count) is not None

    @staticmethod
    def _can_stream(
        name: str, module: nn.Module, elsewhere: set[int], found: Sequence[tuple[str, Any, bool]]
    ) -> bool:
        """Whether a module computes with its weights alone: nothing inside it is another layer."""
        inside = f"{name}." if name else ""
        others = (other for other, _, _ in found if other != name)
        nested = any(other.startswith(inside) for other in others)
        return computes(module) and id(module) not in elsewhere and not nested

    def _stays(self, name: str, stay: Sequence[str]) -> bool:
        parameter = self._parameters[name]
        values = (container[key] for container, key in parameter.slots)
        plain = all(isinstance(value, nn.Parameter) for value in values)  # no buffers
        return not plain or any(matches(each, stay) for each in parameter.names)

    def _modules_of(self, name: str, layers: Sequence[str]) -> list[str]:
        """The modules that have a parameter: layers, or the parents of its names."""
        found: dict[str, None] = {}
        for each in self._parameters[name].names:
            layer = next((layer for layer in layers if each.startswith(f"{layer}.")), None)
            found[layer or each.rpartition(".")[0]] = None
        return list(found)

    def _head_with(
        self,
        at: int,
        wants: Wants,
        checkpoint: Checkpoint,
        layers: Sequence[str],
        elsewhere: set[int],
        changed: Mapping[str, Any],
    ) -> Group | None:
        """The head that has an embedding's weight: it streams, and the embedding is gathered."""
        names = self._modules_of(wants.names[at], layers)
        rows = [
            name
            for name in names
            if self._is_gathered(self._modules.get(name), [at], wants, checkpoint, changed)
        ]
        heads = [name for name in names if name not in rows]
        if len(rows) != 1 or len(heads) != 1 or heads[0] in layers:
            return None
        module = self._modules.get(heads[0])
        if module is None or not computes(module) or id(module) in elsewhere:
            return None
        return Group(heads[0], (at,), "layer", rows[0])

    def _is_gathered(
        self,
        module: nn.Module | None,
        numbers: Sequence[int],
        wants: Wants,
        checkpoint: Checkpoint,
        changed: Mapping[str, Any],
    ) -> bool:
        """Whether rows of a module's weight can be read from the file as a pass asks for them."""
        if not isinstance(module, nn.Embedding) or len(numbers) != 1 or module.max_norm is not None:
            return False
        if type(module).forward is not nn.Embedding.forward or "forward" in module.__dict__:
            return False  # what it is called with may be no numbers of rows
        want, src = wants[numbers[0]], wants.srcs[numbers[0]]
        if len(want.source) != 1 or want.transpose is not None or want.coding is not None:
            return False
        (row,) = want.source
        info = checkpoint.tensors[row.tensor]
        whole = row.start == 0 and row.stop == info.shape[0] and row.columns is None
        plain = whole and info.shape == want.shape and src.bits >= 8 and not src.is_packed
        return plain and row.tensor not in changed and not isinstance(info.shard, Url)

    # --- running ------------------------------------------------------------------------------

    def empty(self, plan: OffloadPlan, wants: Wants) -> None:
        """Let go of what the model holds of that which streams."""
        streams = _brought(plan)
        for group in plan.groups:
            if group.name not in streams:
                continue
            for at in group.wants:
                parameter = self._parameters[wants.names[at]]
                reason = parameter.release()
                if reason:
                    raise OffloadError(f"{wants.names[at]} streams, and {reason}")
                self._absent.append((parameter, [c[key] for c, key in parameter.slots]))

    def slots(self, plan: OffloadPlan, device: Device) -> TorchSlots:
        """Allocate the slots."""
        found = plan.residency
        assert plan.stream is not None
        kinds = plan.stream.placements.kinds
        layers = [
            [(kinds[at].dst, kinds[at].shape) for at in placements]
            for placements in plan.layer_placements
        ]
        return TorchSlots(
            device.allocate(BY_NAME["uint8"], (found.arena_nbytes,)), found.slot_starts, layers
        )

    def views(self, plan: OffloadPlan, checkpoint: Checkpoint, device: Device) -> FileViews:
        """Map the files of what streams."""
        assert plan.stream is not None
        return FileViews(
            *(plan.stream, plan.layer_placements, checkpoint, device, weight_of),
            keeps=plan.cached,
        )

    def put(
        self,
        plan: OffloadPlan,
        checkpoint: Checkpoint,
        wants: Wants,
        dsts: Sequence[DType],
        device: Device,
        rounds: Rounds | None,
        out_of_range: OutOfRange,
    ) -> None:
        """Let the modules bring their weights."""
        where = torch.device(device.info.name)
        for parameter, _ in self._absent:
            dst = dsts[wants.names.index(next(n for n in parameter.names if n in self._parameters))]
            absent = StreamedParameter(
                parameter.names[0], parameter.shape, TO_TORCH[dst.name], where
            )
            for container, key in parameter.slots:
                container[key] = absent  # what is tied stays one object
        by_name = {group.name: group for group in plan.groups}
        for number, name in enumerate(plan.residency.streams):
            group = by_name[name]
            assert rounds is not None and plan.stream is not None
            order = plan.stream.placements.names
            place = {order[at]: n for n, at in enumerate(plan.layer_placements[number])}
            inside = {id(m) for m in self._modules[name].modules()}
            places = [
                (place[wants.names[at]], slot)
                for at in group.wants
                for slot in self._slots_in(wants.names[at], inside)
            ]
            self._wrap(StreamedModule(self._modules[name], number, places, rounds, device.mark))
            if group.rows:
                self._gather(group.rows, group, checkpoint, wants, dsts, where, out_of_range)
        for name in plan.residency.gathers:
            self._gather(name, by_name[name], checkpoint, wants, dsts, where, out_of_range)
        if plan.residency.experts:
            assert rounds is not None
            self._put_experts(plan, wants, rounds, device)
        self.timed.put()
        streams = _brought(plan)
        holders = [
            module
            for name, module in self._modules.items()
            if any(not name or each == name or each.startswith(f"{name}.") for each in streams)
        ]
        self._refusals = Refusals([self._model, *holders])
        self._refusals.put()
        if rounds is not None:
            weakref.finalize(self._model, rounds.abandon)
        self._modules = {}  # the model may go, and this not
        self._model = nn.Module()

    def _put_experts(self, plan: OffloadPlan, wants: Wants, rounds: Rounds, device: Device) -> None:
        """Let the modules of experts bring those that the router chose."""
        assert plan.stream is not None
        by_name = {group.name: group for group in plan.groups}
        order = plan.stream.placements.names
        placements = iter(plan.layer_placements[len(plan.residency.streams) :])
        for layer, name in enumerate(plan.residency.experts):
            module, group = self._modules[name], by_name[name]
            keys = {wants.names[at]: wants.names[at].rpartition(".")[2] for at in group.wants}
            places = [
                {keys[order[at].rpartition("[")[0]]: n for n, at in enumerate(next(placements))}
                for _ in range(group.experts)
            ]
            how = self._sums[name], places, rounds.experts.together, rounds, device.mark
            self._wrap(StreamedExperts(module, layer, *how))

    def _slots_in(self, name: str, modules: set[int]) -> list[Any]:
        """The places of a parameter in some modules."""
        inside = {id(m._parameters) for m in self._model.modules() if id(m) in modules}
        return [slot for slot in self._parameters[name].slots if id(slot[0]) in inside]

    def _gather(
        self,
        name: str,
        group: Group,
        checkpoint: Checkpoint,
        wants: Wants,
        dsts: Sequence[DType],
        where: torch.device,
        out_of_range: OutOfRange,
    ) -> None:
        """Let an embedding read its rows."""
        module = self._modules[name]
        assert isinstance(module, nn.Embedding), name
        (at,) = group.wants
        info = checkpoint.tensors[wants.sources[at][0].tensor]
        reader = RowReader(checkpoint, info, dsts[at], out_of_range)
        dtype = TO_TORCH[dsts[at].name]

        def rows(numbers: Sequence[int]) -> torch.Tensor:
            found = torch.from_numpy(reader.read(numbers)).view(dtype)
            return found.view(len(numbers), *reader.row_shape).to(where)

        (slot,) = self._slots_in(wants.names[at], {id(module)})
        self._wrap(GatheredEmbedding(module, slot, rows))

    def _wrap(self, wrapped: Wrapped) -> None:
        wrapped.put()
        self._wrapped.append(wrapped)

    def take_out(self) -> None:
        """Let the model be as a load that failed leaves it: what streamed holds nothing."""
        if self._refusals is not None:
            self._refusals.take_out()
            self._refusals = None
        for wrapped in (self.timed, *reversed(self._wrapped)):
            wrapped.take_out()
        self._wrapped.clear()
        for parameter, before in self._absent:
            for (container, key), value in zip(parameter.slots, before, strict=True):
                container[key] = value
                if value.device.type != "meta":
                    let_go(value)
            parameter.invalidate(keep=False)
        self._absent.clear()


def _brought(plan: OffloadPlan) -> set[str]:
    """The groups whose weights are not there between passes."""
    found = plan.residency
    return {*found.streams, *found.gathers, *found.experts}


class Timed(Wrapped):
    """Counts the calls of a model's ``forward``, and how long they took.

    Attributes:
        passes: how many there were.
        seconds: wall time of them.
        running: how many there are now.
    """

    def __init__(self, model: nn.Module) -> None:
        """Change nothing yet."""
        super().__init__(model)
        self.passes, self.seconds, self.running = 0, 0.0, 0
        self._trains = any(parameter.requires_grad for parameter in model.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute, and take the time. No graph is kept: it would hold what layers computed."""
        refuse_training(self._module)
        begun = time.perf_counter()
        self.running += 1
        try:
            with torch.no_grad():
                found = self._forward(*args, **kwargs)
        finally:
            self.running -= 1
            self.passes += 1
            self.seconds += time.perf_counter() - begun
        return no_backward(found) if self._trains and torch.is_grad_enabled() else found
