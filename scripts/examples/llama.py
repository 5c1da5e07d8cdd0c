#!/usr/bin/env python3
"""A Llama in tinygrad, streamed from a Hugging Face checkpoint under a budget.

    llama.py DIR --budget 3GB --tokens 128000 791 6864 315 9822 374

DIR holds ``config.json`` and the safetensors files. The model has Meta's names and interleaved
rotary embeddings; ``mapping="hf-llama"`` renames and permutes on the way in.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tinygrad import Tensor, dtypes, nn

import streamload

Config = dict[str, Any]


class Linear:
    """A linear layer without bias; it takes no memory until it is loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Tensor.empty(outputs, inputs)

    def __call__(self, x: Tensor) -> Tensor:
        # weights rest as they were loaded, in float16 say; the arithmetic is in float32
        return x.linear(self.weight.T.float())


class Embedding:
    """A table of vectors; as ``output``, the layer that goes back from vectors to tokens."""

    def __init__(self, count: int, dim: int) -> None:
        self.weight = Tensor.empty(count, dim)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens].float()


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al., 2021), interleaved: elements 2i and 2i+1 are a pair.

    Args:
        x: queries or keys, (batch, length, heads, head_dim).
        theta: the base of the frequencies.
    """
    batch, length, heads, head_dim = x.shape
    frequencies = theta ** (Tensor.arange(0, head_dim, 2) / -head_dim)
    angles = Tensor.arange(length).reshape(length, 1) * frequencies
    cos, sin = (a.reshape(1, length, 1, head_dim // 2) for a in (angles.cos(), angles.sin()))
    pairs = x.reshape(batch, length, heads, head_dim // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    return (even * cos - odd * sin).stack(even * sin + odd * cos, dim=-1).reshape(x.shape)


class Attention:
    """Causal attention; several query heads share a key and value head."""

    def __init__(self, config: Config) -> None:
        dim, self._heads = config["hidden_size"], config["num_attention_heads"]
        self._kv_heads = config.get("num_key_value_heads") or self._heads
        self._head_dim = config.get("head_dim") or dim // self._heads
        self._theta = rope_theta(config)
        self.wq = Linear(dim, self._heads * self._head_dim)
        self.wk = Linear(dim, self._kv_heads * self._head_dim)
        self.wv = Linear(dim, self._kv_heads * self._head_dim)
        self.wo = Linear(self._heads * self._head_dim, dim)

    def __call__(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).reshape(batch, length, self._heads, self._head_dim)
        k = self.wk(x).reshape(batch, length, self._kv_heads, self._head_dim)
        v = self.wv(x).reshape(batch, length, self._kv_heads, self._head_dim)
        q, k = rotate(q, self._theta), rotate(k, self._theta)
        y = q.transpose(1, 2).scaled_dot_product_attention(
            k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward:
    """SwiGLU (Shazeer, 2020)."""

    def __init__(self, config: Config) -> None:
        dim, ff = config["hidden_size"], config["intermediate_size"]
        self.w1, self.w2, self.w3 = Linear(dim, ff), Linear(ff, dim), Linear(dim, ff)

    def __call__(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x).silu() * self.w3(x))


class Layer:
    """Attention and feed-forward, each after a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.ffn_norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def __call__(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return (x + self.feed_forward(self.ffn_norm(x))).contiguous()


class Llama:
    """The model; built from config.json, it takes no memory until it is loaded."""

    def __init__(self, config: Config) -> None:
        dim, vocab = config["hidden_size"], config["vocab_size"]
        self.tok_embeddings = Embedding(vocab, dim)
        self.layers = [Layer(config) for _ in range(config["num_hidden_layers"])]
        self.norm = nn.RMSNorm(dim, config["rms_norm_eps"])
        self.output = Linear(dim, vocab)
        if config.get("tie_word_embeddings"):
            self.output.weight = self.tok_embeddings.weight

    def __call__(self, tokens: Tensor) -> Tensor:
        """Compute logits.

        Args:
            tokens: (batch, length), integers.

        Returns:
            Logits of the token after each, (batch, length, vocab_size), float32.
        """
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


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


def main() -> None:
    """Read the command line, load, and print the most likely next tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--budget", help="bytes on the device, such as 3GB (default: what is free)")
    parser.add_argument("--dtype", default="float16", help="float16 (default), float32 or another")
    parser.add_argument("--device", help="CL, CPU or another of tinygrad's (default: its default)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    args = parser.parse_args()

    model = Llama(json.loads((args.dir / "config.json").read_text()))
    print(
        streamload.load_state_dict(
            model,
            args.dir,
            budget=args.budget,
            dtype=args.dtype,
            device=args.device,
            mapping="hf-llama",
        )
    )

    device = model.tok_embeddings.weight.device
    tokens = Tensor([args.tokens], dtype=dtypes.int32, device=device)
    probabilities = model(tokens)[0, -1].softmax().numpy()
    print(
        "next token:", *(f"{t} ({probabilities[t]:.1%})" for t in probabilities.argsort()[:-6:-1])
    )


if __name__ == "__main__":
    main()
