#!/usr/bin/env python3
"""Split a checkpoint over two devices, in whole layers, each under a budget of its own.

    two_devices.py PATH --devices CL CPU --budgets 2GB 1GB
    two_devices.py PATH --devices cuda:0 cuda:1 --budgets 20GB 4GB

The plan is printed first. It is made from the headers alone, before a byte of data moves, and on
machines that have no such devices too. CL, CPU and so on are tinygrad's, cuda:0 and cpu torch's.
"""

from __future__ import annotations

import argparse
from collections import Counter

import streamload
from streamload.errors import DeviceNotFoundError


def main() -> None:
    """Read the command line, plan, load, and print what is where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="safetensors file, folder or index")
    parser.add_argument("--devices", nargs=2, default=["CPU", "CPU:1"], help="CPU CPU:1 (default)")
    parser.add_argument("--budgets", nargs=2, default=["2GB", "2GB"], help="2GB 2GB (default)")
    parser.add_argument("--dtype", default="float16", help="float16 (default) or another")
    args = parser.parse_args()

    asked = {
        "budget": dict(zip(args.devices, args.budgets, strict=True)),
        "dtype": args.dtype,
        "device": args.devices,
    }
    print(streamload.plan(args.path, **asked))
    try:
        report = streamload.load_state_dict(None, args.path, **asked)
    except DeviceNotFoundError as error:
        print(f"The plan alone, since it takes two devices to load: {error}")
        return
    print(report)
    for module, device in report.device_map.items():
        print(f"{module or 'everything'}: {device}")
    counts = Counter(tensor.device for tensor in report.state_dict.values())
    for device, count in counts.items():
        print(f"{device}: {count} tensors")


if __name__ == "__main__":
    main()
