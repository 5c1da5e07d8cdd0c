"""Places the tensors of a GGUF file under the names of models, in their orders of rows.

A stack of experts becomes a tensor for each, which is a range of the file. Rows that are not in one
range, and norms that GGUF adds a number to, become views: see `streamload.files.header.View`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from streamload.core.tensors import RowTranspose
from streamload.errors import HeaderError
from streamload.files.header import Turn, View
from streamload.formats.gguf.architectures import Architecture, module_of
from streamload.formats.gguf.constants import TensorType
from streamload.formats.gguf.names import MOST_LAYERS, ROPE_TENSORS
from streamload.formats.reader import File

_MOST_PARTS = 2**20  # tensors of all stacks of a file, and views: an entry may have thousands


class FileTensor(NamedTuple):
    """A tensor of file bytes ``start`` to ``stop``; ``turn`` permutes its rows for models."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    stop: int
    turn: Turn | None = None


def in_models(
    file: File,
    known: Architecture | None,
    tensors: Sequence[FileTensor],
    config: Mapping[str, Any],
) -> tuple[Sequence[FileTensor], Sequence[View]]:
    """Return the tensors under the names of models, and views of which some of them consist.

    Tensors that are settings of the model are left out. Raise HeaderError for a shape that
    contradicts ``config``.
    """
    if known is None:
        return tensors, ()
    placement = _Placement(file, known, config, _pairs(known, tensors))
    out: list[FileTensor] = []
    parts = 0
    left_out = {*ROPE_TENSORS, *(each.name for each in placement.followers.values())}
    for each in tensors:  # there may be millions
        if each.name in left_out:
            continue
        name = known.to_hugging_face(each.name)
        if name is not None and "{}" in name:
            stack = placement.of_stack(each, name)
            parts += len(stack)
            out += stack
        elif name is None or (placement.is_leader(each) and each.name not in placement.followers):
            out.append(each)  # under the file's name
        else:
            out.append(placement.of_one(each)._replace(name=name))
        if parts + len(placement.views) > _MOST_PARTS:
            problem = "its tensors have too many parts, experts or heads"
            raise HeaderError(file.path, problem, f"at most {_MOST_PARTS}", tensor=each.name)
    return out, placement.views


def _pairs(known: Architecture, tensors: Sequence[FileTensor]) -> dict[str, FileTensor]:
    """Return by name of a tensor the one with whose rows its rows alternate."""
    if not known.in_turn:
        return {}
    by_name = {each.name: each for each in tensors}
    out: dict[str, FileTensor] = {}
    for each in tensors:
        for first, second in known.in_turn.items():
            other = by_name.get(each.name.replace(f".{first}.", f".{second}."), each)
            # strides are positive; converters write both in this order
            fits = (other.type, other.shape) == (each.type, each.shape) and min(
                each.shape, default=0
            )
            if fits and len(each.shape) > 1 and other.start > each.start:
                out[each.name] = other
    return out


