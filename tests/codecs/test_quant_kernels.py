"""Quantising: kernels equal their oracles, cuts and threads change nothing, bounds hold."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
from cast_kernels_helpers import BASELINE, SCANNED, on_x86
from quant_bounds import bound, elements_of
from quant_kernels_helpers import (
    BLOCKED,
    SEARCHED,
    assert_same_counts,
    columns_of,
    encoded,
    fitting,
    shaped,
)

from streamload.codecs import llvm
from streamload.codecs.encode_kernels import compile_kernel, kernel_ir
from streamload.codecs.llvm import Engine, Target
from streamload.codecs.parts import SOURCES, Part, QuantCounts
from streamload.codecs.scheme import ALL_SCHEMES, SCHEMES
from streamload.codecs.schemes.bitsandbytes import FourBit
from streamload.codecs.search_kernels import search_ir
from streamload.core.dtypes import BF16, BY_CODE, F16, F32, F64, DType

NAMES = tuple(SCHEMES)
FORMS = [*SCHEMES.values(), FourBit("nf4", arithmetic="cuda"), FourBit("fp4", arithmetic="cuda")]
#: MLC's as well, which only files have.
ALL_FORMS = [*FORMS, *(ALL_SCHEMES[name] for name in ("q4f16_1", "q4f16_0", "q3f16_1"))]


def form_id(form: Any) -> str:
    return f"{form.name}-{getattr(form, 'arithmetic', 'cpu')}"


@pytest.mark.parametrize("form", ALL_FORMS, ids=form_id)
def test_kernels_equal_the_oracle(form: Any) -> None:
    for sample in fitting(form.name, 50 if form.name in SEARCHED else 500):
        parts, counts = encoded(form, sample.x, sample.src, "llvm")
        expected, expected_counts = encoded(form, sample.x, sample.src, "numpy")
        assert parts.keys() == expected.keys()
        for suffix, part in expected.items():
            assert parts[suffix] == part, (sample.name, suffix)
        assert_same_counts(counts, expected_counts, sample.name)
        assert counts.numel == sample.x.size


@pytest.mark.parametrize("form", [f for f in ALL_FORMS if f.name not in SEARCHED], ids=form_id)
def test_errors_are_within_the_bound(form: Any) -> None:
    for sample in fitting(form.name, non_finite=False):
        tensor = form.of(sample.x.shape, sample.src)
        parts, counts = encoded(form, sample.x, sample.src)
        if counts.overflowed:
            assert math.isinf(counts.largest_error)
            continue
        x = sample.x.astype(np.float32)
        decoded = elements_of(tensor, parts)
        assert (decoded.dtype, decoded.shape) == (np.float32, x.shape)
        errors = np.abs(x.astype(np.float64) - decoded)
        most = bound(tensor, parts)
        assert (errors <= most).all(), (sample.name, (errors - most).max())
        if not form.name.endswith("-nested"):
            assert counts.largest_error == pytest.approx(errors.max(), rel=1e-6, abs=1e-44)
            assert counts.largest == np.abs(x).max()


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize("src", SOURCES, ids=str)
def test_any_cut_gives_the_bytes_of_the_whole(form: Any, src: DType) -> None:
    random = np.random.default_rng(7)
    columns = 3 * columns_of(form.name) if columns_of(form.name) > 1 else 77
    x = random.standard_normal((64, columns)).astype(np.float32).astype(src.numpy)
    units = -(-x.size // form.of(x.shape, src).unit_numel)
    whole, counts = encoded(form, x, src)
    for cuts in ((1,), (units - 1,), (3, 4, 17), tuple(range(1, units))):
        parts, some = encoded(form, x, src, cuts=cuts)
        assert parts == whole, cuts
        assert_same_counts(some, counts, str(cuts))


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize("engine", ["llvm", "numpy"])
def test_threads_at_once(form: Any, engine: Engine) -> None:
    random = np.random.default_rng(8)
    columns = max(columns_of(form.name), 320)
    columns -= columns % columns_of(form.name)
    x = random.standard_normal((256, columns)).astype(np.float16)
    tensor = form.of(x.shape, F16)
    encoder = tensor.encoder(F16, engine)
    data, out = memoryview(x.tobytes()), memoryview(bytearray(tensor.parts[0].nbytes))
    step = 16 * columns // tensor.unit_numel  # units

    def encode(first: int) -> QuantCounts:
        start, stop = (unit * tensor.unit_numel * 2 for unit in (first, first + step))
        at, end = (unit * tensor.unit_nbytes for unit in (first, first + step))
        return encoder.encode(data[start:stop], out[at:end], first * tensor.unit_numel)

    with ThreadPoolExecutor(8) as pool:
        counts = sum(pool.map(encode, range(0, tensor.units, step)), QuantCounts())
    expected, expected_counts = encoded(form, x, F16, engine)
    parts = {"": bytes(out), **{key: bytes(part) for key, part in encoder.finish().items()}}
    assert parts == expected
    assert_same_counts(counts, expected_counts, form.name)


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize("shift", [1, 3])
def test_any_alignment(form: Any, shift: int) -> None:
    columns = max(columns_of(form.name), 96)
    x = np.random.default_rng(9).standard_normal((8, columns)).astype(np.float32)
    tensor = form.of(x.shape, F32)
    encoder = tensor.encoder(F32)
    data = memoryview(bytes(shift) + x.tobytes())[shift:]
    out = memoryview(bytearray(shift + tensor.parts[0].nbytes))[shift:]
    encoder.encode(data, out, 0)
    assert bytes(out) == encoded(form, x, F32)[0][""]


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@pytest.mark.parametrize("engine", ["llvm", "numpy"])
def test_nan_and_infinity(form: Any, engine: Engine) -> None:
    """NaN is as 0, an infinity as the largest finite magnitude of its unit; both are counted."""
    width = max(columns_of(form.name), 64)
    x = np.random.default_rng(10).standard_normal((4, width)).astype(np.float32)
    holed, filled = x.copy(), x.copy()
    holed[1, 5], filled[1, 5] = np.nan, 0
    holed[2, 7], holed[2, 40] = -np.inf, np.inf
    for row, columns in ((2, slice(0, 32)), (2, slice(32, width))):
        unit = slice(None) if form.name not in BLOCKED else columns
        finite = np.abs(holed[row, unit])[np.isfinite(holed[row, unit])].max()
        block = filled[row, columns]
        at = np.flatnonzero(~np.isfinite(holed[row, columns]))
        block[at] = np.copysign(finite, holed[row, columns][at])
    holed[3], filled[3] = np.inf, 0
    parts, counts = encoded(form, holed, F32, engine)
    expected, plain = encoded(form, filled, F32, engine)
    assert parts == expected
    assert (counts.nan, counts.inf) == (1, width + 2)
    assert counts.squared_error == pytest.approx(plain.squared_error)
    assert counts.largest == plain.largest


@pytest.mark.parametrize("name", NAMES)
def test_zeros(name: str) -> None:
    """Zeros stay zeros, without an error."""
    shape = (3, max(columns_of(name), 64))
    tensor = SCHEMES[name].of(shape, BF16)
    parts, counts = encoded(SCHEMES[name], np.zeros(shape, BF16.numpy), BF16)
    assert not elements_of(tensor, parts).any()
    assert counts == QuantCounts(numel=math.prod(shape))
    assert (counts.rms, counts.relative) == (0, 0)


def test_float16_overflow_is_counted() -> None:
    x = np.ones((2, 256), np.float32)
    x[0, 3], x[0, 4] = 70_000, -1e9
    _, counts = encoded(SCHEMES["bitsandbytes-int8"], x, F32)
    assert (counts.overflowed, counts.largest_error, counts.relative) == (2, math.inf, math.inf)
    for name in (*BLOCKED, *SEARCHED):
        block = max(columns_of(name), 32)
        _, counts = encoded(SCHEMES[name], x[:, :block], F32)
        assert (counts.overflowed, counts.relative) == (block, math.inf), name
    _, counts = encoded(SCHEMES["int8"], x, F32)
    assert counts.overflowed == 0
    assert math.isfinite(counts.relative)


def test_counts_add_up() -> None:
    a = QuantCounts(0.5, 1.0, 4.0, 2.0, 10, 1, 2, 3)
    b = QuantCounts(0.25, 3.0, 12.0, 7.0, 6, 1, 0, 0)
    assert a + b == QuantCounts(0.5, 4.0, 16.0, 7.0, 16, 2, 2, 3)
    assert (a + b).rms == 0.5
    assert (a + b).relative == 0.5
    assert QuantCounts(squared_error=1.0).relative == math.inf


def test_formats_are_found_by_name() -> None:
    """Importing nothing but the mapping finds every file of the package."""
    assert (
        *("bitsandbytes-int8", "fp4", "fp4-nested", "int8"),
        *("nf4", "nf4-nested", "q4_0", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0"),
    ) == NAMES
    assert all(SCHEMES[name].name == name for name in NAMES)


def test_parts_are_planned_before_a_byte_is_read() -> None:
    """Shapes and sizes of all parts, and what is held until the end, follow from the shape."""
    tensor = SCHEMES["nf4"].of((5, 77), BF16)  # 385 elements: seven blocks
    assert [(part.suffix, part.shape) for part in tensor.parts[:3]] == [
        *(("", (193, 1)), (".absmax", (7,)), (".quant_map", (16,)))
    ]
    assert (tensor.unit_numel, tensor.unit_nbytes, tensor.statistics_nbytes) == (64, 32, 28)
    tensor = SCHEMES["q8_0"].of((5, 64), BF16)
    assert tensor.parts == (Part("", BY_CODE["U8"], (5, 68)),)
    assert (tensor.unit_numel, tensor.unit_nbytes, tensor.statistics_nbytes) == (32, 34, 0)
    tensor = SCHEMES["int8"].of((5, 4, 3), BF16)
    assert [part.shape for part in tensor.parts] == [(5, 4, 3), (5, 1)]
    assert (tensor.unit_numel, tensor.statistics_nbytes) == (12, 20)
    names = [part.name("a.weight") for part in SCHEMES["bitsandbytes-int8"].of((5, 4), F16).parts]
    assert names == ["a.weight", "a.SCB", "a.weight_format"]


@pytest.mark.parametrize(
    ("name", "shape", "src", "why"),
    [
        ("q8_0", (4, 33), F32, "blocks of 32 elements along the last axis"),
        ("q4_0", (), F32, "blocks of 32"),
        ("q6_k", (4, 128), F32, "blocks of 256"),
        ("int8", (64,), F32, "has no rows"),
        ("bitsandbytes-int8", (4, 4, 4), F32, "of matrices"),
        ("nf4", (0, 64), F32, "no elements"),
        ("nf4", (4, 64), F64, "not from float64"),
        ("int8", (4, 64), BY_CODE["I8"], "not from int8"),
        ("q4f16_1", (), F32, "of rows"),
        ("q4f16_0", (4, 64), F32, r"of \(groups, rows, 32\)"),
        ("q4f16_0", (4, 64, 16), F32, r"of \(groups, rows, 32\)"),
        ("q3f16_1", (0, 64), F32, "no elements"),
        ("q3f16_1", (4, 64), F64, "not from float64"),
        ("q4f16_1", (4, 64), BY_CODE["I8"], "not from int8"),
    ],
)
def test_what_cannot_be(name: str, shape: tuple[int, ...], src: DType, why: str) -> None:
    """A tensor that a format cannot hold is refused with the reason."""
    with pytest.raises(ValueError, match=why):
        ALL_SCHEMES[name].of(shape, src)


@pytest.mark.parametrize("name", ["nf4", "q3f16_1"])
def test_cuts_inside_units_are_refused(name: str) -> None:
    tensor = ALL_SCHEMES[name].of((3, 64), F16)
    encoder = tensor.encoder(F16)
    for nbytes, out_nbytes, first in ((126, 32, 0), (128, 32, 1), (128, 31, 0), (512, 128, 0)):
        out = bytearray(out_nbytes)
        with pytest.raises(ValueError, match=name):
            encoder.encode(memoryview(bytes(b"\1" * nbytes)), memoryview(out), first)
        assert not any(out)
    with pytest.raises(ValueError, match="writable"):
        encoder.encode(memoryview(bytes(128)), memoryview(bytes(32)), 0)
    with pytest.raises(ValueError, match="not from int8"):
        tensor.encoder(BY_CODE["I8"])


@pytest.mark.parametrize("block", [32, 128, 4096])
def test_other_blocks(block: int) -> None:
    """Kernels of the other sizes that bitsandbytes has equal the oracle too."""
    form = FourBit("nf4", block=block)
    x = np.random.default_rng(11).standard_normal((3, 5000)).astype(np.float32)
    assert encoded(form, x, F32, "llvm")[0] == encoded(form, x, F32, "numpy")[0]
    with pytest.raises(ValueError, match="not 48"):
        FourBit("nf4", block=48).of((4, 64), F32)


@pytest.mark.slow
# Windows, which is refused, wants a call for a frame of more than a page
@pytest.mark.parametrize("name", [name for name in SCANNED if name != "windows"])
def test_no_kernel_needs_an_external_symbol(name: str) -> None:
    """Every format and source, in each form that the target may get."""
    target = SCANNED[name]()
    for form, src in itertools.product(ALL_FORMS, SOURCES):
        for native_half in {target.native_half, False}:
            image = object_of(form, src, target, native_half=native_half)
            assert llvm.undefined_symbols(image) == (), (form, src, native_half)


def object_of(form: Any, src: DType, target: Target, *, native_half: bool) -> bytes:
    given: Any = {"native_half": native_half, "architecture": target.architecture}
    tensor = form.of(shaped(form.name, np.zeros((64, 256))).shape, src)
    if form.name in SEARCHED:
        return llvm.compile_object(search_ir(form.search(tensor), **given), target)
    recipe = form.recipe
    text = kernel_ir(recipe, src, **given)
    return llvm.compile_object(text, target)


@on_x86
@pytest.mark.parametrize("form", ALL_FORMS, ids=form_id)
def test_kernels_of_the_least_cpu(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(13)
    for src in SOURCES:
        columns = max(columns_of(form.name), 160)
        x = random.standard_normal((9, columns)).astype(np.float32).astype(src.numpy)
        x[0, :2] = np.nan, np.inf
        x = shaped(form.name, x)
        expected, expected_counts = encoded(form, x, src)
        monkeypatch.setattr(llvm, "host_target", lambda: BASELINE)
        llvm.compiled.clear()
        parts, counts = encoded(form, x, src, "llvm")
        monkeypatch.undo()
        llvm.compiled.clear()
        assert parts == expected, src
        assert_same_counts(counts, expected_counts, str(src))


def test_without_llvmlite() -> None:
    """The oracle does the work where llvmlite is missing; asking for the kernel says why not."""
    program = """
