"""What models compute is not missing, and not unexpected where a model has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from load_helpers import load
from safetensors_files import write_arrays

from streamload.core.computed import is_computed
from streamload.errors import StateDictMismatchError

COMPUTED = {
    "bert.embeddings.position_ids": (1, 512),
    "model.layers.3.self_attn.rotary_emb.inv_freq": (8,),
    "rope.freqs": (8,),
    "freqs_cis": (1, 32, 1, 4, 2),
    "layer1.bn.num_batches_tracked": (),
    "transformer.h.0.attn.bias": (1, 1, 20, 20),
    "transformer.h.0.attn.masked_bias": (),
    "gpt_neox.layers.0.attention.bias": (1, 1, 20, 20),
    "blocks.0.mask": (20, 20),
    "layers.0.blocks.1.attn_mask": (4, 49, 49),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_models_compute_by_name(name: str) -> None:
    """Positions, rotary frequencies, counters and masks; a bias of the same name is none."""
    assert is_computed(name, COMPUTED[name])
    assert not is_computed(name + "es", COMPUTED[name])
    assert not is_computed("h.0.attn.bias", (768,))
    assert not is_computed("h.0.attn.bias", (12, 20, 20))
    assert not is_computed("mask", (3,))


def save(path: Path, **arrays: Any) -> Path:
    """Write float32 arrays; ``__`` in a name is a dot."""
    raw = {n.replace("__", "."): np.asarray(a, np.float32) for n, a in arrays.items()}
    return write_arrays(path / "m.safetensors", raw)


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_buffer_of_a_torch_module(tmp_path: Path, place: str) -> None:
    """A position buffer with values stays as it is; one that has none is missing."""
    torch = needs.module("torch")
    model = torch.nn.Linear(2, 2, bias=False, device=place)
    model.register_buffer("position_ids", torch.arange(4, device=place))
    model.register_buffer("scale", torch.ones(1, device=place))
    path = save(tmp_path, weight=np.ones((2, 2)), scale=[2.0])
    if place == "meta":
        with pytest.raises(StateDictMismatchError) as caught:
            load(model, path, device="cpu")
        assert caught.value.missing == ("position_ids",)
        return
    report = load(model, path)
    assert report.missing == ()
    assert model.position_ids.tolist() == [0, 1, 2, 3]
    assert model.scale.item() == 2
    with pytest.raises(StateDictMismatchError) as caught:  # no name of what is computed
        load(model, save(tmp_path, weight=np.ones((2, 2))))
    assert caught.value.missing == ("scale",)


def test_counters_and_masks_that_a_torch_module_does_not_have(tmp_path: Path) -> None:
    """They are skipped, and the report names them; statistics are not."""
    torch = needs.module("torch")
    norm = torch.nn.BatchNorm1d(3, track_running_stats=False)
    arrays: dict[str, Any] = {"weight": np.ones(3), "bias": np.ones(3), "num_batches_tracked": 7}
    report = load(norm, save(tmp_path, **arrays, h__0__attn__bias=np.ones((1, 1, 4, 4))))
    assert report.skipped == ("num_batches_tracked", "h.0.attn.bias")
    with pytest.raises(StateDictMismatchError) as caught:
        load(norm, save(tmp_path, **arrays, running_mean=np.ones(3)))
    assert caught.value.unexpected == ("running_mean",)


def test_tensors_of_tinygrad_that_are_no_parameters(tmp_path: Path) -> None:
    tinygrad = needs.module("tinygrad")
    needs.device("CPU")

    class Model:
        def __init__(self) -> None:
            self.norm = tinygrad.nn.BatchNorm(3)
            self.freqs_cis = (tinygrad.Tensor.arange(4) + 1).float().contiguous()
            self.table = tinygrad.Tensor([5.0, 6.0], device="CPU").realize().is_param_(False)

    arrays = {
        "norm.weight": np.full(3, 2.0),
        "norm.bias": np.full(3, 3.0),
        "norm.running_mean": np.full(3, 4.0),
        "norm.running_var": np.full(3, 5.0),
    }
    model = Model()
    report = load(model, save(tmp_path, **arrays), device="CPU")
    assert report.missing == ()
    assert model.norm.running_var.tolist() == [5, 5, 5]
    assert model.freqs_cis.tolist() == [1, 2, 3, 4]
    assert model.table.tolist() == [5, 6]
    arrays["table"] = np.full(2, 9.0)  # where it is stored it is loaded
    load(model, save(tmp_path, **arrays), device="CPU")
    assert model.table.tolist() == [9, 9]
    del arrays["norm.running_mean"]
    with pytest.raises(StateDictMismatchError) as caught:
        load(Model(), save(tmp_path, **arrays), device="CPU")
    assert caught.value.missing == ("norm.running_mean",)


@pytest.mark.parametrize("framework", ["torch", "tinygrad"])
def test_a_scalar_may_be_stored_as_one_element(tmp_path: Path, framework: str) -> None:
    module = needs.module(framework)
    if framework == "torch":
        model = {"a": module.zeros(()), "b": module.zeros(1)}
    else:
        needs.device("CPU")
        model = {"a": module.Tensor(0.0, device="CPU"), "b": module.Tensor([0.0], device="CPU")}
    load(model, save(tmp_path, a=[3.0], b=4.0))
    assert (model["a"].tolist(), model["b"].tolist()) == (3, [4])


def test_what_stays_elsewhere_is_told(tmp_path: Path) -> None:
    tinygrad = needs.module("tinygrad")
    for name in ("CPU", "CL"):
        needs.device(name)
    table = tinygrad.Tensor([5.0, 6.0], device="CPU").realize().is_param_(False)
    model = {"w": tinygrad.Tensor.empty(2, device="CPU"), "freqs_cis": table}
    report = load(model, save(tmp_path, w=[1.0, 2.0]), device="CL")
    assert any("stay on another device: freqs_cis" in note for note in report.notes)
