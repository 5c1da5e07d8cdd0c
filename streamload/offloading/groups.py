"""Group the parameters of a model or checkpoint into layers, which stay or stream as a whole."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from streamload.core.patterns import matches
from streamload.core.tensors import RowRange
from streamload.offloading.residency import LayerKind
from streamload.planning.blocks import split
from streamload.planning.partition import Item, units_of
from streamload.planning.requests import TensorRequest, TensorRequests
from streamload.planning.room import experts_chosen

# A tensor of experts: the module, the expert's number if it holds one expert, the parameter.
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.)?([^.].*)")

#: How texts show the name of the root module, which is empty.
ROOT = "(root)"

# The group of all tensors that `without_small` returns.
_SMALL = "small tensors of layers"
# A tensor is small if it has at most this share of its layer: norms, biases, scales of scales.
# Each costs the host as much as a large one, and all of them little memory.
_SMALL_SHARE = 1 / 4096
# The most that all small ones of a layer have of it; beyond that the larger ones stream.
_ALL_SMALL_SHARE = 0.01

# A module is proposed as a layer if it has this share of the bytes of the largest in layers.
_WORTH_NAMING = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The parameters of a module, which stay on the device or stream as a whole."""

    name: str
    wants: tuple[int, ...]  # indices of the parameters in `TensorRequests`
    kind: LayerKind
    rows: str = ""  # name of the embedding with the same weight
    experts: int = 0  # along the first axis of each parameter
    chosen: int = 0  # number of experts that a token chooses
    apart: bool = False  # each parameter holds one expert; those of the first expert come first

    @property
    def parts(self) -> int:
        """Number of tensors of each expert."""
        return len(self.wants) // self.experts if self.apart else len(self.wants)


class Module(NamedTuple):
    """A module's name, and the indices of its tensors among all."""

    name: str
    numbers: list[int]
    in_layer: bool  # whether it is a layer of a stack


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str] = ()
) -> list[Module]:
    """Return the modules that hold tensors of these names, in the order in which they run.

    ``nbytes``: bytes of each tensor. ``layers``: patterns of names of layers; with these, the order
    is that of ``names``. Raises ValueError for a pattern that no module matches.
    """
    number_of = {name: number for number, name in enumerate(names)}
    stated, items = _stated(names, nbytes, layers)
    found = {(layer, True): numbers for layer, numbers in stated.items()}
    for unit in units_of(items):
        in_layer = unit.kind == "layer"
        inside = _layers_in(unit.name, [item.name for item in unit.items]) if in_layer else {}
        for item in unit.items:
            module = inside[item.name] if in_layer else item.name.rpartition(".")[0]
            found.setdefault((module, in_layer), []).append(number_of[item.name])
    groups = [Module(name, numbers, in_layer) for (name, in_layer), numbers in found.items()]
    return sorted(groups, key=lambda group: min(group.numbers)) if layers else groups


