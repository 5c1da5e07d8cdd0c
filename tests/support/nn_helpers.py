"""Quantised Linears of tinygrad with values, and a model to put them into."""

from __future__ import annotations

from typing import Any

import numpy as np
from quant_bounds import elements_of
from tinygrad import Tensor, nn

from streamload.codecs.scheme import SCHEMES
from streamload.core.dtypes import F32
from streamload.nn import QuantLinear

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


def quantised(format: str, rows: int, width: int, seed: int = 0) -> tuple[Arrays, Array]:
    """The parts of a random weight, by suffix, and what they decode to."""
    weight = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    form = SCHEMES[format].of(weight.shape, F32)
    codes = bytearray(form.parts[0].nbytes)
    encoder = form.encoder(F32, "numpy")
    encoder.encode(memoryview(weight.tobytes()), memoryview(codes), 0)
    found = {"": memoryview(codes), **encoder.finish()}
    shaped = {
        part.suffix: np.frombuffer(found[part.suffix], part.dtype.numpy).reshape(part.shape)
        for part in form.parts
    }
    return shaped, elements_of(form, shaped)


def fill(layer: QuantLinear, parts: Arrays) -> QuantLinear:
    for suffix, array in parts.items():
        tensor = getattr(layer, f"weight{suffix}")
        tensor.replace(Tensor(array.copy(), device=tensor.device)).realize()
    return layer


def made(
    format: str, rows: int, width: int, device: str, bias: Tensor | None = None
) -> tuple[QuantLinear, Array]:
    parts, weight = quantised(format, rows, width)
    return fill(QuantLinear(format, width, rows, bias=bias, device=device), parts), weight


class Block:
    def __init__(self, width: int) -> None:
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def __call__(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.o(self.q(h).scaled_dot_product_attention(self.k(h), self.v(h)))
        return x + self.down(self.up(self.norm2(x)).silu())


class Transformer:
    def __init__(self, width: int = 64, tokens: int = 40) -> None:
        self.embedding = nn.Embedding(tokens, width)
        self.layers = [Block(width) for _ in range(2)]
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
