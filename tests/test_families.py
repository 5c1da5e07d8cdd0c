"""Families into the models that they are for, with the real packages."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamload

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TOKENS = [[3, 14, 15, 9, 26, 5, 35]]


class Linears(torch.nn.Module):  # type: ignore[misc]
    """A GPT-2 whose layers are Linear, as nanoGPT's are."""

    class Block(torch.nn.Module):  # type: ignore[misc]
        """One layer."""

        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            linear = torch.nn.Linear
            self.heads = heads
            self.ln_1, self.ln_2 = torch.nn.LayerNorm(dim), torch.nn.LayerNorm(dim)
            self.attn = torch.nn.ModuleDict(
                {"c_attn": linear(dim, 3 * dim), "c_proj": linear(dim, dim)}
            )
            self.mlp = torch.nn.ModuleDict(
                {"c_fc": linear(dim, 4 * dim), "c_proj": linear(4 * dim, dim)}
            )

        def forward(self, x: Any) -> Any:
            """Attention and the two layers after it."""
            batch, length, dim = x.shape
            parts = self.attn["c_attn"](self.ln_1(x)).split(dim, dim=2)
            q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(batch, length, dim))
            wide = torch.nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
            return x + self.mlp["c_proj"](wide)

    def __init__(self, vocab: int, dim: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocab, dim), torch.nn.Embedding(positions, dim)
        self.h = torch.nn.ModuleList(self.Block(dim, heads) for _ in range(layers))
        self.ln_f = torch.nn.LayerNorm(dim)
        self.lm_head = torch.nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Any) -> Any:
        """The logits."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize("whole", [True, False])
def test_gpt2_into_linears(tmp_path: Path, whole: bool) -> None:
    """What transformers saves computes the same in a model of Linear; with and without a head."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    (theirs if whole else theirs.transformer).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Linears(64, 32, 2, 4, 16)
    tied = {} if whole else {"strict": False}
    streamload.load_state_dict(model, tmp_path, mapping="hf-gpt2", device="cpu", **tied)
    if not whole:
        model.lm_head.weight = model.wte.weight
    with torch.no_grad():
        tokens = torch.tensor(TOKENS)
        assert torch.allclose(model(tokens), theirs(tokens).logits, atol=1e-5)


def qwen(kind: str) -> tuple[Any, dict[str, Any]]:
    """A small Qwen of transformers, and what tinygrad.llm calls its sizes."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": kind == "qwen2"}
    ours: dict[str, Any] = {"num_blocks": 2, "dim": 32, "hidden_dim": 48, "n_heads": 4}
    ours |= {"n_kv_heads": 2, "vocab_size": 64, "head_dim": 8, "v_head_dim": 8, "rope_dim": 8}
    if kind == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)), ours | {
            "qkv_bias": True
        }
    sizes |= {"head_dim": 8}
    ours |= {"qk_norm": 8}
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)), ours
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    sizes |= {"norm_topk_prob": True}
    ours |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "hidden_dim": 24}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)), ours


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3-moe"])
def test_qwen_into_tinygrad(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers saves computes the same in tinygrad.llm, with its experts stacked."""
    pytest.importorskip("tinygrad.llm")
    from tinygrad import Tensor, nn

    if importlib.util.find_spec("tinygrad.llm.kernels") is None:  # the wheel of 0.14 lacks it
        kernels = types.ModuleType("tinygrad.llm.kernels.amd")
        never: Any = lambda *args: False  # noqa: E731
        kernels.Linear = nn.Linear  # type: ignore[attr-defined]
        for name in ("amd_custom_kernels_supported", "flash_attention", "gated_delta_prefill"):
            setattr(kernels, name, never)
        package = types.ModuleType("tinygrad.llm.kernels")
        monkeypatch.setitem(sys.modules, "tinygrad.llm.kernels", package)
        monkeypatch.setitem(sys.modules, "tinygrad.llm.kernels.amd", kernels)
    llm = importlib.import_module("tinygrad.llm.model")
    torch.manual_seed(0)
    theirs, sizes = qwen(kind)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[-1]))
    theirs.eval().save_pretrained(tmp_path)
    base = theirs.config
    theta = getattr(base, "rope_theta", None) or base.rope_parameters["rope_theta"]
    config = llm.TransformerConfig(
        norm_eps=base.rms_norm_eps, rope_theta=theta, max_context=16, **sizes
    )
    model = llm.Transformer(config)
    streamload.load_state_dict(model, tmp_path, mapping="hf-qwen", device="CPU", progress=False)
    x = model.token_embd(Tensor(TOKENS, device="CPU")).float()
    for block in model.blk:
        x = block(x, 0)
    found = model.output(model.output_norm(x)).numpy()
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # its cache is float16