def _layers_in(layer: str, names: Sequence[str]) -> dict[str, str]:
    """Return the layer of each tensor: ``layer``, or its items if ``layer`` is a list of modules.

    In a list, each tensor is in a numbered module, and some of these modules contain modules.
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


def outer_modules(groups: Sequence[Module]) -> set[str]:
    """Return names of all modules that contain a module of ``groups``, and so use its weights."""
    paths = [group.name.split(".") for group in groups if group.name]
    return {".".join(path[:stop]) for path in paths for stop in range(len(path))}


def finer_layers(
    groups: Sequence[LayerGroup], wants: TensorRequests, nbytes: Sequence[int]
) -> Iterator[str]:
    """Yield name patterns of modules inside of layers, to suggest as smaller ``layers=``."""
    found: dict[str, int] = {}  # by pattern, bytes of the largest module
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


def _stated(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str]
) -> tuple[dict[str, list[int]], list[Item]]:
    """Return tensor indices by outermost module that matches ``layers``, and the other tensors."""
    found: dict[str, list[int]] = {}
    rest, left = [], {*layers}
    for at, name in enumerate(names):
        parents = accumulate(name.split(".")[:-1], "{}.{}".format)
        module = next((each for each in parents if matches(each, layers)), None)
        if module is None:
            rest.append(Item(name, nbytes[at]))
        else:
            found.setdefault(module, []).append(at)
            left -= {pattern for pattern in left if matches(module, [pattern])}
    if left:
        raise ValueError(f"layers: no module's name matches {min(left)!r}")
    return found, rest


def grouped(
    found: Sequence[Module],
    stays: Callable[[int], bool],
    group_of: Callable[[str, tuple[int, ...], bool], LayerGroup],
    *,
    marked: bool = False,
) -> Iterator[LayerGroup]:
    """Yield for each module a group of its tensors that stay, and a group of the rest.

    ``stays``: whether the tensor with an index stays. ``group_of`` makes the group of the rest,
    from the module's name, the tensors' indices, and `Module.in_layer`. The group that stays is
    named like the module; "NAME (stays)" if both groups exist, or ``marked`` is set.
    """
    for name, numbers, in_layer in found:
        fixed = dict.fromkeys(filter(stays, numbers))
        rest = tuple(at for at in numbers if at not in fixed)
        if fixed:
            label = f"{name} (stays)" if rest or marked else name
            yield LayerGroup(label, tuple(fixed), "fixed")
        if rest:
            yield group_of(name, rest, in_layer)


def without(found: Sequence[Module], taken: Collection[int]) -> list[Module]:
    """Return the modules without the tensors whose indices are in ``taken``."""
    return [each._replace(numbers=[n for n in each.numbers if n not in taken]) for each in found]


def without_small(
    found: Sequence[Module], nbytes: Sequence[int]
) -> tuple[list[Module], list[LayerGroup]]:
    """Return the modules without tensors small for their layer, and these, to stay."""
    small: list[int] = []
    for numbers in [each.numbers for each in found if each.in_layer]:
        total = sum(nbytes[at] for at in numbers)
        first = sorted(numbers, key=nbytes.__getitem__)
        for at, taken in zip(first, accumulate(nbytes[at] for at in first), strict=True):
            if nbytes[at] > _SMALL_SHARE * total or taken > _ALL_SMALL_SHARE * total:
                break
            small.append(at)
    group = [LayerGroup(_SMALL, tuple(sorted(small)), "fixed")] if small else []
    return without(found, {*small}), group


def groups_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
) -> list[LayerGroup]:
    """Return the layers of a checkpoint without a model, found by the names of its tensors.

    A weight with "emb" in the name of its module, and two axes, is an embedding. A tensor below
    "experts" that is numbered, or has three axes, belongs to experts.

    ``nbytes``: bytes of each tensor; ``tied``: names that are not stored, and the stored tensor of
    each; ``stay``: patterns of tensors that stay; ``layers``: patterns of names of layers.
    """
    experts = _experts_by_name(wants, experts_chosen(config or {}), stay)
    by_name = groups_by_name(wants.names, nbytes, layers)
    outer = outer_modules(by_name)

    def group_of(name: str, numbers: tuple[int, ...], in_layer: bool) -> LayerGroup:
        leaf, weight = name.rpartition(".")[2], wants.names[numbers[0]]
        kind: LayerKind = "fixed" if name in outer else "layer"
        if not in_layer and len(numbers) == 1 and ("emb" in leaf or leaf in ("wte", "shared")):
            if weight in tied.values():  # the head has it too, and streams where it does not stay
                head = next(each for each, shared in tied.items() if shared == weight)
                return LayerGroup(head.rpartition(".")[0], numbers, "layer", name)
            kind = "rows" if len(wants.shapes[numbers[0]]) == 2 else "fixed"
        return LayerGroup(name, numbers, kind)

    rest = without(by_name, {at for group in experts for at in group.wants})
    rest, small = without_small(rest, nbytes)
    groups = grouped(rest, lambda at: matches(wants.names[at], stay), group_of, marked=True)
    return [*experts, *groups, *small]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a loop over `stream_layers`: the tensors of a layer, or some outside of layers."""

    name: str
    wants: Mapping[str, int]  # by name, the index of each tensor


