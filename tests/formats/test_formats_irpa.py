"""IREE's parameter archives: IREE opens what is written, and what it wrote is read."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import needs
import numpy as np
import pytest
from conversions import quiet, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from irpa_files import EXTERNAL, SKIPPED, SPLAT, Item, archive, said
from parameters import few
from remote_server import serve
from safetensors_files import write_safetensors

import streamload
from streamload.core.dtypes import BY_CODE
from streamload.errors import CheckpointError, HeaderError, TruncatedFileError

Array = np.ndarray[Any, Any]
LARGEST = 2**64 - 1


def source(folder: Path) -> dict[str, bytes]:
    """A checkpoint with a tensor of every dtype, an empty one, a scalar; gives their bytes."""
    rng = np.random.default_rng(0)
    shapes = {"empty": ("F32", (0, 4)), "scalar": ("BF16", ()), "": ("U8", (3,))}
    shapes |= {f"t.{code}": (code, (3, 8)) for code in BY_CODE}
    tensors = {}
    for name, (code, shape) in shapes.items():
        nbytes = BY_CODE[code].nbytes(int(np.prod(shape)))
        tensors[name] = (code, shape, rng.integers(0, 2, nbytes, np.uint8).tobytes())
    write_safetensors(folder / "model.safetensors", tensors)
    return {name: data for name, (_, _, data) in tensors.items()}


def loaded(path: Path | str, **options: Any) -> dict[str, Array]:
    return dict(streamload.iterate(path, device="host", **options))


# --- what is written ------------------------------------------------------------------------------


def test_every_field_is_where_the_format_has_it(tmp_path: Path) -> None:
    arrays = {"b": np.arange(7, dtype=np.uint8), "a": np.arange(30, dtype=np.float16)}
    codes = {"b": "U8", "a": "F16"}
    tensors = {n: (codes[n], (1, *a.shape), a.tobytes()) for n, a in arrays.items()}
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    quiet(tmp_path / "in", tmp_path / "out", to="irpa", verify=True)
    written = tensors_of(tmp_path / "in")
    items = [
        Item(name.encode(), data, said(dtype.name, shape))
        for name, (dtype, shape, data) in written.items()
    ]
    expected = archive(items)
    assert len(expected) < 4096
    assert (tmp_path / "out" / "model.irpa").read_bytes() == expected.ljust(4096, b"\0")


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    source(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="irpa", verify=True)
    quiet(tmp_path / "out", tmp_path / "back", verify=True)
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "back")
    assert tensors_of(tmp_path / "back") == tensors_of(tmp_path / "in")
    assert not list((tmp_path / "back").glob("*.irpa"))  # weights are not copied beside weights


def test_several_files(tmp_path: Path) -> None:
    found = source(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="irpa", max_shard_size=4096)
    names = sorted(path.name for path in (tmp_path / "out").glob("*.irpa"))
    assert len(names) > 1 and names[0] == f"model-00001-of-{len(names):05}.irpa"
    assert all((tmp_path / "out" / name).stat().st_size <= 4096 for name in names)
    index = json.loads((tmp_path / "out" / "model.irpa.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    whole = tensors_of(tmp_path / "in")
    assert tensors_of(tmp_path / "out") == whole
    assert tensors_of(tmp_path / "out" / "model.irpa.index.json") == whole
    with serve(tmp_path / "out") as site:
        assert streamload.open_checkpoint(site.url).tensors.keys() == whole.keys()
    (tmp_path / "out" / "model.irpa.index.json").unlink()
    assert tensors_of(tmp_path / "out") == whole
    (tmp_path / "out" / names[0]).unlink()
    with pytest.raises(CheckpointError, match=names[0]):
        streamload.open_checkpoint(tmp_path / "out")


def test_a_quantized_weight_stays_one(tmp_path: Path) -> None:
    """Its parts are entries, config.json says what they are, and it is dequantised from there."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((64, 96)).astype(np.float32)
    write_safetensors(
        tmp_path / "in" / "model.safetensors", {"a.weight": ("F32", (64, 96), weight.tobytes())}
    )
    (tmp_path / "in" / "config.json").write_text('{"model_type": "llama"}')
    for to in ("irpa", "safetensors"):
        quiet(tmp_path / "in", tmp_path / to, to=to, quant="int8")
    found, expected = (loaded(tmp_path / to, dtype="float32") for to in ("irpa", "safetensors"))
    assert np.array_equal(found["a.weight"], expected["a.weight"])
    assert np.abs(found["a.weight"] - weight).max() < 0.02


