from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamload.core.dtypes import BF16 as BFLOAT16
from streamload.core.dtypes import F16 as FLOAT16
from streamload.core.dtypes import F32 as FLOAT32
from streamload.core.tensors import RowTranspose, TensorInfo
from streamload.errors import CheckpointError
from streamload.formats.gguf.constants import TENSOR_TYPE_OF
from streamload.formats.gguf.layout import Described
from streamload.formats.gguf.model import metadata, rope_bytes, type_of
from streamload.formats.gguf.writer import GGUF
from streamload.formats.writer import Model, OutTensor

F32, F16, BF16, Q8_0, Q4_0 = (TENSOR_TYPE_OF[n] for n in ("F32", "F16", "BF16", "Q8_0", "Q4_0"))
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 32,
    "n_positions": 16,
    "n_embd": 64,
    "n_layer": 1,
    "n_head": 4,
    "layer_norm_epsilon": 1e-5,
}
_LAYER = "model.layers.0."


def _targets(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], quant: str = "q8_0"
) -> dict[str, OutTensor]:
    path = Path("m")
    tensors = {
        name: OutTensor(name, TensorInfo(name, BFLOAT16, shape, path, 0, 0), BFLOAT16, shape, quant)
        for name, shape in shapes.items()
    }
    found = GGUF(Model(path, config, tensors, {}, {})).tensors()
    return {target.name: target for (target,) in found}


@pytest.mark.parametrize(
    ("name", "shape", "asked", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 64), Q8_0, Q8_0),
        ("blk.0.attn_q.weight", (64, 64), BF16, BF16),
        ("blk.0.attn_q.weight", (64, 40), Q4_0, F16),
        ("blk.0.attn_q.weight", (64, 40), BF16, BF16),
        ("blk.0.attn_norm.weight", (64,), Q8_0, F32),
        ("blk.0.attn_q.bias", (64,), F16, F32),
        ("position_embd.weight", (16, 64), Q8_0, F32),
        ("token_embd.weight", (32, 64), Q4_0, Q4_0),
    ],
)
def test_types(name: str, shape: tuple[int, ...], asked: Any, expected: Any) -> None:
    """Vectors and positions stay F32, and rows that are no whole blocks become F16."""
    assert type_of(name, shape, asked) is expected


def test_llama() -> None:
    """Query and key rows are interleaved head by head; computed buffers are left out."""
    shapes = {
        "model.embed_tokens.weight": (32, 64),
        f"{_LAYER}self_attn.q_proj.weight": (64, 64),
        f"{_LAYER}self_attn.k_proj.bias": (32,),
        f"{_LAYER}self_attn.rotary_emb.inv_freq": (8,),
        f"{_LAYER}mlp.down_proj.weight": (64, 96),
        "lm_head.weight": (32, 64),
    }
    found = _targets(LLAMA, shapes)
    assert list(found) == [
        "token_embd.weight",
        "blk.0.attn_q.weight",
        "blk.0.attn_k.bias",
        "blk.0.ffn_down.weight",
        "output.weight",
    ]
    orders = [target.made and target.made.turn for target in found.values()]
    assert orders == [None, RowTranspose(4, 2, 8), RowTranspose(2, 2, 8), None, None]
    bias = found["blk.0.attn_k.bias"]
    assert (bias.dtype, bias.quant) == (FLOAT32, None)


def test_gpt2() -> None:
    """The weights of Conv1D are transposed, masks are dropped, and the head is the embedding."""
    for prefix in ("", "transformer."):
        shapes = {
            f"{prefix}wte.weight": (32, 64),
            f"{prefix}wpe.weight": (16, 64),
            f"{prefix}h.0.attn.bias": (1, 1, 16, 16),
            f"{prefix}h.0.attn.c_attn.weight": (64, 192),
            f"{prefix}h.0.attn.c_attn.bias": (192,),
            "lm_head.weight": (32, 64),
        }
        found = _targets(GPT2, shapes, "q4_0")
        assert list(found) == [
            "token_embd.weight",
            "position_embd.weight",
            "blk.0.attn_qkv.weight",
            "blk.0.attn_qkv.bias",
        ]
        qkv = found["blk.0.attn_qkv.weight"]
        assert qkv.made is not None and qkv.made.turn == RowTranspose(1, 64, 192)
        assert (qkv.shape, qkv.dtype, qkv.quant) == ((192, 64), FLOAT16, "q4_0")


