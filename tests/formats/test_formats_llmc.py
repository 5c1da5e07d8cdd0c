"""llm.c's .bin: a reader written from the format's description computes what the source does."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conversions import Gpt2Shape, quiet, tensors_of
from safetensors_files import write_arrays

from streamload.core.dtypes import F16
from streamload.errors import CheckpointError

Array = np.ndarray[Any, Any]
#: A small GPT-2 whose vocabulary is no multiple of 128.
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 301,
    "n_positions": 48,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
}
MAGIC = 20240326


def read(path: Path) -> tuple[list[int], dict[str, Array]]:
    """What the C reader has: the numbers of the header, and arrays over the whole file.

    It checks magic, version and the padded vocabulary, computes the sizes of sixteen arrays, and
    reads as many bytes; here nothing may be left behind them.
    """
    data = path.read_bytes()
    header = list(struct.unpack("<256i", data[:1024]))
    magic, version, positions, vocab, layers, _, width, padded = header[:8]
    assert (magic, version in (3, 5)) == (MAGIC, True)
    assert padded % 128 == 0 and vocab <= padded < vocab + 128
    assert not any(header[8:])
    n, count = width, layers
    shapes = {
        "wte": (padded, n),
        "wpe": (positions, n),
        "ln1w": (count, n),
        "ln1b": (count, n),
        "qkvw": (count, 3 * n, n),
        "qkvb": (count, 3 * n),
        "attprojw": (count, n, n),
        "attprojb": (count, n),
        "ln2w": (count, n),
        "ln2b": (count, n),
        "fcw": (count, 4 * n, n),
        "fcb": (count, 4 * n),
        "fcprojw": (count, n, 4 * n),
        "fcprojb": (count, n),
        "lnfw": (n,),
        "lnfb": (n,),
    }
    kind = np.dtype(np.float32 if version == 3 else ml_dtypes.bfloat16)
    at, found = 1024, {}
    for name, shape in shapes.items():
        stop = at + int(np.prod(shape)) * kind.itemsize
        found[name] = np.frombuffer(data[at:stop], kind).reshape(shape).astype(np.float64)
        at = stop
    assert at == len(data)
    return header[:8], found


def logits(header: list[int], p: dict[str, Array], tokens: list[int]) -> Array:
    """A forward pass in float64, as train_gpt2.c computes it."""
    _, _, _, vocab, layers, heads, width, _ = header
    x = p["wte"][tokens] + p["wpe"][: len(tokens)]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf), 1)

    def norm(x: Array, w: Array, b: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b

    for i in range(layers):
        qkv = norm(x, p["ln1w"][i], p["ln1b"][i]) @ p["qkvw"][i].T + p["qkvb"][i]
        q, k, v = (
            part.reshape(len(tokens), heads, -1).swapaxes(0, 1) for part in np.split(qkv, 3, -1)
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(width // heads) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(0, 1).reshape(len(tokens), width)
        x = x + mixed @ p["attprojw"][i].T + p["attprojb"][i]
        h = norm(x, p["ln2w"][i], p["ln2b"][i]) @ p["fcw"][i].T + p["fcb"][i]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ p["fcprojw"][i].T + p["fcprojb"][i]
    found: Array = norm(x, p["lnfw"], p["lnfb"]) @ p["wte"][:vocab].T
    return found


def write(folder: Path, prefix: str = "", **config: Any) -> dict[str, Array]:
    """A random GPT-2 in float32; its values by names without a prefix."""
    rng = np.random.default_rng(0)
    said = CONFIG | config
    arrays = {
        name: (rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in Gpt2Shape.of(said).bare().items()
    }
    write_arrays(folder / "model.safetensors", {prefix + n: a for n, a in arrays.items()})
    (folder / "config.json").write_text(json.dumps(said))
    return arrays


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_every_value_is_where_c_reads_it(tmp_path: Path, prefix: str, dtype: str | None) -> None:
    """Matrices of layers transposed, the embedding padded, and nothing else in the file."""
    arrays = write(tmp_path / "in", prefix)
    quiet(tmp_path / "in", tmp_path / "out", to="llm.c", dtype=dtype, verify=True)
    header, found = read(tmp_path / "out" / "model.bin")
    assert header == [MAGIC, 5 if dtype else 3, 48, 301, 3, 4, 32, 384]
    kind = ml_dtypes.bfloat16 if dtype else np.float32

    def expected(name: str) -> Array:
        return arrays[name].astype(kind).astype(np.float64)

    assert np.array_equal(found["wte"][:301], expected("wte.weight"))
    assert not found["wte"][301:].any()
    assert np.array_equal(found["wpe"], expected("wpe.weight"))
    kinds = {
        "ln1": "ln_1",
        "qkv": "attn.c_attn",
        "attproj": "attn.c_proj",
        "ln2": "ln_2",
        "fc": "mlp.c_fc",
        "fcproj": "mlp.c_proj",
    }
    for mine, theirs in kinds.items():
        for i in range(3):
            weight = expected(f"h.{i}.{theirs}.weight")
            assert np.array_equal(found[f"{mine}w"][i], weight.T)
            assert np.array_equal(found[f"{mine}b"][i], expected(f"h.{i}.{theirs}.bias"))
    assert np.array_equal(found["lnfw"], expected("ln_f.weight"))
    assert np.array_equal(found["lnfb"], expected("ln_f.bias"))


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, initializer_range=0.2))
    model.eval().save_pretrained(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "out", to="llm.c", verify=True)
    tokens = [5, 300, 17, 0, 42, 128, 127, 255]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    mine = logits(*read(tmp_path / "out" / "model.bin"), tokens)
    assert np.abs(theirs).max() > 1
    assert np.abs(mine - theirs).max() < 1e-4


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama"}, "llm.c reads GPT-2 alone.*gpt2.*llama"),
        ({"model_type": None}, "llm.c reads GPT-2 alone.*found no model_type"),
        ({"n_layer": 4}, r"a tensor is missing.*transformer\.h\.3\.ln_1\.weight"),
        ({"n_layer": 2}, r"h\.2\.ln_1\.weight.*llm.c has no place for it"),
        ({"n_positions": 7}, r"wpe\.weight.*its shape is not GPT-2's.*\[7, 32\]"),
        ({"n_embd": "32"}, "n_embd of config.json is invalid"),
        ({"activation_function": "relu"}, "llm.c has no such activation_function.*gelu_new.*relu"),
        ({"n_inner": 64}, "llm.c has no such n_inner"),
        ({"scale_attn_by_inverse_layer_idx": True}, "no such scale_attn_by_inverse_layer_idx"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    write(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(CheckpointError, match=f"(?s){problem}"):
        quiet(tmp_path / "in", tmp_path / "out", to="llm.c")
    assert not (tmp_path / "out").exists()


def test_what_it_does_not_take(tmp_path: Path) -> None:
    """Other dtypes, formats and nodes are errors that say what to write instead."""
    write(tmp_path / "in")
    for options, message in (
        ({"dtype": "float16"}, 'dtype="float32" or "bfloat16", not \'float16\''),
        ({"dtype": {"*": "float32"}}, "files of one dtype"),
        ({"quant": "q8_0"}, "reads no quantised weights"),
    ):
        with pytest.raises(ValueError, match=message):
            quiet(tmp_path / "in", tmp_path / "out", to="llm.c", **options)


def test_what_a_fine_tune_may_have_more(tmp_path: Path) -> None:
    """A head that is the embedding, and masks, are left out; other dtypes are cast."""
    arrays = write(tmp_path / "in")
    quiet(tmp_path / "in", tmp_path / "half", dtype="float16")
    assert tensors_of(tmp_path / "half")["wte.weight"][0] is F16
    quiet(tmp_path / "half", tmp_path / "out", to="llm.c")
    _, found = read(tmp_path / "out" / "model.bin")
    halves = arrays["wte.weight"].astype(np.float16).astype(np.float64)
    assert np.array_equal(found["wte"][:301], halves)