def steps_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> tuple[list[Step], list[LayerGroup]]:
    """Return the steps of a loop over `stream_layers`, in running order, and their groups.

    Outside of layers, steps are the embedding, the head with the modules before it, and the end of
    an inner stack (an encoder's last norm). A weight that two steps use stays. For arguments see
    `groups_of_checkpoint`.
    """
    number_of = {name: number for number, name in enumerate(wants.names)}
    stated, items = _stated(wants.names, nbytes, layers)
    found = {layer: {wants.names[at]: at for at in numbers} for layer, numbers in stated.items()}
    inside = {name for tensors in found.values() for name in tensors}
    shared = {name: other for name, other in tied.items() if other not in inside}
    for unit in units_of(items, tied=shared):
        mine = found.setdefault(unit.name, {})
        mine.update((item.name, number_of[item.name]) for item in unit.items)
        mine.update((name, number_of[other]) for name, other in unit.tied)
    steps = [Step(*each) for each in found.items()]
    if layers:
        steps.sort(key=lambda step: min(step.wants.values()))
    users = Counter(at for step in steps for at in step.wants.values())
    # by tensor, the first step that uses it, in whose group it is
    first = {at: step.name for step in reversed(steps) for at in step.wants.values()}
    own = [
        Module(s.name, sorted({at for at in s.wants.values() if first[at] == s.name}), True)
        for s in steps
    ]
    groups = grouped(
        own,
        lambda at: users[at] > 1 or matches(wants.names[at], stay),
        lambda name, numbers, _: LayerGroup(name, numbers, "layer"),
    )
    return steps, [*groups]


def _experts_by_name(wants: TensorRequests, chosen: int, stay: Sequence[str]) -> list[LayerGroup]:
    """Return a group for each layer's experts, stored fused or one by one.

    ``chosen``: number of experts that a token chooses; ``stay``: patterns of tensors that stay.
    """
    apart: dict[str, dict[int, list[tuple[str, int]]]] = {}
    fused: dict[str, list[int]] = {}
    for at, name in enumerate(wants.names):
        match, src = _EXPERTS.fullmatch(name), wants.srcs[at]
        whole = src.kind == "float" and src.bits >= 8 and not src.is_packed
        if match is None or not whole or matches(name, stay):
            continue
        if match[2]:
            apart.setdefault(match[1], {}).setdefault(int(match[2]), []).append((match[3], at))
        else:
            fused.setdefault(match[1], []).append(at)
    groups = []
    for name, by_number in apart.items():
        every = [sorted(by_number[number]) for number in sorted(by_number)]
        kinds = {tuple((part, wants.shapes[at]) for part, at in parts) for parts in every}
        if len(kinds) == 1 and len(every) > 1:
            numbers, count = tuple(at for parts in every for _, at in parts), len(every)
            groups.append(LayerGroup(name, numbers, "experts", "", count, min(chosen, count), True))
    for name, found in fused.items():
        counts = {wants.shapes[at][:1] for at in found}
        if len(counts) == 1 and any(len(wants.shapes[at]) == 3 for at in found):
            ((count,),) = counts
            groups.append(LayerGroup(name, tuple(found), "experts", "", count, min(chosen, count)))
    return groups


def rows_of_experts(want: TensorRequest, experts: int) -> list[tuple[RowRange, ...]] | None:
    """Return rows in the file for each of ``experts`` experts; None if these are no whole rows."""
    plain, numel = want.transpose is None and want.coding is None, math.prod(want.shape)
    if not plain or want.shape[:1] != (experts,) or not numel:
        return None
    rows = sum(r.stop - r.start for r in want.source)
    return split(want.source, numel // rows, numel // experts)
