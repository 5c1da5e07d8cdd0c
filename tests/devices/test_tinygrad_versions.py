"""The versions of tinygrad that pyproject.toml allows: each in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[2]

# What these show is of one version: which errors of tinygrad's come first, which bits its own cast
# and clang can show, which ways in its PYTHON backend has, and whether nodes are made twice.
_OF_ONE_VERSION = ("whenever_it_is_used", "every_use_of", "every_way_in", "reads_back", "stands_on")


def installed(wanted: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", str(folder), wanted], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        needs.lacking(f"{wanted} cannot be had: {done.stderr.strip()[-200:]}")
    return folder


def run(site: Path, *arguments: str) -> str:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["tinygrad==0.13.0", "tinygrad==0.14.0", "tinygrad"])
def test_models_are_filled_with_every_version(wanted: str, tmp_path: Path) -> None:
    """On CPU and CL: in place, replaced, tied, views, graphs, and what a failed load leaves."""
    site = installed(wanted, tmp_path / "site")
    (found,) = distributions(name="tinygrad", path=[str(site)])
    if found.version == version("tinygrad"):
        return
    assert str(site) in run(site, "-c", "import tinygrad; print(tinygrad.__file__)")
    chosen = " and ".join(f"not {name}" for name in _OF_ONE_VERSION)
    # a folder of its own: pytest closes its usual one to other users, which tests beside this need
    tests = (f"--basetemp={tmp_path / 'inner'}", "tests/devices/test_devices_tinygrad.py")
    options = ("-n0", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen)
    assert "passed" in run(site, "-m", "pytest", *options)


def test_a_tinygrad_without_what_is_used_says_so(tmp_path: Path) -> None:
    code = (
        "from tinygrad.device import Buffer; del Buffer.ensure_allocated\n"
        "import streamload\n"
        "try: streamload.load_state_dict(None, 'nowhere', device='CL')\n"
        "except streamload.errors.StreamloadError as error: print(error)\n"
        "try: streamload.devices.names.framework('tinygrad')\n"
        "except streamload.errors.StreamloadError as error: print(error)\n"
    )
    said = run(tmp_path, "-c", code)
    assert "has no Buffer.ensure_allocated" in said
    assert "pip install 'tinygrad>=0.13" in said


@pytest.mark.parametrize("moved", ["cl_errors", "clGetCommandQueueInfo"])
def test_a_device_whose_fast_way_has_moved_takes_the_public_one(moved: str, tmp_path: Path) -> None:
    needs.device("CL")
    code = (
        "import sys, numpy as np, streamload\n"
        "from safetensors.numpy import save_file\n"
        "import tinygrad.runtime.ops_cl as ops, tinygrad.runtime.autogen.opencl as opencl\n"
        f"for module in (ops, opencl): module.__dict__.pop({moved!r}, None)\n"
        "array = np.arange(70000, dtype=np.float32)\n"
        "path = sys.argv[1] + '/x.safetensors'\n"
        "save_file({'w': array}, path)\n"
        "report = streamload.load_state_dict(None, path, device='CL', progress=False)\n"
        "assert (report.state_dict['w'].numpy() == array).all()\n"
        "print(type(streamload.devices.names.framework('tinygrad').device('CL')).__name__)\n"
    )
    assert "_TensorDevice" in run(tmp_path, "-c", code, str(tmp_path))
