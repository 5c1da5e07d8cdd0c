"""Files, folders, indexes and the Hugging Face cache; the scales of quantised tensors."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path

import forked
import pytest
from hub_server import use_hub
from safetensors_files import write_safetensors, write_sparse

from streamload.checkpoint.open import Checkpoint, from_headers, open_checkpoint
from streamload.codecs.weights import scale_of
from streamload.conversion.convert import convert
from streamload.errors import CheckpointError, HeaderError, ShardNotFoundError, TruncatedFileError
from streamload.formats.reader import read_header
from streamload.verification.diff import diff

BYTE = ("U8", (1,), b"x")
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_shards(folder: Path, shards: Mapping[str, str]) -> Path:
    """A folder of files that hold tensors of one byte each, named with blanks between."""
    for shard, names in shards.items():
        write_safetensors(folder / shard, {name: BYTE for name in names.split()})
    return folder


def write_index(folder: Path, weight_map: object, name: str = INDEX) -> Path:
    path = folder / name
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_shards(tmp_path / "model", {FIRST: "b a", SECOND: "c"})
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND})
    return folder


def names(checkpoint: Checkpoint) -> list[str]:
    return list(checkpoint.tensors)


def refused(path: str | Path, error: type[CheckpointError] = HeaderError) -> CheckpointError:
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(path)
    assert type(raised.value) is error
    return raised.value


def test_one_file(tmp_path: Path) -> None:
    """A file is a checkpoint, whatever it is called; its neighbours do not matter."""
    path = write_safetensors(tmp_path / "weights", {"w": BYTE}, metadata={"format": "pt"})
    write_safetensors(tmp_path / "other.safetensors", {"w": BYTE})
    for given in (path, str(path)):
        checkpoint = open_checkpoint(given)
        assert checkpoint.path == path
        assert [header.path for header in checkpoint.shards] == [path]
        assert names(checkpoint) == ["w"]
        assert checkpoint.metadata == {"format": "pt"}
        assert checkpoint.config == {}
        assert checkpoint.nbytes == 1
    assert "TensorInfo" not in repr(checkpoint)


def test_file_without_tensors_is_an_empty_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "model.safetensors", {}))
    assert (names(checkpoint), checkpoint.nbytes) == ([], 0)
    assert names(open_checkpoint(tmp_path)) == []


def test_folder_with_index(sharded: Path) -> None:
    """Shards come in order of name, tensors in order of shard and place, from either path."""
    for path in (sharded, sharded / INDEX):
        checkpoint = open_checkpoint(path)
        assert checkpoint.path == path
        assert [header.path for header in checkpoint.shards] == [sharded / FIRST, sharded / SECOND]
        assert names(checkpoint) == ["b", "a", "c"]
        assert checkpoint.tensors["c"].shard == sharded / SECOND


def test_index_of_another_name(sharded: Path) -> None:
    """Any index can be given; only the usual one is looked for in a folder."""
    os.rename(sharded / INDEX, sharded / "model.fp16.safetensors.index.json")
    checkpoint = open_checkpoint(sharded / "model.fp16.safetensors.index.json")
    assert names(checkpoint) == ["b", "a", "c"]


def test_folder_without_index_is_all_of_its_files(tmp_path: Path) -> None:
    folder = write_shards(tmp_path, {"x1.safetensors": "a", "x2.safetensors": "b", "z.bin": "c"})
    (folder / "._x1.safetensors").write_bytes(b"what macOS leaves on foreign disks")
    assert names(open_checkpoint(folder)) == ["a", "b"]


def test_folder_given_relative_to_the_current_one(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths stay as they were given; the empty string is no path."""
    monkeypatch.chdir(sharded)
    assert open_checkpoint(".").shards[0].path == Path(FIRST)
    assert open_checkpoint(INDEX).path == Path(INDEX)
    assert names(open_checkpoint(FIRST)) == ["b", "a"]
    assert refused("", ShardNotFoundError).problem == "no such file or folder"


def test_complete_set_without_index(tmp_path: Path) -> None:
    """Numbered shards need no index when all are there, counted from 1 or from 0."""
    write_shards(tmp_path / "one", {FIRST: "a", SECOND: "b"})
    assert names(open_checkpoint(tmp_path / "one")) == ["a", "b"]
    write_shards(
        tmp_path / "zero",
        {"m-00000-of-00002.safetensors": "a", "m-00001-of-00002.safetensors": "b"},
    )
    assert names(open_checkpoint(tmp_path / "zero")) == ["a", "b"]


