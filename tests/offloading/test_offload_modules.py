"""`streamload.offload` of modules that do more with their weights than to compute with them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offloading_models as models
import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import streamload
from streamload.errors import OffloadError, PlanInfeasibleError

_WIDTH = 48
_Compute = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class _Layer(nn.Module):
    def __init__(self, compute: _Compute) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.other = nn.Linear(_WIDTH, _WIDTH)
        self.compute, self.kept = compute, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, self.other(x))


class _Stack(nn.Module):
    """Four layers, which give what the next takes."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _frozen(build: Callable[[], nn.Module], seed: int) -> Any:
    """A model as one that streams is: torch chooses some of its kernels by `requires_grad`."""
    torch.manual_seed(seed)
    return build().eval().requires_grad_(False)


def _passes(
    build: Callable[[], nn.Module], path: Path, *inputs: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three passes of the model loaded, and of the model under its least budget."""
    models.save(_frozen(build, 0), path)
    resident, streamed = _frozen(build, 1), _frozen(build, 1)
    streamload.load_state_dict(resident, path, device="cpu")
    budget = models.least_budget(lambda: _frozen(build, 1), path)
    with torch.no_grad():
        expected = [resident(*inputs) for _ in range(3)]
        with streamload.offload(streamed, path, device="cpu", budget=budget) as offloaded:
            assert len(offloaded.plan.residency.streams) >= 2
            assert offloaded.plan.residency.slots < len(offloaded.plan.residency.streams)
            return expected, [streamed(*inputs) for _ in range(3)]


def _keeps_a_view(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.kept = layer.kept if layer.kept is not None else layer.linear.weight.data.T
    return x @ layer.kept


def _keeps_its_storage(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.kept = layer.kept if layer.kept is not None else layer.linear.weight.untyped_storage()
    found: torch.Tensor = x @ torch.empty(0).set_(layer.kept).view(_WIDTH, _WIDTH)
    return found


def _replaces(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.kept is None:
        layer.kept = layer.linear.weight = nn.Parameter(layer.linear.weight * 2)
    found: torch.Tensor = layer.linear(x)
    return found


def _replaces_data(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.kept is None:
        layer.linear.weight.data = layer.linear.weight.data * 2
        layer.kept = True
    found: torch.Tensor = layer.linear(x)
    return found


def _writes(layer: Any, x: torch.Tensor) -> torch.Tensor:
    layer.linear.weight.mul_(1.5)
    found: torch.Tensor = layer.linear(x)
    return found


def _gives_a_view(layer: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layer.linear.weight[: x.shape[1]]
    return found


def _gives_itself(layer: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = layer.linear.weight
    return found


@dataclass
class _Holder:
    value: Any


def _keeps_in(make: Callable[[torch.Tensor], Any]) -> _Compute:
    """A layer that keeps its weight itself in an object, and computes with that in later passes."""

    def compute(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.kept = layer.kept if layer.kept is not None else make(layer.linear.weight)
        found: torch.Tensor = x @ _inside(layer.kept)
        return found

    return compute


def _inside(kept: Any) -> torch.Tensor:
    while not isinstance(kept, torch.Tensor):
        if isinstance(kept, _Holder):
            kept = kept.value
        elif callable(kept):
            kept = kept()
        else:
            kept = next(iter(kept.values())) if isinstance(kept, dict) else kept[0]
    return kept


def _in_a_cycle(weight: torch.Tensor) -> Any:
    kept: list[Any] = [weight]
    kept.append(kept)
    return kept


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        pytest.param(_gives_itself, "keeps or gives it", id="gives itself"),
        *(
            pytest.param(_keeps_in(make), "keeps or gives it", id=f"keeps itself in {name}")
            for name, make in {
                "an attribute": _Holder,
                "a container": lambda weight: {"a": [(weight,)]},
                "an output": lambda weight: BaseModelOutput(last_hidden_state=weight),
                "a closure": lambda weight: lambda: weight,
                "a cycle": _in_a_cycle,
            }.items()
        ),
        (_keeps_a_view, "keeps or gives a view"),
        (_keeps_its_storage, "keeps or gives a view"),
        (_replaces, "puts another tensor in its place"),
        (_replaces_data, "puts other data in its place"),
        (_writes, "writes into it"),
        (_gives_a_view, "keeps or gives a view"),
    ],
)
def test_a_layer_that_does_not_leave_its_weights_as_they_are_is_refused(
    compute: _Compute, said: str, tmp_path: Path
) -> None:
    """In the first pass, by the weight's name; with the line that the error names it runs."""

    def build() -> nn.Module:
        return _Stack(lambda: _Layer(compute))

    path, x = models.save(_frozen(build, 0), tmp_path / "model"), torch.randn(2, 7, _WIDTH)
    resident, budget = _frozen(build, 1), models.least_budget(build, path)
    streamload.load_state_dict(resident, path, device="cpu")
    with torch.no_grad():
        expected = [resident(x) for _ in range(2)]
        model = _frozen(build, 1)
        with streamload.offload(model, path, device="cpu", budget=budget):
            for _ in range(2):  # the second pass would not see what the first did
                with pytest.raises(
                    OffloadError, match=rf'{said}.*stay="layers\.\*\.linear\.weight"'
                ):
                    model(x)
        model = _frozen(build, 1)
        stays: dict[str, Any] = {"stay": "layers.*.linear.weight", "budget": "65kB"}
        with streamload.offload(model, path, device="cpu", **stays) as offloaded:
            assert offloaded.plan.residency.streams
            assert [torch.equal(model(x), each) for each in expected] == [True, True]


def test_an_error_that_is_kept_refers_to_weights_and_is_no_reason(tmp_path: Path) -> None:
    """Notebooks keep the last: its frames have weights and views. What comes after is found."""
    behaves = ["raises"]

    def compute(layer: Any, x: torch.Tensor) -> torch.Tensor:
        weight, view = layer.linear.weight, layer.linear.weight.T
        if behaves[0] == "raises":
            raise KeyboardInterrupt
        if behaves[0] == "keeps":
            layer.kept = layer.linear.weight.view(-1)
        found: torch.Tensor = x @ view + 0 * weight.sum()
        return found

    def build() -> nn.Module:
        return _Stack(lambda: _Layer(compute))

    path, x = models.save(_frozen(build, 0), tmp_path / "model"), torch.randn(2, 7, _WIDTH)
    resident, model, budget = _frozen(build, 1), _frozen(build, 1), models.least_budget(build, path)
    streamload.load_state_dict(resident, path, device="cpu")
    with torch.no_grad(), streamload.offload(model, path, device="cpu", budget=budget):
        with pytest.raises(KeyboardInterrupt) as kept:
            model(x)
        behaves[0] = "computes"
        expected = resident(x)
        assert [torch.equal(model(x), expected) for _ in range(2)] == [True, True]
        assert kept.tb is not None
        del kept
        gc.collect()
        assert torch.equal(model(x), expected)
        behaves[0] = "keeps"
        with pytest.raises(OffloadError, match="keeps or gives a view of it"):
            model(x)


@pytest.mark.parametrize("make", [lambda w: w, lambda w: {"a": [w.detach()]}, _in_a_cycle])
def test_a_weight_that_is_kept_before_an_error_is_found(
    make: Callable[[torch.Tensor], Any], tmp_path: Path
) -> None:
    """The next pass would compute with another layer's."""

    def compute(layer: Any, x: torch.Tensor) -> torch.Tensor:
        if layer.kept is None:
            layer.kept = make(layer.linear.weight)
            raise ValueError("mine")
        found: torch.Tensor = x @ _inside(layer.kept)
        return found

    def build() -> nn.Module:
        return _Stack(lambda: _Layer(compute))

    path, x = models.save(_frozen(build, 0), tmp_path / "model"), torch.randn(2, 7, _WIDTH)
    model, budget = _frozen(build, 1), models.least_budget(build, path)
    with torch.no_grad(), streamload.offload(model, path, device="cpu", budget=budget):
        for _ in range(2):
            with pytest.raises(OffloadError, match=r'keeps it.*stay="layers\.\*\.linear\.weight"'):
                model(x)


class _Outputs(nn.Module):
    """Layers that give their weights themselves beside what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Table() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for layer in self.layers:
            output, x = layer(x)
            found.append(output)
        return x, found


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(_WIDTH, _WIDTH))
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return BaseModelOutput(hidden_states=({"table": self.table},)), self.linear(x)


def test_weights_in_outputs_are_found_in_one_pass_and_stay_with_one_hint(tmp_path: Path) -> None:
    """The error's hint names what cannot stream, and nothing that can."""
    path, x = models.save(_frozen(_Outputs, 0), tmp_path / "model"), torch.randn(2, _WIDTH)
    budget = models.least_budget(_Outputs, path)
    model = _frozen(_Outputs, 1)
    with (
        streamload.offload(model, path, device="cpu", budget=budget),
        pytest.raises(OffloadError, match=r"nor can layers\.1\.table") as refused,
    ):
        model(x)
    hint = str(refused.value).rpartition("stay=")[2]
    assert hint == '"layers.*.table"'
    model = _frozen(_Outputs, 1)
    with streamload.offload(model, path, device="cpu", budget=70_000, stay=eval(hint)) as handle:
        assert handle.plan.residency.streams
        tables = [output.hidden_states[0]["table"] for output in model(x)[1]]
        expected = _frozen(_Outputs, 0)
        wanted = [layer.table for layer in expected.layers]
        assert all(map(torch.equal, tables, wanted))
        assert torch.equal(model(x)[0], expected(x)[0])


class _Outside(nn.Module):
    """A model that uses weights of its layers outside of these, in two ways, and of one a third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(lambda own, x: own.linear(x)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + layer.other.bias
        return x @ torch.cat([self.layers[0].linear.weight, self.layers[2].linear.weight]).T


def test_weights_used_outside_of_layers_are_found_in_one_pass(tmp_path: Path) -> None:
    """A pattern where all of a kind stay; names where others of the kind can stream."""
    path, x = models.save(_frozen(_Outside, 0), tmp_path / "model"), torch.randn(2, _WIDTH)
    model, budget = _frozen(_Outside, 1), models.least_budget(_Outside, path)
    with streamload.offload(model, path, device="cpu", budget=budget) as handle:
        for _ in range(2):
            with pytest.raises(OffloadError) as refused:
                model(x)
        assert model.layers[1](x).shape == x.shape  # a layer alone can run
        with pytest.raises(OffloadError, match=r'layers\.1\.other\.bias.*stay="layers\.\*\.other'):
            model.layers[1].other.bias + 1  # outside of a pass, at once
        assert handle.report.passes == 2
    hint = eval(str(refused.value).rpartition("stay=")[2])
    assert hint == ["layers.*.other.bias", "layers.0.linear.weight", "layers.2.linear.weight"]
    model = _frozen(_Outside, 1)
    with streamload.offload(model, path, device="cpu", budget=70_000, stay=hint) as handle:
        assert handle.plan.residency.streams
        assert torch.equal(model(x), _frozen(_Outside, 0)(x))


def _keeps_a_copy(layer: Any, x: torch.Tensor) -> torch.Tensor:
    if layer.kept is None:
        layer.kept = torch.cat([layer.linear.weight, layer.linear.weight])
    return nn.functional.linear(x, layer.kept)[..., :_WIDTH]


def _keeps_it_on_the_weight(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight = layer.linear.weight
    if not hasattr(weight, "turned"):
        weight.turned = weight.data.T.clone()
    found: torch.Tensor = x @ weight.turned
    return found


def _recurrent(kind: Any) -> Any:
    """A layer with a recurrent module, which has a list of its weights beside them."""

    def compute(layer: Any, x: torch.Tensor) -> torch.Tensor:
        layer.rnn.flatten_parameters()
        found: torch.Tensor = layer.linear(layer.rnn(x)[0])
        return found

    def make() -> nn.Module:
        layer = _Layer(compute)
        layer.rnn = kind(_WIDTH, _WIDTH, batch_first=True)
        return layer

    return make


def _normed(norm: Callable[[nn.Linear], nn.Module]) -> Any:
    def make() -> nn.Module:
        layer = _Layer(lambda own, x: own.linear(x))
        layer.linear = norm(layer.linear)  # type: ignore[assignment]
        return layer

    return make


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: _Layer(_keeps_a_copy), id="a copy"),
        pytest.param(lambda: _Layer(_keeps_it_on_the_weight), id="a copy on the weight"),
        pytest.param(_recurrent(nn.LSTM), id="LSTM"),
        pytest.param(_recurrent(nn.GRU), id="GRU"),
        pytest.param(_normed(nn.utils.weight_norm), id="weight_norm"),
        pytest.param(_normed(nn.utils.parametrizations.weight_norm), id="parametrised"),
        pytest.param(_normed(nn.utils.parametrizations.orthogonal), id="orthogonal"),
    ],
)
def test_layers_that_make_weights_of_weights_give_those_of_the_model_loaded(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    x = torch.randn(2, 7, _WIDTH)
    expected, found = _passes(lambda: _Stack(make), tmp_path / "model", x)
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_padded_sequences_are_packed_as_by_the_model_loaded(tmp_path: Path) -> None:
    """`nn.TransformerEncoder` looks at its first layer, which stays; the others stream."""

    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(_WIDTH, 4, 96, batch_first=True), 4)

    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, -2:] = True
    x = torch.randn(2, 7, _WIDTH)
    expected, found = _passes(build, tmp_path / "model", x, None, mask)
    assert not expected[0][0, -2:].any()  # what packing leaves of the padding
    assert all(map(torch.equal, found, expected))


def test_a_whole_transformer_gives_what_the_model_loaded_gives(tmp_path: Path) -> None:
    """Encoder and decoder, each with attention whose parts are used without being called."""

    def build() -> nn.Module:
        return nn.Transformer(_WIDTH, 4, 3, 3, 96, batch_first=True)

    x = torch.randn(2, 7, _WIDTH)
    expected, found = _passes(build, tmp_path / "model", x, x)
    assert all(map(torch.equal, found, expected))


def test_a_view_that_was_made_before_is_refused(tmp_path: Path) -> None:
    """Of a model with values: the weight's memory cannot be given back, and the error names it."""

    def build() -> nn.Module:
        return _Stack(lambda: _Layer(_keeps_a_view))

    path, model = models.save(build(), tmp_path / "model"), build()
    model.layers[1].kept = model.layers[1].linear.weight.data.T
    with pytest.raises(OffloadError, match=r"layers\.1\.linear\.weight streams, and something"):
        streamload.offload(model, path, device="cpu", budget=40_000)


class _Stages(nn.Module):
    """A list of lists of layers, which has no ``forward`` in the middle."""

    def __init__(self, inside: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.inp = nn.Linear(4, _WIDTH)
        self.stages = nn.ModuleList(inside([_Layer(_linear) for _ in range(3)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for stage in self.stages:
            for layer in stage.children():
                x = layer(x)
        return x


def _linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer.linear(x)
    return out


def _in_module(layers: list[nn.Module]) -> nn.Module:
    module = nn.Module()
    for name, layer in zip(("first", "second", "third"), layers, strict=True):
        module.add_module(name, layer)
    return module


def _needed(call: Callable[[], Any]) -> PlanInfeasibleError:
    with pytest.raises(PlanInfeasibleError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("inside", [nn.ModuleList, _in_module])
def test_layers_in_lists_of_layers_stream_one_by_one(
    tmp_path: Path, inside: Callable[..., nn.Module]
) -> None:
    def build() -> nn.Module:
        return _Stages(inside)

    expected, found = _passes(build, tmp_path, torch.ones(1, 4))
    assert all(torch.equal(*each) for each in zip(expected, found, strict=True))
    given: dict[str, Any] = {"device": "cpu", "budget": 1000, "dtype": "checkpoint"}
    ours = _needed(lambda: streamload.offload(build(), tmp_path, **given))
    planned = _needed(lambda: streamload.plan_offload(tmp_path, **given))
    if inside is nn.ModuleList:
        assert ours.needed_nbytes == planned.needed_nbytes
        assert ours.largest[0][0] == planned.largest[0][0] == "stages.0.0"
    assert ours.needed_nbytes <= planned.needed_nbytes


def test_texts_name_the_root_module_and_scratch(tmp_path: Path) -> None:
    """A parameter of the model itself has a name; an error counts what is no weight."""

    def build() -> nn.Module:
        model = _frozen(lambda: _Stack(lambda: _Layer(_linear)), 0)
        return model.register_parameter("scale", nn.Parameter(torch.ones(8))) or model

    models.save(build(), tmp_path)
    given: dict[str, Any] = {"device": "cpu", "reader": "direct"}
    error = _needed(lambda: streamload.offload(build(), tmp_path, budget=1000, **given))
    assert error.largest[0][0] == "scratch"
    with streamload.offload(build(), tmp_path, device="cpu", budget=50_000) as offloaded:
        assert "(root)" in str(offloaded.plan)


def test_the_error_names_smaller_layers(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return _frozen(lambda: _Stack(lambda: _Layer(_linear)), 0)

    models.save(build(), tmp_path)
    given: dict[str, Any] = {"device": "cpu", "dtype": "checkpoint"}
    least = _needed(lambda: streamload.offload(build(), tmp_path, budget=1000, **given))
    assert "layers" not in str(least.would_fit)  # not even these would fit
    given["budget"] = least.needed_nbytes * 3 // 4
    for call in (
        lambda **more: streamload.offload(build(), tmp_path, **given, **more),
        lambda **more: streamload.plan_offload(tmp_path, **given, **more),
    ):
        error = _needed(call)
        (line,) = [line for line in error.would_fit if line.startswith("layers=")]
        patterns, _, _ = line.removeprefix("layers=").partition(" (")
        assert ast.literal_eval(patterns) == ["layers.*.linear", "layers.*.other"]
        call(layers=ast.literal_eval(patterns))
