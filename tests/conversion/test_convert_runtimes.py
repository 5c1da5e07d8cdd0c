"""``--for candle`` and ``--for mlx``: what these need beside safetensors, and that they compute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from conversions import quiet, tensors_of
from gguf_files import small_model
from make_checkpoint import make_checkpoint, shape_of_size

from streamload.conversion.plan import RUNTIMES
from streamload.core.dtypes import BF16

LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
PROMPTS = ("streamload loads", "The budget is", "a tensor of")


def source(folder: Path, **config: Any) -> Path:
    """A Llama-shaped checkpoint whose config.json says these things."""
    make_checkpoint(folder, shape_of_size(200_000, BF16))
    said = json.loads((folder / "config.json").read_text())
    said = {k: v for k, v in (said | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def said(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", RUNTIMES)
def test_floats_become_halves(tmp_path: Path, name: str) -> None:
    """Unless another dtype is asked for; a note says so."""
    path = source(tmp_path / "in")
    report = quiet(path, tmp_path / "out", runtime=name)
    assert {dtype.name for dtype, _, _ in tensors_of(tmp_path / "out").values()} == {"float16"}
    assert said(tmp_path / "out")["torch_dtype"] == "float16"
    assert f"for {name}, floats become float16" in str(report)
    report = quiet(path, tmp_path / "kept", runtime=name, dtype="checkpoint")
    assert {dtype.name for dtype, _, _ in tensors_of(tmp_path / "kept").values()} == {"bfloat16"}
    assert "floats become" not in str(report)


@pytest.mark.parametrize("name", RUNTIMES)
def test_config_json_says_what_readers_look_for(tmp_path: Path, name: str) -> None:
    rope = {"rope_theta": 5e5, **LLAMA3}
    path = source(tmp_path / "in", rope_theta=None, rope_parameters=rope, tie_word_embeddings=None)
    report = quiet(path, tmp_path / "out", runtime=name)
    config = said(tmp_path / "out")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == LLAMA3
    assert config["rope_parameters"] == rope
    assert config["tie_word_embeddings"] is False
    for key in ("rope_theta", "rope_scaling", "tie_word_embeddings"):
        assert f"for {name}, config.json says {key} itself" in report.plan.notes


def test_what_is_said_already_stays(tmp_path: Path) -> None:
    """A rope_theta at the top, and a default rope without scaling."""
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    path = source(tmp_path / "in", rope_theta=1e4, rope_parameters=rope)
    report = quiet(path, tmp_path / "out", runtime="candle", dtype="checkpoint")
    assert said(tmp_path / "out") == said(path)
    assert report.plan.notes == ()


def test_a_model_inside_another_one(tmp_path: Path) -> None:
    """The configuration of its text has the keys, too."""
    text = {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}, "dtype": "bfloat16"}
    path = source(tmp_path / "in", text_config=text)
    report = quiet(path, tmp_path / "out", runtime="mlx")
    assert "for mlx, config.json says rope_theta in text_config itself" in report.plan.notes
    found = said(tmp_path / "out")["text_config"]
    assert found == {**text, "dtype": "float16", "rope_theta": 7.0}


def test_rope_of_kinds_of_layers(tmp_path: Path) -> None:
    """Gemma 3's as transformers 5 has it: mlx-lm and candle know it by three keys."""
    linear = {"factor": 8.0, "rope_theta": 1e6, "rope_type": "linear"}
    local = {"rope_theta": 1e4, "rope_type": "default"}
    rope = {"full_attention": linear, "sliding_attention": local}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    path = source(tmp_path / "in", rope_theta=None, rope_parameters=rope, layer_types=kinds)
    quiet(path, tmp_path / "out", runtime="mlx")
    found = said(tmp_path / "out")
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)
    assert found["rope_scaling"] == {"factor": 8.0, "rope_type": "linear"}
    assert found["sliding_window_pattern"] == 2


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    """Without one among the tensors, config.json says that they are tied."""
    path = source(tmp_path / "in", tie_word_embeddings=None)
    quiet(path, tmp_path / "out", runtime="mlx", exclude="lm_head.weight")
    assert said(tmp_path / "out")["tie_word_embeddings"] is True


