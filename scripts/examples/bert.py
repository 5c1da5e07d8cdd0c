#!/usr/bin/env python3
"""Sentence embeddings: all-MiniLM-L6-v2 (or another BERT) in tinygrad, streamed under a budget.

    bert.py DIR --budget 50MB "A man is eating." "Someone has a meal." "The sky is blue."

DIR holds ``model.safetensors``, ``config.json`` and ``tokenizer.json``. The attributes of the model
are named as the checkpoint names them, so that nothing has to be renamed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llama import Config, Embedding
from tinygrad import Tensor, dtypes, nn
from tokenizers import Tokenizer

import streamload


class Linear:
    """A linear layer; its parameters take no memory until they are loaded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.weight = Tensor.empty(outputs, inputs)
        self.bias = Tensor.empty(outputs)

    def __call__(self, x: Tensor) -> Tensor:
        # weights rest as they were loaded, in float16 say; the arithmetic is in float32
        return x.linear(self.weight.float().contiguous().T, self.bias.float())


class Embeddings:
    """Words, positions and token types (all of the first type here), added."""

    def __init__(self, config: Config) -> None:
        dim = config["hidden_size"]
        self.word_embeddings = Embedding(config["vocab_size"], dim)
        self.position_embeddings = Embedding(config["max_position_embeddings"], dim)
        self.token_type_embeddings = Embedding(config["type_vocab_size"], dim)
        self.position_ids = Tensor.empty(1, config["max_position_embeddings"], dtype=dtypes.int64)
        self.LayerNorm = nn.LayerNorm(dim, config["layer_norm_eps"])

    def __call__(self, ids: Tensor) -> Tensor:
        words = self.word_embeddings(ids)
        positions = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        types = self.token_type_embeddings.weight[0].float()
        return self.LayerNorm(words + positions + types)


class SelfAttention:
    """Queries, keys and values, and the attention between them."""

    def __init__(self, config: Config) -> None:
        dim = config["hidden_size"]
        self.query = Linear(dim, dim)
        self.key = Linear(dim, dim)
        self.value = Linear(dim, dim)
        self._heads = config["num_attention_heads"]

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, dim = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.reshape(batch, length, self._heads, dim // self._heads).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        return q.scaled_dot_product_attention(k, v, mask).transpose(1, 2).reshape(x.shape)


class Output:
    """A linear layer, the residual, and the norm after it."""

    def __init__(self, inputs: int, config: Config) -> None:
        self.dense = Linear(inputs, config["hidden_size"])
        self.LayerNorm = nn.LayerNorm(config["hidden_size"], config["layer_norm_eps"])

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Attention:
    """Self-attention and what follows it."""

    def __init__(self, config: Config) -> None:
        self.self = SelfAttention(config)
        self.output = Output(config["hidden_size"], config)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.output(self.self(x, mask), x)


class Dense:
    """A linear layer that the checkpoint calls ``dense``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.dense = Linear(inputs, outputs)


class Layer:
    """One layer of the encoder."""

    def __init__(self, config: Config) -> None:
        self.attention = Attention(config)
        self.intermediate = Dense(config["hidden_size"], config["intermediate_size"])
        self.output = Output(config["intermediate_size"], config)

    def __call__(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention(x, mask)
        hidden = self.intermediate.dense(x)
        # the exact GELU: 0.5 x (1 + erf(x / sqrt(2)))
        return self.output(0.5 * hidden * (1 + (hidden * 0.5**0.5).erf()), x).contiguous()


class Encoder:
    """The layers."""

    def __init__(self, config: Config) -> None:
        self.layer = [Layer(config) for _ in range(config["num_hidden_layers"])]


class Bert:
    """BERT, with the mean over the tokens as the sentence's embedding."""

    def __init__(self, config: Config) -> None:
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = Dense(config["hidden_size"], config["hidden_size"])  # loaded; not used here

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed sentences.

        Args:
            ids: tokens, (batch, length), integers.
            mask: 1 where there is a token and 0 where there is padding, (batch, length).

        Returns:
            Embeddings of length 1, (batch, hidden_size), float32.
        """
        x = self.embeddings(ids)
        far = ((1 - mask.float()) * -1e9).reshape(mask.shape[0], 1, 1, mask.shape[1])
        for layer in self.encoder.layer:
            x = layer(x, far)
        weights = mask.float().unsqueeze(2)
        mean = (x * weights).sum(1) / weights.sum(1)
        return mean / mean.square().sum(1, keepdim=True).sqrt()


def embed(
    model: Bert, tokenizer: Tokenizer, sentences: Sequence[str], batch: int = 32
) -> np.ndarray[Any, Any]:
    """Embed sentences, a batch at a time, similar lengths together.

    Returns:
        Embeddings of length 1, (sentences, hidden_size), float32.
    """
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding(pad_to_multiple_of=32)  # few shapes, so that few kernels are compiled
    device = model.embeddings.word_embeddings.weight.device
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    rows: dict[int, np.ndarray[Any, Any]] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        encoded = tokenizer.encode_batch([sentences[i] for i in chosen])
        ids = Tensor([e.ids for e in encoded], dtype=dtypes.int32, device=device)
        mask = Tensor([e.attention_mask for e in encoded], dtype=dtypes.int32, device=device)
        rows.update(zip(chosen, model(ids, mask).numpy(), strict=True))
    return np.stack([rows[i] for i in range(len(sentences))])


def main() -> None:
    """Read the command line, load, and print how alike the sentences are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("sentences", nargs="+", help="sentences to compare")
    parser.add_argument("--budget", default="50MB", help="bytes on the device (default: 50MB)")
    parser.add_argument("--dtype", default="float16", help="float16 (default), float32 or another")
    parser.add_argument("--device", help="CL, CPU or another of tinygrad's (default: its default)")
    args = parser.parse_args()

    model = Bert(json.loads((args.dir / "config.json").read_text()))
    print(
        streamload.load_state_dict(
            model,
            args.dir / "model.safetensors",
            budget=args.budget,
            dtype=args.dtype,
            device=args.device,
        )
    )

    tokenizer = Tokenizer.from_file(str(args.dir / "tokenizer.json"))
    embeddings = embed(model, tokenizer, args.sentences)
    for sentence, row in zip(args.sentences, embeddings @ embeddings.T, strict=True):
        print(*(f"{cosine:6.3f}" for cosine in row), " ", sentence)


if __name__ == "__main__":
    main()
