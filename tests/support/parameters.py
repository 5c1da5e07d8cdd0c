"""How much of a test runs: in the fast suite a part, with ``scripts/test --all`` everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

#: Whether this is the fast suite; `conftest` says so.
fast_suite = False


def few(count: int) -> int:
    """So many examples or tries, or in the fast suite a third."""
    return -(-count // 3) if fast_suite else count


def enough(there_is: bool) -> bool:
    """Whether tries may end early, since what they look for was there: in the fast suite only."""
    return fast_suite and there_is


def product(*axes: Iterable[Any], fast: Callable[..., bool]) -> list[Any]:
    """Every combination, a tuple as several values; those that ``fast`` refuses are slow."""
    combinations = []
    for chosen in itertools.product(*axes):
        values = [v for part in chosen for v in (part if isinstance(part, tuple) else (part,))]
        marks = () if fast(*values) else pytest.mark.slow
        combinations.append(pytest.param(*values, marks=marks))
    return combinations
