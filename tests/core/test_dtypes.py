"""The dtypes of the format."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamload.core.dtypes import BF16, BY_CODE, BY_NAME, F16, F32, F64, DType, parse_dtype

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}


def test_all_22_of_the_format() -> None:
    """Every code of the format, with its size in bits, under a name of its own."""
    assert {code: dtype.bits for code, dtype in BY_CODE.items()} == BITS
    assert len(BY_CODE) == len(BY_NAME) == 22
    assert all(BY_NAME[dtype.name] is dtype is BY_CODE[dtype.code] for dtype in BY_CODE.values())


@pytest.mark.parametrize("dtype", BY_CODE.values(), ids=str)
def test_numpy_has_the_same(dtype: DType) -> None:
    found = dtype.numpy
    if dtype.bits < 8:
        assert found is None
        assert dtype.itemsize == 0
        return
    assert found.name == dtype.name
    assert found.itemsize == dtype.itemsize == dtype.bits // 8
    kinds = {"bool": "b", "uint": "u", "int": "i", "complex": "c"}
    if dtype.kind in kinds:
        assert found.kind == kinds[dtype.kind]


def test_sizes_below_a_byte_round_up() -> None:
    assert [BY_CODE["F4"].nbytes(n) for n in range(4)] == [0, 1, 1, 2]
    assert [BY_CODE["F6_E2M3"].nbytes(n) for n in range(5)] == [0, 1, 2, 3, 3]
    assert F64.nbytes(10**12) == 8 * 10**12


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float16", F16),
        ("F16", F16),
        ("f16", F16),
        ("half", F16),
        ("fp16", F16),
        ("torch.float16", F16),
        ("torch.half", F16),
        ("BFloat16", BF16),
        ("bf16", BF16),
        ("float", F32),
        ("double", F64),
        ("float8_e4m3", BY_CODE["F8_E4M3"]),
        ("fp8e5m2", BY_CODE["F8_E5M2"]),
        ("uchar", BY_CODE["U8"]),
        (F16, F16),
        (np.float16, F16),
        (np.dtype("float32"), F32),
        (ml_dtypes.bfloat16, BF16),
        (np.dtype(ml_dtypes.float8_e5m2), BY_CODE["F8_E5M2"]),
    ],
)
def test_spellings(given: Any, expected: DType) -> None:
    """Long names, codes, short forms in any case, and the dtypes of numpy and ml_dtypes."""
    assert parse_dtype(given) is expected


def test_tinygrads_dtypes() -> None:
    from tinygrad import dtypes

    assert parse_dtype(dtypes.half) is F16
    assert parse_dtype(dtypes.float32) is F32
    assert parse_dtype(dtypes.bfloat16) is BF16
    assert parse_dtype(dtypes.fp8e4m3) is BY_CODE["F8_E4M3"]
    assert parse_dtype(dtypes.int64) is BY_CODE["I64"]


@pytest.mark.parametrize("given", ["", "float128", "float 16", None, 3, [], "checkpoint", object])
def test_what_is_no_dtype(given: Any) -> None:
    """A ValueError that lists what there is."""
    with pytest.raises(ValueError, match="bfloat16"):
        parse_dtype(given)
