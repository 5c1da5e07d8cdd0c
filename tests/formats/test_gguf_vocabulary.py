from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from vocabularies import SPECIAL, byte_level, sentencepiece_metadata, texts

from streamload.errors import CheckpointError
from streamload.formats.gguf.vocabulary import PRE_TOKENIZERS, TokenType, from_gguf
from streamload.formats.gguf.vocabulary_out import no_vocabulary, parse_tokenizer, to_gguf

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

_END = {"__type": "AddedToken", "content": SPECIAL[1], "special": True}
SETTINGS = {"bos_token": SPECIAL[0], "eos_token": _END, "chat_template": "{{x}}"}
NAME = "m/tokenizer.json"


def _written(tokenizer: dict[str, Any], **settings: Any) -> dict[str, Any]:
    metadata, notes = to_gguf(NAME, tokenizer, {**SETTINGS, **settings}, {}, _rows(tokenizer))
    assert [note for note in notes if "combining marks" not in note] == []
    return {"general.architecture": "llama", "llama.context_length": 64, **metadata}


def _rows(tokenizer: dict[str, Any]) -> int:
    ids = [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    return max(ids) + 1


def _saved(folder: Path, tokenizer: dict[str, Any], **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return transformers.AutoTokenizer.from_pretrained(folder)


def _check_same(source: Any, back: Any, samples: tuple[str, ...]) -> None:
    assert len(samples) >= 200
    for text in samples:
        ids = source.encode(text)
        assert back.encode(text) == ids, text
        assert back.decode(ids) == source.decode(ids), text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@pytest.mark.parametrize("bos", [False, True])
def test_byte_level_there_and_back(pre: str, bos: bool, tmp_path: Path) -> None:
    tokenizer = byte_level(pre, bos=bos)
    metadata = _written(tokenizer)
    assert metadata["tokenizer.ggml.pre"] == pre
    assert metadata["tokenizer.ggml.add_bos_token"] is bos
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    assert metadata["tokenizer.ggml.bos_token_id"] == 0
    assert metadata["tokenizer.ggml.eos_token_id"] == 1
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:3].tolist() == [TokenType.CONTROL] * 3
    assert types[-1] == TokenType.USER_DEFINED
    files = from_gguf("x.gguf", metadata)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source = _saved(tmp_path / "a", tokenizer, **SETTINGS)
    back = _saved(tmp_path / "b", files["tokenizer.json"], **files["tokenizer_config.json"])
    assert (back.bos_token, back.eos_token) == SPECIAL[:2]
    assert back.chat_template == "{{x}}"
    assert back.model_max_length == 64
    _check_same(source, back, (*texts(), "a<think>b", "<think> <think>"))
    again = _written(files["tokenizer.json"], **files["tokenizer_config.json"])
    assert again.keys() == metadata.keys()
    for key, value in metadata.items():
        assert np.array_equal(again[key], value), key


def test_stablelm_cuts_as_qwen_does_without_nfc() -> None:
    """llama.cpp has one regex for both; only Qwen's tokenizers normalise."""
    metadata = _written(byte_level("qwen2"))
    found = from_gguf("x", metadata | {"tokenizer.ggml.pre": "stablelm2"})["tokenizer.json"]
    qwen = from_gguf("x", metadata)["tokenizer.json"]
    assert found["normalizer"] is None
    assert found == qwen | {"normalizer": None}
    assert qwen["normalizer"] == {"type": "NFC"}


@pytest.mark.parametrize("text", ["a b", " a  b", "\n\n x", "caf\u00e9 \u4f60"])
def test_gemma_puts_no_space_before_text(text: str, tmp_path: Path) -> None:
    """Its vocabulary is SentencePiece's with add_space_prefix false, and comes back as the text."""
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    files = from_gguf("x.gguf", metadata | {"general.architecture": "gemma2"})
    tokenizer = _saved(tmp_path, files["tokenizer.json"], **files["tokenizer_config.json"])
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text
    with_space = from_gguf("x.gguf", sentencepiece_metadata())
    (tmp_path / "b").mkdir()
    other = _saved(tmp_path / "b", with_space["tokenizer.json"])
    assert (other.tokenize(text) == tokenizer.tokenize(text)) is False


def test_sentencepiece_there_and_back(tmp_path: Path) -> None:
    """Scores become merges and scores again, and both cut 200 texts the same."""
    metadata = sentencepiece_metadata()
    samples = texts(("<s>", "</s>"))
    files = from_gguf("x.gguf", metadata)
    back = _written(files["tokenizer.json"], **files["tokenizer_config.json"], chat_template=None)
    assert back["tokenizer.ggml.model"] == "llama"
    for key in ("tokens", "token_type", "bos_token_id", "eos_token_id", "unknown_token_id"):
        key = f"tokenizer.ggml.{key}"
        assert np.array_equal(back[key], metadata[key]), key
    assert back["tokenizer.ggml.add_bos_token"] is True
    assert back["tokenizer.ggml.add_space_prefix"] is True
    # only the order of scores means anything, and only that of tokens that merges make
    long = [i for i, token in enumerate(metadata["tokenizer.ggml.tokens"]) if i > 258 < len(token)]
    scores = [found["tokenizer.ggml.scores"][long] for found in (metadata, back)]
    assert np.array_equal(np.argsort(scores[0]), np.argsort(scores[1]))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    source = _saved(tmp_path / "a", files["tokenizer.json"], **files["tokenizer_config.json"])
    again = from_gguf("x.gguf", back)
    second = _saved(tmp_path / "b", again["tokenizer.json"], **again["tokenizer_config.json"])
    assert source.encode("<0x0A>\n")[0] == 1
    assert source.encode(samples[0])[0] == 1
    _check_same(source, second, samples)


@pytest.mark.slow
def test_a_vocabulary_of_sentencepiece_itself(tmp_path: Path) -> None:
    """What transformers makes of its model becomes scores that cut text as it does."""
    pieces = needs.runtime("sentencepiece")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    samples = texts(("",))
    (tmp_path / "text").write_text("\n".join(text.replace("\n", " ") for text in samples))
    pieces.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    transformers.LlamaTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    tokenizer = parse_tokenizer((tmp_path / "tokenizer.json").read_bytes())
    metadata, (note,) = to_gguf(NAME, tokenizer, {}, {}, 700)
    assert "before a space" in note
    back = from_gguf("x", metadata)["tokenizer.json"]
    read = tokenizers.Tokenizer.from_str(json.dumps(back))
    model = pieces.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in samples:
        assert read.encode(text, add_special_tokens=False).ids == model.encode(text), text


def test_the_embedding_may_have_more_rows() -> None:
    """Rows without a token are filled; where there are fewer, the error says what to write."""
    tokenizer = byte_level("qwen2")
    rows = _rows(tokenizer)
    metadata, _ = to_gguf(NAME, tokenizer, SETTINGS, {}, rows + 5)
    assert metadata["tokenizer.ggml.tokens"][-1] == f"[PAD{rows + 4}]"
    assert metadata["tokenizer.ggml.token_type"][-5:].tolist() == [TokenType.UNUSED] * 5
    assert len(from_gguf("x", metadata)["tokenizer.json"]["model"]["vocab"]) == rows
    with pytest.raises(CheckpointError, match=r"resize_token_embeddings\(len\(tokenizer\)\)"):
        to_gguf(NAME, tokenizer, SETTINGS, {}, rows - 1)


def test_an_id_is_of_one_token() -> None:
    tokenizer = byte_level("qwen2")
    for content, number in (("new", 300), (SPECIAL[1], 900)):
        tokenizer["added_tokens"][0] |= {"content": content, "id": number}
        with pytest.raises(CheckpointError, match="two tokens have one id, or one has two"):
            to_gguf(NAME, tokenizer, SETTINGS, {}, 1000)


def test_special_tokens_are_found_where_they_are_said() -> None:
    """tokenizer_config.json first, then config.json; added_tokens_decoder and roles count."""
    tokenizer = byte_level("gpt-2")
    tokenizer["added_tokens"] = []
    settings = {"added_tokens_decoder": {"2": {"content": SPECIAL[2], "special": True}}}
    settings |= {"eos_token": SPECIAL[1], "add_eos_token": True, "bos_token": None}
    config = {"bos_token_id": 0, "eos_token_id": [5, 6], "pad_token_id": None}
    metadata, _ = to_gguf(NAME, tokenizer, settings, config, 900)
    assert metadata["tokenizer.ggml.bos_token_id"] == 0
    assert metadata["tokenizer.ggml.eos_token_id"] == 1
    assert "tokenizer.ggml.padding_token_id" not in metadata
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert metadata["tokenizer.ggml.add_eos_token"] is True
    types = metadata["tokenizer.ggml.token_type"]
    assert types[:3].tolist() == [TokenType.NORMAL, TokenType.CONTROL, TokenType.CONTROL]
    metadata, notes = to_gguf(NAME, tokenizer, {}, {"eos_token_id": [5, 6]}, 900)
    assert metadata["tokenizer.ggml.eos_token_id"] == 5
    assert not notes
    assert "eos_token in tokenizer_config.json" in to_gguf(NAME, tokenizer, {}, {}, 900)[1][0]


def test_several_chat_templates() -> None:
    """Each has a key, and its name in a list; all come back."""
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    metadata = _written(byte_level("qwen2"), chat_template=named)
    assert metadata["tokenizer.chat_template"] == "d"
    assert metadata["tokenizer.chat_templates"] == ["tool_use"]
    assert metadata["tokenizer.chat_template.tool_use"] == "t"
    assert from_gguf("x", metadata)["tokenizer_config.json"]["chat_template"] == named


@pytest.mark.parametrize("indent", [None, 2])
def test_merges_are_read_as_one_string_each(indent: int | None) -> None:
    """However the file is written, what it says is the same; other text may look like merges."""
    tokenizer = byte_level("qwen2")
    tokenizer["x"] = 'a "merges": [1'
    tokenizer["model"]["vocab"]["merges"] = 5000
    read = parse_tokenizer(json.dumps(tokenizer, indent=indent).encode())
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    assert read["model"].pop("merges") == merges
    assert read["model"].items() <= tokenizer["model"].items()
    assert read["x"] == tokenizer["x"]
    tokenizer["model"]["merges"] = merges
    assert parse_tokenizer(json.dumps(tokenizer, indent=indent).encode()) == tokenizer
    assert parse_tokenizer(b'{"model": {}}') == {"model": {}}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff", b'{"merges": [', b'{"merges": [1]}', b'{"merges": []}', b"[" * 200]
)
def test_what_is_no_tokenizer_is_not_read(raw: bytes) -> None:
    with pytest.raises(ValueError):
        parse_tokenizer(raw)


def _changed(pre: str = "qwen2", **parts: Any) -> dict[str, Any]:
    tokenizer = byte_level(pre)
    for key, value in parts.items():
        if key in ("model", "added"):
            tokenizer["model"] |= value
        else:
            tokenizer[key] = value
    return tokenizer


_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
REFUSED = {
    "regex": (
        _changed(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": r"\p{L}+"}, "behavior": "Isolated"},
                    _BYTES,
                ],
            }
        ),
        r"the regexes of gpt-2, llama-bpe, qwen2, .*.*without a vocabulary\), found \\p\{L\}\+",
    ),
    "digits": (
        _changed(pre_tokenizer={"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]}),
        "found Digits and ByteLevel",
    ),
    "none": (_changed(pre_tokenizer=None), "its pre-tokenizer is unknown"),
    "space": (_changed(pre_tokenizer={"type": "ByteLevel"}), "add_prefix_space false"),
    "lower": (_changed(normalizer={"type": "Lowercase"}), "found Lowercase"),
    "unigram": (_changed(model={"type": "Unigram"}), "expected BPE .*found Unigram"),
    "suffix": (_changed(model={"end_of_word_suffix": "</w>"}), "end_of_word_suffix"),
    "around": (
        _changed(post_processor={"type": "BertProcessing", "sep": ["a", 1], "cls": ["b", 2]}),
        "BertProcessing",
    ),
    "merges": (
        _changed("gpt-2", model={"ignore_merges": True, "merges": []}),
        "merges under its pre-tokenizer 'gpt-2'.* which no merges make",
    ),
    "bytes": (
        _changed(model={"byte_fallback": True}, normalizer=None, pre_tokenizer=None),
        "spaces as SentencePiece",
    ),
    "json": (
        {"model": {"type": "BPE", "vocab": {}}, "added_tokens": [1]},
        "is not the JSON of a tokenizer",
    ),
    "nothing": ({}, "is not the JSON of a tokenizer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_cut_otherwise_is_refused(case: str) -> None:
    """One clear error names the file, and says what is expected and found."""
    tokenizer, said = REFUSED[case]
    with pytest.raises(CheckpointError, match=said) as raised:
        to_gguf(NAME, tokenizer, {}, {}, 2000)
    assert raised.value.path == NAME
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize("where", ["split", "order", "byte"])
def test_merges_that_are_not_sentencepieces_are_refused(where: str) -> None:
    """A split that is missing, merges of one token apart, or no token for a byte."""
    tokenizer = from_gguf("x", sentencepiece_metadata())["tokenizer.json"]
    merges = tokenizer["model"]["merges"]
    if where == "split":
        del merges[next(i for i, (a, b) in enumerate(merges) if len(a + b) > 2)]
    elif where == "order":
        merges.append(merges.pop(next(i for i, (a, b) in enumerate(merges) if len(a + b) > 2)))
    else:
        del tokenizer["model"]["vocab"]["<0x0A>"]
    with pytest.raises(CheckpointError, match=r"SentencePiece|no <0x0A>"):
        to_gguf(NAME, tokenizer, {}, {}, 2000)


def test_words_that_are_tokens_without_merges_that_make_them() -> None:
    """What llama.cpp does under "llama-bpe" is no different where merges make every token."""
    tokenizer = byte_level("llama-bpe")
    tokenizer["model"]["ignore_merges"] = False
    assert _written(tokenizer)["tokenizer.ggml.pre"] == "llama-bpe"
    tokenizer["model"]["vocab"]["zqzq"] = len(tokenizer["model"]["vocab"]) + 1
    with pytest.raises(CheckpointError, match="the token 'zqzq', which no merges make"):
        _written(tokenizer)


def test_notes_where_llama_cpp_differs() -> None:
    """Spaces around special tokens, tokens in words, and Metaspace's first space, are told."""
    tokenizer = byte_level("qwen2")
    tokenizer["added_tokens"][0]["lstrip"] = True
    (note,) = to_gguf(NAME, tokenizer, SETTINGS, {}, 900)[1]
    assert repr(SPECIAL[0]) in note
    tokenizer["added_tokens"][0] |= {"lstrip": False, "single_word": True}
    (note,) = to_gguf(NAME, tokenizer, SETTINGS, {}, 900)[1]
    assert f"{SPECIAL[0]!r} out of words" in note
    (note,) = to_gguf(NAME, byte_level("gpt-4o"), SETTINGS, {}, 900)[1]
    assert "combining marks" in note
    tokenizer = from_gguf("x", sentencepiece_metadata())["tokenizer.json"]
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    tokenizer |= {"normalizer": None, "pre_tokenizer": space | {"split": False}}
    (note,) = to_gguf(NAME, tokenizer, {}, {}, 2000)[1]
    assert "special token" in note


_GPT2: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "rwkv", "gpt2 or llama, found rwkv"),
        ("model", 3, "a string"),
        ("pre", "tekken", "found tekken"),
        ("pre", "", "found none"),
        ("tokens", None, "an array of strings"),
        ("tokens", "ab", "an array of strings"),
        ("tokens", ["a", 3], "an array of strings"),
        ("tokens", ["a", "a", "b"], "different tokens"),
        ("token_type", np.ones(7, np.int32), "an array of 3 numbers"),
        ("token_type", ["a", "b", "c"], "an array of 3 numbers"),
        ("merges", ["ab"], "two tokens that make a third, found ab"),
        ("merges", ["b a"], "two tokens"),
        ("merges", None, "an array of strings"),
        ("bos_token_id", -1, "the number of a token"),
        ("bos_token_id", "a", "the number of a token"),
        ("add_bos_token", 1, "a bool"),
        ("model", "llama", "scores"),
    ],
)
def test_damaged_keys(key: str, value: Any, said: str) -> None:
    metadata = _GPT2 | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(CheckpointError, match=said) as raised:
        from_gguf("x.gguf", metadata)
    assert raised.value.path == "x.gguf"


def test_tokens_of_many_characters_are_refused() -> None:
    """Merges are made of every split: that is more than the file's size justifies."""
    metadata = dict(sentencepiece_metadata())
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"][:-1], "a" * 129]
    with pytest.raises(CheckpointError, match="at most 128 characters each, found 129"):
        from_gguf("x", metadata)


def test_no_vocabulary() -> None:
    """A file that says it has none has none."""
    metadata = no_vocabulary(32, "llama")
    assert metadata["llama.vocab_size"] == 32
    assert from_gguf("x", metadata) == {}


def test_special_tokens_outside_the_vocabulary_are_left_out() -> None:
    files = from_gguf("x", _GPT2 | {"tokenizer.ggml.bos_token_id": 7})
    assert "bos_token" not in files["tokenizer_config.json"]
    assert files["tokenizer.json"]["post_processor"] is None
