"""`convert(quant=)`: checkpoints whose weights are quantised while they are written."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dequant_samples
import ml_dtypes
import needs
import numpy as np
import pytest
from conversions import files_of, quiet, tensors_of
from distributed_helpers import load as load_rank
from distributed_helpers import succeeded
from gguf_models import write_model
from quant_loads_helpers import LAYERS, NAMES, found_in, load, matrix, model, write
from safetensors_files import write_safetensors
from thread_group import World, run

import streamload
import streamload.transformers
from streamload import Node, open_checkpoint
from streamload.cli import main
from streamload.codecs.parts import QuantCounts
from streamload.codecs.scheme import SCHEMES
from streamload.conversion import convert as conversion
from streamload.conversion.blocks import Way
from streamload.core.dtypes import BF16
from streamload.errors import CheckpointError, OutOfRangeError, UnsupportedCastError
from streamload.verification import diff as compare
from streamload.verification.verify import verify

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}


def source(path: Path, dtype: Any = ml_dtypes.bfloat16, config: Any = CONFIG) -> Path:
    made = write(path, model(dtype), shards=2)
    (made / "config.json").write_text(json.dumps(config))
    return made


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: data for name, (_, _, data) in tensors_of(path).items()}


@pytest.mark.parametrize("name", NAMES)
def test_it_writes_what_loads_give(tmp_path: Path, name: str) -> None:
    path = source(tmp_path / "in")
    quant = {"*experts*": None, "*": name} if name == "bitsandbytes-int8" else name
    expected = load(path, quant=quant)
    report = quiet(path, tmp_path / "out", quant=quant, max_shard_size="30kB", verify=True)
    assert bytes_of(tmp_path / "out") == found_in(expected)
    assert report.errors == {n: one.rounded() for n, one in expected.errors.items()}
    assert "error " in str(report)
    assert json.loads(report.to_json())["errors"].keys() == report.errors.keys()
    written = streamload.open_checkpoint(tmp_path / "out")
    for tensor in report.errors:
        made = SCHEMES[name].of(model()[tensor].shape, BF16)
        assert len({written.tensors[part.name(tensor)].shard for part in made.parts}) == 1
    assert len(written.shards) > 2
    assert streamload.verify_checkpoint(tmp_path / "out", progress=False).ok
    assert streamload.diff(path, tmp_path / "out", quant=quant, progress=False).ok
    again = quiet(path, tmp_path / "out", quant=quant, max_shard_size="30kB", resume=True)
    assert (again.read_nbytes, again.errors) == (0, report.errors)


@pytest.mark.parametrize("name", ["nf4-nested", "int8", "q4_0"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_however_it_is_cut(
    tmp_path: Path, name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are much shorter than weights, by several threads; units that are short."""
    arrays = model(dtype)
    rest = {"q4_0": 64, "int8": 1, "nf4-nested": 1}[name]
    arrays["model.layers.0.odd.weight"] = matrix(7, 33, 64 + rest, dtype=dtype)
    path = write(tmp_path / "in", arrays)
    for threads in (1, 4):
        way = Way(threads, block_nbytes=2**14, behind=1)
        monkeypatch.setattr(conversion, "choose_way", lambda *_, way=way, **__: way)
        quiet(path, tmp_path / f"{threads}", quant=name, verify=True)
    assert bytes_of(tmp_path / "1") == found_in(load(path, quant=name))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "4")


