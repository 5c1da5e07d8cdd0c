"""Converts a model's vocabulary from tokenizer.json to GGUF's ``tokenizer.ggml.*``.

Source: the JSON that Hugging Face's `tokenizers` 0.23 writes, and how transformers 5 reads
tokenizer_config.json. See `streamload.formats.gguf.vocabulary` for GGUF's side, and the inverse.

Two kinds of vocabularies are written: byte-level BPE under one of llama.cpp's pre-tokenizers, and
the BPE of SentencePiece with byte fallback, for which llama.cpp merges the pair that makes the
token of the highest score. That equals a list of merges that has every split of every token, with
all splits of one token adjacent.

If llama.cpp would split text into other tokens, the vocabulary is refused, or a note describes the
difference. llama.cpp never normalizes to NFC, as Qwen models do: text in NFC is split the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from streamload.core.bounded_json import check_nesting
from streamload.errors import CheckpointError
from streamload.formats.gguf.vocabulary import (
    BYTE,
    PRE_TOKENIZERS,
    SPACE,
    SPECIAL,
    WHOLE_WORDS,
    Document,
    Path,
    TokenType,
    missing_byte,
)

# Two spellings of the regex for English contractions; llama.cpp itself uses the second.
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_EITHER_CASE = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
# Cannot match inside of a JSON string, where quotes have backslashes.
_MERGES = re.compile(r'"merges"\s*:\s*\[\s*')
_GAP = re.compile(r"[\s,]*")
_INSTEAD = "without tokenizer.json in its folder, the model is written without a vocabulary"


def parse_tokenizer(raw: bytes) -> dict[str, Any]:
    """Return tokenizer.json parsed, each merge as one string: pairs take four times the memory."""
    check_nesting(raw)
    text = raw.decode()
    del raw  # tens of MB
    found = _MERGES.search(text)
    if found is None:
        whole: dict[str, Any] = json.loads(text)
        return whole
    decoder, merges, at = json.JSONDecoder(), [], found.end()
    try:
        while text[at] != "]":
            merge, at = decoder.raw_decode(text, at)
            merges.append(merge if " " in "".join(merge) else " ".join(_pair(merge)))
            at = _GAP.match(text, at).end()  # type: ignore[union-attr]
        before, after = text[: found.end()], text[at:]
        del text, found
        before += after
        whole = json.loads(before)
        whole["model"]["merges"] = merges
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"no merges of tokens: {error}") from error
    return whole


def no_vocabulary(rows: int, architecture: str) -> dict[str, Any]:
    """Return GGUF metadata without a tokenizer (llama.cpp uses ids) for an embedding's ``rows``."""
    return {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": rows}


def to_gguf(
    path: Path, tokenizer: Document, settings: Document, config: Document, rows: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the GGUF metadata of a vocabulary, and notes on differences in llama.cpp.

    ``settings`` is tokenizer_config.json, ``config`` config.json, ``rows`` the embedding's number
    of rows. Raise CheckpointError for a vocabulary that llama.cpp cannot express.
    """
    try:
        return _Vocabulary(path, tokenizer, settings, config, rows).metadata()
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            path, "is not the JSON of a tokenizer", found=f"{type(error).__name__}: {error}"
        ) from error


class _Vocabulary:
    """Converts one tokenizer.json to GGUF metadata; see `to_gguf`."""

    def __init__(
        self, path: Path, tokenizer: Document, settings: Document, config: Document, rows: int
    ) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._model: Document = tokenizer["model"]
        self._settings = settings
        self._config = config
        self._rows = rows
        self._notes: list[str] = []
        kind = self._model.get("type", "BPE" if "merges" in self._model else None)
        if kind != "BPE":
            raise self._refusal("its model is not one that llama.cpp has", "BPE", kind)
        self._vocab: dict[str, int] = self._model["vocab"]
        self._added = self._added_tokens()
        self._added_ids = {each["content"]: i for i, each in self._added.items()}

    def _refusal(self, problem: str, expected: object, found: object = None) -> CheckpointError:
        """Return the error for a vocabulary that llama.cpp cannot express."""
        return CheckpointError(self._path, problem, f"{expected} ({_INSTEAD})", found)

    def _added_tokens(self) -> dict[int, dict[str, Any]]:
        """Return by id the tokens that transformers finds before it splits text."""
        added = {each["id"]: dict(each) for each in self._tokenizer.get("added_tokens") or ()}
        for number, each in (self._settings.get("added_tokens_decoder") or {}).items():
            added[int(number)] = {**added.get(int(number), {}), **each}
        contents = {each["content"] for each in added.values()}
        more = [self._named(name) for name in (*SPECIAL, "sep", "cls", "mask")]
        for name in ("additional_special_tokens", "extra_special_tokens"):
            listed = self._settings.get(name) or ()
            more += map(_content, listed.values() if isinstance(listed, Mapping) else listed)
        for content in more:
            if content in self._vocab and content not in contents:
                added[self._vocab[content]] = {"content": content}
        for each in added.values():  # a token with a role is always special
            each["special"] = each.get("special", False) or each["content"] in more
        return added

    def _id(self, token: str | None) -> int | None:
        """Return the id of a token, None if it is unknown or None."""
        return self._added_ids.get(token or "", self._vocab.get(token or ""))

    def _named(self, name: str) -> str | None:
        """Return the token with a role ("bos", "eos", ...) in tokenizer_config.json, or None."""
        return _content(self._settings.get(f"{name}_token"))

    def metadata(self) -> tuple[dict[str, Any], list[str]]:
        """Return the metadata and the notes; see `to_gguf`."""
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if self._model.get(key):
                raise self._refusal(f"its tokens have a {key}", "none", self._model[key])
        of_kind = self._sentencepiece() if self._model.get("byte_fallback") else self._byte_level()
        greedy = [a["content"] for a in self._added.values() if a.get("lstrip") or a.get("rstrip")]
        if greedy:
            shown = ", ".join(map(repr, greedy[:3]))
            self._notes.append(f"llama.cpp leaves the spaces around {shown}: transformers does not")
        inside = [a["content"] for a in self._added.values() if a.get("single_word")]
        if inside:
            shown = ", ".join(map(repr, inside[:3]))
            self._notes.append(f"llama.cpp takes {shown} out of words: transformers does not")
        kind = of_kind.pop("tokenizer.ggml.model")
        listed = self._tokens(kind)
        special = self._special_ids()
        if kind == "gpt2" and "tokenizer.ggml.eos_token_id" not in special:
            self._notes.append(
                "no end token is known, and llama.cpp takes token 11 then: say eos_token in "
                "tokenizer_config.json"
            )
        found = {"tokenizer.ggml.model": kind, **listed, **of_kind, **special}
        return {**found, **self._chat_templates()}, self._notes

    def _tokens(self, kind: str) -> dict[str, Any]:
        """Return the keys for all tokens by id and for their types; unused ids get padding.

        ``kind`` is GGUF's "gpt2" or "llama". Raise CheckpointError for ids without a row.
        """
        tokens: list[str | None] = [None] * self._rows
        types = np.full(self._rows, TokenType.NORMAL, np.int32)
        added = ((each["content"], number) for number, each in self._added.items())
        for token, number in chain(self._vocab.items(), added):
            if not 0 <= number < self._rows:
                raise CheckpointError(
                    self._path,
                    f"token {token!r} has no row in the embedding, and llama.cpp needs one: "
                    "model.resize_token_embeddings(len(tokenizer)) adds it",
                    f"ids below {self._rows}",
                    number,
                )
            if tokens[number] not in (None, token) or self._id(token) != number:
                raise self._refusal(
                    "two tokens have one id, or one has two", "one id each", repr(token)
                )
            tokens[number] = token
        for number, each in self._added.items():
            types[number] = TokenType.CONTROL if each["special"] else TokenType.USER_DEFINED
        if kind == "llama":
            for token, number in self._vocab.items():
                if BYTE.fullmatch(token):
                    types[number] = TokenType.BYTE
            unknown = self._id(self._model.get("unk_token"))
            if unknown is not None:
                types[unknown] = TokenType.UNKNOWN
        for number, token in enumerate(tokens):
            if token is None:
                tokens[number], types[number] = f"[PAD{number}]", TokenType.UNUSED
        return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}

    def _special_ids(self) -> dict[str, Any]:
        """Return the keys for the ids of special tokens, and whether bos and eos are added."""
        out: dict[str, Any] = {}
        for name, key in SPECIAL.items():
            stated = self._config.get(f"{name}_token_id")
            number: Any = self._id(self._named(name))
            if number is None:
                number = stated[0] if isinstance(stated, list) and stated else stated
            if type(number) is int and 0 <= number < self._rows:
                out[f"tokenizer.ggml.{key}_token_id"] = number
        first, last = self._around()
        for name, given in (("bos", first), ("eos", last)):
            if given is not None:
                out[f"tokenizer.ggml.{name}_token_id"] = given
            out[f"tokenizer.ggml.add_{name}_token"] = given is not None
        return out

    def _around(self) -> tuple[int | None, int | None]:
        """Return the ids of the tokens that transformers adds before and after text, or None."""
        if {"add_bos_token", "add_eos_token"} & self._settings.keys():  # the template is ignored
            first, last = (
                self._id(self._named(name)) if self._settings.get(f"add_{name}_token") else None
                for name in ("bos", "eos")
            )
            return first, last
        post = self._tokenizer.get("post_processor") or {}
        steps = post["processors"] if post.get("type") == "Sequence" else [post]
        templates = [each for each in steps if each.get("type", "ByteLevel") != "ByteLevel"]
        if not templates:
            return None, None
        parts = templates[0].get("single") if len(templates) == 1 else None
        names = [p["SpecialToken"]["id"] if "SpecialToken" in p else None for p in parts or ()]
        at = names.index(None) if None in names else len(names)
        before, after = names[:at], names[at + 1 :]
        if at == len(names) or len(before) > 1 or len(after) > 1 or None in after:
            raise self._refusal(
                "it puts tokens around text as llama.cpp cannot",
                "one before and one after at most",
                names or [each.get("type") for each in templates],
            )
        first, last = (self._id(each[0]) if each else None for each in (before, after))
        return first, last

    def _chat_templates(self) -> dict[str, Any]:
        """Return the keys for the chat templates, the default one and those with names."""
        given = self._settings.get("chat_template")
        if isinstance(given, str):
            return {"tokenizer.chat_template": given}
        named = {each["name"]: each["template"] for each in given or ()}
        out: dict[str, Any] = {}
        if "default" in named:
            out["tokenizer.chat_template"] = named.pop("default")
        if named:
            out["tokenizer.chat_templates"] = list(named)
        return out | {f"tokenizer.chat_template.{name}": text for name, text in named.items()}

    # --- byte-level BPE ---------------------------------------------------------------------------

    def _byte_level(self) -> dict[str, Any]:
        """Return the keys of a byte-level BPE; raise CheckpointError if llama.cpp differs."""
        normalizer = self._tokenizer.get("normalizer") or {}
        if normalizer.get("type", "NFC") != "NFC":
            raise self._refusal("its text is normalised", "NFC or nothing", normalizer["type"])
        name = self._pre_tokenizer()
        if name == "gpt-4o":
            self._notes.append(
                "llama.cpp cuts words at combining marks under gpt-4o: transformers does not"
            )
        merges = [m if isinstance(m, str) else " ".join(m) for m in self._model["merges"]]
        if (odd := next((m for m in merges if m.count(" ") != 1), None)) is not None:
            raise self._refusal("a merge is no two tokens", "no space in them", repr(odd))
        if bool(self._model.get("ignore_merges")) != (name == WHOLE_WORDS):
            ordinary = (t for t, i in self._vocab.items() if i not in self._added)
            other = _not_merged(ordinary, {_pair(merge): rank for rank, merge in enumerate(merges)})
            if other is not None:
                way = "takes words that are tokens as they are" if name == WHOLE_WORDS else "merges"
                raise self._refusal(
                    f"llama.cpp {way} under its pre-tokenizer {name!r}",
                    f"ignore_merges {str(name == WHOLE_WORDS).lower()}, or merges that make every "
                    "token",
                    f"the token {other!r}, which no merges make",
                )
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": name,
            "tokenizer.ggml.merges": merges,
        }

    def _pre_tokenizer(self) -> str:
        """Return llama.cpp's name of the pre-tokenizer; raise CheckpointError if it has none."""
        given = self._tokenizer.get("pre_tokenizer") or {}
        steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
        *splits, last = steps
        found: object = " and ".join(str(step.get("type")) for step in steps)
        if last.get("type") == "ByteLevel":
            if last.get("add_prefix_space", True):
                raise self._refusal("it puts a space before text", "add_prefix_space false", "true")
            if not splits and last.get("use_regex", True):
                return "gpt-2"
            isolates = [
                (split.get("behavior"), bool(split.get("invert")))
                in (("Isolated", False), ("Removed", True))
                and "Regex" in split.get("pattern", {})
                for split in splits
            ]
            if isolates and all(isolates) and not last.get("use_regex", True):
                regexes = [str(split["pattern"]["Regex"]) for split in splits]
                found = " and ".join(regexes)
                spelled = tuple(regex.replace(_EITHER_CASE, _ENDINGS) for regex in regexes)
                for name, expected in PRE_TOKENIZERS.items():
                    if spelled == expected:
                        return name
        known = ", ".join(PRE_TOKENIZERS)
        raise self._refusal("its pre-tokenizer is unknown", f"the regexes of {known}", found)

    # --- SentencePiece's BPE ----------------------------------------------------------------------

    def _sentencepiece(self) -> dict[str, Any]:
        """Return the keys of SentencePiece's BPE; raise CheckpointError if llama.cpp differs."""
        adds_space = self._check_spaces()
        if (missing := missing_byte(self._vocab)) is not None:
            raise self._refusal("tokens for bytes are missing", "all 256", f"no {missing}")
        merges = [_pair(merge) for merge in self._model["merges"]]
        made = list(dict.fromkeys(left + right for left, right in merges))
        self._check_splits(merges, made)
        scores = np.zeros(self._rows, np.float32)
        rank = {token: -number for number, token in enumerate(made)}
        others = -len(made)
        for token, number in self._vocab.items():
            if number in self._added or BYTE.fullmatch(token):
                continue
            if token not in rank:
                rank[token], others = others, others - 1
            scores[number] = rank[token]
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": adds_space,
        }

    def _check_spaces(self) -> bool:
        """Return whether a space is added before text; refuse rules that SentencePiece lacks."""
        given = self._tokenizer.get("normalizer") or {}
        pre = self._tokenizer.get("pre_tokenizer") or {}
        steps = given["normalizers"] if given.get("type") == "Sequence" else [given]
        steps = [step for step in steps if step.get("type")]
        replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepends = {"type": "Prepend", "prepend": SPACE}
        if not pre and steps in ([replaces], [prepends, replaces]):
            return len(steps) == 2
        as_one = pre.get("split", True) is False and pre.get("replacement") == SPACE
        if pre.get("type") != "Metaspace" or steps or not as_one:
            raise self._refusal(
                "it does not treat spaces as SentencePiece does",
                "Prepend and Replace, or Metaspace that does not split",
                [step.get("type") for step in (*steps, pre) if step],
            )
        scheme = pre.get("prepend_scheme", "always")
        if scheme == "never":
            return False
        after = ", nor right after a special token" if scheme == "first" else ""
        self._notes.append(
            f"llama.cpp puts a space before every text: transformers none before a space{after}"
        )
        return True

    def _check_splits(self, merges: Sequence[tuple[str, str]], made: Sequence[str]) -> None:
        """Raise CheckpointError if merging by ``merges`` differs from merging by highest score."""
        there = set(merges)
        grouped = [left + right for left, right in merges]
        if sum(a != b for a, b in pairwise(grouped)) + bool(grouped) != len(made):
            raise self._refusal(
                "its merges are not those of SentencePiece",
                "all merges that make one token after each other",
            )
        for token, number in self._vocab.items():
            if len(token) < 2 or number in self._added or BYTE.fullmatch(token):
                continue
            for at in range(1, len(token)):
                pair = token[:at], token[at:]
                if pair not in there and all(p in self._vocab or len(p) == 1 for p in pair):
                    raise self._refusal(
                        "its merges are not those of SentencePiece",
                        f"one of {pair[0]!r} and {pair[1]!r}, which make the token {token!r}",
                        "none",
                    )


def _content(token: object) -> str | None:
    """Return the text of a token of the settings, a string or an object; None for others."""
    found = token.get("content") if isinstance(token, Mapping) else token
    return found if isinstance(found, str) else None


def _pair(merge: Any) -> tuple[str, str]:
    """Return the two tokens of a merge, which may be one string with a space."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _not_merged(tokens: Iterable[str], ranks: Mapping[tuple[str, str], int]) -> str | None:
    """Return the first token that merging its characters by ``ranks`` does not make, or None."""
    none = len(ranks)
    for token in tokens:
        parts = list(token)
        while len(parts) > 1:
            found = [ranks.get(pair, none) for pair in pairwise(parts)]
            at = min(range(len(found)), key=found.__getitem__)
            if found[at] == none:
                return token
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return None
