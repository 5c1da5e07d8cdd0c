"""MLC-LLM's folders: names, shapes and values are those of its models, and TVM reads them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import needs
import numpy as np
import pytest
from conversions import files_of, make_llama, quiet
from convert_crash_helpers import Start, duration, kill_and_resume, start
from safetensors_files import write_safetensors

from streamload import load_state_dict
from streamload.errors import CheckpointError

__all__ = ["start"]  # a fixture

Array = np.ndarray[Any, Any]
GROUPS = {"q4f16_1": 32, "q4f16_0": 32, "q3f16_1": 40, "q4f32_1": 32, "q4bf16_1": 32}
BITS = dict.fromkeys(GROUPS, 4) | {"q3f16_1": 3}
QUANTS = (*BITS, "q0f16", "q0f32", "q0bf16")
CHAT_CONFIG = "mlc-chat-config.json"

# --- models ---------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "vocab_size": 200,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "mistral": LLAMA | {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
    "mistral-tied": LLAMA | {"model_type": "mistral", "tie_word_embeddings": True},
    "qwen2": LLAMA | {"model_type": "qwen2"},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-bias": LLAMA | {"model_type": "qwen3", "attention_bias": True},
    "gpt2": GPT2 | {"vocab_size": 200},
    "qwen3_moe": LLAMA
    | {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 48,
        "num_local_experts": 4,  # as transformers 5 names it
        "num_experts_per_tok": 2,
    },
    "phi3": LLAMA | {"model_type": "phi3"},
    "gemma3": LLAMA
    | {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 128}
    | {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    if config["model_type"] == "gpt2":
        n = config["n_embd"]
        found = {"wte.weight": (config["vocab_size"], n), "wpe.weight": (config["n_positions"], n)}
        sizes = {"attn.c_attn": (n, 3 * n), "attn.c_proj": (n, n)}
        sizes |= {"mlp.c_fc": (n, 4 * n), "mlp.c_proj": (4 * n, n)}
        for i in range(config["n_layer"]):
            found[f"h.{i}.attn.bias"] = (1, 1, 4, 4)
            for each, shape in (*sizes.items(), ("ln_1", (n,)), ("ln_2", (n,))):
                found |= {f"h.{i}.{each}.weight": shape, f"h.{i}.{each}.bias": shape[-1:]}
        found |= {"ln_f.weight": (n,), "ln_f.bias": (n,)}
        return {f"transformer.{name}": shape for name, shape in found.items()}
    n, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    width, family = config.get("head_dim", n // heads), config["model_type"]
    found = {"model.embed_tokens.weight": (vocab, n), "model.norm.weight": (n,)}
    rows = {"q": heads * width, "k": shared * width, "v": shared * width}
    rows = {"qkv": sum(rows.values())} if family == "phi3" else rows
    for i in range(config["num_hidden_layers"]):
        start = f"model.layers.{i}"
        for key, count in rows.items():
            found[f"{start}.self_attn.{key}_proj.weight"] = (count, n)
            if family == "qwen2" or config.get("attention_bias"):
                found[f"{start}.self_attn.{key}_proj.bias"] = (count,)
            if family.startswith(("qwen3", "gemma3")) and key != "v":
                found[f"{start}.self_attn.{key}_norm.weight"] = (width,)
        found[f"{start}.self_attn.o_proj.weight"] = (n, heads * width)
        if config.get("attention_bias"):
            found[f"{start}.self_attn.o_proj.bias"] = (n,)
        found[f"{start}.self_attn.rotary_emb.inv_freq"] = (width // 2,)
        if family == "phi3":
            found[f"{start}.mlp.gate_up_proj.weight"] = (2 * inner, n)
        if family == "qwen3_moe":
            found[f"{start}.mlp.gate.weight"] = (config["num_local_experts"], n)
        for mlp, size in mlps_of(config, start).items():
            if family != "phi3":
                found |= {f"{mlp}.{key}_proj.weight": (size, n) for key in ("gate", "up")}
            found[f"{mlp}.down_proj.weight"] = (n, size)
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        for key in norms if family == "gemma3_text" else norms[:2]:
            found[f"{start}.{key}_layernorm.weight"] = (n,)
    return found if config.get("tie_word_embeddings") else {**found, "lm_head.weight": (vocab, n)}


def mlps_of(config: dict[str, Any], start: str) -> dict[str, int]:
    """The starts of the names of gates, and their rows: of each expert, or of the layer."""
    if "num_local_experts" not in config:
        return {f"{start}.mlp": config["intermediate_size"]}
    size = config["moe_intermediate_size"]
    return {f"{start}.mlp.experts.{i}": size for i in range(config["num_local_experts"])}


PHI3 = {
    "model.embed_tokens": "transformer.embd",
    "model.norm": "transformer.norm",
    "model.layers": "transformer.h",
    "input_layernorm": "ln",
    "self_attn.qkv_proj": "mixer.qkv_proj",
    "self_attn.o_proj": "mixer.out_proj",
}


def write(folder: Path, config: dict[str, Any], **others: Array) -> dict[str, Array]:
    """A random model, matrices in bfloat16 and the rest in float32; gives its values."""
    rng = np.random.default_rng(len(str(config)))
    arrays = {
        name: (rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in shapes_of(config).items()
    } | others
    tensors = {}
    for name, array in arrays.items():
        narrow = array.astype(ml_dtypes.bfloat16) if array.ndim == 2 else array
        code = "BF16" if array.ndim == 2 else "F32"
        tensors[name] = (code, array.shape, narrow.tobytes())
        arrays[name] = narrow.astype(np.float32)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


def expected_of(config: dict[str, Any], arrays: dict[str, Array]) -> dict[str, Array]:
    """The parameters that MLC's model has, by its loaders (python/mlc_llm/model)."""
    if config["model_type"] == "gpt2":
        kept = {name: a for name, a in arrays.items() if not name.endswith(".attn.bias")}
        conv = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        found = {name: a.T if name.endswith(conv) else a for name, a in kept.items()}
        return {**found, "lm_head.weight": arrays["transformer.wte.weight"]}
    if config["model_type"] == "phi3":
        found = {name: a for name, a in arrays.items() if not name.endswith("inv_freq")}
        for old, new in PHI3.items():
            found = {name.replace(old, new): a for name, a in found.items()}
        return found
    joined = "c_attn" if config["model_type"].startswith("qwen") else "qkv_proj"
    left = {name: a for name, a in arrays.items() if not name.endswith("inv_freq")}
    found, is_gemma = {}, config["model_type"] == "gemma3_text"
    for i in range(config["num_hidden_layers"]):
        for module, name, parts in (
            *([("self_attn", joined, ("q_proj", "k_proj", "v_proj"))] if not is_gemma else []),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ):
            for kind in ("weight", "bias"):
                start = f"model.layers.{i}.{module}"
                some = [left.pop(f"{start}.{part}.{kind}", None) for part in parts]
                if some[0] is not None:
                    found[f"{start}.{name}.{kind}"] = np.concatenate([a for a in some])
        if "num_local_experts" in config:
            start = f"model.layers.{i}.mlp"
            parts = [
                [left.pop(f"{each}.{key}_proj.weight") for key in ("gate", "up", "down")]
                for each in mlps_of(config, f"model.layers.{i}")
            ]
            both = [np.concatenate([gate, up]) for gate, up, _ in parts]
            found[f"{start}.moe_gate_up_proj.weight"] = np.stack(both)
            found[f"{start}.moe_down_proj.weight"] = np.stack([down for *_, down in parts])
    if config["model_type"] == "mistral" and config.get("tie_word_embeddings"):
        found["lm_head.weight"] = left["model.embed_tokens.weight"]
    found |= left
    if is_gemma:  # a norm of MLC's has all of the factor, Gemma's lacks 1
        norms = {
            name: a + np.float32(1) for name, a in found.items() if name.endswith("norm.weight")
        }
        return {f"language_model.{name}": a for name, a in (found | norms).items()}
    return found


