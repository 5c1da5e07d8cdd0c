"""Matching parameters to tensors: everything that is wrong, in one error, before any I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plan_helpers import device_spec, plan_of
from safetensors_files import write_arrays, write_safetensors

import streamload
from streamload.checkpoint.open import Checkpoint
from streamload.core.dtypes import BF16, F16, F32, DType
from streamload.core.tensors import Block, RowRange, RowTranspose
from streamload.errors import ShapeMismatch, StateDictMismatchError
from streamload.planning.match import Match, ModelParameters, incoherent, match
from streamload.planning.moves import DTypePolicy
from streamload.planning.sources import Found, Source, sources


@dataclass
class FakeParameter:
    """A parameter that says what it is, and is never filled."""

    names: tuple[str, ...]
    shape: tuple[int, ...] = (2,)
    dtype: str = "float32"
    device: str | None = None
    nbytes: int = 0
    keeps: DType | None = None
    fixed: str = ""
    refused: str = ""
    invalid: bool = False
    block: Block | None = None
    shard: str = ""
    span: tuple[int, int, int] | None = None
    wrapped: tuple[str, ...] = ()

    def is_computed(self) -> bool:
        return False

    def buffer(self) -> Any:
        """Nothing is matched by looking at memory."""
        raise AssertionError

    release = attach = invalidate = buffer


def write(path: Path, **tensors: Sequence[float]) -> Checkpoint:
    """A checkpoint of flat float32 tensors; ``__`` in a name is a dot."""
    import numpy as np

    raw = {n.replace("__", "."): np.array(v, np.float32) for n, v in tensors.items()}
    return streamload.open_checkpoint(write_arrays(path / "model.safetensors", raw))


def matched(checkpoint: Checkpoint, *parameters: Any, keep_on: Any = (), **more: Any) -> Match:
    fill, _, tied = sources(checkpoint, more.get("mapping"), more.get("rename"))
    policy = DTypePolicy.parse(more.get("dtype"))
    tied |= more.get("tied", {})
    return match(checkpoint, ModelParameters(parameters, keep_on), Found(fill, tied=tied), policy)


def test_everything_wrong_is_in_one_error(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, a=[1, 2], b=[1, 2, 3], c=[1], extra=[1], view=[1, 2])
    found = matched(
        checkpoint,
        FakeParameter(("a",)),
        FakeParameter(("b",)),
        FakeParameter(("c",), (1, 1)),
        FakeParameter(("gone", "also_gone")),
        FakeParameter(("view",), refused="it is a view that is not contiguous"),
    )
    with pytest.raises(StateDictMismatchError) as caught:
        found.check(checkpoint.path, strict=True)
    error = caught.value
    assert error.missing == ("gone",)
    assert error.unexpected == ("extra",)
    assert error.wrong_shape == (ShapeMismatch("b", (2,), (3,)), ShapeMismatch("c", (1, 1), (1,)))
    assert error.problems == ("view: it is a view that is not contiguous",)
    for told in ("gone", "extra", "b: expected [2], found [3]", "not contiguous", "model.safe"):
        assert told in str(error)


def test_not_strict_loads_what_matches(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, a=[1, 2], b=[1, 2, 3], extra=[1])
    parameters = [FakeParameter(("a",)), FakeParameter(("b",)), FakeParameter(("gone",))]
    found = matched(checkpoint, *parameters)
    found.check(checkpoint.path, strict=False, shapes="skip")
    assert [want.name for want in found.wants] == ["a"]
    assert found.left_out == ["gone", "b"]
    found = matched(checkpoint, FakeParameter(("a",), refused="no"), FakeParameter(("gone",)))
    with pytest.raises(StateDictMismatchError) as caught:
        found.check(checkpoint.path, strict=False)
    assert (caught.value.missing, caught.value.problems) == ((), ("a: no",))


@pytest.mark.parametrize(
    "name", ["rotary_emb.inv_freq", "model.layers.3.self_attn.rotary_emb.inv_freq", "rope.freqs"]
)
def test_what_models_drop_by_convention(tmp_path: Path, name: str) -> None:
    """Buffers that frameworks compute themselves are not unexpected, but loaded where wanted."""
    checkpoint = write(tmp_path, a=[1, 2], **{name.replace(".", "__"): [1.0]})
    assert matched(checkpoint, FakeParameter(("a",))).unexpected == []
    found = matched(checkpoint, FakeParameter(("a",)), FakeParameter((name,), (1,)))
    assert [want.name for want in found.wants] == ["a", name]


def test_tied_parameters_need_one_name(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, b=[1, 2])
    found = matched(checkpoint, FakeParameter(("a", "b")))
    found.check(checkpoint.path, strict=True)
    assert [(want.name, want.source[0].tensor) for want in found.wants] == [("b", "b")]
    assert found.tied == ["a"]


def test_tied_parameters_whose_values_differ(tmp_path: Path) -> None:
    """Two stored tensors for one parameter must be the same bytes; they are read last of all."""
    checkpoint = write(tmp_path, a=[1, 2], b=[1, 2], c=[1, 3], d=[1, 2, 3])
    matched(checkpoint, FakeParameter(("a", "b"))).check_ties(checkpoint)
    found = matched(checkpoint, FakeParameter(("a", "b", "c", "d")))
    assert found.problems == []
    with pytest.raises(StateDictMismatchError) as caught:
        found.check_ties(checkpoint)
    assert caught.value.problems == (
        "c is tied to a, but their values differ",
        "d is tied to a, but their values differ",
    )


def test_tied_values_are_compared_as_they_will_be(tmp_path: Path) -> None:
    many = list(range(600_000))
    checkpoint = write(tmp_path, whole=many, left=many[:7], right=many[7:], other=[*many[1:], 0])
    shape = (len(many),)

    def problems(mapping: dict[str, Any]) -> list[str]:
        found = matched(checkpoint, FakeParameter(("x", "y"), shape), mapping=mapping)
        try:
            found.check_ties(checkpoint)
        except StateDictMismatchError as error:
            return found.problems + list(error.problems)
        return found.problems

    assert problems({"x": "whole", "y": ["left", "right"]}) == []
    assert problems({"x": "whole", "y": ["right", "left"]}) != []
    assert problems({"x": "whole", "y": "other"}) != []
    assert problems({"x": "whole", "y": RowRange("whole", 0, 600_001)})[0].startswith("y: whole")


def test_a_head_that_is_not_stored_is_a_copy(tmp_path: Path) -> None:
    """Where config.json ties the head and the model does not, it gets the embedding's values."""
    checkpoint = write(tmp_path, embed=[1, 2])
    parameters = [FakeParameter(("embed",)), FakeParameter(("head",))]
    found = matched(checkpoint, *parameters, tied={"head": "embed"})
    found.check(checkpoint.path, strict=True)
    assert [(w.name, w.source[0].tensor) for w in found.wants] == [
        ("embed", "embed"),
        ("head", "embed"),
    ]
    assert found.notes == ["head is tied to embed by config.json: it is a copy"]


