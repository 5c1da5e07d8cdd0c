"""`streamload.stream_layers`: one layer after the other, in slots under a budget."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import needs
import numpy as np
import pytest
from safetensors_files import write_arrays, write_safetensors

import streamload
from streamload.errors import CheckpointError, OffloadError, PlanInfeasibleError

LAYERS, WIDTH, WORDS = 6, 128, 1024
LAYER_NBYTES = (WIDTH + 1) * WIDTH * 4
#: Two slots, the embedding or the head beside them, and little else.
BUDGET = 1_300_000
NAMES = ["embedding", *(f"model.layers.{n}" for n in range(LAYERS)), "head"]
DEVICES = ("host", "cpu", "CL", pytest.param("CPU", marks=pytest.mark.slow))


def arrays(seed: int = 0, tied: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a small language model, in an order that is not the one in which they run."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (WORDS, WIDTH)} if not tied else {}
    shapes |= {"model.norm.weight": (WIDTH,)}
    for n in range(LAYERS):
        shapes[f"model.layers.{n}.proj.weight"] = (WIDTH, WIDTH)
        shapes[f"model.layers.{n}.norm.weight"] = (WIDTH,)
    shapes["model.embed_tokens.weight"] = (WORDS, WIDTH)
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def write(folder: Path, tied: bool = False) -> Path:
    write_arrays(folder / "model.safetensors", arrays(tied=tied))
    if tied:
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def array(tensor: Any) -> np.ndarray[Any, Any]:
    found = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
    return np.array(found)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("streamload")]


def ended() -> bool:
    until = time.monotonic() + 5
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    return not threads()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["checkpoint", "float16"])
def test_values_are_those_of_a_load_pass_after_pass(path: Path, device: str, dtype: str) -> None:
    if device == "cpu":
        needs.module("torch")
    if device in ("CL", "CPU"):
        needs.device(device)
    given: dict[str, Any] = {"device": device, "dtype": dtype}
    expected = streamload.load_state_dict(None, path, **given).state_dict
    everything = sum(array(t).nbytes for t in expected.values())
    for budget in (everything * 2 // 3, everything * 4 // 5, 2 * everything):
        with streamload.stream_layers(path, budget=budget, **given) as layers:
            assert layers.plan.needed_nbytes <= budget
            assert bool(layers.plan.residency.streams) == (budget < everything)
            for _ in range(3):
                names, found = [], {}
                for name, tensors in layers:
                    names.append(name)
                    found.update({each: array(tensor) for each, tensor in tensors.items()})
                assert names == NAMES
                assert found.keys() == expected.keys()
                for each, values in found.items():
                    assert np.array_equal(values, array(expected[each])), each
            assert layers.report.passes == 3
            assert bool(layers.report.read_nbytes) == (budget < everything)
        assert not threads()


def test_slots_have_addresses_that_stay(path: Path) -> None:
    seen = set()
    with streamload.stream_layers(path, device="host", budget=BUDGET, stay="*e?bed*") as layers:
        streams = layers.plan.residency.streams
        assert "model.embed_tokens.weight" in layers.resident
        for _ in range(3):
            for name, tensors in layers:
                if name in streams and name in NAMES[1:-1]:
                    weight = tensors[f"{name}.proj.weight"]
                    seen.add(weight.__array_interface__["data"][0])
    assert len(streams) > layers.plan.residency.slots >= len(seen)
    assert not layers.resident


def test_a_loop_outside_of_a_with_block_is_one_pass(path: Path) -> None:
    """Whether it ends, is left or raises: threads end, and it says how to have several."""
    layers = streamload.stream_layers(path, device="host", budget=BUDGET)
    assert [name for name, _ in layers] == NAMES
    assert not threads()
    with pytest.raises(OffloadError, match=r"with streamload\.stream_layers"):
        next(iter(layers))
    for _ in streamload.stream_layers(path, device="host", budget=BUDGET):
        break
    assert not threads()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            for name, _ in streamload.stream_layers(path, device="host", budget=BUDGET):
                if name == "model.layers.2":
                    raise error
        assert not threads()
    layers = streamload.stream_layers(path, device="host", budget=BUDGET)
    del layers
    gc.collect()
    assert ended()


def test_a_pass_may_be_left_and_another_begun(path: Path) -> None:
    expected = arrays()
    with streamload.stream_layers(path, device="host", budget=BUDGET) as layers:
        for stop in (0, 1, 4, len(NAMES) - 1):
            for at, (_, tensors) in enumerate(layers):
                for each, tensor in tensors.items():
                    assert np.array_equal(tensor, expected[each])
                if at == stop:
                    break
        with pytest.raises(ValueError, match="mine"):
            for _ in layers:
                raise ValueError("mine")
        assert [name for name, _ in layers] == NAMES
        steps = iter(layers)
        next(steps)
        with pytest.raises(OffloadError, match="another loop"):
            next(iter(layers))
        next(steps)
    with pytest.raises(OffloadError, match="closed"):  # the block has ended
        next(steps)
    layers.close()  # nothing
    assert not threads()


def test_one_thread_runs_a_loop(path: Path) -> None:
    caught: list[str] = []

    def refused(call: Any) -> None:
        try:
            call()
        except OffloadError as error:
            caught.append(str(error))

    with streamload.stream_layers(path, device="host", budget=BUDGET) as layers:
        for name, _ in layers:
            if name == layers.plan.residency.streams[1]:
                thread = threading.Thread(target=refused, args=(layers.close,))
                thread.start()
                thread.join()
        assert layers.plan.residency.streams[1] in caught[0]
        steps = iter(layers)
        while layers._number is None:
            next(steps)
        thread = threading.Thread(target=refused, args=(steps.__next__,))
        thread.start()
        thread.join()
        assert len(caught) == 2
        layers._take_back()
        assert [name for name, _ in layers] == NAMES
    assert not threads()


def test_a_file_that_is_gone_ends_the_loop_and_the_next_reads_again(
    path: Path, tmp_path: Path
) -> None:
    expected, file = arrays(), path / "model.safetensors"
    with streamload.stream_layers(path, device="host", budget=BUDGET) as layers:
        os.link(file, tmp_path / "kept")
        file.unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            for _, tensors in layers:
                for each, tensor in tensors.items():
                    assert np.array_equal(tensor, expected[each])
        os.link(tmp_path / "kept", file)  # the file that it was
        assert [name for name, _ in layers] == NAMES


def test_a_tied_head_gets_the_embedding_which_stays(tmp_path: Path) -> None:
    """Under its own name, in the step where a pass needs it."""
    path = write(tmp_path / "tied", tied=True)
    with streamload.stream_layers(path, device="host", budget=750_000) as layers:
        found = dict(layers)
        assert layers.plan.residency.streams
        embedding = found["embedding"]["model.embed_tokens.weight"]
        assert found["head"].keys() == {"model.norm.weight", "lm_head.weight"}
        assert found["head"]["lm_head.weight"] is embedding
        assert np.array_equal(embedding, arrays(tied=True)["model.embed_tokens.weight"])


def test_layers_that_names_do_not_tell_are_named(tmp_path: Path) -> None:
    shapes = {f"net.{part}.w": (64, 64) for part in ("first", "second", "third")}
    tensors = {n: ("F32", s, np.full(s, at, np.float32).tobytes())
               for at, (n, s) in enumerate((shapes | {"b": (64,)}).items())}  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", tensors)
    given: dict[str, Any] = {"device": "host", "budget": 2.5 * 64 * 64 * 4}
    found = [(name, list(t)) for name, t in streamload.stream_layers(tmp_path, **given)]
    assert found == [(name, [name]) for name in tensors]
    named = streamload.stream_layers(tmp_path, layers="net.*", **given)
    assert [name for name, _ in named] == ["net.first", "net.second", "net.third", "b"]
    with pytest.raises(ValueError, match="no module"):
        streamload.stream_layers(tmp_path, layers="other.*", **given)


def test_layers_in_host_memory_are_read_from_there(path: Path) -> None:
    expected = arrays()
    with streamload.stream_layers(path, device="host", budget=BUDGET, host="8MB") as layers:
        assert layers.plan.host == layers.plan.residency.streams
        (path / "model.safetensors").unlink()
        for _, tensors in layers:
            for each, tensor in tensors.items():
                assert np.array_equal(tensor, expected[each])


def test_what_is_refused(path: Path) -> None:
    """Before anything is read: too little room, and options that make no sense here."""
    with pytest.raises(PlanInfeasibleError) as caught:
        streamload.stream_layers(path, device="host", budget=LAYER_NBYTES)
    assert caught.value.needed_nbytes > LAYER_NBYTES
    for wrong in ({"quant": "int8"}, {"residence": "mapped"}, {"device": ["host", "cpu"]},
                  {"tokens": 0}, {"stay": "nothing*"}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s")):
            streamload.stream_layers(path, **({"device": "host"} | wrong))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        streamload.stream_layers(path, strict=False)  # type: ignore[call-arg]


def test_torch_refuses_gradients_through_a_layer_that_is_gone(path: Path) -> None:
    """Plain tensors; a backward that would read the next layer's weights raises."""
    torch = needs.module("torch")
    x = torch.ones(1, WIDTH, requires_grad=True)
    total = x
    resident = torch.tensor(arrays()["model.layers.0.proj.weight"])
    with streamload.stream_layers(path, device="cpu", budget=BUDGET, reader="pread") as layers:
        assert not layers.plan.views
        assert "model.layers.0" in layers.plan.residency.streams
        for name, tensors in layers:
            assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
            if name == "model.layers.0":
                kept = tensors[f"{name}.proj.weight"]
                inner = x.detach().requires_grad_()
                (inner @ kept).sum().backward()
                assert torch.allclose(inner.grad, resident.sum(1)[None], atol=1e-4)
            if name in NAMES[1:-1]:
                total = total @ tensors[f"{name}.proj.weight"]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.sum().backward()
    assert not kept.numel()  # it goes with the slots, whoever refers to it