# --- a reader of what is written ------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """tensor-cache.json, and every tensor by plain reads; what it says of the files is checked."""
    cache = json.loads((folder / "tensor-cache.json").read_text())
    found: dict[str, Array] = {}
    for i, shard in enumerate(cache["records"]):
        assert (shard["dataPath"], shard["format"]) == (f"params_shard_{i}.bin", "raw-shard")
        data = (folder / shard["dataPath"]).read_bytes()
        assert len(data) == shard["nbytes"]
        assert hashlib.md5(data, usedforsecurity=False).hexdigest() == shard["md5sum"]
        at = 0
        for one in shard["records"]:
            assert (one["byteOffset"], one["format"]) == (at, "raw")
            at += one["nbytes"]
            kind = ml_dtypes.bfloat16 if one["dtype"] == "bfloat16" else one["dtype"]
            array = np.frombuffer(data[one["byteOffset"] : at], kind)
            found[one["name"]] = array.reshape(one["shape"])
        assert at == len(data)
    names = [one["name"] for shard in cache["records"] for one in shard["records"]]
    assert len(names) == len(found)
    return cache, found


def dequantized(quant: str, words: Array, scales: Array, columns: int) -> tuple[Array, Array]:
    """Elements by the format's description, and the scale of each."""
    bits, in_word = BITS[quant], 32 // BITS[quant]
    codes = words[:, :, None] >> bits * np.arange(in_word, dtype=np.uint32) & (2**bits - 1)
    codes = codes.reshape(len(words), -1)
    assert not codes[:, columns:].any()
    steps = codes[:, :columns].astype(np.float32) - (2 ** (bits - 1) - 1)
    each = np.repeat(scales.astype(np.float32), GROUPS[quant], axis=1)[:, :columns]
    return steps * each, each


