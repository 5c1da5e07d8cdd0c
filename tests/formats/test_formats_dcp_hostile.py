"""Hostile folders of torch.distributed.checkpoint: one clear error each, in little memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from torch_files import archive, pickle_of, state_dict, tensor
from torch_hostile import PICKLES, little_memory, mutated, open_hostile
from torch_loads import check

from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError

torch = needs.module("torch")
M = needs.module("torch.distributed.checkpoint.metadata")
F = needs.module("torch.distributed.checkpoint.filesystem")

WHOLE = torch.arange(16.0).reshape(4, 4)


def _archived(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


UPPER, LOWER = _archived(WHOLE[:2].clone()), _archived(WHOLE[2:].clone())
DATA = UPPER + LOWER


def _chunk(origin: Any, sizes: Any) -> Any:
    return M.ChunkStorageMetadata(origin, sizes)


def _index(*origin: int) -> Any:
    return M.MetadataIndex("model.w", torch.Size(origin))


def metadata() -> Any:
    chunks = [_chunk(torch.Size((at, 0)), torch.Size((2, 4))) for at in (0, 2)]
    info = M.TensorStorageMetadata(M.TensorProperties(torch.float32), torch.Size((4, 4)), chunks)
    return M.Metadata(
        {"model.w": info, "epoch": M.BytesStorageMetadata()},
        {"model.w": ("model", "w"), "epoch": ("epoch",)},
        {
            _index(0, 0): F._StorageInfo("__0_0.distcp", 0, len(UPPER)),
            _index(2, 0): F._StorageInfo("__0_0.distcp", len(UPPER), len(LOWER)),
        },
        M.StorageMeta("a"),
    )


def write_folder(folder: Path, stated: bytes, data: bytes = DATA) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(stated)
    (folder / "__0_0.distcp").write_bytes(data)
    return folder


def test_the_folder_is_good_but_for_that(tmp_path: Path) -> None:
    check(write_folder(tmp_path / "a", pickle.dumps(metadata())), {"w": WHOLE})


# --- metadata -------------------------------------------------------------------------------------


def _info(m: Any) -> Any:
    return m.state_dict_metadata["model.w"]


def _place(m: Any, at: int = 0) -> Any:
    return m.storage_data[_index(at, 0)]


def _set(find: Callable[[Any], Any], **values: Any) -> Callable[[Any], None]:
    """A change: set attributes of what ``find`` returns of the metadata."""

    def change(m: Any) -> None:
        for name, value in values.items():
            setattr(find(m), name, value)

    return change


def _chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]], **of: Any) -> Callable[[Any], None]:
    """A change: other chunks, stored as the first one is, and others as the second."""

    def change(m: Any) -> None:
        _info(m).chunks = [_chunk(torch.Size(a), torch.Size(n)) for a, n in boxes]
        for (origin, _), at in zip(boxes, (0, 2, 2), strict=False):
            m.storage_data.setdefault(_index(*origin), _place(m, at))
        for name, value in of.items():
            setattr(_info(m), name, value)

    return change


#: By name: the change, and what the error says.
CHANGES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "overlapping chunks": (_chunks(((0, 0), (2, 4)), ((1, 0), (2, 4))), "overlap"),
    "a chunk twice": (_chunks(*[((0, 0), (2, 4))] * 2), "begins inside another"),
    "a chunk thrice": (_chunks(*[((0, 0), (2, 4))] * 3), "begins inside another"),
    "a missing chunk": (_chunks(((0, 0), (2, 4))), "leave holes"),
    "no chunks": (_chunks(), "leave holes"),
    "a hole": (_chunks(((0, 0), (2, 4)), size=torch.Size((5, 4))), "leave holes"),
    "a chunk beyond the tensor": (_chunks(((0, 0), (2, 4)), ((3, 0), (2, 4))), "leads out of it"),
    "a huge origin": (_chunks(((0, 0), (2, 4)), ((2**61, 0), (2, 4))), "leads out of it"),
    "huge sizes": (_chunks(((0, 0), (2**61, 2**61))), "contradicts the metadata"),
    "a huge tensor": (_chunks(((0, 0), (2, 4)), size=torch.Size((2**61, 4))), "leave holes"),
    "more axes of a chunk": (_chunks(((0, 0, 0), (2, 4, 1))), "a chunk has other axes"),
    "fewer axes of a chunk": (_chunks(((0,), (4,))), "a chunk has other axes"),
    "an origin without axes": (_chunks(((), (2, 4))), "a chunk has other axes"),
    "an origin below 0": (
        lambda m: _set(_info, chunks=[_chunk((-1, 0), (2, 4))])(m),
        "a shape is not valid",
    ),
    "sizes below 0": (_set(_info, chunks=[_chunk((0, 0), (-2, -4))]), "a shape is not valid"),
    "sizes of floats": (_set(_info, chunks=[_chunk((0, 0), (2.0, 4))]), "a shape is not valid"),
    "sizes of bools": (_set(_info, chunks=[_chunk((0, 0), (True, 4))]), "a shape is not valid"),
    "sizes that are a list": (_set(_info, chunks=[_chunk((0, 0), [2, 4])]), "a shape is not valid"),
    "sizes of a hundred axes": (
        _set(_info, chunks=[_chunk((0,) * 100, (1,) * 100)]),
        "a shape is not valid",
    ),
    "a huge size": (_set(_info, chunks=[_chunk((0, 0), (2**70, 1))]), "a shape is not valid"),
    "chunks that are a dict": (_set(_info, chunks={}), "its chunks are not valid"),
    "chunks that are none": (_set(_info, chunks=None), "its chunks are not valid"),
    "a chunk that is a number": (_set(_info, chunks=[1, 2]), "a shape is not valid"),
    "a chunk of another class": (_set(_info, chunks=[M.BytesStorageMetadata()]), "a shape is not"),
    "a chunk that is the tensor": (lambda m: _set(_info, chunks=[_info(m)])(m), "a shape is not"),
    "a shape below 0": (_set(_info, size=(-4, 4)), "a shape is not valid"),
    "a shape that is a list": (_set(_info, size=[4, 4]), "holds no tensors by name"),
    "no properties": (_set(_info, properties=None), "unknown dtype"),
    "properties of another class": (_set(_info, properties=M.StorageMeta()), "unknown dtype"),
    "complex128": (_set(_info, properties=M.TensorProperties(torch.complex128)), "unknown dtype"),
    "another dtype": (_set(_info, properties=M.TensorProperties(torch.int32)), "contradicts the"),
    "a smaller dtype": (_set(_info, properties=M.TensorProperties(torch.int8)), "contradicts the"),
    "transforms": (_set(_place, transform_descriptors=["zstd"]), "was saved with transforms"),
    "an offset beyond the file": (_set(_place, offset=2**40), "a chunk is cut off"),
    "a huge offset": (_set(_place, offset=2**200), "the place of a chunk is not valid"),
    "an offset below 0": (_set(_place, offset=-1), "the place of a chunk is not valid"),
    "an offset inside an archive": (_set(_place, offset=7), "is not of torch.save|is cut off"),
    "a length beyond the file": (_set(_place, length=2**40), "a chunk is cut off"),
    "a length below 0": (_set(_place, length=-1), "the place of a chunk is not valid"),
    "a length of 0": (_set(_place, length=0), "is not of torch.save"),
    "a shorter length": (_set(_place, length=len(UPPER) - 9), "is cut off"),
    "a longer length": (_set(_place, length=len(DATA) - 30), "is a zip archive"),
    "an offset in words": (_set(_place, offset="0"), "the place of a chunk is not valid"),
    "no offset": (_set(_place, offset=None), "the place of a chunk is not valid"),
    "another's chunk": (
        _set(_place, offset=len(UPPER), length=len(LOWER)),
        "begins inside another",
    ),
    "a path above": (_set(_place, relative_path="../__0_0.distcp"), "outside of the folder"),
    "a path of the root": (_set(_place, relative_path="/etc/a.distcp"), "outside of the folder"),
    "a path of Windows": (_set(_place, relative_path="a\\b.distcp"), "outside of the folder"),
    "a path that ends": (_set(_place, relative_path="a\0.distcp"), "outside of the folder"),
    "a path that is a number": (_set(_place, relative_path=3), "outside of the folder"),
    "another file": (_set(_place, relative_path=".metadata"), "outside of the folder"),
    "a missing file": (_set(_place, relative_path="__9_0.distcp"), "no such file"),
    "a place that is none": (
        lambda m: m.storage_data.__setitem__(_index(0, 0), None),
        "outside of the folder",
    ),
    "a chunk that is not stored": (
        lambda m: m.storage_data.pop(_index(2, 0)),
        "a chunk is missing",
    ),
    "an index that is text": (lambda m: setattr(m, "storage_data", {"a": 1}), "a chunk is missing"),
    "an index without a name": (
        lambda m: setattr(m, "storage_data", {M.MetadataIndex(None, (0, 0)): _place(m)}),
        "a chunk is missing",
    ),
    "an index of a deep tuple": (
        lambda m: setattr(m, "storage_data", {_index_of(((((0,),),),)): _place(m)}),
        "a chunk is missing",
    ),
    "no storage": (lambda m: setattr(m, "storage_data", None), "is not the metadata"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "is not the metadata"),
    "tensors in a list": (lambda m: setattr(m, "state_dict_metadata", []), "is not the metadata"),
    "bytes alone": (lambda m: m.state_dict_metadata.pop("model.w"), "holds no tensors by name"),
    "a tensor without a name": (
        lambda m: m.state_dict_metadata.update({0: m.state_dict_metadata.pop("model.w")}),
        "holds no tensors by name",
    ),
    "keys of an optimizer": (
        lambda m: m.planner_data.update(
            {"model.w": ("o", "state.w"), "epoch": ("o", "param_groups")}
        ),
        "holds no tensors by name",
    ),
    "keys of half a surrogate": (
        lambda m: m.planner_data.update({"model.w": ("model", "\ud800")}),
        "the name is not valid",
    ),
}


def _index_of(offset: Any) -> Any:
    found = _index(0, 0)
    object.__setattr__(found, "offset", offset)
    return found


@pytest.mark.parametrize("name", CHANGES)
def test_hostile_metadata(tmp_path: Path, name: str) -> None:
    """Each change ends in one error that says what is wrong."""
    change, problem = CHANGES[name]
    change(changed := metadata())
    folder = write_folder(tmp_path / "a", pickle.dumps(changed))
    with little_memory(), pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert any(each in raised.value.problem for each in problem.split("|")), raised.value
    assert type(raised.value) in (HeaderError, TruncatedFileError, ShardNotFoundError)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2000


def test_keys_that_contradict_each_other(tmp_path: Path) -> None:
    """Ways through a tensor, empty ways and ways of other objects: the rest is found."""
    for way in ((), ("epoch", "w"), (("a",),), ["model", "w"], "model.w"):
        (changed := metadata()).planner_data["model.w"] = way
        with little_memory():
            try:
                found = open_checkpoint(write_folder(tmp_path / "a", pickle.dumps(changed)))
            except HeaderError as error:
                assert error.problem == "holds no tensors by name"
            else:
                assert len(found) == 1


@pytest.mark.parametrize("name", PICKLES)
def test_hostile_pickles(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is called; what other files of torch may name is refused, too."""
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it was run"))
    stated = PICKLES[name][0]
    with little_memory(2**22 + 20 * len(stated)), pytest.raises(HeaderError):
        open_checkpoint(write_folder(tmp_path / "a", stated))


