"""GGUF files that streamload writes, opened by what runs them."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from conversions import quiet
from gguf_models import LLAMA3_ROPE, made_by_gguf_py, read_by_gguf_py, tokenizer_of, write_model
from vocabularies import SPECIAL, texts

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

KINDS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"},
    "f16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
    "q8_0": {"quant": "q8_0"},
    "q4_0": {"quant": "q4_0"},
    "q6_k": {"quant": "q6_k"},
    "q4_k_m": {"quant": "q4_k_m"},
}
# Of the range of all logits, the most by which one may be off: llama.cpp computes in f16 or in
# blocks of 8 bits where transformers does in float32.
_OFF = {"f32": 1e-5, "f16": 0.003, "bf16": 0.015, "q8_0": 0.05, "q4_0": 0.35}
_OFF |= {"q6_k": 0.1, "q4_k_m": 0.35}
_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_CONFIGS: dict[str, Any] = {
    "llama": lambda rows: transformers.LlamaConfig(
        vocab_size=rows, rope_parameters=LLAMA3_ROPE, **_COMMON
    ),
    "mistral": lambda rows: transformers.MistralConfig(vocab_size=rows, head_dim=32, **_COMMON),
    "qwen2": lambda rows: transformers.Qwen2Config(vocab_size=rows, **_COMMON),
    "qwen3": lambda rows: transformers.Qwen3Config(
        vocab_size=rows, head_dim=64, tie_word_embeddings=True, **_COMMON
    ),
    "gpt2": lambda rows: transformers.GPT2Config(
        vocab_size=rows, n_positions=256, n_embd=256, n_layer=2, n_head=4
    ),
}


def _model(family: str, folder: Path, **changes: Any) -> Any:
    """Save a model of random weights in bfloat16 with a trained tokenizer; it in float32."""
    tokenizer, settings = tokenizer_of(family)
    rows = max(each["id"] for each in tokenizer["added_tokens"])
    rows = (max(rows, *tokenizer["model"]["vocab"].values()) // 32 + 1) * 32
    torch.manual_seed(18)
    config = _CONFIGS[family](rows)
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.5 if "embed" in name or "wte" in name else 0.08)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.uniform_(0.7, 1.3)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    # not the same object: its frequencies of rotary embeddings are in bfloat16 now
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=_CONFIGS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, _model(request.param, folder), folder


def _opened(path: Path) -> Iterator[Any]:
    llama_cpp = needs.runtime("llama_cpp")
    # the cache of keys and values in F32, too
    model = llama_cpp.Llama(
        str(path), n_ctx=128, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0
    )
    yield model
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_runs_them(saved: Any, kind: str, tmp_path: Path) -> None:
    """llama.cpp cuts 200 texts as transformers does, and goes on with the same tokens.

    Its own greedy tokens are given to both: where their best tokens differ, the source's two best
    are closer to each other than the logits are to the source's.
    """
    needs.runtime("llama_cpp")
    family, source, folder = saved
    quiet(folder, tmp_path / "out", to="gguf", **KINDS[kind])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for model in _opened(tmp_path / "out/model.gguf"):
        special = ("<s>", "</s>") if family == "mistral" else SPECIAL
        samples = [unicodedata.normalize("NFC", text) for text in texts(special)]
        assert len(samples) >= 200
        for text in samples:
            found = model.tokenize(text.encode(), add_bos=True, special=True)
            assert found == tokenizer.encode(text), text
        ids = tokenizer.encode("the weights of a model")
        first = len(ids)
        for _ in range(32):
            model.reset()
            model.eval(ids)
            ids.append(int(np.argmax(model.scores[len(ids) - 1])))
        model.reset()
        model.eval(ids)
        found = np.array(model.scores[: len(ids)])
    with torch.no_grad():
        expected = source(torch.tensor([ids])).logits[0].numpy()
    off = np.abs(found - expected).max()
    # llama.cpp takes GPT-2's activation from a table in F16
    allowed = 5e-4 if (family, kind) == ("gpt2", "f32") else _OFF[kind]
    assert off < allowed * np.ptp(expected)
    if kind.startswith("q"):
        return
    best = np.sort(expected, axis=1)
    sure = best[:, -1] - best[:, -2] > off
    assert sure.mean() > 0.7
    assert (found.argmax(axis=1) == expected.argmax(axis=1))[sure].all()
    chosen = np.array(ids[first:])
    assert (expected.argmax(axis=1)[first - 1 : -1] == chosen)[sure[first - 1 : -1]].all()


@pytest.mark.slow
def test_llama_cpp_runs_a_set_of_files(tmp_path: Path) -> None:
    """Given the first of several files, it finds the others, and the same logits."""
    needs.runtime("llama_cpp")
    _model("llama", tmp_path / "in")
    logits = []
    for size in ("1GB", "300kB"):
        out = tmp_path / size
        quiet(tmp_path / "in", out, to="gguf", quant="q8_0", max_shard_size=size)
        for model in _opened(sorted(out.glob("*.gguf"))[0]):
            model.eval([0, 40, 41, 42])
            logits.append(np.array(model.scores[:4]))
    assert len(list(out.glob("*.gguf"))) > 3
    assert np.array_equal(*logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        # what transformers 5.23 takes for granted: it reads neither from GGUF
        pytest.param("qwen3", {"head_dim": 128}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"n_positions": 1024}, marks=pytest.mark.slow),
    ],
)
def test_transformers_reads_them(family: str, changes: dict[str, int], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    source = _model(family, tmp_path / "in", **changes)
    quiet(tmp_path / "in", tmp_path / "out", to="gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    )
    found, expected = read.state_dict(), source.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "in")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    plain = [text for text in texts(("",)) if "\n" not in text]
    assert [theirs.encode(text) for text in plain] == [ours.encode(text) for text in plain]


def _values(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    read = np.frombuffer(data, np.uint8)
    elements = {"F32": np.float32, "F16": np.float16}
    if kind in elements:
        return read.view(elements[kind]).astype(np.float32).reshape(shape)
    rows = read.reshape(*shape[:-1], -1)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_tinygrad_opens_them(kind: str, tmp_path: Path) -> None:
    loader = pytest.importorskip("tinygrad.llm.gguf", reason="tinygrad has no loader of GGUF")
    source = write_model(tmp_path / "in", "qwen3", num_hidden_layers=1)
    quiet(source, tmp_path / "out", to="gguf", max_shard_size="60kB", **KINDS[kind.lower()])
    paths = sorted((tmp_path / "out").glob("*.gguf"))
    metadata, tensors = loader.gguf_load(paths[0])
    assert len(paths) > 1
    assert metadata["qwen3.block_count"] == 1
    expected = made_by_gguf_py(source, kind)
    assert tensors.keys() == expected.keys()
    for name, (stored, shape, data) in expected.items():
        values = tensors[name].float().numpy()
        assert values.shape == shape
        assert np.allclose(values, _values(stored, shape, data), rtol=1e-3, atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_mlx_opens_them(kind: str, tmp_path: Path) -> None:
    """Its loader has the same names and values; it narrows BF16 to F16, and repacks blocks."""
    mx = needs.runtime("mlx.core")
    source = write_model(tmp_path / "in", "llama")
    quiet(source, tmp_path / "out", to="gguf", **KINDS[kind.lower()])
    found, metadata = mx.load(str(tmp_path / "out/model.gguf"), return_metadata=True)
    assert metadata["general.architecture"] == "llama"
    _, expected = read_by_gguf_py(tmp_path / "out/model.gguf")
    names = {name for name in found if not name.endswith((".scales", ".biases"))}
    assert names == expected.keys()
    for name, (stored, shape, data) in expected.items():
        values = found[name]
        if stored.startswith("Q"):
            bits = int(stored[1])
            parts = [found[f"{name.removesuffix('weight')}{n}"] for n in ("scales", "biases")]
            values = mx.dequantize(values, *parts, group_size=32, bits=bits)
        if stored == "BF16":
            raw = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            wanted = raw.view(np.float32).reshape(shape).astype(np.float16)
        else:
            wanted = _values(stored, shape, data)
        values = np.array(values.astype(mx.float32))
        assert values.shape == shape
        assert np.allclose(values, wanted, rtol=2e-3, atol=2e-3), name
