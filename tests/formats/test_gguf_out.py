"""`convert(to="gguf")`: files that equal gguf-py's, tensor by tensor."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversions import quiet
from gguf_files import quantized_types, small_model, tensors_of, write
from gguf_models import (
    CONFIGS,
    LLAMA3_ROPE,
    made_by_gguf_py,
    read_by_gguf_py,
    tokenizer_of,
    write_model,
)
from safetensors_files import write_safetensors

from streamload.cli import main
from streamload.errors import CheckpointError, StreamloadError, UnsupportedCastError
from streamload.formats.gguf.vocabulary import from_gguf

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "F32": {"dtype": "float32"},
    "F16": {"dtype": "float16"},
    "BF16": {"dtype": "bfloat16"},
    "Q8_0": {"quant": "q8_0"},
    "Q4_0": {"quant": "q4_0"},
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_equal_gguf_pys(family: str, kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", family)
    quiet(source, tmp_path / "out", to="gguf", verify=True, **KINDS[kind])
    fields, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    factors = tensors.pop("rope_freqs.weight", None)
    assert (factors is not None) == (family == "llama")
    assert tensors == made_by_gguf_py(source, kind)
    assert (
        fields["general.file_type"]
        == gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]
    )
    assert fields["general.architecture"] == {"mistral": "llama"}.get(family, family)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "model.gguf",
        "streamload.json",
    ]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_matrices_stay_as_they_are(dtype: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "qwen2", dtype=dtype)
    quiet(source, tmp_path / "out", to="gguf")
    _, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert tensors == made_by_gguf_py(source, None)
    assert tensors["blk.0.attn_q.bias"][0] == "F32"


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_rows_that_are_no_whole_blocks_become_f16(kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "llama", intermediate_size=80)
    quiet(source, tmp_path / "out", to="gguf", **KINDS[kind])
    _, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    del tensors["rope_freqs.weight"]
    assert tensors["blk.1.ffn_down.weight"][0] == "F16"
    assert tensors == made_by_gguf_py(source, kind)


def test_patterns_choose_what_is_quantized(tmp_path: Path) -> None:
    """The pattern "*" stands for all matrices; those before it decide first."""
    source = write_model(tmp_path / "in", "llama")
    rules = {"lm_head.weight": None, "*.mlp.*": "q4_0", "*": "q8_0"}
    quiet(source, tmp_path / "out", to="gguf", quant=rules)
    _, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert tensors["output.weight"][0] == "BF16"
    assert tensors["blk.0.ffn_up.weight"] == made_by_gguf_py(source, "Q4_0")["blk.0.ffn_up.weight"]
    assert tensors["token_embd.weight"] == made_by_gguf_py(source, "Q8_0")["token_embd.weight"]


def test_scaled_rotary_embeddings_are_a_tensor(tmp_path: Path) -> None:
    """Llama 3's factors are what transformers divides the frequencies by."""
    source = write_model(tmp_path / "in", "llama")
    quiet(source, tmp_path / "out", to="gguf")
    fields, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    kind, shape, data = tensors["rope_freqs.weight"]
    assert (kind, shape) == ("F32", (8,))
    frequencies = LLAMA3_ROPE["rope_theta"] ** (-np.arange(8) / 8)  # type: ignore[operator]
    context = LLAMA3_ROPE["original_max_position_embeddings"]
    waves = 2 * np.pi / frequencies
    smooth = np.clip((context / waves - 1) / 3, 0, 1)
    expected = frequencies / ((1 - smooth) * frequencies / 8 + smooth * frequencies)
    assert np.allclose(np.frombuffer(data, np.float32), expected, rtol=1e-6)
    assert "llama.rope.scaling.type" not in fields


