"""Readers that streamload did not write accept what it converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from conversions import quiet, reference, same_values, tensors_of
from make_checkpoint import make_checkpoint, shape_of_size
from safetensors import safe_open

from streamload.core.dtypes import BF16, F16
from streamload.formats.safetensors import INDEX, SINGLE


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped bf16 checkpoint in two shards, with extreme values."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    make_checkpoint(out, shape_of_size(2_000_000, BF16), shards=2, plant_extremes=True)
    return out


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny Llama of transformers in bfloat16, and the folder that it saved itself to."""
    torch = needs.module("torch")
    needs.module("transformers")
    model = needs.module("offloading_models").built("llama").to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    model.save_pretrained(folder)
    return model, folder


def test_safetensors_reads_it(source: Path, tmp_path: Path) -> None:
    quiet(source, tmp_path / "out", dtype="float16", max_shard_size="500kB")
    before = tensors_of(source)
    found: set[str] = set()
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "np") as opened:
            assert opened.metadata()["format"] == "pt"
            for name in opened.keys():  # noqa: SIM118
                found.add(name)
                _, shape, data = before[name]
                expected = reference(data, BF16, F16)
                array = opened.get_tensor(name)
                assert array.shape == shape
                assert same_values(array.tobytes(), expected, F16)
    assert found == before.keys()


def test_tinygrad_reads_it(source: Path, tmp_path: Path) -> None:
    state = needs.module("tinygrad.nn.state")
    quiet(source, tmp_path / "out", dtype="float16")
    found = state.safe_load(str(tmp_path / "out" / SINGLE))
    expected = tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert bytes(tensor.bitcast("uint8").data()) == expected[name][2], name


def test_transformers_reads_it(llama: Any, tmp_path: Path) -> None:
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    model, folder = llama
    quiet(folder, tmp_path / "out", dtype="float16", max_shard_size="100kB")
    assert (tmp_path / "out" / INDEX).exists()
    assert (tmp_path / "out" / "generation_config.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.float16
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].half(), after[name]) for name in before)


def test_mlx_lm_reads_it(llama: Any, tmp_path: Path) -> None:
    utils = needs.runtime("mlx_lm.utils")
    tree = needs.runtime("mlx.utils")
    model, folder = llama
    quiet(folder, tmp_path / "out", dtype="float16", max_shard_size="100kB")
    loaded, _ = utils.load_model(tmp_path / "out")
    found = dict(tree.tree_flatten(loaded.parameters()))
    before = model.state_dict()
    assert found.keys() == before.keys()
    for name, array in found.items():
        assert str(array.dtype).endswith("float16")
        assert np.array(array).tobytes() == before[name].half().numpy().tobytes(), name
