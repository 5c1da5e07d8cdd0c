"""What stays on a device, or streams, together: parameters of a model by their modules."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamload.core.patterns import matches
from streamload.core.tensors import RowRange
from streamload.offloading.residency import LayerKind
from streamload.planning.blocks import split
from streamload.planning.partition import Item, units_of
from streamload.planning.requests import TensorRequest, TensorRequests
from streamload.planning.room import experts_chosen

# A tensor of experts: the module, the number of the expert where it is of one, and what of it.
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.)?([^.].*)")

# Of the largest modules in layers, what others have at least that are proposed as layers.
_WORTH_NAMING = 0.05


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that stay, or stream, together.

    Attributes:
        name: of the module that has them.
        wants: their numbers among all that is wanted.
        kind: whether they can stream.
        rows: the group of the embedding that has the same weight, or "".
        experts: how many experts they are of, of kind "experts": each parameter has all of them
            along its first axis.
        chosen: how many of them a token chooses.
        apart: each parameter is of one expert, those of the first come first, and all are alike.
    """

    name: str
    wants: tuple[int, ...]
    kind: LayerKind
    rows: str = ""
    experts: int = 0
    chosen: int = 0
    apart: bool = False

    @property
    def parts(self) -> int:
        """How many tensors each of its experts has."""
        return len(self.wants) // self.experts if self.apart else len(self.wants)


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str] = ()
) -> list[tuple[str, list[int], bool]]:
    """Tensors by the modules that have them, in the order in which these run.

    Args:
        names: of the tensors.
        nbytes: of each.
        layers: patterns of names of modules that are layers. Where there are some, the order is
            that of the names.

    Returns:
        For each module its name, the numbers of its tensors, and whether it is one of the layers
        of a stack.

    Raises:
        ValueError: no module has a name that matches a pattern.
    """
    number_of = {name: number for number, name in enumerate(names)}
    found: dict[tuple[str, bool], list[int]] = {}
    stated = _stated(names, layers)
    for name, layer in stated.items():
        found.setdefault((layer, True), []).append(number_of[name])
    items = [item for item in map(Item, names, nbytes) if item.name not in stated]
    for unit in units_of(items):
        in_layer = unit.kind == "layer"
        inside = _layers_in(unit.name, [item.name for item in unit.items]) if in_layer else {}
        for item in unit.items:
            module = inside[item.name] if in_layer else item.name.rpartition(".")[0]
            found.setdefault((module, in_layer), []).append(number_of[item.name])
    groups = [(module, numbers, in_layer) for (module, in_layer), numbers in found.items()]
    return sorted(groups, key=lambda group: min(group[1])) if layers else groups


def _layers_in(layer: str, names: Sequence[str]) -> dict[str, str]:
    """Each tensor of a layer to its layer: those in a layer that is a list of modules, if it is.

    It is where each of its tensors is in a numbered module, and some of these have modules.
    """
    rest = {name: name[len(layer) + 1 :].split(".") for name in names}
    numbered = all(parts[0].isdigit() and len(parts) > 1 for parts in rest.values())
    if not numbered or not any(len(parts) > 2 for parts in rest.values()):
        return dict.fromkeys(names, layer)
    inside: dict[str, list[str]] = {}
    for name, parts in rest.items():
        inside.setdefault(f"{layer}.{parts[0]}", []).append(name)
    found: dict[str, str] = {}
    for module, mine in inside.items():
        found |= _layers_in(module, mine)
    return found


def outer_modules(groups: Sequence[tuple[str, list[int], bool]]) -> set[str]:
    """Names of modules that another group is inside: they compute with more than own weights."""
    found: set[str] = set()
    for name, _, _ in groups:
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def finer_layers(
    groups: Sequence[Group], wants: TensorRequests, nbytes: Sequence[int]
) -> Iterator[str]:
    """Patterns of names of smaller layers: the modules in those that there are.

    Args:
        groups: the layers.
        wants: all tensors.
        nbytes: of each on the device.
    """
    found: dict[str, int] = {}  # bytes of the largest of each pattern
    for group in groups:
        if group.kind != "layer" or not any(part.isdigit() for part in group.name.split(".")):
            continue
        inside: Counter[str] = Counter()
        for at in group.wants:
            child, dot, _ = wants.names[at].removeprefix(f"{group.name}.").partition(".")
            if dot and wants.names[at].startswith(f"{group.name}."):
                inside[f"{group.name}.{child}"] += nbytes[at]
        for module, size in inside.items():
            pattern = ".".join("*" if part.isdigit() else part for part in module.split("."))
            found[pattern] = max(found.get(pattern, 0), size)
    least = max(found.values(), default=0) * _WORTH_NAMING
    yield from (pattern for pattern, size in found.items() if size >= least)


def _stated(names: Sequence[str], layers: Sequence[str]) -> dict[str, str]:
    """Tensors in layers that were stated, and the outermost such layer of each."""
    found, left = {}, {*layers}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts)):
            module = ".".join(parts[:count])
            if matches(module, layers):
                found[name] = module
                left -= {pattern for pattern in left if matches(module, [pattern])}
                break
    if left:
        raise ValueError(f"layers: no module's name matches {min(left)!r}")
    return found


