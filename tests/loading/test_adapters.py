"""`adapters=`: LoRA merged on the way, rounded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import needs
import numpy as np
import pytest
from hub_server import Hub, hub
from lora_files import BASE, Array, adapter, assert_within_one_rounding, pair, random
from safetensors_files import write_arrays

import streamload
from streamload.core import patterns
from streamload.errors import CheckpointError

__all__ = ["hub"]


def load(path: Path, *adapters: Path | str, **options: Any) -> dict[str, Array]:
    given: dict[str, Any] = {"device": "host", "dtype": "checkpoint", "budget": "1GB"} | options
    report = streamload.load_state_dict(
        None, path, adapters=list(adapters), progress=False, **given
    )
    return report.state_dict


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("rslora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rounded_once_whatever_the_chunks_are(tmp_path: Path, dtype: Any, rslora: bool) -> None:
    """Within one rounding of float64; the same bytes for any chunks, readers and devices."""
    w, other = random(0, 300, 1000, dtype=dtype), random(1, 30, 10, dtype=dtype)
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"h.q.weight": w, "h.k.weight": other})
    factors = pair("h.q", 300, 1000)
    patterns = {"alpha_pattern": {"q": 3}} if rslora else {}
    folder = adapter(tmp_path / "lora", factors, use_rslora=rslora, **patterns)
    scale = 3 / 2 if rslora else 6 / 4
    a, b = (array.astype(np.float64) for array in factors.values())
    exact = w.astype(np.float64) + scale * (b @ a)
    found = load(path, folder)
    assert np.array_equal(found["h.k.weight"], other)
    assert_within_one_rounding(found["h.q.weight"], exact)
    again = [{"chunk_nbytes": 100}, {"chunk_nbytes": 20_000, "threads": 1}, {"reader": "pread"}]
    for options in (*again, {"device": "CL", "dtype": "float16"}):
        if options.get("dtype") == "float16" and dtype is not np.float16:
            continue
        one = load(path, folder, **options)["h.q.weight"]
        one = one if isinstance(one, np.ndarray) else one.numpy()
        assert one.tobytes() == found["h.q.weight"].tobytes(), options
    (_, q), (_, k) = sorted(
        streamload.iterate(path, device="host", dtype="checkpoint", adapters=[folder]),
        key=lambda step: -step[1].size,
    )
    assert q.tobytes() == found["h.q.weight"].tobytes()
    assert np.array_equal(k, other)


def test_merged_and_cast_is_rounded_once(tmp_path: Path) -> None:
    w = random(0, 20, 12, dtype=ml_dtypes.bfloat16)
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": w, "e.weight": w})
    first = adapter(tmp_path / "a", pair("m", 20, 12))
    embedded = {f"{BASE}e.lora_embedding_A": random(1, 4, 20)}
    embedded[f"{BASE}e.lora_embedding_B"] = random(2, 12, 4)
    second = adapter(tmp_path / "b", pair("m", 20, 12, seed=9) | embedded, lora_alpha=4)
    found = load(path, first, second, dtype="float32")
    deltas = [1.5 * b @ a for a, b in [pair("m", 20, 12).values()]]
    deltas += [b @ a for a, b in [pair("m", 20, 12, seed=9).values()]]
    expected = w.astype(np.float64) + sum(deltas)
    assert np.allclose(found["m.weight"], expected, rtol=1e-6, atol=1e-5)
    a, b = embedded.values()
    assert np.allclose(found["e.weight"], w.astype(np.float64) + (b @ a).T, rtol=1e-6, atol=1e-5)


def test_rows_that_a_family_permutes(tmp_path: Path) -> None:
    """The sum is of the checkpoint's rows, which take their places after it."""
    q = "model.layers.0.self_attn.q_proj"
    (tmp_path / "m").mkdir()
    write_arrays(tmp_path / "m" / "model.safetensors", {f"{q}.weight": random(0, 32, 8)})
    (tmp_path / "m" / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    folder = adapter(tmp_path / "a", pair(q, 32, 8))
    name = "layers.0.attention.wq.weight"
    for chunk_nbytes in (100, None):
        options: dict[str, Any] = {"mapping": "hf-llama", "chunk_nbytes": chunk_nbytes}
        merged = load(tmp_path / "m", folder)[f"{q}.weight"]
        found = load(tmp_path / "m", folder, **options)[name]
        expected = merged.reshape(4, 2, 4, 8).swapaxes(1, 2).reshape(32, 8)
        assert np.array_equal(found, expected)


def test_a_transposed_weight_and_another_prefix(tmp_path: Path) -> None:
    """Conv1D keeps its inputs along the first axis; a prefix may be there or not."""
    path = tmp_path / "model.safetensors"
    w = random(0, 12, 20)
    write_arrays(path, {"h.0.c.weight": w})
    factors = pair("transformer.h.0.c", 20, 12)
    found = load(path, adapter(tmp_path / "a", factors, fan_in_fan_out=True))["h.0.c.weight"]
    a, b = factors.values()
    assert np.allclose(found, w + 1.5 * (b @ a).T, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"something_new": True}, "something_new"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": None}, "only LoRA"),
    ],
)
def test_what_is_not_merged_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": random(0, 20, 12)})
    folder = adapter(tmp_path / "a", pair("m", 20, 12), **config)
    with pytest.raises(CheckpointError, match=named) as caught:
        load(path, folder)
    assert caught.value.path == str(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (pair("m", 20, 12) | {f"{BASE}m.lora_magnitude_vector": random(0, 20)}, "use_dora False"),
        (pair("n", 20, 12), "a tensor 'n.weight' there"),
        (pair("m", 20, 11), r"matrix of \[20, 12\]"),
        (pair("i", 20, 12), "floats of 16 bits"),
        ({f"{BASE}m.lora_A.weight": random(0, 4, 12)}, "lora_A and lora_B of 'm'"),
        (
            {f"{BASE}m.lora_A.weight": random(0, 4, 12, 1, 1)}
            | {f"{BASE}m.lora_B.weight": random(0, 20, 4, 1, 1)},
            "matrices",
        ),
    ],
)
def test_an_adapter_that_does_not_fit(
    tmp_path: Path, arrays: dict[str, Array], message: str
) -> None:
    """Named before anything is read of the checkpoint."""
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": random(0, 20, 12), "i.weight": np.zeros((20, 12), np.int8)})
    with pytest.raises(CheckpointError, match=message):
        load(path, adapter(tmp_path / "a", arrays))
    with pytest.raises(ValueError, match="list of paths"):
        streamload.load_state_dict(None, path, adapters="a", device="host")  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", ["", "adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("written", ["me/lora", "hf://me/lora/adapter_model.safetensors"])
