"""Slices of tensors on several ranks: threads of this process, and real processes over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from dequant_samples import Sample, bnb_int8, four_bit, fp8, int8, write
from distributed_helpers import PLENTY, llama, load, path, succeeded
from remote_server import serve
from safetensors.numpy import save_file
from tensor_slices import joined
from thread_group import ThreadGroup, World, run

import streamload
from streamload import distributed
from streamload.errors import PlanInfeasibleError, StateDictMismatchError
from streamload.planning.shares import Slice

__all__ = ["path"]


def alone(path: Path, **options: Any) -> dict[str, Any]:
    options = {"budget": PLENTY, "device": "host", "progress": False} | options
    return dict(streamload.load_state_dict(None, path, **options).state_dict)


def planned(path: Path | str, split: str, size: int, **options: Any) -> list[Any]:
    def body(group: ThreadGroup) -> Any:
        asked = {"budget": PLENTY, "split": split, "group": group} | options
        return distributed.plan(path, **asked)

    return run(World(size), body)


@pytest.mark.parametrize("split", ["tensor", "2x2", "4x1", "1x4"])
@pytest.mark.parametrize("reader", ["auto", "pread"])
def test_slices_of_all_ranks_are_the_whole(split: str, reader: str, path: Path) -> None:
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
    reports = succeeded(run(World(2), load(path, split="tensor", mapping="hf-llama")))
    plan = succeeded(planned(path, "tensor", 2, mapping="hf-llama"))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    expected = alone(path, mapping="hf-llama")
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_a_slow_store_is_read_once(tmp_path: Path) -> None:
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


def test_a_mesh_of_unequal_budgets(tmp_path: Path) -> None:
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
    path = llama(tmp_path / "model")
    (path / "config.json").write_text('{"model_type": "odd"}')
    for error in run(World(2), load(path, split="tensor")):
        assert "config.json has no number of heads that divides model.layers.*" in str(error)
    for error in run(World(2), load(path, split="tensor", rename=lambda name: f"x.{name}")):
        assert "config.json has no number of heads that divides model.layers.*" in str(error)
    one = {f"blocks.{n}.mixer.weight": np.ones((8, 8), np.float32) for n in range(3)}
    save_file(one, tmp_path / "odd.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    for error in run(World(2), load(tmp_path / "odd.safetensors", split="tensor")):
        assert "there is no rule for the layers of odd; write split" in str(error)


def quantized(folder: Path, *samples: Sample) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return write(folder, list(samples), model_type="llama", **heads)


def at(name: str) -> str:
    return f"model.layers.0.{name}.weight"


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_quantized_weights_are_cut_at_their_blocks(dtype: str | None, tmp_path: Path) -> None:
    samples = [
        fp8(at("self_attn.q_proj"), (512, 256)),
        fp8(at("self_attn.o_proj"), (128, 512)),
        int8(at("self_attn.k_proj"), zeros=True),
        bnb_int8(at("mlp.up_proj")),
        int8(at("mlp.down_proj")),
    ]
    path = quantized(tmp_path, *samples)
    reports = succeeded(run(World(2), load(path, split="tensor", dtype=dtype)))
    plan = succeeded(planned(path, "tensor", 2, dtype=dtype))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    expected = alone(path, dtype=dtype)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    if dtype is None:
        scales = plan.first_slices[f"{at('self_attn.o_proj')}_scale_inv"]
        assert scales == (Slice(1, 0, 2),)
        assert f"{at('mlp.down_proj')}_scale" not in plan.first_slices  # one for each row
    else:
        assert all(np.array_equal(found[each.name], each.rounded(dtype)) for each in samples)


def test_blocks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """By name: blocks of four bits cross rows, and blocks of FP8 cannot be halved."""
    four = four_bit(at("mlp.down_proj"), (128, 192))
    path = quantized(tmp_path / "four", four, int8(at("mlp.up_proj")))
    for error in run(World(2), load(path, split="tensor")):
        said = "model.layers.*.mlp.down_proj.weight is a tensor of bnb-nf4: dtype= dequantizes it"
        assert said in str(error)
    reports = succeeded(run(World(2), load(path, split="tensor", dtype="float32")))
    halves = [report.state_dict[four.name] for report in reports]
    assert np.array_equal(np.concatenate(halves, 1), four.rounded("float32"))
    path = quantized(tmp_path / "fp8", fp8(at("mlp.up_proj"), (384, 256)))
    for error in run(World(2), load(path, split="tensor")):
        assert "2 does not divide the 3 blocks of 128 rows of model.layers.*.mlp.up" in str(error)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_blocks_of_gguf(dtype: str | None, tmp_path: Path) -> None:
    """Rows of query heads in the file's order, and columns at blocks of 32."""
    needs.module("gguf")
    needs.module("transformers")
    from gguf_files import small_model, tensors_of
    from gguf_files import write as write_gguf

    model = small_model("llama")
    tensors = tensors_of(model)
    types = {name: "Q8_0" for name, array in tensors.items() if array.ndim == 2}
    write_gguf(tmp_path / "model.gguf", tensors, types, config=model.config)
    path = tmp_path / "model.gguf"
    reports = succeeded(run(World(2), load(path, split="tensor", dtype=dtype)))
    plan = succeeded(planned(path, "tensor", 2, dtype=dtype))[0]
    found = joined(plan, ((share, reports[share.rank].state_dict) for share in plan.shares))
    expected = alone(path, dtype=dtype)
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)
    assert "model.layers.0.self_attn.o_proj.weight" in plan.first_slices


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_new_models_of_gguf_have_floats_of_one_dtype(kind: str, tmp_path: Path) -> None:
    """The file's norms are float32; torch multiplies no two dtypes."""
    torch = needs.module("torch")
    needs.module("gguf")
    needs.module("transformers")
    from gguf_files import quantized_types, small_model, tensors_of
    from gguf_files import write as write_gguf

    made = small_model("llama")
    tensors, path = tensors_of(made), tmp_path / "model.gguf"
    write_gguf(path, tensors, quantized_types(tensors, kind), config=made.config)

    def body(group: Any) -> Any:
        with torch.device("meta"):
            model = type(made)(made.config)
        given: dict[str, Any] = {"split": "replicate", "device": "cpu", "progress": False}
        streamload.distributed.load_state_dict(model, path, group=group, **given)
        return {tensor.dtype for tensor in model.state_dict().values()}

    assert succeeded(run(World(2), body)) == [{torch.float16}] * 2