def is_embedding(name: str) -> bool:
    """Whether MLC has it as an Embedding: these are not transposed."""
    return any(part in name for part in ("embed_tokens", "embd", "wte", "wpe"))


def kind_of(quant: str) -> Any:
    code = quant[2:].partition("_")[0]
    return {"f16": np.float16, "f32": np.float32, "bf16": ml_dtypes.bfloat16}[code]


def quantised(quant: str, name: str, found: dict[str, Array]) -> tuple[Array, Array]:
    """Words and scales of a weight, a row of them for each of its rows."""
    words, scales = (found[name.replace(".weight", f".q_{part}")] for part in ("weight", "scale"))
    assert (words.dtype, scales.dtype) == (np.uint32, kind_of(quant))
    return (
        (words.T, scales.T) if quant.endswith("_0") and not is_embedding(name) else (words, scales)
    )


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        *itertools.product(CONFIGS, ("q4f16_1", "q4f16_0", "q0f16")),
        *itertools.product(("llama", "qwen3_moe"), QUANTS[2:]),
    ],
)
def test_tensors_are_those_of_mlcs_models(tmp_path: Path, name: str, quant: str) -> None:
    """Every name and shape, each element within half a step, and the rest as cast."""
    config = CONFIGS[name]
    if (name, quant) == ("qwen3_moe", "q4f16_0"):
        write(tmp_path / "in", config)
        with pytest.raises(CheckpointError, match="no experts in q4f16_0: write q4f16_1"):
            quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant=quant)
        return
    arrays = write(tmp_path / "in", config)
    expected = expected_of(config, arrays)
    used = {key: a for key, a in arrays.items() if not key.endswith((".attn.bias", "inv_freq"))}
    report = quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant=quant, verify=True)
    cache, found = read(tmp_path / "out")
    assert report.verified
    nbytes = sum(array.nbytes for array in found.values())
    said = cache["metadata"]
    assert (said["ParamSize"], said["ParamBytes"]) == (len(found), nbytes)
    read_numel = sum(array.size for array in used.values())
    assert said["BitsPerParam"] == pytest.approx(8 * nbytes / read_numel)
    left = set(found)
    for parameter, array in expected.items():
        if quant in BITS and array.ndim > 1 and not parameter.endswith(".gate.weight"):
            words, scales = quantised(quant, parameter, found)
            left -= {parameter.replace(".weight", f".q_{part}") for part in ("weight", "scale")}
            assert words.shape[:-2] == array.shape[:-2]
            words, scales, array = (a.reshape(-1, a.shape[-1]) for a in (words, scales, array))
            groups = math.ceil(array.shape[1] / GROUPS[quant])
            assert (words.shape, scales.shape) == ((len(array), 4 * groups), (len(array), groups))
            values, steps = dequantized(quant, words, scales, array.shape[1])
            most = 2 ** (BITS[quant] - 1) - 1
            bound = steps * (0.5 + most * float(ml_dtypes.finfo(kind_of(quant)).eps) + 1e-5)
            assert (np.abs(values - array) <= bound).all(), parameter
        else:
            expected_values = array.astype(kind_of(quant))
            assert found[parameter].dtype == expected_values.dtype
            assert np.array_equal(found[parameter], expected_values), parameter
            left.remove(parameter)
    assert not left
    chat = json.loads((tmp_path / "out" / CHAT_CONFIG).read_text())
    assert (chat["model_type"], chat["quantization"]) == (config["model_type"], quant)


