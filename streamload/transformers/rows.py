"""Find the rows of tensors that an operation of transformers joins, by running it on row numbers.

Fused weights then stream row by row from the file, without running the operation on values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from streamload.checkpoint.open import Checkpoint
from streamload.core.tensors import RowRange
from streamload.planning.sources import Source

# Columns that stand for a row of any length when transformers' operations are tried on row
# numbers: the fewest with which halving and interleaving the columns cannot be overlooked.
COLUMNS = 4


class NotRowsError(ValueError):
    """Raised if the result of an operation does not consist of whole rows of its inputs."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """Tensors to join, with a number for each row (line along the last axis) in place of values.

    ``columns`` numbers represent a row, to notice operations that split, reorder or change it.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bases: tuple[int, ...]  # the number of each tensor's first row, and the count of all rows
    columns: int
    length: int  # elements of a row

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensors: Sequence[str]) -> Numbered:
        """Number the rows of tensors; raises NotRowsError if rows have several lengths."""
        shapes = tuple(checkpoint.tensors[tensor].shape for tensor in tensors)
        lengths = {shape[-1] if len(shape) > 1 else 1 for shape in shapes}
        length = lengths.pop()
        if lengths or not all(map(math.prod, shapes)):
            raise NotRowsError("rows are empty, or of different lengths")
        counts = (math.prod(shape[:-1] if len(shape) > 1 else shape) for shape in shapes)
        bases = tuple(accumulate(counts, initial=0))
        return cls(tuple(tensors), shapes, bases, min(COLUMNS, length), length)

    def ids(self, index: int) -> torch.Tensor:
        """Return tensor `index`'s numbers in its shape; the last of several axes has `columns`."""
        shape = self.shapes[index]
        start, stop = (base * self.columns for base in self.bases[index : index + 2])
        small = self.bases[-1] * self.columns < 2**29  # the other numbers fit too
        kind = torch.int32 if small else torch.int64
        numbers = torch.arange(start, stop, dtype=kind, device="cpu")
        return numbers.view(*shape[:-1], self.columns) if len(shape) > 1 else numbers.view(shape)

    def source(self, ids: torch.Tensor) -> Source:
        """Return the `Source` of an operation's result `ids`; NotRowsError if not whole rows."""
        if ids.dtype not in (torch.int32, torch.int64):
            raise NotRowsError("the dtype changes")
        shape = tuple(ids.shape)
        if not ids.numel() or (shape and shape[-1] % self.columns):
            raise NotRowsError("the last axis is cut")
        rows = ids.reshape(-1, self.columns).numpy()
        first = rows[:, 0]
        if (first % self.columns).any() or (rows != first[:, None] + np.arange(self.columns)).any():
            raise NotRowsError("the last axis is cut or reordered")
        if shape and self.length > 1:
            shape = (*shape[:-1], shape[-1] // self.columns * self.length)
        return Source(tuple(self._ranges(first // self.columns)), shape=shape)

    def like(self, other: Numbered, source: Source) -> Source:
        """Return a `Source` of these tensors that has the rows which ``source`` has of others."""
        mine = dict(zip(other.tensors, self.tensors, strict=True))
        rows = (RowRange(mine[row.tensor], row.start, row.stop) for row in source.rows)
        return Source(tuple(rows), shape=source.shape)

    def _ranges(self, numbers: np.ndarray[Any, Any]) -> Iterator[RowRange]:
        """Yield runs of consecutive row numbers as ranges along the tensors' first axes."""
        breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
        for run in np.split(numbers, breaks):
            start, stop = int(run[0]), int(run[-1]) + 1
            while start < stop:
                index = bisect_right(self.bases, start) - 1
                tensor, base = self.tensors[index], self.bases[index]
                end = min(stop, self.bases[index + 1])
                inner = math.prod(self.shapes[index][1:-1])  # rows of one step of the first axis
                if (start - base) % inner or (end - base) % inner:
                    raise NotRowsError(f"{tensor} is cut along its second axis")
                yield RowRange(tensor, (start - base) // inner, (end - base) // inner)
                start = end


def renumbered(ids: torch.Tensor) -> torch.Tensor:
    """Return other numbers for the same rows, to notice operations that compute with values."""
    return ids * -3 - 7


class Narrow:
    """A model with parameters as narrow as numbered rows, for operations that ask for shapes."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        """Return an empty stand-in for a parameter, with as few columns as numbered rows."""
        shape = tuple(self._model.get_parameter(name).shape)
        narrow = (*shape[:-1], min(COLUMNS, shape[-1])) if len(shape) > 1 else shape
        return torch.empty(narrow, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
