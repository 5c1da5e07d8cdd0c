"""What a call of an offloaded model leaves that Ctrl-C has ended, or that is inside of another."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
needs.module("transformers")

import offloading_models as models  # noqa: E402
from bulk_stand_in import Staged  # noqa: E402

import streamload  # noqa: E402
from streamload.devices.torch import device as torch_devices  # noqa: E402
from streamload.devices.torch.tensors import STREAMED  # noqa: E402
from streamload.errors import OffloadError  # noqa: E402
from streamload.offloading import torch_modules  # noqa: E402
from streamload.offloading.prefetch import Reaper, Rounds  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402


@pytest.fixture(params=["mapped", "copied"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU, whose models stream views of their files, or a stand-in, to which they copy."""
    if request.param == "copied":
        monkeypatch.setitem(torch_devices._WAYS, "cpu", Staged)


def _pair(path: Path, name: str, share: float) -> tuple[Any, Any]:
    models.built(name).bfloat16().save_pretrained(path)
    whole: Any = from_pretrained(path, device="cpu", progress=False)
    budget = int(share * whole.streamload_report.resident_nbytes)
    given: dict[str, Any] = {"device": "cpu", "progress": False, "threads": 2}
    return from_pretrained(path, budget=budget, offload=True, **given), whole


@pytest.fixture
def pair(device: None, tmp_path: Path) -> tuple[Any, Any]:
    return _pair(tmp_path, "llama", 0.6)


def _interrupted(model: Any, expected: torch.Tensor) -> KeyboardInterrupt:
    """The error of a pass; two more are right, though it is kept."""
    with pytest.raises(KeyboardInterrupt) as caught:
        models.logits(model)
    for _ in range(2):
        assert torch.equal(models.logits(model), expected)
    return caught.value


