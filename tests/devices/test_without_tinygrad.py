"""What users of torch do, in processes that cannot import tinygrad."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forked
import needs
import pytest

ROOT = Path(__file__).parents[2]

# what sitecustomize says to the children of a process, which has imported torch alone
_HIDE = """
import sys
assert not {"streamload", "tinygrad"} & set(sys.modules)
sys.modules["tinygrad"] = None
"""
_PRELUDE = """
from pathlib import Path
import streamload
folder = Path(sys.argv[1])
quiet = {"progress": False}
"""
_COMMAND = """
import runpy
runpy.run_module("streamload", run_name="__main__", alter_sys=True)
"""

_USES = {
    "module": """
import torch
from safetensors.torch import save_file
there = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
save_file(there.state_dict(), folder / "model.safetensors")
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
report = streamload.load_state_dict(model, folder, device="cpu", **quiet)
assert all(torch.equal(t, there.state_dict()[n]) for n, t in model.state_dict().items())
streamload.load_state_dict(model, folder, **quiet)
from streamload.verification.verify import verify
assert (verify(report, streamload.open_checkpoint(folder), model)) == []
print(report)
""",
    "no model": """
import torch
from safetensors.torch import save_file
save_file({"w": torch.arange(6.0)}, folder / "model.safetensors")
for device in (None, "auto", "cpu", "torch", "host"):
    report = streamload.load_state_dict(None, folder, device=device, **quiet)
    assert report.state_dict["w"].tolist() == list(range(6)), device
assert streamload.load_state_dict(None, folder, **quiet).state_dict["w"].device.type == "cpu"
print(streamload.plan(folder), streamload.plan(folder, device="cpu", budget="1GB"))
print(streamload.split(folder, nodes=[streamload.Node("a", "1GB")], dtype="float16"))
try:
    streamload.load_state_dict({}, folder, **quiet)
except streamload.errors.StateDictMismatchError:
    pass
try:
    streamload.load_state_dict(None, folder, device="CL", **quiet)
except streamload.errors.DeviceNotFoundError as error:
    assert "pip install tinygrad" in str(error), error
else:
    raise AssertionError("there is no CL")
""",
    "distributed": """
import torch
from safetensors.torch import save_file
save_file({"weight": torch.ones(4, 4)}, folder / "model.safetensors")
model = torch.nn.Linear(4, 4, bias=False, device="meta")
streamload.distributed.load_state_dict(model, folder, device="cpu", **quiet)
assert bool((model.weight == 1).all())
""",
    "transformers": """
import torch, transformers
import streamload.transformers
config = transformers.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)
there = transformers.LlamaForCausalLM(config)
there.save_pretrained(folder)
model = streamload.transformers.from_pretrained(folder, device="cpu", **quiet)
model = model[0] if isinstance(model, tuple) else model
assert all(torch.equal(t, there.state_dict()[n]) for n, t in model.state_dict().items())
""",
    "convert": """
import numpy as np
from safetensors.numpy import save_file
save_file({"w": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
streamload.convert(folder / "model.safetensors", folder / "out", dtype="float16")
report = streamload.load_state_dict(None, folder / "out", device="host", **quiet)
assert report.state_dict["w"].dtype == np.float16
""",
}


def run(folder: Path, code: str, *arguments: str) -> str:
    """What a process says that cannot import tinygrad, nor can its children."""
    hiding = folder / "hiding"
    hiding.mkdir(exist_ok=True)
    (hiding / "sitecustomize.py").write_text("import sys; sys.modules['tinygrad'] = None")
    path = os.pathsep.join([str(hiding), str(ROOT)])
    variables = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = forked.run([sys.executable, "-c", _HIDE + code, *arguments], forked.TORCH, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("use", _USES)
def test_torch_needs_no_tinygrad(use: str, tmp_path: Path) -> None:
    needs.module("torch")
    if use == "transformers":
        needs.module("transformers")
    run(tmp_path, _PRELUDE + _USES[use], str(tmp_path))


def test_the_commands_need_no_tinygrad(tmp_path: Path) -> None:
    torch = needs.module("torch")
    from safetensors.torch import save_file

    path = str(tmp_path / "model.safetensors")
    save_file({"w": torch.ones(4, 4)}, path)
    for command in (
        ("inspect", path),
        ("plan", path),
        ("plan", path, "--device", "cpu", "--budget", "1GB"),
        ("load", path),
        ("load", path, "--device", "cpu", "--dtype", "float16"),
        ("devices",),
        ("convert", path, str(tmp_path / "out")),
        ("verify", str(tmp_path / "out")),
        ("diff", path, path),
    ):
        assert run(tmp_path, _COMMAND, *command), command
