"""What a test needs from outside: there in CI, and a reason to skip elsewhere."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, NoReturn

import pytest

from streamload.devices.probing import probe

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
# scripts/test --all, which installs the extra "runtimes"
HAS_RUNTIMES = os.environ.get("STREAMLOAD_TEST_RUNTIMES") == "1"


def lacking(reason: str, *, needed: bool = IN_CI, where: str = "in CI") -> NoReturn:
    """Skip the test; where what it lacks is needed, which is in CI, fail it."""
    if needed:
        pytest.fail(f"must be there {where}: {reason}")
    pytest.skip(reason, allow_module_level=True)


def module(name: str, *, needed: bool = IN_CI, where: str = "in CI") -> ModuleType:
    try:
        found = importlib.import_module(name)
        if name == "transformers":
            # its first import makes another transformers (direct_transformers_import)
            importlib.import_module("transformers.processing_utils")
            found = importlib.import_module(name)
        return found
    except ImportError as error:
        lacking(f"{name} is not installed: {error}", needed=needed, where=where)


def runtime(name: str) -> ModuleType:
    """Import what only ``scripts/test --all`` installs: there it is needed; else skip without."""
    found = module(name, needed=HAS_RUNTIMES, where="with scripts/test --all")
    if name == "llama_cpp":
        _without_amx(found.llama_cpp)
    return found


def _without_amx(library: ModuleType) -> None:
    """Keep llama.cpp from its kernels for AMX, whose first instruction may end the process.

    ``ldtilecfg`` is a general protection fault in some virtual machines (llama-cpp-python 0.3.36).
    """
    defaults = library.llama_model_default_params
    if defaults.__name__ == "plain":
        return

    def plain() -> Any:
        given = defaults()
        given.use_extra_bufts = False
        return given

    library.llama_model_default_params = plain  # type: ignore[attr-defined]


def device(name: str) -> None:
    result = probe("tinygrad", name)
    if not result.works:
        lacking(f"tinygrad's {name} does not work: {result.problem}")
