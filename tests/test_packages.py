"""Packages that build models of their own: one line each, and they compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
transformers = needs.module("transformers")

import safetensors.torch as st  # noqa: E402
import tokenizers  # noqa: E402
from test_transformers import assert_same, reference, saved  # noqa: E402

import streamload  # noqa: E402
from streamload.transformers import streamed  # noqa: E402

SENTENCES = ["a cat", "the cat sat on the mat", "on a mat"]


def with_tokenizer(folder: Path) -> Path:
    """A BERT's checkpoint, and words beside it."""
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
    """A model of sentence-transformers with a pooling and a dense module."""
    pytest.importorskip("sentence_transformers")
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
    """Auto classes and classes, with their own arguments; afterwards they are as they were."""
    folder = saved(tmp_path, "bert", torch.bfloat16)
    before = transformers.PreTrainedModel.__dict__["from_pretrained"]
    with streamed(budget="5MB", dtype="float32"):
        found = transformers.AutoModelForMaskedLM.from_pretrained(
            folder, torch_dtype=torch.float16, device_map="cpu", attn_implementation="eager"
        )
        with pytest.raises(ValueError, match="gguf_file has no counterpart"):
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
