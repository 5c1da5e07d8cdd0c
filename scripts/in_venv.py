"""Runs a script in the checkout's virtual environment, with the checkout's own package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
NEEDED = ("llvmlite", "ml_dtypes", "numpy", "rich", "tinygrad", "typer")


def begin() -> None:
    """Run this process's script anew in the virtual environment, unless all is here already.

    Then the checkout's package comes before what is installed, here and in what is started.
    """
    venv = SCRIPTS.parent / os.environ.get("STREAMLOAD_VENV", ".venv")
    if not all(map(importlib.util.find_spec, NEEDED)) and Path(sys.prefix) != venv:
        subprocess.run([SCRIPTS / "setup"], check=True)
        os.execv(venv / "bin/python", [str(venv / "bin/python"), *sys.argv])
    sys.path.insert(0, str(SCRIPTS.parent))
    paths = (str(SCRIPTS.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