@pytest.mark.parametrize("device", DEVICES[2:])
def test_tinygrad_computes_with_a_layer_before_the_next_comes(path: Path, device: str) -> None:
    """What waits for its weights is computed; a tensor that was kept raises when it is used."""
    needs.device(device)
    from tinygrad import Tensor, TinyJit

    expected = arrays()
    x = np.ones((1, WIDTH), np.float32)
    for n in range(LAYERS):
        x = np.tanh(x @ expected[f"model.layers.{n}.proj.weight"] / WIDTH)
    with streamload.stream_layers(path, device=device, budget=BUDGET) as layers:
        streams = layers.plan.residency.streams
        assert len({*streams} & {*NAMES[1:-1]}) > 2
        for _ in range(2):
            y = Tensor.ones(1, WIDTH, device=device).contiguous()
            kept: dict[str, Any] = {}
            for name, tensors in layers:
                if name in NAMES[1:-1]:
                    y = (y @ tensors[f"{name}.proj.weight"] / WIDTH).tanh()  # lazily
                    kept[name] = tensors[f"{name}.proj.weight"]
            assert np.allclose(y.numpy(), x, atol=1e-5)
            with pytest.raises(Exception, match="layer before"):
                kept[streams[1]].numpy()

        @TinyJit
        def whole(y: Any) -> Any:
            for name, tensors in layers:
                if name in NAMES[1:-1]:
                    y = (y @ tensors[f"{name}.proj.weight"]).realize()
            return y

        with pytest.raises(OffloadError, match="TinyJit"):
            for _ in range(3):
                whole(Tensor.ones(1, WIDTH, device=device).contiguous().realize())
        assert [name for name, _ in layers] == NAMES
    assert not threads()
