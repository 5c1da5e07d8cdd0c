"""Names of frameworks and devices, and the environment variables about them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from streamload.codecs.llvm import INSTALL
from streamload.core.disk_cache import lend_caches
from streamload.devices.base import Framework
from streamload.errors import DeviceNotFoundError

_FRAMEWORKS = {
    "tinygrad": "streamload.devices.tinygrad.device",
    "torch": "streamload.devices.torch.device",
    "host": "streamload.devices.host",
}
#: The problem of an unknown device, for errors, with the names that users may mean.
NO_DEVICE = (
    'there is none of this name: a GPU is "cuda:0", "mps" or "xpu" (torch\'s), "CUDA", "CL" or '
    '"METAL" (tinygrad\'s)'
)
_ARRAYS = {("numpy", "ndarray"), ("streamload", "InvalidArray")}
# torch's own spelling; tinygrad's names are in upper case
_TORCH_NAME = re.compile(r"(cpu|cuda|mps|xpu)(:\d+)?")


def framework(name: str) -> Framework:
    """Import and return a framework by name; raises DeviceNotFoundError if not installed."""
    lend_caches()
    try:
        module = importlib.import_module(_FRAMEWORKS[name])
    except KeyError:
        raise DeviceNotFoundError(name, "no such framework", working=tuple(_FRAMEWORKS)) from None
    except ImportError as error:
        raise DeviceNotFoundError(name, f"it cannot be imported: {error}") from error
    return module.FRAMEWORK  # type: ignore[no-any-return]


def framework_of(model: Any) -> str | None:
    """Return the name of the framework of a model's tensors; None if there are no tensors.

    No framework is imported: classes of the model and its members are read, 8 levels deep. numpy's
    arrays decide only if there are no other tensors, since models of every framework keep some.
    """
    seen: set[int] = set()
    found: str | None = None
    level: list[Any] = [model]
    for _ in range(8):
        following: list[Any] = []
        for obj in level:
            if id(obj) in seen:
                continue
            seen.add(id(obj))
            kinds = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(obj).__mro__}
            if any(root == "torch" for root, _ in kinds):
                return "torch"
            if ("tinygrad", "Tensor") in kinds:
                return "tinygrad"
            if kinds & _ARRAYS:
                found = "host"
            if isinstance(obj, (list, tuple)):
                following.extend(obj)
            else:
                held = obj if isinstance(obj, Mapping) else getattr(obj, "__dict__", {})
                following.extend(held.values())
        level = following
    return found


def split_name(device: str) -> tuple[str | None, str]:
    """Split "tinygrad:CL" into framework and device; the framework is None if not named."""
    head, _, rest = device.partition(":")
    if head.lower() in _FRAMEWORKS and rest:
        return head.lower(), rest
    if device.lower() == "host":
        return "host", "host"
    if device.lower() in _FRAMEWORKS:
        return device.lower(), ""
    return None, device


def spelled_as(device: str) -> str:
    """Return the framework by a device's spelling: torch for "cuda:0", tinygrad for "CUDA"."""
    return "torch" if _TORCH_NAME.fullmatch(device) else "tinygrad"


#: The command that installs each package that streamload works without, by its module.
INSTALLS = {
    "llvmlite": INSTALL,
    "torch": "pip install torch",
    "tinygrad": "pip install tinygrad",
}


def installed(framework_name: str) -> bool:
    """Whether a framework could be imported; imports nothing."""
    return framework_name == "host" or importlib.util.find_spec(framework_name) is not None


def default_framework() -> str:
    """Return the first installed framework: the choice if neither model nor device decides."""
    return next(name for name in _FRAMEWORKS if installed(name))


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
