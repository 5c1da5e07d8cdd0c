"""Parameters of a model that stay on a device, or stream, together."""

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

# A tensor of experts: the module, the expert's number if it is of one, and the parameter.
_EXPERTS = re.compile(r"(.*\bexperts)\.(?:(\d+)\.)?([^.].*)")

# Least share of the largest module in layers for a module to be proposed as a layer.
_WORTH_NAMING = 0.05


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Parameters of a module that stay, or stream, together."""

    name: str
    wants: tuple[int, ...]  # numbers of the parameters
    kind: LayerKind
    rows: str = ""  # the group of an embedding with the same weight
    experts: int = 0  # along the first axis of each parameter
    chosen: int = 0  # experts of a token
    apart: bool = False  # a parameter is of one expert; those of the first expert come first

    @property
    def parts(self) -> int:
        """How many tensors each of its experts has."""
        return len(self.wants) // self.experts if self.apart else len(self.wants)


class Module(NamedTuple):
    """The tensors of a module."""

    name: str
    numbers: list[int]
    in_layer: bool  # of a stack


def groups_by_name(
    names: Sequence[str], nbytes: Sequence[int], layers: Sequence[str] = ()
) -> list[Module]:
    """Modules with tensors, in the order in which they run.

    With ``layers``, patterns of names of layers, the order is that of the names. Raises ValueError
    for a pattern that no module matches.
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
    groups = [Module(name, numbers, in_layer) for (name, in_layer), numbers in found.items()]
    return sorted(groups, key=lambda group: min(group.numbers)) if layers else groups


def _layers_in(layer: str, names: Sequence[str]) -> dict[str, str]:
    """The layer of each tensor: those inside of a layer that is a list of modules.

    It is one if each of its tensors is in a numbered module, and some of these have modules.
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
    """Names of modules that another group is inside: they compute with more than own weights."""
    found: set[str] = set()
    for name, _, _ in groups:
        while name:
            name = name.rpartition(".")[0]
            found.add(name)
    return found


def finer_layers(
    groups: Sequence[LayerGroup], wants: TensorRequests, nbytes: Sequence[int]
) -> Iterator[str]:
    """Patterns of names of smaller layers: the modules inside of these."""
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
        for module in accumulate(name.split(".")[:-1], "{}.{}".format):
            if matches(module, layers):
                found[name] = module
                left -= {pattern for pattern in left if matches(module, [pattern])}
                break
    if left:
        raise ValueError(f"layers: no module's name matches {min(left)!r}")
    return found


def grouped(
    found: Sequence[Module],
    stays: Callable[[int], bool],
    group_of: Callable[[str, tuple[int, ...], bool], LayerGroup],
    *,
    marked: bool = False,
) -> Iterator[LayerGroup]:
    """Groups of modules' tensors: those that stay, and the others, by ``group_of``.

    If ``marked``, "(stays)" is in the name even if all tensors of a module stay.
    """
    for name, numbers, in_layer in found:
        fixed = {at for at in numbers if stays(at)}
        rest = tuple(at for at in numbers if at not in fixed)
        if fixed:
            own = tuple(at for at in numbers if at in fixed)
            yield LayerGroup(f"{name} (stays)" if rest or marked else name, own, "fixed")
        if rest:
            yield group_of(name, rest, in_layer)


def without(found: Sequence[Module], taken: Collection[int]) -> list[Module]:
    """Modules with the tensors that are not taken."""
    return [each._replace(numbers=[n for n in each.numbers if n not in taken]) for each in found]


def groups_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    layers: Sequence[str] = (),
) -> list[LayerGroup]:
    """The groups of a checkpoint without a model, by the names of its tensors.

    A weight with "emb" in the name of its module, and two axes, is an embedding. A tensor that is
    numbered behind "experts", or has three axes there, is of experts. ``tied``: names that are not
    stored, and the tensor of each.
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
    groups = grouped(rest, lambda at: matches(wants.names[at], stay), group_of, marked=True)
    return [*experts, *groups]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a user's own loop; outside of layers, it is named as by `streamload.split`."""

    name: str
    wants: Mapping[str, int]  # numbers of its tensors, by name


def steps_of_checkpoint(
    wants: TensorRequests,
    nbytes: Sequence[int],
    tied: Mapping[str, str],
    stay: Sequence[str] = (),
    layers: Sequence[str] = (),
) -> tuple[list[Step], list[LayerGroup]]:
    """The steps of a loop of a user's own, in the order in which they run, and their groups.

    Outside of layers, the embedding, the head with the modules before it, and the inner ends of
    stacks are steps. A weight that two steps use stays. Arguments as of `groups_of_checkpoint`.
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
    # the step that places a tensor
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
            groups.append(LayerGroup(name, numbers, "experts", "", count, min(chosen, count), True))
    for name, found in fused.items():
        counts = {wants.shapes[at][:1] for at in found}
        if len(counts) == 1 and any(len(wants.shapes[at]) == 3 for at in found):
            ((count,),) = counts
            groups.append(LayerGroup(name, tuple(found), "experts", "", count, min(chosen, count)))
    return groups


def rows_of_experts(want: TensorRequest, experts: int) -> list[tuple[RowRange, ...]] | None:
    """The rows of each expert of a parameter in the file; None if it is of no experts."""
    plain = want.transpose is None and want.coding is None
    if not plain or want.shape[:1] != (experts,) or not math.prod(want.shape):
        return None
    numel = math.prod(want.shape)
    rows = sum(r.stop - r.start for r in want.source)
    return split(want.source, numel // rows, numel // experts)