@dataclass(slots=True)
class _Placement:
    """Places the tensors of one file; ``views`` begin at the file's end, one after the other."""

    file: File
    known: Architecture
    config: Mapping[str, Any]
    followers: Mapping[str, FileTensor]  # see `_pairs`
    views: list[View] = field(default_factory=list)

    def is_leader(self, each: FileTensor) -> bool:
        """Return whether models interleave a tensor's rows with those of another."""
        return any(f".{first}." in each.name for first in self.known.in_turn)

    def of_stack(self, each: FileTensor, name: str) -> list[FileTensor]:
        """Return the tensors that a stack holds, one for each index of its first axis."""
        count = each.shape[0] if len(each.shape) > 1 else 0
        if not 0 < count <= MOST_LAYERS or not math.prod(each.shape):
            expected = f"a stack of 1 to {MOST_LAYERS} tensors"
            self._refuse(each, "it cannot be split", expected, list(each.shape))
        step = (each.stop - each.start) // count
        return [
            FileTensor(
                *(name.format(number), each.type, each.shape[1:]),
                *(each.start + number * step, each.start + (number + 1) * step),
            )
            for number in range(count)
        ]

    def of_one(self, each: FileTensor) -> FileTensor:
        """Return a tensor with its rows, or values, where models have them."""
        if (follower := self.followers.get(each.name)) is not None:
            each = self._in_turn(each, follower)
        elif shift := self.known.shift(each.name):
            return self._shifted(each, -shift)
        return self._grouped(each)._replace(turn=self._turn(each))

    def _in_turn(self, each: FileTensor, follower: FileTensor) -> FileTensor:
        """Return a tensor of the interleaved rows of two."""
        groups, rows, *rest = each.shape
        nbytes = self._row_nbytes(each, rest)
        strides = (rows * nbytes, nbytes, follower.start - each.start)
        start = self._view(each.start, nbytes, (groups, rows, 2), strides)
        return each._replace(shape=(groups, 2 * rows, *rest), start=start, stop=self._after)

    def _row_nbytes(self, each: FileTensor, shape: Sequence[int]) -> int:
        """Return the bytes of a row of this shape; refuse rows that share a block."""
        numel, dtype = math.prod(shape), each.type.dtype
        if numel % dtype.block:
            expected = f"rows of whole blocks of {dtype.block}"
            self._refuse(each, "its rows cannot be reordered", expected, numel)
        return dtype.nbytes(numel)

    def _shifted(self, each: FileTensor, shift: float) -> FileTensor:
        """Return a tensor with a number added to its values."""
        if each.type.name != "F32":
            self._refuse(each, "its values cannot be shifted", "F32", each.type.name)
        start = self._view(each.start, 4, (math.prod(each.shape),), (4,), shift)
        return each._replace(start=start, stop=self._after)

    def _grouped(self, each: FileTensor) -> FileTensor:
        """Return fused queries, keys and values grouped by key head."""
        rows = each.shape[0] if each.shape else 0
        try:
            heads = self.known.heads(each.name, rows, self.config)
        except ValueError as error:
            self._refuse(each, "its rows cannot be split into heads", str(error), list(each.shape))
        if heads is None or heads[0] == 1:
            return each
        keys, queries, size = heads
        if keys > MOST_LAYERS or not math.prod(each.shape):
            expected = f"1 to {MOST_LAYERS} key heads"
            self._refuse(each, "its rows cannot be split into heads", expected, keys)
        nbytes = self._row_nbytes(each, each.shape[1:])
        head, start = size * nbytes, self._after
        for key in range(keys):
            at = each.start + key * queries * head
            self._view(at, nbytes, (queries * size,), (nbytes,))
            at = each.start + (keys * queries + key) * head
            self._view(at, nbytes, (2, size), (keys * head, nbytes))
        return each._replace(start=start, stop=self._after)

    def _turn(self, each: FileTensor) -> Turn | None:
        """Return the permutation of a tensor's rows from the file's order to the model's."""
        shape = each.shape
        if self.known.is_transposed(each.name) and len(shape) > 1 and min(shape[-2:]) > 1:
            *stack, rows, columns = shape
            return Turn(RowTranspose(math.prod(stack), rows, columns), (*stack, columns, rows))
        if len(shape) == 1 and module_of(each.name) in self.known.as_rows:
            return Turn(None, (1, *shape))
        try:
            order = self.known.interleaved(each.name, shape[0] if shape else 1, self.config)
        except ValueError as error:
            self._refuse(each, "its rows cannot be split into heads", str(error), shape)
        if order is None or 1 in (order.outer, order.inner):
            return None
        return Turn(order.inverse)

    @property
    def _after(self) -> int:
        """The end of the file and of its views."""
        return self.views[-1].stop if self.views else self.file.nbytes

    def _view(
        self,
        at: int,
        itemsize: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        shift: float = 0.0,
    ) -> int:
        """Add a view of the file's bytes from ``at`` on; return its first byte."""
        start = self._after
        if all(shape):
            self.views.append(View.strided(start, at, itemsize, shape, strides, shift))
        return start

    def _refuse(self, each: FileTensor, problem: str, expected: object, found: object) -> NoReturn:
        raise HeaderError(self.file.path, problem, expected, found, tensor=each.name)
