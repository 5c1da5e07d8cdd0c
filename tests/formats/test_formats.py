"""Files of other formats than safetensors: a registered reader is all that they need."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy as st
from remote_server import serve

import streamload
from streamload.core.dtypes import BY_CODE
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.distributed.index import Index, _tuples, write_index
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.files.folder import folder_at
from streamload.files.header import Header, Stored, Turn
from streamload.formats.reader import FORMATS, File, Format, FormatReader, read_exactly

MAGIC = b"TINY"


class Tiny(FormatReader):
    """A format for these tests: a magic, the length of its JSON, the JSON, and data with gaps.

    The JSON has ``tensors`` (name to dtype, shape and first byte), and what a `Header` may say
    besides.
    """

    def read_header(self, file: File) -> Header:
        start = read_exactly(file, 0, 8, "the header")
        if not start.startswith(MAGIC):
            raise HeaderError(file.path, "is not a tiny file", MAGIC, start[:4])
        nbytes = int.from_bytes(start[4:], "little")
        said = json.loads(read_exactly(file, 8, 8 + nbytes, "the header"))
        infos = []
        for name, (code, shape, at) in said["tensors"].items():
            stop = at + BY_CODE[code].nbytes(int(np.prod(shape)))
            if stop > file.nbytes:
                raise TruncatedFileError(file.path, "is too short", stop, file.nbytes, tensor=name)
            infos.append(TensorInfo(name, BY_CODE[code], tuple(shape), file.path, at, stop))
        turns = {n: (t, s and tuple(s)) for n, (t, s) in said["turns"].items()}
        return Header(
            file.path,
            file.nbytes,
            min(info.start for info in infos),
            tuple(infos),
            said.get("metadata", {}),
            format="tiny",
            config=said.get("config", {}),
            stored={name: Stored(*_tuples(one)) for name, one in said["stored"].items()},
            turns={n: Turn(RowTranspose(*order), shape) for n, (order, shape) in turns.items()},
        )

    def weights(self, names: Sequence[str]) -> Sequence[str]:
        return [name for name in names if not name.startswith("optimizer")]

    def siblings(self, header: Header) -> Sequence[str]:
        return json.loads(header.metadata.get("siblings", "[]"))

    def documents(self, headers: Sequence[Header]) -> Mapping[str, bytes]:
        tokenizer = headers[0].metadata.get("tokenizer")
        return {} if tokenizer is None else {"tokenizer.json": tokenizer.encode()}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    row = Format(name="tiny", reads=f"{__name__}:Tiny", suffixes=(".tiny",), magic=MAGIC)
    monkeypatch.setitem(FORMATS.others, "tiny", row)
    yield


def write_tiny(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]], **said: Any) -> None:
    """Write arrays with a gap after each; those of uint16 are called BF16."""
    codes = {"float32": "F32", "uint16": "BF16", "uint8": "U8", "float16": "F16"}
    at, tensors, data = 1000, {}, b""
    for name, array in arrays.items():
        tensors[name] = (codes[array.dtype.name], array.shape, at + len(data))
        data += array.tobytes() + bytes(24)
    text = json.dumps({"stored": {}, "turns": {}, **said, "tensors": tensors}).encode()
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes((MAGIC + len(text).to_bytes(4, "little") + text).ljust(at) + data)


def some() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        "a.weight": rng.standard_normal((6, 4)).astype(np.float32),
        "b.weight": rng.standard_normal((8, 5)).astype(np.float32),
    }


def loaded(path: Path | str, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    return dict(streamload.iterate(path, device="host", **options))


def test_a_file_is_known_by_its_suffix_or_by_its_first_bytes(tmp_path: Path) -> None:
    """Whatever its name is; a file of another format's name is not, and says what it is."""
    for name in ("model.tiny", "MODEL.TINY", "model", "model.bin"):
        write_tiny(tmp_path / name, some())
        checkpoint = streamload.open_checkpoint(tmp_path / name)
        assert checkpoint.shards[0].format == "tiny"
        assert [(i.name, i.dtype.name, i.shape) for i in checkpoint.tensors.values()] == [
            ("a.weight", "float32", (6, 4)),
            ("b.weight", "float32", (8, 5)),
        ]
    (tmp_path / "other.tiny").write_bytes(b"something else")
    with pytest.raises(HeaderError, match="is not a tiny file"):
        streamload.open_checkpoint(tmp_path / "other.tiny")
    (tmp_path / "no.suffix").write_bytes(b"\xff" * 100)
    with pytest.raises(HeaderError, match="the header is too long"):
        streamload.open_checkpoint(tmp_path / "no.suffix")


