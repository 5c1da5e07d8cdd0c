"""Checkpoint to checkpoint: what is written, what is refused, and who can read it."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import forked
import needs
import numpy as np
import pytest
from bench_parts.section import forget
from boxes import Boxes
from conversions import files_of, quiet, reference, same_values, tensors_of, visible
from hub_server import use_hub
from make_checkpoint import make_checkpoint, shape_of_size
from safetensors_files import write_safetensors

import streamload
from streamload.checkpoint.digests import SIDECAR, Digests, hasher
from streamload.checkpoint.open import open_checkpoint
from streamload.conversion.convert import convert
from streamload.conversion.disk import WORK
from streamload.conversion.rename import RenamePatterns
from streamload.core.dtypes import BF16, BY_CODE, F16, parse_dtype
from streamload.errors import (
    CheckpointError,
    OutOfRangeError,
    PlanInfeasibleError,
    TruncatedFileError,
    UnsupportedCastError,
)
from streamload.formats.safetensors import INDEX, SINGLE
from streamload.formats.writer import OutFile
from streamload.planning.partition import Node
from streamload.planning.plan import Plan

NBYTES = 2_000_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-shaped bf16 checkpoint in two shards, with extreme values."""
    out = tmp_path_factory.mktemp("source") / "checkpoint"
    make_checkpoint(out, shape_of_size(NBYTES, BF16), shards=2, plant_extremes=True)
    return out


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float16", "float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "300kB"])
def test_values_are_those_of_the_reference(
    source: Path, tmp_path: Path, dtype: str | None, max_shard_size: str
) -> None:
    report = quiet(source, tmp_path / "out", dtype=dtype, max_shard_size=max_shard_size)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() == report.digests.keys()
    for name, (src, shape, data) in before.items():
        dst = parse_dtype(dtype) if dtype else src
        assert after[name][:2] == (dst, shape)
        assert same_values(after[name][2], reference(data, src, dst), dst), name
    assert (len(report.plan.files) > 1) == (max_shard_size != "5GB")


def test_dtypes_follow_patterns(source: Path, tmp_path: Path) -> None:
    rules = {"*norm*": "float32", "*.layers.0.*": "checkpoint", "*": "float16"}
    quiet(source, tmp_path / "out", dtype=rules)
    for name, (dtype, _, _) in tensors_of(tmp_path / "out").items():
        wanted = "float32" if "norm" in name else "bfloat16" if ".layers.0." in name else "float16"
        assert dtype.name == wanted, name


def test_every_dtype_passes(tmp_path: Path) -> None:
    tensors = {}
    for i, (code, dtype) in enumerate(BY_CODE.items()):
        data = bytes((i + k) % 2 for k in range(dtype.nbytes(24)))
        tensors[f"t.{code}"] = (code, (2, 3, 4), data)
        if dtype.bits >= 8:
            tensors[f"s.{code}"] = (code, (), data[: dtype.itemsize])
        tensors[f"e.{code}"] = (code, (0, 3), b"")
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    report = quiet(tmp_path / "in", tmp_path / "out", verify=True)
    assert report.verified
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "in")


def test_only_tensors_without_elements(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "in" / "model.safetensors", {"a": ("F32", (0,), b"")})
    quiet(tmp_path / "in", tmp_path / "out", verify=True)
    assert tensors_of(tmp_path / "out") == {"a": (BY_CODE["F32"], (0,), b"")}


def test_data_is_aligned(tmp_path: Path) -> None:
    tensors = {
        f"t{i}": ("U8" if i % 3 else "F32", (n,), bytes(n * (1 if i % 3 else 4)))
        for i, n in enumerate((1, 64, 3, 16, 100, 128, 7, 32, 640))
    }
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    quiet(tmp_path / "in", tmp_path / "out")
    (header,) = open_checkpoint(tmp_path / "out").shards
    assert header.data_start % 64 == 0
    for info in header.tensors:
        assert info.start % max(info.dtype.itemsize, 64 * (info.nbytes % 64 == 0)) == 0


def test_files_are_no_larger_than_asked(source: Path, tmp_path: Path) -> None:
    quiet(source, tmp_path / "out", max_shard_size=200_000)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert all(h.file_nbytes <= 200_000 or len(h.tensors) == 1 for h in checkpoint.shards)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == checkpoint.nbytes
    names = {name: info.shard.name for name, info in checkpoint.tensors.items()}
    assert index["weight_map"] == names
    count = len(checkpoint.shards)
    wanted = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert [header.path.name for header in checkpoint.shards] == wanted


