"""Files of torch.save: the same tensors as torch.load, wherever checkpoints are read."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
import stream_helpers
from conversions import quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameters import few
from recording import RecordingDevice
from remote_server import serve
from safetensors_files import write_safetensors
from torch_files import write
from torch_loads import bits, check, loaded

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.distributed.gather import shared_ranges
from streamload.distributed.index import Index, write_index
from streamload.errors import ResidenceError, StateDictMismatchError
from streamload.files.folder import ReaderKind, folder_at, open_reader
from streamload.files.header import View
from streamload.verification.diff import diff

torch = needs.module("torch")
safetensors_torch = needs.module("safetensors.torch")

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "complex64", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def filled(*shape: int, dtype: Any = None) -> Any:
    """Numbers that tell every element from its neighbours."""
    numel = int(np.prod(shape))
    return torch.arange(1, numel + 1).reshape(shape).to(dtype or torch.float32)


def _dtypes() -> dict[str, Any]:
    return {name: filled(3, 5).to(getattr(torch, name)) for name in DTYPES}


def _views() -> dict[str, Any]:
    whole = filled(8, 12)
    cube = filled(3, 4, 5, dtype=torch.int64)
    return {
        "whole": whole,
        "transposed": whole.t(),
        "rows": whole[2:5],
        "columns": whole[:, 3:7],
        "every_second": whole[::2, 1::3],
        "one_column": whole[:, 4],
        "one_element": whole[3, 3],
        "none": whole[:0, 2:],
        "expanded": filled(1, 3).expand(4, 3),
        "expanded_scalar": torch.tensor(2.5).expand(3, 3),
        "permuted": cube.permute(2, 0, 1),
        "inside": cube[1:, 1:3, ::2],
        "diagonal": torch.diagonal(whole),
        "windows": whole.flatten().unfold(0, 7, 3),
        "turned_bf16": filled(5, 9).bfloat16().t(),
        "turned_bytes": filled(4, 6, dtype=torch.uint8).t(),
        "turned_fp8": filled(4, 6).to(torch.float8_e4m3fn).t(),
        "turned_complex": (filled(2, 3) + 1j).t(),
        "channels_last": filled(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }


def _parameters() -> dict[str, Any]:
    weight = torch.nn.Parameter(filled(4, 6))
    marked = filled(3)
    marked.note = "an attribute"
    frozen = torch.nn.Parameter(filled(2, 2), requires_grad=False)
    return {"weight": weight, "turned": weight.t(), "marked": marked, "frozen": frozen}


def _shared() -> dict[str, Any]:
    weight = filled(6, 4)
    return {"embedding": weight, "head": weight, "tail": weight[2:], "bias": weight.view(-1)[5:9]}


def _module() -> Any:
    """A network as torchvision has them: convolutions, norms with counters, a classifier."""
    block = torch.nn.Sequential(
        OrderedDict(
            conv1=torch.nn.Conv2d(3, 8, 3, bias=False),
            bn1=torch.nn.BatchNorm2d(8),
            layer1=torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.BatchNorm2d(8)),
            fc=torch.nn.Linear(8, 5),
        )
    )
    block.conv1.to(memory_format=torch.channels_last)
    return block


def _training() -> dict[str, Any]:
    """What a training loop saves: the state of an optimizer beside the model's."""
    module = _module()
    optimizer = torch.optim.AdamW(module.parameters())
    sum(p.sum() for p in module.parameters()).backward()
    optimizer.step()
    beside = {"lr": 1e-3, "betas": (0.9, 0.999), "seen": {1, 2}, "name": "a", "raw": b"\0", "n": 7}
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": {**beside, "large": 2**80, "none": None, "i": 1j, "list": [1, [2.5]]},
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
    }


CASES: Mapping[str, Callable[[], Any]] = {
    "dtypes": _dtypes,
    "views": _views,
    "parameters": _parameters,
    "shared": _shared,
    "module": lambda: _module().state_dict(),
    "training": _training,
}


def of_torch(path: Path) -> Any:
    found = torch.load(path, weights_only=True)
    return found.get("model", found)


