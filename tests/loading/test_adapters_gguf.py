"""`adapters=` of GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from gguf_files import architecture_of, gguf, small_model, tensors_of
from gguf_files import write as write_gguf
from lora_files import BASE, CONFIG, Array, adapter, random

import streamload
from streamload.errors import CheckpointError

torch = needs.module("torch")

ALPHA = float(CONFIG["lora_alpha"])
IDS = torch.arange(24)[None] % 96
#: By model, suffixes of the modules that have factors.
TARGETS = {
    "llama": ("q_proj", "k_proj", "v_proj", "down_proj", "embed_tokens", "lm_head"),
    "qwen2": ("q_proj", "k_proj", "o_proj"),
    "gemma2": ("q_proj", "up_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_fc", "mlp.c_proj"),
    "falcon-7b": ("query_key_value", "dense"),
    "falcon-40b": ("query_key_value", "dense"),
}


def factors_of(model: Any, suffixes: tuple[str, ...]) -> dict[str, tuple[Array, Array]]:
    """Factors by module of models, of shapes (4, inputs) and (outputs, 4)."""
    out = {}
    for seed, (name, weight) in enumerate(model.state_dict().items()):
        module = name.removesuffix(".weight")
        if module.endswith(suffixes) and name.endswith(".weight"):
            rows, columns = weight.shape[::-1] if ".c_" in name else weight.shape
            a, b = random(seed, 4, columns), random(seed + 900, rows, 4)
            out[module] = (a / 8, b / 8)
    return out


def peft_adapter(folder: Path, factors: dict[str, tuple[Array, Array]]) -> Path:
    arrays = {}
    for module, (a, b) in factors.items():
        if module.endswith("embed_tokens"):
            arrays[f"{BASE}{module}.lora_embedding_A"] = np.ascontiguousarray(b.T)
            arrays[f"{BASE}{module}.lora_embedding_B"] = np.ascontiguousarray(a.T)
        else:
            arrays |= {f"{BASE}{module}.lora_A.weight": a, f"{BASE}{module}.lora_B.weight": b}
    return adapter(folder, arrays)


def gguf_adapter(
    path: Path, model: Any, factors: dict[str, tuple[Array, Array]], *more: tuple[str, Any]
) -> Path:
    """The adapter as llama.cpp's converter writes it; its orders of rows stand here once more."""
    config = model.config
    architecture = architecture_of(config)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for module, (a, b) in factors.items():
        name = f"{names.get_name(module)}.weight"
        if config.model_type == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_" in module else config.num_key_value_heads
            b = b.reshape(heads, 2, -1, 4).swapaxes(1, 2).reshape(b.shape)
        if "query_key_value" in module:
            keys, groups = config.num_kv_heads, config.num_attention_heads // config.num_kv_heads
            each = b.reshape(keys, groups + 2, -1, 4)
            b = np.concatenate([x.reshape(-1, 4) for x in (each[:, :-2], each[:, -2], each[:, -1])])
        if name == "token_embd.weight":  # lora_a is transposed
            a, b = b, a.T
        tensors |= {f"{name}.lora_a": np.ascontiguousarray(a)}
        tensors |= {f"{name}.lora_b": np.ascontiguousarray(b)}
    keys_of = {"general.type": "adapter", "adapter.type": "lora"} | dict(more)
    said = [("add_string", (key, value)) for key, value in keys_of.items()]
    said.append(("add_float32", ("adapter.lora.alpha", ALPHA)))
    write_gguf(path, tensors, architecture=gguf.MODEL_ARCH_NAMES[architecture], more=said)
    return path


def loaded(path: Path, *adapters: Any) -> dict[str, Array]:
    options: dict[str, Any] = {"device": "host", "budget": "1GB", "dtype": "float32"}
    report = streamload.load_state_dict(
        None, path, adapters=list(adapters), progress=False, **options
    )
    return report.state_dict


@pytest.mark.parametrize("name", TARGETS)
def test_equal_to_the_adapter_of_peft(name: str, tmp_path: Path) -> None:
    """The same sums, bit for bit, for bases of safetensors and of GGUF; and logits of them."""
    model = small_model(name)
    factors = factors_of(model, TARGETS[name])
    assert len(factors) >= 4
    model.save_pretrained(tmp_path / "base")
    theirs = peft_adapter(tmp_path / "peft", factors)
    ours = gguf_adapter(tmp_path / "lora.gguf", model, factors)
    expected, found = (loaded(tmp_path / "base", each) for each in (theirs, ours))
    plain = loaded(tmp_path / "base")
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert np.array_equal(found[key], values), key
        module = key.removesuffix(".weight")
        assert np.array_equal(values, plain[key]) == (module not in factors), key
    for module, (a, b) in factors.items():
        delta = ALPHA / 4 * (b.astype(np.float64) @ a)
        exact = plain[f"{module}.weight"] + (delta.T if ".c_" in module else delta)
        np.testing.assert_allclose(found[f"{module}.weight"], exact, rtol=1e-6, atol=1e-6)
    base = tmp_path / "base.gguf"
    write_gguf(base, tensors_of(model), config=model.config)
    if name not in ("gpt2",):  # whose matrices are transposed there
        for key, values in loaded(base, ours).items():
            assert np.array_equal(values, expected[key]), key
    opened = streamload.transformers.from_pretrained(
        tmp_path / "base", adapters=[ours], dtype="float32", device="cpu"
    )
    state = opened.state_dict()
    assert all(np.array_equal(state[key].numpy(), values) for key, values in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "falcon-40b"])
