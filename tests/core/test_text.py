"""Text of files as people see it: names hold any character, and a terminal obeys none of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors_files import write_safetensors

import streamload
from streamload.errors import LoadState, ShapeMismatch, StreamloadError, printable, printed
from streamload.verification.verify import Mismatch

EVIL = "a\x1b]0;owned\x07\x1b[2J\nequal: all\r\x9b31m\u202e\udc80"
_KEPT = EVIL.replace("\udc80", "")  # what JSON in UTF-8 can say


def test_printable() -> None:
    """Escapes as Python writes them; text without them is itself, in any script."""
    assert printable("layers.0.重み ä") == "layers.0.重み ä"
    assert printable(EVIL) == r"a\x1b]0;owned\x07\x1b[2J\nequal: all\r\x9b31m\u202e\udc80"
    assert printed(["a\nb", "c"]) == "a\\nb\nc"


def _refused(call: Callable[[], Any]) -> str:
    with pytest.raises(StreamloadError) as raised:
        call()
    return str(raised.value)


def test_no_report_and_no_error_has_control_characters(tmp_path: Path) -> None:
    large = np.full(4, 1e6, "<f4").tobytes()
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    names = [_KEPT, f"{_KEPT}2"]
    write_safetensors(a, {name: ("F32", (4,), large) for name in names}, metadata={_KEPT: _KEPT})
    write_safetensors(b, {_KEPT: ("F32", (4,), bytes(16)), f"b{_KEPT}": ("F32", (4,), large)})
    options: Any = {"progress": False}
    shown: list[object] = [streamload.diff(a, b, **options)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        out = tmp_path / "out"
        shown.append(streamload.convert(a, out, dtype="float16", **options))
        shown.append(streamload.load_state_dict(None, a, device="host", dtype="float16", **options))
    assert len(warned) == 2
    shown += [one.message for one in warned]
    shown += [streamload.plan(a, device="host"), streamload.open_checkpoint(a)]
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    shown.append(streamload.verify_checkpoint(out, **options))
    model = {f"m{_KEPT}": np.zeros(4, "f4"), _KEPT: np.zeros(3, "f4")}
    errors = [
        lambda: streamload.load_state_dict(model, a, **options),
        lambda: streamload.plan(a, device="host", budget=17),
        lambda: streamload.convert(a, tmp_path / "no", dtype="float16", out_of_range="error"),
        lambda: streamload.open_checkpoint(tmp_path / _KEPT),
    ]
    shown += map(_refused, errors)
    shown += [
        ShapeMismatch(EVIL, (1,), (2,)),
        LoadState((EVIL,), (), ()),
        Mismatch(EVIL, 0, "", ""),
    ]
    for each in shown:
        for line in (*str(each).split("\n"), *repr(each).split("\n")):
            assert line.isprintable(), line
            assert not line.startswith("equal: all")