def test_patterns_names_and_dtypes(tmp_path: Path) -> None:
    """Patterns decide; what is left is cast, what is excluded is not there, names are new."""
    path = source(tmp_path / "in")
    quant = {"*.q_proj.*": None, "*.mlp.down*": "nf4", "lm_head*": "nf4"}
    report = quiet(
        path,
        tmp_path / "out",
        quant=quant,
        dtype="float16",
        exclude="*experts*",
        rename={"model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.w2.weight"},
    )
    names = ["model.layers.0.mlp.w2", "model.layers.1.mlp.down_proj", "lm_head"]
    assert report.errors.keys() == {f"{name}.weight" for name in names}
    loaded = found_in(load(path, quant=quant, dtype="float16"))
    mine = bytes_of(tmp_path / "out")
    for name, data in mine.items():
        assert data == loaded[name.replace("0.mlp.w2", "0.mlp.down_proj")]
    assert not any("experts" in name for name in mine)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    said = config["quantization_config"]
    assert (said["load_in_4bit"], said["bnb_4bit_compute_dtype"]) == (True, "float16")
    left = set(said["llm_int8_skip_modules"])
    assert left >= {"model.embed_tokens", "model.layers.0.self_attn.q_proj"}
    assert not left & set(names)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("fp4-nested", "bnb_4bit_use_double_quant", True),
        ("nf4", "bnb_4bit_quant_storage", "uint8"),
        ("bitsandbytes-int8", "load_in_8bit", True),
        ("int8", "ignore", ["model.embed_tokens", "lm_head"]),
        ("q8_0", None, "only streamload reads them"),
        ("q4_0", None, "only streamload reads them"),
    ],
)
def test_config_json_says_it(tmp_path: Path, name: str, key: str | None, value: Any) -> None:
    """In the words of transformers, where it has some; else in streamload's, and a note says so."""
    config = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    path = source(tmp_path / "in", config=config)
    report = quiet(path, tmp_path / "out", quant={"*.q_proj.*": name})
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    found = said.pop("quantization_config")
    assert said == config
    if key is None:
        assert found["quant_method"] == "streamload" and [*found["formats"]] == [name]
        assert any(value in note for note in report.plan.notes)
    else:
        assert found[key] == value or set(found[key]) > set(value)


