"""What tensors state and config.json has otherwise: every target format follows the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import quiet, tensors_of
from gguf_models import CONFIGS, write_model
from safetensors_files import write_safetensors

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError
from streamload.formats.safetensors import SINGLE

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TARGETS: dict[str, dict[str, Any]] = {
    "gguf": {"to": "gguf", "dtype": "float32"},
    "mlc": {"to": "mlc", "quant": "q0f32"},
    "safetensors": {"dtype": "float32"},
    "mlx": {"runtime": "mlx", "dtype": "float32"},
    "candle": {"runtime": "candle", "dtype": "float32"},
}


def make(folder: Path, family: str = "llama", *, same: bool = False, **config: Any) -> Path:
    """A model of an embedding and a head, whose config.json is changed afterwards."""
    write_model(folder, family, dtype="F32", tie_word_embeddings=False, rope_scaling=None)
    if same:
        data = bytearray((folder / SINGLE).read_bytes())
        infos = open_checkpoint(folder).tensors
        to, of = infos[HEAD], infos[EMBEDDING]
        data[to.start : to.stop] = data[of.start : of.stop]
        (folder / SINGLE).write_bytes(data)
    said = json.loads((folder / "config.json").read_text())
    said |= {"architectures": ["LlamaForCausalLM"]} if family == "llama" else {}
    said = {key: value for key, value in (said | config).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def values(folder: Path, name: str) -> bytes:
    """A tensor's float32 bytes; of MLC by its own index."""
    if (cache := folder / "tensor-cache.json").exists():
        for shard in json.loads(cache.read_text())["records"]:
            data = (folder / shard["dataPath"]).read_bytes()
            for one in shard["records"]:
                if one["name"] == name:
                    return data[one["byteOffset"] :][: one["nbytes"]]
        raise KeyError(name)
    return tensors_of(folder)[name][2]


def config_of(folder: Path) -> dict[str, Any]:
    """The settings with which the result is opened."""
    if (chat := folder / "mlc-chat-config.json").exists():
        found: dict[str, Any] = json.loads(chat.read_text())["model_config"]
        return found
    return dict(open_checkpoint(folder).config)


@pytest.mark.parametrize("target", TARGETS)
def test_another_head_is_kept(tmp_path: Path, target: str) -> None:
    """config.json ties it to the embedding: values of both decide, and a note says so."""
    source = make(tmp_path / "in", tie_word_embeddings=True)
    report = quiet(source, tmp_path / "out", **TARGETS[target])
    assert values(tmp_path / "out", HEAD) == tensors_of(source)[HEAD][2]
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is False
    (note,) = (note for note in report.plan.notes if "tie_word_embeddings True" in note)
    assert f"{HEAD} is stored, and is not {EMBEDDING}: it is False" in note


@pytest.mark.parametrize("target", ["gguf", "mlc"])
def test_a_head_of_the_same_values_is_stored_once(tmp_path: Path, target: str) -> None:
    """If config.json ties it to the embedding."""
    source = make(tmp_path / "in", same=True, tie_word_embeddings=True)
    report = quiet(source, tmp_path / "out", **TARGETS[target])
    with pytest.raises(KeyError):
        values(tmp_path / "out", HEAD)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert not any("tie_word_embeddings" in note for note in report.plan.notes)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_gguf_of_other_shapes_is_refused(tmp_path: Path, family: str) -> None:
    """By the metadata a reader would build another model: the tensor is named, nothing written."""
    widths = {"gpt2": "n_embd"}.get(family, "hidden_size")
    depth = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    inner = {"gpt2": "n_inner"}.get(family, "intermediate_size")
    for key, value, said in (
        (widths, 128, "shape is not that of a model by the settings"),
        (inner, 32, r"mlp\..*shape is not that of a model by the settings"),
        (depth, 3, r"layer 2 has no tensor.*expected 3 layers.*found 2 layers"),
        (depth, 1, "more layers than config.json states: expected num_hidden_layers 2, found 1"),
    ):
        source = write_model(tmp_path / key / str(value), family)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(CheckpointError, match=said):
            quiet(source, tmp_path / "out", to="gguf")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_the_vocabulary_has_the_embeddings_rows(tmp_path: Path, target: str) -> None:
    """Whatever config.json has: the result is opened by what it says."""
    source = make(tmp_path / "in", vocab_size=7)
    rows = open_checkpoint(source).tensors[EMBEDDING].shape[0]
    report = quiet(source, tmp_path / "out", **TARGETS[target])
    assert config_of(tmp_path / "out")["vocab_size"] == rows
    assert any(f"vocab_size 7, and {EMBEDDING} has {rows} rows" in n for n in report.plan.notes)


def test_a_gpt2_with_a_head_of_its_own(tmp_path: Path) -> None:
    """GPT-2 is tied without a word of config.json; MLC and llama.cpp have another head, too."""
    source = make(tmp_path / "in", "gpt2", tie_word_embeddings=None)
    tensors = {n: (t.code, shape, data) for n, (t, shape, data) in tensors_of(source).items()}
    _, shape, _ = tensors["wte.weight"]
    head = np.arange(np.prod(shape), dtype=np.float32)
    write_safetensors(source / SINGLE, tensors | {HEAD: ("F32", shape, head.tobytes())})
    for target in ("gguf", "mlc"):
        quiet(source, tmp_path / target, **TARGETS[target])
        assert values(tmp_path / target, HEAD) == head.tobytes()
    with pytest.raises(CheckpointError, match=r"no such tie_word_embeddings: lm_head\.weight is"):
        quiet(source, tmp_path / "c", to="llm.c")
