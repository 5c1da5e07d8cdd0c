"""Helpers that `test_transformers` shares with other tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
transformers = needs.module("transformers")
import safetensors.torch as st  # noqa: E402

import streamload.transformers as ours  # noqa: E402

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}

MOE: dict[str, Any] = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}

AUDIO: dict[str, Any] = {
    **{"vocab_size": 96, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2},
    **{"decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 16},
    **{"max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
}


#: Model class and configuration: tiny, and of the real families.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, **MOE, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, **MOE, "num_local_experts": 4}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2},
            **{"num_heads": 4, "decoder_start_token_id": 0},
        },
    ),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers says nothing of its own about these models."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.utils.logging.enable_progress_bar()


def new_model(name: str, dtype: Any = torch.float32, **changes: Any) -> Any:
    """A model with random weights; of norms and biases too, which would be ones and zeros."""
    class_name, config_name, arguments = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, config_name)(**{**arguments, **changes})
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def saved(folder: Path, name: str, dtype: Any = torch.float32, **changes: Any) -> Path:
    new_model(name, dtype, **changes).save_pretrained(folder)
    return folder


def load(path: Path | str, **arguments: Any) -> Any:
    return ours.from_pretrained(path, **{"device": "cpu", "progress": False, **arguments})


def reference(path: Path, name: str, **arguments: Any) -> Any:
    return getattr(transformers, MODELS[name][0]).from_pretrained(path, **arguments)


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and buffers, the persistent and the others, by all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def raw(tensor: Any) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    path = folder / "model.safetensors"
    tensors = change(st.load_file(path))
    st.save_file({k: v.clone() for k, v in tensors.items()}, path, metadata={"format": "pt"})


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def assert_same_bits(found: Any, expected: Any) -> None:
    mine, theirs = tensors_of(found), tensors_of(expected)
    assert {k: raw(t) for k, t in mine.items()} == {k: raw(t) for k, t in theirs.items()}


def assert_same(found: Any, expected: Any) -> None:
    """Class, names, bits, dtypes, ties, configurations and mode are the same; nothing is meta."""
    assert type(found) is type(expected)
    mine, theirs = tensors_of(found), tensors_of(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.device.type == "cpu", name
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert raw(tensor) == raw(theirs[name]), name
    shared = [{k for k, t in all_.items() if t is all_[n]} for all_ in (mine, theirs) for n in mine]
    assert shared[: len(mine)] == shared[len(mine) :]
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.config._name_or_path == expected.config._name_or_path == found.name_or_path
    assert found.config._attn_implementation == expected.config._attn_implementation
    assert found.dtype == expected.dtype == found.config.dtype
    assert found.can_generate() == expected.can_generate()
    if found.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()
    assert not found.training
    assert not any(module.training for module in found.modules())
