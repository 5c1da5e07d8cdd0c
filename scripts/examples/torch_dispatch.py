#!/usr/bin/env python3
"""Load a torch module over several devices, and let accelerate move what flows between them.

    torch_dispatch.py DIR --devices cuda:0 cuda:1 --budgets 20GB 20GB

streamload puts each layer where it fits; its ``report.device_map`` tells accelerate what is where.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import dispatch_model
from torch_module import on_meta

import streamload


def main() -> None:
    """Read the command line, load, dispatch, and print the most likely next token."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("dir", type=Path, help="folder of the checkpoint")
    parser.add_argument("--devices", nargs="+", default=["cpu"], help="cuda:0 cuda:1, or cpu")
    parser.add_argument("--budgets", nargs="+", help="one for each (default: what is free there)")
    parser.add_argument("--dtype", help="float16 or another (default: by the devices)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="a prompt")
    args = parser.parse_args()
    if args.budgets and len(args.budgets) != len(args.devices):
        parser.error("as many budgets as devices")

    model = on_meta(args.dir)
    report = streamload.load_state_dict(
        model,
        args.dir,
        budget=dict(zip(args.devices, args.budgets, strict=True)) if args.budgets else None,
        device=args.devices,
        dtype=args.dtype,
    )
    print(report)
    for module, device in report.device_map.items():
        print(f"{module or 'everything'}: {device}")

    model = dispatch_model(model, dict(report.device_map))
    with torch.no_grad():
        logits = model(torch.tensor([args.tokens]))
    print("next token:", int(logits[0, -1].argmax()))


if __name__ == "__main__":
    main()
