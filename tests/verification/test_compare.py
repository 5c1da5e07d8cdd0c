"""Checking against digests, and comparing checkpoints: every difference is found, and named."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import ml_dtypes
import needs
import numpy as np
import pytest
from bench_parts.section import forget
from cast_reference_helpers import pair_id, samples
from conversions import quiet
from gguf_models import write_model
from remote_server import serve
from safetensors_files import write_safetensors, write_sparse

import streamload
from streamload import diff, open_checkpoint, verify_checkpoint
from streamload.checkpoint.digests import SIDECAR, Digest, Digests, hasher
from streamload.codecs.cast_table import make_cast
from streamload.codecs.floats import PAIRS
from streamload.conversion.rename import RenamePatterns
from streamload.core.dtypes import BF16, BY_CODE, F16, DType
from streamload.errors import (
    CheckpointError,
    FileChangedError,
    HeaderError,
    OutOfRangeError,
    ShardNotFoundError,
    TruncatedFileError,
    UnsupportedCastError,
)
from streamload.verification.difference import TensorDifference, ValueDifference
from streamload.verification.verify import Changed

Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]

RNG = np.random.default_rng(5)
TENSORS: dict[str, tuple[str, Sequence[int], bytes]] = {
    "a.w": ("BF16", (4, 8), RNG.bytes(64)),
    "a.big": ("F32", (1500, 1100), RNG.bytes(6_600_000)),  # more than a block
    "b.w": ("I64", (5,), RNG.bytes(40)),
    "b.one": ("F16", (), b"\x00\x3c"),
    "b.none": ("F64", (0, 3), b""),
    "b.half": ("F4", (2, 3), b"\x12\x34\x56"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("there")
    write_safetensors(folder / "model.safetensors", TENSORS)
    listed(folder, TENSORS)
    return folder


def listed(folder: Path, tensors: Tensors) -> None:
    digests = []
    for name, (code, shape, data) in tensors.items():
        one = hasher()
        one.update(memoryview(data))
        digests.append(Digest(name, BY_CODE[code], tuple(shape), len(data), one.hexdigest()))
    written = Digests({digest.name: digest for digest in digests})
    (folder / SIDECAR).write_text(written.to_json())


def written(folder: Path, tensors: Tensors, files: int = 1) -> Path:
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    names = list(tensors)
    for i in range(files if files > 1 else 0):
        part = {name: tensors[name] for name in names[i::files]}
        write_safetensors(folder / f"model-{i + 1:05}-of-{files:05}.safetensors", part, align=8)
    return folder


def one(
    folder: Path, name: str, code: str, values: Any, shape: Sequence[int] | None = None
) -> Path:
    array = np.asarray(values)
    data = array.tobytes()
    return write_safetensors(folder / name, {"w": (code, shape or array.shape, data)})


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def values_of(difference: streamload.Comparison) -> ValueDifference:
    (found,) = difference.differences
    assert found.compared
    assert found.values is not None
    return found.values


# --- against the sidecar --------------------------------------------------------------------------


def test_a_checkpoint_is_what_its_sidecar_says(path: Path) -> None:
    total = sum(len(data) for _, _, data in TENSORS.values())
    told: list[tuple[int, int]] = []
    for where in (path, path / "model.safetensors", str(path), open_checkpoint(path)):
        told.clear()
        found = verify_checkpoint(where, progress=lambda *now: told.append(now))
        assert found.ok
        assert (found.verified_count, found.nbytes) == (len(TENSORS), total)
        assert told[-1] == (total, total)
        assert str(found).startswith(f"verified: 6 tensors, {total / 1e6:.2f} MB in ")


@pytest.mark.parametrize("name", [name for name, (_, _, data) in TENSORS.items() if data])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_one_bit_is_enough(tmp_path: Path, name: str, last: bool) -> None:
    """A bit that flips in a file is found, and its tensor named; all others are verified."""
    code, shape, data = TENSORS[name]
    changed = flipped(data, len(data) - 1 if last else 0)
    written(tmp_path, {**TENSORS, name: (code, shape, changed)})
    listed(tmp_path, TENSORS)
    found = verify_checkpoint(tmp_path, progress=False)
    assert not found.ok
    assert [(c.name, c.what) for c in found.changed] == [(name, "digest")]
    assert found.verified_count == len(TENSORS) - 1
    assert (found.missing, found.unlisted) == ((), ())
    assert name in str(found).splitlines()[1]


def test_what_the_sidecar_and_the_checkpoint_do_not_agree_on(tmp_path: Path) -> None:
    """Tensors that are gone, tensors that it does not list, other dtypes and shapes: all named."""
    bits = TENSORS["a.w"][2]
    now = {
        "a.w": ("F16", (4, 8), bits),
        "b.w": ("I64", (5, 1), TENSORS["b.w"][2]),
        "b.one": TENSORS["b.one"],
        "new": ("U8", (1,), b"0"),
    }
    written(tmp_path, now)
    listed(tmp_path, TENSORS)
    found = verify_checkpoint(tmp_path, progress=False)
    assert found.changed == (
        Changed("a.w", "dtype", "bfloat16", "float16"),
        Changed("b.w", "shape", "5", "5 x 1"),
    )
    assert found.missing == ("a.big", "b.none", "b.half")
    assert found.unlisted == ("new",)
    assert (found.verified_count, found.nbytes) == (1, 2)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [
        *("a.w", "b.w", "a.big", "b.none", "b.half", "new")
    ]
    assert lines[-1].startswith(f"6 tensors not as {SIDECAR} says, 1 verified, 2 B in ")
    data = json.loads(found.to_json())
    assert (data["ok"], data["missing"]) == (False, list(found.missing))
    assert data["changed"][0]["found"] == "float16"


def test_other_files_are_the_same_tensors(tmp_path: Path) -> None:
    written(tmp_path, TENSORS, files=4)
    listed(tmp_path, TENSORS)
    assert verify_checkpoint(tmp_path, progress=False).verified_count == len(TENSORS)
    shard = tmp_path / "model-00002-of-00004.safetensors"
    found = verify_checkpoint(shard, progress=False)
    assert (found.ok, found.verified_count) == (True, 2)
    (tmp_path / "model-00003-of-00004.safetensors").unlink()  # then the sidecar says what is gone
    found = verify_checkpoint(shard, progress=False)
    assert (found.verified_count, len(found.missing)) == (2, 4)


def test_some_of_the_tensors(path: Path, tmp_path: Path) -> None:
    """Patterns choose what is checked, and what would be missing; one that matches nothing errs."""
    found = verify_checkpoint(path, select="b.*", exclude=["b.w"], progress=False)
    assert (found.ok, found.verified_count) == (True, 3)
    written(tmp_path, {"a.w": TENSORS["a.w"], "extra": TENSORS["b.one"]})
    listed(tmp_path, TENSORS)
    found = verify_checkpoint(tmp_path, select=["a.*"], exclude="*.big", progress=False)
    assert found.ok
    for arguments in ({"select": "c.*"}, {"exclude": ["b.w", "W"]}):
        with pytest.raises(ValueError, match="no tensor's name matches"):
            verify_checkpoint(path, progress=False, **arguments)
    with pytest.raises(ValueError, match="a pattern of names is a string"):
        verify_checkpoint(path, select=[1], progress=False)  # type: ignore[list-item]


def test_no_sidecar_or_one_of_tomorrow(tmp_path: Path) -> None:
    """Neither is taken for a checkpoint that is right."""
    written(tmp_path, TENSORS)
    with pytest.raises(ShardNotFoundError, match=SIDECAR):
        verify_checkpoint(tmp_path, progress=False)
    (tmp_path / SIDECAR).write_text('{"format": 2}')
    with pytest.raises(HeaderError, match="newer streamload"):
        verify_checkpoint(tmp_path, progress=False)


def test_a_file_that_shrinks_or_grows(tmp_path: Path) -> None:
    """A file that is not as long as its header was when it was opened is an error of its path."""
    written(tmp_path, TENSORS)
    listed(tmp_path, TENSORS)
    checkpoint = open_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    length = file.stat().st_size
    os.truncate(file, length - 1)
    for call in (
        lambda: verify_checkpoint(checkpoint, progress=False),
        lambda: diff(checkpoint, checkpoint, progress=False),
    ):
        with pytest.raises(TruncatedFileError, match=r"model\.safetensors"):
            call()
    os.truncate(file, length + 1)
    with pytest.raises(FileChangedError, match=f"found {length + 1} bytes"):
        verify_checkpoint(checkpoint, progress=False)
    file.unlink()
    with pytest.raises(ShardNotFoundError):
        diff(checkpoint, checkpoint, progress=False)


@pytest.mark.parametrize("gone", [0, 17, 39])
def test_the_tensor_that_cannot_be_read_is_named(tmp_path: Path, gone: int) -> None:
    tensors: Tensors = {f"t{i:02}": ("U8", (1000,), bytes(1000)) for i in range(40)}
    written(tmp_path, tensors)
    listed(tmp_path, tensors)
    for call in (verify_checkpoint, lambda a, progress: diff(a, tmp_path / "b", progress=progress)):
        file = written(tmp_path / "b", tensors) / "model.safetensors"
        os.replace(file, tmp_path / "model.safetensors")
        written(tmp_path / "b", tensors)
        checkpoint = open_checkpoint(tmp_path)
        cut = checkpoint.tensors[f"t{gone:02}"].stop - 1
        told = []

        def shorten(*now: int, told: list[Any] = told, cut: int = cut) -> None:
            if not told:
                os.truncate(tmp_path / "model.safetensors", cut)
            told.append(now)

        if gone == 0:
            shorten()
        with (  # a file that is open for writing has no lease, which would hold this back
            open(tmp_path / "model.safetensors", "r+b"),
            pytest.raises(TruncatedFileError) as error,
        ):
            call(checkpoint, progress=shorten)
        assert error.value.tensor in checkpoint.tensors
        assert told


# --- two checkpoints: names and shapes ------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2, 4])
@pytest.mark.parametrize("cold", [False, True])
def test_equal_whatever_the_files(path: Path, tmp_path: Path, files: int, cold: bool) -> None:
    """The same tensors in other files, in another order and at other places are equal."""
    backwards = dict(reversed(TENSORS.items()))
    written(tmp_path, backwards, files)
    if cold:
        forget(path)
        forget(tmp_path)
    told: list[tuple[int, int]] = []
    found = diff(path, tmp_path, progress=lambda *now: told.append(now))
    assert found.ok
    total = sum(len(data) for _, _, data in TENSORS.values())
    assert (found.equal_count, found.nbytes) == (len(TENSORS), 2 * total)
    assert told[-1] == (total, total)
    assert str(found).startswith("equal: 6 tensors, 13.20 MB in ")


def test_more_files_than_are_open_at_once(tmp_path: Path) -> None:
    """Forty files against one in another order: few are open at a time, and none is left open."""
    tensors: Tensors = {f"t{i:02}": ("U8", (3,), bytes([i, 1, 2])) for i in range(40)}
    many = written(tmp_path / "many", tensors, files=40)
    few = written(tmp_path / "few", dict(reversed(tensors.items())))
    most = 0

    def count(*now: int) -> None:
        nonlocal most
        most = max(most, len(open_below(tmp_path)))

    for a, b in ((many, few), (few, many)):
        assert diff(a, b, progress=count).ok
    assert 0 < most < 20
    assert open_below(tmp_path) == []


def open_below(folder: Path) -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the one that lists them
            continue
    return [name for name in found if name.startswith(str(folder))]


def test_what_stops_it_closes_the_files(path: Path) -> None:
    """Ctrl-C, or an error of the caller's, goes through; no file stays open."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for call in (
        lambda: verify_checkpoint(path, progress=stop),
        lambda: diff(path, path, progress=stop),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
    assert open_below(path) == []


