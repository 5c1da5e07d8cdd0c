"""Which rows of which tensors an operation of transformers puts together.

It runs on row numbers in place of rows: where they come out says what it does.
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
    """A result that is not made of whole rows."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """Tensors that an operation puts together, with a number for each of their rows.

    A row here is everything along the last axis. It is represented by ``columns`` numbers, so that
    whatever splits, reorders or changes it shows; all other axes are as long as they really are.

    Attributes:
        tensors: their names.
        shapes: their shapes.
        bases: the number of each tensor's first row, and one past the last row of all.
        columns: how many numbers stand for a row.
        length: how many elements a row has.
    """

    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    bases: tuple[int, ...]
    columns: int
    length: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensors: Sequence[str]) -> Numbered:
        """Number the rows of tensors, one tensor after the other.

        Raises:
            NotRowsError: their rows are not of one length.
        """
        shapes = tuple(checkpoint.tensors[tensor].shape for tensor in tensors)
        lengths = {shape[-1] if len(shape) > 1 else 1 for shape in shapes}
        length = lengths.pop()
        if lengths or not all(map(math.prod, shapes)):
            raise NotRowsError("rows are empty, or of different lengths")
        bases = tuple(accumulate(map(_row_count, shapes), initial=0))
        return cls(tuple(tensors), shapes, bases, min(COLUMNS, length), length)

    def ids(self, index: int) -> torch.Tensor:
        """The numbers in place of a tensor: its shape, but for the last of several axes."""
        shape = self.shapes[index]
        start, stop = (base * self.columns for base in self.bases[index : index + 2])
        small = self.bases[-1] * self.columns < 2**29  # the other numbers fit too
        kind = torch.int32 if small else torch.int64
        numbers = torch.arange(start, stop, dtype=kind, device="cpu")
        return numbers.view(*shape[:-1], self.columns) if len(shape) > 1 else numbers.view(shape)

    def source(self, ids: torch.Tensor) -> Source:
        """Read off which rows make up a result.

        Raises:
            NotRowsError: it is not made of whole rows along the first axis of these tensors.
        """
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

    def _ranges(self, numbers: np.ndarray[Any, Any]) -> Iterator[RowRange]:
        """Runs of consecutive numbers as ranges along the first axes of the tensors."""
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
    """Other numbers for the same rows: what only moves them about does the same with both."""
    return ids * -3 - 7


def _row_count(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1] if len(shape) > 1 else shape)


class Narrow:
    """A model whose parameters are as wide as numbered rows, for operations that ask for shapes."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        """A parameter's stand-in, on the meta device."""
        shape = tuple(self._model.get_parameter(name).shape)
        narrow = (*shape[:-1], min(COLUMNS, shape[-1])) if len(shape) > 1 else shape
        return torch.empty(narrow, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