# --- what is read ---------------------------------------------------------------------------------


def test_splats_links_and_skipped_entries(tmp_path: Path) -> None:
    """A pattern fills its length, archives follow each other, and erased entries are not there."""
    bf16 = np.array([1.5], ml_dtypes.bfloat16).tobytes()
    pair = np.array([1, -2], np.float64).tobytes()
    one = archive(
        [
            Item(b"w", bytes(range(24)), said("uint8", [2, 12])),
            Item(b"gone", b"abc", fields={"type": SKIPPED}),
            Item(b"half", bf16, said("bfloat16", [5, 7], b"PYTORCH:"), nbytes=70),
            Item(b"once", bf16, said("bfloat16", []), nbytes=2),
            Item(b"raw", b"\1\2\3\4", b"of somebody else", nbytes=12),
        ]
    )
    one = one.ljust(-(-len(one) // 16) * 16, b"\0")
    two = archive([Item(b"wide", pair, nbytes=160), Item(b"v", b"xyz")], start=len(one))
    linked = one[:16] + struct.pack("<Q", len(one)) + one[24:]
    (tmp_path / "model.irpa").write_bytes(linked + two)
    (tmp_path / "other").write_bytes(linked + two)  # known by its first bytes
    expected: dict[str, Array] = {
        "w": np.arange(24, dtype=np.uint8).reshape(2, 12),
        "half": np.full((5, 7), 1.5, ml_dtypes.bfloat16),
        "once": np.array(1.5, ml_dtypes.bfloat16),
        "raw": np.tile(np.arange(1, 5, dtype=np.uint8), 3),
        "wide": np.frombuffer(pair * 10, np.uint8),
        "v": np.frombuffer(b"xyz", np.uint8),
    }
    with serve(tmp_path) as site:
        for path in (tmp_path, tmp_path / "other", site.url, site.url + "model.irpa"):
            found = loaded(path, dtype="checkpoint")
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
                assert found[name].tobytes() == array.tobytes(), name
    assert np.array_equal(loaded(tmp_path, dtype="float16")["half"], np.full((5, 7), 1.5))


def test_a_splat_is_read_in_parts(tmp_path: Path) -> None:
    splat = Item(b"w", np.float32(0.1).tobytes(), said("float32", [1000, 3001]), nbytes=12_004_000)
    (tmp_path / "model.irpa").write_bytes(archive([splat]))
    quiet(tmp_path, tmp_path / "out", dtype="float16", verify=True)
    assert (loaded(tmp_path / "out")["w"] == np.float16(np.float32(0.1))).all()
    assert (tmp_path / "model.irpa").stat().st_size < 400


def bare(path: Path, tensors: dict[str, tuple[Any, Any, bytes]]) -> None:
    """An archive without metadata, as IREE's save_archive_file writes."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(archive([Item(n.encode(), data) for n, (_, _, data) in tensors.items()]))


def test_like(tmp_path: Path, here: Callable[..., tuple[str, str]]) -> None:
    """An archive of bytes alone gets the dtypes and shapes of another checkpoint."""
    source(tmp_path / "in")
    tensors = tensors_of(tmp_path / "in")
    bare(tmp_path / "bare" / "model.irpa", tensors | {"more": (None, None, b"123")})
    plain = streamload.open_checkpoint(tmp_path / "bare")
    assert {(i.dtype.code, i.shape == (i.nbytes,)) for i in plain.tensors.values()} == {
        ("U8", True)
    }
    shaped = streamload.open_checkpoint(tmp_path / "bare", like=tmp_path / "in")
    assert shaped.tensors["more"] == plain.tensors["more"]
    assert {i.name: (i.dtype, i.shape) for i in shaped.tensors.values() if i.name != "more"} == {
        name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()
    }
    options = ["--like", str(tmp_path / "in"), "--exclude", "more", "--verify"]
    here("convert", tmp_path / "bare", tmp_path / "out", *options)
    assert tensors_of(tmp_path / "out") == tensors
    assert "t.BF16" in here("inspect", tmp_path / "bare", "--like", tmp_path / "in")[0]


def test_like_is_for_bytes_alone(tmp_path: Path) -> None:
    """What an archive says of a tensor itself is true, whatever another checkpoint has."""
    write_safetensors(tmp_path / "like.safetensors", {n: ("F16", (2, 3), bytes(12)) for n in "uvw"})
    items = [
        Item(b"u", bytes(12), said("uint8", [12])),
        Item(b"v", bytes(12), said("bfloat16", [6])),
        Item(b"w", bytes(12)),
    ]
    (tmp_path / "a.irpa").write_bytes(archive(items))
    found = streamload.open_checkpoint(tmp_path / "a.irpa", like=tmp_path / "like.safetensors")
    assert [(info.dtype.code, info.shape) for info in found.tensors.values()] == [
        ("U8", (12,)),
        ("BF16", (6,)),
        ("F16", (2, 3)),
    ]


def test_like_says_what_does_not_fit(tmp_path: Path) -> None:
    """Another length, no common name, and files that need no such help."""
    write_safetensors(tmp_path / "like.safetensors", {"w": ("F32", (2, 3), bytes(24))})
    like = tmp_path / "like.safetensors"
    (tmp_path / "a.irpa").write_bytes(archive([Item(b"w", bytes(12))]))
    (tmp_path / "b.irpa").write_bytes(archive([Item(b"v", bytes(24))]))
    with pytest.raises(CheckpointError, match=r"'w'.*expected 24 bytes, float32 .*\[2, 3\].* 12 b"):
        streamload.open_checkpoint(tmp_path / "a.irpa", like=like)
    with pytest.raises(CheckpointError, match=r"no tensor has the name.*expected w, found v"):
        streamload.open_checkpoint(tmp_path / "b.irpa", like=like)
    with pytest.raises(ValueError, match=r"like= is for files without dtypes \(irpa\)"):
        streamload.open_checkpoint(like, like=like)


# --- hostile files --------------------------------------------------------------------------------


def with_fields(data: bytes = b"12345678", metadata: bytes = b"", **fields: int) -> bytes:
    """An archive whose only entry has other numbers than it should."""
    return archive([Item(b"w", data, metadata, fields=fields)])


def splat(repeated: bytes, nbytes: int, **fields: int) -> bytes:
    """An archive with a splat."""
    return archive([Item(b"w", repeated, nbytes=nbytes, fields=fields)])


def with_header(**fields: Any) -> bytes:
    return archive([Item(b"w", b"12345678")], **fields)


def overlapping_names() -> bytes:
    """An archive whose entries all have nearly all of the metadata as their names."""
    text = b"n" * 20_000
    items = [Item(text, b"")]
    items += [Item(b"", b"", fields={"name": i, "name_nbytes": 19_000}) for i in range(1, 1000)]
    return archive(items)


def shared_segments() -> bytes:
    """Very many linked archives with the same long metadata."""
    count, shared = 3000, 10**6
    headers = (
        archive([], next=96 if i + 1 < count else 0, metadata=96 * (count - i))
        for i in range(count)
    )
    fixed = (h[:64] + struct.pack("<Q", shared) + h[72:] for h in headers)
    return b"".join(h.ljust(96, b"\0")[:96] for h in fixed) + bytes(shared)


TENSOR = "TENSORv0:"
HOSTILE = {
    "magic": (with_header(magic=b"IRPB"), "no parameter archive is at byte 0"),
    "major version": (with_header(major=1), "unknown version: expected 0.0, found 1.0"),
    "minor version": (with_header(minor=1), "unknown version"),
    "header too short": (with_header(size=87), "the header's length"),
    "header too long": (with_header(size=LARGEST), "the header's length"),
    "count too large": (with_header(count=2), "entry 1 is cut off"),
    "count of a billion": (with_header(count=LARGEST), "entry 1 is cut off"),
    "entries behind": (with_header(entries=LARGEST), "the entries are cut off"),
    "entries too long": (with_header(entries_nbytes=LARGEST), "the entries are cut off"),
    "entries a bit long": (with_header(count=2, entries_nbytes=100), "entry 1"),
    "metadata behind": (with_header(metadata=2**63), "the metadata are cut off"),
    "metadata too long": (with_header(metadata_nbytes=2**63), "the metadata are cut off"),
    "data behind": (with_header(storage=LARGEST), "the data are cut off"),
    "data too long": (with_header(storage_nbytes=9), "the data are cut off"),
    "next inside": (with_header(next=8), "no parameter archive is at byte 8"),
    "next behind": (with_header(next=LARGEST), "no parameter archive is at byte"),
    "entry of nothing": (with_fields(size=0), "entry 0 is cut off"),
    "entry too short": (with_fields(size=59), "entry 0 is cut off"),
    "entry too long": (with_fields(size=LARGEST), "entry 0 is cut off"),
    "no room for data": (with_fields(size=75), "type or length"),
    "no room for a splat": (splat(b"ab", 4, size=84), "type or length"),
    "a splat of data": (with_fields(type=SPLAT), "type or length"),
    "external": (with_fields(type=EXTERNAL), "in another file.*iree-convert-parameters"),
    "unknown type": (with_fields(type=2**32 - 1), "of type 4294967295"),
    "name behind": (with_fields(name=LARGEST), "lead out of"),
    "name too long": (with_fields(name_nbytes=LARGEST), "lead out of"),
    "name not UTF-8": (archive([Item(b"\xff", b"a")]), "not UTF-8"),
    "name half a pair": (archive([Item(b"\xed\xa0\x80", b"a")]), "not UTF-8"),
    "names alike": (archive([Item(b"w", b"a"), Item(b"w", b"b")]), "not unique"),
    "names overlap": (overlapping_names(), "overlap"),
    "metadata out": (with_fields(metadata_nbytes=99), "'w'.*lead out of"),
    "alignment of 3": (with_fields(alignment=3), "is not aligned"),
    "alignment missed": (with_fields(alignment=2**63), "is not aligned"),
    "data out": (with_fields(nbytes=9), "'w'.*leads out of the archive's data"),
    "data far out": (with_fields(at=LARGEST), "leads out of the archive's data"),
    "pattern of nothing": (splat(b"", 4), "a pattern of 1, 2, 4, 8 or 16"),
    "pattern of 3": (splat(b"abc", 9), "a pattern of 1, 2, 4, 8 or 16"),
    "pattern of 255": (splat(b"a", 255, pattern=255), "a pattern of 1, 2, 4, 8 or 16"),
    "pattern too long": (splat(b"abcd", 6), "divides the length"),
    "splat too long": (splat(b"abcd", 2**64 - 4), "a splat is too long"),
    "splats too long": (
        archive([Item(b"v", b"a", nbytes=2**61), Item(b"w", b"a", nbytes=2**61)]),
        "a splat is too long",
    ),
    "no JSON": (with_fields(metadata=TENSOR.encode() + b"{"), "metadata are not valid"),
    "no object": (with_fields(metadata=TENSOR.encode() + b"[]"), "metadata are not valid"),
    "nested": (with_fields(metadata=f"{TENSOR}{'[' * 10**5}".encode()), "metadata are not valid"),
    "nested object": (with_fields(metadata=TENSOR.encode() + b'{"a":' * 10**5), "not valid"),
    "long number": (with_fields(metadata=said("uint8", [10**4000])), "metadata are not valid"),
    "no shape": (with_fields(metadata=said("uint8", None)), "its shape is not valid"),
    "shape of text": (with_fields(metadata=said("uint8", ["8"])), "its shape is not valid"),
    "shape of truth": (with_fields(metadata=said("uint8", [True, 8])), "its shape is not valid"),
    "shape below 0": (with_fields(metadata=said("uint8", [-1, -8])), "its shape is not valid"),
    "huge shape": (with_fields(metadata=said("uint8", [2**62] * 10**4)), "its shape is too large"),
    "other shape": (with_fields(metadata=said("float32", [3])), "do not agree.*96 bits.*8 bytes"),
    "half bytes": (with_fields(metadata=said("float4_e2m1fn", [17])), "do not agree"),
    "shared metadata": (shared_segments(), "the headers are too long"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path: Path, name: str) -> None:
    """Each is one error of ours that says what is wrong, and costs no more than the file."""
    data, message = HOSTILE[name]
    (tmp_path / "model.irpa").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            streamload.open_checkpoint(tmp_path / "model.irpa")
        assert tracemalloc.get_traced_memory()[1] < 20 * len(data) + 2_000_000
    finally:
        tracemalloc.stop()
    assert type(caught.value) in (HeaderError, TruncatedFileError)
    assert caught.value.path == str(tmp_path / "model.irpa")


def test_metadata_of_something_else_are_bytes(tmp_path: Path) -> None:
    """What names no dtype that is known here is no error: the format leaves metadata free."""
    others = [b"", b"hello", b"TENSORv1:{}", TENSOR.encode() + b"{}", said(["uint8"], [8])]
    others += [said("complex128", []), said("uint8", [8]).replace(b"Tensor", b"Other")]
    items = [Item(f"{i}".encode(), b"12345678", each) for i, each in enumerate(others)]
    (tmp_path / "model.irpa").write_bytes(archive(items))
    found = streamload.open_checkpoint(tmp_path / "model.irpa").tensors.values()
    assert [(info.dtype.code, info.shape) for info in found] == [("U8", (8,))] * len(others)


def test_very_many_archives_take_little_time(tmp_path: Path) -> None:
    """Memory is looked at now and then, and not for each: that would take 100 s for 2 MB."""
    last = archive([])
    (tmp_path / "model.irpa").write_bytes(archive([], next=len(last)) * 4000 + last)
    begun = time.thread_time()
    assert len(streamload.open_checkpoint(tmp_path / "model.irpa")) == 0
    assert time.thread_time() - begun < 1.5


def test_a_long_header_of_a_long_file(tmp_path: Path) -> None:
    """Entries of a terabyte of zeros are refused before they are read."""
    data = with_header(entries_nbytes=2**39, count=2**32)
    (tmp_path / "model.irpa").write_bytes(data)
    os.truncate(tmp_path / "model.irpa", 2**40)
    with pytest.raises(HeaderError, match="the headers are too long: expected at most 100000000"):
        streamload.open_checkpoint(tmp_path / "model.irpa")


def test_cut_anywhere(tmp_path: Path) -> None:
    """A file that was cut is an error, wherever that was."""
    whole = archive([Item(b"v", b"abcd", said("uint8", [4])), Item(b"w", b"efgh", nbytes=8)])
    for length in range(len(whole)):
        (tmp_path / "model.irpa").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.irpa"):
            streamload.open_checkpoint(tmp_path / "model.irpa")


numbers = st.one_of(
    st.integers(0, 300), st.sampled_from([2**16, 2**31, 2**32 - 1, 2**63, LARGEST - 63, LARGEST])
)
names = st.one_of(st.sampled_from([b"w", b"v", b""]), st.binary(max_size=4))
metadata = st.one_of(
    st.just(b""),
    st.builds(
        said,
        st.sampled_from(["uint8", "float16", "bool", "float4_e2m1fn", "other"]),
        st.lists(st.integers(-1, 9), max_size=3),
    ),
    st.binary(max_size=9).map(lambda raw: b"TENSORv0:" + raw),
)
FIELDS = ("size", "type", "name", "name_nbytes", "metadata", "metadata_nbytes", "alignment", "at")
HEADER = ("major", "size", "next", "count", "entries", "entries_nbytes", "metadata", "storage")
items = st.builds(
    Item,
    names,
    st.binary(max_size=20),
    metadata,
    st.one_of(st.none(), numbers),
    st.dictionaries(st.sampled_from([*FIELDS, "nbytes"]), st.integers(0, 300), max_size=2),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An archive with other numbers in some fields, of which some bytes were changed, or cut."""
    listed = draw(st.lists(items, max_size=4))
    fields: dict[str, Any] = {}
    if draw(st.booleans()):
        fields = draw(st.dictionaries(st.sampled_from([*HEADER, "storage_nbytes"]), numbers))
        fields = {k: v & 0xFFFF if k == "major" else v for k, v in fields.items()}
    content = bytearray(archive(listed, **fields))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(content) - 1))
        content[at : at + 1] = draw(st.binary(min_size=0, max_size=2))
    return bytes(content[: draw(st.one_of(st.none(), st.integers(0, len(content))))])


