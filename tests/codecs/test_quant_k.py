"""K-quants: blocks are llama.cpp's, byte for byte, with an importance matrix and without."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from cast_kernels_helpers import on_x86
from k_quants import by_ggml, encoded, tensor
from quant_kernels_helpers import SEARCHED

from streamload.codecs.llvm import Engine
from streamload.codecs.scheme import ALL_SCHEMES
from streamload.core.dtypes import F32

#: SHA-256 of the blocks of `tensor(0)` to `tensor(39)`, without importance and with it, which
#: ``quantize_q4_K`` and so on gave: ggml/src/ggml-quants.c of llama-cpp-python 0.3.36, compiled by
#: gcc 12 for x86-64 with ``-O2 -ffp-contract=off``; ``-O3 -mavx2`` gave the same.
RECORDED = {
    "q5_0": (
        "08a82871cc4e8f9c4302b588e6693dc13069aea63a06d30db13b19d1c65f9bb4",
        "b116a1cfe570d008fcd216b2ce3dafcd1e608bb50b201cee8c7e6c74195b6bbf",
    ),
    "q5_1": (
        "cff1124aa3aec1be89108cb74d91202807352c2585f5e7d85692c28f1922b33b",
        "61cdabbd607d147d77e9f3adb23f15e4a2e3deee952fdcea99b435d2366fa590",
    ),
    "q4_k": (
        "5caa0fcbbd9fcaab78c2d0a1ecd4341ee10ebc176fcddb184e9ef94688b30941",
        "dc332ce5db806624cb636a7abd110531a2b107fb10792f6bd2b1f9c27061a2d0",
    ),
    "q5_k": (
        "362e958a41fb0d0e75db84024bb688d6c8b8964fdb0c8f82dbb56511f31107a5",
        "4c906108af8cd8b8799ac27307bf2e18ee6670375ea46a349592845c635a7eb9",
    ),
    "q6_k": (
        "bfdb0496c08e472223e4c6af77c05007ddf8dc72a17ca2d9eff090df30cac9e8",
        "e051c22581ea48eafc81655e603f95b2e11ae868c850281df69d0a6c403219f2",
    ),
}


@pytest.mark.parametrize("engine", ["llvm", "numpy"])
@pytest.mark.parametrize("name", SEARCHED)
def test_blocks_equal_those_recorded(name: str, engine: Engine) -> None:
    """Of 40 tensors of five kinds, by kernels and without."""
    for weighted, expected in enumerate(RECORDED[name]):
        digest = hashlib.sha256()
        for seed in range(40):
            x, importance = tensor(seed)
            digest.update(encoded(name, x, importance if weighted else None, engine))
        assert digest.hexdigest() == expected, weighted


@on_x86  # elsewhere compilers may contract to FMA
@pytest.mark.slow
@pytest.mark.parametrize("name", SEARCHED)
def test_blocks_equal_llama_cpps(name: str) -> None:
    """Of 1,000 more tensors, by the library that is installed."""
    (library,) = Path(needs.runtime("llama_cpp").__file__ or "").parent.glob("lib/libggml-base.so")
    for seed in range(1000):
        x, importance = tensor(seed, rows=3, columns=768)
        for weights in (None, importance):
            expected = by_ggml(library, name, x, weights)
            assert encoded(name, x, weights, "llvm") == expected, (seed, weights is None)


@pytest.mark.parametrize("name", SEARCHED)
def test_any_cut_has_the_importance_of_its_columns(name: str) -> None:
    """Units may be encoded in any pieces; each matrix of several has its own importance."""
    x, importance = tensor(0, rows=8, columns=768)
    whole = encoded(name, x, importance, "auto")
    units = ALL_SCHEMES[name].of(x.shape, F32).units
    for cuts in ((1,), (units - 1,), tuple(range(1, units))):
        assert encoded(name, x, importance, "auto", *cuts) == whole
    other = np.ascontiguousarray(importance[::-1])
    stacked, both = np.stack([x, x]), np.stack([importance, other])
    expected = whole + encoded(name, x, other, "auto")
    assert encoded(name, stacked, both, "auto", 3, units + 1) == expected


def test_groups_of_no_scale_keep_their_codes() -> None:
    """A group far below the others has a scale of 0 in the block, and codes that decode to 0."""
    x, _ = tensor(0, rows=1, columns=256)
    x[:, 32:64] = x[:, :32] * np.float32(2.0**-20)
    for name in ("q4_k", "q6_k"):
        (codes,) = np.frombuffer(encoded(name, x, None, "auto"), np.uint8).reshape(1, -1)
        high = codes[16:48] >> 4 if name == "q4_k" else codes[32:64] & 15
        assert len(set(high.tolist())) > 4


def test_importance_changes_no_other_format() -> None:
    x, importance = tensor(0)
    made: Any = ALL_SCHEMES["q8_0"].of(x.shape, F32)
    assert made.weighted(importance) is made