def test_what_is_held_is_told_to_the_planner(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, a=[1, 2], b=[1, 2])
    a = FakeParameter(("a",), dtype="float16", device="CL", nbytes=4)
    wants = matched(checkpoint, a, FakeParameter(("b",)), keep_on=["CL"]).wants
    assert [(w.held, w.device) for w in wants] == [(("CL", "float16", 4), "CL"), (None, None)]
    assert matched(checkpoint, a, FakeParameter(("b",))).wants[0].device is None


def test_views_are_written_in_place_or_not_at_all(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, a=[1, 2])
    view = FakeParameter(("a",), device="CPU", nbytes=8, fixed="it is a view of 80 bytes on CPU")
    found = matched(checkpoint, view)

    def placements(dtype: str) -> Any:
        return plan_of(
            checkpoint, device_spec("CPU", 100), wants=found.wants, dtype=dtype
        ).placements

    found.check_views(checkpoint.path, placements("checkpoint"))
    with pytest.raises(
        StateDictMismatchError, match=r"view of 80 bytes.* float16 on CPU"
    ) as caught:
        found.check_views(checkpoint.path, placements("float16"))
    assert len(caught.value.problems) == 1


def test_below_a_byte_only_whole_tensors(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "m.safetensors", {"w": ("F4", (4, 4), bytes(8))})
    checkpoint = streamload.open_checkpoint(file)
    assert incoherent(checkpoint, Source((RowRange("w", 0, 4),))) == ""
    assert "not whole bytes" in incoherent(checkpoint, Source((RowRange("w", 0, 3),)))
    turned = Source((RowRange("w", 0, 4),), RowTranspose(1, 2, 2))
    assert "not whole bytes" in incoherent(checkpoint, turned)


def test_parameters_on_parts_of_the_same_memory_are_refused(tmp_path: Path) -> None:
    """One would overwrite the other; tied parameters are one, and neighbours do not overlap."""
    checkpoint = write(tmp_path, a=[1, 2], b=[3, 4], c=[5, 6])
    found = matched(
        checkpoint,
        FakeParameter(("a",), device="CPU", nbytes=8, span=(7, 0, 16)),
        FakeParameter(("b",), device="CPU", nbytes=8, span=(7, 8, 16)),
        FakeParameter(("c",), device="CPU", nbytes=8, span=(7, 16, 24)),
    )
    assert found.problems == ["b: it shares memory with a, and is not the same parameter"]


def test_what_keeps_its_dtype_keeps_it_unless_another_is_asked_for(tmp_path: Path) -> None:
    """A rule that mentions the tensor decides; where none does, the parameter's dtype stays."""
    checkpoint = write(tmp_path, a=[1, 2], b=[3, 4], c=[5, 6])
    parameters = [FakeParameter((name,), keeps=BF16) for name in "ab"] + [FakeParameter(("c",))]
    out = matched(checkpoint, *parameters, dtype={"b": "float16"})
    plan = plan_of(checkpoint, device_spec("x", 1000), wants=out.wants, dtype={"b": "float16"})
    assert {p.name: p.dst for p in plan.placements} == {"a": BF16, "b": F16, "c": F32}


def test_a_source_may_have_a_shape_of_its_own(tmp_path: Path) -> None:
    """As many elements as its rows have: stacked tensors; another number is one clear error."""
    checkpoint = write(tmp_path, a=[1, 2], b=[3, 4])
    rows = (RowRange("a", 0, 2), RowRange("b", 0, 2))
    stacked = {"w": Source(rows, shape=(2, 2))}
    out = matched(checkpoint, FakeParameter(("w",), (2, 2)), mapping=stacked)
    assert [(want.name, want.shape) for want in out.wants] == [("w", (2, 2))]
    wrong = Source(rows, shape=(3, 2))
    assert incoherent(checkpoint, wrong) == "rows of shape [4] are not a tensor of shape [3, 2]"