def test_tied_embeddings() -> None:
    """A head that config.json ties is not written, whatever the checkpoint holds."""
    shapes = {"model.embed_tokens.weight": (32, 64), "lm_head.weight": (32, 64)}
    tied = LLAMA | {"tie_word_embeddings": True}
    assert list(_targets(tied, shapes)) == ["token_embd.weight"]
    assert len(_targets(LLAMA, shapes)) == 2
    del shapes["lm_head.weight"]
    assert len(_targets(tied, shapes)) == 1
    with pytest.raises(CheckpointError, match=r"expected lm_head\.weight, found no such tensor"):
        _targets(LLAMA, shapes)


ERRORS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]], str]] = {
    "family": (LLAMA | {"model_type": "opt"}, {}, "llama, mistral, .*found 'opt'"),
    "config": ({}, {}, "convert_hf_to_gguf.py knows more.* found no config.json"),
    "experts": (
        LLAMA | {"model_type": "mixtral", "num_local_experts": 8},
        {},
        "convert_hf_to_gguf.py knows more.*'mixtral' with num_local_experts 8",
    ),
    "name": (LLAMA, {"vision.weight": (2, 2)}, r'--exclude\)|exclude=\["vision.weight"\]'),
    "twice": (
        GPT2,
        {"wte.weight": (32, 64), "transformer.wte.weight": (32, 64)},
        "'wte.weight' would have the same name in GGUF, token_embd.weight",
    ),
    "heads": (LLAMA, {f"{_LAYER}self_attn.q_proj.weight": (63, 64)}, "63 rows are not 4 heads"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    """Each says what is expected, and what to write or use instead."""
    config, shapes, said = ERRORS[case]
    with pytest.raises(CheckpointError, match=said) as raised:
        _targets(config, shapes)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_metadata() -> None:
    """The type of most bytes is the file's."""
    entries = [Described("a", (64, 64), Q4_0), Described("b", (64,), F32)]
    config = LLAMA | {"bos_token_id": 1, "_name_or_path": "org/Name"}
    found = metadata("m", config, entries)
    assert next(iter(found)) == "general.architecture"
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "Name"
    assert found["general.file_type"] == 2
    assert found["general.quantization_version"] == 2
    assert found["llama.attention.head_count_kv"] == 2
    assert found["tokenizer.ggml.bos_token_id"] == 1
    for kind, number in (("F32", 0), ("F16", 1), ("Q8_0", 7), ("BF16", 32)):
        entry = Described("a", (64, 64), TENSOR_TYPE_OF[kind])
        assert metadata("m", LLAMA, [entry])["general.file_type"] == number


@pytest.mark.parametrize("key", ["num_hidden_layers", "rms_norm_eps", "intermediate_size"])
def test_settings_that_llama_cpp_needs(key: str) -> None:
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(CheckpointError, match=f"config.json: {key} is missing"):
        metadata("m", config, [])


def test_scaled_rotary_embeddings() -> None:
    """Llama 3's factors are a tensor; a scaling that GGUF has no key for is refused."""
    assert rope_bytes("m", LLAMA) == {}
    scaled: dict[str, Any] = LLAMA | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    }
    factors = np.frombuffer(rope_bytes("m", scaled)["rope_freqs.weight"], np.float32)
    assert len(factors) == 8
    assert factors[0] == 1
    assert factors[-1] == 8
    with pytest.raises(CheckpointError, match="no scaling 'longrope'"):
        metadata("m", LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, [])
