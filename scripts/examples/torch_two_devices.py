#!/usr/bin/env python3
"""Split a checkpoint over two devices of torch, in whole layers, each under a budget of its own.

    torch_two_devices.py PATH --devices cuda:0 cuda:1 --budgets 20GB 4GB

The plan is printed first. It is made from the headers alone, before a byte of data moves, and on
machines that have no such devices too.
"""

from __future__ import annotations

import argparse

import streamload
from streamload.errors import DeviceNotFoundError


def main() -> None:
    """Read the command line, plan, load, and print what is where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="safetensors file, folder or index")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cpu"], help="default: cuda:0 cpu")
    parser.add_argument("--budgets", nargs=2, default=["2GB", "2GB"], help="default: 2GB 2GB")
    parser.add_argument("--dtype", default="checkpoint", help="float16 or another (default: as is)")
    args = parser.parse_args()

    budget = dict(zip(args.devices, args.budgets, strict=True))
    print(streamload.plan(args.path, budget=budget, dtype=args.dtype, device=args.devices))
    try:
        report = streamload.load_state_dict(
            None,
            args.path,
            budget=budget,
            dtype=args.dtype,
            device=[f"torch:{name}" for name in args.devices],
        )
    except DeviceNotFoundError as error:
        print(f"The plan alone, since it takes two devices to load: {error}")
        return
    print(report)
    for module, device in report.device_map.items():
        print(f"{module or 'everything'}: {device}")


if __name__ == "__main__":
    main()
