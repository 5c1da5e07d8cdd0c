"""What this machine is: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "llvmlite",
    "ml_dtypes",
    "numpy",
    "tinygrad",
    "safetensors",
    "torch",
    "transformers",
    "accelerate",
)


def facts() -> dict[str, str]:
    """CPU, kernel, memory and versions, by name."""
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "CPUs of this process": str(len(os.sched_getaffinity(0))),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "memory available": _field("/proc/meminfo", "MemAvailable"),
        "kernel": platform.release(),
        "transparent huge pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "of shared memory": _text("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "OpenCL drivers": ", ".join(p.stem for p in Path("/etc/OpenCL/vendors").glob("*.icd")),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
