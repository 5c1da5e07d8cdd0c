"""What a safetensors header may say, and the one error for everything else."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open
from safetensors_files import header_bytes, write_safetensors

from streamload.core.dtypes import BY_CODE
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.files.header import MAX_HEADER_NBYTES, Header
from streamload.formats.reader import read_header
from streamload.formats.safetensors import parse_header

U64 = "an integer from 0 to 2**64 - 1"
DTYPES = f"one of {', '.join(BY_CODE)}"


def entry(code: object = "F32", shape: object = (2,), start: object = 0, stop: object = 8) -> Any:
    return {"dtype": code, "shape": shape, "data_offsets": [start, stop]}


def f32(start: object = 0, stop: object = 8, shape: object = (2,)) -> Any:
    """The entry of a tensor of float32, valid unless something is given."""
    return entry("F32", shape, start, stop)


def without(key: str) -> Any:
    """A valid entry but for one key."""
    return {k: v for k, v in entry().items() if k != key}


def deep(levels: int) -> str:
    return f'{{"a":{{"dtype":"F32","shape":{"[" * levels}{"]" * levels},"data_offsets":[0,8]}}}}'


@dataclass(frozen=True)
class Bad:
    """A file that must be refused, and how.

    ``accepted``: why safetensors itself takes the file; empty where it refuses it too.
    """

    name: str
    content: bytes
    error: type[CheckpointError]
    tensor: str | None
    expected: object
    found: object
    accepted: str = ""


def header_error(
    name: str,
    header: object,
    tensor: str | None,
    expected: object,
    found: object,
    *,
    data: int = 8,
    accepted: str = "",
) -> Bad:
    content = header_bytes(header) + bytes(data)
    return Bad(name, content, HeaderError, tensor, expected, found, accepted)


def raw(name: str, content: bytes, expected: object, found: object, truncated: bool = False) -> Bad:
    return Bad(
        name, content, TruncatedFileError if truncated else HeaderError, None, expected, found
    )


STRICTER = "the format's description asks for it, the reference reader does not check it"

BAD = [
    # the prefix
    raw("empty file", b"", "at least 8", 0, truncated=True),
    raw("part of the prefix", bytes(7), "at least 8", 7, truncated=True),
    raw("prefix of zero", bytes(8), "'{' as its first byte", "''"),
    raw("prefix past the end", struct.pack("<Q", 3) + b"{}", 11, 10, truncated=True),
    raw(
        "prefix at the limit",
        struct.pack("<Q", 100_000_000) + b"{}",
        100_000_008,
        10,
        truncated=True,
    ),
    raw(
        "prefix over the limit",
        struct.pack("<Q", 100_000_001) + b"{}",
        "at most 100000000 bytes",
        100_000_001,
    ),
    raw("prefix of all ones", b"\xff" * 8 + b"{}", "at most 100000000 bytes", 2**64 - 1),
    raw(
        "prefix of the sign bit", struct.pack("<Q", 2**63) + b"{}", "at most 100000000 bytes", 2**63
    ),
    raw(
        "prefix in the other byte order",
        struct.pack(">Q", 2) + b"{}",
        "at most 100000000 bytes",
        2**57,
    ),
    raw("zip", b"PK\x03\x04\0\0\x08\x08" + bytes(56), "the file in it, unpacked", "a zip archive"),
    raw("gguf", b"GGUF" + b"\3\0\0\0" * 9, "the name model.gguf", "a gguf file"),
    raw(
        "git lfs",
        b"version https://git-lfs.github.com/spec/v1\n",
        "the file: run `git lfs pull`",
        "a Git LFS pointer",
    ),
    raw("web page", b"<!DOCTYPE html><html>", "the file itself: download it again", "a web page"),
    # the JSON
    header_error("list", [], None, "'{' as its first byte", "'['"),
    header_error("null", None, None, "'{' as its first byte", "'n'"),
    header_error(
        "leading space", " {}", None, "'{' as its first byte", "' '", data=0, accepted=STRICTER
    ),
    header_error("byte order mark", "\ufeff{}", None, "'{' as its first byte", "'\\xef'", data=0),
    header_error("utf-16", '{"a":1}'.encode("utf-16-le"), None, "JSON", None),
    header_error("not utf-8", b'{"\xff":1}', None, "UTF-8", "b'\\xff' at byte 2 of the JSON"),
    header_error("encoded surrogate", b'{"\xed\xa0\x80":1}', None, "UTF-8", None),
    header_error("overlong slash", b'{"\xc0\xaf":1}', None, "UTF-8", None),
    header_error("cut off", '{"a":', None, "JSON", None),
    header_error("two objects", "{}{}", None, "JSON", None),
    header_error("zero padding", b"{}\0\0\0\0\0\0", None, "JSON", None, data=0),
    header_error("trailing comma", "{},", None, "JSON", None),
    header_error("single quotes", "{'a':1}", None, "JSON", None),
    header_error("unquoted name", "{a:1}", None, "JSON", None),
    header_error("control character in a name", b'{"a\n":1}', None, "JSON", None),
    header_error("bad escape", rb'{"\x41":1}', None, "JSON", None),
    header_error("NaN", '{"a":NaN}', None, "JSON", "NaN"),
    header_error("Infinity", '{"a":[-Infinity]}', None, "JSON", "-Infinity"),
    header_error("deep", deep(100_000), None, "JSON", "more than 127 levels of nesting"),
    header_error(
        "huge integer", '{"a":' + "9" * 100_000 + "}", None, "JSON", "an integer of 100000 digits"
    ),
    # names
    header_error(
        "duplicate name",
        '{"a":%s,"a":%s}' % ((json.dumps(f32()),) * 2),
        "a",
        "each name once",
        "'a' more than once",
        accepted=STRICTER,
    ),
    header_error(
        "duplicate name, escaped",
        json.dumps({"a": f32(), "b": f32(8, 16)}).replace('"b"', r'"\u0061"'),
        "a",
        "each name once",
        "'a' more than once",
        data=16,
    ),
    header_error(
        "duplicate metadata",
        '{"__metadata__":{},"__metadata__":{}}',
        None,
        "each name once",
        "'__metadata__' more than once",
        data=0,
    ),
    header_error(
        "duplicate key",
        '{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "a",
        "each key once",
        "'dtype' more than once",
    ),
    header_error(
        "half a surrogate pair",
        r'{"\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "\ud800",
        "Unicode text",
        "half a surrogate pair",
    ),
    # metadata
    header_error("metadata list", {"__metadata__": []}, None, "an object", "a list of 0", data=0),
    header_error(
        "metadata number", {"__metadata__": {"k": 1}}, None, "strings only", "'k': 1", data=0
    ),
    header_error(
        "metadata object",
        {"__metadata__": {"k": {}}},
        None,
        "strings only",
        "'k': an object",
        data=0,
    ),
    header_error(
        "metadata null value",
        {"__metadata__": {"k": None}},
        None,
        "strings only",
        "'k': null",
        data=0,
    ),
    header_error(
        "metadata twice the same key",
        '{"__metadata__":{"k":"1","k":"2"}}',
        None,
        "each name once",
        "'k' more than once",
        data=0,
        accepted=STRICTER,
    ),
    header_error(
        "metadata half a surrogate pair",
        r'{"__metadata__":{"k":"\udc00"}}',
        None,
        "strings only",
        r"'k': '\udc00'",
        data=0,
    ),
    # entries
    header_error("entry list", {"a": ["F32", [2]]}, "a", "an object", "a list of 2"),
    header_error("entry null", {"a": None}, "a", "an object", "null"),
    header_error("entry string", {"a": "F32"}, "a", "an object", "'F32'"),
    header_error("no dtype", {"a": without("dtype")}, "a", "dtype", "'shape', 'data_offsets'"),
    header_error("no shape", {"a": without("shape")}, "a", "shape", "'dtype', 'data_offsets'"),
    header_error("no offsets", {"a": without("data_offsets")}, "a", "data_offsets", None),
    header_error("empty entry", {"a": {}}, "a", "dtype", "none"),
    # dtypes
    header_error("unknown dtype", {"a": entry("F128")}, "a", DTYPES, "'F128'"),
    header_error("dtype in lower case", {"a": entry("f32")}, "a", DTYPES, "'f32'"),
    header_error("dtype number", {"a": entry(7)}, "a", DTYPES, "7"),
    header_error("dtype null", {"a": entry(None)}, "a", DTYPES, "null"),
    header_error("dtype list", {"a": entry(["F32"])}, "a", DTYPES, "a list of 1"),
    header_error("dtype object", {"a": entry({"F32": 1})}, "a", DTYPES, "an object"),
    header_error("dtype endless", {"a": entry("F" * 200)}, "a", DTYPES, f"'{'F' * 76}..."),
    # shapes
    header_error("shape number", {"a": f32(shape=2)}, "a", f"a list of {U64}", "2"),
    header_error("shape null", {"a": f32(shape=None)}, "a", f"a list of {U64}", "null"),
    header_error("shape object", {"a": f32(shape={"0": 2})}, "a", f"a list of {U64}", "an object"),
    header_error("negative dimension", {"a": f32(shape=[-2])}, "a", U64, "-2"),
    header_error("two negative dimensions", {"a": f32(shape=[-1, -2])}, "a", U64, "-1"),
    header_error("bool dimension", {"a": f32(shape=[2, True])}, "a", U64, "true"),
    header_error("float dimension", {"a": f32(shape=[2.0])}, "a", U64, "2.0"),
    header_error("string dimension", {"a": f32(shape=["2"])}, "a", U64, "'2'"),
    header_error("null dimension", {"a": f32(shape=[None])}, "a", U64, "null"),
    header_error("nested dimension", {"a": f32(shape=[[2]])}, "a", U64, "a list of 1"),
    header_error("dimension of 65 bits", {"a": f32(shape=[2**64])}, "a", U64, str(2**64)),
    header_error(
        "elements overflow",
        {"a": f32(shape=[2**32, 2**32])},
        "a",
        "at most 2**64 - 1 elements",
        None,
    ),
    header_error(
        "elements overflow on the way to 0",
        {"a": f32(0, 0, [2**40, 2**40, 0])},
        "a",
        "at most 2**64 - 1 elements",
        f"[{2**40}, {2**40}, 0]",
        data=0,
    ),
    header_error(
        "many dimensions overflow",
        {"a": f32(shape=[2] * 100_000)},
        "a",
        "at most 2**64 - 1 elements",
        "a list of 100000",
    ),
    header_error("bits overflow", {"a": f32(shape=[2**60])}, "a", "at most 2**64 - 1 bits", None),
    # offsets
    header_error("offsets number", {"a": entry() | {"data_offsets": 8}}, "a", "a list of 2", "8"),
    header_error(
        "one offset", {"a": entry() | {"data_offsets": [0]}}, "a", "a list of 2", "a list of 1"
    ),
    header_error(
        "three offsets",
        {"a": entry() | {"data_offsets": [0, 8, 8]}},
        "a",
        "a list of 2",
        "a list of 3",
    ),
    header_error("negative offset", {"a": f32(-8, 0)}, "a", U64, "-8"),
    header_error("bool offset", {"a": f32(False, 8)}, "a", U64, "false"),
    header_error("float offset", {"a": f32(0, 8.0)}, "a", U64, "8.0"),
    header_error("exponent offset", json.dumps({"a": f32()}).replace("8", "8e0"), "a", U64, "8.0"),
    header_error("string offset", {"a": f32("0", "8")}, "a", U64, "'0'"),
    header_error("offset of 65 bits", {"a": f32(0, 2**64)}, "a", U64, str(2**64)),
    header_error("offsets reversed", {"a": f32(8, 0)}, "a", "a start before the stop", "8 to 0"),
    # shape against offsets
    header_error("fewer bytes than the shape", {"a": f32(0, 4)}, "a", 8, 4, data=4),
    header_error("more bytes than the shape", {"a": f32(0, 12)}, "a", 8, 12, data=12),
    header_error("bytes for an empty shape", {"a": f32(0, 4, [0])}, "a", 0, 4, data=4),
    header_error("no bytes for a scalar", {"a": f32(0, 0, [])}, "a", 4, 0, data=0),
    header_error("offsets at the end of 64 bits", {"a": f32(0, 2**64 - 1)}, "a", 8, 2**64 - 1),
    header_error(
        "half a byte", {"a": entry("F4", [3], 0, 2)}, "a", "a multiple of 8 bits", 12, data=2
    ),
    header_error(
        "six bits", {"a": entry("F6_E2M3", [1], 0, 1)}, "a", "a multiple of 8 bits", 6, data=1
    ),
    # ranges
    header_error("hole at the start", {"a": f32(8, 16)}, "a", 0, 8, data=16),
    header_error("hole", {"a": f32(), "b": f32(16, 24)}, "b", 8, 16, data=24),
    header_error("hole of one byte", {"a": f32(), "b": f32(9, 17)}, "b", 8, 9, data=17),
    header_error("overlap", {"a": f32(), "b": f32(4, 12)}, "b", 8, 4, data=12),
    header_error("the same range", {"a": f32(), "b": f32()}, "b", 8, 0),
    header_error("one range inside another", {"a": f32(0, 16, [4]), "b": f32(4, 12)}, "b", 16, 4),
    header_error(
        "empty range inside another", {"a": f32(), "b": f32(4, 4, [0])}, "b", 8, 4, data=8
    ),
    header_error("empty range after a hole", {"a": f32(), "b": f32(9, 9, [0])}, "b", 8, 9, data=8),
]


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return path


def second_opinion(path: Path) -> str | None:
    """What the reference reader says of a file; None where it accepts it."""
    try:
        with safe_open(path, framework="numpy"):
            return None
    except (SafetensorError, OSError, UnicodeError) as error:
        return str(error)


def test_there_are_at_least_forty_malformed_headers() -> None:
    assert len(BAD) >= 40
    assert len({bad.name for bad in BAD}) == len(BAD)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_malformed_file_is_refused_with_the_facts(tmp_path: Path, bad: Bad) -> None:
    path = write(tmp_path, bad.content)
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    error = raised.value
    assert type(error) is bad.error
    assert error.path == str(path)
    assert error.tensor == bad.tensor
    assert error.expected == bad.expected
    if bad.found is None:  # the wording of Python's json, or a long one
        assert error.found is not None
    else:
        assert error.found == bad.found
    message = str(error)
    assert message.startswith(f"{path}: ")
    assert f"expected {error.expected}" in message and f"found {error.found}" in message
    assert bad.tensor is None or repr(bad.tensor) in message
    assert len(message) < 500 + len(str(path))
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.found) == (type(error), message, error.found)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_safetensors_refuses_it_too_or_it_is_known_why_not(tmp_path: Path, bad: Bad) -> None:
    """The reference reader refuses each malformed file as well.

    Where it does not, the table says why: leading spaces, duplicate names and a null or repeated
    entry of the metadata are against the description of the format, and the reader lets them pass.
    """
    accepted = second_opinion(write(tmp_path, bad.content)) is None
    assert accepted == bool(bad.accepted)


def test_file_cut_off_anywhere_is_truncated(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "a.safetensors",
        {"x": ("F32", (3,), bytes(12)), "y": ("U8", (5,), bytes(5)), "z": ("U8", (0,), b"")},
        metadata={"format": "pt"},
    )
    content = path.read_bytes()
    data_start = read_header(path).data_start
    for nbytes in range(len(content)):
        path.write_bytes(content[:nbytes])
        with pytest.raises(TruncatedFileError) as raised:
            read_header(path)
        error = raised.value
        assert error.path == str(path) and error.found == nbytes
        if nbytes < 8:
            assert (error.expected, error.tensor) == ("at least 8", None)
        elif nbytes < data_start:
            assert (error.expected, error.tensor) == (data_start, None)
        else:
            assert error.expected == len(content)
            assert error.tensor == ("x" if nbytes < data_start + 12 else "y")
        assert second_opinion(path) is not None


def test_long_integers_are_not_computed_where_python_would(tmp_path: Path) -> None:
    """Python, told to read any, takes half an hour for ten million digits; they are refused."""
    path = write(tmp_path, header_bytes('{"a":' + "9" * 10_000_000 + "}"))
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(HeaderError, match="an integer of 10000000 digits"):
            read_header(path)
    finally:
        sys.set_int_max_str_digits(before)


def test_file_with_bytes_after_the_last_tensor_is_refused(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": ("U8", (2,), b"ab")})
    nbytes = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"c")
    with pytest.raises(HeaderError) as raised:
        read_header(path)
    assert (raised.value.expected, raised.value.found) == (nbytes, nbytes + 1)
    assert second_opinion(path) is not None


def test_truncation_wins_over_a_tensor_that_ends_past_the_file(tmp_path: Path) -> None:
    """A consistent header over too little data is a truncated file, and names the first victim."""
    path = write(tmp_path, header_bytes({"a": f32(), "b": f32(8, 2**50, [2**48 - 2])}) + bytes(9))
    with pytest.raises(TruncatedFileError) as raised:
        read_header(path)
    assert raised.value.tensor == "b"
    assert isinstance(raised.value.expected, int) and raised.value.expected > 2**50


def test_valid_header_gives_absolute_bytes_in_file_order(tmp_path: Path) -> None:
    content = header_bytes(
        {
            "late": entry("BF16", [3], 9, 15),
            "__metadata__": {"format": "pt", "": "é"},
            "scalar": entry("U8", [], 8, 9),
            "early": f32(),
        }
    )
    path = write(tmp_path, content + bytes(range(15)))
    header = read_header(path)
    start = len(content)
    assert (header.path, header.file_nbytes, header.data_start) == (path, start + 15, start)
    assert [(t.name, t.start - start, t.stop - start) for t in header.tensors] == [
        ("early", 0, 8),
        ("scalar", 8, 9),
        ("late", 9, 15),
    ]
    early, scalar, late = header.tensors
    assert late.dtype is BY_CODE["BF16"] and late.shape == (3,)
    assert (late.nbytes, late.numel, scalar.numel, scalar.shape) == (6, 3, 1, ())
    assert early.shard == path
    assert header.metadata == {"format": "pt", "": "é"}
    assert second_opinion(path) is None


def accepted(tmp_path: Path, content: bytes) -> Header:
    path = write(tmp_path, content)
    header = read_header(path)
    assert second_opinion(path) is None
    return header


@pytest.mark.parametrize("code", BY_CODE)
def test_every_dtype_of_the_format_is_known(tmp_path: Path, code: str) -> None:
    dtype = BY_CODE[code]
    nbytes = dtype.bits  # of 8 elements
    header = accepted(tmp_path, header_bytes({"a": entry(code, [2, 4], 0, nbytes)}) + bytes(nbytes))
    (info,) = header.tensors
    assert info.dtype is dtype and info.nbytes == dtype.nbytes(8) == nbytes


def test_empty_tensors_may_lie_at_any_boundary(tmp_path: Path) -> None:
    header = accepted(
        tmp_path,
        header_bytes(
            {
                "end": f32(16, 16, [0]),
                "b": f32(8, 16),
                "between": f32(8, 8, [3, 0]),
                "a": f32(),
                "start": entry("F4", [0, 2**63], 0, 0),
            }
        )
        + bytes(16),
    )
    assert [t.name for t in header.tensors] == ["start", "a", "between", "b", "end"]
    assert [t.nbytes for t in header.tensors] == [0, 8, 0, 8, 0]


@pytest.mark.parametrize(
    "header",
    [
        "{}",
        "{}       ",
        "{}\n\t\r ",
        '{"__metadata__":{}}',
        {"": f32(0, 0, [0])},
        {"a\0b": f32(0, 0, [0])},
        {"\U0001f600": f32(0, 0, [0])},
        r'{"\ud83d\ude00":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
        {"a": f32(0, 0, [0]) | {"extra": [{"deep": 1.5e300}]}},
        {"a": f32(0, 0, [0, 2**64 - 1])},
        {"/etc/passwd": f32(0, 0, [0]), "../a": f32(0, 0, [0])},
    ],
    ids=str,
)
def test_unusual_headers_that_are_valid(tmp_path: Path, header: object) -> None:
    """No tensors, padding, any name (it is never a path), unknown keys: all of that is valid."""
    read = accepted(tmp_path, header_bytes(header))
    assert read.data_start == read.file_nbytes


def test_header_at_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    """100 MB of header, most of it padding, is valid; the limit counts the JSON only."""
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_NBYTES) + b"{}")
        for _ in range(MAX_HEADER_NBYTES // 10_000_000):
            file.write(b" " * 10_000_000)
    os.truncate(path, 8 + MAX_HEADER_NBYTES)
    assert read_header(path).data_start == 8 + MAX_HEADER_NBYTES
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", MAX_HEADER_NBYTES + 1))
    os.truncate(path, 9 + MAX_HEADER_NBYTES)
    with pytest.raises(HeaderError) as raised:
        read_header(path)
    assert raised.value.found == MAX_HEADER_NBYTES + 1


def test_disagreements_with_safetensors_that_are_not_in_the_table(tmp_path: Path) -> None:
    """Two files on which the readers differ, of no consequence.

    In a key that both ignore, an integer far beyond 64 bits is skipped there and refused here. A
    dimension of -0 is a float there and 0 here. Both refuse more than 127 levels of nesting.
    """
    text = '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0],"extra":0}}'
    path = write(tmp_path, header_bytes(text.replace('extra":0', 'extra":' + "9" * 22)))
    assert second_opinion(path) is None
    with pytest.raises(HeaderError):
        read_header(path)
    path = write(tmp_path, header_bytes(text.replace("[0]", "[-0]")))
    assert second_opinion(path) is not None
    assert read_header(path).tensors[0].shape == (0,)
    for levels in (125, 126):  # within two objects
        nested = text.replace('extra":0', 'extra":' + "[" * levels + "]" * levels)
        path = write(tmp_path, header_bytes(nested))
        assert (second_opinion(path) is None) == (levels == 125)
        with nullcontext() if levels == 125 else pytest.raises(HeaderError, match="nesting"):
            read_header(path)


def test_parse_header_touches_no_file(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "a.safetensors", {"x": ("U8", (2,), b"ab")})
    content, header = path.read_bytes(), read_header(path)
    path.unlink()
    assert parse_header(content, path, len(content)) == header
    assert parse_header(content[: header.data_start], path, len(content)) == header
    with pytest.raises(TruncatedFileError) as raised:
        parse_header(content[: header.data_start - 1], path, len(content))
    assert (raised.value.expected, raised.value.found) == (header.data_start, header.data_start - 1)


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """A folder, a FIFO without a writer and a device are errors at once; a missing file too."""
    fifo = tmp_path / "fifo.safetensors"
    os.mkfifo(fifo)
    for path, found in (
        (tmp_path, "a directory"),
        (fifo, "a FIFO"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(CheckpointError) as raised:
            read_header(path)
        assert (raised.value.path, raised.value.found) == (str(path), found)
        assert raised.value.expected == "a regular file"
    dangling = tmp_path / "dangling.safetensors"
    dangling.symlink_to(tmp_path / "nothing")
    for path, problem in (
        (tmp_path / "no.safetensors", "no such file"),
        (fifo / "below", "no such file"),
        (dangling, "a symlink that leads nowhere"),
    ):
        with pytest.raises(ShardNotFoundError) as not_found:
            read_header(path)
        assert (not_found.value.path, not_found.value.problem) == (str(path), problem)
    for path in (tmp_path / ("x" * 300), Path(f"{tmp_path}/a\0b")):
        with pytest.raises(CheckpointError) as unreadable:
            read_header(path)
        assert unreadable.value.path == str(path) and unreadable.value.found


@pytest.mark.parametrize("align", range(16))
def test_helper_places_the_data_as_asked(tmp_path: Path, align: int) -> None:
    path = write_safetensors(tmp_path / "a", {"x": ("U8", (2,), b"ab")}, align=align)
    header = read_header(path)
    assert header.data_start % 16 == align
    (info,) = header.tensors
    assert path.read_bytes()[info.start : info.stop] == b"ab"
