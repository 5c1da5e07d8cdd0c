"""Helpers that `test_transformers_quantizing` shares with other tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import needs
from transformers_quantized_helpers import MOE, plain

torch = needs.module("torch")
transformers = needs.module("transformers")

#: Mixtures of experts whose weights transformers fuses.
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**MOE, "num_experts": 4, "moe_intermediate_size": 32},
    "Mixtral": {**MOE, "num_local_experts": 4},
    "GptOss": {
        **MOE,
        "num_local_experts": 4,
        "sliding_window": 16,
        "intermediate_size": 64,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


def gpt2(folder: Path, dtype: Any = torch.bfloat16) -> None:
    """A small GPT-2, whose products are of Conv1D."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(folder)


def make(folder: Path, name: str, dtype: Any = torch.bfloat16) -> None:
    if name == "GPT2":
        gpt2(folder, dtype)
    else:
        plain(folder, name, dtype, **EXPERTS.get(name, {}))


def error(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def said_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("quantization_config")