def test_a_folder_of_such_files(tmp_path: Path) -> None:
    """All that hold weights, with the config.json beside them; safetensors come before them."""
    a, b = some().items()
    write_tiny(tmp_path / "part1.tiny", dict([a]), config={"from": "the file"})
    write_tiny(tmp_path / "part2.tiny", dict([b]))
    write_tiny(tmp_path / "optimizer.tiny", dict([b]))
    write_tiny(tmp_path / ".hidden.tiny", dict([b]))
    checkpoint = streamload.open_checkpoint(tmp_path)
    assert [header.path.name for header in checkpoint.shards] == ["part1.tiny", "part2.tiny"]
    assert checkpoint.config == {"from": "the file"}
    (tmp_path / "config.json").write_text('{"from": "config.json"}')
    assert streamload.open_checkpoint(tmp_path).config == {"from": "config.json"}
    assert streamload.open_checkpoint(tmp_path / "part1.tiny").config == {"from": "the file"}
    streamload.convert(tmp_path, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").rename(tmp_path / "model.safetensors")
    checkpoint = streamload.open_checkpoint(tmp_path)
    assert [header.path.name for header in checkpoint.shards] == ["model.safetensors"]


def test_a_folder_that_holds_a_model_twice(tmp_path: Path) -> None:
    """One of the files has to be named."""
    for name in ("f16.tiny", "f32.tiny"):
        write_tiny(tmp_path / name, some())
    with pytest.raises(HeaderError, match=r"several checkpoints.*the path of one file.*f16\.tiny"):
        streamload.open_checkpoint(tmp_path)


def test_sets_of_files(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00002.tiny" for i in (1, 2)]
    for name, one in zip(names, some().items(), strict=True):
        write_tiny(tmp_path / name, dict([one]), metadata={"siblings": json.dumps(names)})
    for path in (tmp_path, tmp_path / names[0], tmp_path / names[1]):
        assert list(streamload.open_checkpoint(path).tensors) == ["a.weight", "b.weight"]
    (tmp_path / names[0]).unlink()
    for path in (tmp_path, tmp_path / names[1]):
        with pytest.raises(ShardNotFoundError, match=f"shards are missing.*{names[0]}"):
            streamload.open_checkpoint(path)


def test_values_are_loaded_cast_and_counted(tmp_path: Path) -> None:
    arrays = some()
    write_tiny(tmp_path / "model.tiny", arrays)
    for dtype, kind in (("checkpoint", "float32"), ("float16", "float16")):
        found = loaded(tmp_path / "model.tiny", dtype=dtype)
        model = {name: np.zeros(array.shape, kind) for name, array in arrays.items()}
        streamload.load_state_dict(model, tmp_path / "model.tiny", dtype=dtype)
        for name, array in arrays.items():
            assert np.array_equal(found[name], array.astype(kind))
            assert np.array_equal(model[name], array.astype(kind))


def test_over_http(tmp_path: Path) -> None:
    """The header is read by ranges, and so are the tensors."""
    arrays = some() | {"large": np.arange(200_000, dtype=np.float32)}
    write_tiny(tmp_path / "model.tiny", arrays)
    with serve(tmp_path) as site:
        found = loaded(site.url + "model.tiny")
        assert site.asked("/model.tiny")[0] == (0, 2**18)
    for name, array in arrays.items():
        assert np.array_equal(found[name], array)


def test_rows_that_lie_otherwise(tmp_path: Path) -> None:
    arrays = some()
    expected = {
        "a.weight": arrays["a.weight"].reshape(1, 2, 3, 4).transpose(0, 2, 1, 3).reshape(6, 4),
        "b.weight": arrays["b.weight"].T,
    }
    turns = {"a.weight": ((1, 2, 3), None), "b.weight": ((1, 8, 5), (5, 8))}
    write_tiny(tmp_path / "model.tiny", arrays, turns=turns)
    streamload.convert(tmp_path / "model.tiny", tmp_path / "out", verify=True)
    for path in (tmp_path / "model.tiny", tmp_path / "out"):
        found = loaded(path)
        for name, array in expected.items():
            assert np.array_equal(found[name], array)


def test_blocks_of_a_quantized_weight(tmp_path: Path) -> None:
    """They are a group of their own, of which the tensor of U8 is the only member."""
    codes = np.arange(4 * 18, dtype=np.uint8).reshape(4, 18)
    stored = {"w.weight": ("fp8", (4, 32), (32,), 4)}
    write_tiny(tmp_path / "model.tiny", some() | {"w.weight": codes}, stored=stored)
    checkpoint = streamload.open_checkpoint(tmp_path / "model.tiny")
    group = checkpoint.groups["w.weight"]
    assert (group.kind, group.shape, group.block, group.bits) == ("fp8", (4, 32), (32,), 4)
    assert group.members == {"weight": checkpoint.tensors["w.weight"]}


def test_what_headers_say_goes_to_other_processes(tmp_path: Path) -> None:
    stored = {"w.weight": ("fp8", (4, 32), (32,), 4)}
    turns = {"b.weight": ((1, 8, 5), (5, 8))}
    arrays = some() | {"w.weight": np.zeros((4, 18), np.uint8)}
    write_tiny(tmp_path / "model.tiny", arrays, stored=stored, turns=turns, config={"a": 1})
    checkpoint = streamload.open_checkpoint(tmp_path / "model.tiny")
    index = Index.read(write_index(checkpoint), folder_at(checkpoint.path))
    for other in (pickle.loads(pickle.dumps(checkpoint)), index.checkpoint):
        assert dict(other.tensors) == dict(checkpoint.tensors)
        assert other.turns == checkpoint.turns
        assert other.config == {"a": 1}
        for header, same in zip(checkpoint.shards, other.shards, strict=True):
            assert (same.format, same.stored, same.turns) == ("tiny", header.stored, header.turns)


def test_inspect_and_plan(tmp_path: Path, here: Callable[..., tuple[str, str]]) -> None:
    """The commands take such files as any."""
    write_tiny(tmp_path / "model.tiny", some())
    path = str(tmp_path / "model.tiny")
    shown, _ = here("inspect", path)
    here("plan", path, "--budget", "1GB", "--device", "host")
    assert "a.weight" in shown


def test_a_conversion_brings_what_the_file_says(tmp_path: Path) -> None:
    """config.json and other documents are written beside the tensors."""
    write_tiny(
        tmp_path / "model.tiny",
        some(),
        config={"model_type": "llama", "dtype": "float32"},
        metadata={"tokenizer": '{"version": "1.0"}'},
    )
    streamload.convert(tmp_path / "model.tiny", tmp_path / "out", dtype="float16")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "float16"}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    for name, array in some().items():
        assert np.array_equal(loaded(tmp_path / "out")[name], array.astype(np.float16))


@pytest.mark.parametrize("cut", [0, 4, 8, 100, 1010, 1100])
def test_a_file_that_was_cut(tmp_path: Path, cut: int) -> None:
    """One error of ours, with the file's name."""
    write_tiny(tmp_path / "model.tiny", some())
    (tmp_path / "model.tiny").write_bytes((tmp_path / "model.tiny").read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.tiny"):
        streamload.open_checkpoint(tmp_path / "model.tiny")


#: What is found in place of weights: its first bytes, and what the error says that it is.
LOOKALIKES = {
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    "HTML": (b"<!DOCTYPE html><html>Not found</html>", "a web page"),
    "XML": (b'<?xml version="1.0"?><Error/>', "a web page"),
    "JSON": (b'{"error": "Repository not found"}', "JSON, such as a server's error"),
    "link": (b"../../blobs/0123456789abcdef", "the text of a link"),
    "text": (b"Entry not found", "text"),
}


@pytest.mark.parametrize("kind", LOOKALIKES)
@pytest.mark.parametrize("name", ["m.safetensors", "m.bin", "m.gguf", "m.irpa", "README.md"])
def test_lookalikes_are_named_for_every_reader(tmp_path: Path, name: str, kind: str) -> None:
    raw, found = LOOKALIKES[kind]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(HeaderError) as raised:
        streamload.open_checkpoint(tmp_path / name)
    assert raised.value.found == found
    assert raised.value.expected
    if name == "README.md":
        assert raised.value.problem == "is not a weights file"


def test_safetensors_under_another_name(tmp_path: Path) -> None:
    """A file is opened by its first bytes; in a folder, where names decide, the error says it."""
    st.save_file({"a": np.ones(3, np.float32)}, tmp_path / "pytorch_model.bin")
    assert list(streamload.open_checkpoint(tmp_path / "pytorch_model.bin").tensors) == ["a"]
    with pytest.raises(HeaderError) as raised:
        streamload.open_checkpoint(tmp_path)
    assert raised.value.found == "a safetensors file"
    assert raised.value.expected == "the name pytorch_model.safetensors"