@pytest.mark.parametrize(
    "named",
    [
        *("torch._utils _rebuild_tensor_v2", "torch FloatStorage", "collections OrderedDict"),
        *("torch.distributed.checkpoint.metadata STATE_DICT_TYPE", "pathlib Path", "builtins set"),
        *("torch.distributed.checkpoint.filesystem FileSystemReader", "_codecs encode"),
        *("torch.distributed.checkpoint.filesystem _StoragePrefix", "os system", "torch load"),
    ],
)
def test_other_names(tmp_path: Path, named: str) -> None:
    """The metadata name few classes."""
    module, name = named.split()
    folder = write_folder(tmp_path / "a", pickle_of(f"c{module}\n{name}\n".encode() + b")R"))
    with pytest.raises(HeaderError, match=f"names {module}.{name}, which is never called"):
        open_checkpoint(folder)


def test_long_tuples_that_many_share(tmp_path: Path) -> None:
    """Keys, offsets and shapes of 100,000 members are looked at once, if at all."""
    long = (1,) * 10**5
    changed = metadata()
    info, place = _info(changed), _place(changed)
    for number in range(2000):
        name = f"model.{number}"
        changed.planner_data[name] = long
        changed.state_dict_metadata[name] = M.TensorStorageMetadata(info.properties, long, [])
        changed.storage_data[_index_of(long)] = place
    started = time.monotonic()
    assert [*open_checkpoint(write_folder(tmp_path / "a", pickle.dumps(changed)))] == ["w"]
    assert time.monotonic() - started < 5


