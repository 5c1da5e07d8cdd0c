"""The error tree: facts as attributes, messages of one line, and pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from streamload import errors
from streamload.errors import (
    AllocationError,
    BudgetError,
    BudgetExceededError,
    CastError,
    CheckpointError,
    DeviceError,
    DeviceNotFoundError,
    FileChangedError,
    HeaderError,
    LoadState,
    MemoryTakenError,
    NodeError,
    OffloadError,
    OutOfRangeError,
    PeerFailedError,
    PlanInfeasibleError,
    PlanMismatchError,
    ResidenceError,
    ShapeMismatch,
    ShardNotFoundError,
    StateDictMismatchError,
    StreamloadError,
    TruncatedFileError,
    UnsupportedCastError,
)

TREE = {
    CheckpointError: (StreamloadError, ValueError),
    HeaderError: (CheckpointError,),
    TruncatedFileError: (CheckpointError,),
    FileChangedError: (CheckpointError,),
    ShardNotFoundError: (CheckpointError,),
    StateDictMismatchError: (StreamloadError, ValueError),
    ResidenceError: (StreamloadError, ValueError),
    BudgetError: (StreamloadError, MemoryError),
    PlanInfeasibleError: (BudgetError,),
    BudgetExceededError: (BudgetError,),
    MemoryTakenError: (BudgetError,),
    CastError: (StreamloadError, ValueError),
    UnsupportedCastError: (CastError,),
    OutOfRangeError: (CastError,),
    OffloadError: (StreamloadError, RuntimeError),
    DeviceError: (StreamloadError, RuntimeError),
    DeviceNotFoundError: (DeviceError,),
    AllocationError: (DeviceError,),
    NodeError: (StreamloadError, RuntimeError),
    PeerFailedError: (NodeError,),
    PlanMismatchError: (NodeError,),
}

#: One of each, with the facts that a message must show.
EXAMPLES: list[tuple[StreamloadError, dict[str, Any], tuple[str, ...]]] = [
    (
        cls(Path("a.safetensors"), "is wrong", tensor="w", expected=3, found="four"),
        {
            "path": "a.safetensors",
            "problem": "is wrong",
            "tensor": "w",
            "expected": 3,
            "found": "four",
        },
        ("a.safetensors", "is wrong", "w", "3", "four"),
    )
    for cls in (CheckpointError, HeaderError, TruncatedFileError, ShardNotFoundError)
]
EXAMPLES += [
    (
        FileChangedError("f", "has changed", tensor="w", expected=1, found=2, held_back=True),
        {"path": "f", "tensor": "w", "expected": 1, "found": 2, "held_back": True},
        ("f", "has changed", "w", "1", "2"),
    )
]
EXAMPLES += [
    (
        StateDictMismatchError(
            "m",
            missing=["a"],
            unexpected=["b"],
            wrong_shape=[ShapeMismatch("c", (1, 2), (3,))],
            problems=["d: it is a view"],
        ),
        {
            "path": "m",
            "missing": ("a",),
            "unexpected": ("b",),
            "wrong_shape": (ShapeMismatch("c", (1, 2), (3,)),),
            "problems": ("d: it is a view",),
        },
        ("1 missing", "1 unexpected", "c: expected [1, 2], found [3]", "d: it is a view"),
    ),
    (
        PlanInfeasibleError(
            "CL", 5 * 10**9, 3 * 10**9, largest=[("w", 10**9)], would_fit=["2 devices"]
        ),
        {
            "device": "CL",
            "needed_nbytes": 5 * 10**9,
            "budget_nbytes": 3 * 10**9,
            "limit": "budget",
            "largest": (("w", 10**9),),
            "would_fit": ("2 devices",),
        },
        ("CL", "5000000000", "3000000000", "the budget", "w 1.00 GB", "2 devices"),
    ),
    (
        BudgetExceededError("CL", 7, 95, 100, reason="a lazy graph"),
        {"device": "CL", "requested_nbytes": 7, "held_nbytes": 95, "budget_nbytes": 100},
        ("CL", "7 bytes", "95 bytes", "100 bytes", "a lazy graph"),
    ),
    (
        MemoryTakenError("cpu, CL", 3 * 10**9, 2 * 10**9, 10**9, is_limited=True),
        {
            "device": "cpu, CL",
            "needed_nbytes": 3 * 10**9,
            "free_nbytes": 2 * 10**9,
            "taken_nbytes": 10**9,
            "is_limited": True,
        },
        ("cpu, CL", "3000000000", "2000000000", "1000000000", "its limit changed"),
    ),
    (
        UnsupportedCastError("float32", "int8", reason="why", tensor="w", path=Path("f")),
        {"src": "float32", "dst": "int8", "reason": "why", "tensor": "w", "path": "f"},
        ("f", "'w'", "cannot cast float32 to int8", "why"),
    ),
    (
        UnsupportedCastError("complex64", "complex64"),
        {"tensor": None, "path": None, "reason": ""},
        ("cannot hold complex64",),
    ),
    (
        OutOfRangeError("w", Path("f"), "bfloat16", "float16", 3),
        {"tensor": "w", "path": "f", "src": "bfloat16", "dst": "float16", "overflowed": 3},
        ("f", "'w'", "3", "bfloat16", "float16"),
    ),
    (
        ResidenceError("w", "/m.safetensors", "it is cast"),
        {"parameter": "w", "path": "/m.safetensors", "reason": "it is cast"},
        ("/m.safetensors", "'w'", "it is cast", 'residence="auto"'),
    ),
    (DeviceError("CL", "lost"), {"device": "CL", "problem": "lost"}, ("CL: lost",)),
    (
        DeviceNotFoundError("CL", "no driver", working=["CPU"]),
        {"device": "CL", "problem": "no driver", "working": ("CPU",)},
        ("CL", "no driver", "CPU"),
    ),
    (
        AllocationError("CL", "full", nbytes=1234),
        {"device": "CL", "problem": "full", "nbytes": 1234},
        ("CL", "full", "1234"),
    ),
]
EXAMPLES += [
    (cls("n1", "gone"), {"node": "n1", "problem": "gone"}, ("n1", "gone"))
    for cls in (NodeError, PeerFailedError, PlanMismatchError)
]
EXAMPLES.append((OffloadError("is closed"), {"problem": "is closed"}, ("is closed",)))


def test_the_tree() -> None:
    found = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, Exception) and cls is not StreamloadError
    }
    assert found == set(TREE)
    for cls, bases in TREE.items():
        assert cls.__bases__ == bases


@pytest.mark.parametrize(
    ("error", "facts", "told"), EXAMPLES, ids=[type(e).__name__ for e, _, _ in EXAMPLES]
)
def test_facts_and_message(
    error: StreamloadError, facts: dict[str, Any], told: tuple[str, ...]
) -> None:
    assert {name: getattr(error, name) for name in facts} == facts
    assert all(text in str(error) for text in told), str(error)
    assert "\n" not in str(error)
    assert error.state is None


@pytest.mark.parametrize("how", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(
    ("error", "facts", "told"), EXAMPLES, ids=[type(e).__name__ for e, _, _ in EXAMPLES]
)
def test_errors_travel(
    error: StreamloadError, facts: dict[str, Any], told: tuple[str, ...], how: Any
) -> None:
    error = copy.copy(error)
    error.state = LoadState(("a",), (), ("b", "c"))
    error.add_note("seen")
    again = how(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert {name: getattr(again, name) for name in facts} == facts
    assert again.state == error.state
    assert again.__notes__ == ["seen"]


def test_long_lists_are_cut_in_the_message_alone() -> None:
    """Eight names are shown, and how many more there are; the attribute has all."""
    error = StateDictMismatchError("m", missing=[f"w{i}" for i in range(20)])
    assert "w7, and 12 more" in str(error)
    assert "w8" not in str(error)
    assert len(error.missing) == 20


def test_the_state_of_a_load() -> None:
    """Three kinds, with how many and which."""
    state = LoadState(("a",), (), ("b", "c"))
    assert str(state) == "1 loaded (a); 0 untouched; 2 invalid (b, c)"


def test_a_tensor_named_later() -> None:
    error = TruncatedFileError("f", "the file ended", expected=10, found=7)
    changed = FileChangedError("f", "has changed", held_back=True).of_tensor("w")
    assert (type(changed), changed.tensor, changed.held_back) == (FileChangedError, "w", True)
    named = error.of_tensor("w")
    assert type(named) is TruncatedFileError
    assert (named.tensor, named.expected, named.found) == ("w", 10, 7)
    assert "w" in str(named)
