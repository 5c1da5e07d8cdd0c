"""Values that change on the way: rows go through functions before they are cast.

Rows are whole: everything along the first axis of a tensor. A function is given some of them at a
time, and must do the same with a row whichever others come with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import numpy as np

from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BY_NAME, DType
from streamload.core.patterns import check_patterns
from streamload.core.tensors import TensorInfo

Rows: TypeAlias = np.ndarray[Any, Any]
#: What ``transform=`` takes: by pattern of tensor names, a function of some rows.
Transform: TypeAlias = Mapping[str, Callable[[Rows], Rows]]
#: (rows, number of the first) to rows.
Change: TypeAlias = Callable[[Rows, int], Rows]


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes the values of tensors.

    Attributes:
        by_tensor: functions, one after the other.
        nbytes: what they hold for all threads.
        thread_nbytes: memory of a thread besides the rows.
    """

    by_tensor: Mapping[str, Sequence[Change]] = field(default_factory=dict)
    nbytes: int = 0
    thread_nbytes: int = 0

    def then(self, checkpoint: Checkpoint, transform: Transform | None) -> Changes:
        """These, and after them the functions of ``transform=``."""
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
        """The bytes of changed rows, and their dtype; ``data`` is whole rows from ``first`` on."""
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
    def change(rows: Rows, first: int) -> Rows:
        return function(rows)

    return change


#: Of a load that changes no values.
NO_CHANGES = Changes()