def test_what_is_refused(tmp_path: Path) -> None:
    """Other formats, quantised weights and unknown names."""
    path = source(tmp_path / "in")
    for options, message in (
        ({"runtime": "candel"}, "runtime is one of candle, mlx, .*did you mean 'candle'"),
        ({"runtime": "mlx", "to": "llm.c"}, "mlx reads safetensors, not llm.c"),
        ({"runtime": "mlx", "quant": "nf4"}, "mlx reads no weights that are quantised here"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(path, tmp_path / "out", **options)


def test_it_is_continued_for_the_same_runtime_only(tmp_path: Path) -> None:
    path = source(tmp_path / "in")
    quiet(path, tmp_path / "out", runtime="candle")
    assert quiet(path, tmp_path / "out", runtime="candle", resume=True).read_nbytes == 0
    with pytest.raises(ValueError, match="not of this source and these options"):
        quiet(path, tmp_path / "out", runtime="mlx", resume=True)


# --- the runtimes ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with Llama 3's rope, trained on the README, as transformers saves it."""
    torch, transformers = needs.module("torch"), needs.module("transformers")
    tokenizers = needs.module("tokenizers")
    text = (Path(__file__).parents[2] / "README.md").read_text()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    inner.train_from_iterator([text], trainer)
    config = transformers.LlamaConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 50000.0, **LLAMA3},
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.tensor(inner.encode(text).ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        starts = torch.randint(0, len(ids) - 65, (8,))
        batch = torch.stack([ids[i : i + 64] for i in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    folder = tmp_path_factory.mktemp("trained")
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def expected(folder: Path, prompt: str, count: int) -> tuple[list[int], str]:
    torch, transformers = needs.module("torch"), needs.module("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=count, do_sample=False)[0][ids.shape[1] :]
    return out.tolist(), tokenizer.decode(out)


# The runner keeps threads of its own: it ends with its process.
_MISTRAL = """
import json, sys
from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which
folder, count, *prompts = sys.argv[1:]
which = Which.Plain(model_id=folder, arch=Architecture.Llama, dtype=ModelDType.F32)
runner = Runner(which=which)
for prompt in prompts:
    request = CompletionRequest(
        prompt=prompt, model="default", max_tokens=int(count), temperature=0.0, top_k=1
    )
    print("said", json.dumps(runner.send_completion_request(request).choices[0].text), flush=True)
"""


def of_mistral(folder: Path, count: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", _MISTRAL, str(folder), str(count), *PROMPTS]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_candle_computes_the_same(trained: Path, tmp_path: Path) -> None:
    """mistralrs (candle inside) says in float32 what transformers says; before, it refused."""
    needs.runtime("mistralrs")
    refused = of_mistral(trained, 1)
    assert refused.returncode and "missing field `rope_theta`" in refused.stderr
    quiet(trained, tmp_path / "out", runtime="candle", max_shard_size="100kB")
    done = of_mistral(tmp_path / "out", 12)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    found = [json.loads(line.removeprefix("said ")) for line in lines]
    assert found == [expected(tmp_path / "out", prompt, 12)[1] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "qwen3moe", "stablelm"])
def test_mlx_computes_what_has_other_settings(tmp_path: Path, family: str) -> None:
    """Of what transformers saved it takes another rope, or opens nothing."""
    utils, mx = needs.runtime("mlx_lm.utils"), needs.runtime("mlx.core")
    torch, model = needs.module("torch"), small_model(family)
    model.save_pretrained(tmp_path / "in")
    options: dict[str, Any] = {"runtime": "mlx", "dtype": "float32"}
    if family == "gpt2":
        with pytest.raises(
            ValueError, match=r'mlx-lm has the names of GPT-2 without "transformer\."'
        ):
            quiet(tmp_path / "in", tmp_path / "none", **options)
        options["rename"] = lambda name: name.removeprefix("transformer.")
    quiet(tmp_path / "in", tmp_path / "out", **options)
    ids = list(range(3, 35))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    loaded, _ = utils.load_model(tmp_path / "out")
    found = np.array(loaded(mx.array([ids])).astype(mx.float32))[0]
    assert np.abs(found - theirs).max() < 1e-4


@pytest.mark.slow
def test_mlx_computes_the_same(trained: Path, tmp_path: Path) -> None:
    utils, mx = needs.runtime("mlx_lm.utils"), needs.runtime("mlx.core")
    torch, transformers = needs.module("torch"), needs.module("transformers")
    quiet(trained, tmp_path / "out", runtime="mlx", dtype="float32", max_shard_size="100kB")
    ids = list(range(100, 164))
    model = transformers.LlamaForCausalLM.from_pretrained(trained, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    errors = []
    for folder in (trained, tmp_path / "out"):
        loaded, _ = utils.load_model(folder)
        logits = np.array(loaded(mx.array([ids])).astype(mx.float32))[0]
        errors.append(float(np.abs(logits - theirs).max()))
    assert errors[1] < 1e-3 < 0.1 < errors[0], errors