def test_several_formats_have_a_configuration_of_their_own(tmp_path: Path) -> None:
    """One of transformers has one of them: a note says so, and streamload knows the weights."""
    path = source(tmp_path / "in")
    quant = {"*.q_proj.*": "int8", "*.down_proj.*": "nf4"}
    report = quiet(path, tmp_path / "out", quant=quant)
    assert any("int8 and nf4" in note for note in report.plan.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["formats"].keys() == {"int8", "nf4"}
    assert streamload.diff(path, tmp_path / "out", quant=quant, progress=False).ok


def test_each_node_has_whole_weights(tmp_path: Path) -> None:
    path = source(tmp_path / "in")
    expected = found_in(load(path, quant="nf4"))
    budget = sum(map(len, expected.values())) * 2 // 3
    quiet(path, tmp_path / "out", quant="nf4", nodes=[Node("a", budget), Node("b", budget)])
    found = [bytes_of(tmp_path / "out" / node) for node in "ab"]
    assert found[0] | found[1] == expected
    assert not found[0].keys() & found[1].keys()
    for node in "ab":
        assert streamload.verify_checkpoint(tmp_path / "out" / node, progress=False).ok
        config = json.loads((tmp_path / "out" / node / "config.json").read_text())
        assert config["quantization_config"]["bnb_4bit_quant_type"] == "nf4"


def test_what_is_not_finite_is_counted(tmp_path: Path) -> None:
    """As in loads; and what float16 does not reach is an error where that is asked for."""
    arrays = {"a.weight": matrix(1, 4, 64), "b.weight": matrix(2, 4, 64)}
    arrays["a.weight"][0, :3] = np.nan, np.inf, -np.inf
    path = write(tmp_path / "in", arrays)
    report = quiet(path, tmp_path / "out", quant="nf4")
    assert (report.errors["a.weight"].nan, report.errors["a.weight"].inf) == (1, 2)
    assert "1 NaN became 0" in str(report)
    arrays["b.weight"][1, 1] = 1e6
    path = write(tmp_path / "far", arrays)
    with pytest.raises(OutOfRangeError, match="bitsandbytes-int8") as caught:
        quiet(path, tmp_path / "none", quant="bitsandbytes-int8", out_of_range="error")
    assert (caught.value.tensor, caught.value.overflowed) == ("b.weight", 1)
    report = quiet(path, tmp_path / "some", quant="bitsandbytes-int8")
    assert report.errors["b.weight"].overflowed == 1
    again = quiet(path, tmp_path / "some", quant="bitsandbytes-int8", resume=True)
    assert again.errors == report.errors


def test_an_infinite_error_is_kept(tmp_path: Path) -> None:
    """JSON has no infinity: the sidecar still says what was lost."""
    path = write(tmp_path / "in", {"a.weight": np.full((2, 32), 3e38, np.float32)})
    report = quiet(path, tmp_path / "out", quant="q8_0")
    assert report.errors["a.weight"].largest_error == np.inf
    json.loads((tmp_path / "out" / "streamload.json").read_text(), parse_constant=pytest.fail)
    assert quiet(path, tmp_path / "out", quant="q8_0", resume=True).errors == report.errors
    with pytest.raises(ValueError, match="not what quantising did"):
        QuantCounts.of([1, 2])


@pytest.mark.parametrize(
    ("quant", "config", "error", "says"),
    [
        ("auto", CONFIG, ValueError, r'"auto" takes what fits a budget.*one of .*nf4'),
        ("nf5", CONFIG, ValueError, r"not 'nf5'; did you mean 'nf4'"),
        ({"*.qproj.*": "nf4"}, CONFIG, ValueError, r"quant: no tensor's name matches"),
        ("bitsandbytes-int8", CONFIG, UnsupportedCastError, r"is of matrices.*experts"),
        (
            {"*.q_proj.*": "nf4"},
            CONFIG | {"quantization_config": {"quant_method": "awq"}},
            CheckpointError,
            r"says already how it is quantised",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, quant: Any, config: Any, error: type[Exception], says: str
) -> None:
    path = source(tmp_path / "in", config=config)
    with pytest.raises(error, match=says):
        quiet(path, tmp_path / "out", quant=quant)
    assert not (tmp_path / "out").exists()


def test_transposed_layers_without_a_module_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "in", {f"h.{i}.attn.c_attn.weight": matrix(i, 64, 192) for i in (0, 1)})
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UnsupportedCastError, match="stores it transposed") as caught:
        quiet(path, tmp_path / "out", quant="int8")
    assert caught.value.tensor == "h.0.attn.c_attn.weight"
    assert quiet(path, tmp_path / "out", quant="q8_0").errors
    assert streamload.diff(path, tmp_path / "out", quant="q8_0", progress=False).ok


@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "bitsandbytes-int8"])
@pytest.mark.parametrize("block_nbytes", [None, 2**14])
def test_the_transpose_of_a_conv1d_is_quantized(
    tmp_path: Path, name: str, block_nbytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bitsandbytes does: by slabs of columns, next to tensors that lie as they are read."""
    arrays = {}
    for i, shape in enumerate([(64, 193), (192, 64), (35, 67)]):
        arrays[f"h.{i}.attn.c_attn.weight"] = matrix(i, *shape).astype(ml_dtypes.bfloat16)
        arrays[f"h.{i}.attn.c_attn.bias"] = matrix(9 + i, shape[1]).astype(ml_dtypes.bfloat16)
    path, flipped = (
        write(tmp_path / "in", arrays),
        write(
            tmp_path / "flipped",
            {n: np.ascontiguousarray(a.T) if a.ndim == 2 else a for n, a in arrays.items()},
        ),
    )
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    if block_nbytes is not None:
        way = Way(3, block_nbytes=block_nbytes, behind=1)
        monkeypatch.setattr(conversion, "choose_way", lambda *_, **__: way)
        monkeypatch.setattr(compare, "way", lambda *_: (block_nbytes, "auto"))
    out = tmp_path / "out"
    report = quiet(path, out, quant=name, verify=True)
    assert bytes_of(out) == found_in(load(flipped, quant=name))
    assert report.errors.keys() == {n for n in arrays if n.endswith("weight")}
    assert streamload.diff(path, out, quant=name, progress=False).ok
    weight = open_checkpoint(out).tensors["h.1.attn.c_attn.weight"]
    with open(weight.shard, "r+b") as file:
        file.seek(weight.stop - 1)
        file.write(b"\x7e")
    (found,) = streamload.diff(path, out, quant=name, progress=False).differences
    assert found.name == weight.name
    assert found.values is not None
    assert found.values.count == 1


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """convert, verify and diff take it, by patterns too."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["streamload", *arguments])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0)

    path, out = str(source(tmp_path / "in")), str(tmp_path / "out")
    quant = ("--quant", "*experts*=none", "--quant", "int8", "--no-progress")
    assert run("convert", path, out, *quant) == 0
    assert "quantised" in capsys.readouterr().out
    assert run("verify", path, out, *quant) == 0
    assert run("diff", path, out, *quant) == 0
    assert run("diff", path, out, "--no-progress") == 1
    assert run("verify", out, *quant) == 2
    assert "need CONVERTED" in capsys.readouterr().err
    assert run("convert", path, out, "--quant", "auto", "--overwrite") == 2
    assert '"auto"' in capsys.readouterr().err


def test_differences_are_found(tmp_path: Path) -> None:
    path, out = source(tmp_path / "in"), tmp_path / "out"
    quiet(path, out, quant="nf4-nested")
    made = streamload.open_checkpoint(out).tensors
    whole = {info.shard: info.shard.read_bytes() for info in made.values()}
    for name in [name for name in made if name.startswith(LAYERS[0])]:
        info = made[name]
        wrong = bytearray(whole[info.shard])
        wrong[info.stop - 1] ^= 1
        info.shard.write_bytes(wrong)
        found = streamload.diff(path, out, quant="nf4-nested", progress=False)
        assert [one.name for one in found.differences] == [name]
        assert found.differences[0].values.count == 1
        info.shard.write_bytes(whole[info.shard])
    other = streamload.diff(path, out, quant="int8", progress=False)
    assert not other.ok
    assert other.equal_count == len(model()) - len(LAYERS)
    assert f"{LAYERS[0]}_scale" in other.only_a


# --- of checkpoints with quantised weights --------------------------------------------------------


def stored(path: Path, *samples: dequant_samples.Sample) -> Path:
    made = dequant_samples.write(path, list(samples))
    rest = {"l.0.up.weight": dequant_samples.entry(matrix(5, 64, 128))}
    (file,) = made.glob("*.safetensors")
    file.rename(made / "model-1.safetensors")
    write_safetensors(made / "model-2.safetensors", rest)
    return made


def fp8_of(source: Path, out: Path) -> None:
    """The same model, its layers in FP8 with scales of 32 x 32."""
    rng, tensors = np.random.default_rng(1), {}
    for name, (dtype, shape, data) in tensors_of(source).items():
        tensors[name] = (dtype.code, shape, data)
        if "_proj" in name and len(shape) == 2:
            scales = rng.uniform(0.001, 0.01, [-(-n // 32) for n in shape]).astype(np.float32)
            wide = np.frombuffer(data, dtype.numpy).reshape(shape).astype(np.float32)
            wide /= dequant_samples.spread(scales, (32, 32), shape)
            codes = wide.clip(-440, 440).astype(ml_dtypes.float8_e4m3fn)
            tensors[name] = dequant_samples.entry(codes)
            tensors[f"{name}_scale_inv"] = dequant_samples.entry(scales)
    write_safetensors(out / "model.safetensors", tensors)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (out / "config.json").write_text(json.dumps(config))


#: By family, sources that are quantised, each with what it is written to.
_TARGETS: dict[str, list[dict[str, str]]] = {
    "llama": [{"to": "irpa", "dtype": "float16"}],
    "gpt2": [{"to": "llm.c"}, {"to": "llm.c", "dtype": "bfloat16"}],
}
_ALL_TARGETS: list[dict[str, str]] = [
    {"to": "mlc", "quant": "q4f16_1"},
    {"to": "mlc", "quant": "q4f16_0"},
    {"to": "mlc", "quant": "q0f16"},
    {"to": "gguf", "dtype": "float16"},
    {"to": "gguf", "dtype": "float32", "quant": "q8_0"},
]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "fp8"),
        *((f, k) for f in ("llama", "gpt2") for k in ("nf4", "bitsandbytes-int8", "q4_0")),
    ],
)
@pytest.mark.slow
def test_what_is_stored_quantized_becomes_other_formats(
    family: str, kind: str, tmp_path: Path
) -> None:
    """As in two calls: dequantised to float32, and then converted."""
    source = write_model(tmp_path / "in", family, tokenizer=False, rope_scaling=None)
    stored = tmp_path / "stored"
    if kind == "fp8":
        fp8_of(source, stored)
    else:
        quiet(source, stored, quant=kind, to="gguf" if kind == "q4_0" else "safetensors")
    quiet(stored, tmp_path / "plain", dtype="float32")
    for i, options in enumerate(_ALL_TARGETS + _TARGETS[family]):
        found, expected = tmp_path / f"found{i}", tmp_path / f"expected{i}"
        quiet(stored, found, **options, verify=True)
        quiet(tmp_path / "plain", expected, **options)
        (found / "streamload.json").unlink()
        (expected / "streamload.json").unlink()
        assert files_of(found) == files_of(expected), options


@pytest.mark.parametrize("kind", ["nf4", "bitsandbytes-int8"])
def test_a_conv1d_is_dequantized_to_one(kind: str, tmp_path: Path) -> None:
    """What bitsandbytes has as a Linear is the transpose of what the plain model has."""
    source = write_model(tmp_path / "in", "gpt2", dtype="F32", tokenizer=False)
    quiet(source, tmp_path / "stored", quant=kind)
    quiet(tmp_path / "stored", tmp_path / "plain", dtype="float32")
    found, expected = tensors_of(tmp_path / "plain"), tensors_of(source)
    assert found.keys() == expected.keys()
    for name, (dtype, shape, data) in expected.items():
        assert found[name][:2] == (dtype, shape), name
        wide, was = (np.frombuffer(each, np.float32) for each in (found[name][2], data))
        assert np.abs(wide - was).max() <= 0.16 * np.abs(was).max(), name
    given = {"dtype": "float32", "progress": False}
    assert streamload.diff(tmp_path / "stored", tmp_path / "plain", **given).ok


@pytest.mark.parametrize("kind", ["nf4", "bitsandbytes-int8"])
def test_a_conv1d_has_one_orientation_at_every_entrance(kind: str, tmp_path: Path) -> None:
    """Dequantised by a dtype, it is what the plain model has: its square matrices, too."""
    source = write_model(tmp_path / "in", "gpt2", dtype="F32", tokenizer=False, n_layer=4)
    quiet(source, tmp_path / "stored", quant=kind)
    quiet(tmp_path / "stored", tmp_path / "plain", dtype="float32")
    quiet(tmp_path / "stored", tmp_path / "irpa", dtype="float32", to="irpa")
    given: dict[str, Any] = {"dtype": "float32", "device": "host"}
    expected = streamload.load_state_dict(None, tmp_path / "plain", progress=False, **given)
    shapes = {name: array.shape for name, array in expected.state_dict.items()}
    path = tmp_path / "stored"
    entrances = {
        "None": streamload.load_state_dict(None, path, progress=False, **given).state_dict,
        "irpa": streamload.load_state_dict(
            None, tmp_path / "irpa", progress=False, **given
        ).state_dict,
        "iterate": dict(streamload.iterate(path, **given)),
    }
    for name, turned in (("Conv1D", False), ("Linear", True)):
        held = {
            key: np.zeros(shape[::-1] if turned and ".c_" in key else shape, np.float32)
            for key, shape in shapes.items()
        }
        streamload.load_state_dict(held, path, dtype="float32", progress=False)
        entrances[name] = {
            key: array.T if turned and ".c_" in key else array for key, array in held.items()
        }
    with streamload.stream_layers(path, budget="800kB", **given) as layers:
        assert layers.plan.residency.streams
        entrances["stream_layers"] = {k: v.copy() for _, step in layers for k, v in step.items()}
    for split in ("layers", "balanced", "replicate"):
        reports = succeeded(run(World(2), load_rank(path, split=split, dtype="float32")))
        entrances[split] = {k: v for each in reports for k, v in each.state_dict.items()}
    for entrance, found in entrances.items():
        assert found.keys() == shapes.keys(), entrance
        for name, array in expected.state_dict.items():
            assert np.array_equal(found[name], array), (entrance, name)


def test_a_conv1d_of_an_odd_width_is_one_error(tmp_path: Path) -> None:
    sizes = {"n_embd": 63, "n_head": 3, "n_layer": 1}
    source = write_model(tmp_path / "in", "gpt2", tokenizer=False, **sizes)
    quiet(source, tmp_path / "stored", quant="nf4")
    with pytest.raises(CheckpointError, match=r"c_attn.*dtype=.*multiple of 2 values, found 63"):
        quiet(tmp_path / "stored", tmp_path / "plain", dtype="float16")
    kept = {"*.c_*.weight": "checkpoint", "*": "float16"}  # as the error says
    quiet(tmp_path / "stored", tmp_path / "plain", dtype=kept)
    found, stored = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "stored")
    name = "h.0.attn.c_attn.weight"
    assert found[name] == stored[name]