def test_files_are_filled(tmp_path: Path) -> None:
    """Of any number of tensors: the next one would not have fitted, but for 2 bytes of each."""
    rng = np.random.default_rng(3)
    tensors = {f"t{i}": ("F32", (n,), rng.bytes(4 * n)) for i, n in enumerate([5000, *[16, 3] * 9])}
    folder = tmp_path / "in"
    folder.mkdir()
    write_safetensors(folder / SINGLE, tensors)
    whole = quiet(folder, tmp_path / "out", dry_run=True).plan.written_nbytes
    for most, count in ((whole + 128, 1), (whole - 1, 2)):
        plan = quiet(folder, tmp_path / "out", dry_run=True, max_shard_size=most).plan
        assert len(plan.files) == count
    for nbytes in range(500, 4000, 61):
        files = quiet(folder, tmp_path / "out", dry_run=True, max_shard_size=nbytes).plan.files
        for file, following in pairwise(files):
            assert file.nbytes <= nbytes or len(file.tensors) == 1
            names = {t.info.name for t in file.tensors} | {_first_in(folder, following)}
            one = quiet(folder, tmp_path / "out", dry_run=True, select=sorted(names)).plan
            assert one.written_nbytes > nbytes - 128


def _first_in(folder: Path, file: OutFile) -> str:
    order = list(open_checkpoint(folder).tensors)
    return min((t.info.name for t in file.tensors), key=order.index)


def test_metadata_is_carried_over(tmp_path: Path) -> None:
    for i in (1, 2):
        write_safetensors(
            tmp_path / "in" / f"model-{i:05}-of-00002.safetensors",
            {f"t{i}": ("U8", (1,), b"x")},
            metadata={"who": "me", "part": str(i)},
        )
    report = quiet(tmp_path / "in", tmp_path / "out")
    assert open_checkpoint(tmp_path / "out").metadata == {"format": "pt", "who": "me"}
    assert any("'part'" in note for note in report.plan.notes)