# --- the same as torch.load -----------------------------------------------------------------------


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_loads_what_torch_load_does(tmp_path: Path, case: str, protocol: int, is_zip: bool) -> None:
    path = tmp_path / "model.pth"
    value = CASES[case]()
    if not is_zip and protocol == 2:
        # torch writes these dtypes in the old form, and cannot load them
        of_v3 = re.compile(r"torch\.(float8|uint\d\d).*")
        value = {k: v for k, v in value.items() if not of_v3.match(str(getattr(v, "dtype", "")))}
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    expected = of_torch(path) if protocol == 2 else value.get("model", value)
    check(path, expected)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("reader", ["mmap", "pread", "direct"])
def test_every_reader_reads_views(tmp_path: Path, reader: ReaderKind, is_zip: bool) -> None:
    path = tmp_path / "model.pth"
    torch.save(_views(), path, _use_new_zipfile_serialization=is_zip)
    check(path, _views(), reader=reader)


@pytest.mark.parametrize("alignment", [64, 512, 4096])
def test_any_alignment_of_storages(tmp_path: Path, alignment: int) -> None:
    config = needs.module("torch.utils.serialization.config")
    path = tmp_path / "model.pt"
    before = config.save.storage_alignment
    config.save.storage_alignment = alignment
    try:
        torch.save(_module().state_dict(), path)
    finally:
        config.save.storage_alignment = before
    starts = [info.start for info in open_checkpoint(path).tensors.values()]
    assert all(start % alignment == 0 for start in starts)
    check(path, of_torch(path))


def test_archives_of_other_writers(tmp_path: Path) -> None:
    """An archive that was zipped again, without compression, is the same; with sizes of 64 bits."""
    path, again = tmp_path / "model.pth", tmp_path / "again.bin"
    torch.save(_views(), path)
    with zipfile.ZipFile(path) as read, zipfile.ZipFile(again, "w") as written:
        written.comment = b"zipped again PK\5\6"
        for name in reversed(read.namelist()):
            with written.open(name, "w", force_zip64=True) as entry:
                entry.write(read.read(name))
    check(again, of_torch(path))


