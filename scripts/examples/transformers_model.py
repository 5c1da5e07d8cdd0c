#!/usr/bin/env python3
"""Load a model of transformers, streamed under a budget, and generate tokens greedily.

    transformers_model.py PATH --budget 3GB --device cuda:0 --tokens 1 2 3 4

PATH is a folder with config.json and safetensors files, or a name in the local Hugging Face cache.
Tokens are ids: with the model's tokenizer, ``AutoTokenizer.from_pretrained(PATH)`` makes them of
text and back.
"""

from __future__ import annotations

import argparse

import torch

from streamload.transformers import from_pretrained


def main() -> None:
    """Read the command line, load, and print the report and the tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="folder of the checkpoint, or org/name")
    parser.add_argument("--budget", help="bytes on the device, such as 3GB (default: what is free)")
    parser.add_argument("--device", help="cuda:0, cpu or another of torch's (default: its default)")
    parser.add_argument("--dtype", help="float16 or another (default: the checkpoint's)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    parser.add_argument("--count", type=int, default=16, help="most tokens to add (default: 16)")
    args = parser.parse_args()

    model = from_pretrained(args.path, budget=args.budget, device=args.device, dtype=args.dtype)
    print(model.streamload_report)

    prompt = torch.tensor([args.tokens], device=model.device)
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=args.count
    )
    print("tokens:", *tokens[0].tolist())


if __name__ == "__main__":
    main()
