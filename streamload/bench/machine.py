"""Facts about this machine, on which measurements depend."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from streamload.core.system import file_text

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")
_PACKAGES = (
    *("llvmlite", "ml_dtypes", "numpy", "tinygrad", "safetensors"),
    *("torch", "transformers", "accelerate"),
)


def facts() -> dict[str, str]:
    """Return CPU, kernel, memory and versions of packages as text, by name."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "CPUs of this process": str(len(affinity(0)) if affinity else os.cpu_count()),
        "memory": _field("/proc/meminfo", "MemTotal"),
        "memory available": _field("/proc/meminfo", "MemAvailable"),
        "kernel": platform.release(),
        "transparent huge pages": file_text(_HUGE_PAGES / "enabled").strip(),
        "of shared memory": file_text(_HUGE_PAGES / "shmem_enabled").strip(),
        "CUDA driver": file_text(Path("/proc/driver/nvidia/version")).partition("\n")[0],
        "Python": platform.python_version(),
        **{name: installed_version(name) for name in _PACKAGES},
        "OpenCL drivers": ", ".join(p.stem for p in Path("/etc/OpenCL/vendors").glob("*.icd")),
    }


def installed_version(package: str) -> str:
    """Return the version of a Python distribution; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _field(path: str, name: str) -> str:
    pairs = (line.partition(":") for line in file_text(Path(path)).splitlines())
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")