def test_layouts_hold_the_same_codes(tmp_path: Path) -> None:
    for name in ("llama", "gpt2"):
        write(tmp_path / name, CONFIGS[name])
        found = {}
        for quant in ("q4f16_1", "q4f16_0"):
            quiet(tmp_path / name, tmp_path / name / quant, to="mlc", quant=quant)
            found[quant] = read(tmp_path / name / quant)[1]
        rows, columns = found["q4f16_1"], found["q4f16_0"]
        assert rows.keys() == columns.keys()
        for key, array in rows.items():
            is_linear = array.ndim == 2 and not is_embedding(key)
            assert np.array_equal(columns[key], array.T if is_linear else array), key


def test_files_are_as_full_as_they_get(tmp_path: Path) -> None:
    """A larger tensor lies alone, and its scales lie elsewhere; nothing is cut."""
    write(tmp_path / "in", LLAMA)
    options = {"to": "mlc", "quant": "q4f16_1", "verify": True}
    quiet(tmp_path / "in", tmp_path / "one", **options)
    quiet(tmp_path / "in", tmp_path / "out", max_shard_size=4096, **options)
    (one, same), (cache, found) = read(tmp_path / "one"), read(tmp_path / "out")
    assert (len(one["records"]), one["metadata"]) == (1, cache["metadata"])
    assert all(np.array_equal(same[name], array) for name, array in found.items())
    assert list(found) == list(same)
    records = cache["records"]
    assert all(shard["nbytes"] <= 4096 or len(shard["records"]) == 1 for shard in records)
    assert any(shard["nbytes"] > 4096 for shard in records)
    for before, after in itertools.pairwise(records):
        assert before["nbytes"] + after["records"][0]["nbytes"] > 4096


@pytest.mark.parametrize("quant", ["q4f16_1", pytest.param("q4f16_0", marks=pytest.mark.slow)])
def test_killed_where_scales_lie_in_other_files(start: Start, tmp_path: Path, quant: str) -> None:
    """SIGKILL at some points: the same bytes and sums in the end."""
    options: dict[str, object] = {"to": "mlc", "quant": quant, "max_shard_size": "300kB"}
    make_llama(tmp_path / "in", 24_000_000)
    chance = random.Random(5)
    longest_s = duration(start, tmp_path / "in", tmp_path / "whole", options)
    whole = files_of(tmp_path / "whole")
    assert len(whole) > 10
    for i in range(2):
        out = tmp_path / f"out{i}"
        kill_and_resume(start, tmp_path / "in", out, whole, chance, longest_s, options)


# --- what the source tells ------------------------------------------------------------------------


def chat_config(folder: Path, config: dict[str, Any], **files: Any) -> dict[str, Any]:
    write(folder / "in", config)
    for name, content in files.items():
        path = folder / "in" / name.replace("_json", ".json")
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    quiet(folder / "in", folder / "out", to="mlc", quant="q4f16_1")
    found: dict[str, Any] = json.loads((folder / "out" / CHAT_CONFIG).read_text())
    return found


def test_the_configuration(tmp_path: Path) -> None:
    """Numbers of config.json under MLC's names, sampling of generation_config.json, the rest."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 70000.0}
    config = LLAMA | {"rope_parameters": scaling, "eos_token_id": 7}
    del config["rope_theta"]
    tokenizer = {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "ByteFallback"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"vocab": {"decoder": 3, '"decoder":': 4}},
    }
    generation = {"temperature": 0.6, "eos_token_id": [3, 4]}
    files = {"tokenizer_json": tokenizer, "generation_config_json": generation}
    found = chat_config(tmp_path, config, **files, tokenizer_config_json={"a": 1})
    expected = {
        "model_type": "llama",
        "quantization": "q4f16_1",
        "vocab_size": 200,
        "context_window_size": 512,
        "prefill_chunk_size": 512,
        "sliding_window_size": -1,
        "temperature": 0.6,
        "top_p": 1.0,
        "bos_token_id": 1,
        "eos_token_id": [3, 4],
        "tokenizer_files": ["tokenizer.json", "tokenizer_config.json"],
        "tokenizer_info": {
            "token_postproc_method": "byte_fallback",
            "prepend_space_in_encode": True,
            "strip_space_in_decode": True,
        },
    }
    assert {key: found[key] for key in expected} == expected
    inner = found["model_config"]
    assert inner["position_embedding_base"] == 70000.0
    assert inner["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert (inner["head_dim"], inner["num_key_value_heads"], inner["hidden_size"]) == (16, 2, 64)
    for name in expected["tokenizer_files"]:  # type: ignore[attr-defined]
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_configuration_of_others(tmp_path: Path) -> None:
    """Mistral's window, Qwen's base, GPT-2's widths; a tokenizer of bytes."""
    found = chat_config(tmp_path / "m", CONFIGS["mistral"] | {"sliding_window": 128})
    assert (found["sliding_window_size"], found["context_window_size"]) == (128, -1)
    assert (found["attention_sink_size"], found["prefill_chunk_size"]) == (4, 128)
    tokenizer = {"normalizer": None, "decoder": {"type": "ByteLevel"}}
    found = chat_config(tmp_path / "q", CONFIGS["qwen2"], tokenizer_json=tokenizer)
    assert found["model_config"]["rope_theta"] == 5000.0
    assert found["tokenizer_info"] == {
        "token_postproc_method": "byte_level",
        "prepend_space_in_encode": False,
        "strip_space_in_decode": False,
    }
    found = chat_config(tmp_path / "g", CONFIGS["gpt2"])
    inner = found["model_config"]
    assert (inner["n_inner"], inner["context_window_size"], inner["head_dim"]) == (256, 48, 16)


