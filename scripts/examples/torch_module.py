#!/usr/bin/env python3
"""A Llama as a plain torch module, streamed from a Hugging Face checkpoint under a budget.

    torch_module.py DIR --device cuda:0 --budget 3GB --tokens 128000 791 6864 315 9822 374

DIR holds ``config.json`` and the safetensors files. The module is built on the meta device, where
it takes no memory, and its names are those of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import streamload

Config = dict[str, Any]


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al., 2021): element i and the one half further are a pair.

    Args:
        x: queries or keys, (batch, heads, length, head_dim).
        theta: the base of the frequencies.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    a, b = x.float().split(half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention; several query heads share a key and value head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        self._head_dim = config.get("head_dim") or dim // heads
        self._theta = rope_theta(config)
        kv_heads = config.get("num_key_value_heads") or heads
        self.q_proj = linear(dim, heads * self._head_dim)
        self.k_proj = linear(dim, kv_heads * self._head_dim)
        self.v_proj = linear(dim, kv_heads * self._head_dim)
        self.o_proj = linear(heads * self._head_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        q, k = rotate(q, self._theta), rotate(k, self._theta)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, ff = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = linear(dim, ff), linear(dim, ff)
        self.down_proj = linear(ff, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = norm(config)
        self.post_attention_layernorm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The model, by the names that Hugging Face gives its tensors."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim, vocab = config["hidden_size"], config["vocab_size"]
        layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.model = nn.ModuleDict(
            {"embed_tokens": nn.Embedding(vocab, dim), "layers": layers, "norm": norm(config)}
        )
        self.lm_head = linear(dim, vocab)
        if config.get("tie_word_embeddings"):
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each of (batch, length): (batch, length, vocab_size)."""
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x))


def norm(config: Config) -> nn.RMSNorm:
    """Root mean square normalisation (Zhang and Sennrich, 2019)."""
    return nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])


def rope_theta(config: Config) -> float:
    """The base of the rotary frequencies, wherever this version of config.json keeps it.

    Raises:
        ValueError: the frequencies are scaled (as Llama 3.1 does), which this example leaves out.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"rotary embeddings of type {kind!r} are not part of this example")
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def on_meta(path: Path) -> Llama:
    """The model that the config.json of a folder describes, without memory."""
    with torch.device("meta"):
        model = Llama(json.loads((path / "config.json").read_text()))
    model.eval()
    return model


def main() -> None:
    """Read the command line, load, and print the most likely next tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--budget", help="bytes on the device, such as 3GB (default: what is free)")
    parser.add_argument("--dtype", help="float16, float32 or another (default: by the device)")
    parser.add_argument("--device", help="cpu, cuda:0 or another (default: a GPU if there is one)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    args = parser.parse_args()

    model = on_meta(args.dir)
    print(
        streamload.load_state_dict(
            model, args.dir, budget=args.budget, dtype=args.dtype, device=args.device
        )
    )

    tokens = torch.tensor([args.tokens], device=model.lm_head.weight.device)
    with torch.no_grad():
        probabilities = model(tokens)[0, -1].float().softmax(-1)
    top = probabilities.topk(5)
    print(
        "next token:",
        *(f"{t} ({p:.1%})" for p, t in zip(top.values.tolist(), top.indices.tolist(), strict=True)),
    )


if __name__ == "__main__":
    main()
