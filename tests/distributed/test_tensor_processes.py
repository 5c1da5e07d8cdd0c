"""Slices of small models of transformers in real processes over gloo, and its own parallelism."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from distributed_helpers import run_ranks
from safetensors.numpy import load_file
from tensor_slices import joined

from streamload.distributed.tensor_split import split_tensors
from streamload.planning.partition import Node

torch = needs.module("torch")
transformers = needs.module("transformers")

ROOT = Path(__file__).parents[2]
COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
#: By name: the configuration class, and its arguments besides those that all have.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "qwen2": ("Qwen2Config", COMMON | {"tie_word_embeddings": True}),  # it has biases
    "mixtral": ("MixtralConfig", COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": (
        "Qwen3MoeConfig",
        COMMON
        | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    ),
}


def save(folder: Path, name: str) -> None:
    """A model of random weights, large enough that no two tokens are as likely."""
    config_class, arguments = MODELS[name]
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, config_class)(**arguments, **ends)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter.ndim == 1))
    model.save_pretrained(folder / name)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        pytest.param(2, ["llama", "gpt2"]),
        pytest.param(2, ["qwen2", "mixtral", "qwen3moe"], marks=pytest.mark.slow),
        pytest.param(4, list(MODELS), marks=pytest.mark.slow),
    ],
)
def test_slices_and_tokens(ranks: int, names: list[str], tmp_path: Path) -> None:
    """Slices joined are the whole; `generate` with DTensors gives the tokens of one process."""
    for name in names:
        save(tmp_path, name)
    program = ROOT / "tests" / "support" / "tensor_rank.py"
    run_ranks([sys.executable, program, tmp_path, *names], [0] * ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for name in names:
        nodes = [Node(f"n{rank}", "100MB") for rank in range(ranks)]
        plan = split_tensors(tmp_path / name, nodes=nodes, dtype="checkpoint")
        parts = [dict(np.load(tmp_path / f"{name}.{rank}.npz")) for rank in range(ranks)]
        arrays = joined(plan, zip(plan.shares, parts, strict=True))
        expected = load_file(tmp_path / name / "model.safetensors")
        assert arrays.keys() == expected.keys()
        assert all(arrays[n].tobytes() == expected[n].tobytes() for n in expected)
        assert [each[name]["read"] for each in found] == [s.source_nbytes for s in plan.shares]
        assert len({json.dumps(each[name].get("tokens")) for each in found}) == 1
