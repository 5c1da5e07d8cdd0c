"""The kernel that transposes matrices (`streamload.codecs.permute`), against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from streamload.codecs.llvm import compiled
from streamload.codecs.permute import compile_transpose, transpose


@pytest.fixture(autouse=True)
def kernels() -> None:
    compile_transpose([1, 2, 4, 8])


def test_nothing_is_compiled_while_bytes_move() -> None:
    kernel = compiled.pop(("transpose", 4))
    try:
        found = np.arange(64 * 64, dtype=np.uint32).reshape(64, 64)
        out = np.empty((64, 64), np.uint32)
        transpose(found, out.T)
        assert np.array_equal(out, found.T)
        assert ("transpose", 4) not in compiled
    finally:
        compiled["transpose", 4] = kernel


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(8, 64), (7, 5), (129, 97), (16, 1600), (1, 33), (300, 32)])
def test_a_part_of_a_matrix(dtype: type[np.unsignedinteger], shape: tuple[int, int]) -> None:
    """All of it becomes its transpose, whatever is left of blocks, and nothing beside it."""
    lines, columns = shape
    matrix = np.random.default_rng(0).integers(0, 255, (lines, columns + 13)).astype(dtype)
    found = matrix[:, 3 : 3 + columns]
    out = np.zeros((columns, lines + 5), dtype)
    transpose(found, out.T[2 : 2 + lines])
    assert np.array_equal(out[:, 2 : 2 + lines], found.T)
    assert not out[:, :2].any() and not out[:, 2 + lines :].any()


def test_bytes_at_any_address() -> None:
    raw = np.random.default_rng(0).integers(0, 255, 64 * 64 * 2 + 1, np.uint8)
    found = np.ndarray((64, 64), np.uint16, raw.data, 1)
    out = np.empty((64, 64), np.uint16)
    transpose(found, out.T)
    assert np.array_equal(out, found.T)


def test_what_the_kernel_is_not_for() -> None:
    """Lines that stay lines, elements at a distance, and elements of other lengths."""
    found = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    long = np.frombuffer(np.random.default_rng(0).bytes(64 * 64 * 16), "V16").reshape(64, 64)
    for given, out in (
        (found, np.zeros((64, 64), np.uint16)),
        (found[:, ::-1], np.zeros((64, 64), np.uint16).T),
        (long, np.zeros((64, 64), "V16").T),
    ):
        transpose(given, out)
        assert out.tobytes() == given.tobytes()
