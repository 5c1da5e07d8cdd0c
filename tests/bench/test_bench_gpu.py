"""The sections gpu-... of scripts/bench: that they run anywhere."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import cuda_stand_in
import make_checkpoint as mk
import needs
import pytest
from bench_parts.gpu_section import GPU_SECTIONS
from bench_parts.section import NotHereError
from bench_parts.section import Options as BenchOptions

from streamload.checkpoint.open import open_checkpoint
from streamload.core.dtypes import parse_dtype

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench"
QUICK = ("gpu-budget",)  # the script runs "gpu-cast" below


def gpu_options(work: Path, device: str = "host", **more: Any) -> BenchOptions:
    given: dict[str, Any] = {
        "nbytes": 2_000_000,
        "cold_nbytes": 1_000_000,
        "tensors": 50,
        "shards": 2,
        "runs": 1,
        "seconds": 60.0,
        "torch_device": device,
        "tinygrad_device": device,
        "sites": {},
        "work": work,
        "say": lambda text: None,
    }
    return BenchOptions(**given | more)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in GPU_SECTIONS]
)
def test_a_section_runs_without_a_gpu(tmp_path: Path, name: str) -> None:
    """Each on memory of the host: rows, targets that are numbers, tensors equal to the file's."""
    device = "host"
    if name == "gpu-tinygrad":
        needs.device(device := "CL")
    section = GPU_SECTIONS[name](gpu_options(tmp_path, device))
    assert section.name == name
    assert section.rows and section.raw and section.targets
    assert all(math.isfinite(target.value) for target in section.targets)
    for target in section.targets:
        if "equal to the file's" in target.what or "refused" in target.what:
            assert target.met, target
    json.dumps(section.to_json())
    kept = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert kept <= {"large", "medium"}  # those that other sections use


def test_a_device_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotHereError, match="nowhere"):
        GPU_SECTIONS["gpu-warm"](gpu_options(tmp_path, "tinygrad:nowhere"))


@pytest.mark.slow
def test_the_script_runs_sections_of_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, SCRIPT, "gpu-cast", "gpu-tinygrad", "--size", "1MB", "--runs", "1"]
    command += ["--torch-device", "host", "--tinygrad-device", "tinygrad:nowhere"]
    command += ["--work", tmp_path, "--keep", "--json", out, "--charts", tmp_path / "charts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sections = json.loads(out.read_text())["sections"]
    assert list(sections) == ["gpu-cast", "gpu-tinygrad"]
    assert sections["gpu-cast"]["rows"] and sections["gpu-cast"]["raw"]
    assert "nowhere" in sections["gpu-tinygrad"]["not_here"]
    assert (tmp_path / "charts/gpu-cast.svg").read_text().startswith("<svg")
    assert (tmp_path / "large-1000000/config.json").exists()


# --- the checkpoints ------------------------------------------------------------------------------


def test_many_tensors_are_all_alike(tmp_path: Path) -> None:
    shape = mk.many_of_size(100_000, parse_dtype("bfloat16"), 300)
    nbytes = mk.make_checkpoint(tmp_path / "out", shape, shards=3)
    found = open_checkpoint(tmp_path / "out")
    assert len(found.tensors) == 300
    assert found.nbytes == nbytes <= 100_000
    assert {info.shape for info in found.tensors.values()} == {(166,)}
    data = (tmp_path / "out" / "model-00001-of-00003.safetensors").read_bytes()
    assert len({data[i : i + 332] for i in range(len(data) - 10 * 332, len(data), 332)}) == 10
    with pytest.raises(ValueError, match="200 tensors"):
        mk.many_of_size(300, parse_dtype("bfloat16"), 200)


def test_eight_bits_are_written(tmp_path: Path) -> None:
    """A checkpoint of 8-bit floats, half as large as one of bf16; without extremes."""
    dtype = parse_dtype("float8_e4m3fn")
    shape = mk.shape_of_size(100_000, dtype)
    mk.make_checkpoint(tmp_path / "out", shape, dtype=dtype)
    found = open_checkpoint(tmp_path / "out")
    assert {info.dtype.code for info in found.tensors.values()} == {"F8_E4M3"}
    assert 90_000 < found.nbytes <= 100_000
    with pytest.raises(ValueError, match="expected one of bfloat16"):
        mk.make_checkpoint(tmp_path / "other", shape, dtype=dtype, plant_extremes=True)


# --- with a stand-in for the driver ---------------------------------------------------------------


@pytest.mark.slow
def test_copies_give_everything_back(tmp_path: Path) -> None:
    folder = cuda_stand_in.build(tmp_path).parent
    code = """
import ctypes
from streamload.bench import limits
from streamload.bench.processes import device_meter

driver = ctypes.CDLL("libcuda.so.1")
used_nbytes = device_meter(1)
before = used_nbytes()
rate = limits.copy(1)
assert rate.nbytes > 0 and rate.seconds > 0, rate
assert "pinned slots" in rate.how, rate
memory = limits.memory("torch", "cuda:1", 1)()
assert memory["nbytes"] == 8 * 2**29 and memory["seconds"] > 0, memory
assert used_nbytes() == before
for name in ("registered", "streams", "events"):
    assert ctypes.c_int.in_dll(driver, name).value == 0, name

address = ctypes.c_uint64()
context = limits.Context.primary("cuda:1", 1)
with context.current():
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(2**20)) == 0
assert used_nbytes() - before == 2**20
"""
    cuda_stand_in.run(folder, code)