def jinja(each: str, last: str, start: str = "", assistant: str = "assistant") -> str:
    """A chat template: each message as ``each``, then ``last``."""
    role = "{{ '" + assistant + "' if m.role == 'assistant' else m.role }}"
    each = each.replace("ROLE", role).replace("TEXT", "{{ m.content | trim }}")
    said = "{% for m in messages %}" + each + "{% endfor %}"
    return start + said + "{% if add_generation_prompt %}" + last + "{% endif %}"


HEADER = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
TEMPLATES = {
    "chatml": jinja("<|im_start|>ROLE\nTEXT<|im_end|>\n", "<|im_start|>assistant\n"),
    "llama-3": jinja(
        HEADER + "TEXT<|eot_id|>",
        HEADER.replace("ROLE", "assistant"),
        "{{ bos_token }}" + HEADER.replace("ROLE", "system") + "{{ strftime_now('%d') }}<|eot_id|>",
    ),
    "gemma_instruction": jinja(
        "<start_of_turn>ROLE\nTEXT<end_of_turn>\n",
        "<start_of_turn>model\n",
        "{{ bos_token }}",
        "model",
    ),
    "phi-3": jinja("<|ROLE|>\nTEXT<|end|>\n", "<|assistant|>\n"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_conversation_template(tmp_path: Path, name: str) -> None:
    """MLC's whose prompt is that of the source's Jinja; the tokens are the source's."""
    template = {"chat_template": TEMPLATES[name], "bos_token": {"content": "<b>"}}
    generation = {"eos_token_id": [3, 4], "bos_token_id": 9}
    files = {"tokenizer_config_json": template, "generation_config_json": generation}
    found = chat_config(tmp_path, LLAMA, **files)["conv_template"]
    assert (found["name"], found["stop_token_ids"]) == (name, [3, 4])
    begins = "bos_token" in TEMPLATES[name]
    assert found.get("system_prefix_token_ids") == ([9] if begins else None)
    assert found["role_content_sep"] == found["role_empty_sep"]


def test_a_template_of_a_file_and_of_a_family(tmp_path: Path) -> None:
    """chat_template.jinja comes first; Qwen3 strips what it thought."""
    write(tmp_path / "in", CONFIGS["qwen3"])
    (tmp_path / "in" / "chat_template.jinja").write_text(TEMPLATES["chatml"])
    (tmp_path / "in" / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant="q0f16")
    found = json.loads((tmp_path / "out" / CHAT_CONFIG).read_text())["conv_template"]
    assert (found["name"], found["strip_reasoning_in_history"]) == ("qwen3", True)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, "the source has no chat template"),
        (jinja("[ROLE] TEXT", "[assistant]"), "is none of MLC's"),
        ("{% for", "cannot be run .*Syntax"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be run .*unsafe"),
        ("{{ raise_exception('no') }}", r"cannot be run .*no"),
        ("{{ 'a' * 2000000000 }}", "cannot be run .*MemoryError"),
        ("{{ raise_exception('no' * 10**6) }}", r"cannot be run .{200,300}\)"),
        ("{{ 'a' * 10**7 }}", "is none of MLC's"),
        ([{"name": "tool", "template": "x"}], "the source has no chat template"),
        ([{"name": ["default"], "template": "x"}], "the source has no chat template"),
        ({"a": 1}, "the source has no chat template"),
    ],
)
def test_no_conversation_template(tmp_path: Path, template: Any, why: str) -> None:
    """The note says why, and hostile templates take neither memory nor the program's objects."""
    write(tmp_path / "in", LLAMA)
    said = {} if template is None else {"chat_template": template}
    (tmp_path / "in" / "tokenizer_config.json").write_text(json.dumps(said))
    report = quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant="q0f16")
    (note,) = (note for note in report.plan.notes if "conv_template" in note)
    assert re.search(why, note) and len(note) < 500, note
    assert "conv_template" not in json.loads((tmp_path / "out" / CHAT_CONFIG).read_text())


