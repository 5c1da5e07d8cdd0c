"""Small models of several kinds, their checkpoints, and budgets to offload them under."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import save_file

import streamload
from streamload.errors import PlanInfeasibleError

_LLAMA = {
    **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
    "max_position_embeddings": 128,
}
_BERT = {
    **{"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "vocab_size": 512},
}
_GPT2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 128}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
_BART = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 512},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128},
}

#: By name, a class and its configuration.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": False}),
    "llama tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_LLAMA, "tie_word_embeddings": False}),
    "qwen2 tied": ("Qwen2ForCausalLM", "Qwen2Config", {**_LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_LLAMA, **_MOE}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    # one layer, called four times in a pass
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 32}),
}

IDS = torch.randint(5, 500, (2, 9), generator=torch.Generator().manual_seed(1))

_WIDTHS = {"hidden_size", "intermediate_size", "moe_intermediate_size", "embedding_size"} | {
    *("n_embd", "d_model", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
}


def built(name: str, times: int = 1) -> Any:
    """A model with random weights, the same each time; perhaps so many times as wide."""
    model_class, config_class, values = MODELS[name]
    values = {**values, **{key: values[key] * times for key in _WIDTHS & values.keys()}}
    torch.manual_seed(0)
    return getattr(hf, model_class)(getattr(hf, config_class)(**values)).eval()


def save(model: Any, folder: Path) -> Path:
    """Write a model's tensors under their own names, each once, and its configuration."""
    folder.mkdir(exist_ok=True)
    if hasattr(model, "config"):
        model.config.save_pretrained(folder)
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensors.setdefault(tensor.data_ptr(), (name, tensor.contiguous()))
    save_file(dict(tensors.values()), folder / "model.safetensors")
    return folder


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    beside = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, **beside).logits
    return found


def least_budget(build: Callable[[], Any], path: Path, **options: Any) -> int:
    """The least budget that a plan accepts: refused is halved against accepted."""
    refused, accepted = 0, 2**26
    while accepted - refused > 1:
        budget = (refused + accepted) // 2
        try:
            streamload.offload(build(), path, device="cpu", budget=budget, **options).close()
            accepted = budget
        except PlanInfeasibleError:
            refused = budget
    return accepted