def test_before_weights_are_put_back(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pass puts placeholders there: no weight shows a slot to others."""
    model, whole = pair
    names = [name for name, each in model.named_parameters() if hasattr(each, STREAMED)]
    assert names
    armed = True

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal armed
        if armed and isinstance(arguments[0][0], tuple):  # where each weight is
            armed = False
            raise KeyboardInterrupt
        return zip(*arguments, **options)  # noqa: B905

    monkeypatch.setattr(torch_modules, "zip", interrupted, raising=False)
    with model.streamload_offload:
        _interrupted(model, models.logits(whole))
        assert all(hasattr(model.get_parameter(name), STREAMED) for name in names)


def test_while_weights_are_checked(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What its traceback refers to is not taken for a weight that a layer keeps."""
    model, whole = pair
    of, armed = torch_modules._Lent.of, False

    def interrupted(weight: Any, home: Any) -> Any:
        nonlocal armed
        if armed:
            armed = False
            _kept = home.untyped_storage()
            raise KeyboardInterrupt
        return of(weight, home)

    with model.streamload_offload:
        expected = models.logits(whole)
        assert torch.equal(models.logits(model), expected)
        monkeypatch.setattr(torch_modules._Lent, "of", interrupted)
        armed = True
        kept = _interrupted(model, expected)
        assert not armed and kept.__traceback__


@pytest.mark.parametrize("when", ["before", "after"])
def test_as_the_end_of_a_use_is_awaited(
    when: str, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots become free: later passes do not wait for that end."""
    model, whole = pair
    follow, calls = Reaper.follow, 0

    def interrupted(self: Reaper, ticket: Any, has_ended: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (2, 9, 20) and when == "before":
            raise KeyboardInterrupt
        follow(self, ticket, has_ended)
        if calls in (2, 9, 20) and when == "after":
            raise KeyboardInterrupt

    monkeypatch.setattr(Reaper, "follow", interrupted)
    expected, raised = models.logits(whole), 0
    with model.streamload_offload:
        for _ in range(12):
            try:
                assert torch.equal(models.logits(model), expected)
            except KeyboardInterrupt:
                raised += 1
        assert raised == 3 or not calls  # views have no copies to wait with


def test_a_model_that_runs_inside_of_a_layer(pair: tuple[Any, Any]) -> None:
    """Which is called outside of a pass: the layer keeps its slot until its own end."""
    model, whole = pair
    x = torch.randn(2, 9, 64, dtype=torch.bfloat16)
    places = whole.model.rotary_emb(x, torch.arange(9)[None].expand(2, -1))
    expected = models.logits(whole)

    def call(of: Any, at: int) -> torch.Tensor:
        found: torch.Tensor = of.model.layers[at](x, position_embeddings=places)
        return found

    with model.streamload_offload, torch.no_grad():
        for layer in (3, 1, 0):
            inside = False

            def hook(*_: Any, layer: int = layer) -> None:
                nonlocal inside
                if inside:
                    return
                inside = True
                for _ in range(2):
                    assert torch.equal(models.logits(model), expected)
                for other in {0, 1, 3} - {layer}:
                    assert torch.equal(call(model, other), call(whole, other))

            handle = model.model.layers[layer].self_attn.register_forward_hook(hook)
            assert torch.equal(call(model, layer), call(whole, layer)) and inside
            handle.remove()


@pytest.mark.usefixtures("device")
def test_a_refusal_that_a_hook_catches(tmp_path: Path) -> None:
    model, whole = _pair(tmp_path, "llama", 0.7)
    expected, refused = models.logits(whole), 0
    residency = model.streamload_offload.plan.residency
    assert residency.slots == 1 and len(residency.streams) == 2
    outer, inner = (model.get_submodule(name) for name in residency.streams)

    def inner_refused() -> None:
        nonlocal refused
        for _ in range(2):
            with pytest.raises(OffloadError, match="no room for both"):
                inner(torch.zeros(1, 1, 64, dtype=torch.bfloat16))
            refused += 1

    with model.streamload_offload:
        outer.self_attn.register_forward_pre_hook(lambda *_: inner_refused())
        for _ in range(3):
            assert torch.equal(models.logits(model), expected)
    assert refused == 6


def test_an_interrupted_call_outside_of_a_pass(
    pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layer is not in use: another thread may run the model, and close it."""
    model, whole = pair
    release, armed, found = Rounds._release, True, list[bool]()

    def interrupted(self: Rounds, *arguments: Any) -> bool:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt
        return release(self, *arguments)

    monkeypatch.setattr(Rounds, "_release", interrupted)
    expected = models.logits(whole)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model.model(models.IDS)
    thread = threading.Thread(
        target=lambda: found.append(torch.equal(models.logits(model), expected))
    )
    thread.start()
    thread.join()
    assert found == [True]
    model.streamload_offload.close()


@pytest.mark.usefixtures("device")
def test_a_model_that_runs_inside_of_an_expert(tmp_path: Path) -> None:
    """The experts that the call around it still needs are brought."""
    model, whole = _pair(tmp_path, "mixtral", 0.35)
    expected, inside = models.logits(whole), 0

    def hook(*_: Any) -> None:
        nonlocal inside
        if inside % 2:
            return
        inside += 1
        assert torch.equal(models.logits(model), expected)
        inside += 1

    assert model.streamload_offload.plan.residency.experts
    for layer in model.model.layers[:2]:
        layer.mlp.experts.act_fn.register_forward_hook(hook)
    with model.streamload_offload:
        assert torch.equal(models.logits(model), expected)
    assert inside


@pytest.mark.usefixtures("device")
def test_an_interrupted_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next loop runs, and the end of the ``with`` block closes it."""
    models.built("llama").bfloat16().save_pretrained(tmp_path)
    release, left = Rounds._release, 0

    def interrupted(self: Rounds, *arguments: Any) -> bool:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return release(self, *arguments)

    monkeypatch.setattr(Rounds, "_release", interrupted)
    given: dict[str, Any] = {"budget": "200kB", "device": "cpu", "layers": "model.layers.*"}
    with streamload.stream_layers(tmp_path, **given) as layers:
        assert layers.plan.residency.streams
        for at in (2, 0, 3):
            left, names = at, []
            with pytest.raises(KeyboardInterrupt) if at else nullcontext():
                for name, _ in layers:
                    names.append(name)
            assert at or {*layers.plan.residency.streams} <= {*names}
