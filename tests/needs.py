"""What a test needs from outside: there in CI, and a reason to skip elsewhere."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import NoReturn

import pytest

from streamload.devices.probing import probe

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
# scripts/test --all, which installs the extra "runtimes"
HAS_RUNTIMES = os.environ.get("STREAMLOAD_TEST_RUNTIMES") == "1"


def lacking(reason: str) -> NoReturn:
    """Skip the test; in CI, fail it."""
    if IN_CI:
        pytest.fail(f"must be there in CI: {reason}")
    pytest.skip(reason, allow_module_level=True)


def module(name: str) -> ModuleType:
    """Import a module that the test needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        lacking(f"{name} is not installed: {error}")


def runtime(name: str) -> ModuleType:
    """Import what only ``scripts/test --all`` installs: there it is needed; else skip without."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} is not installed: {error}"
        if HAS_RUNTIMES:
            pytest.fail(f"must be there with scripts/test --all: {reason}")
        pytest.skip(reason, allow_module_level=True)


def device(name: str) -> None:
    """Need a device of tinygrad's that computes."""
    result = probe("tinygrad", name)
    if not result.works:
        lacking(f"tinygrad's {name} does not work: {result.problem}")