@settings(max_examples=few(1500), deadline=None)
@given(mutated())
def test_mutated_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Nothing but our errors comes out; what is valid lies in the file, or is a splat's place."""
    path = tmp_path_factory.getbasetemp() / "mutated.irpa"
    path.write_bytes(content)
    try:
        (header,) = streamload.open_checkpoint(path).shards
    except CheckpointError as error:
        assert str(path) in str(error)
        return
    splats = {view.start: view for view in header.views}
    for info in header.tensors:
        assert info.nbytes == info.dtype.nbytes(info.numel)
        view = splats.get(info.start)
        if view is None or not info.nbytes:
            assert 0 <= info.start <= info.stop <= len(content)
        else:
            (chunk,) = view.chunks
            assert view.stop == info.stop and chunk.at + view.itemsize <= len(content)


# --- IREE -----------------------------------------------------------------------------------------


def listed(path: Path) -> dict[str, bytes]:
    runtime = needs.runtime("iree.runtime")
    index = runtime.ParameterIndex()
    index.load(str(path))
    assert all(entry.is_file for _, entry in index.items())
    return {key: bytes(entry.file_view) for key, entry in index.items()}


def test_iree_writes_the_same(tmp_path: Path) -> None:
    runtime = needs.runtime("iree.runtime")
    source(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="irpa", verify=True)
    index = runtime.ParameterIndex()
    for name, (dtype, shape, data) in tensors_of(tmp_path / "in").items():
        index.add_buffer(name, buffer(data), metadata=said(dtype.name, shape).decode())
    index.create_archive_file(str(tmp_path / "theirs.irpa"))
    assert (tmp_path / "out" / "model.irpa").read_bytes() == (tmp_path / "theirs.irpa").read_bytes()