def test_what_lies_beside_is_copied(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    quiet(source, folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "tokenizer.json").chmod(0o640)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    (folder / ".hidden").write_text("x")
    (folder / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (folder / "original").mkdir()
    report = quiet(folder, tmp_path / "out", dtype="float16")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", SINGLE, SIDECAR}
    copied = tmp_path / "out" / "tokenizer.json"
    assert copied.read_text() == '{"a": 1}'
    assert stat.S_IMODE(copied.stat().st_mode) == 0o640
    assert any("dangling.txt" in note and "original/" in note for note in report.plan.notes)


def test_small_folders_beside_are_copied(source: Path, tmp_path: Path) -> None:
    """All of a folder or none: not what holds the weights once more, but a module's own."""
    folder, out = tmp_path / "in", tmp_path / "out"
    quiet(source, folder)
    for path in ("1_Pooling/config.json", "2_Dense/model.safetensors", "notes/deep/er/a.txt"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(path)
    modules = [{"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, inner in (("onnx", "model.onnx"), (".cache", "x"), ("openvino", "model.bin")):
        (folder / name).mkdir()
        (folder / name / inner).write_text("x")
    report = quiet(folder, out, dtype="float16", verify=True)
    copied = {str(path.relative_to(out)) for path in out.rglob("*") if path.parent != out}
    assert copied == {
        *("1_Pooling/config.json", "2_Dense/model.safetensors"),
        *("notes/deep", "notes/deep/er", "notes/deep/er/a.txt"),
    }
    assert (out / "2_Dense/model.safetensors").read_text() == "2_Dense/model.safetensors"
    assert any("onnx/, openvino/" in note for note in report.plan.notes)
    assert not streamload.verify_checkpoint(out).changed
    again = quiet(folder, out, dtype="float16", resume=True)
    assert again.read_nbytes == 0
    quiet(folder, out, dtype="bfloat16", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1_Pooling").write_text("a file")
    with pytest.raises(CheckpointError, match="a folder would be made there"):
        quiet(folder, tmp_path / "other")


@pytest.mark.parametrize("nodes", [None, [Node("a", "1MB"), Node("b", "1MB")]])
def test_folders_of_an_earlier_conversion_go_with_it(
    source: Path, tmp_path: Path, nodes: list[Node] | None
) -> None:
    """Its own files alone: what others put there stays, and so does what a link leads to."""
    folder, out, elsewhere = tmp_path / "in", tmp_path / "out", tmp_path / "elsewhere"
    quiet(source, folder)
    for path in ("1_Pooling/config.json", "notes/deep/er/a.txt", "more/b.txt", "linked/c.txt"):
        (folder / path).parent.mkdir(parents=True)
        (folder / path).write_text(path)
    quiet(folder, out, nodes=nodes)
    root = out / "a" if nodes else out
    assert {"notes/deep/er/a.txt", "more/b.txt"} <= set(Digests.read(root).files)
    (root / "more" / "own.txt").write_text("mine")
    (root / "linked").rename(elsewhere)
    (root / "linked").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        quiet(source, out, nodes=nodes)
    quiet(source, out, nodes=nodes, overwrite=True)
    left = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.parent != root}
    assert left == {"more/own.txt"}
    assert {p.name for p in root.iterdir() if p.is_dir()} == {"more", "linked"}
    assert (elsewhere / "c.txt").read_text() == "linked/c.txt"
    assert tensors_of(root).keys() <= tensors_of(source).keys()


def test_folders_beside_go_to_each_node(source: Path, tmp_path: Path) -> None:
    quiet(source, tmp_path / "in")
    (tmp_path / "in" / "1_Pooling").mkdir()
    (tmp_path / "in" / "1_Pooling" / "config.json").write_text("{}")
    quiet(tmp_path / "in", tmp_path / "out", nodes=[Node("a", "1MB"), Node("b", "1MB")])
    for node in "ab":
        assert (tmp_path / "out" / node / "1_Pooling" / "config.json").read_text() == "{}"


def test_the_home_folder(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``~`` is the home folder, where a checkpoint is and where it goes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    quiet(source, "~/in")
    quiet("~/in", Path("~/out"), dtype="float16")
    assert {p.name for p in tmp_path.iterdir()} >= {"in", "out"}


def test_beside_a_single_file_only_a_models_files_are_taken(tmp_path: Path) -> None:
    """Of a folder that holds other things, nothing else is copied."""
    write_safetensors(tmp_path / "in" / "some.safetensors", {"a": ("U8", (1,), b"x")})
    for name in ("config.json", "tokenizer.json", "diary.txt"):
        (tmp_path / "in" / name).write_text("{}")
    quiet(tmp_path / "in" / "some.safetensors", tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", SINGLE, SIDECAR}


@pytest.mark.parametrize(
    ("config", "became"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ({"dtype": "float32", "x": 1}, {"dtype": "float16", "x": 1}),
        ({"x": {"dtype": "bfloat16"}}, None),
        ({"dtype": "auto"}, None),
        ({"dtype": None, "quantization_config": {"dtype": "bfloat16"}}, None),
        (
            {"text_config": {"dtype": "bfloat16"}, "vision_config": None},
            {"text_config": {"dtype": "float16"}, "vision_config": None},
        ),
    ],
    ids=str,
)
def test_the_dtype_in_the_configuration_follows(
    tmp_path: Path, config: dict[str, Any], became: dict[str, Any] | None
) -> None:
    """Under both of its names, in the parts of a model too; what says no dtype is left alone."""
    write_safetensors(tmp_path / "in" / SINGLE, {"a": ("BF16", (2,), bytes(4))})
    text = json.dumps(config)
    (tmp_path / "in" / "config.json").write_text(text)
    quiet(tmp_path / "in", tmp_path / "out", dtype="float16")
    found = (tmp_path / "out" / "config.json").read_text()
    assert found == text if became is None else json.loads(found) == became
    quiet(tmp_path / "in", tmp_path / "kept")
    assert (tmp_path / "kept" / "config.json").read_text() == text


def test_selection_and_names(source: Path, tmp_path: Path) -> None:
    """Patterns choose by the names in the checkpoint; names are changed after that."""
    quiet(
        source,
        tmp_path / "out",
        select="*.layers.*",
        exclude=["*.layers.0.*", "*norm*"],
        rename=RenamePatterns.parse(["model.layers.*.self_attn.*=attn.*.*", "model.*=*"]),
    )
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    wanted = {}
    for name, tensor in before.items():
        if ".layers." in name and ".layers.0." not in name and "norm" not in name:
            new = name.removeprefix("model.")
            if ".self_attn." in name:
                new = new.replace("layers.", "attn.").replace("self_attn.", "")
            wanted[new] = tensor
    assert after == wanted


def test_a_source_in_the_cache_of_hugging_face(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "hub" / "models--me--it"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("refs", "blobs"):
        (repo / name).mkdir()
    (repo / "refs" / "main").write_text("abc")
    (repo / "blobs" / "pooling").write_text("{}")
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/pooling")
    for file in source.iterdir():
        blob = repo / "blobs" / f"hash of {file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path, offline=True)
    convert("me/it", tmp_path / "out", progress=False)
    assert tensors_of(tmp_path / "out") == tensors_of(source)
    assert not any(p.is_symlink() for p in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    for secret in ("home/id_rsa", "hub/models--me--other/blobs/private", "hub/token"):
        (tmp_path / secret).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / secret).write_text("{}")
        (snapshot / "tokenizer.json").unlink(missing_ok=True)
        (snapshot / "tokenizer.json").symlink_to(tmp_path / secret)
        with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder"):
            convert("me/it", tmp_path / "again", progress=False)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "notes/a.txt", "notes", "1_Pooling"]
)
def test_links_to_elsewhere_are_not_copied(source: Path, tmp_path: Path, name: str) -> None:
    """What is copied is published: one error says which link leads where, and nothing is made."""
    folder, secret, out = tmp_path / "in", tmp_path / "home" / "secret", tmp_path / "out"
    quiet(source, folder)
    (folder / "modules.json").write_text(json.dumps([{"idx": 1, "path": "1_Pooling"}]))
    secret.parent.mkdir()
    secret.write_text('{"token": "secret"}')
    link, target = folder / name, secret if "." in name else secret.parent
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(os.path.relpath(target, link.parent))
    if name == "notes":  # any folder may be left out
        report = quiet(folder, out)
        assert any("notes/ (a link that leads out" in note for note in report.plan.notes)
        assert not (out / "notes").exists()
        return
    with pytest.raises(CheckpointError, match="leads out of the checkpoint's folder") as raised:
        quiet(folder, out)
    assert raised.value.path == str(link)
    assert raised.value.found == str(target)
    assert not out.exists()


def test_links_within_the_folder_are_copied(source: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    quiet(source, tmp_path / "elsewhere")
    folder.mkdir()
    (folder / SINGLE).symlink_to(tmp_path / "elsewhere" / SINGLE)
    (folder / "real").mkdir()
    (folder / "real" / "tokenizer.json").write_text('{"a": 1}')
    (folder / "tokenizer.json").symlink_to("real/tokenizer.json")
    (folder / "linked").symlink_to("real")
    (tmp_path / "link").symlink_to(folder)
    quiet(tmp_path / "link", out)
    for copied in ("tokenizer.json", "real/tokenizer.json", "linked/tokenizer.json"):
        assert (out / copied).read_text() == '{"a": 1}'
        assert not (out / copied).is_symlink()
    assert tensors_of(out) == tensors_of(source)


def test_nothing_is_more_readable_than_its_source(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "in" / SINGLE, {"a": ("U8", (1,), b"x")})
    file.chmod(0o600)
    seen = []

    def look(done: int, total: int) -> None:
        seen.append(stat.S_IMODE((tmp_path / "out" / WORK).stat().st_mode))

    quiet(tmp_path / "in", tmp_path / "out", progress=look)
    assert set(seen) == {0o700}
    assert stat.S_IMODE((tmp_path / "out" / SINGLE).stat().st_mode) == 0o600


def test_the_report_and_the_sidecar(source: Path, tmp_path: Path) -> None:
    """Counts are those of a load, digests those of the bytes, and the sidecar has them."""
    report = quiet(source, tmp_path / "out", dtype="float16", max_shard_size="500kB")
    with pytest.warns(RuntimeWarning, match="became infinite"):
        loaded = streamload.load_state_dict(None, source, device="host", dtype="float16")
    assert dict(report.counts) == dict(loaded.counts)
    assert report.read_nbytes == open_checkpoint(source).nbytes
    found = Digests.read(tmp_path / "out")
    for name, (dtype, shape, data) in tensors_of(tmp_path / "out").items():
        digest = hasher()
        digest.update(memoryview(data))
        assert found.tensors[name].hex == report.digests[name] == digest.hexdigest()
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (dtype, shape)
    assert found.options["dtype"] == [["*", "float16"]]
    data = json.loads(report.to_json())
    assert data["digests"] == dict(report.digests)
    assert "overflowed" in str(report)


def test_out_of_range(source: Path, tmp_path: Path) -> None:
    """What float16 cannot hold becomes infinite, the largest value, or an error."""
    with pytest.warns(RuntimeWarning, match="became infinite in 3 tensors"):
        convert(source, tmp_path / "inf", dtype="float16", progress=False)
    quiet(source, tmp_path / "clamp", dtype="float16", out_of_range="clamp")
    inf, clamp = (
        np.concatenate([np.frombuffer(t[2], np.float16) for t in tensors_of(path).values()])
        for path in (tmp_path / "inf", tmp_path / "clamp")
    )
    clamped = np.isinf(inf) & np.isfinite(clamp)
    assert clamped.any()
    assert set(np.abs(clamp[clamped])) == {np.float16(65504)}
    with pytest.raises(OutOfRangeError) as raised:
        quiet(source, tmp_path / "error", dtype="float16", out_of_range="error")
    assert raised.value.overflowed > 0
    assert not visible(tmp_path / "error")


def test_nodes(source: Path, tmp_path: Path) -> None:
    """One folder for each node, each tensor in one, with a plan that a load of it follows."""
    nodes = [Node("a", "1MB"), Node("b", "2MB"), Node("c", "1MB")]
    report = quiet(source, tmp_path / "out", nodes=nodes, dtype="float16")
    whole = streamload.split(source, nodes=nodes, dtype="float16")
    before = tensors_of(source)
    names: list[str] = []
    for node in nodes:
        folder = tmp_path / "out" / node.name
        found = tensors_of(folder)
        names += found
        assert set(found) == {p.name for p in whole.placements if p.device == node.name}
        for name, (dtype, _, data) in found.items():
            assert same_values(data, reference(before[name][2], BF16, F16), dtype)
        plan = Plan.from_json((folder / "plan.json").read_text())
        assert plan.device(node.name).layers == whole.device(node.name).layers
        assert {p.name for p in plan.placements} == set(found)
        assert Digests.read(folder).tensors.keys() == found.keys()
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "float16"
    assert sorted(names) == sorted(before)
    assert {name.partition("/")[0] for name in report.digests} == {"a", "b", "c"}


def test_a_tied_head_is_copied_to_its_node(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("U8", (8,), bytes(range(8)))}
    tensors |= {f"model.layers.{i}.w.weight": ("U8", (8,), bytes(8)) for i in range(4)}
    write_safetensors(tmp_path / "in" / SINGLE, tensors)
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    quiet(tmp_path / "in", tmp_path / "out", nodes=[Node("a", 512), Node("b", 512)])
    embedding = tensors_of(tmp_path / "out" / "a")["model.embed_tokens.weight"]
    assert tensors_of(tmp_path / "out" / "b")["lm_head.weight"] == embedding


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    """It says what would be written, and refuses what would be refused."""
    report = quiet(source, tmp_path / "out", max_shard_size="500kB", dry_run=True)
    assert not (tmp_path / "out").exists()
    assert "model-00001-of-" in str(report)
    quiet(source, tmp_path / "out", max_shard_size="500kB")
    written = {path for path in files_of(tmp_path / "out") if path.endswith(".safetensors")}
    assert written == {file.path for file in report.plan.files}
    with pytest.raises(CheckpointError, match="holds a checkpoint already"):
        quiet(source, tmp_path / "out", dry_run=True)


def test_progress_is_told(source: Path, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    quiet(source, tmp_path / "out", progress=lambda done, total: heard.append((done, total)))
    nbytes = open_checkpoint(source).nbytes
    assert heard[0] == (0, nbytes)
    assert heard[-1] == (nbytes, nbytes)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "int8"},
        {"out_of_range": "wrap"},
        {"max_shard_size": "0"},
        {"max_shard_size": "3 parsecs"},
        {"nodes": []},
        {"nodes": ["a"]},
        {"nodes": [Node("a/b", "1GB")]},
        {"nodes": [Node("..", "1GB")]},
        {"nodes": [Node(WORK, "1GB")]},
        {"select": "nope*"},
        {"exclude": "nope*"},
        {"exclude": "*"},
        {"resume": True, "overwrite": True},
        {"rename": 3},
    ],
    ids=str,
)
def test_wrong_arguments(source: Path, tmp_path: Path, arguments: dict[str, Any]) -> None:
    """An argument that cannot be meant is a ValueError, and nothing is made."""
    with pytest.raises(ValueError):
        quiet(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["a", "=b", "a=", "a=b*", "*=**"])
def test_renames_that_are_none(text: str) -> None:
    """FROM=TO, with no more * behind than before."""
    with pytest.raises(ValueError, match=r"FROM=TO|more \*"):
        RenamePatterns.parse([text])


def test_two_tensors_of_one_name(source: Path, tmp_path: Path) -> None:
    """Renames that make one name of two are refused, and so is the metadata's own name."""
    with pytest.raises(CheckpointError, match="would both become"):
        quiet(source, tmp_path / "out", rename=lambda name: "same")
    with pytest.raises(CheckpointError, match="cannot be a tensor's name"):
        quiet(source, tmp_path / "out", rename={"model.norm.weight": "__metadata__"})


def test_quantized_values_keep_their_dtype(tmp_path: Path) -> None:
    """Values are not cast without their scale; nothing narrows to 8 bits."""
    tensors = {"a.weight": ("F8_E4M3", (4,), bytes(4)), "a.weight_scale": ("F32", (1,), bytes(4))}
    write_safetensors(tmp_path / "in" / SINGLE, tensors)
    quiet(tmp_path / "in", tmp_path / "other", dtype="float16")
    assert [*open_checkpoint(tmp_path / "other").tensors] == ["a.weight"]
    with pytest.raises(UnsupportedCastError):
        quiet(tmp_path / "in", tmp_path / "out", dtype={"*scale": "float8_e4m3fn"})
    quiet(tmp_path / "in", tmp_path / "out", dtype={"*scale": "float16"})


def test_source_and_destination_overlap(source: Path, tmp_path: Path) -> None:
    """By name, by a link to the folder, by hard links, by a node's folder: refused, untouched."""
    folder = tmp_path / "in"
    quiet(source, folder)
    before = files_of(folder)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "hard").mkdir()
    os.link(folder / SINGLE, tmp_path / "hard" / SINGLE)
    for out in (folder, tmp_path / "link", tmp_path / "hard", folder / ".." / "in"):
        with pytest.raises(CheckpointError, match="source"):
            quiet(folder, out, overwrite=True)
    with pytest.raises(CheckpointError, match="source"):
        quiet(folder, tmp_path, nodes=[Node("in", "1GB")], overwrite=True)
    with pytest.raises(CheckpointError, match="source"):
        quiet(folder / SINGLE, folder, overwrite=True)
    assert files_of(folder) == before
    quiet(folder, folder / "half", dtype="float16")  # inside is not the same


def test_a_finished_destination_is_replaced_only_if_asked(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quiet(source, out, max_shard_size="300kB")
    (out / "mine.txt").write_text("mine")
    before = files_of(out)
    for again in ({}, {"resume": True}):
        with pytest.raises(CheckpointError, match="holds a checkpoint"):
            quiet(source, out, dtype="float16", **again)
    assert files_of(out) == before
    quiet(source, out, dtype="float16", overwrite=True)
    assert {p.name for p in out.iterdir()} == {"config.json", "mine.txt", SINGLE, SIDECAR}
    quiet(source, out, max_shard_size="300kB", overwrite=True)
    assert files_of(out) == before


def test_a_failed_replacement_leaves_the_old_checkpoint(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quiet(source, out, max_shard_size="300kB")
    before = files_of(out)
    with pytest.raises(OutOfRangeError):
        quiet(source, out, dtype="float16", out_of_range="error", overwrite=True)
    after = files_of(out)
    assert {path: after[path] for path in before} == before


def test_resuming_what_is_finished_does_nothing(source: Path, tmp_path: Path) -> None:
    first = quiet(source, tmp_path / "out", dtype="float16", resume=True)
    again = quiet(source, tmp_path / "out", dtype="float16", resume=True)
    assert (first.resumed, again.resumed) == (0, len(first.digests))
    assert again.read_nbytes == 0
    assert again.digests == first.digests
    assert not (tmp_path / "out" / WORK).exists()


class _StopError(Exception):
    """Raised by a test in the middle of a conversion."""


def stop(done: int, total: int) -> None:
    raise _StopError


def test_an_unfinished_destination(source: Path, tmp_path: Path) -> None:
    """It is refused, continued, or begun again; continued only with the same options."""
    out = tmp_path / "out"
    with pytest.raises(_StopError):
        quiet(source, out, dtype="float16", progress=stop)
    assert not visible(out)
    with pytest.raises(CheckpointError, match="unfinished"):
        quiet(source, out, dtype="float16")
    for other in ({"dtype": "float32"}, {"dtype": "float16", "max_shard_size": "1MB"}):
        with pytest.raises(CheckpointError, match="another option"):
            quiet(source, out, resume=True, **other)
    quiet(source, out, dtype="float16", resume=True)
    quiet(source, tmp_path / "whole", dtype="float16")
    assert files_of(out) == files_of(tmp_path / "whole")
    with pytest.raises(_StopError):
        quiet(source, tmp_path / "again", dtype="float16", progress=stop)
    quiet(source, tmp_path / "again", overwrite=True)
    assert tensors_of(tmp_path / "again") == tensors_of(source)


def test_another_source_is_not_continued(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    quiet(source, folder)
    with pytest.raises(_StopError):
        quiet(folder, tmp_path / "out", progress=stop)
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes())
    with pytest.raises(CheckpointError, match="another state"):
        quiet(folder, tmp_path / "out", resume=True)


def test_a_source_that_changes_meanwhile(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "in" / SINGLE

    def shorten(done: int, total: int) -> None:
        os.truncate(file, 100_000)

    def remove(done: int, total: int) -> None:
        file.unlink(missing_ok=True)

    def touch(done: int, total: int) -> None:
        os.utime(file)

    for number, change in enumerate((shorten, remove, touch)):
        quiet(source, tmp_path / "in", overwrite=True)
        out = tmp_path / f"out{number}"
        with pytest.raises(CheckpointError) as raised:
            quiet(file, out, progress=change)
        assert Path(raised.value.path) == file
        assert not visible(out)
        if change is shorten:
            assert isinstance(raised.value, TruncatedFileError)


def test_a_truncated_source_is_refused_at_once(source: Path, tmp_path: Path) -> None:
    quiet(source, tmp_path / "in")
    os.truncate(tmp_path / "in" / SINGLE, 100_000)
    with pytest.raises(TruncatedFileError):
        quiet(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_two_conversions_into_one_folder(source: Path, tmp_path: Path) -> None:
    problems = []

    def second(done: int, total: int) -> None:
        for how in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(CheckpointError) as raised:
                quiet(source, tmp_path / "out", **how)
            problems.append(raised.value.problem)

    quiet(source, tmp_path / "out", progress=second)
    assert set(problems) == {"another conversion is being written there"}
    assert tensors_of(tmp_path / "out") == tensors_of(source)


def test_a_destination_that_cannot_be_a_folder(source: Path, tmp_path: Path) -> None:
    """A file in the way is one clear error."""
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="cannot be written"):
            quiet(source, out)
    assert (tmp_path / "file").read_text() == "x"


def test_files_that_may_not_be_so_long(source: Path, tmp_path: Path) -> None:
    """Where the system refuses long files, the error says what helps; less than that works."""
    resource = needs.module("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="smaller maximum") as raised:
            quiet(source, tmp_path / "out")
        assert isinstance(raised.value.__cause__, OSError)
        assert raised.value.__cause__.errno == errno.EFBIG
        quiet(source, tmp_path / "out", max_shard_size="700kB", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- small disks ----------------------------------------------------------------------------------


def test_a_disk_that_is_too_small(source: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m")
    for dry_run in (True, False):
        with pytest.raises(PlanInfeasibleError) as raised:
            quiet(source, disk / "out", dry_run=dry_run)
        assert raised.value.needed_nbytes > NBYTES
        assert raised.value.budget_nbytes <= 2**20
        assert raised.value.limit == "free space"
    assert not list(disk.iterdir())


def test_a_disk_that_fills_up(
    source: Path, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("size=4m")

    def fill(done: int, total: int) -> None:
        free = os.statvfs(disk)
        nbytes = free.f_bavail * free.f_frsize - 1_000_000
        if done == 0:
            (disk / "filler").write_bytes(bytes(nbytes))

    with pytest.raises(CheckpointError, match="no room is left"):
        quiet(source, disk / "out", max_shard_size="300kB", progress=fill)
    assert not visible(disk / "out")
    (disk / "filler").unlink()
    report = quiet(source, disk / "out", max_shard_size="300kB", resume=True)
    assert report.resumed > 0
    finished = (
        sum(t.info.nbytes for file in report.plan.files for t in file.tensors) - report.read_nbytes
    )
    assert finished > 0
    quiet(source, tmp_path / "whole", max_shard_size="300kB")
    assert files_of(disk / "out") == files_of(tmp_path / "whole")


def test_a_disk_that_cannot_be_written(source: Path, small_disk: Callable[[str], Path]) -> None:
    """A filesystem that is mounted read-only is one clear error."""
    disk = small_disk("size=4m")
    small_disk("ro")
    with pytest.raises(CheckpointError, match="cannot be written"):
        quiet(source, disk / "out")


def test_another_filesystem(source: Path, small_disk: Callable[[str], Path]) -> None:
    """Source and destination need not be on one filesystem."""
    out = small_disk("size=8m") / "out"
    quiet(source, out, verify=True)
    assert tensors_of(out) == tensors_of(source)


# --- small machines -------------------------------------------------------------------------------


@pytest.mark.slow
def test_it_needs_little_memory_for_a_mixture(cgroup: Boxes, tmp_path: Path) -> None:
    """The same of other formats is in test_convert_formats.py."""
    make_checkpoint(tmp_path / "in", shape_of_size(300_000_000, BF16))
    forget(tmp_path / "in")
    command = [sys.executable, "-m", "streamload", "convert", tmp_path / "in", tmp_path / "out"]
    options = ["--to", "gguf", "--quant", "q4_k_m", "--verify", "--no-progress"]
    done = cgroup.run([*command, *options], 2**27)
    assert (done.returncode, done.oom_killed) == (0, False), done.stderr
    assert "verified" in done.stdout


# --- the command ----------------------------------------------------------------------------------


def command(*arguments: object, code: int = 0, name: str = "convert") -> tuple[str, str]:
    """Run ``streamload convert``, or another, and expect an exit code; gives stdout and stderr."""
    argv = [sys.executable, "-m", "streamload", name, *arguments]
    done = forked.run(argv, forked.COMMANDS)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_the_command(source: Path, tmp_path: Path) -> None:
    """Its options are those of the function; --json is the report; an error is one line."""
    out, err = command(
        *(source, tmp_path / "out", "--dtype", "*norm*=float32", "--dtype", "float16"),
        *("--max-shard-size", "500kB", "--exclude", "lm_head*", "--rename", "model.*=*"),
        *("--out-of-range", "clamp", "--verify", "--json"),
    )
    assert err.count("\n") == 1 and "values were clamped" in err
    report = json.loads(out)
    assert report["verified"] is True
    found = tensors_of(tmp_path / "out")
    assert report["digests"].keys() == found.keys()
    assert found["norm.weight"][0].name == "float32"
    assert "lm_head.weight" not in found
    _, err = command(source, tmp_path / "out", code=1)
    assert err.startswith("streamload: ") and err.count("\n") == 1
    assert "overwrite" in err


def test_folders_of_nodes_are_verified_one_by_one(source: Path, tmp_path: Path) -> None:
    """The folder around them holds no file: the error names one, and the line that checks it."""
    command(source, tmp_path / "out", "--nodes", "2", "--budget", "1MB,2MB")
    for paths in ([tmp_path / "out"], [source, tmp_path / "out"]):
        _, err = command(*paths, code=1, name="verify")
        said = re.search(r"write '([^']+)'", err)
        assert said is not None and said[1] == str(tmp_path / "out" / "node0")
        assert command(said[1], name="verify")[0].startswith("verified")
    _, err = command(source, tmp_path / "out" / "node1", code=1, name="verify")
    said = re.search(r"`streamload verify (.+)`", err)
    assert said is not None and command(said[1], name="verify")[0].startswith("verified")


def test_the_command_for_nodes(source: Path, tmp_path: Path) -> None:
    """A number of nodes or several budgets make folders; what does not fit is exit code 3."""
    command(source, tmp_path / "out", "--nodes", "2", "--budget", "1MB,2MB")
    assert sorted(visible(tmp_path / "out")) == ["node0", "node1"]
    _, err = command(source, tmp_path / "small", "--nodes", "2", "--budget", "100kB", code=3)
    assert "does not fit" in err
    command(source, tmp_path / "wrong", "--budget", "1MB", code=2)
    command(source, tmp_path / "wrong", "--nodes", "2", code=2)
    command(source, tmp_path / "wrong", "--rename", "x", code=2)
    assert not (tmp_path / "wrong").exists() and not (tmp_path / "small").exists()