def test_names_dtypes_and_shapes(path: Path, tmp_path: Path) -> None:
    """Each difference is listed under its tensor: names first, then what both have."""
    changed = {
        "a.w": ("F16", (4, 8), TENSORS["a.w"][2]),
        "b.w": ("I64", (1, 5), TENSORS["b.w"][2]),
        "b.one": ("U16", (), TENSORS["b.one"][2]),
        "b.none": ("I32", (0, 4), b""),
        "b.half": TENSORS["b.half"],
        "c": ("U8", (1,), b"0"),
    }
    found = diff(path, written(tmp_path, changed), progress=False)
    assert (found.only_a, found.only_b) == (("a.big",), ("c",))
    by_name = {d.name: d for d in found.differences}
    assert list(by_name) == ["a.w", "b.w", "b.one", "b.none"]
    assert by_name["a.w"].dtypes == ("bfloat16", "float16")
    assert by_name["b.w"] == TensorDifference("b.w", None, ((5,), (1, 5)), None, False)
    assert by_name["b.one"] == TensorDifference("b.one", ("float16", "uint16"), None, None, False)
    assert found.equal_count == 1
    lines = str(found).splitlines()
    assert lines[1].split(maxsplit=1) == ["a.big", f"only in {path}"]
    assert lines[2].split(maxsplit=1) == ["c", f"only in {tmp_path}"]
    assert "shape 5, 1 x 5" in lines[4]
    assert lines[5].endswith("dtype float16, uint16; values not compared")
    assert lines[6].endswith("dtype float64, int32; shape 0 x 3, 0 x 4")
    assert lines[-1].startswith("6 tensors different, 1 equal, ")
    data = json.loads(found.to_json())
    assert data["differences"][1]["shapes"] == [[5], [1, 5]]


