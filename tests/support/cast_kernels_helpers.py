"""Helpers that `test_cast_kernels` shares with other tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamload.codecs.llvm import Target, host_target

BASELINE = Target("x86_64-unknown-linux-gnu", "x86-64", "-f16c,-avx,-avx2,-avx512f")

AARCH64 = Target("aarch64-unknown-linux-gnu", "generic", "+neon")

on_x86 = pytest.mark.skipif(
    host_target().architecture != "x86_64", reason="this is about x86-64, and this CPU is not"
)

SCANNED: dict[str, Callable[[], Target]] = {
    "host": host_target,
    "x86-64 without F16C": lambda: BASELINE,
    "x86-64 with AVX2 alone": lambda: Target(BASELINE.triple, "haswell", "-f16c"),
    "x86-64 with F16C": lambda: Target(BASELINE.triple, "x86-64", "+f16c"),
    "aarch64": lambda: AARCH64,
    "windows": lambda: Target("x86_64-pc-windows-msvc-elf", "x86-64", "+f16c"),
    "macos": lambda: Target("arm64-apple-darwin23.0.0-elf", "apple-m1"),
}
