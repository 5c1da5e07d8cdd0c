"""Models of several files on a device by CUDA's driver, with a strict stand-in in its place.

torch computes on the CPU, in the stand-in's memory. What only a GPU can show is in
test_offload_cuda.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import cuda_stand_in
import needs
import pytest

torch = needs.module("torch")
needs.module("transformers")

import offloading_models as models  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import streamload  # noqa: E402

PRELUDE = """
import ctypes, gc, sys, time
from pathlib import Path

import torch
import offloading_models as models
import streamload
from bulk_stand_in import Driven
from safetensors.torch import load_file
from streamload.devices.torch import device as torch_devices
from streamload.offloading import prefetch
from streamload.transformers import from_pretrained

torch.set_num_threads(1)
prefetch._IDLE_S = 0.3
driver = ctypes.CDLL("libcuda.so.1")
whole, *paths = [Path(path) for path in sys.argv[1:]]
given = {"device": "cpu", "progress": False, "threads": 3}

def resident(**options):
    model = from_pretrained(whole, **given, **options)
    return models.logits(model), model.streamload_report.resident_nbytes

def left():
    names = "registered", "host_allocated", "streams", "events"
    found = {name: ctypes.c_int.in_dll(driver, name).value for name in names}
    found["streams"] -= 1  # torch's
    found["used"] = ctypes.c_size_t.in_dll(driver, "used_nbytes").value
    return {name: value for name, value in found.items() if value}

def drive():
    torch_devices._WAYS["cpu"] = Driven
"""


def _bf16(name: str) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        model = models.built(name, 4).bfloat16()
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.bfloat16  # otherwise it is the first file's
        return models.save(model, path)

    return write


def _nf4(path: Path) -> Path:
    plain = _bf16("llama")(path.with_name("plain"))
    streamload.convert(plain, path, quant="nf4", progress=False)
    return path


def _cut(whole: Path, shards: int, *, small_first: bool) -> Path:
    """Write a checkpoint's tensors to so many files, by size: each has some of every layer."""
    folder = whole.parent / f"{whole.name}-{shards}-{small_first}"
    shutil.copytree(whole, folder)
    (folder / "model.safetensors").unlink()
    tensors = sorted(load_file(whole / "model.safetensors").items(), key=lambda t: t[1].nbytes)
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


def _paths(whole: Path, shards: Sequence[int]) -> Sequence[Path]:
    return [whole, *(_cut(whole, n, small_first=small) for n in shards for small in (True, False))]


def _slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("write", "options", "share", "shards"),
    [
        (_bf16("llama"), "", 0.7, [1, 3]),
        _slow(_bf16("llama"), "", 0.7, [2, 4, 5]),
        _slow(_nf4, "", 0.75, [1, 2, 3, 4, 5]),
        _slow(_bf16("llama"), "quant='nf4'", None, [1, 3, 5]),
        _slow(_bf16("llama"), "quant='int8'", None, [1, 3, 5]),
        _slow(_bf16("qwen3-moe"), "", 0.5, [1, 2, 3, 4, 5]),
        _slow(_bf16("qwen3-moe"), "experts_implementation='grouped_mm'", 0.5, [1, 4]),
    ],
)
def test_models_of_several_files(
    write: Callable[[Path], Path],
    options: str,
    share: float | None,
    shards: Sequence[int],
    driver: Path,
    tmp_path: Path,
) -> None:
    """Loaded whole and offloaded, in passes and after a pause, they are right; all is freed.

    No model is offloaded if ``share``, of the bytes that it has whole, is None.
    """
    collect = "gc.collect()" if write is _nf4 else ""  # bitsandbytes' weights refer to modules
    code = (
        PRELUDE
        + f"""
options = dict({options})
expected, nbytes = resident(**options)
drive()
gc.collect()
gc.disable()
for path in paths:
    model = from_pretrained(path, **given, **options)
    assert torch.equal(models.logits(model), expected), path
    del model
    {collect}
    assert not left(), left()
    if {share} is None:
        continue
    budget = int({share} * nbytes)
    model = from_pretrained(path, budget=budget, offload=True, **given, **options)
    found = model.streamload_offload.plan.residency
    assert found.experts or found.streams
    for _ in range(3):
        assert torch.equal(models.logits(model), expected), path
    while "registered" in left():
        time.sleep(0.01)
    assert torch.equal(models.logits(model), expected), path
    model.streamload_offload.close()
    del model
    {collect}
    assert not left(), left()
if {share} is not None:  # it is open at exit
    model = from_pretrained(path, budget=budget, offload=True, **given, **options)
    assert torch.equal(models.logits(model), expected), path
"""
    )
    cuda_stand_in.run(driver, code, *_paths(write(tmp_path / "whole"), shards))


@pytest.mark.parametrize(("options", "step"), [("", 9), ("dtype='float32'", 9), _slow("", 1)])
def test_after_an_error_memory_is_free(
    options: str, step: int, driver: Path, tmp_path: Path
) -> None:
    code = (
        PRELUDE
        + f"""
from streamload.errors import DeviceError

copies = ctypes.c_int.in_dll(driver, "copies_left")
options = dict({options})
expected, nbytes = resident(**options)
drive()
gc.collect()
gc.disable()

def fails(call, *given, **options):
    try:
        call(*given, **options)
    except DeviceError as error:
        return "copy failed" in str(error)
    finally:
        copies.value = -1

path, failed = paths[-1], 0
for copies.value in (1, 9):
    assert fails(from_pretrained, path, **given, **options)
    assert not left(), left()
for n in range(1, 60, {step}):
    budget = int(0.7 * nbytes)
    model = from_pretrained(path, budget=budget, offload=True, **given, **options)
    assert torch.equal(models.logits(model), expected)
    copies.value = n
    failed += bool(fails(models.logits, model))
    assert torch.equal(models.logits(model), expected), n
    model.streamload_offload.close()
    del model
    assert not left(), (n, left())
assert failed
"""
    )
    cuda_stand_in.run(driver, code, *_paths(_bf16("llama")(tmp_path / "whole"), [4]))


@pytest.mark.parametrize("shards", [[3], _slow([1, 2, 4, 5])])
def test_loops_over_several_files(shards: Sequence[int], driver: Path, tmp_path: Path) -> None:
    code = (
        PRELUDE
        + """
expected = load_file(whole / "model.safetensors")
drive()
gc.collect()
gc.disable()
for path in paths:
    budget = sum(t.nbytes for t in expected.values()) // 2
    with streamload.stream_layers(path, device="cpu", budget=budget) as layers:
        assert layers.plan.residency.streams
        for _ in range(3):
            found = set()
            for _, tensors in layers:
                found |= tensors.keys()
                assert all(torch.equal(t, expected[name]) for name, t in tensors.items()), path
            assert found == expected.keys()
    del layers, tensors
    assert not left(), left()
"""
    )
    cuda_stand_in.run(driver, code, *_paths(_bf16("llama")(tmp_path / "whole"), shards))