def test_names_that_changed(path: Path, tmp_path: Path) -> None:
    """The first's names are compared under what they became; what is skipped is not there."""
    renamed = {f"model.{name}": entry for name, entry in TENSORS.items()}
    written(tmp_path, renamed)
    assert diff(path, tmp_path, rename=lambda name: f"model.{name}", progress=False).ok
    found = diff(path, tmp_path, rename={"a.w": "model.a.w"}, progress=False)
    assert found.equal_count == 1
    assert len(found.only_a) == len(found.only_b) == len(TENSORS) - 1
    skip = diff(path, path, rename=lambda name: None if name == "a.w" else name, progress=False)
    assert (skip.only_a, skip.only_b) == ((), ("a.w",))
    with pytest.raises(CheckpointError, match="both become"):
        diff(path, path, rename=lambda name: "one", progress=False)


def test_some_tensors_of_two_checkpoints(path: Path, tmp_path: Path) -> None:
    """Patterns choose what is compared; names that match in neither checkpoint are an error."""
    other = written(tmp_path, {"b.w": TENSORS["b.w"], "c.x": TENSORS["b.one"]})
    found = diff(path, other, select=["b.w", "c.*"], progress=False)
    assert (found.only_a, found.only_b, found.equal_count) == ((), ("c.x",), 1)
    assert diff(path, other, select="b.*", exclude=["b.[ohn]*"], progress=False).ok
    with pytest.raises(ValueError, match=r"select: no tensor's name matches 'd\.\*'"):
        diff(path, other, select="d.*", progress=False)


