#!/usr/bin/env python3
"""Split a checkpoint over two devices, in whole layers, each under a budget of its own.

    two_devices.py PATH --devices CL CPU --budgets 2GB 1GB

The plan is printed first: it is made from the headers alone, before a byte of data moves.
"""

from __future__ import annotations

import argparse
from collections import Counter

import streamload


def main() -> None:
    """Read the command line, plan, load, and print what is where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="safetensors file, folder or index")
    parser.add_argument("--devices", nargs=2, default=["CPU", "CPU:1"], help="CPU CPU:1 (default)")
    parser.add_argument("--budgets", nargs=2, default=["2GB", "2GB"], help="2GB 2GB (default)")
    parser.add_argument("--dtype", default="float16", help="float16 (default) or another")
    args = parser.parse_args()

    budget = dict(zip(args.devices, args.budgets, strict=True))
    plan = streamload.plan(args.path, budget=budget, dtype=args.dtype, device=args.devices)
    print(plan)

    report = streamload.load_state_dict(
        None, args.path, budget=budget, dtype=args.dtype, device=args.devices
    )
    print(report)
    counts = Counter(tensor.device for tensor in report.state_dict.values())
    for device, count in counts.items():
        print(f"{device}: {count} tensors")


if __name__ == "__main__":
    main()
