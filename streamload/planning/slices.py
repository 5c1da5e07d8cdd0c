"""Slices of tensors for ranks that share each layer (tensor parallelism)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from streamload.checkpoint.open import Checkpoint
from streamload.core.model_config import integer, language_part
from streamload.core.tensors import Block, TensorInfo
from streamload.planning.families import Side, general, is_conv1d, is_styled, side_of
from streamload.planning.match import part_of
from streamload.planning.moves import Move
from streamload.planning.sources import Source

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
            the rules of `streamload.planning.families`.
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
