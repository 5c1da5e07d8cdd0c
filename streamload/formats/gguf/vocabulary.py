"""Converts a model's vocabulary from GGUF's ``tokenizer.ggml.*`` to tokenizer.json.

Sources: "GGUF" in the documentation of ggml (keys and token types); llama.cpp's
``src/llama-vocab.cpp`` (the regexes behind ``tokenizer.ggml.pre``, the defaults of missing keys,
and the order in which its tokenizers merge); the JSON that Hugging Face's `tokenizers` 0.23 reads.

Two kinds of vocabularies are read: byte-level BPE (``gpt2``) under the pre-tokenizers in
`PRE_TOKENIZERS`, and the BPE of SentencePiece with byte fallback (``llama``: Llama 2, Mistral 7B,
Phi-3, Gemma). `streamload.formats.gguf.vocabulary_out` is the inverse.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from enum import IntEnum
from os import PathLike
from typing import Any, TypeAlias

import numpy as np

from streamload.errors import CheckpointError

Path: TypeAlias = str | PathLike[str]
#: The content of a JSON file, or the metadata of GGUF.
Document: TypeAlias = Mapping[str, Any]

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}"
_CASED += rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
#: The regexes that cut text into words, one after the other, by llama.cpp's names.
PRE_TOKENIZERS = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}",),
    "qwen2": (rf"{_LETTERS}\p{{N}}{_REST}",),
    "gpt-4o": (rf"{_CASED}\p{{N}}{{1,3}}{_REST.replace('n]*', 'n/]*', 1)}",),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
}
#: The pre-tokenizer under which llama.cpp does not merge words that are tokens themselves.
WHOLE_WORDS = "llama-bpe"
#: SentencePiece's character for a space.
SPACE = "\u2581"
#: Tokens of one byte each in SentencePiece's vocabularies.
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Roles of special tokens: GGUF's name by that in tokenizer_config.json.
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_ALIASES |= {"stablelm2": "qwen2", "llama4": "gpt-4o"}
# SentencePiece's own limit is 16. The merges of a token take its length squared.
_MOST_CHARACTERS = 128


class TokenType(IntEnum):
    """The kinds of tokens in GGUF's ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def missing_byte(tokens: Container[str]) -> str | None:
    """Return the name of the first byte that has no token ("<0x00>" on), or None."""
    names = (f"<0x{byte:02X}>" for byte in range(256))
    return next((name for name in names if name not in tokens), None)


def from_gguf(path: Path, metadata: Document) -> dict[str, dict[str, Any]]:
    """Return the files of a tokenizer for transformers, parsed JSON by name; {} for none."""
    read = _Reader(path, metadata)
    model = read.text("model")
    if model in ("no_vocab", "none"):
        return {}
    if model == "gpt2":
        tokenizer = _byte_level_json(read)
    elif model == "llama":
        tokenizer = _sentencepiece_json(read)
    else:
        raise read.invalid("model", "gpt2 or llama", model)
    special = {
        name: number
        for name, key in SPECIAL.items()
        if (number := read.number(f"{key}_token_id")) is not None
    }
    if model == "llama":  # llama.cpp's own default
        special = {"bos": 1, "eos": 2, "unk": 0} | special
    special = {name: number for name, number in special.items() if number < len(read.tokens)}
    adds = {
        "bos": read.flag("add_bos_token", model == "llama" or read.pre == WHOLE_WORDS),
        "eos": read.flag("add_eos_token", False),
    }
    around = {name: special[name] for name, added in adds.items() if added and name in special}
    tokenizer["post_processor"] = _template(
        {name: (read.tokens[number], number) for name, number in around.items()}
    )
    settings: dict[str, Any] = {
        # a model's own class would build another tokenizer of the same tokens
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": read.tokens[number] for name, number in special.items()},
    }
    template = metadata.get("tokenizer.chat_template")
    named = {
        key.removeprefix("tokenizer.chat_template."): text
        for key, text in metadata.items()
        if key.startswith("tokenizer.chat_template.") and isinstance(text, str)
    }
    if named:
        named = ({"default": template} if isinstance(template, str) else {}) | named
        settings["chat_template"] = [{"name": n, "template": text} for n, text in named.items()]
    elif isinstance(template, str):
        settings["chat_template"] = template
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(length, (int, np.integer)) and length > 0:
        settings["model_max_length"] = int(length)
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