@pytest.mark.parametrize("name", ["nf4", "q8_0"])
def test_some_are_dequantized_and_others_quantized(tmp_path: Path, name: str) -> None:
    """What was quantised is not any more: config.json says how the others are, or nothing."""
    one = dequant_samples.fp8()
    path = stored(tmp_path / "in", one)
    quant = {"l.0.up.*": name}
    report = quiet(path, tmp_path / "out", dtype="bfloat16", quant=quant, verify=True)
    assert report.errors.keys() == {"l.0.up.weight"}
    found = load(tmp_path / "out", dtype="checkpoint").state_dict
    assert dequant_samples.same(found[one.name], one.rounded("bfloat16"))
    expected = load(path, dtype="bfloat16", quant=quant)
    assert bytes_of(tmp_path / "out") == found_in(expected)
    assert report.counts == expected.counts
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    method = config["quantization_config"]["quant_method"]
    assert method == ("bitsandbytes" if name == "nf4" else "streamload")
    if name == "nf4":
        assert config["quantization_config"]["quant_method"] == "bitsandbytes"
        assert "l.0.q" in config["quantization_config"]["llm_int8_skip_modules"]
    again = quiet(path, tmp_path / "out", dtype="bfloat16", quant=quant, resume=True)
    assert (again.read_nbytes, again.errors) == (0, report.errors)


