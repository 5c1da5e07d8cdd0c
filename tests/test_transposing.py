"""The kernel that transposes matrices (`streamload.quant.transposing`), against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from streamload.quant.transposing import put


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("shape", [(8, 64), (7, 5), (129, 97), (16, 1600), (1, 33), (300, 32)])
def test_a_part_of_a_matrix(dtype: type[np.unsignedinteger], shape: tuple[int, int]) -> None:
    """All of it becomes its transpose, whatever is left of blocks, and nothing beside it."""
    lines, columns = shape
    matrix = np.random.default_rng(0).integers(0, 255, (lines, columns + 13)).astype(dtype)
    found = matrix[:, 3 : 3 + columns]
    out = np.zeros((columns, lines + 5), dtype)
    put(found, out.T[2 : 2 + lines])
    assert np.array_equal(out[:, 2 : 2 + lines], found.T)
    assert not out[:, :2].any() and not out[:, 2 + lines :].any()


def test_bytes_at_any_address() -> None:
    """Tensors in files are not aligned."""
    raw = np.random.default_rng(0).integers(0, 255, 64 * 64 * 2 + 1, np.uint8)
    found = np.ndarray((64, 64), np.uint16, raw.data, 1)
    out = np.empty((64, 64), np.uint16)
    put(found, out.T)
    assert np.array_equal(out, found.T)


def test_what_is_no_transpose_is_copied() -> None:
    """In the same order, and of lines backwards."""
    found = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    for given in (found, found[::-1], found[:, ::-1]):
        for out in (np.empty((64, 64), np.uint16), np.empty((64, 64), np.uint16).T):
            put(given, out)
            assert np.array_equal(out, given)