import sys
sys.modules["llvmlite"] = None  # as good as not installed
from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import F32
from streamload.errors import UnsupportedCastError
tensor = SCHEMES["q8_0"].of((1, 32), F32)
out = bytearray(34)
counts = tensor.encoder(F32).encode(memoryview(b"\\0\\0\\x80\\x3f" * 32), memoryview(out), 0)
assert counts.numel == 32 and out[2:] == bytes([127]) * 32, out
try:
    tensor.encoder(F32, "llvm")
except UnsupportedCastError as error:
    print(error)
"""
    assert "no LLVM kernel for this machine" in forked.fresh(program)


def test_a_kernel_is_compiled_once() -> None:
    first, second = (SCHEMES["q8_0"].of(shape, F16) for shape in ((1, 32), (7, 64)))
    recipes: list[Any] = [first, second]
    kernels = [compile_kernel(one.codec.recipe, F16, one.format) for one in recipes]
    assert kernels[0] is kernels[1]


def test_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[str] = []

    compile_object = llvm.compile_object

    def counted(ir: str, target: Target) -> bytes:
        compiled.append(ir)
        return compile_object(ir, target)

    monkeypatch.setattr(llvm, "compile_object", counted)
    tensor: Any = SCHEMES["q8_0"].of((1, 32), F16)
    for _ in range(2):
        llvm.compiled.clear()
        compile_kernel(tensor.codec.recipe, F16, "q8_0")
    assert len(compiled) == 1