@pytest.mark.parametrize("files", [1, 3])
def test_over_http(monkeypatch: pytest.MonkeyPatch, path: Path, tmp_path: Path, files: int) -> None:
    """A checkpoint on a server has its sidecar there; small tensors do not cost a request each."""
    needs.module("httpx2")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    small = {f"c.{i}": ("U8", (9,), bytes([i] * 9)) for i in range(100)}
    written(tmp_path, TENSORS | small, files)
    listed(tmp_path, TENSORS | small)
    if files > 1:
        found = open_checkpoint(tmp_path).tensors
        weight_map = {name: os.path.basename(info.shard) for name, info in found.items()}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    with serve(tmp_path) as site:
        assert verify_checkpoint(site.url, progress=False).verified_count == 106
        assert len(site.requests) < 30
        if files == 1:
            assert verify_checkpoint(f"{site.url}model.safetensors", progress=False).ok
        assert diff(site.url, tmp_path, progress=False).ok
        found = diff(path, site.url, progress=False)
        assert (found.equal_count, len(found.only_b)) == (6, 100)
    (tmp_path / SIDECAR).unlink()
    with serve(tmp_path) as site, pytest.raises(ShardNotFoundError, match=SIDECAR):
        verify_checkpoint(site.url, progress=False)


# --- two checkpoints: values ----------------------------------------------------------------------


