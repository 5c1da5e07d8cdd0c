"""The split of a load over a group of processes: one plan, the same on every rank.

Ranks may share each layer (tensor parallelism): then each has slices of its tensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.core.chart import Shown
from streamload.core.model_config import integer, language_part
from streamload.core.tensors import Block, RowRange, TensorInfo
from streamload.core.units import format_bytes, format_table
from streamload.errors import NodeError, PlanInfeasibleError
from streamload.planning.match import part_of
from streamload.planning.moves import Move
from streamload.planning.partition import Item, Node, Part, Unit, ordered, partition, units_of
from streamload.planning.plan import Plan
from streamload.planning.sources import Side, Source, general, is_conv1d, is_styled, side_of

_MESH = re.compile(r"([0-9]{1,6})x([0-9]{1,6})")
_LISTED = 4  # reasons in a message
_MOST_RANKS = 1024  # of sizes in a message


class Slice(NamedTuple):
    """Indices ``start`` to ``stop`` (exclusive) along one axis of a parameter."""

    axis: int
    start: int
    stop: int


#: A rank's slices of a parameter: one, or one of each matrix that is fused in it, joined in order.
Slices = tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in groups: layers are split over the groups, tensors over the ranks of each group.

    Attributes:
        size: ranks of a group.
        styles: transformers' plan for the model, a style by module; if empty, tensors are cut by
            the rules of `streamload.planning.sources`.
    """

    groups: int
    size: int
    styles: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, split: object, ranks: int) -> Mesh | None:
        """Read ``split``, "tensor" or such as "2x4"; None if it is another split.

        Raises ValueError if the mesh has another number of ranks.
        """
        found = _MESH.fullmatch(split) if isinstance(split, str) else None
        if found is None:
            return cls(1, ranks) if split == "tensor" else None
        groups, size = map(int, found.groups())
        if groups * size != ranks:
            raise ValueError(f'split="{split}" is for {groups * size} ranks, and there are {ranks}')
        return cls(groups, size)

    def __str__(self) -> str:
        return f"{self.groups}x{self.size}" if self.groups > 1 else "tensor"


def slices_of(checkpoint: Checkpoint, placements: Iterable[Move], mesh: Mesh) -> dict[str, Slices]:
    """Return by name the slices of the first rank of a group; other parameters stay whole.

    Raises ValueError if heads, blocks or axes do not divide, or no rule cuts the model's layers.
    """
    if mesh.size == 1:
        return {}
    names = set(map(general, checkpoint.tensors))
    is_planned = any(is_styled(name, mesh.styles) for name in names)
    sides = {name: side_of(name, mesh.styles if is_planned else {}) for name in names}
    if not any(side and "*" in name for name, side in sides.items()):
        kind = checkpoint.config.get("model_type", "this model")
        raise ValueError(
            f'cannot split tensors: there is no rule for the layers of {kind}; write split="layers"'
        )
    cutter = _Cutter(checkpoint, mesh.size, sides)
    found = {p.name: slices for p in placements if (slices := cutter.slices(p))}
    cutter.check()
    return found


def slices_at(slices: Slices, index: int) -> Slices:
    """Return the slices of another rank of the group, from those of the first."""
    return tuple(
        Slice(axis, *(edge + index * (stop - start) for edge in (start, stop)))
        for axis, start, stop in slices
    )


def sliced_shape(shape: tuple[int, ...], slices: Slices) -> tuple[int, ...]:
    """Return the shape of a parameter's slices, joined."""
    if not slices:
        return shape
    axis = slices[0].axis
    return (*shape[:axis], sum(s.stop - s.start for s in slices), *shape[axis + 1 :])


def sliced(checkpoint: Checkpoint, source: Source, slices: Slices) -> Source | None:
    """Return the source of a parameter's slices; None if they are no rows or columns of the file.

    ``source`` has the parameter's shape.
    """
    if not slices:
        return source
    whole = source.shape or ()
    shape = sliced_shape(whole, slices)
    blocks = [Block(whole, _first(whole, slices[0]), shape, len(slices))]
    if slices[0].axis == 0:
        blocks = [Block(whole, _first(whole, s), sliced_shape(whole, (s,))) for s in slices]
    elif len({s.stop - s.start for s in slices}) > 1:
        return None
    found = [part_of(checkpoint, source, block) for block in blocks]
    parts = [part for part in found if part is not None]
    if len(parts) < len(blocks) or (len(parts) > 1 and source.transpose is not None):
        return None
    rows = (row for part in parts for row in part.rows)
    return Source(rows, parts[0].transpose, shape)


