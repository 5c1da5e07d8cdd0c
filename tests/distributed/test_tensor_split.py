"""Slices of tensors on several ranks: threads of this process, and real processes over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_helpers import PLENTY, llama, load, path, succeeded
from remote_server import serve
from tensor_slices import joined
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.errors import PlanInfeasibleError, StateDictMismatchError

__all__ = ["path"]


def alone(path: Path, **options: Any) -> dict[str, Any]:
    """What one process loads."""
    options = {"budget": PLENTY, "device": "host", "progress": False} | options
    return dict(streamload.load_state_dict(None, path, **options).state_dict)


def planned(path: Path | str, split: str, size: int, **options: Any) -> list[Any]:
    """The plan of each rank."""

    def body(group: ThreadGroup) -> Any:
        asked = {"budget": PLENTY, "split": split, "group": group} | options
        return distributed.plan(path, **asked)

    return run(World(size), body)


@pytest.mark.parametrize("split", ["tensor", "2x2", "4x1", "1x4"])
@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_slices_of_all_ranks_are_the_whole(split: str, reader: str, path: Path) -> None:
    """Each rank reads its slices and nothing else; joined, they are what one process loads."""
    reports = succeeded(run(World(4), load(path, split=split, reader=reader)))
    plans = succeeded(planned(path, split, 4))
    shares = {share.rank: share for share in plans[0].shares}
    found = joined(plans[0], ((shares[r], report.state_dict) for r, report in enumerate(reports)))
    expected = alone(path)
    assert found.keys() == expected.keys()
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    for rank, report in enumerate(reports):
        assert report.read_nbytes == shares[rank].source_nbytes == shares[rank].nbytes
        assert [node.tensors for node in report.nodes] == [
            len(shares[node.rank].parameters) for node in report.nodes
        ]
    assert len({plan.digest for plan in plans}) == 1


def test_casts_and_renames(path: Path) -> None:
    """Slices are cast like whole tensors, and rules hold for the names in the checkpoint."""

    def rename(name: str) -> str:
        return f"m.{name}"

    options: dict[str, Any] = {"dtype": "float16", "rename": rename}
    reports = succeeded(run(World(2), load(path, split="tensor", **options)))
    plan = succeeded(planned(path, "tensor", 2, **options))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    expected = alone(path, **options)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert "m.model.layers.0.self_attn.q_proj.weight" in plan.first_slices


def test_rows_in_another_order_are_cut_at_heads(path: Path) -> None:
    """Query and key rows of each head are permuted within a slice."""
    reports = succeeded(run(World(2), load(path, split="tensor", mapping="hf-llama")))
    plan = succeeded(planned(path, "tensor", 2, mapping="hf-llama"))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    expected = alone(path, mapping="hf-llama")
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_slow_store_is_read_once(tmp_path: Path) -> None:
    """Of files behind a URL, ranks exchange what several need: each byte is sent once."""
    path = llama(tmp_path / "model", shards=1, width=128)
    (path / "model.safetensors.index.json").unlink()
    (file,) = path.glob("*.safetensors")
    file.rename(path / "model.safetensors")
    expected = alone(path)
    with serve(path) as site:
        url = f"{site.url}model.safetensors"
        reports = succeeded(run(World(4), load(url, split="2x2")))
        sent = sum(r.range[1] - r.range[0] for r in site.requests if r.range is not None)
        plan = succeeded(planned(url, "2x2", 4))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    read = sum(node.read_nbytes for node in reports[0].nodes)
    assert read == sum(array.nbytes for array in expected.values())
    assert sent <= read + 2**18  # the header


def test_a_model_of_slices_is_filled_in_place(path: Path) -> None:
    """A rank builds arrays of its slices' shapes; whole ones are refused with both shapes."""
    expected = alone(path)

    def shapes(group: ThreadGroup) -> dict[str, Any]:
        plan = distributed.plan(path, budget=PLENTY, split="tensor", group=group)
        made = {name: np.zeros_like(expected[name]) for name in plan.mine.parameters}
        for name, ((axis, start, stop), *_) in plan.slices(plan.mine).items():
            made[name] = np.ascontiguousarray(np.take(made[name], range(start, stop), axis))
        return made

    models: dict[int, dict[str, Any]] = {}

    def body(group: ThreadGroup) -> Any:
        models[group.rank] = shapes(group)
        return load(path, split="tensor", model=lambda rank: models[rank])(group)

    succeeded(run(World(2), body))
    plan = succeeded(planned(path, "tensor", 2))[0]
    found = joined(plan, ((share, models[share.rank]) for share in plan.shares))
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)

    def whole(rank: int) -> dict[str, Any]:
        return {name: np.zeros_like(array) for name, array in expected.items()}

    for error in run(World(2), load(path, split="tensor", model=whole)):
        assert isinstance(error, StateDictMismatchError)
        assert "q_proj.weight: expected [16, 16], found [8, 16]" in str(error)
        assert "write modules for slices, of the shapes found: see plan().slices" in str(error)


def test_a_cast_of_experts_and_a_mesh_of_unequal_budgets(tmp_path: Path) -> None:
    """The smallest budget of a group counts: the larger group has more of the layers."""
    path = llama(tmp_path / "model")
    whole = sum(array.nbytes for array in alone(path).values())

    def body(group: ThreadGroup) -> Any:
        budget = [whole, whole // 6, whole, whole][group.rank]
        return distributed.plan(path, budget=budget, split="2x2", group=group)

    plan = succeeded(run(World(4), body))[0]
    layers = [len(share.layers) for share in plan.shares]
    assert layers[0] == layers[1] < layers[2] == layers[3]
    assert sum(layers[1:3]) == 5
    assert [s.previous_rank for s in plan.shares] == [None, None, 0, 1]
    assert [s.next_rank for s in plan.shares] == [2, 3, None, None]
    said = json.loads(plan.to_json())
    assert said["first_slices"]["model.layers.0.self_attn.o_proj.weight"] == [[1, 0, 8]]
    assert str(plan).splitlines()[2].endswith("1 of 2")


def test_refusals(path: Path) -> None:
    """What does not divide, does not fit or does not go together: on all ranks, unread."""
    for error in run(World(3), load(path, split="tensor")):
        assert isinstance(error, ValueError)
        assert "3 does not divide num_attention_heads 4" in str(error)
        assert "sizes that divide: 2, 4; or write split" in str(error)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"split": "2x3"}, 'split="2x3" is for 6 ranks, and there are 2'),
        ({"split": "tensor", "quant": "int8"}, 'write split="layers"'),
        ({"split": "tensor", "context": 10}, "caches are of layers"),
        ({"split": "tensor", "layers": lambda part: range(5)}, "or a mesh"),
        ({"split": "tensors"}, "split is layers, replicate, balanced, tensor, a mesh"),
    ]
    for options, said in cases:
        for error in run(World(2), load(path, **options)):
            assert isinstance(error, ValueError)
            assert said in str(error)
    found = run(World(2), load(path, split="tensor", budget=1000))
    assert all(isinstance(error, PlanInfeasibleError) for error in found)
    assert "largest: lm_head.weight 2.05 kB" in str(found[0])


def test_a_family_without_rules(tmp_path: Path) -> None:
    """A model whose layers nobody knows how to cut is refused by its type."""
    path = llama(tmp_path / "model")
    (path / "config.json").write_text('{"model_type": "odd"}')
    renamed = {"split": "tensor", "budget": PLENTY}
    for error in run(World(2), load(path, **renamed)):
        assert "config.json has no number of heads that divides model.layers.*" in str(error)