def test_a_part_of_a_quantized_weight_is_chosen(tmp_path: Path) -> None:
    """Where nothing is quantised, parts of a weight can be left out, and be taken alone."""
    sample = dequant_samples.four_bit()
    path = stored(tmp_path / "in", sample)
    for name in sample.tensors:
        quiet(path, tmp_path / "one", select=name, overwrite=True)
        assert bytes_of(tmp_path / "one") == {name: sample.tensors[name][2]}
        quiet(path, tmp_path / "rest", exclude=name, overwrite=True)
        assert bytes_of(tmp_path / "rest").keys() == bytes_of(path).keys() - {name}


def test_where_some_stay_as_they_are_stored(tmp_path: Path) -> None:
    """A configuration cannot say both; a format that it does not say is written."""
    path = stored(tmp_path / "in", dequant_samples.fp8(), dequant_samples.int8())
    dtype = {"l.0.q.weight": "bfloat16"}
    with pytest.raises(CheckpointError, match="says already how it is quantised"):
        quiet(path, tmp_path / "out", dtype=dtype, quant={"*.up.*": "nf4"})
    report = quiet(path, tmp_path / "out", dtype=dtype, quant={"*.up.*": "q8_0"})
    assert report.errors.keys() == {"l.0.up.weight"}
    there = streamload.open_checkpoint(tmp_path / "out").tensors
    assert (there["l.0.q.weight"].dtype.name, there["l.0.k.weight"].dtype.name) == (
        "bfloat16",
        "int8",
    )


