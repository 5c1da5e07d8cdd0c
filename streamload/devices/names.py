"""Names of frameworks and devices, and the environment variables about them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from streamload.codecs.llvm import INSTALL
from streamload.core.disk_cache import lend_caches
from streamload.core.registry import Registry, Row, load
from streamload.devices.allocators import AllocatorKind
from streamload.devices.base import Framework
from streamload.errors import DeviceNotFoundError


@dataclass(frozen=True, kw_only=True)
class FrameworkRow(Row):
    """A framework of `FRAMEWORKS`.

    Attributes:
        framework: the `Framework` to import, "module:name".
        tensors: classes of its tensors, "package.Class"; "package" for all classes of a package.
        spelling: pattern of the devices that are its own without its name before them.
        hint: how the devices of the others are spelled, for errors.
        cuda_allocator: the allocator of a CUDA device that is not opened; None if it has none.
    """

    framework: str
    tensors: tuple[str, ...] = ()
    spelling: str = "(?!)"
    hint: str = ""
    cuda_allocator: AllocatorKind | None = None


#: The frameworks; the first that is installed is the default.
FRAMEWORKS = Registry(
    "streamload.devices",
    FrameworkRow,
    FrameworkRow(
        name="tinygrad",
        framework="streamload.devices.tinygrad.device:FRAMEWORK",
        tensors=("tinygrad.Tensor",),
        spelling="([A-Z].*)?",
        hint="torch's devices are in lower case",
        cuda_allocator="cuda_driver",
    ),
    FrameworkRow(
        name="torch",
        framework="streamload.devices.torch.device:FRAMEWORK",
        tensors=("torch",),
        spelling=r"(cpu|cuda|mps|xpu)(:\d+)?",
        hint="tinygrad's devices are in upper case",
        cuda_allocator="cuda_caching",
    ),
    FrameworkRow(
        name="host",
        framework="streamload.devices.host:FRAMEWORK",
        tensors=("numpy.ndarray", "streamload.InvalidArray"),
    ),
)
#: The problem of an unknown device, for errors, with the names that users may mean.
NO_DEVICE = (
    'there is none of this name: a GPU is "cuda:0", "mps" or "xpu" (torch\'s), "CUDA", "CL" or '
    '"METAL" (tinygrad\'s)'
)
# Packages whose classes are no tensors of another framework.
_PLAIN = {"builtins", "collections", "numpy", "streamload"}


def framework(name: str) -> Framework:
    """Import and return a framework by name; raises DeviceNotFoundError if not installed."""
    lend_caches()
    try:
        found: Framework = load(FRAMEWORKS[name].framework)
    except KeyError:
        raise DeviceNotFoundError(name, "no such framework", working=tuple(FRAMEWORKS)) from None
    except ImportError as error:
        raise DeviceNotFoundError(name, f"it cannot be imported: {error}") from error
    return found


def framework_of(model: Any) -> str | None:
    """Return the name of the framework of a model's tensors; None if there are no tensors.

    No framework is imported: classes of the model and its members are read, 8 levels deep. numpy's
    arrays decide only if there are no other tensors, since models of every framework keep some.
    """
    seen: set[int] = set()
    owners: dict[type, str | None] = {}
    level: list[Any] = [model]
    for _ in range(8):
        following: list[Any] = []
        for obj in level:
            if id(obj) in seen:
                continue
            seen.add(id(obj))
            kind = type(obj)
            if kind not in owners:
                owners[kind] = _owner(kind, FRAMEWORKS.ours)
            if owners[kind] not in (None, "host"):
                return owners[kind]
            if isinstance(obj, (list, tuple)):
                following.extend(obj)
            else:
                held = obj if isinstance(obj, Mapping) else getattr(obj, "__dict__", {})
                following.extend(held.values())
        level = following
    strange = [kind for kind in owners if kind.__module__.partition(".")[0] not in _PLAIN]
    others = (_owner(kind, FRAMEWORKS.others) for kind in strange)
    return next(filter(None, others), "host" if "host" in owners.values() else None)


def _owner(kind: type, rows: Mapping[str, FrameworkRow]) -> str | None:
    """Return the framework of which ``kind``, or a class that it derives from, is a tensor."""
    names = {
        name
        for each in kind.__mro__
        for root in [each.__module__.partition(".")[0]]
        for name in (root, f"{root}.{each.__name__}")
    }
    return next((row.name for row in rows.values() if not names.isdisjoint(row.tensors)), None)


def split_name(device: str) -> tuple[str | None, str]:
    """Split "tinygrad:CL" into framework and device; the framework is None if not named."""
    if device.lower() == "host":
        return "host", "host"
    head, colon, rest = device.partition(":")
    is_spelled = any(re.fullmatch(row.spelling, device) for row in FRAMEWORKS.ours.values())
    if bool(colon) == bool(rest) and head.lower() in (
        FRAMEWORKS.ours if is_spelled else FRAMEWORKS
    ):
        return head.lower(), rest
    return None, device


def spelled_as(device: str) -> str:
    """Return the framework by a device's spelling: torch for "cuda:0", tinygrad for "CUDA"."""
    spelled = (row.name for row in FRAMEWORKS.values() if re.fullmatch(row.spelling, device))
    return next(spelled, "tinygrad")


#: The command that installs each package that streamload works without, by its module.
INSTALLS = {
    "llvmlite": INSTALL,
    "torch": "pip install torch",
    "tinygrad": "pip install tinygrad",
}


def installed(name: str) -> bool:
    """Whether a framework, or a package of `INSTALLS`, could be imported; imports nothing."""
    return name not in INSTALLS or importlib.util.find_spec(name) is not None


def default_framework() -> str:
    """Return the first installed framework: the choice if neither model nor device decides."""
    return next(name for name in FRAMEWORKS if installed(name))


def environment(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables whose names begin with one of the prefixes."""
    return {key: value for key, value in os.environ.items() if key.startswith(prefixes)}


def environment_device() -> str | None:
    """Return the default device, ``STREAMLOAD_DEVICE``; None if it is not set or empty."""
    return os.environ.get("STREAMLOAD_DEVICE") or None


def environment_fp16_cast() -> Literal["device", "llvm"] | None:
    """Return the cast from bfloat16 that ``SUPPORT_BF16`` requests; None if it is not set.

    "1" is fp16 by the device's cast, "0" fp16 by the host's LLVM cast. Raises ValueError: it is set
    to something else.
    """
    value = os.environ.get("SUPPORT_BF16", "")
    choices: dict[str, Literal["device", "llvm"] | None] = {"": None, "1": "device", "0": "llvm"}
    if value not in choices:
        raise ValueError(f"SUPPORT_BF16 is {value!r}; expected 0 or 1")
    return choices[value]