# --- data -----------------------------------------------------------------------------------------

ITEMS: Mapping[str, tuple[bytes, str]] = {
    "a dict": (archive(state_dict(a=tensor())), "a chunk is no tensor"),
    "another shape": (_archived(WHOLE), "contradicts the metadata"),
    "another order of axes": (_archived(torch.zeros(4, 2)), "contradicts the metadata"),
    "a sparse tensor": (_archived(WHOLE[:2].to_sparse()), "cannot be read"),
    "a call": (archive(pickle_of(b"cos\nsystem\n)R")), "names os.system"),
    "a tensor beyond its storage": (
        archive(pickle_of(tensor((2, 4), (4, 1)))),
        "leads out of its storage",
    ),
    "a module": (_archived(torch.nn.Linear(1, 1)), "a chunk is no tensor"),
    "zeros": (bytes(len(UPPER)), "is not of torch.save"),
    "a pickle": (pickle.dumps(1).ljust(len(UPPER), b"\0"), "is a pickle"),
}


@pytest.mark.parametrize("name", ITEMS)
def test_hostile_items(tmp_path: Path, name: str) -> None:
    """The error names the tensor and the file."""
    data, problem = ITEMS[name]
    changed = metadata()
    _place(changed).length, _place(changed, 2).offset = len(data), len(data)
    folder = write_folder(tmp_path / "a", pickle.dumps(changed), data + LOWER)
    with little_memory(), pytest.raises(CheckpointError) as raised:
        open_checkpoint(folder)
    assert problem in raised.value.problem
    assert raised.value.tensor == "w"
    assert raised.value.path.endswith("__0_0.distcp")