class _Reader:
    """Reads the ``tokenizer.ggml`` keys of GGUF metadata, and checks each when it is read."""

    def __init__(self, path: Path, metadata: Document) -> None:
        self._path = path
        self._metadata = metadata
        self.tokens: list[str] = []
        self.types: list[int] = []
        self.used: dict[str, int] = {}  # ids by token, without tokens that only pad the embedding
        self.pre = ""

    def invalid(self, key: str, expected: object, found: object = None) -> CheckpointError:
        """Return the error for an invalid value of ``key``."""
        key = f"tokenizer.ggml.{key}"
        return CheckpointError(self._path, f"no tokenizer can be made of {key}", expected, found)

    def text(self, key: str) -> str:
        """Return the string at ``key``, "" without it; raise CheckpointError for another type."""
        found = self._metadata.get(f"tokenizer.ggml.{key}", "")
        if not isinstance(found, str):
            raise self.invalid(key, "a string", type(found).__name__)
        return found

    def number(self, key: str) -> int | None:
        """Return the token id at ``key``, None without it; raise CheckpointError if invalid."""
        found = self._metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (int, np.integer)) or found < 0:
            raise self.invalid(key, "the number of a token", found)
        return int(found)

    def flag(self, key: str, default: bool) -> bool:
        """Return the bool at ``key``, or ``default``; raise CheckpointError for another type."""
        found = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(found, (bool, np.bool_)):
            raise self.invalid(key, "a bool", type(found).__name__)
        return bool(found)

    def strings(self, key: str) -> list[str]:
        """Return the array of strings at ``key``; raise CheckpointError for anything else."""
        found = self._metadata.get(f"tokenizer.ggml.{key}")
        listed = list(found) if isinstance(found, Sequence) and not isinstance(found, str) else None
        if listed is None or not all(isinstance(each, str) for each in listed):
            raise self.invalid(key, "an array of strings", type(found).__name__)
        return listed

    def numbers(self, key: str) -> list[Any] | None:
        """Return the array at ``key`` with a finite number for each token; None without it."""
        found = self._metadata.get(f"tokenizer.ggml.{key}")
        if found is None:
            return None
        values = np.asarray(found)
        if values.shape != (len(self.tokens),) or values.dtype.kind not in "iuf":
            raise self.invalid(key, f"an array of {len(self.tokens)} numbers")
        if not np.isfinite(values).all():
            raise self.invalid(key, "finite numbers")
        listed: list[Any] = values.tolist()
        return listed

    def read_tokens(self) -> None:
        """Set `tokens`, `types` and `used`; raise CheckpointError if they are not valid."""
        self.tokens = self.strings("tokens")
        if len(set(self.tokens)) < len(self.tokens):
            raise self.invalid("tokens", "different tokens")
        self.types = self.numbers("token_type") or [TokenType.NORMAL] * len(self.tokens)
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        self.used = {t: i for i, (t, kind) in pairs if kind != TokenType.UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """Return tokenizer.json's ``added_tokens``: tokens that are found before text is split."""
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
        return [
            {"id": i, "content": token, **flags, "special": special[TokenType(kind)]}
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in special
        ]


def _json(read: _Reader, model: Document, **steps: Any) -> dict[str, Any]:
    """Return tokenizer.json with a BPE model of the settings ``model`` and processing ``steps``."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": read.added(),
        **steps,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": read.used,
            **model,
        },
    }


def _byte_level_json(read: _Reader) -> dict[str, Any]:
    """Return tokenizer.json for a byte-level BPE vocabulary (GGUF's "gpt2")."""
    stated = read.text("pre")
    read.pre = name = _ALIASES.get(stated, stated)
    if name not in PRE_TOKENIZERS:
        raise read.invalid("pre", f"one of {', '.join(PRE_TOKENIZERS)}", stated or "none")
    read.read_tokens()
    merges = read.strings("merges")
    pairs = [merge.split(" ") for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= read.used.keys():
            raise read.invalid("merges", "two tokens that make a third", " ".join(pair))
    whole = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [{**cut, "pattern": {"Regex": regex}} for regex in PRE_TOKENIZERS[name]]
    steps.append({**whole, "use_regex": False})
    return _json(
        read,
        {"merges": pairs, "ignore_merges": name == WHOLE_WORDS},
        # all models with this pre-tokenizer have it; the file has no key for it
        normalizer={"type": "NFC"} if name == "qwen2" and stated != "stablelm2" else None,
        pre_tokenizer={**whole, "use_regex": True}
        if name == "gpt-2"
        else {"type": "Sequence", "pretokenizers": steps},
        decoder={**whole, "use_regex": True},
    )


def _sentencepiece_json(read: _Reader) -> dict[str, Any]:
    """Return tokenizer.json for SentencePiece's BPE with byte fallback (GGUF's "llama")."""
    # all splits of each token become merges, the highest scores first
    read.read_tokens()
    scores = read.numbers("scores")
    if scores is None:
        raise read.invalid("scores", "a score for each token", "none")
    used = read.used
    if (missing := missing_byte(used)) is not None:
        raise read.invalid("tokens", "one for each of 256 bytes", f"no {missing}")
    ordinary = [
        token
        for token, number in sorted(used.items(), key=lambda each: (-scores[each[1]], each[1]))
        if read.types[number] == TokenType.NORMAL
    ]
    if (longest := max(map(len, ordinary), default=0)) > _MOST_CHARACTERS:
        raise read.invalid("tokens", f"at most {_MOST_CHARACTERS} characters each", longest)
    merges = [
        [token[:at], token[at:]]
        for token in ordinary
        for at in range(1, len(token))
        if token[:at] in used and token[at:] in used
    ]
    unknown = [t for t, i in used.items() if read.types[i] == TokenType.UNKNOWN]
    adds_space = read.flag("add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []),
    ]
    model = {"unk_token": unknown[0] if unknown else None, "fuse_unk": True, "byte_fallback": True}
    return _json(
        read,
        {**model, "merges": merges},
        normalizer={"type": "Sequence", "normalizers": [*prefix, spaces]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": back},
    )


def _template(around: Mapping[str, tuple[str, int]]) -> dict[str, Any] | None:
    """Return the post-processor that adds the tokens ``around`` text, or None without any.

    ``around`` has (token, id) by role: "bos" goes before the text, "eos" after it.
    """
    # ``around`` has token and id by role, "bos" and "eos"
    if not around:
        return None

    def special(role: str, kind: int) -> list[dict[str, Any]]:
        token = around.get(role)
        return [{"SpecialToken": {"id": token[0], "type_id": kind}}] if token else []

    def listed(*sequences: str) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for kind, name in enumerate(sequences):
            sequence = {"Sequence": {"id": name, "type_id": kind}}
            out += [*special("bos", kind), sequence, *special("eos", kind)]
        return out

    return {
        "type": "TemplateProcessing",
        "single": listed("A"),
        "pair": listed("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [number], "tokens": [token]}
            for token, number in around.values()
        },
    }