def test_phi3_and_its_long_rope(tmp_path: Path) -> None:
    """Factors by either name of config.json; what MLC's phi3 lacks is refused."""
    factors = {"long_factor": [1.0] * 8, "short_factor": [2.0] * 8}
    scaling = {"type": "su", **factors}
    config = CONFIGS["phi3"] | {"rope_scaling": scaling, "original_max_position_embeddings": 256}
    inner = chat_config(tmp_path / "a", config)["model_config"]
    places = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}
    expected = {"type": "longrope", "rope_type": "longrope", **factors, **places}
    assert inner["rope_scaling"] == expected
    assert (inner["position_embedding_base"], inner["partial_rotary_factor"]) == (5000.0, 1.0)
    others = (scaling | {"factor": 3.0}, scaling | {"attention_factor": 1.5})
    for i, wrong in enumerate(({"type": "yarn"}, {"type": "longrope"}, [1], *others)):
        write(tmp_path / f"in{i}", config | {"rope_scaling": wrong})
        problem = r"no such (scaling|factor)|rope_scaling of config.json|no attention_factor"
        with pytest.raises(CheckpointError, match=problem):
            quiet(tmp_path / f"in{i}", tmp_path / "out", to="mlc", quant="q4f32_1")


def test_gemma3_in_the_configuration(tmp_path: Path) -> None:
    """Its text model's numbers are in a part of their own; layers of another order are refused."""
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 9e5}}
    config = CONFIGS["gemma3"] | {"rope_parameters": rope, "query_pre_attn_scalar": 168}
    found = chat_config(tmp_path / "a", config)
    inner = found["model_config"]["text_config"]
    assert (inner["position_embedding_base"], inner["query_pre_attn_scalar"]) == (9e5, 168)
    assert (inner["head_dim"], inner["sliding_window_size"]) == (32, 128)
    assert (found["vocab_size"], found["context_window_size"]) == (200, 8192)
    linear = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}}
    old = {"rope_scaling": {"type": "linear", "factor": 8.0}}
    for i, wrong in enumerate((linear, old, {"layer_types": ["full_attention"] * 2})):
        write(tmp_path / f"in{i}", CONFIGS["gemma3"] | wrong)
        with pytest.raises(CheckpointError, match=r"no scaling of rotary|no such layer_types"):
            quiet(tmp_path / f"in{i}", tmp_path / "out", to="mlc", quant="q4f16_1")


def test_experts_in_the_configuration(tmp_path: Path) -> None:
    """And layers without experts are refused."""
    inner = chat_config(tmp_path / "a", CONFIGS["qwen3_moe"])["model_config"]
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    assert [inner[key] for key in keys] == [4, 2, 48, False]
    write(tmp_path / "in", CONFIGS["qwen3_moe"] | {"mlp_only_layers": [0]})
    with pytest.raises(CheckpointError, match="qwen3_moe has no such mlp_only_layers"):
        quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant="q4f16_1")


@pytest.mark.parametrize(
    ("config", "others", "why"),
    [
        ({"model_type": "mamba"}, {}, r"no model for the family.*llama, mistral.*found mamba"),
        ({"hidden_act": "gelu"}, {}, "MLC's llama has no such hidden_act"),
        ({"partial_rotary_factor": 0.5}, {}, "MLC's llama has no such partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "rotates all of a head"),
        ({"rope_scaling": {"rope_type": "yarn"}}, {}, r"no such scaling.*yarn"),
        ({"hidden_size": "64"}, {}, "hidden_size of config.json is invalid"),
        ({"num_hidden_layers": 3}, {}, r"missing.*model.layers.2.self_attn.q_proj.weight"),
        ({"intermediate_size": 97}, {}, r"gate_proj.*shape.*\[97, 64\].*\[96, 64\]"),
        (
            {},
            {"model.layers.0.mlp.down_proj.bias": np.zeros(64, np.float32)},
            r"down_proj.bias.*no place",
        ),
    ],
)
def test_what_mlc_has_no_model_for(
    tmp_path: Path, config: dict[str, Any], others: dict[str, Array], why: str
) -> None:
    """One error that names the family, the tensor or the line, before anything is written."""
    write(tmp_path / "in", LLAMA, **others)
    (tmp_path / "in" / "config.json").write_text(json.dumps(LLAMA | config))
    with pytest.raises(CheckpointError, match=why):
        quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant="q4f16_1")
    assert not (tmp_path / "out").exists()