def test_an_adapter_of_the_hub(hub: Hub, tmp_path: Path, cached: str, written: str) -> None:
    """Its configuration is looked for at the hub if the cache has the weights alone."""
    huggingface_hub = needs.module("huggingface_hub")
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": random(0, 20, 12)})
    folder = adapter(tmp_path / "a", pair("m", 20, 12))
    hub.add("me/lora", {each.name: each.read_bytes() for each in folder.iterdir()})
    if cached:
        huggingface_hub.hf_hub_download("me/lora", cached)
    assert np.array_equal(load(path, written)["m.weight"], load(path, folder)["m.weight"])


def test_errors_show_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": random(0, 20, 12)})
    for secret in ("https://me:se-cret@host/lora/", "https://host/lora/?signature=se-cret"):
        for given in (secret, [(secret, "1")], [[secret]], [(1.0, secret)]):
            with pytest.raises(ValueError, match="adapter") as caught:
                streamload.load_state_dict(None, path, adapters=given, device="host")  # type: ignore[arg-type]
            assert "se-cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"modules_to_save": 7}, "modules_to_save"),
        ({"modules_to_save": "lm_head"}, "modules_to_save"),
        ({"modules_to_save": [7]}, "modules_to_save"),
        ({"alpha_pattern": 7}, "alpha_pattern"),
        ({"alpha_pattern": ["m"]}, "alpha_pattern"),
        ({"alpha_pattern": {"m": "7"}}, "alpha_pattern"),
        ({"alpha_pattern": {"x": None}}, "alpha_pattern"),
        ({"alpha_pattern": {"(": 7}}, "alpha_pattern"),
        ({"alpha_pattern": {"m{9999999999999}": 7}}, "alpha_pattern"),
        ({"alpha_pattern": {"(" * 9000 + ")" * 9000: 7}}, "alpha_pattern"),
        ({"rank_pattern": True}, "rank_pattern"),
        ({"rank_pattern": {"m": [4]}}, "rank_pattern"),
        ({"lora_alpha": "6"}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"lora_alpha": 10**19, "r": True}, "r is invalid"),
        ({"r": "4"}, "r is invalid"),
        ({"trainable_token_indices": 7}, "trainable_token_indices"),
        ({"trainable_token_indices": {"e": [10**19, None]}}, "trainable_token_indices"),
    ],
)
def test_a_configuration_of_other_types_is_one_error(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    path = tmp_path / "model.safetensors"
    write_arrays(path, {"m.weight": random(0, 20, 12), "e.weight": random(0, 20, 12)})
    tokens = {f"{BASE}e.token_adapter.trainable_tokens_delta": random(1, 2, 12)}
    arrays = pair("m", 20, 12) | (tokens if "trainable_token_indices" in config else {})
    folder = adapter(tmp_path / "a", arrays, **config)
    with pytest.raises(CheckpointError, match=named) as caught:
        load(path, folder)
    assert str(folder) in str(caught.value)
    with pytest.raises(ValueError, match="expected the path"):
        load(path, (folder, 10**400))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern"])
def test_a_regex_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """One that takes exponential time, and more patterns than can be matched."""
    path, module = tmp_path / "model.safetensors", "a" * 40
    write_arrays(path, {f"{module}.weight": random(0, 20, 12)})
    monkeypatch.setattr(patterns, "_MOST_SECONDS", 1.0)
    for number, regexes in enumerate((["(a+)+b"], [f"{'.' * 200}{i}" for i in range(100_000)])):
        pattern = dict.fromkeys(regexes, 4)
        folder = adapter(tmp_path / f"{number}", pair(module, 20, 12), **{key: pattern})
        with pytest.raises(CheckpointError, match=f"{key} is invalid") as caught:
            load(path, folder)
        assert f"{len(regexes)} patterns" in str(caught.value.found)


_NAMES = ["q", "l.q", "l.0.q", "l.10.q_proj", "model.layers.3.mlp.down_proj", "l.0.aq", "l.0.q\n"]
_REGEXES = (
    *("q", "^q", "^l.0.q", "0.q", "l..*", "q$", "^", "", r"\d+\.q(_proj)?", "a?q", "(?i:Q)"),
    *(r"l\.0\.q", "q|l", "layers.[0-9].mlp.*", "(?=l)l.+", "(?!l)q", "mlp.down_proj", "x"),
)


@pytest.mark.slow
def test_patterns_match_as_those_of_peft() -> None:
    """Plain ones, which are matched here, and regular expressions; the first that fits counts."""
    theirs = needs.module("peft.utils.other", needed=False).get_pattern_key
    given = [[regex] for regex in _REGEXES] + [list(_REGEXES), list(reversed(_REGEXES))]
    for regexes in given:
        found = patterns.ending_in(regexes, _NAMES)
        expected = [theirs(regexes, name) for name in _NAMES]
        assert [f if f is not None else n for f, n in zip(found, _NAMES, strict=True)] == expected


def test_the_rank_of_factors_is_that_of_the_configuration(tmp_path: Path) -> None:
    """The scale is alpha by rank: rank 8 under ``r: 2`` is refused; ``rank_pattern`` may say 8."""
    path = tmp_path / "model.safetensors"
    w = random(0, 20, 12)
    write_arrays(path, {"h.m.weight": w})
    factors = pair("h.m", 20, 12, rank=8)
    with pytest.raises(CheckpointError, match="another rank") as caught:
        load(path, adapter(tmp_path / "a", factors, r=2))
    assert (caught.value.tensor, caught.value.expected) == (f"{BASE}h.m.lora_A.weight", "rank 2")
    assert '"r": 8, or "rank_pattern": {"h.m": 8}' in str(caught.value)
    a, b = factors.values()
    for config in ({"r": 8}, {"r": 2, "rank_pattern": {"h.m": 8}}, {"rank_pattern": {"m": 8}}):
        found = load(path, adapter(tmp_path / "a", factors, lora_alpha=8, **config))["h.m.weight"]
        assert np.allclose(found, w + b @ a, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "dora"])