@pytest.mark.parametrize("sample", [dequant_samples.fp8(), dequant_samples.mxfp4()])
def test_one_call_does_not_dequantize_and_quantize_a_weight(
    tmp_path: Path, sample: dequant_samples.Sample
) -> None:
    path = stored(tmp_path / "in", sample)
    quant = {sample.name: "nf4"}
    for attempt in (
        lambda: quiet(path, tmp_path / "out", dtype="bfloat16", quant=quant),
        lambda: load(path, dtype="bfloat16", quant=quant),
    ):
        with pytest.raises(UnsupportedCastError, match="this call dequantises it") as caught:
            attempt()
        assert caught.value.tensor == sample.name
        assert f'quant={{"{sample.name}": None}}' in str(caught.value)
    assert not (tmp_path / "out").exists()
    quiet(path, tmp_path / "plain", dtype="bfloat16")
    report = quiet(tmp_path / "plain", tmp_path / "out", quant=quant)
    assert report.errors.keys() == {sample.name}


@pytest.mark.parametrize("what", ["dtype", "quant"])
def test_patterns_of_tensors_that_are_not_chosen(tmp_path: Path, what: str) -> None:
    """A pattern fits a tensor of the checkpoint; which of them are chosen is another matter."""
    path, nodes = source(tmp_path / "in"), [Node("a", "10MB"), Node("b", "10MB")]
    value = {"dtype": "float32", "quant": "int8"}[what]
    rules: Any = {what: {"*.0.self_attn.q_proj.*": value, "*.1.self_attn.q_proj.*": value}}
    quiet(path, tmp_path / "out", nodes=nodes, select="*layers.1.*", **rules)
    names = [n for part in ("a", "b") for n in _names(tmp_path / "out" / part)]
    assert names
    assert all("layers.1." in name for name in names)
    quiet(path, tmp_path / "all", select="*layers.1.*", **rules)
    assert streamload.diff(path, tmp_path / "all", select="*layers.1.*", progress=False, **rules).ok
    for call in (quiet, streamload.diff):
        with pytest.raises(ValueError, match=f"{what}: no tensor's name matches"):
            call(path, tmp_path / "all", **{what: {"*.7.*": value}})


