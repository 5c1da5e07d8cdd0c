#!/usr/bin/env python3
"""Load a checkpoint without a model: names to tensors, on a device or in host memory.

    plain_state_dict.py PATH --device host --budget 3GB

PATH is a safetensors file, a folder, or an index. On "host" the tensors are numpy arrays.
"""

from __future__ import annotations

import argparse

import streamload


def main() -> None:
    """Read the command line, load, and print what came."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="safetensors file, folder or index")
    parser.add_argument("--budget", help="bytes on the device, such as 3GB (default: what is free)")
    parser.add_argument("--device", default="auto", help="CL, CPU, host or auto (default)")
    parser.add_argument("--dtype", help="float16, checkpoint or another (default: by the device)")
    args = parser.parse_args()

    report = streamload.load_state_dict(
        None, args.path, budget=args.budget, device=args.device, dtype=args.dtype
    )
    for name, tensor in report.state_dict.items():
        print(f"{name:60} {tensor.dtype!s:24} {tuple(tensor.shape)}")
    print(report)


if __name__ == "__main__":
    main()
