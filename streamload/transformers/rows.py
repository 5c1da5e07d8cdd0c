"""Find the rows of tensors that a conversion cuts and joins, by running it on empty stand-ins.

The converted weights then stream row by row from the file, and no conversion runs on values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamload.checkpoint.open import Checkpoint
from streamload.core.tensors import RowRange, RowTranspose
from streamload.planning.sources import Source, model_shape

_MOST_RUNS = 2**22  # of elements that are consecutive in the file, in one converted tensor
_JOINS = (torch.ops.aten.cat, torch.ops.aten.stack)


class NotRowsError(ValueError):
    """Raised if the result of a conversion does not consist of whole rows of its inputs."""


class Converted(NamedTuple):
    """What a conversion makes of a checkpoint, by parameter: rows, and tensors that it computes."""

    fill: Mapping[str, Source]
    computed: Mapping[str, torch.Tensor]


class _Runs(NamedTuple):
    """Elements of stand-ins: runs of equal length, each consecutive."""

    starts: np.ndarray[Any, Any]  # numbers of the first elements
    length: int

    def cut(self, length: int) -> np.ndarray[Any, Any]:
        """Return the first elements of runs of a `length` that divides the current one."""
        steps = np.arange(0, self.length, length)
        return (self.starts[:, None] + steps).ravel()


class StandIns(TorchDispatchMode):  # type: ignore[misc]
    """Records, inside a ``with`` block, where the elements of converted tensors come from.

    Stand-ins are on the meta device. A view shares the memory of its tensor, and its strides give
    its elements; joins and copies are recorded. Any other operation raises NotRowsError.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._names: list[str] = []
        self._bases = [0]  # the number of each tensor's first element, and the count of all
        # by memory: the index of a stand-in, or the tensors that were joined along an axis
        self._made: dict[int, int | tuple[list[torch.Tensor], int]] = {}
        self._kept: list[torch.Tensor] = []  # so that no memory is used again

    def of(self, tensor: str) -> torch.Tensor:
        """Return a stand-in for a tensor of the checkpoint."""
        info, shape = self._checkpoint.tensors[tensor], model_shape(self._checkpoint, tensor)
        dtype = getattr(torch, info.dtype.name, torch.float16)  # blocks become floats
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._keep(made, len(self._names))
        self._names.append(tensor)
        self._bases.append(self._bases[-1] + info.numel)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, and record what it makes of stand-ins."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if self._is_known(leaf)]
        out = func(*args, **(kwargs or {}))
        if not given:
            return out
        kind, made = func.overloadpacket, tree_leaves(out)
        if kind in _JOINS and len(given) == len(args[0]):
            axis = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            axis %= out.dim()
            parts = [part.unsqueeze(axis) for part in given] if kind is _JOINS[1] else given
            self._keep(out, (parts, axis))
        elif kind is torch.ops.aten.clone:
            if not out.is_contiguous():
                return given[0]
            self._keep(out, (given, 0))
        elif func._schema.is_mutable or not all(map(self._is_known, made)):
            names = ", ".join(dict.fromkeys(name for one in given for name in self._of(one)))
            raise NotRowsError(f"{kind.__name__} of {names} computes values")
        return out

    def converted(self, state: Mapping[str, torch.Tensor | None]) -> Converted:
        """Return the rows of converted tensors by name; NotRowsError names one that has none."""
        fill, computed = {}, {}
        for name, tensor in state.items():
            if tensor is None:
                continue
            if not self._is_known(tensor):
                computed[name] = tensor
                continue
            try:
                fill[name] = self.source(tensor)
            except NotRowsError as error:
                raise NotRowsError(f"{name}: {error}") from None
        return Converted(fill, computed)

    def source(self, tensor: torch.Tensor) -> Source:
        """Return the rows that make up a converted tensor; NotRowsError if it is not of rows."""
        if not self._is_known(tensor):
            raise NotRowsError("it is computed")
        shape = tuple(tensor.shape)
        made = self._made[_memory(tensor)]
        if not isinstance(made, int) and len(made[0]) == 1 and made[0][0].shape == shape:
            tensor = made[0][0]  # of a copy, the original
        if tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous():
            *groups, inner, outer = shape
            rows = self.source(tensor.mT).rows
            return Source(rows, RowTranspose(math.prod(groups), outer, inner), shape)
        return Source(tuple(self._ranges(self._runs(tensor))), shape=shape)

    def _keep(self, tensor: torch.Tensor, made: int | tuple[list[torch.Tensor], int]) -> None:
        self._made[_memory(tensor)] = made
        self._kept.append(tensor)

    def _is_known(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_meta and _memory(value) in self._made

    def _of(self, tensor: torch.Tensor) -> Iterator[str]:
        """Yield the names of the tensors in a tensor."""
        made = self._made[_memory(tensor)]
        if isinstance(made, int):
            yield self._names[made]
        else:
            for part in made[0]:
                yield from self._of(part)

    def _runs(self, tensor: torch.Tensor) -> _Runs:
        """Return the elements of a tensor, in order."""
        every = zip(tensor.shape, tensor.stride(), strict=True)
        axes = [(n, step) for n, step in every if n != 1]
        length = 1
        while axes and axes[-1][1] == length:
            length *= axes.pop()[0]
        if not tensor.numel() or tensor.numel() > length * _MOST_RUNS:
            names = ", ".join(dict.fromkeys(self._of(tensor)))
            raise NotRowsError(f"{names}: empty, or the last axis is cut or reordered")
        starts = np.array([tensor.storage_offset()], np.int64)
        for n, step in axes:
            starts = (starts[:, None] + np.arange(n) * step).ravel()
        made = self._made[_memory(tensor)]
        if isinstance(made, int):
            return _Runs(starts + self._bases[made], length)
        inner = self._joined(*made)
        unit = math.gcd(inner.length, length, int(np.gcd.reduce(starts)))
        found = _Runs(starts, length).cut(unit) // unit
        return _Runs(inner.cut(unit)[found], unit)

    def _joined(self, parts: list[torch.Tensor], axis: int) -> _Runs:
        """Return the elements of tensors that are joined along an axis."""
        groups = math.prod(parts[0].shape[:axis])
        runs = [self._runs(part) for part in parts]
        inner = (part.numel() // groups for part in parts)
        unit = math.gcd(*(each.length for each in runs), *inner)
        cut = [each.cut(unit).reshape(groups, -1) for each in runs]
        return _Runs(np.concatenate(cut, 1).ravel(), unit)

    def _ranges(self, runs: _Runs) -> Iterator[RowRange]:
        """Yield runs of elements as ranges along the tensors' first axes, as long as possible."""
        breaks = np.flatnonzero(np.diff(runs.starts) != runs.length) + 1
        for run in np.split(runs.starts, breaks):
            start, stop = int(run[0]), int(run[-1]) + runs.length
            while start < stop:
                index = bisect_right(self._bases, start) - 1
                name, base = self._names[index], self._bases[index]
                end = min(stop, self._bases[index + 1])
                row = math.prod(self._checkpoint.tensors[name].shape[1:])
                if (start - base) % row or (end - base) % row:
                    raise NotRowsError(f"{name} is cut along its second axis")
                yield RowRange(name, (start - base) // row, (end - base) // row)
                start = end


def _memory(tensor: torch.Tensor) -> int:
    """Return a number that tensors over the same memory share, on the meta device too."""
    return int(tensor.untyped_storage()._cdata)