def test_iree_lists_the_same(tmp_path: Path) -> None:
    runtime = needs.runtime("iree.runtime")
    found = source(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="irpa")
    tensors = {name: buffer(data) for name, (_, _, data) in tensors_of(tmp_path / "in").items()}
    runtime.save_archive_file(tensors, tmp_path / "theirs.irpa")
    ours, theirs = listed(tmp_path / "out" / "model.irpa"), listed(tmp_path / "theirs.irpa")
    assert list(ours.items()) == list(theirs.items())
    assert ours == found


def buffer(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)


def test_iree_reads_arrays(tmp_path: Path) -> None:
    runtime = needs.runtime("iree.runtime")
    found = source(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="irpa")
    index = runtime.ParameterIndex()
    index.load(str(tmp_path / "out" / "model.irpa"))
    for name, entry in index.items():
        code = name.removeprefix("t.")
        if code in ("F16", "F32", "F64", "I8", "I16", "I32", "I64", "U8", "U64", "BOOL", "C64"):
            array = runtime.parameter_index_entry_as_numpy_ndarray(entry)
            assert (array.dtype, array.shape) == (BY_CODE[code].numpy, (3, 8))
            assert array.tobytes() == found[name]


def test_what_iree_wrote_is_read(tmp_path: Path) -> None:
    runtime = needs.runtime("iree.runtime")
    index = runtime.ParameterIndex()
    arrays = {"a": np.arange(30, dtype=np.float16).reshape(5, 6), "s": np.array(3, np.int64)}
    for name, array in arrays.items():
        runtime.parameter_index_add_numpy_ndarray(index, name, array)
    index.add_splat("splat", np.array([1.5], np.float32), 400)
    index.create_archive_file(str(tmp_path / "model.irpa"))
    write_safetensors(tmp_path / "like.safetensors", {"splat": ("F32", (4, 25), bytes(400))})
    found = loaded(
        streamload.open_checkpoint(tmp_path / "model.irpa", like=tmp_path / "like.safetensors")
    )
    expected = arrays | {"splat": np.full((4, 25), 1.5, np.float32)}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)


