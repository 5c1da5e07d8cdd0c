#!/usr/bin/env python3
"""Run a Llama in a loop of your own, with layers that stream through a budget.

    own_loop.py DIR --device cuda:0 --budget 3GB --tokens 128000 791 6864 315 9822 374

DIR holds ``config.json`` and the safetensors files. One layer's module, without memory, computes
with the tensors of each layer in turn.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch_module import Layer, norm

import streamload


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of a module, by their names in it."""
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.")
    }


def main() -> None:
    """Read the command line, run passes, and print the tokens that follow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--budget", help="bytes on the device, such as 3GB (default: what is free)")
    parser.add_argument("--dtype", help="float16, float32 or another (default: by the device)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda:0 or another")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    parser.add_argument("--count", type=int, default=3, help="how many tokens to predict")
    args = parser.parse_args()

    config = json.loads((args.dir / "config.json").read_text())
    with torch.device("meta"):
        layer, last = Layer(config), norm(config)
    tokens = torch.tensor([args.tokens], device=args.device)
    options = {"budget": args.budget, "dtype": args.dtype, "device": args.device}
    with torch.no_grad(), streamload.stream_layers(args.dir, **options) as layers:
        for _ in range(args.count):  # each is a pass
            for name, tensors in layers:
                if name == "embedding":
                    x = tensors["model.embed_tokens.weight"][tokens]
                elif name == "head":
                    x = functional_call(last, named(tensors, "model.norm"), (x[:, -1:],))
                    logits = x @ tensors["lm_head.weight"].T
                else:
                    x = functional_call(layer, named(tensors, name), (x,))
            tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
        print(layers.report)
    print("tokens:", *tokens[0].tolist())


if __name__ == "__main__":
    main()
