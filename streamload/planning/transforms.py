"""Functions that change the values of tensors during a load, before they are cast.

A function gets some whole rows of a tensor (along its first axis) at a time. Its result for a row
must not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BY_NAME, F64, DType
from streamload.core.location import Location
from streamload.core.patterns import check_patterns
from streamload.core.tensors import TensorInfo
from streamload.files.header import Header

Rows: TypeAlias = np.ndarray[Any, Any]
#: The argument ``transform=``: by pattern of tensor names, a function of some rows.
Transform: TypeAlias = Mapping[str, Callable[[Rows], Rows]]
#: A function of some rows and the index of the first; returns the changed rows.
Change: TypeAlias = Callable[[Rows, int], Rows]


@dataclass(frozen=True, slots=True)
class Changes:
    """All functions that change the values of tensors during a load.

    Attributes:
        nbytes: bytes that the functions hold for all threads.
        thread_nbytes: bytes that the functions need in each thread besides the rows.
    """

    by_tensor: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    nbytes: int = 0
    thread_nbytes: int = 0

    def then(self, checkpoint: Checkpoint, transform: Transform | None) -> Changes:
        """Return these changes followed by the functions of ``transform=``.

        Raises ValueError if ``transform`` is no dict of functions, or a pattern matches no tensor.
        """
        if transform is None:
            return self
        if not isinstance(transform, Mapping) or not all(map(callable, transform.values())):
            raise ValueError(f"transform is a dict from patterns to functions, not {transform!r}")
        check_patterns("transform", transform, checkpoint.tensors)
        found = dict(self.by_tensor)
        for name in checkpoint.tensors:
            function = next((f for p, f in transform.items() if fnmatchcase(name, p)), None)
            if function is not None:
                found[name] = (*found.get(name, ()), _of_rows_alone(function))
        return Changes(found, self.nbytes, self.thread_nbytes)

    def apply(self, info: TensorInfo, data: memoryview, first: int) -> tuple[Rows, DType]:
        """Return the changed rows as bytes, and their dtype; ``data`` has rows from ``first`` on.

        Raises ValueError if a function returns another shape or an unknown dtype.
        """
        rows = np.frombuffer(data, info.dtype.numpy).reshape(-1, *info.shape[1:])
        rows.flags.writeable = False
        for change in self.by_tensor.get(info.name, ()):
            try:
                changed = change(rows, first)
            except Exception as error:
                error.add_note(f"while rows of {info.name!r} were changed")
                raise
            if not isinstance(changed, np.ndarray) or changed.shape != rows.shape:
                found = getattr(changed, "shape", type(changed).__name__)
                raise ValueError(
                    f"transform of {info.name!r}: expected an array of shape {rows.shape}, as was "
                    f"given, found {found}"
                )
            if changed.dtype.name not in BY_NAME:
                raise ValueError(f"transform of {info.name!r}: found an array of {changed.dtype}")
            rows = changed
        flat = np.ascontiguousarray(rows, rows.dtype.newbyteorder("=")).reshape(-1)
        return flat.view(np.uint8), BY_NAME[rows.dtype.name]


def _of_rows_alone(function: Callable[[Rows], Rows]) -> Change:
    """Return a `Change` that calls a function of rows, without their index."""

    def change(rows: Rows, first: int) -> Rows:
        return function(rows)

    return change


#: The changes of a load that changes no values.
NO_CHANGES = Changes()


@dataclass(frozen=True, slots=True)
class Changed(TensorInfo):
    """A tensor of a checkpoint whose values functions change, or that another file has.

    Attributes:
        stored: the tensor that is read, under this name.
        changes: functions that return float64; they may be none for this tensor.
        headers: headers of the files that the functions were read from.
    """

    stored: TensorInfo = field(compare=False, repr=False)
    changes: Changes = field(compare=False, repr=False)
    headers: tuple[Header, ...] = field(compare=False, repr=False)

    @property
    def files(self) -> tuple[Location, ...]:
        """The tensor's own, and those of the functions."""
        return (self.shard, *(header.path for header in self.headers))

    @property
    def is_computed(self) -> bool:
        """True, though there may be no function for this tensor."""
        return True

    @property
    def read_dtype(self) -> DType:
        """The dtype of changed values, or else of the tensor that is read."""
        return F64 if self.changes.by_tensor.get(self.name) else self.stored.dtype

    @property
    def row_numel(self) -> int:
        """Elements of a row, of which functions get whole ones."""
        return max(self.numel // max(self.shape[0], 1), 1) if self.shape else 1


def with_changes(
    checkpoint: Checkpoint,
    changes: Changes,
    replaced: Mapping[str, TensorInfo],
    headers: Sequence[Header],
) -> Checkpoint:
    """Return a checkpoint whose tensors have changed values, each a `Changed`.

    ``replaced``: tensors to read instead, by name in the checkpoint; ``headers``: of the files of
    these tensors and of the functions.
    """
    if not headers:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    for name in changes.by_tensor.keys() | replaced.keys():
        info = tensors[name]
        read = replace(replaced.get(name, info), name=name)
        place = (read.shard, read.start, read.stop)
        tensors[name] = Changed(
            *(name, info.dtype, info.shape, *place), read, changes, tuple(headers)
        )
    shards = (*checkpoint.shards, *headers)
    return replace(checkpoint, shards=shards, tensors=MappingProxyType(tensors))