def test_crc_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(_module().state_dict(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    check(path, of_torch(path))


def test_storages_beyond_4_gib(tmp_path: Path) -> None:
    """Places of 64 bits: torch leaves out the bytes of a sparse file, and writes the rest."""
    path = tmp_path / "model.pth"
    with torch.serialization.skip_data():
        large = torch.empty(9 * 2**29, dtype=torch.uint8)  # no page of it is touched
        torch.save({"large": large, "after": torch.empty(3), "turned": torch.empty(2, 3).t()}, path)
    tensors = open_checkpoint(path).tensors
    place = tensors["after"]
    assert place.start > 2**32
    with path.open("r+b") as file:
        file.seek(place.start)
        file.write(np.array([1, 2, 3], "<f4").tobytes())
    del large
    found = loaded(path, {"after": torch.empty(3)}, strict=False)
    assert found["after"].tolist() == [1, 2, 3]


def test_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = needs.module("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=99, num_hidden_layers=2, **sizes)
    model = transformers.BertModel(config)
    config.architectures = ["BertModel"]
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save({"lr": 1.0}, folder / "training_args.bin")
    theirs = transformers.AutoModel.from_pretrained(folder)
    ours = streamload.transformers.from_pretrained(folder, device="cpu", progress=False)
    for name, value in theirs.state_dict().items():
        assert bits(ours.state_dict()[name]) == bits(value), name


FORMS: Mapping[str, Callable[[Any], Any]] = {
    "plain": lambda model: model.state_dict(),
    "parameters": lambda model: OrderedDict(model.named_parameters()),
    "bfloat16": lambda model: model.bfloat16().state_dict(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last).state_dict(),
    "sub_modules": lambda model: {
        f"{name}.{key}": value
        for name, inner in model.named_children()
        for key, value in inner.state_dict(keep_vars=True).items()
    },
    "training": lambda model: trained(model),
}


def trained(model: Any) -> dict[str, Any]:
    """What torchvision's own training writes, after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    states = {"optimizer": optimizer.state_dict(), "lr_scheduler": scheduler.state_dict()}
    return {"model": model.state_dict(), **states, "epoch": 3}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t", "mobilenet_v3_small"])
def test_a_model_of_torchvision(tmp_path: Path, name: str, form: str) -> None:
    """Convolutions, norms with counters, transformers and their tables, in each form of a file."""
    try:
        models = importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it is built for another torch
        pytest.skip(f"torchvision: {error}")
    path = tmp_path / f"{name}.pth"
    torch.save(FORMS[form](models.get_model(name, weights=None)), path)
    expected = of_torch(path)
    assert len(open_checkpoint(path).tensors) == len(expected) > 50
    check(path, expected)


# --- wherever checkpoints are read ----------------------------------------------------------------


def test_converts_and_compares(tmp_path: Path) -> None:
    path, out = tmp_path / "model.pth", tmp_path / "out"
    torch.save(_views(), path)
    report = quiet(path, out, verify=True, max_shard_size=500)
    assert len(report.plan.files) > 1
    found = {}
    for file in out.glob("*.safetensors"):
        found |= safetensors_torch.load_file(file)
    for name, value in of_torch(path).items():
        assert bits(found[name]) == bits(value), name
    assert diff(path, out, progress=False).ok
    half = tmp_path / "half"
    quiet(path, half, dtype="float16")
    assert diff(path, half, dtype="float16", progress=False).ok


def test_iterates(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(_views(), path)
    expected = of_torch(path)
    for name, value in streamload.iterate(path, device="cpu", dtype="checkpoint"):
        assert bits(value) == bits(expected[name]), name


def test_large_views_in_small_chunks(tmp_path: Path) -> None:
    """Chunks end within lines, and lines lie further apart than what is read at once."""
    wide = filled(70, 30_000, dtype=torch.int32)
    value = {"turned": wide.t(), "columns": wide[:, 17:19_001], "wide": wide[::3]}
    path = tmp_path / "model.pth"
    torch.save(value, path)
    check(path, value, chunk_nbytes=50_000)
    check(path, value, reader="mmap", chunk_nbytes=1_000_000, threads=3)


@st.composite
def strided(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Shapes, strides and offsets of views of 5,000 elements, in any order, that may repeat."""
    views = []
    for _ in range(draw(st.integers(1, 4))):
        left = 4999
        shape, strides = [], []
        for _ in range(draw(st.integers(0, 4))):
            stride = draw(st.integers(0, min(left, 700)))
            length = draw(st.integers(1, min(left // stride, 40) + 1 if stride else 5))
            left -= stride * (length - 1)
            shape.append(length)
            strides.append(stride)
        if np.prod(shape, dtype=np.int64) <= 20_000:
            views.append((tuple(shape), tuple(strides), draw(st.integers(0, left))))
    return views


@settings(max_examples=few(45), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    views=strided(),
    chunk_nbytes=st.integers(8, 3000),
    dtype=st.sampled_from(["int32", "int8", "float64"]),
)
def test_views_of_any_strides(
    tmp_path_factory: pytest.TempPathFactory, views: Any, chunk_nbytes: int, dtype: str
) -> None:
    whole = filled(5000).to(getattr(torch, dtype))
    value = {f"{i}": torch.as_strided(whole, *view) for i, view in enumerate(views)}
    path = tmp_path_factory.getbasetemp() / "strided.pth"
    torch.save({**value, "whole": whole}, path)
    check(path, of_torch(path), chunk_nbytes=chunk_nbytes)


def test_a_read_takes_as_long_for_many_views(tmp_path: Path) -> None:
    path, seconds = write(tmp_path / "file", bytes(1000)), []
    for count in (100, 200_000):
        views = [View.strided(4096 + 64 * i, 0, 4, (4,), (8,)) for i in range(count)]
        with open_reader(path, 1000, "pread", views=views) as reader:
            begun = time.thread_time()
            for view in views[:100] * 3:
                reader.read_into(view.start, memoryview(bytearray(16)))
            seconds.append(time.thread_time() - begun)
    assert seconds[1] < 8 * seconds[0]


@pytest.mark.parametrize("host_visible", [False, True])
@pytest.mark.parametrize("reader", ["mmap", "pread"])
@pytest.mark.parametrize("dtype", ["checkpoint", "float32"])
def test_a_device_with_staging(
    tmp_path: Path, host_visible: bool, reader: ReaderKind, dtype: str
) -> None:
    path = tmp_path / "model.pth"
    value = {f"{i}": filled(5, 3) + i for i in range(40)} | _shared() | _views()
    value = {name: tensor.bfloat16() for name, tensor in value.items() if not tensor.is_complex()}
    turned = {"turned": filled(50, 70).bfloat16().t()}
    torch.save({**value, **turned, "again": value["embedding"]}, path)
    device = RecordingDevice(host_visible=host_visible, seed=3)
    run = stream_helpers.prepare(path, [device], dtype=dtype, chunk_nbytes=1000, reader=reader)
    run.go()
    run.check_ended()
    assert device.wrongs == []
    for name, expected in of_torch(path).items():
        wide = expected if dtype == "checkpoint" else expected.float()
        assert bytes(run.loaded()[name].data) == bits(wide)[2], name


def test_any_range_of_views(tmp_path: Path) -> None:
    path = write(tmp_path / "file", bytes(range(48)))
    table = np.frombuffer(bytes(range(48)), "<u4").reshape(3, 4)
    views = View.strided(64, 0, 4, (4, 3), (4, 16)), View.strided(128, 8, 4, (2, 2), (0, 4))
    turned, doubled = table.T.tobytes(), (table.reshape(-1)[2:4].tobytes()) * 2
    whole = bytes(range(48)) + bytes(16) + turned + bytes(16) + doubled
    with open_reader(path, 48, "pread", views=views) as reader:
        assert reader.nbytes == len(whole)
        for start in range(0, len(whole), 3):
            for stop in range(start, len(whole) + 1, 5):
                out = bytearray(stop - start)
                reader.read_into(start, memoryview(out))
                expected = whole[start:stop]
                apart = [i for i in range(start, stop) if not (48 <= i < 64 or 112 <= i < 128)]
                assert [out[i - start] for i in apart] == [expected[i - start] for i in apart]


def test_residence(tmp_path: Path) -> None:
    """What is a range of the file can stay there; a view with strides cannot, and says why."""
    weight = filled(64, 64)
    path = tmp_path / "model.pth"
    torch.save({"weight": weight, "rows": weight[3:9]}, path)
    report = streamload.load_state_dict(
        None, path, device="cpu", residence="mapped", dtype="checkpoint", progress=False
    )
    found = report.state_dict
    assert torch.equal(found["weight"], weight) and torch.equal(found["rows"], weight[3:9])
    torch.save({"weight": weight, "turned": weight.t()}, path)
    with pytest.raises(ResidenceError, match="do not follow each other"):
        streamload.load_state_dict(
            None, path, device="cpu", residence="mapped", dtype="checkpoint", progress=False
        )


def test_offloads_a_model(tmp_path: Path) -> None:
    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(64, 64, bias=False)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x

    model = Stack().eval()
    value = model.state_dict()
    value["first.weight"] = value["first.weight"].t().contiguous().t()
    path = tmp_path / "model.pth"
    torch.save(value, path)
    with torch.device("meta"):
        empty = Stack().eval()
    given = torch.ones(2, 64)
    with torch.no_grad():
        streamed = streamload.offload(empty, path, budget=140_000, device="cpu", stay="first*")
        try:
            assert streamed.plan.views
            assert torch.allclose(empty(given), model(given), atol=1e-6)
        finally:
            streamed.close()


def test_ties_and_counters_of_a_module(tmp_path: Path) -> None:
    """Tied weights, stored under both names, fill one parameter."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.head = torch.nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    path = tmp_path / "model.pth"
    saved, model = Tied(), Tied()
    torch.save(saved.state_dict(), path)
    streamload.load_state_dict(model, path, device="cpu", dtype="checkpoint", progress=False)
    assert model.head.weight is model.embedding.weight
    for name, value in saved.state_dict().items():
        assert bits(model.state_dict()[name]) == bits(value), name


def test_prefix_of_data_parallel(tmp_path: Path) -> None:
    """Names that DataParallel has made are answered by the renaming to write."""
    path = tmp_path / "model.pth"
    torch.save(torch.nn.DataParallel(_module()).state_dict(), path)
    model = _module()
    arguments: dict[str, Any] = {"device": "cpu", "dtype": "checkpoint", "progress": False}
    with pytest.raises(StateDictMismatchError) as raised:
        streamload.load_state_dict(model, path, **arguments)
    assert 'rename=lambda name: name.removeprefix("module.")' in str(raised.value)
    streamload.load_state_dict(
        model, path, rename=lambda name: name.removeprefix("module."), **arguments
    )
    assert torch.equal(model.fc.weight, of_torch(path)["module.fc.weight"])


def test_numpy_arrays_and_tinygrad_take_it(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"turned": filled(3, 4).t()}, path)
    arrays = {"turned": np.zeros((4, 3), np.float32)}
    streamload.load_state_dict(arrays, path, device="host", progress=False)
    assert (arrays["turned"] == filled(3, 4).t().numpy()).all()


def test_other_processes_and_ranks(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save(_views(), path)
    checkpoint = open_checkpoint(path)
    indexed = Index.read(write_index(checkpoint), folder_at(path)).checkpoint
    for other in (indexed, pickle.loads(pickle.dumps(checkpoint))):
        assert dict(other.tensors) == dict(checkpoint.tensors)
        assert other.shards[0].views == checkpoint.shards[0].views
        assert other.shards[0].format == "torch"


def test_bytes_of_several_tensors_are_not_gathered(tmp_path: Path) -> None:
    """Ranks exchange each byte once: tensors that share some are read where they lie."""
    path = tmp_path / "model.pth"
    torch.save({**_shared(), "alone": filled(5)}, path)
    checkpoint = open_checkpoint(path)
    plan = streamload.plan(path, device="host", dtype="checkpoint")
    (ranges,) = shared_ranges(checkpoint, plan.placements).values()
    alone = checkpoint.tensors["alone"]
    assert ranges == [(alone.start, alone.stop)]


# --- folders and servers --------------------------------------------------------------------------


def test_a_folder_of_shards(tmp_path: Path) -> None:
    """pytorch_model.bin.index.json names the files; what a Trainer leaves beside is left alone."""
    value = _module().state_dict()
    names = list(value)
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    parts = names[:4], names[4:]
    for file, part in zip(files, parts, strict=True):
        torch.save({name: value[name] for name in part}, tmp_path / file)
    torch.save({"lr": filled(1)}, tmp_path / "optimizer.bin")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    check(tmp_path, value)  # a whole set needs no index
    index = tmp_path / "pytorch_model.bin.index.json"
    weight_map = {n: file for file, part in zip(files, parts, strict=True) for n in part}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    check(tmp_path, value)
    check(index, value)
    assert open_checkpoint(tmp_path).config == {"hidden_size": 3}
    with serve(tmp_path) as site:
        check(site.url, value)
    write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", (2,), bytes(4))})
    assert [*open_checkpoint(tmp_path).tensors] == ["a"]


def test_over_http(tmp_path: Path) -> None:
    """The first bytes and the directory are two requests, and no storage is asked for."""
    value = {f"layers.{i}": filled(300, 400) for i in range(20)} | {"turned": filled(50, 70).t()}
    path = tmp_path / "pytorch_model.bin"
    torch.save(value, path)
    with serve(tmp_path) as site:
        checkpoint = open_checkpoint(site.url + path.name)
        assert len(site.asked(f"/{path.name}")) == 2
        assert [*checkpoint.tensors] == [*open_checkpoint(path).tensors]
        check(site.url + path.name, value)
        check(site.url, value)
        again = tmp_path / "zipped.pth"
        with zipfile.ZipFile(path) as read, zipfile.ZipFile(again, "w") as written:
            for name in read.namelist():
                written.writestr(name, read.read(name))
        site.files["/zipped.pth"] = again.read_bytes()
        check(site.url + "zipped.pth", value)