def test_incomplete_set_names_what_is_missing(tmp_path: Path) -> None:
    write_shards(tmp_path, {"model-00002-of-00004.safetensors": "a"})
    error = refused(tmp_path, ShardNotFoundError)
    assert error.path == str(tmp_path)
    assert error.expected == ", ".join(f"model-0000{n}-of-00004.safetensors" for n in (1, 3, 4))
    assert error.found == "1 of 4 files"


def test_hostile_set_size_costs_nothing(tmp_path: Path) -> None:
    write_shards(tmp_path, {f"m-1-of-{'9' * 60}.safetensors": "a"})
    error = refused(tmp_path, ShardNotFoundError)
    assert isinstance(error.expected, str) and error.expected.startswith(f"m-{'0' * 59}2-of-9")
    assert error.expected.endswith(f"and {int('9' * 60) - 9} more")


def test_single_file_wins_over_shards_that_no_index_joins_it_to(tmp_path: Path) -> None:
    """Beside a set of shards, or a stale index of one, ``model.safetensors`` is the checkpoint."""
    write_shards(tmp_path, {"model.safetensors": "new", FIRST: "old"})
    assert names(open_checkpoint(tmp_path)) == ["new"]
    write_index(tmp_path, {"old": FIRST, "gone": SECOND})
    assert names(open_checkpoint(tmp_path)) == ["new"]
    write_index(tmp_path, {"new": "model.safetensors", "old": FIRST})
    assert names(open_checkpoint(tmp_path)) == ["old", "new"]


def test_original_layout_beside_the_usual_one_is_left_out(tmp_path: Path) -> None:
    write_shards(tmp_path, {"consolidated.safetensors": "w", FIRST: "a", SECOND: "b"})
    assert names(open_checkpoint(tmp_path)) == ["a", "b"]
    write_shards(
        tmp_path / "alone", {"consolidated.00.safetensors": "w", "consolidated.01.safetensors": "v"}
    )
    assert names(open_checkpoint(tmp_path / "alone")) == ["w", "v"]


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x1.safetensors": "a b", "x2.safetensors": "c b"})
    error = refused(tmp_path)
    assert (error.path, error.tensor) == (str(tmp_path), "b")
    assert (error.expected, error.found) == ("one file", "x1.safetensors and x2.safetensors")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ((), "an empty folder"),
        (("config.json", "tf_model.h5"), "tf_model.h5, config.json"),
        (("README.md", "llama.onnx"), "llama.onnx, README.md"),
        (tuple("abcdefghijk"), "a, b, c, d, e, f, g, h and 3 more"),
    ],
)
def test_folder_without_weights_says_what_is_there(
    tmp_path: Path, files: tuple[str, ...], found: str
) -> None:
    """Weights of other formats are named first."""
    for name in files:
        (tmp_path / name).write_text("{}")
    error = refused(tmp_path, ShardNotFoundError)
    known = "*.safetensors, *.gguf, *.irpa, *.pth, *.bin, *.pt, *.ckpt or *.distcp"
    assert (error.path, error.expected, error.found) == (str(tmp_path), known, found)


def test_missing_shards_of_an_index_are_all_named(sharded: Path) -> None:
    os.remove(sharded / SECOND)
    error = refused(sharded, ShardNotFoundError)
    assert error.path == str(sharded / INDEX)
    assert (error.expected, error.found) == (SECOND, "1 of 2 files")
    os.remove(sharded / FIRST)
    error = refused(sharded, ShardNotFoundError)
    assert (error.expected, error.found) == (f"{FIRST}, {SECOND}", "0 of 2 files")


@pytest.mark.parametrize(
    ("weight_map", "tensor", "expected", "found"),
    [
        ({"a": FIRST, "b": FIRST}, "c", f"{SECOND}, which holds it", "no entry"),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, "b", f"{FIRST}, which holds it", SECOND),
        (
            {"a": FIRST, "b": FIRST, "c": SECOND, "d": FIRST},
            "d",
            f"it in {FIRST}",
            "it in no shard",
        ),
    ],
    ids=["lacks a tensor", "names the wrong shard", "names a tensor too many"],
)
def test_lying_index_is_refused(
    sharded: Path, weight_map: dict[str, str], tensor: str, expected: str, found: str
) -> None:
    if SECOND not in weight_map.values():
        weight_map |= {"new": SECOND}
        write_safetensors(sharded / SECOND, {"c": BYTE, "new": BYTE})
    index = write_index(sharded, weight_map)
    error = refused(sharded)
    assert (error.path, error.tensor) == (str(index), tensor)
    assert (error.expected, error.found) == (expected, found)


