"""Vocabularies that tests train, and text of all kinds to cut with them."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from streamload.formats.gguf.vocabulary import PRE_TOKENIZERS, SPACE

SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>")
_TEXT = """
the weights of a model stream through one cast it's we'll they've I'M DON'T HTTP/1.1 12345678
3.14159 2026-11-22 für Größe naïve café Ελληνικά русский язык עברית العربية हिन्दी 中文字符 日本語
한국어 ไทย 😀 👩\u200d👩\u200d👧 ½ ² Ⅷ ٣٤ ﬁ a\u200bb _under score_ CamelCase x+=1; {'a': [0]}
naïveté e\u0301 … — “quoted” $100 50% #tag @name <html> </p> \\n ~/path a1b2c3
"""
_WORDS = _TEXT.split()
_SPACES = (" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n", "\n ", "      ", "")


@cache
def texts(special: tuple[str, ...] = SPECIAL) -> tuple[str, ...]:
    """200 strings: words of many scripts, digits, runs of spaces, special tokens."""
    chosen = random.Random(18)
    out = ["a", " ", "  a", "a  ", "\n", "1", "12", "1234", "'s", "Hello world", "x" * 40]
    out += [f"{token}a" for token in special] + [
        f"a {token} b{token}{token}\n" for token in special
    ]
    while len(out) < 200:
        pieces = []
        for _ in range(chosen.randint(1, 12)):
            pieces.append(chosen.choice(_WORDS))
            pieces.append(chosen.choice(_SPACES))
            if chosen.random() < 0.08:
                pieces.append(chosen.choice(special))
        out.append("".join(pieces))
    return tuple(text for text in out if text)


def _corpus() -> list[str]:
    source = Path(__file__).parents[1]
    code = [p.read_text() for p in sorted(source.rglob("test_m*.py"))]
    return [*code, *(text for _ in range(3) for text in texts(("",)))]


@cache
def _trained(pre: str, size: int) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "gpt-2")
    tokenizer.pre_tokenizer = byte_level
    if pre != "gpt-2":
        regexes = map(Regex, PRE_TOKENIZERS[pre])
        splits = [pre_tokenizers.Split(regex, "isolated") for regex in regexes]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_tokens(["<think>"])
    return str(tokenizer.to_str())


def byte_level(pre: str, size: int = 800, *, bos: bool = False) -> dict[str, Any]:
    """tokenizer.json of a trained byte-level BPE with one token more, which is not special."""
    made: dict[str, Any] = json.loads(_trained(pre, size))
    if bos:
        made["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": SPECIAL[0], "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {SPECIAL[0]: {"id": SPECIAL[0], "ids": [0], "tokens": [SPECIAL[0]]}},
        }
    return made


@cache
def sentencepiece_metadata(size: int = 1200) -> dict[str, Any]:
    """GGUF's keys of a vocabulary as SentencePiece trains it: tokens by score, and bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "always", True)
    tokenizer.train_from_iterator(
        _corpus(), trainers.BpeTrainer(vocab_size=size - 259, show_progress=False)
    )
    learned = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(pair) for pair in learned["merges"]]
    runs = [SPACE * n for n in range(2, 9)]
    ordered = [*dict.fromkeys([*merged, *runs]), *(t for t in learned["vocab"] if len(t) == 1)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *ordered]
    types = [2, 3, 3] + [6] * 256 + [1] * len(ordered)
    scores = [0.0] * 259 + [-float(i) for i in range(len(ordered))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
