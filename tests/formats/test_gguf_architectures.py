"""Architectures of GGUF held against readers that others wrote: llama.cpp's, and transformers'."""

from __future__ import annotations

import ctypes
import json
import unicodedata
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from conversions import quiet
from gguf_files import MODELS, gguf, in_blocks, small_model, tensors_of, write
from gguf_models import read_by_gguf_py
from remote_server import serve
from thread_group import World, run
from vocabularies import SPECIAL, byte_level, texts

import streamload
from streamload.checkpoint.open import open_checkpoint
from streamload.errors import CheckpointError, StateDictMismatchError
from streamload.formats.gguf.architectures import ARCHITECTURES
from streamload.formats.gguf.layout import header, metadata_bytes
from streamload.formats.gguf.mixture import MIXTURES
from streamload.formats.gguf.vocabulary import PRE_TOKENIZERS, from_gguf
from streamload.formats.gguf.vocabulary_out import to_gguf

torch = needs.module("torch")
transformers = needs.module("transformers")
tokenizers = needs.module("tokenizers")

IDS = torch.arange(40)[None] * 7 % 96
NEW = [name for name in MODELS if name not in ("llama", "mistral", "qwen2", "qwen3", "gpt2")]
#: transformers reads no fused rows by key head, no norm for each head, and not gpt-oss as written.
_UNREAD_BY_TRANSFORMERS = ("falcon-11b", "falcon-40b", "stablelm-12b", "gpt-oss")
#: Keys of config.json that transformers' reader of GGUF does not read.
_UNREAD = ("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar")

_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
_TYPES = ["full_attention", "sliding_attention"]
_NO_WINDOWS = "llama.cpp has no windows for Qwen"
_LONG: dict[str, Any] = MODELS["phi3-long"][2]["rope_parameters"]