def test_every_cut(tmp_path: Path) -> None:
    stated = pickle.dumps(metadata())
    for stop in range(0, len(stated), 7):
        with pytest.raises(CheckpointError):
            open_checkpoint(write_folder(tmp_path / "a", stated[:stop]))
    for stop in range(0, len(DATA), 41):
        with pytest.raises(TruncatedFileError, match="a chunk is cut off"):
            open_checkpoint(write_folder(tmp_path / "a", stated, DATA[:stop]))
    os.truncate(write_folder(tmp_path / "a", stated) / ".metadata", 2**32)
    with little_memory(), pytest.raises(HeaderError, match=r"\.metadata is too long"):
        open_checkpoint(tmp_path / "a")


def test_many_chunks(tmp_path: Path) -> None:
    changed = metadata()
    _info(changed).chunks = [_chunk(torch.Size((0, 0)), torch.Size((0, 4)))] * 20_000
    folder = write_folder(tmp_path / "a", pickle.dumps(changed))
    with little_memory(2**24), pytest.raises(HeaderError, match="leave holes"):
        open_checkpoint(folder)


# --- safetensors of DCP ---------------------------------------------------------------------------


def _shard(name: str, shape: list[int], saved: Any, code: str = "F32") -> bytes:
    nbytes = 4 * shape[0] * shape[1]
    entry = {"dtype": code, "shape": shape, "data_offsets": [0, nbytes]}
    stated = saved if isinstance(saved, str) else json.dumps(saved)
    header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": stated}, name: entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(nbytes)


def _at(*offsets: Any) -> Any:
    return {"w": {"saved_offsets": list(offsets)}}