def test_index_with_a_tensor_in_two_shards(sharded: Path) -> None:
    write_safetensors(sharded / SECOND, {"c": BYTE, "a": BYTE})
    error = refused(sharded)
    assert error.tensor == "a" and SECOND in str(error) and FIRST in str(error)


@pytest.mark.parametrize(
    "shard",
    [
        "../model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "sub/../model.safetensors",
        "sub//model.safetensors",
        "sub\\model.safetensors",
        "..",
        ".",
        "",
        "model.safetensors/",
        "model.safetensors\0",
        "a\0b.safetensors",
        "pytorch_model.bin",
        "config.json",
    ],
)
def test_index_may_name_only_files_of_its_own_folder(sharded: Path, shard: str) -> None:
    """Names of an index are checked as text, whether or not there is such a file."""
    shutil.copy(sharded / FIRST, sharded.parent / FIRST)
    index = write_index(sharded, {"a": FIRST, "b": shard, "c": SECOND})
    error = refused(sharded)
    assert (error.path, error.tensor, error.found) == (str(index), "b", repr(shard))
    assert error.expected == "the path of a .safetensors file from the folder of the index on"


def test_index_of_files_in_a_subfolder(tmp_path: Path) -> None:
    """transformers reads such an index, and so do loads and conversions; names stay distinct."""
    write_shards(tmp_path / "sub", {FIRST: "a", SECOND: "b"})
    index = write_index(tmp_path, {"a": f"sub/{FIRST}", "b": f"sub/{SECOND}"})
    for path in (tmp_path, index):
        assert names(open_checkpoint(path)) == ["a", "b"]
    convert(tmp_path, tmp_path / "out", progress=False)
    assert names(open_checkpoint(tmp_path / "out")) == ["a", "b"]
    write_index(tmp_path, {"a": f"sub/{FIRST}", "b": f"other/{FIRST}"})
    assert refused(tmp_path).problem == "weight_map has files of one name in two folders"


@pytest.mark.parametrize(
    "others",
    [("mmproj.safetensors",), ("ae.safetensors", "flux1-dev.safetensors")],
    ids=["one beside", "two beside"],
)
def test_files_that_do_not_say_that_they_are_parts(tmp_path: Path, others: tuple[str, ...]) -> None:
    write_shards(tmp_path, {FIRST: "a", SECOND: "b"})
    assert names(open_checkpoint(tmp_path)) == ["a", "b"]
    write_shards(tmp_path, dict(zip(others, "cd", strict=False)))
    error = refused(tmp_path)
    assert error.problem == "holds several checkpoints"
    assert others[0] in str(error.found)
    write_index(tmp_path, {"a": FIRST, "b": SECOND})
    assert names(open_checkpoint(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("", "'{' as its first byte", "''"),
        ("[]", "'{' as its first byte", "'['"),
        ("{", "JSON", None),
        ('{"weight_map": NaN}', "JSON", "NaN"),
        ("{}", "an object", "null"),
        ('{"weight_map": []}', "an object", "a list of 0"),
        ('{"weight_map": {}}', "at least one tensor", "none"),
        ('{"weight_map": {"a": 1}}', "strings only", "'a': 1"),
        ('{"weight_map": {"a": ["x.safetensors"]}}', "strings only", "'a': a list of 1"),
        ('{"weight_map": {"a": null}}', "strings only", "'a': null"),
        (r'{"weight_map": {"a": "\ud800.safetensors"}}', "strings only", None),
        (
            '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}',
            "each name once",
            "'a' more than once",
        ),
        ('{"weight_map": {}, "weight_map": {}}', "each key once", "'weight_map' more than once"),
        ('{"weight_map": ' + "[" * 100_000, "JSON", "more than 127 levels of nesting"),
    ],
)
def test_malformed_index(sharded: Path, text: str, expected: str, found: str | None) -> None:
    """An index is held to the same strict JSON as a header."""
    (sharded / INDEX).write_text(text)
    error = refused(sharded)
    assert (error.path, error.expected) == (str(sharded / INDEX), expected)
    assert error.found == found if found is not None else error.found
    assert refused(sharded / INDEX).path == str(sharded / INDEX)


