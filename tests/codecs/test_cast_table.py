from __future__ import annotations

import mmap
import pickle
import sys
import tracemalloc
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from cast_reference_helpers import as_bits, by_reference, pair_id, samples

from streamload.codecs import llvm
from streamload.codecs.cast_table import (
    ZERO,
    CastCounts,
    OutOfRange,
    cast_engine,
    make_cast,
    supported,
)
from streamload.codecs.floats import PAIRS
from streamload.codecs.llvm import Engine
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, F64, DType
from streamload.errors import UnsupportedCastError

ENGINES: tuple[Engine, ...] = ("llvm", "numpy")
FLOATS = (BF16, F16, F32, F64)
INTO_FLOATS = (*FLOATS, BY_CODE["F8_E4M3"], BY_CODE["F8_E5M2"])


@pytest.fixture
def without_llvmlite(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which llvmlite cannot be imported and nothing is compiled yet."""
    llvm.compiled.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "llvmlite"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    yield
    llvm.compiled.clear()


def run(
    src: DType, dst: DType, data: Any, *, engine: Engine = "auto", out_of_range: OutOfRange = "inf"
) -> tuple[bytearray, CastCounts]:
    view = memoryview(data).cast("B")
    out = bytearray(view.nbytes // src.itemsize * dst.itemsize)
    counts = make_cast(src, dst, engine=engine, out_of_range=out_of_range)(view, memoryview(out))
    return out, counts


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_casts_every_pair(pair: tuple[DType, DType], engine: Engine) -> None:
    """Either engine gives the reference's bits and counts under each policy; "error" is "inf"."""
    src, dst = pair
    x = samples(src)[:70_000]
    for out_of_range in ("inf", "clamp", "error"):
        out, counts = run(src, dst, x, engine=engine, out_of_range=out_of_range)
        whole, _ = by_reference(src, dst, out_of_range == "clamp")
        assert np.array_equal(as_bits(out, dst), whole[: x.size])
        if x.size == whole.size:
            found = (counts.overflowed, counts.flushed, counts.rounded)
            assert found == by_reference(src, dst, False)[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_to_float16_in_numbers(engine: Engine) -> None:
    _, counts = run(BF16, F16, np.arange(1 << 16, dtype="u2"), engine=engine)
    assert counts == CastCounts(overflowed=28_672, flushed=26_112, rounded=1_792)
    assert 65_280 - counts.total == 8_704


@pytest.mark.parametrize("engine", ENGINES)
def test_clamp_touches_finite_values_alone(engine: Engine) -> None:
    largest = 65504.0
    x = np.array([largest, 65519, 65520, 1e30, np.inf, np.nan, -65520, -np.inf, 1], "f4")
    out, counts = run(F32, F16, x, engine=engine, out_of_range="clamp")
    expected = [largest, largest, largest, largest, np.inf, np.nan, -largest, -np.inf, 1]
    assert np.array_equal(np.frombuffer(out, "f2"), np.array(expected, "f2"), equal_nan=True)
    assert counts == CastCounts(overflowed=3, rounded=1)


@pytest.mark.parametrize("dtype", BY_CODE.values(), ids=str)
def test_every_dtype_passes_unchanged(dtype: DType) -> None:
    data = bytes(range(256)) * 3
    out = bytearray(len(data))
    assert supported(dtype, dtype)
    assert cast_engine(dtype, dtype) == "copy"
    assert make_cast(dtype, dtype)(memoryview(data), memoryview(out)) == ZERO
    assert out == data


def test_what_is_supported() -> None:
    """Floats of 16 bits or more among each other, two 8-bit ones into those, nothing else."""
    expected = {(src, dst) for src, dst in product(INTO_FLOATS, FLOATS) if src != dst}
    expected |= {(dtype, dtype) for dtype in BY_CODE.values()}
    everything = product(BY_CODE.values(), BY_CODE.values())
    assert {pair for pair in everything if supported(*pair)} == expected


@pytest.mark.parametrize("pair", [("F32", "F8_E4M3"), ("I32", "F32"), ("BF16", "I8")])
def test_other_casts_are_refused(pair: tuple[str, str]) -> None:
    """Both dtypes are named, and what the source could become."""
    src, dst = (BY_CODE[code] for code in pair)
    with pytest.raises(UnsupportedCastError) as caught:
        make_cast(src, dst)
    assert (caught.value.src, caught.value.dst) == (src.name, dst.name)
    assert caught.value.reason
    with pytest.raises(UnsupportedCastError):
        cast_engine(src, dst)


def test_unknown_options_are_refused() -> None:
    for dst in (BF16, F16):
        with pytest.raises(ValueError, match="engine is one of"):
            make_cast(BF16, dst, engine="device")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="out_of_range is one of"):
            make_cast(BF16, dst, out_of_range="saturate")  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dst", [BF16, F16], ids=str)
def test_views_that_do_not_fit_are_refused(dst: DType, engine: Engine) -> None:
    cast = make_cast(BF16, dst, engine=engine)
    out = bytearray(b"\xaa" * 8)
    for data_nbytes, out_nbytes in ((8, 6), (6, 8), (0, 2), (8, 7)):
        with pytest.raises(ValueError, match="bytes"):
            cast(memoryview(bytes(data_nbytes)), memoryview(out)[:out_nbytes])
    with pytest.raises(ValueError, match="writable"):
        cast(memoryview(bytes(8)), memoryview(bytes(8)))
    with pytest.raises(ValueError, match="contiguous"):
        cast(memoryview(bytes(8)), memoryview(bytearray(16))[::2])
    with pytest.raises(ValueError, match="contiguous"):
        cast(memoryview(bytes(16))[::2], memoryview(out))
    assert out == b"\xaa" * 8


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dst", [BF16, F16], ids=str)
def test_nothing_becomes_nothing(dst: DType, engine: Engine) -> None:
    assert make_cast(BF16, dst, engine=engine)(memoryview(b""), memoryview(bytearray())) == ZERO


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dst", [BF16, F16], ids=str)
def test_casts_from_a_read_only_map_at_an_odd_byte(
    dst: DType, engine: Engine, tmp_path: Path
) -> None:
    x = np.arange(1000, dtype="f4").astype(BF16.numpy)
    path = tmp_path / "weights"
    path.write_bytes(b"\0" * 13 + x.tobytes() + b"\0")
    out = bytearray(1 + x.nbytes)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        # neither these nor the map could be given up if the cast kept a reference
        memoryview(mapped) as view,
        view[13:-1] as window,
    ):
        make_cast(BF16, dst, engine=engine)(window, memoryview(out)[1:])
    assert out[1:] == x.astype(dst.numpy).tobytes()