def _names(path: Path) -> list[str]:
    return list(tensors_of(path)) if path.is_dir() else []


def test_patterns_of_quantized_weights(tmp_path: Path) -> None:
    """A pattern may be of a weight that is stored in parts, as of any other tensor."""
    sample = dequant_samples.mxfp4()
    path = stored(tmp_path / "in", sample)
    rules = {sample.name: None, "*.up.*": "q8_0"}
    quiet(path, tmp_path / "out", quant=rules)
    assert streamload.diff(path, tmp_path / "out", quant=rules, progress=False).ok


# --- transformers opens them ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("max_shard_size", ["1GB", "40kB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "fp4", "bitsandbytes-int8", "int8"])
def test_transformers_opens_it(tmp_path: Path, name: str, tied: bool, max_shard_size: str) -> None:
    """Alone, with all layers quantised; its logits are those of our load into the same modules."""
    needs.runtime("compressed_tensors" if name == "int8" else "bitsandbytes")
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        tie_word_embeddings=tied,
    )
    # transformers rounds the scales of int8 to the dtype of the model
    dtype = torch.float32 if name == "int8" else torch.bfloat16
    made = transformers.LlamaForCausalLM(config).to(dtype)
    made.save_pretrained(tmp_path / "in")
    options = {"quant": name, "max_shard_size": max_shard_size}
    quiet(tmp_path / "in", tmp_path / "out", **options)
    with warnings.catch_warnings(action="ignore"):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", device_map="cpu"
        )
        ours = streamload.transformers.from_pretrained(
            tmp_path / "out", device="cpu", progress=False
        )
        ids = torch.arange(12)[None]
        with torch.no_grad():
            expected, found, full = (each(ids).logits for each in (theirs, ours, made))
    assert torch.equal(found, expected)
    assert 0 < (expected - full).abs().max() < 0.25 * full.abs().max()
    kinds = {type(m).__name__ for m in theirs.model.layers.modules() if hasattr(m, "weight")}
    kind = {"int8": "Linear", "bitsandbytes-int8": "Linear8bitLt"}.get(name, "Linear4bit")
    assert kinds == {kind, "LlamaRMSNorm"}
    assert type(theirs.lm_head) is torch.nn.Linear


@pytest.mark.parametrize("name", ["nf4", "bitsandbytes-int8"])
def test_gpt2_takes_what_is_dequantized_as_its_conv1d_has_it(tmp_path: Path, name: str) -> None:
    """bitsandbytes stores the transposes, of square weights too, whose shapes do not tell."""
    transformers, torch = map(needs.module, ("transformers", "torch"))

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    made.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", quant=name)
    quiet(tmp_path / "out", tmp_path / "plain", dtype="float32")
    models = []
    for folder in ("out", "plain"):
        model = transformers.GPT2LMHeadModel(made.config)
        report = streamload.load_state_dict(model, tmp_path / folder, progress=False)
        assert verify(report, streamload.open_checkpoint(tmp_path / folder), model) == []
        models.append(model)
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, two)
    weight = models[0].transformer.h[0].attn.c_proj.weight
    near, far = made.transformer.h[0].attn.c_proj.weight, made.transformer.h[0].attn.c_proj.weight.T
    assert (weight - near).norm() < (weight - far).norm() / 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nf4", "nf4-nested", "fp4", "bitsandbytes-int8"])