def test_malformed_shard_names_the_shard(sharded: Path) -> None:
    content = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(content[:-1])
    error = refused(sharded, TruncatedFileError)
    assert (error.path, error.tensor) == (str(sharded / SECOND), "c")
    assert (error.expected, error.found) == (len(content), len(content) - 1)
    os.remove(sharded / SECOND)
    (sharded / SECOND).mkdir()
    error = refused(sharded, CheckpointError)
    assert (error.path, error.found) == (str(sharded / SECOND), "a directory")


def test_metadata_is_what_shards_agree_on(tmp_path: Path) -> None:
    """An entry on which shards differ belongs to none but its shard."""
    for shard, metadata in (
        (FIRST, {"format": "pt", "part": "1"}),
        (SECOND, {"part": "2", "x": "y"}),
    ):
        write_safetensors(tmp_path / shard, {shard: BYTE}, metadata=metadata)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.metadata == {"format": "pt", "x": "y"}
    assert [header.metadata["part"] for header in checkpoint.shards] == ["1", "2"]


def test_config_beside_the_tensors(sharded: Path) -> None:
    """``config.json`` is read beside a file, in a folder and beside an index.

    Python writes infinities into it, so they are read there.
    """
    (sharded / "config.json").write_text('{"hidden_size": 64, "time_step_limit": [0.0, Infinity]}')
    for path in (sharded, sharded / INDEX, sharded / FIRST):
        config = open_checkpoint(path).config
        assert config["hidden_size"] == 64
        assert config["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("", "JSON", None),
        ("{", "JSON", None),
        ("[" * 100_000, "JSON", None),
        ('{"a": ' + "1" * 5000 + "}", "JSON", None),
        ("[1]", "an object", "a list of 1"),
    ],
)
def test_broken_config_is_an_error(
    sharded: Path, text: str, expected: str, found: str | None
) -> None:
    (sharded / "config.json").write_text(text)
    error = refused(sharded)
    assert (error.path, error.expected) == (str(sharded / "config.json"), expected)
    assert error.found == found if found is not None else error.found


def test_huge_json_files_are_not_read(sharded: Path) -> None:
    for name in ("config.json", INDEX):
        os.truncate(sharded / INDEX, 0)
        with open(sharded / name, "w") as file:
            file.truncate(100_000_001)
        error = refused(sharded)
        assert (error.path, error.found) == (str(sharded / name), 100_000_001)
        os.remove(sharded / name)


def test_headers_join_without_files(sharded: Path) -> None:
    headers = [read_header(sharded / shard) for shard in (SECOND, FIRST)]
    assert from_headers(sharded, headers) == open_checkpoint(sharded)


