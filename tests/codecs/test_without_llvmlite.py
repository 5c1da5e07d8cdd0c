"""Loads, formats and products in processes that have neither llvmlite nor kept kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import cuda_stand_in
import forked
import needs
import pytest
from safetensors_files import write_safetensors

ROOT = Path(__file__).parents[2]

# fast where it is truly absent: with `scripts/test --plain`
pytestmark = [pytest.mark.slow] * (importlib.util.find_spec("llvmlite") is not None)

_PRELUDE = """
import sys
sys.modules["llvmlite"] = None
from pathlib import Path
import numpy as np
import streamload
folder = Path(sys.argv[1])
quiet = {"progress": False}
"""
_COMMAND = """
import runpy, sys
sys.modules["llvmlite"] = None
runpy.run_module("streamload", run_name="__main__", alter_sys=True)
"""
_NOTICE = "llvmlite is not installed: "
_INSTALL = "pip install llvmlite"

_USES = {
    "casts": """
import ml_dtypes
values = np.arange(65536, dtype=np.uint16)
header = b'{"w":{"dtype":"BF16","shape":[65536],"data_offsets":[0,131072]}}'
path = folder / "model.safetensors"
path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
with np.errstate(all="ignore"):
    expected = values.view(ml_dtypes.bfloat16).astype(np.float32).astype(np.float16)
for cast in ("auto", "device"):
    report = streamload.load_state_dict(
        None, path, device="host", dtype="float16", cast=cast, **quiet
    )
    assert np.array_equal(report.state_dict["w"], expected, equal_nan=True)
    assert {p.cast for p in report.plan.placements} == {"numpy"}, report.plan.placements
    assert report.counts["w"].overflowed == 28672
    assert "pip install llvmlite" in str(report.notes) or cast == "device", report.notes
try:
    streamload.load_state_dict(None, path, device="host", dtype="float16", cast="llvm", **quiet)
    sys.exit("there was a kernel")
except streamload.errors.UnsupportedCastError as error:
    assert "pip install llvmlite" in str(error), error
""",
    "stored formats": """
import gguf
sys.path.append(sys.argv[2])
from dequant_samples import every, same, write
from gguf_files import random_blocks
(folder / "safetensors").mkdir()
samples = every()
options = {"device": "host", "dtype": "bfloat16"} | quiet
report = streamload.load_state_dict(None, write(folder / "safetensors", samples), **options)
for sample in samples:
    assert same(report.state_dict[sample.name], sample.rounded("bfloat16")), sample.name
assert any("pip install llvmlite" in note for note in report.notes), report.notes
casts = {p.name: p.cast for p in report.plan.placements}
assert {casts[sample.name] for sample in samples} == {"numpy"}, casts
""",
    "blocks": """
import gguf
sys.path.append(sys.argv[2])
from dequant_samples import same
from gguf_files import random_blocks
writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
expected = {}
for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"):
    blocks = random_blocks(kind.lower(), 4, 512)
    type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(f"made.{kind}", blocks, raw_dtype=type)
    expected[f"made.{kind}"] = gguf.quants.dequantize(blocks, type)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
report = streamload.load_state_dict(
    None, folder / "a.gguf", device="host", dtype="float32", mapping=None, **quiet
)
for name, array in expected.items():
    assert same(report.state_dict[name], array), name
""",
    "products": """
import torch
from safetensors.torch import save_file
torch.manual_seed(3)
tensors = {"0.weight": torch.randn(40, 64), "0.bias": torch.randn(40)}
save_file(tensors, folder / "model.safetensors")
x = torch.randn(3, 64)
for quant in ("int8", "nf4", "nf4-nested", "q8_0", "q4_0"):
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 40))
    streamload.load_state_dict(model, folder, device="cpu", quant=quant, **quiet)
    linear = model[0]
    weight = linear.dequantize() if hasattr(linear, "dequantize") else linear.weight
    expected = torch.nn.functional.linear(x, torch.as_tensor(weight).float(), linear.bias)
    assert torch.allclose(model(x), expected, atol=1e-4), quant
""",
}


def run(folder: Path, code: str, *arguments: str) -> tuple[str, str]:
    """Return what a process prints, and what it complains of, that cannot import llvmlite."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    argv = [sys.executable, "-c", code, *arguments]
    of = forked.TORCH if "torch" in code else forked.COMMANDS
    done = forked.run(argv, of, env=variables | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("use", _USES)
def test_numpy_and_torch_do_the_same(use: str, tmp_path: Path) -> None:
    """The bits are right, plans say that numpy casts, and one notice says what it costs."""
    needs.module("gguf")
    _, said = run(tmp_path, _PRELUDE + _USES[use], str(tmp_path), str(ROOT / "tests/support"))
    assert said.count(_NOTICE) == 1 and _INSTALL in said, said


def test_the_commands_name_the_extra(tmp_path: Path) -> None:
    """``devices --json`` lists it for each device; a notice of a load stands on stderr alone."""
    out, _ = run(tmp_path, _COMMAND, "devices", "host", "--json")
    assert [row["missing"] for row in json.loads(out)] == [{"llvmlite": _INSTALL}]
    out, _ = run(tmp_path, _COMMAND, "devices", "host")
    assert out.splitlines()[-1] == f"llvmlite is not installed: {_INSTALL}"
    path = write_safetensors(tmp_path / "a.safetensors", {"w": ("BF16", (4,), bytes(8))})
    load = (_COMMAND, "load", str(path), "--device", "host", "--dtype", "float16", "--json")
    out, said = run(tmp_path, *load)
    assert json.loads(out)["plan"] and said.count(_NOTICE) == 1, (out, said)
    assert _NOTICE not in run(tmp_path, *load, "--quiet")[1]


def test_cuda_copies_by_a_loop_in_python(tmp_path: Path) -> None:
    """The host casts, in numpy; the bytes are right, whatever `cast=` is but LLVM's."""
    folder = cuda_stand_in.build(tmp_path).parent
    code = (
        _PRELUDE
        + """
import ctypes
import ml_dtypes
from streamload.devices import base, probing

probing._PROBES["tinygrad", "CUDA", False] = base.ProbeResult("CUDA", True)
probing._PROBES["tinygrad", "CUDA", True] = base.ProbeResult("CUDA", True)
values = np.random.default_rng(2).standard_normal(300_000).astype(ml_dtypes.bfloat16)
header = b'{"w":{"dtype":"BF16","shape":[1875,160],"data_offsets":[0,600000]}}'
path = folder / "model.safetensors"
path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())

def load(**options):
    budget = streamload.Budget(10_000_000, host=8 * 2**20)
    return streamload.load_state_dict(
        None, path, device="CUDA", budget=budget, chunk_nbytes=65536, **options, **quiet
    )

def memory(report):
    buffer = report.state_dict["w"].uop.base.buffer
    return ctypes.string_at(buffer._buf.value, buffer.nbytes)

assert streamload.devices.names.framework("tinygrad").device("CUDA").bulk is None
assert memory(load(dtype="checkpoint")) == values.tobytes()
expected = values.astype(np.float32).astype(np.float16).tobytes()
for cast in ("auto", "device", "numpy"):
    report = load(dtype="float16", cast=cast)
    assert memory(report) == expected, cast
    assert {p.cast for p in report.plan.placements} == {"numpy"}, cast
report = None
for quant in ("int8", "q8_0"):
    load(dtype="float16", quant=quant)
"""
    )
    cuda_stand_in.run(folder, code, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