@pytest.mark.parametrize("family", CONFIGS)
def test_the_vocabulary_is_in_the_metadata(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", family)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    quiet(source, tmp_path / "out", to="gguf")
    fields, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == tensors["token_embd.weight"][1][0]
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    files = from_gguf("x", fields)
    tokenizer, settings = tokenizer_of(family)
    assert files["tokenizer.json"]["model"]["vocab"] == tokenizer["model"]["vocab"] | {
        each["content"]: each["id"] for each in tokenizer["added_tokens"]
    }
    assert files["tokenizer_config.json"]["eos_token"] == settings["eos_token"]


@pytest.mark.parametrize("size", ["60kB", "20kB", "1kB"])
def test_files_are_split_by_size(size: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "qwen3")
    report = quiet(source, tmp_path / "out", to="gguf", quant="q8_0", max_shard_size=size)
    files = sorted((tmp_path / "out").glob("*.gguf"))
    count = len(files)
    assert count > 1
    assert [path.name for path in files] == [
        f"model-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)
    ]
    found: dict[str, Any] = {}
    for number, path in enumerate(files):
        fields, tensors = read_by_gguf_py(path)
        assert fields["split.no"] == number
        assert fields["split.count"] == count
        assert fields["split.tensors.count"] == sum(len(f.tensors) for f in report.plan.files)
        assert ("general.architecture" in fields) == (number == 0)
        limit = {"60kB": 60_000, "20kB": 20_000, "1kB": 1_000}[size]
        assert path.stat().st_size <= limit or len(tensors) == 1
        found |= tensors
    assert found == made_by_gguf_py(source, "Q8_0")


def test_a_window_that_llama_cpp_does_not_read_is_told(tmp_path: Path) -> None:
    """Mistral's sliding_window stands in the metadata; the report says what becomes of it."""
    report = quiet(write_model(tmp_path / "in", "mistral"), tmp_path / "out", to="gguf")
    assert any("no sliding_window (64)" in note for note in report.plan.notes)
    fields, _ = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert fields["llama.attention.sliding_window"] == 64


def test_conversions_are_resumed(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "llama")
    quiet(source, tmp_path / "a", to="gguf", quant="q4_0")
    quiet(source, tmp_path / "b", to="gguf", quant="q4_0")
    first = (tmp_path / "a/model.gguf").read_bytes()
    assert (tmp_path / "b/model.gguf").read_bytes() == first
    report = quiet(source, tmp_path / "a", to="gguf", quant="q4_0", resume=True, verify=True)
    assert report.resumed == sum(len(file.tensors) for file in report.plan.files)
    assert not report.read_nbytes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("arguments", [{}, {"quant": "q8_0"}])
def test_quantized_weights_are_dequantized(
    family: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    """With a dtype, as the error without one says: as in two calls, in whatever order rows lie."""
    source = write_model(tmp_path / "in", family)
    quiet(source, tmp_path / "nf4", quant="nf4")
    with pytest.raises(CheckpointError, match=r"quantised already.*--dtype float16"):
        quiet(tmp_path / "nf4", tmp_path / "a", to="gguf", **arguments)
    quiet(tmp_path / "nf4", tmp_path / "a", to="gguf", dtype="float32", **arguments)
    quiet(tmp_path / "nf4", tmp_path / "plain", dtype="float32")
    quiet(tmp_path / "plain", tmp_path / "b", to="gguf", **arguments)
    assert (tmp_path / "a/model.gguf").read_bytes() == (tmp_path / "b/model.gguf").read_bytes()


@pytest.mark.parametrize("family", CONFIGS)
def test_blocks_of_gguf_stay_as_they_are(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", family)
    quiet(source, tmp_path / "a", to="gguf", quant="q4_0")
    report = quiet(tmp_path / "a", tmp_path / "b", to="gguf", verify=True)
    assert "stay as they are stored: q4_0" in report.plan.notes[0]
    found, again = (read_by_gguf_py(tmp_path / each / "model.gguf") for each in "ab")
    assert again == found
    quiet(tmp_path / "a", tmp_path / "c", to="gguf", dtype="float16")
    assert read_by_gguf_py(tmp_path / "c/model.gguf")[1]["token_embd.weight"][0] == "F16"


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q4_K", "IQ4_XS", "MXFP4"])
def test_blocks_that_are_never_quantized_here_stay_too(kind: str, tmp_path: Path) -> None:
    """A file of any blocks that are read is written again, and says which it has most of."""
    model = small_model("llama", num_hidden_layers=1)
    tensors = tensors_of(model)
    numel, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    types = quantized_types(tensors, kind)
    for name in types:
        rows, width = tensors[name].shape
        tensors[name] = rng.integers(0, 256, (rows, width // numel * nbytes), np.uint8)
    write(tmp_path / "in.gguf", tensors, types, config=model.config)
    quiet(tmp_path / "in.gguf", tmp_path / "out", to="gguf", verify=True)
    metadata, found = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert found == read_by_gguf_py(tmp_path / "in.gguf")[1]
    name = gguf.LlamaFileType(metadata["general.file_type"]).name
    assert name.startswith(f"MOSTLY_{kind}")


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_blocks_become_others(family: str, tmp_path: Path) -> None:
    """As in two calls by way of float32; what is asked for decides, not what is stored."""
    source = write_model(tmp_path / "in", family, rope_scaling=None)
    quiet(source, tmp_path / "q4_0", to="gguf", quant="q4_0")
    quiet(tmp_path / "q4_0", tmp_path / "a", to="gguf", quant="q8_0", verify=True)
    quiet(tmp_path / "q4_0", tmp_path / "plain", dtype="float32")
    quiet(tmp_path / "plain", tmp_path / "b", to="gguf", quant="q8_0")
    assert (tmp_path / "a/model.gguf").read_bytes() == (tmp_path / "b/model.gguf").read_bytes()
    name = {"llama": "*.o_proj.*", "gpt2": "*.attn.c_proj.*"}[family]
    quant = {name: "q8_0", "*": None}
    quiet(tmp_path / "q4_0", tmp_path / "c", to="gguf", quant=quant)
    _, tensors = read_by_gguf_py(tmp_path / "c/model.gguf")
    kinds = {name: tensors[f"blk.0.{name}.weight"][0] for name in ("attn_output", "ffn_up")}
    assert kinds == {"attn_output": "Q8_0", "ffn_up": "Q4_0"}


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``streamload convert SOURCE DESTINATION --to gguf --quant q8_0``."""
    source = write_model(tmp_path / "in", "gpt2", tokenizer=False)
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "gguf", "--quant", "q8_0"]
    monkeypatch.setattr(sys, "argv", ["streamload", *arguments])
    with pytest.raises(SystemExit) as done:
        main()
    assert not done.value.code
    assert "there is no tokenizer.json" in capsys.readouterr().out
    fields, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert fields["tokenizer.ggml.model"] == "no_vocab"
    assert fields["gpt2.vocab_size"] == tensors["token_embd.weight"][1][0]
    assert tensors == made_by_gguf_py(source, "Q8_0")


# --- what is refused ------------------------------------------------------------------------------


def _source(folder: Path, **changes: Any) -> Path:
    return write_model(folder, "llama", **changes)


def _with_a_tensor(folder: Path, name: str, code: str = "F32") -> Path:
    source = _source(folder)
    write_safetensors(folder / "model.safetensors", {name: (code, (2, 2), bytes(16))})
    return source


def _of_experts(folder: Path, *names: str, without: str = "") -> Path:
    source = _source(folder, model_type="qwen3_moe", num_experts=2)
    starts = (f"model.layers.0.mlp.experts.{name}.weight" for name in names)
    found = [start.removeprefix(without) if at else start for at, start in enumerate(starts)]
    tensors = {name: ("F32", (2, 2), bytes(16)) for name in found}
    write_safetensors(folder / "model.safetensors", tensors)
    return source


def _other_tokenizer(folder: Path) -> Path:
    source = _source(folder, tokenizer=False)
    (source / "tokenizer.model").write_bytes(b"x")
    return source


def _named_file(folder: Path) -> Path:
    source = _other_tokenizer(folder)
    quiet(source, folder / "irpa", to="irpa")
    return folder / "irpa" / "model.irpa"


def _broken_tokenizer(folder: Path) -> Path:
    source = _source(folder)
    (source / "tokenizer.json").write_text("{")
    return source


def _without_config(folder: Path) -> Path:
    source = _source(folder)
    (source / "config.json").unlink()
    return source


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "family": (
        lambda p: _source(p, architectures=["X"], model_type="llama4_text"),
        {},
        "llama, mistral, qwen2, qwen3, .*gpt2.*found 'llama4_text'",
    ),
    "long family": (lambda p: _source(p, model_type="x" * 3000), {}, r"found 'x{76}\.\.\.$"),
    "config": (_without_config, {}, "found no config.json"),
    "experts": (lambda p: _source(p, num_experts=8), {}, "convert_hf_to_gguf.py knows more"),
    "experts without the first": (
        lambda p: _of_experts(p, "1.gate_proj"),
        {"dtype": "float16"},
        r"cannot be stacked.*numbers 0 to 1.*found 1 numbers up to 1",
    ),
    "experts without the last": (
        lambda p: _of_experts(p, "0.gate_proj"),
        {"dtype": "float16"},
        r"cannot be stacked.*numbers 0 to 1.*found 1 numbers up to 0",
    ),
    "an expert twice": (
        lambda p: _of_experts(p, "0.gate_proj", "0.gate_proj", without="model."),
        {"dtype": "float16"},
        r"would have the same name in GGUF, blk\.0\.ffn_gate_exps\.weight",
    ),
    "window of gemma": (
        lambda p: _source(
            *(p,), model_type="gemma3_text", tie_word_embeddings=True, sliding_window_pattern=3
        ),
        {},
        "no such sliding_window_pattern in config.json.*found 3",
    ),
    "window of qwen": (
        lambda p: _source(p, model_type="qwen2", max_window_layers="x"),
        {},
        "max_window_layers is a whole number",
    ),
    "name": (
        lambda p: _with_a_tensor(p, "model.vision.weight"),
        {},
        r'exclude=\["model.vision.weight"\] \(--exclude\)',
    ),
    "quantised": (
        lambda p: _with_a_tensor(p, "model.layers.0.mlp.up_proj.qweight", "I32"),
        {},
        r"quantised already.*--dtype float16.*streamload convert \S+in plain/ --dtype float16",
    ),
    "tokenizer": (
        _other_tokenizer,
        {},
        r"AutoTokenizer.from_pretrained\(.*save_pretrained.*found tokenizer.model",
    ),
    "file": (
        _named_file,
        {},
        r"from_pretrained\(\"\S+in/irpa\"\).save_pretrained\(\"\S+in/irpa\"\)",
    ),
    "json": (_broken_tokenizer, {}, "tokenizer.json: is not JSON"),
    "quant": (_source, {"quant": "nf4"}, "one of q8_0, q4_0, q4_k_s, .*, not 'nf4'"),
    "pattern": (_source, {"quant": {"*mlp*": "int8"}}, "one of q8_0, q4_0, q4_k_s, .*, not 'int8'"),
    "dtype": (_source, {"dtype": "float64"}, "float32, float16, bfloat16.*--dtype float16"),
    "setting": (lambda p: _source(p, rms_norm_eps=None), {}, "rms_norm_eps is missing"),
    "rope": (
        lambda p: _source(p, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
        {},
        "no scaling 'longrope'",
    ),
    "llama3": (
        lambda p: _source(p, rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        {},
        "config.json: low_freq_factor is a number above 0, not None",
    ),
    "activation": (
        lambda p: _source(p, hidden_act="gelu"),
        {},
        "llama.cpp has no such hidden_act in config.json: expected 'silu' or 'swish', found 'gelu'",
    ),
    "gpt2": (
        lambda p: write_model(p, "gpt2", scale_attn_by_inverse_layer_idx=True),
        {},
        "no such scale_attn_by_inverse_layer_idx",
    ),
    "windows": (
        lambda p: write_model(p, "qwen2", use_sliding_window=True, max_window_layers=1),
        {},
        "config.json: llama.cpp has no windows for Qwen: use_sliding_window is false",
    ),
    "rotated": (
        lambda p: _source(p, partial_rotary_factor=0.5),
        {},
        "no such partial_rotary_factor",
    ),
    "rows": (lambda p: _source(p, vocab_size=64), {}, "resize_token_embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_gguf_cannot_take_is_one_error(case: str, tmp_path: Path) -> None:
    make, arguments, said = REFUSED[case]
    source = make(tmp_path / "in")
    with pytest.raises((StreamloadError, ValueError), match=said) as raised:
        quiet(source, tmp_path / "out", to="gguf", **arguments)
    assert not (tmp_path / "out").exists()
    if isinstance(raised.value, (CheckpointError, UnsupportedCastError)):
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_classes_that_are_no_list_name_none(tmp_path: Path) -> None:
    """The names of config.json tell whether a model has a head: a number tells nothing."""
    source = write_model(tmp_path / "in", "llama", architectures=-1)
    quiet(source, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == -1


def test_what_is_left_out_is_not_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "gpt2")
    config = json.loads((source / "config.json").read_text())
    shapes = {"wte.weight": (config["vocab_size"], 64), "vision.weight": (2, 64)}
    data = {n: ("F32", s, bytes(4 * s[0] * s[1])) for n, s in shapes.items()}
    write_safetensors(source / "model.safetensors", data)
    quiet(source, tmp_path / "out", to="gguf", exclude=["vision.weight"])
    _, tensors = read_by_gguf_py(tmp_path / "out/model.gguf")
    assert list(tensors) == ["token_embd.weight"]
