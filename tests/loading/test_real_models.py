"""Real models: what comes out of them, against the same file read by torch and transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from parameters import product

import streamload

DTYPES = {"float16": ("50MB", 0.999), "float32": ("100MB", 0.99999)}


def _sentences(count: int) -> list[str]:
    who = ("A man", "My old neighbour", "The committee", "Nobody in the village", "Her sister")
    does = ("repairs", "has forgotten", "paints", "is selling", "would never touch", "praises")
    what = ("a bicycle", "the broken radio", "eleven violins", "our roof", "the annual report")
    when = ("in winter", "after the flood of 1953", "every other Tuesday", "for no clear reason")
    more = ("", ", and this surprised everyone who had been waiting outside since early morning")
    words = itertools.product(more, who, when, does, what)
    # strides through the product, so that the first hundred have both lengths
    chosen = [f"{w} {d} {o} {t}{m}." for m, w, t, d, o in words]
    return [chosen[i * 7 % len(chosen)] for i in range(count)]


@pytest.fixture(scope="session")
def reference(minilm: Path) -> Any:
    """Embeds sentences with transformers' BERT on torch, in float32, from the same file."""
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    tokenizer = needs.module("tokenizers").Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()
    model = transformers.AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()

    def embed(sentences: Sequence[str]) -> np.ndarray[Any, Any]:
        encoded = tokenizer.encode_batch(list(sentences))
        ids = torch.tensor([e.ids for e in encoded])
        mask = torch.tensor([e.attention_mask for e in encoded])
        with torch.no_grad():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].float()
        mean = (hidden * weights).sum(1) / weights.sum(1)
        found: np.ndarray[Any, Any] = torch.nn.functional.normalize(mean).numpy()
        return found

    return embed


def _loaded_bert(minilm: Path, device: str, dtype: str) -> tuple[Any, Any]:
    needs.device(device)
    bert = needs.module("bert")
    model = bert.Bert(json.loads((minilm / "config.json").read_text()))
    report = streamload.load_state_dict(
        model, minilm, budget=DTYPES[dtype][0], device=device, dtype=dtype
    )
    assert report.held_nbytes[device] <= report.plan.devices[0].budget_nbytes
    assert model.embeddings.word_embeddings.weight.device == device
    assert model.embeddings.word_embeddings.weight.dtype.name == {"float16": "half"}.get(
        dtype, "float"
    )
    tokenizer = needs.module("tokenizers").Tokenizer.from_file(str(minilm / "tokenizer.json"))
    return model, tokenizer


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        pytest.param("float16", "CL", marks=pytest.mark.slow),
        # each takes half a minute of a compiler
        pytest.param("float32", "CPU", marks=pytest.mark.slow),
        pytest.param("float32", "CL", marks=pytest.mark.slow),
        pytest.param("float16", "CPU", marks=pytest.mark.slow),
    ],
)
def test_sentence_embeddings(device: str, dtype: str, minilm: Path, reference: Any) -> None:
    """all-MiniLM-L6-v2, streamed into tinygrad, embeds 100 sentences as torch does."""
    model, tokenizer = _loaded_bert(minilm, device, dtype)
    sentences = _sentences(100)
    found = needs.module("bert").embed(model, tokenizer, sentences, batch=50)
    cosine = (found * reference(sentences)).sum(1)
    assert cosine.min() >= DTYPES[dtype][1]


@pytest.mark.slow
def test_a_thousand_sentences_in_batches(minilm: Path, reference: Any) -> None:
    """1,000 sentences in batches of 50 are embedded as torch embeds them."""
    model, tokenizer = _loaded_bert(minilm, "CPU", "float16")
    sentences = _sentences(1000)
    assert len(set(sentences)) == 1000
    found = needs.module("bert").embed(model, tokenizer, sentences, batch=50)
    expected = np.concatenate([reference(sentences[i : i + 50]) for i in range(0, 1000, 50)])
    assert (found * expected).sum(1).min() >= DTYPES["float16"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tied"),
    product(
        ["float16", "float32"],
        [False, True],
        fast=lambda dtype, tied: dtype == "float16" and not tied,
    ),
)
def test_llama_by_transformers(dtype: str, tied: bool, tmp_path: Path) -> None:
    """A Llama saved by transformers gives the same logits through ``mapping="hf-llama"``.

    Query heads share key heads, so that both row permutations count. The weights are rounded to
    the dtype before they are saved: what is left is the noise of float32 arithmetic.
    """
    needs.device("CPU")
    torch = needs.module("torch")
    transformers = needs.module("transformers")
    llama = needs.module("llama")
    from tinygrad import Tensor

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    expected_model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in expected_model.parameters():
            # larger than at the start of a training: attention that tells positions apart
            weight.copy_(weight * 5 if weight.ndim > 1 else 1 + torch.randn_like(weight) / 4)
            weight.copy_(weight.to(getattr(torch, dtype)))
    expected_model.save_pretrained(tmp_path, max_shard_size="100KB")

    model = llama.Llama(json.loads((tmp_path / "config.json").read_text()))
    streamload.load_state_dict(
        model, tmp_path, budget="1MB", dtype=dtype, device="CPU", mapping="hf-llama"
    )
    tokens = np.random.default_rng(0).integers(0, 97, (2, 40))
    with torch.no_grad():
        expected = expected_model(torch.tensor(tokens)).logits.numpy()
    found = model(Tensor(tokens.astype(np.int32), device="CPU")).numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-4)