def test_adapters_of_peft(tmp_path: Path, kind: str) -> None:
    """What peft saves: as near to float64 as peft's own merge or nearer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = needs.runtime("peft")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **sizes)
        make, targets = transformers.GPT2LMHeadModel, ["c_attn"]
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(num_attention_heads=4, **sizes)
        make, targets = transformers.LlamaForCausalLM, ["q_proj", "down_proj", "embed_tokens"]
    make(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    base = make.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    extra = {"use_dora": True} if kind == "dora" else {}
    if kind == "dora":
        targets = targets[:1]
    lora = peft.LoraConfig(
        r=4, lora_alpha=7, target_modules=targets, fan_in_fan_out=kind == "gpt2", **extra
    )
    wrapped = peft.get_peft_model(base, lora)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(tmp_path / "lora", save_embedding_layers=False)
    model = make(config).to(torch.bfloat16)
    arguments: dict[str, Any] = {"adapters": [tmp_path / "lora"], "progress": False}
    streamload.load_state_dict(model, tmp_path / "base", strict=False, **arguments)
    exact = make.from_pretrained(tmp_path / "base", dtype=torch.float64)
    exact = peft.PeftModel.from_pretrained(exact, tmp_path / "lora").merge_and_unload()
    theirs, ours = wrapped.merge_and_unload().state_dict(), model.state_dict()
    away = {"ours": 0.0, "theirs": 0.0}
    for name, wanted in exact.state_dict().items():
        found = ours[name].view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        assert_within_one_rounding(found, wanted.numpy())
        away["ours"] += float((ours[name].double() - wanted).abs().sum())
        away["theirs"] += float((theirs[name].double() - wanted).abs().sum())
    assert 0 < away["ours"] <= away["theirs"]