def test_copies_and_kernels_allocate_nothing() -> None:
    data, out = memoryview(bytes(4_000_000)), memoryview(bytearray(4_000_000))
    for dst in (BF16, F16):
        cast = make_cast(BF16, dst, engine=("llvm" if dst == F16 else "auto"))
        cast(data, out)
        tracemalloc.start()
        cast(data, out)
        peak_nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_nbytes < 10_000


def test_auto_takes_the_kernel() -> None:
    assert cast_engine(BF16, F16) == cast_engine(BF16, F16, "llvm") == "llvm"
    assert cast_engine(BF16, F16, "numpy") == "numpy"


@pytest.mark.usefixtures("without_llvmlite")
def test_does_without_llvmlite() -> None:
    """Where llvmlite is missing "auto" casts in numpy, and "llvm" says what is wrong."""
    assert cast_engine(BF16, F16) == "numpy"
    x = np.array([0x3F80, 0x4780], "u2")
    out, counts = run(BF16, F16, x)
    assert np.frombuffer(out, "f2").tolist() == [1, np.inf]
    assert counts == CastCounts(overflowed=1)
    with pytest.raises(UnsupportedCastError, match=r"no LLVM kernel for this machine: .*llvmlite"):
        make_cast(BF16, F16, engine="llvm")


def test_does_without_a_working_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that would call a helper is never linked; the integer form is tried, then numpy."""
    tried = []

    def scan(image: bytes) -> tuple[str, ...]:
        tried.append(image)
        return ("__truncsfhf2",)

    llvm.compiled.clear()
    monkeypatch.setattr(llvm, "undefined_symbols", scan)
    monkeypatch.setattr(llvm, "link_object", None)
    try:
        assert cast_engine(F32, F16) == "numpy"
        with pytest.raises(UnsupportedCastError, match="would call __truncsfhf2"):
            make_cast(F32, F16, engine="llvm")
    finally:
        llvm.compiled.clear()
    assert len(set(tried)) == 1 + llvm.host_target().native_half


def test_refuses_a_big_endian_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements are little-endian; elsewhere they could only be copied."""
    monkeypatch.setattr(sys, "byteorder", "big")
    for engine in ENGINES:
        with pytest.raises(UnsupportedCastError, match="little-endian"):
            make_cast(BF16, F16, engine=engine)
    assert cast_engine(BF16, BF16) == "copy"


def test_importing_the_table_leaves_llvm_out() -> None:
    """LLVM takes tens of MB, so it comes with the first kernel and not with the import."""
    code = (
        "import sys, streamload.codecs.cast_table as t, streamload.core.dtypes as d;"
        "t.make_cast(d.BF16, d.BF16); t.make_cast(d.BF16, d.F16, engine='numpy');"
        "sys.exit('llvmlite' in sys.modules)"
    )
    forked.fresh(code)


def test_counts_add_up() -> None:
    counts = CastCounts(1, 2, 3) + CastCounts(overflowed=10)
    assert counts == CastCounts(11, 2, 3)
    assert counts.total == 16
    assert ZERO + counts == sum([counts], ZERO) == pickle.loads(pickle.dumps(counts)) == counts
    assert ZERO.total == 0
