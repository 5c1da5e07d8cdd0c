"""What tensors state and config.json has otherwise: every target format follows the tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import files_of, quiet, tensors_of
from gguf_models import CONFIGS, write_model
from safetensors_files import write_safetensors

from streamload.checkpoint.digests import SIDECAR
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError
from streamload.formats.safetensors import SINGLE
from streamload.verification.diff import made_by
from streamload.verification.verify import verify_checkpoint

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
    source = make(tmp_path / "in", same=True, tie_word_embeddings=True)
    report = quiet(source, tmp_path / "out", **TARGETS[target])
    with pytest.raises(KeyError):
        values(tmp_path / "out", HEAD)
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True
    assert not any("tie_word_embeddings" in note for note in report.plan.notes)


@pytest.mark.parametrize("target", ["gguf", "safetensors", "mlx"])
@pytest.mark.parametrize("family", CONFIGS)
def test_other_shapes_are_refused(tmp_path: Path, family: str, target: str) -> None:
    widths = {"gpt2": "n_embd"}.get(family, "hidden_size")
    depth = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
    inner = {"gpt2": "n_inner"}.get(family, "intermediate_size")
    for key, value, said in (
        (widths, 128, "shape is not that of a model by the settings"),
        (inner, 32, r"mlp\..*shape is not that of a model by the settings"),
        (
            depth,
            3,
            rf"layer 2 has no tensor.*expected (3 layers.*found 2 layers|{depth} 2, found 3)",
        ),
        (depth, 1, r"more layers than config.json states: expected \w+ 2, found 1"),
    ):
        source = write_model(tmp_path / key / str(value), family)
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(CheckpointError, match=said):
            quiet(source, tmp_path / "out", **TARGETS[target])
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "config", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias of config.json is not that of its"),
        ("llama", {"mlp_bias": True}, r"mlp_bias of .*: expected False, found True"),
        ("gpt2", {"tie_word_embeddings": False, "architectures": ["GPT2LMHeadModel"]}, "the head"),
    ],
)
def test_tensors_that_settings_want(
    tmp_path: Path, family: str, config: dict[str, Any], said: str
) -> None:
    """Readers would open the result with random numbers in their place, or not at all."""
    source = write_model(tmp_path / "in", family, tokenizer=False)
    stated = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(stated | config))
    with pytest.raises(CheckpointError, match=said):
        quiet(source, tmp_path / "out", dtype="float32")
    quiet(source, tmp_path / "part", exclude="*.1.*", dtype="float32")


def test_what_is_no_other_model_is_written(tmp_path: Path) -> None:
    """Codes, a part of the layers, layers that predict more tokens, sizes that are not stated."""
    source = write_model(tmp_path / "in", "llama", tokenizer=False)
    quiet(source, tmp_path / "part", select=["model.layers.1.*", "model.norm.*"])
    quiet(tmp_path / "part", tmp_path / "again", dtype="float32")
    quiet(source, tmp_path / "nf4", quant="nf4")
    quiet(tmp_path / "nf4", tmp_path / "copied")
    quiet(tmp_path / "nf4", tmp_path / "plain", dtype="float32")
    gpt2 = write_model(tmp_path / "gpt2", "gpt2", tokenizer=False)
    quiet(gpt2, tmp_path / "q8_0", quant="q8_0")
    quiet(tmp_path / "q8_0", tmp_path / "conv1d", dtype="float32")
    tensors = {n: (t.code, shape, data) for n, (t, shape, data) in tensors_of(source).items()}
    more = {n.replace(".1.", ".2."): each for n, each in tensors.items() if ".1." in n}
    more["model.layers.2.enorm.weight"] = ("F32", (2, 2), bytes(16))
    write_safetensors(source / SINGLE, tensors | more)
    quiet(source, tmp_path / "mtp", dtype="float32")
    mistral = write_model(tmp_path / "mistral", "mistral", tokenizer=False)
    config = json.loads((mistral / "config.json").read_text())
    del config["num_key_value_heads"]  # transformers' own is 8
    (mistral / "config.json").write_text(json.dumps(config))
    quiet(mistral, tmp_path / "unstated", dtype="float32")


@pytest.mark.parametrize("target", TARGETS)
def test_weights_that_no_index_lists_are_named(tmp_path: Path, target: str) -> None:
    """They are not converted, such as a shard of layers that predict more tokens."""
    source = make(tmp_path / "in")
    write_safetensors(source / "mtp.safetensors", {"mtp.weight": ("F32", (1,), bytes(4))})
    report = quiet(source, tmp_path / "out", **TARGETS[target])
    (note,) = (note for note in report.plan.notes if "mtp.safetensors" in note)
    assert "no part of this checkpoint" in note


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


def mixture(folder: Path, *, fused: bool) -> Path:
    """A Qwen3 with 3 experts a layer: a tensor for each matrix, or one for each kind."""
    config = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    write_model(folder, "qwen3", tokenizer=False, dtype="F32")
    said = json.loads((folder / "config.json").read_text())
    said |= {"model_type": "qwen3_moe", "norm_topk_prob": True, "head_dim": 32} | config
    (folder / "config.json").write_text(json.dumps(said))
    tensors = {
        name: ("F32", shape, data)
        for name, (_, shape, data) in tensors_of(folder).items()
        if ".mlp." not in name
    }
    random = np.random.default_rng(5)
    for mlp in (f"model.layers.{i}.mlp" for i in range(2)):
        joined = random.normal(size=(3, 64, 64)).astype(np.float32)  # 32 rows of gate, 32 of up
        down = random.normal(size=(3, 64, 32)).astype(np.float32)
        arrays = {f"{mlp}.gate.weight": random.normal(size=(3, 64)).astype(np.float32)}
        whole = {f"{mlp}.experts.gate_up_proj": joined, f"{mlp}.experts.down_proj": down}
        for each in range(3):
            parts = {"gate": joined[each, :32], "up": joined[each, 32:], "down": down[each]}
            single = {f"{mlp}.experts.{each}.{k}_proj.weight": a for k, a in parts.items()}
            arrays |= whole if fused else single
        tensors |= {name: ("F32", a.shape, a.tobytes()) for name, a in arrays.items()}
    write_safetensors(folder / SINGLE, tensors)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {"to": "gguf"},
        {"to": "gguf", "dtype": "float16"},
        {"to": "gguf", "quant": "q8_0"},
        {"to": "gguf", "quant": "q4_k_m"},
        {"to": "mlc", "quant": "q4f16_1"},
        {"to": "mlc", "quant": "q0f32"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_fused_experts_are_written(tmp_path: Path, options: dict[str, Any]) -> None:
    for name, fused in (("one", True), ("several", False)):
        quiet(
            mixture(tmp_path / f"in-{name}", fused=fused), tmp_path / name, **options, verify=True
        )
    found, expected = (
        {path: data for path, data in files_of(tmp_path / name).items() if path != SIDECAR}
        for name in ("one", "several")
    )
    assert found == expected
    if options == {"to": "gguf"}:
        assert verify_checkpoint(tmp_path / "one", progress=False).ok
        with pytest.raises(CheckpointError, match=r"experts taken apart.*`streamload verify"):
            made_by(tmp_path / "in-one", tmp_path / "one")
        stack = tensors_of(tmp_path / "one")["model.layers.1.mlp.experts.2.up_proj.weight"]
        joined = tensors_of(tmp_path / "in-one")["model.layers.1.mlp.experts.gate_up_proj"]
        assert stack[2] == np.frombuffer(joined[2], np.float32).reshape(3, 64, 64)[2, 32:].tobytes()


def test_packed_experts_are_written(tmp_path: Path) -> None:
    source = mixture(tmp_path / "in", fused=True)
    quiet(source, tmp_path / "nf4", quant={"*.experts.*": "nf4"})
    quiet(tmp_path / "nf4", tmp_path / "plain", dtype="float32")
    for name in ("nf4", "plain"):
        quiet(tmp_path / name, tmp_path / f"{name}-gguf", to="gguf", dtype="float32")
    found, expected = ((tmp_path / f"{n}-gguf/model.gguf").read_bytes() for n in ("nf4", "plain"))
    assert found == expected


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("model.layers.1.mlp.experts.gate_up_scales", False),
        ("model.layers.2.enorm.weight", True),  # after the last layer: it predicts more tokens
        ("model.vision.weight", True),
    ],
)
def test_what_a_model_needs_is_not_left_out(tmp_path: Path, name: str, hint: bool) -> None:
    """The error suggests ``exclude`` for tensors outside of the model's layers alone."""
    source = write_model(tmp_path / "in", "llama", tokenizer=False)
    tensors = {n: (t.code, shape, data) for n, (t, shape, data) in tensors_of(source).items()}
    write_safetensors(source / SINGLE, tensors | {name: ("F32", (2, 2), bytes(16))})
    with pytest.raises(CheckpointError, match="has no name in GGUF") as raised:
        quiet(source, tmp_path / "out", to="gguf")
    assert ("exclude=" in str(raised.value)) is hint