def test_llama_cpp_computes_with_the_same(name: str, tmp_path: Path) -> None:
    """Its logits with the adapter beside the base are those of the sums."""
    llama_cpp = needs.runtime("llama_cpp")
    model = small_model(name)
    factors = factors_of(model, tuple(t for t in TARGETS[name] if t != "embed_tokens"))
    base, ours = tmp_path / "base.gguf", tmp_path / "lora.gguf"
    more: list[Any] = [("add_tokenizer_model", ("no_vocab",))]
    if name == "falcon-40b":
        more.append(("add_vocab_size", (96,)))
    write_gguf(base, tensors_of(model), config=model.config, more=more)
    gguf_adapter(ours, model, factors)
    opened = streamload.transformers.from_pretrained(
        base, adapters=[ours], dtype="float32", device="cpu"
    )
    with torch.no_grad():
        expected = opened(IDS).logits[0].numpy()
        assert np.abs(expected - model(IDS).logits[0].numpy()).max() > 0.1
    runs = llama_cpp.Llama(
        str(base), lora_path=str(ours), n_ctx=64, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    runs.eval(IDS[0].tolist())
    found = np.array(runs.scores[: IDS.shape[1]])
    runs.close()
    assert np.abs(found - expected).max() < 2e-3 * np.ptp(expected)


def test_what_is_no_adapter_of_the_base_is_one_error(tmp_path: Path) -> None:
    """Another architecture, other keys, heads that do not divide, and tensors that are no LoRA."""
    model = small_model("llama")
    factors = factors_of(model, ("q_proj",))
    model.save_pretrained(tmp_path / "base")
    small_model("qwen2").save_pretrained(tmp_path / "other")
    path = gguf_adapter(tmp_path / "lora.gguf", model, factors)
    with pytest.raises(CheckpointError, match="model_type of llama, mistral, found qwen2"):
        loaded(tmp_path / "other", path)
    with pytest.raises(
        CheckpointError, match=r"no configuration.*'llama', general\.type 'adapter'"
    ):
        streamload.transformers.from_pretrained(path)
    odd = gguf_adapter(tmp_path / "odd.gguf", model, factors, ("adapter.type", "control_vector"))
    with pytest.raises(CheckpointError, match=r"adapter\.type lora.*control_vector"):
        loaded(tmp_path / "base", odd)
    said = [("add_string", ("general.type", "adapter"))]
    odd_alpha = ("add_string", ("adapter.lora.alpha", "much"))
    write_gguf(tmp_path / "odd.gguf", {}, more=[*said, odd_alpha])
    with pytest.raises(CheckpointError, match=r"above 0.*much"):
        loaded(tmp_path / "base", tmp_path / "odd.gguf")
    for tensors, expected in (
        ({"blk.0.attn_norm.weight": np.ones(4, np.float32)}, "above 0"),
        ({}, "above 0"),
    ):
        write_gguf(tmp_path / "a.gguf", tensors, more=said)
        with pytest.raises(CheckpointError, match=expected):
            loaded(tmp_path / "base", tmp_path / "a.gguf")
    said.append(("add_float32", ("adapter.lora.alpha", 8.0)))
    a, b = np.ones((4, 256), np.float32), np.ones((6, 4), np.float32)
    names = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"
    cases: list[tuple[dict[str, Array], str]] = [
        ({"blk.0.attn_norm.weight": a[0]}, "only LoRA of matrices.*lora_a and lora_b"),
        ({"blk.0.ffn_gate_exps.weight.lora_a": a}, "only LoRA of matrices.*lora_a and lora_b"),
        (dict(zip(names, (a, b), strict=True)), "6 rows are not 4 heads"),
        ({names[0]: a}, "only LoRA of matrices is merged"),
        ({}, "lacks tensors"),
    ]
    for tensors, expected in cases:
        write_gguf(tmp_path / "a.gguf", tensors, more=said)
        with pytest.raises(CheckpointError, match=expected):
            loaded(tmp_path / "base", tmp_path / "a.gguf")
    write_gguf(tmp_path / "a.gguf", {}, architecture="mamba", more=said)
    with pytest.raises(CheckpointError, match=r"architecture is not known.*llama, qwen2.*mamba"):
        loaded(tmp_path / "base", tmp_path / "a.gguf")
