"""The measured rate of each device's memory, kept on disk for later processes."""

from __future__ import annotations

import platform

from streamload.core.disk_cache import keep, read_kept
from streamload.core.memory import canonical_device

_KIND = "memory-rate"
#: The device of plans that name none.
UNNAMED = "device"


def keep_rate(device: str, gigabytes_per_second: float) -> None:
    """Keep the rate of reading the memory of a device, in GB/s, for this machine."""
    keep(f"{gigabytes_per_second:.6g}".encode(), _KIND, platform.node(), _alike(device))


def kept_rate(device: str) -> float | None:
    """Return the rate of reading the memory of a device, in GB/s; None if none was kept."""
    found = read_kept(_KIND, platform.node(), _alike(device))
    return None if found is None else float(found)


def _alike(device: str) -> str:
    """Return one name for all names of a memory: "CUDA" and "cuda:0", "host" and "cpu"."""
    name = canonical_device(device)
    return "cpu" if name == "host" else name