def without_vocabulary(config: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Methods of gguf-py's writer for a model without a tokenizer."""
    more: list[tuple[str, tuple[Any, ...]]] = [("add_tokenizer_model", ("no_vocab",))]
    if config.model_type not in ("llama", "mistral", "qwen2"):
        more.append(("add_vocab_size", (config.vocab_size,)))
    return more


def runs(path: Path) -> Any:
    llama_cpp = needs.runtime("llama_cpp")
    model = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    model.eval(IDS[0].tolist())
    found = np.array(model.scores[: IDS.shape[1]])
    model.close()
    return found


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.float().eval()(IDS).logits[0].numpy()


def assert_near(found: Any, expected: Any) -> None:
    """llama.cpp takes GELU from a table in F16, and multiplies experts in another order."""
    assert np.abs(found - expected).max() < 5e-4 * np.ptp(expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_llama_cpp_computes_with_the_same_file(name: str, tmp_path: Path) -> None:
    """Of a file as its converter writes it, logits are the source's there and here."""
    needs.runtime("llama_cpp")
    model = small_model(name)
    path = tmp_path / "model.gguf"
    write(path, tensors_of(model), config=model.config, more=without_vocabulary(model.config))
    opened = streamload.transformers.from_pretrained(path, dtype="float32", device="cpu")
    assert np.array_equal(logits(opened), logits(model))
    assert_near(runs(path), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-oss"])
def test_llama_cpp_runs_what_is_written(name: str, tmp_path: Path) -> None:
    """A conversion has the tensors of llama.cpp's converter, which runs it, and comes back."""
    model = small_model(name)
    model.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", dtype="float32")
    path = tmp_path / "out/model.gguf"
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    expected = tensors_of(model)
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        assert tuple(found[key].shape.tolist()[::-1]) == array.shape, key
        assert np.array_equal(found[key].data.reshape(array.shape), array), key
    assert np.array_equal(logits(streamload.transformers.from_pretrained(path)), logits(model))
    needs.runtime("llama_cpp")
    assert_near(runs(path), logits(model))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("qwen2", _WINDOW | {"layer_types": ["full_attention"] * 2, "max_window_layers": 0}),
        ("qwen2moe", {"qkv_bias": False}),
        ("phi3-long", {"rope_parameters": _LONG | {"attention_factor": 1.7}}),
        ("phi3-long", {"rope_parameters": _LONG | {"factor": 16.0}}),
    ],
)
def test_settings_come_back(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    model = small_model(name, **more)
    model.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", dtype="float32")
    opened = streamload.transformers.from_pretrained(tmp_path / "out/model.gguf")
    np.testing.assert_allclose(logits(opened), logits(model), rtol=0, atol=1e-6)
    if name == "phi3-long":
        fields, _ = read_by_gguf_py(tmp_path / "out/model.gguf")
        scale = model.model.rotary_emb.attention_scaling
        assert fields["phi3.rope.scaling.attn_factor"] == np.float32(scale)


def test_a_default_is_no_word_of_a_small_vocabulary(tmp_path: Path) -> None:
    """Phi-3's padding, 32,000 where nothing is stated, is left out; a stated one stays."""
    for padding in (None, 3):
        folder, out = tmp_path / f"in{padding}", tmp_path / f"out{padding}"
        model = small_model("phi3", pad_token_id=padding)
        model.save_pretrained(folder)
        quiet(folder, out, to="gguf", dtype="float32")
        opened = streamload.transformers.from_pretrained(out / "model.gguf", strict=True)
        assert opened.config.vocab_size <= 32_000
        np.testing.assert_allclose(logits(opened), logits(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        *((name, _WINDOW | {"max_window_layers": 1}, _NO_WINDOWS) for name in ("qwen2", "qwen3")),
        *((name, _WINDOW | {"layer_types": _TYPES}, _NO_WINDOWS) for name in ("qwen2", "qwen3")),
        *((name, _WINDOW, _NO_WINDOWS) for name in ("qwen2moe", "qwen3moe")),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "no scaling 'linear' of layers with a window",
        ),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping is a number above 0"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is a number above"),
        ("phi3", {"head_dim": 24}, "computes with head_dim 64, not 24"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    name: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """A setting that no key of GGUF says is named, and nothing is written."""
    small_model(name, **more).save_pretrained(tmp_path / "in")
    with pytest.raises(CheckpointError, match=said):
        quiet(tmp_path / "in", tmp_path / "out", to="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NEW if n not in ("gpt-oss", "falcon-11b")])
@pytest.mark.parametrize("quant", ["q8_0", "q4_k_m"])
def test_llama_cpp_runs_blocks_that_are_written(name: str, quant: str, tmp_path: Path) -> None:
    """Of stacks of experts and fused rows too, logits are near those of the same numbers here."""
    needs.runtime("llama_cpp")
    model = small_model(name)
    model.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="gguf", quant=quant)
    path = tmp_path / "out/model.gguf"
    opened = streamload.transformers.from_pretrained(path, dtype="float32", device="cpu")
    expected = logits(opened)
    # it rounds inputs of products to 8 bits
    assert np.abs(runs(path) - expected).max() < 0.05 * np.ptp(expected)
    quiet(path, tmp_path / "again", to="gguf")
    first, second = (gguf.GGUFReader(p) for p in (path, tmp_path / "again/model.gguf"))
    assert {t.name: t.data.tobytes() for t in first.tensors} == {
        t.name: t.data.tobytes() for t in second.tensors
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("gemma2", {"num_hidden_layers": 9}),
        ("phi3", {"num_hidden_layers": 9}),
        ("qwen2moe", {"num_hidden_layers": 9}),
        ("qwen3moe", {"num_hidden_layers": 9, "num_experts": 8}),
        ("stablelm-12b", {"num_hidden_layers": 9}),
        ("falcon-40b", {"num_hidden_layers": 17}),
    ],
)
def test_mixtures_equal_llama_cpps(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    llama_cpp = needs.runtime("llama_cpp")
    model = small_model(name, **more)
    model.save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "f32", to="gguf", dtype="float32")
    for mixture, made in MIXTURES.items():
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype, parameters.nthread = made.file_type, 2
        paths = (str(tmp_path / "f32/model.gguf").encode(), str(tmp_path / "b.gguf").encode())
        assert not llama_cpp.llama_model_quantize(*paths, ctypes.byref(parameters))
        quiet(tmp_path / "in", tmp_path / mixture, to="gguf", quant=mixture)
        _, found = read_by_gguf_py(tmp_path / mixture / "model.gguf")
        _, expected = read_by_gguf_py(tmp_path / "b.gguf")
        assert {n: kind for n, (kind, _, _) in found.items()} == {
            n: kind for n, (kind, _, _) in expected.items()
        }
        assert found == expected, mixture


@pytest.mark.parametrize("name", [n for n in NEW if n not in _UNREAD_BY_TRANSFORMERS])
def test_weights_are_those_of_transformers_own_reader(name: str, tmp_path: Path) -> None:
    """With the source's configuration, since it does not read all settings."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = small_model(name)
    write(tmp_path / "model.gguf", tensors_of(model), config=model.config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, config=model.config
    )
    ours = streamload.transformers.from_pretrained(tmp_path / "model.gguf", dtype="float32")
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    for key, value in model.config.to_dict().items():
        if key in _UNREAD or "layer" in key or "head" in key:
            assert getattr(ours.config, key) == value, key


def test_experts_of_mxfp4(tmp_path: Path) -> None:
    """Experts of gpt-oss as it has them: blocks of rows in turn, each an element of a transpose."""
    model = small_model("gpt-oss")
    tensors = tensors_of(model)
    experts = {n: array for n, array in tensors.items() if n.endswith("_exps.weight")}
    blocks, kept = in_blocks(experts, lambda name: "MXFP4")
    blocks = tensors | blocks
    path, plain = tmp_path / "model.gguf", tmp_path / "plain.gguf"
    write(path, blocks, kept, config=model.config)
    number = gguf.GGMLQuantizationType.MXFP4
    exact = {
        n: gguf.quants.dequantize(blocks[n], number) if n in kept else blocks[n] for n in blocks
    }
    write(plain, exact, config=model.config)
    found, expected = (
        streamload.transformers.from_pretrained(each, dtype="float32").state_dict()
        for each in (path, plain)
    )
    assert len(kept) == 6
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    gate, up = (exact[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    joined = found["model.layers.1.mlp.experts.gate_up_proj"].numpy()
    assert np.array_equal(joined[..., ::2], gate.swapaxes(1, 2))
    assert np.array_equal(joined[..., 1::2], up.swapaxes(1, 2))


def test_experts_whose_rows_are_in_two_files(tmp_path: Path) -> None:
    """Rows of gate without those of up stay under the file's name; a model of it is one error."""
    model = small_model("gpt-oss")
    tensors = tensors_of(model)
    del tensors["blk.1.ffn_up_exps.weight"]
    path = tmp_path / "model.gguf"
    write(path, tensors, config=model.config)
    assert "blk.1.ffn_gate_exps.weight" in open_checkpoint(path).tensors
    with pytest.raises(StateDictMismatchError, match=r"1 missing.*blk\.1\.ffn_gate_exps"):
        streamload.transformers.from_pretrained(path, strict=True)


@pytest.mark.parametrize("name", ["gemma2", "qwen3moe", "gpt-oss", "falcon-40b", "stablelm-12b"])
def test_sets_of_files(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    tensors = tensors_of(model)
    write(tmp_path / "one.gguf", tensors, config=model.config)
    # rows in turn are in one file
    order = sorted(tensors, key=lambda key: (key.split(".")[:2], "_exps" in key, key))
    ordered = {key: tensors[key] for key in order}
    write(
        tmp_path / "m.gguf", ordered, config=model.config, split_max_tensors=len(tensors) // 2 + 1
    )
    paths = sorted(tmp_path.glob("m-*.gguf"))
    assert len(paths) == 2
    found, expected = (
        streamload.transformers.from_pretrained(path, dtype="float32").state_dict()
        for path in (paths[0], tmp_path / "one.gguf")
    )
    assert all(torch.equal(found[key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss", "falcon-40b"])
def test_over_http_and_on_nodes(name: str, tmp_path: Path) -> None:
    model = small_model(name)
    tensors = tensors_of(model)
    matrices = {n: a for n, a in tensors.items() if n.endswith(("qkv.weight", "_exps.weight"))}
    blocks, types = in_blocks(matrices, lambda name: "Q6_K")
    path = tmp_path / "model.gguf"
    write(path, tensors | blocks, types, config=model.config)
    options: dict[str, Any] = {"device": "host", "budget": "1GB", "dtype": "float16"}
    expected = streamload.load_state_dict(None, path, **options).state_dict
    with serve(tmp_path) as site:
        served = streamload.load_state_dict(None, f"{site.url}model.gguf", **options).state_dict

    def body(group: Any) -> Any:
        given = options | {"split": "replicate", "group": group, "progress": False}
        return streamload.distributed.load_state_dict(None, path, **given).state_dict

    for found in (served, *run(World(2), body)):
        assert all(np.array_equal(found[key], expected[key]) for key in dict(expected))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (("add_sliding_window_pattern", (3,)), [0, 0, 1, 0, 0, 1, 0]),
        (("add_sliding_window_pattern", ([True, False, True] * 2 + [True],)), [0, 1, 0] * 2 + [0]),
        (("add_sliding_window", (0,)), [1] * 7),
    ],
)
def test_layers_that_attend_to_a_window(pattern: Any, expected: list[int], tmp_path: Path) -> None:
    """A file may say of which layers all tokens are seen, or that all see all."""
    config = small_model("gemma3").config
    if pattern[0] == "add_sliding_window":
        config.sliding_window = 0
        pattern = ("add_vocab_size", (96,))
    write(tmp_path / "m.gguf", {}, config=config, more=[pattern])
    found = open_checkpoint(tmp_path / "m.gguf").config["layer_types"]
    assert [kind == "full_attention" for kind in found] == [bool(each) for each in expected]


def test_other_architectures_open_as_tensors(tmp_path: Path) -> None:
    """Names are the file's; a model of it is one error, which names it and those that are known."""
    path = tmp_path / "model.gguf"
    ones = np.ones((4, 4), np.float32)
    write(path, {"blk.0.ssm_a": ones}, architecture="mamba")
    checkpoint = streamload.open_checkpoint(path)
    assert not checkpoint.config and not checkpoint.turns
    report = streamload.load_state_dict(None, checkpoint, device="host", budget="1GB")
    assert {n: a.tolist() for n, a in report.state_dict.items()} == {"blk.0.ssm_a": ones.tolist()}
    with pytest.raises(CheckpointError, match="'mamba'") as error:
        streamload.transformers.from_pretrained(path)
    assert all(name in str(error.value) for name in ARCHITECTURES)


def test_adapters_without_rows_or_of_an_unknown_architecture(tmp_path: Path) -> None:
    """The error names the file, and a long name of an architecture is cut."""
    small_model("llama").save_pretrained(tmp_path / "base")
    path = tmp_path / "lora.gguf"
    said = [("add_string", ("general.type", "adapter"))]
    said.append(("add_float32", ("adapter.lora.alpha", 8.0)))
    factors = {"a": np.ones((0, 256), np.float32), "b": np.ones((256, 0), np.float32)}
    tensors = {f"blk.0.attn_q.weight.lora_{part}": array for part, array in factors.items()}
    write(path, tensors, more=said)
    options: dict[str, Any] = {"device": "host", "budget": "1GB", "adapters": [path]}
    with pytest.raises(CheckpointError, match=r"lora\.gguf.*only LoRA of matrices") as error:
        streamload.load_state_dict(None, tmp_path / "base", **options)
    assert "adapter_config.json" not in str(error.value)
    write(path, {}, architecture="x" * 3000, more=said)
    with pytest.raises(CheckpointError, match=r"is not known.*'x{76}\.\.\.$"):
        streamload.load_state_dict(None, tmp_path / "base", **options)


@pytest.mark.slow
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_llama_cpp_cuts_texts_the_same(pre: str, tmp_path: Path) -> None:
    """Under every pre-tokenizer, but for combining marks under "gpt-4o"."""
    llama_cpp = needs.runtime("llama_cpp")
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    vocabulary, _ = to_gguf("x", byte_level(pre), settings, {}, 900)
    sizes = dict.fromkeys(("embedding_length", "feed_forward_length", "context_length"), 64)
    keys: dict[str, Any] = {"general.architecture": "llama", **vocabulary}
    keys |= {f"llama.{key}": value for key, value in sizes.items()}
    keys |= {"llama.block_count": 1, "llama.attention.head_count": 2}
    keys["llama.attention.layer_norm_rms_epsilon"] = 1e-5
    path = tmp_path / "model.gguf"
    path.write_bytes(header(metadata_bytes(keys), len(keys), []))
    files = from_gguf(path, keys)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in texts():
        text = unicodedata.normalize("NFC", text)
        if pre == "gpt-4o" and any(unicodedata.category(one)[0] == "M" for one in text):
            continue
        found = model.tokenize(text.encode(), add_bos=False, special=True)
        assert found == tokenizer.encode(text, add_special_tokens=False).ids, text
    model.close()
