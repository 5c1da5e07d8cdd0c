"""JSON that is nested too deeply is refused before it is parsed, wherever it comes from."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import forked
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors_files import header_bytes, write_safetensors

from streamload.core import bounded_json as nesting
from streamload.core.bounded_json import MOST_LEVELS, check_nesting, parse_json

TEXTS = st.text(st.sampled_from('[]{}"\\aé\ud83d'), max_size=6)
VALUES: Any = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def levels(value: Any) -> int:
    """How deeply a value is nested."""
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@given(VALUES, st.booleans())
def test_levels_are_counted_outside_of_strings(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    count = levels(value)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nesting, "MOST_LEVELS", count)
        patched.setattr(nesting, "_AT_ONCE", 3)
        check_nesting(text)
        patched.setattr(nesting, "MOST_LEVELS", count - 1)
        if count:
            with pytest.raises(ValueError, match="levels of nesting"):
                check_nesting(text)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_what_is_not_too_deep_is_parsed(encoding: str) -> None:
    """In every encoding of `json.loads`; "\u5d22" has bytes of a quote and a bracket."""
    most = '["\u5d22",' * (MOST_LEVELS - 1) + "[]" + "]" * (MOST_LEVELS - 1)
    assert parse_json(most.encode(encoding)) == json.loads(most)
    with pytest.raises(ValueError, match="levels of nesting"):
        parse_json(f"[{most}]".encode(encoding))


DEEP = '{"a":' + "[" * 180_000
PROGRAM = """
    import sys, threading
    from pathlib import Path
    sys.setrecursionlimit(10**6)
    path = Path(sys.argv[1])

    from streamload import open_checkpoint
    from streamload.conversion.journal import _whole_lines
    from streamload.conversion.companions import _is_json
    from streamload.checkpoint.digests import Digests
    from streamload.distributed.index import Index
    from streamload.files.folder import folder_at
    from streamload.planning.plan import Plan

    text = path.read_bytes()
    call = {
        "checkpoint": lambda: open_checkpoint(path.parent),
        "plan": lambda: Plan.from_json(text.decode()),
        "sidecar": lambda: Digests.from_json(text, path),
        "index": lambda: Index.read(text, folder_at(path)),
        "journal": lambda: print(_whole_lines(text)),
        "copied": lambda: print(_is_json(text, whole=True)),
    }[sys.argv[2]]
    try:
        call()
    except ValueError as error:
        print(type(error).__name__, error)
"""
CASES = [
    ("header", "model.safetensors", "checkpoint", "HeaderError"),
    ("metadata", "model.safetensors", "checkpoint", "HeaderError"),
    ("text", "model.safetensors.index.json", "checkpoint", "HeaderError"),
    ("text", "config.json", "checkpoint", "HeaderError"),
    ("text", "streamload.json", "sidecar", "HeaderError"),
    ("text", "plan.json", "plan", "ValueError"),
    ("compressed", "answer", "index", "ValueError"),
    ("line", "journal", "journal", "[]"),
    ("text", "tokenizer.json", "copied", "False"),
]


@pytest.mark.parametrize(("form", "name", "what", "said"), CASES)
def test_deep_nesting_is_an_error_and_no_signal(
    tmp_path: Path, form: str, name: str, what: str, said: str
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("U8", [1], b"x")})
    deep = DEEP.encode()
    forms = {
        "text": deep,
        "header": header_bytes(deep),
        "metadata": header_bytes(b'{"__metadata__":' + deep),
        "compressed": zlib.compress(deep),
        "line": deep + b"\n",
    }
    (tmp_path / name).write_bytes(forms[form])
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    out = forked.fresh(PROGRAM, tmp_path / name, what)
    assert out.startswith(said), out
    if said.endswith("Error"):
        assert f"more than {MOST_LEVELS} levels of nesting" in out