#: By name: what the second file says of its chunk, and what the error says; "" for a good one.
SHARDS: Mapping[str, tuple[Any, str]] = {
    "good": (_at(2, 0), ""),
    "overlapping chunks": (_at(0, 0), "overlap"),
    "chunks that overlap in part": (_at(1, 0), "overlap"),
    "a hole": (_at(3, 0), "leave holes"),
    "a huge hole": (_at(2**60, 0), "leave holes"),
    "a hole beyond 64 bits": (_at(2**64, 0), "not valid|leave holes"),
    "an offset below 0": (_at(-2, 0), "its saved_offsets are not valid"),
    "an offset in words": (_at("2", 0), "its saved_offsets are not valid"),
    "an offset of a bool": (_at(True, 0), "its saved_offsets are not valid"),
    "fewer offsets": (_at(2), "its chunks differ"),
    "more offsets": (_at(2, 0, 0), "its chunks differ"),
    "no offsets": ({"w": {}}, "its saved_offsets are not valid"),
    "offsets of a string": ({"w": {"saved_offsets": "20"}}, "its saved_offsets are not valid"),
    "another tensor's offsets": ({"v": {"saved_offsets": [2, 0]}}, "overlap"),
    "no object": ("[]", "is not a JSON object"),
    "no JSON": ("{", "the JSON is not valid"),
    "deep JSON": ('{"a":' * 10**4, "the JSON is not valid"),
    "a long number": ('{"w":' + "9" * 10**5 + "}", "the JSON is not valid"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_hostile_safetensors(tmp_path: Path, name: str) -> None:
    """What the metadata of safetensors files say of chunks is checked, too."""
    saved, problem = SHARDS[name]
    for number, each in ((1, _at(0, 0)), (2, saved)):
        file = tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors"
        file.write_bytes(_shard("w", [2, 4], each))
    if not problem:
        check(tmp_path, {"w": torch.zeros(4, 4)})
        return
    with little_memory(), pytest.raises(HeaderError) as raised:
        open_checkpoint(tmp_path)
    assert any(each in raised.value.problem for each in problem.split("|")), raised.value


@pytest.mark.parametrize(("code", "shape"), [("I32", [2, 4]), ("F32", [2, 3]), ("F32", [4, 2])])
def test_chunks_that_differ(tmp_path: Path, code: str, shape: list[int]) -> None:
    """Chunks of one tensor have one dtype, and cover it."""
    for number, data in (
        (1, _shard("w", [2, 4], _at(0, 0))),
        (2, _shard("w", shape, _at(2, 0), code)),
    ):
        (tmp_path / f"shard-{number:05}-model-00001-of-00001.safetensors").write_bytes(data)
    with pytest.raises(HeaderError, match="its chunks"):
        open_checkpoint(tmp_path)


# --- fuzzers --------------------------------------------------------------------------------------

_SEEDS = tuple(pickle.dumps(metadata(), protocol) for protocol in (2, 4))


@settings(max_examples=few(1500), deadline=None, suppress_health_check=list(HealthCheck))
@given(stated=mutated(_SEEDS))
def test_mutated_metadata(tmp_path_factory: pytest.TempPathFactory, stated: bytes) -> None:
    """Nothing but our errors comes out, and what opens can be read."""
    open_hostile(write_folder(tmp_path_factory.getbasetemp() / "mutated", stated))


@pytest.mark.slow
@settings(max_examples=few(600), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutated((DATA,)))
def test_mutated_items(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Nothing but our errors comes out, and what opens can be read."""
    folder = tmp_path_factory.getbasetemp() / "items"
    open_hostile(write_folder(folder, pickle.dumps(metadata()), data))


_NUMBERS = st.sampled_from([0, 1, 2, 3, 4, -1, 2**31, 2**62, 2**63, 2**64]) | st.integers(-5, 5)
_VALUES = (
    _NUMBERS
    | st.none()
    | st.text(max_size=3)
    | st.lists(_NUMBERS, max_size=4).map(tuple)
    | st.sampled_from(["__0_0.distcp", (), [], {}, True, (0, 0), (2, 0), (2, 4), (4, 4)])
)


@pytest.mark.slow
@settings(max_examples=few(900), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_values(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    m = metadata()
    info = _info(m)
    places = [SimpleNamespace(found=each) for each in (_place(m), _place(m, 2), *info.chunks, info)]
    for _ in range(data.draw(st.integers(1, 4))):
        found = data.draw(st.sampled_from(places)).found
        name = data.draw(st.sampled_from(sorted(vars(found))))
        setattr(found, name, data.draw(_VALUES))
    open_hostile(write_folder(tmp_path_factory.getbasetemp() / "values", pickle.dumps(m)))