def groups_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
) -> list[Group]:
    """The groups of a checkpoint without a model: what its names tell.

    A weight with "emb" in the name of its module, and two axes, is an embedding. What is numbered
    behind "experts", or has three axes there, is experts.

    Args:
        wants: all tensors.
        nbytes: of each on the device.
        tied: names that are not stored, and whose tensor they share.
        stay: patterns of names of tensors that stay.
        config: the checkpoint's ``config.json``, for how many experts a token chooses.
        layers: patterns of names of modules that are layers.
    """
    groups = _experts_by_name(wants, experts_chosen(config or {}), stay)
    taken = {at for group in groups for at in group.wants}
    by_name = groups_by_name(wants.names, nbytes, layers)
    outer = outer_modules(by_name)
    for name, every, in_layer in by_name:
        numbers = [at for at in every if at not in taken]
        if not numbers:
            continue
        kind: LayerKind = "fixed" if name in outer else "layer"
        fixed = tuple(at for at in numbers if matches(wants.names[at], stay))
        if fixed:
            groups.append(Group(f"{name} (stays)", fixed, "fixed"))
            numbers = [at for at in numbers if at not in fixed]
            if not numbers:
                continue
        leaf = name.rpartition(".")[2]
        if not in_layer and len(numbers) == 1 and ("emb" in leaf or leaf in ("wte", "shared")):
            weight = wants.names[numbers[0]]
            if weight in tied.values():  # the head has it too, and streams where it does not stay
                head = next(each for each, shared in tied.items() if shared == weight)
                groups.append(Group(head.rpartition(".")[0], (numbers[0],), "layer", name))
                continue
            kind = "rows" if len(wants.shapes[numbers[0]]) == 2 else "fixed"
        groups.append(Group(name, tuple(numbers), kind))
    return groups


@dataclass(frozen=True, slots=True)
class Step:
    """What a loop of a user's own gets at once.

    Attributes:
        name: of the layer; of what is outside of layers, see `streamload.split`.
        wants: the numbers of its tensors among all that is wanted, by name.
    """

    name: str
    wants: Mapping[str, int]


def steps_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> tuple[list[Step], list[Group]]:
    """The steps of a loop of a user's own, in the order in which they run, and their groups.

    What is outside of layers has steps of its own: the embedding, the head with what comes before
    it, and the ends of stacks in the middle of a model. A weight that two of them use stays.

    Args:
        wants: all tensors.
        nbytes: of each on the device.
        tied: names that are not stored, and whose tensor they share.
        stay: patterns of names of tensors that stay.
        layers: patterns of names of modules that are layers. Where there are some, the order is
            that of the names.

    Raises:
        ValueError: no module has a name that matches a pattern in ``layers``.
    """
    number_of = {name: number for number, name in enumerate(wants.names)}
    found: dict[str, dict[str, int]] = {}
    stated = _stated(wants.names, layers)
    for name, layer in stated.items():
        found.setdefault(layer, {})[name] = number_of[name]
    items = [item for item in map(Item, wants.names, nbytes) if item.name not in stated]
    shared = {name: other for name, other in tied.items() if other not in stated}
    for unit in units_of(items, tied=shared):
        mine = found.setdefault(unit.name, {})
        mine.update((item.name, number_of[item.name]) for item in unit.items)
        mine.update((name, number_of[other]) for name, other in unit.tied)
    steps = [Step(*each) for each in found.items()]
    if layers:
        steps.sort(key=lambda step: min(step.wants.values()))
    users = Counter(at for step in steps for at in step.wants.values())
    groups = []
    placed: set[int] = set()
    for step in steps:
        numbers = [at for at in dict.fromkeys(step.wants.values()) if at not in placed]
        placed.update(numbers)
        fixed = {at for at in numbers if users[at] > 1 or matches(wants.names[at], stay)}
        rest = tuple(at for at in numbers if at not in fixed)
        if fixed:
            name = f"{step.name} (stays)" if rest else step.name
            groups.append(Group(name, tuple(sorted(fixed)), "fixed"))
        if rest:
            groups.append(Group(step.name, rest, "layer"))
    return steps, groups


def _experts_by_name(wants: TensorRequests, chosen: int, stay: Sequence[str]) -> list[Group]:
    """The experts of a checkpoint: one by one, or all of a layer in a tensor."""
    apart: dict[str, dict[int, list[tuple[str, int]]]] = {}
    fused: dict[str, list[int]] = {}
    for at, name in enumerate(wants.names):
        match, src = _EXPERTS.fullmatch(name), wants.srcs[at]
        whole = src.kind == "float" and src.bits >= 8 and not src.is_packed
        if match is None or not whole or matches(name, stay):
            continue
        if match[2]:
            parts = apart.setdefault(match[1], {}).setdefault(int(match[2]), [])
            parts.append((match[3], at))
        else:
            fused.setdefault(match[1], []).append(at)
    groups = []
    for name, by_number in apart.items():
        every = [sorted(by_number[number]) for number in sorted(by_number)]
        kinds = {tuple((part, wants.shapes[at]) for part, at in parts) for parts in every}
        if len(kinds) == 1 and len(every) > 1:
            numbers = tuple(at for parts in every for _, at in parts)
            count = len(every)
            groups.append(Group(name, numbers, "experts", "", count, min(chosen, count), True))
    for name, found in fused.items():
        counts = {wants.shapes[at][:1] for at in found}
        if len(counts) == 1 and any(len(wants.shapes[at]) == 3 for at in found):
            ((count,),) = counts
            groups.append(Group(name, tuple(found), "experts", "", count, min(chosen, count)))
    return groups


def rows_of_experts(want: TensorRequest, experts: int) -> list[tuple[RowRange, ...]] | None:
    """The rows of the file of each expert of a parameter; None where it is no such parameter."""
    plain = want.transpose is None and want.coding is None
    if not plain or want.shape[:1] != (experts,) or not math.prod(want.shape):
        return None
    numel = math.prod(want.shape)
    rows = sum(r.stop - r.start for r in want.source)
    return split(want.source, numel // rows, numel // experts)