def test_invalid_json_is_named(tmp_path: Path) -> None:
    write(tmp_path / "in", LLAMA)
    (tmp_path / "in" / "generation_config.json").write_text('{"top_p": ')
    with pytest.raises(CheckpointError, match=r"generation_config\.json is not valid JSON"):
        quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant="q0f16")


def test_what_is_asked_wrong(tmp_path: Path) -> None:
    """Another quantisation, a dtype, a width that q4f16_0 does not divide, other formats' files."""
    write(tmp_path / "in", LLAMA | {"intermediate_size": 72})
    (tmp_path / "in" / "config.json").write_text(json.dumps(LLAMA | {"intermediate_size": 72}))

    def convert(**options: Any) -> None:
        quiet(tmp_path / "in", tmp_path / "out", **options)

    for quant in (None, "nf4", {"*": "q4f16_1"}):
        with pytest.raises(ValueError, match=r"mlc needs quant=, one of q4f16_1, .*q4f32_1"):
            convert(to="mlc", quant=quant)
    with pytest.raises(ValueError, match="mlc takes no dtype="):
        convert(to="mlc", quant="q4f16_1", dtype="float32")
    with pytest.raises(CheckpointError, match=r"down_proj.*write q4f16_1.*found 72"):
        convert(to="mlc", quant="q4f16_0")
    with pytest.raises(ValueError, match="quant is one of"):
        convert(quant="q4f16_1")
    with pytest.raises(ValueError, match="quant is one of"):
        load_state_dict({}, tmp_path / "in", quant="q4f16_1")
    convert(to="mlc", quant="q4f16_1")


# --- TVM ------------------------------------------------------------------------------------------

ROWS, COLUMNS = 24, 128


@pytest.fixture(scope="module")
def tvm() -> Iterator[Any]:
    needs.runtime("tvm.contrib.tvmjs")
    yield needs.runtime("tvm")


