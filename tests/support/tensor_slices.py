"""Slices of several ranks put together again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from streamload.planning.shares import ClusterPlan, Share


def joined(
    plan: ClusterPlan, parts: Iterable[tuple[Share, Mapping[str, Any]]]
) -> dict[str, np.ndarray[Any, Any]]:
    """Whole arrays, by name, of what each rank has loaded; whole ones must be the same on all."""
    out: dict[str, np.ndarray[Any, Any]] = {}
    for share, arrays in parts:
        slices = plan.slices(share)
        assert arrays.keys() == set(share.parameters)
        for name, array in arrays.items():
            if name not in slices:
                assert out.setdefault(name, array).tobytes() == array.tobytes(), name
                continue
            whole = out.setdefault(name, np.zeros(plan.placements[name].shape, array.dtype))
            at = 0
            for axis, start, stop in slices[name]:
                into = (slice(None),) * axis
                taken = array[(*into, slice(at, at + stop - start))]
                whole[(*into, slice(start, stop))] = taken
                at += stop - start
            assert at == array.shape[slices[name][0].axis]
    return out
