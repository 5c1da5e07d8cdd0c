"""Models of several files on a device by CUDA's driver, with a strict stand-in in its place.

torch computes on the CPU, in the stand-in's memory. What only a GPU can show is in
test_offload_cuda.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import cuda_stand_in
import needs
import pytest

torch = needs.module("torch")
needs.module("transformers")

import offloading_models as models  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

PRELUDE = """
import ctypes, gc, sys
from pathlib import Path

import torch
import offloading_models as models
import streamload
from bulk_stand_in import Driven
from streamload.devices.torch import device as torch_devices
from streamload.transformers import from_pretrained

torch.set_num_threads(1)
torch_devices._WAYS["cpu"] = Driven
driver = ctypes.CDLL("libcuda.so.1")
paths = [Path(path) for path in sys.argv[1:]]
given = {"device": "cpu", "progress": False, "threads": 3}

def count(name):
    return ctypes.c_int.in_dll(driver, name).value
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the stand-in for the driver's library is."""
    return cuda_stand_in.build(tmp_path_factory.mktemp("driver")).parent


def _cut(model: torch.nn.Module, folder: Path, shards: int, *, small_first: bool) -> Path:
    """Write a model's tensors to so many files; all layers have some in each."""
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors = sorted(model.state_dict().items(), key=lambda item: item[1].numel())
    tensors = tensors if small_first else tensors[::-1]
    share = -(-len(tensors) // shards)
    files: dict[str, str] = {}
    for at in range(shards):
        name = f"model-{at + 1:05}-of-{shards:05}.safetensors"
        mine = dict(tensors[at * share : (at + 1) * share])
        save_file(mine, folder / name, {"format": "pt"})
        files |= dict.fromkeys(mine, name)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _paths(tmp_path: Path, name: str, times: int = 4) -> Sequence[Path]:
    model = models.built(name, times).bfloat16()
    return [
        _cut(model, tmp_path / f"{shards}-{small}", shards, small_first=small)
        for shards in range(1, 6)
        for small in (True, False)
    ]


def test_layers_of_several_files(folder: Path, tmp_path: Path) -> None:
    """Their copies are waited for, whichever file has the longest reads; nothing is left."""
    cuda_stand_in.run(
        folder,
        PRELUDE
        + """
expected = None
for path in paths:
    if expected is None:
        whole = from_pretrained(path, **given)
        expected = models.logits(whole)
        nbytes = whole.streamload_report.resident_nbytes
        del whole
    model = from_pretrained(path, budget=int(0.7 * nbytes), offload=True, **given)
    assert model.streamload_offload.plan.residency.streams
    with model.streamload_offload:
        for _ in range(4):
            assert torch.equal(models.logits(model), expected), path
""",
        *_paths(tmp_path, "llama"),
    )