def make_cache(root: Path, *, repo: str = "models--org--name", ref: str = "main") -> Path:
    """A cache as huggingface_hub lays it out: blobs, a snapshot of symlinks, a ref."""
    blobs, snapshot = root / repo / "blobs", root / repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    write_shards(blobs, {"aa": "a b", "bb": "c"})
    for name, blob in ((FIRST, "aa"), (SECOND, "bb")):
        (snapshot / name).symlink_to(Path("../../blobs") / blob)
    index = write_index(blobs, {"a": FIRST, "b": FIRST, "c": SECOND}, "cc")
    (snapshot / INDEX).symlink_to(Path("../../blobs") / index.name)
    reference = root / repo / "refs" / ref
    reference.parent.mkdir(parents=True)
    reference.write_text(COMMIT)
    return snapshot


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home and current folder, where the cache is, without a hub."""
    home = tmp_path / "home"
    home.mkdir()
    use_hub(monkeypatch, "http://127.0.0.1:1", home, offline=True)
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("HF_HOME", "~/x", "x/hub"),
        pytest.param("HF_HUB_CACHE", "{}/x", "x", marks=pytest.mark.slow),
        pytest.param("HF_HUB_CACHE", "$HOME/x", "x", marks=pytest.mark.slow),
    ],
)
def test_name_in_the_hugging_face_cache(
    tmp_path: Path, variable: str, value: str, folder: str
) -> None:
    """``org/name`` is the snapshot of ``main``, wherever the environment puts the cache."""
    snapshot = make_cache(tmp_path / folder)
    environment = {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", variable: value.format(tmp_path)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "XDG"))}
    code = "import streamload; print(streamload.open_checkpoint('org/name').path)"
    assert forked.fresh(code, cwd=tmp_path, env=kept | environment).strip() == str(snapshot)


def test_revision_in_the_hugging_face_cache(no_cache: Path) -> None:
    """A revision is a branch, a pull request or a commit."""
    cache = no_cache / "hub"
    snapshot = make_cache(cache, ref="refs/pr/1")
    assert open_checkpoint("org/name@refs/pr/1").path == snapshot
    assert open_checkpoint(f"org/name@{COMMIT}").path == snapshot
    error = refused("org/name", ShardNotFoundError)
    assert error.path == "org/name" and error.found == str(cache)
    assert "HF_HUB_OFFLINE is set: unset it, or write `hf download org/name`" in str(error)
    make_cache(cache, repo="models--bert")
    assert names(open_checkpoint("bert")) == ["a", "b", "c"]


def test_local_path_wins_over_the_cache(no_cache: Path) -> None:
    make_cache(no_cache / "hub")
    write_shards(Path("org/name"), {"model.safetensors": "local"})
    assert names(open_checkpoint("org/name")) == ["local"]


def test_half_downloaded_snapshot(no_cache: Path) -> None:
    """A shard that was not downloaded is missing by name, whether its link is there or not."""
    snapshot = make_cache(no_cache / "hub")
    os.remove(snapshot / "../../blobs/bb")
    for _ in range(2):
        error = refused("org/name", ShardNotFoundError)
        assert (error.path, error.expected) == (str(snapshot / INDEX), SECOND)
        (snapshot / SECOND).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "name",
    ["org/absent", "org/name@absent", "org/name@../../x", "../name", "a/b/c", "/no/where", "~"],
)
def test_nothing_of_that_name(no_cache: Path, name: str) -> None:
    """What is neither a path nor in the cache is one error; a name never leads out of the cache."""
    make_cache(no_cache / "hub")
    assert refused(name, ShardNotFoundError).path == name


def test_ref_cannot_lead_out_of_the_cache(no_cache: Path) -> None:
    cache = no_cache / "hub"
    make_cache(cache)
    write_shards(no_cache / "elsewhere", {"model.safetensors": "a"})
    (cache / "models--org--name/refs/main").write_text(str(no_cache / "elsewhere"))
    assert refused("org/name", ShardNotFoundError).path == "org/name"


F8 = ("F8_E4M3", (1,), b"x")


@pytest.mark.parametrize(
    ("tensor", "scale"),
    [
        ("l.0.q_proj.weight", "l.0.q_proj.weight_scale_inv"),
        ("l.0.q_proj.weight", "l.0.q_proj.weight_scale"),
        ("l.0.q_proj.weight", "l.0.q_proj.weight_scale_2"),
        ("l.0.q_proj.weight", "l.0.q_proj.weight_global_scale"),
        ("l.0.q_proj.weight", "l.0.q_proj.weight.scale"),
        ("l.0.q_proj.weight", "l.0.q_proj.scale"),
        ("l.0.q_proj.weight", "l.0.q_proj.scale_inv"),
        ("l.0.q_proj.weight", "l.0.q_proj.scale_weight"),
        ("l.0.q_proj.weight_packed", "l.0.q_proj.weight_scale"),
        ("l.0.q_proj.weight._data", "l.0.q_proj.weight._scale"),
        ("l.0.q_proj._weight_qdata", "l.0.q_proj._weight_scale"),
        ("l.0.q_proj.weight_scale", "l.0.q_proj.weight_scale_2"),
        ("l.0.q_proj.weight_scale", "l.0.q_proj.weight_global_scale"),
        ("l.0.experts.gate_up_proj", "l.0.experts.gate_up_proj_scale"),
        ("l.0.experts.gate_up_proj", "l.0.experts.gate_up_proj_scale_inv"),
        ("l.0.experts.gate_up_proj_blocks", "l.0.experts.gate_up_proj_scales"),
        ("weight", "weight_scale"),
        ("weight", "scale_weight"),
        ("weight", "scale"),
    ],
)
def test_float8_with_a_scale_beside_it(tmp_path: Path, tensor: str, scale: str) -> None:
    """Every usual name of a scale is found, in whichever shard it is; other dtypes have none."""
    f32 = ("F32", (1,), bytes(4))
    write_safetensors(tmp_path / "m1.safetensors", {tensor: F8, "wide": f32, "alone": F8})
    write_safetensors(tmp_path / "m2.safetensors", {scale: f32, "wide_scale": f32})
    checkpoint = open_checkpoint(tmp_path)
    assert scale_of(checkpoint.layouts, tensor) == scale
    assert scale_of(checkpoint.layouts, scale) is None
    assert scale_of(checkpoint.layouts, "wide") is None
    assert scale_of(checkpoint.layouts, "alone") is None
    with pytest.raises(KeyError):
        scale_of(checkpoint.layouts, "absent")


def test_neighbours_that_are_no_scale(tmp_path: Path) -> None:
    """The scale of another tensor, or of activations, is none of this one."""
    f32 = ("F32", (1,), bytes(4))
    write_safetensors(
        tmp_path / "model.safetensors",
        {
            "a.weight": F8,
            "a.input_scale": f32,
            "a.k_scale": f32,
            "b.weight_scale": f32,
            "text_projection": F8,
            "logit_scale": f32,
        },
    )
    checkpoint = open_checkpoint(tmp_path)
    assert scale_of(checkpoint.layouts, "a.weight") is None
    assert scale_of(checkpoint.layouts, "text_projection") is None


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"text_config": {"quantization_config": {"a": 1}}}, "quantization_config"),
        ({"compression_config": {"format": "float-quantized"}}, "compression_config"),
        ({"quantization_config": None}, None),
        ({"hidden_size": 64}, None),
    ],
)
def test_float8_in_a_quantized_checkpoint(
    tmp_path: Path, config: dict[str, object], scale: str | None
) -> None:
    """A config that says quantised is enough for floats of 8 bits and fewer, and for no other."""
    write_safetensors(
        tmp_path / "model.safetensors",
        {"a": F8, "b": ("F4", (2,), b"x"), "c": ("BF16", (1,), b"xx"), "d": ("U8", (1,), b"x")},
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert [scale_of(checkpoint.layouts, name) for name in "abcd"] == [scale, scale, None, None]


def test_large_checkpoint_opens_without_its_data(tmp_path: Path) -> None:
    count, nbytes = 100_000, 10_000_000
    tensors = {f"model.layers.{i}.weight": ("U8", [nbytes]) for i in range(count)}
    path = write_sparse(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.tensors) == count
    assert checkpoint.nbytes == count * nbytes


def test_checkpoints_pickle(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again == checkpoint
    assert again.tensors == checkpoint.tensors
    assert pickle.loads(pickle.dumps(checkpoint.shards)) == checkpoint.shards


def test_a_broken_config_beside_a_single_file_is_not_its_own(tmp_path: Path) -> None:
    """It may belong to anything in that folder; that of a folder or of an index counts."""
    write_safetensors(tmp_path / "x.safetensors", {"a": ("F32", (1,), bytes(4))})
    (tmp_path / "config.json").write_text("{ // no JSON")
    assert open_checkpoint(tmp_path / "x.safetensors").config == {}
    with pytest.raises(HeaderError):
        open_checkpoint(tmp_path)


def test_a_checkpoint_is_a_mapping(sharded: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert isinstance(checkpoint, Mapping)
    assert [*checkpoint] == [*checkpoint.keys()] == [*checkpoint.tensors]
    assert [*checkpoint.items()] == [*checkpoint.tensors.items()]
    assert [*checkpoint.values()] == [*checkpoint.tensors.values()]
    assert len(checkpoint) == len(checkpoint.tensors)
    first = next(iter(checkpoint))
    assert checkpoint[first] is checkpoint.get(first) is checkpoint.tensors[first]
    assert first in checkpoint
    assert "other" not in checkpoint
    with pytest.raises(KeyError):
        checkpoint["other"]
    assert checkpoint == open_checkpoint(sharded) != dict(checkpoint)
    write_safetensors(tmp_path / "none.safetensors", {})
    empty = open_checkpoint(tmp_path / "none.safetensors")
    assert bool(empty)
    assert [*empty] == []
    assert diff(empty, empty, progress=False).ok
