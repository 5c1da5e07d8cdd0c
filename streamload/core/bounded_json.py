"""A parser of untrusted JSON, which limits its nesting."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

#: The limit of safetensors' own parser (serde_json); files that streamload reads have at most ten.
MOST_LEVELS = 127

_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))
_OPENS = 2  # the bit that "[" and "{" have, and "]" and "}" have not
_AT_ONCE = 2**20


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parse JSON by `json.loads` (its keywords: ``hooks``), up to `MOST_LEVELS` levels of nesting.

    The parser recurses for each level: if a program has raised the recursion limit, 180 KB of
    brackets overflow the stack, which ends the process. Raises ValueError: ``text`` is not JSON, or
    nested more deeply.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    check_nesting(text.encode("utf-8", "surrogatepass"))
    return json.loads(text, **hooks)


def check_nesting(text: bytes) -> None:
    """Raise ValueError for more than `MOST_LEVELS` levels of nesting.

    Takes a 20th of the time of `json.loads`. ``text`` is JSON in UTF-8; invalid JSON may pass.
    """
    if b"\\" in text:  # escaped quotes end no string
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    # adjacent quotes do not change which brackets are inside of strings
    brackets = text.translate(None, _OTHERS).replace(b'""', b"")
    if b'"' in brackets:  # what is left are strings with brackets
        brackets = b"".join(brackets.split(b'"')[::2])
    level = 0
    for start in range(0, len(brackets), _AT_ONCE):
        block = np.frombuffer(brackets, np.uint8, min(_AT_ONCE, len(brackets) - start), start)
        levels = np.cumsum(np.where(block & _OPENS, 1, -1)) + level
        if levels.max() > MOST_LEVELS:
            raise ValueError(f"more than {MOST_LEVELS} levels of nesting")
        level = int(levels[-1])
