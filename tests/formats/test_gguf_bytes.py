from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload.formats.gguf.constants import ALIGNMENT, TENSOR_TYPE_OF
from streamload.formats.gguf.layout import (
    OVERHEAD_NBYTES,
    Described,
    file_nbytes,
    header,
    metadata_bytes,
    split_metadata,
)
from streamload.formats.writer import numbered, shards

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.name": "größer",
    "llama.block_count": 3,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "é", "\u2581b"],
    "tokenizer.ggml.token_type": np.array([1, 2, 3], np.int32),
    "tokenizer.ggml.scores": np.array([0, -1.5, 2], np.float32),
}
SHAPES = {"vector": ((5,), "F32"), "wide": ((3, 64), "Q8_0"), "odd": ((7, 3), "F16")}
SHAPES |= {"four": ((2, 32), "Q4_0"), "brain": ((2, 9), "BF16")}
ENTRIES = [Described(name, shape, TENSOR_TYPE_OF[kind]) for name, (shape, kind) in SHAPES.items()]


def _data(entry: Described) -> Any:
    x = np.random.default_rng(3).normal(size=entry.shape).astype(np.float32)
    kind = gguf.GGMLQuantizationType[entry.kind.name]
    return gguf.quants.quantize(x, kind), kind


def _theirs(path: Path, **options: Any) -> list[bytes]:
    writer = gguf.GGUFWriter(path, "llama", **options)
    for key, value in list(METADATA.items())[1:]:
        kind = gguf.GGUFValueType.get_type(value if not isinstance(value, np.ndarray) else [1])
        if kind is gguf.GGUFValueType.INT32:
            kind = gguf.GGUFValueType.UINT32
        listed = value.tolist() if isinstance(value, np.ndarray) else value
        writer.add_key_value(key, listed, kind)
    for entry in ENTRIES:
        data, kind = _data(entry)
        writer.add_tensor(entry.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [each.read_bytes() for each in sorted(path.parent.glob("*.gguf"))]


def _ours(files: list[list[Described]]) -> list[bytes]:
    out = []
    for number, entries in enumerate(files):
        metadata = METADATA if number == 0 else {}
        if len(files) > 1:
            metadata = metadata | split_metadata(number, len(files), len(ENTRIES))
        whole = header(metadata_bytes(metadata), len(metadata), entries)
        assert not len(whole) % ALIGNMENT
        for entry in entries:
            raw = _data(entry)[0].tobytes()
            assert len(raw) == entry.nbytes
            whole += raw + bytes(-len(raw) % ALIGNMENT)
        out.append(whole)
    return out


def test_a_file_equals_gguf_pys(tmp_path: Path) -> None:
    assert _ours([ENTRIES]) == _theirs(tmp_path / "x.gguf")


def test_split_files_equal_gguf_pys(tmp_path: Path) -> None:
    """The first of a set has the metadata; each says its number, and how many there are."""
    files = [ENTRIES[:2], ENTRIES[2:4], ENTRIES[4:]]
    assert _ours(files) == _theirs(tmp_path / "x.gguf", split_max_tensors=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == numbered(3, ".gguf", "x")
    assert numbered(1, ".gguf", "x") == ["x.gguf"]


@pytest.mark.parametrize("max_nbytes", [1, 400, 600, 1000, 10**6])
def test_files_are_no_longer_than_asked(max_nbytes: int) -> None:
    raw, listed = metadata_bytes(METADATA), [[entry] for entry in ENTRIES]
    found = shards(listed, max_nbytes - OVERHEAD_NBYTES, file_nbytes, len(raw))
    files = [[entry for (entry,) in shard] for shard in found]
    assert [entry for file in files for entry in file] == ENTRIES
    for number, nbytes in enumerate(map(len, _ours(files))):
        assert nbytes <= max_nbytes or len(files[number]) == 1
    assert (len(files) == 1) == (max_nbytes == 10**6)
