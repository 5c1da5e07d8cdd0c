#!/usr/bin/env python3
"""What happens when a checkpoint does not fit: one error, with the numbers, before any I/O.

too_small.py PATH --budget 1MB
"""

from __future__ import annotations

import argparse

import streamload
from streamload.errors import PlanInfeasibleError


def main() -> None:
    """Read the command line, try to load, and print the error and its facts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("path", help="safetensors file, folder or index")
    parser.add_argument("--budget", default="1kB", help="bytes on the device (default: 1kB)")
    parser.add_argument("--device", default="auto", help="CL, CPU, host or auto (default)")
    args = parser.parse_args()

    try:
        report = streamload.load_state_dict(None, args.path, budget=args.budget, device=args.device)
    except PlanInfeasibleError as error:
        print(error)
        print(f"short by {error.needed_nbytes - error.budget_nbytes} bytes on {error.device}")
    else:
        print(report)


if __name__ == "__main__":
    main()