@pytest.mark.slow
@pytest.mark.parametrize("quant", QUANTS)
def test_tvms_loaders_open_the_folder(tvm: Any, tmp_path: Path, quant: str) -> None:
    write(tmp_path / "in", CONFIGS["qwen3"])
    quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant=quant, max_shard_size="16kB")
    cache, expected = read(tmp_path / "out")
    assert len(cache["records"]) > 2
    found, metadata = tvm.contrib.tvmjs.load_tensor_cache(str(tmp_path / "out"), tvm.cpu())
    assert metadata == cache["metadata"] and found.keys() == expected.keys()
    functions = [tvm.get_global_func(f"vm.builtin.tensor_cache.{n}") for n in ("load", "get")]
    load, get = functions
    load(str(tmp_path / "out"), 1, 0)  # the processor
    for name, array in expected.items():
        for one in (found[name], get(name)):
            assert np.array_equal(one.numpy(), array), name
            assert one.numpy().dtype == array.dtype
    tvm.get_global_func("vm.builtin.tensor_cache.clear")()


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q4f16_1", "q3f16_1", "q4f32_1"])
def test_codes_are_nearer_than_mlcs(tvm: Any, tmp_path: Path, quant: str) -> None:
    """MLC's quantiser in the name's dtype, compiled by TVM: same scales, codes but near ties."""
    te, tirx, bits, group = tvm.te, tvm.tirx, BITS[quant], GROUPS[quant]
    groups, kind = COLUMNS // group + 1, np.dtype(kind_of(quant)).name
    most = tirx.const(2 ** (bits - 1) - 1, kind)
    weight, r = te.placeholder((ROWS, groups * group), kind, "weight"), te.reduce_axis((0, group))
    largest = te.compute(
        (ROWS, groups), lambda i, g: te.max(te.abs(weight[i, g * group + r]), axis=r), name="most"
    )
    scale = te.compute((ROWS, groups), lambda i, g: largest[i, g] / most, name="scale")

    def code(i: Any, j: Any) -> Any:
        steps = tirx.round(weight[i, j] / scale[i, j // group] + most)
        return tirx.min(tirx.max(steps, tirx.const(0, kind)), most * 2)

    codes = te.compute((ROWS, groups * group), code, name="codes")
    kernel = tvm.compile(te.create_prim_func([weight, scale, codes]), target="llvm")
    config = LLAMA | {"hidden_size": groups * group, "head_dim": 8, "vocab_size": ROWS}
    array = write(tmp_path / "in", config)["lm_head.weight"]
    quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant=quant)
    words, scales = quantised(quant, "lm_head.weight", read(tmp_path / "out")[1])
    made = [tvm.runtime.empty(shape, kind) for shape in (scales.shape, array.shape)]
    kernel(tvm.runtime.tensor(array.astype(kind)), *made)
    theirs = made[1].numpy().astype(np.float32) - (2 ** (bits - 1) - 1)
    assert np.array_equal(scales, made[0].numpy())
    mine, steps = dequantized(quant, words, scales, groups * group)
    errors = [np.abs(each - array) for each in (mine, theirs * steps)]
    assert (errors[0] <= errors[1]).all()
    assert np.mean(mine != theirs * steps) < 0.01
    assert (np.abs(mine - theirs * steps) <= steps * 1.0001).all()


def dequantizing(tvm: Any, quant: str, columns: int, is_turned: bool) -> Callable[..., Array]:
    """A kernel that TVM compiles from an expression like that of MLC's layers."""
    te, tirx, bits, group = tvm.te, tvm.tirx, BITS[quant], GROUPS[quant]
    in_word, groups = 32 // bits, math.ceil(columns / group)
    lines = {"words": groups * group // in_word, "scales": groups}
    shapes = {n: (count, ROWS) if is_turned else (ROWS, count) for n, count in lines.items()}
    words = te.placeholder(shapes["words"], "uint32", "words")
    kind = np.dtype(kind_of(quant)).name
    scales = te.placeholder(shapes["scales"], kind, "scales")

    def element(row: Any, column: Any) -> Any:
        at = [(n, row) if is_turned else (row, n) for n in (column // in_word, column // group)]
        shift = (column % in_word * bits).astype("uint32")
        code = tirx.bitwise_and(
            tirx.shift_right(words[at[0]], shift), tirx.const(2**bits - 1, "uint32")
        )
        steps = code.astype(kind) - tirx.const(2 ** (bits - 1) - 1, kind)
        return steps * scales[at[1]]

    out = te.compute((ROWS, columns), element, name="out")
    kernel = tvm.compile(te.create_prim_func([words, scales, out]), target="llvm")

    def run(*arrays: Array) -> Array:
        made = tvm.runtime.empty((ROWS, columns), kind)
        kernel(*(tvm.runtime.tensor(np.ascontiguousarray(a)) for a in arrays), made)
        found: Array = made.numpy()
        return found

    return run


@pytest.mark.slow
@pytest.mark.parametrize("quant", BITS)
def test_a_kernel_of_tvm_dequantizes(tvm: Any, tmp_path: Path, quant: str) -> None:
    """What it makes of the stored arrays is the weight, each element within half a step."""
    config = LLAMA | {"hidden_size": ROWS * 4, "intermediate_size": COLUMNS, "vocab_size": ROWS}
    arrays = write(tmp_path / "in", config)
    quiet(tmp_path / "in", tmp_path / "out", to="mlc", quant=quant)
    found, _ = tvm.contrib.tvmjs.load_tensor_cache(str(tmp_path / "out"), tvm.cpu())
    for name in ("lm_head", "model.embed_tokens"):
        words, scales = (found[f"{name}.q_{part}"].numpy() for part in ("weight", "scale"))
        is_turned = quant.endswith("_0") and name == "lm_head"
        values = dequantizing(tvm, quant, ROWS * 4, is_turned)(words, scales).astype(np.float32)
        scales = scales.T if is_turned else scales
        steps = np.repeat(scales.astype(np.float32), GROUPS[quant], 1)[:, : ROWS * 4]
        errors = np.abs(values - arrays[f"{name}.weight"])
        most = 2 ** (BITS[quant] - 1) - 1
        eps = float(ml_dtypes.finfo(kind_of(quant)).eps)
        assert (errors <= steps * (0.5 + 2 * most * eps + 1e-5)).all()
        assert np.corrcoef(values.ravel(), arrays[f"{name}.weight"].ravel())[0, 1] > 0.95
