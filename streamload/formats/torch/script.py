"""Finds the parameters and buffers of a TorchScript archive by name, without running its code.

``data.pkl`` has the modules as objects with attributes; the source of each class, in ``code/``,
lists those that are parameters and buffers, which ``state_dict()`` has.

Source: ``torch/csrc/jit/serialization/pickler.cpp`` and ``python_print.cpp`` of torch 2.13.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from streamload.formats.torch.globals import Global, Instance, Tensor, named

_CLASS = re.compile(
    r"^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n  __buffers__ = \[(.*)\]\n", re.M
)
_QUOTED = re.compile(r'"([^"]*)"')
_MOST_LETTERS = 2**22  # of all names together: modules may be shared
_MOST_CODE_NBYTES = 2**24  # of all code that is read

#: By class, the names of its parameters and buffers.
_Classes = Mapping[str, frozenset[str]]


def lookup(module: str, name: str) -> Global:
    """Return the record of a global that ``data.pkl`` of an archive may name."""
    if module.partition(".")[0] == "__torch__":
        return Global(f"{module}.{name}", "instance")
    if module == "torch.jit._pickle":  # lists, and types of lists and dicts
        return Global(f"{module}.{name}", "plain")
    return named(module, name)


def state_dict(root: Any, read: Callable[[str], bytes | None]) -> dict[str, Tensor] | None:
    """Return the parameters and buffers of the module ``root`` by name.

    ``read`` returns the source of an entry, or None if there is none. None if the archive does not
    list them.
    """
    files: dict[str, _Classes] = {}
    found: dict[str, Tensor] = {}
    modules = [("", root)]
    letters = code_nbytes = 0
    while modules:
        prefix, module = modules.pop()
        if type(module) is not Instance:
            return None
        package, _, name = module.name.rpartition(".")
        if package not in files:
            source = read(f"code/{package.replace('.', '/')}.py")
            if source is None:
                return None
            code_nbytes += len(source)
            if code_nbytes > _MOST_CODE_NBYTES:
                return None
            files[package] = _classes(source)
        if name not in files[package] and prefix:
            continue  # an object that is no module
        if name not in files[package] or type(module.state) is not dict:
            return None  # a state of its own does not name its parameters
        for key, value in module.state.items():
            if type(key) is not str or type(value) not in (Tensor, Instance):
                continue
            if (letters := letters + len(prefix) + len(key) + 1) > _MOST_LETTERS:
                return None
            if type(value) is Instance:
                modules.append((f"{prefix}{key}.", value))
            elif key in files[package][name]:
                found[prefix + key] = value
    return found


def inflate(raw: bytes) -> bytes | None:
    """Return the source in a compressed entry; None if it is invalid or too long."""
    packed = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        source = packed.decompress(raw, _MOST_CODE_NBYTES)
    except zlib.error:
        return None
    return source if packed.eof else None


def _classes(source: bytes) -> _Classes:
    """Return the classes of modules in a file of code."""
    return {
        name: frozenset(_QUOTED.findall(parameters + buffers))
        for name, parameters, buffers in _CLASS.findall(source.decode("utf-8", "replace"))
    }
