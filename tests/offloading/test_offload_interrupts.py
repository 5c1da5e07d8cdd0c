"""What a call of an offloaded model leaves that Ctrl-C has ended, or that is inside of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import pytest

torch = needs.module("torch")
needs.module("transformers")

import offloading_models as models  # noqa: E402
from bulk_stand_in import Staged  # noqa: E402

from streamload.devices.torch import device as torch_devices  # noqa: E402
from streamload.devices.torch.tensors import STREAMED  # noqa: E402
from streamload.offloading import torch_lent, torch_modules  # noqa: E402
from streamload.offloading.completion import Reaper  # noqa: E402
from streamload.transformers import from_pretrained  # noqa: E402


@pytest.fixture(params=["mapped", "copied"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, Any]:
    """A model that streams views of its file, or copies; and the same resident."""
    if request.param == "copied":
        monkeypatch.setitem(torch_devices._WAYS, "cpu", Staged)
    models.built("llama").bfloat16().save_pretrained(tmp_path)
    whole: Any = from_pretrained(tmp_path, device="cpu", progress=False)
    budget = int(0.6 * whole.streamload_report.resident_nbytes)
    given: dict[str, Any] = {"device": "cpu", "progress": False, "threads": 2}
    return from_pretrained(tmp_path, budget=budget, offload=True, **given), whole


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
    of, armed = torch_lent._Lent.of, False

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
        monkeypatch.setattr(torch_lent._Lent, "of", interrupted)
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