def _first(shape: tuple[int, ...], one: Slice) -> tuple[int, ...]:
    return tuple(one.start if axis == one.axis else 0 for axis in range(len(shape)))


class _Axis(NamedTuple):
    """The axis of a tensor that is cut."""

    place: int  # counted from the last: -1
    length: int  # in the file
    numel: int  # elements of the weight, of which a quantized tensor may have fewer
    unit: int  # elements that stay together: of a block with one scale


@dataclass(slots=True)
class _Cutter:
    """Cuts parameters for groups of ``size`` ranks, and collects what does not divide."""

    checkpoint: Checkpoint
    size: int
    sides: Mapping[str, Side | None]  # by general name of the tensor
    divisor: int = 0  # the sizes that do divide are its divisors
    refused: dict[str, None] = field(default_factory=dict)

    def slices(self, p: Move) -> Slices:
        """Return the slices of the first rank; () for all of the parameter."""
        info = self.checkpoint.tensors[p.source[0].tensor]
        name = general(info.name)
        side = self.sides[name]
        axis = self._axis(name, info, side.of) if side is not None else None
        if side is None or axis is None:
            return ()
        if p.kind.shape[-len(info.shape) :] != info.shape:
            self.refused[f"{p.name} is put together of several tensors, or of a part of one"] = None
            return ()
        out, begin, refused = [], 0, len(self.refused)
        for numel, count, label in self._pieces(name, axis, side):
            self._divide(name, axis, numel, (count, label))
            length = numel * axis.length // axis.numel
            out.append(Slice(len(p.kind.shape) + axis.place, begin, begin + length // self.size))
            begin += length
        is_plain = p.kind.transpose is None and info.dtype.unit == 1 and len(out) == 1
        if len(self.refused) == refused and not is_plain:
            source = Source(p.source, p.kind.transpose, p.kind.shape)
            if sliced(self.checkpoint, source, tuple(out)) is None:
                self.refused[f"{name} is stored transposed, or in blocks that cross rows"] = None
        return tuple(out)

    def _axis(self, name: str, info: TensorInfo, of: str) -> _Axis | None:
        """Return the axis that is cut; None if the tensor stays whole."""
        shape, group = info.shape, self.checkpoint.members.get(info.name)
        whole = shape if group is None else group.shape or ()
        block = (info.dtype.unit,) if group is None else group.block
        if info.numel == 1:
            return None
        if group is not None:
            is_known = len(whole) == 2 and not group.is_transposed
            if not is_known or len(shape) > 2 or (len(shape) == 1 and shape[0] != whole[0]):
                self.refused[f"{name} is a tensor of {group.kind}: dtype= dequantizes it"] = None
                return None
        if len(shape) < 2:  # a bias, or a scale for each output
            return _Axis(-1, shape[0], shape[0], 1) if of == "out" else None
        place = -1 if (of == "in") != is_conv1d(self.checkpoint.config, info.name) else -2
        unit = block[place] if len(block) >= -place and block[place] < whole[place] else 1
        return _Axis(place, shape[place], whole[place], unit) if shape[place] > 1 else None

    def _pieces(self, name: str, axis: _Axis, side: Side) -> Iterator[tuple[int, int, str]]:
        """Yield (elements, parts that stay whole, their name) of each matrix along an axis."""
        if side.parts == "halves" and axis.numel % 2 == 0:
            yield from [(axis.numel // 2, axis.numel // 2, "")] * 2
            return
        if not side.heads and side.parts != "qkv":
            yield axis.numel, axis.numel, ""
            return
        values, _ = language_part(self.checkpoint.config)
        queries = integer(values, "num_attention_heads") or 0
        keys = integer(values, "num_key_value_heads") or queries
        names = ["num_attention_heads", *["num_key_value_heads"] * 2]
        counts = [queries, keys, keys]
        if side.parts != "qkv":
            first = names.index(side.heads)
            names, counts = names[first : first + 1], counts[first : first + 1]
        if not sum(counts) or axis.numel % sum(counts):
            self.refused[f"config.json has no number of heads that divides {name}"] = None
            return
        for label, count in zip(names, counts, strict=True):
            yield axis.numel // sum(counts) * count, count, label

    def _divide(self, name: str, axis: _Axis, numel: int, heads: tuple[int, str]) -> None:
        """Note the sizes that divide one matrix, and why this one does not."""
        count, label = heads
        blocks = numel // axis.unit if numel % axis.unit == 0 else 1
        self.divisor = math.gcd(self.divisor, count, blocks)
        side = {-1: "columns", -2: "rows"}[axis.place]
        if count % self.size:
            what = f"{label} {count}" if label else f"the {count} {side} of {name}"
            self.refused[f"{self.size} does not divide {what}"] = None
        elif blocks % self.size or numel * axis.length % (axis.numel * self.size):
            what = f"{blocks} blocks of {axis.unit} {side} of {name}"
            self.refused[f"{self.size} does not divide the {what}"] = None

    def check(self) -> None:
        """Raise ValueError if a parameter cannot be cut."""
        if not self.refused:
            return
        reasons = list(self.refused)
        more = [f"and {len(reasons) - _LISTED} more"] if len(reasons) > _LISTED else []
        most = min(self.divisor, _MOST_RANKS)
        sizes = [str(size) for size in range(2, most + 1) if self.divisor % size == 0]
        instead = 'write split="layers"'
        if sizes and str(self.size) not in sizes:
            instead = f"sizes that divide: {', '.join(sizes)}; or {instead}"
        raise ValueError(
            f"cannot split tensors over {self.size} ranks: "
            f"{'; '.join([*reasons[:_LISTED], *more])}: {instead}"
        )


class Member(NamedTuple):
    """A process of a group that loads a checkpoint together, and its host."""

    rank: int  # its rank in the group
    node: str  # its node id, unique in the group
    host: str  # the host that it runs on
    local_rank: int  # its index among the ranks of that host, from 0
    local_size: int  # the number of ranks on that host
    held: frozenset[str] = frozenset()  # names of parameters that it holds already


#: A function of nodes and of bytes by parameter; returns the names that each node loads.
SplitFunction = Callable[[Sequence[Node], Mapping[str, int]], Mapping[str, Iterable[str]]]
#: A function, "layers", "replicate", "balanced", "tensor", or a mesh such as "2x4".
Split = str | SplitFunction
#: The argument for models whose ranks number their own layers from 0.
LOCAL_LAYERS = "layers=lambda part: range(len(part.layers))"


@dataclass(frozen=True, slots=True)
class Share:
    """The parameters that one node loads.

    Attributes:
        node: its id.
        rank: its rank in the group.
        index: its place in the order of the layers, from 0.
        layers: the model's layers on the node, counted from 0 over all stacks; may be empty, and is
            if the split is not by whole layers.
        has_embedding: whether it has the embedding (all tensors before the layers).
        has_head: whether it has the norm and the head (all tensors after the layers).
        parameters: the names of the parameters that it loads.
        nbytes: bytes of these parameters when loaded.
        source_nbytes: bytes of these parameters in the checkpoint.
        budget_nbytes: bytes that the node may hold.
        previous_rank: the rank that has the layers before this share; None for the first.
        next_rank: the rank that has the layers after this share; None for the last.
        pass_nbytes: bytes that a forward pass reads, if the share is offloaded and does not fit.
        part: which part of each sliced tensor it has, from 0; see `ClusterPlan.slices`.
        parts: how many nodes hold the parts of these tensors together, this one included.
    """

    node: str
    rank: int
    index: int
    layers: range
    has_embedding: bool
    has_head: bool
    parameters: tuple[str, ...]
    nbytes: int
    source_nbytes: int
    budget_nbytes: int
    previous_rank: int | None
    next_rank: int | None
    pass_nbytes: int = 0
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, slots=True)
class ClusterPlan(Shown):
    """The share of every node of a group. Prints as a table.

    Attributes:
        path: the checkpoint.
        split: "layers", "replicate", "balanced", "tensor", a mesh such as "2x4", or the name of the
            function that split.
        shares: one for each rank, in the order of the layers: by node id, numbers in it compared as
            numbers ("board-2" before "board-10"). Not the order of ranks, which launchers may
            change from one start to the next.
        rank: this process's rank.
        placements: dtype, source and cast of each whole parameter, by name; on any node.
        first_slices: the slices in part 0 of each parameter that is cut, by name.
    """

    path: str
    split: str
    shares: tuple[Share, ...]
    rank: int
    placements: Mapping[str, Move]
    first_slices: Mapping[str, Slices] = field(default_factory=dict)

    @property
    def mine(self) -> Share:
        """This rank's share."""
        return next(share for share in self.shares if share.rank == self.rank)

    @property
    def digest(self) -> str:
        """SHA-256 of the split without paths and ranks: the same on every rank."""
        lists: dict[int, str] = {}  # of parameters: replicas have one, which may be long
        shares = []
        for s in self.shares:
            first = lists.setdefault(id(s.parameters), s.node)
            names = s.parameters if first == s.node else ()
            sizes = s.budget_nbytes, s.nbytes, s.source_nbytes, s.pass_nbytes
            shares.append([s.node, *sizes, s.part, s.parts, first, *names])
        sources = [
            [
                *(p.name, p.kind.shape, p.kind.src.name, p.kind.dst.name),
                [[r.tensor, r.start, r.stop] for r in p.source],
                p.kind.transpose,
            ]
            for p in self.placements.values()
        ]
        whole = [self.split, shares, sources, self.first_slices]
        text = json.dumps(whole, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def with_passes(self, pass_nbytes: Mapping[str, int]) -> ClusterPlan:
        """Return the plan with the bytes that each forward pass reads on a node, by node id."""
        read = [replace(s, pass_nbytes=pass_nbytes.get(s.node, 0)) for s in self.shares]
        return replace(self, shares=tuple(read))

    def replicas(self) -> list[tuple[tuple[int, ...], list[str]]]:
        """Return (ranks, parameters that exactly these ranks load) for sets of several ranks.

        Parameters that are cut have no replicas.
        """
        lists = {id(share.parameters) for share in self.shares}
        if len(lists) == 1 and len(self.shares) > 1:
            held = [name for name in self.mine.parameters if name not in self.first_slices]
            return [(tuple(sorted(s.rank for s in self.shares)), held)]
        owners: dict[str, list[int]] = {}
        for share in self.shares:
            for name in share.parameters:
                if name in self.first_slices:
                    continue
                owners.setdefault(name, []).append(share.rank)
        found: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in owners.items():
            if len(ranks) > 1:
                found.setdefault(tuple(sorted(ranks)), []).append(name)
        return sorted(found.items())

    def slices(self, share: Share) -> dict[str, Slices]:
        """Return a share's slices of each parameter that is cut, by name."""
        found = self.first_slices
        return {n: slices_at(found[n], share.part) for n in share.parameters if n in found}

    def sources(self, share: Share, checkpoint: Checkpoint) -> dict[str, Source]:
        """Return the source of each parameter of a share, or of its slices of it, by name.

        A quantized weight has one source, by the name of its codes and in the weight's shape.
        """
        found = ((name, self.placements[name]) for name in share.parameters)
        whole = {
            name: Source(
                p.source,
                p.kind.transpose,
                p.kind.shape if p.kind.coding is None else p.kind.coding.shape,
            )
            for name, p in found
            if p.kind.coding is None or not p.kind.coding.part
        }
        for name, slices in self.slices(share).items():
            source = sliced(checkpoint, whole[name], slices)
            assert source is not None, name  # `slices_of` refuses such cuts
            whole[name] = source
        return whole

    def layers(self) -> list[Unit]:
        """Return the layers of the whole model, in order."""
        units = units_of([Item(p.name, p.kind.nbytes) for p in self.placements.values()])
        return [unit for unit in units if unit.kind == "layer"]

    def renumbered(self, share: Share, numbers: Sequence[int]) -> dict[str, str]:
        """Name the parameters of a share for a model that numbers its layers differently.

        Args:
            share: the share.
            numbers: the model's number for each of ``share.layers``, in order.

        Returns:
            The plan's names, by the model's names.

        Raises:
            ValueError: the numbers are invalid, or give two parameters one name.
        """
        if len(numbers) != len(share.layers) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(
                f"layers= gives a whole number for each of the {len(share.layers)} layers of the "
                f"part, such as {LOCAL_LAYERS}, not {list(numbers)!r}"
            )
        local = {name: name for name in share.parameters}
        mine = (unit for unit in self.layers() if unit.items[0].name in local)
        for unit, number in zip(mine, numbers, strict=True):
            place = unit.name.count(".")  # of the number among the components of a name
            for item in unit.items:
                parts = item.name.split(".")
                local[item.name] = ".".join([*parts[:place], str(number), *parts[place + 1 :]])
        found = {new: name for name, new in local.items()}
        if len(found) < len(local):
            new, name = next((n, name) for name, n in local.items() if found[n] != name)
            raise ValueError(f"layers= names two parameters {new!r}: {name!r} and {found[new]!r}")
        return found

    def to_json(self) -> str:
        """Return the plan as JSON, with the shares by node id."""
        nodes = {}
        for share in self.shares:
            fields: dict[str, Any] = asdict(share)
            fields["layers"] = [share.layers.start, share.layers.stop]
            nodes[fields.pop("node")] = fields
        return json.dumps(
            {
                "split": self.split,
                "digest": self.digest,
                "nodes": nodes,
                "first_slices": dict(self.first_slices),
            }
        )

    def __str__(self) -> str:
        rows = [
            [
                share.node,
                str(share.rank),
                holds(share.layers, share.has_embedding, share.has_head) or "-",
                str(len(share.parameters)),
                format_bytes(share.nbytes),
                format_bytes(share.budget_nbytes),
                f"{share.nbytes / share.budget_nbytes:.0%}" if share.budget_nbytes else "-",
            ]
            for share in self.shares
        ]
        titles = ["node", "rank", "holds", "tensors", "weights", "budget", "share"]
        if self.first_slices:
            titles.append("part")
            parts = (f"{share.part} of {share.parts}" for share in self.shares)
            rows = [[*row, part] for row, part in zip(rows, parts, strict=True)]
        if any(share.pass_nbytes for share in self.shares):
            titles.append("a pass reads")
            reads = (format_bytes(s.pass_nbytes) if s.pass_nbytes else "-" for s in self.shares)
            rows = [[*row, read] for row, read in zip(rows, reads, strict=True)]
        return "\n".join(format_table(titles, rows, right=len(titles) - 3))

    __repr__ = __str__


#: A function of a rank's share; returns the numbers of its layers in that rank's model.
LayerNumbers = Callable[[Share], Iterable[int]]


def holds(layers: range, has_embedding: bool, has_head: bool) -> str:
    """Return the parts of the model on a node in words, such as "embedding, layers 0 to 3"."""
    middle = [f"layers {layers.start} to {layers.stop - 1}"] * bool(layers)
    return ", ".join([*["embedding"] * has_embedding, *middle, *["head"] * has_head])


def make_shares(
    rank: int,
    members: Sequence[Member],
    budgets: Sequence[int],
    split: Split | Mesh,
    planned: Callable[[Sequence[Node]], Plan],
    checkpoint: Checkpoint,
    *,
    fits: bool = True,
) -> ClusterPlan:
    """Return the shares of all ranks of a group.

    ``budgets`` are by rank. ``planned`` plans a load of the checkpoint on some nodes. Without
    ``fits``, shares may exceed budgets.
    """
    for member in members:
        if budgets[member.rank] < 1:
            raise NodeError(member.node, "has no budget left for weights")
    nodes = ordered(Node(m.node, budgets[m.rank], m.held) for m in members)
    mesh = split if isinstance(split, Mesh) else Mesh(len(nodes), 1)
    groups = [nodes[at : at + mesh.size] for at in range(0, len(nodes), mesh.size)]
    wanted = [Node("all", 2**62)]
    if split == "layers":
        wanted = list(nodes)
    elif isinstance(split, Mesh):  # cut by the bytes of slices below
        wanted = [Node(group[0].name, 2**62) for group in groups]
    made = planned(wanted)
    placements = {p.name: p for p in made.placements}
    slices: Mapping[str, Slices] = {}
    if isinstance(split, Mesh):
        slices = slices_of(checkpoint, placements.values(), split)
    nbytes_of = {name: _size(p, slices.get(name, ())) for name, p in placements.items()}
    ends: dict[str, _Ends] = {}
    names: Mapping[str, tuple[str, ...]]
    if isinstance(split, Mesh):
        names, ends = _over_groups(groups, placements, nbytes_of)
    elif split == "layers":
        names = _grouped(nodes, {name: p.kind.device for name, p in placements.items()})
        ends = {d.device: (range(*d.layers), d.embedding, d.head) for d in made.devices if d.layers}
    else:
        weights, of = checkpoint.members, {}  # tensors of a quantized weight stay together
        for p in placements.values():
            tensor = p.source[0].tensor
            name = p.name if p.kind.coding is None else tensor
            of[p.name] = weights[tensor].name if tensor in weights else name
        names = _names(nodes, {name: nbytes for name, (nbytes, _) in nbytes_of.items()}, split, of)
    if len(nodes) == 1 or split == "replicate":  # each node has all layers and both ends
        (whole,) = partition([Item(n, nbytes_of[n][0]) for n in placements], [Node("all", 1)])
        ends = dict.fromkeys((node.name for node in nodes), _ends(whole))
    rank_of = {member.node: member.rank for member in members}
    ranks = [rank_of[node.name] for node in nodes]
    shares = []
    sizes: dict[int, tuple[int, int]] = {}  # of lists of names: replicas have one
    for index, node in enumerate(nodes):
        mine = names[node.name]
        if id(mine) not in sizes:
            held = [nbytes_of[name] for name in mine]
            sizes[id(mine)] = sum(each[0] for each in held), sum(each[1] for each in held)
        nbytes, source_nbytes = sizes[id(mine)]
        if fits and nbytes > node.budget:
            largest = sorted(((name, nbytes_of[name][0]) for name in mine), key=_by_size)
            raise PlanInfeasibleError(node.name, nbytes, node.budget, largest=largest[:3])
        before, after = index - mesh.size, index + mesh.size
        share = Share(
            node.name,
            ranks[index],
            index,
            *ends.get(node.name, (range(0), False, False)),
            parameters=mine,
            nbytes=nbytes,
            source_nbytes=source_nbytes,
            budget_nbytes=node.budget,
            previous_rank=ranks[before] if before >= 0 else None,
            next_rank=ranks[after] if after < len(ranks) else None,
            part=index % mesh.size,
            parts=mesh.size,
        )
        shares.append(share)
    label = str(split) if isinstance(split, (str, Mesh)) else _name_of(split)
    return ClusterPlan(made.path, label, tuple(shares), rank, placements, slices)


_Ends = tuple[range, bool, bool]  # layers, embedding, head


def _ends(part: Part) -> _Ends:
    return part.layers, part.has_embedding, part.has_head


def _name_of(split: SplitFunction) -> str:
    return getattr(split, "__qualname__", repr(split))


def _size(p: Move, slices: Slices) -> tuple[int, int]:
    """Return the bytes of a parameter's slices when loaded, and in the checkpoint."""
    if not slices:
        return p.kind.nbytes, p.kind.src_nbytes
    numel = math.prod(sliced_shape(p.kind.shape, slices))
    return p.kind.dst.nbytes(numel), p.kind.src.nbytes(numel)


def _over_groups(
    groups: Sequence[Sequence[Node]],
    placements: Mapping[str, Move],
    nbytes_of: Mapping[str, tuple[int, int]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, _Ends]]:
    """Split layers over groups, by a node's bytes of each parameter and a group's smallest budget.

    Returns the parameters and the ends of each node.
    """
    first: dict[tuple[RowRange, ...], str] = {}
    # a tied head has a copy of its own if the embedding is in another group
    tied = {
        name: other
        for name, p in placements.items()
        if (other := first.setdefault(p.source, name)) != name and len(groups) > 1
    }
    items = [Item(name, nbytes_of[name][0]) for name in placements if name not in tied]
    least = [Node(group[0].name, min(node.budget for node in group)) for group in groups]
    names: dict[str, tuple[str, ...]] = {}
    ends: dict[str, _Ends] = {}
    for group, part in zip(groups, partition(items, least, tied=tied), strict=True):
        held = {*part.names, *(name for name, _ in part.tied)}
        mine = tuple(name for name in placements if name in held)
        names |= dict.fromkeys((node.name for node in group), mine)
        ends |= dict.fromkeys((node.name for node in group), _ends(part))
    return names, ends


def _by_size(pair: tuple[str, int]) -> tuple[int, str]:
    """Return a key that sorts (name, bytes) by size, the largest first, then by name."""
    return -pair[1], pair[0]


def _names(
    nodes: Sequence[Node], sizes: Mapping[str, int], split: Split, of: Mapping[str, str]
) -> Mapping[str, tuple[str, ...]]:
    if split == "replicate":
        return dict.fromkeys((node.name for node in nodes), tuple(sizes))
    if split == "balanced":
        return _balanced(nodes, sizes, of)
    if not callable(split):
        raise ValueError(
            "split is layers, replicate, balanced, tensor, a mesh such as 2x4, or a function of "
            f"nodes and sizes, not {split!r}"
        )
    return _checked(split(nodes, sizes), nodes, sizes)


def _grouped(nodes: Sequence[Node], owner: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Return the parameters of each node, in order; ``owner``: parameters to nodes."""
    names: dict[str, list[str]] = {node.name: [] for node in nodes}
    for name, node in owner.items():
        names[node].append(name)
    return {node: tuple(held) for node, held in names.items()}


def _balanced(
    nodes: Sequence[Node], sizes: Mapping[str, int], of: Mapping[str, str]
) -> Mapping[str, tuple[str, ...]]:
    """Return each node's parameters: whole groups (``of``), largest first, to the emptiest node.

    Groups that a node holds stay there, if they leave room for the rest.
    """
    wholes: Counter[str] = Counter()
    for name, nbytes in sizes.items():
        wholes[of[name]] += nbytes
    budgets = np.array([node.budget for node in nodes], float)
    held = {of[n]: at for at, node in enumerate(nodes) for n in node.held if n in of}
    for pinned in (held, {}):  # nothing stays pinned if the others then have no room
        taken, owner = np.zeros(len(nodes)), {}
        for name, at in pinned.items():
            taken[at] += wholes[name]
        for name, nbytes in sorted(wholes.items(), key=_by_size):
            best = pinned.get(name, int(np.argmin((taken + nbytes) / budgets)))  # of equals first
            owner[name] = nodes[best].name
            taken[best] += nbytes if name not in pinned else 0
        if not held or all(taken <= budgets):
            break
    return _grouped(nodes, {name: owner[of[name]] for name in sizes})


def _checked(
    given: Mapping[str, Iterable[str]], nodes: Sequence[Node], sizes: Mapping[str, int]
) -> Mapping[str, tuple[str, ...]]:
    """Return a user's split in the order of the plan; ValueError if it is incomplete or invalid."""
    if not isinstance(given, Mapping):
        raise ValueError(f"split gave {type(given).__name__}, not the names of each node")
    known = {node.name for node in nodes}
    strange = [str(node) for node in given if node not in known]
    if strange:
        raise ValueError(f"split names nodes that are not there: {', '.join(strange)}")
    chosen: dict[str, set[str]] = {}
    for node in nodes:
        names = given.get(node.name, ())
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise ValueError(f"split gives {node.name} {names!r}, not names")
        chosen[node.name] = set(names)
    place = {name: at for at, name in enumerate(sizes)}
    every = set().union(*chosen.values())
    unknown = sorted(map(str, every - place.keys()))
    if unknown:
        raise ValueError(f"split names parameters that are not there: {', '.join(unknown[:8])}")
    left = [name for name in sizes if name not in every]
    if left:
        raise ValueError(f"split gives {len(left)} parameters to no node: {', '.join(left[:8])}")
    return {node: tuple(sorted(names, key=place.__getitem__)) for node, names in chosen.items()}
