"""Parameters of tests: all combinations, of which a part runs in the fast suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def product(*axes: Iterable[Any], fast: Callable[..., bool]) -> list[Any]:
    """Every combination; those that ``fast`` refuses are slow.

    Args:
        axes: the values of each parameter; a tuple is several parameters.
        fast: takes the parameters of a combination.
    """
    combinations = []
    for chosen in itertools.product(*axes):
        values = [v for part in chosen for v in (part if isinstance(part, tuple) else (part,))]
        marks = () if fast(*values) else pytest.mark.slow
        combinations.append(pytest.param(*values, marks=marks))
    return combinations