#: A linear layer that computes in float32 with parameters of another dtype.
MODULE = """
module @model {
  util.global private @w = #flow.parameter.named<"model"::"w"> : tensor<8x16xDTYPE>
  util.global private @b = #flow.parameter.named<"model"::"b"> : tensor<8xDTYPE>
  func.func @main(%x: tensor<4x16xf32>) -> tensor<4x8xf32> {
    %w = util.global.load @w : tensor<8x16xDTYPE>
    %b = util.global.load @b : tensor<8xDTYPE>
    %empty = tensor.empty() : tensor<4x8xf32>
    %start = linalg.generic {
      indexing_maps = [affine_map<(i, j) -> (j)>, affine_map<(i, j) -> (i, j)>],
      iterator_types = ["parallel", "parallel"]
    } ins(%b : tensor<8xDTYPE>) outs(%empty : tensor<4x8xf32>) {
    ^bb0(%in: DTYPE, %out: f32):
      %wide = arith.extf %in : DTYPE to f32
      linalg.yield %wide : f32
    } -> tensor<4x8xf32>
    %y = linalg.generic {
      indexing_maps = [affine_map<(i, j, k) -> (i, k)>, affine_map<(i, j, k) -> (j, k)>,
                       affine_map<(i, j, k) -> (i, j)>],
      iterator_types = ["parallel", "parallel", "reduction"]
    } ins(%x, %w : tensor<4x16xf32>, tensor<8x16xDTYPE>) outs(%start : tensor<4x8xf32>) {
    ^bb0(%a: f32, %c: DTYPE, %sum: f32):
      %wide = arith.extf %c : DTYPE to f32
      %product = arith.mulf %a, %wide : f32
      %next = arith.addf %sum, %product : f32
      linalg.yield %next : f32
    } -> tensor<4x8xf32>
    return %y : tensor<4x8xf32>
  }
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(("short", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_a_compiled_module_runs_with_it(tmp_path: Path, short: str, dtype: str, files: int) -> None:
    """A module that IREE compiles for its CPU takes the archive's parameters by their names."""
    runtime = needs.runtime("iree.runtime")
    tools = needs.runtime("iree.compiler.tools")
    rng = np.random.default_rng(0)
    w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (8,)))
    tensors = {"w": ("F32", (8, 16), w.tobytes()), "b": ("F32", (8,), b.tobytes())}
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    longest = 4096 if files == 1 else 1
    quiet(tmp_path / "in", tmp_path / "out", to="irpa", dtype=dtype, max_shard_size=longest)
    index = runtime.ParameterIndex()
    paths = sorted((tmp_path / "out").glob("*.irpa"))
    assert len(paths) == files
    for path in paths:
        index.load(str(path))
    text = MODULE.replace("DTYPE", short)
    cpu = ["--iree-llvmcpu-target-cpu=generic"]
    module = tools.compile_str(text, target_backends=["llvm-cpu"], extra_args=cpu)
    config = runtime.Config("local-task")
    instance = config.vm_instance
    modules = [
        runtime.create_io_parameters_module(instance, index.create_provider(scope="model")),
        runtime.create_hal_module(instance, config.device),
        runtime.VmModule.copy_buffer(instance, module),
    ]
    context = runtime.SystemContext(vm_modules=modules, config=config)
    x = rng.standard_normal((4, 16)).astype(np.float32)
    found = context.modules.model.main(x).to_host()
    kind = np.float16 if short == "f16" else ml_dtypes.bfloat16
    expected = x @ w.astype(kind).astype(np.float32).T + b.astype(kind).astype(np.float32)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - (x @ w.T + b)).max() > 1e-5  # the parameters are those of that dtype
