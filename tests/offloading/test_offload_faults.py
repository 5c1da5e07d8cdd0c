"""Faults of offloaded torch modules: a clear error, and the model runs again or says why not."""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import offloading_models as models
import pytest
import torch
from recording import recorded
from torch import nn

import streamload
from streamload.errors import (
    CheckpointError,
    FileChangedError,
    OffloadError,
    StreamloadError,
    TruncatedFileError,
)

ROOT = Path(streamload.__file__).parent.parent
_BUDGET = 200_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.save(models.built("llama"), tmp_path / "model")


def _threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("streamload")]


def _right(model: Any) -> bool:
    return torch.equal(models.logits(model), models.logits(models.built("llama")))


def _gone(file: Path) -> None:
    file.rename(file.with_suffix(".away"))


def _truncated(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _rewritten(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-4000, 2)
        opened.write(b"\1" * 4000)


def _replaced(file: Path) -> None:
    other = file.with_suffix(".other")
    shutil.copy(file, other)
    os.replace(other, file)


@pytest.mark.parametrize("change", [_gone, _truncated, _rewritten, _replaced])
@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
def test_a_file_that_changes_is_named_and_the_model_can_be_closed(
    path: Path, change: Callable[[Path], None], inside: bool
) -> None:
    file = path / "model.safetensors"
    expected = models.logits(models.built("llama"))
    model = models.built("llama")
    offloaded = streamload.offload(model, path, device="cpu", budget=_BUDGET)
    assert torch.equal(models.logits(model), expected)
    if inside:
        hook = model.model.layers[1].register_forward_hook(lambda *_: change(file))
    else:
        hook = None
        change(file)
    try:
        with pytest.raises(CheckpointError) as caught:
            for _ in range(3):
                assert torch.equal(models.logits(model), expected)
                if hook is not None:
                    hook.remove()
    finally:
        if hook is not None:
            hook.remove()
    assert str(file) in str(caught.value)
    if change is not _gone:
        assert isinstance(caught.value, (FileChangedError, TruncatedFileError))
    offloaded.close()
    assert not _threads()


def test_a_read_error_in_the_middle_is_raised_and_the_next_pass_is_right(path: Path) -> None:
    model = models.built("llama")
    with recorded(path) as disk, streamload.offload(model, path, device="cpu", budget=_BUDGET):
        assert _right(model)
        disk.bad = range(600_000, 600_010)
        with pytest.raises(CheckpointError, match="Input/output error"):
            for _ in range(3):
                models.logits(model)
        disk.bad = range(0)
        assert _right(model)
    assert not _threads()


@pytest.mark.parametrize("error", [MemoryError("full"), RuntimeError("wrong"), KeyboardInterrupt()])
def test_an_exception_in_forward_leaves_a_model_that_runs(path: Path, error: BaseException) -> None:
    model = models.built("llama")

    def fail(*_: Any) -> None:
        raise error

    with streamload.offload(model, path, device="cpu", budget=_BUDGET):
        hook = model.model.layers[2].mlp.register_forward_pre_hook(fail)
        with pytest.raises(type(error)):
            models.logits(model)
        hook.remove()
        assert _right(model)
    assert not _threads()


@pytest.mark.parametrize("layer", [0, 1])
def test_two_threads_are_told_and_a_pass_is_not_closed_under(path: Path, layer: int) -> None:
    """The one that comes second is refused, even in the same layer; so is `close`, inside too."""
    model = models.built("llama")
    offloaded = streamload.offload(model, path, device="cpu", budget=_BUDGET)
    found: list[str] = []

    def beside(call: Callable[[], Any]) -> None:
        def run() -> None:
            with pytest.raises(OffloadError) as caught:
                call()
            found.append(str(caught.value))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    def inside(*_: Any) -> None:
        beside(lambda: models.logits(model))
        beside(offloaded.close)
        with pytest.raises(OffloadError, match="pass"):
            offloaded.close()

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(inside)
    assert _right(model)
    hook.remove()
    assert "two threads" in found[0] and "pass is under way" in found[1]
    assert _right(model)
    offloaded.close()
    assert not _threads()


def test_rows_of_an_embedding_are_not_put_where_other_threads_see_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = models.built("llama"), []
    embedding, embed = model.model.embed_tokens, nn.functional.embedding

    def looked(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(embedding.weight)
        return embed(*args, **kwargs)

    with streamload.offload(model, path, device="cpu", budget=_BUDGET):
        before = embedding.weight
        monkeypatch.setattr(nn.functional, "embedding", looked)
        assert _right(model)
        assert seen[0] is before  # the other is of the model that is loaded


def test_gradients_are_refused_where_every_layer_streams(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).eval()

    path = models.save(build(), tmp_path / "model")
    budget, model = models.least_budget(build, path), build()
    with streamload.offload(model, path, device="cpu", budget=budget) as offloaded:
        assert not offloaded.plan.residency.stays
        with pytest.raises(OffloadError, match="no gradients go through layers"):
            model(torch.ones(1, 64)).sum().backward()


def _backward(model: Any) -> None:
    model(models.IDS, labels=models.IDS).loss.backward()


def _trained(model: Any) -> None:
    model.train()
    try:
        model(models.IDS)
    finally:
        model.eval()


_WEIGHT = "model.layers.0.mlp.up_proj"
_REFUSED: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda m: m.state_dict(),
    "state_dict of a layer": lambda m: m.model.layers[0].state_dict(),
    "state_dict inside a layer": lambda m: m.model.layers[0].mlp.state_dict(),
    "save_pretrained": lambda m: m.save_pretrained("unused"),
    "to": lambda m: m.to(torch.float16),
    "to another device": lambda m: m.to("meta"),
    "share_memory": lambda m: m.share_memory(),
    "to inside a layer": lambda m: m.model.layers[0].mlp.to(torch.float16),
    "deepcopy": copy.deepcopy,
    "deepcopy inside a layer": lambda m: copy.deepcopy(m.model.layers[0].mlp),
    "pickle": pickle.dumps,
    "load_state_dict": lambda m: m.load_state_dict({}),
    "addition": lambda m: m.get_submodule(_WEIGHT).weight + 1,
    "data": lambda m: m.get_submodule(_WEIGHT).weight.data,
    "linear": lambda m: m.get_submodule(_WEIGHT)(torch.zeros(1, 64)),
    "initialisation": lambda m: nn.init.zeros_(m.get_submodule(_WEIGHT).weight),
    "parametrize": lambda m: nn.utils.parametrize.register_parametrization(
        m.get_submodule(_WEIGHT), "weight", nn.Identity()
    ),
    "functional_call": lambda m: torch.func.functional_call(
        m, dict(models.built("llama").named_parameters()), (models.IDS,)
    ),
    "backward": _backward,
    "train": _trained,
    "resize": lambda m: m.resize_token_embeddings(600),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_an_offloaded_model_does_not_do_is_refused_by_name(path: Path, name: str) -> None:
    model = models.built("llama")
    with streamload.offload(model, path, device="cpu", budget=_BUDGET):
        with pytest.raises(OffloadError, match=r"offloaded|streams"):
            _REFUSED[name](model)
        assert _right(model)
    assert not _threads()


def test_a_model_may_be_moved_to_where_it_is(path: Path) -> None:
    model = models.built("llama")
    with streamload.offload(model, path, device="cpu", budget=_BUDGET):
        dtype = next(model.parameters()).dtype
        assert model.to("cpu") is model.to(dtype) is model.cpu() is model
        assert _right(model)


@pytest.mark.parametrize("name", ["trace", "make_fx", "export"])
def test_a_recording_of_a_pass_is_refused(tmp_path: Path, name: str) -> None:
    """It would compute with whatever is in the slots: every layer with the same weights."""
    from torch.fx.experimental.proxy_tensor import make_fx

    record: Callable[..., Any] = {
        "trace": lambda model, x: torch.jit.trace(model, (x,), check_trace=False),
        "make_fx": lambda model, x: make_fx(model)(x),
        "export": lambda model, x: torch.export.export(model, (x,)),
    }[name]

    def built() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval()

    path = models.save(built(), tmp_path / "model")
    model, x = built(), torch.ones(2, 64)
    with streamload.offload(model, path, device="cpu", budget=50_000) as offloaded, torch.no_grad():
        assert offloaded.plan.residency.streams
        with pytest.raises(OffloadError):
            record(model, x)
        assert torch.equal(model(x), built()(x))
    with streamload.stream_layers(path, device="cpu", budget=50_000) as layers:

        def last(x: torch.Tensor) -> torch.Tensor:
            for _, tensors in layers:
                x = x * next(iter(tensors.values())).sum()
            return x

        if name != "export":
            with pytest.raises(OffloadError, match="traced"):
                record(last, x)
        assert [name for name, _ in layers] == [str(n) for n in range(6)]


def test_loading_and_offloading_again_say_to_close_first(path: Path) -> None:
    model = models.built("llama")
    with streamload.offload(model, path, device="cpu", budget=_BUDGET):
        for call in (streamload.load_state_dict, streamload.offload):
            with pytest.raises(StreamloadError, match="close"):
                call(model, path, device="cpu")
        assert _right(model)


def test_data_parallel_on_one_device_works(path: Path) -> None:
    model = models.built("llama")
    with streamload.offload(model, path, device="cpu", budget=_BUDGET), torch.no_grad():
        found = nn.DataParallel(model)(input_ids=models.IDS).logits
        assert torch.equal(found, models.logits(models.built("llama")))


_SCRIPT = """
import sys
import offloading_models as models
import streamload
model = models.built("llama")
offloaded = streamload.offload(model, sys.argv[1], device="cpu", budget=200_000)
models.logits(model)
print("ran", flush=True)
"""
_LOOP = """
try:
    while True:
        models.logits(model)
except KeyboardInterrupt:
    import torch
    assert torch.equal(models.logits(model), models.logits(models.built("llama")))
    offloaded.close()
    import threading
    assert threading.active_count() == 1, threading.enumerate()
    print("again", flush=True)
"""


def _process(script: str, path: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


# Called last at exit: the threads of an open offload have ended, so that Python ends none in C++.
_AT_EXIT = """
import atexit, sys, threading
atexit.register(lambda: sys.stdout.write(f"{threading.active_count()}\\n"))
from streamload.offloading import prefetch
prefetch._LOOK_S = 60.0
"""


@pytest.mark.slow
@pytest.mark.parametrize("_", range(3))
def test_a_script_that_ends_without_close_ends_at_once(path: Path, _: int) -> None:
    """Threads that bring layers keep no interpreter waiting, and end before it."""
    process = _process(_AT_EXIT + _SCRIPT, path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ran\n"
    begun = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert out == "1\n"
    # torchao says on import which of its libraries it could not load
    assert [line for line in err.splitlines() if not re.search("torchao|pytree", line)] == []
    assert time.monotonic() - begun < 30
    assert process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_in_a_pass_leaves_a_model_that_runs(path: Path) -> None:
    for delay in (0.0, 0.05, 0.13):
        process = _process(_SCRIPT + _LOOP, path)
        assert process.stdout is not None
        assert process.stdout.readline() == "ran\n"
        time.sleep(delay + 0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert out == "again\n", err
        assert process.returncode == 0, err