@pytest.mark.parametrize("code", BY_CODE)
def test_an_element_of_any_dtype(tmp_path: Path, code: str) -> None:
    """One bit in one element: that it is one, where it is, and which bits both have."""
    dtype = BY_CODE[code]
    shape = (3, 8, 5)
    data = bytearray(RNG.bytes(dtype.nbytes(math.prod(shape))))
    bit = 77 * dtype.bits  # the lowest of element 77
    data[bit // 8] &= ~(1 << bit % 8) & 0xFF
    a = write_safetensors(tmp_path / "a.safetensors", {"w": (code, shape, bytes(data))})
    data[bit // 8] |= 1 << bit % 8
    b = write_safetensors(tmp_path / "b.safetensors", {"w": (code, shape, bytes(data))})
    assert diff(a, a, progress=False).ok
    found = values_of(diff(a, b, progress=False))
    assert (found.count, found.numel, found.first) == (1, 120, (1, 7, 2))
    mine, theirs = (int(text.split("0x")[1].rstrip(")"), 16) for text in (found.a, found.b))
    assert mine ^ theirs == 1
    assert mine < 1 << dtype.bits
    if dtype.kind in ("int", "uint"):
        assert found.largest == 1
    if dtype.kind == "bool" or dtype.bits < 8:
        assert found.largest is None


@pytest.mark.parametrize("elements", [[0], [2_097_151, 2_097_152], [0, 70_000, 4_999_999]])
def test_elements_are_counted_over_blocks(tmp_path: Path, elements: list[int]) -> None:
    values = RNG.integers(0, 2**15, 5_000_000, dtype=np.uint16)
    other = values.copy()
    for i, element in enumerate(elements):
        other[element] += 10 + i
    a = one(tmp_path, "a.safetensors", "U16", values, (1000, 5000))
    b = one(tmp_path, "b.safetensors", "U16", other, (1000, 5000))
    found = values_of(diff(a, b, progress=False))
    assert (found.count, found.numel) == (len(elements), 5_000_000)
    assert found.first == divmod(elements[0], 5000)
    assert found.largest == 10 + len(elements) - 1
    assert found.a.startswith(f"{values[elements[0]]} (0x")


def test_all_of_a_tensor_differs(tmp_path: Path) -> None:
    """Numbers that are negated: the largest difference is twice the largest of them."""
    values = RNG.standard_normal(300_000).astype(np.float32)
    a = one(tmp_path, "a.safetensors", "F32", values)
    b = one(tmp_path, "b.safetensors", "F32", -values)
    found = values_of(diff(a, b, progress=False))
    assert (found.count, found.bits_only) == (300_000, 0)
    assert found.largest == 2 * float(np.abs(values).max())


@pytest.mark.parametrize("code", ["F16", "BF16", "F32", "F64", "F8_E5M2", "F8_E4M3"])
def test_zeros_and_nan(tmp_path: Path, code: str) -> None:
    """0 and -0 differ, in bits only; NaN equals the same NaN, and not one of another payload."""
    dtype = BY_CODE[code].numpy
    zero = np.array([0.0, 1.0, np.nan], dtype)
    minus = np.array([-0.0, 1.0, np.nan], dtype)
    a, b = (one(tmp_path, f"{n}.safetensors", code, v) for n, v in (("a", zero), ("b", minus)))
    assert diff(a, a, progress=False).ok
    found = values_of(diff(a, b, progress=False))
    assert (found.count, found.bits_only, found.largest, found.first) == (1, 1, 0.0, (0,))
    assert (found.a.split()[0], found.b.split()[0]) == ("0.0", "-0.0")
    assert "(1 only in bits: zeros of other sign, NaN of other payload)" in str(found)
    negative = zero.copy()
    negative.view(np.uint8)[-1] ^= 0x80  # the sign of the NaN
    c = one(tmp_path, "c.safetensors", code, negative)
    found = values_of(diff(a, c, progress=False))
    assert (found.count, found.bits_only, found.largest, found.first) == (1, 1, None, (2,))


@pytest.mark.parametrize(
    ("code", "x", "y", "largest"),
    [
        ("I64", [2**63 - 1, 0], [-(2**63), 0], 2**64 - 1),
        ("I64", [2**60], [2**60 + 1], 1),
        ("U64", [0, 5], [2**64 - 1, 4], 2**64 - 1),
        ("I8", [-128, 3], [127, -3], 255),
        ("U8", [3], [250], 247),
        ("BOOL", [True, False], [False, False], None),
        ("F32", [1.0, 2.0, np.inf], [1.5, 2.0, np.inf], 0.5),
        ("F32", [1.0, 2.0], [np.inf, 2.5], math.inf),
        ("F32", [np.inf, 1.0], [-np.inf, 3.0], math.inf),
        ("F32", [np.nan, 1.0], [2.0, 1.25], 0.25),
        ("F32", [np.nan], [2.0], None),
        ("F64", [1e308], [-1e308], math.inf),
        ("C64", [3 + 4j, 1j], [0, 1j], 5.0),
    ],
)
def test_the_largest_difference(
    tmp_path: Path, code: str, x: Any, y: Any, largest: float | None
) -> None:
    """Exact for integers of any size; infinite against an infinity; none where NaN is in all."""
    dtype = BY_CODE[code].numpy
    a = one(tmp_path, "a.safetensors", code, np.array(x, dtype))
    b = one(tmp_path, "b.safetensors", code, np.array(y, dtype))
    found = diff(a, b, progress=False)
    assert values_of(found).largest == largest
    shown = json.loads(found.to_json())["differences"][0]["values"]["largest"]
    assert shown == ("inf" if largest == math.inf else largest)


def test_the_same_numbers_in_another_dtype(tmp_path: Path) -> None:
    """Where dtypes differ, floats are compared as numbers: what is said is whether those do."""
    values = np.array([0.0, 1.5, np.inf, np.nan, -3.0], np.float32)
    a = one(tmp_path, "a.safetensors", "F32", values)
    half = values.astype(np.float16)
    b = one(tmp_path, "b.safetensors", "F16", half)
    (found,) = diff(a, b, progress=False).differences
    assert found == TensorDifference("w", ("float32", "float16"), None, None, True)
    assert str(found) == "dtype float32, float16; the same numbers"
    half[1] = 1.25
    c = one(tmp_path, "c.safetensors", "F16", half)
    found = diff(a, c, progress=False).differences[0]
    assert found.values is not None
    assert (found.values.count, found.values.first, found.values.largest) == (1, (1,), 0.25)
    assert found.values.bits_only == 0


# --- through a cast -------------------------------------------------------------------------------


def cast(src: DType, dst: DType, data: bytes, out_of_range: Any = "inf") -> bytes:
    """What streamload's own kernels make of bytes."""
    out = bytearray(len(data) // src.itemsize * dst.itemsize)
    make_cast(src, dst, out_of_range=out_of_range)(memoryview(data), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("out_of_range", ["inf", "clamp"])
@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=pair_id)
def test_a_conversion_is_verified(
    tmp_path: Path, src: DType, dst: DType, out_of_range: Any
) -> None:
    """What the kernels make of any bits is what numpy makes of them, and one bit off is found."""
    bits = samples(src)
    data = bits.tobytes()
    a = one(tmp_path, "a.safetensors", src.code, bits)
    converted = cast(src, dst, data, out_of_range)
    b = write_safetensors(tmp_path / "b.safetensors", {"w": (dst.code, bits.shape, converted)})
    assert diff(a, b, dtype=dst.name, out_of_range=out_of_range, progress=False).ok
    (other,) = diff(a, b, progress=False).differences
    assert other.dtypes == (src.name, dst.name)
    numbers = np.frombuffer(converted, dst.numpy)
    element = int(np.flatnonzero(np.isfinite(numbers))[-1])
    wrong = flipped(converted, element * dst.itemsize)
    c = write_safetensors(tmp_path / "c.safetensors", {"w": (dst.code, bits.shape, wrong)})
    found = values_of(diff(a, c, dtype=dst.name, out_of_range=out_of_range, progress=False))
    assert (found.count, found.first) == (1, (element,))


def test_what_a_cast_does_not_keep(tmp_path: Path) -> None:
    """Payloads of NaN are not compared after a cast; the sign of a zero is, and so is clamping."""
    a = one(tmp_path, "a.safetensors", "F32", np.array([np.nan, -0.0, 1e6], np.float32))
    good = np.array([0x7E00, 0x8000, 0x7C00], np.uint16)
    b = one(tmp_path, "b.safetensors", "F16", good)
    assert diff(a, b, dtype="float16", progress=False).ok
    found = values_of(diff(a, b, dtype="float16", out_of_range="clamp", progress=False))
    assert (found.count, found.first, found.largest) == (1, (2,), math.inf)
    assert found.a == "65504.0 (0x7bff)"
    odd = np.array([0xFE01, 0x0000, 0x7C00], np.uint16)
    c = one(tmp_path, "c.safetensors", "F16", odd)
    found = values_of(diff(a, c, dtype="float16", progress=False))
    assert (found.count, found.bits_only, found.first) == (1, 1, (1,))
    with pytest.raises(OutOfRangeError) as error:
        diff(a, b, dtype="float16", out_of_range="error", progress=False)
    assert (error.value.tensor, error.value.overflowed) == ("w", 1)
    inf = one(tmp_path, "d.safetensors", "F32", np.array([np.inf, 2.0], np.float32))
    half = one(tmp_path, "e.safetensors", "F16", np.array([np.inf, 2.0], np.float16))
    assert diff(inf, half, dtype="float16", out_of_range="error", progress=False).ok


def test_dtypes_by_name(tmp_path: Path) -> None:
    """Patterns decide tensor by tensor, as of a load; integers stay; another dtype is named."""
    x = np.array([1.0, 2.5], ml_dtypes.bfloat16)
    source: Tensors = {
        "w": ("BF16", (2,), x.tobytes()),
        "norm": ("BF16", (2,), x.tobytes()),
        "ids": ("I32", (1,), bytes(4)),
    }
    a = written(tmp_path / "a", source)
    target: Tensors = {
        "w": ("F16", (2,), x.astype(np.float16).tobytes()),
        "norm": ("F32", (2,), x.astype(np.float32).tobytes()),
        "ids": source["ids"],
    }
    b = written(tmp_path / "b", target)
    assert diff(a, b, dtype={"norm": "float32", "*": "float16"}, progress=False).ok
    (found,) = diff(a, b, dtype="float16", progress=False).differences
    assert (found.name, found.dtypes, found.values) == ("norm", ("float16", "float32"), None)
    with pytest.raises(ValueError, match="int8"):
        diff(a, b, dtype="int8", progress=False)
    with pytest.raises(ValueError, match="out_of_range"):
        diff(a, b, dtype="float16", out_of_range="wrap", progress=False)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedCastError, match="'w'"):
        diff(a, b, dtype="float8_e5m2", progress=False)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Tensors of 100 MB that differ everywhere take less than 40 MB to compare, or to check."""
    values = np.ones(25_000_000, np.float32)
    a = one(tmp_path / "a", "model.safetensors", "F32", values).parent
    b = one(tmp_path / "b", "model.safetensors", "F16", values.astype(np.float16) + 1).parent
    listed(a, {"w": ("F32", values.shape, values.tobytes())})
    del values
    code = (
        "import sys\n"
        "from streamload import diff, open_checkpoint, verify_checkpoint\n"
        "a, b = map(open_checkpoint, sys.argv[1:])\n"
        "def kib(key):\n"
        "    return sum(int(l.split()[1]) for l in open('/proc/self/status') if key in l)\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # starts VmHWM again
        "before = kib('VmRSS')\n"
        "found = diff(a, b, dtype='float16', progress=False).differences[0].values.count\n"
        "print(verify_checkpoint(a, progress=False).ok, found, kib('VmHWM') - before)\n"
    )
    ok, count, grown_kib = forked.fresh(code, a, b).split()
    assert (ok, int(count)) == ("True", 25_000_000)
    assert int(grown_kib) < 40_000


def test_no_kernel_takes_part(tmp_path: Path) -> None:
    """Casts, codes, dequantized weights and transposes are computed without LLVM."""
    weight = RNG.standard_normal((64, 96)).astype(np.float32).tobytes()
    plain = written(tmp_path / "plain", {"h.0.attn.c_attn.weight": ("F32", (64, 96), weight)})
    (plain / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2Model"]}')
    codes, half, back = (tmp_path / name for name in ("codes", "half", "back"))
    streamload.convert(plain, codes, quant="nf4", progress=False)
    streamload.convert(plain, half, dtype="float16", progress=False)
    streamload.convert(codes, back, dtype="float16", progress=False)
    code = (
        "import sys, streamload\n"
        "plain, codes, half, back = sys.argv[1:]\n"
        "for a, b, to in ((plain, codes, {'quant': 'nf4'}), (plain, half, {'dtype': 'float16'}),"
        " (codes, back, {'dtype': 'float16'})):\n"
        "    assert streamload.diff(a, b, progress=False, **to).ok, b\n"
        "    assert not streamload.diff(a, b, progress=False).ok, b\n"
        "print('llvmlite' in sys.modules)\n"
    )
    assert forked.fresh(code, plain, codes, half, back) == "False\n"


# --- the commands ---------------------------------------------------------------------------------

Command = Callable[..., tuple[str, str]]


def test_verify(here: Command, path: Path, tmp_path: Path) -> None:
    """A good checkpoint: one line and 0. A bad one: what is wrong, a verdict on stderr, and 1."""
    out, err = here("verify", path)
    assert out.startswith("verified: 6 tensors, ")
    assert err == ""
    code, shape, data = TENSORS["b.w"]
    written(
        tmp_path, {**TENSORS, "b.w": (code, shape, flipped(data, 3)), "new\x1b\n": TENSORS["b.one"]}
    )
    listed(tmp_path, TENSORS)
    out, err = here("verify", tmp_path, code=1)
    title, *rows = out.splitlines()
    assert title.split() == ["tensor", "problem"]
    assert rows[0].startswith("b.w ")
    assert rows[1].startswith(r"new\x1b\n ")
    assert len(rows) == 2
    assert err.startswith(f"streamload: 2 tensors not as {SIDECAR} says, 5 verified")
    assert here("verify", tmp_path, "--select", "a.*")[1] == ""
    out, _ = here("verify", tmp_path, "--json", code=1)
    found = json.loads(out)
    assert (found["ok"], [c["name"] for c in found["changed"]]) == (False, ["b.w"])


def test_verify_a_conversion(here: Command, tmp_path: Path) -> None:
    bits = samples(BF16)
    a = one(tmp_path, "a.safetensors", "BF16", bits)
    data = cast(BF16, F16, bits.tobytes())
    b = write_safetensors(tmp_path / "b.safetensors", {"out.w": ("F16", bits.shape, data)})
    arguments = ("verify", a, b, "--rename", "*=out.*")
    out, err = here(*arguments, "--dtype", "float16")
    assert out.startswith("equal: 1 tensor, ")
    assert err == ""
    out, err = here(*arguments, "--dtype", "*=float16", "--out-of-range", "clamp", code=1)
    assert "28672 of 65536 values differ" in out
    assert err.startswith("streamload: 1 tensor different, 0 equal, ")
    out, _ = here(*arguments, "--json", code=1)
    assert json.loads(out)["differences"][0]["dtypes"] == ["bfloat16", "float16"]


MADE: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "patterns": {"dtype": {"*norm*": "float32", "*": "float16"}, "out_of_range": "clamp"},
    "nf4": {"quant": "nf4"},
    "some": {"select": ["*mlp*"], "quant": {"*up*": "q8_0"}, "dtype": "float16"},
    "renamed": {"rename": {"model.norm.weight": "norm"}},
    "mlx": {"runtime": "mlx"},
    "gguf": {"to": "gguf"},
    "gguf-f16": {"to": "gguf", "dtype": "float16"},
    "gguf-q8_0": {"to": "gguf", "quant": "q8_0"},
    "gguf-mixed": {"to": "gguf", "quant": {"*mlp*": "q4_0", "*": "q5_k_m"}},
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_a_conversion_says_how_it_was_made(
    here: Command, tmp_path: Path, family: str, name: str
) -> None:
    """``verify OUT`` and ``verify SOURCE OUT`` without another word; one bit is enough for 1."""
    if family == "gpt2" and not name.startswith("gguf"):
        pytest.skip("its names are others")
    source, out = write_model(tmp_path / "in", family), tmp_path / "out"
    quiet(source, out, **MADE[name])
    assert here("verify", out)[0].startswith("verified: ")
    said, err = here("verify", source, out)
    assert (said.startswith("equal: "), err) == (True, "")
    (file,) = (path for path in out.iterdir() if path.suffix in (".gguf", ".safetensors"))
    tensor = max(open_checkpoint(out).tensors.values(), key=lambda t: (t.nbytes, t.start))
    with file.open("r+b") as changed:
        changed.seek(tensor.start + 2)
        byte = changed.read(1)[0]
        changed.seek(tensor.start + 2)
        changed.write(bytes([byte ^ 1]))
    assert "1 tensor not as" in here("verify", out, code=1)[1]
    said, err = here("verify", source, out, code=1)
    assert "1 tensor different" in err, said


@pytest.mark.parametrize("to", ["safetensors", "irpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_blocks_that_became_floats_by_default(
    here: Command, tmp_path: Path, family: str, to: str
) -> None:
    """Conversions of a quantized GGUF file, of which no ``dtype=`` is stated for some weights."""
    blocks, out = tmp_path / "blocks", tmp_path / "out"
    quiet(write_model(tmp_path / "in", family), blocks, to="gguf", quant="q8_0")
    quiet(blocks, out, to=to, dtype={"*.0.*": "bfloat16"})
    assert here("verify", blocks, out)[0].startswith("equal: ")


def test_what_a_comparison_does_not_compute(here: Command, tmp_path: Path) -> None:
    """It is refused with the command that checks the digests."""
    source, out = write_model(tmp_path / "in", "llama"), tmp_path / "out"
    quiet(source, out, rename=lambda name: f"a.{name}")
    quiet(source, tmp_path / "q8_0", to="gguf", quant="q8_0")
    quiet(tmp_path / "q8_0", tmp_path / "q4_0", to="gguf", quant="q4_0")
    for a, b in ((source, out), (tmp_path / "q8_0", tmp_path / "q4_0")):
        assert f"`streamload verify {b}`" in here("verify", a, b, code=1)[1]
        assert here("verify", b)[0].startswith("verified: ")


def test_alike_lines_are_one(here: Command, tmp_path: Path) -> None:
    """Tensors whose names differ in numbers alone, and that differ alike."""
    source, out = write_model(tmp_path / "in", "llama"), tmp_path / "out"
    quiet(source, out, rename=RenamePatterns.parse(["*.q_proj.*=*.query.*"]), exclude=["*norm*"])
    said, _ = here("diff", source, out, code=1)
    rows = [line.split("  ")[0] for line in said.splitlines()]
    assert "model.layers.*.self_attn.q_proj.weight (2 alike)" in rows
    assert "model.norm.weight" in rows
    assert len(rows) == 7
    assert "9 tensors different" in said


def test_diff(here: Command, path: Path, tmp_path: Path) -> None:
    """Like diff(1): what differs on stdout, and exit code 1 where something does."""
    out, err = here("diff", path, path / "model.safetensors")
    assert (out.startswith("equal: 6 tensors, "), err) == (True, "")
    other = written(tmp_path, {name: TENSORS[name] for name in ("a.w", "b.w")})
    out, err = here("diff", path, other, code=1)
    assert [line.split()[0] for line in out.splitlines()] == [
        *("tensor", "a.big", "b.one", "b.none", "b.half", "4")
    ]
    assert err == ""
    assert here("diff", path, other, "--select", "?.w")[1] == ""
    data = json.loads(here("diff", path, other, "--json", code=1)[0])
    assert (data["ok"], data["only_a"][0], data["equal_count"]) == (False, "a.big", 2)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["verify"], 2, "PATH"),
        (["diff", "PATH"], 2, "B"),
        (["verify", "PATH", "--dtype", "float16"], 2, "need CONVERTED"),
        (["verify", "PATH", "--out-of-range", "clamp"], 2, "need CONVERTED"),
        (["diff", "PATH", "PATH", "--dtype", "int8"], 2, "int8"),
        (["diff", "PATH", "PATH", "--rename", "a"], 2, "FROM=TO"),
        (["diff", "PATH", "PATH", "--select", "nope*"], 2, "nope*"),
        (["diff", "PATH", "nowhere"], 1, "nowhere"),
        (["verify", "FILE"], 1, SIDECAR),
        (["diff", "PATH", "PATH", "--dtype", "float8_e5m2"], 1, "float8_e5m2"),
        (["diff", "FILE", "FILE", "--dtype", "float16", "--out-of-range", "error"], 1, "'w'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done(
    here: Command, path: Path, tmp_path: Path, arguments: Sequence[str], code: int, message: str
) -> None:
    """Nothing on stdout, one line on stderr, and exit code 1 for what is there, 2 for usage."""
    file = one(tmp_path, "other.safetensors", "F32", np.array([1e30], np.float32))
    names = {"PATH": str(path), "FILE": str(file)}
    out, err = here(*(names.get(argument, argument) for argument in arguments), code=code)
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c(tmp_path: Path) -> None:
    """In the middle of a file: one line, and exit code 130."""
    nbytes = 2**40  # of nothing: it takes minutes to read
    file = write_sparse(tmp_path / "model.safetensors", {"w": ("U8", [nbytes])})
    written = Digests({"w": Digest("w", BY_CODE["U8"], (nbytes,), nbytes, "0" * 32)})
    (tmp_path / SIDECAR).write_text(written.to_json())
    process = subprocess.Popen(
        [sys.executable, "-m", "streamload", "verify", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not is_open(process.pid, file):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "streamload: interrupted\n")
    assert process.returncode == 130


def is_open(pid: int, file: Path) -> bool:
    try:
        fds = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # one was closed meanwhile
        return False
    return str(file) in fds
