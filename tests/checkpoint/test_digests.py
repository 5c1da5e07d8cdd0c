"""The sidecar `streamload.json`: written and read back, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from streamload.checkpoint.digests import ALGORITHM, SIDECAR, Digest, Digests, hasher
from streamload.core.dtypes import BY_CODE, F16
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError

HEX = "99aa06d3014798d86001c324468d497f"  # of nothing, by the reference implementation
DIGESTS = Digests(
    {
        digest.name: digest
        for digest in (
            Digest("w", F16, (2, 3), 12, HEX),
            Digest("scalar", BY_CODE["F64"], (), 8, "0" * 32),
            Digest("half", BY_CODE["F4"], (2, 2), 2, "f" * 32),
            Digest("Gewicht.ä\n\x1b", BY_CODE["I8"], (0, 5), 0, HEX),
            Digest("", BY_CODE["BOOL"], (1,), 1, "1" * 32),
        )
    },
    source={"path": "there/model.safetensors", "shards": [{"nbytes": 3, "mtime_ns": 2**62}]},
    options={"dtype": {"*": "float16"}, "clamp": False, "nodes": None},
    files=("config.json", "model.safetensors", SIDECAR),
    counts={"w": (1, 0, 2**62)},
)


def text(**changes: Any) -> bytes:
    """The sidecar of one tensor, with some keys changed; a value of None leaves the key out."""
    entry = {"dtype": "F16", "shape": [2, 3], "nbytes": 12, "digest": HEX}
    document = {
        "format": 1,
        "algorithm": ALGORITHM,
        "source": {},
        "options": {},
        "tensors": {"w": entry | changes.pop("entry", {})},
    } | changes
    return json.dumps({key: value for key, value in document.items() if value is not None}).encode()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / SIDECAR).write_text(DIGESTS.to_json())
    assert Digests.read(tmp_path) == DIGESTS
    assert Digests.read(tmp_path / SIDECAR) == DIGESTS
    (tmp_path / "other.json").write_text(DIGESTS.to_json())
    assert Digests.read(os.fspath(tmp_path / "other.json")) == DIGESTS
    assert pickle.loads(pickle.dumps(DIGESTS)) == DIGESTS


def test_it_is_json_that_others_read() -> None:
    """The names are those of the checkpoint, the dtypes the codes of safetensors."""
    document = json.loads(DIGESTS.to_json())
    assert document["algorithm"] == "xxh3_128"
    assert list(document["tensors"]) == list(DIGESTS.tensors)
    assert document["tensors"]["w"] == {
        "dtype": "F16",
        "shape": [2, 3],
        "nbytes": 12,
        "digest": HEX,
    }


def test_a_digest_is_of_the_bytes_in_their_order() -> None:
    """Pieces of any length give the digest of the whole, which is that of XXH3 with 128 bits."""
    data = bytes(range(256)) * 40
    whole, pieces = hasher(), hasher()
    assert whole.hexdigest() == HEX
    whole.update(memoryview(data))
    for start in range(0, len(data), 999):
        pieces.update(memoryview(data)[start : start + 999])
    assert pieces.hexdigest() == whole.hexdigest() != HEX
    other = hasher()
    other.update(memoryview(data[1:] + data[:1]))
    assert other.hexdigest() != whole.hexdigest()


def test_what_later_versions_may_add_is_passed_over() -> None:
    raw = text(comment="x", entry={"shard": "model-00001-of-00002.safetensors"})
    assert list(Digests.from_json(raw, Path("s")).tensors) == ["w"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "is not a JSON object"),
        (b"[]", "is not a JSON object"),
        (b"{", "the JSON is not valid"),
        (b'{"format": 1, "format": 1}', "more than once"),
        (b'{"\xff": 1}', "not UTF-8"),
        (b'{"a":' * 100_000, "nesting"),
        (b"{}", "no sidecar of streamload"),
        (text(format=0), "no sidecar of streamload"),
        (text(format=True), "no sidecar of streamload"),
        (text(format=2), "newer streamload: expected format 1, found 2"),
        (text(algorithm="md5"), "unknown algorithm: expected xxh3_128, found 'md5'"),
        (text(algorithm=["xxh3_128"]), "unknown algorithm"),
        (text(tensors=None), "tensors is not valid"),
        (text(options=[]), "options is not valid"),
        (text(source="here"), "source is not valid"),
        (text(files={"a": 1}), "files is not valid"),
        (text(files=["a", 1]), "files is not valid"),
        (text(counts=[]), "counts is not valid"),
        (text(counts={"w": 3}), "counts are not valid: expected three of 0 or more, found 'w'"),
        (text(counts={"w": [1, 2]}), "counts are not valid"),
        (text(counts={"w": [1, 2, -1]}), "counts are not valid"),
        (text(counts={"w": [1, 2, True]}), "counts are not valid"),
        (text().replace(b'"w": {', b'"w": {}, "w": {'), "'w' more than once"),
        (text(tensors={"w": 1}), "'w': the entry is not an object"),
        (text().replace(b'"nbytes"', b'"dtype"'), "a key is not unique"),
        (text(tensors={"\ud800": {}}), "Unicode"),
        (text(entry={"dtype": "F17"}), "unknown dtype: expected one of BOOL"),
        (text(entry={"dtype": ["F16"]}), "unknown dtype"),
        (text(entry={"shape": 6}), "shape is not a list"),
        (text(entry={"shape": [-1, -6]}), "shape is not valid"),
        (text(entry={"shape": [True, 6]}), "shape is not valid"),
        (text(entry={"shape": [2**63] * 100_000}), "shape is not valid"),
        (text(entry={"shape": [2, 4]}), "do not agree: expected 16, found 12"),
        (text(entry={"nbytes": "12"}), "do not agree"),
        (text(entry={"digest": HEX.upper()}), "digest is not valid"),
        (text(entry={"digest": HEX[:-1]}), "digest is not valid"),
        (text(entry={"digest": HEX + "\n"}), "digest is not valid"),
        (text(entry={"digest": 5}), "digest is not valid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_sidecar_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    """Whatever the file holds, there is one error with its path, of a few words."""
    (tmp_path / SIDECAR).write_bytes(raw)
    with pytest.raises(HeaderError) as error:
        Digests.read(tmp_path)
    assert message in str(error.value)
    assert error.value.path == str(tmp_path / SIDECAR)
    assert len(str(error.value)) < 500


def test_no_file_or_no_regular_one(tmp_path: Path) -> None:
    """That there is no sidecar is an error of its own; a FIFO is not waited for."""
    with pytest.raises(ShardNotFoundError, match=SIDECAR):
        Digests.read(tmp_path)
    os.mkfifo(tmp_path / SIDECAR)
    with pytest.raises(CheckpointError, match="a FIFO"):
        Digests.read(tmp_path)
    with open(tmp_path / "long.json", "wb") as file:
        file.truncate(100_000_001)
    with pytest.raises(HeaderError, match="too long"):
        Digests.read(tmp_path / "long.json")