def test_transformers_opens_gpt2(tmp_path: Path, name: str) -> None:
    """Its Conv1D become bitsandbytes' Linears, with the bytes that transformers itself makes."""
    needs.runtime("bitsandbytes")
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, dtype="bfloat16"
    )
    made = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    made.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", quant=name)
    assert streamload.diff(tmp_path / "in", tmp_path / "out", quant=name, progress=False).ok
    options: dict[str, Any] = {"load_in_8bit": True}
    if name != "bitsandbytes-int8":
        kind, _, nested = name.partition("-")
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
        options |= {"bnb_4bit_use_double_quant": bool(nested)}
    theirs, opened = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, **given)
        for folder, given in (
            ("in", {"quantization_config": transformers.BitsAndBytesConfig(**options)}),
            ("out", {}),
        )
    )
    ours = streamload.transformers.from_pretrained(tmp_path / "out", device="cpu", progress=False)
    expected = theirs.state_dict()
    for found in (opened.state_dict(), ours.state_dict()):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if not ("nested" in name and "quant_state" in key):  # the mean depends on threads
                # transformers has biases in float32 where it quantises itself
                assert torch.equal(found[key].double(), tensor.double()), key
    ids = torch.arange(12)[None]
    with torch.no_grad():
        theirs_, own = (each(ids).logits for each in (opened, ours))
    # bitsandbytes rounds otherwise on some CPUs; with another weight all logits would be others
    torch.testing.assert_close(own, theirs_, rtol=0, atol=float(theirs_.abs().max()) / 64)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_0", "q5_1", "q4_k"])
def test_rows_without_whole_blocks(tmp_path: Path, name: str) -> None:
    """The error names Mamba's tensor with rows of 4, the blocks, and the ``quant=`` without it."""
    transformers = needs.module("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    config = transformers.MambaConfig(vocab_size=96, **sizes)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "in")
    with pytest.raises(
        UnsupportedCastError, match=r"blocks of \d+ elements .* \(128, 4\)"
    ) as raised:
        quiet(tmp_path / "in", tmp_path / "out", quant=name)
    assert "mixer.dt_proj.weight" in str(raised.value.tensor) or name == "q4_k"
    assert "mixer.dt_proj.weight" in str(raised.value).partition("quant={")[2]
    assert not (tmp_path / "out").exists()


def fp8_folder(folder: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    with np.errstate(over="ignore"):
        codes = values.astype(ml_dtypes.float8_e4m3fn)
    layer = "model.layers.0"
    write_safetensors(
        folder / "model.safetensors",
        {
            f"{layer}.q_proj.weight": ("F8_E4M3", (64, 256), codes.tobytes()),
            f"{layer}.q_proj.weight_scale": ("F32", (1,), np.ones(1, np.float32).tobytes()),
            f"{layer}.norm.weight": ("F32", (64,), bytes(256)),
        },
    )
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    return folder


@pytest.mark.parametrize("format", ["nf4", "int8", "q8_0", "q4_k"])
def test_weights_that_are_stored_in_another_format(tmp_path: Path, format: str) -> None:
    """A request that would do nothing is refused, with the call that makes it possible."""
    source, out = fp8_folder(tmp_path / "in"), str(tmp_path / "floats")
    calls: list[Callable[[], object]] = [
        lambda: streamload.convert(source, tmp_path / "out", quant=format, progress=False),
        lambda: streamload.load_state_dict(
            None, source, quant=format, device="host", progress=False
        ),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"nothing is quantised.*1 are stored.*fp8") as raised:
            call()
    assert not (tmp_path / "out").exists()
    (line,) = re.findall(r"streamload\.convert\(.*?\)", str(raised.value))
    eval(line, {"streamload": streamload, "out": out})
    report = streamload.convert(out, tmp_path / "out", quant=format, progress=False)
    assert len(report.errors) == 1


def test_some_weights_that_are_stored_in_another_format(tmp_path: Path) -> None:
    """The others are quantised, and a note names those that stay."""
    source = fp8_folder(tmp_path / "in")
    more = {"model.layers.0.up.weight": ("F32", (64, 64), bytes(64 * 64 * 4))}
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    write_safetensors(source / "model-2.safetensors", more)
    (source / "config.json").unlink()
    report = streamload.convert(source, tmp_path / "out", quant="q8_0", progress=False)
    assert any("1 weights stay as they are stored (fp8)" in note for note in report.plan.notes)


def test_a_shard_that_no_index_lists(tmp_path: Path) -> None:
    """It is no part of the checkpoint, as for transformers, and a note says so."""
    folder = tmp_path / "in"
    for name, tensor in (("model-1", "a"), ("mtp", "b")):
        write_safetensors(folder / f"{name}.safetensors", {tensor: ("F32", (1,), bytes(4))})
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    report = streamload.convert(folder, tmp_path / "out", progress=False)
    assert any(
        "not copied: mtp.safetensors (weights that are no" in note for note in report.plan.notes
    )
