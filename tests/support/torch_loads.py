"""Loads of files of torch, compared with torch's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import needs

import streamload

torch = needs.module("torch")


def bits(tensor: Any) -> tuple[Any, ...]:
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    raw = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return tensor.dtype, tuple(tensor.shape), raw


def empty_like(expected: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in expected.items()}


def loaded(path: Any, expected: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    found = empty_like(expected)
    arguments = {"device": "cpu", "dtype": "checkpoint", "progress": False}
    streamload.load_state_dict(found, path, **(arguments | options))
    return found


def check(path: Any, expected: Mapping[str, Any], **options: Any) -> None:
    found = loaded(path, expected, **options)
    for name, value in expected.items():
        assert bits(found[name]) == bits(value), name
