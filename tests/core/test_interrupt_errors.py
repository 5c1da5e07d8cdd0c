"""Errors that threads have left: `without_locals`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from streamload.core.interrupt import without_locals


class _Memory:
    """What an ended call had."""


def _fail() -> None:
    raise ValueError


def _caught(fail: Callable[[], None]) -> ValueError:
    try:
        fail()
    except ValueError as error:
        return error
    raise AssertionError


def _keeps(caught: Callable[[], ValueError], kept: list[ValueError]) -> weakref.ref[_Memory]:
    memory = _Memory()
    error = caught()  # the error refers to that call, and that to this one
    kept.append(error)
    return weakref.ref(memory)


def _waits(caught: Callable[[], ValueError]) -> Iterator[ValueError]:
    yield caught()
    yield ValueError("the generator went on")


def _bound() -> ValueError:
    caught, fail = globals()["given"]
    found: ValueError = caught(fail)
    return found


def _own(function: Callable[..., Any]) -> Callable[..., Any]:
    return FunctionType(function.__code__, globals() | {"__name__": "streamload.own"})


def test_callers_keep_nothing_and_no_generator_is_closed() -> None:
    """The package's calls are cleared, those around them too; generators that wait go on."""
    fail, caught = _own(_fail), _own(_caught)
    bound = FunctionType(_bound.__code__, {"__name__": "streamload.own", "given": (caught, fail)})
    kept: list[ValueError] = []
    gc.disable()
    try:
        memory = _own(_keeps)(bound, kept)
        assert memory() is not None
        without_locals(kept[0])
        assert memory() is None
    finally:
        gc.enable()
    for waits in (_own(_waits), _waits):
        waiting = waits(bound)
        without_locals(next(waiting))
        assert str(next(waiting)) == "the generator went on"
